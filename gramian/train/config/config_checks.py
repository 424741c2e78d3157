"""Checks across fields and sections of a configuration; the range of a single field is part of its type.

Each function raises a `GramianError` "section.key: what was found; expected …" for the first value that does not fit.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from gramian.core.byte_amounts import parse_bytes
from gramian.core.errors import GramianError
from gramian.core.existing_paths import is_file
from gramian.data.data_files import RECORDS
from gramian.data.options import DataSection
from gramian.data.tokenizer import holds_tokenizer
from gramian.privacy.noise.noise_strategy import is_correlated
from gramian.taps.proof.row_proof import check_proof
from gramian.train.config import config_sections as sections

KFAC_OPTIMIZER = ("update_freq", "damping", "ema_decay", "max_tokens")
"""Keys of [kfac] that the optimizer "kfac" has."""


def check_values(section: str, options: Any) -> None:
    """Raise for numbers of a section that are not finite, and for text that cannot be written to a file or used as a path."""
    for key, value in dataclasses.asdict(options).items():
        for single in value if isinstance(value, tuple) else (value,):
            if isinstance(single, float) and not math.isfinite(single):
                raise GramianError(f"{section}.{key}: expected a finite number, got {value}")
            if isinstance(single, str) and ("\0" in single or not _is_utf8(single)):
                raise GramianError(f"{section}.{key}: expected text in UTF-8 without zero bytes, got {single!r}")


def check_run(
    run: sections.RunSection, schedule: sections.ScheduleSection, optimizer: sections.OptimizerSection
) -> None:
    """Raise unless run.folder is set, warm-up is shorter than the run, and schedule.floor is at most the peak learning rate."""
    if not run.folder:
        raise GramianError("run.folder: is empty; expected a folder")
    if run.observe_every % run.log_every:
        raise GramianError(
            f"run.observe_every: expected 0, or a multiple of run.log_every ({run.log_every}), got {run.observe_every}"
        )
    if schedule.warmup >= run.steps:
        raise GramianError(f"schedule.warmup: expected less than run.steps ({run.steps}), got {schedule.warmup}")
    if schedule.floor > optimizer.lr:
        raise GramianError(f"schedule.floor: expected at most optimizer.lr ({optimizer.lr}), got {schedule.floor}")


def check_model(model: sections.ModelSection) -> None:
    """Raise if a GPT's width is not a multiple of its heads, or model.path is not set exactly for a Hugging Face model."""
    if model.kind == "gpt" and model.width % model.heads:
        raise GramianError(f"model.width: expected a multiple of model.heads ({model.heads}), got {model.width}")
    if model.kind == "huggingface" and model.path is None:
        raise GramianError("model.path: expected the folder of a Hugging Face model")
    if model.kind != "huggingface" and model.path is not None:
        raise GramianError('model.path: is for model.kind = "huggingface"; expected none')


def check_data(data: DataSection, model: sections.ModelSection, privacy: sections.PrivacySection | None = None) -> None:
    """Raise unless data.files are given exactly if data.source reads files, and stride, packing and isolation fit together.

    Users are read from JSONL records of a run whose unit of privacy they are.
    """
    if data.source == "embedded" and (data.files or data.validation_files):
        key = "files" if data.files else "validation_files"
        raise GramianError(f'data.{key}: are not read; expected data.source = "text" or another kind of files')
    if data.source != "embedded" and not data.files:
        raise GramianError(f'data.files: expected at least one for data.source = "{data.source}"')
    if data.user and (data.source not in RECORDS or privacy is None or privacy.unit != "user"):
        raise GramianError(
            f'data.user: is "{data.user}" with data.source = "{data.source}" and '
            f"{'no [privacy]' if privacy is None else f'privacy.unit = {privacy.unit!r}'}; expected it empty, or "
            'data.source = "jsonl", "parquet" or "arrow" and privacy.unit = "user"'
        )
    if data.isolate and not data.pack:
        raise GramianError("data.isolate: expected data.pack = true")
    if data.truncate and data.pack:
        raise GramianError("data.truncate: expected data.pack = false")
    if data.record != "text" and data.source not in RECORDS:
        raise GramianError(f'data.record: is "{data.record}"; expected "text" with data.source = "{data.source}"')
    if data.stride and (data.stride > data.length or not data.pack or data.isolate):
        raise GramianError(
            f"data.stride: expected at most data.length ({data.length}), with data.pack and without data.isolate, "
            f"got {data.stride}"
        )


