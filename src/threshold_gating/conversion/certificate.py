"""`verify`: what a conversion changes, measured with the gates really evaluated (native off).

The original network runs once, and each of its sites is compared by itself (`local`). Then the
converted network runs, and the error of its output is what all sites make together; meanwhile it is
audited, so that a site that was not evaluated, or a nonlinearity that is none, cannot pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

import torch
from torch import nn

from threshold_gating import kernels
from threshold_gating.conversion import paired
from threshold_gating.conversion.audit import WIDTH, Audit, AuditedSite, columns, execute
from threshold_gating.conversion.local import Error, Local, difference, floats
from threshold_gating.conversion.running import evaluating, fresh

# Ulp of the largest output that exact sites may make together. Rounding grows with depth: 25 are
# common. More than this is no rounding, though 16-bit types reach it.
_OUTPUT = 1024


@dataclass(frozen=True)
class Row:
    """A site's local error over all its calls, in the original's inputs.

    `rel_rms` is relative to the original's values; `ulp` (of exact sites) counts units in the last
    place of each value, or of the largest one for softmax, attention and recurrence. `ok` is None
    where nothing was evaluated, and `note` says why.
    """

    site: str
    kind: str
    K: int | None
    exact: bool
    max: float = 0.0
    rms: float = 0.0
    rel_rms: float = 0.0
    ulp: float | None = None
    bitwise: bool | None = None
    calls: int = 0
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Output:
    """The error at the output, over all its floating-point tensors: largest, the same relative to
    the largest value, root mean square, and that relative to the values'."""

    max: float
    relative: float
    rms: float
    rel_rms: float


