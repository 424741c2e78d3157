"""The JSON-able record of a K-FAC computation and its log lines; both are formed from the same facts of a `CurvatureState`."""

import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from gramian.core.errors import GramianError
from gramian.core.version import VERSION
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.state import CurvatureState
from gramian.linalg import Clip, DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors.factor import fetch_traces
from gramian.parallel.tensor_parallel import TensorParallel
from gramian.taps.coverage import Cover, Coverage

logger = logging.getLogger("gramian.curvature")
SCHEMA = 1


def record(state: CurvatureState) -> dict[str, Any]:
    """A JSON-able dict of options, versions, seeds, counters, and every block's estimate, damping, clip and bytes."""
    blocks = state.blocks
    factors = {id(factor): factor for block in blocks.values() for factor in block.factors.values()}
    return {
        "schema": SCHEMA,
        "options": {name: _finite(value) for name, value in asdict(state.options).items()},
        "versions": {"torch": torch.__version__, "gramian": VERSION},
        "seed": state.options.seed,
        "world_size": state.world_size,
        "reduce": state.options.kfac_distributed_reduce,
        "sent": dict(state.sent),
        "factorised": {"here": state.factorisations.here, "all": state.factorisations.all},
        "steps": state.steps,
        "refreshes": state.refreshes,
        "dropped": list(state.dropped),
        "padding_counted": {layer: list(counts) for layer, counts in state.padding.items()},
        "loss_coefficient": state.loss_coefficient,
        "head": state.head,
        "shared_rows": _shared_rows(state),
        "seconds": dict(state.seconds),
        "identity": sorted(state.without_curvature),
        "bytes": sum(factor.nbytes for factor in factors.values())
        + sum(block.correction_nbytes for block in blocks.values()),
        "operators": None if state.ready is None else {k: _finite(v) for k, v in state.ready.facts().items()},
        "layers": {name: _layer(state, block) for name, block in blocks.items()},
    }


def _shared_rows(state: CurvatureState) -> str | None:
    """How it was found that a layer's input with one row is shared by all samples, as a text; None before a capture.

    "proven": by the row proof (the check that each row belongs to the sample it is attributed to); else from shapes alone.
    """
    if state.model is None:
        return None
    return "proven" if TensorParallel.of(state.model) is None else "taken from shapes, as the model is tensor parallel"


def coverage(state: CurvatureState) -> Coverage:
    """A `Coverage` report: how each parameter of the captured model is approximated; a GramianError before a capture."""
    if state.model is None:
        raise GramianError("coverage: no model was captured yet; expected a capture before")
    specs: dict[str, list[Spec]] = {}
    for spec in state.specs.values():
        for owner in dict.fromkeys(spec.owners):
            specs.setdefault(owner, []).append(spec)
    covers: dict[str, Cover] = {}
    for name, p in unique_parameters(state.model):
        of_parameter = specs.get(name, [])
        reached = [spec for spec in of_parameter if spec.name in state.blocks]
        first = next(iter([*reached, *of_parameter]), None)
        asked = state.only is None or not state.only.isdisjoint(o for spec in of_parameter for o in spec.owners)
        if p.requires_grad and not asked:
            covers[name] = Cover("left out", "")
        elif first is None:
            covers[name] = Cover("frozen" if not p.requires_grad else "unused", "")
        elif first.name in state.blocks:
            why = f" ({first.why})" if first.why else ""
            if len(of_parameter) > 1:
                missing = len(of_parameter) - len(reached)
                why = f" and {len(of_parameter) - 1} more" + (f", {missing} without data" if missing else "")
            covers[name] = Cover("covered", first.layout, first.approximation + why, len(first.layers))
        else:
            covers[name] = Cover("unused", first.layout, "identity (no data)", len(first.layers))
    return Coverage(covers)


