"""What is known of a gate before any tensor is read, and the tensors that hold the rest.

A `Structure` is made once from an instance and what is learned of it, or from the arguments of one
call (`call`). Equal structures share compiled kernels and compiled graphs. `Tensors` are whole, as
a module holds them: rows along the first axis, the sharing group behind it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.instance import TG
from threshold_gating.kernels.lowering import Native, native_call
from threshold_gating.kernels.weights import Weights, weights_of
from threshold_gating.primitive import Anchor, GateForm, Value, are_huge

Numbers = tuple[float | None, ...]  # None stands for a row of a tensor
Shape = tuple[int, ...]
MOST_BRANCHES = 8
DIGITS = (0.0, 1.0, -1.0)  # numbers that compiled kernels and graphs may know
_clamp, _sort = torch.ops.aten.clamp.default, torch.ops.aten.sort.stable
_where = torch.ops.aten.where.self


def rho_bound() -> float:
    """tau = tau0 exp(rho) for |rho| up to this: 1100 times softer or sharper than the start.

    Further out tau would leave float32. A function, so that it is a literal to torch.compile.
    """
    return 7.0


class Gate(IntEnum):
    """How gates are evaluated; see `tiles`."""

    TWO = 0  # a sigmoid for either side
    CENTRED = 1  # two, about the midpoint of their branches, as tanh is
    ONE_TAU = 2  # three or more: powers of one exponential
    OWN_TAUS = 3  # three or more with a tau for each threshold
    HARD = 4  # comparisons


class Role(IntEnum):
    """What a second input does; the last two exist backward only, in compiled graphs."""

    ALONE = 0  # there is none
    READ = 1  # the branches read it instead of x
    TIMES = 2  # it multiplies y
    KEPT = 3  # x is copied to it, before y is written over x
    NORMED = 4  # a norm made x of it: backward, sums for that norm are taken along
    JOINED = 5  # as NORMED, and dy is the sum of two


class Wanted(NamedTuple):
    """Which gradients somebody asks for."""

    x: bool
    other: bool
    tau: bool
    theta: bool
    s: bool
    c: bool

    @classmethod
    def of(cls, needed: Sequence[bool]) -> Wanted:
        """From what is needed of x, the other input and `Tensors`."""
        x, other, rho, dtheta, s, c, tau0, theta0 = needed
        return cls(x, other, rho or tau0, dtheta or theta0, s, c)


class Tensors(NamedTuple):
    """tau = tau0 exp(rho), theta = theta0 + dtheta, s and c; None where structure knows it all.

    tau0 and rho have one row or K - 1, theta0 and dtheta K - 1, s and c K; c holds the values at
    the thresholds if the gate is anchored.
    """

    rho: Tensor | None = None
    dtheta: Tensor | None = None
    s: Tensor | None = None
    c: Tensor | None = None
    tau0: Tensor | None = None
    theta0: Tensor | None = None


# `Tensors`, or the same six as autograd hands them on
Held = Sequence[Tensor | None]


class Rows(NamedTuple):
    """tau (one, or one per threshold), theta, s and c now: numbers where known, else tensors."""

    tau: list[Any]
    theta: list[Any]
    s: list[Any]
    c: list[Any]


class Structure(NamedTuple):
    """A gate without its data.

    A row of tau, theta, s or c is a number where it is known, else None and in a tensor. Of an
    instance only 0 and +-1 are known, so that those that differ in other numbers are alike.
    """

    gate: Gate
    tau: Numbers
    theta: Numbers
    s: Numbers
    c: Numbers
    owner: tuple[str, ...] | None = None
    form: GateForm = "softmax"
    q: Any = None
    anchor: tuple[Anchor, ...] | None = None
    clamp: tuple[float, float] | None = None
    learned: tuple[str, ...] = ()
    jumps: bool = False  # thresholds are learned at which y jumps
    weights: Weights = Weights.UNKNOWN
    fused: bool = True  # whether kernels compute it, and not the plain formulas alone
    native: Native | None = None  # torch's own op
    names: tuple[str | None, ...] = ()  # of the tensors in a module, in the order of `Tensors`
    steep: Numbers = ()  # slopes of learned hard branches that are evaluated from their threshold
    ordered: bool = False  # learned thresholds are read low to high, whichever has passed which
    huge: bool = False  # slopes or constants at which float32 overflows: evaluated in float64

    @classmethod
    def of(cls, t: TG, learned: Sequence[str] = ()) -> Structure:
        """The structure of an instance of which these are learned, made once."""
        return of_instance(t, tuple(learned))

    @property
    def K(self) -> int:
        return len(self.s)

    @property
    def hard(self) -> bool:
        return self.gate == Gate.HARD

    @property
    def anchored(self) -> bool:
        """Whether c holds values at thresholds: a learned hard threshold moves its branches."""
        return self.gate == Gate.HARD and len(self.learned) > 0

    @property
    def may_jump(self) -> bool:
        """Whether branches with weights of their own may differ at a threshold that is learned.

        Two that are 0 there, as ReLU's are, meet whatever their weights.
        """
        meet = self.K == 2 and self.c == (0.0, 0.0)
        return self.hard and "theta" in self.learned and not meet

    def tensors(self, held: Mapping[str, Any], computed: Any) -> Tensors:
        """The tensors that a module holds by their names; a parametrization has them `computed`."""
        rho, dtheta, s, c, tau0, theta0 = self.names
        try:  # one by one: a comprehension takes twice as long, in every call
            found = Tensors(
                None if rho is None else held[rho],
                None if dtheta is None else held[dtheta],
                None if s is None else held[s],
                None if c is None else held[c],
                None if tau0 is None else held[tau0],
                None if theta0 is None else held[theta0],
            )
        except KeyError:  # made anew whenever it is asked for
            found = Tensors(*[None if n is None else getattr(computed, n) for n in self.names])
        return in_order(found) if self.ordered else found

    @staticmethod
    def intercepts(v: Sequence[Value], s: Sequence[Value], theta: Sequence[Value]) -> list[Any]:
        """c of branches with slopes s that have the values v at their thresholds."""
        parts = zip(v, s, Structure.nearest(theta), strict=True)
        return [v if not isinstance(s, Tensor) and s == 0 else v - s * at for v, s, at in parts]

    @staticmethod
    def rho_bound() -> float:
        """How far rho is used as it is."""
        return rho_bound()

    @staticmethod
    def sharpening(rho: Tensor) -> Tensor:
        """tau / tau0 of a learned gate: exp(rho), 1 at rho = 0 and positive for every rho."""
        # the op itself: a converted network around us answers torch.clamp
        bounded: Tensor = _clamp(rho, -rho_bound(), rho_bound())
        return bounded.exp()

    @staticmethod
    def nearest(theta: Sequence[Any]) -> list[Any]:
        """The threshold each branch is anchored at: the one below, for the lowest the one above."""
        return [theta[0], *theta] if theta else [0.0]

    @staticmethod
    def is_centred(t: TG) -> bool:
        """Whether a start `t` is evaluated about the midpoint of its branches, as tanh is."""
        opposite = t.K == 2 and all(abs(w[0]) == abs(w[1]) for w in (t.s, t.c))
        return not t.hard and opposite and (t.s[0] != t.s[1] or t.c[0] != t.c[1])

    @staticmethod
    def anchored_values(t: TG) -> tuple[float, ...]:
        """The value of each branch at its own threshold."""
        parts = zip(t.s, t.c, Structure.nearest(t.theta), strict=True)
        return tuple(s * th + c for s, c, th in parts)

    def rows(self, tensors: Held) -> Rows:
        """The parameters as they are now, differentiable."""
        rho, dtheta, s, c, tau0, theta0 = tensors
        if theta0 is not None and dtheta is not None:
            theta0 = theta0 + dtheta
        if tau0 is not None and rho is not None:
            tau0 = tau0 * self.sharpening(rho)
        if self.hard:
            taus: list[Any] = [math.inf]
        else:  # one tau is its own row, whatever its shape
            taus = [tau0] if len(self.tau) == 1 and tau0 is not None else _filled(self.tau, tau0)
        thetas, slopes = _filled(self.theta, theta0), _filled(self.s, s)
        constants = _filled(self.c, c)
        if self.anchored:
            constants = Structure.intercepts(constants, slopes, thetas)
        return Rows(taus, thetas, slopes, constants)

    def numbers(self, tensors: Held) -> Rows:
        """`rows` where each is one number, in Python's: it has no step that takes as long."""
        rho, dtheta, s, c, tau0, theta0 = [None if w is None else _flat(w) for w in tensors]
        if theta0 is not None and dtheta is not None:
            theta0 = [a + b for a, b in zip(theta0, dtheta, strict=True)]
        if tau0 is not None and rho is not None:
            tau0 = [a * _sharpening(b) for a, b in zip(tau0, rho, strict=True)]
        pairs = ((self.tau, tau0), (self.theta, theta0), (self.s, s), (self.c, c))
        taus, thetas, slopes, constants = (list(known if w is None else w) for known, w in pairs)
        if self.hard:
            taus = [math.inf]
        for known, w in zip(
            (self.tau, self.theta, self.s, self.c), (taus, thetas, slopes, constants), strict=True
        ):
            for k, number in enumerate(known):
                w[k] = w[k] if number is None else number
        if self.anchored:
            constants = Structure.intercepts(constants, slopes, thetas)
        return Rows(taus, thetas, slopes, constants)


