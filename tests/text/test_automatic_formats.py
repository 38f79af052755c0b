"""The formats that chat templates show. The templates here have the markers of published ones and little else."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.text.reasoning.formats import FORMATS as REASONING_FORMATS
from headrace.text.reasoning.formats import reasoning_format
from headrace.text.tool_calls import FORMATS as TOOL_FORMATS
from headrace.text.tool_calls import parser_name_for

HEADERS = "{{ '<|start_header_id|>' + role + '<|end_header_id|>' }}{% if tools %}{{ tools }}{% endif %}"
QWEN = '<|im_start|>{{ role }}{% if tools %}<tools></tools><tool_call>{"name": n}</tool_call>{% endif %}'
THINK = "{{ content.split('</think>')[-1] }}"
R1 = (
    "<｜User｜><｜Assistant｜>"
    + THINK
    + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>{{ name }}"
)


@pytest.mark.parametrize(
    ("model", "template", "tools", "reasoning"),
    [
        ("plain", "{{ messages }}", "hermes", None),
        ("Qwen2.5", QWEN, "hermes", None),
        ("Qwen3", QWEN + THINK + "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", "hermes", "qwen3"),
        ("QwQ", QWEN + THINK + "<think>\n", "hermes", "qwen3"),
        ("Qwen3-Coder", "{{ '<tool_call>\n<function=' + name }}<parameter={{ key }}>", "qwen3_coder", None),
        ("Nemotron 3", "{{ '<tool_call>\n<function=' + name }}<parameter=" + THINK, "qwen3_coder", "qwen3"),
        ("Nemotron Nano 2", "{{ '<AVAILABLE_TOOLS>' }}<TOOLCALL>" + THINK, "nemotron_json", "qwen3"),
        ("Qwen3.5", "{{ '<tool_call>\n<function=' + name }}<parameter=" + THINK + "<think>\n", "qwen3_coder", "qwen3"),
        ("Qwen3-Next Thinking", QWEN + THINK + "<think>\n", "hermes", "qwen3"),
        ("EXAONE 4.0", "[|assistant|]<tool_call>{{ tool }}</tool_call><think>\n</think>", "hermes", "qwen3"),
        ("ERNIE 4.5 Thinking", "<tool_call>{{ call }}</tool_call><think></think><response>", "hermes", "ernie45"),
        ("Falcon-H1", QWEN, "hermes", None),
        ("GLM-4.6", "[gMASK]<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>" + THINK, "glm45", "glm45"),
        ("DeepSeek R1", R1 + "{{ '```json' }}<think>\n", "deepseek_v3", "deepseek_r1"),
        ("DeepSeek R1 distilled", R1 + "```json{% if not enable_thinking %}{% endif %}", "deepseek_v3", "deepseek_r1"),
        ("DeepSeek V3", "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' }}```json", "deepseek_v3", None),
        ("DeepSeek V3.1", R1 + "{% if not thinking is defined %}{% endif %}", "deepseek_v31", "deepseek_v3"),
        ("DeepSeek V3.2", "{{ '<｜DSML｜function_calls>' }}" + THINK, "deepseek_v32", "qwen3"),
        ("gpt-oss", "{{ '<|channel|>analysis<|message|>' }}<|call|>", "openai", "openai_gptoss"),
        ("Mistral 7B v0.3", "{{ '[INST]' }}[TOOL_CALLS]", "mistral", None),
        ("Magistral", "{{ '[INST]' }}[THINK][/THINK][TOOL_CALLS][ARGS]", "mistral", "mistral"),
        ("Granite 3.2", "{{ '<|start_of_role|>' }}<|tool_call|>Here is my thought process:", "granite", "granite"),
        ("Granite 3.3", "{{ x }}<|start_of_role|><|tool_call|><think></think><response>", "granite", "granite"),
        ("Granite 4", "{{ '<|start_of_role|>' }}<tool_call></tool_call>", "hermes", None),
        ("Command R", "{{ '<|START_OF_TURN_TOKEN|>' }}Action:\n```json\n[", "cohere_command3", None),
        ("Command A", "{{ '<|START_ACTION|>' }}<|START_THINKING|>", "cohere_command3", "cohere_command3"),
        ("Llama 3.1", HEADERS, "llama3_json", None),
        ("Llama 3.2 pythonic", HEADERS + "[func_name1(params)]", "pythonic", None),
        ("Llama 4 pythonic", "{{ '<|header_start|>' }}{{ tools }}[func_name1(x=1)]", "llama4_pythonic", None),
        ("Llama 4", "{{ '<|header_start|>' }}{{ tools }}", "llama3_json", None),
        ("Kimi K2 Thinking", "{{ '<|tool_call_begin|>' }}" + THINK, "kimi_k2", "qwen3"),
        ("MiniMax M2", "{{ '<minimax:tool_call>' }}<invoke name=<response></response><think>", "minimax_m2", "qwen3"),
        ("Seed-OSS", "{{ '<seed:tool_call>' }}<function=<seed:think>", "seed_oss", "seed_oss"),
        ("OLMo 3 Think", "{{ '<functions>' }}<function_calls><think>", "olmo3", "qwen3"),
        ("LFM2", "{{ 'List of tools: <|tool_list_start|>[' }}", "lfm2", None),
        ("Phi-4-mini", "{{ '<|tool|>' }}<|/tool|>", "phi4_mini_json", None),
        ("InternLM 3", "{{ '<|action_start|><|plugin|>' }}", "internlm", None),
        ("Hunyuan A13B", "{{ '<|extra_0|>' }}<tool_calls></tool_calls>" + THINK, "jamba", "hunyuan_a13b"),
    ],
)  # fmt: skip
def test_the_template_shows_the_formats(model: str, template: str, tools: str, reasoning: str | None) -> None:
    assert parser_name_for(template) == tools
    found = reasoning_format("auto", template)
    assert (None if found is None else found.name) == reasoning


def test_the_documentation_lists_every_format_with_its_names_and_models() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tools-and-reasoning.md").read_text()
    for kind in (*TOOL_FORMATS, *REASONING_FORMATS):
        aliases = ", ".join(f"`{alias}`" for alias in kind.aliases)
        row = f"| `{kind.name}` | {aliases} | {kind.models} |" if aliases else f"| `{kind.name}` | | {kind.models} |"
        assert row in text
