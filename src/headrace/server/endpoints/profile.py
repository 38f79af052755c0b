"""/start_profile and /stop_profile, under vLLM's names and below /admin: record a window of the engine's steps.

They are off unless the server was started with --profiler-dir. With an admin key they need it. The trace is analysed by
a process of its own, so that the server goes on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.engine.process.engine_process import child_environment
from headrace.engine.profiler import MAX_SECONDS, MAX_STEPS, ProfileOptions
from headrace.openai.body import read
from headrace.openai.errors import bad_request
from headrace.openai.schema.profile import StartProfileRequest, StopProfileRequest
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

ANALYSIS_TIMEOUT_S = 300.0
_SECRETS = ("--api-key", "--admin-key")

Body = TypeVar("Body", bound=msgspec.Struct)


async def start_profile(services: Services, exchange: Exchange) -> None:
    directory = _directory(services)
    request = await _read(StartProfileRequest, services, exchange)
    for name, most in (("max_seconds", MAX_SECONDS), ("max_steps", MAX_STEPS)):
        given = getattr(request, name)
        if given is not None and given > most:
            raise bad_request(f"{name} must be at most {most:,}, got {given:,}", name)
    options = ProfileOptions(directory=directory)
    given = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
    engine = given.pop("engine", 0)
    if not 0 <= engine < services.engine.num_engines:
        raise bad_request(f"engine must be below {services.engine.num_engines}, got {engine}", "engine")
    started = await services.engine.start_profile(replace(options, **given), engine)
    await _reply(exchange, {"status": "recording", **started})


async def stop_profile(services: Services, exchange: Exchange) -> None:
    _directory(services)
    request = await _read(StopProfileRequest, services, exchange)
    record = await services.engine.stop_profile()
    answer: dict[str, Any] = {name: value for name, value in record.items() if name not in ("steps", "settings")}
    base = Path(record["directory"]) / record["name"]
    answer["serve_arguments"] = serve_arguments(sys.argv)
    if request.keep is False:
        for path in (f"{base}.trace.json.gz", f"{base}.profile.json"):
            Path(path).unlink(missing_ok=True)
    elif record["trace"]:
        answer["files"] = {"trace": f"{base}.trace.json.gz", "record": f"{base}.profile.json"}
        if request.analyse is not False:
            answer |= await _analysed(base, with_page=bool(request.picture))
    await _reply(exchange, {"status": "ok", **answer})


def serve_arguments(argv: Sequence[str]) -> list[str] | None:
    """How this server was started, without its keys, for the commands of NVIDIA's tools; None: not from a command."""
    if "serve" not in argv:
        return None
    kept: list[str] = []
    given = iter(argv[argv.index("serve") + 1 :])
    for argument in given:
        if argument in _SECRETS:
            next(given, None)
        elif not argument.startswith(tuple(f"{name}=" for name in _SECRETS)):
            kept.append(argument)
    return kept


def _directory(services: Services) -> str:
    directory = services.options.profiler_dir
    if directory is None:
        raise ApiError(
            404,
            "profiling is off: start the server with --profiler-dir DIR, where it writes its traces",
            code="profiler_off",
        )
    return directory


async def _read(kind: type[Body], services: Services, exchange: Exchange) -> Body:
    if (exchange.header(b"content-length") or b"0") == b"0" and exchange.header(b"transfer-encoding") is None:
        return kind()
    return read(kind, await exchange.read_body(services.options.max_body_bytes))


async def _analysed(base: Path, *, with_page: bool) -> dict[str, Any]:
    """The report, as a table and as JSON; or why there is none."""
    report, page = Path(f"{base}.report.json"), Path(f"{base}.html")
    command = ["profile", "--trace", f"{base}.profile.json", "--json", str(report), "--picture", str(page)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "headrace", *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), ANALYSIS_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return {"report": None, "report_error": f"the analysis took longer than {ANALYSIS_TIMEOUT_S:g} s"}
    if process.returncode != 0:
        return {"report": None, "report_error": err.decode(errors="replace").strip()}
    found: dict[str, Any] = {"report": msgspec.json.decode(report.read_bytes()), "table": out.decode()}
    return found | {"page": page.read_text(encoding="utf-8")} if with_page else found


async def _reply(exchange: Exchange, body: dict[str, Any]) -> None:
    await exchange.reply(200, msgspec.json.encode(body))
