"""API keys: where they come from, and which client a presented key belongs to.

Only digests are kept. A presented key is compared with all of them, each in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError, reason_of
from headrace.server.options import ServerOptions

ENVIRONMENT = ("HEADRACE_API_KEY", "VLLM_API_KEY")
ADMIN_ENVIRONMENT = "HEADRACE_ADMIN_KEY"

PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    digest: bytes
    cache_salt: str | None  # prompts of different keys share no cached blocks
    is_admin: bool = False

    @property
    def owner(self) -> str:
        """The owner of what this key stores. The key cannot be computed from it."""
        return hashlib.sha256(b"headrace owner" + self.digest).hexdigest()


class Keys:
    """Owns the keys of one server. `reload` reads the key file again; keys from flags and the environment stay."""

    def __init__(
        self,
        options: ServerOptions,
        *,
        environ: Mapping[str, str] = os.environ,
        print_line: PrintLine,
        secret: bytes | None = None,
    ) -> None:
        """`secret`: of the salts; None: they are others after a restart."""
        self._options = options
        self._environ = environ
        self._print_line = print_line
        self._secret = secret or secrets.token_bytes(32)
        self._keys = self._read()
        self._admin = self._admin_key()

    @property
    def are_required(self) -> bool:
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: bytes) -> Key | None:
        """The key that matches, in constant time for right and wrong ones."""
        digest = hashlib.sha256(presented).digest()
        found: Key | None = None
        for key in (*self._keys, self._admin):
            if key is not None and hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def reload(self) -> bool:
        """Read the key file again. Returns whether that worked; on an error the old keys stay, so that a half-written
        file neither locks everybody out nor lets everybody in."""
        try:
            self._keys = self._read()
        except ConfigError as error:
            self._print_line(f"keeping the old keys: {error}")
            return False
        self._print_line(f"reloaded {len(self._keys)} keys")
        return True

    def _read(self) -> tuple[Key, ...]:
        given: list[tuple[str, str | None]] = []
        for number, text in enumerate(self._options.api_keys, 1):
            given.append(("command-line" if number == 1 else f"command-line-{number}", text))
        given += [(name.lower(), self._environ.get(name)) for name in ENVIRONMENT]
        if empty := [name for name in (*ENVIRONMENT, ADMIN_ENVIRONMENT) if self._environ.get(name, "-").strip() == ""]:
            raise ConfigError(f"{empty[0]} is set and empty; give it a key, or unset it for a server without keys")
        keys = [self._key(name, text) for name, text in given if text is not None]
        if self._options.api_key_file is not None:
            keys += self._from_file(Path(self._options.api_key_file))
        return tuple(keys)

    def _admin_key(self) -> Key | None:
        text = self._options.admin_key or self._environ.get(ADMIN_ENVIRONMENT)
        if text is None:
            return None
        admin = self._key("admin", text, is_admin=True)
        if any(key.digest == admin.digest for key in self._keys):
            raise ConfigError("the admin key is also a client's key; choose another")
        return admin

    def _from_file(self, path: Path) -> list[Key]:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            is_open = bool(path.stat().st_mode & stat.S_IROTH)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file {path} cannot be read: {reason_of(error)}") from error
        if is_open:
            self._print_line(f"warning: every user of this machine can read the keys in {path}; run chmod 600 on it")
        keys = [self._from_line(line, number, path) for number, line in enumerate(lines, 1) if _has_key(line)]
        if not keys:
            raise ConfigError(f"the key file {path} has no key; without keys, leave --api-key-file out")
        return keys

    def _from_line(self, line: str, number: int, path: Path) -> Key:
        words = line.split()
        if len(words) > 2:
            raise ConfigError(f"line {number} of the key file {path} must be 'key' or 'name key'")
        return self._key(words[0] if len(words) == 2 else f"line-{number}", words[-1])

    def _key(self, name: str, text: str, *, is_admin: bool = False) -> Key:
        text = text.strip()
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(f"the key {name!r} must be printable ASCII without spaces, since it is sent in a header")
        digest = hashlib.sha256(text.encode()).digest()
        salt = hmac.digest(self._secret, digest, "sha256").hex() if self._options.cache_salt_per_key else None
        return Key(name, digest, salt, is_admin)


def _has_key(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")
