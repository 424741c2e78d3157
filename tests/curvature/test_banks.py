"""Factors of fused experts, whatever kernel their layer runs, against sums of outer products expert by expert.

Legend: R rows (token, expert), E experts, D width, H hidden.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (its operators)
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.curvature.estimate import token_moments
from gramian.curvature.estimate.token_moments import StoragePolicy, TokenMoment, add_groups
from gramian.oracles import dense_kfac
from gramian.oracles.dense_kfac import ReferenceTokens
from tests.curvature.problems import assert_close, classes, kfac, normal, seeded
from tests.kit.matrix import sample

pytestmark = pytest.mark.oracle
D, H, E, B, T, V, TOP = 12, 13, 4, 3, 5, 5, 2
Run = Callable[["Experts", Tensor, Tensor], Tensor]


def one_by_one(own: "Experts", rows: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    for e in chosen.unique().tolist():
        here = (chosen == e).nonzero()[:, 0]
        out = out.index_add(0, here, F.linear(torch.tanh(F.linear(rows[here], own.up[e])), own.down[e]))
    return out


def gathered(own: "Experts", rows: Tensor, chosen: Tensor) -> Tensor:
    h = torch.tanh(torch.bmm(own.up[chosen], rows.unsqueeze(-1)).squeeze(-1))
    return torch.bmm(own.down[chosen], h.unsqueeze(-1)).squeeze(-1)


def grouped(own: "Experts", rows: Tensor, chosen: Tensor) -> Tensor:
    sorted_R, order = chosen.sort(stable=True)
    ends = torch.histc(sorted_R.float(), bins=E, min=0, max=E - 1).cumsum(0).int()
    grouped_mm = torch.ops.transformers.grouped_mm_fallback
    out = grouped_mm(torch.tanh(grouped_mm(rows[order], own.up.mT, offs=ends)), own.down.mT, offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return out[back]


class Experts(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.up, self.down, self.run = nn.Parameter(torch.zeros(E, H, D)), nn.Parameter(torch.zeros(E, D, H)), run

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.run(self, x.repeat_interleave(TOP, 0), index.reshape(-1)).view(-1, TOP, D).sum(1)


class Net(nn.Module):
    """Each token goes to two of the first E − 1 experts by its number; the last has none."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.first, self.experts, self.head = nn.Linear(7, D), Experts(run), nn.Linear(D, V)

    def chosen(self, x: Tensor) -> Tensor:
        return torch.stack(
            [torch.arange(x.shape[0] * x.shape[1]) * 7 % 3, torch.arange(x.shape[0] * x.shape[1]) % 2], 1
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.first(x)).flatten(0, 1)
        return self.head(self.experts(rows, self.chosen(x)).view(*x.shape[:2], D))


