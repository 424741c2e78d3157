"""Sums of several processes equal those of one: joined here among threads, on real processes in tests/dist/test_kfac_*.py."""

import itertools
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gramian
from gramian.curvature.estimate import token_moments
from gramian.curvature.refresh import build_factors
from gramian.taps import hub
from tests.curvature.loopback import Loopback, on_threads
from tests.curvature.splits import CASES, IGNORE, assert_equal, refresh, results, vector
from tests.kit.matrix import FULL, sample
from tests.kit.mutations import Edit
from tests.kit.refusals import refused

REDUCTIONS = ("gram", "gather", "dense")
POLICIES = ("all", "auto", "hybrid", "small_only")
DAMPING = ("pi", "factored", "joint")
SPLITS = {2: [[0, 2, 4], [1, 3]], 3: [[3], [], [4, 0, 1, 2]], 4: [[2, 0], [4], [1], [3]]}
"""Samples of each rank: dealt out, an empty rank, one each."""


def make(**options: Any) -> gramian.KFACNaturalGradient:
    return gramian.KFACNaturalGradient(**{"update_freq": 1, **options})


def alone(case: str, samples: int, options: dict[str, Any], **told: Any) -> dict[str, Tensor]:
    """One process with all samples in the order of their ids."""
    kfac, model = make(**options), CASES[case].model()
    refresh(kfac, model, CASES[case].data(samples), range(samples), **told)
    return results(kfac, model)


def together(case: str, split: list[list[int]], options: dict[str, Any], **told: Any) -> list[dict[str, Tensor]]:
    """One process for each part of the split."""
    samples = sum(map(len, split))

    def body(rank: int, _: Loopback) -> dict[str, Tensor]:
        kfac, model = make(**options), CASES[case].model()
        refresh(kfac, model, CASES[case].data(samples), split[rank], **told)
        return results(kfac, model)

    return on_threads(len(split), body)


def assert_one_equals_many(case: str, split: list[list[int]], options: dict[str, Any], **told: Any) -> None:
    expected = alone(case, sum(map(len, split)), options, **told)
    for found in together(case, split, options, **told):
        assert_equal(found, expected, 1e-10)


MATRIX = list(itertools.product(CASES, REDUCTIONS, POLICIES, DAMPING, SPLITS))


@pytest.mark.parametrize("case, reduce, policy, damping, ranks", sample(MATRIX, 9))
def test_many_processes_have_the_factors_of_one(case: str, reduce: str, policy: str, damping: str, ranks: int) -> None:
    options = {
        "kfac_distributed_reduce": reduce,
        "kfac_policy": policy,
        "damping_mode": damping,
        "kfac_big_threshold": 9,
    }
    assert_one_equals_many(case, SPLITS[ranks], options)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keyed subset": ({"max_tokens": 4}, {}),
    "keyed subset of every side": ({"max_tokens": 3, "kfac_policy": "small_only"}, {"micro": 1}),
    "exact head": ({"kfac_true_fisher_head": True}, {}),
    "exact head on a subset": ({"kfac_true_fisher_head": True, "max_tokens": 4}, {}),
    "one token for a sample": ({"weight_sharing": "reduce"}, {}),
    "micro-batches": ({}, {"micro": 2}),
    "summed loss": ({}, {"reduction": "sum"}),
    "no pass on an empty rank": ({}, {"empty_pass": False}),
    "a narrow layer": ({"min_layer_size": 9}, {}),
    "clipped": ({"max_condition_number": 20.0}, {}),
}


@pytest.mark.parametrize(
    "variant, reduce, case, ranks", sample(list(itertools.product(VARIANTS, REDUCTIONS, CASES, SPLITS)), 10)
)
def test_many_processes_have_the_factors_of_one_with(variant: str, reduce: str, case: str, ranks: int) -> None:
    options, told = VARIANTS[variant]
    assert_one_equals_many(case, SPLITS[ranks], {"kfac_distributed_reduce": reduce, **options}, **told)


