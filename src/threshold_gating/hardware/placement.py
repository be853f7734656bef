"""Where the parts of a simulated network stand: gates at sites, layers on crossbars, and volts.

`simulate` copies a converted network, puts physical gates in the place of its activations and lets
others answer its calls, then runs it once with everything ideal: what each site sees in that run
fixes its shape and its voltages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.conversion import aten_ops
from threshold_gating.conversion.channels import Channels
from threshold_gating.conversion.plan import ConversionError, Site, run
from threshold_gating.conversion.watch import Run, Running, evaluating, fresh
from threshold_gating.hardware.crossbar import Array, Crossbar
from threshold_gating.hardware.crossbar_layers import LAYERS, put_on_crossbar, take_off_crossbar
from threshold_gating.hardware.drawn import check_run
from threshold_gating.hardware.figure import is_number
from threshold_gating.hardware.physical import AnalogGate, Chip
from threshold_gating.hardware.wholes import Elementwise, whole
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.dense import _Tiered
from threshold_gating.nn.rnn import _Gated

_FEATURES_LAST = (
    *(nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention),
    *(nn.RNNBase, nn.RNNCellBase),
)
_FEATURES_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
)


def check(model: nn.Module, what: str = "simulate") -> None:
    """Refuse a network without gates, one of chips already, or one whose calls are not known."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what}: model must be a network; got {type(model).__name__}.")
    if any(isinstance(m, AnalogGate) for m in model.modules()):
        raise ConversionError(
            f"{what}: {type(model).__name__} has the gates of hardware already; give the network "
            "that tg.convert made."
        )
    owners = [vars(m) for m in model.modules() if "tg_sites" in vars(m)]
    if not owners and not any(isinstance(m, Activation) for m in model.modules()):
        raise ConversionError(
            f"{what}: {type(model).__name__} has no gates; give tg.convert(model, inputs=...)."
        )
    if any(own["tg_sites"] is None for own in owners):
        raise ConversionError(
            f"{what}: the network was converted without inputs, so its calls are not known; give "
            "tg.convert(model, inputs=...)."
        )


class Chosen:
    """Which sites are analog, and which patterns were met."""

    def __init__(self, only: str | Sequence[str] | None, what: str = "simulate") -> None:
        self.what, self.kind = what, "analog" if what == "simulate" else "digital"
        self.patterns = [only] if isinstance(only, str) else only
        known = isinstance(only, str | Sequence) and all(isinstance(p, str) for p in only)
        if only is not None and not (known and only):
            raise ValueError(
                f"{what}: only is a name or pattern of sites, or a list of some; got {only!r}. "
                f"None makes every site {self.kind}."
            )
        self.met: set[str] = set()
        self.names: list[str] = []
        self.ideal: tuple[str, ...] = ()  # by the user's choice

    def __call__(self, name: str) -> bool:
        self.names.append(name)
        if self.patterns is None:
            return True
        hits = [p for p in self.patterns if matches(p, name)]
        self.met.update(hits)
        if not hits:
            self.ideal = (*self.ideal, name)
        return bool(hits)

    def check(self) -> None:
        if not self.names:
            raise ConversionError(f"{self.what}: no site of the network can be {self.kind}.")
        if unmet := [p for p in self.patterns or () if p not in self.met]:
            known = ", ".join(map(repr, self.names[:5]))
            raise ValueError(
                f"{self.what}: only={unmet[0]!r} matches no site; there are {known} ..."
            )


def matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ValueError(f"{pattern!r} is no pattern: {error}.") from error
    return pattern == name or fnmatchcase(name, pattern)


