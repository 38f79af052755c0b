"""Batch lines for rerankers and embedding models: /v1/rerank, /v1/score and /v1/embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.config import EngineConfig
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from tests.engine.tiny_encoders import save_encoder, save_modules

WriteLines = Callable[..., Path]


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def run(source: Path, directory: Path) -> dict[str, tuple[int, Any]]:
    """The status and the body of each line, by its custom id."""
    output, config = source.parent / "out.jsonl", EngineConfig(model=str(directory), max_num_seqs=4)
    run_job(JobSpec(input=str(source), output=str(output), config=config), quiet=True)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in lines}


def test_lines_of_a_reranker_have_the_scores_of_python(write_lines: WriteLines, tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    documents = ["w5 w6", "w7", "w8 w9"]
    found = run(
        write_lines(
            line("rank", "/v1/rerank", query="w2 w3", documents=documents, top_n=2),
            line("short", "/rerank", query="w2 w3", documents=documents),
            line("score", "/v1/score", text_1="w2 w3", text_2=documents, use_activation=False),
            line("empty", "/v1/rerank", query="w2", documents=[]),
            line("embed", "/v1/embeddings", input="w1"),
            line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]),
        ),
        tmp_path,
    )
    with LLM(str(tmp_path)) as llm:
        scores = [output.outputs.score for output in llm.score("w2 w3", documents)]  # type: ignore[union-attr]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [item["index"] for item in found["rank"][1]["results"]] == order[:2]
    ranked = {item["index"]: item["relevance_score"] for item in found["short"][1]["results"]}
    assert [ranked[index] for index in range(3)] == pytest.approx(scores, abs=1e-6)
    raw = [item["score"] for item in found["score"][1]["data"]]
    assert sorted(range(3), key=lambda index: -raw[index]) == order and max(map(abs, raw)) != pytest.approx(max(scores))
    assert (found["empty"][0], found["empty"][1]["error"]["param"]) == (400, "documents")
    assert found["embed"][0] == 400 and "is a classifier" in found["embed"][1]["error"]["message"]
    assert found["chat"][0] == 400


def test_lines_of_an_embedding_model_use_its_prompts_and_dimensions(write_lines: WriteLines, tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", is_matryoshka=True)
    save_modules(tmp_path, "cls_token", prompts={"query": "w1 "})
    found = run(
        write_lines(
            line("plain", "/v1/embeddings", input="w2 w3"),
            line("query", "/v1/embeddings", input=["w2 w3"], prompt_name="query", dimensions=8),
            line("rank", "/v1/rerank", query="w2 w3", documents=["w4", "w1 w2 w3"]),
            line("long", "/v1/embeddings", input="w1 " * 200),
            line("cut", "/v1/embeddings", input="w1 " * 200, truncate_prompt_tokens=16),
        ),
        tmp_path,
    )
    with LLM(str(tmp_path)) as llm:
        plain = llm.embed("w2 w3")[0].embedding
        query = llm.embed("w1 w2 w3", normalize=False)[0].embedding[:8]
    assert found["plain"][1]["data"][0]["embedding"] == pytest.approx(plain.tolist(), abs=1e-6)
    expected = (query / (query @ query) ** 0.5).tolist()
    assert found["query"][1]["data"][0]["embedding"] == pytest.approx(expected, abs=1e-6)
    best = found["rank"][1]["results"][0]
    assert best["index"] == 1 and best["relevance_score"] == pytest.approx(1, abs=1e-6)
    assert found["long"][1]["error"]["code"] == "context_length_exceeded"
    assert found["cut"][1]["usage"]["prompt_tokens"] == 16
