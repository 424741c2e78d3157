"""`record.json`: what a run is, for whoever wants to repeat it, and to read: a private run has no digest of its data in it."""

import json
import platform
from pathlib import Path

import torch

import gramian
from gramian.kernels.chacha import NORMALS_VERSION
from gramian.train.build import Parts
from gramian.train.private import PrivateStepper
from gramian.train.run_folder import write_whole


def write_record(folder: Path, parts: Parts) -> None:
    """Versions, machine, world and sizes; digests of the data where it is public.

    A digest without a key tells whether a guessed data set is the one that was trained on. Of a private run it is in the
    checkpoints, which only their owner reads.
    """
    cuda = parts.world.device.type == "cuda"
    record = {
        "gramian": gramian.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(parts.world.device) if cuda else platform.machine(),
        "processes": parts.world.size,
        "strategy": parts.world.kind,
        "config_hash": parts.config.hash,
        "precision": parts.numbers.kind,
        "parameters": sum(p.numel() for p in parts.model.parameters()),
        "vocabulary": parts.training.vocabulary,
        "windows": {"training": len(parts.training), "validation": len(parts.validation)},
        "host_memory": {
            "snapshots": parts.host.snapshots,
            "bytes_of_one": parts.host.copy,
            "bytes": parts.host.process,
        },
    }
    if not isinstance(parts.stepper, PrivateStepper):
        record["data_digest"] = parts.digests
    else:
        engine = parts.stepper.engine
        record["privacy"] = {
            "noise_multiplier": engine.noise_multiplier,
            "sample_rate": engine.sample_rate,
            "expected_batch": engine.expected_batch,
            "unit": "one window",
            "noise_generator": NORMALS_VERSION,
            "insecure_reproducible": parts.config.privacy is not None and parts.config.privacy.insecure_reproducible,
        }
    write_whole(folder / "record.json", json.dumps(record, indent=2) + "\n")
