"""Random command lines and configs, most of them valid in all but one field; what each names if it is refused.

They are drawn from what the package itself reads: the dataclasses of the config and the parser of every command. A case
is a function of its seed; ``python -m tests.cli.fuzz_judge SEED …`` runs some and prints what came of them.
"""

import argparse
import datetime
import functools
import math
import random
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from types import UnionType
from typing import Any, Literal

import msgspec
import tomli_w

from gramian.cli import COMMANDS, _Parser
from gramian.train.config.config import SECTIONS, Config

CONFIG = "run.toml"
TINY: dict[str, dict[str, Any]] = {
    "run": {"folder": "new/run", "steps": 2, "device": "cpu"},
    "model": {"layers": 1, "width": 8, "heads": 2},
    "data": {"source": "text", "files": ["w/book.txt"], "length": 8, "batch": 2, "workers": 0},
    "schedule": {"warmup": 0},
    "checkpoint": {"snapshot_every": 1, "every": 1},
    "eval": {"every": 1, "windows": 2},
    "doctor": {"overfit_steps": 2, "overfit_windows": 1},
}
"""A run of 50 ms."""
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "goose": {"model": {"kind": "goose"}},
    "jsonl": {"data": {"source": "jsonl", "files": ["w/lines.jsonl"], "pack": False}},
    "tokens": {"data": {"source": "tokens", "files": ["w/ids.npy"]}},
    "embedded": {"data": {"source": "embedded", "files": [], "limit_bytes": 100_000}},
    "kfac": {"kfac": {"update_freq": 1}},
    "optimizer": {"optimizer": {"kind": "kfac"}},
    "private": {"privacy": {"noise_multiplier": 1.0, "accountant": "rdp", "proof": "off"}},
    "private kfac": {
        "privacy": {"noise_multiplier": 1.0, "accountant": "rdp", "proof": "off"},
        "kfac": {"public_files": ["w/book.txt"]},
    },
    "taught": {"teacher": {"path": "w/run"}},
    "cached": {"teacher": {"path": "w/run", "source": "hidden", "cache": "w/cache"}},
}
FOLDER = {"model": {"kind": "huggingface", "path": "w/hf"}}
"""Goes into some of the configs from seed `SLOW_IMPORT` on: transformers takes seconds to import."""
SLOW_IMPORT = 1000
PATHS = {
    ("data", "files"), ("data", "validation_files"), ("data", "tokenizer"), ("run", "folder"), ("model", "path"),
    ("teacher", "path"), ("teacher", "cache"), ("kfac", "public_files"),
}  # fmt: skip
"""(section, key) of paths."""
BAD_PATHS = (
    "missing", "w/missing/below", "w/empty.txt", "w/binary.bin", "w/empty", "w/loop", "w/book.txt", "w/book.txt/x",
    "w/run", "w/half.json", "/dev/null/x", "w/latin.txt", "ü/…", "a" * 300, "", " ", "~", "w/bad.npy", "w/odd.jsonl",
    "w/cut", "w/bare", "w/foreign", "w/cache", "w/cutcache",
)  # fmt: skip
"""Paths that are of the wrong kind for most fields."""
NEVER = {("data", "workers"), ("compile", "mode"), ("teacher", "compile"), ("run", "wandb"), ("run", "tensorboard")}
"""Fields whose other valid values start many processes or a compiler, or need a package."""
SLOW = {("run", "steps"), ("doctor", "overfit_steps"), ("doctor", "overfit_windows"), ("eval", "windows")}
"""Fields of which a large value is a long run and no mistake."""
SLOW_OPTIONS = {
    "--tokens", "--windows", "--probes", "--steps", "--eigenvalues", "--iterations", "--seq-lengths", "--batch-size",
    "--layers", "--width", "--vocabulary", "--releases", "--length", "--batch", "--passages",
}  # fmt: skip
TEXTS = (
    "", " ", "x", "ü…", "a b", "\t", "\x1b[31m", "0x", "None", "nan", "[", "a" * 5000, "日本", "'", '"', "a=b", "-1",
)  # fmt: skip
NUMBERS = (
    "0", "1", "-1", "1.5", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "٣", "1_0", " 4 ", "2147483648", "1e9",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One command line with its config; `names`: what its refusal must name one of, empty if that is open."""

    seed: int
    kind: str
    argv: tuple[str, ...]
    config: bytes | None = None
    names: tuple[str, ...] = ()
    refused: bool = False
    """True if it must be refused."""
    long: bool = False
    """True if it may be a long run that only Ctrl-C ends."""

    def __str__(self) -> str:
        config = "" if self.config is None else f"\n--- {CONFIG}\n{self.config.decode(errors='backslashreplace')}---"
        return f"seed {self.seed} ({self.kind}): gramian {' '.join(map(ascii, self.argv))}{config}"


@dataclass
class Draft:
    """What a command gets before something of it is broken."""

    command: str
    tables: dict[str, dict[str, Any]] | None = None
    positional: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    quick: bool = True
    """False if it takes minutes unless it is refused."""

    @property
    def argv(self) -> tuple[str, ...]:
        options = [part for name, values in self.options.items() for part in (name, *values)]
        return (self.command, *self.positional, *self.overrides, *options)

    @property
    def toml(self) -> bytes | None:
        return None if self.tables is None else tomli_w.dumps(self.tables).encode()


# ---- valid command lines -------------------------------------------------------------------------------------------------


def _tables(draw: random.Random, *variants: str) -> dict[str, dict[str, Any]]:
    chosen = VARIANTS[draw.choice(variants or tuple(VARIANTS))]
    return {name: {**TINY.get(name, {}), **chosen.get(name, {})} for name in {**TINY, **chosen}}


def _with_config(command: str, *variants: str) -> Callable[[random.Random], Draft]:
    return lambda draw: Draft(command, _tables(draw, *variants), [CONFIG])


def _cache(draw: random.Random) -> Draft:
    draft = _with_config("cache", "cached")(draw)
    assert draft.tables is not None
    draft.tables["teacher"]["cache"] = "new/cache"
    return draft


def _init(draw: random.Random) -> Draft:
    texts = [["w/book.txt"], ["w/texts", "w/book.txt"]]
    options = draw.choice([{}, {"--example": ["kfac"]}, *({"--text": names} for names in texts)])
    return Draft("init", None, ["new"], options)


def _eval(draw: random.Random) -> Draft:
    options = draw.choice([{"--windows": ["2"]}, {"--stride": ["3"], "--json": ["new.json"]},
                           {"--prompt": ["a"], "--tokens": ["2"], "--temperature": ["0.5"], "--seed": ["3"]}])  # fmt: skip
    if draw.random() < 0.7:
        return Draft("eval", None, ["w/run"], dict(options))
    tables = _tables(draw, "plain")
    tables["run"]["folder"] = "w/run"
    return Draft("eval", tables, [CONFIG], dict(options))


def _curvature(draw: random.Random) -> Draft:
    options = {"--tokens": ["16"], "--eigenvalues": ["1"], "--steps": ["2"], "--probes": ["0"], "--out": ["new/c"]}
    more = {"--seed": ["3"], "--dtype": ["fp64"], "--device": ["cpu"], "--batch": ["2"], "--fisher": ["empirical"],
            "--damping": ["0.1"], "--samples": ["100"], "--ekfac": [], "--methods": [], "--policy": ["hybrid"]}  # fmt: skip
    for name in draw.sample(sorted(more), 2):
        options[name] = more[name]
    return Draft("curvature", _tables(draw, "plain", "goose", "kfac", "optimizer"), [CONFIG], options)


def _influence(draw: random.Random) -> Draft:
    options = {"--passages": ["3"], "--factors": ["kfac"], "--device": ["cpu"], "--out": ["new/index"]}
    more = {"--seed": ["3"], "--batch": ["2"], "--fisher": ["empirical"], "--damping": ["0.2"], "--gradients": ["1MB"]}
    for name in draw.sample(sorted(more), 2):
        options[name] = more[name]
    return Draft("influence", _tables(draw, "plain"), ["build", CONFIG], options)


def _plan(draw: random.Random) -> Draft:
    draft = _with_config("plan")(draw)
    options = {"--gpus": ["2"], "--gpu-memory": ["80"], "--gpus-per-host": ["2"], "--host-memory": ["64"]}
    draft.options = options if draw.random() < 0.5 else {}
    return draft


def _profile(draw: random.Random) -> Draft:
    sizes = {"--seq-lengths": ["4"], "--batch-size": ["1"], "--layers": ["1"], "--width": ["8"], "--vocabulary": ["16"]}
    target = draw.choice(["clipping", "kfac", "train"])
    if target == "train":
        options = {"--iterations": ["10"], "--cpu": []}
        return Draft("profile", _tables(draw, "plain", "goose"), ["train", CONFIG], options)
    options = {**sizes, "--cpu": [], "--json": ["new.json"]}
    more = {"--out": ["new"], "--iterations": ["10"], "--mode": ["two_pass"], "--algorithm": ["direct"]}
    return Draft("profile", None, [target], {**options, **more} if target == "clipping" else options)


def _verify(draw: random.Random) -> Draft:
    target = draw.choice(["kfac", "clipping", "distill", "resume"])
    return Draft("verify", None, [target], {"--verbose": []}, quick=False)


def _audit(draw: random.Random) -> Draft:
    return Draft(
        "audit", _tables(draw, "private"), [CONFIG], {"--releases": ["3"], "--json": ["new.json"]}, quick=False
    )


DRAFTS: dict[str, Callable[[random.Random], Draft]] = {
    "demo": lambda draw: Draft("demo", None, [], {"--out": ["new/demo"], "--seed": ["3"]}, quick=False),
    "init": _init,
    "train": _with_config("train"),
    "cache": _cache,
    "doctor": _with_config("doctor", "plain", "goose", "kfac", "optimizer", "taught"),
    "eval": _eval,
    "export": lambda draw: Draft("export", None, ["w/run", "new/out"], draw.choice([{}, {"--dtype": ["bf16"]}])),
    "report": lambda draw: Draft("report", None, ["w/run"] * draw.randint(1, 2), {"--out": ["new.html"]}),
    "curvature": _curvature,
    "influence": _influence,
    "plan": _plan,
    "verify": _verify,
    "profile": _profile,
    "audit": _audit,
}
WEIGHTS = {"train": 5, "plan": 4, "curvature": 2, "eval": 2, "profile": 2}


# ---- values --------------------------------------------------------------------------------------------------------------


def _bounds(hint: Any) -> list[tuple[type, msgspec.Meta | None]]:
    """(int or float, its range) of the numbers that a type accepts."""
    found = []
    for part in typing.get_args(hint) if typing.get_origin(hint) in (UnionType, typing.Union) else (hint,):
        base, *meta = typing.get_args(part) if hasattr(part, "__metadata__") else (part,)
        if base in (int, float):
            found.append((base, meta[0] if meta else None))
    return found


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value is of a type, by the same rules as a config that is read, but for NaN and infinities."""
    try:
        msgspec.convert(value, hint)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError):
        return False
    return not (isinstance(value, float) and not math.isfinite(value))


