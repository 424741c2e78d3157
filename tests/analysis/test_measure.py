"""What an analysis reports is what the library and the dense oracles give."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import gramian
from gramian.analysis import Settings, Subject, analyse
from gramian.analysis.collect import collect
from gramian.analysis.measure import kfac_of, placed, plan_of
from gramian.analysis.result_file import FILE, new_folder, write_result
from gramian.analysis.spectrum_curves import PER_DECADE, kfac_density
from gramian.core.errors import GramianError
from gramian.curvature import GGNOperator, HessianOperator
from gramian.linalg import lanczos
from gramian.oracles import dense_kfac
from tests.analysis.subjects import SETTINGS, joined, tiny
from tests.kit.memory import measured
from tests.oracles import dense_capacity, dense_curvature

LAYERS = {"blocks.0": True, "blocks.1": True, "head": False}


def dense_factors(subject):
    """A and G of the linear layers by the oracle, from the data's labels."""
    batch, model = joined(subject), subject.model
    counted = batch["labels"] != -100

    def backward():
        logits = model(batch["tokens_BT"])
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum").backward()

    tokens = dense_kfac.layer_tokens(model, backward, list(LAYERS))
    model.zero_grad()
    weights_T = counted.flatten().double()
    terms = float(counted.sum())
    return {name: dense_kfac.factors(tokens[name], terms, 1.0, bias, weights_T) for name, bias in LAYERS.items()}


@pytest.mark.oracle
def test_the_numbers_are_those_of_dense_oracles():
    subject = tiny()
    result = analyse(subject, replace(SETTINGS, probes=16))
    for name, (A, G) in dense_factors(subject).items():
        values = dense_capacity.eigenvalues(A, G)
        for key, expected in dense_capacity.metrics(values, SETTINGS.damping).items():
            assert result["kfac"]["metrics"]["layers"][name][key] == pytest.approx(expected, rel=1e-7), (name, key)
        curve = result["kfac"]["spectra"][name]
        for value, rank in zip(curve["eigenvalues"][::10], curve["ranks"][::10], strict=True):
            if abs(float((values / value).log().abs().min())) > 1e-6 and value > 1e-9 * float(values.max()):
                assert rank == int((values > value).sum()), (name, value)
        assert curve["ranks"][0] == 1 and curve["eigenvalues"][0] == pytest.approx(float(values.max()))
    batch = joined(subject)
    dense = (subject.model, lambda m: m(batch["tokens_BT"]), batch["labels"].clamp(min=0), batch["labels"] != -100)
    exact = torch.linalg.eigvalsh(dense_curvature.dense_ggn(*dense)).flip(0)
    ggn = result["ggn"]
    assert ggn["extremes"]["eigenvalues"] == pytest.approx(exact[:4].tolist(), rel=1e-6)
    assert ggn["extremes"]["converged"] and ggn["extremes"]["smallest"] > -1e-12
    assert abs(ggn["trace"]["value"] - float(exact.sum())) < 5 * ggn["trace"]["standard_error"]
    dimension = float((exact.clamp(min=0) / (exact.clamp(min=0) + SETTINGS.damping)).sum())
    assert ggn["effective_dimension"]["value"] > dimension - 5 * ggn["effective_dimension"]["standard_error"]
    assert ggn["participation_ratio"] == pytest.approx(float(exact.sum() ** 2 / exact.square().sum()), rel=0.3)
    assert ggn["dim"] == len(exact) and ggn["terms"] == 18


@pytest.mark.oracle
def test_the_ends_of_the_hessian_are_those_of_the_dense_one():
    subject = tiny((5,))
    result = analyse(subject, Settings(damping=0.1, eigenvalues=3, probes=0, hessian=True))
    batch = joined(subject)
    dense = dense_curvature.dense_hessian(
        subject.model, lambda m: m(batch["tokens_BT"]), batch["labels"].clamp(min=0), batch["labels"] != -100
    )
    values = torch.linalg.eigvalsh(dense)
    ends = result["hessian"]["extremes"]
    assert ends["eigenvalues"] == pytest.approx([float(values[-1]), float(values[-2]), float(values[0])], rel=1e-5)
    assert "ggn" not in result and result["complete"]


