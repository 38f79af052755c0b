"""Two scrapes of a server become the evidence of the interval between them."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from headrace.doctor.diagnosis import diagnose
from headrace.doctor.readers.live import ScrapeError, evidence_of_pages, read_live
from tests.doctor.pages import HeadraceServer, vllm_page


def test_counters_of_headrace_are_differences_and_not_lifetime_totals() -> None:
    server = HeadraceServer()
    server.work(num_generated_tokens=90_000, num_prompt_tokens=500_000, num_preemptions=400, num_steps=5_000)
    before = server.scrape(num_running=10, num_waiting=0, num_blocks_held=200)
    server.work(num_generated_tokens=1_000, num_prompt_tokens=2_000, num_preemptions=0, num_steps=50, host_s=0.2)
    server.finish(num_prompt=100, num_generated=50)
    after = server.scrape(num_running=30, num_waiting=4, num_blocks_held=600)
    seen = evidence_of_pages(before, after, seconds=10.0, origin="http://x")
    assert (seen.engine, seen.is_on_cpu) == ("headrace", False)
    assert (seen.output_tokens, seen.prompt_tokens, seen.num_preemptions) == (1_000, 2_000, 0)
    assert seen.output_tokens_per_s == 100
    assert (seen.num_running, seen.num_waiting, seen.kv_use) == (20, 2, 0.6)
    assert (seen.num_steps, seen.tokens_per_step) == (50, 100)
    assert seen.host_share == pytest.approx(0.2 / 1.1)
    assert (seen.prompt_len, seen.output_len, seen.num_requests) == (100, 50, 1)
    assert seen.settings["max_num_seqs"] == 256 and seen.cache_tokens == 16_000


def test_quantiles_come_from_the_growth_of_buckets() -> None:
    """A slow past does not hide a fast present, nor the other way round."""
    server = HeadraceServer()
    server.work(num_generated_tokens=100_000, gap_s=3.0)
    before = server.scrape()
    server.work(num_generated_tokens=1_000, gap_s=0.02)
    seen = evidence_of_pages(before, server.scrape(), seconds=10.0, origin="x")
    assert seen.token_gap_p99_s is not None and seen.token_gap_p99_s <= 0.025


def test_a_page_of_vllm_is_read_and_what_it_lacks_is_said() -> None:
    before = vllm_page(
        {"num_preemptions": 900, "prompt_tokens": 1e6, "generation_tokens": 1e6},
        {"num_requests_running": 40, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.7},
        gaps={0.02: 1000},
        finished=5000,
    )
    after = vllm_page(
        {"num_preemptions": 960, "prompt_tokens": 1.02e6, "generation_tokens": 1.01e6},
        {"num_requests_running": 60, "num_requests_waiting": 20, "kv_cache_usage_perc": 0.99},
        gaps={0.02: 1090, 0.4: 10},
        finished=5100,
    )
    seen = evidence_of_pages(before, after, seconds=10.0, origin="http://x")
    assert (seen.engine, seen.num_preemptions, seen.num_requests) == ("vllm", 60, 100)
    assert (seen.prompt_tokens, seen.output_tokens, seen.kv_use) == (20_000, 10_000, 0.99)
    assert seen.token_gap_p99_s is not None and 0.3 <= seen.token_gap_p99_s <= 0.4
    diagnosis = diagnose(seen)
    assert diagnosis.limit is not None and diagnosis.limit.rule == "cache-preempting"
    missing = {each.rule: each.missing for each in diagnosis.not_judged}
    assert missing["host"] == ("host and wait time of a step",)
    assert missing["slots-full"] == ("the setting max_num_seqs",)
    assert "drafts" not in missing  # vLLM has these series only with speculative decoding


def test_the_model_is_known_by_its_name_on_the_page() -> None:
    texts = [vllm_page({"generation_tokens": count, "prompt_tokens": 10}, {}) for count in (10, 900)]
    assert evidence_of_pages(*texts, seconds=1.0, origin="x").model is None
    named = [text.replace('model_name="m"', 'model_name="Qwen/Qwen3-8B"') for text in texts]
    model = evidence_of_pages(*named, seconds=1.0, origin="x").model
    assert model is not None and model.num_params == pytest.approx(8.2e9, rel=0.01)


def test_several_engines_are_judged_as_the_mean_of_them() -> None:
    def page(tokens: int, *running: int) -> str:
        each = [
            vllm_page({"generation_tokens": tokens, "prompt_tokens": 10}, {"num_requests_running": number})
            for number in running
        ]
        return "".join(text.replace('engine="0"', f'engine="{place}"') for place, text in enumerate(each))

    seen = evidence_of_pages(page(0, 4, 8), page(500, 4, 8), seconds=1.0, origin="x")
    assert (seen.output_tokens, seen.num_running) == (500, 6)
    assert seen.remarks[0].startswith("the server has 2 engines")
    assert not evidence_of_pages(page(0, 4), page(500, 4), seconds=1.0, origin="x").remarks


def test_the_aliases_on_our_page_are_not_counted_twice() -> None:
    server = HeadraceServer()
    before = server.scrape()
    server.work(num_generated_tokens=500, num_prompt_tokens=500)
    server.refuse(3)
    seen = evidence_of_pages(before, server.scrape(), seconds=1.0, origin="x")
    assert (seen.output_tokens, seen.num_refused) == (500, 3)


def test_only_requests_that_are_refused_because_of_load_count() -> None:
    server = HeadraceServer()
    before = server.scrape()
    for reason in ("auth", "not_found", "validation"):
        server.refuse(2, reason)
    assert evidence_of_pages(before, server.scrape(), seconds=1.0, origin="x").num_refused == 0
    server.refuse(1, "queue_tokens")
    assert evidence_of_pages(before, server.scrape(), seconds=1.0, origin="x").num_refused == 1


@pytest.mark.parametrize(("share", "rules"), [(0.98, ["memory-high"]), (0.9, []), (None, [])])
def test_the_memory_share_of_headrace_is_judged(share: float | None, rules: list[str]) -> None:
    server = HeadraceServer(memory_share=share)
    before = server.scrape()
    server.work(num_generated_tokens=5_000, num_prompt_tokens=5_000)
    diagnosis = diagnose(evidence_of_pages(before, server.scrape(), seconds=1.0, origin="x"))
    found = [finding.rule for finding in diagnosis.findings if finding.rule.startswith("memory")]
    assert found == rules
    assert not {"memory-low", "memory-high", "host"} & {each.rule for each in diagnosis.not_judged}


def test_a_server_that_restarts_between_the_scrapes_is_not_judged() -> None:
    old = vllm_page({"generation_tokens": 1000, "prompt_tokens": 10}, {})
    with pytest.raises(ScrapeError, match="restarted"):
        evidence_of_pages(old, vllm_page({"generation_tokens": 5, "prompt_tokens": 10}, {}), seconds=1, origin="x")
    server = HeadraceServer()
    before = server.scrape()
    server.restart()
    with pytest.raises(ScrapeError, match="engine was restarted"):
        evidence_of_pages(before, server.scrape(), seconds=1.0, origin="x")


def test_a_page_of_something_else_is_refused() -> None:
    with pytest.raises(ScrapeError, match="no series of Headrace, vLLM or SGLang"):
        evidence_of_pages("go_threads 3\n", "go_threads 3\n", seconds=1.0, origin="x")


def test_an_idle_server_gives_not_enough_evidence() -> None:
    server = HeadraceServer()
    server.work(num_generated_tokens=90_000, num_prompt_tokens=500_000, num_preemptions=400)
    diagnosis = diagnose(evidence_of_pages(server.scrape(), server.scrape(), seconds=10.0, origin="x"))
    assert diagnosis.outcome == "not enough evidence"
    assert "computed 0 tokens" in diagnosis.headline


@pytest.fixture
def pages() -> Iterator[tuple[str, list[str]]]:
    """An address whose /metrics serves these pages, one after the other."""
    texts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics" and texts
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(texts.pop(0).encode() if found else b"")

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", texts
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_live_server_is_scraped_twice(pages: tuple[str, list[str]]) -> None:
    address, texts = pages
    texts += [
        vllm_page({"generation_tokens": 100, "prompt_tokens": 10}, {}),
        vllm_page({"generation_tokens": 300, "prompt_tokens": 20}, {}),
    ]
    waited: list[float] = []
    seen = read_live(f"{address}/v1", interval_s=7.0, wait=waited.append)
    assert (waited, seen.output_tokens, seen.origin) == ([7.0], 200, address)


def test_a_server_without_metrics_is_an_error_with_a_hint(pages: tuple[str, list[str]]) -> None:
    with pytest.raises(ScrapeError, match="404; is this a server"):
        read_live(pages[0], interval_s=0.01)
