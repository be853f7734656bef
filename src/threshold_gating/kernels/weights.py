"""What is known of the weights of a frozen instance of three and more branches: whether kernels may
count its branches from below with the room that float32 has for exponentials, unasked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

from threshold_gating.instance import TG


class Weights(IntEnum):
    """What is known of the weights of K >= 3 branches; see `formulas`."""

    UNKNOWN = 0
    SINGLY = 1  # no room for them in float32: gates one by one, which kernels see as they run
    SMALL = 2  # frozen, and no sum of them can overflow or lose the others: nobody looks
    MIRRORED = 3  # and the taus are the same from either end: half of the exponentials are enough


def weights_of(t: TG) -> Weights:
    """What is known of the weights of a frozen instance."""
    if not _are_small(t):
        return Weights.UNKNOWN
    return Weights.MIRRORED if _are_mirrored(t) else Weights.SMALL


def _are_small(t: TG) -> bool:
    """Whether branches can be counted from the left on both sides with the least room that an
    engine has for exponentials, 2^124 in all; nobody looks then whether they fit.

    Where the exponentials stop growing, all gates but the last must be below 2^-24 of it, and what
    is left of the other branches must not be seen beside the last. With a tau for each threshold
    gates are (2^-24.8 for K = 6); with one tau it depends on the weights w_k of `tiles`.
    """
    if t.hard or t.K < 3 or list(t.theta) != sorted(t.theta):
        return False
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    # so that no product overflows, and tau x - tau theta is tau (x - theta) to 16 * 2^-23 = 2e-6
    near = max(map(abs, (*t.s, *t.c))) <= 2 and max(taus) * max(map(abs, t.theta)) <= 16
    # where a middle branch wins, gradients are differences of means: off by tau c 2^-23, no more
    near = near and max(taus) * max(map(abs, t.c)) <= 16
    # going back, exponentials below the last (2^100) times tau are summed before they are shared
    # out: 4 K (K - 1) of them stay below 2^124
    near = near and max(taus) <= 2**16
    if not near or isinstance(t.tau, tuple):
        return near and t.K <= 6 and _are_unseen(t, 124, (0.0,) * t.K)
    middle, exponents = sum(t.theta) / (t.K - 1), [0.0]
    for theta in t.theta[:-1]:
        exponents.append(exponents[-1] + t.tau * (middle - theta) * math.log2(math.e))
    left = [e - 124 * (1 - k / (t.K - 1)) for k, e in enumerate(exponents)]
    return max(left[1:]) <= -24 and _are_unseen(t, 124, exponents)


def _are_unseen(t: TG, room: float, exponents: Sequence[float]) -> bool:
    """Whether what is left of branches where the last exponential stops, at 2^room for all of them
    together, is no more than a unit in the last place of the last branch.

    Its constant need not be as large as theirs where its slope times x is.
    """
    J = t.K - 1
    left = [2.0 ** (e - room * (1 - k / J)) for k, e in enumerate(exponents[:J])]
    sharp = t.tau[-1] if isinstance(t.tau, tuple) else t.tau
    start = sum(t.theta) / J if not isinstance(t.tau, tuple) else t.theta[-1]
    stop = max(0.0, start + room / J / (sharp * math.log2(math.e)))
    rest = [max(abs(w) * f for w, f in zip(row, left, strict=False)) for row in (t.s, t.c)]
    last = abs(t.s[-1]), max(abs(t.c[-1]), abs(t.s[-1]) * stop)
    return all(r <= 2.0**-23 * w for r, w in zip(rest, last, strict=True))


def _are_mirrored(t: TG) -> bool:
    """Whether taus are the same from either end, for an instance whose weights are small.

    Their bounds then leave less room (`parameters._mirrored`), which must still be 2^24.
    """
    if not isinstance(t.tau, tuple) or t.tau != t.tau[::-1]:
        return False
    pairs = zip(t.tau, t.theta, t.theta[::-1], strict=True)
    gaps = [tau * (high - low) * math.log2(math.e) for tau, low, high in pairs]
    lower = gaps[: (t.K - 1) // 2]
    room = 124 - sum(lower)
    fits = min(lower) >= 0 and room >= 24 * (t.K - 1)
    return fits and _are_unseen(t, room, (0.0,) * t.K)
