"""Query an influence index: scores of all passages for several queries, from compressed gradients or from the passages.

    score_i = −g_qᵀ (F + λ)⁻¹ g_i

g_q is the gradient of a query's −log p(completion | prompt), g_i that of −log p of passage i, both in nats summed over their
tokens; F is the mean over tokens. If passage i had been in the training text twice, the query's loss would change by about
score_i / N nats, N the number of tokens: below zero the passage helped the model to say the completion.

Exact scores need a forward and a backward of every passage, whatever the number of queries; compressed gradients need one
product, and are random with a known relation to the exact scores (`gradient_sketch`).

Several processes share the passages, or the shards of compressed gradients; every one of them computes the queries' natural
gradients and has all scores at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.estimate.labelled_batch import logits_of
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.uses.influence_scores import Influence
from gramian.data.windows import NOT_COUNTED
from gramian.influence.corpus import PassageCorpus
from gramian.influence.index_builder import BuildOptions, Progress, counted_parameters, refuse_training_mode, sketch_of
from gramian.influence.index_folder import FACTORS, PASSAGES, IndexFolder, shard_name
from gramian.influence.passage_loss import nats_of, passage_losses
from gramian.influence.relative_damping import set_relative_damping
from gramian.influence.self_influence import SelfInfluence
from gramian.parallel.process_grid import ONE_PROCESS, ProcessGrid
from gramian.parallel.shared_work import SharedWork
from gramian.taps import Capture

SOURCES = ("auto", "gradients", "passages")


@dataclass(frozen=True)
class Query:
    """What the model said: a completion, and the prompt before it (not scored; may be empty)."""

    prompt: str
    completion: str
    ids: tuple[int, ...] | None = None
    """Tokens of the completion, where they are known: its text may have others; None: those of the text."""


@dataclass(frozen=True)
class Scores:
    """Scores of all passages; Q queries, N passages."""

    values_QN: Tensor
    """Influence scores, float32 or float64: below zero the passage helped."""
    source: str
    """"passages": exact; "gradients": from compressed gradients."""
    self_N: Tensor | None
    """Self-influence g_iᵀ (F + λ)⁻¹ g_i of each passage; None unless asked for."""


@dataclass(frozen=True)
class DividedScores:
    """Exact scores of some passages, divided; Q queries, P passages, T tokens, M modules."""

    passages: list[int]
    values_QP: Tensor
    tokens_QPT: Tensor
    """DividedScores of the scores by token of the passage; the last place has what no token has alone."""
    modules: list[str]
    modules_QPM: Tensor
    """DividedScores of the scores by module."""


class Index:
    """An influence index with its model, open for queries.

    ```python
    asked = Index(corpus, "runs/index").ask([Query("The capital of France is", " Paris")])
    asked.scores().values_QN[0].argsort()[:10]  # the passages that helped most
    ```
    """

    def __init__(self, corpus: PassageCorpus, path: str | Path, grid: ProcessGrid = ONE_PROCESS) -> None:
        """Open the index of a folder; a GramianError if it is not complete, damaged, or of another model or text.

        Reads every weight and every file of the index but the gradients once. With a `grid` of several processes, everything
        that is asked of the index is collective: all ask the same, share the passages, and get all scores.
        """
        self.corpus, self.shared = corpus, SharedWork(grid)
        with self.shared.together():
            self.folder = IndexFolder.open(path)
            self.options = options_of(self.folder)
            refuse_training_mode(corpus.model)
            with counted_parameters(corpus.model, self.options.only):
                refuse_other_corpus(self.folder, corpus)
                self.kfac = factors_of(self.folder, corpus, self.options)

    def ask(self, queries: Sequence[Query]) -> "Asked":
        """Compute the natural gradient of every query, once for all that is asked of them."""
        with self.shared.together():
            if not queries:
                raise GramianError("queries: none given; expected at least one")
            if isinstance(queries, str) or not all(isinstance(query, Query) for query in queries):
                raise GramianError("queries: expected a list of Query(prompt, completion)")
            return Asked(self, queries)


class Asked:
    """Queries whose natural gradients (F + λ)⁻¹ g_q are computed."""

    def __init__(self, index: Index, queries: Sequence[Query]) -> None:
        """Run a forward and a backward of every query."""
        self._index, self.queries = index, list(queries)
        with counted_parameters(index.corpus.model, index.options.only):
            found = [query_gradient(index.corpus, query) for query in queries]
            self._influence = Influence(index.kfac, index.corpus.model, [gradient for gradient, _ in found])
        self.nats = [nats for _, nats in found]
        """−log p(completion | prompt) of each query."""

    def scores(self, source: str = "auto", self_influence: bool = False, progress: Progress | None = None) -> Scores:
        """Scores of all passages.

        Args:
            source: "passages" (exact), "gradients" (compressed ones), or "auto": gradients if the index has them.
            self_influence: also g_iᵀ (F + λ)⁻¹ g_i of each passage, for which the passages are read.
            progress: called with ("scores", units done, units in total).
        """
        stored, report = self._index.options.gradients is not None, progress or (lambda stage, done, total: None)
        if source not in SOURCES:
            raise GramianError(f"source: {source!r}; expected one of {', '.join(SOURCES)}")
        if source == "auto":
            source = "gradients" if stored and not self_influence else "passages"
        if source == "gradients":
            if self_influence or not stored:
                why = "self_influence reads the passages" if self_influence else "the index has none"
                raise GramianError(f"source: gradients, but {why}; expected source passages")
            return Scores(self._from_gradients(report), source, None)
        own: list[Any] = [SelfInfluence(self._index.kfac)] if self_influence else []
        values, *more = self._captured([self._influence, *own], range(len(self._index.corpus)), report)
        return Scores(values.mT.cpu().contiguous(), source, more[0].cpu() if more else None)

    def parts(self, passages: Sequence[int], progress: Progress | None = None) -> DividedScores:
        """Exact scores of some passages, by token and by module, from one forward and backward of them."""
        report = progress or (lambda stage, done, total: None)
        strange = next((n for n in passages if not 0 <= n < len(self._index.corpus)), None)
        if strange is not None or not passages:
            raise GramianError(f"passages: {strange}; expected numbers from 0 to {len(self._index.corpus) - 1}")
        by_token, by_parameter = self._influence.divided("token"), self._influence.divided("parameter")
        tokens_PQT, parameters_PQM = self._captured([by_token, by_parameter], passages, report)
        names = [name.rpartition(".")[0] or name for name in by_parameter.parameters]
        modules = list(dict.fromkeys(names))
        place = torch.tensor([modules.index(name) for name in names], device=parameters_PQM.device)
        summed = parameters_PQM.new_zeros(*parameters_PQM.shape[:2], len(modules)).index_add_(2, place, parameters_PQM)
        return DividedScores(
            list(passages),
            tokens_PQT.sum(2).mT.cpu().contiguous(),
            tokens_PQT.transpose(0, 1).cpu(),
            modules,
            summed.transpose(0, 1).cpu(),
        )

    def _captured(self, statistics: list[Any], passages: Sequence[int], report: Progress) -> list[Tensor]:
        """Results of statistics over the backwards of passages, those of each process together."""
        shared = self._index.shared
        with shared.together():
            found = self._captured_here(statistics, shared.part(passages), report)
        return [shared.gather(rows) for rows in found]

    def _captured_here(self, statistics: list[Any], passages: Sequence[int], report: Progress) -> list[Tensor]:
        """Results of statistics over the backwards of the passages of this process; empty if it has none."""
        if not passages:
            return [torch.zeros(0) for _ in statistics]
        corpus, batch = self._index.corpus, self._index.options.batch
        total = -(-len(passages) // batch)
        with (
            counted_parameters(corpus.model, self._index.options.only),
            Capture(corpus.model, *statistics, loss_reduction="sum") as seen,
        ):
            for done, _ in enumerate(passage_losses(corpus, passages, batch), start=1):
                report("scores", done, total)
            return [seen[statistic] for statistic in statistics]

    def _from_gradients(self, report: Progress) -> Tensor:
        """−⟨z_q, z_i⟩ [Q, N] of all shards' compressed gradients."""
        folder, device, shared = self._index.folder, self._index.corpus.device, self._index.shared
        shards = sum(name.startswith("gradients-") for name in folder.facts["files"])
        with shared.together():
            sketch = sketch_of(self._index.kfac, folder.facts["rank"], self._index.options)
            naturals = [{n: d_Q[q] for n, d_Q in self._influence.directions.items()} for q in range(len(self.queries))]
            z_QK = torch.stack([sketch.of_query(natural) for natural in naturals])
            scores = [z_QK.new_zeros(0, len(z_QK))]
            for done, number in enumerate(mine := shared.part(range(shards)), start=1):
                stored_NK = folder.read_tensors(shard_name(number), device)["gradients"]
                scores.append(-(stored_NK.to(z_QK) @ z_QK.mT))
                report("scores", done, len(mine))
        found_NQ, passages = shared.gather(torch.cat(scores)), len(self._index.corpus)
        if len(found_NQ) != passages:
            raise GramianError(f"index: has gradients of {len(found_NQ):,} passages; expected {passages:,}")
        return found_NQ.mT.cpu().contiguous()


