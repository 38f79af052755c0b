"""What `headrace quantize` writes is the same model for vLLM: `make vllm-test HEADRACE_VLLM_PYTHON=/path/to/python`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from headrace import LLM, SamplingParams
from headrace.kernels.quantized import Kind
from headrace.quantize.quantize import Request, quantize_checkpoint
from tests.engine import tiny

pytestmark = pytest.mark.vllm

PYTHON = "HEADRACE_VLLM_PYTHON"
PROGRAM = Path(__file__).with_name("vllm_answers.py")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}  # vLLM's CPU kernels
PROMPTS = [[3 + number, 50, 7 * number + 2, 11, 90] for number in range(8)]
NUM_TOKENS = 8
LARGEST_DIFFERENCES = {  # vLLM's and Headrace's; measured with three seeds: up to about two thirds of these
    "fp8": (0.01, 0.12),  # Headrace does not round activations on a CPU
    "int8": (0.07, 0.07),
    "int4": (0.03, 0.01),  # vLLM computes in bfloat16
}

Answer = list[tuple[int, float]]  # tokens and their log-probabilities


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_vllm_reads_the_probabilities_of_the_checkpoint(kind: Kind, tmp_path: Path) -> None:
    """Transformers judges each answer token by token: what follows a near-tie that another rounding decides otherwise
    is no fault. Scales that are 10 % too large, the smallest fault tried, make a difference of 0.14 or more."""
    if PYTHON not in os.environ:
        pytest.fail(f"set {PYTHON} to the interpreter of an environment with vLLM")
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    save_model(tmp_path / "model")
    quantize_checkpoint(Request(str(tmp_path / "model"), kind, tmp_path / kind, evaluates=False))
    theirs = vllm_answers(tmp_path, tmp_path / kind, "bfloat16" if kind == "int4" else "float32")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32)
    for answers, largest in zip((theirs, our_answers(tmp_path / kind)), LARGEST_DIFFERENCES[kind], strict=True):
        assert mean_difference(oracle, answers) < largest


def mean_difference(oracle: transformers.PreTrainedModel, answers: list[Answer]) -> float:
    differences = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([token for token, _ in answer])
        assert len(ids) == NUM_TOKENS
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + ids[:-1].tolist()])).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        differences.append((expected - torch.tensor([logprob for _, logprob in answer])).abs().mean())
    return float(torch.stack(differences).mean())


def save_model(directory: Path) -> None:
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.SHAPE | SHAPE)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.06)
    model.save_pretrained(directory)
    tiny.save_tokenizer(directory)


def our_answers(model: Path) -> list[Answer]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(str(model)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[(token.token_id, token.logprob) for token in output.outputs[0].logprobs or ()] for output in outputs]


def vllm_answers(directory: Path, model: Path, dtype: str) -> list[Answer]:
    prompts, answers = directory / "prompts.json", directory / "answers.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = [os.environ[PYTHON], str(PROGRAM), str(model), str(prompts), str(answers), str(NUM_TOKENS), dtype]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    found: list[Answer] = json.loads(answers.read_text())
    return found
