"""The default model end to end: greedy answers equal those of transformers with the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import LLM, SamplingParams
from headrace.models import open_checkpoint

pytestmark = pytest.mark.embedded

NUM_TOKENS = 24
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Translate 'good morning' to Spanish.",
    "Give a synonym of 'quick'.",
    "What is the opposite of hot?",
    "List two European rivers.",
    "How many days has a week?",
    "Explain rain to a child.",
    "What is a prime number?",
    "Write a short poem about winter.",
    "Which planet is the largest?",
    "What is bread made of?",
    "Tell me a fact about cats.",
    "What does a thermometer measure?",
    "Finish: once upon a time",
    "Write a Python function that adds two numbers.",
]


def reference_model() -> LlamaForCausalLM:
    checkpoint = open_checkpoint("smollm2")
    spec = checkpoint.spec
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            max_position_embeddings=spec.max_model_len,
            rms_norm_eps=spec.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
            tie_word_embeddings=True,
        )
    )
    model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.mark.slow
def test_twenty_greedy_answers_equal_those_of_transformers(smollm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = smollm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params, use_tqdm=False)
    model = reference_model()
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        # If every token is the argmax given the tokens before it, the answer is the greedy one.
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist(), output.prompt


def test_the_model_knows_the_capital_of_france(smollm: LLM) -> None:
    (output,) = smollm.chat(
        [{"role": "user", "content": QUESTIONS[0]}], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False
    )
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
