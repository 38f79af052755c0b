"""Runs a server: builds its parts from the settings, serves, and returns the exit code."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from headrace.adapters import check_adapter_names
from headrace.config import EngineConfig
from headrace.doctor.readers.shapes import shape_of_sizes
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.group import EngineState
from headrace.engine.in_force import memory_share, shape_of
from headrace.engine.process.supervisor import Supervision
from headrace.engine.start import start_engine_group, start_engine_process
from headrace.engine.startup_display import StartupDisplay
from headrace.errors import ConfigError, reason_of
from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.kv.disk_files import salt_secret
from headrace.monitor.metrics import EngineLoad, ServerMetrics
from headrace.plan.gpus import Gpu
from headrace.server.batch.setup import build_service, open_store, with_priorities
from headrace.server.batch.store import BatchStore
from headrace.server.bottleneck import BottleneckWatch, own_gpu
from headrace.server.dynamic_batching import BatchPolicy, Dispatcher
from headrace.server.endpoints import ROUTES
from headrace.server.endpoints.deadline import allowed_seconds
from headrace.server.http.app import App, Services
from headrace.server.http.gate import Gate
from headrace.server.http.keys import Keys
from headrace.server.http.lifecycle import (
    BACKLOG,
    Lifecycle,
    PrintLine,
    address_of,
    check_tls,
    open_listener,
    raise_file_limit,
    run_on_uvloop,
)
from headrace.server.http.routes import Router
from headrace.server.load_log import LoadLog
from headrace.server.options import ServerOptions
from headrace.server.request_queue import REASONS, QueueLimits, RequestQueue
from headrace.server.response_archive import ResponseArchive
from headrace.server.sagemaker_sessions import SageMakerSessions
from headrace.server.self_monitor import SelfMonitor
from headrace.server.services import Traces
from headrace.server.state import ServerState
from headrace.startup import Report, ready_line

if TYPE_CHECKING:
    from headrace.server.tracing import RequestTraces

OnReady = Callable[["Server"], Awaitable[None]]


def serve(
    config: EngineConfig,
    options: ServerOptions,
    *,
    print_line: PrintLine,
    on_ready: OnReady | None = None,
    terminal: TextIO | None = None,
) -> int:
    """Serve until a signal. Bad settings are refused before the model is loaded. `on_ready` is awaited when the engine
    is ready, before connections are accepted. `terminal` shows the stage of the start that runs."""
    check_adapter_names(config.adapter_paths, options.model_names or (config.model,))
    keys = Keys(options, print_line=print_line, secret=_salt_secret(config))
    check_tls(options)
    _refuse_sleep_on_nodes(config, options)
    raise_file_limit()
    traces = _traces(config, options)
    print_warnings(options, keys, print_line)
    config = with_priorities(config, options)
    store = open_store(options)
    archive = None if options.response_dir is None else ResponseArchive(Path(options.response_dir))
    with open_listener(options) as listener:
        with StartupDisplay(print_line, terminal=terminal) as display:
            engine = _start(config, options, display)
        try:
            return run_on_uvloop(
                _run(engine, config, options, keys, listener, print_line, on_ready, traces, store, archive)
            )
        finally:
            if traces is not None:
                traces.close()
            if archive is not None:
                archive.close()


def _refuse_sleep_on_nodes(config: EngineConfig, options: ServerOptions) -> None:
    if options.enable_sleep_mode and config.nnodes > 1 and config.distributed_executor_backend == "mp":
        raise ConfigError(
            f"--enable-sleep-mode does not go together with --nnodes {config.nnodes}: the other nodes end with an "
            "engine that sleeps, and would have to be started again to wake it; leave one of them out, or use "
            "--distributed-executor-backend ray"
        )


def _salt_secret(config: EngineConfig) -> bytes | None:
    """Salts that are the same after a restart, where cached prefixes are."""
    if config.kv_offload_path is None:
        return None
    try:
        return salt_secret(Path(config.kv_offload_path).expanduser())
    except OSError as error:
        path, reason = config.kv_offload_path, reason_of(error)
        raise ConfigError(f"kv_offload_path={path!r} cannot be used ({reason}); give another directory") from error


def _start(config: EngineConfig, options: ServerOptions, report: Report) -> AsyncEngine:
    """One engine in a process of its own, or several, which divide the machine."""
    rules = Supervision.of(step_timeout_s=options.step_timeout_s, max_restarts=options.max_engine_restarts)
    size = options.data_parallel_size
    if size == 1:
        return AsyncEngine.over(partial(start_engine_process, config, supervision=rules, report=report))
    return AsyncEngine.over_group(partial(start_engine_group, config, size=size, supervision=rules, report=report))


def _traces(config: EngineConfig, options: ServerOptions) -> RequestTraces | None:
    if options.traces_url is None:
        return None
    from headrace.server.tracing import RequestTraces

    return RequestTraces(options.traces_url, model_name=(*options.model_names, config.model)[0])


async def _run(
    engine: AsyncEngine,
    config: EngineConfig,
    options: ServerOptions,
    keys: Keys,
    listener: socket.socket,
    print_line: PrintLine,
    on_ready: OnReady | None,
    traces: RequestTraces | None = None,
    store: BatchStore | None = None,
    archive: ResponseArchive | None = None,
) -> int:
    try:
        server = Server(
            engine,
            options,
            keys,
            model_name=(*options.model_names, config.model)[0],
            config=config,
            gpu=await asyncio.to_thread(own_gpu) if engine.settings.device == "cuda" else None,
            traces=traces,
            store=store,
            archive=archive,
            print_line=print_line,
        )
        server.print_settings()
        print_line(ready_line(engine.start_seconds, engine.start_stages))
        if on_ready is not None:
            await on_ready(server)
        listener.listen(BACKLOG)  # before the next line is printed, so that its reader can connect
        print_line(f"serving {server.services.model_name} on {address_of(listener, options)}")
        with server.self_monitor.running(), server.gpus, server.batches_running():
            return await server.lifecycle.run(listener)
    finally:
        await engine.close()


class Server:
    """Owns the parts of one server and connects them."""

    def __init__(
        self,
        engine: AsyncEngine,
        options: ServerOptions,
        keys: Keys,
        *,
        model_name: str,
        print_line: PrintLine,
        config: EngineConfig | None = None,
        gpu: Gpu | None = None,
        traces: Traces | None = None,
        store: BatchStore | None = None,
        archive: ResponseArchive | None = None,
        load_log: LoadLog | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`gpu`, `load_log` and `clock` are for the watch of bottlenecks."""
        settings, totals = engine.settings, engine.total_settings
        self._engine = engine
        self._options = options
        self._print_line = print_line
        self.state = ServerState(lambda: engine.phase)
        config = config or EngineConfig()
        self.gpus = GpuMonitor.of_device(settings.device)
        self.metrics = ServerMetrics(
            model_name,
            settings,
            others=[state.settings for state in engine.states[1:]],
            memory_share=memory_share(settings, engine.states[0].config or config),
            gpus=self.gpus,
        )
        self.queue = RequestQueue(options, QueueLimits.of(options, totals), state=self.state)
        by_priority = settings.queue_policy == "priority"
        self.dispatcher = Dispatcher(BatchPolicy.of(options, max_num_seqs=totals.max_num_seqs, by_priority=by_priority))
        self.services = Services(
            engine=engine,
            options=options,
            queue=self.queue,
            metrics=self.metrics,
            model_name=model_name,
            state=self.state,
            dispatcher=self.dispatcher,
            deadline_s=lambda scope: allowed_seconds(scope, options.request_timeout_s),
            config=config,
            traces=traces,
            gpus=self.gpus,
            response_archive=archive,
            sagemaker_sessions=SageMakerSessions.of(os.environ),
        )
        self.bottleneck = BottleneckWatch(
            self.metrics,
            self._observed,
            model=shape_of_sizes({"name": model_name, **shape_of(engine.spec)}),
            gpu=gpu,
            num_engines=engine.num_engines,
            load_log=load_log,
            clock=clock,
        )
        self.services.bottleneck = self.bottleneck
        if store is not None:
            self.services.batches = build_service(store, engine, options, config=config, model_name=model_name)
        self._diagnosing: asyncio.Task[None] | None = None
        self.self_monitor = SelfMonitor(self.metrics, self.services.observe_engine, print_line=print_line)
        self.services.self_monitor = self.self_monitor
        self.lifecycle = self._lifecycle(keys)
        self.services.control = self.lifecycle

    def _lifecycle(self, keys: Keys) -> Lifecycle:
        router = Router(ROUTES)
        gate = Gate(
            App(self.services, ROUTES),
            self._options,
            keys,
            public_paths=router.public_paths,
            control_paths=router.control_paths,
            control_prefixes=router.control_prefixes,
            streamed_paths=router.streamed_paths,
            on_refused=self.metrics.refused,
        )
        return Lifecycle(
            gate,
            self._options,
            self.state,
            abort_all=self._abort_all,
            reload_keys=keys.reload,
            has_given_up=lambda: self._engine.phase == "dead",
            on_refused=self.metrics.refused,
            on_lag=self._on_lag,
            background=self.services.background,
            print_line=self._print_line,
        )

    def batches_running(self) -> AbstractContextManager[None]:
        """The Batch API's threads run inside this."""
        return nullcontext() if self.services.batches is None else self.services.batches.running()

    def _observed(self) -> EngineLoad | None:
        return self.metrics.load if self.services.observe_engine() else None

    def _on_lag(self, lag_s: float) -> None:
        """Called once a second."""
        self.metrics.loop_lag(lag_s)
        if self._diagnosing is None or self._diagnosing.done():
            # A task of its own: a rule that fails is logged and does not end the watch of the engine.
            self._diagnosing = asyncio.create_task(self.bottleneck.tick())

    def print_settings(self) -> None:
        """Print warnings about settings, then each automatic value with its reason."""
        for warning in self._engine.settings.warnings:
            self._print_line(f"warning: {warning}")
        for choice in self._engine.settings.choices:
            self._print_line(f"{choice.name} = {choice.value} ({choice.reason})")
        for line in _differences(self._engine.states):
            self._print_line(line)
        limits = self.queue.limits
        for name, limit in (("max_num_queued_reqs", limits.max_requests), ("max_num_queued_tokens", limits.max_tokens)):
            if getattr(self._options, name) is None:
                self._print_line(f"{name} = {limit:,} ({REASONS[name]})")

    async def _abort_all(self) -> None:
        self.dispatcher.close()
        self._engine.abort_all()


def _differences(states: Sequence[EngineState]) -> Iterator[str]:
    """What the settings of further engines have otherwise than those of the first."""
    first = {(choice.name, choice.value, choice.reason) for choice in states[0].settings.choices}
    for number, state in enumerate(states[1:], 1):
        for choice in state.settings.choices:
            if (choice.name, choice.value, choice.reason) not in first:
                yield f"engine {number}: {choice.name} = {choice.value} ({choice.reason})"


def print_warnings(options: ServerOptions, keys: Keys, print_line: PrintLine) -> None:
    """Warn about a server that others can reach without keys, or without encryption."""
    is_local = options.uds is not None or _is_loopback(options.host)
    if not keys.are_required and not is_local:
        print_line(
            f"warning: anyone who can reach {options.host} can use this server; set --api-key-file to require keys"
        )
    if keys.are_required and options.ssl_certfile is None and not is_local:
        print_line("warning: keys and texts are sent unencrypted; use --ssl-certfile, or a TLS proxy")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
