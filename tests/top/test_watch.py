from __future__ import annotations

import json

from headrace.top.watch import Reading, Watch
from tests.doctor.pages import HeadraceServer, vllm_page
from tests.top.servers import Clock, FakeServer, gone


def page(tokens: float) -> str:
    return vllm_page({"generation_tokens": tokens}, {"num_requests_running": 3})


def rate(reading: Reading) -> float | None:
    assert reading.figures is not None
    return reading.figures.generated_per_s


def watched(server: FakeServer, *, step_s: float = 2.0) -> list[Reading]:
    """Read all pages of a server."""
    clock = Clock()
    watch = Watch(server, clock=clock)
    readings = []
    while server.pages:
        readings.append(watch.read())
        clock.now += step_s
    assert [reading.figures for reading in readings] == list(watch.history)
    return readings


def test_rates_are_of_the_interval_between_two_scrapes() -> None:
    assert [rate(reading) for reading in watched(FakeServer(page(500), page(600), page(1600)))] == [None, 50, 500]


def test_a_server_that_goes_away_and_comes_back_is_shown_as_such() -> None:
    readings = watched(FakeServer(page(0), page(100), gone(), gone(), page(900), page(1000)))
    assert [reading.failure is None for reading in readings] == [True, True, False, False, True, True]
    assert "connection refused" in (readings[2].failure or "")
    assert (readings[2].down_s, readings[3].down_s) == (0.0, 2.0)
    # What was counted while nobody looked is not shown as one interval.
    assert [rate(readings[place]) for place in (1, 4, 5)] == [50, None, 50]


def test_a_server_that_was_restarted_between_two_scrapes_is_shown() -> None:
    _, _, third, fourth = watched(FakeServer(page(5000), page(6000), page(40), page(80)))
    assert third.figures is not None and third.figures.has_restarted and rate(third) == 20
    assert fourth.figures is not None and not fourth.figures.has_restarted and rate(fourth) == 20


def test_why_a_page_cannot_be_read_is_said() -> None:
    key, missing, other = watched(FakeServer(401, 404, "process_cpu_seconds_total 1\n"))
    assert "HEADRACE_API_KEY" in (key.failure or "") and "--api-key-env" in (key.failure or "")
    assert "status 404" in (missing.failure or "")
    assert "no series of Headrace, vLLM or SGLang" in (other.failure or "")


def test_the_servers_own_bottleneck_and_alerts_are_shown() -> None:
    server = FakeServer(page(0))
    server.documents["/bottleneck"] = {"headline": "Limited by slots."}
    firing = {
        "labels": {"alertname": "Backlog", "severity": "warning"},
        "annotations": {"summary": "60 wait"},
        "state": "firing",
    }
    server.documents["/alerts"] = {"data": {"alerts": [firing, {"labels": {"alertname": "P"}, "state": "pending"}]}}
    (reading,) = watched(server)
    assert reading.bottleneck == "Limited by slots."
    assert reading.alerts == ("Backlog (warning): 60 wait",)


def test_paths_that_a_server_does_not_have_are_asked_once_until_it_was_away() -> None:
    server = FakeServer(page(0), page(1), gone(), page(2))
    readings = watched(server)
    assert [path for path in server.asked if path != "/metrics"] == ["/bottleneck", "/alerts"] * 2
    assert readings[0].alerts is None


def test_doctor_diagnoses_a_server_that_does_not_diagnose_itself() -> None:
    server = HeadraceServer()
    pages = []
    for _ in range(4):
        server.work(num_generated_tokens=5000, num_prompt_tokens=1000, num_preemptions=50)
        pages.append(server.scrape(num_running=256, num_waiting=40, num_blocks_held=990))
    readings = watched(FakeServer(*pages), step_s=3.0)
    assert readings[0].bottleneck is None and readings[1].bottleneck is None  # 3 s are too short
    assert "Limited by" in (readings[3].bottleneck or "")


def test_a_reading_is_json() -> None:
    first, second = watched(FakeServer(page(0), gone()))
    document = json.loads(json.dumps(first.as_json(), allow_nan=False))
    assert (document["schema"], document["figures"]["running"]) == ("headrace.top/1", 3)
    assert "headrace:step_seconds" in document["figures"]["missing"]["step time"]
    assert second.as_json()["figures"] is None and "refused" in second.as_json()["failure"]