def fits(structure: Structure, tensors: Held, group: int) -> bool:
    """Whether kernels may read these as memory: rows along the first axis, `group` numbers each."""
    for t, rows in zip(tensors, held_rows(structure), strict=True):
        # of a single row any shape has the same memory
        if t is not None and (t.numel() != rows * group or (rows > 1 and t.size(0) != rows)):
            return False
    return True


def held_rows(structure: Structure) -> tuple[int, ...]:
    """How many rows each of `Tensors` has."""
    K, taus = len(structure.s), len(structure.tau)
    return taus, K - 1, K, K, taus, K - 1


def check_fits(structure: Structure, tensors: Held, group: int) -> None:
    """Raise what is wrong with tensors that kernels may not read."""
    if fits(structure, tensors, group):
        return
    shapes = {n: tuple(t.shape) for n, t in Tensors(*tensors)._asdict().items() if t is not None}
    raise ValueError(
        f"blend: gates of {structure.K} branches for {group} groups have a row of {group} numbers "
        f"for each branch or threshold along the first axis; got tensors of the shapes {shapes}."
    )


def in_order(tensors: Tensors) -> Tensors:
    """The same with theta = theta0 + dtheta low to high, differentiable; equal ones stay in place.

    A learned threshold that passes its neighbour takes its place: the k-th threshold is the k-th
    from below, with the owner and the branches of that place. Where one is NaN all of them are:
    sorted to the end it would be a threshold that no x reaches.
    """
    theta0, dtheta = tensors.theta0, tensors.dtheta
    assert theta0 is not None and dtheta is not None  # thresholds that are learned
    theta = _sort(theta0 + dtheta, stable=True, dim=0)[0]
    last = theta[-1:].detach()  # NaN is sorted to the end
    return tensors._replace(theta0=_where(last == last, theta, last), dtheta=None)


