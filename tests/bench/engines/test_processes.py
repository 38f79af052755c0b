"""Child processes of engines: readiness, failures by kind, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from time import monotonic

import psutil
import pytest

from headrace.bench.engines import EngineFailure
from headrace.bench.engines.processes import MAX_LOG_LINES, Child, classify, plain

READY = re.compile(r"ready on (\d+)")


def child(code: str, **options: object) -> Child:
    return Child([sys.executable, "-u", "-c", textwrap.dedent(code)], name="fake", **options)  # type: ignore[arg-type]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = monotonic() + 20
    while not is_gone(pid):
        assert monotonic() < deadline, f"process {pid} is still there"
        subprocess.run(["sleep", "0.05"], check=True)


def test_waits_for_a_line_of_the_log() -> None:
    with child("import time; print('ready on 81'); time.sleep(60)") as engine:
        found = engine.wait_until(lambda: engine.find_in_log(READY), timeout_s=30)
        assert found[1] == "81"
        assert engine.pids()[0] == engine.pid


def test_a_child_that_ends_fails_at_once_and_not_at_the_time_out() -> None:
    started = monotonic()
    with child("raise SystemExit('boom')") as engine, pytest.raises(EngineFailure, match=r"exit code 1.*boom") as error:
        engine.wait_until(lambda: engine.find_in_log(READY), timeout_s=300)
    assert error.value.kind == "crash"
    assert "boom" in error.value.log_tail
    assert monotonic() - started < 100


def test_what_a_child_says_just_before_it_ends_counts() -> None:
    with child("print('ready on 5')") as engine:
        engine._process.wait(30)
        engine._drain.join(30)
        assert engine.wait_until(lambda: engine.find_in_log(READY), timeout_s=30)[1] == "5"


def test_a_silent_child_is_a_time_out() -> None:
    with child("import time; time.sleep(60)") as engine, pytest.raises(EngineFailure) as error:
        engine.wait_until(lambda: engine.find_in_log(READY), timeout_s=0.2)
    assert error.value.kind == "timeout"
    assert is_gone(engine.pid)


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready on 1")
        time.sleep(60)
    """
    engine = child(code)
    engine.wait_until(lambda: engine.find_in_log(READY), timeout_s=30)
    engine.stop(timeout_s=0.2)
    assert engine.exit_code == -signal.SIGKILL
    engine.stop()  # a second time changes nothing


@pytest.mark.slow
@pytest.mark.parametrize("leaves_session", [False, True])
def test_children_of_a_child_are_stopped_too(leaves_session: bool) -> None:
    code = f"""
        import subprocess, sys, time
        inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        other = subprocess.Popen([sys.executable, "-c", inner], start_new_session={leaves_session})
        print("ready on", other.pid)
        time.sleep(60)
    """
    with child(code) as engine:
        grandchild = int(engine.wait_until(lambda: engine.find_in_log(READY), timeout_s=30)[1])
        assert grandchild in engine.pids()
    assert is_gone(grandchild)


def test_nothing_is_left_when_the_parent_is_killed() -> None:
    code = """
        import re, sys, time
        from headrace.bench.engines.processes import Child
        inner = "import os, time; print('ready on', os.getpid(), flush=True); time.sleep(60)"
        engine = Child([sys.executable, "-c", inner], name="fake")
        found = engine.wait_until(lambda: engine.find_in_log(re.compile(r"ready on (\\d+)")), timeout_s=30)
        print(found[1], flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until_gone(pid)


def test_nothing_is_left_when_the_parent_forgets_to_stop() -> None:
    code = """
        import sys
        from headrace.bench.engines.processes import Child
        engine = Child([sys.executable, "-c", "import time; time.sleep(60)"], name="fake")
        print(engine.pid, flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, check=True)
    assert is_gone(int(done.stdout))


def test_the_log_is_bounded() -> None:
    with child("for i in range(2000): print('line', i)") as engine:
        engine._process.wait(30)
        engine._drain.join(30)
        assert len(engine.log_lines()) == MAX_LOG_LINES
        assert engine.log_tail(1) == "line 1999"


