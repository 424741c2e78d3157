"""`gramian.optim.KFAC` against itself written down once more, and what a torch optimizer has to do besides."""

import contextlib
import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import gramian
from gramian.optim import matrix_step, recorded_steps
from gramian.optim.matrix_step import step_together
from tests.kit.mutations import RED, Edit
from tests.kit.refusals import refused
from tests.optim.oracle import Oracle

pytestmark = pytest.mark.oracle


class Words(nn.Module):
    """Layers that widen, narrow and keep the width, with and without a bias, two weights of one shape, two kinds of layout."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.up, self.same, self.also = nn.Linear(6, 10), nn.Linear(10, 10, bias=False), nn.Linear(10, 10)
        self.turned, self.head = Conv1D(6, 10), nn.Linear(6, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = self.also(self.same(self.up(self.norm(self.table(x))).tanh()).tanh()).tanh()
        return self.head(self.turned(h).tanh())


class Pictures(nn.Module):
    """Two convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 20, 2, stride=2, bias=False), nn.Linear(20, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).tanh()).tanh().mean((2, 3)))


HIDDEN = {"words": ["up", "same", "also", "turned"], "pictures": ["one", "two"]}
OPTIONS = {"lr": 3e-3, "weight_decay": 0.1, "update_freq": 3, "ema_decay": 0.5, "max_tokens": None, "damping": 0.2}


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (Words() if kind == "words" else Pictures()).to(dtype)


