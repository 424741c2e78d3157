"""One TOML file says what a run is: typed sections, `section.key=value` overrides, one line for what does not fit.

A run is a function of its config. The resolved config, defaults filled in, is written into the run folder; its hash leaves out
what cannot change the result (`RUN_ONLY`), so a folder is resumed by a config that computes the same numbers.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from gramian.core.byte_amounts import parse_bytes
from gramian.core.errors import GramianError

MOST = 2**31 - 1
"""A larger number is a slip of the finger, and no index of torch holds it."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class RunSection:
    """Where a run lives and how long it is."""

    folder: str = "runs/run"
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Of the weights, the data order and dropout."""
    steps: Count = 1000
    """Optimizer steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = True
    """Deterministic kernels only: a resumed run repeats itself bit for bit."""
    log_every: Count = 10
    """Steps from one line of metrics.jsonl to the next."""
    tensorboard: bool = False
    wandb: bool = False


@dataclass(frozen=True)
class ModelSection:
    """The reference GPT, Goose, or a Hugging Face causal language model from a folder."""

    kind: Literal["gpt", "goose", "huggingface"] = "gpt"
    path: str | None = None
    """Of a Hugging Face model folder."""
    fresh: bool = False
    """Take the folder's config alone and draw new weights."""
    layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4
    width: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 128
    heads: Count = 4
    """Of the GPT."""
    spikes: bool = True
    """Of Goose; False: its dense twin."""
    tied: bool = False
    dropout: Share = 0.0


@dataclass(frozen=True)
class DataSection:
    """What is read, and how it is cut into windows."""

    source: Literal["embedded", "text", "jsonl", "tokens"] = "embedded"
    files: tuple[str, ...] = ()
    """Text, JSONL or token files, or folders of them."""
    validation_files: tuple[str, ...] = ()
    """None: every twentieth document validates, chosen by its hash."""
    field: str = "text"
    """Of a JSONL line."""
    tokenizer: str = "auto"
    """"bytes", or the folder of a Hugging Face tokenizer; "auto": that of model.path for a Hugging Face model, else "bytes"."""
    limit_bytes: Count = 8_000_000
    """Of the embedded corpus."""
    length: Count = 128
    """Tokens of a window that are predicted."""
    stride: Natural = 0
    """Tokens from the beginning of a training window to that of the next; 0: data.length, so that none is predicted twice."""
    pack: bool = True
    """Documents end to end, cut into windows; False: a window holds one document, or a part of one, padded."""
    isolate: bool = False
    """Packed documents do not see each other (GPT and Goose)."""
    batch: Count = 16
    """Windows of an optimizer step, over all processes."""
    micro_batch: Natural = 0
    """Most windows of one backward on a process; 0: as many as there are."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 4
    prefetch: Count = 2


@dataclass(frozen=True)
class OptimizerSection:
    """The step."""

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Positive = 1e-8
    momentum: Share = 0.0
    weight_decay: NotNegative = 0.1
    """Of matrices; biases and norms have none."""
    max_norm: NotNegative = 1.0
    """Longer gradients are scaled down to it; 0: none are."""
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the steps."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup: Natural = 50
    floor: NotNegative = 0.0
    """Learning rate of the last step."""
    decay: Natural = 0
    """Steps of the decay of "wsd"; 0: a fifth of them."""


@dataclass(frozen=True)
class PrecisionSection:
    """In which numbers is computed."""

    kind: Literal["auto", "bf16", "fp16", "fp32", "fp64", "fp8"] = "auto"
    """bf16 and fp16: float32 weights under autocast; "auto": bf16 from Ampere on, fp16 before, fp32 on a CPU."""
    tf32: bool = True
    """Of float32 matrix products on a GPU."""


@dataclass(frozen=True)
class CompileSection:
    """`torch.compile`."""

    mode: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"


@dataclass(frozen=True)
class ParallelSection:
    """How several processes share the work, and what they recompute."""

    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    checkpoint_blocks: Natural = 0
    """Recompute activations in the backward, in segments of so many blocks; 0: keep them."""


@dataclass(frozen=True)
class CheckpointSection:
    """The state in memory and on disk."""

    snapshot_every: Count = 20
    """Steps from one copy of the state to the next; a rollback goes to such a one."""
    every: Count = 200
    """Steps from one written checkpoint to the next, rounded up to a snapshot."""
    keep: Count = 2
    """Newest ones that are kept, beside the best."""
    snapshots: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 3
    """Copies of the state in host memory that a rollback can go to, one more while it is written; fewer if these do not fit."""


@dataclass(frozen=True)
class GuardSection:
    """What counts as a fault, and what is done about it."""

    on: bool = True
    window: Count = 50
    """Steps that medians are taken over."""
    spike_deviations: Positive = 6.0
    """A loss above median + max(so many robust deviations, spike_nats) is high; two of three are a spike."""
    spike_nats: Positive = 0.5
    gradient_factor: Positive = 10.0
    """A gradient so many times longer than the median is a fault."""
    halvings: Count = 3
    """Halvings of the loss scale within the window that are a fault."""
    lr_factor: Share = 0.5
    """The learning rate after a rollback."""
    lr_return: Natural = 200
    """Steps in which it returns, linearly."""
    max_rollbacks: Natural = 3
    """Within 1000 steps; one more stops the run."""
    clip_share: Share = 0.1
    """More clipped steps than that in a window advise a lower learning rate."""


@dataclass(frozen=True)
class EvalSection:
    """Validation."""

    every: Count | Literal["auto"] = 300
    """Steps; "auto" keeps it under 5 % of the time."""
    windows: Count = 64
    dead: Share = 0.05
    """Goose: a larger share of channels that never fire is told."""
    saturated: Share = 0.1
    """Goose: of channels that always do."""


@dataclass(frozen=True)
class KFACSection:
    """Natural gradients: options of `KFACNaturalGradient` and of the step."""

    update_freq: Count = 10
    damping: Positive | None = None
    """None: the library's default."""
    ema_decay: Share | None = None
    damping_mode: Literal["pi", "factored", "joint"] = "pi"
    kfac_policy: Literal["all", "auto", "hybrid", "small_only"] | None = None
    max_tokens: Count | None = None
    kfac_true_fisher_head: bool = False
    kl_clip: Positive | None = None
    memory_budget: int | str | None = None
    """Most bytes that curvature holds on a device, or "8GB"; None: no limit."""
    kfac_distributed_reduce: Literal["gram", "gather", "dense"] = "gram"
    """How several processes join what each of them has seen."""
    public_files: tuple[str, ...] = ()
    """With [privacy]: where curvature data comes from."""


