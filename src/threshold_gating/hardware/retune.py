"""Tuning of finished chips: tau and theta of their gates alone, every weight as it is.

`cancel` measures each gate by itself and sets a trim of so many bits against its error. `retune`
knows no device: it moves the trims of every chip down the gradient until the outputs are those of
the ideal network, and thereby also makes up for errors that are not of tau and theta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.watch import evaluating, fresh
from threshold_gating.hardware.analog import Simulation, bar
from threshold_gating.hardware.physical import AnalogGate

TRIMS = ("tau", "theta")
Loss = Callable[[Any, Any], Tensor]  # of the output of a chip and that of the ideal network


class Storage(NamedTuple):
    """What the trims of one chip take."""

    gates: int
    numbers: int  # two for each threshold
    bits: int


def storage(simulation: Simulation, bits: int) -> Storage:
    """Of a tau and a theta of `bits` each for every threshold of every physical gate."""
    if isinstance(bits, bool) or not isinstance(bits, int) or bits < 1:
        raise ValueError(f"storage: bits is a whole number from 1 on; got {bits!r}.")
    sizes = [(math.prod(g.group), g.t.K - 1) for g in simulation.body.gates()]
    numbers = sum(2 * gates * thresholds for gates, thresholds in sizes)
    return Storage(sum(gates for gates, _ in sizes), numbers, bits * numbers)


@torch.no_grad()
def cancel(simulation: Simulation, bits: int | None = None, span: float = 3.0) -> None:
    """Trim each threshold and sharpness against its own error, measured without any.

    Args:
        bits: of a trim, over +-`span` standard deviations; None: as fine as float32.
        span: errors beyond it are trimmed by that much.
    """
    if bits is not None and bits not in range(1, 25):
        raise ValueError(f"cancel: bits must be from 1 to 24, or None; got {bits}.")
    for gate in simulation.body.gates():
        drawn: Any = gate.devices
        if hasattr(drawn, "theta"):
            sigma = gate.sigmas_theta()
            drawn.trim_theta.copy_(-sigma * _coded(drawn.theta, bits, span))
        if hasattr(drawn, "tau"):
            spread = gate.chip.errors.tau or 0.0
            drawn.trim_tau.copy_(-spread * _coded(drawn.tau, bits, span))


def _coded(numbers: Tensor, bits: int | None, span: float) -> Tensor:
    """Standard deviations as a converter with 2^bits codes gives them."""
    inside = numbers.clamp(-span, span)
    if bits is None:
        return inside
    half: int = 2 ** (bits - 1)
    step = span / half
    code = (inside / step).floor().clamp(-half, half - 1)
    return (code + 0.5) * step


def distance(output: Any, ideal: Any) -> Tensor:
    """Mean squared difference over the mean square of the ideal output."""
    far: Tensor = F.mse_loss(output, ideal) / ideal.square().mean()
    return far


def divergence(output: Tensor, ideal: Tensor) -> Tensor:
    """Of the class probabilities: Kullback and Leibler's, from logits along the last axis."""
    p, q = ideal.log_softmax(-1), output.log_softmax(-1)
    far: Tensor = (p.exp() * (p - q)).sum(-1).mean()
    return far


def retune(
    simulation: Simulation,
    ideal: nn.Module,
    batches: Sequence[Any] | Iterable[Any],
    *,
    steps: int,
    rate: float = 0.02,
    what: str | Sequence[str] = TRIMS,
    loss: Loss = distance,
    together: bool = False,
) -> list[float]:
    """Train the trims of all chips; returns the mean loss of each step.

    Nothing but trims changes: chips and `ideal` run as in evaluation, without dropout, and keep
    their batch statistics.

    Args:
        ideal: the network whose outputs are the aim; no labels are needed.
        batches: inputs as `tg.convert` takes them, gone through again and again.
        steps: of Adam. A step of theta is up to `rate` times the RMS of the site's input, or times
            1 / tau where a soft gate is narrower than that; one of log tau is up to `rate`. Both
            go down to 0 along a line.
        what: "tau", "theta" or both.
        together: run all chips at once, which takes the memory of all and is faster where a run is
            many small steps, as in recurrent networks.
    """
    what = (what,) if isinstance(what, str) else what
    if set(what) - set(TRIMS) or not what:
        raise ValueError(f"retune: what is some of {', '.join(TRIMS)}; got {what!r}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"retune: steps is a whole number from 1 on; got {steps!r}.")
    if not 0 < rate < math.inf:
        raise ValueError(f"retune: rate is above 0; got {rate!r}.")
    inputs = [arguments(batch) for batch in batches]
    if not inputs:
        raise ValueError("retune: there are no batches; give one input or more.")
    groups = _trims(simulation.body.gates(), what, rate)
    optimizer = torch.optim.Adam([{k: g[k] for k in ("params", "lr")} for g in groups])
    with evaluating(ideal):
        aims = [ideal(*fresh(args), **fresh(kwargs)) for args, kwargs in inputs]
    losses, step_of = [], _step_together if together else _step
    try:
        for step in bar(range(steps), "retune"):
            for group, start in zip(optimizer.param_groups, groups, strict=True):
                group["lr"] = start["lr"] * (1 - step / steps)
            (args, kwargs), aim = inputs[step % len(inputs)], aims[step % len(inputs)]
            with simulation.evaluated():
                losses.append(step_of(simulation, args, kwargs, aim, loss, optimizer))
            if not math.isfinite(losses[-1]):
                raise ValueError(
                    f"retune: the loss of step {step} is {losses[-1]}, and trims cannot follow it; "
                    "give batches on which the chips compute numbers, or a lower rate."
                )
    finally:
        for group in groups:
            for trim in group["params"]:
                trim.requires_grad_(False)
                trim.grad = None
    return losses


def _trims(gates: Iterable[AnalogGate], what: Sequence[str], rate: float) -> list[dict[str, Any]]:
    """Groups of parameters, theta in steps of what its site sees and its gate can tell apart."""
    groups = []
    for gate in gates:
        for name in what:
            trim = getattr(gate.devices, f"trim_{name}").requires_grad_(True)
            unit = 1.0 if name == "tau" else min(gate.seen.rms, gate.width)
            groups.append({"params": [trim], "lr": rate * unit})
    return groups


def _step(
    simulation: Simulation, args: Any, kwargs: Any, aim: Any, loss: Loss, optimizer: Any
) -> float:
    """One step of every chip; they share nothing, so that one backward pass serves each."""
    optimizer.zero_grad()
    total = 0.0
    for k in range(simulation.draws):  # one after the other: a chip's graph at a time
        value = loss(simulation.run_one(k, fresh(args), fresh(kwargs)), aim)
        torch.autograd.backward(value, inputs=_params(optimizer))
        total += value.item() / simulation.draws
    optimizer.step()
    return total


def _step_together(
    simulation: Simulation, args: Any, kwargs: Any, aim: Any, loss: Loss, optimizer: Any
) -> float:
    """The same with the graphs of all chips in memory."""
    optimizer.zero_grad()
    outputs = simulation(*fresh(args), **fresh(kwargs))
    values = [
        loss(pytree.tree_map(lambda t, k=k: t[k], outputs), aim) for k in range(simulation.draws)
    ]
    total = torch.stack(values).sum()
    torch.autograd.backward(total, inputs=_params(optimizer))
    optimizer.step()
    return total.item() / simulation.draws


def _params(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
