"""Dropout as a torch function mode sees it: every function of torch that drops values out, wherever a forward calls it.

A torch function mode is called before each function of torch. It is not called inside those that are written in C++ (attention,
recurrent layers), nor inside `F.multi_head_attention_forward`; so `DropoutMode` runs these in parts, and what drops values out
is left to the functions below. A subclass decides what becomes of them:

| function | result |
|---|---|
| `dropout` | y = x ⊙ m / (1 − p), m the mask of 0 and 1 |
| `feature_dropout` (`F.dropout1d` to `3d`) | the same, m one number for each sample and channel |
| `alpha_dropout`, `feature_alpha_dropout` | y = a·(x ⊙ m + α·(m − 1 + p)), which preserves mean and variance |
| `rrelu` | y = x where x ≥ 0, else r ⊙ x, r uniform |
| `_scaled_dot_product_attention_math` | dropout(softmax(s·q kᵀ + mask)) v, with the weights [.., T, S] in memory |
| `lstm`, `gru`, `rnn_tanh`, `rnn_relu` | dropout between layers, which run one by one |
"""

import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

DROPOUT = (
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
    torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_,
)  # fmt: skip
"""Functions (x, p, train) that drop values of x out with probability p; those whose name ends in _ write into x."""
RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
IN_PYTHON = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
    F.multi_head_attention_forward,
)  # fmt: skip
"""Functions that are written in Python and call those above; a mode sees them, and not what they call."""


