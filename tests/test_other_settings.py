"""Settings of other engines, given to all fronts: flags, keyword arguments and TOML files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncEngine
from headrace.cli import run, serve
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.other_settings import OTHER_FLAGS, OtherFlag, as_arguments, flag_of

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


def _served(*words: str) -> EngineConfig:
    return serve.read(serve.build_parser(), words).config


def _run(*words: str) -> EngineConfig:
    parser = run.build_parser()
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


def _rows() -> list[tuple[str, OtherFlag]]:
    """All rows that a keyword argument can name."""
    rows = [(flag, other) for flag, other in OTHER_FLAGS.items() if flag.startswith("--")]
    return [(flag[2:].replace("-", "_"), other) for flag, other in rows if not flag.startswith("--no-")]


def _value(other: OtherFlag, text: str) -> Any:
    return text if other.takes_value else text == "true"


def _plain(text: str) -> str:
    """Text with flags as arguments: some fronts name them so."""
    return as_arguments(text)
