"""The default model against transformers' own reading of the weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.kernels import ops
from headrace.models import Checkpoint, load_decoder, open_checkpoint
from headrace.models.cache import EMBEDDED_BITS
from headrace.models.gguf_file import GgufTensor, read_gguf
from tests.models.one_sequence import logits

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.mark.embedded
def test_what_plans_know_of_the_file_is_true() -> None:
    assert open_checkpoint("smollm2").spec.packed_bits == EMBEDDED_BITS


def theirs(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The file's blocks, dequantized by the gguf package and named and reordered here, in transformers' model."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {
        tensor.name: stored_weights(checkpoint.source, tensor)
        for tensor in read_gguf(checkpoint.source).tensors.values()
    }
    with torch.device("meta"):  # the weights are replaced at once
        model = LlamaForCausalLM(config)
    state = {}
    for name in model.state_dict():
        stem, _, kind = name.rpartition(".")
        key = f"{names.get_name(stem)}.{kind}"
        weight = torch.from_numpy(stored.get(key, stored["token_embd.weight"]))
        if ".attn_q." in key or ".attn_k." in key:
            weight = weight.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        state[name] = weight
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


def stored_weights(path: Path, tensor: GgufTensor) -> np.ndarray:
    raw = np.fromfile(path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    kind = gguf.GGMLQuantizationType[tensor.type_name]
    return gguf.quants.dequantize(raw.reshape(tensor.shape[0], -1), kind).reshape(tensor.shape)


@pytest.mark.embedded
@pytest.mark.parametrize("is_packed", [True, False])
def test_the_embedded_model_gives_the_logits_of_transformers(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are multiplied by inputs of 16 bits: 0.009 away from logits between -23 and 36."""
    checkpoint = open_checkpoint("smollm2")
    if not is_packed:
        monkeypatch.setattr(ops, "takes_groups", lambda device, dtype: False)
    decoder = load_decoder(checkpoint, dtype=torch.float32)
    ours = logits(decoder, torch.tensor(PROMPT))
    with torch.no_grad():
        expected = theirs(checkpoint)(torch.tensor([PROMPT])).logits[0]
    error = 3e-2 if is_packed else 2e-3
    torch.testing.assert_close(ours, expected, atol=error, rtol=1e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
