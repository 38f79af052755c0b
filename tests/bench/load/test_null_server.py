"""The null server's injected behaviour, without waiting for it."""

from __future__ import annotations

from headrace.bench.load.null_server import Behaviour, NullServer
from tests.hand_timer import HandTimer


def test_a_warm_up_ends_after_its_time() -> None:
    clock = HandTimer()
    server = NullServer(Behaviour(ttft_s=0.1, itl_s=0.01, warm_up_s=20, warm_up_factor=3), clock)
    clock.now = 100.0
    server.next_request()  # the warm-up begins with the first request
    assert server.pace() == (0.1 * 3, 0.01 * 3)
    clock.now = 119.9
    assert server.pace() == (0.1 * 3, 0.01 * 3)
    clock.now = 120.0
    assert server.pace() == (0.1, 0.01)


def test_refusals_are_spread_evenly() -> None:
    refused = [Behaviour(refused_share=0.3).is_refused(number) for number in range(100)]
    assert sum(refused) == 30
    assert sum(refused[:10]) == 3
    assert not any(Behaviour().is_refused(number) for number in range(100))
