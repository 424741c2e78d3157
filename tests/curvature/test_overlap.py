"""Overlaps of two Fishers and the conflict of two gradients against matrices written out."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.curvature import fisher_overlap, gradient_conflict, subspace_overlap
from gramian.curvature.uses import overlap
from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.oracles import dense_kfac
from tests.curvature.problems import TOLERANCE, kfac, normal, seeded
from tests.curvature.uses import KINDS, TASKS, data, flat, gradient_of, names_of, network, task, written_out
from tests.kit.refusals import refused
from tests.oracles import dense_uses

pytestmark = pytest.mark.oracle
KIND_PAIRS = [
    ("dense", "dense"),
    ("low rank", "low rank"),
    ("exact head", "dense"),
    ("tied", "tied"),
    ("no layer", "no layer"),
    ("ekfac", "ekfac"),
    ("dense", "ekfac"),
    ("ekfac low rank", "exact head"),
]
N = 9


def factors() -> dict[str, Factor]:
    """One of every representation."""
    p = normal(N, 4, seed=5).softmax(0)
    square = normal(N, N, seed=3)
    return {
        "dense": Dense.of(square @ square.mT),
        "diagonal": Diagonal(normal(N, seed=4).square()),
        "low rank": LowRank.of(normal(N, 3, seed=1)),
        "plus": DiagonalLowRank.of(normal(N, seed=6).square(), normal(N, 2, seed=2), +1),
        "minus": DiagonalLowRank.softmax(p, torch.float64),
    }


@pytest.mark.parametrize("left, right", [*itertools.product(factors(), factors())])
def test_the_trace_of_a_product_is_defined_for_every_pair_of_representations(left: str, right: str) -> None:
    one, other = factors()[left], factors()[right]
    expected = float(torch.trace(one.to_dense() @ other.to_dense()))
    assert overlap.product_trace(one, other) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("name", [*factors()])
def test_leading_eigenvectors_of_every_representation(name: str) -> None:
    factor = factors()[name]
    values, vectors = overlap._leading_of_side(factor, 3)
    expected = torch.linalg.eigvalsh(factor.to_dense()).flip(0)[:3]
    torch.testing.assert_close(values, expected, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(factor.to_dense() @ vectors, vectors * values, rtol=0, atol=1e-10 * float(values[0]))


def both(kinds: tuple[str, str], **options: Any) -> tuple[nn.Module, list[gramian.KFACNaturalGradient], list[Tensor]]:
    """Two tasks of one model, and their Fishers written out."""
    model = network(kinds[0])
    found = [task(model, seed, kind, **options) for seed, kind in zip(TASKS, kinds, strict=True)]
    return model, found, [written_out(one, model) for one in found]


def parts(model: nn.Module, found: gramian.KFACNaturalGradient) -> dict[str, Tensor]:
    """{block: which entries of a flat vector are its own}."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    return {
        name: torch.cat([torch.arange(starts[p], starts[p] + sizes[p]) for p in block.spec.parameters])
        for name, block in found.kfac_factors.items()
    }


@pytest.mark.parametrize("kinds", KIND_PAIRS)
def test_the_overlap_of_layers_and_model_is_that_of_the_whole_matrices(kinds: tuple[str, str]) -> None:
    model, found, (F1, F2) = both(kinds)
    got = fisher_overlap(*found)
    assert got.model == pytest.approx(dense_uses.overlap(F1, F2), rel=TOLERANCE) and 0 < got.model < 1
    for name, at in parts(model, found[0]).items():
        want = dense_uses.overlap(F1[at][:, at], F2[at][:, at])
        assert got.layers[name] == pytest.approx(want, rel=TOLERANCE), name
    assert got.unshared == ()


