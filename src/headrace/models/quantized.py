"""What `quantization_config` of a config.json says of a checkpoint's weights. What would be computed wrongly is
refused. Imports no torch.

    method               tensors of a matrix [N, K]
    compressed-tensors   weight (float8 or int8), weight_scale; four bits: weight_packed, weight_scale, weight_shape,
                         and where they are used weight_zero_point, weight_g_idx
    fp8                  weight (float8), weight_scale_inv (one per block) or weight_scale
    awq, gptq            qweight, qzeros, scales, and for gptq g_idx

Which matrices are quantized is seen from their tensors. Lists of modules that are not (`ignore`,
`modules_to_not_convert`) only tell how much memory a model takes before its tensors are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.errors import UnsupportedModelError

Kind = Literal["fp8", "int8", "int4"]
METHODS = ("compressed-tensors", "fp8", "awq", "gptq")
BITS = {"fp8": 8.0, "int8": 8.0, "int4": 4.25}  # of a weight; int4: with a float32 scale per 128 weights

_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "mixed-precision", "dense")
_KINDS: dict[tuple[str, int], Kind] = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How a checkpoint's matrices are quantized."""

    method: str
    kind: Kind
    quantizes_activations: bool = True  # else GEMMs are computed in the type of the activations
    zero_offset: int = 0  # added to stored zero points
    ignored: tuple[str, ...] = ()  # modules that are not quantized: names, or "re:" and a pattern

    def ignoring(self) -> Callable[[str], bool]:
        """Returns what tells whether the checkpoint says that it leaves a matrix as it is."""
        names = frozenset(f"{each}.weight" for each in self.ignored)
        patterns = [re.compile(each.removeprefix("re:")) for each in self.ignored if each.startswith("re:")]
        return lambda name: name in names or any(each.match(name.removesuffix(".weight")) for each in patterns)

    @property
    def stays_packed(self) -> bool:
        """Whether they stay as stored in memory; others are dequantized at load."""
        return self.kind == "int4" or self.quantizes_activations

    def stays_packed_on(self, device: str) -> bool:
        """The same on a device of this type: a CPU dequantizes FP8."""
        return self.stays_packed and (device == "cuda" or self.kind != "fp8")


@dataclass(frozen=True, slots=True)
class PackedBits:
    """Mean bits of a weight in the memory of a CPU, which keeps most matrices of a GGUF file packed."""

    layers: float
    head: float
    embeddings: float


def kept_in_16_bits(num_layers: int) -> frozenset[str]:
    """The matrices of layers that quantizing leaves as they are: the down projections of the first layers, at most
    three, and of the last one. They cost most of the loss (docs/quantization.md)."""
    layers = [*range(min(3, num_layers // 10)), num_layers - 1]
    return frozenset(f"model.layers.{layer}.mlp.down_proj.weight" for layer in layers)


def read_quantization(config: Mapping[str, Any]) -> StoredQuantization:
    """Reads `quantization_config`."""
    method = str(config.get("quant_method", "unknown"))
    readers = {"compressed-tensors": _read_compressed, "fp8": _read_fp8, "awq": _read_awq, "gptq": _read_gptq}
    if method not in readers:
        raise _refused(method, f"its method is none of {', '.join(METHODS)}")
    return replace(readers[method](config), ignored=_ignored(method, config))


def _ignored(method: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    listed = config.get("ignore") or config.get("modules_to_not_convert") or []
    ignored = tuple(map(str, listed)) if isinstance(listed, list) else ()
    for each in ignored:
        try:
            re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
        except re.error as error:
            raise _refused(method, f"the pattern {each!r} of what is not quantized is wrong ({error})") from None
    return ignored


def _read_compressed(config: Mapping[str, Any]) -> StoredQuantization:
    method = "compressed-tensors"
    if config.get("format") not in (None, *_FORMATS):
        raise _refused(method, f"its format {config['format']!r} is none of {', '.join(_FORMATS)}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused(method, f"its weights are stored as sparse ({sparsity})")
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        raise _refused(method, "its config_groups are empty")
    found = [_read_group(group) for group in groups]
    if len({each.kind for each in found}) > 1:
        raise _refused(method, "its config_groups mix kinds of weights")
    return found[0]


def _read_group(group: Mapping[str, Any]) -> StoredQuantization:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, number = weights.get("num_bits"), weights.get("type", "int")
    kind = _KINDS.get((str(number), int(bits or 0)))
    if kind is None:
        raise _refused("compressed-tensors", f"weights of {bits} bits ({number}) are not supported")
    if inputs is not None and (inputs.get("num_bits"), inputs.get("type", "int")) != (bits, number):
        what = f"{inputs.get('num_bits')} bits ({inputs.get('type')})"
        raise _refused("compressed-tensors", f"activations of {what} beside weights of {bits} bits are not supported")
    if kind == "int4" and inputs is not None:
        raise _refused("compressed-tensors", "activations of four bits are not supported")
    return StoredQuantization("compressed-tensors", kind, quantizes_activations=inputs is not None)


def _read_fp8(config: Mapping[str, Any]) -> StoredQuantization:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused("fp8", f"its numbers are {config['fmt']}; only e4m3 is supported")
    if config.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise _refused("fp8", f"activation_scheme {config['activation_scheme']!r} is not supported")
    if config.get("weight_block_size") not in (None, [128, 128]):
        raise _refused("fp8", f"blocks of {config['weight_block_size']} weights; only [128, 128] are supported")
    return StoredQuantization("fp8", "fp8")


def _read_awq(config: Mapping[str, Any]) -> StoredQuantization:
    _require_four_bits("awq", config.get("bits", config.get("w_bit")))
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise _refused("awq", f"its packing is {config['version']!r}; only gemm is supported")
    if not config.get("zero_point", True):
        raise _refused("awq", "it has no zero points")
    return StoredQuantization("awq", "int4", quantizes_activations=False)


def _read_gptq(config: Mapping[str, Any]) -> StoredQuantization:
    _require_four_bits("gptq", config.get("bits"))
    stored = config.get("checkpoint_format", "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise _refused("gptq", f"its checkpoint_format is {stored!r}; gptq and gptq_v2 are supported")
    return StoredQuantization("gptq", "int4", quantizes_activations=False, zero_offset=1 if stored == "gptq" else 0)


def _require_four_bits(method: str, bits: Any) -> None:
    if bits != 4:
        raise _refused(method, f"its weights have {bits} bits; only 4 are supported")


def _refused(method: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the checkpoint is quantized ({method}), and {reason}; use the original model, another quantization of it, or "
        "a GGUF file"
    )
