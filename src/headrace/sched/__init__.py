"""Decides which tokens of which sequences a step computes. Pure: no torch, no threads; the time is given, for
statistics and for the limit on background work.

    WaitingQueue ──start──▶ SlotTable (running) ──end──▶ finished
         ▲                       │
         └───────preempt─────────┘        the youngest sequence, with all its tokens; its full blocks stay cached

    scheduler    plan() and apply(): the only entry points besides add() and abort()
    waiting      sequences that wait to start: forks of a computed prompt, then the queue
    urgency      who is more urgent than whom under the priority policy
    intake       sampled tokens of a step into the slots: what `apply` does for all sequences at once
    placement    blocks for a sequence that starts: prefix hit, fork of the parent, room now and later
    capacity     the capacity policies: what fits now, what is reserved to the end
    forecast     expected peak of the KV cache, from finished answers
    background   how much background work a step may have beside interactive requests
    fetching     blocks of waiting prompts that come from the disk, if it is faster than the device (compute_rate)
    drafting     which sequences get drafted tokens, how many, and which (`ngrams`); growth: blocks for more tokens
    microbatches parts of the running sequences, so that every stage of a pipeline has a step
    slots        state of the running sequences, in columns indexed by slot
    queue, sequence, limits, plan_builder, readout_chunks, events, counters, stats, token_gaps

Invariants:
- The token budget `max_num_batched_tokens` holds for every step: decode first, then prefill chunks, then new sequences.
- The host's work for decoding sequences is a few array operations, whatever their number.
- Results come late: `apply` takes in a step submitted before the latest one. A result belongs to a slot's owner only if
  the owner was there when the step was planned (`SlotTable.since`); results for a former owner are dropped.
- Blocks that were given back may still be written by steps in flight; the next owner's steps run after them, in order.
- A watched sequence (`Request.watched`) gets an event each step, an announced one (`Request.announced`) an event with
  its first token; all others one at the end.
"""

from __future__ import annotations

from headrace.sched.limits import SchedulerLimits
from headrace.sched.scheduler import Scheduler
from headrace.sched.stats import SchedulerStats

__all__ = ["Scheduler", "SchedulerLimits", "SchedulerStats"]
