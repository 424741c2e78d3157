"""`kfac.fit` with every loss: factors and EK-FAC's eigenvalues of any split are those of one batch that was collected."""

import itertools
from typing import Any

import pytest
import torch

from tests.curvature.loss_cases import CASES
from tests.curvature.problems import assert_close, assert_same_factors, kfac, normal
from tests.kit.matrix import sample
from tests.kit.refusals import refused

pytestmark = pytest.mark.oracle
JOINT: dict[str, Any] = {"ekfac": True, "damping_mode": "joint"}
CELLS = [*itertools.product(CASES, ("empirical", "mc", "true"), (True, False))]


@pytest.mark.parametrize("name, kind, corrected", sample(CELLS, 9, case=lambda cell: cell[1:]))
def test_a_fit_in_parts_is_the_collection_of_the_whole(name: str, kind: str, corrected: bool) -> None:
    case = CASES[name]
    options, whole = JOINT if corrected else {}, torch.Generator().manual_seed(2)
    one, other = kfac(**options), kfac(**options)
    one.collect_kfac_factors(case.model(), (case.inputs, case.labels), kind, generator=whole, **case.told)
    parts = [(case.inputs[rows], case.labels[rows]) for rows in (slice(0, 1), slice(1, None))]
    other.fit(case.model(), parts, kind, generator=torch.Generator().manual_seed(2), **case.told)
    assert_same_factors(other, one)
    for layer, block in one.kfac_factors.items():
        found = other.kfac_factors[layer].correction
        assert (found is None) == (block.correction is None)
        if found is not None and block.correction is not None:
            v = normal(block.spec.outputs, block.spec.inputs, seed=5)
            assert_close(other.kfac_factors[layer].matvec(v), block.matvec(v), 1e-9)


def test_batches_of_one_fit_have_one_loss() -> None:
    case, found = CASES["mse tokens"], kfac()
    told = {name: value for name, value in case.told.items() if name == "class_axis"}
    integers = torch.zeros(case.labels.shape[:-1], dtype=torch.long)
    with refused("labels: "):
        found.fit(case.model(), [(case.inputs, integers), (case.inputs, case.labels)], "empirical", **told)
    assert not found.kfac_factors


def test_eigenvalues_of_an_exact_head_of_squared_errors_need_a_fit() -> None:
    case, found = CASES["mse tokens"], kfac(**JOINT)
    model = case.model()
    found.fit(model, [(case.inputs, case.labels)], "true", **case.told)
    with refused("factors: their head is exact mse", "expected kfac.fit(...) for both passes of that loss"):
        found.correct(model, loss_reduction="sum", num_terms=case.terms)


class Stream:
    """An iterable that goes on where it was: a second reader gets what the first has left."""

    def __init__(self, batches: list[Any]) -> None:
        self._rest = iter(batches)

    def __iter__(self) -> Any:
        yield from self._rest


def test_the_first_batch_of_a_stream_is_not_lost() -> None:
    case = CASES["mse tokens"]
    parts = [(case.inputs[row : row + 1], case.labels[row : row + 1]) for row in range(len(case.inputs))]
    one, other = kfac(), kfac()
    one.fit(case.model(), parts, "empirical", **case.told)
    before = torch.get_rng_state()
    other.fit(case.model(), Stream(parts), "empirical", **case.told)
    assert_same_factors(other, one)
    shuffled = torch.utils.data.DataLoader([*zip(case.inputs, case.labels, strict=True)], shuffle=True)
    other.fit(case.model(), shuffled, "empirical", **case.told)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_factors(other, one)


def test_two_passes_have_the_same_samples() -> None:
    case, found = CASES["mse tokens"], kfac(**JOINT)

    class Fewer:
        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return iter([(case.inputs, case.labels)] * (3 - self.passes))

    rows = len(case.inputs)
    with refused(f"batches: {2 * rows} samples in one pass, {rows} in the other; expected the same in both"):
        found.fit(case.model(), Fewer(), "empirical", **case.told)
    assert not found.kfac_factors
