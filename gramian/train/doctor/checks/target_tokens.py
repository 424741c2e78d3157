"""Every counted target must be the next token of its row, and the loss must be divided by the number of counted targets."""

from gramian.train.doctor.check import Check
from gramian.train.doctor.examined_run import ExaminedRun
from gramian.train.loop.objective import IGNORED


def target_tokens(run: ExaminedRun) -> list[Check]:
    """Check on the first batch that every target is the next token, and that the loss is divided by the number of targets."""
    batch = run.batches[0]
    wrong = seen = counted = 0
    for micro in batch.micro:
        tokens_BT, targets_BT = micro["tokens"], micro["targets"]
        counts_BT = targets_BT != IGNORED
        wrong += int((counts_BT[:, :-1] & (targets_BT[:, :-1] != tokens_BT[:, 1:])).sum())
        seen += int(counts_BT[:, :-1].sum())
        counted += int(counts_BT.sum())
    measured, hint = f"{wrong:,} of {seen:,} not the next token", ""
    if wrong:
        hint = "targets must be the tokens shifted by one: a model that sees its target learns to copy it"
    elif counted != batch.tokens:
        measured = f"{counted:,} counted, divided by {batch.tokens:,}"
        hint = "the mean must be over the counted targets: padding is counted, or some targets are not"
    return [Check("targets", measured, "0", not wrong and counted == batch.tokens, hint, wrong / max(1, seen))]
