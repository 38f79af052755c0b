"""The sampler. Settings are written once, when a sequence enters a slot; a step has no host work per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.columns import Columns, sent
from headrace.sampling.feature import Batch, Feature, SequenceSettings
from headrace.sampling.features import CHANGES, FEATURES, FILTERS, GRAMMAR, LOGPROBS, PLAIN, TEMPERATURE
from headrace.sampling.grammar import PlacedMasks
from headrace.sampling.logprobs import SampledLogprobs
from headrace.sampling.sample import sample
from headrace.steps import IntArray
from headrace.types import SamplingParams

_NARROWING = frozenset(FILTERS) - {TEMPERATURE}


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that a step sampled, in the order of its rows."""

    tokens: Tensor  # [R] int64; 0 in a broken row
    flags: Tensor  # [R] uint8: steps.BROKEN where a logit is NaN or the largest is not finite, else 0
    logprobs: SampledLogprobs | None  # of the rows that asked for them


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """The rows of a batch that use a feature."""

    rows: Tensor  # [Q] int64
    host_rows: IntArray | None  # the same on the host, if known


class Sampler:
    """Owns the sampling settings of all slots, on the device, and knows on the host which slot uses which feature.

    A token depends on its sequence's logits, settings, seed and tokens: not on the slot, nor on other sequences.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu", *, tokens: Tensor | None = None
    ) -> None:
        """`tokens` [num_slots, max_len] int32 are the sequences' own, kept up to date by the runner; some features
        read them."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tokens = tokens
        columns = [column.for_vocabulary(vocab_size) for feature in FEATURES for column in feature.columns]
        self._columns = Columns(columns, num_slots=num_slots, device=self._device)
        self._uses = np.zeros((len(FEATURES), num_slots), dtype=np.bool_)  # which slots use which feature
        self._uses_more_than_plain = np.zeros(num_slots, dtype=np.bool_)
        self._uses_filters = np.zeros(num_slots, dtype=np.bool_)  # other than the temperature
        self._needs_masks = np.zeros(num_slots, dtype=np.bool_)  # in every step
        self._prompt_lens = np.zeros(num_slots, dtype=np.int64)
        self._last_found: tuple[IntArray, dict[Feature, FeatureRows]] | None = None

    def enter_slot(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_len: int,
        end_len: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Writes the settings of the sequence that enters a slot. `end_len` is the length at which it ends."""
        stops = tuple(dict.fromkeys(token for token in stop_token_ids if token < self._vocab_size))
        sequence = SequenceSettings(params, seed, prompt_len, end_len, stops, self._vocab_size)
        used = [feature.is_used(sequence) for feature in FEATURES]
        settings: dict[str, Any] = {}
        for feature, is_used in zip(FEATURES, used, strict=True):
            settings.update(feature.settings(sequence) if is_used else {})
        self._columns.write(slot, settings)
        self._prompt_lens[slot] = prompt_len
        self._last_found = None
        self._uses[:, slot] = used
        in_use = {feature for feature, is_used in zip(FEATURES, used, strict=True) if is_used}
        self._uses_more_than_plain[slot] = not in_use <= PLAIN
        self._uses_filters[slot] = bool(in_use & _NARROWING)
        self._needs_masks[slot] = GRAMMAR.needs_masks(params)

    @property
    def columns(self) -> dict[str, Tensor]:
        """The settings of all slots, on the device."""
        return self._columns.tensors

    def send(self) -> None:
        """Sends the settings of newly entered slots to the device."""
        self._columns.send()

    def is_plain(self, slots: IntArray) -> bool:
        """Tells whether these slots need only temperature, filters, a seed and ends."""
        return not (self._uses_more_than_plain.any() and self._uses_more_than_plain[slots].any())

    def has_filters(self, slots: IntArray) -> bool:
        """Tells whether any of these slots has a min_p, top_k or top_p."""
        return bool(self._uses_filters.any() and self._uses_filters[slots].any())

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        lens: Tensor,
        *,
        host_slots: IntArray | None = None,
        host_lens: IntArray | None = None,
        masks: PlacedMasks | None = None,
    ) -> Sampled:
        """Samples the next token of each row.

        logits [R, V] may be overwritten; slots [R] int64; lens [R] int64, the tokens of each sequence before this one.
        `host_slots` and `host_lens` (which may be too large) are the same on the host, if known; off the CPU, without
        them, each feature in use is applied to all rows. `masks` belong to the rows under a grammar.
        """
        assert slots.dtype == lens.dtype == torch.int64
        self._columns.send()
        if self._device.type == "cpu":
            host_slots, host_lens = slots.numpy() if host_slots is None else host_slots, lens.numpy()
        batch = Batch(logits.contiguous(), slots, lens, self._columns.tensors, self._tokens)
        in_use = self._rows_of_features(slots, host_slots)
        rows = {feature: found.rows for feature, found in in_use.items()}
        is_changed = masks is not None or any(change in in_use for change in CHANGES)
        captured = LOGPROBS.capture(batch, rows[LOGPROBS], is_changed=is_changed) if LOGPROBS in in_use else None
        assert masks is not None or host_slots is None or not self._needs_masks[host_slots].any(), (
            "sequences under a grammar need their masks"
        )
        if masks is not None:
            GRAMMAR.apply(batch, masks)
        for change in CHANGES:
            if change in in_use:
                change.apply(self._with_lens(batch, in_use[change], host_slots, host_lens), rows[change])
        tokens, flags = sample(batch, [(feature, rows[feature]) for feature in FILTERS if feature in in_use])
        if captured is None:
            return Sampled(tokens, flags, None)
        return Sampled(tokens, flags, self._collect_logprobs(captured, slots, tokens, rows[LOGPROBS]))

    def sample_drafts(self, logits: Tensor, slots: Tensor, lens: Tensor) -> Tensor:
        """Samples tokens that are verified later, with temperature, filters and seed only. Arguments as in `sample`."""
        self._columns.send()
        batch = Batch(logits.contiguous(), slots, lens, self._columns.tensors, self._tokens)
        in_use = self._rows_of_features(slots, slots.numpy() if self._device.type == "cpu" else None)
        return sample(batch, [(feature, in_use[feature].rows) for feature in FILTERS if feature in in_use])[0]

    def _rows_of_features(self, slots: Tensor, host_slots: IntArray | None) -> dict[Feature, FeatureRows]:
        """Finds the rows that use each feature in use. Does not wait for the device."""
        if host_slots is None:
            all_rows = FeatureRows(torch.arange(slots.shape[0], device=self._device), None)
            return {feature: all_rows for feature, uses in zip(FEATURES, self._uses, strict=True) if uses.any()}
        if self._last_found is not None and self._last_found[0] is host_slots:
            return self._last_found[1]
        uses = self._uses[:, host_slots]  # [features, R]
        rows = {feature: np.flatnonzero(uses_it) for feature, uses_it in zip(FEATURES, uses, strict=True)}
        found = {feature: FeatureRows(sent(each, self._device), each) for feature, each in rows.items() if each.size}
        self._last_found = (host_slots, found)
        return found

    def _with_lens(
        self, batch: Batch, used_by: FeatureRows, host_slots: IntArray | None, host_lens: IntArray | None
    ) -> Batch:
        """Returns the batch with the largest lengths among the rows that use a feature."""
        if self._tokens is None:
            return batch
        if used_by.host_rows is None or host_slots is None or host_lens is None:
            width = self._tokens.shape[1]
            return replace(batch, max_len=width, max_answer_len=width)
        lens = host_lens[used_by.host_rows]
        answered = lens - self._prompt_lens[host_slots[used_by.host_rows]]
        return replace(batch, max_len=int(lens.max()), max_answer_len=int(answered.max()))

    def _collect_logprobs(self, captured: Tensor, slots: Tensor, tokens: Tensor, rows: Tensor) -> SampledLogprobs:
        num_asked = self._columns.host("num_logprobs")
        if self._device.type == "cpu":
            num_asked = num_asked[slots.numpy()]
        named = self._columns.tensors.get("logprob_token_ids")
        return LOGPROBS.collect(captured, slots[rows], tokens[rows], num_top=int(num_asked.max()), named=named)
