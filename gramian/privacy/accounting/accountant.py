"""How much privacy was spent: a history of steps and its ε.

The steps are not counted here: `ReleaseCounter.spent`, the number of releases (noised sums) begun, is passed in, so a replay
counts once and nothing is refunded.
"""

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from gramian.core.errors import GramianError
from gramian.privacy.accounting.epsilon import MECHANISMS, History, Run, check_installed, epsilon_of
from gramian.privacy.noise.noise_strategy import CORRELATED

Kind = tuple[float, float] | tuple[float, float, int, int] | tuple[float, float, str, int, int]
"""What a step spends: (noise multiplier, sample rate), and for truncated Poisson draws also (records, largest draw), for
correlated noise (its name, bands, groups)."""

FACTS = {2: (), 4: ("records", "max_draw"), 5: ("noise", "bands", "groups")}
"""Names of what a kind has beside noise multiplier and sample rate, by its length."""


class Accounting:
    """Steps of a private run, grouped in runs of equal kind, and their ε.

    The mechanisms "prv" (numerical composition) and "pld" (privacy loss distributions) are upper bounds that are tight to about
    a hundredth and some thousandths of ε; "rdp" is a looser upper bound; "gdp" rests on a central limit theorem, can lie below
    the truth and is for comparison only: `approximate` is then True, with a warning. Where the bound of "rdp" exceeds 200,
    "prv" and "pld" return it instead of their own, with a warning. All are for the Poisson-subsampled Gaussian mechanism under
    add/remove of one record, "pld" for truncated draws too. Another mechanism raises a `GramianError`, as does a machine
    without the library that computes it.
    """

    def __init__(self, mechanism: str = "prv") -> None:
        _check_mechanism(mechanism)
        check_installed(mechanism)  # said before a step is made, not after
        self.mechanism = mechanism
        self.account = os.urandom(8).hex()
        """Name by which this account is known where it is composed with others; it comes back with a state."""
        self._history: list[Run] = []
        self._composed: dict[str, Accounting] = {}
        self._stored = False  # True for what a state had of another account: its history stays as it is
        if self.approximate:
            warnings.warn(
                "accountant: gdp is an approximation that can understate epsilon; expected prv or rdp for a guarantee",
                stacklevel=2,
            )

    @property
    def approximate(self) -> bool:
        """True if ε is an approximation instead of an upper bound."""
        return self.mechanism == "gdp"

    @property
    def history(self) -> History:
        """(noise multiplier, sample rate, steps) of every run of equal steps, and what else its kind has."""
        return tuple(run for run in self._history if run[2])

    @property
    def steps(self) -> int:
        """Number of steps counted so far."""
        return sum(run[2] for run in self._history)

    @property
    def kind(self) -> Kind | None:
        """Kind of the steps that follow; None: nothing was recorded."""
        return _kind(self._history[-1]) if self._history else None

    @property
    def steps_of_kind(self) -> int:
        """Number of steps of the present kind since the last step of another kind."""
        return self._history[-1][2] if self._history else 0

    def record(self, noise_multiplier: float, sample_rate: float, *rest: int | str) -> None:
        """Set the noise multiplier σ (0: no privacy) and sample rate, in (0, 1], of the steps that follow.

        `rest`: number of records and largest draw, of truncated Poisson draws; or name, bands and groups of correlated noise,
        whose σ is that of the draws z, and whose rate is that of all records. After a resume call `set_steps` with the
        counter's `spent` first: releases begun after the checkpoint had the old values.

        Raises:
            GramianError: for values out of range.
        """
        kind: Kind = (noise_multiplier, sample_rate, *rest)  # type: ignore[assignment]
        _check_kind(kind)
        kind = (float(noise_multiplier), float(sample_rate), *kind[2:])
        if self._history and self._history[-1][2] == 0:
            self._history.pop()
        if not self._history or _kind(self._history[-1]) != kind:
            self._history.append(_run(kind, 0))

    def set_steps(self, spent: int) -> None:
        """Set the number of steps to `spent`, if it is larger; new steps are of the kind recorded last.

        Raises:
            GramianError: if there are new steps and no kind was recorded.
        """
        new = spent - self.steps
        if new <= 0:
            return
        if not self._history:
            raise GramianError(
                f"accounting: {new} steps of no kind; expected record(noise_multiplier, sample_rate) first"
            )
        last = self._history[-1]
        self._history[-1] = _run(_kind(last), last[2] + new)

    def compose(self, other: "Accounting") -> None:
        """From now on, add the steps of another account, and of all that it is composed with, to ε: those taken later too.

        What a state has of an account gives way to that account itself.

        Raises:
            GramianError: if an account would be counted twice.
        """
        mine, theirs = self._accounts(), other._accounts()
        for name, found in theirs.items():
            known = mine.get(name)
            if known is not None and not (known._stored and found.steps >= known.steps):
                raise GramianError(
                    "compose: this account's releases are in the sum already; expected an engine with an account of its own"
                )
        self._composed[other.account] = other

    def _accounts(self) -> "dict[str, Accounting]":
        """This account and all that it is composed with, by name."""
        found = {self.account: self}
        for other in self._composed.values():
            for name, account in other._accounts().items():
                if name not in found or found[name]._stored:
                    found[name] = account
        return found

    @property
    def others(self) -> History:
        """Runs of equal steps of the accounts that this one is composed with."""
        return tuple(run for account in self._accounts().values() if account is not self for run in account.history)

    def epsilon(self, delta: float, steps: int | None = None, *, further: int = 0) -> float:
        """ε at δ in (0, 1) of the first `steps` steps (None: of all), and of all steps of the accounts composed with this one.

        `further` steps of the present kind are added. It is 0 without steps, and infinite if a step had no noise, or too little
        for its tails to fit into δ. Cost: up to seconds for "prv" and "pld"; results are cached.

        Raises:
            GramianError: for a δ out of range, or if the mechanism has no answer for it.
        """
        history = self.history if steps is None else _first(self.history, steps)
        if further and self.kind is not None:
            joins = bool(history) and _kind(history[-1]) == self.kind  # correlated noise pays for a run as a whole
            earlier, begun = (history[:-1], history[-1][2]) if joins else (history, 0)
            history = (*earlier, _run(self.kind, begun + further))
        return epsilon_of(self.mechanism, _merged((*history, *self.others)), check_delta("delta", delta))

    def catch_up(self, about: Any) -> None:
        """Replace the history by that of `about`, a `state_dict` from a counter file, unless it has fewer steps.

        `about` None: do nothing.
        """
        if about is None:
            return
        later = self._stored_account()
        later.load_state_dict(about)
        if later.steps >= self.steps:
            self._history = later._history

    def _stored_account(self) -> "Accounting":
        """An account without steps, for what a state or a file says of one."""
        made = object.__new__(Accounting)
        made.mechanism, made.account, made._history, made._composed, made._stored = self.mechanism, "", [], {}, True
        return made

    def state_dict(self) -> dict[str, Any]:
        """The history as lists (noise multiplier, sample rate, steps, …), of this account and of those composed with it."""
        others = {name: account for name, account in self._accounts().items() if account is not self}
        return {
            "mechanism": self.mechanism,
            "history": [list(run) for run in self._history],
            "account": self.account,
            "composed": {name: [list(run) for run in account.history] for name, account in others.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the history by that of a state. The mechanism stays: any accountant can read a history.

        Accounts that this one is composed with stay, and those that the state has are added.

        Raises:
            GramianError: if the state has no valid history.
        """
        history = state.get("history") if isinstance(state, Mapping) else None
        runs = _checked(history)
        account, composed = state.get("account", ""), state.get("composed", {})  # earlier versions had neither
        named = isinstance(account, str) and (len(account.encode()) == 16 or "account" not in state)
        if not named or not isinstance(composed, Mapping):
            raise GramianError("accounting: the state's account is damaged; expected what state_dict() gave")
        stored = {}
        for name, theirs in composed.items():
            stored[name] = self._stored_account()
            stored[name].account, stored[name]._history = str(name), _checked(theirs)
        present = self._accounts()
        self._composed = {**self._composed, **{name: other for name, other in stored.items() if name not in present}}
        self._history, self.account = runs, account or self.account

    def take_over(self, other: "Accounting") -> None:
        """Become the account that `other` is, a changed copy of this one; accounts composed with this one see it."""
        self._history, self._composed, self.account = other._history, other._composed, other.account

    def __repr__(self) -> str:
        return f'Accounting("{self.mechanism}", {self.steps} steps)'


def facts_of(kind: Kind) -> dict[str, Any]:
    """A kind of steps as named facts, for the chain of releases; `history_of` is the way back."""
    return dict(zip(("noise_multiplier", "sample_rate", *FACTS[len(kind)]), kind, strict=True))


def history_of(facts: Mapping[str, Any], count: int) -> list[Any]:
    """The run of a history, as in a `state_dict`, of `count` releases with these facts."""
    names = next((names for names in FACTS.values() if names and names[0] in facts), ())
    return [facts.get("noise_multiplier"), facts.get("sample_rate"), count, *(facts.get(name) for name in names)]


def _kind(run: Run) -> Kind:
    return (run[0], run[1], *run[3:])


def _run(kind: Kind, steps: int) -> Run:
    return (kind[0], kind[1], steps, *kind[2:])


def _checked(history: Any) -> list[Run]:
    """The runs of a history from a state, checked."""
    if not isinstance(history, list | tuple) or not all(map(_is_run, history)):
        raise GramianError(
            "accounting: the state has no history; expected (noise_multiplier, sample_rate, steps) of every run"
        )
    runs: list[Run] = [(float(run[0]), float(run[1]), *run[2:]) for run in history]
    for run in runs:
        _check_kind(_kind(run))
        if run[2] < 0:
            raise GramianError(f"accounting: {run[2]} steps in the history; expected at least 0")
    return runs


def _is_run(run: Any) -> bool:
    """True for a run of the history: two numbers and 1 or 3 integers, or 3 with a name in the middle; no True or False."""
    if not isinstance(run, list | tuple) or len(run) not in (3, 5, 6) or any(isinstance(value, bool) for value in run):
        return False
    names, counts = (run[3:4], (run[2], *run[4:])) if len(run) == 6 else ((), run[2:])
    numbers = all(isinstance(value, int | float) for value in run[:2]) and all(isinstance(n, int) for n in counts)
    return numbers and all(name in CORRELATED for name in names)


def _first(history: History, steps: int) -> History:
    """The history cut to its first `steps` steps."""
    found: list[Run] = []
    for run in history:
        if steps > 0:
            found.append(_run(_kind(run), min(run[2], steps)))
        steps -= run[2]
    return tuple(found)


def _merged(history: Iterable[Run]) -> History:
    """The history with one run for each kind: the order of steps does not change ε, and a run is an FFT.

    Runs of correlated noise stay apart: each pays for participations of its own, and the correlation begins anew.
    """
    steps: dict[Kind, int] = {}
    apart = []
    for run in history:
        if len(run) == 6:
            apart.append(run)
        else:
            steps[_kind(run)] = steps.get(_kind(run), 0) + run[2]
    return (*(_run(kind, count) for kind, count in steps.items()), *apart)


def _check_mechanism(mechanism: str) -> None:
    if mechanism not in MECHANISMS:
        raise GramianError(f'accountant: "{mechanism}"; expected one of {", ".join(MECHANISMS)}')


def _check_kind(kind: Kind) -> None:
    noise_multiplier, sample_rate = kind[:2]
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise GramianError(f"noise_multiplier: {noise_multiplier}; expected a finite number of at least 0")
    if not 0 < sample_rate <= 1:
        raise GramianError(f"sample_rate: {sample_rate}; expected a probability in (0, 1]")
    if len(kind) == 5 and not (kind[3] >= 1 and kind[4] >= 1 and sample_rate * kind[4] < 1 + 1e-9):
        raise GramianError(
            f"bands: {kind[3]} over {kind[4]} groups; expected at least 1, and groups larger than a batch"
        )
    if len(kind) == 4 and not all(count >= 1 for count in kind[2:]):
        raise GramianError(f"max_draw: {kind[-1]} of {kind[2]} records; expected at least 1")


def check_delta(field: str, delta: float) -> float:
    """The δ of the argument `field` as a float; a `GramianError` unless it is in (0, 1)."""
    if not isinstance(delta, int | float) or not 0 < delta < 1:
        raise GramianError(f"{field}: {delta}; expected a probability in (0, 1)")
    return float(delta)
