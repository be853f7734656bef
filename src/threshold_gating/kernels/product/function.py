"""Tier W: the gated inputs times the branch weights, as one differentiable function.

Autograd would keep the gated inputs, K times the size of `x`, for the gradient of the weights. Here
only `x` is kept and the gates are evaluated again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.kernels.backend import backend, is_memory, no_native_op, runs_triton
from threshold_gating.kernels.blend.autograd import differentiated
from threshold_gating.kernels.blend.function import wrong_call
from threshold_gating.kernels.call import common_shape, of_call, whole
from threshold_gating.kernels.product import one_vector, two_soft
from threshold_gating.kernels.product.formula import (
    Conv,
    Formula,
    Grads,
    Operands,
    Plan,
    check_factor,
)
from threshold_gating.kernels.structure import Gate, Rows, Structure, Tensors
from threshold_gating.primitive import GateForm

AUDITED_AS = "gates"  # see conversion.audit
_sigmoid_ = torch.ops.aten.sigmoid_.default


def gated_product(
    x: Tensor,
    structure: Structure | Any,
    *given: Any,
    conv: Conv | None = None,
    factor: Tensor | None = None,
    form: GateForm | None = None,
    owner: Sequence[str] | None = None,
) -> Tensor:
    """sum_k W_k (g_k(x) (s_k x + c_k)) + b (Eq. 4 with the gates shared by the outputs).

    Called as `gated_product(x, structure, tensors, shape, weight, bias)`, as `blend` is, or with
    the numbers and tensors themselves: `gated_product(x, tau, theta, s, c, weight, bias)`.

    Args:
        x: (..., I), or (B, C, *spatial) for a convolution.
        weight: (O, K, I), or (O, K, C / groups, *kernel).
        conv: how to convolve; None multiplies.
        factor: with a structure, what multiplies the gated inputs, as large as x; in plain torch.

    >>> x, weight = torch.tensor([[-1.0, 2.0]]), torch.tensor([[[10.0, 10.0], [1.0, 1.0]]])
    >>> gated_product(x, float("inf"), (0.0,), (1, 1), (0, 0), weight)
    tensor([[-8.]])
    """
    if backend() == "native":
        raise no_native_op()
    if isinstance(structure, Structure):
        options = [n for n, w in (("form", form), ("owner", owner)) if w is not None]
        if options or len(given) not in (3, 4):
            words = "tensors, shape, weight and a bias or None"
            raise TypeError(wrong_call("gated_product", words, given, options))
        tensors, shape, weight, *rest = given
        bias = rest[0] if rest else None
        formula = Formula(structure, shape, conv)
        if factor is not None:
            check_factor(x, factor)
            return formula.product(formula.inputs(x, formula.rows(tensors), factor), weight, bias)
        return _product(formula, x, weight, bias, tensors)
    if factor is not None:
        raise TypeError("gated_product: factor goes with a structure and its tensors.")
    theta, s, c, weight, *rest = given
    bias, form = rest[0] if rest else None, form or "softmax"
    tau = primitive.positive(structure)
    found = of_call(tau, theta, s, c, form=form, owner=owner)
    shape = None if found is None else common_shape(found[1], x.dim())
    if found is None or shape is None:  # the plain formula takes what `primitive` takes
        known = Structure(Gate.TWO, (), (), (), (), None if owner is None else tuple(owner), form)
        return Formula(known, (), conv)(x, weight, bias, Rows([tau], theta, s, c))
    return _product(Formula(found[0], shape, conv), x, weight, bias, whole(found[1], shape))


def _product(
    formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None, tensors: Tensors
) -> Tensor:
    name = backend()
    # A compiler decides by itself what to keep, and function transforms cannot see inside.
    plain = name == "reference" or torch.compiler.is_compiling()
    if plain or torch._C._are_functorch_transforms_active():
        return formula(x, weight, bias, formula.rows(tensors))
    if runs_triton(x, name) and is_memory(x):
        y = _launched(formula, x, weight, bias, tensors)
        if y is not None:
            return y
    if not torch.is_grad_enabled():
        return formula(x, weight, bias, formula.rows(tensors))
    kept: Tensor = _Product.apply(x, weight, bias, *tensors, Recomputed(formula))  # type: ignore[no-untyped-call]
    return kept


def _launched(
    formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None, tensors: Tensors
) -> Tensor | None:
    """By kernels of Triton, or None where none has that.

    Gates evaluated in torch are half a dozen launches, and Python for each: more than a small
    product takes.
    """
    theta0 = tensors.theta0
    if theta0 is None or not theta0.device == weight.device == x.device:
        return None  # kernels take addresses and do not ask
    casts = torch.is_autocast_enabled(x.device.type)
    if formula.structure.hard:
        grad = torch.is_grad_enabled()
        if grad or casts or not one_vector.takes(formula, x, weight, tensors):
            return None
        return one_vector.product(formula.structure, x, tensors, weight, bias)
    if not formula.has_two_soft() or not formula.per_channel(x.dim()):
        return None
    if not casts:
        takes = x.dtype == weight.dtype and two_soft.takes(formula, x, tensors)
        return _two_soft(formula, x, weight, bias, tensors) if takes else None
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = x.to(dtype), weight.to(dtype)
    if not two_soft.takes(formula, x, tensors):
        return None
    with torch.autocast(x.device.type, enabled=False):
        return _two_soft(formula, x, weight, None if bias is None else bias.to(dtype), tensors)


def _two_soft(
    formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None, tensors: Tensors
) -> Tensor:
    matrix = formula.conv is None and x.dim() != 2
    z, plan = x.reshape(-1, x.shape[-1]) if matrix else x, two_soft.Plan(formula)
    if torch.is_grad_enabled():
        y: Tensor = _apply(z, weight, bias, *tensors, plan)
    else:
        y = plan.forward(Operands(z, weight, bias, tensors))
    # out here, because a view that a function made itself could not be overwritten
    return y.view(*x.shape[:-1], len(weight)) if matrix else y


class _Product(torch.autograd.Function):
    """A product of gated inputs that keeps x, the weights and the gate's tensors only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *held: Any) -> Tensor:
        *tensors, plan = held
        ctx.plan = plan
        ctx.save_for_backward(x, weight, bias, *tensors)
        y: Tensor = plan.forward(Operands(x, weight, bias, Tensors(*tensors)))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan: Plan = ctx.plan
        wanted, formula = ctx.needs_input_grad[:9], plan.formula
        x, weight, bias, *held = ctx.saved_tensors
        if torch.is_grad_enabled():  # someone differentiates twice

            def again(x: Tensor, weight: Tensor, bias: Tensor | None, *own: Any) -> Tensor:
                return formula(x, weight, bias, formula.rows(Tensors(*own)))

            return *differentiated(again, (x, weight, bias, *held), dy, wanted), None
        given = Operands(x, weight, bias, Tensors(*held))
        return *plan.backward(dy, given, wanted), None


