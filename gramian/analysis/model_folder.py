"""Use a Hugging Face model folder and text files as the model and the data of a curvature analysis.

Legend: B windows, T tokens of a window, M masked positions of a window, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramian.analysis.masked_encoder import EmbeddingScores, MaskedHead, mask
from gramian.analysis.subject import DTYPES, Batch, Subject, evenly_spaced, pieces
from gramian.core.errors import GramianError
from gramian.data.corpus.read_records import read_text
from gramian.data.corpus.record_pieces import whole
from gramian.data.data_files import find_files
from gramian.models.huggingface import load_huggingface, open_model_folder

MODEL = "argument --model"
MASKED_SHARE = 0.15
LENGTH = 128
"""Default number of tokens of a window."""


def from_folder(
    path: str,
    texts: Sequence[str],
    device: torch.device,
    dtype: str | None,
    tokens: int,
    rows: int | None,
    length: int,
    masked: bool,
    seed: int,
) -> Subject:
    """Load a model folder and text files as a `Subject`: a causal language model on next tokens, or an encoder on masked ones.

    Args:
        path: folder with config.json, safetensors and tokenizer; nothing is downloaded and none of its code is run.
        texts: files, or folders of them.
        device: where the analysis runs.
        dtype: "fp32" or "fp64"; None: fp32.
        tokens: about how many tokens to read; windows are evenly spaced over the text.
        rows: windows per batch; None: as many as have 1024 tokens.
        length: tokens of a window; fewer if the model's context, or the text, is shorter.
        masked: for an encoder: replace 15 % of the tokens by the mask token; the loss is on those.
        seed: seed of the choice of masked positions.

    Raises:
        GramianError: if an argument or a file does not fit; the message names it.
    """
    kind = dtype or "fp32"
    tokenizer = load_tokenizer(path)
    ids, digest = text_ids(tokenizer, texts, ends=not masked)
    if masked:
        model, scored, facts = _encoder(path)
    else:
        model = scored = load_causal(path, len(tokenizer))
        facts = {"mode": "next token"}
    limit = min(length, getattr(model.config, "max_position_embeddings", None) or length)
    shorter = f"length: {length}, cut to the model's context of {limit}"
    cut = _masked_windows(tokenizer, ids, limit) if masked else causal_windows(ids, limit)
    chosen = evenly_spaced(len(cut), -(-tokens // limit))
    windows_BS = cut[torch.from_numpy(chosen)]
    if masked:
        masked_BT, positions_BM, targets_BM = mask(windows_BS, tokenizer.mask_token_id, MASKED_SHARE, seed)
        batch: Batch = {"input_ids": masked_BT, "positions": positions_BM, "labels": targets_BM}
    else:
        batch = {"input_ids": windows_BS[:, :-1].contiguous(), "labels": windows_BS[:, 1:].contiguous()}
    more: dict[str, Any] = {} if masked else {"use_cache": False}
    return Subject(
        model=scored.to(device=device, dtype=DTYPES[kind]).eval(),
        batches=[
            {name: values[torch.from_numpy(part)].to(device) for name, values in batch.items()} | more
            for part in pieces(evenly_spaced(len(chosen), len(chosen)), rows, limit)
        ],
        model_facts={"kind": "huggingface", "path": path, "weights": "loaded", "dtype": kind, **facts},
        data_facts={
            "source": "text",
            "files": list(texts),
            "digest": digest,
            "length": int(batch["input_ids"].shape[1]),
            "windows": len(chosen),
            "windows_in_all": len(cut),
            **({"masked_share": MASKED_SHARE} if masked else {}),
        },
        notes=[*([facts["mode"]] if masked else []), *([shorter] if limit < length else [])],
    )


def load_causal(path: str, vocabulary: int) -> Any:
    """Load the causal language model of a folder; a GramianError for an encoder, or one without weights."""
    try:
        model: Any = load_huggingface(path, False, vocabulary, 1, 0, MODEL)
    except GramianError as problem:
        message = str(problem)
        if "has no weights of" in message:
            message = f"{message.partition(';')[0]}; expected a causal language model, or --masked for an encoder"
        raise GramianError(message) from None
    if _is(model.config, "ForMaskedLM"):  # it would see the token to predict
        raise GramianError(f"{MODEL}: {path} is an encoder; expected a causal language model, or --masked")
    return model


def _encoder(path: str) -> tuple[Any, nn.Module, dict[str, Any]]:
    """Load an encoder; returns the Hugging Face model, the module that computes logits, and facts for the result.

    Logits are those of its masked-language-model head or, if it has none, products with its input embeddings. Raises a
    GramianError for a causal language model or missing weights.
    """
    with open_model_folder(path, MODEL, "an encoder in safetensors") as (shape, _):
        from transformers import AutoModel, AutoModelForMaskedLM

        if _is(shape, "ForCausalLM", "LMHeadModel"):
            raise GramianError(f"{MODEL}: {path} is a causal language model; expected an encoder, or no --masked")
        headed = _is(shape, "ForMaskedLM")
        kind = AutoModelForMaskedLM if headed else AutoModel
        model, report = kind.from_pretrained(
            path, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise GramianError(f"{MODEL}: {path} has no weights of {missing[0]}; expected those of all parameters")
    if headed:
        return model, MaskedHead(model), {"mode": "Masked tokens, scored by the model's own head."}
    return model, EmbeddingScores(model), {
        "mode": "No head: masked tokens are scored against the model's own input embeddings, which it was not trained for."
    }  # fmt: skip


def _is(shape: Any, *kinds: str) -> bool:
    """Whether a Hugging Face config names an architecture that ends in one of `kinds`, such as "ForMaskedLM"."""
    return any(str(name).endswith(kinds) for name in shape.architectures or ())


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a model folder; a GramianError if there is none."""
    with open_model_folder(path, MODEL, "a tokenizer beside the model"):
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, split_special_tokens=True
        )
    if len(found) <= len(set(found.all_special_ids)):  # made by transformers for a folder without a tokenizer
        raise GramianError(f"{MODEL}: {path} has no tokenizer; expected its files beside the model")
    return found


