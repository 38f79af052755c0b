"""Workloads: what is asked, of any engine, in the same order.

    spec.py      WorkloadSpec: the parameters and their hash       requests.py   BenchRequest, a list of them
    named.py     chat, prefill, decode, prefix, uniform, mixed, random: made by seed
    files.py     lengths or prompts of the user's own file: JSONL, ShareGPT, traces

How an answer ends is part of a workload. With `ends="exact"` every engine generates the same number of tokens, but the
scheduler knows each length in advance, so memory pressure and preemption hardly show. With `ends="eos"` the model ends
its answer. With `ends="random"` answers may use some token ids only, a few of which end them: a model with random
weights then ends after a number of tokens that nobody knows in advance, distributed about geometrically.
"""

from __future__ import annotations

from headrace.bench.workloads.files import read_workload
from headrace.bench.workloads.named import NAMED, build
from headrace.bench.workloads.requests import BenchRequest, Workload
from headrace.bench.workloads.spec import Ends, WorkloadSpec

__all__ = ["NAMED", "BenchRequest", "Ends", "Workload", "WorkloadSpec", "build", "read_workload"]
