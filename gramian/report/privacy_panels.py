"""Panels of private runs: ε over steps, what ε does not cover, and per-sample gradient norms before and after clipping."""

from collections.abc import Mapping, Sequence
from typing import Any

from gramian.report.chart_specs import Reference, norm_heat_map
from gramian.report.panel import RUN, Panel, PanelTable
from gramian.report.run_data import Line, RunData, number
from gramian.report.step_curves import field, step_panel

SECTION = "Privacy"
GROUPS = 60
"""Largest number of columns of a heat map over steps; the histograms of neighbouring steps are added up."""


def privacy_panels(runs: Sequence[RunData], most: int) -> list[Panel]:
    """All panels of private runs that have data."""
    private = [run for run in runs if run.is_private]
    if not private:
        return []
    targets = []
    for run in private:
        target = number(run.option("privacy", "target_epsilon"))
        if target is not None:
            targets.append(Reference(run.name, "target ε", target))
    epsilon = step_panel(
        runs,
        most,
        SECTION,
        "ε over steps",
        {"ε": field("epsilon")},
        axis="ε",
        note=" ".join(_statement(run, len(runs) > 1) for run in private),
        references=targets,
    )
    found = [*([epsilon] if epsilon else [])]
    for run in private:
        found += _norm_panels(run, len(runs) > 1)
    return [*found, _mechanism(private, len(runs) > 1), *_audit(private, len(runs) > 1)]


def validity(run: RunData) -> str:
    """Whether the ε of a private run holds, from record.json: "valid as accounted", "not valid: reasons" or "not recorded"."""
    privacy = run.record.get("privacy")
    if not isinstance(privacy, Mapping):
        return "validity not recorded"
    reasons = privacy.get("epsilon_not_valid_because")
    marked = any(line.get("epsilon_not_valid") for line in run.lines)
    if privacy.get("epsilon") == "as accounted" and not reasons and not marked:
        return "valid as accounted"
    listed = "; ".join(map(str, reasons)) if isinstance(reasons, list) and reasons else "no reason is recorded"
    return f"not valid: {listed}"


def last_epsilon(run: RunData) -> float | None:
    """ε of the last evaluation of a private run; None if it has none."""
    found = [value for line in run.lines if (value := number(line.get("epsilon"))) is not None]
    return found[-1] if found else None


def _statement(run: RunData, several: bool) -> str:
    name = f"{run.name}: " if several else ""
    insecure = run.option("privacy", "insecure_reproducible") is True
    warning = " The key follows from the seed (insecure_reproducible): there is no privacy." if insecure else ""
    recorded = run.record.get("privacy")
    unit = recorded.get("unit", "one window") if isinstance(recorded, Mapping) else "one window"
    return f"{name}ε is {validity(run)}, with δ = {run.option('privacy', 'delta')}, for {unit} of text.{warning}"


def _mechanism(private: Sequence[RunData], several: bool) -> Panel:
    """Table of the DP mechanism of each private run, and of the numbers that ε does not cover."""
    rows = []
    for run in private:
        recorded = run.record.get("privacy")
        facts = recorded if isinstance(recorded, Mapping) else {}
        shown = {
            "ε at the last evaluation": last_epsilon(run),
            "ε is": validity(run),
            "δ": run.option("privacy", "delta"),
            "noise multiplier": facts.get("noise_multiplier"),
            "noise": _noise(facts.get("noise")),
            "clip norm": run.option("privacy", "max_grad_norm"),
            "sample rate": facts.get("sample_rate"),
            "unit of privacy": facts.get("unit"),
            "decisions follow": facts.get("decisions"),
            "not covered by ε": ", ".join(sorted(run.not_covered)) or None,
        }
        rows += [{RUN: run.name, "what": what, "value": value} for what, value in shown.items() if value is not None]
    note = "Numbers listed as not covered are computed on private data without noise: do not publish them with ε."
    return Panel(SECTION, "What ε covers", PanelTable((*([RUN] if several else []), "what", "value"), rows), note=note)


def _noise(noise: Any) -> str | None:
    """What the record says of correlated noise; None for independent noise, and for records without it."""
    if not isinstance(noise, Mapping) or "bands" not in noise:
        return None
    error, plain = number(noise.get("prefix error")), number(noise.get("of independent noise"))
    says = f"{noise.get('name')}, {noise['bands']} bands, {noise.get('groups')} groups of records"
    return says if error is None or plain is None else f"{says}; in sums {error:.3g} σC, independent {plain:.3g} σC"


