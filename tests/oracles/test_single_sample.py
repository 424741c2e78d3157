"""What the single-sample loop promises beside its numbers, and the identities that tie its results together."""

import ast
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from gramian.oracles import single_sample
from gramian.oracles.single_sample import per_sample_gradients
from tests.kit.models import CASES, Batch, Case
from tests.kit.processes import distributed
from tests.oracles.sample_statistics import dense_fisher, diagonal_fisher, noise_scale, per_sample_norms

pytestmark = pytest.mark.oracle
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def _batch(case: Case, samples: int) -> Batch:
    return case.make_batch(samples, torch.float64, torch.Generator().manual_seed(2))


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _small_problem() -> tuple[nn.Module, Batch]:
    case = CASES["mlp"]
    return case.make(torch.float64), _batch(case, 3)


def test_the_oracle_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(single_sample.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert {name.split(".")[0] for name in imported} == {"collections", "copy", "typing", "torch"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


@every_case
def test_gradients_sum_to_the_gradient_of_the_batch_whatever_the_reduction(case: Case) -> None:
    model, batch = case.make(torch.float64), _batch(case, 4)
    gradients = per_sample_gradients(model, partial(case.loss, reduction="mean"), batch)
    case.loss(model, *batch, reduction="sum").backward()
    expected = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }
    tolerance = 1e-5 if case.computes_in_float32 else 1e-10
    total = {name: gradient.sum(0) for name, gradient in gradients.items()}
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["mlp", "tied_linears", "unused"])
def test_norms_and_both_fishers_follow_from_the_gradients(name: str) -> None:
    case = CASES[name]
    model, loss, batch = case.make(torch.float64), partial(case.loss, reduction="sum"), _batch(case, 3)
    g_BP = torch.cat([g.flatten(1) for g in per_sample_gradients(model, loss, batch).values()], dim=1)
    fisher_PP = dense_fisher(model, loss, batch)
    torch.testing.assert_close(fisher_PP, sum(torch.outer(g, g) for g in g_BP))
    torch.testing.assert_close(per_sample_norms(model, loss, batch), g_BP.norm(dim=1))
    diagonal = diagonal_fisher(model, loss, batch)
    assert {n: d.shape for n, d in diagonal.items()} == {n: p.shape for n, p in model.named_parameters()}
    torch.testing.assert_close(torch.cat([d.flatten() for d in diagonal.values()]), fisher_PP.diagonal())


def test_sums_of_a_float32_model_are_float64_and_gradients_are_not() -> None:
    model, (x, y) = CASES["mlp"].make(torch.float32), CASES["mlp"].make_batch(2, torch.float32, torch.Generator())
    assert per_sample_gradients(model, _loss, (x, y))["0.weight"].dtype == torch.float32
    assert per_sample_norms(model, _loss, (x, y)).dtype == torch.float64
    assert dense_fisher(model, _loss, (x, y), ["4.bias"]).dtype == torch.float64


def test_model_gradients_buffers_mode_and_random_state_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9, affine=False), nn.Dropout(0.5), nn.Linear(9, 5)).eval()
    model[2].train()
    model[1].register_forward_hook(lambda module, inputs, output: module.num_batches_tracked.add_(1) and None)
    x, y = torch.randn(4, 7), torch.randint(5, (4,))
    _loss(model, x, y).backward()
    held = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with torch.no_grad():
        first = per_sample_norms(model, _loss, (x, y))
    assert torch.equal(random_state, torch.get_rng_state())
    assert torch.equal(first, per_sample_norms(model, _loss, (x, y)))
    assert [module.training for module in model.modules()] == [False, False, False, True, False]
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    for name, p in model.named_parameters():
        assert p.grad is held[name][0]
        assert torch.equal(p.grad, held[name][1])


def test_a_tied_parameter_has_its_first_name_and_an_unused_one_gradient_zero() -> None:
    for name, absent in {"tied_gpt": "head.weight", "tied_linears": "right.weight", "lora": "0.base.weight"}.items():
        case = CASES[name]
        assert absent not in per_sample_gradients(
            case.make(torch.float64), partial(case.loss, reduction="sum"), _batch(case, 1)
        )
    case = CASES["unused"]
    gradients = per_sample_gradients(case.make(torch.float64), partial(case.loss, reduction="sum"), _batch(case, 2))
    assert torch.equal(gradients["spare.weight"], torch.zeros(2, 11, 9, dtype=torch.float64))


