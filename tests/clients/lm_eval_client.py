"""lm-eval with `local-completions`: loglikelihoods (echo with logprobs), perplexity and generation.

Its own tasks need datasets from the internet, so the tasks here read a local file.
"""

from __future__ import annotations

import json
import os
import tempfile
import urllib.request
from pathlib import Path

from tests.clients.checks import KEY, MODEL, URL, check, main, raises, shell

TASKS = {
    "facts": """
task: facts
dataset_path: json
dataset_kwargs: {data_files: {test: facts.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc}]
""",
    "text": """
task: text
dataset_path: json
dataset_kwargs: {data_files: {test: facts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
    "write": """
task: write
dataset_path: json
dataset_kwargs: {data_files: {test: facts.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}
FACTS = [
    {"question": "The capital of France is", "choices": ["Paris", "Oslo", "Rome"], "answer": 0},
    {"question": "The opposite of hot is", "choices": ["blue", "cold"], "answer": 1},
    {"question": "One, two, three,", "choices": ["nine", "one", "four"], "answer": 2},
]
EVALUATE = r"""
# docs: run
export OPENAI_API_KEY=$KEY  # local-completions sends it; auth_token is for the tokenizer
lm-eval run --model local-completions --tasks facts --include_path . --output_path results --log_samples \
    --model_args model=$MODEL,base_url=$URL/completions,auth_token=$KEY,num_concurrent=4,max_length=512
# docs: end
"""
CHAT = r"""
export OPENAI_API_KEY=$KEY
lm-eval run --model local-chat-completions --tasks write --include_path . --output_path chat --apply_chat_template \
    --model_args model=$MODEL,base_url=$URL/chat/completions,num_concurrent=2
"""


def results(folder: str) -> dict[str, dict[str, float]]:
    (path,) = Path(folder).glob("**/results_*.json")
    found: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return found


def samples(folder: str, task: str) -> list[dict[str, object]]:
    (path,) = Path(folder).glob(f"**/samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def loglikelihood(context: str, continuation: str) -> float:
    """The same from one request, by the offsets of the tokens."""
    body = {"model": MODEL, "prompt": context + continuation, "echo": True, "logprobs": 1, "max_tokens": 0}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        logprobs = json.load(answer)["choices"][0]["logprobs"]
    offsets, values = logprobs["text_offset"], logprobs["token_logprobs"]
    return float(sum(value for offset, value in zip(offsets, values, strict=True) if offset >= len(context)))


@check
def loglikelihoods_with_the_tokenizer_of_the_server() -> None:
    shell(EVALUATE)
    assert 0 <= results("results")["facts"]["acc,none"] <= 1
    found = samples("results", "facts")
    assert len(found) == len(FACTS)
    for sample, fact in zip(sorted(found, key=lambda one: one["doc_id"]), FACTS, strict=True):
        for response, choice in zip(sample["filtered_resps"], fact["choices"], strict=True):
            assert abs(float(response[0]) - loglikelihood(fact["question"], f" {choice}")) < 1e-3, (response, choice)


@check
def perplexity_and_generation() -> None:
    shell(EVALUATE.replace("--tasks facts", "--tasks text,write").replace("results", "more"))
    assert results("more")["text"]["word_perplexity,none"] > 1
    assert 0 <= results("more")["write"]["exact_match,none"] <= 1
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples("more", "write"))


@check
def chat_completions() -> None:
    shell(CHAT)
    assert 0 <= results("chat")["write"]["exact_match,none"] <= 1


@check
def a_wrong_key_ends_the_run() -> None:
    with raises(AssertionError, "Remote tokenizer not supported"):
        shell(EVALUATE.replace("results", "none"), KEY="wrong")


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.chdir(tempfile.mkdtemp())
    Path("facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS), encoding="utf-8")
    for name, text in TASKS.items():
        Path(f"{name}.yaml").write_text(text, encoding="utf-8")
    main("lm_eval")
