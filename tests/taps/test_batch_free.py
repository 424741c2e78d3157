"""Layers without a batch axis: biases of relative positions, positions, what is computed from them, and where they meet it."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gramian
from tests.kit.mutations import RED, Edit
from tests.kit.refusals import refusal
from tests.oracles import sample_statistics
from tests.taps.checks import assert_norms, wave

pytestmark = pytest.mark.oracle
D, H = 6, 2


def bias_in_scores(own: "Positions", x: Tensor) -> Tensor:
    T = x.shape[1]
    distances = torch.arange(T)[None, :] - torch.arange(T)[:, None]
    bias = own.distances(distances.clamp(-3, 3) + 3).permute(2, 0, 1).unsqueeze(0)  # [1, H, T, T]
    q, k = (own.qk(x).unflatten(-1, (2, H, D // H))[:, :, i].transpose(1, 2) for i in (0, 1))
    return F.scaled_dot_product_attention(q, k, k, attn_mask=bias).transpose(1, 2).flatten(2)


def bias_added_in_place(own: "Positions", x: Tensor) -> Tensor:
    T = x.shape[1]
    scores = own.qk(x).unflatten(-1, (H, D)).transpose(1, 2) @ x.unsqueeze(1).mT
    scores += own.distances(torch.arange(T)[:, None].expand(T, T) % 7).permute(2, 0, 1).unsqueeze(0).unsqueeze(0)[0]
    return (scores.softmax(-1) @ x.unsqueeze(1)).transpose(1, 2).flatten(2)


def added(own: "Positions", x: Tensor) -> Tensor:
    return own.out(x + own.places(torch.arange(x.shape[1])))


def out_of_a_stack(own: "Positions", x: Tensor) -> Tensor:
    """As YOLOS: one row is that of the first of several layers, not of a sample."""
    return own.out(x + own.places(torch.arange(x.shape[1])[None]).tanh()[0])


def given_a_batch_axis(own: "Positions", x: Tensor) -> Tensor:
    return own.out(torch.cat([x, own.places(torch.arange(3)).expand(len(x), -1, -1)], 1))


def through_layers(own: "Positions", x: Tensor) -> Tensor:
    """Two layers on the positions themselves, one of which sees tokens too."""
    places = own.out(F.gelu(own.norm(own.out(torch.linspace(-1, 1, x.shape[1] * D).view(-1, D).to(x)))))
    return own.out(x) * places + places[0]


def in_an_einsum(own: "Positions", x: Tensor) -> Tensor:
    table = own.places(torch.arange(x.shape[1])).unflatten(-1, (H, D // H))
    return torch.einsum("bthd,lhd->bhtl", own.out(x).unflatten(-1, (H, D // H)), table).flatten(1)


def under_dropout(own: "Positions", x: Tensor) -> Tensor:
    return own.out(x + F.dropout(own.places(torch.arange(x.shape[1])), 0.0, own.training))


def checkpointed(own: "Positions", x: Tensor) -> Tensor:
    return checkpoint(lambda t: added(own, t), x, use_reentrant=False)


def in_windows(own: "Positions", x: Tensor) -> Tensor:
    """As Swin: every sample has several windows, and a small network makes one bias [1, H, N, N] for all of them."""
    windows = own.qk(F.pad(x, (0, 0, 0, x.shape[1] % 2))).unflatten(1, (-1, 2)).flatten(0, 1)
    q, k = (windows.unflatten(-1, (2, H, D // H))[:, :, i].transpose(1, 2) for i in (0, 1))
    table = torch.linspace(-1, 1, 4 * D).view(1, 2, 2, D).to(x)
    bias = F.relu(own.norm(own.out(table)), inplace=True)[..., :H].permute(0, 3, 1, 2)
    found = F.scaled_dot_product_attention(q, k, k, attn_mask=bias).transpose(1, 2).flatten(2)
    return found.unflatten(0, (len(x), -1)).flatten(1, 2)


USES: list[Callable[["Positions", Tensor], Tensor]] = [
    bias_in_scores, bias_added_in_place, added, given_a_batch_axis, through_layers, in_an_einsum, under_dropout, checkpointed,
    in_windows, out_of_a_stack,
]  # fmt: skip


class Positions(nn.Module):
    """Tables of distances and places, and layers for tokens, used in one of the ways above."""

    def __init__(self, use: Callable[["Positions", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.distances, self.places = nn.Embedding(7, H), nn.Embedding(12, D)
        self.qk, self.norm, self.out = nn.Linear(D, 2 * D), nn.LayerNorm(D), nn.Linear(D, D)
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def batch(samples: int, length: int, seed: int = 1) -> Tensor:
    return torch.randn(samples, length, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_norms_of(model: nn.Module, x: Tensor) -> None:
    want = sample_statistics.per_sample_norms(model, lambda m, one: wave(m, one, reduction="sum"), (x,))
    model.zero_grad()
    wave(model, x, reduction="sum").backward()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        wave(model, x, reduction="sum").backward()
    assert_norms(norms.values, want)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5), (3, 6), (4, 4), (2, 3)], ids=str)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_norms_are_those_of_the_loop(use: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    """Also where the number of tokens is that of samples, or a multiple of it; then a batch of one, and one of another size."""
    model = Positions(use)
    assert_norms_of(model, batch(*shape))
    for samples, length in ((1, shape[1]), (shape[0] + 2, shape[1] + 1)):
        assert_norms_of(model, batch(samples, length, 2))


def assert_private_sums_of(model: nn.Module, x: Tensor) -> None:
    """A private step without noise, clipped at the median norm, against a loop of single samples."""
    norms = sample_statistics.per_sample_norms(model, lambda m, one: wave(m, one, reduction="sum"), (x,))
    limit = float(norms.median())
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one, norm in zip(x, norms, strict=True):
        model.zero_grad()
        wave(model, one[None], reduction="sum").backward()
        for name, p in model.named_parameters():
            want[name] += 0 if p.grad is None else p.grad * min(1.0, limit / float(norm))
    engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=7)
    model.zero_grad()
    loader = torch.utils.data.DataLoader(list(x), batch_size=len(x))
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=loader,
        noise_multiplier=0.0, max_grad_norm=limit, poisson_sampling=False, loss_reduction="sum",
    )  # fmt: skip
    wave(private, x, reduction="sum").backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        found = len(x) * (before[name] - p)  # clip factors have a margin of 1e-11, and samples may cancel
        torch.testing.assert_close(found, want[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("use", [bias_in_scores, added, through_layers, in_windows], ids=lambda use: use.__name__)
def test_private_sums_are_those_of_the_loop(use: Callable[..., Tensor]) -> None:
    assert_private_sums_of(Positions(use), batch(4, 5))


def test_factors_are_those_of_a_copy_for_each_sample() -> None:
    """K-FAC of a table without a batch axis: G sums squares of the gradients of every sample's copy."""
    model, x = Positions(added), batch(3, 5)
    kfac = gramian.KFACNaturalGradient(max_tokens=None, kfac_use_woodbury=False)
    with kfac.capture(model, num_terms=3, loss_reduction="sum"):
        wave(model, x, reduction="sum").backward()
    G = torch.zeros(D, D, dtype=torch.float64)
    for one in x:
        leaf = model.places.weight.detach()[:5].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(wave(model.out, one[None] + leaf, reduction="sum"), leaf)
        G += gradient.mT @ gradient
    torch.testing.assert_close(kfac.kfac_factors["places"].G.to_dense(), G / 3, rtol=1e-9, atol=1e-12)