@dataclass(frozen=True)
class Certificate:
    """What `verify` measured; `failed` says for each place that is not as it should be why.

    `output` is None where the networks give no floating-point tensor to compare.
    """

    rows: tuple[Row, ...]
    output: Output | None
    metric: paired.Metric | None
    failed: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every site is within its class and nothing was left out unasked."""
        return not self.failed

    def table(self) -> str:
        """The certificate as text, within 100 columns."""
        header = ("site", "kind", "K", "max", "rms", "rel", "ulp", "calls", "class")
        lines = columns([header, *map(_cells, self.rows)])
        o, m = self.output, self.metric
        said = ["output: no floating-point tensor to compare"]
        if o is not None:
            said = [f"output: max {o.max:.2e}, max|d|/max|y| {o.relative:.2e}, rms {o.rms:.2e}"]
        if m is not None:
            span = f"[{m.interval[0]:+.4g}, {m.interval[1]:+.4g}]"
            said.append(
                f"{m.name}: {m.baseline:.6g} -> {m.converted:.6g}, difference {m.delta:+.4g} "
                f"{span} (95 %), equal on {m.agreement:.2%} of {m.n}"
            )
        done, verdict = sum(row.ok is not None for row in self.rows), f"{len(self.failed)} failed"
        count = f"{done} of {len(self.rows)} sites evaluated with native off"
        said += [f"{count}: {'ok' if self.ok else verdict}", *self.failed.values()]
        return "\n".join([*lines, "", *(fill(s, WIDTH, subsequent_indent="  ") for s in said)])

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {**asdict(self), "failed": dict(self.failed), "ok": self.ok}

    def to_json(self) -> str:
        """The same as JSON text; a number that JSON has not (inf, nan) is a string."""
        return json.dumps(_plain(self.to_dict()), indent=2, allow_nan=False)


def verify(
    model: nn.Module,
    converted: nn.Module,
    *args: Any,
    metric: paired.Measure | tuple[str, paired.Measure] | None = None,
    **kwargs: Any,
) -> Certificate:
    """Compare `converted` with the `model` it was made from, on these inputs, with native off.

    Both run in evaluation mode and without gradients; modes and inputs stay as they were.

    Args:
        model: the original network.
        converted: what `convert` made of it.
        args, kwargs: what both are called with.
        metric: from the output, one truth value or number for each sample, for a paired
            comparison; a function or (name, function).
    """
    _check_modules(model, converted)
    local = Local(model, converted)
    given = fresh((args, kwargs))
    with kernels.use("reference"):
        # Each starts from the same random numbers, should it draw any.
        with torch.random.fork_rng(devices=[]), evaluating(model), local.running, local:
            want = model(*given[0], **given[1])
        with torch.random.fork_rng(devices=[]):
            have, seen = execute(converted, args, kwargs)
    rows = _rows(local.errors, seen)
    output = _output(want, have)
    failed = {
        **{row.site: local.errors[row.site].message for row in rows if row.ok is False},
        **_not_evaluated(rows, seen),
        **_weights(model, converted),
        **_whole(output, rows, want),
    }
    compared = None if metric is None else paired.compare(metric, want, have)
    return Certificate(rows, output, compared, failed)


def _check_modules(model: nn.Module, converted: nn.Module) -> None:
    names = {name for name, _ in converted.named_modules(remove_duplicate=False)}
    if missing := [name for name, _ in model.named_modules() if name not in names]:
        raise ValueError(
            f"verify: converted was not made from model: it has no module {missing[0]!r}."
        )


def _rows(errors: Mapping[str, Error], seen: Audit) -> tuple[Row, ...]:
    """One row for each site of the original that was reached, then those that no run reaches."""
    audited = {site.name: site for site in seen.sites}
    rows = [_row(name, error, audited.get(name)) for name, error in errors.items()]
    idle = [site for site in seen.sites if not site.calls and site.name not in errors]
    never = [Row(s.name, s.kind, s.K, bool(s.exact), note="never called") for s in idle]
    return (*rows, *never)


def _row(name: str, error: Error, seen: AuditedSite | None) -> Row:
    site = error.site
    K = None if site.t is None else site.t.K
    if seen is None or seen.native or not seen.calls or not error.elements:
        return Row(name, site.kind, K, site.exact, calls=error.calls, note="not evaluated")
    rms = math.sqrt(error.squares / error.elements)
    return Row(
        name,
        site.kind,
        K,
        site.exact,
        max=error.max,
        rms=rms,
        rel_rms=math.sqrt(error.squares / error.size) if error.size else math.inf if rms else 0.0,
        ulp=error.ulp if site.exact else None,
        bitwise=error.bitwise,
        calls=error.calls,
        ok=not error.message,
    )


def _not_evaluated(rows: tuple[Row, ...], seen: Audit) -> dict[str, str]:
    """Sites that the gates did not compute, and nonlinearities that are no site."""
    failed = {}
    reached = {row.site for row in rows if row.calls}
    for site in seen.sites:
        if site.native:
            failed[site.name] = f"{site.name} was not evaluated: torch's own op ran."
        elif not site.calls and site.name in reached:
            failed[site.name] = f"{site.name} was not evaluated: converted does not call it."
        elif site.calls and site.name not in reached:
            failed[site.name] = f"{site.name} was not compared: model does not call it."
    for op in seen.left:
        if not op.asked:
            where = op.module or "the network itself"
            key, calls = f"{op.module}:{op.op}", f"calls: {op.calls}"
            failed[key] = f"{op.op} ran outside the gates, in {where} ({calls})."
    return failed


def _weights(model: nn.Module, converted: nn.Module) -> dict[str, str]:
    """Whether the networks differ in what is no site."""
    after = {**dict(converted.named_parameters()), **dict(converted.named_buffers())}
    changed = [
        name
        for name, t in (*model.named_parameters(), *model.named_buffers())
        if name in after and not t.is_meta and not _is_same(t, after[name])
    ]
    if not changed:
        return {}
    return {"weights": f"{len(changed)} weights are not the original's, among them {changed[0]}."}


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN is what NaN was."""
    return torch.equal(a, b) or (
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def _output(want: Any, have: Any) -> Output | None:
    pairs = list(zip(floats(want), floats(have), strict=False))
    shapes = [[tuple(t.shape) for t in floats(y)] for y in (want, have)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"verify: the outputs differ in shape: {shapes[0]} and, converted, {shapes[1]}."
        )
    d = [difference(y, z) for y, z in pairs if y.numel()]
    y = [y.double().nan_to_num(0, 0, 0) for y, _ in pairs if y.numel()]
    if not d:
        return None
    largest, size = (max(t.abs().max().item() for t in each) for each in (d, y))
    squares, total = (sum(t.square().sum().item() for t in each) for each in (d, y))
    n = sum(t.numel() for t in d)
    return Output(
        largest, largest / (size or 1.0), math.sqrt(squares / n), math.sqrt(squares / (total or n))
    )


def _whole(output: Output | None, rows: tuple[Row, ...], want: Any) -> dict[str, str]:
    if output is None:
        return {}
    if not math.isfinite(output.max):
        return {"output": "the output has infinities or NaN where the original's has not."}
    eps = max(torch.finfo(t.dtype).eps for t in floats(want))
    exact = all(row.exact for row in rows if row.ok is not None)
    if exact and output.relative > _OUTPUT * eps:
        return {
            "output": f"the output is off by {output.relative:.3g} of its largest value, though "
            f"every site is exact; {_OUTPUT * eps:.3g} is allowed."
        }
    return {}


def _cells(row: Row) -> tuple[str, ...]:
    K = "" if row.K is None else str(row.K)
    if row.ok is None:
        return (row.site, row.kind, K, *("",) * 4, str(row.calls), row.note)
    errors = (f"{e:.1e}" if e else "0" for e in (row.max, row.rms, row.rel_rms))
    ulp = "" if row.ulp is None else "bitwise" if row.bitwise else f"{row.ulp:.3g}"
    what = "FAILED" if not row.ok else "exact" if row.exact else "approximate"
    return (row.site, row.kind, K, *errors, ulp, str(row.calls), what)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
