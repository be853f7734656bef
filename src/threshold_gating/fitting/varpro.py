"""Least squares by variable projection: Levenberg-Marquardt on tau and theta, s and c solved.

For given gates the primitive (Eq. 3) is linear in its free slopes and intercepts, so these are the
solution of a linear least-squares problem and only log(tau) and theta are searched. The Jacobian of
what is left is Kaufman's: the derivative at fixed s and c, projected off the columns of that linear
problem. Every start runs at once, along the first axis S of each array.

Derivatives of the primitive, with D_k = L_k - y and u_m = tau_m (x - theta_m): for softmax gates
dy/du_m = sum_{k > m} g_k D_k, for product gates sigma(-u_m) g_{m+1} D_{m+1} - sigma(u_m) g_m D_m.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from threshold_gating.primitive import GateForm

Array = NDArray[np.float64]

# In units of the function's own width and height (see `scaled`). Unordered fits of ELU and Softplus
# would go on for ever with s and c; there the bound decides.
MAX_TAU, MIN_TAU, MAX_THETA, MAX_COEFFICIENT = 100.0, 0.02, 16.0, 32.0
_RIDGE = 1e-9  # keeps the linear problem solvable where two gates coincide; far below any error


@dataclass(frozen=True)
class Problem:
    """What is fitted and what is free: y(x) with weights, and s, c with NaN where they are free.

    `zero` is a point (x, y) the fit must pass through. `pin` replaces the threshold of K = 2:
    tau (zero.x - theta) = pin, which is that condition when no coefficient is free.
    """

    x: Array
    y: Array
    weight: Array
    K: int
    form: GateForm
    own_tau: bool
    ordered: bool
    s: Array
    c: Array
    zero: tuple[float, float] | None = None
    pin: float | None = None

    @property
    def free(self) -> NDArray[np.bool_]:
        """Which of (s_1 .. s_K, c_1 .. c_K) are free."""
        free: NDArray[np.bool_] = np.isnan(np.concatenate([self.s, self.c]))
        return free

    def bounds(self) -> tuple[Array, Array]:
        """Lower and upper bounds of the nonlinear parameters (log tau, theta_1, gaps)."""
        taus, gaps = self.K - 1 if self.own_tau else 1, self.K - 2
        ends = [] if self.pin is not None else [MAX_THETA]
        low = [np.log(MIN_TAU)] * taus + [-v for v in ends]
        low += [0.0 if self.ordered else -MAX_THETA] * gaps
        high = [np.log(MAX_TAU)] * taus + ends + [MAX_THETA] * gaps
        return np.array(low), np.array(high)

    def pack(self, tau: Array, theta: Array) -> Array:
        """(tau, theta), each (S, J), as nonlinear parameters within the bounds."""
        q = np.log(tau if self.own_tau else tau[:, :1])
        if self.pin is None:
            q = np.concatenate([q, theta[:, :1], np.diff(theta, axis=1)], 1)
        low, high = self.bounds()
        return np.clip(q, low, high)

    def unpack(self, q: Array) -> tuple[Array, Array]:
        """Nonlinear parameters (S, P) as tau and theta, each (S, J)."""
        J = self.K - 1
        taus = J if self.own_tau else 1
        tau = np.exp(np.broadcast_to(q[:, :taus], (len(q), J)))
        if self.pin is not None:
            assert self.zero is not None
            return tau, self.zero[0] - self.pin / tau
        return tau, np.cumsum(q[:, taus:], axis=1)


class State(NamedTuple):
    """Where S runs stand: parameters, full (s, c), residual on the grid and mean square."""

    q: Array  # (S, P)
    coef: Array  # (S, 2K)
    r: Array  # (S, N)
    cost: Array  # (S,)
    jacobian: Array  # (S, P, N)


def gates(x: Array, tau: Array, theta: Array, form: GateForm) -> tuple[Array, Array]:
    """Gates (S, K, N) and their arguments u (S, J, N), as `primitive.gates` defines them."""
    u = tau[:, :, None] * (x - theta[:, :, None])
    logits = np.zeros((len(u), u.shape[1] + 1, len(x)))
    if form == "softmax" or u.shape[1] == 1:
        logits[:, 1:] = u
        _add_up(logits)
    else:
        below, above = -np.logaddexp(0, u), -np.logaddexp(0, -u)
        logits[:, :-1] += below
        logits[:, 1:] += above
    logits -= logits.max(1, keepdims=True)
    g = np.exp(logits, out=logits)
    g /= g.sum(1, keepdims=True)
    return g, u


def evaluate(x: Array, tau: Array, theta: Array, coef: Array, form: GateForm) -> Array:
    """y (S, N) of instances given by tau, theta (S, J) and (s, c) (S, 2K)."""
    return _blend(x, gates(x, tau, theta, form)[0], coef)


def _blend(x: Array, g: Array, coef: Array) -> Array:
    K = g.shape[1]
    slope, constant = (np.einsum("skn,sk->sn", g, w) for w in (coef[:, :K], coef[:, K:]))
    y: Array = slope * x + constant
    return y


class _Gated(NamedTuple):
    """Gates at some points: what is computed once for given q, whatever s and c are."""

    tau: Array  # (S, J)
    g: Array  # (S, K, N)
    u: Array  # (S, J, N)


def derivatives(problem: Problem, x: Array, q: Array, coef: Array) -> tuple[Array, Array, Array]:
    """y (S, N), dy/dq (S, P, N) and dy/d(s, c) (S, 2K, N)."""
    at = _gated(problem, x, q)
    return *_outputs(problem, x, at, coef), np.concatenate([at.g * x, at.g], 1)


def _gated(problem: Problem, x: Array, q: Array) -> _Gated:
    tau, theta = problem.unpack(q)
    return _Gated(tau, *gates(x, tau, theta, problem.form))


def _outputs(problem: Problem, x: Array, at: _Gated, coef: Array) -> tuple[Array, Array]:
    """y (S, N) and dy/dq (S, P, N)."""
    K = problem.K
    part = coef[:, :K, None] * x + coef[:, K:, None]
    part *= at.g
    y = part.sum(1)
    part -= at.g * y[:, None]  # g_k D_k
    if problem.form == "softmax" or K == 2:
        by_u = part[:, 1:]
        _add_up(by_u[:, ::-1])
    else:
        a = 1 / (1 + np.exp(-np.clip(at.u, -700, 700)))
        by_u = (1 - a) * part[:, 1:] - a * part[:, :-1]
    return y, _by_parameters(problem, by_u, at.u, at.tau)


def _add_up(a: Array) -> None:
    """Running sums over the second axis, in place; numpy's own take a step of it at a time."""
    for k in range(1, a.shape[1]):
        a[:, k] += a[:, k - 1]


