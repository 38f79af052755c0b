"""LoRA adapters on a GPU: log-probabilities near those of merged weights, in mixed batches, eagerly and in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace import LLM, LoRARequest, SamplingParams
from tests.engine.adapters import merged, save_adapter
from tests.engine.tiny import save_model
from tests.runner.gpu.eight_bits import logits_in_eight_bits

pytestmark = pytest.mark.gpu

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)


def logprobs_of(
    model: transformers.PreTrainedModel, prompt: list[int], answer: list[int], *, in_eight_bits: bool = False
) -> torch.Tensor:
    """Of each token of the answer, in float32."""
    tokens = prompt + answer
    with torch.inference_mode():
        logits = logits_in_eight_bits(model, tokens) if in_eight_bits else model(torch.tensor([tokens])).logits[0]
    scores = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "fp8"},
        {"max_num_batched_tokens": 32, "max_num_seqs": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"max_loras": 1},  # two adapters take turns in the model, and wait in host memory
    ],
    ids=["bfloat16", "fp8", "chunks", "drafts", "turns"],
)
def test_a_mixed_batch_is_near_merged_models(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The answers are scored by the merged model and by the base model: rounding is small beside the adapter."""
    model = save_model(tmp_path / "model")
    ranks = {"all": 8, "wide": 20}
    paths = {name: save_adapter(tmp_path / name, model, rank=rank, seed=rank) for name, rank in ranks.items()}
    names = [None, "all", "wide", "all", None, "wide", "wide"]
    prompts = [[(7 * index + step) % 300 + 1 for step in range(10 + 9 * index)] for index in range(len(names))]
    requests = [None if name is None else LoRARequest(name, ranks[name], str(paths[name])) for name in names]
    with LLM(
        str(tmp_path / "model"),
        device="cuda",
        enable_lora=True,
        max_lora_rank=32,
        num_gpu_blocks_override=128,
        **settings,
    ) as llm:
        outputs = llm.generate(prompts, PARAMS, lora_request=requests, use_tqdm=False)
        again = llm.generate(prompts, PARAMS, lora_request=requests, use_tqdm=False)  # prefixes are cached now
    errors, allowed, adapter_effects = [], [], []
    for name, prompt, *both in zip(names, prompts, outputs, again, strict=True):
        own = model if name is None else merged(model, paths[name])
        for output in both:
            answer = list(output.outputs[0].token_ids)
            assert output.outputs[0].logprobs is not None
            found = torch.tensor([entry.logprob for entry in output.outputs[0].logprobs])
            exact = logprobs_of(own, prompt, answer)
            errors.append((found - exact).abs().mean())
            rounding = torch.zeros(())
            if "quantization" in settings:  # of the same model by itself
                rounding = (logprobs_of(own, prompt, answer, in_eight_bits=True) - exact).abs().mean()
            allowed.append(0.2 + rounding)
            if name is not None:
                adapter_effects.append((errors[-1], (exact - logprobs_of(model, prompt, answer)).abs().mean()))
    assert torch.stack(errors).mean() < torch.stack(allowed).mean(), (errors, allowed)
    error, effect = torch.tensor(adapter_effects).mean(0)
    assert error < (0.6 if "quantization" in settings else 0.3) * effect
