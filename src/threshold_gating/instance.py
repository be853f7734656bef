"""The frozen record `TG`: one instance of the primitive as plain numbers, checked when made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from threshold_gating.primitive import FORMS, Anchor, GateForm, blend

AUDITED_AS = "gates"  # see conversion.audit

_REQUIRED = ("tau", "theta", "s", "c")


@dataclass(frozen=True, init=False, repr=False)
class TG:
    """One choice of (tau, theta, s, c): y = sum_k g_k(x) (s_k x + c_k) (Eq. 3).

    Frozen, hashable, equal when the parameters are; `eval(repr(t)) == t`. Calling it evaluates
    the gates in plain torch whatever the backend, with the limit values at x = +-inf (where
    torch's SiLU, GELU and Mish give NaN) and NaN for NaN.

    Args:
        tau: sharpness > 0, one number or K - 1; `inf` (all or none) makes the gates hard.
        theta: K - 1 thresholds, low to high (in any order for soft softmax gates).
        s, c: K slopes and intercepts, low to high in x. (The paper prints K = 2 rows high first.)
        form, owner, q, anchor, clamp: as in `blend`; shown only where they are not the default.

    >>> TG(1, 0, (0, 1), (0, 0))(torch.tensor([1.0]))
    tensor([0.7311])
    """

    tau: float | tuple[float, ...]
    theta: tuple[float, ...]
    s: tuple[float, ...]
    c: tuple[float, ...]
    form: GateForm
    owner: tuple[str, ...] | None
    q: tuple[float, ...] | None
    anchor: tuple[Anchor, ...] | None
    clamp: tuple[float, float] | None

    def __init__(
        self,
        tau: float | Sequence[float],
        theta: float | Sequence[float],
        s: float | Sequence[float],
        c: float | Sequence[float],
        *,
        form: GateForm = "softmax",
        owner: Sequence[str] | None = None,
        q: Sequence[float] | None = None,
        anchor: Sequence[Sequence[float] | None] | None = None,
        clamp: Sequence[float] | None = None,
    ) -> None:
        thetas, slopes, constants = _numbers("theta", theta), _numbers("s", s), _numbers("c", c)
        K = len(thetas) + 1
        for name, w in (("s", slopes), ("c", constants)):
            if len(w) != K:
                raise ValueError(
                    f"TG: {K - 1} thresholds make K = {K} regions, so {name} needs {K} entries; "
                    f"got {len(w)}."
                )
        sharpness = _sharpness(tau, len(thetas))
        hard = sharpness == math.inf
        if form not in FORMS:
            raise ValueError(f"TG: form is 'softmax' or 'product'; got {form!r}.")
        if (hard or form == "product") and list(thetas) != sorted(thetas):
            raise ValueError(
                f"TG: {'hard' if hard else 'product-form'} gates need non-decreasing thresholds; "
                f"got theta={thetas}. Sort them, or use soft gates with form='softmax'."
            )
        bent = _curves(q, K)
        values = (
            sharpness,
            thetas,
            slopes,
            constants,
            "softmax" if hard or K <= 2 else form,  # the two forms agree there
            _owner(owner, thetas, hard),
            bent,
            _anchors(anchor, slopes, constants, bent, hard),
            _bounds(clamp),
        )
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def K(self) -> int:
        """Number of branches."""
        return len(self.s)

    @property
    def hard(self) -> bool:
        """Whether the gates are indicators (tau = inf)."""
        return self.tau == math.inf

    def __call__(self, x: Tensor, v: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """Evaluate the reference at `x`; `v` is what the branches read instead, see `blend`."""
        options = {f.name: getattr(self, f.name) for f in fields(self)[len(_REQUIRED) :]}
        if self.hard or v is not None:
            return blend(x, self.tau, self.theta, self.s, self.c, v=v, **options)
        # Soft gates meet 0 * inf at x = +-inf; the limit there is that of the outer branch.
        infinite = x.isinf()
        y = blend(x.masked_fill(infinite, 0), self.tau, self.theta, self.s, self.c, **options)
        s, c, q = ((w[0], w[-1]) for w in (self.s, self.c, self.q or (0.0,)))
        limit = blend(x, math.inf, (0.0,), s, c, q=q, clamp=self.clamp)
        return torch.where(infinite, limit, y)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"TG({values})".replace("inf", "float('inf')")

    def _shown(self) -> dict[str, Any]:
        """The fields that are required or not the default."""
        default = ("lo",) * len(self.theta)
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            k: v
            for k, v in shown.items()
            if k in _REQUIRED or not (v in (None, "softmax") or (k == "owner" and v == default))
        }

    def to_dict(self) -> dict[str, Any]:
        """The parameters as JSON values (tau = inf as "inf"); `TG.from_dict` is the inverse."""
        data = {k: list(v) if isinstance(v, tuple) else v for k, v in self._shown().items()}
        return {**data, "tau": "inf"} if self.hard else data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TG:
        """Rebuild an instance from `to_dict`; keys it does not know are refused."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise ValueError(
                f"TG.from_dict: unknown key {unknown[0]!r}; known: {', '.join(known)}."
            )
        if missing := [name for name in _REQUIRED if name not in data]:
            raise ValueError(f"TG.from_dict: missing key {missing[0]!r}; got {', '.join(data)}.")
        return cls(**{**data, "tau": math.inf if data["tau"] == "inf" else data["tau"]})

    def as_form(self, form: GateForm) -> TG:
        """The same function with the other gate form, in closed form: K = 3 with one tau.

        With r = exp(-tau (theta_2 - theta_1)) and p = 1 + 2r, product gates are softmax gates at
        theta' = (theta_1 - ln(p)/tau, theta_2 + ln(p)/tau) with the middle branch
        L_2' = (r L_1 + L_2 + r L_3)/p. Softmax gates reach further: they are product gates only
        if theta_2' - theta_1' >= ln(8)/tau.
        """
        if form not in FORMS:
            raise ValueError(f"TG.as_form: form is 'softmax' or 'product'; got {form!r}.")
        if form == self.form or self.hard or self.K <= 2:
            return self
        if self.K != 3 or isinstance(self.tau, tuple) or self.q is not None:
            raise ValueError(
                "TG.as_form: the closed form is for K = 3, one tau and affine branches; "
                f"this is {self!r}."
            )
        gap = self.theta[1] - self.theta[0]
        r = math.exp(-self.tau * gap)
        if form == "product":
            if r > 1 / 8:
                raise ValueError(
                    "TG.as_form: product gates cannot overlap this much, they need thresholds "
                    f"ln(8)/tau = {math.log(8) / self.tau:.6g} apart; these are {gap:.6g} apart. "
                    "Keep form='softmax'."
                )
            # the smaller root of r/(1 + 2r)^2 = r', written without a cancelling difference
            r = 2 * r / (1 - 4 * r + math.sqrt(1 - 8 * r))
        p = 1 + 2 * r
        shift = math.log(p) / self.tau
        if form == "softmax":
            theta = (self.theta[0] - shift, self.theta[1] + shift)
            middle = [(r * w[0] + w[1] + r * w[2]) / p for w in (self.s, self.c)]
        else:
            theta = (self.theta[0] + shift, self.theta[1] - shift)
            middle = [p * w[1] - r * (w[0] + w[2]) for w in (self.s, self.c)]
        s, c = ((w[0], m, w[2]) for w, m in zip((self.s, self.c), middle, strict=True))
        return TG(self.tau, theta, s, c, form=form, clamp=self.clamp)


