"""Write a Methods paragraph and a reproducibility checklist from the recorded numbers of a curvature analysis alone.

The checklist of K-FAC and the texts of its numbers are also used for training runs (`gramian.report.run_methods`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gramian.analysis.layer_places import kind, kronecker_layers
from gramian.core.durable_files import replace_text
from gramian.curvature.blocks.damping import DAMPING_MODES
from gramian.curvature.persist.refresh_summary import clip_share, clips_of, policy_of

MISSING = "not recorded"
FISHERS = {
    "empirical": "the labels of the data (empirical Fisher)",
    "mc": "labels drawn from the model, one per position (Monte Carlo Fisher)",
    "true": "the exact softmax Fisher of the head, and labels drawn from the model for all other layers",
}


def write_methods(result: Mapping[str, Any], path: str | Path) -> None:
    """Write the Methods page of a result of `analyse`, or of its curvature.json, as in `write_methods(result, "methods.md")`.

    Raises:
        GramianError: if the file cannot be written.
    """
    replace_text(Path(path), methods(result))


def methods(result: Mapping[str, Any]) -> str:
    """The Methods page of a result of `analyse` as Markdown: paragraphs, a reproducibility checklist, a table of the layers."""
    note = "; metrics and spectra here are unclipped"
    items = kfac_checklist(result["kfac"]["record"], note)
    parts = ["# Methods", "", *_paragraphs(result), "", "# Reproducibility checklist", "", *ticked(items)]
    return "\n".join([*parts, "", "# Per layer", "", *_per_layer(result), ""])


# ---- prose -----------------------------------------------------------------------------------------------------------


def _paragraphs(result: Mapping[str, Any]) -> list[str]:
    settings, model, data = result["settings"], result["model"], result["data"]
    record, versions = result["kfac"]["record"], result["versions"]
    options = record["options"]
    coverage = result["kfac"]["metrics"]["model"]["coverage"]
    weights = str(model.get("weights", MISSING)).partition(", of ")[0]
    text = [
        f"We measure the curvature of a {model.get('kind', 'given')} model with {model['parameters']:,} trained parameters "
        f"(weights: {weights}; {model.get('dtype', MISSING)}) on {data['tokens']:,} tokens in {_of(data, 'windows')} windows "
        f"of {_of(data, 'length')} tokens, with {data['terms']:,} cross-entropy terms (mean loss {result['kfac']['loss']:.4g} "
        f"nats; data digest {_of(data, 'digest')}). The model is in evaluation mode and nothing is under autocast."
    ]
    text += list(result["notes"])
    text.append(
        f"The Fisher is approximated block by block with K-FAC (Martens and Grosse, 2015), F ≈ G ⊗ A, G from "
        f'{FISHERS[settings["fisher"]]}; policy "{options["kfac_policy"]}", factors stored in {options["woodbury_dtype"]}. '
        f"Of the trained parameters {coverage['kronecker']:.2%} are in a Kronecker block, {coverage['block']:.2%} in an exact "
        f"block, {coverage['diagonal']:.2%} in a diagonal and {coverage['none']:.2%} in none. Ranks, traces and eigenvalues "
        f"are of undamped, unclipped factors; log-determinant, effective dimension and condition number are of F + λI, "
        f"λ = {settings['damping']:g}."
    )
    if settings["samples"] is not None:
        text.append(
            f"√(trace/n) with n = {settings['samples']:g} is reported as a heuristic like PAC-Bayes; it is no bound."
        )
    if options["ekfac"]:
        text.append(
            "EK-FAC (George et al., 2018) replaces the eigenvalues by second moments of per-sample gradients in the "
            f"eigenbasis of K-FAC, for {sum(kind(layer) == 'EK-FAC' for layer in record['layers'].values())} of "
            f"{len(record['layers'])} blocks; ranks and eigenvalues are those."
        )
    if "ggn" in result:
        text.append(_products(result))
    if "hessian" in result:
        ends = result["hessian"]["extremes"]
        text.append(
            f"The ends of the Hessian's spectrum are from Lanczos ({ends['matvecs']} products, {_converged(ends)}): "
            f"{ends['largest']:.4g} and {ends['smallest']:.4g}."
        )
    text.append(
        f"gramian {versions['gramian']}, PyTorch {versions['torch']}, Python {versions['python']}, {versions['device']}, "
        f"{record['world_size']} process{'es' * (record['world_size'] != 1)}, seed {settings['seed']}."
    )
    return "\n\n".join(text).splitlines()


def _products(result: Mapping[str, Any]) -> str:
    ggn = result["ggn"]
    ends, trace, dimension = ggn["extremes"], ggn["trace"], ggn["effective_dimension"]
    return (
        f"The generalised Gauss-Newton matrix ({ggn['dim']:,} × {ggn['dim']:,}, exact products on the same data) is measured "
        f"by Lanczos with full reorthogonalisation (k = {len(ends['eigenvalues'])}, {ends['matvecs']} products, "
        f"{_converged(ends)}; largest eigenvalue {ends['largest']:.4g}) and by stochastic Lanczos quadrature "
        f"({len(ggn['nodes'])} Rademacher probes of {len(ggn['nodes'][0])} steps; trace {_pm(trace)}, effective dimension "
        f"{_pm(dimension)} at λ = {ggn['damping']:g}; ± is one standard error of the probes; Gauss' rule errs "
        "upwards for the dimension)."
    )


def _converged(ends: Mapping[str, Any]) -> str:
    state = "converged" if ends["converged"] else "not converged"
    return f"{state}, largest residual {max(ends['residual_bounds']):.2g}"


def _pm(estimate: Mapping[str, Any]) -> str:
    error = estimate["standard_error"]
    limit = "at most " if estimate.get("bound") == "upper" else ""
    return f"{limit}{estimate['value']:.4g}" + ("" if error is None else f" ± {error:.2g}")


# ---- the checklist ---------------------------------------------------------------------------------------------------


def ticked(items: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a checklist from (item, answer); an answer that begins with "not recorded" is not ticked."""
    return [f"- [{' ' if answer.startswith(MISSING) else 'x'}] {item}: {answer}" for item, answer in items]


