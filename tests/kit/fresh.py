"""Programs in an interpreter that has imported torch and nothing else: what else they load can be seen.

One such interpreter is started; each program runs in a fork of it, which costs a small part of another start. Tests that
use it share the group ``fresh`` of xdist, so that one worker has it.
"""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import json, os, sys, torch
for line in sys.stdin:
    program, arguments, folder = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv[1:] = arguments
        exec(program, {"__name__": "__main__"})
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_fresh(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -c program *arguments`` does, where torch is already loaded."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([program, arguments, folder]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess([program, *arguments], status, out, err)


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server
