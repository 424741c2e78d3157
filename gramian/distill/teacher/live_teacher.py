"""A teacher model that runs beside the student: frozen, without gradients, and on a GPU one batch ahead.

Legend: B windows, T tokens, D width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gramian.core.errors import GramianError
from gramian.distill.teacher.head_proof import check_causal, head_of, stream_width
from gramian.distill.teacher.language_model import body_of, check_layers, hidden_of, is_native, linear_of, teacher_hash
from gramian.distill.teacher.signal import DenseSignal, tensors_of
from gramian.parallel.wrap_data_parallel import blocks_of


class LiveTeacher:
    """A frozen model that computes the teacher's signal (hidden states and head) of each batch.

    The model is put into eval mode, without gradients or activation checkpointing. Forwards run under `torch.no_grad`, and
    outside any inference mode, so autograd can save their results. An autocast around a call has no effect: only the argument
    `autocast` counts. Hidden states have the dtype of the head's weight. Cost of a call: a forward without the head.

    Args:
        model: GPT, Goose or a Hugging Face causal language model; if `shard_teacher` sharded it, all processes call together.
        layers: layers of the residual stream that the signal includes; 0 is the embedding, l is after transformer block l.
        device: where the model is moved to; None: it stays where it is.
        autocast: the dtype of matrix products; None: that of the weights.
        compile: compile the forward by torch.compile, for one shape of batches.

    Raises:
        GramianError: if the model's logits are not those of a linear head, a layer does not exist, predictions depend on later
            tokens, or weights were made in inference mode.

    Example:
        >>> teacher = LiveTeacher(GPT(GPTConfig(vocabulary=257, context=32, layers=2, width=32, heads=2)))  # doctest: +SKIP
        >>> teacher({"tokens": torch.randint(257, (2, 32))}).hidden_BTD.shape  # doctest: +SKIP
        torch.Size([2, 32, 32])
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[int] = (),
        *,
        device: torch.device | str | None = None,
        autocast: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        self.sharded = any(isinstance(p, DTensor) for p in model.parameters())
        self.model = _frozen(model if device is None or self.sharded else model.to(device))
        self.layers, self.autocast = tuple(layers), autocast
        check_layers(model, self.layers)
        self.head = head_of(model)
        check_causal(model)
        self.layer_width = stream_width(model, self.layers) if layers else int(self.head.weight_VD.shape[1])
        """Number of channels of the residual stream at `layers`."""
        self.device = self.head.weight_VD.device
        self._hidden_of = torch.compile(hidden_of, dynamic=False) if compile else hidden_of
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._ahead: _Ahead | None = None
        self._hash: str | None = None

    @property
    def vocabulary(self) -> int:
        """Number of ids that the head has logits for; more than the tokenizer's if the head is padded."""
        return self.head.weight_VD.shape[0]

    @property
    def hash(self) -> str:
        """Hash of the model's class, config and weights, computed once. Collective if the model is sharded."""
        if self._hash is None:
            self._hash = teacher_hash(self.model)
        return self._hash

    def __call__(self, batch: Mapping[str, Tensor]) -> DenseSignal:
        """The teacher's signal of a micro-batch, which has "tokens" [B, T] and maybe "documents" [B, T].

        If `upcoming` started the forward for the same tensor of tokens, its result is returned; the device waits for it, and
        the host does not.
        """
        ahead = self._ahead
        if ahead is None or ahead.tokens is not batch["tokens"]:
            return self._forward(batch)
        self._ahead = None
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ahead.ready)
        for tensor in tensors_of(ahead.signal):
            tensor.record_stream(current)  # allocated on the side stream, used on this one
        return ahead.signal

    def upcoming(self, batch: Mapping[str, Tensor]) -> None:
        """Start the teacher's forward of the next batch on a CUDA stream of its own; a call with that batch returns its result.

        The forward waits for work queued before, which may produce the tokens, and overlaps with work queued later. Its result
        occupies memory until that call, or until another batch is started. On a CPU this does nothing.
        """
        if self._side is None:
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            signal = self._forward(batch)
            ready = self._side.record_event()
        for name in ("tokens", "documents"):
            if name in batch and batch[name].is_cuda:
                batch[name].record_stream(self._side)
        self._ahead = _Ahead(batch["tokens"], signal, ready)

    def close(self) -> None:
        """Do nothing: a live teacher has no files to close, unlike a `Cache`, which is used in its place."""

    def _forward(self, batch: Mapping[str, Tensor]) -> DenseSignal:
        if self.model.training:  # a module that contains it was put into training mode
            self.model.eval()
        tokens_BT = batch["tokens"].to(self.device, non_blocking=True)
        documents_BT = batch["documents"].to(self.device, non_blocking=True) if "documents" in batch else None
        kind, enabled = self.device.type, self.autocast is not None
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, dtype=self.autocast, enabled=enabled):
            hidden_BTD, streams = self._hidden_of(self.model, tokens_BT, documents_BT, self.layers)
            return DenseSignal(hidden_BTD.to(self.head.weight_VD.dtype), self.head, streams)


class _Ahead(NamedTuple):
    tokens: Tensor
    signal: DenseSignal
    ready: torch.cuda.Event


def shard_teacher(model: nn.Module) -> nn.Module:
    """Shard a teacher's weights over all processes by FSDP2, in place; returns the model.

    Every transformer block is gathered separately, all other weights together. The head's weight, with an embedding tied to it,
    is replicated: the loss reads all of it in every micro-batch, long after the forward. That costs V·D numbers per process,
    and no communication.

    Args:
        model: GPT, Goose or a Hugging Face causal language model, not sharded yet, with the same weights on every process.

    Raises:
        GramianError: if the model is sharded already.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise GramianError("teacher: is sharded already; expected a whole model")
    replicated = set(linear_of(model).parameters())
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=True)
    # The root is the module that `hidden_of` calls: only the root's own forward gathers the root's weights.
    root = model if is_native(model) else body_of(model)
    fully_shard(root, reshard_after_forward=True, ignored_params=replicated)
    if is_native(model):
        register_fsdp_forward_method(model, "hidden")
    return model


def _frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise GramianError(
                f"teacher: {name} was made in inference mode, and nothing can learn from it; expected torch.no_grad"
            )
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    if hasattr(model, "checkpoint_blocks"):
        model.checkpoint_blocks = 0  # type: ignore[assignment]
    return model.eval().requires_grad_(False)
