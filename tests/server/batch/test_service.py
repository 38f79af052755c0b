"""The Batch API as OpenAI's client sees it, with a small model."""

from __future__ import annotations

import openai

from tests.server.batch.batch_server import MODEL, create, line, results, wait_for


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
