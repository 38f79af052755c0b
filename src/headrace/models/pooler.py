"""What a pooling model does with its hidden states: how they are pooled, and the head after it. Imports no torch.

An embedding model pools, maybe through Dense layers, and normalizes. A classifier (cross-encoders and rerankers too)
pools and has a head with one output per label. Models without a pooler generate text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.types import Pooling

PoolerTask = Literal["embed", "classify"]
HeadActivation = Literal["none", "tanh", "gelu", "relu", "sigmoid"]
OutputActivation = Literal["none", "sigmoid", "softmax"]

# Prompts that sentence-transformers puts before queries and documents, by the names that models use.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A linear layer after pooling, its activation, then maybe a norm."""

    in_size: int
    out_size: int
    has_bias: bool = True
    activation: HeadActivation = "none"
    has_norm: bool = False
    has_norm_bias: bool = False
    folder: str | None = None  # of a sentence-transformers module with weights of its own; None: the model's files
    from_tokens: tuple[int, ...] = ()  # its rows are those of the LM head for these tokens


@dataclass(frozen=True, slots=True)
class PoolerSpec:
    task: PoolerTask
    pooling: Pooling
    size: int  # of what it returns: dimensions of an embedding, or labels
    layers: tuple[HeadLayer, ...] = ()
    normalize: bool = True  # embeddings: to length 1
    activation: OutputActivation = "none"  # classification: of the outputs
    labels: tuple[str, ...] = ()  # classification: their names
    prompts: tuple[tuple[str, str], ...] = ()  # embeddings: texts that come before an input, by name
    default_prompt_name: str | None = None
    lowers_text: bool = False  # texts are put into lower case before they are tokenized
    is_matryoshka: bool = False  # embeddings may be cut to fewer dimensions
    matryoshka_dimensions: tuple[int, ...] = ()  # the sizes that it was trained for; empty: any
    template: Literal["qwen3_reranker"] | None = None  # how a query and a document become one prompt; None: as a pair

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def is_cross_encoder(self) -> bool:
        """Whether a query and a document are scored together. An embedding model scores by cosine similarity."""
        return self.task == "classify" and self.num_labels == 1

    def prompt(self, name: str) -> str | None:
        return dict(self.prompts).get(name)

    def role_prompt(self, names: tuple[str, ...]) -> str:
        """The prompt of queries or of documents, if the model has one; else the default prompt."""
        found = next((text for name in names if (text := self.prompt(name)) is not None), None)
        return self.default_prompt if found is None else found

    @property
    def default_prompt(self) -> str:
        return "" if self.default_prompt_name is None else self.prompt(self.default_prompt_name) or ""
