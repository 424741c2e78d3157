"""Whose labels the Fisher is of: the data's, the model's own by drawing, or all of them at the softmax head."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramian
from gramian.curvature.estimate.likelihood import Softmax
from gramian.curvature.refresh import refresh_schedule
from gramian.oracles import dense_kfac
from tests.curvature.problems import (
    IGNORE,
    PROBLEMS,
    assert_close,
    assert_same_factors,
    assert_tensors,
    calls_of,
    classes,
    cross_entropy,
    kfac,
    narrow,
    normal,
    oracle,
    seeded,
    tokens,
    written,
)
from tests.curvature.test_factors import peer_factors
from tests.kit import networks
from tests.kit.refusals import refusal
from tests.kit.toys import Toy

pytestmark = pytest.mark.oracle


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sharp_gpt2() -> nn.Module:
    """Predictions that are confident, and other at every position."""
    model = seeded(networks.hf_gpt2)
    with torch.no_grad():
        model.transformer.ln_f.weight *= 4
    return model


def net(inputs: int = 7, outputs: int = 9) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)))


# ---- the data's own labels -------------------------------------------------------------------------------------------


def test_empirical_factors_of_a_batch_are_those_of_the_user_s_own_pass() -> None:
    p = PROBLEMS["gpt"]
    found = kfac()
    found.collect_kfac_factors(p.model(), (p.inputs, p.targets))
    assert_same_factors(found, p.captured())


@pytest.mark.parametrize("mask", [False, True])
def test_labels_of_a_causal_model_are_shifted_as_hugging_face_does(mask: bool) -> None:
    model, collected, captured = sharp_gpt2(), kfac(), kfac()
    batch = {"input_ids": classes(13, 3, 6), "labels": classes(13, 3, 6, seed=2)}
    batch["labels"][0, 1:3] = IGNORE
    if mask:
        batch["attention_mask"] = torch.ones(3, 6)
        batch["attention_mask"][2, 4:] = batch["attention_mask"][1, 5:] = 0
        batch["labels"][batch["attention_mask"] == 0] = IGNORE
    weights = F.pad(batch["labels"][:, 1:] != IGNORE, (0, 1)).double()
    collected.collect_kfac_factors(model, batch)
    with captured.capture(model, token_weights=weights):
        model(**batch).loss.backward()
    assert_same_factors(collected, captured, 1e-6)  # Hugging Face rounds the logits to float32
    assert collected.kfac_factors["transformer.wpe"].facts.terms == int(weights.sum())
    assert collected.head == "lm_head"


# ---- drawn labels ----------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(logits, labels, counted) of every loss that a collection forms."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    real = Softmax.summed_loss

    def noted(self: Softmax, logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        seen.append((logits.detach(), labels, counted))
        return real(self, logits, labels, counted)

    monkeypatch.setattr(Softmax, "summed_loss", noted)
    return seen


def test_drawn_labels_are_aligned_with_the_logits_of_a_causal_model(drawn: list[Any]) -> None:
    model, found = sharp_gpt2(), kfac()
    batch = {"input_ids": classes(13, 3, 6), "attention_mask": torch.ones(3, 6)}
    batch["attention_mask"][2, 4:] = 0
    found.collect_kfac_factors(model, batch, "mc", n_samples=60)
    logits = drawn[0][0]
    plain = model(**batch).logits
    assert_close(logits, plain.detach())
    probabilities = logits.softmax(-1)
    counted = F.pad(batch["attention_mask"][:, 1:] != 0, (0, 1))
    entropy = (-(probabilities * logits.log_softmax(-1)).sum(-1))[counted]
    losses = []
    for at, labels, which in drawn:
        assert torch.equal(which, counted)
        losses.append(F.cross_entropy(at[counted], labels[counted], reduction="none"))
    spread = torch.stack(losses).std() / torch.stack(losses).numel() ** 0.5
    assert abs(float(torch.stack(losses).mean() - entropy.mean())) <= 4 * float(spread)
    # The same labels one position further on are nowhere near.
    wrong = [F.cross_entropy(at[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) for at, labels, _ in drawn]
    assert float(torch.stack(wrong).mean()) > float(entropy.mean()) + 20 * float(spread)
    assert found.kfac_factors["transformer.wpe"].facts.terms == 60 * int(counted.sum())
    assert found.record()["layers"]["transformer.wpe"]["estimate"] == "mc"


def test_a_sample_s_labels_are_its_own_in_any_order() -> None:
    p = PROBLEMS["gpt"]
    ids, order = torch.tensor([40, 7, 12]), [2, 0, 1]
    model, straight, permuted, otherwise = p.model(), kfac(), kfac(), kfac()
    straight.collect_kfac_factors(model, (p.inputs, p.targets), "mc", generator=generator(), sample_ids=ids)
    permuted.collect_kfac_factors(
        model, (p.inputs[order], p.targets[order]), "mc", generator=generator(), sample_ids=ids[order]
    )
    assert_same_factors(permuted, straight)
    otherwise.collect_kfac_factors(model, (p.inputs, p.targets), "mc", generator=generator(), sample_ids=ids + 1)
    with pytest.raises(AssertionError):
        assert_same_factors(otherwise, straight)


@pytest.mark.parametrize("shape", [(7,), (7, 4)])
def test_labels_do_not_depend_on_how_a_batch_is_split(shape: tuple[int, ...]) -> None:
    logits, ids = normal(*shape, 5), torch.tensor([3, 1, 4, 15, 9, 2, 6])
    for draw in (0, 1):
        whole = Softmax().draw(logits, 11, ids, draw)
        for cut in range(8):
            parts = [Softmax().draw(logits[s], 11, ids[s], draw) for s in (slice(0, cut), slice(cut, 7))]
            assert torch.equal(torch.cat(parts), whole)
    many = torch.stack([Softmax().draw(logits, 11, ids, draw) for draw in range(8)])
    assert len(many.flatten(1).unique(dim=0)) == 8
    assert not torch.equal(Softmax().draw(logits, 12, ids, 0), many[0])


def test_labels_are_drawn_with_the_model_s_probabilities() -> None:
    logits = 2 * normal(1, 6).expand(2000, 10, 6)
    labels = Softmax().draw(logits, 5, torch.arange(2000), 0)
    counts, expected = labels.flatten().bincount(minlength=6).double(), 20_000 * logits[0, 0].softmax(-1)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 5 degrees of freedom, one in a thousand
    confident = torch.full((50, 6), -1e4).double().index_fill(1, torch.tensor([3]), 0.0)
    assert set(Softmax().draw(confident, 5, torch.arange(50), 0).tolist()) == {3}


def exact_factors(model: nn.Module, x: Tensor, layers: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G with every label of every token in turn, weighted by its probability."""
    with torch.no_grad():
        p_TV = model(x).softmax(-1).flatten(0, -2)
    found: dict[str, Any] = {}
    for k in range(p_TV.shape[1]):
        target = torch.full((len(p_TV),), k)

        def backward(target: Tensor = target) -> None:
            F.cross_entropy(model(x).flatten(0, -2), target, reduction="sum").backward()

        for layer, uses in calls_of(model, backward, layers).items():
            A, G = dense_kfac.factors(
                tokens(model.get_submodule(layer), [(a, g * p_TV[:, k].sqrt().view(*g.shape[:-1], 1)) for a, g in uses]),
                len(p_TV), 1.0, bias=True,
            )  # fmt: skip
            found[layer] = (A, found[layer][1] + G if layer in found else G)
    return found


