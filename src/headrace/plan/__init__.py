"""Will it run, and how fast: memory and speed of a model on a named device, without the device. Imports no torch.

    source.py, catalogue.py, shape.py     a name or a config.json to a `ModelShape`: weights, cache, FLOPs by number
    gpus.py, hostprobe.py                 the table of devices; this machine's CPU, measured in half a second
    workload.py                           requests by their lengths, and the four named workloads
    precision.py, settings.py             number formats; what the user sets and what `engine.resolve` makes of it
    memory.py, layout.py                  what fits on a GPU; replicas, tensor and pipeline parallelism
    simulate.py, roofline.py              the steps that continuous batching takes; the seconds that each one takes
    constants.py                          what was fitted on H200 records, and the error that was measured
    prediction.py                         `predict`: all of it for one model, device, workload and settings
    advice.py, tables.py, document.py     ways out and comparisons; tables for a terminal; the JSON document
    probe.py                              starts the engine and compares (the only module that needs torch, late)

    >>> from headrace.plan import predict, named
    >>> predict("llama-3.1-8b", "H200", named("chat")).speed.output_tokens_per_s

`predict` is pure: the same arguments give the same answer on every machine. `Prediction.speed.phases` splits the
seconds into GEMMs, attention of prompts, cache reads, other kernels, network and host.
"""

from __future__ import annotations

from headrace.plan.gpus import GPUS, Gpu, find_gpu
from headrace.plan.layout import Layout
from headrace.plan.memory import Memory
from headrace.plan.prediction import Prediction, Speed, predict
from headrace.plan.settings import PlanSettings
from headrace.plan.shape import ModelShape
from headrace.plan.source import find_shape
from headrace.plan.workload import RequestLengths, Workload, named, of_lengths, uniform

__all__ = [
    "GPUS",
    "Gpu",
    "Layout",
    "Memory",
    "ModelShape",
    "PlanSettings",
    "Prediction",
    "RequestLengths",
    "Speed",
    "Workload",
    "find_gpu",
    "find_shape",
    "named",
    "of_lengths",
    "predict",
    "uniform",
]
