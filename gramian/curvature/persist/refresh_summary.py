"""A refresh in a few numbers: per layer λ, κ, tokens and the share of eigenvalues that the clip raised, from a K-FAC record.

A training run writes it to `metrics.jsonl` after every refresh; the console and the report read it from there.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

DIGITS = 6
"""Significant digits of the numbers."""


def refresh_summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The last refresh of a record (`KFACNaturalGradient.record`) as a small JSON object; nothing is read from a device.

    Returns:
        {"refresh": its number, "policy", "damping_mode", "kappa_max" (None: no clip), "clip_share" of all blocks, "layers"};
        "layers" is {layer with two factors: {"T": tokens used, "lambda_A", "lambda_G", "kappa_A", "kappa_G" (damped and
        clipped), "clip_A", "clip_G" or, under joint damping, "clip"}}. A κ that was not decomposed is an upper bound and is
        listed in "bounds", such as ["A"]. A share is None as long as nothing was inverted.
    """
    layers, options = record["layers"], record["options"]
    limited = {layer["kappa_max"] for layer in layers.values()}
    shared = {
        _input_of(name, layer): clip
        for name, layer in layers.items()
        if (clip := layer["sides"].get("A", {}).get("clip")) is not None
    }
    return {
        "refresh": record["refreshes"],
        "policy": policy_of(options),
        "damping_mode": options["damping_mode"],
        "kappa_max": limited.pop() if len(limited) == 1 else None,
        "clip_share": clip_share(clip for layer in layers.values() for clip in clips_of(layer)),
        "layers": {name: _layer(name, layer, shared) for name, layer in layers.items() if "A" in layer["sides"]},
    }


def policy_of(options: Mapping[str, Any]) -> str:
    """The policy in force, from the options of a record: `kfac_policy`, or "no low rank" where `kfac_use_woodbury` is off."""
    return str(options["kfac_policy"]) if options["kfac_use_woodbury"] else "no low rank"


def clips_of(layer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The clips of a layer's record that are known: of each side, or of the product."""
    found = [layer["clip_joint"], *(side["clip"] for side in layer["sides"].values())]
    return [clip for clip in found if clip is not None]


def clip_share(clips: Iterable[Mapping[str, Any]]) -> float | None:
    """Eigenvalues that these clips raised over all that they saw; None without a clip."""
    listed = list(clips)
    total = sum(clip["total"] for clip in listed)
    return _rounded(sum(clip["count"] for clip in listed) / total) if total else None


def summary_line(summary: Mapping[str, Any], trust_region: float = math.nan) -> str:
    """The line about a refresh that a run prints; `trust_region`: factor of the step that followed, NaN: there was none."""
    layers = summary["layers"].values()
    limit, clipped = summary["kappa_max"], summary["clip_share"]
    parts = [
        f"refresh {summary['refresh']}",
        f"{len(layers)} layers",
        f"policy={summary['policy']}",
        f"damping={summary['damping_mode']}",
        *(f"λ_{side} {_range(layer[f'lambda_{side}'] for layer in layers)}" for side in "AG" if layers),
        *(f"κ_{side} up to {max(layer[f'kappa_{side}'] for layer in layers):.3g}" for side in "AG" if layers),
        f"κ_max={'off' if limit is None else f'{limit:.3g}'}",
        *([] if clipped is None else [f"clipped {clipped:.2%} of the eigenvalues"]),
        *([] if math.isnan(trust_region) else [f"trust region × {trust_region:.3g}"]),
    ]
    return f"K-FAC: {', '.join(parts)}"


def _range(values: Iterable[float]) -> str:
    listed = [f"{value:.3g}" for value in sorted(values)]
    return listed[0] if listed[0] == listed[-1] else f"{listed[0]} to {listed[-1]}"


def _input_of(name: str, layer: Mapping[str, Any]) -> tuple[str, float]:
    """What layers have in common whose A is one matrix with one λ: it is inverted once, and one of them records its clip."""
    return layer["shares_A_with"] or name, layer["lambda_A"]


def _layer(name: str, layer: Mapping[str, Any], shared: Mapping[tuple[str, float], Any]) -> dict[str, Any]:
    sides = layer["sides"]
    found: dict[str, Any] = {"T": layer["T_kept"]}
    found |= {f"lambda_{side}": _rounded(layer[f"lambda_{side}"]) for side in "AG"}
    found |= {f"kappa_{side}": _rounded(sides[side]["kappa"]) for side in "AG"}
    if layer["clip_joint"] is not None:
        found["clip"] = clip_share([layer["clip_joint"]])
    else:
        clips = {"A": sides["A"]["clip"] or shared.get(_input_of(name, layer)), "G": sides["G"]["clip"]}
        found |= {f"clip_{side}": clip_share([clip] if clip else []) for side, clip in clips.items()}
    bounds = [side for side in "AG" if not sides[side]["kappa_exact"]]
    return found | ({"bounds": bounds} if bounds else {})


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
