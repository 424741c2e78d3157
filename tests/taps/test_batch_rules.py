"""Which rows belong to which sample: one row for all, several rows each, and units that the user names."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gramian
from gramian.core.errors import GramianError
from gramian.oracles import single_sample
from tests.kit.matrix import examples
from tests.kit.models import CASES
from tests.kit.networks import GPT
from tests.kit.toys import Toy
from tests.taps.checks import assert_exact, assert_norms, captured, loop_norms, problem

pytestmark = pytest.mark.oracle

ALGORITHMS = ("auto", "direct", "gram")


class Words(nn.Module):
    """Tokens that do not interact: a table, a norm, linears, one of them used twice, and a head tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.mix = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.mix(self.norm(self.table(ids)))
        return self.head(h + torch.tanh(self.mix(h)))


def _words() -> Words:
    torch.manual_seed(0)
    return Words().double()


def _terms(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """One loss per token: [B, T]."""
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(ids.shape)


def _norm_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Norm of the gradient of the summed loss of some tokens, by one backward of their own: 0-dim."""
    if not ids.numel():
        return torch.zeros((), dtype=torch.float64)
    gradients = torch.autograd.grad(_terms(model, ids, targets).sum(), list(model.parameters()))
    return torch.stack([g.square().sum() for g in gradients]).sum().sqrt()


# ---- one row for all samples, several rows per sample ---------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("name", ["gpt", "broadcast", "vit"])
def test_a_layer_that_sees_one_row_gives_every_sample_its_own_gradient(name: str, samples: int) -> None:
    model, batch, loss = problem(CASES[name], samples=samples)
    norms = captured(model, loss, batch)
    assert_norms(norms.values, loop_norms(model, loss, batch))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_rows_of_one_sample_are_summed_before_they_are_squared(samples: int, algorithm: str) -> None:
    model, batch, loss = problem(CASES["windows"], samples=samples)
    norms = captured(model, loss, batch, algorithm=algorithm)
    assert_norms(norms.values, loop_norms(model, loss, batch))


def test_rows_of_an_embedding_and_a_norm_may_be_several_per_sample() -> None:
    def pieces_forward(net: Any, ids_BT: Tensor) -> Tensor:
        pieces = net.norm(net.table(ids_BT.unflatten(1, (2, -1)).flatten(0, 1)))
        return net.groups(pieces.transpose(1, 2)).unflatten(0, (-1, 2))

    assert_exact(
        Toy(pieces_forward, table=nn.Embedding(7, 4), norm=nn.LayerNorm(4), groups=nn.GroupNorm(2, 4)).double(),
        torch.randint(7, (3, 6)),
    )


@pytest.mark.parametrize("how", ["squeeze(0)", "[0]"])
def test_the_one_row_of_a_layer_that_is_picked_out_again_is_exact_or_refused_by_name(how: str) -> None:
    def picked(net: Any, ids_BT: Tensor) -> Tensor:
        row_1TD = net.positions(torch.arange(5)[None])
        return net.table(ids_BT) + (row_1TD[0] if how == "[0]" else row_1TD.squeeze(0))

    try:
        assert_exact(
            Toy(picked, table=nn.Embedding(7, 4), positions=nn.Embedding(5, 4)).double(), torch.randint(7, (3, 5))
        )
    except GramianError as error:
        assert str(error).startswith("positions") and "expected" in str(error)  # noqa: PT017


def test_a_picked_row_that_gets_its_gradient_later_is_exact() -> None:
    def scaled(net: Any, ids_BT: Tensor) -> Tensor:
        row_1TD = scale["now"] * net.positions(torch.arange(5)[None])
        return net.table(ids_BT) + (row_1TD[0] if net.picks else row_1TD)

    scale = {"now": 0.0}
    model = Toy(scaled, table=nn.Embedding(7, 4), positions=nn.Embedding(5, 4), picks=True).double()
    ids_BT = torch.randint(7, (3, 5))

    def term(ids_BT: Tensor) -> Tensor:
        found: Tensor = model(ids_BT).square().sum()
        return found

    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        term(ids_BT).backward()  # no gradient yet: nothing can be said
        scale["now"] = 1.0
        term(ids_BT).backward()
        model.picks = False
        term(ids_BT).backward()
    rows = [torch.autograd.grad(term(row_T[None]), list(model.parameters())) for row_T in ids_BT]
    wanted_B = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
    torch.testing.assert_close(norms.values[3:], torch.cat([wanted_B, wanted_B]), rtol=1e-12, atol=0)


def scattered() -> Toy:
    """The first tensor argument has nothing to do with the batch."""
    return Toy(
        lambda net, weights, x: net.head(torch.tanh(net.inner(x * weights))),
        inner=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )


def test_batch_size_overrides_the_first_axis_of_the_first_argument() -> None:
    model, weights = scattered().double(), torch.rand(5, dtype=torch.float64)
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum", batch_size=3) as norms:
        model(weights, x).square().sum().backward()
    expected = loop_norms(model, lambda m, x, reduction: m(weights, x).square().sum(), (x,))
    assert_norms(norms.values, expected)


def test_batch_size_says_how_many_samples_a_flat_batch_of_rows_holds() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum", batch_size=3) as norms:
        model(x.flatten(0, 1)).square().sum().backward()
    assert_norms(norms.values, loop_norms(model, lambda m, x, reduction: m(x).square().sum(), (x,)))


def test_layers_called_one_by_one_with_batch_size_are_one_pass() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum", batch_size=3, proof="off") as norms:
        for _ in range(2):
            model[2](model[1](model[0](x))).square().sum().backward()
    expected = loop_norms(model, lambda m, x, reduction: m(x).square().sum(), (x,))
    assert_norms(norms.values, torch.cat([expected, expected]))


def test_batches_of_different_size_in_one_capture_are_distinguished() -> None:
    model, batch, loss = problem(CASES["tied_gpt"], samples=6)
    expected = loop_norms(model, loss, batch)
    with gramian.per_sample_norms(model) as norms:
        for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
            loss(model, *(t[part] for t in batch), reduction="mean").backward()
    assert_norms(norms.values, expected)


# ---- units of rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["mlp", "linear_3d", "tied_gpt", "convnet", "vit", "mha", "windows", "reused"])
def test_rows_of_one_user_are_summed_before_they_are_squared(name: str, algorithm: str) -> None:
    model, batch, loss = problem(CASES[name], samples=5)
    users = torch.tensor([1, 0, 1, 3, 1])
    norms = captured(model, loss, batch, "sum", loss_reduction="sum", sample_ids=users, algorithm=algorithm)
    rows = single_sample.per_sample_gradients(model, lambda m, *b: loss(m, *b, reduction="sum"), batch)
    summed = {n: torch.zeros(4, *g.shape[1:], dtype=g.dtype).index_add_(0, users, g) for n, g in rows.items()}
    expected = torch.cat([g.flatten(1) for g in summed.values()], dim=1).norm(dim=1)
    assert expected[2] == 0  # nobody is user 2
    assert_norms(norms.values, expected)


def test_with_a_mean_loss_a_users_gradient_is_the_sum_of_its_rows_gradients() -> None:
    model, batch, loss = problem(CASES["mlp"], samples=4)
    users = torch.tensor([0, 1, 1, 0])
    mean = captured(model, loss, batch, sample_ids=users)
    total = captured(model, loss, batch, "sum", loss_reduction="sum", sample_ids=users)
    rows = single_sample.per_sample_gradients(model, lambda m, *b: loss(m, *b, reduction="sum"), batch)
    g_BP = torch.cat([g.flatten(1) for g in rows.values()], dim=1)
    expected = torch.stack([(g_BP[0] + g_BP[3]).norm(), (g_BP[1] + g_BP[2]).norm()])
    assert_norms(mean.values, expected)
    assert_norms(total.values, expected)


def test_row_numbers_as_ids_change_nothing() -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    norms = captured(model, loss, batch, sample_ids=torch.arange(4))
    assert_norms(norms.values, loop_norms(model, loss, batch))


def test_two_captures_of_one_backward_may_have_different_units() -> None:
    model, batch, loss = problem(CASES["tied_gpt"], samples=4)
    with (
        gramian.per_sample_norms(model) as rows,
        gramian.per_sample_norms(model, sample_ids=torch.zeros(4, dtype=torch.long)) as everything,
    ):
        loss(model, *batch, reduction="mean").backward()
    assert_norms(rows.values, loop_norms(model, loss, batch))
    total = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert_norms(everything.values, 4 * total[None])


def test_next_names_the_units_of_the_following_backward() -> None:
    model, batch, loss = problem(CASES["mlp"], samples=4)
    rows = single_sample.per_sample_gradients(model, lambda m, *b: loss(m, *b, reduction="sum"), batch)
    g_BP = torch.cat([g.flatten(1) for g in rows.values()], dim=1)
    with gramian.per_sample_norms(model, loss_reduction="sum", sample_ids=torch.tensor([0, 0, 1, 1])) as norms:
        loss(model, *batch, reduction="sum").backward()
        norms.next(sample_ids=torch.tensor([2, 1, 0, 0]))
        loss(model, *batch, reduction="sum").backward()
        norms.next()
        loss(model, *batch, reduction="sum").backward()
    expected = [g_BP[:2].sum(0), g_BP[2:].sum(0), g_BP[2:].sum(0), g_BP[1], g_BP[0], *g_BP]
    assert_norms(norms.values, torch.stack(expected).norm(dim=1))


# ---- units of tokens ------------------------------------------------------------------------------------------------


@st.composite
def lengths(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))


def _ragged(sizes: list[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(11, (2, n), generator=generator)) for n in sizes]  # type: ignore[misc]


def _pack(sizes: list[int], width: int) -> Tensor:
    """First fit: which sequence stands where in rows of `width` tokens, -1 where none does."""
    rows: list[list[int]] = []
    for number, size in enumerate(sizes):
        for row in rows:
            if len(row) + size <= width:
                row.extend([number] * size)
                break
        else:
            rows.append([number] * size)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


@pytest.mark.few_proofs(short=True)
@given(sizes=lengths(), seed=st.integers(0, 1000), algorithm=st.sampled_from(ALGORITHMS))
@settings(max_examples=examples(25))
def test_packed_ragged_and_padded_sequences_have_the_same_norms(sizes: list[int], seed: int, algorithm: str) -> None:
    model = _words()
    sequences = _ragged(sizes, seed)
    expected = torch.stack([_norm_of(model, ids[None], targets[None]) for ids, targets in sequences])

    # Ragged: one forward and backward for each sequence.
    with gramian.per_sample_norms(model, loss_reduction="sum", algorithm=algorithm) as ragged:
        for ids, targets in sequences:
            _terms(model, ids[None], targets[None]).sum().backward()
    assert_norms(ragged.values, expected)

    # Padded: rows of the longest, the loss of padding masked.
    longest = max(sizes)
    ids, targets = (torch.stack([F.pad(s[k], (0, longest - len(s[k]))) for s in sequences]) for k in (0, 1))
    mask = torch.arange(longest) < torch.tensor(sizes)[:, None]
    with gramian.per_sample_norms(model, loss_reduction="sum", algorithm=algorithm) as padded:
        (_terms(model, ids, targets) * mask).sum().backward()
    assert_norms(padded.values, expected)

    # Packed: several sequences in one row, told apart by their ids; the padding belongs to a unit of its own.
    where = _pack(sizes, 6)
    units = where.masked_fill(where < 0, len(sizes))
    ids, targets = torch.zeros_like(where), torch.zeros_like(where)
    for number, (own_ids, own_targets) in enumerate(sequences):
        ids[where == number], targets[where == number] = own_ids, own_targets
    options = {"loss_reduction": "sum", "algorithm": algorithm, "sample_ids": units}
    with gramian.per_sample_norms(model, **options) as packed:
        (_terms(model, ids, targets) * (where >= 0)).sum().backward()
    assert_norms(packed.values[: len(sizes)], expected)
    assert not packed.values[len(sizes) :].any()


@pytest.mark.few_proofs(short=True)
@given(seed=st.integers(0, 1000), units=st.integers(1, 5), algorithm=st.sampled_from(ALGORITHMS))
@settings(max_examples=examples(15))
def test_any_assignment_of_tokens_to_units_sums_each_units_tokens(seed: int, units: int, algorithm: str) -> None:
    model = _words()
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(11, (2, 3, 5), generator=generator)
    owners = torch.randint(units, (3, 5), generator=generator)
    with gramian.per_sample_norms(model, loss_reduction="sum", sample_ids=owners, algorithm=algorithm) as norms:
        _terms(model, ids, targets).sum().backward()
    count = int(owners.max()) + 1
    expected = [_norm_of(model, ids[owners == u][None], targets[owners == u][None]) for u in range(count)]
    assert_norms(norms.values, torch.stack(expected))


class PackedAttention(nn.Module):
    """Attention inside each sequence of a packed row, positions counted from its start."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions, self.norm = nn.Embedding(11, 6), nn.Embedding(7, 6), nn.LayerNorm(6)
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 11)

    def forward(self, ids: Tensor, owners: Tensor, positions: Tensor) -> Tensor:
        h = self.norm(self.table(ids) + self.positions(positions))
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        same = (owners[:, :, None] == owners[:, None, :]) & causal
        return self.head(h + F.scaled_dot_product_attention(q, k, v, attn_mask=same))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packed_sequences_with_block_diagonal_attention_equal_unpacked_ones(algorithm: str) -> None:
    torch.manual_seed(1)
    model = PackedAttention().double()
    sizes = [3, 2, 5, 1, 4]
    sequences = _ragged(sizes, 7)
    where = _pack(sizes, 5)
    assert len(where) < len(sizes)

    def loss(ids: Tensor, targets: Tensor, owners: Tensor, positions: Tensor) -> Tensor:
        logits = model(ids, owners, positions)
        return (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * (owners >= 0).flatten()
        ).sum()

    expected = []
    for ids, targets in sequences:
        positions = torch.arange(len(ids))[None]
        value = loss(ids[None], targets[None], torch.zeros_like(ids)[None], positions)
        gradients = torch.autograd.grad(value, list(model.parameters()))
        expected.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    ids, targets, positions = (torch.zeros_like(where) for _ in range(3))
    for number, (own_ids, own_targets) in enumerate(sequences):
        ids[where == number], targets[where == number] = own_ids, own_targets
        positions[where == number] = torch.arange(len(own_ids))
    units = where.masked_fill(where < 0, len(sizes))
    with gramian.per_sample_norms(model, loss_reduction="sum", sample_ids=units, algorithm=algorithm) as norms:
        loss(ids, targets, where, positions).backward()
    assert_norms(norms.values[: len(sizes)], torch.stack(expected))


