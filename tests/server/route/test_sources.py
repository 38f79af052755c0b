"""Where replicas come from: addresses, a file that changes, a DNS name."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.route.sources import Sources


def addresses(sources: Sources) -> list[str]:
    return asyncio.run(sources.addresses())


def test_addresses_are_normalized_and_named_once() -> None:
    sources = Sources(["gpu-1:8000", "http://gpu-1:8000/", "http://gpu-1:8000/v1", "https://gpu-2"])
    assert addresses(sources) == ["http://gpu-1:8000", "https://gpu-2"]


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("# two\nhttp://a:1\n\n  http://b:2\n")
    sources = Sources(["http://c:3"], file)
    assert addresses(sources) == ["http://c:3", "http://a:1", "http://b:2"]
    file.write_text("http://b:2\n")
    assert sources.reload() is None
    assert addresses(sources) == ["http://c:3", "http://b:2"]


def test_a_file_that_is_wrong_or_gone_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("http://a:1\n")
    sources = Sources([], file)
    file.write_text("http://a:1\nhttp://b:port\n")
    assert "b:port" in (sources.reload() or "")
    os.remove(file)
    assert "cannot be read" in (sources.reload() or "")
    assert addresses(sources) == ["http://a:1"]


def test_a_dns_name_is_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", ("10.0.0.2", 8000)), (0, 0, 0, "", ("10.0.0.1", 8000)), (0, 0, 0, "", ("fd00::1", 8000))]

    async def getaddrinfo(loop: object, host: str, port: int, **more: object) -> list[object]:
        assert (host, port) == ("replicas", 8000)
        if not found:
            raise OSError("unused")
        return [*found]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    sources = Sources(["dns+http://replicas:8000"])
    assert addresses(sources) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]


def test_a_name_that_cannot_be_resolved_has_no_address() -> None:
    assert addresses(Sources(["dns+http://name.invalid:8000", "http://a:1"])) == ["http://a:1"]


@pytest.mark.parametrize("given", [["ftp://a"], ["http://user:secret@a:1"], ["dns+x://a"], []])
def test_wrong_addresses_are_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Sources(given)
    assert "secret" not in str(caught.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Sources([], tmp_path / "none")
