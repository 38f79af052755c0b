"""The OpenAI-compatible server: HTTP in front of one engine.

    socket ─▶ http/protocol          limits on headers, connections, send and read times      431, 408, disconnect
           ─▶ http/gate              origin, key, body; the key's owner goes into the scope   403, 401, 413, 408
           ─▶ http/app               route; JSON, field names and types                       404, 405, 400
           ─▶ request_queue          a place in the queue, reserved before tokenizing         503 with Retry-After
           ─▶ endpoints/prompting    chat template, token ids (a long prompt on a thread)     400
           ─▶ dynamic_batching       a place in the engine, if batches are configured         503
           ─▶ endpoints/generation   submits, watches for disconnects, measures
           ─▶ one JSON body, or http/chunks and http/sse for a stream

Handlers raise errors; only `http/app` turns them into responses. A place in the queue is held from before the first
await until the first token, so a burst is refused before it costs anything.

The engine's events reach the event loop in one call per step, or one for several steps if the loop is behind. A started
stream writes its chunks in that call, without waking its task; the task handles the first event, silence, the end
and slow clients. A disconnect, a deadline and a dead engine end the stream's `EventQueue` with an error; leaving the
stream aborts what is unfinished and releases the reservation. `http/lifecycle` drains, aborts and sets the exit code.
`bottleneck` names what limits the server, once in ten seconds; `self_monitor` keeps an hour of history, which `page`
shows in a browser. `serve.py` connects these parts.
"""

from __future__ import annotations
