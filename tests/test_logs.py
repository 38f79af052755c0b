"""The log as JSON: records, printed lines and exceptions, in this process and in a whole server."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.cli.serve import asked_log_format
from headrace.logs import JsonFormatter, JsonLines, copy_lines


def formatted(message: str, *args: Any, **more: Any) -> dict[str, Any]:
    """The object of a record."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("headrace.test")
    logger.addHandler(handler)
    logger.warning(message, *args, **more)
    (line,) = out.getvalue().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def printed(*texts: str) -> list[dict[str, Any]]:
    """The objects of what is printed to stderr."""
    out = io.StringIO()
    lines = JsonLines(out)
    for text in texts:
        lines.write(text)
    lines.flush()
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_record_is_an_object_with_its_extra_fields() -> None:
    found = formatted("refused %s", "x", extra={"status": 503, "rate": 0.5, "path": Path("a")})
    assert list(found) == ["ts", "level", "logger", "message", "status", "rate", "path"]
    assert datetime.fromisoformat(found.pop("ts")).utcoffset() is not None
    assert found == {
        "level": "warning",
        "logger": "headrace.test",
        "message": "refused x",
        "status": 503,
        "rate": 0.5,
        "path": "a",
    }


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        found = formatted("it failed", exc_info=True)
    assert found["message"] == "it failed"
    assert (found["exception"]["type"], found["exception"]["message"]) == ("ValueError", "two\nlines")
    assert found["exception"]["traceback"].startswith("Traceback (most recent call last):")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have_are_null(value: float) -> None:
    assert formatted("x", extra={"rate": value})["rate"] is None


def test_a_field_cannot_replace_the_level_or_the_time() -> None:
    found = formatted("x", extra={"level": "mine", "ts": 0})
    assert found["level"] == "warning" and found["ts"] != 0


def test_no_character_breaks_a_line() -> None:
    assert formatted("a\nb\u2028c\ud800")["message"] == "a\nb\u2028c\ud800"


@pytest.mark.parametrize(
    ("line", "level", "logger", "message"),
    [
        ("headrace: serving x\n", "info", "headrace", "serving x"),
        ("headrace: warning: no keys\n", "warning", "headrace", "warning: no keys"),
        ("headrace: error: no model\n", "error", "headrace", "error: no model"),
        ("headrace serve: error: unknown option\n", "error", "headrace", "error: unknown option"),
        ("a library's line\n", "info", "stderr", "a library's line"),
        ("without an end", "info", "stderr", "without an end"),
    ],
)
def test_a_printed_line_is_an_object(line: str, level: str, logger: str, message: str) -> None:
    (found,) = printed(line)
    assert (found["level"], found["logger"], found["message"]) == (level, logger, message)


def test_lines_are_put_together_and_empty_ones_left_out() -> None:
    assert [each["message"] for each in printed("one", " line\n\n", "two\nthree\r", "\n", "four")] == [
        "one line",
        "two",
        "three",
        "four",
    ]


def test_objects_of_a_child_are_copied_and_other_lines_become_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", JsonLines(out))
    record = json.dumps(printed("x\n")[0])
    copy_lines(io.BytesIO(f"{record}\n\nFatal Python error\n\xff\n".encode("latin-1")), "headrace.engine")
    first, *others = out.getvalue().splitlines()
    assert first == record
    assert [(each["logger"], each["message"]) for each in map(json.loads, others)] == [
        ("headrace.engine", "Fatal Python error"),
        ("headrace.engine", "\N{REPLACEMENT CHARACTER}"),
    ]


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], "text"),
        (["--log-format", "json"], "json"),
        (["m", "--log-format=json"], "json"),
        (["--log-format", "json", "--log-format", "text"], "text"),
        (["--log-format"], "text"),
        (["--config", "no-such-file"], "text"),
        (["--config", "server.toml"], "json"),
        (["--config", "server.toml", "--log-format", "text"], "text"),
    ],
)
def test_the_format_is_known_before_arguments_are_parsed(
    arguments: list[str], asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server.toml").write_text('log-format = "json"\n')
    monkeypatch.chdir(tmp_path)
    assert asked_log_format(arguments) == asked


# ---- whole processes


@contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--log-format", "json", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--no-such-option"], 2, "error: unknown option --no-such-option"),
        (["/no/such/model"], 2, "error: "),
    ],
)
def test_an_error_at_the_start_is_json(arguments: list[str], status: int, message: str) -> None:
    with serving(*arguments) as process:
        lines = [json.loads(line) for line in process.communicate(timeout=120)[1].splitlines()]
    assert process.returncode == status
    assert any(line["level"] == "error" and line["message"].startswith(message) for line in lines)


@pytest.mark.slow
@pytest.mark.processes
def test_every_line_of_a_server_is_an_object(tiny_directory: Path) -> None:
    """Start, requests, a raw line of the engine's process, a restart of the engine, and the end."""
    options = ["--enable-log-requests", "--swap-space", "4", "--max-num-seqs", "4"]
    with serving(str(tiny_directory), *options) as process:
        lines = parsed(process.stderr)
        address = next(line["message"] for line in lines if line["message"].startswith("serving ")).split()[-1]
        asked = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        assert post(address, asked, "one") == 200
        access = next(lines)
        assert post(address, {"prompt": 1}, "two") == 400
        (engine,) = psutil.Process(process.pid).children()
        os.kill(engine.pid, signal.SIGUSR1)  # it writes its stacks, without the interpreter
        stack = next(line for line in lines if line["logger"] == "headrace.engine")
        os.kill(engine.pid, signal.SIGKILL)
        stopped = next(line for line in lines if line["level"] == "error")
        process.send_signal(signal.SIGTERM)
        rest = [line["message"] for line in lines]
        assert process.wait(60) == 0
    assert {name: access[name] for name in ("logger", "level", "method", "path", "status", "request_id")} == {
        "logger": "headrace.access",
        "level": "info",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "one",
    }
    assert (access["num_prompt_tokens"], access["num_output_tokens"]) == (3, 4)
    assert "0x" in stack["message"] or "most recent call first" in stack["message"]
    assert stopped["logger"] == "headrace.engine.process.supervisor"
    assert any(message.startswith("stopping: ") for message in rest)


def parsed(stream: Any) -> Iterator[dict[str, Any]]:
    for line in stream:
        found: dict[str, Any] = json.loads(line)
        assert {"ts", "level", "logger", "message"} <= set(found)
        yield found


def post(address: str, body: dict[str, Any], request_id: str) -> int:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    asked = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
