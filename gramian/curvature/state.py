"""What a K-FAC object knows between two calls: one explicit value that every stage receives.

A capture fills sums (estimate), sums become factors (refresh), factors meet gradients (apply), and all of it is saved and
reported (persist). Each stage is a set of functions of a `CurvatureState`; none imports the façade `kfac.py`.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec, find_blocks
from gramian.curvature.blocks.consistency import check_spec, unique_parameters
from gramian.curvature.options import Options
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.parallel.exchange import Exchange


@dataclass
class CurvatureState:
    """Options, factors, counters and process group of one `KFACNaturalGradient`."""

    options: Options
    process_group: Any = None
    """The processes that share the data, as the user gave them; None: they are found at each capture."""

    # ---- model and factors ----
    model_ref: weakref.ref[nn.Module] | None = None
    """The captured module, unwrapped, for as long as the user keeps it."""
    specs: dict[str, Spec] = field(default_factory=dict)
    """{block: its parameters, shapes and kind} of the captured model."""
    blocks: dict[str, Block] = field(default_factory=dict)
    """{block: its factors}; blocks that no data has reached are missing."""
    head: str | None = None
    """The layer whose outputs are the logits, as far as it is known."""
    factorisations: SharedFactorisation = field(default_factory=lambda: SharedFactorisation(None))
    """Which process factorises which of the current factors."""

    # ---- steps ----
    steps: int = 0
    """Captures and collections so far."""
    refreshes: int = 0
    """Those of them that made new factors."""
    last_refresh: int | None = None
    """The step of the last refresh."""
    capturing: bool = False
    """True inside the `with` block of a capture."""
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Refreshes that left the factors as they were: {"step", "reason"} of each."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    """Source of the seeds of drawn labels and token subsets."""
    generator_before_step: torch.Tensor | None = None
    """The generator's state before the current step drew its seeds."""
    seeds: tuple[int, int] = (0, 0)
    """Seeds of the current refresh."""

    # ---- processes ----
    world_size: int = 1
    """Processes at the last capture."""
    shared_refreshes: int = 0
    """Refreshes that several processes began together."""
    group_number: tuple[Any, int] | None = None
    """A process group, and this object's number among the objects that its processes share."""

    # ---- facts for the record ----
    padding: dict[str, list[float]] = field(default_factory=dict)
    """{layer: [tokens counted, loss terms]} of the last refresh, where tokens without a loss term were counted too."""
    loss_coefficient: float | None = None
    """Coefficient of one loss term relative to the stated one, where the first refresh found it to differ."""
    coefficient_checked: bool = False
    softmax_checked: bool = False
    separate_processes_logged: bool = False
    without_curvature: set[str] = field(default_factory=set)
    """Parameters whose gradients were returned unchanged because no capture has reached them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of the last refresh ("build") and of the last use ("apply")."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that left this process in the last refresh, by kind of collective."""

    def __post_init__(self) -> None:
        """Seed the generator."""
        self.generator.manual_seed(self.options.seed)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle belongs to no process group, and to no model until it captures one or is loaded with one."""
        detached = {"model_ref": None, "group_number": None, "process_group": None}
        return {**self.__dict__, **detached, "factorisations": SharedFactorisation(None)}

    @property
    def model(self) -> nn.Module | None:
        """The captured module; None before a capture, or if it is gone."""
        return None if self.model_ref is None else self.model_ref()

    @property
    def exchange(self) -> Exchange | None:
        """The processes that have the same factors; None: this one alone."""
        return self.factorisations.exchange

    def checked_specs(self, root: nn.Module) -> dict[str, Spec]:
        """The blocks of a model, after a check that they are those the factors belong to.

        A block whose parameters are all frozen now keeps its factors until they train again.
        """
        specs = find_blocks(root, self.options)
        frozen = {name for name, p in unique_parameters(root) if not p.requires_grad}
        for name, block in self.blocks.items():
            now = specs.get(name)
            if now is not None:
                check_spec(block.spec, now)
            elif not frozen.issuperset(block.spec.parameters):
                raise GramianError(
                    f"{name}: has factors, but is not a block of its own any more (what trains around it has changed); "
                    "expected the captured model, or a new object"
                )
        return specs

    def parameters_outside_blocks(self) -> dict[str, int]:
        """{trainable parameter of the captured model: its elements} for those that no block contains."""
        in_blocks = {p for spec in self.specs.values() for p in spec.parameters}
        known = [] if self.model is None else unique_parameters(self.model)
        return {name: p.numel() for name, p in known if p.requires_grad and name not in in_blocks}

    def require_factors(self) -> None:
        """Raise before the first refresh."""
        if not self.blocks:
            raise GramianError("kfac: has no factors yet; expected a capture or collect_kfac_factors before")

    def refuse_nested(self) -> None:
        """Raise inside a capture of this object."""
        if self.capturing:
            raise GramianError("capture: this object is inside a capture already; expected one at a time")
