"""Tables 2 and 3 as data: every activation as an instance, its error, its family.

`TAXONOMY[key]` is the instance, `ROWS[key]` says what it stands for, whether it is exact and, if
not, how far off it is: `sup` is the largest absolute error over the line, `rms` the root mean
square error under N(0, 1), `rel_rms` that divided by the root mean square of the function itself.
Tests measure all of them again with `measure`.

Parameters run low to high in x. The paper prints its K = 2 rows upper branch first, so those are
reversed here, in this file and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating.fitted import BY_RELATIVE, FITTED
from threshold_gating.instance import TG
from threshold_gating.primitive import Anchor

INF = math.inf
LN2 = math.log(2)


@dataclass(frozen=True)
class Row:
    """What an instance stands for and how well: errors are 0.0 where it is exact."""

    f: Callable[[Tensor], Tensor]
    exact: bool
    sup: float = 0.0
    rms: float = 0.0
    rel_rms: float = 0.0
    paper: str = ""
    note: str = ""


class Error(NamedTuple):
    """Distance of an instance to a function: sup over the line, RMS and its ratio on N(0, 1)."""

    sup: float
    rms: float
    rel_rms: float


def leaky_relu(slope: float) -> TG:
    """max(x, 0) + slope * min(x, 0); also PReLU, and RReLU in evaluation."""
    return TG(INF, 0, (slope, 1), (0, 0))


def threshold(at: float, value: float) -> TG:
    """x where x > at, else value."""
    return TG(INF, at, (0, 1), (value, 0))


def hardtanh(low: float, high: float) -> TG:
    """x between the bounds, the bound outside; torch's gradient is 0 at both bounds."""
    return TG(INF, (low, high), (0, 1, 0), (low, 0, high), owner=("lo", "hi"))


def hardshrink(width: float) -> TG:
    """x where |x| > width, else 0."""
    return TG(INF, (-width, width), (1, 0, 1), (0, 0, 0), owner=("hi", "lo"))


def softshrink(width: float) -> TG:
    """x shrunk towards 0 by width."""
    return TG(INF, (-width, width), (1, 0, 1), (width, 0, -width), owner=("hi", "lo"))


def swish(beta: float) -> TG:
    """x sigmoid(beta x); beta = 1 is SiLU, 1.702 quick_gelu and the paper's GELU."""
    return TG(beta, 0, (0, 1), (0, 0))


def affine(
    t: TG,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 0.0,
    delta: float = 0.0,
    eps: float = 0.0,
) -> TG:
    """The instance of alpha * t(beta x + gamma) + delta x + eps, exactly.

    The family is closed under affine maps before and after it, which gives Swish_beta,
    Softplus_beta, LogSigmoid(x) = -Softplus(-x), CELU_a(x) = a ELU(x/a) and the folding of a
    BatchNorm into the gate without another fit. A negative beta reverses the branches.
    """
    if beta == 0 or t.clamp is not None:
        raise ValueError(
            "affine: needs beta != 0 (else the result is a constant) and an instance without clamp "
            f"(its K = 3 twin has none); got beta={beta}, clamp={t.clamp}."
        )
    q = t.q or (0.0,) * t.K
    branches = [
        (
            alpha * qk * beta**2,
            alpha * beta * (sk + 2 * qk * gamma) + delta,
            alpha * (qk * gamma**2 + sk * gamma + ck) + eps,
        )
        for qk, sk, ck in zip(q, t.s, t.c, strict=True)
    ]
    theta = [(th - gamma) / beta for th in t.theta]
    anchored = zip(t.anchor or (None,) * t.K, branches, strict=True)
    anchors = [p and _moved(p, branch, gamma, beta) for p, branch in anchored]
    taus = [tau * abs(beta) for tau in (t.tau if isinstance(t.tau, tuple) else (t.tau,))]
    owner = t.owner
    if beta < 0:
        branches, theta, taus, anchors = branches[::-1], theta[::-1], taus[::-1], anchors[::-1]
        owner = owner and tuple("hi" if o == "lo" else "lo" for o in reversed(owner))
    q, s, c = zip(*branches, strict=True)
    options: Any = {"form": t.form, "owner": owner, "q": q, "anchor": anchors if t.hard else None}
    return TG(taus if len(taus) > 1 else taus[0], theta, s, c, **options)


