"""Batch jobs: for each line of an input file, one answer or one error line in the output file.

    run         runs a job: submits lines, collects answers, stops and ends
    preflight   checks a job without its model
    workers     the engines of a job, one or several, and how they divide the machine
    status      counters, progress, summary, metrics
    recovery    what to do when an engine dies
    planning    in which order lines run; which lines are duplicates
    store       the job directory on disk: lock, manifest, journal, publishing
    spec        `JobSpec`: which input, which output, which options
    input       from an input line to a request or an error; how answers become output lines
    formats     files of every kind as lines: JSON lines, CSV, Parquet, compressed, local or in an object store
    files, times, crash_points

Imports go from top to bottom only (checked by import-linter). One job, end to end:

    store.directory: lock, manifest, fingerprint ─▶ store.journal: replay; what is left to do
    formats: lines that are not done ─▶ input: parse, render, tokenize ─▶ planning: order ─▶ run: submit, collect
    ─▶ store.journal: append, write, sync in groups ─▶ store.publish: merge into the output file, sync, rename

Invariants
- A line is computed at least once and committed once. Its key is its index in the input.
- The reader never looks at results, the journal never at the engine. `run` connects them.
- The journal is the only record of what is done. It holds output lines as JSON, whatever the output's format is.
- Results of a step are written before new requests are submitted: a crash loses at most the lines in flight.
- An output that is a stream or a device has no job directory: lines go straight to a sink of `formats`.
"""
