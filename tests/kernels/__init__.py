"""Kernels on a CPU: calls that Triton's interpreter answers, and tensors laid out so that a wrong read shows.

Triton decides at its import whether kernels are interpreted, and any other test of this process may have imported it. So
the calls are answered by one process of their own, started by the first of them, where TRITON_INTERPRET is set from the
beginning. Arguments and results travel by pickle, strides and what lies between them included. The interpreter reads
bfloat16 as integers in a product of matrices: such kernels are given float16 and float32 here, and bfloat16 on a GPU.
"""

import functools
import os
import pickle
import select
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kit.waiting import PATIENCE

ROOT = Path(__file__).parents[2]

LAYOUTS = ("contiguous", "amid nan", "tokens first", "columns apart")


@functools.cache
def _interpreter() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from tests.kernels import answer_calls; answer_calls()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )


def interpreted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs) where kernels are interpreted."""
    process = _interpreter()
    pickle.dump((function, args, kwargs), process.stdin)
    process.stdin.flush()
    try:  # a kernel that writes where it should not may leave a process that never answers
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            process.kill()
        result, failure = pickle.load(process.stdout)
    except EOFError:
        _interpreter.cache_clear()
        raise RuntimeError(f"no answer from the interpreter's process, which ended with {process.wait()}") from None
    if failure:
        raise RuntimeError(failure)
    return result


def answer_calls() -> None:
    """The other side of `interpreted`, until its input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    while True:
        try:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (function(*args, **kwargs), "")
        except Exception:
            answer = (None, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Standard normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another place: every gap holds NaN, and so does what comes before and after."""
    if layout == "contiguous":
        return x.contiguous()
    if layout == "tokens first":
        return x.movedim(0, -2).contiguous().movedim(-2, 0)
    step = 2 if layout == "columns apart" else 1
    around = x.new_full([size + 3 for size in x.shape[:-1]] + [step * x.shape[-1] + 5], float("nan"))
    view = around[tuple(slice(1, 1 + size) for size in x.shape[:-1])][..., 3 : 3 + step * x.shape[-1] : step]
    return view.copy_(x)
