from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.http.keys import Keys
from headrace.server.options import ServerOptions


class Told(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def make_keys(told: Told | None = None, environ: dict[str, str] | None = None, **options: object) -> Keys:
    return Keys(ServerOptions(**options), environ=environ or {}, tell=Told() if told is None else told)  # type: ignore[arg-type]


def key_file(directory: Path, text: str) -> Path:
    path = directory / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def names(keys: Keys, *presented: str) -> list[str | None]:
    found = [keys.find(one.encode()) for one in presented]
    return [None if key is None else key.name for key in found]


def test_without_any_there_is_nothing_to_ask_for() -> None:
    keys = make_keys()
    assert not keys.are_required and not keys.has_admin and len(keys) == 0
    assert keys.find(b"") is None


def test_keys_of_all_sources_count(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# ours\n\nalice  key-a\nkey-b\n")
    environ = {"HEADRACE_API_KEY": "key-c", "VLLM_API_KEY": "key-d", "HEADRACE_ADMIN_KEY": "key-e"}
    keys = make_keys(environ=environ, api_key="key-f", api_key_file=str(path))
    assert names(keys, "key-a", "key-b", "key-c") == ["alice", "line-4", "headrace_api_key"]
    assert names(keys, "key-d", "key-e", "key-f") == ["vllm_api_key", "admin", "command-line"]
    assert names(keys, "KEY-A", "key-", "key-a ", "", "# ours") == [None] * 5
    assert keys.has_admin and len(keys) == 5


def test_every_key_is_compared_in_constant_time_and_none_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CVE-2025-59425: `==` tells by its time how much of a key was right."""
    keys = make_keys(api_key_file=str(key_file(tmp_path, "one\ntwo\nthree\n")), admin_key="root")
    compared: list[tuple[int, int]] = []

    def counted(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", counted)
    assert names(keys, "one") == ["line-1"]
    assert compared == [(32, 32)] * 4  # digests of one length, all of them, also after the right one
    compared.clear()
    assert names(keys, "x" * 10_000) == [None]
    assert compared == [(32, 32)] * 4


def test_no_key_is_kept_as_it_is(tmp_path: Path) -> None:
    keys = make_keys(api_key_file=str(key_file(tmp_path, "alice secret-of-alice")))
    assert "secret-of-alice" not in repr(vars(keys))


def test_each_key_has_a_salt_of_its_own_which_another_process_could_not_guess() -> None:
    environ = {"HEADRACE_API_KEY": "one", "VLLM_API_KEY": "two"}
    here, there = make_keys(environ=environ), make_keys(environ=environ)
    salts = {keys.find(name).cache_salt for keys in (here, there) for name in (b"one", b"two")}  # type: ignore[union-attr]
    assert len(salts) == 4
    assert here.find(b"one").cache_salt == here.find(b"one").cache_salt  # type: ignore[union-attr]
    off = make_keys(environ=environ, cache_salt_per_key=False)
    assert off.find(b"one").cache_salt is None  # type: ignore[union-attr]


def test_a_file_that_others_can_read_is_warned_about(tmp_path: Path) -> None:
    path = key_file(tmp_path, "key")
    told = Told()
    make_keys(told, api_key_file=str(path))
    assert told == []
    path.chmod(0o644)
    make_keys(told, api_key_file=str(path))
    assert len(told) == 1 and "chmod 600" in told[0]


def test_reloading_takes_new_keys_and_drops_old_ones(tmp_path: Path) -> None:
    path = key_file(tmp_path, "old\nstays\n")
    keys = make_keys(api_key_file=str(path), api_key="flag")
    path.write_text("stays\nnew\n")
    keys.reload()
    assert names(keys, "old", "stays", "new", "flag") == [None, "line-1", "line-2", "command-line"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "one two three\n"])
def test_a_broken_file_neither_opens_nor_closes_a_running_server(tmp_path: Path, text: str) -> None:
    path = key_file(tmp_path, "key")
    told = Told()
    keys = make_keys(told, api_key_file=str(path))
    path.write_text(text)
    keys.reload()
    assert keys.are_required and names(keys, "key") == ["line-1"]
    assert told[-1].startswith("keeping the old keys")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no key"), ("a b c", "must be 'key' or 'name key'"), ("schlüssel", "must be printable ASCII")],
)
def test_a_broken_file_stops_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_keys(api_key_file=str(key_file(tmp_path, text)))


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make_keys(api_key_file=str(tmp_path / "none"))


def test_an_empty_key_is_refused_rather_than_open_to_all() -> None:
    for name in ("HEADRACE_API_KEY", "VLLM_API_KEY", "HEADRACE_ADMIN_KEY"):
        for text in ("", " "):
            with pytest.raises(ConfigError, match=f"{name} is set and empty"):
                make_keys(environ={name: text})
    with pytest.raises(ConfigError, match="'command-line' must be printable"):
        make_keys(api_key="")


def test_the_admin_key_must_be_its_own() -> None:
    with pytest.raises(ConfigError, match="also a client's key"):
        make_keys(api_key="same", admin_key="same")
