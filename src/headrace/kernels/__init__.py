"""The operations that models are made of, with one implementation per kind of device.

    ops/           what models call; picks the implementation by the device and type of the tensors
    layout.py      the data types that cross this border: StepLayout, LayerCache, Routes, Fp8Rows
    reference/     each operation in plain PyTorch: its specification, its test, and the fallback
    cpu/           numba kernels for a CPU: float32, and GEMMs with packed weights of four to eight bits
    gpu/           Triton kernels for NVIDIA GPUs; triton_setup.py: what Triton does before the first of them
    quantized.py   weights of four and eight bits: their forms, and the arithmetic in plain PyTorch
    ranges.py      named ranges around parts of a step, for profilers

Invariants:

- Every fast kernel is tested against its reference; the reference computes sums in float32.
- A token's result does not depend on what else is in the batch, except for the rounding of GEMMs.
- numba and Triton are imported in this package only, and only when a kernel is first needed.

FP8: start at `gpu/fp8.py`. Sampling kernels (`cpu/sample.py`, `gpu/sample.py`) are called by `headrace.sampling`.
"""
