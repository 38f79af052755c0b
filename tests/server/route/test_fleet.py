"""Load, restarts, and replicas that come and go; pages of metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.server.route.desired import DEFAULT_TARGET
from headrace.server.route.fleet import Fleet
from headrace.server.route.replica import Replica, Scraped
from headrace.server.route.scraping import read_page
from headrace.server.route.sources import Sources

PAGE = """\
# HELP headrace:num_requests_running Requests.
headrace:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
headrace:num_requests_waiting{engine="0",model_name="m"} 2.0
headrace:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
headrace:config_info{dtype="float32",engine="0",max_num_seqs="256",model_name="m"} 1.0
headrace:step_seconds_bucket{le="0.1"} 7.0
process_start_time_seconds 1.7e+09
"""


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet(Sources([f"http://{name}:1" for name in names]), print_line=lambda line: None, clock=lambda: 0.0)
    asyncio.run(fleet.refresh())
    return fleet


def test_a_page_of_headrace_is_read() -> None:
    assert read_page(PAGE) == Scraped(num_waiting=2.0, num_running=3.0, max_num_seqs=256.0, started_at=1.7e9)
    several = PAGE + PAGE.replace('engine="0"', 'engine="1"').replace("process_start_time_seconds", "another")
    assert read_page(several) == Scraped(num_waiting=4.0, num_running=6.0, max_num_seqs=512.0, started_at=1.7e9)


def test_the_engines_of_vllm_are_added_up() -> None:
    page = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4\n'
    assert read_page(page) == Scraped(num_running=7.0)


def test_a_page_without_the_series_is_no_load() -> None:
    assert read_page("nothing 1\nvllm:num_requests_running NaN\n") == Scraped()


def test_the_load_is_ours_and_that_of_others() -> None:
    replica = Replica("http://a:1", 0)
    with replica.serving(), replica.serving():
        replica.take_scrape(Scraped(num_waiting=1.0, num_running=4.0))
        assert replica.load == 5.0
        with replica.serving():
            assert replica.load == 6.0, "a new request counts at once"
    assert replica.load == 3.0, "those of others stay until the next scrape"


def test_a_stream_is_pending_until_its_first_byte() -> None:
    replica = Replica("http://a:1", 0)
    with replica.serving(is_stream=True) as visit:
        assert (replica.load, replica.num_pending) == (1.0, 1)
        visit.begin()
        visit.begin()
        with replica.serving():
            assert (replica.load, replica.num_pending) == (2.0, 0)
    with replica.serving(is_stream=True):
        pass
    assert (replica.load, replica.num_pending) == (0.0, 0)


def test_a_restarted_replica_has_lost_its_prefixes() -> None:
    fleet = fleet_of("a", "b")
    hashes = [1, 2, 3]
    first = fleet.pick(hashes, set())
    assert first is not None
    again = fleet.pick(hashes, set())
    assert again is not None and (again.replica, again.reason) == (first.replica, "prefix")
    for started_at in (1.0, 2.0):
        fleet._take_scrape(first.replica, Scraped(started_at=started_at))
    after = fleet.pick(hashes, set())
    assert after is not None and after.reason == "load"


def test_replicas_of_a_file_come_and_go(tmp_path: Path) -> None:
    file, printed = tmp_path / "replicas", list[str]()
    file.write_text("http://a:1\nhttp://b:1\n")
    fleet = Fleet(Sources([], file), print_line=printed.append)
    asyncio.run(fleet.refresh())
    (kept, gone) = fleet.replicas
    file.write_text("http://a:1\nhttp://longer:1\n")
    asyncio.run(fleet.refresh())
    assert [replica.name for replica in fleet.replicas] == ["a:1", "longer:1"]
    assert fleet.replicas[0] is kept and gone.is_removed
    assert fleet.replicas[1].number not in (kept.number, gone.number)
    file.unlink()
    asyncio.run(fleet.refresh())
    asyncio.run(fleet.refresh())
    assert len(fleet.replicas) == 2 and sum("keeping the old replicas" in line for line in printed) == 1


def test_a_bad_replica_is_the_last_choice_when_there_is_no_other() -> None:
    fleet = fleet_of("a")
    fleet.unreachable(fleet.replicas[0], "")
    pick = fleet.pick([], set())
    assert pick is not None and not pick.is_probe
    assert fleet.pick([], {pick.replica}) is None


def test_a_slow_replica_gets_less_and_is_taken_out_if_requests_wait_there() -> None:
    fleet = fleet_of("a", "b", "c")
    for replica, seconds in zip(fleet.replicas, (0.1, 0.1, 2.0), strict=True):
        for _ in range(5):
            fleet.answered(replica, seconds)
    fleet.judge()
    assert [fleet.score(replica) for replica in fleet.replicas] == [1.0, 1.0, 0.5]
    assert [fleet.state(replica) for replica in fleet.replicas] == ["up", "up", "up"]
    fleet._take_scrape(fleet.replicas[2], Scraped(num_waiting=7.0))
    fleet.judge()
    assert [fleet.state(replica) for replica in fleet.replicas] == ["up", "up", "out"]


def test_a_replica_with_a_long_queue_is_taken_out() -> None:
    fleet = fleet_of("a", "b", "c")
    for replica, waiting in zip(fleet.replicas, (1.0, 0.0, 100.0), strict=True):
        fleet._take_scrape(replica, Scraped(num_waiting=waiting))
    fleet.judge()
    assert [fleet.state(replica) for replica in fleet.replicas] == ["up", "up", "out"]


def test_a_queue_everywhere_is_load_and_takes_nobody_out() -> None:
    fleet = fleet_of("a", "b", "c")
    for replica in fleet.replicas:
        fleet._take_scrape(replica, Scraped(num_waiting=100.0))
    fleet.judge()
    assert [fleet.state(replica) for replica in fleet.replicas] == ["up", "up", "up"]


def test_the_target_follows_what_replicas_can_run() -> None:
    fleet = fleet_of("a", "b")
    assert fleet.target == DEFAULT_TARGET
    for replica, most in zip(fleet.replicas, (100.0, 200.0), strict=True):
        fleet._take_scrape(replica, Scraped(num_running=100.0, max_num_seqs=most))
    assert fleet.target == 80.0
    fleet.observe_demand()
    assert fleet.desired.value == 3