def test_the_numbers_are_the_library_s_own():
    """As a user would call it on all rows at once."""
    subject = tiny()
    result = analyse(subject, SETTINGS)
    kfac = gramian.KFACNaturalGradient(damping=0.1, damping_mode="joint")
    kfac.collect_kfac_factors(subject.model, joined(subject), causal_shift=False)
    assert same(result["kfac"]["metrics"], kfac.compute_capacity_metrics())
    assert result["kfac"]["top_eigenvalues"] == pytest.approx(kfac.top_eigenvalues(4).tolist(), rel=1e-12)
    assert result["kfac"]["record"]["layers"]["head"]["N"] == subject.terms == 18
    operator = GGNOperator(subject.model, subject.batches, causal_shift=False)
    assert result["ggn"]["extremes"]["eigenvalues"] == pytest.approx(
        lanczos(operator, 4).eigenvalues.tolist(), rel=1e-6
    )


def same(left, right):
    """Nested numbers to rounding."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == (pytest.approx(right, rel=1e-9) if isinstance(right, float) else right)


@pytest.mark.parametrize("fisher", ["empirical", "mc", "true"])
def test_any_split_into_batches_gives_the_same_factors(fisher):
    found = []
    for rows in ((5,), (3, 2), (1, 1, 3)):
        subject = tiny(rows)
        kfac = kfac_of(subject, Settings(fisher=fisher, ekfac=True))
        loss = collect(kfac, subject.model, subject.share(0, 1), fisher, 3, lambda done, total: None)
        found.append((loss, kfac))
    for loss, kfac in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12)
        for name, block in kfac.kfac_factors.items():
            for side, factor in block.factors.items():
                torch.testing.assert_close(factor.to_dense(), found[0][1].kfac_factors[name].factors[side].to_dense())
    layers = found[0][1].record()["layers"]
    kinds = {"empirical": ("empirical",) * 2, "mc": ("mc",) * 2, "true": ("mc", "exact softmax")}
    assert (layers["blocks.0"]["estimate"], layers["head"]["estimate"]) == kinds[fisher]


def test_dropout_rests_and_the_model_is_left_as_it_was():
    subject = tiny()
    subject.model.train()
    subject.model.blocks[0].register_forward_hook(lambda module, args, output: F.dropout(output, 0.5, module.training))
    before = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    state = torch.random.get_rng_state()
    result = analyse(subject, Settings(eigenvalues=2, probes=2, steps=2))
    assert result["kfac"]["loss"] == analyse(tiny(), Settings(probes=0))["kfac"]["loss"] and subject.model.training
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in subject.model.named_parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_result_is_handed_out_after_every_stage_and_says_whether_it_is_whole(tmp_path):
    seen = []
    result = analyse(
        tiny(), Settings(eigenvalues=2, probes=2, steps=2), keep=lambda r: seen.append((r["complete"], [*r]))
    )
    assert [complete for complete, _ in seen] == [False, True]
    assert "ggn" not in seen[0][1] and "kfac" in seen[0][1]
    result["kfac"]["loss"] = math.inf
    write_result(result, tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["kfac"]["loss"] is None


def test_the_density_of_all_layers_counts_their_eigenvalues():
    result = analyse(tiny(), Settings(probes=0))
    density, curves = result["kfac"]["density"], result["kfac"]["spectra"]
    inside = sum(density["per_decade"]) / PER_DECADE
    assert inside == pytest.approx(sum(curve["ranks"][-1] for curve in curves.values()), rel=0.05)
    assert density == kfac_density(curves)


def test_a_density_has_the_range_of_float64():
    """A model that is sure of its answers has gradients whose squares float32 does not hold."""
    density = kfac_density({"a": {"eigenvalues": [1e-60], "ranks": [2.0]}})
    assert density["eigenvalues"][0] < 1e-60 < density["eigenvalues"][-1]
    assert 3 < max(density["per_decade"]) < 4  # of 2 eigenvalues, 3.99 in the middle of the kernel


def test_the_plan_bounds_the_bases():
    subject, settings = tiny(), Settings(eigenvalues=2, probes=2, steps=3)
    plan = plan_of(subject, settings)
    operator = HessianOperator(subject.model, "cross_entropy", subject.batches, causal_shift=False)
    found = lanczos(operator, 2, max_basis=settings.lanczos_basis, search_copies=False)
    assert found.basis_bytes <= plan.stages["Lanczos"] <= plan.most
    assert plan.lines()[-1].startswith("stages one after another: K-FAC")


@pytest.mark.full
@pytest.mark.parametrize("stage", ["K-FAC", "EK-FAC", "Lanczos and density"])
def test_an_analysis_stays_inside_its_plan(stage):
    """Bytes of the allocator at the peak, above those that the model and its passes take."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(300, 900), torch.nn.Tanh(), torch.nn.Linear(900, 700)).eval()
        batches = [{"input": torch.randn(40, 300), "labels": torch.randint(700, (40,))} for _ in range(3)]
    subject = Subject(model, batches)
    settings = Settings(eigenvalues=4, probes=3 if stage.startswith("L") else 0, steps=10, ekfac=stage == "EK-FAC")
    plan = plan_of(subject, settings)
    passes = 4 * sum(p.numel() for p in model.parameters()) + 8 * 40 * 4 * (300 + 900 + 700)  # a gradient, activations
    with measured() as found:
        analyse(subject, settings)
    assert 0.3 * plan.most < found.peak <= 1.02 * plan.most + passes


