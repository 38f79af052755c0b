"""How checkpoints store tensors: under other names than ours, several in one, or transposed. Imports no torch.

Our names are those of Llama in transformers, which most families share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from headrace.errors import ModelError
from headrace.models.spec import ModelSpec, Shape

_BARE_NAMES = (
    "mlp.router_correction",
    "self_attn.sinks",
    "altup.correct_output_scale",
    "recurrent.A_log",
    "recurrent.D",
    "recurrent.dt_bias",
)  # vectors that are stored without `.bias`
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")


@dataclass(frozen=True)
class Stored:
    """The storage format of one family.

    Stems are tensor names without `.weight` and `.bias`, and in layers without the layer's prefix. A star stands for
    the number of an expert. A stem of experts without a star names a stack of all experts' matrices, transposed; the
    stack of their biases has the same name and `_bias`.
    """

    prefix: str = ""  # of all names, or after the root of all but the head's; text models alone may omit it
    root: str = "model."  # of all names but the head's; checkpoints of the bare model may omit it
    layers: str = "layers"
    names: Mapping[str, str] = field(default_factory=dict)  # our stem -> theirs, where they differ
    other_names: Mapping[str, str] = field(default_factory=dict)  # the same, for those that some checkpoints have
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # their stem -> ours, concatenated rows
    other_fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the same, with `other_names`
    # Their stem -> by how many groups the rows of a fused tensor are interleaved; without an entry by none.
    num_groups: Mapping[str, Callable[[ModelSpec], int]] = field(default_factory=dict)
    by_head: bool = False  # fused rows are interleaved: for each kv head its query heads, then key and value
    has_upright_stacks: bool = False  # stacks of experts are not transposed
    has_extra_layers: bool = False  # layers after the last one predict further tokens; they are not read
    has_transposed_layers: bool = False  # matrices are stored as [in, out]
    leftovers: str = r"[^\s\S]"  # a pattern of tensors that are not weights; the default matches nothing

    @property
    def is_ours(self) -> bool:
        return self == AS_NAMED


AS_NAMED = Stored()
IMAGES = r"(model\.)?(vision_model|vision_tower|visual|multi_modal_projector)\..*"  # weights of multimodal models
TEXT_MODEL = Stored(prefix="language_model.", leftovers=IMAGES)  # of multimodal models


@dataclass(frozen=True)
class StoredPart:
    """Where one of our tensors is stored: some rows of each group of rows of a stored tensor."""

    name: str
    first_row: int
    num_rows: int
    rows_per_group: int
    num_groups: int = 1
    is_transposed: bool = False
    member: int | None = None  # index in a stack, if the stored tensor is one
    num_members: int = 0
    is_vector: bool = False  # stored as a vector, as a matrix of one row, or as a row of a stack
    num_columns: int | None = None  # of ours; a stack with as many is not transposed, unless it is square

    @property
    def is_whole(self) -> bool:
        """Whether our tensor is a stored one as it is, but for its name."""
        return self.member is None and self.num_rows == self.rows_per_group and not self.is_transposed

    def shape(self, stored: Shape) -> Shape:
        """Returns our tensor's shape, given the stored tensor's."""
        if self.member is not None:
            if stored[0] != self.num_members:
                raise ModelError(f"tensor {self.name!r} is for {stored[0]} experts; its config says {self.num_members}")
            stored = stored[1:]
        if self.is_vector:
            stored = (math.prod(stored),)
        is_transposed = self.transposes(stored)
        rows, *others = reversed(stored) if is_transposed else stored
        if rows != self.rows_per_group * self.num_groups:
            raise ModelError(
                f"tensor {self.name!r} has shape {list(stored)}; its config implies "
                f"{self.rows_per_group * self.num_groups} {'columns' if is_transposed else 'rows'}"
            )
        return (self.num_rows * self.num_groups, *others)

    def transposes(self, stored: Shape) -> bool:
        """Tells whether the stored matrix is transposed. transformers 5 writes some stacks the other way round than the
        checkpoints that were published."""
        is_upright = stored[-1] == self.num_columns and stored[0] != stored[-1]
        return self.is_transposed and not is_upright


def find_parts(stored: Stored, spec: ModelSpec, found: Collection[str]) -> dict[str, StoredPart]:
    """Finds where each tensor of the spec is stored. `found`, the names in the checkpoint, tells whether the root is
    present, and which of two names."""
    prefixes = _prefixes(stored, found)
    shapes = spec.tensor_shapes() | {"lm_head.weight": (spec.vocab_size, spec.hidden_size)}
    holders = {ours: theirs for theirs, parts in stored.fused.items() for ours in parts}
    parts = {name: _find_part(stored, spec, prefixes, name, shapes, holders) for name in shapes}
    if not stored.other_names:
        return parts
    names, fused = {**stored.names, **stored.other_names}, {**stored.fused, **stored.other_fused}
    other = replace(stored, names=names, fused=fused, other_names={})
    return parts | {name: part for name, part in find_parts(other, spec, found).items() if part.name in found}


def has_head(found: Collection[str]) -> bool:
    """Tells whether a multimodal checkpoint has an LM head of its own: its config may say it only for one part."""
    return any(name.removeprefix("language_model.") == "lm_head.weight" for name in found)


def _prefixes(stored: Stored, found: Collection[str]) -> tuple[str, str]:
    """Returns the prefixes of the head's name, and of all other names."""
    prefix, root = stored.prefix, stored.root
    for head, others in ((prefix, prefix + root), ("", root + prefix), ("", root)):
        if any(name.startswith(others) for name in found):
            return head, others
    return "", ""


