"""Find where `torch.compile` breaks the graph: each break runs Python in every step, and nothing is fused across it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import logits_of
from gramian.train.loop.precision import Precision

FIXES = (
    ("tensor.item()", "keep the number on the device: .item() waits for it; read it after the step"),
    ("tolist", "keep the numbers on the device: .tolist() waits for them"),
    ("`print`", "remove print, or keep it behind torch.compiler.is_compiling()"),
    ("logging", "remove the log line, or keep it behind torch.compiler.is_compiling()"),
    ("warn", "remove the warning, or give it in __init__"),
    ("data-dependent branching", "torch.where in place of a branch on values, or torch.cond"),
    ("generic_jump", "torch.where in place of a branch on values, or torch.cond"),
    ("data-dependent", "torch.where in place of a branch on values, or torch.cond"),
    ("numpy", "write it in torch: NumPy leaves the graph, and the device"),
    ("generator", "write it in torch: NumPy leaves the graph, and the device"),
    ("dynamic shape", "a mask in place of a selection whose size depends on values"),
    ("graph_break()", "remove torch._dynamo.graph_break()"),
    ("disable", "remove torch.compiler.disable, or call the function outside the model"),
    ("builtin", "do it outside forward: the compiler cannot see into what is not Python"),
)
"""Advice for graph breaks: (text in the compiler's reason, in lower case; what to change). The first match counts."""
ANY_FIX = "move it out of forward"


@dataclass(frozen=True)
class Break:
    """One source line where `torch.compile` ends a graph, and how to avoid it."""

    file: str
    line: int
    reason: str
    """The compiler's reason for the break, in one line."""
    fix: str

    def __str__(self) -> str:
        """The break as "file:line: reason; fix"."""
        return f"{self.file}:{self.line}: {self.reason}; {self.fix}"


def graph_breaks(run: ExaminedRun) -> list[Check]:
    """List the graph breaks of the model, if the run compiles it."""
    if run.config.compile.mode == "off":
        return [Check("graph breaks", "not compiled", "-", True)]
    rows = {name: values[:2] for name, values in run.rows.items()}
    breaks = find_breaks(run.trial_model, rows["tokens"], rows.get("documents"), run.numbers)
    hint = "" if not breaks else f"{breaks[0].fix} (line {breaks[0].line})"
    details = tuple(str(found) for found in breaks)
    return [Check("graph breaks", f"{len(breaks)}", "0", not breaks, hint, len(breaks), details)]


def find_breaks(
    model: nn.Module, tokens_BT: Tensor, documents_BT: Tensor | None, numbers: Precision
) -> tuple[Break, ...]:
    """Trace a model's forward pass as `torch.compile` does, without generating code; returns one break per source line.

    Cost: a trace, seconds for a large model. Functions compiled before are compiled again afterwards.
    """
    from torch._dynamo.utils import graph_break_reasons

    with _fresh_compiler():
        traced = torch.compile(logits_of, backend="eager")
        with numbers.autocast():
            traced(model, tokens_BT, documents_BT)
        reasons = [(reason.user_stack, reason.reason) for reason in graph_break_reasons]
    found: dict[tuple[str, int], Break] = {}
    for stack, reason in reasons:
        file, line = (stack[-1].filename, stack[-1].lineno or 0) if stack else ("?", 0)
        found.setdefault((file, line), Break(file, line, _one_line(reason), _fix(reason)))
    return tuple(found.values())


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Context manager that resets torch's compiler before and after the body, and suppresses its log lines on breaks."""
    import torch._dynamo

    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    torch._dynamo.reset()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        torch._dynamo.reset()


def _one_line(reason: str) -> str:
    """Return the first line of the compiler's reason and its explanation in one line of at most 200 characters."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    line = f"{lines[0]} ({explained})" if explained else (lines or ["unknown"])[0]
    return line if len(line) <= 200 else f"{line[:199]}…"


def _fix(reason: str) -> str:
    searched = reason.partition("Developer debug context")[0].lower()
    return next((fix for part, fix in FIXES if part in searched), ANY_FIX)