def odd_values(draw: random.Random, hint: Any) -> list[Any]:
    """Values of all kinds, near the edges of what a field accepts and far from them."""
    values: list[Any] = [
        0, 1, -1, True, False, 1.5, -0.5, 0.0, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 1e308, 5e-324,
        math.nan, math.inf, -math.inf, datetime.date(2020, 1, 1), datetime.time(7, 32), [], [1], [[1]], [[]], {},
        {"a": 1}, ["x"], *TEXTS,
    ]  # fmt: skip
    for base, meta in _bounds(hint):
        edges = [edge for edge in (meta and (meta.ge, meta.gt, meta.le, meta.lt)) or () if edge is not None]
        values += [base(edge) + step for edge in edges for step in (-1, 0, 1)]
    words = choices(hint)
    values += [_misspelt(draw, word) for word in words] + [word.upper() for word in words]
    return values


def choices(hint: Any) -> list[str]:
    """The words that a type accepts."""
    if typing.get_origin(hint) is Literal:
        return [word for word in typing.get_args(hint) if isinstance(word, str)]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (UnionType, typing.Union) else ()
    return [word for part in parts for word in choices(part)]


def _misspelt(draw: random.Random, word: str) -> str:
    place = draw.randrange(min(2, len(word) - 1), len(word))  # not in the dashes of an option
    wrong = draw.choice("xyz_".replace(word[place], ""))
    cut, twice, other = word[place + 1 :], word[place] + word[place:], wrong + word[place + 1 :]
    return draw.choice([*(word[:place] + rest for rest in (cut, twice, other)), word + "s", word + "_"])


