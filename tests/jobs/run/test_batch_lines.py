"""Batch lines that are more than one prompt to continue: prompts to embed, several prompts, tools, responses."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM
from headrace.config import EngineConfig
from headrace.engine.start import Engine
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.report import JobReport
from tests.jobs.faults import AT_ONCE, FaultyRunner, FaultyStart

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]

URLS = {"chat": "/v1/chat/completions", "text": "/v1/completions", "embed": "/v1/embeddings"} | {
    "response": "/v1/responses"
}


def line(kind: str, custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URLS[kind], "body": body}


def run(source: Path, start: Any, **options: Any) -> JobReport:
    output = source.parent / "out.jsonl"
    return run_job(JobSpec(input=str(source), output=str(output), **options), start=start, rules=AT_ONCE, quiet=True)


def read(source: Path) -> dict[str, tuple[int, Any]]:
    """The status and the body of each line, by its custom id."""
    lines = [json.loads(line) for line in (source.parent / "out.jsonl").read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in lines}


# Embeddings.


def test_embeddings_are_those_of_python(tiny_directory: Path, write_lines: WriteLines) -> None:
    source = write_lines(
        line("embed", "one", input="hello"),
        line("embed", "several", input=["hello", "a much longer text"]),
        line("embed", "ids", input=[5, 6, 7]),
        line("embed", "lists", input=[[5, 6, 7], [8]]),
        line("embed", "base64", input="hello", encoding_format="base64"),
        line("chat", "chat", messages=[{"role": "user", "content": "hi"}], max_tokens=3),
    )
    config = EngineConfig(model=str(tiny_directory), num_gpu_blocks_override=64)
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), config=config)
    assert run_job(job, quiet=True).exit_code == 0
    bodies = {name: body for name, (_, body) in read(source).items()}
    llm = LLM(str(tiny_directory), num_gpu_blocks_override=64)
    prompts: dict[str, Any] = {
        "one": ["hello"],
        "several": ["hello", "a much longer text"],
        "ids": [[5, 6, 7]],
        "lists": [[5, 6, 7], [8]],
    }
    for name, given in prompts.items():
        outputs = llm.embed(given, use_tqdm=False)
        body = bodies[name]
        assert body["object"] == "list" and body["model"] == str(tiny_directory)
        assert [(item["object"], item["index"]) for item in body["data"]] == [
            ("embedding", index) for index in range(len(given))
        ]
        for item, output in zip(body["data"], outputs, strict=True):
            np.testing.assert_allclose(item["embedding"], output.embedding, atol=1e-5)
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    decoded = np.frombuffer(base64.b64decode(bodies["base64"]["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, bodies["one"]["data"][0]["embedding"], atol=1e-5)
    assert bodies["chat"]["object"] == "chat.completion"
    llm.close()


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({}, "input", "missing_parameter"),
        ({"input": []}, "input", "empty_prompt"),
        ({"input": ""}, "input", "empty_prompt"),
        ({"input": ["a", ""]}, "input", "empty_prompt"),
        ({"input": ["a", 1]}, "input", "invalid_type"),
        ({"input": [10**6]}, "input", "invalid_request"),
        ({"input": [[5], [10**6]]}, "input", "invalid_request"),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
        ({"input": ["a", "x" * 600]}, "input", "context_length_exceeded"),
        ({"input": ["a"] * 2049}, "input", "invalid_request"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_request"),
        ({"input": "a", "dimensions": 2}, "dimensions", "unsupported_parameter"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "invalid_request"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown_parameter"),
    ],
)
def test_a_bad_embedding_line_is_an_error_of_its_own(
    write_lines: WriteLines, start: Start, body: dict[str, Any], param: str, code: str
) -> None:
    source = write_lines(line("embed", "bad", **body), line("embed", "good", input="a", user="me"))
    report = run(source, start)
    assert (report.tally.num_answered, dict(report.tally.errors)) == (1, {code: 1})
    status, answer = read(source)["bad"]
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert answer["error"]["message"].startswith("line 1: ")


def test_equal_embedding_lines_are_computed_once(write_lines: WriteLines, start: Start) -> None:
    faulty = FaultyStart(start, FaultyRunner())
    source = write_lines(
        line("embed", "a", input=["x", "yz"]),
        line("embed", "b", input=["x", "yz"], encoding_format="base64"),
        line("embed", "other split", input=["xy", "z"]),
        line("embed", "joined", input="xyz"),
    )
    report = run(source, faulty)
    assert (report.saved.duplicate_lines, len(faulty.submitted[0])) == (1, 2 + 2 + 1)
    bodies = {name: body for name, (_, body) in read(source).items()}
    assert isinstance(bodies["b"]["data"][0]["embedding"], str)
    assert [len(bodies[name]["data"]) for name in ("a", "b", "other split", "joined")] == [2, 2, 2, 1]


def test_a_line_of_embeddings_that_fails_in_part_is_retried_as_a_whole(write_lines: WriteLines, start: Start) -> None:
    faulty = FaultyStart(start, FaultyRunner(), fails=["0.0.1"])
    source = write_lines(line("embed", "a", input=["x", "y", "z"]))
    report = run(source, faulty)
    assert (report.exit_code, report.failures.retries) == (0, {"engine_error": 1})
    assert faulty.submitted[0] == [f"0.{attempt}.{part}" for attempt in (0, 1) for part in (0, 1, 2)]
    assert len(read(source)["a"][1]["data"]) == 3


def test_a_line_of_embeddings_can_be_poison(write_lines: WriteLines, start: Start) -> None:
    lines = [line("embed", f"{number}", input=[f"a{number}", f"b{number}"]) for number in range(6)]
    lines[3]["body"]["input"][1] = "!"
    source = write_lines(*lines)
    faulty = FaultyStart(start, FaultyRunner())
    report = run(source, faulty)
    assert (report.tally.num_answered, dict(report.tally.errors)) == (5, {"poison_request": 1})
    assert read(source)["3"][0] == 500


# Several prompts.


def test_the_answers_to_several_prompts_are_numbered_one_after_the_other(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(line("text", "a", prompt=["hi", "hi", "hello"], n=2, max_tokens=8, ignore_eos=True))
    report = run(source, start)
    assert (report.tally.num_answered, report.tally.num_generated_tokens) == (1, 3 * 2 * 8)
    status, body = read(source)["a"]
    assert status == 200 and [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert body["usage"]["prompt_tokens"] == 2 + 2 + 5 and body["usage"]["completion_tokens"] == 48
    texts = [choice["text"] for choice in body["choices"]]
    assert len(set(texts)) == 6, "equal prompts without a seed have equal answers"


def test_several_prompts_are_answered_like_one(write_lines: WriteLines, start: Start) -> None:
    fields = {"max_tokens": 8, "seed": 3, "temperature": 1}
    source = write_lines(
        line("text", "both", prompt=["a", "b"], **fields),
        line("text", "first", prompt="a", **fields),
        line("text", "second", prompt="b", **fields),
    )
    assert run(source, start).exit_code == 0
    texts = {name: [choice["text"] for choice in body["choices"]] for name, (_, body) in read(source).items()}
    assert texts["both"] == texts["first"] + texts["second"]


def test_a_line_of_more_sequences_than_the_engine_runs(write_lines: WriteLines, start: Start) -> None:
    prompts = [f"prompt {number}" for number in range(60)]
    lines = [line("text", f"{number}", prompt=f"line {number}", max_tokens=4) for number in range(30)]
    source = write_lines(line("text", "many", prompt=prompts, n=2, max_tokens=3), *lines)
    assert run(source, start).tally.num_answered == 31
    assert len(read(source)["many"][1]["choices"]) == 120


def test_lines_of_several_prompts_survive_the_death_of_the_engine(write_lines: WriteLines, start: Start) -> None:
    def many(number: int) -> dict[str, Any]:
        prompts = [f"{number} {part}" for part in range(4)]
        return line("text", f"{number}", prompt=prompts, max_tokens=3 + number % 5, temperature=0)

    source = write_lines(*map(many, range(20)))
    assert run(source, start).exit_code == 0
    expected = {name: body["choices"] for name, (_, body) in read(source).items()}
    faulty = FaultyStart(start, FaultyRunner(dies_at=(3, 9, 15)))
    assert run(source, faulty, overwrite=True).exit_code == 0
    assert len(faulty.submitted) == 4
    assert {name: body["choices"] for name, (_, body) in read(source).items()} == expected


def test_a_line_of_several_prompts_is_retried_as_a_whole(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(line("text", "a", prompt=["x", "y"], max_tokens=2), line("text", "b", prompt="z"))
    faulty = FaultyStart(start, FaultyRunner(), fails=["0.0.0", "0.1.1", "0.2.0", "0.3.1", "0.4.0"])
    report = run(source, faulty)
    assert (report.tally.num_answered, dict(report.tally.errors)) == (1, {"engine_error": 1})
    assert read(source)["a"][0] == 500 and read(source)["b"][0] == 200
    assert max(faulty.submitted[0]) == "1" and faulty.submitted[0].count("0.4.1") == 1


# Responses.


def test_a_response_takes_the_jobs_defaults_and_has_one_message(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(
        line("response", "a", input="hi"),
        line("response", "b", input="hi", max_output_tokens=2, temperature=0),
        line("chat", "chat", messages=[{"role": "user", "content": "hi"}]),
    )
    defaults = {"max_tokens": 5, "temperature": 0.5, "n": 2, "ignore_eos": True}
    assert run(source, start, defaults=defaults).exit_code == 0
    bodies = {name: body for name, (_, body) in read(source).items()}
    assert [bodies[name]["usage"]["output_tokens"] for name in ("a", "b")] == [5, 2]
    assert [bodies[name]["temperature"] for name in ("a", "b")] == [0.5, 0]
    assert [bodies[name]["status"] for name in ("a", "b")] == ["incomplete"] * 2
    assert len(bodies["a"]["output"]) == 1 and len(bodies["chat"]["choices"]) == 2
    assert bodies["a"]["max_output_tokens"] is None


def test_a_response_that_is_too_short_is_computed_again(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(
        line("response", "a", input="hi", max_output_tokens=2, ignore_eos=True),
        line("embed", "b", input="hi"),
    )
    assert run(source, start).exit_code == 0
    report = run(source, start, redo="finish_reason=length", overrides={"max_tokens": 4})
    assert (report.num_before, report.tally.num_answered) == (1, 1)
    assert read(source)["a"][1]["usage"]["output_tokens"] == 4


# Tools.


def test_lines_with_the_same_tools_share_parameters_and_grammar(write_lines: WriteLines, start: Start) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    choice = {"type": "function", "function": {"name": "f"}}
    lines = [
        line("chat", f"{n}", messages=[{"role": "user", "content": f"{n}"}], tools=[tool], tool_choice=choice)
        for n in range(3)
    ]
    source = write_lines(*lines)
    submitted: list[Any] = []

    def recording(config: EngineConfig, deliver: Any) -> Engine:
        engine = start(config, deliver)
        submit = engine.client.submit
        engine.client.submit = lambda request: (submitted.append(request), submit(request))[1]  # type: ignore
        return engine

    assert run(source, recording, defaults={"max_tokens": 120}).exit_code == 0
    assert len({id(request.params) for request in submitted}) == 1 and len(submitted) == 3
    for _, body in read(source).values():
        (call,) = body["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
