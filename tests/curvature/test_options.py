"""Options: what is wrong is refused by name, and what is accepted is used."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.curvature.options import DTYPES
from tests.curvature.small import (
    FEW,
    LAYERS,
    MANY,
    assert_near,
    assert_same,
    damped,
    differs,
    gradient_matrix,
    kept,
    loss_of,
    natural_matrix,
    net,
    opened,
    raised,
    refresh,
    sides,
    words,
)
from tests.kit.refusals import refusal, refused
from tests.kit.toys import Toy

NAN, INF = math.nan, math.inf
LINEAR = ("q", "k", "v", "fc", "head")
SHOWN: set[str] = set()
"""Options whose effect a test of this file shows."""


def shows(*options: str) -> Callable[[Any], Any]:
    """Mark a test as one that shows what an option does."""
    SHOWN.update(options)
    return lambda test: test


def make(**options: Any) -> gramian.KFACNaturalGradient:
    return gramian.KFACNaturalGradient(**{"update_freq": 1, "damping": 1e-3, "ema_decay": 0.9, **options})


# ---- refusals --------------------------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "damping": [0, 0.0, -1e-3, NAN, INF, True, "1e-3", None],
    "damping_A": [0.0, -1.0, NAN, INF, True, "small"],
    "damping_G": [0.0, -1.0, NAN, INF, False, [1e-3]],
    "damping_mode": ["tikhonov", "PI", "", None, True],
    "max_condition_number": [1, 1.0, 0, -5.0, NAN, True, "1e6", None],
    "use_eigenvalue_correction": [1, 0, None, "yes"],
    "ekfac": [1, 0, None, "yes"],
    "one_sided": [1, 0, None, "A"],
    "update_freq": [0, -1, 1.0, True, NAN, None, "10"],
    "ema_decay": [1, 1.0, 1.5, -0.1, NAN, True, None, "0.9"],
    "min_layer_size": [0, -1, 2.0, True, None],
    "weight_sharing": ["sum", "Expand", None, 1],
    "kfac_use_woodbury": [1, 0, None, "auto"],
    "kfac_policy": ["some", "ALL", "", None, 1],
    "kfac_big_threshold": [0, -4096, 4096.0, True, None],
    "kfac_true_fisher_head": [1, 0, None, "head"],
    "kfac_eps": [0, 0.0, -1e-6, NAN, INF, True, None],
    "kfac_auto_rho": [0, -1.0, NAN, INF, True, None],
    "kfac_auto_t_max": [0, -1, 8192.0, True, None],
    "woodbury_store_device": ["gpu", "cuda:0", "disk", None, torch.device("cpu")],
    "woodbury_dtype": ["float16", "half", "fp8", "", torch.float16, 16],
    "kfac_distributed_reduce": ["sum", "mean", "GRAM", None, False],
    "max_tokens": [0, -1, 10.0, True, "all"],
    "seed": [0.5, None, True, "0", 2**63, -(2**63) - 1],
    "strict": [1, 0, None, "no"],
    "memory_budget": [0, -1, True, 1.5e9, "much", "0GB", "-8GB", "8 bananas"],
}
ACCEPTED = {
    "kfac_policy": ('"all"', '"auto"', '"hybrid"', '"small_only"'),
    "damping_mode": ('"pi"', '"factored"', '"joint"'),
    "weight_sharing": ('"expand"', '"reduce"'),
    "woodbury_store_device": ('"auto"', '"cuda"', '"cpu"'),
    "woodbury_dtype": ('"fp16"', '"bf16"', '"fp32"', '"fp64"'),
    "kfac_distributed_reduce": ('"gram"', '"gather"', '"dense"', '"none"'),
}


@pytest.mark.parametrize(
    "option, value", [(option, value) for option, values in WRONG.items() for value in values], ids=str
)
def test_a_wrong_value_is_refused_by_name_with_what_would_be_accepted(option: str, value: Any) -> None:
    with refused(option, "expected", repr(value), *ACCEPTED.get(option, ())):
        gramian.KFACNaturalGradient(**{option: value})


def test_every_option_has_wrong_values_in_the_list() -> None:
    known = set(inspect.signature(gramian.KFACNaturalGradient.__init__).parameters) - {"self"}
    assert known == {*WRONG, "process_group"}  # which is looked at when a capture begins


@pytest.mark.parametrize("given", [{"damping_A": 1e-3}, {"damping_G": 1e-3}, {"damping_A": 1e-3, "damping_G": 1e-3}])
def test_pi_damping_takes_no_damping_of_one_side(given: dict[str, float]) -> None:
    with refused(next(iter(given)), '"pi"', "expected"):
        gramian.KFACNaturalGradient(damping=1e-3, **given)


@pytest.mark.parametrize(
    "given", [{"damping_A": 1e-3, "damping_G": 1e-2}, {"damping_A": 1e-2}, {"damping_G": 1e-2}], ids=str
)
def test_joint_damping_takes_one_number(given: dict[str, float]) -> None:
    with refused("damping_A, damping_G", "equal"):
        gramian.KFACNaturalGradient(damping=1e-3, damping_mode="joint", **given)


@pytest.mark.parametrize("given", [{"damping_A": 1e-2, "damping_G": 1e-2}, {"damping_A": 1e-3}, {}], ids=str)
def test_joint_damping_accepts_equal_numbers(given: dict[str, float]) -> None:
    kfac = refresh(make(damping=1e-3, damping_mode="joint", **given), net())
    wanted = given.get("damping_A", 1e-3)
    facts = kfac.record()["layers"]["q"]
    assert (facts["lambda_A"], facts["lambda_G"]) == (wanted, wanted)


@pytest.mark.parametrize(
    "arguments, field",
    [
        ({"fisher_type": "exact"}, "fisher_type"),
        ({"fisher_type": None}, "fisher_type"),
        ({"fisher_type": "mc", "n_samples": 0}, "n_samples"),
        ({"fisher_type": "mc", "n_samples": 1.0}, "n_samples"),
        ({"fisher_type": "mc", "n_samples": True}, "n_samples"),
        ({"head": "lm_head"}, "head"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_a_collection_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with refused(field, "expected"):
        make().collect_kfac_factors(net(), words(), **arguments)


@pytest.mark.parametrize(
    "arguments, field",
    [
        ({"num_terms": -1}, "num_terms"),
        ({"num_terms": NAN}, "num_terms"),
        ({"num_terms": INF}, "num_terms"),
        ({"num_terms": True}, "num_terms"),
        ({"num_terms": "24"}, "num_terms"),
        ({"num_terms": torch.ones(2, 3)}, "num_terms"),
        ({"num_terms": 24, "loss_reduction": "average"}, "loss_reduction"),
        ({"num_terms": 24, "loss_reduction": 0.0}, "loss_reduction"),
        ({"num_terms": 24, "loss_scale": 0.0}, "loss_scale"),
        ({"num_terms": 24, "batch_size": True}, "batch_size"),
        ({"num_terms": 24, "head": "lm_head"}, "head"),
        ({"token_weights": [[1.0]]}, "token_weights"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_a_capture_is_refused_by_name_and_leaves_the_object_usable(
    arguments: dict[str, Any], field: str
) -> None:
    kfac, model = make(), net()
    with refused(field, "expected"):
        kfac.capture(model, **arguments)
    assert refresh(kfac, model).refreshes == 1


# ---- damping and clip ------------------------------------------------------------------------------------------------


def _product(a_side: Tensor, g_side: Tensor, power: float, y: Tensor) -> Tensor:
    return raised(g_side, power) @ y @ raised(a_side, power)


@shows("damping", "damping_mode")
@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("value", [1e-3, 0.3])
@pytest.mark.parametrize("mode", ["pi", "factored", "joint"])
def test_damping_is_what_its_mode_says(mode: str, value: float, shape: tuple[int, int]) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(damping=value, damping_mode=mode, use_eigenvalue_correction=False), model, words(shape))
    a_side, g_side = sides(kfac, "fc")
    y = gradient_matrix(model, "fc")
    if mode == "joint":
        whole = torch.kron(g_side, a_side) + value * torch.eye(y.numel(), dtype=torch.float64)
        expected = torch.linalg.solve(whole, y.flatten()).view_as(y)
    else:
        pi = float(((a_side.trace() / len(a_side)) / (g_side.trace() / len(g_side))).sqrt())
        left, right = (value, value) if mode == "factored" else (value**0.5 / pi, pi * value**0.5)
        expected = _product(damped(a_side, right, None), damped(g_side, left, None), -1, y)
    assert_near(natural_matrix(kfac, model, "fc"), expected, 1e-9)


@shows("damping_A", "damping_G")
@pytest.mark.parametrize("given", [{"damping_A": 0.5}, {"damping_G": 0.02}, {"damping_A": 0.5, "damping_G": 0.02}])
def test_each_side_gets_its_own_damping(given: dict[str, float]) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(damping=1e-2, damping_mode="factored", **given), model)
    a_side, g_side = sides(kfac, "fc")
    left, right = given.get("damping_G", 1e-2), given.get("damping_A", 1e-2)
    y = gradient_matrix(model, "fc")
    expected = _product(damped(a_side, right, 1e6), damped(g_side, left, 1e6), -1, y)
    assert_near(natural_matrix(kfac, model, "fc"), expected, 1e-9)


@shows("damping_G")
def test_a_block_that_is_not_a_kronecker_product_has_the_damping_of_the_output_side() -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(damping=1e-2, damping_mode="factored", damping_G=0.7), model)
    block = kfac.kfac_factors["norm.bias"].G.to_dense().double()
    expected = torch.linalg.solve(damped(block, 0.7, None), model.norm.bias.grad)
    assert_near(kfac.compute_natural_gradient(model)["norm.bias"], expected, 1e-9)


@shows("max_condition_number", "use_eigenvalue_correction")
@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("clip", [True, False], ids=["clip", "no clip"])
@pytest.mark.parametrize("kappa", [3.0, 40.0, INF])
@pytest.mark.parametrize("power", [-1.0, -0.5])
def test_the_clip_raises_eigenvalues_to_the_largest_over_kappa(
    power: float, kappa: float, clip: bool, shape: tuple[int, int]
) -> None:
    model = net(dtype=torch.float64)
    options = {"damping_A": 1e-3, "damping_G": 1e-5, "max_condition_number": kappa, "use_eigenvalue_correction": clip}
    kfac = refresh(make(damping_mode="factored", **options), model, words(shape))
    a_side, g_side = sides(kfac, "fc")
    limit = kappa if clip and kappa < INF else None
    expected = _product(damped(a_side, 1e-3, limit), damped(g_side, 1e-5, limit), power, gradient_matrix(model, "fc"))
    assert_near(natural_matrix(kfac, model, "fc", power), expected, 1e-9)


@shows("kfac_eps")
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_the_first_jitter_is_relative_to_the_mean_diagonal(eps: float) -> None:
    # Rounded to bfloat16, a matrix of low rank is not positive definite any more.
    torch.manual_seed(0)
    model, x = nn.Linear(40, 3, bias=False), torch.randn(60, 4) @ torch.randn(4, 40)
    options = {"damping_A": 1e-9, "damping_G": 1.0, "use_eigenvalue_correction": False, "kfac_use_woodbury": False}
    kfac = make(damping_mode="factored", woodbury_dtype="bf16", kfac_eps=eps, **options)
    with kfac.capture(model, num_terms=60):
        model(x).square().sum(1).mean().backward()
    kfac.compute_natural_gradient(model)
    first, second, *_ = kfac.record()["layers"]["model"]["sides"]["A"]["cholesky"]
    assert (first["jitter"], first["result"]) == (0.0, "not positive definite")
    mean = float(sides(kfac, "model")[0].diagonal().mean())
    assert second["jitter"] == pytest.approx(eps * mean, rel=1e-3)


# ---- when and what ---------------------------------------------------------------------------------------------------


@shows("update_freq")
@pytest.mark.parametrize("every", [1, 3])
def test_the_first_step_refreshes_and_then_every_so_many(every: int) -> None:
    kfac, model = make(update_freq=every), net()
    made = []
    for step in range(7):
        before = kfac.refreshes
        if step % 2:
            refresh(kfac, model, words(seed=step))
        else:
            kfac.collect_kfac_factors(model, words(seed=step))
        made.append(kfac.refreshes - before)
    assert made == [int(step % every == 0) for step in range(7)]


@shows("update_freq")
def test_a_step_without_a_refresh_changes_nothing_and_a_forced_one_does() -> None:
    kfac, model = refresh(make(update_freq=10), net()), net()
    before = kept(kfac)
    refresh(kfac, model, words(seed=2))
    assert not differs(kept(kfac), before) and kfac.refreshes == 1
    refresh(kfac, model, words(seed=2), force=True)
    assert differs(kept(kfac), before) and kfac.refreshes == 2


@shows("ema_decay")
@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_factors_are_debiased_averages_over_refreshes(decay: float, shape: tuple[int, int]) -> None:
    model, kfac = net(dtype=torch.float64), make(ema_decay=decay)
    alone = []
    for seed in range(3):
        refresh(kfac, model, words(shape, seed))
        alone.append(sides(refresh(make(), model, words(shape, seed)), "fc"))
    weights = [decay ** (2 - i) for i in range(3)]
    for side, actual in enumerate(sides(kfac, "fc")):
        expected = sum(w * pair[side] for w, pair in zip(weights, alone, strict=True)) / sum(weights)
        assert_near(actual, expected, 1e-12)


@shows("min_layer_size")
def test_narrower_layers_are_not_kronecker_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 20), nn.Linear(20, 20), nn.Linear(20, 3))
    kinds = {}
    for size in (3, 4, 5, 21):
        kfac = make(min_layer_size=size)
        with kfac.capture(model, num_terms=5):
            model(torch.randn(5, 4)).square().sum(1).mean().backward()
        kinds[size] = [name for name, block in kfac.kfac_factors.items() if block.A is not None]
        assert kfac.coverage["2.weight"].status == "covered"
    assert kinds == {3: ["0", "1", "2"], 4: ["0", "1"], 5: ["1"], 21: []}
    assert kfac.record()["layers"]["2.weight"]["why_not_kfac"] == "narrower than min_layer_size=21"


@shows("weight_sharing")
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_tokens_of_a_sample_are_samples_or_one(sharing: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).double()
    x, c = torch.randn(5, 6, 3, dtype=torch.float64), torch.randn(5, 6, 4, dtype=torch.float64)
    kfac = make(weight_sharing=sharing)
    with kfac.capture(model, num_terms=5):
        (model(x) * c).sum((1, 2)).mean().backward()
    a, g = (x.flatten(0, 1), c.flatten(0, 1)) if sharing == "expand" else (x.mean(1), c.sum(1))
    a_side, g_side = sides(kfac, "model")
    assert_near(a_side, a.mT @ a / len(a), 1e-12)
    assert_near(g_side, g.mT @ g / 5, 1e-12)


@shows("max_tokens")
@pytest.mark.parametrize("limit", [None, 5, 24, 100])
def test_at_most_so_many_tokens_take_part_and_stand_for_all(limit: int | None) -> None:
    model = net(dtype=torch.float64)
    kfac, whole = (refresh(make(max_tokens=given), model) for given in (limit, None))
    facts = kfac.record()["layers"]["fc"]
    assert (facts["T"], facts["T_kept"]) == (24, min(24, limit or 24))
    if facts["T_kept"] == 24:
        for mine, theirs in zip(sides(kfac, "fc"), sides(whole, "fc"), strict=True):
            assert_near(mine, theirs, 1e-12)
    else:
        assert int(torch.linalg.matrix_rank(sides(kfac, "fc")[0])) == limit


@shows("max_tokens", "seed")
def test_the_seed_chooses_the_tokens() -> None:
    def factors(seed: int) -> dict[str, Tensor]:
        return kept(refresh(make(max_tokens=5, seed=seed), net()))

    assert not differs(factors(3), factors(3))
    assert differs(factors(4), factors(3))


@shows("kfac_true_fisher_head")
@pytest.mark.parametrize("shape, kind", [(FEW, "diagonal minus low rank"), (MANY, "dense")])
def test_the_exact_head_is_the_softmax_covariance(shape: tuple[int, int], kind: str) -> None:
    model, batch = net(dtype=torch.float64), words(shape)
    kfac = refresh(make(kfac_true_fisher_head=True), model, batch)
    p = model(batch[0]).detach().flatten(0, 1).softmax(-1)
    expected = torch.diag(p.mean(0)) - p.mT @ p / len(p)
    facts = kfac.record()["layers"]["head"]
    assert (facts["estimate"], facts["sides"]["G"]["representation"]) == ("exact softmax", kind)
    assert_near(sides(kfac, "head")[1], expected, 1e-12)
    assert kfac.record()["layers"]["fc"]["estimate"] == "empirical"
    assert refresh(make(), model, batch).record()["layers"]["head"]["estimate"] == "empirical"


# ---- representation --------------------------------------------------------------------------------------------------


def _kinds(tokens: int, **options: Any) -> dict[str, tuple[str, str]]:
    """{layer: kinds of A and G} of layers of widths 6 → 10 → 30 and a head 30 → 12, from so many tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 30, bias=False), nn.Linear(30, 12, bias=False))
    kfac = make(**options)
    with kfac.capture(model, num_terms=tokens):
        model(torch.randn(tokens, 6)).square().sum(1).mean().backward()
    return {
        name: (block.A.kind, block.G.kind) for name, block in kfac.kfac_factors.items() if block.A is not None
    }  # fmt: skip