@settings(max_examples=20 if FULL else 5)
@given(data=st.data())
def test_any_split_has_the_factors_of_one(data: st.DataObject) -> None:
    samples, ranks = data.draw(st.integers(1, 7)), data.draw(st.integers(2, 4))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=samples, max_size=samples))
    split = [[i for i in range(samples) if owners[i] == rank] for rank in range(ranks)]
    split = [data.draw(st.permutations(part)) for part in split]
    options = {
        "kfac_distributed_reduce": data.draw(st.sampled_from(REDUCTIONS)),
        "kfac_policy": data.draw(st.sampled_from(POLICIES)),
        "max_tokens": data.draw(st.sampled_from([None, 1, 3, 6])),
        "kfac_true_fisher_head": data.draw(st.booleans()),
        "damping": 0.1,
    }
    told = {
        "reduction": data.draw(st.sampled_from(["mean", "sum"])),
        "micro": data.draw(st.sampled_from([None, 1, 2])),
        "empty_pass": data.draw(st.booleans()),
    }
    assert_one_equals_many(data.draw(st.sampled_from(sorted(CASES))), split, options, **told)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("limit", [None, 4])
def test_token_weights_and_ignored_targets(reduce: str, limit: int | None) -> None:
    case, samples = CASES["words"], 5
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 3, (samples, 2), generator=generator).double()
    options = {"kfac_distributed_reduce": reduce, "max_tokens": limit}
    assert_one_equals_many("words", SPLITS[3], options, weights=weights)
    inputs, targets = case.data(samples)
    targets[0] = targets[1, 0] = targets[4, 1] = IGNORE  # the first sample has no term at all

    def run(rows: list[int]) -> dict[str, Tensor]:
        kfac, model = make(**options), case.model()
        refresh(kfac, model, (inputs, targets), rows)
        return results(kfac, model)

    expected = run(list(range(samples)))
    for found in on_threads(3, lambda rank, _: run(SPLITS[3][rank])):
        assert_equal(found, expected, 1e-10)


@pytest.mark.parametrize("case, reduce", sample([*itertools.product(["words", "tied", "many words"], REDUCTIONS)], 3))
def test_moving_averages_over_refreshes(case: str, reduce: str) -> None:
    options = {"kfac_distributed_reduce": reduce, "ema_decay": 0.7, "max_tokens": 5, "update_freq": 2}
    c, batches = CASES[case], [3, 5, 4]

    def run(rows: Any) -> tuple[dict[str, Tensor], int]:
        kfac, model = make(**options), c.model()
        for samples in batches:
            for _ in range(2):  # the second one is no refresh
                refresh(kfac, model, c.data(samples), rows(samples))
        return results(kfac, model), kfac.refreshes

    expected, refreshes = run(range)
    assert refreshes == 3
    for found, count in on_threads(2, lambda rank, _: run(lambda n: range(rank, n, 2))):
        assert count == 3
        assert_equal(found, expected, 1e-10)


@pytest.mark.full
def test_float32_and_half_storage_stay_within_their_precision() -> None:
    for storage, tolerance in (("fp32", 1e-5), ("fp16", 5e-3), ("bf16", 3e-2)):
        options = {"woodbury_dtype": storage, "damping": 1.0}
        c = CASES["words"]

        def run(rows: Any, options: dict[str, Any] = options, c: Any = c) -> dict[str, Tensor]:
            kfac, model = make(**options), c.model(torch.float32)
            refresh(kfac, model, c.data(6), rows)
            return results(kfac, model)

        expected = run(range(6))
        for reduce in REDUCTIONS:
            options["kfac_distributed_reduce"] = reduce
            for found in on_threads(3, lambda rank, _: run(range(rank, 6, 3))):  # noqa: B023
                assert_equal(found, expected, tolerance)


def test_default_ids_are_those_of_samples_dealt_out() -> None:
    """Without sample_ids the i-th sample of rank r of W is i·W + r."""
    c, options = CASES["words"], {"max_tokens": 3}
    inputs, targets = c.data(6)

    def run(rows: Any) -> dict[str, Tensor]:
        kfac, model = make(**options), c.model()
        with kfac.capture(model, num_terms=targets[rows].numel()):
            logits = model(inputs[rows])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten()).backward()
        return results(kfac, model)

    expected = run(slice(None))
    for found in on_threads(3, lambda rank, _: run(slice(rank, None, 3))):
        assert_equal(found, expected, 1e-10)


