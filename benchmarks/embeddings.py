"""Embeddings of many texts: Headrace against transformers with padded batches sorted by length.

    python benchmarks/embeddings.py --shape bge-base --num-texts 4096 --json out.json

Weights are random and inputs are token ids, so nothing is downloaded and no tokenizer is measured. The other side is
what sentence-transformers does: texts sorted by length, padded batches, the model's own attention, and the mean.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from about import commit, cpu_name

SHAPES: dict[str, dict[str, Any]] = {
    "minilm-l6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bge-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
VOCABULARY = 30522


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="bge-base")
    parser.add_argument("--num-texts", type=int, default=4096)
    parser.add_argument("--mean-len", type=int, default=96, help="of exponentially distributed lengths, 4 to 512")
    parser.add_argument("--batch-size", type=int, default=128, help="of transformers")
    parser.add_argument("--rounds", type=int, default=2, help="the best counts")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rng = random.Random(0)
    lens = [min(512, max(4, round(rng.expovariate(1 / given.mean_len)))) for _ in range(given.num_texts)]
    texts = [[rng.randrange(1000, VOCABULARY) for _ in range(length)] for length in lens]
    results = {"headrace": _headrace(given, texts), "transformers": _transformers(given, texts)}
    for name, seconds in results.items():
        print(f"{name:13s} {given.num_texts / seconds:9,.0f} texts/s {sum(lens) / seconds:11,.0f} tokens/s")
    if given.json is not None:
        record = {"shape": given.shape, "num_texts": given.num_texts, "num_tokens": sum(lens), "seconds": results}
        settings = {"mean_len": given.mean_len, "batch_size": given.batch_size, "rounds": given.rounds}
        given.json.write_text(json.dumps({**_conditions(), **settings, **record}) + "\n")


def _conditions() -> dict[str, str]:
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"commit": commit(), "device": device, **versions}


def _config(given: argparse.Namespace) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "type_vocab_size": 2}
    return {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", **sizes, **SHAPES[given.shape]}


def _headrace(given: argparse.Namespace, texts: list[list[int]]) -> float:
    from headrace import LLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(given)))
        with LLM(folder, load_format="random") as llm:
            llm.embed(texts[:256], use_tqdm=False)
            return min(_seconds(lambda: llm.embed(texts, use_tqdm=False)) for _ in range(given.rounds))


def _transformers(given: argparse.Namespace, texts: list[list[int]]) -> float:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.BertConfig(**_config(given))
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    ordered = sorted(texts, key=len, reverse=True)

    @torch.inference_mode()
    def run() -> None:
        means = []
        for start in range(0, len(ordered), given.batch_size):
            batch = ordered[start : start + given.batch_size]
            ids = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, text in enumerate(batch):
                ids[row, : len(text)] = torch.tensor(text)
                mask[row, : len(text)] = 1
            ids, mask = ids.to(device), mask.to(device)
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            means.append((states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))
        torch.cat(means).float().cpu()

    run()
    return min(_seconds(run) for _ in range(given.rounds))


def _seconds(run: Any) -> float:
    started = perf_counter()
    run()
    return perf_counter() - started


if __name__ == "__main__":
    main()