class Body(nn.Module):
    """The network with analog parts, and the gates of its calls, which have no place in it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.calls = nn.ModuleList()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for module in self.modules():
            if isinstance(module, AnalogModule):
                module.turn = 0
        gates, arrays = list(self.gates()), [array for array, _ in self.arrays()]
        for gate in gates:
            gate.known = {}
        _set_run(True, gates, arrays)
        try:
            return self.network(*args, **kwargs)
        finally:
            _set_run(False, gates, arrays)
            for gate in gates:
                gate.known = None

    def gates(self) -> Iterator[AnalogGate]:
        return (m for m in self.modules() if isinstance(m, AnalogGate))

    def arrays(self) -> Iterator[tuple[Array, Any]]:
        layers: Any = self.network.modules()
        return ((m.array, m) for m in layers if _is_on(m))


def _set_run(on: bool, *parts: Sequence[Any]) -> None:
    for each in (part for some in parts for part in some):
        each.in_run = on


class AnalogModule(nn.Module):
    """An activation of the network on physical gates: a set for each call in a run, or one."""

    def __init__(
        self, name: str, act: Activation, chip: Chip, calls: int, reused: bool = False
    ) -> None:
        super().__init__()
        self.name, self.turn = name, 0
        kind = act.name or "gate"
        names = [name, *(f"{name}#{k}" for k in range(1, 1 if reused else calls))]
        self.gates = nn.ModuleList(chip.gate(each, kind, act) for each in names)
        self.inplace, self.reused = act.inplace, reused

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*args, *named.values())
        check_run(self.gates[0])
        if self.turn >= len(self.gates):
            raise ConversionError(
                f"{self.name} is called more often than the {len(self.gates)} times in a run when "
                "it was simulated, and each call has gates of its own; simulate with inputs that "
                "take the same path, or with reuse=True.",
                self.name,
            )
        gate = self.gates[self.turn]
        self.turn += 0 if self.reused else 1
        y: Tensor = kernels.overwritten(x, gate) if self.inplace else gate(x)
        return y


def place_modules(
    body: Body, chip: Chip, chosen: Chosen, running: Running, reuse: bool
) -> list[str]:
    """Put physical gates in the place of activations; what has to stay ideal."""
    network = body.network
    names = {m: name for name, m in reversed(list(network.named_modules()))}
    left = [
        f"{name} ({type(m).__name__})"
        for m, name in names.items()
        if isinstance(m, _Tiered | _Gated)
    ]
    inside = {part for m in names if isinstance(m, _Tiered) for part in m.modules()}
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(network.modules()):
        if parent in inside:
            continue
        for key, part in list(parent._modules.items()):
            if isinstance(part, Activation) and part not in made:
                site = vars(part).get("site")
                name, calls = site.name if site else names[part], running.calls[part]
                if not calls:
                    left.append(f"{name} (not reached)")
                elif chosen(name):
                    made[part] = AnalogModule(name, part, chip, calls, reuse)
            if part in made:
                parent._modules[key] = made[part]
    return left


def place_calls(body: Body, chip: Chip, chosen: Chosen) -> list[str]:
    """Let physical gates answer the calls of owners; what has to stay ideal."""
    left = []
    for owner in body.network.modules():
        plan: dict[str, Site | None] = vars(owner).get("tg_sites") or {}
        for call, site in plan.items():
            if site is None:
                continue
            answer: Any = None
            if site.t is None and site.op is not None:  # fixed thresholds, say: a gate of its own
                module: nn.Module | None = None
            elif site.t is not None:
                gate = chip.gate(site.name, site.kind, site.t)
                module = gate
                answer = Elementwise(gate, site.parameters)
            else:
                module = answer = whole(site.name, site.kind, chip, owner)
            if module is None:
                left.append(f"{site.name} ({site.kind})")
            elif chosen(site.name):
                body.calls.append(module)
                # with its name for a parameter: no two of them are alike
                plan[call] = Site(
                    *(site.name, site.kind, None, False),
                    parameters=(site.name,),
                    op=answer,
                    line=site.line,
                )
    return left


def place_layers(body: Body, settings: Crossbar) -> None:
    """Put layers on crossbars."""
    found = {n: m for n, m in body.network.named_modules() if type(m) in LAYERS}
    if not found:
        kinds = ", ".join(kind.__name__ for kind in LAYERS)
        raise ValueError(f"simulate: the network has no layer for a crossbar: no {kinds}.")
    _check_names(settings, list(found))
    for name, layer in found.items():
        put_on_crossbar(layer, name, settings)


def digital_weights(body: Body) -> list[str]:
    """Take layers that no call has reached off their crossbars; the weights that are on none.

    A weight that others read, as `F.linear(x, layer.weight)` does or an embedding that is tied to a
    layer, is digital there.
    """
    arrays = list(body.arrays())
    unused = [layer for array, layer in arrays if not array.seen.tiles]
    if arrays and len(unused) == len(arrays):
        raise ValueError(
            "simulate: no layer for a crossbar is called as a module, so that none is on one; call "
            "the layers themselves, not functions on their weights."
        )
    for layer in unused:
        take_off_crossbar(layer)
    on = {f"{name}.weight" for name, m in body.network.named_modules() if _is_on(m)}
    every = body.network.named_parameters(remove_duplicate=False)
    return [n for n, p in every if p.dim() > 1 and n not in on]


def _is_on(module: nn.Module) -> bool:
    return isinstance(getattr(module, "array", None), Array)


def _check_names(settings: Crossbar, layers: Sequence[str]) -> None:
    """Refuse converters of layers that are not there."""
    for name in ("dac_bits", "adc_bits"):
        given = getattr(settings, name)
        for pattern in given if isinstance(given, Mapping) else ():
            if not any(fnmatchcase(layer, pattern) for layer in layers):
                known = ", ".join(map(repr, layers[:5]))
                raise ValueError(
                    f"Crossbar: {name} has {pattern!r}, which is no layer; there are {known} ..."
                )


def calibrate(body: Body, inputs: Any) -> None:
    """Run once with everything ideal, and let gates and crossbars see what they get."""
    watchers: list[Any] = [*body.gates(), *(array for array, _ in body.arrays())]

    channels = Channels(body)

    def after(run: Run, output: Any) -> None:
        if isinstance(run.module, _FEATURES_LAST + _FEATURES_FIRST):
            for made in (t for t in aten_ops.tensors(output) if t.dim()):
                channels.note(made, _axis_of(run.module, made.dim()) % made.dim())
            first = next(iter(aten_ops.tensors(output)))
            for gate in body.gates():
                gate.axis, gate.rank = _axis_of(run.module, first.dim()), first.dim()

    _watch(watchers, True)
    for gate in body.gates():
        gate.channels = channels
    try:
        running = Running(body.network, after=after, everywhere=True)
        with evaluating(body), running, channels:
            run(body, fresh(inputs))
    finally:
        _watch(watchers, False)
        for gate in body.gates():
            gate.channels = None


def _axis_of(layer: nn.Module, rank: int) -> int:
    """Where a layer has its channels in an output of so many axes, with or without a batch."""
    if isinstance(layer, _FEATURES_LAST):
        return -1
    size = getattr(layer, "kernel_size", None)  # of a convolution
    return 1 if size is None else max(rank - 1 - len(size), 0)


def _watch(watchers: Sequence[Any], on: bool) -> None:
    for each in watchers:
        each.watching = on


def settle(body: Body, volts: Mapping[str, float]) -> list[str]:
    """Choose each site's volts per unit, and check those of crossbars; what is to be said of it."""
    for key, value in volts.items():
        if not (is_number(value) and 0 < value < math.inf):
            raise ValueError(
                f"simulate: volts has {value!r} for {key!r}; it must be volts per unit, above 0."
            )
    used = set()
    for gate in body.gates():
        keys = [key for key in volts if matches(key, gate.name)]
        used.update(keys)
        gate.settle(volts[keys[0]] if keys else None)
    for array, _ in body.arrays():
        array.settle()
    if unused := [key for key in volts if key not in used]:
        known = ", ".join(repr(gate.name) for gate in body.gates())
        raise ValueError(f"simulate: volts has {unused[0]!r}, which is no site; there are {known}.")
    return [note for gate in body.gates() if (note := gate.note())]
