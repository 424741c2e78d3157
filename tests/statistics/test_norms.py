"""`gramian.per_sample_norms` against a loop of single-sample backward passes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.taps.gradients import outer
from gramian.taps.model.whole_layers import whole_classes
from tests.kit.matrix import sample, some
from tests.kit.models import CASES
from tests.oracles import sample_statistics
from tests.statistics.problems import assert_norms, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]

MATRIX = [*itertools.product(CASES, ("mean", "sum"), ("auto", "direct", "gram"), (torch.float64, torch.float32))]


@pytest.mark.parametrize("name, reduction, algorithm, dtype", sample(MATRIX, 46))
def test_norms_are_those_of_the_loop(name: str, reduction: str, algorithm: str, dtype: torch.dtype) -> None:
    p = problem(name, 4, dtype)
    model = p.model()
    with gramian.per_sample_norms(model, loss_reduction=reduction, algorithm=algorithm) as norms:
        p.backward(model, p.batch, reduction)
    assert norms.values.shape == (4,)
    assert norms.values.dtype == dtype
    assert_norms(norms.values, p.norms(), p.tolerance)


@pytest.mark.parametrize("name", some(CASES, 0))
def test_the_gradient_is_the_ordinary_one_bit_for_bit(name: str) -> None:
    p = problem(name, 4, torch.float32)
    model, plain = p.model(), p.model()
    p.backward(plain, p.batch)
    with gramian.per_sample_norms(model):
        p.backward(model, p.batch)
    for (key, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), key
        if name == "broadcast":  # what stands on a shared row runs on B rows now, and rounds otherwise
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-7)
        else:
            assert got.grad is None or torch.equal(got.grad, want.grad), key


@pytest.mark.parametrize("name", ["mlp", "gpt", "hf_llama", "convnet"])
def test_norms_of_a_bfloat16_model_are_float32_and_close(name: str) -> None:
    p = problem(name, 4, torch.bfloat16)
    model = p.model()
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, p.batch)
    assert norms.values.dtype == torch.float32
    # The pass itself rounds to 8 bits; what gramian adds to that is within 1e-2.
    torch.testing.assert_close(norms.values.double(), p.norms(), rtol=5e-2, atol=0)


@pytest.mark.parametrize("name", ["mlp", "tied_gpt"])
def test_several_passes_are_concatenated_in_order(name: str) -> None:
    p = problem(name, 6)
    model = p.model()
    with gramian.per_sample_norms(model) as norms:
        for rows in (slice(4, 6), slice(0, 1), slice(1, 4)):
            p.backward(model, p.rows(rows))
    assert_norms(norms.values, p.norms([4, 5, 0, 1, 2, 3]), p.tolerance)


def test_norms_can_be_read_inside_the_block() -> None:
    p = problem("mlp", 6)
    model = p.model()
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, p.rows(slice(0, 2)))
        assert_norms(norms.values, p.norms(slice(0, 2)), p.tolerance)
        p.backward(model, p.rows(slice(2, 6)))
        assert_norms(norms.values, p.norms(), p.tolerance)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_order_is_that_of_the_forwards_when_backwards_run_in_another(name: str) -> None:
    p = problem(name, 6)
    model = p.model()
    with gramian.per_sample_norms(model, "sum") as norms:
        first = p.case.loss(model, *p.rows(slice(0, 2)), reduction="sum")
        second = p.case.loss(model, *p.rows(slice(2, 6)), reduction="sum")
        second.backward()
        first.backward()
    assert_norms(norms.values, p.norms(), p.tolerance)


@pytest.mark.parametrize("coefficient", [0.125, -3.0])
def test_a_float_is_the_coefficient_of_one_samples_loss(coefficient: float) -> None:
    p = problem("gpt", 4)
    model = p.model()
    with gramian.per_sample_norms(model, loss_reduction=coefficient) as norms:
        (coefficient * p.case.loss(model, *p.batch, reduction="sum")).backward()
    assert_norms(norms.values, p.norms(), p.tolerance)


@pytest.mark.parametrize("kind", ["float", "GradScaler", "GradScaler before its first use"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_scale_is_undone(reduction: str, kind: str) -> None:
    p = problem("tied_gpt", 4)
    model = p.model()
    scale = 512.0 if kind == "float" else torch.amp.GradScaler("cpu", init_scale=512.0)
    if kind == "GradScaler":
        scale.scale(torch.ones(()))
    with gramian.per_sample_norms(model, reduction, loss_scale=scale) as norms:
        loss = p.case.loss(model, *p.batch, reduction=reduction)
        (scale * loss if kind == "float" else scale.scale(loss)).backward()
    assert_norms(norms.values, p.norms(), p.tolerance)


def test_a_disabled_scaler_scales_nothing() -> None:
    p = problem("mlp", 4)
    model, scaler = p.model(), torch.amp.GradScaler("cpu", enabled=False)
    with gramian.per_sample_norms(model, loss_scale=scaler) as norms:
        scaler.scale(p.case.loss(model, *p.batch, reduction="mean")).backward()
    assert_norms(norms.values, p.norms(), p.tolerance)


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied_gpt", "convnet", "vit", "reused", "padded_embedding"])
def test_sample_ids_of_rows_join_the_rows_of_a_unit(name: str) -> None:
    p = problem(name, 5)
    model, ids = p.model(), torch.tensor([1, 0, 1, 2, 0])
    with gramian.per_sample_norms(model, "sum", sample_ids=ids) as norms:
        p.backward(model, p.batch, "sum")
    units = [torch.cat([g[ids == u].sum(0).flatten() for g in p.gradients.values()]).norm() for u in range(3)]
    assert_norms(norms.values, torch.stack(units), p.tolerance)


@pytest.mark.parametrize("name", ["linear_3d", "padded_embedding", "rmsnorm", "reused", "lora", "partially_frozen"])
def test_sample_ids_of_tokens_tell_packed_sequences_apart(name: str) -> None:
    # These models treat every token alone: a unit's gradient is that of the batch with all other tokens' losses removed.
    p = problem(name, 2)
    *inputs, targets = p.batch
    ids_BT = torch.tensor([[0, 0, 1, 1, 1, 2], [2, 2, 3, 0, 0, 0]])

    def loss(model: nn.Module, weights_BT: Tensor) -> Tensor:
        terms = F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten(), reduction="none")
        return (terms * weights_BT.flatten()).sum()

    model = p.model()
    with gramian.per_sample_norms(model, "sum", sample_ids=ids_BT) as norms:
        loss(model, torch.ones_like(ids_BT)).backward()
    expected = []
    for unit in range(4):
        reference = p.model()
        loss(reference, ids_BT == unit).backward()
        expected.append(torch.cat([q.grad.flatten() for q in reference.parameters() if q.requires_grad]).norm())
    assert_norms(norms.values, torch.stack(expected), p.tolerance)


def test_next_changes_the_ids_of_the_following_pass() -> None:
    p = problem("mlp", 6)
    model = p.model()
    with gramian.per_sample_norms(model, "sum", sample_ids=torch.tensor([0, 0, 1])) as norms:
        p.backward(model, p.rows(slice(0, 3)), "sum")
        norms.next(sample_ids=torch.tensor([0, 1, 0]))
        p.backward(model, p.rows(slice(3, 6)), "sum")
    pairs = ([0, 1], [2], [3, 5], [4])
    units = [torch.cat([g[pair].sum(0).flatten() for g in p.gradients.values()]).norm() for pair in pairs]
    assert_norms(norms.values, torch.stack(units), p.tolerance)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.accepts_empty_batch])
def test_an_empty_batch_has_no_norms(name: str) -> None:
    p = problem(name, 0)
    model = p.model()
    with gramian.per_sample_norms(model, "sum") as norms:
        p.backward(model, p.batch, "sum")
    assert norms.values.shape == (0,)
    assert norms.values.dtype == torch.float64


@pytest.mark.parametrize("algorithm", ["direct", "gram"])
def test_a_forced_algorithm_is_the_one_that_runs(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("linear_3d", 4)
    model, grams = p.model(), []
    gram = outer.gram_of
    monkeypatch.setattr(outer, "gram_of", lambda outers: grams.append(outers) or gram(outers))
    with gramian.per_sample_norms(model, algorithm=algorithm) as norms:
        p.backward(model, p.batch)
    assert len(grams) == (2 if algorithm == "gram" else 0)
    assert {norms.coverage[key].algorithm for key in ("0.weight", "2.weight")} == {algorithm}


def test_the_automatic_choice_is_the_one_with_fewer_operations() -> None:
    # T = 6 tokens: T (M+N) against M·N is 96 > 63 for the 9×7 layer, 240 < 400 for a 20×20 one.
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 20), nn.Linear(20, 20)).double()
    with gramian.per_sample_norms(model, "sum") as norms:
        model(torch.randn(3, 6, 7, dtype=torch.float64)).square().sum().backward()
    assert [norms.coverage[f"{i}.weight"].algorithm for i in range(3)] == ["direct", "gram", "gram"]
    with gramian.per_sample_norms(model, "sum") as norms:
        model(torch.randn(3, 7, dtype=torch.float64)).square().sum().backward()
    assert {norms.coverage[f"{i}.weight"].algorithm for i in range(3)} == {"rank1"}


@pytest.mark.parametrize("algorithm", ["auto", "gram", "direct"])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_norms_survive_cancellation_in_float32(algorithm: str, offset: float) -> None:
    # Tokens share a large activation and their output gradients sum to almost nothing: Grams alone lose all digits.
    generator = torch.Generator().manual_seed(0)
    x_BTI = torch.randn(3, 16, 40, generator=generator) + offset
    g_BTO = torch.randn(3, 16, 40, generator=generator)
    g_BTO = g_BTO - g_BTO.mean(1, keepdim=True)
    layer = nn.Linear(40, 40, bias=False)
    with gramian.per_sample_norms(layer, "sum", algorithm=algorithm) as norms:
        (layer(x_BTI) * g_BTO).sum().backward()
    g_BOI = torch.einsum("bto,bti->boi", g_BTO.double(), x_BTI.double())
    # What one rounding of the input costs any algorithm: ε · Σ‖g_t‖‖x_t‖ / ‖g‖.
    unavoidable = (
        (g_BTO.double().norm(dim=2) * x_BTI.double().norm(dim=2)).sum(1) * 2**-24 / g_BOI.flatten(1).norm(dim=1)
    )
    error = (norms.values / g_BOI.flatten(1).norm(dim=1) - 1).abs()
    assert (error <= 1e-5 + unavoidable).all(), f"off by {error.tolist()}, unavoidable {unavoidable.tolist()}"


def test_tied_uses_that_cancel_are_not_lost() -> None:
    # Head and embedding gradients of one table nearly cancel: their sum must not be read off rounded squares.
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids_BT: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
            return self.table(ids_BT), self.head(x_BTD)

    generator = torch.Generator().manual_seed(1)
    model = Tied()
    x_BTD = torch.randn(3, 1, 4, generator=generator)
    ids_BT = torch.tensor([[0], [1], [4]])
    nudge = 1e-4 * torch.randn(3, 1, 4, generator=generator)

    def loss(model: nn.Module, ids_BT: Tensor, x_BTD: Tensor, nudge: Tensor) -> Tensor:
        rows_BTD, logits_BTV = model(ids_BT, x_BTD)
        picked = logits_BTV.gather(2, ids_BT[..., None]).sum()
        return picked - (rows_BTD * (x_BTD + nudge)).sum()

    with gramian.per_sample_norms(model, "sum") as norms:
        loss(model, ids_BT, x_BTD, nudge).backward()
    exact = sample_statistics.per_sample_norms(model.double(), loss, (ids_BT, x_BTD.double(), nudge.double()))
    # x + nudge is rounded to float32 before anything is captured: 2⁻²⁴ ‖x‖ of a result of ‖nudge‖.
    assert_norms(norms.values, exact, 1e-3)
    assert float(exact.max()) < 1e-3


def _checkpoint(block: nn.Module) -> None:
    inner = type(block).forward.__get__(block)
    block.forward = lambda x: checkpoint(inner, x, use_reentrant=False)


@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("name", ["gpt", "tied_gpt"])
def test_checkpointed_blocks_count_once(name: str, audit: bool) -> None:
    p = problem(name, 4)
    model = p.model()
    for block in model.blocks:
        _checkpoint(block)
    with gramian.per_sample_norms(model, audit=audit) as norms:
        p.backward(model, p.batch)
    assert_norms(norms.values, p.norms(), p.tolerance)
    assert not whole_classes(model)  # which would be exact whatever the taps count


def test_a_checkpointed_block_inside_a_layer_without_a_formula_counts_once() -> None:
    # The parameters on the root make the whole model such a layer: it is run again sample by sample.
    p = problem("vit", 4)
    model = p.model()
    _checkpoint(model.block)
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, p.batch)
    assert_norms(norms.values, p.norms(), p.tolerance)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "GroupNorm"])
def test_the_epsilon_of_a_norm_layer_counts(kind: str) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(1, 5, eps=0.1) if kind == "GroupNorm" else getattr(nn, kind)(7, eps=0.1)
    model, x_BTD = nn.Sequential(norm, nn.Linear(7, 3)).double(), torch.randn(4, 5, 7, dtype=torch.float64)

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).square().sum()

    with gramian.per_sample_norms(model, "sum", audit=False) as norms:
        loss(model, x_BTD).backward()
    assert_norms(norms.values, sample_statistics.per_sample_norms(model, loss, (x_BTD,)), 1e-9)


def test_only_trained_parameters_count() -> None:
    p = problem("gpt", 3)
    model = p.model()
    for key, q in model.named_parameters():
        q.requires_grad_("ln" in key or key == "head.weight")
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, p.batch)
    chosen = [g.flatten(1) for key, g in p.gradients.items() if "ln" in key or key == "head.weight"]
    assert_norms(norms.values, torch.cat(chosen, 1).norm(dim=1), p.tolerance)
    assert norms.coverage["tokens.weight"].status == "frozen"
    assert norms.coverage["head.weight"].status == "covered"


def test_reading_before_a_backward_is_refused() -> None:
    p = problem("mlp", 2)
    model = p.model()
    norms = gramian.per_sample_norms(model)
    with pytest.raises(gramian.GramianError, match="no backward has run"):
        _ = norms.values
    with pytest.raises(gramian.GramianError, match="no backward ran inside the block"), norms:
        p.case.loss(model, *p.batch, reduction="mean")


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"loss_reduction": "avg"}, 'loss_reduction: expected "mean", "sum"'),
        ({"loss_reduction": 0.0}, "loss_reduction: expected .*a coefficient other than 0"),
        ({"algorithm": "fast"}, "algorithm: expected one of auto, direct, gram"),
        ({"loss_scale": 0.0}, "loss_scale: expected a positive number"),
        ({"loss_scale": float("nan")}, "loss_scale: expected a positive number"),
        ({"batch_size": -1}, "batch_size: expected a number of rows"),
    ],
)
def test_nonsense_is_refused_by_name(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(gramian.GramianError, match=complaint):
        gramian.per_sample_norms(CASES["mlp"].make(torch.float64), **options)


@pytest.mark.parametrize("ids", [torch.zeros(3), torch.zeros(2, dtype=torch.long), torch.tensor([0, -1, 1])])
def test_sample_ids_that_do_not_fit_the_batch_are_refused(ids: Tensor) -> None:
    p = problem("mlp", 3)
    model = p.model()
    with (
        pytest.raises(gramian.GramianError, match="sample_ids: expected"),
        gramian.per_sample_norms(model, sample_ids=ids),
    ):
        p.backward(model, p.batch)


def test_permuting_the_samples_permutes_the_norms() -> None:
    p = problem("tied_gpt", 5)
    model, order = p.model(), [3, 0, 4, 1, 2]
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, p.rows(order))
    assert_norms(norms.values, p.norms(order), p.tolerance)