def _sharpening(rho: float) -> float:
    # comparisons that NaN passes, as it does the clamp of torch
    bound = rho_bound()
    return math.exp(-bound if rho < -bound else bound if rho > bound else rho)


def _flat(w: Tensor) -> list[Any]:
    # zeros that torch has not made yet have no list
    found: list[Any] = (torch.zeros(w.shape) if w._is_zerotensor() else w).tolist()
    while found and isinstance(found[0], list):
        found = [row[0] for row in found]
    return found


def _filled(known: Numbers, w: Tensor | None) -> list[Any]:
    if w is None:
        return list(known)
    pairs = zip(known, w.unbind(0), strict=True)
    return [row if number is None else number for number, row in pairs]


@functools.lru_cache(4096)
def of_instance(t: TG, learned: tuple[str, ...] = ()) -> Structure:
    """The structure of an instance of which these are learned."""
    whole = [bool(t.anchor and t.anchor[k]) or bool(t.q and t.q[k]) for k in range(t.K)]
    anchored = t.hard and bool(learned)

    def known(w: Sequence[float], name: str) -> Numbers:
        free = name in learned
        fixed = [x in DIGITS or (whole[k] and not learned) for k, x in enumerate(w)]
        return tuple([x if f and not free else None for f, x in zip(fixed, w, strict=True)])

    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    gate = gate_of(t.hard, t.K, len(taus), Structure.is_centred(t))
    points = None if learned else t.anchor
    return Structure(
        gate,
        (math.inf,) if t.hard else (None,) * len(taus),
        (None,) * (t.K - 1),
        known(t.s, "s"),
        known(Structure.anchored_values(t) if anchored else t.c, "c"),
        t.owner,
        t.form,
        t.q,
        points,
        t.clamp,
        learned,
        t.hard and "theta" in learned and _has_jump(t),
        Weights.UNKNOWN if learned else weights_of(t),
        is_fused(t.K, t.form, t.q, points, t.clamp),
        None if learned else native_call(t),
        _names(t.hard, learned),
        _steep(t) if anchored and "s" not in learned and "c" not in learned else (),
        t.K > 2 and "theta" in learned and (t.hard or t.form == "product"),
        are_huge(t.s, t.c, t.q or ()),
    )


