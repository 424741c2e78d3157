"""EK-FAC in two passes: its eigenvalues are the oracle's and those of one pass, whatever the batches, and no token is kept."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.curvature.estimate.likelihood import Softmax
from gramian.oracles import single_sample
from tests.curvature.problems import IGNORE, PROBLEMS, Problem, assert_close, cross_entropy, kfac, logits_of, normal
from tests.curvature.test_ekfac import JOINT, assert_same, expected, kronecker, vectors
from tests.kit.matrix import FULL, sample
from tests.kit.memory import measured
from tests.kit.mutations import RED, Edit, Mutation, turns_red
from tests.kit.refusals import refusal
from tests.oracles import dense_ekfac

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs(short=True)]

TYPES = ("empirical", "mc", "true")
SPLITS: dict[str, Callable[[int], list[int]]] = {
    "one by one": lambda n: [1] * n,
    "uneven": lambda n: [1, n - 1],
    "one": lambda n: [n],
}


def batches(p: Problem, split: str = "uneven") -> list[tuple[Tensor, Tensor]]:
    sizes = SPLITS[split](len(p.inputs))
    return list(zip(p.inputs.split(sizes), p.targets.split(sizes), strict=True))


def fitted(p: Problem, split: str = "uneven", **told: Any) -> gramian.KFACNaturalGradient:
    options = {**JOINT, **told.pop("options", {})}
    found = kfac(**options)
    found.fit(p.model(), batches(p, split), causal_shift=False, **told)
    return found


def collected(p: Problem, fisher_type: str, **options: Any) -> gramian.KFACNaturalGradient:
    """All samples in one batch, whose tokens are stored."""
    found = kfac(**JOINT, **options)
    found.collect_kfac_factors(p.model(), (p.inputs, p.targets), fisher_type, n_samples=2, causal_shift=False)
    return found


def oracle(p: Problem, found: gramian.KFACNaturalGradient, targets: list[Tensor]) -> dict[str, Tensor]:
    """{block: its Fisher of whole samples} from one backward for each sample and each of its labels."""
    written: dict[str, Tensor] = {}
    for labels in targets:
        gradients = single_sample.per_sample_gradients(p.model(), cross_entropy, (p.inputs, labels))
        for name, block in kronecker(found).items():
            parts = [gradients[parameter] for parameter in block.spec.parameters]
            samples = [
                block.spec.matrix(dict(zip(block.spec.parameters, each, strict=True)))
                for each in zip(*parts, strict=True)
            ]
            F = dense_ekfac.block_fisher(torch.stack(samples), p.terms * len(targets))
            written[name] = written.get(name, 0.0) + F
    return written


@pytest.mark.parametrize("name", ["mlp", "mlp_tokens", "gpt", "embedding"])
@pytest.mark.parametrize("fisher_type", ["empirical", "mc"])
def test_every_block_is_the_diagonal_of_the_fisher_in_the_eigenbasis(name: str, fisher_type: str) -> None:
    """Drawn labels are those of the samples' ids, which count across batches."""
    p = PROBLEMS[name]
    found = fitted(p, fisher_type=fisher_type, n_samples=2)
    targets = [p.targets]
    if fisher_type == "mc":
        logits, ids = logits_of(p.model(), p.inputs), torch.arange(len(p.inputs))
        targets = [Softmax().draw(logits, found.state.seeds[0], ids, draw) for draw in range(2)]
    for layer, fisher in oracle(p, found, targets).items():
        block = kronecker(found)[layer]
        v = vectors(block)
        product = block.spec.matrix(found.compute_fisher_vector_product(v)).reshape(-1)
        assert_close(product, expected(block, fisher) @ block.spec.matrix(v).reshape(-1), what=layer)
        about = found.record()["layers"][layer]["ekfac"]
        assert about["corrected"] and about["trace"] == pytest.approx(float(fisher.trace()), rel=1e-9)


MATRIX = [(name, kind, split) for name in PROBLEMS if FULL or name != "hf_gpt2" for kind in TYPES for split in SPLITS]


@pytest.mark.parametrize("name, fisher_type, split", sample(MATRIX, 8, case=lambda cell: cell[1:]))
def test_any_split_into_batches_is_the_stored_form_of_one_batch(name: str, fisher_type: str, split: str) -> None:
    p = PROBLEMS[name]
    stored, found = collected(p, fisher_type), fitted(p, split, fisher_type=fisher_type, n_samples=2)
    assert_same(found, stored)
    if split == "one":
        for layer, block in kronecker(stored).items():
            assert_close(found.kfac_factors[layer].correction.values_RS, block.correction.values_RS, what=layer)


