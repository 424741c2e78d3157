"""Traps that K-FAC codes fall into, each of which must turn a test red.

A trap is put back into the package, by an edit of one function or another in its place, while a test of the suite runs; the
same test is green without it. `docs/internals/traps.md` is the list for people; it is checked against this one.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.curvature import Block
from gramian.curvature.estimate.kronecker_sums import KroneckerSums
from gramian.linalg import Dense, Diagonal, DiagonalLowRank, Factor, LowRank, Spectral
from gramian.linalg import wide as wide_module
from gramian.linalg.factors.stored import store_columns
from tests.curvature import (
    test_banks,
    test_bias,
    test_capacity,
    test_damping,
    test_ewc,
    test_factors,
    test_failures,
    test_fisher_types,
    test_layers,
    test_loss_contract,
    test_mixers,
    test_operator_traps,
    test_options,
    test_parts,
    test_planning,
    test_precondition,
    test_products,
    test_ready_operators,
    test_record,
    test_rows,
    test_several_matrices,
)
from tests.curvature.small import FEW, MANY, assert_near, net, refresh, sides, words
from tests.curvature.test_memory import Largest
from tests.kit.matrix import sample
from tests.kit.mutations import RED, Edit, Mutation, Swap, package_identity, turns_red
from tests.linalg import (
    test_cholesky,
    test_chunks,
    test_clip,
    test_factor,
    test_lanczos,
    test_precision,
    test_quadrature,
    test_stored,
)
from tests.linalg.matrices import CASES, normal
from tests.test_mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "internals" / "traps.md"
BY_NUMBER = "## By number"


# ---- traps that are more than an edit --------------------------------------------------------------------------------


def _raw_where_fractional(
    self: Any, y_NK: Tensor, p: float, damping: float, max_condition: float | None = None
) -> Tensor:
    return Spectral.power(self, y_NK, p, damping, max_condition) if p == int(p) else y_NK.to(self.dtype)


_power = Block.power


def _without_the_last_input(self: Block, y_OM: Tensor, *arguments: Any) -> Tensor:
    """A without its row and column of the bias, where the bias has no gradient."""
    if self.A is None or not self.spec.has_bias or bool(y_OM[:, -1].any()):
        return _power(self, y_OM, *arguments)
    smaller = replace(self, A=Dense.of(self.A.dense()[:-1, :-1], self.A.storage_dtype))
    return torch.cat([_power(smaller, y_OM[:, :-1], *arguments), torch.zeros_like(y_OM[:, -1:])], dim=1)


_update = KroneckerSums.update


def _update_whatever_happens(self: KroneckerSums, *arguments: Any) -> None:
    with suppress(RuntimeError):
        _update(self, *arguments)


def _diagonal_of_what_was_not_rounded(cls: Any, weighted_p_NR: Tensor, storage: torch.dtype) -> DiagonalLowRank:
    p = weighted_p_NR.double()
    return cls(p @ p.sum(0), store_columns(weighted_p_NR, storage), -1)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _patched(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A test that wants a monkeypatch, under its own name."""

    @functools.wraps(test)
    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(*arguments, monkeypatch=patch)

    return check


