"""A command on several processes, as a user starts it."""

import os
import subprocess
import sys


def on_processes(
    argv: list[str], prepare: str = "", size: int = 2, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """`gramian *argv` under torchrun on the CPU; every process says on standard error with what it ends.

    Args:
        argv: of the command.
        prepare: code that runs before it, with `rank` in its names.
        size: processes.
        timeout: seconds.
    """
    script = (
        "import os, sys; from gramian.cli import main\n"
        f"rank = int(os.environ['RANK'])\n{prepare}\n"
        f"status = main({argv!r})\n"
        "print(f'process {rank} ends with {status}', file=sys.stderr)\nsys.exit(status)"
    )
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}", "--no-python"]
    return subprocess.run(
        [*command, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
