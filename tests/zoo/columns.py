"""The columns of the matrix: what is computed for a model, and whether it is what a loop over single samples computes."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import gramian
from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import find_blocks
from gramian.privacy.clipping.clip_factors import SLACK
from gramian.taps.model.python_state import graph_tensors
from tests.zoo.single_samples import Loop, norm
from tests.zoo.tiny_configs import AutoConfig, model_class
from tests.zoo.zoo_models import Example, example, in_double, of_torch


@dataclass(frozen=True)
class Cell:
    """What came of one column for one model."""

    outcome: str
    """"exact", "refused", "coupled" (refused, and no method could be exact), "none" (the model alone does not run so),
    "wrong" or "crash"."""
    detail: str = ""
    """The error of exact and wrong cells, the message of the others."""


class DoesNotRun(Exception):
    """A model without any capture does not run as a column wants it; the message says why."""


def norms(one: Example, loop: Loop) -> float:
    """Per-sample norms: the largest relative error."""
    with gramian.per_sample_norms(one.model, loss_reduction="sum") as found:
        one.losses().sum().backward()
    return float(((found.values.double() - loop.norms_B) / loop.norms_B.clamp(min=1e-30)).abs().max())


def private_sum(one: Example, loop: Loop) -> float:
    """The sum of clipped gradients, as a private step without noise applies it: its relative error.

    Clip factors have a margin for rounding, that of a narrower dtype where a model computes in it inside.
    """
    limit = float(loop.norms_B.median())
    trained = [p for p in one.model.parameters() if p.requires_grad]
    optimizer = Kept(trained, lr=1.0)
    engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=7)
    data = [{name: value[b] for name, value in one.batch.items()} for b in range(len(loop.samples))]
    module, private, _ = engine.make_private(
        module=one.model, optimizer=optimizer, data_loader=DataLoader(data, len(data)),
        noise_multiplier=0.0, max_grad_norm=limit, poisson_sampling=False, loss_reduction="sum",
    )  # fmt: skip
    replace(one, model=module).losses().sum().backward()
    private.step()
    found = [len(data) * gradient for gradient in optimizer.gradients]
    return min(_distance(found, loop, limit / (1 + slack)) for slack in SLACK.values())


def _distance(found: list[Tensor], loop: Loop, limit: float) -> float:
    weights = [min(1.0, limit / float(own)) if own else 1.0 for own in loop.norms_B]
    want = [sum(w * g for w, g in zip(weights, own, strict=True)) for own in zip(*loop.samples, strict=True)]
    return float(norm([f - w for f, w in zip(found, want, strict=True)]) / norm(want).clamp(min=1e-300))


class Kept(torch.optim.SGD):
    """An optimizer that keeps the gradients of its step, which a difference of weights would round."""

    def step(self, closure: Any = None) -> Any:
        self.gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]
        ]
        return super().step(closure)


def compiled(one: Example, backend: str = "aot_eager") -> Example:
    """Compiled as a whole; with "aot_eager" its operators are those of eager mode."""
    torch._dynamo.reset()
    one.model.compile(backend=backend)
    return one


def checkpointed(one: Example) -> Example:
    """With activations computed again in the backward: as transformers does it, else each part of the model by itself."""
    if isinstance(one.model, PreTrainedModel):
        try:
            one.model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as why:  # its class does not support it
            raise DoesNotRun(str(why)) from why
        return one
    parts = [name for name, part in one.model.named_children() if any(True for _ in part.parameters())]
    lists = any(isinstance(one.model.get_submodule(name), nn.ModuleList) for name in parts)
    if not parts or lists:
        return replace(one, model=checkpoint_wrapper(one.model))
    for name in parts:
        setattr(one.model, name, checkpoint_wrapper(one.model.get_submodule(name)))
    return one


def in_bfloat16(one: Example) -> Example:
    """Weights, buffers and inputs rounded to bfloat16, and the modules of transformers with their own `torch` again."""
    batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in one.batch.items()}
    return replace(one, model=one.model.bfloat16(), batch=batch)


def with_adapters(one: Example) -> Example:
    """LoRA of rank 4 on every linear layer, all of its numbers random, and nothing else trained."""
    import peft

    linear = [name for name, part in one.model.named_modules() if type(part) in (nn.Linear, Conv1D) and name]
    if not linear:
        raise DoesNotRun("it has no linear layer")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules=linear, init_lora_weights=False)
    peft.inject_adapter_in_model(options, one.model)
    return replace(one, model=one.model.double())


@dataclass(frozen=True)
class Column:
    """One column: how the model of a row is changed for it, and what is compared."""

    measures: tuple[Callable[[Example, Loop], float], ...]
    change: Callable[[Example], Example] = lambda one: one
    own_loop: bool = False
    """Whether the gradients of single samples are those of the changed model."""
    double: bool = True
    """Whether transformers' modules compute in float64 what they write as float32."""
    only: tuple[str, ...] = ()
    """The rows that have such a cell; (): all."""


