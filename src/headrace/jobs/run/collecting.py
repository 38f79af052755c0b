"""Turns the events of the engines into answers, retries and error lines."""

from __future__ import annotations

from headrace.engine.answers import Answers
from headrace.engine.readouts import PendingPooling
from headrace.errors import RequestError
from headrace.jobs.input.line_output import output_at_end, output_of
from headrace.jobs.input.prepare import Work
from headrace.jobs.input.reply import ENGINE_ERROR
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.in_flight import InFlight
from headrace.jobs.run.outcomes import Outcomes
from headrace.jobs.run.parts_in_flight import PartsInFlight
from headrace.types import SequenceEvent


class Collector:
    """Owned by the job's main loop."""

    def __init__(self, context: RunContext, outcomes: Outcomes) -> None:
        self._workers = context.workers
        self._in_flight = context.in_flight
        self._recovery = context.recovery
        self._retries = context.retries
        self._stop = context.stop
        self._outcomes = outcomes

    def take(self, events: list[SequenceEvent]) -> None:
        in_flight, outcomes, engine = self._in_flight, self._outcomes, self._workers.engine
        for event in events:
            entry = in_flight.get(event.request_id)
            if entry is None:
                continue
            answers = entry.answers
            if answers is None:
                if event.finish_reason is not None and event.error is None:
                    in_flight.remove(entry)
                    outcomes.answer_all(entry.line, output_at_end(entry.request, event, engine.tokenizer))
                    continue
                answers = entry.answers = Answers(entry.request, None, engine.tokenizer, engine.eos_token_ids)
            progress = answers.take(event)
            if progress.stopped_index is not None:
                self._workers[entry.worker].abort(event.request_id, progress.stopped_index)
            if progress.is_finished:
                self._finish(entry, answers)

    def _finish(self, entry: InFlight, answers: Answers | PendingPooling) -> None:
        if entry.parts is not None:
            self._finish_part(entry, entry.parts, answers.error)
            return
        self._in_flight.remove(entry)
        if answers.error is None:
            assert isinstance(answers, Answers)
            self._outcomes.answer_all(entry.line, output_of(answers.output()))
            return
        self._workers[entry.worker].abort(entry.request.request_id)  # other sequences of the request may still run
        self._fail_or_retry(entry.line, answers.error)

    def _finish_part(self, entry: InFlight, parts: PartsInFlight, error: str | None) -> None:
        """The line is done when all its parts are, or as soon as one of them has failed."""
        self._in_flight.end_part(entry)
        if error is not None:
            for part in parts.parts:
                self._workers[entry.worker].abort(part.request.request_id)
                if (other := self._in_flight.get(part.request.request_id)) is not None:
                    self._in_flight.end_part(other)
            self._in_flight.remove_with_parts(entry.line)
            self._fail_or_retry(entry.line, error)
        elif parts.end_one():
            self._in_flight.remove_with_parts(entry.line)
            self._outcomes.answer_all(entry.line, parts.output())

    def _fail_or_retry(self, line: Work, error: str) -> None:
        """A structured output that the engine refuses is the request's fault: no retry. Other errors may not happen
        again. While the job is stopping, the line waits without a decision: the next run computes it."""
        if line.params.structured_outputs is None:
            index = line.reply.index
            delay_s = 0.0 if self._stop.is_stopping else self._recovery.decide_retry(index, ENGINE_ERROR)
            if delay_s is not None:
                self._retries.put(line, delay_s=delay_s)
                return
            error = f"{error} (tried {self._recovery.rules.max_attempts} times)"
        self._outcomes.fail_all(line, RequestError(error, code=ENGINE_ERROR))
