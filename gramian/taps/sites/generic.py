"""The generic site: exact per-sample gradients of any layer, by running it again one sample at a time (`torch.func`).

Used for direct parameters of modules with children, unknown layers, attention and recurrent layers. The layer's forward and
backward run once more per step (vectorised over samples if `vmap` can), and the outputs are compared with those of the first
run. They differ, and GramianError is raised, for a layer that mixes samples, has an unexpected batch axis, or draws random
numbers other than dropout's. Masks of dropout are those of the first run (`dropout_masks`); buffers and attributes that the
first run changes (vectors of spectral normalisation, the state of a recurrent layer) begin as they did.

Under FSDP2 the layer runs again on weights that are gathered for the backward anyway.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from gramian.core.errors import GramianError
from gramian.linalg.wide import wide
from gramian.taps.gradients import ExplicitGradient, PerSampleGradient
from gramian.taps.gradients.by_sample import gradients_by_sample
from gramian.taps.products.parts import owner
from gramian.taps.products.replay import matrix_sides
from gramian.taps.products.sides import LayerForm, Sides
from gramian.taps.products.weight_forms import forms_of
from gramian.taps.sites.batch_layout import COPIES, FIRST, SHARED, CallLayouts, Layout, merged, split
from gramian.taps.sites.borrowed import Borrowed, StateBefore, own_parameters
from gramian.taps.sites.dropout_masks import RecordedMasks, RepeatedMasks
from gramian.taps.sites.repeated_call import Call
from gramian.taps.sites.site import Site, SiteRun, observed
from gramian.taps.sites.weight_hooks import WithHookedWeights, weight_hooks

REPRODUCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""By dtype: largest relative difference between the outputs of two runs on the same samples that counts as rounding."""


