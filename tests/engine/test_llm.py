from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.beam_search import BeamSearchParams
from headrace.errors import ConfigError, ModelError, RequestError
from tests.engine.tiny import EOS, SHAPE, save_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def texts(llm: LLM, prompts: object, params: SamplingParams) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]  # type: ignore[arg-type]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i} " * (1 + i % 7) for i in range(20)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


def test_text_and_its_token_ids_give_the_same_answer(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello there")
    assert (
        texts(llm, "hello there", GREEDY) == texts(llm, ids, GREEDY) == texts(llm, [{"prompt_token_ids": ids}], GREEDY)
    )


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]


def test_a_model_that_gives_nan_for_all_prompts_raises(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[ord("x")] = float("nan")
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), max_num_seqs=4, num_gpu_blocks_override=64) as llm:
        bad = [[ord("x"), 5], [7, ord("x")]]
        with pytest.raises(ModelError, match=r"all 2 prompts failed: .* \(NaN\); check its weights"):
            llm.generate(bad, GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="NaN"):
            llm.beam_search(bad, BeamSearchParams(beam_width=2, max_tokens=2))


def test_a_prompt_that_fails_among_others_is_logged_and_the_others_are_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_model(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[ord("x")] = float("nan")
        model.lm_head.weight[ord("x")] = 0.0  # greedy answers do not sample it
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), max_num_seqs=4, num_gpu_blocks_override=64) as llm:
        bad, good = llm.generate([[ord("x"), 5], [7, 5]], GREEDY, use_tqdm=False)
    assert bad.error is not None and bad.outputs[0].text == ""
    assert good.error is None and len(good.outputs[0].token_ids) == 8
    assert "1 of 2 prompts failed (RequestOutput.error); the first: no token could be sampled" in caplog.text


def test_a_list_of_parameters_of_the_wrong_length_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_chat_renders_the_template_and_answers(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "<user>hi\n<assistant>"
    assert output.outputs[0].text == texts(llm, "<user>hi\n<assistant>", GREEDY)[0]


def test_several_conversations_give_several_answers(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": word}] for word in ("one", "two", "three")]
    assert len(llm.chat(conversations, GREEDY, use_tqdm=False)) == 3


def test_n_answers_differ_when_sampled_and_share_the_prompt(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)
    (output,) = llm.generate("the same prefix for all of them", params, use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({answer.token_ids for answer in output.outputs}) == 4


def test_the_first_of_n_answers_is_the_one_that_n_1_gives(llm: LLM) -> None:
    one = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=5)
    three = SamplingParams(n=3, temperature=1.0, max_tokens=10, ignore_eos=True, seed=5)
    assert (
        llm.generate("x y z", three, use_tqdm=False)[0].outputs[0].token_ids
        == llm.generate("x y z", one, use_tqdm=False)[0].outputs[0].token_ids
    )


def test_a_seeded_request_gives_the_same_answer_alone_and_in_a_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=16, ignore_eos=True, seed=123)
    others = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    (alone,) = llm.generate("tell me", seeded, use_tqdm=False)
    together = llm.generate(
        ["a", "bb", "tell me", "dddd", "e"], [others, others, seeded, others, others], use_tqdm=False
    )
    assert together[2].outputs[0].token_ids == alone.outputs[0].token_ids


def test_requests_without_a_seed_differ_from_each_other(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    first, second = llm.generate(["same", "same"], params, use_tqdm=False)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (full,) = texts(llm, "go on", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    stop = full[10:13]
    expected = full[: full.index(stop)]
    (output,) = llm.generate(
        "go on", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop]), use_tqdm=False
    )
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (expected, "stop", stop)


def test_a_stop_string_can_be_kept_in_the_text(llm: LLM) -> None:
    (full,) = texts(llm, "go on", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    stop = full[10:13]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert texts(llm, "go on", params) == [full[: full.index(stop) + len(stop)]]


def test_min_tokens_delays_a_stop_string(llm: LLM) -> None:
    (full,) = texts(llm, "go on", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    params = SamplingParams(temperature=0, max_tokens=40, min_tokens=12, ignore_eos=True, stop=list(full[:8]))
    (output,) = llm.generate("go on", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) >= 12


@pytest.mark.parametrize("num_others", [0, 100])  # the device knows few of them
def test_a_stop_token_ends_the_answer_and_is_its_last_token(llm: LLM, num_others: int) -> None:
    (output,) = llm.generate("abc", GREEDY, use_tqdm=False)
    stop = output.outputs[0].token_ids[4]
    first = output.outputs[0].token_ids.index(stop)
    others = [token for token in range(200) if token not in output.outputs[0].token_ids][:num_others]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[*others, stop])
    (stopped,) = llm.generate("abc", params, use_tqdm=False)
    answer = stopped.outputs[0]
    assert answer.token_ids == output.outputs[0].token_ids[: first + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_min_tokens_delays_a_stop_token(llm: LLM) -> None:
    (output,) = llm.generate("abc", GREEDY, use_tqdm=False)
    stop = output.outputs[0].token_ids[0]
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=3, stop_token_ids=[stop])
    (delayed,) = llm.generate("abc", params, use_tqdm=False)
    assert len(delayed.outputs[0].token_ids) >= 3
    assert stop not in delayed.outputs[0].token_ids[:3]


def test_min_tokens_with_more_stop_ids_than_the_device_knows_is_refused_with_the_numbers(llm: LLM) -> None:
    params = SamplingParams(min_tokens=2, ignore_eos=True, stop_token_ids=list(range(17)))
    with pytest.raises(RequestError, match=r"min_tokens with 17 stop token ids.* at most 16"):
        llm.generate("abc", params, use_tqdm=False)


def test_logprobs_include_the_sampled_token_and_the_most_likely_ones(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 5
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry.token_id == token == entry.top_token_ids[0]
        assert entry.rank == 1 and len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0]) and entry.logprob <= 0


def test_an_answer_ends_at_the_end_of_the_context(tiny_directory: Path) -> None:
    with LLM(str(tiny_directory), max_model_len=32, max_num_seqs=2) as small:
        (output,) = small.generate(
            [list(range(1, 31))], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False
        )
    assert len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].finish_reason == "length"


