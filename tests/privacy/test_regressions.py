"""Bugs that a reader found by trying to break private training, each with the smallest case that showed it."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.oracles.clipped_sum import clipped_sum
from gramian.privacy.clipping.loss_scaling import Scaling
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.noise.secrets import load_private, save_private
from tests.kit.private import attach
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.privacy.problems import ATTACHED, assert_totals

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def rows(count: int) -> torch.Tensor:
    """Samples that differ."""
    return torch.linspace(-1, 1, 5 * count).view(count, 5).double()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(1).mean()


def private(model: nn.Module, engine: Any = None, records: int = 32, batch: int = 8, **options: Any) -> Any:
    engine = engine or gramian.PrivacyEngine()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.randn(records, 5, generator=torch.Generator().manual_seed(1)).double())
    given = {"noise_multiplier": 0.0, "max_grad_norm": 0.01, **options}
    found = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=batch), **given
    )
    ATTACHED.append(engine)
    return engine, *found


def moved(before: dict[str, torch.Tensor], model: nn.Module) -> float:
    return float(torch.cat([(before[n] - p.detach()).flatten() for n, p in model.named_parameters()]).norm())


def test_gradients_from_before_are_not_stepped_along() -> None:
    model = net()
    (1e3 * loss_of(model, torch.ones(4, 5).double())).backward()
    _, model, optimizer, loader = private(model)
    before = copy.deepcopy(dict(model.named_parameters()))
    (x,) = next(iter(loader))
    loss_of(model, x).backward()
    optimizer.step()
    assert moved(before, model) <= 0.01 * len(x) / 8 + 1e-12


def test_rows_that_repeat_a_record_are_refused() -> None:
    _, model, optimizer, loader = private(net())
    x = next(b for (b,) in loader if len(b))
    with refusal("rows for .* records"):
        loss_of(model, x.repeat_interleave(3, 0)).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_second_backward_adds_nothing_before_it_is_refused() -> None:
    _, model, _, loader = private(net())
    x = next(b for (b,) in loader if len(b))
    loss_of(model, x).backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    with refusal("ran twice on one batch"):
        loss_of(model, x).backward()
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())


def test_batches_accumulated_without_poisson_are_accounted_for() -> None:
    engine, model, optimizer, loader = private(net(), noise_multiplier=1.0, poisson_sampling=False)
    for (x,) in loader:  # all 32 records in one step
        loss_of(model, x).backward()
    optimizer.step()
    whole, *_ = private(net(), noise_multiplier=1.0, sample_rate=1.0, expected_batch=32, poisson_sampling=False)
    whole._ledger.accounting.set_steps(1)
    assert engine.get_epsilon(1e-5) == pytest.approx(whole.get_epsilon(1e-5))
    engine.detach()
    whole.detach()


def test_a_backward_larger_than_it_may_be_is_refused() -> None:
    for limit in (1, 4):
        engine, model, _, _ = private(net(), poisson_sampling=False, max_physical_batch=limit)
        with refusal("max_physical_batch|batch: has"):
            loss_of(model, rows(8)).backward()
        engine.detach()


@pytest.mark.full
def test_a_target_is_kept_by_as_many_steps_as_the_loader_yields() -> None:
    engine, model = gramian.PrivacyEngine("rdp"), net()
    data = TensorDataset(rows(60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=32), max_grad_norm=1.0,
        target_epsilon=3.0, target_delta=1e-5, epochs=10,
    )  # fmt: skip
    for _ in range(10):
        for (x,) in loader:
            loss_of(model, x).backward()
            optimizer.step()
    assert 2.5 < engine.get_epsilon(1e-5) <= 3.0


def steps(engine: Any, count: int, model: nn.Module | None = None, **options: Any) -> None:
    engine, model, optimizer, loader = private(model or net(), engine, **options)
    for (x,), _ in zip(loader, range(count), strict=False):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()


def test_going_back_over_a_change_of_noise_refunds_nothing(tmp_path: Any) -> None:
    path = str(tmp_path / "releases.json")
    engine = gramian.PrivacyEngine("rdp")
    engine.bind_counter(path)
    steps(engine, 2, noise_multiplier=2.0)
    saved = copy.deepcopy(engine.state_dict())
    steps(engine, 3, noise_multiplier=0.5)
    spent = engine.get_epsilon(1e-5)
    engine.load_state_dict(saved)
    assert engine.get_epsilon(1e-5) == pytest.approx(spent)
    other = gramian.PrivacyEngine("rdp")
    other.load_state_dict(saved, replay=True)
    other.bind_counter(path, must_exist=True)
    assert other.steps == 5 and other.get_epsilon(1e-5) == pytest.approx(spent)


def test_a_state_without_its_counter_never_draws_the_same_noise_again(tmp_path: Any) -> None:
    engine = gramian.PrivacyEngine("rdp")
    steps(engine, 1, noise_multiplier=1.0)
    path = tmp_path / "private.pt"
    save_private(path, engine.state_dict())
    found = []
    for _ in range(2):
        again = gramian.PrivacyEngine("rdp")
        again.load_state_dict(load_private(path))
        model = net()
        with pytest.warns(UserWarning, match="bind_counter"):
            steps(again, 1, model, noise_multiplier=1.0, max_grad_norm=1.0)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not bool((found[0] == found[1]).any())


@pytest.mark.parametrize("limit", [None, 1])
def test_private_models_are_copied_and_pickled_as_ordinary_ones(limit: int | None) -> None:
    _, model, _, _ = private(net(), max_physical_batch=limit)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x = rows(3)
        torch.testing.assert_close(other(x), model.eval()(x) if limit is None else other(x))
        loss_of(other, x).backward()
        assert all(p.grad is not None for p in other.parameters())


def test_detaching_leaves_no_sum_without_noise() -> None:
    engine, model, _, loader = private(net(), noise_multiplier=1.0)
    x = next(b for (b,) in loader if len(b))
    loss_of(model, x).backward()
    engine.detach()
    assert all(p.grad is None for p in model.parameters())


def test_two_loops_over_one_loader_do_not_share_a_draw() -> None:
    _, model, optimizer, loader = private(net(), noise_multiplier=1.0)
    one = iter(loader)
    loss_of(model, next(one)[0]).backward()
    optimizer.step()
    other = iter(loader)
    loss_of(model, next(other)[0]).backward()
    optimizer.step()
    loss_of(model, next(one)[0]).backward()
    with refusal("released before"):
        optimizer.step()


@pytest.mark.parametrize("reduction", [0.125, "mean", "sum"])
def test_one_sample_at_a_time_reads_the_loss_as_taps_do(reduction: str | float) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)).double()
    found = []
    for limit in (None, 1):
        engine, model, _, _ = private(
            net(), max_physical_batch=limit, loss_reduction=reduction, poisson_sampling=False, max_grad_norm=1.0
        )
        for row in x.split(1):
            factor = reduction if isinstance(reduction, float) else 1.0
            (factor * model(row).square().sum()).backward()
        found.append([p.grad.clone() for p in model.parameters()])
        engine.detach()
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)


def test_a_batch_through_a_submodule_is_not_one_sample() -> None:
    _, model, _, _ = private(net(), max_physical_batch=1, poisson_sampling=False)
    with refusal("forward of the model itself"):
        model[2](torch.ones(4, 6).double()).sum().backward()


def test_other_hooks_see_the_private_gradient() -> None:
    model, seen = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
    _, model, optimizer, loader = private(model, optimizer=optimizer, noise_multiplier=1.0, max_grad_norm=1.0)
    before = copy.deepcopy(dict(model.named_parameters()))
    loss_of(model, next(iter(loader))[0]).backward()
    optimizer.step()
    for gradient, (n, p) in zip(seen[0], model.named_parameters(), strict=True):
        torch.testing.assert_close(before[n] - p.detach(), gradient)


def test_independence_is_checked_for_every_sample_of_a_small_batch() -> None:
    engine, model, _, _ = private(net(), poisson_sampling=False)
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).double()

    def coupled(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (model(x).square().sum(1) * weights).sum() / weights.max()

    for heaviest in range(5):
        weights = torch.ones(5).double()
        weights[heaviest] = 7.0
        with refusal(r"2: the output gradient of sample \d changes when other"):
            engine.check_independence(coupled, (x, weights))


def test_a_model_that_takes_a_dict_finds_its_batch() -> None:
    engine, model, _, _ = private(Toy(lambda net, batch: net.inner(batch["x"]), inner=net()), poisson_sampling=False)
    model({"x": rows(4)}).square().sum(1).mean().backward()
    assert len(engine.last.norms_B) == 4


@pytest.mark.parametrize(
    "use, line",
    [
        (lambda e: e.noise_multiplier, "engine: makes no model private"),
        (lambda e: e.load_state_dict({"schema": 1}), "state: has no"),
        (lambda e: e.get_epsilon(delta="x"), "delta: x; expected a probability"),
        (lambda e: gramian.PrivacyEngine(insecure_reproducible=True, seed="a"), "seed: 'a'; expected an integer"),
        (lambda e: private(net(), e, max_grad_norm=1e-30), "max_grad_norm"),
    ],
)
def test_wrong_use_gets_one_line(use: Any, line: str) -> None:
    with warnings.catch_warnings(), refusal(line) as caught:
        use(gramian.PrivacyEngine("rdp"))
    assert "\n" not in str(caught.value)


def test_a_replay_with_other_options_is_refused() -> None:
    engine = gramian.PrivacyEngine("rdp")
    _, model, optimizer, loader = private(net(), engine, noise_multiplier=2.0)
    saved = copy.deepcopy(engine.state_dict())
    loss_of(model, next(iter(loader))[0]).backward()
    optimizer.step()
    engine.detach()
    for options in ({"noise_multiplier": 0.3}, {"noise_multiplier": 2.0, "max_grad_norm": 5.0}):
        private(model, engine, **options)
        with refusal("replay: (noise_multiplier|max_grad_norm)"):
            engine.load_state_dict(saved, replay=True)
        engine.detach()
        late = gramian.PrivacyEngine("rdp")
        late.load_state_dict(saved, replay=True)
        with refusal("replay: (noise_multiplier|max_grad_norm)"):
            private(net(), late, **options)
    private(model, engine, noise_multiplier=2.0)
    engine.load_state_dict(saved, replay=True)


def test_a_draw_that_no_step_released_is_noticed() -> None:
    _, model, _, loader = private(net(), noise_multiplier=1.0)
    with refusal("no step of the private optimizer"):
        for (x,) in loader:
            loss_of(model, x).backward()


def test_a_target_for_an_engine_that_has_spent_is_refused() -> None:
    engine = gramian.PrivacyEngine("rdp")
    steps(engine, 1, noise_multiplier=1.0)
    with refusal("target_epsilon: the engine has spent"):
        engine.make_private_with_epsilon(
            module=net(), optimizer=None, data_loader=None, target_epsilon=1.0, target_delta=1e-5, epochs=1
        )


def test_two_processes_do_not_share_a_counter_file(tmp_path: Any) -> None:
    path, engine = str(tmp_path / "releases.json"), gramian.PrivacyEngine("rdp")
    engine.bind_counter(path)
    steps(engine, 1, noise_multiplier=1.0)
    saved = engine.state_dict()
    two = []
    for _ in range(2):
        other = gramian.PrivacyEngine("rdp")
        other.bind_counter(path, must_exist=True)
        other.load_state_dict(saved)
        two.append(other)
    steps(two[0], 1, noise_multiplier=1.0)
    with refusal("another process"):
        steps(two[1], 1, noise_multiplier=1.0)


@pytest.mark.parametrize("limit", [None, 1])
def test_gradients_of_parameters_by_themselves_change_no_sum(limit: int | None) -> None:
    _, model, _, _ = private(net(), max_physical_batch=limit, poisson_sampling=False)
    x = torch.ones(1, 5).double()
    loss_of(model, x).backward()
    before = [p.grad.clone() for p in model.parameters()]
    if limit == 1:
        torch.autograd.grad(loss_of(model, x), list(model.parameters()))
    given = x.clone().requires_grad_()
    torch.autograd.grad(loss_of(model, given), given)
    assert all(torch.equal(p.grad, earlier) for p, earlier in zip(model.parameters(), before, strict=True))


def test_a_missing_loader_is_named() -> None:
    model = net()
    with refusal("data_loader: expected a DataLoader, got NoneType"):
        attach(
            gramian.PrivacyEngine(), model, None, optimizer=torch.optim.SGD(model.parameters()), poisson_sampling=True
        )


def test_the_noise_cannot_be_pickled() -> None:
    with refusal("holds a key"):
        pickle.dumps(NoisePlan(bytes(32), [("p", (2,))]))


@pytest.mark.few_proofs(short=True)
@pytest.mark.parametrize("clipping, physical", [("auto", None), ("keep", None), ("two_pass", None), ("auto", 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_sample_what_is_noised_changes_by_the_clip_norm_also_in_half_precision(
    dtype: torch.dtype, clipping: str, physical: int | None
) -> None:
    torch.manual_seed(0)
    count, base = 96, torch.randn(32)
    x = (base + 0.02 * torch.randn(count, 32)).to(dtype)  # alike, so that their sum is long

    def released(rows: torch.Tensor) -> torch.Tensor:
        model = nn.Linear(32, 32, bias=False).to(dtype)
        nn.init.constant_(model.weight, 0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = gramian.PrivacyEngine()
        attach(
            engine,
            model,
            DataLoader(TensorDataset(x), batch_size=count),
            optimizer=optimizer,
            noise_multiplier=0.0,
            clipping=clipping,
            loss_reduction="sum",
            max_physical_batch=physical,
            expected_batch=1.0,
        )
        for piece in x[rows].split(physical or count):
            engine.backward(8 * model(piece).square().sum())
        found = engine._model.sums._wide("weight", Scaling())
        engine.detach()
        return found.double()

    whole = released(torch.arange(count))
    assert whole.norm() > 0.8 * count
    for i in (0, 7):
        change = whole - released(torch.tensor([j for j in range(count) if j != i]))
        assert change.norm() <= 1 + 1e-4


@pytest.mark.parametrize("to_none", [True, False])
def test_half_precision_sums_follow_what_becomes_of_the_gradient(to_none: bool) -> None:
    model = net().bfloat16()
    _, _, optimizer, _ = private(model, poisson_sampling=False)
    x = torch.randn(4, 5).bfloat16()
    loss_of(model, x).backward()
    optimizer.zero_grad(set_to_none=to_none)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    optimizer.zero_grad()
    loss_of(model, x).backward()
    model[0].weight.grad.mul_(3.0)
    with refusal("0.weight: its .grad was changed between backward and step"):
        optimizer.step()


class Auxiliary(nn.Module):
    """Keeps a loss of its own on itself, as vector quantisers and routers do; its product is none that a tap knows."""

    def __init__(self, penalty: bool) -> None:
        super().__init__()
        self.w, self.penalty = nn.Parameter(torch.randn(5, 3).double()), penalty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (x[..., None] * self.w).sum(-2)
        self.aux = self.w.square().sum() if self.penalty else h.square().sum(1)
        return h


PAST = {
    "auto": r"^attribute 0.aux of the model couples samples \(0.w: (the taps explain|got a gradient, but none)",
    "off": "0.w: gets a gradient past what its layer returns",
}


@pytest.mark.filterwarnings("ignore:.*proof")
@pytest.mark.parametrize("proof", PAST)
@pytest.mark.parametrize("clipping", ["auto", "keep", "two_pass"])
@pytest.mark.parametrize("penalty", [False, True])
def test_a_gradient_past_the_outputs_of_a_layer_without_a_formula_is_named(
    penalty: bool, clipping: str, proof: str
) -> None:
    model = nn.Sequential(Auxiliary(penalty))
    engine, _, _, _ = private(model, poisson_sampling=False, clipping=clipping, proof=proof)
    x = torch.randn(6, 5).double()
    with refusal(PAST[proof]):
        engine.backward((model(x).sum(1) + 10 * model[0].aux).mean())
    assert model[0].w.grad is None
    engine.backward(model(x).sum(1).mean())  # without it all is well again
    assert model[0].w.grad is not None


def test_rows_that_stand_for_several_records_are_refused() -> None:
    model = net()
    _, _, _, loader = private(model, records=64, batch=20)
    x = next(iter(loader))[0]
    with refusal("batch: has 1 rows for .* records"):
        loss_of(model, x.mean(0, keepdim=True)).backward()


def test_a_step_without_a_backward_of_its_batch_is_refused() -> None:
    model = net()
    _, _, optimizer, loader = private(model, records=64, batch=20)
    x = next(iter(loader))[0]
    loss_of(model, x).backward(inputs=[*model.parameters()])
    with refusal("step: no backward of the last batch"):
        optimizer.step()


def test_a_negative_coefficient_is_refused() -> None:
    with refusal("loss_reduction: expected a coefficient above 0"):
        private(net(), poisson_sampling=False, loss_reduction=-1.0)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.Embedding(9, 5, max_norm=1.0)], ids=["norm", "table"])
def test_layers_that_carry_samples_on_are_refused_at_single_samples_too(layer: nn.Module) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer.double(), nn.Linear(5, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x[:, 0].long() if isinstance(self.layer, nn.Embedding) else x))

    with refusal(f"layer .{type(layer).__name__}"):
        private(Model(), poisson_sampling=False, max_physical_batch=1)


def test_hooks_on_a_parameter_are_refused() -> None:
    model = net()
    model[0].weight.register_hook(lambda g: 0 * g)
    with refusal("0.weight: has a hook on its gradient"):
        private(model, poisson_sampling=False)


@pytest.mark.parametrize("physical", [None, 1])
def test_parameters_outside_the_optimizer_are_named_and_get_nothing(physical: int | None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1.0)
    with pytest.warns(UserWarning, match="optimizer: does not have 0.weight and others"):
        private(model, poisson_sampling=False, optimizer=optimizer, max_physical_batch=physical)
    loss_of(model, torch.ones(1, 5).double()).backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_another_tensor_in_place_of_a_parameter_is_refused() -> None:
    model = net()
    private(model, poisson_sampling=False)
    other = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with refusal("ran on another tensor than the optimizer's parameter"):
        torch.func.functional_call(model, other, (rows(2),))


def test_a_resume_without_replay_has_another_key_also_with_a_counter(tmp_path: Any) -> None:
    engine = gramian.PrivacyEngine("rdp")
    engine.bind_counter(tmp_path / "releases.json")
    steps(engine, 1, noise_multiplier=1.0)
    saved = engine.state_dict()
    resumed = gramian.PrivacyEngine("rdp")
    resumed.bind_counter(tmp_path / "releases.json", must_exist=True)
    resumed.load_state_dict(saved)
    steps(resumed, 1, noise_multiplier=1.0)
    assert not torch.equal(resumed.state_dict()["secrets"]["key"], saved["secrets"]["key"])
    assert resumed.steps == 2


def test_pieces_of_an_abandoned_draw_are_not_released_with_the_next() -> None:
    model = net()
    engine, _, optimizer, loader = private(model, records=64, batch=20, max_physical_batch=4)
    saved = engine.state_dict()
    for (x,) in loader:
        loss_of(model, x).backward()
        optimizer.step()
        break
    assert engine._model.sums.moved
    with pytest.warns(UserWarning, match="state: steps begun"):
        engine.load_state_dict(saved)
    assert not engine._model.sums.moved
    assert engine._model.step.progress.passes_since_step == 0


def test_a_replay_on_other_data_is_refused() -> None:
    engine = gramian.PrivacyEngine("rdp")
    steps(engine, 1, noise_multiplier=1.0)
    saved = engine.state_dict()
    model = net()
    again = gramian.PrivacyEngine("rdp")
    again.load_state_dict(saved, replay=True)
    other = DataLoader(TensorDataset(torch.zeros(32, 5).double()), batch_size=8)
    with refusal("replay: data_loader is not what it was"):
        attach(
            again,
            model,
            other,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            max_grad_norm=0.01,
            poisson_sampling=True,
        )


@pytest.mark.parametrize("physical", [None, 4, 1])
@pytest.mark.parametrize("labels", [False, True])
def test_a_model_that_cannot_run_on_no_rows_steps_on_an_empty_draw(physical: int | None, labels: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = torch.randint(11, (50, 6))
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=1)
    model, optimizer, loader = attach(
        engine, model, DataLoader(TensorDataset(tokens), batch_size=1), optimizer=optimizer, noise_multiplier=0.0,
        expected_batch=1.0, sample_rate=1e-4, max_physical_batch=physical, poisson_sampling=True,
    )  # fmt: skip
    (x,) = next(iter(loader))
    assert len(x) == 0
    if labels:
        loss = model(input_ids=x, labels=x).loss
    else:
        logits = model(input_ids=x).logits
        assert logits.shape == (0, 6, 11)
        loss = logits.sum()
    loss.backward()
    optimizer.step()
    assert engine.steps == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory_budget": "infGB"}, "memory_budget: expected bytes"),
        ({"memory_budget": "-8GB"}, "memory_budget: expected bytes"),
        ({"max_physical_batch": 1.5}, "max_physical_batch: expected"),
    ],
)
def test_odd_options_are_named(options: dict[str, Any], message: str) -> None:
    with refusal(message):
        private(net(), **options)


class Views(nn.Module):
    """Two views of every sample in one call: those of a sample next to each other, or one view of all behind the other."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.together = nn.Linear(5, 3).double(), together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.together:
            return self.encoder(torch.stack([x, 2 * x], 1).flatten(0, 1)).view(len(x), 2, 3).sum(1)
        return self.encoder(torch.cat([x, 2 * x])).view(2, len(x), 3).sum(0)


