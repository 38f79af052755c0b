"""Coding agents as they are installed, against the server over the fake engine: the test writes the model's answers.

`npm install @openai/codex @anthropic-ai/claude-code`, and their commands in HEADRACE_CODEX and HEADRACE_CLAUDE.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine
from tests.server.fake_model import Model, prompt_of
from tests.server.serving import MODEL, serving

SECRET = "the number is 4711"
CODEX = """
model = "{model}"
model_provider = "headrace"
web_search = "disabled"

[model_providers.headrace]
name = "Headrace"
base_url = "{url}/v1"
env_key = "HEADRACE_API_KEY"
wire_api = "responses"
"""


class LongContext(FakeEngine):
    """The instructions and tools of an agent are long, and each of their bytes is a token here."""

    def _start(self, deliver: Any) -> Any:
        started = super()._start(deliver)
        started.settings.max_model_len = 400_000
        return started


def call(name: str, **arguments: str) -> str:
    return f"I look.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def command_of(variable: str) -> str:
    return os.environ.get(variable) or pytest.skip(f"set {variable} to the command")


def run(command: list[str], directory: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "HOME": str(directory), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.slow
def test_codex_reads_a_file(tiny_directory: Path, tmp_path: Path) -> None:
    codex = command_of("HEADRACE_CODEX")
    (tmp_path / "note.txt").write_text(SECRET)
    (tmp_path / ".codex").mkdir()
    fake = LongContext(tiny_directory)
    with serving(start=fake) as server:
        (tmp_path / ".codex/config.toml").write_text(CODEX.format(model=MODEL, url=server.url))
        with Model(server, fake, [call("exec_command", cmd="cat note.txt")], ["It is 4711."]):
            options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
            said = run([codex, "exec", *options, "What is the number?"], tmp_path, HEADRACE_API_KEY="k")
        assert "It is 4711." in said and SECRET in prompt_of(fake)


@pytest.mark.slow
def test_claude_code_reads_a_file(tiny_directory: Path, tmp_path: Path) -> None:
    claude = command_of("HEADRACE_CLAUDE")
    (tmp_path / "note.txt").write_text(SECRET)
    fake = LongContext(tiny_directory)
    with serving(start=fake, options=ServerOptions(max_body_bytes=2**24)) as server:
        with Model(server, fake, [call("Read", file_path=str(tmp_path / "note.txt"))], ["It is 4711."]):
            said = run(
                [claude, "-p", "What is the number?"],
                tmp_path,
                ANTHROPIC_BASE_URL=server.url,
                ANTHROPIC_AUTH_TOKEN="k",
                ANTHROPIC_MODEL=MODEL,
                ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
                CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            )
        assert "It is 4711." in said and SECRET in prompt_of(fake)
