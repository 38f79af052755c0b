"""The dashboard page as a person uses it, in a real Chromium."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.doctor.diagnosis import Diagnosis
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import Advice, Finding
from headrace.hardware.gpu_monitor import GpuFigures
from headrace.hardware.nvml import GpuSample
from tests.server.live import until
from tests.server.whole_server import LimitedEngine, Running, running, with_server

pytest.importorskip("playwright", reason="no playwright: pip install playwright")

from playwright.async_api import expect

from tests.server.page.browser import Dashboard, dashboard, needs_chromium

pytestmark = [pytest.mark.browser, needs_chromium]

ODD_NAME = '<img src=x onerror="document.title=1">&amp;</h1>"\'`${x}'
NARROW = {"viewport": {"width": 340, "height": 700}}
SHOWN = ["body", "#about", ".values dd", ".values dt", "#state", "button", "#settings td"]
COLOURS = """(selectors) => selectors.map((selector) => {
    const element = document.querySelector(selector);
    const paper = (each) => getComputedStyle(each).backgroundColor;
    let behind = element;
    while (paper(behind) === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    return [selector, getComputedStyle(element).color, paper(behind)];
})"""  # text and background of elements
IS_A_NUMBER = re.compile(r"^[1-9][\d.,]*|^0\.\d")

expect.set_options(timeout=20_000)  # ends a test that hangs; no result depends on it


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    config = EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256)
    made = LimitedEngine.of(config)
    yield made
    asyncio.run(made.close())


async def load(made: Running, num_requests: int = 4) -> None:
    """Requests between two samples."""
    made.server.self_monitor.sample()
    answers = await asyncio.gather(*(made.complete(max_tokens=20, ignore_eos=True) for _ in range(num_requests)))
    assert {answer.status_code for answer in answers} == {200}
    made.server.self_monitor.sample()


@asynccontextmanager
async def under_load(made: Running) -> AsyncIterator[None]:
    """One request after the other, so that no rate falls to 0 while a test looks at it."""

    async def send() -> None:
        while True:
            assert (await made.complete(max_tokens=20, ignore_eos=True)).status_code == 200

    made.server.self_monitor.sample()
    task = asyncio.create_task(send())
    try:
        yield
        assert not task.done(), "a request failed"
    finally:
        task.cancel()
        await asyncio.wait([task])


async def is_ready(page: Dashboard) -> None:
    await expect(page.tab.locator("#settings tr").first).to_be_visible()
    await expect(page.tab.locator("#state")).to_have_text("ready")


def test_the_page_shows_what_the_server_does_and_asks_nobody_else(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            await expect(page.tab.locator("h1")).to_have_text("Headrace tiny")
            await expect(page.figure("num_running")).to_have_text("0")
            await expect(page.figure("ttft_p50_s")).to_have_text("–")
            await expect(page.figure("ttft_p50_s")).to_have_attribute("title", "no request in the last minute")
            await expect(page.tab.locator("#gpus")).to_have_text("No GPU figures: the engine runs on the CPU.")
            await expect(page.tab.locator("#alerts-summary")).to_have_text("Not evaluated yet")
            async with under_load(made):
                for name in (
                    "generation_tokens_per_s",
                    "finished_per_s",
                    "ttft_p50_s",
                    "ttft_p95_s",
                    "itl_p50_s",
                    "e2e_p95_s",
                ):
                    await expect(page.figure(name)).to_have_text(IS_A_NUMBER)
                await expect(page.figure("prefix_hit_share")).to_have_text(re.compile(r"^[1-9]\d* %$"))
                await expect(page.tab.locator("#alerts-summary")).to_contain_text("None firing")
            assert page.complaints == []
            assert page.outside == []
            assert {address.partition("?")[0].removeprefix(page.url) for address in page.requested} == {
                *("/", "/dashboard/data", "/alerts", "/bottleneck", "/server_info"),
            }

    with_server(engine, body)


def test_the_bottleneck_is_shown_with_its_numbers_and_advice(engine: LimitedEngine) -> None:
    advice = Advice(text="raise max_num_seqs from 8 to 64", certainty="predicted", gain=0.4)
    finding = Finding(
        severity="problem", title="the batch is too small", numbers=(("waiting", "5"),), why="slots", advice=(advice,)
    )
    evidence = Evidence(source="live", origin="a test", engine="headrace")
    diagnosis = Diagnosis(evidence, "problems found", finding, (finding,), 18, ())

    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            await expect(page.tab.locator("#bottleneck")).to_contain_text("Not enough evidence")
            await expect(page.tab.locator("#findings .item")).to_have_count(0)
            made.server.bottleneck._publish(diagnosis)
            made.server.self_monitor.sample()  # with which the page asks for the diagnosis
            await expect(page.tab.locator("#bottleneck")).to_have_text(diagnosis.headline)
            item = page.tab.locator("#findings .item")
            await expect(item).to_contain_text("The batch is too small: waiting 5")
            advised = "Raise max_num_seqs from 8 to 64 (up to 40 % more throughput, predicted)"
            await expect(item.locator("li")).to_have_text(advised)

    with_server(engine, body, clock=lambda: 0.0)


def test_running_and_waiting_requests_move(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            engine.client.limit_running(0)
            tasks = [asyncio.create_task(made.complete()) for _ in range(3)]
            await expect(page.figure("num_waiting")).to_have_text("3")
            engine.client.limit_running(None)
            await asyncio.gather(*tasks)
            await expect(page.figure("num_waiting")).to_have_text("0")

    with_server(engine, body)


def test_charts_have_a_point_for_each_sample_and_a_cursor(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        for _ in range(4):
            await load(made, 1)
        async with dashboard(made) as page:
            await is_ready(page)
            card = page.tab.locator(".card", has_text="Throughput")
            line = await card.locator("path.line-0.line").get_attribute("d")
            assert line is not None and line.count("L") >= 7  # eight samples without the first, and this moment
            chart = card.locator("svg")
            assert "highest" in (await chart.get_attribute("aria-label") or "")
            await expect(card.locator("time")).to_have_text("now")
            await chart.hover()
            await expect(card.locator("time")).to_have_text(re.compile(r"^at \d\d:\d\d:\d\d$"))
            await expect(page.tab.locator("line.cursor")).to_have_count(8)  # in every chart
            await page.tab.mouse.move(1, 1)
            await expect(card.locator("time")).to_have_text("now")
            await chart.focus()
            await page.tab.keyboard.press("Home")
            await expect(page.figure("generation_tokens_per_s")).to_have_text("–")  # the first sample has no rate
            await page.tab.keyboard.press("Escape")
            await expect(card.locator("time")).to_have_text("now")
            assert page.complaints == []

    with_server(engine, body)


def test_settings_can_be_searched(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            await expect(page.tab.locator("#batches-panel")).to_be_hidden()  # this server has no --batch-dir
            rows = page.tab.locator("#settings tr:visible")
            total = await rows.count()
            assert total > 30
            await page.tab.fill("#settings-search", "--max-num-queued-reqs")
            await expect(rows).to_have_text(["max_num_queued_reqs1024automatic4 x max_num_seqs, at least 1,024"])
            await expect(page.tab.locator("#settings-count")).to_have_text(f"1 of {total}")
            await page.tab.fill("#settings-search", "automatic KV CACHE")
            assert 0 < await rows.count() < total
            await page.tab.fill("#settings-search", "no such setting")
            await expect(rows).to_have_count(0)
            await page.tab.fill("#settings-search", "")
            await expect(rows).to_have_count(total)

    with_server(engine, body)


def test_a_prompt_is_answered_as_a_stream(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            for mode in ("chat", "completion"):
                await page.tab.select_option("#mode", mode)
                await page.tab.fill("#prompt", "Hello")
                await page.tab.fill("#max-tokens", "24")
                await page.tab.press("#prompt", "Control+Enter")
                stats = page.tab.locator("#prompt-stats")
                await expect(stats).to_have_text(
                    re.compile(r"^finish reason \w+ · TTFT [\d.]+ m?s · ([\d.,]+ tokens/s · )?\d+ tokens · prompt \d+ ")
                )
                await expect(page.tab.locator("#answer")).not_to_be_empty()
                await expect(page.tab.locator("#stop")).to_be_disabled()
            assert page.complaints == []

    with_server(engine, body)


def test_a_prompt_can_be_stopped(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            engine.client.limit_running(0)
            await page.tab.click("#send")
            await until(lambda: made.engine.stats.scheduler.num_waiting == 1)
            await expect(page.tab.locator("#prompt-stats")).to_have_text("waiting for the first token")
            await expect(page.tab.locator("#send")).to_be_disabled()
            await page.tab.click("#stop")
            await expect(page.tab.locator("#prompt-stats")).to_have_text("stopped")
            await until(lambda: made.engine.stats.scheduler.num_waiting == 0)  # the server has noticed
            await expect(page.tab.locator("#send")).to_be_enabled()

    with_server(engine, body)


def test_an_error_of_a_prompt_is_shown(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            await page.tab.fill("#max-tokens", "99999")
            await page.tab.click("#send")
            await expect(page.tab.locator("#answer")).to_contain_text("max_tokens")
            await expect(page.tab.locator("#send")).to_be_enabled()

    with_server(engine, body)


def test_a_key_is_asked_for_and_is_in_no_address(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            tab = page.tab
            await expect(tab.locator("#key-form")).to_be_visible()
            await expect(tab.locator("#board")).to_be_hidden()
            await expect(tab.locator("#key-error")).to_be_hidden()
            await tab.fill("#key", "wrong-key")
            await tab.press("#key", "Enter")
            await expect(tab.locator("#key-error")).to_have_text("The server does not accept this key.")
            await tab.fill("#key", "sesame-key")
            await tab.click("#key-form button")
            await is_ready(page)
            await expect(tab.locator("#key-form")).to_be_hidden()
            await tab.click("#send")
            await expect(tab.locator("#prompt-stats")).to_contain_text("finish reason")
            await tab.reload()  # the key is kept in the tab
            await is_ready(page)
            await tab.click("#forget-key")
            await expect(tab.locator("#key-form")).to_be_visible()
            assert not [address for address in page.requested if "-key" in address]
            assert "key" not in tab.url
            assert page.outside == []

    with_server(engine, body, api_key="sesame-key")


def test_an_alert_is_shown_with_its_advice(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            made.server.self_monitor.sample()
            made.server.metrics.restarted()
            made.server.self_monitor.sample()
            await expect(page.tab.locator("#alerts-summary")).to_contain_text("1 firing")
            alert = page.tab.locator("#active-alerts .item")
            await expect(alert).to_contain_text("EngineRestarted firing (warning), engine restarts in 10 min: 1")
            await expect(alert).to_contain_text("Read the log before the restart.")
            await page.tab.click("text=All alerts")
            row = page.tab.locator("#all-alerts tr", has_text="TimeToFirstTokenHigh")
            await expect(row).to_contain_text("unknown")
            await expect(row.locator("td").nth(1)).to_have_attribute("title", re.compile("needs 200 requests"))

    with_server(engine, body)


def test_figures_of_a_gpu_are_shown_and_unknown_ones_are_a_dash(engine: LimitedEngine) -> None:
    sample = GpuSample(
        0.0, 0, "GPU-0", "NVIDIA <i>H200</i>", utilization=0.5, memory_total_bytes=2.0**33, power_w=310.4
    )

    async def body(made: Running) -> None:
        made.server.gpus.now = lambda: GpuFigures((sample,), "nvml")  # type: ignore[method-assign]
        async with dashboard(made) as page:
            await is_ready(page)
            gpu = page.tab.locator("#gpus .gpu")
            await expect(gpu.locator("h3")).to_have_text("0: NVIDIA <i>H200</i>")
            await expect(gpu.locator("dd")).to_have_text(["", "50 %", "", "– of 8 GiB", "310 W"])
            await expect(gpu.locator("dd").nth(3)).to_have_attribute("title", "the GPU does not report it")
            assert page.complaints == []

    with_server(engine, body)


def test_an_odd_name_is_shown_as_it_is(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        made.server.services.model_name = ODD_NAME
        async with dashboard(made) as page:
            await is_ready(page)
            await expect(page.tab.locator("h1")).to_have_text(f"Headrace {ODD_NAME}")
            await expect(page.tab).to_have_title(f"Headrace · {ODD_NAME}")
            await expect(page.tab.locator("#settings tr", has_text=ODD_NAME)).to_have_count(1)
            await expect(page.tab.locator("img")).to_have_count(0)
            assert page.complaints == []

    with_server(engine, body)


@pytest.mark.slow
def test_the_page_recovers_after_a_restart_of_the_server(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        port = made.client.base_url.port
        async with dashboard(made) as page:
            await load(made)
            await is_ready(page)
            made.server.lifecycle.stop()
            await made.exit
            notice = page.tab.locator("#notice")
            await expect(notice).to_have_text(re.compile(r"^Not reachable since \d\d:\d\d:\d\d\."))
            await expect(page.tab.locator("#state")).to_have_text("not reachable")
            await expect(page.tab.locator(".card time").first).to_have_text("last known")
            async with running(engine, port=port) as again:
                await is_ready(page)
                await expect(notice).to_be_hidden()
                await expect(page.tab.locator(".card time").first).to_have_text("now")
                await expect(page.tab.locator("path.line")).to_have_count(0)  # the samples of the new server only
                async with under_load(again):
                    await expect(page.figure("finished_per_s")).to_have_text(IS_A_NUMBER)

    with_server(engine, body)


def test_a_hidden_page_asks_nothing(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            await page.tab.clock.install()
            await page.tab.reload()
            await is_ready(page)
            await page.tab.evaluate("Object.defineProperty(document, 'hidden', { get: () => window.isHidden })")
            await page.tab.evaluate("window.isHidden = true; document.dispatchEvent(new Event('visibilitychange'))")
            await page.tab.wait_for_load_state("networkidle")
            num_requests = len(page.requested)
            await page.tab.clock.run_for(60_000)
            assert len(page.requested) == num_requests
            async with page.tab.expect_request("**/dashboard/data*"):
                await page.tab.evaluate(
                    "window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))"
                )

    with_server(engine, body)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_have_contrast(engine: LimitedEngine, scheme: str) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made, color_scheme=scheme) as page:
            await is_ready(page)
            colours = await page.tab.evaluate(COLOURS, SHOWN)
            is_dark = luminance(colours[0][2]) < 0.1
            assert is_dark == (scheme == "dark")
            for selector, ink, paper in colours:
                assert contrast(ink, paper) >= 4.5, selector  # WCAG's level AA

    with_server(engine, body)


def luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_narrow_screen_needs_no_horizontal_scrolling(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        made.server.services.model_name = "a-very-long-name-of-a-model" * 8
        async with dashboard(made, **NARROW) as page:
            await load(made)
            await is_ready(page)
            await page.tab.click("text=All alerts")
            for width in (340, 640, 900):
                await page.tab.set_viewport_size({"width": width, "height": 700})
                shown, available = await page.tab.evaluate(
                    "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
                )
                assert shown <= available, width

    with_server(engine, body)


def test_everything_can_be_reached_with_the_keyboard(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        async with dashboard(made) as page:
            await is_ready(page)
            reached = []
            for _ in range(40):
                await page.tab.keyboard.press("Tab")
                reached.append(
                    await page.tab.evaluate(
                        "() => document.activeElement.id || document.activeElement.tagName.toLowerCase()"
                    )
                )
            assert reached.count("svg") >= 8
            wanted = ["summary", "prompt", "mode", "max-tokens", "temperature", "send", "answer", "settings-search"]
            assert [name for name in dict.fromkeys(reached) if name in wanted] == wanted
            unnamed = await page.tab.evaluate(
                "() => [...document.querySelectorAll('input, select, textarea')]"
                ".filter((each) => !each.labels.length).map((each) => each.id)"
            )
            assert unnamed == []

    with_server(engine, body)
