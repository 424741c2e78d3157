"""Capture of per-sample gradients: taps read inputs and output gradients of all layers once per backward, for all statistics.

A tap is the replaced forward of one layer. `hub_of(model)` returns the `Hub` that owns the taps of a model, `Capture` lets
statistics observe it, and a `Site` defines how one kind of layer is tapped. The row proof (`gramian.taps.proof`) checks that
rows are attributed to the right samples.
"""

from gramian.taps.capture import Capture
from gramian.taps.coverage import Cover, Coverage
from gramian.taps.hub import Hub, hub_of
from gramian.taps.roles import AdditiveStatistic, GradientRule, Ordinary, Statistic, Withheld
from gramian.taps.sites import Site, register_site

__all__ = [
    "AdditiveStatistic",
    "Capture",
    "Cover",
    "Coverage",
    "GradientRule",
    "Hub",
    "Ordinary",
    "Site",
    "Statistic",
    "Withheld",
    "hub_of",
    "register_site",
]
