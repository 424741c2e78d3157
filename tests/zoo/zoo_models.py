"""A tiny model of a row with a batch that it takes: in float64, with weights and a loss of their own."""

import contextlib
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import conv_nets, token_nets
from tests.zoo.example_batches import B, Batch, batches, numbers
from tests.zoo.tiny_configs import SIZES, Size, model_class, model_types, tiny_config
from tests.zoo.torch_layers import layer_batches, layers

MOST_PARAMETERS = 20_000_000
OUTPUTS = (
    "logits",
    "last_hidden_state",
    "prediction_logits",
    "text_embeds",
    "image_embeds",
    "pred_masks",
    "pooler_output",
)


class CannotRun(Exception):
    """No size and no batch of ours makes a forward of this type; the message says why."""


@dataclass
class Example:
    """A model, in float64 as it is built, its batch, and how both were found."""

    model: nn.Module
    batch: Batch
    size: int
    inputs: str

    def losses(self, batch: Batch | None = None) -> Tensor:
        """[B]: a smooth function of the model's first output that has a row a sample."""
        batch = self.batch if batch is None else batch
        return smooth(first_output(self.model(**batch, **self.constants), len(next(iter(batch.values())))))

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments that are no tensors."""
        takes = inspect.signature(self.model.forward).parameters
        return {"use_cache": False} if "use_cache" in takes else {}

    def rows(self, start: int, stop: int) -> Batch:
        """Samples `start` to `stop` of the batch."""
        return {name: value[start:stop] for name, value in self.batch.items()}


def names() -> list[str]:
    """The rows of all kinds: types of transformers, "net. …" and "nn. …"."""
    return [*model_types(), *small_nets(), *layers()]


def of_torch(name: str) -> bool:
    """Whether a row is a net or a layer, rather than a type of transformers."""
    return name.startswith(("net.", "nn."))


def small_nets() -> dict[str, Callable[[], nn.Module]]:
    """{name of the row: how the net is built}."""
    return {f"net.{name}": make for name, make in (conv_nets.NETS | token_nets.NETS).items()}


def example(name: str, size: int | None = None, inputs: str | None = None) -> Example:
    """The smallest model of a row that runs, with its batch; `size` and `inputs` of an earlier search spare another one.

    Call it, and use what it returns, inside `in_double`.

    Raises:
        CannotRun: if none of the sizes runs with any of the batches.
    """
    why: list[str] = []
    sizes = [0] if of_torch(name) else range(len(SIZES))
    for number in sizes if size is None else [size]:
        if sum("no output with" in one for one in why) > 5:  # it packs its samples; a larger model does, too
            break
        try:
            model = _build(name, number)
        except Exception as error:  # whatever a constructor raises at this size
            why.append(f"{type(error).__name__}: {error}")
            continue
        for found, batch in itertools.islice(_batches(name, model), 40):
            if inputs is not None and found != inputs:
                continue
            one = Example(model, batch, number, found)
            try:
                losses = one.losses()
                if not torch.equal(losses, one.losses()):
                    model.eval()  # it draws noise in training, which a loop over samples cannot repeat
                    losses = one.losses()
                    if not torch.equal(losses, one.losses()):
                        raise CannotRun("draws noise in every forward, also in evaluation")
                if losses.shape == (len(next(iter(batch.values()))),) and losses.isfinite().all():
                    return one
                why.append("a loss that is not finite")
            except Exception as error:  # whatever its forward raises for this batch
                why.append(f"{type(error).__name__}: {error}")
    raise CannotRun(_first(why))


def _batches(name: str, model: nn.Module) -> Iterator[tuple[str, Batch]]:
    if name.startswith("nn."):
        return layer_batches(model)
    if name.startswith("net."):
        return iter([("picture", {next(iter(inspect.signature(model.forward).parameters)): numbers(3, B, 3, 16, 16)})])
    return batches(model)


def first_output(outputs: Any, samples: int) -> Tensor:
    """The first output of a model that depends on its weights and has a row a sample."""
    named = dict(outputs.items()) if isinstance(outputs, dict) else {"": outputs}
    order = (*OUTPUTS, *(name for name in named if not name.startswith(("logits_per", "loss"))))
    for axes, name in itertools.product((2, 1), order):  # a single axis may have as many rows by chance
        values = named.get(name)
        for value in values if isinstance(values, (tuple, list)) else [values]:
            differentiable = isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
            if differentiable and value.dim() >= axes and len(value) == samples:
                return value
    raise ValueError(f"no output with {samples} rows")


def smooth(output: Tensor) -> Tensor:
    """[B]: Σ_j w_j y_j + 0.05 y_j² of each row y, with fixed random w."""
    rows = output.reshape(len(output), -1).double()
    return rows @ numbers(9, rows.shape[1]) + 0.05 * rows.square().sum(1)


class Double:
    """The module `torch` with float64 in place of float32, for code that computes in float32 whatever dtype its model has.

    Such code rounds otherwise for one sample than for three, and hides what is wrong behind 1e-7."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_double(on: bool = True) -> Iterator[None]:
    """Context manager in which modules of transformers have this `torch`, and tensors a `float` that does not round.

    Not `on`: those of everybody again, inside another one."""
    before, others = Tensor.float, {module: module.torch for module in _of_transformers()}
    Tensor.float = Tensor.double if on else _ROUNDED  # type: ignore[method-assign]
    for module in others:
        module.torch = Double() if on else torch
    try:
        yield
    finally:
        Tensor.float = before  # type: ignore[method-assign]
        for module in _of_transformers():
            module.torch = others.get(module, torch)


_ROUNDED = Tensor.float


def _of_transformers() -> list[Any]:
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    return [module for module in loaded if isinstance(vars(module).get("torch"), (Double, type(torch)))]


def _build(name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    model = _of_torch(name).double() if of_torch(name) else _of_type(name, SIZES[size])
    if sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
        raise ValueError("too many parameters")
    with torch.no_grad():  # no weight is zero or one as layers initialise it
        for seed, parameter in enumerate(model.parameters()):
            parameter.add_(0.02 * numbers(seed, *parameter.shape))
    return model


def _of_torch(name: str) -> nn.Module:
    if name in (nets := small_nets()):
        return nets[name]()
    kind, arguments = layers()[name]
    model = kind(**arguments)
    for _, batch in layer_batches(model) if "Lazy" in name else ():
        with contextlib.suppress(RuntimeError, ValueError):  # of another shape than this layer takes
            model.double()(**batch)
    return model


def _of_type(name: str, size: Size) -> nn.Module:
    kind = model_class(name)
    config = tiny_config(name, size)
    importlib.import_module(kind.__module__)
    for module in _of_transformers():
        module.torch = Double()
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in kind(config).parameters())
    except Exception:  # a constructor that computes with its weights
        count = 0
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    return kind(tiny_config(name, size)).double().train()


def _first(why: list[str]) -> str:
    """The first reason that is not the number of parameters."""
    lines = [" ".join(one.split())[:200] for one in why]
    return next(
        (one for one in lines if "parameters" not in one), next(iter(lines), "no batch of ours fits its forward")
    )
