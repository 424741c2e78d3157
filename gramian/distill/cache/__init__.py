"""A teacher's signal on disk, one row per training window, so any data order, batch size and number of processes can read it.

The signal describes the teacher's distribution of the next token. `build_cache` writes a folder, `open_cache` reads it as a
`SignalSource`. `kind_registry.KINDS` lists the kinds: `Hidden`, exact at every temperature up to rounding; `TopK`, the largest
logits and a tail curve, valid in a range of temperatures; `Samples`, unbiased, at one temperature.
"""

from gramian.distill.cache.builder import CacheOptions, build_cache, identity_of
from gramian.distill.cache.hidden_cache import Hidden
from gramian.distill.cache.manifest import CacheIdentity, Manifest, read_manifest
from gramian.distill.cache.reader import Cache, open_cache
from gramian.distill.cache.row_check import RowCheck, check_rows
from gramian.distill.cache.sampled_cache import Samples
from gramian.distill.cache.topk_cache import TopK

__all__ = [
    "Cache", "CacheIdentity", "CacheOptions", "Hidden", "Manifest", "RowCheck", "Samples", "TopK",
    "build_cache", "check_rows", "identity_of", "open_cache", "read_manifest",
]  # fmt: skip
