"""`PrivacyEngine`: exact DP-SGD on the user's own model, optimizer and loop."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.parallel.model_grid import grid_of
from gramian.privacy.accounting.ledger import Ledger
from gramian.privacy.accounting.noise_search import find_noise_multiplier
from gramian.privacy.audit.proof_log import ProofLog
from gramian.privacy.clipping.clip_factors import ClippedBatch
from gramian.privacy.clipping.clipping_plan import ClippingPlan
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.noise.noise_strategy import check_noise, is_correlated, kind_of
from gramian.privacy.options import PrivacyOptions, check_opacus, check_optimizer, is_number, sampling_rate
from gramian.privacy.private_batches import PrivateBatches
from gramian.privacy.private_model import PrivateModel
from gramian.privacy.sampling.physical_batch import planned_size
from gramian.privacy.sampling.population import units_of
from gramian.taps.model.user_names import unwrap
from gramian.taps.proof.row_proof import check_proof


class PrivacyEngine(PrivateBatches):
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

    The unit of privacy is one record of the data set, or with `unit_of` all records of a user or document;
    docs/concepts/privacy.md says what is and what is not protected.
    """

    def __init__(
        self,
        accountant: str = "prv",
        *,
        insecure_reproducible: bool = False,
        seed: int | None = None,
        secure_mode: bool = False,
    ) -> None:
        """Create an engine with a new secret key and an account of ε without any step.

        Args:
            accountant: how ε is computed: "prv" or "pld" (tight upper bounds; "pld" also for truncated draws), "rdp" (looser
                upper bound) or "gdp" (approximation that may be too low).
            insecure_reproducible: True derives the key from `seed`, so that a test can repeat the noise. There is no privacy
                then; `state_dict` records it.
            seed: seed of that key; None: 0.
            secure_mode: argument of Opacus. The key is secret without it; True only refuses insecure_reproducible.

        Raises:
            GramianError: for an unknown accountant, a seed without insecure_reproducible, or secure_mode with
                insecure_reproducible.
        """
        if secure_mode and insecure_reproducible:
            raise GramianError("secure_mode: has a secret key; expected it without insecure_reproducible=True")
        self._ledger = Ledger(accountant, insecure_reproducible=insecure_reproducible, seed=seed)
        self.stopwatch = Stopwatch()
        """Times of the parts of a step; recorded if the environment has GRAMIAN_PROFILE=1."""
        self.nonfinite = 0
        """Number of samples left out because their gradient was not finite. ε does not cover the publication of this number."""
        self._warned_of_nonfinite = False
        self._model: PrivateModel | None = None
        """The model made private last, also after `detach`; None before `make_private`."""

    # ---- making private --------------------------------------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: Any,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        clip_function: str = "flat",
        noise: str = "gaussian",
        bands: int | None = None,
        releases: int | None = None,
        clipping: str = "auto",
        norm_algorithm: str = "auto",
        loss_reduction: str | float = "mean",
        poisson_sampling: bool | str = True,
        max_draw: int | None = None,
        max_physical_batch: int | str | None = None,
        memory_budget: int | str | None = None,
        loss_scale: "float | torch.amp.GradScaler" = 1.0,
        expected_batch: float | None = None,
        sample_rate: float | None = None,
        unit_of: Any = None,
        max_records_per_unit: int | None = None,
        proof: str | int = "auto",
        metric: KFACNaturalGradient | None = None,
        **opacus: Any,
    ) -> tuple[nn.Module, Optimizer, Any]:
        """Make training private: hook the model and the optimizer's step, and draw batches by Poisson sampling.

        Model and optimizer remain the user's own objects.

        Args:
            module: the model, plain, compiled, in DDP, with `fully_shard`, tensor parallel, or both.
            optimizer: the optimizer of the model. Clipping covers the trainable parameters in it.
            data_loader: this process's loader over the complete data set; Poisson sampling replaces its sampler.
            noise_multiplier: σ, the standard deviation of the noise divided by max_grad_norm; 0: no noise.
            max_grad_norm: C, the largest norm of one sample's gradient after clipping; a list has one C_l for each layer.
            clip_function: "flat": min(1, C/norm); "per_layer": min(1, C_l/norm) of each layer's part, C_l = C/√layers;
                "automatic": C/(norm + 0.01); "adaptive": as flat, with a C that follows the median norm privately, from
                max_grad_norm on.
            noise: "gaussian": independent in every release; "bandmf" and "bisr": correlated over releases, so that it cancels
                in part, with records in groups that are drawn from in turn (docs/concepts/correlated_noise.md).
            bands: releases over which noise is correlated; "bandmf" stores bands - 1 tensors as large as the gradients.
            releases: number of releases of the whole run, beyond which a step is refused; "bandmf" needs it beforehand.
            clipping: what a backward stores until the clip factors are known: "bookkeeping": inputs and output gradients;
                "keep": per-sample gradients; "two_pass": nothing, the backward runs twice; "auto", or "flat" as in Opacus: the
                fastest of these within memory_budget.
            norm_algorithm: how linear layers compute per-sample norms: "gram" from Gram matrices over tokens, "direct" from
                per-sample gradients, "auto": the faster one at each shape.
            loss_reduction: "mean" or "sum" over the samples of a batch, or the coefficient of one sample's loss.
            poisson_sampling: draw every batch by Poisson sampling; "truncated": and cut larger draws to max_draw records, which
                costs ε; False: use the loader unchanged.
            max_draw: largest number of records of a truncated draw over all processes; what is left out is drawn by key.
            max_physical_batch: largest number of samples in one backward; a larger Poisson draw is split into micro-batches.
                "auto", or bytes such as "24GB" that a step may take beside the weights: planned from forwards of single
                records, a power of two (`engine.max_physical_batch`). None: no limit.
            memory_budget: bytes, or text such as "8GB", that clipping may store; None: about what the step's activations take.
            loss_scale: factor of the loss before backward, or the `GradScaler` that applies it.
            expected_batch: average number of samples of a step over all processes; None: the loader's batch size times the
                number of processes.
            sample_rate: probability that a record takes part in a step, given together with expected_batch; None:
                expected_batch / records.
            unit_of: integers, one for each index of the data set: the unit (user, document) that the record belongs to. Units
                are then drawn, clipped and accounted for: batch_size, expected_batch and sample_rate count units, and all
                records of a drawn unit are in one batch of one process. None: each record is a unit.
            max_records_per_unit: with unit_of, largest number of records of a unit in a draw; a larger unit gives a random
                subset, drawn by key. None: all.
            proof: row proof, which checks that each row of a layer's tensors depends on its sample alone. "auto": on the first
                batch of every structure of inputs, and repeated in part on about one step in 1000; a number n: repeated on one
                step in n; "off": trust the shapes, which is recorded.
            metric: K-FAC factors of PUBLIC data (`kfac.public = True` says so): norms are those of (F + damping)^(-1/2) g, and
                the noise is (F + damping)^(1/2) times it, at the same ε. Refreshes count from the next draw on. None: plain.
            **opacus: `grad_sample_mode`, `secure_mode`, `noise_generator`, `criterion` and `batch_first` of Opacus' function.
                They are accepted if they ask for what gramian does anyway; otherwise the error names what to use instead.

        Returns:
            The module, the optimizer, and the loader to iterate over (`data_loader` itself without Poisson sampling).

        Raises:
            GramianError: naming the argument or layer that is not supported; nothing is installed then.
            TypeError: for any other keyword argument.
        """
        if self._installed is not None:
            raise GramianError("engine: makes a model private already; expected detach() before, or another engine")
        options = PrivacyOptions(
            noise_multiplier=noise_multiplier,
            max_grad_norm=tuple(max_grad_norm) if isinstance(max_grad_norm, list | tuple) else max_grad_norm,  # type: ignore[arg-type]
            clip_function=clip_function,  # type: ignore[arg-type]
            noise=noise,  # type: ignore[arg-type]
            bands=bands,
            releases=releases,
            clipping="auto" if clipping == "flat" else clipping,  # type: ignore[arg-type]
            norm_algorithm=norm_algorithm,  # type: ignore[arg-type]
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            max_draw=max_draw,
            max_physical_batch=max_physical_batch,  # type: ignore[arg-type]  # planned below
            memory_budget=memory_budget,
            loss_scale=loss_scale,
        )
        check_opacus(opacus, loss_reduction)
        check_optimizer(module, optimizer)
        if isinstance(max_physical_batch, str):
            options = replace(options, max_physical_batch=planned_size(options, module, optimizer, data_loader))
        check_proof(proof)
        units = units_of(data_loader, unit_of, max_records_per_unit, poisson=bool(poisson_sampling))
        self._model = model = PrivateModel(
            module,
            optimizer,
            data_loader,
            options,
            expected_batch=expected_batch,
            sample_rate=sample_rate,
            units=units,
            proof=ProofLog(proof),
            metric=metric,
            ledger=self._ledger,
            stopwatch=self.stopwatch,
        )
        model.step.on_clipped = self._count_nonfinite
        return module, optimizer, data_loader if model.loader is None else model.loader

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, epochs: float, data_loader: Any, **options: Any
    ) -> tuple[nn.Module, Optimizer, Any]:
        """Call `make_private` with the least noise for which `epochs` epochs spend at most (target_epsilon, target_delta).

        A step with which more would be spent is refused before it begins. `options` are the other arguments of `make_private`,
        without noise_multiplier. The result is that of `make_private`.

        Raises:
            GramianError: for an invalid argument, or if the engine has taken steps before.
        """
        if "noise_multiplier" in options:
            raise GramianError("noise_multiplier: follows from target_epsilon; expected only one of them")
        for field, value in (("epochs", epochs), ("target_epsilon", target_epsilon), ("target_delta", target_delta)):
            if not is_number(value) or not value > 0:
                raise GramianError(f"{field}: expected a number above 0, got {value!r}")
        if not isinstance(options.get("module"), nn.Module):
            raise GramianError(f"module: expected an nn.Module, got {type(options.get('module')).__name__}")
        world_size = grid_of(options["module"], unwrap(options["module"])).data[1]
        if self.steps:
            raise GramianError(
                "target_epsilon: the engine has spent some already; expected a new one, or noise_multiplier"
            )
        poisson, given = options.get("poisson_sampling", True), options.get("sample_rate")
        unit_of, most = options.get("unit_of"), options.get("max_records_per_unit")
        units = units_of(data_loader, unit_of, most, poisson=bool(poisson))
        rate = sampling_rate(data_loader, world_size, options.get("expected_batch"), given, bool(poisson), units)
        size = rate.records or rate.expected_batch / rate.sample_rate
        yielded = epochs * max(1, round(size / rate.expected_batch))
        steps = math.ceil(max(epochs / rate.sample_rate, yielded))
        mechanism = self._ledger.accounting.mechanism
        rest: tuple[Any, ...] = (rate.records or 0, options.get("max_draw") or 0) if poisson == "truncated" else ()
        if is_correlated(options.get("noise", "gaussian")):
            kind, steps = options["noise"], options.get("releases") or steps
            check_noise(kind, options.get("bands"), steps)
            rest = kind_of(kind, options["bands"], rate.sample_rate)
            options |= {"releases": steps} if kind == "bandmf" else {}
        noise = find_noise_multiplier(target_epsilon, target_delta, rate.sample_rate, steps, mechanism, rest)
        made = self.make_private(data_loader=data_loader, noise_multiplier=noise, **options)
        self.limit_epsilon(target_epsilon, target_delta, planned=steps)
        return made

    def _count_nonfinite(self, clipped: ClippedBatch) -> None:
        self.nonfinite += clipped.nonfinite
        if clipped.nonfinite and clipped.nonfinite == len(clipped.norms_B) and not self._warned_of_nonfinite:
            self._warned_of_nonfinite = True
            warnings.warn(
                "backward: no sample of a batch had a finite gradient, so the step was noise alone; expected a smaller "
                "loss_scale (a GradScaler does not see this), or data without NaN",
                stacklevel=2,
            )

    def detach(self) -> nn.Module:
        """Remove all hooks from the model and the optimizer; the account of ε stays.

        Returns:
            The model as it was given to `make_private`.

        Raises:
            GramianError: if no model is private.
        """
        model = self._active()
        model.detach()
        self._ledger.end_replay()
        return model.module

    # ---- results ---------------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> bool:
        """True if the last step() released a noised sum; False if its batch was not the last micro-batch of a Poisson draw."""
        return self._model is not None and self._model.step.stepped

    @property
    def noise_multiplier(self) -> float:
        """σ, the standard deviation of the noise divided by max_grad_norm; a `GramianError` if no model is private."""
        return self._active().options.noise_multiplier

    @property
    def clip_norm(self) -> float:
        """Largest norm of one sample's clipped gradient now, which "adaptive" changes; a `GramianError` if not private."""
        return self._active().clip.sensitivity

    @property
    def max_physical_batch(self) -> int | None:
        """Largest number of samples of one backward, planned with "auto"; None: no limit. A `GramianError` if not private."""
        return self._active().options.max_physical_batch

    @property
    def expected_batch(self) -> float:
        """Average samples of a step over all processes, by which the noised sum is divided; a `GramianError` if not private."""
        return self._active().rate.expected_batch

    @property
    def sample_rate(self) -> float:
        """Probability that a record takes part in a step; a `GramianError` if no model is private."""
        return self._active().rate.sample_rate

    @property
    def proof(self) -> dict[str, Any]:
        """Results of the row proof, the check that each row of a layer's tensors depends on its sample alone.

        JSON values under the keys "rows" and "loss" ("proven" or why not), "structures" (one entry per structure of inputs),
        "releases not covered".

        Raises:
            GramianError: before the first `make_private`.
        """
        return (self._model or self._active()).proof_record()

    @property
    def metric(self) -> dict[str, Any] | None:
        """What the metric of clipping and noise rests on, as JSON values; None without one, and if no model is private."""
        return None if self._installed is None or self._installed.metric is None else self._installed.metric.record()

    @property
    def plan(self) -> ClippingPlan | None:
        """How the last backward computed norms and clipped sums, as a table.

        None before the first backward, after `detach`, and where single samples are clipped without taps
        (max_physical_batch=1).
        """
        if self._installed is None or self._installed.clipping.plan is None:
            return None
        proof = self.proof
        noise, stored = self._installed.noise.record(1), ""
        if "bytes" in noise:
            stored = f"; noise: {noise['name']}, {noise['bands']} bands, {format_bytes(noise['bytes'])} of buffers"
        if self.max_physical_batch is not None:
            stored += f"; backwards of at most {self.max_physical_batch} samples"
        notes = f"rows: {proof['rows']}; loss: {proof['loss']}; adjacency: {self._installed.units.adjacency}{stored}"
        return replace(self._installed.clipping.plan, proof=notes)

    @property
    def last(self) -> ClippedBatch | None:
        """Gradient norms and clip factors of the last backward's samples. ε does not cover their publication.

        Of a tensor-parallel model: of the samples that this process clips, a share of its group's. None before the first
        backward and after `detach`.
        """
        return None if self._installed is None else self._installed.clipping.last

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of the accountant, counters and secret key: as secret as the data (`secrets.save_private` writes mode 0600).

        Raises:
            GramianError: between the micro-batches of one Poisson draw, whose sums would be lost.
        """
        if self._installed is not None and self._installed.sums.moved:
            raise GramianError("state_dict: a draw is under way; expected it between step() and the next batch")
        noise = (
            self._ledger.noise_state
            if self._installed is None
            else self._installed.noise.state(self._installed.step.noise)
        )
        more = {} if noise is None else {"noise": noise}
        return {**self._ledger.state_dict(), "nonfinite": self.nonfinite, **more}

    def load_state_dict(self, state: Mapping[str, Any], *, replay: bool = False) -> None:
        """Load the account and the key of a checkpoint; ε that was spent since is never refunded.

        Load the model and the optimizer before.

        Args:
            state: result of `state_dict`.
            replay: True only if the steps that follow repeat, bit for bit, the steps that followed the checkpoint before (same
                config, data and deterministic kernels). They are then the same releases and are counted once. With False, the
                next release gets a number that was never begun, under a new key. The same happens with True if weights,
                buffers, optimizer state, number of processes or version of the noise generator are not those of the state;
                `not_replayed` then says why.

        Raises:
            GramianError: if the state is not one of `state_dict`, or if options differ from those of the state to replay.
        """
        self._ledger.load_state_dict(state, replay=replay)
        self.nonfinite = int(state["nonfinite"])
        if self._installed is not None:
            self._installed.restart()
