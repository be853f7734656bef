"""`simulate`: a converted network as analog hardware computes it, chip by chip.

Every site of the network becomes a set of physical gates, differential pairs whose errors are drawn
once for each chip; with `crossbar`, linear and convolution layers become tiles of cells. What is
drawn depends on the seed, the name of the site and the number of the chip alone. Noise is not
drawn once: it comes from torch's own generator at every evaluation, as dropout does.

    chips = simulate(tg.convert(model, inputs=x), "sky130-weak", seed=0, inputs=x, draws=16)
    print(chips.report())
    y = chips(x)  # (16, ...)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from threshold_gating.conversion.plan import arguments, run
from threshold_gating.conversion.watch import (
    Running,
    _State,
    copied,
    evaluating,
    fresh,
    undisturbed,
)
from threshold_gating.hardware import devices
from threshold_gating.hardware.crossbar import Crossbar
from threshold_gating.hardware.drawn import Drawn, stacked
from threshold_gating.hardware.figure import is_number
from threshold_gating.hardware.physical import SHARES, Chip, Errors, Share
from threshold_gating.hardware.placement import (
    Body,
    Chosen,
    calibrate,
    check,
    digital_weights,
    place_calls,
    place_layers,
    place_modules,
    settle,
)
from threshold_gating.hardware.report import ChipRow, LayerRow, Report, SiteRow, compared

STEEPEST = 1.602177e-19 / (1.380649e-23 * 300.15)  # q / kT at 27 C, 1/V: of an ideal transistor


def simulate(
    model: nn.Module,
    preset: str | devices.Preset | None,
    seed: int = 0,
    *,
    inputs: Any,
    draws: int = 1,
    share: Share = "channel",
    errors: Errors | None = None,
    temperature: float = 27.0,
    level: float | None = None,
    sharpness: float | None = None,
    rail: float | None = None,
    volts: Mapping[str, float] | None = None,
    only: str | Sequence[str] | None = None,
    reuse: bool = False,
    crossbar: Crossbar | None = None,
) -> Simulation:
    """A copy of a converted network on `draws` simulated chips; `model` is left as it was.

    Args:
        model: a network that `tg.convert(model, inputs=...)` made.
        preset: a differential pair by name or record (`devices.presets()`); None for ideal pairs,
            logistic and as sharp as asked, with no errors but those given.
        seed: of the devices.
        inputs: as `tg.convert` takes them: typical ones, by which voltages are chosen.
        draws: how many chips.
        share: what a physical gate serves: "channel", one channel, at all positions, tokens and
            time steps one after the other; "neuron", one position of one channel; "layer", all.
        errors: of the gates; by default the preset's own.
        temperature: in C; voltages were chosen at 27.
        level: volts of the largest input of a hard gate; by default the preset's swing.
        sharpness: instead of `level`, tau times the RMS of a hard gate's input.
        rail: the largest voltage of an input, by default half of the preset's supply; what is
            beyond is cut off, for gate and branches, so that K = 2 branches become K = 3.
        volts: {site: volts per unit of its input} for sites that are not to have the default.
        only: names or patterns ("layer1.*", "re:...") of the sites that are analog; all others stay
            ideal.
        reuse: a module that is called several times in one run is one set of gates, used again;
            by default each call has its own. Recurrent layers always use theirs again.
        crossbar: how linear and convolution layers compute; None leaves them as they are.
    """
    _check_kinds(errors, crossbar, volts, preset)
    chip = settings(preset, errors, share, temperature, level, sharpness, rail)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise ValueError(f"simulate: draws is a number of chips, from 1 on; got {draws!r}.")
    _check_seed(seed)
    check(model)
    chosen = Chosen(only)
    body = Body(copied(model))
    with evaluating(body), Running(body.network, everywhere=True) as running:
        run(body.network, fresh(inputs))
    kept = [*place_modules(body, chip, chosen, running, reuse), *place_calls(body, chip, chosen)]
    chosen.check()
    if crossbar is not None:
        place_layers(body, crossbar)
    calibrate(body, inputs)
    digital = digital_weights(body) if crossbar is not None else []
    far = settle(body, volts or {})
    if kept:
        warnings.warn(f"simulate: stays ideal: {', '.join(kept)}.", stacklevel=2)
    for note in far:
        warnings.warn(f"simulate: {note}.", stacklevel=2)
    simulation = Simulation(body, chip, draws, tuple(kept), tuple(digital), chosen.ideal)
    simulation.redraw(seed)
    return simulation


def settings(
    preset: str | devices.Preset | None,
    errors: Errors | None,
    share: Share,
    temperature: float,
    level: float | None,
    sharpness: float | None,
    rail: float | None,
) -> Chip:
    """What is asked of all gates, with the meaning that `simulate` gives it, checked."""
    pair = devices.preset(preset) if isinstance(preset, str) else preset
    if pair is not None and not isinstance(pair, devices.Preset):
        raise TypeError(f"simulate: preset is a name, a Preset or None; got {type(pair).__name__}.")
    if share not in SHARES:
        raise ValueError(f"simulate: share is one of {', '.join(SHARES)}; got {share!r}.")
    for name, number in (
        ("temperature", temperature),
        *(("level", level), ("sharpness", sharpness), ("rail", rail)),
    ):
        if number is not None and not is_number(number):
            raise TypeError(f"simulate: {name} is a number; got {number!r}.")
    given = errors or Errors()
    if pair is None and given.unit == "volt" and _in_volts(given):
        raise ValueError(
            "simulate: without a preset there are no volts; give errors with unit='rms', or a "
            f"preset: {', '.join(devices.presets())}."
        )
    if level is not None and sharpness is not None:
        raise ValueError(
            "simulate: level and sharpness both set how sharp hard gates are; give one."
        )
    if sharpness is not None and not 0 < sharpness < math.inf:
        raise ValueError(f"simulate: sharpness is tau times an RMS, above 0; got {sharpness!r}.")
    if pair is None:
        if level is not None or rail is not None or temperature != 27.0:
            raise ValueError("simulate: level, rail and temperature are of a preset; give one.")
        return Chip(None, given.of(None), share, sharpness=sharpness)
    _check_pair(pair)
    pair.tau_at(temperature)
    rail = pair.supply / 2 if rail is None else rail
    if not pair.swing <= rail <= pair.supply:
        raise ValueError(
            f"simulate: rail {rail:g} V does not hold the swing of {pair.name}; it must be from "
            f"{pair.swing:g} to {pair.supply:g} V."
        )
    if level is not None and not 0 < level <= rail:
        raise ValueError(
            f"simulate: level must be above 0 and up to the rail, {rail:g} V; got {level:g}."
        )
    if sharpness is not None and sharpness > pair.tau * rail:
        raise ValueError(
            f"simulate: a sharpness of {sharpness:g} puts the RMS of an input at "
            f"{sharpness / pair.tau:.3g} V, beyond the rail of {rail:g} V; {pair.name} is as sharp "
            f"as {pair.tau * rail:.3g} at most."
        )
    return Chip(pair, given.of(pair), share, temperature, level, sharpness, rail)


def _in_volts(errors: Errors) -> bool:
    """Whether any of the errors is a voltage."""
    return any((errors.theta, errors.offset, errors.noise, errors.tree))


def _check_kinds(errors: Any, crossbar: Any, volts: Any, preset: Any) -> None:
    """Refuse what is not the record that it should be."""
    for name, value, kind in (
        ("errors", errors, Errors),
        ("crossbar", crossbar, Crossbar),
        ("volts", volts, Mapping),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"simulate: {name} must be {kind.__name__} or None; got {type(value).__name__}."
            )
    if volts and preset is None:
        raise ValueError("simulate: volts are of a preset; without one give sharpness.")


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"simulate: seed is a whole number of up to 63 bits; got {seed!r}.")


def _check_pair(pair: devices.Preset) -> None:
    """Refuse a record that is of no pair."""
    for name in ("tau", "swing", "supply"):
        if not 0 < getattr(pair, name) < math.inf:
            raise ValueError(f"preset {pair.name}: {name} is above 0; got {getattr(pair, name)}.")
    if pair.tau > STEEPEST:
        raise ValueError(
            f"preset {pair.name}: tau is {pair.tau:g} /V; no pair is sharper than q / kT, "
            f"{STEEPEST:.1f} /V at 27 C."
        )
    if pair.swing > pair.supply:
        raise ValueError(
            f"preset {pair.name}: a swing of {pair.swing:g} V does not fit a supply of "
            f"{pair.supply:g} V."
        )
    if len(pair.temperature) < 2:
        raise ValueError(f"preset {pair.name}: tau is needed at two temperatures or more.")


class Simulation(nn.Module):
    """A network on simulated chips: called, it gives the outputs of all, (draws, ...).

    Parameters are those of the network's copy, and gradients reach them: noise-aware training is
    the usual loop around it, with `redraw` for other chips in every step. `chip(k)` is the network
    on one chip. `body.network` is the copy.
    """

    def __init__(
        self,
        body: Body,
        settings: Chip,
        draws: int,
        kept: tuple[str, ...],
        digital: tuple[str, ...],
        chosen_ideal: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.body, self.settings, self.draws = body, settings, draws
        self.kept, self.digital, self.chosen_ideal = kept, digital, chosen_ideal
        self.seed = 0
        self.runs_by = ""  # "vmap", "vmap, inputs repeated" or "loop": found in the first run
        self.why_no_vmap = ""

    def redraw(self, seed: int) -> None:
        """Other chips, as `simulate` with that seed makes them; trims go back to 0."""
        _check_seed(seed)
        self.seed = seed
        for gate in self.body.gates():
            gate.draw(seed, self.draws)
        for array, layer in self.body.arrays():
            array.draw(seed, self.draws, layer.weight.detach())

    def get_extra_state(self) -> Tensor:
        """Which chips these are: a state dict holds their trims, which are of no use to others."""
        return torch.tensor([self.seed, self.draws])

    def set_extra_state(self, state: Tensor) -> None:
        seed, draws = state.tolist()
        if draws != self.draws:
            raise ValueError(
                f"Simulation: the state is of {draws} chips, this simulation has {self.draws}; "
                f"simulate with draws={draws}."
            )
        self.redraw(seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo cannot follow its transforms
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.runs_by:
            self.runs_by, self.why_no_vmap = self._way(args, kwargs)
        return _WAYS[self.runs_by](self, args, kwargs)

    def _way(self, args: Any, kwargs: Any) -> tuple[str, str]:
        """The fastest way that this network runs in, tried on copies; why not a faster one."""
        said = ""
        for way in ("vmap", "vmap, inputs repeated") if self.draws > 1 else ():
            try:
                with undisturbed(self.body):
                    _WAYS[way](self, fresh(args), fresh(kwargs))
            except Exception as error:  # whatever the network does that a transform does not take
                said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            else:
                return way, said
        return "loop", said

    def chip(self, k: int) -> nn.Module:
        """The network on the k-th chip."""
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k < self.draws:
            raise IndexError(f"Simulation: there are chips 0 to {self.draws - 1}; got {k!r}.")
        return _OneChip(self, k)

    def measure(self, metric: Callable[[nn.Module], float], what: str = "chips") -> Tensor:
        """`metric` of each chip, with a progress bar: of a network, a number."""
        return torch.tensor([metric(self.chip(k)) for k in bar(range(self.draws), what)])

    @torch.no_grad()
    def compare(self, ideal: nn.Module, inputs: Any) -> list[ChipRow]:
        """How far each chip's output is from that of `ideal`, on inputs as `tg.convert` takes.

        Both run as in evaluation and stay as they were: dropout and batch statistics are no errors.
        """
        args, kwargs = arguments(inputs)
        with evaluating(ideal):
            aim = ideal(*fresh(args), **fresh(kwargs))
        with self.evaluated():
            return [
                compared(k, self.chip(k)(*fresh(args), **fresh(kwargs)), aim)
                for k in bar(range(self.draws), "chips")
            ]

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """As in evaluation; then all is as it was but trims, and noise that has been drawn."""
        parts = [m for m in self.body.modules() if not isinstance(m, Drawn)]
        saved, modes = [_State(m) for m in parts], [(m, m.training) for m in parts]
        try:
            for part in parts:
                part.training = False
            yield
        finally:
            for state in saved:
                state.restore()
            for part, mode in modes:
                part.training = mode

    def run_one(self, k: int, args: Any, kwargs: Any) -> Any:
        held = {name: t[k] for name, t in stacked(self.body).items()}
        return functional_call(self.body, held, args, kwargs)

    def report(self) -> Report:
        """Sites, layers and what stays ideal, with the volts of everything."""
        return Report(
            preset=self.settings.preset.name if self.settings.preset else "ideal",
            settings=_described(self.settings),
            seed=self.seed,
            draws=self.draws,
            sites=tuple(SiteRow.of(gate) for gate in self.body.gates()),
            layers=tuple(LayerRow.of(array, layer) for array, layer in self.body.arrays()),
            ideal=self.kept,
            chosen_ideal=self.chosen_ideal,
            digital=self.digital,
        )


def _described(chip: Chip) -> dict[str, Any]:
    own = chip._asdict()
    return {
        **{k: v for k, v in own.items() if k not in ("preset", "errors")},
        **{f"sigma_{k}" if k != "unit" else "unit": v for k, v in vars(chip.errors).items()},
        "tau_per_volt": chip.tau * chip.warmth,
    }


class _OneChip(nn.Module):
    """The network on one of the chips."""

    def __init__(self, simulation: Simulation, k: int) -> None:
        super().__init__()
        self.simulation, self.k = simulation, k

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.simulation.run_one(self.k, args, kwargs)


def _mapped(simulation: Simulation, args: Any, kwargs: Any) -> Any:
    """All chips at once; what comes before the first of their parts is computed once."""
    held = stacked(simulation.body)

    def one(held: dict[str, Tensor]) -> Any:
        return functional_call(simulation.body, held, args, kwargs)

    return torch.vmap(one, randomness="different")(held)


def _mapped_inputs(simulation: Simulation, args: Any, kwargs: Any) -> Any:
    """The same with an input for each chip, where a network writes into what all would share."""
    given = pytree.tree_map(
        lambda t: t.expand(simulation.draws, *t.shape).clone() if isinstance(t, Tensor) else t,
        (args, kwargs),
    )
    leaves, tree = pytree.tree_flatten(given)
    tensors = [t for t in leaves if isinstance(t, Tensor)]

    def one(held: dict[str, Tensor], own: list[Tensor]) -> Any:
        mine = iter(own)
        filled = [next(mine) if isinstance(t, Tensor) else t for t in leaves]
        given, named = pytree.tree_unflatten(filled, tree)
        return functional_call(simulation.body, held, given, named)

    return torch.vmap(one, randomness="different")(stacked(simulation.body), tensors)


def _looped(simulation: Simulation, args: Any, kwargs: Any) -> Any:
    """One chip after the other."""

    def own(t: Any) -> Any:  # a network may overwrite what it is given
        return t.clone() if isinstance(t, Tensor) else t

    each = [
        simulation.run_one(k, *pytree.tree_map(own, (args, kwargs)))
        for k in range(simulation.draws)
    ]
    return pytree.tree_map(_stack, *each)


def _stack(*values: Any) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else list(values)


_WAYS = {"vmap": _mapped, "vmap, inputs repeated": _mapped_inputs, "loop": _looped}


def bar(items: Sequence[Any], what: str) -> Any:
    """A progress bar where there is a terminal and tqdm."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return items
    return tqdm(items, desc=what, leave=False, disable=None)
