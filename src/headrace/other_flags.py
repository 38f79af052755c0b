"""The settings of vLLM (current and older versions) and TensorRT-LLM that Headrace does not have, by reason.

Data only; `other_settings.py` applies it. A test compares the names with those of `vllm serve` of the version that
`doctor/readers/vllm_flags.py` names.
"""

from __future__ import annotations

from headrace.flag_groups import FlagGroup, OtherFlag

_ONE_LAYOUT = (
    "a model is divided over processes by --tensor-parallel-size and --pipeline-parallel-size, on --nnodes machines; "
    "--data-parallel-size starts several engines behind one address, and a job several workers"
)
_ASYNCHRONOUS = "scheduling is always asynchronous: steps are submitted ahead of results"
_GRAPHS = (
    "CUDA graphs are captured at start for a fixed series of sizes, for all decode steps and small ones with prefill"
)
_SEVERAL_ENGINES = "only 'headrace serve' and AsyncEngine have it; 'headrace run' runs several engines with --workers"

GROUPS: tuple[FlagGroup, ...] = (
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
    # ---- the model and its weights
    FlagGroup(
        "ignored",
        "code from a model's repository is never run; supported families need none",
        values="code-revision",
        switches="trust-remote-code",
    ),
    FlagGroup(
        "ignored",
        "supported families have one implementation, which the model's config.json names",
        values="model-impl=auto|vllm config-format=auto|hf",
    ),
    FlagGroup(
        "refused",
        "supported families have one implementation, which the model's config.json names",
        values="model-class-overrides",
    ),
    FlagGroup("refused", "rope_scaling is a key of --hf-overrides", values="rope-scaling"),
    FlagGroup("refused", "rope_theta is a key of --hf-overrides", values="rope-theta"),
    FlagGroup("refused", "keys of config.json are changed with --hf-overrides", values="hf-config-path"),
    FlagGroup("refused", "a sliding window is part of the model", switches="disable-sliding-window"),
    FlagGroup("refused", "give a directory that has it as --tokenizer", values="tokenizer-revision"),
    FlagGroup("ignored", "the fast tokenizer is always used", values="tokenizer-mode=auto|hf"),
    FlagGroup(
        "ignored",
        "texts are tokenized on threads of the server",
        values="tokenizer-pool-size=0 tokenizer-pool-type tokenizer-pool-extra-config renderer-num-workers=1",
    ),
    FlagGroup(
        "ignored",
        "a model without a tokenizer is served without one; prompts may be token ids with any model",
        switches="skip-tokenizer-init",
    ),
    FlagGroup(
        "refused", "set HF_HUB_CACHE for hub models and HEADRACE_CACHE for the default model", values="download-dir"
    ),
    FlagGroup("refused", "set HF_TOKEN, which other users of the machine cannot see", values="hf-token"),
    FlagGroup(
        "ignored",
        "tensors are read by several threads, with bounded memory",
        values="max-parallel-loading-workers safetensors-load-strategy safetensors-prefetch-num-threads "
        "safetensors-prefetch-block-size pt-load-map-location model-loader-extra-config",
        switches="use-tqdm-on-load=true",
        lists="ignore-patterns",
    ),
    FlagGroup(
        "refused",
        "a checkpoint's own quantization_config decides; --quantization fp8 quantizes at load",
        values="quantization-config",
    ),
    FlagGroup(
        "ignored",
        "--quantization lists what is supported, and nothing of it is deprecated",
        switches="allow-deprecated-quantization",
    ),
    FlagGroup(
        "refused",
        "--cpu-offload-gb says how much of the weights streams from host memory",
        values="offload-group-size=0",
    ),
    FlagGroup(
        "ignored",
        "whole layers stream from host memory, spread evenly, copied one layer ahead (--cpu-offload-gb)",
        values="offload-backend=auto offload-num-in-group offload-prefetch-step",
        lists="cpu-offload-params offload-params",
    ),
    FlagGroup(
        "refused",
        "weights stay on the device while the server runs",
        values="weight-transfer-config",
        switches="sleep-mode-offload-cudagraph",
        lists="sleep-preserve-parameter-names",
    ),
    FlagGroup("ignored", "PyTorch's allocator is used", switches="enable-cumem-allocator enable-nccl-comm-suspend"),
    FlagGroup("refused", "vLLM has replaced it by --runner and --convert; use these", values="task=auto"),
    FlagGroup("refused", "vLLM has replaced it by --pooler-config; use that", values="override-pooler-config"),
    FlagGroup("ignored", "there is no late-interaction scoring", switches="enable-flash-late-interaction=true"),
    # ---- images, audio and video
    FlagGroup(
        "ignored",
        "models read text only, so nothing of it applies",
        values="allowed-local-media-path limit-mm-per-prompt media-io-kwargs mm-processor-kwargs "
        "mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin "
        "mm-encoder-fp8-scale-save-path mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb "
        "mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-shm-cache-max-object-size-mb "
        "mm-tensor-ipc video-pruning-method video-pruning-rate ec-manager-config",
        switches="disable-chunked-mm-input disable-mm-preprocessor-cache enable-mm-processor-stats "
        "interleave-mm-strings language-model-only mm-device-do-normalize skip-mm-profiling enable-shm-tensor-arena "
        "trust-request-mm-kwargs",
        lists="allowed-media-domains",
    ),
    FlagGroup("refused", "models read text only", switches="enable-mm-embeds mm-encoder-only"),
    FlagGroup("refused", "requests send text or token ids, not embeddings", switches="enable-prompt-embeds"),
    # ---- several GPUs and machines
    FlagGroup(
        "refused",
        _ONE_LAYOUT,
        values="data-parallel-size-local=1 -dpl=1 data-parallel-rank=0 -dpn=0 "
        "data-parallel-start-rank=0 -dpr=0 decode-context-parallel-size=1 -dcp=1 prefill-context-parallel-size=1 "
        "-pcp=1 elastic-ep-max-dp-size cp-size=1 "
        "context-parallel-size=1 moe-tensor-parallel-size=1|-1 moe-expert-parallel-size=1|-1 "
        "moe-cluster-parallel-size=1|-1",
        switches="enable-eplb enable-dbo enable-elastic-ep "
        "data-parallel-external-lb -dpe data-parallel-hybrid-lb -dph data-parallel-multi-port-external-lb -dpm "
        "enable-scale-out enable-attention-dp",
    ),
    FlagGroup(
        "ignored",
        "it belongs to a layout that is not supported, and changes nothing alone",
        values="data-parallel-backend=mp -dpb=mp data-parallel-address -dpa data-parallel-rpc-port -dpp "
        "data-parallel-supervisor-port dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s "
        "dp-supervisor-probe-timeout-s dp-sync-interval distributed-timeout-seconds "
        "cpu-distributed-timeout-seconds all2all-backend dbo-decode-token-threshold dbo-prefill-token-threshold "
        "ubatch-size=0 dcp-comm-backend dcp-kv-cache-interleave-size cp-kv-cache-interleave-size eplb-config "
        "num-redundant-experts=0 eplb-window-size eplb-step-interval expert-placement-strategy=linear",
        switches="dcp-q-replicate disable-nccl-for-dp-synchronization enable-ep-weight-filter eplb-log-balancedness",
    ),
    FlagGroup(
        "ignored",
        "the engine runs in its own process, without Ray",
        switches="engine-use-ray worker-use-ray ray-workers-use-nsight disable-frontend-multiprocessing",
    ),
    FlagGroup("refused", "set CUDA_VISIBLE_DEVICES", values="device-ids"),
    FlagGroup(
        "ignored", "the engine takes the first visible GPU; a job takes one worker per GPU", values="gpus-per-node=1"
    ),
    FlagGroup(
        "ignored",
        "threads of the engine are always pinned near their GPU; --cpu-affinity chooses others",
        switches="numa-bind",
        lists="numa-bind-cpus numa-bind-nodes",
    ),
    FlagGroup("refused", "one process serves HTTP", values="api-server-count=1 -asc=1"),
    FlagGroup(
        "ignored",
        "an engine that fails is always restarted; --max-engine-restarts is the limit",
        values="fault-tolerance-config",
        switches="enable-fault-tolerance",
    ),
    # ---- speculative decoding and LoRA
    FlagGroup(
        "refused",
        "the method and the lengths of n-grams are keys of --speculative-config",
        values="spec-method ngram-prompt-lookup-max ngram-prompt-lookup-min",
    ),
    FlagGroup(
        "refused",
        "a draft model has the engine's dtype and context, and one process",
        values="speculative-draft-tensor-parallel-size=1 speculative-max-model-len speculative-model-quantization",
    ),
    FlagGroup(
        "ignored",
        "nothing is drafted with many running sequences, or where drafts are not accepted",
        values="speculative-disable-by-batch-size",
    ),
    FlagGroup(
        "refused",
        "drafts are accepted exactly: answers have the same distribution as without them",
        values="spec-decoding-acceptance-method typical-acceptance-sampler-posterior-threshold "
        "typical-acceptance-sampler-posterior-alpha",
    ),
    FlagGroup("ignored", "drafts are verified in one batch", values="speculative-disable-mqa-scorer"),
    FlagGroup(
        "ignored",
        "drafts are counted for all requests together (spec_decode metrics), and log-probabilities stay available",
        values="per-request-spec-decode-metrics=none",
        switches="disable-logprobs-during-spec-decoding",
    ),
    FlagGroup(
        "refused",
        "the only adapters are LoRA adapters of the text model, by name (--lora-modules)",
        values="default-mm-loras qlora-adapter-name-or-path",
        switches="enable-prompt-adapter enable-tower-connector-lora",
        lists="prompt-adapters",
    ),
    FlagGroup(
        "refused",
        "an adapter is used as it was made: with all of its matrices",
        lists="lora-target-modules",
    ),
    FlagGroup(
        "ignored",
        "every adapter stays loaded (--max-loras), in the type of the model, and an adapter of experts is refused",
        values="max-cpu-loras lora-dtype lora-extra-vocab-size long-lora-scaling-factors max-lora-cls-labels",
        switches="fully-sharded-loras enable-mixed-moe-lora-format enable-moe-shared-loras specialize-active-lora",
    ),
    FlagGroup(
        "ignored",
        "there are no prompt adapters, so it changes nothing alone",
        values="max-prompt-adapters max-prompt-adapter-token",
    ),
    # ---- answers
    FlagGroup(
        "ignored",
        "llguidance is the only backend for structured output",
        values="guided-decoding-backend structured-outputs-config",
        switches="guided-decoding-disable-fallback guided-decoding-disable-any-whitespace "
        "guided-decoding-disable-additional-properties",
    ),
    FlagGroup(
        "refused",
        "sampling parameters come from each request",
        values="generation-config=vllm override-generation-config",
    ),
    FlagGroup("refused", "each token is sent when it is sampled", values="stream-interval=1"),
    FlagGroup(
        "refused",
        "log-probabilities are the model's, before sampling parameters apply",
        values="logprobs-mode=raw_logprobs",
    ),
    FlagGroup(
        "refused",
        "answers have texts, token ids and log-probabilities, nothing more of the model",
        values="aux-output-config",
        switches="enable-return-routed-experts return-sampling-mask enable-trace-replay",
    ),
    FlagGroup(
        "refused",
        "code of other packages is never loaded into the server; use logit_bias, allowed_token_ids or bad_words",
        lists="logits-processors",
    ),
    FlagGroup(
        "refused",
        "code of other packages is never loaded into the server; --tool-call-parser and --reasoning-parser list the "
        "formats",
        values="tool-parser-plugin reasoning-parser-plugin",
    ),
    FlagGroup(
        "refused",
        "code of other packages is never loaded into the server",
        values="io-processor-plugin worker-cls=auto worker-extension-cls",
    ),
    FlagGroup("refused", "the client runs the tools", values="tool-server"),
    FlagGroup("ignored", "--reasoning-parser is enough", switches="enable-reasoning", values="reasoning-config"),
    FlagGroup(
        "refused",
        "calls that a request forces are held to the schema of the tool; those of tool_choice auto are parsed",
        values="tool-strict-level",
    ),
    FlagGroup(
        "ignored",
        "tool_choice none always leaves the tools out of the prompt",
        switches="exclude-tools-when-tool-choice-none=true",
    ),
    FlagGroup("refused", "the role of answers is always assistant", values="response-role=assistant"),
    FlagGroup("refused", "chat templates in requests are never run", switches="trust-request-chat-template"),
    FlagGroup(
        "ignored",
        "parts of a message are joined to text, which every template reads",
        values="chat-template-content-format=auto|string chat-template-text-format=auto|string",
    ),
    FlagGroup("ignored", "the usage always includes them", switches="enable-prompt-tokens-details"),
    FlagGroup("refused", "system_fingerprint is always null", values="fingerprint-mode=none fingerprint-value"),
    FlagGroup(
        "refused",
        "/v1/messages gives the chat template the effort of the request",
        values="anthropic-disabled-thinking-effort",
    ),
    FlagGroup("refused", "answers have no watermark", values="watermark-config"),
    FlagGroup("ignored", "there is no Cohere API", values="cohere-format", switches="cohere-is-reasoning-model=true"),
    # ---- the server
    FlagGroup("refused", "the server speaks HTTP only", values="grpc-port", switches="grpc"),
    FlagGroup("refused", "all routes are served; close some of them in a proxy", switches="tokens-only"),
    FlagGroup("refused", "use a proxy in front of the server", lists="middleware"),
    FlagGroup("refused", "there are no cookies; keys are sent in headers", switches="allow-credentials"),
    FlagGroup(
        "refused", "--allowed-origins is sufficient for browsers", values='allowed-methods=["*"] allowed-headers=["*"]'
    ),
    FlagGroup("refused", "a new certificate needs a restart", switches="enable-ssl-refresh"),
    FlagGroup("refused", "Python's defaults are used; a TLS proxy can use others", values="ssl-ciphers"),
    FlagGroup(
        "refused",
        "clients authenticate with keys, not certificates; a TLS proxy can require certificates",
        values="ssl-ca-certs ssl-cert-reqs=0",
    ),
    FlagGroup("ignored", "/load is always available", switches="enable-server-load-tracking"),
    FlagGroup("ignored", "/tokenizer_info is always available", switches="enable-tokenizer-info-endpoint"),
    FlagGroup("ignored", "--max-header-bytes is the limit", values="h11-max-incomplete-event-size"),
    FlagGroup("ignored", "--max-num-headers is the limit", values="h11-max-header-count"),
    FlagGroup(
        "ignored",
        "/docs and /openapi.json are always available, and load nothing from elsewhere",
        switches="disable-fastapi-docs enable-offline-docs",
    ),
    # ---- logs, metrics and profiles
    FlagGroup("ignored", "it is the default; --enable-log-requests turns logging on", switches="disable-log-requests"),
    FlagGroup(
        "ignored",
        "the log has one line a minute while there is work; statistics are on /metrics",
        switches="disable-log-stats aggregate-engine-logging enable-logging-iteration-details",
    ),
    FlagGroup(
        "ignored",
        "there is no access log without --enable-log-requests",
        values="disable-access-log-for-endpoints",
        switches="disable-uvicorn-access-log",
    ),
    FlagGroup(
        "ignored",
        "errors are logged to stderr; --enable-log-requests logs requests, --log-format chooses the format",
        values="uvicorn-log-level log-level log-config-file logging-config",
        switches="log-error-stack",
    ),
    FlagGroup("ignored", "prompts and answers are never logged", values="max-log-len", switches="enable-log-deltas"),
    FlagGroup("refused", "prompts and answers are never logged", switches="enable-log-outputs"),
    FlagGroup("ignored", "older metric names are always on /metrics", values="show-hidden-metrics-for-version"),
    FlagGroup(
        "ignored",
        "/metrics has the times of all requests, and --otlp-traces-endpoint those of each",
        lists="collect-detailed-traces",
        switches="enable-mfu-metrics",
    ),
    FlagGroup(
        "refused",
        "answers have no times; /metrics has those of all requests, and --otlp-traces-endpoint those of each",
        switches="enable-per-request-metrics",
    ),
    FlagGroup(
        "refused",
        "the buckets are vLLM's; metrics with headrace: names have finer ones",
        lists="custom-histogram-buckets",
    ),
    FlagGroup(
        "refused",
        "use --profiler-dir DIR, which turns on /start_profile and /stop_profile",
        values="profiler-config",
        switches="enable-layerwise-nvtx-tracing",
    ),
    FlagGroup(
        "ignored",
        "output is always processed on another thread than the engine's",
        switches="disable-async-output-proc",
    ),
    FlagGroup("ignored", "only the variables that Headrace documents are read", switches="fail-on-environ-validation"),
    FlagGroup("refused", "it is for plug-ins of vLLM, which are not loaded", values="additional-config"),
    # ---- TensorRT-LLM and its Triton backend
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

OTHER_FLAGS: dict[str, OtherFlag] = {flag: other for group in GROUPS for flag, other in group.flags().items()}

# Settings of vLLM that only the server has.
SERVER_GROUPS: tuple[FlagGroup, ...] = (
    FlagGroup("refused", _SEVERAL_ENGINES, values="data-parallel-size=1 -dp=1"),
    FlagGroup("ignored", "only 'headrace serve' gives the model another name", lists="served-model-name"),
    FlagGroup("ignored", "only 'headrace serve' limits the log-probabilities of a request", values="max-logprobs"),
)
OF_THE_SERVER: dict[str, OtherFlag] = {flag: other for group in SERVER_GROUPS for flag, other in group.flags().items()}
