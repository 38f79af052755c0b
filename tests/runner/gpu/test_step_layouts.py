"""Steps with prompts, laid out eagerly and for a graph: the same tokens and the same hidden states. Here on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels import ops
from headrace.kernels.layout import Splits
from headrace.models import load_decoder, open_checkpoint
from headrace.models.decoder import Decoder
from headrace.runner.gpu.prefill_graphs import prefill_shapes
from headrace.runner.gpu.step_layouts import StepLayouts, StepOrder, ordered
from headrace.runner.gpu.upload import Upload
from headrace.runner.shape import RunnerShape
from headrace.steps import StepPlan
from tests.engine.tiny import SHAPE, save_model

NUM_SLOTS, PADDING_SLOT = 9, 8
BLOCK_SIZE, MAX_LEN = 4, 128


class Slots:
    """Some slots in the middle of their work, as a runner has them."""

    def __init__(self, decoder: Decoder) -> None:
        generator = torch.Generator().manual_seed(3)
        spec = decoder.spec
        max_blocks = MAX_LEN // BLOCK_SIZE
        num_blocks = (NUM_SLOTS - 1) * max_blocks
        self.tokens = torch.randint(0, SHAPE["vocab_size"], (NUM_SLOTS, MAX_LEN + 1), generator=generator).int()
        self.computed = torch.tensor([10, 31, 7, 0, 0, 20, 3, 0, 0])
        tables = torch.randperm(num_blocks, generator=generator).view(NUM_SLOTS - 1, max_blocks)
        self.block_tables = torch.cat([tables, torch.full((1, max_blocks), num_blocks)]).int().contiguous()
        shape = (num_blocks + 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.caches = [ops.allocate_cache(*shape, decoder.dtype, decoder.device) for _ in range(spec.num_layers)]
        for cache in self.caches:
            cache.keys.normal_(generator=generator)
            cache.values.normal_(generator=generator)
        runner_shape = RunnerShape(
            max_num_seqs=NUM_SLOTS - 1,
            max_model_len=MAX_LEN,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_threads=1,
            max_num_batched_tokens=256,
        )
        self.layouts = StepLayouts(
            decoder, runner_shape, self.caches, self.tokens, self.computed, self.block_tables, lambda _: Splits()
        )


def test_a_step_in_the_form_of_a_graph_is_the_step_itself(tmp_path: Path) -> None:
    save_model(tmp_path)
    decoder = load_decoder(open_checkpoint(str(tmp_path)), dtype=torch.float32)
    slots = np.array([2, 0, 6, 5, 1, 3, 7])  # three decode, two prefill continuations, two fresh prefills
    num_tokens = np.array([1, 1, 1, 9, 2, 30, 17])
    context_lens = np.array([10, 31, 7, 0, 0, 20, 3, 0, 0])[slots] + num_tokens
    plan = StepPlan(
        step=0, slots=slots, num_tokens=num_tokens, samples=np.ones(len(slots), bool), num_batched_tokens=61
    )

    eager = Slots(decoder)
    buffer = torch.zeros(4096, dtype=torch.int32)
    order = StepOrder(num_decodes=3, num_fresh=2, context_lens=context_lens, groups=None)
    layout, token_ids = eager.layouts.of_step(plan, order, Upload(buffer, buffer.clone()))
    expected = decoder.hidden(token_ids, layout, eager.caches)

    graphed = Slots(decoder)
    shape = next(shape for shape in prefill_shapes(256, NUM_SLOTS - 1, MAX_LEN) if shape.num_tokens >= num_tokens.sum())
    packed = torch.from_numpy(shape.packed(slots, num_tokens, 3, PADDING_SLOT)).int()
    layout, token_ids = graphed.layouts.of_arrays(shape.unpacked(packed), shape.num_decodes, shape.num_tokens)
    found = decoder.hidden(token_ids, layout, graphed.caches)

    assert found.shape[0] == 64 > expected.shape[0] == 61
    assert torch.allclose(found[:61], expected, atol=1e-5)
    for one, other in zip(eager.caches, graphed.caches, strict=True):  # except for the padding block
        assert torch.allclose(one.keys[:-1], other.keys[:-1], atol=1e-5)
        assert torch.allclose(one.values[:-1], other.values[:-1], atol=1e-5)


def test_a_step_decodes_long_contexts_first_and_computes_fresh_prefills_last() -> None:
    slots, num_tokens = np.array([4, 1, 6, 3, 2]), np.array([1, 1, 5, 2, 9])
    samples = np.array([True, True, False, True, False])
    plan, num_decodes, num_fresh = ordered(
        StepPlan(step=0, slots=slots, num_tokens=num_tokens, samples=samples, num_batched_tokens=18),
        np.array([8, 70, 0, 30, 4]),
    )
    assert (num_decodes, num_fresh) == (2, 1)
    assert plan.slots.tolist() == [1, 4, 3, 2, 6]
    assert plan.num_tokens.tolist() == [1, 1, 2, 9, 5]
    assert plan.samples.tolist() == [True, True, True, False, False]