@pytest.mark.parametrize(
    "options", [{"max_tokens": 4}, {"memory_budget": "1GB"}, {"kfac_use_woodbury": False}], ids=str
)
def test_options_of_the_factors_hold_in_both_passes(options: dict[str, Any]) -> None:
    p = PROBLEMS["gpt"]
    stored = collected(p, "empirical", **{k: v for k, v in options.items() if k != "memory_budget"})
    assert_same(fitted(p, options=options), stored)


@pytest.mark.parametrize("exact", [False, True], ids=["labels", "exact head"])
@pytest.mark.parametrize("name", ["mlp_tokens", "gpt"])
def test_in_a_loop_of_ones_own_a_mean_loss_is_a_sum_loss(name: str, exact: bool) -> None:
    p = PROBLEMS[name]
    ignored = torch.arange(p.targets.numel()).view_as(p.targets) % 4 == 1
    p = replace(p, targets=p.targets.masked_fill(ignored, IGNORE))
    model, options = p.model(), {**JOINT, "kfac_true_fisher_head": exact}
    one, found = p.captured(**options), kfac(**options)

    def terms(rows: slice) -> int:
        return int((p.targets[rows] != IGNORE).sum())

    for opened in (
        lambda **told: found.capture(model, correct=False, **told),
        lambda **told: found.correct(model, **told),
    ):
        with opened(num_terms=terms(slice(0, 2))) as cap:
            p.loss(model, slice(0, 2), "mean").backward()
            cap.next(num_terms=terms(slice(2, None)))
            p.loss(model, slice(2, None), "mean").backward()
        corrected = [layer["ekfac"]["corrected"] for layer in found.record()["layers"].values() if layer["ekfac"]]
        assert corrected and len(set(corrected)) == 1
    assert corrected[0] and found.steps == found.refreshes == 1
    assert_same(found, one)


def test_a_second_pass_may_see_other_data() -> None:
    """S is that of its own samples and loss terms, in the basis of the first pass."""
    p = PROBLEMS["mlp"]
    model, found, rows = p.model(), kfac(**JOINT), slice(0, 3)
    with found.capture(model, loss_reduction="sum", num_terms=p.terms, correct=False):
        p.loss(model).backward()
    with found.correct(model, loss_reduction="sum", num_terms=3):
        p.loss(model, rows).backward()
    few = Problem(p.build, p.inputs[rows], p.targets[rows], p.layers, p.head)
    for layer, fisher in oracle(few, found, [few.targets]).items():
        block = kronecker(found)[layer]
        v = vectors(block)
        product = block.spec.matrix(found.compute_fisher_vector_product(v)).reshape(-1)
        assert_close(product, expected(block, fisher) @ block.spec.matrix(v).reshape(-1), what=layer)


@pytest.mark.full
def test_compiled_models_have_the_eigenvalues_of_eager_ones() -> None:
    p = PROBLEMS["mlp_tokens"]
    model, found = p.model(), kfac(**JOINT)
    compiled = torch.compile(model, backend="aot_eager")
    for opened in (
        lambda **told: found.capture(model, correct=False, **told),
        lambda **told: found.correct(model, **told),
    ):
        with opened(loss_reduction="sum", num_terms=p.terms):
            cross_entropy(compiled, p.inputs, p.targets).backward()
    assert_same(found, p.captured(**JOINT))


def test_it_is_that_of_curvlinops() -> None:
    import curvlinops

    p = PROBLEMS["mlp"]
    model, some = p.model(), batches(p)
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # a bias that is frozen beside its weight is not for the peer
    peer = curvlinops.EKFACLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), some, fisher_type="empirical",
        separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    found = kfac(**JOINT)
    found.fit(model, some)
    v = {key: normal(*parameter.shape, seed=k) for k, (key, parameter) in enumerate(model.named_parameters())}
    ours = found.compute_fisher_vector_product(v)
    for key, want in zip(v, peer @ list(v.values()), strict=True):
        assert_close(ours[key], want, 1e-10, key)


def padded_batch(rows: list[list[int]], width: int) -> dict[str, Tensor]:
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORE)}


@pytest.mark.parametrize("fisher_type", TYPES)
def test_padded_is_ragged(fisher_type: str) -> None:
    model, rows = PROBLEMS["gpt"].model(), [[3, 1, 7, 2], [5, 4, 9, 11, 0, 6], [8, 10, 2]]
    padded, ragged = kfac(**JOINT), kfac(**JOINT)
    padded.fit(model, [padded_batch(rows[:2], 6), padded_batch(rows[2:], 5)], fisher_type, causal_shift=True)
    ragged.fit(model, [padded_batch([row], len(row)) for row in rows], fisher_type, causal_shift=True)
    assert_same(padded, ragged)


