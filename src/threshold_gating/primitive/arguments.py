"""The arguments of a gate, checked, as one row for each threshold or branch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from threshold_gating.primitive.soft import Value

Values = Value | Sequence[Value]
GateForm = Literal["softmax", "product"]
Anchor = tuple[float, float] | None

FORMS = get_args(GateForm)


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype it is computed in: float32 for 16-bit floats."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"gates need a real floating-point tensor, got {given}; convert it first.")
    return x.float() if x.element_size() < 4 else x


_PROXY = torch._C._TorchDispatchModeKey.PROXY
# Here, because these are asked in every call, and looking them up takes longer than they do.
_plain = (Tensor, torch.nn.Parameter)
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing, _mode = torch._C._get_tracing_state, torch._C._get_dispatch_mode
_included, _PRE = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch


def is_memory(x: Any) -> bool:
    """Whether x is plain memory: of no subclass, in no transform of functions, not traced, and not
    to be negated when it is read."""
    return (
        type(x) in _plain
        and not x.is_neg()
        and _transforms() is None
        and forward_ad._current_level < 0
        and _tracing() is None  # torch.jit.trace
        and _mode(_PROXY) is None  # make_fx
        and not _included(_PRE)  # the same, before autograd
    )


def are_huge(*weights: Values) -> bool:
    """Whether numbers among slopes and constants are so large that float32 would overflow before a
    gate makes them small: the gates then are evaluated in float64. A tensor's are not looked at."""
    each = [w for row in weights for w in (row if isinstance(row, Sequence) else (row,))]
    return any(not isinstance(w, Tensor) and abs(w) > 1e30 for w in each)


def positive(tau: Values) -> Values:
    """`tau`, whose tensors are looked at where that costs nothing; elsewhere what is not positive
    and finite becomes NaN, which every result then is."""
    if isinstance(tau, Sequence):
        return tuple([_positive(t) if isinstance(t, Tensor) else t for t in tau])
    return _positive(tau) if isinstance(tau, Tensor) else tau


def _positive(tau: Tensor) -> Tensor:
    right = (tau > 0) & (tau < math.inf)
    if not is_at_hand(tau):
        return torch.where(right, tau, math.nan)
    if not bool(right.all()):
        bad = tau.detach()[~right].flatten()[0].item()
        raise ValueError(
            f"tau must be positive; got a tensor with {bad}. For hard gates give the number "
            "float('inf'); for a sharpness that is learned give tau0 * rho.exp()."
        )
    return tau


def is_at_hand(t: Tensor) -> bool:
    """Whether the values of a tensor may be looked at: nothing waits for them, nor traces them."""
    return not torch.compiler.is_compiling() and t.is_cpu and is_memory(t)


def length(w: Values) -> int:
    return len(w) if isinstance(w, Sequence) or (isinstance(w, Tensor) and w.dim()) else 1


def rows_of(name: str, w: Values, x: Tensor, n: int) -> list[Value]:
    """The n entries of `w` along its first axis: numbers as they are, tensors in x's dtype."""
    each = w.unbind(0) if isinstance(w, Tensor) and w.dim() else w
    each = each if isinstance(each, Sequence) else (each,)
    if len(each) != n:
        raise ValueError(
            f"{name} needs {n} entries along its first axis to fit the thresholds; got {len(each)}."
        )
    return [r.to(x.dtype) if isinstance(r, Tensor) else float(r) for r in each]


def check_numbers(**given: Values | None) -> None:
    """Refuse NaN; and infinity, but for a threshold or a bound that is never reached."""
    for name, w in given.items():
        each = [n for n in (w if isinstance(w, Sequence) else (w,)) if isinstance(n, int | float)]
        if any(n != n or (abs(n) == math.inf and name in "scq") for n in each):
            raise ValueError(f"{name} must be finite numbers or tensors; got {w!r}.")


def thresholds_of(
    x: Tensor, tau: Values, theta: Values, form: str
) -> tuple[list[Value], list[Value]]:
    """(tau_k, theta_k) for each threshold, numbers checked, tensors taken as they are."""
    if form not in FORMS:
        raise ValueError(f"form is 'softmax' or 'product'; got {form!r}.")
    n = length(theta)
    own = isinstance(tau, Tensor) and isinstance(theta, Tensor) and tau.dim() == theta.dim()
    if own or isinstance(tau, Sequence):
        taus = rows_of("tau", tau, x, n)
    else:
        taus = [tau.to(x.dtype) if isinstance(tau, Tensor) else float(tau)] * max(n, 1)
    if any(not isinstance(t, Tensor) and not t > 0 for t in taus):
        raise ValueError(f"tau must be positive (inf for a hard gate); got {tau!r}.")
    if len({not isinstance(t, Tensor) and t == math.inf for t in taus}) > 1:
        raise ValueError(f"tau is inf (hard gates) at every threshold or at none; got {tau!r}.")
    thresholds = rows_of("theta", theta, x, n)
    numbers = [t for t in thresholds if not isinstance(t, Tensor)]
    if (form == "product" or is_hard(taus, thresholds)) and numbers != sorted(numbers):
        raise ValueError(
            f"hard and product-form gates need non-decreasing thresholds; got theta={theta!r}."
        )
    return taus, thresholds


def is_hard(taus: Sequence[Value], thresholds: Sequence[Value]) -> bool:
    """Hard gates are asked for by the number inf; a tensor is data and never inspected."""
    return not thresholds or (not isinstance(taus[0], Tensor) and taus[0] == math.inf)
