"""Tests on the releases of a run: noise as large as accounted and never used twice, records drawn as rarely as accounted.

Every test has one p-value for the hypothesis that the run is as accounted; several comparisons inside of a test are paid for by
Bonferroni's bound. A run that is as accounted fails a test at 1e-4 once in ten thousand times at most.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def variance_p_value(noise: Sequence[Numbers]) -> tuple[float, float]:
    """χ² test that each group of numbers has variance 1: Σ x² of n standard normal numbers is χ² with n degrees of freedom.

    Args:
        noise: {noise / (σC)} of each parameter, over all releases; groups without numbers do not count.

    Returns:
        (p-value, two-sided; variance of the group that differs most).
    """
    from scipy.stats import chi2

    groups = [values for values in noise if values.size]
    sums, sizes = np.array([np.square(values).sum() for values in groups]), np.array([v.size for v in groups])
    p_values = _two_sided(chi2.cdf(sums, sizes), chi2.sf(sums, sizes))
    worst = int(np.argmin(p_values))
    return min(1.0, float(p_values[worst]) * len(groups)), float(sums[worst] / sizes[worst])


def reuse_p_value(noise_RN: Numbers) -> tuple[float, float]:
    """Test that no two rows of standard normal numbers are alike, up to a factor.

    The correlation r = ⟨x, y⟩/(‖x‖‖y‖) of independent ones has r² ~ Beta(½, (n − 1)/2), whatever their size. Places where a
    row has NaN (rows of different lengths) are left out.

    Args:
        noise_RN: the noise of R releases, or of R parameters of one release, in N places.

    Returns:
        (p-value of the largest |r| among all pairs, that r).
    """
    from scipy.special import betainc

    rows = len(noise_RN)
    if rows < 2:
        return 1.0, 0.0
    present_RN = ~np.isnan(noise_RN)
    x_RN = np.where(present_RN, noise_RN, 0.0)
    products_RR, squares_RR = x_RN @ x_RN.T, np.square(x_RN) @ present_RN.astype(np.float64).T
    size = np.sqrt(squares_RR * squares_RR.T)
    r_RR = np.divide(products_RR, size, out=np.zeros_like(size), where=size > 0)
    first, second = np.triu_indices(rows, 1)
    r_P, places_P = r_RR[first, second], (present_RN.astype(np.float64) @ present_RN.T)[first, second]
    r_P, places_P = r_P[places_P > 1], places_P[places_P > 1]
    if not len(r_P):
        return 1.0, 0.0
    p_values = betainc((places_P - 1) / 2, 0.5, np.clip(1 - np.square(r_P), 0.0, 1.0))
    worst = int(np.argmin(p_values))
    return min(1.0, float(p_values[worst]) * len(r_P)), float(r_P[worst])


def grouped_p_value(draws: Sequence[Sequence[int]], groups: Numbers, count: int, rate: float) -> float:
    """Test that draw t took records of group t mod `count` alone, each with probability `rate`, independently.

    By `participation_p_value` in each group, paid for by Bonferroni's bound; at rate 1, that all of the group were drawn.

    Args:
        draws: the records of each release.
        groups: the group of each record.
        count: number of groups.
        rate: probability of a record in a draw from its group.
    """
    worst = 1.0
    for group in range(min(count, len(draws))):
        members = np.flatnonzero(groups == group)
        found = [np.asarray(draw, np.int64) for draw in draws[group::count]]
        if not all(np.isin(draw, members).all() and len(set(draw.tolist())) == len(draw) for draw in found):
            return 0.0
        if rate >= 1 or not len(members):
            worst = min(worst, float(all(len(draw) == len(members) for draw in found)))
        else:
            own = [np.searchsorted(members, draw).tolist() for draw in found]
            worst = min(worst, participation_p_value(own, len(members), rate))
    return min(1.0, worst * min(count, len(draws)))


def participation_p_value(draws: Sequence[Sequence[int]], records: int, rate: float) -> float:
    """Test that every record took part in every draw with probability `rate`, independently of all others.

    Four counts are binomial then: participations in all draws together, those of each record, the records that two draws have
    in common, and the sizes of draws, which are hardly ever all equal. The p-value is two-sided for the first, and for large
    values of the others.

    Args:
        draws: the records of each release.
        records: number of records of the data set.
        rate: q, the accounted sample rate.
    """
    from scipy.stats import binom

    count, sizes = len(draws), np.array([len(draw) for draw in draws])
    total = int(sizes.sum())
    of_all = _two_sided(binom.cdf(total, records * count, rate), binom.sf(total - 1, records * count, rate))
    often = np.unique(np.concatenate([np.asarray(draw, np.int64) for draw in draws]), return_counts=True)[1]
    of_each = records * float(binom.sf(often.max(initial=0) - 1, count, rate))
    sets, pairs = [set(draw) for draw in draws], count * (count - 1) // 2
    shared = max((len(a & b) for place, a in enumerate(sets) for b in sets[:place]), default=0)
    in_common = max(1, pairs) * float(binom.sf(shared - 1, records, rate * rate))
    likeliest = float(binom.pmf(int((records + 1) * rate), records, rate))
    equal = likeliest ** (count - 1) if len(set(sizes.tolist())) == 1 else 1.0
    return min(1.0, 4 * min(float(of_all), of_each, in_common, equal))


def _two_sided(below: Any, above: Any) -> Any:
    return np.minimum(1.0, 2 * np.minimum(below, above))
