"""What a root returns: rows, structures of rows, a loss."""

import torch
from torch import Tensor, nn

from tests.kit.programs.grammar import Draft, Return, Run, reduced, returned, terms, unfit


@returned
def rows(d: Draft) -> Return:
    return lambda h, run: h


@returned
def pooled(d: Draft) -> Return:
    head = d.add(nn.Linear(d.width, 2), "head")
    return lambda h, run: head(h.mean(1))


@returned
def pair(d: Draft) -> Return:
    return lambda h, run: (h, h.square().sum((1, 2)))


@returned
def dictionary(d: Draft) -> Return:
    head = d.add(nn.Linear(d.width, 2), "head")
    return lambda h, run: {"logits": head(h), "hidden": (h,)}


@returned
def loss(d: Draft) -> Return:
    """A scalar: mean or sum over samples of one term each."""
    if not d.allows_scalars:
        return unfit
    d.inputs["goals"], d.returns_scalars, reduction = d.normal(d.records), True, d.reduction
    return lambda h, run: {"loss": reduced(terms([h], run.inputs["goals"].to(h)), reduction)}


@returned
def token_mean_loss(d: Draft) -> Return:
    """A scalar: the mean over all tokens of the batch that have a label, as Hugging Face models return it."""
    labelled = d.uniform(d.records, d.tokens) < 0.6
    labelled[:, 0] = True
    made = _token_mean(d, labelled)
    d.sample_major &= made is unfit
    return made


@returned
def token_mean_loss_of_equal_counts(d: Draft) -> Return:
    """The same where every sample has the same number of labels."""
    return _token_mean(d, d.uniform(d.records, d.tokens).argsort(1) < d.rng.randint(1, d.tokens))


def _token_mean(d: Draft, labelled: Tensor) -> Return:
    if not d.allows_scalars or d.reduction == "sum":
        return unfit
    d.inputs["labelled"], d.returns_scalars = labelled, True
    return lambda h, run: {"loss": torch.sin(h.sum(-1))[run.inputs["labelled"]].mean()}


@returned
def pooled_with_mask(d: Draft) -> Return:
    """The mean over the tokens of a record, which was padded to the longest of its batch."""
    head = d.add(nn.Linear(d.width, 2), "head")

    def output(h: Tensor, run: Run) -> Tensor:
        real = run.inputs["real"].to(h)[..., None]
        return head((h * real).sum(1) / real.sum(1))

    return output


@returned
def pooled_without_mask(d: Draft) -> Return:
    """The mean over padding as well: the longest record of the batch influences all."""
    return pooled(d)


RAGGED = ("pooled_with_mask", "pooled_without_mask")
"""What a root of padded records returns: nothing of a padded token may reach the loss behind it."""
