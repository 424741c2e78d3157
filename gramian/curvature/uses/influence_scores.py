"""Influence of training samples on a query: the change of the query's loss if sample i had more weight in training.

    score_i = −g_queryᵀ (F + damping)⁻¹ g_i

g_query and g_i are the gradients of the query's loss and of sample i's. To first order the score is the change of the query's
loss per weight that sample i gains in the mean training loss (Koh and Liang 2017, with F for the Hessian). Below zero the
sample helps (the query's loss falls), above zero it harms.

d = (F + damping)⁻¹ g_query is computed once. An ordinary backward over training batches then yields, for every layer,
⟨d, g_i⟩ = Σ_t g_tᵀ D a_t from inputs a_t and output gradients g_t of its tokens, D being d in the weight's shape; per-sample
gradients are not stored.

Legend: B samples, T tokens, Q queries, M×N a parameter.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import full_vector
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.uses.fisher_parameters import blocks_of, completed_gradient, parameters_of
from gramian.linalg.wide import exact_convolutions, wide, wide_mm
from gramian.statistics.by_pass import ByPass
from gramian.taps import Capture
from gramian.taps.gradients import Convolved, Indexed, Outer, PerSampleGradient
from gramian.taps.gradients.joined import Joined
from gramian.taps.gradients.per_sample_gradient import flat
from gramian.taps.gradients.summed import Summed
from gramian.taps.records import ParameterRecord
from gramian.taps.roles import Needs, ParameterInfo, Statistic

Queries = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
ScoresByPass = dict[int, Tensor]
"""{number of the pass: influence scores of its samples on Q queries, [B, Q], or [B, Q, parts]}."""
PARTS = ("sample", "parameter", "token")


class Influence(ByPass):
    """The statistic −g_qᵀ (F + damping)⁻¹ g_i of every captured sample i, for the gradient g_q of one query or several.

    `influence_scores` is the context manager around it.
    """

    needs: Needs = "parameter"

    def __init__(
        self, kfac: KFACNaturalGradient, model: nn.Module, queries: Queries | None = None, by: str = "sample"
    ) -> None:
        """Compute (F + damping)⁻¹ g of every query gradient g: Q natural gradients, and Q copies of the parameters.

        Args:
            kfac: the Fisher, damped and clipped by its options.
            model: the Fisher's model.
            queries: the gradient of a query's loss, {parameter: tensor}, or several of them; None: the current `p.grad`.
            by: "sample", "parameter" (a sample's score is the sum of those of its parameters) or "token" (of those of its
                tokens, and of parts that no single token has, such as those of convolutions).
        """
        blocks_of(kfac)
        if by not in PARTS:
            raise GramianError(f"by: {by!r}; expected one of {', '.join(PARTS)}")
        self.by = by
        if queries is None:
            queries = {n: p.grad for n, p in parameters_of(model).items() if p.requires_grad and p.grad is not None}
        self.single = isinstance(queries, Mapping)
        if isinstance(queries, Mapping):
            queries = [queries]
        if not isinstance(queries, Sequence) or isinstance(queries, str) or not queries:
            raise GramianError("queries: expected {parameter: gradient}, or a list of them")
        found = []
        for query in queries:
            natural = kfac.compute_natural_gradient(model, gradients=completed_gradient(kfac, "queries", query))
            found.append({name: full_vector(value) for name, value in natural.items()})
        self.queries = len(found)
        self.directions = {
            name: torch.stack([d[name] if name in d else torch.zeros_like(like) for d in found])
            for name, like in {name: value for d in found for name, value in d.items()}.items()
        }
        """{parameter: (F + damping)⁻¹ g of every query gradient g, [Q, *shape]}."""
        self.parameters = list(self.directions)
        """Names of the parameters on which a query depends: the last axis of scores by parameter."""

    def divided(self, by: str) -> "Influence":
        """The same scores, divided by "parameter" or "token"; natural gradients are not computed again."""
        found = copy.copy(self)
        found.by = by
        return found

    def start(self, parameters: Mapping[str, ParameterInfo]) -> ScoresByPass:
        """An empty dict of scores; a GramianError unless every parameter that a query depends on is trainable."""
        frozen = next((name for name in self.directions if name not in parameters), None)
        if frozen is not None:
            raise GramianError(f"queries: {frozen} does not train now; expected it to, as for the query")
        return {}

    def update(self, sums: ScoresByPass, record: ParameterRecord) -> None:
        """Add one parameter's part of −g_qᵀ (F + damping)⁻¹ g_i, for all samples i and queries q, to the scores of its pass."""
        if record.parameter not in self.directions:
            return
        directions_Q, scale = self.directions[record.parameter], -record.info.scale
        if self.by == "token":
            self._add_tokens(sums, record, scale * token_products(record.gradient, directions_Q))
            return
        scores_BQ = scale * products(record.gradient, directions_Q)
        if self.by == "parameter":
            parts = scores_BQ.new_zeros(*scores_BQ.shape, len(self.parameters))
            parts[:, :, self.parameters.index(record.parameter)] = scores_BQ
            scores_BQ = parts
        self.add(sums, record, scores_BQ)

    def _add_tokens(self, sums: ScoresByPass, record: ParameterRecord, scores_BQT: Tensor) -> None:
        """Add one parameter's scores [B, Q, T], or [B, Q] where no single token has them, to those of its pass.

        The last place of a pass's scores [B, Q, T + 1] is for parts of no single token, T the most tokens of a parameter.
        """
        number, by_token = record.info.number, scores_BQT.dim() == 3
        tokens, before = scores_BQT.shape[2] if by_token else 0, sums.get(number)
        if before is None or (before.shape[2] == 1 and tokens):
            wider = scores_BQT.new_zeros(*scores_BQT.shape[:2], tokens + 1)
            if before is not None:
                wider[:, :, -1:] += before.to(wider.device)
            sums[number] = before = wider
        scores_BQT = scores_BQT.to(before.device)
        if by_token and tokens == before.shape[2] - 1:
            before[:, :, :-1] += scores_BQT
        else:
            before[:, :, -1] += scores_BQT.sum(2) if by_token else scores_BQT

    def finish(self, sums: ScoresByPass) -> Tensor:
        """Scores of all samples in the order of the passes: [B], or [B, Q] for several queries; parts along a last axis."""
        scores = [sums[number] for number in sorted(sums)]
        if len({one.shape[2:] for one in scores}) > 1:
            raise GramianError('by: passes have different numbers of tokens; expected one length for by="token"')
        found = torch.cat(scores) if scores else torch.zeros(0, self.queries)
        return found[:, 0] if self.single else found


