"""What is timed, held against float64 at its own size; the pairs are checked at smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import allowed, errors
from benchmarks.subjects import Tensors

# Elements at once: formulas keep some dozens of float64 tensors of that size for their slopes.
_AT_ONCE = 2**20


class WrongError(ArithmeticError):
    """A contender gives something else than the formulas it stands for."""


def hold(
    ours: Callable[[], Any],
    f: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    dy: Tensor | None = None,
    **rounded: Any,
) -> None:
    """Raise `WrongError` if `ours()` is not what f gives in float64.

    Args:
        ours: gives y; with dy, the gradients of `inputs` and `own`, in that order.
        f: of `inputs`, or of as many rows of each; its parameters are `own`.
        own: in float64, named as in `pairs` ("tau 0", "s 0"): these names tell `pairs.errors` that
            a gradient is a sum, which has another scale and bound.
        rounded: what `pairs.allowed` is to know.
    """
    want = _exact(f, inputs, own, dy)  # first: ours may overwrite its input
    x = next(iter(inputs.values()))
    given = ours()
    results = given if isinstance(given, tuple) else (given,)
    have = {name: t.detach() for name, t in zip(want, results, strict=True)}
    for name, error in errors(have, want, x.detach()).items():
        if not error <= (most := allowed(name, x.dtype, **rounded)):
            size = "x".join(map(str, x.shape))
            raise WrongError(f"{name} of {size}: error {error:.1e} above {most:.1e}")


def _exact(
    f: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    dy: Tensor | None,
) -> Tensors:
    """By name what `hold` compares, some rows after the other."""
    x = next(iter(inputs.values()))
    rows = max(1, _AT_ONCE * len(x) // x.numel())
    found: list[Tensors] = []
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        given = [t[part].detach().double().requires_grad_() for t in inputs.values()]
        y = f(*given)
        if dy is None:
            found.append({"y": y.detach()})
            continue
        slopes = torch.autograd.grad(y, [*given, *own.values()], dy[part].double())
        found.append(dict(zip((f"d{name}" for name in (*inputs, *own)), slopes, strict=True)))
    parts = {name: [each[name] for each in found] for name in found[0]}
    sums = {f"d{name}" for name in own}
    return {n: torch.stack(p).sum(0) if n in sums else torch.cat(p) for n, p in parts.items()}
