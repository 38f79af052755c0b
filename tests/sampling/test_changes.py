"""Changes of logits before sampling: penalties, biases, allowed tokens and bad words, against transformers' own
processors where it has one of the same meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from headrace.errors import RequestError
from headrace.sampling import Sampled, Sampler
from headrace.steps import BROKEN
from headrace.types import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams

VOCAB_SIZE, MAX_LEN, PROMPT_LEN = 300, 64, 10
INF = float("inf")

KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7, "presence_penalty": -0.2, "repetition_penalty": 0.8},
    {"logit_bias": {5: 30.0, 299: -100.0, 0: 1.0}},
    {"allowed_token_ids": list(range(40, 70))},
    {"bad_words_token_ids": [[3], [1, 2], [4, 5, 6]]},
    {"top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {7: 2.0}, "logprobs": 2},
]


class Slots:
    """A sampler with the tokens of its slots, as a runner has them; past a sequence's length they are anything."""

    def __init__(self, num_slots: int) -> None:
        self.tokens = torch.full((num_slots, MAX_LEN), -(2**31), dtype=torch.int32)
        self.lens = torch.zeros(num_slots, dtype=torch.int64)
        self.sampler = Sampler(num_slots, VOCAB_SIZE, tokens=self.tokens)

    def enter_slot(self, slot: int, prompt: list[int], answer: list[int], *, seed: int = 0, **params: Any) -> None:
        tokens = prompt + answer
        self.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.lens[slot] = len(tokens)
        settings = SamplingParams(max_tokens=None, **params)
        self.sampler.enter_slot(slot, settings, seed=seed, prompt_len=len(prompt), end_len=MAX_LEN, stop_token_ids=())

    def sample(self, logits: Tensor, slots: list[int]) -> tuple[Sampled, Tensor]:
        """Returns what is sampled, and the changed logits."""
        changed = logits.clone()
        index = torch.tensor(slots)
        return self.sampler.sample(changed, index, self.lens[index]), changed


def changed(logits: Tensor, prompt: list[int], answer: list[int], **params: Any) -> Tensor:
    slots = Slots(1)
    slots.enter_slot(0, prompt, answer, **params)
    return slots.sample(logits[None], [0])[1][0]


def random_tokens(num: int, *, top: int = VOCAB_SIZE) -> list[int]:
    return torch.randint(0, top, (num,)).tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_answer(penalty: float) -> None:
    logits, prompt, answer = torch.randn(VOCAB_SIZE) * 3, random_tokens(20, top=30), random_tokens(15, top=60)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits[None].clone())[0]
    assert torch.equal(changed(logits, prompt, answer, repetition_penalty=penalty), theirs)


def test_presence_counts_a_token_of_the_answer_once_and_none_of_the_prompt() -> None:
    logits, prompt, answer = torch.randn(VOCAB_SIZE), random_tokens(20, top=30), random_tokens(25, top=40)
    expected = logits.clone()
    expected[list(set(answer))] -= 1.5
    torch.testing.assert_close(changed(logits, prompt, answer, presence_penalty=1.5), expected)


def test_frequency_counts_every_occurrence_in_the_answer() -> None:
    logits, prompt, answer = torch.randn(VOCAB_SIZE), random_tokens(20, top=30), random_tokens(40, top=10)
    expected = logits - 0.7 * torch.bincount(torch.tensor(answer), minlength=VOCAB_SIZE)
    torch.testing.assert_close(changed(logits, prompt, answer, frequency_penalty=0.7), expected)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_without_an_answer_these_penalties_change_nothing(penalty: str) -> None:
    logits = torch.randn(VOCAB_SIZE)
    assert torch.equal(changed(logits, [0, 1, 2], [], **{penalty: 2.0}), logits)


