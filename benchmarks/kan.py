"""A layer of splines on each synapse (KAN), the neighbour of gates on each synapse.

    y_o = sum_i w_oi silu(x_i) + sum_i sum_g c_oig B_g(x_i)

with B-splines B_g of order 3 on a uniform grid, as in the package pykan, whose layer has the same
parameters but two scales. B depends on x alone, so the sum over i and g is one matrix product.
`expanded` does as pykan does: the value of each synapse at each row, batch x in x out, then a sum.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KAN(nn.Module):
    """`intervals` on [-1, 1], as in pykan, and `order` more splines; 0 outside of all of them."""

    knots: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        intervals: int = 5,
        order: int = 3,
        *,
        expanded: bool = False,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.order, self.expanded = inputs, order, expanded
        step = 2.0 / intervals
        knots = torch.arange(-order, intervals + order + 1, device=device) * step - 1.0
        self.register_buffer("knots", knots)
        scale = 1 / math.sqrt(inputs)
        self.base = nn.Parameter(scale * torch.randn(outputs, inputs, device=device))
        shape = (outputs, inputs, intervals + order)
        self.coefficients = nn.Parameter(0.1 * scale * torch.randn(shape, device=device))

    def splines(self, x: Tensor) -> Tensor:
        """(N, I) -> (N, I, splines), by the recursion of Cox and de Boor."""
        z, t = x.unsqueeze(-1), self.knots
        found = ((z >= t[:-1]) & (z < t[1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            rise = (z - t[: -k - 1]) / (t[k:-1] - t[: -k - 1])
            fall = (t[k + 1 :] - z) / (t[k + 1 :] - t[1:-k])
            found = rise * found[..., :-1] + fall * found[..., 1:]
        return found

    def forward(self, x: Tensor) -> Tensor:
        b = self.splines(x)
        if self.expanded:
            each = torch.einsum("nig,oig->noi", b, self.coefficients)
            return (each + self.base * F.silu(x).unsqueeze(1)).sum(-1)
        return F.silu(x) @ self.base.t() + b.flatten(1) @ self.coefficients.flatten(1).t()
