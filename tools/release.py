"""Builds the sdist and the wheel, checks them, and runs the demo from the wheel in an empty environment.

    make release

The wheel must hold the type marker and the licence and no tests. What is built stays in dist/.
"""

# ruff: noqa: T201 (a command that prints)
from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PROMPTS = ROOT / "examples" / "prompts.jsonl"
MUST_HOLD = ("headrace/__init__.py", "headrace/py.typed")
SDIST_MUST_HOLD = ("pyproject.toml", "README.md", "LICENSE", "src/headrace/py.typed")


def main() -> None:
    began = time.monotonic()
    wheel, sdist = build()
    check(wheel, sdist)
    install_and_run(wheel)
    print(f"release: {wheel.name} and {sdist.name} are in dist/ ({time.monotonic() - began:.0f} s)")


def build() -> tuple[Path, Path]:
    """The wheel is built from the sdist, so that the sdist is known to be complete."""
    shutil.rmtree(DIST, ignore_errors=True)
    step("build sdist and wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), str(ROOT), capture=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def check(wheel: Path, sdist: Path) -> None:
    step("check metadata and contents")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    names = zipfile.ZipFile(wheel).namelist()
    refuse_unless(all(name in names for name in MUST_HOLD), f"{wheel.name} lacks one of {', '.join(MUST_HOLD)}")
    refuse_unless(any(name.endswith(".dist-info/licenses/LICENSE") for name in names), f"{wheel.name} has no LICENSE")
    strangers = sorted(name for name in names if not name.startswith(("headrace/", "headrace-")) or "/tests/" in name)
    refuse_unless(not strangers, f"{wheel.name} holds what is not the package: {', '.join(strangers[:5])}")
    with tarfile.open(sdist) as archive:
        paths = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in SDIST_MUST_HOLD if name not in paths]
    refuse_unless(not missing, f"{sdist.name} lacks {', '.join(missing)}")


def install_and_run(wheel: Path) -> None:
    """Outside of the repository, so that only the installed package can be imported."""
    with tempfile.TemporaryDirectory() as directory:
        step("install the wheel into an empty environment")
        venv.create(Path(directory) / "venv", with_pip=True)
        binaries = Path(directory) / "venv" / "bin"
        constraints = str(ROOT / "constraints.txt")
        pip = (str(binaries / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check")
        run(*pip, "-c", constraints, str(wheel), cwd=directory)
        step("run the demo from it")
        headrace = str(binaries / "headrace")
        version = run(headrace, "--version", cwd=directory, capture=True)
        refuse_unless(wheel.name.split("-")[1] in version, f"headrace --version says {version!r}, not {wheel.name}")
        run(headrace, "run", str(PROMPTS), "-o", "answers.jsonl", "--quiet", cwd=directory)
        answers = (Path(directory) / "answers.jsonl").read_text(encoding="utf-8").splitlines()
        num_prompts = len(PROMPTS.read_text(encoding="utf-8").splitlines())
        refuse_unless(len(answers) == num_prompts, f"{len(answers)} answers to {num_prompts} prompts")
        print(f"  {version.strip()}: {len(answers)} answers to {num_prompts} prompts")


def run(*command: str, cwd: str | None = None, capture: bool = False) -> str:
    """An exit code other than 0 ends the release; the command has then said why."""
    done = subprocess.run(command, cwd=cwd or ROOT, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode != 0:
        print(done.stdout or "", end="")
        sys.exit(f"release: {' '.join(command[:4])} ended with exit code {done.returncode}")
    return done.stdout or ""


def step(title: str) -> None:
    print(f"release: {title}", flush=True)


def refuse_unless(holds: bool, message: str) -> None:
    if not holds:
        sys.exit(f"release: {message}")


if __name__ == "__main__":
    main()