class Coupled(Positions):
    """A layer without a batch axis whose input depends on samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(x.mean(0))


def test_a_layer_whose_input_depends_on_samples_is_refused() -> None:
    model = Coupled(added)
    with refusal("out"), gramian.per_sample_norms(model):
        wave(model, batch(3, 5)).backward()


class Escaping(Positions):
    """Returns its positions, or stores them."""

    def __init__(self, how: str) -> None:
        super().__init__(added)
        self.how, self.cache = how, None

    def forward(self, x: Tensor) -> object:
        places = self.places(torch.arange(x.shape[1]))
        if self.how == "stores":
            self.cache = [places.detach()]
            return x + places
        return {"output": x + places, "places": places}


@pytest.mark.parametrize("how", ["returns", "stores"])
def test_copies_do_not_leave_the_forward(how: str) -> None:
    model = Escaping(how)
    with refusal("places"), gramian.per_sample_norms(model):
        model(batch(3, 5))
    assert type(model.cache[0] if model.cache else batch(1, 1)) is Tensor


class Turns(Positions):
    """One layer, of positions [T, D] or of a mean over each sample's tokens [B, D], as a flag says."""

    of_positions = True

    def forward(self, x: Tensor) -> Tensor:
        places = torch.linspace(-1, 1, x.shape[1] * D).view(-1, D).to(x)
        y = self.out(places) if self.of_positions else self.out(x.mean(1))[:, None]
        return self.qk(x * torch.sigmoid(y))


def test_calls_without_a_batch_axis_belong_to_a_structure() -> None:
    """Also in statistics that are sums, and where tokens are as many as samples."""
    model = Turns(added)
    for shape, flag in (((3, 5), True), ((3, 5), False), ((3, 5), True), ((4, 4), False), ((4, 4), True)):
        model.of_positions = flag
        assert_norms_of(model, batch(*shape))
        kfac = gramian.KFACNaturalGradient(max_tokens=None, kfac_use_woodbury=False)
        with kfac.capture(model, num_terms=1, loss_reduction="sum"):
            wave(model, batch(*shape), reduction="sum").backward()
        single = []
        for one in batch(*shape):
            untouched = deepcopy(model)
            wave(untouched, one[None], reduction="sum").backward()
            single.append(untouched.out.bias.grad)
        if not flag:
            G = torch.stack(single).T @ torch.stack(single)
            torch.testing.assert_close(kfac.kfac_factors["out"].G.to_dense(), G)


BUGS = {
    "copies of one sample": Edit(
        "layer_forward:run_layer",
        "output = output.expand(batch, *output.shape)",
        "output = output.expand(1, *output.shape)",
    ),
    "another sample's copy": Edit(
        "batch_free:_run",
        "leaf.rows if isinstance(leaf, BatchFree) else",
        "leaf.rows.flip(0) if isinstance(leaf, BatchFree) else",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_turns_the_oracle_red(bug: str) -> None:
    with BUGS[bug].applied(), pytest.raises((*RED, gramian.GramianError)):
        assert_norms_of(Positions(added), batch(3, 5))
