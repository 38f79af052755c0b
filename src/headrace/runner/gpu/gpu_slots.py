"""The slots on the GPU: the state of each running sequence, which steps read and update without the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.gpu import slots as slot_kernels
from headrace.kernels.layout import AdapterRows
from headrace.runner.gpu.ticket import ResultRing
from headrace.runner.gpu.upload import Upload
from headrace.runner.shape import RunnerShape
from headrace.steps import SlotEntry


class GpuSlots:
    """Owns the columns that every model needs, indexed by slot; the sampler owns those of sampling.

    The last slot is padding: graphs of a fixed size are filled up with it. Its table names the last block of the KV
    cache, which is padding too.
    """

    def __init__(self, shape: RunnerShape, device: torch.device) -> None:
        self.num_slots = shape.max_num_seqs + 1
        self.max_blocks = -(-shape.max_model_len // shape.block_size)
        self.padding_slot = shape.max_num_seqs
        self.tokens = torch.zeros(self.num_slots, shape.max_model_len + 1, dtype=torch.int32, device=device)
        self.lens = torch.ones(self.num_slots, dtype=torch.int64, device=device)  # tokens in `tokens`
        self.computed = torch.zeros(self.num_slots, dtype=torch.int64, device=device)  # leading ones in the KV cache
        self.block_tables = torch.full(
            (self.num_slots, self.max_blocks), shape.num_blocks, dtype=torch.int32, device=device
        )
        self.is_finished = torch.ones(self.num_slots, dtype=torch.bool, device=device)
        self.adapters = torch.zeros(self.num_slots, dtype=torch.int32, device=device)  # see `SlotEntry.adapter`
        self._max_loras = 0 if shape.adapters is None else shape.adapters.max_loras

    def put(self, slot_entries: tuple[SlotEntry, ...], upload: Upload) -> list[slice]:
        """Add slot entries to an upload; `enter` writes them once it is sent."""
        if not slot_entries:
            return []
        lens = np.array([len(entry.token_ids) for entry in slot_entries])
        columns = np.array(
            [
                [entry.slot for entry in slot_entries],
                lens,
                [entry.num_computed for entry in slot_entries],
                np.cumsum(lens) - lens,
            ]
        )
        places = [upload.put(columns), upload.put(np.concatenate([entry.token_ids for entry in slot_entries]))]
        if self._max_loras:
            places.append(upload.put(np.array([entry.adapter for entry in slot_entries])))
        return places

    def enter(self, slot_entries: tuple[SlotEntry, ...], places: list[slice], upload: Upload) -> None:
        columns, prompts, *adapters = (upload.get(place) for place in places)
        slot_kernels.enter_slot(
            columns.view(4, -1),
            prompts,
            max(len(entry.token_ids) for entry in slot_entries),
            self.tokens,
            self.lens,
            self.computed,
            self.is_finished,
        )
        if adapters:
            self.adapters[columns.view(4, -1)[0].long()] = adapters[0]

    def adapter_rows(self, slots: Tensor) -> AdapterRows:
        """Which rows of a step have which adapter, by the slot of each row."""
        return AdapterRows.of(self.adapters[slots.long()], self._max_loras)

    def put_next(self, slots: Tensor, tokens: Tensor) -> None:
        """Write the token that each slot computes next, which a later stage of the pipeline has sampled."""
        slots_long = slots.long()
        self.tokens[slots_long, self.computed[slots_long]] = tokens

    def advance(self, slots: Tensor, num_tokens: Tensor | int) -> None:
        """Count the tokens of a step as computed, except for slots that had ended."""
        slots_long = slots.long()
        self.computed[slots_long] += num_tokens * ~self.is_finished[slots_long]

    def put_drafts(self, slots: Tensor, positions: Tensor, drafts: Tensor) -> None:
        """Write drafts [D] behind the tokens of their slots [D]."""
        self.tokens[slots.long(), positions.long()] = drafts

    def accept(
        self,
        slots: Tensor,
        num_rows: Tensor,
        sampled: Tensor,
        flags: Tensor,
        *,
        end_len: Tensor,
        stop_token_ids: Tensor,
    ) -> Tensor:
        """Append what the rows [R] sampled as far as it follows the drafts of their slots; returns the `out` of
        `accept_drafts`."""
        out = torch.empty(3, sampled.shape[0], dtype=torch.int32, device=slots.device)
        slot_kernels.accept_drafts(
            slots,
            num_rows,
            sampled,
            flags,
            self.tokens,
            self.lens,
            self.computed,
            self.is_finished,
            end_len,
            stop_token_ids,
            out,
        )
        return out

    def append(
        self,
        slots: Tensor,
        sampled: Tensor,
        flags: Tensor,
        *,
        end_len: Tensor,
        stop_token_ids: Tensor,
        advances: bool,
        ring: ResultRing | None = None,
    ) -> Tensor:
        """Append the sampled tokens [B]; returns [2, B] int32: tokens, and the state of each slot
        (`StepResult.finished`). `advances`: also count one token of each slot as computed. `ring`: also where results
        go, in pinned memory; it is returned."""
        out = torch.empty(2, slots.shape[0], dtype=torch.int32, device=slots.device) if ring is None else ring.places
        slot_kernels.append_tokens(
            slots,
            sampled,
            flags,
            self.tokens,
            self.lens,
            self.is_finished,
            end_len,
            stop_token_ids,
            out,
            advances=self.computed if advances else None,
            turn=None if ring is None else ring.turn,
        )
        return out
