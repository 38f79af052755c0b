"""Chooses lines and submits them to the engine: first those that wait to run again, then those of the planner. Suspects
run alone; poison lines become error lines."""

from __future__ import annotations

from headrace.engine.answers import Answers
from headrace.errors import EngineDeadError, RequestError
from headrace.jobs.input.line_output import ends_with_one_event
from headrace.jobs.input.part_requests import requests_of
from headrace.jobs.input.prepare import Work
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.in_flight import InFlight
from headrace.jobs.run.outcomes import Outcomes
from headrace.jobs.run.parts_in_flight import PartsInFlight, part_of
from headrace.types import Request


class Submitter:
    """Owned by the job's main loop."""

    def __init__(self, context: RunContext, outcomes: Outcomes) -> None:
        self._engine = context.engine
        self._planner = context.planner
        self._retries = context.retries
        self._in_flight = context.in_flight
        self._recovery = context.recovery
        self._outcomes = outcomes
        self._num_with_parts = 0  # submissions of lines with parts

    def submit_ready(self) -> None:
        """Submit as many lines as may be in flight."""
        lines = self._choose()
        if self._recovery.has_poison:
            lines = self._without_poison(lines)
        if lines:
            self._in_flight.record(lines)
            self._submit_all(lines)

    def _without_poison(self, lines: list[Work]) -> list[Work]:
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
        num_sequences, max_sequences = self._in_flight.num_sequences, self._engine.max_sequences
        for line in self._retries.due(trial) if self._retries else ():
            if num_sequences and num_sequences + line.num_sequences > max_sequences:
                return chosen
            chosen.append(self._retries.remove(line.reply.index))
            num_sequences += line.num_sequences
        planner = self._planner
        while trial is None and (next_line := planner.peek()) is not None:
            num_more = next_line.num_sequences
            if not planner.may_start(num_more, num_in_flight=num_sequences, max_in_flight=max_sequences):
                break
            chosen.append(planner.take())
            num_sequences += num_more
        return chosen

    def _forget_missing(self, trial: frozenset[int]) -> None:
        """Suspects of an earlier run may be missing from the input, or come late in it. The search waits for them only
        while the planner has room to read further."""
        if not self._planner.has_ended and self._planner.has_room:
            return
        missing = [index for index in trial if index not in self._retries and index not in self._in_flight]
        if missing:
            self._recovery.suspects.forget(missing)

    def _submit_all(self, lines: list[Work]) -> None:
        for place, line in enumerate(lines):
            try:
                self._submit(line)
            except EngineDeadError:
                for rest in lines[place:]:
                    self._retries.put(rest)
                raise

    def _submit(self, line: Work) -> None:
        if line.parts is not None:
            self._submit_parts(line)
            return
        params, engine = line.params, self._engine.engine
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

    def _submit_parts(self, line: Work) -> None:
        """All prompts of a line. They are in flight once all are submitted: no event is taken before that."""
        engine, requests = self._engine.engine, requests_of(line, self._num_with_parts)
        self._num_with_parts += 1
        for number, request in enumerate(requests):
            try:
                engine.client.submit(request)
            except RequestError as error:
                for submitted in requests[:number]:
                    self._engine.abort(submitted.request_id)
                self._in_flight.refused(line)
                self._outcomes.fail_all(line, error)
                return
        parts = PartsInFlight([part_of(request, engine) for request in requests])
        num_sequences = line.num_sequences // len(requests)
        self._in_flight.add_parts([InFlight(line, p.request, p, num_sequences, parts) for p in parts.parts])
