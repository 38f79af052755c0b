"""The file of a checkpoint: it diffs well, and what is wrong with it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.record import write_record
from headrace.checkpoint.document import KEYS, CheckpointError, digest_of, read_checkpoint, write_checkpoint
from tests.bench.records import offline_record
from tests.checkpoint.made import checkpoint, offline_facts


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.checkpoint"
    written = checkpoint(path, max_num_seqs=4)
    read = read_checkpoint(path)
    assert read == written
    assert not read.was_edited
    assert list(read.facts) == list(KEYS)
    assert read.at("engine", "settings", "max_num_seqs", "value") == 4


def test_a_changed_setting_is_a_few_lines_of_a_diff(tmp_path: Path) -> None:
    facts = offline_facts(max_num_seqs=4, block_size=16)
    write_checkpoint(facts, tmp_path / "a")
    facts["engine"]["settings"]["max_num_seqs"]["value"] = 8
    write_checkpoint(facts, tmp_path / "b")
    before, after = ((tmp_path / name).read_text().splitlines() for name in "ab")
    assert len(before) == len(after)
    changed = [line for line, other in zip(before, after, strict=True) if line != other]
    assert [line.split(":")[0].strip() for line in changed] == ['"digest"', '"max_num_seqs"']


def test_an_edited_file_is_read_and_known_as_edited(tmp_path: Path) -> None:
    path = tmp_path / "a.checkpoint"
    checkpoint(path)
    path.write_text(path.read_text().replace('"kind": "offline"', '"kind": "offlin"', 1))
    assert read_checkpoint(path).was_edited


def test_another_layout_of_the_same_content_is_no_edit(tmp_path: Path) -> None:
    path = tmp_path / "a.checkpoint"
    checkpoint(path)
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(facts.items()))))
    assert not read_checkpoint(path).was_edited
    assert digest_of(facts) == facts["digest"]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.checkpoint"
    checkpoint(path)
    path.write_text(path.read_text()[:500])
    with pytest.raises(CheckpointError, match=r"not JSON .* truncated"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a checkpoint of Headrace"),
        ('{"schema": "other"}', "not a checkpoint of Headrace"),
        ('{"schema": "headrace.checkpoint/9"}', "this version of Headrace reads 'headrace.checkpoint/1'"),
        ('{"schema": "headrace.checkpoint/1", "kind": "offline"}', "lacks a valid decision, verification"),
    ],
)
def test_another_schema_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.checkpoint"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("path_in_file", "value", "named"),
    [
        (("verification", "loads"), [], "verification.loads"),
        (("verification", "loads"), [{"load": "x"}], "verification.loads"),
        (("verification", "num_rounds"), "three", "verification.num_rounds"),
        (("engine", "settings"), None, "engine.settings"),
        (("machine",), "a machine", "machine"),
    ],
)
def test_an_edit_that_breaks_the_structure_is_refused_by_name(
    tmp_path: Path, path_in_file: tuple[str, ...], value: object, named: str
) -> None:
    path = tmp_path / "a.checkpoint"
    checkpoint(path)
    facts = json.loads(path.read_text())
    owner = facts
    for key in path_in_file[:-1]:
        owner = owner[key]
    owner[path_in_file[-1]] = value
    path.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=f"lacks a valid {named}"):
        read_checkpoint(path)


def test_what_a_measurement_is_repeated_with_keeps_every_digit(tmp_path: Path) -> None:
    facts = offline_facts(gpu_memory_utilization=0.123456789)
    facts["workload"] |= {"spread": 0.123456789}
    facts["load"] = {"kind": "open_loop", "rate": 1.23456789}
    made = write_checkpoint(facts, tmp_path / "a")
    assert made.at("engine", "settings", "gpu_memory_utilization", "value") == 0.123456789
    assert made.at("workload", "spread") == 0.123456789
    assert made.at("load", "rate") == 1.23456789


def test_a_record_in_its_place_is_answered_with_the_command_to_use(tmp_path: Path) -> None:
    write_record(offline_record(), tmp_path / "r.json")
    with pytest.raises(CheckpointError, match=r"headrace checkpoint create .*r\.json -o"):
        read_checkpoint(tmp_path / "r.json")


def test_a_missing_file_and_a_place_that_cannot_be_written_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_checkpoint(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint({"kind": "offline"}, tmp_path / "file" / "a")
