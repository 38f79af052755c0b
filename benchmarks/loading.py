"""Loading of a generated checkpoint against the plain read rate of its disk.

    python benchmarks/loading.py --shape llama-3.2-1b --directory DIR --json benchmarks/results/loading-cpu.json
    python benchmarks/loading.py --shape llama-3.1-8b --device cuda --rounds 1 --parts read,load --seconds 100 ...

The checkpoint (bfloat16, several shards, random numbers that repeat but differ from file to file) is generated once and
kept. Each round measures, cold and warm: a parallel reader that throws the bytes away (the disk's rate), one that keeps
them in fresh memory, the tensors filled one by one in the type of the engine, and `load_decoder`, which also packs
them; each in a fresh process. Cold: the files' pages are dropped from the page cache before.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from about import record_facts

from headrace.plan.catalogue import find_entry

SHARD_BYTES = 1 << 30
READ_BYTES = 16 << 20
NUM_READERS = 8


def main() -> None:
    given = _parse()
    if given.what:
        print(json.dumps(WHAT[given.what](given)))
        return
    started = time.perf_counter()
    directory = Path(given.directory) / given.shape
    generated = _generate(directory, given.shape)
    rounds: list[dict[str, Any]] = []
    for number, state, what in product(range(given.rounds), ("cold", "warm"), given.parts.split(",")):
        if time.perf_counter() - started > given.seconds:
            print(f"no time left for: round {number}, {state}, {what}", file=sys.stderr)
            continue
        found = _in_process(given, directory, state, what)
        rounds.append({"round": number, "cache": state, "what": what, **found})
        print(f"round {number} {state} {what:5} {found['seconds']:7.2f} s {found['gb_per_s']:6.2f} GB/s", flush=True)
    record = {
        **record_facts(),
        "shape": given.shape,
        "device": given.device,
        "generated": generated,
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
    parser.add_argument("--parts", default=",".join(WHAT), help="what is measured, in this order")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing more after this time")
    parser.add_argument("--json", help="write the record here")
    parser.add_argument("--what", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the checkpoint


def _generate(directory: Path, shape: str) -> dict[str, Any] | None:
    """Writes shards of about a GiB, in the order of the model's layers as the hub has them. Returns the rate, with the
    time until the disk has everything."""
    from headrace.models.hub_config import spec_from_config

    index = directory / "model.safetensors.index.json"
    if index.exists():
        return None
    started = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    config = {**find_entry(shape).config, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    shards = _shards(spec_from_config(config).tensor_shapes())
    pool = _random_bytes()
    paths = [directory / f"model-{number:05}.safetensors" for number in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(NUM_READERS) as threads:
        num_bytes = sum(threads.map(_write_shard, paths, shards, [pool] * len(shards)))
    weight_map = {name: path.name for path, shard in zip(paths, shards, strict=True) for name in shard}
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = _rate(num_bytes, time.perf_counter() - started)
    print(f"generated {num_bytes / 1e9:.1f} GB in {found['seconds']:.1f} s, {found['gb_per_s']:.2f} GB/s", flush=True)
    return found


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(2 * math.prod(each) for each in shards[-1].values()) >= SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    return shards


def _random_bytes() -> memoryview:
    """Normally distributed bfloat16 numbers."""
    import torch

    numbers = torch.empty(READ_BYTES // 2).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    return memoryview(numbers.to(torch.bfloat16).view(torch.uint8).numpy().data)


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], pool: memoryview) -> int:
    """Writes a file of safetensors: the length of its header, the header, and the tensors one after the other."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 2 * (zlib.crc32(path.name.encode()) % (len(pool) // 2))  # so that no two files are equal
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = end
        while left:
            left -= file.write(pool[first : first + min(left, len(pool) - first)])
            first = 0
        os.fsync(file.fileno())
    return end


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
    from headrace.models.weights.reader import allocate

    source, device = open_checkpoint(given.directory).weights, torch.device(given.device)
    assert source is not None
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    torch.empty(1, device=device)  # a context is no part of loading
    kept, num_bytes, started = [], 0, time.perf_counter()
    for name in source.names():
        out = allocate(source.shape(name), dtype, device)
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
        found = {what: [r["gb_per_s"] for r in rounds if (r["cache"], r["what"]) == (state, what)] for what in WHAT}
        rates = {what: median(each) for what, each in found.items() if each}
        summary[state] = {f"{what}_gb_per_s": rate for what, rate in rates.items()}
        for what, ceiling in (("fill", "read"), ("fill", "keep"), ("load", "read")):
            if what in rates and ceiling in rates:
                summary[state][f"{what}_share_of_{ceiling}"] = round(rates[what] / rates[ceiling], 3)
    return summary


if __name__ == "__main__":
    main()
