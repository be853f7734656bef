"""`layer_report`: what reaches each activation of a live model, and what theory says of it."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating.conversion import sites
from threshold_gating.conversion.audit import described, gate_of, is_gate
from threshold_gating.conversion.plan import module_sites, whole
from threshold_gating.conversion.text import columns
from threshold_gating.conversion.watch import Run, Told, Visit, Watch, fresh, undisturbed
from threshold_gating.fitting.shape import curve
from threshold_gating.nn.activation import Activation
from threshold_gating.theory.meanfield import moments

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerTheory:
    """One activation site of a live model: what reaches it, and what the theory says there.

    `name` and `kind` are those of `tg.audit`: "1" for a module, ":relu#0" for a call. `gain` is
    E[phi'^2] at the measured mean and variance, `measured_gain` the same over the values
    themselves. sigma_w is that of the weights that read the site directly (None behind a norm or a
    sum), chi = sigma_w^2 gain the growth of a squared gradient through both. `critical` is the
    sigma_w that would make chi one; beta and chi_q are those at that sigma_w.
    """

    name: str
    kind: str
    mean: float
    variance: float
    gain: float
    measured_gain: float
    critical: float
    sigma_w: float | None
    chi: float | None
    beta: float
    chi_q: float


class LayerReport(tuple[LayerTheory, ...]):
    """The element-wise sites of a live model, in the order they ran; printed, a table.

    `skipped` has the sites that nothing is said of, with the reason.
    """

    skipped: Mapping[str, str]

    def __new__(cls, rows: Iterable[LayerTheory], skipped: Mapping[str, str]) -> LayerReport:
        made = super().__new__(cls, rows)
        made.skipped = dict(skipped)
        return made

    def __str__(self) -> str:
        figures = ("mean", "variance", "gain", "measured_gain", "sigma_w", "chi", "beta", "chi_q")
        rows = [(row.name, row.kind, *(_figure(getattr(row, f)) for f in figures)) for row in self]
        lines = columns([("site", "kind", *figures), *rows])
        return "\n".join([*lines, *(f"{name}: {why}" for name, why in self.skipped.items())])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def layer_report(model: nn.Module, *inputs: Any, **kwargs: Any) -> LayerReport:
    """Theory of a live model: runs it once and reports each element-wise site, in order of call.

    Sites are modules and calls of torch (`F.relu(x)`, `x.sigmoid()`) alike, of a plain network or
    of a converted one, with the names that `tg.audit` gives them once the network is converted.
    What is not one element-wise function (softmax, attention, a recurrent layer) is named by a
    warning and in `skipped`. Arithmetic that bends (`x * (x > 0)`) is not seen; `tg.audit` lists
    it. A call in a block that runs several times is reported for the first run. With parameters
    per channel the figures are means over the channels; where more than 32 differ, over
    32 channels spaced evenly.

    The model runs in the mode it is in; its state and the inputs stay as they were.
    """
    model = getattr(model, "_orig_mod", model)  # what is compiled cannot be looked into
    seen = _Seen(model)
    given, named = fresh((inputs, kwargs))
    with undisturbed(model):
        with seen.watch:
            model(*given, **named)
        rows = seen.rows()
    skipped = "; ".join(f"{name}: {why}" for name, why in seen.skipped.items())
    if not rows:
        raise ValueError(
            f"layer_report: {type(model).__name__} ran no element-wise site that could be seen"
            + (f" ({skipped})." if skipped else "; give a network with activations.")
        )
    if skipped:
        warnings.warn(f"layer_report skips {skipped}.", stacklevel=2)
    return LayerReport(rows, seen.skipped)


class _Site(NamedTuple):
    """What reached a site in its first call, and the functions that it applied."""

    kind: str
    functions: Sequence[tuple[Function, int]]
    mean: float
    variance: float
    some: Tensor


class _Seen:
    """The sites of one run, and the spread of the weights that read them."""

    def __init__(self, model: nn.Module) -> None:
        self.sites: dict[str, _Site] = {}
        self.skipped: dict[str, str] = {}
        self.reads: dict[str, float] = {}
        self.last: tuple[str, Any] = ("", None)
        self.bent = whole(module_sites(model))
        self.watch = Watch(model, self._see, self._kind, read=_read, answered=True)

    def _kind(self, run: Run) -> str | None:
        if is_gate(run.module):
            return described(_evaluated(run)).kind
        return _READER if _only_reads(run.module) else self.bent(run)

    def _see(self, visit: Visit) -> Told | None:
        tiered = not visit.is_call and isinstance(visit.run.module, _LINEAR)
        if tiered or visit.kind == _READER:
            self._read(visit)
        if visit.kind == _READER or visit.name in self.sites:
            return None
        functions = _functions(visit)
        if not functions:
            self.skipped[visit.name] = f"{visit.kind} is not one element-wise function"
            return None
        given = _weighted(visit)[0] if visit.kind == "prelu" else visit.x
        x = given.detach().double().flatten().cpu()  # before the call may overwrite it
        some = x[:: max(1, len(x) // 100_000)].clone()  # enough for a mean to a few per mille
        variance = x.var(correction=0).item() if len(x) else math.nan
        self.sites[visit.name] = _Site(visit.kind, functions, x.mean().item(), variance, some)

        def told(output: Any) -> None:
            self.last = visit.name, output

        return told

    def _read(self, visit: Visit) -> None:
        """Weights that are given the very output of the last site."""
        x, weight = _weighted(visit)
        if x is self.last[1]:
            fan_in = weight[0].numel()
            spread = math.sqrt(fan_in) * weight.detach().double().pow(2).mean().sqrt().item()
            self.reads.setdefault(self.last[0], spread)

    @torch.enable_grad()
    def rows(self) -> list[LayerTheory]:
        """What the theory says of each site; one without a function to integrate is skipped."""
        found = []
        for name, site in self.sites.items():
            try:
                found.append(_row(name, site, self.reads.get(name)))
            except (TypeError, ValueError) as error:
                self.skipped[name] = str(error).rstrip(".")
        return found


_READER = "weights"
_MOST = 32  # functions of a site that are integrated
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FORWARDS = {kind.forward for kind in _LINEAR}
_RANDOM = {function for function, (kind, _) in sites.FUNCTIONS.items() if kind == "rrelu"}
_CALLS = {F.linear, F.conv1d, F.conv2d, F.conv3d}


def _only_reads(module: nn.Module) -> bool:
    """Whether a module is a linear map and no more; one that computes more has its own forward."""
    own = "forward" in vars(module)
    return isinstance(module, _LINEAR) and type(module).forward in _FORWARDS and not own


def _read(func: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """The kind of a call: a site, also one that is random, or the reader of one."""
    if func in _CALLS:
        return _READER
    return "rrelu" if func in _RANDOM else sites.read(func, args, kwargs)


def _weighted(visit: Visit) -> tuple[Any, Tensor]:
    """What a linear map is given, and its weights."""

    def read(input: Any, weight: Any = None, *rest: Any, **more: Any) -> tuple[Any, Any]:
        return input, weight

    module: Any = visit.run.module
    x, weight = read(*visit.args, **visit.kwargs)
    return x, weight if visit.is_call else module.weight


def _evaluated(run: Run) -> nn.Module:
    """What a call of a module evaluates: in a converted network a gate for this one alone."""
    return gate_of(run.module, run.index) if is_gate(run.module) else run.module


def _functions(visit: Visit) -> list[tuple[Function, int]]:
    """The functions that a site applies, and how many of its channels have each; [] if none is."""
    module = _evaluated(visit.run)
    each: list[Function] = []
    if visit.is_call and visit.kind == "prelu":
        slopes = _weighted(visit)[1].detach().double().flatten().tolist()
        each = [partial(F.leaky_relu, negative_slope=a) for a in slopes]
    elif visit.is_call and visit.kind in sites.KINDS:
        random = visit.kind == "rrelu" and visit.call.parameters[-1]  # it draws its slopes
        each = [] if random else [visit.function if visit.gate is None else visit.gate.t]
    elif not visit.is_call and isinstance(module, Activation):
        each = list(module.instances())
    elif not visit.is_call and not is_gate(module):
        each = [module.forward]
    return _weighed(each)


def _weighed(each: Sequence[Function]) -> list[tuple[Function, int]]:
    """The distinct functions among those of the channels, and how many channels have each.

    Of more than `_MOST`, those at that many places along the channels, first and last included.
    """
    # by their text: equal instances and equal slopes print alike
    if len(set(map(repr, each))) > _MOST:
        each = [each[round(k * (len(each) - 1) / (_MOST - 1))] for k in range(_MOST)]
    counts = Counter(map(repr, each))
    return [(f, counts[text]) for text, f in {repr(f): f for f in each}.items()]


def _row(name: str, site: _Site, sigma_w: float | None) -> LayerTheory:
    variance, weights = site.variance, [count for _, count in site.functions]
    if not math.isfinite(variance):
        raise ValueError("its inputs are empty, NaN or infinite")

    def mean(figures: Iterable[float]) -> float:
        """Over the channels."""
        return sum(v * w for v, w in zip(figures, weights, strict=True)) / sum(weights)

    functions = [curve(f) for f, _ in site.functions]
    each = [moments(f, max(variance, 1e-12), site.mean) for f in functions]
    gain = mean(m.slope for m in each)
    bend = mean(m.curvature for m in each)
    growth = mean(m.growth for m in each)
    measured = mean(f(site.some, 1).pow(2).mean().item() for f in functions)
    return LayerTheory(
        name=name,
        kind=site.kind,
        mean=site.mean,
        variance=variance,
        gain=gain,
        measured_gain=measured,
        critical=gain**-0.5 if gain else math.inf,
        sigma_w=sigma_w,
        chi=None if sigma_w is None else sigma_w**2 * gain,
        beta=2 * gain / (variance * bend) if variance * bend else math.inf,
        chi_q=growth / gain if gain else math.nan,
    )
