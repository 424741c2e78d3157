"""The backward of one call of a layer: its site computes per-sample gradients from saved inputs and output gradients.

The site is the object that knows the formulas of this kind of layer. Every listener receives a `LayerRecord`; the `PassBook`
receives the gradients, and sums them over all uses of a parameter before it delivers them.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gramian.core.errors import GramianError
from gramian.linalg.wide import exact_products
from gramian.parallel.tensor_parallel import full_tensor
from gramian.taps.gradients import PerSampleGradient
from gramian.taps.passes import SECOND_BACKWARD, Explained, Pass
from gramian.taps.products.banks import MatrixSides
from gramian.taps.records import LayerRecord
from gramian.taps.sites.batch_layout import CallLayouts
from gramian.taps.sites.site import Site
from gramian.taps.tap import Tap
from gramian.taps.tapped_model import TappedModel, TapUse, refuse_create_graph, refuse_unseen, rows_of_call


def report(use: TapUse, saved: list[Tensor], gradients: list[Tensor]) -> None:
    """Compute per-sample gradients of one call of a layer and deliver them to the listeners (eager mode).

    Args:
        use: the call.
        saved: the tensors that its forward saved.
        gradients: gradients of its outputs.

    Raises:
        GramianError: for create_graph=True, a second backward through one forward, or a reentrant checkpoint.
    """
    refuse_create_graph()
    if use.inside_backward:
        raise GramianError(
            f"{use.tap.name}: ran and was differentiated inside a backward (reentrant checkpointing or a nested "
            "backward); expected checkpoint(..., use_reentrant=False)"
        )
    if use.pass_ is None or use.pass_.closed:
        raise GramianError(SECOND_BACKWARD)
    model, pass_, extra, layouts = use.model, use.pass_, use.extra, use.layouts
    if not model.rule.another_backward_follows:
        use.pass_ = use.extra = None  # the graph outlives the backward
    try:
        _receive(model, pass_, use.tap, use.site, use.ordinal, saved, gradients, extra, layouts, borrowed=False)
    except GramianError as error:
        model.raise_after_run(use.tap, error)


def report_compiled(
    model: TappedModel, tap: Tap, number: int, ordinal: int, saved: list[Tensor], gradients: list[Tensor]
) -> None:
    """Compute per-sample gradients of one call of a layer in a compiled backward and deliver them to the listeners.

    Args:
        model: the tapped model.
        tap: the tap of the layer.
        number: number of the pass (forward and backward).
        ordinal: number of earlier calls of the layer in the forward.
        saved: the tensors that the forward saved; the graph may reuse their memory after this call.
        gradients: gradients of the outputs; the graph may reuse their memory after this call.

    Raises:
        GramianError: for a second backward through one forward, or a call of an FSDP2 model that no row proof covers.
    """
    if not model.live:
        return
    pass_ = model.passes.get(number)
    layouts = pass_.layouts[tap.name][0] if tap.name in pass_.layouts else None
    if isinstance(model.root(), FSDPModule) and model.tells_samples_apart and pass_.batch > 1:
        call = (tap.name, ordinal, rows_of_call(saved, gradients, pass_.batch, layouts))
        refuse_unseen([] if call in model.proven_calls else [call])
    for name in tap.parameters.values():
        tied = model.users[name] - 1
        pass_.uses[name] = max(pass_.uses.get(name, 0), ordinal + 1 + tied, tap.traced_uses + tied)
    _receive(model, pass_, tap, tap.site, ordinal, saved, gradients, None, layouts, borrowed=True)


def _receive(
    model: TappedModel,
    pass_: Pass,
    tap: Tap,
    site: Site | None,
    ordinal: int,
    saved: list[Tensor],
    output_gradients: list[Tensor],
    extra: Any,
    layouts: CallLayouts | None,
    borrowed: bool,
) -> None:
    module, audience = tap.owner(), model.passes.audience(pass_)
    if module is None or not audience:
        return
    assert site is not None
    device = output_gradients[0].device.type
    model.passes.begin(pass_, device)
    needed = model.needed
    if needed is not None and needed.isdisjoint(tap.parameters.values()):
        return  # that the backward came by counts
    batch = pass_.batch
    if layouts is not None and not site.inline:
        with tap.named_errors():
            saved, output_gradients, extra = site.arranged(saved, output_gradients, layouts, batch, extra)
    if model.tensor_parallel is not None:
        with tap.named_errors():
            for t in (*saved, *output_gradients) if model.rule.withholds else ():
                model.tensor_parallel.note(tap.name, t)
            if model.proof_run is not None:  # all samples on every process, so that all come to the same verdict
                saved = [full_tensor(t) for t in saved]
                output_gradients = [full_tensor(t) for t in output_gradients]
            else:
                saved = [model.tensor_parallel.take(t, batch) for t in saved]
                output_gradients = [model.tensor_parallel.take(t, batch) for t in output_gradients]
                mine = model.tensor_parallel.share(batch)
                batch = mine.stop - mine.start
    if model.gathered is not None:
        saved = model.gathered.copied(saved)  # listeners may store them until the backward is over
    with exact_products(device):  # whatever the user's backward runs in
        model.live = False  # the generic site runs the layer again: untapped
        try:
            with tap.named_errors():
                by_local = site.gradients(module, saved, output_gradients, batch, extra)
        finally:
            model.live = True
        gradients: dict[str, PerSampleGradient] = {}
        for local, gradient in by_local.items():
            name = tap.parameters[local]
            if needed is None or name in needed:
                _require_known(model, name, gradient)
                gradients[name] = gradient
        readers = [(listener, info) for listener, info in audience if listener.reads_calls]
        if readers:

            @cache
            def sides() -> Mapping[str, MatrixSides]:
                model.live = False  # as above
                try:
                    with tap.named_errors():
                        return site.matrix_sides(module, saved, output_gradients, batch, extra)
                finally:
                    model.live = True

            for listener, info in readers:
                record = LayerRecord(
                    tap.name, site.kind, ordinal, saved, output_gradients, gradients, info, sides, borrowed
                )
                listener.layer(record)
        if model.rule.withholds and not (site.compiles or site.inline):
            for name, gradient in gradients.items():
                pass_.explained[name] = Explained.of(gradient, pass_.explained.get(name))
        model.passes.arrive(pass_, site.kind, gradients, borrowed)


def _require_known(model: TappedModel, name: str, gradient: PerSampleGradient) -> None:
    """Raise GramianError for the gradient of a parameter that is not known, or has another shape."""
    if name not in model.parameters:
        raise GramianError(
            f"{name}: began to train inside a capture; expected requires_grad to be set before it is entered"
        )
    shape = model.parameters[name].shape
    if gradient.shape != shape:
        raise GramianError(
            f"{name}: its site explains a gradient of shape {list(gradient.shape)}; expected {list(shape)}"
        )
