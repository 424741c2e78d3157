"""The Fisher of squared errors, Bernoulli outputs, class probabilities and images of classes.

References are torch's own losses under plain hooks, Hessians by `torch.func`, all outcomes written out, and curvlinops.
"""

import itertools
import math
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import curvlinops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramian.core.keyed_random import token_uniforms
from gramian.curvature.estimate.likelihood import Bernoulli, Gaussian, Likelihood, Softmax
from gramian.curvature.refresh import refresh_schedule
from tests.curvature.loss_cases import (
    CASES,
    MSE,
    SIGMA,
    Case,
    binary,
    distributions,
    entropy,
    entropy_last,
    net,
    pictures,
    squared,
)
from tests.curvature.problems import (
    IGNORE,
    assert_close,
    assert_same_factors,
    assert_tensors,
    calls_of,
    classes,
    kfac,
    normal,
    seeded,
    tokens,
    written,
)
from tests.curvature.test_factors import peer_factors
from tests.kit.refusals import refusal
from tests.kit.toys import Toy

pytestmark = pytest.mark.oracle

SHORT = ("mse tokens", "mse image", "bce", "probability tokens", "image with ignored positions", "classes first")
SOME = [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in CASES]

# ---- the data's own targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_empirical_factors_are_those_of_torch_s_own_loss(name: str) -> None:
    case = CASES[name]
    model, found = case.model(), case.collected("empirical")
    for layer, (A, G) in case.factors(model, case.labels).items():
        block = found.kfac_factors[layer]
        assert_close(block.A.to_dense(), A, what=f"{layer} A")
        assert_close(block.G.to_dense(), G, what=f"{layer} G")
        assert block.facts.terms == case.terms


def test_a_user_s_own_pass_has_the_same_factors_once_its_coefficient_is_stated() -> None:
    """`nn.MSELoss` is 2/(B·C) for each term ‖y − f‖²/2."""
    case = CASES["mse"]
    model, mine, collected = case.model(), kfac(), kfac()
    with mine.capture(model, loss_reduction=2 / case.labels.numel(), num_terms=5):
        nn.MSELoss()(model(case.inputs), case.labels).backward()
    collected.collect_kfac_factors(model, (case.inputs, case.labels), loss="mse")
    assert_same_factors(mine, collected)


def test_positions_outside_the_attention_mask_do_not_count() -> None:
    x, y, mask = normal(3, 4, 7), normal(3, 4, 3), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    garbage = y.masked_fill(mask[..., None] == 0, float("nan"))
    masked, rest = kfac(), kfac()
    masked.collect_kfac_factors(seeded(net), {"input": x, "labels": garbage, "attention_mask": mask}, **MSE)
    rest.collect_kfac_factors(seeded(net), (x[mask != 0], y[mask != 0]), **MSE)
    assert_same_factors(masked, rest)


# ---- drawn targets ---------------------------------------------------------------------------------------------------


def redrawn(case: Case, outputs: Tensor, seed: int, ids: Tensor, draw: int) -> Tensor:
    """Targets of all positions, one after the other, in the shape that torch's loss takes."""
    rows = case.rows(outputs.detach())
    if case.family != "cross_entropy":
        uniform = token_uniforms(seed, ids, rows[0].numel(), draw).reshape(-1).tolist()
        flat = rows.flatten().tolist()
        if case.family == "mse":
            drawn = [f + SIGMA * NormalDist().inv_cdf(u) for f, u in zip(flat, uniform, strict=True)]
        else:
            drawn = [float(u < 1 / (1 + math.exp(-f))) for f, u in zip(flat, uniform, strict=True)]
        return (
            torch.tensor(drawn, dtype=torch.float64).reshape(rows.shape).movedim(-1, case.axis).reshape(outputs.shape)
        )
    uniform = token_uniforms(seed, ids, rows[0, ..., 0].numel(), draw).reshape(-1).tolist()
    found = []
    for f, u, counts in zip(rows.flatten(0, -2).tolist(), uniform, case.counted.flatten().tolist(), strict=True):
        total = sum(math.exp(v) for v in f)
        below = list(itertools.accumulate(math.exp(v) / total for v in f))
        found.append(next(k for k, top in enumerate(below) if u < top) if counts else IGNORE)
    return torch.tensor(found).reshape(rows.shape[:-1])


