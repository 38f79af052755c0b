"""GPU memory of each rank that all ranks of one machine can write to, over CUDA IPC.

The driver's functions are called directly. What torch has for this counts references in files of `/dev/shm`, and warns
at exit when a rank was killed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch

from headrace.errors import HeadraceError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # a flag of cuIpcOpenMemHandle: lets GPUs reach each other where they can
_MESSAGE_BYTES = 256  # of what ranks tell each other: a handle, or why there is none
_DONE, _FAILED = b"+", b"-"

Exchange = Callable[[bytes], list[bytes]]  # sends a message of this rank to all and returns those of all


class PeerAccessError(HeadraceError):
    """Ranks that cannot reach each other's memory; the message is the reason."""


class PeerMemory:
    """Owns this rank's memory, which starts as zeros, and the addresses of that of the others."""

    def __init__(self, addresses: list[int], free: Callable[[], None]) -> None:
        self._end = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.addresses = torch.tensor([*addresses, self._end.data_ptr()], dtype=torch.int64, device="cuda")  # [ranks + 1]
        torch.cuda.current_stream().synchronize()
        weakref.finalize(self, free).atexit = False  # the end of the process frees it

    def end_waits(self) -> None:
        """Writes to the word after the ranks' memory, which kernels that wait for another rank look at."""
        self._end.fill_(1)


def share_memory(exchange: Exchange, rank: int, *, num_bytes: int) -> PeerMemory:
    """Allocates memory on the current GPU and connects it with that of the other ranks, which must do the same. Raises a
    PeerAccessError on all ranks if one of them cannot."""
    memory = _SharedMemory()
    try:
        handles = agreed(exchange, lambda: memory.allocate(num_bytes))
        agreed(exchange, lambda: memory.open(handles, rank))
    except PeerAccessError:
        memory.free()
        raise
    return PeerMemory(memory.addresses, memory.free)


def agreed(exchange: Exchange, function: Callable[[], bytes]) -> list[bytes]:
    """Calls the function on every rank; returns the results of all. If it failed on one of them, all raise the error."""
    try:
        told = _DONE + function()
    except (OSError, PeerAccessError) as error:
        told = _FAILED + str(error).encode()
    found = [each.rstrip(b"\0") for each in exchange(told[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"))]
    for rank, message in enumerate(found):
        if message[:1] == _FAILED:
            raise PeerAccessError(f"rank {rank}: {message[1:].decode(errors='replace')}")
    return [message[1:] for message in found]


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


class _SharedMemory:
    """This rank's memory and its view of that of the others. It calls CUDA's driver, in the context of torch."""

    def __init__(self) -> None:
        self.addresses: list[int] = []  # of all ranks
        self._library: Any = None
        self._own = ctypes.c_uint64()
        self._context = ctypes.c_void_p()
        self._opened: list[ctypes.c_uint64] = []

    def allocate(self, num_bytes: int) -> bytes:
        """Allocates memory with zeros in it; returns the handle by which others open it."""
        torch.zeros(1, device="cuda")  # makes the context current on this thread
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        handle = _Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(num_bytes))
        self._call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        return bytes(handle).hex().encode()

    def open(self, handles: list[bytes], rank: int) -> bytes:
        for peer, handle in enumerate(handles):
            address = self._own if peer == rank else ctypes.c_uint64()
            if peer != rank:
                opened = _Handle.from_buffer_copy(bytes.fromhex(handle.decode()))
                self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
                self._opened.append(address)
            self.addresses.append(address.value)
        return b""

    def free(self) -> None:
        """Gives the memory back, on any thread. It waits for kernels that still run."""
        library = self._library
        if library is None or not self._context:
            return
        library.cuCtxPushCurrent_v2(self._context)
        for address in self._opened:
            library.cuIpcCloseMemHandle(address)
        if self._own:
            library.cuMemFree_v2(self._own)
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            reason = (text.value or b"?").decode()
            raise PeerAccessError(f"{name.removesuffix('_v2')} failed with {reason} ({status})")
