"""Writes a GGUF file of a Llama shape with random weights, and the tokenizer of the default model.

python benchmarks/random_gguf.py llama-3.2-1b Q4_0 /tmp/llama-1b-q4_0.gguf
python benchmarks/random_gguf.py llama-3.2-1b Q4_K /tmp/llama-1b-q4_k.gguf

The embeddings, which are the head too, are in Q8_0, or in Q6_K beside Q4_K. Speed does not depend on the values.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from headrace.bench.engines.shapes import SHAPES
from headrace.models.gguf_file import read_gguf
from headrace.models.sources import locate

Types = gguf.GGMLQuantizationType
Bytes = npt.NDArray[np.uint8]
# Bytes of a block, and where its float16 numbers are, with values that give weights of about 0.02.
BLOCKS: dict[str, tuple[int, int, dict[int, float]]] = {
    "Q4_0": (32, 18, {0: 0.004}),
    "Q8_0": (32, 34, {0: 0.0003}),
    "Q4_K": (256, 144, {0: 0.00014, 2: 0.00105}),
    "Q6_K": (256, 210, {208: 0.00002}),
}
EMBEDDINGS = {"Q4_0": "Q8_0", "Q4_K": "Q6_K"}


def random_rows(kind: str, num_rows: int, width: int, rng: np.random.Generator) -> Bytes:
    block_len, block_bytes, halves = BLOCKS[kind]
    blocks = rng.integers(0, 256, (num_rows * width // block_len, block_bytes), dtype=np.uint8)
    for offset, value in halves.items():
        blocks[:, offset : offset + 2] = np.array([value], dtype="<f2").view(np.uint8)
    return blocks.reshape(num_rows, -1)


def write(shape: str, kind: str, path: Path) -> None:
    config, rng = SHAPES[shape], np.random.default_rng(0)
    tokenizer = read_gguf(locate("smollm2")).metadata
    vocab_size, hidden, inner = (
        len(tokenizer["tokenizer.ggml.tokens"]),
        config["hidden_size"],
        config["intermediate_size"],
    )
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // num_heads)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(vocab_size)
    for key, value in tokenizer.items():
        if key.startswith("tokenizer."):
            add(writer, key, value)
    rows = {"attn_q": (num_heads * head_dim, hidden), "attn_k": (num_kv_heads * head_dim, hidden)}
    rows |= {"attn_v": rows["attn_k"], "attn_output": (hidden, num_heads * head_dim)}
    rows |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    table = EMBEDDINGS[kind]
    writer.add_tensor("token_embd.weight", random_rows(table, vocab_size, hidden, rng), raw_dtype=Types[table])
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(config["num_hidden_layers"]):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
        for name, (num_rows, width) in rows.items():
            stored = random_rows(kind, num_rows, width, rng)
            writer.add_tensor(f"blk.{layer}.{name}.weight", stored, raw_dtype=Types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))  # type: ignore[call-overload]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[name for name in SHAPES if name.startswith("llama")])
    parser.add_argument("kind", choices=EMBEDDINGS)
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    write(given.shape, given.kind, given.path)


if __name__ == "__main__":
    main()
