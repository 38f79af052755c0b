"""Workers on the machines of a Ray cluster: one actor per engine. Loop, journal and recovery are those of local ones.

    job's process: main loop ─▶ JobEngine ─▶ ActorEngine ─▶ ActorChannel ══ calls of Ray ══ EngineActor ─▶ engine
                                             the frames of engine/process/wire.py, in batches

- `actor.py`: the process of an engine on a node (`EngineActor`). It imports no ray.
- `channel.py`: frames to and from an actor (`ActorChannel`).
- `cluster.py`: connects, places actors, starts engines on them (`RayCluster`). The only importer of ray.
- `shares.py`: how many actors fit, and each one's part of its node.

Ray only places actors and carries messages. It restarts and retries nothing (`max_restarts=0`, `max_task_retries=0`):
the journal knows which lines are done, and `jobs/recovery` decides what runs again.

Messages. Requests that are submitted while a call is under way go together in the next one. Events are polled: one call
of `receive` is open per actor, and it returns all frames of at least `BATCH_S`. The open call is the actor's credit:
without one it sends nothing, and the lines in flight bound what it holds. Polling was chosen over a streaming generator
since a lost actor then ends exactly one call, and since a slow driver slows polling down instead of filling a stream.

A worker without a place on the cluster is in the state "starting". Its actor waits in Ray's queue, so it starts as soon
as a node has room. The job begins with the first worker that is ready.
"""

from __future__ import annotations
