"""Parameters that are several matrices, or matrices of layers without a formula: factors against unrolled layers.

Each case is a layer and the same function written with `nn.Linear` or single convolutions on copies of its weights, whose
tokens plain hooks see.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.oracles import dense_kfac
from tests.curvature.problems import (
    assert_close,
    calls_of,
    classes,
    cross_entropy,
    has_bias,
    kfac,
    normal,
    seeded,
    tokens,
)
from tests.curvature.test_factors import peer_factors
from tests.kit.matrix import some

pytestmark = pytest.mark.oracle


class Unrolled(nn.Module):
    """The layer of a case, written with modules that hooks can watch."""

    parts: dict[str, nn.Module]
    """{name of a weight of the layer, or of a part of one: the module that has it}."""


class Groups(Unrolled):
    """A convolution for each group."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        count, rows = layer.groups, layer.out_channels // layer.groups
        self.convs = nn.ModuleList()
        self.parts = {}
        for i in range(count):
            one = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[layer.weight.dim() - 3](
                layer.in_channels // count, rows, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
                bias=layer.bias is not None, padding_mode=layer.padding_mode,
            )  # fmt: skip
            here = slice(i * rows, (i + 1) * rows)
            one.weight = nn.Parameter(layer.weight[here].detach().clone())
            if layer.bias is not None:
                one.bias = nn.Parameter(layer.bias[here].detach().clone())
            self.convs.append(one)
            self.parts[f"weight[{here.start}:{here.stop}]"] = one

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([one(part) for one, part in zip(self.convs, x.chunk(len(self.convs), 1), strict=True)], 1)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with copies of these weights."""
    one = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    one.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        one.bias = nn.Parameter(bias.detach().clone())
    return one


class Heads(Unrolled):
    """Attention by four linear layers."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        e, packed, biases = layer.embed_dim, layer.in_proj_weight is not None, layer.in_proj_bias
        names = [f"in_proj_weight[{i * e}:{i * e + e}]" if packed else f"{'qkv'[i]}_proj_weight" for i in range(3)]
        weights = (
            layer.in_proj_weight.chunk(3) if packed else (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        )
        parts = biases.chunk(3) if biases is not None else (None,) * 3
        self.inner = nn.ModuleList(linear(w, b) for w, b in zip(weights, parts, strict=True))
        self.out = linear(layer.out_proj.weight, layer.out_proj.bias)
        self.beside = [None if t is None else t.detach().clone() for t in (layer.bias_k, layer.bias_v)]
        self.heads = layer.num_heads
        self.parts = {**dict(zip(names, self.inner, strict=True)), "out_proj.weight": self.out}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (one(x) for one, x in zip(self.inner, inputs, strict=True))
        if self.beside[0] is not None:
            k, v = (torch.cat([t, b.expand(len(t), 1, -1)], 1) for t, b in zip((k, v), self.beside, strict=True))
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights.mean(1)


class EncoderLayer(Unrolled):
    """A layer of a transformer in training, from its parts."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.attention, self.norms = Heads(layer.self_attn), copy.deepcopy(nn.ModuleList([layer.norm1, layer.norm2]))
        self.wide, self.narrow = (linear(one.weight, one.bias) for one in (layer.linear1, layer.linear2))
        self.parts = {f"self_attn.{name}": part for name, part in self.attention.parts.items()}
        self.parts |= {"linear1.weight": self.wide, "linear2.weight": self.narrow}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.attention(x, x, x)[0])
        return self.norms[1](x + self.narrow(torch.relu(self.wide(x))))


class Steps(Unrolled):
    """A recurrent layer by linear layers, step by step."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.kind, self.layer_count, self.projected = layer.mode, layer.num_layers, layer.proj_size
        self.directions, self.first, self.hidden = 1 + layer.bidirectional, layer.batch_first, layer.hidden_size
        self.products, self.parts = nn.ModuleDict(), {}
        for name, w in layer.named_parameters():
            if name.startswith("weight"):
                bias = getattr(layer, name.replace("weight", "bias"), None)
                self.products[name] = self.parts[name] = linear(w, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x if self.first else x.transpose(0, 1)
        for number in range(self.layer_count):
            both = []
            for direction in range(self.directions):
                suffix = f"l{number}" + "_reverse" * direction
                both.append(self.one(x.flip(1) if direction else x, suffix))
            x = torch.cat([y.flip(1) if d else y for d, (y, _) in enumerate(both)], -1)
        return (x,)

    def one(self, x: Tensor, suffix: str) -> tuple[Tensor, Tensor]:
        h, c = x.new_zeros(len(x), self.projected or self.hidden), x.new_zeros(len(x), self.hidden)
        outputs = []
        for t in range(x.shape[1]):
            a, b = self.products[f"weight_ih_{suffix}"](x[:, t]), self.products[f"weight_hh_{suffix}"](h)
            if self.kind == "LSTM":
                i, f, g, o = (a + b).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            elif self.kind == "GRU":
                r, z = (torch.sigmoid(p + q) for p, q in zip(a.chunk(3, 1)[:2], b.chunk(3, 1)[:2], strict=True))
                h = (1 - z) * torch.tanh(a.chunk(3, 1)[2] + r * b.chunk(3, 1)[2]) + z * h
            else:
                h = torch.tanh(a + b) if self.kind == "RNN_TANH" else torch.relu(a + b)
            if self.projected:
                h = self.products[f"weight_hr_{suffix}"](h)
            outputs.append(h)
        return torch.stack(outputs, 1), h


class Raw(nn.Module):
    """Products of parameters in every way that they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Parameter(torch.zeros(13, 11))
        self.left = nn.Parameter(torch.zeros(17, 13))
        self.bank = nn.Parameter(torch.zeros(3, 12, 17))
        self.summed = nn.Parameter(torch.zeros(3, 14, 12))
        self.scale = nn.Parameter(torch.zeros(13, 11))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.matmul(self.left, (x * self.scale.sum(1)).mT).mT  # [B, T, 17]
        each = torch.einsum("btw,erw->bter", h, self.bank)
        each = torch.stack([F.linear(each[..., e, :], self.summed[e]) for e in range(3)], 1)
        return torch.cat([x @ self.right, each.flatten(2).sum(2, keepdim=True).expand(-1, -1, 2)[:, : x.shape[1]]], 2)


class RawUnrolled(Unrolled):
    def __init__(self, layer: Raw) -> None:
        super().__init__()
        self.right, self.left = linear(layer.right.mT, None), linear(layer.left, None)
        self.bank = nn.ModuleList(linear(w, None) for w in layer.bank)
        self.summed = nn.ModuleList(linear(w, None) for w in layer.summed)
        self.scale = layer.scale.detach()
        self.parts = {"right": self.right, "left": self.left}
        for name in ("bank", "summed"):
            self.parts |= {f"{name}[{e}]": one for e, one in enumerate(getattr(self, name))}

    def forward(self, x: Tensor) -> Tensor:
        h = self.left(x * self.scale.sum(1))
        each = torch.stack([two(one(h)) for one, two in zip(self.bank, self.summed, strict=True)], 1)
        return torch.cat([self.right(x), each.flatten(2).sum(2, keepdim=True).expand(-1, -1, 2)[:, : x.shape[1]]], 2)


class Transposed(Unrolled):
    """A transposed convolution, whose taps are one linear layer for each group: its outputs are added up where they fall."""

    def __init__(self, layer: nn.ConvTranspose1d) -> None:
        super().__init__()
        rows = layer.in_channels // layer.groups
        names = [f"weight[{i * rows}:{i * rows + rows}]" if layer.groups > 1 else "weight" for i in range(layer.groups)]
        self.taps = nn.ModuleList(linear(w.flatten(1).mT, None) for w in layer.weight.chunk(layer.groups))
        self.parts, self.like = dict(zip(names, self.taps, strict=True)), layer

    def forward(self, x: Tensor) -> Tensor:
        found, layer, axes = [], self.like, x.dim() - 2
        size = [n + 2 * p for n, p in zip(layer(x).shape[2:], layer.padding, strict=True)]
        for one, part in zip(self.taps, x.chunk(len(self.taps), 1), strict=True):
            taps = one(part.flatten(2).mT).unflatten(2, (-1, *layer.kernel_size))  # [B, positions, O/groups, *kernel]
            out = x.new_zeros(len(x), taps.shape[2], *size)
            for position, place in enumerate(product(*map(range, x.shape[2:]))):
                for tap in product(*map(range, layer.kernel_size)):
                    at = [p * s + t * d for p, s, t, d in zip(place, layer.stride, tap, layer.dilation, strict=True)]
                    if all(i < n for i, n in zip(at, size, strict=True)):
                        here = torch.zeros(size).index_put([torch.tensor(i) for i in at], torch.tensor(1.0))
                        out = out + here * taps[(slice(None), position, slice(None), *tap)].reshape(
                            len(x), -1, *[1] * axes
                        )
            found.append(out[(..., *(slice(p, n - p) for p, n in zip(layer.padding, size, strict=True)))])
        y = torch.cat(found, 1)
        return y if layer.bias is None else y + layer.bias.detach().view(-1, *[1] * axes)


class Scaled(nn.Embedding):
    """As language models write it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.long()) * 1.7


class Lookup(Unrolled):
    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.table = nn.Embedding(*layer.weight.shape, padding_idx=layer.padding_idx)
        self.table.weight = nn.Parameter(layer.weight.detach().clone())
        self.parts = {"weight": self.table}

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.long()) * 1.7


