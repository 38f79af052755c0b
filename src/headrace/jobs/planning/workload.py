"""Amounts of work: how much a planner may hold, what is left of a job, what duplicates have saved."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.jobs.input.line_output import LineOutput


@dataclass(frozen=True, slots=True)
class Window:
    """How much of the input is held at once, duplicates included."""

    num_lines: int = 65_536  # about 1 kB each if prompts are short
    num_tokens: int = 16_777_216


WINDOW = Window()


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """Lines that are waiting and running. Decode tokens and lengths are estimates."""

    num_lines: int = 0  # waiting
    num_prompt_tokens: float = 0.0  # to compute; a shared prefix counts once
    num_decode_tokens: float = 0.0
    num_running_tokens: int = 0  # of the prompts that were taken and are not answered
    num_running_decode_tokens: float = 0.0  # of their answers, the tokens generated so far included
    longest_waiting: float = 0.0  # answer; known once the input has ended
    longest_running: float = 0.0


@dataclass(slots=True)
class Savings:
    """Duplicates that were answered without computation, and their tokens."""

    num_lines: int = 0
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0

    def add(self, output: LineOutput) -> None:
        self.num_lines += 1
        self.num_prompt_tokens += output.num_prompt_tokens
        self.num_decode_tokens += output.num_generated_tokens


@dataclass(slots=True)
class PlanTotals:
    """Sums over the lines that are planned and not taken."""

    num_lines: int = 0
    num_tokens: int = 0
    num_decode_tokens: float = 0.0
    new_share: float = 1.0  # share of the prompt tokens that no other prompt computes
