"""What learned gates do while they train: scalars, histograms and figures, and where they go.

A writer is TensorBoard's `SummaryWriter` or anything like it; `JsonLines` is one that needs nothing
but a file. Gates that are shared out (FSDP2) are gathered, so every process has to ask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from threshold_gating import primitive
from threshold_gating.conversion.checkpoint.digest import whole
from threshold_gating.conversion.learn import learned_gates
from threshold_gating.conversion.site import site_name
from threshold_gating.conversion.text import jsonable
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.attention import Temperature
from threshold_gating.nn.spec import gates_of
from threshold_gating.primitive import Value
from threshold_gating.training.families import TOLERANCE, Slopes, recurrent_gates

BINS = 32  # of a histogram in a JSON line
_MOST = 16  # curves in a figure
_POINTS = 201  # of a curve


class Writer(Protocol):
    """What `torch.utils.tensorboard.SummaryWriter` and its like have.

    One with `add_histogram(name, values, step)` is given histograms, too.
    """

    def add_scalar(self, name: str, value: float, step: int) -> object: ...


class LearnedSite(NamedTuple):
    """A gate as it is: tensors [G] for what is learned or held, numbers where known. `learned` is
    empty for a frozen one, as `insight` reads them beside those that learn.

    `start` is None for a temperature of attention, which is no function of one number. The groups
    have the shape `group`, from `axis` of the input on.
    """

    name: str
    learned: tuple[str, ...]
    start: TG | None
    tau: Sequence[Value]
    theta: Sequence[Value]
    s: Sequence[Value]
    c: Sequence[Value]
    share: str = "layer"
    group: tuple[int, ...] = (1,)
    axis: int = 1

    def values(self) -> dict[str, Tensor]:
        """What is learned, by name: "tau", "theta_1", ..; [G] each."""
        return {
            f"{what}_{k + 1}" if len(rows) > 1 else what: row
            for what, rows in (
                ("tau", self.tau),
                ("theta", self.theta),
                ("s", self.s),
                ("c", self.c),
            )
            if what in self.learned
            for k, row in enumerate(rows)
            if isinstance(row, Tensor)
        }

    def scalars(self, tol: float) -> dict[str, float]:
        """The spread of tau and theta, and how many groups have left their family."""
        rows = {k: row for k, row in self.values().items() if k.startswith(("tau", "theta"))}
        found = _spread(self.name, rows)
        if "s" in self.learned:
            slopes = [w for w in self.s if isinstance(w, Tensor)]
            assert self.start is not None  # a temperature has no slopes
            left = Slopes.of(self.name, self.start, slopes, tol).left(tol)
            found[f"{self.name}/left_family"] = float(left.sum())
        return found

    def at(self, x: Tensor, groups: Sequence[int]) -> Tensor:
        """y of some of the groups at points x: [points, groups]."""
        return self.of(groups).blend(x.double().cpu().expand(len(groups), -1)).T

    def of(self, groups: Sequence[int]) -> LearnedSite:
        """The same gate for some of the groups alone."""

        def some(row: Sequence[Value]) -> list[Value]:
            full = [w.expand(self.groups) if isinstance(w, Tensor) else w for w in row]
            return [w[list(groups)] if isinstance(w, Tensor) else w for w in full]

        rows = {what: some(getattr(self, what)) for what in ("tau", "theta", "s", "c")}
        return self._replace(**rows, group=(len(groups),))  # type: ignore[arg-type]

    def blend(self, x: Tensor) -> Tensor:
        """y of x, [groups, points], evaluated by the formulas in the type of x."""
        t = self.start
        assert t is not None  # a temperature is no function of one number
        if not self.learned:
            return t(x)  # with all that a learned one cannot have
        tau, theta, s, c = self._columns(x)
        return primitive.blend(x, tau, theta, s, c, form=t.form, owner=t.owner, clamp=t.clamp)

    def gates(self, x: Tensor) -> Tensor:
        """The gates of x: [K, groups, points]."""
        t = self.start
        assert t is not None
        tau, theta, _, _ = self._columns(x)
        return primitive.gates(x, tau, theta, form=t.form, owner=t.owner)

    def _columns(self, x: Tensor) -> tuple[Any, list[Value], list[Value], list[Value]]:
        def column(w: Value) -> Value:
            return w.to(x).unsqueeze(-1) if isinstance(w, Tensor) else w

        tau, theta, s, c = ([column(w) for w in r] for r in (self.tau, self.theta, self.s, self.c))
        return tau if len(tau) > 1 else tau[0], theta, s, c

    @property
    def groups(self) -> int:
        rows = (*self.tau, *self.theta, *self.s, *self.c)
        return max((w.numel() for w in rows if isinstance(w, Tensor)), default=1)


def learned_sites(model: nn.Module) -> Iterator[LearnedSite]:
    """Every learned gate of a network: activations, calls, tiers, recurrent layers, attention."""
    for name, act in learned_gates(model):
        yield site_of(name or type(act).__name__.lower(), act)
    for module, path, gate, learned, t in recurrent_gates(model):
        at = path or type(module).__name__.lower()
        tau, theta, s, c = (_numbers(w) for w in ((t.tau,), (t.theta,), t.s, t.c))
        name = f"{at}.{gate}"
        yield LearnedSite(name, learned, t.start, tau, theta, s, c, "channel", axis=-1)
    for path, module in model.named_modules():
        for prefix, spec in gates_of(module).items():
            if isinstance(spec, Temperature):
                tau = _numbers([spec.tau(module, prefix, None)])
                at = site_name(path, prefix)
                yield LearnedSite(at, spec.learned, None, tau, (), (), (), spec.share)


def site_of(at: str, act: Activation) -> LearnedSite:
    """An element-wise gate at the site `at` as it is now, learned or not."""
    held = {name: whole(t) for name, t in {**act._buffers, **act._parameters}.items()}
    rows = act._structure.rows(act._structure.tensors(held, act))
    tau, theta, s, c = (_numbers(row) for row in rows)
    shared = act.share, act.group, act.axis
    return LearnedSite(at, act.learned, act.init, tau, theta, s, c, *shared)


def _numbers(row: Sequence[Value]) -> list[Value]:
    return [whole(w).detach().flatten() if isinstance(w, Tensor) else w for w in row]


@torch.no_grad()
def gate_scalars(model: nn.Module, *, tol: float = TOLERANCE) -> dict[str, float]:
    """The least, the mean and the largest tau and theta of each learned site, by name.

    "act/tau/mean"; with several thresholds "act/theta_1/mean", ... Where slopes are learned also
    "act/left_family": how many of the site's groups (channels, units) no longer are of the family
    (Table 3) they started in, slopes up to `tol` taken as 0.
    """
    found: dict[str, float] = {}
    for site in learned_sites(model):
        found |= site.scalars(tol)
    return found


@torch.no_grad()
def gate_histograms(model: nn.Module) -> dict[str, Tensor]:
    """The values of all groups of each learned site, by name: "act/tau", "act/theta_1", [G]."""
    return {
        f"{site.name}/{what}": row
        for site in learned_sites(model)
        for what, row in site.values().items()
    }


@torch.no_grad()
def log_gates(
    model: nn.Module, writer: Writer, step: int, *, prefix: str = "gates", tol: float = TOLERANCE
) -> None:
    """Write `gate_scalars` of `model` at `step`, under "gates/", and `gate_histograms`.

    `writer` is a `SummaryWriter` of TensorBoard or any object with add_scalar(name, value, step);
    one that has add_histogram(name, values, step) gets the histograms.
    """
    sites = list(learned_sites(model))
    if not sites:
        raise ValueError(
            f"log_gates: {type(model).__name__} has no gate that learns tau, theta, s or c; make "
            "one with train=."
        )
    write_sites(sites, writer, step, prefix=prefix, tol=tol)


def write_sites(
    sites: Iterable[LearnedSite],
    writer: Any,
    step: int,
    *,
    prefix: str = "gates",
    tol: float = TOLERANCE,
) -> None:
    """Write the scalars and, where the writer takes them, the histograms of sites."""
    takes_histograms = hasattr(writer, "add_histogram")
    for site in sites:
        for name, value in site.scalars(tol).items():
            writer.add_scalar(f"{prefix}/{name}", value, step)
        for name, row in site.values().items() if takes_histograms else ():
            writer.add_histogram(f"{prefix}/{site.name}/{name}", row.cpu(), step)


class JsonLines:
    """A writer of one JSON object a line; each has "step" and what was written at that step.

    A file that is there is continued, as a run is that resumes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._row: dict[str, Any] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._at(step).setdefault("scalars", {})[name] = jsonable(value)

    def add_histogram(self, name: str, values: Tensor, step: int) -> None:
        self._at(step).setdefault("histograms", {})[name] = histogram(values)

    def add_text(self, name: str, text: str, step: int) -> None:
        self._at(step).setdefault("texts", {})[name] = text

    def _at(self, step: int) -> dict[str, Any]:
        if self._row.get("step") != step:
            self.flush()
            self._row = {"step": step}
        return self._row

    def flush(self) -> None:
        """Write what there is; a step that goes on later has a second line."""
        if self._row:
            with self.path.open("a+b") as file:
                if file.tell():  # a run that was killed may have left half a line
                    file.seek(-1, 2)
                    file.write(b"" if file.read() == b"\n" else b"\n")
                file.write(json.dumps(self._row).encode() + b"\n")
        self._row = {}

    close = flush