def test_a_plan_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("gramian.analysis.analysis_plan._free", lambda device: 1000)
    with pytest.raises(
        GramianError, match=r"memory: \w+ takes .* 1.0 KB are free on the CPU; expected a --memory-budget"
    ):
        placed(tiny(), Settings())


def test_nothing_in_a_folder_is_overwritten(tmp_path):
    default = tmp_path / "curvature"
    first = new_folder(None, default)
    (first / FILE).write_text("{}")
    second = new_folder(None, default)
    assert (first.name, second.name) == ("curvature", "curvature-2")
    assert new_folder(second, default) == second  # empty
    with pytest.raises(GramianError, match="argument --out: .* is not empty; expected a new folder"):
        new_folder(first, default)
    with pytest.raises(GramianError, match="argument --out: .*; expected a folder that can be written"):
        new_folder(first / FILE, default)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"fisher": "exact"}, "fisher: 'exact'; expected one of empirical, mc, true"),
        ({"damping": 0.0}, "damping: 0.0; expected a number above 0"),
        ({"damping": "x"}, "damping: 'x'; expected a number above 0"),
        ({"samples": "x"}, "samples: 'x'; expected a number above 0"),
        ({"seed": 2**63}, "seed: 9223372036854775808; expected at most"),
        ({"probes": 2.5}, "probes: 2.5; expected an integer of at least 0"),
        ({"eigenvalues": 0}, "eigenvalues: 0; expected an integer of at least 1"),
        ({"probes": 1}, "probes: 1; expected 0, or at least 2"),
        ({"steps": 1}, "steps: 1; expected an integer of at least 2"),
        ({"seed": -1}, "seed: -1; expected an integer of at least 0"),
        ({"samples": 0.0}, "samples: 0.0; expected a number above 0"),
        ({"samples": float("nan")}, "samples: nan; expected a number above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(told, message):
    with pytest.raises(GramianError, match=message):
        Settings(**told)


def test_subjects_that_ask_nothing_are_refused_by_name():
    subject = tiny()
    for batches, message in (
        ([], "batches: is empty; expected at least one batch"),
        ([{"tokens_BT": subject.batches[0]["tokens_BT"]}], "batches: one has no labels; expected mappings"),
    ):
        with pytest.raises(GramianError, match=f"^{message}"):
            replace(subject, batches=batches)
    with pytest.raises(GramianError, match="^eigenvalues: 55; expected at most 54, one a trained parameter$"):
        analyse(subject, Settings(eigenvalues=55))
    ignored = [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in subject.batches]
    with pytest.raises(GramianError, match="^K-FAC: no loss terms; expected loss terms, and a model whose loss"):
        analyse(replace(subject, batches=ignored), Settings(probes=0))


def test_the_default_damping_is_the_library_s():
    assert Settings().damping == gramian.KFACNaturalGradient().options.damping