D, L = "dense", "low rank"


@shows("kfac_policy", "kfac_use_woodbury", "kfac_big_threshold", "kfac_auto_rho", "kfac_auto_t_max")
@pytest.mark.parametrize(
    "tokens, options, expected",
    [
        (5, {}, [(L, L), (L, L), (L, L)]),
        (9, {}, [(D, L), (L, L), (L, L)]),
        (11, {}, [(D, D), (D, L), (L, L)]),
        (40, {}, [(D, D), (D, D), (D, D)]),
        (9, {"kfac_use_woodbury": False}, [(D, D), (D, D), (D, D)]),
        (9, {"kfac_policy": "small_only"}, [(D, D), (D, D), (D, D)]),
        (9, {"kfac_policy": "hybrid"}, [(D, D), (L, D), (L, L)]),
        (9, {"kfac_policy": "hybrid", "kfac_big_threshold": 30}, [(D, D), (L, L), (L, L)]),
        (9, {"kfac_policy": "hybrid", "kfac_big_threshold": 10}, [(D, L), (L, L), (L, L)]),
        (12, {"kfac_policy": "auto"}, [(D, D), (D, L), (L, L)]),
        (12, {"kfac_policy": "auto", "kfac_auto_rho": 0.4}, [(D, D), (D, L), (L, D)]),
        (12, {"kfac_policy": "auto", "kfac_auto_rho": 0.3}, [(D, D), (D, D), (L, D)]),
        (12, {"kfac_policy": "auto", "kfac_auto_rho": 2.0}, [(D, L), (D, L), (L, L)]),
        (12, {"kfac_policy": "auto", "kfac_auto_t_max": 11}, [(D, D), (D, D), (D, D)]),
        (9, {"kfac_auto_t_max": 8}, [(D, D), (D, D), (D, D)]),
        (9, {"kfac_auto_t_max": 9}, [(D, L), (L, L), (L, L)]),
    ],
    ids=str,
)
def test_the_policy_decides_who_is_low_rank(
    tokens: int, options: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert list(_kinds(tokens, **options).values()) == expected


@shows("kfac_policy", "kfac_use_woodbury")
@pytest.mark.parametrize("shape", [FEW, MANY])
@pytest.mark.parametrize("options", [{"kfac_use_woodbury": False}, {"kfac_policy": "auto"}, {"kfac_policy": "hybrid"}])
def test_the_policy_does_not_change_the_natural_gradient(options: dict[str, Any], shape: tuple[int, int]) -> None:
    model = net(dtype=torch.float64)
    usual, other = (refresh(make(**given), model, words(shape)) for given in ({}, options))
    expected = usual.compute_natural_gradient(model)
    for name, actual in other.compute_natural_gradient(model).items():
        assert_near(actual, expected[name], 1e-8)


@shows("kfac_auto_t_max")
def test_a_side_too_wide_to_be_dense_holds_at_most_so_many_columns() -> None:
    torch.manual_seed(0)
    model, kfac, ranks = nn.Linear(3, 16_400, bias=False), make(kfac_auto_t_max=12), []
    for tokens in (8, 8, 30):
        with kfac.capture(model, num_terms=tokens):
            model(torch.randn(tokens, 3)).square().sum(1).mean().backward()
        about = kfac.record()["layers"]["model"]["sides"]["G"]
        ranks.append((about["representation"], about["rank"]))
    assert ranks == [(L, 8), (L, 12), (L, 12)]


# ---- storage ---------------------------------------------------------------------------------------------------------


@shows("woodbury_dtype")
@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [None, *DTYPES])
def test_both_sides_rest_in_the_dtype_that_was_asked_for(
    name: str | None, model_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    default = torch.float64 if model_dtype == torch.float64 else torch.float16
    wanted = default if name is None else DTYPES[name]
    kfac = refresh(make(woodbury_dtype=name), net(dtype=model_dtype), words(shape))
    state = kfac.state_dict()
    for layer in LAYERS:
        for side, number in state["layers"][layer]["sides"].items():
            if (layer, side) != ("table", "A"):  # counts
                assert state["factors"][number]["body"].dtype == wanted, (layer, side)
                told = kfac.record()["layers"][layer]["sides"][side]["dtype"]
                assert told == str(wanted).removeprefix("torch.")


@shows("woodbury_dtype")
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
def test_the_quantisation_error_in_the_record_is_the_one_that_was_made(dtype: str, shape: tuple[int, int]) -> None:
    model = net(width=24)
    stored, exact = (refresh(make(woodbury_dtype=given), model, words(shape)) for given in (dtype, "fp64"))
    for layer in LINEAR:
        for side, actual, expected in zip("AG", sides(stored, layer), sides(exact, layer), strict=True):
            about = stored.record()["layers"][layer]["sides"][side]
            measured = float((actual - expected).norm() / expected.norm())
            told = about["quantisation_error"]
            if dtype == "fp32":
                assert told == 0 and measured <= 1e-6
            elif about["representation"] == "dense":
                assert told == pytest.approx(measured, rel=1e-2), (layer, side)
            else:
                assert measured <= told <= 5 * measured, (layer, side)


@pytest.mark.parametrize("decay, refreshes", [(0.0, 1), (0.9, 4)], ids=["tied", "averaged"])
def test_the_quantisation_error_of_a_sum_is_that_of_its_parts(decay: float, refreshes: int) -> None:
    model, kfacs = net(tied=True, width=24), [make(woodbury_dtype=given, ema_decay=decay) for given in ("fp16", "fp64")]
    for i in range(refreshes):
        for kfac in kfacs:
            refresh(kfac, model, words(MANY, seed=i))
    stored, exact = kfacs
    for layer in ("table", "fc"):
        for side, actual, expected in zip("AG", sides(stored, layer), sides(exact, layer), strict=True):
            about = stored.record()["layers"][layer]["sides"][side]
            if about["representation"] == "dense":
                measured = float((actual - expected).norm() / expected.norm())
                told = about["quantisation_error"]
                assert 1e-5 < measured <= 1.05 * told <= 5 * measured, (layer, side)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("outputs", [7, 2100], ids=["dense", "low rank"])
def test_tiny_gradients_of_a_mean_over_thousands_of_tokens_do_not_underflow(outputs: int, dtype: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, outputs, bias=False)
    # Gradients of 1e-8 and, for every third token, nine orders less; the mean divides them by 2048 once more.
    c = 1e-8 * torch.randn(2, 1024, outputs) * torch.where(torch.arange(1024) % 3 == 0, 1e-9, 1.0)[:, None]
    kfac = make(woodbury_dtype=dtype)
    with kfac.capture(model, num_terms=2048):
        ((model(torch.randn(2, 1024, 3)) * c).sum(-1).mean()).backward()
    factor, rows = kfac.kfac_factors["model"].G, c.flatten(0, 1).double()
    step = {"fp16": 2**-11, "bf16": 2**-8}[dtype]
    assert_near(factor.diagonal(), rows.square().mean(0), 2 * step)
    if outputs == 7:
        assert_near(factor.to_dense(), rows.mT @ rows / 2048, 2 * step)
    else:
        columns = factor.columns.stored.load(dtype=torch.float64)
        error = (columns - rows.mT / 2048**0.5).norm(dim=0) / columns.norm(dim=0)
        assert float(error.max()) <= step  # the small tokens too
    assert 0.05 * step <= kfac.record()["layers"]["model"]["sides"]["G"]["quantisation_error"] <= 2 * step


@shows("woodbury_store_device")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_factors_of_a_model_on_the_cpu_are_on_the_cpu(device: str) -> None:
    kfac = refresh(make(woodbury_store_device=device), net())
    stored = [about["device"] for facts in kfac.record()["layers"].values() for about in facts["sides"].values()]
    assert set(stored) == {"cpu"}
    assert {t.device.type for t in kept(kfac).values()} == {"cpu"}


@shows("woodbury_store_device")
@pytest.mark.skipif(torch.cuda.is_available(), reason="has one")
def test_cuda_without_a_device_is_refused_when_the_object_is_made() -> None:
    with refused("woodbury_store_device", '"cpu"', "expected"):
        make(woodbury_store_device="cuda")


# ---- processes, strictness -------------------------------------------------------------------------------------------


@shows("kfac_distributed_reduce")
@pytest.mark.parametrize("reduce", ["gram", "gather", "dense", "none"])
def test_one_process_reduces_nothing(reduce: str) -> None:
    kfac = refresh(make(kfac_distributed_reduce=reduce), net())
    record = kfac.record()
    assert (record["world_size"], record["reduce"], record["sent"]) == (1, reduce, {})
    assert all(side["reduction"] == "" for layer in record["layers"].values() for side in layer["sides"].values())
    assert_same(kept(kfac), kept(refresh(make(), net())))


@shows("kfac_distributed_reduce")
def test_a_process_by_itself_among_several_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    record = refresh(make(kfac_distributed_reduce="none"), net()).record()
    assert (record["world_size"], record["reduce"]) == (2, "none")


@shows("process_group")
def test_a_group_without_processes_is_refused_at_the_capture() -> None:
    kfac = make(process_group="nccl")
    with refused("process_group", "expected None"):
        refresh(kfac, net())
    assert kfac.steps == 0


def unused() -> Toy:
    """A layer that no batch reaches."""
    return Toy(lambda net, x: net.used(x), used=nn.Linear(3, 2), idle=nn.Linear(3, 2))


@shows("strict")
@pytest.mark.parametrize("strict", [False, True])
def test_a_parameter_without_data_is_recorded_or_refused(strict: bool) -> None:
    model, kfac = unused(), make(strict=strict)

    def step() -> None:
        with kfac.capture(model, num_terms=4):
            model(torch.randn(4, 3)).square().sum(1).mean().backward()

    if strict:
        with refused("idle.weight", "strict=True"):
            step()
        return
    step()
    assert kfac.coverage["idle.weight"].status == "unused"
    model.idle.weight.grad = torch.ones(2, 3)
    natural = kfac.compute_natural_gradient(model)
    assert torch.equal(natural["idle.weight"], model.idle.weight.grad)
    assert kfac.record()["identity"] == ["idle.weight"]


@shows("memory_budget")
def test_a_budget_bounds_what_is_held_and_the_record_says_what_it_cost() -> None:
    free = make().plan(net())
    kfac = refresh(make(memory_budget=free.total("cpu") * 9 // 10), net(), words(MANY))
    assert kfac.plan(net()).total("cpu") <= kfac.options.budget < free.total("cpu")
    told = [side["reason"] for layer in kfac.record()["layers"].values() for side in layer["sides"].values()]
    assert any("memory_budget" in reason for reason in told)


@shows("ekfac")
def test_ekfac_has_eigenvalues_of_its_own() -> None:
    batch, vector = words(MANY), {"fc.weight": torch.ones(9, 8)}
    found = [refresh(make(ekfac=on, damping_mode="joint"), net(), batch) for on in (False, True)]
    plain, corrected = (kfac.compute_fisher_vector_product(vector)["fc.weight"] for kfac in found)
    assert not torch.allclose(plain, corrected, rtol=1e-2)


@shows("one_sided")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [FEW, MANY])
def test_the_wider_side_is_its_diagonal(shape: tuple[int, int], exact: bool) -> None:
    """Of "fc" and "head" that is G; sides of equal width stay as they are."""
    model, given = net(dtype=torch.float64), {"kfac_use_woodbury": False, "kfac_true_fisher_head": exact}
    whole, one = (refresh(make(one_sided=one, **given), model, words(shape)) for one in (False, True))
    for layer in ("q", "k", "v", "fc", "head"):
        (A, G), (same, diagonal) = sides(whole, layer), sides(one, layer)
        assert_near(same, A, 1e-12)
        assert_near(diagonal, torch.diag(G.diagonal()) if layer in ("fc", "head") else G, 1e-12)


def test_no_option_is_without_a_test_that_shows_what_it_does() -> None:
    known = set(inspect.signature(gramian.KFACNaturalGradient.__init__).parameters) - {"self"}
    assert known == SHOWN


def test_options_are_in_the_record_as_they_were_given() -> None:
    given = {"damping": 0.02, "ema_decay": 0.5, "update_freq": 3, "kfac_policy": "hybrid", "seed": 7, "max_tokens": 9}
    options = gramian.KFACNaturalGradient(**given).record()["options"]
    assert {name: options[name] for name in given} == given
    defaults = {n: p.default for n, p in inspect.signature(gramian.KFACNaturalGradient.__init__).parameters.items()}
    assert all(options[name] == defaults[name] for name in options.keys() - given.keys())


def test_an_idle_capture_checks_its_arguments() -> None:
    kfac, model = refresh(make(update_freq=10), net()), net()
    with refusal("num_terms"):
        kfac.capture(model)
    with opened(kfac, model, words()) as cap, refusal("num_terms"):
        loss_of(model, words()).backward()
        cap.next()
