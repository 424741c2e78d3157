"""Sections of a run's configuration: one frozen dataclass per TOML table, each field with its type, range and default.

`[data]` is defined beside the data pipeline, in `gramian.data.options`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from gramian.core.bounded_numbers import Count, Fraction, Natural, NonNegative, Positive


@dataclass(frozen=True)
class RunSection:
    """Folder, seed, duration and device of a run."""

    folder: str = "runs/run"
    """Folder that the run writes its checkpoints, metrics and records into."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of the initial weights, the data order and dropout."""
    steps: Count = 1000
    """Number of optimizer steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; "auto": a GPU if there is one."""
    deterministic: bool = True
    """Use deterministic kernels only, so that a resumed run repeats itself bit for bit."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    observe_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps between measurements of the gradient noise scale and the health of every layer, by one more backward; 0: none."""
    tensorboard: bool = False
    """Also log metrics to TensorBoard."""
    wandb: bool = False
    """Also log metrics to Weights & Biases."""
    report: bool = True
    """Write report.html, a page with the run's curves and tables, into the folder when the run ends."""


@dataclass(frozen=True)
class ModelSection:
    """Model: the reference GPT, Goose, or a Hugging Face causal language model from a folder."""

    kind: Literal["gpt", "goose", "huggingface"] = "gpt"
    """Architecture of the model."""
    path: str | None = None
    """Folder of a Hugging Face model; none for the other kinds."""
    fresh: bool = False
    """Read only the config of the Hugging Face folder and draw new weights."""
    layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4
    """Number of transformer or Goose blocks."""
    width: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 128
    """Width of the residual stream."""
    heads: Count = 4
    """Number of attention heads of the GPT."""
    spikes: bool = True
    """Use ternary spikes (activations −1, 0, 1) in Goose; false: the dense variant with the same matrices."""
    tied: bool = False
    """Share one weight matrix between the token embedding and the head."""
    dropout: Fraction = 0.0
    """Dropout probability."""


@dataclass(frozen=True)
class OptimizerSection:
    """Optimizer and its hyperparameters."""

    kind: Literal["adamw", "sgd", "kfac"] = "adamw"
    """Optimizer algorithm; "kfac": `gramian.optim.KFAC`, whose own options are in [kfac]."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments; the first is also the momentum of K-FAC's weight matrices."""
    eps: Positive = 1e-8
    """Constant that AdamW adds to the denominator."""
    momentum: Fraction = 0.0
    """Momentum of SGD."""
    weight_decay: NonNegative = 0.1
    """Weight decay of matrices; biases and norm weights do not decay."""
    max_norm: NonNegative = 1.0
    """Norm that longer gradients are scaled down to; 0: no clipping."""
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """Implementation of the update in torch; "auto": the fastest one that is available."""


@dataclass(frozen=True)
class ScheduleSection:
    """Learning rate schedule."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape of the schedule after the warm-up; "wsd" (warm-up, stable, decay) is constant, then decays linearly."""
    warmup: Natural = 50
    """Number of steps in which the learning rate rises linearly to its peak."""
    floor: NonNegative = 0.0
    """Learning rate of the last step; not used by "constant"."""
    decay: Natural = 0
    """Number of steps of the decay of "wsd"; 0: a fifth of all steps."""


@dataclass(frozen=True)
class PrecisionSection:
    """Numeric precision of the forward and backward pass."""

    kind: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    """Number format; bf16 and fp16 keep float32 weights; "auto": bf16 from Ampere on, fp16 on older GPUs, fp32 on a CPU."""
    tf32: bool = True
    """Allow TF32 in float32 matrix products on a GPU."""


@dataclass(frozen=True)
class CompileSection:
    """Compilation of the model with `torch.compile`."""

    mode: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """Mode of `torch.compile`; "off": the model runs eagerly."""


@dataclass(frozen=True)
class ParallelSection:
    """Distribution over processes, and activation checkpointing."""

    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    """How the model is distributed over processes; "auto": the fastest that fits, by the memory planner."""
    checkpoint_blocks: Natural = 0
    """Recompute activations in the backward pass in segments of this many model blocks; 0: store all activations."""


