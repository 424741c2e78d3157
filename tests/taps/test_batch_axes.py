"""The batch axis of a layer is found by the row proof: samples on axis 1, on later ones, interleaved, and from call to call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import gramian
from gramian.taps.hub import hub_of
from tests.kit.matrix import FULL, sample
from tests.kit.mutations import RED, Edit
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.taps.checks import assert_exact, wave
from tests.taps.test_batch_free import assert_norms_of, assert_private_sums_of

pytestmark = pytest.mark.oracle
D = 4


class Scaled(nn.Module):
    """A layer without a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale) * x


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(D, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


def time_first(net: Any, x: Tensor) -> Tensor:
    y = net.layer(x.transpose(0, 1))
    return (y[0] if isinstance(y, tuple) else y).transpose(0, 1)


def on_axis_two(net: Any, x: Tensor) -> Tensor:
    return net.layer(x.transpose(0, 1)[None].expand(2, -1, -1, -1).transpose(1, 2)).mean(0).flatten(0, 1).view_as(x)


def behind_two_axes(net: Any, x: Tensor) -> Tensor:
    """[2, T, B, D]."""
    return net.layer(torch.stack([x, x.square()]).transpose(1, 2)).sum(0).transpose(0, 1)


def interleaved(net: Any, x: Tensor) -> Tensor:
    """Rows (t, b), the first tokens of all samples first."""
    return net.layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], len(x))).transpose(0, 1)


def two_views(net: Any, x: Tensor) -> Tensor:
    return torch.cat(net.layer(torch.cat([x, x.square()])).chunk(2), -1)[..., :D]


def by_turns(net: Any, x: Tensor) -> Tensor:
    """The same layer with the samples on axis 1, then on axis 0, then on axis 1."""
    return time_first(net, net.layer(time_first(net, x)))


def recomputed(net: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda t: time_first(net, t), x, use_reentrant=False)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "layer norm": lambda: nn.LayerNorm(D),
    "RMS norm": lambda: nn.RMSNorm(D),
    "no formula": Scaled,
    "LSTM": lambda: nn.LSTM(D, D),
    "GRU": lambda: nn.GRU(D, D, num_layers=2),
    "attention": Attends,
    "encoder": lambda: nn.TransformerEncoderLayer(D, 2, 6, dropout=0.0),
    "frozen weight": lambda: _without_weight(nn.Linear(D, D)),
}
TOKENWISE = ("linear", "layer norm", "no formula", "frozen weight")
WAYS = {
    time_first: tuple(LAYERS),
    behind_two_axes: TOKENWISE,
    interleaved: TOKENWISE,
    two_views: ("linear", "layer norm"),
    by_turns: ("linear", "no formula"),
    recomputed: ("linear", "LSTM", "attention", "no formula"),
}
CASES = [(way, layer) for way, layers in WAYS.items() for layer in layers]
SHAPES = [(3, 5), (3, 6), (4, 4), (4, 1), (2, 3)]
"""Of samples and tokens: also where tokens are as many as samples, or a multiple of them, or one."""


def _without_weight(layer: nn.Linear) -> nn.Linear:
    layer.weight.requires_grad_(False)
    return layer


def network(way: Callable[[Any, Tensor], Tensor], layer: str) -> nn.Module:
    torch.manual_seed(0)
    return Toy(
        lambda net, x: net.head(torch.tanh(way(net, net.embed(x)))),
        embed=nn.Linear(D, D),
        layer=LAYERS[layer](),
        head=nn.Linear(D, 3),
    ).double()


def batch(samples: int, length: int, seed: int = 1) -> Tensor:
    return torch.randn(samples, length, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MATRIX = [(way, layer, shape) for way, layer in CASES for shape in SHAPES]


@pytest.mark.parametrize(
    "way, layer, shape",
    sample(MATRIX, 12, case=lambda one: (one[0], one[1])),
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_norms_are_those_of_the_loop(way: Any, layer: str, shape: tuple[int, int]) -> None:
    """Then a batch of one, and one of another size."""
    model = network(way, layer)
    assert_norms_of(model, batch(*shape))
    for samples, length in ((1, shape[1]), (shape[0] + 1, shape[1] + 1)):
        assert_norms_of(model, batch(samples, length, 2))


@pytest.mark.parametrize(
    "way, layer", CASES if FULL else [(time_first, "encoder"), (interleaved, "linear"), (by_turns, "no formula")]
)
def test_private_sums_are_those_of_the_loop(way: Any, layer: str) -> None:
    assert_private_sums_of(network(way, layer), batch(4, 5))


def test_tables_and_convolutions_are_read_where_their_samples_lie() -> None:
    """Indices [T, B], and images of all samples in turn."""
    model = Toy(
        lambda net, ids, x: (
            net.table(ids.T).transpose(0, 1).sum(1)
            + net.conv(torch.cat([x, x.flip(-1)])).sum(-1).unflatten(0, (2, len(x))).sum(0)
        ),
        table=nn.Embedding(7, D, padding_idx=0),
        conv=nn.Conv1d(2, D, 3),
    ).double()
    generator = torch.Generator().manual_seed(0)
    ids, x = torch.randint(7, (3, 5), generator=generator), torch.randn(3, 2, 6, generator=generator).double()
    assert_exact(model, ids, x)


@pytest.mark.parametrize("layer", ["LSTM", "attention"])
def test_without_a_proof_a_layer_is_taken_at_its_word(layer: str) -> None:
    assert_exact(network(time_first, layer), batch(3, 5), proof="off")


def test_tokens_of_units_are_read_where_they_lie() -> None:
    model, x = network(time_first, "linear"), batch(3, 5)
    owners = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 0], [3, 3, 3, 1, 1]])
    with gramian.per_sample_norms(model, loss_reduction="sum", sample_ids=owners) as norms:
        model(x).sin().sum().backward()
    for unit in range(4):
        model.zero_grad()
        model(x[owners == unit][None]).sin().sum().backward()
        own = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        torch.testing.assert_close(norms.values[unit], own, rtol=1e-9, atol=0)


