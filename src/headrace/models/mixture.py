"""A mixture of experts in place of an MLP: each token is routed to a few experts, and to a shared expert if there is
one.

`ops.multiply_and_route` chooses the experts and sorts the routes by expert; `ops.PackedExperts` multiplies each route's
row by the matrix of its expert, all experts in one call. Nothing here reads a value on the host, so a CUDA graph can
hold it.

Over several ranks each has a part of every expert, or (`experts`) all of some: it then computes the routes to these
only. All ranks have all tokens and choose the same routes, and the sum over the ranks is the same in both cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.dist.collectives import TensorGroup
from headrace.dist.mesh import Span
from headrace.kernels import ops
from headrace.models.layers import PLAIN, Mlp
from headrace.models.spec import Activation, Routing


@dataclass(frozen=True, slots=True)
class Mixture:
    router: ops.PackedLinear  # [experts of all ranks, H]
    up: ops.PackedExperts  # [E, I, H], or with a gate before it [E, 2 * I, H]
    down: ops.PackedExperts  # [E, H, I]
    shared: Mlp | None
    num_chosen: int  # experts per token
    routing: Routing
    weighs_input: bool  # a route's weight scales the expert's input, not its output
    activation: Activation
    is_gated: bool = True
    correction: Tensor | None = None  # [E] float32, added to the scores by which experts are chosen
    scale: float = 1.0  # of the routes' weights
    jitter: float = 0.0  # of sparsemixer routing
    shared_gate: ops.PackedLinear | None = None  # [1, H]
    num_groups: int = 1  # of experts
    num_groups_chosen: int = 1
    up_bias: Tensor | None = None  # [E, I] or [E, 2 * I]
    down_bias: Tensor | None = None  # [E, H]
    group: TensorGroup | None = None  # the ranks that divide the width of each expert, or the experts
    experts: Span | None = None  # those that this rank has, E of them; None: it has all

    def __call__(self, x: Tensor | ops.UnnormedRows) -> Tensor:  # [T, H]
        return ops.sum_routes(self.unsummed(x))

    def unsummed(self, x: Tensor | ops.UnnormedRows) -> ops.Addend:
        """The same, but the sum over each token's routes is left to the norm that follows, if nothing is added to it
        before."""
        rows = x
        if isinstance(x, ops.UnnormedRows):
            assert x.normed is not None
            x = x.normed  # the router fills it
        takes_few = self._is_plain and ops.takes_few_tokens(self.up, self.down, x, self.activation)
        routes = ops.multiply_and_route(
            self.router,
            rows,
            self.num_chosen,
            self.routing,
            correction=self.correction,
            scale=self.scale,
            jitter=self.jitter,
            num_groups=self.num_groups,
            num_groups_chosen=self.num_groups_chosen,
            sorts=not takes_few,
        )
        if takes_few:
            out: ops.Addend = ops.experts_of_few_tokens(self.up, self.down, x, routes, self.activation)
        else:
            out = self._of_routes(x, routes)
        if self.shared is not None:
            out = ops.sum_routes(out).add_(self._of_shared(self.shared, x))
        return out if self.group is None else self.group.all_reduce(ops.sum_routes(out))

    @property
    def _is_plain(self) -> bool:
        """Whether each route is a gated MLP, whose output is weighted, on this rank."""
        has_bias = self.up_bias is not None or self.down_bias is not None
        return self.is_gated and self.experts is None and not has_bias and not self.weighs_input

    def _of_routes(self, x: Tensor, routes: ops.Routes) -> ops.Addend:  # [T, H]
        if self.experts is not None:
            routes = routes_to(self.experts, routes)
        narrow = self._narrow(x, routes)
        out = self.down(narrow, routes, weighs=not self.weighs_input)  # [T * num_chosen, H]
        if self.down_bias is not None:
            out += (self.down_bias[_experts_of(routes)] * routes.weights[:, None]).to(out.dtype)
        if self.experts is not None:
            out = out.masked_fill_(_has_other_expert(routes)[:, None], 0.0)
        return out if self.num_chosen == 1 else ops.RouteRows(out, self.num_chosen)

    def _narrow(self, x: Tensor, routes: ops.Routes) -> ops.Rows:  # [T * num_chosen, I]
        """Multiplies by gate and up, and applies the activation."""
        if self.is_gated and self.up_bias is None and not self.weighs_input:
            return ops.gated_experts(self.up, x, routes, self.activation)
        # The first GEMM is linear: scaling its output is scaling its input.
        wide = self.up(x, routes, weighs=self.weighs_input)  # [T * num_chosen, I or 2 * I]
        if self.up_bias is not None:
            wide += self.up_bias[_experts_of(routes)]
        return (ops.GATED if self.is_gated else PLAIN)[self.activation](wide, as_fp8=self.down.takes_fp8)

    def _of_shared(self, shared: Mlp, x: Tensor) -> Tensor:
        out = shared(x)
        return out if self.shared_gate is None else out.mul_(self.shared_gate(x).sigmoid_())


def _experts_of(routes: ops.Routes) -> Tensor:  # [R] int64
    """Returns the expert of each route, counted from the first of this rank; any, if it is on another rank."""
    places = torch.arange(routes.order.shape[0], dtype=torch.int32, device=routes.order.device)
    experts = torch.searchsorted(routes.ends, places, right=True)  # of the routes in `order`
    experts = experts.clamp_(max=routes.ends.shape[0] - 1)
    return torch.empty_like(experts).index_copy_(0, routes.order.long(), experts)


def routes_to(experts: Span, routes: ops.Routes) -> ops.Routes:
    """The same routes with those to `experts` first, and only the ends of these."""
    num_routes, ends = routes.order.shape[0], routes.ends
    first = ends[experts.start - 1] if experts.start else torch.zeros_like(ends[0])
    rotated = (torch.arange(num_routes, device=ends.device) + first) % max(num_routes, 1)
    return ops.Routes(routes.weights, routes.order[rotated], ends[experts.start : experts.end] - first)


def _has_other_expert(routes: ops.Routes) -> Tensor:  # [R]
    """Whether a route's expert is on another rank, so that nothing was computed for it."""
    num_routes = routes.order.shape[0]
    is_other = torch.empty(num_routes, dtype=torch.bool, device=routes.order.device)
    is_other[routes.order.long()] = torch.arange(num_routes, device=routes.order.device) >= routes.ends[-1]
    return is_other
