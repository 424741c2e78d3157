"""Wrong numbers and crashes that were once found by hand, each kept away by a test."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.taps.proof.row_recorder import Sketch
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.oracles import sample_statistics


def squares(model: nn.Module, *inputs: Tensor) -> Tensor:
    """A sum of per-sample losses."""
    return model(*inputs).square().sum()


def assert_exact(model: nn.Module, *inputs: Tensor) -> None:
    expected = sample_statistics.per_sample_norms(model, squares, inputs)
    with gramian.per_sample_norms(model, "sum") as norms:
        squares(model, *inputs).backward()
    torch.testing.assert_close(norms.values, expected, rtol=1e-9, atol=0)


class RelativeBias(nn.Module):
    """T5's way: an embedding of distances, [T, T], shared by all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.mix = nn.Embedding(32, 1), nn.Linear(3, 3)

    def forward(self, x_BTD: Tensor) -> Tensor:
        places = torch.arange(x_BTD.shape[1])
        weights_TT = self.bias(places[None, :] - places[:, None] + 16)[..., 0].softmax(1)
        return weights_TT @ self.mix(x_BTD)


@pytest.mark.parametrize("tokens", [4, 8, 7])
def test_relative_positions_without_a_batch_axis_are_exact_whatever_their_length(tokens: int) -> None:
    assert_exact(RelativeBias().double(), torch.randn(4, tokens, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "places", [torch.arange(8), torch.arange(8) + 2, torch.arange(8).flip(0), torch.arange(4)], ids=str
)
def test_positions_without_a_batch_axis_are_exact_in_image_models_too(places: Tensor) -> None:
    model = Toy(
        lambda net, image_BCHW: net.mix(image_BCHW.flatten(2).mT[:, : len(places)] + net.place(places)),
        place=nn.Embedding(12, 3),
        mix=nn.Linear(3, 3),
    )
    assert_exact(model.double(), torch.randn(4, 3, 4, 4, dtype=torch.float64))


def conditioned() -> Toy:
    """An image and a class label; the batch is as long as the image has channels."""
    return Toy(
        lambda net, image, label: net.conv(image) + net.label(label)[:, :, None, None],
        label=nn.Embedding(10, 4),
        conv=nn.Conv2d(4, 4, 3),
    )


def test_class_labels_are_rows_also_where_the_batch_equals_the_channels() -> None:
    images, labels = torch.randn(4, 4, 5, 5, dtype=torch.float64), torch.tensor([3, 1, 3, 7])
    assert_exact(conditioned().double(), images, labels)


def test_two_backwards_through_parts_of_one_forward_are_refused() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    model = Toy(lambda net, x: (heads[0](x), heads[1](x)), heads=heads)
    with refusal("twice"), gramian.per_sample_norms(model):
        first, second = model(x)
        first.sum().backward()
        second.sum().backward()


def test_the_batch_size_of_an_inner_capture_ends_with_it() -> None:
    model = nn.Linear(3, 2)
    with gramian.per_sample_norms(model, "sum") as outer:
        with gramian.per_sample_norms(model, "sum", batch_size=2):
            squares(model, torch.randn(4, 3)).backward()
        squares(model, torch.randn(4, 3)).backward()
    assert outer.values.shape == (2 + 4,)


def test_captures_that_disagree_about_the_batch_are_refused() -> None:
    model = nn.Linear(3, 2)
    with (
        refusal("batch_size.*expected"),
        gramian.per_sample_norms(model, batch_size=2),
        gramian.per_sample_norms(model, batch_size=4),
    ):
        pass


class Branches(nn.Module):
    """A branch that is taken later, and then past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.late = nn.Linear(3, 3), nn.Linear(3, 3), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return nn.functional.linear(h, self.b.weight) if self.late else h


@pytest.mark.usefixtures("root_not_taken")
def test_a_weight_that_the_first_batch_did_not_use_is_audited_when_it_is_used() -> None:
    model, x = Branches(), torch.randn(4, 3)
    with gramian.per_sample_norms(model):
        squares(model, x).backward()
    model.late = True
    with refusal("b.weight"), gramian.per_sample_norms(model):
        squares(model, x).backward()


def test_sums_are_a_snapshot() -> None:
    model, fisher = nn.Linear(3, 2), gramian.DiagonalFisher()
    with gramian.observe(model, fisher) as seen:
        squares(model, torch.randn(4, 3)).backward()
        sums = seen.sums(fisher)
        before = {key: value.clone() for key, value in sums.items()}
        squares(model, torch.randn(4, 3)).backward()
        with refusal("expected"):
            seen.sums(gramian.DiagonalFisher())
    assert all(torch.equal(sums[key], before[key]) for key in sums)


def test_sums_over_other_parameters_do_not_merge() -> None:
    fisher = gramian.DiagonalFisher()
    with refusal("merge: b.*expected"):
        fisher.merge({"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)})


class TiedBias(nn.Module):
    """BERT's head: a bias on the parent that is also the bias of its child."""

    def __init__(self, own_use: bool) -> None:
        super().__init__()
        self.bias, self.decoder, self.own_use = nn.Parameter(torch.randn(5)), nn.Linear(3, 5), own_use
        self.decoder.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.decoder(x)
        return y * self.bias if self.own_use else y


@pytest.mark.parametrize("own_use", [False, True])
def test_a_parameter_of_a_parent_and_its_child_counts_once_for_each_use(own_use: bool) -> None:
    assert_exact(nn.Sequential(nn.Linear(4, 3), TiedBias(own_use)).double(), torch.randn(4, 6, 4, dtype=torch.float64))


def one_row() -> Toy:
    """Learned positions as a layer of their own: [1, T, D]."""
    return Toy(lambda net, x: net.table[:, : x.shape[1]], table=nn.Parameter(torch.randn(1, 9, 3)))


def test_an_unknown_layer_may_give_one_row_for_all_samples() -> None:
    assert_exact(
        Toy(lambda net, x: net.mix(x + net.positions(x)).tanh(), positions=one_row(), mix=nn.Linear(3, 4)).double(),
        torch.randn(4, 5, 3, dtype=torch.float64),
    )


def scale() -> Toy:
    return Toy(
        lambda net, x, mask=None: x * net.scale if mask is None else mask @ (x * net.scale),
        scale=nn.Parameter(torch.randn(3)),
    )


def test_an_unknown_layer_may_see_several_rows_per_sample() -> None:
    assert_exact(
        Toy(lambda net, x: net.scale(x.flatten(0, 1)).unflatten(0, x.shape[:2]), scale=scale()).double(),
        torch.randn(4, 5, 3, dtype=torch.float64),
    )


@pytest.mark.parametrize("tokens", [4, 5, 8])
def test_a_mask_of_an_unknown_layer_belongs_to_all_samples(tokens: int) -> None:
    model = Toy(
        lambda net, x: net.scale(x, torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()), scale=scale()
    ).double()
    assert_exact(model, torch.randn(4, tokens, 3, dtype=torch.float64))


def test_training_that_begins_inside_a_capture_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    with refusal("0.weight.*expected"), gramian.per_sample_norms(model):
        model[0].requires_grad_(True)
        squares(model, torch.randn(4, 3)).backward()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place, self.layer, self.head = nn.Embedding(9, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def block(self, x: Tensor) -> Tensor:
        return self.layer(x + self.place(torch.arange(x.shape[1])[None])).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


@pytest.mark.parametrize("order", ["ab", "ba", "sum"])
def test_checkpointed_forwards_of_different_batches_may_run_backward_in_any_order(order: str) -> None:
    model = Checkpointed().double()
    a, b = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    expected = torch.cat([sample_statistics.per_sample_norms(model, squares, (x,)) for x in (a, b)])
    with gramian.per_sample_norms(model, "sum") as norms:
        losses = {"a": squares(model, a), "b": squares(model, b)}
        if order == "sum":
            (losses["a"] + losses["b"]).backward()
        else:
            for name in order:
                losses[name].backward()
    torch.testing.assert_close(norms.values, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.BatchNorm2d(4).eval()])
def test_norm_layers_take_an_empty_batch(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), norm)
    with gramian.per_sample_norms(model, "sum") as norms:
        squares(model, torch.randn(0, 4, 8, 8)).backward()
    assert norms.values.shape == (0,)


