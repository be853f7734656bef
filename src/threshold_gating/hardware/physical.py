"""One site of a network on differential pairs: what each physical gate does to its input.

A pair takes volts, a network has numbers. `Level.volts` says how many volts one unit of a site's
input is. A soft gate needs tau (x - theta) = tau_V (v - theta_V), so the sharpest threshold of the
site fixes it, volts = max tau / tau_V; the others get their share through a divider. Where the
sharpest is so sharp that inputs would be beyond the rails (ELU's), it is less sharp instead, by the
volts at which perfect pairs come closest, and the others keep their tau. A hard gate has no tau of
its own: the largest input that was seen is put at the swing of the preset, and the gate is as sharp
as that makes it, tau = tau_V volts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.conversion.channels import Channels
from threshold_gating.hardware.devices import LOGISTIC, Preset, Shape, log_odds
from threshold_gating.hardware.drawn import Drawn, check_run, normal
from threshold_gating.hardware.figure import is_number
from threshold_gating.hardware.seen import Seen
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.primitive import wide

Share = Literal["layer", "channel", "neuron"]
SHARES = get_args(Share)
Unit = Literal["volt", "rms"]
FAR = 0.1  # an error that is said aloud; those of the usual soft gates are 0 to 5 %


@dataclass(frozen=True)
class Errors:
    """What is wrong with the gates; None stands for the preset's own figure.

    Args:
        theta: standard deviation of a gate's threshold; its branches stay.
        tau: of its sharpness, relative: of its logarithm, so that it stays positive.
        offset: of what is added to its input, which the branches read too.
        noise: of what is added to its input anew in every evaluation.
        tail: of each branch's gain, relative: the tail current of a pair is its branch.
        tree: of each softplus cell in the tree that gives attention its thresholds.
        unit: of theta, offset, noise and tree: "volt", or "rms" for that of the site's input. With
            "rms" those that are not given are 0, as a preset has them in volts; tau is not.
    """

    theta: float | None = None
    tau: float | None = None
    offset: float = 0.0
    noise: float | None = None
    tail: float = 0.0
    tree: float | None = None
    unit: Unit = "volt"

    def __post_init__(self) -> None:
        for name in ("theta", "tau", "offset", "noise", "tail", "tree"):
            value = getattr(self, name)
            if value is None and name not in ("offset", "tail"):  # the preset's own
                continue
            if not (is_number(value) and 0 <= value < math.inf):
                raise ValueError(
                    f"Errors: {name} is a standard deviation, from 0 on; got {value!r}."
                )
        if self.unit not in get_args(Unit):
            raise ValueError(f"Errors: unit is 'volt' or 'rms'; got {self.unit!r}.")

    def of(self, preset: Preset | None) -> Errors:
        """With the preset's figures where none were given."""
        own = preset is not None and self.unit == "volt"
        known = {"theta": "sigma_theta", "noise": "noise", "tree": "sigma_theta"} if own else {}
        if preset is not None:
            known["tau"] = "sigma_tau"
        found = {name: getattr(preset, key) for name, key in known.items()}
        given = {name: getattr(self, name) for name in ("theta", "tau", "noise", "tree")}
        return replace(
            self, **{n: found.get(n, 0.0) if value is None else value for n, value in given.items()}
        )


class Chip(NamedTuple):
    """What all gates of a simulated network have in common.

    `preset` is None for ideal pairs, which are as sharp as asked and logistic. `level` is the
    voltage of the largest input of a hard gate, `sharpness` tau times the RMS of its input instead;
    `rail` is the largest voltage of any input.
    """

    preset: Preset | None
    errors: Errors
    share: Share = "channel"
    temperature: float = 27.0
    level: float | None = None
    sharpness: float | None = None
    rail: float = math.inf

    @property
    def tau(self) -> float:
        """1/V, at 27 C."""
        return 1.0 if self.preset is None else self.preset.tau

    @property
    def warmth(self) -> float:
        """tau at the temperature over that at 27 C."""
        if self.preset is None or self.temperature == 27.0:
            return 1.0
        return self.preset.tau_at(self.temperature) / self.preset.tau

    @property
    def shape(self) -> Shape:
        return LOGISTIC if self.preset is None else self.preset.shape

    def gate(self, name: str, kind: str, gate: Activation | TG) -> AnalogGate:
        """What is put in the place of one element-wise gate."""
        return AnalogGate(name, kind, gate, self)

    def keys(self, name: str, kind: str) -> Any:
        """What is put in the place of a softmax."""
        from threshold_gating.hardware.wholes import KeyGates  # which is made of gates of here

        return KeyGates(name, kind, self)


