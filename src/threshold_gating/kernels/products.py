"""Tier W: the gated inputs times the branch weights, as one matrix product or one convolution.

Autograd would keep the gated inputs, K times the size of `x`, for the gradient of the weights. Here
only `x` is kept and the gates are evaluated again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as tree

from threshold_gating import primitive
from threshold_gating.kernels import columns, halves
from threshold_gating.primitive import GateForm, Values

_sigmoid_ = torch.ops.aten.sigmoid_.default


class Conv(NamedTuple):
    """How a convolution runs over its gated inputs, which are padded, never `x` itself."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    pad: tuple[int, ...] = ()  # what `padding` cannot say: uneven, or not with zeros
    mode: str = "constant"


class _Plan(NamedTuple):
    """Everything about a product that is not a tensor."""

    spec: Any
    numbers: tuple[Any, ...]  # the leaves of the gate parameters, None where a tensor belongs
    form: GateForm
    owner: Sequence[str] | None
    conv: Conv | None

    def parameters(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if number is None else number for number in self.numbers]
        return tree.tree_unflatten(leaves, self.spec)

    def is_simple(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are two soft gates over x itself, alike but for tau and theta."""
        tau, theta, s, c = self.parameters(tensors)
        return (
            len(tensors) == 2
            and isinstance(tau, Tensor)
            and isinstance(theta, list)
            and len(theta) == 1
            and [*s, *c] == [1, 1, 0, 0]
            and tau.shape == theta[0].shape
            and (tau.numel() == 1 or tau.dim() == (1 if self.conv is None else 3))
        )

    def inputs(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The gated inputs, padded where the convolution itself cannot."""
        axis, groups = (-1, 1) if self.conv is None else (1, self.conv.groups)
        phi = primitive.features(
            x,
            *self.parameters(tensors),
            axis=axis,
            groups=groups,
            form=self.form,
            owner=self.owner,
        )
        if self.conv is None or not self.conv.pad:
            return phi
        return F.pad(phi, self.conv.pad, self.conv.mode)

    def product(self, phi: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.conv is None:
            return F.linear(phi, weight.flatten(1), bias)
        run = (F.conv1d, F.conv2d, F.conv3d)[len(self.conv.stride) - 1]
        y: Tensor = run(phi, weight.flatten(1, 2), bias, *self.conv[:4])
        return y

    def product_gradients(
        self, dy: Tensor, phi: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of `product` in phi, weight and bias, in the dtype of dy."""
        if self.conv is None:
            rows, flat = dy.reshape(-1, dy.shape[-1]), weight.flatten(1).to(dy.dtype)
            return (
                dy @ flat if wanted[0] else None,
                (rows.t() @ phi.reshape(-1, phi.shape[-1]).to(dy.dtype)).view_as(weight)
                if wanted[1]
                else None,
                rows.sum(0) if wanted[2] else None,
            )
        stride, padding, dilation, groups = self.conv[:4]
        dphi, dw, db = torch.ops.aten.convolution_backward.default(
            dy,
            phi.to(dy.dtype),
            weight.flatten(1, 2).to(dy.dtype),
            [weight.shape[0]],
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            groups,
            list(wanted),
        )
        return dphi, dw.view_as(weight) if wanted[1] else None, db


def gated_product(
    x: Tensor,
    tau: Values,
    theta: Values,
    s: Values,
    c: Values,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    form: GateForm = "softmax",
    owner: Sequence[str] | None = None,
    conv: Conv | None = None,
    keep: bool = False,
    triton: bool = False,
) -> Tensor:
    """sum_k W_k (g_k(x) (s_k x + c_k)) + b (Eq. 4 with the gates shared by the outputs).

    Args:
        x: (..., I), or (B, C, *spatial) for a convolution.
        tau, theta, s, c, form, owner: as in `primitive.blend`, in shapes that broadcast to `x`.
        weight: (O, K, I), or (O, K, C / groups, *kernel).
        conv: how to convolve; None multiplies.
        keep: let autograd keep what it likes, as plain torch would.
        triton: use kernels of Triton where there are any.

    >>> x, weight = torch.tensor([[-1.0, 2.0]]), torch.tensor([[[10.0, 10.0], [1.0, 1.0]]])
    >>> gated_product(x, float("inf"), (0.0,), (1, 1), (0, 0), weight)
    tensor([[-8.]])
    """
    leaves, spec = tree.tree_flatten((tau, _listed(theta), _listed(s), _listed(c)))
    numbers = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plan = _Plan(spec, numbers, form, owner, conv)
    # A compiler decides by itself what to keep, and function transforms cannot see inside.
    plain = keep or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if triton and not plain and plan.is_simple(tensors):
        gates = halves.Gates(tensors[0], None, tensors[1], None)
        if (y := _halved(plan, x, weight, bias, gates)) is not None:
            return y
    if plain or not torch.is_grad_enabled():
        return plan.product(plan.inputs(x, tensors), weight, bias)
    kept: Tensor = _Recomputed.apply(plan, x, weight, bias, *tensors)  # type: ignore[no-untyped-call]
    return kept


class Gate(NamedTuple):
    """A gate as a module holds it: what is known of its branches, then its tensors.

    tau = tau0 exp(rho) and theta = theta0 + dtheta, where rho and dtheta are; theta0 is (K - 1, G)
    and c is (K, G), the values at the thresholds if the gate is `anchored`.
    """

    anchored: bool
    owner: tuple[str, ...] | None
    slopes: tuple[float | None, ...]  # None is a number that only a tensor holds
    constants: tuple[float | None, ...]
    tau0: Tensor | None  # None is hard
    rho: Tensor | None
    theta0: Tensor
    dtheta: Tensor | None
    c: Tensor


def launched(
    x: Tensor, gate: Gate, weight: Tensor, bias: Tensor | None, conv: Conv | None
) -> Tensor | None:
    """`gated_product` straight from the tensors of a module, or None where no kernel has that.

    Gates evaluated in torch are half a dozen launches, and Python for each: more than a small
    product takes.
    """
    anchored, owner, slopes, constants, tau0, rho, theta0, dtheta, c = gate
    if not theta0.device == weight.device == x.device:  # kernels take addresses and do not ask
        return None
    if tau0 is None:  # hard
        if conv is not None or torch.is_grad_enabled() or not columns.takes(x, weight, theta0):
            return None
        if any(w != 1 for w in slopes) or torch.is_autocast_enabled(x.device.type):
            return None
        shifted = any(w != 0 for w in constants)
        return columns.product(x, theta0, dtheta, c, weight, bias, owner, shifted, anchored)
    if slopes != (1, 1) or constants != (0, 0) or tau0.dim() != 1:
        return None
    return _halved(_soft(conv), x, weight, bias, halves.Gates(tau0, rho, theta0, dtheta))


@functools.lru_cache(256)
def _soft(conv: Conv | None) -> _Plan:
    """The plan of two soft gates over x itself."""
    leaves, spec = tree.tree_flatten((None, [None], [1.0, 1.0], [0.0, 0.0]))
    return _Plan(spec, tuple(leaves), "softmax", None, conv)


def _halved(
    plan: _Plan, x: Tensor, weight: Tensor, bias: Tensor | None, gates: halves.Gates
) -> Tensor | None:
    if not torch.is_autocast_enabled(x.device.type):
        takes = x.dtype == weight.dtype and halves.takes(plan, x, gates)
        return halves.product(plan, x, weight, bias, gates) if takes else None
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = x.to(dtype), weight.to(dtype)
    if not halves.takes(plan, x, gates):
        return None
    with torch.autocast(x.device.type, enabled=False):
        return halves.product(plan, x, weight, None if bias is None else bias.to(dtype), gates)


def _listed(w: Values) -> Any:
    return list(w.unbind(0)) if isinstance(w, Tensor) and w.dim() else w


class _Recomputed(torch.autograd.Function):
    """`_Plan.product` of `_Plan.inputs` that keeps x and the weights only."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, x: Tensor, weight: Tensor, bias: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.plan, ctx.biased = plan, bias is not None
        ctx.save_for_backward(x, weight, *([] if bias is None else [bias]), *tensors)
        fast = _Two.of(plan, x, tensors) if x.dtype == weight.dtype else None
        if fast is None or torch.is_autocast_enabled(x.device.type):
            y = plan.product(plan.inputs(x, tensors), weight, bias)
        else:
            y = fast.value(weight, bias)
            y = y if x.dim() == 2 else y.view(*x.shape[:-1], len(weight))
        # A view that was made in here could not be overwritten (a product with one row is one).
        return y.clone() if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x, weight, *rest = ctx.saved_tensors
        bias, tensors = (rest[0], rest[1:]) if ctx.biased else (None, rest)
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # someone differentiates twice
            return None, *twice(plan, dy, (x, weight, bias, *tensors), tensors, wanted)
        fast = _Two.of(plan, x, tensors)
        if fast is not None and dy.dtype == x.dtype == weight.dtype:
            dx, *rest = fast.gradients(dy, weight, wanted)
            return None, None if dx is None else dx.view_as(x), *rest
        with torch.enable_grad():
            own = [t.detach().requires_grad_(w) for t, w in _pairs(x, tensors, wanted)]
            phi = plan.inputs(own[0], own[1:])
        inside = wanted[0] or any(wanted[3:])
        dphi, dw, db = plan.product_gradients(dy, phi.detach(), weight, (inside, *wanted[1:3]))
        dx, *dt = _gradients(phi, own, dphi)
        return (
            None,
            dx,
            None if dw is None else dw.to(weight.dtype),
            None if db is None or bias is None else db.to(bias.dtype),
            *dt,
        )


def _pairs(
    x: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool]
) -> list[tuple[Tensor, bool]]:
    return [(x, wanted[0]), *zip(tensors, wanted[3:], strict=True)]


def _gradients(
    y: Tensor, inputs: Sequence[Tensor], dy: Tensor | None, create_graph: bool = False
) -> list[Tensor | None]:
    """d y / d inputs, None for those that need none."""
    needed = [t for t in inputs if t.requires_grad]
    if dy is None or not needed:
        return [None] * len(inputs)
    grads = iter(
        torch.autograd.grad(y, needed, dy.to(y.dtype), create_graph=create_graph, allow_unused=True)
    )
    return [next(grads) if t.requires_grad else None for t in inputs]


def twice(
    plan: _Plan,
    dy: Tensor,
    given: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients in what was given (x, weight, bias, ...), differentiable; `tensors` gate."""
    x, weight, bias = given[:3]
    assert x is not None and weight is not None
    y = plan.product(plan.inputs(x, tensors), weight, bias)
    grads = iter(_gradients(y, [t for t in given if t is not None], dy, create_graph=True))
    found = [None if t is None else next(grads) for t in given]
    return [g if want else None for g, want in zip(found, wanted, strict=True)]


class _Two(NamedTuple):
    """The common case in few passes and buffers: two soft gates over x, the halves one by one.

    New memory costs as much as the arithmetic on it: a half is overwritten by the other, and two
    products that add up take no more time than one of twice the inner size.
    """

    z: Tensor  # (N, I)
    tau: Tensor
    theta: Tensor

    @classmethod
    def of(cls, plan: _Plan, x: Tensor, tensors: Sequence[Tensor]) -> _Two | None:
        # convolutions spend their time elsewhere, and 16 bits on a CPU too
        if plan.conv is not None or x.element_size() < 4 or not plan.is_simple(tensors):
            return None
        return cls(x.reshape(-1, x.shape[-1]), *tensors)

    def gates(self) -> tuple[Tensor, Tensor]:
        """The lower and the upper one, neither as 1 minus the other."""
        u = (self.z - self.theta).mul_(self.tau)
        return _sigmoid_(u.neg()), _sigmoid_(u)

    def value(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        low, high = (g.mul_(self.z) for g in self.gates())
        second, first = weight[:, 1].t(), weight[:, 0].t()
        y = high @ second if bias is None else torch.addmm(bias, high, second)
        return y.addmm_(low, first)

    def gradients(self, dy: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """In x, weight, bias, tau and theta; the weights come last, in the room of the others."""
        (low, high), rows = self.gates(), dy.reshape(-1, dy.shape[-1])
        inside: list[Tensor | None] = [None, None, None]
        if wanted[0] or any(wanted[3:]):
            inside = list(self._through_gates(low, high, rows @ weight[:, 0], rows @ weight[:, 1]))
        dw = None
        if wanted[1]:
            dw = torch.empty_like(weight)
            torch.mm(rows.t(), high.mul_(self.z), out=dw[:, 1])
            torch.mm(rows.t(), low.mul_(self.z), out=dw[:, 0])
        return [inside[0], dw, rows.sum(0) if wanted[2] else None, *inside[1:]]

    def _through_gates(
        self, low: Tensor, high: Tensor, dlow: Tensor, dhigh: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients in x, tau and theta from those of the halves, which are overwritten."""
        dx = torch.mul(low, dlow).addcmul_(high, dhigh)
        # d g / d u = g_1 g_2, times what the gate moves between
        moved = dhigh.sub_(dlow).mul_(low).mul_(high).mul_(self.z)
        dx.addcmul_(moved, self.tau)
        total = moved.sum_to_size(self.theta.shape)
        along = torch.mul(moved, self.z, out=dlow).sum_to_size(self.tau.shape)
        return dx, along - self.theta * total, -self.tau * total
