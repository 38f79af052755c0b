"""Declares every metric of the server once, with the vLLM names under which it is exported too.

To add a metric: declare a `Series` here, then count into it in `metrics.py` (events of requests) or `engine_counts.py`
(counters of the engine). docs/metrics.md is generated from this table: `python -m headrace.monitor.page`.
"""

from __future__ import annotations

from headrace.engine.core import STEP_SECONDS_BOUNDS
from headrace.monitor.series import Alias, Scope, Series
from headrace.sched.stats import BATCH_TOKENS_BOUNDS, TOKEN_GAP_BOUNDS

# Bucket bounds of vLLM. Where ours are finer, the alias exports only these.
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

# The routes that run the model, in the label `handler`.
GENERATING_HANDLERS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed"),
    *("/v1/chat/completions/batch", "/invocations"),
    *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/pooling"),
)


def _phase(name: str, help: str, *aliases: str, alert: str = "") -> Series:
    shown = tuple(Alias(alias, bounds=_PHASE) for alias in aliases)
    return Series(f"headrace:{name}", "histogram", help, bounds=_FINE_PHASE, aliases=shown, alert=alert)


def _tokens(name: str, help: str, scope: Scope = "engine") -> Series:
    return Series(f"headrace:{name}", "histogram", help, aliases=(Alias(f"vllm:{name}"),), scope=scope)


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
    "Time between two consecutive tokens of an answer as they leave the engine; one observation per token.",
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
    "Mean time per output token after the first; one observation per request.",
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
    "From the arrival of a request to the first step that computes any of its tokens.",
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
    "request_prefill_kv_computed_tokens",
    "Prompt tokens of a finished request that were computed, not found in the prefix cache.",
)
ASKED_LENGTHS = _tokens("request_params_max_tokens", "max_tokens of received requests that set it.", "server")
ASKED_ANSWERS = Series(
    "headrace:request_params_n",
    "histogram",
    "n of received requests.",
    bounds=(1, 2, 5, 10, 20),
    aliases=(Alias("vllm:request_params_n"),),
    scope="server",
)
REQUEST_PREEMPTIONS = Series(
    "headrace:request_num_preemptions",
    "histogram",
    "How often a finished request was preempted.",
    bounds=(1, 2, 3, 4, 5, 10, 20),
    aliases=(Alias("vllm:request_num_preemptions"),),
)
RECEIVED = Series("headrace:requests_received", "counter", "Requests received and parsed.", scope="server")
FINISHED = Series(
    "headrace:requests_finished",
    "counter",
    "Requests that ended, by reason: stop, length, abort (the client disconnected), error.",
    labels=("reason",),
    aliases=(Alias("vllm:request_success", labels={"reason": "finished_reason"}),),
    alert="rate of `abort` over 0.01/s; `error` over 1 % of all",
)
REFUSED = Series(
    "headrace:requests_refused",
    "counter",
    "Requests that were refused, by reason.",
    labels=("reason",),
    aliases=(
        Alias(
            "vllm:admission_rejections",
            values={"queue_full": "max_num_queued_reqs", "queue_tokens": "max_num_queued_tokens"},
            base_labels=("model_name",),
        ),
    ),
    scope="server",
)
ANSWERED = Series(
    "headrace:http_requests",
    "counter",
    "HTTP responses, by route, method and status class (2xx, 4xx, 5xx).",
    labels=("handler", "method", "status"),
    aliases=(Alias("http_requests", base_labels=()),),
    alert="5xx over 1 % of all",
    scope="server",
)
HTTP_ERRORS = Series(
    "headrace:http_errors",
    "counter",
    "HTTP responses with a status of 500 or more, refusals (503) excepted, of the routes that run the model.",
    labels=("handler",),
    scope="server",
)
RUNNING = Series(
    "headrace:num_requests_running",
    "gauge",
    "Sequences running (a request with n=3 has three).",
    aliases=(Alias("vllm:num_requests_running"), Alias("vllm:num_requests_swapped", constant=0.0)),
    alert="absent for 5 minutes",
)
WAITING = Series(
    "headrace:num_requests_waiting",
    "gauge",
    "Sequences waiting for their first step, or for the next one after a preemption.",
    aliases=(Alias("vllm:num_requests_waiting"),),
    alert="over 50 for 5 minutes (others: 5, 10, 100). While KV use is low, `max_num_seqs` is the limit, not memory",
)
REPLICAS_NEEDED = Series(
    "headrace:replicas_needed",
    "gauge",
    "Servers like this one that its load needs: running and waiting sequences against 0.8 x max_num_seqs, a fraction.",
    scope="server",
)
WAITING_BY_REASON = Series(
    "headrace:num_requests_waiting_by_reason",
    "gauge",
    "The same, by what they wait for: always a free slot or KV cache blocks here.",
    labels=("reason",),
    aliases=(Alias("vllm:num_requests_waiting_by_reason"),),
)
KV_USE = Series(
    "headrace:kv_cache_usage",
    "gauge",
    "Share of KV cache blocks held by running sequences, 0 to 1.",
    aliases=(
        Alias("vllm:kv_cache_usage_perc"),
        Alias("vllm:gpu_cache_usage_perc"),
        Alias("vllm:cpu_cache_usage_perc", constant=0.0),
    ),
    alert="over 0.9 for 5 minutes (it is a share: `> 90` never fires); better: over 0.95 while there are preemptions",
    over_engines="max",
)
PREFIX_QUERIES = Series(
    "headrace:prefix_cache_queries",
    "counter",
    "Prompt tokens looked up in the prefix cache.",
    aliases=(Alias("vllm:prefix_cache_queries"), Alias("vllm:gpu_prefix_cache_queries")),
)
PREFIX_HITS = Series(
    "headrace:prefix_cache_hits",
    "counter",
    "Prompt tokens found in the prefix cache, in its tiers too.",
    aliases=(
        Alias("vllm:prefix_cache_hits"),
        Alias("vllm:gpu_prefix_cache_hits"),
        Alias("vllm:prompt_tokens_cached"),
    ),
    alert="under half of the queries, where shared prefixes are expected",
)
EVICTED_TOKENS = Series(
    "headrace:evicted_tokens",
    "counter",
    "Tokens of cached prefixes that were evicted from the KV cache; with tiers, most of them are kept there.",
)
TIER_QUERIES = Series(
    "headrace:external_prefix_cache_queries",
    "counter",
    "Prompt tokens that the KV cache did not have, looked up in the tiers (host memory, disk); 0 without tiers.",
    aliases=(Alias("vllm:external_prefix_cache_queries"),),
)
TIER_HITS = Series(
    "headrace:external_prefix_cache_hits",
    "counter",
    "Prompt tokens found in the tiers; `headrace:prefix_cache_hits` contains them.",
    aliases=(Alias("vllm:external_prefix_cache_hits"),),
)
TIER_BLOCKS_LOADED = Series(
    "headrace:kv_offload_loaded_blocks",
    "counter",
    "Blocks that came back to the KV cache, by the tier that had them: host or disk.",
    labels=("tier",),
)
TIER_BYTES = Series(
    "headrace:kv_offload_bytes",
    "counter",
    "Bytes copied between the KV cache and the host tier (`GPU_to_CPU`, `CPU_to_GPU`, on a CPU too), and between the "
    "host tier and the disk (`CPU_to_disk`, `disk_to_CPU`).",
    labels=("transfer_type",),
    aliases=(Alias("vllm:kv_offload_total_bytes"),),
)
TIER_DROPPED = Series(
    "headrace:kv_offload_dropped_blocks",
    "counter",
    "Blocks that a tier did not keep, by reason: host_busy, disk_write (evicted before it was written, or disk full), "
    "disk_read (missing or damaged file).",
    labels=("reason",),
)
TIER_USE = Series(
    "headrace:kv_offload_usage",
    "gauge",
    "Share of the host tier that holds blocks, 0 to 1; 0 without one.",
    aliases=(Alias("vllm:kv_offload_cpu_cache_usage_perc"),),
    over_engines="max",
)
PREEMPTIONS = Series(
    "headrace:num_preemptions",
    "counter",
    "Preemptions: a running sequence gave up its slot because the KV cache was full.",
    aliases=(Alias("vllm:num_preemptions"),),
    alert="rate over 1/s (others: 0.1/s)",
)
PROMPT_TOKENS = Series(
    "headrace:prompt_tokens",
    "counter",
    "Prompt tokens of started requests, cached ones included.",
    aliases=(Alias("vllm:prompt_tokens"), Alias("vllm:num_prompt_tokens")),
)
PROMPT_TOKENS_BY_SOURCE = Series(
    "headrace:prompt_tokens_by_source",
    "counter",
    "Prompt tokens of started requests, by where their keys and values came from.",
    labels=("source",),
    aliases=(Alias("vllm:prompt_tokens_by_source"),),
)
GENERATED_TOKENS = Series(
    "headrace:generation_tokens",
    "counter",
    "Tokens generated.",
    aliases=(
        Alias("vllm:generation_tokens"),
        Alias("vllm:num_generate_tokens"),
        Alias("vllm:num_generation_tokens"),
    ),
    alert="rate 0 for a minute while requests run (without the second half it fires when idle)",
)
RECOMPUTED_TOKENS = Series("headrace:recomputed_tokens", "counter", "Tokens computed again after a preemption.")
DRAFTS = Series(
    "headrace:spec_decode_num_drafts",
    "counter",
    "How often a sequence had drafted tokens in a step; 0 without speculative decoding.",
    aliases=(Alias("vllm:spec_decode_num_drafts"),),
)
DRAFT_TOKENS = Series(
    "headrace:spec_decode_num_draft_tokens",
    "counter",
    "Drafted tokens that steps verified.",
    aliases=(Alias("vllm:spec_decode_num_draft_tokens"),),
)
ACCEPTED_TOKENS = Series(
    "headrace:spec_decode_num_accepted_tokens",
    "counter",
    "Drafted tokens that were accepted.",
    aliases=(Alias("vllm:spec_decode_num_accepted_tokens"),),
    alert="under 0.4 of the drafted ones",
)
ACCEPTED_BY_POSITION = Series(
    "headrace:spec_decode_num_accepted_tokens_per_pos",
    "counter",
    "Accepted tokens by their position among a step's drafts, from 0; absent without speculative decoding.",
    labels=("position",),
    aliases=(Alias("vllm:spec_decode_num_accepted_tokens_per_pos"),),
)
PROMPT_RATE = Series(
    "headrace:prompt_tokens_per_second",
    "gauge",
    "Prompt tokens per second, over the last ten seconds or since the scrape before them.",
    aliases=(Alias("vllm:avg_prompt_throughput_toks_per_s"),),
)
GENERATION_RATE = Series(
    "headrace:generation_tokens_per_second",
    "gauge",
    "Generated tokens per second, over the same time.",
    aliases=(Alias("vllm:avg_generation_throughput_toks_per_s"),),
)
STEPS = Series("headrace:steps", "counter", "Steps planned by the scheduler.")
BATCH_TOKENS = Series(
    "headrace:batch_tokens",
    "histogram",
    "Tokens computed per step, prefill and decode.",
    bounds=BATCH_TOKENS_BOUNDS,
)
ITERATION_TOKENS = Series(
    "headrace:iteration_tokens",
    "histogram",
    "Prompt tokens computed plus tokens generated per step: one more per answer than the tokens computed.",
    bounds=BATCH_TOKENS_BOUNDS,
    aliases=(Alias("vllm:iteration_tokens_total"),),
)
STEP_SECONDS = Series(
    "headrace:step_seconds",
    "histogram",
    "One iteration of the engine loop: plan, submit, wait for an earlier step, apply its result.",
    bounds=STEP_SECONDS_BOUNDS,
)
STEP_HOST_SECONDS = Series(
    "headrace:step_host_seconds",
    "histogram",
    "Host time of one iteration of the engine loop: everything but the wait.",
    bounds=STEP_SECONDS_BOUNDS,
)
BUSY_SECONDS = Series(
    "headrace:engine_seconds",
    "counter",
    "Time of the engine loop, by part: host work, and waiting for the device.",
    labels=("part",),
)
QUEUE_USE = Series(
    "headrace:queue_usage",
    "gauge",
    "Waiting requests as a share of max_num_queued_reqs, 0 to 1; absent without a limit.",
    scope="server",
)
OLDEST_WAIT = Series(
    "headrace:oldest_waiting_seconds",
    "gauge",
    "Wait of the oldest request that has no first token yet.",
    scope="server",
)
LOOP_LAG = Series(
    "headrace:event_loop_lag_seconds",
    "histogram",
    "Delay of the HTTP event loop: how much later than due a timer ran; measured once per second.",
    bounds=STEP_SECONDS_BOUNDS,
    scope="server",
)
RESTARTS = Series(
    "headrace:engine_restarts",
    "counter",
    "Restarts of a dead or hung engine.",
)
ENGINE_UP = Series("headrace:engine_up", "gauge", "1 while the engine responds, else 0.", over_engines="min")
SLEEP_STATE = Series(
    "headrace:engine_sleep_state",
    "gauge",
    "1 for the current state of the engine: `awake`, or asleep at level 1 (`weights_offloaded`) or 2 (`discard_all`); "
    "absent while the engine is down.",
    labels=("sleep_state",),
    aliases=(Alias("vllm:engine_sleep_state"),),
)
CACHE_INFO = Series(
    "headrace:cache_config_info",
    "gauge",
    "Always 1; the labels hold the KV cache settings.",
    labels=(
        *("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
        *("kv_cache_size_tokens", "kv_cache_max_concurrency", "gpu_memory_utilization"),
    ),
    aliases=(Alias("vllm:cache_config_info", base_labels=("engine",)),),
)
LORA_INFO = Series(
    "headrace:lora_requests_info",
    "gauge",
    "The time of the last look, in Unix seconds; the labels hold how many LoRA adapters fit on the device, and those "
    "that running and waiting requests use. Absent without --enable-lora.",
    labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    over_engines="max",
    aliases=(Alias("vllm:lora_requests_info", base_labels=("engine",)),),
)
CONFIG_INFO = Series(
    "headrace:config_info",
    "gauge",
    "Always 1; the labels hold the engine settings.",
    labels=(
        *("device", "dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("enable_chunked_prefill", "capacity_policy", "queue_policy"),
    ),
)
BATCHES = Series(
    "headrace:batches",
    "gauge",
    "Batches of the Batch API that are stored, by status; absent without --batch-dir.",
    labels=("status",),
    scope="server",
)
BATCH_LINES = Series(
    "headrace:batch_lines",
    "counter",
    "Lines of batches that have ended, by result: answered or failed; absent without --batch-dir.",
    labels=("result",),
    scope="server",
)
BUILD_INFO = Series(
    "headrace:build_info",
    "gauge",
    "Always 1; the label holds the version of Headrace.",
    labels=("version",),
    scope="server",
)


def _gpu(name: str, help: str) -> Series:
    return Series(f"headrace:gpu_{name}", "gauge", help, labels=("gpu",), scope="server")


GPU_UTILIZATION = _gpu("utilization", "Share of time in which a kernel ran on the GPU, 0 to 1, as NVML reports it.")
GPU_MEMORY_USED = _gpu("memory_used_bytes", "GPU memory in use, by all processes.")
GPU_MEMORY_TOTAL = _gpu("memory_total_bytes", "Memory of the GPU.")
GPU_POWER = _gpu("power_watts", "Power draw of the GPU.")
GPU_TEMPERATURE = _gpu("temperature_celsius", "Temperature of the GPU.")
GPU_SM_CLOCK = _gpu("sm_clock_hertz", "Clock of the GPU's multiprocessors.")
GPU_MEMORY_CLOCK = _gpu("memory_clock_hertz", "Clock of the GPU's memory.")
GPU_INFO = Series(
    "headrace:gpu_info",
    "gauge",
    "Always 1, for each GPU that CUDA_VISIBLE_DEVICES allows; `gpu` is its index in the driver.",
    labels=("gpu", "name", "uuid"),
    scope="server",
)
GPU_TELEMETRY_INFO = Series(
    "headrace:gpu_telemetry_info",
    "gauge",
    "Always 1; where the figures of GPUs come from (nvml, nvidia-smi, none), and why they are missing if they are.",
    labels=("source", "missing"),
    scope="server",
)

SERIES: tuple[Series, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Series))
