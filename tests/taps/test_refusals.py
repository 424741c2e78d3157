"""What is refused, each with one line that names the field or module and says what would be accepted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.taps import Withheld, hub_of
from tests.kit import refusals
from tests.kit.models import CASES
from tests.kit.toys import Toy
from tests.oracles import sample_statistics
from tests.taps.checks import problem


def refused(*words: str) -> Any:
    """A `GramianError` of one line that begins with the first word, has the others and says what is expected."""
    return refusals.refused(*words, "expected")


def _mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(6, 5)


# ---- arguments ------------------------------------------------------------------------------------------------------

NONSENSE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "loss_reduction avg": ({"loss_reduction": "avg"}, ("loss_reduction", '"mean"', '"sum"', "avg")),
    "loss_reduction zero": ({"loss_reduction": 0.0}, ("loss_reduction",)),
    "loss_reduction none": ({"loss_reduction": None}, ("loss_reduction", "None")),
    "loss_reduction nan": ({"loss_reduction": float("nan")}, ("loss_reduction", "nan")),
    "algorithm foo": ({"algorithm": "foo"}, ("algorithm", "auto", "direct", "gram", "foo")),
    "batch_size negative": ({"batch_size": -1}, ("batch_size", "-1")),
    "batch_size float": ({"batch_size": 2.5}, ("batch_size", "2.5")),
    "loss_scale zero": ({"loss_scale": 0.0}, ("loss_scale", "0")),
    "loss_scale negative": ({"loss_scale": -2}, ("loss_scale", "-2")),
    "loss_scale a word": ({"loss_scale": "dynamic"}, ("loss_scale", "dynamic")),
    "sample_ids a list": ({"sample_ids": [0, 1]}, ("sample_ids", "list")),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_arguments_are_refused_before_the_model_is_touched(name: str) -> None:
    options, words = NONSENSE[name]
    model, _ = _mlp()
    with refused(*words):
        gramian.per_sample_norms(model, **options)
    assert "forward" not in model[0].__dict__


def test_an_unknown_per_of_the_fisher_is_refused() -> None:
    with refused("per", '"sample"', '"token"', "batch"):
        gramian.DiagonalFisher(per="batch")  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [None, "gpt2", [nn.Linear(2, 2)], nn.Linear(2, 2).parameters()], ids=type)
def test_a_model_that_is_not_a_module_is_refused(model: Any) -> None:
    with refused("model", type(model).__name__):
        gramian.per_sample_norms(model)


def test_no_statistics_are_refused() -> None:
    with refused("statistics"):
        gramian.observe(_mlp()[0])


@pytest.mark.parametrize(
    "make",
    [nn.ReLU, lambda: nn.Linear(2, 2).requires_grad_(False), lambda: nn.Sequential(nn.Flatten(), nn.Tanh())],
    ids=["no parameter", "all frozen", "nothing inside"],
)
def test_a_model_with_nothing_to_train_is_refused_and_left_alone(make: Callable[[], nn.Module]) -> None:
    model = make()
    with refused("model", "requires_grad=True"), gramian.per_sample_norms(model):
        pass
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_a_lazy_layer_without_weights_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with refused("0", "LazyLinear"), gramian.per_sample_norms(model):
        model(torch.randn(3, 5)).sum().backward()


# ---- life of a capture ----------------------------------------------------------------------------------------------


def test_a_capture_entered_twice_is_refused_also_while_it_is_open() -> None:
    model, x = _mlp()
    norms = gramian.per_sample_norms(model)
    with norms:
        model(x).sum().backward()
        with refused("capture", "before"), norms:
            pass
        assert len(norms.values) == 6
    with refused("capture", "before"), norms:
        pass
    assert "forward" not in model[0].__dict__


def test_a_capture_left_without_a_backward_is_refused() -> None:
    model, x = _mlp()
    with refused("capture", "backward"), gramian.per_sample_norms(model):
        model(x)
    assert "forward" not in model[0].__dict__


def test_values_before_the_first_backward_are_refused() -> None:
    model, x = _mlp()
    norms = gramian.per_sample_norms(model)
    with refused("norms", "backward"):
        norms.values  # noqa: B018
    with norms:
        loss = model(x).sum()
        with refused("norms", "backward"):
            norms.values  # noqa: B018
        loss.backward()


def test_a_statistic_that_is_not_part_of_the_capture_is_refused() -> None:
    model, x = _mlp()
    with gramian.observe(model, gramian.Health()) as seen:
        model(x).sum().backward()
    with refused("statistic", "NoiseScale"):
        seen[gramian.NoiseScale()]


def test_a_second_rule_is_refused() -> None:
    hub = hub_of(_mlp()[0])
    with hub.governed_by(Withheld()), refused("rule", "Withheld"), hub.governed_by(Withheld()):
        pass
    with hub.governed_by(Withheld()):
        pass


def test_a_part_of_a_captured_model_as_a_second_root_is_refused_by_name() -> None:
    model, x = _mlp()
    with gramian.per_sample_norms(model):
        with refused("model", "another root"), gramian.per_sample_norms(model[0]):
            pass
        model(x).sum().backward()
    assert "forward" not in model[0].__dict__
    with gramian.per_sample_norms(model[0]):
        with refused("0", "another root"), gramian.per_sample_norms(model):
            pass
        model[0](x).sum().backward()
    assert all("forward" not in m.__dict__ for m in model.modules())


# ---- backward -------------------------------------------------------------------------------------------------------


def test_create_graph_is_refused() -> None:
    model, x = _mlp()
    with refused("backward", "create_graph=True"), gramian.per_sample_norms(model):
        model(x).sum().backward(create_graph=True)


def test_a_gradient_penalty_through_the_model_is_refused() -> None:
    model, x = _mlp()
    x.requires_grad_()
    with refused("backward", "create_graph=True"), gramian.per_sample_norms(model):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()


@pytest.mark.parametrize("name", ["mlp", "mha", "tied_gpt"])
def test_a_second_backward_through_one_forward_is_refused(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    with refused("backward", "twice"), gramian.per_sample_norms(model):
        value = loss(model, *batch, reduction="mean")
        value.backward(retain_graph=True)
        value.backward()


def test_two_losses_of_one_forward_backwarded_apart_are_refused() -> None:
    def two_heads(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.trunk(x)
        return net.left(h), net.right(h)

    model = Toy(two_heads, trunk=nn.Linear(5, 4), left=nn.Linear(4, 3), right=nn.Linear(4, 2))
    with refused("backward", "twice"), gramian.per_sample_norms(model):
        left, right = model(torch.randn(3, 5))
        left.sum().backward(retain_graph=True)
        right.sum().backward()


def checkpointed(inner: nn.Module, use_reentrant: bool) -> Toy:
    return Toy(
        lambda net, x: net.last(checkpoint(net.inner, net.first(x), use_reentrant=net.use_reentrant)),
        first=nn.Linear(5, 5),
        inner=inner,
        last=nn.Linear(5, 3),
        use_reentrant=use_reentrant,
    )


@pytest.mark.parametrize(
    "inner",
    [lambda: nn.Linear(5, 5), lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), lambda: nn.PReLU(5)],
    ids=["linear", "two linears", "generic"],
)
def test_reentrant_checkpointing_is_refused(inner: Callable[[], nn.Module]) -> None:
    model = checkpointed(inner(), use_reentrant=True)
    with refused("", "use_reentrant=False"), gramian.per_sample_norms(model):
        model(torch.randn(4, 5)).sum().backward()


def test_a_backward_of_the_same_model_inside_a_backward_is_refused() -> None:
    model, x = _mlp()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            with torch.enable_grad():
                model(x).sum().backward()
            return g

    with refused("", "nested backward"), gramian.per_sample_norms(model):
        model(Nested.apply(model(x)[:, :1].expand(-1, 5))).sum().backward()


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_norm_in_training_mode_is_refused_by_name_for_per_sample_work_only(dims: int) -> None:
    layer = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    model = nn.Sequential(nn.Tanh(), layer(4))
    x = torch.randn(3, 4, *(2,) * dims)
    with refused(f"1 (BatchNorm{dims}d)", "GroupNorm", "eval()"), gramian.per_sample_norms(model):
        model(x).square().sum().backward()
    health = gramian.Health()
    with gramian.observe(model, health) as seen:
        model(x).square().sum().backward()
    assert seen[health]["1"].nonfinite == 0


def test_batch_norm_without_running_statistics_is_refused_in_eval_mode_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with refused("0 (BatchNorm1d)"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4)).square().sum().backward()


@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_that_is_not_trained_is_refused_in_training_mode_too(affine: bool) -> None:
    """Without trainable parameters of its own it still mixes the samples of the layers around it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine).requires_grad_(False), nn.Linear(4, 2))
    with refused("1 (BatchNorm1d)"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4)).square().sum().backward()


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=lambda o: next(iter(o))
)
def test_embedding_options_are_refused_by_name(option: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(7, 4, **option), nn.Linear(4, 3))
    name, value = next(iter(option.items()))
    with refused("0 (Embedding)", name), gramian.per_sample_norms(model):
        pass
    model[0].requires_grad_(False)
    if name != "max_norm":  # which changes the weight even where it is frozen
        with gramian.per_sample_norms(model) as norms:
            model(torch.randint(7, (3, 5))).square().sum().backward()
        assert norms.coverage["0.weight"].status == "frozen", value


