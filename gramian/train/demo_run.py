"""The demo's training run: a small GPT on the embedded corpus, within a time budget, observed every few steps.

The clock decides one integer only: after how many steps the learning rate starts to fall (`DemoResult.hold_steps`).
Given that integer the run is a function of the config, so writing it into `DemoConfig.hold_steps` repeats the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.models.gpt import GPT, GPTConfig, generate
from gramian.train.corpus import Corpus, batch
from gramian.train.demo_observation import (
    GradientNoise,
    Observation,
    ObservationReport,
    Observer,
    measure_noise,
    observe_backward,
    summarise,
)

# Share of the time budget that trains; the rest measures the gradient noise at the final weights.
TRAINING_FRACTION = 0.85
# Share of the training time (and of the steps) before the learning rate falls to zero.
HOLD_FRACTION = 0.6
# A machine that slows down while the learning rate falls may overrun by this factor; then training stops.
OVERRUN_LIMIT = 1.5
VALIDATION_BATCHES = 8
NOISE_SEQUENCES = 512
SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 200


@dataclass(frozen=True)
class DemoConfig:
    """What the demo trains, and for how long.

    Attributes:
        seconds: Time budget of training, validation and the measurement of the gradient noise.
        seed: Of the weights, the data order and the sample.
        model: Shape of the GPT; its vocabulary is the 256 bytes.
        batch_size: Sequences per step.
        peak_learning_rate: Reached after `warmup_steps`.
        warmup_steps: Steps of linear warm-up.
        weight_decay: Of AdamW, on matrices only.
        max_gradient_norm: Longer gradients are scaled down to it.
        observe_every: Steps from one observed step to the next; the first and the last step are observed too.
        hold_steps: Steps before the learning rate falls; None lets `seconds` decide.
    """

    seconds: float = 60.0
    seed: int = 0
    model: GPTConfig = field(default_factory=GPTConfig)
    batch_size: int = 8
    peak_learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    observe_every: int = 20
    hold_steps: int | None = None


@dataclass(frozen=True)
class Progress:
    """Where training stands after a step; `fraction` is of its time, or of the steps once they are fixed."""

    step: int
    fraction: float
    loss: float
    validation_loss: float
    tokens_per_second: float
    elapsed: float


@dataclass(frozen=True)
class DemoResult:
    """All numbers of a run.

    Attributes:
        config: What was asked for.
        corpus_digest: Hash of the text.
        parameters: Scalars in the model.
        hold_steps: Steps before the learning rate fell.
        steps: Steps in all.
        stopped_early: Whether the time ran out before the learning rate reached zero.
        tokens: Bytes trained on.
        seconds: Wall time of training, validation and the noise measurement.
        tokens_per_second: Of the training steps alone.
        losses: Training loss of every step, nats per byte.
        validation: (steps done, validation loss) pairs, the first before training and the last after it.
        observations: Summary of the observed steps.
        noise: Gradient noise at the final weights.
        sample: Text that the trained model wrote.
    """

    config: DemoConfig
    corpus_digest: str
    parameters: int
    hold_steps: int
    steps: int
    stopped_early: bool
    tokens: int
    seconds: float
    tokens_per_second: float
    losses: tuple[float, ...]
    validation: tuple[tuple[int, float], ...]
    observations: ObservationReport
    noise: GradientNoise
    sample: str

    @property
    def validation_loss(self) -> float:
        """Validation loss after the last step, in nats per byte."""
        return self.validation[-1][1]

    @property
    def validation_bits_per_byte(self) -> float:
        """Validation loss after the last step, in bits per byte."""
        return self.validation_loss / math.log(2.0)


def run_demo(
    config: DemoConfig,
    corpus: Corpus,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    observer: Observer = observe_backward,
) -> DemoResult:
    """Train, validate, observe and sample.

    Args:
        config: What to train.
        corpus: Bytes to train and validate on.
        on_progress: Called after every step.
        observer: Runs an observed backward; see `observe_backward`.

    Raises:
        FloatingPointError: If the loss stops being finite.
    """
    model = GPT(config.model, seed=config.seed)
    optimizer = _make_optimizer(model, config)
    training_budget = TRAINING_FRACTION * config.seconds
    started = time.perf_counter()
    validation = [(0, _validation_loss(model, corpus, config))]
    losses: list[float] = []
    observations: list[tuple[int, Observation]] = []
    plain_seconds: list[float] = []
    observed_seconds: list[float] = []
    training_seconds = 0.0
    hold_steps = config.hold_steps
    step = 0
    stopped_early = False
    while True:
        elapsed = time.perf_counter() - started
        if hold_steps is None and step >= 1 and elapsed >= HOLD_FRACTION * training_budget:
            hold_steps = step
        total = None if hold_steps is None else _total_steps(hold_steps)
        if total is not None and step >= total:
            break
        if config.hold_steps is None and elapsed > OVERRUN_LIMIT * training_budget and step >= 2:
            stopped_early = True
            break

        step_started = time.perf_counter()
        _set_learning_rate(optimizer, _learning_rate(step, hold_steps, config))
        optimizer.zero_grad()
        backward = _make_backward(model, corpus, step, config)
        observed = step % config.observe_every == 0 or step + 1 == total
        if observed:
            loss, observation = observer(model, backward)
            observations.append((step, observation))
        else:
            loss = backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)
        optimizer.step()
        losses.append(loss.item())
        step_seconds = time.perf_counter() - step_started
        training_seconds += step_seconds

        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"loss is {losses[-1]} at step {step}")
        (observed_seconds if observed else plain_seconds).append(step_seconds)
        step += 1
        if _validates_after(step, total, config):
            validation.append((step, _validation_loss(model, corpus, config)))
        elapsed = time.perf_counter() - started
        on_progress(
            Progress(
                step=step,
                fraction=min(1.0, elapsed / training_budget) if total is None else step / total,
                loss=losses[-1],
                validation_loss=validation[-1][1],
                tokens_per_second=step * config.batch_size * config.model.context / training_seconds,
                elapsed=elapsed,
            )
        )

    if validation[-1][0] != step:
        validation.append((step, _validation_loss(model, corpus, config)))
    noise = measure_noise(model, _noise_backwards(model, corpus, step, config))
    seconds = time.perf_counter() - started
    tokens = step * config.batch_size * config.model.context
    return DemoResult(
        config=config,
        corpus_digest=corpus.digest,
        parameters=model.num_parameters(),
        hold_steps=step if hold_steps is None else hold_steps,
        steps=step,
        stopped_early=stopped_early,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / training_seconds,
        losses=tuple(losses),
        validation=tuple(validation),
        observations=summarise(model, step, observations, observed_seconds, plain_seconds),
        noise=noise,
        sample=_sample_text(model, config.seed),
    )


def _total_steps(hold_steps: int) -> int:
    return max(hold_steps + 1, round(hold_steps / HOLD_FRACTION))


def _learning_rate(step: int, hold_steps: int | None, config: DemoConfig) -> float:
    """Linear warm-up, then the peak, then half a cosine down to zero."""
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    decay = 1.0
    if hold_steps is not None and step >= hold_steps:
        done = (step - hold_steps + 1) / (_total_steps(hold_steps) - hold_steps + 1)
        decay = 0.5 * (1.0 + math.cos(math.pi * done))
    return config.peak_learning_rate * warmup * decay


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _make_optimizer(model: GPT, config: DemoConfig) -> torch.optim.Optimizer:
    """AdamW with decay on matrices and none on biases and normalisation weights."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_learning_rate, betas=(0.9, 0.95))


