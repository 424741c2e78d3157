"""Bytes that training a transformer takes on one device, from shapes alone.

With P parameters, w bytes of a stored number (8 in fp64, else 4: bf16 and fp16 are float32 weights under autocast) and e of a
computed one (bf16 and fp16: 2, else w):

| part | bytes |
|---|---|
| weights, gradients | P·w each |
| optimizer | AdamW 2·P·w; K-FAC w less for each entry of a whitened matrix; SGD P·w with momentum, else 0 |
| noise | of private training with noise = "bandmf": (bands - 1)·P·w, else 0 |
| casts | autocast's copies of matrices, kept from their forward to their backward: e per element |

What a micro-batch of B windows (sequences) of T tokens stores for the backward, per token; D width, A width of all queries, K
of all keys, F hidden width of the MLP, H heads, L transformer blocks, V vocabulary:

| part | GPT family | Llama family |
|---|---|---|
| a block's two norms | 2·w·D + 4·w | 4·w·D + 2·w |
| norms of queries and keys, where there are | (w + e)·(A + K) | the same |
| inputs of its matrices | e·2·D, A more for the last | the same; under autocast one cast per matrix: e·5·D |
| queries, keys, values, log-sum-exp | e·(A + 2·K) + w·H; e·T more for a mask that keeps documents apart | the same |
| MLP | e·2·F (5 where GELU is written out) | e·4·F |
| dropout | masks: 2·D, and D once | the same |
| last norm and head | w·D + 2·w + e·D | 2·w·D + w + e·D |
| loss | log-probabilities: w·V | the same |

Attention without a fused kernel (float64 on a GPU, dropout on a CPU) stores its probabilities in place of log-sum-exp, in at
least 4 bytes: H·T of them, 3·H·T with dropout. Temporary tensors are added: the gradient of the logits, twice while it is
formed (2·w·V); or, when the loss has been freed, what a block's backward needs beyond what it has freed: e·(F + D).

With activations recomputed in segments of k blocks, the inputs of the ⌈L/k⌉ segments are stored (w·D each), and the activations
of the k blocks of one segment at a time. At its peak a step needs weights, optimizer state and activations, and gradients grow
while activations are freed; all are added up here, so the sum is above the truth by at most the gradients. Norm weights, biases
and token ids are left out.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

Kind = Literal["bf16", "fp16", "fp32", "fp64"]
STORED: dict[Kind, int] = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
COMPUTED: dict[Kind, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder-only transformer: all that its parameter count and activation bytes depend on."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    hidden: int
    """Hidden width of the MLP."""
    positions: int = 0
    """Number of rows of a learned position table; 0: none."""
    family: Literal["gpt", "llama"] = "gpt"
    """"gpt": layer norms, biases, one matrix for Q, K and V, GELU; "llama": RMS norms, three such matrices, gated MLP."""
    key_heads: int | None = None
    """Number of heads of keys and values; None: as many as of queries."""
    head_width: int | None = None
    """Features of one attention head; None: width / heads."""
    head_norms: bool = False
    """True if queries and keys are normalised, head by head."""
    tied: bool = False
    dropout: float = 0.0
    gelu_tensors: int = 2
    """Number of tensors of the hidden width that the MLP of "gpt" stores for the backward: 2, or 5 where GELU is written out.
    """
    whole_segments: bool = True
    """True if activations can be recomputed in segments of several blocks; False: only block by block."""
    counted: int | None = None
    """Number of parameters, if it was counted on the model; None: by formula, exact for the reference GPT and for Llama."""
    parameter_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of all parameters, in the model's order, shared ones once."""
    kept: float | None = None
    """Numbers that a block stores for the backward, per token and feature, if measured; None: by the module's table."""

    @property
    def queries(self) -> int:
        """Total width of the queries of all heads."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Total width of the keys of all key heads."""
        return self.queries * (self.key_heads or self.heads) // self.heads

    @property
    def block_matrices(self) -> int:
        """Number of elements of one transformer block's weight matrices."""
        attention = self.width * (2 * self.queries + 2 * self.keys)
        return attention + (3 if self.family == "llama" else 2) * self.width * self.hidden

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one transformer block."""
        if self.family == "llama":
            heads = 2 * self.queries // self.heads if self.head_norms else 0
            return self.block_matrices + 2 * self.width + heads
        biases = self.queries + 2 * self.keys + 2 * self.width + self.hidden
        return self.block_matrices + biases + 4 * self.width

    @property
    def rest_parameters(self) -> int:
        """Number of parameters outside the transformer blocks: embedding tables, last norm and head."""
        if self.counted is not None:
            return max(self.counted - self.layers * self.block_parameters, 0)
        tables = self.vocabulary * (1 if self.tied else 2) + self.positions
        return self.width * (tables + (1 if self.family == "llama" else 2))

    @property
    def parameters(self) -> int:
        """Number of all parameters; a tied one counts once."""
        return self.layers * self.block_parameters + self.rest_parameters


def gpt(
    vocabulary: int, context: int, layers: int, width: int, heads: int, tied: bool = False, dropout: float = 0.0
) -> Transformer:
    """The shape of gramian's reference GPT: layer norms, biases, `context` learned positions, MLP of four times the width."""
    D, F = width, 4 * width
    norm = ((D,), (D,))
    block = (*norm, (3 * D, D), (3 * D,), (D, D), (D,), *norm, (F, D), (F,), (D, F), (D,))
    shapes = ((vocabulary, D), (context, D), *(layers * block), *norm, *(((vocabulary, D),) * (not tied)))
    return Transformer(
        layers, width, heads, vocabulary, F, context, tied=tied, dropout=dropout, parameter_shapes=shapes
    )


