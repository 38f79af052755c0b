from __future__ import annotations

import numpy as np

from headrace.kv import Chain, PrefixIndex

TOKENS = np.arange(4, dtype=np.int32)


def test_digests_are_the_same_in_every_process() -> None:
    """Files of earlier processes are found by them: a change makes all of these useless."""
    chain = Chain(b"a domain")
    first, second = chain.digests(chain.root("a salt"), TOKENS.tobytes(), 8)
    assert first.hex() == "7697b39bc83cd1cae79089bbad1137876e1fe22b782139041165828c24d71bce"
    assert second.hex() == "855c904634cb552d667e1b1513b044e266b69ae85f008482dec3e0258134e638"


def test_domain_salt_and_prefix_keep_equal_tokens_apart() -> None:
    tokens = TOKENS.tobytes()
    roots = [Chain(b"ab").root("c"), Chain(b"a").root("bc"), Chain(b"ab").root(""), Chain(b"").root("abc")]
    digests = {digest for root in roots for digest in Chain().digests(root, tokens + tokens, len(tokens))}
    assert len(digests) == 8


def test_an_index_with_a_chain_names_each_block() -> None:
    chain = Chain(b"domain")
    index = PrefixIndex(2, chain)
    index.register("salt", TOKENS, [7, 5])
    assert [index.digest_of(7), index.digest_of(5)] == [*chain.digests(chain.root("salt"), TOKENS.tobytes(), 8)]
    assert index.find(TOKENS, "salt").blocks == (7, 5)
    assert index.find(TOKENS, None).blocks == ()


def test_what_follows_a_block_is_found_again_when_the_block_comes_back() -> None:
    index = PrefixIndex(2, Chain())
    index.register("", TOKENS, [7, 5])
    index.forget(7)
    assert index.find(TOKENS, None).blocks == ()
    index.register("", TOKENS[:2], [3])
    assert index.find(TOKENS, None).blocks == (3, 5)
