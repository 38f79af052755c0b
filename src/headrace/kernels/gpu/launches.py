"""Records which kernels are launched, without a GPU, and compiles them for one: in another process, or ahead of time.

    record_launches  ─▶  Launch (a function's types, constants and options, as Triton writes them)  ─▶  compile_launch

Both need the target to be set first, once per process: Triton keeps it for every function.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import make_backend
from triton.runtime import driver

from headrace.kernels.gpu.architectures import Architecture
from headrace.kernels.triton_setup import hash_triton


@dataclass(frozen=True, slots=True)
class Launch:
    """What Triton compiles for one launch: JSON with the types, constants and options of a function's arguments."""

    module: str
    function: str
    specialization: str

    @property
    def constants(self) -> dict[str, Any]:
        """The values of the parameters that are compiled in."""
        data, names = json.loads(self.specialization), self._jit_function.arg_names
        return {names[key[0]]: value for key, value in zip(data["constant_keys"], data["constant_vals"], strict=True)}

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.specialization)["options"]
        return found

    @property
    def types(self) -> dict[str, str]:
        """The type of each parameter, such as `*bf16` or `i32`; `constexpr` if it is compiled in."""
        found: dict[str, str] = json.loads(self.specialization)["signature"]
        return found

    @property
    def _jit_function(self) -> Any:
        return getattr(import_module(self.module), self.function)


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    launch: Launch
    shared_bytes: int  # of one program
    ptx: str


class _DriverWithoutGpu:
    """The part of a Triton driver that the compiler and the choice of tiles use."""

    def __init__(self, architecture: Architecture) -> None:
        self._target = GPUTarget("cuda", architecture.number, 32)
        properties = {"max_shared_mem": architecture.shared_memory_bytes}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def set_target(architecture: Architecture) -> None:
    """Let this process compile for a GPU that it does not use. It can launch nothing from then on."""
    driver.set_active(_DriverWithoutGpu(architecture))


# What a launch runs that was recorded before.
_NOTHING = SimpleNamespace(
    run=lambda *args: None, launch_metadata=lambda *args: None, function=None, packed_metadata=None
)


@contextmanager
def record_launches(found: Callable[[Launch], None] = lambda launch: None) -> Iterator[list[Launch]]:
    """Launches inside the block compile and run nothing; the list has each different one once, in order. `found` gets
    each of them at once."""
    launches: list[Launch] = []
    recorded: list[tuple[dict[str, Any], str]] = []  # where Triton looks up kernels, and the key

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches.append(Launch(fn.module, fn.name, compile["specialization_data"]))
        found(launches[-1])
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        kernels[compile["key"]] = _NOTHING
        recorded.append((kernels, compile["key"]))
        return True  # it is taken care of: Triton does not compile it

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook = before
        for kernels, key in recorded:
            del kernels[key]


def prepare_to_compile() -> None:
    """Do what is done once per process, so that its forks need not: what Triton looks kernels up by, and the library
    that launchers are linked with."""
    hash_triton()
    import_module("triton.compiler.code_generator")
    make_backend(driver.active.get_current_target()).hash()  # asks ptxas for its version
    if _builds_launchers() and not _has_libcuda():
        _use_stub_of_libcuda()


def compile_launch(launch: Launch) -> CompiledLaunch:
    """Compiles to machine code into Triton's cache, or finds it there."""
    kernel = launch._jit_function.preload(launch.specialization)
    _build_launcher(kernel)
    return CompiledLaunch(launch, int(kernel.metadata.shared), kernel.asm["ptx"])


def _build_launcher(kernel: Any) -> None:
    """Build what calls a kernel from Python, which Triton before 3.7 compiles as C for each kernel, into its cache."""
    if not _builds_launchers():
        return
    if not _has_libcuda():
        _use_stub_of_libcuda()
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _builds_launchers() -> bool:
    return hasattr(nvidia, "make_launcher") and _c_compiler() is not None


def _c_compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("clang")


def _has_libcuda() -> bool:
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        return False
    return True


# The functions of CUDA's driver that a launcher is linked with.
_STUBS = (
    "cuGetErrorString cuFuncSetAttribute cuLaunchKernelEx cuPointerGetAttribute cuCtxGetCurrent cuDeviceGet "
    "cuDevicePrimaryCtxRetain cuCtxSetCurrent"
).split()


def _use_stub_of_libcuda() -> None:
    """Link launchers with a library that has the names of CUDA's driver: where they run, the real one is loaded."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-libcuda-"))
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in _STUBS))
    compiler = _c_compiler()
    assert compiler is not None
    command = [compiler, str(source), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # Triton also loads what it has built
    triton.knobs.nvidia.libcuda_path = str(folder)
    nvidia.libcuda_dirs.cache_clear()
    nvidia.library_dirs.cache_clear()
