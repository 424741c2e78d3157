"""The passages of an influence index, and the causal language model whose training text they are.

A passage is a window of T tokens, each with the token that follows it as its target: as the model is trained. Shape suffixes:
N passages, T tokens.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramian.analysis.model_folder import causal_windows, load_causal, load_tokenizer, text_ids
from gramian.analysis.subject import DTYPES, evenly_spaced, load_weights
from gramian.core.errors import GramianError
from gramian.data import load_windows
from gramian.data.tokenizer import load_tokenizer as load_own_tokenizer
from gramian.data.windows import NOT_COUNTED
from gramian.influence.index_folder import PASSAGES, IndexFolder
from gramian.taps.model.user_names import named_parameters
from gramian.train.config.config import Config, load_config

Batch = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class PassageCorpus:
    """A causal language model in evaluation mode, and the passages whose influence is asked for.

    ```python
    corpus = PassageCorpus(model, tokens_NT, targets_NT, decode=tokenizer.decode, encode=tokenizer.encode)
    ```

    Attributes:
        model: maps token ids [B, T] to logits [B, T, V], alone or as `.logits`.
        tokens_NT: ids that the model reads.
        targets_NT: id that each position predicts; −100 where there is none.
        decode: ids to text.
        encode: text to ids.
        facts: JSON values on the model and the text, for the index.
    """

    model: nn.Module
    tokens_NT: Tensor
    targets_NT: Tensor
    decode: Decode
    encode: Encode
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise a GramianError unless tokens and targets are integers of one shape [N, T] with N > 0, in the vocabulary."""
        if not isinstance(self.model, nn.Module):
            raise GramianError(f"model: expected an nn.Module, got {type(self.model).__name__}")
        for name, value in (("tokens_NT", self.tokens_NT), ("targets_NT", self.targets_NT)):
            if not isinstance(value, Tensor) or value.dim() != 2 or not value.numel() or value.is_floating_point():
                raise GramianError(f"{name}: expected a tensor of integers [passages, tokens]")
            self.refuse_unknown_ids(name, value if name == "tokens_NT" else value[value != NOT_COUNTED])
        if self.tokens_NT.shape != self.targets_NT.shape:
            raise GramianError(f"targets_NT: have shape {list(self.targets_NT.shape)}; expected that of tokens_NT")
        assert self._argument  # found now: a capture replaces the forward

    def __len__(self) -> int:
        """Number of passages N."""
        return len(self.tokens_NT)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def context(self) -> int | None:
        """Most tokens that the model reads, as its config has it; None: not known."""
        config = getattr(self.model, "config", None)
        return getattr(config, "max_position_embeddings", None) or getattr(config, "context", None)

    def refuse_unknown_ids(self, name: str, ids: Tensor) -> None:
        """Raise a GramianError that begins with `name` for ids outside the vocabulary, as far as the model's config has it."""
        config = getattr(self.model, "config", None)
        most = getattr(config, "vocab_size", None) or getattr(config, "vocabulary", None)
        wrong = (ids < 0) | (ids >= (most or 2**62))
        if bool(wrong.any()):
            raise GramianError(
                f"{name}: has id {int(ids[wrong][0])}; expected ids from 0 to {most - 1 if most else '…'}"
            )

    def batch(self, tokens_BT: Tensor, targets_BT: Tensor) -> Batch:
        """Tokens and targets as keyword arguments of the model and "labels", on the model's device."""
        more = {"use_cache": False} if hasattr(self.model, "generation_config") else {}
        tokens, labels = (t.to(self.device, torch.long) for t in (tokens_BT, targets_BT))
        return {self._argument: tokens, **more, "labels": labels}

    @cached_property
    def _argument(self) -> str:
        """Name of the forward's argument for token ids: input_ids, else its first."""
        found = list(inspect.signature(self.model.forward).parameters.values())
        open_ended = found[0].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return "input_ids" if open_ended or any(p.name == "input_ids" for p in found) else found[0].name

    def passages(self, numbers: Sequence[int]) -> Batch:
        """The batch of the passages of some numbers."""
        rows = torch.tensor(numbers, dtype=torch.long)
        return self.batch(self.tokens_NT[rows], self.targets_NT[rows])

    def text(self, number: int) -> str:
        """The text of a passage: its first token and all that it predicts."""
        targets = self.targets_NT[number]
        return self.decode([int(self.tokens_NT[number, 0]), *targets[targets != NOT_COUNTED].tolist()])

    def digest(self) -> dict[str, str]:
        """Hashes of weights and buffers, of the passages and of the text of some: what an index belongs to.

        Reads every weight once. The text stands for the tokenizer, which reads queries.
        """
        return {
            "weights": _hash([*(p for _, p in named_parameters(self.model)), *self.model.buffers()]),
            "passages": _hash([self.tokens_NT, self.targets_NT]),
            "text": hashlib.blake2b(
                "".join(self.text(number) for number in range(min(16, len(self)))).encode(), digest_size=16
            ).hexdigest(),
        }


