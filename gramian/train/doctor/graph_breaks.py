"""Where `torch.compile` leaves its graph: each break is Python in every step, and nothing is fused across it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramian.train.config.config import CompileSection
from gramian.train.doctor.check import Check
from gramian.train.loop.objective import logits_of
from gramian.train.loop.precision import Numbers

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
"""(part of the compiler's reason, in lower case; what to do); the first that fits."""
ANY_FIX = "move it out of forward"


@dataclass(frozen=True)
class Break:
    """One place where a graph ends."""

    file: str
    line: int
    reason: str
    """Of the compiler, in one line."""
    fix: str

    def __str__(self) -> str:
        """As people click on it."""
        return f"{self.file}:{self.line}: {self.reason}; {self.fix}"


def compiled(options: CompileSection, model: nn.Module, rows: dict[str, Tensor], numbers: Numbers) -> Check:
    """Breaks of a model's graph, where a run compiles it; else none are looked for, because none will be there.

    Args:
        options: of the config.
        model: not compiled.
        rows: "tokens" [B, T], and "documents" where they are kept apart.
        numbers: of the run.
    """
    if options.mode == "off":
        return Check("graph breaks", "not compiled", "-", True)
    breaks = graph_breaks(model, rows["tokens"], rows.get("documents"), numbers)
    hint = "" if not breaks else f"{breaks[0].fix} (line {breaks[0].line})"
    details = tuple(str(found) for found in breaks)
    return Check("graph breaks", f"{len(breaks)}", "0", not breaks, hint, len(breaks), details)


def graph_breaks(
    model: nn.Module, tokens_BT: Tensor, documents_BT: Tensor | None, numbers: Numbers
) -> tuple[Break, ...]:
    """Trace a forward as `torch.compile` does, without generating code; one entry for each line of the source.

    Cost: a trace, seconds for a large model. Functions compiled before are compiled anew afterwards.
    """
    from torch._dynamo.utils import graph_break_reasons

    with _from_scratch():
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
def _from_scratch() -> Iterator[None]:
    """The compiler forgets what it knows, before and after, and does not log what is told here."""
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
    """Its first line, and its explanation."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    told = f"{lines[0]} ({explained})" if explained else (lines or ["unknown"])[0]
    return told if len(told) <= 200 else f"{told[:199]}…"


def _fix(reason: str) -> str:
    told = reason.partition("Developer debug context")[0].lower()
    return next((fix for part, fix in FIXES if part in told), ANY_FIX)