class DropoutMode(TorchFunctionMode):
    """Torch function mode that passes every function with dropout to one of its methods."""

    def dropout(self, func: Any, x: Tensor, p: float) -> Tensor:
        """The result of `func`, one of `DROPOUT`, with probability 0 < p < 1 in training."""
        raise NotImplementedError

    def native_dropout(self, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """The result of `torch.native_dropout` with 0 < p < 1 in training: (x ⊙ m / (1 − p), m)."""
        raise NotImplementedError

    def rrelu(self, func: Any, x: Tensor, lower: float, upper: float) -> Tensor:
        """The result of `func`, `torch.rrelu` or `torch.rrelu_`, in training."""
        raise NotImplementedError

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """The result of `torch._scaled_dot_product_attention_math` with dropout p > 0: outputs, and weights after dropout."""
        raise NotImplementedError

    def rewritten(self, what: str) -> None:
        """Called before `what` (attention with dropout, say) is computed by other operations than outside of the mode."""

    @property
    def off(self) -> bool:
        """True inside `WithoutDropout`: nothing is dropped out."""
        return any(isinstance(mode, WithoutDropout) for mode in _get_current_function_mode_stack())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        run = _FUNCTIONS.get(func)
        if run is None or torch.compiler.is_compiling():  # a graph draws its own masks
            return func(*args, **(kwargs or {}))
        return run(self, func, *args, **(kwargs or {}))


class WithoutDropout(DropoutMode):
    """Torch function mode in which nothing is dropped out; it prevails over modes that are entered inside it."""

    @property
    def off(self) -> bool:
        """True: nothing is dropped out."""
        return True

    def rrelu(self, func: Any, x: Tensor, lower: float, upper: float) -> Tensor:
        """The function itself: it drops nothing out."""
        result: Tensor = func(x, lower, upper, True)
        return result


def _dropout(mode: DropoutMode, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    if not train or not 0 < p < 1 or mode.off:  # at p = 1 all is 0, and nothing is drawn
        result: Tensor = func(input, p, bool(train) and not mode.off)
        return result
    if func == torch.dropout and input.is_cuda:  # it is this function there
        return mode.native_dropout(input, p)[0]
    return mode.dropout(func, input, p)


def _native_dropout(mode: DropoutMode, func: Any, input: Tensor, p: float, train: bool | None) -> Any:
    if train is False or not 0 < p < 1 or mode.off:
        return func(input, p, train is not False and not mode.off)
    return mode.native_dropout(input, p)


def _rrelu(
    mode: DropoutMode,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Tensor:
    if not training or generator is not None:
        result: Tensor = func(input, lower, upper, training, generator)
        return result
    mode.rewritten("rrelu")
    return mode.rrelu(func, input, lower, upper)


def _attention(
    mode: DropoutMode,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if not dropout_p or mode.off:
        result: Tensor = func(query, key, value, attn_mask, 0.0, is_causal, **options)
        return result
    if query.is_cuda:
        mode.rewritten("attention with dropout")
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        narrow = torch.get_autocast_dtype(device)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype)
    with torch.autocast(device, enabled=False):
        return mode.attention(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]


def _written_out_attention(
    mode: DropoutMode,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    if not dropout_p or dropout_mask is not None or mode.off:
        p = 0.0 if mode.off else dropout_p
        return func(query, key, value, attn_mask, p, is_causal, dropout_mask, **options)
    return mode.attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _recurrent(mode: DropoutMode, func: Any, *args: Any) -> Any:
    """A recurrent layer with dropout between its layers, which run one by one; `func` itself if nothing is dropped out.

    Of a `PackedSequence` it is `func` itself, too: rows of samples lie interleaved.
    """
    x, states, weights, has_biases, layers, p, train, bidirectional, batch_first = args
    if isinstance(weights, Tensor) or not p or not train or layers == 1:
        return func(*args)
    if mode.off:
        return func(*args[:5], 0.0, *args[6:])
    mode.rewritten("a recurrent layer with dropout")
    single = isinstance(states, Tensor)
    if x.is_cuda and not has_biases:
        weights, has_biases = with_zero_biases(weights, layers * (1 + bidirectional)), True
    directions, each, finals = 1 + bidirectional, len(weights) // layers, []
    for layer in range(layers):
        if layer:  # in the layout in which torch does it
            x = x.transpose(0, 1) if batch_first else x
            x = _dropout(mode, torch.dropout, x, p, True)
            x = x.transpose(0, 1) if batch_first else x
        own = [t[layer * directions : (layer + 1) * directions] for t in ([states] if single else states)]
        of_layer = weights[layer * each : (layer + 1) * each]
        begin = own[0] if single else own
        x, *final = func(x, begin, of_layer, has_biases, 1, 0.0, train, bidirectional, batch_first)
        finals.append(final)
    return x, *(torch.cat(parts) for parts in zip(*finals, strict=True))


def with_zero_biases(weights: Sequence[Tensor], stacks: int) -> list[Tensor]:
    """The weights of a recurrent layer without biases as torch orders those of one with biases, which are zeros.

    Each of the `stacks` (layers times directions) has w_ih [G·H, I], w_hh [G·H, H or P], b_ih [G·H], b_hh [G·H] and, with
    projections, w_hr [P, H] at the end. On a part of the weights of a bidirectional layer without biases cuDNN was
    seen to compute other numbers.
    """
    each, found = len(weights) // stacks, list[Tensor]()
    for i in range(0, len(weights), each):
        zeros = weights[i].new_zeros(2, len(weights[i]))
        found += [*weights[i : i + 2], *zeros, *weights[i + 2 : i + each]]
    return found


def _inside(mode: DropoutMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return python_body(func)(*args, **kwargs)


@cache
def python_body(func: types.FunctionType) -> Callable[..., Any]:
    """A function of `torch.nn.functional` as it is written, without the question at its beginning whether a mode wants it."""
    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    names = func.__globals__ | dict.fromkeys(asks, lambda *_: False)
    body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _table(functions: Sequence[Any], run: Any) -> dict[Any, Any]:
    return dict.fromkeys(functions, run)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **_table(DROPOUT, _dropout),
    **_table(RECURRENT, _recurrent),
    **_table(IN_PYTHON, _inside),
    **_table((torch.rrelu, torch.rrelu_), _rrelu),
    torch.native_dropout: _native_dropout,
    torch._scaled_dot_product_attention_math: _written_out_attention,
    F.scaled_dot_product_attention: _attention,
}
"""{function of torch: what runs in its place inside a `DropoutMode`}."""
