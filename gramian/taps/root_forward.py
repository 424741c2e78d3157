"""One forward of the root module: read the batch size, open a pass, and run the row proof before gradients are used.

The row proof checks that each row depends on its own sample alone. In eager mode `RootForward.run` runs it around the forward.
A compiled root calls the operator `gramian::begin`, which proves the eager module on the graph's arguments. An FSDP2 root is
proven by a hook before FSDP2's own, because a proof runs entire forwards with all hooks, on all processes or on none.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from gramian.core.errors import GramianError
from gramian.taps.layer_forward import gathers_in_order, run_untapped
from gramian.taps.model import user_names
from gramian.taps.model.batch_free import refuse_escaped
from gramian.taps.model.empty_batches import apart, with_a_row, without_a_row
from gramian.taps.passes import in_backward
from gramian.taps.proof.compiled_arguments import Written, apart_from_the_graph, read
from gramian.taps.proof.model_outputs import output_tensors
from gramian.taps.proof.row_proof import RowProof
from gramian.taps.sites.site import first_tensor
from gramian.taps.tap import Tap, next_key
from gramian.taps.tapped_model import TappedModel, TapUse

SAME_VALUES = ("View", "Reshape", "Alias", "ToCopy", "Squeeze", "Redistribute", "ToTorchTensor", "FromTorchTensor")
"""Parts of names of autograd nodes whose output has the same values as their input."""
_roots: "weakref.WeakValueDictionary[int, RootForward]" = weakref.WeakValueDictionary()


class RootForward:
    """Runs forwards of a tapped model's root, each as one pass (forward and backward), after the row proof if one is due."""

    def __init__(self, model: TappedModel, proof: RowProof) -> None:
        """Store model and row proof, and register this object under a number by which compiled graphs find it."""
        self._model, self._proof = model, proof
        number = next_key()
        self._key = torch.tensor(number)
        _roots[number] = self
        self._hook: RemovableHandle | None = None

    def install_hook(self, root: nn.Module) -> None:
        """Install a pre-hook that runs the row proof on forwards of an FSDP2 root before FSDP2 gathers its weights."""
        self._hook = root.register_forward_pre_hook(ShardedRootHook(self), prepend=True, with_kwargs=True)

    def remove_hook(self) -> None:
        """Undo `install_hook`, if it was called."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Read the batch size from the root's arguments, or from `batch_size` of a listener, and open a pass for the forward.

        Raises:
            GramianError: if no batch size was given and no tensor argument has a first axis.
        """
        model = self._model
        given = model.batch_size
        first = first_tensor(args, kwargs) if given is None else torch.empty(given, 0)
        if torch.compiler.is_compiling():
            model.batch = first.shape[0]
            written = Written()
            text = written.write((tuple(args), kwargs))
            tensors, integers, reals = written.tensors, written.integers, written.reals
            model.ticket = torch.ops.gramian.begin(self._key, first, text, tensors, integers, reals)
        elif not in_backward():  # else it is a checkpoint's second run of the forward
            if first.dim() == 0:
                raise GramianError(
                    "model: its first tensor has no axes; expected the batch as first axis, or batch_size="
                )
            if model.proof_run is None:
                with nullcontext() if model.lockstep.alone else model.refusals.held():
                    model.on_inputs((args, kwargs))
            model.blank = model.rule.withholds and not first.shape[0] and given is None
            first = with_a_row(first) if model.blank else first
            model.batch = first.shape[0]
            model.ticket = torch.tensor([model.open_pass(first)])

    def run(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the root's own forward (`plain`) as one pass and return its output (eager mode); runs the row proof if needed.

        No proof runs on fewer than two samples, inside another proof or a backward, or if the model `trusts_shapes`.

        Raises:
            GramianError: if the proof fails, or the model was sharded inside a capture.
        """
        # dynamo calls this where it gave up on the root's frame, and would go on to compile the code of the proof
        eager = RootForward._run if "torch._dynamo" not in sys.modules else _uncompiled()
        if not self._model.live or self._model.proof_run is not None:
            return eager(self, tap, module, plain, args, kwargs)
        with self._model.refusals.told():
            return eager(self, tap, module, plain, args, kwargs)

    def _run(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forward = partial(self._forward, tap, module, plain)
        model, batch = self._model, self._samples_of(args, kwargs)
        if model.proof_run is not None or in_backward():
            return forward(args, kwargs)
        sharded = isinstance(module, FSDPModule)
        if not sharded:
            self._meet()
        if not sharded or model.trusts_shapes:
            self._require_same_inputs(args, kwargs)
        if model.units_in(batch) < 2 or model.trusts_shapes:
            model.layouts = {}
            return forward(args, kwargs)
        if sharded:
            self._refuse_sharded_in_capture()
        return self._proof.guard(forward, args, kwargs, batch, proven_before=sharded)

    def before_sharded(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Run the row proof on a forward of an FSDP2 root before its weights are gathered, if any process needs one.

        Every process calls this for every forward; one that needs no proof makes as many runs, because each gathers weights.

        Raises:
            GramianError: on every process, if the proof fails on one.
        """
        model = self._model
        listens = model.live and model.proof_run is None and model.weights is None
        if not listens or in_backward() or module is not model.root():
            return
        self._meet()
        if torch.is_grad_enabled() and not model.trusts_shapes:
            with model.refusals.told():
                self._require_same_inputs(args, kwargs)
                self._proof.together(lambda a, k: module(*a, **k), args, kwargs, self._samples_of(args, kwargs))

    def _meet(self) -> None:
        """Before a forward in which processes need each other: all raise what one of them refused since their last meeting."""
        if self._model.refusals.in_backward:
            self._model.refusals.meet("a forward")

    def begin_compiled(self, first: Tensor, read_arguments: Callable[[], Any]) -> int:
        """Run the row proof on the eager module before a compiled forward, open a pass, and return its number.

        `first` is the root's first tensor [B, …]; `read_arguments()` returns the forward's (args, kwargs).

        Raises:
            GramianError: if the proof fails, or arguments cannot be passed through a graph.
        """
        self._model.layouts = {}
        if self._model.live and self._model.units_in(first.shape[0]) > 1:
            with self._model.refusals.told():
                self._prove_compiled(first.shape[0], read_arguments)
        number = self._model.open_pass(first)
        self._model.passes.get(number).compiled = True
        return number

    def _prove_compiled(self, batch: int, read_arguments: Callable[[], Any]) -> None:
        root = self._model.root_module
        if isinstance(
            root, FSDPModule
        ):  # proven by all processes before it began; its calls are checked as they report
            self._refuse_sharded_in_capture()
            return
        try:
            args, kwargs = read_arguments()
        except ValueError:
            raise GramianError(
                "model: is compiled and gets an argument that no graph can pass to the row proof; expected tensors, numbers, "
                "strings and None in tuples, lists and dicts"
            ) from None
        tap = next(tap for tap in self._model.taps if tap.is_root)
        forward = partial(self._forward, tap, root, partial(type(root).forward, root))
        apart_from_the_graph(partial(self._proof.before_compiled, forward, args, kwargs, batch))

    def _forward(self, tap: Tap, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        model = self._model
        if not model.live:
            return run_untapped(model, tap, module, plain, args, kwargs)
        self.enter(args, kwargs)
        if model.blank:
            args, kwargs = with_a_row((args, kwargs))
        output = plain(*args, **kwargs) if tap.site is None else tap.run(model, tap, module, plain, args, kwargs)
        if model.batch_free:
            refuse_escaped(output, user_names.named_modules(module))
        self._leave(output)
        if model.tensor_parallel is not None and model.rule.withholds and model.proof_run is None:
            for y in output_tensors(output):
                model.tensor_parallel.note_gradient(y)
        if model.blank:
            return without_a_row(output)
        return apart(output) if gathers_in_order(model, tap, module) else output

    def _leave(self, output: Any) -> None:
        """Store which layer made the output; while parameters are unaudited, let audits watch layers that did not run, too."""
        model = self._model
        model.output_layer = _maker(output)
        if model.passes.current is None:
            return
        model.passes.current.returned = not torch.compiler.is_compiling()
        if model.passes.current.first:
            for tap in model.taps:
                model.watch(tap)

    def _require_same_inputs(self, args: Any, kwargs: Any) -> None:
        if self._model.live and self._model.tensor_parallel is not None:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._model.tensor_parallel.require_same_inputs(tensors)

    def _samples_of(self, args: Any, kwargs: Any) -> int:
        if self._model.batch_size is not None:
            return self._model.batch_size
        first = first_tensor(args, kwargs)
        if first.is_nested:
            raise GramianError("model: its first tensor is nested; expected a padded tensor")
        return first.shape[0] if first.dim() else 0

    def _refuse_sharded_in_capture(self) -> None:
        if self._hook is None and not self._model.trusts_shapes:
            raise GramianError(
                "model: was sharded inside a capture, where it cannot be proven whose row is which; expected fully_shard "
                'before the capture is entered, or proof="off"'
            )


@functools.cache
def _uncompiled() -> Callable[..., Any]:
    run: Callable[..., Any] = torch.compiler.disable(RootForward._run, reason="dynamo gave up on the root")
    return run


class ShardedRootHook:
    """A forward pre-hook before FSDP2's own that runs the row proof; in copies and pickles of a module it does nothing."""

    def __init__(self, forward: RootForward | None) -> None:
        """Store a weak reference to the `RootForward` to call; None: the hook does nothing."""
        self._forward: Any = (lambda: None) if forward is None else weakref.ref(forward)
        reason = "a sharded model is proven eagerly"
        self._run = self._begin if forward is None else torch.compiler.disable(self._begin, reason=reason)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Run the row proof before a forward of the root; a compiled root breaks its graph here, as for FSDP2's own hooks."""
        self._run(module, args, kwargs)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        forward = self._forward()
        if forward is not None:
            forward.before_sharded(module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> "ShardedRootHook":
        """Return a hook that does nothing."""
        return ShardedRootHook(None)

    def __reduce__(self) -> Any:
        """Pickle as a hook that does nothing."""
        return (ShardedRootHook, (None,))


@torch.library.custom_op("gramian::begin", mutates_args=())
def _begin(
    root: Tensor, first: Tensor, text: str, tensors: list[Tensor], integers: list[int], reals: list[float]
) -> Tensor:
    """Operator that a compiled root calls first: run the row proof, open a pass and return its number, [1], for the backward.

    `root` is the number of the `RootForward`, `first` the root's first tensor; the others are its arguments as `Written`.
    """
    read_arguments = partial(read, text, tensors, integers, reals)
    return torch.tensor([_roots[int(root)].begin_compiled(first, read_arguments)])


@_begin.register_fake
def _(root: Tensor, first: Tensor, text: str, tensors: list[Tensor], integers: list[int], reals: list[float]) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


def _maker(output: Any) -> str | None:
    """Name of the tapped layer whose result, up to views and casts, is `output.logits` or else the first tensor; else None."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    logits = getattr(output, "logits", tensors[0] if tensors else None)
    node = logits.grad_fn if isinstance(logits, Tensor) else None
    while node is not None:
        use = getattr(node, "use", None)
        if isinstance(use, TapUse) and use.tap.is_root and use.tap.site is not None and use.tap.site.kind == "generic":
            # a root with parameters of its own is seen behind its last layer
            node = node.next_functions[1][0] if len(node.next_functions) > 1 else None
            continue
        if isinstance(use, TapUse):
            return use.tap.name
        if not any(kind in node.name() for kind in SAME_VALUES):
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None