@functools.cache
def hints(section: str) -> dict[str, Any]:
    return typing.get_type_hints(SECTIONS[section], include_extras=True)


# ---- what is broken ------------------------------------------------------------------------------------------------------


ALWAYS = [option.name for option in fields(Config) if option.default is MISSING]
"""Sections that a config has whether it names them or not."""


def _field(draw: random.Random, draft: Draft) -> tuple[str, str]:
    """A field of the config: of any section that it has or that has defaults."""
    assert draft.tables is not None
    section = draw.choice([name for name in SECTIONS if name in {*draft.tables, *ALWAYS}])
    return section, draw.choice([option.name for option in fields(SECTIONS[section])])


def _one_value(draw: random.Random, draft: Draft, seed: int) -> Case:
    """One field of the config has an odd value, in the file or in an override."""
    assert draft.tables is not None
    section, key = _field(draw, draft)
    hint = hints(section)[key]
    if (section, key) in PATHS and draw.random() < 0.7:
        value: Any = draw.choice(BAD_PATHS)
        value = [value] if "files" in key else value
    else:
        values = odd_values(draw, hint)
        if draw.random() < 0.4:  # of the right type, and as far as it goes
            values = [value for value in values if accepts(hint, value)] or values
        value = draw.choice(values)
    wrong = not accepts(hint, value) and not (key == "device" and "--cpu" in draft.options)  # which replaces it
    if (not wrong and (section, key) in NEVER) or not (wrong or draft.quick):
        value, wrong = {"a": 1}, True
    tables = {name: dict(table) for name, table in draft.tables.items()}
    overrides = list(draft.overrides)
    in_file = draw.random() < 0.6 or draft.command in ("verify",)
    if in_file:
        tables.setdefault(section, {})[key] = value
    else:
        text = tomli_w.dumps({"v": value}).removeprefix("v = ").strip() if not isinstance(value, dict) else "{a = 1}"
        if isinstance(value, str) and draw.random() < 0.5:
            text = value  # without quotes
            wrong = False  # it may be read as something else
        overrides.append(f"{section}.{key}={text}")
    large = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > 100
    broken = Draft(draft.command, tables, draft.positional, draft.options, overrides)
    names = [f"{section}.{key}", f"[{section}]", *[key] * ("_" in key)]
    if (section, key) in PATHS:  # a file that has the wrong content is named itself
        names += [path for path in BAD_PATHS if path.strip() and path in str(value)]
    if "w/cache" in str(tables.get("teacher")):
        names.append("teacher.cache")  # it was made of the other value
    return Case(seed, "value", broken.argv, broken.toml, tuple(names), wrong, large and not wrong)


