"""A model in private training: what `make_private` installs on the model, its optimizer and its loader, until `detach`."""

import warnings
import weakref
from collections.abc import Collection, Sized
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.parallel.data_parallel import ReducerOff, unsharded_units
from gramian.parallel.model_grid import grid_of, refuse_context_parallel
from gramian.parallel.shared_refusals import SharedRefusals
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.privacy.accounting.accountant import Kind
from gramian.privacy.accounting.ledger import Ledger
from gramian.privacy.audit.bypass import BypassDetector, OutsideParameters
from gramian.privacy.audit.proof_log import ProofLog
from gramian.privacy.audit.single_sample_checks import carries_no_state, refuse_ambiguous_batch
from gramian.privacy.audit.weights_digest import weight_digest
from gramian.privacy.clipping.clip_factors import ClipFunction
from gramian.privacy.clipping.clipping_rule import Clipping
from gramian.privacy.clipping.gradient_sums import GradientSums
from gramian.privacy.clipping.private_quantile import PrivateQuantile
from gramian.privacy.clipping.refused_modules import layers_with_sites, refuse_compiled, refuse_mixing
from gramian.privacy.clipping.single_sample_clipping import SingleSampleClipping
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.clipping.trained_parameters import trained_parameters
from gramian.privacy.metric.public_metric import PublicMetric
from gramian.privacy.options import PrivacyOptions, innermost, sampling_rate
from gramian.privacy.private_noise import PrivateNoise
from gramian.privacy.private_step import PrivateStep
from gramian.privacy.private_units import PrivateUnits
from gramian.privacy.sampling.dataset_fingerprint import dataset_fingerprint
from gramian.privacy.sampling.poisson import Piece, PoissonBatchSampler
from gramian.privacy.sampling.private_loader import PrivateLoader, records_of
from gramian.privacy.sampling.record_units import RecordUnits
from gramian.privacy.sampling.single_collation import RecordingCollate
from gramian.taps.hub import hub_of
from gramian.taps.model.user_names import named_parameters, unwrap
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.proof.single_unit import SampleAlone
from gramian.taps.sites.site import first_tensor

DEFAULTS_OF_LATER = (
    ("max_draw", None), ("clip_function", "flat"), ("noise", "gaussian"), ("bands", None), ("releases", None),
)  # fmt: skip
"""Options that states of older versions do not know, with the values at which those versions ran: they are not compared."""
_private: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
EAGER = "a private step draws its noise outside of any graph; expected fullgraph=False"
"""Reason for not compiling a private step: a graph would contain key and number of one release as constants, and draw the
same noise again."""


