from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import serve as command
from headrace.cli.engine_flags import flag_of
from headrace.cli.removed_flags import table
from headrace.cli.serve import Parsed, build_parser, option_groups, read
from headrace.cli.serving_table import table as options_table
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.other_flags import OTHER_FLAGS
from headrace.other_settings import ALIASES
from headrace.server.options import ServerOptions

PAGE = Path(__file__).parents[2] / "docs" / "serving-operations.md"
FIELDS = {field.name: field for field in dataclasses.fields(ServerOptions)}
EXAMPLES: dict[str, Any] = {"root_path": "/llm", "overload_status": 429, "allowed_origins": "https://a.example"}
EXAMPLES |= {"preferred_batch_size": "4,8", "queue_timeout_action": "delay", "tool_call_parser": "hermes"}
EXAMPLES |= {"reasoning_parser": "qwen3"}
EXAMPLES |= {"log_format": "json", "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces"}
EXAMPLES |= {
    name: "text"
    for name, field in FIELDS.items()
    if field.type in ("str", "str | None", "str | tuple[str, ...] | None") and name not in EXAMPLES
}
EXAMPLES |= {name: not field.default for name, field in FIELDS.items() if field.type == "bool"}
TOGETHER = {  # options that a field requires
    "ssl_keyfile": ["--ssl-certfile", "text"],
    "allow_timeout_override": ["--queue-timeout-us", "5"],
}


def parsed(*arguments: str) -> Parsed:
    return read(build_parser(), arguments)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parsed(*arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def toml(directory: Path, text: str) -> str:
    path = directory / "server.toml"
    path.write_text(text)
    return str(path)


# ---- flags


def test_no_flags_give_the_defaults() -> None:
    assert parsed() == (EngineConfig(), ServerOptions())


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_flag_that_sets_it(name: str) -> None:
    value = EXAMPLES.get(name, 7)
    flag = flag_of(name)
    given = [flag] if value is True else ["--no-" + flag.removeprefix("--")] if value is False else [flag, str(value)]
    assert getattr(parsed(*given, *TOGETHER.get(name, [])).options, name) == value


def test_every_field_is_in_one_group_with_its_help() -> None:
    groups = option_groups()
    assert [title for title, _, _ in groups] == ["server", "access", "limits", "batching", "batch API", "behaviour"]
    assert [field.name for _, _, fields in groups for field in fields] == list(FIELDS)
    text = build_parser().format_help()
    assert all(flag_of(name) in text for name in FIELDS)
    assert "engine:" in text and "--max-num-seqs" in text


def test_the_model_may_be_positional() -> None:
    assert parsed("m", "--port", "1").config.model == parsed("--model", "m").config.model == "m"
    assert parsed("m", "--model", "m").config.model == "m"


def test_two_different_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "two models are given, 'a' and --model 'b'" in refused(capsys, "a", "--model", "b")


@pytest.mark.parametrize("field", ALIASES)
def test_aliases_of_a_flag_set_the_same_field(field: str) -> None:
    values = []
    text = '{"num_speculative_tokens": 1}' if field == "speculative_config" else "1"
    for flag in (flag_of(field), *ALIASES[field]):
        made = parsed(flag, text)
        values.append(getattr(made.options if field in FIELDS else made.config, field))
    assert len(values) > 1 and values[0] and all(value == values[0] for value in values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "port must be between 0 and 65535, got 70000"),
        (["--overload-status", "500"], "overload_status must be 503 or 429"),
        (["--max-num-queued-reqs", "0"], "at least 1"),
        (["--read-timeout-s", "nan"], "read_timeout_s must be a number above 0"),
        (["--read-timeout-s", "0"], "read_timeout_s must be a number above 0"),
        (["--preferred-batch-size", "4,x"], "whole numbers from 1"),
        (["--allowed-origins", "example.com"], "must be like https://example.com"),
        (["--root-path", "llm"], "must begin with a slash"),
        (["--ssl-keyfile", "k"], "ssl_keyfile needs ssl_certfile"),
        (["--allow-timeout-override"], "queue_timeout_us, which is not set"),
        (["--max-num-queued-req", "1"], "did you mean '--max-num-queued-reqs'?"),
        (["--dtype", "int3"], "invalid choice"),
    ],
)
def test_an_invalid_option_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, *arguments)


