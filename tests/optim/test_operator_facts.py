"""What `gramian.optim.KFAC.record()` says of its operators: its errors are those of an oracle, in float64."""

import json

import numpy as np
import pytest
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

import gramian
from gramian.linalg import inverse_roots
from gramian.optim import whitened_steps
from tests.kit.mutations import RED, Edit
from tests.optim.oracle import orthogonal
from tests.optim.test_kfac_optimizer import batch_of, model_of, stepped

pytestmark = pytest.mark.oracle

FULL_SIDES = {"up A", "same A", "same G", "also A", "also G", "turned G"}
"""Of layers that widen, keep the width, and narrow: the wider side is its diagonal."""


def trained(dtype: torch.dtype, steps: int = 1) -> gramian.optim.KFAC:
    model = model_of("words", dtype)
    optimizer = gramian.optim.KFAC(model, update_freq=1, max_tokens=None, damping=0.2)
    for step in range(steps):
        stepped(optimizer, model, batch_of("words", step))
    return optimizer


def operator_of(optimizer: gramian.optim.KFAC, layer: str, side: str) -> NDArray[np.float64]:
    """The root that steps multiply by."""
    name = f"{layer}.weight"
    group = next(group for group in optimizer._steps.groups if name in group.names)
    narrower = "A" if layer == "up" else "G"
    return (group.P if side == narrower else group.D)[group.names.index(name)].double().numpy()


def exact_root(optimizer: gramian.optim.KFAC, layer: str, side: str) -> NDArray[np.float64]:
    block = optimizer.kfac.kfac_factors[layer]
    width = block.spec.outputs if side == "G" else block.spec.inputs - block.spec.has_bias
    factor = block.factors[side].to_dense().double().numpy()[:width, :width]
    relative = factor / (np.trace(factor) / width) + 0.2 * np.eye(width)
    return np.real(scipy.linalg.fractional_matrix_power(relative, -0.25))


def root_errors_are_those_of_the_oracle(rounding: torch.dtype) -> None:
    """Of roots in float32 that are rounded on top."""
    root = inverse_roots.inverse_fourth_root

    def rounded(stack_BNN: Tensor, condition: float) -> Tensor:
        found = root(stack_BNN, condition)
        return found if found.dtype == torch.float64 else found.to(rounding).float()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whitened_steps, "MEASURED", 100)
        patch.setattr(inverse_roots, "inverse_fourth_root", rounded)
        optimizer = trained(torch.float32)
        stated = optimizer.record()["operators"]["measured"]["root_errors"]
    assert {label.replace(".weight", "") for label in stated} == FULL_SIDES
    for label, error in stated.items():
        layer, side = label.replace(".weight", "").split()
        found, exact = operator_of(optimizer, layer, side), exact_root(optimizer, layer, side)
        assert error == pytest.approx(np.linalg.norm(found - exact) / np.linalg.norm(exact), rel=1e-4), label
        assert error > torch.finfo(rounding).eps / 30


@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16])
def test_root_errors_are_those_of_the_oracle(rounding: torch.dtype) -> None:
    root_errors_are_those_of_the_oracle(rounding)


BUGS = {
    "another damping": Edit("WhitenedSteps._root_errors", "self.damping", "1.001 * self.damping"),
    "absolute errors": Edit("WhitenedSteps._root_errors", " / exact_NN.norm()", ""),
    "the other side": Edit("WhitenedSteps._root_errors", 'side == "A"', 'side == "G"'),
    "not against float64": Edit("WhitenedSteps._root_errors", "torch.float64)", "torch.float32)"),
    "the first weight of a shape": Edit("WhitenedSteps._root_errors", "[place])", "[0])"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_error_is_seen(bug: str) -> None:
    with BUGS[bug].applied(), pytest.raises(RED):
        root_errors_are_those_of_the_oracle(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_facts_are_those_of_the_operators(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert gramian.optim.KFAC(model_of("words", dtype)).record()["operators"] is None
    optimizer = trained(dtype, 2)
    record = optimizer.record()
    facts = json.loads(json.dumps(record["operators"], allow_nan=False))
    measured = facts.pop("measured")
    assert facts == {
        "root_products": [name],
        "step_products": [name],
        "groups": 3,
        "bytes": dtype.itemsize * (6 * 6 + 10 + 4 * 10 * 10 + 6 * 6 + 10),
        "made": 2,
        "roots": {"here": 6, "all": 6},
    }
    errors = measured.pop("root_errors")
    assert len(errors) == whitened_steps.MEASURED and max(errors.values()) < 50 * torch.finfo(dtype).eps
    assert optimizer.kfac.record()["operators"] is None and list(record) == list(optimizer.kfac.record())
    values = torch.logspace(-2.5228, -0.4437, 64, dtype=torch.float64)
    expected = torch.linalg.svdvals(orthogonal(torch.diag(values)))
    assert measured.pop("singular_values") == pytest.approx([float(expected[-1]), float(expected[0])], rel=1e-4)
    assert measured == {"made": 2}


def test_errors_are_measured_again_once_operators_were_made_twice_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `record` alone, and of matrices that a number draws."""
    model = model_of("words")
    optimizer = gramian.optim.KFAC(model, update_freq=1)
    computed: list[torch.dtype | None] = []

    def counted(factors: object, width: int, damping: float, dtype: torch.dtype | None = None) -> Tensor:
        computed.append(dtype)
        return inverse_roots.dense_roots(factors, width, damping, dtype)  # type: ignore[arg-type]

    monkeypatch.setattr(whitened_steps, "dense_roots", counted)
    found = []
    for step in range(8):
        stepped(optimizer, model, batch_of("words", step))
        if step not in (1, 2):
            found.append(optimizer.record()["operators"]["measured"])
    assert [one["made"] for one in found] == [1, 4, 4, 4, 4, 8]
    assert computed == [torch.float64] * 3 * whitened_steps.MEASURED
    assert len({tuple(one["root_errors"]) for one in found}) > 1