def test_a_prompt_that_is_too_long_is_refused_with_its_index_and_the_numbers(llm: LLM) -> None:
    long = [1] * (SHAPE["max_position_embeddings"] + 1)
    with pytest.raises(RequestError, match=r"prompt 1: This model's .* is 512 tokens.* 513 tokens"):
        llm.generate([[1, 2], long], GREEDY, use_tqdm=False)
    assert texts(llm, "still alive", GREEDY)  # the engine still works


CALLS: dict[str, tuple[str, Callable[[LLM, str], object]]] = {
    "generate": ("prompt 1", lambda llm, huge: llm.generate(["a", huge], GREEDY, use_tqdm=False)),
    "a dictionary": ("prompt 0", lambda llm, huge: llm.generate({"prompt": huge}, GREEDY, use_tqdm=False)),
    "chat": ("prompt 0", lambda llm, huge: llm.chat([{"role": "user", "content": huge}], GREEDY, use_tqdm=False)),
    "embed": ("prompt 1", lambda llm, huge: llm.embed(["a", huge], use_tqdm=False)),
    "score": ("prompt 0", lambda llm, huge: llm.score(huge, ["a", "b"], use_tqdm=False)),
    "score of a continuation": ("continuation 1", lambda llm, huge: llm.score("a", ["b", huge], use_tqdm=False)),
    "beam_search": ("prompt 1", lambda llm, huge: llm.beam_search(["a", huge], BeamSearchParams(2, 2))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_text_that_is_much_too_long_is_refused_by_its_start(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokenizer, lengths = llm.get_tokenizer(), []
    encode_batch = tokenizer.encode_batch

    def noting(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return encode_batch(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", noting)
    noun, call = CALLS[name]
    with pytest.raises(RequestError, match=f"^{noun}: This model's maximum context length is 512 tokens.") as refused:
        call(llm, "word " * 100_000)
    assert (refused.value.param, refused.value.code) == (noun.split()[0], "context_length_exceeded")
    assert lengths == [8 * 512]  # of half a million characters


def test_a_token_id_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 320 is out of vocabulary, which has 320 tokens"):
        llm.generate([[1, 320]], GREEDY)


def test_an_empty_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate([""], GREEDY)


def test_a_misspelt_setting_names_the_right_one(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match="'max_num_seq', did you mean 'max_num_seqs'"):
        LLM(str(tiny_directory), max_num_seq=4)


def test_a_misspelt_sampling_parameter_names_the_right_one() -> None:
    with pytest.raises(RequestError, match="'temprature', did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_the_end_of_sequence_token_ends_an_answer_unless_ignored(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=400, seed=1)
    (ended,) = llm.generate("abc", params, use_tqdm=False)
    (ignored,) = llm.generate(
        "abc", SamplingParams(temperature=1.0, max_tokens=400, seed=1, ignore_eos=True), use_tqdm=False
    )
    answer = ended.outputs[0]
    assert EOS in ignored.outputs[0].token_ids, "with this seed an end-of-sequence token must be sampled"
    assert answer.finish_reason == "stop" and answer.stop_reason is None
    assert answer.token_ids[-1] == EOS and EOS not in answer.token_ids[:-1]


def test_settings_give_their_reasons(llm: LLM) -> None:
    reasons = {choice.name: choice.reason for choice in llm.settings.choices}
    assert reasons["max_num_seqs"] == "as set"
    assert reasons["max_model_len"] == "the model's own context"


def test_random_weights_run_without_any_weights_or_tokenizer(tmp_path: Path, tiny_directory: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_directory / "config.json").read_text())
    with LLM(str(tmp_path), load_format="random") as random_llm:
        (output,) = random_llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        with pytest.raises(ConfigError, match="no tokenizer"):
            random_llm.generate("text", GREEDY)


def test_a_setting_that_is_probably_a_mistake_is_logged(
    tiny_directory: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(str(tiny_directory), device="cpu", max_num_seqs=5, num_gpu_blocks_override=16)
    llm.close()
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("max_num_seqs=5 is more than the KV cache holds: 4 sequences of 64 tokens")
    assert "loaded weights" not in capfd.readouterr().err  # stderr is no terminal
