"""The engine's requests of a line with several prompts, or with prompts to embed or score."""

from __future__ import annotations

from typing import Any

from headrace.engine.prompts import TokenizedPrompt
from headrace.engine.readouts import pooling_request
from headrace.jobs.input.prepare import Work
from headrace.models.spec import ModelSpec
from headrace.sched.sequence import sequence_seed
from headrace.types import Request


def requests_of(line: Work, spec: ModelSpec, attempt: int = 0) -> list[Request]:
    """A request for each prompt of the line; refuses what the model cannot do. `attempt` differs each time: events of
    requests that were aborted may still arrive when the line runs again."""
    params, parts = line.params, line.parts
    options: dict[str, Any] = {"cache_salt": line.cache_salt, "adapter": line.adapter}
    requests = []
    for number, token_ids in enumerate(line.part_ids()):
        request_id = f"{line.reply.index}.{attempt}.{number}"
        if parts is not None and parts.task is not None:
            prompt = TokenizedPrompt(None, token_ids, parts.second_starts[number] if parts.second_starts else None)
            pending = pooling_request(request_id, prompt, spec, task=parts.task, **options)
            requests.append(pending.request)
            continue
        # Numbers that no sequence of another prompt has: equal prompts must not have equal answers.
        seed = None if line.seed is None else sequence_seed(line.seed, number * params.num_sequences)
        requests.append(Request(request_id, token_ids, params, watched=bool(params.stop), seed=seed, **options))
    return requests
