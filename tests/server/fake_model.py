"""Answers of a model that the test writes, for servers over the fake engine."""

from __future__ import annotations

import threading

from headrace.types import FinishReason
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Server


class Model:
    """Answers the next requests, in order, from a thread: each answer is a list of pieces."""

    def __init__(self, server: Server, fake: FakeEngine, *answers: list[str], reason: FinishReason = "stop") -> None:
        self._reason = reason
        self._thread = threading.Thread(target=self._answer, args=(server, fake, answers))
        self._thread.start()

    def _answer(self, server: Server, fake: FakeEngine, answers: tuple[list[str], ...]) -> None:
        num_before = len(fake.client.requests)
        for number, pieces in enumerate(answers):
            server.wait_until(lambda number=number: len(fake.client.requests) > num_before + number)
            for piece in pieces[:-1]:
                server.on_loop(lambda piece=piece: fake.client.send(piece))
            server.on_loop(lambda pieces=pieces: fake.client.send(pieces[-1], reason=self._reason))

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()


def prompt_of(fake: FakeEngine, number: int = -1) -> str:
    """What the model was asked."""
    return fake.client.tokenizer.decode(fake.client.requests[number].prompt_token_ids.tolist())
