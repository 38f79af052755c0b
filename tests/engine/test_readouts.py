"""Embeddings and scores, compared with transformers: here in chunks and batches, and beside streams."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headrace import LLM, AsyncEngine, SamplingParams
from headrace.errors import RequestError
from tests.engine.tiny import FAMILIES, HYBRIDS, LIKE_OTHERS, SHAPE, save_model

pytestmark = pytest.mark.parity

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 11, "num_gpu_blocks_override": 60, "block_size": 8}


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, SHAPE["vocab_size"]) for _ in range(count)]


def prompts_with_a_shared_prefix() -> list[list[int]]:
    """Most are longer than a step of eleven tokens; half share a prefix of 40."""
    rng = random.Random(3)
    head = some_tokens(rng, 40)
    return [(head if i % 2 else []) + some_tokens(rng, n) for i, n in enumerate((1, 7, 8, 9, 24, 25, 60, 3, 16, 1))]


def states(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """[T, H]: hidden states after the final norm."""
    with torch.inference_mode():
        inner = model.model if model.base_model is model else model.base_model  # Llama 4 has no base_model
        return inner(torch.tensor([prompt])).last_hidden_state[0].double()


def embedding(model: PreTrainedModel, prompt: list[int], pooling: str, *, normalize: bool = True) -> np.ndarray:
    return pooled(states(model, prompt), pooling, normalize=normalize)


def pooled(found: torch.Tensor, pooling: str, *, normalize: bool = True) -> np.ndarray:
    chosen = found[-1] if pooling == "last" else found.mean(0)
    return (torch.nn.functional.normalize(chosen, dim=0) if normalize else chosen).numpy()


def logprobs(model: PreTrainedModel, prompt: list[int], continuation: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + continuation])).logits[0].double()
    after = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return after.gather(1, torch.tensor(continuation)[:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in FAMILIES]
)
def test_embeddings_and_scores_equal_transformers_through_chunks_and_prefix_hits(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, family)
    prompts = prompts_with_a_shared_prefix()
    continuations = [some_tokens(random.Random(i), 1 + 5 * (i % 4)) for i in range(len(prompts))]
    theirs = [states(model, prompt) for prompt in prompts]
    their_logprobs = [logprobs(model, *pair) for pair in zip(prompts, continuations, strict=True)]
    with LLM(str(tmp_path), **SMALL) as llm:  # type: ignore[arg-type]
        for _ in range(2):  # the second time with prefix hits from the first
            for pooling in ("last", "mean"):
                outputs = llm.embed(prompts, pooling=pooling, use_tqdm=False)  # type: ignore[arg-type]
                for prompt, found, output in zip(prompts, theirs, outputs, strict=True):
                    assert output.prompt_token_ids == tuple(prompt)
                    np.testing.assert_allclose(output.embedding, pooled(found, pooling), atol=1e-4)
            (raw,) = llm.embed([prompts[4]], normalize=False, use_tqdm=False)
            expected = pooled(theirs[4], "last", normalize=False)
            np.testing.assert_allclose(raw.embedding, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
            scores = llm.score(prompts, continuations, use_tqdm=False)
            for prompt, continuation, values, output in zip(
                prompts, continuations, their_logprobs, scores, strict=True
            ):
                assert output.prompt_token_ids == tuple(prompt)
                assert output.outputs.token_ids == tuple(continuation)
                assert output.outputs.token_logprobs == pytest.approx(values, abs=2e-3, rel=1e-4)
        assert (llm.stats.scheduler.num_prefix_hit_tokens > 0) == (family not in HYBRIDS)
        assert llm.stats.scheduler.num_generated_tokens == 0
        assert llm.stats.scheduler.num_blocks_held == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_gpu_blocks_override": 16, "block_size": 8, "max_model_len": 128, "max_num_batched_tokens": 40},
        {"enable_chunked_prefill": False, "max_model_len": 128},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    ],
    ids=["plain", "small-cache", "whole-prompts", "no-prefix-cache"],
)
def test_readouts_and_streams_do_not_change_each_other(
    settings: dict[str, object], device: str, tiny_directory: Path, model: PreTrainedModel
) -> None:
    prompts = prompts_with_a_shared_prefix()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    tolerance = 1e-4 if device == "cpu" else 0.05  # bfloat16 on the GPU

    async def stream(engine: AsyncEngine, prompt: list[int]) -> tuple[int, ...]:
        return [output async for output in engine.generate(prompt, params)][-1].outputs[0].token_ids

    async def main() -> None:
        engine = await AsyncEngine.start(str(tiny_directory), device=device, max_num_seqs=8, **settings)
        try:
            alone = [await stream(engine, prompt) for prompt in prompts]
            streams, lasts, means, scores = await asyncio.gather(
                asyncio.gather(*(stream(engine, prompt) for prompt in prompts)),
                asyncio.gather(*(engine.embed(prompt) for prompt in prompts)),
                asyncio.gather(*(engine.embed(prompt, pooling="mean", normalize=False) for prompt in prompts)),
                asyncio.gather(*(engine.score(prompt, [5, 6, 7]) for prompt in prompts)),
            )
            stats = engine.stats.scheduler
        finally:
            await engine.close()
        if device == "cpu":
            assert streams == alone
        for prompt, last, mean, score in zip(prompts, lasts, means, scores, strict=True):
            np.testing.assert_allclose(last.embedding, embedding(model, prompt, "last"), atol=tolerance)
            expected = embedding(model, prompt, "mean", normalize=False)
            np.testing.assert_allclose(mean.embedding, expected, atol=10 * tolerance)
            per_token = logprobs(model, prompt, [5, 6, 7])
            assert score.outputs.token_logprobs == pytest.approx(per_token, abs=20 * tolerance, rel=20 * tolerance)
            assert score.outputs.logprob == pytest.approx(sum(score.outputs.token_logprobs))
            assert score.outputs.num_tokens == 3
        assert stats.num_blocks_held == 0

    asyncio.run(asyncio.wait_for(main(), 300))


def test_the_prefix_cache_serves_only_tokens_before_the_first_read_token(tiny_directory: Path) -> None:
    prompt = some_tokens(random.Random(1), 40)
    with LLM(str(tiny_directory), max_num_seqs=4, block_size=8) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        (last,) = llm.embed([prompt], use_tqdm=False)
        (mean,) = llm.embed([prompt], pooling="mean", use_tqdm=False)
        (long,) = llm.score([prompt[:17]], [prompt[17:]], use_tqdm=False)
        (after,) = llm.score([prompt], [[1, 2]], use_tqdm=False)
    assert last.num_cached_tokens == 32  # the last token is computed
    assert mean.num_cached_tokens == 0
    assert long.num_cached_tokens == 16
    assert after.num_cached_tokens == 32


def test_one_prompt_may_have_several_continuations_and_its_blocks_are_computed_once(tiny_directory: Path) -> None:
    prompt = some_tokens(random.Random(2), 64)
    choices = [[5], [6, 7], [8, 9, 10]]
    with LLM(str(tiny_directory), max_num_seqs=1, block_size=8) as llm:
        together = llm.score(prompt, choices, use_tqdm=False)
        alone = [llm.score(prompt, choice, use_tqdm=False)[0] for choice in choices]
    assert [output.outputs.num_tokens for output in together] == [1, 2, 3]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs.token_logprobs == pytest.approx(other.outputs.token_logprobs, abs=1e-4)
    assert [output.num_cached_tokens for output in together] == [0, 56, 56]


def test_prompt_and_continuation_are_tokenized_as_one_text(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (text,) = llm.score("the river ", "flows", use_tqdm=False)
    (ids,) = llm.score(tokenizer.encode("the river "), tokenizer.encode("flows"), use_tqdm=False)
    (mixed,) = llm.score([tokenizer.encode("the river ")], ["flows"], use_tqdm=False)
    assert text.prompt == "the river " and mixed.prompt is None
    assert text.outputs.token_ids == ids.outputs.token_ids == mixed.outputs.token_ids
    assert text.outputs.logprob == pytest.approx(ids.outputs.logprob, abs=1e-4)


def test_an_embedding_output_has_the_fields_of_vllms(llm: LLM) -> None:
    (output,) = llm.embed("some text", use_tqdm=False)
    assert output.prompt == "some text" and output.finished
    assert output.outputs.embedding.shape == (SHAPE["hidden_size"],) and output.outputs.embedding.dtype == np.float32
    assert output.outputs.hidden_size == SHAPE["hidden_size"]
    assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1.0, abs=1e-6)


def test_a_prompt_may_fill_the_whole_context_and_no_more(tiny_directory: Path) -> None:
    tokens = some_tokens(random.Random(4), 33)
    with LLM(str(tiny_directory), max_model_len=32, max_num_seqs=2, num_gpu_blocks_override=2) as llm:
        assert llm.embed([tokens[:32]], pooling="mean", use_tqdm=False)
        assert llm.score([tokens[:30]], [tokens[30:]], use_tqdm=False)[0].outputs.num_tokens == 3
        with pytest.raises(RequestError, match=r"prompt 0: This model's .* is 32 tokens.* 33 tokens"):
            llm.embed([tokens], use_tqdm=False)
        assert llm.embed([tokens[:5]], use_tqdm=False)  # the engine still works


def test_readouts_do_not_advance_the_random_state_of_later_requests(tiny_directory: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def answer(*, after_a_readout: bool) -> tuple[int, ...]:
        with LLM(str(tiny_directory), max_num_seqs=2) as llm:
            if after_a_readout:
                llm.embed(["x"], use_tqdm=False)
                llm.score("x", "y", use_tqdm=False)
            return llm.generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids

    assert answer(after_a_readout=True) == answer(after_a_readout=False)


def test_invalid_readouts_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="pooling must be one of last, mean, got 'men', did you mean 'mean'"):
        llm.embed("x", pooling="men", use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 continuations for 3 prompts"):
        llm.score(["a", "b", "c"], ["d", "e"])
    with pytest.raises(RequestError, match="continuation 1 has no tokens"):
        llm.score("a", ["b", ""])
    with pytest.raises(RequestError, match="prompt 0 has no tokens to continue"):
        llm.score("", "b")
    with pytest.raises(RequestError, match="token id 320 is out of vocabulary"):
        llm.score([[1]], [[320]])
    assert llm.embed([], use_tqdm=False) == [] and llm.score([], [], use_tqdm=False) == []


def test_a_text_that_is_much_too_long_is_refused_by_its_start(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(str(tiny_directory))
        tokenizer, lengths = engine.get_tokenizer(), []
        encode_batch = tokenizer.encode_batch

        def noting(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
            lengths.extend(map(len, texts))
            return encode_batch(texts, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode_batch", noting)
        try:
            for prompt, continuation in (("word " * 100_000, "a"), ("a", "word " * 100_000)):
                with pytest.raises(RequestError, match=r"^This model's maximum context length is 512 tokens"):
                    await engine.score(prompt, continuation)
            assert max(lengths) == 8 * 512
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_cancelling_a_readout_frees_its_blocks(tiny_directory: Path) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(str(tiny_directory), max_num_seqs=2, max_num_batched_tokens=2)
        try:
            task = asyncio.ensure_future(engine.embed(some_tokens(random.Random(5), 300), pooling="mean"))
            while not engine.stats.scheduler.num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engine.stats.scheduler.num_running:
                await asyncio.sleep(0.001)
            assert engine.stats.scheduler.num_blocks_held == 0
            assert engine.stats.scheduler.num_aborted == 1
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))
