"""The replay: names the module in whose code a number stopped being finite, and leaves no trace."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.models import GPT, GPTConfig
from gramian.models.gpt import GPTBlock
from gramian.train.health import nonfinite_replay
from gramian.train.health.nonfinite_replay import LOSS, ROOT, NonfiniteSource, first_nonfinite

CONFIG = GPTConfig(vocabulary=11, context=8, layers=3, width=8, heads=2)


class SpoiledGradient(torch.autograd.Function):
    """The identity, with a backward that spoils some elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        spoiled = grads[0].clone()
        spoiled.view(-1)[:3] = ctx.value
        return spoiled, None


class Spoiled(nn.Module):
    """A layer that goes wrong before or after the one it wraps."""

    def __init__(self, layer: nn.Module, forward: float | None = None, backward: float | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.values = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        forward, backward = self.values
        y: Tensor = self.layer(x)
        if forward is not None:
            y = y.clone()
            y.view(-1)[:5] = forward
        return y if backward is None else SpoiledGradient.apply(y, backward)


def run_of(model: nn.Module, **options: Any) -> Any:
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        logits = model(tokens, **options)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    return run


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_sound_batch_finds_nothing_and_changes_nothing() -> None:
    model, other = GPT(CONFIG), GPT(CONFIG)
    assert first_nonfinite(model, run_of(model)) is None
    run_of(other)()
    assert hooks(model) == 0
    for watched, plain in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(watched.grad, plain.grad)


# ---- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_module_that_returns_it_is_named(layer: int, value: float) -> None:
    model = GPT(CONFIG)
    model.blocks[layer].fc = Spoiled(model.blocks[layer].fc, forward=value)
    found = first_nonfinite(model, run_of(model))
    assert found == NonfiniteSource(f"blocks.{layer}.fc", "forward", "its output", (2, 8, 32), 5)
    assert str(found) == f"blocks.{layer}.fc: forward, 5 elements of its output (2×8×32) not finite"
    assert hooks(model) == 0


def test_code_between_modules_names_the_one_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(CONFIG)
    whole, guilty = GPTBlock._attention, model.blocks[1]
    monkeypatch.setattr(
        GPTBlock, "_attention", lambda self, *x: whole(self, *x) * (float("nan") if self is guilty else 1)
    )
    found = first_nonfinite(model, run_of(model))
    assert found is not None
    assert (found.name, found.where) == ("blocks.1", "forward")


def test_an_infinite_weight_names_its_module_and_itself() -> None:
    model = GPT(CONFIG)
    with torch.no_grad():
        model.blocks[2].mlp_out.weight[3, 4] = float("inf")
    found = first_nonfinite(model, run_of(model))
    assert found is not None
    assert (found.name, found.where, found.count) == ("blocks.2.mlp_out", "forward", 16)
    assert found.parameters == ("blocks.2.mlp_out.weight",)
    assert str(found).endswith("not finite; not finite itself: blocks.2.mlp_out.weight")


class Nested(nn.Module):
    """Returns a structure, of which one part is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        y = self.inner(given["x"][0])
        return {"ids": torch.arange(3), "parts": [y, (y.log(),)]}


def test_nested_structures_are_looked_into() -> None:
    model = nn.Sequential(Nested())
    with torch.no_grad():
        model[0].inner.weight.fill_(-1)
        model[0].inner.bias.fill_(0)
    found = first_nonfinite(model, lambda: model({"x": (torch.ones(2, 3),)})["parts"][0].sum().backward())
    assert found == NonfiniteSource("0", "forward", "its output", (2, 3), 6)


def test_a_mask_of_minus_infinity_hides_nothing() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with torch.no_grad():
        model.self_attn.in_proj_bias[20] = float("nan")
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    assert mask.isinf().any()
    found = first_nonfinite(model, lambda: model(torch.ones(2, 4, 8), src_mask=mask).sum().backward())
    assert found is not None
    assert (found.name, found.where) == ("self_attn", "forward")
    assert found.parameters == ("self_attn.in_proj_bias",)


def test_a_module_that_raised_is_not_taken_for_the_one_that_caught_it() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raises = Raises()

        def forward(self, x: Tensor) -> Tensor:
            with suppress(ValueError):
                return self.raises(x)
            return x / 0

    model = nn.Sequential(nn.Linear(3, 3), Catches())
    found = first_nonfinite(model, lambda: model(torch.ones(2, 3)).sum().backward())
    assert found is not None
    assert (found.name, found.where) == ("1", "forward")


# ---- backward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_the_module_through_which_a_gradient_went_wrong_is_named(layer: int, value: float) -> None:
    model = GPT(CONFIG)
    model.blocks[layer].fc = Spoiled(nn.Linear(8, 32), backward=value)
    found = first_nonfinite(model, run_of(model))
    assert found is not None
    assert (found.name, found.where, found.count) == (f"blocks.{layer}.fc", "backward", 3)
    assert found.tensor == "the gradient of fc.layer's output".replace("fc", f"blocks.{layer}.fc")


class Split(nn.Module):
    """Three modules that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.q, self.k, self.v = (Leaf() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.q(x) + self.k(x) + self.v(x)


class Leaf(nn.Module):
    """The identity, with a backward that may be spoiled."""

    spoiled = False

    def forward(self, x: Tensor) -> Tensor:
        return SpoiledGradient.apply(x, float("nan")) if self.spoiled else x


@pytest.mark.parametrize("guilty", ["q", "k", "v"])
def test_of_several_modules_that_read_one_tensor_the_guilty_one_is_named(guilty: str) -> None:
    model = Split()
    getattr(model, guilty).spoiled = True
    found = first_nonfinite(model, lambda: model(torch.ones(2, 3)).sum().backward())
    assert found == NonfiniteSource(guilty, "backward", "the gradient of its input", (2, 3), 3)


def test_a_gradient_that_arrives_wrong_is_the_doing_of_the_loss() -> None:
    model = Split()
    found = first_nonfinite(
        model, lambda: SpoiledGradient.apply(model(torch.ones(2, 3)), float("inf")).sum().backward()
    )
    assert found == NonfiniteSource(LOSS, "backward", f"the gradient of {ROOT}'s output", (2, 3), 3)


def test_a_module_that_returns_what_it_was_given_is_not_blamed() -> None:
    class Passed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.passed = nn.Linear(3, 3), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return SpoiledGradient.apply(self.passed(self.first(x)), float("nan"))

    model = Passed()
    found = first_nonfinite(model, lambda: model(torch.ones(2, 3)).sum().backward())
    assert found is not None
    assert (found.name, found.where, found.tensor) == (ROOT, "backward", "the gradient of passed's output")


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_recomputed_activations_are_seen_like_others(place: str, blocks: int) -> None:
    model = GPT(CONFIG)
    model.blocks[1].fc = Spoiled(model.blocks[1].fc, **{place: float("nan")})
    model.checkpoint_blocks = blocks
    found = first_nonfinite(model, run_of(model))
    assert found is not None
    assert (found.name, found.where) == ("blocks.1.fc", place)
    assert hooks(model) == 0


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_a_gradient_that_no_module_passes_on_is_found_at_its_parameter() -> None:
    model = nn.Linear(3, 2)
    model.bias.register_hook(lambda grad: grad * float("nan"))
    found = first_nonfinite(model, lambda: model(torch.ones(1, 3)).sum().backward())
    assert found == NonfiniteSource("bias", "parameter", "its gradient", (2,), 2)


def test_a_value_that_the_batch_does_not_touch_is_found_at_its_parameter() -> None:
    model = nn.Embedding(5, 2)
    with torch.no_grad():
        model.weight[4] = float("inf")
    found = first_nonfinite(model, lambda: model(torch.tensor([0, 1])).sum().backward())
    assert found == NonfiniteSource("weight", "parameter", "its value", (5, 2), 2)


# ---- no trace --------------------------------------------------------------------------------------------------------


def test_hooks_are_gone_after_an_error() -> None:
    model = GPT(CONFIG)
    kept = model.head.register_forward_hook(lambda *given: None)
    output: list[Tensor] = []

    def run() -> None:
        output.append(model(torch.zeros(1, 4, dtype=torch.long)))
        raise KeyError("the batch")

    with pytest.raises(KeyError, match="the batch"):
        first_nonfinite(model, run)
    assert hooks(model) == 1
    kept.remove()
    assert not output[0]._backward_hooks


def test_nothing_is_looked_at_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(CONFIG)
    model.blocks[0].fc = Spoiled(model.blocks[0].fc, forward=float("nan"))
    looks: list[tuple[int, ...]] = []
    count = nonfinite_replay._count
    monkeypatch.setattr(nonfinite_replay, "_count", lambda tensor: looks.append(tuple(tensor.shape)) or count(tensor))
    found = first_nonfinite(model, run_of(model))
    assert found is not None
    assert found.name == "blocks.0.fc"
    assert (2, 8, 11) not in looks