def optimizer_states(optimizer: str, momentum: float) -> int:
    """Numbers that an optimizer stores per parameter: 2 for AdamW, at most 2 for K-FAC, 1 for SGD with momentum, else 0."""
    return 2 if optimizer in ("adamw", "kfac") else int(momentum > 0)


@dataclass(frozen=True)
class TeacherShape:
    """A model that only runs forwards, one at a time (the teacher of a distillation): its shape, and bytes per weight."""

    shape: Transformer
    itemsize: int = 2

    @property
    def weights(self) -> int:
        """Bytes of the teacher's weights."""
        return self.shape.parameters * self.itemsize

    @property
    def gathered(self) -> int:
        """Bytes of a sharded teacher that are gathered at a time: all outside its transformer blocks, and two blocks."""
        return (self.shape.rest_parameters + 2 * self.shape.block_parameters) * self.itemsize

    def working(self, tokens: int) -> int:
        """Bytes of the teacher's forward over `tokens` tokens, including the logits."""
        shape = self.shape
        return tokens * self.itemsize * (2 * shape.hidden + 4 * shape.width + shape.vocabulary)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch's forward and backward."""

    kept: int
    """Bytes stored for the backward: the activations of all blocks, or the inputs of the recomputed segments."""
    casts: int
    """Bytes of autocast's copies of weights."""
    loss: int
    """Bytes of last norm, head and log-probabilities."""
    working: int
    """Largest temporary bytes: the gradient of the logits; or a recomputed segment and its gradients, minus the freed loss."""

    @property
    def total(self) -> int:
        """Bytes of all activations and casts at the peak of a step."""
        return self.kept + self.casts + self.loss + self.working


