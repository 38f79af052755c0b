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
from itertools import pairwise

TOKEN_BYTES = 4
LEAST_FAMILY = 32  # prompts under a node, before their answers are counted apart from others


@dataclass(slots=True, eq=False)
class Leaf:
    """A prompt. Owned by the planner; `arrange` fills in what its place in the tree says."""

    tokens: bytes  # of int32
    salt: str | None = None
    is_current: bool = False  # what runs now begins like this; it is not ordered itself
    family: int = 0
    num_new_tokens: float = 0.0  # to compute below its parent
    num_decode_tokens: float = 0.0
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class _Node:
    depth: int  # tokens that all below it begin with
    children: list[_Node | Leaf] = field(default_factory=list)
    num_leaves: int = 0
    first: Leaf | None = None
    is_current: bool = False
    num_new_tokens: float = 0.0  # to compute below its parent, its own included
    num_decode_tokens: float = 0.0

    def adopt(self, child: _Node | Leaf) -> None:
        self.children.append(child)
        self.num_leaves += 1 if isinstance(child, Leaf) else child.num_leaves
        self.first = self.first or (child if isinstance(child, Leaf) else child.first)
        self.is_current |= child.is_current


@dataclass(frozen=True, slots=True)
class Arrangement:
    leaves: list[Leaf]  # in the order of execution
    num_prompt_tokens: int
    num_new_tokens: int  # of them, if each beginning is computed once


def arrange(leaves: Sequence[Leaf], *, block_size: int, decode_tokens: Callable[[Leaf], float]) -> Arrangement:
    """`decode_tokens` says how much decoding a leaf brings; it is asked when the leaf knows its family."""
    if not leaves:
        return Arrangement([], 0, 0)
    root = _grow(_side_by_side(leaves), block_size)
    nodes = _with_families(root)
    for leaf in leaves:
        leaf.num_decode_tokens = 0.0 if leaf.is_current else decode_tokens(leaf)
    for node in reversed(nodes):
        _sum_up(node)
    ordered = _depth_first(root)
    num_prompt_tokens = sum(leaf.prompt_len for leaf in ordered)
    return Arrangement(ordered, num_prompt_tokens, min(num_prompt_tokens, round(root.num_new_tokens)))


def _side_by_side(leaves: Sequence[Leaf]) -> list[Leaf]:
    ordered = sorted(leaves, key=lambda leaf: leaf.tokens)
    if any(leaf.salt is not None for leaf in leaves):  # only prompts of the same salt share blocks
        ordered.sort(key=lambda leaf: leaf.salt or "")
    return ordered


def _grow(ordered: list[Leaf], block_size: int) -> _Node:
    """The tree of sorted prompts, from what neighbours have in common."""
    path = [_Node(0)]  # from the root to where the next leaf may hang
    done: _Node | Leaf = ordered[0]
    for before, leaf in pairwise(ordered):
        depth = shared_len(before, leaf, block_size)
        while path[-1].depth > depth:
            path[-1].adopt(done)
            done = path.pop()
        if path[-1].depth < depth:
            path.append(_Node(depth))
        path[-1].adopt(done)
        done = leaf
    while path:
        path[-1].adopt(done)
        done = path.pop()
    assert isinstance(done, _Node)
    return done


def shared_len(one: Leaf, other: Leaf, block_size: int) -> int:
    """Tokens in whole blocks that both begin with."""
    if one.salt != other.salt:
        return 0
    block_bytes = block_size * TOKEN_BYTES
    a, b = one.tokens, other.tokens
    least, most = 0, min(len(a), len(b)) // block_bytes
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
        node, family = left.pop()
        nodes.append(node)
        if node.depth and node.num_leaves >= LEAST_FAMILY and node.first is not None:
            family = hash((node.first.salt, node.first.tokens[: node.depth * TOKEN_BYTES]))
        for child in node.children:
            if isinstance(child, Leaf):
                child.family = family
            else:
                left.append((child, family))
    return nodes


def _sum_up(node: _Node) -> None:
    """Its children's sums are there. Until its parent is summed up, its tokens count from the very beginning."""
    num_new = float(node.depth)
    num_decode = 0.0
    for child in node.children:
        own = child.prompt_len if isinstance(child, Leaf) else child.num_new_tokens
        child.num_new_tokens = 0 if isinstance(child, Leaf) and child.is_current else own - node.depth
        num_new += child.num_new_tokens
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


def _urgency(part: _Node | Leaf) -> tuple[bool, float]:
    return part.is_current, part.num_decode_tokens / max(1.0, part.num_new_tokens)