@pytest.mark.parametrize("name", SOME)
def test_drawn_factors_are_those_of_the_same_draws_by_hand(name: str) -> None:
    case, ids, draws = CASES[name], torch.tensor([8, 3, 11, 2, 40]), 2
    ids, model = ids[: len(case.inputs)], case.model()
    generator = torch.Generator().manual_seed(5)
    found = case.collected("mc", model, n_samples=draws, generator=torch.Generator().manual_seed(5), sample_ids=ids)
    seed, outputs = refresh_schedule.draw_seed(generator), model(case.inputs)
    targets = [redrawn(case, outputs, seed, ids, draw) for draw in range(draws)]
    labels_last = case.loss is entropy_last  # torch's loss of classes [B, T] at [B, V, T]
    redo = Case(
        case.build, case.inputs, case.labels, (lambda f, y: entropy(f.movedim(-1, 1), y)) if labels_last else case.loss,
        case.told, case.layers, case.axis, case.family,
    )  # fmt: skip
    for layer, (A, G) in redo.factors(model, *targets).items():
        assert_close(found.kfac_factors[layer].A.to_dense(), A, what=f"{layer} A")
        assert_close(found.kfac_factors[layer].G.to_dense(), G, what=f"{layer} G")
        assert found.kfac_factors[layer].facts.terms == draws * case.terms


LIKELIHOODS: dict[str, Likelihood] = {"softmax": Softmax(), "mse": Gaussian(SIGMA), "bce": Bernoulli()}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_draws_have_the_mean_and_covariance_of_the_distribution(name: str) -> None:
    """The gradient by the outputs has mean 0 and covariance H: 5 standard errors of 40,000 draws."""
    likelihood, count = LIKELIHOODS[name], 20_000
    f = (1.5 * normal(3)).expand(count, 2, 3).clone().requires_grad_()
    y = likelihood.draw(f, 7, torch.arange(count), 0)
    likelihood.summed_loss(f, y, torch.ones(count, 2) > 0).backward()
    assert f.grad is not None
    g = f.grad.flatten(0, 1)
    hessian = likelihood.hessian(f[0, :1].detach())
    H = torch.diag(hessian.diagonal_TV[0])
    if hessian.minus_TV is not None:
        H = H - torch.outer(hessian.minus_TV[0], hessian.minus_TV[0])
    squares = g[:, :, None] * g[:, None]
    for seen, wanted in ((g, torch.zeros(3)), (squares, H)):
        assert bool(((seen.mean(0) - wanted).abs() <= 5 * seen.std(0) / len(g) ** 0.5).all())
    both = g.reshape(count, 6)
    assert float((both[:, :3].mT @ both[:, 3:] / count).abs().max()) <= 5 * float(H.max()) / count**0.5


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_draws_do_not_depend_on_the_split(name: str) -> None:
    f, ids, draw = normal(7, 4, 3), torch.tensor([3, 1, 4, 15, 9, 2, 6]), LIKELIHOODS[name].draw
    whole = draw(f, 11, ids, 0)
    for cut in range(8):
        parts = [draw(f[rows], 11, ids[rows], 0) for rows in (slice(0, cut), slice(cut, 7))]
        assert torch.equal(torch.cat(parts), whole)
    others = [draw(f, 11, ids, 1), draw(f, 12, ids, 0), draw(f, 11, ids + 1, 0)]
    assert not any(torch.equal(other, whole) for other in others)


@pytest.mark.parametrize(
    "name, kind", [("mse tokens", "mc"), ("bce", "true"), ("image with ignored positions", "true")]
)
def test_factors_of_parts_add_up_to_those_of_the_batch(name: str, kind: str) -> None:
    case, ids = CASES[name], torch.arange(len(CASES[name].inputs))
    whole, model = case.collected(kind, generator=torch.Generator().manual_seed(2), sample_ids=ids), case.model()
    sums: dict[str, Tensor] = {}
    for rows in (slice(0, 1), slice(1, None)):
        part = kfac()
        batch = (case.inputs[rows], case.labels[rows])
        generator = torch.Generator().manual_seed(2)
        part.collect_kfac_factors(model, batch, kind, generator=generator, sample_ids=ids[rows], **case.told)
        share = int(case.counted[rows].sum()) / case.terms
        for key, t in written(part).items():
            samples = len(ids[rows]) / len(ids)  # by which A of a layer with all its positions is averaged
            sums[key] = sums.get(key, 0) + (samples if key == "small A" else share) * t
    assert_tensors(sums, written(whole))


# ---- the exact Fisher ------------------------------------------------------------------------------------------------


def hessians(case: Case, rows: Tensor) -> Tensor:
    """Hessian [T, V, V] of torch's loss by the outputs [T, V] of each position."""
    target = (
        torch.zeros(1, dtype=torch.long) if case.family == "cross_entropy" else torch.zeros(1, rows.shape[1]).double()
    )
    loss = entropy if case.family == "cross_entropy" else case.loss
    return torch.stack([torch.func.hessian(lambda f: loss(f[None], target))(row) for row in rows])


