"""Calls of torch that are nonlinearities, and how each is read.

A call such as `F.leaky_relu(x, 0.2)` or `x.sigmoid_()` has a kind ("leaky_relu"), an input and
parameters; `KINDS` says which instance that is. `FUNCTIONS` has every spelling torch offers, in
place or not. What is not one element-wise function (softmax, attention, GLU, PReLU, LSTM) is
evaluated as a whole by `WHOLE`.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating import kernels, taxonomy
from threshold_gating.instance import TG
from threshold_gating.nn import attention, rnn
from threshold_gating.taxonomy import TAXONOMY

AUDITED_AS = "native"  # see conversion.audit

Function = Callable[..., Any]


class Call(NamedTuple):
    """A call of torch as read: its input, its parameters, whether it overwrites the input."""

    x: Tensor
    parameters: tuple[Any, ...]
    inplace: bool = False


class Elementwise(NamedTuple):
    """How to read a call, and the instance that its parameters make."""

    read: Callable[..., Call]
    make: Callable[..., TG]


class Recognised(NamedTuple):
    """An element-wise function and the instance that stands for it."""

    t: TG
    exact: bool
    sup: float


def _with(make: Callable[..., TG], **defaults: float) -> Elementwise:
    """A kind whose call takes numbers and `inplace` after the input, by position or by name."""
    names = [*defaults, "inplace"]

    def read(input: Tensor, *given: Any, **named: Any) -> Call:
        values = {**defaults, **dict(zip(names, given, strict=False)), **named}
        inplace = bool(values.pop("inplace", False))
        return Call(input, tuple(float(values[name]) for name in defaults), inplace)

    return Elementwise(read, make)


def _gelu(approximate: str) -> TG:
    return TAXONOMY["gelu" if approximate == "none" else "gelu_tanh"]


def _softplus(beta: float, threshold: float) -> TG:
    """torch goes over to x where beta x > threshold: a jump, which no smooth gate has. That of the
    default, 2e-9, is far below the error of the instance."""
    jump = math.log1p(math.exp(-max(threshold, -700.0)))
    if not jump <= taxonomy.ROWS["softplus"].sup:
        raise ValueError(f"softplus jumps by {jump / abs(beta):.2g} at x = {threshold / beta:g}")
    return taxonomy.softplus(beta)


def _rrelu(lower: float, upper: float, training: float) -> TG:
    return taxonomy.leaky_relu((lower + upper) / 2)


def _bounded(low: float | None, high: float | None, owner: tuple[str, str]) -> TG:
    """x between two bounds, of which any may be missing; of crossed ones torch gives the upper."""
    below = [low] if low is not None and low != -math.inf else []
    above = [high] if high is not None and high != math.inf else []
    no_room = below == above and owner == ("lo", "hi")  # a bound belongs to what is outside
    if below and above and (below[0] > above[0] or no_room):
        return TG(math.inf, [], [0], above)
    return TG(
        math.inf,
        [*below, *above],
        [0] * len(below) + [1] + [0] * len(above),
        [*below, 0, *above],
        owner=[owner[0]] * len(below) + [owner[1]] * len(above),
    )


def _clamp(low: float | None, high: float | None) -> TG:
    """torch's clamp: its gradient at a bound is that of the inside, unlike hardtanh's."""
    # torch takes True for 1
    low, high = (float(b) if isinstance(b, bool) else b for b in (low, high))
    return _bounded(low, high, ("hi", "lo"))


def _hardtanh(low: float, high: float) -> TG:
    return _bounded(low, high, ("lo", "hi"))


def _hardshrink(width: float) -> TG:
    """No x is between crossed bounds."""
    return TAXONOMY["identity"] if width < 0 else taxonomy.hardshrink(width)


def _row(key: str) -> Callable[[], TG]:
    return lambda: TAXONOMY[key]


KINDS: dict[str, Elementwise] = {
    **{
        key: _with(_row(key))
        for key in (
            *("relu", "relu6", "silu", "mish", "sigmoid", "tanh", "selu", "erf"),
            *("hardsigmoid", "hardswish", "tanhshrink", "logsigmoid", "softsign"),
        )
    },
    "leaky_relu": _with(taxonomy.leaky_relu, negative_slope=0.01),
    "hardtanh": _with(_hardtanh, min_val=-1.0, max_val=1.0),
    "threshold": _with(taxonomy.threshold, threshold=0.0, value=0.0),
    "hardshrink": _with(_hardshrink, lambd=0.5),
    "softshrink": _with(taxonomy.softshrink, lambd=0.5),
    "elu": _with(taxonomy.elu, alpha=1.0),
    "celu": _with(taxonomy.celu, alpha=1.0),
    "softplus": _with(_softplus, beta=1.0, threshold=20.0),
    "rrelu": _with(_rrelu, lower=1 / 8, upper=1 / 3, training=False),
    "gelu": Elementwise(
        lambda input, *, approximate="none", out=None: Call(input, (approximate,)), _gelu
    ),
    "clamp": Elementwise(
        lambda input, min=None, max=None, out=None: Call(input, (min, max)), _clamp
    ),
    "clamp_min": Elementwise(lambda input, min, out=None: Call(input, (min, None)), _clamp),
    "clamp_max": Elementwise(lambda input, max, out=None: Call(input, (None, max)), _clamp),
}
# The kinds whose instance is only approximate; all others are exact for every parameter.
APPROXIMATE = frozenset(
    ("gelu", "elu", "selu", "celu", "softplus", "logsigmoid", "erf", "softsign")
)


def _softmax(
    input: Tensor, dim: int | None = None, *rest: Any, dtype: Any = None, **more: Any
) -> Tensor:
    return attention.softmax(input, *axis_and_type(input, dim, rest, dtype))


def axis_and_type(input: Tensor, dim: int | None, rest: Any, dtype: Any) -> tuple[int, Any]:
    if rest and isinstance(rest[-1], torch.dtype):  # torch.softmax(x, dim, dtype), by position
        dtype = rest[-1]
    axis = (0 if input.dim() in (0, 1, 3) else 1) if dim is None else dim  # F.softmax's old rule
    return axis, dtype


def halves(input: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The value and the gate of a gated linear unit."""
    a, b = input.chunk(2, dim)
    return a, b


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = halves(input, dim)
    return kernels.blend(b, TAXONOMY["silu"], v=a)  # the gate of SiLU over another input


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    per_channel = weight.numel() > 1
    slope = weight.view(-1, *(1 for _ in input.shape[2:])) if per_channel else weight.view(())
    return kernels.blend(input, float("inf"), (0.0,), (slope, 1.0), (0.0, 0.0))


