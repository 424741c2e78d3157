"""Every kind of layer: per-sample norms equal the float64 loop, and `p.grad` is what it would be without the capture."""

from contextlib import nullcontext
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gramian
from tests.kit.matrix import sample, some
from tests.kit.models import CASES
from tests.kit.toys import Toy
from tests.taps.checks import (
    TOLERANCE,
    assert_exact,
    assert_norms,
    assert_same_bits,
    captured,
    gradients,
    loop_norms,
    problem,
    wave,
)

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]

ALGORITHMS = ("auto", "direct", "gram")
REDUCTIONS = ("mean", "sum")
PRECISIONS = ("float64", "float32", "bf16 weights", "bf16 autocast")


def _setting(precision: str) -> tuple[torch.dtype, Any, float]:
    """Dtype of the model, context of the forward, tolerance."""
    if precision == "bf16 autocast":
        return torch.float32, torch.autocast("cpu", torch.bfloat16), TOLERANCE[torch.bfloat16]
    dtype = {"float64": torch.float64, "float32": torch.float32, "bf16 weights": torch.bfloat16}[precision]
    return dtype, nullcontext(), TOLERANCE[dtype]


# ---- the table of models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, precision, algorithm, reduction",
    [
        *((name, "float64", *rest) for name, *rest in product(CASES, ALGORITHMS, REDUCTIONS)),
        *sample(list(product(CASES, PRECISIONS[1:], ALGORITHMS, REDUCTIONS)), 3 * len(CASES)),
    ],
)
def test_norms_equal_the_float64_loop(name: str, precision: str, algorithm: str, reduction: str) -> None:
    case = CASES[name]
    dtype, context, tolerance = _setting(precision)
    model, batch, loss = problem(case, dtype=dtype)
    with gramian.per_sample_norms(model, loss_reduction=reduction, algorithm=algorithm) as norms:
        with context:
            value = loss(model, *batch, reduction=reduction)
        value.backward()
    expected = loop_norms(model, loss, batch)
    assert not norms.values.requires_grad
    assert norms.values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_norms(norms.values, expected, max(tolerance, 1e-6) if case.computes_in_float32 else tolerance)


@pytest.mark.parametrize(
    "name, precision", sample([(n, p) for n, p in product(CASES, PRECISIONS) if n != "broadcast"], 2 * len(CASES))
)
def test_p_grad_is_bit_for_bit_that_of_an_untouched_copy(name: str, precision: str) -> None:
    dtype, context, _ = _setting(precision)
    model, batch, loss = problem(CASES[name], dtype=dtype)
    untouched = deepcopy(model)
    with gramian.per_sample_norms(model), context:
        loss(model, *batch, reduction="mean").backward()
    with context:
        loss(untouched, *batch, reduction="mean").backward()
    assert_same_bits(gradients(model), gradients(untouched))