def test_factors_stored_in_half_precision_are_compared_as_they_are_stored() -> None:
    model = network("low rank").float()
    found = [task(model, seed, "low rank") for seed in TASKS]
    F1, F2 = (written_out(one, model) for one in found)
    assert {f.storage_dtype for one in found for f in one.kfac_factors["fc"].factors.values()} == {torch.float16}
    assert fisher_overlap(*found).model == pytest.approx(dense_uses.overlap(F1, F2), rel=1e-5)  # written out in float32
    assert subspace_overlap(*found, 2).model == pytest.approx(dense_uses.subspace_overlap(F1, F2, 2), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fisher_overlaps_with_itself_wholly(kind: str) -> None:
    found = task(network(kind), TASKS[0], kind)
    assert fisher_overlap(found, found).model == pytest.approx(1.0, rel=1e-12)
    got = subspace_overlap(found, found, 3)
    assert got.model == pytest.approx(1.0, rel=1e-9)
    assert [*got.layers.values()] == pytest.approx([1.0] * len(got.layers), rel=1e-9)


@pytest.mark.parametrize("kinds", KIND_PAIRS)
@pytest.mark.parametrize("k", [1, 4])
def test_the_overlap_of_leading_spaces_is_that_of_the_whole_matrices(kinds: tuple[str, str], k: int) -> None:
    model, found, (F1, F2) = both(kinds)
    got = subspace_overlap(*found, k)
    whole = {"": torch.arange(len(F1)), **parts(model, found[0])}
    compared = 0
    for name, at in whole.items():
        sub = [F[at][:, at] for F in (F1, F2)]
        if all(is_unique(F, k) for F in sub):
            want = dense_uses.subspace_overlap(*sub, k)
            assert {"": got.model, **got.layers}[name] == pytest.approx(want, rel=TOLERANCE, abs=1e-12), name
            compared += 1
    assert compared >= 3


def is_unique(F: Tensor, k: int) -> bool:
    """True if the k-th largest eigenvalue is above zero and well above the next."""
    values = torch.linalg.eigvalsh(F).flip(0)
    return float(values[k - 1] - values[k]) > 1e-3 * float(values[0])


def test_a_side_too_wide_to_be_written_out_has_leading_eigenvectors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, _ = both(("exact head", "exact head"))
    before = subspace_overlap(*found, 3)
    monkeypatch.setattr(overlap, "WIDEST_DENSE", 4)
    monkeypatch.setattr(DiagonalLowRank, "written_out", lambda self: pytest.fail("written out"))
    after = subspace_overlap(*found, 3)
    assert [*after.layers.values(), after.model] == pytest.approx([*before.layers.values(), before.model], rel=1e-6)


def test_fewer_directions_than_asked_for_are_compared_by_what_there_is() -> None:
    model = seeded(lambda: nn.Linear(3, 2, bias=False))
    found = []
    for seed in (1, 2):
        one = kfac()
        with one.capture(model, loss_reduction="sum", num_terms=1):
            (model(normal(1, 3, seed=seed)) * normal(1, 2, seed=seed + 5)).sum().backward()
        found.append(one)
    F1, F2 = (written_out(one, model) for one in found)
    got = subspace_overlap(*found, 5)  # each has one
    assert got.model == pytest.approx(dense_uses.subspace_overlap(F1, F2, 1), rel=TOLERANCE)


@pytest.mark.parametrize("mode", ["joint", "pi"])
def test_the_conflict_of_gradients_is_measured_by_the_explicit_inverse(mode: str) -> None:
    options = {"damping_mode": mode, "damping": 0.02, "use_eigenvalue_correction": False}
    model = network()
    found, names = task(model, TASKS[0], **options), names_of(model)
    left, right = (gradient_of(model, data("dense", seed)) for seed in (5, 6))
    got = gradient_conflict(found, model, left, right)
    if mode == "joint":
        F = written_out(found, model)
        inverse = torch.linalg.inv(F + 0.02 * torch.eye(len(F), dtype=torch.float64))
        at = parts(model, found)["fc"]
        want = dense_uses.cosine(inverse, flat(left, names), flat(right, names))
        layer = dense_uses.cosine(inverse[at][:, at], flat(left, names)[at], flat(right, names)[at])
        assert got.model == pytest.approx(want, rel=TOLERANCE)
    else:
        A, G = (f.to_dense() for f in (found.kfac_factors["fc"].A, found.kfac_factors["fc"].G))  # type: ignore[union-attr]
        Y = [torch.cat([g["fc.weight"], g["fc.bias"][:, None]], dim=1) for g in (left, right)]
        natural = [dense_kfac.natural(A, G, y, -1.0, mode, 0.02) for y in Y]
        layer = float((Y[0] * natural[1]).sum() / ((Y[0] * natural[0]).sum() * (Y[1] * natural[1]).sum()).sqrt())
    assert got.layers["fc"] == pytest.approx(layer, rel=TOLERANCE)
    opposite = gradient_conflict(found, model, left, {name: -g for name, g in left.items()})
    assert opposite.model == pytest.approx(-1.0) and [*opposite.layers.values()] == pytest.approx([-1.0] * 8)


def test_layers_that_one_gradient_lacks_are_named_and_count_for_the_other() -> None:
    model = network()
    found, names = task(model, TASKS[0], damping_mode="joint", use_eigenvalue_correction=False), names_of(model)
    left, right = (gradient_of(model, data("dense", seed)) for seed in (5, 6))
    del right["head.weight"], right["fc.bias"]
    got = gradient_conflict(found, model, left, right)
    F = written_out(found, model)
    inverse = torch.linalg.inv(F + found.options.damping * torch.eye(len(F), dtype=torch.float64))
    filled = {name: right.get(name, torch.zeros_like(g)) for name, g in left.items()}
    assert got.model == pytest.approx(dense_uses.cosine(inverse, flat(left, names), flat(filled, names)), rel=TOLERANCE)
    assert got.unshared == ("head",) and got.layers["head"] == 0.0


@pytest.mark.parametrize("kind", ["dense", "low rank", "ekfac low rank"])
def test_a_fisher_that_is_zero_overlaps_with_nothing(kind: str) -> None:
    model, batch = network(kind), data(kind, TASKS[0])
    some, none = task(model, TASKS[0], kind), task(model, TASKS[0], kind)
    with none.capture(model, loss_reduction="sum", num_terms=batch[1].numel(), force=True):
        (0.0 * model(batch[0])).sum().backward()
    assert subspace_overlap(none, some, 3).model == fisher_overlap(none, some).model == 0.0


def test_layers_that_one_fisher_lacks_are_named() -> None:
    model = network()
    one, other = (task(model, seed) for seed in TASKS)
    del other.kfac_factors["fc"]
    got = fisher_overlap(one, other)
    assert got.unshared == ("fc",) and "fc" not in got.layers


def test_what_cannot_be_compared_is_refused_in_one_line() -> None:
    model = network()
    found = task(model, TASKS[0])
    with refused("kfac:", "expected"):
        fisher_overlap(found, kfac())
    with refused("k:", "expected"):
        subspace_overlap(found, found, 0)
    with refused("table:", "expected"):
        fisher_overlap(found, task(network("no layer"), TASKS[0], "no layer", min_layer_size=1))
    with refused("other:", "expected"):
        stranger = kfac()
        other = seeded(lambda: nn.Linear(2, 2))
        with stranger.capture(other, num_terms=1):
            other(normal(1, 2)).sum().backward()
        fisher_overlap(found, stranger)
    with refused("left:", "nobody", "expected"):
        gradient_conflict(found, model, {"nobody": torch.zeros(2)}, {})
    bad = {name: torch.full_like(p, float("nan")) for name, p in model.named_parameters()}
    with refused("right:", "NaN", "expected"):
        gradient_conflict(found, model, {name: torch.ones_like(p) for name, p in bad.items()}, bad)
