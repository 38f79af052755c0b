"""Builds the layouts of steps with prompts, from the host's plan and the device's slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.gpu import flash
from headrace.kernels.layout import AdapterRows, Gathering, LayerCache, SharedPrefixes, Splits, StepLayout
from headrace.models.decoder import Decoder
from headrace.runner.gpu.context_gather import groups_of, is_gather_faster, max_gathered_tokens
from headrace.runner.gpu.prefix_groups import PrefixGroups
from headrace.runner.gpu.prefix_sharing import seqs_per_tile
from headrace.runner.gpu.tiles import tiles_of
from headrace.runner.gpu.upload import Upload
from headrace.runner.shape import RunnerShape
from headrace.steps import IntArray, StepPlan


class OrderedPlan(NamedTuple):
    plan: StepPlan
    num_decodes: int
    num_fresh: int  # fresh prefills


def ordered(plan: StepPlan, positions: IntArray) -> OrderedPlan:
    """Puts decode slots first, the longest context first, and fresh prefills last. `positions`: computed tokens of the
    plan's slots."""
    is_prefill = plan.num_tokens > 1
    num_decodes = int(np.argmax(is_prefill)) if is_prefill.any() else len(is_prefill)
    is_fresh = positions == 0
    is_fresh[:num_decodes] = False
    chunks = num_decodes + np.argsort(is_fresh[num_decodes:], kind="stable")
    order = np.concatenate([np.argsort(-positions[:num_decodes], kind="stable"), chunks])
    in_order = replace(plan, slots=plan.slots[order], num_tokens=plan.num_tokens[order], samples=plan.samples[order])
    return OrderedPlan(in_order, num_decodes, int(is_fresh.sum()))


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The order of a step's slots: decode, then prefill continuations, then fresh prefills."""

    num_decodes: int  # decode
    num_fresh: int
    context_lens: IntArray  # of each slot, with its tokens of this step
    groups: PrefixGroups | None  # of decode slots that share a prefix


class StepLayouts:
    """Builds step layouts. The tensors are the runner's own columns, read when a step's kernels run."""

    def __init__(
        self,
        decoder: Decoder,
        shape: RunnerShape,
        caches: list[LayerCache],
        tokens: Tensor,
        computed: Tensor,
        block_tables: Tensor,
        splits: Callable[[int], Splits],
    ) -> None:
        self._spec, self._shape = decoder.spec, shape
        self._tokens, self._computed, self._block_tables = tokens, computed, block_tables
        self._splits = splits
        self._cache_bytes = caches[0].keys.element_size()
        self._seqs_per_tile = seqs_per_tile(decoder.spec, caches[0].keys.dtype)
        self._uses_flash = shape.uses_flash
        has_keys = decoder.spec.latent is None  # latents are read from their blocks
        self._gathers = (
            shape.uses_flash and has_keys and flash.is_made_for(decoder.dtype, decoder.spec.head_dim, decoder.device)
        )
        self._max_gathered = max_gathered_tokens(shape.max_num_batched_tokens, decoder.max_len)

    def of_arrays(self, arrays: list[Tensor], num_decodes: int, max_query_len: int) -> tuple[StepLayout, Tensor]:
        """The layout and the token ids of a step, from the arrays that `PrefillShape.counts` describes."""
        token_slots, offsets, slots, num_tokens, starts, tiles = arrays
        token_slots_long = token_slots.long()
        positions = self._computed[token_slots_long] + offsets
        blocks = self._block_tables[token_slots_long, positions // self._shape.block_size].long()
        layout = StepLayout(
            positions=positions,
            slot_mapping=blocks * self._shape.block_size + positions % self._shape.block_size,
            query_starts=starts,
            context_lens=torch.where(num_tokens > 0, self._computed[slots.long()] + num_tokens, 0).int(),
            slots=slots,
            block_tables=self._block_tables,
            max_query_len=max_query_len,
            max_context_len=self._shape.max_model_len,
            num_decodes=num_decodes,
            splits=self._splits(max(1, num_decodes)),
            tiles=tiles.view(-1, 2),
        )
        return layout, self._tokens[token_slots_long, positions]

    def of_step(
        self,
        plan: StepPlan,
        order: StepOrder,
        upload: Upload,
        adapter_rows: Callable[[Tensor], AdapterRows] | None = None,
    ) -> tuple[StepLayout, Tensor]:
        """The same for a plan, with shared prefixes and gathered contexts. `adapter_rows`: the adapters of tokens by
        their slots, if one of them has an adapter."""
        starts = np.concatenate([[0], np.cumsum(plan.num_tokens)])
        token_slots = np.repeat(plan.slots, plan.num_tokens)
        offsets = np.arange(len(token_slots)) - np.repeat(starts[:-1], plan.num_tokens)
        num_fresh = order.num_fresh if self._uses_flash else 0  # own kernels compute them like continuations
        tiles, num_fresh_tiles = tiles_of(plan.num_tokens, order.num_decodes, num_fresh)
        arrays = (token_slots, offsets, plan.slots, plan.num_tokens, starts, tiles)
        places = [upload.put(array) for array in arrays]
        groups = order.groups
        shared = [] if groups is None else [upload.put(a) for a in (groups.lens, groups.tile_seqs, groups.tile_lens)]
        gatherings = self._gatherings(plan, order, upload)
        upload.send()
        prefixes = None
        if shared:
            lens, seqs, tile_lens = (upload.get(place) for place in shared)
            prefixes = SharedPrefixes(lens, seqs.view(-1, self._seqs_per_tile), tile_lens)
        on_device = [upload.get(place) for place in places]
        layout, token_ids = self.of_arrays(on_device, order.num_decodes, int(plan.num_tokens.max()))
        layout = replace(
            layout,
            shared=prefixes,
            num_fresh=num_fresh,
            num_fresh_tiles=num_fresh_tiles,
            gatherings=gatherings,
            adapters=None if adapter_rows is None else adapter_rows(on_device[0]),
        )
        return layout, token_ids

    def _gatherings(self, plan: StepPlan, order: StepOrder, upload: Upload) -> tuple[Gathering, ...]:
        """Gather the contexts of the prefill continuations, if that is faster."""
        spec, continued = self._spec, slice(order.num_decodes, len(plan.slots) - order.num_fresh)
        context_lens = order.context_lens[continued]
        if not self._gathers or not is_gather_faster(
            plan.num_tokens[continued],
            context_lens,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            cache_bytes=self._cache_bytes,
        ):
            return ()
        gatherings = []
        for group in groups_of(context_lens, self._max_gathered):
            lens = context_lens[group]
            starts = upload.get(upload.put(np.concatenate([[0], np.cumsum(lens)])))
            gatherings.append(Gathering(order.num_decodes + group.start, starts, int(lens.sum()), int(lens.max())))
        return tuple(gatherings)
