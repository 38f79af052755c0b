"""TensorRT-LLM and its Triton backend. Data of `other_flags`."""

from __future__ import annotations

from headrace.flag_groups import FlagGroup

TENSORRT: tuple[FlagGroup, ...] = (
    FlagGroup(
        "refused",
        "use --capacity-policy, which has the same values",
        values="batch-scheduler-policy capacity-scheduler-policy",
    ),
    FlagGroup("refused", "use --capacity-policy static_batch with --max-num-seqs", values="executor-static-batch-size"),
    FlagGroup(
        "refused",
        "use --num-gpu-blocks-override (in blocks of --block-size tokens) or --kv-cache-memory-bytes",
        values="max-tokens-in-paged-kv-cache",
    ),
    FlagGroup(
        "refused",
        "use --gpu-memory-utilization, a share of all memory, weights included",
        values="kv-cache-free-gpu-mem-fraction kv-cache-free-gpu-memory-fraction",
    ),
    FlagGroup(
        "ignored", "it is the default; --no-enable-prefix-caching turns it off", switches="enable-kv-cache-reuse=true"
    ),
    FlagGroup("refused", "use --max-num-seqs", values="max-batch-size"),
    FlagGroup("refused", "use --max-num-batched-tokens", values="max-num-tokens"),
    FlagGroup("refused", "use --max-model-len", values="max-seq-len"),
    FlagGroup("ignored", "the number of beams is a parameter of each request", values="max-beam-width=1"),
    FlagGroup("refused", "use --tensor-parallel-size", values="tp-size=1"),
    FlagGroup("refused", "use --pipeline-parallel-size", values="pp-size=1"),
    FlagGroup("refused", "use --enable-expert-parallel, over the ranks of --tensor-parallel-size", values="ep-size=1"),
)
