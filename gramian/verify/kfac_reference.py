"""Dense reference of K-FAC for a model, on the CPU in float64.

The reference code knows linear layers only. It is given a twin of the model with the same numbers, in which an embedding is a
linear layer on one-hot rows and a convolution one on patches; nothing of the library takes part in the twin.

Legend: B samples, T tokens, I inputs (M with the bias), O outputs, V classes, N loss terms.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.oracles import dense_kfac, single_sample
from gramian.verify.kfac_subjects import IGNORE, KFACSubject, cross_entropy

DAMPING, DAMPING_A, DAMPING_G = 1e-2, 2e-2, 5e-3
KAPPA = 10.0
"""Largest condition number that the clip allows in the checks: so low that it acts on most layers."""


class _Lookup(nn.Module):
    """An embedding, computed as a linear layer on one-hot rows; a single row of ids is expanded to the batch."""

    def __init__(self, table: nn.Embedding, batch: int) -> None:
        super().__init__()
        self.classes, self.batch = table.num_embeddings, batch
        self.linear = _linear_with(table.weight.detach().mT, None)

    def forward(self, ids_BT: Tensor) -> Tensor:
        ids_BT = ids_BT.expand(self.batch, -1)
        out: Tensor = self.linear(F.one_hot(ids_BT, self.classes).to(self.linear.weight))
        return out


class _Patches(nn.Module):
    """A convolution, computed as a linear layer on the patches of its input."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.geometry: dict[str, Any] = {
            name: getattr(conv, name) for name in ("kernel_size", "stride", "padding", "dilation")
        }
        self.linear = _linear_with(conv.weight.detach().flatten(1), conv.bias)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        g = self.geometry
        sizes = zip(x_BCHW.shape[2:], g["kernel_size"], g["stride"], g["padding"], g["dilation"], strict=True)
        places = [(side + 2 * pad - hop * (size - 1) - 1) // step + 1 for side, size, step, pad, hop in sizes]
        y_BOHW: Tensor = self.linear(F.unfold(x_BCHW, **g).mT).mT.unflatten(2, places)
        return y_BOHW


def _linear_with(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    outputs, inputs = weight_OI.shape
    linear = nn.Linear(inputs, outputs, bias=bias_O is not None, dtype=weight_OI.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight_OI)
        if bias_O is not None:
            linear.bias.copy_(bias_O)
    return linear


@dataclass(frozen=True)
class ExpectedBlock:
    """Reference of one K-FAC block (parameters of a layer): factors A [M, M] and G [O, O], and the gradient Y [O, M].

    O are outputs, M inputs with the bias.
    """

    G: Tensor
    Y_OM: Tensor
    A: Tensor | None = None
    """Input factor; None: the block is the matrix G alone, and Y is a column."""

    def natural(self, mode: str, power: float, clip: bool, damping: float = DAMPING) -> Tensor:
        """The natural gradient (F + damping)^power Y of this block, where F Y = G Y A, or G Y without A.

        `mode` is the damping mode; with `clip` condition numbers are clipped to `KAPPA`.
        """
        kappa = KAPPA if clip else None
        if self.A is None:
            value = DAMPING_G if mode == "factored" else damping
            return dense_kfac.matrix_power(self.G, power, value, kappa) @ self.Y_OM
        return dense_kfac.natural(self.A, self.G, self.Y_OM, power, mode, damping, DAMPING_A, DAMPING_G, kappa)


class KFACReference:
    """The reference K-FAC blocks of a model on a batch, computed when first used.

    Blocks have the library's names: the first layer that uses the weight, or the parameter if it is not of a layer.
    """

    def __init__(self, subject: KFACSubject, labels: Tensor | None = None, exact_head: bool = False) -> None:
        """Build the model and the batch of `subject`; blocks are computed later.

        `labels` replace the batch's own (None: they do not); positions with the label `IGNORE` have no loss term. `exact_head`
        computes the head's G from its softmax instead of its gradients.
        """
        self.model = subject.model(torch.device("cpu"))
        self.x, own = subject.batch(torch.device("cpu"))
        self.y = own if labels is None else labels
        self.head, self.exact_head = subject.head, exact_head
        self.terms = int((self.y != IGNORE).sum())
        self._computed: dict[tuple[str, str, float, bool, float], Tensor] = {}

    def natural(self, block: str, mode: str, power: float, clip: bool, damping: float = DAMPING) -> Tensor:
        """The natural gradient of the K-FAC block named `block`, see `ExpectedBlock.natural`; computed once."""
        key = (block, mode, power, clip, damping)
        if key not in self._computed:
            self._computed[key] = self.blocks[block].natural(mode, power, clip, damping)
        return self._computed[key]

    @cached_property
    def blocks(self) -> dict[str, ExpectedBlock]:
        """{block name: reference block} of all parameters of the model."""
        layers = {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Linear | nn.Embedding | nn.Conv2d)}
        of_twin = self._layers_of_twin(layers)
        users: dict[int, list[str]] = {}
        for name, module in layers.items():
            users.setdefault(id(module.weight), []).append(name)
        found = {
            names[0]: _tied(*(of_twin[n] for n in names)) if names[1:] else of_twin[names[0]]
            for names in users.values()
        }
        in_layers = {id(p) for module in layers.values() for p in module.parameters()}
        rest = [name for name, p in self.model.named_parameters() if id(p) not in in_layers]
        return {**found, **self._single_parameters(rest)} if rest else found

    def _layers_of_twin(self, layers: Mapping[str, nn.Module]) -> dict[str, ExpectedBlock]:
        twin, inner = deepcopy(self.model), {}
        for name, module in layers.items():
            inner[name] = name if isinstance(module, nn.Linear) else f"{name}.linear"
            if isinstance(module, nn.Embedding):
                twin.set_submodule(name, _Lookup(module, len(self.x)))
            elif isinstance(module, nn.Conv2d):
                twin.set_submodule(name, _Patches(module))
        twin.zero_grad()
        tokens = dense_kfac.layer_tokens(
            twin, lambda: cross_entropy(twin, self.x, self.y).backward(), list(inner.values())
        )
        found = {}
        for name, within in inner.items():
            linear = twin.get_submodule(within)
            assert isinstance(linear, nn.Linear) and linear.weight.grad is not None
            weights_T = self._weights(len(tokens[within].inputs_TI))
            has_bias = linear.bias is not None
            A, G = dense_kfac.factors(tokens[within], self.terms, 1 / self.terms, has_bias, weights_T)
            if self.exact_head and name == self.head:
                with torch.no_grad():
                    logits_TV = twin(self.x).flatten(0, -2)
                G = dense_kfac.softmax_fisher(logits_TV, self.terms, weights_T)
            parts = [linear.weight.grad]
            if has_bias:
                assert linear.bias.grad is not None
                parts.append(linear.bias.grad[:, None])
            found[name] = ExpectedBlock(G, torch.cat(parts, dim=1), A)
        return found

    def _weights(self, tokens: int) -> Tensor:
        """Weight of each of `tokens` tokens, 1 if it has a loss term, else 0; a sample's only label counts for all of them."""
        counted = (self.y != IGNORE).double()
        return counted.flatten().repeat_interleave(tokens // counted.numel())

    def _single_parameters(self, names: Sequence[str]) -> dict[str, ExpectedBlock]:
        """Blocks G = Σ_i g_i g_iᵀ / N of parameters outside K-FAC's layers: gradient g_i of sample i, N loss terms."""

        def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(model, x, y, "sum")

        per_sample = single_sample.per_sample_gradients(self.model, summed, (self.x, self.y), names)
        found = {}
        for name, gradients in per_sample.items():
            g_BP = gradients.flatten(1)
            found[name] = ExpectedBlock(g_BP.mT @ g_BP / self.terms, g_BP.sum(0)[:, None] / self.terms)
        return found


def _tied(table: ExpectedBlock, head: ExpectedBlock) -> ExpectedBlock:
    """Join the K-FAC blocks of a weight tied between embedding (`table`) and head.

    Each factor is the mean of both blocks' factors at trace 1, weighted by tr A · tr G of the block, and scaled back. The
    embedding is the head's weight transposed, so its A and G are exchanged.
    """
    assert table.A is not None and head.A is not None
    of_head = head.A.trace() * head.G.trace()
    of_table = table.A.trace() * table.G.trace()
    share = of_head / (of_head + of_table)
    A = share * head.A / head.A.trace() + (1 - share) * table.G / table.G.trace()
    G = share * head.G / head.G.trace() + (1 - share) * table.A / table.A.trace()
    return ExpectedBlock(G * (of_head + of_table) / head.A.trace(), head.Y_OM + table.Y_OM.mT, A * head.A.trace())