def test_tokens_of_several_rows_may_belong_to_one_unit() -> None:
    model = _words()
    ids, targets = torch.randint(11, (2, 4, 3))
    owners = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 2, 2], [2, 2, 0]])
    with gramian.per_sample_norms(model, loss_reduction="sum", sample_ids=owners) as norms:
        _terms(model, ids, targets).sum().backward()
    expected = [_norm_of(model, ids[owners == u][None], targets[owners == u][None]) for u in range(3)]
    assert_norms(norms.values, torch.stack(expected))


def test_one_row_of_position_ids_belongs_to_the_tokens_that_read_it() -> None:
    """Packed rows of a model with [1, T] position ids: position t of row b counts for the owner of token (b, t)."""

    def placed(net: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(ids.shape[1])[None] if positions is None else positions
        return net.head(torch.tanh(net.table(ids) + net.positions(positions)))

    torch.manual_seed(2)
    model = Toy(placed, table=nn.Embedding(11, 6), positions=nn.Embedding(5, 6), head=nn.Linear(6, 11)).double()
    ids, targets = torch.randint(11, (2, 3, 5))
    owners = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 0], [3, 3, 3, 1, 1]])
    with gramian.per_sample_norms(model, loss_reduction="sum", sample_ids=owners) as norms:
        _terms(model, ids, targets).sum().backward()
    places = torch.arange(5).expand(3, 5)
    expected = []
    for unit in range(4):
        mine = owners == unit
        logits = model(ids[mine][None], places[mine][None])
        value = F.cross_entropy(logits[0], targets[mine], reduction="sum")
        gradients = torch.autograd.grad(value, list(model.parameters()))
        expected.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    assert_norms(norms.values, torch.stack(expected))


def test_the_reference_gpt_accepts_any_split_into_micro_batches() -> None:
    torch.manual_seed(3)
    model = GPT(tied=True).double()
    ids = torch.randint(13, (7, 6))

    def loss(model: nn.Module, ids: Tensor, reduction: str) -> Tensor:
        terms_B = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none").sum(1)
        return terms_B.sum() if reduction == "sum" else terms_B.mean()

    expected = loop_norms(model, loss, (ids,))
    for split in ([7], [1, 6], [3, 3, 1], [1] * 7):
        with gramian.per_sample_norms(model) as norms:
            for part in ids.split(split):
                loss(model, part, "mean").backward()
        assert_norms(norms.values, expected)
