from __future__ import annotations

from headrace.profile.commands import own_commands, server_commands


def test_the_commands_repeat_the_run_and_mark_its_window() -> None:
    arguments = ["my model", "--max-num-seqs", "8", "--picture", "x.html", "--json=out.json", "--tool", "torch"]
    commands = own_commands(arguments)
    run = "headrace profile 'my model' --max-num-seqs 8 --tool cuda"
    assert commands["nsys"].endswith(run)
    assert commands["ncu"].endswith(run + " --steps 4")
    assert "--capture-range=cudaProfilerApi --capture-range-end=stop" in commands["nsys"]
    assert "--cuda-graph-trace=node" in commands["nsys"]
    assert "--profile-from-start off" in commands["ncu"] and "--graph-profiling node" in commands["ncu"]


def test_a_server_is_started_by_the_tool_and_stays_after_a_window() -> None:
    commands = server_commands("http://x:1", ["--profiler-dir", "d"], seconds=3)
    assert commands["nsys"].endswith("headrace serve --profiler-dir d")
    assert "--capture-range-end=repeat" in commands["nsys"]
    assert "--trace-fork-before-exec=true" in commands["nsys"]
    assert "--duration=3" in commands["nsys by time"]
    assert commands["then, to record a window"] == "headrace profile --url http://x:1 --tool cuda --seconds 3"
