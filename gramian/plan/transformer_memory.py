"""Bytes that training a transformer takes on one device, from shapes alone.

With P parameters, w bytes of a stored number (8 in fp64, else 4: bf16 and fp16 are float32 weights under autocast) and e of a
computed one (bf16 and fp16: 2, else w):

| part | bytes |
|---|---|
| weights, gradients | P·w each |
| optimizer | AdamW 2·P·w; SGD P·w with momentum, else 0 |
| casts | autocast's copies of matrices, kept from their forward to their backward: e per element |

What a micro-batch of B windows of T tokens keeps for the backward, per token; D width, A width of all queries, K of all keys, F
hidden width of the MLP, H heads, L blocks, V vocabulary:

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

Attention without a fused kernel (float64 on a GPU, dropout on a CPU) keeps its probabilities in place of log-sum-exp, in at
least 4 bytes: H·T of them, 3·H·T with dropout. On top comes what lives for a moment: the gradient of the logits, twice while it
is formed (2·w·V); or, when the loss is gone, what a block's backward holds beyond what it has freed: e·(F + D).

With activations recomputed in segments of k blocks, the inputs of the ⌈L/k⌉ segments are kept (w·D each), and the k blocks of
one at a time. At its peak a step holds weights, optimizer and activations, and gradients grow as activations go; all are added
up here, so the sum is above the truth by at most the gradients. Norm weights, biases and token ids are left out.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

Kind = Literal["bf16", "fp16", "fp32", "fp64"]
STORED: dict[Kind, int] = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
COMPUTED: dict[Kind, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder-only transformer."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    hidden: int
    """Hidden width of the MLP."""
    positions: int = 0
    """Rows of a learned position table."""
    family: Literal["gpt", "llama"] = "gpt"
    """"gpt": layer norms, biases, one matrix for queries, keys and values, GELU; "llama": RMS norms, three, gated MLP."""
    key_heads: int | None = None
    """Number of heads of keys and values; None: as many as of queries."""
    head_width: int | None = None
    """None: width / heads."""
    head_norms: bool = False
    """Whether queries and keys are normalised, head by head."""
    tied: bool = False
    dropout: float = 0.0
    gelu_tensors: int = 2
    """What the MLP of "gpt" keeps, in tensors of its hidden width: 2, or 5 where GELU is written out."""
    whole_segments: bool = True
    """False: activations can be recomputed block by block alone."""
    counted: int | None = None
    """Parameters, where they were counted; None: from the formula, exact for the reference GPT and for Llama."""
    parameter_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of all parameters, in the model's order, shared ones once."""
    kept: float | None = None
    """What a block keeps for the backward, in stored numbers per token and width, where it was counted; None: by the table."""

    @property
    def queries(self) -> int:
        """Width of all of them."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Width of all of them."""
        return self.queries * (self.key_heads or self.heads) // self.heads

    @property
    def block_matrices(self) -> int:
        """Elements of a block's matrices."""
        attention = self.width * (2 * self.queries + 2 * self.keys)
        return attention + (3 if self.family == "llama" else 2) * self.width * self.hidden

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one block."""
        if self.family == "llama":
            heads = 2 * self.queries // self.heads if self.head_norms else 0
            return self.block_matrices + 2 * self.width + heads
        biases = self.queries + 2 * self.keys + 2 * self.width + self.hidden
        return self.block_matrices + biases + 4 * self.width

    @property
    def rest_parameters(self) -> int:
        """Outside blocks: tables, last norm, head."""
        if self.counted is not None:
            return max(self.counted - self.layers * self.block_parameters, 0)
        tables = self.vocabulary * (1 if self.tied else 2) + self.positions
        return self.width * (tables + (1 if self.family == "llama" else 2))

    @property
    def parameters(self) -> int:
        """All of them, shared ones once."""
        return self.layers * self.block_parameters + self.rest_parameters


def gpt(
    vocabulary: int, context: int, layers: int, width: int, heads: int, tied: bool = False, dropout: float = 0.0
) -> Transformer:
    """The shape of the reference GPT."""
    D, F = width, 4 * width
    norm = ((D,), (D,))
    block = (*norm, (3 * D, D), (3 * D,), (D, D), (D,), *norm, (F, D), (F,), (D, F), (D,))
    shapes = ((vocabulary, D), (context, D), *(layers * block), *norm, *(((vocabulary, D),) * (not tied)))
    return Transformer(
        layers, width, heads, vocabulary, F, context, tied=tied, dropout=dropout, parameter_shapes=shapes
    )


def optimizer_states(optimizer: str, momentum: float) -> int:
    """Numbers that an optimizer keeps per parameter: AdamW two, SGD one with momentum."""
    return 2 if optimizer == "adamw" else int(momentum > 0)


@dataclass(frozen=True)
class TeacherShape:
    """A model that is only asked: weights, and one forward at a time."""

    shape: Transformer
    itemsize: int = 2

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return self.shape.parameters * self.itemsize

    @property
    def gathered(self) -> int:
        """Bytes of what is whole at a time where it is sharded: what lies outside blocks, one block, and the next one."""
        return (self.shape.rest_parameters + 2 * self.shape.block_parameters) * self.itemsize

    def working(self, tokens: int) -> int:
        """Bytes of a forward over so many tokens, logits among them."""
        shape = self.shape
        return tokens * self.itemsize * (2 * shape.hidden + 4 * shape.width + shape.vocabulary)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch's forward and backward."""

    kept: int
    """For the backward: of all blocks, or of the inputs of recomputed segments."""
    casts: int
    """Bytes of autocast's copies of weights."""
    loss: int
    """Last norm, head and log-probabilities."""
    working: int
    """What lives for a moment: the gradient of the logits; or a recomputed segment and its gradients, less the loss."""

    @property
    def total(self) -> int:
        """Bytes of activations at the peak of a step."""
        return self.kept + self.casts + self.loss + self.working


