"""Influence at the size of a language model: which passages of its training text made a model say this.

    score_i = −g_queryᵀ (F + λ)⁻¹ g_i

`build_index` fits the Fisher F of a model to a corpus of passages, and on request stores a compressed gradient g_i of every
passage; an `Index` computes the scores of all passages for several queries at once. `gramian influence build | query` is the
command line of both.
"""

from gramian.influence.corpus import PassageCorpus
from gramian.influence.index_builder import BuildOptions, build_index
from gramian.influence.open_index import Index, Query, Scores

__all__ = ["BuildOptions", "PassageCorpus", "Index", "Query", "Scores", "build_index"]
