"""Settings of vLLM (current and older versions) and TensorRT-LLM that Headrace does not have, and what to use instead.

A flag that would not change any answer is ignored with one line on stderr. One that would is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ignored", "refused"]


@dataclass(frozen=True, slots=True)
class OtherFlag:
    outcome: Outcome
    answer: str  # what replaced it, or why it is not needed
    takes_value: bool = True
    neutral: tuple[str, ...] = ()  # values that match what Headrace does anyway; accepted silently

    def message(self, flag: str) -> str:
        return f"{flag} is {self.outcome}: {self.answer}"


def _ignored(answer: str, *, value: bool = True) -> OtherFlag:
    return OtherFlag("ignored", answer, value)


def _refused(answer: str, *neutral: str, value: bool = True) -> OtherFlag:
    return OtherFlag("refused", answer, value, neutral)


_ONE_ENGINE = "one server runs one engine; start several behind a load balancer"
_NO_DRAFTS = "there is no speculative decoding yet"
_NO_LORA = "there are no LoRA adapters yet; merge the adapter into the model"

OTHER_FLAGS: dict[str, OtherFlag] = {
    # of older versions of vLLM
    "--scheduler-delay-factor": _ignored("--max-queue-delay-us sets the batching delay"),
    "--use-v2-block-manager": _ignored("there is only one block manager", value=False),
    "--swap-space": _ignored("preempted sequences are recomputed, mostly from the prefix cache; nothing is swapped"),
    "--num-scheduler-steps": _ignored("scheduling is always asynchronous: steps are submitted ahead of results"),
    "--multi-step-stream-outputs": _ignored(
        "scheduling is always asynchronous: steps are submitted ahead of results", value=False
    ),
    "--preemption-mode": _ignored(
        "preempted sequences are recomputed; --capacity-policy guaranteed_no_evict avoids preemption"
    ),
    "--max-seq-len-to-capture": _ignored("CUDA graphs cover all decode steps, and small steps with prefill"),
    "--max-context-len-to-capture": _ignored("CUDA graphs cover all decode steps, and small steps with prefill"),
    "--cuda-graph-sizes": _ignored("CUDA graphs are captured at start for a fixed series of sizes"),
    "--disable-async-output-proc": _ignored(
        "output is always processed on another thread than the engine's", value=False
    ),
    "--guided-decoding-backend": _ignored("llguidance is the only backend for structured output"),
    "--num-lookahead-slots": _ignored("blocks are allocated when they are needed"),
    "--disable-log-requests": _ignored("it is the default; --enable-log-requests turns logging on", value=False),
    "--disable-log-stats": _ignored(
        "the log has one line a minute while there is work; statistics are on /metrics", value=False
    ),
    "--disable-uvicorn-access-log": _ignored("there is no access log without --enable-log-requests", value=False),
    "--max-num-partial-prefills": _ignored("prompts share each step up to --max-num-batched-tokens"),
    "--max-long-partial-prefills": _ignored("prompts share each step up to --max-num-batched-tokens"),
    "--long-prefill-token-threshold": _ignored("prompts share each step up to --max-num-batched-tokens"),
    "--max-paddings": _ignored("steps have no padding"),
    "--disable-sliding-window": _refused("a sliding window is part of the model", value=False),
    "--speculative-model": _refused(_NO_DRAFTS),
    "--num-speculative-tokens": _refused(_NO_DRAFTS),
    "--rope-scaling": _refused("edit rope_scaling in the model's config.json"),
    "--rope-theta": _refused("edit rope_theta in the model's config.json"),
    "--engine-use-ray": _ignored("the engine runs in its own process, without Ray", value=False),
    "--worker-use-ray": _ignored("the engine runs in its own process, without Ray", value=False),
    "--disable-frontend-multiprocessing": _ignored("the engine always runs in its own process", value=False),
    # of current versions, not needed here
    "--async-scheduling": _ignored(
        "scheduling is always asynchronous: steps are submitted ahead of results", value=False
    ),
    "--no-async-scheduling": _ignored(
        "scheduling is always asynchronous: steps are submitted ahead of results", value=False
    ),
    "--enforce-eager": _ignored("CUDA graphs are always used on a GPU; answers are the same", value=False),
    "--trust-remote-code": _ignored(
        "code from a model's repository is never run; supported families need none", value=False
    ),
    "--distributed-executor-backend": _ignored("the engine runs in its own process"),
    "--enable-server-load-tracking": _ignored("/load is always available", value=False),
    "--enable-tokenizer-info-endpoint": _ignored("/tokenizer_info is always available", value=False),
    "--h11-max-incomplete-event-size": _ignored("--max-header-bytes is the limit"),
    "--h11-max-header-count": _ignored("--max-num-headers is the limit"),
    "--disable-fastapi-docs": _ignored("there is no documentation page, only /openapi.json", value=False),
    "--uvicorn-log-level": _ignored("errors are logged to stderr; --enable-log-requests logs requests"),
    "--prefix-caching-hash-algo": _ignored("prefixes are compared token by token, not by a hash"),
    "--watermark": _ignored("one block in a hundred is kept free for running sequences when a request starts"),
    "--tokenizer-mode": _ignored("the fast tokenizer is always used"),
    "--performance-mode": _ignored(
        "batch sizes are chosen for the device; --max-num-seqs and --max-num-batched-tokens override them"
    ),
    "--scheduler-reserve-full-isl": _ignored(
        "--capacity-policy decides how many blocks a request needs to start", value=False
    ),
    "--compilation-config": _ignored("kernels are compiled and CUDA graphs captured at start"),
    "--structured-outputs-config": _ignored("llguidance is the only backend for structured output"),
    "--show-hidden-metrics-for-version": _ignored("older metric names are always on /metrics"),
    "--enable-prompt-tokens-details": _ignored("the usage always includes them", value=False),
    "--disable-access-log-for-endpoints": _ignored("there is no access log without --enable-log-requests"),
    "--profiler-config": _refused("use --profiler-dir DIR, which turns on /start_profile and /stop_profile"),
    "--max-log-len": _ignored("prompts and answers are never logged"),
    # of current versions, not supported
    "--data-parallel-size": _refused(_ONE_ENGINE, "1"),
    "-dp": _refused(_ONE_ENGINE, "1"),
    "--api-server-count": _refused("one process serves HTTP", "1"),
    "--enable-lora": _refused(_NO_LORA, value=False),
    "--lora-modules": _refused(_NO_LORA),
    "--speculative-config": _refused(_NO_DRAFTS),
    "--spec-method": _refused(_NO_DRAFTS),
    "--spec-model": _refused(_NO_DRAFTS),
    "--spec-tokens": _refused(_NO_DRAFTS),
    "--cpu-offload-gb": _refused("weights stay on the device; use a smaller model or --quantization fp8", "0", "0.0"),
    "--kv-transfer-config": _refused("the KV cache is not moved between servers"),
    "--chat-template": _refused("the model's own chat template is used; put another into its tokenizer_config.json"),
    "--generation-config": _refused("sampling parameters come from each request", "vllm"),
    "--override-generation-config": _refused("sampling parameters come from each request"),
    "--hf-overrides": _refused("edit the model's config.json"),
    "--download-dir": _refused("set HF_HUB_CACHE for hub models and HEADRACE_CACHE for the default model"),
    "--reasoning-parser": _refused("reasoning text is part of the answer"),
    "--stream-interval": _refused("each token is sent when it is sampled", "1"),
    "--max-num-active-seqs": _refused("--max-num-seqs is the limit"),
    "--enable-force-include-usage": _refused("clients request it with stream_options", value=False),
    "--return-tokens-as-token-ids": _refused("it is not supported", value=False),
    "--logprobs-mode": _refused("log-probabilities are the model's, before sampling parameters apply", "raw_logprobs"),
    "--response-role": _refused("the role of answers is always assistant", "assistant"),
    "--trust-request-chat-template": _refused("chat templates in requests are never run", value=False),
    "--enable-log-outputs": _refused("prompts and answers are never logged", value=False),
    "--collect-detailed-traces": _ignored("each span of --otlp-traces-endpoint has the times of queue and model"),
    "--custom-histogram-buckets": _refused("the buckets are vLLM's; metrics with headrace: names have finer ones"),
    "--enable-ssl-refresh": _refused("a new certificate needs a restart", value=False),
    "--ssl-ciphers": _refused("Python's defaults are used; a TLS proxy can use others"),
    "--uds": _refused("the server listens on --host and --port only"),
    "--ssl-ca-certs": _refused(
        "clients authenticate with keys, not certificates; a TLS proxy can require certificates"
    ),
    "--ssl-cert-reqs": _refused(
        "clients authenticate with keys, not certificates; a TLS proxy can require certificates"
    ),
    "--middleware": _refused("use a proxy in front of the server"),
    "--allow-credentials": _refused("there are no cookies; keys are sent in headers", value=False),
    "--allowed-methods": _refused("--allowed-origins is sufficient for browsers"),
    "--allowed-headers": _refused("--allowed-origins is sufficient for browsers"),
    # of TensorRT-LLM and its Triton backend
    "--batch-scheduler-policy": _refused("use --capacity-policy, which has the same values"),
    "--capacity-scheduler-policy": _refused("use --capacity-policy, which has the same values"),
    "--executor-static-batch-size": _refused("use --capacity-policy static_batch with --max-num-seqs"),
    "--max-tokens-in-paged-kv-cache": _refused(
        "use --num-gpu-blocks-override (in blocks of --block-size tokens) or --kv-cache-memory-bytes"
    ),
    "--kv-cache-free-gpu-mem-fraction": _refused(
        "use --gpu-memory-utilization, a share of all memory, weights included"
    ),
    "--kv-cache-free-gpu-memory-fraction": _refused(
        "use --gpu-memory-utilization, a share of all memory, weights included"
    ),
    "--enable-kv-cache-reuse": _ignored("it is the default; --no-enable-prefix-caching turns it off", value=False),
    "--max-batch-size": _refused("use --max-num-seqs"),
    "--max-num-tokens": _refused("use --max-num-batched-tokens"),
    "--max-seq-len": _refused("use --max-model-len"),
    "--max-beam-width": _ignored("the number of beams is a parameter of each request"),
}


def explanation(name: str) -> str | None:
    """Why there is no keyword argument of this name in Python; None if the name is not known."""
    other = OTHER_FLAGS.get("--" + name.replace("_", "-"))
    return None if other is None else re.sub(r"--(no-)?([a-z0-9-]+)", _argument, other.answer)


def _argument(flag: re.Match[str]) -> str:
    return flag[2].replace("-", "_") + ("=False" if flag[1] else "")
