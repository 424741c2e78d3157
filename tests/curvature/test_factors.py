"""K-FAC factors against sums of outer products from plain hooks, in every representation that a policy may choose."""

import itertools
from typing import Any

import curvlinops
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramian
from tests.curvature.problems import (
    PROBLEMS,
    QKV,
    assert_close,
    assert_same_factors,
    assert_tensors,
    classes,
    cross_entropy,
    has_bias,
    kfac,
    narrow,
    normal,
    oracle,
    seeded,
    written,
)
from tests.kit.matrix import examples
from tests.kit.refusals import refusal
from tests.kit.toys import Toy

pytestmark = pytest.mark.oracle

POLICIES = ("all", "auto", "hybrid", "small_only")


@pytest.mark.parametrize("name, policy, sharing", [*itertools.product(PROBLEMS, POLICIES, ("expand", "reduce"))])
def test_factors_are_means_of_outer_products(name: str, policy: str, sharing: str) -> None:
    p = PROBLEMS[name]
    found = p.captured(kfac_policy=policy, kfac_big_threshold=11, weight_sharing=sharing)
    modules = dict(p.model().named_modules())
    for layer, (A, G) in oracle(name, sharing).items():
        block = found.kfac_factors[layer]
        assert block.A is not None
        assert_close(block.A.to_dense(), A, what=f"{layer} A")
        assert_close(block.G.to_dense(), G, what=f"{layer} G")
        if has_bias(modules[layer]):
            assert float(block.A.to_dense()[-1, -1]) == pytest.approx(1.0, rel=1e-12)
    assert found.head == p.head


def test_an_embedding_counts_its_tokens() -> None:
    p = PROBLEMS["embedding"]
    A = p.captured().kfac_factors["0"].A
    assert A is not None and A.kind == "diagonal"
    assert_close(A.diagonal(), p.inputs.flatten().bincount(minlength=13).double() / p.inputs.numel())


def test_the_padding_row_of_an_embedding_is_no_token() -> None:
    model = seeded(lambda: nn.Sequential(nn.Embedding(13, 9, padding_idx=0), nn.Linear(9, 5)))
    x, y = classes(13, 4, 5), classes(5, 4, 5)
    x[:, -2:] = 0
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda m, a, out: out.retain_grad() or seen.append(out))
    found = kfac()
    with found.capture(model, num_terms=20, loss_reduction="sum"):
        cross_entropy(model, x, y).backward()
    real = x != 0
    g = seen[0].grad[real]
    A, G = (f.to_dense() for f in (found.kfac_factors["0"].A, found.kfac_factors["0"].G))
    assert_close(A.diagonal(), x[real].bincount(minlength=13).double() / real.sum())
    assert_close(G, g.mT @ g / 20)


# ---- which representation --------------------------------------------------------------------------------------------

