"""Scheduling, the KV cache, kernels and compilation. Data of `other_flags`."""

from __future__ import annotations

from headrace.flag_groups import FlagGroup

_ASYNCHRONOUS = "scheduling is always asynchronous: steps are submitted ahead of results"
_GRAPHS = (
    "CUDA graphs are captured at start for a fixed series of sizes, for all decode steps and small ones with prefill"
)

ENGINE: tuple[FlagGroup, ...] = (
    # ---- scheduling and the KV cache
    FlagGroup("ignored", "--max-queue-delay-us sets the batching delay", values="scheduler-delay-factor"),
    FlagGroup(
        "ignored",
        _ASYNCHRONOUS,
        values="num-scheduler-steps=1",
        switches="multi-step-stream-outputs async-scheduling=true no-async-scheduling",
    ),
    FlagGroup(
        "ignored",
        "prompts share each step up to --max-num-batched-tokens",
        values="max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold "
        "prefill-schedule-interval=1",
        switches="long-prefill-token-threshold-adaptive",
    ),
    FlagGroup(
        "ignored",
        "--capacity-policy decides how many blocks a request needs to start",
        switches="scheduler-reserve-full-isl",
    ),
    FlagGroup(
        "ignored",
        "batch sizes are chosen for the device; --max-num-seqs and --max-num-batched-tokens override them",
        values="performance-mode=balanced",
    ),
    FlagGroup("refused", "--max-num-seqs is the limit", values="max-num-active-seqs"),
    FlagGroup("refused", "use --max-num-batched-tokens", values="max-num-scheduled-tokens"),
    FlagGroup("refused", "there is one scheduler; --scheduling-policy chooses the order", values="scheduler-cls"),
    FlagGroup(
        "ignored",
        "one block in a hundred is kept free for running sequences when a request starts",
        values="watermark",
    ),
    FlagGroup(
        "ignored",
        "preempted sequences are recomputed, mostly from the prefix cache; nothing is swapped",
        values="swap-space=0|0.0",
    ),
    FlagGroup(
        "ignored",
        "preempted sequences are recomputed; --capacity-policy guaranteed_no_evict avoids preemption",
        values="preemption-mode=recompute",
    ),
    FlagGroup("ignored", "there is only one block manager", switches="use-v2-block-manager"),
    FlagGroup("ignored", "blocks are allocated when they are needed", values="num-lookahead-slots"),
    FlagGroup("ignored", "steps have no padding", values="max-paddings"),
    FlagGroup(
        "ignored",
        "prefixes are compared token by token, not by a hash, in whole blocks",
        values="prefix-caching-hash-algo prefix-match-unit",
    ),
    FlagGroup(
        "ignored",
        "cached prefixes stay until their blocks are needed, the least recently used first",
        values="prefix-cache-retention-interval",
    ),
    FlagGroup(
        "ignored",
        "blocks of layers with a sliding window are handled by the one block manager",
        switches="disable-hybrid-kv-cache-manager swa-bounded-replay kv-sharing-fast-prefill",
    ),
    FlagGroup(
        "refused",
        "--kv-cache-dtype is for all layers, and fp8 needs no calibration",
        lists="kv-cache-dtype-skip-layers",
        switches="calculate-kv-scales",
    ),
    FlagGroup(
        "refused",
        "evicted prefixes go to host memory with --kv-offload-gib, and to a disk with --kv-offload-path",
        values="kv-offloading-size=0|0.0 kv-offloading-backend=native",
    ),
    FlagGroup(
        "refused",
        "engines do not exchange KV caches; --kv-offload-gib and --kv-offload-path keep evicted prefixes",
        values="kv-transfer-config kv-events-config ec-transfer-config",
    ),
    FlagGroup(
        "ignored",
        "/metrics always has the use and the hits of the cache",
        values="kv-cache-metrics-sample",
        switches="kv-cache-metrics",
    ),
    # ---- kernels and compilation
    FlagGroup(
        "ignored",
        _GRAPHS,
        values="max-seq-len-to-capture max-context-len-to-capture max-cudagraph-capture-size",
        switches="cudagraph-metrics",
        lists="cuda-graph-sizes cudagraph-capture-sizes",
    ),
    FlagGroup("ignored", "CUDA graphs are always used on a GPU; answers are the same", switches="enforce-eager"),
    FlagGroup(
        "ignored",
        "kernels are compiled and CUDA graphs captured at start",
        values="compilation-config -cc optimization-level -O ir-op-priority jit-monitor-mode",
        switches="enable-flashinfer-autotune jit-monitor-verbose",
    ),
    FlagGroup(
        "ignored",
        "kernels are chosen for the device and the model; answers agree within rounding",
        values="attention-config -ac kernel-config linear-backend moe-backend sparse-indexer-topk-backend",
        switches="disable-cascade-attn use-fp64-gumbel enable-bf16x3-router-gemm enable-batch-sharded-sampling "
        "enable-hc-sp",
    ),
    FlagGroup(
        "ignored",
        "recurrent states have one form: matrices in float32, convolutions in the model's type, no cache of prefixes",
        values="mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds "
        "mamba-config mamba-ssm-cache-dtype mamba-ssu-algorithm replayssm-buffer-len gdn-prefill-backend "
        "kda-prefill-backend kda-decode-backend engram-config",
        switches="enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint use-replayssm",
    ),
    FlagGroup("ignored", "only text diffusion models read it, and none is supported", values="diffusion-config -dc"),
)
