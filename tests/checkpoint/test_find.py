"""Which checkpoint of a directory is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.checkpoint import find_checkpoint
from headrace.checkpoint.create import from_records
from headrace.checkpoint.document import write_checkpoint
from tests.bench.records import level, offline_record, online_record, outcomes

MACHINE: dict[str, Any] = {"cpu": "A CPU", "num_cores": 8, "gpus": [], "platform": "another system"}
DIGEST = "d1" * 8


def save(path: Path, record: dict[str, Any], **changes: Any) -> Path:
    write_checkpoint(from_records([record]) | changes, path)
    return path


def test_the_newest_of_the_same_model_machine_and_kind_of_workload_is_found(tmp_path: Path) -> None:
    save(tmp_path / "old.checkpoint", offline_record(), created_at="2026-01-01")
    newest = save(tmp_path / "new.json", offline_record(), created_at="2026-02-01")
    serving = save(tmp_path / "serve.checkpoint", online_record([level(8, outcomes())]), created_at="2026-03-01")
    (tmp_path / "broken.checkpoint").write_text("{")
    (tmp_path / "record.json").write_text('{"schema": "headrace.bench/1"}')
    batch = find_checkpoint(tmp_path, model_digest=DIGEST, machine=MACHINE, workload_kind="batch")
    assert batch is not None and batch.path == newest
    serve = find_checkpoint(tmp_path, model_digest=DIGEST, machine=MACHINE, workload_kind="serve")
    assert serve is not None and serve.path == serving


def test_another_model_or_machine_has_none(tmp_path: Path) -> None:
    save(tmp_path / "a.checkpoint", offline_record())
    gpu = MACHINE | {"gpus": [{"name": "H200"}]}
    assert find_checkpoint(tmp_path, model_digest="other", machine=MACHINE, workload_kind="batch") is None
    assert find_checkpoint(tmp_path, model_digest=DIGEST, machine=gpu, workload_kind="batch") is None
    assert find_checkpoint(tmp_path, model_digest=DIGEST, machine=MACHINE, workload_kind="batch") is not None
    other = find_checkpoint(tmp_path, model_digest=DIGEST, machine=MACHINE, workload_kind="batch", engine="vllm")
    assert other is None


def test_one_that_compared_settings_is_preferred(tmp_path: Path) -> None:
    compared = {"text": "t", "reason": "r", "alternatives": [{"name": "own"}]}
    tuned = save(tmp_path / "a.checkpoint", offline_record(), created_at="2026-01-01", decision=compared)
    save(tmp_path / "b.checkpoint", offline_record(), created_at="2026-02-01")
    found = find_checkpoint(tmp_path, model_digest=DIGEST, machine=MACHINE, workload_kind="batch")
    assert found is not None and found.path == tuned
