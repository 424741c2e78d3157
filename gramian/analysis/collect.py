"""K-FAC factors from several batches as if they were one, with one backward for each batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from gramian.analysis.subject import Batch
from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.curvature.estimate.fisher_labels import (
    draw_labels,
    logits_of,
    positions,
    read_batch,
    refuse_unknown_classes,
    summed_cross_entropy,
    token_weights,
)
from gramian.curvature.estimate.kfac_capture import KFACCapture
from gramian.taps.hub import hub_of
from gramian.taps.model.preserve_state import preserve_state
from gramian.taps.model.user_names import named_parameters, unwrap
from gramian.taps.roles import Withheld


def collect(
    kfac: KFACNaturalGradient,
    model: torch.nn.Module,
    share: Sequence[tuple[Tensor, Batch]],
    fisher: str,
    seed: int,
    update: Callable[[int, int], None],
) -> float:
    """Compute K-FAC's factors from all batches of all processes as if they were one batch; the model is not changed.

    `share` has this process's batches, each with the numbers of its rows among all rows (`Subject.share`). Collective.

    The model runs in evaluation mode. "labels" [B, positions] of a batch are the target of each position: nothing is shifted.
    `fisher` "mc" and "true" draw labels with a generator keyed by row and position, so the split into batches does not matter.
    `update` is called with (batches done, batches in total). Returns the mean cross entropy of the data's own labels, in nats
    per label, of all processes. Cost: a forward and a backward of every batch, without weight gradients.

    Raises:
        GramianError: if labels do not fit, the factors are not finite, or a weight is used outside its layer's own module.
    """
    root, drawn = unwrap(model), fisher != "empirical"
    asked = [read_batch(root, batch, False) for _, batch in share]
    found = [positions(one, None) for one in asked]
    terms, nats = sum(one.terms for one in found), 0.0
    with ExitStack() as around:
        around.enter_context(preserve_state(root))
        around.enter_context(_evaluation_mode(root))
        around.enter_context(hub_of(root).governed_by(Withheld()))
        capture = kfac.capture(root, loss_reduction="sum", num_terms=terms, force=True)
        assert isinstance(capture, KFACCapture)
        capture.estimate = "mc" if drawn else "empirical"
        around.enter_context(capture)
        for number, ((samples_B, _), one, counted) in enumerate(zip(share, asked, found, strict=True), start=1):
            weights = None if bool(counted.counted.all()) else token_weights(one, counted)
            capture.next(num_terms=counted.terms, token_weights=weights, sample_ids=samples_B)
            logits = logits_of(root(*one.args, **one.kwargs))
            assert counted.labels is not None
            refuse_unknown_classes(counted.labels, counted.counted, logits.shape[-1])
            nats += float(summed_cross_entropy(logits.detach(), counted.labels, counted.counted))
            labels = draw_labels(logits, seed, samples_B, 0) if drawn else counted.labels
            summed_cross_entropy(logits, labels, counted.counted).backward()
            update(number, len(share))
        stray = [name for name, p in named_parameters(root) if p.grad is not None]
        if stray:
            raise GramianError(
                f"{stray[0]}: got a gradient past its layer; expected the weight to be used through its own module only"
            )
    if kfac.dropped:
        why = kfac.dropped[-1]["reason"]
        raise GramianError(f"K-FAC: {why}; expected loss terms, and a model whose loss and gradients are finite")
    if kfac.state.exchange is not None:
        nats, terms = kfac.state.exchange.sum(torch.tensor([nats, terms], dtype=torch.float64)).tolist()
    return nats / max(1.0, terms)


@contextmanager
def _evaluation_mode(root: torch.nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode of a model, without dropout; the mode of every module is restored afterwards."""
    modes = [(module, module.training) for module in root.modules()]
    root.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
