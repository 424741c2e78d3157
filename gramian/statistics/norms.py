"""Per-sample gradient norms: ‖g_i‖ over all trainable parameters, without forming g_i."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.plan.norm_algorithm import ALGORITHMS, Algorithm
from gramian.taps import Capture
from gramian.taps.records import ParameterRecord
from gramian.taps.roles import Needs, ParameterInfo

SquaresByPass = dict[int, Tensor]
"""{number of the pass: Σ_p ‖g_ip‖², [B]}: a sum over parameters; samples stay apart."""


@dataclass(frozen=True)
class Norms:
    """The norms of all samples that were seen."""

    values: Tensor
    """[B], passes concatenated in the order of their forwards."""


class PerSampleNorms:
    """‖g_i‖ = √(Σ_p ‖g_ip‖²) for every sample.

    Linear layers have two exact algorithms (see `gramian.plan.norm_algorithm`); "auto" takes the cheaper at each shape.
    """

    needs: Needs = "parameter"
    per_sample = True

    def __init__(self, algorithm: Algorithm = "auto") -> None:
        """Set the algorithm.

        Args:
            algorithm: "auto", "direct" (‖GᵀA‖) or "gram" (⟨AAᵀ, GGᵀ⟩).

        Raises:
            GramianError: for another name.
        """
        if algorithm not in ALGORITHMS:
            raise GramianError(f'algorithm: expected one of {", ".join(ALGORITHMS)}, got "{algorithm}"')
        self.algorithm = algorithm

    def start(self, parameters: Mapping[str, ParameterInfo]) -> SquaresByPass:
        """No pass yet."""
        return {}

    def update(self, sums: SquaresByPass, record: ParameterRecord) -> None:
        """Add one parameter's squared norms to its pass."""
        squares_B, number = record.squared_norms(self.algorithm), record.info.number
        if number in sums:  # layers may sit on several devices
            sums[number] = sums[number] + squares_B.to(sums[number].device)
        else:
            sums[number] = squares_B

    def count(self, sums: SquaresByPass, samples: int) -> None:
        """Samples count themselves."""

    def forget(self, sums: SquaresByPass, number: int) -> None:
        """Take a pass out whose backward failed half-way."""
        sums.pop(number, None)

    def merge(self, left: SquaresByPass, right: SquaresByPass) -> SquaresByPass:
        """Samples of the left, then samples of the right."""
        behind = max(left, default=0) + 1
        return {**left, **{behind + number: squares for number, squares in right.items()}}

    def finish(self, sums: SquaresByPass) -> Norms:
        """Square roots, in order."""
        squares = [sums[number] for number in sorted(sums)]
        return Norms(torch.cat(squares).sqrt() if squares else torch.zeros(0))


class NormCapture(Capture):
    """The capture behind `per_sample_norms`."""

    def __init__(self, model: nn.Module, algorithm: Algorithm, **options: object) -> None:
        """One statistic."""
        self._norms = PerSampleNorms(algorithm)
        super().__init__(model, self._norms, **options)  # type: ignore[arg-type]

    @property
    def values(self) -> Tensor:
        """[B], the norms of all samples seen so far.

        Raises:
            GramianError: before the first backward.
        """
        if not self._passes:
            raise GramianError("norms: no backward has run yet; expected loss.backward() inside the block")
        norms: Norms = self[self._norms]
        return norms.values


def per_sample_norms(
    model: nn.Module,
    loss_reduction: str | float = "mean",
    *,
    algorithm: Algorithm = "auto",
    batch_size: int | None = None,
    sample_ids: Tensor | None = None,
    loss_scale: "float | torch.amp.GradScaler" = 1.0,
    audit: bool = True,
    proof: str | int = "auto",
) -> NormCapture:
    """Norms of per-sample gradients from an ordinary backward.

    ```python
    with gramian.per_sample_norms(model, loss_reduction="mean") as norms:
        F.cross_entropy(model(x), y).backward()
    norms.values, norms.coverage
    ```

    Args:
        model: the user's model, or any wrapper of it.
        loss_reduction: "mean" or "sum" over the samples of the batch, or the coefficient of one sample's loss.
        algorithm: "auto", "direct" or "gram", for linear layers.
        batch_size: B, if it is not the first axis of the model's first tensor argument.
        sample_ids: [B] or [B, T]: the unit that each row or token belongs to; None: row i is sample i.
        loss_scale: what the loss was multiplied by before `backward`, or the `GradScaler` that does it.
        audit: compare with autograd's gradients in every backward.
        proof: "auto": show on the first batch of every structure of inputs that each row depends on its sample alone; a
            number: and again after so many forwards; "off": trust the shapes.

    Returns:
        A context manager with `values` ([B], float32, float64 for a float64 model; with "mean", B × the norm of sample i's
        share of the gradient) and `coverage`.
    """
    return NormCapture(
        model,
        algorithm,
        loss_reduction=loss_reduction,
        batch_size=batch_size,
        sample_ids=sample_ids,
        loss_scale=loss_scale,
        audit=audit,
        proof=proof,
    )
