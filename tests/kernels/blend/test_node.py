"""Calls that C++ makes, on a CPU: a launcher of the tests runs the kernels step by step."""

import copy
import ctypes
import inspect
import os
import pickle
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

INTERPRET = "TRITON_INTERPRET"
pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("a GPU has the real launcher: benchmarks check it", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:  # Triton decides when kernels are imported
    patch.setenv(INTERPRET, "1")
    from threshold_gating.kernels.blend import kernels as triton_kernels

from tests.kernels.layers import moved  # noqa: E402
from threshold_gating import Activation, kernels  # noqa: E402
from threshold_gating.kernels import compiler, host, runtime  # noqa: E402
from threshold_gating.kernels.blend import node  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
SOFT = ("tau", "theta", "s", "c")
LAST = torch.channels_last
# As in test_pairs: sums of a few hundred terms in float32 in another order; 16 bits round y and dx.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)  # fmt: skip
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
WIDE = {triton_kernels.blend_forward: 3, triton_kernels.blend_backward: 5}  # tensors like x


@pytest.fixture(scope="session")
def compiled():
    """The module, compiled once; it takes a quarter of a minute."""
    try:
        compiler._compiler("CXX")
    except compiler.CompilerError as error:
        pytest.skip(str(error))
    return host.load(compiler.extension(host._SOURCE, build=True))


class Launcher:
    """Stands for the driver: runs the kernel that a number names in Triton's interpreter."""

    def __init__(self):
        self.known, self.ran, self.refuses, self.errors = [], [], False, []
        self.launch, self.stream = LAUNCH(self._launch), STREAM(lambda device, at: 0)

    def handle(self, launch, device, kinds):
        if (launch, kinds) not in self.known:
            self.known.append((launch, kinds))
        number = 1 + self.known.index((launch, kinds))
        count = len(launch.kernel.arg_names) - len(launch.rest)
        numbers = tuple([n for n, const in _numbers(launch) if not const])
        return runtime.Handle(number, launch.grid, 32 * launch.warps, 0, count, numbers)

    def _launch(self, function, *sizes_and_arguments):
        *sizes, shared, stream, arguments, extra = sizes_and_arguments
        if self.refuses:
            return 1
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
    return [(n, "constexpr" in str(notes.get(k, ""))) for k, n in zip(names, launch.rest, strict=True)]


def _at(place, dtype):
    """A tensor whose memory begins there; kernels know how much there is."""
    memory = (ctypes.c_char * dtype.itemsize).from_address(place)
    return torch.frombuffer(memory, dtype=dtype)


@pytest.fixture
def driver(compiled, monkeypatch):
    """C++ makes the calls; what it allocates and a kernel does not write is NaN."""
    made = Launcher()
    monkeypatch.setenv(INTERPRET, "1")
    monkeypatch.setattr(host, "module", lambda: compiled)
    monkeypatch.setattr(runtime.Launch, "handle", lambda self, *key: made.handle(self, *key))
    node._slot.cache_clear()
    compiled.drive(host.address(made.launch), host.address(made.stream), True)
    torch.use_deterministic_algorithms(True)  # fills new memory
    with kernels.use("triton"):
        yield made
    torch.use_deterministic_algorithms(False)
    compiled.drive(0, 0, False)
    node._slot.cache_clear()
    assert made.errors == []


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


CASES = [
    *[(name, SOFT) for name in ("silu", "tanh", "gelu_k3", "gelu")],
    *[("relu", ("theta", "s")), ("gelu", ()), ("gelu_tanh", ()), ("silu", ("tau",)), ("relu", ())],
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("name", "train"), CASES)
def test_values_and_every_gradient_are_those_of_float64(driver, name, train, dtype):
    kinds = [(images(dtype).to(memory_format=LAST), 1), (images(dtype), 1)]
    for x, axis in [*kinds, (torch.randn(33, 5).to(dtype), -1)]:
        act = channels(name, train, axis=axis) if train else Activation(name)
        dy = torch.randn_like(x)
        with kernels.use("reference"):
            want = gradients(copy.deepcopy(act).double(), x.double(), dy.double())
        close(gradients(act, x, dy), want, dtype)  # this backward pass is Python's
        driver.ran.clear()
        have = gradients(act, x, dy)
        assert have[1].stride() == have[0].stride() == x.stride()
        assert driver.ran[:2] == ["blend_forward", "blend_backward"]
        close(have, want, dtype)
