"""The list of settings that a sweep measures."""

from __future__ import annotations

import json

import pytest

from headrace.bench.sweep import parse_configs
from headrace.errors import ConfigError
from headrace.other_settings import explanation
from tests.bench.sweeps import KNOWN, configs


def test_false_and_zero_are_kept_as_given() -> None:
    (config,) = configs({"enable_chunked_prefill": False, "max_num_seqs": 0, "gpu_memory_utilization": 0.0})
    assert (
        json.dumps(config.settings)
        == '{"enable_chunked_prefill": false, "max_num_seqs": 0, "gpu_memory_utilization": 0.0}'
    )
    assert config.name == "enable_chunked_prefill=false, max_num_seqs=0, gpu_memory_utilization=0.0"


def test_false_and_zero_are_different_configs() -> None:
    false, zero, none = configs({"max_num_seqs": False}, {"max_num_seqs": 0}, {"max_num_seqs": None})
    assert len({false.hash, zero.hash, none.hash}) == 3


def test_names_may_have_dashes_and_configs_may_be_an_object() -> None:
    text = '{"small": {"--max-num-seqs": 4}, "plain": {}}'
    small, plain = parse_configs(text, "configs.json", known=KNOWN)
    assert (small.name, small.settings) == ("small", {"max_num_seqs": 4})
    assert (plain.name, plain.settings) == ("plain", {})


def test_unknown_names_of_all_configs_are_reported_at_once_with_suggestions() -> None:
    text = '[{"max_num_seq": 4}, {"name": "b", "enable-chunked-prefil": true, "max_batch_size": 3}]'
    with pytest.raises(ConfigError) as error:
        parse_configs(text, "configs.json", known=KNOWN, explain=explanation)
    lines = str(error.value).splitlines()
    assert lines[0] == "configs.json has 3 errors:"
    assert lines[1] == "  config 1: unknown setting 'max_num_seq', did you mean 'max_num_seqs'?"
    assert lines[2] == "  config 2 (b): unknown setting 'enable-chunked-prefil', did you mean 'enable_chunked_prefill'?"
    assert lines[3] == "  config 2 (b): unknown setting 'max_batch_size': use max_num_seqs"


def test_lists_are_expanded_only_if_asked() -> None:
    text = '[{"name": "a", "max_num_seqs": [64, 128], "block_size": [16, 32], "seed": 0}]'
    with pytest.raises(ConfigError, match="max_num_seqs is a list; --product"):
        parse_configs(text, "configs.json", known=KNOWN)
    found = parse_configs(text, "configs.json", known=KNOWN, is_product=True)
    assert [config.name for config in found] == [
        f"a, max_num_seqs={seqs}, block_size={size}" for seqs in (64, 128) for size in (16, 32)
    ]
    assert all(config.settings["seed"] == 0 for config in found)


def test_equal_configs_have_names_and_hashes_of_their_own() -> None:
    first, second = configs({"max_num_seqs": 4}, {"max_num_seqs": 4})
    assert second.name == "max_num_seqs=4 (2)"
    assert first.hash != second.hash


@pytest.mark.parametrize(
    "text, message",
    [
        ("[", "is not JSON"),
        ("3", "must be a list"),
        ("[]", "has no configs"),
        ("[3]", "entry 1 is 3"),
        ('[{"seed": 1, "seed": 2}]', "'seed' is there twice"),
        ('[{"max-num-seqs": 1, "max_num_seqs": 2}]', "max_num_seqs is set twice"),
        ('[{"name": 3}]', "must be text"),
    ],
)
def test_a_bad_list_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_configs(text, "configs.json", known=KNOWN)