LOW, DENSE = "low rank", "dense"
# Layer "0" has 10 inputs and a bias (m = 11) and 8 outputs, the head 6 outputs; (options, T, side, representation).
TABLE: list[tuple[dict[str, Any], int, str, str]] = [
    ({"kfac_policy": "all"}, 7, "0 G", LOW),
    ({"kfac_policy": "all"}, 8, "0 G", DENSE),
    ({"kfac_policy": "all", "kfac_auto_t_max": 5}, 5, "0 G", LOW),
    ({"kfac_policy": "all", "kfac_auto_t_max": 5}, 6, "0 G", DENSE),
    ({"kfac_policy": "all", "kfac_auto_rho": 0.1}, 7, "0 G", LOW),
    ({"kfac_policy": "auto"}, 8, "0 G", LOW),
    ({"kfac_policy": "auto"}, 9, "0 G", DENSE),
    ({"kfac_policy": "auto", "kfac_auto_rho": 1.5}, 12, "0 G", LOW),
    ({"kfac_policy": "auto", "kfac_auto_rho": 1.5}, 13, "0 G", DENSE),
    ({"kfac_policy": "auto", "kfac_auto_rho": 0.5}, 5, "0 G", DENSE),
    ({"kfac_policy": "auto", "kfac_auto_t_max": 5}, 6, "0 G", DENSE),
    ({"kfac_policy": "hybrid", "kfac_big_threshold": 9}, 3, "0 G", DENSE),
    ({"kfac_policy": "hybrid", "kfac_big_threshold": 8}, 7, "0 G", LOW),
    ({"kfac_policy": "hybrid", "kfac_big_threshold": 8}, 8, "0 G", DENSE),
    ({"kfac_policy": "hybrid", "kfac_big_threshold": 9}, 5, "2 G", LOW),
    ({"kfac_policy": "hybrid", "kfac_big_threshold": 9}, 6, "2 G", DENSE),
    ({"kfac_policy": "small_only"}, 3, "0 G", DENSE),
    ({"kfac_policy": "all", "kfac_use_woodbury": False}, 3, "0 G", DENSE),
    ({"kfac_policy": "auto", "kfac_use_woodbury": False}, 3, "0 G", DENSE),
    ({"kfac_policy": "hybrid", "kfac_use_woodbury": False}, 3, "2 G", DENSE),
    ({"kfac_policy": "all"}, 10, "0 A", LOW),
    ({"kfac_policy": "all"}, 11, "0 A", DENSE),
    ({"kfac_policy": "auto", "kfac_auto_rho": 5.0}, 11, "0 A", DENSE),
    ({"kfac_policy": "hybrid"}, 10, "0 A", LOW),
    ({"kfac_policy": "all", "kfac_auto_t_max": 9}, 10, "0 A", DENSE),
    ({"kfac_policy": "small_only"}, 3, "0 A", DENSE),
    ({"kfac_policy": "all", "kfac_use_woodbury": False}, 3, "0 A", DENSE),
]


@pytest.mark.parametrize("options, count, side, kind", TABLE)
@pytest.mark.parametrize("parts", [1, 3])
def test_the_representation_is_the_policy_s(
    options: dict[str, Any], count: int, side: str, kind: str, parts: int
) -> None:
    layer, side = side.split()
    model = seeded(lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 6)))
    x, y, found = normal(count, 10), classes(6, count), kfac(**options)
    with found.capture(model, num_terms=count, loss_reduction="sum") as cap:
        for i, (part, target) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
            if i:
                cap.next(num_terms=0)
            cross_entropy(model, part, target).backward()
    entry = found.record()["layers"][layer]["sides"][side]
    width = found.kfac_factors[layer].factors[side].dim
    assert (entry["representation"], entry["rank"]) == (kind, count if kind == LOW else width)
    assert entry["reason"]


# ---- sides that are too wide to be held whole ------------------------------------------------------------------------


def wide_model(m: int = 12, o: int = 14) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(m, o), nn.Tanh(), nn.Linear(o, 5)))