def _by_parameters(problem: Problem, by_u: Array, u: Array, tau: Array) -> Array:
    """dy/dq from dy/du: u_m = tau_m (x - theta_m), theta the running sum of theta_1 and gaps."""
    by_log_tau = by_u * (u if problem.pin is None else u - problem.pin)
    if not problem.own_tau:
        by_log_tau = by_log_tau.sum(1, keepdims=True)
    if problem.pin is not None:
        return by_log_tau
    by_gaps = -tau[:, :, None] * by_u
    _add_up(by_gaps[:, ::-1])
    return np.concatenate([by_log_tau, by_gaps], 1)


def _project(problem: Problem, q: Array) -> State:
    """Solve for the free s and c, and project the Jacobian off their columns."""
    free, fixed = problem.free, np.nan_to_num(np.concatenate([problem.s, problem.c]))
    n = len(problem.x)
    coef = np.broadcast_to(fixed, (len(q), len(fixed))).copy()
    point = [] if problem.zero is None else [problem.zero[0]]
    x = np.append(problem.x, point)
    at = _gated(problem, x, q)
    if free.any():
        s, c = free[: problem.K], free[problem.K :]
        columns = np.concatenate([at.g[:, s] * x, at.g[:, c]], 1)
        coef[:, free], basis, back = _linear(problem, _blend(x, at.g, coef), columns)
    y, by_q = _outputs(problem, x, at, coef)
    weight = problem.weight[..., None, :]
    r = (y[:, :n] - problem.y) * problem.weight
    if not free.any():
        return State(q, coef, r, (r**2).sum(1), by_q[..., :n] * weight)
    if problem.zero is not None:  # moving q, the coefficients follow so that the point stays
        by_q = by_q - by_q[..., n:] * back[:, None]
    jacobian = by_q[..., :n] * weight
    jacobian = jacobian - (jacobian @ basis) @ basis.swapaxes(1, 2)
    cost = (r**2).sum(1)
    cost[~(np.abs(coef).max(1) <= MAX_COEFFICIENT)] = np.inf
    return State(q, coef, r, cost, jacobian)


