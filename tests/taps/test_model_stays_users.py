"""The model stays the user's: nothing of it changes but the `forward` of instances, and that only for the time being."""

import gc
import io
import pickle
import types
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gramian
from gramian.core.errors import GramianError
from gramian.taps import hub_of
from tests.kit.matrix import FULL
from tests.kit.models import CASES
from tests.kit.processes import distributed
from tests.kit.toys import Toy
from tests.taps.checks import assert_norms, captured, gradients, loop_norms, problem

KINDS = ["mlp", "tied_gpt", "hf_gpt2", "vit", "convnet", "mha", "lora", "pooled"]
"""One of each kind of layer."""


def _description(model: nn.Module) -> dict[str, Any]:
    """Everything that a user could look at, but for the forward of instances."""
    return {
        "classes": [type(m) for m in model.modules()],
        "names": [name for name, _ in model.named_modules()],
        "modules": [id(m) for m in model.modules()],
        "keys": [sorted(m.__dict__) for m in model.modules()],
        "parameters": [(name, id(p), p.requires_grad, p.grad is None) for name, p in model.named_parameters()],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "training": [m.training for m in model.modules()],
        "state": list(model.state_dict()),
        "hooks": [_hooks(m) for m in model.modules()],
        "tensor hooks": [dict(p._backward_hooks or {}) for p in model.parameters()],
        "accumulation hooks": [len(getattr(p, "_post_accumulate_grad_hooks", None) or {}) for p in model.parameters()],
        "repr": repr(model),
    }


def _hooks(module: nn.Module) -> list[int]:
    return [len(value) for key, value in sorted(module.__dict__.items()) if "hooks" in key and value is not None]


def _without_forward(description: dict[str, Any]) -> dict[str, Any]:
    keys = [[key for key in names if key != "forward"] for names in description["keys"]]
    return {**description, "keys": keys, "tensor hooks": None}


# ---- during and after -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_during_a_capture_only_the_forward_of_instances_differs_and_after_it_nothing(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    before = _description(model)
    with gramian.per_sample_norms(model):
        assert _without_forward(_description(model)) == _without_forward(before)
        assert all(type(m).forward is type(m).__dict__.get("forward", type(m).forward) for m in model.modules())
        loss(model, *batch, reduction="mean").backward()
    model.zero_grad()
    assert _description(model) == before


def test_isinstance_and_attributes_hold_during_a_capture() -> None:
    model, batch, loss = problem(CASES["hf_gpt2"])
    with gramian.per_sample_norms(model):
        from transformers import GPT2LMHeadModel, PreTrainedModel

        assert type(model) is GPT2LMHeadModel and isinstance(model, PreTrainedModel)
        assert model.config.n_embd == 12
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        loss(model, *batch, reduction="mean").backward()


def test_random_state_and_training_mode_are_left_alone_by_entering_and_leaving() -> None:
    model, batch, loss = problem(CASES["vit"])
    model.block.eval()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    captured(model, loss, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes


def test_dropout_draws_the_same_numbers_with_and_without_a_capture() -> None:
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3))
    untouched, x = deepcopy(model), torch.randn(4, 5)
    torch.manual_seed(3)
    with gramian.per_sample_norms(model):
        model(x).square().sum().backward()
    torch.manual_seed(3)
    untouched(x).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), untouched.parameters(), strict=True))


def test_gradients_that_were_none_stay_none_where_nothing_flows() -> None:
    model, batch, loss = problem(CASES["unused"])
    captured(model, loss, batch)
    assert {name for name, g in gradients(model).items() if g is None} == {"spare.weight", "spare.bias"}


