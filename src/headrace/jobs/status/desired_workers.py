"""How many workers a job needs, for an autoscaler: enough for the deadline, and no more than have something to do.

busy     lines left / max_num_seqs, rounded up: more workers than that have empty slots
needed   workers that run x time left / (TIME_SHARE x time until the deadline), rounded up
desired  with a deadline min(needed, busy), else min(workers of the job, busy); at least 1 while lines are left
"""

from __future__ import annotations

import math

TIME_SHARE = 0.8  # of the time until the deadline: a worker that is added has to start first


def desired_workers(
    *,
    num_workers: int,
    num_running: int,
    lines_left: int | None,
    max_num_seqs: int,
    seconds_left: float | None,
    seconds_to_deadline: float | None,
) -> int:
    """`num_workers`: those of the job. `seconds_left`: at the speed of those that run; None: it is not known yet.
    `seconds_to_deadline`: None: the job has no deadline."""
    if lines_left == 0:
        return 0
    desired = num_workers
    if seconds_to_deadline is not None and seconds_left is not None and num_running:
        share = seconds_left / max(TIME_SHARE * seconds_to_deadline, 1e-9)
        desired = math.ceil(min(num_running * share, 1e6))
    if lines_left is not None:
        desired = min(desired, math.ceil(lines_left / max_num_seqs))
    return max(1, desired)
