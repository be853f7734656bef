"""A launcher in place of the driver's: it runs kernels of `blend` in Triton's interpreter.

To be imported with TRITON_INTERPRET=1, for Triton decides then.
"""

import ctypes
import inspect

import torch

from threshold_gating.kernels import host, runtime
from threshold_gating.kernels.blend import kernels

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)  # fmt: skip
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
RETAIN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
ENTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
WIDE = {kernels.blend_forward: 3, kernels.blend_backward: 5}  # tensors like x


class Launcher:
    """Stands for the driver: runs the kernel that a number names in Triton's interpreter."""

    def __init__(self):
        self.known, self.ran, self.refuses, self.errors = [], [], False, []
        self.launch, self.stream = LAUNCH(self._launch), STREAM(lambda device, at: 0)
        self.retain, self.enter = RETAIN(lambda at, device: 0), ENTER(self._enter)
        self.has_context = True

    def addresses(self):
        return [*map(host.address, (self.launch, self.stream, self.retain, self.enter))]

    def _enter(self, context):
        self.has_context = True
        return 0

    def handle(self, launch, device, kinds):
        if (launch, kinds) not in self.known:
            self.known.append((launch, kinds))
        number = 1 + self.known.index((launch, kinds))
        count = len(launch.kernel.arg_names) - len(launch.rest)
        numbers = tuple([n for n, const in _numbers(launch) if not const])
        return runtime.Handle(number, launch.grid, 32 * launch.warps, 0, count, numbers)

    def _launch(self, function, *given):
        *sizes, _shared, _stream, arguments, _extra = given
        if self.refuses:
            return 1
        if not self.has_context:
            return NO_CONTEXT
        try:
            launch, kinds = self.known[function - 1]
            assert tuple(sizes) == (*launch.grid, 32 * launch.warps, 1, 1)
            self._run(launch, kinds, arguments)
        except Exception as error:  # ctypes would print it and go on
            self.errors.append(error)
            return 2
        return 0

    def _run(self, launch, kinds, arguments):
        count = len(launch.kernel.arg_names) - len(launch.rest)
        wide = WIDE.get(launch.kernel, 0)
        places = [ctypes.c_int64.from_address(arguments[k]).value for k in range(count)]
        tensors = [_at(p, kinds if k < wide else torch.float32) for k, p in enumerate(places)]
        passed = [n for n, const in _numbers(launch) if not const]
        got = [ctypes.c_int32.from_address(arguments[count + k]).value for k in range(len(passed))]
        assert got == passed
        ends = [ctypes.c_int64.from_address(arguments[count + len(passed) + k]) for k in (0, 1)]
        assert [end.value for end in ends] == [0, 0]
        self.ran.append(launch.kernel.fn.__name__)
        launch.kernel[launch.grid](*tensors, *launch.rest, num_warps=launch.warps)


def _numbers(launch):
    names = launch.kernel.arg_names[-len(launch.rest) :]
    notes = inspect.get_annotations(launch.kernel.fn)
    return [
        (n, "constexpr" in str(notes.get(k, ""))) for k, n in zip(names, launch.rest, strict=True)
    ]


def _at(place, dtype):
    """A tensor whose memory begins there; kernels know how much there is."""
    memory = (ctypes.c_char * dtype.itemsize).from_address(place)
    return torch.frombuffer(memory, dtype=dtype)
