"""K-FAC: the Fisher of a network as Kronecker products, from estimation to the natural gradient.

F = E[g gᵀ], block by block. A layer y = W a with output gradient g has F ≈ G ⊗ A with A = E[a aᵀ], G = E[g gᵀ], so that
F vec(Y) = vec(G Y A) for Y of the weight's shape [o, m]: two small matrices in place of one of side o·m.

`KFACNaturalGradient` is the public API. It owns one `CurvatureState` and passes it to the stages: `estimate` (captures),
`refresh` (factors), `apply` (natural gradients), `persist` (files, record), `memory` (plans) and `spectrum` (metrics).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramian.curvature.apply import natural_gradient
from gramian.curvature.apply.apply_factors import inner
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.consistency import check_number, module_of
from gramian.curvature.blocks.output_head import known_head
from gramian.curvature.estimate import fit_batches, open_capture, second_pass
from gramian.curvature.estimate.fisher_labels import LabelArguments
from gramian.curvature.estimate.kfac_capture import IdleCapture, KFACCapture, LossArguments
from gramian.curvature.estimate.second_pass import CorrectionCapture
from gramian.curvature.memory.curvature_plan import CurvaturePlan
from gramian.curvature.memory.plan_curvature import plan_curvature
from gramian.curvature.options import Options
from gramian.curvature.persist import curvature_record
from gramian.curvature.persist.saved_factors import SavedFactors
from gramian.curvature.spectrum.fisher_spectrum import FisherSpectrum
from gramian.curvature.state import CurvatureState
from gramian.taps.coverage import Coverage
from gramian.taps.model.user_names import unwrap


class KFACNaturalGradient(SavedFactors, FisherSpectrum):
    """K-FAC curvature of one model, its natural gradients and Fisher-vector products.

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
        one_sided: bool = False,
        memory_budget: int | str | None = None,
        process_group: Any = None,
    ) -> None:
        """Check the options (a GramianError for a value that is not allowed) and store them; a capture brings the model.

        Args:
            damping: λ that is added to F = G ⊗ A, or to its factors, as damping_mode says.
            damping_A: λ that factored damping adds to A, or joint damping to G ⊗ A; None: `damping`; must be None for "pi".
            damping_G: λ that factored damping adds to G (joint damping: equal to damping_A); None: `damping`.
            ema_decay: β of the debiased moving average of the factors over refreshes; 0: the last refresh alone.
            update_freq: number of `capture` and `collect_kfac_factors` calls from one refresh (new factors) to the next; the
                first call refreshes.
            min_layer_size: layers with fewer inputs or outputs than this get an exact block or a diagonal instead of K-FAC.
            use_eigenvalue_correction: whether the clip is on: it raises damped eigenvalues to at least the largest one / κ.
            max_condition_number: κ of the clip; infinity: no clip.
            kfac_use_woodbury: whether low-rank factors may be used.
            kfac_policy: when G is low rank: "all", "auto", "hybrid" or "small_only"; see docs/concepts/kfac.md.
            kfac_big_threshold: width of G from which "hybrid" uses low rank.
            kfac_true_fisher_head: whether G of the output layer is the exact Fisher of its softmax and not an estimate.
            kfac_eps: first Cholesky jitter, relative to the mean diagonal.
            kfac_auto_rho: ρ; kfac_policy "auto" uses low rank while T tokens ≤ ρ·(width of G).
            kfac_auto_t_max: largest number of tokens (columns) of a low-rank factor.
            woodbury_store_device: device on which factors are stored: "cuda", "cpu", or "auto" (the model's device up to half
                of its free memory, then the CPU).
            woodbury_dtype: dtype of stored factors: "fp16", "bf16", "fp32" or "fp64"; None: fp16, and fp64 for float64 models.
            kfac_distributed_reduce: how processes join their low-rank A and G: "gram" (sharded by features), "gather" (all
                rows on each), "dense" (matrices added), "none" (each process by itself). See docs/concepts/kfac_processes.md.
            damping_mode: "pi" (λ split by traces), "factored" (λ_A and λ_G) or "joint" (λ on the product).
            weight_sharing: "expand" (each token is one sample) or "reduce" (a sample's tokens are combined into one).
            max_tokens: size of the random subset of tokens that a refresh uses, with rescaled sums; None: all tokens.
            seed: seed of token subsets and drawn labels.
            strict: raise if a refresh is dropped, a factorisation falls back, or a trained parameter gets no curvature.
            ekfac: replace K-FAC's eigenvalues by second moments of per-sample gradients in its eigenbasis; needs
                damping_mode="joint". See docs/concepts/ekfac.md.
            one_sided: store the wider of A and G as its diagonal; of equally wide ones both in full. Less time and memory for
                layers that widen or narrow.
            memory_budget: limit on the bytes of curvature on any one device, an integer or "8GB"; None: no limit. See
                docs/concepts/kfac_memory.md.
            process_group: the processes that share the data; None: at each capture those of DDP or FSDP2, else all.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "process_group")}
        self.state = CurvatureState(Options(**given), process_group)
        self.public = False
        """True if the user says that no factor was made of private data: `make_private(metric=…)` asks for it."""

    @property
    def options(self) -> Options:
        """The `Options` that this object was created with, unchanged."""
        return self.state.options

    @property
    def kfac_factors(self) -> dict[str, Block]:
        """{layer: K-FAC `Block` with undamped factors `.A`, `.G`}; outside K-FAC {parameter: `Block` whose `.A` is None}."""
        return self.state.blocks

    @property
    def steps(self) -> int:
        """Number of calls of `capture` and `collect_kfac_factors` so far, whether or not they refreshed the factors."""
        return self.state.steps

    @property
    def refreshes(self) -> int:
        """Number of calls of `capture` and `collect_kfac_factors` that made new factors, rejected ones not counted."""
        return self.state.refreshes

    @property
    def dropped(self) -> list[dict[str, Any]]:
        """Refreshes that were rejected, so that the factors stayed as they were: [{"step": its number, "reason": text}]."""
        return self.state.dropped

    @property
    def head(self) -> str | None:
        """Name of the layer whose outputs are the logits; None while it is not known."""
        return self.state.head

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
        correct: bool = True,
    ) -> KFACCapture | IdleCapture:
        """A context that estimates the Fisher from the user's own backward inside it, and makes new factors at its end.

        Args:
            model: the user's model.
            loss_reduction: "mean", "sum", or the coefficient of one term in the loss.
            num_terms: N, number of loss terms behind this process's loss; None: the sum of token_weights.
            token_weights: [B, T], weights of the terms: 0 for padding and prompts; None: found from the output gradients.
            loss_scale: the factor that the loss was multiplied by, or the `GradScaler`.
            batch_size: B; None: the length of the first axis of the model's first tensor argument.
            sample_ids: [B], global sample ids from which the random subset of tokens (`max_tokens`) is derived; None: the i-th
                sample of process r of W is i·W + r.
            head: name of the layer whose outputs are the logits; None: as the model states it, or found in its forward.
            force: refresh at once, whatever `update_freq` says; on all processes or none.
            correct: with the option `ekfac`, store the tokens and measure its eigenvalues too; False: leave them to `correct`.

        Returns:
            A context; call `cap.next(...)` in it before each further forward and backward. Without a refresh it does nothing.
        """
        loss = LossArguments(loss_reduction, num_terms, token_weights, loss_scale, batch_size, sample_ids)
        return open_capture.capture(self.state, model, loss, head, force, correct)

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
        loss: str | None = None,
        noise_scale: float = 1.0,
        class_axis: int | None = None,
        head: str | None = None,
        force: bool = False,
    ) -> dict[str, Block]:
        """If a refresh is due, run passes over a batch and make factors of them; `p.grad`, mode and random state are preserved.

        Args:
            model: a model that returns logits or other outputs, alone or as `.logits`, or start_logits and end_logits.
            batch: a mapping as Hugging Face models take it, or (inputs, labels).
            fisher_type: "empirical", "mc" (labels drawn from the model) or "true" (the head exactly, the rest "mc").
            n_samples: number of draws of labels, a pass for each; not used for "empirical".
            generator: source of the draws' seed; None: the object's own.
            sample_ids: [B], global sample ids from which draws and token subsets are derived; None: i·W + r for row i of
                process r of W.
            causal_shift: whether position t predicts label t+1; None: as Hugging Face does for this model.
            loss: "cross_entropy", "mse" or "bce" (docs/concepts/kfac_losses.md); None: cross entropy of integer labels.
            noise_scale: σ of loss="mse", one term of which is ‖y − f‖²/(2σ²).
            class_axis: axis of the outputs that has the classes or channels, 1 or -1; None: found from the labels.
            head: name of the layer whose outputs are the logits; None: as the model states it, or found in its forward.
            force: refresh at once, whatever `update_freq` says.

        Returns:
            `kfac_factors`, unchanged if no refresh was due.
        """
        likelihood = (loss, noise_scale, class_axis)
        labels = LabelArguments(fisher_type, n_samples, generator, sample_ids, causal_shift, *likelihood)
        open_capture.collect(self.state, model, batch, labels, head, force)
        return self.kfac_factors

    def fit(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        fisher_type: str = "empirical",
        *,
        n_samples: int = 1,
        generator: torch.Generator | None = None,
        sample_ids: Iterable[Tensor] | None = None,
        causal_shift: bool | None = None,
        loss: str | None = None,
        noise_scale: float = 1.0,
        class_axis: int | None = None,
        head: str | None = None,
        progress: Callable[[str, int], Any] | None = None,
    ) -> dict[str, Block]:
        """Make the factors of any number of batches in one pass over them, with `ekfac` in two; no token is stored between.

        Args:
            model: a model that returns logits, alone or as `.logits`.
            batches: an iterable (a list, a DataLoader) of batches as `collect_kfac_factors` takes them; `ekfac` reads it twice.
            fisher_type: "empirical", "mc" (labels drawn from the model) or "true" (the head exactly, the rest "mc").
            n_samples: number of draws of labels, a pass over the batch for each; not used for "empirical".
            generator: source of the draws' seed; None: the object's own.
            sample_ids: for each batch global sample ids [B], from which draws and token subsets are derived; None: i·W + r for
                the i-th sample of all batches of process r of W.
            causal_shift: as for `collect_kfac_factors`, and so are the next four.
            loss: "cross_entropy", "mse" or "bce"; None: cross entropy of integer labels.
            noise_scale: σ of loss="mse".
            class_axis: 1 or -1; None: found from the labels.
            head: name of the layer whose outputs are the logits; None: found.
            progress: called after each batch with "factors" or "eigenvalues", and the number of batches so far.

        Returns:
            `kfac_factors`. Gradients, mode and random state of the model are preserved.
        """
        labels = LabelArguments(fisher_type, n_samples, generator, None, causal_shift, loss, noise_scale, class_axis)
        fit_batches.fit(self.state, model, batches, sample_ids, labels, head, progress)
        return self.kfac_factors

    def correct(
        self,
        model: nn.Module,
        *,
        loss_reduction: str | float = "mean",
        num_terms: float | None = None,
        token_weights: Tensor | None = None,
        loss_scale: float | torch.amp.GradScaler = 1.0,
        batch_size: int | None = None,
    ) -> CorrectionCapture:
        """A context that measures EK-FAC's eigenvalues of the present factors from the user's own backwards inside it.

        The arguments are those of `capture`, and `cap.next(...)` comes before each further backward. Tokens are not stored, so
        any number of backwards takes the memory of one. Entering and leaving are collective.
        """
        loss = LossArguments(loss_reduction, num_terms, token_weights, loss_scale, batch_size)
        return second_pass.open_correction(self.state, model, loss)

    # ---- use -------------------------------------------------------------------------------------------------------

    def compute_natural_gradient(
        self, model: nn.Module, power: float = -1.0, gradients: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """(F + damping)^power ∇ for the gradient ∇ of every parameter; power -1 gives the natural gradient.

        Args:
            model: its `p.grad` are read; nothing is changed.
            power: any real number; -1 is the natural gradient.
            gradients: {parameter: gradient} in place of `p.grad`; None: `p.grad`.

        Returns:
            {parameter: tensor} for every trainable parameter with a gradient, like its gradient in dtype and device; the
            gradient itself where no capture has reached the parameter (with the option `strict` an error).
        """
        return natural_gradient.natural_gradient(self.state, module_of(model), power, gradients)

    def compute_fisher_vector_product(self, vector: Mapping[str, Tensor], damped: bool = False) -> dict[str, Tensor]:
        """F v for the estimated Fisher F; with `damped` (F + damping) v, clip included, which power -1 inverts.

        Args:
            vector: {parameter: tensor}; the bias of a layer whose weight is there counts as zero if it is missing.
            damped: whether damping and clip take part.

        Returns:
            {parameter: tensor} for all parameters of every block that has a parameter in `vector`.
        """
        return natural_gradient.fisher_vector_product(self.state, vector, damped)

    def quadratic_form(self, vector: Mapping[str, Tensor], damped: bool = False) -> float:
        """vᵀ F v, a float, for v = {parameter: tensor} and the estimated Fisher F; `damped`: F + damping in place of F."""
        return inner(vector, self.compute_fisher_vector_product(vector, damped))

    def natural_gradient_norm(self, model: nn.Module, gradients: Mapping[str, Tensor] | None = None) -> float:
        """√(∇ᵀ (F + damping)⁻¹ ∇) as a float; ∇ is `gradients`, {parameter: tensor}, or if None the model's `p.grad`."""
        gradients = natural_gradient.gradients_of(unwrap(model)) if gradients is None else gradients
        squared = inner(gradients, self.compute_natural_gradient(model, gradients=gradients))
        return math.sqrt(max(squared, 0.0))

    def trust_region_scale(self, step: Mapping[str, Tensor], kl: float) -> float:
        """min(1, √(kl / (½ δᵀFδ))): the factor for a step δ, {parameter: tensor}, that moves predictions by at most `kl` nats.

        The KL divergence between the model's predictions before and after the step is meant, to second order.
        """
        check_number("kl", kl, "positive")
        moved = 0.5 * self.quadratic_form(step)
        return min(1.0, (kl / moved) ** 0.5) if moved > 0 else 1.0

    # ---- reports ---------------------------------------------------------------------------------------------------

    @property
    def coverage(self) -> Coverage:
        """How each parameter of the captured model is approximated: by K-FAC, an exact block, a diagonal or not at all."""
        return curvature_record.coverage(self.state)

    def record(self) -> dict[str, Any]:
        """A JSON-able dict of the computation: options, versions, seeds, and every layer's estimate, damping and clip."""
        return {**curvature_record.record(self.state), "public": self.public}

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
        fit: bool = False,
        operators: str | None = None,
    ) -> CurvaturePlan:
        """Memory that a refresh and its use will need, from shapes alone: bytes per layer, stage and device.

        Args:
            model: on any device, the meta device among them; nothing is allocated.
            tokens: T, tokens of a refresh on all processes: one number or {layer: T}; None: the maximum over all numbers.
            inputs: in place of tokens, the arguments of one forward over all data of a refresh (meta tensors do): it is run to
                count every layer's tokens and to find the layers that share one A; None: use `tokens`.
            head: name of the layer whose outputs are the logits; None: as the model states it, or the last linear layer.
            fisher_type: that of `collect_kfac_factors`; "true" makes the head exact.
            power: exponent of later `compute_natural_gradient` calls; any but -1 needs eigenvectors.
            algebra: dtype of the matrices to factorise: float64, or float32 where condition numbers are known to allow it.
            activations: dtype of activations under autocast; None: that of the parameters.
            device: where the model will run; None: where it is.
            free: bytes free there, from which "auto" storage and eigendecompositions choose GPU or CPU; None: no limit.
            world_size: number of processes that share the tokens; bytes are those of one process.
            fit: whether the factors come from `fit`, which with `ekfac` stores no tokens; a memory_budget implies it.
            operators: also count operators: "inverse" those of `gramian.precondition`, "root" of `optim.KFAC`; None: no.

        Returns:
            The plan: `.rows` (one per block), `.total(device)` (peak bytes); `str()` is a table.
        """
        check_number("power", power)
        return plan_curvature(
            root := module_of(model),
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
            only=self.state.only,
            fit=fit,
            operators=operators,
        )
