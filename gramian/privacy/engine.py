"""`PrivacyEngine`: exact DP-SGD on the user's own model, optimizer and loop."""

import math
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sized
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from gramian.core.errors import GramianError
from gramian.parallel.data_parallel import DataParallel, ReducerOff, each_unsharded
from gramian.privacy.accounting.accountant import find_noise_multiplier
from gramian.privacy.accounting.ledger import Ledger
from gramian.privacy.audit.bypass import Bypass, Outside
from gramian.privacy.audit.independence import check_independence
from gramian.privacy.audit.proof_log import ProofLog
from gramian.privacy.audit.weights_digest import weight_digest
from gramian.privacy.clipping.clipping_plan import ClippingPlan
from gramian.privacy.clipping.clipping_rule import Clipped, Clipping, Tuning
from gramian.privacy.clipping.gradient_sums import GradientSums, Scaling
from gramian.privacy.clipping.refused_modules import layers_with_sites, refuse_mixing
from gramian.privacy.clipping.single_sample_clipping import WholeGradient
from gramian.privacy.clipping.single_sample_memory import remembers_nothing
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.clipping.trained_parameters import trained_parameters
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.options import PrivacyOptions, batch_and_rate, check_opacus, is_number
from gramian.privacy.sampling.population import population
from gramian.privacy.sampling.private_loader import PrivateLoader, fingerprint
from gramian.privacy.sampling.single_collation import RememberingCollate
from gramian.taps.hub import hub_of
from gramian.taps.model.user_names import named_parameters, unwrap
from gramian.taps.proof.row_proof import check_proof
from gramian.taps.proof.sample_arguments import SampleArguments
from gramian.taps.proof.single_unit import Lone
from gramian.taps.sites.site import first_tensor

_private: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
EAGER = "a private step draws its noise outside of any graph; expected fullgraph=False"
"""A graph would hold key and number of one release as constants, and draw the same noise again."""


