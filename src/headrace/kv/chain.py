"""Names of prefixes that are the same in every process: a digest for each full block, chained from the first one on.

    root      = H(domain, salt)              domain: model, weights, type and layout of the cache
    digest_0  = H(root, tokens of block 0)
    digest_1  = H(digest_0, tokens of block 1) ...

H is BLAKE2b with 256 bits, not Python's hash(), which differs between processes. Equal digests mean equal tokens from
the first one on, the same salt and the same domain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Chain:
    domain: bytes = b""

    def root(self, salt: str) -> bytes:
        """What a prompt under this salt starts from."""
        salted = salt.encode("utf-8", "surrogatepass")
        return blake2b(len(self.domain).to_bytes(8, "little") + self.domain + salted, digest_size=DIGEST_BYTES).digest()

    def digest(self, parent: bytes, tokens: bytes) -> bytes:
        """Of a block with these int32 tokens after that prefix."""
        return blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()

    def digests(self, parent: bytes, tokens: bytes, num_bytes: int) -> Iterator[bytes]:
        """Of the full blocks of `num_bytes` among the tokens, as they are asked for."""
        for start in range(0, len(tokens) - num_bytes + 1, num_bytes):
            parent = self.digest(parent, tokens[start : start + num_bytes])
            yield parent
