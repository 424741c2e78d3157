"""`gramian profile clipping | kfac | train [CONFIG.toml]`: measure on this machine what a feature costs in time and memory.

Also under torchrun.
"""

import argparse
from importlib import import_module
from pathlib import Path

from gramian.cli.command_errors import only_first_complains
from gramian.cli.config_arguments import check_target, positive_integer
from gramian.cli.profile.profile_sizes import SIZES

FOREIGN = {
    "clipping": ("compile", "reduce", "offload"),
    "kfac": ("mode", "algorithm", "iterations", "out", "compile"),
    "train": ("seq_lengths", "batch_size", *SIZES, "fsdp", "tp", "mode", "algorithm", "out", "reduce", "offload"),
}
"""{target: names of the arguments of `gramian profile` that belong to other targets only}."""
_SIZES = (
    "[CONFIG.toml [section.key=value ...]] [--seq-lengths T ...] [--batch-size B] [--layers L] [--width W] [--vocabulary V] "
    "[--cpu] [--fsdp] [--tp]"
)
USAGES = {
    "clipping": f"gramian profile clipping {_SIZES} [--mode auto|bookkeeping|keep|two_pass] "
    "[--algorithm auto|gram|direct] [--iterations N] [--json FILE] [--out DIR]",
    "kfac": f"gramian profile kfac {_SIZES} [--reduce gram|gather|dense|none] [--offload] [--json FILE]",
    "train": "gramian profile train [CONFIG.toml] [section.key=value ...] [--iterations N] [--compile] [--cpu] [--json FILE]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gramian profile` to a parser."""
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help=f"what to measure: {', '.join(USAGES)}")
    add("config", nargs="?", metavar="CONFIG.toml", help="its model, length and batch (default: the reference GPT)")
    add("overrides", nargs="*", metavar="section.key=value", help="replace values of the config")
    add("--seq-lengths", type=positive_integer, nargs="+", metavar="T", help="tokens per sequence")
    add("--batch-size", type=positive_integer, metavar="B", help="sequences per step, and process")
    add("--layers", type=positive_integer, metavar="L", help="blocks of the reference GPT")
    add("--width", type=positive_integer, metavar="W", help="of its residual stream")
    add("--vocabulary", type=positive_integer, metavar="V", help="token ids")
    add("--cpu", action="store_true", help="stay on the CPU if there is a GPU")
    add("--fsdp", action="store_true", help="clipping and kfac under torchrun: FSDP2 in place of DDP")
    add("--tp", action="store_true", help="the same: with tensor-parallel linears; with --fsdp a 2-D mesh")
    add("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    clipping = parser.add_argument_group("clipping", "GRAMIAN_PROFILE=1 times any private run of yours")
    clipping.add_argument("--mode", metavar="M", help="auto (default), bookkeeping, keep or two_pass")
    clipping.add_argument("--algorithm", metavar="A", help="norms of linear layers: auto (default), gram or direct")
    clipping.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of clipping.json and clipping.svg (default: runs/profile)"
    )
    kfac = parser.add_argument_group("kfac", "under torchrun also the bytes that processes send each other")
    kfac.add_argument("--reduce", metavar="R", help="how their sums are joined: gram (default), gather, dense or none")
    kfac.add_argument("--offload", action="store_true", help="also with factors that are stored on the CPU")
    train = parser.add_argument_group("train", "the config decides sizes and strategy")
    train.add_argument("--compile", action="store_true", help="measure compile.mode on a CPU too")
    both = parser.add_argument_group("clipping and train")
    both.add_argument(
        "--iterations", type=positive_integer, metavar="N", help="timed steps of each kind (default and least: 10)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the profile that TARGET names; only the first process prints and writes. Returns the exit code."""
    check_target("profile", arguments, USAGES, FOREIGN)
    target = import_module(f"gramian.cli.profile.profile_{arguments.target}")
    return only_first_complains(lambda: int(target.run(arguments)))
