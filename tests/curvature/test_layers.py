"""Every trainable parameter of every model has a declared approximation, and it is the one that is declared."""

from copy import deepcopy
from functools import lru_cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import gramian
from gramian.curvature.blocks.block_specs import SMALL
from gramian.oracles import dense_kfac, single_sample
from gramian.oracles.dense_kfac import ReferenceTokens
from tests.curvature.problems import (
    PROBLEMS,
    assert_close,
    calls_of,
    classes,
    cross_entropy,
    gradients,
    has_bias,
    kfac,
    normal,
    seeded,
    tokens,
)
from tests.kit.matrix import some
from tests.kit.models import CASES
from tests.kit.refusals import refusal
from tests.statistics.problems import problem

pytestmark = pytest.mark.oracle

SAMPLES = 4
MATRICES = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
TIED = ("tied_gpt", "hf_gpt2", "tied_linears")


def tolerance(name: str) -> float:
    return 1e-6 if CASES[name].computes_in_float32 else 1e-9


def captured(name: str, by_target: bool = False, **options: object) -> tuple[nn.Module, gramian.KFACNaturalGradient]:
    """A model of the table after one backward of its mean loss, one term per sample, or per target."""
    p = problem(name, SAMPLES)
    model, found = p.model(), kfac(**options)
    with found.capture(model, num_terms=p.batch[-1].numel() if by_target else SAMPLES):
        p.backward(model, p.batch)
    return model, found


@lru_cache
def matrices(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """{layer: A and G} of every layer of a case that is one matrix and shares it with no other."""
    p = problem(name, SAMPLES)
    model = p.model()
    shared: dict[int, int] = {}
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
        for q in module.parameters(recurse=False):
            shared[id(q)] = shared.get(id(q), 0) + 1
    inside = {m for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules()}
    layers = [
        layer
        for layer, m in model.named_modules()
        if isinstance(m, MATRICES) and m not in inside and m.weight.requires_grad and getattr(m, "groups", 1) == 1
        if shared[id(m.weight)] == 1 and layer not in ("spare",)
    ]
    calls = calls_of(model, lambda: p.backward(model, p.batch, "sum"), layers)
    found = {}
    for layer, uses in calls.items():
        module = model.get_submodule(layer)
        sides, counted = tokens(module, uses), None
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            counted = 1 - sides.inputs_TI[:, module.padding_idx]
        found[layer] = dense_kfac.factors(sides, SAMPLES, 1.0, has_bias(module), counted)
    return found


# ---- coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(CASES, 0))
def test_every_trainable_parameter_has_an_approximation_and_a_natural_gradient(name: str) -> None:
    model, found = captured(name, by_target=True, strict=name != "unused")
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}  # each once
    coverage, natural = found.coverage, found.compute_natural_gradient(model)
    assert coverage.keys() == {n for n, _ in model.named_parameters()}
    for n, p in model.named_parameters():
        cover = coverage[n]
        if not p.requires_grad:
            assert cover.status == "frozen"
        elif n.startswith("spare."):
            assert (cover.status, cover.algorithm) == ("unused", "identity (no data)")
        else:
            assert cover.status == "covered"
            assert cover.algorithm.startswith(("K-FAC ", "exact block", "diagonal"))
    with_gradient = [n for n, p in names.items() if p.grad is not None]
    assert list(natural) == with_gradient
    for n, t in natural.items():
        assert t.shape == names[n].shape and bool(t.isfinite().all()) and bool((t != 0).any())
        assert not torch.equal(t, names[n].grad)
    in_blocks = {p for block in found.kfac_factors.values() for p in block.spec.owners}
    assert sorted(in_blocks) == sorted(n for n in names if not n.startswith("spare."))


@pytest.mark.parametrize("name", CASES)
def test_matrices_have_k_fac_factors(name: str) -> None:
    model, found = captured(name)
    blocks = found.kfac_factors.items()  # those of several matrices: test_several_matrices
    kronecker = {n for n, block in blocks if block.spec.kind == "kronecker" and not block.spec.keys}
    assert matrices(name).keys() <= kronecker
    assert len(kronecker - matrices(name).keys()) == (1 if name in TIED else 0)
    for layer, (A, G) in matrices(name).items():
        block = found.kfac_factors[layer]
        assert_close(block.A.to_dense(), A, tolerance(name), f"{layer} A")
        assert_close(block.G.to_dense(), G, tolerance(name), f"{layer} G")
        assert found.coverage[f"{layer}.weight"].algorithm == f"K-FAC {layer}"


