"""The sampler: settings go into a row once, at admission; a step then draws for any rows without work per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.columns import Columns, sent
from headrace.sampling.feature import Batch, Feature, SequenceSettings
from headrace.sampling.features import CHANGES, FEATURES, FILTERS, FINISHES, GRAMMAR, LOGPROBS, PLAIN, TEMPERATURE
from headrace.sampling.grammar import PlacedMasks
from headrace.sampling.logprobs import SampledLogprobs
from headrace.sampling.sample import sample
from headrace.steps import BROKEN, IntArray
from headrace.types import SamplingParams

_NARROWING = frozenset(FILTERS) - {TEMPERATURE}


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step drew, in the order of its rows."""

    tokens: Tensor  # [R] int64; 0 where a row is broken
    finished: Tensor  # [R] uint8, one of steps.GOES_ON, STOPPED, FULL, BROKEN (its logits hold a NaN or no finite top)
    logprobs: SampledLogprobs | None  # of the rows that asked


@dataclass(frozen=True, slots=True)
class Users:
    """Where in a batch those rows stand that use a feature."""

    places: Tensor  # [Q] int64
    host_places: IntArray | None  # the same, as far as the host knows


class Sampler:
    """Owns the sampling settings of all rows, on the device, and knows on the host which row uses which feature.

    A row's token depends on its logits, its settings, its seed and its tokens: not on its number, nor on other rows.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu", *, tokens: Tensor | None = None
    ) -> None:
        """`tokens` [max_rows, max_len] int32 are the rows' own, kept up by the runner; some features look at them."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tokens = tokens
        columns = [column.for_vocabulary(vocab_size) for feature in FEATURES for column in feature.columns]
        self._columns = Columns(columns, num_slots=num_slots, device=self._device)
        self._users = np.zeros((len(FEATURES), num_slots), dtype=np.bool_)
        self._users_of_more = np.zeros(num_slots, dtype=np.bool_)  # than PLAIN
        self._users_of_filters = np.zeros(num_slots, dtype=np.bool_)  # other than the temperature
        self._prompt_lens = np.zeros(num_slots, dtype=np.int64)
        self._last_found: tuple[IntArray, dict[Feature, Users]] | None = None

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_len: int,
        end_len: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Gives a row the settings of the sequence that moves in. `end_len` is the length at which it ends."""
        stops = tuple(dict.fromkeys(token for token in stop_token_ids if token < self._vocab_size))
        sequence = SequenceSettings(params, seed, prompt_len, end_len, stops, self._vocab_size)
        used = [feature.is_used(sequence) for feature in FEATURES]
        settings: dict[str, Any] = {}
        for feature, is_used in zip(FEATURES, used, strict=True):
            settings.update(feature.settings(sequence) if is_used else {})
        self._columns.write(slot, settings)
        self._prompt_lens[slot] = prompt_len
        self._last_found = None
        self._users[:, slot] = used
        in_use = {feature for feature, is_used in zip(FEATURES, used, strict=True) if is_used}
        self._users_of_more[slot] = not in_use <= PLAIN
        self._users_of_filters[slot] = bool(in_use & _NARROWING)

    @property
    def columns(self) -> dict[str, Tensor]:
        """The rows' settings on the device."""
        return self._columns.tensors

    def send(self) -> None:
        """Brings admitted rows' settings to the device."""
        self._columns.send()

    def release(self, slot: int) -> None:
        """The row is empty: its features cost nothing any more."""
        self._columns.write(slot, {})
        self._last_found = None
        self._users[:, slot] = False
        self._users_of_more[slot] = self._users_of_filters[slot] = False

    def is_plain(self, slots: IntArray) -> bool:
        """Whether these rows need no more than temperature, filters, seed and the checks for their end."""
        return not (self._users_of_more.any() and self._users_of_more[slots].any())

    def has_filters(self, slots: IntArray) -> bool:
        """Whether any of these rows has a min_p, top_k or top_p."""
        return bool(self._users_of_filters.any() and self._users_of_filters[slots].any())

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
        """Draws the next token of each row.

        logits [R, V] may be overwritten; rows [R] int64; lens [R] int64, the tokens each sequence has before this one.
        `host_rows` and `host_lens` (which may be too large) are the same as far as the host knows; off the CPU, without
        them, each feature in use applies to all. `masks` are those of rows under a grammar.
        """
        assert slots.dtype == lens.dtype == torch.int64
        self._columns.send()
        if self._device.type == "cpu":
            host_slots, host_lens = slots.numpy(), lens.numpy()
        batch = Batch(logits.contiguous(), slots, lens, self._columns.tensors, self._tokens)
        users = self._find_users(slots, host_slots)
        places = {feature: found.places for feature, found in users.items()}
        is_changed = masks is not None or any(change in users for change in CHANGES)
        captured = LOGPROBS.capture(batch, places[LOGPROBS], is_changed=is_changed) if LOGPROBS in users else None
        assert masks is not None or host_slots is None or GRAMMAR not in users, "rows under a grammar need their masks"
        if masks is not None:
            GRAMMAR.apply(batch, masks)
        for change in CHANGES:
            if change in users:
                change.apply(self._bounded(batch, users[change], host_slots, host_lens), places[change])
        tokens, is_valid = sample(batch, [(feature, places[feature]) for feature in FILTERS if feature in users])
        finished = torch.zeros_like(tokens, dtype=torch.uint8)
        for check in FINISHES:
            if check in users:
                check.mark(batch, places[check], tokens, finished)
        finished.masked_fill_(~is_valid, BROKEN)
        if captured is None:
            return Sampled(tokens, finished, None)
        return Sampled(tokens, finished, self._collect_logprobs(captured, slots, tokens, places[LOGPROBS]))

    def _find_users(self, slots: Tensor, host_slots: IntArray | None) -> dict[Feature, Users]:
        """For each feature in use, where in the batch its users stand. The device's rows are not waited for."""
        if host_slots is None:
            everyone = Users(torch.arange(slots.shape[0], device=self._device), None)
            return {feature: everyone for feature, users in zip(FEATURES, self._users, strict=True) if users.any()}
        if self._last_found is not None and self._last_found[0] is host_slots:
            return self._last_found[1]
        uses = self._users[:, host_slots]  # [features, R]
        places = {feature: np.flatnonzero(users) for feature, users in zip(FEATURES, uses, strict=True)}
        found = {feature: Users(sent(users, self._device), users) for feature, users in places.items() if users.size}
        self._last_found = (host_slots, found)
        return found

    def _bounded(self, batch: Batch, users: Users, host_slots: IntArray | None, host_lens: IntArray | None) -> Batch:
        """The batch, with the most tokens that a user has."""
        if self._tokens is None:
            return batch
        if users.host_places is None or host_slots is None or host_lens is None:
            width = self._tokens.shape[1]
            return replace(batch, max_len=width, max_answer_len=width)
        lens = host_lens[users.host_places]
        answered = lens - self._prompt_lens[host_slots[users.host_places]]
        return replace(batch, max_len=int(lens.max()), max_answer_len=int(answered.max()))

    def _collect_logprobs(self, captured: Tensor, slots: Tensor, tokens: Tensor, users: Tensor) -> SampledLogprobs:
        num_asked = self._columns.host("num_logprobs")
        if self._device.type == "cpu":
            num_asked = num_asked[slots.numpy()]
        return LOGPROBS.collect(captured, slots[users], tokens[users], num_top=int(num_asked.max()))