def test_the_average_over_fits_is_that_over_captures() -> None:
    p, averaged = PROBLEMS["mlp"], {**JOINT, "ema_decay": 0.75}
    model, found, stored = p.model(), kfac(**averaged), kfac(**averaged)
    for rows in (slice(0, 5), slice(3, 8)):
        found.fit(model, [(p.inputs[rows], p.targets[rows])])
        with stored.capture(model, loss_reduction="sum", num_terms=5):
            p.loss(model, rows).backward()
    assert found.refreshes == 2
    assert_same(found, stored)
    with found.correct(model, loss_reduction="sum", num_terms=5):  # once more: it replaces what it measured before
        p.loss(model, rows).backward()
    assert_same(found, stored)


def test_without_ekfac_it_is_the_refresh_of_all_batches_in_one_pass() -> None:
    p = PROBLEMS["gpt"]
    found, seen = kfac(damping_mode="joint"), []
    found.fit(p.model(), iter(batches(p)), causal_shift=False, progress=lambda *now: seen.append(now))
    assert_same(found, p.captured(damping_mode="joint"))
    assert seen == [("factors", 1), ("factors", 2)] and found.record()["layers"]["head"]["ekfac"] is None


def test_the_record_says_what_each_pass_has_seen() -> None:
    p, seen = PROBLEMS["mlp_tokens"], []
    found = fitted(p, fisher_type="mc", n_samples=3, progress=lambda *now: seen.append(now))
    assert seen == [(stage, k) for stage in ("factors", "eigenvalues") for k in (1, 2)]
    layer = found.record()["layers"]["0"]
    assert (layer["samples"], layer["N"], layer["backwards"]) == (9, 27, 6)
    assert [layer["ekfac"][key] for key in ("samples", "N", "backwards")] == [9, 27, 6]
    with found.correct(model := found.state.model or p.model(), loss_reduction="sum", num_terms=6):
        p.loss(model, slice(0, 2)).backward()
    layer = found.record()["layers"]["0"]
    assert [layer["ekfac"][key] for key in ("samples", "N", "backwards")] == [2, 6, 1] and layer["N"] == 27


def test_a_model_is_left_as_it_was() -> None:
    p = PROBLEMS["mlp"]
    model = nn.Sequential(*p.model(), nn.Dropout(0.5)).train()
    cross_entropy(model, p.inputs, p.targets).backward()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    kfac(**JOINT).fit(model, batches(p))
    assert torch.equal(torch.rand(4), wanted) and model.training
    assert all(parameter.grad is before[name] for name, parameter in model.named_parameters())


def test_a_state_brings_eigenvalues_of_a_second_pass_back(tmp_path: Path) -> None:
    p = PROBLEMS["gpt"]
    found, loaded, read = fitted(p), kfac(**JOINT), kfac(**JOINT)
    loaded.load_state_dict(found.state_dict(), p.model())
    found.save(str(tmp_path / "state"))
    read.load(str(tmp_path / "state"), p.model())
    for other in (loaded, read):
        assert_same(other, found, 1e-14)
        assert other.record()["layers"]["head"]["ekfac"] == found.record()["layers"]["head"]["ekfac"]


# ---- memory ----------------------------------------------------------------------------------------------------------


