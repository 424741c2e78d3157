"""The record and the log: every number that is needed to repeat a computation, and none that is not true."""

import json
import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from tests.curvature.small import FEW, LAYERS, MADE, MANY, Net, damped, loss_of, net, opened, refresh, sides, words

SHAPES = pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "joint": {"damping_mode": "joint"},
    "factored": {"damping_mode": "factored", "damping_A": 0.1, "damping_G": 1e-3},
    "no clip": {"use_eigenvalue_correction": False},
    "no limit": {"max_condition_number": float("inf")},
    "active clip": {"damping_mode": "factored", "damping": 1e-6, "max_condition_number": 20.0},
    "exact head": {"kfac_true_fisher_head": True},
    "subset": {"max_tokens": 4},
    "narrow": {"min_layer_size": 9},
    "strict": {"strict": True},
}


def make(**options: Any) -> gramian.KFACNaturalGradient:
    return gramian.KFACNaturalGradient(**{"update_freq": 1, "damping": 1e-3, **options})


def _clip(matrix: Tensor, value: float, kappa: float) -> dict[str, float]:
    """What the clip does to M + λI, counted on all eigenvalues."""
    shifted = torch.linalg.eigvalsh(matrix.double()).clamp(min=0) + value
    floor = float(shifted.max()) / kappa
    low = shifted[shifted < floor]
    return {"count": len(low), "total": len(shifted), "mass": float((floor - low).sum()), "floor": floor}


def _condition(matrix: Tensor, value: float, kappa: float | None) -> float:
    values = torch.linalg.eigvalsh(damped(matrix, value, kappa))
    return float(values.max() / values.min())


# ---- record ----------------------------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_record_is_json_at_every_moment(variant: str, tied: bool, shape: tuple[int, int]) -> None:
    kfac, model = make(**VARIANTS[variant]), net(tied)

    def check() -> None:
        record = kfac.record()
        assert json.loads(json.dumps(record, allow_nan=False)) == record

    check()
    refresh(kfac, model, words(shape))
    check()
    kfac.compute_natural_gradient(model)
    check()
    kfac.compute_natural_gradient(model, power=-0.5)
    check()
    if not kfac.options.strict:
        with opened(kfac, model, words(shape)):
            (float("nan") * loss_of(model, words(shape))).backward()
        assert len(kfac.record()["dropped"]) == 1
        check()


def test_the_record_has_every_field_of_the_reproducibility_checklist() -> None:
    options = {"damping": 1e-2, "max_condition_number": 50.0, "update_freq": 3, "kfac_policy": "auto", "seed": 9}
    model, kfac = net(), make(**options, woodbury_store_device="cpu", woodbury_dtype="bf16")
    refresh(kfac, model, words(MANY))
    kfac.compute_natural_gradient(model)
    record = kfac.record()
    assert record["options"]["update_freq"] == 3
    assert record["options"]["woodbury_store_device"] == "cpu"
    assert record["options"]["kfac_distributed_reduce"] == record["reduce"] == "gram"
    assert (record["world_size"], record["seed"]) == (1, 9)
    assert record["versions"]["torch"] == torch.__version__ and record["versions"]["gramian"] == gramian.__version__
    for name in LAYERS:
        facts = record["layers"][name]
        assert facts["lambda_A"] > 0 and facts["lambda_G"] > 0
        assert (facts["kappa_max"], facts["policy"], facts["T"]) == (50.0, "auto", 24)
        for side in ("A", "G"):
            about = facts["sides"][side]
            assert 1 <= about["kappa"] <= 50.0
            assert 0 <= about["clip"]["count"] <= about["clip"]["total"]
            assert about["device"] == "cpu"
            assert about["dtype"] == ("float32" if (name, side) == ("table", "A") else "bfloat16")