@dataclass(frozen=True)
class PrivacySection:
    """DP-SGD: options of `PrivacyEngine`. The unit of privacy is one window."""

    noise_multiplier: NotNegative | None = None
    target_epsilon: Positive | None = None
    """In place of noise_multiplier: the least noise that spends it in all steps."""
    delta: Positive = 1e-5
    max_grad_norm: Positive = 1.0
    accountant: Literal["prv", "rdp", "gdp"] = "prv"
    clipping: Literal["auto", "bookkeeping", "keep", "two_pass"] = "auto"
    proof: int | str = "auto"
    """Row proof before the first step, and one run of it again on one step in 1000, or in so many; "off": none, recorded."""
    decisions: Literal["noised", "public_validation", "raw"] = "noised"
    """What decides on rollbacks, the end of a run and the best checkpoint: figures with noise; also the validation loss, where
    the user says that its data is public; or any figure, which leaves ε not valid."""
    insecure_reproducible: bool = False
    """The key follows from run.seed: for tests, no privacy."""


@dataclass(frozen=True)
class TeacherSection:
    """Distillation: whose signal, how it is read, and the loss."""

    path: str = ""
    """Folder of a run of gramian, or of a Hugging Face causal language model."""
    source: Literal["live", "hidden", "topk", "sampled"] = "live"
    """The model beside the student, or a cache that `gramian cache` has written."""
    cache: str = ""
    """Folder of the cache; "": beside the run, with "-teacher" behind its name."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of hidden states in a cache; "auto": bf16 of a teacher in bf16, else fp16."""
    k: Count = 64
    """Largest logits of a token that a "topk" cache keeps."""
    knots: Annotated[int, msgspec.Meta(ge=2)] = 6
    """Of its tail curve."""
    samples: Count = 16
    """Draws for a token of a "sampled" cache."""
    strategy: Literal["auto", "whole", "fsdp2"] = "auto"
    """A live teacher on every process, or sharded over them; "auto": as the planner finds."""
    compile: bool = False
    kd_weight: NotNegative = 1.0
    ce_weight: NotNegative = 0.5
    direction: Literal["forward", "reverse", "jsd"] = "forward"
    beta: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Of "jsd": 0 is forward, 1 is reverse."""
    temperature: Positive = 2.0
    """At the first step."""
    temperature_kind: Literal["fixed", "schedule", "learnable", "adversarial"] = "fixed"
    temperature_end: Positive = 1.0
    """Of a schedule, at the last step."""
    temperature_low: Positive = 1.0
    temperature_high: Positive = 5.0
    """Bounds of one that is learned."""
    temperature_rate: Positive = 0.1
    """Learning rate of one that is learned: plain gradient steps, no decay, no clipping."""
    temperature_free: Share = 0.2
    """Share of the steps before an adversary begins."""
    features: Literal["none", "cka", "increments", "hidden"] = "none"
    """A loss on layers beside that on logits."""
    feature_pairs: tuple[tuple[Natural, Natural], ...] = ()
    """Layers of student and teacher: 0 is the embedding, l is after block l."""
    feature_weight: NotNegative = 0.01
    feature_from: Natural = 0
    """First step with it."""
    feature_tolerance: Positive = 0.1
    """It ends if the validation perplexity rises by more than that share of what it was before."""
    correlation: Annotated[float, msgspec.Meta(ge=-1, le=1)] = 0.9
    """Of the targets' log-probabilities with the teacher's: an evaluation below it is told."""

    @property
    def temperatures(self) -> tuple[float, float]:
        """Where T may go."""
        if self.temperature_kind in ("learnable", "adversarial"):
            return self.temperature_low, self.temperature_high
        ends = (self.temperature, self.temperature_end if self.temperature_kind == "schedule" else self.temperature)
        return min(ends), max(ends)


@dataclass(frozen=True)
class DoctorSection:
    """The checks before a run."""

    overfit_steps: Count = 200
    overfit_windows: Count = 16


@dataclass(frozen=True)
class Config:
    """All sections."""

    run: RunSection = dataclasses.field(default_factory=RunSection)
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    schedule: ScheduleSection = dataclasses.field(default_factory=ScheduleSection)
    precision: PrecisionSection = dataclasses.field(default_factory=PrecisionSection)
    compile: CompileSection = dataclasses.field(default_factory=CompileSection)
    parallel: ParallelSection = dataclasses.field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    guard: GuardSection = dataclasses.field(default_factory=GuardSection)
    eval: EvalSection = dataclasses.field(default_factory=EvalSection)
    doctor: DoctorSection = dataclasses.field(default_factory=DoctorSection)
    kfac: KFACSection | None = None
    privacy: PrivacySection | None = None
    teacher: TeacherSection | None = None

    def __post_init__(self) -> None:
        """Refuse what single fields cannot know.

        Raises:
            GramianError: naming the field.
        """
        for section, told in dataclasses.asdict(self).items():
            for key, value in (told or {}).items():
                _refuse_odd(f"{section}.{key}", value)
        if not self.run.folder:
            raise GramianError("run.folder: is empty; expected a folder")
        model, schedule, privacy = self.model, self.schedule, self.privacy
        data = dataclasses.replace(self.data, tokenizer=_tokenizer(model, self.data))
        object.__setattr__(self, "data", data)
        if self.precision.kind == "fp8":
            raise GramianError("precision.kind: fp8 is not available; expected auto, bf16, fp16, fp32 or fp64")
        if model.kind == "gpt" and model.width % model.heads:
            raise GramianError(f"model.width: expected a multiple of model.heads ({model.heads}), got {model.width}")
        if model.kind == "huggingface" and model.path is None:
            raise GramianError("model.path: expected the folder of a Hugging Face model")
        if model.kind != "huggingface" and model.path is not None:
            raise GramianError('model.path: is for model.kind = "huggingface"; expected none')
        if data.source == "embedded" and (data.files or data.validation_files):
            raise GramianError('data.files: are not read; expected data.source = "text", "jsonl" or "tokens"')
        if data.source != "embedded" and not data.files:
            raise GramianError(f'data.files: expected at least one for data.source = "{data.source}"')
        if data.isolate and (not data.pack or model.kind == "huggingface"):
            raise GramianError('data.isolate: expected data.pack = true and model.kind = "gpt" or "goose"')
        if data.stride and (data.stride > data.length or not data.pack or data.isolate):
            raise GramianError(
                f"data.stride: expected at most data.length ({data.length}), with data.pack and without data.isolate, "
                f"got {data.stride}"
            )
        if schedule.warmup >= self.run.steps:
            raise GramianError(
                f"schedule.warmup: expected less than run.steps ({self.run.steps}), got {schedule.warmup}"
            )
        if schedule.floor > self.optimizer.lr:
            raise GramianError(
                f"schedule.floor: expected at most optimizer.lr ({self.optimizer.lr}), got {schedule.floor}"
            )
        if self.kfac is not None and parse_bytes("kfac.memory_budget", self.kfac.memory_budget) == 0:
            raise GramianError("kfac.memory_budget: expected more than 0 bytes, or none for no limit")
        if privacy is not None:
            if (privacy.noise_multiplier is None) == (privacy.target_epsilon is None):
                raise GramianError("privacy.noise_multiplier: expected either it or privacy.target_epsilon")
            from gramian.taps.proof.row_proof import check_proof

            check_proof(privacy.proof, "privacy.proof")
            if privacy.decisions == "public_validation" and data.source != "embedded" and not data.validation_files:
                raise GramianError(
                    "privacy.decisions: validation data is a part of the private data; expected data.validation_files with "
                    '"public_validation"'
                )
            if self.kfac is not None and not self.kfac.public_files:
                raise GramianError(
                    "kfac.public_files: curvature of private data is outside the accountant; expected files of public data"
                )
        if self.teacher is not None:
            self._check_teacher(self.teacher)

    def _check_teacher(self, teacher: TeacherSection) -> None:
        for section in ("kfac", "privacy"):
            if getattr(self, section) is not None:
                raise GramianError(
                    f"teacher: its loss goes past the layers that [{section}] looks at; expected only one of both sections"
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
                'teacher.source: samples hold at one temperature; expected teacher.temperature_kind = "fixed" and '
                'teacher.direction = "forward"'
            )

    @property
    def hash(self) -> str:
        """Hex digest of everything that decides the numbers of a run."""
        told = dataclasses.asdict(self)
        for section, key in RUN_ONLY:
            if told[section] is not None:
                del told[section][key]
        return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()

    def toml(self) -> str:
        """The resolved config; reading it gives this config again."""
        import tomli_w

        told = dataclasses.asdict(self)
        sections = {name: section for name, section in told.items() if section is not None}
        return tomli_w.dumps(
            {
                name: {key: value for key, value in section.items() if value is not None}
                for name, section in sections.items()
            }
        )


RUN_ONLY = (
    ("run", "folder"),
    ("run", "log_every"),
    ("run", "tensorboard"),
    ("run", "wandb"),
    ("data", "workers"),
    ("data", "prefetch"),
    ("checkpoint", "snapshots"),
    ("doctor", "overfit_steps"),
    ("doctor", "overfit_windows"),
    ("teacher", "cache"),
    ("teacher", "strategy"),
    ("teacher", "correlation"),
    ("eval", "dead"),
    ("eval", "saturated"),
)
"""Keys that cannot change a run's numbers. Most of [checkpoint] can: they say where a rollback goes."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, then apply `section.key=value` overrides.

    Args:
        path: of the file.
        overrides: values in TOML; what is no TOML is taken as text, so quotes may be left out.

    Raises:
        GramianError: one line that names the file or the key and what would be accepted.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as problem:  # ValueError: of a name that holds a zero byte
        raise GramianError(
            f"{path}: cannot be read ({getattr(problem, 'strerror', problem)}); expected a TOML file"
        ) from None
    try:
        told: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))  # editors of some systems write a mark first
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise GramianError(f"{path}: is no TOML ({problem}); expected sections such as [run]") from None
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, field = key.strip().partition(".")
        if not (equals and dot and section and field):
            raise GramianError(f"{override!r}: expected an override such as run.steps=200")
        table = told.setdefault(section, {})
        if not isinstance(table, dict):
            raise GramianError(f"{section}: expected a section, got {table!r}")
        table[field] = _value(text.strip())
    return parse_config(told)


