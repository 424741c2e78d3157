"""Layers whose weights only enter products: norms and private sums are those of a loop, whatever kernel the layer runs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (its operators)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.taps.sites.batch_layout import FIRST
from gramian.taps.sites.products.row_owners import RowOwners
from tests.kit.refusals import refusal
from tests.taps.checks import wave
from tests.taps.test_batch_free import assert_norms_of, assert_private_sums_of

pytestmark = pytest.mark.oracle
D, H, E = 4, 6, 3
Run = Callable[["Experts", Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Fused experts: up [E, H, D] (stored [E, D, H] if transposed), down [E, D, H], a bias each."""

    def __init__(self, run: Run, transposed: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, D, H) if transposed else torch.randn(E, H, D))
        self.down = nn.Parameter(torch.randn(E, H, D) if transposed else torch.randn(E, D, H))
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(E, H)), nn.Parameter(torch.randn(E, D))
        self.run, self.transposed = run, transposed

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self.run(self, x, index, weights)


def loop_over_experts(own: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for expert in torch.unique(index):  # 0-dim tensors
        token, place = torch.where(index == expert)
        if own.transposed:
            h = x[token] @ own.up[expert] + own.up_bias[expert]
            out = h.tanh() @ own.down[expert] + own.down_bias[expert]
        else:
            h = F.linear(x[token], own.up[expert], own.up_bias[expert])
            out = F.linear(h.tanh(), own.down[int(expert)]) + own.down_bias[expert]
        y.index_add_(0, token, out * weights[token, place, None])
    return y


def gathered_matrices(own: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows, chosen = x.repeat_interleave(index.shape[1], 0), index.reshape(-1)
    if own.transposed:
        h = torch.bmm(rows.unsqueeze(1), own.up[chosen]).squeeze(1).add_(own.up_bias[chosen])
        out = torch.bmm(h.tanh().unsqueeze(1), own.down[chosen]).squeeze(1).add_(own.down_bias[chosen])
    else:
        h = torch.bmm(own.up[chosen], rows.unsqueeze(-1)).squeeze(-1).add_(own.up_bias[chosen])
        out = torch.bmm(own.down[chosen], h.tanh().unsqueeze(-1)).squeeze(-1).add_(own.down_bias[chosen])
    return (out * weights.reshape(-1, 1)).view(*index.shape, D).sum(1)


def grouped_products(own: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    chosen, order = index.reshape(-1).sort()
    ends = torch.histc(chosen.float(), bins=E, min=0, max=E - 1).cumsum(0).int()
    up, down = (own.up, own.down) if own.transposed else (own.up.transpose(-2, -1), own.down.mT)
    grouped_mm = torch.ops.transformers.grouped_mm_fallback  # what transformers runs where `F.grouped_mm` cannot
    h = grouped_mm(x[order // index.shape[1]], up, offs=ends)
    h.add_(own.up_bias[chosen])
    out = grouped_mm(h.tanh(), down, offs=ends) + own.down_bias[chosen]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return (out * weights.reshape(-1)[order, None])[back].view(*index.shape, D).sum(1)


def all_tokens_to_all(own: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    gate = torch.zeros(len(x), E).scatter_add(1, index, weights)
    rows = x.reshape(1, -1, D).expand(E, -1, -1)
    up, down = (own.up, own.down) if own.transposed else (own.up.mT, own.down.mT)
    h = torch.bmm(rows, up) + own.up_bias.unsqueeze(1) * 0 + own.up_bias[torch.arange(E)].unsqueeze(1).detach()
    return (torch.bmm(h.tanh(), down) * gate.T[..., None]).sum(0)


class Mixture(nn.Module):
    """An embedding of the tokens, a router over E experts, of which the first `unused` get no token, and a head."""

    def __init__(self, run: Run, top: int = 2, transposed: bool = False, unused: int = 0) -> None:
        super().__init__()
        self.enter, self.router, self.leave = nn.Linear(D, D), nn.Linear(D, E), nn.Linear(D, D)
        self.experts, self.top, self.unused = Experts(run, transposed), top, unused

    def forward(self, x: Tensor) -> Tensor:
        rows = self.enter(x).tanh().reshape(-1, D)
        scores = self.router(rows)[:, self.unused :].softmax(-1)
        weights, index = scores.topk(self.top, -1)
        return self.leave(self.experts(rows, index + self.unused, weights).view(x.shape))


def batch(samples: int = 3, length: int = 5) -> Tensor:
    return torch.randn(samples, length, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.fixture(autouse=True)
def _in_float64() -> object:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def kinds(model: nn.Module) -> dict[str, str]:
    """Kind of the site that each parameter's gradients came from."""
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        wave(model, batch(), reduction="sum").backward()
    return {name: norms.coverage[name].kind for name, _ in model.named_parameters()}


RUNS = [loop_over_experts, gathered_matrices, grouped_products]


@pytest.mark.parametrize("transposed", [False, True], ids=["out in", "in out"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_fused_experts_are_exact_with_every_kernel_and_by_formula(run: Run, transposed: bool) -> None:
    """One expert has no token at all, and none gets a token of every sample."""
    for top in (1, 2):
        model = Mixture(run, top, transposed, unused=1 if top == 1 else 0)
        assert_norms_of(model, batch())
        assert_private_sums_of(model, batch(4, 3))
    of = kinds(model)
    assert {of[f"experts.{name}"] for name in ("up", "down", "up_bias", "down_bias")} == {"products"}
    assert of["router.weight"] == "linear"


def assert_used_otherwise(run: Run) -> None:
    model = Mixture(run)
    assert_norms_of(model, batch())
    assert kinds(model)["experts.up"] == "generic"


def test_a_weight_that_is_used_otherwise_too_is_run_again_sample_by_sample() -> None:
    assert_used_otherwise(all_tokens_to_all)


def capacity(own: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """An expert takes the first four rows of the batch that chose it, whoever came later goes without."""
    before = F.one_hot(index[:, 0], E).cumsum(0).gather(1, index[:, :1])
    return loop_over_experts(own, x, index[:, :1], weights[:, :1] * (before <= 4))


def test_experts_of_limited_capacity_let_samples_act_on_each_other_and_are_refused() -> None:
    model = Mixture(capacity, 1)
    with refusal("other samples are replaced"), gramian.per_sample_norms(model, loss_reduction="sum"):
        wave(model, batch(6, 5), reduction="sum").backward()


class Attention(nn.Module):
    def __init__(self, *, need_weights: bool = False, p: float = 0.0, **options: object) -> None:
        super().__init__()
        self.enter, self.need_weights = nn.Linear(D, D), need_weights
        self.own = nn.MultiheadAttention(D, 2, dropout=p, batch_first=True, **options)  # type: ignore[arg-type]
        for q in self.parameters():
            nn.init.normal_(q, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        other = h if self.own._qkv_same_embed_dim and not self.need_weights else torch.cat([h, h.tanh()], 1)
        if not self.own._qkv_same_embed_dim:
            other = torch.cat([other, other], 2)
        y: Tensor = self.own(h, other, other, need_weights=self.need_weights)[0]
        return y


@pytest.mark.parametrize(
    "options",
    [{}, {"need_weights": True}, {"kdim": 2 * D, "vdim": 2 * D}, {"bias": False}],
    ids=["packed", "other keys", "apart", "no bias"],
)
def test_attention_is_exact_by_formula(options: dict[str, object]) -> None:
    model = Attention(**options)  # type: ignore[arg-type]
    assert_norms_of(model, batch())
    assert_private_sums_of(model, batch(4, 3))
    assert {kind for name, kind in kinds(model).items() if name.startswith("own")} == {"products"}


def test_attention_with_what_is_added_to_its_keys_runs_again() -> None:
    model = Attention(add_bias_kv=True)
    assert_norms_of(model, batch())
    assert "generic" in kinds(model)["own.in_proj_weight"]


def test_packed_documents_go_through_experts_token_by_token() -> None:
    model, x = Mixture(loop_over_experts), batch(2, 6)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 4, 4]])
    with gramian.per_sample_norms(model, loss_reduction="sum", sample_ids=ids) as norms:
        model(x).square().sum().backward()
    for unit in range(5):
        model.zero_grad()
        model(x).square()[ids == unit].sum().backward()
        want = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        torch.testing.assert_close(norms.values[unit], want, rtol=1e-12, atol=0)


def test_a_layer_that_is_called_twice_and_a_checkpoint() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mixture(grouped_products)

        def forward(self, x: Tensor) -> Tensor:
            run = partial(checkpoint, self.mix, use_reentrant=False)
            y: Tensor = run(self.mix(x))
            return y

    assert_norms_of(Twice(), batch())
    assert_private_sums_of(Twice(), batch(4, 3))


class Biased(nn.Module):
    """A linear layer whose output meets a table of the module that holds it, and a tensor without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.table = nn.Linear(D, D), nn.Parameter(torch.randn(E, D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        empty = (y @ self.table.mT)[..., :0].unsqueeze(-2).squeeze(-2)
        return y + self.table[:2].cumsum(0).sum(0) + empty.sum()


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_that_begins_anew_after_its_own_layers_have_run_counts_their_calls_once(recomputed: bool) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.biased = Biased()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = partial(checkpoint, self.biased, use_reentrant=False)(x) if recomputed else self.biased(x)
            return y

    assert_norms_of(Around(), batch())
    assert_private_sums_of(Around(), batch(4, 3))


class Router(nn.Module):
    """A matrix and, with `scales` numbers, a scale: 1 for all experts, or one for each."""

    def __init__(self, scales: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(E, D)), nn.Parameter(torch.randn(scales))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).softmax(-1) * (1.0 + self.scale)


@pytest.mark.parametrize(("scales", "kind"), [(E, "products"), (1, "generic")])
def test_a_module_with_a_matrix_of_its_own_is_found(scales: int, kind: str) -> None:
    """A single scale acts on all features of a row: no sum of rows is its gradient."""
    model = nn.Sequential(nn.Linear(D, D), Router(scales))
    assert_norms_of(model, batch())
    assert kinds(model)["1.weight"] == kind


def test_no_index_reads_outside_of_the_owners_of_a_row() -> None:
    """A CPU says so, CUDA ends the process: the weights of experts are picked by token and by choice."""
    scores, place = torch.arange(8.0).reshape(4, 2), (torch.tensor([3, 0, 1]), torch.tensor([1, 0, 1]), None)
    owners = RowOwners([scores], [FIRST], batch=2)

    def pick(x: Tensor, index: tuple[Tensor | None, ...]) -> Tensor:
        assert x.shape[-1] == 2, "the choice is read outside"
        return x[index]

    pick.__name__, picked = "__getitem__", scores[place]
    owners.follow("__getitem__", pick, (scores, place), {}, picked)
    token_of = owners._of[scores].rows
    assert owners._of[picked].rows.tolist() == token_of[place[0]].tolist()


def test_a_loss_that_a_layer_keeps_on_itself_comes_through_its_products() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(D, H, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.w
            self.kept = h.square().sum(1)
            return h

    model, x = Keeps(), torch.randn(3, D, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        (model(x).sum(1) + 10 * model.kept).sum().backward()
    alone = [torch.autograd.grad((model(row).sum(1) + 10 * model.kept).sum(), model.w)[0].norm() for row in x.split(1)]
    torch.testing.assert_close(norms.values, torch.stack(alone), rtol=1e-12, atol=0)