def check_kfac(kfac: sections.KFACSection, privacy: sections.PrivacySection | None) -> None:
    """Raise if K-FAC's memory budget is 0, not bytes or beside EK-FAC, or a private run has no public files for curvature."""
    if parse_bytes("kfac.memory_budget", kfac.memory_budget) == 0:
        raise GramianError("kfac.memory_budget: expected more than 0 bytes, or none for no limit")
    if kfac.memory_budget is not None and kfac.ekfac:
        raise GramianError(
            "kfac.memory_budget: does not bound the tokens that kfac.ekfac stores in a refresh; expected one of the two"
        )
    if privacy is not None and not kfac.public_files:
        raise GramianError(
            "kfac.public_files: curvature of private data is outside the accountant; expected files of public data"
        )
    measures = privacy is not None and privacy.metric == "kfac"
    if not kfac.precondition and not measures:
        raise GramianError('kfac.precondition: false leaves nothing to do; expected true, or privacy.metric = "kfac"')
    if measures and (kfac.ekfac or kfac.damping_mode == "joint"):
        raise GramianError(
            'kfac.damping_mode: "joint" and kfac.ekfac have no metric by sides; expected "pi" or "factored" with '
            'privacy.metric = "kfac"'
        )


def check_kfac_optimizer(
    kfac: sections.KFACSection | None,
    privacy: sections.PrivacySection | None,
    teacher: sections.TeacherSection | None,
) -> None:
    """Raise for what does not go with the optimizer "kfac": [privacy], [teacher], options of natural gradients in [kfac]."""
    for section, options in (("privacy", privacy), ("teacher", teacher)):
        if options is not None:
            why = "takes its curvature from private data" if section == "privacy" else "cannot see a teacher's loss"
            raise GramianError(f'optimizer.kind: "kfac" {why}; expected "adamw" or "sgd" with [{section}]')
    if kfac is None:
        return
    for field in dataclasses.fields(kfac):
        if field.name not in KFAC_OPTIMIZER and getattr(kfac, field.name) != field.default:
            raise GramianError(
                f"kfac.{field.name}: is for natural gradients of another optimizer; "
                f'expected {", ".join(KFAC_OPTIMIZER)} alone with optimizer.kind = "kfac"'
            )


def check_privacy(privacy: sections.PrivacySection, data: DataSection, run: sections.RunSection) -> None:
    """Raise unless exactly one of noise_multiplier and target_epsilon is given, and unit, max_draw and proof are valid.

    Also raises if decisions = "public_validation" and the validation data is a part of the private data.
    """
    if (privacy.noise_multiplier is None) == (privacy.target_epsilon is None):
        raise GramianError("privacy.noise_multiplier: expected either it or privacy.target_epsilon")
    if privacy.max_draw is not None and privacy.accountant != "pld":
        raise GramianError(
            f'privacy.max_draw: has no bound in "{privacy.accountant}"; expected privacy.accountant = "pld"'
        )
    check_correlation(privacy, run)
    if privacy.unit != "window" and data.pack and not data.isolate:
        raise GramianError(
            f'privacy.unit: "{privacy.unit}" with packed windows, whose documents see each other; expected '
            "data.isolate = true, or data.pack = false"
        )
    if privacy.unit == "user" and not data.user:
        raise GramianError('data.user: is empty with privacy.unit = "user"; expected the key of a record\'s user')
    if privacy.max_records_per_unit is not None and privacy.unit == "window":
        raise GramianError(
            'privacy.max_records_per_unit: a window is one record; expected privacy.unit = "document" or "user"'
        )
    if privacy.layer_norms and privacy.clip_function != "per_layer":
        raise GramianError('privacy.layer_norms: are for each layer; expected privacy.clip_function = "per_layer"')
    if privacy.max_physical_batch and data.micro_batch:
        raise GramianError(
            f"privacy.max_physical_batch: is {privacy.max_physical_batch!r} beside data.micro_batch = {data.micro_batch}; "
            "expected one of them"
        )
    if privacy.max_physical_batch not in ("", "auto"):
        parse_bytes("privacy.max_physical_batch", privacy.max_physical_batch)
    check_proof(privacy.proof, "privacy.proof")
    if run.observe_every:
        raise GramianError("run.observe_every: gradients of private windows would have no noise; expected 0")
    if privacy.decisions == "public_validation" and data.source != "embedded" and not data.validation_files:
        raise GramianError(
            "privacy.decisions: validation data is a part of the private data; expected data.validation_files with "
            '"public_validation"'
        )