def test_a_bias_comes_before_the_repetition_penalty_and_that_before_the_others() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    both = changed(
        logits, [1], [5, 5], logit_bias={5: 6.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    assert both[5] == 6.0 / 2.0 - 2 * 0.5 - 0.25


def test_the_logit_bias_is_transformers_sequence_bias_of_single_tokens() -> None:
    logits, prompt = torch.randn(VOCAB_SIZE), random_tokens(20)
    biases = {token: float(bias) for token, bias in zip(range(0, 300, 3), torch.randn(100) * 20, strict=True)}
    theirs = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    expected = theirs(torch.tensor([prompt]), logits[None].clone())[0]
    torch.testing.assert_close(changed(logits, prompt, [], logit_bias=biases), expected)


def test_as_many_biases_as_a_slot_holds_all_count() -> None:
    biases = {token: float(token % 100) for token in range(MAX_LOGIT_BIAS)}
    found = changed(torch.zeros(VOCAB_SIZE), [1], [], logit_bias=biases)
    assert found.tolist() == list(biases.values())


def test_only_allowed_tokens_are_left() -> None:
    logits = torch.randn(VOCAB_SIZE)
    found = changed(logits, [1], [], allowed_token_ids=[0, 7, 8, 299])
    assert found.isfinite().nonzero()[:, 0].tolist() == [0, 7, 8, 299]
    assert torch.equal(found[[0, 7, 8, 299]], logits[[0, 7, 8, 299]])


def test_bad_words_are_those_of_transformers() -> None:
    words = [[3], [1, 2], [4, 5, 6], [5, 5, 5, 5], [6, 6]]
    theirs = NoBadWordsLogitsProcessor(words, eos_token_id=None)
    for _ in range(40):
        logits, answer = torch.randn(VOCAB_SIZE), random_tokens(30, top=7)
        expected = theirs(torch.tensor([[99, *answer]]), logits[None].clone())[0]
        assert torch.equal(changed(logits, [99], answer, bad_words_token_ids=words), expected)


def test_a_bad_word_that_began_in_the_prompt_may_be_completed() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    assert changed(logits, [9, 4], [5], bad_words_token_ids=[[4, 5, 6]]).isfinite().all()  # as in vLLM
    assert changed(logits, [9], [4, 5], bad_words_token_ids=[[4, 5, 6]])[6] == -INF


def test_a_bad_word_of_the_greatest_length_is_found() -> None:
    word = list(range(10, 10 + MAX_BAD_WORD_LEN))
    assert changed(torch.zeros(VOCAB_SIZE), [1], word[:-1], bad_words_token_ids=[word])[word[-1]] == -INF
    assert changed(torch.zeros(VOCAB_SIZE), [1], word[1:-1], bad_words_token_ids=[word]).isfinite().all()


def test_a_row_that_can_sample_nothing_is_broken_and_its_neighbour_is_not() -> None:
    slots = Slots(2)
    slots.enter_slot(0, [1], [], allowed_token_ids=[5], bad_words_token_ids=[[5]])
    slots.enter_slot(1, [1], [], temperature=0.0)
    assert (slots.sample(torch.zeros(2, VOCAB_SIZE), [0, 1])[0].flags == BROKEN).tolist() == [True, False]


def test_rows_sample_the_same_alone_and_among_others_with_all_kinds_of_changes() -> None:
    num = 4 * len(KINDS)
    logits = torch.randn(num, VOCAB_SIZE) * 2
    texts = [(random_tokens(1 + i % 20, top=20), random_tokens(i % 30, top=20)) for i in range(num)]
    batch, slots = Slots(64), torch.randperm(64)[:num].tolist()
    for i, slot in enumerate(slots):
        batch.enter_slot(slot, *texts[i], seed=i, **KINDS[i % len(KINDS)])
    sampled, from_logits = batch.sample(logits, slots)
    for i in range(num):
        alone = Slots(1)
        alone.enter_slot(0, *texts[i], seed=i, **KINDS[i % len(KINDS)])
        sampled_alone, from_alone = alone.sample(logits[i : i + 1], [0])
        assert torch.equal(from_alone[0], from_logits[i])
        assert sampled_alone.tokens.tolist() == sampled.tokens[i : i + 1].tolist()


def test_a_row_without_changes_keeps_its_logits_among_rows_that_have_them() -> None:
    slots, logits = Slots(2), torch.randn(2, VOCAB_SIZE)
    everything = {name: value for kind in KINDS for name, value in kind.items()}
    slots.enter_slot(0, [1, 2], [3, 4], **everything)
    slots.enter_slot(1, [1, 2], [3, 4])
    _, from_logits = slots.sample(logits, [0, 1])
    assert torch.equal(from_logits[1], logits[1])
    assert not torch.equal(from_logits[0], logits[0])


def test_a_new_sequence_does_not_inherit_the_changes_of_the_slot() -> None:
    slots, logits = Slots(1), torch.randn(1, VOCAB_SIZE)
    for kind in KINDS:
        slots.enter_slot(0, [1, 2], [3, 4], **kind)
        slots.sample(logits, [0])
        slots.enter_slot(0, [1, 2], [3, 4], logit_bias={9: 0.0}, allowed_token_ids=range(VOCAB_SIZE))
        assert torch.equal(slots.sample(logits, [0])[1], logits)


def test_logprobs_are_those_before_any_change() -> None:
    slots, logits = Slots(1), torch.randn(1, VOCAB_SIZE)
    slots.enter_slot(0, [1], [], logit_bias={7: 100.0}, logprobs=1)
    found = slots.sample(logits, [0])[0]
    assert found.tokens.tolist() == [7]
    assert found.logprobs is not None
    torch.testing.assert_close(found.logprobs.chosen, logits.log_softmax(1)[0, 7][None])


def test_columns_that_no_slot_has_used_take_no_memory() -> None:
    slots = Slots(1)
    slots.enter_slot(0, [1], [], top_p=0.5, repetition_penalty=2.0)
    assert not {"allowed_tokens", "biases", "bad_words"} & slots.sampler.columns.keys()
    slots.enter_slot(0, [1], [], allowed_token_ids=[1])
    assert "allowed_tokens" in slots.sampler.columns


@pytest.mark.parametrize(
    "params, message",
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.01 and 100"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": "high"}, "frequency_penalty must be a finite number"),
        ({"logit_bias": {1: 101}}, "logit_bias must be between -100 and 100"),
        ({"logit_bias": {-1: 1, "x": 1}}, "the keys of logit_bias must be token ids, got -1, x"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "at most 300 tokens, got 301"),
        ({"allowed_token_ids": []}, "at least one token id"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be between 0 and"),
        ({"bad_words": [""]}, "bad_words must be a list of words"),
        ({"bad_words_token_ids": [[]]}, "at least one token id"),
        ({"bad_words_token_ids": [[1] * 17]}, "at most 16 tokens long, got 17"),
        ({"bad_words_token_ids": [[1]] * (MAX_BAD_WORDS + 1)}, "at most 128 token sequences, got 129"),
    ],
)
def test_values_out_of_range_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("param", [{"logit_bias": {300: 1}}, {"allowed_token_ids": [5, 300]}])
def test_a_token_outside_the_vocabulary_is_refused(param: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="token id 300, but the vocabulary has 300"):
        SamplingParams(**param).check_vocabulary(300)
