"""Crossbars: weights as pairs of conductances, in tiles; see `crossbar_layers` for the layers.

A weight is the difference of two cells, w = (G+ - G-) w_max / (g_max - g_min), in two columns of
one tile. Inputs are row voltages; a column's current is the sum over the rows of its tile, and the
sums of several tiles are added digitally, each behind its own converter. Everything that is fixed
when a chip is made (programming error, levels, drift, stuck cells, wire resistance to first order)
changes the weights; converters, the cells' sinh and read noise act on every product.

The bias is added behind the converter. Gradients pass through: rounding passes them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating.hardware.drawn import Drawn, check_run, normal, uniform
from threshold_gating.hardware.figure import is_number
from threshold_gating.hardware.seen import Products
from threshold_gating.primitive import wide

if TYPE_CHECKING:
    from threshold_gating.hardware.crossbar_layers import Layer

Bits = int | None | Mapping[str, int | None]
LARGEST_DROP = 0.3  # of a cell's voltage; a first-order estimate is off by about its square


@dataclass(frozen=True)
class Crossbar:
    """How a layer's products are computed; the defaults are ideal.

    Args:
        rows, columns: cells of a tile; a weight takes one row and two columns, counted as one.
            None: as large as the layer.
        g_min, g_max: range of a cell's conductance, in siemens.
        levels: conductances that a cell can be set to; None: any.
        programming: standard deviation of a cell about what it was set to, as a share of g_max. No
            conductance is below 0: at g_min = 0 the idle cell of a weight can only be too high, and
            weights get smaller by 0.4 times this share of w_max on average. A g_min of some
            standard deviations gives exactly the error asked.
        read: the same, anew in every product.
        output: noise of a column's current in every product, as a share of that of one cell at
            g_max and full voltage.
        drift, drift_sigma: mean and spread of nu in G (seconds / 20)^-nu over the cells.
        seconds: when it is read, after programming; at least 20, when drift is counted from.
        compensate: scale each layer so that its mean |w| is that before drift.
        sinh: b in I = G sinh(b V) / b, 1/V; 0: linear.
        volts: row voltage of the largest input.
        wire: resistance of a wire from cell to cell, in ohms.
        stuck_low, stuck_high: shares of cells that stay at g_min and at g_max.
        dac_bits, adc_bits: of the converters at rows and columns, 2^bits - 1 codes; None: there is
            none. A dict has them by layer: {"layer1.*": 6, "*": None}; its first match counts.
        adc_range: full scale of a converter, in currents of one cell at g_max and full voltage;
            None: the largest column current that was seen in calibration, of all columns.
        per_column: w_max is that of each column, not of the layer.
    """

    rows: int | None = None
    columns: int | None = None
    g_min: float = 0.0
    g_max: float = 25e-6
    levels: int | None = None
    programming: float = 0.0
    read: float = 0.0
    output: float = 0.0
    drift: float = 0.0
    drift_sigma: float = 0.0
    seconds: float = 20.0
    compensate: bool = True
    sinh: float = 0.0
    volts: float = 0.2
    wire: float = 0.0
    stuck_low: float = 0.0
    stuck_high: float = 0.0
    dac_bits: Bits = field(default=None, hash=False)
    adc_bits: Bits = field(default=None, hash=False)
    adc_range: float | None = None
    per_column: bool = True

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            whole = name in _WHOLE
            fits = is_number(value) and (not whole or isinstance(value, int))
            if not fits or not low <= value <= high:
                span = (
                    f"a whole number from {low} to {high}" if whole else f"from {low:g} to {high:g}"
                )
                raise ValueError(f"Crossbar: {name} must be {span}; got {value!r}.")
        if self.g_max <= self.g_min:
            raise ValueError(
                f"Crossbar: g_max must be above g_min; got {self.g_max:g} S and {self.g_min:g} S."
            )
        if self.stuck_low + self.stuck_high > 1:
            raise ValueError(
                "Crossbar: stuck_low and stuck_high are shares of the same cells, together at most "
                f"1; got {self.stuck_low:g} + {self.stuck_high:g}."
            )
        for name in ("dac_bits", "adc_bits"):
            given = getattr(self, name)
            for bits in given.values() if isinstance(given, Mapping) else (given,):
                if bits is not None and (type(bits) is not int or bits not in range(2, 25)):
                    raise ValueError(
                        f"Crossbar: {name} must be from 2 to 24, or None; got {bits!r}."
                    )

    @property
    def low(self) -> float:
        """g_min as a share of g_max."""
        return self.g_min / self.g_max

    def bits(self, converter: str, layer: str) -> int | None:
        """Of "dac" or "adc" at a layer."""
        given: Bits = getattr(self, f"{converter}_bits")
        if not isinstance(given, Mapping):
            return given
        return next((bits for name, bits in given.items() if fnmatchcase(layer, name)), None)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


_RANGES = (
    *(("rows", 1, 2**20), ("columns", 1, 2**20), ("g_min", 0.0, 1.0), ("g_max", 1e-12, 1.0)),
    *(("levels", 2, 2**24), ("programming", 0.0, 1.0), ("read", 0.0, 1.0), ("output", 0.0, 1e3)),
    *(("drift", 0.0, 1.0), ("drift_sigma", 0.0, 1.0), ("seconds", 20.0, 1e12)),
    *(("sinh", 0.0, 100.0), ("volts", 1e-4, 10.0), ("wire", 0.0, 1e6)),
    *(("stuck_low", 0.0, 1.0), ("stuck_high", 0.0, 1.0), ("adc_range", 1e-6, 1e9)),
)


_WHOLE = ("rows", "columns", "levels")
_MAY_BE_NONE = (*_WHOLE, "adc_range")


class Array(Drawn):
    """The cells of one layer, drawn for each chip, and what was seen of its inputs and sums."""

    error: Tensor
    drifting: Tensor
    broken: Tensor

    def __init__(self, name: str, settings: Crossbar) -> None:
        super().__init__()
        self.name, self.settings = name, settings
        self.watching = False
        self.in_run: bool | None = None  # None: not in a network that runs
        self.seen, self.worst_drop = Products(), 0.0

    def draw(self, seed: int, draws: int, weight: Tensor) -> None:
        """Make the cells of `draws` chips."""
        s, shape, cells = self.settings, (2, *weight.flatten(1).shape), f"{self.name}/cells"
        wanted = {
            "error": (s.programming, normal),
            "drifting": (s.drift_sigma, normal),
            "broken": (s.stuck_low + s.stuck_high, uniform),
        }
        for key, (needed, make) in wanted.items():
            if needed:
                self.put(key, make(seed, f"{cells}/{key}", draws, shape).to(weight.device))

    def multiply(self, layer: Layer, x: Tensor) -> Tensor:
        """The product of a layer, column by column of every tile."""
        check_run(self)
        weight = torch.unflatten(wide(layer.weight).flatten(1), 0, (layer.groups, -1))  # (G, O, R)
        v, top = self._voltages(x)
        cells = weight if self.watching else self.weights(weight)
        partial, size = self._products(layer, v, cells)  # (..., G, T, O)
        limit = self._largest(weight.detach()).transpose(-1, -2)
        if self.watching:
            self.seen.add(x, partial, limit)
        else:
            partial = self._converted(self._noisy(partial, size, limit), limit, top)
        return layer.assembled(partial.sum(-2)) * top

    def _products(self, layer: Layer, v: Tensor, w: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """The sums of each tile's columns, (..., G, T, O), and sum v^2 of its rows."""
        height = self.settings.rows
        if height is None:  # one tile: the layer's own product

            def whole(v: Tensor, w: Tensor) -> Tensor:
                return layer.columns(layer.whole(v, w.flatten(0, 1))).unsqueeze(-2)

            return whole(v, w), lambda: whole(v.square(), torch.ones_like(w[:, :1]))
        rows = _tiled(layer.rows(v), height)
        partial = torch.einsum("...gtr,gotr->...gto", rows, _tiled(w, height))
        return partial, lambda: rows.square().sum(-1, keepdim=True)

    def _voltages(self, x: Tensor) -> tuple[Tensor, float]:
        """Inputs as shares of the largest row voltage, through the cells' sinh, and the largest."""
        s, bits = self.settings, self._bits("dac")
        if self.watching or not self._needs_voltages:
            return x, 1.0
        v = x / self.seen.largest_input
        if bits:
            v = _rounded(v.clamp(-1.0, 1.0), 2.0 / (2**bits - 2))
        if s.sinh:
            v = torch.sinh(s.sinh * s.volts * v) / (s.sinh * s.volts)
        return v, self.seen.largest_input

    @property
    def _needs_voltages(self) -> bool:
        s = self.settings
        return bool(self._bits("dac") or s.sinh or s.read or s.output or s.adc_range)

    def settle(self) -> None:
        """Refuse what was seen in calibration where voltages and full scales cannot follow it."""
        by_current = self._bits("adc") is not None and self.settings.adc_range is None
        if not (self._needs_voltages or by_current):
            return
        seen, layer = self.seen, f"simulate: the layer {self.name}"
        if not (math.isfinite(seen.largest_input) and math.isfinite(seen.largest_sum)):
            raise ValueError(
                f"{layer} saw inf or NaN in calibration, so that its voltages are not known; give "
                "inputs for which the network computes numbers."
            )
        if self._needs_voltages and not seen.largest_input:
            raise ValueError(
                f"{layer} saw nothing but zeros in calibration, so that its voltages are not "
                "known; give inputs that reach it."
            )
        if by_current and not seen.largest_current:
            raise ValueError(
                f"{layer} had no column current in calibration, as its inputs or its weights are "
                "all 0, so that the full scale of its converters is not known; give adc_range, or "
                "adc_bits by layer, with None for this one."
            )

    def _bits(self, converter: str) -> int | None:
        return self.settings.bits(converter, self.name)

    def _largest(self, weight: Tensor) -> Tensor:
        """w_max, (..., O, 1); 1 where a column has no weight at all."""
        size = weight.abs()
        top = size.amax(-1, keepdim=True)
        top = top if self.settings.per_column else top.max().expand_as(top)
        return torch.where(top > 0, top, 1.0)

    def _noisy(self, partial: Tensor, size: Callable[[], Tensor], limit: Tensor) -> Tensor:
        s = self.settings
        cell = limit / (1 - s.low)  # the weight of one cell at g_max
        if s.read:  # of both cells of a weight, in every row
            # of rows that are all at 0 the root has no gradient
            spread = s.read * math.sqrt(2) * cell * size().clamp(min=1e-30).sqrt()
            partial = partial + spread * torch.randn_like(partial)
        if s.output:
            partial = partial + s.output * cell * torch.randn_like(partial)
        return partial

    def _converted(self, partial: Tensor, limit: Tensor, top: float) -> Tensor:
        s, bits = self.settings, self._bits("adc")
        if bits is None:
            return partial
        if s.adc_range is None:
            full = self.seen.largest_current / top * limit
        else:
            full = s.adc_range * limit / (1 - s.low)
        inside = torch.minimum(torch.maximum(partial, -full), full)
        return _rounded(inside, 2.0 * full / (2**bits - 2))

    def weights(self, weight: Tensor) -> Tensor:
        """The weights that the cells really have, for (..., O, R) that they should have."""
        s, low, g = self.settings, self.settings.low, self._cells(weight)
        if s.levels is not None:
            g = low + _rounded(g - low, (1 - low) / (s.levels - 1))
        if s.programming:
            g = (g + s.programming * self.error.view_as(g)).clamp(min=0.0)
        later = self._drifted(g)
        if s.stuck_low or s.stuck_high:  # what is stuck does not drift
            g, later = self._stuck(g), self._stuck(later)
        if s.compensate and self._drifts:
            was, now = ((w[0] - w[1]).abs().mean() for w in (g, later))
            later = later * (was / now.clamp(min=1e-30))
        g = later * (1 - self._drop(later)) if s.wire else later
        return (g[0] - g[1]) * self._largest(weight) / (1 - low)

    def _cells(self, weight: Tensor) -> Tensor:
        """What both cells of each weight are to be set to, as shares of g_max.

        One of them alone has the gradient of a weight that is 0.
        """
        low, share = self.settings.low, weight / self._largest(weight)
        above = share.clamp(min=0.0)
        return low + (1 - low) * torch.stack([above, above - share])

    def _drifted(self, g: Tensor) -> Tensor:
        if not self._drifts:
            return g
        s = self.settings
        spread = s.drift_sigma * self.drifting.view_as(g) if s.drift_sigma else 0.0
        nu = torch.as_tensor(s.drift + spread, device=g.device).clamp(min=0.0)
        later: Tensor = g * (s.seconds / 20.0) ** -nu
        return later

    @property
    def _drifts(self) -> bool:
        s = self.settings
        return s.seconds != 20.0 and bool(s.drift or s.drift_sigma)

    def _stuck(self, g: Tensor) -> Tensor:
        s, chance = self.settings, self.broken.view_as(g)
        g = torch.where(chance < s.stuck_low, s.low, g)
        return torch.where(chance > 1 - s.stuck_high, 1.0, g)

    def _drop(self, g: Tensor) -> Tensor:
        """The share of its voltage that a cell loses in the wires, to first order.

        Row wires are driven at the first column, column wires sensed at the first row. A cell at
        (i, j) has min(j, l) row segments in common with the current of column l, and min(i, k)
        column segments with that of row k. The latter is a share of other rows' voltages; as
        min(i, k) = min(k, i) the sum over the column is as if it were of its own.
        """
        s = self.settings
        height, width = min(s.rows or g.shape[-1], g.shape[-1]), s.columns or g.shape[-2]
        tiles = _tiled(g, height)  # (2, ..., O, T, rows)
        count = tiles.shape[-3]
        columns = torch.unflatten(F.pad(tiles, (0, 0, 0, 0, 0, -count % width)), -3, (-1, width))
        along = torch.einsum("jl,...ltr->...jtr", _shared(width, g), columns.sum(0))
        down = torch.einsum("ik,...jtk->...jti", _shared(height, g), columns)
        drop = s.wire * s.g_max * (along + down).flatten(-4, -3)[..., :count, :, :]
        return drop.flatten(-2)[..., : g.shape[-1]]

    def check(self, weight: Tensor) -> None:
        """Refuse wires whose drop is beyond what the first order describes."""
        if not self.settings.wire:
            return
        s = self.settings
        self.worst_drop = self._drop(self._cells(weight)).max().item()
        if self.worst_drop > LARGEST_DROP:
            fits = s.wire * LARGEST_DROP / self.worst_drop
            raise ValueError(
                f"Crossbar: at {self.name} wires of {s.wire:g} ohm a cell take "
                f"{self.worst_drop:.0%} of a cell's voltage, and IR drop is simulated to first "
                f"order, up to {LARGEST_DROP:.0%}; wires up to {fits:.2g} ohm, smaller tiles "
                "(rows, columns) or a lower g_max would work."
            )


def _shared(n: int, like: Tensor) -> Tensor:
    """min(i, k) for i, k = 1 .. n."""
    at = torch.arange(1, n + 1, dtype=like.dtype, device=like.device)
    return torch.minimum(at[:, None], at)


def _tiled(rows: Tensor, height: int) -> Tensor:
    """(..., R) as (..., T, height), the last tile filled up with rows that are not driven.

    A tile that is higher than the layer is cut to it: most of a depthwise layer's would be empty.
    """
    height = min(height, rows.shape[-1])
    return torch.unflatten(F.pad(rows, (0, -rows.shape[-1] % height)), -1, (-1, height))


def _rounded(x: Tensor, step: Any) -> Tensor:
    """To multiples of a step; its gradient is that of x."""
    off: Tensor = torch.round(x / step) * step - x
    return x + off.detach()