def parse_config(told: Mapping[str, Any]) -> Config:
    """The config that nested dictionaries describe.

    Raises:
        GramianError: one line that names the key and what would be accepted.
    """
    sections = {field.name: field for field in dataclasses.fields(Config)}
    for section, table in told.items():
        if section not in sections:
            raise GramianError(f"{section}: is no section{_nearest(section, sections)}")
        if not isinstance(table, Mapping):
            raise GramianError(f"{section}: expected a section, got {table!r}")
        keys = [field.name for field in dataclasses.fields(SECTIONS[section])]
        for key in table:
            if key not in keys:
                raise GramianError(f"{section}.{key}: is no key{_nearest(key, keys, f'{section}.')}")
    try:
        config: Config = msgspec.convert(told, Config)
    except msgspec.ValidationError as problem:
        raise GramianError(_told(str(problem), told)) from None
    return config


SECTIONS: dict[str, type] = {
    "run": RunSection, "model": ModelSection, "data": DataSection, "optimizer": OptimizerSection,
    "schedule": ScheduleSection, "precision": PrecisionSection, "compile": CompileSection, "parallel": ParallelSection,
    "checkpoint": CheckpointSection, "guard": GuardSection, "eval": EvalSection, "doctor": DoctorSection,
    "kfac": KFACSection, "privacy": PrivacySection, "teacher": TeacherSection,
}  # fmt: skip


