"""Flags of `vllm serve`, of today and of years ago, that Headrace does not have: what to use instead.

A flag whose absence changes no answer is left out with one line. One that would change what the server does is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError

Outcome = Literal["left out", "refused"]


@dataclass(frozen=True, slots=True)
class OtherFlag:
    outcome: Outcome
    answer: str  # what replaced it, or why it is not needed
    takes_value: bool = True
    neutral: tuple[str, ...] = ()  # values that ask for what is the case anyway; accepted without a word

    def shown(self, flag: str) -> str:
        return f"{flag} is {self.outcome}: {self.answer}"


def _skip(answer: str, *, value: bool = True) -> OtherFlag:
    return OtherFlag("left out", answer, value)


def _no(answer: str, *neutral: str, value: bool = True) -> OtherFlag:
    return OtherFlag("refused", answer, value, neutral)


_ONE_DEVICE = "a server runs on one device; start one for each and balance between them"
_NO_DRAFTS = "there is no speculative decoding yet"
_NO_LORA = "there are no LoRA adapters yet; merge the adapter into the model"

OTHER_FLAGS: dict[str, OtherFlag] = {
    # of older versions
    "--scheduler-delay-factor": _skip("--max-queue-delay-us lets requests wait for company"),
    "--use-v2-block-manager": _skip("there is one block manager", value=False),
    "--swap-space": _skip("what is preempted is computed again, mostly from the prefix cache; nothing is swapped"),
    "--num-scheduler-steps": _skip("steps are always submitted ahead of the results"),
    "--multi-step-stream-outputs": _skip("steps are always submitted ahead of the results", value=False),
    "--preemption-mode": _skip("what is preempted is computed again; --capacity-policy guaranteed_no_evict avoids it"),
    "--max-seq-len-to-capture": _skip(
        "CUDA graphs cover every step of one token a sequence, and small steps with prompts"
    ),
    "--max-context-len-to-capture": _skip(
        "CUDA graphs cover every step of one token a sequence, and small steps with prompts"
    ),
    "--cuda-graph-sizes": _skip("a ladder of CUDA graphs is captured at start"),
    "--disable-async-output-proc": _skip("answers are made on another thread than steps, always", value=False),
    "--guided-decoding-backend": _skip("llguidance is the one backend of structured output"),
    "--num-lookahead-slots": _skip("blocks are taken as they are needed"),
    "--disable-log-requests": _skip("it is the default; --enable-log-requests is the opposite", value=False),
    "--disable-log-stats": _skip("figures are on /metrics and not in the log", value=False),
    "--disable-uvicorn-access-log": _skip("there is no access log unless --enable-log-requests", value=False),
    "--max-num-partial-prefills": _skip("prompts share steps within --max-num-batched-tokens"),
    "--max-long-partial-prefills": _skip("prompts share steps within --max-num-batched-tokens"),
    "--long-prefill-token-threshold": _skip("prompts share steps within --max-num-batched-tokens"),
    "--max-paddings": _skip("steps have no padding"),
    "--disable-sliding-window": _no("a sliding window is part of the model", value=False),
    "--speculative-model": _no(_NO_DRAFTS),
    "--num-speculative-tokens": _no(_NO_DRAFTS),
    "--rope-scaling": _no("change rope_scaling in the model's config.json"),
    "--rope-theta": _no("change rope_theta in the model's config.json"),
    "--engine-use-ray": _skip("the engine has a process of its own, without Ray", value=False),
    "--worker-use-ray": _skip("the engine has a process of its own, without Ray", value=False),
    "--disable-frontend-multiprocessing": _skip("the engine has a process of its own, always", value=False),
    # of today, not needed here
    "--async-scheduling": _skip("steps are always submitted ahead of the results", value=False),
    "--no-async-scheduling": _skip("steps are always submitted ahead of the results", value=False),
    "--enforce-eager": _skip("CUDA graphs are part of how steps run; answers are the same", value=False),
    "--trust-remote-code": _skip("code of a model's repository is never run; known families need none", value=False),
    "--distributed-executor-backend": _skip("the engine has a process of its own"),
    "--enable-server-load-tracking": _skip("/load is always there", value=False),
    "--enable-tokenizer-info-endpoint": _skip("/tokenizer_info is always there", value=False),
    "--h11-max-incomplete-event-size": _skip("--max-header-bytes is the limit"),
    "--h11-max-header-count": _skip("--max-num-headers is the limit"),
    "--disable-fastapi-docs": _skip("there is no page of documentation, only /openapi.json", value=False),
    "--uvicorn-log-level": _skip("errors go to stderr; --enable-log-requests logs requests"),
    "--prefix-caching-hash-algo": _skip("prefixes are compared in full, not by a hash"),
    "--watermark": _skip("admission leaves one block in a hundred for growth"),
    "--tokenizer-mode": _skip("the tokenizer is always the fast one"),
    "--performance-mode": _skip(
        "batches are chosen for the device; --max-num-seqs and --max-num-batched-tokens set them"
    ),
    "--scheduler-reserve-full-isl": _skip("--capacity-policy says what a request needs to start", value=False),
    "--compilation-config": _skip("kernels and CUDA graphs are made at start"),
    "--structured-outputs-config": _skip("llguidance is the one backend of structured output"),
    "--show-hidden-metrics-for-version": _skip("older names are always on /metrics"),
    "--enable-prompt-tokens-details": _skip("the usage always has them", value=False),
    "--disable-access-log-for-endpoints": _skip("there is no access log unless --enable-log-requests"),
    "--max-log-len": _skip("no text is ever logged"),
    # of today, not there yet
    "--tensor-parallel-size": _no(_ONE_DEVICE, "1"),
    "-tp": _no(_ONE_DEVICE, "1"),
    "--pipeline-parallel-size": _no(_ONE_DEVICE, "1"),
    "-pp": _no(_ONE_DEVICE, "1"),
    "--data-parallel-size": _no(_ONE_DEVICE, "1"),
    "-dp": _no(_ONE_DEVICE, "1"),
    "--enable-expert-parallel": _no(_ONE_DEVICE, value=False),
    "--api-server-count": _no("one process answers HTTP", "1"),
    "--enable-lora": _no(_NO_LORA, value=False),
    "--lora-modules": _no(_NO_LORA),
    "--speculative-config": _no(_NO_DRAFTS),
    "--spec-method": _no(_NO_DRAFTS),
    "--spec-model": _no(_NO_DRAFTS),
    "--spec-tokens": _no(_NO_DRAFTS),
    "--cpu-offload-gb": _no("weights stay on the device; choose a smaller model or --quantization fp8", "0", "0.0"),
    "--kv-transfer-config": _no("the KV cache is not moved between servers"),
    "--chat-template": _no("the model's own chat template is used; put another into its tokenizer_config.json"),
    "--generation-config": _no("requests bring their own parameters", "vllm"),
    "--override-generation-config": _no("requests bring their own parameters"),
    "--hf-overrides": _no("change the model's config.json"),
    "--download-dir": _no("HF_HUB_CACHE is where hub models are kept, HEADRACE_CACHE the embedded one"),
    "--reasoning-parser": _no("reasoning stays part of the answer's text"),
    "--stream-interval": _no("tokens are sent as they come", "1"),
    "--max-num-active-seqs": _no("--max-num-seqs is the cap"),
    "--enable-force-include-usage": _no("clients ask for it with stream_options", value=False),
    "--return-tokens-as-token-ids": _no("it is not supported", value=False),
    "--logprobs-mode": _no("log-probabilities are the model's, before sampling changes them", "raw_logprobs"),
    "--response-role": _no("answers are the assistant's", "assistant"),
    "--trust-request-chat-template": _no("templates of requests are never run", value=False),
    "--enable-log-outputs": _no("no text is ever logged", value=False),
    "--otlp-traces-endpoint": _no("there are no traces; figures are on /metrics"),
    "--custom-histogram-buckets": _no("the buckets are vLLM's, and finer ones under headrace: names"),
    "--enable-ssl-refresh": _no("a new certificate needs a restart", value=False),
    "--ssl-ciphers": _no("Python's choice is used; a proxy can make another"),
    "--uds": _no("it listens on --host and --port"),
    "--ssl-ca-certs": _no("clients show keys and not certificates; a proxy can ask for certificates"),
    "--ssl-cert-reqs": _no("clients show keys and not certificates; a proxy can ask for certificates"),
    "--middleware": _no("put a proxy before the server"),
    "--allow-credentials": _no("there are no cookies; keys come in headers", value=False),
    "--allowed-methods": _no("--allowed-origins is all that browsers need"),
    "--allowed-headers": _no("--allowed-origins is all that browsers need"),
}

ALIASES = {  # other names of fields that Headrace has
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "shutdown_timeout_s": ("--shutdown-timeout",),
    "sse_keep_alive_interval_s": ("--sse-keep-alive-interval",),
    "kv_cache_memory_bytes": ("--kv-cache-memory",),
    "request_timeout_s": ("--request-timeout",),
}


def without_other_flags(arguments: Sequence[str], tell: Callable[[str], None]) -> list[str]:
    """The command line without the flags above, each told of in one line; a refused one is a ConfigError."""
    kept: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        flag, has_value, value = argument.partition("=")
        other = OTHER_FLAGS.get(flag.replace("_", "-") if flag.startswith("--") else flag)
        if other is None:
            kept.append(argument)
            continue
        if other.takes_value and not has_value and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        judge(flag, other, value, tell)
    return kept


def judge(flag: str, other: OtherFlag, value: str, tell: Callable[[str], None]) -> None:
    if value and value in other.neutral:
        return
    if other.outcome == "refused":
        but = f" (only {' or '.join(other.neutral)} is accepted)" if other.neutral else ""
        raise ConfigError(other.shown(flag) + but)
    tell(other.shown(flag))


def table() -> str:
    """As Markdown, which docs/serving-operations.md holds."""
    head = "| flag of vLLM | here | |\n| --- | --- | --- |\n"
    return head + "".join(
        f"| `{flag}` | {other.outcome} | {other.answer}{_but(other)} |\n" for flag, other in OTHER_FLAGS.items()
    )


def _but(other: OtherFlag) -> str:
    return f" ({' or '.join(other.neutral)} is accepted)" if other.neutral else ""
