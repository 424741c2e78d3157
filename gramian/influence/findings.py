"""What a query shows: the passages that made a completion likelier or less likely, divided by token and by module.

Candidates come from the scores of all passages, compressed ones if the index has them; the candidates are then scored exactly,
so that the order and every number shown are exact whatever the compression.
"""

from typing import Any

from gramian.data.windows import NOT_COUNTED
from gramian.influence.corpus import PassageCorpus
from gramian.influence.index_builder import Progress
from gramian.influence.open_index import Asked, DividedScores, Scores
from gramian.influence.token_texts import token_texts

CANDIDATES = 10
"""Candidates for each passage that is shown, where they come from compressed gradients."""
MODULES = 6
"""Modules with the largest parts of a score that are named."""


def find(
    asked: Asked,
    corpus: PassageCorpus,
    top: int = 10,
    source: str = "auto",
    self_influence: bool = False,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], Scores]:
    """JSON-able findings of queries to an index, and the scores of all passages of its `corpus`.

    `top` passages are shown on each side; `self_influence` adds those of the largest self-influence. The other arguments are
    those of `Asked.scores`.
    """
    scores = asked.scores(source, self_influence, progress)
    each = min(len(corpus), top if scores.source == "passages" else CANDIDATES * top)
    orders = scores.values_QN.argsort(dim=1)
    parts = asked.parts(
        sorted({int(n) for order in orders for n in (*order[:each], *order[len(order) - each :])}), progress
    )
    found: dict[str, Any] = {
        "passages": len(corpus),
        "tokens": int((corpus.targets_NT != NOT_COUNTED).sum()),
        "source": scores.source,
        "queries": [
            {
                "prompt": query.prompt,
                "completion": query.completion,
                "nats": asked.nats[number],
                **_sides(corpus, scores, parts, number, top),
            }
            for number, query in enumerate(asked.queries)
        ],
    }
    if scores.self_N is not None:
        order = scores.self_N.argsort(descending=True)[:top]
        found["self_influence"] = [
            {"passage": int(n), "score": float(scores.self_N[n]), "text": corpus.text(int(n))} for n in order
        ]
    return found, scores


def _sides(corpus: PassageCorpus, scores: Scores, parts: DividedScores, number: int, top: int) -> dict[str, Any]:
    """The passages that made one query likelier, and those that made it less likely, in order."""
    exact = parts.values_QP[number]
    order = [int(column) for column in exact.argsort()]

    def shown(column: int) -> dict[str, Any]:
        passage, modules = parts.passages[column], parts.modules_QPM[number, column]
        largest = [int(place) for place in modules.abs().argsort(descending=True)[:MODULES]]
        compressed = {} if scores.source == "passages" else {"compressed": float(scores.values_QN[number, passage])}
        return {
            "passage": passage,
            "score": float(exact[column]),
            **compressed,
            "tokens": token_texts(corpus.decode, corpus.tokens_NT[passage].tolist()),
            "token_scores": [float(value) for value in parts.tokens_QPT[number, column, :-1]],
            "other_score": float(parts.tokens_QPT[number, column, -1]),
            "modules": {parts.modules[place]: float(modules[place]) for place in largest},
        }

    return {
        "likelier": [shown(column) for column in order[:top] if exact[column] < 0],
        "less_likely": [shown(column) for column in order[::-1][:top] if exact[column] > 0],
    }