def exact_G(case: Case, model: nn.Module) -> Tensor:
    """The mean of the Hessian over positions with a term."""
    return hessians(case, case.rows(model(case.inputs).detach())[case.counted]).mean(0)


@pytest.mark.parametrize("name", SOME)
def test_true_is_the_hessian_at_the_head_and_drawn_elsewhere(name: str) -> None:
    case = CASES[name]
    model, head = case.model(), case.layers[-1]
    found = case.collected("true", model, generator=torch.Generator().manual_seed(1))
    drawn = case.collected("mc", model, generator=torch.Generator().manual_seed(1))
    assert found.head == head
    assert_close(found.kfac_factors[head].G.to_dense(), exact_G(case, model))
    mine, theirs = written(found), written(drawn)
    assert_tensors(
        {k: t for k, t in mine.items() if k != f"{head} G"}, {k: theirs[k] for k in mine if k != f"{head} G"}
    )
    about = found.record()["layers"]
    names = {"mse": "exact mse, noise_scale=0.6", "bce": "exact bce", "cross_entropy": "exact softmax"}
    assert about[head]["estimate"] == names[case.family]
    assert about[case.layers[0]]["estimate"] == (
        "mc" if case.family == "cross_entropy" else names[case.family].replace("exact", "mc,")
    )


@pytest.mark.parametrize("family", ["mse", "bce", "cross_entropy"])
def test_over_all_outcomes_the_empirical_fisher_is_the_exact_one(family: str) -> None:
    """Every outcome of two samples, weighted by its probability, against JᵀHJ; of a normal ±σ has the same second moments."""
    case = Case(
        lambda: net(2), normal(2, 7), torch.zeros(2, 2), {"mse": squared, "bce": binary, "cross_entropy": entropy}[family],
        {**(MSE if family == "mse" else {"loss": family})}, family=family,
    )  # fmt: skip
    model = case.model()
    f = model(case.inputs).detach()
    total: dict[str, Any] = {"0": 0.0, "2": 0.0}
    weight = 0.0
    per_sample = list(itertools.product((0, 1), repeat=2)) if family != "cross_entropy" else [0, 1]
    for outcome in itertools.product(per_sample, repeat=2):
        y = torch.tensor(outcome)
        p = (
            f.softmax(-1).gather(1, y[:, None])
            if family == "cross_entropy"
            else f.sigmoid() * y + (-f).sigmoid() * (1 - y)
        )
        share = 2.0**-4 if family == "mse" else float(p.prod())
        target = f + SIGMA * (2 * y.double() - 1) if family == "mse" else y.double() if family == "bce" else y
        found = kfac()
        found.collect_kfac_factors(model, (case.inputs, target), **case.told)
        weight += share
        for layer in total:
            total[layer] = total[layer] + share * found.kfac_factors[layer].G.to_dense()
    assert weight == pytest.approx(1.0)
    h = model[0](case.inputs).detach()
    J_BVH = torch.stack([torch.func.jacrev(model[1:])(row) for row in h])
    H_BVV = hessians(case, f)
    assert_close(total["2"], H_BVV.mean(0))
    assert_close(total["0"], (J_BVH.mT @ H_BVV @ J_BVH).mean(0))


@pytest.mark.parametrize("kind", ["empirical", "mc", "true"])
def test_the_noise_scale_divides_the_fisher(kind: str) -> None:
    case = CASES["mse"]
    y = seeded(net)(case.inputs).detach() + normal(5, 3)
    one, other = kfac(), kfac()
    for found, sigma in ((one, 1.0), (other, 3.0)):
        target = y if kind != "empirical" else seeded(net)(case.inputs).detach() + sigma * normal(5, 3)
        generator = torch.Generator().manual_seed(0)
        found.collect_kfac_factors(
            seeded(net), (case.inputs, target), kind, loss="mse", noise_scale=sigma, generator=generator
        )
    mine, theirs = written(one), written(other)
    assert_tensors({k: t / 9 if k.endswith("G") else t for k, t in mine.items()}, theirs)


