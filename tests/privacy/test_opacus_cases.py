"""The layers, shapes and options that Opacus tests its grad samplers with, against the loop and against Opacus itself.

Opacus draws a hundred examples for each layer from ranges; so does this file, from the ranges of Opacus 1.6 and always the same
ones. Each is clipped privately, by the float64 loop over single samples, and by hand from the per-sample gradients of Opacus'
hooks. Layers may have the batch on the second axis, as there.

Shape legend: N samples, T tokens, C channels, D, H and W sizes of an image or of features, V rows of a table.
"""

import copy
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention, SequenceBias
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gramian
from gramian.oracles.clipped_sum import clip, clipped_sum
from gramian.oracles.single_sample import per_sample_gradients
from tests.kit.matrix import sample
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.privacy.problems import assert_sums, private
from tests.statistics.problems import assert_norms

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.few_proofs,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

STORAGES = ("auto", "bookkeeping", "keep", "two_pass")
EXAMPLES = 100
Batch = tuple[Tensor, ...]
Made = tuple[nn.Module, Batch]
TOLERANCE = 1e-9


# ---- the two references -----------------------------------------------------------------------------------------------


def l1(model: nn.Module, *batch: Tensor, reduction: str = "mean") -> Tensor:
    """The distance of all outputs from zero: Opacus' loss."""
    output = model(*batch)
    output = output[0] if isinstance(output, tuple) else output
    return output.abs().mean() if reduction == "mean" else output.abs().sum()


