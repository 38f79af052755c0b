"""The order of a set of prompts by the tree of their beginnings: depth first, the most decoding first.

                  root
               ╱        ╲            a node is a beginning that prompts have in common, in whole blocks of the KV
        [system A]    [system B]     cache; it is computed once and needed only while what hangs below it runs
        ╱    │   ╲        │
     [shots] a    b       c

Prompts in the order of their bytes are the tree's leaves from left to right, so it takes one sort and a comparison of
neighbours; no hash has to be trusted. What is left to choose is the order of a node's children.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from operator import attrgetter

import msgspec

TOKEN_BYTES = 4
MIN_GROUP_PROMPTS = 32  # prompts under a node, before their answers are counted apart from others


class Leaf(msgspec.Struct, eq=False, gc=False):
    """A prompt. Owned by the planner; `arrange` fills in what its place in the tree says."""

    tokens: bytes  # of int32
    salt: str | None = None
    is_current: bool = False  # what runs now begins like this; it is not ordered itself
    prefix_group: int = 0
    num_new_tokens: float = 0.0  # to compute below its parent
    num_decode_tokens: float = 0.0

    @property
    def prompt_len(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class _Node:
    depth: int  # tokens that all below it begin with
    children: list[_Node | Leaf] = field(default_factory=list)
    num_leaves: int = 0
    first: Leaf | None = None
    is_current: bool = False
    num_new_tokens: float = 0.0  # to compute below its parent, its own included
    num_decode_tokens: float = 0.0

    def close(self) -> None:
        """All its children are there."""
        first = self.children[0]
        self.first = first if isinstance(first, Leaf) else first.first
        for child in self.children:
            self.num_leaves += 1 if isinstance(child, Leaf) else child.num_leaves
            if child.is_current:
                self.is_current = True


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    leaves: list[Leaf]  # in the order of execution
    num_prompt_tokens: int
    num_new_tokens: int  # of them, if each beginning is computed once


def order_by_prefix(leaves: Sequence[Leaf], *, block_size: int, decode_tokens: Callable[[Leaf], float]) -> PrefixOrder:
    """`decode_tokens` says how much decoding a leaf brings; it is asked when the leaf knows its family."""
    if not leaves:
        return PrefixOrder([], 0, 0)
    root = _grow(_side_by_side(leaves), block_size)
    nodes = _with_families(root)
    for leaf in leaves:
        leaf.num_decode_tokens = 0.0 if leaf.is_current else decode_tokens(leaf)
    for node in reversed(nodes):
        _sum_up(node)
    ordered = _depth_first(root)
    num_prompt_tokens = sum([len(leaf.tokens) for leaf in ordered]) // TOKEN_BYTES
    return PrefixOrder(ordered, num_prompt_tokens, min(num_prompt_tokens, round(root.num_new_tokens)))


def _side_by_side(leaves: Sequence[Leaf]) -> list[Leaf]:
    ordered = sorted(leaves, key=attrgetter("tokens"))
    if {leaf.salt for leaf in leaves} != {None}:  # only prompts of the same salt share blocks
        ordered.sort(key=lambda leaf: leaf.salt or "")
    return ordered


def _grow(ordered: list[Leaf], block_size: int) -> _Node:
    """The tree of sorted prompts, from what neighbours have in common."""
    top = _Node(0)
    path = [top]  # from the root to where the next leaf may hang
    done: _Node | Leaf = ordered[0]
    before = ordered[0]
    for leaf in islice(ordered, 1, None):
        depth = shared_len(before, leaf, block_size)
        while top.depth > depth:
            top.children.append(done)
            top.close()
            done = path.pop()
            top = path[-1]
        if top.depth < depth:
            top = _Node(depth)
            path.append(top)
        top.children.append(done)
        done = before = leaf
    while path:
        path[-1].children.append(done)
        path[-1].close()
        done = path.pop()
    assert isinstance(done, _Node)
    return done


def shared_len(one: Leaf, other: Leaf, block_size: int) -> int:
    """Tokens in whole blocks that both begin with."""
    if one.salt != other.salt:
        return 0
    block_bytes = block_size * TOKEN_BYTES
    a, b = one.tokens, other.tokens
    least, most = 1, min(len(a), len(b)) // block_bytes
    if not most or a[:block_bytes] != b[:block_bytes]:
        return 0  # most neighbours, where prompts have no beginning in common
    while least < most:  # of blocks: `least` are known to be shared, more than `most` cannot be
        middle = (least + most + 1) // 2
        start, end = least * block_bytes, middle * block_bytes
        if a[start:end] == b[start:end]:
            least = middle
        else:
            most = middle - 1
    return least * block_size


def _with_families(root: _Node) -> list[_Node]:
    """All nodes, parents first. A leaf's family is the deepest node above it with enough leaves."""
    nodes: list[_Node] = []
    left = [(root, 0)]
    while left:
        node, prefix_group = left.pop()
        nodes.append(node)
        if node.depth and node.num_leaves >= MIN_GROUP_PROMPTS and node.first is not None:
            prefix_group = hash((node.first.salt, node.first.tokens[: node.depth * TOKEN_BYTES]))
        for child in node.children:
            if isinstance(child, Leaf):
                child.prefix_group = prefix_group
            else:
                left.append((child, prefix_group))
    return nodes


def _sum_up(node: _Node) -> None:
    """Its children's sums are there. Until its parent is summed up, its tokens count from the very beginning."""
    depth = node.depth
    num_new = float(depth)
    num_decode = 0.0
    for child in node.children:
        if not isinstance(child, Leaf):
            own = child.num_new_tokens - depth
        else:
            own = 0 if child.is_current else len(child.tokens) // TOKEN_BYTES - depth
        child.num_new_tokens = own
        num_new += own
        num_decode += child.num_decode_tokens
    node.num_new_tokens, node.num_decode_tokens = num_new, num_decode


def _depth_first(root: _Node) -> list[Leaf]:
    """What runs now goes on; else whoever decodes the most for each prompt token is first, as its answers then run
    beside the prompts of the others."""
    ordered: list[Leaf] = []
    left: list[_Node | Leaf] = [root]
    while left:
        part = left.pop()
        if isinstance(part, _Node):
            left.extend(sorted(part.children, key=_urgency))
        elif not part.is_current:
            ordered.append(part)
    return ordered


def _urgency(part: _Node | Leaf) -> float:
    return inf if part.is_current else part.num_decode_tokens / max(1.0, part.num_new_tokens)
