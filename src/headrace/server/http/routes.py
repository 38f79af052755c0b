"""What the transport must know about an endpoint. The list itself is in `server/endpoints/__init__.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange

if TYPE_CHECKING:  # it imports the engine, and `headrace route`, which has none, uses the gate
    from headrace.server.services import Services

Handler = Callable[["Services", Exchange], Awaitable[None]]
Auth = Literal["none", "key", "admin"]

ADMIN_PREFIX = "/admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    path: str  # may have one parameter: /v1/models/{model}, /v1/files/{file_id}/content
    method: Literal["GET", "POST", "DELETE"]
    handler: Handler
    summary: str  # for the OpenAPI document
    auth: Auth = "key"  # `key`: if the server has keys; `admin`: the admin key, and only below ADMIN_PREFIX
    body: type[msgspec.Struct] | None = None
    needs_body: bool = True  # if it takes one
    is_control: bool = False  # needs the admin key where the server has one, outside ADMIN_PREFIX too
    generates: bool = False  # runs the model
    streams_body: bool = False  # reads its body in parts, with a limit of its own
    content_type: str = "application/json"

    def __post_init__(self) -> None:
        assert (self.auth == "admin") == self.path.startswith(ADMIN_PREFIX + "/"), "the gate goes by the prefix"

    @property
    def parameter(self) -> str | None:
        """The name of the parameter in the path."""
        _, separator, rest = self.path.partition("{")
        return rest.partition("}")[0] if separator else None

    @property
    def prefix(self) -> str:
        """The path up to its parameter."""
        return self.path.partition("{")[0]

    @property
    def suffix(self) -> str:
        """The path after its parameter."""
        return self.path.partition("}")[2]


class Router:
    """Finds the route of a path and a method."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._with_parameters: dict[tuple[str, str], dict[str, Route]] = {}  # by prefix and suffix
        for route in routes:
            if route.parameter is None:
                methods = self._exact.setdefault(route.path, {})
            else:
                methods = self._with_parameters.setdefault((route.prefix, route.suffix), {})
            assert route.method not in methods, f"{route.path} is there twice"
            methods[route.method] = route

    @property
    def public_paths(self) -> frozenset[str]:
        """Paths that need no key, whatever the method."""
        public = (path for path, found in self._exact.items() if all(route.auth == "none" for route in found.values()))
        return frozenset(public)

    @property
    def control_paths(self) -> frozenset[str]:
        """Paths outside ADMIN_PREFIX that need the admin key where the server has one."""
        return frozenset(
            path for path, found in self._exact.items() if any(route.is_control for route in found.values())
        )

    @property
    def control_prefixes(self) -> tuple[str, ...]:
        """The same with a parameter: what their paths begin with."""
        found = self._with_parameters.items()
        return tuple(prefix for (prefix, _), each in found if any(route.is_control for route in each.values()))

    @property
    def streamed_paths(self) -> frozenset[str]:
        """Paths that read their body in parts."""
        return frozenset(
            path for path, found in self._exact.items() if any(route.streams_body for route in found.values())
        )

    def has(self, path: str) -> bool:
        """Whether the path is one of the list, without a parameter."""
        return path in self._exact

    def generates(self, path: str) -> bool:
        return any(route.generates for route in self._exact.get(path, {}).values())

    def find(self, path: str, method: str) -> Route:
        methods = self._exact.get(path) or self._with_parameter(path)
        if methods is None:
            raise ApiError(404, f"there is no route {_shown(path)}; /openapi.json lists them", code="not_found")
        route = methods.get("GET" if method == "HEAD" else method)  # the answer to HEAD is sent without its body
        if route is None:
            allowed = ", ".join(methods)
            raise ApiError(
                405, f"{_shown(path)} takes {allowed}", code="method_not_allowed", headers={"Allow": allowed}
            )
        return route

    def _with_parameter(self, path: str) -> dict[str, Route] | None:
        found = None
        for (prefix, suffix), methods in self._with_parameters.items():
            has_value = len(path) > len(prefix) + len(suffix)
            if has_value and path.startswith(prefix) and path.endswith(suffix):
                if suffix:
                    return methods
                found = methods
        return found


def _shown(path: str) -> str:
    return path if len(path) <= 80 else f"{path[:80]}…"
