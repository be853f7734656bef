"""The arguments of one call as a structure, as rows, and as whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from threshold_gating.kernels.structure import (
    Numbers,
    Rows,
    Shape,
    Structure,
    Tensors,
    gate_of,
    is_fused,
)
from threshold_gating.kernels.weights import Weights
from threshold_gating.primitive import FORMS, GateForm, Values, are_huge


def of_call(
    tau: Values,
    theta: Values,
    s: Values,
    c: Values,
    *,
    form: GateForm = "softmax",
    owner: Sequence[str] | None = None,
    q: Values | None = None,
    anchor: Any = None,
    clamp: tuple[float, float] | None = None,
    centred: bool | None = None,
    weights: Weights = Weights.UNKNOWN,
) -> tuple[Structure, Rows] | None:
    """The arguments of `primitive.blend` as a structure and rows, or None where no kernel has it.

    What no kernel computes, and what is no gate, is left to the reference, which has the words.
    """
    thetas, slopes, constants = _rows(theta), _rows(s), _rows(c)
    K = len(thetas) + 1
    own = isinstance(tau, Tensor) and isinstance(theta, Tensor) and tau.dim() == theta.dim()
    taus = _rows(tau) if own or isinstance(tau, Sequence) else [tau]
    fits = len(slopes) == K and len(constants) == K and len(taus) in (1, K - 1)
    if not fits or form not in FORMS or not is_fused(K, form, q, anchor, clamp):
        return None
    rows = Rows(taus, thetas, slopes, constants)
    tau_n, theta_n, s_n, c_n = [_numbers(row) for row in rows]
    known = [w for row in (theta_n, s_n, c_n) for w in row if w is not None]
    if not all(map(math.isfinite, known)) or not _is_regular(tau_n, theta_n):
        return None
    about = _about_midpoint(centred, s_n, c_n)
    gate = gate_of(tau_n[0] == math.inf, K, len(taus), about)
    owners = tuple(owner) if owner else None
    huge = are_huge(slopes, constants)
    return Structure(gate, tau_n, theta_n, s_n, c_n, owners, weights=weights, huge=huge), rows


def common_shape(rows: Rows, dim: int) -> Shape | None:
    """The shape in which all rows broadcast against an input of `dim` axes; None for several."""
    shape: Shape = ()
    for w in [w for row in rows for w in row if isinstance(w, Tensor) and w.numel() > 1]:
        padded = (1,) * (dim - w.dim()) + tuple(w.shape)
        if shape and padded != shape:
            return None
        shape = padded
    return shape


def whole(rows: Rows, shape: Shape) -> Tensors:
    """Rows of one call as whole tensors, one column for each element of `shape`."""
    tau, theta, s, c = [_stacked(row, math.prod(shape)) for row in rows]
    return Tensors(s=s, c=c, tau0=tau, theta0=theta)


def _stacked(row: Sequence[Any], group: int) -> Tensor | None:
    """Rows as one tensor (rows, group); None if all of them are numbers."""
    tensors = [w for w in row if isinstance(w, Tensor)]
    if not tensors:
        return None
    if len(row) == 1:
        return tensors[0].reshape(1, -1).expand(1, group)
    # a number keeps its digits beside a tensor of fewer
    like, dtype = tensors[0], torch.promote_types(tensors[0].dtype, torch.float32)
    each = [
        w.reshape(-1) if isinstance(w, Tensor) else like.new_full((1,), w, dtype=dtype) for w in row
    ]
    return torch.stack([w.expand(group) for w in each])


def _rows(w: Values) -> list[Any]:
    each = w.unbind(0) if isinstance(w, Tensor) and w.dim() else w
    return list(each) if isinstance(each, Sequence) else [each]


def _numbers(row: Sequence[Any]) -> Numbers:
    return tuple([None if isinstance(w, Tensor) else float(w) for w in row])


def _is_regular(taus: Numbers, thetas: Numbers) -> bool:
    """Whether numbers are what the reference takes; it has the words for those that are not."""
    sharp = [t for t in taus if t is not None]
    if not all(t > 0 for t in sharp) or len({t == math.inf for t in taus}) > 1:
        return False
    known = [t for t in thetas if t is not None]
    return sharp[0] != math.inf or known == sorted(known) if sharp else True


def _about_midpoint(centred: bool | None, slopes: Numbers, constants: Numbers) -> bool:
    if centred is not None or len(slopes) != 2 or None in (*slopes, *constants):
        return bool(centred)
    pairs = (slopes, constants)
    opposite = all(abs(lo or 0.0) == abs(hi or 0.0) for lo, hi in pairs)
    return opposite and any(lo != hi for lo, hi in pairs)
