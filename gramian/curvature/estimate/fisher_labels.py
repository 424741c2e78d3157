"""Labels for the Fisher: the data's own (empirical) or drawn from the model (Monte Carlo), on a Hugging Face style batch.

Legend: B samples, T tokens, V classes. A position is one prediction, a row of V logits; in a causal model position t predicts
token t+1.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gramian.core.errors import GramianError
from gramian.core.keyed_random import token_uniforms
from gramian.curvature.blocks.consistency import refuse_open_capture
from gramian.curvature.estimate.kfac_capture import KFACCapture, global_ids
from gramian.curvature.options import check_count
from gramian.taps.hub import hub_of
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.user_names import named_parameters
from gramian.taps.roles import Withheld

IGNORE = -100
ROWS = 2**26
"""Number of probabilities (tokens times classes) that are processed at a time when labels are drawn."""


FISHER_TYPES = ("empirical", "mc", "true")


def check_draws(fisher_type: Any, n_samples: Any, generator: Any) -> None:
    """Raise a GramianError for the first of these arguments of `collect_kfac_factors` whose value is not allowed."""
    if fisher_type not in FISHER_TYPES:
        names = ", ".join(f'"{name}"' for name in FISHER_TYPES)
        raise GramianError(f"fisher_type: expected one of {names}, got {fisher_type!r}")
    check_count("n_samples", n_samples)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise GramianError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")


@dataclass(frozen=True)
class LabelArguments:
    """The arguments of `collect_kfac_factors` that determine the labels; each field is explained there."""

    fisher_type: str
    n_samples: int
    generator: torch.Generator | None
    sample_ids: Tensor | None
    causal_shift: bool | None

    @property
    def drawn(self) -> bool:
        """True if labels are drawn from the model's own distribution ("mc", "true")."""
        return self.fisher_type != "empirical"


@dataclass(frozen=True)
class LabelledBatch:
    """A batch as arguments of the model's forward, with the labels and the mask of its positions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    """Labels as the user gives them, before any shift; None: the batch has none."""
    mask_BT: Tensor | None
    """The batch's `attention_mask` [B, T]; None if it has none."""
    inputs: Tensor
    shifted: bool
    """True if position t predicts label t+1."""

    @property
    def unlabelled(self) -> bool:
        """True if the batch has no labels and its inputs do not serve as labels; they do if position t predicts token t+1."""
        return self.labels is None and not self.shifted


def labels_of(root: nn.Module, batch: Any, fisher_type: str, shifted: bool | None) -> LabelledBatch:
    """Read a batch as `LabelledBatch`; `shifted`: whether position t predicts label t+1, None: decided by the model's class.

    A GramianError is raised if fisher_type "empirical" finds no labels in it, or if a capture of the model is open.
    """
    found = read_batch(root, batch, shifted)
    if fisher_type == "empirical" and found.unlabelled:
        raise GramianError('labels: expected them in the batch for fisher_type="empirical"')
    refuse_open_capture(root)
    return found


