"""The engine around the sums: draws and pieces, optimizers and scalers, noise, ε, state and secrets."""

import copy
import logging
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramian
from gramian.oracles.clipped_sum import clipped_sum
from tests.kit.matrix import FULL
from tests.kit.refusals import refusal
from tests.privacy.problems import Run, assert_sums, clip_norm, gradients, private, wanted, weights
from tests.statistics.problems import Problem, problem

pytestmark = pytest.mark.few_proofs

RECORDS, EXPECTED = 24, 6
SPLITS = (None, 1, 2, 5)


def _engine(seed: int = 2, accountant: str = "prv") -> gramian.PrivacyEngine:
    return gramian.PrivacyEngine(accountant, insecure_reproducible=True, seed=seed)


def _poisson(p: Problem, model: nn.Module, limit: float, **options: Any) -> Any:
    """A private run over the problem's samples, each with its number."""
    given = {"engine": _engine(), "loss_reduction": "sum", "poisson_sampling": True, "batch_size": EXPECTED, **options}
    return private(model, limit, data=(torch.arange(RECORDS), *p.batch), **given)


def _steps(run: Run, p: Problem, count: int) -> Iterator[list[int]]:
    """Train for some draws, whatever pieces they come in; the records of each after its step."""
    drawn: list[int] = []
    before = run.engine.steps
    while True:
        for ids, *batch in run.loader:
            run.optimizer.zero_grad()
            p.case.loss(run.model, *batch, reduction="sum").backward()
            drawn += ids.tolist()
            run.optimizer.step()
            if run.engine.steps > before:
                yield drawn
                drawn, before = [], run.engine.steps
                count -= 1
                if not count:
                    return


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


