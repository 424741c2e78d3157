"""Health of spikes: counted right, summed over batches, told with a hint, and never in the way of checkpointing."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.models import Goose, GooseConfig
from gramian.models.goose import measure_spikes, record_spikes
from gramian.models.goose.spike_health import spikes_of

TINY = GooseConfig(vocabulary=17, context=12, layers=2, width=16)
SITES = ["key", "value", "receptance", "memory_out", "fc", "mlp_out"]


def tokens_BT(batch: int = 4, length: int = 30, seed: int = 0) -> Tensor:
    return torch.randint(TINY.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_rates_and_entropy_are_those_of_the_spikes_of_all_batches() -> None:
    model, seen = Goose(TINY), []
    model.blocks[1].value.spike.register_forward_hook(lambda module, args, output: seen.append(output.flatten(0, 1)))
    health = measure_spikes(model, [tokens_BT(seed=0), tokens_BT(2, 7, seed=1)])
    assert model.training
    assert [(s.layer, s.site) for s in health.sites] == [(layer, site) for layer in (1, 2) for site in SITES]
    found = health.sites[7]
    spikes_NC = torch.cat(seen)
    assert found.tokens == len(spikes_NC) == 134 and found.channels == 16
    assert found.firing == pytest.approx(spikes_NC.abs().mean().item())
    bits = 0.0
    for column in spikes_NC.T.tolist():
        for value in (-1, 0, 1):
            share = column.count(value) / 134
            bits -= share * math.log2(share) / 16 if share else 0.0
    assert found.entropy == pytest.approx(bits)
    assert 0.5 < found.entropy < math.log2(3)


def test_dead_and_saturated_channels_are_counted_and_told() -> None:
    model = Goose(TINY)
    with torch.no_grad():
        model.blocks[0].key.spike.log_alpha[:3] = 20.0  # never above the threshold
        model.blocks[1].fc.spike.log_alpha[:4] = -20.0  # always, with inputs that are never 0
        model.blocks[1].norm_mlp.weight[:4], model.blocks[1].norm_mlp.bias[:4] = 0.0, 3.0
    health = measure_spikes(model, [tokens_BT(8, 200)])
    assert health.sites[0].dead == 3 / 16 and health.sites[0].saturated == 0
    assert health.sites[10].saturated == 4 / 16 and health.sites[10].dead == 0
    starts = [event.partition(";")[0] for event in health.events()]
    assert "layer 1 key: 18.8% of channels are dead (above 5.0%)" in starts
    assert "layer 2 fc: 25.0% of channels always fire (above 10.0%)" in starts
    assert not any("layer 1 key" in event for event in health.events(dead=0.2, saturated=0.1))
    assert not any("layer 2 fc" in event for event in health.events(saturated=0.3))


def test_a_fresh_model_is_healthy() -> None:
    health = measure_spikes(
        Goose(GooseConfig()), [torch.randint(256, (8, 128), generator=torch.Generator().manual_seed(0))]
    )
    assert health.events() == []
    assert 0.2 < health.firing < 0.7 and health.dead < 0.01 and health.saturated == 0


def test_table_and_json_hold_all_sites() -> None:
    health = measure_spikes(Goose(TINY), [tokens_BT()])
    assert len(health.table().splitlines()) == 1 + 12
    assert health.entropy == pytest.approx(
        sum(s.entropy * s.channels for s in health.sites) / sum(s.channels for s in health.sites)
    )


def test_hooks_are_gone_afterwards_also_after_an_exception() -> None:
    model = Goose(TINY)
    with pytest.raises(ValueError), record_spikes(model):
        raise ValueError
    assert not any(spike._forward_hooks for spike in spikes_of(model).values())


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_checkpointing_stays_on_while_spikes_are_recorded_and_rates_are_the_same(blocks: int) -> None:
    """In the code behind the seed asking for spikes turned it off, and training always asked."""
    model, kept = Goose(TINY), []
    model.checkpoint_blocks = blocks
    with (
        record_spikes(model) as recorder,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
    ):
        loss = model(tokens_BT()).square().mean()
        kept_forward = sum(kept)
        loss.backward()
    plain = measure_spikes(model, [tokens_BT()])
    for found, expected in zip(recorder.health().sites, plain.sites, strict=True):
        assert (found.firing, found.entropy) == pytest.approx((expected.firing, expected.entropy))
    assert (kept_forward < 40_000) is (blocks > 0)


def test_a_compiled_model_is_measured_without_its_graph_which_would_pass_hooks_by() -> None:
    def refuse(graph: object, inputs: object) -> None:
        raise AssertionError("compiled")

    model = Goose(TINY)
    plain = measure_spikes(model, [tokens_BT()])
    model.compile(backend=refuse)
    assert measure_spikes(model, [tokens_BT()]) == plain


def test_nothing_seen_and_no_spikes_are_refused() -> None:
    with pytest.raises(GramianError, match="^spikes: none were seen"):
        measure_spikes(Goose(TINY), [])
    with pytest.raises(GramianError, match="^model: has no spikes"):
        measure_spikes(Goose(GooseConfig(spikes=False)), [tokens_BT()])


def test_counts_of_several_processes_can_be_summed_in_place() -> None:
    model = Goose(TINY)
    with record_spikes(model) as recorder:
        model(tokens_BT())
    before = recorder.health()
    recorder.each(lambda counts_3C: counts_3C.mul_(2))
    for found, expected in zip(recorder.health().sites, before.sites, strict=True):
        assert found == replace(expected, tokens=2 * expected.tokens)