def read_batch(
    model: nn.Module, batch: Any, shifted: bool | None, forward: Callable[..., Any] | None = None
) -> LabelledBatch:
    """Read a mapping as Hugging Face models take it, or (inputs, labels), as `LabelledBatch`.

    `shifted`: whether position t predicts label t+1; None: decided by the model's class. `forward`: the model's own one, if a
    capture is open, which has replaced it. A GramianError is raised for an encoder-decoder model, a batch of another form, or
    labels that are not integers.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise GramianError("model: is an encoder and a decoder; expected kfac.capture(...) around your own loss for it")
    if shifted is not None and not isinstance(shifted, bool):
        raise GramianError(f"causal_shift: expected True, False or None, got {shifted!r}")
    if isinstance(batch, Mapping):
        rest = {name: value for name, value in batch.items() if name != "labels"}
        tensors = [value for value in rest.values() if isinstance(value, Tensor)]
        if not tensors:
            raise GramianError('batch: expected tensors such as "input_ids" beside "labels"')
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        known = inspect.signature(forward or model.forward).parameters
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
        first = rest.get("input_ids", tensors[0])
        args: tuple[Any, ...] = ()
        kwargs = rest
        if not open_ended and not all(name in known for name in rest):
            kwargs = {name: v for name, v in rest.items() if name in known}
            args = () if any(v is first for v in kwargs.values()) else (first,)
    elif isinstance(batch, Sequence) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch):
        first, labels = batch
        args, kwargs, mask = (first,), {}, None
    else:
        raise GramianError(
            f"batch: expected a mapping with input_ids and labels, or (inputs, labels), got {type(batch).__name__}"
        )
    if labels is not None and (not isinstance(labels, Tensor) or labels.is_floating_point()):
        raise GramianError("labels: expected integer classes, or kfac.capture(...) around your own loss")
    return LabelledBatch(args, kwargs, labels, mask, first, _is_causal(model) if shifted is None else shifted)


def _is_causal(model: nn.Module) -> bool:
    """True for Hugging Face models whose own loss shifts the labels."""
    kind = getattr(model, "loss_type", None) or type(model).__name__
    return str(kind).endswith(("ForCausalLM", "LMHeadModel"))


def logits_of(output: Any) -> Tensor:
    """The logits [B, ..., V] in a model's output: its `.logits`, its first element, or itself; otherwise a GramianError.

    A DTensor is gathered.
    """
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple | list) else output)
    if not isinstance(logits, Tensor) or logits.dim() < 2 or not logits.is_floating_point():
        raise GramianError("model: returned no logits; expected a tensor [B, ..., V], alone, first, or as .logits")
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


@dataclass(frozen=True)
class Positions:
    """The positions of a batch that have a loss term, and their labels."""

    counted: Tensor
    """Bool [B] or [B, T]: True where a position has a loss term."""
    labels: Tensor | None
    """Labels aligned with the logits; None where the batch has none."""

    @property
    def terms(self) -> float:
        """Number of positions that have a loss term."""
        return float(self.counted.sum())


def positions(batch: LabelledBatch, shape: torch.Size | None) -> Positions:
    """Find the positions of a batch with a loss term: those whose label is not -100 and whose mask is not 0.

    If the batch has no labels, the inputs are the labels under a causal shift; otherwise all positions of `shape` count, the
    logits' shape without classes (None is allowed if there are labels). A causal shift of labels [B] is a GramianError.
    """
    labels, mask, device = batch.labels, batch.mask_BT, batch.inputs.device
    if labels is None and batch.shifted:
        labels = batch.inputs if mask is None else batch.inputs.masked_fill(mask == 0, IGNORE)
    if labels is None:
        assert shape is not None
        counted = torch.ones(shape, dtype=torch.bool, device=device)
    else:
        labels, shape = labels.to(device), labels.shape
        if batch.shifted and labels.dim() < 2:
            raise GramianError(f"causal_shift: labels of shape {list(labels.shape)} have no positions; expected [B, T]")
        if batch.shifted:
            last = labels.new_full((*labels.shape[:-1], 1), IGNORE)
            labels = torch.cat([labels[..., 1:], last], dim=-1)
        counted = labels != IGNORE
    if mask is not None and mask.shape == shape:
        counted = counted & (mask.to(device) != 0)
    return Positions(counted, labels)


def token_weights(batch: LabelledBatch, found: Positions) -> Tensor | None:
    """Weights of the tokens that layers see, [B, T] or [B, 1]: 1 for positions with a loss term, else 0; None: all 1.

    If a sample has one label for all its tokens, a token's weight is that of the sample times its `attention_mask`.
    """
    if found.counted.dim() >= 2:
        return found.counted.flatten(1).double()
    weights = None if batch.mask_BT is None or batch.mask_BT.dim() != 2 else batch.mask_BT.double()
    if bool(found.counted.all()):
        return weights
    counted_B1 = found.counted.double()[:, None]
    return counted_B1 if weights is None else weights.to(counted_B1.device) * counted_B1


def draw_labels(logits: Tensor, seed: int, samples_B: Tensor, draw: int) -> Tensor:
    """Draw one label per position from softmax(logits) [..., V]: [...].

    The randomness of a label depends on (`seed`, id of its sample in `samples_B`, position, number of the `draw`) only.
    """
    classes = logits.shape[-1]
    rows = logits.detach().reshape(-1, classes)
    per_sample = rows.shape[0] // max(len(samples_B), 1)
    uniform = token_uniforms(seed, samples_B.to(logits.device), per_sample, draw).reshape(-1)
    labels = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    step = max(1, ROWS // classes)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        below = rows[part].double().softmax(-1).cumsum(-1)
        labels[part] = torch.searchsorted(below, uniform[part, None] * below[:, -1:], right=True)[:, 0]
    return labels.clamp_(max=classes - 1).reshape(logits.shape[:-1])


def summed_cross_entropy(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Σ of the cross entropy over the positions where `counted` is True, in float32 (float64 for float64 logits)."""
    wanted = labels.masked_fill(~counted, IGNORE).reshape(-1)
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.dtype == torch.float64 else rows.float()
    return F.cross_entropy(rows, wanted, ignore_index=IGNORE, reduction="sum")


