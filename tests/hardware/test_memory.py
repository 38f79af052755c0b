"""What becomes of freed memory, seen by the page faults of a process that uses it again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

NUM_BYTES, NUM_TIMES, PAGE_BYTES = 24 << 20, 20, 4096
PROGRAM = f"""
import ctypes, resource
from concurrent.futures import ThreadPoolExecutor
from headrace.hardware import keep_freed_buffers, return_large_buffers

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def use():
    address = libc.malloc({NUM_BYTES})
    ctypes.memset(address, 1, {NUM_BYTES})
    libc.free(address)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({NUM_TIMES}):
        use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

return_large_buffers()
thread = ThreadPoolExecutor(1)
returned = thread.submit(faults).result()
keep_freed_buffers()
thread.submit(use).result()
print(returned, thread.submit(faults).result())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such settings")
def test_buffers_of_steps_are_kept_and_those_of_loading_returned() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    returned, kept = map(int, done.stdout.split())
    assert returned >= NUM_TIMES * NUM_BYTES // PAGE_BYTES // 600  # at least once for each huge page
    assert returned > 10 * kept
