"""`gramian audit` of runs with correlated noise: the draws are taken out of it again, and every sabotage fails its check."""

from typing import Any

import numpy as np
import pytest

from gramian.privacy.audit.release_tests import grouped_p_value
from gramian.privacy.noise.correlated_noise import CorrelatedNoise
from gramian.privacy.sampling.cyclic import Groups
from gramian.privacy.sampling.poisson import draw
from gramian.verify.private_audit.audit_finding import SIGNIFICANCE
from gramian.verify.private_audit.canaries import check_canaries
from gramian.verify.private_audit.releases import check_releases
from tests.verify.test_private_audit import run_of

Patch = pytest.MonkeyPatch
CORRELATED: dict[str, dict[str, Any]] = {
    "bandmf": {"noise": "bandmf", "bands": 3},
    "bisr": {"noise": "bisr", "bands": 4},
}


def independent_noise(patch: Patch) -> None:
    def add(self: CorrelatedNoise, *arguments: Any) -> None:
        self._plan.add_noise_to(*arguments)

    patch.setattr(CorrelatedNoise, "add_noise_to", add)


def draws_from_all_records(patch: Patch) -> None:
    patch.setattr(Groups, "cyclic_draw", lambda self, key, number, size, rate: draw(key, number, size, rate))


@pytest.mark.parametrize("options", [CORRELATED["bandmf"], pytest.param(CORRELATED["bisr"], marks=pytest.mark.full)])
def test_an_honest_run_passes_and_noise_or_draws_of_another_kind_do_not(options: dict[str, Any]) -> None:
    run = run_of(0, **options)
    honest = check_releases(run, 12)
    assert all(finding.passed for finding in honest), [finding.says for finding in honest]
    for sabotage, name in ((independent_noise, "reuse"), (draws_from_all_records, "participation")):
        with pytest.MonkeyPatch.context() as patch:
            sabotage(patch)
            found = {finding.name: finding for finding in check_releases(run, 12)}
        assert not found[name].passed and found[name].facts["p_value"] < SIGNIFICANCE


def test_p_values_of_draws_from_groups_are_uniform_at_least() -> None:
    groups, rng = np.arange(200) % 4, np.random.default_rng(0)
    values = []
    for _ in range(200):
        draws = [np.flatnonzero((groups == t % 4) & (rng.random(200) < 0.4)).tolist() for t in range(12)]
        values.append(grouped_p_value(draws, groups, 4, 0.4))
    assert np.mean(np.array(values) < 0.1) <= 0.1 + 4 * (0.09 / 200) ** 0.5
    assert grouped_p_value([[0, 4], [1], [2], [3, 2]], groups, 4, 0.4) == 0.0, "a record of another group"
    assert grouped_p_value([np.flatnonzero(groups == 0).tolist()], groups, 4, 1.0) == 1.0


@pytest.mark.parametrize("options", [CORRELATED["bandmf"], pytest.param(CORRELATED["bisr"], marks=pytest.mark.full)])
def test_a_guess_at_canaries_finds_no_more_than_accounted_and_more_without_noise(options: dict[str, Any]) -> None:
    honest = check_canaries(1.0, 1.0, 0.2, 30, 1e-5, "rdp", canaries=600, **options)
    assert honest.passed and honest.facts["guesses"] * 0.55 < honest.facts["right"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CorrelatedNoise, "add_noise_to", tiny_noise)
        assert not check_canaries(20.0, 1.0, 0.2, 30, 1e-5, "rdp", canaries=600, **options).passed


def tiny_noise(self: CorrelatedNoise, targets: Any, sums: Any, places: Any, std: Any, *rest: Any) -> None:
    self._plan.add_noise_to(targets, sums, places, std * 1e-3, *rest)
