"""One call of a tapped layer: its own forward, on detached weights if a rule withholds weight gradients, then the observer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.taps.model import user_names
from gramian.taps.model.batch_free import unwrapped, with_rows
from gramian.taps.model.empty_batches import apart
from gramian.taps.model.preserve_state import Generators
from gramian.taps.observer import observe, observe_product
from gramian.taps.passes import in_backward
from gramian.taps.sites.batch_layout import CallLayouts
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.products.inline_products import InlineProducts
from gramian.taps.sites.products.weight_views import UnknownUse
from gramian.taps.sites.site import Site
from gramian.taps.tap import Tap
from gramian.taps.tapped_model import TappedModel, rows_of_call

TENSOR_PARALLEL_KINDS = ("linear", "embedding", "norm")
"""Kinds of layers (`Site.kind`) that may be tensor parallel in a captured model."""


def run_layer(
    model: TappedModel, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a layer's own forward (`plain`) and return its output with the observer attached, which reports output gradients.

    Raises:
        GramianError: if the layer cannot be tapped in this call; in a proof's run it may be raised when the run is over.
    """
    compiling, grown = torch.compiler.is_compiling(), False
    again = not compiling and in_backward()
    assert tap.site is not None
    if not compiling and (again or model.batch_free):
        with tap.named_errors():
            args, kwargs, grown = unwrapped(args, kwargs, any_axes=tap.site.kind in ("linear", "norm"))
    _choose_site(model, tap, grown)
    site = tap.site
    if isinstance(site, InlineProducts):
        return _run_inline(model, tap, site, module, plain, args, kwargs)
    # names in the model are not looked up while a graph is traced: it would be of one layer only, not of all like it
    trained = [local for local in tap.parameters if user_names.parameter(module, local).requires_grad]
    plain, withholds = site.own_forward(module, plain), model.rule.withholds
    if withholds:
        keep = None if compiling or site.compiles else partial(_keep_leaf, tap, _leaves(model))
        plain = DetachedForward(plain, module, trained, keep, site.whole)
    if compiling:
        output, saved, extra = _run_site(model, tap, module, plain, args, kwargs)
    else:
        try:
            with tap.named_errors():
                output, saved, extra = _run_site(model, tap, module, plain, args, kwargs)
        except GramianError as error:
            model.raise_after_run(tap, error)
            return plain(*args, **kwargs)
    if not trained:
        return with_rows(output) if grown else output
    free, layouts = False, None
    if isinstance(output, Tensor) and not compiling:
        layouts = model.layouts_of(tap) if not grown and (again or model.layouts) else None
        free = not grown and layouts is None and (again or bool(model.batch_free)) and model.is_batch_free(tap, output)
        if model.proof_run is not None:
            model.proof_run.first_axes.setdefault(tap.name, []).append(output.shape[0] if output.dim() else 0)
    if free:
        batch = model.passes.batch_of_second_run(tap.name) if again else model.batch
        if model.proof_run is not None and batch != 1:
            model.proof_run.expanded.add(tap.name)
        output = output.expand(batch, *output.shape)
        saved, extra = site.copied(saved, extra, batch)
    if isinstance(output, Tensor):
        rows = output.shape[0] if output.dim() and not free and layouts is None else 0
        if rows == 1:
            output = _expanded(model, tap, output)
        if not (output.requires_grad or withholds):
            return output
    _refuse_tensor_parallel(model, tap, module, [*saved, *([output] if isinstance(output, Tensor) else [])])
    if not compiling:
        model.watch(tap)
        if withholds and not again and model.proof_run is None:
            _foresee(model, tap, site, saved, output, layouts)
    seen = observe(model, tap, output, saved, extra)
    return with_rows(seen) if free or grown else seen


def _foresee(
    model: TappedModel, tap: Tap, site: Site, saved: list[Tensor], output: Any, layouts: CallLayouts | None
) -> None:
    """Report what a call saves and returns as a clipping plan reads it: samples on axis 0; where they are not, without data."""
    if layouts is not None and site.compiles:
        empty = [torch.empty_like(t, device="meta") for t in (*saved, output)]
        try:
            saved, found, _ = site.arranged(empty[:-1], empty[-1:], layouts, model.batch, None)
        except GramianError:
            return  # layouts that do not fit this call, which is then proven and run again
        output = found[0]
    model.rule.foresee(tap, saved, output)


