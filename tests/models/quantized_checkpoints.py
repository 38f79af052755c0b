"""Writes small Llama checkpoints in the layouts of quantized ones, packed here independently of the readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.kernels.quantized import FP8
from headrace.models.hub_config import spec_from_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTURE_CONFIG: dict[str, Any] = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GROUP_LEN = 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns has nibble i
Pack = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]  # stem, matrix -> stored tensors, dequantized matrix


def write(
    directory: Path, quantization: dict[str, Any], pack: Pack, config: dict[str, Any] = CONFIG
) -> dict[str, Tensor]:
    """Writes a checkpoint whose layers' matrices are packed, and returns all tensors as a reader should see them."""
    shapes = spec_from_config(config).tensor_shapes()
    seen = {name: torch.randn(shape) * (1.0 if "norm" in name else 0.05) for name, shape in shapes.items()}
    stored: dict[str, Tensor] = {}
    for name in shapes:
        if name.endswith("_proj.weight"):
            tensors, seen[name] = pack(name.removesuffix(".weight"), seen[name])
            stored |= tensors
        else:
            seen[name] = seen[name].to(torch.bfloat16).float()
            stored[name.replace(".router.", ".gate.")] = seen[name]  # the name that mixtures have in files
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return seen


def fp8_per_tensor(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = matrix.abs().max() / 448
    values = (matrix / scale).to(FP8)
    tensors = {f"{stem}.weight": values, f"{stem}.weight_scale": scale.view(1), f"{stem}.input_scale": torch.ones(1)}
    return tensors, values.float() * scale


def fp8_per_channel(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (matrix.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    values = (matrix / scales.float()).to(FP8)
    return {f"{stem}.weight": values, f"{stem}.weight_scale": scales}, values.float() * scales.float()


def fp8_per_block(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scales = torch.empty(matrix.shape, dtype=FP8), torch.empty(-(-len(matrix) // 128), matrix.shape[1] // 128)
    seen = torch.empty_like(matrix)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = matrix[at].abs().max() / 448
            values[at] = (matrix[at] / scales[row, column]).to(FP8)
            seen[at] = values[at].float() * scales[row, column]
    return {f"{stem}.weight": values, f"{stem}.weight_scale_inv": scales}, seen


def int8_per_channel(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = matrix.abs().amax(1, keepdim=True) / 127
    values = (matrix / scales).round().to(torch.int8)
    return {f"{stem}.weight": values, f"{stem}.weight_scale": scales}, values.float() * scales


def random_groups(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns values 0 to 15, scales and zero points per group, and the matrix that they mean."""
    num_rows, width = matrix.shape
    values = torch.randint(0, 16, (num_rows, width))
    scales = (torch.rand(num_rows, width // GROUP_LEN) * 0.01 + 0.001).half()
    zeros = torch.randint(1, 16, scales.shape)
    seen = (values - zeros.repeat_interleave(GROUP_LEN, 1)) * scales.float().repeat_interleave(GROUP_LEN, 1)
    return values, scales, zeros, seen


def packed(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors with four bits and zero points."""
    values, scales, zeros, seen = random_groups(matrix)
    return {
        f"{stem}.weight_packed": words(values, range(8), dim=1),
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_zero_point": words(zeros, range(8), dim=0),
        f"{stem}.weight_shape": torch.tensor(matrix.shape),
    }, seen


def awq(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scales, zeros, seen = random_groups(matrix)
    return {
        f"{stem}.qweight": words(values.t(), AWQ_ORDER, dim=1),
        f"{stem}.qzeros": words(zeros.t(), AWQ_ORDER, dim=1),
        f"{stem}.scales": scales.t(),
    }, seen


def gptq(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scales, zeros, seen = random_groups(matrix)
    return {
        f"{stem}.qweight": words(values.t(), range(8), dim=0),
        f"{stem}.qzeros": words(zeros.t() - 1, range(8), dim=1),
        f"{stem}.scales": scales.t(),
        f"{stem}.g_idx": (torch.arange(matrix.shape[1]) // GROUP_LEN).int(),
    }, seen


def gptq_in_activation_order(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    # Input channels are spread over the groups; the same for all matrices with one input, as GPTQ writes them.
    order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(matrix.shape[1]))
    groups = torch.empty_like(order)
    groups[order] = torch.arange(len(order)) // GROUP_LEN
    values, scales, zeros, _ = random_groups(matrix)
    tensors = {
        f"{stem}.qweight": words(values.t(), range(8), dim=0),
        f"{stem}.qzeros": words(zeros.t() - 1, range(8), dim=1),
        f"{stem}.scales": scales.t(),
        f"{stem}.g_idx": groups.int(),
    }
    return tensors, (values - zeros[:, groups]) * scales.float()[:, groups]


def words(values: Tensor, order: Any, *, dim: int) -> Tensor:
    """Packs eight values along `dim` into 32 bits: nibble i has value order[i]."""
    values = values if dim == 1 else values.t()
    packed = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for nibble, place in enumerate(order):
        packed |= values[:, place::8].long() << (4 * nibble)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    return packed if dim == 1 else packed.t()


def compressed(bits: int, number: str, strategy: str, *, inputs: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": number, "strategy": strategy, "symmetric": True, "dynamic": False}
    activations = {"num_bits": bits, "type": number, "strategy": "token", "dynamic": True} if inputs else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


LAYOUTS: dict[str, tuple[dict[str, Any], Pack]] = {
    "compressed fp8 per tensor": (compressed(8, "float", "tensor", inputs=True), fp8_per_tensor),
    "compressed fp8 per channel": (compressed(8, "float", "channel", inputs=True), fp8_per_channel),
    "fp8 per block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_per_block),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_per_tensor),
    "compressed int8": (compressed(8, "int", "channel", inputs=True), int8_per_channel),
    "compressed int4": (compressed(4, "int", "group", inputs=False), packed),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP_LEN, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP_LEN, "sym": False}, gptq),
    "gptq in activation order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP_LEN, "desc_act": True},
        gptq_in_activation_order,
    ),
}
