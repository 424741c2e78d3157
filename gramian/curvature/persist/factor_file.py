"""Convert the state of a K-FAC object to a dict or one safetensors file, and load it again.

`state_dict` returns tensors and plain values; `load` checks every shape before anything is replaced. The keys of the dict are
a file format: states that older versions wrote load unchanged.
"""

import copy
import hashlib
import json
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramian.core.durable_files import replacing
from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block, Facts
from gramian.curvature.blocks.block_specs import Spec, find_blocks
from gramian.curvature.blocks.consistency import check_spec, tap_as, unique_parameters
from gramian.curvature.blocks.eigenvalue_correction import Basis, Correction
from gramian.curvature.refresh.build_factors import settle_damping
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.curvature.state import CurvatureState
from gramian.linalg import BlockDiagonal, Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.stored import Stored
from gramian.parallel.exchange import Exchange
from gramian.parallel.sharded_columns import ShardedColumns

SCHEMA = 1
CORRECTION = "correction"
"""Value of "kind" in an entry of "factors" that holds EK-FAC eigenvalues and not a factor."""
COUNTERS = {
    "steps": "steps",
    "refreshes": "refreshes",
    "head": "head",
    "_last_refresh": "last_refresh",
    "dropped": "dropped",
    "_softmax_checked": "softmax_checked",
    "observed": "observed",
    "private": "private",
}
"""{key in a saved state: attribute of `CurvatureState`}."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def state_dict(state: CurvatureState, gather: bool = True) -> dict[str, Any]:
    """Factors, counters and options as tensors and plain values; a factor that several layers share is stored once.

    With `gather`, rows that are sharded over processes are gathered (collective); otherwise every factor has this process's
    rows and an entry "dim", the number of rows of all processes.
    """
    numbers: dict[int, str] = {}
    factors: dict[str, dict[str, Any]] = {}
    layers: dict[str, Any] = {}
    for name, block in state.blocks.items():
        sides = {}
        for side, factor in block.factors.items():
            if id(factor) not in numbers:
                numbers[id(factor)] = str(len(numbers))
                factors[numbers[id(factor)]] = _factor_entry(factor, gather)
            sides[side] = numbers[id(factor)]
        spec = {key: value for key, value in asdict(block.spec).items() if key not in ("dtype", "device")}
        spec["dtype"] = str(block.spec.dtype).removeprefix("torch.")
        layers[name] = {"spec": spec, "facts": asdict(block.facts), "sides": sides}
        if block.correction is not None:
            layers[name]["correction"] = f"of {len(layers)}"
            factors[layers[name]["correction"]] = _correction_entry(block.correction, gather)
    return {
        "schema": SCHEMA,
        "options": asdict(state.options),
        "counters": {key: copy.deepcopy(getattr(state, attribute)) for key, attribute in COUNTERS.items()},
        "generator": state.generator.get_state(),
        "frozen": _frozen(state.model),
        "layers": layers,
        "factors": factors,
    }


def save(state: CurvatureState, path: str) -> None:
    """Write a state into one safetensors file. Collective where rows are sharded; then each process writes the file."""
    write(state_dict(state), path)


def write(saved: Mapping[str, Any], path: str) -> None:
    """Write a value of `state_dict` into one safetensors file, with everything that is not a tensor as JSON in its header.

    A GramianError is raised if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    header, tensors = flattened(saved)
    try:
        with replacing(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"gramian": header, "sha256": _digest(header, tensors)})
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise GramianError(
            f"path: {path!r} cannot be written ({error}); expected a file in a folder that exists"
        ) from None


