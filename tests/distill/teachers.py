"""Small teachers and windows for the tests of teacher signals."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gramian.data import Windows
from gramian.data.token_stream import Stream
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.models.goose import Goose, GooseConfig
from gramian.models.gpt import GPT, GPTConfig

VOCABULARY, WIDTH, LAYERS, CONTEXT = 61, 16, 3, 32
LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=CONTEXT,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def gpt(**options: object) -> nn.Module:
    shape = dict(vocabulary=VOCABULARY, context=CONTEXT, layers=LAYERS, width=WIDTH, heads=2)
    return spread_out(GPT(GPTConfig(**{**shape, **options})))  # type: ignore[arg-type]


def goose() -> nn.Module:
    return spread_out(Goose(GooseConfig(vocabulary=VOCABULARY, layers=LAYERS, width=WIDTH)))


def huggingface(family: str, **options: object) -> nn.Module:
    """A tiny causal model of a family, with weights that are drawn."""
    import transformers

    told: dict[str, object] = dict(LLAMA)
    if family == "GPT2":
        told = dict(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=CONTEXT)
        told |= dict(bos_token_id=1, eos_token_id=2)
    name = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    shape = getattr(transformers, f"{family}Config")(**{**told, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return spread_out(getattr(transformers, name)(shape))


def spread_out(model: nn.Module) -> nn.Module:
    """Weights as large as trained ones, biases that are not zero: logits then differ by some nats."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


TEACHERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "gpt tied": lambda: gpt(tied=True),
    "goose": goose,
    "gpt2": lambda: huggingface("GPT2"),
    "llama": lambda: huggingface("Llama"),
    "phi, with a bias": lambda: huggingface("Phi"),
    "gemma2, capped": lambda: huggingface("Gemma2", final_logit_softcapping=5.0),
    "cohere, scaled": lambda: huggingface("Cohere", logit_scale=0.25),
    "granite, divided": lambda: huggingface("Granite", logits_scaling=8.0),
    "hyperclovax, multiplied": lambda: huggingface("HyperCLOVAX", logits_scaling=0.5),
}


def is_frozen(teacher: LiveTeacher) -> bool:
    """Whether no parameter requires grad and no module is in training mode."""
    model = teacher.model
    return not any(p.requires_grad for p in model.parameters()) and not any(m.training for m in model.modules())


def windows(
    count: int = 23, length: int = 12, seed: int = 0, tokenizer: str = "words", isolate: bool = False
) -> Windows:
    """Random documents, packed into so many windows."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, VOCABULARY, size=count * length + 1, dtype=np.uint16)
    edges = np.concatenate([[0], np.arange(17, len(tokens) - 5, 17), [len(tokens)]]).astype(np.int64)
    stream = Stream([tokens], edges, vocabulary=VOCABULARY, end=0, tokenizer=tokenizer)
    return Windows(stream, length, isolate=isolate)


def batch_of(data: Windows, index: list[int]) -> dict[str, Tensor]:
    """A micro-batch as a run would give it."""
    rows = data.stack(np.array(index, dtype=np.int64))
    return {**rows, "windows": torch.tensor(index)}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