def _promoted(x: Tensor, *others: Tensor) -> Tensor:
    """`x` in the type that torch's op gives for all of them: those without axes decide nothing,
    unless the rest are whole numbers."""
    types = [t.dtype for t in (x, *others) if t.dim()]
    common = functools.reduce(torch.promote_types, types) if types else None
    if common is None or not common.is_floating_point:
        common = functools.reduce(torch.promote_types, (t.dtype for t in (x, *others)))
    return x.to(common)


def _clamp_by_tensors(kind: str) -> Callable[..., Tensor]:
    """A clamp whose bounds are tensors: a hard gate for each, whose threshold is data.

    The upper one comes second, so that of crossed bounds it is the answer, as in torch.
    """

    def clamp(*args: Any, **kwargs: Any) -> Tensor:
        x, (low, high), _ = KINDS[kind].read(*args, **kwargs)
        given = [b for b in (low, high) if b is not None]
        y = _promoted(x, *given)
        if len(given) == 2:
            low = torch.where(low == high, low.detach(), low)  # no gradient, as torch gives it
        if low is not None:
            y = kernels.blend(y, math.inf, [low], (0.0, 1.0), (low, 0.0), owner=["hi"])
        if high is not None:
            y = kernels.blend(y, math.inf, [high], (1.0, 0.0), (0.0, high), owner=["lo"])
        for bound in given:
            y = torch.where(bound.isnan(), math.nan, y)
        return y

    return clamp


def _extreme(side: int) -> Callable[..., Tensor]:
    """The larger (or smaller) of two tensors: a hard gate at the other one."""

    def extreme(input: Tensor, other: Tensor) -> Tensor:
        input, other = _promoted(input, other), _promoted(other, input)
        s, c, owner = (
            ((0.0, 1.0), (other, 0.0), "hi") if side > 0 else ((1.0, 0.0), (0.0, other), "lo")
        )
        y = kernels.blend(input, math.inf, [other], s, c, owner=[owner])
        # Of two equal ones each has half of the gradient, as torch gives it.
        y = torch.where(input == other, input / 2 + other / 2, y)
        return torch.where(other.isnan(), other, y)

    return extreme


def multi_head(softmax: Function, attention: Function) -> Function:
    """A copy of torch's multi-head attention with these for its softmax and attention.

    The original stops at its first line to ask whoever intercepts it, so its inside could not be
    reached. Its globals have no name: a compiler would look them up in the module of that name.
    """
    original = F.multi_head_attention_forward
    known = {
        **{name: value for name, value in vars(F).items() if name != "__name__"},
        "has_torch_function": lambda tensors: False,
        "softmax": softmax,
        "scaled_dot_product_attention": attention,
    }
    return types.FunctionType(original.__code__, known, original.__name__, original.__defaults__)


