"""Both sides of every difference on the page for users of Opacus: equal losses without noise, and equal ε."""

import copy
import re
import warnings
import zlib
from pathlib import Path
from typing import Any

import opacus
import opacus.layers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from tests.kit.refusals import refusal

PAGE = Path(__file__).parents[2] / "docs/how-to/from_opacus.md"
SCRIPTS = re.findall(r"^## (.*?)\n.*?^```diff\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
pytestmark = [pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore")]


def side(difference: str, sign: str) -> str:
    """The script before ("-") or after ("+") the change."""
    return "\n".join(line[1:] for line in difference.splitlines() if line[:1] in (" ", "", sign))


def load_pretrained(model: nn.Module) -> None:
    """Weights that follow from their names alone; Opacus' LSTM has other names for the same ones."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            name = re.sub(r"l0\.(ih|hh)\.(weight|bias)", r"\2_\1_l0", name)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)


def records(kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(4, (40,), generator=generator)
    if kind == "images":
        return TensorDataset(torch.randn(40, 1, 8, 8, generator=generator), y)
    return TensorDataset(torch.randint(20, (40, 7), generator=generator), y)


def run(script: str, **private: Any) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "F": F, "DataLoader": DataLoader, "gramian": gramian, "opacus": opacus,
        "load_pretrained": load_pretrained, "records": records, "private": private, "losses": [], "__name__": "script",
        "LoraConfig": LoraConfig, "get_peft_model": get_peft_model, "GPT2Config": GPT2Config,
        "GPT2LMHeadModel": GPT2LMHeadModel,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(script, "script", "exec"), names)
    return names


def test_the_page_has_its_three_scripts() -> None:
    assert [name for name, _ in SCRIPTS] == ["A convolutional network", "A recurrent network", "LoRA on GPT-2"]
    for _, difference in SCRIPTS:
        assert sum(line.startswith("+") for line in difference.splitlines()) <= 2


@pytest.mark.oracle
@pytest.mark.parametrize("name, difference", SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_losses_without_noise_and_epsilon_are_those_of_opacus(name: str, difference: str) -> None:
    before, after = side(difference, "-"), side(difference, "+")
    theirs = run(before, noise_multiplier=0.0, poisson_sampling=False)
    ours = run(after, noise_multiplier=0.0, poisson_sampling=False)
    assert len(ours["losses"]) == 5 and max(ours["losses"]) - min(ours["losses"]) > 1e-3  # it moves
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(theirs["losses"]), rtol=2e-4, atol=0)
    theirs = run(before, noise_multiplier=1.0, poisson_sampling=False)
    ours = run(after, noise_multiplier=1.0, poisson_sampling=False)
    assert abs(ours["epsilon"] - theirs["epsilon"]) < 1e-4 * theirs["epsilon"]
    assert list(ours["engine"].accountant.history) == [(1.0, 0.2, 5)]


# ---- names of Opacus ------------------------------------------------------------------------------------------------------


def made(**options: Any) -> tuple[gramian.PrivacyEngine, nn.Module, Any, Any]:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(40, 5), torch.randint(3, (40,)))
    engine = gramian.PrivacyEngine("rdp")
    usual = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=8), **{**usual, **options}
    )
    return engine, model, optimizer, loader


def step(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        break


def test_the_account_can_be_read_under_the_name_of_opacus() -> None:
    engine, model, optimizer, loader = made()
    step(model, optimizer, loader)
    account = engine.accountant
    assert (len(account), account.mechanism(), account.history) == (1, "rdp", ((1.0, 0.2, 1),))
    assert account.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    with refusal("accountant: is read only; expected optimizer.step"):
        account.step(noise_multiplier=1.0, sample_rate=0.1)


def test_the_optimizers_noise_multiplier_is_read_and_a_write_is_refused() -> None:
    engine, model, optimizer, loader = made()
    assert optimizer.noise_multiplier == 1.0
    optimizer.noise_multiplier = 2.0
    with refusal("noise_multiplier: was set on the optimizer"):
        step(model, optimizer, loader)
    assert engine.steps == 0  # nothing was released
    engine.detach()
    assert not hasattr(optimizer, "noise_multiplier")
    copy.deepcopy(optimizer)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_what_is_compatible_is_said_without_installing_anything() -> None:
    engine, linear = gramian.PrivacyEngine(), nn.Linear(5, 3)
    loader = DataLoader(TensorDataset(torch.randn(8, 5)), batch_size=4)
    fits = torch.optim.SGD(linear.parameters(), lr=0.1)
    assert engine.is_compatible(module=linear) and engine.is_compatible(
        module=linear, optimizer=fits, data_loader=loader
    )
    assert "forward" not in vars(linear) and not fits._optimizer_step_pre_hooks
    assert not engine.is_compatible(module=_Mixed())
    assert not engine.is_compatible(module=linear, optimizer=torch.optim.LBFGS(linear.parameters()))
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)
    assert not engine.is_compatible(module=linear, data_loader=DataLoader(loader.dataset, 4, sampler=weighted))


@pytest.mark.parametrize("name", ["validate", "get_compatible_module", "save_checkpoint", "load_checkpoint"])
def test_methods_of_opacus_that_are_not_here_name_their_counterpart(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no {name}; expected"):
        getattr(gramian.PrivacyEngine(), name)
    with pytest.raises(AttributeError, match="has no something$"):
        gramian.PrivacyEngine().something  # noqa: B018
    assert not hasattr(gramian.PrivacyEngine(), "something")
