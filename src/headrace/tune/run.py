"""Runs a search: the default, the shortlist, the race, the confirmation. What was measured is on disk at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.engines import EngineFailure
from headrace.bench.engines.http import HttpError
from headrace.bench.sweep.configs import SweepConfig
from headrace.bench.sweep.journal import JournalError
from headrace.bench.sweep.result import RANKABLE, Failure
from headrace.bench.values import number, seconds, times
from headrace.hardware.describe import machine_facts
from headrace.tune.budget import FIRST_REQUESTS, RUNG_SHARES, Budget
from headrace.tune.confirm import (
    NUM_FINALISTS,
    ConfirmRound,
    Finding,
    judge,
    needs_more,
    noise_of,
)
from headrace.tune.effects import Effects, Observation
from headrace.tune.journal import Entry, TrialJournal, key_of
from headrace.tune.knobs import Knobs, find_knobs
from headrace.tune.pruning import Pruning
from headrace.tune.quality import Agreement, agreement_of, greedy_answers
from headrace.tune.race import NUM_MERGED, NUM_RUNGS, config_of, kept, merged, ranked
from headrace.tune.result import ConfigState, Decision, Rung, TuneResult, decide
from headrace.tune.shortlist import Candidate, Predicted, shortlist
from headrace.tune.spec import Tune, identity_of, record_facts, space_of
from headrace.tune.trial import Asked, EngineFacts, Phase, Trial, TrialRunner

NUM_ATTEMPTS = 2  # of the default
FAR_BEHIND = 3.0  # standard deviations of the noise: a second finalist that lies further behind is not confirmed

Say = Callable[[str], None]


class DefaultFailedError(Exception):
    """The default could not be measured: nothing can be compared with it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(
            f"the default failed {NUM_ATTEMPTS} times ({failure.stage}, {failure.kind}), and nothing can be compared "
            f"without it: {failure.message}"
        )


def run_tune(tune: Tune, journal_path: Path, say: Say = lambda line: None) -> TuneResult:
    """Search, going on where the journal ends. Ctrl-C and a full disk end it early, with what is known so far."""
    machine = machine_facts()
    journal = TrialJournal(journal_path, identity_of(tune, machine), retries_failed=tune.retries_failed)
    search = _Search(tune, journal, machine, say)
    stopped: str | None = None
    is_resumable = False
    try:
        stopped = search.run()
    except KeyboardInterrupt:
        stopped, is_resumable = "interrupted; the same command goes on", True
    except JournalError as error:
        stopped, is_resumable = f"{error}; free some space, and the same command goes on", True
    except DefaultFailedError as error:
        stopped = str(error)
    finally:
        search.close()
        journal.close()
    return search.result(stopped, is_resumable=is_resumable)