def test_a_key_on_the_command_line_gives_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("--api-key", "k").options.api_key == "k"
    assert "--api-key is visible to other users of this machine" in capsys.readouterr().err


def test_lists_may_be_json_as_in_vllm() -> None:
    assert parsed("--allowed-origins", '["https://a.example"]').options.origins == {"https://a.example"}


# ---- flags of vLLM


@pytest.mark.parametrize(
    "flag",
    [
        *("--scheduler-delay-factor", "--use-v2-block-manager", "--swap-space", "--num-scheduler-steps"),
        *("--preemption-mode", "--max-seq-len-to-capture", "--ngram-prompt-lookup-max"),
        *("--disable-async-output-proc", "--guided-decoding-backend", "--num-lookahead-slots", "--rope-scaling"),
        *("--cuda-graph-sizes", "--disable-log-requests", "--max-num-partial-prefills"),
    ],
)
def test_flags_named_by_older_guides_are_known(flag: str) -> None:
    assert flag in OTHER_FLAGS


@pytest.mark.parametrize(
    ("flag", "way_out"),
    [
        ("--batch-scheduler-policy", "use --capacity-policy"),
        ("--max-tokens-in-paged-kv-cache", "use --num-gpu-blocks-override"),
        ("--executor_static_batch_size", "use --capacity-policy static_batch"),
    ],
)
def test_names_of_tensorrt_llm_are_explained(capsys: pytest.CaptureFixture[str], flag: str, way_out: str) -> None:
    assert f"{flag} is refused: {way_out}" in refused(capsys, flag, "8")


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        (["--enable-chunked-prefill", "False"], False),
        (["--enable-chunked-prefill=false"], False),
        (["--enable-chunked-prefill", "True"], True),
        (["--no-enable-chunked-prefill", "false"], True),
        (["--no-enable-chunked-prefill=true"], False),
    ],
)
def test_a_switch_may_have_true_or_false_as_its_value(given: list[str], is_on: bool) -> None:
    config = parsed("m", *given, "--port", "5").config
    assert (config.model, config.enable_chunked_prefill) == ("m", is_on)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "64", "--max-num-seqs", "4"],
            "max_num_batched_tokens=64 must be at least max_model_len=512",
        ),
        pytest.param(["--quantization", "fp8", "--device", "cpu"], "fp8", marks=pytest.mark.slow),
    ],
)
def test_a_setting_that_the_engine_refuses_is_an_error_of_one_line(
    tiny_directory: Path, given: list[str], problem: str
) -> None:
    command = [sys.executable, "-m", "headrace", "serve", str(tiny_directory), "--port", "0", *given]
    environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_DEBUG"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("headrace: error: ") and problem in line


def test_no_flag_is_both_supported_and_removed() -> None:
    supported = set(build_parser().flags)
    assert supported.isdisjoint(OTHER_FLAGS)
    assert not [word for other in OTHER_FLAGS.values() for word in _flags_in(other.answer) if word not in supported]


def _flags_in(text: str) -> list[str]:
    return [word.strip(";,.") for word in text.split() if word.startswith("--")]


def test_a_value_that_matches_the_behaviour_is_accepted_silently(capsys: pytest.CaptureFixture[str]) -> None:
    parsed("--tensor-parallel-size", "1", "-tp", "1", "--pipeline-parallel-size=1", "--generation-config", "vllm")
    assert capsys.readouterr().err == ""
    assert "(only 1 is accepted)" in refused(capsys, "--decode-context-parallel-size", "2")
    assert "--decode-context-parallel-size is refused" in refused(capsys, "--decode-context-parallel-size=4")


