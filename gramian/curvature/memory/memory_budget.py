"""Choose for every block whether it stores tokens (and how many), their sum or its diagonal, within the option `memory_budget`.

`keeps_of` is used by a refresh and by its plan, so the two cannot differ. It depends on shapes and options only, not on data
or free memory, so all processes choose alike, whatever tokens they have.

If a model could exceed the budget for some number of tokens, blocks are reduced in this order:
1. low rank: sides (A or G) that would be dense store L tokens instead, which loses nothing up to L tokens;
2. fewer tokens: L is the largest number for which everything fits; of more tokens a random, rescaled subset of L is stored;
3. diagonal: if not even `FEWEST` tokens fit, the largest block becomes its diagonal, then the next largest;
4. an error with the totals.
L is one number for all blocks, so a budget that fits the plan for T tokens stores T tokens. If low rank is switched off, a
dense side is reduced to its diagonal at once. With EK-FAC, S [r, s] of r and s eigenvectors counts too, and the second pass
that measures it: fewer tokens are fewer eigenvectors, and a block that is its diagonal keeps K-FAC's eigenvalues.
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
"""Smallest number of tokens of a subset; if not even these fit, blocks become diagonal."""


def keeps_of(
    specs: Mapping[str, Spec], options: Options, head: str | None, exact_head: bool, device: str | None = None
) -> Keeps:
    """{K-FAC block: storage policies of its tokens}, within the budget if there is one; a GramianError if diagonals do not fit.

    `head` is the layer whose outputs are the logits (None: unknown), `exact_head` whether its G is the exact softmax Fisher,
    `device` the device type that the model will run on (None: its own).
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
    """The device type that stores the factors of a layer that runs on `home`: `woodbury_store_device`, with "auto" `home`."""
    return home if options.woodbury_store_device == "auto" else options.woodbury_store_device


def _policy(spec: Spec, options: Options, head: str | None) -> SidePolicies:
    is_head = head in spec.layers
    inputs, outputs = spec.inputs - spec.has_bias, spec.outputs
    diagonal = StoragePolicy(diagonal=True)
    return SidePolicies(
        diagonal if options.one_sided and inputs > outputs else keep_for("A", spec.inputs, is_head, options),
        diagonal if options.one_sided and outputs > inputs else keep_for("G", spec.outputs, is_head, options),
        keep_for("G", spec.outputs if spec.layout == "table" else spec.inputs, False, options),
    )


@dataclass(frozen=True)
class _Kind:
    """All that the memory of a block depends on (form, policies, devices); blocks of equal `_Kind` take equal bytes."""

    form: BlockForm
    policy: SidePolicies
    home: str
    store: str

    def weight(self, keeps: SidePolicies) -> int:
        """Bytes of one block of this kind under the policies `keeps`, summed over stages, to compare the sizes of blocks."""
        one = bound(self.form, keeps)
        used = one.use_A.launched + one.use_G.launched
        return one.collect + one.rest + one.settled_A + one.settled_G + used


class _BudgetSearch:
    """The search for storage policies that fit the budget for any number of tokens; equal blocks are evaluated once."""

    def __init__(
        self, specs: Mapping[str, Spec], options: Options, exact: str | None, policy: Keeps, homes: Mapping[str, str]
    ) -> None:
        self.options, self.policy, self.budget, self.specs = options, policy, Budget(options.budget), specs
        self.kinds: dict[_Kind, list[str]] = {}
        for name, spec in specs.items():
            form, home = BlockForm.of(spec, options, exact=exact in spec.layers, streamed=True), homes[name]
            kind = _Kind(form, policy.get(name, SidePolicies()), home, store_of(options, home))
            self.kinds.setdefault(kind, []).append(name)

    def keeps(self) -> Keeps:
        """{block: storage policies} of the least reduction that fits the budget; a GramianError if none does."""
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
        """(kind of Kronecker block, names of its blocks, how many of them are diagonal) if the `flat` largest blocks are.

        The largest kind comes first; `tokens` None: no subset of tokens, kinds in the order of the model.
        """
        kinds = [(kind, names) for kind, names in self.kinds.items() if names[0] in self.policy]
        if tokens is not None:
            kinds.sort(key=lambda pair: -pair[0].weight(self._limited(pair[0], FEWEST)))
        for kind, names in kinds:
            diagonals = min(flat, len(names))
            flat -= diagonals
            yield kind, names, diagonals

    def _limited(self, kind: _Kind, tokens: int) -> SidePolicies:
        """For each side of a kind the policy without a budget, or a subset of `tokens` tokens where that takes fewer bytes."""
        found = kind.policy
        subset = StoragePolicy(tokens, tokens, why=f"memory_budget: at most {tokens} tokens")
        for side, keep, width in zip(found._fields, found, kind.form.widths, strict=True):
            if self.options.low_rank and not keep.diagonal and tokens < width:
                found = min(found, found._replace(**{side: subset}), key=kind.weight)
        return found

    def _fits(self, tokens: int | None, flat: int) -> bool:
        return all(self.budget.fits(total.peak) for total in self._totals(tokens, flat).values())

    def _totals(self, tokens: int | None, flat: int) -> dict[str, PlanTotal]:
        """{device: bytes of all blocks} with subsets of `tokens` (None: no subsets) and the `flat` largest as diagonals."""
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
        """The error for a budget that cannot be met: one line with the smallest totals; the plan's table is added as a note."""
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
