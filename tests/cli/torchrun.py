"""A command on several processes, as a user starts it."""

import os
import subprocess
import sys

from tests.kit.waiting import PATIENCE

SETS_DIFFER = 'PYTHONHASHSEED=$RANK exec "$0" "$@"'
"""The order of a set of strings is another one on every rank, and the same in every run."""


def on_processes(argv: list[str], prepare: str = "", size: int = 2) -> subprocess.CompletedProcess[str]:
    """`gramian *argv` under torchrun on the CPU; every process says on standard error with what it ends.

    Args:
        argv: of the command.
        prepare: code that runs before it, with `rank` in its names.
        size: processes.
    """
    script = (
        "import os, sys; from gramian.cli import main\n"
        f"rank = int(os.environ['RANK'])\n{prepare}\n"
        f"status = main({argv!r})\n"
        "print(f'process {rank} ends with {status}', file=sys.stderr)\nsys.exit(status)"
    )
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={size}",
        "--no-python",
    ]
    return subprocess.run(
        [*launcher, "sh", "-c", SETS_DIFFER, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
