"""The sizes that CUDA graphs are captured for, and which of them runs a step.

    decode           1 2 .. 8 16 24 32 48 .. 128 160 .. 512 576 .. 1024 1152 ..   sequences, one token each
    prefix sharing   16 32 64 128 192 ..                                          sequences that share prefixes
    prefill          32 64 .. 256 320 .. 1024 1152 .. 2048                        tokens of a step with prompts

A step is padded to the next size. A decode size that is measured to be slow at start is replaced by a larger one
(`fastest_sizes`). Prefill sizes end where the host launches kernels as fast as the GPU runs them
(`max_prefill_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headrace.models.spec import ModelSpec

_DECODE_STEPS = ((8, 1), (32, 8), (128, 16), (512, 32), (1024, 64))  # (up to this many sequences, distance of sizes)
_DECODE_LAST_STEP = 128  # above those
_SHARING_FIRST = (16, 32)
_SHARING_STEP = 64
_PREFILL_STEPS = ((256, 32), (1024, 64), (2048, 128))  # (up to this many tokens, distance of sizes)

MAX_PROMPTS = 64  # in one prefill graph
MAX_GRAPH_CONTEXT = 8192  # tokens; prefill graphs read blocks, and gathered contexts are faster to read above this

_MIN_SPEEDUP = 1.03  # a smaller difference could be noise, and answers should not depend on that
_LAUNCH_SECONDS = 0.7e-3  # host time to launch one layer kernel by kernel; host of an H200, 2026-11-15
_OPERATIONS_PER_SECOND = 7e14  # of an H200


def decode_graph_size(num_seqs: int) -> int:
    """The number of sequences that a decode step of `num_seqs` is padded to."""
    for limit, step in _DECODE_STEPS:
        if num_seqs <= limit:
            return -(-num_seqs // step) * step
    return -(-num_seqs // _DECODE_LAST_STEP) * _DECODE_LAST_STEP


def sharing_graph_size(num_seqs: int, max_size: int) -> int:
    """The same for a decode step whose sequences share prefixes; at most `max_size`."""
    for limit in _SHARING_FIRST:
        if num_seqs <= limit:
            return min(limit, max_size)
    return min(-(-num_seqs // _SHARING_STEP) * _SHARING_STEP, max_size)


def fastest_sizes(milliseconds_by_size: Mapping[int, float]) -> dict[int, int]:
    """Returns for each size itself, or a larger one whose graph is faster by `_MIN_SPEEDUP`.

    Libraries choose a poor kernel for some sizes: the largest GEMM of an 8B model takes 292 us for 448 rows in bfloat16
    on an H200, and 165 us for 480.
    """
    chosen: dict[int, int] = {}
    fastest = max(milliseconds_by_size)
    for size in sorted(milliseconds_by_size, reverse=True):
        is_slow = milliseconds_by_size[size] > _MIN_SPEEDUP * milliseconds_by_size[fastest]
        chosen[size] = fastest if is_slow else size
        fastest = min(size, fastest, key=lambda one: milliseconds_by_size[one])
    return chosen


def prefill_graph_sizes(max_num_tokens: int, max_model_len: int) -> Iterator[int]:
    """The token counts of prefill graphs, up to `max_num_tokens`. Padding is one prompt, so the distance between two
    sizes must fit in the model's context."""
    first = 1
    for limit, step in _PREFILL_STEPS:
        for size in range(first // step * step + step, limit + 1, step):
            if size <= max_num_tokens and step <= max_model_len:
                yield size
        first = limit


def max_prefill_tokens(spec: ModelSpec, max_num_batched_tokens: int) -> int:
    """Tokens of the largest step worth a prefill graph: the GPU computes it sooner than the host could launch it."""
    worth = spec.num_layers * _LAUNCH_SECONDS * _OPERATIONS_PER_SECOND / (2 * spec.num_linear_params)
    return min(int(worth), _PREFILL_STEPS[-1][0], max_num_batched_tokens)


def fitting_prefill_size(sizes: Sequence[int], num_tokens: int, num_prompts: int, longest: int) -> int | None:
    """The smallest of `sizes` (ascending) for a step of `num_tokens` with `num_prompts`, whose longest context has
    `longest` tokens; None if no graph can run it."""
    if num_prompts > MAX_PROMPTS or longest > MAX_GRAPH_CONTEXT:
        return None
    return next((size for size in sizes if size >= num_tokens), None)


def prefill_graph_bytes(step_bytes: int, spec: ModelSpec, max_num_batched_tokens: int) -> int:
    """Memory of the prefill graphs, which they share, if the largest step needs `step_bytes`."""
    return step_bytes * max_prefill_tokens(spec, max_num_batched_tokens) // max(1, max_num_batched_tokens)
