"""Speculative decoding, LoRA and answers. Data of `other_flags`."""

from __future__ import annotations

from headrace.flag_groups import FlagGroup

SAMPLING: tuple[FlagGroup, ...] = (
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
        "every loaded adapter stays in host memory, in the type of the model, and an adapter of experts is refused",
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
    FlagGroup(
        "ignored",
        "of Cohere's API there are /v2/embed and /v2/rerank, without chats",
        values="cohere-format",
        switches="cohere-is-reasoning-model=true",
    ),
)
