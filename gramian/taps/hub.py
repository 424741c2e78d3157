"""The hub of one model: its state, its installed taps, its row proof, and the listeners that receive its records.

`hub_of(model)` returns it. Captures and gradient rules attach to the hub as listeners; the taps (replaced forwards of layers)
are installed while any listener is attached. The row proof checks that rows are attributed to the right samples.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from gramian.core.errors import GramianError
from gramian.parallel.data_parallel import GatheredParameters
from gramian.parallel.lockstep import Lockstep, sharing_group
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.model import user_names
from gramian.taps.model.find_layers import FoundLayer, discover
from gramian.taps.model.whole_layers import restore, whole_classes
from gramian.taps.passes import Listener, in_backward
from gramian.taps.proof.row_proof import RowProof
from gramian.taps.replaced_forward import LISTENING, ReplacedForward
from gramian.taps.roles import GradientRule, Ordinary, ParameterInfo
from gramian.taps.root_forward import RootForward
from gramian.taps.tapped_model import TappedModel

_hub_of: weakref.WeakKeyDictionary[nn.Module, "Hub"] = weakref.WeakKeyDictionary()
"""Hubs of models without taps; such a hub refers to nothing of its model."""
_tapped_hub_of: weakref.WeakKeyDictionary[nn.Module, "weakref.ref[Hub]"] = weakref.WeakKeyDictionary()
"""Hubs of models with taps, whose forwards refer to the hub: both go together when the user drops the model."""
_FLAGS = threading.Lock()


class Hub(TappedModel):
    """State, taps (replaced forwards of layers) and row proof of one root module; it exists as long as the module."""

    def __init__(self, root: nn.Module) -> None:
        """Prepare the hub of a root module; no forward is replaced before `attach` or `install`."""
        super().__init__(root)
        self.proof = RowProof(self)
        self._root_forward = RootForward(self, self.proof)
        self._forwards: weakref.WeakKeyDictionary[nn.Module, ReplacedForward] = weakref.WeakKeyDictionary()
        self._installed: list[ReplacedForward] = []
        self._installations = 0
        self.retap = self._retap

    def install(self) -> None:
        """Replace the forwards of all layers to be tapped; calls are counted, and only the first one replaces.

        Raises:
            GramianError: if nothing is trainable or a layer cannot be tapped; no forward is then replaced.
        """
        self._installations += 1
        if self._installations > 1:
            return
        try:
            root = self.root_module
            layers, parameters = discover(root)
            self.gathered = GatheredParameters(root)
            if isinstance(root, FSDPModule):
                self._root_forward.install_hook(root)
                self.lockstep = Lockstep(sharing_group(root))
            self._replace_forwards(layers, parameters)
        except BaseException:
            self.uninstall()
            raise
        if _hub_of.get(root) is self:
            _tapped_hub_of[root] = weakref.ref(_hub_of.pop(root))

    def uninstall(self) -> None:
        """Undo one call of `install`; after the last one every layer has its own forward again."""
        self._installations -= 1
        if self._installations == 0:
            self._restore_forwards()
            self.passes.clear()
            self._root_forward.remove_hook()
            self.gathered = None  # it refers to parameters
            root = self.root()
            if root is not None and _tapped_hub_of.pop(root, None) is not None:
                _hub_of[root] = self

    def _retap(self) -> None:
        """Find the layers again and replace their forwards instead of those that are replaced now; nothing is proven yet."""
        layers, parameters = discover(self.root_module)
        self._restore_forwards()
        self._replace_forwards(layers, parameters)
        self.audited = frozenset()
        self.proven_calls.clear()
        self.proof.proven.clear()

    def _replace_forwards(self, layers: list[FoundLayer], parameters: dict[str, ParameterInfo]) -> None:
        root, self.parameters = self.root_module, parameters
        for found in layers:
            forward = self._forwards.get(found.module)
            if forward is None:
                forward = self._forwards[found.module] = ReplacedForward(found.module, self, self._root_forward)
            forward.install(found, is_root=found.module is root)
            self._installed.append(forward)
            self.taps.append(forward.tap)
            self.users.update({*forward.tap.parameters.values()})

    def _restore_forwards(self) -> None:
        for forward in self._installed:
            forward.uninstall()
        self._installed.clear()
        self.taps.clear()
        self.users.clear()

    def attach(self, listener: Listener) -> None:
        """Install the taps and start to report backwards to a listener (a capture, a gradient rule).

        Raises:
            GramianError: if one of its statistics is part of an open capture, or open captures disagree about the batch size
                or, of a tensor-parallel model, about whether processes share the samples; or if only the listener cannot.
        """
        busy = [
            s for other in self.listeners for s in other.statistics if any(s is mine for mine in listener.statistics)
        ]
        if busy:
            raise GramianError(
                f"statistic: {type(busy[0]).__name__} is part of an open capture; expected another object"
            )
        sizes = {other.batch_size for other in (*self.listeners, listener)} - {None}
        if len(sizes) > 1:
            raise GramianError(
                f"batch_size: open captures of one model say {sorted(map(str, sizes))}; expected one number"
            )
        disagree = bool(self.listeners) and self.listeners[0].takes_shares != listener.takes_shares
        tensor = TensorParallel.of(self.root_module)
        if disagree and tensor is not None:
            raise GramianError(
                "capture: K-FAC or private training of a tensor-parallel model is under way; expected one capture at a time"
            )
        found = self.root_module.named_parameters()
        shard = next((name for name, p in found if tensor and p.requires_grad and tensor.spreads(p)), None)
        if (
            shard is not None and not listener.takes_shares
        ):  # later, the forward would leave the mask of its tokens to torch
            raise GramianError(
                f"{shard} is tensor parallel, which only K-FAC and private training can look at; expected whole layers"
            )
        self.tensor_parallel = tensor if listener.takes_shares else None
        self.install()
        self.listeners.append(listener)
        self._set_flags()

    def detach(self, listener: Listener) -> None:
        """Stop reporting to a listener; the taps are removed with the last one."""
        if not in_backward():
            self.passes.settle()
        self.listeners.remove(listener)
        self._set_flags()
        self.uninstall()

    @contextmanager
    def governed_by(self, rule: GradientRule) -> Iterator[None]:
        """Context manager in which `rule` sets whether autograd forms weight gradients.

        Raises:
            GramianError: if another rule is already set.
        """
        if not isinstance(self.rule, Ordinary):
            raise GramianError(
                f"rule: {type(self.rule).__name__} governs the model already; expected one rule at a time"
            )
        self.rule = rule
        try:
            yield
        finally:
            self.rule = Ordinary()

    def _set_flags(self) -> None:
        """Set `live`, `per_sample` and `batch_size` from the listeners: plain flags on which a compiled graph can guard."""
        with _FLAGS:  # threads may capture models of their own
            self.live = bool(self.listeners)
            hubs = [hub for found in list(_tapped_hub_of.values()) if (hub := found()) is not None]
            LISTENING.anywhere = any(hub.listeners for hub in (self, *hubs))  # a proof under way may not be `live`
        if not self.live:
            self.tensor_parallel = None
        self.per_sample = self.tensor_parallel is not None or any(listener.per_sample for listener in self.listeners)
        given = [listener.batch_size for listener in self.listeners if listener.batch_size is not None]
        self.batch_size = given[0] if given else None


def hub_of(model: nn.Module) -> Hub:
    """The `Hub` of a model, made on the first call; the same for a model and every wrapper around it (DDP, torch.compile)."""
    root = user_names.unwrap(model)
    tapped = _tapped_hub_of.get(root, lambda: None)()
    return tapped or _hub_of.get(root) or _hub_of.setdefault(root, Hub(root))


@contextmanager
def separate_hub(model: nn.Module) -> Iterator[None]:
    """Context manager: the model has a new hub, to which no earlier proof or audit counts; afterwards its own, unchanged.

    Raises:
        GramianError: if a capture is open on the model, or it is private.
    """
    root = user_names.unwrap(model)
    if root in _tapped_hub_of and hub_of(root).live:
        raise GramianError("model: is private, or inside an open capture; expected the model before that")
    before, whole = _hub_of.pop(root, None), whole_classes(root)
    try:
        yield
    finally:
        _hub_of.pop(root, None)
        restore(root, whole)
        if before is not None:
            _hub_of[root] = before
