"""Remarks on a run before it starts: what the config asks for is done, and probably not what was meant."""

from gramian.data.documents import USUAL_SHARE
from gramian.train.build.run_parts import Parts


def remarks(parts: Parts) -> list[str]:
    """Lines that name a config key, what will happen, and what would be usual; empty if there is nothing to say."""
    config, windows = parts.config, len(parts.training)
    found = []
    if config.precision.kind == "fp16" and parts.grid.device.type == "cpu":
        found.append(
            "precision.kind: fp16 on a CPU is slower than fp32, and scales its loss; expected fp32, bf16 or auto"
        )
    if config.data.batch > windows and config.privacy is None:
        found.append(
            f"data.batch: a step takes {config.data.batch:,} windows and the data has {windows:,}, so that it reads them "
            f"{config.data.batch / windows:.1f} times; expected at most {windows:,}, or more data"
        )
    tokens = len(parts.validation.stream)
    if parts.validation.held_out == "tail":
        found.append(
            f"data.validation_files: none given, and too few documents to choose some; the last {tokens:,} tokens validate"
        )
    share = tokens / (tokens + len(parts.training.stream))
    if parts.validation.held_out == "hash" and not USUAL_SHARE[0] <= share <= USUAL_SHARE[1]:
        found.append(
            f"data.validation_files: none given, and {share:.0%} of the tokens validate, {tokens:,}; expected such files, or "
            "more documents"
        )
    if left_out := parts.training.left_out:
        share = left_out / (left_out + int(parts.training.counts.sum()))
        found.append(
            f"data.truncate: {left_out:,} tokens ({share:.1%}) lie beyond the first window of their document and are left out; "
            "expected a longer data.length, or false"
        )
    return found