class Causal(nn.Conv1d):
    """A convolution that pads its own input, and adds its bias itself."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            F.conv1d(F.pad(x, (4, 0)), weight=self.weight, stride=self.stride, groups=self.groups) + self.bias[:, None]
        )


class CausalUnrolled(Groups):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (4, 0)))


class Turned(nn.Linear):
    """A linear layer by the transpose of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x @ self.weight.T, self.bias)


class Straight(Unrolled):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inner, self.added = linear(layer.weight, None), layer.bias.detach()  # which has a block of its own
        self.parts = {"weight": self.inner}

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.added


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    unrolled: Callable[[nn.Module], Unrolled]
    inputs: tuple[Tensor, ...]


X = normal(2, 5, 13)

CASES = {
    "conv1d": Case(partial(nn.Conv1d, 24, 33, 7, 2, 3, groups=3), Groups, (normal(2, 24, 9),)),
    "conv2d": Case(
        partial(nn.Conv2d, 30, 12, (3, 5), padding=1, padding_mode="circular", bias=False, groups=2), Groups,
        (normal(2, 30, 5, 6),),
    ),
    "conv3d": Case(partial(nn.Conv3d, 12, 10, (2, 3, 3), dilation=(1, 2, 1), groups=2), Groups, (normal(2, 12, 4, 6, 3),)),
    "transposed1d": Case(
        partial(nn.ConvTranspose1d, 12, 14, 4, 2, 1, output_padding=1, dilation=2, groups=2), Transposed, (normal(2, 12, 3),)
    ),
    "transposed2d": Case(
        partial(nn.ConvTranspose2d, 12, 3, (2, 3), (1, 2), (0, 1), bias=False), Transposed, (normal(2, 12, 2, 3),)
    ),
    "attention": Case(partial(nn.MultiheadAttention, 14, 2, batch_first=True), Heads, (normal(2, 5, 14),) * 3),
    "cross attention": Case(
        partial(nn.MultiheadAttention, 14, 2, batch_first=True, add_bias_kv=True), Heads,
        (normal(2, 5, 14), *(normal(2, 3, 14, seed=1),) * 2),
    ),
    "attention of other widths": Case(
        partial(nn.MultiheadAttention, 14, 2, batch_first=True, kdim=11, vdim=13, bias=False), Heads,
        (normal(2, 5, 14), normal(2, 4, 11), normal(2, 4, 13)),
    ),
    "transposed3d": Case(
        partial(nn.ConvTranspose3d, 12, 4, (2, 3, 2), (1, 2, 1), (0, 1, 0), groups=2), Transposed, (normal(2, 12, 2, 2, 2),)
    ),
    "encoder layer": Case(
        partial(nn.TransformerEncoderLayer, 14, 2, 20, dropout=0.0, batch_first=True), EncoderLayer, (normal(2, 5, 14),)
    ),
    "lstm": Case(partial(nn.LSTM, 13, 7, 2, bidirectional=True, batch_first=True), Steps, (X,)),
    "projected lstm": Case(partial(nn.LSTM, 13, 17, proj_size=9, batch_first=True, bias=False), Steps, (X,)),
    "gru": Case(partial(nn.GRU, 13, 7, 2, batch_first=True), Steps, (X,)),
    "rnn": Case(partial(nn.RNN, 13, 12, bidirectional=True, nonlinearity="relu", batch_first=True), Steps, (X,)),
    "table": Case(partial(Scaled, 17, 9, padding_idx=3), Lookup, (classes(17, 3, 5).double(),)),
    "own convolution": Case(partial(Causal, 12, 18, 5, 2, groups=2), CausalUnrolled, (normal(2, 12, 8),)),
    "own linear": Case(partial(Turned, 13, 11), Straight, (X,)),
    "raw": Case(Raw, RawUnrolled, (normal(2, 3, 13),)),
}  # fmt: skip


