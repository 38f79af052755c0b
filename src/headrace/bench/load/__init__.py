"""Sends requests over HTTP and measures what a client sees. One outcome per request.

    loads.py         closed loop, open loop, trace: when a request is due        (parsed from flags, written to records)
    target.py        the server's address                bodies.py   requests encoded before the clock starts
    answer.py        bytes of one streamed answer -> times of its chunks, token counts, errors
    connection.py    HTTP/1.1 on an asyncio protocol: one request after the other on a connection
    driver.py        the asyncio side of a load: clients, schedule, a server that died
    cost.py          the client's own cost, and when it spoils the figures
    run.py           run_load: one process or several, one clock
    null_server.py   a server that costs next to nothing, with a fixed pace and injected faults

All times are of `time.monotonic`, which the processes of one machine share.
"""

from __future__ import annotations

from headrace.bench.load.cost import ClientCost
from headrace.bench.load.loads import ClosedLoop, Load, OpenLoop, Trace, load_from_json, parse_load
from headrace.bench.load.run import LoadError, LoadResult, Progress, run_load

__all__ = [
    "ClientCost",
    "ClosedLoop",
    "Load",
    "LoadError",
    "LoadResult",
    "OpenLoop",
    "Progress",
    "Trace",
    "load_from_json",
    "parse_load",
    "run_load",
]