@SHAPES
def test_the_record_has_dims_tokens_terms_and_representation_of_every_layer(shape: tuple[int, int]) -> None:
    model, tokens = net(), shape[0] * shape[1]
    kfac = refresh(make(), model, words(shape))
    record = kfac.record()
    assert list(record["layers"]) == list(kfac.kfac_factors) and record["head"] == "head"
    form = "low rank" if shape == FEW else "dense"
    expected = {
        "table": (11, 8, ["table.weight"], "diagonal"),
        "q": (8, 8, ["q.weight"], form),
        "k": (8, 8, ["k.weight"], form),
        "v": (8, 8, ["v.weight"], form),
        "fc": (9, 9, ["fc.weight", "fc.bias"], form),
        "head": (8, 11, ["head.weight"], form),
    }
    for name, (inputs, outputs, parameters, of_inputs) in expected.items():
        facts = record["layers"][name]
        assert (facts["in_dim"], facts["out_dim"], facts["parameters"]) == (inputs, outputs, parameters)
        assert facts["bias"] is (name == "fc") and facts["estimate"] == "empirical"
        assert [facts[key] for key in ("T", "T_kept", "T_local", "T_global", "N")] == [tokens] * 5
        assert facts["shares_A_with"] == ("q" if name in ("k", "v") else "")
        assert (facts["age"], facts["refreshes"]) == (0, 1)
        about = facts["sides"]
        assert (about["A"]["representation"], about["G"]["representation"]) == (of_inputs, form)
        assert about["G"]["rank"] == (outputs if form == "dense" else tokens)
        assert about["A"]["discarded_trace"] == about["G"]["discarded_trace"] == 0
        assert about["A"]["reason"] and about["G"]["reason"] and facts["seconds"] > 0
    for name in MADE:
        facts = record["layers"][name]
        assert (facts["approximation"], list(facts["sides"])) == ("exact block", ["G"])
        assert (facts["out_dim"], facts["lambda_A"], facts["N"]) == (8, None, tokens)
    assert record["seconds"]["build"] > 0


def test_bytes_are_those_of_the_tensors_held_and_shared_ones_count_once() -> None:
    model = net()
    kfac = refresh(make(), model, words(MANY))
    state, record = kfac.state_dict(), kfac.record()
    size = {
        number: sum(t.nbytes for part, t in parts.items() if isinstance(t, Tensor) and part != "error")
        for number, parts in state["factors"].items()
    }
    for name, layer in state["layers"].items():
        assert record["layers"][name]["bytes"] == sum(size[number] for number in layer["sides"].values()), name
    assert record["bytes"] == sum(size.values()) < sum(facts["bytes"] for facts in record["layers"].values())
    kfac.compute_natural_gradient(model, power=-0.5)  # eigenvectors are held, too
    assert kfac.record()["bytes"] > record["bytes"]


@pytest.mark.parametrize("value", [1e-3, 0.2])
def test_damping_in_the_record_is_that_of_the_traces(value: float) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(damping=value), model)
    for name in LAYERS:
        facts = kfac.record()["layers"][name]
        a_side, g_side = sides(kfac, name)
        pi = float(((a_side.trace() / len(a_side)) / (g_side.trace() / len(g_side))).sqrt())
        assert facts["damping_mode"] == "pi" and facts["pi"] == pytest.approx(pi, rel=1e-12)
        assert facts["lambda_A"] == pytest.approx(pi * value**0.5, rel=1e-12)
        assert facts["lambda_G"] == pytest.approx(value**0.5 / pi, rel=1e-12)
        assert facts["sides"]["A"]["trace"] == pytest.approx(float(a_side.trace()), rel=1e-12)


@SHAPES
@pytest.mark.parametrize("variant", ["default", "factored", "active clip", "no clip", "no limit", "exact head"])
def test_a_condition_is_a_bound_until_it_is_known_and_then_exact(variant: str, shape: tuple[int, int]) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(**VARIANTS[variant]), model, words(shape))
    before = kfac.record()["layers"]
    kfac.compute_natural_gradient(model, power=-0.5)
    after, exact = kfac.record()["layers"], 0
    for name in LAYERS:
        for side, matrix in zip("AG", sides(kfac, name), strict=True):
            value, limit = before[name][f"lambda_{side}"], before[name]["kappa_max"]
            true = _condition(matrix, value, limit)
            known, later = before[name]["sides"][side], after[name]["sides"][side]
            assert known["kappa_exact"] is (known["representation"] == "diagonal"), (name, side)
            assert known["kappa"] >= true * (1 - 1e-9), (name, side)
            if later["representation"].startswith("diagonal minus"):  # is never decomposed
                assert later["kappa"] >= true * (1 - 1e-9)
                continue
            exact += 1
            assert later["kappa_exact"] and later["kappa"] == pytest.approx(true, rel=1e-7), (name, side)
            values = torch.linalg.eigvalsh(matrix)
            if float(values.min()) > 1e-9 * float(values.max()):
                assert later["kappa_before"] == pytest.approx(float(values.max() / values.min()), rel=1e-6)
    assert exact >= 11


