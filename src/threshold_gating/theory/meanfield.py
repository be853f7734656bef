"""Mean-field theory of wide random networks: trainability computed for any function.

A layer z = W phi(z') + b with W_ij ~ N(0, sigma_w^2 / width) and b_i ~ N(0, sigma_b^2) maps the
variance q of its pre-activations and the correlation c of two inputs (Schoenholz et al. 2017,
Hayou et al. 2019):

    q <- sigma_b^2 + sigma_w^2 E[phi(u)^2],  u ~ N(0, q)      chi_q = its slope at the fixed point
    c <- (sigma_b^2 + sigma_w^2 E[phi(u) phi(v)]) / q         chi_1 = its slope at c = 1
                                                                    = sigma_w^2 E[phi'(u)^2]

chi_1 is the factor by which a squared gradient grows per layer; chi_1 = 1 is the edge of chaos.
Off it 1 - c decays like exp(-l / xi) with depth l; on it 1 - c ~ beta_q / l with
beta_q = 2 E[phi'^2] / (q E[phi''^2]) for phi with a continuous slope, and like 1/l^2 for one with
corners, for which E[phi''^2] is infinite and beta_q is 0. The paper's Cor. 11 puts kappa^2 in the
place of E[phi''^2]; nothing here does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from threshold_gating.fitting.shape import curve, discontinuities
from threshold_gating.instance import TG

_DEVIATIONS = 13.0  # the normal density beyond is under 1e-37
_TERMS = 1000  # Hermite coefficients of the correlation map


@dataclass(frozen=True)
class Moments:
    """E[phi^2], E[phi'^2], E[phi''^2] for u ~ N(mean, q), and d E[phi^2] / dq as `growth`.

    Infinite where a jump puts a point mass into the derivative: `curvature` (E[phi''^2]) at a
    corner, `slope` (E[phi'^2]) at a step.
    """

    q: float
    mean: float
    value: float
    slope: float
    curvature: float
    growth: float


@dataclass(frozen=True)
class EdgeOfChaos:
    """The weights and biases that put a network of variance q at chi_1 = 1, if there are any.

    `valid` is False where sigma_b^2 would be negative (or E[phi'^2] is 0 or infinite); `beta` and
    `chi_q` are None there. chi_q > 1 says that q, though a fixed point, is not a stable one.
    """

    q: float
    sigma_w: float
    sigma_b2: float
    valid: bool
    chi_1: float
    beta: float | None
    chi_q: float | None
    moments: Moments


@dataclass(frozen=True)
class DepthScale:
    """Where a network with given weights goes and how fast: xi, in layers.

    `phase` is "ordered" (c -> 1), "chaotic" (c -> `c` < 1), "edge" (xi infinite) or "diverging"
    (the variance grows without bound; q infinite, the rest None).
    """

    q: float
    c: float | None
    chi_1: float | None
    chi_q: float | None
    xi: float | None
    phase: str


@dataclass(frozen=True)
class CorrelationMap:
    """c -> the correlation one layer later, as a power series with non-negative coefficients.

    `powers[n]` is the squared n-th Hermite coefficient of phi(sqrt(q) z); `rest` is what Parseval
    says is missing.
    """

    q: float
    sigma_w: float
    sigma_b2: float
    powers: Tensor
    rest: float

    def __call__(self, c: float) -> float:
        return (self.sigma_b2 + self.sigma_w**2 * self._sum(c)) / (
            self.sigma_b2 + self.sigma_w**2 * self._sum(1.0)
        )

    def slope(self, c: float) -> float:
        """Its derivative, chi_1 at c = 1."""
        n = torch.arange(1, len(self.powers), dtype=torch.float64)
        series = (n * self.powers[1:] * c ** (n - 1)).sum().item()
        series += 3 * _TERMS * self.rest * c ** (3 * _TERMS - 1)
        return self.sigma_w**2 * series / (self.sigma_b2 + self.sigma_w**2 * self._sum(1.0))

    def after(self, c: float, depth: int) -> list[float]:
        """The correlations at layers 0 to `depth`, from `c` on."""
        path = [c]
        for _ in range(depth):
            path.append(self(path[-1]))
        return path

    def _sum(self, c: float) -> float:
        # Behind a corner the coefficients fall like n^(-5/2); then a single power 3N has both the
        # value and the slope at c = 1 of all terms beyond N. For smooth phi nothing is missing.
        n = torch.arange(len(self.powers), dtype=torch.float64)
        return (self.powers * c**n).sum().item() + self.rest * c ** (3 * _TERMS)


def moments(f: Any, q: float, mean: float = 0.0) -> Moments:
    """E[phi^2], E[phi'^2], E[phi''^2] under N(mean, q), to about ten digits.

    Gauss-Legendre on panels that are cut where phi, phi' or phi'' jump: the same rule serves
    smooth and kinked functions, and the panels are halved until nothing moves. Around the
    thresholds of an instance they are as narrow as its gates are sharp. If something still moves
    after the last halving, a warning says so.

    >>> round(moments(torch.relu, 1.0).slope, 12)
    0.5
    """
    c = curve(f)
    cuts = discontinuities(c)
    if not q > 0:
        raise ValueError(f"moments: the variance q must be positive; got {q}.")
    settled = torch.full((4,), math.nan, dtype=torch.float64)
    places = (*(a for found in cuts for a in found), *_around_gates(f))
    steps, kinks, _ = cuts
    counts = torch.tensor([True, not steps, not (steps or kinks), True])  # the others are infinite
    for halvings in range(6):
        u, weight = gaussian_rule(q, mean, places, halvings)
        phi, slope = c(u), c(u, 1)
        integrands = torch.stack([phi**2, slope**2, c(u, 2) ** 2, (u - mean) * phi * slope / q])
        last, settled = settled, integrands @ weight
        moved = ((settled - last).abs() / (1 + settled.abs()))[counts].max().item()
        if moved <= 1e-11:
            break
    if not moved <= 1e-6:  # what is less is rounding, and no figure shows it
        warnings.warn(
            f"moments of {getattr(f, '__name__', type(f).__name__)} at q = {q:g} have not settled: "
            "it bends too sharply somewhere; give an instance (tg.TG), or take fewer digits.",
            stacklevel=2,
        )
    value, first, second, growth = settled.tolist()
    return Moments(
        q,
        mean,
        value,
        math.inf if steps else first,
        math.inf if steps or kinks else second,
        growth,
    )


def _around_gates(f: Any) -> list[float]:
    """Where the soft gates of an instance open and close, in steps of their own width."""
    if not isinstance(f, TG) or f.hard:
        return []
    taus = f.tau if isinstance(f.tau, tuple) else (f.tau,) * len(f.theta)
    widths = [side * w for w in (1, 4, 16, 64) for side in (-1, 1)]
    return [theta + w / tau for theta, tau in zip(f.theta, taus, strict=True) for w in (0, *widths)]


def edge_of_chaos(f: Any, q: float) -> EdgeOfChaos:
    """sigma_w and sigma_b^2 with fixed point q and chi_1 = 1, with a flag whether they exist.

    Sigmoid and Softplus have none at any q: their sigma_b^2 comes out negative.
    """
    m = moments(f, q)
    if not 0 < m.slope < math.inf:
        return EdgeOfChaos(q, math.nan, math.nan, False, math.nan, None, None, m)
    w2 = 1 / m.slope
    b2 = q - w2 * m.value
    b2 = 0.0 if abs(b2) < 1e-9 * q else b2  # ReLU: zero by theory, rounding by quadrature
    valid = b2 >= 0
    beta = 2 * m.slope / (q * m.curvature) if m.curvature else math.inf
    return EdgeOfChaos(
        q,
        math.sqrt(w2),
        b2,
        valid,
        w2 * m.slope,
        beta if valid else None,
        w2 * m.growth if valid else None,
        m,
    )


def correlation_map(f: Any, q: float, sigma_w: float, sigma_b2: float) -> CorrelationMap:
    """The map of the correlation of two inputs through one layer at variance q.

    By Mehler's formula E[phi(u) phi(v)] = sum_n a_n^2 c^n, a_n the Hermite coefficients of
    phi(sqrt(q) z): accurate up to c = 1, where a two-dimensional quadrature is not.
    """
    c = curve(f)
    u, weight = gaussian_rule(q, 0.0, tuple(a for found in discontinuities(c) for a in found), 1)
    z, phi = u / math.sqrt(q), c(u)
    # h_n sqrt(density) stays bounded where the polynomial h_n itself would overflow.
    half = torch.exp(-(z**2) / 4)
    scaled = phi * weight / half
    before, now = torch.zeros_like(z), half
    powers = []
    for n in range(_TERMS):
        powers.append((scaled * now).sum() ** 2)
        before, now = now, (z * now - math.sqrt(n) * before) / math.sqrt(n + 1)
    squares = torch.stack(powers)
    rest = ((phi**2) @ weight - squares.sum()).clamp(min=0).item()
    return CorrelationMap(q, sigma_w, sigma_b2, squares, rest)


def xi(f: Any, sigma_w: float, sigma_b: float, start: float = 1.0) -> DepthScale:
    """The depth scale -1/ln(slope of the correlation map at its fixed point).

    Args:
        f: the activation.
        sigma_w, sigma_b: standard deviations of sqrt(width) W and of b.
        start: the variance from which the fixed point q is approached; it matters where there
            are several or it is unstable.
    """
    c, w2, b2 = curve(f), sigma_w**2, sigma_b**2
    cuts = tuple(a for found in discontinuities(c) for a in found)
    q = start
    for _ in range(5000):
        u, weight = gaussian_rule(max(q, 1e-12), 0.0, cuts, 0)
        last, q = q, b2 + w2 * ((c(u) ** 2) @ weight).item()
        if not q < 1e12:
            return DepthScale(math.inf, None, None, None, None, "diverging")
        if abs(q - last) <= 1e-12 * q or q < 1e-12:
            break
    q = max(q, 1e-12)  # a variance that dies out: the limits at 0
    m = moments(c, q)
    chi_1, chi_q = w2 * m.slope, w2 * m.growth
    if abs(chi_1 - 1) < 1e-9:
        return DepthScale(q, 1.0, chi_1, chi_q, math.inf, "edge")
    if chi_1 < 1:
        return DepthScale(q, 1.0, chi_1, chi_q, -1 / math.log(chi_1) if chi_1 else 0.0, "ordered")
    through = correlation_map(c, q, sigma_w, b2)
    at = 0.5
    for _ in range(5000):
        last, at = at, through(at)
        if abs(at - last) < 1e-14:
            break
    slope = through.slope(at)
    return DepthScale(q, at, chi_1, chi_q, -1 / math.log(slope) if slope else 0.0, "chaotic")


def measured_correlations(
    f: Callable[[Tensor], Tensor],
    *,
    q: float,
    sigma_w: float,
    sigma_b2: float,
    c: float,
    depth: int,
    width: int = 1000,
    pairs: int = 32,
    seed: int = 0,
) -> list[tuple[float, float]]:
    """(variance, correlation) at layers 0 to `depth` of one random network, measured.

    `pairs` pairs of inputs of variance q and correlation c go through the same network; both
    figures are means over them. A width n leaves fluctuations of order sqrt(depth / n).
    """
    generator = torch.Generator().manual_seed(seed)
    x, other = torch.randn(2, pairs, width, generator=generator, dtype=torch.float64)
    x, other = x / _rms(x), other - (other * x).mean(-1, keepdim=True) * x / _rms(x) ** 2
    y = c * x + math.sqrt(1 - c**2) * other / _rms(other)
    z = math.sqrt(q) * torch.stack([x, y]).float()  # float32 rounds at 1e-7, the width at 1e-2
    path = []
    for layer in range(depth + 1):
        if layer:
            weight = torch.randn(width, width, generator=generator) * (sigma_w / math.sqrt(width))
            bias = torch.randn(width, generator=generator) * math.sqrt(sigma_b2)
            z = f(z) @ weight + bias
        together = (z[0] * z[1]).mean(-1) / (_rms(z[0]) * _rms(z[1])).squeeze(-1)
        path.append(((z**2).mean().item(), together.mean().item()))
    return path


def _rms(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True).sqrt()


@cache
def _legendre() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the 16-point rule on [-1, 1], from its Jacobi matrix (Golub-Welsch)."""
    n = torch.arange(1, 16, dtype=torch.float64)
    nodes, vectors = torch.linalg.eigh(torch.diag(n / (4 * n**2 - 1).sqrt(), -1))
    return nodes, 2 * vectors[0] ** 2


def gaussian_rule(
    q: float, mean: float = 0.0, cuts: tuple[float, ...] = (), halvings: int = 0
) -> tuple[Tensor, Tensor]:
    """Nodes and weights for N(mean, q): panels fine against both the density and a unit scale."""
    reach = _DEVIATIONS * math.sqrt(q)
    low, high = mean - reach, mean + reach
    parts = 2**halvings
    edges = torch.cat(
        [
            torch.linspace(low, high, 104 * parts + 1, dtype=torch.float64),
            torch.linspace(-16, 16, 128 * parts + 1, dtype=torch.float64),
            torch.tensor(cuts, dtype=torch.float64),
        ]
    )
    edges = edges[(edges >= low) & (edges <= high)].sort().values
    nodes, weights = _legendre()
    half = edges.diff()[:, None] / 2
    u = (edges[:-1, None] + half * (1 + nodes)).flatten()
    weight = (half * weights).flatten() * torch.exp(-((u - mean) ** 2) / (2 * q))
    return u, weight / weight.sum()
