"""Models: what they are, where they come from, and how they run. There is one decoder for all families that generate
but Gemma 3n, and one encoder.

    spec.py, family.py, families.py                what a model is: one row per family, read from its config
    family_rows_*.py, traits.py, *_traits.py       the rows, and what distinguishes each family
    hub_config.py, gguf_*.py                       config.json or GGUF metadata to a `ModelSpec`
    sources.py, cache.py, checkpoint.py            a model's name to its files, fetched if needed
    digests.py                                     by which a resumed job tells two models apart
    stored_tensors.py, weights/                    how checkpoints store tensors, and loading them into a decoder
    decoder.py, layers.py, mixture.py, embeddings.py, rope.py     the computation, in terms of `kernels.ops`
    latent.py, gemma3n.py                          latent attention, and the decoder of Gemma 3n
    encoder*.py                                    encoders (BERT and its relatives): their table, spec and computation
    pooler.py, pooling_config.py, sentence_transformers.py, head.py     embedding models and classifiers

What distinguishes a family (biases, windows, norms, soft caps, parallel blocks, layers without rope, experts) is a
field of `ModelSpec`; a field that is None costs nothing in a step. A config key that affects the computation and that
no row reads is refused. Adding a family: a row in family_rows_*.py, its traits, a parity test in tests/models.

Where it is exact, a difference is folded into the weights at load, so kernels do not know of it:

- Fused, transposed and renamed tensors are read under the names of Llama (`weights/rearranged.py`).
- Kernels rotate dimension i with i + half. For heads that rotate in part or in neighbouring pairs, the dimensions of
  queries and keys are reordered (`rope.head_order`); those that do not rotate have cosine 1 and sine 0.
- Llama 4 norms queries and keys after the rotation, which keeps their length: here the norm comes before.
- Granite scales what is added to the residual stream: here the stream is divided instead, by the embeddings' scale and
  the norms' epsilon.
- Logits are scaled in the last norm's weights. Gemma's `1 +` is added to norm weights, which are float32 everywhere.

Names are imported on first use, so that a command that only prints never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.models.cache import CachedModel, cache_directory, cached_models, remove
    from headrace.models.checkpoint import Checkpoint, open_checkpoint
    from headrace.models.decoder import Decoder
    from headrace.models.sources import fetch, locate
    from headrace.models.spec import ModelSpec, RopeSpec
    from headrace.models.weights.load import load_decoder

__all__ = [
    "CachedModel",
    "Checkpoint",
    "Decoder",
    "ModelSpec",
    "RopeSpec",
    "cache_directory",
    "cached_models",
    "fetch",
    "load_decoder",
    "locate",
    "open_checkpoint",
    "remove",
]

_HOMES = {
    "CachedModel": "cache",
    "Checkpoint": "checkpoint",
    "Decoder": "decoder",
    "ModelSpec": "spec",
    "RopeSpec": "spec",
    "cache_directory": "cache",
    "cached_models": "cache",
    "fetch": "sources",
    "load_decoder": "weights.load",
    "locate": "sources",
    "open_checkpoint": "checkpoint",
    "remove": "cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
