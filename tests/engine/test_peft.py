"""Adapters that the real PEFT package makes give its log-probabilities. PEFT is not a dependency: without it, skipped.

pip install --target build/peft --no-deps peft accelerate psutil
PYTHONPATH=src:build/peft pytest tests/engine/test_peft.py -m slow
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, LoRARequest, SamplingParams
from tests.engine.adapters import TARGETS, greedy_logprobs
from tests.engine.tiny import save_model

pytestmark = pytest.mark.slow

PROMPT = [(5 * index) % 300 + 1 for index in range(23)]
PARAMS = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)


@pytest.mark.parametrize(
    "config",
    [
        {"r": 8, "lora_alpha": 16, "target_modules": list(TARGETS)},
        {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 9},
            "alpha_pattern": {"down_proj": 20},
        },
        {"r": 6, "lora_alpha": 6, "target_modules": ["o_proj", "up_proj"], "layers_to_transform": [0, 2]},
    ],
    ids=["all", "rank-stabilized", "patterns", "some-layers"],
)
def test_an_adapter_of_peft_gives_the_log_probabilities_of_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(save_model(tmp_path / "model"), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    tokens, logprobs = greedy_logprobs(model.eval(), PROMPT, 10)
    with LLM(str(tmp_path / "model"), enable_lora=True, num_gpu_blocks_override=64) as llm:
        request = LoRARequest("made-by-peft", 1, str(tmp_path / "adapter"))
        (output,) = llm.generate([PROMPT], PARAMS, lora_request=request, use_tqdm=False)
    answer = output.outputs[0]
    assert list(answer.token_ids) == tokens
    assert answer.logprobs is not None
    assert [entry.logprob for entry in answer.logprobs] == pytest.approx(logprobs, abs=3e-4)
