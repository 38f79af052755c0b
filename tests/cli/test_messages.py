"""Messages of commands: a stderr that cannot be written ends nothing."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from headrace.cli.messages import print_line


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_line_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("ready")
    assert capsys.readouterr().err == "headrace: ready\n"


def test_a_reader_that_has_gone_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Broken())
    print_line("ready")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    print_line("ready")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_missing_stderr_is_replaced_so_that_no_file_gets_its_number() -> None:
    code = """
import os
from headrace.cli.main import main
assert main([]) == 0
print(os.readlink("/proc/self/fd/2"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, preexec_fn=lambda: os.close(2)
    )
    assert done.stdout.splitlines()[-1] == os.devnull