def test_progress_bars_are_lines() -> None:
    with child("import sys; sys.stdout.write('1%\\r2%\\r3%')") as engine:
        engine._process.wait(30)
        engine._drain.join(30)
        assert engine.log_lines() == ["1%", "2%", "3%"]


def test_a_program_that_is_not_there_is_not_installed() -> None:
    with pytest.raises(EngineFailure, match="No such file") as error:
        Child(["/no/such/program"], name="fake")
    assert error.value.kind == "not_installed"


def test_what_was_written_before_a_reply_is_in_the_log_once_it_has_settled() -> None:
    reading, writing = os.pipe()
    code = f"""
        import os, time
        for i in range(3000): print("line", i)
        os.write({writing}, b"x")
        time.sleep(60)
    """
    with child(code, pass_fds=[writing]) as engine, os.fdopen(reading, "rb") as replies:
        os.close(writing)
        assert replies.read(1) == b"x"
        engine.settle_log()
        assert engine.log_tail(1) == "line 2999"


def test_a_child_takes_commands() -> None:
    code = "import sys; print('ready on', 2 * int(sys.stdin.readline()))"
    with child(code, takes_commands=True) as engine:
        engine.send(b"21\n")
        assert engine.wait_until(lambda: engine.find_in_log(READY), timeout_s=30)[1] == "42"


def test_the_environment_is_added_to() -> None:
    code = "import os; print('ready on', os.environ['N'], os.environ['PATH'], os.environ.get('HOME'))"
    with child(code, env={"N": "9", "HOME": None}) as engine:
        assert engine.wait_until(lambda: engine.find_in_log(READY), timeout_s=30)[1] == "9"
        assert engine.log_tail().endswith(f"{os.environ['PATH']} None")


@pytest.mark.parametrize(
    ("exit_code", "log", "kind", "said"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "oom", "Tried to allocate"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "oom", "you tried"),
        (-9, "loading", "oom", "killed"),
        (137, "", "oom", "killed"),
        (1, "ValueError: No available memory for the cache blocks. Try increasing it", "oom", "Try increasing"),
        (
            1,
            "ValueError: (0.8 GiB KV cache is needed, which is larger than the available KV cache memory (0.1 GiB)",
            "oom",
            "0.1 GiB",
        ),
        (
            1,
            "headrace: error: max_model_len=8,192 needs 8,191 tokens of KV cache, and there is room for 160; lower it",
            "oom",
            "room for 160",
        ),
        (
            2,
            "headrace: error: num_gpu_blocks_override=9 is 99.0 GiB; it does not fit into 80.0 GiB of memory",
            "oom",
            "does not fit into",
        ),
        (2, "headrace serve: error: unknown option --max-seqs", "bad_setting", "--max-seqs"),
        (2, "vllm: error: unrecognized arguments: --capacity-policy x", "bad_setting", "--capacity-policy"),
        (
            1,
            "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, 9 is greater",
            "bad_setting",
            "ModelConfig Value error, 9 is greater",
        ),
        (
            1,
            "headrace: error: quantization='fp8' needs a GPU: this CPU computes in float32",
            "bad_setting",
            "needs a GPU",
        ),
        (1, "ModuleNotFoundError: No module named 'vllm'", "not_installed", "vllm"),
        (-11, "step 5", "crash", "step 5"),
        (1, "", "crash", ""),
    ],
)
def test_a_failure_is_classified_by_exit_code_and_log(exit_code: int, log: str, kind: str, said: str) -> None:
    found, why = classify(
        exit_code, ["starting", *log.splitlines(), *(["at line 3"] if exit_code == 1 and log else [])]
    )
    assert found == kind
    assert said in why


def test_prefixes_of_log_lines_are_removed() -> None:
    line = "\x1b[1;36m(EngineCore pid=71)\x1b[0;0m ERROR 11-16 12:30:01 [core.py:866] ValueError: no"
    assert plain(line) == "ValueError: no"
