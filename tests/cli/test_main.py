from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.cli import main as entry
from headrace.cli.main import COMMANDS, main
from headrace.errors import ConfigError, HeadraceError, JobError, ModelNotFoundError
from headrace.version import __version__


def fail(error: BaseException) -> type:
    class Failing:
        @staticmethod
        def main(arguments: list[str]) -> int:
            raise error

    return Failing


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def modules_after(*arguments: str) -> set[str]:
    """Top-level modules that a fresh interpreter has imported after the command."""
    code = (
        f"import atexit, sys\n"
        f"atexit.register(lambda: print(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr))\n"
        f"from headrace.cli.main import main\n"
        f"main({list(arguments)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "headrace" in done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    heavy = {"torch", "numba", "transformers", "tokenizers", "huggingface_hub", "rich", "jinja2"}
    assert not modules_after(*command, "--help") & heavy


def test_the_top_level_help_does_not_import_numpy() -> None:
    assert "numpy" not in modules_after("--help")


def test_python_dash_m_headrace_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"headrace {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and command.help in text for name, command in COMMANDS.items())


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown command 'rnu', did you mean 'run'?" in usage_error(capsys, "rnu")
    assert "unknown option --verison, did you mean '--version'?" in usage_error(capsys, "--verison")


def test_an_error_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    monkeypatch.setattr(entry, "load_command", lambda name: fail(JobError("no disk")))
    assert main(["run"]) == 1
    assert capsys.readouterr().err == "headrace: error: no disk\n"


@pytest.mark.parametrize("error", [ConfigError("block size 7"), ModelNotFoundError("no model 'x'")])
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    error: HeadraceError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    monkeypatch.setattr(entry, "load_command", lambda name: fail(error))
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == f"headrace: error: {error}\n"


def test_debugging_raises_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    monkeypatch.setattr(entry, "load_command", lambda name: fail(JobError("no disk")))
    with pytest.raises(JobError):
        main(["run"])


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    monkeypatch.setattr(entry, "load_command", lambda name: fail(KeyboardInterrupt()))
    assert main(["run"]) == 130
    assert "stopped" in capsys.readouterr().err