def clipped_by_hand(per_sample: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Σ_i min(1, C/‖g_i‖) g_i of gradients [N, *shape]."""
    norms_N = torch.cat([g.flatten(1) for g in per_sample.values()], 1).norm(dim=1)
    return {name: torch.einsum("n,n...->...", (limit / norms_N).clamp(max=1), g) for name, g in per_sample.items()}


def opacus_gradients(
    model: nn.Module, batch: Batch, reduction: str, *, batch_first: bool = True, loss: Callable[..., Tensor] = l1
) -> dict[str, Tensor]:
    """{parameter: [N, *shape]} from Opacus' hooks on a copy of the model."""
    wrapped = GradSampleModule(copy.deepcopy(model), batch_first=batch_first, loss_reduction=reduction)
    loss(wrapped, *batch, reduction=reduction).backward()
    return {name: p.grad_sample.detach() for name, p in wrapped._module.named_parameters()}


def limit_of(per_sample: Mapping[str, Tensor]) -> float:
    """A clip norm that clips some of the samples, and one sample if there is but one."""
    norms_N = torch.cat([g.flatten(1) for g in per_sample.values()], 1).norm(dim=1)
    return 0.95 * float(norms_N.quantile(0.5)) if len(norms_N) else 1.0


def check(
    model: nn.Module,
    batch: Batch,
    reduction: str = "mean",
    *,
    loss: Callable[..., Tensor] = l1,
    opacus: Callable[[], dict[str, Tensor]] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The clipped sum equals that of the loop, and that of Opacus' per-sample gradients.

    Args:
        model: in float64.
        batch: its arguments, N samples on dim 0.
        reduction: "mean" or "sum".
        loss: `loss(model, *batch, reduction=...)`.
        opacus: Opacus' per-sample gradients; None: those of its hooks on this model.
        **options: of `make_private`.

    Returns:
        The clipped sums.
    """
    reference = per_sample_gradients(model, partial(loss, reduction=reduction), batch)
    limit = limit_of(reference)
    want = clip(reference, limit)
    theirs = opacus_gradients(model, batch, reduction, loss=loss) if opacus is None else opacus()
    with private(model, limit, loss_reduction=reduction, **options) as run:
        run.engine.backward(loss(model, *batch, reduction=reduction))
        found, seen = run.gradients(), run.engine.last
    assert_sums(found, want.totals, TOLERANCE)
    assert_sums(found, clipped_by_hand(theirs, limit), TOLERANCE)
    if len(want.norms_B):
        assert_norms(seen.norms_B, want.norms_B, TOLERANCE)
        assert bool((want.factors_B < 1).any())
    return found


def some(n: int) -> list[int]:
    """Numbers of examples."""
    return sample(range(EXAMPLES), n, case=lambda number: None)


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# ---- layers of one tensor ---------------------------------------------------------------------------------------------


def linear(*, N: int, Z: int, H: int, W: int, axes: int, bias: bool) -> Made:
    return nn.Linear(W, W + 2, bias=bias), (real(*(N, Z, H)[: axes - 1], W),)


def convolution(layer: type[nn.Module], image: Sequence[int], N: int, C: int, grows: bool, **options: Any) -> Made:
    return layer(C, _wider(C, grows), **options), (real(N, C, *image),)


def embedding(*, N: int, T: int, Q: int, R: int, V: int, D: int, axes: int) -> Made:
    return nn.Embedding(V, D), (torch.randint(V, (N, T, Q, R)[:axes]),)


def instance_norm(layer: type[nn.Module], N: int, C: int, image: Sequence[int]) -> Made:
    return layer(C, affine=True, track_running_stats=False), (real(N, C, *image),)


def trailing_norm(layer: type[nn.Module], N: int, Z: int, H: int, W: int, axes: int, normed: int) -> Made:
    shape = (N, Z, H, W) if axes == 4 else (N, Z, W) if axes == 3 else (N, W)
    return layer(shape[-normed:], elementwise_affine=True), (real(*shape),)


def unfolded(*, B: int, C: int, H: int, W: int, **options: tuple[int, int]) -> Made:
    """A linear layer on patches: what a convolution is."""
    rows, columns = options["kernel_size"]
    return nn.Sequential(nn.Unfold(**options), transposed(), nn.Linear(C * rows * columns, 2 * C)), (real(B, C, H, W),)


def transposed() -> Toy:
    return Toy(lambda net, x: x.transpose(1, 2))


def _wider(channels: int, grows: bool) -> int:
    return channels * 2 if grows else max(1, channels // 2)


def _fits(d: Mapping[str, Any]) -> bool:
    """A convolution that exists: groups divide the channels, and "same" has no stride."""
    groups, C = d["groups"], d["C"]
    return C % groups == 0 == _wider(C, d["grows"]) % groups and (d["padding"] != "same" or d["stride"] == 1)


@dataclass(frozen=True)
class Layer:
    """One of Opacus' test files."""

    make: Callable[..., Made]
    ranges: Mapping[str, Sequence[Any]]
    allowed: Callable[[Mapping[str, Any]], bool] = lambda d: True

    def example(self, name: str, number: int) -> tuple[Made, str]:
        """A layer in float64 with its batch, and the reduction of the loss."""
        draw = random.Random(f"{name} {number}")
        while True:
            drawn = {key: draw.choice(values) for key, values in self.ranges.items()}
            if self.allowed(drawn):
                break
        print(drawn)
        torch.manual_seed(number)
        model, batch = self.make(**drawn)
        return (model.double(), batch), draw.choice(("mean", "sum"))


FEATURES = {"N": range(1, 5), "Z": range(1, 5), "H": range(1, 4)}
CHANNELS = {"C": (1, 3, 32), "grows": (True, False)}
NORMED = {**FEATURES, "W": range(5, 11), "axes": (2, 3, 4), "normed": (1, 2, 3)}
LAYERS = {
    "linear": Layer(linear, {**FEATURES, "N": range(5), "W": range(10, 18), "axes": (2, 3, 4), "bias": (True, False)}),
    "conv1d": Layer(
        lambda W, **d: convolution(nn.Conv1d, (W,), **d),
        {
            **CHANNELS, "N": range(5), "W": range(6, 11), "kernel_size": (2, 3), "stride": (1, 2),
            "padding": (0, 1, 2, "same", "valid"), "dilation": (1, 2), "groups": range(1, 13),
        },
        _fits,
    ),
    "conv2d": Layer(
        lambda H, W, **d: convolution(nn.Conv2d, (H, W), **d),
        {
            **CHANNELS, "N": range(5), "H": range(11, 18), "W": range(11, 18), "kernel_size": (2, 3, 4),
            "stride": (1, 2), "padding": (0, 2, "same", "valid"), "dilation": (1, 2, 3), "groups": range(1, 17),
        },
        _fits,
    ),
    "conv2d of unequal sides": Layer(
        lambda B, H, W, **d: convolution(nn.Conv2d, (H, W), B, **d),
        {
            **CHANNELS, "B": range(1, 5), "H": range(11, 18), "W": range(11, 18),
            "kernel_size": list(product((2, 3), (2, 3))), "stride": list(product((1, 2), (1, 2))),
            "padding": list(product((0, 2), (0, 2))), "dilation": list(product((1, 2, 3), (1, 2, 3))),
        },
    ),
    "conv2d of one column": Layer(
        lambda N: convolution(nn.Conv2d, (8, 1), N, 1, False, kernel_size=(3, 1), dilation=(3, 1), bias=False),
        {"N": (1, 2)},
    ),
    "conv3d": Layer(
        lambda D, H, W, **d: convolution(nn.Conv3d, (D, H, W), **d),
        {
            **CHANNELS, "N": range(5), "D": range(3, 7), "H": range(6, 11), "W": range(6, 11),
            "kernel_size": (2, 3, (1, 2, 3)), "stride": (1, 2, (1, 2, 3)),
            "padding": (0, 2, (1, 2, 3), "same", "valid"), "dilation": (1, (1, 2, 2)), "groups": range(1, 17),
        },
        _fits,
    ),
    "unfold": Layer(
        unfolded,
        {
            "B": range(1, 5), "C": (1, 3), "H": range(11, 18), "W": range(11, 18),
            "kernel_size": list(product((2, 3), (2, 3))), "stride": list(product((1, 2), (1, 2))),
            "padding": list(product((0, 2), (0, 2))), "dilation": list(product((1, 2, 3), (1, 2, 3))),
        },
    ),
    "embedding": Layer(
        embedding,
        {
            "N": range(5), "T": range(1, 6), "Q": range(1, 5), "R": (1, 2), "V": range(2, 33), "D": range(10, 18),
            "axes": (2, 3, 4),
        },
    ),
    "group norm": Layer(
        lambda N, C, H, W, groups: (nn.GroupNorm(groups or C, C), (real(N, C, H, W),)),
        {"N": range(5), "C": range(1, 9), "H": range(5, 11), "W": range(4, 9), "groups": (1, 4, None)},
        lambda d: d["C"] % (d["groups"] or 1) == 0,
    ),
    "instance norm 1d": Layer(
        lambda W, **d: instance_norm(nn.InstanceNorm1d, image=(W,), **d),
        {"N": range(1, 5), "C": (1, 2, 3), "W": range(5, 11)},
    ),
    "instance norm 2d": Layer(
        lambda H, W, **d: instance_norm(nn.InstanceNorm2d, image=(H, W), **d),
        {"N": range(1, 5), "C": (1, 2, 3), "W": range(5, 11), "H": range(4, 9)},
    ),
    "instance norm 3d": Layer(
        lambda Z, H, W, **d: instance_norm(nn.InstanceNorm3d, image=(Z, H, W), **d),
        {"N": range(1, 5), "C": (1, 2, 3), "W": range(5, 11), "H": range(4, 9), "Z": range(1, 5)},
    ),
    "layer norm": Layer(lambda **d: trailing_norm(nn.LayerNorm, **d), NORMED, lambda d: d["normed"] < d["axes"]),
    "RMS norm": Layer(lambda **d: trailing_norm(nn.RMSNorm, **d), NORMED, lambda d: d["normed"] < d["axes"]),
    "sequence bias": Layer(
        lambda N, T, D: (SequenceBias(D, batch_first=True), (real(N, T, D),)),
        {"N": range(5), "T": range(10, 21), "D": range(4, 9)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, number", sample(list(product(LAYERS, range(EXAMPLES))), 105))
def test_a_layer_clips_as_the_loop_and_as_opacus(name: str, number: int) -> None:
    (model, batch), reduction = LAYERS[name].example(name, number)
    algorithm = ("auto", "gram", "direct")[number % 3]
    check(model, batch, reduction, clipping=STORAGES[number % 4], norm_algorithm=algorithm)


@pytest.mark.parametrize("number", some(5))
def test_a_convolution_clips_as_a_linear_layer_on_its_patches(number: int) -> None:
    (patches, batch), reduction = LAYERS["unfold"].example("unfold", number)
    unfold, matrix = patches[0], patches[2]
    options = {key: getattr(unfold, key) for key in ("kernel_size", "stride", "padding", "dilation")}
    conv = nn.Conv2d(batch[0].shape[1], matrix.out_features, **options).double()
    with torch.no_grad():
        conv.weight.copy_(matrix.weight.reshape(conv.weight.shape))
        conv.bias.copy_(matrix.bias)
    found, want = check(conv, batch, reduction), check(patches, batch, reduction)
    flat = {"2.weight": found["weight"].flatten(1), "2.bias": found["bias"]}
    assert_sums(flat, want, TOLERANCE)


# ---- bags of tokens ---------------------------------------------------------------------------------------------------


def _bags(number: int) -> tuple[list[Tensor], int, int]:
    """Bags of different sizes, the rows of the table, and its width."""
    draw = random.Random(number)
    V, most = draw.randint(10, 32), draw.randint(3, 7)
    torch.manual_seed(number)
    bags = [torch.randperm(V)[: draw.randint(1, most)] for _ in range(draw.randint(4, 8))]
    return bags, V, draw.randint(10, 17)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("number", some(4))
def test_padded_bags_clip_as_the_loop_and_as_opacus_on_flat_ones(number: int, mode: str) -> None:
    bags, V, width = _bags(number)
    model = nn.EmbeddingBag(V + 1, width, mode=mode, padding_idx=V).double()
    padded = nn.utils.rnn.pad_sequence(bags, batch_first=True, padding_value=V)
    offsets = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
    check(model, (padded,), opacus=lambda: opacus_gradients(model, (torch.cat(bags), offsets), "mean"))


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_flat_bags_with_offsets_are_refused_by_name(mode: str, equal: bool) -> None:
    bags, V, width = _bags(0)
    bags = [bag[:1] for bag in bags] if equal else bags  # one token each: as many rows as samples
    model = nn.EmbeddingBag(V, width, mode=mode).double()
    offsets = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
    with private(model, 1.0):
        with refusal(r"model \(EmbeddingBag\)"):
            l1(model, torch.cat(bags), offsets).backward()
        assert model.weight.grad is None


@pytest.mark.parametrize(
    "layer, trained", [(nn.Embedding, True), (nn.Embedding, False), (nn.EmbeddingBag, True), (nn.EmbeddingBag, False)]
)
def test_a_table_that_its_forward_changes_is_refused(layer: type[nn.Module], trained: bool) -> None:
    model = nn.Sequential(layer(12, 10, max_norm=1.0).requires_grad_(trained), nn.Linear(10, 3)).double()
    before = model[0].weight.detach().clone()
    with refusal("max_norm"), private(model, 1.0):
        l1(model, torch.randint(12, (5, 4))).backward()
    assert torch.equal(model[0].weight, before)


def test_a_sparse_bag_is_refused_by_name() -> None:
    model = nn.EmbeddingBag(12, 10, mode="sum", sparse=True).double()
    with refusal(r"\(EmbeddingBag\)"), private(model, 1.0):
        l1(model, torch.randint(12, (5, 4))).backward()


# ---- recurrent layers -------------------------------------------------------------------------------------------------

RECURRENT = {"RNN": (nn.RNN, DPRNN), "GRU": (nn.GRU, DPGRU), "LSTM": (nn.LSTM, DPLSTM)}


class Packs(nn.Module):
    """Padded sequences in, padded sequences out, packed for the layer inside."""

    def __init__(self, layer: nn.Module, enforce_sorted: bool) -> None:
        super().__init__()
        self.layer, self.enforce_sorted = layer, enforce_sorted

    def forward(self, x_NTD: Tensor, lengths_N: Tensor) -> Tensor:
        packed = pack_padded_sequence(x_NTD, lengths_N, batch_first=True, enforce_sorted=self.enforce_sorted)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x_NTD.shape[1])[0]


def _recurrent(kind: str, number: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """PyTorch's layer, Opacus' with the same weights, and a batch."""
    draw = random.Random(f"{kind} {number}")
    options = {
        "num_layers": draw.choice((1, 2)),
        "bias": draw.choice((True, False)),
        "bidirectional": draw.choice((True, False)),
        "batch_first": True,
    }
    N, T, D, H = draw.randint(1, 3), draw.randint(1, 3), draw.choice((4, 5)), draw.randint(8, 10)
    print(options, N, T, D, H)
    torch.manual_seed(number)
    ours, theirs = (layer(D, H, **options).double() for layer in RECURRENT[kind])
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, real(N, T, D)


@pytest.mark.parametrize("kind, number", sample(list(product(RECURRENT, range(EXAMPLES))), 12))
def test_recurrent_layers_of_torch_clip_as_the_loop_and_as_opacus_own(kind: str, number: int) -> None:
    ours, theirs, x = _recurrent(kind, number)
    reduction = ("mean", "sum")[number % 2]
    per_sample = opacus_gradients(theirs, (x,), reduction)
    assert per_sample.keys() == dict(ours.named_parameters()).keys()
    check(ours, (x,), reduction, opacus=lambda: per_sample, clipping=STORAGES[number % 4])


class FromStates(nn.Module):
    """A recurrent layer whose initial states [N, layers, H] come with the samples."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_NTD: Tensor, *states_NLH: Tensor) -> Tensor:
        states = tuple(state.transpose(0, 1).contiguous() for state in states_NLH)
        return self.layer(x_NTD, states if len(states) > 1 else states[0])[0]


@pytest.mark.parametrize("samples", [2, 3])  # as many as layers and directions together, and not
@pytest.mark.parametrize("kind", RECURRENT)
def test_initial_states_belong_to_their_samples(kind: str, samples: int) -> None:
    torch.manual_seed(0)
    ours, theirs = (FromStates(layer(4, 8, batch_first=True, bidirectional=True)).double() for layer in RECURRENT[kind])
    theirs.layer.load_state_dict(ours.layer.state_dict())
    batch = (real(samples, 3, 4), *(real(samples, 2, 8) for _ in range(1 + (kind == "LSTM"))))
    check(ours, batch, opacus=lambda: opacus_gradients(theirs, batch, "mean"))


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_of_opacus_are_right(kind: str, samples: int) -> None:
    # They return states [layers, N, H], and hold every weight under two names.
    layer = RECURRENT[kind][1]
    torch.manual_seed(0)
    model, batch = layer(4, 8, num_layers=2, batch_first=True, bidirectional=True).double(), (real(samples, 3, 4),)
    check(model, batch)


@pytest.mark.parametrize("lengths", [[3, 2, 1], [2, 2], [1, 3, 2], [1, 1, 1], [3, 1, 1, 1]])
@pytest.mark.parametrize("whose", ["torch", "opacus"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_packed_sequences_are_refused_by_name_or_right(kind: str, whose: str, lengths: list[int]) -> None:
    layer = RECURRENT[kind][whose == "opacus"](4, 8, batch_first=True)
    model = Packs(layer, enforce_sorted=lengths == sorted(lengths, reverse=True)).double()
    x, sizes = real(len(lengths), 3, 4), torch.tensor(lengths)
    want = clip(per_sample_gradients(model, l1, (x, sizes)), 0.1).totals if whose == "opacus" else None
    refused = "" if whose == "opacus" else rf"layer \({kind}\) is given a PackedSequence"
    with private(model, 0.1) as run:
        try:
            l1(model, x, sizes).backward()
        except gramian.GramianError as reason:
            assert re.search(refused, str(reason))
            assert all(p.grad is None for p in model.parameters())
        else:  # Opacus' layers unpack it, and equal lengths are rows in order
            assert want is not None
            assert_sums(run.gradients(), want, TOLERANCE)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_packed_sequence_of_one_sample_is_right_or_refused_by_name(kind: str) -> None:
    model = Packs(RECURRENT[kind][0](4, 8, batch_first=True), enforce_sorted=True).double()
    x, lengths = real(1, 3, 4), torch.tensor([2])
    want = clip(per_sample_gradients(model, l1, (x, lengths)), 0.1).totals
    with private(model, 0.1) as run:
        try:
            l1(model, x, lengths).backward()
        except gramian.GramianError as refused:
            assert kind in str(refused)
        else:
            assert_sums(run.gradients(), want, TOLERANCE)


# ---- attention --------------------------------------------------------------------------------------------------------


def _attention(number: int) -> tuple[nn.Module, nn.Module, Batch]:
    """PyTorch's layer, Opacus' with the same weights and the batch second, and queries, keys and values."""
    draw = random.Random(number)
    options = {key: draw.choice((True, False)) for key in ("bias", "add_bias_kv", "add_zero_attn")}
    kdim, vdim = draw.choice((None, 4, 3, 7)), draw.choice((None, 4, 2, 8))
    N, T, S, heads = draw.randint(1, 4), draw.randint(16, 20), draw.randint(1, 6), draw.choice((1, 2))
    print(options, kdim, vdim, N, T, S, heads)
    torch.manual_seed(number)
    sizes = {"kdim": kdim, "vdim": vdim, "dropout": 0.0}
    ours = nn.MultiheadAttention(4, heads, batch_first=True, **options, **sizes).double()
    theirs = DPMultiheadAttention(4, heads, **options, **sizes).double()
    theirs.load_state_dict(dict(ours.state_dict()))
    return ours, theirs, (real(N, T, 4), real(N, S, kdim or 4), real(N, S, vdim or 4))


class Swapped(nn.Module):
    """A layer with the batch on the second axis, inside a model with the batch first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *batch: Tensor) -> Tensor:
        output = self.layer(*(x.transpose(0, 1) for x in batch))
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)


def _renamed(theirs: Mapping[str, Tensor], ours: nn.Module) -> dict[str, Tensor]:
    """Per-sample gradients of Opacus' attention under PyTorch's names."""
    own = dict(ours.named_parameters())
    parts = {kind: [theirs.get(f"{part}linear.{kind}") for part in "qkv"] for kind in ("weight", "bias")}
    found = {name: g for name, g in theirs.items() if name.startswith("out_proj")}
    if "in_proj_weight" in own:
        found["in_proj_weight"] = torch.cat(parts["weight"], 1)
    else:
        found |= {f"{part}_proj_weight": g for part, g in zip("qkv", parts["weight"], strict=True)}
    if parts["bias"][0] is not None:
        found["in_proj_bias"] = torch.cat(parts["bias"], 1)
    for part in "kv" if "bias_k" in own else "":
        found[f"bias_{part}"] = theirs[f"seq_bias_{part}.bias"][:, None, None]
    return {name: found[name] for name in own}


@pytest.mark.parametrize("number", some(10))
def test_attention_of_torch_clips_as_the_loop_and_as_opacus_own(number: int) -> None:
    ours, theirs, batch = _attention(number)
    second = tuple(x.transpose(0, 1) for x in batch)
    reduction = ("mean", "sum")[number % 2]
    per_sample = opacus_gradients(theirs, second, reduction, batch_first=False)
    check(ours, batch, reduction, opacus=lambda: _renamed(per_sample, ours), clipping=STORAGES[number % 4])


@pytest.mark.parametrize("heads, zero, kdim", sample(list(product((1, 2), (False, True), (None, 4))), 4))
def test_attention_of_opacus_clips_as_the_loop_and_as_opacus(heads: int, zero: bool, kdim: int | None) -> None:
    torch.manual_seed(0)
    model = DPMultiheadAttention(4, heads, add_zero_attn=zero, kdim=kdim, vdim=kdim, batch_first=True).double()
    check(model, (real(3, 16, 4), real(3, 16, 4), real(3, 16, 4)))


# ---- the batch on the second axis -------------------------------------------------------------------------------------

SECOND: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "linear": (lambda: nn.Linear(5, 6), lambda N, T: (real(N, T, 5),)),
    "embedding": (lambda: nn.Embedding(9, 6), lambda N, T: (torch.randint(9, (N, T)),)),
    "sequence bias": (lambda: SequenceBias(5), lambda N, T: (real(N, T, 5),)),
    "attention": (lambda: DPMultiheadAttention(4, 2), lambda N, T: tuple(real(N, T, 4) for _ in range(3))),
    "attention with biases": (
        lambda: DPMultiheadAttention(4, 2, add_bias_kv=True),
        lambda N, T: tuple(real(N, T, 4) for _ in range(3)),
    ),
}
SIZES = [(3, 16), (4, 17), (4, 10), (4, 3), (2, 16), (4, 20), (3, 3)]


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize("name, size", sample(list(product(SECOND, SIZES)), 10, case=lambda one: one[0]))
def test_layers_with_the_batch_on_the_second_axis_clip_as_the_loop_and_as_opacus(
    name: str, size: tuple[int, int]
) -> None:
    # Also where shapes cannot tell tokens from rows of samples, because their number fits.
    torch.manual_seed(0)
    layer, batch = SECOND[name][0]().double(), SECOND[name][1](*size)
    second = tuple(x.transpose(0, 1) for x in batch)
    per_sample = opacus_gradients(layer, second, "mean", batch_first=False)
    check(Swapped(layer), batch, opacus=lambda: {f"layer.{key}": g for key, g in per_sample.items()})


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize("name", SECOND)
def test_the_check_of_independence_finds_the_second_axis(name: str) -> None:
    model, batch = Swapped(SECOND[name][0]()).double(), SECOND[name][1](3, 3)
    with private(model, 0.1) as run:
        run.engine.check_independence(l1, batch)
        with refusal(r"expected"):
            run.engine.check_independence(
                lambda net, *inputs: (l1(net, *inputs) - net(*inputs)[:, 0].mean()) ** 2, batch
            )


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize("name", SECOND)
def test_without_a_proof_rows_that_cannot_be_samples_are_refused_by_name_or_right(name: str) -> None:
    model, batch = Swapped(SECOND[name][0]()).double(), SECOND[name][1](4, 10)
    want = clipped_sum(model, l1, batch, 0.1)
    with private(model, 0.1, proof="off") as run:
        if not name.startswith("attention"):  # which runs again sample by sample
            with refusal("layer"):
                l1(model, *batch).backward()
            return
        l1(model, *batch).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)


@pytest.mark.parametrize("name", SECOND)
def test_one_sample_on_the_second_axis_is_right(name: str) -> None:
    torch.manual_seed(0)
    layer, batch = SECOND[name][0]().double(), SECOND[name][1](1, 12)
    second = tuple(x.transpose(0, 1) for x in batch)
    per_sample = opacus_gradients(layer, second, "mean", batch_first=False)
    check(Swapped(layer), batch, opacus=lambda: {f"layer.{key}": g for key, g in per_sample.items()})


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention])
def test_models_that_say_so_are_refused_before_anything_runs(layer: type[nn.Module]) -> None:
    with refusal(rf"\({layer.__name__}\) has the batch on axis 1"), private(layer(4, 2), 1.0):
        pass


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_with_the_batch_on_the_second_axis_clip_as_the_loop_and_as_opacus_own(kind: str) -> None:
    torch.manual_seed(0)
    ours, theirs = (layer(4, 8, num_layers=2, bidirectional=True).double() for layer in RECURRENT[kind])
    theirs.load_state_dict(ours.state_dict())
    x = real(3, 5, 4)
    per_sample = opacus_gradients(theirs, (x.transpose(0, 1),), "mean", batch_first=False)
    check(Swapped(ours), (x,), opacus=lambda: {f"layer.{key}": g for key, g in per_sample.items()})


