"""Importance of parameters and tokens by the Fisher: diag F, and the share of each token in its trace.

Legend: B samples, T tokens, o outputs, m inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.consistency import module_of
from gramian.curvature.blocks.parameter_parts import ParameterParts
from gramian.curvature.estimate.fisher_labels import LabelArguments, question_of, run_pass
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.options import check_seed
from gramian.curvature.uses.fisher_parameters import blocks_of, parts_source
from gramian.statistics import DiagonalFisherEstimate, RowTraces, TokenTraces
from gramian.taps import Capture
from gramian.taps.hub import hub_of
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.roles import Withheld


def parameter_importance(source: KFACNaturalGradient | DiagonalFisherEstimate) -> dict[str, Tensor]:
    """diag F of every parameter that has a Fisher block, undamped: {parameter: tensor of its shape}.

    For F = G ⊗ A it is G_ii·A_jj, from the diagonals of A and G: o·m products, and nothing larger than the parameter. For
    EK-FAC it is Q_G⊙² S Q_A⊙²ᵀ, from its eigenvalues S [r, s] and eigenvectors Q_G, Q_A.
    K-FAC's F is that of one loss term, a diagonal estimate's that of one sample: compare entries of one source only.

    ```python
    importance = parameter_importance(kfac)["blocks.0.fc.weight"]
    ```

    Args:
        source: K-FAC factors (collective where processes shard them), or an estimate of the diagonal itself; a GramianError if
            it has no data.
    """
    if isinstance(source, DiagonalFisherEstimate):
        if not source.samples:
            raise GramianError("source: has seen no sample; expected a capture before")
        return source.diagonal()
    if not isinstance(source, KFACNaturalGradient):
        raise GramianError(f"source: expected K-FAC factors or a diagonal estimate, got {type(source).__name__}")
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for block in blocks_of(source, "source").values():
            found.update(_diagonal(block))
    return ParameterParts.of(parts_source(source)).join(found)


def _diagonal(block: Block) -> dict[str, Tensor]:
    """{parameter: diagonal of the Fisher, in its shape} of one block."""
    spec = block.spec
    if block.correction is not None:
        return {name: t.clone() for name, t in spec.tensors(block.correction.diagonal().to(spec.device)).items()}
    g_O = block.G.diagonal().to(spec.device)
    if block.A is None:
        return {spec.parameters[0]: g_O.reshape(spec.shapes[0]).clone()}
    a_M = block.A.diagonal().to(spec.device)
    weights_M = a_M[:-1] if spec.has_bias else a_M
    rows, columns = (weights_M, g_O) if spec.layout in ("in_out", "table") else (g_O, weights_M)
    found = {spec.parameters[0]: torch.outer(rows, columns).reshape(spec.shapes[0])}
    if spec.has_bias:
        found[spec.parameters[1]] = (g_O * a_M[-1]).reshape(spec.shapes[1])
    return found


@dataclass(frozen=True)
class TokenImportance:
    """Squared norms of the tokens' gradients of the summed loss, by token and by row of a weight.

    Divided by the number of loss terms they are parts of the trace of the Fisher that K-FAC ("expand") approximates.
    """

    layers: dict[str, Tensor]
    """{layer: ‖g_t‖²‖a_t‖² of output gradients g_t and inputs a_t (with the bias), [B, T]}; [B, 1] for layers without tokens.
    """
    rows: dict[str, Tensor]
    """{parameter with two axes or more: squared gradient norm of each row, summed over all tokens}.

    Rows of an embedding table or of a head are vocabulary entries.
    """

    @property
    def tokens(self) -> Tensor:
        """Importance of each token, [B, T]: the sum over the layers with T tokens per sample, the most that any layer has."""
        return torch.stack([t for t in self.layers.values() if t.shape[1] == self._length]).sum(0)

    @property
    def untold(self) -> list[str]:
        """Names of layers that `tokens` leaves out because they have fewer than T tokens per sample (a pooled layer, say)."""
        return [layer for layer, t in self.layers.items() if t.shape[1] != self._length]

    @property
    def _length(self) -> int:
        return max(t.shape[1] for t in self.layers.values())


def token_importance(
    model: nn.Module,
    batch: Any,
    fisher_type: str = "empirical",
    *,
    n_samples: int = 1,
    seed: int = 0,
    causal_shift: bool | None = None,
) -> TokenImportance:
    """The contribution of each token of a batch, and of each row of tables and heads, to the trace of the Fisher.

    It runs its own passes; the user's gradients, buffers and random state are preserved. Cost: a forward and a backward without
    weight gradients, and one read of each layer's inputs and output gradients; nothing larger than these is stored.

    ```python
    found = token_importance(model, {"input_ids": ids, "labels": ids})
    found.tokens, found.rows["lm_head.weight"]
    ```

    Args:
        model: a model that returns logits, alone or as `.logits`.
        batch: a mapping as Hugging Face models take it, or (inputs, labels).
        fisher_type: "empirical" (the batch's labels) or "mc" (drawn from the model).
        n_samples: number of draws of labels for "mc", over which token values are averaged.
        seed: seed of the draws; a drawn label depends on seed, row, position and number of the draw.
        causal_shift: whether position t predicts label t+1; None: as Hugging Face does for this model.

    Raises:
        GramianError: for fisher_type "true", an empty batch, or one without labels for "empirical".
    """
    root = module_of(model)
    arguments = LabelArguments(fisher_type, n_samples, None, None, causal_shift)
    arguments.check()
    check_seed(seed)
    if fisher_type == "true":
        raise GramianError('fisher_type: expected "empirical" or "mc", got "true"')
    question = question_of(root, batch, arguments)
    if question.batch.source_BT is not None:
        raise GramianError(
            "model: is an encoder with a decoder, whose layers see different tokens; expected one of both"
        )
    traces, rows, draws = TokenTraces(), RowTraces(), range(n_samples) if fisher_type == "mc" else (None,)
    size = question.batch.inputs.shape[0]
    if not size:
        raise GramianError("batch: has no rows; expected at least one")
    with preserve_state(root), hub_of(root).governed_by(Withheld()):
        found = question.find_positions(root)
        with Capture(root, traces, rows, loss_reduction="sum", batch_size=size) as seen:
            for draw in draws:
                run_pass(root, question, found, draw, seed, torch.arange(size))
    by_layer = {layer: t.reshape(len(draws), size, -1).mean(0) for layer, t in seen[traces].items()}
    return TokenImportance(by_layer, {name: t * size for name, t in seen[rows].items()})