@pytest.mark.parametrize("kind", ["mc", "true"])
@pytest.mark.parametrize("limit", [None, 4])
def test_drawn_labels_belong_to_the_sample(kind: str, limit: int | None) -> None:
    c = CASES["words"]
    inputs, targets = c.data(5)

    def run(rows: list[int]) -> dict[str, Tensor]:
        kfac, model, ids = make(max_tokens=limit), c.model(), torch.tensor(rows, dtype=torch.long)
        kfac.collect_kfac_factors(model, (inputs[ids], targets[ids]), kind, n_samples=2, sample_ids=ids)
        return results(kfac, model)

    expected = run([0, 1, 2, 3, 4])
    for found in on_threads(2, lambda rank, _: run([[4, 1], [0, 2, 3]][rank])):
        assert_equal(found, expected, 1e-10)


# ---- what is decided by all ------------------------------------------------------------------------------------------


def test_inputs_that_layers_share_travel_once() -> None:
    def body(rank: int, exchange: Loopback) -> dict[str, Any]:
        kfac, model = make(), CASES["words"].model()
        refresh(kfac, model, CASES["words"].data(3), range(rank, 3, 2))
        assert kfac.kfac_factors["q"].A is kfac.kfac_factors["v"].A
        return kfac.record()

    for record in on_threads(2, body):
        q, k = record["layers"]["q"], record["layers"]["k"]
        assert k["shares_A_with"] == "q"
        assert k["sent"] == {"all_to_all": q["sent"]["all_to_all"] // 2}  # gradients alone


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_record_says_how_processes_were_joined(reduce: str) -> None:
    def body(rank: int, exchange: Loopback) -> dict[str, Any]:
        kfac, model = make(kfac_distributed_reduce=reduce), CASES["words"].model()
        refresh(kfac, model, CASES["words"].data(3), [[0, 1], [2]][rank])
        return kfac.record()

    for rank, record in enumerate(on_threads(2, body)):
        assert (record["world_size"], record["reduce"]) == (2, reduce)
        layer = record["layers"]["fc"]
        assert (layer["T_local"], layer["T_global"], layer["T"]) == ([4, 2][rank], 6, 6)
        assert {side["reduction"] for side in layer["sides"].values()} == {reduce}
        own, width, item = [4, 2][rank], 9, 8
        if reduce == "dense":
            assert layer["sent"] == {"all_reduce": 2 * width**2 * item}  # A and G, 2·B·(W−1)/W = B each
        elif reduce == "gather":
            assert layer["sent"] == {"all_gather": 2 * own * width * item}
        else:
            away = [4, 5][rank]  # features of the other rank
            assert layer["sent"] == {"all_to_all": 2 * own * away * item}
        assert record["layers"]["norm.weight"]["sides"]["G"]["reduction"] == "dense"


def test_a_record_waits_for_nobody() -> None:
    """One rank may log or write a record: nothing in it is collective, before and after the factors are used."""

    def body(rank: int, exchange: Loopback) -> None:
        kfac, model = make(), CASES["words"].model()
        refresh(kfac, model, CASES["words"].data(3), range(rank, 3, 2))
        for _ in range(2):
            calls = len(exchange.calls)
            layers = kfac.record()["layers"] if rank else {}
            assert len(exchange.calls) == calls and all(layer["sides"]["G"]["trace"] > 0 for layer in layers.values())
            results(kfac, model)

    on_threads(2, body)


def test_states_are_whole_and_load_into_one_process() -> None:
    def body(rank: int, _: Loopback) -> tuple[dict[str, Any], dict[str, Tensor]]:
        kfac, model = make(), CASES["words"].model()
        refresh(kfac, model, CASES["words"].data(3), range(rank, 3, 2))
        return kfac.state_dict(), results(kfac, model)

    for state, found in on_threads(2, body):
        kfac, model = make(), CASES["words"].model()
        kfac.load_state_dict(state, model)
        assert_equal(results(kfac, model), found, 1e-12)


def test_global_tokens_decide_about_the_form() -> None:
    """Each rank alone would keep rows; together they have more tokens than the sides are wide."""

    def body(rank: int, exchange: Loopback) -> str:
        kfac, model = make(), CASES["words"].model()
        refresh(kfac, model, CASES["words"].data(8), range(rank, 8, 2))
        return kfac.kfac_factors["q"].G.kind

    assert on_threads(2, body) == ["dense", "dense"]


# ---- failures --------------------------------------------------------------------------------------------------------


def outcome(
    rank: int, failing: int, how: str, **options: Any
) -> tuple[str, gramian.KFACNaturalGradient, dict[str, Tensor]]:
    """One good refresh, one where a rank fails, one good one; what was raised in the second, and what came of the last."""
    c = CASES["words"]
    kfac, model, data = make(**options), c.model(), c.data(4)
    rows = list(range(rank, 4, 2))
    refresh(kfac, model, data, rows)
    raised = ""
    try:
        if rank != failing:
            refresh(kfac, model, data, rows)
        elif how == "forward":
            with kfac.capture(model, num_terms=4):
                raise RuntimeError("no such luck")
        elif how == "arguments":
            kfac.capture(model, num_terms=-1)
        elif how == "halfway":
            handle = model.fc.register_forward_hook(lambda *call: (call[-1].register_hook(_fail), None)[1])
            with kfac.capture(model, num_terms=4):
                logits = model(data[0][rows])
                handle.remove()
                with suppress(ZeroDivisionError):
                    logits.sum().backward()  # the head is reached, the layers below it are not
        elif how == "nan":
            with kfac.capture(model, num_terms=4, loss_reduction="sum"):
                (model(data[0][rows]).sum() * float("nan")).backward()
    except (gramian.GramianError, RuntimeError) as error:
        raised = str(error)
    refresh(kfac, model, data, rows)
    return raised, kfac, results(kfac, model)


def _fail(_: Tensor) -> None:
    raise ZeroDivisionError("half-way")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["forward", "arguments"])