def test_hooks_of_the_user_run_once_and_stay() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    calls: list[str] = []
    handles = [
        model[0].register_forward_pre_hook(lambda *_: calls.append("before")),
        model[0].register_forward_hook(lambda *_: calls.append("after")),
        model[1].register_full_backward_hook(lambda *_: calls.append("backward")),
        model[0].weight.register_hook(lambda g: calls.append("gradient")),
        model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated")),
    ]
    with gramian.per_sample_norms(model) as norms:
        model(torch.randn(4, 5)).square().sum().backward()
    assert calls == ["before", "after", "backward", "gradient", "accumulated"]
    assert norms.values.shape == (4,)
    calls.clear()
    model(torch.randn(4, 5)).square().sum().backward()
    assert calls == ["before", "after", "backward", "gradient", "accumulated"]
    for handle in handles:
        handle.remove()


def test_hooks_that_change_input_and_output_are_seen_as_part_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    model[0].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    model[0].register_forward_hook(lambda module, inputs, output: output.tanh())
    x = torch.randn(4, 5, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor, reduction: str) -> Tensor:
        return model(x).square().sum() / (len(x) if reduction == "mean" else 1)

    with gramian.per_sample_norms(model) as norms:
        loss(model, x, "mean").backward()
    assert_norms(norms.values, loop_norms(model, loss, (x,)))


def test_a_forward_without_gradients_is_not_observed() -> None:
    model, batch, loss = problem(CASES["mlp"])
    with gramian.per_sample_norms(model) as norms:
        with torch.no_grad():
            loss(model, *batch, reduction="mean")
        with torch.inference_mode():
            loss(model, *batch, reduction="mean")
        loss(model, *batch, reduction="mean").backward()
    assert norms.values.shape == (4,)


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_deep_copy_made_inside_a_capture_is_untapped_and_runs_on_its_own_weights(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    with gramian.per_sample_norms(model) as norms:
        copy = deepcopy(model)
        with torch.no_grad():
            for p in copy.parameters():
                p.mul_(0.5)
        other = loss(copy, *batch, reduction="mean")
        other.backward()
        assert all(p.grad is None for p in model.parameters())
        loss(model, *batch, reduction="mean").backward()
    assert norms.values.shape == (4,)
    fresh = CASES[name].make(torch.float64)
    with torch.no_grad():
        for p in fresh.parameters():
            p.mul_(0.5)
    expected = loss(fresh, *batch, reduction="mean")
    expected.backward()
    assert torch.equal(other, expected)
    for (parameter, found), wanted in zip(gradients(copy).items(), gradients(fresh).values(), strict=True):
        assert (found is None) == (wanted is None) and (found is None or torch.equal(found, wanted)), parameter


def test_a_deep_copy_made_inside_a_capture_keeps_a_forward_that_the_user_put_on_an_instance() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))

    def own(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x.tanh(), self.weight, self.bias)

    model[0].forward = types.MethodType(own, model[0])
    x = torch.randn(4, 5)
    expected = model(x).detach()
    with gramian.per_sample_norms(model, audit=False):
        copy = deepcopy(model)
        assert torch.equal(copy(x), expected)
        model(x).sum().backward()
    assert torch.equal(copy(x), expected)


def test_a_copy_made_inside_a_capture_can_be_captured_itself_after_and_meanwhile() -> None:
    model, batch, loss = problem(CASES["gpt"])
    expected = loop_norms(model, loss, batch)
    with gramian.per_sample_norms(model) as norms:
        copy = deepcopy(model)
        of_the_copy = captured(copy, loss, batch)
        loss(model, *batch, reduction="mean").backward()
    assert_norms(norms.values, expected)
    assert_norms(of_the_copy.values, expected)
    assert not any("tapped" in dir(getattr(m.__dict__.get("forward"), "__func__", None)) for m in model.modules())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", ["pickle", pytest.param("torch.save", marks=pytest.mark.full)])
