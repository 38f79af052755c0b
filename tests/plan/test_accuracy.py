"""The stated errors are those of the predictions that this code makes for the committed records."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from benchmarks import plan_accuracy, plan_accuracy_cpu

from headrace.plan.constants import CPU, CPU_ERROR, ERRORS, FEW_PACKED, H200
from headrace.plan.gpus import cpu

RECORD: dict[str, Any] = json.loads(plan_accuracy.RECORD.read_text(encoding="utf-8"))
RECORD_CPU: dict[str, Any] = json.loads(plan_accuracy_cpu.RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cases() -> list[plan_accuracy.Case]:
    return plan_accuracy.cases()


@pytest.fixture(scope="module")
def rows(cases: list[plan_accuracy.Case]) -> list[dict[str, Any]]:
    return plan_accuracy.rows_of(cases, H200)


def held_out(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["used"] == "held out"]


def test_the_constants_are_those_of_the_record() -> None:
    assert asdict(H200) == RECORD["constants"]


def test_the_predictions_are_those_of_the_record(rows: list[dict[str, Any]]) -> None:
    """If this fails, run benchmarks/plan_accuracy.py, put its constants into constants.py, and `make tables`."""
    found = {(row["model"], row["workload"], row["dtype"]): row for row in rows}
    assert len(found) == len(RECORD["rows"]) == len(rows)
    for row in RECORD["rows"]:
        now = found[row["model"], row["workload"], row["dtype"]]
        assert now["predicted_s"] == pytest.approx(row["predicted_s"], rel=1e-3)
        assert (now["used"], now["measured_s"]) == (row["used"], row["measured_s"])


def test_the_constants_and_errors_of_a_cpu_are_those_of_its_record() -> None:
    """If this fails, run benchmarks/plan_accuracy_cpu.py on an idle machine, and copy its constants."""
    assert asdict(CPU) == RECORD_CPU["constants"]
    host = RECORD_CPU["host"]
    device = cpu(**host, memory_bytes=plan_accuracy_cpu.MEMORY_BYTES)
    found = plan_accuracy_cpu.rows_of(device, CPU)
    assert [row["error"] for row in found] == pytest.approx([row["error"] for row in RECORD_CPU["rows"]], abs=2e-3)
    errors = [abs(row["error"]) for row in found if row["used"] == "held out"]
    assert len(errors) == CPU_ERROR.num_records
    assert (max(errors), sum(errors) / len(errors)) == pytest.approx(
        (CPU_ERROR.max_error, CPU_ERROR.mean_error), abs=0.01
    )


def test_held_out_records_are_predicted_within_15_percent(rows: list[dict[str, Any]]) -> None:
    assert len(held_out(rows)) >= 6
    assert [row for row in held_out(rows) if abs(row["error"]) > plan_accuracy.MAX_HELD_OUT_ERROR] == []


def test_whole_shapes_are_held_out(rows: list[dict[str, Any]]) -> None:
    fitted = {row["model"] for row in rows if row["used"] == "fitted"}
    whole = {row["model"] for row in held_out(rows)} - fitted
    assert whole == {"llama-3.2-3b", "qwen3-8b"}


def test_the_stated_errors_are_the_largest_ones(rows: list[dict[str, Any]]) -> None:
    plain = [row for row in held_out(rows) if row["dtype"] == "bfloat16"]
    fp8 = [row for row in rows if row["dtype"] == "fp8"]
    packed = [row for row in held_out(rows) if row["dtype"] in plan_accuracy.PACKED_PRECISIONS]
    for kind, found in (("16 bits", plain), ("FP8", fp8), (FEW_PACKED, packed)):
        stated = ERRORS[kind]
        assert stated.num_records == len(found)
        assert stated.max_error == math.ceil(100 * max(abs(row["error"]) for row in found)) / 100
        assert stated.is_held_out == all(row["used"] == "held out" for row in found)


def test_the_fit_uses_only_the_newest_record_of_each_workload(cases: list[plan_accuracy.Case]) -> None:
    keys = [(case.model, case.workload, case.dtype) for case in cases]
    assert len(keys) == len(set(keys))
    assert {case.commit for case in cases if case.model == "llama-3.2-1b" and case.workload == "chat"} == {"f35ed49"}


def test_serving_records_that_the_fit_never_saw_are_predicted_within_15_percent() -> None:
    rows = plan_accuracy.serving_rows(H200)
    assert len(rows) == 6
    assert [row for row in rows if abs(row["error"]) > 0.15] == []


@pytest.mark.parametrize("name", ["gemm", "cache_reads", "few_weight_reads"])
def test_a_worse_constant_is_noticed(name: str, cases: list[plan_accuracy.Case]) -> None:
    """The bound of 15 % is tight enough to see a rate that is half as high."""
    worse = replace(H200, **{name: getattr(H200, name) / 2})
    errors = [abs(row["error"]) for row in held_out(plan_accuracy.rows_of(cases, worse))]
    assert max(errors) > plan_accuracy.MAX_HELD_OUT_ERROR
