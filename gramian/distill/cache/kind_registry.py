"""The kinds of caches (what a cache stores for each token) by name, for reading.

To build a cache of a new kind, `train/build/build_teacher.py` and the config's `teacher.source` must know it too.
"""

from gramian.distill.cache.cache_kind import CacheKind
from gramian.distill.cache.hidden_cache import Hidden
from gramian.distill.cache.sampled_cache import Samples
from gramian.distill.cache.topk_cache import TopK

KINDS: dict[str, CacheKind] = {kind.name: kind for kind in (Hidden(), TopK(), Samples())}
"""{name in the manifest: kind with default options}, for reading: the options of a stored cache are in its manifest."""
