"""What `gramian.check` finds out about a user's model: a row for each kind of layer, a row for each claim, and their table."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

Verdict = Literal[
    "exact", "approximated", "coupled", "refused", "wrong", "failed", "not trained", "not examined", "note"
]
"""Coupled: samples have no gradients of their own; refused: gramian raises an error; wrong: it computes other numbers than the
reference; failed: the user's own code raised one."""
BAD = ("coupled", "refused", "wrong", "failed")
STYLES = {"exact": "green", "approximated": "yellow"} | dict.fromkeys(BAD, "bold red")
KFAC_NAMES = {"kronecker": "Kronecker", "block": "exact block", "diagonal": "diagonal", "none": "none"}
"""{approximation of a parameter's Fisher: its name in the table}."""


@dataclass(frozen=True)
class LayerGroup:
    """All layers of one class: which formula computes their per-sample gradients, and whether it is exact here."""

    layers: str
    """Name of the class."""
    count: int
    formula: str
    """Kind of the site; "generic": `torch.func` on the layer's own forward, whatever it computes."""
    parameters: int
    """Number of trained entries; a tied weight counts where it comes first, so that a group of tied weights alone has 0."""
    frozen: int
    verdict: Verdict
    error: float | None = None
    """Largest error of a parameter's clipped sum, relative to its size and a tenth of the total; None: not measured."""
    kfac: dict[str, int] = field(default_factory=dict)
    """{approximation of the Fisher, a key of `KFAC_NAMES`: number of trained entries}, also without entries of tied weights;
    empty if K-FAC was not examined."""


@dataclass(frozen=True)
class Finding:
    """One claim about the model: what was found, and what to change if it is bad."""

    subject: str
    verdict: Verdict
    text: str
    change: str = ""


@dataclass(frozen=True)
class ModelCheck:
    """The report of `gramian.check`: `print(report)` is its table, `report.ok` its verdict, `report.to_dict()` its JSON."""

    layers: tuple[LayerGroup, ...]
    findings: tuple[Finding, ...]
    samples: int
    """Number of samples of the batch that were used."""
    seconds: float

    @property
    def ok(self) -> bool:
        """True if nothing is coupled, refused, wrong or failed; approximations by design and frozen parameters are ok."""
        return not self.bad

    @property
    def bad(self) -> list[str]:
        """Names of the findings and classes of layers with such a verdict."""
        rows = [(f.subject, f.verdict) for f in self.findings] + [(g.layers, g.verdict) for g in self.layers]
        return list(dict.fromkeys(name for name, verdict in rows if verdict in BAD))

    def finding(self, subject: str) -> Finding:
        """The finding of this subject, such as "private sum"; a KeyError if there is none."""
        return {found.subject: found for found in self.findings}[subject]

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON-able dict."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        """The tables as plain text, as wide as the terminal."""
        from rich.console import Console

        out = StringIO()
        Console(file=out, highlight=False, width=Console().width).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        """Yield the table of layers, the table of findings and the last line, for a console of rich."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        tables = [Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)) for _ in range(2)]
        for heading in ("layers", "formula", "parameters", "per sample", "K-FAC"):
            tables[0].add_column(heading, justify="right" if heading == "parameters" else "left")
        for group in self.layers:
            name = group.layers if group.count == 1 else f"{group.layers} ×{group.count}"
            parts = ((group.parameters, ""), (group.frozen, " frozen"))
            sizes = [f"{entries:,}{word}" for entries, word in parts if entries]
            size, kfac = " + ".join(sizes) or "tied", ", ".join(KFAC_NAMES[kind] for kind in group.kfac)
            tables[0].add_row(Text(name), group.formula, size, _verdict(group.verdict), kfac)
        for heading in ("claim", "verdict", "what was found"):
            tables[1].add_column(heading, no_wrap=heading == "verdict")
        for found in self.findings:
            text = f"{found.text}\nexpected: {found.change}" if found.change else found.text
            tables[1].add_row(found.subject, _verdict(found.verdict), Text(text))
        yield from [table for table in tables if table.row_count]
        outcome = "nothing is refused or wrong" if self.ok else f"not exact here: {', '.join(self.bad)}"
        yield Text(f"{outcome} ({self.samples} samples, {self.seconds:.1f} s)")


def _verdict(verdict: Verdict) -> Any:
    from rich.text import Text

    return Text("" if verdict == "note" else verdict, style=STYLES.get(verdict, ""))
