from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from headrace.cli.engine_flags import add_engine_flags, engine_config, flag_of
from headrace.cli.parser import CommandParser
from headrace.cli.sampling_flags import FLAGS, add_sampling_flags, sampling_defaults
from headrace.config import EngineConfig
from headrace.types import SamplingParams

FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
EXAMPLES: dict[str, Any] = {"load_format": "gguf", "dtype": "float32", "device": "cpu", "scheduling_policy": "priority"}
EXAMPLES |= {"capacity_policy": "guaranteed_no_evict", "gpu_memory_utilization": 0.5, "enable_chunked_prefill": False}
EXAMPLES |= {"enable_prefix_caching": False, "model": "m", "tokenizer": "t", "revision": "r"}
EXAMPLES |= {"chat_template": "t.jinja", "default_chat_template_kwargs": {"a": 1}, "enable_expert_parallel": True}
EXAMPLES |= {"runner": "pooling", "convert": "embed", "pooler_config": {"a": 1}, "hf_overrides": {"a": 1}}
EXAMPLES |= {"disable_custom_all_reduce": True, "speculative_model": "d"}
EXAMPLES |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
EXAMPLES |= {"quantization": "fp8", "kv_cache_dtype": "fp8", "block_size": 32, "cpu_affinity": "0-7,16"}
EXAMPLES |= {"master_addr": "10.0.0.1", "distributed_executor_backend": "ray", "attention_backend": "TRITON_ATTN"}
EXAMPLES |= {"enable_lora": True, "lora_modules": "name=path", "kv_offload_path": "d", "cpu_offload_path": "d"}
NEEDED = {  # by the value of a flag
    "node_rank": ["--nnodes", "8"],
    "kv_offload_disk_gib": ["--kv-offload-path", "d"],
    "cpu_offload_path": ["--cpu-offload-gb", "8"],
}


def parser() -> CommandParser:
    made = CommandParser(prog="test")
    add_sampling_flags(made, "sampling")
    add_engine_flags(made)
    return made


def read(*arguments: str) -> tuple[EngineConfig, Mapping[str, Any]]:
    made = parser()
    given = made.parse_args(arguments)
    return engine_config(made, given), sampling_defaults(made, given)


def config_of(*arguments: str) -> EngineConfig:
    return read(*arguments)[0]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        read(*arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_no_flags_give_the_default_config() -> None:
    assert config_of() == EngineConfig()


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_the_config_has_a_flag_that_sets_it(name: str) -> None:
    value = EXAMPLES.get(name, 7)
    flag = flag_of(name)
    arguments = (
        ["--no-" + flag.removeprefix("--")]
        if value is False
        else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    )
    needed = NEEDED.get(name, [])
    assert getattr(config_of(*needed, *arguments), name) == value
    assert needed or config_of(*arguments) == EngineConfig(**{name: value})


@pytest.mark.parametrize("name", FIELDS)
def test_the_help_of_every_flag_is_the_fields_and_names_its_default(name: str) -> None:
    entries = re.split(r"\n  (?=-)", parser().format_help())
    (entry,) = (entry for entry in entries if re.match(flag_of(name) + r"[ ,\n]", entry))
    text = re.sub(r"-\s+", "-", " ".join(entry.split()))  # argparse wraps lines, also after hyphens
    help = re.sub(r"-\s+", "-", FIELDS[name].metadata["help"])
    assert help in text
    assert "default:" in text
    assert FIELDS[name].default is not None or "default: automatic" in text or "; default: " in text


def test_the_help_can_be_formatted() -> None:
    text = parser().format_help()
    assert "--max-num-batched-tokens N" in text
    assert "--dtype {auto,float32,bfloat16,float16}" in text
    assert "--no-enable-prefix-caching" in text


def test_an_unknown_flag_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "--max-num-seq", "4")
    assert message.startswith("test: error: unknown option --max-num-seq, did you mean '--max-num-seqs'?\n")
    assert "did you mean '--temperature'?" in refused(capsys, "--temprature=1")


def test_a_flag_may_have_underscores_as_in_vllm() -> None:
    assert config_of("--max_model_len", "4") == EngineConfig(max_model_len=4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-num-seqs", "many"], "invalid int value: 'many'"),
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer of at least 1, got 0"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--gpu-memory-utilization", "2"], "at most 1, got 2.0"),
        (["--temperature", "-1"], "temperature must be between 0"),
        (["--top-p", "0"], "top_p must be above 0"),
    ],
)
def test_an_invalid_value_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, *arguments)


def test_only_given_sampling_flags_become_sampling_parameters() -> None:
    assert FLAGS.keys() <= {field.name for field in dataclasses.fields(SamplingParams)}
    _, defaults = read("--max-tokens", "5", "--stop", "a", "--stop", "b", "--ignore-eos")
    assert defaults == {"max_tokens": 5, "stop": ["a", "b"], "ignore_eos": True}
    assert read()[1] == {}