# ---- tables -----------------------------------------------------------------------------------------------------------

NORMS: dict[str, tuple[int, list[Any], list[Any], list[float]]] = {
    "a token twice": (
        3,
        [[1, 1], [2, 0], [2, 0]],
        [[[0.2], [0.2]], [[0.3], [0.1]], [[0.3], [0.1]]],
        [0.4, *[0.1**0.5] * 2],
    ),
    "one token of two features": (
        3,
        [[[i]] for i in (1, 1, 2, 0, 2, 0)],
        [[[[g, g]]] for g in (0.2, 0.2, 0.3, 0.1, 0.3, 0.1)],
        [g * 2**0.5 for g in (0.2, 0.2, 0.3, 0.1, 0.3, 0.1)],
    ),
    "padded to six tokens": (
        10,
        [
            [[i] for i in row]
            for row in ([0] * 6, [1, *[0] * 5], [2, 3, 4, 5, 6, 7], [4, 3, *[0] * 4], [8, 7, 9, 6, 5, 0])
        ],
        [[[[g]]] * 6 for g in (0.0025, -0.0014, -0.0002, 0.0019, -0.0016)],
        [6 * 0.0025, 26**0.5 * 0.0014, 6**0.5 * 0.0002, 18**0.5 * 0.0019, 6**0.5 * 0.0016],
    ),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_tables_that_can_be_worked_out_on_paper(name: str, storage: str) -> None:
    V, ids, carried, norms = NORMS[name]
    index, g = torch.tensor(ids), torch.tensor(carried, dtype=torch.float64)
    model = nn.Embedding(V, g.shape[-1]).double()
    with private(model, 1e-3, clipping=storage, loss_reduction="sum") as run:
        run.engine.backward((model(index) * g).sum())
        assert_norms(run.engine.last.norms_B, torch.tensor(norms, dtype=torch.float64), 1e-12)
        wide = torch.zeros(len(ids), V, g.shape[-1], dtype=torch.float64)
        for i, (row, rows) in enumerate(zip(index.flatten(1), g.flatten(1, -2), strict=True)):
            wide[i].index_add_(0, row, rows)
        assert_sums(run.gradients(), clipped_by_hand({"weight": wide}, 1e-3), TOLERANCE)


def test_tokens_that_repeat_along_diagonals_are_no_positions() -> None:
    check(nn.Embedding(2, 10).double(), (torch.tensor([[0, 1], [1, 0]]),))


class Positions(nn.Module):
    """A projection and a table of positions, looked up once for all samples or once for each."""

    def __init__(self, expand: bool) -> None:
        super().__init__()
        self.projection, self.position, self.expand = nn.Linear(3, 3), nn.Embedding(4, 3), expand

    def forward(self, x_NTD: Tensor) -> Tensor:
        index = torch.arange(x_NTD.shape[1])[None]
        return self.projection(x_NTD) + self.position(index.expand(len(x_NTD), -1) if self.expand else index)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_positions_for_all_samples_clip_as_those_for_each_do_in_opacus(reduction: str) -> None:
    torch.manual_seed(0)
    shared, each, batch = Positions(expand=False).double(), Positions(expand=True).double(), (real(4, 4, 3),)
    each.load_state_dict(shared.state_dict())
    check(shared, batch, reduction, opacus=lambda: opacus_gradients(each, batch, reduction))


# ---- clipping without per-sample gradients, theirs and ours -----------------------------------------------------------


def table() -> Toy:
    """Three tokens of one feature."""
    return Toy(
        lambda net, index_NT: net.embedding(index_NT)[..., 0],
        embedding=nn.Embedding.from_pretrained(torch.tensor([[0.1], [0.2], [0.3]]), freeze=False),
    )


def _tokens() -> Made:
    layers = [nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2), nn.Linear(2, 1024), nn.Linear(1024, 10), nn.Linear(10, 1)]
    targets = torch.randint(2, (10, 5)).double()
    return nn.Sequential(*layers, nn.Flatten(), nn.Softmax(1)), (real(10, 5, 2), targets)


