"""`gramian.optim.KFAC` written down once more: float64, one matrix at a time, hooks of its own, no product twice.

Factors come from forward hooks and gradients of outputs; roots from scipy; orthogonalisation from a singular value
decomposition whose values go through the polynomial; the rest of the parameters from torch's AdamW.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

Layer = nn.Linear | nn.Conv2d | Conv1D


class Oracle:
    """Steps of one model, whose layers `hidden` take whitened steps."""

    def __init__(
        self, model: nn.Module, hidden: list[str], lr: float, decay: float, every: int, ema: float, damping: float
    ) -> None:
        self.model, self.every, self.ema, self.damping, self.decay, self.lr = model, every, ema, damping, decay, lr
        self.layers = {name: model.get_submodule(name) for name in hidden}
        mine = {id(layer.weight) for layer in self.layers.values()}
        rest = [p for p in model.parameters() if id(p) not in mine]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95))
        self.momentum = {name: torch.zeros_like(layer.weight) for name, layer in self.layers.items()}
        self.factors: dict[str, list[Tensor]] = {}
        self.refreshes = self.steps = 0

    def step(self, loss: Callable[[], Tensor], terms: int) -> None:
        """One step; `loss()` is the mean of `terms` terms."""
        self.model.zero_grad()
        with self._seen() as seen:
            loss().backward()
        if self.steps % self.every == 0:
            self.refreshes += 1
            share = (1 - self.ema) / (1 - self.ema**self.refreshes)
            for name, (a, g) in seen.items():
                g = g * terms  # gradients of the sum of all terms
                fresh = [a.mT @ a / len(a), g.mT @ g / terms]
                o, m = g.shape[1], a.shape[1]
                fresh = [torch.diag(fresh[0].diagonal()) if m > o else fresh[0], fresh[1]]
                fresh[1] = torch.diag(fresh[1].diagonal()) if o > m else fresh[1]
                old = self.factors.get(name, fresh)
                self.factors[name] = [(1 - share) * b + share * f for b, f in zip(old, fresh, strict=True)]
        self.steps += 1
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        for name, layer in self.layers.items():
            gradient, M = layer.weight.grad, self.momentum[name]
            assert gradient is not None
            M.mul_(0.9).add_(gradient, alpha=0.1)
            A, G = (self._root(factor) for factor in self.factors[name])
            turned = isinstance(layer, Conv1D)
            N = (0.1 * gradient + 0.9 * M).detach()
            U = G @ orthogonal(G @ (N.T if turned else N.flatten(1)) @ A) @ A
            U = U / U.square().mean().sqrt()
            with torch.no_grad():
                layer.weight -= 4 * self.lr * self.decay * layer.weight
                layer.weight -= 4 * self.lr * 0.2 * (U.T if turned else U.reshape(layer.weight.shape))

    def _root(self, factor: Tensor) -> Tensor:
        relative = factor / (factor.trace() / len(factor)) + self.damping * torch.eye(len(factor), dtype=torch.float64)
        return torch.from_numpy(np.real(scipy.linalg.fractional_matrix_power(relative.numpy(), -0.25)))

    @contextmanager
    def _seen(self) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        found: dict[str, tuple[Tensor, Tensor]] = {}

        def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def hook(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
                a = args[0].detach()
                if isinstance(layer, nn.Conv2d):
                    a = F.unfold(a, layer.kernel_size, stride=layer.stride).mT
                    out.register_hook(lambda g: keep(name, a, g.flatten(2).mT))
                else:
                    out.register_hook(lambda g: keep(name, a, g))

            return hook

        def keep(name: str, a: Tensor, g: Tensor) -> None:
            found[name] = (a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1]))

        handles = [layer.register_forward_hook(note(name)) for name, layer in self.layers.items()]
        yield found
        for handle in handles:
            handle.remove()


POLYNOMIALS = [
    (8.2218, -23.3469, 16.6338),
    (3.9728, -2.8449, 0.5170),
    (3.4735, -2.5057, 0.4810),
    (2.5044, -1.7907, 0.4071),
]


def orthogonal(x: Tensor) -> Tensor:
    """Singular values through four polynomials as + bs³ + cs⁵, after division by their root sum of squares."""
    U, s, V = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for a, b, c in POLYNOMIALS:
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag(s) @ V