def _make_backward(model: GPT, corpus: Corpus, step: int, config: DemoConfig) -> Callable[[], Tensor]:
    inputs_BT, targets_BT = batch(corpus.train, step, config.batch_size, config.model.context, config.seed)

    def backward() -> Tensor:
        loss = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
        loss.backward()
        return loss.detach()

    return backward


def _noise_backwards(model: GPT, corpus: Corpus, steps: int, config: DemoConfig) -> Iterator[Callable[[], Tensor]]:
    """Backward passes over the batches that would come next, at least two, within the time left for them."""
    deadline = time.perf_counter() + (1.0 - TRAINING_FRACTION) * config.seconds
    for index in range(max(2, NOISE_SEQUENCES // config.batch_size)):
        if index >= 2 and time.perf_counter() > deadline:
            return
        yield _make_backward(model, corpus, steps + index, config)


def _validates_after(step: int, total: int | None, config: DemoConfig) -> bool:
    """Whether to validate after `step` steps: every fifth observation, which costs little beside training."""
    return step % (5 * config.observe_every) == 0 and step != total


@torch.no_grad()
def _validation_loss(model: GPT, corpus: Corpus, config: DemoConfig) -> float:
    """Mean loss in nats per byte over fixed windows, the same ones for every seed and at every call."""
    model.eval()
    total = 0.0
    for index in range(VALIDATION_BATCHES):
        inputs_BT, targets_BT = batch(corpus.validation, index, config.batch_size, config.model.context, seed=0)
        total += F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten()).item()
    model.train()
    return total / VALIDATION_BATCHES


def _sample_text(model: GPT, seed: int) -> str:
    """A continuation of `SAMPLE_PROMPT`; tabs become spaces, other bytes outside printable ASCII become `?`."""
    prompt_T = torch.tensor(list(SAMPLE_PROMPT))
    tokens_T = generate(model, prompt_T, SAMPLE_BYTES, temperature=0.8, seed=seed)
    characters = (chr(token) if 32 <= token < 127 or token in (9, 10) else "?" for token in tokens_T.tolist())
    return "".join(characters).expandtabs(4)
