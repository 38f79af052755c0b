"""How long threads of OpenMP look for work."""

from __future__ import annotations

import os
import sys

_LOOKS = "1000"  # about 50 us
_SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def shorten_openmp_waits() -> None:
    """Make threads of torch, which is not imported yet, sleep soon after an operation. They would look for more work
    for 15 ms, on the cores that our own threads (`kernels/cpu/team.py`) need for the next kernel."""
    if "torch" not in sys.modules and not any(name in os.environ for name in _SET_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = _LOOKS
