"""The device's state of each running sequence, written when it enters its slot and updated by the steps themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import ops
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
        rows = ops.lay_out_rows(slots, num_tokens, starts, self.tokens, self.block_tables, self._block_size)
        layout = StepLayout(
            positions=rows.positions,
            slot_mapping=rows.slot_mapping,
            query_starts=rows.query_starts,
            context_lens=rows.context_lens,
            slots=slots.int(),
            block_tables=self.block_tables,
            max_query_len=int(num_tokens.numpy().max()),
            max_context_len=int(rows.context_lens.numpy().max()),
            adapters=self._adapter_rows(slots, num_tokens),
        )
        return rows.token_ids, layout

    def _adapter_rows(self, slots: Tensor, num_tokens: Tensor) -> AdapterRows | None:
        if not self._max_loras or not self.adapters[slots].any():
            return None
        return AdapterRows.of(self.adapters[torch.repeat_interleave(slots, num_tokens)], self._max_loras)

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

    def append(
        self,
        slots: Tensor,
        num_rows: Tensor,
        sampled: Tensor,
        flags: Tensor,
        *,
        end_len: Tensor,
        stop_token_ids: Tensor,
    ) -> ops.Appended:
        """Append what the rows [R] sampled, as far as it follows the drafts of their slots. A slot that is finished
        computes nothing from now on."""
        columns = self.tokens, self.lens, self.is_finished, end_len, stop_token_ids
        return ops.append_tokens(slots, num_rows, sampled, flags, *columns)