def options_of(folder: IndexFolder) -> BuildOptions:
    """The options with which an index was built; a GramianError if the build is not complete."""
    if not folder.facts.get("complete"):
        raise GramianError(f"index: {folder.path} is not complete; expected gramian influence build to end first")
    given = folder.facts["options"]
    return BuildOptions(**{**given, "only": tuple(given["only"])})


def refuse_other_corpus(folder: IndexFolder, corpus: PassageCorpus) -> None:
    """Raise a GramianError unless model and passages are those of the index, by their hashes."""
    folder.require(PASSAGES)
    for name, value in corpus.digest().items():
        if folder.facts[name] != value:
            raise GramianError(
                f"index: {folder.path} was built with other {name}; expected the model and text of the build"
            )


def factors_of(folder: IndexFolder, corpus: PassageCorpus, options: BuildOptions) -> KFACNaturalGradient:
    """The factors of an index, damped as at its build."""
    kfac = options.kfac(next(corpus.model.parameters()).dtype)
    kfac.load(str(folder.require(FACTORS)), corpus.model)
    set_relative_damping(kfac, options.damping)
    return kfac


def query_gradient(corpus: PassageCorpus, query: Query) -> tuple[dict[str, Tensor], float]:
    """Gradient of −log p(completion | prompt), {parameter: tensor}, and its value in nats."""
    prompt = list(corpus.encode(query.prompt)) if query.prompt else []
    completion = list(corpus.encode(query.completion) if query.ids is None else query.ids)
    ids = prompt + completion
    if not completion or len(ids) < 2:
        raise GramianError(f"completion: {query.completion!r} has too few tokens; expected some after the first token")
    if corpus.context is not None and len(ids) - 1 > corpus.context:
        raise GramianError(f"prompt: with its completion {len(ids)} tokens; expected at most {corpus.context + 1}")
    corpus.refuse_unknown_ids("query", torch.tensor(ids))
    scored = max(len(prompt), 1)
    tokens = torch.tensor([ids[:-1]])
    targets = torch.tensor([[NOT_COUNTED] * (scored - 1) + ids[scored:]])
    corpus.model.zero_grad(set_to_none=True)
    nats = nats_of(corpus.model, corpus.batch(tokens, targets)).sum()
    nats.backward()
    found = {n: p.grad.detach().clone() for n, p in _trained(corpus) if p.grad is not None}
    corpus.model.zero_grad(set_to_none=True)
    return found, float(nats.detach())


@torch.no_grad()
def continued(corpus: PassageCorpus, prompt: str, length: int = 20) -> Query:
    """A query of the model's own likeliest continuation, token by token: `length` tokens, fewer if its context ends."""
    ids = list(corpus.encode(prompt))
    if not ids:
        raise GramianError("prompt: is empty; expected some text, or a completion")
    begin = len(ids)
    while len(ids) < begin + length and (corpus.context is None or len(ids) <= corpus.context):
        batch = corpus.batch(torch.tensor([ids]), torch.tensor([ids]))
        logits_BTV = logits_of(corpus.model(**{name: value for name, value in batch.items() if name != "labels"}))
        ids.append(int(logits_BTV[0, -1].argmax()))
    return Query(prompt, corpus.decode(ids[begin:]), tuple(ids[begin:]))


def _trained(corpus: PassageCorpus) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in unique_parameters(corpus.model) if p.requires_grad]