@dataclass(frozen=True)
class CheckpointSection:
    """Snapshots of the training state in host memory, and checkpoints on disk."""

    snapshot_every: Count = 20
    """Steps between snapshots; a rollback returns to a snapshot."""
    every: Count = 200
    """Steps between written checkpoints, rounded up to the next snapshot."""
    keep: Count = 2
    """Number of newest checkpoints to keep on disk, in addition to the best one."""
    snapshots: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 3
    """Number of snapshots that a rollback can return to, plus one that is being written; fewer if the host lacks memory."""


@dataclass(frozen=True)
class GuardSection:
    """Detection of training faults (loss spikes, large gradients, overflows), and the response to them."""

    on: bool = True
    """Watch for faults and roll back after one."""
    window: Count = 50
    """Number of recent steps that medians are computed over."""
    spike_deviations: Positive = 6.0
    """A loss above median + max(this many robust deviations, spike_nats) is high; two high losses of three are a fault."""
    spike_nats: Positive = 0.5
    """Smallest excess over the median loss, in nats, that counts as high."""
    gradient_factor: Positive = 10.0
    """Ratio of the gradient norm to its median up to which a step is not a fault; more is one if it is also an outlier."""
    halvings: Count = 3
    """Number of halvings of the loss scale within the window that is a fault."""
    lr_factor: Fraction = 0.5
    """Factor on the learning rate after a rollback."""
    lr_return: Natural = 200
    """Number of steps in which lr_factor returns linearly to 1."""
    max_rollbacks: Natural = 3
    """Maximum number of rollbacks within 1000 steps; one more stops the run."""
    clip_share: Fraction = 0.1
    """Fraction of clipped steps within the window above which a lower learning rate is recommended."""


@dataclass(frozen=True)
class EvalSection:
    """Validation during training."""

    every: Count | Literal["auto"] = 300
    """Steps between validations; "auto": so many that validation takes less than 5 % of the time."""
    windows: Count = 64
    """Number of validation windows."""
    dead: Fraction = 0.05
    """Fraction of Goose channels that never fire above which an event is logged."""
    saturated: Fraction = 0.1
    """Fraction of Goose channels that always fire above which an event is logged."""


@dataclass(frozen=True)
class KFACSection:
    """Natural gradients: options of `KFACNaturalGradient` and of the preconditioned step, or of the optimizer "kfac"."""

    update_freq: Count | None = None
    """Steps between updates of the K-FAC factors; none: 10, and 20 for the optimizer "kfac"."""
    damping: Positive | None = None
    """Damping added to the curvature, for the optimizer "kfac" relative to its mean; none: the default of the library."""
    ema_decay: Fraction | None = None
    """Decay rate of the moving average of the factors; none: the default of the library."""
    damping_mode: Literal["pi", "factored", "joint"] = "pi"
    """Where damping is added: to both factors of a layer, balanced by their traces ("pi") or as given, or to their product."""
    kfac_policy: Literal["all", "auto", "hybrid", "small_only"] | None = None
    """Which layers get dense, low-rank or diagonal factors; none: the default of the library."""
    max_tokens: Count | None = None
    """Maximum number of tokens per update that the factors are estimated from; none: the default of the library."""
    kfac_true_fisher_head: bool = False
    """Estimate the head's factor from the model's own distribution instead of the targets."""
    kl_clip: Positive | None = None
    """Bound on the predicted KL divergence of a step; none: the default of the library."""
    memory_budget: int | str | None = None
    """Maximum memory of the curvature on a device, in bytes or as "8GB"; none: no limit."""
    kfac_distributed_reduce: Literal["gram", "gather", "dense"] = "gram"
    """How processes combine their contributions to the factors."""
    public_files: tuple[str, ...] = ()
    """Public data that the curvature is estimated from when the run is private."""
    precondition: bool = True
    """Multiply the optimizer's gradients by the inverse curvature; false: the curvature is for privacy.metric alone."""
    damping_A: Positive | None = None
    """Damping of A, or of the product under damping_mode = "joint"; none: damping."""
    damping_G: Positive | None = None
    """Damping of G; none: damping."""
    use_eigenvalue_correction: bool | None = None
    """Raise damped eigenvalues to at least the largest one / max_condition_number; none: true."""
    max_condition_number: Annotated[float, msgspec.Meta(gt=1)] | None = None
    """Bound κ of that; none: 1e6."""
    min_layer_size: Count | None = None
    """Layers with fewer inputs or outputs get an exact block or a diagonal; none: 1."""
    weight_sharing: Literal["expand", "reduce"] | None = None
    """Count every token as a sample, or combine the tokens of a window into one; none: "expand"."""
    kfac_use_woodbury: bool | None = None
    """Allow low-rank factors; none: true."""
    kfac_big_threshold: Count | None = None
    """Width of G from which kfac_policy = "hybrid" uses low rank; none: 4096."""
    kfac_auto_rho: Positive | None = None
    """Tokens relative to the width of G up to which kfac_policy = "auto" uses low rank; none: 1."""
    kfac_auto_t_max: Count | None = None
    """Maximum number of columns of a low-rank factor; none: 8192."""
    kfac_eps: Positive | None = None
    """First Cholesky jitter, relative to the mean diagonal; none: 1e-6."""
    woodbury_dtype: Literal["fp16", "bf16", "fp32", "fp64"] | None = None
    """Number format of stored factors; none: fp16, and fp64 for a run in fp64."""
    woodbury_store_device: Literal["auto", "cuda", "cpu"] | None = None
    """Device that stores factors; none: "auto", the model's up to half of its free memory."""
    ekfac: bool | None = None
    """Replace K-FAC's eigenvalues by second moments of per-window gradients; needs damping_mode = "joint"; none: false."""
    one_sided: bool | None = None
    """Store the wider factor of a layer as its diagonal; none: false."""
    strict: bool | None = None
    """Raise where an update is dropped, a factorisation falls back or a parameter gets no curvature; none: false."""


