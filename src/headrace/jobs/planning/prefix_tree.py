"""Orders prompts by the tree of their shared prefixes: depth first, the children with the most decoding first.

                  root
               ╱        ╲            a node is a prefix that prompts share, in whole blocks of the KV cache;
        [system A]    [system B]     it is computed once and needed only while the prompts below it run
        ╱    │   ╲        │
     [shots] a    b       c

Prompts sorted by their bytes are the leaves of the tree from left to right, so building it takes one sort and a
comparison of neighbours, without hashes. The only choice is the order of a node's children.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from operator import attrgetter

import msgspec

from headrace.jobs.input.prepare import TOKEN_BYTES

MIN_GROUP_PROMPTS = 32  # prompts under a node, for it to be a prefix group with its own answer lengths


class Leaf(msgspec.Struct, eq=False, gc=False):
    """A prompt. Owned by the planner; `order_by_prefix` sets the last three fields."""

    tokens: bytes  # of int32
    salt: str | None = None
    is_current: bool = False  # a prompt that runs now: its branch comes first, it is not ordered itself
    prefix_group: int = 0
    num_new_tokens: float = 0.0  # to compute below its parent
    num_decode_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class _Node:
    depth: int  # tokens of the shared prefix
    children: list[_Node | Leaf] = field(default_factory=list)
    num_leaves: int = 0
    first: Leaf | None = None
    is_current: bool = False
    num_new_tokens: float = 0.0  # to compute below its parent, its own included
    num_decode_tokens: float = 0.0

    def close(self) -> None:
        """Finish the node once all its children were added."""
        first = self.children[0]
        self.first = first if isinstance(first, Leaf) else first.first
        for child in self.children:
            self.num_leaves += 1 if isinstance(child, Leaf) else child.num_leaves
            if child.is_current:
                self.is_current = True


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    leaves: list[Leaf]  # in the order in which they should run
    num_prompt_tokens: int
    num_new_tokens: int  # prompt tokens to compute if each prefix is computed once
    current_at: list[tuple[int, Leaf]] = field(default_factory=list)  # where each current leaf would be in `leaves`


def order_by_prefix(leaves: Sequence[Leaf], *, block_size: int, decode_tokens: Callable[[Leaf], float]) -> PrefixOrder:
    """`decode_tokens` estimates the decoding of a leaf; it is called after the leaf's prefix group is set."""
    if not leaves:
        return PrefixOrder([], 0, 0)
    root = _grow(_side_by_side(leaves), block_size)
    nodes = _with_prefix_groups(root)
    for leaf in leaves:
        leaf.num_decode_tokens = 0.0 if leaf.is_current else decode_tokens(leaf)
    for node in reversed(nodes):
        _sum_up(node)
    ordered, current_at = _depth_first(root)
    num_prompt_tokens = sum([len(leaf.tokens) for leaf in ordered]) // TOKEN_BYTES
    num_new_tokens = min(num_prompt_tokens, round(root.num_new_tokens))
    return PrefixOrder(ordered, num_prompt_tokens, num_new_tokens, current_at)


def _side_by_side(leaves: Sequence[Leaf]) -> list[Leaf]:
    ordered = sorted(leaves, key=attrgetter("tokens"))
    if {leaf.salt for leaf in leaves} != {None}:  # only prompts of the same salt share blocks
        ordered.sort(key=lambda leaf: leaf.salt or "")
    return ordered


def _grow(ordered: list[Leaf], block_size: int) -> _Node:
    """Builds the tree of sorted prompts from the shared prefixes of neighbours."""
    top = _Node(0)
    path = [top]  # from the root to the deepest node that the next leaf may join
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
    """Tokens of the shared prefix, in whole blocks."""
    if one.salt != other.salt:
        return 0
    block_bytes = block_size * TOKEN_BYTES
    a, b = one.tokens, other.tokens
    low, high = 1, min(len(a), len(b)) // block_bytes
    if not high or a[:block_bytes] != b[:block_bytes]:
        return 0  # the usual case if prompts share no prefix
    while low < high:  # blocks: `low` are known to be shared, more than `high` cannot be
        middle = (low + high + 1) // 2
        start, end = low * block_bytes, middle * block_bytes
        if a[start:end] == b[start:end]:
            low = middle
        else:
            high = middle - 1
    return low * block_size


def _with_prefix_groups(root: _Node) -> list[_Node]:
    """All nodes, parents first. The prefix group of a leaf is the deepest node above it with enough leaves."""
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
    """Sum up a node after its children. Until its parent is summed up, tokens count from the start of the prompt."""
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


def _depth_first(root: _Node) -> tuple[list[Leaf], list[tuple[int, Leaf]]]:
    """The branch that runs now comes first, then the one with the most decode tokens per prompt token: its answers
    then decode beside the prefill of the others. Also returns the places of the current leaves."""
    ordered: list[Leaf] = []
    current_at: list[tuple[int, Leaf]] = []
    left: list[_Node | Leaf] = [root]
    while left:
        part = left.pop()
        if isinstance(part, _Node):
            left.extend(sorted(part.children, key=_urgency))
        elif not part.is_current:
            ordered.append(part)
        else:
            current_at.append((len(ordered), part))
    return ordered, current_at


def _urgency(part: _Node | Leaf) -> float:
    return inf if part.is_current else part.num_decode_tokens / max(1.0, part.num_new_tokens)
