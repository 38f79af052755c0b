"""Connects to a Ray cluster, places actors on it, and starts the engines of a job there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic, perf_counter
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.grammars import Grammars
from headrace.engine.nodes.ray_connection import INSTALL, connect, import_ray
from headrace.engine.opening import open_model
from headrace.engine.process.engine_process import LOAD_CORE
from headrace.engine.shares import EngineShare
from headrace.engine.start import Engine, tokenizer_of
from headrace.errors import ConfigError, EngineDeadError, HeadraceError, MachineLostError
from headrace.hardware import read_facts
from headrace.jobs.recovery.job_engine import JobEngine, Start
from headrace.jobs.workers.on_ray.actor import EngineActor
from headrace.jobs.workers.on_ray.channel import ActorEngine
from headrace.jobs.workers.on_ray.shares import ActorPlan, Node, plan_actors
from headrace.models import ModelSpec
from headrace.startup import Report, StartupStages
from headrace.text import Tokenizer

PLACE_POLL_S = 0.25  # between two looks whether the job has ended, while an actor waits for a place
TELL_AFTER_S = 15.0  # without any actor in place
NUM_CALLS = 4  # of one actor at a time: one that receives, one that sends, and spare ones

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Front:
    """What the job's process needs of a model. The weights are on the nodes."""

    spec: ModelSpec
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    eos_token_ids: tuple[int, ...]
    model_name: str


OpenFront = Callable[[EngineConfig], Front]


def open_front(config: EngineConfig) -> Front:
    checkpoint = open_model(config)
    spec, tokenizer = checkpoint.spec, tokenizer_of(config, checkpoint)
    grammars = Grammars(
        tokenizer, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids, num_threads=read_facts().num_cores
    )
    return Front(spec, tokenizer, grammars, spec.eos_token_ids, config.model)