@dataclass(frozen=True)
class PrivacySection:
    """DP-SGD: options of `PrivacyEngine`; the gradient of each unit is clipped, and the guarantee holds for one unit."""

    noise_multiplier: NonNegative | None = None
    """Standard deviation of the noise, relative to max_grad_norm; none: computed from target_epsilon."""
    target_epsilon: Positive | None = None
    """Privacy budget ε of all steps, from which the smallest sufficient noise_multiplier is computed; none: that is given."""
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-5
    """Failure probability δ of the privacy guarantee."""
    max_grad_norm: Positive = 1.0
    """Norm that the gradient of each unit is clipped to; with clip_function "adaptive" that of the first step."""
    unit: Literal["window", "document", "user"] = "window"
    """Unit of privacy: a window; a document with all its windows, or a user (data.user) with all documents (data.pack = false
    or data.isolate = true), of which data.batch are then drawn on average in a step."""
    max_records_per_unit: Count | None = None
    """Largest number of windows of a document or user in a draw; larger ones give a random subset. none: all."""
    clip_function: Literal["flat", "per_layer", "automatic", "adaptive"] = "flat"
    """Scaling of gradients g: min(1, C/|g|); the same for each layer's part, with C/√layers; C/(|g| + 0.01); or "flat" with a C
    that follows the median of |g| privately."""
    layer_norms: tuple[Annotated[str, msgspec.Meta(pattern=r"^[^=]+=\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*$")], ...] = ()
    """With clip_function "per_layer": clip norms of the layers relative to each other, such as ["*mlp*=2", "*=1"]; a layer
    takes the first whose pattern its name matches, and all are scaled to √Σ C² = max_grad_norm."""
    metric: Literal["plain", "kfac"] = "plain"
    """Where gradients are clipped and noise is drawn: as they are, or multiplied by the inverse root of the curvature of
    [kfac], which is estimated on public data."""
    noise: Literal["gaussian", "bandmf", "bisr"] = "gaussian"
    """Noise of the releases: independent; or correlated over `bands` releases, so that it cancels in part. Windows are then in
    groups, from which draws take in turn; "bandmf" is optimised for run.steps releases and stores bands - 1 buffers."""
    bands: Count | None = None
    """Number of releases over which noise "bandmf" or "bisr" is correlated; none: for "gaussian"."""
    accountant: Literal["prv", "pld", "rdp", "gdp"] = "prv"
    """Method that computes ε."""
    max_draw: Count | None = None
    """Largest number of units of a draw, to which larger draws are cut (truncated Poisson sampling; accountant "pld"); none:
    no limit."""
    clipping: Literal["auto", "bookkeeping", "keep", "two_pass"] = "auto"
    """Implementation of per-sample clipping; "auto": chosen by the planner from time and memory."""
    max_physical_batch: str = ""
    """Largest number of windows of a backward pass: "auto", planned from free memory, or from bytes that a step may take beside
    the weights, such as "24GB"; empty: data.micro_batch, which must be 0 otherwise."""
    proof: int | str = "auto"
    """Row proof (test that each row of a layer belongs to the window it is attributed to) before the first step, and again on
    one step in 1000 ("auto") or in this many; "off": no proof, which the run records."""
    decisions: Literal["noised", "public_validation", "raw"] = "noised"
    """Metrics that rollbacks, the end of a run and the best checkpoint depend on: metrics with noise; also the validation loss,
    if the validation data is public; or all metrics, which invalidates ε."""
    insecure_reproducible: bool = False
    """Derive the secret key from run.seed: reproducible for tests, without any privacy."""


