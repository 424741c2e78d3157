"""A capture: statistics observe every backward of a model inside a `with` block."""

import copy
import math
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.linalg.wide import product_rounding
from gramian.parallel.all_reduce import all_reduce
from gramian.parallel.placement import place_like
from gramian.taps.audit import TURNS, Audit, Projections
from gramian.taps.coverage import Cover, Coverage
from gramian.taps.hub import Hub, hub_of
from gramian.taps.model.user_names import named_parameters
from gramian.taps.proof.row_proof import check_proof
from gramian.taps.records import LayerRecord, ParameterRecord, PassInfo
from gramian.taps.roles import AdditiveStatistic, Forgets, HasAlgorithm, Statistic
from gramian.taps.units import Units


class Capture:
    """Statistics that observe every backward of a model inside a `with` block; public as `gramian.observe`.

    ```python
    fisher, noise = gramian.DiagonalFisher(), gramian.NoiseScale()
    with gramian.observe(model, fisher, noise, loss_reduction="mean") as seen:
        F.cross_entropy(model(x), y).backward()
    seen[fisher]["fc.weight"], seen[noise].unbiased, seen.coverage
    ```

    `p.grad` is the ordinary gradient.
    """

    takes_shares = False
    only: frozenset[str] | None = None

    def __init__(
        self,
        model: nn.Module,
        *statistics: Statistic,
        loss_reduction: str | float = "mean",
        batch_size: int | None = None,
        sample_ids: Tensor | None = None,
        token_weights: Tensor | None = None,
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
        process_group: Any = None,
        audit: bool = True,
        proof: str | int = "auto",
    ) -> None:
        """Check the arguments; the model is not touched before the block is entered.

        Args:
            model: the user's model, or any wrapper of it.
            *statistics: the statistics to compute; all share one backward.
            loss_reduction: "mean" or "sum" over the samples of the batch, or the coefficient of one sample's loss.
            batch_size: B, if it is not the first axis of the model's first tensor argument.
            sample_ids: [B] or [B, T]: number of the unit (what counts as one sample: a user, a packed document) that each row
                or token belongs to; None: row i is sample i.
            token_weights: [B, T], zero for tokens (padding, prompts) that statistics of activations leave out; gradients do
                not depend on it. None: all tokens count.
            loss_scale: the factor of the loss before `backward`, or the `GradScaler` that multiplies by it.
            process_group: sum the statistics over these processes on leaving the block (collective); None: this one only.
            audit: check in every backward that the gradients computed by the taps sum to autograd's gradients.
            proof: the row proof, a check that each row depends on its own sample alone, if a statistic needs per-sample
                gradients. "auto": on the first batch of every structure of inputs; a number n: also on every n-th forward;
                "off": never, rows are attributed to samples by their place in the batch.

        Raises:
            GramianError: for an invalid argument, no statistic, the same one twice, or a wrapper that is not supported.
        """
        check_proof(proof)
        if not isinstance(model, nn.Module):
            raise GramianError(f"model: expected an nn.Module, got {type(model).__name__}")
        check_arguments(loss_reduction, batch_size, sample_ids, token_weights, loss_scale)
        if not statistics:
            raise GramianError("statistics: expected at least one")
        for statistic in statistics:
            if isinstance(statistic, type) or not hasattr(statistic, "update"):
                raise GramianError(f"statistics: expected objects such as DiagonalFisher(), got {statistic!r}")
        if len({id(statistic) for statistic in statistics}) < len(statistics):
            raise GramianError("statistics: one object was given twice; expected each once")
        self.per_sample = any(statistic.per_sample for statistic in statistics)
        self._hub: Hub = hub_of(model)
        self._model: nn.Module | None = model  # the hub holds it weakly
        self.statistics = list(statistics)
        self.reads_calls = any(statistic.needs == "layer" for statistic in self.statistics)
        self._loss_reduction, self._loss_scale = loss_reduction, loss_scale
        self.batch_size, self.sample_ids, self._token_weights = batch_size, sample_ids, token_weights
        self.proof, self._forwards = proof, 0
        self._group, self._audit_wanted = process_group, audit
        self._audit: Audit | None = None
        self._product_rounding = 0.0
        self._sums: list[Any] = []
        self._state = "new"
        self._failed: list[Statistic] = []
        self._passes = 0
        self._covers: dict[str, Cover] = {}
        self._algorithms = [s.algorithm for s in statistics if isinstance(s, HasAlgorithm)]

    # ---- the block ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Install the taps, set the sums of all statistics to zero, and prepare the first audit.

        Raises:
            GramianError: if the capture was entered before, or the model cannot be tapped.
        """
        if self._state != "new":
            raise GramianError("capture: was entered before; expected a new capture for every with block")
        self._hub.attach(self)
        self._state = "open"
        self._product_rounding = product_rounding()
        self._sums = [statistic.start(self._hub.parameters) for statistic in self.statistics]
        self._audit = self._new_audit()
        return self

    def _new_audit(self) -> Audit | None:
        """Audit of the next backward: of parameters never audited, and of others in turn; None if audits are off or withheld.

        Audits are withheld while the model's gradient rule lets autograd form no weight gradients.
        """
        hub = self._hub
        tensor_parallel, known = hub.tensor_parallel, hub.audited
        turns = max(1, min(TURNS, len(hub.parameters)))
        chosen = {
            name: p
            for number, (name, p) in enumerate(hub.parameters.items())
            if (name not in known or (tensor_parallel is None and (number + hub.audits) % turns == 0))
            and (self.only is None or name in self.only)
        }
        if not self._audit_wanted or hub.rule.withholds:
            return None
        audit = Audit(
            chosen, Projections(hub.directions, self._product_rounding), known, tensor_parallel, lambda: hub.live
        )
        for name, p in self._plain_parameters():
            audit.watch(name, p)
        return audit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the taps, also after an error; if there was none, sum the statistics over `process_group`.

        Raises:
            GramianError: if there is no process group and no backward ran inside the block.
        """
        covers = self._coverage()
        self._state = "closed"
        if self._audit is not None:
            self._audit.release()
        self._hub.detach(self)
        self._model = None
        if kind is not None:
            return
        self._final = covers
        if self._group is not None:
            self._sums = [
                all_reduce(sums, self._group) if isinstance(statistic, AdditiveStatistic) else sums
                for statistic, sums in zip(self.statistics, self._sums, strict=True)
            ]
        elif not self._passes:
            raise GramianError(
                "capture: no backward ran inside the block through a layer; expected loss.backward() before it is left"
            )

    def next(self, *, sample_ids: Tensor | None = None, token_weights: Tensor | None = None) -> None:
        """Set sample ids and token weights for the next forwards; None: each row is a sample, and all tokens count."""
        self.sample_ids, self._token_weights = sample_ids, token_weights

    # ---- results ------------------------------------------------------------------------------------------------------

    def __getitem__(self, statistic: Statistic) -> Any:
        """The result so far of `statistic`, one of the statistics of this capture.

        Raises:
            GramianError: if the statistic is not part of this capture, the block was not entered, or a backward failed.
        """
        result = statistic.finish(self._sums_of(statistic))
        reduced = self._state == "closed" and self._group is not None  # the same on every process
        return self._placed(result) if reduced and getattr(statistic, "per_parameter", False) else result

    def _placed(self, result: dict[str, Tensor]) -> dict[str, Tensor]:
        places = dict(named_parameters(self._hub.root_module))
        return {name: place_like(value, places[name]) for name, value in result.items()}

    def sums(self, statistic: Statistic) -> Any:
        """A copy of the sums behind a statistic's result, which `merge` of the statistic adds to those of other captures.

        Raises:
            GramianError: if the statistic is not part of this capture, the block was not entered, or a backward failed.
        """
        return copy.deepcopy(self._sums_of(statistic))

    def _sums_of(self, statistic: Statistic) -> Any:
        if any(statistic is failed for failed in self._failed):
            raise GramianError(
                "capture: a backward inside the block failed half-way; expected a new capture after that"
            )
        for mine, sums in zip(self.statistics, self._sums, strict=False):
            if mine is statistic:
                return sums
        raise GramianError(
            f"statistic: {type(statistic).__name__} has no result here; expected one of the statistics of an entered capture"
        )

    @property
    def coverage(self) -> Coverage:
        """Coverage report {parameter: Cover}: whether its gradient was captured, by which kind of layer and algorithm."""
        return self._final if self._state == "closed" and hasattr(self, "_final") else self._coverage()

    def _coverage(self) -> Coverage:
        covers: dict[str, Cover] = {}
        seen: set[int] = set()
        for name, p in named_parameters(self._hub.root_module):
            if id(p) not in seen:  # a tied one goes by its first name
                seen.add(id(p))
                kind = self._hub.parameters[name].kind if name in self._hub.parameters else ""
                missing: Any = "left out" if self.only is not None and name not in self.only else "unused"
                covers[name] = self._covers.get(name) or Cover(missing if p.requires_grad else "frozen", kind)
        return Coverage(covers)

    def _plain_parameters(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) of trainable parameters that the forward itself reads, not those that FSDP2 shards."""
        known, root = self._hub.parameters, self._hub.root_module
        return [(n, p) for n, p in named_parameters(root) if n in known and not hasattr(p, "placements")]

    # ---- listening ----------------------------------------------------------------------------------------------------

    def pass_info(self, number: int, batch: int) -> PassInfo:
        """Begin pass `number` (a forward and its backward) of `batch` rows; returns its units, token weights and scaling.

        Raises:
            GramianError: if sample ids or token weights do not fit the batch.
        """
        self._audit = self._audit or self._new_audit()
        units = None if self.sample_ids is None else Units.of(self.sample_ids, batch)
        reduction = self._loss_reduction
        factor = {"mean": float(batch), "sum": 1.0}[reduction] if isinstance(reduction, str) else 1.0 / reduction
        weights = self._token_weights
        if weights is not None and (weights.dim() != 2 or weights.shape[0] != batch):
            raise GramianError(f"token_weights: expected shape [{batch}, T], got {list(weights.shape)}")
        return PassInfo(number, batch, units, self.sample_ids, weights, factor, self._loss_scale)

    def layer(self, record: LayerRecord) -> None:
        """Update the statistics that need layer records with one call of a layer."""
        for statistic, sums in zip(self.statistics, self._sums, strict=True):
            if statistic.needs == "layer":
                statistic.update(sums, record)

    def parameter(self, record: ParameterRecord) -> None:
        """Give one parameter's record to the audit and to the statistics that need parameter records."""
        algorithm = ", ".join(record.gradient.algorithm(choice) for choice in self._algorithms)
        self._covers[record.parameter] = Cover("covered", record.kind, algorithm, record.uses)
        if self._audit is not None:
            self._audit.record(record)
        for statistic, sums in zip(self.statistics, self._sums, strict=True):
            if statistic.needs == "parameter":
                statistic.update(sums, record)

    def watch(self, parameter: str, tensor: Tensor) -> None:
        """Let the audit hook the tensor that a forward uses for the parameter of this name, to read its gradient."""
        if self._audit is not None:
            self._audit.watch(parameter, tensor)

    def failed_pass(self, info: PassInfo) -> None:
        """Remove a backward that failed half-way from the sums of statistics that can forget a pass.

        The other statistics have no result any more.
        """
        for statistic, sums in zip(self.statistics, self._sums, strict=True):
            if isinstance(statistic, Forgets):
                statistic.forget(sums, info.number)
            else:
                self._failed.append(statistic)

    def proof_is_due(self) -> bool:
        """Count a forward; True if `proof` is a number n and divides the count, so that the row proof is to be repeated."""
        self._forwards += 1
        return isinstance(self.proof, int) and self._forwards % self.proof == 0

    def proof_failed(self) -> None:
        """Called after a repeated row proof failed; does nothing, because the error is raised."""

    def proof_stays_open(self) -> None:
        """Called if all samples of a batch are equal, so that nothing was proven; does nothing: a later batch is tried."""

    def end_of_pass(self, info: PassInfo) -> None:
        """Add a backward's number of samples to every statistic, and compare the taps' gradients with autograd's.

        Raises:
            GramianError: if they differ.
        """
        self._passes += 1
        for statistic, sums in zip(self.statistics, self._sums, strict=True):
            statistic.count(sums, info.count)
        if self._audit is not None:
            compared = self._audit.verdict()
            if info.rows:  # an empty batch proves nothing
                self._hub.audited |= compared
            self._hub.audits += 1
            self._audit = None


def check_arguments(loss_reduction: Any, batch_size: Any, sample_ids: Any, token_weights: Any, loss_scale: Any) -> None:
    """Raise GramianError for the first argument of a capture that is not valid."""
    if loss_reduction not in ("mean", "sum") and not (_is_number(loss_reduction) and loss_reduction):
        raise GramianError(
            f'loss_reduction: expected "mean", "sum" or a coefficient other than 0, got {loss_reduction!r}'
        )
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 0):
        raise GramianError(f"batch_size: expected a number of rows or None, got {batch_size!r}")
    if sample_ids is not None and not isinstance(sample_ids, Tensor):
        raise GramianError(f"sample_ids: expected a tensor of shape [B] or [B, T], got {type(sample_ids).__name__}")
    if token_weights is not None and not isinstance(token_weights, Tensor):
        raise GramianError(f"token_weights: expected a tensor of shape [B, T], got {type(token_weights).__name__}")
    if not isinstance(loss_scale, torch.amp.GradScaler) and not (_is_number(loss_scale) and loss_scale > 0):
        raise GramianError(f"loss_scale: expected a positive number or a GradScaler, got {loss_scale!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