class Generic(Site):
    """Site of a layer that gramian has no formula for: per-sample gradients by running the layer again for each sample."""

    kind = "generic"
    compiles = False

    def __init__(self, whole: bool) -> None:
        """Compute gradients of the parameters of the module and its children (`whole`), or of the module's direct ones only."""
        self.whole = whole

    def owned(self, module: nn.Module) -> tuple[str, ...]:
        """Names, inside the module, of the parameters whose gradients this site computes: all if `whole`, else direct ones."""
        return tuple(own_parameters(module, self.whole))

    def check(self, module: nn.Module) -> str | None:
        """Error text if FSDP2 shards a child module by itself: its weights are not gathered for a second run. Else None."""
        below = (name for name, child in module.named_modules() if name and isinstance(child, FSDPModule))
        unit = next(below, None)
        if unit is None:
            return None
        apart = "" if self.whole else "its own parameters in a module apart, or "
        return (
            f"has fully_shard units below it ({unit}) and cannot be run again sample by sample; expected {apart}no "
            "fully_shard below it"
        )

    def input_layouts(
        self, module: nn.Module, names: list[str], inputs: list[Tensor], rows: list[int], batch: int
    ) -> list[list[Layout]]:
        """Possible batch axes (layouts) of the inputs, most likely first; the first that reproduces the outputs is used.

        Args:
            module: the layer.
            names: names of the inputs: keywords, or positions as text.
            inputs: the tensors.
            rows: number of rows of each observed output.
            batch: number B of samples.

        Returns:
            One or more candidates, each a list with one layout for each input.
        """
        likely: list[Layout] = []
        for x in inputs:
            count = x.shape[0] if x.dim() else 0
            grouped = count and count in rows and count % batch == 0
            likely.append(FIRST if count == batch or grouped else SHARED)
        # a mask, where T happens to be B; the first input has samples
        square = [i > 0 and x.dim() == 2 and x.shape[0] == x.shape[1] for i, x in enumerate(inputs)]
        masked = [SHARED if s else layout for s, layout in zip(square, likely, strict=True)]
        return [likely, masked] if any(square) and masked != likely else [likely]

    def assumed(self, module: nn.Module, x: Tensor) -> Layout:
        """Batch axis of an input of which nothing is known."""
        return FIRST

    def output_layout(self, module: nn.Module, index: int, value: Tensor, batch: int) -> Layout:
        """Batch axis of output `index`, `value`: 0 for k·B rows; GramianError for other shapes."""
        rows = value.shape[0] if value.dim() else 0
        if rows and rows % batch == 0:
            return FIRST
        raise GramianError(f"has an output of shape {list(value.shape)}; expected the batch of {batch} as first axis")

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> SiteRun:
        """Run the layer; saves inputs, digests of observed outputs, buffers, dropout masks, and the `Call`, to run it again.

        Raises:
            GramianError: for a PackedSequence, an output without tensors, or weights of which this process has only a shard.
        """
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            raise GramianError("is given a PackedSequence, whose samples lie interleaved; expected a padded tensor")
        _refuse_parts(module)
        before = StateBefore(module, bool(weight_hooks(module)))
        output, masks = self.first_run(module, forward, args, kwargs)
        buffers = before.buffers()
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_shape)
        arguments = [str(i) for i, value in enumerate(args) for _ in pytree.tree_leaves(value, is_leaf=_is_shape)]
        arguments += [name for name, value in kwargs.items() for _ in pytree.tree_leaves(value, is_leaf=_is_shape)]
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        outputs = pytree.tree_leaves(output)
        seen = observed(outputs, withheld=hasattr(forward, "plain"))
        if not any(isinstance(y, Tensor) for y in outputs):
            raise GramianError(
                f"returns {type(output).__name__}; expected tensors, alone or in tuples, lists and dicts"
            )
        device = inputs[0].device.type if inputs else "cpu"
        call = Call(
            forward=getattr(forward, "plain", forward),
            leaves=[None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            places=[i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)],
            names=arguments,
            spec=spec,
            observed=seen,
            output_rows=[outputs[i].shape[0] if outputs[i].dim() else 0 for i in seen],
            autocast=(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)),
            buffers=list(buffers),
            attributes=before.attributes(),
        )
        saved = [x.detach().clone() for x in inputs]  # the user may change them in place
        return output, [*saved, *(_digest(outputs[i]) for i in seen), *buffers.values(), *masks], call

    def own_forward(self, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The layer's forward; if hooks compute weights of the layer before it, one that computes them itself."""
        hooks = weight_hooks(module)
        return WithHookedWeights(module, hooks, plain) if hooks else plain

    def arranged(
        self, saved: list[Tensor], output_gradients: list[Tensor], layouts: CallLayouts, batch: int, extra: Any
    ) -> tuple[list[Tensor], list[Tensor], Any]:
        """All as it is, and the layouts in the `Call`: the layer runs again on its own inputs."""
        return saved, output_gradients, replace(extra, layouts=layouts)

    def batch_axes(self, module: nn.Module, output: Tensor) -> int:
        """All axes but the last one of the output."""
        return max(1, output.dim() - 1)

    def first_run(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, list[Tensor]]:
        """The output of the layer, and the dropout masks that it drew. In evaluation mode nothing looks for dropout."""
        if not any(one.training for one in module.modules()):
            return forward(*args, **kwargs), []
        with RecordedMasks() as recorded:
            return forward(*args, **kwargs), recorded.masks

    def copied(self, saved: list[Tensor], extra: Any, batch: int) -> tuple[list[Tensor], Any]:
        """Inputs and digests as they are, and the `Call` with a mark that its outputs have no batch axis."""
        return saved, replace(extra, copies=True)

    def gradients(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        """Per-sample gradients of each trainable parameter: the layer runs again, with a vector-Jacobian product per sample.

        Raises:
            GramianError: if it cannot run sample by sample, or then has other outputs than in the first run.
        """
        trained = {name: p for name, p in own_parameters(module, self.whole).items() if p.requires_grad}
        if not batch or not any(g.numel() for g in output_gradients):  # a call without rows
            return {name: ExplicitGradient(p.new_zeros(batch, *p.shape)) for name, p in trained.items()}
        found, narrowest = self._run_again(module, saved, output_gradients, batch, extra, gradients_by_sample)
        return {name: ExplicitGradient(found[name].detach(), narrowest) for name in trained}

    def forms(self, module: nn.Module) -> dict[str, LayerForm]:
        """The matrices that the layer is taken to multiply by (`weight_forms`), which its first backward shows."""
        found: dict[str, LayerForm] = {}
        for name, p in own_parameters(module, self.whole).items():
            path, _, local = name.rpartition(".")
            prefix = f"{path}." if path else ""
            for key, form in forms_of(module.get_submodule(path), local, p).items():
                bias = None if form.bias is None else prefix + form.bias
                found[prefix + key] = replace(form, bias=bias)
        return found

    def matrix_sides(
        self, module: nn.Module, saved: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, Sides | str]:
        """Inputs and output gradients of each matrix by token: the layer runs again, and its products are recorded."""
        trained = {name for name, p in own_parameters(module, self.whole).items() if p.requires_grad}
        forms = {key: form for key, form in self.forms(module).items() if owner(key) in trained}
        if not batch or not forms:
            return {}
        found: dict[str, Sides | str]
        found, _ = self._run_again(module, saved, output_gradients, batch, extra, partial(matrix_sides, forms))
        return found

    def _run_again(
        self,
        module: nn.Module,
        saved: list[Tensor],
        output_gradients: list[Tensor],
        batch: int,
        extra: Any,
        how: Callable[..., tuple[Any, list[Tensor]]],
    ) -> tuple[Any, torch.dtype]:
        """(what `how` computes, the narrowest dtype of its tensors); `how`: `gradients_by_sample`, or one like it.

        Raises:
            GramianError: as `gradients`.
        """
        call: Call = extra
        _refuse_parts(module)
        ends = itertools.accumulate((0, len(call.places), len(call.observed), len(call.buffers)))
        inputs, digests, buffers = (saved[begin:end] for begin, end in itertools.pairwise(ends))
        masks = saved[len(inputs) + len(digests) + len(buffers) :]
        trained = {name: p.detach() for name, p in own_parameters(module, self.whole).items() if p.requires_grad}
        arguments = [call.names[i] for i in call.places]
        failure: GramianError | None = None
        candidates = self._candidates(module, call, arguments, inputs, batch)
        sized = call.of_one(batch)
        calls = [call, sized] if sized != call else [call]
        for one, layouts in itertools.product(calls, candidates):
            try:
                found = self._by_sample(
                    module, one, inputs, layouts, output_gradients, digests, buffers, masks, trained, batch, how
                )
            except GramianError as error:
                failure = failure or error
                continue
            dtypes = [t.dtype for t in (*inputs, *output_gradients, *trained.values()) if t.is_floating_point()]
            _, dtype, enabled = call.autocast
            narrowest = min([*dtypes, *([dtype] if enabled else [])], key=lambda dtype: dtype.itemsize)
            return found, narrowest
        assert failure is not None
        used = [i for i, g in enumerate(output_gradients) if bool(g.any())]
        if not 0 < len(used) < len(output_gradients):
            raise failure
        # outputs that the loss does not use may couple samples: logits between all of a batch, say
        fewer = replace(
            call, observed=[call.observed[i] for i in used], output_rows=[call.output_rows[i] for i in used]
        )
        left = [*inputs, *(digests[i] for i in used)]
        return self._run_again(module, left, [output_gradients[i] for i in used], batch, fewer, how)

    def _candidates(
        self, module: nn.Module, call: Call, arguments: list[str], inputs: list[Tensor], batch: int
    ) -> list[list[Layout]]:
        """Layouts of the inputs to try, in order: those that a row proof has found, and the site's own where it found none."""
        if call.copies:
            return [[SHARED] * len(inputs)]
        assumed = self.input_layouts(module, arguments, inputs, call.output_rows, batch)
        if call.layouts is None:
            return assumed
        proven = call.layouts.inputs
        return [
            [own or other for own, other in zip(proven, likely, strict=True)]
            for likely in (*assumed, _filled(inputs, call.layouts.output, batch))
        ]

    def _output_layout(self, module: nn.Module, call: Call, index: int, gradient: Tensor, batch: int) -> Layout:
        """Batch axis of observed output `index`: as a row proof has found, else as the site assumes."""
        if call.copies:
            return COPIES
        proven = None if call.layouts is None else call.layouts.outputs[call.observed[index]]
        return proven or self.output_layout(module, index, gradient, batch)

    def _by_sample(
        self,
        module: nn.Module,
        call: Call,
        inputs: list[Tensor],
        layouts: list[Layout],
        output_gradients: list[Tensor],
        digests: list[Tensor],
        buffers: list[Tensor],
        masks: list[Tensor],
        trained: dict[str, Tensor],
        batch: int,
        how: Callable[..., tuple[Any, list[Tensor]]],
    ) -> Any:
        """What `how` computes, sample by sample; GramianError if the outputs by samples differ from the first run's."""
        out_layouts = [self._output_layout(module, call, i, g, batch) for i, g in enumerate(output_gradients)]
        begin = dict(zip(call.buffers, buffers, strict=True))

        def run(parameters: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
            """Observed outputs of the layer for one sample, its number [1] last among the inputs, on these parameters."""
            *inputs, number = inputs
            repeated = RepeatedMasks(masks, number, batch) if masks else None
            with Borrowed(module, parameters, self.whole, begin, call.attributes), repeated or nullcontext():
                ys = call.again(inputs)
            if repeated is not None:
                repeated.refuse_unused()
            return ys

        split_inputs = [split(x, layout, batch) for x, layout in zip(inputs, layouts, strict=True)]
        split_gradients = [split(g, layout, batch) for g, layout in zip(output_gradients, out_layouts, strict=True)]
        dims = [None if layout.axis is None else 0 for layout in layouts]
        numbers_B1 = torch.arange(batch, device=output_gradients[0].device)[:, None]
        found, again = how(run, trained, [*split_inputs, numbers_B1], [*dims, 0], split_gradients)
        for digest, y, layout, rows in zip(digests, again, out_layouts, call.output_rows, strict=True):
            whole = merged(y, layout)
            whole = whole[:rows] if rows == 1 and not call.copies else whole
            _refuse_other_output(digest, _digest(whole), _narrowest(y.dtype, call))
        return found


def _filled(inputs: list[Tensor], likely: Layout, batch: int) -> list[Layout]:
    """For inputs whose content does not show where their samples lie (states that are all zero): the layout of the output.

    If an input does not fit it, its only axis of size B; without one it is one for all samples.
    """
    found = []
    for x in inputs:
        axes = [axis for axis, size in enumerate(x.shape) if size == batch]
        found.append(likely if likely.axis in axes else Layout(axes[0]) if len(axes) == 1 else SHARED)
    return found


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _digest(y: Tensor) -> Tensor:
    """Norm of a tensor and three fixed projections of it: [4] in float32 or float64, to compare two outputs."""
    flat = wide(y.detach()).flatten()
    place = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
    directions = torch.stack([torch.cos(place * frequency) for frequency in (0.37, 1.13, 2.71)])
    return torch.cat([torch.linalg.vector_norm(flat)[None], directions @ flat])


def _narrowest(dtype: torch.dtype, call: Call) -> torch.dtype:
    """The dtype with the coarsest rounding in a call: that of autocast where it is on, else `dtype`, that of the output."""
    _, cast, enabled = call.autocast
    return cast if enabled and torch.finfo(cast).eps > torch.finfo(dtype).eps else dtype


def _refuse_other_output(digest: Tensor, again: Tensor, dtype: torch.dtype) -> None:
    off = (digest - again).abs().max() > REPRODUCES[dtype] * digest[0] + torch.finfo(dtype).tiny
    if bool(off) and bool(digest.isfinite().all()):
        raise GramianError(
            "gives other outputs when its samples are run one by one (random numbers, except those of dropout that runs "
            "eagerly in training mode; mixing of samples; another batch axis?); expected a deterministic layer, its parameters "
            "in a module of their own, or a registered site (register_site)"
        )


def _refuse_parts(module: nn.Module) -> None:
    """Raise GramianError if this process now has only a shard of a weight, which FSDP2 has not gathered."""
    if any(hasattr(p, "placements") for p in module.parameters()):
        raise GramianError(
            "cannot be run again sample by sample on a part of its weights; expected fully_shard with units that return "
            "their tensors, alone or in tuples, lists and dicts, or a registered site (register_site)"
        )
