"""The config: every key typed, every refusal one line that names it."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest
import torch

from gramian.core.errors import GramianError
from gramian.curvature import KFACNaturalGradient
from gramian.curvature.blocks.damping import DAMPING_MODES
from gramian.curvature.options import POLICIES
from gramian.distill.cache.kind_registry import KINDS
from gramian.distill.loss.temperature import TemperatureKind
from gramian.kernels.distillation.divergence import DIRECTIONS
from gramian.privacy.options import Storage
from gramian.train.build.build_optimizer import build_curvature
from gramian.train.config.config import (
    ADDED_LATER,
    FOREIGN_KEYS,
    RUN_ONLY,
    SECTIONS,
    Config,
    load_config,
    override_of,
    parse_config,
)
from gramian.train.config.config_sections import KFACSection
from gramian.train.loop.schedule import SCHEDULES


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_the_resolved_config_reads_as_itself(tmp_path: Path) -> None:
    told = {"run": {"steps": 77}, "kfac": {"damping": 0.1}, "data": {"source": "text", "files": ["a", "b"]}}
    config = parse_config(told)
    assert load_config(written(tmp_path, config.toml())) == config
    assert config.run.steps == 77
    assert config.data.files == ("a", "b")


def test_every_section_of_the_config_is_known() -> None:
    assert set(SECTIONS) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("section", "key", "names"),
    [
        ("schedule", "kind", SCHEDULES),
        ("kfac", "damping_mode", DAMPING_MODES),
        ("kfac", "kfac_policy", POLICIES),
        ("privacy", "clipping", get_args(Storage)),
        ("teacher", "source", ["live", *KINDS]),
        ("teacher", "direction", DIRECTIONS),
        ("teacher", "temperature_kind", get_args(TemperatureKind)),
    ],
)
def test_the_config_offers_every_entry_of_a_registry(section: str, key: str, names: Iterable[str]) -> None:
    hint = typing.get_type_hints(SECTIONS[section])[key]
    offered = [name for part in (hint, *get_args(hint)) for name in get_args(part) if isinstance(name, str)]
    assert sorted(offered) == sorted(names)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[run]\nsteps = 5000\nseed = 1\n")
    config = load_config(
        path, ["run.steps=200", "precision.kind=fp32", 'data.files=["x"]', "data.source=text", "eval.every=auto"]
    )
    assert (config.run.steps, config.run.seed, config.precision.kind) == (200, 1, "fp32")
    assert config.data.files == ("x",)
    assert config.eval.every == "auto"


@pytest.mark.parametrize(
    "override, message",
    [
        ("run.step=3", r"run.step: is not a key; did you mean run.steps\?"),
        ("rn.steps=3", r"rn: is not a section; did you mean run\?"),
        ("run.xyzzy=3", "run.xyzzy: is not a key; expected one of folder, seed"),
        ("run.steps=many", "run.steps: expected int, got 'many'"),
        ("run.steps=0", "run.steps: expected int >= 1, got 0"),
        ("run.seed=99999999999999999999999", "run.seed: expected int"),
        ("optimizer.lr=inf", "optimizer.lr: expected a finite number, got inf"),
        ("run.steps=1.5", "run.steps: expected int, got 1.5"),
        ("eval.every=x", "eval.every: expected an integer or 'auto', got 'x'"),
        ("optimizer.kind=lion", "optimizer.kind: expected one of 'adamw', 'sgd', 'kfac', got 'lion'"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected array of length 2"),
        ("optimizer.betas=[0.9,1.5]", "expected float < 1.0"),
        ("eval.every=often", "eval.every: expected"),
        ("steps=3", "'steps=3': expected run.steps=…"),
        ("nothing=3", "'nothing=3': expected an override such as run.steps=200"),
        ("min_lr=1e-5", "'min_lr=1e-5': expected schedule.floor=…"),
        ("eval.eval_interval=5", "eval.eval_interval: is not a key; expected eval.every"),
        ("optimizer.accumulation_steps=5", "optimizer.accumulation_steps: is not a key; expected data.micro_batch"),
        ("precision.kind=fp8", "precision.kind: expected one of .auto., .bf16., .fp16., .fp32., .fp64., got .fp8."),
        ("model.heads=3", "model.width: expected a multiple of model.heads"),
        ("model.kind=huggingface", "model.path: expected the folder"),
        ("data.source=text", "data.files: expected at least one"),
        ('data.files=["a"]', "data.files: are not read"),
        ("schedule.warmup=1000", "schedule.warmup: expected less than run.steps"),
        ("schedule.floor=1", "schedule.floor: expected at most optimizer.lr"),
        ("optimizer.betas=[nan,0.9]", "expected float >= 0.0"),
        (f"data.batch={10**30}", "data.batch: expected int"),
        ("model.layers=2000000000", "model.layers: expected int <= 10000"),
        ("run.folder=", "run.folder: is empty"),
        ('run.folder="a\\u0000b"', "run.folder: expected text in UTF-8 without zero bytes"),
        ("run.folder=a\udcff", "run.folder: expected text in UTF-8"),
        ("run.steps=" + "[" * 3000, "run.steps: expected int"),
        ("run.steps=3\nfoo=1", "run.steps: expected int"),
        ("privacy.delta=1e-5", "privacy.noise_multiplier: expected either"),
        ("teacher.k=3", "teacher.path: expected the folder of a model"),
        ("teacher.pth=x", "teacher.pth: is not a key; did you mean teacher.path"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(GramianError, match=message) as caught:
        load_config(written(tmp_path, ""), [override])
    assert "\n" not in str(caught.value)


def test_files_that_are_no_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(GramianError, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(GramianError, match="cannot be read"):
        load_config("a\0b.toml")
    for text in ("run = [", "[run]\nsteps = " + "[" * 3000):
        with pytest.raises(GramianError, match="is not TOML"):
            load_config(written(tmp_path, text))


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "\ufeff[run]\nsteps = 77\n")).run.steps == 77


@pytest.mark.parametrize(
    "key, value", [("memory_budget", 0), ("memory_budget", "lots"), ("kfac_distributed_reduce", "none")]
)
def test_what_would_leave_curvature_nothing_or_let_processes_part_is_refused(key: str, value: int | str) -> None:
    with pytest.raises(GramianError, match=f"^kfac.{key}: .*expected"):
        parse_config({"kfac": {key: value}})
    parse_config({"kfac": {"memory_budget": "8GB", "kfac_distributed_reduce": "gather"}})


def test_curvature_of_private_data_needs_a_public_source() -> None:
    with pytest.raises(GramianError, match="kfac.public_files"):
        parse_config({"kfac": {}, "privacy": {"noise_multiplier": 1.0}})
    parse_config({"kfac": {"public_files": ["a.txt"]}, "privacy": {"noise_multiplier": 1.0}})


def test_the_hash_follows_what_decides_the_numbers_and_nothing_else() -> None:
    base = parse_config({})
    taught = parse_config({"teacher": {"path": "x"}})
    assert taught.hash != base.hash
    for section, key in RUN_ONLY:
        value = getattr(getattr(taught, section), key)
        other = {str: "whole" if key == "strategy" else "elsewhere", int: 20, bool: True, float: 0.5}[type(value)]
        told = {"teacher": {"path": "x"}}
        told.setdefault(section, {})[key] = other
        assert parse_config(told).hash == taught.hash
    assert parse_config({"run": {"seed": 5}}).hash != base.hash
    assert parse_config({"optimizer": {"lr": 5e-4}}).hash != base.hash


def test_options_of_other_programs_are_named_by_keys_that_exist() -> None:
    everywhere = {option.name for section in SECTIONS.values() for option in dataclasses.fields(section)}
    for name, here in FOREIGN_KEYS.items():
        assert name not in everywhere
        if not here.startswith("none: "):
            section, key = here.split(".")
            assert key in {option.name for option in dataclasses.fields(SECTIONS[section])}


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("eval_interval", "eval.every"),
        ("min_lr", "schedule.floor"),
        ("accumulation_steps", "data.micro_batch"),
        ("total_steps", "run.steps"),
        ("fused", "optimizer.implementation"),
        ("use_orig_params", "parallel.strategy"),
    ],
)
def test_options_of_other_programs_are_one_line_that_names_ours(name: str, here: str, tmp_path: Path) -> None:
    for text in (f"{name} = 1", f"[run]\n{name} = 1"):
        with pytest.raises(GramianError, match=rf"^(run\.)?{name}: is not a (section|key); expected {here}$"):
            load_config(written(tmp_path, text))
    with pytest.raises(GramianError, match=rf"^'{name}=1': expected {here}=…$"):
        load_config(written(tmp_path, ""), [f"{name}=1"])


def test_an_option_without_a_key_says_why_and_one_without_its_section_says_which() -> None:
    for section, name, here in (
        ("data", "pin_memory", "none: it always is where there is a GPU"),
        ("teacher", "use_cache", "none: a teacher's is always off"),
    ):
        with pytest.raises(GramianError, match=re.escape(f"{section}.{name}: is not a key; expected {here}")):
            parse_config({section: {name: 1}})
    assert override_of("lr") == "optimizer.lr=…" and override_of("nothing") == ""
    assert override_of("every") == "checkpoint.every=… or eval.every=…"


@pytest.mark.parametrize(
    "override, message",
    [
        ("teacher.path=x", 'optimizer.kind: "kfac" cannot see a teacher\'s loss; expected "adamw" or "sgd"'),
        (
            "privacy.noise_multiplier=1",
            'optimizer.kind: "kfac" takes its curvature from private data; expected "adamw"',
        ),
        (
            "kfac.kl_clip=1e-3",
            "kfac.kl_clip: is for natural gradients of another optimizer; expected update_freq, damping",
        ),
        ("kfac.memory_budget=8GB", "kfac.memory_budget: is for natural gradients of another optimizer"),
    ],
)
def test_what_the_optimizer_kfac_does_not_take_is_named(tmp_path: Path, override: str, message: str) -> None:
    path = written(tmp_path, "")
    with pytest.raises(GramianError, match=message):
        load_config(path, ["optimizer.kind=kfac", override])
    assert load_config(path, ["optimizer.kind=kfac", "kfac.update_freq=5", "kfac.damping=0.3"]).has_curvature


def test_every_option_of_kfac_is_a_key_and_those_that_came_later_are_not_in_the_hash_of_others(tmp_path: Path) -> None:
    names = set(inspect.signature(KFACNaturalGradient.__init__).parameters) - {"self", "seed", "process_group"}
    assert names <= {field.name for field in dataclasses.fields(KFACSection)}
    path = written(tmp_path, "[kfac]\n")
    plain, told = load_config(path), load_config(path, ["kfac.max_condition_number=100"])
    assert plain.hash != told.hash
    for section, key in ADDED_LATER:
        assert getattr(getattr(plain, section) or SECTIONS[section](), key) == getattr(SECTIONS[section](), key)


def test_the_paper_config_of_the_notes_is_a_run(tmp_path: Path) -> None:
    """Every option that the notes' configuration names."""
    config = load_config(
        written(
            tmp_path,
            """
            [kfac]
            damping = 1e-4
            max_condition_number = 1e6
            use_eigenvalue_correction = true
            update_freq = 10
            kfac_use_woodbury = true
            kfac_policy = "all"
            woodbury_store_device = "auto"
            woodbury_dtype = "fp16"
            kfac_distributed_reduce = "gram"
            kfac_eps = 1e-6
            """,
        )
    )
    kfac = build_curvature(config, torch.nn.Linear(2, 2))
    assert kfac is not None
    options = kfac.record()["options"]
    assert (options["damping"], options["woodbury_dtype"], options["kfac_eps"]) == (1e-4, "fp16", 1e-6)


def test_options_of_kfac_that_do_not_fit_together_are_named_by_their_key(tmp_path: Path) -> None:
    with pytest.raises(GramianError, match="^kfac.memory_budget: does not bound .*; expected one of the two"):
        load_config(written(tmp_path, '[kfac]\nekfac = true\ndamping_mode = "joint"\nmemory_budget = "8GB"\n'))
    config = load_config(written(tmp_path, "[kfac]\nekfac = true\n"))
    with pytest.raises(GramianError, match='^kfac.damping_mode: is "pi", but ekfac=True'):
        build_curvature(config, torch.nn.Linear(2, 2))
