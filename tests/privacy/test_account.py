"""The account of several engines, the limit on ε, and the words that stand beside it."""

import copy
import warnings
from typing import Any

import pytest
import torch

import gramian
from gramian.privacy.accounting.accountant import Accounting
from gramian.privacy.accounting.epsilon import epsilon_of
from tests.kit.refusals import refusal
from tests.privacy.poisson_runs import EXPECTED, RECORDS, drawn_steps, flat_of, poisson_run, seeded_engine
from tests.statistics.problems import problem

pytestmark = pytest.mark.few_proofs
RATE, DELTA = EXPECTED / RECORDS, 1e-5


def trained(steps: int, noise: float = 1.0, engine: Any = None) -> gramian.PrivacyEngine:
    p = problem("mlp", RECORDS)
    made = engine or seeded_engine(accountant="rdp")
    with poisson_run(p, p.model(), 1.0, engine=made, noise_multiplier=noise) as run:
        list(drawn_steps(run, p, steps))
    return made


def bound(*runs: Any) -> float:
    return epsilon_of("rdp", runs, DELTA)


# ---- several engines -------------------------------------------------------------------------------------------------------


def test_composed_engines_count_the_releases_of_both_those_made_later_too() -> None:
    first, second = trained(3), trained(2, 2.0)
    second.compose(first)
    assert second.get_epsilon(DELTA) == bound((2.0, RATE, 2), (1.0, RATE, 3)) > first.get_epsilon(DELTA)
    assert second.get_epsilon(DELTA, 1) == bound((2.0, RATE, 1), (1.0, RATE, 3)), "the first of its own"
    assert first.get_epsilon(DELTA) == bound((1.0, RATE, 3)), "the other engine's account is as before"
    trained(2, engine=first)
    assert second.get_epsilon(DELTA) == bound((2.0, RATE, 2), (1.0, RATE, 5))


def test_a_state_has_what_it_is_composed_with_and_gives_way_to_the_engine_itself() -> None:
    first, second = trained(3), trained(2, 2.0)
    second.compose(first)
    saved = copy.deepcopy(second.state_dict())
    again, other = seeded_engine(accountant="rdp"), seeded_engine(accountant="rdp")
    again.load_state_dict(saved)
    assert again.get_epsilon(DELTA) == second.get_epsilon(DELTA)
    other.load_state_dict(first.state_dict())
    trained(1, engine=other)
    again.compose(other)
    assert again.get_epsilon(DELTA) == bound((2.0, RATE, 2), (1.0, RATE, 4)), "once, and with its later releases"


def test_one_account_is_not_counted_twice() -> None:
    first, second, third = (Accounting("rdp") for _ in range(3))
    second.compose(first)
    third.compose(second)
    for one, other in ((second, first), (third, first), (second, third), (first, second), (first, first)):
        with refusal("^compose: this account's releases are in the sum already; expected"):
            one.compose(other)
    assert len(third._accounts()) == 3


def test_a_load_into_the_other_engine_is_seen() -> None:
    first, second = trained(3), trained(2, 2.0)
    fresh = seeded_engine(accountant="rdp")
    second.compose(fresh)
    fresh.load_state_dict(first.state_dict())
    assert second.get_epsilon(DELTA) == bound((2.0, RATE, 2), (1.0, RATE, 3))


def test_states_from_before_accounts_had_names_load() -> None:
    engine = trained(3)
    state = engine.state_dict()
    state["accountant"] = {"mechanism": "rdp", "history": [[1.0, RATE, 3]]}
    again = seeded_engine(accountant="rdp")
    again.load_state_dict(state)
    assert again.accountant.history == engine.accountant.history and again.get_epsilon(DELTA) == bound((1.0, RATE, 3))


def test_only_an_engine_can_be_composed() -> None:
    with refusal("^compose: expected a gramian.PrivacyEngine, got int"):
        seeded_engine(accountant="rdp").compose(3)  # type: ignore[arg-type]


# ---- the limit ---------------------------------------------------------------------------------------------------------------


