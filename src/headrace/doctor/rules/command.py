"""Mistakes of a command line, many of them from guides: it would not start, or do something else than was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from headrace.config import BLOCK_SIZES, MAX_NUM_SEQS
from headrace.doctor.estimates import step_of_prompts
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import Advice, Finding, Rule
from headrace.doctor.readers.command_line import CommandLine, Flag
from headrace.doctor.readers.vllm_flags import VLLM_VERSION
from headrace.doctor.rules.steps import A7_CORRECTION
from headrace.errors import nearest
from headrace.other_settings import OtherSetting, find_other

POSITIVE = (
    *("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size"),
    *("tensor_parallel_size", "pipeline_parallel_size", "num_gpu_blocks_override"),
)
SIZED = ("kv_cache_memory_bytes", "num_gpu_blocks_override")  # settings that replace the memory share
REPEATABLE = frozenset({"--api-key", "--admin-key", "--hf-token", "--middleware", "--lora-modules"})
LARGE_BUDGET = 2.0  # times the longest prompt: what A7 asks for


def unknown_flags(evidence: Evidence) -> Finding | None:
    command = evidence.command
    if command is None:
        return None
    found = [(flag, _explained(flag, command)) for flag in command.all_flags if not _is_known(flag, command)]
    if not found:
        return None
    is_refused = any(not why.startswith("ignored") for _, why in found)
    program = f"vLLM {VLLM_VERSION}" if command.program == "vllm" else "Headrace"
    return Finding(
        severity="mistake" if is_refused else "note",
        title=f"flags that {program} does not have",
        numbers=tuple((flag.written, why) for flag, why in found),
        why="The program refuses to start with a flag that it does not know. Guides name flags of older versions and "
        "of other engines."
        if is_refused
        else "They change nothing.",
        advice=tuple(
            Advice(text=f"leave out {flag.written}{_suggestion(flag, command)}", certainty="certain")
            for flag, _ in found
        ),
    )


def _is_known(flag: Flag, command: CommandLine) -> bool:
    if not command.known_flags:
        return True
    name = flag.plain_name
    names = (flag.written.replace("_", "-").partition(".")[0], name, "--no-" + name.removeprefix("--"))
    if any(name in command.known_flags for name in names):
        return True
    found = _other(flag)
    return command.program == "headrace" and found is not None and found.is_neutral


def _explained(flag: Flag, command: CommandLine) -> str:
    found = _other(flag)
    if found is None:
        return "not known"
    if command.program == "headrace":
        return f"{found.other.outcome}: {found.other.answer}"
    return "of an older version, or of another engine"


def _other(flag: Flag) -> OtherSetting | None:
    return find_other(flag.name, flag.value) or find_other(flag.written, flag.value)


def _suggestion(flag: Flag, command: CommandLine) -> str:
    return nearest(flag.name, [name for name in command.known_flags if name.startswith("--")])


def impossible_values(evidence: Evidence) -> Finding | None:
    numbers = [
        *_not_positive(evidence),
        *_out_of_range(evidence),
        *_not_a_share(evidence),
        *_too_small_a_budget(evidence),
    ]
    if not numbers:
        return None
    advice = []
    if any(name == "max_num_batched_tokens" for name, _ in numbers):
        advice.append(
            Advice(
                text="leave out --max-num-batched-tokens: 0 does not mean 'no limit', and the default suits the GPU",
                certainty="certain",
                setting="max_num_batched_tokens",
            )
        )
    return Finding(
        severity="mistake",
        title="values that the engine refuses",
        numbers=tuple(numbers),
        why="The server does not start with them.",
        advice=tuple(advice) or (Advice(text="correct them, or leave them out", certainty="certain"),),
    )


def _not_positive(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for name in POSITIVE:
        value = evidence.settings.get(name)
        if name not in evidence.given or (name == "max_model_len" and value in (-1, "auto")):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield name, f"{value} (must be a whole number of at least 1)"


def _out_of_range(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """What `EngineConfig` refuses; vLLM has other limits."""
    if evidence.engine != "headrace":
        return
    size, slots = (evidence.number(name) if name in evidence.given else None for name in ("block_size", "max_num_seqs"))
    if size is not None and size >= 1 and size not in BLOCK_SIZES:
        yield "block_size", f"{size:g} (must be one of {', '.join(map(str, BLOCK_SIZES))})"
    if slots is not None and slots > MAX_NUM_SEQS:
        yield "max_num_seqs", f"{slots:,.0f} (at most {MAX_NUM_SEQS:,})"


def _not_a_share(evidence: Evidence) -> Iterator[tuple[str, str]]:
    name = "gpu_memory_utilization"
    value = evidence.settings.get(name)
    if name in evidence.given and not (isinstance(value, (int, float)) and 0 < value <= 1):
        yield name, f"{value} (a share above 0 and at most 1, not percent)"


def _too_small_a_budget(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """vLLM refuses a budget below the slots, and without chunked prefill one below the context."""
    budget, slots = evidence.number("max_num_batched_tokens"), evidence.number("max_num_seqs")
    if evidence.engine != "vllm" or budget is None or budget < 1 or "max_num_batched_tokens" not in evidence.given:
        return
    if slots is not None and budget < slots:
        yield "max_num_batched_tokens", f"{budget:,.0f} is less than max_num_seqs {slots:,.0f}"
    longest = evidence.number("max_model_len")
    if evidence.settings.get("enable_chunked_prefill") is False and longest is not None and budget < longest:
        yield (
            "max_num_batched_tokens",
            f"{budget:,.0f} is less than max_model_len {longest:,.0f}, without chunked prefill",
        )


def contradictions(evidence: Evidence) -> Finding | None:
    command = evidence.command
    if command is None:
        return None
    numbers = []
    for name in dict.fromkeys(flag.name for flag in command.flags if flag.name not in REPEATABLE):
        values = command.values(name)
        if any(a != b for a, b in pairwise(values)):
            written = ", ".join(str(value) for value in values)
            numbers.append((name.lstrip("-").replace("-", "_"), f"given as {written}; the last one counts"))
    sized = [name for name in SIZED if name in evidence.given]
    if sized and "gpu_memory_utilization" in evidence.given:
        share = evidence.settings["gpu_memory_utilization"]
        numbers.append(("gpu_memory_utilization", f"{share}, and {sized[0]} sets the size of the cache instead"))
    if not numbers:
        return None
    return Finding(
        severity="mistake",
        title="settings that contradict each other",
        numbers=tuple(numbers),
        why="Only one of them is used, and a reader of the command cannot see which.",
        advice=(Advice(text="keep one value of each", certainty="certain"),),
    )


def chunked_as_prefix(evidence: Evidence) -> Finding | None:
    """Chunked prefill offered as prefix caching."""
    command = evidence.command
    if command is None or evidence.settings.get("enable_chunked_prefill") is not True:
        return None
    if "enable_chunked_prefill" not in evidence.given:
        return None
    meant = [text for text in command.comments if re.search(r"prefix(es)?[ -]*cach|cache[^.]*prefix", text.lower())]
    is_off = evidence.settings.get("enable_prefix_caching") is False
    if (not meant or "enable_prefix_caching" in evidence.given) and not is_off:
        return None
    says = ("the command says", f"'{meant[0]}'") if meant else ("enable_prefix_caching", "off")
    default = "" if is_off else " It is on by default, so the command has the effect by luck."
    return Finding(
        severity="mistake" if meant else "note",
        title="chunked prefill is not prefix caching",
        numbers=(says, ("enable_chunked_prefill", "on")),
        why="Chunked prefill splits long prompts into chunks. Prefix caching reuses the cache of prompts that start "
        f"with the same tokens; its flag is --enable-prefix-caching.{default}",
        advice=(
            Advice(
                text="use --enable-prefix-caching to share prefixes",
                certainty="certain",
                setting="enable_prefix_caching",
                value=True,
            ),
        ),
    )


def large_budget(evidence: Evidence) -> Finding | None:
    """A token budget as A7 asks for it."""
    budget = evidence.number("max_num_batched_tokens")
    longest = evidence.number("max_model_len") or (evidence.model.max_model_len if evidence.model else None)
    if evidence.command is not None and evidence.command.action == "run":
        return None  # nobody waits for a token of a batch job
    if budget is None or longest is None or "max_num_batched_tokens" not in evidence.given:
        return None
    if longest < 1 or budget < LARGE_BUDGET * longest:
        return None
    numbers = [("max_num_batched_tokens", f"{budget:,.0f}"), ("longest prompt", f"{longest:,.0f}")]
    seconds = step_of_prompts(evidence, budget)
    if seconds is not None:
        numbers.append(("a step full of prompts", f"at least {1e3 * seconds:,.0f} ms, the gap in running answers"))
    return Finding(
        severity="note",
        title="a token budget of twice the longest prompt makes gaps between tokens longer",
        numbers=tuple(numbers),
        why="A large budget suits batch work, where only throughput counts. For streams, steps should be short.",
        advice=(
            Advice(
                text="keep it for batch work; leave it out for a server that streams",
                certainty="certain",
                setting="max_num_batched_tokens",
            ),
        ),
        correction=A7_CORRECTION,
    )


RULES = (
    Rule(
        id="unknown-flag",
        title="a flag that does not exist",
        guide="A11",
        threshold=f"not a flag of headrace serve or run, or of vLLM {VLLM_VERSION}",
        check=unknown_flags,
        needs=("command",),
        sources=("command",),
    ),
    Rule(
        id="impossible-value",
        title="a value that the engine refuses, such as a token budget of 0",
        guide="A1",
        threshold="counts of at least 1; a share between 0 and 1; a budget of at least max_num_seqs; Headrace: a block "
        f"size that is a power of two up to {BLOCK_SIZES[-1]}, max_num_seqs of at most {MAX_NUM_SEQS:,}",
        check=impossible_values,
        needs=("command",),
        sources=("command",),
    ),
    Rule(
        id="contradiction",
        title="contradictory settings, such as two memory shares",
        guide="A3",
        threshold="two values of one setting, or a memory share beside the size of the cache",
        check=contradictions,
        needs=("command",),
        sources=("command",),
    ),
    Rule(
        id="chunked-as-prefix",
        title="chunked prefill offered as prefix caching",
        guide="A2, A4",
        threshold="a comment that promises prefix caching, and only chunked prefill",
        check=chunked_as_prefix,
        needs=("command",),
        sources=("command",),
    ),
    Rule(
        id="large-budget",
        title="a token budget against stalls",
        guide="A7",
        threshold=f"max_num_batched_tokens of {LARGE_BUDGET:.0f} times the longest prompt",
        check=large_budget,
        needs=("command",),
        sources=("command",),
    ),
)