@pytest.mark.parametrize("name", some(CASES, 1))
def test_all_else_has_its_exact_block_or_diagonal(name: str) -> None:
    p = problem(name, SAMPLES)
    model, found = captured(name)
    others = {n: block for n, block in found.kfac_factors.items() if block.spec.kind != "kronecker"}
    norms = [m for m in model.modules() if "Norm" in type(m).__name__ and any(q.requires_grad for q in m.parameters())]
    assert others or not norms
    for n, block in others.items():
        g_BN = p.gradients[n].flatten(1).double()
        size, rows = g_BN.shape[1], len(model.get_parameter(n))
        small, narrow = size <= SMALL, size <= SMALL * rows < SMALL * size
        want = g_BN.mT @ g_BN / SAMPLES
        same = torch.arange(size) // (size if small else size // rows if narrow else 1)
        want = want * (same[:, None] == same)
        assert block.A is None and block.spec.kind == ("block" if small or narrow else "diagonal")
        assert_close(block.G.to_dense(), want, 4 * tolerance(name), n)
        assert found.coverage[n].algorithm.startswith("exact block" if small or narrow else "diagonal")


@pytest.mark.parametrize("size, moved", [(1, ()), (6, ("6",)), (7, ("4", "6")), (9, ("0", "4", "6"))])
def test_layers_narrower_than_asked_get_their_exact_block(size: int, moved: tuple[str, ...]) -> None:
    """The narrower side decides: a wide layer with few outputs is narrow."""
    p = PROBLEMS["mlp"]
    model = p.model()
    found = p.captured(model, min_layer_size=size)
    loop = single_sample.per_sample_gradients(model, cross_entropy, (p.inputs, p.targets))
    kinds = {n: block.spec.kind for n, block in found.kfac_factors.items()}
    assert {n for n, kind in kinds.items() if kind == "kronecker"} == {"0", "2", "4", "6"} - set(moved)
    for layer in moved:
        for n in (f"{layer}.weight", f"{layer}.bias"):
            if model.get_parameter(n).requires_grad:
                g_BN = loop[n].flatten(1)
                assert_close(found.kfac_factors[n].G.to_dense(), g_BN.mT @ g_BN / p.terms, what=n)
        assert f"narrower than min_layer_size={size}" in found.coverage[f"{layer}.weight"].algorithm
        assert found.record()["layers"][f"{layer}.weight"]["why_not_kfac"] == f"narrower than min_layer_size={size}"
    assert found.compute_natural_gradient(model).keys() == gradients(model).keys()


def test_a_parameter_without_data_is_declared_and_left_alone() -> None:
    p = problem("unused", SAMPLES)
    model, found = captured("unused")
    for q in model.spare.parameters():
        q.grad = torch.ones_like(q)
    natural = found.compute_natural_gradient(model)
    assert torch.equal(natural["spare.weight"], model.spare.weight.grad)
    assert natural["spare.weight"] is not model.spare.weight.grad
    assert found.record()["identity"] == ["spare.bias", "spare.weight"]
    with refusal("spare.weight: is not a parameter with curvature"):
        found.compute_fisher_vector_product({"spare.weight": model.spare.weight.grad})
    strict = kfac(strict=True)
    with refusal("spare.weight: took no part"), strict.capture(model, num_terms=4):
        p.backward(model, p.batch)


# ---- weights that are used more than once ----------------------------------------------------------------------------


def test_every_call_of_a_module_counts() -> None:
    p = problem("reused", SAMPLES)
    _, found = captured("reused")
    about = found.record()["layers"]
    count = p.batch[0].shape[0] * p.batch[0].shape[1]
    assert [about[layer]["T"] for layer in ("inner", "shared", "head")] == [count, 3 * count, count]