def test_a_switch_without_a_value_does_not_consume_the_next_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("--use-v2-block-manager", "m").config.model == "m"
    assert parsed("--swap-space", "4", "m").config.model == "m"
    assert parsed("--swap-space=4", "m").config.model == "m"


def test_the_table_of_flags_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--explain-flags"]) == 0
    assert capsys.readouterr().out == table()


# ---- the file


def test_keys_in_a_file_may_have_dashes_or_underscores(tmp_path: Path) -> None:
    text = 'model = "m"\nmax-num-seqs = 3\nmax_body_bytes = 9\nread-timeout-s = 5\nenable-prefix-caching = false\n'
    made = parsed("--config", toml(tmp_path, text + 'preferred-batch-size = [4, 8]\nallowed-origins = ["https://a.b"]'))
    assert (made.config.model, made.config.max_num_seqs, made.config.enable_prefix_caching) == ("m", 3, False)
    assert (made.options.max_body_bytes, made.options.read_timeout_s) == (9, 5.0)
    assert made.options.preferred_batch_sizes == (4, 8) and made.options.origins == {"https://a.b"}


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "file"\nport = 1\nmax-n = 5\n')
    made = parsed("line", "--config", path, "--port", "2")
    assert (made.config.model, made.options.port, made.options.max_n) == ("line", 2, 5)


def test_the_environment_does_not_set_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets HEADRACE_PORT=tcp://... beside a service of that name."""
    monkeypatch.setenv("HEADRACE_PORT", "tcp://10.0.0.1:8000")
    assert parsed().options.port == 8000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq = 1", "unknown key 'max-num-seq', did you mean 'max_num_seqs'?"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ("port = '1'", "port must be an integer, got '1'"),
        ("port = true", "port must be an integer, got True"),
        ("enable-log-requests = 1", "enable_log_requests must be true or false"),
        ("read-timeout-s = 'x'", "read_timeout_s must be a number"),
        ("dtype = 'int3'", "dtype must be one of"),
        ("port = 70000", "port must be between 0 and 65535"),
        ("port = 1\nmax-n = 2\nmax_n = 3", "max_n is set twice"),
        ("port = ", "is not TOML"),
        ("rope-scaling = 'x'", "--rope-scaling is refused"),
    ],
)
def test_an_invalid_file_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    assert message in refused(capsys, "--config", toml(tmp_path, text))


def test_vllm_flags_in_a_file_are_ignored_or_refused_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parsed("--config", toml(tmp_path, "swap_space = 4\ntensor-parallel-size = 1"))
    assert capsys.readouterr().err.startswith("headrace: --swap-space is ignored")


def test_a_missing_file_is_a_usage_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be read" in refused(capsys, "--config", str(tmp_path / "none.toml"))


# ---- the command


def test_the_command_serves_with_the_parsed_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[EngineConfig, ServerOptions]] = []

    def serve(config: EngineConfig, options: ServerOptions, **others: object) -> int:
        seen.append((config, options))
        return 7

    monkeypatch.setattr("headrace.server.serve.serve", serve)
    assert command.main(["m", "--port", "5"]) == 7
    assert seen == [(EngineConfig(model="m"), ServerOptions(port=5))]


def test_server_options_refuse_unknown_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_body_bytes'"):
        ServerOptions(max_body_byte=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["auto", "hermes", "qwen3", "llama3_json", "mistral"])
def test_a_known_tool_call_parser_is_accepted(name: str) -> None:
    assert ServerOptions(tool_call_parser=name).tool_call_parser == name


@pytest.mark.parametrize("name", ["hermez", "", "{{ messages }}"])
def test_an_unknown_tool_call_parser_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match=r"tool_call_parser .* is unknown.*use one of auto, .*hermes"):
        ServerOptions(tool_call_parser=name)


# ---- the page


@pytest.mark.parametrize("made", [options_table(), table()])
def test_the_docs_have_the_current_tables(made: str) -> None:
    """If this fails, run `make tables`."""
    assert made in PAGE.read_text(encoding="utf-8")