def _choose_site(model: TappedModel, tap: Tap, grown: bool = False) -> None:
    """Let a layer of products run by its fallback where records of whole layers, or copies without a batch axis, are needed."""
    if tap.products is not None:
        tap.site = tap.products.fallback if grown or model.takes_layers else tap.products


def _run_inline(
    model: TappedModel,
    tap: Tap,
    site: InlineProducts,
    module: nn.Module,
    plain: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Run a layer's own forward with an observer behind every product of a weight, and return its output.

    A layer that uses weights otherwise starts anew, from the same random numbers, with the site's fallback from now on.
    """
    trained = {k: name for k, name in tap.parameters.items() if user_names.parameter(module, k).requires_grad}
    if not trained:
        return plain(*args, **kwargs)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    _refuse_tensor_parallel(model, tap, module, tensors)
    batch = model.passes.batch_of_second_run(tap.name) if in_backward() else model.batch
    layouts = model.layouts_of(tap)
    run = site.observed(module, plain, batch, partial(observe_product, model, tap), layouts)
    run = DetachedForward(run, module, list(trained), None, site.whole) if model.rule.withholds else run
    generators = Generators(module)
    states = generators.states()
    before = model.passes.current
    uses, ordinals = (dict(before.uses), dict(before.ordinals)) if before else ({}, {})
    calls = model.calls if model.proof_run is None else model.proof_run.calls
    called = len(calls)
    try:
        output = run(*args, **kwargs)
    except UnknownUse:
        generators.restore(states)
        if model.passes.current:
            model.passes.current.uses, model.passes.current.ordinals = uses, ordinals
        del calls[called:]
        model.fallbacks += 1
        tap.products, tap.site = None, site.fallback
        return run_layer(model, tap, module, plain, args, kwargs)
    model.watch(tap)
    if not in_backward():
        rows = rows_of_call(tensors, [], batch, layouts, model.tells_sizes_apart)
        calls += [(name, 0, rows) for name in trained.values()]
    return output


def run_untapped(
    model: TappedModel, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a layer, or the root, without its tap inside a row proof; stores its trainable weights in `model.weights`."""
    for local, name in tap.parameters.items() if model.weights is not None else ():
        weight = user_names.parameter(module, local)
        if weight.requires_grad and name in model.parameters:
            model.weights[name] = weight  # type: ignore[index]
    _choose_site(model, tap)
    if model.watcher is not None and tap.site is not None and torch.is_grad_enabled() and not in_backward():
        output = model.watcher.run(tap, module, plain, args, kwargs)
    elif isinstance(tap.site, Generic):
        with tap.named_errors():
            output, _ = tap.site.first_run(module, plain, args, kwargs)  # dropout as in a run with the tap
    else:
        output = plain(*args, **kwargs)
    return apart(output) if gathers_in_order(model, tap, module) else output


def gathers_in_order(model: TappedModel, tap: Tap, module: nn.Module) -> bool:
    """True for an FSDP2 root if autograd forms no weight gradients; its output must then be a new tensor (`apart`).

    Otherwise processes with and without samples would gather weights in different orders.
    """
    return tap.is_root and model.rule.withholds and isinstance(module, FSDPModule)


def _run_site(
    model: TappedModel, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    assert tap.site is not None
    reason = tap.site.check_per_sample(module) if model.per_sample else None
    if reason is not None:
        raise GramianError(f"{tap.name or 'model'} ({type(module).__name__}) {reason}")
    return tap.site.run(module, plain, args, kwargs)


def _expanded(model: TappedModel, tap: Tap, output: Tensor) -> Tensor:
    """Expand an output of one row, which all samples share, to B rows, so that each sample has its own output gradient.

    In eager mode only inside a row proof, after one has shown that the model's outputs stay the same, or where no proof runs
    (`trusts_shapes`); else the output is returned unchanged. A compiled graph always expands, and is proven before it runs.
    """
    batch = model.batch
    if not torch.compiler.is_compiling():
        proven = tap.name in model.shared or model.trusts_shapes
        proven = proven if model.proof_run is None else model.proof_run.expands
        if batch and not proven:  # of no samples there are no rows
            return output
        if in_backward():
            batch = model.passes.batch_of_second_run(tap.name)
        elif model.proof_run is not None and batch != 1:
            model.proof_run.expanded.add(tap.name)
    return output if batch == 1 else output.expand(batch, *output.shape[1:])


def _refuse_tensor_parallel(model: TappedModel, tap: Tap, module: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Raise GramianError, on every process, for a tensor-parallel layer whose per-sample gradients cannot be computed."""
    distributed = any(isinstance(t, DTensor) for t in tensors)
    if not distributed and model.tensor_parallel is None:
        return  # before a compiled graph has looked at names, which layers of one graph do not share
    assert tap.site is not None
    layer = f"{tap.name or 'model'} ({type(module).__name__})"
    if distributed and model.tensor_parallel is None:
        raise GramianError(
            f"{layer} is tensor parallel, which only K-FAC and private training can look at; expected a layer that is whole"
        )
    if model.tensor_parallel is not None and not tap.site.compiles:
        raise GramianError(
            f"{layer} has no formula and must be run again sample by sample, which a tensor-parallel model cannot be; "
            "expected a registered site (register_site)"
        )
    if distributed and tap.site.kind not in TENSOR_PARALLEL_KINDS:
        raise GramianError(
            f"{layer} is tensor parallel; expected {', '.join(TENSOR_PARALLEL_KINDS)} layers to be, and others to be whole"
        )


def _keep_leaf(tap: Tap, leaves: list[tuple[str, Tensor]], local: str, weight: Tensor) -> None:
    """Append (name in the model, the detached copy) of a layer's weight."""
    leaves.append((tap.parameters[local], weight))


def _leaves(model: TappedModel) -> "list[tuple[str, Tensor]]":
    """List that receives detached weights of a layer without a gradient formula, to compare gradients."""
    if in_backward() or model.passes.current is None:
        return []  # a checkpoint's second run is of the same kind as its first, but gets nothing
    return model.passes.current.leaves


class DetachedForward:
    """A layer's forward on detached copies of its weights, so that autograd forms no gradient for the parameters."""

    def __init__(
        self,
        plain: Callable[..., Any],
        module: nn.Module,
        trained: Sequence[str],
        keep: Callable[[str, Tensor], None] | None,
        whole: bool,
    ) -> None:
        """Find the modules that have the weights; nothing is replaced before the call.

        Args:
            plain: the layer's own forward.
            module: the layer.
            trained: names inside the layer of the weights to detach.
            keep: is called with the name and the detached copy of each weight, which then gets autograd's gradient itself;
                None: the copies get no gradient.
            whole: True if the children are tapped with the layer: a weight that several of them share is detached in all.
        """
        self.plain, self.keep = plain, keep
        self.names, self.places = trained, [_places(module, local, whole) for local in trained]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `plain` with detached weights in place of the parameters, which are put back afterwards."""
        old: list[nn.Parameter | None] = []
        for name, places in zip(self.names, self.places, strict=True):
            p = places[0][0][places[0][1]]
            assert p is not None
            old.append(p)
            weight = p.detach()
            if self.keep is not None:
                self.keep(name, weight.requires_grad_())
            for parameters, local in places:
                parameters[local] = weight  # type: ignore[assignment]
        try:
            return self.plain(*args, **kwargs)
        finally:
            for places, p in zip(self.places, old, strict=True):
                for parameters, local in places:
                    parameters[local] = p


def _places(module: nn.Module, local: str, whole: bool) -> list[tuple[dict[str, nn.Parameter | None], str]]:
    """Places (the parameters of a module, name there) of a layer's weight: its own one first.

    There are others inside the layer only if its children are tapped with it (`whole`).
    """
    path, _, leaf = local.rpartition(".")
    own = (module.get_submodule(path) if path else module)._parameters
    found = [(own, leaf)]
    if not whole:
        return found
    p = user_names.parameter(module, local)
    for path, owner in module.named_modules():
        names = [key for key, own in owner._parameters.items() if own is p]
        found += [(owner._parameters, key) for key in names if (f"{path}.{key}" if path else key) != local]
    return found
