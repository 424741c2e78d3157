"""Matrices that nothing multiplies: positions that are added, parameters that a weight is computed from.

Their block is that of a table whose rows every sample looks up once; the reference is the loop of single samples.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.curvature.blocks.consistency import agree
from gramian.oracles import dense_kfac, single_sample
from gramian.taps.products.replay import BOTH_WAYS, NO_PRODUCT, OTHERWISE
from tests.curvature.problems import assert_close, classes, cross_entropy, kfac, normal, seeded
from tests.kit.matrix import some
from tests.kit.refusals import refusal

pytestmark = pytest.mark.oracle
B, V = 4, 5


class Positions(nn.Module):
    """Positions of a vision transformer, and those of two layers in one parameter, stretched to the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later = nn.Parameter(torch.zeros(1, 6, 24)), nn.Parameter(torch.zeros(2, 1, 6, 24))
        self.inner = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        later = F.interpolate(self.later.flatten(0, 1).mT[..., :4], size=6, mode="linear").mT
        return self.inner(torch.tanh(x + self.first) + later[0]) + later[1]


class Standardised(nn.Conv2d):
    """A convolution by a weight of zero mean and unit variance in every output."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.weight.mean((1, 2, 3), keepdim=True), self.weight.var((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) * (variance + 1e-5).rsqrt(), self.bias)


def sequence(layer: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(width, V))


def hooked() -> nn.Module:
    with pytest.warns(FutureWarning):
        return sequence(nn.utils.weight_norm(nn.Linear(140, 6)), 6)


normed = nn.utils.parametrizations.weight_norm
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, tuple[int, int]]]] = {
    "positions": (
        lambda: nn.Sequential(Positions(), nn.Flatten(), nn.Linear(144, V)), normal(B, 6, 24),
        {"0.first": (6, 24), "0.later": (12, 24)},
    ),
    "standardised": (lambda: sequence(Standardised(16, 3, 3), 12), normal(B, 16, 4, 4), {"0.weight": (3, 144)}),
    "weight norm": (
        lambda: sequence(normed(nn.Linear(140, 6)), 6), normal(B, 140), {"0.parametrizations.weight.original1": (6, 140)}
    ),
    "weight norm of a transposed convolution": (
        lambda: sequence(normed(nn.ConvTranspose1d(3, 30, 5)), 210), normal(B, 3, 3),
        {"0.parametrizations.weight.original1": (90, 5)},
    ),
    "hooked weight norm": (hooked, normal(B, 140), {"0.weight_v": (6, 140)}),
}  # fmt: skip
"""{case: (model, inputs, {parameter: its rows and columns})}."""


def captured(name: str, **options: object) -> tuple[nn.Module, gramian.KFACNaturalGradient]:
    build, x, _ = CASES[name]
    model, found = seeded(build), kfac(**options)
    with found.capture(model, loss_reduction="sum", num_terms=B):
        cross_entropy(model, x, classes(V, B)).backward()
    return model, found


def samples(name: str) -> dict[str, Tensor]:
    """{parameter: Y [B, r, c]} from a loop over samples."""
    build, x, sizes = CASES[name]
    model, y, found = seeded(build), classes(V, B), {p: [] for p in sizes}
    for b in range(B):
        model.zero_grad()
        cross_entropy(model, x[b : b + 1], y[b : b + 1]).backward()
        for p, size in sizes.items():
            found[p].append(model.get_parameter(p).grad.reshape(size).clone())
    return {p: torch.stack(each) for p, each in found.items()}


@pytest.mark.parametrize("name", some(CASES, 0))
def test_factors_are_those_of_the_rows_of_every_sample(name: str) -> None:
    model, found = captured(name, strict=True, kfac_policy="small_only")
    for p, y_BRC in samples(name).items():
        block = found.kfac_factors[p if p != "0.weight" else "0"]
        rows, columns = y_BRC.shape[1:]
        assert (block.spec.kind, block.spec.inputs, block.spec.outputs) == ("kronecker", rows, columns)
        G = torch.einsum("brc,brd->cd", y_BRC, y_BRC) / B
        assert_close(block.A.to_dense(), torch.eye(rows).double() / rows, 1e-9, p)
        assert_close(block.G.to_dense(), G, 1e-9, p)
        assert float(block.A.trace() * block.G.trace()) == pytest.approx(float(y_BRC.square().sum() / B))
        assert found.coverage[p].algorithm.startswith("K-FAC of the rows of")
        assert "does not multiply by it" in found.coverage[p].algorithm
    v = {p: normal(*q.shape, seed=3) for p, q in model.named_parameters()}
    product, natural = found.compute_fisher_vector_product(v), found.compute_natural_gradient(model)
    for p, y_BRC in samples(name).items():
        G = torch.einsum("brc,brd->cd", y_BRC, y_BRC) / B
        rows = y_BRC.shape[1]
        assert_close(product[p], (v[p].reshape(y_BRC.shape[1:]) @ G / rows).reshape(v[p].shape), 1e-9, p)
        g_CR = model.get_parameter(p).grad.reshape(y_BRC.shape[1:]).mT
        want = dense_kfac.natural(torch.eye(rows).double() / rows, G, g_CR, -1.0, "pi", 0.03, max_condition=1e6)
        assert_close(natural[p], want.mT.reshape(natural[p].shape), 1e-8, p)


@pytest.mark.parametrize("passes", [1, 2])
def test_eigenvalues_are_second_moments_of_samples_in_the_basis_of_rows(passes: int) -> None:
    model, found = captured("positions", ekfac=True, damping_mode="joint", kfac_policy="small_only")
    x = CASES["positions"][1]
    if passes == 2:
        with found.capture(model, loss_reduction="sum", num_terms=B, correct=False, force=True):
            cross_entropy(model, x, classes(V, B)).backward()
        with found.correct(model, loss_reduction="sum", num_terms=B):
            cross_entropy(model, x, classes(V, B)).backward()
    y_BRC = samples("positions")["0.first"]
    v = normal(1, 6, 24, seed=2)
    _, Q = torch.linalg.eigh(found.kfac_factors["0.first"].G.to_dense())
    values_RC = (y_BRC @ Q).square().sum(0) / B
    want = ((v[0] @ Q) * values_RC) @ Q.mT
    assert_close(found.compute_fisher_vector_product({"0.first": v})["0.first"][0], want, 1e-8)


def test_a_second_refresh_and_a_saved_state_go_on_with_rows() -> None:
    model, found = captured("positions")
    again = kfac()
    again.load_state_dict(found.state_dict())
    x = CASES["positions"][1]
    for one in (found, again):
        with one.capture(model, loss_reduction="sum", num_terms=B):
            cross_entropy(model, x, classes(V, B)).backward()
        assert one.kfac_factors["0.later"].spec.by_rows
        assert_close(one.kfac_factors["0.later"].G.to_dense(), found.kfac_factors["0.later"].G.to_dense(), 1e-12)


def test_an_exact_head_whose_weight_is_computed_is_refused() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(7, 140), nn.Tanh(), normed(nn.Linear(140, V))))
    found = kfac(kfac_true_fisher_head=True)
    with refusal("head: '2' does not multiply by its weight"), found.capture(model, num_terms=B, head="2"):
        F.cross_entropy(model(normal(B, 7)), classes(V, B)).backward()


@pytest.mark.parametrize(
    "seen, want",
    [
        ((NO_PRODUCT, NO_PRODUCT), NO_PRODUCT), (("out_in", NO_PRODUCT), OTHERWISE), ((NO_PRODUCT, "out_in"), OTHERWISE),
        (("out_in", "in_out"), BOTH_WAYS), ((NO_PRODUCT, BOTH_WAYS), OTHERWISE), (("out_in",), "out_in"),
    ],
)  # fmt: skip
def test_processes_that_saw_different_uses_have_a_diagonal(seen: tuple[str, ...], want: str) -> None:
    same = dict.fromkeys(("model", "options", "seed", "step", "estimate", "head", "free"))
    whole = {**same, "padded": {}, "problem": "", "terms": 1.0, "samples": 1, "passes": 1}
    found = agree([{**whole, "observed": {"w": one}} for one in seen]).observed["w"]
    assert found == want


class Twice(nn.Module):
    """Multiplies by a matrix in one call, and adds it in the next; the order of their gradients is the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(130, 131))

    def forward(self, x: Tensor, adds: bool) -> Tensor:
        return x + self.w[: x.shape[1]] if adds else F.linear(x, self.w)


