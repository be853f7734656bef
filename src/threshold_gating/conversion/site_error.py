"""Error of each site by itself: the original's input goes to its function and to the gates.

An exact site agrees with the original to rounding: `LIMITS`, in units in the last place (ulp) of
each value, or of the largest for what adds up (softmax, attention, recurrence). An approximate site
agrees to the largest error of its instance over the line, and in the root mean square to `RELATIVE`
of the values that it really gives: an instance that is good over the line can be bad on small
inputs. The original rounds, too: beyond these bounds it is evaluated in float64, and a site is not
held to digits that the original has not. What is element-wise is also tried where the inputs of a
network may not go, near its thresholds. A site that learns is compared as it was at its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from threshold_gating.conversion import aten_ops, sites
from threshold_gating.conversion.answering import LEAVE, answer, site_of_call
from threshold_gating.conversion.audit import described, gate_of, is_gate
from threshold_gating.conversion.learn import as_at_start
from threshold_gating.conversion.site import Site
from threshold_gating.conversion.watch import Run, Told, Visit, Watch, copied, fresh
from threshold_gating.nn.spec import GateSpec

# Ulp that an exact site may be off, in (float32 and float64, 16 bits), and why.
LIMITS = {
    # torch is up to 2.9 ulp from the true value, the gates up to 4.7 (both for Mish); in 16 bits
    # either is the float32 value rounded once
    "element": (8, 1),
    # each threshold is rounded, and its difference to the logit: 7 measured
    "softmax": (16, 2),
    # attention and recurrence add up in another order than torch's fused kernels
    "sum": (64, 4),
}
# RMS error of an approximate site over the RMS of its values. GELU with five branches has 5e-5 on
# N(0, 1), with three 4e-3, with two 1.4e-2.
RELATIVE = 1e-2
# Twice the original's own rounding is allowed, up to this share of the values: a network that is
# off from itself by more has no digit that is sure, and one that asks for its type no measure.
LARGEST = 0.1
RECORDED = 1.005  # errors of instances are on record with three digits
_SMALLEST = 2.0**-100  # where exp overflows, torch has 0 for what is smaller than this


class Error:
    """What the calls of one site add up to: over its finite values, of which there are `elements`
    among `values`. `tol` is the user's bound, which an approximate site may reach, too."""

    def __init__(self, name: str, site: Site, tol: float = 0.0) -> None:
        self.name, self.site, self.tol = name, site, tol
        self.calls = self.elements = self.values = 0
        self.max = self.ulp = self.squares = self.size = 0.0
        self.input, self.inputs = 0.0, 0
        self.ulps, self.grain = 0, 0.0  # what rounding is allowed, and that of values near 1
        self.bitwise, self.exceeds = True, False
        self.tried: Error | None = None  # at points of our own
        self.proven = True  # for every input of the types that it was called with
        element = site.t is not None or site.kind in ("glu", "prelu")
        self.rule = "element" if element else "softmax" if "softm" in site.kind else "sum"

    def add(self, want: Any, have: Any, wide: Callable[[], Any]) -> None:
        """Compare the values of one call; `wide` makes the original's in float64."""
        for k, (y, z) in enumerate(zip(floats(want), floats(have), strict=True)):
            if y.numel():
                d = difference(y, z)
                self.max = max(self.max, d.max().item())
                self.squares += d.square().sum().item()
                self.size += y.double().nan_to_num(0, 0, 0).square().sum().item()
                self.elements += int(y.isfinite().sum())
                self.values += y.numel()
                self.bitwise = self.bitwise and not d.any().item()
                self.exceeds = self._exceeds(d, y, z, wide, k) or self.exceeds

    def reached(self, args: Any, kwargs: Any) -> None:
        """Note the size of what reaches the site."""
        x = next(iter(floats((args, kwargs)))).double().nan_to_num(0, 0, 0)
        self.input += x.square().sum().item()
        self.inputs += x.numel()

    @property
    def input_rms(self) -> float:
        """Of what reaches the site."""
        return math.sqrt(self.input / self.inputs) if self.inputs else 0.0

    @property
    def rms(self) -> float:
        """Of the error."""
        return math.sqrt(self.squares / self.elements) if self.elements else 0.0

    @property
    def relative(self) -> float:
        """The RMS error over that of the original's values; 0 where rounding near 1 explains it."""
        return 0.0 if self.rms <= self.grain else self.rel_rms

    @property
    def rel_rms(self) -> float:
        """The RMS error over that of the original's values, as it is."""
        if not self.squares:
            return 0.0
        return math.sqrt(self.squares / self.size) if self.size else math.inf

    @property
    def bound(self) -> float:
        """What is allowed: ulp if the site is exact, else `relative`."""
        return self.ulps if self.site.exact else max(RELATIVE, self.tol)

    def _exceeds(self, d: Tensor, y: Tensor, z: Tensor, wide: Callable[[], Any], k: int) -> bool:
        ulps = LIMITS[self.rule][y.element_size() < 4]
        size = torch.maximum(y.double().abs(), z.double().abs()).nan_to_num(0, 0, 0)
        eps = torch.finfo(y.dtype).eps
        self.ulps, self.grain = max(self.ulps, ulps), max(self.grain, ulps * eps)
        if self.rule == "element":
            fine, coarse = unit(size.clamp(self._least), eps), unit(size.clamp(1.0), eps)
        else:
            fine = coarse = unit(size.max().clamp(_SMALLEST), eps)
        self.ulp = max(self.ulp, (d / fine).max().item())
        allowed = ulps * fine if self.site.exact else self.site.sup * RECORDED + ulps * coarse
        if (d <= allowed).all():
            return False
        own = difference(y, floats(wide())[k])
        if self.rule == "element" and self.site.exact and (own <= ulps * fine).all():
            return True
        of_original = (2 * (own / coarse).max() * coarse).minimum(LARGEST * size.clamp(1.0))
        return not (d <= self.site.sup * RECORDED + ulps * coarse + of_original).all().item()

    @property
    def _least(self) -> float:
        """The size below which a value has no digits of its own. A module whose pieces were read
        off adds up what its lines do, as does one whose branches are learned, and either of them
        cancels where they cross 0."""
        t, learns = self.site.t, self.site.learns
        if t is None or (not t.hard and not (learns and {"s", "c"} & set(learns.learned))):
            return _SMALLEST
        if self.site.kind in sites.KINDS and learns is None:
            return _SMALLEST
        return max(_SMALLEST, *map(abs, t.c))

    @property
    def message(self) -> str:
        """What is wrong, if anything is."""
        if not self.site.exact and self.relative > self.bound and not self.exceeds:
            return (
                f"{self._what} is off by {self.relative:.2g} of what it gives here (RMS); "
                f"{self.bound:.2g} is allowed. `tg.calibrate` fits it to your data, "
                f"sites={{{self.name!r}: K}} takes more branches, None leaves it alone; "
                "tol=math.inf accepts it."
            )
        if not self.exceeds:
            said = self.tried.message if self.tried is not None else ""
            return said and f"{said} (This is near its thresholds; these inputs do not show it.)"
        name, kind = self.name, self.site.kind
        if self.site.exact:
            ulps = "{}, or {} in 16 bits".format(*LIMITS[self.rule])
            return (
                f"{name} ({kind}) is exact and is off by {self.max:.3g}, {self.ulp:.3g} ulp; "
                f"its class allows {ulps}. {self._way_out}"
            )
        return (
            f"{self._what} is off by {self.max:.3g}; its instance is off by at most "
            f"{self.site.sup:.3g} over the line. {self._way_out}"
        )

    @property
    def _way_out(self) -> str:
        alone = f"sites={{{self.name!r}: None}} leaves it alone."
        if self.max < math.inf:
            return alone
        return f"Gates may give NaN at an infinite input: give finite ones, or {alone}"

    @property
    def _what(self) -> str:
        t = self.site.t
        return f"{self.name} ({self.site.kind}{'' if t is None else f', K = {t.K}'})"


