"""The setting of gramian/examples/goose_seed.toml without a network: a spiking student of a GPT-2, beside its dense twin.

WikiText-2 and GPT-2's weights cannot be had without one. The text here is the embedded corpus, the source of Python's standard
library; the tokenizer is a byte-level BPE trained on it; the teacher has GPT-2's shape and is trained from nothing. Of the
config nothing but paths is overridden. So perplexities are NOT comparable with those that the recipe aimed at; minutes, the
way of T, and ratios between the students are what this shows. Parts, each callable by itself with --only:

    teacher    text, tokenizer, a GPT-2 of 124 million parameters; its best state as a Hugging Face folder
    goose      `gramian train gramian/examples/goose_seed.toml`
    twin       the same with model.spikes=false
    ce         the same without [teacher]: cross entropy alone
    collect    one JSON and a table of what was found so far

Parts are processes of their own, and goose, twin and ce may run at the same time (tell --together). What a part found stays in
--folder and is not found again; a run that was cut off is resumed. Scored are the best and the last state, as `gramian eval`
does. --tiny is everything in a minute on a CPU, and means nothing.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._timing import write
from gramian.cli import main as gramian
from gramian.data import load_tokenizer, load_windows
from gramian.data.embedded_corpus import load_corpus
from gramian.models.token_sampling import evaluation_mode
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.build.build_model import build_model
from gramian.train.config.config import Config, load_config, parse_config
from gramian.train.loop.objective import Objective, logits_of
from gramian.train.loop.perplexity import perplexity
from gramian.train.loop.precision import resolve_precision, set_globals
from gramian.train.state.checkpoint import CheckpointStore, LoadedCheckpoint
from gramian.train.state.flat_state import load
from gramian.train.state.run_folder import read_lines
from gramian.train.state.saved_run import OF_MODEL

ON_GPU = torch.cuda.is_available()
WORLD = ProcessGrid(0, 1, torch.device("cuda", 0) if ON_GPU else torch.device("cpu"), "one")
RECIPE = Path(__file__).parent.parent / "gramian/examples/goose_seed.toml"
STUDENTS = {"goose": "Goose", "twin": "dense twin", "ce": "Goose, no teacher"}
PARTS = ("teacher", *STUDENTS, "collect")
END = "<|endoftext|>"
NEVER = 10**9
AIMS = {
    "perplexity_below": 530.0,
    "minutes": 24.0,
    "device": "T4",
    "temperature": [2.0, 3.0],
    "data": "WikiText-2",
    "teacher": "GPT-2",
}
CAVEAT = (
    "Text, tokenizer and teacher are not the recipe's (Python's standard library in place of WikiText-2, a BPE trained on it, "
    "a GPT-2 trained on it from nothing), and its perplexity was scored otherwise: perplexities do not compare with its aim."
)
DULL = ("checkpoint_written", "checkpoint_waited", "eval_cost", "done", "resumed")
"""Events that say nothing about a model."""


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    limit_bytes: int
    vocabulary: int
    """Entries of the tokenizer, at most."""
    gpt2: Mapping[str, Any]
    """Of GPT2Config; the rest has its defaults."""
    teacher: Mapping[str, Mapping[str, Any]]
    """Sections of the teacher's config."""
    overrides: tuple[str, ...]
    """Of the students, beside paths."""
    scored: int
    """Validation windows of the perplexity at the end, at most."""


