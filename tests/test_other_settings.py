"""Settings of other engines, given to all fronts: flags, keyword arguments and TOML files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncEngine
from headrace.cli import run, serve
from headrace.cli.serving_table import counts_table
from headrace.config import EngineConfig
from headrace.doctor.readers.vllm_flags import VLLM_FLAGS
from headrace.errors import ConfigError
from headrace.flag_groups import OtherFlag
from headrace.other_flags import OTHER_FLAGS
from headrace.other_settings import as_arguments, find_other, flag_of

GUIDE = Path(__file__).parents[1] / "docs" / "coming-from-vllm.md"
Front = Callable[[str, Any], EngineConfig]  # a setting's name and its value


class _Started(Exception):
    """The front has reached the point at which it would load a model."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config


@pytest.fixture(params=["serve", "run", "serve --config", "run --config", "LLM", "AsyncEngine", "LLM(config)"])
def front(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Front:
    def start(config: EngineConfig, *_: object, **__: object) -> None:
        raise _Started(config)

    monkeypatch.setattr("headrace.engine.llm.start_engine", start)
    monkeypatch.setattr("headrace.engine.async_engine.start_engine", start)

    def file(name: str, value: Any) -> str:
        path = tmp_path / "settings.toml"
        path.write_text(f"{name} = {json.dumps(value)}\n")
        return str(path)

    fronts: dict[str, Front] = {
        "serve": lambda name, value: _served(*_words(name, value)),
        "run": lambda name, value: _run(*_words(name, value)),
        "serve --config": lambda name, value: _served("--config", file(name, value)),
        "run --config": lambda name, value: _run("--config", file(name, value)),
        "LLM": lambda name, value: _loaded(lambda: LLM(**{name: value})),
        "AsyncEngine": lambda name, value: _loaded(lambda: AsyncEngine(**{name: value})),
        "LLM(config)": lambda name, value: _loaded(lambda: LLM(config=file(name, value))),
    }
    return fronts[request.param]


SERVE, RUN = serve.build_parser(), run.build_parser()


def _served(*words: str) -> EngineConfig:
    return serve.read(SERVE, words).config


def _run(*words: str) -> EngineConfig:
    parser = RUN
    return run.engine_config(parser, run._parsed(parser, ["in.jsonl", "-o", "out.jsonl", *words]))


def _loaded(load: Callable[[], object]) -> EngineConfig:
    with pytest.raises(_Started) as started:
        load()
    return started.value.config


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), str(value)]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[Front, str, Any], str]:
    def refused(front: Front, name: str, value: Any) -> str:
        with pytest.raises((ConfigError, SystemExit)) as stopped:
            front(name, value)
        return str(stopped.value) if isinstance(stopped.value, ConfigError) else capsys.readouterr().err

    return refused


