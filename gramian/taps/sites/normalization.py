"""Sites of norm layers y = γ ⊙ x̂ + β over the last axes: the gradients of γ and β are Σ_t g_t ⊙ x̂_t and Σ_t g_t.

g_t are output gradients of tokens t. The normalised input x̂ is computed again in the backward, in float32 or float64, from the
input that autograd saves anyway.

Model code brings norm layers in classes of its own. `norm_of` knows them by what they compute: it runs a copy of the layer on
random numbers, and compares the result with the formula.
"""

import inspect
import itertools
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.linalg.wide import wide
from gramian.taps.gradients import Normed, PerSampleGradient, Summed
from gramian.taps.model.python_state import OWN
from gramian.taps.sites.channel_norms import narrowest
from gramian.taps.sites.site import Site, by_sample, trains
from gramian.taps.sites.site_registry import register_recogniser, register_site


class TrailingNorm(Site):
    """Site of `nn.LayerNorm`, `nn.RMSNorm` and Hugging Face RMSNorm classes: statistics over the last axes of each token."""

    kind = "norm"

    def __init__(
        self,
        centred: bool,
        in_float32: bool = False,
        eps: str | float = "eps",
        names: tuple[str, str] = ("weight", "bias"),
    ) -> None:
        """Set how the normalised input x̂ is formed.

        Args:
            centred: True if the mean is removed (LayerNorm), False for root-mean-square norms.
            in_float32: True if x̂ is formed in float32 and rounded to the input's dtype, whatever that is (Hugging Face).
            eps: the ε under the root, or the name of the attribute that has it; one that is None means that of the dtype.
            names: names of scale and shift inside the layer.
        """
        self.centred, self.in_float32, self.eps, self.names = centred, in_float32, eps, names

    def batch_axes(self, module: nn.Module, output: Tensor) -> int:
        """All axes but those that are normalised."""
        return output.dim() - len(module._parameters[self.names[0]].shape)  # type: ignore[union-attr]

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: object
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients of scale γ (`Normed`) and shift β (`Summed`), if these require a gradient."""
        scale, shift = self.names
        shape = tuple(module._parameters[scale].shape)  # type: ignore[union-attr]
        x_BTN, g_BTN = (_trailing_tokens(t, batch, shape) for t in (saved[0], output_gradients[0]))
        found: dict[str, PerSampleGradient] = {}
        if trains(module, scale):
            eps = _epsilon(module, self.eps, saved[0].dtype)
            found[scale] = Normed(x_BTN, g_BTN, shape, eps, self.centred, self.in_float32)
        if trains(module, shift):
            found[shift] = Summed(g_BTN, shape, narrowest(*saved, *output_gradients))
        return found


def _epsilon(module: nn.Module, eps: str | float, dtype: torch.dtype) -> float:
    found = getattr(module, eps) if isinstance(eps, str) else eps
    return torch.finfo(dtype).eps if found is None else float(found)


class Scale(TrailingNorm):
    """Site of y = γ ⊙ x + β (layer scale): the gradient of γ is Σ_t g_t ⊙ x_t."""

    def __init__(self, names: tuple[str, str]) -> None:
        """Set the names of scale and shift inside the layer."""
        super().__init__(centred=False, names=names)

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: object
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients of scale γ and shift β (`Summed`), if these require a gradient."""
        scale, shift = self.names
        shape, dtype = tuple(module._parameters[scale].shape), narrowest(*saved, *output_gradients)  # type: ignore[union-attr]
        x_BTN, g_BTN = (_trailing_tokens(t, batch, shape) for t in (saved[0], output_gradients[0]))
        found: dict[str, PerSampleGradient] = {}
        if trains(module, scale):
            found[scale] = Summed(wide(g_BTN) * wide(x_BTN), shape, dtype)
        if trains(module, shift):
            found[shift] = Summed(g_BTN, shape, dtype)
        return found


def _trailing_tokens(t: Tensor, batch: int, shape: tuple[int, ...]) -> Tensor:
    """Rows [B·k, …, *shape], k per sample, as [B, T, N] with the N elements of `shape` last."""
    if t.dim() <= len(shape) and batch != 1:
        raise GramianError(f"saw an input of shape {list(t.shape)}; expected the batch as first axis, features last")
    split = by_sample(t, batch)
    count = torch.Size(split.shape[1 : split.dim() - len(shape)]).numel()
    return split.reshape(batch, count, torch.Size(shape).numel())


register_site(nn.LayerNorm, TrailingNorm(centred=True))
register_site(nn.RMSNorm, TrailingNorm(centred=False))


# ---- norm layers of any class ----------------------------------------------------------------------------------------

PLAIN = (int, float, bool, str, type(None), torch.dtype)
"""Attributes that a recognised layer may have, and tuples of them: with others its result may depend on more than its input."""
COMMON_EPS = (1e-12, 1e-8, 1e-6, 1e-5, 0.0)
"""Values of ε that are tried beside the layer's attributes."""
ROWS = (1e-6, 1e-3, 1.0, 1e5)
"""Standard deviations of the rows that a layer is tried on, so that ε, where it stands, and bounds of its input show."""
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest such errors in other dtypes, whose ε may be another one."""
IN_FLOAT64, IN_FLOAT32 = 1e-12, 3e-6
"""Largest error, relative to each row's largest value, of a layer that computes in float64, and of one that does in float32."""
_known: "weakref.WeakKeyDictionary[type, dict[Any, TrailingNorm | None]]" = weakref.WeakKeyDictionary()


