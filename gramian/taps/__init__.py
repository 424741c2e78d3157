"""One capture of (input, output gradient) for every layer."""

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