@dataclass(frozen=True)
class TeacherSection:
    """Distillation: the teacher, the form of its signal, and the loss."""

    path: str = ""
    """Folder of a gramian run or of a Hugging Face causal language model."""
    source: Literal["live", "hidden", "topk", "sampled"] = "live"
    """Source of the signal: the live model, or the kind of cache that `gramian cache` has written."""
    cache: str = ""
    """Folder of the cache; empty: the run's folder with "-teacher" appended."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of hidden states in a cache; "auto": bf16 for a bf16 teacher, else fp16."""
    k: Count = 64
    """Number of largest logits per token that a "topk" cache stores."""
    knots: Annotated[int, msgspec.Meta(ge=2)] = 6
    """Number of temperatures at which a "topk" cache stores the mass of all other ids, to interpolate between them."""
    samples: Count = 16
    """Number of sampled ids per token that a "sampled" cache stores."""
    strategy: Literal["auto", "whole", "fsdp2"] = "auto"
    """Distribution of a live teacher: a copy on every process or sharded; "auto": sharded if a copy does not fit on a GPU."""
    compile: bool = False
    """Compile a live teacher with `torch.compile`."""
    kd_weight: NonNegative = 1.0
    """Weight of the distillation loss."""
    ce_weight: NonNegative = 0.5
    """Weight of the cross-entropy with the targets."""
    direction: Literal["forward", "reverse", "jsd"] = "forward"
    """Divergence between teacher and student: forward KL, reverse KL, or generalised Jensen-Shannon."""
    beta: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Interpolation of "jsd": 0 is forward KL, 1 is reverse KL."""
    temperature: Positive = 2.0
    """Temperature at the first step."""
    temperature_kind: Literal["fixed", "schedule", "learnable", "adversarial"] = "fixed"
    """How the temperature changes during training."""
    temperature_end: Positive = 1.0
    """Temperature of a schedule at the last step."""
    temperature_low: Positive = 1.0
    """Lower bound of a learnable or adversarial temperature."""
    temperature_high: Positive = 5.0
    """Upper bound of a learnable or adversarial temperature."""
    temperature_rate: Positive = 0.1
    """Learning rate of a learnable or adversarial temperature: plain gradient steps without decay or clipping."""
    temperature_free: Fraction = 0.2
    """Fraction of the steps before an adversarial temperature begins to change."""
    features: Literal["none", "cka", "increments", "hidden"] = "none"
    """Loss on residual streams: "none", 1 − CKA ("cka") or that of layer differences ("increments"), mean square ("hidden")."""
    feature_pairs: tuple[tuple[Natural, Natural], ...] = ()
    """Pairs (student layer, teacher layer) to compare: 0 is the embedding, l is after transformer block l."""
    feature_weight: NonNegative = 0.01
    """Weight of the feature loss."""
    feature_from: Natural = 0
    """First step with the feature loss."""
    feature_tolerance: Positive = 0.1
    """Relative rise of the validation perplexity that turns the feature loss off."""
    correlation: Annotated[float, msgspec.Meta(ge=-1, le=1)] = 0.9
    """Correlation of the student's and teacher's log-probabilities of the targets below which an evaluation logs an event."""

    @property
    def temperatures(self) -> tuple[float, float]:
        """Lowest and highest temperature that training can reach."""
        if self.temperature_kind in ("learnable", "adversarial"):
            return self.temperature_low, self.temperature_high
        end = self.temperature_end if self.temperature_kind == "schedule" else self.temperature
        return min(self.temperature, end), max(self.temperature, end)

    @property
    def teacher_layers(self) -> tuple[int, ...]:
        """Layers of the teacher that the feature loss compares."""
        return tuple(pair[1] for pair in self.feature_pairs)


@dataclass(frozen=True)
class DoctorSection:
    """Checks of `gramian doctor` before a run."""

    overfit_steps: Count = 200
    """Number of steps in which the model must overfit a few windows."""
    overfit_windows: Count = 16
    """Number of windows that the model must overfit."""
