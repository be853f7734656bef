"""What learned gates do while they train, as scalars for TensorBoard or anything like it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from threshold_gating.instance import TG
from threshold_gating.layers import Activation
from threshold_gating.primitive import Value
from threshold_gating.recurrent import GRU, LSTM
from threshold_gating.taxonomy import family


class Writer(Protocol):
    """What `torch.utils.tensorboard.SummaryWriter` and its like have."""

    def add_scalar(self, name: str, value: float, step: int) -> object: ...


class _Site(NamedTuple):
    """A learned gate as it is: values for each threshold or branch, numbers if not learned."""

    name: str
    start: TG
    learned: tuple[str, ...]
    tau: Sequence[Value]
    theta: Sequence[Value]
    s: Sequence[Value]


def gate_scalars(model: nn.Module, *, tol: float = 0.01) -> dict[str, float]:
    """The least, the mean and the largest tau and theta of each learned site, by name.

    "act/tau/mean"; with several thresholds "act/theta_1/mean", ... Where slopes are learned also
    "act/left_family": how many of the site's groups (channels, units) no longer are of the family
    (Table 3) they started in, slopes up to `tol` taken as 0.
    """
    found: dict[str, float] = {}
    with torch.no_grad():
        for site in _sites(model):
            for what, rows in (("tau", site.tau), ("theta", site.theta)):
                if what in site.learned:
                    found |= _spread(f"{site.name}/{what}", rows)
            if "s" in site.learned:
                found[f"{site.name}/left_family"] = float(_left(site.start, site.s, tol))
    return found


def log_gates(
    model: nn.Module, writer: Writer, step: int, *, prefix: str = "gates", tol: float = 0.01
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
            tau, theta, s, _ = module.values()
            taus = tau if isinstance(tau, list) else [tau]
            yield _Site(at, module.init, module.learned, taus, theta, s)
        elif isinstance(module, LSTM | GRU):
            for gate, t in module.learned_gates().items():
                learned = module.learning.train
                yield _Site(f"{at}.{gate}", t.start, learned, [t.tau], [t.theta], t.s)


def _spread(name: str, rows: Sequence[Value]) -> dict[str, float]:
    tensors = [row for row in rows if isinstance(row, Tensor)]
    many = len(tensors) > 1
    # One transfer from the device for a site, not one for each figure.
    figures = torch.stack([f for t in tensors for f in (t.min(), t.mean(), t.max())]).tolist()
    names = [f"{name}_{k + 1}" if many else name for k in range(len(tensors))]
    keys = [f"{each}/{what}" for each in names for what in ("min", "mean", "max")]
    return dict(zip(keys, figures, strict=True))


def _left(start: TG, s: Sequence[Value], tol: float) -> int:
    """How many groups are of another family than `start`, by the rule of `taxonomy.family`."""
    rows = [row for row in s if isinstance(row, Tensor)]  # all of them, where slopes are learned
    slopes = torch.stack(rows).abs().flatten(1) > tol  # (K, G)
    carries, outer = slopes.any(0), slopes[0] | slopes[-1]
    stays = {
        "constant": ~carries,
        "saturating": carries & ~outer if start.clamp is None else carries,
        "multiplicative": outer,
    }[family(start, tol)]
    return int((~stays).sum())
