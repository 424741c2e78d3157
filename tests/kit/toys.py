"""Small models for tests: named parts, and a forward pass given as a function."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Toy(nn.Module):
    """A model of named parts whose forward pass is a function of the model and its inputs.

    Parts are layers, parameters, buffers or plain attributes; they are made, and found in the state dict, in the order given::

        Toy(lambda net, x: net.head(net.body(x).tanh()), body=nn.Linear(5, 4), head=nn.Linear(4, 3))
    """

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)