# without its care for functorch, whose tensors are no memory
_apply: Any = super(torch.autograd.Function, _Product).apply


class Recomputed(NamedTuple):
    """The plain formula, whose gated inputs are made again in the backward pass."""

    formula: Formula

    def forward(self, given: Operands) -> Tensor:
        x, weight, bias, tensors = given
        rows = self.formula.rows(tensors)
        fast = _Two.of(self.formula, x, rows) if x.dtype == weight.dtype else None
        if fast is None or torch.is_autocast_enabled(x.device.type):
            y = self.formula(x, weight, bias, rows)
        else:
            y = fast.value(weight, bias)
            y = y if x.dim() == 2 else y.view(*x.shape[:-1], len(weight))
        # A view that was made in here could not be overwritten (a product with one row is one).
        return y.clone() if y._is_view() else y

    def backward(self, dy: Tensor, given: Operands, wanted: Sequence[bool]) -> Grads:
        x, weight, bias, tensors = given
        need = [t.detach().requires_grad_(w) for t, w in _pairs(x, tensors, wanted)]
        each = iter(need[1:])
        with torch.enable_grad():
            own = Tensors(*[None if t is None else next(each) for t in tensors])
            rows = self.formula.rows(own)
        fast = _Two.of(self.formula, x, rows)
        if fast is not None and dy.dtype == x.dtype == weight.dtype:
            dx, dw, db, *along = fast.gradients(dy, weight, wanted)
            dx = None if dx is None else dx.view_as(x)
            return [dx, dw, db, *_gradients([rows.tau[0], rows.theta[0]], own, along)]
        with torch.enable_grad():
            phi = self.formula.inputs(need[0], rows)
        inside = wanted[0] or any(wanted[3:])
        asked = (inside, *wanted[1:3])
        dphi, dw, db = self.formula.product_gradients(dy, phi.detach(), weight, asked)
        dx, *rest = _gradients([phi], (need[0], *own), [dphi])
        dw = None if dw is None else dw.to(weight.dtype)
        return [dx, dw, None if db is None or bias is None else db.to(bias.dtype), *rest]


def _pairs(x: Tensor, tensors: Tensors, wanted: Sequence[bool]) -> list[tuple[Tensor, bool]]:
    held = zip(tensors, wanted[3:], strict=True)
    return [(x, wanted[0]), *((t, w) for t, w in held if t is not None)]


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor | None], dys: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """d outputs / d inputs, None for those that need none."""
    needed = [t for t in inputs if t is not None and t.requires_grad]
    known = [(y, dy.to(y.dtype)) for y, dy in zip(outputs, dys, strict=True) if dy is not None]
    pairs = [(y, dy) for y, dy in known if y.requires_grad]
    if not pairs or not needed:
        return [None] * len(inputs)
    ys, slopes = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(ys, needed, slopes, allow_unused=True))
    return [next(grads) if t is not None and t.requires_grad else None for t in inputs]


class _Two(NamedTuple):
    """The common case in few passes and buffers: two soft gates over x, the halves one by one.

    New memory costs as much as the arithmetic on it: a half is overwritten by the other, and two
    products that add up take no more time than one of twice the inner size.
    """

    z: Tensor  # (N, I)
    tau: Tensor
    theta: Tensor

    @classmethod
    def of(cls, formula: Formula, x: Tensor, rows: Rows) -> _Two | None:
        # convolutions spend their time elsewhere, and 16 bits on a CPU too
        if formula.conv is not None or x.element_size() < 4:
            return None
        tau, theta = rows.tau[0], rows.theta[0]
        data = isinstance(tau, Tensor) and isinstance(theta, Tensor)
        if not data or not formula.has_two_soft() or not formula.per_channel(x.dim()):
            return None
        wide = (-1,) if tau.dim() else ()
        own = (w.detach().view(wide) for w in (tau, theta))
        return cls(x.reshape(-1, x.shape[-1]), *own)

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