def _two_values(draw: random.Random, draft: Draft, seed: int) -> Case:
    """Some fields have values that are valid alone."""
    assert draft.tables is not None
    if not draft.quick:
        return _one_value(draw, draft, seed)
    for _ in range(draw.randint(2, 4)):
        section, key = _field(draw, draft)
        if (section, key) in NEVER | SLOW | PATHS:
            continue
        hint = hints(section)[key]
        small = (0, 1, 2, 3, 4, 0.0, 0.5, 0.9, 1.0, 2.0, True, False, *choices(hint), "8GB", "off")
        draft.tables.setdefault(section, {})[key] = draw.choice([v for v in small if accepts(hint, v)] or ["x"])
    return Case(seed, "two values", draft.argv, draft.toml)


def _keys(draw: random.Random, draft: Draft, seed: int) -> Case:
    """A key or a section is misspelt, doubled, nested, or not a table."""
    assert draft.tables is not None and draft.toml is not None
    section = draw.choice([name for name, table in draft.tables.items() if table])
    key = draw.choice(list(draft.tables[section]))
    toml = draft.toml.decode()
    kind = draw.randrange(7)
    names: tuple[str, ...]
    if kind == 0:
        wrong = _misspelt(draw, key)
        draft.tables[section][wrong] = draft.tables[section].pop(key)
        refused, toml, names = wrong not in hints(section), draft.toml.decode(), (f"{section}.{wrong}",)
    elif kind == 1:
        wrong = _misspelt(draw, section)
        draft.tables[wrong] = draft.tables.pop(section)
        refused, toml, names = wrong not in SECTIONS, draft.toml.decode(), (wrong,)
    elif kind == 2:
        toml, refused, names = f"{toml}\n[{section}]\n{key} = 1\n", True, (CONFIG,)
    elif kind == 3:
        toml, refused, names = toml.replace(f"{key} =", f"{key} = 1\n{key} =", 1), True, (CONFIG,)
    elif kind == 4:
        draft.tables[section] = draw.choice([1, "x", [1], True, 1.5, []])  # type: ignore[assignment]
        toml, refused, names = draft.toml.decode(), True, (section,)
    elif kind == 5:
        draft.tables[section] = {**draft.tables[section], key: {key: 1}}
        toml, refused, names = draft.toml.decode(), True, (f"{section}.{key}",)
    else:
        draft.tables = {"config": draft.tables}
        toml, refused, names = draft.toml.decode(), True, ("config",)
    return Case(seed, "keys", draft.argv, toml.encode(), names, refused)


