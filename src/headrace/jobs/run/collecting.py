"""From the engine's events to answers, retries and error lines."""

from __future__ import annotations

from headrace.engine.answers import Answers
from headrace.errors import RequestError
from headrace.jobs.input.line_output import output_at_end, output_of
from headrace.jobs.input.prepare import Work
from headrace.jobs.input.reply import ENGINE_ERROR
from headrace.jobs.recovery.policy import Recovery
from headrace.jobs.recovery.retries import Waiting
from headrace.jobs.run.current_engine import CurrentEngine
from headrace.jobs.run.ending import Ending
from headrace.jobs.run.in_flight import InFlight, LinesInFlight
from headrace.jobs.run.outcomes import Outcomes
from headrace.types import SequenceEvent


class Collector:
    """Owned by the job's run, as is all that it is made of."""

    def __init__(
        self,
        current: CurrentEngine,
        *,
        in_flight: LinesInFlight,
        outcomes: Outcomes,
        recovery: Recovery,
        again: Waiting,
        ending: Ending,
    ) -> None:
        self._current = current
        self._in_flight = in_flight
        self._outcomes = outcomes
        self._recovery = recovery
        self._again = again
        self._ending = ending

    def take(self, events: list[SequenceEvent]) -> None:
        in_flight, outcomes, engine = self._in_flight, self._outcomes, self._current.engine
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
                self._current.abort(event.request_id, progress.stopped_index)
            if progress.is_finished:
                self._finish(entry, answers)

    def _finish(self, entry: InFlight, answers: Answers) -> None:
        self._in_flight.remove(entry)
        if answers.error is None:
            self._outcomes.answer_all(entry.line, output_of(answers.output()))
            return
        self._current.abort(entry.request.request_id)  # its other sequences, if any still run
        self._fail_or_retry(entry.line, answers.error)

    def _fail_or_retry(self, line: Work, error: str) -> None:
        """A form that the answer cannot have is the request's fault; what else the engine says may be different the
        next time, and rows of a job that is being stopped have a next time anyway."""
        if line.params.structured_outputs is None:
            index = line.reply.index
            delay_s = 0.0 if self._ending.has_begun else self._recovery.may_retry(index, ENGINE_ERROR)
            if delay_s is not None:
                self._again.put(line, delay_s=delay_s)
                return
            error = f"{error} (tried {self._recovery.rules.max_attempts} times)"
        self._outcomes.fail_all(line, RequestError(error, code=ENGINE_ERROR))