def peaks(count: int) -> tuple[int, int]:
    """Bytes at the peak of the second pass, and left after it, over `count` batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 20)).double()
    some = [(torch.randn(8, 20, dtype=torch.float64), torch.randint(20, (8,))) for _ in range(count)]
    found = kfac(**JOINT)
    with found.capture(model, loss_reduction="sum", num_terms=8 * count, correct=False) as cap:
        for x, y in some:
            cap.next(num_terms=8)
            cross_entropy(model, x, y).backward()
    with measured() as used, found.correct(model, loss_reduction="sum", num_terms=8) as cap:
        for number, (x, y) in enumerate(some):
            if number:
                cap.next(num_terms=8)
            model.zero_grad()
            cross_entropy(model, x, y).backward()
    return used.peak, used.left


def test_the_memory_of_the_second_pass_does_not_grow_with_the_number_of_batches() -> None:
    (few, few_left), (many, many_left) = peaks(5), peaks(15)  # dense sides from 25 tokens on
    assert few_left == many_left and few == pytest.approx(many, rel=0.01)


# ---- what fails ------------------------------------------------------------------------------------------------------


BAD: dict[str, dict[str, Any]] = {
    "batches: is an iterator": {"batches": lambda p: iter(batches(p))},
    "batches: has none": {"batches": lambda p: []},
    "batches: expected an iterable": {"batches": lambda p: p.inputs},
    "batch: ": {"batches": lambda p: [p.inputs]},
    "labels: ": {"batches": lambda p: [{"x": p.inputs}]},
    "fisher_type: ": {"fisher_type": "exact"},
    "sample_ids: ended": {"sample_ids": [torch.arange(1)]},
    "sample_ids: ": {"sample_ids": [torch.arange(2)] * 2},
}


@pytest.mark.parametrize("field", BAD)
def test_bad_input_is_named_and_the_factors_stay(field: str) -> None:
    p, told = PROBLEMS["mlp"], dict(BAD[field])
    found = fitted(p)
    model, before = found.state.model or p.model(), found.kfac_factors
    with refusal(f"^{field}.*"):
        found.fit(model, told.pop("batches", batches)(p), **told)
    assert found.kfac_factors is before


def test_a_second_pass_needs_factors_and_ekfac() -> None:
    p, model = PROBLEMS["mlp"], PROBLEMS["mlp"].model()
    with refusal("^kfac: has no factors yet"):
        kfac(**JOINT).correct(model, num_terms=1)
    with refusal("^ekfac: is False.*expected ekfac=True"):
        p.captured(model, damping_mode="joint").correct(model, num_terms=1)
    with refusal("^model: .*another model.*expected"):
        p.captured(model, **JOINT).correct(p.model(), num_terms=1)


@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_a_second_pass_that_fails_leaves_the_factors_from_before(how: str) -> None:
    class Changing(list[Any]):
        """Batches of which the second reading goes wrong."""

        reading = 0

        def __iter__(self) -> Any:
            self.reading += 1
            yield from super().__iter__()
            if self.reading == 2 and how == "raises":
                raise RuntimeError("no such file")
            yield p.inputs * (float("nan") if self.reading == 2 else 1.0), p.targets

    p, model = PROBLEMS["mlp"], PROBLEMS["mlp"].model()
    found = kfac(**JOINT)
    found.fit(model, batches(p))
    before = found.kfac_factors
    if how == "raises":
        with pytest.raises(RuntimeError, match="no such file"):
            found.fit(model, Changing(batches(p)))
    else:
        found.fit(model, Changing(batches(p)))
    assert found.kfac_factors is before and found.refreshes == 1
    assert len(found.dropped) == 1 and ("finite" in found.dropped[0]["reason"]) == (how == "not finite")
    found.fit(model, batches(p))
    assert_same(found, fitted(p))


BUGS = (
    Mutation(
        "samples numbered anew in every batch",
        Edit("_Passes.__call__", "first += self._run(cap, batch, ids, first)", "self._run(cap, batch, ids, 0)"),
        partial(test_every_block_is_the_diagonal_of_the_fisher_in_the_eigenbasis, "mlp", "mc"),
    ),
    Mutation(
        "loss terms of the first pass",
        Edit("finish_correction:finish", "sums.correction(agreed.terms", "sums.correction(block.facts.terms"),
        test_a_second_pass_may_see_other_data,
    ),
    Mutation(
        "tokens kept after their backward",
        Edit("EigenvalueSums.complete", "self._waiting.pop(", "self._waiting.get("),
        test_the_memory_of_the_second_pass_does_not_grow_with_the_number_of_batches,
    ),
    Mutation(
        "factors without their eigenvalues left behind",
        Edit("CurvatureState.restore_factors", "before.items()", "()"),
        partial(test_a_second_pass_that_fails_leaves_the_factors_from_before, "raises"),
    ),
    Mutation(
        "the earlier eigenvalues forgotten",
        Edit("finish_correction:finish", "state.earlier.get(name)", "None"),
        test_the_average_over_fits_is_that_over_captures,
    ),
    Mutation(
        "every position of an exact head counted",
        Edit(
            "EigenvalueSums._add_head",
            "weights_T[part].to(hessian.diagonal_TV)",
            "weights_T[part].to(hessian.diagonal_TV) * 0 + 1",
        ),
        partial(test_in_a_loop_of_ones_own_a_mean_loss_is_a_sum_loss, "gpt", True),
    ),
)


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_turns_its_test_red(bug: Mutation) -> None:
    turns_red(bug, RED)