def test_an_error_on_one_rank_is_raised_on_all(how: str, failing: int) -> None:
    found = on_threads(2, lambda rank, _: outcome(rank, failing, how, update_freq=1))
    for rank, (raised, kfac, _) in enumerate(found):
        assert raised
        if rank != failing:
            assert raised.startswith(f"process {failing}:") and "\n" not in raised
        assert (kfac.steps, kfac.refreshes) == (3, 2)
    expected = alone("words", 4, {})
    for _, _, after in found:
        assert_equal(after, expected, 1e-10)


@pytest.mark.parametrize(
    "how, failing, reduce", sample([*itertools.product(["halfway", "nan"], [0, 1], REDUCTIONS)], 4)
)
def test_a_spoilt_rank_drops_the_refresh_on_all(how: str, failing: int, reduce: str) -> None:
    def body(rank: int, _: Loopback) -> tuple[str, gramian.KFACNaturalGradient, dict[str, Tensor]]:
        return outcome(rank, failing, how, kfac_distributed_reduce=reduce)

    for raised, kfac, _ in on_threads(2, body):
        assert raised == ""
        assert (kfac.steps, kfac.refreshes) == (3, 2)
        assert [drop["step"] for drop in kfac.dropped] == [1]


def test_a_spoilt_rank_raises_on_all_where_that_is_asked_for() -> None:
    for raised, kfac, _ in on_threads(2, lambda rank, _: outcome(rank, 1, "nan", strict=True)):
        assert "strict=True" in raised and kfac.refreshes == 2


