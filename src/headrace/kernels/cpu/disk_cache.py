"""Where numba stores compiled kernels: in the user's cache directory, since the package's own may be read-only.

The directory is named after a hash of the kernels' sources, because numba only notices changes in a kernel's own file.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def choose_directory() -> None:
    """Sets NUMBA_CACHE_DIR, unless the user did."""
    if "NUMBA_CACHE_DIR" not in os.environ:
        os.environ["NUMBA_CACHE_DIR"] = str(_first_writable() / _sources_hash())


def _first_writable() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace"
    own = Path(os.environ.get("HEADRACE_CACHE") or home).expanduser()
    for directory in (own / "numba", Path(tempfile.gettempdir()) / f"headrace-numba-{os.getuid()}"):
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid():
            return directory
    return Path(tempfile.mkdtemp(prefix="headrace-numba-"))


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