@pytest.mark.parametrize("layer", [nn.LSTM(5, 4), nn.GRU(5, 4), nn.MultiheadAttention(6, 2)], ids=type)
def test_models_with_the_batch_on_axis_one_are_refused_by_name(layer: nn.Module) -> None:
    with refused(f"model ({type(layer).__name__})", "batch_first=True"), gramian.per_sample_norms(layer):
        pass


class UsedOutside(nn.Module):
    """A head that reads the embedding's weight past its module."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.emb, self.mix, self.use = nn.Embedding(7, 4), nn.Linear(4, 4), use

    def forward(self, ids: Tensor) -> Tensor:
        h = self.mix(self.emb(ids))
        if self.use == "linear":
            return F.linear(h, self.emb.weight)
        if self.use == "matmul":
            return h @ self.mix.weight
        return h + 0.1 * self.mix.bias


@pytest.mark.usefixtures("root_not_taken")
@pytest.mark.parametrize("use, name", [("linear", "emb.weight"), ("matmul", "mix.weight"), ("bias", "mix.bias")])
def test_a_weight_used_outside_its_layer_is_noticed_and_named(use: str, name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(10)
        model = UsedOutside(use).to(dtype)
        with refused(name, "own module"), gramian.per_sample_norms(model):
            model(torch.randint(7, (4, 5))).square().sum().backward()


@pytest.mark.usefixtures("root_not_taken")
def test_a_weight_used_only_outside_its_layer_is_noticed_and_named() -> None:
    model = Toy(
        lambda net, x: net.used(F.linear(x, net.spare.weight, net.spare.bias)),
        spare=nn.Linear(5, 4),
        used=nn.Linear(4, 3),
    )
    with refused("spare.weight", "own module"), gramian.per_sample_norms(model):
        model(torch.randn(4, 5)).square().sum().backward()


def test_a_weight_penalty_in_the_loss_is_noticed_and_named() -> None:
    model, x = _mlp()
    with refused("0.weight", "own module"), gramian.per_sample_norms(model):
        (model(x).square().sum() + 0.1 * model[0].weight.square().sum()).backward()


def noisy() -> Toy:
    """A raw parameter beside noise."""
    return Toy(
        lambda net, x: (net.linear(x) + torch.rand(40)) * net.gain,
        linear=nn.Linear(5, 40),
        gain=nn.Parameter(torch.rand(40)),
    )


def centred() -> Toy:
    """A raw parameter on a layer that mixes samples."""
    return Toy(lambda net, x: (x - x.mean(0)) * net.gain, gain=nn.Parameter(torch.rand(5)))


@pytest.mark.parametrize("layer", [noisy, centred])
def test_a_generic_layer_that_is_random_or_mixes_samples_is_refused_by_name(layer: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Tanh(), layer())
    with refused("1 (Toy)", "register_site"), gramian.per_sample_norms(model):
        model(torch.randn(4, 5)).square().sum().backward()


# ---- batch axis -----------------------------------------------------------------------------------------------------


def rows_net(rows: int) -> Toy:
    """A layer that sees other rows than the batch."""
    return Toy(
        lambda net, x: net.head(x) + net.mix(x[: net.rows]).sum(), rows=rows, mix=nn.Linear(5, 5), head=nn.Linear(5, 3)
    )


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_rows_that_are_not_a_multiple_of_the_batch_are_refused_by_name(rows: int) -> None:
    model = rows_net(rows)
    with refused("mix (Linear)", f"{rows} rows", "batch of 6"), gramian.per_sample_norms(model):
        model(torch.randn(6, 5)).square().sum().backward()


def test_tokens_first_without_a_proof_is_refused_by_name() -> None:
    model = Toy(lambda net, x_BTD: net.mix(x_BTD.transpose(0, 1)).transpose(0, 1), mix=nn.Linear(5, 3))
    with refused("mix (Linear)", "7 rows", "batch of 3"), gramian.per_sample_norms(model, proof="off"):
        model(torch.randn(3, 7, 5)).square().sum().backward()


class Positions(nn.Module):
    def __init__(self, shape: str, tokens: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(7, 4), nn.Embedding(tokens, 4), nn.Linear(4, 3)
        self.shape = shape

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions = torch.arange(ids_BT.shape[1])
        return self.head(self.tokens(ids_BT) + self.positions(positions[None] if self.shape == "[1, T]" else positions))


@pytest.mark.parametrize("shape", ["[T]", "[1, T]"])
@pytest.mark.parametrize("tokens", [5, 4, 8, 2])
def test_position_ids_without_a_batch_axis_are_exact_whatever_their_length(tokens: int, shape: str) -> None:
    model, ids = Positions(shape, tokens).double(), torch.randint(7, (4, tokens))
    _assert_squares(model, ids)


@pytest.mark.parametrize("tokens", [5, 4, 8, 2])
def test_a_linear_on_a_table_without_a_batch_axis_is_exact(tokens: int) -> None:
    model = Toy(
        lambda net, x_BTD: net.head(x_BTD + net.mix(net.table)),
        table=torch.randn(tokens, 4, dtype=torch.float64),
        mix=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    ).double()
    _assert_squares(model, torch.randn(4, tokens, 4, dtype=torch.float64))


def _assert_squares(model: nn.Module, x: Tensor) -> None:
    """Norms of the gradients of the sum of squares are those of the loop of single samples."""
    want = sample_statistics.per_sample_norms(model, lambda net, one: net(one).square().sum(), (x,))
    with gramian.per_sample_norms(model, "sum") as norms:
        model(x).square().sum().backward()
    torch.testing.assert_close(norms.values, want, rtol=1e-9, atol=0)


def test_arguments_without_axes_are_not_a_batch() -> None:
    model = Toy(lambda net, scale, x=None: scale * net.mix(torch.ones(4, 5) if x is None else x), mix=nn.Linear(5, 3))
    with refused("model", "batch_size="), gramian.per_sample_norms(model):
        model(torch.tensor(2.0)).sum().backward()
    with gramian.per_sample_norms(model) as norms:
        model(torch.tensor(2.0), torch.randn(4, 5)).sum().backward()
    assert norms.values.shape == (4,)


def test_a_model_called_without_any_tensor_is_refused() -> None:
    model = Toy(lambda net, rows: net.mix(torch.ones(rows, 5)), mix=nn.Linear(5, 3))
    with refused("forward", "tensor"), gramian.per_sample_norms(model):
        model(3).sum().backward()


def test_layers_called_outside_a_forward_are_refused_unless_the_batch_size_is_given_and_nothing_is_proven() -> None:
    model, x = _mlp()
    for options in ({}, {"proof": "off"}, {"batch_size": 6}):
        with refused("0", "batch_size="), gramian.per_sample_norms(model, **options):  # type: ignore[arg-type]
            model[2](model[1](model[0](x))).sum().backward()
    with gramian.per_sample_norms(model, batch_size=6, proof="off") as norms:
        model[2](model[1](model[0](x))).sum().backward()
    assert norms.values.shape == (6,)


IDS: dict[str, tuple[Tensor, tuple[str, ...]]] = {
    "too few": (torch.zeros(5, dtype=torch.long), ("sample_ids", "[6]", "[5]")),
    "three axes": (torch.zeros(6, 1, 1, dtype=torch.long), ("sample_ids", "[6]", "[6, 1, 1]")),
    "no axes": (torch.tensor(0), ("sample_ids",)),
    "floats": (torch.zeros(6), ("sample_ids", "float32")),
    "booleans": (torch.zeros(6, dtype=torch.bool), ("sample_ids", "bool")),
    "negative": (torch.tensor([0, 1, 2, -1, 0, 0]), ("sample_ids", "-1")),
}


@pytest.mark.parametrize("name", IDS)
def test_sample_ids_of_another_shape_or_dtype_are_refused(name: str) -> None:
    ids, words = IDS[name]
    model, x = _mlp()
    with refused(*words), gramian.per_sample_norms(model, sample_ids=ids):
        model(x).sum().backward()
    assert "forward" not in model[0].__dict__


def test_sample_ids_per_token_that_do_not_fit_a_layer_are_refused() -> None:
    model, _ = _mlp()
    ids = torch.zeros(2, 3, dtype=torch.long)
    with refused("sample_ids", "4 tokens"), gramian.per_sample_norms(model, sample_ids=ids):
        model(torch.randn(2, 4, 5)).sum().backward()


@pytest.mark.parametrize(
    "layer, shape",
    [(nn.Linear(5, 3), (5,)), (nn.Linear(5, 5), (5,)), (nn.Conv1d(4, 3, 2), (4, 5)), (nn.Conv2d(4, 3, 2), (4, 5, 5))],
)
def test_unbatched_inputs_are_refused_by_name(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(layer)
    with refused(f"0 ({type(layer).__name__})"), gramian.per_sample_norms(model):
        model(torch.randn(shape)).sum().backward()


def test_a_batch_inside_a_dict_is_found_and_one_without_tensors_needs_batch_size() -> None:
    class Holder:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __getitem__(self, name: str) -> Tensor:
            return self.x

    model, batch = Toy(lambda net, batch: net.head(batch["x"]), head=nn.Linear(5, 3)), {"x": torch.randn(4, 5)}
    with gramian.per_sample_norms(model) as norms:
        model(batch).sum().backward()
    assert norms.values.shape == (4,)
    with refused("forward", "batch_size="), gramian.per_sample_norms(model):
        model(Holder(batch["x"])).sum().backward()
    with refused("model", "no argument has the batch of 4"), gramian.per_sample_norms(model, batch_size=4):
        model(Holder(batch["x"])).sum().backward()
    with gramian.per_sample_norms(model, batch_size=4, proof="off") as norms:
        model(Holder(batch["x"])).sum().backward()
    assert norms.values.shape == (4,)


def test_a_packed_sequence_is_refused_by_name() -> None:
    model = Toy(
        lambda net, x: net.layer(nn.utils.rnn.pack_padded_sequence(x, [4, 3, 2], batch_first=True))[0].data,
        layer=nn.LSTM(5, 4, batch_first=True),
    )
    with refused("layer (LSTM)"), gramian.per_sample_norms(model):
        model(torch.randn(3, 4, 5)).sum().backward()


def test_an_embedding_bag_with_offsets_is_refused_by_name() -> None:
    model = Toy(lambda net, ids, offsets: net.bag(ids, offsets), bag=nn.EmbeddingBag(7, 4))
    with refused("bag (EmbeddingBag)", "register_site"), gramian.per_sample_norms(model, batch_size=3):
        model(torch.randint(7, (8,)), torch.tensor([0, 3, 5])).sum().backward()


# ---- wrappers -------------------------------------------------------------------------------------------------------


def test_data_parallel_is_refused() -> None:
    model, _ = _mlp()
    with refused("model", "DataParallel", "DistributedDataParallel"):
        gramian.per_sample_norms(nn.DataParallel(model))


def test_fsdp1_is_refused_also_inside_the_model() -> None:
    class FullyShardedDataParallel(Toy):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(lambda net, x: net._fsdp_wrapped_module(x), _fsdp_wrapped_module=module)

    with refused("model", "FSDP1", "fully_shard"):
        gramian.per_sample_norms(FullyShardedDataParallel(nn.Linear(5, 4)))
    inside = nn.Sequential(FullyShardedDataParallel(nn.Linear(5, 4)), nn.Linear(4, 3))
    with refused("model", "FSDP1", "fully_shard"), gramian.per_sample_norms(inside):
        inside(torch.randn(3, 5)).sum().backward()


def _swin() -> tuple[nn.Module, Tensor]:
    config = transformers.SwinConfig(
        image_size=8, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=2, num_labels=3
    )
    return transformers.SwinForImageClassification(config), torch.randn(4, 3, 8, 8)


def _deberta() -> tuple[nn.Module, Tensor]:
    config = transformers.DebertaV2Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], num_labels=3,
    )  # fmt: skip
    return transformers.DebertaV2ForSequenceClassification(config), torch.randint(3, 60, (4, 9))


@pytest.mark.parametrize("model_and_batch", [_swin, _deberta])
def test_relative_positions_of_real_models_are_exact_or_refused_by_the_layers_name(model_and_batch: Any) -> None:
    model, x = model_and_batch()
    model = model.eval()
    expected = model(x).logits.pow(2).sum()
    names = [name for name, _ in model.named_modules() if name]
    try:
        with gramian.per_sample_norms(model, "sum") as norms:
            loss = model(x).logits.pow(2).sum()
            loss.backward()
    except gramian.GramianError as error:
        assert any(str(error).startswith(name) for name in names) and "\n" not in str(error)
        assert torch.equal(model(x).logits.pow(2).sum(), expected)
    else:
        assert torch.equal(loss, expected)
        for i, norm in enumerate(norms.values):
            model.zero_grad()
            model(x[i : i + 1]).logits.pow(2).sum().backward()
            own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
            torch.testing.assert_close(norm, own, rtol=1e-4, atol=1e-6)
