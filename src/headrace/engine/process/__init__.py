"""An engine in a process of its own: the same calls as an engine on a thread (`engine/client.Client`), over a socket.

    front                                                       child: python -m headrace.engine.process.child
    submit, abort ... ─▶ checks ─▶ wire ─▶ channel ══ socket ══ channel ─▶ reader thread ─▶ inbox of EngineLoop ─┐
    deliver(events) ◀─ process's thread ◀─ wire ◀─ channel ══ pair ═══ channel ◀─ one frame per step ◀─ main thread ◀┘
                             │ ProcessHealth              ◀══ heartbeats (from the reader thread)
                       supervisor: health check, restarts

- `engine_process.py`: the front's end (`EngineProcess`). It owns the process and the thread that started it, on which
  events are delivered. Nothing here imports torch.
- `child.py`: the engine's end. It runs the same `engine/loop.py` as an engine on a thread.
- `wire.py`: the messages, as msgpack of known types. Dataclasses go by their fields, so a new sampling parameter needs
  no change. The events of a step are one array, and their tokens one buffer.
- `channel.py`: frames over the socket. A sender never waits for a peer that does not read, except an engine with 64 MiB
  of unread events.
- `health_check.py`: decides from heartbeats whether a process hangs. `supervisor.py`: replaces a process that exits,
  that is silent, or that has work and finishes no step (`engine/restart_policy.py` has the limits and delays). Before a
  hung process is killed, it writes the stacks of its threads to its log.

Start: the child imports torch while the front opens the checkpoint, and loads the weights while the front loads the
tokenizer. `Ready` brings the settings and the limits that requests are checked against (`engine/checks.py`), so the
front refuses a bad request at once. An error of the start is raised in the front with its own class.

End: the child ends when it is told to, when its engine fails, when the socket closes, and, on Linux, with the thread
that started it. It ignores SIGINT and SIGTERM: the front decides whether to drain first.
"""

from __future__ import annotations
