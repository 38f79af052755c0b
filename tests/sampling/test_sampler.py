"""The sampler: slots and their settings, independence of the batch, finish flags and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.sampling import Sampled, Sampler
from headrace.sampling.columns import Columns
from headrace.sampling.feature import Column
from headrace.sampling.features import FEATURES
from headrace.sampling.min_tokens import MinTokens
from headrace.steps import BROKEN
from headrace.types import NUM_DEVICE_STOPS, SamplingParams

VOCAB_SIZE = 300


def enter_slot(
    sampler: Sampler, slot: int, *, seed: int = 0, end_len: int = 1000, stops: Any = (), **params: Any
) -> None:
    settings = SamplingParams(**{"max_tokens": None, **params})
    sampler.enter_slot(slot, settings, seed=seed, prompt_len=10, end_len=end_len, stop_token_ids=stops)


def sample(sampler: Sampler, logits: Tensor, slots: list[int], lens: list[int] | None = None) -> Sampled:
    lens = [10] * len(slots) if lens is None else lens
    return sampler.sample(logits.clone(), torch.tensor(slots), torch.tensor(lens))


def peaked(*tokens: int) -> Tensor:
    """Logits [R, V] whose likeliest token is the given one."""
    logits = torch.zeros(len(tokens), VOCAB_SIZE)
    logits[range(len(tokens)), list(tokens)] = 10.0
    return logits


ALL_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 20, "temperature": 1.4},
    {"min_p": 0.05},
    {"top_p": 0.95, "top_k": 50, "min_p": 0.01, "temperature": 0.8},
    {"min_tokens": 5, "stops": (1, 2, 3)},
    {"logprobs": 3},
]


def test_a_sequence_samples_the_same_alone_and_among_fifty_others_in_another_slot():
    logits = torch.randn(51, VOCAB_SIZE) * 2
    batch = Sampler(64, VOCAB_SIZE)
    slots = torch.randperm(64)[:51].tolist()
    for i, slot in enumerate(slots):
        enter_slot(batch, slot, seed=i, **ALL_KINDS[i % len(ALL_KINDS)])
    together = sample(batch, logits, slots, list(range(10, 61))).tokens.tolist()
    for i in range(51):
        alone = Sampler(1, VOCAB_SIZE)
        enter_slot(alone, 0, seed=i, **ALL_KINDS[i % len(ALL_KINDS)])
        assert sample(alone, logits[i : i + 1], [0], [10 + i]).tokens.tolist() == together[i : i + 1]


def test_kernel_and_reference_give_the_same_results():
    logits = torch.randn(45, VOCAB_SIZE) * 2
    sampler = Sampler(45, VOCAB_SIZE)
    for slot in range(45):
        enter_slot(sampler, slot, seed=slot, **ALL_KINDS[slot % len(ALL_KINDS)])
    fast, plain = (sample(sampler, values, list(range(45))) for values in (logits, logits.double()))
    assert fast.tokens.tolist() == plain.tokens.tolist()
    assert fast.flags.tolist() == plain.flags.tolist()


def test_a_feature_that_no_row_of_the_batch_uses_is_not_called(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("called for a batch that does not use it")

    sampler = Sampler(3, VOCAB_SIZE)
    enter_slot(sampler, 0)
    enter_slot(sampler, 1, min_tokens=5, stops=(7,), logprobs=2)
    for feature in FEATURES:
        for method in ("apply", "capture"):
            if hasattr(feature, method):
                monkeypatch.setattr(type(feature), method, refuse)
    assert sample(sampler, peaked(5), [0]).logprobs is None
    with pytest.raises(AssertionError, match="does not use it"):
        sample(sampler, peaked(5), [1])


def test_a_new_sequence_in_a_slot_brings_its_own_settings():
    sampler = Sampler(1, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0, min_tokens=5, stops=(5,), logprobs=2, end_len=11)
    enter_slot(sampler, 0, temperature=0.0)
    result = sample(sampler, peaked(5), [0])
    assert (result.tokens.tolist(), result.flags.tolist(), result.logprobs) == ([5], [0], None)


def test_a_temperature_too_small_to_divide_by_is_greedy():
    sampler = Sampler(1, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=1e-300)
    assert sample(sampler, peaked(5), [0]).tokens.tolist() == [5]


def test_a_row_with_unusable_logits_is_broken_and_its_neighbours_continue():
    sampler = Sampler(3, VOCAB_SIZE)
    for slot in range(3):
        enter_slot(sampler, slot, temperature=0.0, logprobs=1, stops=(0,), end_len=11 if slot == 1 else 1000)
    logits = peaked(7, 8, 9)
    logits[1, 100] = float("nan")
    result = sample(sampler, logits, [0, 1, 2])
    assert result.flags.tolist() == [0, BROKEN, 0]
    assert result.tokens.tolist() == [7, 0, 9]


def test_min_tokens_masks_stop_tokens_until_the_answer_is_long_enough():
    sampler = Sampler(1, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0, min_tokens=3, stops=(7,))
    logits = peaked(7)
    logits[0, 8] = 9.0
    tokens = [sample(sampler, logits, [0], [n]).tokens.item() for n in (10, 11, 12, 13)]
    assert tokens == [8, 8, 8, 7]  # the prompt has 10: the fourth token may be a stop


def test_min_tokens_of_one_row_masks_nothing_for_its_neighbours():
    sampler = Sampler(3, VOCAB_SIZE)
    for slot, min_tokens in enumerate((0, 3, 0)):
        enter_slot(sampler, slot, temperature=0.0, min_tokens=min_tokens, stops=(7, 0, VOCAB_SIZE - 1))
    assert sample(sampler, peaked(7, 7, 7), [0, 1, 2]).tokens.tolist() == [7, 1, 7]
    assert sample(sampler, peaked(0, VOCAB_SIZE - 1, 0), [0, 1, 2]).tokens.tolist() == [0, 1, 0]


def test_applied_to_rows_that_do_not_use_it_min_tokens_changes_nothing(monkeypatch):
    monkeypatch.setattr(MinTokens, "is_used", lambda self, sequence: True)
    sampler = Sampler(1, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0)
    assert sample(sampler, peaked(0), [0], [3]).tokens.tolist() == [0]


def test_a_stop_id_outside_the_vocabulary_has_no_effect():
    sampler = Sampler(2, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0, min_tokens=3, stops=(VOCAB_SIZE + 7, 5))
    enter_slot(sampler, 1, temperature=0.0)
    assert sample(sampler, peaked(4, 7), [0, 1]).tokens.tolist() == [4, 7]


def test_a_stop_id_that_is_given_twice_counts_once():
    sampler = Sampler(1, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0, stops=[3, 3, *range(NUM_DEVICE_STOPS)])
    assert sampler.columns["stop_token_ids"][0].tolist() == [3, *(i for i in range(NUM_DEVICE_STOPS) if i != 3)]


# --- log-probabilities


def test_logprobs_are_those_of_the_raw_logits_and_only_of_rows_that_asked():
    logits = torch.randn(4, VOCAB_SIZE) * 3
    sampler = Sampler(4, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.3)
    enter_slot(sampler, 1, temperature=0.3, top_k=5, logprobs=2)
    enter_slot(sampler, 2, temperature=0.0)
    enter_slot(sampler, 3, temperature=5.0, logprobs=4)
    result = sample(sampler, logits, [3, 0, 1, 2])
    found = result.logprobs
    expected = logits.log_softmax(dim=1)[[0, 2]]  # the rows of slots 3 and 1
    assert found.slots.tolist() == [3, 1]
    torch.testing.assert_close(found.chosen, expected.gather(1, result.tokens[[0, 2], None])[:, 0])
    torch.testing.assert_close(found.top_values, expected.topk(4).values)
    assert found.top_ids.tolist() == expected.topk(4).indices.tolist()


def test_a_row_that_names_tokens_gets_their_logprobs_in_their_order():
    logits = torch.randn(2, VOCAB_SIZE) * 3
    sampler = Sampler(2, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0, logprob_token_ids=[7, 2, 9])
    enter_slot(sampler, 1, temperature=0.0, logprobs=2)
    found = sample(sampler, logits.clone(), [0, 1]).logprobs
    expected = logits.log_softmax(dim=1)
    torch.testing.assert_close(found.named_values[0, :3], expected[0, [7, 2, 9]])
    torch.testing.assert_close(found.top_values[1], expected[1].topk(2).values)


def test_all_logprobs_are_those_of_the_whole_vocabulary():
    logits = torch.randn(1, VOCAB_SIZE)
    sampler = Sampler(1, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0, logprobs=-1)
    found = sample(sampler, logits, [0]).logprobs
    assert sorted(found.top_ids[0].tolist()) == list(range(VOCAB_SIZE))


def test_the_rank_of_the_likeliest_is_one():
    logits = torch.arange(VOCAB_SIZE).float()[None]
    sampler = Sampler(1, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0, logprobs=0)
    found = sample(sampler, logits, [0]).logprobs
    assert (found.ranks.tolist(), found.top_ids.shape) == ([1], (1, 0))


def test_logprobs_ignore_the_mask_of_min_tokens():
    sampler = Sampler(1, VOCAB_SIZE)
    enter_slot(sampler, 0, temperature=0.0, min_tokens=2, stops=(7,), logprobs=1)
    logits = peaked(7)
    logits[0, 8] = 9.0
    result = sample(sampler, logits, [0])
    assert result.tokens.tolist() == [8]
    assert result.logprobs.ranks.tolist() == [2]
    assert result.logprobs.top_ids.tolist() == [[7]]


# --- columns


@pytest.mark.parametrize("shares_memory", [True, False])
def test_written_slots_reach_the_device_with_the_next_step(shares_memory):
    columns = Columns(
        [Column("one", int, 5), Column("wide", float, 0.5, width=2)],
        num_slots=3,
        device=torch.device("cpu"),
        shares_memory=shares_memory,
    )
    columns.write(1, {"one": 8})
    columns.write(2, {"wide": (1.0, 2.0)})
    columns.send()
    assert columns.tensors["one"].tolist() == [5, 8, 5]
    assert columns.tensors["wide"].tolist() == [[0.5, 0.5], [0.5, 0.5], [1.0, 2.0]]


@pytest.mark.gpu
def test_on_a_gpu_a_row_samples_the_same_alone_and_in_a_batch_and_greedy_rows_match_the_cpu():
    logits = torch.randn(45, VOCAB_SIZE) * 2
    batch, on_cpu = Sampler(45, VOCAB_SIZE, "cuda"), Sampler(45, VOCAB_SIZE)
    for slot in range(45):
        enter_slot(batch, slot, seed=slot, **ALL_KINDS[slot % len(ALL_KINDS)])
        enter_slot(on_cpu, slot, seed=slot, **ALL_KINDS[slot % len(ALL_KINDS)])
    host_slots = torch.arange(45)
    slots, lens = host_slots.cuda(), host_slots.cuda() + 10
    together = batch.sample(logits.cuda(), slots, lens, host_slots=host_slots.numpy()).tokens.tolist()
    expected = on_cpu.sample(logits.clone(), host_slots, host_slots + 10).tokens.tolist()
    for i in range(45):
        alone = Sampler(1, VOCAB_SIZE, "cuda")
        enter_slot(alone, 0, seed=i, **ALL_KINDS[i % len(ALL_KINDS)])
        sampled = alone.sample(logits[i : i + 1].cuda(), slots[:1], lens[i : i + 1], host_slots=host_slots[:1].numpy())
        assert sampled.tokens.tolist() == together[i : i + 1]
        if ALL_KINDS[i % len(ALL_KINDS)].get("temperature") == 0.0:
            assert together[i] == expected[i]
