"""Deliberate bugs, each of which must turn a test red.

A mutation edits the source of one function of the package, or puts another in its place, while a test of the suite runs.
The same test is green without it. `docs/internals/mutations.md` lists them for people and is checked against this file.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from gramian.linalg.wide import wide
from gramian.taps.gradients import PerSampleGradient
from gramian.taps.gradients.joined import Joined
from tests.dist import bodies
from tests.kit.matrix import FULL, sample
from tests.kit.mutations import RED, Edit, Mutation, Swap, package_identity, turns_red
from tests.kit.processes import run_on_ranks
from tests.kit.whole_roots import never_the_root
from tests.privacy import test_padding_alone
from tests.statistics import (
    test_diagonal_estimate,
    test_ema,
    test_fisher,
    test_health,
    test_moments,
    test_noise,
    test_norms,
    test_splits,
)
from tests.taps import (
    test_attribution,
    test_audit,
    test_proof_coverage,
    test_python_state,
    test_returned_loss,
    test_row_proof,
)

DOCUMENT = Path(__file__).parents[1] / "docs" / "internals" / "mutations.md"


# ---- bugs that are more than an edit ---------------------------------------------------------------------------------


def _square_of_every_token(self: Any, choice: str = "auto") -> Tensor:
    return wide(self.tokens_BTN).square().sum((1, 2))


class _Apart(Joined):
    """Uses of one parameter that do not know of each other."""

    def squared_norms(self, choice: Any = "auto") -> Tensor:
        return torch.stack([part.squared_norms(choice) for part in self.parts]).sum(0)


def _never_joined(parts: Any) -> PerSampleGradient:
    return parts[0] if len(parts) == 1 else _Apart(parts)


def _square_of_the_sum(self: Any) -> Tensor:
    return self.total().square()


def _square_of_the_mean(gradient: PerSampleGradient, per: str, scale: float) -> Iterator[Tensor]:
    yield (gradient.total().double() * scale / gradient.batch).square().expand(gradient.batch, *gradient.shape)


# ---- checks --------------------------------------------------------------------------------------------------------------


def _own_norms_beside_sums(rank: int) -> None:
    bodies.added_up(rank, "ddp", "mlp", (3, 3), "mean")


def _norms(name: str, algorithm: str = "auto") -> Callable[[], None]:
    return functools.partial(test_norms.test_norms_are_those_of_the_loop, name, "mean", algorithm, torch.float64)


def _fisher(name: str) -> Callable[[], None]:
    test = test_fisher.test_the_diagonal_is_the_mean_of_squared_sample_gradients
    return functools.partial(test, name, "mean", torch.float64)


def _rows_of(name: str) -> Callable[[], None]:
    return functools.partial(test_attribution.test_an_ordinary_model_is_proven_and_exact, name)


def _units_of(name: str) -> Callable[[], None]:
    return functools.partial(test_attribution.test_units_of_several_rows_are_proven_and_exact, name)


def _tokens(expression: str) -> tuple[Edit, ...]:
    """`tokens`, by which the sites of linear and embedding layers group rows, with another order of its result."""
    return (Edit("site:tokens", "return found", f"return {expression}"),)


_MOVES = "when other samples are replaced"
"""What the proof says of rows that depend on another sample than theirs."""
_SUMS = "the taps explain a gradient of norm"
"""What it says where the sum over samples is not autograd's."""