# ---- draws and pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", SPLITS)
@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "unused"])
def test_a_step_is_one_draw_whatever_its_pieces(name: str, physical: int | None) -> None:
    p = problem(name, RECORDS)
    limit, model = clip_norm(p), p.model()
    with _poisson(p, model, limit, max_physical_batch=physical) as run:
        before, (seen,) = weights(model), _steps(run, p, 1)
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
        with _poisson(p, model, limit, noise_multiplier=1.0, **given) as run:
            for _, *batch in run.loader:
                run.optimizer.zero_grad()
                run.engine.backward(p.case.loss(model, *batch, reduction="sum"))
                run.optimizer.step()
            assert run.engine.steps == len(run.loader)
        ends.append(_flat(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_all_splits_of_a_draw_give_the_same_steps_and_the_same_noise(noise: float) -> None:
    p = problem("mlp", RECORDS)
    limit, ends, draws = clip_norm(p), [], []
    for physical in SPLITS:
        model = p.model()
        with _poisson(p, model, limit, max_physical_batch=physical, noise_multiplier=noise) as run:
            draws.append(list(_steps(run, p, 3)))
            ends.append(_flat(model))
    assert draws[0] == draws[1] == draws[2] == draws[3]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_on_all_but_the_last_piece_the_optimizer_does_nothing(make: Callable[..., Any]) -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.5)
    with _poisson(p, model, clip_norm(p), optimizer=optimizer, max_physical_batch=2, noise_multiplier=1.0) as run:
        pieces = steps = 0
        for _, *batch in run.loader:
            run.optimizer.zero_grad()
            before, state = _flat(model), copy.deepcopy(optimizer.state_dict()["state"])
            p.case.loss(model, *batch, reduction="sum").backward()
            run.optimizer.step()
            pieces += 1
            if run.engine.steps == steps:
                assert all(q.grad is None for q in model.parameters())
                assert torch.equal(before, _flat(model))
                assert str(state) == str(optimizer.state_dict()["state"])
            else:
                assert not torch.equal(before, _flat(model))
                steps = run.engine.steps
        assert pieces > steps == len(run.loader) == RECORDS // EXPECTED


def test_zero_grad_of_either_kind_loses_no_piece() -> None:
    p = problem("mlp", RECORDS)
    ends = []
    for to_none in (True, False, None):
        model = p.model()
        with _poisson(p, model, clip_norm(p), max_physical_batch=2) as run:
            for _, *batch in run.loader:
                if to_none is not None:
                    run.optimizer.zero_grad(set_to_none=to_none)
                elif run.engine.steps:
                    break
                p.case.loss(model, *batch, reduction="sum").backward()
                run.optimizer.step()
                if run.engine.steps == 1:
                    break
        ends.append(_flat(model))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_a_scheduler_follows_the_steps_and_does_not_complain() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with _poisson(p, model, clip_norm(p)) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
        sizes = []
        for _ in _steps(run, p, 3):
            sizes.append(run.optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert sizes == [1.0, 0.5, 0.25]


def test_two_draws_in_one_step_are_refused() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with _poisson(p, model, 1.0) as run:
        before, batches = _flat(model), iter(run.loader)
        p.case.loss(model, *next(batches)[1:], reduction="sum").backward()
        with refusal("step: draw 0 was summed, and no step"):
            next(batches)
        assert torch.equal(before, _flat(model)) and run.engine.steps == 0


def test_two_draws_for_one_step_are_refused() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with _poisson(p, model, 1.0) as run:
        batches = iter(run.loader)
        next(batches)
        p.case.loss(model, *next(batches)[1:], reduction="sum").backward()
        with refusal("step: 2 draws since the last one; expected one step for each"):
            run.optimizer.step()
        assert run.engine.steps == 0


def test_a_step_without_a_draw_is_refused() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with _poisson(p, model, 1.0) as run:
        p.case.loss(model, *p.batch, reduction="sum").backward()
        with refusal("step: 0 draws"):
            run.optimizer.step()
        next(_steps(run, p, 1))
        with refusal("step: 0 draws"):
            run.optimizer.step()


@pytest.mark.parametrize("physical", [1, 2])
@pytest.mark.parametrize("left", ["after a step", "after a backward"])
def test_a_draw_that_is_begun_again_counts_no_sample_twice(left: str, physical: int) -> None:
    p = problem("mlp", RECORDS)
    limit, model = clip_norm(p), p.model()
    with _poisson(p, model, limit, max_physical_batch=physical) as run:
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
    with _poisson(p, model, 1.0, max_physical_batch=physical) as run:
        _, *batch = next(batch for batch in run.loader if len(batch[0]))
        p.case.loss(model, *batch, reduction="sum").backward()
        with refusal("backward: ran twice on one batch of the loader"):
            p.case.loss(model, *batch, reduction="sum").backward()


@pytest.mark.parametrize("physical", [None, 1, 3])
def test_draws_without_a_record_step_with_noise(physical: int | None) -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    options = {"sample_rate": 0.01, "expected_batch": 0.24, "noise_multiplier": 1.0, "max_physical_batch": physical}
    with _poisson(p, model, 1.0, **options) as run:
        before, empty = _flat(model), 0
        for drawn in _steps(run, p, 8):
            empty += not drawn
            assert not (before == _flat(model)).any() and _flat(model).isfinite().all()
            before = _flat(model)
    assert empty > 3


def test_the_mean_of_an_empty_batch_is_nan_and_does_no_harm() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    options = {"sample_rate": 0.01, "expected_batch": 0.24, "noise_multiplier": 1.0, "loss_reduction": "mean"}
    with _poisson(p, model, 1.0, **options) as run:
        for number, (_, x, y) in enumerate(run.loader):
            run.optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            run.optimizer.step()
            assert _flat(model).isfinite().all()
            if number > 6:
                break
        assert run.engine.nonfinite == 0


def test_an_unused_parameter_gets_noise_like_any_other() -> None:
    p = problem("unused", RECORDS)
    model = p.model()
    with _poisson(p, model, 1.0, noise_multiplier=1.0) as run:
        before = weights(model)
        next(_steps(run, p, 1))
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
    _assert_untouched(model, optimizer)


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
        with _poisson(p, model, limit, loss_scale=scaler, **options) as run:
            for _, *batch in run.loader:
                run.optimizer.zero_grad()
                scaler.scale(p.case.loss(model, *batch, reduction="sum")).backward()
                scaler.step(run.optimizer)
                scaler.update()
            assert run.engine.steps == len(run.loader)
        ends.append(_flat(model))
    plain = p.model()
    with _poisson(p, plain, limit, noise_multiplier=1.0, max_physical_batch=physical) as run:
        list(_steps(run, p, len(run.loader)))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)
    close = 1e-6 if fused else 1e-9  # a fused optimizer's scale is float32
    torch.testing.assert_close(ends[0], _flat(plain), rtol=close, atol=close)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_steps_on_an_empty_draw(fused: bool) -> None:
    p = problem("mlp", RECORDS)
    model, scaler = p.model(), torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    options = {"sample_rate": 0.01, "expected_batch": 0.24, "noise_multiplier": 1.0, "optimizer": optimizer}
    with _poisson(p, model, 1.0, loss_scale=scaler, **options) as run:
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
        options = {"loss_scale": scaler, "noise_multiplier": sigma, "loss_reduction": "sum", "engine": _engine()}
        with private(model, 1.0, batch_size=4, **options) as run:
            loss = (model(torch.ones(1, 100, dtype=torch.float64)) * 10).sum()
            (256.0 * loss if kind == "float" else scaler.scale(loss)).backward()
            try:
                run.optimizer.step()
            except gramian.GramianError as problem:
                assert "scale" in str(problem)
                return
        ends.append(_flat(model))
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
    with private(model, limit, noise_multiplier=sigma, batch_size=expected, engine=_engine(3)) as run:
        steps = []
        for _ in range(2):
            before = _flat(model).double()
            run.optimizer.zero_grad()
            (model(torch.eye(2, 300, dtype=dtype)) * 0).sum().backward()
            run.optimizer.step()
            steps.append((_flat(model).double() - before)[:60_000])
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
        ends.append(_flat(model))
    assert not (ends[0] == ends[1]).any()


def test_noise_reaches_bf16_parameters_without_being_rounded_away() -> None:
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    with private(model, 1.0, noise_multiplier=1.0, batch_size=4, engine=_engine()) as run:
        (model(torch.eye(4, 64, dtype=torch.bfloat16)) * 0).sum().backward()
        run.optimizer.step()
        assert model.weight.grad.dtype == torch.bfloat16
        assert abs(float(model.weight.grad.float().std()) * 4 - 1) < 0.1


# ---- ε ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mechanism", ["prv", "rdp", "gdp"])
def test_epsilon_is_that_of_opacus_for_the_steps_that_were_made(mechanism: str) -> None:
    from opacus.accountants import create_accountant

    p = problem("mlp", RECORDS)
    model, peer = p.model(), create_accountant(mechanism)
    options = {"noise_multiplier": 1.1, "max_physical_batch": 3, "engine": _engine(accountant=mechanism)}
    with _poisson(p, model, 1.0, **options) as run:
        assert run.engine.get_epsilon(delta=1e-5) == 0.0
        for _ in _steps(run, p, 5):
            peer.step(noise_multiplier=1.1, sample_rate=EXPECTED / RECORDS)
        assert run.engine.get_epsilon(delta=1e-5) == pytest.approx(peer.get_epsilon(delta=1e-5), rel=1e-6)
        assert (run.engine.steps, run.engine.sample_rate, run.engine.expected_batch) == (
            5,
            EXPECTED / RECORDS,
            EXPECTED,
        )
    assert run.engine.get_epsilon(delta=1e-5) == pytest.approx(
        peer.get_epsilon(delta=1e-5), rel=1e-6
    )  # the account outlives detach()


def test_without_noise_epsilon_is_infinite() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with _poisson(p, model, 1.0) as run:
        next(_steps(run, p, 1))
        assert run.engine.get_epsilon(delta=1e-5) == math.inf


@pytest.mark.parametrize("mechanism", ["prv", "rdp"] if FULL else ["rdp"])
def test_make_private_with_epsilon_ends_at_its_target(mechanism: str) -> None:
    p = problem("mlp", RECORDS)
    model, engine = p.model(), _engine(accountant=mechanism)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(RECORDS), *p.batch), batch_size=EXPECTED
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=3.0, target_delta=1e-4, epochs=2,
        max_grad_norm=1.0, loss_reduction="sum",
    )  # fmt: skip
    assert made[0] is model and made[1] is optimizer and engine.noise_multiplier > 0.5
    run = Run(engine, *made)
    for _ in range(2):
        for _, *batch in run.loader:
            optimizer.zero_grad()
            p.case.loss(model, *batch, reduction="sum").backward()
            optimizer.step()
    assert engine.steps == 2 * RECORDS // EXPECTED
    assert 2.9 < engine.get_epsilon(delta=1e-4) <= 3.0
    engine.detach()