class _Search:
    """Owns the state of one search. Every decision follows from the trials, so that replaying them repeats it."""

    def __init__(self, tune: Tune, journal: TrialJournal, machine: Mapping[str, Any], say: Say) -> None:
        self.tune = tune
        self.journal = journal
        self.machine = machine
        self.say = say
        self.started_at = datetime.now(UTC)
        self.budget = Budget(tune.budget_s, tune.clock)
        self.runner = TrialRunner(tune.engine, tune.workload, tune.goal, clock=tune.clock, check=tune.check, say=say)
        self.default = ConfigState(Candidate(SweepConfig("default", {}), "default"))
        self.states: dict[str, ConfigState] = {self.default.candidate.config.hash: self.default}
        self.knobs = Knobs([], space_of(tune, machine, {}))
        self.pruning = Pruning(self.knobs)
        self.observations: list[Observation] = []
        self.rungs: list[Rung] = []
        self.rounds: list[ConfirmRound] = []
        self.finding: Finding | None = None
        self.quality: list[Agreement] = []
        self.warnings: list[str] = []
        self.level: int | None = None  # of load, at which the leader was best
        self.num_rounds = 0
        self.num_trials = self.num_planned = 0

    def close(self) -> None:
        self.runner.close()

    def run(self) -> str | None:
        """The whole search. Returns why it ended early, if it did."""
        if self.journal.num_trials:
            self.say(f"{self.journal.num_trials} trials are in {self.journal.path} and are not run again")
        first = self._calibrated()
        if not self.tune.can_change_settings:
            return None
        self._find_knobs()
        self._make_shortlist(first)
        if len(self.states) == 1:
            self.warnings.append("nothing was searched: no setting has another value that differs on this workload")
            return None
        stopped = self._race(first)
        stopped = self._confirm(first) or stopped
        self._check_quality()
        return stopped

    def result(self, stopped: str | None, *, is_resumable: bool) -> TuneResult:
        self._score()
        others = [state for state in self.states.values() if state is not self.default]
        noise = noise_of(self.rounds)
        decision: Decision | None = None
        if self.default.trials:
            decision = decide(self.default, others, self.finding, noise)
            if not others:
                decision = replace(decision, verdict="the default is best", text=self._text_of_default())
        if stopped is not None:
            stopped += f". {self.num_trials} trials are kept in {self.journal.path}"
        return TuneResult(
            facts=record_facts(self.tune, self.machine, self.default.facts, self.started_at, self.warnings),
            goal=self.tune.goal.name,
            figure=self.tune.goal.figure,
            budget_s=self.tune.budget_s,
            spent_s=self.budget.spent_s,
            stopped=stopped,
            is_resumable=is_resumable,
            knobs=self.knobs.all,
            configs=list(self.states.values()),
            rungs=self.rungs,
            noise=noise,
            decision=decision,
            quality=self.quality,
        )

    # The phases

    def _calibrated(self) -> Trial:
        """The first trial of the default: how long a request takes, and which settings are in force."""
        count = min(FIRST_REQUESTS, len(self.tune.workload.requests))
        self.say(f"measuring the default with {count} requests")
        trial = self._trial(self.default, Asked("race", 0, 0, count))
        assert trial is not None
        self.level = trial.level
        return trial

    def _find_knobs(self) -> None:
        assert self.default.facts is not None
        self.knobs = find_knobs(space_of(self.tune, self.machine, self.default.facts.values))
        self.pruning = Pruning(self.knobs)
        self.pruning.add_measured(self.default.candidate.config)

    def _make_shortlist(self, first: Trial) -> None:
        """Kept in the journal: plan measures this machine, and would not say the same a second time."""
        stored = self.journal.note("shortlist")
        if stored is None:
            whole = self._num_requests(1.0, [self.default], first)
            found = shortlist(self.knobs, self.tune.forecast(self.machine), self.budget.num_configs(whole))
            stored = [_stored(each) for each in found]
            self.journal.add_note("shortlist", stored)
        for each in stored:
            predicted = None if each["predicted"] is None else Predicted(**each["predicted"])
            if each["settings"]:
                self._join(Candidate(config_of(each["settings"]), each["origin"], predicted))
            else:
                self.default.candidate = replace(self.default.candidate, predicted=predicted)

    def _race(self, first: Trial) -> str | None:
        racing = [state for state in self.states.values() if state is not self.default]
        self.num_planned = self._planned(len(racing))
        for rung in range(1, NUM_RUNGS + 1):
            count = self._num_requests(RUNG_SHARES[rung - 1], [self.default, *racing], first)
            self.say(f"rung {rung} of {NUM_RUNGS}: {len(racing)} configs and the default, {count} requests each")
            entered = [state.name for state in racing]
            is_complete = self._rung(rung, racing, count)
            racing = [state for state in racing if state.status == "ok"]
            if not racing and not is_complete:
                return self._budget_used(f"the race ended in rung {rung}")
            effects = self._effects()
            configs = [state.candidate.config for state in racing]
            stay = configs if rung == NUM_RUNGS or not is_complete else kept(configs, effects)
            if stay:
                leader = self.states[ranked(configs, effects)[0].hash]
                self.level = leader.trials[-1].level or self.level
            added = self._merge(configs, effects, NUM_MERGED[rung - 1]) if rung < NUM_RUNGS and is_complete else []
            racing = [self.states[config.hash] for config in stay] + added
            names = [config.name for config in stay], [state.name for state in added]
            self.rungs.append(Rung(rung, count, entered, *names))
            if not is_complete:
                return self._budget_used(f"the race ended in rung {rung}")
            if not racing:
                return None
        return None

    def _rung(self, rung: int, racing: Sequence[ConfigState], count: int) -> bool:
        """Measure every config once, and the default at both ends: all others are compared with it. False: the budget
        ended it."""
        is_first_part = rung == 1 and count == self.default.trials[0].num_requests
        if not is_first_part:
            self.num_rounds += 1  # otherwise the default's first trial is part of this round
        ordered = self._in_order([self.default, *racing], is_backwards=rung % 2 == 0)
        again = [] if is_first_part else [self.default]
        for state in [*ordered, *again] if ordered[0] is self.default else [*again, *ordered]:
            if state is not self.default and (found := self.pruning.ruled_out(state.candidate.config.settings)):
                state.ruled_out = found
                self.say(f"  {state.name}: not tried, {found.why} ({found.config})")
                continue
            if not self.budget.has_time_for_race(count):
                return False
            times_before = sum(trial.rung == rung for trial in state.trials)
            self._trial(state, Asked("race", rung, times_before, count, self.level))
        return True

    def _merge(self, configs: Sequence[SweepConfig], effects: Effects, number: int) -> list[ConfigState]:
        known = {self.knobs.effective(state.candidate.config.settings) for state in self.states.values()}

        def is_new(settings: Mapping[str, Any]) -> bool:
            return (
                self.knobs.problem(settings) is None
                and self.knobs.effective(settings) not in known
                and self.pruning.ruled_out(settings) is None
            )

        joined = merged(configs, effects, self.knobs, is_new, number)
        return [self._join(Candidate(config, "recombined")) for config in joined]

    def _confirm(self, first: Trial) -> str | None:
        finalists = self._finalists()
        if not finalists:
            return None
        count = self._num_requests(1.0, [self.default, *finalists], first)
        if not self.budget.has_time_to_confirm(count):
            for state in finalists[1:]:
                state.is_finalist = False
            finalists = finalists[:1]
        names = ", ".join(state.name for state in finalists)
        self.say(f"confirming against the default, {count} requests a round: {names}")
        while finalists and needs_more(self.rounds, _hashes(finalists)):
            if not self.budget.has_time_for_round(len(finalists) + 2, count):
                num_done = len(self.rounds)
                return self._budget_used(f"confirmation ended after {num_done} round{'s' * (num_done != 1)}")
            self._confirm_round(finalists, count)
            finalists = [state for state in finalists if state.failure is None]
            self.finding = found = judge(self.rounds, _hashes(finalists))
            if found is not None:
                ratio, name = found.interval, self.states[found.best].name
                shown = f"{times(ratio.value)} [{ratio.low:.2f}, {ratio.high:.2f}]"
                self.say(f"  after {len(self.rounds)} rounds, {name} is {shown} of the default")
        return None

    def _confirm_round(self, finalists: Sequence[ConfigState], count: int) -> None:
        """Default, finalists, default; every second round backwards."""
        place = len(self.rounds)
        self.num_rounds += 1
        order: list[tuple[ConfigState, Phase]] = [(self.default, "confirm")]
        order += [(state, "confirm") for state in finalists] + [(self.default, "noise")]
        values: dict[tuple[str, Phase], float] = {}
        for state, phase in order if place % 2 == 0 else reversed(order):
            trial = self._trial(state, Asked(phase, NUM_RUNGS + 1, place, count, self.level))
            if trial is not None:
                values[state.candidate.config.hash, phase] = trial.value
        default = self.default.candidate.config.hash
        of_others = {key: value for (key, phase), value in values.items() if key != default}
        self.rounds.append(ConfirmRound(values[default, "confirm"], values[default, "noise"], of_others))

    def _finalists(self) -> list[ConfigState]:
        """The best of the race. The second is left out if it lies far behind."""
        racing = [state for state in self.states.values() if state is not self.default and state.status == "ok"]
        if not racing:
            return []
        effects = self._effects()
        order = ranked([state.candidate.config for state in racing], effects)[:NUM_FINALISTS]
        found = effects.estimates([config.settings for config in order])
        behind = [found[0].log_ratio - each.log_ratio for each in found]
        states = [
            self.states[config.hash]
            for config, gap in zip(order, behind, strict=True)
            if gap <= FAR_BEHIND * effects.noise_sd
        ]
        for state in states:
            state.is_finalist = True
        return states

    def _check_quality(self) -> None:
        """Greedy agreement of finalists that change numbers."""
        names = {knob.name for knob in self.knobs.all if knob.changes_quality}
        changed = [
            state
            for state in self.states.values()
            if state.is_finalist and state.failure is None and names & state.candidate.config.settings.keys()
        ]
        if not changed:
            return
        self.runner.close()  # one engine at a time has the device
        engine, workload = self.tune.engine, self.tune.workload
        try:
            before = greedy_answers(engine, dict(self.tune.common), workload)
            for state in changed:
                stored = self.journal.note(f"quality/{state.candidate.config.hash}")
                if stored is None:
                    after = greedy_answers(engine, self._settings(state), workload)
                    stored = asdict(agreement_of(state.name, before, after))
                    self.journal.add_note(f"quality/{state.candidate.config.hash}", stored)
                self.quality.append(Agreement(**stored))
        except (EngineFailure, HttpError) as error:
            self.warnings.append(f"the agreement of answers could not be measured: {error}")

    # Trials

    def _trial(self, state: ConfigState, asked: Asked) -> Trial | None:
        """Measure, or take the trial from the journal. A failed default is tried again, then ends the search."""
        config = state.candidate.config
        is_default = state is self.default
        failure: Failure | None = None
        for attempt in range(NUM_ATTEMPTS if is_default else 1):
            entry = self._entry(config, asked, key_of(config, asked, attempt))
            self.num_trials += 1
            if isinstance(entry.outcome, Trial):
                self._keep(state, entry.outcome, entry.facts)
                return entry.outcome
            failure = entry.outcome
            first_line = next(iter(failure.message.splitlines()), "")
            self.say(f"  {config.name}: failed ({failure.stage}, {failure.kind}): {first_line}")
        assert failure is not None
        state.failure = failure
        if is_default:
            raise DefaultFailedError(failure)
        self.pruning.add_failure(config, failure)
        return None

    def _entry(self, config: SweepConfig, asked: Asked, key: str) -> Entry:
        entry = self.journal.find(key)
        if entry is not None:
            self.budget.go_on_from(entry.spent_s)
            return entry
        outcome = self.runner.run({**self.tune.common, **config.settings}, asked)
        spent_s = self.budget.mark()
        if isinstance(outcome, Failure):
            entry = Entry(outcome, None, spent_s)
        else:
            trial, facts = outcome
            entry = Entry(trial, facts, spent_s)
            label = RANKABLE[self.tune.goal.figure].label
            self.say(f"  {config.name}: {number(trial.value)} {label}{self._time_left(trial)}")
        self.journal.add(key, config, entry)
        return entry

    def _keep(self, state: ConfigState, trial: Trial, facts: EngineFacts | None) -> None:
        state.trials.append(trial)
        state.facts = facts or state.facts
        self.budget.add(trial)
        self.observations.append(Observation(state.candidate.config.settings, self.num_rounds, trial.value))
        if self.knobs.all and state is not self.default:
            self.pruning.add_measured(state.candidate.config)

    # Small questions

    def _join(self, candidate: Candidate) -> ConfigState:
        return self.states.setdefault(candidate.config.hash, ConfigState(candidate))

    def _settings(self, state: ConfigState) -> dict[str, Any]:
        return {**self.tune.common, **state.candidate.config.settings}

    def _effects(self) -> Effects:
        return Effects(self.knobs, self.observations)

    def _score(self) -> None:
        """The estimated ratio to the default, from all rounds."""
        measured = [state for state in self.states.values() if state.trials]
        if not measured:
            return
        effects = self._effects()
        for state, found in zip(
            measured, effects.estimates([state.candidate.config.settings for state in measured]), strict=True
        ):
            state.score = found.ratio

    def _in_order(self, states: Sequence[ConfigState], *, is_backwards: bool) -> list[ConfigState]:
        """Configs between which an engine need not restart are neighbours."""
        keys = [self.knobs.restart_key(state.candidate.config.settings) for state in states]
        order = sorted(range(len(states)), key=lambda place: (keys.index(keys[place]), place))
        ordered = [states[place] for place in order]
        return ordered[::-1] if is_backwards else ordered

    def _num_requests(self, share: float, states: Sequence[ConfigState], first: Trial) -> int:
        """Requests of a round, so that even the largest batch of the race is full for most of it."""
        if self.tune.goal.serves:
            return first.num_requests
        assert self.default.facts is not None
        own = self.default.facts.values.get("max_num_seqs")
        seqs = [state.candidate.config.settings.get("max_num_seqs", own) for state in states]
        largest = max((int(each) for each in seqs if isinstance(each, (int, float))), default=0)
        return self.budget.num_requests(share, len(self.tune.workload.requests), largest)

    def _planned(self, num_configs: int) -> int:
        """About how many trials there will be."""
        total, racing = 1, num_configs
        for num_merged in (*NUM_MERGED, 0):
            total += racing + 2
            racing = racing // 2 + num_merged
        return total + 5 * (NUM_FINALISTS + 2)

    def _time_left(self, trial: Trial) -> str:
        missing = self.num_planned - self.num_trials - 1
        if missing <= 0:
            return ""
        left = min(self.budget.left_s, missing * trial.seconds)
        return f"; about {seconds(float(round(max(0.0, left))))} left"

    def _budget_used(self, where: str) -> str:
        return f"the budget of {seconds(self.budget.total_s)} is used up: {where}; a larger --budget goes further"

    def _text_of_default(self) -> str:
        best = max(self.default.trials, key=lambda trial: trial.value)
        where = f" with {best.level} concurrent" if best.level else ""
        label = RANKABLE[self.tune.goal.figure].label
        why = "" if self.tune.can_change_settings else ": the settings of a running server cannot be changed"
        return (
            f"only the load was searched{why}: {number(best.value)} {label}{where}"
            if where
            else (f"nothing was searched: {number(best.value)} {label} with the default")
        )


def _stored(candidate: Candidate) -> dict[str, Any]:
    return {
        "settings": dict(candidate.config.settings),
        "origin": candidate.origin,
        "predicted": None if candidate.predicted is None else asdict(candidate.predicted),
    }


def _hashes(states: Sequence[ConfigState]) -> list[str]:
    return [state.candidate.config.hash for state in states]
