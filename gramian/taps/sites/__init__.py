"""Sites: how each kind of layer is tapped, what is saved in its forward, and its per-sample gradients."""

from gramian.taps.sites import attention, convolution, embedding, linear, normalization, recurrent
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.site import Site
from gramian.taps.sites.site_registry import register_site, site_for

__all__ = [
    "Generic",
    "Site",
    "attention",
    "convolution",
    "embedding",
    "linear",
    "normalization",
    "recurrent",
    "register_site",
    "site_for",
]