def text_ids(tokenizer: Any, texts: Sequence[str], ends: bool) -> tuple[Tensor, str]:
    """Tokenize all files into one row of ids, each file followed by the end-of-text token if `ends`; returns ids and hash."""
    end = [tokenizer.eos_token_id] if ends and tokenizer.eos_token_id is not None else []
    ids: list[int] = []
    for file in find_files(texts, "text", "argument --text"):
        ids += tokenizer.encode(read_text(whole(file)).decode(), add_special_tokens=False, verbose=False) + end
    tokens_N = torch.tensor(ids, dtype=torch.long)
    if len(tokens_N) < 2:
        raise GramianError(f"argument --text: {Path(texts[0])} makes {len(tokens_N)} tokens; expected at least 2")
    return tokens_N, hashlib.blake2b(tokens_N.numpy().tobytes(), digest_size=16).hexdigest()


def causal_windows(ids_N: Tensor, length: int) -> Tensor:
    """Cut token ids [N] into windows [windows, length + 1]; a shorter rest is dropped, unless it is the only window."""
    size = min(length + 1, len(ids_N))
    return ids_N[: len(ids_N) // size * size].view(-1, size)


def _masked_windows(tokenizer: Any, ids_N: Tensor, length: int) -> Tensor:
    """Cut token ids [N] into windows [windows, length], each between the tokenizer's tokens that begin and end a text."""
    if tokenizer.mask_token_id is None:
        raise GramianError(f"{MODEL}: its tokenizer has no mask token; expected an encoder, or no --masked")
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    around = [one for one in (first, last) if one is not None]
    size = min(length - len(around), len(ids_N))
    if size < 1:
        raise GramianError(f"argument --length: {length} leaves no token to mask; expected at least {len(around) + 1}")
    body_WS = ids_N[: len(ids_N) // size * size].view(-1, size)
    edges = [None if one is None else body_WS.new_full((len(body_WS), 1), one) for one in (first, last)]
    return torch.cat([part for part in (edges[0], body_WS, edges[1]) if part is not None], dim=1)
