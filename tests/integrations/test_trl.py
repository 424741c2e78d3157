"""TRL's SFTTrainer with LoRA becomes private by the difference on the page."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.test_from_opacus import side
from tests.integrations.trainers import gpt2
from tests.privacy.problems import weights

pytest.importorskip("trl", reason="needs trl and datasets: pip install 'gramian[test-integrations]'")
PAGE = Path(__file__).parents[2] / "docs/how-to/trainer.md"
pytestmark = [pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore")]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *"abcdefghijk"])}
    made = Tokenizer(WordLevel(words, unk_token="a"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def run(sign: str, folder: Path) -> Any:
    (difference,) = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert sum(line.startswith("+") for line in difference.splitlines()) == 3
    torch.manual_seed(0)
    texts = ["a b c d", "e f", "g h i", "j k a", "b c", "d e f g", "h i j", "k a b"] * 3
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    names: dict[str, Any] = {
        "model": gpt2(), "documents": [{"text": text} for text in texts], "tokenizer": tokenizer(),
        "folder": str(folder), "quiet": {**quiet, "bf16": False, "gradient_checkpointing": False},
    }  # fmt: skip
    exec(compile(side(difference, sign), "script", "exec"), names)
    return names["trainer"]


def test_the_difference_makes_it_private(tmp_path: Path) -> None:
    public, private = run("-", tmp_path / "public"), run("+", tmp_path / "private")
    assert private.engine.steps == 2 and private.epsilon() == private.engine.get_epsilon(1e-3) > 0
    assert list(weights(public.model)) == list(weights(private.model))  # adapters alone
    line = next(line for line in private.state.log_history if "loss" in line)
    assert {"loss", "mean_token_accuracy", "num_tokens", "entropy"} <= set(line["not_covered_by_epsilon"])
    assert "epsilon" in line and "grad_norm" not in line["not_covered_by_epsilon"]
