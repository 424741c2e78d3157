"""Build the teacher of a config: its live model or its cache, the student's objective, and the temperature."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.data import Windows, load_tokenizer
from gramian.distill.cache.builder import CacheOptions
from gramian.distill.cache.hidden_cache import Hidden
from gramian.distill.cache.reader import Cache, open_cache
from gramian.distill.cache.sampled_cache import Samples
from gramian.distill.cache.topk_cache import TopK
from gramian.distill.distill_objective import DistillObjective
from gramian.distill.feature_switch import FeatureSwitch
from gramian.distill.loss.feature_loss import FeatureLoss
from gramian.distill.loss.temperature import Temperature, TemperatureOptions
from gramian.distill.teacher.head_proof import stream_width
from gramian.distill.teacher.language_model import check_layers, linear_of
from gramian.distill.teacher.live_teacher import LiveTeacher, shard_teacher
from gramian.distill.teacher.teacher_origin import fingerprint, read_origin
from gramian.distill.teaching import Teaching
from gramian.kernels.distillation.distill_rows import RowObjective
from gramian.models.gpt import GPT
from gramian.models.huggingface import load_huggingface
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.config.config import Config
from gramian.train.config.config_sections import TeacherSection
from gramian.train.loop.precision import Precision
from gramian.train.state.saved_run import find_checkpoint, is_run, load_run


def build_teaching(
    config: Config, grid: ProcessGrid, numbers: Precision, training: Windows, source: LiveTeacher | Cache | None = None
) -> Teaching:
    """Build the teacher, its temperature and its feature switch for a distillation run.

    `source` is the live teacher or cache to use; None: it is built from the config.
    """
    options = _teacher_options(config)
    source = source or build_source(config, grid, numbers, training)
    with _error_prefix("teacher."):
        temperature = TemperatureOptions(
            options.temperature_kind,
            options.temperature,
            options.temperature_end,
            options.temperature_low,
            options.temperature_high,
            options.temperature_rate,
            options.temperature_free,
        )
    weight = options.feature_weight if options.features != "none" else 0.0
    return Teaching(
        source,
        Temperature(temperature, config.run.steps, grid.device),
        FeatureSwitch(weight, options.feature_from, options.feature_tolerance),
        grid,
        correlation=options.correlation,
    )


def build_objective(config: Config, model: nn.Module, source: LiveTeacher | Cache) -> DistillObjective:
    """Build the distillation loss around a student `model` that is on its device and not yet distributed over processes."""
    options = _teacher_options(config)
    loss = RowObjective(options.direction, options.beta, options.kd_weight, options.ce_weight)
    features = None
    if options.features != "none":
        weight = linear_of(model).weight
        layers = [pair[0] for pair in options.feature_pairs]
        with _error_prefix("teacher.feature_pairs: "):
            check_layers(model, layers)
            width = stream_width(model, layers)
        features = FeatureLoss(options.features, options.feature_pairs, width, source.layer_width, config.run.seed)
        features.to(device=weight.device, dtype=weight.dtype)
    return DistillObjective(model, loss, features)


def build_source(config: Config, grid: ProcessGrid, numbers: Precision, training: Windows) -> LiveTeacher | Cache:
    """Load the live teacher, or open its cache; raises a GramianError if the cache is of other training data or weights."""
    options = _teacher_options(config)
    if options.source == "live":
        return live_teacher(config, grid, numbers, training)
    folder = cache_folder(config)
    origin = read_origin(folder)
    if options.path and Path(options.path).is_dir() and origin not in (None, teacher_fingerprint(options.path)):
        raise GramianError(
            f"teacher.path: {options.path} is not, or no longer, what the cache {folder} was made of; expected the "
            "same weights, or gramian cache into another folder"
        )
    try:
        cache = open_cache(
            folder,
            tokenizer_hash=training.stream.tokenizer,
            windows_digest=training.digest,
            vocabulary=training.vocabulary,
            kind=options.source,
            layers=options.teacher_layers,
        )
    except GramianError as problem:
        raise GramianError(f"teacher.cache: {str(problem).removeprefix('cache: ')}") from None
    with _error_prefix("teacher."):
        cache.require_temperatures(*options.temperatures)
    return cache


def live_teacher(config: Config, grid: ProcessGrid, numbers: Precision, training: Windows) -> LiveTeacher:
    """Load the teacher's model, frozen: a copy on every process, or sharded by FSDP2 if the config or its size requires it."""
    options = _teacher_options(config)
    if not options.path:
        raise GramianError("teacher.path: expected the folder of the teacher's model")
    model = load_teacher(options.path, training, config.data.length).to(device=grid.device, dtype=numbers.weights)
    layers = options.teacher_layers
    with _error_prefix("teacher.feature_pairs: "):
        check_layers(model, layers)
    automatic = options.strategy == "auto" and grid.size > 1 and _must_shard(config, grid, numbers)
    if grid.size > 1 and (options.strategy == "fsdp2" or automatic):
        model = shard_teacher(model)
    half = numbers.activations if numbers.activations in (torch.float16, torch.bfloat16) else None
    return LiveTeacher(model, layers, device=grid.device, autocast=half, compile=options.compile)


