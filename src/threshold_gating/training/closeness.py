"""How far a promoted network is from the network that it was: bounds, measurements, a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion import aten_ops
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.text import WIDTH, columns
from threshold_gating.conversion.watch import evaluating, fresh
from threshold_gating.training.paths import Fed, is_transposed


@dataclass(frozen=True)
class LayerError:
    """How far a promoted layer is from the activation and the layer that it replaces.

    `act` is the activation and `sup` the largest error of its instance over the line, 0.0 where it
    is exact. `bound` is what the weights can make of it in any run: sup times the largest row sum
    of |W|, and times the largest factor seen where the activation is multiplied by something.
    `measured` is the largest difference on the inputs of `promote`, rounding included, and `scale`
    the largest output there. All of them are absolute; None where the function is meant to change.
    """

    act: str
    K: int
    sup: float
    bound: float | None
    measured: float | None
    scale: float


@dataclass(frozen=True)
class Promotion:
    """What `promote` did: the layers of the new tier, and why others stayed as they were.

    `errors` has for each layer how far it may be, and is, from what it was; `output` is
    max|d| / max|y| of the network on the inputs given, or None.
    """

    layers: tuple[str, ...]
    kept: dict[str, str]
    errors: dict[str, LayerError] = field(default_factory=dict)
    output: float | None = None

    def __str__(self) -> str:
        many = "layer" if len(self.layers) == 1 else "layers"
        lines = [f"{len(self.layers)} {many} promoted"]
        if self.errors:
            header = ("layer", "reads", "K", "sup", "bound max|d|", "max|d|", "max|y|")
            lines += columns([header, *(_cells(n, e) for n, e in self.errors.items())])
        else:
            lines = [f"{lines[0]}: {', '.join(self.layers)}"]
        if self.output is not None:
            lines.append(f"output, max|d| / max|y|: {self.output:.1e}")
        return "\n".join([*lines, *_reasons(self.kept)])


def _cells(name: str, error: LayerError) -> tuple[str, ...]:
    bound = "" if error.bound is None else f"{error.bound:.1e}" if error.bound else "rounding"
    measured = "" if error.measured is None else f"{error.measured:.1e}"
    sup = f"{error.sup:.1e}" if error.sup else "exact"
    return name, error.act, str(error.K), sup, bound, measured, f"{error.scale:.1e}"


def _reasons(kept: dict[str, str]) -> Iterator[str]:
    """Lines for what stayed, those with one reason together, each within the width of a page."""
    together: dict[str, list[str]] = {}
    for name, why in kept.items():
        together.setdefault(why, []).append(name or "(network)")
    for why, names in together.items():
        said = names[0] if len(names) == 1 else f"{len(names)} ({names[0]} ... {names[-1]})"
        line = f"{said}: {why}"
        while len(line) > WIDTH and " " in line[:WIDTH].strip():
            cut = line.rindex(" ", 0, WIDTH)
            yield line[:cut]
            line = f"  {line[cut + 1 :]}"
        yield line


def difference(model: nn.Module, other: nn.Module, inputs: Any) -> float:
    """max|d| / max|y| of two networks on the same inputs, in evaluation mode.

    Of several outputs it is the largest. `inputs` are a tensor, a tuple of arguments or a dict of
    keyword arguments.
    """
    ys, zs = (_outputs(each, inputs) for each in (model, other))
    if not ys or [y.shape for y in ys] != [z.shape for z in zs]:
        raise ValueError(
            f"difference: {type(model).__name__} gives tensors of the shapes "
            f"{[tuple(y.shape) for y in ys]} and {type(other).__name__} of "
            f"{[tuple(z.shape) for z in zs]}; there is nothing to compare."
        )
    return max(
        float((y - z).abs().max() / y.abs().max().clamp_min(1e-30))
        for y, z in zip(ys, zs, strict=True)
    )


def expect_same(model: nn.Module, inputs: Any, output: float) -> None:
    """Refuse an `output` of `difference` that rounding does not explain: the layers are exact, and
    what runs between them is not what it was. A network that draws numbers is not judged."""
    allowed = 4 * max(map(rounding, _outputs(model, inputs)))  # which layers hand on
    if not output <= allowed and difference(model, model, inputs) <= allowed:
        raise ValueError(
            f"promote: every promoted layer of {type(model).__name__} computes what it did, and "
            f"the output differs by {output:.1e} of its largest value: what runs between the "
            "layers changes with them. Promote a part of the network; it is left as it was."
        )


def _outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    args, kwargs = arguments(fresh(inputs))
    with evaluating(model):
        outputs = aten_ops.tensors(model(*args, **kwargs))
        return [y for y in outputs if y.is_floating_point() and y.numel()]


def rounding(y: Tensor) -> float:
    """What sums in another order cannot make of results like y, over the largest of them.

    Half of their digits, and at most float32's, in which parts of a network may run; a GPU has 10
    bits in products of float32 (TF32).
    """
    eps = max(torch.finfo(y.dtype).eps, torch.finfo(torch.float32).eps)
    return math.sqrt(max(eps, 2.0**-10) if y.is_cuda else eps)


@contextmanager
def measuring(
    model: nn.Module,
    dense: dict[str, nn.Module],
    feeds: dict[str, list[Fed]],
    errors: dict[str, LayerError],
    *,
    changed: bool,
) -> Iterator[None]:
    """While `model` runs, compare each new layer with the layer that it was, on what both read."""
    hooks = []

    def compare(name: str, layer: Any) -> None:
        given: list[Tensor] = []
        old: Any = dense[name]
        trail = feeds[name][0].trail
        assert trail is not None
        rows = old.weight.t() if is_transposed(old) else old.weight
        most = float(rows.detach().flatten(1).abs().sum(1).max())
        factors = [fed.trail.factor or 1.0 for fed in feeds[name] if fed.trail is not None]
        sup = trail.source.sup
        bound = None if changed else sup * most * max(factors)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            given.append((*args, *kwargs.values())[0])

        def after(module: nn.Module, args: Any, y: Tensor) -> None:
            want = old.forward(given.pop())
            d = None if changed else float((y - want).abs().max())
            scale = float(want.abs().max())
            if d is not None and bound is not None and d > bound + rounding(y) * scale:
                raise ValueError(
                    f"promote: {name} would differ by {d:.1e} from what it computes now, of at "
                    f"most {scale:.1e}, which is more than rounding and the bound {bound:.1e} of "
                    f"{trail.source.act}; the network is left as it was."
                )
            if name in errors:  # of several calls the largest
                d = None if d is None else max(d, errors[name].measured or 0.0)
                scale = max(scale, errors[name].scale)
            errors[name] = LayerError(trail.source.act, layer.K, sup, bound, d, scale)

        hooks.append(layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        hooks.append(layer.register_forward_hook(after))

    for name in dense:
        compare(name, model.get_submodule(name))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
