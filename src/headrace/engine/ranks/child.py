"""The process of a rank above 0: `python -m headrace.engine.ranks.child SOCKET PARENT HEARTBEAT_S NAME [json]`.

    main thread    loads its part of the model, then runs the plans that rank 0 sends
    reader thread  sorts what rank 0 sends into plans and bits of masks; sends heartbeats

It ends when it is told to, when it fails, and when rank 0 has gone for any reason.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headrace.engine.process.channel import Channel
from headrace.engine.process.child import ignore_stop_signals, set_up_output
from headrace.engine.process.wire import Failed
from headrace.engine.ranks import wire
from headrace.errors import HeadraceError
from headrace.garbage import freeze_loaded_objects
from headrace.hardware import release_unused, return_large_buffers, shorten_openmp_waits
from headrace.parent_death import die_with
from headrace.startup import ignore_stage
from headrace.steps import Bitmask, DraftsBySlot, IntArray, Runner, StepPlan

if TYPE_CHECKING:
    from headrace.models import Decoder

IDLE_S = 0.05  # without a plan: then the last steps are collected, so that an error of theirs is reported
DRAIN_S = 5.0  # for rank 0 to read the last message

_Wanted = TypeVar("_Wanted", wire.Start, wire.Build)
_log = logging.getLogger("headrace.engine.ranks.child")  # the same name when this is the main module


@dataclass(frozen=True, slots=True)
class ReceivedMasks:
    """The masks of a step, whose bits rank 0 computes and sends."""

    step: int
    slots: IntArray
    received: SimpleQueue[wire.MaskBits]

    def bits(self, drafts: DraftsBySlot | None = None) -> Bitmask:
        """`drafts`, which are the same on all ranks, are in the bits."""
        message = self.received.get()
        assert message.step == self.step
        return wire.bits_of(message)


class ResultSender:
    """Sends the result of each step to rank 0 as soon as it is there: a thread of the last stage's first rank."""

    def __init__(
        self, runner: Runner, send: Callable[[wire.Reply], None], fail: Callable[[BaseException], None]
    ) -> None:
        self._runner, self._send, self._fail = runner, send, fail
        self._tickets: SimpleQueue[Any] = SimpleQueue()  # None: no more
        self._thread = threading.Thread(target=self._run, name="headrace-results", daemon=True)
        self._thread.start()

    def put(self, ticket: Any) -> None:
        self._tickets.put(ticket)

    def close(self) -> None:
        """Send what is left, and end."""
        self._tickets.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (ticket := self._tickets.get()) is not None:
                self._send(wire.Result(self._runner.collect(ticket)))
        except BaseException as error:  # noqa: BLE001  the rank's edge too: rank 0 reports it
            self._fail(error)


