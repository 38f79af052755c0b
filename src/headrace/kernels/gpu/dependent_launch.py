"""Programmatic dependent launch: a kernel is set up while the one before it still runs, and waits for its results.

A kernel that is launched with `dependent_launch` must wait (`wait_for_inputs`, or `wait_for_kernels_before`) in every
program. Before that it may read only what was complete at the last plain launch: weights, what describes the step, keys
and values of earlier steps; and what the kernel before it had waited for when it let this one start. It may write
nothing. Then the end of a kernel means that all kernels before it have ended, and memory may be reused as in plain
launches. Kernels of libraries between them are launched as always.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = (9, 0)  # the first architecture that has it


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch, `IS_DEPENDENT` among them."""
    return {"IS_DEPENDENT": True, "launch_pdl": True} if _is_supported(device) else {"IS_DEPENDENT": False}


@functools.cache
def _is_supported(device: torch.device) -> bool:
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= _HOPPER


@triton.jit
def wait_for_inputs(IS_DEPENDENT: tl.constexpr):
    """Lets the next kernel be set up, and waits until the kernels before this one have ended."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_next_start(IS_DEPENDENT: tl.constexpr):
    if IS_DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_kernels_before(IS_DEPENDENT: tl.constexpr):
    if IS_DEPENDENT:
        gdc_wait()
