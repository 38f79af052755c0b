from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.http.keys import Keys
from headrace.server.options import ServerOptions


class Lines(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def make_keys(lines: Lines | None = None, environ: dict[str, str] | None = None, **options: object) -> Keys:
    return Keys(ServerOptions(**options), environ=environ or {}, print_line=Lines() if lines is None else lines)  # type: ignore[arg-type]


def key_file(directory: Path, text: str) -> Path:
    path = directory / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def names(keys: Keys, *presented: str) -> list[str | None]:
    found = [keys.find(one.encode()) for one in presented]
    return [None if key is None else key.name for key in found]


def test_without_keys_none_is_required() -> None:
    keys = make_keys()
    assert not keys.are_required and not keys.has_admin and len(keys) == 0
    assert keys.find(b"") is None


def test_keys_of_all_sources_are_accepted(tmp_path: Path) -> None:
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
    """CVE-2025-59425: the time of `==` reveals how much of a key is right."""
    keys = make_keys(api_key_file=str(key_file(tmp_path, "one\ntwo\nthree\n")), admin_key="root")
    compared: list[tuple[int, int]] = []

    def counted(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", counted)
    assert names(keys, "one") == ["line-1"]
    assert compared == [(32, 32)] * 4  # digests of equal length, all compared, also after a match
    compared.clear()
    assert names(keys, "x" * 10_000) == [None]
    assert compared == [(32, 32)] * 4


def test_keys_are_not_kept_in_plain_text(tmp_path: Path) -> None:
    keys = make_keys(api_key_file=str(key_file(tmp_path, "alice secret-of-alice")))
    assert "secret-of-alice" not in repr(vars(keys))


def test_each_key_has_its_own_salt_which_differs_between_processes() -> None:
    environ = {"HEADRACE_API_KEY": "one", "VLLM_API_KEY": "two"}
    here, there = make_keys(environ=environ), make_keys(environ=environ)
    salts = {keys.find(name).cache_salt for keys in (here, there) for name in (b"one", b"two")}  # type: ignore[union-attr]
    assert len(salts) == 4
    assert here.find(b"one").cache_salt == here.find(b"one").cache_salt  # type: ignore[union-attr]
    off = make_keys(environ=environ, cache_salt_per_key=False)
    assert off.find(b"one").cache_salt is None  # type: ignore[union-attr]


def test_a_key_file_that_others_can_read_gives_a_warning(tmp_path: Path) -> None:
    path = key_file(tmp_path, "key")
    lines = Lines()
    make_keys(lines, api_key_file=str(path))
    assert lines == []
    path.chmod(0o644)
    make_keys(lines, api_key_file=str(path))
    assert len(lines) == 1 and "chmod 600" in lines[0]


def test_reloading_adds_new_keys_and_drops_old_ones(tmp_path: Path) -> None:
    path = key_file(tmp_path, "old\nstays\n")
    keys = make_keys(api_key_file=str(path), api_key="flag")
    path.write_text("stays\nnew\n")
    keys.reload()
    assert names(keys, "old", "stays", "new", "flag") == [None, "line-1", "line-2", "command-line"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "one two three\n"])
def test_an_invalid_file_at_reload_keeps_the_old_keys(tmp_path: Path, text: str) -> None:
    path = key_file(tmp_path, "key")
    lines = Lines()
    keys = make_keys(lines, api_key_file=str(path))
    path.write_text(text)
    keys.reload()
    assert keys.are_required and names(keys, "key") == ["line-1"]
    assert lines[-1].startswith("keeping the old keys")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no key"), ("a b c", "must be 'key' or 'name key'"), ("schlüssel", "must be printable ASCII")],
)
def test_an_invalid_file_prevents_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_keys(api_key_file=str(key_file(tmp_path, text)))


def test_a_missing_file_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make_keys(api_key_file=str(tmp_path / "none"))


def test_an_empty_key_is_refused() -> None:
    for name in ("HEADRACE_API_KEY", "VLLM_API_KEY", "HEADRACE_ADMIN_KEY"):
        for text in ("", " "):
            with pytest.raises(ConfigError, match=f"{name} is set and empty"):
                make_keys(environ={name: text})
    with pytest.raises(ConfigError, match="'command-line' must be printable"):
        make_keys(api_key="")


def test_the_admin_key_must_differ_from_client_keys() -> None:
    with pytest.raises(ConfigError, match="also a client's key"):
        make_keys(api_key="same", admin_key="same")


def test_the_salts_of_keys_survive_a_restart_with_their_secret() -> None:
    def salt(secret: bytes | None) -> str | None:
        found = Keys(ServerOptions(api_key="one"), environ={}, print_line=Lines(), secret=secret).find(b"one")
        return None if found is None else found.cache_salt

    assert salt(b"s" * 32) == salt(b"s" * 32) not in (None, salt(b"t" * 32), salt(None))
