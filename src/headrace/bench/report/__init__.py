"""Reports: a document of sections, built from records, written as one HTML page, as Markdown or on a terminal.

    document.py    Report, Section and its parts: Table, Chart, Facts, Code, Note
    page.py        one self-contained HTML page        markdown.py, terminal.py    the same document as text
    svg.py, scales.py, xy.py, bars.py, grid.py, panels.py    charts
    offline.py, online.py, batching.py, sweep.py, comparison.py    records to documents; build.py: by the kind of record
    run_facts.py   the sections that every record has

A command builds a `Report` and leaves its form to the writers, so that all of them say the same.
"""

from __future__ import annotations
