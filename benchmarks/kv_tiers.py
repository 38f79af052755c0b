"""A prefix workload that is larger than the KV cache: hits and speed without tiers, with them, and after a restart.

    python benchmarks/kv_tiers.py --save benchmarks/results/kv-tiers-cpu.json
    python benchmarks/kv_tiers.py --model llama-8b/ --load-format random --prefixes 400 --prefix-len 4096 \
        --cache-blocks 50000 --host-gib 220 --save ...        # a GPU; sizes for one of 141 GB and a host of 256 GiB

Each round sends one prompt for every prefix, in an order that is shuffled anew, so a cache that holds a part of them
misses most. The first round finds nothing, except after a restart. Answers are greedy and compared between the
variants: on a CPU they must be equal; on a GPU batches of other sizes round differently.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

from about import commit

from headrace import LLM, SamplingParams
from headrace.hardware.describe import machine_facts, package_versions

TAIL_LEN = 16  # tokens of a prompt after its prefix


class Round(NamedTuple):
    seconds: float
    hit_share: float  # of prompt tokens
    answers: dict[int, tuple[int, ...]]  # by prefix


def main() -> None:
    given = _parse()
    rows, expected = [], None
    with _directory(given.path) as path:
        for name, settings in _variants(given, path).items():
            row, answers = _measure(name, settings, given)
            expected = expected or answers
            row["equal_answers"] = sum(one == other for one, other in zip(answers, expected, strict=True))
            rows.append(row)
            print(_line(row), flush=True)
    if given.save:
        facts = {"commit": commit(), "machine": machine_facts(), "versions": package_versions()}
        record = {"benchmark": "kv_tiers", "command": sys.argv, **facts, "arguments": vars(given), "rows": rows}
        Path(given.save).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _variants(given: argparse.Namespace, path: Path) -> dict[str, dict[str, Any]]:
    disk = {"kv_offload_path": str(path), "kv_offload_disk_gib": given.disk_gib, "kv_offload_gib": given.disk_host_gib}
    return {
        "no tiers": {},
        "host": {"kv_offload_gib": given.host_gib},
        "host and disk": disk,
        "after a restart": disk,
    }


def _measure(
    name: str, tiers: dict[str, Any], given: argparse.Namespace
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    settings = {"num_gpu_blocks_override": given.cache_blocks, "max_model_len": given.prefix_len + 512}
    with LLM(given.model, load_format=given.load_format, **settings, **tiers) as llm:
        llm.generate([[7] * 40], SamplingParams(max_tokens=4), use_tqdm=False)  # compiles
        first, *later = [_run(llm, given, number) for number in range(given.rounds + 1)]
        stats = llm.stats.scheduler
    num_tokens = given.prefixes * (given.prefix_len + TAIL_LEN + given.output_len)
    row = {
        "variant": name,
        "first_round": {"tokens_per_s": round(num_tokens / first.seconds, 1), "hit_share": round(first.hit_share, 4)},
        "later_rounds": {
            "tokens_per_s": [round(num_tokens / each.seconds, 1) for each in later],
            "hit_share": round(mean(each.hit_share for each in later), 4),
        },
        "host_blocks": stats.num_host_blocks,
        "tiers": dataclasses.asdict(stats.tiers),
        "evicted_tokens": stats.num_evicted_tokens,
    }
    return row, [each.answers[prefix] for each in (first, *later) for prefix in range(given.prefixes)]


def _run(llm: LLM, given: argparse.Namespace, number: int) -> Round:
    """One prompt for every prefix. Batches are small, so that `generate` does not order all of them by prefix."""
    order = list(range(given.prefixes))
    random.Random(f"round {number}").shuffle(order)
    params = SamplingParams(temperature=0, max_tokens=given.output_len, ignore_eos=True)
    answers: dict[int, tuple[int, ...]] = {}
    before, started = llm.stats.scheduler, perf_counter()
    for first in range(0, len(order), given.batch):
        chosen = order[first : first + given.batch]
        outputs = llm.generate([_prompt(prefix, number, given) for prefix in chosen], params, use_tqdm=False)
        answers |= {prefix: tuple(each.outputs[0].token_ids) for prefix, each in zip(chosen, outputs, strict=True)}
    seconds, after = perf_counter() - started, llm.stats.scheduler
    hits = after.num_prefix_hit_tokens - before.num_prefix_hit_tokens
    return Round(seconds, hits / (after.num_prefix_queried_tokens - before.num_prefix_queried_tokens), answers)


def _prompt(prefix: int, number: int, given: argparse.Namespace) -> list[int]:
    head, tail = random.Random(f"prefix {prefix}"), random.Random(f"tail {prefix} {number}")
    lens = ((head, given.prefix_len), (tail, TAIL_LEN))
    return [dice.randrange(1000, 40_000) for dice, length in lens for _ in range(length)]


def _line(row: dict[str, Any]) -> str:
    first, later, tiers = row["first_round"], row["later_rounds"], row["tiers"]
    return (
        f"{row['variant']:<16} first round {first['tokens_per_s']:>9,.0f} tokens/s, hits {first['hit_share']:>6.1%}; "
        f"later {median(later['tokens_per_s']):>9,.0f} tokens/s, hits {later['hit_share']:>6.1%}; blocks stored "
        f"{tiers['num_stored']:,}, loaded {tiers['num_loaded']:,} ({tiers['num_disk_hits']:,} from disk), dropped "
        f"{tiers['num_dropped']:,}; {row['equal_answers']} answers equal those without tiers"
    )


@contextmanager
def _directory(given: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=given))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prefixes", type=int, default=24)
    parser.add_argument("--prefix-len", type=int, default=512, help="tokens")
    parser.add_argument("--output-len", type=int, default=16, help="tokens")
    parser.add_argument("--rounds", type=int, default=3, help="counted ones")
    parser.add_argument("--batch", type=int, default=4, help="prompts of one call of generate")
    parser.add_argument("--cache-blocks", type=int, default=300, help="of 16 tokens; all prefixes need more")
    parser.add_argument("--host-gib", type=float, default=1.0, help="the host tier alone: holds all prefixes")
    parser.add_argument("--disk-host-gib", type=float, default=0.2, help="the host tier above a disk: does not")
    parser.add_argument("--disk-gib", type=float, default=8.0)
    parser.add_argument("--path", help="where the disk tier's directory is made; default: the temporary directory")
    parser.add_argument("--save", help="write a record to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