def test_no_backward_on_any_rank_is_the_error_of_one_process() -> None:
    def body(rank: int, _: Loopback) -> None:
        kfac, model = make(), CASES["words"].model()
        with refused("capture", "no backward"), kfac.capture(model, num_terms=1):
            pass
        assert kfac.refreshes == 0 and len(kfac.dropped) == 1

    on_threads(2, body)


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "damping": ({"damping": 0.5}, "damping"),
    "policy": ({"kfac_policy": "auto"}, "kfac_policy"),
    "seed": ({"seed": 5}, "seed"),
}


@pytest.mark.parametrize("difference", [*DIFFERENCES, "model", "step", "head"])
def test_processes_that_differ_are_distinguished(difference: str) -> None:
    options, word = DIFFERENCES.get(
        difference, ({}, {"step": "capture", "model": "model", "head": "head"}.get(difference))
    )

    def body(rank: int, _: Loopback) -> None:
        kfac = make(**(options if rank else {}))
        model = CASES["words" if rank or difference != "model" else "tied"].model()
        kfac.state.steps += rank if difference == "step" else 0
        told = {"head": ["head", "fc"][rank]} if difference == "head" else {}
        with refused(word, "process 1", "expected"):
            refresh(kfac, model, CASES["words"].data(4), range(rank, 4, 2), **told)
        assert kfac.kfac_factors == {} and kfac.dropped

    on_threads(2, body)


def test_a_process_that_cannot_make_its_factors_is_no_reason_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.local()
    plain = build_factors.Builder.remainder

    def remainder(self: Any, *args: Any) -> Any:
        if getattr(slow, "fails", False):
            raise MemoryError("none left")
        return plain(self, *args)

    monkeypatch.setattr(build_factors.Builder, "remainder", remainder)

    def body(rank: int, _: Loopback) -> str:
        slow.fails = rank == 1
        kfac, model = make(kfac_distributed_reduce="gather"), CASES["words"].model()
        try:
            refresh(kfac, model, CASES["words"].data(4), range(rank, 4, 2))
        except (MemoryError, gramian.GramianError) as error:
            assert kfac.kfac_factors == {} and len(kfac.dropped) == 1
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = on_threads(2, body)
    assert second == "MemoryError: none left"
    assert first.startswith("GramianError: process 1: MemoryError")


PLACES = {
    "on entering": (hub.Hub, "attach", "gram"),
    "its word": (token_moments.TokenMoment, "stored_weight", "gram"),
    "rows that are spread": (token_moments.TokenMoment, "row_matrix", "gram"),
    "rows that are gathered": (token_moments.TokenMoment, "row_matrix", "gather"),
    "a matrix": (token_moments.TokenMoment, "product", "dense"),
}


