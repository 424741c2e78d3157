"""Goose: a recurrent language model with ternary activations ("spikes"), its dense twin, spike statistics, text generation."""

from gramian.models.goose.goose import Goose, GooseConfig, LayerState, State
from gramian.models.goose.operations import Operations, layer_operations, operations
from gramian.models.goose.recurrent_generation import generate
from gramian.models.goose.spike_health import SiteHealth, SpikeHealth, SpikeRecorder, measure_spikes, record_spikes

__all__ = [
    "Goose",
    "GooseConfig",
    "LayerState",
    "Operations",
    "SiteHealth",
    "SpikeHealth",
    "SpikeRecorder",
    "State",
    "generate",
    "layer_operations",
    "measure_spikes",
    "operations",
    "record_spikes",
]
