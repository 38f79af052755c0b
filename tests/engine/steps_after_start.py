"""Starts a small model on a GPU that is not there, as if FlashAttention-3 were installed, and then runs steps of other
requests. Run as a program with the engine's settings as JSON; prints the kernels that the start did not launch: a
running engine would compile them."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np

from headrace.config import EngineConfig
from headrace.engine import dry_start
from headrace.engine.dry_start import DryStart
from headrace.engine.settings import Settings
from headrace.hardware import GpuFacts
from headrace.kernels.gpu import flash
from headrace.models import ModelSpec
from headrace.steps import Runner, SlotEntry, StepPlan
from headrace.types import SamplingParams

GPU = GpuFacts("a GPU", 1 << 36, 1 << 36, (9, 0))
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32_768,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
REQUESTS = (
    *(SamplingParams(temperature=0.0, logprobs=number) for number in (0, 1, 2, 8, 16, 20)),
    SamplingParams(temperature=0.7, logprobs=1, top_p=0.9),
    SamplingParams(temperature=0.7, presence_penalty=0.5),
    SamplingParams(temperature=0.7, min_p=0.1),
    SamplingParams(temperature=0.7, allowed_token_ids=(1, 2, 3)),
)
PROMPT_LENS = (2, 3, 10, 16, 33, 100, 250, 700, 1500, 3000, 7000)
NUM_COMPUTED = 900  # tokens of the beginning of a prompt


def run_steps(runner: Runner, settings: Settings, spec: ModelSpec) -> None:
    """Prompts of all lengths, some of them the rest of longer ones, and a token after each, with all parameters in
    turn."""
    for number, length in enumerate(PROMPT_LENS * len(REQUESTS)):
        num_computed = NUM_COMPUTED * (number // len(PROMPT_LENS) % 2)
        entry = SlotEntry(
            slot=0,
            token_ids=np.zeros(num_computed + length, np.int32),
            num_computed=num_computed,
            prompt_len=num_computed + length,
            end_len=settings.max_model_len,
            seed=0,
            params=REQUESTS[number % len(REQUESTS)],
            stop_token_ids=(),
            adapter=int(settings.adapters is not None),
        )
        for num_tokens, entries in ((length, (entry,)), (1, ())):
            runner.submit(
                StepPlan(
                    step=0,
                    slots=np.zeros(1, np.int64),
                    num_tokens=np.array([num_tokens]),
                    samples=np.ones(1, np.bool_),
                    num_batched_tokens=num_tokens,
                    slot_entries=entries,
                )
            )


def main(settings: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        stack.enter_context(mock.patch.object(flash, "is_available", return_value=True))
        stack.enter_context(mock.patch.object(flash, "_attend"))
        start = DryStart.of(EngineConfig(model=directory, load_format="random", **settings), GPU)  # type: ignore[arg-type]
        known = set(start.launches())
        with mock.patch.object(dry_start, "run_steps", run_steps):
            launches = start.launches()
    sys.stdout.write(json.dumps(sorted(launch.function for launch in launches if launch not in known)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
