"""Reasoning between tags: <think> and others."""

from __future__ import annotations

import re
from typing import ClassVar

from headrace.text.reasoning.parser import TagParser

_READS_THINKING = re.compile(r"(?<!\w)thinking(?!\w)")  # the variable, and not enable_thinking


class Qwen3Parser(TagParser):
    """The model decides by itself whether to think, unless the prompt says so."""

    name = "qwen3"
    aliases: ClassVar[tuple[str, ...]] = ("mimo", "nemotron_v3", "step3p5")
    models = "Qwen3, QwQ, SmolLM3, Nemotron, Phi-4-reasoning and others with `<think>`"
    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>")


class Glm45Parser(Qwen3Parser):
    name = "glm45"
    aliases = ("glm47",)
    models = "GLM-4.5, 4.6, 4.7"

    @classmethod
    def fits(cls, template: str) -> bool:
        return "</think>" in template and "<arg_key>" in template


class DeepSeekR1Parser(TagParser):
    """The answer starts inside the reasoning, whether the prompt has the opening tag or not."""

    name = "deepseek_r1"
    aliases = ("minimax_m2", "kimi_k2", "step3", "olmo3")
    models = "DeepSeek R1 and its distilled models, OLMo 3 Think, MiniMax M2, Kimi K2 Thinking"
    markers = ("<think>", "</think>")
    starts_inside = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return "</think>" in template and "<｜Assistant｜>" in template


class DeepSeekV3Parser(TagParser):
    """DeepSeek V3.1 thinks if `chat_template_kwargs.thinking` is true: the prompt says which."""

    name = "deepseek_v3"
    aliases = ("deepseek_v31", "holo2")
    models = "DeepSeek V3.1"
    markers = ("<think>", "</think>")

    @classmethod
    def fits(cls, template: str) -> bool:
        return "</think>" in template and "<｜Assistant｜>" in template and _READS_THINKING.search(template) is not None


class SeedOssParser(TagParser):
    name = "seed_oss"
    models = "Seed-OSS"
    start_tags = ("<seed:think>",)
    end_tags = ("</seed:think>",)
    markers = (*start_tags, *end_tags)


class Ernie45Parser(TagParser):
    name = "ernie45"
    models = "ERNIE 4.5 Thinking"
    wrapper = ("<response>", "</response>")
    markers = ("<think>", "</think>", *wrapper)
    starts_inside = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return "</think>" in template and "<response>" in template and "minimax" not in template


class HunyuanParser(TagParser):
    name = "hunyuan_a13b"
    models = "Hunyuan A13B"
    wrapper = ("<answer>", "</answer>")
    markers = ("<think>", "</think>", *wrapper)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "</think>" in template and ("<answer>" in template or "<|extra_0|>" in template)


class GraniteParser(TagParser):
    """Granite 3.2 writes sentences instead of tags, Granite 3.3 tags."""

    name = "granite"
    models = "Granite 3.2 and 3.3 with `thinking`"
    start_tags = ("Here is my thought process:", "Here's my thought process:", "<think>")
    end_tags = ("Here is my response:", "Here's my response:", "</think>")
    wrapper = ("<response>", "</response>")
    markers = ("<think>", "</think>", *wrapper)

    @classmethod
    def fits(cls, template: str) -> bool:
        is_granite = "<|start_of_role|>" in template
        return cls.start_tags[0] in template or (is_granite and "<think>" in template and "<response>" in template)


class MistralParser(TagParser):
    """Special tokens; the first Magistral wrote <think>."""

    name = "mistral"
    models = "Magistral, Mistral Small 4 and others with `[THINK]`"
    start_tags = ("[THINK]", "<think>")
    end_tags = ("[/THINK]", "</think>")
    markers = (*start_tags, *end_tags)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "[THINK]" in template or ("[INST]" in template and "</think>" in template)


class CohereParser(TagParser):
    name = "cohere_command3"
    aliases = ("command-r", "command_r", "cohere")
    models = "Command A Reasoning, Command R7B"
    start_tags = ("<|START_THINKING|>",)
    end_tags = ("<|END_THINKING|>",)
    wrapper = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    markers = (*start_tags, *end_tags, *wrapper)