def test_a_loss_that_reaches_no_parameter_has_gradient_zero() -> None:
    model, batch = _small_problem()
    assert torch.equal(per_sample_norms(model, lambda model, x, y: x.sum(), batch), torch.zeros(3, dtype=torch.float64))


def test_params_select_and_order() -> None:
    model, batch = _small_problem()
    gradients = per_sample_gradients(model, _loss, batch, ["4.bias", "0.weight"])
    assert [(name, *g.shape) for name, g in gradients.items()] == [("4.bias", 3, 5), ("0.weight", 3, 9, 7)]
    fisher_PP = dense_fisher(model, _loss, batch, ["4.bias", "0.weight"])
    torch.testing.assert_close(fisher_PP[:5, :5], gradients["4.bias"].T @ gradients["4.bias"])
    assert fisher_PP.shape == (68, 68)
    with pytest.raises(ValueError, match=r"params names \['4.scale'\]; the trainable parameters are \['0.weight', "):
        per_sample_gradients(model, _loss, batch, ["0.weight", "4.scale"])


def test_an_empty_batch_has_results_of_no_samples() -> None:
    model, (x, y) = _small_problem()
    empty = (x[:0], y[:0])
    assert per_sample_gradients(model, _loss, empty)["0.weight"].shape == (0, 9, 7)
    assert per_sample_norms(model, _loss, empty).shape == (0,)
    assert not any(d.any() for d in diagonal_fisher(model, _loss, empty).values())
    assert not dense_fisher(model, _loss, empty, ["4.bias"]).any()


def test_a_batch_may_be_nested_and_hold_what_is_no_tensor() -> None:
    model, (x, y) = _small_problem()

    def loss(model: nn.Module, inputs: dict[str, Tensor], rest: list[object], scale: Tensor) -> Tensor:
        return scale * F.cross_entropy(model(inputs["x"]), rest[0], reduction=rest[1])

    nested = per_sample_norms(model, loss, ({"x": x}, [y, "sum"], torch.tensor(2.0)))
    torch.testing.assert_close(nested, 2 * per_sample_norms(model, _loss, (x, y)))


def test_tensors_of_different_length_are_refused() -> None:
    model, (x, y) = _small_problem()
    with pytest.raises(ValueError, match=r"have \[3, 2\] rows on dim 0"):
        per_sample_norms(model, _loss, (x, y[:2]))


def test_names_are_the_users_under_compile_and_checkpoint_wrappers() -> None:
    model, batch = _small_problem()
    expected = per_sample_gradients(model, _loss, batch)
    model[2] = checkpoint_wrapper(model[2])
    wrapped = torch.compile(model, backend="eager")
    torch.testing.assert_close(per_sample_gradients(wrapped, _loss, batch), expected)


def test_a_submodule_that_the_user_called_module_keeps_its_name() -> None:
    model, batch = _small_problem()
    owner = nn.Sequential()
    owner.add_module("module", model)
    assert "module.0.weight" in per_sample_gradients(owner, _loss, batch)


@distributed(world_size=1)
def test_names_are_the_users_under_ddp(rank: int, world_size: int) -> None:
    model, batch = _small_problem()
    expected = per_sample_gradients(model, _loss, batch)
    torch.testing.assert_close(per_sample_gradients(DistributedDataParallel(model), _loss, batch), expected)


def test_noise_scale_of_two_samples_by_hand() -> None:
    # Mean (1, 2), deviations ±(1, 0): trace of the covariance 2, squared norm 5 - 2/2.
    scale = noise_scale({"a": torch.tensor([[0.0], [2.0]]), "b": torch.tensor([[2.0], [2.0]])})
    assert scale == (0.5, 2.0, 4.0)
    with pytest.raises(ValueError, match="at least 2"):
        noise_scale({"a": torch.ones(1, 3)})


def test_both_parts_of_the_noise_scale_are_unbiased() -> None:
    # The mean over all draws of 3 from a population of 4 is the expectation itself.
    population = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = [noise_scale({"g": population[list(draw)]}) for draw in itertools.product(range(4), repeat=3)]
    mean = population.mean(0)
    trace_covariance = (population - mean).square().sum().item() / 4
    assert sum(d.trace_covariance for d in draws) / len(draws) == pytest.approx(trace_covariance, rel=1e-12)
    assert sum(d.squared_gradient for d in draws) / len(draws) == pytest.approx(mean.square().sum().item(), rel=1e-12)
