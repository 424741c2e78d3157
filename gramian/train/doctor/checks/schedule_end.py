"""The schedule must end at the learning rate that the config names."""

import math

from gramian.train.config.config import Config
from gramian.train.doctor.check import Check
from gramian.train.loop.schedule import SCHEDULES, learning_rate


def schedule_end(config: Config) -> list[Check]:
    """Check that the last step's learning rate is schedule.floor, or optimizer.lr if the schedule does not decay."""
    schedule, steps = config.schedule, config.run.steps
    last = learning_rate(steps - 1, steps, schedule, config.optimizer)
    end = schedule.floor if SCHEDULES[schedule.kind].decays else config.optimizer.lr
    ok = math.isclose(last, end, rel_tol=1e-12, abs_tol=0.0)
    hint = "" if ok else "the schedule does not end at its floor: warm-up and decay do not fit into run.steps"
    return [Check("schedule", f"ends at lr {last:g}", f"{end:g}", ok, hint, last)]
