"""Workloads from the user's own files.

    prompts     whatever `headrace run` reads: JSONL, CSV, Parquet, OpenAI's batch format; answers of the line's
                max_tokens, or of --output-len
    ShareGPT    a JSON array, or lines, with `conversations`: the first question, and an answer as long as the recorded
                one
    trace       lines or CSV rows with arrival time, input and output length: Mooncake's format (whose `hash_ids` become
                shared prefixes), Azure's and BurstGPT's columns

A line that cannot be read is an error with its number, unless the caller leaves bad lines out; then they are counted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from headrace.bench.workloads.named import with_ends
from headrace.bench.workloads.requests import BenchRequest, Workload
from headrace.bench.workloads.spec import HASH_LEN, WorkloadSpec
from headrace.errors import ConfigError
from headrace.jobs.formats import open_source
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.fields import UNTIL_CONTEXT_ENDS
from headrace.jobs.input.lines import BadLine, LineParser

DEFAULT_OUTPUT_LEN = 128
CHARACTERS_PER_TOKEN = 4  # of English, where no tokenizer is known
MOONCAKE_BLOCK = 512  # tokens of one entry in `hash_ids`
MAX_SHOWN = 3  # bad lines in the error
CHUNK_BYTES = 1 << 20

CountTokens = Callable[[str], int]
Row = Mapping[str, Any]

# Names of the columns of traces, without case: arrival time, tokens in, tokens out.
_TIME = ("due_s", "timestamp", "arrival_time", "arrived_at")
_INPUT = ("input_length", "input_len", "prompt_len", "contexttokens", "request tokens", "num_prompt_tokens")
_OUTPUT = ("output_length", "output_len", "generatedtokens", "response tokens", "num_output_tokens")


@dataclass
class Reading:
    """How a file is read, and which lines could not be."""

    spec: WorkloadSpec
    count_tokens: CountTokens | None = None
    bad_lines: list[str] = field(default_factory=list)

    def bad(self, number: int, why: str) -> None:
        self.bad_lines.append(f"line {number:,}: {why}")

    def count(self, text: str) -> int:
        return self.count_tokens(text) if self.count_tokens else max(1, len(text) // CHARACTERS_PER_TOKEN)

    @property
    def output_len(self) -> int:
        return self.spec.output_len or DEFAULT_OUTPUT_LEN


def read_workload(
    path: str, spec: WorkloadSpec, *, count_tokens: CountTokens | None = None, skips_bad_lines: bool = False
) -> tuple[Workload, list[str]]:
    """The workload of a file, and notes on what was left out. Without `count_tokens`, text lengths are estimates."""
    spec = replace(spec, data_path=path, data_digest=_digest(path), seed=spec.seed or 0)
    reading = Reading(spec, count_tokens)
    requests = []
    for request in _requests(path, reading):
        requests.append(request)
        if spec.num_requests is not None and len(requests) == spec.num_requests:
            break
    if reading.bad_lines and not skips_bad_lines:
        shown = "; ".join(reading.bad_lines[:MAX_SHOWN])
        more = len(reading.bad_lines) - MAX_SHOWN
        raise ConfigError(
            f"{path} has lines that cannot be used: {shown}{f'; and {more:,} more' if more > 0 else ''}. "
            "Correct them, or leave them out with --skip-bad-lines"
        )
    if not requests:
        raise ConfigError(f"{path} has no request that can be used")
    if spec.uses_lengths_only:
        requests = _with_random_tokens(requests, spec)
    notes = [f"{len(reading.bad_lines):,} bad lines of {path} were left out"] if reading.bad_lines else []
    if count_tokens is None and any(request.num_prompt_tokens is None for request in requests):
        notes.append("prompt lengths are the server's: no tokenizer is known here")
    return Workload(replace(spec, num_requests=len(requests)), with_ends(spec, requests)), notes


def _requests(path: str, reading: Reading) -> Iterator[BenchRequest]:
    if path.endswith(".json"):
        yield from _conversations(enumerate(_array(path), 1), reading)
        return
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        return
    kind = _kind_of(first)
    everything = _chain(first, lines)
    if kind == "sharegpt":
        yield from _conversations(_decoded(everything, reading), reading)
    elif kind == "trace":
        yield from _trace(_decoded(everything, reading), reading)
    else:
        yield from _prompts(everything, reading)


def _kind_of(first: InputLine) -> str:
    try:
        row = json.loads(first.data)
    except ValueError:
        return "prompts"
    if not isinstance(row, dict):
        return "prompts"
    if "conversations" in row:
        return "sharegpt"
    names = {name.lower() for name in row}
    return "trace" if names & set(_TIME) and names & set(_INPUT) and "prompt" not in names else "prompts"


def _prompts(lines: Iterator[InputLine], reading: Reading) -> Iterator[BenchRequest]:
    parser = LineParser({}, seed=0, model_name="")
    for line in lines:
        parsed = parser.parse(line)
        if isinstance(parsed, BadLine):
            reading.bad(line.number, str(parsed.error))
            continue
        given = parsed.params.max_tokens
        has_length = given is not None and given != UNTIL_CONTEXT_ENDS and b"max_" in line.data
        yield BenchRequest(
            prompt=parsed.prompt,
            messages=None if parsed.messages is None else [dict(message) for message in parsed.messages],
            output_len=given if has_length and given else reading.output_len,
            num_prompt_tokens=_prompt_len(parsed.prompt, reading),
        )


def _prompt_len(prompt: str | list[int] | None, reading: Reading) -> int | None:
    if isinstance(prompt, list):
        return len(prompt)
    return reading.count(prompt) if prompt is not None and reading.count_tokens is not None else None


def _conversations(rows: Iterator[tuple[int, Any]], reading: Reading) -> Iterator[BenchRequest]:
    """The first question and answer of each conversation, as benchmarks with ShareGPT do."""
    for number, row in rows:
        turns = row.get("conversations") if isinstance(row, dict) else None
        if not isinstance(turns, list):
            reading.bad(number, "no list of 'conversations'")
            continue
        texts = [turn.get("value", turn.get("content")) for turn in turns if isinstance(turn, dict)]
        if len(texts) < 2:
            continue  # as other benchmarks do: nothing was asked, or nothing answered
        question, answer = texts[:2]
        if not (isinstance(question, str) and question and isinstance(answer, str) and answer):
            reading.bad(number, "the first two turns need a text in 'value'")
            continue
        yield BenchRequest(
            messages=[{"role": "user", "content": question}],
            output_len=reading.spec.output_len or max(1, reading.count(answer)),
            num_prompt_tokens=None,
        )


def _trace(rows: Iterator[tuple[int, Any]], reading: Reading) -> Iterator[BenchRequest]:
    spec, start = reading.spec, None
    for number, row in rows:
        named = {name.lower(): value for name, value in row.items()} if isinstance(row, dict) else {}
        try:
            due_s = _seconds(named)
            input_len, output_len = (int(_first(named, names)) for names in (_INPUT, _OUTPUT))
            if input_len < 1 or output_len < 1:
                raise ValueError(f"lengths of {input_len} and {output_len} tokens")
        except (KeyError, TypeError, ValueError) as error:
            reading.bad(number, f"not a row of a trace ({error})")
            continue
        start = due_s if start is None else start
        prompt = _tokens_of(named.get("hash_ids"), input_len, number, spec)
        yield BenchRequest(
            prompt=prompt, output_len=output_len, num_prompt_tokens=input_len, due_s=max(0.0, due_s - start)
        )


def _seconds(row: Row) -> float:
    """The arrival time in seconds: `timestamp` of JSON is in milliseconds (Mooncake), of CSV in seconds or a date."""
    value = _first(row, _TIME)
    if isinstance(value, str):
        return float(value) if value.replace(".", "", 1).isdigit() else datetime.fromisoformat(value[:26]).timestamp()
    return float(value) / (1000 if "timestamp" in row else 1)


def _first(row: Row, names: tuple[str, ...]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise KeyError(f"none of {', '.join(names)}")


def _tokens_of(hash_ids: Any, count: int, number: int, spec: WorkloadSpec) -> list[int]:
    """Random tokens; equal hash ids give equal blocks, so that shared prefixes are shared."""
    seeds = hash_ids if isinstance(hash_ids, list) and hash_ids else [f"line {number}"]
    tokens: list[int] = []
    for seed in seeds:
        rng = random.Random(f"{spec.seed} {seed}")
        size = count if len(seeds) == 1 else MOONCAKE_BLOCK
        tokens += [rng.randrange(spec.first_token_id, spec.last_token_id) for _ in range(size)]
        if len(tokens) >= count:
            break
    rng = random.Random(f"{spec.seed} rest {number}")
    tokens += [rng.randrange(spec.first_token_id, spec.last_token_id) for _ in range(count - len(tokens))]
    return tokens[:count]


def _with_random_tokens(requests: list[BenchRequest], spec: WorkloadSpec) -> list[BenchRequest]:
    if any(request.num_prompt_tokens is None for request in requests):
        raise ConfigError(
            "only the lengths of this file are wanted, which needs a tokenizer to count them: give --model"
        )
    rng = random.Random(spec.seed)
    return [
        BenchRequest(
            prompt=[
                rng.randrange(spec.first_token_id, spec.last_token_id) for _ in range(request.num_prompt_tokens or 1)
            ],
            output_len=request.output_len,
            num_prompt_tokens=request.num_prompt_tokens,
            due_s=request.due_s,
        )
        for request in requests
    ]


def _lines(path: str) -> Iterator[InputLine]:
    source = open_source(path)
    try:
        for batch in source.read_batches():
            yield from batch
    finally:
        source.close()


def _chain(first: InputLine, rest: Iterator[InputLine]) -> Iterator[InputLine]:
    yield first
    yield from rest


def _decoded(lines: Iterator[InputLine], reading: Reading) -> Iterator[tuple[int, Any]]:
    for line in lines:
        try:
            yield line.number, json.loads(line.data)
        except ValueError as error:
            reading.bad(line.number, f"not JSON ({error})")


def _array(path: str) -> list[Any]:
    try:
        rows = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{path} must be a JSON array of conversations, as ShareGPT's files are")
    return rows


def _digest(path: str) -> str | None:
    """Of a local file's bytes."""
    digest = sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        if "://" in path:
            return None
        raise ConfigError(f"{path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()[:HASH_LEN]
