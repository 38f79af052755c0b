"""The plan as tables for a terminal. Imports rich, so only the command imports this module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from headrace.plan.document import mean_len
from headrace.plan.gpus import Gpu
from headrace.plan.memory import gib
from headrace.plan.prediction import Prediction

PHASE_TITLES = {
    "gemm": "GEMMs",
    "attention": "attention of prompts",
    "cache": "cache reads",
    "other": "other kernels and gaps",
    "network": "network",
    "bus": "copies of streamed layers",
    "host": "host",
}


def print_plan(console: Console, prediction: Prediction, ways_out: Sequence[str]) -> None:
    shape, workload = prediction.model, prediction.workload
    size = f"{shape.num_params / 1e9:,.1f}B weights"
    if shape.has_mixture:
        size += f", {shape.active_params / 1e9:,.1f}B active"
    count = f"{prediction.num_gpus} x " if prediction.num_gpus > 1 else ""
    console.print(
        f"[bold]{shape.name}[/bold] ({size}) in {prediction.precision.label} on {count}{prediction.gpu.title}"
    )
    at_once = f"{workload.concurrency} clients" if workload.concurrency else "all submitted at once"
    console.print(
        f"workload {workload.name}: {len(workload.requests):,} requests, mean {workload.mean_prompt_len:,.0f} tokens "
        f"in and {workload.mean_output_len:,.0f} out, {at_once}"
    )
    if prediction.layout.num_gpus > 1:
        console.print(f"layout: {prediction.layout.label}: {prediction.layout_reason or 'the most memory per replica'}")
    _print_memory(console, prediction)
    if prediction.problem is not None:
        console.print(f"\n[bold red]Does not fit[/bold red]: {prediction.problem}.")
        console.print("Ways out:")
        for way in ways_out:
            console.print(Padding(f"- {way}", (0, 0, 0, 2)))
    else:
        _print_speed(console, prediction)
    for note in prediction.notes:
        console.print(f"[yellow]note:[/yellow] {note}")


def _print_memory(console: Console, prediction: Prediction) -> None:
    memory, layout = prediction.memory, prediction.layout
    per_gpu = " per GPU" if layout.num_gpus > 1 else ""
    table = _table(f"memory{per_gpu}", "", "")
    share = f"{memory.allowed / memory.total:.0%} of {gib(memory.total)}"
    table.add_row("may be used", gib(memory.allowed), share)
    streamed = memory.streamed
    of_host = f"{gib(streamed.num_bytes)} more in host memory" if streamed.indexes else ""
    table.add_row("weights", gib(memory.weights), of_host)
    table.add_row("activations of the largest step", gib(memory.activations), "")
    table.add_row("CUDA graphs and workspaces", gib(memory.runtime), "")
    if memory.states:
        table.add_row("recurrent states of all slots", gib(memory.states), "")
    if memory.adapters:
        table.add_row("LoRA adapters", gib(memory.adapters), "")
    table.add_row("left for the KV cache", gib(memory.cache), f"{memory.bytes_per_token / 1024:,.1f} KiB per token")
    console.print(table)
    if not memory.fits:
        return
    mean, replicas = mean_len(prediction.workload), layout.replicas
    table = _table("what fits", "", "")
    table.add_row("tokens of cache", f"{memory.cache_tokens * replicas:,}", "")
    table.add_row("longest context", f"{memory.longest_context:,}", f"max_model_len {memory.max_model_len:,}")
    table.add_row(
        "sequences of the workload's mean length", f"{memory.concurrency(mean) * replicas:,}", f"{mean:,.0f} tokens"
    )
    table.add_row("sequences of max_model_len", f"{memory.concurrency(memory.max_model_len) * replicas:,}", "")
    if prediction.settings is not None:
        table.add_row("max_num_seqs", f"{prediction.settings.max_num_seqs:,}", "as the engine would choose")
    console.print(table)


def _print_speed(console: Console, prediction: Prediction) -> None:
    speed = prediction.speed
    assert speed is not None
    table = _table("predicted", "", "")
    for title, value, remark in (
        ("workload", f"{speed.seconds:,.1f} s", _band(prediction, speed.seconds)),
        ("output", f"{speed.output_tokens_per_s:,.0f} tokens/s", _band(prediction, speed.output_tokens_per_s)),
        ("input and output", f"{speed.total_tokens_per_s:,.0f} tokens/s", ""),
        ("requests", f"{speed.requests_per_s:,.2f} /s", f"{speed.max_running:,} at once"),
        ("prefill alone", f"{speed.prefill_tokens_per_s:,.0f} tokens/s", ""),
        ("decode alone", f"{speed.decode_tokens_per_s:,.0f} tokens/s", ""),
        ("TTFT of one prompt", f"{1e3 * speed.ttft_one_s:,.1f} ms", "on an idle engine"),
        ("TPOT", f"{1e3 * speed.tpot_s:,.1f} ms", "mean, at this concurrency"),
    ):
        table.add_row(title, value, remark)
    cost = prediction.cost_per_million(speed.output_tokens_per_s)
    if cost is not None:
        assumed = "" if prediction.gpu.is_price_given else ", an assumption"
        remark = f"${prediction.gpu.price:,.2f} per GPU-hour{assumed}"
        table.add_row("a million output tokens", f"${cost:,.2f}", remark)
    console.print(table)
    parts = [(PHASE_TITLES[name], spent / speed.seconds) for name, spent in speed.phases.items()]
    split = ", ".join(f"{title} {share:.0%}" for title, share in parts if share >= 0.005)
    console.print(f"where the time goes: {split}")
    console.print(f"error: {prediction.error.text}")


def print_formats(console: Console, formats: Iterable[Prediction]) -> None:
    """What fewer bits would change."""
    table = _table("other formats", "weights", "cache tokens", "sequences", "tokens/s out", "")
    for each in formats:
        memory, speed = each.memory, each.speed
        notes = each.layout.short if each.num_gpus > 1 else ""
        if speed is None:
            table.add_row(each.precision.label, gib(memory.weights), "does not fit", "", "", notes)
            continue
        table.add_row(
            each.precision.label,
            gib(memory.weights),
            f"{memory.cache_tokens * each.layout.replicas:,}",
            f"{memory.concurrency(mean_len(each.workload)) * each.layout.replicas:,}",
            f"{speed.output_tokens_per_s:,.0f}",
            notes,
        )
    console.print(table)


def print_comparison(console: Console, rows: Sequence[tuple[Gpu, Prediction | str]]) -> None:
    table = _table("GPU", "layout", "tokens/s out", "TPOT", "$/h", "$/M out", "$/M all", "error")
    missing = []
    for gpu, found in rows:
        if isinstance(found, str):
            table.add_row(gpu.name, "cannot run", "", "", "", "", "", "")
            missing.append(f"{gpu.name}: {found}")
            continue
        speed = found.speed
        if speed is None:
            table.add_row(gpu.name, "does not fit", "", "", _price(gpu), "", "", "")
            missing.append(f"{gpu.name}: {found.problem}")
            continue
        table.add_row(
            gpu.name,
            found.layout.short,
            f"{speed.output_tokens_per_s:,.0f}",
            f"{1e3 * speed.tpot_s:,.1f} ms",
            _price(gpu),
            _dollars(found.cost_per_million(speed.output_tokens_per_s)),
            _dollars(found.cost_per_million(speed.total_tokens_per_s)),
            "unknown" if found.error.share is None else f"±{found.error.share:.0%}",
        )
    console.print(table)
    for line in missing:
        console.print(f"[yellow]note:[/yellow] {line}")
    if any(gpu.price is not None and not gpu.is_price_given for gpu, _ in rows):
        console.print("* assumed, typical for clouds on demand; --gpu-price sets yours")


def print_probe(console: Console, report: dict[str, Any]) -> None:
    console.print(
        f"\n[bold]probe[/bold]: {report['model']} on {report['device']}, started in {report['ready_s']:.1f} s"
    )
    table = _table("", "predicted", "real", "difference")
    for row in report["rows"]:
        change = "" if not row["real"] else f"{row['predicted'] / row['real'] - 1.0:+.1%}"
        table.add_row(
            row["name"], f"{row['predicted']:,.{row['digits']}f}", f"{row['real']:,.{row['digits']}f}", change
        )
    console.print(table)


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title_justify="left", pad_edge=False)
    for position, title in enumerate(titles):
        is_number = 0 < position < max(2, len(titles) - 1) and title != "layout"
        table.add_column(title, justify="right" if is_number else "left")
    return table


def _band(prediction: Prediction, value: float) -> str:
    share = prediction.error.share
    if share is None:
        return "not measured"
    digits = 1 if value < 100 else 0
    return f"{value * (1 - share):,.{digits}f} to {value * (1 + share):,.{digits}f}"


def _price(gpu: Gpu) -> str:
    if gpu.price is None:
        return ""
    return f"${gpu.price:,.2f}" + ("" if gpu.is_price_given else "*")


def _dollars(value: float | None) -> str:
    return "" if value is None else f"${value:,.2f}"