class PrivateModel:
    """What `make_private` installs on a model, its optimizer and its loader, and the callbacks between these parts.

    Called in a forward: `_check_inputs`. In a backward: `step.before_backward`, the clipping rule, `step.after_backward`.
    Before the optimizer's step: `step.hook`. When the loader yields a micro-batch: `_begin_piece`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: Any,
        options: PrivacyOptions,
        *,
        expected_batch: float | None,
        sample_rate: float | None,
        units: RecordUnits | None,
        proof: ProofLog,
        metric: KFACNaturalGradient | None,
        ledger: Ledger,
        stopwatch: Stopwatch,
    ) -> None:
        """Install all hooks; nothing stays installed if this raises.

        The arguments are those of `make_private`; `units` are the units of its `unit_of`; `ledger` (the account of ε) and
        `stopwatch` belong to the engine.
        """
        self.module, self.root = module, unwrap(module)
        optimizer = innermost(optimizer)
        self.options, self.proof, self._optimizer, self._ledger = options, proof, optimizer, ledger
        self._stopwatch = stopwatch
        self.units = PrivateUnits(units, options.max_physical_batch)
        """The units of privacy, and those of the next forward's rows or tokens."""
        if self.root in _private:
            raise GramianError("module: is private already; expected one engine for each model")
        self.parallel = grid_of(module, self.root)
        self.refusals = SharedRefusals(self.parallel)
        self.tensor_parallel = TensorParallel.of(self.root)
        """The processes that see the same samples and clip a share of them each; None: there are none."""
        if self.tensor_parallel is not None:
            refuse_compiled(module)
        if self.parallel.size == 1 and dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                "module: is not wrapped although there are several processes, so each trains, and accounts for, a model of its "
                "own; expected DistributedDataParallel or fully_shard for one model over all of them",
                stacklevel=3,
            )
        self.trained = trained_parameters(self.root, optimizer)
        refuse_mixing(layers_with_sites(self.root))
        if proof.option == "off":
            warnings.warn(
                'proof: is "off"; whose row is which is taken from shapes, and epsilon rests on that', stacklevel=3
            )
        self.rate = sampling_rate(
            data_loader, self.parallel.data[1], expected_batch, sample_rate, bool(options.poisson_sampling), units
        )
        if not options.poisson_sampling:
            warnings.warn(
                "poisson_sampling: is off; epsilon is computed as if every batch were a Poisson draw", stacklevel=3
            )
        self.metric = None if metric is None else PublicMetric(metric, self.root, self.trained, self.parallel)
        self.noise = PrivateNoise(options, self.rate.sample_rate, self.trained, self.parallel, ledger)
        if metric is not None and self.noise.strategy is not None:
            raise GramianError(
                f'metric: its noise is formed anew for every release; expected noise="gaussian", got {options.noise!r}'
            )
        self.clip = ClipFunction(options.clip_function, options.max_grad_norm, list(self.trained))
        self.quantile: PrivateQuantile | None = None
        if options.clip_function == "adaptive":
            self.quantile = PrivateQuantile(
                self.clip, options.noise_multiplier, self.rate.expected_batch, self.parallel
            )
        self._carries_no_state = self._looked_behind_loss = False
        self._installed: ExitStack | None = None
        with ExitStack() as stack:
            self._open_ledger(stack, data_loader)
            self.loader = self._private_loader(data_loader) if options.poisson_sampling else None
            self._collate = None if options.poisson_sampling else _record_batches(stack, data_loader)
            self._install(stack)
            self._resume_clip_norm()
            self.noise.resume(self.step.noise)
            _private.add(self.root)
            stack.callback(_private.discard, self.root)
            self._installed = stack.pop_all()

    @property
    def installed(self) -> bool:
        """True from construction until `detach`."""
        return self._installed is not None

    def detach(self) -> None:
        """Remove all hooks; sums in `p.grad` that have no noise yet are dropped."""
        assert self._installed is not None
        self._installed.close()
        self._installed = None
        if self.step.progress.passes_since_step or self.sums.moved:
            self.sums.forget()

    def restart(self) -> None:
        """Continue after a state was loaded into the ledger: use its keys, and drop the sums of the draw under way.

        This model's noise multiplier and sample rate are recorded for the steps that follow.
        """
        self.units.refuse_other_adjacency(self._ledger)
        self._ledger.accounting.record(*self._kind)
        self._resume_clip_norm()
        self.step.restart()
        self.noise.resume(self.step.noise)
        if self.loader is not None:
            self.loader.rekey(self._ledger.secrets.sampling_key, self.noise.groups_key())

    def _resume_clip_norm(self) -> None:
        """Go on from the clip norm of a state that was loaded, with "adaptive"; begin with max_grad_norm without one."""
        ledger, limits = self._ledger, self.clip.limits
        if self.quantile is not None and ledger.clip_norm_is_due and ledger.clip_norm is not None:
            limits[0] = ledger.clip_norm
        ledger.clip_norm, ledger.clip_norm_is_due = None if self.quantile is None else limits[0], False

    # ---- installation ----------------------------------------------------------------------------------------------

    def _open_ledger(self, stack: ExitStack, data_loader: Any) -> None:
        """Open the ledger with the options and data fingerprint that a replay must have in common with the first run."""
        options, rate = self.options, self.rate
        marked = {name: value for name, value in vars(options).items() if (name, value) not in DEFAULTS_OF_LATER}
        marked |= {"expected_batch": rate.expected_batch, "sample_rate": rate.sample_rate}
        marked |= self.units.marks
        marked["loss_scale"] = type(options.loss_scale).__name__
        shapes = [(name, tuple(p.shape)) for name, p in self.trained.items()]
        marked |= self.noise.marks
        marked["optimizer"] = [type(self._optimizer).__name__, shapes]
        records = getattr(data_loader, "dataset", None)
        drawn = options.poisson_sampling and isinstance(records, Sized) and not isinstance(records, IterableDataset)
        data = dataset_fingerprint(records) if drawn else None
        device = next(iter(self.trained.values())).device
        weights = partial(weight_digest, self.root, self._optimizer, self.trained, self.parallel)
        stack.callback(self._ledger.close)
        rest = self._truncation() or self.noise.kind
        self._kind: Kind = (options.noise_multiplier, rate.sample_rate, *rest)
        metric = None if self.metric is None else self.metric.digest
        self._ledger.open(marked, data, self._kind, self.parallel, device, weights, metric)
        self.units.refuse_other_adjacency(self._ledger)

    def _private_loader(self, data_loader: DataLoader[Any]) -> PrivateLoader:
        units, groups, (rank, world_size) = self.units.of_records, self.noise.groups(), self.parallel.data
        size = records_of(data_loader) if units is None else len(units)
        draws = PoissonBatchSampler(
            self._ledger.secrets.sampling_key,
            size,
            self.rate.sample_rate,
            max(1, round(size / self.rate.expected_batch)),
            next_draw=lambda: self._ledger.counter.released,
            rank=rank,
            world_size=world_size,
            max_physical_batch=self.options.max_physical_batch,
            max_draw=self.options.max_draw,
            draw_of=None if groups is None else groups.cyclic_draw,
            units=units,
        )
        return PrivateLoader(data_loader, draws, self._begin_piece, groups)

    def _truncation(self) -> tuple[()] | tuple[int, int]:
        """(records, largest draw) for the accountant if draws are truncated, else ()."""
        if self.options.max_draw is None:
            return ()
        mechanism = self._ledger.accounting.mechanism
        if mechanism != "pld":
            raise GramianError(
                f'poisson_sampling: "truncated" has no bound in {mechanism}; expected PrivacyEngine("pld"), or True'
            )
        if self.rate.records is None:
            raise GramianError(
                "data_loader: its data set has no length; expected one with a length for truncated draws"
            )
        return self.rate.records, self.options.max_draw

    def _install(self, stack: ExitStack) -> None:
        options, trained = self.options, self.trained
        stack.callback(ReducerOff(self.module).restore)
        for field, now, then in (("private", True, False), ("refusals", self.refusals, SharedRefusals())):
            setattr(hub_of(self.root), field, now)
            stack.callback(setattr, hub_of(self.root), field, then)
        self.sums = GradientSums(trained, self.parallel, self._stopwatch, options.loss_scale, self.tensor_parallel)
        self.outside = OutsideParameters(self.root, trained, self._optimizer, lambda: self.sums.watch.on)
        stack.callback(self.outside.remove)
        single = options.max_physical_batch == 1 and options.clipping in ("auto", "keep")
        self.clipping: Clipping | SingleSampleClipping
        if single and not self.parallel.shards:
            self.clipping = self._install_on_root(stack)
        else:
            self.clipping = self._install_taps(stack)
        taking_part = self.sums, self.clipping, self.outside, self._ledger, self._stopwatch, self.clip, self.quantile
        self.step = PrivateStep(
            options, self.rate, trained, *taking_part, self.metric, self.noise.strategy, self.refusals
        )
        self.units.clipping = self.clipping
        self.clipping.on_begin = self.refusals.held()(self.step.before_backward)
        self.clipping.on_done = self._after_backward
        handle = self._optimizer.register_step_pre_hook(torch.compiler.disable(self.step.hook, reason=EAGER))
        self._optimizer.noise_multiplier = options.noise_multiplier  # type: ignore[attr-defined]  # scripts read it
        stack.callback(delattr, self._optimizer, "noise_multiplier")
        hooks: Any = self._optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(handle.id, last=False)  # the user's hooks see private gradients
        stack.callback(handle.remove)

    def _install_on_root(self, stack: ExitStack) -> SingleSampleClipping:
        clipping = SingleSampleClipping(self.root, self.trained, self.sums, self.options, self.clip, self.metric)
        clipping.on_inputs, clipping.refusals = self.refusals.told()(self._check_inputs), self.refusals
        stack.callback(clipping.remove)
        return clipping

    def _install_taps(self, stack: ExitStack) -> Clipping:
        hub, proof = hub_of(self.root), self.proof.option
        clipping = Clipping(
            hub,
            self.trained,
            self.sums,
            self.options,
            self._stopwatch,
            proof,
            self.clip,
            self.metric,
        )
        clipping.proof_is_due, clipping.proof_failed = self.proof_is_due, self._proof_failed
        hub.proof.know_loader(self._samples_alone)
        stack.callback((bypass := BypassDetector(self.trained, lambda: hub.live, hub.told)).remove)
        clipping.on_watch = bypass.watch
        if self.parallel.uses_fsdp2:
            for _ in unsharded_units(self.root):
                for name, p in named_parameters(self.root):
                    if not hasattr(p, "placements"):
                        bypass.watch(name, p)
        if self.tensor_parallel is not None:
            stack.enter_context(self.tensor_parallel.comparing_labels(hub.told))
        stack.enter_context(hub.governed_by(clipping))
        hub.attach(clipping)
        stack.callback(hub.detach, clipping)
        stack.callback(hub.proof.forget_loader)
        hub.on_inputs = self._check_inputs
        stack.callback(setattr, hub, "on_inputs", lambda inputs: None)
        hub.on_batch = self.units.refuse_crossing_labels
        stack.callback(setattr, hub, "on_batch", lambda inputs: None)
        return clipping

    # ---- callbacks -------------------------------------------------------------------------------------------------

    def _begin_piece(self, piece: Piece) -> None:
        if not self.installed:
            raise GramianError("data_loader: its engine was detached; expected the loader of a private model")
        with self.refusals.told():
            self.step.begin_piece(piece)
        self.units.begin_piece(piece)

    def _after_backward(self) -> None:
        self.step.after_backward()
        self.units.end_backward()

    def proof_is_due(self) -> bool:
        """True if the row proof (each row depends on its sample alone) is to be repeated before this forward."""
        return self.proof.is_due(self._ledger.counter.released, self._ledger.secrets.sampling_key)

    def _proof_failed(self) -> None:
        self.proof.fail(self._ledger.counter.released)

    def _check_inputs(self, inputs: tuple[Any, dict[str, Any]]) -> None:
        """Check the inputs of a forward, and collect the parameters in their graph.

        Raises:
            GramianError: if DDP was put around the model later, the batch size is ambiguous, the model carries something of one
                sample into its next forward, or rows are not in the order of the records whose units they are.
        """
        if not self.parallel.uses_ddp and DistributedDataParallel._get_active_ddp_module() is not None:
            raise GramianError(
                "module: was wrapped in DistributedDataParallel after make_private, so each process would train by itself; "
                "expected it wrapped before (accelerator.prepare(model) first)"
            )
        refuse_context_parallel()
        proven = bool(hub_of(self.root).proof.proven)
        counted = self.step.progress.piece is not None or self.rate.expected_batch == 1
        refuse_ambiguous_batch(*inputs, known=proven or counted)
        looks = not proven and self.proof.option != "off" and not self._carries_no_state
        if looks and first_tensor(*inputs).shape[:1] == (1,):
            self._carries_no_state = carries_no_state(self.root, *inputs)
        self.outside.look_behind(inputs)
        if self.loader is not None and self.units.by_draw:
            self.loader.refuse_reordering()

    def look_behind_loss(self, loss: Tensor) -> None:
        """Collect the parameters in the graph of the first loss, to refuse those outside the engine; later calls do nothing."""
        if not self._looked_behind_loss:
            self._looked_behind_loss = True
            self.outside.look_behind(loss)

    def _samples_alone(self, samples: SampleArguments, among: Collection[int]) -> list[SampleAlone]:
        recorder = self.loader if self.loader is not None else self._collate
        last = None if recorder is None else recorder.last_batch()
        return [] if last is None else last.samples_alone(samples, among)

    def proof_record(self) -> dict[str, Any]:
        """Results of the row proof, the check that each row depends on its sample alone (see `ProofLog.record`)."""
        rows = "one sample a batch" if isinstance(self.clipping, SingleSampleClipping) else None
        return self.proof.record(list(hub_of(self.root).proof.proven.values()), rows)


def _record_batches(stack: ExitStack, data_loader: Any) -> RecordingCollate | None:
    """Let the user's own loader record its last batch until the engine is detached; None if it has no collate function."""
    collate = getattr(data_loader, "collate_fn", None)
    if collate is None or not isinstance(data_loader, DataLoader):
        return None
    data_loader.collate_fn = recording = RecordingCollate(collate)
    stack.callback(setattr, data_loader, "collate_fn", collate)
    return recording