def _audit(private: Sequence[RunData], several: bool) -> list[Panel]:
    """Table of what the audits of private runs found, and of their receipts; none without a receipt."""
    rows, labelled = [], []
    for run in private:
        receipt = run.receipt or {}
        audit = receipt.get("audit")
        findings = audit.get("findings") if isinstance(audit, Mapping) else None
        for name, finding in findings.items() if isinstance(findings, Mapping) else ():
            if isinstance(finding, Mapping):
                verdict = "ok" if finding.get("passed") is True else "FAILED"
                label = f" ({finding['label']})" if finding.get("label") else ""
                rows.append({RUN: run.name, "what": name, "result": verdict, "value": f"{finding.get('says')}{label}"})
                labelled += [run.name] if label else []
        ledger, weights = receipt.get("ledger"), receipt.get("weights")
        signed = {
            "releases in the ledger": ledger.get("releases") if isinstance(ledger, Mapping) else None,
            "hash of the ledger": ledger.get("head") if isinstance(ledger, Mapping) else None,
            "SHA-256 of the weights": weights.get("sha256") if isinstance(weights, Mapping) else None,
            "ε for all of them": receipt.get("epsilon"),
            "public key": receipt.get("public_key"),
        }
        rows += [
            {RUN: run.name, "what": what, "result": "signed", "value": value}
            for what, value in signed.items()
            if isinstance(value, str | int | float)
        ]
    if not rows:
        return []
    note = (
        "From receipt.json, whose signature gramian audit --verify checks, not this page. It proves the file unaltered, not "
        "the run honest; passed checks do not prove privacy."
    )
    columns = (*([RUN] if several else []), "what", "result", "value")
    return [
        Panel(
            SECTION,
            "Audit and receipt",
            PanelTable(columns, rows),
            note=note,
            not_covered=tuple(dict.fromkeys(labelled)),
        )
    ]


# ---- per-sample norms ------------------------------------------------------------------------------------------------


def _norm_panels(run: RunData, several: bool) -> list[Panel]:
    """Heat maps of the histograms of per-sample norms before and after clipping; none if the run did not log them."""
    lines = [
        line for place, line in enumerate(run.lines) if place not in run.taken_back and _histogram(line) is not None
    ]
    rows = _norm_rows(lines) if lines else []
    if not rows:  # Poisson draws may all have been empty
        return []
    clip_norm = number(lines[0]["sample_norms"]["clip_norm"]) or 1.0
    name = f", {run.name}" if several else ""
    found = []
    for when in ("before", "after"):
        value = f"share {when} clipping"
        columns = ("from step", "to step", "norm from", "norm to", f"samples {when} clipping", value)
        note = f"Each sample's gradient is scaled down to the clip norm {clip_norm:g}." if when == "after" else ""
        title = f"Per-sample gradient norms {when} clipping{name}"
        shown = [row for row in rows if row[value]]
        spec = norm_heat_map(
            value, clip_norm, min(row["norm from"] for row in rows), max(row["norm to"] for row in rows)
        )
        found.append(Panel(SECTION, title, PanelTable(columns, shown), spec, (), note, (run.name,), run.name))
    return found


def _histogram(line: Line) -> list[int] | None:
    """The counts of a line's histogram of norms; None if it has none, or one that is damaged."""
    norms = line.get("sample_norms")
    if not isinstance(norms, Mapping) or any(
        number(norms.get(key)) is None for key in ("first_edge", "ratio", "clip_norm")
    ):
        return None
    counts = norms.get("counts")
    fine = isinstance(counts, list) and len(counts) > 3 and all(isinstance(count, int) for count in counts)
    return counts if fine else None


def _norm_rows(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Rows of the heat maps: for each group of steps and each bin the samples in it, and their share, before and after.

    Clipping scales a norm above C to C, so that all counts above C move into the bin that ends at C; the others stay.
    """
    shape = lines[0]["sample_norms"]
    lines = [line for line in lines if len(line["sample_norms"]["counts"]) == len(shape["counts"])]
    first, ratio, bins = float(shape["first_edge"]), float(shape["ratio"]), len(shape["counts"])
    edges = [first * ratio**place for place in range(-1, bins)]  # the outer bins are drawn as wide as the others
    rows, start, width = [], 0, -(-len(lines) // GROUPS)
    step_before = 0
    while start < len(lines):
        group = lines[start : start + width]
        counts = [sum(values) for values in zip(*(line["sample_norms"]["counts"] for line in group), strict=True)]
        after = [*counts[: bins // 2], *([0] * (bins - bins // 2))]
        after[bins // 2 - 1] += sum(counts[bins // 2 :])
        total, last_step = max(1, sum(counts)), int(group[-1]["step"])
        for place in range(bins):
            if counts[place] or after[place]:
                rows.append(
                    {
                        "from step": step_before,
                        "to step": last_step,
                        "norm from": edges[place],
                        "norm to": edges[place + 1],
                        "samples before clipping": counts[place],
                        "samples after clipping": after[place],
                        "share before clipping": counts[place] / total,
                        "share after clipping": after[place] / total,
                    }
                )
        step_before, start = last_step, start + width
    return rows
