"""Bugs that the fuzzer found, as cases of their own."""

from typing import Any

import tomli_w

from tests.cli.fuzzed import CONFIG, TINY


def tiny(**sections: dict[str, Any]) -> bytes:
    return tomli_w.dumps({**TINY, **{name: {**TINY[name], **keys} for name, keys in sections.items()}}).encode()


LONG = "a" * 300
NAMED: dict[str, tuple[tuple[str, ...], bytes | None, str]] = {
    "an unknown command": (("trian",), None, "argument COMMAND: 'trian' is unknown; expected "),
    "a word for an integer": (
        ("curvature", CONFIG, "--steps", "x"), tiny(), "argument --steps: got 'x'; expected an integer"),
    "a word for a number": (
        ("eval", "w/run", "--temperature", "x"), None, "argument --temperature: got 'x'; expected a number"),
    "an unknown choice": (
        ("export", "w/run", "new", "--dtype", "fp8"), None, "argument --dtype: 'fp8' is unknown; expected "),
    "a count above every index": (
        ("profile", "kfac", "--cpu", "--batch-size", "9" * 30), None, "argument --batch-size: got '9999"),
    "an integer of 5000 digits": (("plan", CONFIG), b"[run]\nseed = " + b"9" * 5000, f"{CONFIG}: is not TOML ("),
    "an integer of 5000 digits as an override": (("plan", CONFIG, "run.seed=" + "9" * 5000), tiny(), "run.seed: expected "),
    "an integer that no float holds": (
        ("plan", CONFIG), b"[optimizer]\nlr = 1" + b"0" * 400, "optimizer.lr: expected a number that fits into 64 bits, got"),
    "a value of 5000 characters": (("plan", CONFIG), tiny(model={"kind": "a" * 5000}), "model.kind: expected one of 'gpt', "),
    "a flag of an action, cut short": (
        ("influence", "build", "--pass", "3", "w/run", "--out", "new"), None, "influence: unknown '--pass'"),
    "a folder that is not UTF-8": (("init", "\udcff"), None, "argument '\\udcff': is not text; expected UTF-8"),
    "an unknown example": (("init", "new", "--example", "none"), None, "argument --example: 'none' is unknown; expected "),
    "more eigenvalues than parameters": (
        ("curvature", CONFIG, "--eigenvalues", "9999"), tiny(), "argument --eigenvalues: 9,999; expected at most"),
    "validation files for the embedded corpus": (
        ("plan", CONFIG, "data.source=embedded", "data.files=[]", "data.validation_files=['a']"), tiny(),
        "data.validation_files: are not read; expected data.source ="),
    "a probability of 1": (
        ("train", CONFIG, "privacy.noise_multiplier=1.0", "privacy.delta=1.0"), tiny(), "privacy.delta: expected float < 1"),
    "a file without a name": (("train", CONFIG), tiny(data={"files": [""]}), "data.files: a name is empty; expected a file"),
    "a folder in a loop of links": (("init", "w/loop", "--text", "w/book.txt"), None, "w/loop"),
    "a file that cannot be written beside a folder that can": (
        ("profile", "clipping", "--cpu", "--out", "new", "--json", "w/empty"), None, "argument --json: w/empty: Is a "),
    "a folder for a file": (
        ("eval", "w/run", "--json", "w/empty"), None, "argument --json: w/empty cannot be written; expected"),
    "a run with the config of another program": (
        ("eval", "w/foreign"), None, "run folder: w/foreign/config.toml is not a config of this version ("),
    "a name too long for a run": (("eval", LONG), None, "aaaa"),
    "a name too long for an export": (("export", "w/run", LONG), None, "aaaa"),
    "data that is refused after the folder was taken": (
        ("train", CONFIG), tiny(data={"files": ["w/empty"]}), "data.files: w/empty has no file to read; expected "),
    "neither a config nor a model folder": (("doctor",), None, "doctor: expected either CONFIG.toml or --model FOLDER"),
    "a config and a model folder": (("doctor", CONFIG, "--model", "w"), tiny(), "doctor: expected either CONFIG.toml or "),
    "text for a config": (("doctor", CONFIG, "--text", "w/book.txt"), tiny(), "argument --text: is for --model; expected it "),
    "a folder without a model": (("doctor", "--model", "w/empty"), None, "argument --model: w/empty has no config.json; "),
    "a folder that holds no cache": (
        ("train", CONFIG, "teacher.source=hidden", "teacher.cache=none"), tiny(), "teacher.cache: none has no manifest.json;"),
}  # fmt: skip
"""{what it is: (command line, its config, the beginning of its line)}."""