class Both(nn.Module):
    def __init__(self, adds_last: bool) -> None:
        super().__init__()
        self.twice, self.back, self.head, self.adds_last = Twice(), nn.Linear(130, 131), nn.Linear(131, V), adds_last

    def forward(self, x: Tensor) -> Tensor:
        h = self.back(torch.tanh(self.twice(x if self.adds_last else self.twice(x, True), False)))
        return self.head(torch.tanh(self.twice(h, True) if self.adds_last else h).sum(1))


@pytest.mark.parametrize("adds_last", [True, False])
def test_a_matrix_that_is_added_and_multiplied_has_all_of_its_gradients_in_one_sum(adds_last: bool) -> None:
    """Each call by itself if the first that is seen is no product, else the exact diagonal."""
    model, found = seeded(lambda: Both(adds_last)), kfac(kfac_policy="small_only")
    x, y = normal(B, 3, 131), classes(V, B)
    with found.capture(model, loss_reduction="sum", num_terms=B):
        cross_entropy(model, x, y).backward()
    block = found.kfac_factors["twice.w"]
    want = (single_sample.per_sample_gradients(model, cross_entropy, (x, y))["twice.w"]).square().sum(0) / B
    if adds_last:
        assert block.spec.by_rows and block.spec.shapes == ((130, 131),)
    else:
        assert block.spec.kind == "diagonal" and OTHERWISE in found.coverage["twice.w"].algorithm
        ones = {"twice.w": torch.ones_like(want)}
        assert_close(found.compute_fisher_vector_product(ones)["twice.w"], want, 1e-9)


