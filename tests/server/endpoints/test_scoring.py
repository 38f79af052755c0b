"""/rerank, /score, /classify, /pooling and /v2/embed over HTTP: vLLM's shapes, and what each kind of model refuses."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny_encoders import save_encoder, save_modules
from tests.server.serving import MODEL, Server, serving

CHAT = {"messages": [{"role": "user", "content": "w1"}]}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("reranker")
    save_encoder(directory, "bert", "ForSequenceClassification", num_labels=1)
    with serving(str(directory)) as running:
        yield running


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("embedder")
    save_encoder(directory, "bert", matryoshka_dimensions=[8, 16])
    save_modules(directory, "cls_token", prompts={"query": "w1 "})
    with serving(str(directory)) as running:
        yield running


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_documents_are_ranked_by_their_scores(reranker: Server) -> None:
    documents = ["w5 w6", "w7", "w8 w9 w10"]
    scores = post(reranker, "/score", text_1="w2 w3", text_2=documents)
    assert scores["id"].startswith("score-") and (scores["object"], scores["model"]) == ("list", MODEL)
    assert [(item["index"], item["object"]) for item in scores["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    by_index = [item["score"] for item in scores["data"]]
    assert all(0 < score < 1 for score in by_index) and len(set(by_index)) == 3
    order = sorted(range(3), key=lambda index: -by_index[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranking = post(reranker, path, model=MODEL, query="w2 w3", documents=documents, top_n=2)
        assert ranking["id"].startswith("rerank-")
        assert [item["index"] for item in ranking["results"]] == order[:2]
        for item in ranking["results"]:
            assert item["document"] == {"text": documents[item["index"]], "multi_modal": None}
            assert item["relevance_score"] == pytest.approx(by_index[item["index"]], abs=1e-6)
        assert ranking["usage"]["total_tokens"] == scores["usage"]["total_tokens"] == 3 * 5 + 6
    invoked = post(reranker, "/invocations", query="w2 w3", documents=documents, top_n=1)
    assert [item["index"] for item in invoked["results"]] == order[:1]
    assert post(reranker, "/invocations", input="w1")["data"][0]["label"] == "LABEL_0"
    hidden = post(reranker, "/rerank", query="w2", documents=[{"text": "w5"}], return_documents=False)
    assert hidden["results"][0].keys() == {"index", "relevance_score"}


def test_scores_take_vllms_other_names_and_pairs_of_lists(reranker: Server) -> None:
    pairs = {"queries": ["w2", "w3"], "documents": ["w4", "w5"]}
    listed = [item["score"] for item in post(reranker, "/v1/score", **pairs)["data"]]
    single = [
        post(reranker, "/v1/score", data_1=a, data_2=b)["data"][0]["score"] for a, b in (("w2", "w4"), ("w3", "w5"))
    ]
    assert listed == pytest.approx(single, abs=1e-6)
    assert "one of these pairs" in refused(reranker, "/score", text_1="w1", documents="w2")["message"]
    assert "2 texts and text_2 3" in refused(reranker, "/score", text_1=["a", "b"], text_2=["a", "b", "c"])["message"]
    assert refused(reranker, "/rerank", query="w1", documents=[])["param"] == "documents"
    long = "w1 " * 200
    assert refused(reranker, "/rerank", query="w1", documents=[long])["code"] == "context_length_exceeded"
    cut = post(reranker, "/rerank", query="w1", documents=[long], truncate_prompt_tokens=20)
    assert cut["usage"]["total_tokens"] == 20


def test_classes_and_pooled_outputs_have_vllms_shapes(reranker: Server) -> None:
    classes = post(reranker, "/classify", input=["w1", "w2 w3"])
    assert [item["index"] for item in classes["data"]] == [0, 1] and classes["id"].startswith("classify-")
    first = classes["data"][0]
    assert (first["label"], first["num_classes"], len(first["probs"])) == ("LABEL_0", 1, 1)
    pooled = post(reranker, "/pooling", input="w1", use_activation=False)
    (item,) = pooled["data"]
    assert (item["object"], item["index"], len(item["data"])) == ("pooling", 0, 1)
    assert item["data"] != pytest.approx(first["probs"], abs=1e-4)
    binary = post(reranker, "/pooling", input="w1", encoding_format="base64", embed_dtype="float32")["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(binary), "<f4").tolist() == pytest.approx(first["probs"], abs=1e-6)
    assert "embed_dtype is not supported" in refused(reranker, "/pooling", input="w1", embed_dtype="int8")["message"]


def test_an_embedding_model_scores_by_cosine_with_its_prompts(embedder: Server) -> None:
    ranking = post(embedder, "/rerank", query="w2 w3", documents=["w5", "w1 w2 w3"])
    assert ranking["results"][0]["index"] == 1 and ranking["results"][0]["relevance_score"] == pytest.approx(
        1, abs=1e-5
    )
    cut = post(embedder, "/v1/embeddings", input="w4 w5", dimensions=8)["data"][0]["embedding"]
    whole = post(embedder, "/v1/embeddings", input="w4 w5", use_activation=False)["data"][0]["embedding"]
    assert len(cut) == 8 and sum(value**2 for value in cut) == pytest.approx(1, abs=1e-5)
    assert cut[0] / cut[1] == pytest.approx(whole[0] / whole[1], rel=1e-4)
    assert refused(embedder, "/v1/embeddings", input="w4", dimensions=9)["param"] == "dimensions"
    assert "gives embeddings" in refused(embedder, "/classify", input="w4")["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_pooling_model_refuses_to_generate(path: str, embedder: Server) -> None:
    bodies: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "w1"}, "/v1/responses": {"input": "w1"}}
    answer = embedder.post(path, bodies.get(path, {**CHAT, "model": MODEL, "max_tokens": 4}))
    assert answer.status_code == 400 and "generates no text" in answer.text


def test_a_model_that_generates_refuses_scores_and_classes(server: Server) -> None:
    assert "does not support scoring" in refused(server, "/rerank", query="a", documents=["b"])["message"]
    assert "does not support scoring" in refused(server, "/score", text_1="a", text_2="b")["message"]
    assert "does not support classify" in refused(server, "/classify", input="a")["message"]
    assert "does not support pooling" in refused(server, "/pooling", input="a")["message"]
    assert "matryoshka" in refused(server, "/v1/embeddings", input="a", dimensions=4)["message"]


def test_coheres_embeddings_have_its_shape_in_each_type(embedder: Server) -> None:
    plain = post(embedder, "/v1/embeddings", input="w4 w5")["data"][0]["embedding"]
    types = ["float", "base64", "binary", "ubinary"]
    answer = post(embedder, "/v2/embed", model=MODEL, texts=["w4 w5", "w6"], embedding_types=types)
    assert (answer["texts"], answer["response_type"]) == (["w4 w5", "w6"], "embeddings_by_type")
    assert answer["meta"]["billed_units"] == {"input_tokens": 4 + 3}
    found = {name: values[0] for name, values in answer["embeddings"].items()}
    assert list(found) == types and found["float"] == pytest.approx(plain, abs=1e-6)
    assert np.frombuffer(base64.b64decode(found["base64"]), "<f4").tolist() == pytest.approx(plain, abs=1e-6)
    bits = np.unpackbits(np.array(found["ubinary"], np.uint8))
    assert bits.tolist() == [int(value > 0) for value in plain]
    assert [value + 128 for value in found["binary"]] == found["ubinary"]
    assert len(post(embedder, "/v2/embed", texts=["w4"], output_dimension=8)["embeddings"]["float"][0]) == 8


def test_coheres_input_type_chooses_the_prompt_and_truncate_what_becomes_of_a_long_text(embedder: Server) -> None:
    def of(text: str, **more: Any) -> Any:
        return post(embedder, "/v2/embed", texts=[text], **more)["embeddings"]["float"][0]

    assert of("w4", input_type="search_query") == pytest.approx(of("w1 w4"), abs=1e-6)
    assert of("w4", input_type="search_document") == pytest.approx(of("w4"), abs=1e-6)
    long = "w4 " * 200
    assert len(of(long)) == len(of("w4"))
    assert refused(embedder, "/v2/embed", texts=[long], truncate="NONE")["code"] == "context_length_exceeded"
    for name, value in {
        "truncate": "START",
        "input_type": "image",
        "embedding_types": ["int8"],
        "images": ["x"],
    }.items():
        assert refused(embedder, "/v2/embed", **{"texts": ["w4"], name: value})["param"] == name
    assert refused(embedder, "/v2/embed", texts=[])["param"] == "texts"