multi_head_attention = multi_head(_softmax, attention.scaled_dot_product_attention)


# What is not one element-wise function, evaluated by gates as a whole.
WHOLE: dict[str, Callable[..., Any]] = {
    "softmax": _softmax,
    "softmin": lambda input, dim=None, **more: _softmax(-input, dim, **more),
    "glu": _glu,
    "prelu": _prelu,
    "scaled_dot_product_attention": attention.scaled_dot_product_attention,
    "multi_head_attention_forward": multi_head_attention,
    "maximum": _extreme(1),
    "minimum": _extreme(-1),
    **{f"{kind}_by_tensors": _clamp_by_tensors(kind) for kind in KINDS if "clamp" in kind},
    **{function.__name__: gated for function, gated in rnn.FUNCTIONS.items()},
}


def _spellings(kind: str) -> dict[Function, tuple[str, bool]]:
    """Every function of torch that makes a call of `kind`, with whether it writes in place."""
    other = {"sigmoid": "expit", "clamp": "clip", "maximum": "max", "minimum": "min"}.get(
        kind, kind
    )
    return {
        getattr(home, name + mark): (kind, bool(mark))
        for name in (kind, other)
        for mark in ("", "_")
        for home in (F, torch, Tensor, torch.special)
        if callable(getattr(home, name + mark, None))
    }


FUNCTIONS: dict[Function, tuple[str, bool]] = {
    function: what for kind in (*KINDS, *WHOLE) for function, what in _spellings(kind).items()
}


def read(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The kind of nonlinearity that a call of torch is, or None if it is none."""
    if function not in FUNCTIONS:
        return None
    kind, _ = FUNCTIONS[function]
    x = args[0] if args else kwargs.get("input", kwargs.get("query"))
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if kind in ("maximum", "minimum"):  # torch.max is also a reduction
        other = args[1] if len(args) > 1 else kwargs.get("other")
        return kind if isinstance(other, Tensor) and other.is_floating_point() else None
    if kind == "rrelu" and KINDS[kind].read(*args, **kwargs).parameters[-1]:
        return None  # in training it draws its slopes, which no gate does: torch's own stays
    if kind.startswith("clamp"):
        bounds = KINDS[kind].read(*args, **kwargs).parameters
        return f"{kind}_by_tensors" if any(isinstance(b, Tensor) for b in bounds) else kind
    return kind


def function(kind: str, parameters: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
    """The element-wise function that a call of `kind` with these parameters is."""
    if kind == "gelu":
        return lambda x: F.gelu(x, approximate=parameters[0])
    if kind.startswith("clamp"):
        return lambda x: torch.clamp(x, *parameters)
    if kind == "rrelu":
        return lambda x: F.rrelu(x, *parameters[:2])
    original = getattr(F, kind, None) or getattr(torch, kind)
    return lambda x: original(x, *parameters)


def of_call(kind: str, parameters: tuple[Any, ...]) -> Recognised:
    """The instance of a call; its error is on record where its row is, else it is measured."""
    try:
        if kind in APPROXIMATE:
            return _approximate(kind, parameters)
        return Recognised(KINDS[kind].make(*parameters), True, 0.0)
    except (ValueError, ArithmeticError) as error:
        why = str(error).rstrip(".")
        raise ValueError(
            f"no gate is {kind} with the parameters {parameters} ({why}); sites={{name: None}} "
            "leaves the call to torch."
        ) from error


@functools.lru_cache(256)
def _approximate(kind: str, parameters: tuple[Any, ...]) -> Recognised:
    return judged(KINDS[kind].make(*parameters), function(kind, parameters))


def judged(t: TG, f: Callable[[Tensor], Tensor]) -> Recognised:
    """`t` as a stand-in for `f`: exact if it is so to rounding, else with its error."""
    sup = taxonomy.measure(t, f).sup
    exact = sup < 1e-10  # the line goes to 1e4, where float64 has 2e-12 to give
    return Recognised(t, exact, 0.0 if exact else sup)


def fitted(f: Callable[[Tensor], Tensor]) -> Recognised:
    """A new instance with five branches over the line; ValueError where f is not affine far out."""
    from threshold_gating.fitting import fit  # scipy, only where a fit is needed

    found = fit(f, over="line", K=5)
    return Recognised(found.t, False, found.sup)
