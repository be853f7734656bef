"""Scalars for TensorBoard, or anything like it: what learned gates do while they train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from threshold_gating.nn.activation import Activation
from threshold_gating.nn.rnn import GRU, LSTM
from threshold_gating.primitive import Value
from threshold_gating.training.families import TOLERANCE, left_family


class Writer(Protocol):
    """What `torch.utils.tensorboard.SummaryWriter` and its like have."""

    def add_scalar(self, name: str, value: float, step: int) -> object: ...


class _Site(NamedTuple):
    """A learned gate as it is: values for each threshold or branch, numbers if not learned."""

    name: str
    where: str  # its name in `left_family`
    learned: tuple[str, ...]
    tau: Sequence[Value]
    theta: Sequence[Value]


def gate_scalars(model: nn.Module, *, tol: float = TOLERANCE) -> dict[str, float]:
    """The least, the mean and the largest tau and theta of each learned site, by name.

    "act/tau/mean"; with several thresholds "act/theta_1/mean", ... Where slopes are learned also
    "act/left_family": how many of the site's groups (channels, units) no longer are of the family
    (Table 3) they started in, slopes up to `tol` taken as 0.
    """
    found: dict[str, float] = {}
    left = left_family(model, tol)
    with torch.no_grad():
        for site in _sites(model):
            for what, rows in (("tau", site.tau), ("theta", site.theta)):
                if what in site.learned:
                    found |= _spread(f"{site.name}/{what}", rows)
            if "s" in site.learned:
                found[f"{site.name}/left_family"] = float(len(left.get(site.where, ())))
    return found


def log_gates(
    model: nn.Module, writer: Writer, step: int, *, prefix: str = "gates", tol: float = TOLERANCE
) -> None:
    """Write `gate_scalars` of `model` at `step`, under "gates/".

    `writer` is a `SummaryWriter` of TensorBoard or any object with add_scalar(name, value, step).
    """
    scalars = gate_scalars(model, tol=tol)
    if not scalars:
        raise ValueError(
            f"log_gates: {type(model).__name__} has no gate that learns tau, theta or s; make one "
            "with train=."
        )
    for name, value in scalars.items():
        writer.add_scalar(f"{prefix}/{name}", value, step)


def _sites(model: nn.Module) -> Iterator[_Site]:
    for name, module in model.named_modules():
        at = name or type(module).__name__.lower()
        if isinstance(module, Activation) and module.learned:
            tau, theta, _, _ = module.values()
            taus = tau if isinstance(tau, list) else [tau]
            yield _Site(at, name, module.learned, taus, theta)
        elif isinstance(module, LSTM | GRU):
            for gate, t in module.learned_gates().items():
                learned = module.learning.train
                where = f"{name}.{gate}" if name else gate
                yield _Site(f"{at}.{gate}", where, learned, [t.tau], [t.theta])


def _spread(name: str, rows: Sequence[Value]) -> dict[str, float]:
    tensors = [row for row in rows if isinstance(row, Tensor)]
    many = len(tensors) > 1
    # One transfer from the device for a site, not one for each figure.
    figures = torch.stack([f for t in tensors for f in (t.min(), t.mean(), t.max())]).tolist()
    names = [f"{name}_{k + 1}" if many else name for k in range(len(tensors))]
    keys = [f"{each}/{what}" for each in names for what in ("min", "mean", "max")]
    return dict(zip(keys, figures, strict=True))
