"""What a failure rules out, so that nothing is started that is known to fail.

oom                      every config that is at least as large in all settings that need memory
bad_setting,             every config with the same value of the setting that the message names, or of the only
unsupported,             setting that differs from the default
not in force
crash, timeout, others   the config itself; a value that is in two failed configs and in no measured one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.bench.sweep.configs import SweepConfig
from headrace.bench.sweep.result import Failure
from headrace.tune.knobs import SAVES_MEMORY, Knobs

OF_SETTINGS = ("bad_setting", "unsupported", "not in force")
NUM_FAILURES = 2  # of a value, in different configs


@dataclass(frozen=True, slots=True)
class RuledOut:
    """Why a config is not measured: the config that failed, and the rule."""

    config: str
    why: str


@dataclass(frozen=True, slots=True)
class _Failed:
    config: SweepConfig
    failure: Failure


class Pruning:
    """Owns the failures of a search."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._failed: list[_Failed] = []
        self._measured: list[Mapping[str, Any]] = []

    def add_failure(self, config: SweepConfig, failure: Failure) -> None:
        self._failed.append(_Failed(config, failure))

    def add_measured(self, config: SweepConfig) -> None:
        self._measured.append(config.settings)

    def ruled_out(self, settings: Mapping[str, Any]) -> RuledOut | None:
        """The failure that rules a config out; None: it may be tried."""
        for failed in self._failed:
            if why := self._why(failed, settings):
                return RuledOut(failed.config.name, why)
        return self._by_repeated_value(settings)

    def _why(self, failed: _Failed, settings: Mapping[str, Any]) -> str | None:
        if self._knobs.effective(failed.config.settings) == self._knobs.effective(settings):
            return f"the same settings failed ({failed.failure.kind})"
        if failed.failure.kind == "oom" and self._is_as_large(settings, failed.config.settings):
            return "it needs at least as much memory as a config that ran out of it"
        if failed.failure.kind in OF_SETTINGS:
            for name in self._blamed(failed):
                if settings.get(name, _MISSING) == failed.config.settings[name]:
                    return f"{name}={failed.config.settings[name]!r} was refused ({failed.failure.kind})"
        return None

    def _is_as_large(self, settings: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether a config needs at least as much memory as another, by the settings that need memory."""
        for knob in self._knobs.all:
            value, of_other = (self._knobs.value(each, knob.name) for each in (settings, other))
            if knob.name in SAVES_MEMORY:
                if value != of_other:
                    return False
            elif knob.grows_memory and value != of_other:
                if not knob.is_ladder:
                    if of_other != knob.default:  # only the default is known to be smaller than another value
                        return False
                elif value < of_other:
                    return False
        return True

    def _blamed(self, failed: _Failed) -> list[str]:
        """The settings to which an error belongs; none if that is not known."""
        settings = failed.config.settings
        if len(settings) == 1:
            return list(settings)
        text = failed.failure.message.replace("-", "_")
        named = [name for name in settings if name in text]
        return named if len(named) == 1 else []

    def _by_repeated_value(self, settings: Mapping[str, Any]) -> RuledOut | None:
        for name, value in settings.items():
            failed = [
                each
                for each in self._failed
                if each.config.settings.get(name, _MISSING) == value and each.failure.kind not in ("oom", *OF_SETTINGS)
            ]
            worked = any(each.get(name, _MISSING) == value for each in self._measured)
            if len({each.config.hash for each in failed}) >= NUM_FAILURES and not worked:
                return RuledOut(failed[-1].config.name, f"{len(failed)} configs with {name}={value!r} failed")
        return None


_MISSING = object()
