"""What K-FAC's reductions send on 2 to 1,024 ranks, by the model of `benchmarks/_traffic.py`: nothing is run.

The layers of a 7B-shaped model (32 blocks, width 4,096, MLP 11,008, no biases; q, k, v share their inputs, and so do gate and
up) with a subset of 1,024 tokens a refresh (`max_tokens`), and the output side of a head of 151,936 with 8,192 tokens. Rows
are bfloat16, sums and gradients float32. Tests hold the model to the bytes that real processes count. Draws
benchmarks/figures/kfac_traffic.png if matplotlib is there.
"""

import json
from typing import Any

from benchmarks import _traffic as traffic
from benchmarks._timing import RESULTS
from benchmarks._traffic import TrafficSide

RANKS = [2**i for i in range(1, 11)]
BLOCKS, WIDTH, MLP, VOCABULARY = 32, 4096, 11008, 151_936
LAYER_TOKENS, HEAD_TOKENS = 1024, 8192
INPUTS = (WIDTH, WIDTH, WIDTH, MLP)
"""Of q, k and v; of the attention's output; of gate and up; of down."""
OUTPUTS = (WIDTH, WIDTH, WIDTH, WIDTH, MLP, MLP, WIDTH)
SHAPES = ((WIDTH, WIDTH),) * 4 + ((MLP, WIDTH),) * 2 + ((WIDTH, MLP),)
"""[o, m] of the same seven layers."""
REDUCTIONS = ("gram", "gather", "dense")
SAMPLED_RANKS = 64


def refresh(side: TrafficSide, reduction: str) -> int:
    """Bytes that leave the rank with most tokens until the side is ready for use."""
    parts = (side.join(reduction), side.settle(reduction), side.gram(reduction))
    return sum(traffic.total(*parts).values())


def layers_refresh(ranks: int, reduction: str) -> int:
    """All blocks."""
    sides = [TrafficSide.even(width, LAYER_TOKENS, ranks) for width in (*INPUTS, *OUTPUTS)]
    return BLOCKS * sum(refresh(side, reduction) for side in sides)


def layers_use(ranks: int, local: bool) -> int:
    """One natural gradient of all blocks under "gram"."""
    total = 0
    for o, m in SHAPES:
        G, A = (TrafficSide.even(width, LAYER_TOKENS, ranks) for width in (o, m))
        total += sum(traffic.natural_gradient(G, A, ("gram", "gram"), local=local).values())
    return BLOCKS * total


def layers_held(ranks: int, reduction: str) -> int:
    """Bytes at rest on a rank, in half precision."""
    return BLOCKS * sum(TrafficSide.even(width, LAYER_TOKENS, ranks).stored(reduction) for width in (*INPUTS, *OUTPUTS))


def head(ranks: int) -> TrafficSide:
    """The output side of the head."""
    return TrafficSide.even(VOCABULARY, HEAD_TOKENS, ranks)


def crossovers(width: int) -> dict[str, float]:
    """Tokens of all ranks at which two reductions of a side send as much, and uses of one refresh, on many ranks."""
    ranks = RANKS[-1]
    return {
        "gram, with its Gram matrix, meets gather": traffic.gram_meets_gather(width, ranks),
        "gram, with its Gram matrix, meets dense": traffic.gram_meets_dense(width, ranks),
        "gather meets dense": traffic.gather_meets_dense(width),
    }


def numbers() -> dict[str, Any]:
    """All that is drawn."""
    return {
        "about": "bytes that leave one rank, from shapes; rows bfloat16, sums and gradients float32",
        "ranks": RANKS,
        "layers": {
            "tokens": LAYER_TOKENS,
            "refresh": {how: [layers_refresh(w, how) for w in RANKS] for how in REDUCTIONS},
            "natural gradient, gram": [layers_use(w, local=False) for w in RANKS],
            "natural gradient, gram, sharded rows": [layers_use(w, local=True) for w in RANKS],
            "held": {how: [layers_held(w, how) for w in RANKS] for how in REDUCTIONS},
        },
        "head": {
            "tokens": HEAD_TOKENS,
            "refresh": {how: [refresh(head(w), how) for w in RANKS] for how in REDUCTIONS},
            "natural gradient, gram": [sum(head(w).use("gram", WIDTH).values()) for w in RANKS],
            "natural gradient, gram, sharded rows": [
                sum(head(w).use("gram", WIDTH, local=True).values()) for w in RANKS
            ],
            "held": {how: [head(w).stored(how) for w in RANKS] for how in ("gram", "gather")},
        },
        "crossovers in tokens": {str(width): crossovers(width) for width in (WIDTH, MLP, VOCABULARY)},
    }


# ---- the figure ------------------------------------------------------------------------------------------------------

COLOURS = {"gram": "#0b6fa4", "gather": "#d1812a", "dense": "#5d6d7e"}


