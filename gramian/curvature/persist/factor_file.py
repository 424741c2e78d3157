"""Factors at rest: to a dict, to a safetensors file, and back, with every shape checked before anything is replaced."""

from __future__ import annotations

import copy
import hashlib
import json
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block, Facts
from gramian.curvature.blocks.block_specs import Spec, find_blocks
from gramian.curvature.blocks.consistency import check_spec, unique_parameters
from gramian.curvature.blocks.eigenvalue_correction import Basis, Correction
from gramian.curvature.refresh.build_factors import settle_damping
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank
from gramian.linalg.factors.columns import Columns
from gramian.linalg.factors.stored import Stored
from gramian.parallel.exchange import Exchange
from gramian.parallel.sharded_columns import ShardedColumns

if TYPE_CHECKING:
    from gramian.curvature.kfac import KFACNaturalGradient

SCHEMA = 1
CORRECTION = "correction"
"""Kind of what a state holds of EK-FAC, beside the factors."""
COUNTERS = ("steps", "refreshes", "head", "_last_refresh", "dropped", "_softmax_checked")


def state_of(kfac: KFACNaturalGradient, gather: bool = True) -> dict[str, Any]:
    """Tensors and plain values. Shared factors are there once.

    Args:
        kfac: whose.
        gather: put rows that are spread together (collective); else this process's rows, and `dim` in every factor.
    """
    numbers: dict[int, str] = {}
    factors: dict[str, dict[str, Any]] = {}
    layers: dict[str, Any] = {}
    for name, block in kfac.kfac_factors.items():
        sides = {}
        for side, factor in block.factors.items():
            if id(factor) not in numbers:
                numbers[id(factor)] = str(len(numbers))
                factors[numbers[id(factor)]] = _factor_state(factor, gather)
            sides[side] = numbers[id(factor)]
        spec = {key: value for key, value in asdict(block.spec).items() if key not in ("dtype", "device")}
        spec["dtype"] = str(block.spec.dtype).removeprefix("torch.")
        layers[name] = {"spec": spec, "facts": asdict(block.facts), "sides": sides}
        if block.correction is not None:
            layers[name]["correction"] = f"of {len(layers)}"
            factors[layers[name]["correction"]] = _correction_state(block.correction, gather)
    return {
        "schema": SCHEMA,
        "options": asdict(kfac.options),
        "counters": {name: copy.deepcopy(getattr(kfac, name)) for name in COUNTERS},
        "generator": kfac._generator.get_state(),
        "frozen": _frozen(None if kfac._model is None else kfac._model()),
        "layers": layers,
        "factors": factors,
    }


def _frozen(root: nn.Module | None) -> list[str]:
    """Parameters that do not train."""
    return [] if root is None else [name for name, p in unique_parameters(root) if not p.requires_grad]


def _factor_state(factor: Factor, gather: bool) -> dict[str, Any]:
    dim = {} if gather else {"dim": factor.dim}
    if isinstance(factor, Diagonal):
        return {"kind": "diagonal", "values": factor.values_N, **dim}
    if isinstance(factor, Dense):
        return {"kind": "dense", **_stored_state(factor.stored), **dim}
    assert isinstance(factor, LowRank | DiagonalLowRank)
    stored = _stored_state((factor.columns.whole() if gather else factor.columns).stored)
    if isinstance(factor, LowRank):
        return {"kind": "low_rank", **stored, **dim}
    return {"kind": "diagonal_low_rank", "sign": factor.sign, "values": factor.values_N, **stored, **dim}


def _correction_state(correction: Correction, gather: bool) -> dict[str, Any]:
    """Eigenvalues and basis; columns of a basis are those of the factor."""
    parts = {"eigenvalues": correction.values_RS, "basis_G": correction.G.matrix, "basis_A": correction.A.matrix}
    tensors = {name: _alone(t) for name, t in parts.items() if t is not None}
    return {"kind": CORRECTION, "outside": correction.outside, **tensors, **({} if gather else {"dim": 0})}


