"""Mistakes that codes with curvature operators have made, each of which must turn a test red.

A mistake is put back into the package while a test of the suite runs; the same test is green without it.
`docs/concepts/operators.md` lists them for people; it is checked against this list.
"""

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gramian.curvature.operators.kfac_operator import KFACOperator
from tests.curvature import test_operator_state, test_operators
from tests.kit.mutations import RED, Edit, Mutation, Swap

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "concepts" / "operators.md"


def _one_gradient(
    self: Any, outputs_RV: Tensor, tangents_RV: Tensor, targets: Tensor, weights_R: Tensor, samples: int
) -> None:
    """g gᵀ with the gradient of the mean loss."""
    r_RV = outputs_RV.softmax(-1)
    r_RV[torch.arange(len(r_RV)), targets] -= 1
    r_RV *= weights_R[:, None]
    tangents_RV.copy_(r_RV * (r_RV * tangents_RV).sum())


def _weight_and_bias_apart(self: KFACOperator, y_NK: Tensor) -> Tensor:
    """The blocks of weight and bias without what lies between them."""
    products = []
    for column in self.space.columns(y_NK):
        vector = self.space.unflatten(column)
        alone = {name: self.kfac.compute_fisher_vector_product({name: v})[name] for name, v in vector.items()}
        products.append(self.space.flatten(alone))
    return torch.stack(products, dim=1)


def _placeholder(self: KFACOperator, y_NK: Tensor) -> Tensor:
    """0.01·v for parameters without curvature."""
    covered = {name for block in self.kfac.kfac_factors.values() for name in block.spec.parameters}
    products = []
    for column in self.space.columns(y_NK):
        vector = self.space.unflatten(column)
        known = {name: v for name, v in vector.items() if name in covered}
        guessed = {name: 0.01 * v for name, v in vector.items() if name not in covered}
        products.append(self.space.flatten(guessed | self.kfac.compute_fisher_vector_product(known)))
    return torch.stack(products, dim=1)


def _as_torch_has_it(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


_oracle = partial(functools.partial, test_operators.test_the_matrix_is_that_of_the_oracle)

TRAPS = (
    Mutation(
        "Gauss-Newton matrix of rank one",
        Swap("GGNOperator._curve", _one_gradient),
        test_operators.test_the_gauss_newton_matrix_has_the_rank_of_the_outputs,
    ),
    Mutation(
        "one gradient for all sequences",
        Edit("JacobianOperator._curved", "len(outputs))", "1)"),
        _oracle("fisher_of_sequences", "mlp"),
    ),
    Mutation(
        "divided by the batch",
        Edit("Terms.num_terms", "float(self.weights.sum())", "float(len(self.weights))"),
        _oracle("ggn", "mlp"),
    ),
    Mutation(
        "ignored labels counted",
        Edit("Terms.rows", "self.weights.reshape(-1)", "torch.ones_like(self.weights).reshape(-1)"),
        _oracle("ggn", "mlp"),
    ),
    Mutation(
        "labels of a causal model not shifted",
        Edit(
            "loss_terms:read_terms",
            "labelled_batch.read_batch(root, batch, causal_shift)",
            "labelled_batch.read_batch(root, batch, False)",
        ),
        _oracle("fisher_of_sequences", "hugging_face"),
    ),
    Mutation(
        "parameters ignored",
        Edit("ModelOperator.__init__", "of(self.model, parameters)", "of(self.model)"),
        partial(test_operators.test_a_filter_is_the_sub_block_of_the_dense_matrix, "fisher_of_tokens", "words"),
    ),
    Mutation(
        "batches of any size weigh the same",
        Edit("hessian:_factor", "return count", "return 1.0"),
        partial(test_operators.test_the_hessian_does_not_depend_on_how_the_loss_is_written, "mean"),
    ),
    Mutation(
        "zeros where memory ran out",
        Edit(
            "ModelOperator.matmat",
            "self._add(batch, columns, total_KN)",
            "with __import__('contextlib').suppress(RuntimeError): self._add(batch, columns, total_KN)",
        ),
        partial(test_operator_state.test_what_runs_out_of_memory_raises_and_leaves_the_model_whole, "hessian"),
    ),
    Mutation(
        "padding with a forward derivative",
        Swap("ExactEmbeddings.__torch_function__", _as_torch_has_it),
        partial(test_operator_state.test_forward_and_backward_derivatives_are_transposes, "padded_embedding"),
    ),
    Mutation(
        "all logits at once",
        Edit(
            "GGNOperator._curve",
            "for rows in pieces(*outputs_RV.shape):",
            "softmaxes = [outputs_RV.softmax(-1) for _ in range(3)]\n    for rows in pieces(*outputs_RV.shape):",
        ),
        test_operator_state.test_four_copies_of_the_logits_are_alive_at_most_of_the_gauss_newton_matrix,
    ),
    Mutation(
        "weight and bias of K-FAC apart",
        Swap("KFACOperator.matmat", _weight_and_bias_apart),
        partial(test_operators.test_the_operator_of_k_fac_is_its_kronecker_product, False, (2, 3)),
    ),
    Mutation(
        "K-FAC of dense sides only",
        Edit(
            "KFACOperator.__init__",
            "specs = [",
            "assert {type(block.G).__name__ for block in kfac.kfac_factors.values()} == {'Dense'}\n    specs = [",
        ),
        partial(test_operators.test_the_operator_of_k_fac_is_its_kronecker_product, False, (2, 3)),
    ),
    Mutation(
        "K-FAC with its damping",
        Edit("KFACOperator.matmat", "damped=self.damped", "damped=True"),
        partial(test_operators.test_the_operator_of_k_fac_is_its_kronecker_product, False, (2, 3)),
    ),
    Mutation(
        "a number in place of curvature",
        (
            Edit(
                "KFACOperator.__init__",
                "    model = kfac.state",
                "    shapes = {n: tuple(p.shape) for n, p in unique_parameters(kfac.state.model)}\n    model = kfac.state",
            ),
            Swap("KFACOperator.matmat", _placeholder),
        ),
        test_operators.test_a_parameter_without_curvature_has_no_place_in_k_fac,
    ),
)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_trap_that_is_put_back_turns_its_test_red(trap: Mutation) -> None:
    with trap.applied(), pytest.raises(RED):
        trap.check()
    trap.check()


def test_the_document_lists_every_trap_with_its_test() -> None:
    table = DOCUMENT.read_text(encoding="utf-8").partition("| mistake |")[2]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    listed = [(row[0].removeprefix("| "), row[-1].removesuffix(" |").strip("`")) for row in rows]
    assert listed == [(trap.name, trap.test.partition("::")[2]) for trap in TRAPS]
