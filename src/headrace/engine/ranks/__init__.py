"""One model on several ranks, each a process with its part of the weights and of the KV cache (tensor and pipeline
parallelism).

    rank 0: the engine's process                              ranks 1 ..: python -m headrace.engine.ranks.child
    core ─▶ RanksRunner.submit ─▶ plan ══ socket pair ══════▶ reader thread ─▶ main thread: its own runner
               └─▶ own runner ◀──────── collectives (Gloo or NCCL) ────────▶ runner
    core ◀─ RanksRunner.collect: rank 0's result              results are dropped: they are the same on all ranks

- `wire.py`: the messages. A steady decode step is a few bytes, whatever the number of sequences.
- `ranks_runner.py`: the runner of rank 0, which sends each plan and then runs it itself. The bits of grammars are
  computed on rank 0 and sent when its runner asks for them.
- `start.py`: starts the other ranks. `processes.py`: all of them, while they run.
- `rank_process.py`: starts and watches the process of one. `child.py`: that process.
- Ranks on other nodes get the same messages by way of `engine/nodes`.

The scheduler runs once, on rank 0. All ranks execute the same plans in the same order and sample the same tokens, since
they have the same logits, bitwise; nothing is sent back but heartbeats.

In a pipeline, rank 0 runs the first stage only. The last stage samples, and its first rank sends each result to rank 0;
the plan of a sequence's next step has its token (`PipelineRunner`). Stages send hidden states to each other.

Start: rank 0 resolves the settings and starts the others, which import torch meanwhile. All connect with each other,
load their part, and measure a step on a GPU. Rank 0 sizes the KV cache by the rank with the least memory and sends the
settings; each rank then builds its runner.

Failure: a rank that exits, that reports an error, or that sends no heartbeat for `TIMEOUT_S` (longer while it imports
torch) fails the engine. The other ranks are killed, which ends collectives that wait for them, and the step in flight
raises an EngineDeadError that names the rank. From there on it is the death of an engine like any other. A rank ends
with rank 0: by the end of the socket, and on Linux by the death of the thread that started it.
"""