class Model(nn.Module):
    """A layer, and a loss that is curved in its outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        output = self.layer(*inputs)
        output = output[:1] if isinstance(self.layer, nn.RNNBase) else output
        return torch.cat(
            [y.flatten(1).tanh() for y in (output if isinstance(output, tuple) else (output,)) if y is not None], 1
        )


def loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    y = model(*inputs)
    return (y * torch.sin(torch.arange(y.numel()).view_as(y) * 0.7)).sum() + 0.1 * y.pow(3).sum()


def captured(name: str, **options: object) -> tuple[nn.Module, gramian.KFACNaturalGradient]:
    case = CASES[name]
    model, found = seeded(lambda: Model(case.build())), kfac(**options)
    with found.capture(model, loss_reduction="sum", num_terms=len(case.inputs[0])):
        loss(model, case.inputs).backward()
    return model, found


@pytest.mark.parametrize("name", some(CASES, 1))
def test_factors_are_those_of_the_unrolled_layer(name: str) -> None:
    case = CASES[name]
    model, found = captured(name)
    other = Model(case.unrolled(model.layer))
    names = {id(m): n for n, m in other.named_modules()}
    layers = {part: names[id(m)] for part, m in other.layer.parts.items()}
    calls = calls_of(other, lambda: loss(other, case.inputs).backward(), [*layers.values()])
    blocks = {n: b for n, b in found.kfac_factors.items() if b.spec.kind == "kronecker"}
    blocks = {n if b.spec.keys else f"{n}.weight": b for n, b in blocks.items()}
    assert blocks.keys() == {f"layer.{part}" for part in layers}
    for part, layer in layers.items():
        module = other.get_submodule(layer)
        sides, counted = tokens(module, calls[layer]), None
        if isinstance(module, nn.Embedding):
            counted = 1 - sides.inputs_TI[:, module.padding_idx]
        A, G = dense_kfac.factors(sides, len(case.inputs[0]), 1.0, has_bias(module), counted)
        assert_close(blocks[f"layer.{part}"].A.to_dense(), A, 1e-9, f"{part} A")
        assert_close(blocks[f"layer.{part}"].G.to_dense(), G, 1e-9, f"{part} G")


class Classifier(nn.Module):
    """A layer, of which every token is classified."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        attends = isinstance(self.layer, nn.MultiheadAttention | Heads)
        y = self.layer(x, x, x)[0] if attends else self.layer(x)
        return self.head(torch.tanh(y))


@pytest.mark.parametrize("name, width", [("attention", 14), ("encoder layer", 14)])
def test_factors_are_those_of_curvlinops_for_a_module_for_each_matrix(name: str, width: int) -> None:
    x = CASES[name].inputs[0]
    model, found = seeded(lambda: Classifier(CASES[name].build(), width)), kfac()
    twin = Classifier(CASES[name].unrolled(model.layer), width).double()
    twin.head.load_state_dict(model.head.state_dict())
    for module in twin.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)
    y = classes(5, *model(x).shape[:2])
    with found.capture(model, num_terms=y.numel()):
        cross_entropy(model, x, y, "mean").backward()
    theirs = peer_factors(twin, nn.CrossEntropyLoss(), x, y, fisher_type="empirical", kfac_approx="expand")
    names = {id(m): n for n, m in twin.named_modules()}
    for part, module in {**{f"layer.{n}": m for n, m in twin.layer.parts.items()}, "head.weight": twin.head}.items():
        block = found.kfac_factors.get(part) or found.kfac_factors[part.removesuffix(".weight")]
        for side, factor in (("A", block.A), ("G", block.G)):
            assert_close(factor.to_dense(), theirs[f"{names[id(module)]} {side}"], 1e-9, f"{part} {side}")
