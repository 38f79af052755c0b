"""Beam search and best_of, compared with transformers where the definitions agree, and with a naive search."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headrace import LLM, AsyncEngine, BeamSearchParams, SamplingParams
from headrace.engine.prompts import TokenizedPrompt
from headrace.errors import RequestError
from tests.engine.tiny import EOS, SHAPE, save_model

pytestmark = pytest.mark.parity

PROMPTS = [[5, 9, 33, 7], list(range(1, 40)), [200]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model with a flat output distribution, so that beams differ in several positions and some end."""
    directory = tmp_path_factory.mktemp("tiny")
    model = save_model(directory)
    with torch.no_grad():
        model.lm_head.weight *= 0.1
        model.lm_head.weight[EOS] *= 2.5
    model.save_pretrained(directory)
    return directory, model


Beam = tuple[tuple[int, ...], float]


def naive_search(model: PreTrainedModel, prompt: list[int], params: BeamSearchParams) -> list[Beam]:
    """vLLM's rules, one beam at a time, recomputing the whole context for every token."""

    def score(beam: Beam) -> float:
        tokens, total = beam
        return total / (len(tokens) - (tokens[-1] == EOS)) ** params.length_penalty

    running: list[Beam] = [(tuple(prompt), 0.0)]
    ended: list[Beam] = []
    for _ in range(params.max_tokens):
        candidates: list[Beam] = []
        for tokens, total in running:
            with torch.inference_mode():
                logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            values, ids = logprobs.topk(2 * params.beam_width)
            for token, value in zip(ids.tolist(), values.tolist(), strict=True):
                new = ((*tokens, token), total + value)
                (ended if token == EOS and not params.ignore_eos else candidates).append(new)
        running = sorted(candidates, key=score, reverse=True)[: params.beam_width]
    return sorted(ended + running, key=score, reverse=True)[: params.beam_width]


@pytest.mark.parametrize("beam_width", [1, 2, 5])
def test_beams_and_their_scores_are_those_of_transformers(model: tuple[Path, PreTrainedModel], beam_width: int) -> None:
    directory, reference = model
    params = BeamSearchParams(beam_width=beam_width, max_tokens=9, ignore_eos=True, length_penalty=0.0)
    with LLM(str(directory), max_num_seqs=8, num_gpu_blocks_override=256) as llm:
        outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=beam_width,
            num_return_sequences=beam_width,
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=SHAPE["vocab_size"] - 1,
            length_penalty=0.0,  # plain sums: the two count lengths differently
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert [list(beam.tokens) for beam in output.sequences] == theirs.sequences.tolist()
        if beam_width > 1:  # with one beam transformers decodes greedily, without scores
            sums = [beam.cum_logprob for beam in output.sequences]
            assert sums == pytest.approx(theirs.sequences_scores.tolist(), abs=2e-3)
        assert all(beam.finish_reason == "length" for beam in output.sequences)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings", [{"block_size": 8, "max_num_seqs": 3}, {"enable_prefix_caching": False, "max_num_seqs": 16}]
)
def test_beams_that_end_are_ranked_by_their_length_as_in_the_naive_search(
    model: tuple[Path, PreTrainedModel], length_penalty: float, settings: dict[str, object]
) -> None:
    directory, reference = model
    params = BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=length_penalty)
    with LLM(str(directory), num_gpu_blocks_override=256, **settings) as llm:  # type: ignore[arg-type]
        outputs = llm.beam_search(PROMPTS, params)
    num_ended = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = naive_search(reference, prompt, params)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        assert [beam.cum_logprob for beam in output.sequences] == pytest.approx([s for _, s in expected], abs=2e-3)
        for beam in output.sequences:
            assert (beam.finish_reason == "stop") == (beam.tokens[-1] == EOS)
            assert sum(entry.logprob for entry in beam.logprobs) == pytest.approx(beam.cum_logprob)
            num_ended += beam.finish_reason == "stop"
    assert num_ended > 0