def draw(found: dict[str, Any]) -> None:
    """Sent by layers and head, held by both, and one side by tokens."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, ((layers, wide), (held, tokens)) = plt.subplots(2, 2, figsize=(12.5, 9))
    _draw_layers(layers, found["layers"])
    _draw_head(wide, found["head"])
    _draw_held(held, found)
    _draw_tokens(tokens)
    for axis in (layers, wide, held, tokens):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.grid(alpha=0.25, which="major")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in (layers, wide, held):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("ranks W")
        axis.set_xticks(RANKS[::3], [f"{w:,}" for w in RANKS[::3]])
        axis.set_xlim(RANKS[0], RANKS[-1])
    for axis, what in (
        (layers, "GB that leave one rank"),
        (wide, "GB that leave one rank"),
        (held, "GB held by one rank"),
    ):
        axis.set_ylabel(what)
    figure.tight_layout(w_pad=1.5, h_pad=2.5)
    path = RESULTS.parent / "figures" / "kfac_traffic.png"
    figure.savefig(path, dpi=130)
    print(path)


def _draw_layers(axis: Any, found: dict[str, Any]) -> None:
    ready, use = found["refresh"], found["natural gradient, gram"]
    axis.set_title(
        f"32 blocks of a 7B-shaped model, T = {found['tokens']:,}; a refresh, ready for use", loc="left", fontsize=11
    )
    _line(axis, ready["dense"], "dense", "dense")
    _line(axis, ready["gather"], "gather", "gather", va="top")
    _line(axis, ready["gram"], "gram", "gram", va="bottom")
    for uses in (1, 10):
        spent = [a + uses * b for a, b in zip(ready["gram"], use, strict=True)]
        _line(axis, spent, "gram", f"gram, used\n{'once' if uses == 1 else f'{uses} times'}", dashed=True)


def _draw_head(axis: Any, found: dict[str, Any]) -> None:
    ready = found["refresh"]
    axis.set_title(f"head of {VOCABULARY:,}: output side, T = {found['tokens']:,}; the same", loc="left", fontsize=11)
    _line(axis, ready["dense"], "dense", "dense, never\nmade: N >\n16,384", dashed=True)
    _line(axis, ready["gather"], "gather", "gather", va="bottom")
    _line(axis, ready["gram"], "gram", "gram", va="top")
    once = [a + b for a, b in zip(ready["gram"], found["natural gradient, gram"], strict=True)]
    local = [a + b for a, b in zip(ready["gram"], found["natural gradient, gram, sharded rows"], strict=True)]
    _line(axis, once, "gram", "gram, used\nonce", dashed=True, va="bottom")
    _line(axis, local, "gram", "used once,\nrows sharded", dashed=True, va="bottom")


def _draw_held(axis: Any, found: dict[str, Any]) -> None:
    axis.set_title("at rest, float16: the blocks (solid), the head's side (dashed)", loc="left", fontsize=11)
    layers, wide = found["layers"]["held"], found["head"]["held"]
    _line(axis, layers["dense"], "dense", "dense")
    _line(axis, layers["gather"], "gather", "gather", va="bottom")
    _line(axis, layers["gram"], "gram", "gram", va="bottom")
    _line(axis, wide["gather"], "gather", "head", dashed=True, va="top")
    _line(axis, wide["gram"], "gram", "head", dashed=True, va="top")


def _draw_tokens(axis: Any) -> None:
    axis.set_title(f"one side of width N = {WIDTH:,} on {SAMPLED_RANKS} ranks", loc="left", fontsize=11)
    first, last = 64, 32768

    def sent(how: str, tokens: float) -> float:
        """MB with tokens spread evenly, also where that is no whole number of them."""
        rows = {"gram": 2 * tokens * WIDTH / SAMPLED_RANKS + 16 * tokens**2, "gather": 2 * tokens * WIDTH}
        return (SAMPLED_RANKS - 1) / SAMPLED_RANKS * rows.get(how, 8 * WIDTH**2) / 1e6

    counts = [first * (last / first) ** (i / 60) for i in range(61)]
    axis.axvspan(WIDTH, last, color="#000000", alpha=0.06, lw=0)
    axis.text(WIDTH * 1.1, 0.1, "T ≥ N: dense,\nwhatever the\noption says", fontsize=9, color="#555555")
    for how, by in (("gram", 0.5), ("gather", 1.9), ("dense", 1.18)):
        axis.plot(counts, [sent(how, t) for t in counts], color=COLOURS[how], lw=2)
        axis.text(80, sent(how, 80) * by, how, color=COLOURS[how], fontsize=9.5, weight="bold")
    for text, at, how, place in (
        ("gram = gather\nT = {:,.0f} ≈ N/8", traffic.gram_meets_gather(WIDTH, SAMPLED_RANKS), "gather", (750, 0.9)),
        ("gram = dense\nT = {:,.0f} ≈ 0.7 N", traffic.gram_meets_dense(WIDTH, SAMPLED_RANKS), "dense", (420, 500)),
        ("gather = dense\nT = {:,.0f} = 4 N", traffic.gather_meets_dense(WIDTH), "dense", (5200, 12)),
    ):
        axis.plot([at], [sent(how, at)], "o", color="black", ms=5, zorder=5)
        line = {"arrowstyle": "-", "lw": 0.6, "shrinkB": 3}
        axis.annotate(text.format(at), (at, sent(how, at)), place, fontsize=9, arrowprops=line)
    axis.set_xscale("log")
    axis.set_xlim(first, last)
    axis.set_xticks([64, 512, 4096, 32768], ["64", "512", "4,096", "32,768"])
    axis.minorticks_off()
    axis.set_xlabel("tokens T of all ranks")
    axis.set_ylabel("MB that leave one rank")


def _line(axis: Any, values: list[int], how: str, said: str, dashed: bool = False, va: str = "center") -> None:
    """By ranks, with its name at the right end."""
    shown = _giga(values)
    axis.plot(RANKS, shown, color=COLOURS[how], lw=1.5 if dashed else 2, ls=(0, (4, 2)) if dashed else "-")
    axis.text(RANKS[-1] * 1.12, shown[-1], said, color=COLOURS[how], fontsize=9.5, va=va, clip_on=False)


def _giga(values: list[int]) -> list[float]:
    return [value / 1e9 for value in values]


def main() -> None:
    """Compute, write and draw."""
    found = numbers()
    path = RESULTS / "kfac_traffic.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(path)
    draw(found)


if __name__ == "__main__":
    main()
