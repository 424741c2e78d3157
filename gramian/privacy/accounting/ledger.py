"""The account of a private run: its key, the numbers of its releases (noised sums), their ε, and the options of the run."""

import copy
import os
import struct
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.kernels.normal_tail import NORMALS_VERSION
from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.accounting.account_state import SCHEMA, check_replay, check_state
from gramian.privacy.accounting.accountant import Accounting, Kind, facts_of
from gramian.privacy.accounting.release_chain import ReleaseChain
from gramian.privacy.accounting.release_limit import ReleaseLimit
from gramian.privacy.accounting.signing_key import SigningKey
from gramian.privacy.audit.weights_digest import digest
from gramian.privacy.noise.secrets import KEY_BYTES, ReleaseCounter, Secrets

SHARED = struct.Struct(f"{KEY_BYTES}s16sd?QQ")
"""What processes share: key, name of the account, clip norm (0: none), whether it is due, releases to begin with, and begun."""
CHAINED = ("max_grad_norm", "expected_batch", "poisson_sampling", "clip_function", "releases", "adjacency")
"""Options that every entry of the chain of releases has, beside the noise multiplier and the sample rate."""


class Ledger:
    """The account of one private run: secret key, release counter, history of steps, and the chain of its releases.

    Every process has one; after `open` all have the same content. A release is one noised sum. A replay repeats the releases
    after a checkpoint bit for bit, under the same numbers and key.
    """

    def __init__(self, accountant: str, *, insecure_reproducible: bool, seed: int | None) -> None:
        """Create an account without releases and draw its secret key. The arguments are those of `PrivacyEngine`."""
        self.accounting = Accounting(accountant)
        self.secrets = Secrets(insecure_reproducible=insecure_reproducible, seed=seed)
        self.counter = ReleaseCounter()
        self.signing = SigningKey(self.secrets.subkey("receipt"))
        """Key that signs receipts of the run; it stays the same over resumes."""
        self._chain, self._facts = ReleaseChain(), dict[str, Any]()
        self._digests: dict[str, int] = {}
        self._kind: Kind = (0.0, 1.0)
        self.limit: ReleaseLimit | None = None
        """Target ε beyond which no release begins; None: no limit."""
        self.clip_norm: float | None = None
        """Clip norm C_t of the next release with adaptive clipping, which has been published; None: another function."""
        self.clip_norm_is_due = False
        """True from a load until a model goes on from its clip norm."""
        self.noise_state: Mapping[str, Any] | None = None
        """State of the correlated noise of a state that is replayed, until a model goes on from it."""
        self._replayed_options: dict[str, int] | None = None  # digests that a replay must have, until it ends
        self._uncounted = False  # True if releases may have been begun that are not in the counter
        self._weights: Callable[[], Tensor] | None = None
        self._metric: Callable[[], int] | None = None
        self._replayed_metric: int | None = None
        self._replayed_weights: list[int] | None = None  # weight digest of the state that is replayed
        self._checks_weights = False  # True from the load of a replay to its first release
        self.not_replayed: str | None = None
        """Reason why the last `load_state_dict(…, replay=True)` did not replay; None: it did, or no replay was asked for."""
        self._parallel: ProcessGrid | None = None
        self._device = torch.device("cpu")

    def open(
        self,
        options: Mapping[str, Any],
        data: tuple[int, int] | None,
        kind: Kind,
        parallel: ProcessGrid,
        device: torch.device,
        weights: Callable[[], Tensor],
        metric: Callable[[], int] | None = None,
    ) -> None:
        """Begin a run with these options on every process: check that they agree, and share the key and counter. Collective.

        Args:
            options: {name: value}, the same on every process, and in a replay the same as before.
            data: fingerprint (length, digest) of the data set that batches are drawn from; None: not known.
            kind: (noise multiplier, sample rate) of the releases, and (records, largest draw) of truncated draws.
            parallel: the processes of the run.
            device: device of the parameters.
            weights: function that computes `weight_digest` of the model.
            metric: function that returns the digest of the factors in whose metric noise is drawn; None: there are none.

        Raises:
            GramianError: naming the option that differs between processes, or from the state to replay; or in a forked process.
        """
        self.secrets.refuse_forks()
        self._parallel, self._device, self._weights = parallel, device, weights
        self._metric = metric
        first = {} if data is None else {"data_loader": data}  # the rate follows from it
        digests = {field: digest(value) for field, value in {**first, **options}.items()}
        if self._replayed_options is not None:
            check_replay(self._replayed_options, digests)  # raising, it leaves the replay due
        self._digests, self._kind = digests, kind
        self._facts = {name: options[name] for name in CHAINED if name in options}
        self._agree()
        self._end_replay_on_other_weights()
        self._warn_of_uncounted()
        self.accounting.record(*kind)
        self.accounting.set_steps(self.counter.spent)  # a counter file may have been there before

    def close(self) -> None:
        """End the run that `open` began, or failed to begin; the history and the key stay."""
        self._parallel = None

    def end_replay(self) -> None:
        """End a replay of earlier releases, if there is one: the next release gets a new number under a new key."""
        if self._replayed_options is not None:
            self.counter.move_on()
            self._renew_key()

    def refuse_past_limit(self) -> None:
        """Raise a `GramianError` if the next release is a new one, and would exceed the fixed number or the target ε."""
        if self.counter.released < self.counter.spent:
            return
        fixed = self._facts.get("releases")
        if fixed is not None and self.accounting.steps_of_kind >= fixed:
            raise GramianError(f"releases: all {fixed} are spent, lost ones too; expected a larger number beforehand")
        if self.limit is not None:
            self.limit.refuse(self.accounting)

    def reserve(self) -> None:
        """What may fail on one process alone, before the processes meet and `begin` the next release together.

        Raises:
            GramianError: in a forked process, or if the counter's file cannot be written.
        """
        self.secrets.refuse_forks()
        self.counter.reserve(self._next()[1])

    def begin(self) -> int:
        """Count a new release (one noised sum) before it exists and return its number. Collective in a replay's first release.

        Raises:
            GramianError: for the first release of a replay, if the weights are not those of the state; without `reserve`, if
                the counter's file cannot be written.
        """
        if self._checks_weights and not self._same_weights():
            raise GramianError(
                "replay: the weights were changed after load_state_dict; expected them loaded before it, or replay=False"
            )
        self._checks_weights = False
        chain, about = self._next()
        number = self.counter.begin(about)
        self._chain = chain
        self.accounting.set_steps(self.counter.spent)
        return number

    def _next(self) -> tuple[ReleaseChain, dict[str, Any]]:
        """The chain with the next release, and what the counter stores about it."""
        new = self.counter.released == self.counter.spent  # else it is repeated, and is in the chain
        chain = self.chain.extended(self.counter.spent + new, self._entry())
        return chain, {**self.accounting.state_dict(), "chain": chain.state_dict()}

    @property
    def chain(self) -> ReleaseChain:
        """The chain of all releases begun; those that another process began and did not record are marked "assumed"."""
        return self._chain.extended(self.counter.spent, {**self._entry(), "assumed": True})

    def _entry(self) -> dict[str, Any]:
        """Facts of the next release."""
        return {**facts_of(self.accounting.kind or self._kind), **self._facts}

    def _recorded(self, chain: ReleaseChain) -> ReleaseChain:
        """`chain`, or that of the counter (in its file, if it has one) unless it is shorter.

        Raises:
            GramianError: if the counter's chain was altered, or has more releases than it counts.
        """
        about = self.counter.about or {}
        recorded = ReleaseChain.replayed(about["chain"], "release counter") if "chain" in about else ReleaseChain()
        if recorded.length > self.counter.spent:
            raise GramianError(
                f"release counter: its chain has {recorded.length} releases, and it counts {self.counter.spent}; "
                "expected as many"
            )
        return recorded if recorded.length >= chain.length else chain

    def bind(self, path: "str | os.PathLike[str]", *, must_exist: bool) -> None:
        """Store the number of releases begun in a file, which the first process writes; `must_exist` in a resumed run.

        Raises:
            GramianError: if the file is missing although it must exist, is damaged, or cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise GramianError(f"path: expected that of the counter file, got {path!r}")
        parallel = self._parallel
        first = parallel.rank == 0 if parallel is not None else not dist.is_initialized() or dist.get_rank() == 0
        if first:
            released = self.counter.released
            self.counter.bind(os.fspath(path), must_exist=must_exist)
            if self._replayed_options is not None:
                self.counter.restore(released, replay=True)
            self.accounting.catch_up(self.counter.about)
            self._chain = self._recorded(self._chain)
        self._share()  # before `open` there is nobody to share with
        self._count()

    def state_dict(self) -> dict[str, Any]:
        """The complete account in one dict: history, counter, secret key, noise version, digests of options and weights."""
        due = self._replayed_options if self._parallel is None else None
        weights = None if self._weights is None else self._weights()
        if due is not None:
            weights = None if self._replayed_weights is None else torch.tensor(self._replayed_weights)
        return {
            "schema": SCHEMA,
            "generator": NORMALS_VERSION,
            "weights": weights,
            "metric": None if self._metric is None else self._metric(),
            "accountant": self.accounting.state_dict(),
            "counter": self.counter.state_dict(),
            "secrets": self.secrets.state_dict(),
            "signing": self.signing.state(),
            "chain": self.chain.state_dict(),
            "config": dict(self._digests if due is None else due),
            "clip_norm": self.clip_norm,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, replay: bool) -> None:
        """Load an account; unless it is replayed, the next release has a number that was never begun, under a new key.

        `replay`: the steps that follow repeat those after the state was saved. If the noise generator or the weights differ,
        nothing is replayed, and `not_replayed` says why.

        Raises:
            GramianError: if the state is not one of `state_dict`, or its options are not those of the run to replay; nothing
                has changed then.
        """
        check_state(state, replay)
        asked, replay = replay, replay and state.get("generator") == NORMALS_VERSION
        is_open = self._parallel is not None
        secrets = Secrets(insecure_reproducible=self.secrets.insecure_reproducible)
        accounting, begun = copy.copy(self.accounting), ReleaseCounter()
        secrets.load_state_dict(state["secrets"])
        accounting.load_state_dict(state["accountant"])
        begun.load_state_dict(state["counter"], replay=True)
        chain = ReleaseChain.replayed(state["chain"], "state") if "chain" in state else ReleaseChain()
        signing = SigningKey.of(state["signing"]) if "signing" in state else self.signing
        if chain.length > begun.spent:
            raise GramianError(
                f"state: its counter has {begun.spent} releases and its chain {chain.length}; expected as many"
            )
        if accounting.steps > begun.spent:
            raise GramianError(
                f"state: its counter has {begun.spent} releases and its account {accounting.steps}; expected as many"
            )
        digests = dict(state["config"])
        if replay and not digests:
            raise GramianError(
                "replay: the state does not say what followed it; expected one saved after make_private, or replay=False"
            )
        if replay and is_open:
            check_replay(digests, self._digests)
        if is_open and not state["accountant"]["history"]:
            accounting.record(*self._kind)
        accounting.catch_up(self.counter.about)
        chain = self._recorded(chain)
        self.counter.load_state_dict(state["counter"], replay=replay)  # last: it may write a file, and fail
        self._chain, self.signing = chain, signing
        self.accounting.take_over(accounting)
        self.clip_norm, self.clip_norm_is_due = state.get("clip_norm"), True
        self.noise_state = state.get("noise")
        self.secrets, self._replayed_options, self._uncounted = secrets, digests, False
        weights = state.get("weights")
        self._replayed_weights = None if weights is None else weights.tolist()
        self._replayed_metric = state.get("metric")
        self.not_replayed = None
        if not replay:
            self._renew_key()
        if asked and not replay:
            generator = state.get("generator", 1)
            self._report_no_replay(f"its noise is of generator {generator}, and this one is {NORMALS_VERSION}")
        if is_open:
            self._share()
            self._end_replay_on_other_weights()
            self._warn_of_uncounted()
        self._count()

    def _end_replay_on_other_weights(self) -> None:
        """End a replay if weights or metric are not those of the state: their sums, or the noise, would differ. Collective.

        A process that loaded no state, or whose state has another rank's shards, does not object; a state without a digest ends
        the replay.
        """
        assert self._parallel is not None
        self._checks_weights = bool(
            self._parallel.from_first(bytes([self._replayed_options is not None]), self._device)[0]
        )
        metric = None if self._metric is None else self._metric()
        other = self._replayed_options is not None and metric != self._replayed_metric
        if self._checks_weights and not self._same_weights(but=other):
            self._checks_weights = False
            self.end_replay()
            self._share()
            self._report_no_replay(
                "weights, optimizer state or number of processes, or the metric's factors, are not those of the state"
            )

    def _same_weights(self, but: bool = False) -> bool:
        """False if the weights of any process are known to differ from those of the state that is replayed. Collective.

        `but`: True if something else of this process does.
        """
        assert self._parallel is not None and self._weights is not None
        same = self._replayed_options is None or self._replayed_weights is not None
        if self._replayed_weights is not None:
            (processes, process, mark), now = self._replayed_weights, self._weights().tolist()
            same = processes == now[0] and (process != now[1] or mark == now[2])
        same = same and not but
        agreed = self._parallel.differing({"weights": int(same)}, self._device) is None
        return same and agreed

    def _report_no_replay(self, reason: str) -> None:
        self.not_replayed = reason
        if self._parallel is None or self._parallel.rank == 0:
            warnings.warn(
                f"replay: {reason}; nothing is replayed, and the next release has a new key and a new number",
                stacklevel=5,
            )

    def _renew_key(self) -> None:
        """Draw a new key after a resume that is not a replay: another copy of the run may have drawn noise with the old one."""
        self.secrets.renew()
        self._replayed_options, self._replayed_weights, self._checks_weights, self._uncounted = None, None, False, True
        self.noise_state = None
        if self._parallel is None:  # else the options of `open` still hold
            self._digests = {}

    def _warn_of_uncounted(self) -> None:
        first = self._parallel is not None and self._parallel.rank == 0
        if self._uncounted and first and not self.counter.bound:
            warnings.warn(
                "state: steps begun after it was saved are not known, so they are not in epsilon; "
                "expected bind_counter(path) beside the checkpoint",
                stacklevel=4,
            )
        self._uncounted = False

    def _agree(self) -> None:
        """Check that all processes have the same data set and options; give all the first one's key and counter. Collective.

        Raises:
            GramianError: naming what differs.
        """
        parallel = self._parallel
        if parallel is None or parallel.size == 1:
            return
        digests = {**self._digests, "accountant": digest(self.accounting.mechanism)}
        field = parallel.differing(digests, self._device)
        if field == "data_loader":
            raise GramianError(
                "data_loader: its data set is not the same on every process; expected the whole one everywhere"
            )
        if field is not None:
            raise GramianError(f"{field}: is not the same on every process; expected one value everywhere")
        self._share()

    def _share(self) -> None:
        """Send the first process's key, release counter, name of its account and clip norm to all processes. Collective."""
        parallel = self._parallel
        if parallel is None or parallel.size == 1:
            return
        secret, counter = self.secrets.state_dict(), self.counter.state_dict()
        mine = (bytes(secret["key"].tolist()), self.accounting.account.encode(), self.clip_norm or 0.0)
        sent = SHARED.pack(*mine, self.clip_norm_is_due, counter["released"], counter["spent"])
        key, account, clip_norm, due, released, spent = SHARED.unpack(parallel.from_first(sent, self._device))
        self.secrets.load_state_dict({**secret, "key": torch.tensor(list(key), dtype=torch.uint8)})
        self.accounting.account, self.clip_norm, self.clip_norm_is_due = account.decode(), clip_norm or None, due
        if parallel.rank:
            self.counter.load_state_dict({"released": released, "spent": spent}, replay=True)

    def _count(self) -> None:
        """Set the number of accounted steps to the releases of the counter, once their σ and sample rate are known."""
        if self.accounting.history or self._parallel is not None:
            self.accounting.set_steps(self.counter.spent)