def _moved(
    p: tuple[float, float], branch: tuple[float, float, float], gamma: float, beta: float
) -> Anchor:
    """An anchor after an affine map; none on a branch that the map made constant."""
    q, s, c = branch
    a = (p[0] - gamma) / beta
    return None if q == s == 0 else (a, (q * a + s) * a + c)


def softplus(beta: float) -> TG:
    """log(1 + exp(beta x)) / beta."""
    return affine(TAXONOMY["softplus"], alpha=1 / beta, beta=beta)


# Far above its inputs a gate is an exponential: g(x - far) = e^-far e^x (1 - e^(x - far) + ...). So
# a branch of constant height e^far behind it is e^x, off by e^(2x - far): 6e-7 at 13. Further out
# the rounding of x - far in float32 would be the larger error.
_FAR = 13.0
# The switch to the line at 0. Where f' jumps there it is nearly hard, and lies beyond 0 by so much
# that 0 itself is on the lower side, whose slope torch has there. Elsewhere it is blunter, because
# it magnifies the rounding of the branches in the gradient near 0.
_SMOOTH, _SHARP, _BEYOND = 2.0**14, 2.0**22, 16.0


def elu(alpha: float, scale: float = 1.0) -> TG:
    """scale (max(x, 0) + alpha min(exp(x) - 1, 0)); SELU is one.

    Three branches: -1, the exponential, and x from 0 on. The second threshold lies below 0 by as
    much as the first gate takes away, so that the upper branch takes over at 0.
    """
    sharp, beyond = (_SMOOTH, 0.0) if alpha == 1 else (_SHARP, _BEYOND)
    theta = (_FAR, (beyond - _FAR) / sharp)
    rising = alpha * math.exp(_FAR)
    return TG((1, sharp), theta, (0, 0, scale), (-scale * alpha, scale * rising, 0))


def celu(alpha: float) -> TG:
    """max(x, 0) + min(alpha (exp(x / alpha) - 1), 0)."""
    return affine(elu(1.0), alpha=alpha, beta=1 / alpha)


def family(t: Any, tol: float = 0.0) -> Any:
    """What the branches do (Table 3), read off (s, c): of an instance, or of each group of a layer.

    "constant" if no branch carries the input forward (all |s_k| <= tol: Sigmoid, Tanh),
    "saturating" if some do but the outer ones do not, or a clamp bounds the output (Hardtanh,
    ReLU6), else "multiplicative" (ReLU, SiLU, GELU). A layer with one set of parameters gives
    one word, one with parameters per channel a list of them.
    """
    if not isinstance(t, TG):
        words = [family(each, tol) for each in t.instances()]
        return words[0] if len(words) == 1 else words
    slopes = [max(abs(s), abs(q)) for s, q in zip(t.s, t.q or (0.0,) * t.K, strict=True)]
    if max(slopes) <= tol:
        return "constant"
    saturates = t.clamp is not None or max(slopes[0], slopes[-1]) <= tol
    return "saturating" if saturates else "multiplicative"


def measure(t: TG, f: Callable[[Tensor], Tensor]) -> Error:
    """Errors of `t` against `f`, in float64.

    The line is a grid of step 5e-4 on [-60, 60] and 2,000 points beyond, to +-1e4, where both are
    affine to rounding, and where a gate opens, however sharp it is. RMS by the trapezoid rule on
    [-12, 12].
    """
    x = torch.linspace(-60, 60, 240_001, dtype=torch.float64)
    far = torch.logspace(math.log10(60), 4, 1000, dtype=torch.float64)
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,) * len(t.theta)
    steps = torch.linspace(-40, 40, 2001, dtype=torch.float64)
    soft = [at + steps / tau for tau, at in zip(taus, t.theta, strict=True) if tau < INF]
    sup = max((t(z) - f(z)).abs().max().item() for z in (x, far, -far, *soft))
    x = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
    weight = torch.exp(-(x**2) / 2)
    weight = weight / weight.sum()
    rms, size = ((weight * z**2).sum().sqrt().item() for z in (t(x) - f(x), f(x)))
    return Error(sup, rms, rms / size if size else (math.inf if rms else 0.0))