ROWS = (
    Mutation("rows rolled by one", _tokens("found.roll(1, 0)"), _rows_of("linear_3d"), refused=rf"^2: .* {_MOVES}"),
    Mutation(
        "rows of two samples swapped",
        _tokens("found[[1, 0, *range(2, batch)]]"),
        _rows_of("linear_3d"),
        refused=rf"^2: .* {_MOVES}",
    ),
    Mutation(
        "tokens read token-major",
        _tokens("found.reshape(found.shape[1], batch, -1).transpose(0, 1)"),
        _rows_of("linear_3d"),
        refused=rf"^0: the input .* {_MOVES}",
    ),
    Mutation(
        "last token of a sample given to the next",
        _tokens("found.flatten(0, 1).roll(1, 0).view_as(found)"),
        _rows_of("linear_3d"),
        refused=rf"^2: .* {_MOVES}",
    ),
    Mutation(
        "last row a copy of the one before",
        _tokens("found[[*range(batch - 1), batch - 2]]"),
        _rows_of("mlp"),
        refused=rf"^0\.weight: {_SUMS}",
    ),
    Mutation(
        "row of the first sample expanded over all",
        (Edit("layer_forward:run_layer", "if rows == 1:", "output = output[:1]\n        if rows:"),),
        _rows_of("linear_3d"),
        refused="^0, 2: returns one row for all samples, and the model returns something else",
    ),
    Mutation(
        "input of the first call for every call",
        (
            Edit(
                "observer:observe",
                "model.probe, use, len(outputs), *outputs, *saved",
                "model.probe, use, len(outputs), *outputs, *vars(use.pass_).setdefault(tap.name, saved)",
            ),
        ),
        _rows_of("reused"),
        refused=rf"^shared\.weight: {_SUMS}",
    ),
    Mutation(
        "calls of one layer joined in another order of samples",
        (
            Edit(
                "joined:_cat",
                "[t.to(dtype) for t in tensors]",
                "[t.to(dtype).roll(i, 0) for i, t in enumerate(tensors)]",
            ),
        ),
        _rows_of("reused"),
        refused=rf"^shared\.\w+: the sum over calls .* {_MOVES}",
    ),
    Mutation(
        "output gradients in reversed order",
        (Edit("Observe.backward", "list(gradients))", "[g.flip(0) for g in gradients])"),),
        _rows_of("linear_3d"),
        refused=rf"^0\.weight: {_SUMS}",
    ),
    Mutation(
        "inputs and output gradients in reversed order",
        (
            Edit(
                "Observe.backward",
                "saved, list(gradients))",
                "[t.flip(0) for t in saved], [g.flip(0) for g in gradients])",
            ),
        ),
        _rows_of("conv2d"),
        refused=rf"^0: the input .* {_MOVES}",
    ),
    Mutation(
        "embedding index of the neighbour",
        (Edit("Embedding.gradients", "Indexed(index_BT,", "Indexed(index_BT.roll(1, 0),"),),
        _rows_of("pooled"),
        refused=rf"^0\.weight: {_SUMS}",
    ),
    Mutation(
        "embedding index and row of the neighbour",
        (
            Edit(
                "Embedding.gradients",
                "Indexed(index_BT, rows_BTD,",
                "Indexed(index_BT.roll(1, 0), rows_BTD.roll(1, 0),",
            ),
        ),
        _rows_of("pooled"),
        refused=rf"^0: .* {_MOVES}",
    ),
    Mutation(
        "images of a sample regrouped in the norm",
        (
            Edit(
                "Convolved.per_sample",
                ".reshape(self.batch, -1, *shape)",
                ".reshape(-1, self.batch, *shape).transpose(0, 1)",
            ),
        ),
        _rows_of("frames"),
        refused=r"^image\.weight: sample \d alone has a gradient of norm",
    ),
    Mutation(
        "norms of the neighbour",
        (
            Edit(
                "Outer.squared_norms",
                "return self._squares[name]",
                "return self._squares[name].roll(1)",
            ),
        ),
        _rows_of("linear_3d"),
        refused=r"^0\.weight: sample \d alone has a gradient of norm",
    ),
    Mutation(
        "scale of a norm layer from the neighbour",
        (
            Edit(
                "TrailingNorm.gradients",
                "Normed(x_BTN, g_BTN,",
                "Normed(x_BTN.roll(1, 0), g_BTN.roll(1, 0),",
            ),
        ),
        _rows_of("rmsnorm"),
        refused=rf"^1: .* {_MOVES}",
    ),
    Mutation(
        "gradients of a layer without a formula rolled by one",
        (
            Edit("layer_forward:_choose_site", "if grown or model.takes_layers else tap.products", ""),
            Edit("Generic.gradients", "found[name].detach()", "found[name].detach().roll(1, 0)"),
        ),
        _rows_of("mha"),
        refused=rf"^attention: .* {_MOVES}",
    ),
    Mutation(
        "unit ids shifted by one unit",
        (
            Edit(
                "Units._plan",
                "index_UL[flat[order], position] = order",
                "index_UL[(flat[order] + 1) % self.count, position] = order",
            ),
        ),
        _units_of("linear_3d"),
        refused=r"^\d",
    ),
    Mutation(
        "unit ids shifted by one row",
        (Edit("Units.sum_rows", "self.ids.to(t_B.device)", "self.ids.roll(1).to(t_B.device)"),),
        _units_of("conv2d"),
        refused=rf"^2: .* {_MOVES}",
    ),
)
"""Bugs in the taps that give a sample another one's rows. The proof must refuse the model before a number is used."""

