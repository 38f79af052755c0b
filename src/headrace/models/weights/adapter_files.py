"""Reads a LoRA adapter from the files that PEFT writes, and finds the layer of each of its matrices.

base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [r, K]    piece 0 of the layer that packs q, k and v
base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight   [N, r]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import AdapterError
from headrace.models.adapter_config import WEIGHTS, AdapterConfig, adapter_files, read_adapter_config
from headrace.models.adapter_spec import TARGETS
from headrace.models.adapters import AdaptedLinear, LowRankMatrices
from headrace.models.decoder import Decoder
from headrace.models.layers import Attention, Mlp
from headrace.models.mixer import BothMixers

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[\w-]+)?\.weight")
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_FUSED = {  # modules of several pieces, whose rows are concatenated
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


Place = tuple[AdaptedLinear, int]  # a layer, and one of its pieces


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in host memory, checked against the model."""

    matrices: tuple[tuple[AdaptedLinear, dict[int, LowRankMatrices]], ...]  # of all layers, by piece

    def write(self, index: int) -> None:
        """Makes it the adapter at `index` in the tables of the model."""
        for linear, by_piece in self.matrices:
            linear.write(index, by_piece)


def read_adapter(path: str, decoder: Decoder, *, max_rank: int) -> Adapter:
    directory = Path(path).expanduser()
    config = read_adapter_config(directory, max_rank=max_rank)
    linears = adapted_linears(decoder)
    places = {name: (linear, piece) for linear in linears for piece, name in enumerate(linear.names)}
    found: dict[str, LowRankMatrices] = {}
    for module, down, up in _modules(adapter_files(directory).weights):
        names = _names(module, places, directory)
        found |= zip(
            names, _matrices(module, [places[name] for name in names], down, up, config, directory), strict=True
        )
    if not found:
        raise AdapterError(f"{directory / WEIGHTS} holds no matrices")
    return Adapter(
        tuple(
            (linear, {piece: found[name] for piece, name in enumerate(linear.names) if name in found})
            for linear in linears
        )
    )


def adapted_linears(decoder: Decoder) -> list[AdaptedLinear]:
    """All layers of a model that adapters can change."""
    found: list[object] = []
    for layer in decoder.layers:
        attention = layer.mixer.attention if isinstance(layer.mixer, BothMixers) else layer.mixer
        if isinstance(attention, Attention):
            found += [attention.qkv, attention.output]
        if isinstance(layer.mlp, Mlp):
            found += [layer.mlp.up, layer.mlp.down]
    return [linear for linear in found if isinstance(linear, AdaptedLinear)]


def _modules(path: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The two matrices of each module, in float32."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            names = _paired(opened.keys(), path)
            for module, (down, up) in names.items():
                yield module, opened.get_tensor(down), opened.get_tensor(up)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} cannot be read as safetensors ({error}); fetch the adapter again") from error


def _paired(names: Iterable[str], path: Path) -> dict[str, tuple[str, str]]:
    """The names of A and B of each module."""
    sides: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None:
            raise AdapterError(f"{path} has the tensor {name!r}, which is no matrix of LoRA; it would be ignored")
        sides.setdefault(match["module"], {})[match["side"]] = name
    for module, found in sides.items():
        if len(found) != 2:
            raise AdapterError(f"{path} has lora_{next(iter(found))} of {module} alone; fetch the adapter again")
    return {module: (found["A"], found["B"]) for module, found in sides.items()}


def _names(module: str, places: Collection[str], directory: Path) -> list[str]:
    """Our names of the matrices that a module is."""
    match = _IN_LAYER.fullmatch(module)
    names = [] if match is None else [f"model.layers.{match[1]}.{part}" for part in _FUSED.get(match[2], (match[2],))]
    if not names or any(name not in places for name in names):
        raise AdapterError(f"{directory} changes {module}: {_why_not(module)}; merge the adapter into the model")
    return names


def _why_not(module: str) -> str:
    if "expert" in module or ".router" in module or module.endswith(".gate"):
        return "adapters of experts and routers are not supported"
    if "embed" in module or "lm_head" in module:
        return "adapters of embeddings and of the head are not supported"
    return f"this model has no such matrix that adapters can change (they can change {', '.join(TARGETS)})"


def _matrices(
    module: str, places: Sequence[Place], down: Tensor, up: Tensor, config: AdapterConfig, directory: Path
) -> list[LowRankMatrices]:
    """Those of each piece, in the type of the tables."""
    sizes = [linear.weights.piece_sizes[piece] for linear, piece in places]
    width, rank = places[0][0].weights.down.shape[-1], config.rank_of(module)
    expected = [rank, width], [sum(sizes), rank]
    if (list(down.shape), list(up.shape)) != expected:
        raise AdapterError(
            f"{directory}: {module} has matrices of shapes {list(down.shape)} and {list(up.shape)}; rank {rank} and "
            f"this model imply {expected[0]} and {expected[1]}; was the adapter made for another model?"
        )
    down, up = down.float(), up.float() * config.scale_of(module, rank)
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise AdapterError(f"{directory}: {module} has values that are not finite (NaN or infinity)")
    dtype = places[0][0].weights.down.dtype
    return [
        LowRankMatrices(down.to(dtype), linear.placed(piece, part).to(dtype))
        for (linear, piece), part in zip(places, up.split(sizes), strict=True)
    ]