def test_a_model_pickled_inside_a_capture_is_loaded_untapped(name: str, how: str) -> None:
    model, batch, loss = problem(CASES[name])
    before = _description(model)["keys"]
    expected = loop_norms(model, loss, batch)
    with gramian.per_sample_norms(model):
        if how == "pickle":
            loaded = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
        assert all(m.forward.__func__ is type(m).forward for m in loaded.modules())
        value = loss(loaded, *batch, reduction="mean")
        value.backward()
        assert all(p.grad is None for p in model.parameters())
        loss(model, *batch, reduction="mean").backward()
    assert torch.equal(value, loss(model, *batch, reduction="mean"))
    assert [sorted(m.__dict__) for m in model.modules()] == before
    norms = captured(loaded, loss, batch)
    assert_norms(norms.values, expected)


def test_a_state_dict_saved_inside_a_capture_is_the_same_and_loads_with_weights_only() -> None:
    model, batch, loss = problem(CASES["gpt"])
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with gramian.per_sample_norms(model):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        loss(model, *batch, reduction="mean").backward()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    model.load_state_dict(loaded)


# ---- leaving --------------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.fails = nn.Linear(5, 4), nn.Linear(4, 3), ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.fails == "forward":
            raise ValueError("forward")
        if self.fails == "backward":
            h.register_hook(self._fail)
        return self.head(h)

    def _fail(self, gradient: Tensor) -> Tensor:
        raise ValueError("backward")


@pytest.mark.parametrize("where", ["forward", "backward", "user", "before anything", "statistic"])
def test_after_an_exception_the_model_is_as_before_and_can_be_captured_again(where: str) -> None:
    model, x = Failing().double(), torch.randn(4, 5, dtype=torch.float64)
    before = _description(model)

    class Broken(gramian.Health):
        def update(self, sums: Any, record: Any) -> None:
            raise ValueError("statistic")

    with pytest.raises(ValueError), gramian.observe(model, Broken() if where == "statistic" else gramian.Health()):  # noqa: PT011, PT012
        if where == "before anything":
            raise ValueError(where)
        model.fails = where
        value = model(x).square().sum()
        value.backward()
        raise ValueError(where)
    model.fails = ""
    model.zero_grad()
    assert _description(model) == before

    def loss(model: nn.Module, x: Tensor, reduction: str) -> Tensor:
        return model(x).square().sum() / (len(x) if reduction == "mean" else 1)

    with gramian.per_sample_norms(model) as norms:
        loss(model, x, "mean").backward()
    assert_norms(norms.values, loop_norms(model, loss, (x,)))


def test_a_failed_backward_inside_a_capture_leaves_the_next_one_right() -> None:
    model, x = Failing().double(), torch.randn(4, 5, dtype=torch.float64)
    expected = loop_norms(model, lambda m, x, reduction: m(x).square().sum(), (x,))
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        for fails in ("forward", "backward"):
            model.fails = fails
            with pytest.raises(ValueError, match=fails):
                model(x).square().sum().backward()
        model.fails = ""
        model.zero_grad()
        model(x).square().sum().backward()
    assert_norms(norms.values[-4:], expected)


def test_a_refusal_while_entering_leaves_nothing_installed() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Embedding(3, 4, sparse=True))
    before = _description(model)
    with pytest.raises(GramianError), gramian.per_sample_norms(model):
        pass
    assert _description(model) == before
    with pytest.raises(GramianError), gramian.per_sample_norms(model):
        pass


def test_a_forward_that_the_user_put_on_an_instance_is_used_and_restored() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).double()

    def own(x: Tensor) -> Tensor:
        return F.linear(x.tanh(), model[0].weight, model[0].bias)

    model[0].forward = own
    x = torch.randn(4, 5, dtype=torch.float64)
    expected = model[1](own(x)).detach()
    with gramian.per_sample_norms(model, loss_reduction="sum", audit=False):
        output = model(x)
        output.sum().backward()
    assert torch.equal(output, expected)
    assert model[0].__dict__["forward"] is own
    assert "forward" not in model[1].__dict__