def changed_input(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    y = net.add(h)
    h.mul_(2)
    return y + h


def test_the_input_of_an_unknown_layer_may_be_changed_in_place() -> None:
    model = Toy(
        changed_input, first=nn.Linear(3, 3), add=Toy(lambda net, x: x + net.bias, bias=nn.Parameter(torch.randn(3)))
    ).double()
    assert_exact(model, torch.randn(4, 3, dtype=torch.float64))


def test_parameters_in_lists_and_dicts_belong_to_their_parent() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3),
        Toy(
            lambda net, x: x * net.many[0] + net.many[1].exp() * net.named["a"] * x.square(),
            many=nn.ParameterList([torch.randn(3), torch.randn(3)]),
            named=nn.ParameterDict({"a": torch.randn(3)}),
        ),
    ).double()
    assert_exact(model, torch.randn(4, 5, 3, dtype=torch.float64))


def test_running_a_layer_again_leaves_its_buffers_alone() -> None:
    def counter(net: Any, x: Tensor) -> Tensor:
        net.calls += 1
        return x * net.weight

    model = nn.Sequential(
        nn.Linear(3, 3), Toy(counter, weight=nn.Parameter(torch.randn(3)), calls=nn.Buffer(torch.zeros(())))
    )
    with gramian.per_sample_norms(model, "sum"):
        squares(model, torch.randn(4, 3)).backward()
    assert model[1].calls == 1


