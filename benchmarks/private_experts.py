"""A private step (forward, backward, clip) of a Mixtral-shaped model over its plain step, by length, in one run.

transformers' Mixtral with 8 layers of width 1024 and 8 experts of width 3584, two for each token, vocabulary 32000: 0.8 B
parameters in bf16, all of them trained, 16,384 tokens a step, experts as grouped products ("grouped_mm"). The router's loss
between samples is off, as it is by default. On a CPU a small model stands in.
"""

import argparse
import copy
import statistics
import warnings
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import gramian
from benchmarks._timing import known, ratio, take_turns, write
from benchmarks.private_step import _let_go, ours, peak, plain

SHAPES: dict[str, dict[str, int]] = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "vocab_size": 32000},
    "cpu": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256},
}


def proven_or_not(base: MixtralForCausalLM, x: torch.Tensor) -> tuple[Any, Any, str]:
    """The private step, and "auto" if its row proof held; else the refusal, and the step without a proof.

    In bf16 a batch and a sample alone may be rounded so differently that a token goes to another expert.
    """
    step, engine, _ = ours(copy.deepcopy(base), x)
    try:
        step()
        return step, engine, "auto"
    except gramian.GramianError as error:
        engine.detach()
        step, engine, _ = ours(copy.deepcopy(base), x, proof="off")
        return step, engine, str(error)


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = MixtralConfig(num_attention_heads=16, num_key_value_heads=8, num_local_experts=8, **SHAPES[device])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    base = MixtralForCausalLM(config).to(device=device, dtype=dtype).train()
    base.set_experts_implementation("grouped_mm")
    base.config.use_cache = False
    tokens = 16384 if device == "cuda" else 256
    file = f"private_experts{'' if device == 'cuda' else '_cpu'}"
    rows: dict[str, Any] = known(file).get("lengths", {})
    for length in arguments.lengths or ([256, 1024, 4096] if device == "cuda" else [32]):
        x = torch.randint(config.vocab_size, (tokens // length, length), device=device)
        baseline = plain(base, x)
        _let_go()
        row: dict[str, Any] = {"batch": len(x), "plain_peak_gib": peak(baseline)}
        base.zero_grad()
        step, engine, proof = proven_or_not(base, x)
        row["proof"] = proof
        times = take_turns({"plain": baseline, "private": step}, arguments.rounds, 2, 2)
        row |= {
            "plain_milliseconds": 1e3 * statistics.median(times["plain"]),
            "private_milliseconds": 1e3 * statistics.median(times["private"]),
            "ratio": ratio(times["private"], times["plain"]),
        }
        base.zero_grad()
        row |= {"peak_gib": peak(step), "plan": None if engine.plan is None else str(engine.plan).splitlines()}
        engine.detach()
        del step, engine
        rows[str(length)] = row
        print(length, {key: value for key, value in row.items() if key != "plan"}, flush=True)
        found = {"config": SHAPES[device], "parameters": sum(p.numel() for p in base.parameters()), "lengths": rows}
        print(write(file, found))


if __name__ == "__main__":
    main()