def test_p_grad_of_a_chain_of_layers_that_see_one_row_is_equal_up_to_rounding() -> None:
    model, batch, loss = problem(CASES["broadcast"])
    untouched = deepcopy(model)
    captured(model, loss, batch)
    loss(untouched, *batch, reduction="mean").backward()
    torch.testing.assert_close(gradients(model), gradients(untouched), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", some(CASES, 0))
def test_coverage_names_every_parameter_and_says_covered_frozen_or_unused(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    norms = captured(model, loss, batch)
    assert list(norms.coverage) == [n for n, _ in model.named_parameters()]
    for parameter, p in model.named_parameters():
        expected = "frozen" if not p.requires_grad else "unused" if parameter.startswith("spare.") else "covered"
        cover = norms.coverage[parameter]
        assert cover.status == expected, parameter
        assert (cover.uses > 0) == (cover.algorithm != "") == (expected == "covered"), parameter


def test_coverage_counts_the_uses_of_tied_and_reused_weights() -> None:
    for name, parameter, uses in (
        ("tied_gpt", "tokens.weight", 2),
        ("hf_gpt2", "transformer.wte.weight", 2),
        ("tied_linears", "left.weight", 2),
        ("tied_linears", "left.bias", 1),
        ("reused", "shared.weight", 3),
        ("reused", "shared.bias", 3),
        ("reused", "head.weight", 1),
    ):
        model, batch, loss = problem(CASES[name])
        norms = captured(model, loss, batch)
        assert norms.coverage[parameter].uses == uses, parameter


@pytest.mark.parametrize("algorithm", ["direct", "gram"])
def test_a_forced_algorithm_is_the_one_that_coverage_reports(algorithm: str) -> None:
    model, batch, loss = problem(CASES["linear_3d"])
    norms = captured(model, loss, batch, algorithm=algorithm)
    assert norms.coverage["0.weight"].algorithm == norms.coverage["2.weight"].algorithm == algorithm


def test_auto_takes_gram_for_few_tokens_direct_for_many_and_rank_one_for_a_single_token() -> None:
    for tokens, expected in ((1, "rank1"), (2, "gram"), (60, "direct")):
        model = nn.Linear(40, 30).double()
        norms = assert_exact(model, torch.randn(3, tokens, 40, dtype=torch.float64))
        assert norms.coverage["weight"].algorithm == expected


def test_coverage_as_text_has_one_row_per_parameter() -> None:
    model, batch, loss = problem(CASES["partially_frozen"])
    norms = captured(model, loss, batch)
    lines = str(norms.coverage).splitlines()
    assert len(lines) == 1 + len(list(model.parameters()))
    assert lines[0].split() == ["parameter", "status", "layer", "algorithm", "uses"]
    assert lines[1].split()[:2] == ["0.weight", "frozen"]
    assert lines[2].split() == ["0.bias", "covered", "linear", "sum", "1"]


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.accepts_empty_batch])
def test_an_empty_batch_has_no_norms_and_the_gradients_of_an_untouched_copy(name: str) -> None:
    model, batch, loss = problem(CASES[name], samples=0)
    untouched = deepcopy(model)
    norms = captured(model, loss, batch, "sum", loss_reduction="sum")
    loss(untouched, *batch, reduction="sum").backward()
    assert norms.values.shape == (0,) and norms.values.dtype == torch.float64
    assert_same_bits(gradients(model), gradients(untouched))


@pytest.mark.parametrize("name, algorithm", sample(list(product(CASES, ALGORITHMS)), len(CASES)))
def test_a_batch_of_one_sample_has_the_norm_of_p_grad(name: str, algorithm: str) -> None:
    model, batch, loss = problem(CASES[name], samples=1)
    norms = captured(model, loss, batch, algorithm=algorithm)
    total = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    assert_norms(norms.values, total.sqrt()[None], 1e-6 if CASES[name].computes_in_float32 else 1e-9)
    assert_norms(norms.values, loop_norms(model, loss, batch), 1e-6 if CASES[name].computes_in_float32 else 1e-9)


def test_a_coefficient_as_loss_reduction_undoes_any_weight_of_a_sample() -> None:
    model, batch, loss = problem(CASES["mlp"])
    with gramian.per_sample_norms(model, loss_reduction=0.25) as norms:
        (0.25 * loss(model, *batch, reduction="sum")).backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))


# ---- how a layer is called ------------------------------------------------------------------------------------------


