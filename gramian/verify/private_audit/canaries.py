"""Canaries: a lower bound on ε from one run of the audited mechanism on records whose presence somebody tries to guess.

Canary i is a record whose gradient is 10·C·u_i, u_i a random unit vector, so that clipping makes it C·u_i. Each is in the data
with probability ½. One linear layer is trained on those that are, by the engine of the run: with its σ, C, sample rate and
number of releases, through the same taps, clip factors, sampler and noise. Who guesses sees all releases r_t, and scores
canary i by Σ_t ⟨u_i, r_t⟩.
"""

import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gramian.privacy import PrivacyEngine
from gramian.privacy.audit.one_run_bound import best_lower_bound
from gramian.verify.private_audit.audit_finding import SIGNIFICANCE, AuditFinding

CANARIES, WIDTH = 1000, 1024
"""Number of canaries, and of weights of the layer."""
MOST_RELEASES = 1000
"""Largest number of releases of the run on canaries."""
SHARES = (0.05, 0.15, 0.3)
"""Shares of the canaries that are guessed to be in the data; as many are guessed not to be."""
LARGEST_DELTA = 1e-7
"""The bound is for this δ, or the run's if it is smaller: with a larger one 2mδ would drown it at this confidence."""


def check_canaries(
    noise_multiplier: float,
    max_grad_norm: float,
    sample_rate: float,
    releases: int,
    delta: float,
    accountant: str,
    canaries: int = CANARIES,
    noise: str = "gaussian",
    bands: int | None = None,
) -> AuditFinding:
    """Run the mechanism once on canaries and compare the lower bound on ε with the accounted ε, at the same δ.

    Args:
        noise_multiplier: σ of the run.
        max_grad_norm: C of the run.
        sample_rate: q of the run.
        releases: number of releases of the run; at most MOST_RELEASES are made, and ε is that of as many.
        delta: δ of the run; the bound is for LARGEST_DELTA if that is smaller.
        accountant: how ε is computed.
        canaries: m, of which about half are in the data.
        noise: noise of the run; correlated noise cancels in part in the scores, which makes guesses better.
        bands: of correlated noise.
    """
    releases, delta = min(releases, MOST_RELEASES), min(delta, LARGEST_DELTA)
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7)))
    directions_MD = nn.functional.normalize(torch.randn(canaries, WIDTH, generator=generator), dim=1)
    included_M = torch.rand(canaries, generator=generator) < 0.5
    engine, seen_D = _train(
        directions_MD[included_M], noise_multiplier, max_grad_norm, sample_rate, releases, accountant, noise, bands
    )
    scores_M = (directions_MD.double() @ seen_D).numpy()
    accounted = engine.get_epsilon(delta)
    bound, guesses, right = best_lower_bound(scores_M, included_M.numpy(), SHARES, delta, SIGNIFICANCE)
    passed = bound <= accounted
    says = (
        f"{right:,} of {guesses:,} guesses about {canaries:,} canaries were right after {releases:,} releases: "
        + (f"with confidence {1 - SIGNIFICANCE} ε is at least {bound:.2f}" if bound else "they refute no ε")
        + f" at δ = {delta:g}; accounted is {accounted:.2f}"
    )
    facts = {
        "epsilon_lower_bound": bound, "epsilon_accounted": accounted if np.isfinite(accounted) else None, "delta": delta,
        "confidence": 1 - SIGNIFICANCE, "canaries": canaries, "guesses": guesses, "right": right, "releases": releases,
    }  # fmt: skip
    return AuditFinding("canaries", passed, says if passed else f"NOT as accounted: {says}", facts)


def _train(
    rows_ND: Tensor,
    noise_multiplier: float,
    max_grad_norm: float,
    rate: float,
    releases: int,
    accountant: str,
    noise: str,
    bands: int | None,
) -> tuple[PrivacyEngine, Tensor]:
    """Train one layer on records of gradient 10·C·row; returns the engine and the sum of all releases, float64 [D]."""
    model = nn.Linear(rows_ND.shape[1], 1, bias=False)
    data = TensorDataset(10 * max_grad_norm * rows_ND)
    expected = max(1.0, rate * len(rows_ND))
    engine, seen_D, made = PrivacyEngine(accountant), torch.zeros(rows_ND.shape[1], dtype=torch.float64), 0
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=1),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        loss_reduction="sum",
        expected_batch=expected,
        sample_rate=rate,
        noise=noise,
        bands=None if bands is None else min(bands, releases),
        releases=releases if noise == "bandmf" else None,
    )
    while made < releases:
        for (x_BD,) in loader:
            optimizer.zero_grad()
            model(x_BD).sum().backward()
            optimizer.step()
            assert model.weight.grad is not None
            seen_D += model.weight.grad[0].double() * (expected / max_grad_norm)
            made += 1
            if made == releases:
                break
    engine.detach()
    return engine, seen_D
