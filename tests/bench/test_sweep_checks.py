"""Settings in force, first answers and settings files."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import yaml

from headrace.bench.engines.base import EngineFailure, SettingInForce
from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.sweep import settings_file
from headrace.bench.sweep.check import check_answer, not_in_force, not_reported
from tests.bench.sweeps import WORKLOAD, FakeEngine, FakeRunning


@pytest.mark.parametrize(
    "asked, used, is_same",
    [
        (False, False, True),
        (False, 0, False),
        (0, False, False),
        (0, 0, True),
        (0, 64, False),
        (0.9, 0.9000000001, True),
        (None, 64, True),
        ("auto", "bfloat16", True),
        ("bfloat16", "torch.bfloat16", True),
        ("fp8", "fp8_e4m3", True),
        ("fp8", "auto", False),
        (64, "64", False),
    ],
)
def test_a_setting_is_in_force_only_with_the_value_that_was_asked_for(asked: Any, used: Any, is_same: bool) -> None:
    assert (not_in_force({"x": asked}, {"x": SettingInForce(used, "reported")}) == []) == is_same


def test_a_setting_that_is_not_reported_is_neither_right_nor_wrong() -> None:
    assert not_in_force({"x": 1}, {}) == []
    assert not_reported({"x": 1, "y": None}, {}) == ["x"]


def test_the_first_request_is_sent_to_an_engine_with_an_address() -> None:
    engine = FakeRunning(FakeEngine(), {})
    with null_server() as server:
        engine.address = server.address
        check_answer(engine, WORKLOAD)
    with pytest.raises(EngineFailure, match="did not answer the first request"):
        check_answer(engine, WORKLOAD)
    with null_server(Behaviour(refused_share=1.0)) as server:
        engine.address = server.address
        with pytest.raises(EngineFailure, match="its first request was refused"):
            check_answer(engine, WORKLOAD)


def test_a_settings_file_keeps_false_and_zero() -> None:
    settings = {"max_num_seqs": 0, "enable_chunked_prefill": False, "dtype": 'a "b"\n', "max_model_len": None, "x": 0.5}
    suffix, text = settings_file("headrace", settings)
    assert suffix == ".toml"
    assert tomllib.loads(text) == {name: value for name, value in settings.items() if value is not None}
    assert "# max_model_len: automatic" in text


def test_a_settings_file_of_vllm_turns_switches_off_by_their_opposite() -> None:
    suffix, text = settings_file(
        "vllm", {"enable_chunked_prefill": False, "enable_prefix_caching": True, "max_num_seqs": 0}
    )
    assert suffix == ".yaml"
    assert yaml.safe_load(text) == {
        "no-enable-chunked-prefill": True,
        "enable-prefix-caching": True,
        "max-num-seqs": 0,
    }
