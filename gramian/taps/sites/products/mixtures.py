"""Mixtures of experts of transformers that hand rows to their experts out of the samples' order: each is tapped as one layer.

Fused experts (3-D weights) are found by their parameters: they sort rows themselves, whatever the kernel. In the classes below
the code around the experts does: it splits rows by sizes, gives all tokens to all experts, or calls a list of modules.
"""

from gramian.taps.sites.generic import Generic
from gramian.taps.sites.products.inline_products import InlineProducts
from gramian.taps.sites.site_registry import register_site

for _module, _class in (
    ("jetmoe.modeling_jetmoe", "JetMoeAttention"),
    ("jetmoe.modeling_jetmoe", "JetMoeMoE"),
    ("llama4.modeling_llama4", "Llama4TextMoe"),
    ("nllb_moe.modeling_nllb_moe", "NllbMoeExperts"),
    ("switch_transformers.modeling_switch_transformers", "SwitchTransformersExperts"),
):
    register_site(f"transformers.models.{_module}.{_class}", InlineProducts(Generic(whole=True)))
