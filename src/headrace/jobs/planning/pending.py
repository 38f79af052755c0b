"""A line that waits to run, and how long its answer is expected to be."""

from __future__ import annotations

from headrace.jobs.input.prepare import TOKEN_BYTES, Work
from headrace.jobs.planning.answer_lengths import AnswerLengths
from headrace.jobs.planning.prefix_tree import Leaf
from headrace.sched import SchedulerLimits

Kind = tuple[int, int | None]  # prefix group and `max_tokens`: such answers are expected to be equally long


class Pending(Leaf, eq=False, gc=False, kw_only=True):
    """Owned by the planner."""

    line: Work
    limit: int  # most tokens of an answer
    is_exact: bool  # the answer cannot end before its limit
    expected_len: float = 0.0  # tokens of one answer
    is_taken: bool = False

    @classmethod
    def of(cls, line: Work, limits: SchedulerLimits) -> Pending:
        params, parts = line.params, line.parts
        prompt_len = len(line.tokens) // TOKEN_BYTES if parts is None else min(parts.prompt_lens)
        room = max(1, limits.max_model_len - prompt_len)
        if parts is not None and parts.is_pooled:
            return cls(tokens=line.tokens, salt=_salt(line), line=line, limit=0, is_exact=True)
        return cls(
            tokens=line.tokens,
            salt=_salt(line),
            line=line,
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            is_exact=params.ignore_eos and not params.stop and not params.stop_token_ids,
        )


def _salt(line: Work) -> str | None:
    """Lines share a prefix only under the same salt, and with the same adapter."""
    return line.cache_salt if line.adapter is None else f"{line.adapter}\0{line.cache_salt or ''}"


def kind_of(item: Pending) -> Kind:
    return item.prefix_group, item.line.params.max_tokens


class ExpectedLengths:
    """Expected lengths of pending answers, computed once per kind and limit until `clear`."""

    def __init__(self, lengths: AnswerLengths) -> None:
        self._lengths = lengths
        self._expected: dict[tuple[int, int | None, int], float] = {}

    def clear(self) -> None:
        """Drop the estimates, as more answers are known now."""
        self._expected.clear()

    def decode_tokens(self, item: Leaf) -> float:
        """Expected tokens of all answers of the item. Sets its `expected_len`."""
        assert isinstance(item, Pending)
        params = item.line.params
        if item.is_exact:
            item.expected_len = float(item.limit)
        else:
            kind = (item.prefix_group, params.max_tokens, item.limit)
            expected = self._expected.get(kind)
            if expected is None:
                prefix_group, max_tokens, limit = kind
                expected = self._lengths.expected(prefix_group=prefix_group, max_tokens=max_tokens, limit=limit)
                self._expected[kind] = expected
            item.expected_len = expected
        return item.expected_len * item.line.num_sequences

    def unstarted_kinds(self) -> set[Kind]:
        """Kinds of prefix groups of which no line has started."""
        return {
            (prefix_group, max_tokens)
            for prefix_group, max_tokens, _ in self._expected
            if prefix_group and not self._lengths.has_started(prefix_group=prefix_group, max_tokens=max_tokens)
        }
