"""What gramian makes of a program: exact, refused, or wrong.

Usage::

    outcome(17)                   # of per_sample_norms
    private_outcome(17)           # of private training
    print(table(tally(outcome(seed) for seed in range(300))))
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import gramian
from gramian.core.errors import GramianError
from tests.kit.private import attach
from tests.kit.programs.grammar import UNUSUAL, Root, reduced
from tests.kit.programs.program import Batch, Program
from tests.kit.programs.truth import Truth, truth

Kind = Literal["exact", "refused", "wrong"]
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
"""Of norms and clipped sums, relative to the largest one: a norm from products has the square root of the rounding error."""
REMOVED = 3
"""Samples whose removal is tried, beside the longest record."""


@dataclass(frozen=True)
class Outcome:
    """One program, one result."""

    program: Program
    kind: Kind
    reason: str
    """The error message, or what is wrong."""
    separable: bool
    error: float = 0.0
    """Largest relative error of a norm; for private training, how far the removal of a sample moves the sum over C."""

    @property
    def must_be_exact(self) -> bool:
        """True if the samples are independent and every layer sees rows as the contract wants them."""
        return self.separable and self.program.draft.sample_major

    @property
    def right(self) -> bool:
        """Exact, or refused for a reason."""
        return self.kind == "exact" or (self.kind == "refused" and not self.must_be_exact)

    def __str__(self) -> str:
        """One line to reproduce it by."""
        facts = f"B={self.program.samples} {'separable' if self.separable else 'coupled'}"
        return f"seed {self.program.seed}: {self.kind}, {facts}, {' > '.join(self.program.draft.used)}: {self.reason}"


def outcome(program: Program | int) -> Outcome:
    """Norms of single samples against the loop; loss, gradients and random state against an untapped root."""
    program = Program(program) if isinstance(program, int) else program
    facts, batch = truth(program), program.batch(range(program.samples))
    expected, untapped = facts.g_BP.norm(dim=1), program.root()
    root = program.root()

    def captured() -> Tensor:
        with gramian.per_sample_norms(root, loss_reduction=program.draft.reduction) as norms:
            loss = program.loss(root, batch)
            loss.backward()
        state = torch.get_rng_state()
        terms_B, scalar = program.forward(untapped, batch)
        plain = reduced(terms_B, program.draft.reduction) + scalar
        plain.backward()
        terms = reduced(1 + terms_B.abs(), program.draft.reduction) + scalar.abs()  # each is a sum of sines
        if not _same(loss, plain, program.draft.rounds, terms):
            raise Wrong(f"the loss is {float(loss):.6g}, untapped {float(plain):.6g}")
        # of a product with a shared row, gradients are sums of terms that cancel
        largest = 100 * torch.stack([q.grad.abs().max() for q in untapped.parameters() if q.grad is not None]).max()
        for (name, p), q in zip(root.named_parameters(), untapped.parameters(), strict=True):
            if not _same(p.grad, q.grad, program.draft.rounds, largest):
                raise Wrong(f"the gradient of {name} is not the untapped one")
        if not torch.equal(state, torch.get_rng_state()):
            raise Wrong("the random state is not the untapped one")
        for (name, b), c in zip(root.named_buffers(), untapped.buffers(), strict=True):
            if not torch.equal(b, c):
                raise Wrong(f"the buffer {name} is not the untapped one")
        return norms.values

    def judge(values: Tensor) -> tuple[str, float]:
        if values.shape != expected.shape:
            return f"{list(values.shape)} norms for {program.samples} samples", float("inf")
        error = _relative(values, expected)
        return ("norms are not the loop's" if error > TOLERANCE[program.draft.dtype] else ""), error

    return _outcome(program, facts, captured, judge, root)


def private_outcome(program: Program | int) -> Outcome:
    """The private sum against the loop's, and against itself with a sample removed."""
    program = Program(program) if isinstance(program, int) else program
    facts, root = truth(program, collate=True), program.root()
    norms_B = facts.g_BP.norm(dim=1)
    bound = float(norms_B.median()) or 1.0
    expected = ((bound / norms_B.clamp(min=bound))[:, None] * facts.g_BP).sum(0)

    def captured() -> Tensor:
        engine, sums = gramian.PrivacyEngine(), list[Tensor]()
        loader: DataLoader[Any] = DataLoader(
            range(program.samples),
            batch_size=program.samples,
            collate_fn=lambda records: program.batch(records, collate=True),
        )
        _, _, batches = attach(
            engine, root, loader,
            optimizer=torch.optim.SGD([p for p in root.parameters() if p.requires_grad], lr=1.0),
            noise_multiplier=0.0, max_grad_norm=bound, loss_reduction=program.draft.reduction,
        )  # fmt: skip
        try:
            sums += [_private_sum(program, root, batch) for batch in batches]
            some = {program.longest, *range(0, program.samples, -(-program.samples // REMOVED))}
            for i in set() if program.is_random else some:
                rest = [j for j in range(program.samples) if j != i]
                sums.append(_private_sum(program, root, program.batch(rest, collate=True)))
        except GramianError:
            wrong = judge(torch.stack(sums))[0] if sums else ""
            if wrong:
                raise Wrong(f"{wrong}, and a later batch is refused") from None
            raise
        finally:
            engine.detach()
        return torch.stack(sums)

    def judge(sums: Tensor) -> tuple[str, float]:
        allowed = TOLERANCE[program.draft.dtype]
        moved = float(((sums[1:] - sums[0]).norm(dim=1) / bound).max()) if len(sums) > 1 else 0.0
        if moved > 1 + allowed:
            return f"removing a sample moves the private sum by {moved:.6g} C", moved
        off = float((sums[0] - expected).norm() / (bound * program.samples))
        return ("the private sum is not the loop's" if off > allowed else ""), moved

    return _outcome(program, facts, captured, judge, root)


class Wrong(Exception):
    """A capture that changed what it should only look at."""


def _outcome(
    program: Program,
    facts: Truth,
    captured: Callable[[], Tensor],
    judge: Callable[[Tensor], tuple[str, float]],
    root: Root,
) -> Outcome:
    """Run a capture and judge its result."""
    error = 0.0
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            reason, error = judge(captured())
        except GramianError as refusal:
            reason = str(refusal)
            if _names_a_part(reason, root):
                return Outcome(program, "refused", reason, facts.separable)
            reason = f"refused without the name of a layer in one line: {reason}"
        except Exception as other:
            reason = str(other) if isinstance(other, Wrong) else f"raises {type(other).__name__}: {other}"
            reason = reason.partition("\n")[0]
    if not reason and not facts.separable and facts.shown:
        reason = "accepted, although samples depend on each other"
    return Outcome(program, "wrong" if reason else "exact", reason, facts.separable, error)


def _private_sum(program: Program, root: Root, batch: Batch) -> Tensor:
    """What a backward leaves in `p.grad`: [P], float64."""
    root.zero_grad()
    program.loss(root, batch).backward()
    trained = [p for p in root.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).double().flatten() for p in trained])


def _names_a_part(message: str, root: Root) -> bool:
    """True for one line that names a layer, the model, or what it returns."""
    parts = [*root.named_modules(), *root.named_parameters()]
    names = [name for name, _ in parts if name] + ["model", "output", "loss"]
    return "\n" not in message and any(name in message for name in names)


def _relative(values: Tensor, expected: Tensor) -> float:
    """Largest difference, over the largest norm of either."""
    return float((values.double() - expected).abs().max() / torch.cat([values, expected]).max().clamp(min=1e-300))


def _same(a: Tensor | None, b: Tensor | None, rounds: bool, terms: Tensor | None = None) -> bool:
    """Equal bit for bit, or up to rounding of the largest value, or of terms that cancel where these are given.

    Terms are sines of activations that a product may have made large, so rounding before them counts some times.
    """
    if a is None or b is None:
        return a is b
    largest = (b if terms is None else terms).abs().max()
    return torch.equal(a, b) or (rounds and bool((a - b).abs().max() <= ROUNDING * torch.finfo(a.dtype).eps * largest))


ROUNDING = 512
"""Rounding errors of the largest term by which a loss may differ where a shared row has another kernel as several."""
KINDS = ("exact", "refused", "needless", "wrong")
"""Columns of the table; "needless" is a refusal of a program that must be exact."""
Tally = dict[str, dict[str, float]]
"""{production: {kind: programs, "worst": largest error of a wrong one}}, and all programs under "all"."""


def tally(outcomes: Iterable[Outcome]) -> Tally:
    """Count programs by production; those with unusual productions count for these alone."""
    found: Tally = {}
    for one in outcomes:
        kind = "needless" if one.kind == "refused" and not one.right else one.kind
        for name in ["all", *([name for name in one.program.used if name in UNUSUAL] or one.program.used)]:
            worst = one.error if kind == "wrong" else 0.0
            found = merged(found, {name: {kind: 1, "worst": worst}})
    return found


def merged(a: Tally, b: Tally) -> Tally:
    """Both tallies together."""
    out = {name: dict(row) for name, row in a.items()}
    for name, row in b.items():
        here = out.setdefault(name, {})
        for column, value in row.items():
            both = (here.get(column, 0), value)
            here[column] = max(both) if column == "worst" else sum(both)
    return out


def table(found: Tally) -> str:
    """A line for each production, most wrong programs first."""
    lines = [f"{'production':26}" + "".join(f"{kind:>10}" for kind in (*KINDS, "worst"))]
    for name, row in sorted(found.items(), key=lambda pair: (-pair[1].get("wrong", 0), pair[0])):
        counts = "".join(f"{row.get(kind, 0):10.0f}" for kind in KINDS)
        lines.append(f"{name:26}{counts}{row.get('worst', 0):10.2g}")
    return "\n".join(lines)