def _images() -> Made:
    body = [nn.Conv2d(3, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)]
    body += [nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)]
    head = [nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*body, *head), (real(8, 3, 28, 28), torch.randint(10, (8,)))


def _rows() -> Made:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)), (real(4, 10), torch.randint(5, (4,)))


def _table() -> Made:
    targets = torch.tensor([[0.1, 0.1], [0.2, 0.3], [0.2, 0.3]], dtype=torch.float64)
    return table(), (torch.tensor([[1, 1], [2, 0], [2, 0]]), targets)


NETWORKS = {"tokens": _tokens, "images": _images, "rows": _rows, "table": _table}


def entropy(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x), y, reduction=reduction)


@pytest.mark.parametrize("ghost", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_opacus_clipping_without_per_sample_gradients_comes_to_the_same(name: str, ghost: bool) -> None:
    torch.manual_seed(0)
    model, batch = NETWORKS[name]()
    model = model.double()
    ours = {storage: check(model, batch, loss=entropy, clipping=storage) for storage in STORAGES}
    reference = per_sample_gradients(model, entropy, batch)
    limit = limit_of(reference)

    theirs = GradSampleModuleFastGradientClipping(
        copy.deepcopy(model), max_grad_norm=limit, use_ghost_clipping=ghost, loss_reduction="mean"
    )
    losses_N = entropy(theirs, *batch, reduction="none")
    losses_N.mean().backward(retain_graph=True)
    norms_N = theirs.get_norm_sample()
    assert_norms(norms_N, clip(reference, limit).norms_B, TOLERANCE)
    theirs.zero_grad()
    theirs.disable_hooks()
    ((limit / norms_N).clamp(max=1).detach() * losses_N).sum().backward()  # their own factor adds 1e-6 to the norm
    total = {key: p.grad for key, p in theirs._module.named_parameters()}
    for found in ours.values():
        assert_sums(found, total, TOLERANCE)
