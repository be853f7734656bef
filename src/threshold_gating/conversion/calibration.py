"""`calibrate`: gates fitted to what the network feeds each site (App. F); unseen values decide.

The network runs as it is. Of all inputs of each approximate element-wise site a uniform sample is
kept, of fixed size; most of it is fitted, the rest decides whether the fit is used or the instance
that `convert` would take by itself. Exact sites need no calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion import aten_ops
from threshold_gating.conversion.choices import instance_at
from threshold_gating.conversion.plan import refuse
from threshold_gating.conversion.sampling import Sampled, Sampler
from threshold_gating.conversion.site import ConversionError
from threshold_gating.conversion.text import columns, some
from threshold_gating.conversion.watch import evaluating
from threshold_gating.fitting import Fit, fit, match
from threshold_gating.instance import TG

Progress = Callable[[str, float], None]  # what is done now, and the share that is done

_INPUTS = 640  # of the paper's recipe
_LARGEST_K = 8  # that max_error may ask for
_FIGURES = ("values", "heldout", "seen", "default_error", "error")
_STARTS = 4  # besides the default; 16 take two to three times as long


@dataclass(frozen=True)
class SiteFit:
    """What was found for a site; both errors are in the objective, over the held-out values.

    `default` is what stands there without calibration, with as many branches. `values` were kept
    of the `seen`; `heldout` of them were not fitted.
    """

    site: str
    kind: str
    fit: Fit
    error: float
    default: TG
    default_error: float
    values: int
    heldout: int
    seen: int

    @property
    def chosen(self) -> str:
        """Which instance stands there: "calibrated", or "default" where the fit is no better."""
        return "calibrated" if self.error < self.default_error else "default"

    @property
    def least(self) -> float:
        """The error of the instance chosen."""
        return min(self.error, self.default_error)

    @property
    def t(self) -> TG:
        """The instance chosen."""
        return self.fit.t if self.chosen == "calibrated" else self.default


@dataclass(frozen=True, eq=False)
class Calibration(Mapping[str, TG]):
    """The instance for each approximate site, to be given to `convert` as its `sites`."""

    fits: Mapping[str, SiteFit]

    def __getitem__(self, site: str) -> TG:
        return self.fits[site].t

    def __iter__(self) -> Iterator[str]:
        return iter(self.fits)

    def __len__(self) -> int:
        return len(self.fits)

    def __str__(self) -> str:
        fits = list(self.fits.values())
        header = ("site", "kind", "K", "values", "default", "calibrated", "chosen")
        lines = columns([header, *map(_cells, fits)])
        lines += ["", f"{self._count}, by the {fits[0].fit.objective} error on held-out values"]
        if warned := sum(bool(e.fit.warning) for e in fits if e.chosen == "calibrated"):
            lines.append(f"{warned} with a warning: see .fits[site].fit.warning")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Calibration: {self._count}>"

    @property
    def _count(self) -> str:
        better = sum(each.chosen == "calibrated" for each in self.fits.values())
        return f"{better} of {len(self)} sites calibrated"

    def to_dict(self) -> list[dict[str, Any]]:
        """What was found for each site as JSON values, without the instances."""
        return [
            {key: getattr(each, key) for key in ("site", "kind", *_FIGURES, "chosen")}
            | {"K": each.fit.K}
            for each in self.fits.values()
        ]


def _cells(each: SiteFit) -> tuple[str, ...]:
    errors = f"{each.default_error:.2e}", f"{each.error:.2e}"
    return each.site, each.kind, str(each.fit.K), str(each.values), *errors, each.chosen


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    K: int | None = None,
    max_error: float | None = None,
    objective: str = "rms",
    tails: str = "exact",
    values: int = 100_000,
    holdout: float = 0.1,
    recipe: str | None = None,
    seed: int = 0,
    progress: Progress = lambda text, share: None,
) -> Calibration:
    """Fit each approximate site of `model` to its own inputs; `convert(model, result)` uses it.

    Never worse than without: a fit is chosen only if it beats the default instance with as many
    branches (at K = 2 also the closed form of `match`) on values that were not fitted.

    Args:
        model: any network, not converted. It runs in evaluation mode, and stays as it was.
        batches: inputs, each as `convert` takes them: a tensor, a tuple of arguments or a dict;
            or a data loader's (inputs, labels), where the network does not take the labels.
        K: number of branches of every site; None keeps the default of each (5 for GELU).
        max_error: instead of K, the error on held-out values that the smallest K is to reach.
        objective: "rms" or "sup", for the fits and the choice.
        tails: "exact" or "free", as in `fit`.
        values: how many inputs of each site to keep, 8 to 10 bytes each, however many there are.
        holdout: the share of them that is not fitted.
        recipe: "paper" for App. F: K = 3, product form, nine parameters by Nelder-Mead on `values`
            values (the held-out come on top) of the first 640 inputs. Slow.
        seed: of the sample and the fits; the sample does not depend on the size of the batches.
        progress: called now and then with a line of text and the share that is done, from 0 to 1;
            `print` will do.

    Raises:
        ConversionError: the network does not run, has no approximate site, feeds NaN or infinity to
            one, or a site cannot be fitted. `site` names it.
    """
    options = _Options(K, max_error, objective, tails, values, holdout, recipe, seed)
    _check(options, batches)
    refuse(model)
    with evaluating(model):
        found = _collect(model, batches, options, progress)
        fits: dict[str, SiteFit] = {}
        with torch.device("cpu"), torch.enable_grad():  # the closed form differentiates
            for name, site in found.items():
                done, count = len(fits), len(found)
                progress(f"calibrate: fitting site {done + 1} of {count}, {name}", done / count)
                fits[name] = _fitted(name, site, options)
        progress(f"calibrate: {len(fits)} sites fitted", 1.0)
    return Calibration(fits)


@dataclass(frozen=True)
class _Options:
    K: int | None
    max_error: float | None
    objective: str
    tails: str
    values: int
    holdout: float
    recipe: str | None
    seed: int
    rows: dict[tuple[TG, int], TG] = field(default_factory=dict)  # defaults made on the way

    @property
    def kept(self) -> int:
        """How many values a site keeps."""
        return self.values if self.recipe is None else round(self.values / (1 - self.holdout))


def _check(o: _Options, batches: Iterable[Any]) -> None:
    if isinstance(batches, Tensor | Mapping):
        raise ValueError(
            f"calibrate: batches must be an iterable of inputs; got one {type(batches).__name__}. "
            "Put it into a list."
        )
    if o.recipe == "paper" and (o.K not in (None, 3) or o.max_error or o.objective != "rms"):
        raise ValueError("calibrate: recipe='paper' is K = 3 by RMS; leave K and the others out.")
    if o.K is not None and o.max_error is not None:
        raise ValueError("calibrate: give K or max_error, which chooses K, not both.")
    count = isinstance(o.K, int) and not isinstance(o.K, bool) and o.K >= 2
    for name, value, good, words in (
        ("K", o.K, o.K is None or count, "an integer >= 2, or None for each site's own"),
        ("max_error", o.max_error, o.max_error is None or o.max_error > 0, "positive, or None"),
        ("objective", o.objective, o.objective in ("rms", "sup"), "'rms' or 'sup'"),
        ("tails", o.tails, o.tails in ("exact", "free"), "'exact' or 'free'"),
        ("values", o.values, o.values >= 2, "at least 2"),
        ("holdout", o.holdout, 0 < o.holdout < 1, "between 0 and 1, neither included"),
        ("recipe", o.recipe, o.recipe in (None, "paper"), "None or 'paper'"),
    ):
        if not good:
            raise ValueError(f"calibrate: {name} must be {words}; got {value!r}.")


def _collect(
    model: nn.Module, batches: Iterable[Any], options: _Options, progress: Progress
) -> dict[str, Sampled]:
    """Run the network on all batches; the approximate sites in the order they ran."""
    sampler = Sampler(model, options.kept, options.seed)
    count = inputs = 0
    for count, batch in enumerate(batches, 1):
        progress(f"calibrate: running batch {count}", 0.0)
        sampler.run(batch)
        inputs += next((len(t) for t in aten_ops.tensors(batch) if t.dim()), 1)
        if options.recipe == "paper" and inputs >= _INPUTS:
            break
    if not count:
        raise ValueError("calibrate: batches is empty; give at least one input.")
    if not sampler.found:
        raise ConversionError(
            f"calibrate: no approximate site ran in {type(model).__name__}{_listed(sampler.exact)}"
            + "".join(f" {note}." for note in sampler.notes)
        )
    return sampler.found


def _listed(exact: Mapping[str, str]) -> str:
    if not exact:
        return ", nor any other nonlinearity."
    names = [f"{name} ({kind})" for name, kind in exact.items()]
    return f"; these are exact already, so convert it as it is: {some(names, 6)}."


def _fitted(name: str, site: Sampled, o: _Options) -> SiteFit:
    """The fit of a site with the K asked for, or the smallest that reaches `max_error`."""
    sample = site.inputs.sample()
    held = max(1, round(o.holdout * len(sample)))
    if len(sample) - held < 1:
        raise ConversionError(
            f"calibrate: {name} got {len(sample)} values, and at least 2 are needed; "
            "give more inputs.",
            name,
        )
    own = 3 if o.recipe else o.K or site.default.t.K
    tried = []
    for K in (own,) if o.max_error is None else range(2, _LARGEST_K + 1):
        try:
            tried.append(_with_branches(name, site, o, K, sample, held))
        except ValueError as error:
            raise ConversionError(f"{name} ({site.kind}): {error}", name) from error
        if o.max_error is None or tried[-1].least <= o.max_error:
            return tried[-1]
    best = min(tried, key=lambda each: each.least)
    raise ConversionError(
        f"calibrate: no K up to {_LARGEST_K} brings the {o.objective} error of {name} "
        f"({site.kind}) on held-out values to {o.max_error:.3g}; the best is {best.least:.3g} at "
        f"K = {best.fit.K}. Raise max_error.",
        name,
    )


def _with_branches(
    name: str, site: Sampled, o: _Options, K: int, sample: Tensor, held: int
) -> SiteFit:
    """The fit with K branches beside the default with as many."""
    unseen, fitted = sample[:held].double(), sample[held:]
    rivals = _defaults(name, site, K, o.rows)
    row = rivals[0]
    # in the family of the default, which can then be where it starts
    options: dict[str, Any] = {"form": row.form, "own_tau": isinstance(row.tau, tuple)}
    options |= {"tails": o.tails, "objective": o.objective, "start": row, "starts": _STARTS}
    if o.recipe is not None:
        options = {"recipe": o.recipe}
    best = fit(site.f, fitted, K, seed=o.seed, **options)
    true = site.f(unseen.clone())
    errors = [_error(t(unseen) - true, o.objective) for t in (best.t, *rivals)]
    least = min(errors[1:])
    default = rivals[errors[1:].index(least)]
    counts = len(sample), held, site.inputs.seen
    return SiteFit(name, site.kind, best, errors[0], default, least, *counts)


def _error(d: Tensor, objective: str) -> float:
    return float(d.abs().max() if objective == "sup" else d.square().mean().sqrt())


def _defaults(name: str, site: Sampled, K: int, rows: dict[tuple[TG, int], TG]) -> list[TG]:
    """What `convert` puts there with K branches and, for two, the closed form."""
    known = site.default
    if (known.t, K) not in rows:
        same = K == known.t.K
        rows[known.t, K] = known.t if same else instance_at(K, known, site.f, name)
    closed = []
    with suppress(ValueError):  # it has none
        closed = [match(site.f)] if K == 2 else []
    return [rows[known.t, K], *closed]
