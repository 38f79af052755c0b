"""Small steps on a CPU run as graphs, and compute what they compute without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.kernels.cpu.panels import IS_SUPPORTED
from headrace.runner import cpu_graphs
from tests.models.test_parity import FAMILIES, VOCAB_SIZE, PagedRun, Step, load, randomize

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not IS_SUPPORTED, reason="other CPUs multiply with PyTorch's own GEMM"),
]

PREFILLS: list[Step] = [[(0, 9)], [(1, 17), (2, 3)]]
DECODES: list[Step] = [[(0, 1), (2, 1)]] * 4
VERIFICATIONS: list[Step] = [[(0, 3), (1, 1), (2, 2)], [(0, 1), (1, 3), (2, 2)], [(2, 3), (1, 2), (0, 1)]]


def run_of(directory: Path, family: str) -> PagedRun:
    theirs = FAMILIES[family]().float().eval()
    randomize(theirs)
    theirs.save_pretrained(directory)
    return PagedRun(load(directory), [torch.randint(VOCAB_SIZE, (50,)) for _ in range(3)])


def logits_of(run: PagedRun, schedule: list[Step], *, uses_graphs: bool) -> list[Tensor]:
    again = PagedRun(run.decoder, run.texts)
    again.steps.use_graphs(uses_graphs)
    for step in schedule:
        again.step(step)
    assert bool(again.steps.num_graphs) == uses_graphs
    return [torch.cat(parts) for parts in again.logits]


def test_graphs_of_decodes_and_of_verified_drafts_change_no_bit(tmp_path: Path) -> None:
    run = run_of(tmp_path, "qwen3")
    schedule = [*PREFILLS, *DECODES, *VERIFICATIONS, *DECODES]
    expected = logits_of(run, schedule, uses_graphs=False)
    for found, wanted in zip(logits_of(run, schedule, uses_graphs=True), expected, strict=True):
        assert torch.equal(found, wanted)


def test_one_graph_verifies_drafts_of_several_lengths_and_changes_no_bit(tmp_path: Path) -> None:
    """Of 9 and 10 tokens; rows without a token write to the block for padding alone."""
    run = run_of(tmp_path, "qwen3")
    steps: list[Step] = [[(0, 6), (1, 4)], [(0, 4), (1, 5)], [(1, 3), (0, 6)], [(0, 7), (1, 3)], [(1, 5), (0, 4)]]
    schedule = [*PREFILLS, *steps]
    expected = logits_of(run, schedule, uses_graphs=False)
    for step in schedule:
        run.step(step)
    assert run.steps.num_graphs == 1
    for parts, wanted in zip(run.logits, expected, strict=True):
        assert torch.equal(torch.cat(parts), wanted)


def test_a_shape_has_a_graph_from_its_second_step_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, "qwen3")
    numbers = []
    for step in [*PREFILLS, [(0, 1)], [(0, 1)], [(1, 1)], [(0, 1), (1, 1)], [(2, 1), (1, 1)]]:
        run.step(step)
        numbers.append(run.steps.num_graphs)
    assert numbers == [0, 0, 0, 1, 1, 1, 2]


def test_large_steps_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "MAX_TOKENS", 4)
    run = run_of(tmp_path, "qwen3")
    for _ in range(3):
        run.step([(0, 5)])
    assert run.steps.num_graphs == 0


def test_there_are_no_more_graphs_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "MAX_GRAPHS", 2)
    run = run_of(tmp_path, "qwen3")
    for length in (1, 2, 3, 4) * 3:
        run.step([(0, length)])
    assert run.steps.num_graphs == 2


def test_a_model_that_also_computes_with_pytorch_runs_without_graphs(tmp_path: Path) -> None:
    run = run_of(tmp_path, "gpt-2")
    for step in [*PREFILLS, *DECODES]:
        run.step(step)
    assert run.steps.num_graphs == 0