# ---- from forward to forward ------------------------------------------------------------------------------------------


def test_every_structure_of_inputs_has_axes_of_its_own() -> None:
    model = Toy(
        lambda net, x, turned: net.head(torch.tanh(time_first(net, x) if turned else net.layer(x))),
        layer=nn.Linear(D, D),
        head=nn.Linear(D, 3),
    ).double()
    for turned in (True, False, True):
        assert_exact(model, batch(3, 3), turned)


def test_a_layer_that_turns_its_input_by_its_length_is_proven_again() -> None:
    """Also where tokens are a multiple of samples, so that no shape shows it."""
    model = Toy(
        lambda net, x: net.head(torch.tanh(time_first(net, x) if x.shape[1] > 4 else net.layer(x))),
        layer=nn.Linear(D, D),
        head=nn.Linear(D, 3),
    ).double()
    for length in (6, 3, 9, 2, 5, 4):
        assert_exact(model, batch(3, length))


def test_open_forwards_keep_their_axes_until_their_backward() -> None:
    model = Toy(
        lambda net, x, turned: checkpoint(
            lambda t: time_first(net, t) if turned else net.layer(t), x, use_reentrant=False
        ),
        layer=Attends(batch_first=False),
    ).double()
    x = batch(3, 3)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        first = model(x, True).sin().sum()
        first.backward()
    want = norms.values
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        first = model(x, True).sin().sum()
        model(x, True).cos().sum()
        first.backward()
    torch.testing.assert_close(norms.values[:3], want, rtol=1e-12, atol=0)


def test_an_empty_batch_of_a_private_run_adds_nothing() -> None:
    model, x = network(time_first, "encoder"), batch(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(x, 1), noise_multiplier=0.0, max_grad_norm=1.0
    )
    sizes = []
    for _ in range(2):
        for own in loader:
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            wave(model, own).backward() if len(own) else model(own).sum().backward()
            optimizer.step()
            moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
            sizes.append(len(own))
            assert moved == (len(own) > 0)
    assert 0 in sizes
    assert max(sizes) > 1


# ---- compiled graphs --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_compiled_graphs_are_read_where_their_samples_lie() -> None:
    torch._dynamo.reset()
    model = network(time_first, "linear")
    for shape in ((3, 5), (4, 4)) if FULL else ((4, 4),):
        want = gramian_norms(model, batch(*shape))
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(gramian_norms(compiled, batch(*shape)), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("way, shape", [(time_first, (3, 1)), (by_turns, (3, 5))] if FULL else [(time_first, (3, 1))])
def test_what_a_compiled_graph_cannot_follow_is_refused_by_name(way: Any, shape: tuple[int, int]) -> None:
    torch._dynamo.reset()
    with refusal("^layer: has its samples on another axis.*expected eager mode"):
        gramian_norms(torch.compile(network(way, "linear"), backend="aot_eager"), batch(*shape))


def gramian_norms(model: Any, x: Tensor) -> Tensor:
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        wave(model, x, reduction="sum").backward()
    return norms.values


# ---- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (4, 4)])
def test_samples_that_mix_are_refused_wherever_they_lie(shape: tuple[int, int]) -> None:
    model = network(lambda net, x: time_first(net, x - 0.1 * x.roll(1, 0)), "linear")
    with refusal(".*changes when other samples are replaced|.*rows for a batch"):
        gramian_norms(model, batch(*shape))
    assert not hub_of(model).layouts


def test_the_record_of_a_proof_names_the_layers() -> None:
    model = network(time_first, "linear")
    gramian_norms(model, batch(3, 5))
    assert [proven.moved for proven in hub_of(model).proof.proven.values()] == [("layer",)]


# ---- layers around what is refused ------------------------------------------------------------------------------------


class ReturnsBias(nn.Module):
    """Returns a parameter beside its output, as GPT-NeoX's Japanese attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.bias = nn.Linear(D, D), nn.Parameter(torch.linspace(-1, 1, D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(x), self.bias


class AddsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReturnsBias()

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.inner(x)
        return torch.tanh(y + bias)


class TakesShape(nn.Module):
    """Takes the shape of the batch as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, D))

    def forward(self, x: Tensor, shape: torch.Size, samples: int) -> Tensor:
        return x.reshape(samples, -1, shape[-1]).view(shape).sin() * self.scale * self.scale.sum()


