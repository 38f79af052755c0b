"""The self-check of a server, with the small engine of the server's tests in place of a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from headrace.checkpoint.self_check import self_check
from headrace.errors import EngineDeadError
from headrace.types import SamplingParams

SETTINGS = {"max_num_seqs": {"value": 4, "source": "given", "reason": ""}}


class FakeAsyncEngine:
    """Answers with as many tokens as asked for, or fails for prompts that begin with an even token."""

    spec = SimpleNamespace(
        vocab_size=500,
        mixture=None,
        **dict.fromkeys(
            (
                "family",
                "num_params",
                "num_layers",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "max_model_len",
            )
        ),
    )

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    async def generate(self, prompt: list[int], params: SamplingParams) -> Any:
        assert max(prompt) < self.spec.vocab_size
        if self.fails:
            raise EngineDeadError("the engine is gone")
        for count in range(1, (params.max_tokens or 0) + 1):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * count)])


def facts(*, fails: bool = False) -> dict[str, Any]:
    engine: Any = FakeAsyncEngine(fails=fails)
    return asyncio.run(self_check(engine, "no-such-model", SETTINGS, command="headrace serve --api-key k"))


def test_requests_that_are_answered_are_the_verification() -> None:
    found = facts()
    (load,) = found["verification"]["loads"]
    assert load["figures"]["success_share"]["mean"] == 1.0
    assert found["verification"]["judged"] == ["success_share"]
    assert found["kind"] == "serve"
    assert "4 of 4 requests answered" in found["decision"]["text"]
    assert found["command"] == "headrace serve --api-key HIDDEN"
    assert found["warnings"] == []


def test_requests_that_fail_are_counted_and_named() -> None:
    found = facts(fails=True)
    assert found["verification"]["loads"][0]["figures"]["success_share"]["mean"] == 0.0
    assert found["warnings"] == ["self-check: the engine is gone"]