def find_positions(root: nn.Module, batch: LabelledBatch) -> Positions:
    """The positions of a batch that have a loss term; without labels a forward shows the shape of the logits."""
    shape = None
    if batch.unlabelled:
        with torch.no_grad():
            shape = logits_of(root(*batch.args, **batch.kwargs)).shape[:-1]
    return positions(batch, shape)


def run_pass(
    root: nn.Module,
    batch: LabelledBatch,
    found: Positions,
    draw: int | None,
    seed: int,
    samples: Tensor,
    cap: KFACCapture | None = None,
) -> None:
    """Run a forward, and a backward of the summed cross entropy of the batch's labels (`draw` None) or of drawn ones.

    `found` are the positions with a loss term; drawn labels depend on `seed`, the ids `samples` [B] and the number `draw`. A
    GramianError is raised if labels and logits differ in shape or classes. `cap`, if given, is the open capture: it tells how
    many classes the head has, so that a tensor-parallel head which returns only some of them is an error too.
    """
    logits = logits_of(root(*batch.args, **batch.kwargs))
    if logits.shape[:-1] != found.counted.shape:
        raise GramianError(
            f"labels: have shape {list(found.counted.shape)}; expected {list(logits.shape[:-1])}, as the logits"
        )
    if cap is not None and hub_of(root).tensor_parallel is not None:
        _refuse_part_of_classes(cap, logits)
    labels = found.labels if draw is None else draw_labels(logits, seed, samples, draw)
    assert labels is not None
    refuse_unknown_classes(labels, found.counted, logits.shape[-1])
    summed_cross_entropy(logits, labels, found.counted).backward()


def run_passes(
    root: nn.Module,
    batch: LabelledBatch,
    capture: Callable[[Positions, Tensor | None], KFACCapture],
    draws: int | None,
    seed: int,
    sample_ids: Tensor | None,
) -> None:
    """Run one captured pass over a batch with its own labels (`draws` None), or one for every draw of labels.

    `capture` opens a capture for positions and token weights. Draws and token subsets depend on `seed` and `sample_ids` [B];
    None: ids that count the samples over all processes (`global_ids`). The model's gradients, buffers and random state are
    restored. A GramianError is raised if a parameter gets a gradient other than through its own module.
    """
    with ExitStack() as around:
        around.enter_context(preserve_state(root))
        found = find_positions(root, batch)
        weights = token_weights(batch, found)
        cap = capture(found, weights)
        if not batch.inputs.shape[0]:
            cap.batch_size = 0  # stated, so that no row is taken for a sample
        samples = global_ids(sample_ids, 0, batch.inputs.shape[0], cap.sample_sharding)
        around.enter_context(hub_of(root).governed_by(Withheld()))
        around.enter_context(cap)  # after the rule: where no weight gradient is formed there is nothing to audit
        for draw in range(draws or 1):
            cap.draw = draw
            cap.next(num_terms=found.terms, token_weights=weights, sample_ids=samples)
            run_pass(root, batch, found, None if draws is None else draw, seed, samples, cap)
        stray = [name for name, p in named_parameters(root) if p.grad is not None]
        if stray:
            raise GramianError(
                f"{stray[0]}: got a gradient past its layer; expected the weight to be used through its own module only"
            )


def _refuse_part_of_classes(cap: KFACCapture, logits: Tensor) -> None:
    """Raise a GramianError if a tensor-parallel head returns only its own classes to each process: labels need all."""
    head = cap.kronecker.head or cap.output_layer()
    classes = next((spec.outputs for spec in cap.kronecker.specs.values() if head in spec.layers), logits.shape[-1])
    if logits.shape[-1] != classes:
        raise GramianError(
            f"{head}: returns {logits.shape[-1]} of its {classes} classes to each process; "
            "expected ColwiseParallel(output_layouts=Replicate())"
        )


def refuse_unknown_classes(labels: Tensor, counted: Tensor, classes: int) -> None:
    """Raise a GramianError if a label at a position where `counted` is True is not a class in [0, classes)."""
    wrong = counted & ((labels < 0) | (labels >= classes))
    if bool(wrong.any()):
        raise GramianError(
            f"labels: hold {int(labels[wrong][0])}; expected classes from 0 to {classes - 1}, or {IGNORE} for none"
        )
