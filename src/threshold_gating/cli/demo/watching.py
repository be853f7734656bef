"""Inputs, function and gates of each site of a network, for the report of the demo.

An LSTM or a GRU is one call of torch with several functions inside, and attention is a gate for
each weight (Eq. 11): both are opened here, so that every function that is evaluated has its panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.conversion import sites
from threshold_gating.conversion.plan import module_sites, run, whole
from threshold_gating.conversion.watch import Visit, Watch, evaluating, fresh
from threshold_gating.instance import TG
from threshold_gating.nn import attention, rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.show.svg import Line, Panel
from threshold_gating.taxonomy import TAXONOMY

_POINTS, _EACH = 121, 8  # of a curve, and how many more lie around each for its error
_BINS = 48


class Seen(NamedTuple):
    """A function at a site, the inputs that it got and what the original made of them.

    `t` is set where the gates cannot be chosen.
    """

    site: str
    part: str
    kind: str
    f: Callable[[Tensor], Tensor]
    inputs: Tensor
    outputs: Tensor
    t: TG | None = None


def _seen(
    site: str,
    kind: str,
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    part: str = "",
    t: TG | None = None,
) -> Seen:
    x = x.flatten()
    return Seen(site, part, kind, f, x.clone(), f(x.clone()), t)


_PARTS = {
    **{"i": "input gate i", "f": "forget gate f", "g": "candidate g", "o": "output gate o"},
    **{"cell": "output of the cell", "r": "reset gate r", "z": "update gate z", "n": "candidate n"},
}


def watch(model: nn.Module, x: Tensor) -> list[Seen]:
    """Run a network, not converted, and note what each of its functions gets, in order."""
    found: list[Seen] = []
    modules = {m: made for m, made in module_sites(model).items() if any(made)}

    def see(visit: Visit) -> None:
        if visit.kind == "scaled_dot_product_attention":
            found.append(_attention(visit.name, *visit.args))
        elif visit.kind in _OPEN:
            found.extend(_opened(visit.name, visit.kind, visit.args))
        else:
            found.append(_seen(visit.name, visit.kind, visit.function, visit.x))

    with evaluating(model), Watch(model, see, whole(modules)):
        run(model, fresh(x))
    return found


def _opened(name: str, kind: str, args: Any) -> Iterator[Seen]:
    """The functions inside a recurrent layer, each with its gates."""
    for part, x in _OPEN[kind](*args).items():
        t = rnn.SITES[kind][part]
        f = torch.tanh if t == TAXONOMY["tanh"] else torch.sigmoid
        yield _seen(name, f.__name__, f, x, _PARTS[part], t)


def _attention(name: str, q: Tensor, k: Tensor, v: Tensor) -> Seen:
    """The gate of every weight over how far its logit lies above the threshold (Eq. 11)."""
    z = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    words = "one gate for each weight; x is how far a logit lies above all others together"
    above = _seen(name, "softmax", torch.sigmoid, z - attention.thresholds(z), words)
    return above._replace(outputs=z.softmax(-1).flatten(), t=TAXONOMY["sigmoid"])


def _before(steps: Tensor) -> Tensor:
    """The state that each step starts from: nothing, then what the step before gave."""
    return F.pad(steps[:, :-1], (0, 0, 1, 0))


def _lstm(x: Tensor, state: Any, weights: list[Tensor], *rest: Any) -> dict[str, Tensor]:
    """One layer and direction, batch first, from a state of zeros, as the demo's network has it."""
    w_ih, w_hh, b_ih, b_hh = weights
    steps = torch.lstm(x, state, weights, *rest)[0]
    a = F.linear(x, w_ih, b_ih) + F.linear(_before(steps), w_hh, b_hh)
    i, f, g, o = a.chunk(4, -1)
    c, cells = torch.zeros_like(i[:, 0]), []
    for t in range(x.shape[1]):
        c = f[:, t].sigmoid() * c + i[:, t].sigmoid() * g[:, t].tanh()
        cells.append(c)
    return {"i": i, "f": f, "g": g, "o": o, "cell": torch.stack(cells, 1)}


def _gru(x: Tensor, state: Any, weights: list[Tensor], *rest: Any) -> dict[str, Tensor]:
    w_ih, w_hh, b_ih, b_hh = weights
    steps = torch.gru(x, state, weights, *rest)[0]
    xr, xz, xn = F.linear(x, w_ih, b_ih).chunk(3, -1)
    hr, hz, hn = F.linear(_before(steps), w_hh, b_hh).chunk(3, -1)
    return {"r": xr + hr, "z": xz + hz, "n": xn + (xr + hr).sigmoid() * hn}


_OPEN: dict[str, Callable[..., dict[str, Tensor]]] = {
    "lstm": _lstm,
    "gru": _gru,
}


def instances(converted: nn.Module) -> dict[str, TG]:
    """The instance that really stands at each element-wise site of a converted network."""
    found = {}
    for name, module in converted.named_modules():
        if isinstance(module, Activation):
            found[name] = module.instance()
        for site in (module.__dict__.get("tg_sites") or {}).values():
            if site is not None and site.t is not None:
                found[site.name] = site.t
    return found


def panel(network: str, seen: Seen, chosen: Mapping[str, TG]) -> Panel:
    """The curve of a function beside that of its gates, which may be several, by their label."""
    x = _window(seen.inputs)
    around = torch.linspace(float(x[0]), float(x[-1]), _POINTS * _EACH, dtype=torch.float64)
    lines = []
    for label, t in chosen.items():
        error = (t(around) - seen.f(around)).abs().view(_POINTS, _EACH).amax(1)
        with kernels.use("reference"):
            worst = (Activation(t)(seen.inputs) - seen.outputs).abs().max().item()
        exact = sites.judged(t, seen.f).exact
        lines.append(Line(label, t.K, exact, _floats(t(x)), _floats(error), worst))
    counts = torch.histc(seen.inputs.double(), _BINS, float(x[0]), float(x[-1]))
    curve = _floats(seen.f(x.clone()))
    what = network, seen.site, seen.part, seen.kind
    return Panel(*what, _floats(x), curve, tuple(lines), _floats(counts), len(seen.inputs))


def _window(inputs: Tensor) -> Tensor:
    """Points over nearly all inputs, and at least from -4 to 4, where most functions bend."""
    drawn = torch.randint(len(inputs), (100_000,), generator=torch.Generator().manual_seed(0))
    some = inputs[drawn].double()  # of all it takes longer, and `quantile` has a limit
    low, high = some.quantile(torch.tensor([0.0005, 0.9995], dtype=torch.float64)).tolist()
    return torch.linspace(min(-4.0, low), max(4.0, high), _POINTS, dtype=torch.float64)


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
