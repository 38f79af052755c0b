"""Runs in an environment with vLLM: writes the greedy answers to prompts of token ids, each token with its
log-probability.

python vllm_answers.py DIRECTORY PROMPTS.json ANSWERS.json MAX_TOKENS DTYPE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    directory, prompts, answers, max_tokens, dtype = sys.argv[1:]
    llm = LLM(directory, dtype=dtype, max_model_len=128, max_num_seqs=4, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=int(max_tokens), ignore_eos=True, logprobs=0)
    inputs = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    outputs = llm.generate(inputs, params)
    sequences = [output.outputs[0] for output in outputs]
    found = [
        [(token, choices[token].logprob) for token, choices in zip(sequence.token_ids, sequence.logprobs, strict=True)]
        for sequence in sequences
    ]
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
