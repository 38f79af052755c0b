"""Checks of a line that need the whole job: the ids of all earlier lines, and the engine's grammars."""

from __future__ import annotations

import msgspec

from headrace.engine.prompts import PromptReader
from headrace.errors import ConfigError, RequestError
from headrace.jobs.input.id_filter import IdFilter
from headrace.jobs.input.lines import BadLine
from headrace.jobs.input.openai_lines import DUPLICATE_ID, OpenAIReply
from headrace.jobs.input.prepare import Items, Work


class JobChecks:
    """Used by one thread. Keeps the ids of lines and nothing else."""

    def __init__(self, prompts: PromptReader, *, seen_ids: IdFilter | None = None) -> None:
        """`seen_ids` holds the ids of lines that earlier runs have done."""
        self._prompts = prompts
        self._seen_ids = IdFilter() if seen_ids is None else seen_ids

    def check(self, items: Items) -> Items:
        """Returns the list itself, changed in place: refused lines become errors."""
        self._refuse_repeated_ids(items)
        for place, item in enumerate(items):
            if type(item) is Work and (item.params.structured_outputs is not None or item.params.bad_words):
                items[place] = self._with_tokens(item)
        return items

    def _refuse_repeated_ids(self, items: Items) -> None:
        places, ids, numbers = [], [], []
        for place, item in enumerate(items):
            reply = item.reply
            if type(reply) is OpenAIReply and reply.custom_id:
                places.append(place)
                ids.append(reply.custom_id)
                numbers.append(reply.index + 1)
        if not ids:
            return
        for found, first in enumerate(self._seen_ids.add(ids, numbers)):
            if first is not None:
                items[places[found]] = _repeated_id(numbers[found] - 1, ids[found], first)

    def _with_tokens(self, work: Work) -> Work | BadLine:
        try:
            params = self._prompts.with_tokens(work.params)
        except RequestError as error:
            return BadLine(work.reply, error)
        except ConfigError as error:
            return BadLine(work.reply, RequestError(str(error), param="prompt", code="no_tokenizer"))
        return work if params is work.params else msgspec.structs.replace(work, params=params)


def _repeated_id(index: int, custom_id: str, first: int) -> BadLine:
    error = RequestError(
        f"custom_id {custom_id!r} is already used by line {first}; ids must be unique in a file",
        param="custom_id",
        code=DUPLICATE_ID,
    )
    return BadLine(OpenAIReply(index, custom_id, None), error)
