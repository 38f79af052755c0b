"""What form an answer must have: response_format and structured_outputs, as the engine takes them."""

from __future__ import annotations

from headrace.engine.response_format import read_response_format
from headrace.errors import RequestError
from headrace.server.endpoints.schema.common import SamplingFields
from headrace.server.http.errors import bad_request
from headrace.types import StructuredOutputs


def structured_outputs(request: SamplingFields) -> StructuredOutputs | None:
    """None if any text will do."""
    of_format = read_response_format(request.response_format)
    if request.structured_outputs is None:
        return of_format
    if of_format is not None:
        raise bad_request("response_format and structured_outputs exclude each other", "structured_outputs")
    try:
        return StructuredOutputs.of(request.structured_outputs)
    except RequestError as error:
        raise bad_request(str(error), error.param or "structured_outputs") from None