ONE_OF_EACH_KIND = (
    "llama", "bert", "t5", "vit", "wav2vec2", "llava", "mamba", "mixtral", "net.ResNet GroupNorm", "net.MLP-Mixer",
    "nn.Linear", "nn.Conv2d", "nn.Embedding", "nn.LayerNorm", "nn.LSTM", "nn.MultiheadAttention",
)  # fmt: skip
"""Causal, masked, encoder-decoder, vision, speech and multimodal models, a state space, a mixture of experts, nets, layers."""
COLUMNS: dict[str, Column] = {
    "norms": Column((norms,)),
    "private sum": Column((private_sum,)),
    "checkpointed": Column((norms,), checkpointed),
    "bf16": Column((norms, private_sum), in_bfloat16, own_loop=True, double=False),
    "LoRA": Column((norms, private_sum), with_adapters, own_loop=True),
    "compiled": Column((norms,), compiled),
    "inductor": Column((norms, private_sum), partial(compiled, backend="inductor"), only=ONE_OF_EACH_KIND),
}


@dataclass
class Study:
    """The cells of one model: every column gets a copy of it, and all have one loop over single samples."""

    one: Example
    loop: Loop | None = None

    def cell(self, title: str) -> Cell:
        """Compute one column and judge it."""
        column = COLUMNS[title]
        with in_double(column.double):
            try:
                return self._judged(column)
            except DoesNotRun as why:
                return Cell("none", _line(why))

    def _judged(self, column: Column) -> Cell:
        loop = self._loop(column)
        try:
            error = max(measure(column.change(self._copy()), loop) for measure in column.measures)
        except GramianError as refusal:
            coupled = loop.coupled or "mixes the samples of a batch" in str(refusal)
            return Cell("coupled" if coupled else "refused", _line(refusal))
        except DoesNotRun:
            raise
        except Exception as crash:  # whatever it is, it is not a refusal
            alone = column.change(self._copy())
            try:
                alone.losses().sum().backward()
            except Exception as own:
                raise DoesNotRun(f"{type(own).__name__}: {own}") from own
            return Cell("crash", f"{type(crash).__name__}: {_line(crash)}"[:300])
        return Cell("exact" if error <= loop.tolerance else "wrong", f"{error:.1e}")

    def _copy(self) -> Example:
        left = {id(t): t.detach() for t in graph_tensors(self.one.model).values()}  # states that earlier forwards left
        return replace(self.one, model=copy.deepcopy(self.one.model, left))

    def _loop(self, column: Column) -> Loop:
        if self.loop is None or column.own_loop:
            one = column.change(self._copy()) if column.own_loop else self.one
            try:
                found = Loop.of(one)
            except ValueError:  # batch statistics of one sample: any values are wrong
                found = Loop.nothing(one)
            except Exception as why:
                raise DoesNotRun(f"{type(why).__name__}: {why}") from why
            if column.own_loop:
                return found
            self.loop = found
        return self.loop


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def kfac_shares(name: str) -> dict[str, float]:
    """{"kronecker" | "block" | "diagonal": share of the parameters}: a type at its default configuration, on no device."""
    if of_torch(name):
        model = example(name).model
    else:
        with torch.device("meta"), _quiet():
            model = model_class(name)(AutoConfig.for_model(name))
    shares = dict.fromkeys(("kronecker", "block", "diagonal"), 0)
    for spec in find_blocks(model, gramian.KFACNaturalGradient().options).values():
        shares[spec.kind] += sum(math.prod(shape) for shape in spec.shapes)
    whole = max(1, sum(shares.values()))
    return {kind: count / whole for kind, count in shares.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of transformers about default configurations."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