def _hash(tensors: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    for t in tensors:
        found.update(str((t.dtype, tuple(t.shape), t.requires_grad)).encode())
        found.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def from_folder(
    path: str, texts: Sequence[str], device: torch.device, length: int, passages: int | None
) -> PassageCorpus:
    """The corpus of a Hugging Face model folder and text files; `passages`: how many, evenly spaced; None: all.

    A GramianError names the argument or the file that does not fit. Nothing is downloaded, no code of the folder is run.
    """
    model, tokenizer = _folder_model(path, device)
    ids, digest = text_ids(tokenizer, texts, ends=True)
    limit = getattr(model.config, "max_position_embeddings", None) or length
    cut = causal_windows(ids, min(length, limit))
    windows_NS = cut[torch.from_numpy(evenly_spaced(len(cut), passages or len(cut)))]
    facts = {"model": str(Path(path).absolute()), "text": list(texts), "digest": digest, "passages_in_all": len(cut)}
    return PassageCorpus(model, windows_NS[:, :-1], windows_NS[:, 1:], *_folder_coding(tokenizer), facts)


def from_config(path: str, overrides: Sequence[str], device: torch.device, passages: int | None) -> PassageCorpus:
    """The corpus of a training config: its run's model (fresh weights without a run), and windows of its training data.

    Refused under [privacy]: scores would show what training samples are. `passages`: how many windows, evenly spaced; None:
    all.
    """
    config = load_config(path, overrides)
    if config.privacy is not None:
        raise GramianError("privacy: passages of a private run are not shown; expected a config without [privacy]")
    training, _ = load_windows(config.data)
    model, coding, weights = _config_model(config, training.vocabulary, device)
    rows = training.stack(evenly_spaced(len(training), passages or len(training)))
    if "documents" in rows:
        raise GramianError("data.isolate: passages of several documents; expected isolate = false")
    facts = {
        "config": str(Path(path).absolute()),
        "overrides": list(overrides),
        "weights": weights,
        "digest": training.digest,
        "passages_in_all": len(training),
    }
    return PassageCorpus(model, rows["tokens"], rows["targets"], *coding, facts)


def from_index(folder: IndexFolder, device: torch.device) -> PassageCorpus:
    """The corpus of an index: its passages from the index, its model from where the build had it.

    The text is read for its vocabulary with a config, and not at all with a model folder.
    """
    stored, facts = folder.read_tensors(PASSAGES), folder.facts["corpus"]
    tokens_NT, targets_NT = stored["tokens"].long(), stored["targets"].long()
    if "config" in facts:
        config = load_config(facts["config"], facts["overrides"])
        training, _ = load_windows(config.data)
        model, coding, _ = _config_model(config, training.vocabulary, device)
        return PassageCorpus(model, tokens_NT, targets_NT, *coding, facts)
    model, tokenizer = _folder_model(facts["model"], device)
    return PassageCorpus(model, tokens_NT, targets_NT, *_folder_coding(tokenizer), facts)


# ---- models ----------------------------------------------------------------------------------------------------------


def _folder_model(path: str, device: torch.device) -> tuple[Any, Any]:
    """(model, tokenizer) of a Hugging Face folder, the model in float32 and evaluation mode."""
    tokenizer = load_tokenizer(path)
    return load_causal(path, len(tokenizer)).to(device=device, dtype=DTYPES["fp32"]).eval(), tokenizer


def _folder_coding(tokenizer: Any) -> tuple[Decode, Encode]:
    return (
        lambda ids: str(tokenizer.decode(list(ids))),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False, verbose=False)),
    )


def _config_model(
    config: Config, vocabulary: int, device: torch.device
) -> tuple[nn.Module, tuple[Decode, Encode], str]:
    """(model, (decode, encode), where its weights are from) of a training config; at least float32, in evaluation mode."""
    model, weights = load_weights(config, vocabulary)
    tokenizer = load_own_tokenizer(config.data.tokenizer)
    dtype = DTYPES["fp64" if config.precision.kind == "fp64" else "fp32"]
    coding = (
        lambda ids: tokenizer.decode([int(one) for one in ids]),
        lambda text: [int(one) for one in tokenizer.encode(text)],
    )
    return model.to(device=device, dtype=dtype).eval(), coding, weights
