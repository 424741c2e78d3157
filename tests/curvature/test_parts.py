"""What is done with factors of parameters that are several matrices: steps, products, state, and matrices that are none.

The reference is the same network with a module for each matrix, or dense algebra.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.oracles import dense_kfac, single_sample
from tests.curvature.problems import IGNORE, assert_close, assert_tensors, classes, gradients, kfac, normal, seeded
from tests.kit.refusals import refusal

pytestmark = pytest.mark.oracle
WIDE, HIDDEN, EXPERTS = 12, 13, 3
SHAPES = {"up": (EXPERTS, HIDDEN, WIDE), "down": (EXPERTS, HIDDEN, WIDE)}


class Bank(nn.Module):
    """Experts in two banks, the second stored as [in, out]; a token goes to one of them, or in `dense` form to all."""

    def __init__(self, routed: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDE))
        self.down = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDE))
        self.routed = routed

    def forward(self, x: Tensor) -> Tensor:
        if not self.routed:
            return torch.einsum("beth,ehw->btw", torch.tanh(torch.einsum("btw,ehw->beth", x, self.up)), self.down)
        rows, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        chosen = (rows[:, 0] > 0).long() + (rows[:, 1] > 0.3)
        for e in chosen.unique().tolist():
            here = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, here, torch.tanh(F.linear(rows[here], self.up[e])) @ self.down[e])
        return out.view_as(x)


class Apart(nn.Module):
    """The same experts as linear layers, of a `Bank`'s weights."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.up, self.down = (
            nn.ModuleList(nn.Linear(*size, bias=False) for _ in range(EXPERTS))
            for size in ((WIDE, HIDDEN), (HIDDEN, WIDE))
        )
        self.routed = bank.routed
        for e in range(EXPERTS):
            self.up[e].weight = nn.Parameter(bank.up[e].detach().clone())
            self.down[e].weight = nn.Parameter(bank.down[e].detach().mT.clone())

    def forward(self, x: Tensor) -> Tensor:
        each = [down(torch.tanh(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        if not self.routed:
            return sum(each)
        chosen = (x[..., :1] > 0).long() + (x[..., 1:2] > 0.3)
        return sum((chosen == e) * y for e, y in enumerate(each))


class Net(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.experts, self.head = nn.Linear(7, WIDE), experts, nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(torch.tanh(self.first(x))))


def pair(routed: bool = False) -> tuple[Net, Net]:
    """A network with banks, and the same with a module for each expert."""
    one = seeded(lambda: Net(Bank(routed)))
    other = seeded(lambda: Net(Apart(one.experts)))
    other.first.load_state_dict(one.first.state_dict())
    other.head.load_state_dict(one.head.state_dict())
    other.experts = Apart(one.experts)
    return one, other


X, Y = normal(4, 6, 7), classes(5, 4, 6)


def backward(model: nn.Module, found: Any, x: Tensor = X, y: Tensor = Y, **arguments: Any) -> None:
    """A forward and a backward of the summed loss inside a capture."""
    model.zero_grad()
    given = {"loss_reduction": "sum", "num_terms": int((y != IGNORE).sum()), **arguments}
    context = found.capture(**given) if isinstance(found, gramian.optim.KFAC) else found.capture(model, **given)
    with context:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum").backward()


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """{name in the network of modules: tensor} from those of a network with banks."""
    found = {name: t for name, t in tensors.items() if not name.startswith("experts.")}
    for e in range(EXPERTS):
        found |= {
            f"experts.up.{e}.weight": tensors["experts.up"][e],
            f"experts.down.{e}.weight": tensors["experts.down"][e].mT,
        }
    return found


@pytest.mark.parametrize(
    "options", [{}, {"damping_mode": "joint"}, {"damping_mode": "joint", "ekfac": True}], ids=["pi", "joint", "ekfac"]
)
def test_natural_gradients_and_products_are_those_of_a_module_for_each_matrix(options: dict[str, Any]) -> None:
    one, other = pair()
    mine, theirs = (kfac(damping=0.05, kfac_policy="small_only", **options) for _ in range(2))
    backward(one, mine)
    backward(other, theirs)
    assert mine.state.observed == {"experts.down": "in_out", "experts.up": "out_in"}
    assert_tensors(by_expert(mine.compute_natural_gradient(one)), theirs.compute_natural_gradient(other), 1e-8)
    powered = mine.compute_natural_gradient(one, power=-0.5)
    assert_tensors(by_expert(powered), theirs.compute_natural_gradient(other, power=-0.5), 1e-8)
    v = {name: normal(*p.shape, seed=3) for name, p in one.named_parameters()}
    for damped in (False, True):
        product = mine.compute_fisher_vector_product(v, damped=damped)
        assert product["experts.up"].shape == SHAPES["up"]
        assert_tensors(by_expert(product), theirs.compute_fisher_vector_product(by_expert(v), damped=damped), 1e-8)
    assert mine.compute_capacity_metrics()["model"]["trace"] == pytest.approx(
        theirs.compute_capacity_metrics()["model"]["trace"]
    )
    assert mine.compute_capacity_metrics()["model"]["coverage"]["kronecker"] == 1.0


def test_routed_experts_have_factors_of_the_tokens_that_they_see() -> None:
    one, other = pair(routed=True)
    mine = kfac()
    backward(one, mine)
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
    rows = torch.tanh(one.first(X)).detach().flatten(0, 1)
    chosen = (rows[:, 0] > 0).long() + (rows[:, 1] > 0.3)
    out = other.experts(rows[None])
    assert_close(out[0], one.experts(rows[None])[0])
    y = one.experts(rows[None]).detach().requires_grad_()
    F.cross_entropy(one.head(y)[0], Y.flatten(), reduction="sum").backward()
    for e in range(EXPERTS):
        a, g = rows[chosen == e], y.grad[0][chosen == e]
        h = torch.tanh(a @ one.experts.up[e].detach().mT)
        inner = (g @ one.experts.down[e].detach().mT) * (1 - h**2)
        for name, (left, right) in {f"up[{e}]": (a, inner), f"down[{e}]": (h, g)}.items():
            A, G = dense_kfac.factors(dense_kfac.ReferenceTokens(left, right), Y.numel(), 1.0, bias=False)
            block = mine.kfac_factors[f"experts.{name}"]
            assert_close(block.A.to_dense(), A, 1e-9, name)
            assert_close(block.G.to_dense(), G, 1e-9, name)
    assert not calls


def test_an_expert_without_tokens_keeps_its_gradient_and_has_a_fisher_of_zero() -> None:
    one, _ = pair(routed=True)
    with torch.no_grad():
        one.first.bias[0] = -9.0  # no token goes to the last expert
    mine = kfac(damping=0.05)
    backward(one, mine)
    assert "experts.up[2]" not in mine.kfac_factors
    assert mine.coverage["experts.up"].algorithm == "K-FAC experts.up[0] and 2 more, 1 without data"
    one.experts.up.grad[2] = normal(HIDDEN, WIDE)
    natural = mine.compute_natural_gradient(one)["experts.up"]
    assert torch.equal(natural[2], one.experts.up.grad[2]) and not torch.equal(natural[0], one.experts.up.grad[0])
    v = {"experts.up": normal(*SHAPES["up"])}
    assert not mine.compute_fisher_vector_product(v)["experts.up"][2].any()
    assert_close(mine.compute_fisher_vector_product(v, damped=True)["experts.up"][2], 0.05 * v["experts.up"][2])


@pytest.mark.parametrize("routed", [False, True])
def test_an_optimizer_steps_as_with_a_module_for_each_matrix(routed: bool) -> None:
    one, other = pair(routed)
    mine, theirs = (gramian.optim.KFAC(model, lr=0.01) for model in (one, other))
    for seed in (4, 5):
        x = normal(4, 6, 7, seed=seed)
        for model, optimizer in ((one, mine), (other, theirs)):
            if routed and model is other:
                continue
            backward(model, optimizer, x)
            optimizer.step()
    if routed:
        assert all(bool(torch.isfinite(p).all()) for p in one.parameters())
        return
    assert_tensors(
        by_expert({n: p.detach() for n, p in one.named_parameters()}),
        {n: p.detach() for n, p in other.named_parameters()},
        1e-7,
    )


def test_a_preconditioned_optimizer_steps_along_natural_gradients_of_parts() -> None:
    one, other = pair()
    for model in (one, other):
        found = kfac(damping=0.05)
        optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, found, kl_clip=0.01)
        backward(model, found)
        optimizer.step()
    assert_tensors(
        by_expert({n: p.detach() for n, p in one.named_parameters()}),
        {n: p.detach() for n, p in other.named_parameters()},
        1e-8,
    )


def test_a_saved_state_knows_which_matrices_were_seen(tmp_path: Path) -> None:
    one, _ = pair()
    found, again = kfac(), kfac()
    backward(one, found)
    found.save(str(tmp_path / "kfac.safetensors"))
    again.load(str(tmp_path / "kfac.safetensors"), one)
    assert again.state.observed == {"experts.up": "out_in", "experts.down": "in_out"}
    assert_tensors(again.compute_natural_gradient(one), found.compute_natural_gradient(one), 1e-12)
    before = gradients(one)
    backward(one, again)
    assert_tensors(gradients(one), before, 1e-12)


# ---- padding ---------------------------------------------------------------------------------------------------------


def test_padding_does_not_count_in_attention() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(14, 2, batch_first=True), nn.Linear(14, 5)

        def forward(self, x: Tensor) -> Tensor:
            pad = torch.arange(x.shape[1]) >= torch.tensor([6, 3, 4])[:, None]
            return self.head(self.attention(x, x, x, key_padding_mask=pad, need_weights=False)[0])

    model, found = seeded(Model), kfac()
    x, y = normal(3, 6, 14), classes(5, 3, 6)
    real = torch.arange(6) < torch.tensor([6, 3, 4])[:, None]
    y = y.masked_fill(~real, IGNORE)
    for weights in (None, real.double()):
        backward(model, found, x, y, token_weights=weights)
        rows = torch.cat([x[real], x.new_ones(int(real.sum()), 1)], 1)
        for part in ("0:14", "14:28", "28:42"):
            assert_close(
                found.kfac_factors[f"attention.in_proj_weight[{part}]"].A.to_dense(), rows.mT @ rows / len(rows), 1e-9
            )


# ---- matrices that are none --------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters with the shape of a matrix that are used otherwise, or both ways, or in part."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("table", "both", "part", "squared", "plain"):
            self.register_parameter(name, nn.Parameter(torch.zeros(12, 12)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[:6]
        x = torch.tanh(F.linear(F.linear(x, self.both), self.both.mT))
        x = torch.tanh(x @ self.part) + x * self.part[0]
        return F.linear(x @ (self.squared**2), self.plain)


def test_matrices_that_are_none_have_their_exact_rows_and_say_why() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.head = Odd(), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.odd(x))

    model, found = seeded(Model), kfac(strict=True)
    x, y = normal(4, 6, 12), classes(5, 4, 6)
    for _ in range(2):
        backward(model, found, x, y)
        assert found.coverage["odd.plain"].algorithm == "K-FAC odd.plain"

        def loss(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
            return F.cross_entropy(m(a).flatten(0, 1), b.flatten(), reduction="sum")

        loop = single_sample.per_sample_gradients(model, loss, (x, y))
        for name, why in (
            ("table", "does not multiply by it"), ("both", "by its transpose"), ("part", "do not sum to its gradient"),
            ("squared", "does not multiply by it"),
        ):  # fmt: skip
            block = found.kfac_factors[f"odd.{name}"]
            want = torch.einsum("brw,brv->rwv", loop[f"odd.{name}"], loop[f"odd.{name}"]) / 24
            assert_close(block.G.to_dense(), torch.block_diag(*want), 1e-9, name)
            assert why in found.coverage[f"odd.{name}"].algorithm
    natural = found.compute_natural_gradient(model)
    assert all(bool((natural[n] != p.grad).any()) for n, p in model.named_parameters())


def test_a_matrix_that_is_used_otherwise_later_is_an_error() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.head, self.turned = nn.Parameter(torch.zeros(12, 12)), nn.Linear(12, 5), False

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x @ self.w if self.turned else F.linear(x, self.w))

    model, found = seeded(Model), kfac()
    backward(model, found, normal(4, 6, 12))
    model.turned = True
    with refusal("w: in_out; expected its layer to use it as at the first refresh"):
        backward(model, found, normal(4, 6, 12))
    assert found.coverage["w"].algorithm == "K-FAC w"


# ---- exact blocks of rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [-1.0, -0.5, 1.0])
def test_exact_blocks_of_rows_are_applied_row_by_row(p: float) -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Conv1d(24, 24, 9, groups=24, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(72, 5))
    )
    found, x, y = kfac(damping=0.03, ema_decay=0.5, max_condition_number=50.0), normal(6, 24, 11), classes(5, 6)
    for inputs in (x, x.flip(0)):
        model.zero_grad()
        with found.capture(model, loss_reduction="sum", num_terms=6):
            F.cross_entropy(model(inputs), y, reduction="sum").backward()
    block = found.kfac_factors["0.weight"]
    assert found.coverage["0.weight"].algorithm.startswith("exact blocks of rows")
    M = block.G.to_dense()
    want = dense_kfac.matrix_power(M, p, 0.03, 50.0) @ model[0].weight.grad.reshape(-1)
    assert_close(found.compute_natural_gradient(model, power=p)["0.weight"].reshape(-1), want, 1e-9)
    v = normal(24, 1, 9, seed=2)
    assert_close(found.compute_fisher_vector_product({"0.weight": v})["0.weight"].reshape(-1), M @ v.reshape(-1), 1e-9)
    assert_close(block.G.eigenvalues(), torch.linalg.eigvalsh(M).clamp(min=0), 1e-9)
    assert float(block.G.logdet(0.03)) == pytest.approx(
        float(torch.logdet(M + 0.03 * torch.eye(len(M)).double())), rel=1e-9
    )
    again = kfac(damping=0.03)
    again.load_state_dict(found.state_dict())
    assert_close(again.kfac_factors["0.weight"].G.to_dense(), M, 1e-12)
    assert float(gramian.curvature.parameter_importance(found)["0.weight"].sum()) == pytest.approx(float(M.trace()))
