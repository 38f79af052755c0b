"""Weights from a GGUF file: read a few rows at a time, put into our order, dequantized straight to their place."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import ModelError
from headrace.models.gguf_file import GgufFile, GgufTensor
from headrace.models.spec import ModelSpec, Shape
from headrace.models.weights.dequantize import Bytes, dequantize, is_block_type
from headrace.models.weights.source import StoredRows

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS_AT_ONCE = 1 << 18  # small enough for a core's cache
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WITH_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PART_OF_SPEC = "rope_freqs.weight"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


class GgufTensors:
    """`rotates_pairs`: query and key rows are stored for a rotation of neighbours, ours rotates halves of a head."""

    def __init__(self, file: GgufFile, spec: ModelSpec, *, rotates_pairs: bool) -> None:
        self._file = file
        self._head_dim = spec.head_dim
        self._in_layer = _IN_LAYER | _WITH_POST_NORMS if spec.post_norms else _IN_LAYER
        self._rotates_pairs = rotates_pairs

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> Shape:
        return self._tensors[name].shape

    def fill(self, name: str, out: Tensor) -> None:
        tensor = self._tensors[name]
        row_len = 1 if len(tensor.shape) == 1 else tensor.shape[1]
        rows_at_once = max(1, _ELEMENTS_AT_ONCE // (row_len * self._head_dim)) * self._head_dim  # whole heads
        starts = range(0, tensor.shape[0], rows_at_once)
        pieces = (out[start : start + rows_at_once] for start in starts)
        # Array operations leave the interpreter's lock, and threads with a piece each never wait for one another.
        with ThreadPoolExecutor(max_workers=_num_cores()) as pool:
            list(pool.map(self._fill_rows, repeat(tensor), starts, pieces))  # raises what a thread raised

    def stored_rows(self, name: str) -> StoredRows | None:
        tensor = self._tensors[name]
        if not is_block_type(tensor.type_name):
            return None
        return StoredRows(self._read_rows(tensor, 0, tensor.shape[0]), tensor.type_name)

    def _fill_rows(self, tensor: GgufTensor, start: int, out: Tensor) -> None:
        import torch

        raw = self._read_rows(tensor, start, len(out))
        if self._rotates_pairs and _ROTATED.fullmatch(tensor.name):
            raw = _pairs_to_halves(raw, self._head_dim)
        if out.dtype == torch.float32 and out.device.type == "cpu":
            dequantize(raw, tensor.type_name, out.numpy())
        else:
            exact = np.empty(out.shape, dtype=np.float32)
            dequantize(raw, tensor.type_name, exact)
            out.copy_(torch.from_numpy(exact))

    def _read_rows(self, tensor: GgufTensor, start: int, num_rows: int) -> Bytes:
        row_bytes = tensor.num_bytes // tensor.shape[0]
        count, offset = num_rows * row_bytes, tensor.offset + start * row_bytes
        raw = np.fromfile(self._file.path, dtype=np.uint8, count=count, offset=offset)
        if len(raw) < count:
            raise ModelError(f"{self._file.path} is cut short in tensor {tensor.name!r}; fetch it again")
        return raw.reshape(num_rows, row_bytes)

    @cached_property
    def _tensors(self) -> dict[str, GgufTensor]:
        tensors = self._file.tensors.values()
        kept = (tensor for tensor in tensors if tensor.name != _PART_OF_SPEC)
        return {_canonical_name(tensor.name, self._in_layer): tensor for tensor in kept}


def _canonical_name(gguf_name: str, in_layer: Mapping[str, str]) -> str:
    """The name that Hugging Face gives to a tensor; unknown ones keep theirs, and are refused later."""
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match and match[2] in in_layer:
        return f"model.layers.{match[1]}.{in_layer[match[2]]}.{match[3]}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else gguf_name


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pairs_to_halves(raw: Bytes, head_dim: int) -> Bytes:
    """Rows of each head from (0, half, 1, half + 1, ...) back to (0, 1, ..., half, half + 1, ...)."""
    num_rows, row_bytes = raw.shape
    heads = raw.reshape(num_rows // head_dim, head_dim // 2, 2, row_bytes)
    return heads.swapaxes(1, 2).reshape(num_rows, row_bytes)


def frequency_divisors(file: GgufFile) -> tuple[float, ...]:
    """The factors of Llama 3's rope scaling, which GGUF stores as a tensor."""
    tensor = file.tensors.get(_PART_OF_SPEC)
    if tensor is None:
        return ()
    if tensor.type_name != "F32":
        raise ModelError(f"tensor {_PART_OF_SPEC!r} must be stored as F32, found {tensor.type_name}")
    values = np.fromfile(file.path, dtype="<f4", count=tensor.num_bytes // 4, offset=tensor.offset)
    return tuple(float(value) for value in values)


def stored_dtype(file: GgufFile) -> str:
    """The type of the matrices; quantized ones count as bfloat16, which holds any of their values' range."""
    names = {"F32": "float32", "F16": "float16"}
    kinds = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return names.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
