"""Test properties of a language model on a few tokens: its output head, that it is causal, and the width of its layers.

Legend: B = 1 row, P = 4 tokens, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.distill.loss.head import Head
from gramian.distill.teacher.language_model import hidden_of, is_native, linear_of, text_config
from gramian.models.token_sampling import evaluation_mode
from gramian.taps.model.run_eagerly import run_eagerly

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Fields of Hugging Face configs by which logits are multiplied or divided."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields of Hugging Face configs that set a soft cap c of logits, c · tanh(logit / c)."""
FAR = 60.0
"""Size of the large logits that the test of a head also uses: a soft cap only shows on large ones."""
PROOF_TOKENS = 4
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""{dtype: tolerated error of logits relative to the largest one} in the test of a head."""


def head_of(model: nn.Module) -> Head:
    """The output head of a model, tested. Cost: three forwards of 4 tokens, the same on every process of a sharded model.

    Scale and soft cap of the logits are read from the config, and accepted only if `Head.logits` of the final hidden state is
    equal to the model's own logits, once as they are and once with hidden states so large that a cap would show. The head
    shares the model's weight and requires no gradient.

    Raises:
        GramianError: if the model's logits are not those of such a head; the message names its class.
    """
    linear = linear_of(model)
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if isinstance(weight, DTensor):
        raise GramianError("teacher: the weight of its head is sharded; expected shard_teacher, which keeps it whole")
    refused = GramianError(
        f"teacher: the head of {type(model).__name__} is not understood: its logits are not those of a linear map with a "
        "scale and a soft cap that its config names; expected another teacher"
    )
    with _proof(model):
        tokens_BP = _proof_tokens(model)
        hidden_BPD = hidden_of(model, tokens_BP)[0].to(weight.dtype)
        if hidden_BPD.shape[-1] != weight.shape[1]:
            raise refused
        far = FAR / max(float((hidden_BPD @ weight.T).abs().max()), 1e-6)
        own = {gain: _own_logits(model, linear, tokens_BP, gain) for gain in (1.0, far)}
        if not all(bool(logits_BPV.isfinite().all()) for logits_BPV in own.values()):
            raise GramianError(f"teacher: logits of {type(model).__name__} are not finite; expected weights that are")
        for scale, softcap in _candidates(model):
            head = Head(weight, bias, scale, softcap)
            if all(_same(head.logits(hidden_BPD * gain), logits_BPV) for gain, logits_BPV in own.items()):
                return head
    raise refused


def stream_width(model: nn.Module, layers: Sequence[int]) -> int:
    """Number of channels of the residual stream at the given layers, which can differ from the width of the head.

    Raises `GramianError` if the layers differ in width. Cost: a forward of 4 tokens.
    """
    with _proof(model):
        _, streams = hidden_of(model, _proof_tokens(model), None, layers)
    widths = {layer: int(stream.shape[-1]) for layer, stream in streams.items()}
    if len(set(widths.values())) > 1:
        raise GramianError(f"layers: their widths differ in {type(model).__name__}: {widths}; expected the same width")
    return next(iter(widths.values()))


def check_causal(model: nn.Module) -> None:
    """Raise a GramianError if a model sees later tokens, so its predictions cannot teach a student.

    Cost: two forwards of 4 tokens.
    """
    with _proof(model):
        tokens_BP = _proof_tokens(model)
        other_BP = tokens_BP.clone()
        other_BP[:, -1] = (other_BP[:, -1] + 1) % linear_of(model).weight.shape[0]
        one, other = (hidden_of(model, tokens)[0][:, :-1] for tokens in (tokens_BP, other_BP))
    if one.numel() and not _same(one, other):
        raise GramianError(
            f"teacher: {type(model).__name__} sees tokens that come later; expected a causal language model"
        )


def _candidates(model: nn.Module) -> Iterator[tuple[float, float | None]]:
    """Pairs (scale, softcap) that a model's config may mean: model families divide or multiply by fields of the same name."""
    config = None if is_native(model) else text_config(model)
    named = [float(value) for name in SCALES if isinstance(value := getattr(config, name, None), int | float)]
    caps = [float(value) for name in SOFTCAPS if (value := getattr(config, name, None))]
    for scale in dict.fromkeys([*(s for value in named if value for s in (value, 1.0 / value)), 1.0]):
        for softcap in [*caps, None]:
            yield scale, softcap


def _own_logits(model: nn.Module, linear: nn.Linear, tokens_BP: Tensor, gain: float) -> Tensor:
    """The logits that the model itself computes, with the inputs of its head multiplied by `gain`."""
    hook = linear.register_forward_pre_hook(lambda _, inputs: (inputs[0] * gain, *inputs[1:]))
    try:
        found = model(tokens_BP) if is_native(model) else model(input_ids=tokens_BP, use_cache=False)
    finally:
        hook.remove()
    logits_BPV: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits_BPV


def _same(logits: Tensor, own: Tensor) -> bool:
    tolerance = TOLERANCES.get(own.dtype, 1e-4) if own.dtype == logits.dtype else TOLERANCES[logits.dtype]
    return bool((logits.double() - own.double()).abs().max() <= tolerance * own.double().abs().max())


def _proof_tokens(model: nn.Module) -> Tensor:
    weight = linear_of(model).weight
    context = getattr(getattr(model, "config", None), "context", PROOF_TOKENS)
    count = min(PROOF_TOKENS, int(context))
    return (torch.arange(1, count + 1, device=weight.device) % weight.shape[0]).unsqueeze(0)


@contextmanager
def _proof(model: nn.Module) -> Iterator[None]:
    """Context manager for a test forward: without dropout, gradients and autocast; the model's training mode is restored.

    A compiled model runs eagerly: compiling for 4 tokens takes time, and would make the next shape a dynamic one.
    """
    kind = linear_of(model).weight.device.type
    with evaluation_mode(model), run_eagerly(), torch.autocast(kind, enabled=False):
        yield
