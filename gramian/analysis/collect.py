"""K-FAC factors from several batches as if they were one, with one backward for each batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gramian.analysis.subject import Batch
from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.curvature.estimate.kfac_capture import KFACCapture
from gramian.curvature.estimate.labelled_batch import logits_of, positions, read_batch, token_weights
from gramian.curvature.estimate.likelihood import Softmax
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
    per label, of all processes. Cost: a forward and a backward of every batch, with EK-FAC two, without weight gradients.

    Raises:
        GramianError: if labels do not fit, the factors are not finite, or a weight is used outside its layer's own module.
    """
    root, drawn = unwrap(model), fisher != "empirical"
    asked = [read_batch(root, batch, False) for _, batch in share]
    found = [positions(one, None) for one in asked]
    softmax, passes = Softmax(), 2 if kfac.options.ekfac else 1
    terms = sum(one.terms for one in found)

    def run(capture: KFACCapture, first: int) -> float:
        """Run all batches inside `capture`, after `first` batches of earlier passes; returns the loss of the data's labels."""
        loss = 0.0
        capture.estimate = "mc" if drawn else "empirical"
        with preserve_state(root), _evaluation_mode(root), hub_of(root).governed_by(Withheld()), capture:
            for number, ((samples_B, _), one, counted) in enumerate(zip(share, asked, found, strict=True), start=1):
                weights = None if bool(counted.counted.all()) else token_weights(one, counted)[0]
                capture.next(num_terms=counted.terms, token_weights=weights, sample_ids=samples_B)
                logits = logits_of(root(*one.args, **one.kwargs))
                assert counted.labels is not None
                softmax.check(counted.labels, counted.counted, logits)
                loss += float(softmax.summed_loss(logits.detach(), counted.labels, counted.counted))
                labels = softmax.draw(logits, seed, samples_B, 0) if drawn else counted.labels
                softmax.summed_loss(logits, labels, counted.counted).backward()
                update(first + number, passes * len(share))
            stray = [name for name, p in named_parameters(root) if p.grad is not None]
            if stray:
                raise GramianError(
                    f"{stray[0]}: got a gradient past its layer; expected the weight to be used through its own module only"
                )
        if kfac.dropped:
            why = kfac.dropped[-1]["reason"]
            raise GramianError(f"K-FAC: {why}; expected loss terms, and a model whose loss and gradients are finite")
        return loss

    factors = kfac.capture(root, loss_reduction="sum", num_terms=terms, force=True, correct=False)
    assert isinstance(factors, KFACCapture)
    nats = run(factors, 0)
    if passes == 2:
        run(kfac.correct(root, loss_reduction="sum", num_terms=terms), len(share))
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
