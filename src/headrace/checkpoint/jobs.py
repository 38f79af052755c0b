"""What a batch job is, for its checkpoint: the digest of its input, and the arguments that run it again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.workloads.spec import HASH_LEN

if TYPE_CHECKING:
    from headrace.jobs.spec import JobSpec

INPUT = "{input}"  # the place of the input in the arguments
CHUNK_BYTES = 1 << 20
# Options of the first run that a second one must not have, and whether they take a value.
DROPPED = {
    "-o": True,
    "--output": True,
    "--checkpoint": True,
    "--json-summary": True,
    "--metrics-port": True,
    "--deadline": True,
    "--gpu-price": True,
    "--quiet": False,
    "--auto": False,
    "--checkpoints": True,
    "--overwrite": False,
}


def workload_of_job(job: JobSpec, *, num_requests: int) -> dict[str, Any]:
    """The hash is of what decides the requests: input, template, sampling defaults and limit."""
    digest = digest_of_input(Path(job.input))
    template = None if job.template is None else asdict(job.template)
    parts = json.dumps([digest, job.limit, dict(job.defaults), template], sort_keys=True, default=str)
    return {
        "name": "job",
        "input": job.input,
        "data_digest": digest,
        "num_requests": num_requests,
        "limit": job.limit,
        "sampling": dict(job.defaults),
        "hash": sha256(parts.encode()).hexdigest()[:HASH_LEN],
    }


def digest_of_input(path: Path) -> str | None:
    """Of a local file's bytes; None if it is none."""
    if not path.is_file():
        return None
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:HASH_LEN]


def arguments_to_run_again(arguments: Sequence[str], source: str) -> list[str]:
    """The arguments of `headrace run` without the places of its outputs, with INPUT for its input."""
    kept: list[str] = []
    words = iter(arguments)
    has_input = False
    for word in words:
        flag, has_value, _ = word.partition("=")
        if word.startswith("-o") and not word.startswith("--") and word != "-o":
            continue  # -oFILE
        if flag in DROPPED:
            if DROPPED[flag] and not has_value:
                next(words, None)
            continue
        is_input = word == source and not has_input and (not kept or not _takes_value(kept[-1]))
        kept.append(INPUT if is_input else word)
        has_input = has_input or is_input
    return kept


def _takes_value(word: str) -> bool:
    """Whether the next word may be the value of this one. Only a prompt equal to the input's name could matter."""
    return word in ("--prompt", "--system", "--model", "--messages-column")