def _steep(t: TG) -> Numbers:
    """The slopes of branches whose anchor is a zero at their own threshold: s (x - theta) keeps its
    digits there, and is what the frozen instance computes."""
    anchors, near = t.anchor or (None,) * t.K, Structure.nearest(t.theta)
    parts = zip(anchors, t.s, near, strict=True)
    found = tuple([s if at == (theta, 0.0) else None for at, s, theta in parts])
    return found if any(s is not None for s in found) else ()


def _names(hard: bool, learned: Sequence[str]) -> tuple[str | None, ...]:
    moved = ["rho" if "tau" in learned else None, "dtheta" if "theta" in learned else None]
    constants = "v" if hard and learned else "c"
    return *moved, "s", constants, None if hard else "tau0", "theta0"


@functools.lru_cache(4096)  # a calibrated network has an instance for each site
def exact(t: TG) -> Structure:
    """The structure of a frozen instance with all its numbers, which needs no tensors."""
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    return of_instance(t)._replace(tau=taus, theta=t.theta, s=t.s, c=t.c)


def is_fused(K: int, form: str, q: Any, anchor: Any, clamp: Any) -> bool:
    """Quadratic and anchored branches, clamps and product gates are frozen instances that mostly
    are torch's own ops: no kernel is kept for them."""
    anchored = anchor is not None and any(p is not None for p in anchor)
    plain = q is None and clamp is None and not anchored
    return plain and 2 <= K <= MOST_BRANCHES and (form == "softmax" or K == 2)


def gate_of(hard: bool, K: int, taus: int, centred: bool) -> Gate:
    if hard:
        return Gate.HARD
    if K <= 2:
        return Gate.CENTRED if centred else Gate.TWO
    return Gate.ONE_TAU if taus == 1 else Gate.OWN_TAUS


def _has_jump(t: TG) -> bool:
    """Whether neighbouring branches differ where they meet."""
    ends = [
        (t.s[k + 1] - t.s[k]) * theta + (t.c[k + 1] - t.c[k]) for k, theta in enumerate(t.theta)
    ]
    return any(abs(end) > 1e-6 for end in ends)  # 1/6 of HardSigmoid is not exact


def viewed(rows: Rows, shape: Shape) -> Rows:
    """Rows of a module in the shape in which they broadcast against the input."""
    count = math.prod(shape)

    def view(w: Any) -> Any:
        if not isinstance(w, Tensor):
            return w
        return w.view(shape) if w.numel() == count else w.expand(count).view(shape)

    return Rows(*[[view(w) for w in row] for row in rows])