def _correction(block: Block, parts: Mapping[str, Any], device: torch.device | None) -> Correction:
    """As it was saved, for the factors of a block."""
    bases = {}
    for side, factor in block.factors.items():
        matrix = parts.get(f"basis_{side}")
        columns = factor.columns if isinstance(factor, LowRank) else None
        rows = None if isinstance(factor, Diagonal) else factor.dim if columns is None else columns.count
        if rows != (None if matrix is None else len(matrix)) or not (matrix is None or _is_matrix(matrix)):
            raise GramianError(
                f"{block.spec.name}: its basis of {side} is none; expected finite columns of {rows} rows"
            )
        bases[side] = Basis(factor.dim, None if matrix is None else matrix.to(device or matrix.device), columns)
    values = parts["eigenvalues"].to(device or parts["eigenvalues"].device)
    if not _is_matrix(values) or bool((values < 0).any()):
        raise GramianError(f"{block.spec.name}: its eigenvalues are none; expected finite numbers of 0 or more")
    if values.shape != (bases["G"].rank, bases["A"].rank):
        raise GramianError(f"{block.spec.name}: has eigenvalues {list(values.shape)}; expected those of its basis")
    return Correction(values, bases["G"], bases["A"], float(parts["outside"]))


def _alone(t: Tensor) -> Tensor:
    """A tensor without the rest of the memory that it is a view of, which would be saved with it."""
    return t if t.untyped_storage().nbytes() == t.nbytes else t.clone()


def _is_matrix(t: Tensor) -> bool:
    """True for finite real numbers in two dimensions."""
    return t.dim() == 2 and t.dtype in (torch.float32, torch.float64) and bool(t.isfinite().all())


def _stored_state(stored: Stored) -> dict[str, Any]:
    parts = {"body": stored.body, "left": stored.left, "right": stored.right, "error": stored.relative_error}
    return {name: t for name, t in parts.items() if t is not None}


def load(
    kfac: KFACNaturalGradient, saved: Mapping[str, Any], root: nn.Module | None, others: Exchange | None = None
) -> None:
    """Check all of it, then replace all of it.

    Args:
        kfac: gets it.
        saved: the same on all processes.
        root: the model, if it is known.
        others: the processes over which rows of low-rank sides are spread again; None: all stay here.

    Raises:
        GramianError: naming the field or layer that does not fit.
    """
    if not isinstance(saved, Mapping) or "schema" not in saved:
        raise GramianError("state: has no schema; expected what state_dict() gave")
    if saved["schema"] != SCHEMA:
        raise GramianError(f"state: has schema {saved['schema']!r}; expected {SCHEMA}")
    specs = find_blocks(root, kfac.options) if root is not None else dict(kfac._specs)
    known = root if root is not None or kfac._model is None else kfac._model()
    device = _home(kfac, root)
    generator = torch.Generator()
    try:
        blocks = _blocks(saved, specs, device, set(_frozen(known)), others)
        if kfac.options.ekfac:
            _correct(blocks, saved, device)
        waited = set(saved["frozen"])
        counters = _counters(saved["counters"])
        generator.set_state(saved["generator"].cpu())
        settle_damping(blocks.values(), kfac.options)
    except GramianError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        what = " ".join(f"{type(error).__name__} {error}".split())
        raise GramianError(f"state: is not whole ({what}); expected what state_dict() gave") from None
    missing = [
        name
        for name, spec in specs.items()
        if name not in blocks and name in kfac.kfac_factors and not waited.issuperset(spec.parameters)
    ]
    if missing:
        raise GramianError(f"{missing[0]}: has factors here, but not in the state; expected the same model")
    kfac.kfac_factors, kfac._spread = blocks, SharedFactorisation(others)
    for name, value in counters.items():
        setattr(kfac, name, value)
    kfac._generator = generator
    if root is not None:
        kfac._model = weakref.ref(root)
    kfac._specs = specs or {name: block.spec for name, block in blocks.items()}