def histogram(values: Tensor) -> dict[str, Any]:
    """Counts in equal bins between the least and the largest, as JSON values; NaN apart."""
    flat = values.detach().double().flatten().cpu()
    finite = flat[flat.isfinite()]
    if not len(finite):
        return {"low": None, "high": None, "counts": [], "not_finite": len(flat)}
    low, high = finite.aminmax()
    counts = torch.histc(finite, BINS, float(low), float(high)) if high > low else [len(finite)]
    return {
        "low": float(low),
        "high": float(high),
        "counts": [int(n) for n in counts],
        "not_finite": len(flat) - len(finite),
    }


@torch.no_grad()
def figure(site: LearnedSite, step: int) -> Any:
    """A matplotlib figure of a gate: its start, dashed, and up to 16 of its groups as they are."""
    from matplotlib.figure import Figure  # with no window and no state of its own

    t = site.start
    assert t is not None  # a temperature is not drawn
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    width = max(2.0, 4.0 / min(taus))
    now = torch.cat(
        [w.cpu().double() for w in site.theta if isinstance(w, Tensor)] or [torch.zeros(1)]
    )
    ends = [*t.theta, *now[now.isfinite()].tolist()]
    x = torch.linspace(min(ends) - width, max(ends) + width, _POINTS, dtype=torch.float64)
    some = sorted({round(k) for k in torch.linspace(0, site.groups - 1, _MOST).tolist()})
    made = Figure(figsize=(5, 3.2), layout="constrained")
    axes = made.add_subplot()
    axes.plot(x, site.at(x, some), linewidth=1)
    axes.plot(x, t(x), "k--", linewidth=1.5, label="start")
    shown = "" if site.groups <= _MOST else f", {len(some)} of {site.groups} groups"
    axes.set_title(f"{site.name}, step {step}{shown}", fontsize=9)
    axes.set_xlabel("x")
    axes.legend(loc="upper left", fontsize=8)
    return made


def distance(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> float:
    """How far the furthest value of a site has moved, of tau its logarithm."""
    far = [
        (now[k].log() - w.log() if k.startswith("tau") else now[k] - w).abs().max()
        for k, w in before.items()
    ]
    return float(torch.stack(far).max()) if far else 0.0


def _spread(name: str, rows: Mapping[str, Tensor]) -> dict[str, float]:
    if not rows:
        return {}
    # One transfer from the device for a site, not one for each figure.
    figures = torch.stack([f for t in rows.values() for f in (t.min(), t.mean(), t.max())]).tolist()
    keys = [f"{name}/{each}/{what}" for each in rows for what in ("min", "mean", "max")]
    return dict(zip(keys, figures, strict=True))
