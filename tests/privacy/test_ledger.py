"""Which key and which numbers the releases after a load, a refusal or a detach get."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.kernels.normal_tail import NORMALS_VERSION
from gramian.privacy.audit.weights_digest import FIELDS
from tests.kit.private import attach
from tests.kit.refusals import refusal
from tests.privacy.test_secrets import in_child

pytestmark = pytest.mark.few_proofs

X_BI = torch.arange(160.0).reshape(32, 5) / 160


class Trial:
    """An engine and, once it is private, one linear layer whose steps show the noise of their release."""

    def __init__(self) -> None:
        self.engine = gramian.PrivacyEngine("rdp")

    def make_private(self, x_BI: Tensor = X_BI, noise_multiplier: float = 1.0, clipping: str = "auto") -> "Trial":
        self.model = nn.Linear(5, 3)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        _, self.optimizer, self.loader = attach(
            self.engine, self.model, DataLoader(TensorDataset(x_BI), batch_size=8),
            optimizer=torch.optim.SGD(self.model.parameters(), lr=1.0), noise_multiplier=noise_multiplier,
            max_grad_norm=1e-6, clipping=clipping, poisson_sampling=True,
        )  # fmt: skip
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
        with refusal("replay: .* is not what it was"):
            trial.make_private(**other)
    kept = trial.engine.state_dict()
    third = Trial()
    third.engine.load_state_dict(kept, replay=True)  # the demand travels with the state
    with refusal("replay: .* is not what it was"):
        third.make_private(**other)
    trial.make_private()
    assert all(map(alike, trial.noises(2), before[2]))
    assert trial.engine.steps == 3


@pytest.mark.parametrize("other", [{"noise_multiplier": 2.0}, {"x_BI": X_BI + 1}], ids=["options", "data"])
def test_after_a_refused_replay_a_resume_has_new_noise_and_is_counted(before: Any, other: dict[str, Any]) -> None:
    trial = replaying(before)
    with refusal("replay: .* is not what it was"):
        trial.make_private(**other)
    trial.engine.load_state_dict(before[1])
    noises = trial.make_private(**other).noises(2)
    assert not any(alike(new, old) for new in noises for old in before[2])
    assert trial.engine.steps == 5


def test_a_replay_survives_a_make_private_that_failed_for_another_reason(before: Any) -> None:
    trial = replaying(before)
    refused = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    with refusal("BatchNorm|replay"):
        attach(
            trial.engine,
            refused,
            DataLoader(TensorDataset(X_BI), batch_size=8),
            optimizer=torch.optim.SGD(refused.parameters(), lr=1.0),
            max_grad_norm=1e-6,
            poisson_sampling=True,
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
        with refusal("replay: the state does not say what followed it"):
            Trial().engine.load_state_dict(engine.state_dict(), replay=True)


def test_a_state_without_a_kind_is_loaded_into_a_private_engine(tmp_path: Path) -> None:
    (tmp_path / "releases.json").write_text(json.dumps({"begun": 3}))
    other = gramian.PrivacyEngine("rdp")
    other.bind_counter(tmp_path / "releases.json")
    trial = Trial().make_private()
    with pytest.warns(UserWarning, match="expected bind_counter"):
        trial.engine.load_state_dict(other.state_dict())
    assert trial.engine.steps == 3 and trial.engine.get_epsilon(1e-5) > 0


# ---- replays on other weights, or by another generator ---------------------------------------------------------------------


class Changing(nn.Module):
    """One linear layer whose steps show the noise of their release, a buffer and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.register_buffer("buffer", torch.arange(3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.linear(x_BI.bfloat16()) * 0.0


CHANGES = {
    "weight": lambda model, optimizer: model.linear.weight.data[2, 1].neg_(),
    "bias": lambda model, optimizer: model.linear.bias.data.add_(1.0),
    "frozen": lambda model, optimizer: model.frozen.data[1].mul_(1 + 2**-52),
    "buffer": lambda model, optimizer: model.buffer.copy_(model.buffer.flip(0)),
    "momentum": lambda model, optimizer: optimizer.state[model.linear.bias]["momentum_buffer"].zero_(),
    "no momentum": lambda model, optimizer: optimizer.state.clear(),
}


def changing(state: dict[str, Any] | None, early: bool, path: Path, change: str | None = None) -> tuple[Any, ...]:
    """Engine, model, optimizer and loader: new ones with a step, or those of a state, changed before it is replayed."""
    torch.manual_seed(0)
    model, engine = Changing(), gramian.PrivacyEngine("rdp")
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.0, momentum=0.9)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if change is not None:
            CHANGES[change](model, optimizer)
        engine.bind_counter(path, must_exist=True)
    if state is not None and early:
        engine.load_state_dict(state["engine"], replay=True)
    _, _, loader = attach(
        engine, model, DataLoader(TensorDataset(X_BI), batch_size=8), optimizer=optimizer, poisson_sampling=True
    )
    if state is not None and not early:
        engine.load_state_dict(state["engine"], replay=True)
    return engine, model, optimizer, loader


def releases(made: tuple[Any, ...], count: int) -> list[Tensor]:
    _, model, optimizer, loader = made
    found = []
    for _, (x_BI,) in zip(range(count), loader, strict=False):
        optimizer.zero_grad()
        model(x_BI).sum().backward()
        optimizer.step()
        found.append(model.linear.weight.grad.clone())
    return found


def changing_run(folder: Path) -> tuple[Path, dict[str, Any], list[Tensor]]:
    """A counter file, a state after one step of two, and the release that followed it."""
    made, path = changing(None, False, folder), folder / "releases.json"
    engine, model, optimizer, _ = made
    engine.bind_counter(path)
    releases(made, 1)
    parts = {"engine": engine, "model": model, "optimizer": optimizer}
    state = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
    return path, state, releases(made, 1)


@pytest.mark.parametrize("early", [True, False])
def test_a_replay_on_the_same_weights_is_one(tmp_path: Path, early: bool) -> None:
    path, state, before = changing_run(tmp_path)
    made = changing(state, early, path)
    made[1].cache.fill_(7.0)  # not in model.state_dict(), so nobody can bring it back
    assert torch.equal(releases(made, 1)[0], before[0])
    assert made[0].steps == 2 and made[0].not_replayed is None


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_replayed_on_other_weights(tmp_path: Path, change: str, early: bool) -> None:
    path, state, before = changing_run(tmp_path)
    with pytest.warns(UserWarning, match="^replay: weights, optimizer state or .*; nothing is replayed"):
        made = changing(state, early, path, change)
    engine = made[0]
    assert engine.released == engine.steps == 2, "past every step begun"
    assert "weights" in engine.not_replayed
    (noise,) = releases(made, 1)
    assert engine.steps == 3 and not (noise == before[0]).any()


@pytest.mark.parametrize("field", ["processes", "digest"])
def test_nothing_is_replayed_on_another_number_of_processes(tmp_path: Path, field: str) -> None:
    path, state, _ = changing_run(tmp_path)
    state["engine"]["weights"][FIELDS.index(field)] += 1
    with pytest.warns(UserWarning, match="^replay: .* number of processes, .* are not those of the state; nothing"):
        made = changing(state, False, path)
    assert made[0].released == made[0].steps == 2


def test_a_state_of_another_processes_shards_says_nothing_of_ours(tmp_path: Path) -> None:
    path, state, before = changing_run(tmp_path)
    state["engine"]["weights"][FIELDS.index("process")] += 1
    state["engine"]["weights"][FIELDS.index("digest")] += 1
    assert torch.equal(releases(changing(state, False, path), 1)[0], before[0])


def test_a_forked_process_takes_no_step_and_the_parent_goes_on() -> None:
    trial = Trial().make_private()
    assert re.match("engine: its key belongs to process .* this one was forked", in_child(lambda: trial.noises(1)))
    unopened = Trial()
    assert re.match("engine: its key belongs to process .* this one was forked", in_child(unopened.make_private))
    assert in_child(lambda: Trial().make_private() and None) == "fine"
    trial.noises(1)
    assert trial.engine.steps == 1


def test_weights_that_change_between_the_load_and_the_first_step_are_refused(tmp_path: Path) -> None:
    path, state, _ = changing_run(tmp_path)
    made = changing(state, False, path)
    CHANGES["weight"](made[1], made[2])
    with refusal("^replay: the weights were changed after load_state_dict; expected"):
        releases(made, 1)
    assert made[0].steps == 2
    made[0].load_state_dict(state["engine"])
    releases(made, 1)
    assert made[0].steps == 3


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("generator", [None, 1, 3])
def test_noise_of_another_generator_is_not_replayed(tmp_path: Path, generator: int | None, early: bool) -> None:
    path, state, before = changing_run(tmp_path)
    assert state["engine"].pop("generator") == NORMALS_VERSION
    if generator is not None:
        state["engine"]["generator"] = generator
    with pytest.warns(UserWarning, match=f"^replay: its noise is of generator {generator or 1}, .*nothing is replayed"):
        made = changing(state, early, path)
    assert made[0].released == made[0].steps == 2 and "generator" in made[0].not_replayed
    assert (releases(made, 1)[0] == before[0]).double().mean() < 0.5  # in bfloat16 some are equal by chance


# ---- damaged states --------------------------------------------------------------------------------------------------------

DROPPED = object()
ODD = (DROPPED, None, "x", -1, 1.5, True, [], {}, [1], {"a": None}, torch.zeros(3), float("nan"))


def harmless(at: tuple[Any, ...], value: Any) -> bool:
    """What nobody reads, what cannot be told from a right value, and marks that `make_private` compares."""
    history = ("accountant", "history")  # may be empty where only the counter knew of releases
    flag, drawn = ("secrets", "insecure_reproducible"), ("chain", "runs", 0, 0, "poisson_sampling")
    plausible: Any = ((history, []), ((*history, 0), DROPPED), ((*history, 0, 0), 1.5), (flag, True), (drawn, True))
    names = ((("accountant", "account"), DROPPED),)  # states of old versions have none
    plausible = (*plausible, *names, (("accountant", "composed"), DROPPED), (("accountant", "composed"), {}))
    plausible = (*plausible, *((("clip_norm",), value) for value in (DROPPED, None, 1.5)))  # of adaptive clipping alone
    plausible = (*plausible, *((("metric",), value) for value in (DROPPED, None)))  # of runs in a metric alone
    older = at in (("chain",), ("signing",)) and value is DROPPED  # so have these
    no_replay = older or at == ("generator",) and value is DROPPED or at == ("weights",) and value in (DROPPED, None)
    read_later = no_replay or at[0] == "config" and (value is DROPPED or value == {})
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


@pytest.mark.filterwarnings("ignore:state. steps begun", "ignore:replay. ")
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
                with refusal("replay: .* is not what it was"):
                    trial.make_private()
            trial = Trial().make_private() if is_open else Trial()
            untouched = copy.deepcopy(trial.engine.state_dict())
    assert refused > 100


def test_after_a_refused_state_the_key_is_the_engines_own(before: Any) -> None:
    trial = Trial()
    with refusal("release counter"):
        trial.engine.load_state_dict({**before[1], "counter": {}})
    noises = trial.make_private(X_BI + 1).noises(2)
    assert not any(alike(new, old) for new in noises for old in before[2])


def test_a_counter_file_that_cannot_be_read_leaves_the_engine_as_it_was(before: Any) -> None:
    trial = Trial()
    trial.engine.bind_counter(before[0], must_exist=True)
    untouched = repr(trial.engine.state_dict())
    before[0].write_text("{")
    for replay in (False, True):
        with refusal("damaged"):
            trial.engine.load_state_dict(before[1], replay=replay)
        assert repr(trial.engine.state_dict()) == untouched


def test_a_guessable_key_is_not_taken_over_by_an_engine_with_a_secret_one() -> None:
    state = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=1).state_dict()
    engine = gramian.PrivacyEngine("rdp")
    key = engine.state_dict()["secrets"]["key"]
    with refusal("^insecure_reproducible: .*; expected the state of a run with a secret key"):
        engine.load_state_dict(state)
    assert torch.equal(engine.state_dict()["secrets"]["key"], key)
