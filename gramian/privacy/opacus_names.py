"""Names of Opacus' engine that scripts read: the account of ε, compatibility, and errors that name gramian's counterpart."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from gramian.core.errors import GramianError
from gramian.parallel.model_grid import grid_of
from gramian.privacy.accounting.accountant import Accounting
from gramian.privacy.accounting.epsilon import History, event_of, plain_run
from gramian.privacy.accounting.ledger import Ledger
from gramian.privacy.clipping.refused_modules import layers_with_sites, refuse_mixing
from gramian.privacy.clipping.trained_parameters import trained_parameters
from gramian.privacy.options import check_optimizer, innermost, sampling_rate
from gramian.taps.model.user_names import unwrap

COUNTERPARTS = {
    "validate": "is_compatible(module=…), or make_private itself, which names what it refuses",
    "get_compatible_module": "a model without BatchNorm, such as nn.GroupNorm in its place; other layers are not replaced",
    "save_checkpoint": "state_dict() beside those of model and optimizer (gramian.privacy.noise.secrets.save_private)",
    "load_checkpoint": "load_state_dict(state) after those of model and optimizer",
}
"""{method of Opacus' engine: what to use in its place}."""


class AccountView:
    """`engine.accountant`: what was spent so far, to read; the engine itself counts the steps."""

    def __init__(self, accounting: Accounting) -> None:
        """Read from the account of an engine."""
        self._accounting = accounting

    @property
    def history(self) -> History:
        """Runs of equal steps in order: (noise multiplier, sample rate, number of steps), see `Accounting.history`."""
        return self._accounting.history

    def get_epsilon(self, delta: float) -> float:
        """ε of all steps at this δ."""
        return self._accounting.epsilon(delta)

    def dp_event(self) -> Any:
        """All steps as an event of `dp_accounting`, whose accountants answer what is not asked here, such as of tuned runs."""
        from dp_accounting import ComposedDpEvent, SelfComposedDpEvent

        account = self._accounting
        return ComposedDpEvent(
            [SelfComposedDpEvent(event_of(run), run[2]) for run in map(plain_run, (*account.history, *account.others))]
        )

    def mechanism(self) -> str:
        """How ε is computed: "prv", "pld", "rdp" or "gdp"."""
        return self._accounting.mechanism

    def __len__(self) -> int:
        """Number of steps."""
        return self._accounting.steps

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Raise a `GramianError`: `optimizer.step()` counts."""
        raise GramianError("accountant: is read only; expected optimizer.step(), which counts each step by itself")


class OpacusNames:
    """Base of `PrivacyEngine` with the names that a script for Opacus uses beside `make_private` and `get_epsilon`."""

    _ledger: Ledger

    @property
    def accountant(self) -> AccountView:
        """The account of ε: `history`, `get_epsilon(delta)` and `mechanism()`, to read."""
        return AccountView(self._ledger.accounting)

    def is_compatible(self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: Any = None) -> bool:
        """Whether `make_private` would accept these, as far as can be seen without a batch; it says what it refuses."""
        try:
            root = unwrap(module)
            grid = grid_of(module, root)
            stepped = torch.optim.SGD(root.parameters(), lr=0.0) if optimizer is None else innermost(optimizer)
            check_optimizer(module, stepped)
            trained_parameters(root, stepped)
            refuse_mixing(layers_with_sites(root))
            if data_loader is not None:
                sampling_rate(data_loader, grid.data[1], None, None, poisson=True)
        except GramianError:
            return False
        return True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an `AttributeError` that names the counterpart of a method of Opacus."""
            counterpart = f"; expected {COUNTERPARTS[name]}" if name in COUNTERPARTS else ""
            raise AttributeError(f"{type(self).__name__} has no {name}{counterpart}")