def check_correlation(privacy: sections.PrivacySection, run: sections.RunSection) -> None:
    """Raise unless privacy.bands is given for correlated noise alone, and the other options of privacy go with it."""
    correlated = is_correlated(privacy.noise)
    if correlated != (privacy.bands is not None):
        raise GramianError(
            f'privacy.bands: is {privacy.bands or "not given"} with privacy.noise = "{privacy.noise}"; expected a number with '
            '"bandmf" or "bisr", and none with "gaussian"'
        )
    if privacy.noise == "bandmf" and (privacy.bands or 0) > run.steps:
        raise GramianError(f"privacy.bands: is {privacy.bands}; expected at most run.steps ({run.steps})")
    for key, refused in (("max_draw", privacy.max_draw is not None), ("clip_function", privacy.clip_function == "adaptive"),
                         ("accountant", privacy.accountant == "gdp"), ("metric", privacy.metric == "kfac")):  # fmt: skip
        if correlated and refused:
            raise GramianError(
                f"privacy.{key}: {getattr(privacy, key)} does not go with correlated noise; expected another, or "
                'privacy.noise = "gaussian"'
            )


def check_teacher(
    teacher: sections.TeacherSection, kfac: sections.KFACSection | None, privacy: sections.PrivacySection | None
) -> None:
    """Raise if [kfac] or [privacy] is present, both loss weights are 0, or options do not fit the source of the signal."""
    for section, options in (("kfac", kfac), ("privacy", privacy)):
        if options is not None:
            raise GramianError(
                f"teacher: its loss bypasses the layers that [{section}] observes; "
                f"expected one of the sections: remove [teacher] or [{section}]"
            )
    if teacher.source == "live" and not teacher.path:
        raise GramianError(
            'teacher.path: expected the folder of a model, or teacher.source = "hidden", "topk" or "sampled"'
        )
    if not teacher.kd_weight + teacher.ce_weight:
        raise GramianError("teacher.kd_weight: is 0, and teacher.ce_weight too; expected one above 0")
    if (teacher.features == "none") != (not teacher.feature_pairs):
        raise GramianError(
            "teacher.feature_pairs: expected pairs of layers with teacher.features, and none without, "
            f"got {len(teacher.feature_pairs)}"
        )
    if teacher.source == "sampled" and (teacher.temperature_kind != "fixed" or teacher.direction != "forward"):
        raise GramianError(
            'teacher.source: samples are valid for one temperature; expected teacher.temperature_kind = "fixed" and '
            'teacher.direction = "forward"'
        )


def resolve_tokenizer(data: DataSection, model: sections.ModelSection) -> str:
    """Return the tokenizer's name or folder; "auto" is that of a Hugging Face model's folder, else "bytes".

    Raises `GramianError` if the model's folder has no tokenizer, and text has to be read.
    """
    folder = Path(model.path or "")
    if data.tokenizer != "auto":
        return data.tokenizer
    if model.kind != "huggingface" or not is_file(folder / "config.json"):  # such a folder is refused later
        return "bytes"
    if holds_tokenizer(folder):
        return str(folder)
    if data.source == "tokens":
        return "bytes"  # no text is read: the description of the token files decides
    raise GramianError(
        f'data.tokenizer: none given, and {folder} (model.path) has none; expected "bytes" or the folder of a Hugging Face '
        "tokenizer"
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: bytes of the command line that are not UTF-8
        return False
    return True
