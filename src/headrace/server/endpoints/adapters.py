"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers, while the server runs. POST
and DELETE of /adapters do the same for Amazon SageMaker.

They are off unless the server has an admin key, which they then need, or VLLM_ALLOW_RUNTIME_LORA_UPDATING is set, as in
vLLM. An adapter that is unloaded takes no new requests; those that run with it go on to their end.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import AdapterError
from headrace.openai.body import read
from headrace.openai.errors import bad_request
from headrace.openai.schema.adapters import LoadAdapterRequest, SageMakerAdapterRequest, UnloadAdapterRequest
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

PREFIX = "/adapters/"
SWITCH = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


async def load_adapter(services: Services, exchange: Exchange) -> None:
    _check_is_on(services)
    request = read(LoadAdapterRequest, await exchange.read_body(services.options.max_body_bytes))
    name, path = request.lora_name, request.lora_path
    if not name or not path:
        raise bad_request("Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if name else "lora_name")
    if name in services.engine.adapters and not request.load_inplace:
        raise bad_request(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            "lora_name",
        )
    await _load(services, name, path, ("lora_name", "lora_path"), replaces=bool(request.load_inplace))
    await _reply(exchange, f"Success: LoRA adapter '{name}' added successfully.")


async def load_sagemaker_adapter(services: Services, exchange: Exchange) -> None:
    _check_is_on(services)
    request = read(SageMakerAdapterRequest, await exchange.read_body(services.options.max_body_bytes))
    if not request.name or not request.src:
        raise bad_request("name and src must be given", "src" if request.name else "name")
    await _load(services, request.name, request.src, ("name", "src"), replaces=False)
    await _reply(exchange, f"Success: LoRA adapter '{request.name}' added successfully.")


async def _load(services: Services, name: str, path: str, fields: tuple[str, str], *, replaces: bool) -> None:
    """`fields`: where the body has the name and the path."""
    if name in services.model_names:
        raise bad_request(f"{name!r} is the name of the model; choose another one for the adapter", fields[0])
    try:
        await services.engine.load_adapter(name, path, replaces=replaces)
    except AdapterError as error:
        if not Path(path).is_dir():
            raise ApiError(404, str(error), param=fields[1], code="adapter_not_found") from None
        raise bad_request(str(error), fields[1], "adapter_refused") from None


async def unload_adapter(services: Services, exchange: Exchange) -> None:
    _check_is_on(services)
    request = read(UnloadAdapterRequest, await exchange.read_body(services.options.max_body_bytes))
    name = request.lora_name
    if not name:
        raise bad_request("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    await _unload(services, name)
    await _reply(exchange, f"Success: LoRA adapter '{name}' removed successfully.")


async def unload_sagemaker_adapter(services: Services, exchange: Exchange) -> None:
    _check_is_on(services)
    name = exchange.path.removeprefix(PREFIX)
    await _unload(services, name)
    await _reply(exchange, f"Success: LoRA adapter '{name}' removed successfully.")


async def _unload(services: Services, name: str) -> None:
    if name not in services.engine.adapters:
        raise _unknown(name)
    try:
        await services.engine.unload_adapter(name)
    except AdapterError:
        raise _unknown(name) from None


def _unknown(name: str) -> ApiError:
    message = f"The lora adapter '{name}' cannot be found."
    return ApiError(404, message, param="lora_name", code="adapter_not_found")


async def _reply(exchange: Exchange, text: str) -> None:
    await exchange.reply(200, text.encode(), content_type="text/plain; charset=utf-8")


def _check_is_on(services: Services) -> None:
    if services.engine.settings.adapters is None:
        raise ApiError(404, "adapters are off: start the server with --enable-lora", code="adapters_off")
    if services.options.admin_key is None and os.environ.get(SWITCH, "").lower() not in ("1", "true"):
        raise ApiError(
            404,
            f"adapters are not changed at run time: start the server with --admin-key, or with {SWITCH}=1 to allow it "
            "to every client",
            code="adapters_fixed",
        )