# ---- state -----------------------------------------------------------------------------------------------------------------


def _trained_on(p: Problem, engine: gramian.PrivacyEngine, model: nn.Module, steps: int) -> Tensor:
    with _poisson(p, model, clip_norm(p), engine=engine, noise_multiplier=1.0, max_physical_batch=4) as run:
        list(_steps(run, p, steps))
    return _flat(model)


def test_a_replay_from_a_checkpoint_is_the_same_release_bit_for_bit_and_counts_once() -> None:
    p = problem("mlp", RECORDS)
    first, model = gramian.PrivacyEngine(), p.model()
    _trained_on(p, first, model, 2)
    saved, at = copy.deepcopy(first.state_dict()), copy.deepcopy(model)
    went_on = _trained_on(p, first, model, 2)
    again = gramian.PrivacyEngine()
    again.load_state_dict(saved, replay=True)
    assert torch.equal(_trained_on(p, again, at, 2), went_on)
    assert again.steps == first.steps == 4
    assert again.get_epsilon(1e-5) == first.get_epsilon(1e-5)


def test_a_state_loaded_after_make_private_draws_and_noises_with_its_own_key() -> None:
    p = problem("mlp", RECORDS)
    first, model = gramian.PrivacyEngine(), p.model()
    _trained_on(p, first, model, 1)
    saved, at = copy.deepcopy(first.state_dict()), copy.deepcopy(model)
    went_on = _trained_on(p, first, model, 2)
    again = gramian.PrivacyEngine()
    with _poisson(p, at, clip_norm(p), engine=again, noise_multiplier=1.0, max_physical_batch=4) as run:
        again.load_state_dict(saved, replay=True)
        list(_steps(run, p, 2))
    assert torch.equal(_flat(at), went_on) and again.steps == 3