def _layer(state: CurvatureState, block: Block) -> dict[str, Any]:
    spec, facts, damping = block.spec, block.facts, block.damping
    assert damping is not None
    sides: dict[str, Any] = {}
    for side, factor in block.factors.items():
        value = damping.lambda_A if side == "A" else damping.lambda_G
        sides[side] = _side(side, factor, value, block, None if damping.joint else state.options.max_condition)
    return {
        "approximation": spec.approximation,
        "why_not_kfac": spec.why,
        "parameters": list(spec.parameters),
        "layers": list(spec.layers),
        "bias": spec.has_bias,
        "in_dim": spec.inputs,
        "out_dim": spec.outputs,
        "T": facts.tokens,
        "T_kept": facts.kept_tokens,
        "T_local": facts.local_tokens,
        "T_global": facts.tokens,
        "N": facts.terms,
        "samples": facts.samples,
        "backwards": facts.backwards,
        "estimate": facts.estimate,
        "age": state.steps - 1 - facts.step,
        "refreshes": facts.refreshes,
        "damping_mode": damping.mode,
        "pi": damping.pi,
        "lambda_A": damping.lambda_A if block.A is not None else None,
        "lambda_G": damping.lambda_G,
        "kappa_max": state.options.max_condition,
        "policy": state.options.kfac_policy,
        "eps": state.options.kfac_eps,
        "shares_A_with": facts.shares_A_with,
        "sent": dict(facts.sent),
        "gathered": block.gathered,
        "ekfac": _corrected(block),
        "clip_joint": _clip(block.clips.get("joint")),
        "bytes": block.nbytes,
        "seconds": facts.seconds,
        "sides": sides,
    }


def _corrected(block: Block) -> dict[str, Any] | None:
    """JSON-able facts on a block's EK-FAC eigenvalues, or why it has none; None if EK-FAC does not apply to it."""
    if block.correction is None:
        return {"corrected": False, "reason": block.facts.reason_ekfac} if block.facts.reason_ekfac else None
    correction, facts = block.correction, block.facts
    return {
        "corrected": True,
        "trace": float(correction.values_RS.double().sum()),
        "rank_G": correction.G.rank,
        "rank_A": correction.A.rank,
        "outside_trace": correction.outside,
        "N": facts.ekfac_terms,
        "samples": facts.ekfac_samples,
        "backwards": facts.ekfac_backwards,
    }


def _side(side: str, factor: Factor, value: float, block: Block, max_condition: float | None) -> dict[str, Any]:
    kappa, exact = factor.condition(value, max_condition)
    undamped, _ = factor.condition(0.0, None)
    facts, work = block.facts, factor.work
    return {
        "representation": factor.kind,
        "reason": facts.reason_A if side == "A" else facts.reason_G,
        "reduction": facts.reduction_A if side == "A" else facts.reduction_G,
        "rank": factor.rank,
        "discarded_trace": facts.discarded_trace_A if side == "A" else facts.discarded_trace_G,
        "dtype": str(factor.storage_dtype).removeprefix("torch."),
        "device": factor.device.type,
        "quantisation_error": float(factor.quantisation_error),
        "trace": fetch_traces([factor])[id(factor)],  # read when damping was resolved: no collective is needed
        "kappa_before": _finite(undamped),
        "kappa": kappa,
        "kappa_exact": exact,
        "clip": _clip(block.clips.get(side)),
        "clip_note": work.clip_note,
        "cholesky": list(work.attempts),
        "eigendecomposition": work.decomposed,
        "fallback": work.fallback,
        "error_bound": work.error_bound,
        "bytes": factor.nbytes,
    }


def _finite(value: Any) -> Any:
    """The value itself; None for infinity, which JSON does not have."""
    return None if value == float("inf") else value


def _clip(clip: Clip | None) -> dict[str, Any] | None:
    return None if clip is None else asdict(clip)


# ---- log -----------------------------------------------------------------------------------------------------------


def log_refresh(state: CurvatureState) -> None:
    """Log a refresh at INFO, one line per block and one for all blocks, and token counts at DEBUG."""
    if not logger.isEnabledFor(logging.INFO):
        return
    layers = {name: _layer(state, block) for name, block in state.blocks.items()}
    for name, facts in layers.items():
        logger.info("%s", layer_line(name, facts))
        logger.debug("%s: T_local=%d, T_global=%d", name, facts["T_local"], facts["T_global"])
    options = state.options
    blocks = [block for block in state.blocks.values() if block.spec.kind == "kronecker"]
    woodbury = sum(isinstance(block.G, LowRank | DiagonalLowRank) for block in blocks)
    damping = f"{options.damping_mode} {options.joint_lambda:.3g}"
    if options.lambdas.A != options.lambdas.G:
        damping = f"{options.damping_mode} (λ_A={options.lambdas.A:.3g}, λ_G={options.lambdas.G:.3g})"
    logger.info(
        "K-FAC update %d: %d layers (%d Woodbury, %d eigendecomp), %d other blocks, policy=%s, update_freq=%d, damping=%s, "
        "κ_max=%s, reduce=%s, world_size=%d",
        state.refreshes,
        len(blocks),
        woodbury,
        len(blocks) - woodbury,
        len(state.blocks) - len(blocks),
        options.kfac_policy if options.low_rank else "no low rank",
        options.update_freq,
        damping,
        "off" if options.max_condition is None else f"{options.max_condition:.3g}",
        options.kfac_distributed_reduce,
        state.world_size,
    )


