"""From [teacher] to what teaches: the teacher's model or its cache, the objective, the temperature."""

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
from gramian.distill.distill_objective import DistillObjective, LossOptions
from gramian.distill.feature_switch import FeatureSwitch
from gramian.distill.loss.feature_loss import FeatureLoss
from gramian.distill.loss.temperature import Temperature, TemperatureOptions
from gramian.distill.teacher.head_proof import stream_width
from gramian.distill.teacher.language_model import check_layers, linear_of
from gramian.distill.teacher.live_teacher import LiveTeacher, shard_teacher
from gramian.distill.teacher.teacher_origin import fingerprint, read_origin
from gramian.distill.teaching import Teaching
from gramian.models.gpt import GPT
from gramian.models.huggingface import load_huggingface
from gramian.parallel.world import World
from gramian.train.config.config import Config, TeacherSection
from gramian.train.loop.precision import Numbers
from gramian.train.state.saved_run import find_checkpoint, is_run, load_run


def build_teaching(
    config: Config, world: World, numbers: Numbers, training: Windows, source: LiveTeacher | Cache | None = None
) -> Teaching:
    """The teacher of a run and the state of being taught, fresh.

    Args:
        config: of the run.
        world: this process among the others.
        numbers: the precision.
        training: the data.
        source: where it is there already.

    Raises:
        GramianError: naming the field that does not fit.
    """
    assert config.teacher is not None
    told = config.teacher
    source = source or build_source(config, world, numbers, training)
    with _named("teacher."):
        options = TemperatureOptions(
            told.temperature_kind,
            told.temperature,
            told.temperature_end,
            told.temperature_low,
            told.temperature_high,
            told.temperature_rate,
            told.temperature_free,
        )
    weight = told.feature_weight if told.features != "none" else 0.0
    return Teaching(
        source,
        Temperature(options, config.run.steps, world.device),
        FeatureSwitch(weight, told.feature_from, told.feature_tolerance),
        world,
        correlation=told.correlation,
    )


def build_objective(config: Config, model: nn.Module, source: LiveTeacher | Cache) -> DistillObjective:
    """The student and its loss.

    Args:
        config: of the run.
        model: the student, on its device, not spread yet.
        source: its teacher.
    """
    told = config.teacher
    assert told is not None
    options = LossOptions(told.kd_weight, told.ce_weight, told.direction, told.beta)
    features = None
    if told.features != "none":
        weight = linear_of(model).weight
        with _named("teacher.feature_pairs: "):
            check_layers(model, [pair[0] for pair in told.feature_pairs])
            width = stream_width(model, [pair[0] for pair in told.feature_pairs])
        features = FeatureLoss(told.features, told.feature_pairs, width, width_of(source), config.run.seed)
        features.to(device=weight.device, dtype=weight.dtype)
    return DistillObjective(model, options, features)


def build_source(config: Config, world: World, numbers: Numbers, training: Windows) -> LiveTeacher | Cache:
    """The live teacher, or its cache, which must be of this data.

    Raises:
        GramianError: naming the field that does not fit.
    """
    told = config.teacher
    assert told is not None
    if told.source == "live":
        return live_teacher(config, world, numbers, training)
    made_of = read_origin(cache_folder(config))
    if told.path and Path(told.path).is_dir() and made_of not in (None, teacher_mark(told.path)):
        raise GramianError(
            f"teacher.path: {told.path} is not, or no longer, what the cache {cache_folder(config)} was made of; expected the "
            "same weights, or gramian cache into another folder"
        )
    cache = open_cache(
        cache_folder(config),
        tokenizer_hash=training.stream.tokenizer,
        windows_digest=training.digest,
        vocabulary=training.vocabulary,
        kind=told.source,
        layers=teacher_layers(told),
    )
    with _named("teacher."):
        cache.require_temperatures(*told.temperatures)
    return cache


def live_teacher(config: Config, world: World, numbers: Numbers, training: Windows) -> LiveTeacher:
    """The teacher's model, frozen, whole or sharded.

    Raises:
        GramianError: naming the field that does not fit.
    """
    told = config.teacher
    assert told is not None
    if not told.path:
        raise GramianError("teacher.path: expected the folder of the teacher's model")
    model = load_teacher(told.path, training, config.data.length).to(device=world.device, dtype=numbers.weights)
    with _named("teacher.feature_pairs: "):
        check_layers(model, teacher_layers(told))
    if world.size > 1 and (
        told.strategy == "fsdp2" or (told.strategy == "auto" and _must_shard(config, world, numbers))
    ):
        model = shard_teacher(model)
    half = numbers.activations if numbers.activations in (torch.float16, torch.bfloat16) else None
    return LiveTeacher(model, teacher_layers(told), device=world.device, autocast=half, compile=told.compile)


