"""Workloads from files: prompts, ShareGPT conversations, traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.workloads import Workload, WorkloadSpec, read_workload
from headrace.errors import ConfigError


def words(text: str) -> int:
    return len(text.split())


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def read(path: str, **options: Any) -> Workload:
    spec = WorkloadSpec(name="data", **options)
    return read_workload(path, spec, count_tokens=words)[0]


def test_lines_of_a_job(tmp_path: Path) -> None:
    path = written(
        tmp_path / "in.jsonl",
        [
            {"prompt": "one two three", "max_tokens": 7},
            {"prompt": [5, 6]},
            {"messages": [{"role": "user", "content": "hello"}]},
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 9}},
        ],
    )
    requests = read(path, output_len=33).requests
    assert [(r.prompt, r.is_chat, r.output_len, r.num_prompt_tokens) for r in requests] == [
        ("one two three", False, 7, 3),
        ([5, 6], False, 33, 2),
        (None, True, 33, None),
        ("x", False, 9, 1),
    ]


def test_bad_lines_are_an_error_with_their_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", [{"prompt": "a"}, "{no json", {"text": 1}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match=r"line 2: .*line 3: .*--skip-bad-lines"):
        read(path)
    workload, notes = read_workload(path, WorkloadSpec(name="data"), count_tokens=words, skips_bad_lines=True)
    assert [request.prompt for request in workload.requests] == ["a", "b"]
    assert notes == [f"2 bad lines of {path} were left out"]


def test_the_digest_follows_the_content_and_not_the_path(tmp_path: Path) -> None:
    same = [read(written(tmp_path / name, [{"prompt": "a"}])).spec.hash for name in ("x.jsonl", "y.jsonl")]
    other = read(written(tmp_path / "z.jsonl", [{"prompt": "b"}])).spec.hash
    assert same[0] == same[1] != other


@pytest.mark.parametrize("name", ["share.json", "share.jsonl"])
def test_a_sharegpt_file_gives_first_questions_and_lengths_of_answers(tmp_path: Path, name: str) -> None:
    rows = [
        {
            "conversations": [
                {"from": "human", "value": "a question"},
                {"from": "gpt", "value": "an answer of five words"},
            ]
        },
        {"conversations": [{"from": "human", "value": "nobody answered"}]},
    ]
    path = tmp_path / name
    path.write_text(json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows)))
    (request,) = read(str(path)).requests
    assert request.messages == [{"role": "user", "content": "a question"}]
    assert request.output_len == 5


def test_a_mooncake_trace_shares_prefixes_where_its_hashes_are_equal(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 4]},
    ]
    first, second = read(written(tmp_path / "trace.jsonl", rows)).requests
    assert (first.due_s, second.due_s) == (0.0, 0.5)
    assert isinstance(first.prompt, list) and isinstance(second.prompt, list)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:]
    assert len(first.prompt) == 1100


def test_azures_and_burstgpts_traces_are_read_with_arrivals_and_lengths(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    _, second = read(str(azure)).requests
    assert second.due_s == pytest.approx(4.314579)
    assert (second.num_prompt_tokens, second.output_len) == (396, 109)
    burst = tmp_path / "burst.csv"
    burst.write_text("Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45,ChatGPT,1087,230\n")
    assert [request.due_s for request in read(str(burst)).requests] == [0.0, 40.0]


def test_a_bad_row_of_a_trace_is_named(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 4, "output_length": 9},
        {"timestamp": 5, "input_length": 4},
        {"timestamp": 5, "input_length": 0, "output_length": 1},
    ]
    with pytest.raises(ConfigError, match=r"line 2: .*line 3: "):
        read(written(tmp_path / "trace.jsonl", rows))


def test_lengths_only_hides_the_users_prompts(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", [{"prompt": "my secret prompt"}])
    (request,) = read(path, uses_lengths_only=True).requests
    assert isinstance(request.prompt, list)
    assert len(request.prompt) == 3


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read(str(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match="no request"):
        read(written(tmp_path / "empty.jsonl", []))