def captured_wide(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> gramian.KFACNaturalGradient:
    found = kfac(**options)
    with found.capture(model, num_terms=y.numel(), loss_reduction="sum"):
        cross_entropy(model, x, y).backward()
    return found


@pytest.mark.full
def test_a_wide_side_is_a_subset_of_tokens_and_right_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, model = normal(5, 2, 12), classes(5, 5, 2), wide_model()
    whole = captured_wide(model, x, y, kfac_policy="small_only").kfac_factors["0"]
    narrow(monkeypatch, 11)
    sums = {"A": [], "G": []}
    for seed in range(300):
        found = captured_wide(model, x, y, kfac_auto_t_max=4, seed=seed)
        for side, factor in found.kfac_factors["0"].factors.items():
            assert (factor.kind, factor.rank) == (LOW, 4)
            sums[side].append(factor.dense())
    about = found.record()["layers"]["0"]
    assert (about["T"], about["T_kept"]) == (10, 4)
    assert "subset of 4 of 10 tokens" in about["sides"]["G"]["reason"]
    for side, drawn in sums.items():
        stack = torch.stack(drawn)
        error = (stack.mean(0) - whole.factors[side].dense()).abs()
        assert bool((error <= 5 * stack.std(0) / 300**0.5 + 1e-12).all())
        assert not torch.equal(stack[0], stack[1])


def test_a_wide_side_with_few_tokens_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, model = normal(2, 2, 12), classes(5, 2, 2), wide_model()
    whole = captured_wide(model, x, y, kfac_policy="small_only")
    narrow(monkeypatch, 11)
    assert_same_factors(captured_wide(model, x, y, kfac_auto_t_max=4), whole)


@pytest.mark.parametrize("options", [{"kfac_use_woodbury": False}, {"kfac_policy": "small_only"}])
def test_a_wide_side_without_low_rank_is_its_diagonal(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    x, y, model = normal(5, 2, 12), classes(5, 5, 2), wide_model()
    whole = captured_wide(model, x, y, kfac_policy="small_only").kfac_factors["0"]
    narrow(monkeypatch, 11)
    block = captured_wide(model, x, y, **options).kfac_factors["0"]
    for side, factor in block.factors.items():
        assert factor.kind == "diagonal"
        assert_close(factor.dense(), torch.diag(whole.factors[side].dense().diagonal()))
        with refusal("to_dense: the side is"):
            factor.to_dense()


@pytest.mark.parametrize("policy, kind", [("all", LOW), ("small_only", "diagonal")])
def test_the_bias_counts_for_the_width_of_a_side(monkeypatch: pytest.MonkeyPatch, policy: str, kind: str) -> None:
    x, y, model = normal(40, 12), classes(5, 40), wide_model()
    narrow(monkeypatch, 12)
    block = captured_wide(model, x, y, kfac_policy=policy, kfac_auto_t_max=8).kfac_factors["0"]
    assert block.A is not None and (block.A.kind, block.A.dim) == (kind, 13)


@settings(max_examples=examples(10))
@given(cuts=st.lists(st.integers(0, 6), max_size=3), options=st.sampled_from(["wide", "max_tokens", "reduce"]))
def test_the_subset_does_not_depend_on_the_split(cuts: list[int], options: str) -> None:
    x, y, model = normal(6, 3, 12), classes(5, 6, 3), wide_model()
    chosen: dict[str, Any] = {"kfac_auto_t_max": 4} if options == "wide" else {"max_tokens": 4}
    if options == "reduce":
        chosen["weight_sharing"] = "reduce"
    weights = (classes(4, 6, 3) > 0).double()
    results = []
    with pytest.MonkeyPatch.context() as patch:
        if options == "wide":
            narrow(patch, 11)
        for bounds in ([0, 6], [0, *sorted(cuts), 6]):
            found = kfac(**chosen)
            with found.capture(model, num_terms=0, token_weights=weights[:0], loss_reduction="sum") as cap:
                for start, end in itertools.pairwise(bounds):
                    part = slice(start, end)
                    cap.next(token_weights=weights[part])
                    (F.cross_entropy(model(x[part]).flatten(0, 1), y[part].flatten(), reduction="none")
                     * weights[part].flatten()).sum().backward()  # fmt: skip
            results.append(found)
    assert_same_factors(results[1], results[0])
    assert results[0].record()["layers"]["0"]["T_kept"] == 4


# ---- one input, one factor -------------------------------------------------------------------------------------------


def checkpointed_net(inner: nn.Module) -> Toy:
    """The layers of `QKV` run again in the backward."""
    return Toy(lambda net, x: checkpoint(net.inner, x, use_reentrant=False), inner=inner)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_read_one_tensor_share_one_factor(count: int, passes: int, checkpointed: bool) -> None:
    model = seeded(QKV)
    prefix = "inner." if checkpointed else ""
    tapped = checkpointed_net(model) if checkpointed else model
    found = kfac(ema_decay=0.5)
    for refresh in range(2):
        with found.capture(tapped, loss_reduction="sum", num_terms=2 * count) as cap:
            for i in range(passes):
                if i:
                    cap.next(num_terms=2 * count)
                x, y = normal(count, 2, 9, seed=7 * refresh + i), classes(5, count, 2, seed=i)
                cross_entropy(tapped, x, y).backward()
        blocks = {name: found.kfac_factors[prefix + name] for name in ("q", "k", "v", "other", "out")}
        assert blocks["q"].A is blocks["k"].A is blocks["v"].A
        assert len({id(blocks[name].A) for name in ("q", "other", "out")}) == 3
        record = found.record()["layers"]
        assert {record[prefix + name]["shares_A_with"] for name in ("k", "v")} == {prefix + "q"}
        assert [record[prefix + name]["shares_A_with"] for name in ("q", "other", "out")] == ["", "", ""]
    assert not torch.allclose(blocks["q"].A.to_dense(), blocks["other"].A.to_dense())


@pytest.mark.parametrize("options", [{"max_tokens": 3}, {"weights": True}], ids=["subset", "weights"])
@pytest.mark.parametrize("count", [2, 8])
def test_a_shared_input_stays_shared_where_some_tokens_count(count: int, options: dict[str, Any]) -> None:
    model, weights = seeded(QKV), torch.ones(count, 2)
    weights[0, 0] = 0 if options.pop("weights", False) else 1
    found = kfac(**options)
    with found.capture(model, loss_reduction="sum", token_weights=weights):
        cross_entropy(model, normal(count, 2, 9), classes(5, count, 2)).backward()
    blocks = found.kfac_factors
    assert blocks["q"].A is blocks["k"].A is blocks["v"].A is not blocks["other"].A


def test_a_layer_with_a_bias_and_one_without_do_not_share() -> None:
    model = seeded(QKV)
    model.k.bias.requires_grad_(False)
    found = kfac()
    with found.capture(model, loss_reduction="sum", num_terms=4):
        cross_entropy(model, normal(2, 2, 9), classes(5, 2, 2)).backward()
    q, k, v = (found.kfac_factors[name].A for name in "qkv")
    assert q is v and q is not k
    assert_close(k.to_dense(), q.to_dense()[:-1, :-1])


def test_factors_keep_nothing_of_the_user_s_memory() -> None:
    """Inputs and gradients that are written to after their backward, as buffers that are used again are."""
    model = seeded(lambda: nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 25)))
    results = []
    for reuse in (False, True):
        found, x, v = kfac(), torch.zeros(3, 20).double(), torch.zeros(3, 25).double()
        with found.capture(model, loss_reduction="sum", num_terms=3) as cap:
            for i in range(3):
                if i:
                    cap.next(num_terms=3)
                x, v = (x, v) if reuse else (x.clone(), v.clone())
                x.copy_(normal(3, 20, seed=i))
                v.zero_()
                v[:, i] = 1
                model(x).backward(v)
        results.append(found)
        x.fill_(float("nan"))
        assert all(f.kind == LOW for f in (found.kfac_factors["0"].A, found.kfac_factors["2"].G))
    assert_same_factors(results[1], results[0])


