"""Gated units, frozen activations, and how the cost grows with the work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.elementwise import SHORT, SOFT, check, gradients
from benchmarks.exact import hold
from benchmarks.timing import CHECK, Contenders, Place, Work
from threshold_gating import TAXONOMY, Activation, kernels

_gelu_tanh = partial(F.gelu, approximate="tanh")
# What torch computes, and the key of what we do.
UNITS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "swiglu": (F.silu, "silu"),
    "geglu": (F.gelu, "gelu"),
    "geglu tanh": (_gelu_tanh, "gelu_tanh"),
}
# torch's modules, because it is a module that stands in for them
_NATIVE: dict[str, nn.Module] = {
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "tanh": nn.Tanh(),
    "relu in place": nn.ReLU(inplace=True),
}


def gated_units(shape: tuple[int, ...], place: Place) -> Iterator[Work]:
    """SwiGLU and GEGLU in one pass against eager, torch.compile and Liger's kernels."""
    for name in UNITS:
        missing = place.device == "cuda" and name in _LIGER and not _liger(name)
        note = "without Liger, which is not installed" if missing else ""
        for backward in (False, True):
            work = f"{name} {'+ backward' if backward else 'forward'}"
            build = partial(_unit, name, shape, place, backward)
            yield Work(
                "gated units", work, build, {"best": 1.02}, ("frozen times",), backward=backward,
                note=note,
            )  # fmt: skip


def _unit(name: str, shape: tuple[int, ...], place: Place, backward: bool) -> Contenders:
    op, key = UNITS[name]
    t = TAXONOMY[key]
    x, up, dy = (torch.randn(shape, device=place.device, dtype=torch.bfloat16) for _ in range(3))

    def plain(x: Tensor, up: Tensor) -> Tensor:
        return op(x) * up

    def ours(x: Tensor, up: Tensor) -> Tensor:
        return kernels.blend(x, t, up=up)

    ways = {"eager": plain, "ours": ours, **place.compiled(plain)}
    if place.device == "cuda":
        ways |= _liger(name)
    found: Contenders = {n: partial(f, x, up) for n, f in ways.items()}
    if backward:
        for way, f in ways.items():  # each with inputs of its own: Liger's backward overwrites them
            given = [t.clone().requires_grad_() for t in (x, up)]
            found[way] = partial(gradients, f, given, given, dy)
    inputs = {"x": x, "up": up}
    found[CHECK] = partial(
        hold, found["ours"], lambda x, up: t(x) * up, inputs, {}, dy if backward else None,
        roundings=3,
    )  # fmt: skip
    return found


# units with a kernel of Liger's: its module and function
_LIGER = {
    "swiglu": ("swiglu", "LigerSiLUMulFunction"),
    "geglu tanh": ("geglu", "LigerGELUMulFunction"),
}


def _liger(name: str) -> dict[str, Callable[..., Tensor]]:
    if name not in _LIGER:
        return {}
    module, function = _LIGER[name]
    try:
        found = importlib.import_module(f"liger_kernel.ops.{module}")
    except ImportError:
        return {}
    return {"liger": getattr(found, function).apply}


def frozen(shape: tuple[int, ...], dtype: torch.dtype, place: Place) -> Iterator[Work]:
    """Exact instances under `auto` are torch's own op, which overwrites where it should."""
    for key in _NATIVE:
        build = partial(_frozen, key, shape, dtype, place)
        yield Work("frozen", f"{key} {SHORT[dtype]}", build, {"native": 1.02}, ("frozen module",))


def _frozen(key: str, shape: tuple[int, ...], dtype: torch.dtype, place: Place) -> Contenders:
    x = torch.randn(shape, device=place.device, dtype=dtype)
    native = _NATIVE[key]
    ours = Activation(key.split()[0], inplace=getattr(native, "inplace", False))
    call = partial(ours, x)
    return {"native": partial(native, x), "ours": call, CHECK: check(call, ours, x)}


def growth(powers: range, place: Place) -> Iterator[Work]:
    """Cost as the work grows: a learned SiLU, one for all elements, over a copy."""
    for power in powers:
        build = partial(_grown, 2**power, place)
        yield Work("growth", f"2^{power} fp32", build, {"copy": None}, ("module",), power=power)


def _grown(elements: int, place: Place) -> Contenders:
    x = torch.randn(elements, device=place.device)
    act = Activation("silu", train=SOFT, device=place.device)
    ours = partial(act, x)
    return {"copy": partial(torch.empty_like(x).copy_, x), "ours": ours, CHECK: check(ours, act, x)}
