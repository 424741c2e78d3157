"""The kinds of caches by name. A new kind is one file with a `CacheKind`, and one entry here."""

from gramian.distill.cache.cache_kind import CacheKind
from gramian.distill.cache.hidden_cache import Hidden
from gramian.distill.cache.sampled_cache import Samples
from gramian.distill.cache.topk_cache import TopK

KINDS: dict[str, CacheKind] = {kind.name: kind for kind in (Hidden(), TopK(), Samples())}
"""{name in the manifest: the kind with default options}, for reading: options of a stored cache are in the manifest's facts."""
