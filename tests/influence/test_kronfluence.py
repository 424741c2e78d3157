"""Influence scores of an index against those of kronfluence, in float64.

Both damp each layer by 0.1 of its mean eigenvalue and score g_qᵀ (F + λ)⁻¹ g_i; kronfluence has no minus sign. Its EK-FAC
eigenvalues are means over passages, those of an index are means over tokens, so that its F + λ is tokens/passages times as
large; its K-FAC factors are means over tokens, too. It tracks linear layers and takes padding from an attention mask.
"""

from pathlib import Path

import pytest
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gramian.influence import PassageCorpus, Query
from tests.curvature.problems import assert_close
from tests.influence.corpora import PASSAGES, built, corpus, nats

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore:.torch.cuda.amp.GradScaler:FutureWarning")]
LAYERS = ("q", "k", "v", "fc", "head")
QUERIES = [Query("1 2", "3 4 5"), Query("6", "7 0 1")]
ROWS = torch.tensor([[1, 2, 3, 4], [6, 7, 0, 0]]), torch.tensor([[-100, 3, 4, 5], [7, 0, 1, -100]])
"""The tokens and targets of both queries."""


class Passages(Task):
    """The loss of an index: −log p of the targets, summed; positions without a target are padding."""

    def compute_train_loss(self, batch: list[Tensor], model: nn.Module, sample: bool = False) -> Tensor:
        assert not sample
        return nats(model, *batch)

    def compute_measurement(self, batch: list[Tensor], model: nn.Module) -> Tensor:
        return nats(model, *batch)

    def get_influence_tracked_modules(self) -> list[str]:
        return [*LAYERS]

    def get_attention_mask(self, batch: list[Tensor]) -> Tensor:
        return (batch[1] != -100).long()


def kronfluence_scores(found: PassageCorpus, strategy: str, folder: Path) -> Tensor:
    """[queries, passages] of the package, with every dtype that it has an argument for set to float64."""

    def wide(names: str) -> dict[str, torch.dtype]:
        return {f"{name}_dtype": torch.float64 for name in names.split()}

    task = Passages()
    analyzer = Analyzer(
        "peer", prepare_model(found.model, task), task, cpu=True, disable_tqdm=True, output_dir=str(folder)
    )
    passages, queries = TensorDataset(found.tokens_NT, found.targets_NT), TensorDataset(*ROWS)
    fit = FactorArguments(
        strategy, use_empirical_fisher=True,
        **wide("activation_covariance gradient_covariance eigendecomposition per_sample_gradient lambda"),
    )  # fmt: skip
    analyzer.fit_all_factors("factors", passages, per_device_batch_size=3, factor_args=fit)
    analyzer.compute_pairwise_scores(
        "scores", "factors", queries, passages, per_device_query_batch_size=2, per_device_train_batch_size=3,
        score_args=ScoreArguments(damping_factor=None, **wide("per_sample_gradient precondition score")),
    )  # fmt: skip
    return analyzer.load_pairwise_scores("scores")["all_modules"]


@pytest.mark.parametrize("passages", [PASSAGES, 1])
@pytest.mark.parametrize("factors", ["ekfac", "kfac"])
def test_scores_are_those_of_kronfluence(tmp_path: Path, factors: str, passages: int) -> None:
    """Of one passage the factors are low rank here and dense with many zero eigenvalues there."""
    only = tuple(f"{layer}.*" for layer in LAYERS)
    index = built(tmp_path / "index", corpus(passages=passages), factors=factors, fisher="empirical", only=only)
    found = index.ask(QUERIES).scores("passages").values_QN
    tokens = int((index.corpus.targets_NT != -100).sum())
    expected = -kronfluence_scores(corpus(passages=passages), factors, tmp_path / "peer")
    assert_close(found, expected * (tokens / passages if factors == "ekfac" else 1.0), 1e-11)