def flattened(saved: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """(all that is not a tensor as JSON, {name: tensor on the host}) of a value of `state_dict`."""
    tensors: dict[str, Tensor] = {"generator": saved["generator"]}
    factors: dict[str, dict[str, Any]] = {}
    for number, parts in saved["factors"].items():
        factors[number] = {name: value for name, value in parts.items() if not isinstance(value, Tensor)}
        tensors |= {f"{number}.{name}": t.contiguous() for name, t in parts.items() if isinstance(t, Tensor)}
    header = json.dumps({**{name: value for name, value in saved.items() if name != "generator"}, "factors": factors})
    return header, {name: t.cpu().clone() for name, t in tensors.items()}


def nested(header: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The value of `state_dict` that `flattened` took apart; a ValueError, KeyError or TypeError if it is damaged."""
    entries: dict[str, Any] = json.loads(header)
    entries["generator"] = tensors["generator"]
    for name, t in tensors.items():
        number, _, part = name.partition(".")
        if part:
            entries["factors"][number][part] = t
    return entries


def _frozen(root: nn.Module | None) -> list[str]:
    """Names of the parameters of a model that do not train."""
    return [] if root is None else [name for name, p in unique_parameters(root) if not p.requires_grad]


def _factor_entry(factor: Factor, gather: bool) -> dict[str, Any]:
    dim = {} if gather else {"dim": factor.dim}
    if isinstance(factor, Diagonal):
        return {"kind": "diagonal", "values": factor.values_N, **dim}
    if isinstance(factor, BlockDiagonal):
        return {"kind": "block_diagonal", "values": factor.blocks_RWW, **dim}
    if isinstance(factor, Dense):
        return {"kind": "dense", **_stored_entry(factor.stored), **dim}
    assert isinstance(factor, LowRank | DiagonalLowRank)
    stored = _stored_entry((factor.columns.whole() if gather else factor.columns).stored)
    if isinstance(factor, LowRank):
        return {"kind": "low_rank", **stored, **dim}
    return {"kind": "diagonal_low_rank", "sign": factor.sign, "values": factor.values_N, **stored, **dim}


def _stored_entry(stored: Stored) -> dict[str, Any]:
    parts = {"body": stored.body, "left": stored.left, "right": stored.right, "error": stored.relative_error.clone()}
    return {name: t for name, t in parts.items() if t is not None}


def _correction_entry(correction: Correction, gather: bool) -> dict[str, Any]:
    """The saved form of EK-FAC's eigenvalues and bases; the columns U of a low-rank basis are saved with the factor.

    Tensors that are views of larger memory are copied, so that only their own entries are saved. `gather` as in `state_dict`.
    """
    parts = {"eigenvalues": correction.values_RS, "basis_G": correction.G.matrix, "basis_A": correction.A.matrix}
    tensors = {
        name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for name, t in parts.items() if t is not None
    }
    return {"kind": CORRECTION, "outside": correction.outside, **tensors, **({} if gather else {"dim": 0})}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: str) -> dict[str, Any]:
    """The state dict in a file that `save` wrote; a GramianError if it cannot be read or its checksum is wrong."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, TypeError, SafetensorError) as error:
        raise GramianError(f"{path}: cannot be read ({error}); expected a file written by kfac.save") from None
    if "gramian" not in metadata:
        raise GramianError(f"{path}: has no gramian header; expected a file written by kfac.save")
    if metadata.get("sha256") != _digest(metadata["gramian"], tensors):
        raise GramianError(f"{path}: is damaged (its checksum is another); expected a file written by kfac.save")
    try:
        return nested(metadata["gramian"], tensors)
    except (ValueError, KeyError, TypeError):
        raise GramianError(f"{path}: its gramian header is damaged; expected a file written by kfac.save") from None


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, of the header and of the names and bytes of all tensors."""
    found = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def load(
    state: CurvatureState, saved: Mapping[str, Any], root: nn.Module | None, exchange: Exchange | None = None
) -> None:
    """Replace factors, counters and generator of `state` by saved ones; its options stay.

    Everything is checked first, against the model `root` if given (None: against the state's own blocks); a GramianError is
    raised, and nothing changes, if it does not fit or is damaged. `exchange`: the processes over which rows of low-rank sides
    are sharded; None: this process stores all rows.
    """
    if not isinstance(saved, Mapping) or "schema" not in saved:
        raise GramianError("state: has no schema; expected what state_dict() gave")
    if saved["schema"] != SCHEMA:
        raise GramianError(f"state: has schema {saved['schema']!r}; expected {SCHEMA}")
    observed = _observed(saved.get("counters", {}))
    specs = find_blocks(root, state.options, observed) if root is not None else dict(state.specs)
    if root is not None and not specs.keys() >= set(saved.get("layers", ())) and tap_as(root, _saved_specs(saved)):
        specs = find_blocks(root, state.options, observed)
    known = root if root is not None else state.model
    device = _device(state, root)
    generator = torch.Generator()
    try:
        blocks = _blocks(saved, specs, device, set(_frozen(known)), exchange)
        if state.options.ekfac:
            _load_corrections(blocks, saved, device)
        frozen_before = set(saved["frozen"])
        counters = _counters(saved["counters"])
        generator.set_state(saved["generator"].cpu())
        settle_damping(blocks.values(), state.options)
    except GramianError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        what = " ".join(f"{type(error).__name__} {error}".split())
        raise GramianError(f"state: is not whole ({what}); expected what state_dict() gave") from None
    missing = [
        name
        for name, spec in specs.items()
        if name not in blocks and name in state.blocks and not frozen_before.issuperset(spec.owners)
    ]
    if missing and blocks:  # a state from before the first refresh has none
        raise GramianError(f"{missing[0]}: has factors here, but not in the state; expected the same model")
    state.blocks, state.factorisations = blocks, SharedFactorisation(exchange)
    for key, attribute in COUNTERS.items():
        setattr(state, attribute, counters[key])
    state.generator = generator
    if root is not None:
        state.model_ref = weakref.ref(root)
    state.specs = specs or {name: block.spec for name, block in blocks.items()}


def _counters(saved: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("steps", "refreshes"):
        if not isinstance(saved[name], int) or saved[name] < 0:
            raise GramianError(f"state: {name} is {saved[name]!r}; expected an integer of at least 0")
    later = {
        "observed": _observed(saved),
        "private": bool(saved.get("private", False)),
    }  # that earlier versions do not have
    return {key: copy.deepcopy(saved[key]) for key in COUNTERS if key not in later} | later


def _observed(saved: Mapping[str, Any]) -> dict[str, str]:
    """What a saved state has seen of assumed matrices; nothing in one from before there were any."""
    return dict(saved.get("observed", {}))


def _device(state: CurvatureState, root: nn.Module | None) -> torch.device | None:
    """The device for loaded factors: that of `woodbury_store_device`, or with "auto" the model's; None: where they are now."""
    if state.options.woodbury_store_device != "auto":
        return torch.device(state.options.woodbury_store_device)
    return None if root is None else next(root.parameters()).device


def _blocks(
    saved: Mapping[str, Any],
    specs: Mapping[str, Spec],
    device: torch.device | None,
    frozen: set[str],
    exchange: Exchange | None,
) -> dict[str, Block]:
    """{name: block} of a saved state; a GramianError if one does not fit the model's `specs`, or its factors are not finite.

    Blocks all of whose parameters are `frozen` now are loaded too. `exchange` as in `load`.
    """
    entries = {number: parts for number, parts in saved["factors"].items() if parts.get("kind") != CORRECTION}
    factors = {number: _factor(number, parts, device, exchange) for number, parts in entries.items()}
    blocks: dict[str, Block] = {}
    for name, layer in saved["layers"].items():
        sides = {side: factors[number] for side, number in layer["sides"].items()}
        spec = _saved_spec(layer, sides["G"].device)
        if specs and name not in specs and not frozen.issuperset(spec.owners):
            raise GramianError(f"{name}: is in the state, but no trainable layer of the model; expected the same model")
        if name in specs:
            check_spec(spec, specs[name])
        block = Block(spec, sides.get("A"), sides["G"], Facts(**layer["facts"]))
        for side, width in (("A", spec.inputs), ("G", spec.outputs)):
            if side in block.factors and block.factors[side].dim != width:
                raise GramianError(f"{name}: {side} has side {block.factors[side].dim}; expected {width}")
            if side in block.factors and not bool(block.factors[side].trace().isfinite()):
                raise GramianError(f"{name}: {side} holds NaN or infinity; expected finite factors")
        blocks[name] = block
    return blocks


def _saved_spec(layer: Mapping[str, Any], device: torch.device) -> Spec:
    parts = dict(layer["spec"])
    parts["dtype"], parts["device"] = getattr(torch, parts["dtype"]), device
    for key in ("parameters", "layers", "tables", "keys"):
        parts[key] = tuple(parts.get(key, ()))
    parts["shapes"] = tuple(tuple(shape) for shape in parts["shapes"])
    return Spec(**parts)


def _saved_specs(saved: Mapping[str, Any]) -> list[Spec]:
    try:
        return [_saved_spec(layer, torch.device("cpu")) for layer in saved["layers"].values()]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []  # damaged, which is found below


def _factor(number: str, parts: Mapping[str, Any], device: torch.device | None, exchange: Exchange | None) -> Factor:
    tensors = {
        name: t if device is None or t.device.type == device.type else t.to(device)
        for name, t in parts.items()
        if isinstance(t, Tensor)
    }
    kind = parts.get("kind")
    if kind == "diagonal":
        return Diagonal(tensors["values"])
    if kind == "block_diagonal":
        return BlockDiagonal(tensors["values"])
    rounded = bool(parts["error"] != 0)
    stored = Stored(tensors["body"], tensors.get("left"), tensors.get("right"), tensors["error"], rounded=rounded)
    if kind == "dense":
        return Dense(stored)
    if exchange is None:
        columns = Columns(stored)
    elif "dim" in parts:  # these are this process's rows
        columns = ShardedColumns(stored, int(parts["dim"]), exchange)
    else:
        columns = ShardedColumns.cut(Columns(stored), exchange)
    if kind == "low_rank":
        return LowRank(columns)
    if kind == "diagonal_low_rank":
        return DiagonalLowRank(tensors["values"], columns, int(parts["sign"]))
    raise GramianError(
        f"state: factor {number} is of kind {kind!r}; expected dense, low_rank, diagonal or block_diagonal"
    )


def _load_corrections(blocks: Mapping[str, Block], saved: Mapping[str, Any], device: torch.device | None) -> None:
    """Set EK-FAC's eigenvalues on the blocks for which the saved state has them; record on the others that it has none."""
    for name, block in blocks.items():
        number = saved["layers"][name].get("correction")
        if number is not None:
            block.corrected, block.correction = True, _correction(block, saved["factors"][number], device)
        elif block.A is not None and not block.facts.reason_ekfac:
            block.facts.reason_ekfac = "the state has none of its eigenvalues"


def _correction(block: Block, parts: Mapping[str, Any], device: torch.device | None) -> Correction:
    """EK-FAC's eigenvalues from the saved entry `parts`; a GramianError if they do not fit the factors of the block."""
    bases = {}
    for side, factor in block.factors.items():
        matrix = parts.get(f"basis_{side}")
        columns = factor.columns if isinstance(factor, LowRank) else None
        rows = None if isinstance(factor, Diagonal) else factor.dim if columns is None else columns.count
        if rows != (None if matrix is None else len(matrix)) or not (matrix is None or _is_matrix(matrix)):
            raise GramianError(
                f"{block.spec.name}: its basis of {side} does not fit; expected finite columns of {rows} rows"
            )
        bases[side] = Basis(factor.dim, None if matrix is None else matrix.to(device or matrix.device), columns)
    values = parts["eigenvalues"].to(device or parts["eigenvalues"].device)
    if not _is_matrix(values) or bool((values < 0).any()):
        raise GramianError(f"{block.spec.name}: its eigenvalues are damaged; expected finite numbers of 0 or more")
    if values.shape != (bases["G"].rank, bases["A"].rank):
        raise GramianError(f"{block.spec.name}: has eigenvalues {list(values.shape)}; expected those of its basis")
    return Correction(values, bases["G"], bases["A"], float(parts["outside"]))


def _is_matrix(t: Tensor) -> bool:
    """True if `t` has two dimensions and finite float32 or float64 numbers."""
    return t.dim() == 2 and t.dtype in (torch.float32, torch.float64) and bool(t.isfinite().all())
