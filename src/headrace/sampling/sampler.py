"""The sampler: settings go into a row once, at admission; a step then draws for any rows without work per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.columns import Columns
from headrace.sampling.draw import draw
from headrace.sampling.feature import Batch, Feature, Terms
from headrace.sampling.features import FEATURES, FILTERS, FINISHES, LOGPROBS, MASKS, PLAIN
from headrace.sampling.logprobs import SampledLogprobs
from headrace.steps import BROKEN, IntArray
from headrace.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step drew, in the order of its rows."""

    tokens: Tensor  # [R] int64; 0 where a row is broken
    finished: Tensor  # [R] uint8, one of steps.GOES_ON, STOPPED, FULL, BROKEN (its logits hold a NaN or no finite top)
    logprobs: SampledLogprobs | None  # of the rows that asked


class Sampler:
    """Owns the sampling settings of all rows, on the device, and knows on the host which row uses which feature.

    A row's token depends on its logits, its settings, its seed and its length: not on its number, nor on other rows.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        columns = [column for feature in FEATURES for column in feature.columns]
        self._columns = Columns(columns, max_rows=max_rows, device=self._device)
        self._users = np.zeros((len(FEATURES), max_rows), dtype=np.bool_)
        self._users_of_more = np.zeros(max_rows, dtype=np.bool_)  # than PLAIN

    def admit(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_len: int,
        end_len: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Gives a row the settings of the sequence that moves in. `end_len` is the length at which it ends."""
        stops = tuple(dict.fromkeys(token for token in stop_token_ids if token < self._vocab_size))
        terms = Terms(params, seed, prompt_len, end_len, stops)
        used = [feature.is_used(terms) for feature in FEATURES]
        settings: dict[str, Any] = {}
        for feature, is_used in zip(FEATURES, used, strict=True):
            settings.update(feature.settings(terms) if is_used else {})
        self._columns.write(row, settings)
        self._users[:, row] = used
        self._users_of_more[row] = any(is_used and f not in PLAIN for f, is_used in zip(FEATURES, used, strict=True))

    @property
    def columns(self) -> dict[str, Tensor]:
        """The rows' settings on the device."""
        return self._columns.tensors

    def send(self) -> None:
        """Brings admitted rows' settings to the device."""
        self._columns.send()

    def release(self, row: int) -> None:
        """The row is empty: its features cost nothing any more."""
        self._columns.write(row, {})
        self._users[:, row] = False
        self._users_of_more[row] = False

    def is_plain(self, rows: IntArray) -> bool:
        """Whether these rows need no more than temperature, seed and the checks for their end."""
        return not (self._users_of_more.any() and self._users_of_more[rows].any())

    def sample(self, logits: Tensor, rows: Tensor, lens: Tensor, *, host_rows: IntArray | None = None) -> Sampled:
        """Draws the next token of each row.

        logits [R, V] may be overwritten; rows [R] int64; lens [R] int64, the tokens each sequence has before this one.
        `host_rows` are the rows as the host knows them; off the CPU, without them, each feature in use applies to all.
        """
        assert rows.dtype == lens.dtype == torch.int64
        self._columns.send()
        batch = Batch(logits.contiguous(), rows, lens, self._columns.tensors)
        users = self._find_users(rows, host_rows)
        captured = LOGPROBS.capture(batch, users[LOGPROBS]) if LOGPROBS in users else None
        for mask in MASKS:
            if mask in users:
                mask.apply(batch, users[mask])
        tokens, is_valid = draw(batch, [(feature, users[feature]) for feature in FILTERS if feature in users])
        finished = torch.zeros_like(tokens, dtype=torch.uint8)
        for check in FINISHES:
            if check in users:
                check.mark(batch, users[check], tokens, finished)
        finished.masked_fill_(~is_valid, BROKEN)
        if captured is None:
            return Sampled(tokens, finished, None)
        return Sampled(tokens, finished, self._collect_logprobs(captured, rows, tokens, users[LOGPROBS]))

    def _find_users(self, rows: Tensor, host_rows: IntArray | None) -> dict[Feature, Tensor]:
        """For each feature in use, where in the batch its users stand. The device's rows are not waited for."""
        if host_rows is None and self._device.type == "cpu":
            host_rows = rows.numpy()
        if host_rows is None:
            everyone = torch.arange(rows.shape[0], device=self._device)
            return {feature: everyone for feature, users in zip(FEATURES, self._users, strict=True) if users.any()}
        uses = self._users[:, host_rows]  # [features, R]
        places = {feature: np.flatnonzero(users) for feature, users in zip(FEATURES, uses, strict=True)}
        return {feature: torch.from_numpy(users).to(self._device) for feature, users in places.items() if users.size}

    def _collect_logprobs(self, captured: Tensor, rows: Tensor, tokens: Tensor, users: Tensor) -> SampledLogprobs:
        num_asked = self._columns.host("num_logprobs")
        if self._device.type == "cpu":
            num_asked = num_asked[rows.numpy()]
        return LOGPROBS.collect(captured, rows[users], tokens[users], num_top=int(num_asked.max()))
