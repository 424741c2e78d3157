"""Tiny models, data and trainers that the tests of Hugging Face's Trainer share."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, RECORDS = 13, 6, 24
IGNORED = -100


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=7, n_embd=12, n_layer=1, n_head=2, n_inner=15, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def records(size: int = RECORDS) -> list[dict[str, Tensor]]:
    """Records of tokens, of which the first ones carry no label: more of them from record to record."""
    ids = torch.randint(VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for i in range(size):
        labels[i, : i % 4] = IGNORED
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def stacked(data: Sequence[dict[str, Tensor]], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.stack([data[i]["input_ids"] for i in indices]), torch.stack([data[i]["labels"] for i in indices])


def summed_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The sum over records and tokens, which no other record changes."""
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def arguments(folder: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    usual = {
        "per_device_train_batch_size": 4, "max_steps": 2, "optim": "sgd", "learning_rate": 1.0, "weight_decay": 0.0,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**usual, **options})


def privacy(**options: Any) -> dict[str, Any]:
    usual = {"noise_multiplier": 0.0, "max_grad_norm": 12.0, "target_delta": 1e-3, "accountant": "rdp"}
    return {**usual, "insecure_reproducible": True, "seed": 0, **options}


def trainer(
    folder: Path, model: nn.Module | None = None, *, secret: dict[str, Any] | None = None, **options: Any
) -> Any:
    from gramian.integrations.transformers import PrivateTrainer

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*insecure.*")
        return PrivateTrainer(
            model=gpt2() if model is None else model,
            args=arguments(folder, **options),
            train_dataset=records(),
            privacy=privacy(**(secret or {})),
        )


def drawn(monkeypatch: Any) -> list[list[int]]:
    """Records of every micro-batch that the loader begins from now on."""
    from gramian.privacy.sampling.private_loader import PrivateLoader

    found: list[list[int]] = []
    begin = PrivateLoader.begin

    def noted(self: Any, piece: Any, batch: Any) -> None:
        found.append(list(piece.indices))
        begin(self, piece, batch)

    monkeypatch.setattr(PrivateLoader, "begin", noted)
    return found
