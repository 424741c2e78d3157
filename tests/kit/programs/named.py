"""Programs that were wrong once, and their ordinary counterparts, by name."""

from typing import Any, NamedTuple

import torch

from tests.kit.programs.program import Program

EITHER = "exact or refused"


class Named(NamedTuple):
    """A program and what must come of it."""

    program: Program
    norms: str
    """Of `per_sample_norms`: "exact", "refused", or either."""
    private: str
    """Of private training."""


def _named(*productions: str, norms: str, private: str = "", seed: int = 0, **given: Any) -> Named:
    sizes = {"samples": 6, "tokens": 4, "width": 4, "ids": False, "random": False, "ragged": False}
    options = {**sizes, "dtype": torch.float64, "reduction": "mean", **given}
    return Named(Program(seed, productions, tuple(options.items())), norms, private or norms)


NAMED: dict[str, Named] = {
    # Rows attributed by shape
    "samples sorted, encoded and unsorted": _named("sorted_and_back(linear)", "linear", "pooled", norms="refused"),
    "two samples in order sorted, encoded and unsorted, with dropout in evaluation mode too": Named(
        Program(488084942), "refused", "refused"
    ),
    "padding that leaks into pooling, under dropout in evaluation mode too": Named(
        Program(426423504), EITHER, "refused"
    ),
    "a root with a parameter of its own that fails with an IndexError on one sample": Named(
        Program(351048627), "refused", "refused"
    ),
    "gradients that vanish but for rounding, beside large ones, of a mean over tokens": Named(
        Program(476445529), "exact", EITHER
    ),
    "two samples in order sorted, encoded and unsorted, mixed at random with each other": Named(
        Program(26064701), "refused", "refused"
    ),
    "gradients that vanish but for rounding, before a layer norm and a mean over tokens": Named(
        Program(720899113), "exact", EITHER
    ),
    "gradients that vanish but for rounding, before a layer norm of small numbers in float32": Named(
        Program(486906750), "exact", EITHER
    ),
    "a load-balancing loss beside rows that are not equal bit for bit": Named(Program(267396695), "refused", "refused"),
    "a mask [T, T] with T = B, and two returned losses of which one does not see it": Named(
        Program(748109979), "exact", EITHER
    ),
    "samples permuted, encoded and put back": _named("permuted_and_back(linear)", "linear", "rows", norms="refused"),
    "two samples swapped for one layer": _named("swapped_pair(linear)", "linear", "rows", norms="refused", samples=32),
    "samples flipped for one layer": _named("flipped_and_back(linear)", "linear", "rows", norms="refused", samples=2),
    "a layer called sample by sample": _named("sample_by_sample(linear)", "pooled", norms="refused", samples=32),
    "a layer called sample by sample, rows averaged": _named(
        "sample_by_sample_averaged(linear)", "pooled", norms="refused"
    ),
    "a layer called chunk by chunk": _named("chunk_by_chunk(linear)", "pooled", norms="refused"),
    "h[mask] with B tokens by chance": _named("token_mask", "linear", "rows", norms="refused", seed=1),
    "h[mask] with as many tokens of every sample": _named("equal_token_mask", "linear", "rows", norms="exact"),
    "relative positions through an embedding": _named("relative_positions", "rows", norms=EITHER),
    "relative positions, T = B": _named("relative_positions", "rows", norms=EITHER, samples=4),
    "a table [T, D] with T = B": _named("bare_table", "linear", "rows", norms=EITHER, samples=4),
    "positions [T] in any order with T = B": _named(
        "bare_positions", "linear", "rows", norms=EITHER, samples=4, seed=3
    ),
    "two views concatenated": _named("concatenated_views(linear)", "rows", norms="exact"),
    "two views stacked": _named("stacked_views(linear)", "rows", norms="exact"),
    "windows of all samples in turn": _named("windows_first(linear)", "rows", norms="exact"),
    "windows of each sample": _named("windows(linear)", "rows", norms="exact"),
    "a recurrent layer on windows": _named("windows(recurrent_layer)", "rows", norms="exact"),
    "time first, T = B": _named("time_first(linear)", "rows", norms="exact", samples=4),
    "time first, T = 2 B": _named("time_first(linear)", "rows", norms="exact", samples=2),
    "time-first convolution, T = B": _named("time_first(convolution)", "rows", norms="refused", samples=4),
    "tokens sent to experts": _named("experts", "rows", norms=EITHER),
    # The forward changed
    "a shared row summed": _named("row_summed", "linear", "rows", norms=EITHER),
    "a shared row averaged": _named("row_averaged", "linear", "rows", norms=EITHER),
    "a shared row squared and summed": _named("row_power", "linear", "rows", norms=EITHER),
    "a shared row reshaped": _named("row_reshaped", "linear", "rows", norms=EITHER),
    "a shared row repeated": _named("row_repeated", "linear", "rows", norms=EITHER),
    "a shared row picked": _named("row_picked", "linear", "rows", norms=EITHER),
    "a shared row penalised": _named("row_penalised", "linear", "rows", norms=EITHER),
    "a shared row consumed in flipped order": _named("row_flipped", "linear", "rows", norms=EITHER),
    "a shared row added": _named("row_added", "linear", "rows", norms="exact"),
    "a shared row expanded": _named("row_expanded", "linear", "rows", norms="exact"),
    "a shared row through two layers": _named("row_in_a_chain", "linear", "rows", norms="exact"),
    "a penalty on a weight": _named("weight_penalty", "rows", norms=EITHER),
    "one row of the first sample": _named("layer_on_the_first", "rows", norms="refused"),
    "one row of the mean": _named("layer_on_the_mean", "rows", norms="refused"),
    # Samples that depend on each other
    "the sign of the distance from the mean": _named("above_the_mean", "loss", norms="refused", samples=32),
    "a load-balancing loss in float32": _named("balanced_gate", "rows", norms="refused", dtype=torch.float32),
    "an entropy term for every sample": _named("gate_entropy", "rows", norms="exact"),
    "a centred batch": _named("centred", "linear", "rows", norms="refused"),
    "mixing behind the last layer": _named("averaged_with_flipped", "rows", norms="refused"),
    "outputs in another order": _named("flipped", "rows", norms="refused", samples=3),
    "a gradient hook that normalises over the batch": _named("gradient_over_its_norm", "rows", norms="refused"),
    "a function that normalises the gradient": _named("normalising_function", "rows", norms="refused"),
    "a gradient hook that scales": _named("reversed_gradient", "linear", "rows", norms="exact"),
    "a token mean over the batch": _named("linear", "token_mean_loss", norms="refused"),
    "a token mean of equal counts": _named("linear", "token_mean_loss_of_equal_counts", norms="exact"),
    "a mean over samples that the root returns": _named("linear", "loss", norms="exact"),
    # Padding; inside its own padding a sample is independent, and norms know no other
    "pooling over padding": _named("linear", "pooled_without_mask", norms="exact", private="refused", ragged=True),
    "pooling with a mask": _named("linear", "pooled_with_mask", norms="exact", ragged=True),
    # Ordinary
    "a buffer that counts forwards": _named("call_counter", "linear", "rows", norms="exact"),
    "a mask [T, T] with T = B": _named("square_mask", "rows", norms="exact", samples=4),
    "labels of samples": _named("sample_labels", "linear", "rows", norms="exact"),
    "dropout": _named("dropout(linear)", "linear", "rows", norms="exact", random=True),
    "a parameter of the root": _named("class_token", "linear", "rows", norms="exact"),
    "a layer used twice": _named("reused_layer", "residual(reused_layer)", "rows", norms="exact", ids=True),
}