class PrivacyEngine:
    """Differentially private training: clipped per-sample gradients, Poisson batches, noise, and an account of ε.

    ```python
    engine = gramian.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.get_epsilon(delta=1e-5)
    ```

    The unit of privacy is one record of the data set; docs/concepts/privacy.md says what is and what is not protected.
    """

    def __init__(
        self,
        accountant: str = "prv",
        *,
        insecure_reproducible: bool = False,
        seed: int | None = None,
        secure_mode: bool = False,
    ) -> None:
        """Draw the secret key.

        Args:
            accountant: "prv", "rdp" or "gdp".
            insecure_reproducible: take the key from `seed` instead: for tests, no privacy; it is recorded.
            seed: of that key.
            secure_mode: Opacus' argument: the key is secret without it, so True says only that it must be.
        """
        if secure_mode and insecure_reproducible:
            raise GramianError("secure_mode: has a secret key; expected it without insecure_reproducible=True")
        self._ledger = Ledger(accountant, insecure_reproducible=insecure_reproducible, seed=seed)
        self.stopwatch = Stopwatch()
        """Times of the parts of a step, where GRAMIAN_PROFILE=1 asks for them."""
        self.nonfinite = 0
        """Samples that were left out because their gradient was not finite. Not covered by ε."""
        self._warned = self._stepped = False
        self._installed: ExitStack | None = None
        self._clipping: Clipping | WholeGradient | None = None

    # ---- making private --------------------------------------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: Any,
        noise_multiplier: float,
        max_grad_norm: float,
        clipping: str = "auto",
        norm_algorithm: str = "auto",
        loss_reduction: str | float = "mean",
        poisson_sampling: bool = True,
        max_physical_batch: int | None = None,
        memory_budget: int | str | None = None,
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
        expected_batch: float | None = None,
        sample_rate: float | None = None,
        tuning: Tuning | None = None,
        proof: str | int = "auto",
        **opacus: Any,
    ) -> tuple[nn.Module, Optimizer, Any]:
        """Install taps on the model and a hook before the optimizer's step; both stay the user's objects.

        Args:
            module: the model, plain, compiled, in DDP or with `fully_shard`.
            optimizer: steps its parameters; the norm covers those.
            data_loader: this process's loader over the whole data set; under Poisson its sampler is replaced.
            noise_multiplier: σ: standard deviation of the noise over max_grad_norm; 0: none.
            max_grad_norm: C.
            clipping: "auto", "bookkeeping", "keep" or "two_pass"; "flat", Opacus' name of one norm over all parameters, is
                "auto".
            norm_algorithm: "auto", "gram" or "direct", for linear layers.
            loss_reduction: "mean" or "sum" over the samples of a batch, or the coefficient of one sample's loss.
            poisson_sampling: draw every batch by Poisson sampling; False: the loader stays as it is.
            max_physical_batch: most samples in one backward; a draw comes in pieces.
            memory_budget: bytes, or "8GB", that clipping may hold; None: about what the step's activations take.
            loss_scale: what the loss is multiplied by before backward, or the `GradScaler` that does it.
            expected_batch: samples of a step on average over all processes; None: the loader's batch size times processes.
            sample_rate: probability of a record to be in a step, beside expected_batch; None: that over the data set's length.
            tuning: optimisations to switch off.
            proof: "auto": before the first batch of every structure of inputs is used, show that each row depends on its sample
                alone, and repeat one run of that on one step in a thousand; a number: on one step in so many; "off": trust the
                shapes, which is recorded.
            **opacus: `grad_sample_mode`, `secure_mode`, `noise_generator`, `criterion` and `batch_first` of Opacus' function:
                taken where they mean what happens here, else refused with what takes their place.

        Returns:
            The module, the optimizer, and the loader to iterate over.

        Raises:
            GramianError: naming the argument or layer that does not fit; nothing is installed then.
        """
        if self._installed is not None:
            raise GramianError("engine: makes a model private already; expected detach() before, or another engine")
        options = PrivacyOptions(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            clipping="auto" if clipping == "flat" else clipping,
            norm_algorithm=norm_algorithm,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            max_physical_batch=max_physical_batch,
            memory_budget=memory_budget,
            loss_scale=loss_scale,
        )
        check_opacus(opacus, loss_reduction)
        options.check_optimizer(module, optimizer)
        check_proof(proof)
        if tuning is not None and not isinstance(tuning, Tuning):
            raise GramianError(f"tuning: expected a gramian.privacy.Tuning, got {type(tuning).__name__}")
        root = unwrap(module)
        if root in _private:
            raise GramianError("module: is private already; expected one engine for each model")
        parallel = DataParallel.of(module, root)
        if parallel.world == 1 and dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                "module: is not wrapped although there are several processes, so each trains, and accounts for, a model of its "
                "own; expected DistributedDataParallel or fully_shard for one model over all of them",
                stacklevel=2,
            )
        trained = trained_parameters(root, optimizer)
        refuse_mixing(layers_with_sites(root))
        device = next(iter(trained.values())).device
        if proof == "off":
            warnings.warn(
                'proof: is "off"; whose row is which is taken from shapes, and epsilon rests on that', stacklevel=2
            )
        self._proof = ProofLog(proof)
        self._options, self._parallel, self._rate_given = options, parallel, sample_rate is not None
        self._expected_batch, self._sample_rate = batch_and_rate(
            data_loader, parallel.world, expected_batch, sample_rate, poisson_sampling
        )
        told = {**vars(options), "expected_batch": self._expected_batch, "sample_rate": self._sample_rate}
        told["loss_scale"] = type(told["loss_scale"]).__name__
        shapes = [(name, tuple(p.shape)) for name, p in trained.items()]
        told["optimizer"] = [type(optimizer).__name__, shapes]
        records = getattr(data_loader, "dataset", None)
        drawn = poisson_sampling and isinstance(records, Sized) and not isinstance(records, IterableDataset)
        if not poisson_sampling:
            warnings.warn(
                "poisson_sampling: is off; epsilon is computed as if every batch were a Poisson draw", stacklevel=2
            )
        with ExitStack() as stack:
            stack.callback(self._ledger.close)
            known = fingerprint(records) if drawn else None
            weights = partial(weight_digest, root, optimizer, trained, parallel)
            self._ledger.open(told, known, (noise_multiplier, self._sample_rate), parallel, device, weights)
            self._noise = NoisePlan(self._ledger.secrets.noise_key, shapes)
            self._loader = self._private_loader(data_loader) if poisson_sampling else None
            self._collate = None if poisson_sampling else self._remember(stack, data_loader)
            self._install(stack, module, root, optimizer, trained, tuning or Tuning())
            _private.add(root)
            stack.callback(_private.discard, root)
            self._installed = stack.pop_all()
        self._trained, self._root, self._module = trained, root, module
        self._sums.forget()  # what was there before is not private
        return module, optimizer, data_loader if self._loader is None else self._loader

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, epochs: float, data_loader: Any, **options: Any
    ) -> tuple[nn.Module, Optimizer, Any]:
        """`make_private` with the least noise that spends target_epsilon in so many epochs.

        Args:
            target_epsilon: ε.
            target_delta: δ.
            epochs: passes over the data set, on average.
            data_loader: as for `make_private`.
            **options: of `make_private`, but for noise_multiplier.
        """
        if "noise_multiplier" in options:
            raise GramianError("noise_multiplier: follows from target_epsilon; expected only one of them")
        for field, value in (("epochs", epochs), ("target_epsilon", target_epsilon), ("target_delta", target_delta)):
            if not is_number(value) or not value > 0:
                raise GramianError(f"{field}: expected a number above 0, got {value!r}")
        if not isinstance(options.get("module"), nn.Module):
            raise GramianError(f"module: expected an nn.Module, got {type(options.get('module')).__name__}")
        world = DataParallel.of(options["module"], unwrap(options["module"])).world
        if self.steps:
            raise GramianError(
                "target_epsilon: the engine has spent some already; expected a new one, or noise_multiplier"
            )
        batch, rate = batch_and_rate(
            data_loader,
            world,
            options.get("expected_batch"),
            options.get("sample_rate"),
            options.get("poisson_sampling", True),
        )
        poisson, given = options.get("poisson_sampling", True), options.get("sample_rate") is not None
        size = population(data_loader, world, poisson=poisson, rate_given=given) or batch / rate
        yielded = epochs * max(1, round(size / batch))
        steps = math.ceil(max(epochs / rate, yielded))
        noise = find_noise_multiplier(target_epsilon, target_delta, rate, steps, self._ledger.accounting.mechanism)
        return self.make_private(data_loader=data_loader, noise_multiplier=noise, **options)

    def _remember(self, stack: ExitStack, data_loader: Any) -> RememberingCollate | None:
        """Let a loader that stays as it is remember its last batch, until the engine is detached."""
        collate = getattr(data_loader, "collate_fn", None)
        if collate is None or not isinstance(data_loader, DataLoader):
            return None
        data_loader.collate_fn = remembering = RememberingCollate(collate)
        stack.callback(setattr, data_loader, "collate_fn", collate)
        return remembering

    def _private_loader(self, data_loader: DataLoader[Any]) -> PrivateLoader:
        return PrivateLoader(
            data_loader,
            key=self._ledger.secrets.sampling_key,
            sample_rate=self._sample_rate,
            expected_batch=self._expected_batch,
            next_draw=lambda: self.released,
            on_piece=self._begin_piece,
            rank=self._parallel.rank,
            world=self._parallel.world,
            max_physical_batch=self._options.max_physical_batch,
        )

    def _install(
        self,
        stack: ExitStack,
        module: nn.Module,
        root: nn.Module,
        optimizer: Optimizer,
        trained: Mapping[str, nn.Parameter],
        tuning: Tuning,
    ) -> None:
        options = self._options
        stack.callback(ReducerOff(module).restore)
        self._sums = GradientSums(trained, self._parallel, tuning.overlap, self.stopwatch, options.loss_scale)
        self._outside = Outside(root, trained, optimizer, lambda: self._sums.watch.on)
        stack.callback(self._outside.remove)
        self._looked_behind_loss = False
        self._draws: set[int] = set()
        self._piece: tuple[int, int, bool] | None = None
        self._passes_at_piece = self._passes_since_step = self._records = 0
        self._remembers_nothing = False
        whole = options.max_physical_batch == 1 and options.clipping in ("auto", "keep")
        if whole and self._parallel.kind != "fsdp2":
            self._clipping = WholeGradient(
                root,
                trained,
                self._sums,
                max_grad_norm=options.max_grad_norm,
                loss_reduction=options.loss_reduction,
                loss_scale=options.loss_scale,
            )
            self._clipping.on_inputs = self._look_at_inputs
            stack.callback(self._clipping.remove)
        else:
            hub = hub_of(root)
            self._clipping = Clipping(
                hub,
                trained,
                self._sums,
                max_grad_norm=options.max_grad_norm,
                loss_reduction=options.loss_reduction,
                loss_scale=options.loss_scale,
                storage=options.clipping,  # type: ignore[arg-type]
                algorithm=options.norm_algorithm,  # type: ignore[arg-type]
                budget=options.budget,
                tuning=tuning,
                stopwatch=self.stopwatch,
                proof=self._proof.option,
            )
            self._clipping.on_proof_due, self._clipping.on_proof_failed = self._proof_is_due, self._proof_failed
            hub.proof.know_loader(self._sample_alone)
            bypass = Bypass(trained, lambda: hub.live)
            stack.callback(bypass.remove)
            self._clipping.on_watch = bypass.watch
            if self._parallel.kind == "fsdp2":
                for _ in each_unsharded(root):
                    for name, p in named_parameters(root):
                        if not hasattr(p, "placements"):
                            bypass.watch(name, p)
            stack.enter_context(hub.governed_by(self._clipping))
            hub.attach(self._clipping)
            stack.callback(hub.detach, self._clipping)
            stack.callback(hub.proof.forget_loader)
            hub.on_inputs = self._look_at_inputs
            stack.callback(setattr, hub, "on_inputs", lambda inputs: None)
        self._clipping.on_begin, self._clipping.on_done = self._before_sums, self._after_backward
        handle = optimizer.register_step_pre_hook(torch.compiler.disable(self._step_hook, reason=EAGER))
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(handle.id, last=False)  # others see what is private already
        stack.callback(handle.remove)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def _begin_piece(self, draw: int, piece: int, last: bool, records: int) -> None:
        if self._installed is None:
            raise GramianError("data_loader: its engine was detached; expected the loader of a private model")
        if draw not in self._draws and self._draws and self._passes_since_step:
            raise GramianError(
                f"step: draw {min(self._draws)} was summed, and no step of the private optimizer released it; "
                "expected one optimizer.step() of make_private's optimizer for each draw"
            )
        if draw in self._draws and piece == 0:  # a loop that was left and begun again: nothing of this draw counts yet
            self._sums.forget()
            self._passes_since_step = 0
        self._piece, self._records = (draw, piece, last), records
        self._draws.add(draw)
        self._passes_at_piece = self._clipping.passes if self._clipping is not None else 0

    def _before_sums(self, rows: int) -> None:
        """Refuse a backward whose samples would count more than once, before anything is summed.

        Raises:
            GramianError: naming what is there too often.
        """
        assert self._clipping is not None
        self._outside.refuse()
        self._sums.begin()
        limit = self._options.max_physical_batch
        if limit is not None and rows > limit:
            raise GramianError(
                f"max_physical_batch: is {limit}, and a backward has {rows} samples; expected batches of at most as many "
                "(without Poisson sampling the loader does not split them)"
            )
        if not self._options.poisson_sampling or self._piece is None:
            return
        if self._clipping.passes > self._passes_at_piece:
            raise GramianError(
                "backward: ran twice on one batch of the loader, so its samples would count twice; "
                "expected one backward for each batch"
            )
        if rows != self._records:
            raise GramianError(
                f"batch: has {rows} rows for {self._records} records of the data set; expected one row for each record, on the "
                "first axis of the model's first tensor (several views of a record next to each other inside the model)"
            )

    def _after_backward(self) -> None:
        clipping = self._clipping
        assert clipping is not None
        if clipping.last is not None:
            self.nonfinite += clipping.last.nonfinite
            if clipping.last.nonfinite and clipping.last.nonfinite == len(clipping.last.norms_B) and not self._warned:
                self._warned = True
                warnings.warn(
                    "backward: no sample of a batch had a finite gradient, so the step was noise alone; expected a smaller "
                    "loss_scale (a GradScaler does not see this), or data without NaN",
                    stacklevel=2,
                )
        self._passes_since_step += 1

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()` that may take two passes where holding anything would not fit into the budget."""
        clipping = self._active()
        if not self._looked_behind_loss:  # a walk through the whole graph: once
            self._looked_behind_loss = True
            self._outside.look_behind(loss)
        if isinstance(clipping, WholeGradient):
            loss.backward()
            return
        plan = clipping.foresight.newest()
        clipping.allows_two_passes = True
        try:
            if plan is None or not plan.two_pass:
                loss.backward()
                return
            clipping.again = True
            try:
                with self.stopwatch.time("backward", "first", cuda=loss.is_cuda):
                    loss.backward(retain_graph=True)
            finally:
                clipping.again = False
            with self.stopwatch.time("backward", "second", cuda=loss.is_cuda):
                loss.backward()
        finally:
            clipping.allows_two_passes = False

    def _step_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Run a closure, release what its backward or the one before has summed, and hand on the closure's loss."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            self._before_step(optimizer)
            return None
        with torch.enable_grad():
            loss = closure()
        self._before_step(optimizer)
        return (args[0], *args[2:]), {**kwargs, "closure": _once(loss)}

    def _before_step(self, optimizer: Optimizer) -> None:
        """Noise and divide, or on any but the last piece of a draw put the sum aside."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if stepped != {id(p) for p in self._trained.values()}:
            raise GramianError(
                "optimizer: its trained parameters are not those of make_private; expected detach() and make_private again"
            )
        if isinstance(self._clipping, WholeGradient):
            self._clipping.recover()
        scaling = self._scaling_at(optimizer)
        if self._options.poisson_sampling:
            if len(self._draws) != 1 or self._piece is None:
                raise GramianError(
                    f"step: {len(self._draws)} draws since the last one; expected one step for each draw of the private loader"
                )
            if self._records and self._clipping is not None and self._clipping.passes == self._passes_at_piece:
                raise GramianError(
                    f"step: no backward of the last batch reached its {self._records} records; expected loss.backward() of a "
                    "forward of the model, without inputs="
                )
            if not self._piece[2]:
                unchanged = self._sums.compare(scaling)
                self._sums.move(scaling)
                self._stepped = False
                unchanged()
                return
            if self._piece[0] != self.released:
                raise GramianError(
                    f"step: draw {self._piece[0]} of the loader was released before; expected one loop over it at a time"
                )
        elif not self._rate_given:
            rate = min(1.0, self._sample_rate * max(1, self._passes_since_step))  # several batches in one step
            accounting = self._ledger.accounting
            if accounting.mechanism == "gdp" and self.steps and accounting.history[-1][1] != rate:
                raise GramianError(
                    "accountant: gdp composes steps of one kind, and this one has another number of backwards than the last; "
                    "expected as many in each, or prv or rdp"
                )
            accounting.record(self._options.noise_multiplier, rate)
        unchanged = self._sums.compare(scaling)
        number = self._ledger.begin()
        self._passes_since_step = 0
        options = self._options
        with torch.no_grad(), self.stopwatch.time("step", cuda=next(iter(self._trained.values())).is_cuda):
            std = options.noise_multiplier * options.max_grad_norm
            self._sums.release(self._noise, number, std, self._expected_batch, scaling)
        self._draws.clear()
        self._piece, self._stepped = None, False
        unchanged()
        self._stepped = True
        self.stopwatch.step += 1

    def _scaling_at(self, optimizer: Optimizer) -> Scaling:
        """What `p.grad` is multiplied by as the step begins.

        Raises:
            GramianError: if a scaler was to unscale the gradients and has not.
        """
        scaler = self._options.loss_scale
        inside = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
        if not isinstance(scaler, torch.amp.GradScaler):
            if inside is not None:
                raise GramianError(
                    "loss_scale: a GradScaler is at work; expected it as make_private(loss_scale=scaler)"
                )
            return Scaling(left=float(scaler))
        if not scaler.is_enabled():
            return Scaling()
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
        if inside is None and stage is OptState.READY:
            raise GramianError("loss_scale: the gradients are still scaled; expected scaler.step(optimizer)")
        return Scaling(inside=inside, undone=scaler.get_scale() if inside is None else 1.0)

    # ---- the row proof -----------------------------------------------------------------------------------------------

    def _proof_is_due(self) -> bool:
        """True once in the steps that the secret key draws."""
        return self._proof.is_due(self.released, self._ledger.secrets.sampling_key)

    def _proof_failed(self) -> None:
        self._proof.fail(self.released)

    def _look_at_inputs(self, inputs: tuple[Any, dict[str, Any]]) -> None:
        proven = bool(hub_of(self._root).proof.proven)
        _refuse_batch_of_one(*inputs, known=proven or self._piece is not None or self._expected_batch == 1)
        looks = not proven and self._proof.option != "off" and not self._remembers_nothing
        if looks and first_tensor(*inputs).shape[:1] == (1,):
            self._remembers_nothing = remembers_nothing(self._root, *inputs)
        self._outside.look_behind(inputs)

    def _sample_alone(self, samples: SampleArguments, among: Collection[int]) -> list[Lone]:
        remembers = self._loader if self._loader is not None else self._collate
        last = None if remembers is None else remembers.last_batch()
        return [] if last is None else last.samples_alone(samples, among)

    @property
    def proof(self) -> dict[str, Any]:
        """What was shown of the attribution of rows, for the record: rows, loss, and releases that it does not cover."""
        hub = hub_of(self._root)
        rows = "one sample a batch" if isinstance(self._clipping, WholeGradient) else None
        return self._proof.record(list(hub.proof.proven.values()), rows)

    # ---- results ---------------------------------------------------------------------------------------------------

    def get_epsilon(self, delta: float, releases: int | None = None) -> float:
        """ε spent so far at this δ; with `releases`, of the first so many."""
        return self._ledger.accounting.epsilon(delta, releases)

    @property
    def released(self) -> int:
        """Number of the next release: `steps`, but for a replay, which gives numbers again that were begun before."""
        return self._ledger.counter.released

    @property
    def steps(self) -> int:
        """Releases begun, lost ones included: what ε is computed from."""
        return self._ledger.counter.spent

    @property
    def not_replayed(self) -> str | None:
        """Why the last `load_state_dict(…, replay=True)` was no replay; None: it was one, or was not asked to be."""
        return self._ledger.not_replayed

    @property
    def stepped(self) -> bool:
        """True if the last step() released something; False on all but the last piece of a draw."""
        return self._stepped

    @property
    def noise_multiplier(self) -> float:
        """σ."""
        self._active()
        return self._options.noise_multiplier

    @property
    def expected_batch(self) -> float:
        """What a step divides by."""
        self._active()
        return self._expected_batch

    @property
    def sample_rate(self) -> float:
        """Probability of a record to be in a step."""
        self._active()
        return self._sample_rate

    @property
    def plan(self) -> ClippingPlan | None:
        """How the last backward was carried out, as a table; None before the first, and for batches of one sample."""
        plan = self._clipping.plan if isinstance(self._clipping, Clipping) else None
        return None if plan is None else replace(plan, proof=self._proof_line())

    def _proof_line(self) -> str:
        shown = self.proof
        return f"rows: {shown['rows']}; loss: {shown['loss']}"

    @property
    def last(self) -> Clipped | None:
        """Norms and factors of the last backward's samples. Not covered by ε."""
        return None if self._clipping is None else self._clipping.last

    def check_independence(self, loss_fn: Callable[..., Tensor], batch: Any) -> None:
        """Prove that a loss keeps samples apart, by the row proof with the user's own loss.

        Args:
            loss_fn: the loss of a batch: `loss_fn(*batch)` for a tuple or list, `loss_fn(batch)` else; with one more argument
                it is given the model first.
            batch: tensors with the samples on dim 0, in any structure.

        Raises:
            GramianError: naming the layer whose rows change when other samples are replaced.
        """
        clipping = self._active()
        if isinstance(clipping, Clipping):  # else every sample is alone
            self._proof.loss = False  # what an earlier loss showed is not this one's
            check_independence(hub_of(self._root), self._root, loss_fn, batch)
            self._proof.loss = True

    # ---- state -----------------------------------------------------------------------------------------------------

    def bind_counter(self, path: "str | os.PathLike[str]", *, must_exist: bool = False) -> None:
        """Keep the number of releases begun in a file beside the checkpoint, durably before each step.

        Args:
            path: of the file; the first process writes it.
            must_exist: a resumed run passes True.
        """
        self._ledger.bind(path, must_exist=must_exist)

    def state_dict(self) -> dict[str, Any]:
        """Accountant, counters and the secret key: keep it as secret as the data (`secrets.save_private` writes mode 0600).

        Raises:
            GramianError: in the middle of a draw, whose sums would be lost.
        """
        if self._installed is not None and self._sums.moved:
            raise GramianError("state_dict: a draw is under way; expected it between step() and the next batch")
        return {**self._ledger.state_dict(), "nonfinite": self.nonfinite}

    def load_state_dict(self, state: Mapping[str, Any], *, replay: bool = False) -> None:
        """Go on after a resume; ε is never refunded.

        Args:
            state: what `state_dict` gave.
            replay: True only if the steps that follow are bit for bit those that followed the checkpoint before (same config,
                data and deterministic kernels): they are then the same releases, counted once. Else, and where weights,
                buffers, optimizer state or number of processes are not those of the state or another version drew the noise,
                the counter moves past every step begun; `not_replayed` then says why. Load model and optimizer before.

        Raises:
            GramianError: if the state is none of ours.
        """
        self._ledger.load_state_dict(state, replay=replay)
        self.nonfinite = int(state["nonfinite"])
        if self._installed is not None:
            self._noise = NoisePlan(self._ledger.secrets.noise_key, list(self._noise.shapes.items()))
            self._ledger.accounting.record(self._options.noise_multiplier, self._sample_rate)
            self._draws.clear()
            self._piece = None
            self._passes_since_step = 0
            self._sums.forget()
            if self._loader is not None:
                self._loader.rekey(self._ledger.secrets.sampling_key)

    def detach(self) -> nn.Module:
        """Give the model and the optimizer back as they were; the account stays.

        Returns:
            The untouched model.
        """
        if self._installed is None:
            raise GramianError("engine: makes no model private; expected make_private before")
        self._installed.close()
        self._ledger.end_replay()
        self._installed, self._clipping = None, None
        if self._passes_since_step or self._sums.moved:
            self._sums.forget()  # clipped, but without noise
        return self._module

    def _active(self) -> "Clipping | WholeGradient":
        if self._clipping is None:
            raise GramianError("engine: makes no model private; expected make_private before")
        return self._clipping


def _once(loss: Any) -> Callable[[], Any]:
    """A closure that has run: it gives its loss to the optimizer, once."""
    given = iter((loss,))

    def closure() -> Any:
        for value in given:
            return value
        raise GramianError(
            "closure: the optimizer calls it twice in one step; expected an optimizer with one backward a step"
        )

    return closure


def _refuse_batch_of_one(args: Any, kwargs: dict[str, Any], *, known: bool) -> None:
    """A first tensor of one row (a temperature [1], a prompt [1, D]) makes a batch of 1, and all samples are clipped as one.

    Args:
        args: of the model.
        kwargs: of the model.
        known: True if the loader counts records, or larger batches were proven: a tensor of one row may then be one sample.

    Raises:
        GramianError: if another argument has more rows, and the first tensor may be no sample.
    """
    first = first_tensor(args, kwargs)
    if not first.dim() or first.shape[0] != 1 or (known and first.dim() > 1):
        return
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
    rows = [
        t.shape[0] for t in tensors if t.shape[0] > 1 and t.shape[0] not in first.shape[1:]
    ]  # a mask [T, T] is none
    if rows:
        raise GramianError(
            f"model: its first tensor has one row, which makes a batch of 1, and another argument has {max(rows)} rows; "
            "expected the samples as first tensor argument, and a batch axis of 1 in what belongs to no sample"
        )
