from __future__ import annotations

from typing import Any

from headrace.bench.sweep.result import Failure
from headrace.tune.knobs import find_knobs
from headrace.tune.pruning import Pruning
from headrace.tune.race import config_of
from tests.tune.test_knobs import ALL, DEFAULTS, a_space


def a_pruning(**changes: Any) -> Pruning:
    return Pruning(find_knobs(a_space(**changes)))


def failed(kind: str, message: str = "") -> Failure:
    return Failure("start", kind, message)


def test_an_oom_rules_out_what_is_larger() -> None:
    pruning = a_pruning()
    pruning.add_failure(config_of({"max_num_seqs": 256}), failed("oom"))
    assert pruning.ruled_out({"max_num_seqs": 512})
    assert pruning.ruled_out({"max_num_seqs": 256, "max_num_batched_tokens": 1024})
    assert pruning.ruled_out({"max_num_seqs": 256, "enable_prefix_caching": False})
    assert not pruning.ruled_out({"max_num_seqs": 64})
    assert not pruning.ruled_out({"max_num_seqs": 512, "max_num_batched_tokens": 256})
    assert not pruning.ruled_out({"max_num_batched_tokens": 2048})


def test_an_oom_does_not_rule_out_what_saves_memory() -> None:
    in_force = {**DEFAULTS, "kv_cache_dtype": "auto"}
    pruning = a_pruning(in_force=in_force, known=ALL, is_gpu=True, allows_quality_change=True)
    pruning.add_failure(config_of({"max_num_seqs": 256}), failed("oom"))
    assert not pruning.ruled_out({"max_num_seqs": 256, "kv_cache_dtype": "fp8"})


def test_a_refused_value_is_not_tried_again() -> None:
    pruning = a_pruning()
    pruning.add_failure(config_of({"block_size": 32}), failed("bad_setting"))
    assert pruning.ruled_out({"block_size": 32, "max_num_seqs": 64})
    assert not pruning.ruled_out({"block_size": 8})


def test_of_several_changes_the_one_that_the_message_names_is_to_blame() -> None:
    pruning = a_pruning()
    both = config_of({"block_size": 32, "max_num_seqs": 64})
    pruning.add_failure(both, failed("bad_setting", "--block-size must be 16"))
    assert pruning.ruled_out({"block_size": 32})
    assert not pruning.ruled_out({"max_num_seqs": 64})


def test_without_a_name_only_the_config_is_ruled_out() -> None:
    pruning = a_pruning()
    pruning.add_failure(config_of({"block_size": 32, "max_num_seqs": 64}), failed("bad_setting", "no"))
    assert pruning.ruled_out({"block_size": 32, "max_num_seqs": 64})
    assert not pruning.ruled_out({"block_size": 32})


def test_a_crash_rules_out_the_config_and_twice_its_value() -> None:
    pruning = a_pruning()
    pruning.add_failure(config_of({"block_size": 32}), failed("crash"))
    assert pruning.ruled_out({"block_size": 32})
    assert not pruning.ruled_out({"block_size": 32, "max_num_seqs": 64})
    pruning.add_failure(config_of({"block_size": 32, "max_num_seqs": 256}), failed("timeout"))
    found = pruning.ruled_out({"block_size": 32, "max_num_seqs": 64})
    assert found is not None and "block_size=32" in found.why


def test_a_value_that_worked_elsewhere_is_not_to_blame() -> None:
    pruning = a_pruning()
    pruning.add_measured(config_of({"block_size": 32}))
    pruning.add_failure(config_of({"block_size": 32, "max_num_seqs": 256}), failed("crash"))
    pruning.add_failure(config_of({"block_size": 32, "max_num_seqs": 512}), failed("crash"))
    assert not pruning.ruled_out({"block_size": 32, "max_num_seqs": 64})
