"""The capture: taps on every layer read its inputs and output gradients in a backward pass, once, for all statistics.

`hub_of(model)` has the taps of a model, `Capture` lets statistics observe it, a `Site` defines how one kind of layer is
tapped,
and the row proof (`gramian.taps.proof`) shows that rows are attributed to the right samples.
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
