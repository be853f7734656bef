"""What tests of calls that C++ makes have in common; and what stands before the compiled C code of a
CPU, to note what C++ has it do."""

import copy
import ctypes
from functools import partial

import pytest
import torch

from tests.kernels.layers import moved
from threshold_gating import Activation, kernels
from threshold_gating.kernels import host

SOFT = ("tau", "theta", "s", "c")
LAST = torch.channels_last
# As in test_pairs: sums of a few hundred terms in float32 in another order; 16 bits round y and dx.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PASS = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 10, *[ctypes.c_int] * 3, ctypes.c_uint, ctypes.c_void_p
)
OUT, BACK = 2, 12  # arguments of `blend` in blend.c
_address = host.address


class Passes:
    def __init__(self):
        self.ran, self.refuses, self.errors, self._kept = [], False, [], []
        self.off = None  # "blend_forward" or "blend_backward": whose first result is 1 more

    def address(self, function):
        """Where `function` lies, or what stands before it."""
        if getattr(function, "__name__", "") != "blend":
            return _address(function)
        self._kept.append(PASS(partial(self._pass, function)))
        return _address(self._kept[-1])

    def _pass(self, function, *given):
        if self.refuses:
            return 1
        try:
            strange = function(*given)
        except Exception as error:  # ctypes would print it and go on
            self.errors.append(error)
            return 1
        name = "blend_backward" if given[BACK] else "blend_forward"
        if name == self.off:
            ctypes.c_float.from_address(given[OUT]).value += 1
        self.ran.append(f"{name} refused" if strange else name)
        return strange


def images(dtype=torch.float32):
    return torch.randn(3, 5, 7, 9).to(dtype)


def channels(name="silu", train=SOFT, **more):
    return moved(Activation(name, train=train, share="channel", channels=5, **more))


def gradients(act, x, dy, need=None):
    x = x.detach().requires_grad_()
    y = act(x)
    need = [x, *act.parameters()] if need is None else need
    return [y.detach(), *torch.autograd.grad(y, need, dy)]


def close(have, want, dtype):
    for h, w in zip(have, want, strict=True):
        size = max(float(w.abs().max()), 1e-30)
        assert float((h.double() - w).abs().max()) <= TOLERANCE[dtype] * size


def ready(driver, act, x):
    """The module after a call with its backward pass: C++ makes the next one."""
    gradients(act, x, torch.randn_like(x))
    driver.ran.clear()
    return act


def reference(act, x, dy):
    with kernels.use("reference"):
        return gradients(copy.deepcopy(act).double(), x.double(), dy.double())


def of_python(act, x, dy):
    """What Python makes of a call, without the kernels' own roundings in question."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "module", lambda device: None)
        return gradients(copy.deepcopy(act), x, dy)