def kfac_checklist(record: Mapping[str, Any], clip_note: str = "") -> list[tuple[str, str]]:
    """(item, answer) of the checklist of a K-FAC computation, from its record; `clip_note` is added to the answer on κ_max."""
    options, layers = record["options"], list(record["layers"].values())
    sides = [side for layer in layers for side in layer["sides"].values()]
    mode = options["damping_mode"]
    dampings = value_range("λ_A", layers, "lambda_A"), value_range("λ_G", layers, "lambda_G")
    on_product = mode in DAMPING_MODES and DAMPING_MODES[mode].on_product
    budget = options.get("memory_budget")
    limit = "" if budget is None else f", at most {budget if isinstance(budget, str) else f'{budget:,} bytes'} a device"
    clip = "off" if not options["use_eigenvalue_correction"] else number_text(options["max_condition_number"])
    return [
        (
            "Damping values (λ_A, λ_G)",
            f"{mode}: {dampings[0]}, {dampings[1]}" + " (one λ on the product)" * on_product,
        ),
        ("Condition number clipping (κ_max)", f"{clip}{clip_note}"),
        (
            "Update frequency",
            f"{options['update_freq']}; {record['refreshes']:,} refresh{'es' * (record['refreshes'] != 1)} made here",
        ),
        ("Policy (all/auto/hybrid)", policy_of(options)),
        (
            "T_effective per layer",
            value_range("T", [layer for layer in layers if "A" in layer["sides"]], "T_kept") + ", see below",
        ),
        ("Condition numbers per layer (κ_A, κ_G)", f"damped, {value_range('κ', sides, 'kappa')}, see below"),
        ("Eigenvalue clipping fraction", _clipped(record)),
        (
            "DDP reduction mode",
            f"{record['reduce']}" + "; one process, nothing was joined" * (record["world_size"] == 1),
        ),
        ("World size (for multi-GPU)", str(record["world_size"])),
        ("Storage device policy", f"{options['woodbury_store_device']}: {_distinct(sides, 'device')}{limit}"),
        (
            "Dtype (fp16/bf16)",
            f"{_distinct(sides, 'dtype')}; largest quantisation error {value_range('', sides, 'quantisation_error')}",
        ),
    ]


def _clipped(record: Mapping[str, Any]) -> str:
    share = clip_share(clip for layer in record["layers"].values() for clip in clips_of(layer))
    if share is not None:
        return f"{share:.2%} of all eigenvalues"
    if all(layer["kappa_max"] is None for layer in record["layers"].values()):
        return "no clip, so none"
    return f"{MISSING}: nothing was inverted, so nothing was clipped"


def _per_layer(result: Mapping[str, Any]) -> list[str]:
    layers, measured = result["kfac"]["record"]["layers"], result["kfac"]["metrics"]["layers"]
    lines = [
        "| layer | T | N | κ_A | κ_G | A | G | trace | λ_max | effective rank | condition number of F + λI |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in kronecker_layers(result):
        layer, metrics = layers[name], measured[name]
        A, G = (layer["sides"].get(side) for side in ("A", "G"))
        cells = [
            name,
            f"{layer['T_kept']:,}",
            f"{layer['N']:,.0f}",
            kappa_text(A),
            kappa_text(G),
            stored_text(A),
            stored_text(G),
        ]
        keys = ("trace", "max_eigenvalue", "entropy_rank", "condition_number")
        lines.append("| " + " | ".join([*cells, *(number_text(metrics[key]) for key in keys)]) + " |")
    rest = len(layers) - len(kronecker_layers(result))
    kinds = sorted({kind(layer) for layer in layers.values()} - {"K-FAC", "EK-FAC"})
    return [*lines, "", f"{rest} further parameters ({', '.join(kinds)}) are in curvature.json."] if rest else lines


def kappa_text(side: Mapping[str, Any] | None) -> str:
    """The condition number of a side of a layer, from its record; "≤ …" for an upper bound, "–" for no such side."""
    return "–" if side is None else ("" if side["kappa_exact"] else "≤ ") + number_text(side["kappa"])


def stored_text(side: Mapping[str, Any] | None) -> str:
    """Representation and rank of a side of a layer, from its record; "–" for no such side."""
    return "–" if side is None else f"{side['representation']}, rank {side['rank']:,}"


# ---- formatting ------------------------------------------------------------------------------------------------------


def _of(facts: Mapping[str, Any], key: str) -> str:
    value = facts.get(key)
    return MISSING if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def value_range(name: str, rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Format the recorded values of `key` in all rows as "name = 3", or as "name from 1 to 3" if they differ."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return f"{MISSING}: {name}"
    low, high = number_text(min(values)), number_text(max(values))
    if min(values) == max(values):
        return f"{name} = {low}" if name else low
    return f"{name} from {low} to {high}".strip()


def _distinct(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(str(row[key]) for row in rows)) or MISSING


def number_text(value: Any) -> str:
    """A number to four significant digits, whole numbers exactly, and ∞ for None."""
    if value is None:
        return "∞"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