def layer_line(name: str, facts: dict[str, Any]) -> str:
    """The text of the INFO line of one layer, from its entry in the record."""
    fields = [f"in_dim={facts['in_dim']}", f"out_dim={facts['out_dim']}", f"T={facts['T']}"]
    fields += [f"λ_{side}={facts[f'lambda_{side}']:.3g}" for side in facts["sides"]]
    for side, about in facts["sides"].items():
        fields.append(f"κ_{side}{'=' if about['kappa_exact'] else '≤'}{about['kappa']:.3g}")
    limit = facts["kappa_max"]
    devices = "/".join(dict.fromkeys(about["device"] for about in facts["sides"].values()))
    dtypes = "/".join(dict.fromkeys(about["dtype"] for about in facts["sides"].values()))
    fields += [
        f"κ_max={'off' if limit is None else f'{limit:.3g}'}",
        f"policy={facts['policy']}",
        f"storage={devices}",
        f"dtype={dtypes}",
        f"memory={facts['bytes'] / 1e6:.1f}MB",
        f"ε={facts['eps']:.3g}",
    ]
    return f"{name}: {', '.join(fields)}"


def log_clips(blocks: Iterable[Block]) -> None:
    """Log at DEBUG how many eigenvalues of each block were clipped; called whenever blocks multiply a vector."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for block in blocks:
        for side, clip in block.clips.items():
            logger.debug("%s: clipped %d/%d eigenvalues (%s)", block.spec.name, clip.count, clip.total, side)


def log_separate_processes() -> None:
    """Warn that the factors of each process are those of its own data alone (kfac_distributed_reduce="none")."""
    logger.warning('kfac_distributed_reduce="none": the factors of this process are those of its own data alone')


def log_dropped(step: int, reason: str, again: bool) -> None:
    """Log that the refresh at `step` made no factors: a warning, or at DEBUG if the one before was dropped too (`again`)."""
    level = logging.DEBUG if again else logging.WARNING
    logger.log(level, "K-FAC refresh at step %d dropped: %s; the factors are those from before", step, reason)


def log_padding(layer: str, tokens: int, terms: float, again: bool, strict: bool) -> None:
    """Warn that tokens without a loss term are part of a layer's A: `tokens` counted for `terms` loss terms.

    `again`: log at DEBUG only; `strict`: raise a GramianError instead.
    """
    line = (
        f"token_weights: {layer} counts {tokens} tokens for {terms:g} loss terms, and which of them have none cannot be seen; "
        "expected token_weights=[B, T]"
    )
    _warn(line, strict, again)


def log_coefficient(seen: float, what: str, strict: bool) -> None:
    """Warn that a loss term has `seen` times the coefficient that the capture's arguments give; `strict`: raise instead.

    `what` is wrong by its square, as text, such as "every G is".
    """
    line = (
        f"loss_reduction: one loss term has {seen:.4g} times the coefficient that it, num_terms and loss_scale state, so "
        f"{what} {seen**2:.4g} times what it is; expected loss_reduction=<coefficient of one term>, such as "
        "1 / (num_terms * accumulation steps) for (loss / accumulation steps).backward()"
    )
    _warn(line, strict)


def _warn(line: str, strict: bool, again: bool = False) -> None:
    if strict:
        raise GramianError(line + " (strict=True)")
    logger.log(logging.DEBUG if again else logging.WARNING, "%s", line)


def log_no_step(reason: str) -> None:
    """Warn that an optimizer step was called before any refresh has made factors (`reason`), and changes no parameter."""
    logger.warning("K-FAC has no factors yet (%s): this step leaves the parameters as they are", reason)