class ByKeyword(nn.Module):
    """Calls each of its layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(13, 6), nn.Conv1d(6, 4, 3), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.groups, self.linear = nn.GroupNorm(2, 6), nn.Linear(4, 5)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        h = self.groups(input=self.table(input=ids).transpose(1, 2) + x)
        h = self.norm(input=self.conv(input=h).transpose(1, 2))
        return self.linear(input=self.attention(query=h, key=h, value=h, need_weights=False)[0])


def test_layers_and_models_called_by_keyword_are_exact() -> None:
    model = ByKeyword().double()
    ids, x = torch.randint(13, (3, 7)), torch.randn(3, 6, 7, dtype=torch.float64)

    def loss(model: nn.Module, ids: Tensor, x: Tensor, reduction: str = "mean") -> Tensor:
        terms_B = model(x=x, ids=ids).square().flatten(1).sum(1)
        return terms_B.mean() if reduction == "mean" else terms_B.sum()

    assert_exact(model, ids, x, loss=loss)


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
def test_hugging_face_models_called_with_input_ids_labels_and_mask_are_exact(name: str) -> None:
    case = CASES[name]
    model, (ids, _), _ = problem(case)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0

    def loss(model: nn.Module, ids: Tensor, mask: Tensor, reduction: str = "mean") -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        terms = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)
        terms_B = (terms * mask[:, 1:]).sum(1)
        return terms_B.mean() if reduction == "mean" else terms_B.sum()

    assert_exact(model, ids, mask, loss=loss, tolerance=1e-6 if case.computes_in_float32 else 1e-9)


class Through(nn.Module):
    """Hands a strided, transposed or expanded view of its input to a layer."""

    def __init__(self, layer: nn.Module, view: str) -> None:
        super().__init__()
        self.layer, self.view = layer, view

    def forward(self, x: Tensor) -> Tensor:
        x = {
            "transposed": lambda: x.transpose(1, -1).contiguous().transpose(1, -1),
            "strided": lambda: x.repeat_interleave(2, -1)[..., ::2],
            "sliced": lambda: F.pad(x, (1, 2))[..., 1:-2],
            "expanded": lambda: x[:, :1].expand_as(x),
            "flipped batch": lambda: x.flip(0).contiguous().flip(0),
            "channels_last": lambda: (
                x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and x.is_floating_point() else x
            ),
        }[self.view]()
        y = self.layer(x).tanh()
        return y if self.view == "channels_last" else y.transpose(1, -1).tanh()


VIEWS = ("transposed", "strided", "sliced", "expanded", "flipped batch", "channels_last")
VIEWED: dict[str, Any] = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "linear 4-D": (lambda: nn.Linear(6, 5), (3, 4, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), (4, 6)),
    # Behind a convolution: torch's own backward crashes for a channels_last input that needs no gradient.
    "group norm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)), (4, 3, 6)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 6)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 2, padding=1, groups=2), (4, 3, 6)),
    "conv2d circular": (lambda: nn.Conv2d(4, 6, 2, padding=1, padding_mode="circular"), (4, 3, 6)),
    "embedding": (lambda: nn.Embedding(6, 5), (4, 6)),
    "bilinear": (lambda: paired_with_itself(nn.Bilinear(6, 6, 3)), (4, 6)),
}


def paired_with_itself(layer: nn.Module) -> Toy:
    return Toy(lambda net, x: net.layer(x, x), layer=layer)


@pytest.mark.parametrize("layer, view", sample(list(product(VIEWED, VIEWS)), 30))
def test_inputs_that_are_not_contiguous_are_exact(layer: str, view: str) -> None:
    make, shape = VIEWED[layer]
    torch.manual_seed(2)
    x = torch.randint(6, (3, *shape)) if layer == "embedding" else torch.randn(3, *shape, dtype=torch.float64)
    assert_exact(Through(make(), view).double(), x)


def test_output_gradients_that_are_expanded_scalars_are_exact() -> None:
    def loss(model: nn.Module, x: Tensor, reduction: str = "mean") -> Tensor:
        return model(x).sum() / (len(x) if reduction == "mean" else 1)

    assert_exact(nn.Linear(6, 5).double(), torch.randn(3, 4, 6, dtype=torch.float64), loss=loss)
    assert_exact(nn.Conv2d(2, 5, 2).double(), torch.randn(3, 2, 4, 6, dtype=torch.float64), loss=loss)


# ---- convolutions ---------------------------------------------------------------------------------------------------

CONVOLUTIONS = [
    (dims, groups, stride, dilation, padding, mode, bias)
    for dims, groups, stride, dilation, padding, mode, bias in product(
        (1, 2, 3), (1, 2, 4), (1, 2), (1, 2), (0, 1, "same", "valid"), ("zeros", "reflect", "replicate", "circular"),
        (True, False),
    )
    if not (padding == "same" and stride > 1)
]  # fmt: skip


@pytest.mark.parametrize(
    "dims, groups, stride, dilation, padding, mode, bias",
    sample(CONVOLUTIONS, 96, case=lambda item: (item[0], item[1], item[4], item[5])),
)
def test_convolutions_are_exact(
    dims: int, groups: int, stride: int, dilation: int, padding: int | str, mode: str, bias: bool
) -> None:
    torch.manual_seed(3)
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    kernel, size = (2, 3, 1)[:dims], (6, 5, 4)[:dims]
    conv = layer(
        4, 8, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias, padding_mode=mode
    )
    norms = assert_exact(conv.double(), torch.randn(3, 4, *size, dtype=torch.float64))
    assert norms.coverage["weight"].kind == "conv"


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_with_unequal_stride_padding_and_dilation_per_axis_are_exact(dims: int) -> None:
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    conv = layer(3, 5, (3, 2, 2)[:dims], stride=(2, 1, 3)[:dims], padding=(2, 0, 1)[:dims], dilation=(1, 2, 1)[:dims])
    assert_exact(conv.double(), torch.randn(3, 3, *(7, 6, 5)[:dims], dtype=torch.float64))


def test_a_convolution_whose_stride_leaves_a_rest_of_the_image_out_is_exact() -> None:
    assert_exact(nn.Conv2d(2, 3, 2, stride=3).double(), torch.randn(3, 2, 10, 9, dtype=torch.float64))


def test_a_convolution_that_sees_several_images_per_sample_is_exact() -> None:
    model = Toy(
        lambda net, video: net.conv(video.flatten(0, 1)).unflatten(0, video.shape[:2]),
        conv=nn.Conv2d(2, 3, 2, groups=1, padding=1),
    ).double()
    assert_exact(model, torch.randn(3, 5, 2, 4, 3, dtype=torch.float64))


def test_transposed_convolutions_take_the_generic_way_and_are_exact() -> None:
    norms = assert_exact(nn.ConvTranspose2d(3, 4, 2, stride=2).double(), torch.randn(3, 3, 4, 3, dtype=torch.float64))
    assert norms.coverage["weight"].kind == "generic"


# ---- norms ----------------------------------------------------------------------------------------------------------

NORMS: dict[str, Any] = {
    "LayerNorm": (lambda: nn.LayerNorm(6), (4, 6)),
    "LayerNorm over two axes": (lambda: nn.LayerNorm((4, 6)), (4, 6)),
    "LayerNorm over two axes, tokens": (lambda: nn.LayerNorm((4, 6)), (3, 5, 4, 6)),
    "LayerNorm over all axes": (lambda: nn.LayerNorm((3, 4, 6)), (3, 4, 6)),
    "LayerNorm of a vector": (lambda: nn.LayerNorm(6), (6,)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    "LayerNorm with a large eps": (lambda: nn.LayerNorm(6, eps=0.5), (4, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (4, 6)),
    "RMSNorm over two axes": (lambda: nn.RMSNorm((4, 6)), (5, 4, 6)),
    "RMSNorm with a large eps": (lambda: nn.RMSNorm(6, eps=0.5), (4, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(3, 6), (6, 4, 2)),
    "GroupNorm of vectors": (lambda: nn.GroupNorm(3, 6), (6,)),
    "GroupNorm of one group": (lambda: nn.GroupNorm(1, 6), (6, 5)),
    "GroupNorm of one channel each": (lambda: nn.GroupNorm(6, 6), (6, 5)),
    **{
        f"InstanceNorm{d}d{', tracked' if tracked else ''}{', eval' if not training else ''}": (
            lambda d=d, tracked=tracked, training=training: _instance_norm(d, tracked, training),
            (4, *(5, 3, 2)[:d]),
        )
        for d, tracked, training in product((1, 2, 3), (False, True), (True, False))
    },
    **{
        f"BatchNorm{d}d, eval": (lambda d=d: _batch_norm(d), (4, *(5, 3, 2)[: d if d > 1 else 0], *((5,) * (d == 1))))
        for d in (1, 2, 3)
    },
    "BatchNorm1d of vectors, eval": (lambda: _batch_norm(1), (4,)),
}


def _warm(layer: nn.Module) -> nn.Module:
    """Running statistics that are no standard ones."""
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.linspace(0.5, 2, len(buffer)) * (-1 if name == "running_mean" else 1))
    return layer


def _instance_norm(dims: int, tracked: bool, training: bool) -> nn.Module:
    layer = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dims]
    return _warm(layer(4, affine=True, track_running_stats=tracked)).train(training)


def _batch_norm(dims: int) -> nn.Module:
    return _warm({1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](4)).eval()


@pytest.mark.parametrize("name", NORMS)
def test_normalisation_layers_are_exact(name: str) -> None:
    make, shape = NORMS[name]
    torch.manual_seed(4)
    layer = make().double()
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.3 * torch.randn_like(p)
    norms = assert_exact(layer, 2 * torch.randn(3, *shape, dtype=torch.float64) + 1)
    assert norms.coverage["weight"].kind == "norm"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rms_norm_without_eps_uses_that_of_the_input_dtype(dtype: torch.dtype) -> None:
    # Inputs so small that the epsilon decides.
    x = torch.randn(3, 4, 6, dtype=dtype) * torch.finfo(dtype).eps ** 0.5
    model = nn.RMSNorm(6, eps=None).to(dtype)
    with gramian.per_sample_norms(model) as norms:
        (model(x) * torch.arange(6)).flatten(1).sum(1).mean().backward()
    hat = (x.double() / (x.double().square().mean(-1, keepdim=True) + torch.finfo(dtype).eps).sqrt()) * torch.arange(6)
    assert_norms(norms.values, hat.sum(1).norm(dim=1), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(6, elementwise_affine=False),
        nn.RMSNorm(6, elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.InstanceNorm1d(4),
    ],
    ids=type,
)
def test_norms_without_parameters_need_no_cover(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 5)).double()
    norms = assert_exact(model, torch.randn(3, 4, 6, dtype=torch.float64))
    assert list(norms.coverage) == ["0.weight", "0.bias", "2.weight", "2.bias"]


# ---- embeddings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, 0, 3, -1])
def test_the_row_of_padding_idx_contributes_nothing(padding: int | None) -> None:
    model = nn.Embedding(7, 5, padding_idx=padding).double()
    ids = torch.tensor([[0, 3, 3, 6, 1], [3, 3, 3, 3, 3], [0, 0, 6, 6, 2]])
    assert_exact(model, ids)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 4), (3, 2, 4)])
def test_embeddings_of_any_number_of_axes_and_integer_dtype_are_exact(shape: tuple[int, ...]) -> None:
    for dtype in (torch.int64, torch.int32):
        assert_exact(nn.Embedding(5, 6).double(), torch.randint(5, shape, dtype=dtype))


# ---- attention ------------------------------------------------------------------------------------------------------


class Attended(nn.Module):
    """`nn.MultiheadAttention` with fixed options behind a residual."""

    def __init__(self, layer: nn.MultiheadAttention, **options: Any) -> None:
        super().__init__()
        self.attention, self.options = layer, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return query + self.attention(query, key, value, *rest, **self.options)[0]


def _qkv(tokens: int, samples: int = 3, **widths: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    return tuple(
        torch.randn(samples, tokens + (name != "q"), widths.get(name, 8), dtype=torch.float64) for name in "qkv"
    )  # type: ignore[return-value]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("tokens", [5, 3, 2])
def test_multihead_attention_with_a_two_dimensional_mask_is_exact_also_where_it_has_as_many_rows_as_the_batch(
    tokens: int, weights: bool
) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    q = _qkv(tokens)[0]
    mask = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), 1)
    for value in (mask, torch.zeros(tokens, tokens, dtype=torch.float64).masked_fill(mask, float("-inf"))):
        assert_exact(Attended(layer, attn_mask=value, need_weights=weights), q, q, q)


def test_multihead_attention_with_a_positional_mask_is_exact() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()

    def model_forward(net: Any, q: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
        return net.attention(q, q, q, None, False, mask)[0]

    assert_exact(Toy(model_forward, attention=layer), _qkv(3)[0])


@pytest.mark.parametrize("tokens", [5, 2])
def test_multihead_attention_with_a_key_padding_mask_is_exact(tokens: int) -> None:
    q, k, v = _qkv(tokens)
    mask = torch.zeros(3, tokens + 1, dtype=torch.bool)
    mask[0, -2:] = mask[2, 0] = True

    model = Toy(
        lambda net, q, k, v, mask: net.attention(q, k, v, key_padding_mask=mask, need_weights=False)[0],
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    ).double()
    assert_exact(model, q, k, v, mask)


@pytest.mark.parametrize(
    "options",
    [{"kdim": 6, "vdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}],
    ids=lambda options: "-".join(options),
)
def test_multihead_attention_with_its_options_is_exact(options: dict[str, Any]) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **options).double()
    q, k, v = _qkv(4, k=options.get("kdim", 8), v=options.get("vdim", 8))
    norms = assert_exact(Attended(layer), q, k, v)
    kind = "attention (generic)" if options.get("add_bias_kv") else "products"
    assert {cover.kind for cover in norms.coverage.values()} == {kind}


def test_multihead_attention_with_frozen_parts_is_exact() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    layer.in_proj_weight.requires_grad_(False)
    norms = assert_exact(Attended(layer), *_qkv(4))
    assert norms.coverage["attention.in_proj_weight"].status == "frozen"
    assert norms.coverage["attention.out_proj.weight"].status == "covered"


@pytest.mark.parametrize("tokens", [4, 3, 6])
def test_multihead_attention_with_one_mask_per_sample_and_head_is_exact(tokens: int) -> None:
    q = _qkv(tokens)[0]
    mask = torch.rand(3, 2, tokens, tokens) > 0.5
    mask[..., 0] = False
    model = Toy(
        lambda net, q, mask_BHTT: net.attention(q, q, q, attn_mask=mask_BHTT.flatten(0, 1), need_weights=False)[0],
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    ).double()
    assert_exact(model, q, mask)


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layers_are_exact(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
    norms = assert_exact(layer.double(), _qkv(4)[0])
    assert all(cover.status == "covered" for cover in norms.coverage.values())


# ---- layers without a formula of their own --------------------------------------------------------------------------


class FirstOutput(nn.Module):
    """The outputs of a recurrent layer, and its last state with the batch first."""

    def __init__(self, layer: nn.RNNBase, state: bool) -> None:
        super().__init__()
        self.layer, self.state = layer, state

    def forward(self, x: Tensor) -> Any:
        output, state = self.layer(x)
        state = state[0] if isinstance(state, tuple) else state
        return (output, state.transpose(0, 1)) if self.state else output


RECURRENT: dict[str, Any] = {
    "LSTM": lambda: nn.LSTM(5, 4, batch_first=True),
    "GRU": lambda: nn.GRU(5, 4, batch_first=True),
    "RNN": lambda: nn.RNN(5, 4, batch_first=True),
    "two layers": lambda: nn.LSTM(5, 4, num_layers=2, batch_first=True),
    "as many layers as samples": lambda: nn.GRU(5, 4, num_layers=3, batch_first=True),
    "bidirectional": lambda: nn.GRU(5, 4, batch_first=True, bidirectional=True),
    "no bias": lambda: nn.LSTM(5, 4, batch_first=True, bias=False),
    "projected": lambda: nn.LSTM(5, 4, batch_first=True, proj_size=3),
}


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_exact(name: str, state: bool) -> None:
    torch.manual_seed(6)
    model = FirstOutput(RECURRENT[name]().double(), state)
    assert_exact(model, torch.randn(3, 6, 5, dtype=torch.float64))


@pytest.mark.parametrize("layers", [2, 3])
def test_a_recurrent_layer_with_an_initial_state_is_exact(layers: int) -> None:
    state = torch.randn(3, layers, 4, dtype=torch.float64)
    model = Toy(
        lambda net, x, state_BLH: net.layer(x, state_BLH.transpose(0, 1).contiguous())[0],
        layer=nn.GRU(5, 4, num_layers=layers, batch_first=True),
    ).double()
    assert_exact(model, torch.randn(3, 6, 5, dtype=torch.float64), state)


def scale(width: int) -> Toy:
    """A layer that nobody knows."""
    return Toy(
        lambda net, x: net.scale * x.abs() ** net.power,
        scale=nn.Parameter(torch.rand(width)),
        power=nn.Parameter(torch.tensor(1.5)),
    )


def parent() -> Toy:
    """Raw parameters beside layers, one of them without axes."""
    return Toy(
        lambda net, x: net.head(torch.tanh(net.inner(x)) + net.offset) * net.temperature,
        inner=nn.Linear(5, 6),
        head=nn.Linear(6, 4),
        offset=nn.Parameter(torch.randn(1, 6)),
        temperature=nn.Parameter(torch.tensor(0.7)),
    )


class OwnForward(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.tanh()) * 2 + self.weight.sum()


class SameForward(nn.Linear):
    """A subclass that does not."""


def nested() -> Toy:
    """A parent with a raw parameter inside a parent with a raw parameter."""
    return Toy(lambda net, x: net.parent(x) * net.gain, parent=parent(), gain=nn.Parameter(torch.rand(4)))


def conditional() -> Toy:
    """Looks at values, which vmap cannot."""
    return Toy(lambda net, x: x @ net.weight if float(x.sum()) > -1e9 else x, weight=nn.Parameter(torch.randn(5, 5)))


UNKNOWN: dict[str, Any] = {
    "unknown layer": lambda: scale(5),
    "raw parameters on the root": parent,
    "raw parameters on two levels": nested,
    "subclass with its own forward": lambda: OwnForward(5, 4),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh()),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(5, 4)), nn.Tanh()),
    "PReLU": lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(6)),
    "bilinear": lambda: paired_with_itself(nn.Bilinear(5, 5, 3)),
    "looks at values": conditional,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_layers_and_raw_parameters_are_exact(name: str, algorithm: str) -> None:
    torch.manual_seed(7)
    model = UNKNOWN[name]().double()
    norms = assert_exact(model, torch.randn(3, 6, 5, dtype=torch.float64), algorithm=algorithm)
    assert all(cover.status == "covered" for cover in norms.coverage.values())


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_layers_with_an_empty_batch_have_no_norms(name: str) -> None:
    model = UNKNOWN[name]().double()
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        model(torch.randn(0, 6, 5, dtype=torch.float64)).sum().backward()
    assert norms.values.shape == (0,)


def test_a_subclass_that_keeps_forward_keeps_the_site_and_one_that_changes_it_does_not() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    assert assert_exact(SameForward(5, 4).double(), x).coverage["weight"].kind == "linear"
    assert assert_exact(OwnForward(5, 4).double(), x).coverage["weight"].kind == "generic"


def test_an_unknown_layer_that_is_called_twice_is_exact() -> None:
    norms = assert_exact(
        Toy(lambda net, x: net.scale(net.scale(x) + x), scale=scale(5)).double(),
        torch.randn(3, 6, 5, dtype=torch.float64),
    )
    assert norms.coverage["scale.scale"].uses == 2


def test_a_weight_shared_between_a_linear_and_an_unknown_layer_is_exact() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.own = nn.Linear(5, 5), OwnForward(5, 5)
            self.own.weight = self.linear.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.linear(x))

    norms = assert_exact(Shared().double(), torch.randn(3, 6, 5, dtype=torch.float64))
    assert norms.coverage["linear.weight"].uses == 2


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags_take_the_generic_way_and_are_exact(mode: str) -> None:
    assert_exact(nn.EmbeddingBag(7, 4, mode=mode).double(), torch.randint(7, (3, 5)))


def test_transformer_decoder_layers_are_exact() -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    assert_exact(layer.double(), _qkv(4)[0], _qkv(4)[1])


def test_one_module_under_two_names_is_one_module_used_twice() -> None:
    layer = nn.Linear(5, 5)
    norms = assert_exact(nn.Sequential(layer, nn.Tanh(), layer).double(), torch.randn(3, 4, 5, dtype=torch.float64))
    assert {name: cover.uses for name, cover in norms.coverage.items()} == {"0.weight": 2, "0.bias": 2}


def test_layers_replaced_added_and_converted_between_captures_are_exact() -> None:
    model, x = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).double(), torch.randn(3, 5, dtype=torch.float64)
    assert_exact(model, x)
    model[0] = nn.Linear(5, 5).double()
    assert_exact(model, x)
    model[1].weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    assert_exact(model, x)
    model.append(nn.Linear(3, 2).double())
    assert len(assert_exact(model, x).coverage) == 6
    assert_exact(model.float(), x.float())


@pytest.mark.parametrize("name", some(CASES, 1))
def test_a_sample_that_is_not_a_number_leaves_the_norms_of_the_others_alone(name: str) -> None:
    case = CASES[name]
    model, batch, loss = problem(case)
    expected = loop_norms(model, loss, batch)

    def spoil(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        bad_B = (inputs[0] == batch[0][1]).all(1)  # wherever it stands in the batch
        return output * torch.where(bad_B, float("nan"), 1.0).to(output)[:, None, None]

    if batch[0].is_floating_point():
        batch[0][1] = float("nan")
    else:
        table = next(m for m in model.modules() if isinstance(m, nn.Embedding))
        table.register_forward_hook(spoil)
    norms = captured(model, loss, batch)
    assert norms.values.isnan().tolist() == [False, True, False, False]
    others = [0, 2, 3]
    assert_norms(norms.values[others], expected[others], 1e-6 if case.computes_in_float32 else 1e-9)


class Cancelling(nn.Module):
    """Biases whose gradient is zero but for rounding: in front of norms, and on the keys of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.instance = nn.Conv1d(3, 8, 2), nn.InstanceNorm1d(8)
        self.mix, self.groups = nn.Conv1d(8, 8, 1), nn.GroupNorm(8, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.groups(self.mix(self.instance(self.conv(x)).tanh())).transpose(1, 2)
        return F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_that_are_zero_but_for_rounding_are_no_false_alarm_of_the_audit(precision: str) -> None:
    dtype, context, tolerance = _setting(precision)
    torch.manual_seed(11)
    model, x = Cancelling().to(dtype), torch.randn(4, 3, 9, dtype=dtype)
    with gramian.per_sample_norms(model) as norms:
        with context:
            value = wave(model, x)
        value.backward()
    assert_norms(norms.values, loop_norms(model, wave, (x,)), 2 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_gpt_of_some_size_in_float32_is_within_1e_5(algorithm: str) -> None:
    from gramian.models.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(vocabulary=101, context=64, layers=2, width=64, heads=4, tied=True), seed=1)
    ids = torch.randint(101, (3, 64), generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, ids: Tensor, reduction: str = "mean") -> Tensor:
        terms_B = F.cross_entropy(model(ids).transpose(1, 2), ids.roll(-1, 1), reduction="none").mean(1)
        return terms_B.mean() if reduction == "mean" else terms_B.sum()

    assert_exact(model, ids, loss=loss, algorithm=algorithm)


def test_a_masked_parameter_without_gradient_is_covered_with_norm_zero() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()

    def loss(model: nn.Module, x: Tensor, reduction: str = "mean") -> Tensor:
        return (0 * model(x)).sum()

    norms = assert_exact(model, torch.randn(3, 5, dtype=torch.float64), loss=loss)
    assert torch.equal(norms.values, torch.zeros(3, dtype=torch.float64))
