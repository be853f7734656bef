"""Outputs of two networks, compared tensor by tensor, and how much they may differ.

Each tensor has a bound of its own, so that a small one does not hide beside a large one: the larger
of `RELATIVE` of its largest value (where every site is exact, 1024 ulp) and twice the original's
own rounding, which is how far it is from itself in a wider type, but never more than `LARGEST`.
Whole numbers and truth values
(a choice, a code) are compared by the share of them that differ.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion.site_error import LARGEST, RELATIVE, difference, floats, widened
from threshold_gating.conversion.watch import copied, evaluating, fresh

# Ulp of the largest output that exact sites may make together. Rounding grows with depth: 25 are
# common. More than this is no rounding, unless it is the original's, too.
_ULPS = 1024


@dataclass(frozen=True)
class Output:
    """The error of one tensor or number of the output, over its finite `elements`.

    Largest, the same relative to the largest value (of whole numbers: the share that differs),
    root mean square, and that relative to the values'. `bound` is for `relative`; `rounding` is the
    original's own, None where the bound did not need it or it could not be measured.
    """

    name: str
    elements: int
    max: float
    relative: float
    rms: float
    rel_rms: float
    bound: float
    rounding: float | None = None
    whole: bool = False

    @property
    def excess(self) -> float:
        """The error in units of its bound."""
        if not self.relative:
            return 0.0
        return self.relative / self.bound if self.bound else math.inf


# By numpy's word for what kind of number a type holds.
_TYPES = {
    **{"f": torch.float64, "i": torch.int64, "u": torch.int64, "b": torch.bool},
    "c": torch.complex128,
}
# What is the same or not: it must be, and proves nothing about the data.
_WORDS = (str, bytes, type, Enum, torch.dtype, torch.device)
_OPAQUE = (nn.Module, ModuleType, FunctionType, MethodType)  # their attributes are not their value


def leaves(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor and number in an output with its place: "['logits']", "[0]", ".loss"."""
    return ((name, leaf) for name, leaf in _walk(tree, "", ()) if isinstance(leaf, Tensor))


def uncompared(tree: Any) -> tuple[str, ...]:
    """What is in an output and cannot be compared, as "[1] (generator)"."""
    found = ((n, x) for n, x in _walk(tree, "", ()) if not isinstance(x, (Tensor, *_WORDS)))
    return tuple(f"{n or 'all of it'} ({type(x).__name__})" for n, x in found)


def _words(tree: Any) -> dict[str, Any]:
    return {name: leaf for name, leaf in _walk(tree, "", ()) if isinstance(leaf, _WORDS)}


def _walk(tree: Any, name: str, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """What an output holds, tensors and numbers as real tensors; `around` are the objects that hold
    it, of which none is walked again."""
    if tree is None or id(tree) in around:
        return
    if isinstance(tree, Tensor) and not tree.is_nested:
        dense = tree.to_dense() if tree.layout != torch.strided else tree
        yield name, torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    elif isinstance(tree, bool | int | float | complex) and not isinstance(tree, Enum):
        wide = {float: torch.float64, complex: torch.complex128}.get(type(tree))
        yield from _walk(torch.tensor(tree, dtype=wide), name, around)
    elif getattr(getattr(tree, "dtype", None), "kind", "") in _TYPES:
        array = torch.tensor(tree.tolist(), dtype=_TYPES[tree.dtype.kind])
        yield from _walk(array, name, around)
    elif (parts := _parts(tree)) is None:
        yield name, tree
    else:
        for place, part in parts:
            yield from _walk(part, name + place, (*around, id(tree)))


def _parts(tree: Any) -> list[tuple[str, Any]] | None:
    """What an object holds, and where; None for one that cannot be looked into."""
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, Tensor):  # nested
        return [(f"[{k}]", value) for k, value in enumerate(tree.unbind())]
    if isinstance(tree, set | frozenset):  # in no order of their own
        tree = sorted(tree, key=_order)
    if isinstance(tree, list | tuple | deque | range):
        return [(f"[{k}]", value) for k, value in enumerate(tree)]
    if isinstance(tree, (*_WORDS, *_OPAQUE)):
        return None
    if is_dataclass(tree):
        return [(f".{field.name}", getattr(tree, field.name, None)) for field in fields(tree)]
    slots = [s for base in type(tree).__mro__ for s in getattr(base, "__slots__", ())]
    if not hasattr(tree, "__dict__") and not slots:
        return None
    held = {slot: getattr(tree, slot) for slot in slots if hasattr(tree, slot)}
    return [(f".{key}", value) for key, value in {**held, **getattr(tree, "__dict__", {})}.items()]


