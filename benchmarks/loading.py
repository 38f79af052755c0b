"""Loading of a generated checkpoint against the plain read rate of its disk.

    python benchmarks/loading.py --shape llama-3.2-1b --directory DIR --json benchmarks/results/loading-cpu.json
    python benchmarks/loading.py --shape llama-3.1-8b --device cuda --directory DIR --json ...

The checkpoint (bfloat16, several shards, random numbers) is generated once and kept. Each round measures, cold and
warm: a parallel reader that throws the bytes away (the disk's rate), one that keeps them in fresh memory, the tensors
filled one by one in the type of the engine, and `load_decoder`, which also packs them; each in a fresh process. Cold:
the files' pages are dropped from the page cache before.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from about import commit

from headrace.hardware.describe import machine_facts, package_versions
from headrace.plan.catalogue import find_entry

SHARD_BYTES = 1 << 30
READ_BYTES = 16 << 20
NUM_READERS = 8


def main() -> None:
    given = _parse()
    if given.what:
        print(json.dumps(WHAT[given.what](given)))
        return
    directory = Path(given.directory) / given.shape
    _generate(directory, given.shape)
    rounds: list[dict[str, Any]] = []
    for number in range(given.rounds):
        for state in ("cold", "warm"):
            for what in WHAT:
                rounds.append(
                    {"round": number, "cache": state, "what": what, **_in_process(given, directory, state, what)}
                )
    record = {
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine_facts(),
        "versions": package_versions(),
        "shape": given.shape,
        "device": given.device,
        "num_bytes": sum(path.stat().st_size for path in directory.glob("*.safetensors")),
        "summary": _summary(rounds),
        "rounds": rounds,
    }
    print(json.dumps(record["summary"], indent=1))
    if given.json:
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b", help="a name of `headrace plan --list`")
    parser.add_argument("--directory", required=True, help="where the checkpoint is generated and kept")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the record here")
    parser.add_argument("--what", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the checkpoint


def _generate(directory: Path, shape: str) -> None:
    """Writes shards of about a GiB, in the order of the model's layers as the hub has them."""
    import torch
    from safetensors.torch import save_file

    from headrace.models.hub_config import spec_from_config

    index = directory / "model.safetensors.index.json"
    if index.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = {**find_entry(shape).config, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(1 << 24).normal_(0.0, 0.02, generator=generator).to(torch.bfloat16)
    shards: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}

    def close() -> None:
        name = f"model-{len(shards):05}.safetensors"
        save_file(shards[-1], directory / name)
        weight_map.update(dict.fromkeys(shards[-1], name))
        shards[-1] = {}

    for name, dimensions in spec_from_config(config).tensor_shapes().items():
        size = int(torch.tensor(dimensions).prod())
        shards[-1][name] = pool.repeat(-(-size // len(pool)))[:size].reshape(dimensions).clone()
        if sum(tensor.nbytes for tensor in shards[-1].values()) >= SHARD_BYTES:
            close()
            shards.append({})
    if shards[-1]:
        close()
    index.write_text(json.dumps({"weight_map": weight_map}))


def _drop(directory: Path) -> None:
    """Drops the files' pages from the page cache."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _in_process(given: argparse.Namespace, directory: Path, state: str, what: str) -> dict[str, Any]:
    if state == "cold":
        _drop(directory)
    command = [sys.executable, __file__, "--what", what, "--shape", given.shape, "--directory", str(directory)]
    done = subprocess.run([*command, "--device", given.device], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


# ---- what is measured, in a process of its own


def _read(given: argparse.Namespace) -> dict[str, Any]:
    """Bytes that are read and thrown away: one buffer for each thread."""
    buffers = threading.local()

    def read(task: tuple[Path, int]) -> int:
        if not hasattr(buffers, "bytes"):
            buffers.bytes = bytearray(READ_BYTES)
        return _pread(task, memoryview(buffers.bytes))

    tasks = _tasks(given)
    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        num_bytes = sum(pool.map(read, tasks))
    return _rate(num_bytes, time.perf_counter() - started)


def _keep(given: argparse.Namespace) -> dict[str, Any]:
    """Bytes that are read into memory of their own, which the system must provide."""
    tasks = _tasks(given)
    started = time.perf_counter()
    memory = mmap.mmap(-1, len(tasks) * READ_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    targets = [memoryview(memory)[at * READ_BYTES : (at + 1) * READ_BYTES] for at in range(len(tasks))]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        num_bytes = sum(pool.map(_pread, tasks, targets))
    return _rate(num_bytes, time.perf_counter() - started)


def _tasks(given: argparse.Namespace) -> list[tuple[Path, int]]:
    return [
        (path, offset)
        for path in sorted(Path(given.directory).glob("*.safetensors"))
        for offset in range(0, path.stat().st_size, READ_BYTES)
    ]


def _pread(task: tuple[Path, int], buffer: memoryview) -> int:
    path, offset = task
    file = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(file, [buffer], offset)
    finally:
        os.close(file)


def _rate(num_bytes: int, seconds: float) -> dict[str, Any]:
    return {"num_bytes": num_bytes, "seconds": round(seconds, 3), "gb_per_s": round(num_bytes / seconds / 1e9, 3)}


def _fill(given: argparse.Namespace) -> dict[str, Any]:
    """All tensors into their final type and device, without packing."""
    import torch

    from headrace.models import open_checkpoint
    from headrace.models.weights.load import _allocate

    source, device = open_checkpoint(given.directory).weights, torch.device(given.device)
    assert source is not None
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    torch.empty(1, device=device)  # a context is no part of loading
    kept, num_bytes, started = [], 0, time.perf_counter()
    for name in source.names():
        out = _allocate(source.shape(name), dtype, device)
        source.fill(name, out)
        kept.append(out)
        num_bytes += 2 * out.numel()  # stored as bfloat16
    if given.device == "cuda":
        torch.cuda.synchronize()
    return _rate(num_bytes, time.perf_counter() - started)


def _load(given: argparse.Namespace) -> dict[str, Any]:
    """`load_decoder`, with the growth of the peak memory."""
    import torch

    from headrace.hardware import return_large_buffers
    from headrace.models import load_decoder, open_checkpoint

    return_large_buffers()
    checkpoint = open_checkpoint(given.directory)
    on_gpu = given.device == "cuda"
    if on_gpu:
        torch.empty(1, device="cuda")  # the context is no part of loading
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_bytes = sum(path.stat().st_size for path in Path(given.directory).glob("*.safetensors"))
    started = time.perf_counter()
    decoder = load_decoder(checkpoint, dtype=torch.bfloat16 if on_gpu else torch.float32, device=given.device)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return _rate(num_bytes, seconds) | {"weights_bytes": decoder.num_bytes, "peak_rss_growth_bytes": peak}


WHAT: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "read": _read,
    "keep": _keep,
    "fill": _fill,
    "load": _load,
}


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for state in ("cold", "warm"):
        rates = {
            what: median(r["gb_per_s"] for r in rounds if (r["cache"], r["what"]) == (state, what)) for what in WHAT
        }
        summary[state] = {f"{what}_gb_per_s": rate for what, rate in rates.items()}
        for what, ceiling in (("fill", "read"), ("fill", "keep"), ("load", "read")):
            summary[state][f"{what}_share_of_{ceiling}"] = round(rates[what] / rates[ceiling], 3)
    return summary


if __name__ == "__main__":
    main()