@dataclass(frozen=True)
class Needs:
    """The model of a run and how it is trained: all that its memory depends on."""

    shape: Transformer
    precision: Kind
    length: int
    """Tokens of a window."""
    batch: int
    """Windows of an optimizer step, over all processes."""
    micro_batch: int = 0
    """Most windows of one backward on a process; 0: as many as there are."""
    checkpoint_blocks: int = 0
    """Blocks of a recomputed segment; 0: activations are kept."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: bool = False
    """True for SGD with momentum."""
    isolated: bool = False
    """Whether a mask [B, T, T] keeps documents apart."""
    device: Literal["cuda", "cpu"] = "cuda"
    teacher: TeacherShape | None = None
    proof: bool = False
    """Whether a row proof runs before the first step."""

    @property
    def stored(self) -> int:
        """Bytes of a weight."""
        return STORED[self.precision]

    @property
    def computed(self) -> int:
        """Bytes of a result of a matrix product."""
        return COMPUTED[self.precision]

    @property
    def states(self) -> int:
        """Numbers that the optimizer keeps per parameter."""
        return optimizer_states(self.optimizer, self.momentum)

    @property
    def weights(self) -> int:
        """Bytes; those of gradients are the same."""
        return self.shape.parameters * self.stored

    def windows(self, processes: int) -> int:
        """Number of windows of one backward pass on one process."""
        share = ceil(self.batch / processes)
        return min(self.micro_batch, share) if self.micro_batch else share

    def block(self, windows: int) -> int:
        """Bytes that one block keeps of a micro-batch."""
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
        """Bytes of a micro-batch of so many windows."""
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
        """Bytes per token of queries, keys, values and what a kernel keeps beside its output."""
        shape, e = self.shape, self.computed
        if self.device == "cuda" and self.precision == "fp64" or self.device == "cpu" and shape.dropout:
            probabilities = shape.heads * self.length * (3 if shape.dropout else 1)
            return max(e, 4) * (shape.queries + 2 * shape.keys + probabilities)
        mask = self.length if self.isolated else 0
        return e * (shape.queries + 2 * shape.keys + mask) + self.stored * shape.heads
