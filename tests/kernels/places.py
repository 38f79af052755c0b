"""Where kernels are tested (on a GPU, and on a CPU in Triton's interpreter), and builders of their inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from headrace.kernels.layout import LayerCache, Splits, StepLayout
from headrace.kernels.reference.e3m4 import decode_e3m4, encode_e3m4


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the kernels run, in which type, and how far they may be from their references there."""

    name: str
    device: str
    dtype: torch.dtype
    error: float
    attention_error: float

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


GPU = Place("gpu", "cuda", torch.bfloat16, error=5e-3, attention_error=1e-2)
INTERPRETERS = [  # no bfloat16: the interpreter stores it as integers and multiplies these in `tl.dot`
    Place("interpreted_float16", "cpu", torch.float16, error=1e-3, attention_error=1e-3),
    Place("interpreted_float32", "cpu", torch.float32, error=1e-5, attention_error=1e-5),
]


def cases(
    names: str,
    *,
    gpu: list[tuple[Any, ...]],
    interpreted: list[tuple[Any, ...]],
    quick: list[tuple[Any, ...]] | None = None,
) -> pytest.MarkDecorator:
    """Parametrizes `place` and the named values: large cases on a GPU, small ones in each type of the slow
    interpreter. float16 is left to the slow tests, and float32 of what `quick` does not name."""
    params = [pytest.param(GPU, *values, marks=pytest.mark.gpu) for values in gpu]
    for place in INTERPRETERS:
        for values in interpreted:
            is_slow = place.dtype == torch.float16 or (quick is not None and values not in quick)
            marks = [pytest.mark.interpreted] + ([pytest.mark.slow] if is_slow else [])
            params.append(pytest.param(place, *values, marks=marks))
    return pytest.mark.parametrize(
        ["place", *names.split()], params, ids=lambda value: value.name if isinstance(value, Place) else None
    )


SHAPES = [(32, 8, 128), (24, 8, 128), (32, 8, 64), (9, 3, 64), (8, 8, 96), (16, 2, 256)]  # Hq, Hkv, D
SMALL_SHAPES = [(4, 2, 16), (3, 1, 24)]
WHOLE = Splits()
everywhere = cases("", gpu=[()], interpreted=[()])


def record_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which Triton adds the name of each kernel that it compiles from now on."""
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: compiled.append(fn.name))
    return compiled


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def make_cache(place: Place, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerCache(place.randn(*shape), place.randn(*shape))


def in_fp8(cache: LayerCache) -> LayerCache:
    """The same keys and values in FP8, with another unit for the keys of each head."""
    num_kv_heads = cache.keys.shape[1]
    units = 2.0 ** (torch.arange(num_kv_heads, device=cache.keys.device) % 4 + 10.0)
    keys = encode_e3m4(cache.keys.float() / units[:, None, None])
    return LayerCache(keys, cache.values.float().to(torch.float8_e4m3fn), key_units=units)


def keys_of(cache: LayerCache) -> torch.Tensor:  # float32 of keys in FP8
    if cache.key_units is None:
        return cache.keys.float()
    return decode_e3m4(cache.keys) * cache.key_units[:, None, None]


def make_layout(
    place: Place,
    query_lens: list[int],
    context_lens: list[int],
    block_size: int,
    splits: Splits = WHOLE,
    *,
    num_fresh: int = 0,
) -> tuple[StepLayout, int]:
    """Builds sequences with scattered blocks, decodes first and `num_fresh` fresh prefills last. Returns the layout and
    the number of blocks."""
    from headrace.runner.gpu.tiles import tiles_of

    num_seqs = len(query_lens)
    counts = [-(-n // block_size) for n in context_lens]
    order = torch.randperm(sum(counts))
    tables = torch.zeros(num_seqs, max(counts), dtype=torch.int32)
    start = 0
    for seq, count in enumerate(counts):
        tables[seq, :count] = order[start : start + count]
        start += count
    slots = torch.randperm(num_seqs).int()
    shuffled = torch.zeros_like(tables)
    shuffled[slots.long()] = tables
    positions = torch.cat([torch.arange(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)])
    token_seqs = torch.repeat_interleave(torch.arange(num_seqs), torch.tensor(query_lens))
    slot_mapping = tables[token_seqs, positions // block_size].long() * block_size + positions % block_size
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(query_lens).numpy()
    num_decodes = next((i for i, q in enumerate(query_lens) if q > 1), num_seqs)
    tiles, num_fresh_tiles = tiles_of(lens, num_decodes, num_fresh)
    return StepLayout(
        positions=positions.to(place.device),
        slot_mapping=slot_mapping.to(place.device),
        query_starts=starts.to(place.device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32).to(place.device),
        slots=slots.to(place.device),
        block_tables=shuffled.to(place.device),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        num_decodes=num_decodes,
        splits=splits,
        tiles=torch.from_numpy(tiles.copy()).int().to(place.device) if len(tiles) else None,
        num_fresh=num_fresh,
        num_fresh_tiles=num_fresh_tiles,
    ), sum(counts)
