"""What a start shows: live on a terminal, lines elsewhere, and nothing that could end it."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from headrace.engine.startup_display import StartupDisplay, library_display, log_stage
from headrace.errors import ConfigError
from headrace.startup import StartupStage

LOADING, LOADED = StartupStage("load", 1, 4), StartupStage("load", 4, 4, 1.5)
LOADED_LINE = "loaded weights (0.00 GiB) in 1.5 s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_finished_stage_is_a_line() -> None:
    lines: list[str] = []
    with StartupDisplay(lines.append) as display:
        for stage in (StartupStage("load"), LOADING, LOADED):
            display(stage)
    assert lines == [LOADED_LINE]


def test_a_terminal_shows_the_running_stage_on_one_line() -> None:
    terminal = Terminal()
    with StartupDisplay(lambda line: print(line, file=terminal), terminal=terminal) as display:
        display(LOADING)
        display(LOADED)
        display(StartupStage("compile"))
    shown = terminal.getvalue().split("\r\x1b[2K")
    assert shown == [f"headrace: {LOADING}", f"{LOADED_LINE}\nheadrace: preparing kernels ...", ""]


def test_the_line_of_a_start_that_fails_is_erased() -> None:
    terminal = Terminal()

    def fails() -> None:
        with StartupDisplay(lambda line: None, terminal=terminal) as display:
            display(LOADING)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_a_setting_that_is_refused_after_torch_was_imported_is_one_line() -> None:
    lines: list[str] = []

    def fails() -> None:
        with StartupDisplay(lines.append) as display:
            display(StartupStage("import"))
            display(StartupStage("import", seconds=2.0))
            raise ConfigError("no")

    with pytest.raises(ConfigError):
        fails()
    assert lines == []


def test_a_long_line_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    StartupDisplay(lambda line: None, terminal=terminal)(LOADING)
    assert terminal.getvalue() == f"headrace: {LOADING}"[:19]


def test_stages_after_the_start_are_those_of_a_restart() -> None:
    lines: list[str] = []
    terminal = Terminal()
    with StartupDisplay(lines.append, terminal=terminal) as display:
        display(LOADED)
    display(LOADING)
    display(LOADED)
    assert lines == [LOADED_LINE, f"engine restart: {LOADED_LINE}"]
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_that_has_gone_does_not_end_a_start(is_closed: bool) -> None:
    stream = Broken()
    if is_closed:
        stream = Terminal()
        stream.close()
    with StartupDisplay(lambda line: print(line, file=stream, flush=True), terminal=stream) as display:
        display(LOADING)
        display(LOADED)
        display(LOADING)
        display.ready(2.0, [LOADED])


def test_a_library_logs_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace"), library_display() as display:
        display(LOADING)
        display(LOADED)
        log_stage(LOADING)
        log_stage(LOADED)
    assert caplog.messages == [LOADED_LINE] * 2


def test_a_program_can_turn_the_lines_on_a_terminal_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.WARNING, "headrace"), library_display() as display:
        display(LOADED)
    assert terminal.getvalue() == "" and caplog.messages == []
    logging.getLogger("headrace").setLevel(logging.NOTSET)
    with library_display() as display:
        display(LOADED)
        display.ready(2.0, [LOADED])
    assert terminal.getvalue() == f"headrace: {LOADED_LINE}\nheadrace: ready in 2.0 s (load 1.5 s)\n"