def test_two_linears_with_one_weight_are_one_block_and_two_biases() -> None:
    p = problem("tied_linears", SAMPLES)
    model, found = captured("tied_linears")
    calls = calls_of(model, lambda: p.backward(model, p.batch, "sum"), ["left", "right"])
    both = [tokens(model.left, calls[layer]) for layer in ("left", "right")]
    joined = ReferenceTokens(torch.cat([t.inputs_TI for t in both]), torch.cat([t.gradients_TO for t in both]))
    A, G = dense_kfac.factors(joined, SAMPLES, 1.0, bias=False)
    block = found.kfac_factors["left"]
    assert block.spec.layers == ("left", "right") and block.spec.parameters == ("left.weight",)
    assert_close(block.A.to_dense(), A)
    assert_close(block.G.to_dense(), G)
    assert {found.kfac_factors[n].spec.kind for n in ("left.bias", "right.bias")} == {"block"}


class Tied(nn.Module):
    """A head tied to a table; either may be left out."""

    def __init__(self, use: str = "both") -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 13, bias=False)
        self.out, self.use = nn.Linear(6, 13), use
        self.head.weight = self.table.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        fixed = torch.sin(ids_BT[..., None] * torch.arange(1, 7)).double()
        h = torch.tanh(self.inner(fixed if self.use == "head" else self.table(ids_BT)))
        return self.out(h) if self.use == "table" else self.head(h)


def tied(use: str, count: int, policy: str) -> tuple[dict[str, tuple[Tensor, Tensor]], gramian.KFACNaturalGradient]:
    """Factors of each use by itself as [o, m] = [V, D], from hooks; and ours."""
    model, found = seeded(partial(Tied, use)), kfac(kfac_policy=policy)
    x, y = classes(13, count, 2), classes(13, count, 2, seed=2)
    with found.capture(model, loss_reduction="sum", num_terms=2 * count):
        cross_entropy(model, x, y).backward()
    layers = [layer for layer in ("table", "head") if use in (layer, "both")]
    calls = calls_of(model, lambda: cross_entropy(model, x, y).backward(), layers)
    sides = {}
    for layer, uses in calls.items():
        A, G = dense_kfac.factors(tokens(model.get_submodule(layer), uses), 2 * count, 1.0, bias=False)
        sides[layer] = (G, A) if layer == "table" else (A, G)  # its inputs are the head's outputs
    return sides, found


@pytest.mark.parametrize("use", ["head", "table"])
@pytest.mark.parametrize("count", [2, 10])
@pytest.mark.parametrize("policy", ["all", "small_only"])
def test_a_tied_head_or_table_alone_is_exact(use: str, count: int, policy: str) -> None:
    sides, found = tied(use, count, policy)
    block = found.kfac_factors["table"]
    v = {"table.weight": normal(13, 6)}
    A, G = sides[use]
    assert_close(found.compute_fisher_vector_product(v)["table.weight"], G @ v["table.weight"] @ A)
    assert (block.spec.outputs, block.spec.inputs) == (13, 6)


@pytest.mark.parametrize("count", [2, 10])
@pytest.mark.parametrize("policy", ["all", "small_only"])
def test_a_tied_head_and_table_are_joined_with_their_trace_kept(count: int, policy: str) -> None:
    sides, found = tied("both", count, policy)
    block = found.kfac_factors["table"]
    traces = {use: float(A.trace() * G.trace()) for use, (A, G) in sides.items()}
    total = sum(traces.values())
    assert float(block.A.trace() * block.G.trace()) == pytest.approx(total, rel=1e-10)
    for side, factor in ((0, block.A), (1, block.G)):  # each side: unit traces, weighted by the products' traces
        want = sum(traces[use] / total * pair[side] / pair[side].trace() for use, pair in sides.items())
        assert_close(factor.to_dense() / factor.trace(), want, what="AG"[side])
    about = found.record()["layers"]["table"]
    assert "weighted by their traces" in about["sides"]["A"]["reason"]
    assert about["layers"] == ["table", "head"]


@pytest.mark.parametrize("mode", ["pi", "joint"])
@pytest.mark.parametrize("count", [2, 10])
def test_a_tied_weight_is_inverted_as_what_it_is(mode: str, count: int) -> None:
    _, found = tied("both", count, "all")
    block = found.kfac_factors["table"]
    again = kfac(damping=0.01, damping_mode=mode, use_eigenvalue_correction=False)
    again.load_state_dict(found.state_dict())
    g = normal(13, 6)
    model = seeded(Tied)
    model.table.weight.grad = g
    A, G = block.A.to_dense(), block.G.to_dense()
    got = again.compute_natural_gradient(model)["table.weight"]
    assert_close(got, dense_kfac.natural(A, G, g, -1.0, mode, 0.01), 1e-9)


