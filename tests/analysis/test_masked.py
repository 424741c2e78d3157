"""Masked tokens, and logits of the masked positions alone."""

import types

import torch
from torch import nn

from gramian.analysis.layer_places import Place, place, short_names, short_roles
from gramian.analysis.masked_encoder import EmbeddingScores, MaskedHead, mask


class Encoder(nn.Module):
    """What the wrappers ask of a Hugging Face encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.pooler = nn.Embedding(7, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids):
        return types.SimpleNamespace(last_hidden_state=self.mix(self.table(input_ids)))


def test_masks_are_of_the_share_inside_the_ends_and_the_targets_what_stood_there():
    windows = torch.arange(1, 41).view(2, 20)
    masked, positions, targets = mask(windows, 0, 0.15, seed=0)
    assert positions.shape == targets.shape == (2, 3)
    assert bool(((positions > 0) & (positions < 19)).all()) and bool((positions.diff(dim=1) > 0).all())
    assert torch.equal(targets, windows.gather(1, positions)) and bool((masked.gather(1, positions) == 0).all())
    assert int((masked == 0).sum()) == 6 and torch.equal(masked[masked != 0], windows[masked != 0])
    assert torch.equal(mask(windows, 0, 0.15, seed=0)[1], positions)
    assert not torch.equal(mask(windows, 0, 0.15, seed=1)[1], positions)
    assert mask(windows[:, :3], 0, 0.01, seed=0)[1].tolist() == [[1], [1]]


def test_an_encoder_without_a_head_is_scored_against_its_own_embeddings():
    encoder = Encoder()
    model = EmbeddingScores(encoder)
    ids, positions = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 3]])
    hidden = encoder(ids).last_hidden_state
    torch.testing.assert_close(model(ids, positions), hidden[:, [0, 3]] @ encoder.table.weight.T)
    assert model.get_output_embeddings().weight is encoder.table.weight
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["model.table.weight", "model.mix.weight", "model.mix.bias"]


def test_a_head_of_its_own_is_used():
    class Headed(Encoder):
        def get_output_embeddings(self):
            return self.mix

        def forward(self, input_ids):
            return types.SimpleNamespace(logits=self.mix(self.table(input_ids)))

    model = Headed()
    ids, positions = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2]])
    assert MaskedHead(model)(ids, positions).equal(model(ids).logits[:, [2]])
    assert MaskedHead(model).get_output_embeddings() is model.mix


def test_names_for_people():
    assert place("model.encoder.layer.3.attention.self.query") == Place(3, "attention.self.query")
    assert (place("head"), place("0")) == (Place(None, "head"), Place(0, "layer"))
    assert short_names(["model.h.0.a", "model.h.1.b"]) == {"model.h.0.a": "0.a", "model.h.1.b": "1.b"}
    assert short_names(["model.h.0.a"]) == {"model.h.0.a": "model.h.0.a"}
    assert short_roles(["attention.self.query", "output.dense"]) == {
        "attention.self.query": "attention.query",
        "output.dense": "output",
    }
    assert short_roles(["a.x.y", "b.x.y"]) == {"a.x.y": "a.x.y", "b.x.y": "b.x.y"}