class InfluenceCapture(Capture):
    """The context manager that `influence_scores` returns: a capture with the scores in `values`."""

    def __init__(self, model: nn.Module, influence: Influence, *more: Statistic, **options: Any) -> None:
        """Set up the capture of `influence` and of `more` statistics beside it; `options` are those of `Capture`."""
        self._influence = influence
        super().__init__(model, influence, *more, **options)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters on which a query depends, as on the last axis of `values` with `by="parameter"`."""
        return self._influence.parameters

    @property
    def values(self) -> Tensor:
        """Influence scores of all samples so far, [B], or [B, Q] for a list of Q queries; a GramianError before a backward.

        With `by="parameter"` a last axis has the `parameters`; with `by="token"` the tokens, and last what no token has alone.
        """
        if not self._passes:
            raise GramianError("scores: no backward has run yet; expected loss.backward() inside the block")
        found: Tensor = self[self._influence]
        return found


def influence_scores(
    kfac: KFACNaturalGradient,
    model: nn.Module,
    queries: Queries | None = None,
    *,
    by: str = "sample",
    loss_reduction: str | float = "mean",
    batch_size: int | None = None,
    sample_ids: Tensor | None = None,
    loss_scale: "float | torch.amp.GradScaler" = 1.0,
    audit: bool = True,
) -> InfluenceCapture:
    """Compute the influence of training samples during ordinary backwards over them.

    ```python
    F.cross_entropy(model(query_x), query_y).backward()
    with influence_scores(kfac, model) as scores:  # the query is what p.grad holds
        for x, y in training_batches:
            F.cross_entropy(model(x), y).backward()
    scores.values, scores.coverage
    ```

    Args:
        kfac: the Fisher, damped by its options.
        model: the Fisher's model.
        queries: the gradient of a query's loss, {parameter: tensor}, or several of them; None: the current `p.grad`.
        by: "sample"; "parameter" or "token" divide each score among the parameters, or among the tokens of the sample.
        loss_reduction: "mean" or "sum" over the samples of the batch, or the coefficient of one sample's loss.
        batch_size: B, if it is not the first axis of the model's first tensor argument.
        sample_ids: [B] or [B, T]: the sample that each row or token belongs to; None: row i is sample i.
        loss_scale: the factor of the loss before `backward`, or the `GradScaler` that applies it.
        audit: whether every backward compares the sum of the per-sample gradients with autograd's gradients.

    Returns:
        A context manager with `values` ([B], or [B, Q] for a list of queries; passes in order), `parameters` and `coverage`.
    """
    return InfluenceCapture(
        model,
        Influence(kfac, model, queries, by),
        loss_reduction=loss_reduction,
        batch_size=batch_size,
        sample_ids=sample_ids,
        loss_scale=loss_scale,
        audit=audit,
    )


# ---- ⟨d, g_i⟩ --------------------------------------------------------------------------------------------------------


def products(gradient: PerSampleGradient, directions_Q: Tensor) -> Tensor:
    """Inner products ⟨d_q, g_i⟩ [B, Q] of samples' gradients with directions d [Q, *shape], without storing all g_i.

    D is d_q in the weight's shape; l_t and r_t are the two vectors of token t whose outer products sum to g_i.

    | gradient | algorithm | FLOPs |
    |---|---|---|
    | linear, one query or one token | Σ_t l_tᵀ D r_t: one matrix product and one elementwise sum | 2·B·T·M·N·Q |
    | linear, otherwise | g_i of some samples at a time | 2·B·M·N·(T + Q) |
    | embedding | rows of D looked up | 2·B·T·Q·(width of a row) |
    | convolution | its own forward with D for the weight | that of the forward, Q times |
    | anything else, of N entries | g_i of some samples at a time | 2·B·N·Q |
    """
    directions_Q = directions_Q.to(gradient.tensors()[0].device)
    queries = len(directions_Q)
    if isinstance(gradient, Joined):
        return torch.stack([products(part, directions_Q) for part in gradient.parts]).sum(0)
    if isinstance(gradient, Outer) and queries * gradient.tokens <= queries + gradient.tokens:
        return torch.stack([_outer(gradient, d) for d in directions_Q], dim=1)
    if isinstance(gradient, Indexed):
        return torch.stack([_indexed(gradient, d) for d in directions_Q], dim=1)
    if isinstance(gradient, Convolved):
        return torch.stack([_convolved(gradient, d) for d in directions_Q], dim=1)
    d_NQ = flat(directions_Q).mT
    written = (flat(part.per_sample()) for part in gradient.chunks())
    return torch.cat([wide_mm(g_BN, d_NQ.to(g_BN.dtype)) for g_BN in written])


def token_products(gradient: PerSampleGradient, directions_Q: Tensor) -> Tensor:
    """Parts of ⟨d_q, g_i⟩ by token, [B, Q, T]; [B, Q] where g_i is no sum over tokens, or one over several kinds of them."""
    directions_Q = directions_Q.to(gradient.tensors()[0].device)
    if isinstance(gradient, Joined):
        parts = [token_products(part, directions_Q) for part in gradient.parts]
        if len({part.shape for part in parts}) > 1:
            parts = [part.sum(2) if part.dim() == 3 else part for part in parts]
        return torch.stack(parts).sum(0)
    if isinstance(gradient, Outer):
        return torch.stack([_outer_tokens(gradient, d) for d in directions_Q], dim=1)
    if isinstance(gradient, Indexed):
        return torch.stack([_indexed_tokens(gradient, d) for d in directions_Q], dim=1)
    if isinstance(gradient, Summed):
        tokens_BTN = wide(gradient.tokens_BTN)
        return (tokens_BTN @ flat(directions_Q).mT.to(tokens_BTN)).mT
    return products(gradient, directions_Q)


def _outer(gradient: Outer, d_MN: Tensor) -> Tensor:
    """⟨D, g_i⟩ = Σ_t l_tᵀ D r_t, [B], for g_i = Σ_t l_t r_tᵀ."""
    return _outer_tokens(gradient, d_MN).sum(1)


def _outer_tokens(gradient: Outer, d_MN: Tensor) -> Tensor:
    """l_tᵀ D r_t of each token, [B, T]; D multiplies l or r, whichever makes the smaller product."""
    left, right = gradient.left_BTM, gradient.right_BTN
    d_MN = d_MN.to(wide_dtype(left, right))
    if left.shape[2] < right.shape[2]:
        met, other = wide_mm(right.flatten(0, 1), d_MN.mT), left
    else:
        met, other = wide_mm(left.flatten(0, 1), d_MN), right
    return (met.reshape(other.shape) * other).sum(2)


def _indexed(gradient: Indexed, d_VD: Tensor) -> Tensor:
    """⟨D, g_i⟩ = Σ_t D[x_t] · g_t, [B], for an embedding with indices x_t and output gradients g_t."""
    return _indexed_tokens(gradient, d_VD).sum(1)


def _indexed_tokens(gradient: Indexed, d_VD: Tensor) -> Tensor:
    """D[x_t] · g_t of each token, [B, T]."""
    rows_BTD = wide(gradient.rows_BTD)
    return (d_VD.to(rows_BTD.dtype)[gradient.index_BT] * rows_BTD).sum(2)


def _convolved(gradient: Convolved, d: Tensor) -> Tensor:
    """⟨D, g_i⟩ of a convolution, [B]: the sum over channels and positions of output gradient ⊙ (inputs convolved with D)."""
    images, gradients = wide(gradient.images_BK).flatten(0, 1), wide(gradient.gradients_BK).flatten(0, 1)
    if not len(images):
        return images.new_zeros(gradient.batch)
    how = gradient.geometry
    none = [0] * len(how.stride)
    with exact_convolutions():
        met = torch.convolution(
            images, d.to(images.dtype), None, how.stride, how.padding, how.dilation, False, none, how.groups
        )
    return (met * gradients).reshape(gradient.batch, -1).sum(1)
