"""Influence at the size of a language model: time and bytes of an index, of queries, and how close compressed scores are.

Builds the index of a Hugging Face model folder over passages of a text, queries it, and compares scores from compressed
gradients with exact ones: rank correlation over all passages, and how many of the exact ten most helpful are among forty and
among a hundred candidates. "plain" is a forward and a backward of all passages without anything else, in the same run. The
table is written after every stage.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._timing import synchronize, write
from gramian.core.byte_amounts import format_bytes
from gramian.influence import BuildOptions, Index, Query, build_index
from gramian.influence.corpus import from_folder
from gramian.influence.findings import find
from gramian.influence.influence_page import page_html
from gramian.influence.passage_loss import passage_losses

QUERIES = [
    Query("To list the files of a directory, use the command", " ls -l"),
    Query("The kernel allocates memory with", " kmalloc() and frees it with kfree()"),
    Query("A mutex must not be taken in interrupt context, because", " it may sleep."),
    Query("The license of the Linux kernel is", " the GNU General Public License version 2"),
    Query("A device driver registers itself by calling", " platform_driver_register()"),
    Query("The capital of France is", " Paris"),
    Query("Water boils at a temperature of", " 100 degrees Celsius"),
    Query("RCU readers are delimited by", " rcu_read_lock() and rcu_read_unlock()"),
]


def main() -> None:
    """Build, query, compare, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--passages", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--gradients", default="256MB")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--only", nargs="+", default=["*"])
    parser.add_argument("--name", default="influence_scale")
    parser.add_argument("--page", type=Path, help="where the page of the queries is written")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = from_folder(options.model, options.text, device, options.length, options.passages)
    found: dict[str, Any] = {
        "passages": len(corpus),
        "tokens": corpus.tokens_NT.numel(),
        "parameters": sum(p.numel() for p in corpus.model.parameters()),
        "only": options.only,
        "gradients_asked": options.gradients,
    }
    for _ in passage_losses(corpus, range(options.batch), options.batch):
        pass
    found["plain_seconds"] = _timed(lambda: list(passage_losses(corpus, range(len(corpus)), options.batch)))
    folder = Path(tempfile.mkdtemp())
    marks: dict[str, float] = {}
    begun = time.perf_counter()

    def progress(stage: str, done: int, total: int) -> None:
        if done == total:
            synchronize()
            marks[stage] = time.perf_counter() - begun
            print(stage, f"{marks[stage]:.1f} s", flush=True)

    settings = BuildOptions(gradients=options.gradients, batch=options.batch, only=tuple(options.only))
    index_folder = build_index(corpus, folder / "index", settings, progress)
    found |= {"build_seconds": time.perf_counter() - begun, "stages_end_at": marks, "rank": index_folder.facts["rank"]}
    files = index_folder.facts["files"]
    found["bytes"] = {"factors": files["factors.safetensors"][0], "all": index_folder.nbytes}
    found["bytes"]["gradients"] = sum(size for name, (size, _) in files.items() if name.startswith("gradients-"))
    print({name: format_bytes(size) for name, size in found["bytes"].items()}, flush=True)
    found["queries"] = len(QUERIES)

    def stage(name: str, step: Any) -> Any:
        synchronize()
        started = time.perf_counter()
        result = step()
        synchronize()
        found[f"{name}_seconds"] = time.perf_counter() - started
        print(name, f"{found[f'{name}_seconds']:.2f} s", flush=True)
        write(options.name, found)
        return result

    index = stage("open", lambda: Index(corpus, folder / "index"))
    asked = stage("ask", lambda: index.ask(QUERIES))
    scores: dict[str, Tensor] = {
        source: stage(source, lambda source=source: asked.scores(source).values_QN)
        for source in ("gradients", "passages")
    }
    stage("self_influence", lambda: asked.scores("passages", self_influence=True))
    found["agreement"] = [_agreement(*pair) for pair in zip(scores["gradients"], scores["passages"], strict=True)]
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(found, indent=1), flush=True)
    print(write(options.name, found))
    if options.page is not None:
        findings, _ = stage("find", lambda: find(asked, corpus, top=5))
        options.page.write_text(page_html("Influence", findings))
        options.page.with_suffix(".json").write_text(json.dumps(findings))
    shutil.rmtree(folder)


def _timed(step: Any) -> float:
    synchronize()
    started = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - started


def _agreement(compressed: Tensor, exact: Tensor) -> dict[str, float]:
    """Correlations of two score vectors, and the share of the exact top ten among forty candidates."""
    ranks = torch.stack([one.argsort().argsort().double() for one in (compressed, exact)])
    both = torch.stack([compressed, exact]).double()
    top, order = set(exact.argsort()[:10].tolist()), compressed.argsort().tolist()
    return {
        "spearman": float(torch.corrcoef(ranks)[0, 1]),
        "pearson": float(torch.corrcoef(both)[0, 1]),
        **{f"top_10_in_{count}": len(top & set(order[:count])) / 10 for count in (40, 100)},
    }


if __name__ == "__main__":
    main()