def test_rows_of_a_sample_that_lie_apart_are_its_own_too() -> None:
    model, x = Views(together=False), rows(4)
    want = clipped_sum(model, loss_of, (x,), 0.01)
    private(model, poisson_sampling=False)
    loss_of(model, x).backward()
    assert_totals(model, want)


def test_rows_of_a_sample_next_to_each_other_are_its_own_without_a_word() -> None:
    model, x = Views(together=True), rows(4)
    want = clipped_sum(model, loss_of, (x,), 0.01)
    private(model, poisson_sampling=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, x).backward()
    assert_totals(model, want)


def test_a_dropped_half_precision_gradient_takes_its_wide_sum_along() -> None:
    model = net().bfloat16()
    engine, _, optimizer, _ = private(model, poisson_sampling=False)
    loss_of(model, torch.randn(4, 5).bfloat16()).backward()
    assert len(engine._model.sums._wide_sums) == 4
    optimizer.zero_grad()
    optimizer.step()
    assert len(engine._model.sums._wide_sums) == 0


@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_released_does_not_depend_on_a_scale_that_a_scaler_undoes(
    dtype: torch.dtype, physical: int | None
) -> None:
    def gradient(scale: float) -> torch.Tensor:
        model = net().to(dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        engine, _, optimizer, _ = private(
            model, poisson_sampling=False, loss_scale=scaler, max_grad_norm=0.1, loss_reduction="sum"
        )
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)).to(dtype)
        for piece in x.split(physical or 4):
            scaler.scale(model(piece).square().sum()).backward()
        scaler.step(optimizer)
        found = model[0].weight.grad.float().clone()
        engine.detach()
        return found

    expected = gradient(1.0)
    assert expected.norm() > 0
    for scale in (4.0, 1024.0):
        torch.testing.assert_close(gradient(scale), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)