# What torch, transformers and timm call a row. Tests compare each with their function of that name.
ALIASES = {
    "swish": "silu",
    "linear": "identity",
    "relu2": "relu_squared",
    "gelu_python": "gelu",
    **dict.fromkeys(
        (
            *("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
            *("new_gelu", "fast_gelu", "accurate_gelu"),  # as their classes are called
        ),
        "gelu_tanh",
    ),
}
# Names of theirs that no row is, and what would do.
NO_ROWS = {
    "gelu_10": "it cuts GELU off at 10, 'gelu' does not.",
    "clipped_gelu": "it cuts GELU off, 'gelu' does not.",
    "laplace": "affine(TAXONOMY['erf'], alpha=0.5, beta=2.506624, gamma=-1.772454, eps=0.5) is it "
    "as near as 'erf' is.",
    "hard_mish": "TG(float('inf'), (-2, 0), (0, 1, 1), (0, 0, 0), q=(0, 0.5, 0)) is it.",
    "xielu": "its shape is learned; `tg.fit` fits the function that was learned.",
    "sqrtsoftplus": "it grows like the root of x, so no finite K follows it over the line; "
    "`tg.fit` takes an interval.",
    "softmax": "it is not element-wise; `tg.softmax` is it by gates.",
    "glu": "it takes two inputs; TAXONOMY['silu'](b, a) is it by gates.",
}


def key_of(name: str) -> str:
    """The key that `name` means ("ReLU", "nn.LeakyReLU", "gelu_new"), or an error with the nearest.

    Names of torch, transformers and timm are taken where they mean a row: "swish" is "silu".
    """
    asked = _bare(name).removesuffix("activation")
    known = {_bare(each): key for each, key in {**{k: k for k in TAXONOMY}, **ALIASES}.items()}
    if asked in known:
        return known[asked]
    for each, why in (*NOT_REPRESENTABLE.items(), *NO_ROWS.items()):
        if asked == _bare(each):
            raise ValueError(f"{name!r} has no instance: {why}")
    # Whole activations first; variants such as gelu_k3 only where none of those is near.
    near = get_close_matches(asked, [each for each, key in known.items() if key not in FITTED])
    near = near or get_close_matches(asked, known, cutoff=0.4)
    keys = dict.fromkeys(known[each] for each in near)
    hint = f"did you mean {', '.join(map(repr, keys))}?" if keys else "`tg table --all` lists them."
    raise ValueError(f"no activation {name!r} in the taxonomy; {hint}")


def _bare(name: str) -> str:
    """A name without case, modules before it, brackets behind it, and what is between its parts."""
    last = re.sub(r"^([a-z_]\w*\.)+(?=\w+(\(\))?$)", "", name.strip().lower())
    return re.sub(r"(?<=\w)[\s_-]+(?=\w)", "", last.removesuffix("()").removesuffix("_"))


def name_of(t: TG) -> str | None:
    """The key whose parameters are those of `t`, or None."""
    return next((key for key, known in TAXONOMY.items() if known == t), None)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_gelu_tanh = partial(F.gelu, approximate="tanh")
_softplus = partial(F.softplus, threshold=50)  # torch's default switches to x at 20, off by 2e-9
_SELU = (1.6732632423543772, 1.0507009873554805)  # torch's alpha and scale
_VACUOUS = "equal branches: the clamp is the nonlinearity, the gate does nothing"
_OUTER = ("lo", "hi")

# (instance, function, what the paper says of it, note)
_EXACT: dict[str, tuple[TG, Callable[[Tensor], Tensor], str, str]] = {
    "identity": (TG(INF, (), 1, 0), torch.clone, "", "K = 1, no gate"),
    "relu": (leaky_relu(0), F.relu, "exact", ""),
    "leaky_relu": (leaky_relu(0.01), F.leaky_relu, "exact", ""),
    "prelu": (leaky_relu(0.25), lambda x: F.leaky_relu(x, 0.25), "", "at torch's initial slope"),
    "rrelu": (leaky_relu(11 / 48), F.rrelu, "", "in evaluation"),
    "abs": (leaky_relu(-1), torch.abs, "", "torch's gradient at 0 is 0, the low branch's is -1"),
    "threshold": (threshold(0.1, 20), lambda x: F.threshold(x, 0.1, 20), "", "at (0.1, 20)"),
    "silu": (swish(1), F.silu, "exact", ""),
    "quick_gelu": (swish(1.702), _quick_gelu, "", ""),
    "sigmoid": (TG(1, 0, (0, 0), (0, 1)), torch.sigmoid, "exact", ""),
    "tanh": (TG(2, 0, (0, 0), (-1, 1)), torch.tanh, "exact", ""),
    "lecun_tanh": (
        TG(4 / 3, 0, (0, 0), (-1.7159, 1.7159)),
        lambda x: 1.7159 * torch.tanh(2 / 3 * x),
        "",
        "",
    ),
    "tanhshrink": (TG(2, 0, (1, 1), (1, -1)), F.tanhshrink, "", ""),
    "lisht": (TG(2, 0, (-1, 1), (0, 0)), lambda x: x * torch.tanh(x), "", ""),
    "hardtanh": (hardtanh(-1, 1), F.hardtanh, "exact", ""),
    "hardtanh_clamp": (TG(INF, 0, (1, 1), (0, 0), clamp=(-1, 1)), F.hardtanh, "exact", _VACUOUS),
    "hardsigmoid": (
        TG(INF, (-3, 3), (0, 1 / 6, 0), (0, 1 / 2, 1), owner=_OUTER, anchor=(None, (-3, 0), None)),
        F.hardsigmoid,
        "exact",
        "",
    ),
    "hardsigmoid_clamp": (
        TG(INF, 0, (1 / 6,) * 2, (1 / 2,) * 2, anchor=((-3, 0),) * 2, clamp=(0, 1)),
        F.hardsigmoid,
        "exact",
        _VACUOUS,
    ),
    "relu6": (hardtanh(0, 6), F.relu6, "exact", ""),
    "relu6_clamp": (TG(INF, 0, (1, 1), (0, 0), clamp=(0, 6)), F.relu6, "exact", _VACUOUS),
    "hardshrink": (hardshrink(0.5), F.hardshrink, "", ""),
    "softshrink": (softshrink(0.5), F.softshrink, "", ""),
    "hardswish": (
        TG(
            INF,
            (-3, 3),
            (0, 1 / 2, 1),
            (0, 0, 0),
            q=(0, 1 / 6, 0),
            owner=_OUTER,
            anchor=(None, (-3, 0), None),
        ),
        F.hardswish,
        "",
        "with a quadratic branch",
    ),
    "relu_squared": (
        TG(INF, 0, (0, 0), (0, 0), q=(0, 1)),
        lambda x: F.relu(x) ** 2,
        "",
        "with a quadratic branch",
    ),
    "star_relu": (
        TG(INF, 0, (0, 0), (-0.4472, -0.4472), q=(0, 0.8944)),
        lambda x: 0.8944 * F.relu(x) ** 2 - 0.4472,
        "",
        "with a quadratic branch",
    ),
    "mish": (
        TG(1, (0, LN2), (0, 1, 1), (0, 0, 0)),
        F.mish,
        "approximate",
        "exact: tanh(softplus(x)) is a ratio of quadratics in exp(x)",
    ),
    "smish": (
        TG(1, (-math.log(3), math.log(1.2)), (0, 1 / 3, 3 / 5), (0, 0, 0)),
        lambda x: x * torch.tanh(torch.log1p(torch.sigmoid(x))),
        "",
        "",
    ),
    "dsilu": (
        TG(1, (-LN2, LN2), (0, 1 / 2, 0), (0, 1 / 2, 1)),
        lambda x: torch.sigmoid(x) * (1 + x * torch.sigmoid(-x)),
        "",
        "the derivative of SiLU",
    ),
    "sigmoid_squared": (
        TG(1, (-LN2, LN2), (0, 0, 0), (0, 0, 1)),
        lambda x: torch.sigmoid(x) ** 2,
        "",
        "",
    ),
    "x_sigmoid_squared": (
        TG(1, (-LN2, LN2), (0, 0, 1), (0, 0, 0)),
        lambda x: x * torch.sigmoid(x) ** 2,
        "",
        "",
    ),
    "dsigmoid": (
        TG(1, (-LN2, LN2), (0, 0, 0), (0, 1 / 2, 0)),
        lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
        "",
        "the derivative of Sigmoid",
    ),
    "dtanh": (
        TG(2, (-LN2 / 2, LN2 / 2), (0, 0, 0), (0, 2, 0)),
        lambda x: 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x),
        "",
        "the derivative of Tanh",
    ),
}

_TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "softplus": _softplus,
    "hardswish": F.hardswish,
    "erf": torch.erf,
    "softsign": F.softsign,
}

# The bare name of an activation that is only approximate means its best row.
_BEST = {
    "gelu": "gelu_k5",
    "gelu_tanh": "gelu_tanh_k5",
    "softplus": "softplus_k4",
    "erf": "erf_k5",
    "softsign": "softsign_k8",
}

NOT_REPRESENTABLE = {
    "snake": "x + sin(x)^2 has no slope at infinity, so no finite K follows it over the line.",
    "sin": "it has no slope at infinity, so no finite K follows it over the line.",
}

# Made by `elu`, with errors as in `_fitted`.
_OFF = {"elu": (5.65e-07, 3.16e-07, 3.93e-07), "selu": (2.1e-06, 5.55e-07, 5.55e-07)}
_EXPONENTIAL: dict[str, tuple[TG, Callable[[Tensor], Tensor], tuple[float, float, float], str]] = {
    **{key: (elu(1.0), F.elu, _OFF["elu"], "elu(alpha) makes others") for key in ("elu", "elu_k3")},
    "celu": (celu(1.0), F.celu, _OFF["elu"], "celu(alpha) makes others"),
    **{key: (elu(*_SELU), F.selu, _OFF["selu"], "") for key in ("selu", "selu_k3")},
}

