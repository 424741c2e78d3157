"""Packed documents of Hugging Face models: packed = padded = one by one, in loss and in gradients, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.models.huggingface import load_huggingface
from gramian.train.loop.objective import logits_of, summed_loss

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
SIZES = (5, 1, 9, 3, 6)
CASES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 1},
    "Mistral": {"num_key_value_heads": 1, "sliding_window": 4},
    "Qwen2": {"num_key_value_heads": 2},
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4},
    "GPTNeoX": {},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
}


def model_of(kind: str, attention: str = "sdpa") -> nn.Module:
    import transformers

    options = {key: value for key, value in SMALL.items() if kind != "GPT2" or key == "vocab_size"} | CASES.get(
        kind, {}
    )
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    config._attn_implementation = attention
    model: nn.Module = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    return model


def gradients(model: nn.Module, tokens: Tensor, targets: Tensor, documents: Tensor | None) -> tuple[float, Tensor]:
    model.zero_grad(set_to_none=True)
    loss = summed_loss(logits_of(model, tokens, documents), targets)
    loss.backward()
    return float(loss), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CASES)
def test_packed_is_padded_is_one_by_one(kind: str, attention: str) -> None:
    model = model_of(kind, attention).double().eval()
    tokens = torch.randint(61, (1, sum(SIZES)), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(61, (1, sum(SIZES)), generator=torch.Generator().manual_seed(2))
    documents = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))[None]
    packed = gradients(model, tokens, targets, documents)
    padded = torch.full((2, len(SIZES), max(SIZES)), -100)
    padded[0] = 7
    alone: list[tuple[float, Tensor]] = []
    begin = 0
    for row, size in enumerate(SIZES):
        mine = tokens[:, begin : begin + size], targets[:, begin : begin + size]
        padded[0, row, :size], padded[1, row, :size] = mine[0][0], mine[1][0]
        alone.append(gradients(model, *mine, None))
        begin += size
    loss, gradient = gradients(model, padded[0], padded[1], None)
    for found, other in (
        (packed, (loss, gradient)),
        (packed, (sum(one for one, _ in alone), torch.stack([one for _, one in alone]).sum(0))),
    ):
        tolerance = (
            1e-12 if kind == "GPT2" else 1e-6
        )  # others round norms, positions or weights of attention to float32
        assert found[0] == pytest.approx(other[0], rel=1e-3 * tolerance)
        assert float((found[1] - other[1]).norm() / other[1].norm()) < tolerance


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "GPT2"])
def test_a_model_that_keeps_documents_apart_is_loaded(tmp_path: Path, kind: str) -> None:
    model_of(kind).save_pretrained(tmp_path)  # type: ignore[operator]
    load_huggingface(str(tmp_path), False, 61, 32, 0, isolate=True)


def test_a_model_that_does_not_is_refused_by_name(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    load_huggingface(str(tmp_path), False, 61, 32, 0)
    with pytest.raises(
        GramianError, match=r"^data.isolate: .*\(MambaForCausalLM, .*expected false, or data.pack = false"
    ):
        load_huggingface(str(tmp_path), False, 61, 32, 0, isolate=True)


@pytest.mark.parametrize("kind", ["Lfm2", "Jamba"])
def test_a_narrow_hybrid_with_new_weights_does_not_pass(tmp_path: Path, kind: str) -> None:
    """What leaks through its convolution is small beside its logits, until it is trained."""
    import transformers

    torch.manual_seed(0)
    more = {"Lfm2": {"layer_types": ["conv", "full_attention"]}, "Jamba": {"num_experts": 2, "mamba_d_state": 4}}[kind]
    config = getattr(transformers, f"{kind}Config")(**SMALL, num_key_value_heads=2, **more)
    config.save_pretrained(tmp_path)
    with pytest.raises(GramianError, match=rf"^data.isolate: .*\({kind}ForCausalLM"):
        load_huggingface(str(tmp_path), True, 61, 32, 0, isolate=True)
