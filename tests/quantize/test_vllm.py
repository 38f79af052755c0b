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


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_vllm_gives_the_greedy_answers_of_the_checkpoint(kind: Kind, tmp_path: Path) -> None:
    """Activations are rounded in different ways, so answers of a random model may part at a near-tie: most of their
    first tokens are the same."""
    if PYTHON not in os.environ:
        pytest.fail(f"set {PYTHON} to the interpreter of an environment with vLLM")
    save_model(tmp_path / "model")
    quantize_checkpoint(Request(str(tmp_path / "model"), kind, tmp_path / kind, evaluates=False))
    theirs = vllm_answers(tmp_path, tmp_path / kind)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tmp_path / kind)) as llm:
        ours = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32)
    firsts = [int(oracle(torch.tensor([ids])).logits[0, -1].argmax()) for ids in PROMPTS]
    for answers in (theirs, ours):
        assert sum(answer[0] == first for answer, first in zip(answers, firsts, strict=True)) >= 6
    same = [a == b for pair in zip(theirs, ours, strict=True) for a, b in zip(*pair, strict=True)]
    assert sum(same) > 0.6 * len(same)


def save_model(directory: Path) -> None:
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.SHAPE | SHAPE)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.06)
    model.save_pretrained(directory)
    tiny.save_tokenizer(directory)


def vllm_answers(directory: Path, model: Path) -> list[list[int]]:
    prompts, answers = directory / "prompts.json", directory / "answers.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = [os.environ[PYTHON], str(PROGRAM), str(model), str(prompts), str(answers), str(NUM_TOKENS)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    found: list[list[int]] = json.loads(answers.read_text())
    return found
