"""An OpenAI-compatible server that is already running, at an address: Headrace, vLLM, SGLang or another.

It is not started, stopped or changed here. What it does not report is not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from headrace.bench.engines import metrics
from headrace.bench.engines.base import Engine, EngineFailure, RunningEngine, SettingInForce
from headrace.bench.engines.http import HttpError, ServerClient

NAME = "openai"
_SOURCES = ("given", "automatic", "default", "reported")


class OpenAIEngine(Engine):
    """`api_key` is sent as a header; it is in no record, error or command."""

    name = NAME

    def __init__(self, address: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self._address = address
        self._model = model
        self._api_key = api_key

    def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
        """Look whether the server is there. Its settings cannot be changed."""
        if settings:
            raise EngineFailure(
                "unsupported",
                f"the server at {self._address} is already running, so {', '.join(settings)} cannot be set; "
                "use --engine headrace or --engine vllm, which start one",
            )
        if not serves:
            raise EngineFailure("unsupported", f"the server at {self._address} only serves over HTTP; use bench online")
        return RunningServer(ServerClient(self._address, api_key=self._api_key), model=self._model)


class RunningServer(RunningEngine):
    """A server at an address."""

    name = NAME

    def __init__(self, client: ServerClient, *, model: str | None = None) -> None:
        started = perf_counter()
        self._client = client
        self.address = client.address
        self._model = _model(client, model)
        self.model_name = str(self._model["id"])
        self._info = as_object(client.maybe_json("/server_info"))
        self.start_s = perf_counter() - started

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """What the server reports: Headrace all of them, others those in the labels of their metrics."""
        found = metrics.settings(self._client.maybe_text("/metrics") or "")
        if isinstance(length := self._model.get("max_model_len"), int):
            found["max_model_len"] = SettingInForce(length, "reported", "/v1/models")
        return found | settings_of(self._info)

    def versions(self) -> dict[str, str]:
        """`server`, as it names itself; Headrace also tells its settings, which others do not in this form."""
        told = as_object(self._client.maybe_json("/version")).get("version") or self._info.get("version")
        if not isinstance(told, str):
            return {"server": "not reported"}
        return {"headrace" if settings_of(self._info) else "server": told}

    def model_facts(self) -> dict[str, Any]:
        """Headrace tells the model's size; of others only the name is known."""
        told = as_object(self._info.get("model")) if settings_of(self._info) else {}
        return {**told, "name": self.model_name}

    def counters(self) -> dict[str, float]:
        return metrics.counters(self._client.maybe_text("/metrics") or "")

    def is_alive(self) -> bool:
        try:
            self._client.get("/v1/models")
        except EngineFailure:
            return False
        except HttpError:
            return True  # it answers
        return True

    def stop(self) -> None:
        """Nothing was started."""


def settings_of(info: Mapping[str, Any]) -> dict[str, SettingInForce]:
    """The settings in /server_info of a Headrace server; none for other servers."""
    found = {}
    for name, setting in as_object(info.get("settings")).items():
        if isinstance(setting, dict) and setting.keys() >= {"value", "source"} and setting["source"] in _SOURCES:
            found[name] = SettingInForce(setting["value"], setting["source"], str(setting.get("reason", "")))
    return found


def as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _model(client: ServerClient, asked: str | None) -> dict[str, Any]:
    """The entry of /v1/models under which requests ask for the model."""
    models = _models(client)
    ids = [str(model["id"]) for model in models]
    if asked is None:
        whole = [model for model in models if not model.get("parent")] or models  # without LoRA adapters
        if len(whole) > 1:
            names = ", ".join(ids)
            raise EngineFailure(
                "bad_setting", f"{client.address} serves several models; choose one with --model: {names}"
            )
        return whole[0]
    if asked not in ids:
        raise EngineFailure(
            "bad_setting", f"{client.address} does not serve the model {asked!r}; it serves {', '.join(ids)}"
        )
    return models[ids.index(asked)]


def _models(client: ServerClient) -> list[dict[str, Any]]:
    address = client.address
    try:
        told = as_object(client.get_json("/v1/models"))
    except ValueError:
        raise EngineFailure(
            "unreachable", f"{address}/v1/models does not answer with JSON; is this an OpenAI-compatible server?"
        ) from None
    except HttpError as error:
        raise EngineFailure("unreachable", f"{address}/v1/models: {_of_status(error)}") from None
    models = [model for model in told.get("data") or () if isinstance(model, dict) and "id" in model]
    if not models:
        raise EngineFailure("unreachable", f"{address}/v1/models lists no models; is this an OpenAI-compatible server?")
    return models


def _of_status(error: HttpError) -> str:
    if error.status in (401, 403):
        return (
            f"HTTP {error.status}: it needs an API key, or refuses this one; give it with --api-key or OPENAI_API_KEY"
        )
    if error.status == 404:
        return "HTTP 404: this is no OpenAI-compatible server, or its API is under another path"
    if error.status == 400:
        return "HTTP 400: a server with TLS has an https:// address"
    if error.status == 503:
        return "HTTP 503: it is starting or overloaded; try again when it is ready"
    return f"HTTP {error.status}: {' '.join(str(error).split())[:200]}"