# ---- other libraries, and the exact Gauss-Newton matrix --------------------------------------------------------------


def deep_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5, bias=False), nn.Linear(5, 3))


def by_output(model: nn.Module, x: Tensor, outputs: int, **options: Any) -> gramian.KFACNaturalGradient:
    """The Gauss-Newton matrix of Σ‖f − y‖²/N: one backward per output, √2 each, √C because N counts every pass."""
    found = kfac(**options)
    with found.capture(model, loss_reduction="sum", num_terms=len(x)) as cap:
        for c in range(outputs):
            if c:
                cap.next(num_terms=len(x))
            ((2 * outputs) ** 0.5 * model(x)[:, c]).sum().backward()
    return found


@pytest.mark.parametrize("samples", [2, 9])
def test_on_a_deep_linear_network_k_fac_is_the_gauss_newton_matrix(samples: int) -> None:
    model, x = seeded(deep_linear), normal(samples, 4)
    found = by_output(model, x, 3)
    for layer in ("0", "1", "2"):
        module = model.get_submodule(layer)
        shapes = {name: p.shape for name, p in module.named_parameters()}

        def outputs(flat: Tensor, layer: str = layer, module: nn.Module = module, shapes: Any = shapes) -> Tensor:
            """f(x) [B, C] as a function of [W | b], row by row."""
            matrix = flat.reshape(module.out_features, -1)
            parts = {"weight": matrix[:, : module.in_features], "bias": matrix[:, -1]}
            swapped = {f"{layer}.{name}": parts[name] for name in shapes}
            return torch.func.functional_call(model, swapped, (x,))

        columns = [module.weight.flatten(1)] + ([module.bias[:, None]] if "bias" in shapes else [])
        J_BCP = torch.func.jacrev(outputs)(torch.cat(columns, dim=1).detach().flatten())
        ggn = 2 * torch.einsum("bcp,bcq->pq", J_BCP, J_BCP) / samples
        block = found.kfac_factors[layer]
        assert_close(torch.kron(block.G.to_dense(), block.A.to_dense()), ggn, what=layer)
        v = {f"{layer}.{name}": normal(*shape) for name, shape in shapes.items()}
        flat = torch.cat([v[f"{layer}.weight"], *([v[f"{layer}.bias"][:, None]] if "bias" in shapes else [])], dim=1)
        product = (ggn @ flat.flatten()).reshape(flat.shape)
        got = found.compute_fisher_vector_product(v)
        assert_close(got[f"{layer}.weight"], product[:, : module.in_features], what=layer)