class Values(NamedTuple):
    """A gate's parameters now, each a number or a tensor that broadcasts against the input."""

    tau: list[Any]  # one for each threshold; inf where the gate is hard
    theta: list[Any]
    s: list[Any]
    c: list[Any]


class AnalogGate(nn.Module):
    """The physical gates of one site: pairs drawn for each chip around an instance.

    `gate` is an `Activation`, whose parameters stay learnable, or a record.
    """

    def __init__(self, name: str, kind: str, gate: Activation | TG, chip: Chip) -> None:
        super().__init__()
        self.name, self.kind, self.chip = name, kind, chip
        self.gate = gate  # a part of this module if it is one
        self.t: TG = gate.init if isinstance(gate, Activation) else gate
        self.seen, self.watching = Seen(), False
        self.axis, self.rank = -1, 0  # of channels and of all, in what the last layer gave
        self.channels: Channels | None = None  # while it is watching
        self.volts = 1.0  # per unit of the input
        self.stretch = 1.0  # over the volts that a soft gate needs: it is that much sharper
        self.cap = math.inf  # volts per unit that a pair gets at most, behind its divider
        self.width = math.inf  # 1 / tau of a soft gate, in units of the input
        self.devices = Drawn()
        self.group: tuple[int, ...] = ()
        # In a run, what the devices make of the parameters, by the shape and dtype of the input: a
        # recurrent layer asks for it in every step. None outside of one.
        self.known: dict[tuple[Any, ...], Values] | None = None
        self.in_run: bool | None = None  # None: not in a network that runs

    # Before it is used: what it sees, and its devices

    def settle(self, volts: float | None = None) -> None:
        """Choose the volts per unit from what was seen, or take those given."""
        chip, seen = self.chip, self.seen
        if seen.nans or not seen.numbers:
            raise ValueError(
                f"simulate: {self.name} saw {f'NaN {seen.nans} times' if seen.nans else 'nothing'} "
                "in calibration; give inputs for which the network computes numbers."
            )
        self.group = self._group()
        if not self.t.hard:
            self._settle_soft(volts)
        elif volts is not None:
            self.volts = volts
        elif not seen.largest:
            raise ValueError(self._only_zeros())
        elif chip.sharpness is not None:
            self.volts = chip.sharpness / (chip.tau * seen.rms)
        elif chip.preset is not None:
            self.volts = (chip.level or chip.preset.swing) / seen.largest
        if volts is not None and volts * seen.rms > chip.rail:
            raise ValueError(
                f"simulate: {volts:g} V per unit puts the input of {self.name} at "
                f"{volts * seen.rms:.3g} V RMS, beyond the rail of {chip.rail:g} V; up to "
                f"{chip.rail / seen.rms:.3g} V per unit would work."
            )

    def _only_zeros(self) -> str:
        return (
            f"simulate: {self.name} saw nothing but zeros, so that no voltage can be chosen; give "
            "inputs that reach it, or volts={name: volts per unit}."
        )

    def _settle_soft(self, given: float | None) -> None:
        chip, seen = self.chip, self.seen
        tau = self.gate.values()[0] if isinstance(self.gate, Activation) else self.t.tau
        every = [torch.as_tensor(t) for t in (tau if isinstance(tau, list | tuple) else [tau])]
        own = max(t.max().item() for t in every) / chip.tau
        least = min(t.min().item() for t in every) / chip.tau
        if given is None and not seen.largest and least < own > chip.rail:
            raise ValueError(self._only_zeros())
        if given is not None or least == own or own * seen.largest <= chip.rail:
            self._set(own if given is None else given, own, least)
        else:
            # ten a decade; the best of a smooth function of their logarithm
            count = max(2, math.ceil(10 * math.log10(own / least)))
            tried = [least * (own / least) ** (k / count) for k in range(count + 1)]
            tried = [v for v in tried if v * seen.rms <= chip.rail] or [least]

            def off(volts: float) -> float:
                self._set(volts, own, least)
                return self.off()

            self._set(min(tried, key=off), own, least)
        self.width = 1 / (min(own, self.volts) * chip.tau)

    def _set(self, volts: float, own: float, least: float) -> None:
        """Volts per unit, for a gate that needs `own` at its sharpest threshold."""
        self.volts, self.stretch, self.cap = volts, volts / own, math.inf
        if volts < own and least < own:
            self.stretch, self.cap = 1.0, volts

    def note(self) -> str:
        """What to say of a soft gate that no pair of the preset carries; "": nothing."""
        if self.t.hard or self.chip.preset is None or (off := self.off()) <= FAR:
            return ""
        return (
            f"{self.name} ({self.kind}) is off by {off:.0%} on perfect pairs of "
            f"{self.chip.preset.name} at {self.volts:.3g} V per unit, before any mismatch: its "
            f"largest input is {self.seen.largest:.3g}, and the rail is {self.chip.rail:g} V; "
            "another preset, smaller inputs or only=... without it would work"
        )

    def off(self) -> float:
        """How far perfect pairs are from the instance, RMS over RMS, evenly over what was seen."""
        x = torch.linspace(-1, 1, 501, dtype=torch.float64) * self.seen.largest
        rows = self._values(torch.zeros(self.seen.shape, device=self.seen.device))
        ideal = Values(*([_mean(w) for w in row] for row in rows))
        taus = [self.chip.tau * self._volts_at(tau) for tau in ideal.tau]
        rail = self.chip.rail / self.volts
        want = self._blend(x, ideal, None, LOGISTIC)
        y = self._blend(x.clamp(-rail, rail), ideal._replace(tau=taus), None, self.chip.shape)
        size = want.square().mean().sqrt().item() if self.seen.largest else 0.0
        return (y - want).square().mean().sqrt().item() / size if size else 0.0

    def _group(self) -> tuple[int, ...]:
        """The shape of the site's physical gates."""
        shape, share = self.seen.shape, self.chip.share
        if share == "layer" or not shape:
            return (1,)
        if share == "channel":
            return (shape[self.seen.axis],)
        has_batch = self.seen.axis != 0 and len(shape) > 1  # channels come behind it
        return shape[1:] if has_batch else shape

    @property
    def is_hard(self) -> bool:
        """Whether it stays a comparison: a hard gate without any pair in its place."""
        return self.t.hard and self.chip.preset is None and self.chip.sharpness is None

    def draw(self, seed: int, draws: int) -> None:
        """Make the devices of `draws` chips, with trims at 0, where those before them were."""
        device = self.device
        errors, J, K, group = self.chip.errors, self.t.K - 1, self.t.K, self.group
        wanted = {
            "theta": (errors.theta, (J, *group)),
            "tau": (errors.tau, (J, *group)),
            "offset": (errors.offset, group),
            "tail": (errors.tail, (K, *group)),
        }
        self.devices = Drawn()
        for key, (sigma, shape) in wanted.items():
            if sigma and math.prod(shape):
                numbers = normal(seed, f"{self.name}/{key}", draws, shape)
                self.devices.put(key, numbers.to(device))
        for key in ("trim_theta", "trim_tau"):
            start = torch.zeros(draws, J, *group, device=device)
            self.devices.register_parameter(key, nn.Parameter(start, requires_grad=False))

    @property
    def device(self) -> torch.device:
        """Where its devices are, or belong before they are drawn."""
        drawn = getattr(self.devices, "trim_theta", None)
        return self.seen.device if drawn is None else drawn.device

    # What it computes

    def forward(self, x: Tensor, v: Any = None, s: Sequence[Any] | None = None) -> Tensor:
        """The gate at x; the branches read `v`, and have the slopes `s`, where they are given."""
        check_run(self)
        # A converted network around this must not look at our steps, nor answer them.
        with torch._C.DisableTorchFunction():
            z = wide(x)
            if self.watching:
                self.seen.add(x, self._axis(x))
                y = self._blend(z, self._values(z, s), v, LOGISTIC)
                if self.channels is not None and (axis := self.channels.axis(x)) is not None:
                    y = y.to(x.dtype)
                    self.channels.note(y, axis)
            else:
                moved = self._input(z)
                branches = moved if v is None else v
                y = self._blend(moved, self._made(z, s), branches, self.chip.shape)
            return y.to(x.dtype)

    def _axis(self, x: Tensor) -> int:
        """Where the channels of x are; as the last layer had them where they were lost sight of."""
        guess = self.axis if self.axis < 0 or self.rank in (0, x.dim()) else 1
        found = None if self.channels is None else self.channels.axis(x)
        if found is None or found < 0 or (x.dim() and found == guess % x.dim()):
            return guess
        return found

    def _made(self, z: Tensor, s: Sequence[Any] | None) -> Values:
        """The parameters that the devices have, computed once in a run unless `s` is data."""
        if self.known is None or s is not None:
            return self._analog(z, self._values(z, s))
        key = (tuple(z.shape), z.dtype, torch.is_grad_enabled())
        if key not in self.known:
            self.known[key] = self._analog(z, self._values(z, s))
        return self.known[key]

    def _values(self, x: Tensor, s: Sequence[Any] | None = None) -> Values:
        """The parameters as they should be, with the slopes `s` where they are given."""
        if not isinstance(self.gate, Activation):
            t = self.t
            taus = t.tau if isinstance(t.tau, tuple) else (t.tau,) * (t.K - 1)
            return Values(list(taus), list(t.theta), list(t.s if s is None else s), list(t.c))
        tau, *rest = self.gate.values()
        each: Any = tau if isinstance(tau, list | tuple) else [tau] * (self.t.K - 1)
        shape, rows = self.gate._held(x)[1], (each, *rest)
        view = [[w.view(shape) if shape and isinstance(w, Tensor) else w for w in r] for r in rows]
        return Values(*view)

    def _per_gate(self, key: str, x: Tensor) -> Any:
        """Numbers of the devices, (..., *group), as they broadcast against x; None: none drawn."""
        numbers = getattr(self.devices, key, None)
        if numbers is None:
            return None
        return numbers.to(x.dtype).view(*self._spread(numbers, x))

    def _spread(self, numbers: Tensor, x: Tensor) -> tuple[int, ...]:
        rows = numbers.shape[: numbers.dim() - len(self.group)]
        if self.chip.share != "channel":
            if self.chip.share == "neuron" and tuple(x.shape[-len(self.group) :]) != self.group:
                raise ValueError(self._other(f"{tuple(x.shape[1:])} positions"))
            return (*rows, *(1 for _ in range(x.dim() - len(self.group))), *self.group)
        axis = self.seen.axis % x.dim()
        if x.shape[axis] != self.group[0]:
            raise ValueError(self._other(f"{x.shape[axis]} channels"))
        return (*rows, *(n if k == axis else 1 for k, n in enumerate(x.shape)))

    def _other(self, what: str) -> str:
        return (
            f"simulate: {self.name} has {math.prod(self.group)} physical gates {self.group} and is "
            f"given {what}; simulate with inputs of the size that it is to run on, or with "
            "share='layer'."
        )

    def sigma_theta(self) -> float:
        """Of the sharpest threshold, in units of the input."""
        return float(self._sigma(self.chip.errors.theta or 0.0, self.volts))

    def sigmas_theta(self) -> Tensor:
        """Of every threshold, as they broadcast against the devices' numbers (draws, J, *group)."""
        taus = self._values(torch.zeros(self.seen.shape)).tau
        sigma = self.chip.errors.theta or 0.0
        sizes = [self._sigma(sigma, self._volts_at(tau)) for tau in taus]
        rows = [torch.as_tensor(size, device=self.device) for size in sizes]
        if any(row.numel() > 1 for row in rows):
            raise ValueError(
                f"{self.name} has a tau of its own for each group; its thresholds differ in what a "
                "trim is worth, and `cancel` does not know them: use `retune`."
            )
        return torch.stack([row.reshape(()) for row in rows]).view(-1, *(1 for _ in self.group))

    def _volts_at(self, tau: Any) -> Any:
        """Volts per unit at the pair of a threshold with this tau, behind its divider."""
        if self.t.hard:
            return self.volts
        own = tau * self.stretch / self.chip.tau
        return own.clamp(max=self.cap) if isinstance(own, Tensor) else min(own, self.cap)

    def _sigma(self, sigma: float, volts: Any) -> Any:
        """A standard deviation in units of the input, for a gate with these volts per unit."""
        return sigma * self.seen.rms if self.chip.errors.unit == "rms" else sigma / volts

    def _input(self, x: Tensor) -> Tensor:
        """What the pairs really get: with offset and noise, up to the rails."""
        errors = self.chip.errors
        offset = self._per_gate("offset", x)
        if offset is not None:
            x = x + self._sigma(errors.offset, self.volts) * offset
        if errors.noise:
            x = x + self._sigma(errors.noise, self.volts) * torch.randn_like(x)
        if self.chip.rail < math.inf:
            x = x.clamp(-self.chip.rail / self.volts, self.chip.rail / self.volts)
        return x

    def _analog(self, x: Tensor, values: Values) -> Values:
        """The parameters that the devices have."""
        chip, errors = self.chip, self.chip.errors
        drawn = {
            k: self._per_gate(k, x) for k in ("theta", "tau", "tail", "trim_theta", "trim_tau")
        }
        taus, thetas = [], []
        for j, (tau, theta) in enumerate(zip(values.tau, values.theta, strict=True)):
            volts = self._volts_at(tau)
            if drawn["theta"] is not None:
                theta = theta + self._sigma(errors.theta or 0.0, volts) * drawn["theta"][j]
            thetas.append(theta + drawn["trim_theta"][j])
            log_tau = drawn["trim_tau"][j]
            if drawn["tau"] is not None:
                log_tau = log_tau + (errors.tau or 0.0) * drawn["tau"][j]
            sharp = chip.tau * chip.warmth * volts * torch.exp(log_tau)
            taus.append(math.inf if self.is_hard else sharp)
        s, c = values.s, values.c
        if drawn["tail"] is not None:
            gains = [1 + errors.tail * row for row in drawn["tail"]]
            s, c = (list(map(_scaled, row, gains)) for row in (s, c))
        return Values(taus, thetas, s, c)

    def _blend(self, x: Tensor, values: Values, v: Any, shape: Shape) -> Tensor:
        t, (taus, theta, s, c) = self.t, values
        options: dict[str, Any] = {"q": t.q, "clamp": t.clamp}
        if not theta:  # one branch: nothing is gated
            return kernels.blend(x, math.inf, (), s, c, v=v, **options)
        if self.is_hard or (self.watching and t.hard):
            return kernels.blend(x, math.inf, theta, s, c, v=v, owner=t.owner, **options)
        options["form"] = t.form
        if shape == LOGISTIC:
            tau: Any = taus[0] if len(taus) == 1 else taus
            return kernels.blend(x, tau, theta, s, c, v=v, known=True, **options)
        # The log odds of each threshold's pair stand in the place of tau (x - theta).
        odds = [log_odds(a * (x - b), shape) for a, b in zip(taus, theta, strict=True)]
        v = x if v is None else v
        return kernels.blend(torch.zeros_like(x), 1.0, [-u for u in odds], s, c, v=v, **options)


def _mean(w: Any) -> Any:
    """A parameter of all groups of a gate as one number."""
    return w.detach().double().mean().item() if isinstance(w, Tensor) else w


def _scaled(w: Any, gain: Tensor) -> Any:
    """A slope or an intercept; one that is 0 stays a number, which kernels know."""
    return w if not isinstance(w, Tensor) and w == 0 else w * gain
