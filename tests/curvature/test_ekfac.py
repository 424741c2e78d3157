"""EK-FAC against the Fisher of whole samples, written out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from gramian.curvature.blocks.block import Block
from gramian.oracles import dense_kfac, single_sample
from tests.curvature.problems import IGNORE, PROBLEMS, Problem, assert_close, cross_entropy, kfac, normal
from tests.kit.matrix import FULL
from tests.kit.refusals import refusal
from tests.oracles import dense_capacity, dense_ekfac

pytestmark = pytest.mark.oracle

JOINT = {"ekfac": True, "damping_mode": "joint", "damping": 0.01}
DIFFERENT = ["mlp", "mlp_tokens", "gpt", "embedding"]


def sample_gradients(p: Problem) -> dict[str, Tensor]:
    """{parameter: [B, *shape]} of the summed loss of each sample."""
    return single_sample.per_sample_gradients(p.model(), cross_entropy, (p.inputs, p.targets))


def fishers(p: Problem, found: gramian.KFACNaturalGradient) -> dict[str, Tensor]:
    """{block: its Fisher of whole samples}."""
    gradients = sample_gradients(p)
    written = {}
    for name, block in kronecker(found).items():
        parts = [gradients[parameter] for parameter in block.spec.parameters]
        samples = [
            block.spec.matrix(dict(zip(block.spec.parameters, each, strict=True))) for each in zip(*parts, strict=True)
        ]
        written[name] = dense_ekfac.block_fisher(torch.stack(samples), p.terms)
    return written


def kronecker(found: gramian.KFACNaturalGradient) -> dict[str, Block]:
    return {name: block for name, block in found.kfac_factors.items() if block.A is not None}


def expected(block: Block, fisher: Tensor) -> Tensor:
    assert block.A is not None
    return dense_ekfac.corrected(fisher, block.A.dense(), block.G.dense())


def vectors(block: Block, seed: int = 5) -> dict[str, Tensor]:
    return {
        name: normal(*shape, seed=seed) for name, shape in zip(block.spec.parameters, block.spec.shapes, strict=True)
    }


@pytest.mark.parametrize("options", [{}, {"max_condition_number": 30.0}, {"kfac_use_woodbury": False}], ids=str)
@pytest.mark.parametrize("name", PROBLEMS if FULL else DIFFERENT)
def test_every_block_is_the_diagonal_of_the_fisher_in_the_eigenbasis(name: str, options: dict[str, Any]) -> None:
    p = PROBLEMS[name]
    model = p.model()
    found = p.captured(model, **JOINT, **options)
    written = fishers(p, found)
    limit = options.get("max_condition_number", 1e6)
    for layer, block in kronecker(found).items():
        F, v = expected(block, written[layer]), vectors(block)
        flat = block.spec.matrix(v).reshape(-1)
        product = found.compute_fisher_vector_product(v)
        assert_close(block.spec.matrix(product).reshape(-1), F @ flat, what=layer)
        for power in (-1.0, -0.5):
            out = found.compute_natural_gradient(model, power, {n: v[n] for n in v})
            want = dense_kfac.matrix_power(F, power, 0.01, limit) @ flat
            assert_close(block.spec.matrix(out).reshape(-1), want, 1e-9, layer)
        about = found.record()["layers"][layer]["ekfac"]
        assert about["corrected"] and about["outside_trace"] < 1e-10
        assert about["trace"] == pytest.approx(float(written[layer].trace()), rel=1e-9)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_it_is_closer_to_the_exact_fisher_than_kfac(name: str) -> None:
    p = PROBLEMS[name]
    found = p.captured(**JOINT)
    for layer, fisher in fishers(p, found).items():
        block = kronecker(found)[layer]
        assert block.A is not None
        product = torch.kron(block.G.dense(), block.A.dense())
        assert (expected(block, fisher) - fisher).norm() < (product - fisher).norm() * (1 - 1e-6), layer


def test_an_exact_softmax_head() -> None:
    p = PROBLEMS["mlp_tokens"]
    model = p.model()
    found = p.captured(model, kfac_true_fisher_head=True, **JOINT)
    block = kronecker(found)[p.head]
    hidden = model[:-1](p.inputs).flatten(0, 1).detach()
    inputs = torch.cat([hidden, torch.ones(len(hidden), 1).double()], 1)
    fisher = dense_ekfac.softmax_block_fisher(inputs, model(p.inputs).flatten(0, 1).detach(), p.terms)
    v = vectors(block)
    out = block.spec.matrix(found.compute_fisher_vector_product(v)).reshape(-1)
    assert_close(out, expected(block, fisher) @ block.spec.matrix(v).reshape(-1))
    assert found.record()["layers"][p.head]["ekfac"]["outside_trace"] < 1e-10


@pytest.mark.parametrize("name", ["mlp_tokens", "gpt"])
def test_any_split_is_one_pass_and_a_mean_loss_is_a_sum_loss(name: str) -> None:
    p = PROBLEMS[name]
    model, one = p.model(), p.captured(**JOINT)
    split = kfac(**JOINT)
    with split.capture(model, loss_reduction="mean", num_terms=int((p.targets[:2] != IGNORE).sum())) as cap:
        p.loss(model, slice(0, 2), "mean").backward()
        cap.next(num_terms=int((p.targets[2:] != IGNORE).sum()))
        p.loss(model, slice(2, None), "mean").backward()
    assert_same(split, one)


@pytest.mark.parametrize("fisher_type", ["empirical", "mc", "true"])
def test_of_one_token_it_is_kfac(fisher_type: str) -> None:
    """F = G ⊗ A exactly where all samples have one input; drawn labels are samples of their own."""
    p = PROBLEMS["mlp"]
    batch = (p.inputs[:1].expand(4, -1).contiguous(), p.targets[:4])
    both = [kfac(**{**JOINT, "ekfac": on}) for on in (True, False)]
    for found in both:
        found.collect_kfac_factors(p.model(), batch, fisher_type, n_samples=3)
    assert_same(*both)


@pytest.mark.full
def test_compiled_models_have_the_eigenvalues_of_eager_ones() -> None:
    p = PROBLEMS["mlp_tokens"]
    model = p.model()
    found = kfac(**JOINT)
    with found.capture(model, loss_reduction="sum", num_terms=p.terms):
        cross_entropy(torch.compile(model, backend="aot_eager"), p.inputs, p.targets).backward()
    assert_same(found, p.captured(**JOINT))


def assert_same(
    actual: gramian.KFACNaturalGradient, wanted: gramian.KFACNaturalGradient, tolerance: float = 1e-10
) -> None:
    for block in kronecker(wanted).values():
        v = vectors(block)
        left, right = actual.compute_fisher_vector_product(v), wanted.compute_fisher_vector_product(v)
        for name in v:
            assert_close(left[name], right[name], tolerance, name)


def test_a_weight_of_two_is_a_sample_twice() -> None:
    p = PROBLEMS["mlp"]
    model = p.model()
    weighted, twice = kfac(**JOINT), kfac(**JOINT)
    weights = torch.ones(8, 1, dtype=torch.float64)
    weights[3] = 2
    with weighted.capture(model, loss_reduction="sum", token_weights=weights):
        losses = torch.nn.functional.cross_entropy(model(p.inputs), p.targets, reduction="none")
        (losses * weights[:, 0]).sum().backward()
    index = [0, 1, 2, 3, 3, 4, 5, 6, 7]
    with twice.capture(model, loss_reduction="sum", num_terms=9):
        p.loss(model, index).backward()
    assert_same(weighted, twice)


def test_the_average_sees_old_values_in_the_new_basis() -> None:
    p = PROBLEMS["mlp"]
    model, found = p.model(), kfac(**{**JOINT, "ema_decay": 0.75})
    old = []
    for rows in (slice(0, 5), slice(3, 8)):
        with found.capture(model, loss_reduction="sum", num_terms=5):
            p.loss(model, rows).backward()
        old.append({name: _dense(found, block) for name, block in kronecker(found).items()})
    alone = kfac(**JOINT)
    with alone.capture(model, loss_reduction="sum", num_terms=5):
        p.loss(model, slice(3, 8)).backward()
    gradients = sample_gradients(p)
    share = 0.25 / (1 - 0.75**2)
    for name, block in kronecker(found).items():
        parts = [gradients[parameter][3:8] for parameter in block.spec.parameters]
        samples = [
            block.spec.matrix(dict(zip(block.spec.parameters, each, strict=True))) for each in zip(*parts, strict=True)
        ]
        fisher = (1 - share) * old[0][name] + share * dense_ekfac.block_fisher(torch.stack(samples), 5)
        assert_close(old[1][name], expected(block, fisher), 1e-9, name)


def _dense(found: gramian.KFACNaturalGradient, block: Block) -> Tensor:
    size = block.spec.outputs * block.spec.inputs
    eye = torch.eye(size, dtype=torch.float64).view(size, block.spec.outputs, block.spec.inputs)
    return torch.stack([block.matvec(y).reshape(-1) for y in eye], 1)


def test_a_subset_of_tokens_says_what_lies_outside_its_basis() -> None:
    p = PROBLEMS["gpt"]
    found = p.captured(max_tokens=4, **JOINT)
    shares = [layer["ekfac"]["outside_trace"] for layer in found.record()["layers"].values() if layer["ekfac"]]
    assert max(shares) > 0.1 and min(shares) >= 0


def test_the_padding_row_of_a_table_has_no_eigenvalues() -> None:
    """It has no gradient, so what its tokens send back is not that of a parameter."""
    p = PROBLEMS["embedding"]
    model, padded = p.model(), p.model()
    padded[0].padding_idx = int(p.inputs[0, 0])
    found, plain = p.captured(padded, **JOINT), p.captured(model, **JOINT)
    values, others = (each.kfac_factors["0"].correction.values_RS for each in (found, plain))
    row = padded[0].padding_idx
    assert others[:, row].sum() > 0 and not values[:, row].any()
    F = fishers(p, plain)["0"].reshape(9, 13, 9, 13).clone()
    F[:, row], F[..., row] = 0, 0
    assert_close(_dense(found, found.kfac_factors["0"]), expected(found.kfac_factors["0"], F.reshape(117, 117)))


def test_where_there_is_no_gradient_damping_is_all() -> None:
    p = PROBLEMS["mlp"]
    model, found = p.model(), kfac(**JOINT)
    with found.capture(model, loss_reduction="sum", num_terms=p.terms):
        (0 * p.loss(model)).backward()
    v = {name: normal(*parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, t in found.compute_natural_gradient(model, gradients=v).items():
        assert_close(t, v[name] / 0.01, what=name)
    assert found.compute_capacity_metrics()["model"]["trace"] == 0.0 and not found.top_eigenvalues(3).any()


def test_a_sample_outside_the_subset_that_is_not_finite_drops_the_refresh() -> None:
    p = PROBLEMS["mlp"]
    model, found = p.model(), p.captured(max_tokens=1, **JOINT)
    before = {name: block.correction.values_RS for name, block in kronecker(found).items()}
    for bad in range(2):
        inputs = p.inputs.clone()
        inputs[bad] = float("nan")
        with found.capture(model, loss_reduction="sum", num_terms=p.terms):
            cross_entropy(model, inputs, p.targets).backward()
    assert [drop["reason"] for drop in found.dropped][-1].endswith("not finite") and len(found.dropped) == 2
    assert all(block.correction.values_RS is before[name] for name, block in kronecker(found).items())


@pytest.mark.parametrize(
    "options, field",
    [
        ({"damping_mode": "pi"}, "damping_mode"),
        ({"damping_mode": "factored"}, "damping_mode"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with refusal(f"^{field}: .*expected"):
        gramian.KFACNaturalGradient(ekfac=True, **options)


def test_a_state_brings_values_and_basis_back(tmp_path: Path) -> None:
    p = PROBLEMS["gpt"]
    model, found = p.model(), p.captured(**JOINT)
    loaded, read, spread = (kfac(**JOINT) for _ in range(3))
    loaded.load_state_dict(found.state_dict(), model)
    found.save(str(tmp_path / "state"))
    read.load(str(tmp_path / "state"), model)
    found.save_sharded(str(tmp_path / "folder"))
    spread.load_sharded(str(tmp_path / "folder"), model)
    for other in (loaded, read, spread):
        assert_same(other, found, 1e-14)
    plain = kfac(damping_mode="joint")
    plain.load_state_dict(found.state_dict(), model)
    with pytest.raises(AssertionError):
        assert_same(plain, found)


@pytest.mark.parametrize("origin", ["captured", "loaded"])
def test_the_bytes_on_record_are_those_of_all_that_is_held(origin: str) -> None:
    p = PROBLEMS["mlp"]
    model, found = p.model(), p.captured(kfac_use_woodbury=False, **JOINT)
    if origin == "loaded":
        state, found = found.state_dict(), kfac(kfac_use_woodbury=False, **JOINT)
        found.load_state_dict(state, model)
    record, total = found.record(), 0
    for name, block in found.kfac_factors.items():
        sides = list(block.factors.values())
        tensors = [t for side in sides for t in (side._eigen or ())]
        if block.correction is not None:
            bases = block.correction.G.matrix, block.correction.A.matrix
            tensors += [block.correction.values_RS, *(t for t in bases if t is not None)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        held = sum(side.stored.nbytes for side in sides) + sum(storages.values())
        assert record["layers"][name]["bytes"] == held, name
        total += held
    assert record["bytes"] == total


FORGED: dict[str, Any] = {
    "eigenvalues NaN": lambda t: t * float("nan"),
    "eigenvalues below 0": lambda t: -t,
    "eigenvalues of whole numbers": lambda t: t.int(),
    "basis_G NaN": lambda t: t * float("nan"),
    "basis_G without a row": lambda t: t[:-1],
    "basis_A of three dimensions": lambda t: t[None],
    "basis_A missing": None,
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_state_with_other_eigenvalues_is_refused(forged: str) -> None:
    p = PROBLEMS["mlp"]
    model, state, part = p.model(), p.captured(**JOINT).state_dict(), forged.split()[0]
    parts = state["factors"][state["layers"]["0"]["correction"]]
    tensor = parts.pop(part)
    if FORGED[forged] is not None:
        parts[part] = FORGED[forged](tensor)
    loaded = kfac(**JOINT)
    with refusal("^0: .*expected"):
        loaded.load_state_dict(state, model)
    assert not loaded.kfac_factors


def test_traps_turn_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squaring every token by itself, as if tokens of one sample were samples."""
    from gramian.curvature.estimate.eigenbasis_sums import EigenbasisSums

    def by_token(self: EigenbasisSums, uses: Any, part: slice, roots_B: Tensor | None) -> None:
        for out_BCO, in_BCM in self._chunks(uses, part, roots_B):
            g_RK, a_SK = (
                basis.coordinates(side.flatten(0, 1).mT) for basis, side in ((self.G, out_BCO), (self.A, in_BCM))
            )
            self.squares_RS.addmm_(g_RK.square(), a_SK.square().mT)

    p = PROBLEMS["mlp_tokens"]
    right = p.captured(**JOINT)
    monkeypatch.setattr(EigenbasisSums, "_add_samples", by_token)
    wrong = p.captured(**JOINT)
    with pytest.raises(AssertionError):
        assert_same(wrong, right)


