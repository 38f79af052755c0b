"""What of a line's preparation needs the job's own process: the ids of all lines before, and the engine's grammars."""

from __future__ import annotations

import msgspec

from headrace.engine.prompts import PromptReader
from headrace.errors import ConfigError, RequestError
from headrace.jobs.input.id_filter import SeenIds
from headrace.jobs.input.lines import BadLine
from headrace.jobs.input.openai_lines import DUPLICATE_ID, OpenAIReply
from headrace.jobs.input.prepare import Items, Work


class LastChecks:
    """Used by one thread. Remembers the ids it has seen, and nothing else of a line."""

    def __init__(self, prompts: PromptReader, *, seen: SeenIds | None = None) -> None:
        """`seen` are the ids of lines that were done before."""
        self._prompts = prompts
        self._seen = SeenIds() if seen is None else seen

    def take(self, items: Items) -> Items:
        """The same items, in place; lines that must be refused have become errors."""
        self._refuse_duplicates(items)
        for place, item in enumerate(items):
            if type(item) is Work and (item.params.structured_outputs is not None or item.params.bad_words):
                items[place] = self._with_tokens(item)
        return items

    def _refuse_duplicates(self, items: Items) -> None:
        places, ids, numbers = [], [], []
        for place, item in enumerate(items):
            reply = item.reply
            if type(reply) is OpenAIReply and reply.custom_id:
                places.append(place)
                ids.append(reply.custom_id)
                numbers.append(reply.index + 1)
        if not ids:
            return
        for found, first in enumerate(self._seen.add(ids, numbers)):
            if first is not None:
                items[places[found]] = _duplicate(numbers[found] - 1, ids[found], first)

    def _with_tokens(self, work: Work) -> Work | BadLine:
        try:
            params = self._prompts.with_tokens(work.params)
        except RequestError as error:
            return BadLine(work.reply, error)
        except ConfigError as error:
            return BadLine(work.reply, RequestError(str(error), param="prompt", code="no_tokenizer"))
        return work if params is work.params else msgspec.structs.replace(work, params=params)


def _duplicate(index: int, custom_id: str, first: int) -> BadLine:
    error = RequestError(
        f"custom_id {custom_id!r} is already that of line {first}; ids must be unique in a file",
        param="custom_id",
        code=DUPLICATE_ID,
    )
    return BadLine(OpenAIReply(index, custom_id, None), error)