def test_a_step_past_the_target_is_refused_before_it_begins() -> None:
    p = problem("mlp", RECORDS)
    model, engine = p.model(), seeded_engine(accountant="rdp")
    with poisson_run(p, model, 1.0, engine=engine, noise_multiplier=1.0) as run:
        limit = (bound((1.0, RATE, 5)) + bound((1.0, RATE, 6))) / 2
        engine.limit_epsilon(limit, DELTA)
        list(drawn_steps(run, p, 5))
        before = flat_of(model)
        with refusal(
            r"^target_epsilon: 5 releases are spent, and one more would exceed .*; expected at most 5"
        ) as error:
            list(drawn_steps(run, p, 1))
        assert "\n" not in str(error.value)
        assert engine.steps == 5 and torch.equal(flat_of(model), before)
        assert all(q.grad is None for q in model.parameters()), "no sum without noise is left"


@pytest.mark.parametrize("kind", [("bisr", 6, 4), ("bandmf", 2, 2)])
def test_further_correlated_releases_are_of_the_run_under_way(kind: tuple[str, int, int]) -> None:
    accounting, whole = Accounting("rdp"), Accounting("rdp")
    for one, steps in ((accounting, 6), (whole, 17)):
        one.record(3.0, 0.25, *kind)
        one.set_steps(steps)
    assert accounting.epsilon(DELTA, further=11) == whole.epsilon(DELTA) > accounting.epsilon(DELTA)


def test_the_number_of_releases_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    accounting, asked = Accounting("rdp"), []
    accounting.record(1.0, RATE)
    whole = Accounting.epsilon

    def epsilon(self: Accounting, *args: Any, **given: Any) -> float:
        asked.append(given)
        return whole(self, *args, **given)

    monkeypatch.setattr(Accounting, "epsilon", epsilon)
    from gramian.privacy.accounting.release_limit import ReleaseLimit

    limit, most = ReleaseLimit(bound((1.0, RATE, 40)), DELTA, planned=30), []
    for steps in range(40):
        limit.refuse(accounting)
        most.append(len(asked))
        accounting.set_steps(steps + 1)
    assert most[29] == 0 and 0 < most[30] == most[-1] < 16
    with refusal("^target_epsilon: 40 releases are spent"):
        limit.refuse(accounting)
    other = Accounting("rdp")
    other.record(1.0, RATE)
    other.set_steps(15)
    mine = Accounting("rdp")
    mine.record(1.0, RATE)
    mine.set_steps(25)
    limit.refuse(mine)
    mine.compose(other)
    with refusal("^target_epsilon: 25 releases are spent"):
        limit.refuse(mine)


def test_make_private_with_epsilon_refuses_what_was_not_planned() -> None:
    p = problem("mlp", RECORDS)
    model, engine = p.model(), seeded_engine(accountant="rdp")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*p.batch), batch_size=EXPECTED)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        target_epsilon=3.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0, loss_reduction="sum",
    )  # fmt: skip

    def epoch() -> None:
        for batch in loader:
            optimizer.zero_grad()
            p.case.loss(model, *batch, reduction="sum").backward()
            optimizer.step()

    epoch()
    epoch()
    assert engine.steps == 8
    with refusal(
        "^target_epsilon: 8 releases are spent, and one more would exceed 3 at delta 0.001; expected at most 8"
    ):
        epoch()
    engine.detach()


# ---- δ and adjacency -------------------------------------------------------------------------------------------------------


def test_a_delta_of_one_record_or_more_warns_once_and_adjacency_stands_in_the_plan() -> None:
    p = problem("mlp", RECORDS)
    with poisson_run(p, p.model(), 1.0, engine=seeded_engine(accountant="rdp"), noise_multiplier=1.0) as run:
        list(drawn_steps(run, p, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.engine.get_epsilon(0.9 / RECORDS)
        with pytest.warns(UserWarning, match=f"^delta: .* is not below 1/{RECORDS}, .*; expected a much smaller one"):
            run.engine.get_epsilon(1.0 / RECORDS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.engine.get_epsilon(1.1 / RECORDS)
        assert "adjacency: add or remove one record" in str(run.engine.plan)
