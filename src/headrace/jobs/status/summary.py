"""A job's report as text: panels on a terminal, plain lines elsewhere, with the same content."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from headrace.engine.settings import Choice
from headrace.jobs.formats.locations import STANDARD_STREAM
from headrace.jobs.status import workers
from headrace.jobs.status.gpus import summary_rows
from headrace.jobs.status.report import JobReport
from headrace.jobs.store.failure_log import FailureCounts
from headrace.startup import stage_seconds_text

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[str, str]

SAMPLE_LEN = 240


def print_summary(report: JobReport, stream: TextIO) -> None:
    if stream.isatty():
        _print_rich(report, stream)
    else:
        stream.write(plain_summary(report))
        stream.flush()


def headline(report: JobReport) -> str:
    tally, time = report.tally, _seconds(report.seconds)
    errors = f", {_many(tally.num_failed, 'error line')}" if tally.num_failed else ""
    before = f", {report.num_before:,} done before" if report.num_before else ""
    if report.was_stopped:
        answered = f"{_many(tally.num_answered, 'line')} answered"
        word = "cancelled" if report.was_cancelled else "stopped"
        return f"{word} after {time}: {answered}{errors}, {report.num_in_flight:,} in flight dropped{before}"
    if report.num_before and not tally.num_done:
        return f"nothing was left to do: all {_many(report.num_before, 'line')} are done"
    expired = "expired: " if report.was_expired else ""
    return f"{expired}{tally.num_answered:,} of {_many(tally.num_done, 'line')} answered in {time}{errors}{before}"


def result_rows(report: JobReport) -> list[Row]:
    tally, scheduler = report.tally, report.stats.scheduler
    rows = [
        ("tokens in", f"{tally.num_prompt_tokens:,} · {report.prompt_tokens_per_second:,.0f}/s"),
        ("tokens out", f"{tally.num_generated_tokens:,} · {report.generated_tokens_per_second:,.0f}/s"),
        ("time", f"{_seconds(report.seconds)}, after {_seconds(report.start_seconds)} to start{_stages(report)}"),
        ("saved", _saved(report)),
        ("prefix cache", f"{scheduler.prefix_hit_share:.1%} of prompt tokens were cached"),
        ("KV cache", f"{scheduler.max_kv_use:.1%} used at peak, {scheduler.kv_waste:.1%} of it empty"),
        ("preemptions", f"{scheduler.num_preemptions:,}"),
        ("steps", f"{scheduler.num_steps:,} of {scheduler.mean_batched_tokens:,.1f} tokens on average"),
        ("host time", f"{report.host_seconds_per_step * 1e3:.2f} ms per step"),
        ("ended by", ", ".join(f"{reason} {count:,}" for reason, count in tally.finish_reasons.most_common()) or "–"),
    ]
    rows += workers.summary_rows(report.workers)
    rows += summary_rows(report.gpus, report.gpus_missing)
    if report.gpu_hours is not None:
        rows.append(("GPU-hours", f"{report.gpu_hours:,.3f}{_cost(report)}"))
    if tally.num_failed:
        rows.append(("errors", ", ".join(f"{code} {count:,}" for code, count in tally.errors.most_common())))
    rows += failure_rows(report.failures)
    return rows


def failure_rows(failures: FailureCounts) -> list[Row]:
    """Failures that the job recovered from, in all its runs. Empty if there were none."""
    rows = []
    if failures.retries:
        rows.append(("retries", ", ".join(f"{cause} {count:,}" for cause, count in sorted(failures.retries.items()))))
    if failures.deaths:
        deaths = ", ".join(f"{loss} {count:,}" for loss, count in sorted(failures.deaths.items()))
        rows.append(("deaths", f"{deaths}; lines that killed the engine: {failures.poison_rows:,}"))
    if failures.memory_rungs:
        rows.append(("memory", f"ran out {len(failures.memory_rungs):,} times: {', '.join(failures.memory_rungs)}"))
    return rows


def _stages(report: JobReport) -> str:
    text = stage_seconds_text(report.start_stages)
    return f" ({text})" if text else ""


def _saved(report: JobReport) -> str:
    saved = report.saved
    num_tokens = saved.duplicate_prompt_tokens + saved.duplicate_completion_tokens
    lines = f" ({_many(saved.duplicate_lines, 'line')})" if saved.duplicate_lines else ""
    return f"{saved.prefix_tokens:,} tokens by prefixes, {num_tokens:,} by duplicates{lines}"


def _cost(report: JobReport) -> str:
    tally = report.tally
    both = report.cost_per_million(tally.num_prompt_tokens + tally.num_generated_tokens)
    out = report.cost_per_million(tally.num_generated_tokens)
    if report.cost is None or both is None or out is None:
        return "" if report.cost is None else f" · cost {report.cost:,.4g}"
    return f" · cost {report.cost:,.4g}, {both:,.4g} a million tokens, {out:,.4g} a million of tokens out"


def remarks(report: JobReport) -> list[str]:
    """Sentences below the numbers: the first errors, and notes about what the user may not have intended."""
    notes = [f"{note} ({_many(count, 'line')})" for note, count in report.tally.notes.most_common()]
    return [*report.tally.first_errors, *notes]


def location(report: JobReport) -> str:
    if report.was_stopped and report.job_directory is not None:
        again = "; run the same command again, without --overwrite, to continue" if report.is_resumable else ""
        if report.was_cancelled:
            again = f"; 'headrace cancel --undo {report.output}' lets it continue"
        return f"the answers so far are in {report.job_directory}{again}"
    kept = "the answers so far are" if report.was_stopped else "the answers are"
    place = "on stdout" if report.output == STANDARD_STREAM else f"in {report.output}"
    return f"{kept} {place}"


def plain_summary(report: JobReport) -> str:
    lines = [f"headrace: {headline(report)}"]
    lines += [f"  {name:<14}{value}" for name, value in result_rows(report)]
    lines += [f"  ! {remark}" for remark in remarks(report)]
    lines += ["headrace: settings"]
    lines += [f"  {choice.name:<24}{choice.value:<10} {choice.reason}" for choice in report.choices]
    if report.tally.sample is not None:
        sample = report.tally.sample
        lines += [f"headrace: line {sample.index + 1}, as an example"]
        lines += [f"  > {_short(sample.question)}", f"  < {_short(sample.text)}"]
    return "\n".join([*lines, f"headrace: {location(report)}", ""])


def _print_rich(report: JobReport, stream: TextIO) -> None:
    from rich.console import Console, Group, RenderableType
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [_rich_rows(result_rows(report))]
    parts += [Text(f"! {remark}", style="yellow") for remark in remarks(report)]
    colour = "yellow" if report.exit_code else "green"
    console = Console(file=stream, highlight=False)
    console.print(Panel(Group(*parts), title=headline(report), title_align="left", border_style=colour))
    console.print(Panel(_rich_choices(report.choices), title="settings", title_align="left", border_style="dim"))
    sample = report.tally.sample
    if sample is not None:
        text = Text.assemble((_short(sample.question), "dim"), "\n", _short(sample.text))
        console.print(Panel(text, title=f"line {sample.index + 1}", title_align="left", border_style="dim"))
    console.print(Text(location(report), style="bold"))


def _rich_rows(rows: list[Row]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def _rich_choices(choices: tuple[Choice, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for style in ("dim", "bold", ""):
        table.add_column(style=style)
    for choice in choices:
        table.add_row(choice.name, choice.value, Text(choice.reason))
    return table


def _short(text: str) -> str:
    joined = "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
    return joined if len(joined) <= SAMPLE_LEN else joined[: SAMPLE_LEN - 1].rstrip() + "…"


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
