"""Philox-4x32-10 (Salmon et al. 2011) on tensors: random numbers as a function of a key and a counter."""

from __future__ import annotations

from torch import Tensor

Words = tuple[Tensor, ...]  # words of 32 bits, each in an int64

_WORD = 0xFFFFFFFF


def philox(counter: Words, key: Words) -> Words:
    """Returns four random words from a counter of four words and a key of two."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        # A 64-bit result may be negative: the shift then fills in ones, which the mask removes.
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product_1 >> 32) & _WORD) ^ c1 ^ k0, product_1 & _WORD
        c2, c3 = ((product_0 >> 32) & _WORD) ^ c3 ^ k1, product_0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Returns the number in [0, 1) of each seed and position, with 53 random bits. All [R]; int64 to float64."""
    zero = position * 0
    counter = (position & _WORD, (position >> 32) & _WORD, zero, zero)
    first, second, _, _ = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return (((first >> 5) << 26) + (second >> 6)).double() / 2.0**53