def teacher_fingerprint(path: str) -> str:
    """Return the fingerprint of the teacher's weight files in a model or run folder, without loading them."""
    folder = find_checkpoint(Path(path), "teacher.path")[1].folder if is_run(path) else Path(path)
    return fingerprint(list(folder.glob("*.safetensors")))


def _must_shard(config: Config, grid: ProcessGrid, numbers: Precision) -> bool:
    """Return whether the memory planner shards the teacher because a full copy does not fit on a GPU beside the student."""
    if grid.device.type != "cuda":
        return False
    from gramian.plan.parallel_strategy import decide
    from gramian.train.build.memory_needs import needs_of, vocabulary_of

    kind: Any = numbers.kind
    needs = needs_of(config, vocabulary_of(config.data), kind, "cuda")
    memory = torch.cuda.get_device_properties(grid.device).total_memory
    return decide(needs, grid.size, memory).strategy in ("fsdp2 teacher + ddp student", "fsdp2 both")


def load_teacher(path: str, training: Windows, length: int) -> nn.Module:
    """Load a teacher model for the training data from a run's best checkpoint or from a Hugging Face folder.

    Raises `GramianError` if it has another tokenizer, a smaller vocabulary or a shorter context.
    """
    vocabulary = training.vocabulary
    if not is_run(path):
        if not (Path(path) / "config.json").is_file():
            raise GramianError(
                f"teacher.path: {path} holds no model; expected the folder of a run, or of a Hugging Face model"
            )
        model = load_huggingface(path, False, vocabulary, length, 0, "teacher.path", isolate=training.isolate)
        if (Path(path) / "tokenizer.json").is_file():
            _check_tokenizer(path, path, training)
        return model
    saved = load_run(path, "teacher.path")
    _check_tokenizer(saved.config.data.tokenizer, path, training)
    rows = linear_of(saved.model).weight.shape[0]
    if rows < vocabulary:
        raise GramianError(
            f"teacher.path: its vocabulary of {rows} is smaller than the tokenizer's {vocabulary}; expected the same tokenizer"
        )
    if isinstance(saved.model, GPT) and saved.model.config.context < length:
        context = saved.model.config.context
        raise GramianError(f"data.length: expected at most the teacher's context of {context}, got {length}")
    return saved.model


def _teacher_options(config: Config) -> TeacherSection:
    assert config.teacher is not None
    return config.teacher


@contextmanager
def _error_prefix(prefix: str) -> Iterator[None]:
    """Context manager that puts the config key `prefix` in front of the message of a `GramianError`."""
    try:
        yield
    except GramianError as problem:
        raise GramianError(f"{prefix}{problem}") from None


def _check_tokenizer(name: str, path: str, training: Windows) -> None:
    own = training.stream.tokenizer.partition("/")[0]  # of chats, the hash of the template follows
    if load_tokenizer(name).digest != own:
        raise GramianError(f"data.tokenizer: is not that of {path}; expected the teacher's")


def cache_folder(config: Config) -> Path:
    """Return the folder of a config's teacher cache: teacher.cache, or the run folder's name with "-teacher"."""
    return Path(_teacher_options(config).cache or f"{config.run.folder.rstrip('/')}-teacher")


def cache_options(config: Config, vocabulary: int) -> CacheOptions:
    """Return what `gramian cache` writes for a config: kind of cache, and windows per forward; raises for a live teacher.

    Ids beyond `vocabulary` are left out of "topk" and "sampled" caches.
    """
    options, rows = _teacher_options(config), config.data.micro_batch or 8
    if options.source == "hidden":
        return CacheOptions(Hidden(options.dtype), batch=rows)
    if options.source == "topk":
        low, high = options.temperatures
        kind = TopK(min(options.k, vocabulary), options.knots, (min(1.0, low), max(5.0, high)), vocabulary)
        return CacheOptions(kind, batch=rows)
    if options.source == "sampled":
        return CacheOptions(Samples(options.samples, options.temperature, config.run.seed, vocabulary), batch=rows)
    raise GramianError('teacher.source: "live" needs no cache; expected "hidden", "topk" or "sampled"')
