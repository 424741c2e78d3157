"""From a backward to its step gradients and weights stay as they are, and nothing else trains on it; or it is refused."""

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.privacy.clipping.clip_factors import SLACK
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.privacy.problems import ATTACHED

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def rows(count: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1).mean()


def private(model: nn.Module, *, parameters: Any = None, **options: Any) -> Any:
    """An engine and the private optimizer, SGD at lr 1, of a model that trains on 32 records."""
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(parameters or model.parameters(), lr=1.0)
    engine = options.pop("engine", None) or gramian.PrivacyEngine(insecure_reproducible=True, seed=0)
    loader = DataLoader(TensorDataset(rows(32)), batch_size=8)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 0.1, "poisson_sampling": False, **options}
    _, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **given)
    ATTACHED.append(engine)
    return engine, optimizer, loader


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


# ---- gradients -----------------------------------------------------------------------------------------------------------


def _assigned(p: nn.Parameter) -> None:
    p.grad = p.grad * 2


def _swapped(p: nn.Parameter) -> None:
    first, second = p.grad[0, 0].item(), p.grad[0, 1].item()
    p.grad.data[0, 0], p.grad.data[0, 1] = second, first


def _one_bit(p: nn.Parameter) -> None:
    p.grad.data[-1, -1] *= 1 + torch.finfo(p.dtype).eps


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "data.mul_": lambda p: p.grad.data.mul_(100),
    "data.neg_": lambda p: p.grad.data.neg_(),
    "mul_": lambda p: p.grad.mul_(100),
    "assigned": _assigned,
    "two swapped": _swapped,
    "one bit": _one_bit,
    "clipped": lambda p: nn.utils.clip_grad_norm_([p], 1e-4),
    "detached copy_": lambda p: p.grad.detach().copy_(torch.ones_like(p.grad)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("physical", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_with_other_values_is_refused_and_nothing_is_released(
    dtype: torch.dtype, physical: int | None, change: str
) -> None:
    model = net(dtype)
    engine, optimizer, _ = private(model, max_physical_batch=physical)
    before = weights(model)
    x = rows(physical or 4, dtype)
    loss_of(model, x).backward()
    CHANGES[change](model[2].weight)
    with refusal(r"^2\.weight: its \.grad was changed between backward and step"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert all(p.grad is None for p in model.parameters())  # its noise was drawn for another sum: neither is used
    loss_of(model, x).backward()
    optimizer.step()
    assert not torch.equal(weights(model), before)
    assert engine.steps == 2  # that of the refused step was begun


def _copied(p: nn.Parameter) -> None:
    p.grad = p.grad.clone()


SAME: dict[str, Callable[[nn.Parameter], Any]] = {
    "clipped at infinity": lambda p: nn.utils.clip_grad_norm_([p], float("inf")),
    "mul_(1)": lambda p: p.grad.mul_(1.0),
    "plus 0": lambda p: p.grad.add_(0.0),  # makes 0.0 of -0.0
    "twice negated": lambda p: p.grad.neg_().neg_(),
    "assigned": _copied,
}


@pytest.mark.parametrize("write", SAME)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_that_leaves_the_values_changes_no_bit_of_the_step(dtype: torch.dtype, write: str) -> None:
    def step(disturb: bool) -> Tensor:
        model = net(dtype)
        engine, optimizer, _ = private(model)
        with torch.no_grad():
            model[2].bias.zero_()
        loss_of(model, rows(dtype=dtype)).backward()
        for p in model.parameters() if disturb else ():
            SAME[write](p)
        optimizer.step()
        engine.detach()
        return weights(model)

    assert torch.equal(step(True), step(False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["none", "zeros", "data zeros"])
def test_a_gradient_may_be_dropped(way: str, dtype: torch.dtype) -> None:
    """Of a half-precision parameter the sum behind it is dropped along, unless nobody could see that it was written to."""
    model = net(dtype)
    _, optimizer, _ = private(model, noise_multiplier=0.0)
    before = weights(model)
    loss_of(model, rows(dtype=dtype)).backward()
    if way == "data zeros":
        for p in model.parameters():
            p.grad.data.zero_()
    else:
        optimizer.zero_grad(set_to_none=way == "none")
    if way == "data zeros" and dtype == torch.bfloat16:
        with refusal(r"^0\.weight: its \.grad was changed"):
            optimizer.step()
    else:
        optimizer.step()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_change_before_another_backward_is_refused_in_the_step(dtype: torch.dtype) -> None:
    model = net(dtype)
    _, optimizer, _ = private(model)
    for change in (True, False):
        loss_of(model, rows(dtype=dtype)).backward()
        if change:
            model[0].bias.grad.data.mul_(3)
        loss_of(model, rows(3, dtype)).backward()
        if change:
            with refusal(r"^0\.bias: its \.grad was changed"):
                optimizer.step()
        else:
            optimizer.step()


def test_what_was_changed_may_still_be_dropped() -> None:
    model = net()
    _, optimizer, _ = private(model)
    loss_of(model, rows()).backward()
    model[0].bias.grad.data.mul_(3)
    loss_of(model, rows(3)).backward()
    optimizer.zero_grad()
    loss_of(model, rows()).backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["unscaled by step", "unscaled before", "changed before", "changed after"])
def test_a_scaler_may_unscale_and_nobody_else(when: str, dtype: torch.dtype) -> None:
    model = net(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)  # whose inverse is rounded
    engine, optimizer, _ = private(model, loss_scale=scaler)
    scaler.scale(loss_of(model, rows(dtype=dtype))).backward()
    if when == "changed before":
        model[0].weight.grad.data.mul_(2)
    if when != "unscaled by step":
        scaler.unscale_(optimizer)
    if when == "changed after":
        model[0].weight.grad.data.mul_(2)
    if when.startswith("changed"):
        with refusal(r"^0\.weight: its \.grad was changed"):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
        assert engine.stepped


def test_a_change_in_any_piece_of_a_draw_is_refused() -> None:
    model = net()
    engine, optimizer, loader = private(model, poisson_sampling=True, max_physical_batch=2)
    before = weights(model)
    with refusal(r"^0\.weight: its \.grad was changed"):
        for (x,) in loader:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            model[0].weight.grad.data.add_(1)
            optimizer.step()
    assert torch.equal(weights(model), before)
    assert not engine._model.sums.moved and engine.steps == 0


def test_gradients_in_another_layout_have_the_same_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten()).to(memory_format=torch.channels_last)
    _, optimizer, _ = private(model)
    loss_of(model, torch.randn(4, 3, 5, 5)).backward()
    assert not model[0].weight.grad.is_contiguous()
    model[0].weight.grad = model[0].weight.grad.contiguous()
    optimizer.step()


# ---- weights -------------------------------------------------------------------------------------------------------------


def _by_hand(model: nn.Module, data: bool) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if data:
                p.data -= p.grad
            else:
                p -= p.grad


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "p -= p.grad": lambda model: _by_hand(model, data=False),
    "p.data -= p.grad.data": lambda model: _by_hand(model, data=True),
    "loaded": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("physical", [None, 1])
def test_weights_that_change_between_backward_and_step_are_refused(physical: int | None, write: str) -> None:
    model = net()
    _, optimizer, _ = private(model, max_physical_batch=physical)
    loss_of(model, rows(physical or 4)).backward()
    WRITES[write](model)
    before = weights(model)
    with refusal(r"^0\.weight: was changed between backward and step.*nothing was released"):
        optimizer.step()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("data", [False, True])
def test_training_by_hand_in_place_of_the_step_is_refused_at_the_next_backward(data: bool) -> None:
    model = net()
    _, optimizer, _ = private(model)
    loss_of(model, rows()).backward()
    _by_hand(model, data=data)
    optimizer.zero_grad()
    with refusal(r"^0\.weight: was changed between backward and step"):
        loss_of(model, rows()).backward()


def test_weights_may_change_between_a_step_and_the_next_forward() -> None:
    model = net()
    _, optimizer, _ = private(model)
    average = copy.deepcopy(model.state_dict())
    for _ in range(2):
        loss_of(model, rows()).backward()
        optimizer.step()
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        model.load_state_dict(own)
        model[0].weight.data.mul_(0.5)
        optimizer.zero_grad()


@pytest.mark.parametrize("poisson", [False, True])
def test_another_optimizer_of_the_same_parameters_is_refused_before_it_acts(poisson: bool) -> None:
    model = net()
    engine, optimizer, loader = private(model, poisson_sampling=poisson)
    other = torch.optim.Adam(model[2].parameters())
    x = next(iter(loader))[0]
    loss_of(model, x).backward()
    before = weights(model)
    with refusal(r"^2\.weight: Adam is about to step it while its \.grad has no noise"):
        other.step()
    assert torch.equal(weights(model), before)
    optimizer.step()
    other.step()  # on what has its noise
    engine.detach()
    loss_of(model, x).backward()
    other.step()


# ---- other parameters ----------------------------------------------------------------------------------------------------


def _compile(model: nn.Module, compiled: bool) -> None:
    if compiled:
        torch.compiler.reset()
        model.compile(backend="aot_eager")


OUTSIDE = r"a parameter of shape \[{}\] outside of the module: gets an ordinary gradient in the backward"


@pytest.mark.parametrize("physical, compiled", [(None, False), (1, False), (None, True)])
def test_a_head_that_trains_plainly_is_refused_at_the_second_backward(physical: int | None, compiled: bool) -> None:
    trunk, head = net(), nn.Linear(3, 2).double()
    _compile(trunk, compiled)
    _, optimizer, _ = private(trunk, max_physical_batch=physical)
    plain = torch.optim.SGD(head.parameters(), lr=0.1)
    x = rows(physical or 4)
    loss_of(head, trunk(x)).backward()
    plain.step()
    optimizer.step()
    with refusal(OUTSIDE.format("2, 3")):
        loss_of(head, trunk(x)).backward()
    head.requires_grad_(False)
    loss_of(head, trunk(x)).backward()
    head.requires_grad_(True)
    loss_of(head, trunk(x).detach()).backward()  # on what another step released, or on public data
    plain.step()


@pytest.mark.parametrize("physical", [None, 1])
def test_engine_backward_sees_a_plain_head_at_once(physical: int | None) -> None:
    trunk, head = net(), nn.Linear(3, 2).double()
    engine, _, _ = private(trunk, max_physical_batch=physical)
    with refusal(OUTSIDE.format("2(, 3)?")):
        engine.backward(loss_of(head, trunk(rows(physical or 4))))
    assert all(p.grad is None for p in trunk.parameters())


@pytest.mark.parametrize("physical", [None, 1])
def test_a_private_head_on_a_trunk_that_trains_plainly_is_refused(physical: int | None) -> None:
    trunk, head = nn.Linear(5, 5).double(), net()
    _, optimizer, _ = private(head, max_physical_batch=physical)
    x = rows(physical or 4)
    with refusal(OUTSIDE.format(r"5(, 5)?")):
        loss_of(head, trunk(x)).backward()
    assert all(p.grad is None for p in head.parameters())
    for inputs in (trunk(x).detach(), x.clone().requires_grad_()):  # the gradient of an input is its sample's own
        loss_of(head, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_parameter_of_the_module_with_another_optimizer_is_named() -> None:
    model = Toy(lambda net, x: net.net(x), net=net(), scale=nn.Parameter(torch.ones(3).double()))
    with pytest.warns(UserWarning, match="does not have scale"):
        _, optimizer, _ = private(model, parameters=model.net.parameters())
    other = torch.optim.SGD([model.scale], lr=1.0)
    other.step()
    with refusal("^scale: gets an ordinary gradient"):
        (model(rows()) * model.scale).square().sum(1).mean().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_other_models_train_as_they_like(compiled: bool) -> None:
    """A second model, and a generator that learns through the private one while that is frozen."""
    model, other, generator = net(), net(), nn.Linear(2, 5).double()
    _compile(model, compiled)
    _, optimizer, _ = private(model)
    plain = torch.optim.SGD([*other.parameters(), *generator.parameters()], lr=0.1)
    for _ in range(2):
        loss_of(model, rows()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(False)
        (loss_of(other, rows()) + loss_of(model, generator(torch.ones(4, 2).double()))).backward()
        model.requires_grad_(True)
        assert generator.weight.grad is not None
        plain.step()
    del plain
    gc.collect()


def test_two_private_parts_of_one_model_train_together() -> None:
    trunk, head = net(), nn.Linear(3, 2).double()
    first, second = (private(part, engine=gramian.PrivacyEngine()) for part in (trunk, head))
    for _ in range(2):
        loss_of(head, trunk(rows())).backward()
        for _, optimizer, _ in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    for engine, *_ in (first, second):
        engine.detach()


# ---- closures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poisson, physical", [(False, None), (True, None), (True, 2), (True, 1)])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_runs_once_and_makes_the_step_that_a_backward_before_it_makes(
    by_name: bool, poisson: bool, physical: int | None
) -> None:
    def run(closed: bool) -> tuple[Tensor, list[float], int]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        engine, optimizer, loader = private(
            model, optimizer=optimizer, poisson_sampling=poisson, max_physical_batch=physical
        )
        losses: list[float] = []
        for (x,) in loader:
            calls = []

            def closure(x: Tensor = x, calls: list[int] = calls) -> Tensor:
                calls.append(1)
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            if closed:
                with torch.no_grad():  # as torch.optim's own, it runs with gradients
                    losses.append(float(optimizer.step(closure=closure) if by_name else optimizer.step(closure)))
            else:
                losses.append(float(closure()))
                optimizer.step()
            assert len(calls) == 1
        engine.detach()
        return weights(model), losses, engine.steps

    (closed, its_losses, steps), (opened, losses, expected) = run(True), run(False)
    assert torch.equal(closed, opened)
    torch.testing.assert_close(its_losses, losses, rtol=0, atol=0, equal_nan=True)
    assert steps == expected > 0


def test_a_closure_without_a_backward_of_its_batch_is_refused() -> None:
    model = net()
    _, optimizer, loader = private(model, poisson_sampling=True)
    x = next(x for (x,) in loader if len(x))
    with refusal("step: no backward of the last batch"):
        optimizer.step(lambda: loss_of(model, x))


class Twice(torch.optim.SGD):
    """Evaluates the loss a second time, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        with torch.enable_grad():
            return closure() + closure()


class Demanding(torch.optim.SGD):
    """Cannot do without a closure."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


def test_optimizers_with_several_backwards_in_a_step_are_refused() -> None:
    model = net()
    engine, optimizer, _ = private(model, optimizer=Twice(model.parameters(), lr=0.1))

    def closure() -> Tensor:
        loss = loss_of(model, rows())
        loss.backward()
        return loss

    with refusal("closure: the optimizer calls it twice in one step"):
        optimizer.step(closure)
    engine.detach()
    for refused in (torch.optim.LBFGS(model.parameters()), Demanding(model.parameters(), lr=0.1)):
        with refusal("^optimizer: .*several times in one step"):
            private(model, optimizer=refused)


# ---- what can be seen without data ---------------------------------------------------------------------------------------

MIXING = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    "frozen": lambda: nn.BatchNorm1d(6, affine=False),
    "no statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False).eval(),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
    "plain InstanceNorm1d": lambda: nn.InstanceNorm1d(6, track_running_stats=True),
}


@pytest.mark.parametrize("layer", MIXING)
@pytest.mark.parametrize("physical", [None, 1])
def test_layers_that_mix_or_store_samples_are_refused_before_any_data(physical: int | None, layer: str) -> None:
    mixing = MIXING[layer]()
    model = nn.Sequential(nn.Linear(5, 6), mixing, nn.Linear(6, 3)).double()
    name = rf"^1 \({type(mixing).__name__}\) (mixes the samples of a batch|stores running statistics)"
    with refusal(name):
        private(model, max_physical_batch=physical)
    assert "forward" not in model[0].__dict__
    if layer != "no statistics":
        engine, _, _ = private(model.eval(), max_physical_batch=physical)
        engine.detach()


@pytest.mark.parametrize("physical", [None, 1])
def test_layers_that_begin_to_mix_later_are_refused_in_the_forward(physical: int | None) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().eval()
    private(model, max_physical_batch=physical)
    model.train()
    with refusal(r"^1 \(BatchNorm1d\) mixes"):
        model(rows(physical or 4))


# ---- Opacus' arguments ---------------------------------------------------------------------------------------------------


def test_opacus_arguments_that_mean_the_same_are_taken() -> None:
    model = net()
    engine = gramian.PrivacyEngine(accountant="rdp", secure_mode=True)
    private(
        model,
        engine=engine,
        batch_first=True,
        clipping="flat",
        noise_generator=None,
        grad_sample_mode="hooks",
        secure_mode=True,
        criterion=nn.CrossEntropyLoss(),
        loss_reduction="mean",
    )
    loss_of(model, rows()).backward()
    assert engine.plan is not None and engine._model.options.clipping == "auto"
    norms = engine.last.norms_B * engine.last.factors_B
    assert float(norms.max()) <= 0.1 * (1 + SLACK[torch.float64])


REFUSED = {
    "grad_sample_mode": ("ghost", r'"two_pass" with engine\.backward\(loss\)'),
    "noise_generator": (torch.Generator(), r"insecure_reproducible=True, seed="),
    "criterion": (
        nn.CrossEntropyLoss(reduction="sum"),
        r"loss_reduction= as the loop reduces its loss \(it is 'mean'\)",
    ),
    "batch_first": (False, r"the batch on the first axis"),
    "secure_mode": ("yes", r"True or False"),
    "clipping": ("per_layer", r'it as clip_function="per_layer"'),
}


@pytest.mark.parametrize("field", REFUSED)
def test_opacus_arguments_that_mean_something_else_are_refused_with_their_counterpart(field: str) -> None:
    value, counterpart = REFUSED[field]
    with refusal(rf"^{field}: .*expected .*{counterpart}") as caught:
        private(net(), **{field: value})
    assert "\n" not in str(caught.value)


def test_arguments_of_nobody_are_the_callers_mistake() -> None:
    with pytest.raises(TypeError, match=re.escape("make_private() got an unexpected keyword argument 'max_norm'")):
        private(net(), max_norm=1.0)
    with refusal("^secure_mode: has a secret key"):
        gramian.PrivacyEngine(secure_mode=True, insecure_reproducible=True)