# Table 2 in the paper's order; gelu_k3 stands where the paper has a calibrated row.
TABLE2 = (
    *("relu", "leaky_relu", "silu", "gelu_paper", "gelu_k3", "sigmoid", "tanh"),
    *("hardtanh", "hardtanh_clamp", "hardsigmoid", "hardsigmoid_clamp", "relu6", "relu6_clamp"),
)


def _rows() -> Iterator[tuple[str, TG, Row]]:
    for key, (t, f, paper, note) in _EXACT.items():
        yield key, t, Row(f, True, paper=paper, note=note)
    fitted = {**FITTED, **BY_RELATIVE}
    for key, name in _BEST.items():
        fit = fitted[name]
        yield key, fit.t, Row(_TARGETS[fit.of], False, *fit.error, note=f"same as {name}")
    soft = fitted[_BEST["softplus"]]  # N(0, 1) is symmetric, so the errors are the same
    mirrored = affine(soft.t, alpha=-1, beta=-1)
    yield "logsigmoid", mirrored, Row(F.logsigmoid, False, *soft.error, note="-softplus(-x)")
    for key, (t, f, error, note) in _EXPONENTIAL.items():
        yield key, t, Row(f, False, *error, note=note)
    for key, fit in fitted.items():
        yield key, fit.t, Row(_TARGETS[fit.of], False, *fit.error, fit.paper, fit.note)


_ALL = {key: (t, row) for key, t, row in _rows()}
TAXONOMY: dict[str, TG] = {key: t for key, (t, _) in _ALL.items()}
ROWS: dict[str, Row] = {key: row for key, (_, row) in _ALL.items()}