def _bytes(draw: random.Random, draft: Draft, seed: int) -> Case:
    """The file is not TOML, or hardly."""
    assert draft.toml is not None
    whole = draft.toml
    place = draw.randrange(len(whole))
    draft.command, draft.options, draft.positional = "plan", {}, [CONFIG]  # what is left may be a long run
    made = draw.choice([
        lambda: whole[:place],
        lambda: whole[:place] + draw.randbytes(draw.randint(1, 4)) + whole[place:],
        lambda: whole[:place] + whole[place + 1 :],
        lambda: b"\xef\xbb\xbf" + whole,
        lambda: whole.replace(b"\n", b"\r\n"),
        lambda: whole.replace(b'"', b"", 1),
        lambda: whole.decode().encode("utf-16"),
        lambda: whole + b"a = " + b"[" * draw.choice([10, 2000, 100_000]),
        lambda: whole + b"[[run]]\n",
        lambda: whole + b"\0",
        lambda: draw.randbytes(200),
        lambda: b"\x1f\x8b" + whole,
        lambda: b'{"run": {"steps": 1}}',
        lambda: b"run:\n  steps: 1\n",
        lambda: b"[run]\nsteps = 1979-05-27T07:32:00Z\n",
        lambda: b"[run]\nseed = " + b"9" * 5000 + b"\n",
        lambda: b"[optimizer]\nlr = 1" + b"0" * 400 + b"\n",
    ])()  # fmt: skip
    return Case(seed, "bytes", draft.argv, made)


@functools.cache
def parser_of(command: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"gramian {command}", allow_abbrev=False)
    import_module(f"gramian.cli.{COMMANDS[command][0]}").add_arguments(parser)
    return parser


