"""The engine around the sums: draws and pieces, optimizers and scalers, and noise."""

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from tests.kit.private import attach
from tests.kit.refusals import refusal
from tests.privacy.poisson_runs import (
    EXPECTED,
    RECORDS,
    SPLITS,
    assert_untouched,
    drawn_steps,
    flat_of,
    poisson_run,
    seeded_engine,
)
from tests.privacy.problems import assert_sums, clip_norm, private, wanted, weights
from tests.statistics.problems import Problem, problem

pytestmark = pytest.mark.few_proofs

# ---- draws and pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", SPLITS)
@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "unused"])
def test_a_step_is_one_draw_whatever_its_pieces(name: str, physical: int | None) -> None:
    p = problem(name, RECORDS)
    limit, model = clip_norm(p), p.model()
    with poisson_run(p, model, limit, max_physical_batch=physical) as run:
        before, (seen,) = weights(model), drawn_steps(run, p, 1)
        moved = {key: (before[key] - now) * EXPECTED for key, now in weights(model).items()}
        assert run.engine.steps == 1
    assert len(seen) == len(set(seen)) not in (0, EXPECTED)
    assert_sums(moved, wanted(p, limit, seen).totals, p.tolerance)


@pytest.mark.full
@pytest.mark.parametrize("physical", [None, 2, 5])
@pytest.mark.parametrize("options", [{"clipping": "two_pass"}, {"memory_budget": 100}], ids=["forced", "by the budget"])
def test_two_passes_over_the_pieces_of_draws(options: dict[str, Any], physical: int | None) -> None:
    p = problem("tied_gpt", RECORDS)
    limit, ends = clip_norm(p), []
    for given in ({"max_physical_batch": physical, **options}, {}):
        model = p.model()
        with poisson_run(p, model, limit, noise_multiplier=1.0, **given) as run:
            for _, *batch in run.loader:
                run.optimizer.zero_grad()
                run.engine.backward(p.case.loss(model, *batch, reduction="sum"))
                run.optimizer.step()
            assert run.engine.steps == len(run.loader)
        ends.append(flat_of(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_all_splits_of_a_draw_give_the_same_steps_and_the_same_noise(noise: float) -> None:
    p = problem("mlp", RECORDS)
    limit, ends, draws = clip_norm(p), [], []
    for physical in SPLITS:
        model = p.model()
        with poisson_run(p, model, limit, max_physical_batch=physical, noise_multiplier=noise) as run:
            draws.append(list(drawn_steps(run, p, 3)))
            ends.append(flat_of(model))
    assert draws[0] == draws[1] == draws[2] == draws[3]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_on_all_but_the_last_piece_the_optimizer_does_nothing(make: Callable[..., Any]) -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.5)
    with poisson_run(p, model, clip_norm(p), optimizer=optimizer, max_physical_batch=2, noise_multiplier=1.0) as run:
        pieces = steps = 0
        for _, *batch in run.loader:
            run.optimizer.zero_grad()
            before, state = flat_of(model), copy.deepcopy(optimizer.state_dict()["state"])
            p.case.loss(model, *batch, reduction="sum").backward()
            run.optimizer.step()
            pieces += 1
            if run.engine.steps == steps:
                assert all(q.grad is None for q in model.parameters())
                assert torch.equal(before, flat_of(model))
                assert str(state) == str(optimizer.state_dict()["state"])
            else:
                assert not torch.equal(before, flat_of(model))
                steps = run.engine.steps
        assert pieces > steps == len(run.loader) == RECORDS // EXPECTED


def test_zero_grad_of_either_kind_loses_no_piece() -> None:
    p = problem("mlp", RECORDS)
    ends = []
    for to_none in (True, False, None):
        model = p.model()
        with poisson_run(p, model, clip_norm(p), max_physical_batch=2) as run:
            for _, *batch in run.loader:
                if to_none is not None:
                    run.optimizer.zero_grad(set_to_none=to_none)
                elif run.engine.steps:
                    break
                p.case.loss(model, *batch, reduction="sum").backward()
                run.optimizer.step()
                if run.engine.steps == 1:
                    break
        ends.append(flat_of(model))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_a_scheduler_follows_the_steps_and_does_not_complain() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with poisson_run(p, model, clip_norm(p)) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
        sizes = []
        for _ in drawn_steps(run, p, 3):
            sizes.append(run.optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert sizes == [1.0, 0.5, 0.25]


def test_two_draws_in_one_step_are_refused() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with poisson_run(p, model, 1.0) as run:
        before, batches = flat_of(model), iter(run.loader)
        p.case.loss(model, *next(batches)[1:], reduction="sum").backward()
        with refusal("step: draw 0 was summed, and no step"):
            next(batches)
        assert torch.equal(before, flat_of(model)) and run.engine.steps == 0


def test_two_draws_for_one_step_are_refused() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with poisson_run(p, model, 1.0) as run:
        batches = iter(run.loader)
        next(batches)
        p.case.loss(model, *next(batches)[1:], reduction="sum").backward()
        with refusal("step: 2 draws since the last one; expected one step for each"):
            run.optimizer.step()
        assert run.engine.steps == 0


def test_a_step_without_a_draw_is_refused() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with poisson_run(p, model, 1.0) as run:
        p.case.loss(model, *p.batch, reduction="sum").backward()
        with refusal("step: 0 draws"):
            run.optimizer.step()
        next(drawn_steps(run, p, 1))
        with refusal("step: 0 draws"):
            run.optimizer.step()


@pytest.mark.parametrize("physical", [1, 2])
@pytest.mark.parametrize("left", ["after a step", "after a backward"])
def test_a_draw_that_is_begun_again_counts_no_sample_twice(left: str, physical: int) -> None:
    p = problem("mlp", RECORDS)
    limit, model = clip_norm(p), p.model()
    with poisson_run(p, model, limit, max_physical_batch=physical) as run:
        before, drawn = weights(model), []
        for number, (_, *batch) in enumerate(run.loader):
            p.case.loss(model, *batch, reduction="sum").backward()
            if left == "after a backward" and number == 1:
                break
            run.optimizer.step()
            if number == 1:
                break
        assert run.engine.steps == 0
        for ids, *batch in run.loader:
            drawn += ids.tolist()
            p.case.loss(model, *batch, reduction="sum").backward()
            run.optimizer.step()
            if run.engine.steps:
                break
        moved = {key: (before[key] - now) * EXPECTED for key, now in weights(model).items()}
    assert_sums(moved, wanted(p, limit, drawn).totals, p.tolerance)


@pytest.mark.parametrize("physical", [None, 1])
def test_two_backwards_on_one_batch_of_the_loader_are_refused(physical: int | None) -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with poisson_run(p, model, 1.0, max_physical_batch=physical) as run:
        _, *batch = next(batch for batch in run.loader if len(batch[0]))
        p.case.loss(model, *batch, reduction="sum").backward()
        with refusal("backward: ran twice on one batch of the loader"):
            p.case.loss(model, *batch, reduction="sum").backward()


@pytest.mark.parametrize("physical", [None, 1, 3])
def test_draws_without_a_record_step_with_noise(physical: int | None) -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    options = {"sample_rate": 0.01, "expected_batch": 0.24, "noise_multiplier": 1.0, "max_physical_batch": physical}
    with poisson_run(p, model, 1.0, **options) as run:
        before, empty = flat_of(model), 0
        for drawn in drawn_steps(run, p, 8):
            empty += not drawn
            assert not (before == flat_of(model)).any() and flat_of(model).isfinite().all()
            before = flat_of(model)
    assert empty > 3


def test_the_mean_of_an_empty_batch_is_nan_and_does_no_harm() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    options = {"sample_rate": 0.01, "expected_batch": 0.24, "noise_multiplier": 1.0, "loss_reduction": "mean"}
    with poisson_run(p, model, 1.0, **options) as run:
        for number, (_, x, y) in enumerate(run.loader):
            run.optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            run.optimizer.step()
            assert flat_of(model).isfinite().all()
            if number > 6:
                break
        assert run.engine.nonfinite == 0


def test_an_unused_parameter_gets_noise_like_any_other() -> None:
    p = problem("unused", RECORDS)
    model = p.model()
    with poisson_run(p, model, 1.0, noise_multiplier=1.0) as run:
        before = weights(model)
        next(drawn_steps(run, p, 1))
        for key, now in weights(model).items():
            assert not (now == before[key]).any(), key


# ---- optimizers and scalers -----------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD foreach": ("SGD", {"lr": 0.3, "foreach": True}),
    "SGD fused": ("SGD", {"lr": 0.3, "momentum": 0.9, "fused": True}),
    "Adam": ("Adam", {"lr": 0.1}),
    "Adam amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True, "foreach": True}),
    "Adam fused": ("Adam", {"lr": 0.1, "fused": True}),
    "AdamW": ("AdamW", {"lr": 0.1}),
    "AdamW fused": ("AdamW", {"lr": 0.1, "fused": True}),
    **{name: (name, {}) for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")},
    "Adagrad fused": ("Adagrad", {"fused": True}),
    "Adafactor": ("Adafactor", {}),
    "Muon": ("Muon", {}),
}


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_every_optimizer_steps_as_if_it_were_fed_with_the_clipped_mean(which: str) -> None:
    kind, options = OPTIMIZERS[which]
    if not hasattr(torch.optim, kind):
        pytest.skip(f"torch.optim has no {kind}")
    p = problem("linear_3d", 8)
    ours, theirs = p.model(), p.model()
    if kind == "Muon":
        for model in (ours, theirs):
            model[0].bias.requires_grad_(False)
    chosen = {key: g for key, g in p.gradients.items() if dict(ours.named_parameters())[key].requires_grad}
    q = Problem(p.case, p.batch, chosen, p.dtype)
    limit = clip_norm(q)
    make = getattr(torch.optim, kind)
    optimizer = make([t for t in ours.parameters() if t.requires_grad], **options)
    reference = make([t for t in theirs.parameters() if t.requires_grad], **options)
    named, totals = dict(theirs.named_parameters()), wanted(q, limit).totals
    with private(ours, limit, optimizer=optimizer, batch_size=5) as run:
        p.backward(ours, p.batch)
        run.optimizer.step()
    for key, total in totals.items():
        named[key].grad = total / 5
    reference.step()
    for key, mine in weights(ours).items():
        torch.testing.assert_close(mine, named[key].detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_optimizers_whose_step_is_not_one_release_are_refused_by_name(kind: str) -> None:
    model = problem("mlp", 2).model()
    optimizer = getattr(torch.optim, kind)(model.parameters())
    with refusal(f"optimizer: {kind} "), private(model, 1.0, optimizer=optimizer):
        pass
    assert_untouched(model, optimizer)


def test_an_optimizer_inside_the_backward_is_refused_by_name() -> None:
    model = problem("mlp", 2).model()
    handle = model[2].weight.register_post_accumulate_grad_hook(lambda q: None)
    with refusal(r"optimizer: 2\.weight .*optimizer-in-backward"), private(model, 1.0):
        pass
    handle.remove()
    with private(model, 1.0):
        pass


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("physical", [None, 1])
def test_a_grad_scaler_and_the_loss_scale_leave_the_step_as_it_is(physical: int | None, fused: bool) -> None:
    p = problem("mlp", RECORDS)
    limit, ends = clip_norm(p), []
    for scale in (1.0, 1024.0):
        model, scaler = p.model(), torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        options = {"optimizer": optimizer, "noise_multiplier": 1.0, "max_physical_batch": physical}
        with poisson_run(p, model, limit, loss_scale=scaler, **options) as run:
            for _, *batch in run.loader:
                run.optimizer.zero_grad()
                scaler.scale(p.case.loss(model, *batch, reduction="sum")).backward()
                scaler.step(run.optimizer)
                scaler.update()
            assert run.engine.steps == len(run.loader)
        ends.append(flat_of(model))
    plain = p.model()
    with poisson_run(p, plain, limit, noise_multiplier=1.0, max_physical_batch=physical) as run:
        list(drawn_steps(run, p, len(run.loader)))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)
    close = 1e-6 if fused else 1e-9  # a fused optimizer's scale is float32
    torch.testing.assert_close(ends[0], flat_of(plain), rtol=close, atol=close)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_steps_on_an_empty_draw(fused: bool) -> None:
    p = problem("mlp", RECORDS)
    model, scaler = p.model(), torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    options = {"sample_rate": 0.01, "expected_batch": 0.24, "noise_multiplier": 1.0, "optimizer": optimizer}
    with poisson_run(p, model, 1.0, loss_scale=scaler, **options) as run:
        for number, (_, *batch) in enumerate(run.loader):
            run.optimizer.zero_grad()
            scaler.scale(p.case.loss(model, *batch, reduction="sum")).backward()
            scaler.step(run.optimizer)
            scaler.update()
            assert run.engine.steps == number + 1
            if number == 5:
                break


@pytest.mark.parametrize("storage", ["auto", "keep", "two_pass"])
def test_a_float_as_loss_scale_stays_in_the_gradient(storage: str) -> None:
    p = problem("tied_gpt", 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit, loss_scale=256.0, clipping=storage) as run:
        run.engine.backward(256.0 * p.case.loss(model, *p.batch, reduction="mean"))
        want = {key: 256.0 * total for key, total in wanted(p, limit).totals.items()}
        assert_sums(run.gradients(), want, p.tolerance)


@pytest.mark.parametrize("kind", ["float", "GradScaler whose step was forgotten"])
def test_noise_is_scaled_as_the_sum_is(kind: str) -> None:
    """One clipped sample against the noise: their ratio is 1/σ whatever the loss is multiplied by; or it is an error."""
    ends = []
    for sigma in (0.0, 1.0):
        model = nn.Linear(100, 100, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.zero_()
        scaler = 256.0 if kind == "float" else torch.amp.GradScaler("cpu", init_scale=256.0)
        options = {"loss_scale": scaler, "noise_multiplier": sigma, "loss_reduction": "sum", "engine": seeded_engine()}
        with private(model, 1.0, batch_size=4, **options) as run:
            loss = (model(torch.ones(1, 100, dtype=torch.float64)) * 10).sum()
            (256.0 * loss if kind == "float" else scaler.scale(loss)).backward()
            try:
                run.optimizer.step()
            except gramian.GramianError as problem:
                assert "scale" in str(problem)
                return
        ends.append(flat_of(model))
    assert float((ends[1] - ends[0]).std()) == pytest.approx(float(ends[0].norm()), rel=0.05)


def test_a_changed_parameter_group_is_refused() -> None:
    p = problem("mlp", 4)
    model = p.model()
    model[0].weight.requires_grad_(False)
    with private(model, 1.0) as run:
        p.backward(model, p.batch)
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with refusal("optimizer: its trained parameters are not those of make_private"):
            run.optimizer.step()
        assert run.engine.steps == 0


# ---- noise -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_noise_of_a_step_has_the_promised_variance(dtype: torch.dtype) -> None:
    """N numbers of variance v: their mean square is v(1 ± 4.9·√(2/N)), but for one run in a million; the key is fixed."""
    sigma, limit, expected = 1.5, 0.4, 5
    model = nn.Linear(300, 200, dtype=dtype)
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    with private(model, limit, noise_multiplier=sigma, batch_size=expected, engine=seeded_engine(3)) as run:
        steps = []
        for _ in range(2):
            before = flat_of(model).double()
            run.optimizer.zero_grad()
            (model(torch.eye(2, 300, dtype=dtype)) * 0).sum().backward()
            run.optimizer.step()
            steps.append((flat_of(model).double() - before)[:60_000])
    count, std = len(steps[0]), sigma * limit / expected
    for noise in steps:
        assert abs(float(noise.square().mean()) / std**2 - 1) < 4.9 * math.sqrt(2 / count)
        assert abs(float(noise.mean())) < 4.9 * std / math.sqrt(count)
        assert float((noise[1:] * noise[:-1]).mean()) / std**2 < 4.9 / math.sqrt(count)  # neighbours
        assert float((noise[300:] * noise[:-300]).mean()) / std**2 < 4.9 / math.sqrt(count)  # rows
    # The noise of a step does not come back in the next, and the two are independent.
    assert not (steps[0] == steps[1]).any()
    assert abs(float((steps[0] * steps[1]).mean())) / std**2 < 4.9 / math.sqrt(count)


def test_noise_is_not_that_of_the_global_generator_and_leaves_it_alone() -> None:
    p, ends = problem("mlp", 4), []
    for _ in range(2):
        torch.manual_seed(0)
        model = p.model()
        with private(model, 1.0, noise_multiplier=1.0) as run:
            torch.manual_seed(7)
            p.backward(model, p.batch)
            run.optimizer.step()
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
        ends.append(flat_of(model))
    assert not (ends[0] == ends[1]).any()


def test_noise_reaches_bf16_parameters_without_being_rounded_away() -> None:
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    with private(model, 1.0, noise_multiplier=1.0, batch_size=4, engine=seeded_engine()) as run:
        (model(torch.eye(4, 64, dtype=torch.bfloat16)) * 0).sum().backward()
        run.optimizer.step()
        assert model.weight.grad.dtype == torch.bfloat16
        assert abs(float(model.weight.grad.float().std()) * 4 - 1) < 0.1


# ---- the stopwatch --------------------------------------------------------------------------------------------------------


def test_the_variable_of_the_fork_of_opacus_is_a_warning_that_names_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_PROFILE_FSDP", "1")
    with pytest.warns(UserWarning, match="^OPACUS_PROFILE_FSDP: has no effect here; expected GRAMIAN_PROFILE=1$"):
        assert not gramian.PrivacyEngine().stopwatch.on
    for name, value in (("OPACUS_PROFILE_FSDP", "0"), ("GRAMIAN_PROFILE", "1")):
        monkeypatch.setenv(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert gramian.PrivacyEngine().stopwatch.on == (name == "GRAMIAN_PROFILE")


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_private_model_that_nobody_holds_any_more_is_freed(detached: bool, fails: bool) -> None:
    """A notebook's cell that is run again must not keep the model, the gradients and the optimizer of its first run."""

    def train() -> weakref.ref[nn.Module]:
        model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(6, 4)
        engine = gramian.PrivacyEngine()
        loader = DataLoader(TensorDataset(torch.zeros(60, 1)), batch_size=6)
        _, optimizer, _ = attach(engine, model, loader, clipping="keep")
        model(x).sum().backward()
        optimizer.step()
        if fails:

            def stop(gradient: torch.Tensor) -> None:
                raise RuntimeError("out of memory")

            y = model(x)
            y.register_hook(stop)
            with pytest.raises(RuntimeError, match="out of memory"):
                y.sum().backward()
        if detached:
            engine.detach()
        return weakref.ref(model)

    model = train()
    gc.collect()
    assert model() is None
