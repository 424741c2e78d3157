"""Which parameters of a layer without a formula are taken for matrices, by the classes and shapes that have them.

| parameter | matrices |
|---|---|
| of a linear layer, an embedding, a convolution | as their sites have it, by group of a convolution |
| of a transposed convolution [in, out/groups, *kernel] | [in/groups, out/groups·kernel] for each group, stored as [in, out] |
| `in_proj_weight` of attention [3·E, E] | three, for queries, keys and values |
| `weight_ih`, `weight_hh` of recurrent layers | one each, with their biases; tokens are the time steps |
| any other [r, c] | one |
| any other [E, r, c], 1 < E ≤ r, c | a bank of E (experts) |
| any other [D, h, d] with a longer first axis | one, [D, h·d] (heads of attention) |
| any other of more axes (positions [1, T, D], what a weight is computed from) | one, cut nearest to square |

Whether the layer multiplies by them is seen in its first backward. Matrices of at most `SMALL` elements have exact blocks.
"""

from collections.abc import Iterator
from math import prod

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from gramian.taps.products.parts import SMALL, even_parts, part_name
from gramian.taps.products.sides import LayerForm

Named = Iterator[tuple[str, LayerForm]]


def forms_of(owner: nn.Module, local: str, p: nn.Parameter) -> dict[str, LayerForm]:
    """{name of the parameter, or of a part of it: form} of the parameter `local` of its own module; empty for a vector."""
    if not p.is_floating_point() or "bias" in local:
        return {}
    return dict(_forms(owner, local, p))


def _forms(owner: nn.Module, local: str, p: nn.Parameter) -> Named:
    rows, columns = (p.shape[0], p.numel() // max(p.shape[0], 1)) if p.dim() else (1, 1)
    computes = local.startswith("original") or (isinstance(owner, _ConvNd) and local != "weight")
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and local == "weight":
        yield local, LayerForm("table", rows, columns, None, assumed=True)
    elif isinstance(owner, _ConvNd) and local == "weight":
        groups, turned = owner.groups, isinstance(owner, _ConvTransposeNd)
        if groups == 1 or p.numel() > SMALL * groups:
            biases = even_parts("bias", rows, groups)
            for name, bias in zip(even_parts(local, rows, groups), biases, strict=True):
                form = LayerForm("kernel", columns, rows // groups, bias, assumed=True)
                yield name, LayerForm("in_out", rows // groups, columns, None, assumed=True) if turned else form
    elif isinstance(owner, nn.MultiheadAttention) and local.endswith("proj_weight"):
        order = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        biases = even_parts("in_proj_bias", 3 * owner.embed_dim, 3)
        names = even_parts(local, rows, 3) if local == "in_proj_weight" else [local]
        biases = biases if local == "in_proj_weight" else [biases[order.index(local)]]
        for name, bias in zip(names, biases, strict=True):
            yield name, LayerForm("out_in", columns, rows // len(names), bias, assumed=True)
    elif isinstance(owner, RNNBase | RNNCellBase) and local.startswith("weight"):
        yield local, LayerForm("out_in", columns, rows, local.replace("weight", "bias"), assumed=True)
    elif p.dim() == 2 and p.numel() > SMALL and min(rows, columns) > 1:
        usual = isinstance(owner, nn.Linear) and type(owner).forward is nn.Linear.forward
        own_bias = "bias" if local == "weight" and usual else None
        yield local, LayerForm("out_in", columns, rows, own_bias, assumed=True)
    elif p.dim() == 3 and rows > min(p.shape) > 1 and not computes:
        yield local, LayerForm("out_in", columns, rows, None, assumed=True)
    elif p.dim() == 3 and rows > 1 and columns > SMALL and min(p.shape) > 1 and not computes:
        for e in range(rows):
            yield part_name(local, e), LayerForm("out_in", p.shape[2], p.shape[1], None, assumed=True)
    elif p.dim() > 2 and p.numel() > SMALL:
        cuts = [(prod(p.shape[:axis]), prod(p.shape[axis:])) for axis in range(1, p.dim())]
        rows, columns = min(cuts, key=sum)
        if min(rows, columns) > 1:
            yield local, LayerForm("out_in", columns, rows, None, assumed=True)
