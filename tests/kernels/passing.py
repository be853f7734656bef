"""Stands before the compiled C code of a CPU, and notes what C++ has it do."""

import ctypes
from functools import partial

from threshold_gating.kernels import host

PASS = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 10, *[ctypes.c_int] * 3, ctypes.c_uint, ctypes.c_void_p
)
BACK = 12  # the argument that says which way
_address = host.address


class Passes:
    def __init__(self):
        self.ran, self.refuses, self.errors, self._kept = [], False, [], []

    def address(self, function):
        """Where `function` lies, or what stands before it."""
        if getattr(function, "__name__", "") != "blend":
            return _address(function)
        self._kept.append(PASS(partial(self._pass, function)))
        return _address(self._kept[-1])

    def _pass(self, function, *given):
        if self.refuses:
            return 1
        self.ran.append("blend_backward" if given[BACK] else "blend_forward")
        return function(*given)
