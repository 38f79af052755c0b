"""CPU time and memory of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from time import monotonic, process_time, sleep

from headrace.hardware.process_usage import ProcessSampler


def test_cpu_seconds_and_peak_memory_of_this_process() -> None:
    with ProcessSampler(lambda: [os.getpid()], interval_s=0.005) as usage:
        held = bytearray(64 << 20)
        until = process_time() + 0.2
        while process_time() < until:
            pass
    told = usage.summary()
    assert told["available"] and told["num_processes"] == 1
    assert told["cpu_s"] > 0.1
    assert told["peak_rss_bytes"] > len(held)


def test_all_cpu_time_of_a_process_that_starts_later_counts() -> None:
    pids: list[int] = []
    with ProcessSampler(lambda: pids, interval_s=0.005) as usage:
        code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdin is not None
            assert child.stdout.readline() == b"done\n"
            pids.append(child.pid)
            deadline = monotonic() + 30
            while not usage.summary()["available"] and monotonic() < deadline:
                sleep(0.005)
            child.stdin.write(b"\n")
    assert usage.summary()["cpu_s"] >= 0.25


def test_without_processes_the_summary_says_so() -> None:
    with ProcessSampler(list) as usage:
        pass
    assert usage.summary() == {"available": False, "reason": "not available: no processes on this machine"}
