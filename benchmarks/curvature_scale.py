"""`gramian curvature` of a Hugging Face model folder as a user types it: seconds of every stage, bytes, what it found.

Three runs over the same text: the defaults; EK-FAC, streamed, on as many tokens; factors inside a byte budget, low rank where
that is smaller. Peak memory is the device's, the model included.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._timing import write
from gramian.cli import main as gramian_command

VARIANTS: dict[str, list[str]] = {
    "defaults": [],
    "EK-FAC": ["--ekfac", "--probes", "0"],
    "2 GB of factors": ["--policy", "auto", "--memory-budget", "2GB", "--probes", "0"],
}


def analyse(command: list[str], out: Path) -> dict[str, Any]:
    """Run the command once; its seconds, its peak, and the model's line of its table."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    status = gramian_command(["curvature", *command, "--out", str(out)])
    found: dict[str, Any] = {"status": status, "seconds": time.perf_counter() - begun}
    if torch.cuda.is_available():
        found["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    written = json.loads((out / "curvature.json").read_text())
    kfac = written["kfac"]
    return found | {
        "complete": written["complete"],
        "stages": written["seconds"],
        "planned_GB": written["plan"]["most"] / 1e9,
        "parameters": written["model"]["parameters"],
        "tokens": written["data"]["tokens"],
        "loss": kfac["loss"],
        "top_eigenvalues": kfac["top_eigenvalues"],
        "capacity": kfac["metrics"]["model"],
        "ggn_eigenvalues": written.get("ggn", {}).get("eigenvalues"),
    }


def main() -> None:
    """Run the variants one after the other; the table is written after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    common = ["--model", options.model, "--text", *options.text, "--length", str(options.length)]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, more) in enumerate(VARIANTS.items()):
            command = [*common, "--tokens", str(options.tokens), "--seed", "0", *more]
            results[name] = {"options": more} | analyse(command, Path(folder) / str(number))
            print(name, results[name], flush=True)
            if torch.cuda.is_available():
                print(write("curvature_scale", results))


if __name__ == "__main__":
    main()
