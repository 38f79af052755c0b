from __future__ import annotations

import dataclasses
import io
import json
from collections import Counter

from headrace.engine.core import EngineStats
from headrace.engine.settings import Choice, SettingInForce
from headrace.jobs.status.report import JobReport, Sample, Tally
from headrace.jobs.status.summary import headline, plain_summary, print_summary
from headrace.jobs.store.status_file import Saved
from headrace.sched import SchedulerStats

STATS = SchedulerStats(
    num_steps=10,
    num_batched_tokens=200,
    num_preemptions=2,
    num_prefix_queried_tokens=1000,
    num_prefix_hit_tokens=400,
    max_blocks_held=50,
    sum_blocks_held=100,
    sum_unused_positions=32,
    num_blocks=200,
    block_size=16,
)


def report(**changes: object) -> JobReport:
    tally = Tally(
        num_answered=20,
        num_prompt_tokens=1000,
        num_generated_tokens=500,
        errors=Counter(invalid_json=1),
        first_errors=["line 3: invalid JSON"],
        notes=Counter({"model 'a' was asked for": 2}),
        sample=Sample(0, "Why?", "Because. " * 100),
    )
    made = JobReport(
        output="out.jsonl",
        model_name="m",
        was_stopped=False,
        num_in_flight=0,
        tally=tally,
        seconds=10.0,
        start_seconds=1.5,
        stats=EngineStats(STATS, host_seconds=0.02, wait_seconds=1.0),
        choices=(Choice("max_num_seqs", "64", "what a CPU does best"),),
        in_force={"max_num_seqs": SettingInForce(64, "automatic", "what a CPU does best")},
    )
    return dataclasses.replace(made, **changes)


def test_the_plain_summary_says_everything() -> None:
    text = plain_summary(report())
    for part in (
        "20 of 21 lines answered in 10.0 s, 1 error line",
        "1,000 · 100/s",
        "500 · 50/s",
        "after 1.5 s to start",
        "40.0% of prompt tokens",
        "25.0% used at peak, 2.0% of it empty",
        "preemptions   2",
        "2.00 ms per step",
        "invalid_json 1",
        "! line 3: invalid JSON",
        "! model 'a' was asked for (2 lines)",
        "what a CPU does best",
        "> Why?",
        "the answers are in out.jsonl",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) < 260


def test_the_summary_says_what_each_mechanism_saved() -> None:
    saved = Saved(prefix_tokens=400, duplicate_lines=3, duplicate_prompt_tokens=30, duplicate_completion_tokens=12)
    assert "400 tokens by prefixes, 42 by duplicates (3 lines)" in plain_summary(report(saved=saved))
    assert report(saved=saved).as_json()["saved"]["duplicate_lines"] == 3


def test_a_gpu_has_hours_and_with_a_price_a_cost() -> None:
    held = {"is_on_gpu": True, "seconds": 3590.0, "start_seconds": 10.0}
    assert "GPU-hours     1.000\n" in plain_summary(report(**held))
    assert "GPU-hours" not in plain_summary(report())
    priced = report(**held, gpu_price=3.0)
    assert "1.000 · cost 3, 2,000 a million tokens, 6,000 a million of tokens out" in plain_summary(priced)
    assert priced.as_json()["cost_per_million_tokens"] == 2000
    nothing = report(**held, gpu_price=3.0, tally=Tally())
    assert "1.000 · cost 3\n" in plain_summary(nothing)
    assert nothing.as_json()["cost_per_million_tokens"] is None


def test_a_stopped_job_says_so() -> None:
    stopped = headline(report(was_stopped=True, num_in_flight=7))
    assert stopped == "stopped after 10.0 s: 20 lines answered, 1 error line, 7 in flight dropped"
    assert "the answers so far are in out.jsonl" in plain_summary(report(was_stopped=True))


def test_exit_codes_follow_the_outcome() -> None:
    assert report().exit_code == 3
    assert report(was_stopped=True).exit_code == 130
    assert report(tally=Tally(num_answered=1)).exit_code == 0


def test_the_json_summary_has_the_same_numbers() -> None:
    summary = json.loads(json.dumps(report(seconds_by_limit={"disk": 4.0, "decode": 6.0}).as_json()))
    assert summary["limited_by_seconds"] == {"disk": 4.0, "decode": 6.0}
    assert (summary["host_seconds_per_step"], summary["wait_seconds_per_step"]) == (0.002, 0.1)
    assert (summary["requests"], summary["answered"], summary["errors"]) == (21, 20, 1)
    assert summary["completion_tokens_per_second"] == 50
    assert summary["prefix_hit_share"] == 0.4
    setting = {"value": 64, "source": "automatic", "reason": "what a CPU does best"}
    assert summary["settings"]["max_num_seqs"] == setting
    assert summary["model_shape"] is None  # no engine was started
    assert summary["model_digest"] is None  # no such model here
    assert summary["machine"]["num_cores"] >= 1 and summary["versions"]["headrace"]


def test_an_answer_cannot_send_codes_to_the_terminal() -> None:
    tally = Tally(num_answered=1, sample=Sample(0, "Why?", "a\x1b[31mb\x07"))
    assert "< a�[31mb�" in plain_summary(report(tally=tally))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_panels_with_the_same_content() -> None:
    terminal = Terminal()
    print_summary(report(), terminal)
    text = terminal.getvalue()
    assert (
        "╭" in text and "20 of 21 lines answered" in text and "prefix cache" in text and "what a CPU does best" in text
    )