def test_without_prefix_caching_beams_share_blocks_among_themselves_only(model: tuple[Path, PreTrainedModel]) -> None:
    prompt = [1 + i % 300 for i in range(150)]
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    found, num_tokens = {}, {}
    for caching in (True, False):
        with LLM(str(model[0]), max_num_seqs=4, num_gpu_blocks_override=256, enable_prefix_caching=caching) as llm:
            (found[caching],) = llm.beam_search([prompt], params)
            num_tokens[caching] = llm.stats.scheduler.num_batched_tokens
            if not caching:
                (again,) = llm.beam_search([prompt], params)
                (other,) = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
                assert again == found[caching]
                assert llm.stats.scheduler.num_batched_tokens >= num_tokens[caching] + 2 * len(prompt)
                assert other.num_cached_tokens == 0
                assert llm.stats.scheduler.num_blocks_held == 0
    assert [beam.tokens for beam in found[False].sequences] == [beam.tokens for beam in found[True].sequences]
    # One prompt and parts of blocks; without sharing, 34 times the prompt. Which parts depends on when requests arrive.
    assert max(num_tokens.values()) < 5 * len(prompt)


@pytest.mark.parametrize("own_process", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_beams_of_the_async_engine_share_blocks_without_prefix_caching(
    model: tuple[Path, PreTrainedModel], own_process: bool
) -> None:
    prompt = TokenizedPrompt(None, np.arange(1, 151, dtype=np.int32))

    async def num_reused(engine: AsyncEngine) -> int:
        await engine.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
        while (hits := engine.stats.scheduler.num_prefix_hit_tokens) == 0:
            await asyncio.sleep(0.001)  # the counters of another process come a moment later
        return hits

    async def main() -> None:
        engine = await AsyncEngine.start(
            str(model[0]),
            own_process=own_process,
            max_num_seqs=4,
            num_gpu_blocks_override=256,
            enable_prefix_caching=False,
        )
        try:
            assert await asyncio.wait_for(num_reused(engine), 120) >= 144
        finally:
            await engine.close()

    asyncio.run(main())


def test_beams_have_the_text_of_all_their_tokens(llm: LLM) -> None:
    (output,) = llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=4))
    for beam in output.sequences:
        assert beam.text == llm.get_tokenizer().decode(beam.tokens)
        assert beam.text.startswith("hello")


@pytest.mark.parametrize(
    "params, message",
    [
        ({"beam_width": 0, "max_tokens": 4}, "beam_width must be between 1 and 10, got 0"),
        ({"beam_width": 11, "max_tokens": 4}, "beam_width must be between 1 and 10, got 11"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"beam_width": 2, "max_tokens": 4, "temperature": 0.7}, "temperature must be 0 or 1 in a beam search"),
        ({"beam_width": 2, "max_tokens": 4, "length_penalty": "long"}, "length_penalty must be a number"),
        ({"beam_width": 2, "max_tokens": 4, "lenght_penalty": 1}, "did you mean 'length_penalty'"),
    ],
)
def test_invalid_beam_search_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**params)  # type: ignore[arg-type]


def test_a_search_that_would_exceed_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: 100 tokens and max_tokens \(500\) are more than"):
        llm.beam_search([[1], [1] * 100], BeamSearchParams(beam_width=2, max_tokens=500))


# ---- best_of


def test_best_of_returns_the_answers_with_the_largest_mean_log_probability(llm: LLM) -> None:
    options = {"max_tokens": 12, "seed": 3, "temperature": 1.5}
    (everything,) = llm.generate("hello", SamplingParams(n=8, logprobs=0, **options), use_tqdm=False)
    (best,) = llm.generate("hello", SamplingParams(n=3, best_of=8, logprobs=0, **options), use_tqdm=False)

    def mean(answer) -> float:  # type: ignore[no-untyped-def]
        return answer.cumulative_logprob / len(answer.token_ids)

    expected = sorted(everything.outputs, key=mean, reverse=True)[:3]
    assert [answer.token_ids for answer in best.outputs] == [answer.token_ids for answer in expected]
    assert [answer.index for answer in best.outputs] == [0, 1, 2]
    assert len({mean(answer) for answer in everything.outputs}) == 8


def test_best_of_returns_no_log_probabilities_unless_requested(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(best_of=3, max_tokens=4), use_tqdm=False)
    assert len(output.outputs) == 1
    assert output.outputs[0].logprobs is None


def test_a_best_of_smaller_than_n_is_refused() -> None:
    with pytest.raises(RequestError, match=r"best_of must be at least n \(3\), got 2"):
        SamplingParams(n=3, best_of=2)
