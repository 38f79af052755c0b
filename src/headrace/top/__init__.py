"""`headrace top`: what a running server does, from its /metrics, as a live view, a text or JSON.

    watch.py     asks the server again and again: two scrapes give `Figures`; a server that is gone is said to be
    figures.py   rates, latencies and gauges of an interval, under Headrace's, vLLM's or SGLang's names
    view.py      a panel for each topic, for rich         lines.py     numbers, bars and sparklines as text
    live.py      the screen, until Ctrl-C

Works from outside the server, so it needs no torch and no model.
"""

from __future__ import annotations