@pytest.mark.parametrize("name", ["mse tokens", "bce", "image"])
def test_corrected_eigenvalues_of_an_exact_head_are_those_of_its_fisher(name: str) -> None:
    """EK-FAC: (1/N) Σ_t (q_GᵀH_t q_G)(q_Aᵀa_t)², in the basis that it has."""
    case = CASES[name]
    model, head, found = case.model(), case.layers[-1], kfac(ekfac=True, damping_mode="joint")
    found.collect_kfac_factors(model, (case.inputs, case.labels), "true", **case.told)
    correction, module = found.kfac_factors[head].correction, model.get_submodule(head)
    assert correction is not None
    uses = calls_of(model, lambda: case.loss(model(case.inputs), case.labels).backward(), [head])[head]
    a_TM = F.pad(tokens(module, uses).inputs_TI, (0, 1), value=1.0)
    H_TVV = hessians(case, case.rows(model(case.inputs).detach()).flatten(0, -2))
    Q_G, Q_A = (basis.combined(torch.eye(basis.rank, dtype=torch.float64)) for basis in (correction.G, correction.A))
    values_RS = torch.einsum("tuv,ur,vr,ts->rs", H_TVV, Q_G, Q_G, (a_TM @ Q_A).square()) / case.terms
    assert_close(correction.values_RS, values_RS)


# ---- curvlinops ------------------------------------------------------------------------------------------------------

PEERS = {
    "mse": (nn.MSELoss(), normal(8, 5), {"loss": "mse", "noise_scale": (5 / 2) ** 0.5}, 1),
    "bce": (nn.BCEWithLogitsLoss(), normal(8, 5).sigmoid().round(), {"loss": "bce"}, 5),
}
"""loss, targets, arguments, and how many terms of curvlinops' mean are one of ours."""


@pytest.mark.parametrize("name", PEERS)
def test_the_exact_head_is_that_of_curvlinops(name: str) -> None:
    loss, y, told, terms = PEERS[name]
    model, x, found = seeded(lambda: net(5)), normal(8, 7), kfac()
    theirs = peer_factors(model, loss, x, y, fisher_type="type-2")
    found.collect_kfac_factors(model, (x, y), "true", **told)
    mine = written(found)
    assert_close(mine["2 G"], terms * theirs["2 G"])
    assert_tensors({k: mine[k] for k in ("0 A", "2 A")}, {k: theirs[k] for k in ("0 A", "2 A")})


def test_on_one_linear_layer_the_fisher_of_squared_errors_is_curvlinops_gauss_newton_matrix() -> None:
    model, x, y, found = seeded(lambda: nn.Linear(7, 5, bias=False)), normal(8, 7), normal(8, 5), kfac()
    ggn = curvlinops.GGNLinearOperator(model, nn.MSELoss(), [*model.parameters()], [(x, y)], check_deterministic=False)
    net = nn.Sequential(model)
    found.collect_kfac_factors(net, (x, y), "true", loss="mse", noise_scale=(5 / 2) ** 0.5)
    block = found.kfac_factors["0"]
    assert block.G.kind == "diagonal"
    assert_close(torch.kron(block.G.to_dense(), block.A.to_dense()), ggn @ torch.eye(35, dtype=torch.float64))


# ---- which loss, and what cannot be known ----------------------------------------------------------------------------


def test_a_model_that_states_its_problem_type_needs_no_loss() -> None:
    for task, told in {"regression": {"loss": "mse"}, "multi_label_classification": {"loss": "bce"}}.items():
        model, x, y = seeded(net), normal(5, 7), normal(5, 3).sigmoid()
        stated, explicit = kfac(), kfac()
        model.config = SimpleNamespace(problem_type=task)
        stated.collect_kfac_factors(model, (x, y))
        explicit.collect_kfac_factors(seeded(net), (x, y), **told)
        assert_same_factors(stated, explicit)


X, N3, C3 = normal(4, 7), normal(4, 3), classes(3, 4)
IMAGE = normal(2, 2, 4, 4)