def batch_of(kind: str, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind == "words":
        x, y = (torch.randint(9, (5, 4), generator=generator) for _ in range(2))
        return x, y
    return torch.randn(7, 2, 6, 6, generator=generator, dtype=dtype), torch.randint(9, (7,), generator=generator)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def stepped(optimizer: gramian.optim.KFAC, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad()
    with optimizer.capture(num_terms=batch[1].numel()):
        loss = loss_of(model, batch)
        loss.backward()
    optimizer.step()
    return loss.detach()


def same(left: nn.Module, right: nn.Module, tolerance: float = 0.0) -> None:
    for (name, p), q in zip(left.named_parameters(), right.parameters(), strict=True):
        off = float((p - q).abs().max().detach())
        assert off <= tolerance * float(q.abs().max().detach()), f"{name} differs by {off}"


def against_the_oracle(kind: str, steps: int = 10) -> None:
    mine, theirs = model_of(kind), model_of(kind)
    optimizer = gramian.optim.KFAC(mine, **OPTIONS)
    oracle = Oracle(theirs, HIDDEN[kind], lr=3e-3, decay=0.1, every=3, ema=0.5, damping=0.2)
    for step in range(steps):
        batch, rate = batch_of(kind, step), 3e-3 / (1 + step)
        optimizer.param_groups[0]["lr"] = oracle.lr = rate
        stepped(optimizer, mine, batch)
        oracle.step(lambda b=batch: loss_of(theirs, b), batch[1].numel())
    same(mine, theirs, 1e-9)


@pytest.mark.parametrize("kind", HIDDEN)
def test_ten_steps_are_those_of_the_oracle(kind: str) -> None:
    against_the_oracle(kind)


BUGS = {
    "stale operators": Edit("WhitenedSteps.update", "if now != before", "if not self.groups"),
    "a bias in A": Edit("whitened_steps:_sides", "block.spec.inputs - block.spec.has_bias", "block.spec.inputs"),
    "no mean": Edit("inverse_roots:dense_roots", "stack_BNN /= unless", "stack_BNN *= unless"),
    "no Nesterov": Edit("matrix_steps:nesterov_averages_twin", "lerp(list(gradients),", "lerp(list(momenta),"),
    "one scale for all columns": Edit(
        "WhitenedGradients.direction",
        "direction_scales(_norms(z_BRN, (-2,)), D,",
        "direction_scales(_norms(z_BRN, (-2,)), None,",
    ),
    "the direction of another shape": Edit("whitened_steps:directions", "parts, strict", "parts[::-1], strict"),
    "decay of norms": Edit("KFAC._step_adamw", "(0.0, [p for p", "(0.1, [p for p"),
}
"""Bugs that the oracle must see."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_turns_the_oracle_red(bug: str) -> None:
    with BUGS[bug].applied(), pytest.raises(RED):
        against_the_oracle("words")


def test_weights_of_several_shapes_step_together_as_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one width of their narrower sides, as many as the limit takes; a shape that is larger than the limit by itself."""
    apart, steps = model_of("words"), 4
    sizes: list[int] = []
    monkeypatch.setattr(
        recorded_steps, "step_together", lambda some: (sizes.append(len(some)), step_together(some))[-1]
    )
    for limit, lists in ((0, [1, 1, 1]), (2 * 6 * 6, [1, 2]), (2**24, [1, 2])):
        monkeypatch.setattr(matrix_step, "TOGETHER", limit)
        sizes.clear()
        model = model_of("words") if limit else apart
        optimizer = gramian.optim.KFAC(model, **OPTIONS)
        for step in range(steps):
            stepped(optimizer, model, batch_of("words", step))
        assert sorted(sizes) == sorted(steps * lists)
        same(model, apart, 1e-12)


class Skipped(Words):
    """Words whose hidden layers are left out for some batches, as in stochastic depth."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.table(x))) if self.skips else super().forward(x)


def test_a_backward_past_all_layers_with_factors_counts() -> None:
    """Its loss terms are those of the step: the factors of every refresh of the same batches are equal."""
    torch.manual_seed(0)
    model = Skipped().double()
    optimizer = gramian.optim.KFAC(model, lr=0.0, update_freq=1, ema_decay=0.0, max_tokens=None)
    (x, y), found = batch_of("words", 0), []
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.capture(num_terms=y.numel(), loss_reduction="sum") as cap:
            for model.skips in (False, True):
                if model.skips:
                    cap.next(num_terms=y.numel())
                F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
        optimizer.step()
        found.append({name: block.G.to_dense() for name, block in optimizer.kfac.kfac_factors.items()})
        assert optimizer.kfac.record()["layers"]["up"]["N"] == 2 * y.numel()
    for later in found[1:]:
        assert later.keys() >= found[0].keys() - {"head"}
        for name, G in later.items():
            torch.testing.assert_close(G, found[0][name], rtol=1e-12, atol=0)


def test_records_are_of_weights_that_take_whitened_steps_and_all_for_a_capture_beside() -> None:
    model = model_of("words")
    model.norm.bias = model.turned.bias  # type: ignore[union-attr, assignment]
    optimizer = gramian.optim.KFAC(model, **(OPTIONS | {"update_freq": 1}))  # type: ignore[arg-type]
    for beside in (False, False, True):
        x, y = batch_of("words", 0)
        optimizer.zero_grad()
        inside = gramian.observe(model, gramian.DiagonalFisher()) if beside else contextlib.nullcontext()
        with optimizer.capture(num_terms=y.numel()) as own, inside as seen:
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        left_out = {name for name, cover in own.coverage.items() if cover.status == "left out"}
        assert not left_out if beside else left_out >= {"norm.weight", "table.weight"}
    assert {cover.status for cover in seen.coverage.values()} == {"covered"}


def test_a_weight_that_rests_keeps_its_factors_and_one_of_none_is_no_refresh() -> None:
    model = model_of("words")
    optimizer = gramian.optim.KFAC(model, **(OPTIONS | {"update_freq": 1}))  # type: ignore[arg-type]
    stepped(optimizer, model, batch_of("words", 0))
    before = {name: block.G.to_dense() for name, block in optimizer.kfac.kfac_factors.items()}
    hidden = [getattr(model, name) for name in HIDDEN["words"]]
    for layer in hidden:
        layer.requires_grad_(False)
    stepped(optimizer, model, batch_of("words", 1))
    for layer in hidden:
        layer.requires_grad_(True)
    after = {name: block.G.to_dense() for name, block in optimizer.kfac.kfac_factors.items()}
    assert after.keys() == before.keys() and all(torch.equal(after[name], G) for name, G in before.items())
    stepped(optimizer, model, batch_of("words", 2))
    assert optimizer.kfac.record()["layers"]["up"]["refreshes"] == 2


# ---- what an optimizer has to do -------------------------------------------------------------------------------------


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    model = model_of("words", torch.float32)
    optimizer = gramian.optim.KFAC(model, update_freq=4, max_tokens=8)
    for step in range(6):
        stepped(optimizer, model, batch_of("words", step))
    again = copy.deepcopy(model)
    other = gramian.optim.KFAC(again, update_freq=4, max_tokens=8)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(6, 14):
        stepped(optimizer, model, batch_of("words", step))
        stepped(other, again, batch_of("words", step))
    same(again, model)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_steps_its_own_model_as_the_original_does(
    copied: Callable[[object], tuple[Words, gramian.optim.KFAC]],
) -> None:
    model = model_of("words", torch.float32)
    optimizer = gramian.optim.KFAC(model, update_freq=4, max_tokens=8, damping=0.3)
    for step in range(6):
        stepped(optimizer, model, batch_of("words", step))
    other, again = copied((model, optimizer))
    for step in range(6, 10):
        before = copy.deepcopy(other)
        stepped(optimizer, model, batch_of("words", step))
        same(other, before)
        stepped(again, other, batch_of("words", step))
        same(other, model)


def test_the_output_layer_stays_known_over_refreshes_and_in_a_loaded_state() -> None:
    """Else a resumed run makes factors of it, as wide as a vocabulary, at its first refresh."""
    model = model_of("words")
    optimizer = gramian.optim.KFAC(model, update_freq=1)
    for step in range(3):
        stepped(optimizer, model, batch_of("words", step))
        assert optimizer.kfac.head == optimizer.kfac.record()["head"] == "head"
    other = gramian.optim.KFAC(model, update_freq=1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with other.capture(num_terms=20) as cap:
        loss_of(model, batch_of("words", 3)).backward()
    assert other.kfac.head == "head" and sorted(cap.kronecker.specs) == sorted(HIDDEN["words"])


def test_a_closure_is_called_once_and_captures_itself() -> None:
    models = [model_of("words") for _ in range(2)]
    optimizers = [gramian.optim.KFAC(model, update_freq=2) for model in models]
    calls = []

    def closure(step: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            calls.append(step)
            optimizers[1].zero_grad()
            batch = batch_of("words", step)
            with optimizers[1].capture(num_terms=batch[1].numel()):
                loss = loss_of(models[1], batch)
                loss.backward()
            return loss

        return run

    for step in range(5):
        expected = stepped(optimizers[0], models[0], batch_of("words", step))
        assert torch.equal(optimizers[1].step(closure(step)), expected)
    same(models[1], models[0])
    assert calls == list(range(5))


def test_a_scaler_changes_nothing_and_skips_what_is_not_finite() -> None:
    models = [model_of("words") for _ in range(2)]
    optimizers = [gramian.optim.KFAC(model, update_freq=2) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(5):
        batch = batch_of("words", step)
        stepped(optimizers[0], models[0], batch)
        optimizers[1].zero_grad()
        with optimizers[1].capture(num_terms=batch[1].numel(), loss_scale=scaler):
            scaler.scale(loss_of(models[1], batch)).backward()
        scaler.step(optimizers[1])
        scaler.update()
    same(models[1], models[0], 1e-9)
    before = copy.deepcopy(models[1])
    optimizers[1].zero_grad()
    with optimizers[1].capture(num_terms=20, loss_scale=scaler):
        (scaler.scale(loss_of(models[1], batch_of("words", 9))) * float("inf")).backward()
    scaler.step(optimizers[1])
    scaler.update()
    same(models[1], before)


def test_groups_have_their_own_rates_and_may_leave_kfac_out() -> None:
    model, plain = model_of("words"), model_of("words")
    assert isinstance(model, Words) and isinstance(plain, Words)
    groups = [
        {"params": list(model.up.parameters()), "kfac": False, "lr": 1e-2},
        {"params": [*model.same.parameters(), *model.also.parameters()], "weight_decay": 0.0},
        {"params": model.table.weight, "lr": 0.0},
    ]
    optimizer = gramian.optim.KFAC(model, lr=1e-3, params=groups)
    decays = [([plain.up.weight], 0.1), ([plain.up.bias], 0.0)]
    adamw = torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in decays], lr=1e-2, betas=(0.9, 0.95))
    batch = batch_of("words", 0)
    loss_of(plain, batch).backward()
    adamw.step()
    stepped(optimizer, model, batch)
    assert torch.allclose(model.up.weight, plain.up.weight, rtol=1e-12)
    assert torch.allclose(model.up.bias, plain.up.bias, rtol=1e-12)
    assert torch.equal(model.table.weight, plain.table.weight) and torch.equal(model.turned.weight, plain.turned.weight)
    moved = (model.same.weight - plain.same.weight).detach().square().mean().sqrt()
    assert float(moved) == pytest.approx(4 * 0.2 * 1e-3, rel=1e-9)
    assert set(optimizer.kfac.kfac_factors) == {"same", "also"}


def test_named_parameters_are_taken_as_other_optimizers_take_them() -> None:
    model = model_of("words")
    assert isinstance(model, Words)
    model.same.requires_grad_(False)
    groups = [{"params": [*model.same.named_parameters("same"), *model.up.named_parameters("up")], "lr": 1e-2}]
    for params, names in (
        (groups, ["up.weight", "up.bias"]),
        (model.named_parameters(), ["table.weight", "norm.weight"]),
    ):
        optimizer = gramian.optim.KFAC(model, params=params)
        (group,) = optimizer.param_groups
        assert group["param_names"][:2] == names and len(group["params"]) == len(group["param_names"])
        stepped(optimizer, model, batch_of("words", 0))


def test_frozen_parameters_stay_and_the_order_of_groups_is_theirs() -> None:
    model = model_of("words")
    assert isinstance(model, Words)
    model.same.requires_grad_(False)
    optimizer = gramian.optim.KFAC(model, update_freq=1)
    before = copy.deepcopy(model)
    stepped(optimizer, model, batch_of("words", 0))
    assert torch.equal(model.same.weight, before.same.weight)
    assert not torch.equal(model.also.weight, before.also.weight)
    assert "same" not in optimizer.kfac.kfac_factors


def test_a_scheduler_acts() -> None:
    model = model_of("words")
    assert isinstance(model, Words)
    optimizer = gramian.optim.KFAC(model, lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(4):
        before = model.same.weight.detach().clone()
        stepped(optimizer, model, batch_of("words", step))
        moved = float((model.same.weight - before).square().mean().sqrt().detach())
        assert moved == pytest.approx(4 * 0.2 * 1e-2 * 0.5**step, rel=1e-9)
        scheduler.step()


def test_a_first_refresh_that_was_dropped_moves_nothing() -> None:
    model = model_of("words")
    optimizer, before = gramian.optim.KFAC(model), copy.deepcopy(model)
    with optimizer.capture(num_terms=20):
        (loss_of(model, batch_of("words", 0)) * float("nan")).backward()
    optimizer.step()
    same(model, before)
    stepped(optimizer, model, batch_of("words", 1))  # refreshes at the next chance
    assert optimizer.kfac.refreshes == 1 and not torch.equal(next(model.parameters()), next(before.parameters()))


def test_the_plan_is_that_of_the_layers_with_factors() -> None:
    model = model_of("words")
    optimizer = gramian.optim.KFAC(model)
    stepped(optimizer, model, batch_of("words", 0))
    assert [row.layer for row in optimizer.kfac.plan(model, tokens=20).rows] == HIDDEN["words"]


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_step_before_the_first_capture_raises() -> None:
    model = model_of("words")
    optimizer = gramian.optim.KFAC(model)
    loss_of(model, batch_of("words", 0)).backward()
    with refused("step: no capture has run yet; expected the backward inside optimizer.capture(...)"):
        optimizer.step()


def test_a_capture_that_was_not_entered_is_none() -> None:
    model = model_of("words")
    optimizer = gramian.optim.KFAC(model)
    optimizer.capture(num_terms=20)
    with refused("step: no capture has run yet"):
        optimizer.step()


def test_parameters_that_were_replaced_behind_the_optimizer_are_refused() -> None:
    model = model_of("words")
    assert isinstance(model, Words)
    optimizer = gramian.optim.KFAC(model)
    for layer in (model.table, model.norm, model.up, model.same, model.also, model.turned, model.head):
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(p.detach().clone()))
    with refused("model: its parameters were replaced after the optimizer was created; expected fully_shard"):
        stepped(optimizer, model, batch_of("words", 0))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"lr": -1.0}, "lr: expected a number of 0 or more, got -1.0"),
        ({"momentum": 1.0}, "momentum: expected a number below 1, got 1.0"),
        ({"betas": 0.9}, "betas: expected two numbers, got 0.9"),
        ({"damping": 0.0}, "damping: expected a number above 0, got 0.0"),
        ({"update_freq": 0}, "update_freq: expected an integer of at least 1, got 0"),
        ({"params": [nn.Parameter(torch.ones(2, 3))]}, "params: one of shape [2, 3] is not a parameter of the model"),
        ({"params": []}, 'params: expected parameters of the model, or dicts with the key "params"'),
        ({"params": 7}, 'params: expected parameters of the model, or dicts with the key "params"'),
        ({"params": [{"lr": 1.0}]}, 'params: expected parameters of the model, or dicts with the key "params"'),
        ({"params": [{"params": [], "kfac": "no"}]}, "kfac: expected True or False, got 'no'"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], text: str) -> None:
    with refused(text):
        gramian.optim.KFAC(model_of("words"), **options)  # type: ignore[arg-type]


def test_a_state_without_factors_is_refused() -> None:
    model = model_of("words")
    with refused('state_dict: has no "kfac"; expected the state of a gramian.optim.KFAC'):
        gramian.optim.KFAC(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=1.0).state_dict())


def test_a_state_of_other_groups_is_refused_and_nothing_is_half_loaded() -> None:
    model = model_of("words")
    optimizer = gramian.optim.KFAC(model)
    stepped(optimizer, model, batch_of("words", 0))
    other = gramian.optim.KFAC(model_of("words"))
    for state, text in (
        ({"kfac": optimizer.kfac.state_dict()}, 'state_dict: has no "state"'),
        ({**optimizer.state_dict(), "param_groups": [{"params": [0]}]}, "state_dict: has groups of [1] parameters"),
    ):
        with refused(text):
            other.load_state_dict(state)
        assert not other.kfac.kfac_factors and not other.state


@pytest.mark.parametrize(
    "model", [nn.Embedding(7, 7), nn.Sequential(nn.LayerNorm(3)), nn.Linear(2, 2).requires_grad_(False)], ids=str
)
def test_a_model_without_a_matrix_is_refused(model: nn.Module) -> None:
    with refused("model: has no trained "):
        gramian.optim.KFAC(model)


def test_precondition_refuses_it() -> None:
    model = model_of("words")
    with refused("optimizer: gramian.optim.KFAC brings its own curvature"):
        gramian.precondition(gramian.optim.KFAC(model), model, gramian.KFACNaturalGradient())


def test_make_private_refuses_it() -> None:
    model = model_of("words", torch.float32)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch_of("words", 0)), batch_size=2)
    with refused("optimizer: gramian.optim.KFAC takes its curvature from the private batches"):
        gramian.PrivacyEngine().make_private(
            module=model,
            optimizer=gramian.optim.KFAC(model),
            data_loader=data,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
