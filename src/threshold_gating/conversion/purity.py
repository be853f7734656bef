"""Whether a module is one function of its input and nothing more, so that a gate can replace it.

A module of torch's own is. Any other might do more than its values on one probe show: store what a
loss reads later, take further arguments, read settings that change, treat a shape, a type or a
mode differently, work in place now and then, or have a backward of its own. What does any of that
keeps its forward, and the calls of torch in it are answered instead.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from threshold_gating.conversion.watch import changed, kept

_PLAIN = (bool, int, float, str, types.NoneType, torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_EMPTY = vars(nn.Module())
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_SHAPES = ((), (1,), (10_000,), (2, 60), (2, 3, 20), (2, 3, 4, 5), (2, 3, 2, 2, 5))


@contextmanager
def probing(module: nn.Module, training: bool = False) -> Iterator[None]:
    """Call a module on numbers of our own; nothing of it, nor of the random numbers, is changed."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), kept(module):
        module.training = training  # a dropout is the identity in evaluation
        yield


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of torch's own activations as it was made."""
    return type(module) in vars(nn).values() and "forward" not in vars(module)


def is_one_call(module: nn.Module) -> bool:
    """Whether forward gives back what one function of torch makes of its input, and does no more.

    Whatever a probe does not meet, a value or a shape that is asked for, is a call of torch, too.
    """
    x = torch.linspace(-9, 9, 120, device="cpu")
    with probing(module), torch.no_grad(), _Recorded() as calls:
        y = module.forward(x)
    return len(calls.made) == 1 and calls.made[0][0] is x and calls.made[0][1] is y


class _Recorded(TorchFunctionMode):
    """The first argument and the result of every call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        self.made.append((args[0] if args else None, y))
        return y


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module has beyond what every module has."""
    return {k: v for k, v in vars(module).items() if k not in _EMPTY}


def obstacle(module: nn.Module) -> str:
    """Why a gate cannot stand for an element-wise module as a whole; empty if it can."""
    if is_torchs(module):
        return ""
    for reason, holds in (
        ("it overrides how a module is called", _calls_as_usual),
        ("its forward takes more than one input", _takes_one_input),
        ("it has settings that may change", _has_plain_settings),
        ("it stores something in each run", _keeps_nothing),
        ("it depends on the shape, the type or the mode", _is_the_same_everywhere),
        ("it has a backward of its own", _has_a_linear_backward),
    ):
        try:
            if not holds(module):
                return reason
        except Exception:  # it refuses what a function of each element takes
            return reason
    return ""


def _calls_as_usual(module: nn.Module) -> bool:
    plain = type(module).__call__ is nn.Module.__call__
    return plain and "forward" not in vars(module)


def _takes_one_input(module: nn.Module) -> bool:
    taken = list(inspect.signature(module.forward).parameters.values())
    return len(taken) == 1 and taken[0].kind is not taken[0].VAR_KEYWORD


def _has_plain_settings(module: nn.Module) -> bool:
    """Whether what forward reads are numbers of the module, constants and functions."""
    settings = own_attributes(module).values()
    if not all(_is_fixed(v) or getattr(v, "__self__", None) is module for v in settings):
        return False
    forward = inspect.unwrap(type(module).forward)
    cells = [cell.cell_contents for cell in forward.__closure__ or ()]
    known = forward.__globals__
    steps = [(i.opname, str(i.argval)) for i in dis.get_instructions(forward.__code__)]
    names = {n for step, n in steps if step == "LOAD_GLOBAL" and not n.isupper()}
    read = [known[n] for n in names if n in known]
    asked = {n for step, n in steps if step in ("LOAD_ATTR", "LOAD_METHOD")}
    shared = [vars(c)[n] for n in asked for c in _own_classes(module) if n in vars(c)]
    return all(isinstance(v, (*_FUNCTIONS, property)) for v in (*cells, *read, *shared))


def _own_classes(module: nn.Module) -> list[type]:
    """The classes of a module below torch's, whose attributes all its objects share."""
    return [c for c in type(module).__mro__ if c.__module__.partition(".")[0] != "torch"]


def _is_fixed(value: Any) -> bool:
    if isinstance(value, functools.partial):
        return all(map(_is_fixed, (value.func, *value.args, *value.keywords.values())))
    return isinstance(value, (*_PLAIN, *_FUNCTIONS))


def _keeps_nothing(module: nn.Module) -> bool:
    with probing(module), changed(module) as what:
        module.forward(torch.randn(5).requires_grad_() * 1)
    return not what


def _is_the_same_everywhere(module: nn.Module) -> bool:
    """Whether shape, type, mode, gradients and autocast make no difference, in place or not."""
    x = torch.linspace(-9, 9, 120, dtype=torch.float64, device="cpu")
    want, over = _called(module, x)
    for shape in _SHAPES:
        some = torch.linspace(-9, 9, torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
        few = _called(module, some[::97].contiguous())[0]
        y = _called(module, some.view(shape))[0].flatten()
        if not (_agree(y, _called(module, some)[0]) and _agree(y[::97], few)):
            return False
    for training in (False, True):
        for grad in (False, True):
            for amp in (False, True):
                y, overwritten = _called(module, x, training, grad, amp)
                # autocast may round to its type on the way
                if overwritten != over or not _agree(y.double(), want, 2e-2 if amp else 1e-12):
                    return False
    for dtype in _TYPES:
        y = _called(module, x.to(dtype))[0]
        exact = _called(module, x.to(dtype).double())[0]
        # its steps round in its own type: 16 of them
        bound = 16 * torch.finfo(dtype).eps * (exact.abs() + 1)
        if y.dtype != dtype or not ((y.double() - exact).abs() <= bound).all():
            return False
    return True


def _agree(y: Tensor, z: Tensor, bound: float = 1e-12) -> bool:
    """To rounding: torch's loops give other last digits where a tensor ends."""
    return bool(((y - z).nan_to_num().abs() <= bound * (z.abs() + 1).nan_to_num()).all())


def _called(
    module: nn.Module, x: Tensor, training: bool = False, grad: bool = False, amp: bool = False
) -> tuple[Tensor, bool]:
    """What a module gives, and whether it is in the memory of its input."""
    given = x.clone().requires_grad_(grad) * 1 if grad else x.clone()
    mode = torch.autocast("cpu", torch.bfloat16) if amp else nullcontext()
    with probing(module, training), torch.set_grad_enabled(grad), mode:
        y = module.forward(given)
    alias = y.data_ptr() == given.data_ptr() and y.numel() > 0
    if alias == torch.equal(given.detach().nan_to_num(), x.nan_to_num()):
        raise ValueError("it overwrites its input with something else, or gives it back")
    return y.detach(), alias


def _has_a_linear_backward(module: nn.Module) -> bool:
    """Whether the gradient is that of the output times a slope of each element."""
    x = torch.linspace(-9.1, 9, 120, dtype=torch.float64, device="cpu", requires_grad=True)
    rows = []
    for size in (1.0, 0.1, -1.0, 7.0, 1e4):
        with probing(module, training=True), torch.enable_grad():
            y = module.forward(x * 1)
            if not y.requires_grad:
                return False
            rows.append(torch.autograd.grad(y, x, torch.full_like(y, size))[0] / size)
    return all(torch.allclose(row, rows[0], rtol=1e-9, atol=0) for row in rows)
