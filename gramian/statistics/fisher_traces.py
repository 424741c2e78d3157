"""The trace of the per-token Fisher, split over the tokens of each sample or over the rows of each matrix.

Legend: B samples, T tokens, M×N a weight.

A token with input a_t and output gradient g_t adds g_t a_tᵀ and g_t to the gradients of W and b in y_t = W a_t + b, so its part
of tr F is ‖g_t‖²(‖a_t‖² + 1): two norms, and never a matrix. The sum over tokens and layers, divided by the number of samples,
is the trace of `DiagonalFisher("token")`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from gramian.linalg.wide import pieces, wide, wide_norms
from gramian.statistics.by_pass import ByPass
from gramian.taps.gradients import Indexed, Outer, PerSampleGradient, Summed
from gramian.taps.gradients.joined import Joined
from gramian.taps.records import LayerRecord, ParameterRecord
from gramian.taps.roles import AdditiveStatistic, Needs, ParameterInfo, Sums, means, zero_sums

TracesByPass = dict[int, dict[str, Tensor]]
"""{number of the pass (a forward and its backward): {layer: squared gradient norms of its tokens, [B, T]}}."""


class TokenTraces(ByPass):
    """The statistic {layer: [B, T]}: squared norm of each token's gradient, summed over the layer's parameters.

    ```python
    traces = gramian.statistics.TokenTraces()
    with gramian.observe(model, traces) as seen:
        F.cross_entropy(model(x), y).backward()
    seen[traces]["fc"]  # [B, T]
    ```

    Every call of a layer is squared by itself. A layer without tokens (a convolution, or one without a formula) has one number
    per sample, [B, 1]. Several passes are concatenated along B, shorter ones filled up with zeros. Cost: one read of inputs and
    output gradients.
    """

    needs: Needs = "layer"

    def update(self, sums: TracesByPass, record: LayerRecord) -> None:
        """Add the squared gradient norms of one call of a layer, by token, to the results of its pass."""
        scale = record.info.scale
        layers = sums.setdefault(record.info.number, {})
        for gradient in record.gradients.values():
            traces_BT = _by_token(gradient) * scale**2
            before = layers.get(record.layer)
            layers[record.layer] = traces_BT if before is None else _added(before, traces_BT)

    def finish(self, sums: TracesByPass) -> dict[str, Tensor]:
        """{layer: [B, T]} with all passes concatenated, samples in the order of their forwards."""
        passes = [sums[number] for number in sorted(sums)]
        found = {}
        for layer in dict.fromkeys(layer for layers in passes for layer in layers):
            used = [layers.get(layer) for layers in passes]
            parts = [
                next(iter(layers.values()))[:, :1] * 0 if part is None else part
                for layers, part in zip(passes, used, strict=True)
            ]
            longest = max(part.shape[1] for part in parts)
            device = next(part.device for part in used if part is not None)
            found[layer] = torch.cat([F.pad(part.to(device), (0, longest - part.shape[1])) for part in parts])
        return found


class RowTraces(AdditiveStatistic):
    """The statistic {parameter: [M]}: squared norm of each row of a token's gradient, summed over tokens, mean over samples.

    Used as `TokenTraces`; `seen[rows]["embedding.weight"]` has one number for each token of the vocabulary.

    The rows of an embedding and of the output head are tokens of the vocabulary. This equals `by_row` of
    `DiagonalFisher("token")`, for T·(M+N) in place of T·M·N products (T tokens, weight M×N), and without memory of the
    parameter's size.
    """

    needs: Needs = "parameter"
    per_sample = True

    def start(self, parameters: Mapping[str, ParameterInfo]) -> Sums:
        """{parameter of two axes or more: one zero per row}, and a sample count of 0."""
        return zero_sums(parameters, rows=True)

    def update(self, sums: Sums, record: ParameterRecord) -> None:
        """Add the squared row norms of one parameter's token gradients in one pass."""
        if record.parameter in sums:
            sums[record.parameter] += _by_row(record.gradient) * record.info.scale**2

    def finish(self, sums: Sums) -> dict[str, Tensor]:
        """{parameter: mean over samples of its squared row norms, [M]}, zeros for a parameter that no pass used."""
        return means(sums)


def _by_token(gradient: PerSampleGradient) -> Tensor:
    """Squared norm of each token's gradient, [B, T]; [B, 1] where a sample is not made of tokens."""
    if isinstance(gradient, Outer):
        return (wide_norms(gradient.left_BTM) * wide_norms(gradient.right_BTN)).square()
    if isinstance(gradient, Summed):
        return wide_norms(gradient.tokens_BTN).square()
    if isinstance(gradient, Indexed):
        return wide_norms(gradient.rows_BTD).square()
    return gradient.squared_norms()[:, None]


def _added(left_BT: Tensor, right_BT: Tensor) -> Tensor:
    """The sum of two results [B, T] of one layer; where T differs, both are summed over tokens to [B, 1] first."""
    if left_BT.shape != right_BT.shape:
        left_BT, right_BT = left_BT.sum(1, keepdim=True), right_BT.sum(1, keepdim=True)
    return left_BT + right_BT


def _by_row(gradient: PerSampleGradient) -> Tensor:
    """Squared norm of each row of a token's gradient, summed over all tokens and samples, [M]."""
    if isinstance(gradient, Outer):
        left_TM = gradient.left_BTM.flatten(0, 1)
        squares_T = wide_norms(gradient.right_BTN.flatten(0, 1)).square()
        total = wide(left_TM[:0]).new_zeros(left_TM.shape[1])
        for rows in pieces(*left_TM.shape):
            total += wide(left_TM[rows]).square().mT @ squares_T[rows].to(total)
        return total
    if isinstance(gradient, Indexed):
        squares_BT = wide_norms(gradient.rows_BTD).square()
        return squares_BT.new_zeros(gradient.shape[0]).index_add_(0, gradient.index_BT.flatten(), squares_BT.flatten())
    if isinstance(gradient, Joined):
        return torch.stack([_by_row(part) for part in gradient.parts]).sum(0)
    return gradient.token_squares().flatten(1).sum(1)
