"""The page of an influence query: what the model said, and beside it the passages that made it likelier or less likely.

A token's background shows its own part of the score: green made the completion likelier, red less likely. It loads nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from gramian.core.version import VERSION
from gramian.report.page import POLICY, text

STYLE = """
.query{border-left:4px solid #888;padding:.2em 1em;margin:1em 0;white-space:pre-wrap}
.query .prompt{opacity:.7}.query .completion{font-weight:600}
.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem}
.passage{border:1px solid #8886;border-radius:6px;padding:.6em .8em;margin:.6em 0}
.passage p{margin:.2em 0;overflow-wrap:anywhere}.passage .words{white-space:pre-wrap;font:13px/1.5 ui-monospace,monospace}
.passage .facts{font-size:.85em;opacity:.8}.legend span{padding:0 .4em;border-radius:3px}
"""


def page_html(title: str, found: Mapping[str, Any]) -> str:
    """The page of `findings.find` as text; everything that comes from files is escaped."""
    style = files("gramian.report").joinpath("assets", "report.css").read_text(encoding="utf-8")
    counted = f"{found['passages']:,} passages, {found['tokens']:,} tokens"
    how = (
        "all scored exactly"
        if found["source"] == "passages"
        else "candidates from compressed gradients, scored exactly"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title><style>{style}{STYLE}</style></head><body>",
        f"<header><h1>{text(title)}</h1></header><main>",
        f"<p>{counted}; {how}. A score divided by the number of tokens is the change of the completion's loss, in nats, "
        "that one more copy of the passage would have made.</p>",
        f'<p class="legend">Parts of a score by token: <span style="background:{_shade(-1)}">likelier</span> '
        f'<span style="background:{_shade(1)}">less likely</span></p>',
    ]
    for query in found["queries"]:
        parts += _query(query)
    if "self_influence" in found:
        parts.append("<section><h2>Largest self-influence</h2>")
        for one in found["self_influence"]:
            parts.append(_card(one, f'<p class="words">{text(one["text"])}</p>'))
        parts.append("</section>")
    parts.append(f"</main><footer>Written by gramian {VERSION}; this page loads nothing.</footer></body></html>\n")
    return "\n".join(parts)


def _query(query: Mapping[str, Any]) -> Iterator[str]:
    yield "<section>"
    said = f'<span class="prompt">{text(query["prompt"])}</span><span class="completion">{text(query["completion"])}</span>'
    yield f'<div class="query">{said}</div><p class="facts">{query["nats"]:.3f} nats</p><div class="sides">'
    for key, heading in (("likelier", "Made it likelier"), ("less_likely", "Made it less likely")):
        yield f"<div><h3>{heading}</h3>"
        for one in query[key]:
            yield _card(
                one, f'<p class="words">{_words(one["tokens"], one["token_scores"])}</p>{_modules(one["modules"])}'
            )
        yield "</div>"
    yield "</div></section>"


def _card(one: Mapping[str, Any], body: str) -> str:
    facts = f"passage {one['passage']:,}, score {one['score']:.4g}"
    return f'<div class="passage"><p class="facts">{facts}</p>{body}</div>'


def _words(tokens: Sequence[str], scores: Sequence[float]) -> str:
    top = max((abs(score) for score in scores), default=0.0) or 1.0
    return "".join(
        f'<span style="background:{_shade(score / top)}" title="{score:.3g}">{text(token)}</span>'
        for token, score in zip(tokens, scores, strict=True)
    )


def _modules(parts: Mapping[str, float]) -> str:
    shown = ", ".join(f"{text(name)} {value:.3g}" for name, value in parts.items())
    return f'<p class="facts">largest parts: {shown}</p>'


def _shade(part: float) -> str:
    """Colour of a token whose part of the score is `part` of the largest, in [−1, 1]: green below zero, red above."""
    return f"rgba({'40,160,80' if part < 0 else '210,60,50'},{min(1.0, abs(part)) ** 0.7 * 0.55:.3f})"
