"""The part of ray that a job uses, in this process: nodes with one place each, actors on threads, nothing pickled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


class ActorDiedError(Exception):
    """As ray's, by its text."""


class FakeRay:
    """Each call runs on a thread of the pool. An actor waits for a node that has no other actor."""

    def __init__(self, *nodes: str) -> None:
        self._free = set(nodes)
        self._alive = set(nodes)
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(64)
        self.actors: list[FakeActor] = []
        self.options: list[dict[str, Any]] = []

    def add_node(self, name: str) -> None:
        with self._changed:
            self._free.add(name)
            self._alive.add(name)
            self._changed.notify_all()

    def remove_node(self, name: str) -> None:
        with self._changed:
            self._alive.discard(name)
            self._free.discard(name)
        for actor in self.actors:
            if actor.node == name:
                actor.end("The actor died because its node has died.")

    def close(self) -> None:
        for actor in self.actors:
            actor.end("the test has ended")
        with self._changed:
            self._changed.notify_all()
        self._pool.shutdown()

    # As in ray.

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 1.0}} for _ in self._alive]

    def remote(self, kind: Callable[..., Any]) -> _FakeClass:
        return _FakeClass(self, kind)

    def wait(self, replies: list[Future[Any]], *, timeout: float) -> tuple[list[Any], list[Any]]:
        done, left = wait(replies, timeout)
        return list(done), list(left)

    def get(self, reply: Future[Any]) -> Any:
        return reply.result()

    def kill(self, actor: FakeActor) -> None:
        actor.end("The actor is dead because it was killed by `ray.kill`.")

    # For actors.

    def place(self, actor: FakeActor) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free or actor.death)
            if actor.death is None:
                actor.node = self._free.pop()

    def release(self, node: str | None) -> None:
        with self._changed:
            if node in self._alive:
                self._free.add(str(node))
            self._changed.notify_all()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(function)


class _FakeClass:
    def __init__(self, ray: FakeRay, kind: Callable[..., Any]) -> None:
        self._ray, self._kind = ray, kind

    def options(self, **options: Any) -> _FakeClass:
        self._ray.options.append(options)
        return self

    def remote(self, *args: Any) -> FakeActor:
        actor = FakeActor(self._ray, lambda: self._kind(*args))
        self._ray.actors.append(actor)
        return actor


class FakeActor:
    def __init__(self, ray: FakeRay, build: Callable[[], Any]) -> None:
        self._ray = ray
        self._build = build
        self._built: Any = None
        self._building = threading.Lock()  # held while the actor waits for a place
        self._ending = threading.Lock()
        self._ended: Future[str] = Future()
        self.node: str | None = None
        self.calls: list[tuple[str, Any]] = []

    @property
    def death(self) -> str | None:
        return self._ended.result() if self._ended.done() else None

    def end(self, why: str) -> None:
        with self._ending:
            if self._ended.done():
                return
            self._ended.set_result(why)
        self._ray.release(self.node)

    def __getattr__(self, method: str) -> _FakeMethod:
        return _FakeMethod(self, method)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        with self._building:
            if self._built is None and self.death is None:
                self._ray.place(self)
                self._built = self._build() if self.death is None else None
        self.calls.append((method, args))
        result = None if self.death is not None else getattr(self._built, method)(*args)
        if self.death is not None:
            raise ActorDiedError(f"The actor died unexpectedly before finishing this task.\n{self.death}")
        return result

    def start_call(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        return self._ray.call(lambda: self.call(method, args))


class _FakeMethod:
    def __init__(self, actor: FakeActor, method: str) -> None:
        self._actor, self._method = actor, method

    def remote(self, *args: Any) -> Future[Any]:
        return self._actor.start_call(self._method, args)
