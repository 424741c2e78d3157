"""The distribution that a model's outputs stand for: how targets are drawn from it, its loss, and its Hessian by the outputs.

Legend: V outputs of one position (classes, channels), T tokens, f outputs, y targets, p probabilities.

A loss that is a negative log likelihood −log p(y | f) has the Fisher E[g gᵀ] over targets y ~ p(· | f), g its gradient. By the
outputs this is the Hessian H(f) of the loss, whatever the targets are:

| loss | targets | one term of the loss | g | H |
|---|---|---|---|---|
| cross_entropy | a class, or probabilities q [V] | −Σ_v q_v log softmax(f)_v | p − q | diag(p) − p pᵀ |
| mse | numbers [V], y ~ N(f, σ²I) | ‖y − f‖²/(2σ²) | (f − y)/σ² | I/σ² |
| bce | [V] in [0, 1], each y_v ~ Bernoulli(sigmoid(f_v)) | −Σ_v log p(y_v) | p − y | diag(p(1 − p)) |

A term belongs to one position: a row of V outputs. Outputs come as [*positions, V], samples first.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.core.keyed_random import token_uniforms

IGNORE = -100
ROWS = 2**26
"""Number of probabilities (tokens times classes) that are processed at a time when labels are drawn."""
LOSSES = ("cross_entropy", "mse", "bce")


@dataclass(frozen=True)
class OutputHessian:
    """H_t = diag(d_t) − p_t p_tᵀ of every token t: the Hessian of a loss term by the outputs of its position."""

    diagonal_TV: Tensor
    """d [T, V]."""
    minus_TV: Tensor | None = None
    """p [T, V]; None: the outputs of a position are independent, and H_t is diagonal."""


class Likelihood(Protocol):
    """A distribution of targets, given a model's outputs [*positions, V]."""

    @property
    def name(self) -> str:
        """Name for the record, which says all that the Fisher depends on."""

    @property
    def at_head(self) -> bool:
        """True if each row of outputs is what the model's last layer returns for one token."""

    def per_output(self, labels: Tensor) -> bool:
        """True if `labels` hold a number for each output, False if they hold a class for each position."""

    def check(self, labels: Tensor, counted: Tensor, outputs: Tensor) -> None:
        """Raise a GramianError for labels of the outputs that are impossible where `counted` [*positions] is True."""

    def draw(self, outputs: Tensor, seed: int, samples_B: Tensor, draw: int) -> Tensor:
        """Targets of all positions, drawn from the distribution that the outputs stand for.

        The randomness depends on (`seed`, id of the sample in `samples_B`, position, output, number of the `draw`) only.
        """

    def summed_loss(self, outputs: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Σ of the loss terms of positions where `counted` is True, in float32 or float64."""

    def hessian(self, outputs_TV: Tensor) -> OutputHessian:
        """Hessian of a loss term by its outputs, for T rows of them."""


@dataclass(frozen=True)
class Softmax:
    """A class for each position, drawn with probabilities p = softmax(f): cross entropy with classes, or probabilities q.

    ```python
    labels = Softmax().draw(logits, seed=0, samples_B=torch.arange(len(logits)), draw=0)
    ```
    """

    at_head: bool = True
    """False if the classes are the tokens of a sample (question answering): no layer returns the logits of a position."""

    @property
    def name(self) -> str:
        """Name for the record."""
        return "softmax"

    def per_output(self, labels: Tensor) -> bool:
        """True for probabilities of the classes [*positions, V], False for classes [*positions]."""
        return labels.is_floating_point()

    def check(self, labels: Tensor, counted: Tensor, outputs: Tensor) -> None:
        """Raise a GramianError for a class outside [0, V), or for numbers that are not the probabilities of V classes."""
        if not labels.is_floating_point():
            refuse_unknown_classes(labels, counted, outputs.shape[-1])
        elif not are_probabilities(labels[counted], -1):
            raise GramianError(
                "labels: are not probabilities of the classes; expected numbers from 0 with a sum of 1, or another loss="
            )

    def draw(self, outputs: Tensor, seed: int, samples_B: Tensor, draw: int) -> Tensor:
        """Draw one class per position from softmax(outputs) [*positions, V]: [*positions]."""
        classes = outputs.shape[-1]
        rows = outputs.detach().reshape(-1, classes)
        uniform = _uniforms(outputs.shape[:-1], seed, samples_B.to(outputs.device), draw).reshape(-1)
        labels = torch.empty(len(rows), dtype=torch.long, device=outputs.device)
        step = max(1, ROWS // classes)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            below = rows[part].double().softmax(-1).cumsum(-1)
            labels[part] = torch.searchsorted(below, uniform[part, None] * below[:, -1:], right=True)[:, 0]
        return labels.clamp_(max=classes - 1).reshape(outputs.shape[:-1])

    def summed_loss(self, outputs: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Σ of the cross entropy over the positions where `counted` is True, in float32 (float64 for float64 outputs)."""
        rows = _at_least_float32(outputs)
        if targets.is_floating_point():
            return F.cross_entropy(rows[counted], targets[counted].to(rows), reduction="sum")
        wanted = targets.masked_fill(~counted, IGNORE).reshape(-1)
        return F.cross_entropy(rows.reshape(-1, rows.shape[-1]), wanted, ignore_index=IGNORE, reduction="sum")

    def hessian(self, outputs_TV: Tensor) -> OutputHessian:
        """diag(p) − p pᵀ."""
        p_TV = outputs_TV.softmax(dim=-1)
        return OutputHessian(p_TV, p_TV)


@dataclass(frozen=True)
class Gaussian:
    """Numbers around the outputs with independent normal noise, y ~ N(f, σ²I): the squared error ‖y − f‖²/(2σ²).

    `nn.MSELoss(reduction="mean")` is 2σ²/V times the mean of these terms over positions: its GGN is the Fisher of σ = √(V/2).
    """

    noise_scale: float = 1.0
    """σ."""
    at_head: bool = True

    @property
    def name(self) -> str:
        """Name for the record, with σ."""
        return f"mse, noise_scale={self.noise_scale:g}"

    def per_output(self, labels: Tensor) -> bool:
        """True: every output has its own target."""
        return True

    def check(self, labels: Tensor, counted: Tensor, outputs: Tensor) -> None:
        """Accept all numbers; a refresh whose sums are not finite is dropped."""

    def draw(self, outputs: Tensor, seed: int, samples_B: Tensor, draw: int) -> Tensor:
        """f + σ z with standard normal z, in float64: [*positions, V]."""
        uniform = _uniforms(outputs.shape, seed, samples_B.to(outputs.device), draw)
        noise: Tensor = self.noise_scale * torch.special.ndtri(uniform.clamp(min=2.0**-54))
        return outputs.detach().double() + noise

    def summed_loss(self, outputs: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Σ ‖y − f‖²/(2σ²) over the positions where `counted` is True, in the wider dtype of both."""
        residual = (_at_least_float32(outputs)[counted] - targets[counted]) / self.noise_scale
        return residual.square().sum() / 2

    def hessian(self, outputs_TV: Tensor) -> OutputHessian:
        """I/σ²."""
        return OutputHessian(torch.full_like(outputs_TV, self.noise_scale**-2))


@dataclass(frozen=True)
class Bernoulli:
    """Independent yes or no for each output, with probability p = sigmoid(f): binary cross entropy with logits."""

    at_head: bool = True

    @property
    def name(self) -> str:
        """Name for the record."""
        return "bce"

    def per_output(self, labels: Tensor) -> bool:
        """True: every output has its own target."""
        return True

    def check(self, labels: Tensor, counted: Tensor, outputs: Tensor) -> None:
        """Raise a GramianError for a target outside [0, 1]."""
        wrong = labels[counted]
        wrong = wrong[~((wrong >= 0) & (wrong <= 1))]
        if len(wrong):
            raise GramianError(f'labels: hold {float(wrong[0]):g}; expected numbers from 0 to 1 for loss="bce"')

    def draw(self, outputs: Tensor, seed: int, samples_B: Tensor, draw: int) -> Tensor:
        """0 or 1 for each output, 1 with probability sigmoid(f): [*positions, V]."""
        uniform = _uniforms(outputs.shape, seed, samples_B.to(outputs.device), draw)
        return (uniform < outputs.detach().double().sigmoid()).to(_at_least_float32(outputs[:0]).dtype)

    def summed_loss(self, outputs: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Σ of the binary cross entropy of all outputs of the positions where `counted` is True, in float32 or float64."""
        rows = _at_least_float32(outputs)[counted]
        return F.binary_cross_entropy_with_logits(rows, targets[counted].to(rows), reduction="sum")

    def hessian(self, outputs_TV: Tensor) -> OutputHessian:
        """diag(p(1 − p))."""
        return OutputHessian(outputs_TV.sigmoid() * (-outputs_TV).sigmoid())


def are_probabilities(labels: Tensor, axis: int) -> bool:
    """True if the numbers along `axis` are distributions: none is negative, and their sum is 1 up to rounding."""
    slack = 1e-2 if labels.dtype in (torch.float16, torch.bfloat16) else 1e-4
    sums = labels.double().sum(axis)
    return bool((labels >= 0).all() & ((sums - 1).abs() <= slack).all())


def refuse_unknown_classes(labels: Tensor, counted: Tensor, classes: int) -> None:
    """Raise a GramianError if a label at a position where `counted` is True is not a class in [0, classes)."""
    wrong = counted & ((labels < 0) | (labels >= classes))
    if bool(wrong.any()):
        raise GramianError(
            f"labels: hold {int(labels[wrong][0])}; expected classes from 0 to {classes - 1}, or {IGNORE} for none"
        )


def check_loss(loss: Any, noise_scale: Any) -> None:
    """Raise a GramianError for a `loss` that is not known, or a `noise_scale` that is not a number above 0 of loss="mse"."""
    if loss is not None and loss not in LOSSES:
        names = ", ".join(f'"{name}"' for name in LOSSES)
        raise GramianError(f"loss: expected one of {names}, or None, got {loss!r}")
    number = isinstance(noise_scale, int | float) and not isinstance(noise_scale, bool)
    if not number or not 0 < noise_scale < float("inf"):
        raise GramianError(f"noise_scale: expected a number above 0, got {noise_scale!r}")


def _uniforms(shape: torch.Size, seed: int, samples_B: Tensor, draw: int) -> Tensor:
    """Uniform numbers in [0, 1) of this shape, samples first, float64, each keyed by (seed, sample, place in it, draw)."""
    return token_uniforms(seed, samples_B, torch.Size(shape[1:]).numel(), draw).reshape(shape)


def _at_least_float32(outputs: Tensor) -> Tensor:
    return outputs if outputs.dtype == torch.float64 else outputs.float()
