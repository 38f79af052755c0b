from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.models import size_text
from headrace.models.cache import EMBEDDED_FILE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Headrace cache, and an empty hub cache."""
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_an_empty_cache_is_listed_with_the_command_to_fetch_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "headrace models fetch smollm2" in capsys.readouterr().out


def test_models_are_listed_with_size_and_path_and_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cache / EMBEDDED_FILE
    path.write_bytes(bytes(1500))
    assert main(["models", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME          SIZE  PATH",
        f"smollm2     1.5 kB  {path}",
    ]
    assert main(["models", "remove", "smollm2"]) == 0
    assert capsys.readouterr().out == f"removed smollm2 (1.5 kB) from {path}\n"
    assert not path.exists()


def test_removing_a_model_that_is_not_cached_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "remove", "smolm2"]) == 1
    assert capsys.readouterr().err.startswith("headrace: error: no model 'smolm2' is cached")


def test_fetch_prints_the_path_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.models.sources.fetch", lambda name, **options: Path("/there") / options["revision"])
    assert main(["models", "fetch", "owner/name", "--revision", "v1"]) == 0
    assert capsys.readouterr().out == "owner/name is at /there/v1\n"


def test_the_docs_have_the_current_table_of_families(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, run `make tables`."""
    assert main(["models", "families"]) == 0
    table = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = "".join(line for line in page.splitlines(keepends=True) if line.startswith("|"))
    assert rows == table
    assert "| `LlamaForCausalLM` | `llama` |" in table


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["fetsh", "a"], "unknown action 'fetsh', did you mean 'fetch'?"),
        (["fetch"], "fetch needs a NAME"),
        (["list", "a"], "list takes no name"),
        (["families", "a"], "families takes no name"),
        (["--revision", "v1"], "--revision is only valid with fetch"),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["models", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "num_bytes, text",
    [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (3 * 10**12, "3.0 TB"), (10**16, "10000.0 TB")],
)
def test_sizes_are_in_decimal_units(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
