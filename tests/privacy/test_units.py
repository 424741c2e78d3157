"""Units of privacy of several rows, or of tokens of packed rows: against a loop over units, in float64."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from gramian.oracles.clipped_sum import clip
from gramian.privacy.clipping.clip_factors import SLACK
from tests.kit.matrix import FULL
from tests.kit.models import CASES
from tests.privacy import packed
from tests.privacy.problems import assert_sums, private
from tests.statistics.problems import Problem, problem

pytestmark = [pytest.mark.few_proofs, pytest.mark.oracle]
STORAGES = ("auto", "bookkeeping", "keep", "two_pass")
USERS = torch.tensor([7, 2, 7, 900, 2, 7])
few = settings(max_examples=20 if FULL else 5)
SHORT = [
    ("mlp", "bookkeeping", "gram"), ("mlp", "two_pass", "direct"), ("linear_3d", "keep", "auto"),
    ("tied_gpt", "auto", "gram"), ("conv2d", "auto", "auto"), ("reused", "two_pass", "gram"),
    ("padded_embedding", "bookkeeping", "auto"), ("mha", "auto", "auto"),
]  # fmt: skip
ALL = [(name, storage, algorithm) for name in CASES for storage in STORAGES for algorithm in ("auto", "gram", "direct")]


def of_users(p: Problem, users: Tensor = USERS) -> dict[str, Tensor]:
    """Gradient of each user: the sum over the rows of one id, in the order of the ids."""
    numbers = users.unique(return_inverse=True)[1]
    count = int(numbers.max()) + 1
    return {name: g.new_zeros(count, *g.shape[1:]).index_add_(0, numbers, g) for name, g in p.gradients.items()}


def limit_of(gradients: dict[str, Tensor]) -> float:
    """A clip norm that clips some units."""
    return float(torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt().median())


@pytest.mark.parametrize("name, storage, algorithm", ALL if FULL else SHORT)
def test_rows_of_one_user_are_clipped_as_one(name: str, storage: str, algorithm: str) -> None:
    p = problem(name, 6)
    gradients = of_users(p)
    limit = limit_of(gradients)
    slack = SLACK[torch.float32 if p.case.computes_in_float32 else p.dtype]
    want = clip(gradients, limit / (1 + slack))
    with private(p.model(), limit, clipping=storage, norm_algorithm=algorithm) as run:
        with run.engine.units(USERS):
            run.engine.backward(p.case.loss(run.model, *p.batch, reduction="mean"))
        assert_sums(run.gradients(), want.totals, p.tolerance)
        torch.testing.assert_close(run.engine.last.norms_B.double(), want.norms_B, rtol=1e-5, atol=0)
        assert "adjacency: add or remove one record" in str(run.engine.plan)  # no draw of users


@pytest.mark.parametrize("algorithm", ("gram", "direct"))
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", packed.KINDS)
def test_packed_documents_are_clipped_one_by_one(kind: str, storage: str, algorithm: str) -> None:
    limit = float(packed.norms(kind).median())
    want = packed.wanted(kind, limit)
    options: dict[str, Any] = {"clipping": storage, "norm_algorithm": algorithm, "loss_reduction": "sum"}
    with private(packed.model_of(kind), limit, **options) as run:
        for packing in ([[0, 1, 2], [3, 4], [5]], [[5, 4], [3, 0], [2, 1]]):
            assert_sums(packed.summed(run, packed.packed(packing)), want.totals, 1e-9)
            found, expected = run.engine.last.norms_B.double().sort().values, want.norms_B.sort().values
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("function", ("per_layer", "automatic"))
def test_every_clipping_function_takes_units(function: str) -> None:
    limit = float(packed.norms("gpt").median())
    want = clip(packed.of_documents("gpt"), limit / (1 + SLACK[torch.float64]), function)
    with private(packed.model_of("gpt"), limit, clip_function=function, loss_reduction="sum") as run:
        assert_sums(packed.summed(run, packed.packed(packed.first_fit(range(6)))), want.totals, 1e-9)


@few
@given(st.permutations(range(6)), st.sampled_from(STORAGES), st.sampled_from(packed.KINDS), st.floats(0.1, 2.0))
def test_any_packing_of_the_same_documents_gives_the_same_sum(
    order: Sequence[int], storage: str, kind: str, fraction: float
) -> None:
    limit = fraction * float(packed.norms(kind).median())
    with private(packed.model_of(kind), limit, clipping=storage, loss_reduction="sum") as run:
        found = packed.summed(run, packed.packed(packed.first_fit(order)))
    assert_sums(found, packed.wanted(kind, limit).totals, 1e-9)


@few
@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(1, 6), st.floats(0.05, 2.0))
def test_one_document_more_or_less_moves_the_sum_by_at_most_C_however_all_are_packed(
    order: Sequence[int], other: Sequence[int], count: int, fraction: float
) -> None:
    limit, added = fraction * float(packed.norms("gpt").median()), order[0]
    sums = []
    with private(packed.model_of("gpt"), limit, loss_reduction="sum") as run:
        for chosen in ([n for n in other if n in order[:count]], [n for n in order[:count] if n != added]):
            rows = packed.packed(packed.first_fit(chosen)) if chosen else None
            found = run.gradients() if rows is None else packed.summed(run, rows)
            sums.append(torch.cat([g.flatten() for g in found.values()]) * (rows is not None))
    assert float((sums[0] - sums[1]).norm()) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("how", [pytest.param("compiled", marks=pytest.mark.full), "checkpointed"])
def test_packed_documents_of_a_model_that_is(how: str) -> None:
    limit = float(packed.norms("tied gpt").median())
    model = packed.model_of("tied gpt")
    if how == "checkpointed":
        model.checkpoint_blocks = 1
    else:
        model.blocks[0].compile(backend="aot_eager")  # type: ignore[index, operator]
    with private(model, limit, loss_reduction="sum") as run:
        assert_sums(
            packed.summed(run, packed.packed([[0, 1, 2], [3, 4], [5]])), packed.wanted("tied gpt", limit).totals, 1e-9
        )


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_few_digits_a_document_stays_within_C(dtype: torch.dtype, storage: str) -> None:
    limit = 0.7 * float(packed.norms("gpt").min())
    with private(packed.model_of("gpt").to(dtype), limit, clipping=storage, loss_reduction="sum") as run:
        for number in range(6):
            found = packed.summed(run, packed.packed([[number]]))
            assert float(torch.cat([g.double().flatten() for g in found.values()]).norm()) <= limit


def test_a_document_over_several_rows_is_one_unit() -> None:
    rows = packed.packed([[0, 1], [2, 3]])
    rows.ids[rows.ids == 13] = 10  # documents 0 and 3 are one user's
    gradients = {name: torch.stack([g[0] + g[3], g[1], g[2]]) for name, g in packed.of_documents("gpt").items()}
    limit = limit_of(gradients)
    with private(packed.model_of("gpt"), limit, loss_reduction="sum") as run:
        assert_sums(packed.summed(run, rows), clip(gradients, limit / (1 + SLACK[torch.float64])).totals, 1e-9)


def test_a_batch_of_one_unit_and_a_batch_of_none() -> None:
    limit = 0.5 * float(packed.norms("gpt").min())
    with private(packed.model_of("gpt"), limit, loss_reduction="sum") as run:
        assert_sums(packed.summed(run, packed.packed([[5]])), packed.wanted("gpt", limit, [5]).totals, 1e-9)
        run.optimizer.zero_grad()
        none = packed.packed([])
        with run.engine.units(none.ids):
            loss_of_none = packed.loss_of(run.model, none)
            loss_of_none.backward()
        assert all(not bool(g.any()) for g in run.gradients().values())


def test_a_unit_that_is_not_finite_is_left_out() -> None:
    p, limit = problem("mlp", 6), 1.0
    x, *rest = p.batch
    x = x.clone()
    x[1] = float("inf")  # of user 2, like row 4
    users = {name: g[[1, 2]] for name, g in of_users(p).items()}
    with private(p.model(), limit, proof="off") as run:
        with run.engine.units(USERS):
            p.case.loss(run.model, x, *rest, reduction="mean").backward()
        assert run.engine.nonfinite == 1
        assert_sums(run.gradients(), clip(users, limit / (1 + SLACK[torch.float64])).totals, 1e-9)


class Positions(nn.Module):
    """Token embeddings and learned positions, which have no batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(9, 6), nn.Embedding(4, 6), nn.Linear(6, 3)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1]))))


@pytest.mark.parametrize("by_token", [False, True])
def test_layers_without_a_batch_axis_take_ids_as_they_take_single_rows(by_token: bool) -> None:
    torch.manual_seed(0)
    model, x, ids = Positions().double(), torch.randint(9, (6, 4)), torch.tensor([4, 1, 4, 2, 1, 4])
    want: dict[str, Tensor] = {n: torch.zeros_like(q) for n, q in model.named_parameters()}
    for unit in ids.unique():
        found = torch.autograd.grad(model(x[ids == unit]).square().sum(), [*model.parameters()])
        norm = torch.cat([g.flatten() for g in found]).norm()
        for total, g in zip(want.values(), found, strict=True):
            total += float((1 / (1 + SLACK[torch.float64]) / norm).clamp(max=1.0)) * g
    with private(model, 1.0, loss_reduction="sum") as run:
        with run.engine.units(ids[:, None].expand(6, 4) if by_token else ids):
            run.model(x).square().sum().backward()
        assert_sums(run.gradients(), want, 1e-9)
