"""The first contact with the package: the import is light and the public names are there."""

import subprocess
import sys

import pytest

import gramian
from tests.kit.fresh import run_fresh

HEAVY = ("torch._dynamo", "torch._inductor", "transformers", "opacus", "scipy", "hypothesis", "matplotlib")


def test_help_needs_neither_torch_nor_numpy():
    code = "import sys, gramian.cli as cli; cli.main(['--help']); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.xdist_group("fresh")
def test_using_a_public_name_loads_nothing_heavy():
    code = f"import sys, gramian; gramian.PrivacyEngine; print([m for m in {(*HEAVY, 'rich')!r} if m in sys.modules])"
    done = run_fresh(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.xdist_group("fresh")
@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.full)])
def test_deterministic_kernels_are_chosen_without_the_compiler_which_reads_the_choice_later(deterministic):
    code = f"""
import sys, torch
from gramian.train.loop.precision import set_deterministic
set_deterministic({deterministic})
before = "torch._inductor" in sys.modules
import torch._inductor.config as compiler
print([before, torch.are_deterministic_algorithms_enabled(), compiler.deterministic])
set_deterministic({not deterministic})
print([torch.are_deterministic_algorithms_enabled(), compiler.deterministic])
"""
    done = run_fresh(code)
    other = not deterministic
    assert done.stdout.split("\n")[:2] == [f"[False, {deterministic}, {deterministic}]", f"[{other}, {other}]"], (
        done.stderr
    )


def test_public_names_exist():
    assert {*gramian.__all__} <= {*dir(gramian)}
    for name in gramian.__all__:
        assert hasattr(gramian, name), name
    assert not hasattr(gramian, "nothing") and gramian.models.GPT


@pytest.mark.xdist_group("fresh")
def test_private_training_without_opacus_is_refused_before_a_step():
    code = """
import sys
sys.modules["opacus"] = None
import importlib.util
importlib.util.find_spec = lambda name, find=importlib.util.find_spec: None if name == "opacus" else find(name)
import gramian
gramian.KFACNaturalGradient()
try:
    gramian.PrivacyEngine()
except gramian.GramianError as problem:
    print(problem)
"""
    assert run_fresh(code).stdout == (
        "accountant: opacus, which computes epsilon, is not here; expected gramian[privacy] installed\n"
    )