def _linear(problem: Problem, y: Array, columns: Array) -> tuple[Array, Array, Array]:
    """Free coefficients (S, M), an orthonormal basis (S, N, M') of what they span, and `back`.

    The condition a . coef = b at `zero` is taken by a reflection that maps a to the first axis:
    that coordinate is set, the others are free. `back` (S, N + 1) is what the output does when
    the value at `zero` is moved along a.
    """
    n, m = len(problem.x), columns.shape[1]
    matrix = (columns[..., :n] * problem.weight[..., None, :]).swapaxes(1, 2)  # (S, N, M)
    target = (problem.y - y[:, :n]) * problem.weight
    back = np.zeros((len(y), y.shape[1]))
    if problem.zero is None:
        reflect = np.broadcast_to(np.eye(m), (len(y), m, m))
        first: Array = np.zeros((len(y), 0))
    else:
        a = columns[..., n]  # (S, M)
        size = np.linalg.norm(a, axis=1, keepdims=True) + 1e-300
        v = a.copy()
        v[:, :1] += np.where(a[:, :1] < 0, -size, size)
        reflect = np.eye(m) - 2 * v[:, :, None] * v[:, None] / (v**2).sum(1)[:, None, None]
        first = (problem.zero[1] - y[:, n:]) / np.where(a[:, :1] < 0, size, -size)
        back = np.einsum("smn,sm->sn", columns, a / size**2)
        matrix = matrix @ reflect
        target = target - (matrix[..., :1] @ first[:, :, None])[..., 0]
        matrix = matrix[..., 1:]
    left = matrix.shape[2]
    ridge = np.broadcast_to(_RIDGE * np.eye(left), (len(y), left, left))
    basis, upper = np.linalg.qr(np.concatenate([matrix, ridge], 1))
    basis = basis[:, :n]
    rest = np.linalg.solve(upper, basis.swapaxes(1, 2) @ target[:, :, None])[..., 0]
    coef = (reflect @ np.concatenate([first, rest], 1)[:, :, None])[..., 0]
    return coef, basis, back


@np.errstate(all="ignore")  # a start that overflows has cost inf and is never taken
def levenberg_marquardt(problem: Problem, q: Array, iterations: int) -> State:
    """Descend from each start (S, P) within the bounds; the cost never rises."""
    low, high = problem.bounds()
    state = _project(problem, np.clip(q, low, high))
    damping = np.full(len(q), 1e-3)
    for _ in range(iterations):
        trial = _project(problem, np.clip(state.q + _step(state, damping, low, high), low, high))
        better = trial.cost < state.cost
        still = better & (trial.cost > (1 - 1e-7) * state.cost)
        damping = np.clip(np.where(better, damping / 5, damping * 4), 1e-12, 1e8)
        state = _where(better, trial, state)
        if np.all(still | (damping >= 1e8)):
            break
    return state


def _step(state: State, damping: Array, low: Array, high: Array) -> Array:
    """The damped Gauss-Newton step (S, P); a parameter at its bound that would leave it stays."""
    J = state.jacobian
    gradient = (J @ state.r[:, :, None])[..., 0]
    held = ((state.q <= low) & (gradient > 0)) | ((state.q >= high) & (gradient < 0))
    hessian = np.where(held[:, :, None] | held[:, None], 0.0, J @ J.swapaxes(1, 2))
    diagonal = np.einsum("spp->sp", hessian)
    added = diagonal * damping[:, None] + 1e-14 * diagonal.max(1, keepdims=True) + 1e-300
    hessian += np.eye(len(low)) * np.where(held, 1.0, added)[:, :, None]
    step = np.linalg.solve(hessian, np.where(held, 0.0, -gradient)[:, :, None])[..., 0]
    return np.clip(step, -2.0, 2.0)


