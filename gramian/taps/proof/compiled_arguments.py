"""Pass the arguments of a compiled forward through its graph to the row proof, which runs the eager module on them.

A graph can pass only tensors, numbers and constant text to an operator. So the nested arguments are written as a text with a
placeholder for each tensor and number, and as lists of tensors, integers and reals in the order of the text.
"""

import ast
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Written:
    """Tensors, integers and reals of some arguments, in the order of their placeholders in the text that `write` returns."""

    tensors: list[Tensor] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    reals: list[float] = field(default_factory=list)

    def write(self, value: Any) -> str:
        """Return a value as text and append its tensors and numbers to the lists; "?" marks what a graph cannot pass."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return "'t'"
        if value is None or isinstance(value, bool):
            return str(value)
        if isinstance(value, int):
            self.integers.append(value)
            return "'i'"
        if isinstance(value, float):
            self.reals.append(value)
            return "'f'"
        if isinstance(value, str):
            return "('s', " + repr(value) + ")"
        if type(value) not in (dict, tuple, list):  # of a class of its own another program may run
            return "'?'"
        if isinstance(value, dict):
            return "{" + "".join([repr(key) + ": " + self.write(item) + ", " for key, item in value.items()]) + "}"
        if isinstance(value, tuple):
            return "('t', " + "".join([self.write(item) + ", " for item in value]) + ")"
        return "[" + "".join([self.write(item) + ", " for item in value]) + "]"


def read(text: str, tensors: Sequence[Tensor], integers: Sequence[int], reals: Sequence[float]) -> Any:
    """Rebuild the arguments from the text and lists of `Written`; ValueError if one could not be passed."""
    return _read(ast.literal_eval(text), {"t": iter(tensors), "i": iter(integers), "f": iter(reals)})


def _read(value: Any, lists: dict[str, Iterator[Any]]) -> Any:
    if isinstance(value, str):
        if value == "?":
            raise ValueError("an argument that a graph cannot pass")
        return next(lists[value])
    if isinstance(value, dict):
        return {key: _read(item, lists) for key, item in value.items()}
    if isinstance(value, list):
        return [_read(item, lists) for item in value]
    if isinstance(value, tuple):
        return value[1] if value[0] == "s" else tuple(_read(item, lists) for item in value[1:])
    return value


def apart_from_the_graph(function: Callable[[], None]) -> None:
    """Run `function` outside the compiled graph that is running: in another thread, where autograd records as usual.

    The thread has the caller's autocast state, device and stream; an error in it is raised here.
    """
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    failures: list[BaseException] = []

    def run() -> None:
        try:
            if stream is not None:
                torch.cuda.set_device(stream.device)
                torch.cuda.set_stream(stream)
            for kind, enabled, dtype in autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