def _order(value: Any) -> Any:
    """By which the members of a set are sorted: alike in two sets that are nearly the same."""
    if isinstance(value, Tensor):
        return "tensor", str(tuple(value.shape)), abs(value.double().sum().item())
    is_number = isinstance(value, bool | int | float)
    return type(value).__name__, "" if is_number else repr(value), value if is_number else 0


def compare(
    want: Any, have: Any, exact: bool, tol: float | None, wide: Callable[[], Any]
) -> tuple[Output, ...]:
    """One record for each tensor; () where the two do not hold the same.

    `wide` gives the original's output in a wider type, or None; it is asked only where a difference
    is larger than the bound without it.
    """
    before, after = dict(leaves(want)), dict(leaves(have))
    if _shapes(before) != _shapes(after):
        return ()
    found = [_compared(name, y, after[name], exact, tol) for name, y in before.items()]
    if tol is None and any(o.excess > 1 for o in found):
        twice = dict(leaves(wide()))
        if _shapes(twice) == _shapes(before):
            found = [_rounded(o, before[o.name], twice[o.name]) for o in found]
    return tuple(found)


def agree(want: Any, have: Any, tol: float | None, wide: Callable[[], Any]) -> bool:
    """Whether two outputs of one network are the same to rounding, or within `tol`."""
    if _shapes(dict(leaves(want))) != _shapes(dict(leaves(have))):
        return False
    return all(o.excess <= 1 for o in compare(want, have, True, tol, wide))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tuple(t.shape) for name, t in tensors.items()}


def _compared(name: str, y: Tensor, z: Tensor, exact: bool, tol: float | None) -> Output:
    whole = not y.is_floating_point()
    d = difference(y, z)
    values = y.double().nan_to_num(0, 0, 0)
    n = int(y.isfinite().sum())
    largest, rms = (d.max().item(), d.square().mean().sqrt().item()) if n else (0.0, 0.0)
    if not n and d.any():
        largest = rms = math.inf
    size = values.abs().max().item() if n else 0.0
    total = values.square().mean().sqrt().item() if n else 0.0
    relative = (d != 0).double().mean().item() if whole and n else largest / (size or 1.0)
    bound = RELATIVE if tol is None else float(tol)
    if tol is None and exact and not whole:
        bound = min(RELATIVE, _ULPS * torch.finfo(y.dtype).eps)
    return Output(name, n, largest, relative, rms, rms / (total or 1.0), bound, whole=whole)


def _rounded(o: Output, y: Tensor, wide: Tensor) -> Output:
    """With the original's own rounding in the bound."""
    both = y.isfinite() & wide.isfinite()
    if not both.any():
        return o
    d, values = difference(y, wide)[both], y.double()[both].abs()
    share = (d != 0).double().mean().item() if o.whole else 0.0
    own = share if o.whole else d.max().item() / (values.max().item() or 1.0)
    return replace(o, bound=max(o.bound, min(2 * own, LARGEST)), rounding=own)


def in_wider_type(model: nn.Module, args: Any, kwargs: Any, want: Any) -> Any:
    """The original's output, computed in float32 if it has 16-bit types, else in float64.

    None where that says nothing: it works in float64 already, it does not run in the wider type, or
    it draws random numbers or does not give the same twice, so that a difference would not be its
    rounding.
    """
    types = {t.dtype for t in floats([*model.parameters(), *model.buffers(), args, kwargs, want])}
    narrow = [t for t in types if t.itemsize < 4]
    if not narrow and torch.float32 not in types:
        return None
    dtype = torch.float32 if narrow else torch.float64
    try:
        again, draws = _run(copied(model), *fresh((args, kwargs)))
        pairs = zip(dict(leaves(want)).values(), dict(leaves(again)).values(), strict=True)
        if draws or any(difference(y, z).any() for y, z in pairs):
            return None
        return _run(copied(model).to(dtype), *widened(fresh((args, kwargs)), dtype))[0]
    except Exception:  # whatever hinders it: then there is no measure, and the plain bound holds
        return None


