from __future__ import annotations

from headrace.server.state import ServerState


def test_a_server_starts_gets_ready_and_drains() -> None:
    state = ServerState()
    assert (state.phase, state.is_ready, state.is_alive) == ("starting", False, True)
    state.ready()
    assert (state.phase, state.is_ready, state.refuse_reason()) == ("ready", True, None)
    state.drain()
    assert (state.phase, state.is_ready, state.is_alive, state.refuse_reason()) == ("draining", False, True, "draining")


def test_the_server_is_dead_while_its_engine_is() -> None:
    phases = ["ready"]
    state = ServerState(lambda: phases[-1])
    state.ready()
    for phase in ("restarting", "dead"):
        phases.append(phase)
        assert (state.phase, state.is_alive, state.refuse_reason()) == ("dead", False, "engine_dead")
    phases.append("ready")
    assert (state.phase, state.is_alive) == ("ready", True)


def test_a_server_whose_engine_sleeps_is_alive_and_not_ready() -> None:
    state = ServerState(lambda: "asleep")
    state.ready()
    assert (state.phase, state.is_ready, state.is_alive, state.refuse_reason()) == ("asleep", False, True, "asleep")


def test_draining_cannot_be_undone() -> None:
    state = ServerState()
    state.drain()
    state.ready()
    assert state.phase == "draining"