def test_a_replay_in_the_same_process_is_bit_for_bit_the_same_and_refunds_nothing() -> None:
    p = problem("mlp", RECORDS)
    engine, model = gramian.PrivacyEngine(), p.model()
    with _poisson(p, model, clip_norm(p), engine=engine, noise_multiplier=1.0) as run:
        next(_steps(run, p, 1))
        saved, kept = engine.state_dict(), copy.deepcopy(model.state_dict())
        drawn = list(_steps(run, p, 2))
        went_on = _flat(model)
        model.load_state_dict(kept)
        engine.load_state_dict(saved, replay=True)
        assert engine.steps == 3  # never lower
        assert list(_steps_by_release(run, p, 2)) == drawn
        assert torch.equal(_flat(model), went_on)
        assert engine.steps == 3


def _steps_by_release(run: Run, p: Problem, count: int) -> Iterator[list[int]]:
    """As `_steps`, but for a replay, in which `engine.steps` stands still: pieces are whole draws."""
    for _, (ids, *batch) in zip(range(count), run.loader, strict=False):
        run.optimizer.zero_grad()
        p.case.loss(run.model, *batch, reduction="sum").backward()
        run.optimizer.step()
        yield ids.tolist()


def test_without_replay_noise_and_draws_are_new_and_steps_never_fall() -> None:
    p = problem("mlp", RECORDS)
    engine, model = gramian.PrivacyEngine(), p.model()
    with _poisson(p, model, clip_norm(p), engine=engine, noise_multiplier=1.0) as run:
        next(_steps(run, p, 1))
        saved, kept = engine.state_dict(), copy.deepcopy(model.state_dict())
        drawn = list(_steps(run, p, 2))
        went_on, spent = _flat(model), engine.get_epsilon(1e-5)
        engine.load_state_dict(saved)
        model.load_state_dict(kept)
        assert engine.steps == 3 and engine.get_epsilon(1e-5) == spent
        other = list(_steps(run, p, 2))
        assert engine.steps == 5 and engine.get_epsilon(1e-5) > spent
    assert other != drawn
    assert not (_flat(model) == went_on).any()


