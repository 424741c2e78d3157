"""The state of a K-FAC object between two calls, as one explicit value that every stage receives.

A capture fills sums (estimate), sums become factors (refresh), factors multiply gradients (apply), and all of it is saved and
reported (persist). Each stage is a set of functions of a `CurvatureState`; none imports the façade `kfac.py`.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gramian.core.errors import GramianError
from gramian.curvature.apply.ready_operators import ReadyOperators
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec, find_blocks
from gramian.curvature.blocks.consistency import check_spec, tap_as, unique_parameters
from gramian.curvature.blocks.eigenvalue_correction import Correction
from gramian.curvature.options import Options
from gramian.curvature.refresh.shared_factorisation import SharedFactorisation
from gramian.parallel.exchange import Exchange
from gramian.taps.products.replay import OTHERWISE


@dataclass
class CurvatureState:
    """Options, factors, counters and process group of one `KFACNaturalGradient`."""

    options: Options
    process_group: Any = None
    """The process group that the user gave; None: the processes that share the data are found at each capture."""

    # ---- model and factors ----
    model_ref: weakref.ref[nn.Module] | None = None
    """Weak reference to the captured module, without wrappers such as DDP; None before the first capture."""
    specs: dict[str, Spec] = field(default_factory=dict)
    """{block name: its parameters, shapes and kind} for the captured model."""
    blocks: dict[str, Block] = field(default_factory=dict)
    """{block name: `Block` with its factors}; blocks that no captured data has reached are missing."""
    earlier: dict[str, Correction] = field(default_factory=dict)
    """{block: EK-FAC's eigenvalues before the last refresh}, which those of a second pass are averaged with."""
    observed: dict[str, str] = field(default_factory=dict)
    """{parameter of an assumed form: the layout that refreshes have seen, or why it is not a matrix} (`assumed_matrices`)."""
    only: frozenset[str] | None = None
    """Names of parameters: blocks of other parameters are left out. None: all blocks are estimated."""
    head: str | None = None
    """Name of the layer whose outputs are the logits; None while it is not known."""
    factorisations: SharedFactorisation = field(default_factory=lambda: SharedFactorisation(None))
    """Assigns each factorisation of the current factors to one process, which broadcasts the result."""

    ready: ReadyOperators | None = None
    """Operators of the current factors that training steps use; None until the first such step after a refresh."""

    trust_region: torch.Tensor | None = None
    """Factor of at most 1 by which the last preconditioned step was scaled, 0-dim on its device; None: no such step."""

    # ---- steps ----
    steps: int = 0
    """Number of captures and collections so far, whether or not they refreshed the factors."""
    refreshes: int = 0
    """Number of captures and collections that made new factors."""
    last_refresh: int | None = None
    """Number of the step (capture or collection) at which new factors were last made; None: there are none yet."""
    private: bool = False
    """True once a capture observed a model in private training: the factors depend on its data."""
    capturing: bool = False
    """True inside the `with` block of a capture."""
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Refreshes that were rejected, so that the factors stayed as they were: {"step", "reason"} of each."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    """Source of the seeds of drawn labels and token subsets."""
    generator_before_step: torch.Tensor | None = None
    """State of `generator` before the current step drew its seeds; None before the first step."""
    seeds: tuple[int, int] = (0, 0)
    """The two seeds of the current refresh, from which labels and random token subsets are drawn."""

    # ---- processes ----
    world_size: int = 1
    """Number of processes at the last capture."""
    shared_refreshes: int = 0
    """Number of refreshes that several processes began together."""
    group_number: tuple[Any, int] | None = None
    """(process group, number that identifies this K-FAC object on all processes of the group); None before the first use."""

    # ---- facts for the record ----
    padding: dict[str, list[float]] = field(default_factory=dict)
    """{layer: [tokens counted, loss terms]} of the last refresh, for layers whose sums contain tokens without a loss term."""
    loss_coefficient: float | None = None
    """Measured coefficient of one loss term divided by that of the arguments of capture or correct; None: no difference."""
    coefficient_checked: bool = False
    correction_checked: bool = False
    """The same of the arguments of `correct`, which may differ."""
    softmax_checked: bool = False
    separate_processes_logged: bool = False
    without_curvature: set[str] = field(default_factory=set)
    """Names of parameters whose gradients were returned unchanged because no capture has reached them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that making factors took in the last refresh ("build"), and the last product with a vector ("apply")."""
    sent: dict[str, int] = field(default_factory=dict)
    """{kind of collective: bytes that left this process for it in the last refresh}."""

    def __post_init__(self) -> None:
        """Seed `generator` with the option `seed`."""
        self.generator.manual_seed(self.options.seed)

    def __getstate__(self) -> dict[str, Any]:
        """Fields for a copy or a pickle, without process group and model; a later capture or load sets them on the copy."""
        detached = {"model_ref": None, "group_number": None, "process_group": None, "ready": None}
        return {**self.__dict__, **detached, "factorisations": SharedFactorisation(None)}

    @property
    def model(self) -> nn.Module | None:
        """The captured module; None before a capture, or if the user has freed it."""
        return None if self.model_ref is None else self.model_ref()

    @property
    def exchange(self) -> Exchange | None:
        """Collectives among the processes that have the same factors; None if only this process has them."""
        return self.factorisations.exchange

    def checked_specs(self, root: nn.Module) -> dict[str, Spec]:
        """{block name: `Spec`} of the model `root`; a GramianError if a block that has factors has changed since the capture.

        A block whose parameters are all frozen now is no error: it keeps its factors until they train again.
        """
        specs = self._wanted(find_blocks(root, self.options, self.observed))
        if not specs.keys() >= self.blocks.keys() and tap_as(root, [block.spec for block in self.blocks.values()]):
            specs = self._wanted(find_blocks(root, self.options, self.observed))
        frozen = {name for name, p in unique_parameters(root) if not p.requires_grad}
        for name, block in self.blocks.items():
            now = specs.get(name)
            if now is not None:
                check_spec(block.spec, now)
            elif not frozen.issuperset(block.spec.owners):
                raise GramianError(
                    f"{name}: has factors, but is not a block of its own any more (what trains around it has changed); "
                    "expected the captured model, or a new object"
                )
        return specs

    def specs_without_assumptions(self, root: nn.Module) -> dict[str, Spec]:
        """{block name: `Spec`} of the model `root` if no matrix that is only assumed to be one turns out to be one."""
        specs = self._wanted(find_blocks(root, self.options, self.observed))
        assumed = {spec.owners[0] for spec in specs.values() if spec.assumed} - self.observed.keys()
        if not assumed:
            return specs
        return self._wanted(find_blocks(root, self.options, self.observed | dict.fromkeys(assumed, OTHERWISE)))

    def _wanted(self, specs: dict[str, Spec]) -> dict[str, Spec]:
        """The blocks of the parameters in `only`."""
        if self.only is None:
            return specs
        return {name: spec for name, spec in specs.items() if not self.only.isdisjoint(spec.owners)}

    def factors_now(self) -> dict[str, Any]:
        """{attribute: value} of the factors and of the counters that go with them, to take them back by `restore_factors`."""
        names = ("blocks", "earlier", "head", "observed", "factorisations", "refreshes", "last_refresh")
        return {name: getattr(self, name) for name in names}

    def restore_factors(self, before: dict[str, Any]) -> None:
        """Take back the factors that `factors_now` returned, as if there had been no refresh since."""
        for name, value in before.items():
            setattr(self, name, value)

    def parameters_outside_blocks(self) -> dict[str, int]:
        """{trainable parameter of the captured model that no block contains: its number of elements}."""
        in_blocks = {p for spec in self.specs.values() for p in spec.owners}
        known = [] if self.model is None else unique_parameters(self.model)
        return {name: p.numel() for name, p in known if p.requires_grad and name not in in_blocks}

    def require_factors(self) -> None:
        """Raise a GramianError if there are no factors yet (before the first refresh or load)."""
        if not self.blocks:
            raise GramianError("kfac: has no factors yet; expected a capture or collect_kfac_factors before")

    def refuse_nested(self) -> None:
        """Raise a GramianError inside an open capture of this K-FAC object."""
        if self.capturing:
            raise GramianError("capture: this object is inside a capture already; expected one at a time")
