"""The part of `PrivacyEngine` that handles batches: backwards, units of several rows, and a proof of the loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from gramian.core.errors import GramianError
from gramian.privacy.audit.independence import check_independence
from gramian.privacy.clipping.clipping_rule import Clipping
from gramian.privacy.private_account import PrivateAccount
from gramian.privacy.private_model import PrivateModel
from gramian.taps.hub import hub_of


class PrivateBatches(PrivateAccount):
    """Base of `PrivacyEngine`: what a training loop calls for each batch."""

    @property
    def _installed(self) -> PrivateModel | None:
        return self._model if self._model is not None and self._model.installed else None

    def _active(self) -> PrivateModel:
        if self._installed is None:
            raise GramianError("engine: makes no model private; expected make_private before")
        return self._installed

    @property
    def adjacency(self) -> str:
        """What two data sets differ in whose outcomes ε compares: one record, or with `unit_of` one unit."""
        return self._active().units.adjacency

    def backward(self, loss: Tensor) -> None:
        """Run `loss.backward()`; as two backwards with clipping="two_pass", or if one would exceed the memory budget."""
        model = self._active()
        model.look_behind_loss(loss)
        model.clipping.backward(loss)

    def units(self, ids: Any) -> AbstractContextManager[None]:
        """Context manager around forward and backward, in which `ids` say which rows or tokens make up a unit.

        p.grad then gains Σ_u min(1, C/‖g_u‖) g_u, with g_u the gradient summed over all rows, or tokens, of unit u.

        ```python
        with engine.units(documents):  # [B, T]: several documents in a row
            (F.cross_entropy(model(tokens, documents).flatten(0, 1), labels.flatten(), reduction="sum") / T).backward()
        ```

        Tokens of a unit may depend on each other alone: the row proof refuses a model that does not hide documents from each
        other. The last token of a unit must not have the first one of the next as its label (refused where the model gets the
        labels, and in `check_independence`). The loss is a sum over rows, or over tokens with a constant coefficient. Under
        Poisson sampling there must be as many units as records were drawn; with `unit_of` of `make_private` as many as units,
        and ids [B] are then set by the engine.

        Args:
            ids: any integers, [B] (the unit of each row) or [B, T] (of each token of packed rows); −1: padding, whose gradient
                must be zero.

        Raises:
            GramianError: for ids of another type or shape, or ids by token with max_physical_batch=1. In the forward and the
                backward: if they do not fit the batch, or padding has a gradient; naming a layer that has no tokens, or whose
                tokens depend on other units.
        """
        return self._active().units.given(ids)

    def check_independence(self, loss_fn: Callable[..., Tensor], batch: Any) -> None:
        """Prove that a loss does not mix the samples of a batch, by runs in which other samples are replaced.

        This is the row proof (the check that each row of a layer's tensors depends on its sample alone) with the user's own
        loss. Inside of `units`, units are replaced. It does nothing where batches of one sample are clipped without taps
        (max_physical_batch=1).

        Args:
            loss_fn: the loss of a batch: `loss_fn(*batch)` for a tuple or list, `loss_fn(batch)` otherwise; a function with one
                more argument gets the model as its first.
            batch: tensors with the samples on dim 0, in any structure.

        Raises:
            GramianError: naming the layer whose rows change when other samples are replaced; or if no model is private.
        """
        model = self._active()
        if isinstance(model.clipping, Clipping):  # else every sample is alone
            model.proof.loss = False  # what was shown of an earlier loss does not hold for this one
            model.units.refuse_crossing_labels(batch)
            check_independence(hub_of(model.root), model.root, loss_fn, batch, model.clipping.sample_ids)
            model.proof.loss = True
