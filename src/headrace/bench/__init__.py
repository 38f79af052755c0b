"""Benchmarks of Headrace, vLLM and any OpenAI-compatible server: one workload, one kind of record. Imports no torch.

    workloads/     a hashed spec and its requests: prompts, answer lengths, arrival times
    engines/       start, describe and stop an engine; run a workload in process
    load/          send requests over HTTP: closed loop, open loop, trace; one outcome per request
    steady.py      where warm-up ends and the drain begins
    summary.py     rates and pooled percentiles of outcomes
    slo.py         "ttft:p99<300ms;success>=0.999": parsed and judged
    record.py      what is written: settings, versions, hardware, workload, figures
    offline.py     a workload through an engine       online.py    a load level, or a curve of levels
    sweep/         a list of settings, ranked         compare.py   two records, with confidence intervals
    statistics.py  ratios with 95 % intervals         levels.py    the load levels of a record
    batching.py    static against continuous batching   telemetry.py   GPUs, CPU time and memory during a run
    values.py      numbers as text                    report/      terminal, Markdown, one HTML page with SVG plots

An outcome is a row of facts with the client's clock; everything else is computed from rows, so that another statistic
needs no new run.
"""