@pytest.mark.parametrize("name", ["mlp", "conv2d"])
def test_it_is_that_of_curvlinops(name: str) -> None:
    import curvlinops

    p = PROBLEMS[name]
    model = p.model()
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # a bias that is frozen beside its weight is not for the peer
    trained = list(model.parameters())
    peer = curvlinops.EKFACLinearOperator(
        model, torch.nn.CrossEntropyLoss(), trained, [(p.inputs, p.targets)], fisher_type="empirical",
        separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    found = p.captured(model, **JOINT)
    v = {key: normal(*parameter.shape, seed=k) for k, (key, parameter) in enumerate(model.named_parameters())}
    theirs = peer @ list(v.values())
    ours = found.compute_fisher_vector_product(v)
    for key, want in zip(v, theirs, strict=True):
        assert_close(ours[key], want, 1e-10, key)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_importance_is_the_diagonal_of_what_is_applied(name: str) -> None:
    found = PROBLEMS[name].captured(**JOINT)
    importance = gramian.curvature.parameter_importance(found)
    for layer, block in kronecker(found).items():
        diagonal = block.spec.tensors(_dense(found, block).diagonal().reshape(block.spec.outputs, -1))
        for key, want in diagonal.items():
            assert_close(importance[key], want, what=layer)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_capacity_is_that_of_its_own_eigenvalues(name: str) -> None:
    p = PROBLEMS[name]
    found = p.captured(**JOINT)
    metrics = found.compute_capacity_metrics(damping=0.01)
    everything = []
    for layer, block in kronecker(found).items():
        F = _dense(found, block)
        values = torch.linalg.eigvalsh((F + F.mT) / 2).clamp(min=0)
        everything.append(values)
        want = dense_capacity.metrics(values, 0.01)
        for key in ("trace", "frobenius", "max_eigenvalue", "participation_ratio", "entropy_rank", "log_det"):
            assert metrics["layers"][layer][key] == pytest.approx(want[key], rel=1e-9), key
    largest = torch.cat(everything).max()
    assert found.top_eigenvalues(1)[0] >= largest * (1 - 1e-9)