class RankChild:
    """A rank at the other end of a channel to rank 0."""

    def __init__(self, channel: Channel, heartbeat_s: float) -> None:
        self._channel = channel
        self._heartbeat_s = heartbeat_s
        self._commands: SimpleQueue[wire.Command] = SimpleQueue()
        self._mask_bits: SimpleQueue[wire.MaskBits] = SimpleQueue()  # in the order of their steps
        self._needs_masks = True  # it samples: its stage is the last one

    def run(self) -> int:
        """Returns the exit status."""
        threading.Thread(target=self._read, name="headrace-reader", daemon=True).start()
        try:
            return_large_buffers()
            shorten_openmp_waits()
            import torch  # noqa: F401  while rank 0 reads the model's config

            self._reply(wire.Started())
            self._serve()
        except BaseException as error:  # noqa: BLE001  the rank's edge: rank 0 reports it
            self._report(error)
            return 1
        return 0

    def _report(self, error: BaseException) -> None:
        if not isinstance(error, HeadraceError):
            _log.error("the rank has failed", exc_info=error)
        self._reply(Failed(type(error).__name__, str(error).encode(errors="replace").decode()))

    def _fail(self, error: BaseException) -> None:
        """End the process for an error on another thread than the main one."""
        self._report(error)
        self._channel.drain(DRAIN_S)
        sys.stderr.flush()
        os._exit(1)

    def _serve(self) -> None:
        from headrace.engine import runners

        start = self._next(wire.Start)
        free, total = _gpu_memory(start)
        decoder, draft = _load(start)
        step_bytes = runners.measure_step(decoder, start.settings)
        step_memory = step_bytes + runners.graph_bytes(step_bytes, decoder.spec, start.settings)
        num_bytes_read = sum(each.num_bytes_read for each in (decoder, draft) if each is not None)
        self._reply(wire.Loaded(free, total, step_memory, num_bytes_read))
        # CPUs are those of this rank's node, which may differ from node 0.
        settings = replace(self._next(wire.Build).settings, cpu_affinity=start.settings.cpu_affinity)
        runner = runners.start_runner(decoder, settings, step_bytes, draft=draft)
        release_unused()
        freeze_loaded_objects()
        self._reply(wire.Built())
        mesh = start.mesh
        self._needs_masks = mesh.is_last_stage
        if mesh.pipeline_size > 1 and mesh.is_last_stage and mesh.tensor_rank == 0:
            self._run_last_stage(runner)
        else:
            self._run_plans(runner, runners.depth_of(settings))
        runner.close()

    def _run_last_stage(self, runner: Runner) -> None:
        sender, last = ResultSender(runner, self._reply, self._fail), None
        while isinstance(command := self._commands.get(), (wire.Plan, wire.SteadyPlan)):
            last = wire.plan_of(command, last)
            sender.put(runner.submit(last, self._masks_of(last, command)))
        sender.close()

    def _masks_of(self, plan: StepPlan, command: wire.Plan | wire.SteadyPlan) -> ReceivedMasks | None:
        slots = wire.mask_slots_of(command)
        return None if slots is None or not self._needs_masks else ReceivedMasks(plan.step, slots, self._mask_bits)

    def _run_plans(self, runner: Runner, depth: int) -> None:
        """Run plans until Close. As many steps are in flight as on rank 0: none while a step with drafts runs."""
        last: StepPlan | None = None
        tickets: deque[Any] = deque()
        while True:
            try:
                command = self._commands.get(timeout=IDLE_S if tickets else None)
            except Empty:
                runner.collect(tickets.popleft())
                continue
            if isinstance(command, wire.Close):
                break
            assert isinstance(command, (wire.Plan, wire.SteadyPlan))
            last = wire.plan_of(command, last)
            tickets.append(runner.submit(last, self._masks_of(last, command)))
            while len(tickets) > (depth if last.drafts is None else 0):
                runner.collect(tickets.popleft())
        while tickets:
            runner.collect(tickets.popleft())

    def _next(self, kind: type[_Wanted]) -> _Wanted:
        command = self._commands.get()
        if isinstance(command, wire.Close):  # the start has failed on rank 0
            os._exit(0)
        assert isinstance(command, kind)
        return command

    def _reply(self, reply: wire.Reply) -> None:
        try:
            self._channel.send(wire.encode(reply))
        except OSError:
            os._exit(0)  # rank 0 has gone

    def _read(self) -> None:
        try:
            self._receive()
        except BaseException:  # noqa: BLE001  the rank's edge too: nobody waits for this thread
            _log.exception("the messages of rank 0 could not be read")
            sys.stderr.flush()
            os._exit(1)

    def _receive(self) -> None:
        heartbeat_at = monotonic()
        while True:
            frames = self._channel.receive(max(0.0, heartbeat_at - monotonic()))
            if frames is None:  # rank 0 has gone; the main thread may wait for it in a collective
                os._exit(0)
            for frame in frames:
                command = wire.decode_command(frame)
                if isinstance(command, wire.MaskBits):
                    if self._needs_masks:
                        self._mask_bits.put(command)
                else:
                    self._commands.put(command)
            if monotonic() >= heartbeat_at:
                heartbeat_at = monotonic() + self._heartbeat_s
                self._reply(wire.Heartbeat())


def _gpu_memory(start: wire.Start) -> tuple[int, int]:
    """Take this rank's GPU; returns its free and total memory before anything is loaded."""
    if start.device_index is None:
        return 0, 0
    import torch

    torch.cuda.set_device(start.device_index)
    return torch.cuda.mem_get_info()


class _Loaded(NamedTuple):
    decoder: Decoder
    draft: Decoder | None  # the draft model of speculative decoding


def _load(start: wire.Start) -> _Loaded:
    from headrace.dist.collectives import connect
    from headrace.engine import runners
    from headrace.engine.drafts import load_draft, open_draft
    from headrace.engine.opening import open_model
    from headrace.models import Decoder

    checkpoint = open_model(start.config)
    draft = open_draft(start.config, checkpoint.spec)
    groups = connect(start.mesh, start.rendezvous, "nccl" if start.backend == "nccl" else "gloo")
    groups = runners.with_small_sums(groups, start.config, start.settings)
    decoder = runners.load_model(checkpoint, start.settings, ignore_stage, groups)
    assert isinstance(decoder, Decoder), "an encoder has one rank"
    return _Loaded(decoder, None if draft is None else load_draft(draft, start.settings, groups=groups))


def main(argv: list[str]) -> int:
    fd, parent, heartbeat_s, name, *log_format = argv
    die_with(int(parent))
    ignore_stop_signals()
    set_up_output(f"{name}: ", is_json=log_format == ["json"])
    channel = Channel(socket.socket(fileno=int(fd)))
    status = RankChild(channel, float(heartbeat_s)).run()
    channel.drain(DRAIN_S)
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # without the exit handlers of libraries
