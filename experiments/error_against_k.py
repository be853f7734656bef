"""How fast does the error fall with the number of branches? K = 2 to 8 for ten functions.

The paper says K = O(1/eps) pieces, that K = 2 suffices and that what it misses is uninteresting.

    fit         the least largest error that `tg.fit` finds, in float64: over the line where the
                function has asymptotes, else over (-6, 6) with free tails
    tau         the sharpness at which sigmoid(tau x) is nearest to the normal distribution's Phi
    float32     `gelu_k5` to `gelu_k8` in float32, gates evaluated, beside torch's own GELU
    names       every activation of torch.nn and of transformers, and the one that each
                architecture of transformers has by default: does K = 2 represent it?

    OMP_NUM_THREADS=1 python -m experiments.error_against_k     # 10 minutes on one core
    python -m experiments.error_against_k --smoke               # seconds

Every fit has four new starts besides those that `tg.fit` takes from simpler fits, and GELU at K = 8
begins from START as well. Fits are searches: an error is the least found, an upper bound.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import threshold_gating as tg
from experiments import record
from experiments.record import Case, Row
from threshold_gating.fitting.inputs import Over
from threshold_gating.instance import TG

NAME = "error_against_k"
STARTS = 4
ROOM = (-6.0, 6.0)  # the interval of functions without asymptotes
BRANCHES = range(2, 9)


class Subject(NamedTuple):
    """A function, where it is fitted, and what stands in the way of a fast fall, if anything."""

    f: Callable[[Tensor], Tensor]
    over: Over
    kind: str


SMOOTH, TAILS, CORNER = "analytic", "analytic, tails like 1/x", "corner in f' or f''"
SUBJECTS = {
    "gelu": Subject(F.gelu, "line", SMOOTH),
    "erf": Subject(torch.erf, "line", SMOOTH),
    "softplus": Subject(lambda x: F.softplus(x, threshold=50), "line", SMOOTH),
    "exp(-x^2)": Subject(lambda x: torch.exp(-x * x), "line", SMOOTH),
    "asinh": Subject(torch.asinh, ROOM, SMOOTH),
    "sin": Subject(torch.sin, ROOM, SMOOTH),
    "atan": Subject(torch.atan, "line", TAILS),
    "softsign": Subject(F.softsign, "line", CORNER),
    "elu": Subject(F.elu, "line", CORNER),
    "hardswish": Subject(F.hardswish, "line", CORNER),
}
OWN_TAU = {"gelu": 5, "elu": 4}  # a tau for each threshold as well, up to this K
# Thresholds between those of K = 6 and beyond them, slopes that swing about 0 and 1 as there.
START = TG(
    0.95,
    (-3.7, -2.5, -1.2, 0, 1.2, 2.5, 3.7),
    (0, -1e-4, -0.002, -0.02, 1.02, 1.002, 1.0001, 1),
    (0,) * 8,
)


def cases(smoke: bool = False) -> list[Case]:
    """Few branches first, so that what is cut is the same K for every function."""
    chosen = ["gelu", "sin"] if smoke else list(SUBJECTS)
    most = BRANCHES[:2] if smoke else BRANCHES
    fits = [
        {"what": "fit", "function": name, "K": K, "own_tau": own}
        for K in most
        for own in (False, True)
        for name in chosen
        if not own or K <= OWN_TAU.get(name, 0)
    ]
    return [{"what": "names"}, {"what": "tau"}, {"what": "float32"}, *fits]


def fit(case: Case) -> dict[str, Any]:
    """The least largest error found, that of the best line (K = 1), and the instance."""
    f, over, _ = SUBJECTS[case["function"]]
    start = START if (case["function"], case["K"]) == ("gelu", START.K) else None
    found = tg.fit(
        f,
        over,
        case["K"],
        tails="exact" if over == "line" else "free",
        zero=False,
        own_tau=case["own_tau"],
        starts=STARTS,
        start=start,
    )
    t = found.t
    return {"sup": found.sup, "tau": t.tau, "theta": t.theta, "s": t.s, "c": t.c}


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    return fit(case)


def main(argv: list[str] | None = None) -> list[Row]:
    asked = record.options(NAME, __doc__).parse_args(argv)
    torch.set_num_threads(1)
    rows = record.complete(NAME, cases(asked.smoke), run, asked)
    return rows


if __name__ == "__main__":
    main()