class Channels(nn.Module):
    """[B, T, V] as curvlinops wants it: [B, V, T]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return y.transpose(1, -1) if y.dim() > 2 else y


def peer_factors(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, **options: Any) -> dict[str, Tensor]:
    """curvlinops' Kronecker factors, bias as last input."""
    params = [p for p in model.parameters() if p.requires_grad]
    peer = curvlinops.KFACLinearOperator(
        Channels(model), loss, params, [(x, y)], separate_weight_and_bias=False, check_deterministic=False, **options
    )
    peer.compute_kronecker_factors()
    found = {f"{name.removeprefix('net.')} A": t for name, t in peer._input_covariances.items()}
    return found | {f"{name.removeprefix('net.')} G": t for name, t in peer._gradient_covariances.items()}


def test_on_squared_error_factors_are_those_of_curvlinops() -> None:
    model, x, y = seeded(deep_linear), normal(9, 4), normal(9, 3)
    theirs = peer_factors(model, nn.MSELoss(), x, y, fisher_type="type-2")
    # Its loss is the mean over outputs too: 1/C of ours.
    theirs = {name: t * 3 if name.endswith("G") else t for name, t in theirs.items()}
    assert_tensors(written(by_output(model, x, 3)), theirs)


@pytest.mark.parametrize("name", ["mlp_trained", "tokens", "conv2d"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_empirical_factors_are_those_of_curvlinops(name: str, sharing: str) -> None:
    build = {
        "mlp_trained": lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5, bias=False)),
        "tokens": lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)),
        "conv2d": PROBLEMS["conv2d"].build,
    }[name]
    x, y = {
        "mlp_trained": (normal(8, 7), classes(5, 8)),
        "tokens": (normal(4, 3, 7), classes(5, 4, 3)),
        "conv2d": (PROBLEMS["conv2d"].inputs, PROBLEMS["conv2d"].targets),
    }[name]
    model, found = seeded(build), kfac(weight_sharing=sharing)
    theirs = peer_factors(model, nn.CrossEntropyLoss(), x, y, fisher_type="empirical", kfac_approx=sharing)
    with found.capture(model, num_terms=y.numel()):
        cross_entropy(model, x, y, "mean").backward()
    assert_tensors(written(found), theirs)