def points(site: Site, like: Tensor) -> Tensor:
    """Where to try an element-wise site: a grid, and close to either side of each threshold."""
    theta = torch.tensor(() if site.t is None else site.t.theta)
    near = (theta - 5e-3, theta + 5e-3, theta * 0.995, theta * 1.005)
    return torch.cat([torch.linspace(-8, 8, 129), *near]).to(like)


def unit(size: Tensor, eps: float) -> Tensor:
    """The distance to the next number of a type with this eps, at each size."""
    return torch.ldexp(torch.full_like(size, eps), torch.frexp(size).exponent - 1)


def difference(y: Tensor, z: Tensor) -> Tensor:
    """|y - z|: 0 where both are the same infinity or NaN, infinite where only one is."""
    y, z = y.double(), z.double()
    same = (y == z) | (y.isnan() & z.isnan())
    return (y - z).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)


def floats(tree: Any) -> list[Tensor]:
    """The floating-point tensors in an output, whatever holds them."""
    return [t for t in aten_ops.tensors(tree) if t.is_floating_point()]


class Local:
    """While the original runs under `watch`, compares its sites with those of the converted one."""

    def __init__(self, model: nn.Module, converted: nn.Module, tol: float = 0.0) -> None:
        self.tol = tol
        self.converted = dict(converted.named_modules(remove_duplicate=False))
        self.watch = Watch(model, self._see, self._kind)
        self.errors: dict[str, Error] = {}

    def _gate(self, run: Run) -> nn.Module:
        """What stands in the converted network for one call of a module."""
        return gate_of(self.converted[run.where], run.index)

    def _kind(self, run: Run) -> str | None:
        gate = self._gate(run)
        return described(gate).kind if is_gate(gate) else None

    def _see(self, visit: Visit) -> Told | None:
        return self._call(visit) if visit.is_call else self._module(visit)

    def _module(self, visit: Visit) -> Told:
        module, gate = visit.run.module, self._gate(visit.run)
        site = vars(gate).get("site") or Site(visit.name, visit.kind)
        given = fresh((visit.args, visit.kwargs))  # the module may work in place

        def original(*args: Any, **kwargs: Any) -> Any:
            wide = any(t.dtype == torch.float64 for t in floats((args, kwargs)))
            return (copied(module).double() if wide else module).forward(*args, **kwargs)

        def compare(want: Any) -> None:
            args, kwargs = fresh(given)
            f = as_at_start(gate).forward
            have = f(*args, **kwargs)
            alone = as_at_start(gate, alone=True).forward
            self._add(visit.name, site, want, have, original, alone, given, module)

        return compare

    def _call(self, visit: Visit) -> Told | None:
        site = self._site(visit)
        if site is None or isinstance(site, str):
            name = visit.name if site is None else site
            self.errors.setdefault(name, Error(name, Site(name, visit.kind))).calls += 1
            return None
        given = _kept(visit.args, {k: v for k, v in visit.kwargs.items() if k != "out"})

        def gate(site: Site, *args: Any, **kwargs: Any) -> Any:
            return answer(site, visit.f, args, kwargs)

        def compare(want: Any) -> None:
            args, kwargs = _kept(*given)
            have = gate(site, *args, **kwargs)
            alone = site
            if site.t is not None and site.learns is not None:  # points are of no channel
                alone = replace(site, learns=GateSpec(site.t, site.learns.learned))
            f = partial(gate, alone)
            self._add(visit.name, site, want, have, visit.f, f, given, visit.kind)

        return compare

    def _add(
        self,
        name: str,
        site: Site,
        want: Any,
        have: Any,
        original: Callable[..., Any],
        gate: Callable[..., Any],
        given: tuple[Any, Any],
        replaced: str | nn.Module,
    ) -> None:
        """Note one call: what it gave and, once, what it gives elsewhere, by `gate`, which has no
        channels."""
        args, kwargs = given
        error = self.errors.setdefault(name, Error(name, site, self.tol))
        error.calls += 1
        error.proven = error.proven and _is_proven(site, replaced, want)
        error.add(want, have, lambda: original(*widened(args), **widened(kwargs)))
        error.reached(args, kwargs)
        if site.t is not None and error.tried is None:
            # by position or by name, as in the call; slopes and bounds are no tensors here
            named = {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}
            x = points(site, (*args, *named.values())[0])
            error.tried = Error(name, site, math.inf)  # these inputs are not the network's

            def at(f: Callable[..., Any], x: Tensor) -> Any:
                if args:
                    return f(x, *args[1:], **kwargs)
                return f(**{**kwargs, next(iter(named)): x})

            y, z = at(original, x.clone()), at(gate, x.clone())
            error.tried.add(y, z, lambda: at(original, x.double()))

    def _site(self, visit: Visit) -> Site | str | None:
        """What the nearest owner of the converted network has for a call: a site, the name of the
        module if it is left alone as a whole, None if there is nothing."""
        for run in reversed(self.watch.running.stack):
            owner = self.converted[run.where].__dict__
            if "tg_sites" in owner:
                plan = owner["tg_sites"]
                if plan is None:
                    return site_of_call(visit.kind, visit.args, visit.kwargs)
                call = visit.name.removeprefix(f"{run.where}:")
                return run.where if LEAVE in plan else plan.get(call)
        return None


def _is_proven(site: Site, replaced: str | nn.Module, y: Any) -> bool:
    """Whether a complete proof is on record that the site's instance is what it replaced."""
    from threshold_gating.conversion.proof import holds_for_every_input  # it imports this module

    kinds = {(t.dtype, t.device.type) for t in floats(y)}
    return (
        site.t is not None
        and site.learns is None
        and all(
            holds_for_every_input(site.t, replaced, dtype, device) is not None
            for dtype, device in kinds
        )
    )


def _kept(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same arguments, with a copy of the input, which a call may overwrite."""
    if args:
        return (args[0].clone(), *args[1:]), dict(kwargs)
    return args, {k: v.clone() if k == "input" else v for k, v in kwargs.items()}


def widened(tree: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The same tree with every floating-point tensor, and every such type, as `dtype`."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return dtype if leaf.is_floating_point else leaf
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(widen, tree)