def weighted_loss(model: Net, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    return each.sum() if weights is None else (each * weights.flatten()).sum()


def reference(
    model: Net, batches: list[tuple[Tensor, Tensor]], weights: Tensor | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """{expert's matrix: A and G} from rows that are formed by hand."""
    rows: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for x, y in batches:
        w = torch.ones(B, T).double() if weights is None else weights
        inner = torch.tanh(model.first(x)).flatten(0, 1).detach().repeat_interleave(TOP, 0)
        chosen, w_R = model.chosen(x).reshape(-1), w.flatten().repeat_interleave(TOP)
        up, down = model.experts.up.detach(), model.experts.down.detach()
        hidden = torch.tanh(torch.einsum("rd,rhd->rh", inner, up[chosen]))
        out = torch.einsum("rh,rdh->rd", hidden, down[chosen]).requires_grad_()
        logits = model.head(out.view(-1, TOP, D).sum(1))
        each = F.cross_entropy(logits, y.flatten(), reduction="none") * w.flatten()
        (g,) = torch.autograd.grad(each.sum(), out)
        inside = torch.einsum("rd,rdh->rh", g, down[chosen]) * (1 - hidden**2)
        for e in range(E - 1):
            here = chosen == e
            rows.setdefault(f"up[{e}]", []).append((inner[here], inside[here], w_R[here]))
            rows.setdefault(f"down[{e}]", []).append((hidden[here], g[here], w_R[here]))
    terms = len(batches) * float(B * T if weights is None else weights.sum())
    found = {}
    for name, parts in rows.items():
        a, g, w = (torch.cat(t) for t in zip(*parts, strict=True))
        found[name] = dense_kfac.factors(ReferenceTokens(a, g), terms, 1.0, False, w)
    return found


def named(value: object) -> str:
    return getattr(value, "__name__", str(value))


WEIGHTS = {"all": None, "fractional": torch.arange(B * T).view(B, T).double() % 4 / 2}
CASES = [
    (run, policy, weights, passes)
    for run in (one_by_one, gathered, grouped)
    for policy in ("all", "small_only")
    for weights in WEIGHTS
    for passes in (1, 3)
]


@pytest.mark.parametrize("run, policy, weights, passes", sample(CASES, 8, case=lambda c: c[:2]), ids=named)
def test_factors_are_those_of_each_expert_s_rows(run: Run, policy: str, weights: str, passes: int) -> None:
    """Of several passes the first rows are stored, and summed when there are more than the width."""
    model, found, w = seeded(lambda: Net(run)), kfac(kfac_policy=policy), WEIGHTS[weights]
    batches = [(normal(B, T, 7, seed=i), classes(V, B, T, seed=i + 9)) for i in range(passes)]
    terms = B * T if w is None else float(w.sum())
    with found.capture(model, loss_reduction="sum", num_terms=terms, token_weights=w) as cap:
        for i, (x, y) in enumerate(batches):
            if i:
                cap.next(num_terms=terms, token_weights=w)
            weighted_loss(model, x, y, w).backward()
    want = reference(model, batches, w)
    blocks = {name: block for name, block in found.kfac_factors.items() if name.startswith("experts.")}
    assert blocks.keys() == {f"experts.{name}" for name in want}
    for name, (A, G) in want.items():
        assert_close(blocks[f"experts.{name}"].A.to_dense(), A, 1e-9, f"{name} A")
        assert_close(blocks[f"experts.{name}"].G.to_dense(), G, 1e-9, f"{name} G")


@pytest.mark.parametrize("options", [{"max_tokens": 100}, {"weight_sharing": "reduce"}], ids=str)
def test_other_ways_to_count_tokens_take_each_expert_by_itself(options: dict[str, Any]) -> None:
    """A subset of more tokens than there are changes nothing; a sample's tokens of one expert are joined."""
    model, found, x, y = seeded(lambda: Net(grouped)), kfac(**options), normal(B, T, 7), classes(V, B, T)
    with found.capture(model, loss_reduction="sum", num_terms=B * T):
        weighted_loss(model, x, y, None).backward()
    want = reference(model, [(x, y)], None)
    if "max_tokens" in options:
        for name, (A, G) in want.items():
            assert_close(found.kfac_factors[f"experts.{name}"].A.to_dense(), A, 1e-9, name)
            assert_close(found.kfac_factors[f"experts.{name}"].G.to_dense(), G, 1e-9, name)
    else:
        assert found.record()["layers"]["experts.up[0]"]["T"] == B


def routed(own: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    """Token i goes to expert i mod 3."""
    rows, to, out = h.flatten(0, 1), (x % 3).flatten(), torch.zeros_like(h).flatten(0, 1)
    for e in range(3):
        here = (to == e).nonzero()[:, 0]
        if len(here):
            out = out.index_add(0, here, torch.tanh(rows[here] @ own.up[e]) @ own.down[e])
    return out.view_as(h)


class Alone(nn.Module):
    """Experts in a module of their own, whose products are recorded as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(3, D, H)), nn.Parameter(torch.zeros(3, H, D))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return routed(self, h, x)


class Beside(Alone):
    """Experts beside a child, so that the layer runs again sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(D, D)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.last(super().forward(h, x))


class Routed(nn.Module):
    """Experts under an embedding; with `own` None their parameters are the model's."""

    def __init__(self, own: type[Alone] | None) -> None:
        super().__init__()
        self.first, self.head = nn.Embedding(7, D), nn.Linear(D, V)
        self.experts = own() if own else None
        if own is None:
            self.up, self.down = nn.Parameter(torch.zeros(3, D, H)), nn.Parameter(torch.zeros(3, H, D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h + (routed(self, h, x) if self.experts is None else self.experts(h, x)))


ROUTED = [(n, own, by) for n in (1, 4) for own in (None, Alone, Beside) for by in ("weights", "backward")]


@pytest.mark.parametrize("case", ROUTED, ids=lambda case: "-".join(map(named, case)))
def test_padding_that_is_routed_is_not_counted(case: tuple[int, type[Alone] | None, str]) -> None:
    """A of an expert is that of its tokens with a loss term, whether weights say which have one or the backward shows it."""
    samples, own, by = case
    x = torch.tensor([[0, 3, 6, 1], [2, 1, 3, 5], [4, 0, 2, 6], [5, 3, 1, 0]])[:samples]
    y = classes(V, samples, 4)
    y[0, 3:] = y[1:2, 2:] = y[3:, 1:] = -100
    model, found, w = seeded(lambda: Routed(own)), kfac(strict=samples > 1), (y != -100).double()
    with found.capture(model, num_terms=int(w.sum()), token_weights=w if by == "weights" else None):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert not found.record()["padding_counted"]
    for e in range(3):
        name = f"up[{e}]" if own is None else f"experts.up[{e}]"
        tokens = model.first.weight.detach()[x[(y != -100) & (x % 3 == e)]]
        if len(tokens):
            assert_close(found.kfac_factors[name].A.to_dense(), tokens.mT @ tokens / len(tokens), 1e-10, name)


@pytest.mark.parametrize("shape", [(1, 6), (2, 6), (2, 3)], ids=str)
@pytest.mark.parametrize("by", ["weights", "backward"])
def test_experts_that_see_equally_many_tokens_do_not_see_them_in_order(shape: tuple[int, int], by: str) -> None:
    """One token or two of each sample for every expert: neither samples nor experts differ."""
    x = torch.arange(6).repeat(2).view(-1)[: shape[0] * shape[1]].view(shape)
    y = classes(V, *shape)
    y[0, -1] = y[-1, 0] = -100
    model, found, w = seeded(lambda: Routed(None)), kfac(), (y != -100).double()
    with found.capture(model, num_terms=int(w.sum()), token_weights=w if by == "weights" else None):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert not found.record()["padding_counted"]
    for e in range(3):
        tokens = model.first.weight.detach()[x[(y != -100) & (x % 3 == e)]]
        if len(tokens):
            assert_close(found.kfac_factors[f"up[{e}]"].A.to_dense(), tokens.mT @ tokens / len(tokens), 1e-10, f"{e}")


class Memory(nn.Module):
    """Experts over the first three tokens, of which token j goes to the head's token 5 − j, times a gate that may be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.head = nn.Embedding(7, D), Alone(), nn.Linear(D, V)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        h = self.first(x)
        memory = self.experts(h[:, :3], x[:, :3]) * gate[..., None]
        return self.head(h + torch.cat([torch.zeros_like(memory), memory.flip(1)], 1))


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_a_bank_over_fewer_tokens_than_the_head_has_no_mask_of_the_head_s(max_tokens: int | None) -> None:
    """Its second token has no gradient, and the head's second token no loss term: that is another token."""
    x, gate = torch.tensor([[0, 3, 1, 2, 4, 5], [6, 3, 2, 1, 4, 5]]), torch.ones(2, 3).double()
    y = classes(V, 2, 6)
    y[0, 1] = -100
    gate[0, 1] = 0
    model, found = seeded(Memory), kfac(max_tokens=max_tokens)
    with found.capture(model, num_terms=11):
        F.cross_entropy(model(x, gate).flatten(0, 1), y.flatten()).backward()
    tokens = model.first.weight.detach()[x[:, :3][x[:, :3] % 3 == 0]]
    want = tokens.mT @ tokens / len(tokens)
    assert_close(found.kfac_factors["experts.up[0]"].A.to_dense(), want, 1e-10)


def test_all_experts_of_a_product_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    plain = token_moments.ragged_products
    monkeypatch.setattr(token_moments, "ragged_products", lambda *a: calls.append(len(a[3]) - 1) or plain(*a))
    model, found = seeded(lambda: Net(grouped)), kfac(kfac_use_woodbury=False)
    with found.capture(model, loss_reduction="sum", num_terms=B * T):
        weighted_loss(model, normal(B, T, 7), classes(V, B, T), None).backward()
    assert calls == [E - 1] * 4  # A and G of two banks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_groups_are_added_as_one_by_one(dtype: torch.dtype, weighted: bool) -> None:
    """Some rows are stored, some summed, and some cross over; none is the user's memory."""
    rows, order = normal(40, 6).to(dtype), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    spans, scale = [(0, 3), (3, 20), (20, 24), (24, 40)], 0.5
    weights = torch.linspace(0.5, 2, 40).double() if weighted else None
    moments = [TokenMoment(6, StoragePolicy(rows_up_to=5, diagonal=i == 3)) for i in range(4)]
    for _ in range(2):
        add_groups(moments, rows, order, spans, weights, scale)
    for moment, (begin, end) in zip(moments, spans, strict=True):
        x, w = rows[order[begin:end]].double(), torch.ones(end - begin) if weights is None else weights[begin:end]
        want = 2 * scale**2 * (x.mT * w) @ x
        assert moment.seen == 2 * (end - begin) and float(moment.weight) == pytest.approx(2 * float(w.sum()))
        if moment.keep.diagonal:
            assert_close(moment.product_diagonal(False, False).double(), want.diagonal(), 1e-5)
        else:
            assert_close(moment.product(False, False).double(), want, 1e-5)


def test_of_all_kernels_factors_are_the_same() -> None:
    """And gradients by them."""
    found: list[gramian.KFACNaturalGradient] = []
    for run in (one_by_one, gathered, grouped):
        model = seeded(lambda run=run: Net(run))
        found.append(kfac(ekfac=True, damping_mode="joint"))
        with found[-1].capture(model, loss_reduction="sum", num_terms=B * T):
            weighted_loss(model, normal(B, T, 7), classes(V, B, T), None).backward()
    v = {name: normal(*p.shape, seed=5) for name, p in model.named_parameters()}
    first, *others = [one.compute_fisher_vector_product(v) for one in found]
    for other in others:
        for name, t in first.items():
            assert_close(other[name], t, 1e-9, name)
