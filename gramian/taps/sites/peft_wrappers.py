"""Site of the `peft` library's adapter of a raw parameter (a router's weight, experts' weights), as one layer.

The adapter parametrizes the module that it wraps in each forward, weight + B A, and removes the parametrization afterwards. So
neither the wrapped module nor A and B, whose weights it reads beside them, can be tapped: the adapter runs again as a whole.
"""

from gramian.taps.sites.generic import Generic
from gramian.taps.sites.site_registry import register_site

register_site("peft.tuners.lora.layer.ParamWrapper", Generic(whole=True))
