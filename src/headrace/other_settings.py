"""Settings of vLLM (current and older versions) and TensorRT-LLM that Headrace does not have, and what to use instead.

One table for all fronts: flags of `serve` and `run`, keyword arguments of `LLM` and `AsyncEngine`, and TOML files. A
neutral value, one that asks for what Headrace does anyway, is accepted silently. A setting that would not change any
answer is ignored with one line. One that would is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.errors import ConfigError

Outcome = Literal["ignored", "refused"]
OFF = "false"  # the neutral value of most switches


@dataclass(frozen=True, slots=True)
class OtherFlag:
    outcome: Outcome
    answer: str  # what replaced it, or why it is not needed
    takes_value: bool = True
    neutral: tuple[str, ...] = ()  # values that match what Headrace does anyway, in lower case

    def message(self, name: str) -> str:
        return f"{name} is {self.outcome}: {self.answer}"

    def is_neutral(self, value: object) -> bool:
        """None is what Python programs pass for "not set"."""
        return value is None or str(value).lower() in self.neutral


def _ignored(answer: str, *neutral: str) -> OtherFlag:
    return OtherFlag("ignored", answer, True, neutral)


def _refused(answer: str, *neutral: str) -> OtherFlag:
    return OtherFlag("refused", answer, True, neutral)


def _ignored_switch(answer: str, *neutral: str) -> OtherFlag:
    return OtherFlag("ignored", answer, False, neutral or (OFF,))


def _refused_switch(answer: str) -> OtherFlag:
    return OtherFlag("refused", answer, False, (OFF,))


ALIASES = {  # vLLM's names for settings that Headrace has
    "data_parallel_size": ("-dp",),
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "shutdown_timeout_s": ("--shutdown-timeout",),
    "sse_keep_alive_interval_s": ("--sse-keep-alive-interval",),
    "kv_cache_memory_bytes": ("--kv-cache-memory",),
    "request_timeout_s": ("--request-timeout",),
}

_ONE_LAYOUT = (
    "a model is divided over the processes of one machine, by --tensor-parallel-size and --pipeline-parallel-size; "
    "--data-parallel-size starts several engines behind one address, and a job several workers"
)
_SEVERAL_ENGINES = "only 'headrace serve' and AsyncEngine have it; 'headrace run' runs several engines with --workers"
_NO_DRAFTS = "there is no speculative decoding yet"
_NO_LORA = "there are no LoRA adapters yet; merge the adapter into the model"

OTHER_FLAGS: dict[str, OtherFlag] = {
    # of older versions of vLLM
    "--scheduler-delay-factor": _ignored("--max-queue-delay-us sets the batching delay"),
    "--use-v2-block-manager": _ignored_switch("there is only one block manager"),
    "--swap-space": _ignored(
        "preempted sequences are recomputed, mostly from the prefix cache; nothing is swapped", "0", "0.0"
    ),
    "--num-scheduler-steps": _ignored("scheduling is always asynchronous: steps are submitted ahead of results", "1"),
    "--multi-step-stream-outputs": _ignored_switch(
        "scheduling is always asynchronous: steps are submitted ahead of results"
    ),
    "--preemption-mode": _ignored(
        "preempted sequences are recomputed; --capacity-policy guaranteed_no_evict avoids preemption", "recompute"
    ),
    "--max-seq-len-to-capture": _ignored("CUDA graphs cover all decode steps, and small steps with prefill"),
    "--max-context-len-to-capture": _ignored("CUDA graphs cover all decode steps, and small steps with prefill"),
    "--cuda-graph-sizes": _ignored("CUDA graphs are captured at start for a fixed series of sizes"),
    "--disable-async-output-proc": _ignored_switch("output is always processed on another thread than the engine's"),
    "--guided-decoding-backend": _ignored("llguidance is the only backend for structured output"),
    "--num-lookahead-slots": _ignored("blocks are allocated when they are needed"),
    "--disable-log-requests": _ignored_switch("it is the default; --enable-log-requests turns logging on"),
    "--disable-log-stats": _ignored_switch(
        "the log has one line a minute while there is work; statistics are on /metrics"
    ),
    "--disable-uvicorn-access-log": _ignored_switch("there is no access log without --enable-log-requests"),
    "--max-num-partial-prefills": _ignored("prompts share each step up to --max-num-batched-tokens"),
    "--max-long-partial-prefills": _ignored("prompts share each step up to --max-num-batched-tokens"),
    "--long-prefill-token-threshold": _ignored("prompts share each step up to --max-num-batched-tokens"),
    "--max-paddings": _ignored("steps have no padding"),
    "--disable-sliding-window": _refused_switch("a sliding window is part of the model"),
    "--speculative-model": _refused(_NO_DRAFTS),
    "--num-speculative-tokens": _refused(_NO_DRAFTS, "0"),
    "--rope-scaling": _refused("edit rope_scaling in the model's config.json"),
    "--rope-theta": _refused("edit rope_theta in the model's config.json"),
    "--engine-use-ray": _ignored_switch("the engine runs in its own process, without Ray"),
    "--worker-use-ray": _ignored_switch("the engine runs in its own process, without Ray"),
    "--disable-frontend-multiprocessing": _ignored_switch("the engine always runs in its own process"),
    # of current versions, not needed here
    "--async-scheduling": _ignored_switch(
        "scheduling is always asynchronous: steps are submitted ahead of results", "true"
    ),
    "--no-async-scheduling": _ignored_switch("scheduling is always asynchronous: steps are submitted ahead of results"),
    "--enforce-eager": _ignored_switch("CUDA graphs are always used on a GPU; answers are the same"),
    "--trust-remote-code": _ignored_switch("code from a model's repository is never run; supported families need none"),
    "--distributed-executor-backend": _refused(
        "ranks are processes of one machine, without Ray; a job has a cluster's machines with 'headrace run'",
        "mp",
        "uni",
    ),
    "--enable-server-load-tracking": _ignored_switch("/load is always available"),
    "--enable-tokenizer-info-endpoint": _ignored_switch("/tokenizer_info is always available"),
    "--h11-max-incomplete-event-size": _ignored("--max-header-bytes is the limit"),
    "--h11-max-header-count": _ignored("--max-num-headers is the limit"),
    "--disable-fastapi-docs": _ignored_switch("there is no documentation page, only /openapi.json"),
    "--uvicorn-log-level": _ignored("errors are logged to stderr; --enable-log-requests logs requests"),
    "--prefix-caching-hash-algo": _ignored("prefixes are compared token by token, not by a hash"),
    "--watermark": _ignored("one block in a hundred is kept free for running sequences when a request starts"),
    "--tokenizer-mode": _ignored("the fast tokenizer is always used", "auto"),
    "--performance-mode": _ignored(
        "batch sizes are chosen for the device; --max-num-seqs and --max-num-batched-tokens override them"
    ),
    "--scheduler-reserve-full-isl": _ignored_switch(
        "--capacity-policy decides how many blocks a request needs to start"
    ),
    "--compilation-config": _ignored("kernels are compiled and CUDA graphs captured at start"),
    "--structured-outputs-config": _ignored("llguidance is the only backend for structured output"),
    "--show-hidden-metrics-for-version": _ignored("older metric names are always on /metrics"),
    "--enable-prompt-tokens-details": _ignored_switch("the usage always includes them"),
    "--disable-access-log-for-endpoints": _ignored("there is no access log without --enable-log-requests"),
    "--profiler-config": _refused("use --profiler-dir DIR, which turns on /start_profile and /stop_profile"),
    "--max-log-len": _ignored("prompts and answers are never logged"),
    # of current versions, not supported
    "--data-parallel-size-local": _refused(_ONE_LAYOUT, "1"),
    "--data-parallel-backend": _ignored(_ONE_LAYOUT, "mp"),
    "--data-parallel-rank": _refused(_ONE_LAYOUT, "0"),
    "--decode-context-parallel-size": _refused(_ONE_LAYOUT, "1"),
    "-dcp": _refused(_ONE_LAYOUT, "1"),
    "--prefill-context-parallel-size": _refused(_ONE_LAYOUT, "1"),
    "-pcp": _refused(_ONE_LAYOUT, "1"),
    "--nnodes": _refused(_ONE_LAYOUT, "1"),
    "--node-rank": _refused(_ONE_LAYOUT, "0"),
    "--master-addr": _refused(_ONE_LAYOUT, "127.0.0.1", "localhost"),
    "--master-port": _ignored(_ONE_LAYOUT),
    "--headless": _refused_switch(_ONE_LAYOUT),
    "--enable-eplb": _refused_switch(_ONE_LAYOUT),
    "--enable-dbo": _refused_switch(_ONE_LAYOUT),
    "--disable-custom-all-reduce": _ignored_switch("all-reduces are those of NCCL"),
    "--max-parallel-loading-workers": _ignored("tensors are read by several threads, with bounded memory"),
    "--api-server-count": _refused("one process serves HTTP", "1"),
    "--enable-lora": _refused_switch(_NO_LORA),
    "--lora-modules": _refused(_NO_LORA),
    "--speculative-config": _refused(_NO_DRAFTS),
    "--spec-method": _refused(_NO_DRAFTS),
    "--spec-model": _refused(_NO_DRAFTS),
    "--spec-tokens": _refused(_NO_DRAFTS, "0"),
    "--cpu-offload-gb": _refused("weights stay on the device; use a smaller model or --quantization fp8", "0", "0.0"),
    "--kv-transfer-config": _refused("the KV cache is not moved between servers"),
    "--chat-template": _refused("the model's own chat template is used; put another into its tokenizer_config.json"),
    "--generation-config": _refused("sampling parameters come from each request", "vllm"),
    "--override-generation-config": _refused("sampling parameters come from each request"),
    "--hf-overrides": _refused("edit the model's config.json"),
    "--download-dir": _refused("set HF_HUB_CACHE for hub models and HEADRACE_CACHE for the default model"),
    "--stream-interval": _refused("each token is sent when it is sampled", "1"),
    "--max-num-active-seqs": _refused("--max-num-seqs is the limit"),
    "--enable-force-include-usage": _refused_switch("clients request it with stream_options"),
    "--return-tokens-as-token-ids": _refused_switch("it is not supported"),
    "--logprobs-mode": _refused("log-probabilities are the model's, before sampling parameters apply", "raw_logprobs"),
    "--response-role": _refused("the role of answers is always assistant", "assistant"),
    "--trust-request-chat-template": _refused_switch("chat templates in requests are never run"),
    "--enable-log-outputs": _refused_switch("prompts and answers are never logged"),
    "--collect-detailed-traces": _ignored("each span of --otlp-traces-endpoint has the times of queue and model"),
    "--custom-histogram-buckets": _refused("the buckets are vLLM's; metrics with headrace: names have finer ones"),
    "--enable-ssl-refresh": _refused_switch("a new certificate needs a restart"),
    "--ssl-ciphers": _refused("Python's defaults are used; a TLS proxy can use others"),
    "--uds": _refused("the server listens on --host and --port only"),
    "--ssl-ca-certs": _refused(
        "clients authenticate with keys, not certificates; a TLS proxy can require certificates"
    ),
    "--ssl-cert-reqs": _refused(
        "clients authenticate with keys, not certificates; a TLS proxy can require certificates"
    ),
    "--middleware": _refused("use a proxy in front of the server"),
    "--allow-credentials": _refused_switch("there are no cookies; keys are sent in headers"),
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
    "--enable-kv-cache-reuse": _ignored_switch("it is the default; --no-enable-prefix-caching turns it off", "true"),
    "--max-batch-size": _refused("use --max-num-seqs"),
    "--max-num-tokens": _refused("use --max-num-batched-tokens"),
    "--max-seq-len": _refused("use --max-model-len"),
    "--max-beam-width": _ignored("the number of beams is a parameter of each request", "1"),
    "--tp-size": _refused("use --tensor-parallel-size", "1"),
    "--pp-size": _refused("use --pipeline-parallel-size", "1"),
    "--ep-size": _refused("use --enable-expert-parallel, over the ranks of --tensor-parallel-size", "1"),
    "--cp-size": _refused(_ONE_LAYOUT, "1"),
    "--context-parallel-size": _refused(_ONE_LAYOUT, "1"),
    "--moe-tensor-parallel-size": _refused(_ONE_LAYOUT, "1", "-1"),
    "--moe-expert-parallel-size": _refused(_ONE_LAYOUT, "1", "-1"),
    "--moe-cluster-parallel-size": _refused(_ONE_LAYOUT, "1", "-1"),
    "--enable-attention-dp": _refused_switch(_ONE_LAYOUT),
    "--gpus-per-node": _ignored("the engine takes the first visible GPU; a job takes one worker per GPU", "1"),
}

# Settings of vLLM that only the server has.
OF_THE_SERVER: dict[str, OtherFlag] = {
    "--data-parallel-size": _refused(_SEVERAL_ENGINES, "1"),
    "-dp": _refused(_SEVERAL_ENGINES, "1"),
}


@dataclass(frozen=True, slots=True)
class OtherSetting:
    """A setting of another engine, as it was given to one of the fronts."""

    other: OtherFlag
    value: object

    @property
    def is_neutral(self) -> bool:
        return self.other.is_neutral(self.value)


def find_other(name: str, value: object = "") -> OtherSetting | None:
    """The row of a flag or of a keyword argument; None if no other engine has it. Switches may be negated: by a name
    that starts with `no`, or by the value False."""
    flag = flag_of(name)
    negated = "--no-" + flag.removeprefix("--")
    if str(value).lower() == OFF and negated in OTHER_FLAGS:
        return OtherSetting(OTHER_FLAGS[negated], True)
    other = OTHER_FLAGS.get(flag) or OF_THE_SERVER.get(flag)
    if other is not None:
        return OtherSetting(other, value)
    switch = OTHER_FLAGS.get("--" + flag.removeprefix("--no-"))
    return None if switch is None or switch.takes_value else OtherSetting(switch, OFF)


def flag_of(name: str) -> str:
    """Short flags are as given: `-tp`."""
    is_short = name.startswith("-") and not name.startswith("--")
    return name if is_short else "--" + name.removeprefix("--").replace("_", "-")


def field_of_alias(name: str) -> str | None:
    """The setting that vLLM calls `name`."""
    return next((field for field, flags in ALIASES.items() if flag_of(name) in flags), None)


def without_other_settings(
    settings: Mapping[str, Any], known: Collection[str], note: Callable[[str], None]
) -> dict[str, Any]:
    """Keyword arguments without those of other engines. `note` gets one line for each that is ignored and not neutral;
    one that is refused raises a ConfigError. Names that nobody knows are kept."""
    kept = {}
    for given, value in settings.items():
        name = given if given in known else field_of_alias(given) or given
        if name not in known and (found := find_other(name, value)) is not None:
            take_argument(name, found, note)
        elif name in kept or (name != given and name in settings):
            raise ConfigError(f"{name} is given twice: {given} is another name for it")
        else:
            kept[name] = value
    return kept


def take_argument(name: str, found: OtherSetting, note: Callable[[str], None]) -> None:
    """Notes or refuses an argument of `LLM` or a key of its file, with the names that Python programs use."""
    if found.is_neutral:
        return
    other = replace(found.other, answer=as_arguments(found.other.answer))
    message = other.message(f"{name}={found.value!r}") + accepted(other)
    if other.outcome == "refused":
        raise ConfigError(message)
    note(message)


def accepted(other: OtherFlag) -> str:
    """The neutral values, for a message that refuses another one."""
    if not other.neutral or not other.takes_value or other.outcome != "refused":
        return ""
    return f" (only {' or '.join(other.neutral)} is accepted)"


def explanation(name: str) -> str | None:
    """Why there is no keyword argument of this name in Python; None if the name is not known."""
    flag = "--" + name.replace("_", "-")
    other = OTHER_FLAGS.get(flag) or OF_THE_SERVER.get(flag)
    return None if other is None else as_arguments(other.answer)


def as_arguments(text: str) -> str:
    """Flags in `text` as keyword arguments."""
    return re.sub(r"--(no-)?([a-z0-9-]+)", _argument, text)


def _argument(flag: re.Match[str]) -> str:
    return flag[2].replace("-", "_") + ("=False" if flag[1] else "")