def _tokenizer(model: ModelSection, data: DataSection) -> str:
    """What "auto" means: the text of a Hugging Face model is never cut into bytes unless the config says so.

    Raises:
        GramianError: if the model's folder holds no tokenizer, and text has to be read.
    """
    folder = Path(model.path or "")
    if data.tokenizer != "auto":
        return data.tokenizer
    if (
        model.kind != "huggingface" or not (folder / "config.json").is_file()
    ):  # a folder that is no model is refused as such
        return "bytes"
    from gramian.data.tokenizer import holds_tokenizer

    if holds_tokenizer(folder):
        return str(folder)
    if data.source == "tokens":
        return "bytes"  # no text is read: what is said of the token files decides
    raise GramianError(
        f'data.tokenizer: none given, and {folder} (model.path) holds none; expected "bytes" or the folder of a Hugging Face '
        "tokenizer"
    )


def _value(text: str) -> Any:
    try:
        told = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return told["value"] if len(told) == 1 else text


def _refuse_odd(place: str, value: Any) -> None:
    """Refuse numbers that are none, and text that no file can be named or written with."""
    for single in value if isinstance(value, tuple) else (value,):
        if isinstance(single, float) and not math.isfinite(single):
            raise GramianError(f"{place}: expected a finite number, got {value}")
        if isinstance(single, str) and ("\0" in single or not single.isascii() and not _encodable(single)):
            raise GramianError(f"{place}: expected text in UTF-8 without zero bytes, got {single!r}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: bytes of the command line that are no UTF-8
        return False
    return True


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; expected one of {', '.join(known)}"


def _told(problem: str, told: Mapping[str, Any]) -> str:
    """The library's message as "section.key: expected …, got …"."""
    message, _, place = problem.partition(" - at `$.")
    place = place.rstrip("`")
    if not place:
        return problem
    section, _, key = place.partition(".")
    got = told.get(section, {}).get(key.partition("[")[0])
    if message.startswith("Invalid enum value"):
        hints = {field.name: field.type for field in dataclasses.fields(SECTIONS[section])}
        choices = [repr(choice) for choice in _literals(hints.get(key))]
        return f"{place}: expected one of {', '.join(choices)}, got {got!r}"
    expected = message.partition(", got")[0].replace("`", "").replace("Expected", "expected")
    return f"{place}: {expected}, got {got!r}"


def _literals(hint: Any) -> list[Any]:
    import typing

    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return [choice for inner in typing.get_args(hint) for choice in _literals(inner)]
