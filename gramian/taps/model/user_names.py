"""Names of modules and parameters as in the user's own model, without DDP, torch.compile and checkpoint wrappers."""

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gramian.core.errors import GramianError

WRAPPED_CHILD = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""{wrapper class: attribute that has the user's module}; the attribute is left out of every name."""


def inner_module(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper (DDP, torch.compile, checkpoint), or None if the module is not a wrapper.

    Raises:
        GramianError: for nn.DataParallel, FSDP1, and DDP with static_graph=True, which gramian does not work with.
    """
    if isinstance(module, DataParallel):
        raise GramianError(
            "model: nn.DataParallel runs copies of the model; expected DistributedDataParallel or fully_shard"
        )
    if type(module).__name__ == "FullyShardedDataParallel":
        raise GramianError("model: FullyShardedDataParallel (FSDP1) is not supported; expected fully_shard (FSDP2)")
    if isinstance(module, DistributedDataParallel) and getattr(module, "static_graph", False):
        raise GramianError(
            "model: DistributedDataParallel(static_graph=True) is not supported; expected static_graph=False"
        )
    for base in type(module).__mro__:  # fully_shard puts a class of its own in front
        if base.__name__ in WRAPPED_CHILD:
            return module._modules[WRAPPED_CHILD[base.__name__]]
    return None


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside any number of nested wrappers; GramianError for one that gramian does not work with."""
    while (inner := inner_module(model)) is not None:
        model = inner
    return model


def is_compiled(module: nn.Module) -> bool:
    """True for `torch.compile(module)` and after `module.compile()`."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def named_modules(root: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name in the user's model, module) for every module once, parents first; wrappers are left out.

    Names begin with `prefix`. Modules whose `id` is in `seen` are skipped; it receives the ids of those yielded.
    """
    seen = set() if seen is None else seen
    waiting = [(prefix, root)]
    while waiting:
        name, module = waiting.pop()
        module = unwrap(module)
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module
            children = [(join(name, local), child) for local, child in module._modules.items() if child is not None]
            waiting += reversed(children)


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name in the user's model, parameter) for every place of a parameter; a tied one has several."""
    for name, module in named_modules(root):
        for local, p in module._parameters.items():
            if p is not None:
                yield join(name, local), p


def parameter(module: nn.Module, local: str) -> nn.Parameter:
    """The parameter of this name inside the module ("child.weight"), or the tensor now in its place (gathered or detached).

    Raises:
        GramianError: if it was removed since the layers of the model were found.
    """
    owner, _, leaf = local.rpartition(".")
    found = (module.get_submodule(owner) if owner else module)._parameters.get(leaf)
    if found is None:
        raise GramianError(
            f"{type(module).__name__} has no parameter {local!r} in its forward (other code parametrizes or removes it there); "
            "expected the same parameters as before the capture, or a registered site for the module that does it"
        )
    return found


def join(module_name: str, local: str) -> str:
    """Full name "module.local" of a parameter, or the local name if the module is the root."""
    return f"{module_name}.{local}" if module_name else local
