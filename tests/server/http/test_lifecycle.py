from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.http.lifecycle import (
    SPARE_FILES,
    WANTED_FILES,
    address_of,
    check_tls,
    max_connections,
    open_listener,
    raise_file_limit,
)
from headrace.server.options import ServerOptions
from tests.server.live import Live, read_answer, run, until

STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"


async def start_streams(live: Live, number: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    connections = [await live.connect() for _ in range(number)]
    for _, writer in connections:
        writer.write(STREAM)
    await until(lambda: live.tiny.num_running == number)
    return connections


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_sigterm_ends_an_idle_server_with_exit_code_0() -> None:
    async def body() -> None:
        async with Live() as live:
            assert live.state.phase == "ready"
            send(signal.SIGTERM)
            assert await live.exit == 0
            with pytest.raises(ConnectionError):
                await live.connect()

    run(body)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_streams_finish_before_the_end(number: signal.Signals) -> None:
    async def body() -> None:
        async with Live() as live:
            streams = await start_streams(live, 3)
            send(number)
            await until(lambda: live.state.phase == "draining")
            assert not live.state.is_ready and live.state.is_alive
            assert (await live.get()).status == 200  # probes are still answered
            assert not live.exit.done()
            live.tiny.end.set()
            answers = [await read_answer(reader) for reader, _ in streams]
            assert {answer.body for answer in answers} == {b"first last"}
            assert await live.exit == 0
            assert live.printed == ["stopping: 3 requests may finish within 30 s"]
            for _, writer in streams:
                writer.close()

    run(body)


def test_requests_that_do_not_finish_in_time_are_aborted_with_a_last_chunk() -> None:
    async def body() -> None:
        async with Live(shutdown_timeout_s=0.05) as live:
            ((reader, writer),) = await start_streams(live, 1)
            send(signal.SIGTERM)
            assert (await read_answer(reader)).body == b"first aborted"
            assert await live.exit == 1
            assert live.printed[-1] == "aborting 1 requests"
            writer.close()

    run(body)


def test_a_second_signal_aborts_at_once() -> None:
    async def body() -> None:
        async with Live(shutdown_timeout_s=3600.0) as live:
            ((reader, writer),) = await start_streams(live, 1)
            send(signal.SIGTERM)
            await until(lambda: live.lifecycle.is_draining)
            send(signal.SIGTERM)
            assert (await read_answer(reader)).body == b"first aborted"
            assert await live.exit == 1
            writer.close()

    run(body)


def test_two_signals_at_once_abort_too() -> None:
    async def body() -> None:
        async with Live(shutdown_timeout_s=3600.0) as live:
            ((reader, writer),) = await start_streams(live, 1)
            live.lifecycle.stop()
            live.lifecycle.stop()
            assert (await read_answer(reader)).body == b"first aborted"
            assert await live.exit == 1
            writer.close()

    run(body)


def test_a_handler_that_ignores_the_abort_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.http.lifecycle.ABORT_S", 0.05)

    async def body() -> None:
        async with Live(shutdown_timeout_s=0.0) as live:
            _, writer = await live.connect()
            writer.write(b"GET /ignores-disconnect HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: live.tiny.num_running == 1)
            send(signal.SIGTERM)
            assert await live.exit == 1
            assert live.tiny.num_cancelled == 1
            writer.close()

    run(body)


def test_idle_connections_do_not_delay_the_shutdown() -> None:
    async def body() -> None:
        async with Live() as live:
            connections = [await live.connect() for _ in range(5)]
            connections[0][1].write(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
            await read_answer(connections[0][0])
            send(signal.SIGTERM)
            assert await live.exit == 0
            for _, writer in connections:
                writer.close()

    run(body)


def test_an_engine_that_cannot_be_restarted_ends_the_server_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.http.lifecycle.WATCH_S", 0.01)

    async def body() -> None:
        given_up = asyncio.Event()
        async with Live(has_given_up=given_up.is_set) as live:
            given_up.set()
            assert await live.exit == 1
            assert live.printed[0] == "the engine could not be restarted; the server ends"

    run(body)


def test_the_lag_of_the_event_loop_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.http.lifecycle.WATCH_S", 0.001)

    async def body() -> None:
        lags: list[float] = []
        async with Live(on_lag=lags.append):
            await until(lambda: len(lags) > 2)
        assert all(lag >= 0.0 for lag in lags)

    run(body)


def test_sighup_reloads_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old")
    path.chmod(0o600)

    async def body() -> None:
        async with Live(api_key_file=str(path)) as live:
            assert (await live.get(X_Api_Key="old")).status == 200
            path.write_text("new")
            send(signal.SIGHUP)
            await until(lambda: live.printed == ["reloaded 1 keys"])
            assert (await live.get(X_Api_Key="old")).status == 401
            assert (await live.get(X_Api_Key="new")).status == 200

    run(body)


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def body() -> None:
        async with Live():
            pass

    run(body)
    assert signal.getsignal(signal.SIGTERM) in (before, signal.SIG_DFL)


# ---- the socket


def test_the_server_listens_on_localhost_by_default() -> None:
    with open_listener(ServerOptions(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert address_of(listener, ServerOptions(port=0)) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_in_use_is_an_error_that_names_the_flags() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="--port choose another"):
            open_listener(ServerOptions(port=taken.getsockname()[1]))


def test_a_unix_socket_is_served_and_its_file_removed(tmp_path: Path) -> None:
    path = tmp_path / "headrace.sock"

    async def body() -> None:
        async with Live(uds=str(path)) as live:
            assert (await live.ask(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200

    run(body)
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    path = str(tmp_path / "left.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    options = ServerOptions(uds=path)
    with open_listener(options) as listener:
        listener.listen()
        assert address_of(listener, options) == f"unix:{path}"
        with pytest.raises(ConfigError, match="another server listens there"):
            open_listener(options)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="a file of this name; --uds chooses another path"):
        open_listener(ServerOptions(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "kept"


def test_the_connection_limit_leaves_spare_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    assert max_connections() == 1024 - SPARE_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_connections() == 1 << 20


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [(1024, 4096, 4096), (1024, -1, WANTED_FILES), (1024, 1 << 20, WANTED_FILES), (1 << 20, 1 << 20, None)],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed(
    soft: int, hard: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    assert resource.RLIM_INFINITY == -1
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    raise_file_limit()
    assert raised == ([] if limit is None else [(limit, hard)])


# ---- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    certfile, keyfile = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {keyfile} -out {certfile}".split(),
        check=True,
        capture_output=True,
    )
    return certfile, keyfile


def test_the_server_speaks_tls_with_a_certificate(certificate: tuple[Path, Path]) -> None:
    certfile, keyfile = certificate
    check_tls(ServerOptions(ssl_certfile=str(certfile), ssl_keyfile=str(keyfile)))
    trust = ssl.create_default_context(cafile=str(certfile))

    async def body() -> None:
        async with Live(tls=trust, ssl_certfile=str(certfile), ssl_keyfile=str(keyfile)) as live:
            assert (await live.get()).status == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
            writer.write(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in await reader.read()  # plain HTTP is not answered
            writer.close()
            bomb = b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000
            assert (await live.ask(bomb)).status == 431  # the limits apply with TLS too

    run(body)


def test_invalid_tls_files_are_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        check_tls(ServerOptions(ssl_certfile=str(tmp_path / "none.pem")))
    (tmp_path / "bad.pem").write_text("not a certificate")
    with pytest.raises(ConfigError, match="cannot be used"):
        check_tls(ServerOptions(ssl_certfile=str(tmp_path / "bad.pem")))