def _option(draw: random.Random, draft: Draft, seed: int) -> Case:
    """One option has an odd value, no value, too many, or is not one."""
    actions = [one for one in parser_of(draft.command)._actions if one.option_strings and one.dest != "help"]
    if not actions:
        return _argument(draw, draft, seed)
    action, kind = draw.choice(actions), draw.randrange(8)
    name = action.option_strings[-1]
    options = dict(draft.options)
    refused, long = False, False
    names: tuple[str, ...] = (name,)
    if kind <= 4 and action.nargs != 0:
        misspelt = [_misspelt(draw, word) for word in action.choices or []]
        value = draw.choice([*BAD_PATHS, *TEXTS, *NUMBERS, "true", "cpu", "cuda", *misspelt])
        number = _number(value)
        checked = action.type is not None and not isinstance(action.type, type)  # a function for numbers of at least 0
        refused = checked and not (number is not None and number >= 0)
        refused |= action.choices is not None and value not in action.choices
        long = name in SLOW_OPTIONS and number is not None and number > 2
        if not draft.quick and not refused:
            value, refused = "-1", True
            options = {"--no-such": [], **options}
            names = ("--no-such", name)
        options[name] = [value]
        if len(value) > 250:
            names = (name, value[:50])  # too long for a file's name, which the system says
        if number is not None and number > 0 and not refused:
            names = ()  # perhaps no mistake, and another option is missing
    elif kind == 5 and action.nargs != 0:
        options.pop(name, None)
        options[name], refused = [], True  # at the end, without a value
    elif kind == 6:
        options[_misspelt(draw, name)], refused, names = draft.options.get(name, []), True, ("--",)
    else:
        options[name], refused, names = ["stray", "x=1", "other"], False, ()
        if not draft.quick:
            options["--no-such"], refused, names = [], True, ()
    broken = Draft(draft.command, draft.tables, draft.positional, options)
    return Case(seed, "option", broken.argv, broken.toml, names, refused, long)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _argument(draw: random.Random, draft: Draft, seed: int) -> Case:
    """A positional argument is missing, another path, or one too many."""
    positional, kind = list(draft.positional), draw.randrange(4)
    if kind == 0 and positional:
        positional.pop(draw.randrange(len(positional)))
    elif kind == 1 or not positional or not draft.quick:
        words = [
            "stray", "x=1", "run.steps", "=", "a.b=c", "run.=1", ".steps=1", "run.steps.x=1", "=run.steps", "--", "-",
            "-1", "-x", "--=1", "", "\udcff", "a\nb", "@x",
        ]  # fmt: skip
        positional.insert(draw.randrange(len(positional) + 1), draw.choice(words))
        if not draft.quick:
            positional.append("--no-such")
    else:
        place = draw.randrange(len(positional))
        positional[place] = draw.choice([*BAD_PATHS, "\udcff", "a\0b"])
    broken = Draft(draft.command, draft.tables, positional, draft.options)
    return Case(seed, "argument", broken.argv, broken.toml, long=True)


def _garbage(draw: random.Random, draft: Draft, seed: int) -> Case:
    """Words in any order."""
    words = [
        *COMMANDS, "--help", "--version", "-h", "--out", "--seed", CONFIG, "w/run", "trian", "TRAIN", "--", "-", "=",
        "\udcff", "a\0b", "", "--x=1", "run.steps=1", "@file", "\x1b[31m", "💥", "-1", *BAD_PATHS,
    ]  # fmt: skip
    argv = [draw.choice(words) for _ in range(draw.randint(0, 4))]
    if {"demo", "verify"} & {*argv} or argv[:1] in (["train"], ["doctor"], ["profile"]):
        argv.append("--no-such")
    return Case(seed, "garbage", tuple(argv), draft.toml, long=True)


def _valid(draw: random.Random, draft: Draft, seed: int) -> Case:
    argv = draft.argv if draft.quick else (draft.command, "--help")
    return Case(seed, "valid", argv, draft.toml, long="w/hf" in str(draft.toml))


WITH_CONFIG = {_one_value: 12, _two_values: 3, _keys: 4, _bytes: 2}
ANY = {_option: 6, _argument: 3, _garbage: 1, _valid: 2}


def case(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    command = draw.choices([*DRAFTS], [WEIGHTS.get(name, 1) for name in DRAFTS])[0]
    draft = DRAFTS[command](draw)
    if seed >= SLOW_IMPORT and draw.random() < 0.05:
        if command in ("curvature", "doctor") and draw.random() < 0.5:
            draft.tables, draft.positional = None, []
            length = {"--length": ["8"]} if command == "curvature" else {}
            draft.options = {"--model": ["w/hf"], "--text": ["w/book.txt"], **length, **draft.options}
        elif draft.tables is not None and "teacher" not in draft.tables and draft.tables["data"]["source"] == "text":
            draft.tables["model"] = {**draft.tables["model"], **FOLDER["model"]}
        elif command == "init":
            draft.options = {"--text": ["w/book.txt"], "--model": ["w/hf"]}
    kinds = {**ANY, **(WITH_CONFIG if draft.tables is not None else {})}
    kind = draw.choices([*kinds], [*kinds.values()])[0]
    return kind(draw, draft, seed)