@dataclass(frozen=True)
class Needs:
    """The model of a run and how it is trained: all that its memory depends on."""

    shape: Transformer
    precision: Kind
    length: int
    """Number of tokens of a window (one training sequence)."""
    batch: int
    """Number of windows of an optimizer step, over all processes."""
    micro_batch: int = 0
    """Largest number of windows of one backward pass on a process; 0: all windows of the process."""
    checkpoint_blocks: int = 0
    """Number of transformer blocks of a segment whose activations are recomputed; 0: activations are stored."""
    optimizer: Literal["adamw", "sgd", "kfac"] = "adamw"
    momentum: bool = False
    """True for SGD with momentum."""
    whitened: int = 0
    """Number of parameters that have one number of optimizer state and not two: weight matrices that K-FAC whitens."""
    noise_buffers: int = 0
    """Number of buffers of correlated noise, each with one number per parameter."""
    isolated: bool = False
    """True if a mask [B, T, T] hides the packed documents of a window from each other."""
    device: Literal["cuda", "cpu"] = "cuda"
    teacher: TeacherShape | None = None
    proof: bool = False
    """True if a row proof (each row of a layer's tensors must depend on one sample only) runs before the first step."""

    @property
    def stored(self) -> int:
        """Bytes of one stored weight."""
        return STORED[self.precision]

    @property
    def computed(self) -> int:
        """Bytes of one entry of a matrix product's result."""
        return COMPUTED[self.precision]

    @property
    def states(self) -> int:
        """Number of values that the optimizer stores per parameter."""
        return optimizer_states(self.optimizer, self.momentum)

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state, its operators left out."""
        return (self.states * self.shape.parameters - self.whitened) * self.stored

    @property
    def noise(self) -> int:
        """Bytes of the buffers of correlated noise."""
        return self.noise_buffers * self.shape.parameters * self.stored

    @property
    def weights(self) -> int:
        """Bytes of the weights; gradients take as many."""
        return self.shape.parameters * self.stored

    def windows(self, processes: int) -> int:
        """Number of windows (sequences) of one backward pass on each of `processes` processes."""
        share = ceil(self.batch / processes)
        return min(self.micro_batch, share) if self.micro_batch else share

    def block(self, windows: int) -> int:
        """Bytes that one transformer block stores for the backward, for a micro-batch of `windows` windows (sequences)."""
        shape, w, e = self.shape, self.stored, self.computed
        if shape.kept is not None:
            return int(windows * self.length * w * shape.width * shape.kept)
        llama = shape.family == "llama"
        norms = (4 * shape.width + 2) * w if llama else (2 * shape.width + 4) * w
        inputs = (5 if llama and e < w else 2) * shape.width + shape.queries
        if shape.head_norms:
            norms += (w + e) * (shape.queries + shape.keys)
        hidden = (4 if llama else shape.gelu_tensors) * shape.hidden
        masks = (1 if self.device == "cuda" else e) * 2 * shape.width if shape.dropout else 0
        return windows * self.length * (norms + e * (inputs + hidden) + masks + self._attention)

    def activations(self, windows: int) -> Activations:
        """Bytes of the activations of a micro-batch of `windows` windows (sequences), by part."""
        shape, w, e, tokens = self.shape, self.stored, self.computed, windows * self.length
        llama = shape.family == "llama"
        layers, segment = shape.layers, min(self.checkpoint_blocks, shape.layers)
        kept = tokens * w * shape.width * ceil(layers / segment) if segment else layers * self.block(windows)
        if shape.dropout:
            kept += tokens * shape.width * (1 if self.device == "cuda" else w)
        if self.isolated:
            kept += tokens * self.length
        cast = e if e < w else 0
        casts = cast * (shape.vocabulary * shape.width + (0 if segment else layers) * shape.block_matrices)
        last = (2 * shape.width + 1) * w if llama else (shape.width + 2) * w
        loss = tokens * (last + e * shape.width + w * shape.vocabulary)
        backward = tokens * e * (shape.hidden + shape.width)
        again = segment * (self.block(windows) + cast * shape.block_matrices)
        return Activations(kept, casts, loss, max(2 * tokens * w * shape.vocabulary, again + backward - loss))

    @property
    def _attention(self) -> int:
        """Bytes per token of queries, keys, values, and of what the attention kernel stores beside its output."""
        shape, e = self.shape, self.computed
        if self.device == "cuda" and self.precision == "fp64" or self.device == "cpu" and shape.dropout:
            probabilities = shape.heads * self.length * (3 if shape.dropout else 1)
            return max(e, 4) * (shape.queries + 2 * shape.keys + probabilities)
        mask = self.length if self.isolated else 0
        return e * (shape.queries + 2 * shape.keys + mask) + self.stored * shape.heads