FULL = Scale(
    limit_bytes=10_000_000,
    vocabulary=50_257,
    gpt2={"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024},
    teacher={
        "run": {"steps": 1500, "deterministic": False},
        "data": {"length": 256, "batch": 32},
        "optimizer": {"lr": 3e-4},
        "schedule": {"warmup": 100},
        "checkpoint": {"snapshot_every": 250, "every": NEVER, "keep": 1},
        "eval": {"every": 250, "windows": 256},
    },
    overrides=(),
    scored=512,
)
TINY = Scale(
    limit_bytes=300_000,
    vocabulary=1000,
    gpt2={"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64},
    teacher={
        "run": {"steps": 24, "log_every": 4, "deterministic": False},
        "data": {"length": 32, "batch": 8, "workers": 0},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup": 4},
        "checkpoint": {"snapshot_every": 8, "every": NEVER, "keep": 1},
        "eval": {"every": 8, "windows": 8},
    },
    overrides=(
        "run.steps=12", "run.log_every=2", "schedule.warmup=2", "eval.every=4", "eval.windows=8",
        "model.layers=2", "model.width=32", "data.length=32", "data.stride=16", "data.workers=0",
        "teacher.feature_pairs=[[0, 0], [1, 1], [2, 2]]", "teacher.feature_from=4",
    ),
    scored=16,
)  # fmt: skip


class Bench:
    """A folder of runs at one scale."""

    def __init__(self, folder: Path, scale: Scale, together: bool) -> None:
        self.folder, self.scale, self.together = folder, scale, together
        self.text = {side: folder / "data" / side for side in ("train", "validation")}
        self.gpt2 = folder / "models" / "gpt2"

    def teacher(self) -> dict[str, Any]:
        """Text, tokenizer and teacher."""
        started = time.perf_counter()
        data = self._write_text()
        data["tokenizer_entries"] = self._write_tokenizer()
        prepared = time.perf_counter() - started
        config = parse_config({**self.scale.teacher, "run": {**self.scale.teacher["run"], "folder": self._run("teacher")},
                               "model": {"kind": "huggingface", "path": str(self.gpt2), "fresh": True},
                               "data": {**self.scale.teacher["data"], "source": "text", **self._data()}})  # fmt: skip
        path = self.folder / "teacher.toml"
        path.write_text(config.toml(), encoding="utf-8")
        found = self._train(path, (), config)
        best = _checkpoint(config, best=True)
        _with_weights(config, best).save_pretrained(str(self.gpt2))  # type: ignore[operator]
        training, validation = load_windows(config.data)
        data |= {
            "training_tokens": len(training.stream),
            "validation_tokens": len(validation.stream),
            "training_windows_of_teacher": len(training),
            "validation_windows": len(validation),
        }
        return {"data": data, "preparation_seconds": prepared, **found}

    def student(self, name: str) -> dict[str, Any]:
        """Goose, its twin, or Goose without a teacher."""
        if not (self.folder / "teacher.json").is_file():
            raise SystemExit(f"{self.folder} has no teacher: run with --only teacher first")
        paths = [f"{key}={value}" for key, value in (("run.folder", self._run(name)), *_keys("data", self._data()))]
        if name == "ce":
            overrides = [*paths, *(each for each in self.scale.overrides if not each.startswith("teacher."))]
            told = load_config(RECIPE, overrides)
            config, path = replace(told, teacher=None), self.folder / "ce.toml"
            path.write_text(config.toml(), encoding="utf-8")
        else:
            overrides = [*paths, f"teacher.path={self.gpt2}", *self.scale.overrides]
            overrides += ["model.spikes=false"] * (name == "twin")
            config, path = load_config(RECIPE, overrides), RECIPE
        found = self._train(path, () if name == "ce" else overrides, config)
        return {**found, "overrides": overrides, "together": self.together}

    # ---- data ----------------------------------------------------------------------------------------------------------

    def _run(self, name: str) -> str:
        return str(self.folder / name)

    def _data(self) -> dict[str, Any]:
        """The paths of [data]."""
        sides = {key: [str(self.text[side])] for key, side in (("files", "train"), ("validation_files", "validation"))}
        return {**sides, "tokenizer": str(self.gpt2)}

    def _write_text(self) -> dict[str, Any]:
        """The embedded corpus as a file per document, split as it is by [data] source = "embedded"."""
        corpus = load_corpus(self.scale.limit_bytes)
        digest = hashlib.blake2b(digest_size=16)
        for name, content in sorted({**corpus.train, **corpus.validation}.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            path = self.text["validation" if name in corpus.validation else "train"] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content.decode(errors="replace"), encoding="utf-8", newline="")
        return {
            "text": f"source of the standard library of Python {sys.version.split()[0]}",
            "digest": digest.hexdigest(),
            "training_files": len(corpus.train),
            "validation_files": len(corpus.validation),
            "training_bytes": sum(map(len, corpus.train.values())),
            "validation_bytes": sum(map(len, corpus.validation.values())),
        }

    def _write_tokenizer(self) -> int:
        """Train it on the training text, unless it is there, and write the teacher's shape beside it; returns its entries."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import GPT2Config, PreTrainedTokenizerFast

        if not (self.gpt2 / "config.json").is_file():
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=self.scale.vocabulary,
                min_frequency=2,
                special_tokens=[END],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
            texts = (path.read_text(encoding="utf-8") for path in sorted(self.text["train"].rglob("*.py")))
            tokenizer.train_from_iterator(texts, trainer)
            whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)  # type: ignore[no-untyped-call]
            whole.save_pretrained(str(self.gpt2))
            end = tokenizer.token_to_id(END)
            shape = GPT2Config(
                vocab_size=tokenizer.get_vocab_size(), bos_token_id=end, eos_token_id=end, **self.scale.gpt2
            )
            shape.save_pretrained(str(self.gpt2))
        return load_tokenizer(str(self.gpt2)).vocabulary

    # ---- a run ---------------------------------------------------------------------------------------------------------

    def _train(self, path: Path, overrides: list[str] | tuple[str, ...], config: Config) -> dict[str, Any]:
        """`gramian train`, then what its folder says and both perplexities of its best and last state."""
        folder = Path(config.run.folder)
        before = _seconds_in_loop(folder / "metrics.jsonl")
        started = time.perf_counter()
        code = gramian(["train", str(path), *overrides])
        seconds = time.perf_counter() - started
        events = list(read_lines(folder / "events.jsonl"))
        if code or events[-1]["event"] != "done":
            raise SystemExit(f"{folder} did not come to its end; the same command resumes it")
        lines = list(read_lines(folder / "metrics.jsonl"))
        steps = [line for line in lines if "loss" in line]
        looks = [line for line in lines if "validation_loss" in line]
        last = {**steps[-1], **looks[-1]}
        record = json.loads((folder / "record.json").read_text())
        told = [event for event in events if event["event"] not in DULL]
        found = {
            "parameters": record["parameters"],
            "device": record["device"],
            "precision": record["precision"],
            "windows": record["windows"],
            "steps": config.run.steps,
            "tokens": last["tokens"],
            "minutes": (before + seconds) / 60,
            "minutes_in_the_loop": _seconds_in_loop(folder / "metrics.jsonl") / 60,
            "resumed": before > 0,
            "memory_gib": steps[-1]["time"]["memory_gib"],
            "perplexity": self._scored(config),
            "curve": [[line["step"], line["validation_perplexity"]] for line in looks],
            "event_counts": dict(Counter(event["event"] for event in told)),
            "events": [
                {key: value for key, value in event.items() if key not in ("attempt", "clock")} for event in told[:40]
            ],
        }
        for key in (
            "kl",
            "agreement",
            "correlation",
            "teacher_cka",
            "temperature",
            "temperature_schedule_only",
            "spikes",
        ):
            if key in last:
                found[key] = last[key]
        if config.teacher is not None:
            every = max(1, len(steps) // 30)
            found["temperature_path"] = [[line["step"], line["temperature"]] for line in steps[every - 1 :: every]]
            found["features_ended"] = next((e["text"] for e in events if e["event"] == "features_off"), None)
        return found

    def _scored(self, config: Config) -> dict[str, Any]:
        """Of the best and the last state, by both protocols over the same tokens."""
        data = config.data
        found: dict[str, Any] = {}
        set_globals(config.precision, config.run.deterministic)
        numbers, (_, validation) = resolve_precision(config.precision, WORLD.device), load_windows(data)
        stride, windows = data.stride or data.length // 2, self.scale.scored
        for name in ("best", "last"):
            saved = _checkpoint(config, best=name == "best")
            if name == "last" and saved.step == found["best"]["step"]:
                found[name] = found["best"]
                continue
            model = _with_weights(config, saved).to(device=WORLD.device, dtype=numbers.weights)
            row: dict[str, Any] = {"step": saved.step}
            with evaluation_mode(model), numbers.autocast():
                # A sliding window after the first scores `stride` tokens, so it takes more of them.
                for each, limit in ((None, windows), (stride, 1 + (windows - 1) * data.length // stride)):
                    scored = perplexity(
                        lambda tokens_BT, model=model: logits_of(model, tokens_BT),  # type: ignore[misc]
                        validation.stream, WORLD, length=data.length, stride=each, rows=data.micro_batch or 16, limit=limit,
                    )  # fmt: skip
                    row[scored.protocol] = scored.perplexity
                    row[f"{scored.protocol}_tokens"] = scored.tokens
            found[name] = {**row, "length": data.length, "stride": stride}
        return found


def _keys(section: str, table: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(f"{section}.{key}", json.dumps(value)) for key, value in table.items()]


def _seconds_in_loop(metrics: Path) -> float:
    """That a run was in its loop, over all processes that resumed it; 0 before it began."""
    total = last = 0.0
    for line in read_lines(metrics) if metrics.is_file() else ():
        elapsed = line.get("time", {}).get("elapsed", last)
        total, last = total + max(0.0, elapsed - last if elapsed >= last else elapsed), elapsed
    return total


def _checkpoint(config: Config, best: bool) -> LoadedCheckpoint:
    """The best state of a run, or its last."""
    store = CheckpointStore(Path(config.run.folder) / "checkpoints", 1)
    try:
        found = store.best(config.hash) if best else store.newest(config.hash)
    finally:
        store.close()
    assert found is not None, f"{config.run.folder}: has no such state"
    return found


def _with_weights(config: Config, saved: LoadedCheckpoint) -> torch.nn.Module:
    model = build_model(config, load_tokenizer(config.data.tokenizer).vocabulary)
    load(Objective(model), None, {name: t for name, t in saved.tensors().items() if name.startswith(OF_MODEL)})
    return model


# ---- all of them -------------------------------------------------------------------------------------------------------------


def collect(folder: Path, file: str) -> None:
    """What the parts found, in one JSON and a table."""
    found = {name: json.loads(path.read_text()) for name in PARTS[:-1] if (path := folder / f"{name}.json").is_file()}
    if "teacher" not in found:
        raise SystemExit(f"{folder} has no teacher: run with --only teacher first")
    students = {name: found[name] for name in STUDENTS if name in found}
    data = found["teacher"].pop("data")
    for row in students.values():
        data["training_windows_of_students"] = row["windows"]["training"]
        assert row["windows"]["validation"] == data["validation_windows"], "the students' text is not the teacher's"
    results: dict[str, Any] = {"not_comparable": CAVEAT, "aims_of_the_recipe": AIMS, "data": data, **found}
    results["at_the_same_time_on_one_device"] = [name for name, row in students.items() if row["together"]]
    for name, over in (("ternary_tax", "twin"), ("goose_over_ce", "ce")):
        if {"goose", over} <= set(students):
            results[name] = {
                state: {
                    kind: found["goose"]["perplexity"][state][kind] / found[over]["perplexity"][state][kind]
                    for kind in ("non-overlapping", "sliding")
                }
                for state in ("best", "last")
            }
    print(
        f"{data['text']}: {data['training_bytes'] / 1e6:.1f} MB, {data['training_tokens']:,} tokens to train, "
        f"{data['validation_tokens']:,} to validate, {data['tokenizer_entries']:,} entries"
    )
    print(f"{'':<20}{'parameters':>12}{'perplexity':>12}{'sliding':>10}{'last':>10}{'minutes':>9}{'T':>7}{'rates':>7}")
    for name in ("teacher", *students):
        row, best = found[name], found[name]["perplexity"]["best"]
        heat = "".join(
            f"{row[key]:>7.3f}" if row.get(key) is not None else f"{'':>7}"
            for key in ("temperature", "temperature_schedule_only")
        )
        print(
            f"{STUDENTS.get(name, name):<20}{row['parameters']:>12,}{best['non-overlapping']:>12.2f}{best['sliding']:>10.2f}"
            f"{row['perplexity']['last']['non-overlapping']:>10.2f}{row['minutes']:>9.2f}{heat}  {row['event_counts']}"
        )
    for name, text in (("ternary_tax", "the dense twin's"), ("goose_over_ce", "that without a teacher")):
        if name in results:
            print(f"Goose's perplexity is {results[name]['best']['non-overlapping']:.3f} × {text}")
    print(f"The recipe aimed at a perplexity below 530 in 24 minutes on a T4, T from 2 to 3. {CAVEAT}")
    print(write(file, results))


def main() -> None:
    """Run one part, or all of them, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be given several times")
    parser.add_argument("--folder", type=Path, help="of the runs (default: runs/goose_seed_bench)")
    parser.add_argument("--together", action="store_true", help="say that other parts run on the device meanwhile")
    parser.add_argument("--tiny", action="store_true", help="everything in a minute on a CPU")
    told = parser.parse_args()
    small = told.tiny or not ON_GPU
    folder = told.folder or Path("runs", "goose_seed_bench_tiny" if small else "goose_seed_bench")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    names = told.only or PARTS
    if len(names) > 1:  # what one of them sets for its process does not reach the others
        rest = ["--folder", str(folder), *["--together"] * told.together, *["--tiny"] * told.tiny]
        for name in names:
            subprocess.run([sys.executable, "-m", "benchmarks.goose_seed", "--only", name, *rest], check=True)
        return
    (name,) = names
    if name == "collect":
        collect(folder, "goose_seed_cpu" if small else "goose_seed")
        return
    kept = folder / f"{name}.json"
    if kept.is_file():
        print(f"{name}: is there, {kept}")
        return
    print(f"{name}:", flush=True)
    if small and not ON_GPU:
        torch.set_num_threads(1)  # so small that several threads wait for one another
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, TINY if small else FULL, told.together)
    found = bench.teacher() if name == "teacher" else bench.student(name)
    kept.write_text(json.dumps(found, indent=1) + "\n")
    best = found["perplexity"]["best"]
    print(
        f"{name}: perplexity {best['non-overlapping']:.3f}, sliding {best['sliding']:.3f}, at step {best['step']}; "
        f"{found['minutes']:.2f} minutes"
    )


if __name__ == "__main__":
    main()
