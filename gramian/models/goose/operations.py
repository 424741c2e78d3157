"""Count the ternary, dense and elementwise multiplications of a Goose per token, from its config.

A product with an operand in {−1, 0, 1} needs no multiplication: an addition, a subtraction or nothing. Hardware for ternary
operands could save these multiplications; PyTorch's matrix products on a GPU or CPU do not.
"""

from dataclasses import dataclass

from gramian.models.goose.goose import GooseConfig


@dataclass(frozen=True)
class Operations:
    """Number of multiply-adds in the forward pass of one token, by operand type; can be added and multiplied by a count."""

    ternary: int
    """Multiply-adds in matrix products with a ternary operand."""
    dense: int
    """Multiply-adds in matrix products of real numbers."""
    elementwise: int
    """Multiplications outside matrix products, without those of norms, the sigmoid and the thresholds of the spikes."""

    @property
    def ternary_share(self) -> float:
        """Fraction of the multiply-adds in matrix products that have a ternary operand."""
        return self.ternary / (self.ternary + self.dense)

    def __add__(self, other: "Operations") -> "Operations":
        return Operations(self.ternary + other.ternary, self.dense + other.dense, self.elementwise + other.elementwise)

    def __mul__(self, count: int) -> "Operations":
        return Operations(self.ternary * count, self.dense * count, self.elementwise * count)


def layer_operations(config: GooseConfig) -> Operations:
    """Operations of one block per token: four D×D and two D×F matrix products (D width, F MLP width), and elementwise ones."""
    D, F = config.width, config.ffn * config.width
    matrices = 4 * D * D + 2 * D * F
    # Four mixes, k ⊙ v, d ⊙ S, the scale of the readout, the gate, the square; with spikes also
    # amplitude and size of all six outputs.
    elementwise = 4 * D + 4 * D + F
    if not config.spikes:
        return Operations(0, matrices, elementwise)
    return Operations(matrices, 0, elementwise + 2 * (5 * D + F))


def operations(config: GooseConfig) -> Operations:
    """Multiply-adds of a model per token: its blocks, and its head of width × vocabulary with real operands."""
    return layer_operations(config) * config.layers + Operations(0, config.width * config.vocabulary, 0)
