"""The parameters of a workload. Equal specs make equal requests; the hash of a spec is in every record."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any, Literal, get_args

from headrace.errors import ConfigError

Ends = Literal["exact", "eos", "random"]
ENDS: tuple[str, ...] = get_args(Ends)

HASH_LEN = 16  # hexadecimal digits
# Random token ids: not special tokens at the start, and in the vocabulary of all models with at least 100,000 tokens.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 100_000


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """`None` means: as the named workload has it."""

    name: str
    num_requests: int | None = None
    seed: int | None = None
    input_len: int | None = None  # tokens: fixed, or the mean around which `spread` varies
    output_len: int | None = None
    spread: float = 0.0  # share by which lengths vary around their mean, uniformly
    prefix_len: int | None = None  # tokens of the shared prefix of `random`
    num_prefixes: int | None = None  # how many different shared prefixes
    prefix_share: float = 1.0  # share of the requests that have a shared prefix
    ends: Ends = "exact"
    temperature: float = 1.0
    first_token_id: int = FIRST_TOKEN_ID
    last_token_id: int = LAST_TOKEN_ID
    data_path: str | None = None
    data_digest: str | None = None  # of the file's bytes: the path alone says nothing
    uses_lengths_only: bool = False  # of the file: prompts are random tokens of the same lengths

    def __post_init__(self) -> None:
        if self.ends not in ENDS:
            raise ConfigError(f"ends must be one of {', '.join(ENDS)}, got {self.ends!r}")
        for name in ("num_requests", "input_len", "output_len", "num_prefixes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of a workload must be at least 1, got {value!r}")
        if self.prefix_len is not None and self.prefix_len < 0:
            raise ConfigError(f"prefix_len of a workload must be at least 0, got {self.prefix_len!r}")
        if not 0 <= self.spread < 1:
            raise ConfigError(f"spread must be at least 0 and less than 1, got {self.spread!r}")
        if not 0 <= self.prefix_share <= 1:
            raise ConfigError(f"prefix_share must be between 0 and 1, got {self.prefix_share!r}")
        if not 0 <= self.first_token_id < self.last_token_id:
            raise ConfigError(f"token ids from {self.first_token_id} to {self.last_token_id} are not a range")

    def for_vocabulary(self, vocab_size: int) -> WorkloadSpec:
        """The same workload with token ids that a smaller vocabulary has."""
        if vocab_size > self.last_token_id:
            return self
        return replace(self, last_token_id=vocab_size, first_token_id=min(self.first_token_id, vocab_size // 2))

    def as_json(self) -> dict[str, Any]:
        """The fields that have a value. `data_path` is left out: the digest says which file it was."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "data_path"}

    @property
    def hash(self) -> str:
        return sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:HASH_LEN]