def _counters(saved: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("steps", "refreshes"):
        if not isinstance(saved[name], int) or saved[name] < 0:
            raise GramianError(f"state: {name} is {saved[name]!r}; expected an integer of at least 0")
    return {name: copy.deepcopy(saved[name]) for name in COUNTERS}


def _home(kfac: KFACNaturalGradient, root: nn.Module | None) -> torch.device | None:
    """Where loaded factors go: as the option says, else to the model; None: they stay."""
    if kfac.options.woodbury_store_device != "auto":
        return torch.device(kfac.options.woodbury_store_device)
    return None if root is None else next(root.parameters()).device


def _blocks(
    saved: Mapping[str, Any],
    specs: Mapping[str, Spec],
    device: torch.device | None,
    frozen: set[str],
    others: Exchange | None,
) -> dict[str, Block]:
    """The blocks of a state, each checked against the model's own; those of layers frozen by now wait with them."""
    factors = {number: parts for number, parts in saved["factors"].items() if parts.get("kind") != CORRECTION}
    made = {number: _factor(number, parts, device, others) for number, parts in factors.items()}
    blocks: dict[str, Block] = {}
    for name, layer in saved["layers"].items():
        parts = dict(layer["spec"])
        sides = {side: made[number] for side, number in layer["sides"].items()}
        parts["dtype"] = getattr(torch, parts["dtype"])
        parts["device"] = sides["G"].device
        for key in ("parameters", "layers", "tables"):
            parts[key] = tuple(parts[key])
        parts["shapes"] = tuple(tuple(shape) for shape in parts["shapes"])
        spec = Spec(**parts)
        if specs and name not in specs and not frozen.issuperset(spec.parameters):
            raise GramianError(f"{name}: is in the state, but no trainable layer of the model; expected the same model")
        if name in specs:
            check_spec(spec, specs[name])
        block = Block(spec, sides.get("A"), sides["G"], Facts(**layer["facts"]))
        for side, wanted in (("A", spec.inputs), ("G", spec.outputs)):
            if side in block.factors and block.factors[side].dim != wanted:
                raise GramianError(f"{name}: {side} has side {block.factors[side].dim}; expected {wanted}")
            if side in block.factors and not bool(block.factors[side].trace().isfinite()):
                raise GramianError(f"{name}: {side} holds NaN or infinity; expected finite factors")
        blocks[name] = block
    return blocks


def _correct(blocks: Mapping[str, Block], saved: Mapping[str, Any], device: torch.device | None) -> None:
    """Give blocks the eigenvalues that EK-FAC measured, as far as they are in the state."""
    for name, block in blocks.items():
        number = saved["layers"][name].get("correction")
        if number is not None:
            block.corrected, block.correction = True, _correction(block, saved["factors"][number], device)
        elif block.A is not None and not block.facts.reason_ekfac:
            block.facts.reason_ekfac = "the state has none of its eigenvalues"


def _factor(number: str, parts: Mapping[str, Any], device: torch.device | None, others: Exchange | None) -> Factor:
    tensors = {
        name: t if device is None or t.device.type == device.type else t.to(device)
        for name, t in parts.items()
        if isinstance(t, Tensor)
    }
    kind = parts.get("kind")
    if kind == "diagonal":
        return Diagonal(tensors["values"])
    stored = Stored(tensors["body"], tensors.get("left"), tensors.get("right"), tensors["error"])
    if kind == "dense":
        return Dense(stored)
    if others is None:
        columns = Columns(stored)
    elif "dim" in parts:  # these are this process's rows
        columns = ShardedColumns(stored, int(parts["dim"]), others)
    else:
        columns = ShardedColumns.cut(Columns(stored), others)
    if kind == "low_rank":
        return LowRank(columns)
    if kind == "diagonal_low_rank":
        return DiagonalLowRank(tensors["values"], columns, int(parts["sign"]))
    raise GramianError(f"state: factor {number} is of kind {kind!r}; expected dense, low_rank or diagonal")


def save(kfac: KFACNaturalGradient, path: str) -> None:
    """One file: tensors as safetensors, the rest as JSON in its header."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = state_of(kfac)
    tensors: dict[str, Tensor] = {"generator": whole.pop("generator")}
    for number, parts in whole["factors"].items():
        for name in [name for name, value in parts.items() if isinstance(value, Tensor)]:
            tensors[f"{number}.{name}"] = parts.pop(name).contiguous()
    header = json.dumps(whole)
    tensors = {name: t.cpu().clone() for name, t in tensors.items()}
    try:
        save_file(tensors, path, metadata={"gramian": header, "sha256": _digest(header, tensors)})
    except (OSError, TypeError, SafetensorError) as error:
        raise GramianError(
            f"path: {path!r} cannot be written ({error}); expected a file in a folder that exists"
        ) from None


def read(path: str) -> dict[str, Any]:
    """What `save` wrote.

    Raises:
        GramianError: if the file is none of ours.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, TypeError, SafetensorError) as error:
        raise GramianError(f"{path}: cannot be read ({error}); expected a file written by kfac.save") from None
    if "gramian" not in told:
        raise GramianError(f"{path}: has no gramian header; expected a file written by kfac.save")
    if told.get("sha256") != _digest(told["gramian"], tensors):
        raise GramianError(f"{path}: is damaged (its checksum is another); expected a file written by kfac.save")
    try:
        whole: dict[str, Any] = json.loads(told["gramian"])
        whole["generator"] = tensors.pop("generator")
        for name, t in tensors.items():
            number, _, part = name.partition(".")
            whole["factors"][number][part] = t
    except (ValueError, KeyError, TypeError):
        raise GramianError(f"{path}: its gramian header is damaged; expected a file written by kfac.save") from None
    return whole


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all that a file says."""
    found = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
