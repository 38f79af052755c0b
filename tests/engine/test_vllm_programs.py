"""Programs written for vLLM's `LLM.generate`, `LLM.chat` and `LLM.embed`: only the import differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.types import RequestOutput
from tests.engine.tiny import SHAPE

RIVERS = ["The longest river is", "A river begins", "Rivers end in", "Boats"]


def test_a_list_of_prompts_gives_a_list_of_answers(tiny_directory: Path) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=str(tiny_directory), max_num_seqs=4)
    outputs = llm.generate(RIVERS, sampling_params)
    lines = []
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        lines.append(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    llm.close()
    assert len(lines) == 4
    for line, prompt in zip(lines, RIVERS, strict=True):
        assert re.fullmatch(rf"Prompt: '{prompt}', Generated text: .+", line)


def test_the_engine_accepts_vllms_arguments(tiny_directory: Path) -> None:
    llm = LLM(
        model=str(tiny_directory),
        tokenizer=str(tiny_directory),
        revision=None,
        dtype="float32",
        quantization=None,
        kv_cache_dtype="auto",
        load_format="auto",
        seed=1,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
        gpu_memory_utilization=0.2,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    )
    with llm:
        assert len(llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)) == 1


def test_generate_without_parameters_uses_the_defaults(llm: LLM) -> None:
    (output,) = llm.generate("only a prompt", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_each_prompt_uses_its_entry_of_a_list_of_parameters(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
        SamplingParams(n=3, temperature=1.0, top_k=20, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2),
    ]
    outputs = llm.generate(RIVERS[:3], sampling_params=params, use_tqdm=False)
    assert [[len(answer.token_ids) for answer in output.outputs] for output in outputs] == [[2], [4, 4, 4], [3]]
    assert outputs[0].outputs[0].logprobs is None
    assert outputs[2].outputs[0].cumulative_logprob == pytest.approx(
        sum(entry.logprob for entry in outputs[2].outputs[0].logprobs or ())
    )


def test_prompts_may_be_dictionaries_of_text_or_token_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    greedy = SamplingParams(temperature=0, max_tokens=4)
    prompts = [{"prompt": text} for text in RIVERS]
    token_prompts = [{"prompt_token_ids": tokenizer.encode(text)} for text in RIVERS]
    by_text = llm.generate(prompts, greedy, use_tqdm=False)
    by_ids = llm.generate(token_prompts, greedy, use_tqdm=False)
    one = llm.generate({"prompt": RIVERS[0]}, greedy, use_tqdm=False)
    assert [o.outputs[0].text for o in by_text] == [o.outputs[0].text for o in by_ids]
    assert one[0].outputs[0].token_ids == by_text[0].outputs[0].token_ids
    assert [o.prompt for o in by_text] == RIVERS and [o.prompt for o in by_ids] == [None] * 4


def test_the_tokenizer_counts_and_decodes_prompts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("count me", SamplingParams(max_tokens=1), use_tqdm=False)
    assert list(output.prompt_token_ids) == tokenizer.encode("count me")
    assert tokenizer.decode(output.prompt_token_ids) == "count me"
    assert tokenizer.eos_token_id == SHAPE["eos_token_id"]


def test_an_output_has_the_fields_that_programs_read(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    (output,) = llm.generate("fields", params, use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert isinstance(output.request_id, str) and output.prompt == "fields" and output.finished
    assert len(output.prompt_token_ids) == 6 and output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 6 and output.prompt_logprobs[0] is None
    assert output.num_cached_tokens == 0 and output.metrics["seconds"] > 0
    (answer,) = output.outputs
    assert answer.index == 0 and isinstance(answer.text, str) and len(answer.token_ids) == 3
    assert answer.finish_reason == "length" and answer.stop_reason is None
    assert answer.logprobs is not None and len(answer.logprobs) == 3 and answer.cumulative_logprob is not None


def test_chat_accepts_one_conversation_or_several(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "You answer briefly"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Tell me of rivers"},
    ]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (one,) = llm.chat(conversation, params, use_tqdm=False)
    many = llm.chat([conversation for _ in range(10)], sampling_params=params, use_tqdm=True)
    assert len(many) == 10 and {output.outputs[0].text for output in many} == {one.outputs[0].text}
    assert one.prompt is not None and one.prompt.endswith("<user>Tell me of rivers\n<assistant>")


def test_a_chat_template_may_be_given(llm: LLM) -> None:
    template = "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}{{ extra }}"
    (output,) = llm.chat(
        [{"role": "user", "content": "Hi"}],
        SamplingParams(max_tokens=1),
        use_tqdm=False,
        chat_template=template,
        chat_template_kwargs={"extra": "!"},
    )
    assert output.prompt == "[user: Hi]!"


def test_embeddings_are_lists_of_numbers_as_in_vllm(llm: LLM) -> None:
    outputs = llm.embed(RIVERS)
    for prompt, output in zip(RIVERS, outputs, strict=True):
        embeds = output.outputs.embedding
        assert output.prompt == prompt and len(embeds) == SHAPE["hidden_size"]
        assert all(abs(number) <= 1 for number in embeds[:16])
