"""Every series of the server, each stated once, with the names that dashboards for vLLM look for.

docs/metrics.md is made from this table (`python -m headrace.monitor.page`).
"""

from __future__ import annotations

from headrace.engine.core import STEP_SECONDS_BOUNDS
from headrace.monitor.series import Alias, Series
from headrace.sched.stats import BATCH_TOKENS_BOUNDS, TOKEN_GAP_BOUNDS

# vLLM's bounds. Where ours are finer, its twin shows only these.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_GAP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_PHASE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FINE_PHASE = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *_PHASE)


def _phase(name: str, help: str, *aliases: str, alert: str = "") -> Series:
    shown = tuple(Alias(alias, bounds=_PHASE) for alias in aliases)
    return Series(f"headrace:{name}", "histogram", help, bounds=_FINE_PHASE, aliases=shown, alert=alert)


def _tokens(name: str, help: str) -> Series:
    return Series(f"headrace:{name}", "histogram", help, aliases=(Alias(f"vllm:{name}"),))


FIRST_TOKEN_SECONDS = Series(
    "headrace:time_to_first_token_seconds",
    "histogram",
    "From the arrival of a request to its first token in the engine, queueing included.",
    bounds=_FIRST_TOKEN,
    aliases=(Alias("vllm:time_to_first_token_seconds"),),
    alert="p95 over 2 s for 2 minutes (others: p99 over 0.5 s; p95 over 10 s for 15 minutes)",
)
TOKEN_GAP_SECONDS = Series(
    "headrace:inter_token_latency_seconds",
    "histogram",
    "Between a token of an answer and the one before it, as they leave the engine; one value a token.",
    bounds=TOKEN_GAP_BOUNDS,
    aliases=(
        Alias("vllm:inter_token_latency_seconds", bounds=_TOKEN_GAP),
        Alias("vllm:time_per_output_token_seconds", bounds=_TOKEN_GAP),
    ),
    alert="p95 over twice its usual value",
)
REQUEST_TOKEN_SECONDS = Series(
    "headrace:request_time_per_output_token_seconds",
    "histogram",
    "Mean time of a request's tokens after its first; one value a request.",
    bounds=TOKEN_GAP_BOUNDS,
    aliases=(Alias("vllm:request_time_per_output_token_seconds", bounds=_TOKEN_GAP),),
)
END_TO_END_SECONDS = _phase(
    "e2e_request_latency_seconds",
    "From the arrival of a request to its end.",
    "vllm:e2e_request_latency_seconds",
    alert="p95 over twice its usual value",
)
QUEUE_SECONDS = _phase(
    "request_queue_time_seconds",
    "From the arrival of a request to the first step that computes a part of it.",
    "vllm:request_queue_time_seconds",
    "vllm:time_in_queue_requests",
    alert="p95 over 2 s for 3 minutes",
)
PREFILL_SECONDS = _phase(
    "request_prefill_time_seconds",
    "From a request's first step to its first token.",
    "vllm:request_prefill_time_seconds",
)
DECODE_SECONDS = _phase(
    "request_decode_time_seconds", "From a request's first token to its last.", "vllm:request_decode_time_seconds"
)
INFERENCE_SECONDS = _phase(
    "request_inference_time_seconds",
    "From a request's first step to its last token.",
    "vllm:request_inference_time_seconds",
)
PROMPT_LENGTHS = _tokens("request_prompt_tokens", "Prompt tokens of a finished request.")
ANSWER_LENGTHS = _tokens("request_generation_tokens", "Generated tokens of a finished request, of all its answers.")
LONGEST_ANSWERS = _tokens("request_max_num_generation_tokens", "Tokens of the longest answer to a finished request.")
COMPUTED_LENGTHS = _tokens(
    "request_prefill_kv_computed_tokens", "Prompt tokens of a finished request that the prefix cache did not have."
)
ASKED_LENGTHS = _tokens("request_params_max_tokens", "max_tokens of the requests that came in, where they gave it.")
ASKED_ANSWERS = Series(
    "headrace:request_params_n",
    "histogram",
    "n of the requests that came in.",
    bounds=(1, 2, 5, 10, 20),
    aliases=(Alias("vllm:request_params_n"),),
)
REQUEST_PREEMPTIONS = Series(
    "headrace:request_num_preemptions",
    "histogram",
    "How often a finished request was preempted.",
    bounds=(1, 2, 3, 4, 5, 10, 20),
    aliases=(Alias("vllm:request_num_preemptions"),),
)
RECEIVED = Series("headrace:requests_received", "counter", "Requests that came in and were understood.")
FINISHED = Series(
    "headrace:requests_finished",
    "counter",
    "Requests that ended, by how: stop, length, abort (the client left), error.",
    labels=("reason",),
    aliases=(Alias("vllm:request_success", labels={"reason": "finished_reason"}),),
    alert="rate of `abort` over 0.01/s; `error` over 1 % of all",
)
REFUSED = Series(
    "headrace:requests_refused",
    "counter",
    "Requests that were not taken on, by why.",
    labels=("reason",),
    aliases=(
        Alias(
            "vllm:admission_rejections",
            values={"queue_full": "max_num_queued_reqs", "queue_tokens": "max_num_queued_tokens"},
            base_labels=("model_name",),
        ),
    ),
    alert="rate of `queue_full` or `queue_tokens` above 0",
)
ANSWERED = Series(
    "headrace:http_requests",
    "counter",
    "HTTP answers, by route, method and class of status (2xx, 4xx, 5xx).",
    labels=("handler", "method", "status"),
    aliases=(Alias("http_requests", base_labels=()),),
    alert="5xx over 1 % of all",
)
RUNNING = Series(
    "headrace:num_requests_running",
    "gauge",
    "Answers in the making (a request with n=3 has three).",
    aliases=(Alias("vllm:num_requests_running"), Alias("vllm:num_requests_swapped", constant=0.0)),
    alert="absent for 5 minutes",
)
WAITING = Series(
    "headrace:num_requests_waiting",
    "gauge",
    "Answers that wait for their first step, or for their next after a preemption.",
    aliases=(Alias("vllm:num_requests_waiting"),),
    alert="over 50 for 5 minutes (others: 5, 10, 100). While KV use is low, `max_num_seqs` is the bound, not memory",
)
WAITING_BY_REASON = Series(
    "headrace:num_requests_waiting_by_reason",
    "gauge",
    "The same, by what they wait for. Here it is always room in the batch or the cache.",
    labels=("reason",),
    aliases=(Alias("vllm:num_requests_waiting_by_reason"),),
)
KV_USE = Series(
    "headrace:kv_cache_usage",
    "gauge",
    "Share of the cache's blocks that running sequences hold, 0 to 1.",
    aliases=(
        Alias("vllm:kv_cache_usage_perc"),
        Alias("vllm:gpu_cache_usage_perc"),
        Alias("vllm:cpu_cache_usage_perc", constant=0.0),
    ),
    alert="over 0.9 for 5 minutes (it is a share: `> 90` never fires); better: over 0.95 while preemptions go on",
)
PREFIX_QUERIES = Series(
    "headrace:prefix_cache_queries",
    "counter",
    "Prompt tokens that were looked up in the prefix cache.",
    aliases=(Alias("vllm:prefix_cache_queries"), Alias("vllm:gpu_prefix_cache_queries")),
)
PREFIX_HITS = Series(
    "headrace:prefix_cache_hits",
    "counter",
    "Those of them that it had.",
    aliases=(
        Alias("vllm:prefix_cache_hits"),
        Alias("vllm:gpu_prefix_cache_hits"),
        Alias("vllm:prompt_tokens_cached"),
    ),
    alert="under half of the queries, where shared prefixes are expected",
)
PREEMPTIONS = Series(
    "headrace:num_preemptions",
    "counter",
    "Times that a running sequence gave its place back for want of cache.",
    aliases=(Alias("vllm:num_preemptions"),),
    alert="rate over 1/s (others: 0.1/s)",
)
PROMPT_TOKENS = Series(
    "headrace:prompt_tokens",
    "counter",
    "Prompt tokens of requests that started, cached ones included.",
    aliases=(Alias("vllm:prompt_tokens"),),
)
PROMPT_TOKENS_BY_SOURCE = Series(
    "headrace:prompt_tokens_by_source",
    "counter",
    "The same, by where their keys and values came from.",
    labels=("source",),
    aliases=(Alias("vllm:prompt_tokens_by_source"),),
)
GENERATED_TOKENS = Series(
    "headrace:generation_tokens",
    "counter",
    "Tokens generated.",
    aliases=(Alias("vllm:generation_tokens"),),
    alert="rate 0 for a minute while requests run (without the second half it fires when idle)",
)
RECOMPUTED_TOKENS = Series("headrace:recomputed_tokens", "counter", "Tokens computed again after a preemption.")
PROMPT_RATE = Series(
    "headrace:prompt_tokens_per_second",
    "gauge",
    "Prompt tokens a second, over the last ten seconds or since the scrape before them.",
    aliases=(Alias("vllm:avg_prompt_throughput_toks_per_s"),),
)
GENERATION_RATE = Series(
    "headrace:generation_tokens_per_second",
    "gauge",
    "Generated tokens a second, over the same time.",
    aliases=(Alias("vllm:avg_generation_throughput_toks_per_s"),),
)
STEPS = Series("headrace:steps", "counter", "Steps that were planned.")
BATCH_TOKENS = Series(
    "headrace:batch_tokens",
    "histogram",
    "Tokens that a step computes, of prompts and answers.",
    bounds=BATCH_TOKENS_BOUNDS,
    aliases=(Alias("vllm:iteration_tokens_total"),),
)
STEP_SECONDS = Series(
    "headrace:step_seconds",
    "histogram",
    "A turn of the engine's loop: plan, submit, wait for an earlier step, take it in.",
    bounds=STEP_SECONDS_BOUNDS,
)
STEP_HOST_SECONDS = Series(
    "headrace:step_host_seconds",
    "histogram",
    "The host's part of a turn: all but the wait.",
    bounds=STEP_SECONDS_BOUNDS,
)
BUSY_SECONDS = Series(
    "headrace:engine_seconds",
    "counter",
    "Time of the engine's loop: on the host, and waiting for the device.",
    labels=("part",),
)
OLDEST_WAIT = Series(
    "headrace:oldest_waiting_seconds",
    "gauge",
    "How long the request has waited that waits longest for its first token.",
    alert="over 30 s for a minute",
)
LOOP_LAG = Series(
    "headrace:event_loop_lag_seconds",
    "histogram",
    "How much later than due the event loop of the HTTP front came to its work; looked at once a second.",
    bounds=STEP_SECONDS_BOUNDS,
    alert="p95 over 0.1 s",
)
RESTARTS = Series(
    "headrace:engine_restarts",
    "counter",
    "Times that a dead or hung engine was started again.",
    alert="any",
)
ENGINE_UP = Series(
    "headrace:engine_up", "gauge", "1 while the engine answers, 0 while it does not.", alert="0 for a minute"
)
SLEEP_STATE = Series(
    "headrace:engine_sleep_state",
    "gauge",
    "1 for the state that the engine is in, which is always `awake`; absent while it is down.",
    labels=("sleep_state",),
    aliases=(Alias("vllm:engine_sleep_state"),),
)
CACHE_INFO = Series(
    "headrace:cache_config_info",
    "gauge",
    "Always 1; its labels are the cache's settings.",
    labels=("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    aliases=(Alias("vllm:cache_config_info", base_labels=("engine",)),),
)
CONFIG_INFO = Series(
    "headrace:config_info",
    "gauge",
    "Always 1; its labels are the engine's settings.",
    labels=(
        *("device", "dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("enable_chunked_prefill", "capacity_policy", "queue_policy"),
    ),
)
BUILD_INFO = Series("headrace:build_info", "gauge", "Always 1; its label is Headrace's version.", labels=("version",))

SERIES: tuple[Series, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Series))