# ---- layers of other kinds -------------------------------------------------------------------------------------------


def test_attention_is_covered_whole() -> None:
    """torch's own attention reads the weight of `out_proj` past its module."""
    model, found = captured("mha")
    names = [n for n, _ in model.attention.named_parameters(prefix="attention")]
    assert len(names) == 4
    for n in names:
        assert found.coverage[n].algorithm.startswith("exact block" if "out_proj" in n else "K-FAC attention.in_proj")
    natural = found.compute_natural_gradient(model)
    assert all(bool((natural[n] != model.get_parameter(n).grad).any()) for n in names)


def test_adapters_beside_frozen_weights_have_factors_of_their_own() -> None:
    model, found = captured("lora")
    assert [*found.kfac_factors] == ["0.A", "0.B", "2.A", "2.B"]
    assert {found.coverage[n].status for n, _ in model.named_parameters() if ".base." in n} == {"frozen"}


def test_batch_norm_in_training_mode_is_covered() -> None:
    """Its samples are mixed; what is squared is each sample's part of the sum."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5))

    model, plain, found = seeded(net), seeded(net), kfac()
    x, y = normal(6, 3, 3, 4), classes(5, 6)
    with found.capture(model, num_terms=6):
        F.cross_entropy(model(x), y).backward()
    seen: list[tuple[Tensor, Tensor]] = []
    plain[1].register_forward_hook(lambda m, a, out: out.retain_grad() or seen.append((a[0], out)))
    F.cross_entropy(plain(x), y, reduction="sum").backward()
    a, g = seen[0][0].detach(), seen[0][1].grad
    hat = (a - a.mean((0, 2, 3), keepdim=True)) * (a.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).rsqrt()
    parts = {"1.weight": (g * hat).sum((2, 3)), "1.bias": g.sum((2, 3))}
    for n, g_BC in parts.items():
        assert_close(found.kfac_factors[n].G.to_dense(), g_BC.mT @ g_BC / 6, what=n)
    assert found.compute_natural_gradient(model).keys() == gradients(model).keys()
    for (n, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), n


class TimeFirst(nn.Module):
    """A norm, a bias and a layer on [T, B, D]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.norm, self.bias = nn.Linear(4, 4), nn.LayerNorm(4), nn.Parameter(torch.ones(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inp(x).tanh().transpose(0, 1)).transpose(0, 1) + self.bias


class UsesChild(TimeFirst):
    """Its layer on [T, B, D] uses a child's weight past the child, so that it is tapped as one."""

    class Mixer(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm, self.child = norm, nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.linear(x, self.child.weight) + x)

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.Mixer(self.norm)
        self.double()


@pytest.mark.parametrize("kind", [TimeFirst, UsesChild])
@pytest.mark.parametrize("shape", [(4, 4), (2, 4), (3, 5)], ids=str)
def test_blocks_over_samples_find_them_on_axis_one(kind: type[TimeFirst], shape: tuple[int, int]) -> None:
    """Where shapes fit both axes, as where they do not: the block of a norm is the sum of its samples' squares."""
    model, x = kind(), torch.randn(*shape, 4, dtype=torch.float64)
    single: dict[str, list[Tensor | None]] = {
        name: [] for name, p in model.named_parameters() if "norm" in name and p.dim() == 1
    }
    for one in x:
        alone = deepcopy(model)
        torch.sin(alone(one[None])).cumsum(1).sum().backward()
        for name, found in single.items():
            found.append(alone.get_parameter(name).grad)
    kfac = gramian.KFACNaturalGradient(max_tokens=None, kfac_use_woodbury=False)
    with kfac.capture(model, num_terms=len(x), loss_reduction="sum"):
        torch.sin(model(x)).cumsum(1).sum().backward()
    for name, found in single.items():
        g = torch.stack([one for one in found if one is not None])
        torch.testing.assert_close(kfac.kfac_factors[name].G.to_dense(), g.T @ g / len(x))
