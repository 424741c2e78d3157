"""A whole private step (forward, backward, clip, noise, AdamW) over the whole plain one (fused AdamW), in one run.

Rows: GPT of 937 M parameters, 16,384 tokens a step; transformers' Llama of 1.24 B, tied, vocabulary 128,256, 8,192 tokens;
LoRA of rank 16 on all linear layers of a Llama of 8.07 B, 8 × 1024 tokens. All in bf16, random weights and tokens; eager and,
with `--compiled`, by `torch.compile`. `--forced` adds the choices that the clipping plan could have been forced to, and
`--profile` what the step consists of: its phases, of which norms and noise are the floor, how long GPU and host are busy, and
the kernels that take longest. On a CPU small models stand in.
"""

import argparse
import copy
import gc
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from benchmarks._timing import kernels, known, ratio, take_turns, write
from benchmarks.private_step import busy_and_host, loss_of
from gramian.models.gpt import GPT, GPTConfig

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
LLAMAS: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "lora": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
ROWS = [("gpt", 256), ("gpt", 1024), ("gpt", 4096), ("llama", 512), ("llama", 2048), ("lora", 1024)]
TOKENS = {"gpt": 16384, "llama": 8192, "lora": 8192}
FORCED = {
    "gram": {"clipping": "bookkeeping", "norm_algorithm": "gram"},
    "direct": {"clipping": "bookkeeping", "norm_algorithm": "direct"},
    "bookkeeping": {"clipping": "bookkeeping"},
    "keep": {"clipping": "keep"},
}
"""Options of `make_private` in place of the plan's own choice."""
WATCHED = 3


def build(name: str) -> nn.Module:
    """The model of a row, on the device."""
    torch.manual_seed(0)
    if name == "gpt":
        shape = {"vocabulary": 32000, "layers": 16, "width": 2048, "heads": 16}
        small = {"vocabulary": 64, "layers": 2, "width": 32, "heads": 2}
        return GPT(GPTConfig(context=4096, **(shape if CUDA else small))).to(DEVICE, DTYPE)
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LLAMAS[name] if CUDA else {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {} if CUDA else {"num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=128256 if CUDA else 64, num_key_value_heads=8 if CUDA else 2, use_cache=False,
        tie_word_embeddings=name == "llama", **shape, **heads,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)  # 8 B parameters are not made in float32 first
    try:
        with torch.device(DEVICE):
            model: nn.Module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if name == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))  # type: ignore[assignment]
    return model.train()


def whole(model: nn.Module, x: Tensor, private: bool, **options: Any) -> tuple[Callable[[], None], Any]:
    """The step of a model, and its engine; `options` are those of `make_private`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, engine = torch.optim.AdamW(trained, lr=1e-6, fused=CUDA), None
    if private:
        engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=0)
        loader = DataLoader(TensorDataset(torch.zeros(100 * len(x), 1)), batch_size=len(x))
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False, **options,
        )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    return step, engine


def forced(base: nn.Module, x: Tensor, auto: Callable[[], None], rounds: int) -> dict[str, Any]:
    """{choice: its time over the plan's own}, each beside the plan's own step `auto` in the same rounds."""
    found: dict[str, Any] = {}
    for name, options in FORCED.items():
        try:
            step, engine = whole(copy.deepcopy(base), x, True, **options)
            times = take_turns({"auto": auto, name: step}, rounds, 2, 2)
            found[name] = ratio(times[name], times["auto"])
            engine.detach()
        except RuntimeError as error:  # out of memory
            found[name] = " ".join(str(error).split())[:100]
        _let_go()
    return found


def profiled(step: Callable[[], None], engine: Any) -> dict[str, Any]:
    """Milliseconds of the phases of a private step, of GPU and host, and of the kernels that take longest."""
    watch = engine.stopwatch
    watch.entries.clear()
    watch.on = True
    for _ in range(WATCHED):
        step()
    watch.on = False
    phases: dict[str, float] = {}
    for row in watch.report():
        phases[row["phase"]] = phases.get(row["phase"], 0.0) + row["milliseconds"] * row["calls"] / WATCHED
    watch.entries.clear()
    return {"phases": phases, "busy_and_host": busy_and_host(step), "kernels": kernels(step)}


def _let_go() -> None:
    gc.collect()
    torch.cuda.empty_cache() if CUDA else None


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(TOKENS), choices=list(TOKENS))
    parser.add_argument("--lengths", nargs="*", type=int, help="only rows of these lengths")
    parser.add_argument("--compiled", action="store_true", help="also the compiled rows of gpt and llama")
    parser.add_argument("--forced", action="store_true", help="also the plan's possible choices, forced; not of lora")
    parser.add_argument("--profile", action="store_true", help="also phases, busy times and kernels")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    file = "private_whole" if CUDA else "private_whole_cpu"
    rows: dict[str, Any] = known(file)
    for name in arguments.models:
        base = build(name)
        lengths = [length for row, length in ROWS if row == name]
        for length in [one for one in lengths if not arguments.lengths or one in arguments.lengths]:
            x = torch.randint(32 if not CUDA else 32000, (max(1, TOKENS[name] // length), length), device=DEVICE)
            x = x if CUDA else x[:4, :16]
            for compiled in (False, True) if arguments.compiled and name != "lora" else (False,):
                # one model for both where two do not fit: the plain step trains it before, and after, it is private
                models = [base, base] if name == "lora" else [copy.deepcopy(base) for _ in range(2)]
                if compiled:
                    for model in models:
                        model.compile()
                plain, _ = whole(models[0], x, private=False)
                alone: dict[str, Any] = {}
                if name == "lora":
                    before = take_turns({"plain": plain}, arguments.rounds, 2, 2)["plain"]
                    if arguments.profile:
                        alone = {"busy_and_host": busy_and_host(plain), "kernels": kernels(plain)}
                    private, engine = whole(models[1], x, private=True)
                    times = {"plain": before, "private": take_turns({"p": private}, arguments.rounds, 2, 2)["p"]}
                else:
                    private, engine = whole(models[1], x, private=True)
                    times = take_turns({"plain": plain, "private": private}, arguments.rounds, 2, 2)
                found = {
                    "plain_milliseconds": 1e3 * statistics.median(times["plain"]),
                    "private_milliseconds": 1e3 * statistics.median(times["private"]),
                    "ratio": ratio(times["private"], times["plain"]),
                    "by_round": [a / b for a, b in zip(times["private"], times["plain"], strict=True)],
                }
                rows[f"{name} {length}{' compiled' if compiled else ''}"] = found
                if arguments.profile:
                    found["private"] = profiled(private, engine)
                    found["plain"] = alone or {"busy_and_host": busy_and_host(plain), "kernels": kernels(plain)}
                if arguments.forced and not compiled and name != "lora":
                    found["forced_over_plan"] = forced(base, x, private, arguments.rounds)
                    _let_go()  # what a choice without room left behind
                print(name, length, compiled, found, flush=True)
                write(file, rows)
                engine.detach()
                del models, plain, private, engine
                _let_go()
        del base


if __name__ == "__main__":
    main()