def test_neutral_values_are_accepted_silently(
    front: Front, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, other in _rows():
        for text in other.neutral:
            assert front(name, _value(other, text)).max_num_seqs is None, name
    assert capsys.readouterr().err == "" and caplog.text == ""


def test_other_values_are_refused_or_ignored_with_one_line(
    front: Front,
    refusal: Callable[[Front, str, Any], str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, other in _rows():
        value: Any = "x" if other.takes_value else "true" not in other.neutral
        if other.outcome == "refused":
            assert _plain(other.answer) in _plain(refusal(front, name, value)), name
        elif value or f"--no-{name.replace('_', '-')}" not in OTHER_FLAGS:
            caplog.clear()
            front(name, value)
            (line,) = (capsys.readouterr().err + caplog.text).splitlines()
            assert "is ignored" in line and _plain(other.answer) in _plain(line)


def test_vllms_names_of_our_settings_are_accepted(front: Front) -> None:
    assert front("device_memory_utilization", 0.5).gpu_memory_utilization == 0.5
    assert front("kv_cache_memory", 4096).kv_cache_memory_bytes == 4096


@pytest.mark.parametrize("words", [["-tp", "1"], ["-pp=1"], ["--enable-expert-parallel", "False"], ["-dp", "1"]])
@pytest.mark.parametrize("parse", [_served, _run])
def test_short_flags_and_switches_with_a_value_are_accepted_if_neutral(
    parse: Callable[..., EngineConfig], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(*words, "--max-num-seqs", "3").max_num_seqs == 3
    assert capsys.readouterr().err == ""


def test_a_keyword_argument_of_none_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config: EngineConfig, *_: object, **__: object) -> None:
        raise _Started(config)

    monkeypatch.setattr("headrace.engine.llm.start_engine", start)
    names = {name: None for name, other in _rows() if other.takes_value}
    assert _loaded(lambda: LLM(**names)).max_num_seqs is None  # type: ignore[arg-type]


def test_a_setting_given_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes is given twice"):
        LLM(kv_cache_memory=1 << 30, kv_cache_memory_bytes=1 << 30)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swap_space", "EngineConfig has no argument 'swap_space': preempted sequences are recomputed"),
        ("batch_scheduler_policy", "use capacity_policy, which has the same values"),
        ("max_tokens_in_paged_kv_cache", "use num_gpu_blocks_override"),
        ("data_parallel_size", "only 'headrace serve' and AsyncEngine have it; 'headrace run' runs several"),
        ("enable_kv_cache_reuse", "enable_prefix_caching=False turns it off"),
    ],
)
def test_an_argument_of_another_engine_is_explained(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{name: 4})  # type: ignore[arg-type]


# ---- vLLM's names, all of them


def test_every_flag_of_vllm_serve_is_known() -> None:
    own = set(SERVE.flags)
    unknown = sorted(flag for flag in VLLM_FLAGS if flag not in own and find_other(flag) is None)
    assert not unknown


def test_the_docs_count_the_flags_of_vllm() -> None:
    """If this fails, run `make tables`."""
    assert counts_table() in GUIDE.read_text(encoding="utf-8")


# ---- vLLM's forms


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max_num_seqs", "64"], "max_num_seqs", 64),
        (["--max_num_seqs=64"], "max_num_seqs", 64),
        (["--max-model-len", "4k"], "max_model_len", 4000),
        (["--max-model-len", "4K"], "max_model_len", 4096),
        (["--max-model-len", "25.6k"], "max_model_len", 25_600),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--max-model-len", "-1"], "max_model_len", None),
        (["--max-num-batched-tokens", "1m"], "max_num_batched_tokens", 1_000_000),
        (["--kv-cache-memory-bytes", "2G"], "kv_cache_memory_bytes", 2 << 30),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype=float"], "dtype", "float32"),
        (["--load-format", "dummy"], "load_format", "random"),
        (["-q", "fp8"], "quantization", "fp8"),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--no_enable_prefix_caching"], "enable_prefix_caching", False),
        (["--chat-template", "{{ messages }}"], "chat_template", "{{ messages }}"),
        (
            ["--default_chat_template_kwargs.enable_thinking", "false", "--default-chat-template-kwargs.a.b=x"],
            "default_chat_template_kwargs",
            {"enable_thinking": False, "a": {"b": "x"}},
        ),
        (
            ["--default-chat-template-kwargs", '{"a": {"c": 1}}', "--default-chat-template-kwargs.a.b", "x"],
            "default_chat_template_kwargs",
            {"a": {"b": "x", "c": 1}},
        ),
        (
            ["-sc.method=ngram", "--speculative-config.num_speculative_tokens", "3"],
            "speculative_config",
            {"method": "ngram", "num_speculative_tokens": 3},
        ),
        (["--speculative-model", "[ngram]"], "speculative_model", "[ngram]"),
        (["--spec-tokens", "3"], "num_speculative_tokens", 3),
        (["--num-speculative-decoder-samples", "0"], "num_speculative_tokens", 0),
    ],
)
@pytest.mark.parametrize("parse", [_served, _run])
def test_forms_of_start_scripts_are_read(
    parse: Callable[..., EngineConfig], words: list[str], name: str, value: object
) -> None:
    assert getattr(parse(*words), name) == value