def least_squares(problem: Problem, q: Array) -> State:
    """Ten distinct local minima at most, best first, from the starts (S, P).

    A few steps show which starts are worth more.
    """
    state = _distinct(levenberg_marquardt(problem, q, 12), max(12, len(q) // 2))
    state = _distinct(levenberg_marquardt(problem, state.q, 30), 10)
    return _distinct(levenberg_marquardt(problem, state.q, 60), 10)


def levelled(problem: Problem, q: Array, rounds: int = 12) -> State:
    """From each start (S, P) towards the least largest error, by Lawson's weights; the best seen.

    Each round multiplies the weights by the errors and takes a few steps of least squares. That
    is slow to end but ranks starts well, and all of them go at once.
    """
    best = levenberg_marquardt(problem, q, 0)
    least = _largest(problem, best)
    flat = replace(problem, weight=np.full(best.r.shape, len(problem.x) ** -0.5))
    state = best._replace(r=best.r / problem.weight * flat.weight)
    for _ in range(rounds):
        e = np.abs(state.r / flat.weight) + 1e-300
        square = flat.weight**2 * (e / e.max(1, keepdims=True) + 1e-3)
        flat = replace(flat, weight=np.sqrt(square / square.sum(1, keepdims=True)))
        state = levenberg_marquardt(flat, state.q, 3)
        largest = _largest(flat, state)
        best, least = _where(largest < least, state, best), np.fmin(largest, least)
    return best._replace(cost=least)


def _largest(problem: Problem, state: State) -> Array:
    return np.where(np.isfinite(state.cost), np.abs(state.r / problem.weight).max(1), np.inf)


def _where(which: NDArray[np.bool_], a: State, b: State) -> State:
    """The runs of `a` where `which`, else those of `b`."""
    pairs = zip(a, b, strict=True)
    return State(*(np.where(which.reshape(-1, *[1] * (x.ndim - 1)), x, y) for x, y in pairs))


def starts(problem: Problem, n: int, rng: np.random.Generator) -> Array:
    """`n` starts (S, P) in units of the function's width, besides those that its shape suggests.

    Symmetric about its centre, with thresholds where it bends, and random ones: half of them near,
    half spread over scales, as tails like 1/x want them.
    """
    J = problem.K - 1
    spread = np.linspace(-1, 1, J) if J > 1 else np.zeros(1)
    pairs = ((1.4, 1.0), (2.8, 1.0), (6.0, 0.5), (1.4, 2.0), (1.4, 0.3), (0.7, 1.0), (2.8, 0.3))
    made = [(np.full(J, tau), width * spread) for tau, width in pairs[: max(1, n // 2)]]
    if not problem.ordered:  # downwards, as the best fits of Softplus and log cosh have them
        made += [(tau, -theta) for tau, theta in made[:4]]
    bends = _bends(problem)
    gaps = np.gradient(bends) if J > 1 else np.ones(1)
    made += [(sharp / np.maximum(gaps, 0.05), bends) for sharp in (2.0, 5.0)]
    rest = max(2, n - len(pairs))
    wide = np.where(np.arange(rest) % 2, 2.0, 1.0)[:, None]
    tau = np.exp(rng.normal(0.6, 0.8, (rest, J)) * wide)
    theta = rng.normal(0.0, 1.3, (rest, J)) * wide
    tau = np.concatenate([np.array([t for t, _ in made]), tau])
    theta = np.concatenate([np.array([th for _, th in made]), theta])
    if problem.ordered:
        theta = np.sort(theta, 1)
    if not problem.own_tau:
        tau = np.exp(np.log(tau).mean(1, keepdims=True))
    return problem.pack(tau, theta)


def _bends(problem: Problem) -> Array:
    """K - 1 places that share out the root of the function's curvature, as the best knots do."""
    J = problem.K - 1
    x, first = np.unique(problem.x, return_index=True)
    if len(x) < 3:
        return np.zeros(J)
    slope = np.diff(problem.y[first]) / np.diff(x)
    middle = (x[1:] + x[:-1]) / 2
    share = np.append(0.0, np.cumsum(np.sqrt(np.abs(np.diff(slope)) * np.diff(middle))))
    places: Array = np.interp((np.arange(J) + 0.5) / J * share[-1], share, middle)
    return places


def _distinct(state: State, n: int) -> State:
    """The best `n` runs, one of those whose cost agrees to 1 in 1000."""
    kept: list[int] = []
    for i in np.argsort(state.cost):
        same = kept and state.cost[i] <= 1.001 * state.cost[kept[-1]] + 1e-30
        if not same and len(kept) < n and (not kept or np.isfinite(state.cost[i])):
            kept.append(int(i))
    return State(*(a[kept] for a in state))
