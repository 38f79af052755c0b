"""The Batch API as OpenAI's client sees it, with a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from headrace.config import EngineConfig
from headrace.server.endpoints import ROUTES
from headrace.server.http.app import App
from headrace.server.http.keys import Keys
from headrace.server.options import ServerOptions
from headrace.server.serve import Server
from tests.engine.process.process_tools import wait_until
from tests.server.asgi import GateBench
from tests.server.batch.batch_server import (
    CHAT,
    COMPLETIONS,
    MODEL,
    BatchServer,
    create,
    line,
    results,
    serving_batches,
    upload,
    wait_for,
)
from tests.server.whole_server import LimitedEngine


def test_a_batch_answers_each_line_once(client: openai.OpenAI) -> None:
    batch = create(client, [line(f"line-{number}") for number in range(12)])
    assert batch.status == "validating" and batch.object == "batch" and batch.id.startswith("batch_")
    batch = wait_for(client, batch.id, "completed", "failed")
    assert batch.errors is None and batch.error_file_id is None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (12, 12, 0)
    answers = results(client, batch.output_file_id)
    assert answers.keys() == {f"line-{number}" for number in range(12)}
    for each in answers.values():
        assert each["error"] is None and each["response"]["status_code"] == 200
        assert each["response"]["body"]["model"] == MODEL
    num_output = sum(each["response"]["body"]["usage"]["completion_tokens"] for each in answers.values())
    num_input = sum(each["response"]["body"]["usage"]["prompt_tokens"] for each in answers.values())
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (num_input, num_output)
    assert batch.usage.total_tokens == num_input + num_output
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.expires_at == batch.created_at + 24 * 3600 and batch.model == MODEL
    assert batch.failed_at is batch.cancelled_at is batch.expired_at is None


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
def test_every_endpoint_can_be_asked_in_a_batch(client: openai.OpenAI, endpoint: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
        "/v1/embeddings": {"input": ["hi", "ho"]},
    }
    asked = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": MODEL, **bodies[endpoint]}}]
    batch = wait_for(client, create(client, asked, endpoint).id, "completed", "failed")
    (answer,) = results(client, batch.output_file_id).values()
    assert answer["response"]["status_code"] == 200
    assert batch.usage.input_tokens > 0 and (batch.usage.output_tokens > 0) == (endpoint != "/v1/embeddings")


def test_a_bad_file_fails_the_batch_and_reports_each_line(client: openai.OpenAI) -> None:
    batch = create(client, [line("a"), "not json", line("a"), line("b", url=CHAT), line("c", model="other")])
    batch = wait_for(client, batch.id, "completed", "failed")
    assert batch.status == "failed" and batch.failed_at is not None and batch.errors.object == "list"
    found = [(error.line, error.code) for error in batch.errors.data]
    assert found == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "url_mismatch"),
        (5, "model_not_found"),
    ]
    assert batch.output_file_id is batch.error_file_id is batch.in_progress_at is None


def test_a_wrong_body_becomes_a_line_of_the_error_file(client: openai.OpenAI) -> None:
    batch = create(client, [line("good"), line("bad", temperature=-1)])
    batch = wait_for(client, batch.id, "completed", "failed")
    assert batch.status == "completed" and batch.request_counts.failed == batch.request_counts.completed == 1
    (error,) = results(client, batch.error_file_id).values()
    assert error["custom_id"] == "bad" and error["error"] is None and error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert results(client, batch.output_file_id).keys() == {"good"}


def test_a_batch_without_answers_is_completed_without_an_output_file(client: openai.OpenAI) -> None:
    batch = wait_for(client, create(client, [line("bad", temperature=-1)]).id, "completed", "failed")
    assert batch.status == "completed" and batch.output_file_id is None and batch.error_file_id is not None


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ({"extra_body": {"priority": 1001}}, "priority"),
        ({"extra_body": {"priority": "high"}}, "priority"),
    ],
)
def test_a_wrong_request_for_a_batch_is_a_400(client: openai.OpenAI, changed: dict[str, Any], param: str) -> None:
    given: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h"} | changed
    with pytest.raises(openai.BadRequestError) as raised:
        client.batches.create(input_file_id=upload(client, [line("a")]), **given)
    assert raised.value.param == param


def test_a_batch_of_a_deleted_file_is_a_404(client: openai.OpenAI) -> None:
    file_id = upload(client, [line("a")])
    client.files.delete(file_id)
    with pytest.raises(openai.NotFoundError) as raised:
        client.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h")
    assert raised.value.param == "input_file_id"


def test_a_file_may_be_deleted_while_its_batch_runs(
    client: openai.OpenAI, server: BatchServer, engine: LimitedEngine
) -> None:
    engine.client.limit_running(0)
    batch = create(client, [line("a"), line("b")])
    client.files.delete(batch.input_file_id)
    engine.client.limit_running(None)
    batch = wait_for(client, batch.id, "completed", "failed")
    assert results(client, batch.output_file_id).keys() == {"a", "b"}


def test_metadata_and_the_life_of_the_output_are_kept(client: openai.OpenAI) -> None:
    batch = client.batches.create(
        input_file_id=upload(client, [line("a")]),
        endpoint=COMPLETIONS,
        completion_window="24h",
        metadata={"team": "red"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    batch = wait_for(client, batch.id, "completed")
    file = client.files.retrieve(batch.output_file_id or "")
    assert batch.metadata == {"team": "red"} and file.purpose == "batch_output"
    assert file.expires_at == file.created_at + 3600 and file.filename == f"{batch.id}_output.jsonl"


def test_batches_are_listed_in_pages(client: openai.OpenAI) -> None:
    file_id = upload(client, ["bad"])
    ids = [
        client.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h").id for _ in range(5)
    ]
    page = client.batches.list(limit=2)
    assert [each.id for each in page.data] == ids[:2:-1] and page.has_more
    assert [each.id for each in client.batches.list(limit=2)] == ids[::-1]


def test_a_batch_of_50_001_lines_fails_and_one_of_50_000_does_not(client: openai.OpenAI, engine: LimitedEngine) -> None:
    lines = [line(str(number)) for number in range(50_001)]
    engine.client.limit_running(0)
    batch = wait_for(client, create(client, lines).id, "failed", "in_progress")
    assert batch.status == "failed" and [error.code for error in batch.errors.data] == ["too_many_tasks"]
    batch = wait_for(client, create(client, lines[1:]).id, "failed", "in_progress")
    assert batch.status == "in_progress" and batch.request_counts.total == 50_000
    client.batches.cancel(batch.id)
    engine.client.limit_running(None)
    wait_for(client, batch.id, "cancelled")


def test_a_batch_that_finds_no_room_on_the_disk_is_a_507(client: openai.OpenAI, server: BatchServer) -> None:
    store = server.service.store
    (num_pages,) = store._database.execute("PRAGMA max_page_count").fetchone()
    file_id = upload(client, ["bad"])

    def start(number: int = 1) -> Any:
        """The last of so many batches."""
        asked = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        return [client.batches.create(**asked) for _ in range(number)][-1]

    store._database.execute("PRAGMA max_page_count=1")  # no page more than there are
    with pytest.raises(openai.InternalServerError) as raised:
        start(99)
    assert raised.value.status_code == 507 and raised.value.code == "insufficient_storage"
    store._database.execute(f"PRAGMA max_page_count={num_pages}")
    assert wait_for(client, start().id, "failed").errors.data[0].code == "invalid_json_line"


def test_batches_and_their_lines_are_counted(client: openai.OpenAI, server: BatchServer) -> None:
    batch = wait_for(client, create(client, [line("a"), line("b"), line("c", temperature=-1)]).id, "completed")
    assert batch.request_counts.failed == 1
    runner = server.service.runner
    wait_until(lambda: runner.num_by_status["completed"] > 0 and runner.num_failed > 0)  # counted just after the end
    page = httpx2.get(f"{server.url}/metrics").text
    assert 'headrace:batches{engine="0",model_name="tiny",status="completed"} 1.0' in page
    assert 'headrace:batches{engine="0",model_name="tiny",status="in_progress"} 0.0' in page
    assert 'headrace:batch_lines_total{engine="0",model_name="tiny",result="answered"} 2.0' in page
    assert 'headrace:batch_lines_total{engine="0",model_name="tiny",result="failed"} 1.0' in page


def test_other_keys_see_neither_files_nor_batches(engine: LimitedEngine, config: EngineConfig, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one first-key\ntwo second-key\n")
    keys.chmod(0o600)
    with serving_batches(engine, config, tmp_path / "batches", api_key_file=str(keys)) as server:
        with server.client("first-key") as first, server.client("second-key") as second:
            batch = wait_for(first, create(first, [line("a")]).id, "completed")
            for call in (second.files.retrieve, second.files.content, second.files.delete):
                with pytest.raises(openai.NotFoundError):
                    call(batch.input_file_id)
            for other in (second.batches.retrieve, second.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    other(batch.id)
            with pytest.raises(openai.NotFoundError):
                second.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
            assert not list(second.files.list()) and not list(second.batches.list())
            assert len(list(first.files.list())) == 2
        with server.client("wrong-key") as nobody, pytest.raises(openai.AuthenticationError):
            nobody.files.list()
        content = b"".join(path.read_bytes() for path in (tmp_path / "batches").glob("*") if path.is_file())
        assert b"first-key" not in content


def test_quotas_are_a_429(engine: LimitedEngine, config: EngineConfig, tmp_path: Path) -> None:
    limits = {"max_files_per_key": 2, "max_batches_per_key": 1}
    with serving_batches(engine, config, tmp_path / "batches", **limits) as server, server.client() as client:
        engine.client.limit_running(0)
        create(client, [line("a")])
        with pytest.raises(openai.RateLimitError, match="1 batches of this key are unfinished") as raised:
            create(client, [line("a")])
        assert raised.value.code == "quota_exceeded"
        with pytest.raises(openai.RateLimitError, match="already stores 2 files"):
            upload(client, [line("a")])
        engine.client.limit_running(None)


def test_without_a_directory_the_routes_name_the_flag(engine: LimitedEngine) -> None:
    options = ServerOptions()
    server = Server(engine, options, Keys(options, environ={}, print_line=print), model_name="m", print_line=print)
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/batch_1")):
        answer = GateBench(App(server.services, ROUTES)).ask(path, method=method)
        assert answer.status == 501 and "--batch-dir" in answer.error["message"]