def test_adapters_are_read_in_both_forms_of_vllm() -> None:
    config = _served("model", "--lora-modules", "a=b", '{"name": "c", "path": "d", "base_model_name": "e"}')
    assert config.adapter_paths == {"a": "b", "c": "d"}
    assert config.uses_adapters


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-model-len", "1.5M"], "only k, m, g and t take decimals"),
        (["--max-model-len", "1.0005k"], "must be a whole number"),
        (["--max-model-len", "long"], "such as 4096, 4k (4,000) or 4K (4,096), got 'long'"),
        (["--max-num-batched-tokens", "auto"], "must be a whole number"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--default-chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--speculative-config.method", "eagle"], "speculative_config's method='eagle' is not supported"),
        (["--spec-method", "ngram"], "--spec-method is refused: the method and the lengths of n-grams are keys"),
        (["--lora_target_modules", "a", "b"], "--lora_target_modules is refused"),
        (["--lora-modules", "a=b", "c"], "lora_modules takes name=path"),
        (["--max-num-seqs.x", "1"], "unknown option --max-num-seqs.x"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _served("model", *words)
    error, hint = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and message in error and hint.startswith("Try ")


@pytest.mark.parametrize(
    "words",
    [
        ["-O3"],
        ["-O", "3"],
        ["-O.level=3"],
        ["-O.level", "3"],
        ["--compilation-config.level", "3", "--compilation-config.mode=1"],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--enforce-eager"],
    ],
)
def test_ignored_flags_take_their_own_words_and_no_others(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    config = _served("model", *words, "--max-num-seqs", "3")
    (line,) = capsys.readouterr().err.splitlines()
    assert (config.model, config.max_num_seqs) == ("model", 3) and "is ignored: " in line


@pytest.mark.parametrize("flag", ["--served-model-name", "--cudagraph-capture-sizes"])
def test_a_model_after_a_list_is_not_taken_for_a_word_of_it(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _served(flag, "1", "model")
    assert f"{flag} takes all words after it; give the model first" in capsys.readouterr().err


def test_several_names_and_keys_are_read() -> None:
    options = serve.read(SERVE, ["model", "--served-model-name", "a", "b", "--api-key", "k1", "k2"]).options
    assert (options.model_names, options.api_keys) == (("a", "b"), ("k1", "k2"))
    assert serve.read(SERVE, ["--served-model-name", "a"]).options.model_names == ("a",)


def test_a_yaml_file_as_for_vllm_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "model: m\nmax-model-len: 4k\nmax_num_seqs: 8\ndtype: half\nserved-model-name: [a, b]\nport: 9000\n"
        "tokenizer:\nenable-prefix-caching: false\ncompilation-config: {mode: 3}\n"
        "default-chat-template-kwargs:\n  enable_thinking: false\n"
    )
    config, options = serve.read(SERVE, ["--config", str(path), "--max-num-seqs", "9"])
    assert (config.model, config.max_model_len, config.max_num_seqs, config.dtype) == ("m", 4000, 9, "float16")
    assert config.default_chat_template_kwargs == {"enable_thinking": False} and not config.enable_prefix_caching
    assert (options.model_names, options.port) == (("a", "b"), 9000)
    assert "--compilation-config is ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is not YAML"), ("- a", "must have settings as keys"), ("max-model-len: x", "must be a whole number")],
)
def test_a_wrong_yaml_file_is_refused(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        _served("--config", str(path))
    assert message in capsys.readouterr().err


def test_python_programs_may_use_vllms_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config: EngineConfig, *_: object, **__: object) -> None:
        raise _Started(config)

    monkeypatch.setattr("headrace.engine.llm.start_engine", start)
    config = _loaded(lambda: LLM("m", dtype="half", load_format="dummy", max_model_len=-1))  # type: ignore[arg-type]
    assert (config.dtype, config.load_format, config.max_model_len) == ("float16", "random", None)


def _rows() -> list[tuple[str, OtherFlag]]:
    """All rows that a keyword argument can name."""
    rows = [(flag, other) for flag, other in OTHER_FLAGS.items() if flag.startswith("--")]
    return [(flag[2:].replace("-", "_"), other) for flag, other in rows if not flag.startswith("--no-")]


def _value(other: OtherFlag, text: str) -> Any:
    return text if other.takes_value else text == "true"


def _plain(text: str) -> str:
    """Text with flags as arguments: some fronts name them so."""
    return as_arguments(text)