def _in_small_pieces(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A test in which the pieces that are held in wide precision are small."""

    @functools.wraps(test)
    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wide_module, "BLOCK", test_chunks.PIECE)
            test(*arguments, small_pieces=None)

    return check


def _labels_seen(test: Callable[..., None]) -> Callable[[], None]:
    """A test that wants to see the labels of every loss."""

    @functools.wraps(test)
    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(test_fisher_types.drawn.__wrapped__(patch))

    return check


def _of_case(test: Callable[..., None], name: str, *arguments: Any) -> Callable[[], None]:
    """A test of a factor, a new one every time."""

    @functools.wraps(test)
    def check() -> None:
        test(CASES[name](), *arguments)

    return check


def _powers(p: float, mode: str, clip: str, policy: str) -> Callable[[], None]:
    return partial(test_damping.test_powers_are_those_of_the_whole_matrix, "mlp", p, mode, clip, policy)


def _wrong_option(name: str, value: Any) -> Callable[[], None]:
    test = test_options.test_a_wrong_value_is_refused_by_name_with_what_would_be_accepted
    return partial(test, name, value)


def _clipped(shape: tuple[int, int]) -> Callable[[], None]:
    test = test_options.test_the_clip_raises_eigenvalues_to_the_largest_over_kappa
    return partial(test, -1.0, 3.0, True, shape)


def _exact_head(what: str) -> Callable[[], None]:
    test = test_fisher_types.test_the_exact_head_is_the_softmax_fisher
    return partial(test, 2, "all", "diagonal minus low rank", what, "expand")


def _sequence_first() -> Callable[[], None]:
    message = r"token_weights: expected shape \[3, T\], got \[6, 3\]"
    return partial(test_loss_contract.test_invalid_weights_are_refused, torch.ones(6, 3), message)


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_has_powers_and_products(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Its gradients are half precision numbers, its factors and what is done with them are not."""
    model = net(dtype=dtype)
    kfac = test_options.make(woodbury_dtype="fp32", damping_mode="factored", damping=1e-2)
    refresh(kfac, model, words(shape))
    a_side, g_side = sides(kfac, "q")
    y = model.q.weight.grad.double()
    for p in (-1.0, -0.5):
        found = kfac.compute_natural_gradient(model, power=p)["q.weight"]
        left, right = (test_options.raised(test_options.damped(t, 1e-2, 1e6), p) for t in (g_side, a_side))
        assert found.dtype == dtype
        assert_near(found, left @ y @ right, 4 * torch.finfo(dtype).eps)
    product = kfac.compute_fisher_vector_product({"q.weight": model.q.weight.grad})["q.weight"]
    assert product.dtype == dtype
    assert_near(product, g_side @ y @ a_side, 4 * torch.finfo(dtype).eps)


FACTORS: dict[str, Callable[[Tensor], Factor]] = {
    "diagonal": lambda u: Diagonal(u[:, 0]),
    "low rank": LowRank.of,
    "diagonal plus low rank": lambda u: DiagonalLowRank.of(u[:, 0], u, +1),
    "softmax": lambda u: DiagonalLowRank.softmax(u / u.sum(0), torch.float64),
}


@pytest.mark.parametrize("kind", FACTORS)
def test_products_and_powers_write_no_matrix_out(kind: str) -> None:
    u, y = normal(300, 4).abs(), normal(300, 2, seed=1)
    factor = FACTORS[kind](u)
    with Largest() as largest:
        for result in (factor.matvec(y), factor.solve(y, 0.1), *(factor.power(y, p, 0.1) for p in (1.0, -0.5))):
            assert result.shape == y.shape
    assert largest.elements <= 4 * 300, f"{largest.elements} elements by {largest.operator}"


# ---- the list --------------------------------------------------------------------------------------------------------


TRAPS = (
    # ---- mathematics ----
    Mutation(
        "G of a mean loss not rescaled",
        Edit("KFACCapture.pass_info", '"mean": mean', '"mean": 1.0'),
        partial(
            test_loss_contract.test_factors_do_not_depend_on_how_the_loss_is_written,
            test_loss_contract.mean,
            "mlp",
            "expand",
        ),
    ),
    Mutation(
        "columns cast to half precision as they are",
        Edit("stored:store_columns", "_powers_of_two(top_R / 2**10)", "torch.ones_like(top_R)"),
        partial(test_options.test_tiny_gradients_of_a_mean_over_thousands_of_tokens_do_not_underflow, 2100, "fp16"),
    ),
    Mutation(
        "matrices cast to half precision as they are",
        Edit(
            "stored:store_symmetric",
            "_powers_of_two(matrix_NN.diagonal().double().clamp(min=0).sqrt())",
            "torch.ones_like(matrix_NN.diagonal())",
        ),
        partial(test_options.test_tiny_gradients_of_a_mean_over_thousands_of_tokens_do_not_underflow, 7, "fp16"),
    ),
    Mutation(
        "joint damping put on each side",
        Edit("Damping.joint", "DAMPING_MODES[self.mode].on_product", "False"),
        _powers(-1.0, "joint", "off", "all"),
    ),
    Mutation(
        "damping not balanced between the sides",
        Edit("damping:_balance", "(mean_A / mean_G) ** 0.5", "1.0"),
        test_damping.test_pi_balances_the_two_sides,
    ),
    Mutation(
        "parameters outside K-FAC at another scale",
        Edit(
            "natural_gradient:_without_curvature",
            "for p in block.spec.parameters}",
            "for p in block.spec.parameters if block.A is not None}",
        ),
        partial(test_damping.test_blocks_without_two_sides_are_damped_whole, "pi", 1e-4, -1.0, "off"),
    ),
    Mutation(
        "undamped product by subtracting λv",
        Edit(
            "natural_gradient:fisher_vector_product",
            "_apply(state, measured, 1.0 if damped else None) if measured else {}",
            "{n: t if damped else t - state.options.damping * vector[n] for n, t in _apply(state, vector, 1.0).items()}",
        ),
        partial(test_damping.test_the_fisher_vector_product_is_undamped_unless_asked, "pi", "off", "small_only"),
    ),
    Mutation(
        "drawn labels one position off",
        Edit(
            "fisher_labels:run_pass",
            "likelihood.draw(outputs, seed, samples, draw)",
            "likelihood.draw(outputs, seed, samples, draw).roll(-1, -1)",
        ),
        _labels_seen(test_fisher_types.test_drawn_labels_are_aligned_with_the_logits_of_a_causal_model),
    ),
    Mutation(
        "first estimate of an average corrected once more",
        Edit(
            "build_factors:average",
            "new.with_factors(new.A, new.G, replace(",
            "new.with_factors(new.A, Dense.of(new.G.dense() / (1 - decay**k), new.G.storage_dtype), replace(",
        ),
        partial(test_loss_contract.test_factors_are_debiased_averages_over_refreshes, 40, 0.6),
    ),
    Mutation(
        "complement of a low-rank side not clipped",
        Edit("Spectral.power", "lowest = max(damping, floor)", "lowest = damping"),
        _of_case(test_factor.test_clipped_powers_are_those_of_eigh, "low rank", -1.0),
    ),
    Mutation(
        "clip on the inputs' side only",
        Edit("Block.solves", "if damping.max_condition is None:", 'if damping.max_condition is None or side == "G":'),
        _clipped(FEW),
    ),
    Mutation(
        "capacity of a spectrum that λ is in",
        Edit(
            "side_spectra:_matrix",
            "return one.stored.load(dtype=torch.float64, device=where)",
            "return one.stored.load(dtype=torch.float64, device=where) + 5.0 * torch.eye(one.dim)",
        ),
        test_capacity.test_metrics_are_of_the_undamped_and_unclipped_spectrum,
    ),
    Mutation(
        "capacity of a damped product less λ",
        Edit(
            "capacity:_measure",
            "largest=A.largest * G.largest,",
            "largest=(A.largest + damping) * (G.largest + damping) - damping,",
        ),
        test_capacity.test_metrics_are_of_the_undamped_and_unclipped_spectrum,
    ),
    Mutation(
        "eigenvalues below 1e-8 dropped",
        Edit("Values.of", "(values > 0).sum()", "(values > 1e-8).sum()"),
        partial(test_capacity.test_a_multiple_of_the_fisher_has_the_same_ranks, 1e-9),
    ),
    Mutation(
        "1e-8 added to denominators",
        Edit(
            "capacity:_report",
            "spectrum.mass**2 / spectrum.squares",
            "trace**2 / (spectrum.largest**2 * spectrum.squares + 1e-8)",
        ),
        partial(test_capacity.test_a_multiple_of_the_fisher_has_the_same_ranks, 1e-9),
    ),
    Mutation(
        "directions without an eigenvalue left out",
        Edit("side_spectra:sides_of", "Values.of(nonzero[: one.dim], one.dim)", "Values.of(nonzero[: one.dim])"),
        partial(test_capacity.test_dense_and_low_rank_sides_have_the_same_metrics, "all"),
    ),
    # ---- what did not work at all ----
    Mutation(
        "capacity of dense sides only",
        Edit(
            "side_spectra:sides_of",
            "assert isinstance(one, Dense | LowRank | DiagonalLowRank)",
            "assert isinstance(one, Dense)",
        ),
        partial(test_capacity.test_dense_and_low_rank_sides_have_the_same_metrics, "all"),
    ),
    Mutation(
        "the EWC penalty as tr((Gδ)(δᵀA))",
        Edit(
            "ewc:_penalty",
            "(value.double() * product[name].double()).sum()",
            "torch.trace((one := [*task.kfac.kfac_factors.values()][0]).G.matvec(value) @ one.A.matvec(value).mT)",
        ),
        test_ewc.test_the_trace_has_delta_between_both_sides,
    ),
    Mutation(
        "the user's own backward brings no factors",
        Edit("KFACCapture._leave", "self._finish(self._curvature, self)", "self._curvature.capturing = False"),
        partial(test_failures.test_captures_of_other_objects_share_one_backward_and_see_what_they_see_alone, True),
    ),
    Mutation(
        "no refresh at the first step",
        Edit(
            "refresh_schedule:begin_step",
            "state.last_refresh is None or step - state.last_refresh >= state.options.update_freq",
            "(step + 1) % state.options.update_freq == 0",
        ),
        test_loss_contract.test_the_first_step_refreshes_and_then_every_nth,
    ),
    Mutation(
        "half-precision gradients not widened",
        (
            Edit("apply_factors:_apply_block", "t.detach().to(wide)", "t.detach()"),
            Edit("Block.power", "y_OM = y_OM.to(torch.promote_types(y_OM.dtype, self._dtype(p, damping)))", "pass"),
            Edit("Spectral.power", "y_NK.to(torch.promote_types(working, y_NK.dtype))", "y_NK"),
            Edit("Dense.to_basis", "[1].to(y_NK)", "[1]"),
        ),
        partial(test_a_model_in_half_precision_has_powers_and_products, torch.bfloat16, MANY),
    ),
    Mutation(
        "product with a weight whose bias is missing",
        Edit("Spec.matrix", "if not self.has_bias:", "if not self.has_bias or parts[1] is None:"),
        partial(test_bias.test_a_product_with_half_a_layer_is_that_with_zeros_for_the_rest, "weight", False, MANY),
    ),
    Mutation(
        "fractional power of a low-rank side left out",
        Swap("LowRank.power", _raw_where_fractional),
        _powers(-0.5, "factored", "off", "all"),
    ),
    # ---- precision ----
    Mutation(
        "float32 whatever the damping",
        Edit("Factor.working_dtype", "return torch.float32 if trusted else torch.float64", "return torch.float32"),
        partial(test_precision.test_a_float32_right_hand_side_is_solved_for_what_it_is, torch.float32, 1e-6),
    ),
    Mutation(
        "jitter in absolute numbers",
        Edit("Cholesky._repair", "scale = float(matrix.diagonal().double().abs().mean()) or 1.0", "scale = 1.0"),
        test_cholesky.test_a_large_matrix_in_float32_would_not_feel_an_absolute_jitter,
    ),
    # ---- shapes, calls, masks ----
    Mutation(
        "U transposed",
        Edit(
            "Builder._moment_factor",
            "LowRank.of(total.columns,",
            "LowRank.of(total.columns.piece(slice(0, total.stored)).mT,",
        ),
        partial(test_factors.test_factors_are_means_of_outer_products, "mlp", "all", "expand"),
    ),
    Mutation(
        "stale inverse after another damping",
        Edit(
            "Decomposable.prepare_solve",
            "if key in self._cholesky:",
            "self._cholesky = {key: system for system in self._cholesky.values()}\n    if self._cholesky:",
        ),
        _of_case(test_factor.test_solutions_are_those_of_eigh, "dense"),
    ),
    Mutation(
        "identity in place of eigenvectors without the clip",
        Edit(
            "Block.act",
            "factor.power(y_NC, p, value, damping.max_condition))",
            "factor.power(y_NC, p, value, damping.max_condition) if damping.max_condition else "
            "(factor.diagonal() + value).pow(p)[:, None] * y_NC)",
        ),
        _powers(-0.5, "factored", "off", "small_only"),
    ),
    Mutation(
        "clip without the damping",
        Edit(
            "Spectral.power",
            "raised(self.spectrum.double() + damping, floor)",
            "raised(self.spectrum.double() + (0.0 if floor else damping), floor)",
        ),
        _clipped(MANY),
    ),
    Mutation(
        "A cut down where the bias has no gradient",
        Swap("Block.power", _without_the_last_input),
        partial(test_bias.test_a_missing_bias_gradient_counts_as_zero, MANY),
    ),
    Mutation(
        "diagonal written out as a matrix",
        Edit(
            "Diagonal.matvec",
            "self.values_N.to(y_NK.device)[:, None] * y_NK.to(self.dtype)",
            "torch.diag(self.values_N) @ y_NK.to(self.dtype)",
        ),
        partial(test_products_and_powers_write_no_matrix_out, "diagonal"),
    ),
    Mutation(
        "low-rank side written out as a matrix",
        Edit("LowRank.matvec", "self.columns.times(self.columns.transposed_times(y_NK))", "self.dense() @ y_NK"),
        partial(test_products_and_powers_write_no_matrix_out, "low rank"),
    ),
    Mutation(
        "only the last call of a module kept",
        Edit(
            "KroneckerSums._add",
            "is_table = record.layer in spec.tables",
            "is_table = record.layer in spec.tables; block.inputs = block.gradients = None",
        ),
        partial(test_layers.test_matrices_have_k_fac_factors, "reused"),
    ),
    Mutation(
        "padding counted in A",
        Edit(
            "KroneckerSums._add",
            "self.selection.choose(sides, info, record.layer, block.inputs.keep)",
            "ChosenTokens(None, None, None, sides.inputs_BT.shape[:2].numel())",
        ),
        partial(test_loss_contract.test_ignored_targets_are_not_terms, "mean", True),
    ),
    Mutation(
        "weights of the terms ignored in G",
        Edit(
            "KroneckerSums._add",
            "self.selection.choose(sides, info, record.layer, keep)",
            "ChosenTokens(None, None, None, sides.inputs_BT.shape[:2].numel())",
        ),
        test_loss_contract.test_fractional_weights_are_those_of_the_terms,
    ),
    Mutation(
        "mask matched by its number of elements",
        Edit(
            "KFACCapture.pass_info",
            "if weights is not None and (weights.dim() != 2 or weights.shape[0] != batch):",
            "weights = None if weights is None else weights.reshape(batch, -1)\n    if False:",
        ),
        _sequence_first(),
    ),
    Mutation(
        "batch with NaN in the factors",
        Swap("build_factors:_refuse_not_finite", lambda fresh, averaged: None),
        partial(test_failures.test_a_batch_that_is_not_finite_is_dropped_as_a_whole, float("nan"), "loss", 30),
    ),
    Mutation(
        "infinities replaced by large numbers",
        Edit(
            "KroneckerSums._add",
            "self._rows(chosen, sides.inputs_BT, record.borrowed)",
            "self._rows(chosen, sides.inputs_BT.nan_to_num(0.0, 1e6, -1e6), record.borrowed)",
        ),
        test_failures.test_one_bad_side_drops_the_sides_that_are_good,
    ),
    Mutation(
        "exceptions of the sums swallowed",
        Swap("KroneckerSums.update", _update_whatever_happens),
        _patched(test_failures.test_no_memory_in_the_middle_of_the_sums_drops_the_refresh, 1, MANY),
    ),
    Mutation(
        "one eigendecomposition that fails ends everything",
        Edit("Dense.eigenpairs", 'if "NaN" in str(error):', "if True:"),
        _patched(
            test_failures.test_without_eigenvectors_a_dense_side_goes_by_its_diagonal,
            torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge"),
        ),
    ),
    Mutation(
        "attention's projections left out",
        Edit(
            "block_specs:find_blocks",
            "for name, specs in matrices.items():",
            'for name, specs in [one for one in matrices.items() if "_proj" not in one[0]]:',
        ),
        test_layers.test_attention_is_covered_whole,
    ),
    Mutation(
        "Conv1D of GPT-2 left out of K-FAC",
        Edit(
            "block_specs:_kronecker",
            "if not all(use.forms for use in uses):",
            'if any(f.layout == "in_out" for use in uses for f in use.forms.values()) or not all(use.forms for use in uses):',
        ),
        partial(test_layers.test_matrices_have_k_fac_factors, "hf_gpt2"),
    ),
    Mutation(
        "narrow layers dropped",
        Edit(
            "block_specs:find_blocks",
            "if isinstance(specs, str):",
            "if isinstance(specs, str) and specs:\n            continue\n        if isinstance(specs, str):",
        ),
        test_options.test_narrower_layers_are_not_kronecker_blocks,
    ),
    Mutation(
        "the user's gradients lost",
        Edit("preserve_state:preserve_state", "p.grad = gradient", "p.grad = None"),
        partial(test_fisher_types.test_a_collection_leaves_no_trace, "empirical", False),
    ),
    Mutation(
        "the user's random state moved on",
        Edit("preserve_state:preserve_state", "generators.restore(random_states)", "pass"),
        partial(test_fisher_types.test_a_collection_leaves_no_trace, "mc", False),
    ),
    Mutation(
        "head found by the end of its name",
        Edit(
            "output_head:known_head",
            "return names.get(id(module)) if module is not None else None",
            'return next((name for name in names.values() if name.endswith("lm_head")), None)',
        ),
        test_fisher_types.test_the_head_is_what_the_model_says_it_is,
    ),
    Mutation(
        "parameters told apart by name",
        Edit("consistency:unique_parameters", "first.setdefault(id(p),", "first.setdefault(name,"),
        test_precondition.test_a_tied_parameter_is_preconditioned_once,
    ),
    # ---- ready operators ----
    Mutation(
        "operators of factors that are gone",
        Edit("ReadyOperators.fits", "and _made_of(blocks) == self._made_of", ""),
        test_ready_operators.test_operators_do_not_outlive_what_they_were_made_of,
    ),
    Mutation(
        "operators of another power",
        Edit("ReadyOperators.fits", "power == self.power and ", ""),
        test_ready_operators.test_operators_do_not_outlive_what_they_were_made_of,
    ),
    Mutation(
        "products coarser than their bound",
        Edit("ready_operators:_precision", "<= ACCURATE", "<= 10 * ACCURATE"),
        partial(test_ready_operators.test_the_precision_follows_from_the_condition_number, 1e-1),
    ),
    Mutation(
        "a bound of rounding that is ten times as wide",
        Edit("ready_operators:_error", "return 4 *", "return 40 *"),
        partial(test_ready_operators.test_the_bound_is_at_most_ten_times_the_largest_error, "bf16"),
    ),
    Mutation(
        "a bound without the rounding of float32 itself",
        Edit("ready_operators:_error", " + w * (math.sqrt(block.spec.outputs) + math.sqrt(block.spec.inputs))", ""),
        partial(test_ready_operators.test_the_bound_is_at_most_ten_times_the_largest_error, "fp32"),
    ),
    Mutation(
        "errors measured with an undamped vector",
        Edit("ReadyGroup.error", " + value * x_N1", ""),
        partial(test_ready_operators.test_the_measured_error_is_that_of_a_vector_like_a_gradient, "bf16", FEW),
    ),
    Mutation(
        "padding left as it was in memory",
        Edit(
            "ReadyGroup._stacked", "y_BOM[:, :, spec.inputs :].zero_()", "y_BOM[:, :, spec.inputs :].fill_(torch.nan)"
        ),
        test_ready_operators.test_dots_are_products_of_the_gradient_and_its_natural_gradient,
    ),
    # ---- steps ----
    Mutation(
        "trust region of the current learning rate",
        Edit("_NaturalStep._scale", 'float(group.get("initial_lr", first))', 'float(group["lr"])'),
        partial(test_precondition.test_the_trust_region_follows_the_schedule, 1e-4, "scheduled", "pi"),
    ),
    Mutation(
        "trust region of the learning rate that a run is resumed at",
        Edit("_NaturalStep._scale", 'group.get("initial_lr", first)', "first"),
        partial(test_precondition.test_the_trust_region_follows_the_schedule, 1e-4, "scheduled before", "pi"),
    ),
    # ---- the exact head ----
    Mutation(
        "exact head without its diagonal",
        Edit(
            "Builder._softmax_factor",
            "DiagonalLowRank.softmax(total.columns, dtype, total.factor * scale**0.5)",
            "LowRank.of(total.columns, dtype, total.factor * scale**0.5)",
        ),
        _exact_head("all"),
    ),
    Mutation(
        "tokens without a loss in the exact head",
        Edit(
            "kronecker_sums:head_tokens",
            "selection.choose(sides, info, record.layer, keep)",
            "ChosenTokens(None, torch.ones(sides.inputs_BT.shape[:2].numel()), None, sides.inputs_BT.shape[:2].numel())",
        ),
        _exact_head("masked"),
    ),
    Mutation(
        "exact head indefinite after rounding",
        Swap("DiagonalLowRank.softmax", classmethod(_diagonal_of_what_was_not_rounded)),
        partial(test_stored.test_softmax_heads_stay_positive, torch.float16, 10.0),
    ),
    # ---- options and log ----
    Mutation(
        "unknown words accepted as options",
        Swap("curvature/options:_one_of", lambda name, value, accepted: None),
        _wrong_option("kfac_policy", "some"),
    ),
    Mutation(
        "damping of zero accepted",
        Edit("Options.__post_init__", "if not _number(value) or not value > 0:", "if not _number(value):"),
        _wrong_option("damping", 0.0),
    ),
    Mutation(
        "device in the log that is not the factors'",
        Edit("curvature_record:layer_line", 'f"storage={devices}"', '"storage=cuda"'),
        test_record.test_a_layers_line_is_true,
    ),
    Mutation(
        "dtype in the record that is not the factors'",
        Edit("curvature_record:_side", 'str(factor.storage_dtype).removeprefix("torch.")', '"float16"'),
        partial(test_options.test_both_sides_rest_in_the_dtype_that_was_asked_for, "bf16", torch.float32, FEW),
    ),
    Mutation(
        "clipped eigenvalues counted after the clip",
        Edit(
            "Spectral.clip",
            "values = self.spectrum.double() + damping",
            "values = raised(self.spectrum.double() + damping, floor)",
        ),
        partial(test_clip.test_count_mass_and_floor_are_those_of_eigh, "dense", 50.0),
    ),
    # ---- memory ----
    Mutation(
        "tokens kept to the end whatever becomes of them",
        Edit("TokenMoment.add", "self.seen <= self.keep.rows_up_to", "True"),
        _patched(test_planning.test_bytes_at_rest_are_those_of_the_plan, "gpt", False, "small_only", "fp16"),
    ),
    Mutation(
        "a budget for each layer by itself",
        Edit("_BudgetSearch._totals", "bool(self.options.ema_decay), count)", "False, 1)"),
        partial(test_planning.test_seven_billion_parameters_are_planned_without_allocating_anything, "40GB"),
    ),
    Mutation(
        "all of U in wide precision",
        Edit(
            "Columns.blocks",
            "return pieces(self.stored.body.shape[0], self.count)",
            "return iter([slice(0, self.stored.body.shape[0])])",
        ),
        _in_small_pieces(test_chunks.test_a_use_holds_its_result_and_a_piece, "gram"),
    ),
    Mutation(
        "low rank where it takes more than dense",
        Edit(
            "representation:low_rank_up_to",
            "return min(width - 1, options.kfac_auto_t_max)",
            "return options.kfac_auto_t_max",
        ),
        partial(test_factors.test_the_representation_is_the_policy_s, {}, 11, "0 A", test_factors.DENSE, 1),
    ),
    Mutation(
        "A always dense",
        Edit("representation:low_rank_up_to", "if not options.low_rank:", 'if not options.low_rank or side == "A":'),
        partial(test_factors.test_the_representation_is_the_policy_s, {}, 10, "0 A", test_factors.LOW, 1),
    ),
    Mutation(
        "A of one input made for each of its layers",
        Edit(
            "Join._side",
            "key = (spec.has_bias, *(None if side is None else side.group for side in reports))",
            "key = spec.name",
        ),
        partial(test_factors.test_layers_that_read_one_tensor_share_one_factor, 2, 1, False),
    ),
    Mutation(
        "the square of the vocabulary",
        Edit("representation:keep_for", "if width > WIDEST_DENSE:", "if False:"),
        partial(test_planning.test_a_vocabulary_is_dense_under_no_policy, "small_only"),
    ),
    Mutation(
        "all products of two spectra at once",
        Edit("spectrum_products:_tiles", "high = max(1, CHUNK // wide)", "high = rows"),
        test_products.test_all_products_are_never_stored_at_once,
    ),
    Mutation(
        "groups of a convolution in another order",
        Edit("Convolution.matrix_sides", "images.chunk(module.groups, 1)", "images.chunk(module.groups, 1)[::-1]"),
        partial(test_several_matrices.test_factors_are_those_of_the_unrolled_layer, "conv1d"),
    ),
    Mutation(
        "a weight taken for the matrix that it has the shape of",
        Edit("KroneckerSums._verified", 'if sides.recorded else ""', 'if False else ""'),
        test_parts.test_matrices_that_are_none_have_their_exact_rows_and_say_why,
    ),
    Mutation(
        "every weight stored as [out, in]",
        Edit("KroneckerSums._verified", "sides.layout or spec.layout", "spec.layout"),
        partial(test_parts.test_natural_gradients_and_products_are_those_of_a_module_for_each_matrix, {}),
    ),
    Mutation(
        "all experts as the first",
        Edit("ParameterParts.split", "view(whole, part)", "view(whole, self.names[name][0])"),
        partial(test_parts.test_natural_gradients_and_products_are_those_of_a_module_for_each_matrix, {}),
    ),
    Mutation(
        "time steps of the reverse direction in order",
        Edit("unrolled:unrolled", "steps[:: -1 if direction else 1]", "steps[::1]"),
        partial(test_several_matrices.test_factors_are_those_of_the_unrolled_layer, "lstm"),
    ),
    Mutation(
        "the output's positions in a transposed convolution",
        Edit(
            "contractions:_convolution",
            "kernel, stride, padding, dilation)\n",
            "kernel, (1,) * count, padding, dilation)\n",
        ),
        partial(test_several_matrices.test_factors_are_those_of_the_unrolled_layer, "transposed1d"),
    ),
    Mutation(
        "the rows of one expert by the order of another",
        Edit(
            "BankSides.span", "self.ends[number], self.ends[number + 1]", "0, self.ends[number + 1] - self.ends[number]"
        ),
        partial(
            test_banks.test_factors_are_those_of_each_expert_s_rows, test_banks.grouped, "small_only", "fractional", 3
        ),
    ),
    Mutation(
        "weights of experts' gradients not inverted",
        Edit("KroneckerSums._add_bank", "1.0 / weights_K", "weights_K"),
        partial(
            test_banks.test_factors_are_those_of_each_expert_s_rows, test_banks.grouped, "small_only", "fractional", 3
        ),
    ),
    Mutation(
        "rows of all samples added up before they are squared",
        Edit(
            "assumed_matrices:row_sides",
            "y_B = gradient.per_sample()",
            "y_B = gradient.total().expand(gradient.batch, *gradient.shape)",
        ),
        partial(test_rows.test_factors_are_those_of_the_rows_of_every_sample, "standardised"),
    ),
    Mutation(
        "rows of a matrix that is multiplied in another call",
        Edit("block_specs:table_of_rows", "why in CONTRADICTIONS or ", ""),
        partial(test_rows.test_a_matrix_that_is_added_and_multiplied_has_all_of_its_gradients_in_one_sum, False),
    ),
    Mutation(
        "weights of children that are not called not looked for",
        Edit("RowProof.guard", "uses.past_a_tap or 0 in uses.rows", "0 in uses.rows"),
        test_mixers.test_projections_have_factors_and_all_else_exact_blocks,
    ),
    Mutation(
        "one row for all samples known by inputs alone",
        Edit(
            "ProofRuns.calls",
            "frozenset(rows for _, _, rows in run.calls) | returned",
            "frozenset(rows for _, _, rows in run.calls)",
        ),
        partial(test_rows.test_a_table_of_positions_without_a_batch_axis_has_factors_of_every_sample, True),
    ),
    Mutation(
        "copies of one row not looked at",
        Edit("RowComparison.refuse_shared_samples", "if change is not None:", "if False:"),
        test_rows.test_one_row_that_is_not_of_samples_has_a_copy_for_each,
    ),
    Mutation(
        "exact blocks of rows as a diagonal",
        Edit("RemainderSums.update", "g_RBW.mT @ g_RBW", "torch.diag_embed(g_RBW.square().sum(1))"),
        partial(test_layers.test_all_else_has_its_exact_block_or_diagonal, "convnet"),
    ),
)


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trap", sample(TRAPS, 30, case=lambda trap: None), ids=lambda trap: trap.name)
def test_a_trap_that_is_put_back_turns_its_test_red(trap: Mutation) -> None:
    turns_red(trap, RED)


def test_a_trap_leaves_nothing_behind() -> None:
    before = package_identity()
    for trap in sample(TRAPS, 15, case=lambda trap: None):
        with trap.applied():
            assert package_identity() != before, trap.name
        assert package_identity() == before, trap.name


def _rows(table: str) -> list[list[str]]:
    """Cells of a table of the document, without its head."""
    return [
        line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines() if line.startswith("| ")
    ][1:]


def test_the_document_lists_every_trap_with_its_test() -> None:
    listed = [(row[0], row[2].strip("`")) for row in _rows(DOCUMENT.read_text().partition(BY_NUMBER)[0])]
    assert listed == [(trap.name, trap.test) for trap in TRAPS]


def test_every_number_of_the_document_names_traps_that_are_put_back() -> None:
    put_back = {(one.name, one.test) for one in (*TRAPS, *test_operator_traps.TRAPS, *MUTATIONS)}
    for module in (test_lanczos, test_quadrature):
        put_back |= {(name, Mutation(name, (edit,), check).test) for name, (edit, check) in module.TRAPS.items()}
    rows = _rows(DOCUMENT.read_text().partition(BY_NUMBER)[2])
    assert {(row[1], row[2].strip("`")) for row in rows} <= put_back
    mathematics, functions = (9, 11, 12, 13, 14, 15, 16), (19, 20, 27, 28, 29, 30, 31)
    assert [*dict.fromkeys(row[0] for row in rows)] == [f"2A-{n}" for n in mathematics] + [f"2B-{n}" for n in functions]


def test_every_test_that_is_named_exists() -> None:
    for trap in TRAPS:
        file, _, function = trap.test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), trap.name
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)