def test_a_bound_counter_survives_a_lost_process(tmp_path: Any) -> None:
    p = problem("mlp", RECORDS)
    first, model = gramian.PrivacyEngine(), p.model()
    first.bind_counter(str(tmp_path / "releases.json"))
    _trained_on(p, first, model, 1)
    saved = copy.deepcopy(first.state_dict())
    _trained_on(p, first, model, 2)
    second = gramian.PrivacyEngine()
    second.load_state_dict(saved)
    second.bind_counter(str(tmp_path / "releases.json"), must_exist=True)
    assert second.steps == 3 and second.get_epsilon(1e-5) == first.get_epsilon(1e-5)
    _trained_on(p, second, p.model(), 1)
    assert second.steps == 4


def test_a_state_in_the_middle_of_a_draw_is_refused() -> None:
    p = problem("mlp", RECORDS)
    model = p.model()
    with _poisson(p, model, 1.0, max_physical_batch=1) as run:
        for _, *batch in run.loader:
            p.case.loss(model, *batch, reduction="sum").backward()
            run.optimizer.step()
            if len(batch[0]) and not run.engine.steps:
                break
        with refusal("state_dict: a draw is under way"):
            run.engine.state_dict()


@pytest.mark.parametrize("state", [{}, {"schema": 99}, [], None])
def test_a_foreign_state_is_refused(state: Any) -> None:
    engine = gramian.PrivacyEngine()
    with refusal(r"state: expected what engine.state_dict\(\) gave"):
        engine.load_state_dict(state)


def test_rolling_back_noise_never_meets_another_sum() -> None:
    """The noise of a release is a function of its number alone: on other data the number must be another one."""
    p = problem("mlp", RECORDS)
    engine, model = _engine(), p.model()
    with private(model, 1.0, engine=engine, noise_multiplier=1.0) as run:
        noises = []
        for part in (slice(0, 4), slice(4, 8)):
            saved = engine.state_dict()
            run.optimizer.zero_grad()
            p.backward(model, p.rows(part))
            clean = gradients(model)
            run.optimizer.step()
            noises.append(torch.cat([(g * 4 - clean[key]).flatten() for key, g in gradients(model).items()]))
            engine.load_state_dict(saved)  # rolled back, with other data to follow
    assert float((noises[0] - noises[1]).abs().min()) > 0
    assert engine.steps == 2


# ---- secrets ---------------------------------------------------------------------------------------------------------------


