"""Curvature and norms in the steps of Hugging Face's Trainer: they look and change nothing, and what is logged is right."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import gramian
from gramian.oracles.single_sample import per_sample_gradients
from tests.integrations.trainers import arguments, gpt2, records, stacked, summed_loss, trainer
from tests.kit.refusals import refusal
from tests.privacy.problems import weights

pytestmark = [pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore")]


def plain(folder: Path, model: Any = None, **options: Any) -> Any:
    from transformers import Trainer

    model = gpt2() if model is None else model
    rate = {"learning_rate": 0.1, "max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}
    return Trainer(model=model, args=arguments(folder, **{**rate, **options}), train_dataset=records())


def test_callbacks_change_no_step_and_leave_trainers_own_line(tmp_path: Path) -> None:
    from gramian.integrations.transformers import CurvatureCallback, NormsCallback

    without, with_both = plain(tmp_path, max_steps=4), plain(tmp_path, max_steps=4)
    kfac = gramian.KFACNaturalGradient(update_freq=2)
    with_both.add_callback(CurvatureCallback(with_both, kfac))
    with_both.add_callback(NormsCallback(with_both))
    without.train()
    with_both.train()
    assert all(torch.equal(now, weights(without.model)[name]) for name, now in weights(with_both.model).items())
    assert (kfac.steps, kfac.refreshes) == (4, 2)
    history = with_both.state.log_history
    assert [line["step"] for line in history if "curvature/trace" in line] == [1, 3]
    assert [line["loss"] for line in history if "loss" in line] == [
        line["loss"] for line in without.state.log_history if "loss" in line
    ]
    assert not with_both.model._forward_pre_hooks and "forward" not in vars(with_both.model)


@pytest.mark.oracle
@pytest.mark.parametrize("size, shares", [(8, 1), (4, 2), (5, 2)])
def test_logged_norms_are_those_of_the_loop(tmp_path: Path, size: int, shares: int) -> None:
    from gramian.integrations.transformers import NormsCallback

    model = gpt2()
    start = copy.deepcopy(model).double()
    made = plain(tmp_path, model, max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=shares)
    made.train_dataset = records()[:8]  # micro-batches of 5 and 3, where 5 are asked for
    made.add_callback(NormsCallback(made))
    made.train()
    ids, labels = stacked(records(), range(8))
    gradients = per_sample_gradients(start, summed_loss, (ids, labels))
    counted = made._get_num_items_in_batch([{"labels": labels}], "cpu")
    norms = torch.cat([g.flatten(1) for g in gradients.values()], 1).norm(dim=1) * 8 / int(counted)
    line = next(line for line in made.state.log_history if "gradient_norms/mean" in line)
    found = [line[f"gradient_norms/{name}"] for name in ("mean", "median", "max")]
    want = [float(norms.mean()), float(norms.median()), float(norms.max())]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-4, atol=0)


def test_a_preconditioned_optimizer_in_trainer_is_the_loop_by_hand(tmp_path: Path) -> None:
    from transformers import Trainer

    from gramian.integrations.transformers import CurvatureCallback

    def parts() -> tuple[Any, Any, Any]:
        model, kfac = gpt2(), gramian.KFACNaturalGradient(damping=1e-2, update_freq=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, kfac, gramian.precondition(optimizer, model, kfac)

    model, kfac, optimizer = parts()
    options = arguments(tmp_path, max_grad_norm=0.0, train_sampling_strategy="sequential")
    made = Trainer(model=model, args=options, train_dataset=records(), optimizers=(optimizer, None))
    made.add_callback(CurvatureCallback(made, kfac))
    made.train()
    other, kfac, optimizer = parts()
    for at in (0, 4):
        ids, labels = stacked(records(), range(at, at + 4))
        counted = int(made._get_num_items_in_batch([{"labels": labels}], "cpu"))
        (summed_loss(other, ids, labels) / counted).backward()
        kfac.collect_kfac_factors(other, {"input_ids": ids, "labels": labels})
        optimizer.step()
        optimizer.zero_grad()
    for name, now in weights(model).items():
        torch.testing.assert_close(now, weights(other)[name], rtol=1e-4, atol=1e-6)


def test_curvature_of_private_records_is_refused(tmp_path: Path) -> None:
    from gramian.integrations.transformers import CurvatureCallback, NormsCallback

    with refusal("trainer: is private, and factors of its records would have no noise"):
        CurvatureCallback(trainer(tmp_path))
    with refusal("every: expected a number of steps"):
        NormsCallback(plain(tmp_path), every=0)