def test_a_disabled_scaler_is_none() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    engine, _, optimizer, _ = private(model, poisson_sampling=False, loss_scale=scaler)
    scaler.scale(loss_of(model, torch.randn(4, 5).double())).backward()
    scaler.step(optimizer)
    assert engine.steps == 1


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "every second"])
@pytest.mark.parametrize("size", [1, 3])
def test_convolutions_take_maps_of_any_layout(size: int, layout: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, size, size).double()
    if layout == "transposed":
        x = x.flatten(2).mT.contiguous().mT.unflatten(2, (size, size))
    elif layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    else:
        x = x.repeat_interleave(2, 1)[:, ::2]
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Flatten(), nn.Linear(6 * size**2, 2)).double()
    want = clipped_sum(model, loss_of, (x,), 0.01)
    private(model, poisson_sampling=False)
    loss_of(model, x).backward()
    assert_totals(model, want)


def test_a_gradient_may_be_written_to_where_it_has_its_noise() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, _, optimizer, _ = private(model, optimizer=optimizer, poisson_sampling=False, noise_multiplier=1.0)
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer.register_step_pre_hook(lambda *_: [p.grad.zero_() for p in model.parameters()] and None)
    for _ in range(2):  # without zero_grad: the next backward adds to what the step left
        loss_of(model, rows(8)).backward()
        optimizer.step()
        model[0].weight.grad.mul_(0.5)
    assert moved(before, model) == 0


def test_a_compiled_step_draws_the_noise_of_an_eager_one() -> None:
    torch._dynamo.reset()
    steps = []
    for compiled in (False, True):
        engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=1)
        model = net()
        engine, _, optimizer, _ = private(model, engine, poisson_sampling=False, noise_multiplier=1.0)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, rows(8)).backward()
            step()
            steps.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert engine.steps == 3
        engine.detach()
    assert all(torch.equal(eager, other) for eager, other in zip(steps[:3], steps[3:], strict=True))
    assert not any(torch.equal(steps[3], later) for later in steps[4:])


def test_samples_that_are_all_equal_tell_nothing_of_independence() -> None:
    engine, model, *_ = private(net(), poisson_sampling=False)

    def coupled(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y - y.mean(0)).square().sum(1).mean()

    with refusal("batch: all its samples are equal; expected samples that differ"):
        engine.check_independence(coupled, torch.ones(4, 5).double())


def test_a_lazy_layer_without_a_shape_is_named() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with refusal("0.weight: has no shape yet"):
        private(model, poisson_sampling=False)