@pytest.mark.parametrize("place", PLACES)
def test_wherever_one_process_fails_no_other_waits(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first collective it is told through the store, from there on the process sends zeros and all raise."""
    owner, name, reduce = PLACES[place]
    here, plain = threading.local(), getattr(owner, name)

    def failing(*args: Any, **told: Any) -> Any:
        if getattr(here, "fails", False):
            raise MemoryError("none left")
        return plain(*args, **told)

    monkeypatch.setattr(owner, name, failing)

    def body(rank: int, _: Loopback) -> tuple[str, dict[str, Tensor]]:
        c = CASES["words"]
        kfac, model, data, rows = make(kfac_distributed_reduce=reduce), c.model(), c.data(4), range(rank, 4, 2)
        here.fails = rank == 1
        with pytest.raises((MemoryError, gramian.GramianError)) as caught:
            refresh(kfac, model, data, rows)
        here.fails = False
        assert (kfac.steps, kfac.refreshes, len(kfac.dropped)) == (1, 0, 1)
        refresh(kfac, model, data, rows)
        return str(caught.value), results(kfac, model)

    expected = alone("words", 4, {})
    for rank, (raised, after) in enumerate(on_threads(2, body)):
        assert raised.startswith("process 1: MemoryError") or (rank == 1 and raised == "none left")
        assert_equal(after, expected, 1e-10)


@pytest.mark.parametrize("what", ["power", "parameters", "order"])
def test_processes_that_ask_for_different_things_raise_together(what: str) -> None:
    def body(rank: int, _: Loopback) -> None:
        kfac, model = make(), CASES["words"].model()
        refresh(kfac, model, CASES["words"].data(4), range(rank, 4, 2))
        asked, power = list(vector(model).items()), -1.0
        if rank == 1:
            power = -0.5 if what == "power" else power
            asked = asked[::-1] if what == "order" else asked[what == "parameters" :]
        with refused("gradients: process 1", "expected the same power"):
            kfac.compute_natural_gradient(model, power=power, gradients=dict(asked))

    on_threads(2, body)


# ---- traps that are put back -----------------------------------------------------------------------------------------

TRAPS: dict[str, tuple[Edit, dict[str, Any]]] = {
    "loss terms of one process": (
        Edit("consistency:agree", 'math.fsum(report["terms"] for report in reports)', 'reports[0]["terms"]'),
        {},
    ),
    "each process's mean taken for that of all": (
        Edit(
            "KFACCapture.pass_info",
            '"mean": mean',
            '"mean": mean * (1 if self.exchange is None else self.exchange.size)',
        ),
        {},
    ),
    "inputs that are never reduced": (
        Edit(
            "Join._take_rows",
            "self.exchange.gather_rows(rows, counts)",
            "rows if bias else self.exchange.gather_rows(rows, counts)",
        ),
        {"kfac_distributed_reduce": "gather"},
    ),
    "dense sides that are never reduced": (
        Edit("Join._total", "self.exchange.sum(total.data.to(dtype))", "total.data.to(dtype)"),
        {"kfac_distributed_reduce": "dense"},
    ),
    "Gram matrices of unrelated tokens added up": (
        Edit(
            "Join._take_rows",
            "self.exchange.reshard(rows, counts)",
            "rows[:, self.exchange.features(total.width)[self._rank]]",
        ),
        {},
    ),
    "processes looked at when the object is made": (
        Edit("refresh_schedule:model_exchange", "return exchange_of(group, device)", "return None"),
        {},
    ),
    "tokens of one process decide about the form": (
        Edit(
            "Join._total", "form = representation(keep, stored if", "form = representation(keep, counts[self._rank] if"
        ),
        {"split": [[0, 1, 2, 3], [4]]},
    ),
    "tokens of the first processes in place of a subset": (
        Edit("Join._subset", "smallest(keys, keep.limit)", "keys[: keep.limit].max()"),
        {"max_tokens": 3},
    ),
    "a subset that is not rescaled": (
        Edit("build_factors:_rescaling", "if total.keep.limit is not None", "if False"),
        {"max_tokens": 3},
    ),
    "ids that every process counts for itself": (
        Edit("kfac_capture:global_ids", "local_B * sharding.size + sharding.rank", "local_B"),
        {"check": "ids"},
    ),
    "draws that every process counts for itself": (
        Edit(
            "fisher_labels:run_pass",
            "likelihood.draw(outputs, seed, samples, draw)",
            "likelihood.draw(outputs, seed, samples.argsort(), draw)",
        ),
        {"check": "draws"},
    ),
}


@pytest.mark.parametrize("name", sample(list(TRAPS), 5, case=lambda name: None))
def test_a_trap_that_is_put_back_turns_a_test_red(name: str) -> None:
    """Research 2A-5, 2A-6, 2A-8, 2D-48: what codes that reduce factors over processes have got wrong."""
    edit, given_ = TRAPS[name]
    options = {key: value for key, value in given_.items() if key not in ("split", "check")}
    split = given_.get("split", [[0, 2], [1, 3]])
    case = "words" if "split" not in given_ else "pictures"

    def check() -> None:
        if given_.get("check") == "ids":
            test_default_ids_are_those_of_samples_dealt_out()
        elif given_.get("check") == "draws":
            test_drawn_labels_belong_to_the_sample("mc", None)
        else:
            for found in together(case, split, options):
                assert_equal(found, expected, 1e-10)

    expected = alone(case, sum(map(len, split)), options)
    check()
    with edit.applied(), pytest.raises((AssertionError, threading.BrokenBarrierError, gramian.GramianError)):
        check()