def _find_part(
    stored: Stored,
    spec: ModelSpec,
    prefixes: tuple[str, str],  # of the head's name, and of all other names
    name: str,
    shapes: Mapping[str, Shape],
    holders: Mapping[str, str],
) -> StoredPart:
    prefix, root = prefixes
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        stem, _, kind = name.rpartition(".")
        theirs = stored.names.get(stem, stem)
        is_outside = stem == "lm_head" or (stem.startswith("head.") and not theirs.startswith("model."))
        their_name = f"{prefix}{theirs}.{kind}" if is_outside else f"{root}{theirs.removeprefix('model.')}.{kind}"
        return StoredPart(their_name, 0, shapes[name][0], shapes[name][0])
    index, stem, kind = match.groups()
    expert = _EXPERT.search(stem)
    stem, number = (stem, "") if expert is None else (_EXPERT.sub("*", stem), expert[0])
    theirs = holders.get(stem) or stored.names.get(stem, stem)
    is_stack = expert is not None and "*" not in theirs
    is_bias_of_stack = is_stack and kind == "bias"
    suffix = "_bias" if is_bias_of_stack else "" if is_stack or stem in _BARE_NAMES else f".{kind}"
    parts = [f"model.layers.{index}.{part}.{kind}".replace("*", number) for part in stored.fused.get(theirs, (stem,))]
    num_groups = spec.num_kv_heads if stored.by_head and len(parts) > 1 else 1
    if theirs in stored.num_groups:
        num_groups = stored.num_groups[theirs](spec)
    counts = [shapes[part][0] // num_groups for part in parts]
    at = parts.index(name)
    return StoredPart(
        name=f"{root}{stored.layers}.{index}.{theirs}".replace("*", number) + suffix,
        first_row=sum(counts[:at]),
        num_rows=counts[at],
        rows_per_group=sum(counts),
        num_groups=num_groups,
        is_transposed=(is_stack and not stored.has_upright_stacks and not is_bias_of_stack)
        or (stored.has_transposed_layers and len(shapes[name]) > 1),
        member=int(number) if is_stack else None,
        num_members=spec.mixture.num_experts if spec.mixture is not None else 0,
        num_columns=shapes[name][-1] if is_stack and not is_bias_of_stack else None,
        is_vector=is_bias_of_stack or stem in _BARE_NAMES,
    )