MUTATIONS = (
    Mutation(
        "bias norm per token",
        (Swap("Summed.squared_norms", _square_of_every_token),),
        _norms("linear_3d"),
    ),
    Mutation(
        "missing batch factor",
        (Edit("Capture.pass_info", '"mean": float(batch)', '"mean": 1.0'),),
        _norms("mlp"),
    ),
    Mutation(
        "tied weights counted apart",
        (
            Edit(
                "Joined.squares",
                "apart_B + 2 * sum(inner(left, right) for left, right in combinations(self.parts, 2))",
                "apart_B.clone()",
            ),
        ),
        _norms("tied_gpt"),
    ),
    Mutation(
        "uses of a module counted apart",
        (Swap("joined:join", _never_joined),),
        _norms("reused"),
    ),
    Mutation(
        "padding counted",
        (Edit("Embedding.gradients", "if module.padding_idx is not None:", "if module.max_norm:"),),
        _norms("padded_embedding"),
    ),
    Mutation(
        "repeated tokens counted apart",
        (
            Edit(
                "Indexed.squared_norms",
                "(sorted_BT[:, 1:] != sorted_BT[:, :-1])",
                "torch.ones_like(sorted_BT[:, 1:])",
            ),
        ),
        _norms("gpt"),
    ),
    Mutation(
        "wrong orientation of Conv1D",
        (
            Edit(
                "Linear.gradients",
                "Outer(a_BTI, g_BTO) if self.transposed else Outer(g_BTO, a_BTI)",
                "Outer(g_BTO, a_BTI)",
            ),
        ),
        _fisher("hf_gpt2"),
    ),
    Mutation(
        "wrong orientation of Linear",
        (Edit("Linear.gradients", "else Outer(g_BTO, a_BTI)", "else Outer(a_BTI, g_BTO)"),),
        _fisher("linear_3d"),
    ),
    Mutation(
        "double count under checkpointing",
        (
            Edit("observer:open_use", "if in_backward():", "if False:"),
            Edit(
                "PassBook._deliver",
                "pass_.delivered.add(name)",
                "pass_.delivered.add(name); parts = parts * (pass_.uses[name] // len(parts))",
            ),
        ),
        functools.partial(test_norms.test_checkpointed_blocks_count_once, "gpt", False),
    ),
    Mutation(
        "shared row not expanded",
        (
            Edit(
                "layer_forward:run_layer",
                "if rows == 1:",
                "if model.batch == -1:",
            ),
        ),
        _norms("gpt"),
        refused=rf"^positions\.weight: {_SUMS}",
    ),
    Mutation(
        "rows of a sample taken batch-minor",
        (
            Edit(
                "site:by_sample",
                "t.reshape(batch, rows // batch, *t.shape[1:])",
                "t.reshape(rows // batch, batch, *t.shape[1:]).transpose(0, 1)",
            ),
        ),
        _norms("windows"),
        refused=rf"^attention\.out: .* {_MOVES}",
    ),
    Mutation(
        "loss scale not undone",
        (Edit("PassInfo.scale", "self.factor / self.loss_scale", "self.factor"),),
        functools.partial(test_norms.test_the_loss_scale_is_undone, "mean", "float"),
    ),
    Mutation(
        "GradScaler's scale not undone",
        (
            Edit(
                "PassInfo.scale",
                "self.factor / (scale if scale is not None else self.loss_scale.get_scale())",
                "self.factor",
            ),
        ),
        functools.partial(test_norms.test_the_loss_scale_is_undone, "sum", "GradScaler"),
    ),
    Mutation(
        "groups of a convolution ignored",
        (Edit("Convolved.per_sample", "groups=count * self.geometry.groups", "groups=count"),),
        _norms("conv1d"),
    ),
    Mutation(
        "padding mode of a convolution ignored",
        (Edit("convolution:_padded", 'module.padding_mode == "zeros" and not', "not"),),
        _norms("convnet"),
    ),
    Mutation(
        "LayerNorm without centring",
        (
            Edit(
                "TrailingNorm.gradients",
                "self.centred, self.in_float32",
                "False, self.in_float32",
            ),
        ),
        _norms("gpt"),
    ),
    Mutation(
        "epsilon of a norm dropped",
        (Swap("normalization:_epsilon", lambda module, eps, dtype: 0.0),),
        functools.partial(test_norms.test_the_epsilon_of_a_norm_layer_counts, "RMSNorm"),
    ),
    Mutation(
        "Gram form trusted under cancellation",
        (
            Edit(
                "Outer._squares_by",
                "bool(doubtful_B.any()):",
                "False:",
            ),
        ),
        functools.partial(test_norms.test_norms_survive_cancellation_in_float32, "gram", 1e4),
    ),
    Mutation(
        "tied uses trusted under cancellation",
        (Swap("joined:CANCELLED", -float("inf")),),
        test_norms.test_tied_uses_that_cancel_are_not_lost,
    ),
    Mutation(
        "sample ids ignored",
        (
            Edit(
                "Capture.pass_info",
                "None if self.sample_ids is None else Units.of(self.sample_ids, batch)",
                "None",
            ),
        ),
        functools.partial(test_norms.test_sample_ids_of_rows_join_the_rows_of_a_unit, "gpt"),
    ),
    Mutation(
        "norms summed over ranks",
        (
            Edit(
                "Capture.__exit__",
                "all_reduce(sums, self._group) if isinstance(statistic, AdditiveStatistic) else sums",
                "all_reduce(sums, self._group)",
            ),
        ),
        _own_norms_beside_sums,
        red="tests/dist/test_captures.py::test_sums_over_the_group_are_those_of_all_samples",
        on_ranks=True,
    ),
    Mutation(
        "sums kept on their rank",
        (Edit("Capture.__exit__", "if self._group is not None:", "if self._group == 0:"),),
        _own_norms_beside_sums,
        red="tests/dist/test_captures.py::test_sums_over_the_group_are_those_of_all_samples",
        on_ranks=True,
    ),
    Mutation(
        "square of the batch's gradient as Fisher",
        (Swap("PerSampleGradient.sum_of_squares", _square_of_the_sum),),
        _fisher("mlp"),
    ),
    Mutation(
        "variance divided by n",
        (Edit("NoiseScale.finish", "n / (n - 1)", "1.0"),),
        test_noise.test_two_samples_by_hand,
    ),
    Mutation(
        "merged norms lose a side",
        (Edit("ByPass.merge", "behind + number", "number"),),
        functools.partial(test_splits.test_captures_of_copies_of_a_model_merge_left_then_right, "mlp"),
    ),
    Mutation(
        "narrow accumulators",
        (Swap("dtypes:wide_dtype", lambda *tensors: tensors[0].dtype),),
        functools.partial(test_fisher.test_squares_of_narrow_models_are_summed_in_float32, torch.bfloat16),
    ),
    Mutation(
        "health of the batch's loss",
        (Edit("Health.update", "gradient * record.info.scale**2", "gradient"),),
        functools.partial(test_health.test_norms_and_zeros_are_those_of_hooks, "mlp", "mean"),
    ),
    Mutation(
        "audit asleep",
        (Edit("Audit.verdict", "if not bool(error <= allowed):", "if bool(error < 0):"),),
        functools.partial(test_audit.test_a_weight_used_outside_its_layer_is_named, torch.float64),
    ),
    Mutation(
        "audit of the first batch alone",
        (Edit("Projections.disagreement", "if excess > TINY:", "if excess < -1:"),),
        test_audit.test_a_small_penalty_is_found_in_float32,
    ),
    Mutation(
        "tokens that do not count go unseen",
        (Edit("SampleArguments.uneven", "return tuple(", "return () and tuple("),),
        test_returned_loss.test_equal_counts_are_exact_and_unequal_ones_of_a_later_batch_are_refused_with_the_remedy,
    ),
    Mutation(
        "other groupings of rows are covered",
        (
            Edit(
                "RowProof._lacks",
                "if proven.partition is not None and any(",
                "if False and any(",
            ),
        ),
        functools.partial(
            test_proof_coverage.test_rows_that_depend_on_each_other_inside_of_units_are_proven_for_these_units_alone,
            [0, 1, 1, 2, 2, 0],
        ),
    ),
    Mutation(
        "padding of later batches is covered",
        (Edit("RowProof._lacks", "self._without_padding += 1", "return False"),),
        functools.partial(test_padding_alone.test_padding_that_comes_with_a_later_batch_is_looked_at, False),
    ),
    Mutation(
        "a sample that is not finite shows everything",
        (Edit("Prover.prove", "shows=finite and bool(", "shows=bool("),),
        test_proof_coverage.test_a_batch_with_a_sample_that_is_not_finite_covers_no_other,
    ),
    Mutation(
        "memory of samples that come one at a time",
        (Edit("PrivateModel._check_inputs", "if looks and", "if False and"),),
        functools.partial(
            test_python_state.test_memory_of_samples_that_come_one_at_a_time_is_refused,
            "buffer",
            "^top: is a buffer",
            1,
        ),
    ),
    Mutation(
        "targets in a list belong to nobody",
        (Edit("sample_arguments:_is_list_of", "return any(inside) and", "return False and"),),
        functools.partial(test_proof_coverage.test_targets_in_a_list_go_with_their_samples, "dicts", (1, 2, 3, 5)),
    ),
    Mutation(
        "the proof asks for no linear backward",
        (
            Edit("ProofRuns.untapped", "self._scaled(outputs, SCALE)", "self._scaled(outputs, 1.0)"),
            Edit(
                "RowComparison.compare_sums",
                "floor=base.rounding, factors=(SCALE,)",
                "floor=base.rounding, factors=(1.0,)",
            ),
        ),
        test_row_proof.test_a_backward_that_is_not_linear_has_no_share_of_a_mean_and_is_refused,
    ),
    Mutation(
        "buffers that remember samples",
        (Edit("Prover.separate", "refuse_buffers(base.buffers, run.buffers)", "pass"),),
        functools.partial(test_row_proof.test_a_buffer_that_remembers_samples_is_refused_under_privacy, False),
    ),
    Mutation(
        "padding that leaks under dropout",
        (
            Edit(
                "Prover._reorder",
                "return self._reorder(base, chosen, lone)",
                'return False, "dropout"',
            ),
        ),
        functools.partial(test_padding_alone.test_padding_that_leaks_is_refused, 0.5, 0),
    ),
    Mutation(
        "the sample that hides its padding is alone",
        (
            Edit(
                "LastBatch.samples_alone",
                "-(-len(padded) // MOST_ALONE)",
                "len(padded)",
            ),
        ),
        functools.partial(test_padding_alone.test_padding_that_leaks_is_refused, 0.0, 2),
    ),
    Mutation(
        "attributes that remember samples",
        (Edit("Prover.separate", "self._refuse_memory(base, run)", "pass"),),
        test_python_state.test_statistics_in_a_plain_attribute_are_refused_under_privacy,
    ),
    Mutation(
        "runs of a proof go on from each other",
        (Edit("InitialState.restore", "self.python.restore()", "pass"),),
        test_python_state.test_every_run_begins_with_what_the_first_began_with,
    ),
    Mutation(
        "losses in attributes go unseen",
        (
            Edit(
                "ProofRuns._results",
                "left_in_attributes(self.root, before, returned)",
                "dict[str, Tensor]()",
            ),
        ),
        test_python_state.test_a_loss_in_an_attribute_that_couples_samples_is_refused_if_a_backward_goes_through_it,
    ),
    Mutation(
        "labels taken for nobody's input",
        (
            Edit(
                "BatchProof.once",
                "if found is None or (fixed and not prover.fits_alone):",
                "if found is None:",
            ),
        ),
        test_returned_loss.test_a_mask_and_labels_of_one_square_shape_are_not_both_nobodys,
    ),
    Mutation(
        "exchanged modules and hooks are covered",
        (
            Edit(
                "batch_structure:structure_of",
                "(_number(module), *_flags(module, known), *_hooks(module))",
                "module.training",
            ),
        ),
        test_python_state.test_a_module_or_a_hook_that_is_exchanged_between_captures_is_proven_anew,
    ),
    Mutation(
        "a flag that is set later is covered",
        (Edit("batch_structure:_flags", "if flag is not None:", 'if name == "training":'),),
        test_python_state.test_a_flag_that_is_set_after_the_proof_is_proven_anew,
    ),
    Mutation(
        "layers beside the forward join its pass",
        (Edit("observer:open_use", "if outside and model.tells_samples_apart:", "if False:"),),
        functools.partial(
            test_python_state.test_a_layer_that_runs_beside_the_models_forward_is_refused_by_name, [5, 4, 3, 2, 1, 0]
        ),
    ),
    Mutation(
        "a batch inside of an object stays",
        (Edit("SampleArguments.opaque", "if t.dim() and", "if False and"),),
        functools.partial(test_python_state.test_an_object_that_holds_a_batch_is_refused, test_python_state.Context),
    ),
    Mutation(
        "a batch without gradients covers the next",
        (Edit("RowProof._prove", "if not sums_only and found.shows:", "if not sums_only:"),),
        test_python_state.test_a_batch_without_gradients_covers_no_other,
    ),
    Mutation(
        "a buffer that is put in place anew stays",
        (Edit("Buffers.restore", "owner[local] = buffer", "pass"),),
        functools.partial(
            test_row_proof.test_a_buffer_that_counts_batches_stays_welcome_and_counts_no_run_of_the_proof, False
        ),
    ),
    Mutation(
        "gradient read after it was accumulated",
        (
            Edit(
                "Audit._gradient",
                "gradient = gradient.detach()",
                "gradient = 2 * gradient.detach()",
            ),
        ),
        functools.partial(test_audit.test_gradients_that_were_there_before_do_not_matter, "mlp"),
    ),
    Mutation(
        "square of a batch's mean gradient as diagonal",
        (Swap("square_moments:_squares", _square_of_the_mean),),
        test_diagonal_estimate.test_two_samples_and_two_parameters_by_hand,
    ),
    Mutation(
        "samples that do not use a parameter left out",
        (Edit("SquareMoments.completed", "if unused:", "if unused < 0:"),),
        test_diagonal_estimate.test_samples_that_do_not_use_a_parameter_count_with_zero,
    ),
    Mutation(
        "diagonal stored in float16",
        (Edit("diagonal_estimate:_as", "value.to(dtype)", "value.half().to(dtype)"),),
        functools.partial(test_diagonal_estimate.test_tiny_and_huge_squares_are_neither_floored_nor_clamped, 1e-20),
    ),
    Mutation(
        "floor under the diagonal",
        (Edit("diagonal_estimate:_as", "value.to(dtype)", "(value + 1e-8).clamp(1e-45, 1e8).to(dtype)"),),
        functools.partial(test_diagonal_estimate.test_tiny_and_huge_squares_are_neither_floored_nor_clamped, 1.0),
    ),
    Mutation(
        "diagonal taken for a matrix",
        (Edit("diagonal_estimate:_as", "value.to(dtype)", "(value + 1e-4 * torch.eye(*value.shape)).to(dtype)"),),
        functools.partial(test_diagonal_estimate.test_tiny_and_huge_squares_are_neither_floored_nor_clamped, 1.0),
    ),
    Mutation(
        "weights of an interval taken for observations",
        (Edit("Weights.effective", "self.total**2 / self.squares", "self.total"),),
        test_moments.test_intervals_do_not_narrow_when_weights_are_numbers_of_tokens,
    ),
    Mutation(
        "weights of a variance taken for observations",
        (
            Edit(
                "Weights.divisor",
                "2 * self.pairs / self.total",
                "(self.total - 1)",
            ),
        ),
        test_moments.test_one_observation_after_another_is_two_passes_over_all,
    ),
    Mutation(
        "moments kept in float32",
        (Edit("WeightedMoments.extend", ".double()", ".float()"),),
        test_moments.test_state_is_float64_though_observations_are_not,
    ),
    Mutation(
        "moving average corrected once more",
        (Edit("MovingAverage.value", "self._weights[name]", "self._weights[name] / (1 - self.decay**self.steps)"),),
        functools.partial(test_ema.test_a_constant_is_its_own_average_from_the_first_step_on, 0.99),
    ),
    Mutation(
        "late tensor corrected by the steps of all",
        (Edit("MovingAverage.value", "self._weights[name]", "((1 - self.decay**self.steps) / (1 - self.decay))"),),
        test_ema.test_a_tensor_that_stays_away_keeps_its_value_and_forgets_its_weight,
    ),
    *ROWS,
)
BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
each = pytest.mark.parametrize("mutation", [m for m in MUTATIONS if not m.on_ranks], ids=lambda m: m.name)
each_on_ranks = pytest.mark.parametrize("name", [m.name for m in MUTATIONS if m.on_ranks])


