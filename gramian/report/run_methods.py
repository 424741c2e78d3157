"""Write the Methods paragraphs and the reproducibility checklist of a training run, from the files of its folder alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gramian.analysis.methods import MISSING, kappa_text, kfac_checklist, number_text, stored_text, ticked
from gramian.core.durable_files import replace_file
from gramian.core.errors import GramianError
from gramian.curvature.persist.refresh_summary import clip_share, clips_of, policy_of
from gramian.report.fact_tables import ENDS
from gramian.report.privacy_panels import last_epsilon, validity
from gramian.report.run_data import RunData, number, read_run
from gramian.report.training_panels import best_evaluation

METHODS_FILE = "methods.md"
COMPLETE = ENDS[:2]
"""Events after which a run takes no further step."""


def is_complete(folder: Path) -> bool:
    """Whether the last event of a run folder that ended a run says that all of its steps were taken."""
    if not (folder / "events.jsonl").is_file() or not (folder / "config.toml").is_file():
        return False
    return _ended(read_run(folder, folder.name)) in COMPLETE


def write_run_methods(folder: Path) -> Path:
    """Write methods.md into a run folder and return its path; the same files give the same text. Mode 0600 if it is private.

    Raises:
        GramianError: if the folder holds no run, or the file cannot be written.
    """
    path, run = folder / METHODS_FILE, read_run(folder, folder.name)
    try:
        replace_file(path, run_methods(run).encode(), private=run.is_private)
    except OSError as problem:
        raise GramianError(f"{path}: cannot be written ({problem.strerror}); expected a folder that can") from None
    return path


def run_methods(run: RunData) -> str:
    """The Methods page of a run as Markdown: paragraphs, a reproducibility checklist, and a table of K-FAC's layers.

    Every number is read from config.toml (as resolved), record.json, metrics.jsonl or events.jsonl; what they lack is
    "not recorded".
    """
    kfac = run.record.get("kfac")
    parts = [
        "# Methods",
        "",
        "\n\n".join([_data(run), _training(run), *_privacy(run), *_curvature(run), _versions(run)]),
    ]
    items = _checklist(run) + ([] if kfac is None else kfac_checklist(kfac))
    parts += ["", "# Reproducibility checklist", "", *ticked(items)]
    return "\n".join([*parts, *([] if kfac is None else ["", "# Per layer", "", *_per_layer(kfac)]), ""])


# ---- prose -----------------------------------------------------------------------------------------------------------


def _data(run: RunData) -> str:
    windows = _table(run.record.get("windows"))
    kind = _option(run, "model", "kind")
    shape = [f"{_option(run, 'model', key)} {key}" for key in ("layers", "heads")]
    shape.append(f"width {_option(run, 'model', 'width')}")
    about = f"from {_option(run, 'model', 'path')}" if kind == "huggingface" else ", ".join(shape)
    files = run.option("data", "files")
    source = f"{_option(run, 'data', 'source')}{f' ({len(files)} files or folders)' if files else ''}"
    return (
        f"We train a {kind} model with {_text(run.record.get('parameters'))} parameters ({about}) on next tokens. Data: "
        f"{source}, tokenizer {_option(run, 'data', 'tokenizer')}, vocabulary {_text(run.record.get('vocabulary'))}; "
        f"{_text(windows.get('training'))} windows of {_option(run, 'data', 'length')} tokens for training and "
        f"{_text(windows.get('validation'))} for validation."
    )


def _training(run: RunData) -> str:
    steps, tokens = _taken(run)
    best = best_evaluation(run) or {}
    loss = number(best.get("validation_loss"))
    reached = "no validation loss was recorded" if loss is None else (
        f"the lowest validation loss was {loss:.4g} nats, at step {_text(best.get('step'))}"
    )  # fmt: skip
    rollbacks = sum(event["event"] == "rollback" for event in run.events)
    return (
        f"{_optimizer(run)} with a peak learning rate of {_option(run, 'optimizer', 'lr')}, {_schedule(run)}, weight decay "
        f"{_option(run, 'optimizer', 'weight_decay')} on matrices and {_clipping(run)}. A step has "
        f"{_option(run, 'data', 'batch')} windows; {steps} of {_option(run, 'run', 'steps')} steps were taken, on {tokens} "
        f"tokens, in {_text(run.record.get('precision'))}; {reached}. Number of rollbacks: {rollbacks}. "
        f"The run ended: {_ended(run) or MISSING}."
    )


def _optimizer(run: RunData) -> str:
    kind = _option(run, "optimizer", "kind")
    betas, eps = _option(run, "optimizer", "betas"), _option(run, "optimizer", "eps")
    if kind == "sgd":
        name = f"SGD with momentum {_option(run, 'optimizer', 'momentum')}"
    elif kind == "kfac":
        name = f"K-FAC as the optimizer (whitened, orthogonalised steps of weight matrices; AdamW for the rest, β = {betas}, "
        name += f"ε = {eps})"
    else:
        name = f"{'AdamW' if kind == 'adamw' else kind} (β = {betas}, ε = {eps})"
    return f"{name} on natural gradients" if kind != "kfac" and "kfac" in run.config else name


def _schedule(run: RunData) -> str:
    kind, warmup = _option(run, "schedule", "kind"), _option(run, "schedule", "warmup")
    end = "" if kind == "constant" else f" to {_option(run, 'schedule', 'floor')}"
    return f"a {kind} schedule{end} after {warmup} steps of warm-up"


def _clipping(run: RunData) -> str:
    limit = number(run.option("optimizer", "max_norm"))
    return f"gradients scaled down to norm {limit:g}" if limit else "gradients of any norm"


def _privacy(run: RunData) -> list[str]:
    facts = run.record.get("privacy")
    if not isinstance(facts, Mapping):
        return []
    noise = facts.get("noise")
    correlated = noise if isinstance(noise, Mapping) and "bands" in noise else None
    how = f" ({correlated['name']} over {correlated['bands']} releases)" if correlated else ""
    return [
        f"Training is private (DP-SGD): noise multiplier {_text(facts.get('noise_multiplier'))}{how}, sample rate "
        f"{_text(facts.get('sample_rate'))}, clip norm {_option(run, 'privacy', 'max_grad_norm')}, unit "
        f"{_text(facts.get('unit'))}; ε = {_text(last_epsilon(run))} at δ = {_option(run, 'privacy', 'delta')} "
        f"({validity(run)}). Tokens and validation losses above are not covered by ε."
    ]


def _curvature(run: RunData) -> list[str]:
    record = run.record.get("kfac")
    if not isinstance(record, Mapping):
        return [f"K-FAC: {MISSING}."] if "kfac" in run.config or run.option("optimizer", "kind") == "kfac" else []
    options, layers = record["options"], record["layers"]
    kronecker = sum("A" in layer["sides"] for layer in layers.values())
    share = clip_share(clip for layer in layers.values() for clip in clips_of(layer))
    bound = record.get("kl_clip")
    scales = [number(line.get("trust_region")) for line in run.lines]
    known = [scale for scale in scales if scale is not None]
    text = (
        f"The Fisher is approximated block by block with K-FAC (Martens and Grosse, 2015), F ≈ G ⊗ A, from gradients of "
        f"{'public data' if run.is_private else 'the training loss'}: {kronecker} of {len(layers)} blocks have two factors. "
        f"Factors are refreshed every "
        f"{options['update_freq']} steps ({record['refreshes']:,} refreshes in {record['steps']:,} steps, "
        f"{len(record['dropped'])} dropped), averaged with decay {options['ema_decay']:g}, damped with "
        f'{_damping(options)} ("{options["damping_mode"]}") under policy "{policy_of(options)}"'
    )
    if share is not None:
        text += f"; the clip at κ_max = {options['max_condition_number']:g} raises {share:.2%} of the eigenvalues"
    if bound is not None:
        scaled = f"{sum(scale < 1 for scale in known)} of the {len(known)} logged steps"
        text += f". A trust region of {bound:g} nats scales down {scaled}"
    return [f"{text}."]


def _damping(options: Mapping[str, Any]) -> str:
    """The λ of both sides, or of A and of G where they were given."""
    value_A, value_G = (
        options["damping"] if options.get(side) is None else options[side] for side in ("damping_A", "damping_G")
    )
    return f"λ = {value_A:g}" if value_A == value_G else f"λ_A = {value_A:g} and λ_G = {value_G:g}"


def _versions(run: RunData) -> str:
    facts = run.record
    return (
        f"gramian {_text(facts.get('gramian'))}, PyTorch {_text(facts.get('torch'))}, Python {_text(facts.get('python'))}, "
        f"{_text(facts.get('device'))}, {_processes(run)}, seed {_option(run, 'run', 'seed')}."
    )


# ---- the checklist ---------------------------------------------------------------------------------------------------


def _checklist(run: RunData) -> list[tuple[str, str]]:
    facts, digests = run.record, _table(run.record.get("data_digest"))
    steps, tokens = _taken(run)
    deterministic = {True: "deterministic kernels", False: "kernels that may differ from run to run"}
    data = ", ".join(f"{part} {digest}" for part, digest in digests.items())
    options = _table(_table(facts.get("kfac")).get("options"))
    resolved = ", ".join(f"{name} = {value}" for name, value in options.items() if value is not None)
    return [
        ("Configuration", f"config.toml, hash {_text(facts.get('config_hash'))}" if "config_hash" in facts else MISSING),
        ("Data", f"digests: {data}" if data else f"{MISSING}: no digests" + " of private data" * run.is_private),
        ("Seeds", f"{_option(run, 'run', 'seed')}; {deterministic.get(run.option('run', 'deterministic'), MISSING)}"),
        ("Steps and tokens", f"{steps}, {tokens}"),
        ("Precision", _text(facts.get("precision"))),
        ("Processes", _processes(run)),
        ("Versions and device", f"gramian {_text(facts.get('gramian'))}, torch {_text(facts.get('torch'))}, "
         f"{_text(facts.get('device'))}"),
        *([("K-FAC options as resolved", resolved)] if resolved else []),
    ]  # fmt: skip


def _per_layer(record: Mapping[str, Any]) -> list[str]:
    """Table of the layers with two factors at the last refresh."""
    heads = ("layer", "T", "N", "λ_A", "λ_G", "κ_A", "κ_G", "clipped", "A", "G")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, layer in record["layers"].items():
        if "A" in layer["sides"]:
            A, G = layer["sides"]["A"], layer["sides"]["G"]
            share = clip_share(clips_of(layer))
            cells = [name, f"{layer['T_kept']:,}", f"{layer['N']:,.0f}", number_text(layer["lambda_A"])]
            cells += [number_text(layer["lambda_G"]), kappa_text(A), kappa_text(G)]
            cells += ["–" if share is None else f"{share:.2%}", stored_text(A), stored_text(G)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


# ---- what the files say ----------------------------------------------------------------------------------------------


def _taken(run: RunData) -> tuple[str, str]:
    """Steps and tokens of the run so far, as texts."""
    steps: Sequence[int] = [line["step"] for line in run.lines if isinstance(line.get("step"), int)]
    tokens = [value for line in run.lines if (value := number(line.get("tokens"))) is not None]
    return _text(steps[-1] if steps else None), _text(int(tokens[-1]) if tokens else None)


def _processes(run: RunData) -> str:
    size, kind = run.record.get("processes"), run.record.get("strategy")
    return f"{_text(size)} process{'es' * (size != 1)}" + (f" ({kind})" if isinstance(size, int) and size > 1 else "")


def _ended(run: RunData) -> str:
    ends = [str(event["event"]) for event in run.events if event["event"] in ENDS]
    return ends[-1] if ends else ""


def _option(run: RunData, section: str, key: str) -> str:
    return _text(run.option(section, key))


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
