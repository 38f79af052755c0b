"""What goes to the engine: lines that wait to be done again, then as the planner says; suspects with nothing beside
them, and poison not at all."""

from __future__ import annotations

from headrace.engine.answers import Answers
from headrace.errors import EngineDeadError, RequestError
from headrace.jobs.input.line_output import ends_with_one_event
from headrace.jobs.input.prepare import Work
from headrace.jobs.planning.planner import Planner
from headrace.jobs.recovery.policy import Recovery
from headrace.jobs.recovery.retries import Waiting
from headrace.jobs.run.current_engine import CurrentEngine
from headrace.jobs.run.in_flight import InFlight, LinesInFlight
from headrace.jobs.run.outcomes import Outcomes
from headrace.types import Request


class Submitter:
    """Owned by the job's run, as is all that it is made of."""

    def __init__(
        self,
        current: CurrentEngine,
        planner: Planner,
        *,
        again: Waiting,
        in_flight: LinesInFlight,
        outcomes: Outcomes,
        recovery: Recovery,
    ) -> None:
        self._current = current
        self._planner = planner
        self._again = again
        self._in_flight = in_flight
        self._outcomes = outcomes
        self._recovery = recovery

    def submit_ready(self) -> None:
        """As much as there is room for."""
        lines = self._choose()
        if self._recovery.has_poison:
            lines = self._without_poison(lines)
        if lines:
            self._in_flight.announce(lines)
            self._start_all(lines)

    def _without_poison(self, lines: list[Work]) -> list[Work]:
        """The others become error lines."""
        good = []
        for line in lines:
            error = self._recovery.refuse(line)
            if error is None:
                good.append(line)
            else:
                self._outcomes.fail_all(line, error)
        return good

    def _choose(self) -> list[Work]:
        trial = self._recovery.suspects.trial
        if trial is not None:
            self._forget_missing(trial)
            trial = self._recovery.suspects.trial
        chosen: list[Work] = []
        num_sequences, max_sequences = self._in_flight.num_sequences, self._current.max_sequences
        for line in self._again.due(trial) if self._again else ():
            if num_sequences and num_sequences + line.params.num_sequences > max_sequences:
                return chosen
            chosen.append(self._again.remove(line.reply.index))
            num_sequences += line.params.num_sequences
        planner = self._planner
        while trial is None and (next_line := planner.peek()) is not None:
            num_more = next_line.params.num_sequences
            if not planner.may_start(num_more, num_in_flight=num_sequences, max_in_flight=max_sequences):
                break
            chosen.append(planner.take())
            num_sequences += num_more
        return chosen

    def _forget_missing(self, trial: frozenset[int]) -> None:
        """Suspects of an earlier run that the input does not have any more, or only far behind, are waited for no
        longer than there is room to read."""
        if not self._planner.has_ended and self._planner.has_room:
            return
        missing = [row for row in trial if row not in self._again and row not in self._in_flight]
        if missing:
            self._recovery.suspects.forget(missing)

    def _start_all(self, lines: list[Work]) -> None:
        for place, line in enumerate(lines):
            try:
                self._start(line)
            except EngineDeadError:
                for rest in lines[place:]:
                    self._again.put(rest)
                raise

    def _start(self, line: Work) -> None:
        params, engine = line.params, self._current.engine
        request = Request(
            str(line.reply.index),
            line.token_ids,
            params,
            cache_salt=line.cache_salt,
            watched=bool(params.stop),
            seed=line.seed,
        )
        try:
            engine.client.submit(request)
        except RequestError as error:
            self._in_flight.refused(line)
            self._outcomes.fail_all(line, error)
            return
        answers = None
        if not ends_with_one_event(params):
            answers = Answers(request, None, engine.tokenizer, engine.eos_token_ids)
        self._in_flight.add(InFlight(line, request, answers, params.num_sequences))
