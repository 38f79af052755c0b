"""The command `headrace route`: usage errors, and a start without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.cli.main import main


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name the addresses of replicas"),
        (["ftp://x"], "is not an address"),
        (["http://a", "--policy", "random"], "invalid choice"),
        (["http://a", "--port", "70000"], "between 0 and 65535"),
        (["http://a", "--target-requests", "0"], "above 0"),
        (["http://a", "--min-replicas", "5", "--max-replicas", "2"], "min_replicas"),
        (["http://a", "--api-key-env", "NO_SUCH_VARIABLE"], "is not set"),
        (["--replicas-file", "/no/such/file"], "cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["route", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_router_imports_no_torch() -> None:
    program = (
        "import sys, headrace.cli.route, headrace.server.route.serve\n"
        "print(sorted({'torch', 'numba', 'triton', 'tokenizers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
