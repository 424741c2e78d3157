"""K-FAC: the Fisher of a network as Kronecker products, from estimation to the natural gradient.

F = E[g gᵀ], block by block. A layer y = W a with output gradient g has F ≈ G ⊗ A with A = E[a aᵀ], G = E[g gᵀ], so that
F vec(Y) = vec(G Y A) for Y of the weight's shape [o, m]: two small matrices in place of one of side o·m.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.apply.apply_factors import apply, inner
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec, find_blocks
from gramian.curvature.blocks.consistency import (
    check_number,
    check_spec,
    check_vector,
    has_factors,
    module_of,
    unique_parameters,
)
from gramian.curvature.blocks.output_head import known_head, seen_head
from gramian.curvature.estimate import fisher_labels
from gramian.curvature.estimate.kfac_capture import Idle, KFACCapture, check_terms
from gramian.curvature.estimate.refresh_sums import KroneckerSums, RemainderSums
from gramian.curvature.memory.curvature_plan import CurvaturePlan, keeps_of, plan
from gramian.curvature.options import Options
from gramian.curvature.persist import curvature_record, factor_file, factor_folder
from gramian.curvature.refresh import finish_refresh, refresh_schedule
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.curvature.spectrum import capacity
from gramian.parallel.exchange import Exchange
from gramian.taps.capture import check_arguments
from gramian.taps.coverage import Coverage
from gramian.taps.hub import hub_of
from gramian.taps.model.user_names import unwrap


class KFACNaturalGradient:
    """Curvature of a model, and gradients measured by it.

    ```python
    kfac = gramian.KFACNaturalGradient(damping=1e-3)
    with kfac.capture(model, num_terms=y.numel()):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    natural = kfac.compute_natural_gradient(model)
    ```
    """

    def __init__(
        self,
        damping: float = 0.03,
        damping_A: float | None = None,
        damping_G: float | None = None,
        ema_decay: float = 0.0,
        update_freq: int = 10,
        min_layer_size: int = 1,
        use_eigenvalue_correction: bool = True,
        max_condition_number: float = 1e6,
        kfac_use_woodbury: bool = True,
        kfac_policy: str = "all",
        kfac_big_threshold: int = 4096,
        kfac_true_fisher_head: bool = False,
        kfac_eps: float = 1e-6,
        kfac_auto_rho: float = 1.0,
        kfac_auto_t_max: int = 8192,
        woodbury_store_device: str = "auto",
        woodbury_dtype: str | None = None,
        kfac_distributed_reduce: str = "gram",
        *,
        damping_mode: str = "pi",
        weight_sharing: str = "expand",
        max_tokens: int | None = None,
        seed: int = 0,
        strict: bool = False,
        ekfac: bool = False,
        memory_budget: int | str | None = None,
        process_group: Any = None,
    ) -> None:
        """Check the options; no model is needed yet.

        Args:
            damping: λ.
            damping_A: λ_A of factored damping; None: λ.
            damping_G: λ_G of factored damping; None: λ.
            ema_decay: β of the debiased moving average over refreshes; 0: the last refresh alone.
            update_freq: captures and collections from one refresh to the next; the first one refreshes.
            min_layer_size: narrower layers get an exact block or a diagonal instead of K-FAC.
            use_eigenvalue_correction: clip the damped spectrum at σ_max/κ.
            max_condition_number: κ of the clip.
            kfac_use_woodbury: False: no low-rank factors.
            kfac_policy: "all", "auto", "hybrid" or "small_only"; see docs/concepts/kfac.md.
            kfac_big_threshold: width of G from which "hybrid" uses low rank.
            kfac_true_fisher_head: the exact Fisher of the softmax head in place of an estimate.
            kfac_eps: first Cholesky jitter, relative to the mean diagonal.
            kfac_auto_rho: "auto" uses low rank while T ≤ ρ·o.
            kfac_auto_t_max: most tokens (columns) that a low-rank factor holds.
            woodbury_store_device: where factors are kept: "auto", "cuda" or "cpu".
            woodbury_dtype: "fp16", "bf16", "fp32" or "fp64" at rest; None: fp16, and fp64 for float64 models.
            kfac_distributed_reduce: how several processes join low-rank sides: "gram" (rows spread by features), "gather" (all
                rows everywhere), "dense" (matrices added up), or "none": every process by itself. See
                docs/concepts/kfac_processes.md.
            damping_mode: "pi", "factored" or "joint".
            weight_sharing: "expand" (tokens are samples) or "reduce" (a sample's tokens are one).
            max_tokens: size of a keyed, rescaled subset of tokens per refresh; None: all.
            seed: of subsets and drawn labels.
            strict: raise where a refresh is dropped, something falls back, or a parameter is not covered.
            ekfac: second moments of per-sample gradients in K-FAC's eigenbasis in place of its eigenvalues; needs
                damping_mode="joint". See docs/concepts/ekfac.md.
            memory_budget: most bytes, or "8GB", that curvature may hold on any one device; see docs/concepts/kfac_memory.md.
            process_group: the processes that share the data; None: those of DDP or FSDP2, else all, as they are at a capture.

        Raises:
            GramianError: naming the first option that is not acceptable.
        """
        self.options = Options(
            damping=damping,
            damping_A=damping_A,
            damping_G=damping_G,
            damping_mode=damping_mode,
            max_condition_number=max_condition_number,
            use_eigenvalue_correction=use_eigenvalue_correction,
            update_freq=update_freq,
            ema_decay=ema_decay,
            min_layer_size=min_layer_size,
            weight_sharing=weight_sharing,
            kfac_use_woodbury=kfac_use_woodbury,
            kfac_policy=kfac_policy,
            kfac_big_threshold=kfac_big_threshold,
            kfac_true_fisher_head=kfac_true_fisher_head,
            kfac_eps=kfac_eps,
            kfac_auto_rho=kfac_auto_rho,
            kfac_auto_t_max=kfac_auto_t_max,
            woodbury_store_device=woodbury_store_device,
            woodbury_dtype=woodbury_dtype,
            kfac_distributed_reduce=kfac_distributed_reduce,
            max_tokens=max_tokens,
            seed=seed,
            strict=strict,
            memory_budget=memory_budget,
            ekfac=ekfac,
        )
        self.process_group = process_group
        self.world_size = 1
        """Processes at the last capture."""
        self.kfac_factors: dict[str, Block] = {}
        """{layer: its block, with `.A` and `.G` undamped and unclipped}; other blocks by parameter, `.A` None."""
        self.steps = 0
        """Captures and collections so far."""
        self.refreshes = 0
        """Those of them that made new factors."""
        self.dropped: list[dict[str, Any]] = []
        """Refreshes that came to nothing: the step and why."""
        self.padding: dict[str, list[float]] = {}
        """{layer: [tokens counted, loss terms]} of the last refresh, where tokens without a term were counted too."""
        self.head: str | None = None
        """The layer whose outputs are the logits, as far as it is known."""
        self._specs: dict[str, Spec] = {}
        self._last_refresh: int | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self._open = False
        self._number: tuple[Any, int] | None = None
        """A group, and this object's number among those that its processes share."""
        self._meetings = 0
        """Refreshes that were begun by several processes."""
        self._seeds = (0, 0)
        self._before_draws = self._generator.get_state()
        self._sent: dict[str, int] = {}
        self._spread = SharedFactorisation(None)
        self._warned = False
        self._softmax_checked = False
        self._coefficient_checked = False
        self._coefficient: float | None = None
        """Of one loss term, relative to the stated one, where the first refresh has shown that it is another."""
        self._identity: set[str] = set()
        self._seconds: dict[str, float] = {}

    # ---- estimation ------------------------------------------------------------------------------------------------

    def capture(
        self,
        model: nn.Module,
        *,
        loss_reduction: str | float = "mean",
        num_terms: float | None = None,
        token_weights: Tensor | None = None,
        loss_scale: float | torch.amp.GradScaler = 1.0,
        batch_size: int | None = None,
        sample_ids: Tensor | None = None,
        head: str | None = None,
        force: bool = False,
    ) -> KFACCapture | Idle:
        """Estimate on the user's own passes: the backward inside the `with` block brings the factors.

        Args:
            model: the user's model.
            loss_reduction: "mean", "sum", or the coefficient of one term in the loss.
            num_terms: N, loss terms behind this loss on this process; may be left out where token_weights is given.
            token_weights: [B, T], weights of the terms: 0 for padding and prompts.
            loss_scale: what the loss was multiplied by, or the `GradScaler`.
            batch_size: B, if it is not the first axis of the model's first tensor.
            sample_ids: [B], global ids that a subset of tokens (`max_tokens`) is keyed by; None: the i-th sample of process r
                of W is i·W + r.
            head: name of the layer whose outputs are the logits.
            force: refresh at once, whatever `update_freq` says; on all processes or none.

        Returns:
            A context; `cap.next(...)` goes before each further backward in it. On steps without a refresh nothing happens.
        """
        self._refuse_nested()
        others = refresh_schedule.others_of(self, model)
        due = refresh_schedule.begin(self, force, others)
        try:
            check_arguments(loss_reduction, batch_size, None, token_weights, loss_scale)
            check_terms(num_terms, token_weights)
            if not due:
                return Idle()
            return self._capture(
                model,
                others,
                loss_reduction=loss_reduction,
                num_terms=num_terms,
                token_weights=token_weights,
                loss_scale=loss_scale,
                batch_size=batch_size,
                sample_ids=sample_ids,
                head=head,
                estimate="empirical",
                exact_head=self.options.kfac_true_fisher_head,
                seed=self._seeds[0],
            )
        except GramianError as error:
            refresh_schedule.refuse(self, due, others, error)
            raise

    def _capture(
        self,
        model: nn.Module,
        others: Exchange | None,
        *,
        head: str | None,
        exact_head: bool,
        estimate: str,
        seed: int,
        **told: Any,
    ) -> KFACCapture:
        root = module_of(model)
        known = None if self._model is None else self._model()
        if known is not None and known is not root and self.kfac_factors:
            raise GramianError("model: the factors here are those of another model; expected one object for each model")
        specs = self._check_model(root)
        found = known_head(root, head)
        if exact_head and found is not None and not has_factors(found, specs):
            raise GramianError(
                f"head: {found!r} is no trained layer with K-FAC factors; expected the linear layer that makes the logits"
            )
        keeps_of(specs, self.options, found, exact_head)  # a budget that cannot be met is refused before any token
        kronecker = KroneckerSums(
            specs,
            self.options,
            seed,
            exact_head,
            head=found,
            check_softmax=not self._softmax_checked,
            check_coefficient=not self._coefficient_checked,
        )
        cap = KFACCapture(self, model, kronecker, RemainderSums(specs), estimate=estimate, others=others, **told)
        if found is None:
            kronecker.find_head = lambda: seen_head(cap.output_layer(), specs, exact_head)
        self._specs, self._model = specs, weakref.ref(root)
        return cap

    def collect_kfac_factors(
        self,
        model: nn.Module,
        batch: Any,
        fisher_type: str = "empirical",
        *,
        n_samples: int = 1,
        generator: torch.Generator | None = None,
        sample_ids: Tensor | None = None,
        causal_shift: bool | None = None,
        head: str | None = None,
        force: bool = False,
    ) -> dict[str, Block]:
        """Estimate on passes of its own; the user's gradients, mode and random state stay as they are.

        Args:
            model: a model that returns logits, alone or as `.logits`.
            batch: a mapping as Hugging Face models take it, or (inputs, labels).
            fisher_type: "empirical", "mc" (labels drawn from the model) or "true" (the head exactly, the rest "mc").
            n_samples: draws of labels.
            generator: source of the draws' seed; None: the object's own.
            sample_ids: [B], global ids that draws and subsets are keyed by; None: row i of process r of W is i·W + r.
            causal_shift: whether position t predicts label t+1; None: as Hugging Face does for this model.
            head: name of the layer whose outputs are the logits.
            force: refresh at once, whatever `update_freq` says.

        Returns:
            `kfac_factors`.
        """
        self._refuse_nested()
        others = refresh_schedule.others_of(self, model)
        due = refresh_schedule.begin(self, force, others)
        root = module_of(model)
        try:
            fisher_labels.check_draws(fisher_type, n_samples, generator)
            asked = fisher_labels.question(root, batch, causal_shift)
            drawn = fisher_type != "empirical"
            if not drawn and asked.labels is None and not asked.shifted:
                raise GramianError('labels: expected them in the batch for fisher_type="empirical"')
            if hub_of(root).live:
                raise GramianError(
                    "model: is inside an open capture, which would take these passes for its own; "
                    "expected collect_kfac_factors outside of it"
                )
        except GramianError as error:
            refresh_schedule.refuse(self, due, others, error)
            raise
        if not due:
            return self.kfac_factors
        exact_head = fisher_type == "true" or self.options.kfac_true_fisher_head
        draws, subset = self._seeds
        if generator is not None:
            draws, subset = refresh_schedule.draw_seed(generator), draws

        def capture(found: fisher_labels.Positions, weights: Tensor | None) -> KFACCapture:
            return self._capture(
                model,
                others,
                loss_reduction="sum",
                num_terms=found.terms,
                token_weights=weights,
                loss_scale=1.0,
                batch_size=None,
                sample_ids=None,
                head=head,
                exact_head=exact_head,
                estimate="mc" if drawn else "empirical",
                seed=subset,
            )

        try:
            fisher_labels.run_passes(root, asked, capture, n_samples if drawn else None, draws, sample_ids)
        except BaseException as error:
            if others is not None:  # where the capture has said something already, that is what the others hear
                refresh_schedule.meeting(self, others).stay_away(f"{type(error).__name__}: {error}")
            raise
        return self.kfac_factors

    def _refuse_nested(self) -> None:
        """Raise if a capture of this object is open.

        Raises:
            GramianError: then.
        """
        if self._open:
            raise GramianError("capture: this object is inside a capture already; expected one at a time")

    def _finish(self, cap: KFACCapture) -> None:
        """What a capture saw becomes factors. Collective."""
        finish_refresh.finish(self, cap)

    def _fail(self, cap: KFACCapture, reason: str, detail: str = "") -> None:
        """This process's part of a refresh came to nothing by an error that goes on to the user: all others raise, too."""
        finish_refresh.abandon(self, reason)
        if cap.others is not None:
            refresh_schedule.meeting(self, cap.others).stay_away(reason + detail)

    # ---- use -------------------------------------------------------------------------------------------------------

    def compute_natural_gradient(
        self, model: nn.Module, power: float = -1.0, gradients: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """(F + damping)^power applied to the gradient.

        Args:
            model: whose `p.grad` is read; nothing is changed.
            power: any real number; -1 is the natural gradient.
            gradients: {parameter: gradient} in place of `p.grad`.

        Returns:
            {parameter: tensor} for every trainable parameter with a gradient, like its gradient in dtype and device.
        """
        check_number("power", power)
        root = module_of(model)
        if gradients is None:
            gradients = {n: p.grad for n, p in unique_parameters(root) if p.requires_grad and p.grad is not None}
            if not gradients:
                raise GramianError("model: no parameter has a gradient; expected loss.backward() before")
        check_vector("gradients", gradients)
        plain = self._without_curvature(gradients, self._check_model(root))
        measured = {name: gradient for name, gradient in gradients.items() if name not in plain}
        found = self._apply(self._touched(measured), measured, power) if measured else {}
        return {name: plain[name].clone() if name in plain else found[name] for name in gradients}

    def compute_fisher_vector_product(self, vector: Mapping[str, Tensor], damped: bool = False) -> dict[str, Tensor]:
        """F v, or with `damped` (F + damping) v, clip included: what power -1 inverts.

        Args:
            vector: {parameter: tensor}; the bias of a layer whose weight is there counts as zero if it is missing.
            damped: whether damping and clip take part.

        Returns:
            {parameter: tensor} for every parameter of the blocks that v touches.
        """
        check_vector("vector", vector)
        if self._model is not None and (root := self._model()) is not None:
            self._check_model(root)
        return self._apply(self._touched(vector), vector, 1.0 if damped else None)

    def quadratic_form(self, vector: Mapping[str, Tensor], damped: bool = False) -> float:
        """vᵀ F v, or vᵀ (F + damping) v."""
        return inner(vector, self.compute_fisher_vector_product(vector, damped))

    def natural_gradient_norm(self, model: nn.Module, gradients: Mapping[str, Tensor] | None = None) -> float:
        """√(∇ᵀ (F + damping)⁻¹ ∇)."""
        if gradients is None:
            gradients = {
                n: p.grad for n, p in unique_parameters(unwrap(model)) if p.requires_grad and p.grad is not None
            }
        squared = inner(gradients, self.compute_natural_gradient(model, gradients=gradients))
        return math.sqrt(max(squared, 0.0))

    def trust_region_scale(self, step: Mapping[str, Tensor], kl: float) -> float:
        """min(1, √(kl / (½ δᵀFδ))): what a step δ is multiplied by so that the model moves by at most `kl` nats.

        Args:
            step: δ, {parameter: tensor}.
            kl: bound on the KL divergence between the model's predictions before and after, to second order.
        """
        check_number("kl", kl)
        if not kl > 0:
            raise GramianError(f"kl: expected a number above 0, got {kl!r}")
        moved = 0.5 * self.quadratic_form(step)
        return min(1.0, (kl / moved) ** 0.5) if moved > 0 else 1.0

    def _touched(self, vector: Mapping[str, Tensor]) -> dict[str, Block]:
        """The blocks that have a part in a vector."""
        self._require_factors()
        by_parameter = {p: block for block in self.kfac_factors.values() for p in block.spec.parameters}
        touched: dict[str, Block] = {}
        for name in vector:
            if name not in by_parameter:
                raise GramianError(f"{name}: is no parameter with curvature; expected names of the captured model")
            touched[by_parameter[name].spec.name] = by_parameter[name]
        return touched

    def _without_curvature(self, gradients: Mapping[str, Tensor], specs: Mapping[str, Spec]) -> dict[str, Tensor]:
        """Gradients of trained parameters that no capture has seen: they are handed on as they are, and recorded."""
        covered = {p for block in self.kfac_factors.values() for p in block.spec.parameters}
        trained = {p for spec in specs.values() for p in spec.parameters}
        plain = {n: g for n, g in gradients.items() if self.kfac_factors and n in trained and n not in covered}
        if plain and self.options.strict:
            raise GramianError(
                f"{next(iter(plain))}: has a gradient but no curvature; expected it in the captured backward"
            )
        self._identity.update(plain)
        return plain

    def _apply(self, touched: dict[str, Block], vector: Mapping[str, Tensor], power: float | None) -> dict[str, Tensor]:
        started = time.perf_counter()
        found = apply(touched, vector, power, self.options, self._spread)
        self._seconds["apply"] = time.perf_counter() - started
        curvature_record.log_clips(self, touched.values())
        return {name: found[name] for name in (*vector, *(n for n in found if n not in vector))}

    def _check_model(self, root: nn.Module) -> dict[str, Spec]:
        """The model's blocks, which must be those that were captured before, biases above all.

        A block whose parameters are all frozen now waits until they train again.
        """
        specs = find_blocks(root, self.options)
        frozen = {name for name, p in unique_parameters(root) if not p.requires_grad}
        for name, block in self.kfac_factors.items():
            now = specs.get(name)
            if now is not None:
                check_spec(block.spec, now)
            elif not frozen.issuperset(block.spec.parameters):
                raise GramianError(
                    f"{name}: has factors, but is no block of its own now (what trains around it has changed); "
                    "expected the captured model, or a new object"
                )
        return specs

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, belongs to no model until it captures one or is loaded with one, and to no process group."""
        return {
            **self.__dict__,
            "_model": None,
            "_number": None,
            "process_group": None,
            "_spread": SharedFactorisation(None),
        }

    # ---- reports ---------------------------------------------------------------------------------------------------

    @property
    def coverage(self) -> Coverage:
        """How every parameter of the captured model is approximated."""
        return curvature_record.coverage(self)

    def record(self) -> dict[str, Any]:
        """What was done, as a JSON-able dict: options, versions, seeds, and every layer's estimate, damping and clip."""
        return curvature_record.record(self)

    def state_dict(self) -> dict[str, Any]:
        """Factors, counters and options: tensors and plain values only."""
        return factor_file.state_of(self)

    def load_state_dict(self, saved: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """Take factors and counters over; nothing changes if they do not fit.

        Args:
            saved: what `state_dict` gave.
            model: checked against the factors if given; else it is checked when they are used. Processes that share a model and
                spread rows (`"gram"`) all load with it: each keeps its own rows, as a refresh would leave them.
        """
        factor_file.load(self, saved, None if model is None else unwrap(model), self._spread_over(model))

    def save(self, path: str) -> None:
        """Write `state_dict` as one safetensors file."""
        factor_file.save(self, path)

    def load(self, path: str, model: nn.Module | None = None) -> None:
        """Read what `save` wrote; as `load_state_dict`."""
        factor_file.load(
            self, factor_file.read(path), None if model is None else unwrap(model), self._spread_over(model)
        )

    def save_sharded(self, folder: str) -> None:
        """Write the state into a new folder, every process its rows: nothing is gathered. Collective.

        Args:
            folder: that all processes see; any number of processes can load it again.
        """
        factor_folder.save(self, folder, self._spread.others or refresh_schedule.sharing(self))

    def load_sharded(self, folder: str, model: nn.Module | None = None) -> None:
        """Read what `save_sharded` wrote, on any number of processes; as `load_state_dict`. Collective.

        Args:
            folder: that all processes see.
            model: checked against the factors if given; else it is checked when they are used.
        """
        others = refresh_schedule.sharing(self) if model is None else refresh_schedule.others_of(self, model)
        factor_folder.load(self, folder, None if model is None else unwrap(model), others)

    def _spread_over(self, model: nn.Module | None) -> Exchange | None:
        """The processes among which rows of a model's low-rank sides are spread."""
        return (
            refresh_schedule.others_of(self, model)
            if model is not None and self.options.kfac_distributed_reduce == "gram"
            else None
        )

    def plan(
        self,
        model: nn.Module,
        tokens: int | Mapping[str, int] | None = None,
        *,
        inputs: Any = None,
        head: str | None = None,
        fisher_type: str = "empirical",
        power: float = -1.0,
        algebra: torch.dtype = torch.float64,
        activations: torch.dtype | None = None,
        device: str | torch.device | None = None,
        free: int | None = None,
        world_size: int = 1,
    ) -> CurvaturePlan:
        """What a refresh and its use will hold, from shapes alone: bytes per layer, stage and device.

        Args:
            model: on any device, the meta device among them; nothing is allocated.
            tokens: T of a refresh on all processes, for all layers or {layer: T}; None: the most that any number can take.
            inputs: in place of tokens, the arguments of one forward over a whole refresh (meta tensors do): tells every
                layer's own tokens, and which layers share one A.
            head: name of the layer whose outputs are the logits; None: the model's own word, or the last linear layer.
            fisher_type: as of `collect_kfac_factors`; "true" makes the head exact.
            power: that will be asked for; any but -1 needs eigenvectors.
            algebra: dtype of small systems: float64, or float32 where κ is known to let it do.
            activations: their dtype, where autocast makes it another than the parameters'.
            device: where the model will run; None: where it is.
            free: bytes free there, for "auto" storage and eigendecompositions; None: enough.
            world_size: processes that share the tokens; the plan is that of each.

        Returns:
            `.rows`, `.total(device)`; `str()` is the table.
        """
        check_number("power", power)
        root = module_of(model)
        return plan(
            root,
            self.options,
            tokens,
            inputs=inputs,
            head=known_head(root, head),
            exact_head=fisher_type == "true" or self.options.kfac_true_fisher_head,
            power=power,
            algebra=algebra,
            activations=activations,
            device=device,
            free=free,
            world_size=world_size,
        )

    # ---- spectra ---------------------------------------------------------------------------------------------------

    def compute_capacity_metrics(self, damping: float | None = None, n: float | None = None) -> dict[str, Any]:
        """What the eigenvalues of the Fisher say of every layer and of the model: docs/concepts/capacity.md. Collective.

        Args:
            damping: λ of log_det, effective_dimension and condition_number, which are those of F + λI whatever `damping_mode`
                is; None: this object's `damping`. All else is undamped and unclipped.
            n: samples, for the heuristic pac_bayes = √(trace/n); None: without it.

        Returns:
            {"layers": {name: {metric: value}}, "model": {the same, and "coverage": shares of the trained parameters}}; metrics
            of sides too wide to be written out have an "error" beside them.
        """
        damping = self.options.joint_lambda if damping is None else damping
        for name, value in {"damping": damping, "n": 1 if n is None else n}.items():
            check_number(name, value)
            if not value > 0:
                raise GramianError(f"{name}: expected a number above 0, got {value!r}")
        self._require_factors()
        covered = {p for spec in self._specs.values() for p in spec.parameters}
        root = None if self._model is None else self._model()
        trained = [] if root is None else [(name, p) for name, p in unique_parameters(root) if p.requires_grad]
        outside = {name: p.numel() for name, p in trained if name not in covered}
        coverage = capacity.coverage_of(self._specs, self.kfac_factors, outside)
        return capacity.capacity_metrics(self.kfac_factors, float(damping), n, coverage, self._spread.others)

    def top_eigenvalues(self, k: int = 20) -> Tensor:
        """The k largest eigenvalues of the estimated Fisher, undamped and unclipped: [k], descending, float64. Collective.

        Args:
            k: no more than there are directions (parameters with curvature) in all.
        """
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise GramianError(f"k: expected an integer of at least 1, got {k!r}")
        self._require_factors()
        return capacity.top_eigenvalues(self.kfac_factors, k, self._spread.others)

    def _require_factors(self) -> None:
        if not self.kfac_factors:
            raise GramianError("kfac: has no factors yet; expected a capture or collect_kfac_factors before")
