"""K-FAC of squared errors, Bernoulli outputs, probabilities and images on two gloo processes: the factors of one."""

import pytest
import torch

import gramian
from tests.curvature.loss_cases import CASES
from tests.curvature.splits import assert_equal
from tests.dist import kfac_bodies as bodies
from tests.kit.matrix import FULL
from tests.kit.processes import distributed

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("processes")]

SHORT = ("mse tokens", "bce", "image with ignored positions")
SPLIT = ([1], [0, 2, 3, 4])


@distributed(world_size=2)
def test_two_processes_have_the_factors_of_one(rank: int) -> None:
    """Targets of a sample are its own on any process; exact heads and their positions add up."""
    for case in [case for name, case in CASES.items() if FULL or name in SHORT]:
        rows = torch.tensor([row for row in SPLIT[rank] if row < len(case.inputs)])
        for kind in ("mc", "true"):
            one, shared = bodies.make(kfac_distributed_reduce="none"), bodies.make()
            ids = torch.arange(len(case.inputs))
            one.collect_kfac_factors(case.model(), (case.inputs, case.labels), kind, sample_ids=ids, **case.told)
            shared.state.generator.set_state(one.state.generator_before_step)
            batch = (case.inputs[rows], case.labels[rows])
            shared.collect_kfac_factors(case.model(), batch, kind, sample_ids=rows, **case.told)
            found, expected = (
                {f"{n} {s}": f.to_dense() for n, b in kfac.kfac_factors.items() for s, f in b.factors.items()}
                for kfac in (shared, one)
            )
            assert_equal(found, expected, 1e-10)


@pytest.mark.full
@distributed(world_size=2)
def test_processes_with_different_losses_are_refused(rank: int) -> None:
    case = CASES["mse"]
    told = {"loss": "mse", "noise_scale": 1.0 + rank}
    with pytest.raises(gramian.GramianError, match="^estimate: is .*mse, noise_scale=1.* on process 0 and"):
        bodies.make().collect_kfac_factors(case.model(), (case.inputs, case.labels), "true", **told)