@SHAPES
@pytest.mark.parametrize("kappa", [4.0, 100.0, 1e6])
def test_clip_counts_and_masses_are_those_of_the_written_out_sides(kappa: float, shape: tuple[int, int]) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(damping_mode="factored", damping=1e-4, max_condition_number=kappa), model, words(shape))
    assert all(about["clip"] is None for about in kfac.record()["layers"]["q"]["sides"].values())
    kfac.compute_natural_gradient(model, power=-0.5)
    counts = []
    for name in LAYERS:
        for side, matrix in zip("AG", sides(kfac, name), strict=True):
            told = kfac.record()["layers"][name]["sides"][side]["clip"]
            expected = _clip(matrix, 1e-4, kappa)
            assert (told["count"], told["total"]) == (expected["count"], expected["total"]), (name, side)
            assert told["mass"] == pytest.approx(expected["mass"], rel=1e-6, abs=1e-12)
            counts.append(told["count"])
    assert max(counts) > 0 if kappa < 1e6 else max(counts) == 0


@SHAPES
def test_the_clip_of_joint_damping_is_counted_on_the_product(shape: tuple[int, int]) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(damping_mode="joint", damping=1e-5, max_condition_number=30.0), model, words(shape))
    kfac.compute_natural_gradient(model)
    for name in ("q", "fc", "head"):
        a_side, g_side = sides(kfac, name)
        told, expected = kfac.record()["layers"][name]["clip_joint"], _clip(torch.kron(g_side, a_side), 1e-5, 30.0)
        assert (told["count"], told["total"]) == (expected["count"], expected["total"])
        assert told["mass"] == pytest.approx(expected["mass"], rel=1e-6) and told["count"] > 0


def test_attempts_and_decompositions_are_on_the_record() -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(), model)
    empty = kfac.record()["layers"]["q"]["sides"]["A"]
    assert (empty["cholesky"], empty["eigendecomposition"], empty["error_bound"]) == ([], "", 0.0)
    kfac.compute_natural_gradient(model)
    solved = kfac.record()["layers"]["q"]["sides"]["A"]
    assert solved["cholesky"] == [{"jitter": 0.0, "result": "ok"}] and solved["eigendecomposition"] == ""
    kfac.compute_natural_gradient(model, power=-0.5)
    assert kfac.record()["layers"]["q"]["sides"]["A"]["eigendecomposition"] == "float64 on cpu"
    assert kfac.record()["seconds"]["apply"] > 0


def test_the_error_bound_of_an_approximate_power_is_on_the_record_and_holds() -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(kfac_true_fisher_head=True), model, words(FEW))
    found = kfac.compute_natural_gradient(model, power=-0.5)["head.weight"]
    about = kfac.record()["layers"]["head"]
    a_side, g_side = sides(kfac, "head")
    roots = []
    for matrix, value in ((g_side, about["lambda_G"]), (a_side, about["lambda_A"])):
        values, vectors = torch.linalg.eigh(damped(matrix, value, 1e6))
        roots.append((vectors * values.rsqrt()) @ vectors.mT)
    expected = roots[0] @ model.head.weight.grad @ roots[1]
    bound = about["sides"]["G"]["error_bound"]
    assert 0 < bound < 1e-6
    assert float((found - expected).norm()) <= (bound + 1e-9) * float(expected.norm())


def test_age_counts_steps_since_the_data() -> None:
    model, kfac = net(), make(update_freq=3)
    ages = []
    for seed in range(5):
        refresh(kfac, model, words(seed=seed))
        ages.append(kfac.record()["layers"]["fc"]["age"])
    assert ages == [0, 1, 2, 0, 1]


class Switched(Net):
    """Leaves a layer out when told to."""

    skip = False

    def forward(self, x_BT: Tensor) -> Tensor:
        h = self.norm(self.table(x_BT))
        h = h if self.skip else self.v(h)
        return self.head(self.fc(self.q(h) * self.k(h).sigmoid())[..., :-1].tanh())


def test_a_layer_that_a_refresh_did_not_reach_grows_old_alone() -> None:
    torch.manual_seed(0)
    model, kfac = Switched(), make(ema_decay=0.5)
    refresh(kfac, model)
    model.skip = True
    refresh(kfac, model)
    record = kfac.record()
    assert {name for name, facts in record["layers"].items() if facts["age"] == 1} == {"v"}
    assert {name for name, facts in record["layers"].items() if facts["refreshes"] == 1} == {"v"}


# ---- log -------------------------------------------------------------------------------------------------------------


def _lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "gramian.curvature" and r.levelno == level]