class UsesTable(nn.Module):
    """A head that uses the weight of a table elsewhere."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.decoder, self.bias = nn.Linear(D, 7), nn.Parameter(torch.linspace(-1, 1, 7))
        self.decoder.weight, self.decoder.bias = table.weight, self.bias

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.decoder.weight.T.contiguous() + self.decoder.bias


def _tied() -> nn.Module:
    table = nn.Embedding(7, D)
    return Toy(
        lambda net, x: net.head(torch.tanh(net.table((x[..., 0] > 0).long()) + x)), table=table, head=UsesTable(table)
    )


def _empty_rows() -> nn.Module:
    """A layer that no token of the batch is sent to."""
    return Toy(lambda net, x: net.body(x) + net.other(x[x[..., 0] > 99]).sum(), body=nn.Linear(D, D), other=Scaled())


NETS: dict[str, Callable[[], nn.Module]] = {
    "a parameter returned beside the output": lambda: nn.Sequential(nn.Linear(D, D), AddsBias(), nn.Linear(D, 3)),
    "sizes of the batch as arguments": lambda: Toy(
        lambda net, x: net.body(net.sized(x, x.shape, len(x))), sized=TakesShape(), body=nn.Linear(D, 3)
    ),
    "a table used in another layer": _tied,
    "a layer without tokens": _empty_rows,
    "a layer on features alone": lambda: Toy(
        lambda net, x: net.body(x) + net.start(torch.linspace(-1, 1, D).to(x)), body=nn.Linear(D, 3), start=nn.Linear(D, 3)
    ),
    "one row beside more axes": lambda: Toy(
        lambda net, x: net.body(x) * (1 + net.second(torch.tanh(net.first(torch.ones(1, D).to(x))))),
        body=nn.Linear(D, 3), first=nn.Linear(D, 2), second=nn.Linear(2, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_what_no_single_layer_shows_is_exact(name: str) -> None:
    model = NETS[name]().double()
    assert_norms_of(model, batch(3, 5))
    assert_norms_of(model, batch(4, 7))


def test_weights_of_a_layer_that_has_them_under_two_names_are_private() -> None:
    assert_private_sums_of(_tied().double(), batch(4, 5))


def test_a_gradient_that_is_rounding_alone_agrees() -> None:
    """The key's bias moves no attention weight: its gradient is 0, but for rounding."""
    model = Toy(
        lambda net, x: F.softmax(net.query(x) @ net.key(x).mT, -1) @ x,
        query=nn.Linear(D, D),
        key=nn.Sequential(Scaled(), nn.Linear(D, D)),
    ).double()
    for _ in range(3):
        assert_norms_of(model, batch(3, 5))


# ---- bugs -------------------------------------------------------------------------------------------------------------

BUGS = {
    "samples not moved": (
        Edit("Site.arranged", "[first_axis(t, layouts.output, batch) for t in saved]", "list(saved)"),
        (time_first, "linear", (4, 4)),
    ),
    "output gradients not moved": (
        Edit("Site.arranged", "[first_axis(g, layouts.output, batch) for g in output_gradients]", "output_gradients"),
        (time_first, "linear", (4, 8)),
    ),
    "rows of a sample taken as those of the next": (
        Edit("batch_layout:split", "if layout.interleaved else", "if False else"),
        (interleaved, "linear", (4, 8)),
    ),
    "the axis of the first call for all calls": (
        Edit("TappedModel.layouts_of", "0 if current is None else", "0 if True else"),
        (by_turns, "linear", (3, 3)),
    ),
    "samples on axis 1 of a layer that runs again": (
        Edit("Generic.arranged", "replace(extra, layouts=layouts)", "extra"),
        (time_first, "no formula", (4, 4)),
    ),
}


@pytest.mark.usefixtures("root_not_taken")
@pytest.mark.parametrize("name", sample(list(BUGS), 3))
def test_a_bug_turns_the_oracle_red(name: str) -> None:
    bug, (way, layer, shape) = BUGS[name]
    with bug.applied(), pytest.raises(RED):
        assert_norms_of(network(way, layer), batch(*shape))


def test_axes_of_another_structure_are_never_used() -> None:
    """What would be wrong without a sound: both structures have the same shapes and calls."""
    bug = Edit("RowProof._assume", "self.model.layouts = self.layouts.get(key, {})", "pass")
    with bug.applied(), pytest.raises(RED):
        test_every_structure_of_inputs_has_axes_of_its_own()
