"""Influence of passages against the explicit inverse and a loop of single-sample backwards; what a build leaves on disk."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gramian
from gramian.core.errors import GramianError
from gramian.influence import BuildOptions, Index, PassageCorpus, Query, build_index, index_builder
from gramian.influence.gradient_sketch import GradientSketch
from gramian.influence.index_folder import IndexFolder
from gramian.influence.self_influence import SelfInfluence
from tests.curvature.problems import assert_close
from tests.curvature.small import WORDS
from tests.influence.corpora import PASSAGES, built, corpus, damped_inverse, gradients
from tests.kit.refusals import refused

pytestmark = pytest.mark.oracle
QUERIES = [Query("1 2", "3 4 5"), Query("", "6 7 0")]


def query_rows(found: PassageCorpus) -> Tensor:
    """Gradients of both queries, [Q, P]: the first two numbers of the first are its prompt."""
    rows = [
        gradients(found, torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-100, 3, 4, 5]])),
        gradients(found, torch.tensor([[6, 7]]), torch.tensor([[7, 0]])),
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("factors", ["ekfac", "kfac"])
@pytest.mark.parametrize("fisher, passages", [("mc", PASSAGES), ("empirical", PASSAGES), ("mc", 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_scores_are_those_of_the_explicit_inverse(
    tmp_path: Path, factors: str, fisher: str, passages: int, tied: bool
) -> None:
    found = corpus(tied=tied, passages=passages)
    index = built(tmp_path / "index", found, factors=factors, fisher=fisher)
    inverse = damped_inverse(index)
    samples_NP = gradients(found, found.tokens_NT, found.targets_NT)
    asked = index.ask(QUERIES)
    scores = asked.scores("passages", self_influence=True)
    assert_close(scores.values_QN, -query_rows(found) @ inverse @ samples_NP.mT, 1e-8)
    assert scores.self_N is not None
    assert_close(scores.self_N, ((samples_NP @ inverse) * samples_NP).sum(1), 1e-8)
    some = [0] if passages == 1 else [1, 2, 5]
    parts = asked.parts(some)
    assert_close(parts.values_QP, scores.values_QN[:, some], 1e-12)
    assert_close(parts.tokens_QPT.sum(2), parts.values_QP, 1e-10)
    assert_close(parts.modules_QPM.sum(2), parts.values_QP, 1e-10)


def test_gradients_of_the_model_stay_the_users(tmp_path: Path) -> None:
    found = corpus()
    for p in found.model.parameters():
        p.grad = torch.full_like(p, 7.0)
    built(tmp_path / "index", found).ask(QUERIES).scores("passages", self_influence=True)
    assert all(p.grad is not None and bool((p.grad == 7.0).all()) for p in found.model.parameters())


def test_the_loss_of_a_query_is_that_of_its_completion(tmp_path: Path) -> None:
    found = corpus()
    asked = built(tmp_path / "index", found).ask(QUERIES)
    logits = found.model(torch.tensor([[1, 2, 3, 4]])).detach().log_softmax(-1)[0]
    assert asked.nats[0] == pytest.approx(-float(logits[1, 3] + logits[2, 4] + logits[3, 5]))


@pytest.mark.parametrize("factors", ["ekfac", "kfac"])
@pytest.mark.parametrize("tied", [False, True])
def test_projections_of_full_rank_lose_nothing(tmp_path: Path, factors: str, tied: bool) -> None:
    found = corpus(tied=tied)
    index = built(tmp_path / "index", found, factors=factors)
    asked = index.ask(QUERIES)
    sketch = GradientSketch(index.kfac.kfac_factors, 10**6, 0.1, 0)
    with index_builder.counted_parameters(found.model, ("*",)):
        z_NK = index_builder.compressed(found, sketch, 0, PASSAGES, 3)
    naturals = [{name: d[q] for name, d in asked._influence.directions.items()} for q in range(2)]
    z_QK = torch.stack([sketch.of_query(natural) for natural in naturals])
    assert_close(-z_QK @ z_NK.mT, asked.scores("passages").values_QN, 1e-8)


def test_compressed_scores_are_unbiased(tmp_path: Path) -> None:
    found = corpus()
    index = built(tmp_path / "index", found)
    asked = index.ask(QUERIES[:1])
    natural = {name: d[0] for name, d in asked._influence.directions.items()}
    exact, drawn = asked.scores("passages").values_QN[0], []
    for seed in range(60):
        sketch = GradientSketch(index.kfac.kfac_factors, 2, 0.1, seed)
        drawn.append(-index_builder.compressed(found, sketch, 0, PASSAGES, PASSAGES) @ sketch.of_query(natural))
    all_SN = torch.stack(drawn)
    error = all_SN.std(0) / len(drawn) ** 0.5
    assert bool(((all_SN.mean(0) - exact).abs() < 5 * error).all())
    assert bool((error < exact.abs().max()).all())


def test_stored_gradients_rank_as_the_text_does(tmp_path: Path) -> None:
    asked = built(tmp_path / "index", gradients="1MB").ask(QUERIES)
    stored, exact = asked.scores(), asked.scores("passages")
    assert (stored.source, exact.source) == ("gradients", "passages")
    assert_close(stored.values_QN, exact.values_QN, 0.02 * float(exact.values_QN.abs().max()))


def test_any_batch_is_one_pass(tmp_path: Path) -> None:
    values = [
        built(tmp_path / str(batch), batch=batch).ask(QUERIES).scores("passages").values_QN
        for batch in (1, 3, PASSAGES)
    ]
    assert_close(values[0], values[2], 1e-9)
    assert_close(values[1], values[2], 1e-9)


def test_bytes_of_gradients_stay_inside_what_was_asked(tmp_path: Path) -> None:
    folder = built(tmp_path / "index", gradients=2500).folder
    stored = folder.read_tensors("gradients-00000.safetensors")["gradients"]
    assert stored.nbytes <= 2500 < 2 * stored.nbytes and folder.facts["rank"] > 1
    with refused("gradients: 100 for 7 passages; expected at least"):
        built(tmp_path / "other", gradients=100)


def test_parameters_that_do_not_count_have_no_part(tmp_path: Path) -> None:
    found = corpus()
    index = built(tmp_path / "index", found, only=("fc.*", "head.*"))
    assert set(index.kfac.kfac_factors) == {"fc", "head"}
    assert set(index.ask(QUERIES).parts([0]).modules) == {"fc", "head"}
    assert all(p.requires_grad for p in found.model.parameters())
    with refused("only: no trained parameter matches nothing"):
        built(tmp_path / "other", only=("nothing",))


# ---- the folder ------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("stage", ["factors", "eigenvalues", "gradients"])
def test_a_build_that_was_killed_goes_on(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_builder, "SHARD", 2)
    options = BuildOptions(gradients="1MB", batch=2)
    whole = build_index(corpus(), tmp_path / "whole", options)
    monkeypatch.setattr(index_builder, "SHARD", 100)
    one = build_index(corpus(), tmp_path / "one", options).read_tensors("gradients-00000.safetensors")["gradients"]
    monkeypatch.setattr(index_builder, "SHARD", 2)
    shards = [whole.read_tensors(f"gradients-0000{number}.safetensors")["gradients"] for number in range(4)]
    assert_close(torch.cat(shards).double(), one.double(), 0.01 * float(one.abs().max()))

    def kill(name: str, done: int, total: int) -> None:
        if name == stage and done == 2:
            raise Killed

    with pytest.raises(Killed):
        build_index(corpus(), tmp_path / "killed", options, kill)
    left = IndexFolder.open(tmp_path / "killed")
    assert not left.facts["complete"]
    with refused("index: ", "is not complete; expected gramian influence build to end first"):
        Index(corpus(), tmp_path / "killed")
    stages = []
    found = build_index(corpus(), tmp_path / "killed", options, lambda name, done, total: stages.append((name, done)))
    assert found.facts["complete"]
    if stage == "gradients":
        assert stages == [("gradients", 3), ("gradients", 4)]
    for name in whole.facts["files"]:
        if name.startswith("gradients"):
            assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_gradients_that_are_added_to_a_complete_index_are_complete_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_builder, "SHARD", 2)
    built(tmp_path / "index")

    def kill(name: str, done: int, total: int) -> None:
        if name == "gradients" and done == 2:
            raise Killed

    with pytest.raises(Killed):
        build_index(corpus(), tmp_path / "index", BuildOptions(gradients="1MB"), kill)
    with refused("index: ", "is not complete; expected gramian influence build to end first"):
        Index(corpus(), tmp_path / "index")
    index = built(tmp_path / "index", gradients="1MB")
    del index.folder.facts["files"]["gradients-00003.safetensors"]
    with refused("index: has gradients of 6 passages; expected 7"):
        index.ask([Query("1 2", "3")]).scores("gradients")


def test_another_model_text_or_option_is_refused(tmp_path: Path) -> None:
    built(tmp_path / "index")
    with refused("out: ", "is an index of another passages"):
        built(tmp_path / "index", corpus(seed=4))
    with refused("out: ", "options.damping: 0.1, not 0.2; expected another folder"):
        built(tmp_path / "index", damping=0.2)
    moved = corpus()
    with torch.no_grad():
        moved.model.fc.weight[0, 0] += 1e-6
    with refused("index: ", "was built with other weights; expected the model and text of the build"):
        Index(moved, tmp_path / "index")


@pytest.mark.parametrize("name", ["factors.safetensors", "passages.safetensors", "gradients-00000.safetensors"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    found = corpus()
    built(tmp_path / "index", found, gradients="1MB")
    path = tmp_path / "index" / name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with refused("index: ", f"{name} its checksum differs; expected the file that was built"):
        Index(found, tmp_path / "index").ask(QUERIES).scores()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"factors": "hessian"}, "factors: 'hessian'; expected one of kfac, ekfac"),
        ({"fisher": "false"}, "fisher: 'false'; expected one of mc, true, empirical"),
        ({"damping": 0}, "damping: 0; expected a number above 0"),
        ({"batch": 0}, "batch: 0; expected a whole number"),
        ({"gradients": "many"}, "gradients: expected bytes"),
    ],
)
def test_wrong_options_are_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    with refused(message):
        BuildOptions(**wrong)


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    asked = built(tmp_path / "index").ask(QUERIES)
    with refused("source: gradients, but the index has none; expected source passages"):
        asked.scores("gradients")
    with refused("source: 'both'; expected one of auto, gradients, passages"):
        asked.scores("both")
    with refused("completion: '3' has too few tokens"):
        built(tmp_path / "again").ask([Query("", "3")])
    with refused("queries: none given"):
        built(tmp_path / "third").ask([])
    with refused("index: ", "has no index.json; expected a folder of gramian influence build"):
        Index(corpus(), tmp_path / "nothing")
    with pytest.raises(GramianError, match="is not empty"):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").write_text("")
        built(tmp_path / "full")


def test_self_influence_is_a_statistic_of_any_backward(tmp_path: Path) -> None:
    index = built(tmp_path / "index")
    found, own = index.corpus, SelfInfluence(index.kfac)
    with gramian.observe(found.model, own, loss_reduction="mean") as seen:
        (torch.nn.functional.cross_entropy(
            found.model(found.tokens_NT).mT, found.targets_NT, ignore_index=-100, reduction="sum"
        ) / PASSAGES).backward()  # fmt: skip
    assert_close(seen[own], index.ask(QUERIES).scores("passages", self_influence=True).self_N, 1e-9)


def test_a_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    found = corpus()
    index = tmp_path / "index"
    built(index, found)
    found.model.train()
    for refusal in (lambda: Index(found, index), lambda: build_index(found, tmp_path / "other")):
        with refused("model: is in training mode; expected model.eval()"):
            refusal()


def test_a_changed_buffer_is_another_model(tmp_path: Path) -> None:
    found = corpus()
    found.model.register_buffer("scale", torch.ones(1))
    built(tmp_path / "index", found)
    found.model.scale.fill_(2.0)
    with refused("index: ", "was built with other weights"):
        Index(found, tmp_path / "index")


def test_options_may_change_until_something_depends_on_them(tmp_path: Path) -> None:
    with refused("gradients: 100 for 7 passages; expected at least"):
        built(tmp_path / "index", gradients=100)
    fitted = (tmp_path / "index" / "factors.safetensors").stat().st_mtime_ns
    assert built(tmp_path / "index", gradients="1MB", batch=5).folder.facts["complete"]
    assert (tmp_path / "index" / "factors.safetensors").stat().st_mtime_ns == fitted
    with refused("out: ", "options.gradients"):
        built(tmp_path / "index", gradients="2MB")


def test_vectors_alone_and_blocks_of_rank_zero_are_scored(tmp_path: Path) -> None:
    alone = built(tmp_path / "vectors", only=("norm.*",), gradients="1MB").ask(QUERIES)
    assert_close(alone.scores().values_QN, alone.scores("passages").values_QN, 0.05)
    found = corpus()
    with torch.no_grad():
        found.model.head.weight.zero_()
    asked = built(tmp_path / "zero", found).ask(QUERIES)
    scores = asked.scores("passages", self_influence=True)
    assert scores.self_N is not None and bool(scores.self_N.isfinite().all())


def test_a_completion_of_known_tokens_is_not_read_from_its_text(tmp_path: Path) -> None:
    index = built(tmp_path / "index")
    said, known = index.ask([Query("1 2", "3 4")]), index.ask([Query("1 2", "no number", (3, 4))])
    assert said.nats == known.nats
    with refused("passages: 99; expected numbers from 0 to 6"):
        said.parts([99])


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    found = corpus()
    built(tmp_path / "index", found)
    other = replace(found, decode=lambda ids: " ".join(f"<{int(one)}>" for one in ids))
    with refused("index: ", "was built with other text"):
        Index(other, tmp_path / "index")


def test_wrong_kinds_and_ids_are_refused_in_one_line(tmp_path: Path) -> None:
    found = corpus()
    with refused("model: expected an nn.Module, got int"):
        replace(found, model=3)
    with refused("tokens_NT: expected a tensor of integers"):
        replace(found, tokens_NT=found.tokens_NT.float())
    with refused("tokens_NT: has id -100"):
        replace(found, tokens_NT=found.tokens_NT * 0 - 100)
    found.model.config = SimpleNamespace(vocab_size=WORDS)
    with refused("targets_NT: has id 11; expected ids from 0 to 10"):
        replace(found, targets_NT=found.targets_NT * 0 + 11)
    with refused("query: has id 99; expected ids from 0 to 10"):
        built(tmp_path / "index", found).ask([Query("1", "99 2")])
    with refused("queries: expected a list of Query"):
        built(tmp_path / "other", found).ask([("1", "2 3")])
    with refused("only: 'fc.*'; expected a tuple of patterns"):
        BuildOptions(only="fc.*")
    with refused("corpus, options: expected a PassageCorpus"):
        build_index(found, tmp_path / "third", 3)
