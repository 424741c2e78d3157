"""Decide which tokens every block stores, or whether it sums them, within the option `memory_budget`.

`keeps_of` is used by a refresh and by its plan, so the two cannot differ. It depends on shapes and options only, not on data
or free memory, so all processes decide alike, whatever tokens they have.

If a model could exceed the budget for some number of tokens, blocks are reduced in this order:
1. low rank: sides that would be dense keep L tokens instead, which loses nothing while no more than L tokens come;
2. fewer tokens: L is the largest number for which everything fits; of more tokens a keyed, rescaled subset of L is kept;
3. diagonal: where not even `FEWEST` tokens fit, the largest block becomes its diagonal, then the next largest;
4. an error with the totals.
L is one number for all blocks, so a budget that fits the plan for T tokens keeps T tokens. With low rank switched off, the
step after dense is the diagonal.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from gramian.core.byte_amounts import format_bytes
from gramian.core.errors import GramianError
from gramian.curvature.blocks.block_specs import Spec
from gramian.curvature.blocks.representation import keep_for
from gramian.curvature.estimate.token_moments import StoragePolicy
from gramian.curvature.memory.block_footprint import SidePolicies, bound
from gramian.curvature.memory.block_form import MANY, BlockForm
from gramian.curvature.memory.curvature_plan import CurvaturePlan, Keeps, plan_row
from gramian.curvature.memory.plan_totals import PlanTotal, add
from gramian.curvature.options import Options
from gramian.plan.budget import Budget, largest_fitting, smallest_fitting

DIAGONALS = SidePolicies(*[StoragePolicy(diagonal=True, why="memory_budget: its diagonal")] * 3)
FEWEST = 32
"""Smallest number of tokens of a subset; where not even these fit, a diagonal is used."""


def keeps_of(
    specs: Mapping[str, Spec], options: Options, head: str | None, exact_head: bool, device: str | None = None
) -> Keeps:
    """{K-FAC block: storage policies of its tokens}, within the budget if there is one; an error if not even diagonals fit.

    `head` is the layer whose outputs are the logits, `device` the one the model will run on (None: its own).
    """
    policy = {name: _policy(spec, options, head) for name, spec in specs.items() if spec.kind == "kronecker"}
    if options.budget is None:
        return policy
    homes = {name: device or home_of(spec.device) for name, spec in specs.items()}
    return _BudgetSearch(specs, options, head if exact_head else None, policy, homes).keeps()


def home_of(device: torch.device) -> str:
    """The device type on which a layer with parameters on `device` will run; a meta device is planned as "cuda"."""
    return "cuda" if device.type == "meta" else device.type


def store_of(options: Options, home: str) -> str:
    """The device type that stores the factors of a layer which runs on the device type `home`, by the option for it."""
    return home if options.woodbury_store_device == "auto" else options.woodbury_store_device


def _policy(spec: Spec, options: Options, head: str | None) -> SidePolicies:
    is_head = head in spec.layers
    return SidePolicies(
        keep_for("A", spec.inputs, is_head, options),
        keep_for("G", spec.outputs, is_head, options),
        keep_for("G", spec.outputs if spec.layout == "table" else spec.inputs, False, options),
    )


@dataclass(frozen=True)
class _Kind:
    """Form, policies and devices that blocks with equal memory have in common."""

    form: BlockForm
    policy: SidePolicies
    home: str
    store: str

    def weight(self, keeps: SidePolicies) -> int:
        """Bytes of a refresh of one block of this kind, by which blocks are compared."""
        one = bound(self.form, keeps)
        used = one.use_A.launched + one.use_G.launched
        return one.collect + one.rest + one.settled_A + one.settled_G + used


class _BudgetSearch:
    """The search for storage policies that fit the budget with any number of tokens; blocks of one kind are evaluated once."""

    def __init__(
        self, specs: Mapping[str, Spec], options: Options, exact: str | None, policy: Keeps, homes: Mapping[str, str]
    ) -> None:
        self.options, self.policy, self.budget, self.specs = options, policy, Budget(options.budget), specs
        self.kinds: dict[_Kind, list[str]] = {}
        for name, spec in specs.items():
            form, home = BlockForm.of(spec, options, exact=exact in spec.layers), homes[name]
            kind = _Kind(form, policy.get(name, SidePolicies()), home, store_of(options, home))
            self.kinds.setdefault(kind, []).append(name)

    def keeps(self) -> Keeps:
        """{block: storage policies} of the least reduction that fits the budget."""
        if self._fits(None, 0):
            return self.policy
        most = min(self.options.kfac_auto_t_max, self.options.max_tokens or MANY)
        fewest, blocks = min(FEWEST, most), len(self.policy)
        flat = smallest_fitting(0, blocks, lambda count: self._fits(fewest, count))
        if flat is None:
            raise self._refusal(fewest, blocks)
        tokens = largest_fitting(fewest, most, lambda count: self._fits(count, flat))
        return self._reduced(fewest if tokens is None else tokens, flat)

    def _reduced(self, tokens: int, flat: int) -> Keeps:
        """{block: storage policies} with subsets of `tokens` tokens and the `flat` largest blocks as diagonals."""
        found: dict[str, SidePolicies] = {}
        for kind, names, diagonals in self._split(flat, tokens):
            limited = self._limited(kind, tokens)
            found |= {name: DIAGONALS if i < diagonals else limited for i, name in enumerate(names)}
        return {name: found[name] for name in self.policy}

    def _split(self, flat: int, tokens: int | None) -> Iterator[tuple[_Kind, list[str], int]]:
        """(kind of Kronecker block, its blocks, how many of them are diagonal), the largest kind first."""
        kinds = [(kind, names) for kind, names in self.kinds.items() if names[0] in self.policy]
        if tokens is not None:
            kinds.sort(key=lambda pair: -pair[0].weight(self._limited(pair[0], FEWEST)))
        for kind, names in kinds:
            diagonals = min(flat, len(names))
            flat -= diagonals
            yield kind, names, diagonals

    def _limited(self, kind: _Kind, tokens: int) -> SidePolicies:
        """The policies of a kind with each side as without a budget or on a subset of `tokens` tokens: whichever takes less."""
        found = kind.policy
        subset = StoragePolicy(tokens, tokens, why=f"memory_budget: at most {tokens} tokens")
        for side, keep, width in zip(found._fields, found, kind.form.widths, strict=True):
            if self.options.low_rank and not keep.diagonal and tokens < width:
                found = min(found, found._replace(**{side: subset}), key=kind.weight)
        return found

    def _fits(self, tokens: int | None, flat: int) -> bool:
        return all(self.budget.fits(total.peak) for total in self._totals(tokens, flat).values())

    def _totals(self, tokens: int | None, flat: int) -> dict[str, PlanTotal]:
        """{device: bytes of all blocks} with subsets of `tokens` (None: no reduction) and `flat` blocks as diagonals."""
        totals: dict[str, PlanTotal] = {}
        counted = [(kind, kind.policy, len(names)) for kind, names in self.kinds.items() if names[0] not in self.policy]
        for kind, names, diagonals in self._split(flat, tokens):
            keeps = kind.policy if tokens is None else self._limited(kind, tokens)
            counted += [(kind, keeps, len(names) - diagonals), (kind, DIAGONALS, diagonals)]
        for kind, keeps, count in sorted(counted, key=lambda one: max(bound(one[0].form, one[1]).works)):
            if count:
                one = bound(kind.form, keeps)
                add(totals, one, kind.home, (kind.store,) * 2, bool(self.options.ema_decay), count)
        return totals

    def _refusal(self, tokens: int, flat: int) -> GramianError:
        """The error for a budget that cannot be met: one line with the least totals; the table is a note on it."""
        totals = self._totals(tokens, flat)
        device, total = max(totals.items(), key=lambda pair: pair[1].peak)
        parts = ", ".join(f"{stage} {format_bytes(count)}" for stage, count in total.stages().items())
        error = GramianError(
            f"memory_budget: {self.budget}, but curvature takes {format_bytes(total.peak)} on {device} "
            f"with the least that every block can keep ({parts}); expected at least {total.peak} bytes"
        )
        least = self._reduced(tokens, flat)
        rows = [
            plan_row(self.specs[name], kind.form, least.get(name, SidePolicies()), kind.home, (kind.store,) * 2)
            for kind, names in self.kinds.items()
            for name in names
        ]
        error.add_note(CurvaturePlan(tuple(rows), totals, self.options.budget, least).grouped())
        return error