class Learned(nn.Embedding):
    """Positions of the tokens of its input, one row for all samples, or as many as there are tokens."""

    def __init__(self, rows: bool) -> None:
        super().__init__(9, 24)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(2, 2 + x.shape[1])
        return super().forward(index[None] if self.rows else index)


class Sum(nn.Module):
    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.words, self.positions, self.out = nn.Embedding(13, 24), Learned(rows), nn.Linear(24, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(x) + self.positions(x)))


@pytest.mark.parametrize("rows", [True, False], ids=["one row for all samples", "no batch axis"])
def test_a_table_of_positions_without_a_batch_axis_has_factors_of_every_sample(rows: bool) -> None:
    model, found, x, y = seeded(lambda: Sum(rows)), kfac(kfac_policy="small_only"), classes(13, B, 6), classes(V, B, 6)
    for _ in range(2):
        with found.capture(model, loss_reduction="sum", num_terms=y.numel(), force=True):
            cross_entropy(model, x, y).backward()
    y_BRC = single_sample.per_sample_gradients(model, cross_entropy, (x, y))["positions.weight"]
    block = found.kfac_factors["positions"]
    counts = torch.tensor([0.0] * 2 + [1.0] * 6 + [0.0]).double() / 6
    assert_close(block.A.to_dense(), torch.diag(counts), 1e-9)
    assert_close(block.G.to_dense(), torch.einsum("brc,brd->cd", y_BRC, y_BRC) / y.numel(), 1e-9)


class Depths(nn.Module):
    """Positions of every layer of a model, here of one: the first axis is that of layers, not of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, 1, 6, 24))

    def forward(self) -> Tensor:
        return torch.tanh(self.table)


class OfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depths, self.inner, self.out = Depths(), nn.Linear(24, 24), nn.Linear(24, V)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.depths()
        for layer in range(len(positions[:1])):
            x = self.inner(torch.tanh(x + positions[layer]))
        return self.out(x.sum(1))


def test_one_row_that_is_not_of_samples_has_a_copy_for_each() -> None:
    model, found, x, y = seeded(OfLayers), kfac(kfac_policy="small_only"), normal(B, 6, 24), classes(V, B)
    with found.capture(model, loss_reduction="sum", num_terms=B):
        cross_entropy(model, x, y).backward()
    y_BRC = single_sample.per_sample_gradients(model, cross_entropy, (x, y))["depths.table"].reshape(B, 6, 24)
    G = torch.einsum("brc,brd->cd", y_BRC, y_BRC) / B
    assert_close(found.kfac_factors["depths.table"].G.to_dense(), G, 1e-9)


class TwoOutputs(nn.Module):
    """Logits of each sample, and similarities between all, scaled by a parameter of the root (as CLIP's)."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.out, self.scale = Learned(True), nn.Linear(24, V), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + self.positions(x)).sum(1)
        return self.out(h) * self.scale.exp(), h @ h.mT * self.scale


def test_an_output_that_couples_samples_and_is_not_in_the_loss_is_no_refusal() -> None:
    model, found, x, y = seeded(TwoOutputs), kfac(kfac_policy="small_only"), normal(B, 6, 24), classes(V, B)

    def loss(own: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(own(rows)[0], targets, reduction="sum")

    with found.capture(model, loss_reduction="sum", num_terms=B):
        loss(model, x, y).backward()
    y_BRC = single_sample.per_sample_gradients(model, loss, (x, y))["positions.weight"]
    G = torch.einsum("brc,brd->cd", y_BRC, y_BRC) / B
    assert_close(found.kfac_factors["positions"].G.to_dense(), G, 1e-9)