@pytest.mark.full
def test_drawn_factors_approach_the_exact_ones_as_one_over_root_n() -> None:
    model, x = net(), normal(6, 7)
    exact = exact_factors(model, x, ["0", "2"])
    errors: dict[tuple[str, int], list[float]] = {}
    for n, seed in itertools.product((9, 144), range(3)):
        found = kfac(seed=seed)
        found.collect_kfac_factors(model, (x, classes(9, 6)), "mc", n_samples=n)
        for layer, (A, G) in exact.items():
            block = found.kfac_factors[layer]
            assert_close(block.A.to_dense(), A)
            errors.setdefault((layer, n), []).append(float((block.G.to_dense() - G).norm() / G.norm()))
    for layer in exact:
        few, many = (sum(errors[layer, n]) / 3 for n in (9, 144))
        assert 2 < few / many < 8  # √16 = 4
        assert many < 0.15


@pytest.mark.full
def test_intervals_of_drawn_fishers_cover_the_exact_one() -> None:
    """tr G of the head from 16 draws, mean ± t·s/√16 at 95 %: of 400 seeds 368 to 392 cover it, where a right interval leaves
    that range for 1 choice of seeds in 220."""
    model, x, draws, seeds = net(), normal(6, 7), 16, 400
    with torch.no_grad():
        logits = model(x)
    p_BV = logits.softmax(-1)
    exact = float((1 - p_BV.square().sum(-1)).mean())
    squares_BV = p_BV.square().sum(-1, keepdim=True) - 2 * p_BV + 1  # ‖p − e_y‖²
    drawn = torch.stack([
        squares_BV.gather(1, Softmax().draw(logits, key, torch.arange(6), draw)[:, None]).mean()
        for key in (refresh_schedule.draw_seed(generator(seed)) for seed in range(seeds))
        for draw in range(draws)
    ]).view(seeds, draws)  # fmt: skip
    for seed in range(3):
        found = kfac()
        found.collect_kfac_factors(model, (x, classes(9, 6)), "mc", n_samples=draws, generator=generator(seed))
        assert_close(found.kfac_factors["2"].G.to_dense().trace(), drawn[seed].mean())
    half = 2.1314 * drawn.std(1) / draws**0.5  # t of 15 degrees of freedom
    covered = int(((drawn.mean(1) - exact).abs() <= half).sum())
    assert 368 <= covered <= 392
    assert abs(float(drawn.mean()) - exact) < 4 * float(drawn.std()) / drawn.numel() ** 0.5


