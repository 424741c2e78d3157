"""State of the engine: ε, checkpoints and replays, secrets, and a model that stays the user's."""

import copy
import logging
import math
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramian
from gramian.oracles.clipped_sum import clipped_sum
from tests.kit.matrix import FULL
from tests.kit.refusals import refusal
from tests.privacy.poisson_runs import (
    EXPECTED,
    RECORDS,
    assert_untouched,
    drawn_steps,
    flat_of,
    poisson_run,
    seeded_engine,
)
from tests.privacy.problems import Run, assert_sums, clip_norm, gradients, private, wanted
from tests.statistics.problems import Problem, problem

pytestmark = pytest.mark.few_proofs

# ---- ε ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mechanism", ["prv", "rdp", "gdp"])
def test_epsilon_is_that_of_opacus_for_the_steps_that_were_made(mechanism: str) -> None:
    from opacus.accountants import create_accountant

    p = problem("mlp", RECORDS)
    model, peer = p.model(), create_accountant(mechanism)
    options = {"noise_multiplier": 1.1, "max_physical_batch": 3, "engine": seeded_engine(accountant=mechanism)}
    with poisson_run(p, model, 1.0, **options) as run:
        assert run.engine.get_epsilon(delta=1e-5) == 0.0
        for _ in drawn_steps(run, p, 5):
            peer.step(noise_multiplier=1.1, sample_rate=EXPECTED / RECORDS)
        assert run.engine.get_epsilon(delta=1e-5) == pytest.approx(peer.get_epsilon(delta=1e-5), rel=1e-6)
        assert (run.engine.steps, run.engine.sample_rate, run.engine.expected_batch) == (
            5,
            EXPECTED / RECORDS,
            EXPECTED,
        )
    assert run.engine.get_epsilon(delta=1e-5) == pytest.approx(
        peer.get_epsilon(delta=1e-5), rel=1e-6
    )  # the account outlives detach()


def test_without_noise_epsilon_is_infinite() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with poisson_run(p, model, 1.0) as run:
        next(drawn_steps(run, p, 1))
        assert run.engine.get_epsilon(delta=1e-5) == math.inf


@pytest.mark.parametrize("mechanism", ["prv", "rdp"] if FULL else ["rdp"])
def test_make_private_with_epsilon_ends_at_its_target(mechanism: str) -> None:
    p = problem("mlp", RECORDS)
    model, engine = p.model(), seeded_engine(accountant=mechanism)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(RECORDS), *p.batch), batch_size=EXPECTED
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=3.0, target_delta=1e-4, epochs=2,
        max_grad_norm=1.0, loss_reduction="sum",
    )  # fmt: skip
    assert made[0] is model and made[1] is optimizer and engine.noise_multiplier > 0.5
    run = Run(engine, *made)
    for _ in range(2):
        for _, *batch in run.loader:
            optimizer.zero_grad()
            p.case.loss(model, *batch, reduction="sum").backward()
            optimizer.step()
    assert engine.steps == 2 * RECORDS // EXPECTED
    assert 2.9 < engine.get_epsilon(delta=1e-4) <= 3.0
    engine.detach()


# ---- state -----------------------------------------------------------------------------------------------------------------


def _trained_on(p: Problem, engine: gramian.PrivacyEngine, model: nn.Module, steps: int) -> Tensor:
    with poisson_run(p, model, clip_norm(p), engine=engine, noise_multiplier=1.0, max_physical_batch=4) as run:
        list(drawn_steps(run, p, steps))
    return flat_of(model)


def test_a_replay_from_a_checkpoint_is_the_same_release_bit_for_bit_and_counts_once() -> None:
    p = problem("mlp", RECORDS)
    first, model = gramian.PrivacyEngine(), p.model()
    _trained_on(p, first, model, 2)
    saved, at = copy.deepcopy(first.state_dict()), copy.deepcopy(model)
    went_on = _trained_on(p, first, model, 2)
    again = gramian.PrivacyEngine()
    again.load_state_dict(saved, replay=True)
    assert torch.equal(_trained_on(p, again, at, 2), went_on)
    assert again.steps == first.steps == 4
    assert again.get_epsilon(1e-5) == first.get_epsilon(1e-5)


def test_a_state_loaded_after_make_private_draws_and_noises_with_its_own_key() -> None:
    p = problem("mlp", RECORDS)
    first, model = gramian.PrivacyEngine(), p.model()
    _trained_on(p, first, model, 1)
    saved, at = copy.deepcopy(first.state_dict()), copy.deepcopy(model)
    went_on = _trained_on(p, first, model, 2)
    again = gramian.PrivacyEngine()
    with poisson_run(p, at, clip_norm(p), engine=again, noise_multiplier=1.0, max_physical_batch=4) as run:
        again.load_state_dict(saved, replay=True)
        list(drawn_steps(run, p, 2))
    assert torch.equal(flat_of(at), went_on) and again.steps == 3


