"""Answers over HTTP and in batch lines, compared with those of sentence-transformers for the models that it saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from tests.engine.sentence_models import TEXTS, save_cross_encoder, save_embedding_model
from tests.server.serving import serving

library: Any = pytest.importorskip("sentence_transformers", minversion="6.0")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

QUERY = TEXTS[1]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
Bodies = dict[str, dict[str, Any]]  # a path, and the body to send there


def answers(directory: Path, bodies: Bodies) -> dict[str, list[dict[str, Any]]]:
    """Returns the answers of a server and of a batch job, by path."""
    with serving(str(directory)) as server:
        served = {path: server.post(path, body).json() for path, body in bodies.items()}
    source, output = directory / "lines.jsonl", directory / "out.jsonl"
    lines = [{"custom_id": path, "method": "POST", "url": path, "body": body} for path, body in bodies.items()]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = EngineConfig(model=str(directory), max_num_seqs=4)
    run_job(JobSpec(input=str(source), output=str(output), config=config), quiet=True)
    found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output.read_text().splitlines())}
    return {path: [served[path], found[path]] for path in bodies}


def relevance(answer: dict[str, Any]) -> list[float]:
    """Scores in the order of the documents."""
    return [item["relevance_score"] for item in sorted(answer["results"], key=lambda item: item["index"])]


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_embeddings_and_rankings_are_those_of_an_embedding_model(kind: str, tmp_path: Path) -> None:
    model = save_embedding_model(tmp_path, kind, "mean")
    bodies: Bodies = {
        "/v1/embeddings": {"input": TEXTS},
        "/v1/rerank": {"query": QUERY, "documents": TEXTS},
        "/score": {"text_1": QUERY, "text_2": TEXTS},
    }
    cosines = library.util.cos_sim(model.encode_query([QUERY]), model.encode_document(TEXTS))[0].numpy()
    found = answers(tmp_path / "saved", bodies)
    for answer in found["/v1/embeddings"]:
        np.testing.assert_allclose([item["embedding"] for item in answer["data"]], model.encode(TEXTS), **CLOSE)
    for answer in found["/v1/rerank"]:
        np.testing.assert_allclose(relevance(answer), cosines, **CLOSE)
    for answer in found["/score"]:
        np.testing.assert_allclose([item["score"] for item in answer["data"]], cosines, **CLOSE)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_rankings_and_scores_are_those_of_a_cross_encoder(kind: str, tmp_path: Path) -> None:
    model = save_cross_encoder(tmp_path, kind)
    bodies: Bodies = {
        "/v1/rerank": {"query": QUERY, "documents": TEXTS},
        "/score": {"text_1": QUERY, "text_2": TEXTS},
    }
    expected = model.predict([(QUERY, text) for text in TEXTS])
    ranked = [item["corpus_id"] for item in model.rank(QUERY, TEXTS)]
    found = answers(tmp_path / "saved", bodies)
    for answer in found["/v1/rerank"]:
        np.testing.assert_allclose(relevance(answer), expected, **CLOSE)
        assert [item["index"] for item in answer["results"]] == ranked
    for answer in found["/score"]:
        np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, **CLOSE)