@pytest.mark.parametrize(
    "build, batch, told, message",
    [
        (net, (X, N3), {}, 'labels: expected integer classes, or loss="mse", "bce" or "cross_entropy"'),
        (net, (X, N3 > 0), {}, "labels: expected integer classes, or loss="),
        (net, (X, C3 > 0), {"loss": "cross_entropy"}, "labels: are True and False"),
        (net, (X, N3), {"loss": "l1"}, 'loss: expected one of "cross_entropy", "mse", "bce", or None'),
        (net, (X, N3), {"loss": "mse", "noise_scale": 0.0}, "noise_scale: expected a number above 0"),
        (net, (X, N3), {"loss": "mse", "noise_scale": True}, "noise_scale: expected a number above 0"),
        (net, (X, C3), {"noise_scale": 2.0}, 'noise_scale: is 2, which is a property of loss="mse"'),
        (net, (X, N3), {"loss": "cross_entropy"}, "labels: are not probabilities of the classes"),
        (net, (X, 2 * distributions(4, 3)), {"loss": "cross_entropy"}, "labels: are not probabilities"),
        (net, (X, N3), {"loss": "bce"}, 'labels: hold .*; expected numbers from 0 to 1 for loss="bce"'),
        (net, (X, N3[:, :2]), {"loss": "mse"}, r"labels: have shape \[4, 2\]; expected \[4, 3\]"),
        (net, (X, N3[:, 0]), {"loss": "mse"}, r"labels: have shape \[4\]; expected \[4, 3\]"),
        (net, (X, N3), {"loss": "mse", "causal_shift": True}, "causal_shift: is True"),
        (net, (X, C3), {"class_axis": 2}, "class_axis: expected 1, -1 or None, got 2"),
        (net, (X, C3), {"class_axis": True}, "class_axis: expected 1, -1 or None"),
        (pictures, (IMAGE, normal(2, 3, 4, 4)), {"loss": "mse"}, r"class_axis: outputs \[2, 3, 4, 4\] may have"),
        (pictures, {"x": IMAGE}, {"fisher_type": "mc"}, r"class_axis: outputs \[2, 3, 4, 4\] may have"),
        (lambda: pictures(4), (IMAGE, classes(4, 2, 4, 4)), {}, "class_axis: outputs"),
        (pictures, (IMAGE, classes(3, 2, 4)), {}, r"labels: have shape \[2, 4\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_refused_by_name(build: Any, batch: Any, told: dict[str, Any], message: str) -> None:
    with refusal(message):
        kfac().collect_kfac_factors(seeded(build), batch, **told)


def test_the_class_axis_can_be_stated() -> None:
    """Where as many classes as rows and columns leave both open."""
    model, y, stated = seeded(lambda: pictures(4)), classes(4, 2, 4, 4), kfac()
    stated.collect_kfac_factors(model, (IMAGE, y), class_axis=1)
    own = kfac()
    with own.capture(model, num_terms=32):
        F.cross_entropy(model(IMAGE), y).backward()
    assert_same_factors(stated, own)


def test_an_exact_head_must_return_the_model_s_outputs() -> None:
    model = seeded(lambda: Toy(lambda m, x: m.out(m.first(x)).tanh(), first=nn.Linear(7, 6), out=nn.Linear(6, 3)))
    for loss, y in (("mse", N3), ("bce", N3.sigmoid())):
        with refusal("head: what 'out' returns is not what the model returns"):
            kfac().collect_kfac_factors(model, (X, y), "true", loss=loss, head="out")
        with refusal("head: no trained layer was seen whose output the model returns"):
            kfac().collect_kfac_factors(model, (X, y), "true", loss=loss)


def test_a_collection_of_another_loss_proves_nothing_about_a_user_s_own() -> None:
    """The first softmax at an exact head is checked, also after a collection of squared errors."""
    model, found = seeded(net), kfac(kfac_true_fisher_head=True)
    found.collect_kfac_factors(model, (X, N3), loss="mse")
    with refusal("is not that of a cross entropy.*collect_kfac_factors"), found.capture(model, num_terms=4):
        F.mse_loss(model(X), N3).backward()


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_an_exact_head_counts_positions_without_a_gradient(loss: str) -> None:
    """Targets that are met exactly."""
    model, found = seeded(net), kfac(kfac_true_fisher_head=True)
    f = model(X).detach()
    found.collect_kfac_factors(model, (X, f if loss == "mse" else f.sigmoid()), loss=loss)
    H_TV = torch.ones(4, 3) if loss == "mse" else f.sigmoid() * (1 - f.sigmoid())
    assert_close(found.kfac_factors["2"].G.to_dense(), torch.diag(H_TV.double().mean(0)))


def test_an_average_begins_anew_with_another_loss() -> None:
    model, found = seeded(net), kfac(ema_decay=0.5)
    found.collect_kfac_factors(model, (X, C3))
    for told, refreshes in (({"loss": "mse"}, 1), ({"loss": "mse"}, 2), ({"loss": "mse", "noise_scale": 2.0}, 1)):
        found.collect_kfac_factors(model, (X, N3), **told)
        assert found.kfac_factors["0"].facts.refreshes == refreshes


def test_a_convolution_may_be_an_exact_head_of_a_user_s_own_pass() -> None:
    case = CASES["image"]
    model, found = case.model(), kfac(kfac_true_fisher_head=True)
    with found.capture(model, num_terms=case.terms):
        F.cross_entropy(model(case.inputs), case.labels).backward()
    assert_close(found.kfac_factors["out"].G.to_dense(), exact_G(case, model))