def _fields(line: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """{field: ("=" or "≤", value)} of a layer's line."""
    name, _, rest = line.partition(": ")
    parts = [re.fullmatch(r"([^=≤]+)(=|≤)(\S+)", part) for part in rest.split(", ")]
    assert all(parts), line
    return name, {part[1]: (part[2], part[3]) for part in parts if part}


@SHAPES
@pytest.mark.parametrize("variant", ["default", "joint", "factored", "active clip", "no clip", "exact head", "narrow"])
def test_every_value_of_a_layers_line_is_that_of_the_record(
    variant: str, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    model, kfac = net(), make(**VARIANTS[variant])
    with caplog.at_level(logging.INFO, "gramian.curvature"):
        refresh(kfac, model, words(shape))
    *lines, summary = _lines(caplog, logging.INFO)
    record = kfac.record()
    assert [_fields(line)[0] for line in lines] == list(record["layers"])
    for line in lines:
        name, fields = _fields(line)
        facts = record["layers"][name]
        expected = {key: ("=", str(facts[key])) for key in ("in_dim", "out_dim", "T")}
        for side, about in facts["sides"].items():
            expected[f"λ_{side}"] = ("=", f"{facts[f'lambda_{side}']:.3g}")
            expected[f"κ_{side}"] = ("=" if about["kappa_exact"] else "≤", f"{about['kappa']:.3g}")
        kappa = facts["kappa_max"]
        expected["κ_max"] = ("=", "off" if kappa is None else f"{kappa:.3g}")
        expected["policy"], expected["storage"] = ("=", facts["policy"]), ("=", "cpu")
        expected["dtype"] = ("=", "/".join(dict.fromkeys(about["dtype"] for about in facts["sides"].values())))
        expected["memory"] = ("=", f"{facts['bytes'] / 1e6:.1f}MB")
        expected["ε"] = ("=", "1e-06")
        assert fields == expected, name
    assert summary.startswith("K-FAC update 1:")


def test_a_layers_line_is_true() -> None:
    # Against the model and the matrices, not against the record.
    torch.manual_seed(0)
    model, kfac = net(dtype=torch.float64), make(damping=0.01)
    refresh(kfac, model)
    from gramian.curvature.persist.curvature_record import layer_line

    kfac.compute_natural_gradient(model, power=-0.5)
    _, fields = _fields(layer_line("fc", kfac.record()["layers"]["fc"]))
    a_side, g_side = sides(kfac, "fc")
    pi = float(((a_side.trace() / 9) / (g_side.trace() / 9)).sqrt())
    assert fields["in_dim"] == fields["out_dim"] == ("=", "9") and fields["T"] == ("=", "24")
    assert fields["λ_A"] == ("=", f"{pi * 0.1:.3g}") and fields["λ_G"] == ("=", f"{0.1 / pi:.3g}")
    assert fields["κ_A"] == ("=", f"{_condition(a_side, pi * 0.1, 1e6):.3g}")
    assert fields["κ_G"] == ("=", f"{_condition(g_side, 0.1 / pi, 1e6):.3g}")
    assert fields["storage"] == ("=", "cpu") and fields["dtype"] == ("=", "float64")


def test_memory_in_the_line_is_in_megabytes(caplog: pytest.LogCaptureFixture) -> None:
    model = net(width=900)
    with caplog.at_level(logging.INFO, "gramian.curvature"):
        refresh(make(kfac_use_woodbury=False), model)
    by_name = dict(map(_fields, _lines(caplog, logging.INFO)[:-1]))
    assert by_name["q"]["memory"] == (
        "=",
        f"{(2 * 900 * 900 * 2 + 4 * 900 * 4) / 1e6:.1f}MB",
    )  # two bodies, four scales


SUMMARY = re.compile(
    r"K-FAC update (\d+): (\d+) layers \((\d+) Woodbury, (\d+) eigendecomp\), (\d+) other blocks, "
    r"policy=(?:all|auto|hybrid|no low rank), update_freq=(\d+), damping=(.+), κ_max=(?:1e\+06|off), reduce=(\w+), "
    r"world_size=(\d+)"
)


@pytest.mark.parametrize(
    "options, shape, layers, damping",
    [
        ({}, MANY, (6, 0, 6, 2), "pi 0.001"),
        ({"damping": 0.25}, FEW, (6, 6, 0, 2), "pi 0.25"),
        ({"kfac_policy": "hybrid", "kfac_big_threshold": 9}, FEW, (6, 2, 4, 2), "pi 0.001"),
        ({"kfac_true_fisher_head": True, "kfac_policy": "hybrid"}, FEW, (6, 1, 5, 2), "pi 0.001"),
        ({"damping_mode": "joint", "damping": 0.5}, MANY, (6, 0, 6, 2), "joint 0.5"),
        ({"damping_mode": "joint", "damping_A": 0.3, "damping_G": 0.3}, MANY, (6, 0, 6, 2), "joint 0.3"),
        ({"damping_mode": "factored", "damping_A": 0.1}, MANY, (6, 0, 6, 2), "factored (λ_A=0.1, λ_G=0.001)"),
        ({"min_layer_size": 9, "update_freq": 4}, MANY, (0, 0, 0, 9), "pi 0.001"),
    ],
    ids=str,
)
def test_the_summary_counts_and_names_what_was_done(
    options: dict[str, Any],
    shape: tuple[int, int],
    layers: tuple[int, ...],
    damping: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kfac = make(**options, kfac_distributed_reduce="gather")
    with caplog.at_level(logging.INFO, "gramian.curvature"):
        for seed in range(2):
            refresh(kfac, net(), words(shape, seed), force=True)
    summaries = [line for line in _lines(caplog, logging.INFO) if line.startswith("K-FAC update")]
    assert len(summaries) == 2
    for number, line in enumerate(summaries[:1], start=1):
        found = SUMMARY.fullmatch(line)
        assert found, line
        assert int(found[1]) == number and tuple(map(int, found.group(2, 3, 4, 5))) == layers
        assert found.group(6, 7, 8, 9) == (str(kfac.options.update_freq), damping, "gather", "1")
    assert summaries[1].startswith("K-FAC update 2:")


def test_the_world_size_in_the_log_is_that_of_the_processes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    with caplog.at_level(logging.INFO, "gramian.curvature"):
        refresh(make(kfac_distributed_reduce="none"), net())
    assert _lines(caplog, logging.INFO)[-1].endswith("reduce=none, world_size=4")


def test_steps_without_a_refresh_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    kfac, model = refresh(make(update_freq=10), net()), net()
    with caplog.at_level(logging.DEBUG, "gramian.curvature"):
        refresh(kfac, model)
    assert caplog.records == []


def test_a_dropped_refresh_is_a_warning_and_no_update(caplog: pytest.LogCaptureFixture) -> None:
    model, kfac = net(), refresh(make(), net())
    with caplog.at_level(logging.INFO, "gramian.curvature"), opened(kfac, model, words()):
        (float("nan") * loss_of(model, words())).backward()
    assert _lines(caplog, logging.INFO) == []
    (warning,) = _lines(caplog, logging.WARNING)
    assert "step 1" in warning and kfac.record()["dropped"][0]["reason"] in warning


@SHAPES
@pytest.mark.parametrize("mode", ["factored", "joint"])
def test_debug_says_how_many_eigenvalues_were_clipped_on_every_side(
    mode: str, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(damping_mode=mode, damping=1e-4, max_condition_number=10.0), model, words(shape))
    with caplog.at_level(logging.DEBUG, "gramian.curvature"):
        kfac.compute_natural_gradient(model, power=-0.5)
    told = {}
    for line in _lines(caplog, logging.DEBUG):
        found = re.fullmatch(r"(\S+): clipped (\d+)/(\d+) eigenvalues \((A|G|joint)\)", line)
        assert found, line
        told[found[1], found[4]] = (int(found[2]), int(found[3]))
    expected = {}
    for name in LAYERS:
        a_side, g_side = sides(kfac, name)
        parts = {"A": a_side, "G": g_side} if mode == "factored" else {"joint": torch.kron(g_side, a_side)}
        expected.update({(name, side): _clip(matrix, 1e-4, 10.0) for side, matrix in parts.items()})
    for name in MADE:
        expected[name, "G"] = _clip(kfac.kfac_factors[name].G.to_dense(), 1e-4, 10.0)
    assert told == {key: (clip["count"], clip["total"]) for key, clip in expected.items()}
    assert any(count for count, _ in told.values())


@SHAPES
def test_debug_says_the_tokens_here_and_everywhere(shape: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gramian.curvature"):
        refresh(make(), net(), words(shape))
    tokens = shape[0] * shape[1]
    for name in LAYERS:
        assert f"{name}: T_local={tokens}, T_global={tokens}" in _lines(caplog, logging.DEBUG)