def test_a_replay_in_the_same_process_is_bit_for_bit_the_same_and_refunds_nothing() -> None:
    p = problem("mlp", RECORDS)
    engine, model = gramian.PrivacyEngine(), p.model()
    with poisson_run(p, model, clip_norm(p), engine=engine, noise_multiplier=1.0) as run:
        next(drawn_steps(run, p, 1))
        saved, kept = engine.state_dict(), copy.deepcopy(model.state_dict())
        drawn = list(drawn_steps(run, p, 2))
        went_on = flat_of(model)
        model.load_state_dict(kept)
        engine.load_state_dict(saved, replay=True)
        assert engine.steps == 3  # never lower
        assert list(_steps_by_release(run, p, 2)) == drawn
        assert torch.equal(flat_of(model), went_on)
        assert engine.steps == 3


def _steps_by_release(run: Run, p: Problem, count: int) -> Iterator[list[int]]:
    """As `_steps`, but for a replay, in which `engine.steps` stands still: pieces are whole draws."""
    for _, (ids, *batch) in zip(range(count), run.loader, strict=False):
        run.optimizer.zero_grad()
        p.case.loss(run.model, *batch, reduction="sum").backward()
        run.optimizer.step()
        yield ids.tolist()


def test_without_replay_noise_and_draws_are_new_and_steps_never_fall() -> None:
    p = problem("mlp", RECORDS)
    engine, model = gramian.PrivacyEngine(), p.model()
    with poisson_run(p, model, clip_norm(p), engine=engine, noise_multiplier=1.0) as run:
        next(drawn_steps(run, p, 1))
        saved, kept = engine.state_dict(), copy.deepcopy(model.state_dict())
        drawn = list(drawn_steps(run, p, 2))
        went_on, spent = flat_of(model), engine.get_epsilon(1e-5)
        engine.load_state_dict(saved)
        model.load_state_dict(kept)
        assert engine.steps == 3 and engine.get_epsilon(1e-5) == spent
        other = list(drawn_steps(run, p, 2))
        assert engine.steps == 5 and engine.get_epsilon(1e-5) > spent
    assert other != drawn
    assert not (flat_of(model) == went_on).any()


def test_a_bound_counter_survives_a_lost_process(tmp_path: Any) -> None:
    p = problem("mlp", RECORDS)
    first, model = gramian.PrivacyEngine(), p.model()
    first.bind_counter(str(tmp_path / "releases.json"))
    _trained_on(p, first, model, 1)
    saved = copy.deepcopy(first.state_dict())
    _trained_on(p, first, model, 2)
    second = gramian.PrivacyEngine()
    second.load_state_dict(saved)
    second.bind_counter(str(tmp_path / "releases.json"), must_exist=True)
    assert second.steps == 3 and second.get_epsilon(1e-5) == first.get_epsilon(1e-5)
    _trained_on(p, second, p.model(), 1)
    assert second.steps == 4


def test_a_state_in_the_middle_of_a_draw_is_refused() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with poisson_run(p, model, 1.0, max_physical_batch=1) as run:
        for _, *batch in run.loader:
            p.case.loss(model, *batch, reduction="sum").backward()
            run.optimizer.step()
            if len(batch[0]) and not run.engine.steps:
                break
        with refusal("state_dict: a draw is under way"):
            run.engine.state_dict()


@pytest.mark.parametrize("state", [{}, {"schema": 99}, [], None])
def test_a_foreign_state_is_refused(state: Any) -> None:
    engine = gramian.PrivacyEngine()
    with refusal(r"state: expected what engine.state_dict\(\) gave"):
        engine.load_state_dict(state)


def test_rolling_back_noise_never_meets_another_sum() -> None:
    """The noise of a release is a function of its number alone: on other data the number must be another one."""
    p = problem("mlp", RECORDS)
    engine, model = seeded_engine(), p.model()
    with private(model, 1.0, engine=engine, noise_multiplier=1.0) as run:
        noises = []
        for part in (slice(0, 4), slice(4, 8)):
            saved = engine.state_dict()
            run.optimizer.zero_grad()
            p.backward(model, p.rows(part))
            clean = gradients(model)
            run.optimizer.step()
            noises.append(torch.cat([(g * 4 - clean[key]).flatten() for key, g in gradients(model).items()]))
            engine.load_state_dict(saved)  # rolled back, with other data to follow
    assert float((noises[0] - noises[1]).abs().min()) > 0
    assert engine.steps == 2