def norm_of(module: nn.Module) -> TrailingNorm | None:
    """The site of a layer that computes y = γ ⊙ x̂ + β or (1 + γ) ⊙ x̂ + β over the last axis, or with x for x̂; None for others.

    Only layers of one argument are asked, without children and buffers, whose attributes are plain values. Once for each class
    and values: a copy runs in float64 on a few random rows, twice with other γ and β, then in the other mode, in other dtypes
    and numbers of axes. γ and β must also get the gradients of the formula (a detached one has none). The model is untouched.
    """
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    attributes = {
        k: v for k, v in vars(module).items() if k not in OWN and not k.startswith("__composable_api")
    }  # FSDP2's
    shapes = {tuple(p.shape) for p in parameters.values()}
    if (
        len(parameters) not in (1, 2)
        or len(shapes) != 1
        or len(width := next(iter(shapes))) != 1
        or width[0] < 2  # one number for all features
        or not all(p.is_floating_point() for p in parameters.values())
        or any(module._modules.values())
        or module._buffers
        or not all(isinstance(v, PLAIN) for value in attributes.values() for v in _each(value))
        or len(inspect.signature(type(module).forward).parameters) != 2
    ):
        return None
    ofclass = [(k, v) for base in type(module).__mro__[:-2] for k, v in vars(base).items() if isinstance(v, PLAIN)]
    key = (
        *width,
        *parameters,
        *((name, repr(value)) for name, value in (*ofclass, *attributes.items())),
        module.training,
    )
    found = _known.setdefault(type(module), {})
    if key not in found:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            try:
                found[key] = _recognised(module, width[0], list(parameters), dict(reversed(ofclass)) | attributes)
            except Exception:  # whatever its code raises on rows of numbers: it is no norm
                found[key] = None
    return found[key]


def _each(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


def _recognised(module: nn.Module, width: int, names: list[str], attributes: dict[str, Any]) -> TrailingNorm | None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    x = (drawn(2, len(ROWS), width) + 0.5 * drawn(2, 1, 1)) * torch.tensor(ROWS, dtype=torch.float64)[:, None]
    x[1, :, 0] *= 1000.0  # an outlier in each row, so that bounds of x̂ show
    tried = [{name: drawn(width).requires_grad_() for name in names} for _ in range(2)]
    runs = [_run(module, one, x) for one in tried]
    epsilons: list[tuple[str | float, float]] = [
        *((name, value) for name, value in attributes.items() if type(value) is float),
        *((value, value) for value in COMMON_EPS),
    ]
    forms: list[tuple[TrailingNorm, Tensor]] = [(Scale(("", "")), x)]
    for centred in (False, True):
        centre = x - x.mean(-1, keepdim=True) if centred else x
        squares = centre.square().mean(-1, keepdim=True)
        forms += [(TrailingNorm(centred, eps=eps), centre * torch.rsqrt(squares + value)) for eps, value in epsilons]
    pairs = [(names[0], names[-1]), (names[-1], names[0])] if len(names) == 2 else [(names[0], "")]
    for (site, hat), pair, plus in itertools.product(forms, pairs, (0.0, 1.0)):
        wanted = [hat * (own[pair[0]] + plus) + own.get(pair[1], 0.0) for own in tried]
        error = max(_error(y, one) for y, one in zip(runs, wanted, strict=True))
        if error <= IN_FLOAT32:
            site.names, site.in_float32 = pair, error > IN_FLOAT64
            return site if _holds(module, tried[0], x, runs[0], wanted[0]) else None
    return None


def _holds(module: nn.Module, own: dict[str, Tensor], x: Tensor, y: Tensor, wanted: Tensor) -> bool:
    """True if γ and β get the gradients of `wanted`, the formula for y, and it holds in other dtypes and numbers of axes."""
    for one, other in zip(*(torch.autograd.grad(t, [*own.values()], x.sign()) for t in (y, wanted)), strict=True):
        if float((one - other).abs().max()) > IN_FLOAT32 * float(other.abs().max()):
            return False
    for shape, (dtype, bound) in itertools.product((x.shape, x.shape[1:], (2, 2, 2, -1)), ROUNDED.items()):
        rounded = {name: p.detach().to(dtype) for name, p in own.items()}
        part = x.reshape(-1, x.shape[-1])[: 4 if len(shape) == 2 else None].reshape(shape)
        got = _run(module, rounded, part.to(dtype))
        if _error(got.double(), wanted.reshape(-1, x.shape[-1])[: got[..., 0].numel()].reshape(got.shape)) > bound:
            return False
    return True


def _run(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """The forward of the layer's class on a bare copy of it with these parameters, without hooks."""
    copy = object.__new__(type(module))
    fresh = {key: OrderedDict() if isinstance(value, OrderedDict) else value for key, value in vars(module).items()}
    fresh.pop("forward", None)
    fresh["training"] ^= x.dtype is not torch.float64  # a norm in both modes, between which one capture may switch
    vars(copy).update(fresh, _parameters=dict.fromkeys(module._parameters) | parameters, _buffers={}, _modules={})
    given, before = x.clone().requires_grad_() * 1.0, dict(vars(copy))
    y = type(module).forward(copy, given)
    assert isinstance(y, Tensor) and y.shape == x.shape and torch.equal(given, x)  # not written in place
    assert vars(copy).keys() == before.keys() and all(vars(copy)[key] is value for key, value in before.items())
    return y


def _error(y: Tensor, wanted: Tensor) -> float:
    """Largest difference in a row over its largest value, of all rows."""
    y, wanted = y.detach(), wanted.detach()
    return float(((y - wanted).abs().amax(-1) / wanted.abs().amax(-1)).nan_to_num(torch.inf).max())


register_recogniser(norm_of)
