"""The configuration of a run: a TOML file and `section.key=value` overrides become one typed, checked `Config`.

A run is a function of its config. The resolved config, with all defaults, is written into the run folder. Its hash leaves out
the keys that cannot change a result (`RUN_ONLY`), so a run can be resumed with any config that computes the same numbers.
"""

import dataclasses
import difflib
import hashlib
import json
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import msgspec

from gramian.core.errors import GramianError
from gramian.data.options import DataSection
from gramian.train.config import config_checks
from gramian.train.config import config_sections as sections

RUN_ONLY = (
    ("run", "folder"), ("run", "log_every"), ("run", "observe_every"), ("run", "tensorboard"), ("run", "wandb"),
    ("run", "report"), ("data", "workers"), ("data", "prefetch"), ("data", "cache"), ("checkpoint", "snapshots"),
    ("doctor", "overfit_steps"), ("doctor", "overfit_windows"), ("teacher", "cache"), ("teacher", "strategy"),
    ("teacher", "correlation"), ("eval", "dead"), ("eval", "saturated"),
)  # fmt: skip
"""(section, key) of config keys that cannot change a run's numbers, so that the config's hash omits them.
Most keys of [checkpoint] can change them, because a rollback returns to a snapshot."""

ADDED_LATER = tuple(
    ("kfac", key)
    for key in (
        "damping_A", "damping_G", "use_eigenvalue_correction", "max_condition_number", "min_layer_size", "weight_sharing",
        "kfac_use_woodbury", "kfac_big_threshold", "kfac_auto_rho", "kfac_auto_t_max", "kfac_eps", "woodbury_dtype",
        "woodbury_store_device", "ekfac", "one_sided", "strict",
    )
) + tuple(
    ("privacy", key)
    for key in (
        "clip_function", "layer_norms", "max_draw", "noise", "bands", "unit", "max_records_per_unit", "metric",
        "max_physical_batch",
    )
) + (("kfac", "precondition"), ("data", "user"), ("data", "record"), ("data", "truncate"))  # fmt: skip
"""(section, key) of config keys that earlier versions did not have: the hash omits them while they have their default, so that
runs of those versions can be resumed."""