def test_the_key_is_in_no_repr_log_warning_or_plan(caplog: pytest.LogCaptureFixture) -> None:
    p = problem("mlp", RECORDS)
    engine, model = gramian.PrivacyEngine(), p.model()
    key = bytes(engine.state_dict()["secrets"]["key"].tolist())
    with (
        caplog.at_level(logging.DEBUG),
        warnings.catch_warnings(record=True) as said,
        _poisson(p, model, 1.0, engine=engine, noise_multiplier=1.0) as run,
    ):
        list(_steps(run, p, 2))
        shown = [repr(engine), str(engine), str(engine.plan), repr(run.loader), repr(model), repr(run.optimizer)]
        shown += [repr(value) for value in vars(engine).values()]
        parts = (engine._model, engine._model.step, engine._model.sums, engine._model.clipping, run.loader)
        shown += [repr(value) for owner in parts for value in vars(owner).values()]
        shown += [str(run.optimizer.state_dict()), str(list(model.state_dict())), caplog.text, *map(str, said)]
        subkeys = [key, engine._ledger.secrets.noise_key, engine._ledger.secrets.sampling_key]
    for secret in subkeys:
        forms = (secret.hex(), repr(secret), str(list(secret)), str(list(secret))[1:-1])
        assert not any(form in text for form in forms for text in shown)


def test_two_engines_have_two_keys_and_the_insecure_one_is_recorded() -> None:
    one, other = (gramian.PrivacyEngine().state_dict()["secrets"] for _ in range(2))
    assert not torch.equal(one["key"], other["key"]) and not one["insecure_reproducible"]
    assert _engine().state_dict()["secrets"]["insecure_reproducible"]
    with refusal("seed: a seed gives no secret"):
        gramian.PrivacyEngine(seed=3)


# ---- the model stays the user's ----------------------------------------------------------------------------------------------


def _assert_untouched(model: nn.Module, optimizer: Any) -> None:
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())
    assert all(not q._backward_hooks for q in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("physical", [None, 1])
def test_detach_gives_model_and_optimizer_back_as_they_were(physical: int | None) -> None:
    p = problem("tied_gpt", 3)
    model, plain = p.model(), p.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with private(model, 1e-3, optimizer=optimizer, max_physical_batch=physical) as run:
        assert run.model is model and run.optimizer is optimizer
        p.backward(model, p.rows([0]))
        optimizer.zero_grad()
        assert run.engine.detach() is model
    _assert_untouched(model, optimizer)
    p.backward(model, p.batch)
    p.backward(plain, p.batch)
    assert all(torch.equal(g, h) for g, h in zip(gradients(model).values(), gradients(plain).values(), strict=True))
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(_flat(model), _flat(plain))
    with private(model, 1.0):  # once more
        p.backward(model, p.rows([1]))


def test_a_refused_model_is_left_untouched() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gramian.GramianError), private(model, 1.0, optimizer=optimizer, loss_reduction="avg"):
        pass
    _assert_untouched(model, optimizer)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_not_private_and_state_is_unchanged(how: str) -> None:
    p = problem("mlp", 3)
    model, plain = p.model(), p.model()
    with private(model, 1e-3):
        assert list(model.state_dict()) == list(plain.state_dict()) and type(model) is type(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        p.backward(twin, p.batch)
        p.backward(plain, p.batch)
        assert all(torch.equal(g, h) for g, h in zip(gradients(twin).values(), gradients(plain).values(), strict=True))
        plain.load_state_dict(model.state_dict())
        model.load_state_dict(plain.state_dict())


def test_evaluation_inside_training_changes_nothing() -> None:
    p = problem("mlp", 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit) as run:
        with torch.no_grad():
            expected = p.model()(p.batch[0])
            assert torch.equal(model(p.batch[0]), expected)
        p.backward(model, p.batch)
        with torch.no_grad():
            model(p.batch[0][:2])
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)


def test_norms_can_be_captured_on_a_private_model() -> None:
    p = problem("mlp", 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit) as run:
        with gramian.per_sample_norms(model) as norms:
            p.backward(model, p.batch)
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)
    torch.testing.assert_close(norms.values, p.norms(), rtol=1e-9, atol=0)


def test_a_hugging_face_batch_by_keyword() -> None:
    p = problem("hf_gpt2", 4)
    limit, model = clip_norm(p), p.model()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1).mean()

    want = clipped_sum(model, loss, (p.batch[0],), limit)
    with private(model, limit) as run:
        loss(model, p.batch[0]).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)
