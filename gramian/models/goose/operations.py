"""How many multiplications of a Goose are ternary: counted from the shape, per token.

A product with an operand in {−1, 0, 1} needs no multiplication: an addition, a subtraction or nothing. These are counts of what
hardware for ternary operands could save. PyTorch's matrix products do not: on a GPU or CPU the spikes save no time.
"""

from dataclasses import dataclass

from gramian.models.goose.goose import GooseConfig


@dataclass(frozen=True)
class Operations:
    """Multiply-adds of one token's forward."""

    ternary: int
    """In matrix products with a ternary operand."""
    dense: int
    """In matrix products of real numbers."""
    elementwise: int
    """Multiplications outside matrix products, without what is inside norms, the sigmoid and the spikes' own thresholds."""

    @property
    def ternary_share(self) -> float:
        """Of all multiply-adds in matrix products."""
        return self.ternary / (self.ternary + self.dense)

    def __add__(self, other: "Operations") -> "Operations":
        return Operations(self.ternary + other.ternary, self.dense + other.dense, self.elementwise + other.elementwise)

    def __mul__(self, count: int) -> "Operations":
        return Operations(self.ternary * count, self.dense * count, self.elementwise * count)


def layer_operations(config: GooseConfig) -> Operations:
    """Of one block: W_k, W_v, W_r, W_o are D×D, W_1 and W_2 are D×F; a spike stands in front of each."""
    D, F = config.width, config.ffn * config.width
    matrices = 4 * D * D + 2 * D * F
    # Four mixes, k ⊙ v, d ⊙ S, the readout's loudness, the gate, the square; with spikes
    # amplitude and size of all six outputs.
    elementwise = 4 * D + 4 * D + F
    if not config.spikes:
        return Operations(0, matrices, elementwise)
    return Operations(matrices, 0, elementwise + 2 * (5 * D + F))


def operations(config: GooseConfig) -> Operations:
    """Of the whole model: its blocks and the head, D×V, which reads real numbers. The embedding is a lookup."""
    return layer_operations(config) * config.layers + Operations(0, config.width * config.vocabulary, 0)