@dataclass(frozen=True)
class Config:
    """All sections of a run's configuration, checked against each other.

    Example:
        >>> parse_config({"run": {"steps": 200}, "optimizer": {"lr": 3e-4}}).optimizer.kind
        'adamw'
    """

    run: sections.RunSection = field(default_factory=sections.RunSection)
    model: sections.ModelSection = field(default_factory=sections.ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: sections.OptimizerSection = field(default_factory=sections.OptimizerSection)
    schedule: sections.ScheduleSection = field(default_factory=sections.ScheduleSection)
    precision: sections.PrecisionSection = field(default_factory=sections.PrecisionSection)
    compile: sections.CompileSection = field(default_factory=sections.CompileSection)
    parallel: sections.ParallelSection = field(default_factory=sections.ParallelSection)
    checkpoint: sections.CheckpointSection = field(default_factory=sections.CheckpointSection)
    guard: sections.GuardSection = field(default_factory=sections.GuardSection)
    eval: sections.EvalSection = field(default_factory=sections.EvalSection)
    doctor: sections.DoctorSection = field(default_factory=sections.DoctorSection)
    kfac: sections.KFACSection | None = None
    privacy: sections.PrivacySection | None = None
    teacher: sections.TeacherSection | None = None

    def __post_init__(self) -> None:
        """Check all sections, and replace data.tokenizer = "auto" and no kfac.update_freq by the values that they stand for.

        Raises `GramianError` for the first value that does not fit, naming its key.
        """
        for section in SECTIONS:
            if (options := getattr(self, section)) is not None:
                config_checks.check_values(section, options)
        tokenizer = config_checks.resolve_tokenizer(self.data, self.model)
        object.__setattr__(self, "data", dataclasses.replace(self.data, tokenizer=tokenizer))
        if self.kfac is not None and self.kfac.update_freq is None:
            steps = 20 if self.optimizer.kind == "kfac" else 10
            object.__setattr__(self, "kfac", dataclasses.replace(self.kfac, update_freq=steps))
        config_checks.check_model(self.model)
        config_checks.check_data(self.data, self.model, self.privacy)
        config_checks.check_run(self.run, self.schedule, self.optimizer)
        if self.privacy is not None:
            config_checks.check_privacy(self.privacy, self.data, self.run)
        if self.kfac is not None:
            config_checks.check_kfac(self.kfac, self.privacy)
        elif self.privacy is not None and self.privacy.metric == "kfac":
            raise GramianError('privacy.metric: "kfac" is that of factors; expected [kfac] with public_files')
        if self.optimizer.kind == "kfac":
            config_checks.check_kfac_optimizer(self.kfac, self.privacy, self.teacher)
        if self.teacher is not None:
            config_checks.check_teacher(self.teacher, self.kfac, self.privacy)

    @property
    def has_curvature(self) -> bool:
        """Whether the run estimates curvature: for natural gradients ([kfac]) or inside the optimizer "kfac"."""
        return self.kfac is not None or self.optimizer.kind == "kfac"

    @property
    def hash(self) -> str:
        """Hex digest of every config key that can change the run's numbers."""
        tables = dataclasses.asdict(self)
        for section, key in RUN_ONLY:
            if tables[section] is not None:
                del tables[section][key]
        for section, key in ADDED_LATER:
            if tables[section] is not None and tables[section][key] == getattr(SECTIONS[section](), key):
                del tables[section][key]
        return hashlib.blake2b(json.dumps(tables, sort_keys=True).encode(), digest_size=16).hexdigest()

    def toml(self) -> str:
        """Return the resolved config as TOML; reading it gives an equal config."""
        import tomli_w

        tables = {name: table for name, table in dataclasses.asdict(self).items() if table is not None}
        return tomli_w.dumps(
            {name: {key: value for key, value in table.items() if value is not None} for name, table in tables.items()}
        )


SECTIONS: dict[str, type] = {
    name: next(part for part in (hint, *typing.get_args(hint)) if isinstance(part, type) and part is not NoneType)
    for name, hint in typing.get_type_hints(Config).items()
}
"""{name of a config section: its dataclass}."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, then apply `section.key=value` overrides.

    Values of overrides are TOML; one that does not parse as TOML is taken as text, so quotes can be omitted.

    Raises:
        GramianError: one line that names the file or the key, and what was expected.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as problem:  # ValueError: the name contains a zero byte
        raise GramianError(
            f"{path}: cannot be read ({getattr(problem, 'strerror', problem)}); expected a TOML file"
        ) from None
    try:
        tables: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark
    except (ValueError, RecursionError) as problem:  # ValueError: bytes or syntax, or an integer of thousands of digits
        raise GramianError(f"{path}: is not TOML ({problem}); expected sections such as [run]") from None
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            expected = override_of(name.strip().lstrip("-")) or "an override such as run.steps=200"
            raise GramianError(f"{override!r}: expected {expected}")
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            raise GramianError(f"{section}: expected a section, got {table!r}")
        table[key] = _override_value(text.strip())
    return parse_config(tables)


def parse_config(tables: Mapping[str, Any]) -> Config:
    """Build a config from {section: {key: value}}; raises `GramianError` naming the first key that does not fit."""
    for section, table in tables.items():
        if section not in SECTIONS:
            raise GramianError(f"{section}: is not a section; {_suggestion(section, SECTIONS)}")
        if not isinstance(table, Mapping):
            raise GramianError(f"{section}: expected a section, got {table!r}")
        keys = [option.name for option in dataclasses.fields(SECTIONS[section])]
        for key in table:
            if key not in keys:
                raise GramianError(f"{section}.{key}: is not a key; {_suggestion(key, keys, f'{section}.')}")
    try:
        config: Config = msgspec.convert(tables, Config)
    except msgspec.ValidationError as problem:
        raise GramianError(_validation_message(str(problem), tables)) from None
    return config


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


FOREIGN_KEYS = {
    "accumulation_steps": "data.micro_batch", "base_lr": "optimizer.lr", "batch_size": "data.batch",
    "block_size": "data.length", "eval_interval": "eval.every", "eval_steps": "eval.every",
    "foreach": "optimizer.implementation", "fused": "optimizer.implementation", "grad_clip": "optimizer.max_norm",
    "gradient_accumulation_steps": "data.micro_batch", "learning_rate": "optimizer.lr", "log_interval": "run.log_every",
    "logging_steps": "run.log_every", "max_length": "data.length", "max_steps": "run.steps", "min_lr": "schedule.floor",
    "num_workers": "data.workers", "output_dir": "run.folder", "prefetch_factor": "data.prefetch",
    "save_interval": "checkpoint.every", "save_steps": "checkpoint.every", "sharding_strategy": "parallel.strategy",
    "total_steps": "run.steps", "use_orig_params": "parallel.strategy", "warmup_steps": "schedule.warmup",
    "persistent_workers": "none: they always are", "pin_memory": "none: it always is where there is a GPU",
    "use_cache": "none: a teacher's is always off",
}  # fmt: skip
"""{name of an option in other training programs: the key that it is here, or why there is none}."""


def override_of(name: str) -> str:
    """What to write as an override for an option that is named without its section or as other programs do; "" if unknown."""
    keys = [f"{section}.{name}" for section, kind in SECTIONS.items() if name in kind.__annotations__]
    found = keys or [FOREIGN_KEYS.get(name, "")]
    return " or ".join(f"{key}=…" if re.fullmatch(r"\w+\.\w+", key) else key for key in found)


def _suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    if name in FOREIGN_KEYS:
        return f"expected {FOREIGN_KEYS[name]}"
    close = difflib.get_close_matches(name, known := [*known], n=1)
    return f"did you mean {prefix}{close[0]}?" if close else f"expected one of {', '.join(known)}"


def _validation_message(problem: str, tables: Mapping[str, Any]) -> str:
    """Rewrite a message of msgspec as "section.key: expected …, got …"."""
    message, _, place = problem.partition(" - at `$.")
    place = place.rstrip("`")
    if not place:
        return problem
    section, _, key = place.partition(".")
    value = tables.get(section, {}).get(key.partition("[")[0])
    if message.startswith("Invalid enum value"):
        hint = typing.get_type_hints(SECTIONS[section], include_extras=True).get(key)
        choices = [repr(choice) for choice in _choices(hint)]
        return (
            f"{place}: expected {'an integer or' if _is_number(hint) else 'one of'} {', '.join(choices)}, got {value!r}"
        )
    message = message.replace("Number out of range", "Expected a number that fits into 64 bits")
    expected = message.partition(", got")[0].replace("`", "").replace("Expected", "expected")
    return f"{place}: {expected}, got {value!r}"


def _is_number(hint: Any) -> bool:
    """True if the type `hint` accepts integers beside other values, as `Count | Literal["auto"]` does."""
    return hint is int or any(_is_number(part) for part in typing.get_args(hint) if not isinstance(part, str))


def _choices(hint: Any) -> list[Any]:
    """All values of the `Literal` types inside the type `hint`."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return list(arguments)
    return [choice for inner in arguments for choice in _choices(inner)]
