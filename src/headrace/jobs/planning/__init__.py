"""The order in which the lines of a job run, and which lines need no computation at all.

    planner          takes lines in, hands them out in a good order; the only class that the run uses
    workload         how much is held (`Window`), left (`WorkLeft`) and saved (`Savings`)
    duplicates       lines with the same request: one original is computed, its duplicates reuse the answer
    worker_order     divides the plan over the workers of a job, in runs of lines that share prefixes
    prefix_tree      sorts prompts by shared prefixes, so that each prefix is computed once and then used
    pending          a line that waits, and its expected answer length
    answer_lengths   learns the length of answers per prefix group and `max_tokens`
    probes           starts a few lines of each new prefix group early, to learn from them

- A window of the input is planned at once, never all of it: memory is bounded. The plan is made again once as many
  lines have arrived as are left of it. The engine never waits for the window to fill.
- Prompts sorted by their bytes are the leaves of the prefix tree from left to right; neighbours show its inner nodes.
  The planner walks the tree depth first.
- A prefix group is a set of prompts under one node. Their answers are expected to have similar lengths. Short answers
  end first, so a group of which many lines have started and few have ended is expected to be long.
- Long answers that would outlast everything else start early, once the input has ended.
- The planner decides order and reuse only. How many sequences run at once is decided in `run`.
"""

from __future__ import annotations
