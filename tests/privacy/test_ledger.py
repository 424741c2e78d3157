"""Which key and which numbers the releases after a load, a refusal or a detach get."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramian

X_BI = torch.arange(160.0).reshape(32, 5) / 160


class Trial:
    """An engine and, once it is private, one linear layer whose steps show the noise of their release."""

    def __init__(self) -> None:
        self.engine = gramian.PrivacyEngine("rdp")

    def make_private(self, x_BI: Tensor = X_BI, noise_multiplier: float = 1.0, clipping: str = "auto") -> "Trial":
        self.model = nn.Linear(5, 3)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(x_BI), batch_size=8),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1e-6,
            clipping=clipping,
        )
        return self

    def noises(self, steps: int) -> list[Tensor]:
        """Of so many releases, in units of σ·C: the clipped sums of at most 32 samples are next to nothing beside it."""
        found = []
        for _, (x_BI,) in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            (0.0 * self.model(x_BI).sum()).backward()
            self.optimizer.step()
            assert self.model.weight.grad is not None
            found.append(self.model.weight.grad * 8 / (1e-6 * self.engine.noise_multiplier))
        return found


def alike(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-3)


def past_run(folder: Path) -> tuple[Path, dict[str, Any], list[Tensor]]:
    """The counter file of a run, its state before the first step, and the noises of three steps."""
    trial, path = Trial(), folder / "releases.json"
    trial.engine.bind_counter(path)
    trial.make_private()
    saved = copy.deepcopy(trial.engine.state_dict())
    return path, saved, trial.noises(3)


@pytest.fixture
def before(tmp_path: Path) -> tuple[Path, dict[str, Any], list[Tensor]]:
    return past_run(tmp_path)


def replaying(before: tuple[Path, dict[str, Any], list[Tensor]]) -> Trial:
    trial = Trial()
    trial.engine.bind_counter(before[0], must_exist=True)
    trial.engine.load_state_dict(before[1], replay=True)
    return trial


@pytest.mark.parametrize("other", [{"noise_multiplier": 2.0}, {"x_BI": X_BI + 1}], ids=["options", "data"])
def test_a_refused_replay_stays_refused_until_it_is_one(before: Any, other: dict[str, Any]) -> None:
    trial = replaying(before)
    for _ in range(3):
        with pytest.raises(gramian.GramianError, match="replay: .* is not what it was"):
            trial.make_private(**other)
    kept = trial.engine.state_dict()
    third = Trial()
    third.engine.load_state_dict(kept, replay=True)  # the demand travels with the state
    with pytest.raises(gramian.GramianError, match="replay: .* is not what it was"):
        third.make_private(**other)
    trial.make_private()
    assert all(map(alike, trial.noises(2), before[2]))
    assert trial.engine.steps == 3


@pytest.mark.parametrize("other", [{"noise_multiplier": 2.0}, {"x_BI": X_BI + 1}], ids=["options", "data"])
def test_after_a_refused_replay_a_resume_has_new_noise_and_is_counted(before: Any, other: dict[str, Any]) -> None:
    trial = replaying(before)
    with pytest.raises(gramian.GramianError, match="replay: .* is not what it was"):
        trial.make_private(**other)
    trial.engine.load_state_dict(before[1])
    noises = trial.make_private(**other).noises(2)
    assert not any(alike(new, old) for new in noises for old in before[2])
    assert trial.engine.steps == 5


def test_a_replay_survives_a_make_private_that_failed_for_another_reason(before: Any) -> None:
    trial = replaying(before)
    refused = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    with pytest.raises(gramian.GramianError, match="BatchNorm|replay"):
        trial.engine.make_private(
            module=refused,
            optimizer=torch.optim.SGD(refused.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(X_BI), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1e-6,
        )
    assert all(map(alike, trial.make_private().noises(3), before[2]))


@pytest.mark.parametrize("replayed", [0, 2])
@pytest.mark.parametrize("bound", [True, False])
def test_a_replay_ends_with_detach(before: Any, replayed: int, bound: bool) -> None:
    trial = Trial()
    if bound:
        trial.engine.bind_counter(before[0], must_exist=True)
    trial.engine.load_state_dict(before[1], replay=True)
    assert all(map(alike, trial.make_private().noises(replayed), before[2]))
    trial.engine.detach()
    spent = 3 if bound else replayed
    assert trial.engine.released == trial.engine.steps == spent
    if bound:
        trial.make_private(X_BI + 1)
    else:
        with pytest.warns(UserWarning, match="expected bind_counter"):
            trial.make_private(X_BI + 1)
    noises = trial.noises(2)
    assert not any(alike(new, old) for new in noises for old in before[2])
    assert trial.engine.steps == spent + 2


def test_an_ordinary_detach_keeps_key_and_numbers() -> None:
    trial = Trial().make_private()
    trial.noises(2)
    state = trial.engine.state_dict()
    trial.engine.detach()
    after = trial.engine.state_dict()
    assert torch.equal(state["secrets"]["key"], after["secrets"]["key"]) and state["counter"] == after["counter"]


def test_a_counter_may_be_bound_after_a_replay_was_loaded(before: Any) -> None:
    trial = Trial()
    trial.engine.load_state_dict(before[1], replay=True)
    trial.engine.bind_counter(before[0], must_exist=True)
    assert (trial.engine.released, trial.engine.steps) == (0, 3)
    assert all(map(alike, trial.make_private().noises(3), before[2]))
    assert trial.engine.steps == 3


def test_a_state_that_no_options_belong_to_cannot_be_replayed(before: Any) -> None:
    resumed = Trial()
    resumed.engine.load_state_dict(before[1])
    for engine in (gramian.PrivacyEngine("rdp"), resumed.engine):
        with pytest.raises(gramian.GramianError, match="replay: the state does not say what followed it"):
            Trial().engine.load_state_dict(engine.state_dict(), replay=True)


def test_a_state_without_a_kind_is_loaded_into_a_private_engine(tmp_path: Path) -> None:
    (tmp_path / "releases.json").write_text(json.dumps({"begun": 3}))
    other = gramian.PrivacyEngine("rdp")
    other.bind_counter(tmp_path / "releases.json")
    trial = Trial().make_private()
    with pytest.warns(UserWarning, match="expected bind_counter"):
        trial.engine.load_state_dict(other.state_dict())
    assert trial.engine.steps == 3 and trial.engine.get_epsilon(1e-5) > 0


# ---- damaged states --------------------------------------------------------------------------------------------------------

DROPPED = object()
ODD = (DROPPED, None, "x", -1, 1.5, True, [], {}, [1], {"a": None}, torch.zeros(3), float("nan"))


def harmless(at: tuple[Any, ...], value: Any) -> bool:
    """What nobody reads, what cannot be told from a right value, and marks that `make_private` compares."""
    history = ("accountant", "history")  # may be empty where only the counter knew of releases
    flag = ("secrets", "insecure_reproducible")
    plausible = ((history, []), ((*history, 0), DROPPED), ((*history, 0, 0), 1.5), (flag, True))
    read_later = at[0] == "config" and (value is DROPPED or value == {})
    return at == ("accountant", "mechanism") or read_later or any(at == a and value == v for a, v in plausible)


def places(state: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in a state, at every depth."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def damaged(state: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    inside: Any = state
    for key in at[:-1]:
        inside = inside[key]
    if value is DROPPED:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    return state


@pytest.mark.filterwarnings("ignore:state. steps begun")
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_damaged_state_is_one_line_and_changes_nothing(before: Any, replay: bool, is_open: bool) -> None:
    """Every field dropped, and replaced by values of other types; what is loaded nevertheless has lost nothing."""
    saver = Trial()
    saver.engine.bind_counter(before[0], must_exist=True)
    saver.make_private().noises(2)
    state = saver.engine.state_dict()
    trial = Trial().make_private() if is_open else Trial()
    untouched = copy.deepcopy(trial.engine.state_dict())
    cases = [(at, value) for at in places(state) for value in ODD]
    refused = 0
    for at, value in cases:
        try:
            trial.engine.load_state_dict(damaged(state, at, value), replay=replay)
        except gramian.GramianError as problem:
            assert "\n" not in str(problem) and "expected" in str(problem), (at, value)
            assert repr(trial.engine.state_dict()) == repr(untouched), (at, value)
            refused += 1
        else:
            assert harmless(at, value), (at, value)
            if at[0] == "config" and replay:
                assert not is_open
                with pytest.raises(gramian.GramianError, match="replay: .* is not what it was"):
                    trial.make_private()
            trial = Trial().make_private() if is_open else Trial()
            untouched = copy.deepcopy(trial.engine.state_dict())
    assert refused > 100


def test_after_a_refused_state_the_key_is_the_engines_own(before: Any) -> None:
    trial = Trial()
    with pytest.raises(gramian.GramianError, match="release counter"):
        trial.engine.load_state_dict({**before[1], "counter": {}})
    noises = trial.make_private(X_BI + 1).noises(2)
    assert not any(alike(new, old) for new in noises for old in before[2])


def test_a_counter_file_that_cannot_be_read_leaves_the_engine_as_it_was(before: Any) -> None:
    trial = Trial()
    trial.engine.bind_counter(before[0], must_exist=True)
    untouched = repr(trial.engine.state_dict())
    before[0].write_text("{")
    for replay in (False, True):
        with pytest.raises(gramian.GramianError, match="damaged"):
            trial.engine.load_state_dict(before[1], replay=replay)
        assert repr(trial.engine.state_dict()) == untouched


def test_a_guessable_key_is_not_taken_over_by_an_engine_with_a_secret_one() -> None:
    state = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=1).state_dict()
    engine = gramian.PrivacyEngine("rdp")
    key = engine.state_dict()["secrets"]["key"]
    with pytest.raises(
        gramian.GramianError, match="^insecure_reproducible: .*; expected the state of a run with a secret key"
    ):
        engine.load_state_dict(state)
    assert torch.equal(engine.state_dict()["secrets"]["key"], key)
