"""The device's state of each running sequence, written when it enters its slot and updated by the steps themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.layout import AdapterRows, StepLayout
from headrace.steps import StepPlan, TableWrites


class DeviceSlots:
    """Owns the columns that every model needs, indexed by slot; the sampler owns those of sampling."""

    def __init__(
        self, *, num_slots: int, max_model_len: int, block_size: int, device: torch.device, max_loras: int = 0
    ) -> None:
        self._max_loras = max_loras
        max_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        # Untouched memory costs nothing on the CPU, so tokens has the full width from the start.
        self.tokens = torch.empty(num_slots, max_model_len, dtype=torch.int32, device=device)
        self.lens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # tokens in `tokens`
        self.computed = torch.zeros(num_slots, dtype=torch.int64, device=device)  # leading ones in the KV cache
        self.block_tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)
        self.is_finished = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.adapters = torch.zeros(num_slots, dtype=torch.int32, device=device)  # see `SlotEntry.adapter`

    def write(self, plan: StepPlan) -> None:
        """Apply the plan's changes."""
        for entry in plan.slot_entries:
            slot, num_tokens = entry.slot, len(entry.token_ids)
            self.tokens[slot, :num_tokens] = torch.from_numpy(entry.token_ids)
            self.lens[slot] = num_tokens
            self.computed[slot] = entry.num_computed
            self.is_finished[slot] = False
            self.adapters[slot] = entry.adapter
        if plan.table_writes is not None:
            self._write_tables(plan.table_writes)

    def _write_tables(self, writes: TableWrites) -> None:
        device = self.block_tables.device
        slots, indexes = torch.from_numpy(writes.slots).to(device), torch.from_numpy(writes.indexes).to(device)
        self.block_tables[slots, indexes] = torch.from_numpy(writes.blocks).to(device, torch.int32)

    def layout(self, slots: Tensor, num_tokens: Tensor, starts: Tensor | None = None) -> tuple[Tensor, StepLayout]:
        """The token ids [T] of a step that computes `num_tokens` of each of `slots`, and their layout. `starts`: the
        first of them; None: after those already computed."""
        starts = self.computed[slots] if starts is None else starts
        if int(num_tokens.sum()) == len(slots):  # one token each
            token_slots, positions = slots, starts
        else:
            token_slots = torch.repeat_interleave(slots, num_tokens)
            first_of_slot = torch.repeat_interleave(starts - (num_tokens.cumsum(0) - num_tokens), num_tokens)
            positions = first_of_slot + torch.arange(len(token_slots), device=slots.device)
        blocks = self.block_tables[token_slots, positions // self._block_size].long()
        query_starts = torch.zeros(len(slots) + 1, dtype=torch.int32, device=slots.device)
        query_starts[1:] = num_tokens.cumsum(0)
        context_lens = (starts + num_tokens).int()
        layout = StepLayout(
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            query_starts=query_starts,
            context_lens=context_lens,
            slots=slots.int(),
            block_tables=self.block_tables,
            max_query_len=int(num_tokens.max()),
            max_context_len=int(context_lens.max()),
            adapters=self._adapter_rows(slots, token_slots),
        )
        return self.tokens[token_slots, positions], layout

    def _adapter_rows(self, slots: Tensor, token_slots: Tensor) -> AdapterRows | None:
        if not self._max_loras or not self.adapters[slots].any():
            return None
        return AdapterRows.of(self.adapters[token_slots], self._max_loras)

    def put_next(self, slots: Tensor, tokens: Tensor) -> None:
        """Write the token that each slot computes next."""
        self.tokens[slots, self.computed[slots]] = tokens.int()

    def put_drafts(self, slots: Tensor, lens: Tensor, drafts: Tensor) -> None:
        """Write drafts behind the tokens of each slot, slot after slot."""
        offsets = torch.arange(len(drafts)) - torch.repeat_interleave(lens.cumsum(0) - lens, lens)
        slots_of = torch.repeat_interleave(slots, lens)
        self.tokens[slots_of, self.lens[slots_of] + offsets] = drafts.int()

    def drafts(self, slots: Tensor, lens: Tensor) -> Tensor:
        """The drafts behind the tokens of each slot, slot after slot."""
        offsets = torch.arange(int(lens.sum())) - torch.repeat_interleave(lens.cumsum(0) - lens, lens)
        slots_of = torch.repeat_interleave(slots, lens)
        return self.tokens[slots_of, self.lens[slots_of] + offsets].long()

    def advance(self, slots: Tensor, num_tokens: Tensor) -> None:
        self.computed[slots] += num_tokens

    def append(self, slots: Tensor, tokens: Tensor, finished: Tensor) -> None:
        """Append the sampled tokens. A slot that is finished computes nothing from now on."""
        lens = self.lens[slots]
        last = self.tokens.shape[1] - 1
        self.tokens[slots, lens.clamp(max=last)] = tokens.int()
        self.lens[slots] = lens + 1
        self.is_finished[slots] = finished != 0

    def accept(self, slots: Tensor, num_tokens: Tensor, last_tokens: Tensor, finished: Tensor) -> None:
        """Append `num_tokens` of each slot: drafts, which are in their places already, and the last token."""
        lens = self.lens[slots] + num_tokens
        self.tokens[slots, lens - 1] = last_tokens.int()
        self.lens[slots] = lens
        self.computed[slots] += num_tokens
        self.is_finished[slots] = finished != 0