class RayCluster:
    """A connection to a cluster, for one job. Engines start on threads of their own; all else is for one thread."""

    def __init__(
        self, ray: Any, *, core: str = LOAD_CORE, open_front: OpenFront = open_front, tell: Tell = lambda line: None
    ) -> None:
        """`ray`: the module, connected."""
        self._ray = ray
        self._core = core
        self._open_front = open_front
        self._tell = tell
        self._actor_class = ray.remote(EngineActor)
        self._front: Front | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._plan: ActorPlan | None = None
        self._max_model_len: int | None = None  # of the first engine: what the job checks its lines against

    # The workers of a job.

    def shares(self, config: EngineConfig, num_workers: int | None) -> list[EngineShare]:
        if config.nnodes > 1:
            raise ConfigError(
                f"nnodes={config.nnodes} with --ray: each worker of a job is on one node; for one engine on several "
                "nodes use --distributed-executor-backend ray instead"
            )
        self._plan = plan = plan_actors(config, self._nodes(), num_workers)
        return [plan.share] * plan.num_workers

    def start_workers(
        self, shares: Sequence[EngineShare], configs: Sequence[EngineConfig], deliver: Deliver, report: Report
    ) -> list[JobEngine]:
        """Start all workers, and wait for the first. The others are added to the job when they are ready."""
        workers = [
            JobEngine(
                self.starter(share, report if number == 0 else _ignore),
                deliver,
                config,
                number=number,
                has_own_process=True,
                waits=False,
            )
            for number, (share, config) in enumerate(zip(shares, configs, strict=True))
        ]
        try:
            first = self._wait_for_first(workers)
        except BaseException:
            for worker in workers:
                worker.close()
            raise
        for worker in workers:
            if worker is not first:
                worker.expect(first.engine)
        return workers

    def _wait_for_first(self, workers: Sequence[JobEngine]) -> JobEngine:
        """Raises the error of a start if no worker is left that may start, or if it is an error of the settings."""
        left, tell_at = list(workers), monotonic() + TELL_AFTER_S
        while True:
            started, _ = wait([each.starting for each in left if each.starting], 0.2, FIRST_COMPLETED)
            if not started and monotonic() > tell_at:
                tell_at = float("inf")
                self._tell(f"no worker is ready yet; each needs {self._needs}, and waits for a node that has it free")
            for worker in [each for each in left if each.has_started]:
                try:
                    worker.finish_start()
                except Exception as error:
                    left.remove(worker)
                    if not left or not isinstance(error, EngineDeadError):
                        raise
                else:
                    self._max_model_len = worker.settings.max_model_len
                    return worker

    @property
    def _needs(self) -> str:
        assert self._plan is not None
        if self._plan.num_gpus:
            return "1 GPU"
        return f"{self._plan.num_cpus} CPU core{'s' if self._plan.num_cpus != 1 else ''}"

    # One engine.

    def starter(self, share: EngineShare, report: Report) -> Start:
        def start(config: EngineConfig, deliver: Deliver) -> Engine:
            return self._start(config, deliver, share, StartupStages(report))

        return start

    def _start(self, config: EngineConfig, deliver: Deliver, share: EngineShare, stages: StartupStages) -> Engine:
        calls, front = self._place(), self._front_of(config)
        started = perf_counter()  # the wait for a place is not the engine's
        if self._max_model_len is not None and config.max_model_len is None:
            config = replace(config, max_model_len=self._max_model_len)
        client = ActorEngine(calls, deliver, lambda: deliver([]), core=self._core, report=stages.add)
        try:
            client.start(config)
            settings = client.wait_until_ready().settings
            if settings.max_model_len < (self._max_model_len or 0):
                raise EngineDeadError(
                    f"its node holds only {settings.max_model_len:,} tokens of context, and the job was checked "
                    f"against {self._max_model_len:,}"
                )
        except BaseException:
            client.close()
            raise
        return Engine(
            client=client,
            settings=share.explained(settings),
            spec=front.spec,
            tokenizer=front.tokenizer,
            grammars=front.grammars,
            eos_token_ids=front.eos_token_ids,
            model_name=front.model_name,
            start_seconds=perf_counter() - started,
            start_stages=stages.finished,
        )

    def _front_of(self, config: EngineConfig) -> Front:
        with self._lock:
            self._front = self._front or self._open_front(config)
            return self._front

    def _place(self) -> _RayCalls:
        """Wait until an actor has a place on the cluster, for as long as the job runs."""
        assert self._plan is not None
        options = {
            "num_cpus": self._plan.num_cpus,
            "num_gpus": self._plan.num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": NUM_CALLS,
        }
        while True:
            calls = _RayCalls(self._ray, self._actor_class.options(**options).remote(self._core), self._closing)
            try:
                calls.wait_until_placed()
                return calls
            except MachineLostError:  # before the engine was there: Ray places another actor elsewhere
                calls.kill()
            except BaseException:
                calls.kill()
                raise

    def _nodes(self) -> list[Node]:
        found = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [Node(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in found]

    def close(self) -> None:
        """Starts that are under way give up."""
        self._closing.set()


class _RayCalls:
    """Calls of an actor's methods (`ActorCalls`)."""

    def __init__(self, ray: Any, actor: Any, closing: threading.Event) -> None:
        self._ray = ray
        self._actor = actor
        self._closing = closing

    def wait_until_placed(self) -> None:
        self._get(self._actor.is_placed.remote())

    def send(self, frames: list[bytes]) -> None:
        self._get(self._actor.send.remote(frames))

    def receive(self, timeout_s: float) -> list[bytes] | None:
        frames: list[bytes] | None = self._get(self._actor.receive.remote(timeout_s))
        return frames

    def kill(self) -> None:
        try:
            self._ray.kill(self._actor)
        except Exception:  # noqa: BLE001  it has gone, or the connection has
            pass

    def _get(self, reply: Any) -> Any:
        """Never longer than the job: a thread that waits in Ray while the connection is closed would not return."""
        try:
            while not self._ray.wait([reply], timeout=PLACE_POLL_S)[0]:
                if self._closing.is_set():
                    raise EngineDeadError("the job has ended")
            return self._ray.get(reply)
        except HeadraceError:
            raise
        except Exception as error:  # noqa: BLE001  of ray: the actor or its node has gone, or the connection has
            raise _death_of(error) from None


def _death_of(error: Exception) -> EngineDeadError:
    text = str(error)
    if "node has died" in text or "node was terminated" in text or type(error).__name__ == "NodeDiedError":
        return MachineLostError("the node of its actor has left the cluster")
    if "creation task" in text and "Error" in text:
        return EngineDeadError(f"its actor could not be created: {text.strip().splitlines()[-1]}; {INSTALL}")
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
    return EngineDeadError(f"its actor has died: {last}")


@contextmanager
def connected(address: str, **options: Any) -> Iterator[RayCluster]:
    """Connect to the cluster at `address` (HOST:PORT, or 'auto' for the one that this machine belongs to). `options`
    are those of `RayCluster`. A connection that this process already has is used and kept."""
    ray = import_ray("--ray")
    is_ours = connect(ray, address)
    cluster = RayCluster(ray, **options)
    try:
        yield cluster
    finally:
        cluster.close()
        if is_ours:
            ray.shutdown()


def _ignore(stage: object) -> None:
    """Reports nothing: all workers load the same model."""
