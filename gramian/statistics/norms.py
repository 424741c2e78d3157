"""Per-sample gradient norms: ‖g_i‖ over all trainable parameters, without forming g_i."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.plan.norm_algorithm import ALGORITHMS, Algorithm
from gramian.statistics.by_pass import ByPass
from gramian.taps import Capture
from gramian.taps.records import ParameterRecord
from gramian.taps.roles import Needs

SquaresByPass = dict[int, Tensor]
"""{number of the pass (a forward and its backward): squared gradient norm of each sample, summed over parameters, [B]}."""


@dataclass(frozen=True)
class Norms:
    """The per-sample gradient norms of all samples that were seen."""

    values: Tensor
    """Norm of each sample's gradient, [B], passes concatenated in the order of their forwards."""


class PerSampleNorms(ByPass):
    """The statistic ‖g_i‖ = √(Σ_p ‖g_ip‖²) of every sample i over parameters p; `per_sample_norms` is a shorter call.

    ```python
    norms = gramian.PerSampleNorms()
    with gramian.observe(model, norms) as seen:
        F.cross_entropy(model(x), y).backward()
    seen[norms].values
    ```

    Linear layers have two exact algorithms (see `gramian.plan.norm_algorithm`); "auto" takes the cheaper at each shape.
    """

    needs: Needs = "parameter"

    def __init__(self, algorithm: Algorithm = "auto") -> None:
        """Set the algorithm of linear layers with inputs A and output gradients G.

        "direct" is ‖GᵀA‖, "gram" ⟨AAᵀ, GGᵀ⟩, "auto" the cheaper one at each shape; another value raises a `GramianError`.
        """
        if algorithm not in ALGORITHMS:
            raise GramianError(f'algorithm: expected one of {", ".join(ALGORITHMS)}, got "{algorithm}"')
        self.algorithm = algorithm

    def update(self, sums: SquaresByPass, record: ParameterRecord) -> None:
        """Add one parameter's squared norms [B] to those of its pass."""
        self.add(sums, record, record.squared_norms(self.algorithm))

    def finish(self, sums: SquaresByPass) -> Norms:
        """The gradient norms of all samples, [B], in the order of their forwards, as `Norms`."""
        squares = [sums[number] for number in sorted(sums)]
        return Norms(torch.cat(squares).sqrt() if squares else torch.zeros(0))


class NormCapture(Capture):
    """The context manager that `per_sample_norms` returns: a capture with the norms in `values`."""

    def __init__(self, model: nn.Module, algorithm: Algorithm, **options: object) -> None:
        """Observe the per-sample norms only; `options` are those of `Capture`."""
        self._norms = PerSampleNorms(algorithm)
        super().__init__(model, self._norms, **options)  # type: ignore[arg-type]

    @property
    def values(self) -> Tensor:
        """Norms of all samples seen so far, [B]; a `GramianError` before the first backward."""
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
    """A context that observes the norms of per-sample gradients in ordinary backwards inside it.

    ```python
    with gramian.per_sample_norms(model, loss_reduction="mean") as norms:
        F.cross_entropy(model(x), y).backward()
    norms.values, norms.coverage
    ```

    Args:
        model: the user's model, or any wrapper of it.
        loss_reduction: "mean" or "sum" over the samples of the batch, or the coefficient of one sample's loss.
        algorithm: how linear layers compute norms: "direct", "gram", or "auto" for the cheaper one at each shape.
        batch_size: B, if it is not the first axis of the model's first tensor argument; None: it is.
        sample_ids: [B] or [B, T]: number of the sample that each row or token belongs to; None: row i is sample i.
        loss_scale: the factor of the loss before `backward`, or the `GradScaler` that multiplies by it.
        audit: compare with autograd's gradients in every backward.
        proof: row proof, which checks that each row of a layer's tensors depends on its sample alone. "auto": on the first
            batch of every structure of inputs; a number n: also after every n forwards; "off": trust the shapes.

    Returns:
        A context manager with `values` ([B], float32, float64 for a float64 model; with "mean", B × the norm of sample i's
        share of the gradient) and `coverage`, which layers were observed and how.
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