def teacher_mark(path: str) -> str:
    """Of the weights that a folder holds now; nothing is loaded."""
    folder = find_checkpoint(Path(path), "teacher.path")[1].folder if is_run(path) else Path(path)
    return fingerprint(list(folder.glob("*.safetensors")))


def _must_shard(config: Config, world: World, numbers: Numbers) -> bool:
    """Whether the planner shards the teacher: where it does not fit whole beside the student."""
    if world.device.type != "cuda":
        return False
    from gramian.plan.parallel_strategy import decide
    from gramian.train.build.memory_needs import needs_of, vocabulary_of

    kind: Any = numbers.kind
    needs = needs_of(config, vocabulary_of(config.data), kind, "cuda")
    memory = torch.cuda.get_device_properties(world.device).total_memory
    return decide(needs, world.size, memory).strategy in ("fsdp2 teacher + ddp student", "fsdp2 both")


def load_teacher(path: str, training: Windows, length: int) -> nn.Module:
    """A model that reads this data: of a run's best checkpoint, or of a Hugging Face folder.

    Raises:
        GramianError: if it has another tokenizer, a smaller vocabulary or a shorter context.
    """
    vocabulary = training.vocabulary
    if not is_run(path):
        if not (Path(path) / "config.json").is_file():
            raise GramianError(
                f"teacher.path: {path} holds no model; expected the folder of a run, or of a Hugging Face model"
            )
        if training.isolate:
            raise GramianError(
                f"data.isolate: the Hugging Face model {path} does not keep documents apart; expected false with this teacher"
            )
        model = load_huggingface(path, False, vocabulary, length, 0, field="teacher.path")
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


@contextmanager
def _named(prefix: str) -> Iterator[None]:
    """What is refused here is told under the name that it has in a config."""
    try:
        yield
    except GramianError as problem:
        raise GramianError(f"{prefix}{problem}") from None


def _check_tokenizer(name: str, path: str, training: Windows) -> None:
    if load_tokenizer(name).digest != training.stream.tokenizer:
        raise GramianError(f"data.tokenizer: is not that of {path}; expected the teacher's")


def teacher_layers(told: TeacherSection) -> tuple[int, ...]:
    """Layers of the teacher that features are held to."""
    return tuple(pair[1] for pair in told.feature_pairs)


def cache_folder(config: Config) -> Path:
    """Where the cache of a config is."""
    assert config.teacher is not None
    return Path(config.teacher.cache or f"{config.run.folder.rstrip('/')}-teacher")


def cache_options(config: Config, vocabulary: int) -> CacheOptions:
    """What `gramian cache` writes.

    Args:
        config: of the run.
        vocabulary: of the data; ids that it does not have are left out.

    Raises:
        GramianError: if the config's teacher is live.
    """
    told = config.teacher
    assert told is not None
    rows = config.data.micro_batch or 8
    if told.source == "hidden":
        return CacheOptions(Hidden(told.dtype), batch=rows)
    if told.source == "topk":
        low, high = told.temperatures
        kind = TopK(min(told.k, vocabulary), told.knots, (min(1.0, low), max(5.0, high)), vocabulary)
        return CacheOptions(kind, batch=rows)
    if told.source == "sampled":
        return CacheOptions(Samples(told.samples, told.temperature, config.run.seed, vocabulary), batch=rows)
    raise GramianError('teacher.source: "live" needs no cache; expected "hidden", "topk" or "sampled"')


def width_of(source: LiveTeacher | Cache) -> int:
    """Of a teacher's residual stream."""
    if isinstance(source, LiveTeacher):
        return source.layer_width
    return source.manifest.identity.layer_width


def vocabulary_of(source: LiveTeacher | Cache) -> int:
    """Ids that a teacher has logits for; more than the tokenizer's where its head is padded."""
    if isinstance(source, LiveTeacher):
        return source.head.weight_VD.shape[0]
    return source.manifest.identity.vocabulary
