"""Sites: one class per kind of layer, with what its forward saves and the formulas of its per-sample gradients."""

from gramian.taps.sites import (
    attention,
    channel_norms,
    convolution,
    embedding,
    hugging_face,
    linear,
    normalization,
    recurrent,
)
from gramian.taps.sites.generic import Generic
from gramian.taps.sites.products import mixtures
from gramian.taps.sites.products.inline_products import InlineProducts
from gramian.taps.sites.site import Site
from gramian.taps.sites.site_registry import register_site, site_for

__all__ = [
    "Generic",
    "InlineProducts",
    "Site",
    "attention",
    "channel_norms",
    "convolution",
    "embedding",
    "hugging_face",
    "linear",
    "mixtures",
    "normalization",
    "recurrent",
    "register_site",
    "site_for",
]
