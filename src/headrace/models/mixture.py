"""A mixture of experts in an MLP's place: each token goes to a few of them, and to one that all share if there is one.

Nothing here looks at a value on the host, so that a graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import ops
from headrace.models.layers import GATED, Mlp
from headrace.models.spec import Activation, Routing


@dataclass(frozen=True, slots=True)
class Mixture:
    router: ops.PackedLinear  # [E, H]
    up: ops.PackedExperts  # [E, 2 * I, H], the gate before it
    down: ops.PackedExperts  # [E, H, I]
    shared: Mlp | None
    num_chosen: int  # experts of a token
    routing: Routing
    weighs_input: bool  # a route's weight is for what the expert reads, not for what it writes
    activation: Activation

    @property
    def takes_fp8(self) -> bool:
        return False  # the router reads exact rows; experts quantize their own

    def __call__(self, x: Tensor) -> Tensor:  # [T, H]
        routes = ops.route(self.router(x), self.num_chosen, self.routing)
        # The first product is linear: weighing what it gives is weighing what it reads.
        wide = self.up(x, routes, weighs=self.weighs_input)  # [T * num_chosen, 2 * I]
        narrow = GATED[self.activation](wide, as_fp8=self.down.takes_fp8)
        out = self.down(narrow, routes, weighs=not self.weighs_input)  # [T * num_chosen, H]
        if self.num_chosen > 1:
            out = out.view(x.shape[0], self.num_chosen, out.shape[1]).sum(1)
        return out if self.shared is None else out.add_(self.shared(x))