def _run(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """The output, and whether random numbers were drawn on the way."""
    with evaluating(model):
        state = torch.get_rng_state()
        output = model(*args, **kwargs)
        return output, not torch.equal(state, torch.get_rng_state())


def judged(
    found: Sequence[Output], want: Any, have: Any, tol: float | None, worst: Mapping[str, str]
) -> str:
    """What is wrong with the output, "" if nothing is."""
    trees = want, have
    for what, say in (
        ([_shapes(dict(leaves(tree))) for tree in trees], "differ in shape: {} and, converted, {}"),
        (
            [{n: t.dtype for n, t in leaves(tree)} for tree in trees],
            "differ in type: {} and, converted, {}",
        ),
        ([_words(tree) for tree in trees], "differ: {!r:.40} and, converted, {!r:.40}"),
    ):
        for name in what[0] | what[1]:
            first, then = (each.get(name, "nothing") for each in what)
            if first != then:
                return f"the outputs{_place(name)} {say.format(first, then)}."
    if any(not math.isfinite(o.max) for o in found):
        return (
            "the output is infinite or NaN at other places than the original's; "
            "give inputs on which both are finite, or sites={name: None} for what overflows."
        )
    if not any(o.elements for o in found):
        if not found and tol == math.inf:
            return ""
        holds = "finite number on these inputs" if found else "tensor or number to compare"
        return (
            f"nothing was compared at the output: it holds no {holds}; "
            f"{'give inputs with finite elements' if found else 'tol=math.inf accepts that'}."
        )
    bad = max(found, key=lambda o: o.excess)
    return "" if bad.excess <= 1 else _too_far(bad, tol, worst)


def _place(name: str) -> str:
    return f" {name}" if name else ""


def _is_capped(o: Output) -> bool:
    """Whether the original's own rounding is more than any bound allows for."""
    return o.rounding is not None and 2 * o.rounding > LARGEST


def _too_far(bad: Output, tol: float | None, worst: Mapping[str, str]) -> str:
    why = f"{bad.bound:.3g} is {'what tol allows' if tol is not None else 'allowed'}"
    if bad.rounding is not None:
        why += f" (the original's own rounding is {bad.rounding:.2g}"
        why += f", of which {LARGEST:g} at most is allowed for)" if _is_capped(bad) else ")"
    off = f"{bad.relative:.3g} of its largest value"
    if bad.whole:
        off = f"{round(bad.relative * bad.elements)} of {bad.elements} whole numbers"
    said = f"the output{_place(bad.name)} is off by {off}; {why}."
    if _is_capped(bad):
        said += (
            " In a wider type it gives something else: it amplifies rounding, or asks for its type."
        )
    if not worst:
        return f"{said} Every site is exact; tol= sets a bound of your own."
    first, *_ = worst
    return (
        f"{said} The sites with the largest errors are {', '.join(list(worst.values())[:3])}. "
        f"`tg.calibrate` fits them to your data, sites={{{first!r}: K}} takes more branches, and "
        "tol= sets a bound of your own (math.inf accepts any)."
    )


def described(
    worst: Output | None, found: Sequence[Output], tol: float | None, trained: bool = False
) -> str:
    """The line of the table."""
    if worst is None:
        return "output: nothing to compare"
    place = f"output{_place(worst.name)}"
    if len(found) > 1:
        place += f", the worst of {len(found)}"
    error = f"max|d|/max|y| {worst.relative:.2e}"
    if worst.whole:
        error = f"{round(worst.relative * worst.elements)} of {worst.elements} whole numbers differ"
    allowed = f"{worst.bound:.2g} allowed" if tol is None else f"tol {tol:.2g}"
    if tol == math.inf:
        allowed = "accepted by tol=inf"
    if _is_capped(worst):
        allowed += f", the most; the original's own rounding is {worst.rounding:.2g}"
    elif worst.rounding is not None and worst.bound == 2 * worst.rounding:
        allowed += ", twice the original's own rounding"
    if trained:
        allowed = "it was trained, and is not held to the original's"
    return f"{place}: max {worst.max:.2e}, {error} ({allowed}), rms {worst.rms:.2e}"