# ---- secrets ---------------------------------------------------------------------------------------------------------------


def test_the_key_is_in_no_repr_log_warning_or_plan(caplog: pytest.LogCaptureFixture) -> None:
    p = problem("mlp", RECORDS)
    engine, model = gramian.PrivacyEngine(), p.model()
    key = bytes(engine.state_dict()["secrets"]["key"].tolist())
    with (
        caplog.at_level(logging.DEBUG),
        warnings.catch_warnings(record=True) as said,
        poisson_run(p, model, 1.0, engine=engine, noise_multiplier=1.0) as run,
    ):
        list(drawn_steps(run, p, 2))
        shown = [repr(engine), str(engine), str(engine.plan), repr(run.loader), repr(model), repr(run.optimizer)]
        shown += [repr(value) for value in vars(engine).values()]
        parts = (engine._model, engine._model.step, engine._model.sums, engine._model.clipping, run.loader)
        shown += [repr(value) for owner in parts for value in vars(owner).values()]
        shown += [str(run.optimizer.state_dict()), str(list(model.state_dict())), caplog.text, *map(str, said)]
        subkeys = [key, engine._ledger.secrets.noise_key, engine._ledger.secrets.sampling_key]
    for secret in subkeys:
        forms = (secret.hex(), repr(secret), str(list(secret)), str(list(secret))[1:-1])
        assert not any(form in text for form in forms for text in shown)


def test_two_engines_have_two_keys_and_the_insecure_one_is_recorded() -> None:
    one, other = (gramian.PrivacyEngine().state_dict()["secrets"] for _ in range(2))
    assert not torch.equal(one["key"], other["key"]) and not one["insecure_reproducible"]
    assert seeded_engine().state_dict()["secrets"]["insecure_reproducible"]
    with refusal("seed: a seed gives no secret"):
        gramian.PrivacyEngine(seed=3)


# ---- the model stays the user's ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, 1])
def test_detach_gives_model_and_optimizer_back_as_they_were(physical: int | None) -> None:
    p = problem("tied_gpt", 3)
    model, plain = p.model(), p.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with private(model, 1e-3, optimizer=optimizer, max_physical_batch=physical) as run:
        assert run.model is model and run.optimizer is optimizer
        p.backward(model, p.rows([0]))
        optimizer.zero_grad()
        assert run.engine.detach() is model
    assert_untouched(model, optimizer)
    p.backward(model, p.batch)
    p.backward(plain, p.batch)
    assert all(torch.equal(g, h) for g, h in zip(gradients(model).values(), gradients(plain).values(), strict=True))
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(flat_of(model), flat_of(plain))
    with private(model, 1.0):  # once more
        p.backward(model, p.rows([1]))


def test_a_refused_model_is_left_untouched() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gramian.GramianError), private(model, 1.0, optimizer=optimizer, loss_reduction="avg"):
        pass
    assert_untouched(model, optimizer)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_not_private_and_state_is_unchanged(how: str) -> None:
    p = problem("mlp", 3)
    model, plain = p.model(), p.model()
    with private(model, 1e-3):
        assert list(model.state_dict()) == list(plain.state_dict()) and type(model) is type(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        p.backward(twin, p.batch)
        p.backward(plain, p.batch)
        assert all(torch.equal(g, h) for g, h in zip(gradients(twin).values(), gradients(plain).values(), strict=True))
        plain.load_state_dict(model.state_dict())
        model.load_state_dict(plain.state_dict())


def test_evaluation_inside_training_changes_nothing() -> None:
    p = problem("mlp", 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit) as run:
        with torch.no_grad():
            expected = p.model()(p.batch[0])
            assert torch.equal(model(p.batch[0]), expected)
        p.backward(model, p.batch)
        with torch.no_grad():
            model(p.batch[0][:2])
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)


def test_norms_can_be_captured_on_a_private_model() -> None:
    p = problem("mlp", 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit) as run:
        with gramian.per_sample_norms(model) as norms:
            p.backward(model, p.batch)
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)
    torch.testing.assert_close(norms.values, p.norms(), rtol=1e-9, atol=0)


def test_a_hugging_face_batch_by_keyword() -> None:
    p = problem("hf_gpt2", 4)
    limit, model = clip_norm(p), p.model()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1).mean()

    want = clipped_sum(model, loss, (p.batch[0],), limit)
    with private(model, limit) as run:
        loss(model, p.batch[0]).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)
