"""Bytes of all blocks on one device at each stage of a refresh: sums, or the maximum where blocks are processed in turn."""

from dataclasses import dataclass, field

from gramian.curvature.memory.block_footprint import Footprint
from gramian.curvature.memory.factor_shape import FactorisationBytes
from gramian.curvature.memory.operator_footprint import OperatorBytes, applied_together, recorded

STAGES = ("collect", "build", "rest", "use", "apply", "ready")
"""Stages of a plan, the columns of its table: tokens are collected, factors are built, stored, factorised and applied, and
operators made of them are kept for an optimizer's steps."""


@dataclass
class PlanTotal:
    """Bytes of all blocks on one device: the fields of `Footprint`, added up or maximised by `add`."""

    averaged: bool
    """True if factors are averaged over refreshes."""
    collect: int = 0
    build: int = 0
    joined: int = 0
    rest: int = 0
    settled: int = 0
    apply: int = 0
    correcting: int = 0
    gathered: int = 0
    streamed: bool = False
    leaving: int = 0
    """Bytes of the largest factor that is still being copied to another device while the next one is built."""
    uses: list[tuple[FactorisationBytes, int]] = field(default_factory=list)
    """(factorisation bytes of a factor, number of equal factors), in the order of the blocks."""
    operators: dict[OperatorBytes, int] = field(default_factory=dict)
    """{bytes of a block's operators: number of blocks}; blocks of one shape are stacked, so equal ones count as a stack."""

    @property
    def factorised(self) -> int:
        """Bytes of the factorisations that are stored until the next refresh."""
        return sum(count * use.stored for use, count in self.uses)

    @property
    def use(self) -> int:
        """Peak of bytes while the norms of all factors are bounded and then all factorisations are launched without waiting."""
        stored = peak = 0
        for use, count in self.uses:
            stored += count * use.gram
            peak = max(peak, stored + use.bounding)
        for use, count in self.uses:
            stored += count * (use.launched - use.gram)
            peak = max(peak, stored + use.working)
        return peak

    @property
    def first(self) -> int:
        """Peak of bytes in the first refresh and its use, without earlier factors."""
        used = self.rest + self._used(0)
        return max(self.collect + self.making + self.rest, used, self.rest + self.measuring)

    @property
    def peak(self) -> int:
        """Peak of bytes in a later refresh: earlier factors and their factorisations exist while new ones are built."""
        used = self.settled + self._used(self._of_operators("replaced"))
        fresh = self.rest + (self.settled if self.averaged else 0)
        making = max(self.collect + self.making, self.measuring)
        return recorded(self.operators) + max(self.settled + self.factorised + self.ready + making + fresh, used)

    @property
    def ready(self) -> int:
        """Bytes of the operators that an optimizer keeps until the next refresh."""
        return self._of_operators("stored")

    @property
    def stepping(self) -> int:
        """Bytes on top of the operators while they are applied: results of all blocks, and the largest stacks' matrices."""
        return self._of_operators("result") + applied_together(self.operators)

    def _used(self, replaced: int) -> int:
        """Peak of bytes on top of the factors while they are factorised, made into operators and applied."""
        made, stacks = self._of_operators("made"), [count * one.stored for one, count in self.operators.items()]
        inverting = min(self._of_operators("inverting"), max((one.at_a_time for one in self.operators), default=0))
        preparing = replaced + made + max(inverting, self.ready + 2 * max(stacks, default=0))
        return max(self.use + made, self.factorised + max(preparing, self.ready + max(self.apply, self.stepping)))

    def _of_operators(self, part: str) -> int:
        return sum(count * int(getattr(one, part)) for one, count in self.operators.items())

    @property
    def making(self) -> int:
        """Bytes on top of tokens and factors while factors are built."""
        return self.joined + self.build + self.leaving

    @property
    def measuring(self) -> int:
        """Bytes while EK-FAC finds eigenvectors and measures eigenvalues, tokens that are stored included; 0 without EK-FAC."""
        stored = 0 if self.streamed else self.collect
        working = self.factorised + self.gathered + self.correcting
        return stored + max(self.use, working) if self.correcting else 0

    def stages(self) -> dict[str, int]:
        """{stage: bytes on this device}, for each stage of STAGES."""
        amounts = (self.collect, self.making, self.rest, self.use, self.apply, self.ready)
        return dict(zip(STAGES, amounts, strict=True))


def add(
    totals: dict[str, PlanTotal], one: Footprint, home: str, stores: tuple[str, str], averaged: bool, count: int = 1
) -> None:
    """Add the bytes `one` of each of `count` equal blocks to `totals`, {device type: total}.

    Layers run on the device type `home`, A and G are stored on `stores`; `averaged`: factors are averaged over refreshes.
    """
    here = totals.setdefault(home, PlanTotal(averaged=averaged))
    sent = [rest for rest, store in zip((one.rest_A, one.rest_G), stores, strict=True) if store != home]
    here.collect += count * one.collect
    here.joined += count * one.joined
    here.correcting = max(here.correcting, one.correcting)
    here.gathered, here.streamed = here.gathered + count * one.gathered, here.streamed or one.streamed
    here.build, here.leaving = max(here.build, one.build + sum(sent)), max(here.leaving, *sent, 0)
    here.apply = max(here.apply, max(one.apply, one.visiting) + one.fetched if sent else one.apply)
    if any(one.operators) and not sent:  # factors on another device keep the exact path
        here.operators[one.operators] = here.operators.get(one.operators, 0) + count
    for store, rest, settled, use in (  # in the order of factorisation
        (stores[1], one.rest_G, one.settled_G, one.use_G),
        (stores[0], one.rest_A, one.settled_A, one.use_A),
    ):
        there = totals.setdefault(store, PlanTotal(averaged=averaged))
        there.rest += count * rest
        there.settled += count * settled
        there.uses.append((use, count))
        there.apply = max(there.apply, one.apply)
