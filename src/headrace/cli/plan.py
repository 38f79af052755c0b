"""`headrace plan`: will a model run on a GPU, and how fast, without the GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.parser import CommandParser
from headrace.config import EMBEDDED_MODEL
from headrace.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from headrace.plan.gpus import Gpu
    from headrace.plan.settings import PlanSettings
    from headrace.plan.workload import Workload

DEFAULT_REQUESTS = 1000
MAX_REQUESTS = 20_000
EXAMPLES = """\
examples:
  headrace plan llama-3.1-8b --gpu H200
  headrace plan Qwen/Qwen3-30B-A3B --gpu H100 --input-len 1000 --output-len 300 --concurrency 64
  headrace plan llama-3.3-70b --gpu H100 --gpus 8
  headrace plan ./my-model --compare A100,L40S,H100,H200
  headrace plan smollm2 --gpu cpu --probe

Predictions come from a roofline that was fitted on records of one H200; each one shows its measured error."""


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    try:
        return _list() if given.list else _plan(parser, given)
    except (ConfigError, ModelError) as error:
        parser.error(str(error))


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace plan",
        usage="headrace plan [MODEL] --gpu NAME [--gpus N] [options]",
        description="Predicts whether a model fits on a GPU, and how fast it runs there. Needs no GPU and no hub.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a built-in name, a directory, a config.json or a GGUF file"
    )
    parser.add_argument("--list", action="store_true", help="list the built-in models and GPUs")
    where = parser.add_argument_group("device")
    where.add_argument("--gpu", metavar="NAME", help="such as H200, or cpu for this machine's CPU")
    where.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs (default: 1)")
    where.add_argument("--compare", metavar="A,B,...", help="compare these GPUs, with the cost of a million tokens")
    where.add_argument("--gpu-price", type=float, metavar="X", help="dollars per GPU-hour, instead of an assumption")
    where.add_argument("--tensor-parallel-size", type=int, metavar="N", help="default: chosen with a reason")
    where.add_argument("--pipeline-parallel-size", type=int, metavar="N", help="default: chosen with a reason")
    where.add_argument(
        "--enable-expert-parallel", action="store_true", help="tensor-parallel GPUs have whole experts of a mixture"
    )
    where.add_argument("--bandwidth", type=float, metavar="GB/S", help="memory bandwidth of a CPU; default: measured")
    where.add_argument("--gflops", type=float, metavar="X", help="float32 GFLOP/s of a CPU; default: measured")
    work = parser.add_argument_group("workload")
    work.add_argument("--workload", metavar="NAME", help="chat (the default), prefill, decode or prefix")
    work.add_argument("--input-len", type=int, metavar="N", help="mean prompt length, in tokens")
    work.add_argument("--output-len", type=int, metavar="N", help="mean answer length, in tokens")
    work.add_argument("--spread", type=float, default=0.0, metavar="X", help="lengths vary by this share of the mean")
    work.add_argument("--requests", type=int, metavar="N", help=f"number of requests (default: {DEFAULT_REQUESTS})")
    work.add_argument("--concurrency", type=int, metavar="N", help="clients that each keep one request in flight")
    engine = parser.add_argument_group("engine", "as in 'headrace serve'; what is not set is chosen as the engine does")
    engine.add_argument("--quantization", metavar="NAME", help="fp8, int8 or int4")
    engine.add_argument("--kv-cache-dtype", default="auto", metavar="NAME", help="auto or fp8")
    engine.add_argument("--gpu-memory-utilization", type=float, metavar="X")
    engine.add_argument("--cpu-offload-gb", type=float, default=0.0, metavar="GIB", help="weights in host memory")
    engine.add_argument("--max-model-len", type=int, metavar="N")
    engine.add_argument("--max-num-seqs", type=int, metavar="N")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="N")
    engine.add_argument("--max-loras", type=int, default=0, metavar="N", help="LoRA adapters on the device at once")
    engine.add_argument("--max-lora-rank", type=int, default=16, metavar="N", help="their largest rank (default: 16)")
    parser.add_argument("--probe", action="store_true", help="start the engine on this machine and show the difference")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    return parser


def _plan(parser: CommandParser, given: argparse.Namespace) -> int:
    if given.model is None and not given.probe:
        parser.error("needs a MODEL ('headrace plan --list' shows the built-in ones)")
    if given.gpu is None and given.compare is None and not given.probe:
        parser.error("needs --gpu NAME or --compare A,B ('headrace plan --list' shows the GPUs)")
    from headrace.plan.advice import compare, in_other_formats, ways_out
    from headrace.plan.document import document
    from headrace.plan.gpus import find_gpus
    from headrace.plan.prediction import predict
    from headrace.plan.source import find_shape

    model = given.model or EMBEDDED_MODEL
    shape, settings, workload = find_shape(model), _settings(given), _workload(given)
    prediction, formats, ways, compared = None, [], [], []
    if given.gpu is not None:
        gpu = _device(given)
        prediction = predict(shape, gpu, workload, settings)
        ways = [] if prediction.fits else ways_out(prediction, settings)
        kept = prediction.layout if prediction.fits else None
        formats = [] if gpu.is_cpu else in_other_formats(shape, gpu, workload, settings, layout=kept)
    if given.compare is not None:
        gpus = find_gpus(name.strip() for name in given.compare.split(",") if name.strip())
        compared = compare(shape, [gpu.with_price(given.gpu_price) for gpu in gpus], workload, settings)
    probed = _probe(model, settings) if given.probe else None
    if given.json:
        print(
            json.dumps(document(prediction, formats=formats, compared=compared, ways_out=ways, probe=probed), indent=2)
        )
        return 0
    from rich.console import Console

    from headrace.plan import tables

    console = Console(highlight=False, emoji=False)
    if prediction is not None:
        tables.print_plan(console, prediction, ways)
    if formats:
        console.print()
        tables.print_formats(console, formats)
    if compared:
        console.print()
        tables.print_comparison(console, compared)
    if probed is not None:
        tables.print_probe(console, probed)
    return 0


def _list() -> int:
    from headrace.plan.gpus import GPUS
    from headrace.plan.source import built_in_names

    print("models:")
    for name in built_in_names():
        print(f"  {name}")
    print("GPUs:")
    for gpu in GPUS:
        print(f"  {gpu.name:<10} {gpu.title}")
    return 0


def _settings(given: argparse.Namespace) -> PlanSettings:
    from headrace.plan.settings import PlanSettings

    return PlanSettings(
        quantization=given.quantization,
        kv_cache_dtype=given.kv_cache_dtype,
        num_gpus=given.gpus,
        tensor_parallel_size=given.tensor_parallel_size,
        pipeline_parallel_size=given.pipeline_parallel_size,
        enable_expert_parallel=given.enable_expert_parallel,
        gpu_memory_utilization=given.gpu_memory_utilization,
        cpu_offload_gb=given.cpu_offload_gb,
        max_model_len=given.max_model_len,
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        max_loras=given.max_loras,
        max_lora_rank=given.max_lora_rank,
    )


def _workload(given: argparse.Namespace) -> Workload:
    from headrace.plan.workload import named, uniform

    if given.input_len is None and given.output_len is None:
        if given.requests is not None:
            raise ConfigError("--requests needs --input-len and --output-len; a named workload has its own requests")
        return named(given.workload or "chat", concurrency=given.concurrency)
    if given.workload is not None:
        raise ConfigError("--workload has its own lengths; leave out --input-len and --output-len")
    if given.input_len is None or given.output_len is None:
        raise ConfigError("--input-len and --output-len belong together")
    if given.requests is not None and not 1 <= given.requests <= MAX_REQUESTS:
        raise ConfigError(
            f"--requests must be between 1 and {MAX_REQUESTS:,}, got {given.requests:,}; with more, rates hardly change"
        )
    count = given.requests or max(DEFAULT_REQUESTS, 4 * (given.concurrency or 0))
    return uniform(
        given.input_len, given.output_len, num_requests=count, spread=given.spread, concurrency=given.concurrency
    )


def _device(given: argparse.Namespace) -> Gpu:
    from headrace.plan.gpus import find_gpu

    if given.gpu.lower() != "cpu":
        return find_gpu(given.gpu).with_price(given.gpu_price)
    from headrace.plan.hostprobe import this_cpu

    bandwidth = None if given.bandwidth is None else given.bandwidth * 1e9
    flops = None if given.gflops is None else given.gflops * 1e9
    return this_cpu(bandwidth=bandwidth, flops=flops, price=given.gpu_price)


def _probe(model: str, settings: PlanSettings) -> dict[str, Any]:
    from headrace.plan.probe import probe

    return probe(model, settings)