# ---- every label at the head -----------------------------------------------------------------------------------------


def exact_head(
    model: nn.Module, x: Tensor, y: Tensor, weights: Tensor | None = None, **options: Any
) -> gramian.KFACNaturalGradient:
    """Factors of the user's own pass, the head exact."""
    found = kfac(kfac_true_fisher_head=True, **options)
    counted = (y != IGNORE).double() if weights is None else weights
    with found.capture(model, token_weights=counted):
        terms = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORE)
        ((terms * counted.flatten()).sum() / counted.sum()).backward()
    return found


@pytest.mark.parametrize(
    "count, policy, kind",
    [(2, "all", "diagonal minus low rank"), (5, "all", "dense"), (2, "small_only", "dense"),
     (2, "hybrid", "diagonal minus low rank"), (4, "auto", "diagonal minus low rank")],
)  # fmt: skip
@pytest.mark.parametrize("what", ["all", "masked", "weighted"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_exact_head_is_the_softmax_fisher(count: int, policy: str, kind: str, what: str, sharing: str) -> None:
    model, x, y = net(), normal(count, 2, 7), classes(9, count, 2)
    weights = torch.ones(count, 2).double()
    if what != "all":
        y[0, 1] = IGNORE
        weights[0, 1] = 0
    if what == "weighted":
        weights[1:] *= 2.5
    found = exact_head(model, x, y, weights, kfac_policy=policy, weight_sharing=sharing)
    logits = model(x).detach().flatten(0, 1)
    block = found.kfac_factors["2"]
    G = dense_kfac.softmax_fisher(logits, float(weights.sum()), weights.flatten())
    assert_close(block.G.to_dense(), G)
    assert block.G.kind == kind
    about = found.record()["layers"]
    assert (about["2"]["estimate"], about["0"]["estimate"]) == ("exact softmax", "empirical")
    assert float((block.G.to_dense().sum(0)).abs().max()) < 1e-15  # G·1 = 0


def test_the_exact_head_has_the_tokens_with_a_loss_where_no_weights_are_given() -> None:
    model, x, y = net(), normal(3, 2, 7), classes(9, 3, 2)
    y[1, 0] = IGNORE
    found = kfac(kfac_true_fisher_head=True)
    with found.capture(model, num_terms=5):
        cross_entropy(model, x, y, "mean").backward()
    weights = (y != IGNORE).double().flatten()
    G = dense_kfac.softmax_fisher(model(x).detach().flatten(0, 1), 5, weights)
    assert_close(found.kfac_factors["2"].G.to_dense(), G)


def test_the_exact_head_is_that_of_curvlinops() -> None:
    model, x, y = net(), normal(12, 7), classes(9, 12)
    theirs = peer_factors(model, nn.CrossEntropyLoss(), x, y, fisher_type="type-2")
    found = kfac(kfac_true_fisher_head=True)
    with found.capture(model, num_terms=12):
        cross_entropy(model, x, y, "mean").backward()
    mine = written(found)
    assert_tensors({key: mine[key] for key in ("0 A", "2 A", "2 G")}, {k: theirs[k] for k in ("0 A", "2 A", "2 G")})


@pytest.mark.parametrize("policy", [pytest.param("all", marks=pytest.mark.full), "small_only"])
def test_a_wide_exact_head_is_a_subset_or_a_diagonal(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    model, x, y = net(), normal(4, 2, 7), classes(9, 4, 2)
    G = dense_kfac.softmax_fisher(model(x).detach().flatten(0, 1), 8)
    narrow(monkeypatch, 8)
    if policy == "small_only":
        factor = exact_head(model, x, y, kfac_policy=policy).kfac_factors["2"].G
        assert factor.kind == "diagonal"
        assert_close(factor.diagonal(), G.diagonal())
        return
    drawn = []
    for seed in range(200):
        factor = exact_head(model, x, y, kfac_auto_t_max=3, seed=seed).kfac_factors["2"].G
        assert (factor.kind, factor.rank) == ("diagonal minus low rank", 3)
        drawn.append(factor.dense())
    stack = torch.stack(drawn)
    assert bool(((stack.mean(0) - G).abs() <= 5 * stack.std(0) / 200**0.5 + 1e-12).all())


@pytest.mark.parametrize("parts", [[5], [1, 4], [0, 2, 0, 3]])
def test_the_exact_head_does_not_depend_on_the_split(parts: list[int]) -> None:
    model, x, y = net(), normal(5, 7), classes(9, 5)
    found = kfac(kfac_true_fisher_head=True)
    with found.capture(model, num_terms=0, loss_reduction="sum") as cap:
        for rows in torch.arange(5).split(parts):
            cap.next(num_terms=len(rows))
            cross_entropy(model, x[rows], y[rows]).backward()
    assert_close(found.kfac_factors["2"].G.to_dense(), dense_kfac.softmax_fisher(model(x).detach(), 5))


@pytest.mark.parametrize("count", [2, 6])
def test_true_is_exact_at_the_head_and_drawn_elsewhere(count: int) -> None:
    model, batch = net(), (normal(count, 2, 7), classes(9, count, 2))
    true, mc = kfac(), kfac()
    true.collect_kfac_factors(model, batch, "true", generator=generator(3), n_samples=2)
    mc.collect_kfac_factors(model, batch, "mc", generator=generator(3), n_samples=2)
    logits = model(batch[0]).detach().flatten(0, 1)
    assert_close(true.kfac_factors["2"].G.to_dense(), dense_kfac.softmax_fisher(logits, 2 * count))
    assert_close(true.kfac_factors["0"].G.to_dense(), mc.kfac_factors["0"].G.to_dense())
    assert_close(true.kfac_factors["2"].A.to_dense(), mc.kfac_factors["2"].A.to_dense())
    about = true.record()["layers"]
    assert (about["2"]["estimate"], about["0"]["estimate"]) == ("exact softmax", "mc")


def test_the_exact_head_of_a_causal_model_leaves_out_what_has_no_loss() -> None:
    model, found = sharp_gpt2(), kfac(ema_decay=0.0)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # untied
    batch = {"input_ids": classes(13, 2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    found.collect_kfac_factors(model, batch, "true")
    counted = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).double()
    logits = model(**batch).logits.detach().flatten(0, 1)
    G = dense_kfac.softmax_fisher(logits, 4, counted.flatten())
    assert_close(found.kfac_factors["lm_head"].G.to_dense(), G)


@pytest.mark.parametrize("mode", ["pi", "factored", "joint"])
@pytest.mark.parametrize("p", [-1.0, 1.0, -0.5, 0.3])
@pytest.mark.parametrize("count", [2, 6])
def test_powers_of_an_exact_head_are_those_of_the_whole_matrix(mode: str, p: float, count: int) -> None:
    model, x, y = net(), normal(count, 2, 7), classes(9, count, 2)
    found = exact_head(model, x, y, damping=0.01, damping_mode=mode)
    block, g = found.kfac_factors["2"], torch.cat([model[2].weight.grad, model[2].bias.grad[:, None]], dim=1)
    got = found.compute_natural_gradient(model, power=p)
    want = dense_kfac.natural(block.A.to_dense(), block.G.to_dense(), g, p, mode, 0.01)
    assert_close(torch.cat([got["2.weight"], got["2.bias"][:, None]], dim=1), want, 1e-9)


# ---- which layer is the head -----------------------------------------------------------------------------------------


def returns(form: Callable[[Tensor], Any]) -> Toy:
    """A model that returns its logits in some form."""
    return Toy(
        lambda net, x: net.form(net.out(torch.tanh(net.inner(x)))),
        inner=nn.Linear(7, 6),
        out=nn.Linear(6, 9),
        form=form,
    )


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda y: y,
    "float": lambda y: y.float(),
    "view": lambda y: y.view(-1, 9),
    "tuple": lambda y: (y, None),
    "dict": lambda y: {"logits": y},
}


def logits(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("form", FORMS)
def test_the_head_is_the_layer_whose_output_the_model_returns(form: str) -> None:
    model, x, y = seeded(lambda: returns(FORMS[form])), normal(4, 7), classes(9, 4)
    found = kfac(kfac_true_fisher_head=True)
    with found.capture(model, num_terms=4):
        F.cross_entropy(logits(model(x)), y).backward()
    assert found.head == "out"
    tolerance = 1e-6 if form == "float" else 1e-10
    want = dense_kfac.softmax_fisher(logits(model(x)).detach(), 4)
    assert_close(found.kfac_factors["out"].G.to_dense(), want, tolerance)


def test_the_head_is_what_the_model_says_it_is() -> None:
    model, x, y = seeded(lambda: returns(lambda y: y.log_softmax(-1))), normal(4, 7), classes(9, 4)
    model.get_output_embeddings = lambda: model.out
    found = kfac(kfac_true_fisher_head=True)
    with found.capture(model, num_terms=4):
        F.nll_loss(model(x), y).backward()
    assert found.head == "out"
    assert_close(found.kfac_factors["out"].G.to_dense(), dense_kfac.softmax_fisher(model(x).detach(), 4))


def test_the_head_can_be_named() -> None:
    model, x, y = seeded(lambda: returns(lambda y: y.log_softmax(-1))), normal(4, 7), classes(9, 4)
    lost = kfac(kfac_true_fisher_head=True)
    with refusal("head: no trained layer was seen.*expected head="), lost.capture(model, num_terms=4):
        F.nll_loss(model(x), y).backward()
    found = kfac(kfac_true_fisher_head=True)
    with found.capture(model, num_terms=4, head="out"):
        F.nll_loss(model(x), y).backward()
    assert_close(found.kfac_factors["out"].G.to_dense(), dense_kfac.softmax_fisher(model(x).detach(), 4))


@pytest.mark.parametrize("head, message", [
    ("nowhere", "head: the model has no module 'nowhere'"),
    ("form", "head: the model has no module 'form'"),
    ("norm", "head: 'norm' is not a trained layer with K-FAC factors"),
    ("frozen", "head: 'frozen' is not a trained layer with K-FAC factors"),
])  # fmt: skip
def test_an_invalid_head_is_refused(head: str, message: str) -> None:
    model = seeded(lambda: returns(lambda y: y))
    model.norm, model.frozen = nn.LayerNorm(6), nn.Linear(2, 2).requires_grad_(False)
    with refusal(message):
        kfac(kfac_true_fisher_head=True).capture(model, num_terms=4, head=head)


def test_a_grouped_convolution_is_not_an_exact_head() -> None:
    model, found = seeded(lambda: nn.Sequential(nn.Conv2d(4, 4, 1, groups=2))), kfac(kfac_true_fisher_head=True)
    with refusal("head: was not found"), found.capture(model, num_terms=50):
        F.cross_entropy(model(normal(2, 4, 5, 5)), classes(4, 2, 5, 5)).backward()


OTHER_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared error": lambda z, y: F.mse_loss(z, F.one_hot(y, 9).double()),
    "temperature": lambda z, y: F.cross_entropy(z / 0.5, y),
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 9).double()),
    "too large": lambda z, y: 1.5 * F.cross_entropy(z, y),
}


@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_a_loss_other_than_the_cross_entropy_of_the_head_is_refused(loss: str) -> None:
    model, x, y = net(), normal(4, 7), classes(9, 4)
    found = kfac(kfac_true_fisher_head=True)
    with pytest.raises(gramian.GramianError) as error, found.capture(model, num_terms=4):
        OTHER_LOSSES[loss](model(x), y).backward()
    text = str(error.value)
    assert "\n" not in text and text.startswith("2: the gradient of token 0 is not that of a cross entropy")
    assert text.endswith("or kfac_true_fisher_head=False")
    assert not found.kfac_factors


@pytest.mark.parametrize("terms", [5, 8, 400])
def test_more_terms_than_there_are_show_at_an_exact_head(terms: int) -> None:
    model, x, y = net(), normal(4, 7), classes(9, 4)
    found = kfac(kfac_true_fisher_head=True)
    with refusal("with the right loss_reduction, num_terms and loss_scale"), found.capture(model, num_terms=terms):
        cross_entropy(model, x, y, "mean").backward()


def test_an_empty_micro_batch_proves_nothing_about_the_loss() -> None:
    model, x, y = net(), normal(4, 7), classes(9, 4)
    found = kfac(kfac_true_fisher_head=True)
    with refusal("is not that of a cross entropy"), found.capture(model, num_terms=0, loss_reduction="sum") as cap:
        cross_entropy(model, x[:0], y[:0]).backward()
        cap.next(num_terms=4)
        (3 * cross_entropy(model, x, y)).backward()


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothed_labels_are_a_cross_entropy_too(smoothing: float) -> None:
    model, x, y = net(), normal(4, 7), classes(9, 4)
    found = kfac(kfac_true_fisher_head=True)
    with found.capture(model, num_terms=4):
        F.cross_entropy(model(x), y, label_smoothing=smoothing).backward()
    assert_close(found.kfac_factors["2"].G.to_dense(), dense_kfac.softmax_fisher(model(x).detach(), 4))


# ---- the user's model, afterwards ------------------------------------------------------------------------------------


def fragile() -> Toy:
    """Everything that a pass of somebody else's could change."""
    return Toy(
        lambda net, x: net.head(torch.tanh(net.frozen(net.drop(net.norm(net.first(x)))))),
        first=nn.Linear(7, 6),
        norm=nn.BatchNorm1d(6),
        drop=nn.Dropout(0.5),
        frozen=nn.Linear(6, 6).requires_grad_(False),
        head=nn.Linear(6, 9),
    )


def state(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "modes": [m.training for m in model.modules()],
        "trained": [p.requires_grad for p in model.parameters()],
        "hooks": [(name, dict(getattr(m, name))) for m in model.modules() for name in hooks],
        "tensor hooks": [p._backward_hooks or None for p in model.parameters()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "parameters": [id(p) for p in model.parameters()],
        "gradients": [id(p.grad) for p in model.parameters()],
    }


@pytest.mark.parametrize("kind", ["empirical", "mc", "true"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_collection_leaves_no_trace(kind: str, fails: bool) -> None:
    model, x, y = seeded(fragile).train(), normal(4, 7), classes(9, 4)
    model.frozen.eval()
    F.cross_entropy(model(x), y).backward()
    before, random = state(model), torch.get_rng_state()
    numbers = {n: t.clone() for n, t in model.state_dict().items()}
    held = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    found = kfac()
    if fails:
        with refusal("labels: have shape"):
            found.collect_kfac_factors(model, (x, classes(9, 5)), kind)
    else:
        found.collect_kfac_factors(model, (x, y), kind)
        assert found.kfac_factors
    assert torch.equal(torch.get_rng_state(), random)
    assert state(model) == before
    assert all(torch.equal(t, numbers[n]) for n, t in model.state_dict().items())
    assert all(torch.equal(p.grad, held[n]) for n, p in model.named_parameters() if p.grad is not None)


def test_the_generator_decides_and_the_global_one_does_not() -> None:
    model, batch = net(), (normal(4, 7), classes(9, 4))
    results = []
    for seed, global_seed in ((0, 1), (0, 2), (5, 1)):
        torch.manual_seed(global_seed)
        found = kfac()
        found.collect_kfac_factors(model, batch, "mc", generator=generator(seed))
        results.append(found)
    assert_same_factors(results[1], results[0])
    with pytest.raises(AssertionError):
        assert_same_factors(results[2], results[0])


def test_refreshes_of_one_object_draw_anew_and_objects_alike() -> None:
    model, batch = net(), (normal(4, 7), classes(9, 4))
    one, two = kfac(), kfac()
    sequence = []
    for found in (one, one, two):
        found.collect_kfac_factors(model, batch, "mc")
        sequence.append(written(found)["2 G"])
    assert torch.equal(sequence[0], sequence[2]) and not torch.equal(sequence[0], sequence[1])


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_labels_may_be_missing_where_they_are_drawn() -> None:
    model, x = net(), normal(4, 7)
    found, with_labels = kfac(), kfac()
    found.collect_kfac_factors(model, {"input": x}, "mc", generator=generator())
    with_labels.collect_kfac_factors(model, (x, classes(9, 4)), "mc", generator=generator())
    assert_same_factors(found, with_labels)
    with refusal("labels: expected them in the batch"):
        kfac().collect_kfac_factors(model, {"input": x}, "empirical")


def test_samples_without_a_label_do_not_count() -> None:
    model, x, y = net(), normal(4, 7), classes(9, 4)
    some, rest = kfac(), kfac()
    some.collect_kfac_factors(model, (x, y.masked_fill(torch.arange(4) == 2, IGNORE)))
    rest.collect_kfac_factors(model, (x[[0, 1, 3]], y[[0, 1, 3]]))
    assert_same_factors(some, rest)


@pytest.mark.parametrize("kind", ["empirical", "mc", "true"])
def test_positions_outside_the_attention_mask_do_not_count(kind: str, drawn: list[Any]) -> None:
    """Also where their labels are not ignored."""
    model, x, y = net(), normal(3, 4, 7), classes(9, 3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    masked, ignored = kfac(), kfac()
    masked.collect_kfac_factors(model, {"input": x, "labels": y, "attention_mask": mask}, kind, generator=generator())
    ignored.collect_kfac_factors(model, (x, y.masked_fill(mask == 0, IGNORE)), kind, generator=generator())
    assert_same_factors(masked, ignored)
    assert masked.kfac_factors["2"].facts.terms == 7
    assert all(torch.equal(counted, mask != 0) for _, _, counted in drawn)


@pytest.mark.parametrize(
    "batch, options, message",
    [
        (
            (normal(4, 7), classes(9, 4)),
            {"fisher_type": "exact"},
            'fisher_type: expected one of "empirical", "mc", "true"',
        ),
        ((normal(4, 7), classes(9, 4)), {"fisher_type": "mc", "n_samples": 0}, "n_samples: expected an integer"),
        (normal(4, 7), {}, "batch: expected a mapping"),
        ({"labels": classes(9, 4)}, {}, "batch: expected tensors"),
        ((normal(4, 7), normal(4, 9)), {}, "labels: expected integer classes"),
        ((normal(4, 7), classes(9, 4, 1)), {}, "labels: have shape"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(batch: Any, options: dict[str, Any], message: str) -> None:
    with refusal(message):
        kfac().collect_kfac_factors(net(), batch, **options)


def test_the_exact_head_changes_its_own_g_and_nothing_else() -> None:
    p = PROBLEMS["gpt"]
    found = p.captured(kfac_true_fisher_head=True)
    for layer, (A, G) in oracle("gpt").items():
        block = found.kfac_factors[layer]
        assert_close(block.A.to_dense(), A, what=layer)
        if layer != "head":
            assert_close(block.G.to_dense(), G, what=layer)
    logits_TV = p.model()(p.inputs).detach().flatten(0, 1)
    assert_close(found.kfac_factors["head"].G.to_dense(), dense_kfac.softmax_fisher(logits_TV, p.terms))
