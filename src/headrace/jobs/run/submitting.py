"""Chooses lines and submits them to the workers: first those that wait to run again, then those of the planner. The
worker with the most room goes first. Suspects run alone on their worker; poison lines become error lines."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from headrace.engine.answers import Answers
from headrace.errors import EngineDeadError, RequestError
from headrace.jobs.input.line_output import ends_with_one_event
from headrace.jobs.input.part_requests import requests_of
from headrace.jobs.input.prepare import Work
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.in_flight import InFlight
from headrace.jobs.run.outcomes import Outcomes
from headrace.jobs.run.parts_in_flight import PartsInFlight, part_of
from headrace.jobs.workers.worker import Worker
from headrace.types import Request

Chosen = tuple[Worker, Work]


class Submitter:
    """Owned by the job's main loop."""

    def __init__(self, context: RunContext, outcomes: Outcomes) -> None:
        self._workers = context.workers
        self._planner = context.planner
        self._retries = context.retries
        self._in_flight = context.in_flight
        self._recovery = context.recovery
        self._outcomes = outcomes
        self._num_with_parts = 0  # submissions of lines with parts

    def submit_ready(self) -> bool:
        """Submit as many lines as may be in flight. Returns whether there were any, poison lines included."""
        chosen = self._choose()
        has_chosen = bool(chosen)
        if self._recovery.has_poison:
            chosen = self._without_poison(chosen)
        if chosen:
            self._in_flight.record([line for _, line in chosen])
            self._submit_all(chosen)
        return has_chosen

    def _without_poison(self, chosen: list[Chosen]) -> list[Chosen]:
        good = []
        for worker, line in chosen:
            error = self._recovery.refuse(line)
            if error is None:
                good.append((worker, line))
            else:
                self._outcomes.fail_all(line, error)
        return good

    def _choose(self) -> list[Chosen]:
        running = self._workers.running
        num_in_flight = {worker.number: self._in_flight.num_sequences(worker.number) for worker in running}
        chosen: list[Chosen] = []
        free = running
        if self._recovery.is_searching:
            free = [worker for worker in running if not self._choose_suspects(worker, chosen, num_in_flight)]
        if self._choose_retries(free, chosen, num_in_flight):
            self._choose_planned(running, free, chosen, num_in_flight)
        return chosen

    def _choose_suspects(self, worker: Worker, chosen: list[Chosen], num_in_flight: dict[int, int]) -> bool:
        """Lines of the worker's trial. False: it has none, and may run any line."""
        trial = self._trial_of(worker.number)
        if trial is None:
            return False
        if all(index in trial for index in self._in_flight.indices(worker.number)):
            for line in self._retries.due(trial):
                if not _has_room(worker, line, num_in_flight):
                    break
                chosen.append((worker, self._retries.remove(line.reply.index)))
                num_in_flight[worker.number] += line.num_sequences
        return True

    def _choose_retries(self, free: list[Worker], chosen: list[Chosen], num_in_flight: dict[int, int]) -> bool:
        """Lines that run again on any worker. False: there is no room for all of them."""
        due = self._retries.due() if self._retries and free else ()
        reserved = self._recovery.reserved() if due and self._recovery.is_searching else {}
        for line in due:
            if line.reply.index in reserved:
                continue
            worker = min(free, key=lambda each: num_in_flight[each.number] / each.max_sequences)
            if not _has_room(worker, line, num_in_flight):
                return False
            chosen.append((worker, self._retries.remove(line.reply.index)))
            num_in_flight[worker.number] += line.num_sequences
        return True

    def _choose_planned(
        self, running: list[Worker], free: list[Worker], chosen: list[Chosen], num_in_flight: dict[int, int]
    ) -> None:
        planner = self._planner
        num_in_all = sum(num_in_flight.values())
        max_in_all = sum([worker.max_sequences for worker in running])
        # The least busy worker is first: how much of its room is taken, and its number.
        by_load = [(num_in_flight[worker.number] / worker.max_sequences, worker.number) for worker in free]
        heapify(by_load)
        while by_load:
            _, number = heappop(by_load)
            worker, num_own = self._workers[number], num_in_flight[number]
            max_own = worker.max_sequences
            enough = by_load[0][0] if by_load else inf  # until another worker is the least busy one
            # Loads are compared as they are in the heap: a product of rounded numbers may be below both of two equal
            # loads, and then no worker would be the least busy one.
            while num_own / max_own <= enough:
                next_line = planner.peek(number)
                if next_line is None:
                    return
                num_more = next_line.num_sequences
                if num_own:  # one with nothing in flight takes any line
                    if num_own + num_more > max_own:
                        break
                    if not planner.may_start(num_more, num_in_flight=num_in_all, max_in_flight=max_in_all):
                        return
                chosen.append((worker, planner.take(number)))
                num_own += num_more
                num_in_all += num_more
            else:
                num_in_flight[number] = num_own
                heappush(by_load, (num_own / max_own, number))

    def _trial_of(self, worker: int) -> frozenset[int] | None:
        """The lines that the worker runs alone. Some of an earlier run may be missing from the input: those are
        forgotten, and perhaps whole trials with them."""
        suspects = self._recovery.suspects_of(worker)
        while (trial := suspects.trial) is not None and (missing := self._missing(trial)):
            self._recovery.forget_suspects(worker, missing)
        return trial

    def _missing(self, trial: frozenset[int]) -> list[int]:
        """Suspects of an earlier run may also come late in the input. The search waits for them only while the planner
        has room to read further."""
        if not self._planner.has_ended and self._planner.has_room:
            return []
        return [index for index in trial if index not in self._retries and index not in self._in_flight]

    def _submit_all(self, chosen: list[Chosen]) -> None:
        """Lines for a worker that turns out to be dead wait to run again."""
        dead: set[int] = set()
        for worker, line in chosen:
            if dead and worker.number in dead:
                self._retries.put(line)
                continue
            try:
                self._submit(worker, line)
            except EngineDeadError:
                dead.add(worker.number)
                self._retries.put(line)

    def _submit(self, worker: Worker, line: Work) -> None:
        if line.parts is not None:
            self._submit_parts(worker, line)
            return
        params, engine = line.params, worker.engine
        request = Request(
            str(line.reply.index),
            line.token_ids,
            params,
            cache_salt=line.cache_salt,
            watched=bool(params.stop),
            seed=line.seed,
            adapter=line.adapter,
        )
        try:
            worker.submit(request)
        except RequestError as error:
            self._in_flight.refused(line)
            self._outcomes.fail_all(line, error)
            return
        answers = None
        if not ends_with_one_event(params):
            answers = Answers(request, None, engine.tokenizer, engine.eos_token_ids)
        self._in_flight.add(InFlight(line, request, answers, params.num_sequences, worker=worker.number))

    def _submit_parts(self, worker: Worker, line: Work) -> None:
        """All prompts of a line. They are in flight once all are submitted: no event is taken before that."""
        assert line.parts is not None
        engine = worker.engine
        try:
            requests = requests_of(line, engine.spec, self._num_with_parts)
        except RequestError as error:
            self._in_flight.refused(line)
            self._outcomes.fail_all(line, error)
            return
        self._num_with_parts += 1
        for number, request in enumerate(requests):
            try:
                worker.submit(request)
            except RequestError as error:
                for submitted in requests[:number]:
                    worker.abort(submitted.request_id)
                self._in_flight.refused(line)
                self._outcomes.fail_all(line, error)
                return
        parts = PartsInFlight([part_of(request, engine, line.parts) for request in requests])
        num_sequences = line.num_sequences // len(requests)
        self._in_flight.add_parts(
            [InFlight(line, p.request, p, num_sequences, parts, worker.number) for p in parts.parts]
        )


def _has_room(worker: Worker, line: Work, num_in_flight: dict[int, int]) -> bool:
    """A worker with nothing in flight takes any line."""
    num_own = num_in_flight[worker.number]
    return not num_own or num_own + line.num_sequences <= worker.max_sequences
