"""The model, its weights, and images, audio and video. Data of `other_flags`."""

from __future__ import annotations

from headrace.flag_groups import FlagGroup

MODEL: tuple[FlagGroup, ...] = (
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
)