def test_code_that_repeats_a_row_for_all_samples_itself_is_exact() -> None:
    model = Toy(
        lambda net, x: x + net.place(torch.arange(x.shape[1])[None]).repeat(len(x), 1, 1), place=nn.Embedding(9, 3)
    )
    x = torch.randn(4, 5, 3)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        squares(model, x).backward()
    y = (x + model.place.weight[:5]).detach()
    torch.testing.assert_close(norms.values, 2 * y.flatten(1).norm(dim=1))  # Σ y² has the gradient 2 y


class Fails(torch.autograd.Function):
    """A layer whose backward breaks off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise OSError("out of something")


def test_a_backward_that_failed_half_way_spoils_the_sums_loudly() -> None:
    def breaks(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        return net.last(Fails.apply(h) if net.broken > 10 else h)

    model, fisher = Toy(breaks, first=nn.Linear(3, 3), last=nn.Linear(3, 2), broken=10), gramian.DiagonalFisher()
    with gramian.observe(model, fisher, loss_reduction="sum") as seen:
        squares(model, torch.randn(4, 3)).backward()
        model.broken = 11
        with pytest.raises(OSError, match="out of something"):
            squares(model, torch.randn(4, 3)).backward()
        model.broken = 10
        squares(model, torch.randn(4, 3)).backward()
        with refusal("failed half-way.*expected"):
            seen[fisher]
    with refusal("failed half-way"):
        seen[fisher]


def test_the_precision_of_the_users_own_products_does_not_reach_the_statistics() -> None:
    left, right = torch.randn(4, 200, 48), torch.randn(4, 200, 64)
    seen: list[str] = []

    class Peek(gramian.PerSampleNorms):
        def update(self, sums: Any, record: Any) -> None:
            seen.append(torch.get_float32_matmul_precision())
            super().update(sums, record)

    model = nn.Linear(64, 48)
    torch.set_float32_matmul_precision("medium")
    try:
        with gramian.observe(model, Peek(), audit=False):
            (model(right) * left).sum().backward()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}


def test_an_instance_whose_forward_was_replaced_is_an_unknown_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    own = type(model[0]).forward
    model[0].forward = lambda x: 2 * own(model[0], x)
    x = torch.randn(4, 3, dtype=torch.float64)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    plain.load_state_dict(model.state_dict())
    expected = sample_statistics.per_sample_norms(plain, lambda m, x: m[1](2 * m[0](x)).square().sum(), (x,))
    with gramian.per_sample_norms(model, "sum") as norms:
        squares(model, x).backward()
    torch.testing.assert_close(norms.values, expected, rtol=1e-9, atol=0)
    assert norms.coverage["0.weight"].kind == "generic"


@pytest.mark.parametrize("nonsense", [gramian.DiagonalFisher, "fisher", None])
def test_invalid_statistics_are_refused(nonsense: Any) -> None:
    with refusal("statistics.*expected"):
        gramian.observe(nn.Linear(3, 2), nonsense)


def test_the_proof_takes_norms_of_large_gradients_as_exactly_as_of_small_ones() -> None:
    """`Tensor.norm` adds up 4 M squares in float32 one after the other: models with large vocabularies were refused."""
    gradient = torch.rand(2048, 2048, generator=torch.Generator().manual_seed(0))
    assert Sketch.of(gradient).norm == pytest.approx(float(gradient.double().norm()), rel=1e-6)
