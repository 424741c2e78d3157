"""Count the tokens that each layer of a model sees, and find the layers that share their input.

`token_source` accepts a number of tokens for all layers, one for each layer, or the arguments of a forward, which then runs
on the meta device. The result tells the tokens of every block, the blocks that share an A, and the output layer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.memory.block_form import BlockTokens
from gramian.curvature.memory.curvature_plan import Keeps
from gramian.taps.model.user_names import named_modules
from gramian.taps.sites.site import first_tensor


@dataclass
class Trace:
    """The calls of layers in one forward on the meta device: numbers of tokens and identities of inputs."""

    tokens: dict[str, int] = field(default_factory=dict)
    """{layer: number of tokens over all its calls}."""
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """{layer: memory addresses and layouts of its inputs}, equal for layers that read the same tensor."""
    samples: int = 0
    """Number of samples B of the traced forward."""
    last: str | None = None
    """Name of the layer that was called last."""
    _alive: list[Any] = field(default_factory=list)

    def record(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Add one call of layer `name` to the counts; with `name` bound (`functools.partial`) it is a forward hook."""
        x = first_tensor(args, kwargs)
        if isinstance(module, _ConvNd):
            tokens = output.numel() // output.shape[1]
        else:
            tokens = x.numel() if isinstance(module, nn.Embedding) else x.numel() // max(x.shape[-1], 1)
            tokens *= self.samples if x.shape[0] == 1 else 1  # one row for all samples
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        storage = x.untyped_storage()
        place = (storage._cdata, x.storage_offset(), x.shape, x.stride())
        self.inputs[name] = (*self.inputs.get(name, ()), place)
        self.last = name
        self._alive.append(storage)  # so that no other storage gets its address


@dataclass(frozen=True)
class TokenSource:
    """Numbers of tokens of every layer: `given` by the user, or from the `trace` of a forward; both None: not known."""

    given: int | Mapping[str, int] | None = None
    trace: Trace | None = None

    def of_block(self, spec: Spec, separate: int, reduced: bool, exact: bool) -> BlockTokens | None:
        """Numbers of tokens behind the A, G and table sums of a block; None: not known. Zeros outside K-FAC.

        Args:
            spec: the block.
            separate: number of processes that exchange no sums, so that each has 1/`separate` of the tokens; otherwise 1.
            reduced: whether a sample's tokens are combined into one; needs a trace, which tells the number of samples.
            exact: whether G is that of an exact softmax head, which uses all tokens even if `reduced`.
        """
        if spec.kind != "kronecker":
            return BlockTokens(0, 0, 0)
        if self.given is None and self.trace is None:
            return None
        met = looked_up = samples = uses = lookups = 0
        for layer in spec.layers:
            calls, count = self._of_layer(layer)
            share = -(-count // separate)
            if layer in spec.tables:
                looked_up, lookups = looked_up + share, lookups + calls
            else:
                met, uses = met + share, uses + calls
                samples += 0 if self.trace is None else -(-calls * self.trace.samples // separate)
        means = samples if reduced and self.trace is not None else met
        return BlockTokens(means, met if exact else means, looked_up, max(uses, 1), max(lookups, 1))

    def _of_layer(self, layer: str) -> tuple[int, int]:
        """(number of calls, number of tokens) of a layer."""
        if self.trace is not None:
            return len(self.trace.inputs.get(layer, ())), self.trace.tokens.get(layer, 0)
        assert self.given is not None
        return 1, self.given[layer] if isinstance(self.given, Mapping) else self.given

    def last_linear(self, model: nn.Module, specs: Mapping[str, Spec]) -> str | None:
        """Name of the linear layer that was called last in the trace, else of the last in the model; None: there is none."""
        order = {name: place for place, (name, _) in enumerate(named_modules(model))}
        linear = [
            layer
            for spec in specs.values()
            if spec.kind == "kronecker"
            for layer in spec.layers
            if layer not in spec.tables and spec.layout != "kernel" and not spec.keys
        ]
        if self.trace is not None and self.trace.last in linear:
            return self.trace.last
        return max(linear, key=lambda layer: order.get(layer, -1), default=None)

    def shared_inputs(self, specs: Mapping[str, Spec], keeps: Keeps) -> dict[str, str]:
        """{block: the earlier block whose A it shares}: same input tensors, same token policy, both with or without a bias.

        Empty without a trace.
        """
        if self.trace is None:
            return {}
        first: dict[Any, str] = {}
        found: dict[str, str] = {}
        for name, spec in specs.items():
            single = spec.kind == "kronecker" and not spec.tables and len(spec.layers) == 1
            single = single and spec.layout != "kernel" and not spec.keys
            if single and not keeps[name].A.diagonal:
                key = (self.trace.inputs.get(spec.layers[0]), spec.has_bias, keeps[name].A)
                if key[0] is not None and first.setdefault(key, name) != name:
                    found[name] = first[key]
        return found


def token_source(model: nn.Module, specs: Mapping[str, Spec], tokens: Any, inputs: Any) -> TokenSource:
    """The `TokenSource` of a plan, from `tokens` or from a traced forward on `inputs`.

    A GramianError is raised if both are given, for counts below 1, and if {layer: tokens} has other layers than the model.
    """
    layers = [layer for spec in specs.values() if spec.kind == "kronecker" for layer in spec.layers]
    counts = list(tokens.values()) if isinstance(tokens, Mapping) else [] if tokens is None else [tokens]
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise GramianError(f"tokens: expected an integer of at least 1, or {{layer: tokens}}, got {count!r}")
    if isinstance(tokens, Mapping):
        missing = [layer for layer in layers if layer not in tokens]
        unknown = [layer for layer in tokens if layer not in layers]
        if missing or unknown:
            what = f"has no {missing[0]!r}" if missing else f"{unknown[0]!r} is not a layer with factors"
            raise GramianError(f"tokens: {what}; expected every layer with factors, or one number for all")
    if inputs is None:
        return TokenSource(tokens)
    if tokens is not None:
        raise GramianError("tokens: were given beside inputs, which determine them; expected one of the two")
    return TokenSource(trace=trace(model, layers, inputs))


def trace(root: nn.Module, layers: Iterable[str], inputs: Any) -> Trace:
    """Run a forward on the meta device and record the calls of `layers`; nothing is allocated.

    `inputs`: keyword arguments as a mapping, positional ones as a tuple or list, or one argument. A GramianError is raised if
    the model cannot run on the meta device.
    """
    args, kwargs = _arguments(pytree.tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, inputs))
    found = Trace(samples=first_tensor(args, kwargs).shape[0])
    modules = dict(named_modules(root))
    hooks = [modules[name].register_forward_hook(partial(found.record, name), with_kwargs=True) for name in layers]
    tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    meta = {name: t.detach().to("meta") for name, t in tensors.items()}
    try:
        with torch.no_grad(), torch.device("meta"):
            torch.func.functional_call(root, meta, args, kwargs)
    except (RuntimeError, TypeError, ValueError) as error:  # no such shapes or values, arguments, model checks
        what = " ".join(str(error).split())[:200]
        raise GramianError(
            f"inputs: the model cannot run on them without numbers ({type(error).__name__}: {what}); "
            "expected the arguments of one forward, or tokens="
        ) from None
    finally:
        for handle in hooks:
            handle.remove()
    return found


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