def _numbers(name: str, w: float | Sequence[float], finite: bool = True) -> tuple[float, ...]:
    """`w` as a tuple of floats; tensors and other types are refused, they belong in a layer."""
    each = (w,) if isinstance(w, int | float) else w
    if not isinstance(each, Sequence) or isinstance(each, str):
        raise TypeError(
            f"TG: {name} is a number or a tuple of numbers; got {type(w).__name__}. "
            "Parameters per channel belong in an Activation."
        )
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in each):
        raise TypeError(f"TG: {name} is a number or a tuple of numbers; got {w!r}.")
    if finite and not all(math.isfinite(v) for v in each):
        raise ValueError(f"TG: {name} must be finite; got {w!r}.")
    return tuple(float(v) for v in each)


def _sharpness(tau: float | Sequence[float], thresholds: int) -> float | tuple[float, ...]:
    taus = _numbers("tau", tau, finite=False)
    if isinstance(tau, Sequence) and len(taus) != thresholds:
        raise ValueError(f"TG: tau is one number or one per threshold ({thresholds}); got {tau!r}.")
    if not all(t > 0 for t in taus):
        raise ValueError(f"TG: tau must be positive (inf for a hard gate); got {tau!r}.")
    if len({math.isinf(t) for t in taus}) > 1:
        raise ValueError(f"TG: every tau is inf (hard) or none is; got {tau!r}.")
    return taus[0] if len(set(taus)) == 1 else taus