# ---- the tests ---------------------------------------------------------------------------------------------------------


@each
@never_the_root()
def test_a_deliberate_bug_turns_its_test_red(mutation: Mutation) -> None:
    seen: Any = (gramian.GramianError, mutation.refused) if mutation.refused else (RED, None)
    turns_red(mutation, seen[0], seen[1])


@never_the_root()
def _is_red(rank: int, world_size: int, name: str, applied: bool) -> bool:
    """True if the check fails on this rank. Both ranks fail in the same place, so that none is left waiting."""
    mutation = BY_NAME[name]
    try:
        if applied:
            with mutation.applied():
                mutation.check(rank)
        else:
            mutation.check(rank)
    except RED:
        return True
    return False


@each_on_ranks
@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_a_deliberate_bug_turns_its_test_red_on_every_rank(name: str) -> None:
    for applied in (False, True, False) if FULL else (True,):
        assert run_on_ranks(2, _is_red, name, applied) == [applied, applied]


def test_a_mutation_leaves_nothing_behind() -> None:
    before = package_identity()
    for mutation in sample(MUTATIONS, 15, case=lambda mutation: None):
        with mutation.applied():
            assert package_identity() != before, mutation.name
        assert package_identity() == before, mutation.name


def test_an_edit_of_text_that_is_gone_says_so() -> None:
    edit = Edit("Capture.pass_info", "no such text", "")
    with pytest.raises(AssertionError, match="holds 0 times: no such text"), edit.applied():
        pass


def test_the_document_lists_every_mutation_with_its_test() -> None:
    rows = [line.split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][1:]
    listed = {row[0].removeprefix("| "): row[2].removesuffix(" |").strip("`") for row in rows}
    assert listed == {mutation.name: mutation.test for mutation in MUTATIONS}


def test_every_test_that_is_named_exists() -> None:
    for mutation in MUTATIONS:
        file, _, function = mutation.test.partition("::")
        assert f"def {function}(" in (Path(__file__).parents[1] / file).read_text(), mutation.name
    assert len(BY_NAME) == len(MUTATIONS) >= 12
