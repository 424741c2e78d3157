"""What privacy rests on: no sample contributes more than C to what is summed, in the dtype it is summed in.

The sum of a batch is `p.grad` after the backward; a sample's contribution is the difference of two of them. In float32 and
bfloat16 the two sums round differently, by at most what `ROUNDING` allows for.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from tests.kit.matrix import FULL
from tests.privacy.problems import clip_norm, gradients, private
from tests.statistics.problems import problem

pytestmark = pytest.mark.few_proofs(short=True)

STORAGES = ("auto", "bookkeeping", "keep", "two_pass")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7}
"""Of the difference of two sums, relative to their size: some units in the last place of each."""
NAMES = ("mlp", "linear_3d", "tied_gpt", "conv2d", "reused", "padded_embedding", "broadcast", "vit")
few = settings(max_examples=20 if FULL else 6)


def _vector(found: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.double().flatten() for g in found.values()])


def _summed(name: str, dtype: torch.dtype, index: Sequence[int], limit: float, **options: Any) -> Tensor:
    """What a backward over some samples adds to the gradients, as one vector."""
    p = problem(name, 6, dtype)
    model = p.model()
    with private(model, limit, loss_reduction="sum", **options) as run:
        if index:
            run.engine.backward(p.case.loss(model, *p.rows(list(index)), reduction="sum"))
        return _vector(run.gradients())


cells = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from(DTYPES),
    st.sampled_from(STORAGES),
    st.sampled_from(("auto", "gram", "direct")),
    st.floats(1e-3, 2.0),
)


@few
@given(cells, st.integers(0, 5))
def test_one_sample_alone_contributes_at_most_C(cell: tuple[Any, ...], i: int) -> None:
    """No allowance at all: the norm of what is summed, in its own dtype, is within C."""
    name, dtype, storage, algorithm, fraction = cell
    limit = fraction * clip_norm(problem(name, 6, dtype))
    alone = _summed(name, dtype, [i], limit, clipping=storage, norm_algorithm=algorithm)
    assert float(alone.norm()) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_gradient_of_one_sample_is_within_C(name: str, dtype: torch.dtype) -> None:
    limit = 0.3 * float(problem(name, 6, dtype).norms().min())
    for i in range(6):
        assert float(_summed(name, dtype, [i], limit, max_physical_batch=1).norm()) <= limit


@few
@given(cells, st.sets(st.integers(0, 5), min_size=1), st.data())
def test_removing_one_sample_changes_the_sum_by_at_most_C(cell: tuple[Any, ...], chosen: set[int], data: Any) -> None:
    name, dtype, storage, algorithm, fraction = cell
    limit = fraction * clip_norm(problem(name, 6, dtype))
    removed = data.draw(st.sampled_from(sorted(chosen)))
    options = {"clipping": storage, "norm_algorithm": algorithm}
    whole = _summed(name, dtype, sorted(chosen), limit, **options)
    rest = _summed(name, dtype, sorted(chosen - {removed}), limit, **options)
    allowed = limit + ROUNDING[dtype] * float(whole.norm() + rest.norm())
    if dtype == torch.bfloat16 or dtype == torch.float32:  # other shapes, other rounding of every sample's own gradient
        allowed += ROUNDING[dtype] * limit * len(chosen)
    assert float((whole - rest).norm()) <= allowed


@few
@given(cells, st.permutations(range(6)))
def test_the_order_of_samples_does_not_matter(cell: tuple[Any, ...], order: list[int]) -> None:
    name, dtype, storage, algorithm, fraction = cell
    limit = fraction * clip_norm(problem(name, 6, dtype))
    options = {"clipping": storage, "norm_algorithm": algorithm}
    one, other = (_summed(name, dtype, index, limit, **options) for index in (range(6), order))
    assert float((one - other).norm()) <= 8 * ROUNDING[dtype] * limit * 6


@few
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(STORAGES),
    st.sampled_from(("auto", "gram", "direct")),
    st.integers(1, 9),
    st.sampled_from(["normal", "constant", "one token", "tiny"]),
    st.integers(0, 2**16),
)
def test_adversarial_samples_stay_within_C(
    dtype: torch.dtype, storage: str, algorithm: str, tokens: int, kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, 11, generator=generator)
    g = torch.randn(1, tokens, 7, generator=generator)
    if kind == "constant":
        x, g = torch.ones_like(x), torch.ones_like(g)
    elif kind == "one token":
        g[:, 1:] = 0
    elif kind == "tiny":
        g = g * 1e-6
    model = nn.Linear(11, 7).to(dtype)
    # The gradient that is formed has a norm that is known; C is a tenth of it.
    exact = torch.einsum("bto,bti->oi", g.to(dtype).double(), x.to(dtype).double())
    limit = max(0.1 * float(exact.norm()), 1e-8)
    with private(model, limit, clipping=storage, norm_algorithm=algorithm, loss_reduction="sum") as run:
        run.engine.backward((model(x.to(dtype)) * g.to(dtype)).sum())
        found = float(_vector(run.gradients()).norm())
    assert found <= limit


@few
@given(st.sampled_from(NAMES), st.sampled_from(STORAGES), st.lists(st.integers(1, 5), min_size=2, max_size=3))
def test_how_a_batch_is_split_into_backwards_does_not_matter(name: str, storage: str, cuts: list[int]) -> None:
    p = problem(name, 6)
    limit, sums = clip_norm(p), []
    for ends in ([0, 6], sorted({0, 6, *cuts})):
        model = p.model()
        with private(model, limit, clipping=storage) as run:
            for start, stop in zip(ends, ends[1:], strict=False):
                run.engine.backward(p.case.loss(model, *p.rows(slice(start, stop)), reduction="mean"))
        sums.append(_vector(gradients(model)))
    assert float((sums[0] - sums[1]).norm()) <= 1e-12 * 6 * limit


@pytest.mark.parametrize("dtype, mean", [(torch.bfloat16, 1e3), (torch.float32, 1e7), (torch.float64, 1e15)])
@pytest.mark.parametrize("storage", STORAGES)
def test_tokens_whose_gradients_cancel_stay_within_C(storage: str, dtype: torch.dtype, mean: float) -> None:
    """The tokens' output gradients add up to exactly 0, and their inputs differ in one place of 64 only.

    Whatever rounds the tokens one by one leaves a remainder in the other 63, multiplied by a large input.
    """
    g = torch.tensor([1.0, 33 / 128, 0.0], dtype=dtype).reshape(1, 3, 1).expand(1, 3, 5).clone()
    g[:, 2] = -(g[:, 0] + g[:, 1])
    x = torch.full((1, 3, 64), mean, dtype=dtype)
    x[:, :, 0] = torch.tensor([0.0, 1.0, 2.0])
    exact = torch.einsum("bto,bti->oi", g.double(), x.double())
    assert not exact[:, 1:].any()
    model = nn.Linear(64, 5, bias=False).to(dtype)
    for fraction in (0.1, 0.3, 0.7):
        limit = fraction * float(exact.norm())
        with private(model, limit, clipping=storage, loss_reduction="sum") as run:
            run.engine.backward((model(x) * g).sum())
            assert float(_vector(run.gradients()).norm()) <= limit
        model.zero_grad()


def test_the_slack_is_what_keeps_a_half_precision_sum_within_C() -> None:
    """Without it the bound breaks somewhere: the property above would notice."""
    from gramian.privacy.clipping import clip_factors

    broken, slack = 0, dict(clip_factors.SLACK)
    with contextlib.ExitStack() as undo:
        undo.callback(clip_factors.SLACK.update, slack)
        clip_factors.SLACK.update(dict.fromkeys(slack, 0.0))
        for name in NAMES:
            limit = 0.3 * float(problem(name, 6, torch.bfloat16).norms().min())
            broken += sum(float(_summed(name, torch.bfloat16, [i], limit).norm()) > limit for i in range(6))
    assert broken