def test_a_forward_that_the_user_put_on_an_instance_is_exact_or_refused_by_name() -> None:
    """The site belongs to the class's forward; another one may compute anything."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).double()
    layer = model[0]
    layer.forward = lambda x: F.linear(x.tanh(), layer.weight, layer.bias)
    x = torch.randn(4, 5, dtype=torch.float64)
    reference = nn.Sequential(nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    reference[1].load_state_dict(layer.state_dict())
    reference[2].load_state_dict(model[1].state_dict())
    expected = loop_norms(reference, lambda m, x, reduction: m(x).square().sum(), (x,))
    try:
        with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
            model(x).square().sum().backward()
    except GramianError as error:
        assert str(error).startswith("0")  # noqa: PT017
    else:
        assert_norms(norms.values, expected)


@pytest.mark.parametrize("name", KINDS if FULL else KINDS[1:4])
def test_a_model_is_garbage_collected_after_a_capture(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    norms = captured(model, loss, batch)
    values, coverage = norms.values, norms.coverage
    modules = [weakref.ref(m) for m in model.modules()]
    tensors = [weakref.ref(p) for p in model.parameters()]
    del model, norms
    gc.collect()
    assert not [ref() for ref in [*modules, *tensors] if ref() is not None]
    assert values.shape == (4,) and "covered" in repr(coverage)


def test_a_capture_does_not_keep_activations_alive_after_the_backward() -> None:
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(4, 5)
    hidden: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda module, inputs, output: hidden.append(weakref.ref(output)))
    with gramian.per_sample_norms(model) as norms:
        model(x).square().sum().backward()
        gc.collect()
        assert hidden[0]() is None
    assert norms.values.shape == (4,)


def test_results_can_be_read_after_the_model_is_gone() -> None:
    model, batch, loss = problem(CASES["mlp"])
    expected = loop_norms(model, loss, batch)
    norms = captured(model, loss, batch)
    del model
    gc.collect()
    assert_norms(norms.values, expected)
    assert norms.coverage["0.weight"].status == "covered"


# ---- names and wrappers ---------------------------------------------------------------------------------------------


def _blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)).double()


def _compiled_inside() -> nn.Module:
    model = _blocks()
    model[1] = torch.compile(model[1], backend="eager")
    return model


def _checkpointed_inside() -> nn.Module:
    model = _blocks()
    model[1] = checkpoint_wrapper(model[1])
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "plain": _blocks,
    "compiled": lambda: torch.compile(_blocks(), backend="eager"),
    "compiled inside": _compiled_inside,
    "checkpointed": lambda: checkpoint_wrapper(_blocks()),
    "checkpointed inside": _checkpointed_inside,
    "checkpointed, compiled": lambda: torch.compile(_checkpointed_inside(), backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_names_are_the_users_whatever_wrapper_stands_around_or_inside(name: str) -> None:
    model, x = WRAPPED[name](), torch.randn(4, 5, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        model(x).square().sum().backward()
    assert list(norms.coverage) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias"]
    assert all(cover.status == "covered" and cover.uses == 1 for cover in norms.coverage.values())
    assert_norms(norms.values, loop_norms(_blocks(), lambda m, x, reduction: m(x).square().sum(), (x,)))


@distributed(world_size=1)
def test_names_are_the_users_under_ddp(rank: int, world_size: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model, x = DistributedDataParallel(_blocks()), torch.randn(4, 5, dtype=torch.float64)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        model(x).square().sum().backward()
    assert list(norms.coverage) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias"]
    assert_norms(norms.values, loop_norms(_blocks(), lambda m, x, reduction: m(x).square().sum(), (x,)))


def test_a_submodule_that_the_user_called_module_keeps_its_name() -> None:
    model = Toy(lambda net, x: net.module(x), module=nn.Linear(5, 3))
    with gramian.per_sample_norms(model) as norms:
        model(torch.randn(4, 5)).square().sum().backward()
    assert list(norms.coverage) == ["module.weight", "module.bias"]


def test_a_model_and_its_wrappers_are_one_model_to_captures() -> None:
    model = _blocks()
    assert hub_of(model) is hub_of(torch.compile(model, backend="eager")) is hub_of(checkpoint_wrapper(model))
