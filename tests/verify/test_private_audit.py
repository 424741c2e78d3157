"""`gramian audit`: every sabotage of private training fails its check, and an honest run fails none.

A sabotage replaces a function of the real code path; nothing in the package knows of it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.privacy.clipping import sample_norms
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.sampling import poisson
from gramian.taps.gradients import joined
from gramian.verify.private_audit.audit_finding import SIGNIFICANCE, AuditFinding
from gramian.verify.private_audit.audited_run import AuditedRun, open_run
from gramian.verify.private_audit.canaries import check_canaries
from gramian.verify.private_audit.releases import check_releases
from gramian.verify.private_audit.sensitivity import check_sensitivity
from tests.kit.matrix import FULL
from tests.train.runs import ONE, small

SEEDS = range(20 if FULL else 2)
Patch = pytest.MonkeyPatch


def run_of(seed: int, dropout: float = 0.0, kfac: dict[str, Any] | None = None, **privacy: Any) -> AuditedRun:
    config = small(
        run={"steps": 100, "seed": seed},
        model={"layers": 1, "width": 16, "tied": True, "dropout": dropout},
        data={"length": 8, "batch": 8},
        schedule={"warmup": 1},
        privacy={"noise_multiplier": 1.0, "accountant": "rdp", "proof": "off", "clipping": "bookkeeping", **privacy},
        **({} if kfac is None else {"kfac": kfac}),
    )
    return open_run(config, ONE, None, None)


def change_factors(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the clip factors [B] of every backward."""
    plain = sample_norms.set_factors

    def changed(work: Any) -> Any:
        clipped = plain(work)
        work.factors = {group: change(factors_B) for group, factors_B in work.factors.items()}
        return clipped

    patch.setattr(sample_norms, "set_factors", changed)


def no_clip(patch: Patch) -> None:
    change_factors(patch, torch.ones_like)


def clips_at_twice(patch: Patch) -> None:
    change_factors(patch, lambda factors_B: (2 * factors_B).clamp(max=1.0))


def rows_of_others(patch: Patch) -> None:
    change_factors(patch, lambda factors_B: factors_B.roll(1))


def no_cross_term(patch: Patch) -> None:
    patch.setattr(joined, "inner", lambda left, right: torch.zeros(left.batch))


def change_noise(
    patch: Patch, places: Any = lambda places: places, std: float = 1.0, number: Any = lambda n: n
) -> None:
    plain = NoisePlan.add_noise_to

    def add(self: NoisePlan, targets: Any, sums: Any, at: Any, deviation: Any, release: int, *rest: Any) -> None:
        plain(self, targets, sums, places(at), deviation * std, number(release), *rest)

    patch.setattr(NoisePlan, "add_noise_to", add)


def half_the_noise(patch: Patch) -> None:
    change_noise(patch, std=0.5)


def noise_reused(patch: Patch) -> None:
    change_noise(patch, number=lambda release: release // 2)


def one_noise_for_all_parameters(patch: Patch) -> None:
    change_noise(patch, places=lambda places: [0] * len(places))


def one_parameter_without_noise(patch: Patch) -> None:
    plain = NoisePlan.add_noise_to

    def add(self: NoisePlan, targets: Any, sums: Any, at: Any, std: Any, release: int, *rest: Any) -> None:
        for target, total, place in zip(targets, sums, at, strict=True):
            spared = place == self.offsets["model.final_norm.weight"]
            plain(self, [target], [total], [place], 0.0 * std if spared else std, release, *rest)

    patch.setattr(NoisePlan, "add_noise_to", add)


def twice_the_rate(patch: Patch) -> None:
    plain = poisson.draw
    patch.setattr(poisson, "draw", lambda key, number, size, rate, *rest: plain(key, number, size, 2 * rate, *rest))


def one_draw_for_all(patch: Patch) -> None:
    plain = poisson.draw
    patch.setattr(poisson, "draw", lambda key, number, *rest: plain(key, 0, *rest))


def batches_of_one_size(patch: Patch) -> None:
    patch.setattr(
        poisson,
        "draw",
        lambda key, number, size, rate, *rest: torch.randperm(size)[: round(size * rate)].sort()[0].numpy(),
    )


def releases(run: AuditedRun) -> list[AuditFinding]:
    return check_releases(run, 10)


SENSITIVITY = (no_clip, no_cross_term, rows_of_others, clips_at_twice)
RELEASES: dict[Callable[[Patch], None], str] = {
    half_the_noise: "noise",
    noise_reused: "reuse",
    twice_the_rate: "participation",
    one_parameter_without_noise: "noise",
    one_noise_for_all_parameters: "reuse",
    one_draw_for_all: "participation",
    batches_of_one_size: "participation",
}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_honest_run_moves_by_C_at_most_and_each_way_to_move_it_more_is_seen(seed: int) -> None:
    run = run_of(seed)
    if FULL or seed == 0:
        honest = check_sensitivity(run)
        assert honest.passed, honest.says
        assert honest.facts["largest_move_over_C"] > 0.999  # a clipped record moves it by C
        assert honest.as_json()["label"] == "not covered by ε"
        random = check_sensitivity(run_of(seed, dropout=0.2))
        assert random.passed and random.says.startswith("emptying one of"), random.says
    for sabotage in SENSITIVITY if FULL else SENSITIVITY[:3]:
        with pytest.MonkeyPatch.context() as patch:
            sabotage(patch)
            found = check_sensitivity(run)
        assert not found.passed and "MOVED" in found.says, (sabotage, found.says)


@pytest.mark.parametrize("seed", SEEDS)
def test_releases_of_an_honest_run_pass_and_each_sabotage_fails_its_test(seed: int) -> None:
    """The short mode has three sabotages at once, each of which must fail its own test."""
    run = run_of(seed)
    if FULL or seed == 0:
        assert all(found.passed for found in releases(run))
    groups = [[sabotage] for sabotage in RELEASES] if FULL else [list(RELEASES)[:3]]
    for group in groups:
        with pytest.MonkeyPatch.context() as patch:
            for sabotage in group:
                sabotage(patch)
            found = {each.name: each for each in releases(run)}
        for sabotage in group:
            failed = found[RELEASES[sabotage]]
            assert not failed.passed and failed.facts["p_value"] < SIGNIFICANCE, (sabotage, failed.says)


@pytest.mark.parametrize("function", [pytest.param("per_layer", marks=pytest.mark.full), "adaptive"])
def test_other_clip_functions_are_as_accounted(function: str) -> None:
    run = run_of(0, clip_function=function, noise_multiplier=0.7)  # "adaptive": the count takes most of it
    for found in [check_sensitivity(run), *releases(run)] if FULL else releases(run):
        assert found.passed, found.says


@pytest.mark.parametrize("seed", SEEDS)
def test_the_one_run_bound_stays_below_the_accounted_epsilon_and_exceeds_it_without_clipping(seed: int) -> None:
    def bound(noise_multiplier: float = 0.5, rate: float = 0.4, canaries: int = 400) -> AuditFinding:
        return check_canaries(noise_multiplier, 1.5, rate, 8, 1e-5, "rdp", canaries=canaries)

    honest = bound()
    assert honest.passed and 0 < honest.facts["epsilon_lower_bound"] < honest.facts["epsilon_accounted"], honest.says
    with pytest.MonkeyPatch.context() as patch:
        no_clip(patch)
        found = bound(16.0, 0.9, canaries=800)
    assert not found.passed and found.facts["epsilon_lower_bound"] > found.facts["epsilon_accounted"], found.says