def _only_hard(name: str, value: object, hard: bool) -> None:
    if value is not None and not hard:
        raise ValueError(f"TG: {name} is for hard gates (tau=inf) only; got {name}={value!r}.")


def _owner(
    owner: Sequence[str] | None, theta: tuple[float, ...], hard: bool
) -> tuple[str, ...] | None:
    _only_hard("owner", owner, hard)
    if not hard:
        return None
    owners = ("lo",) * len(theta) if owner is None else tuple(owner)
    if len(owners) != len(theta) or not set(owners) <= {"lo", "hi"}:
        raise ValueError(
            f"TG: owner is 'lo' or 'hi' for each of the {len(theta)} thresholds; got {owner!r}."
        )
    for k in range(len(theta) - 1):
        if theta[k] == theta[k + 1] and owners[k : k + 2] == ("lo", "hi"):
            raise ValueError(
                f"TG: at the equal thresholds {theta[k]} the owners 'lo', 'hi' give x == theta to "
                "two regions; use any other pair."
            )
    return owners


def _curves(q: Sequence[float] | None, K: int) -> tuple[float, ...] | None:
    if q is None:
        return None
    curves = _numbers("q", q)
    if len(curves) != K:
        raise ValueError(
            f"TG: q needs one entry for each of the K = {K} branches; got {len(curves)}."
        )
    return curves if any(curves) else None


def _anchors(
    anchor: Sequence[Sequence[float] | None] | None,
    s: tuple[float, ...],
    c: tuple[float, ...],
    q: tuple[float, ...] | None,
    hard: bool,
) -> tuple[Anchor, ...] | None:
    """Checked to lie on their branch: an anchor says how to evaluate, never what."""
    _only_hard("anchor", anchor, hard)
    if anchor is None or all(p is None for p in anchor):
        return None
    if len(anchor) != len(s):
        raise ValueError(
            f"TG: anchor needs one entry (or None) per branch, {len(s)}; got {anchor!r}."
        )
    points: list[Anchor] = []
    for k, p in enumerate(anchor):
        if p is None:
            points.append(None)
            continue
        a, y = _numbers("anchor", p)
        curve = q[k] if q else 0.0
        on_branch = curve * a * a + s[k] * a + c[k]
        size = abs(curve * a * a) + abs(s[k] * a) + abs(c[k])
        if (s[k] == 0 == curve) or abs(on_branch - y) > 1e-12 * size:
            raise ValueError(
                f"TG: anchor {k} must be a point of its (not constant) branch, which is "
                f"{on_branch:.6g} at {a:.6g}; got {p!r}."
            )
        points.append((a, y))
    return tuple(points)


def _bounds(clamp: Sequence[float] | None) -> tuple[float, float] | None:
    if clamp is None:
        return None
    bounds = _numbers("clamp", clamp)
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise ValueError(f"TG: clamp is (low, high) with low < high; got {clamp!r}.")
    return bounds[0], bounds[1]
