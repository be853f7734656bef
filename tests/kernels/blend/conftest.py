"""C++ that makes calls, built once, with what it calls under the eyes of a test."""

import contextlib

import pytest
import torch

from tests.kernels.calling import Passes
from threshold_gating import kernels
from threshold_gating.kernels import compiler, host, runtime
from threshold_gating.kernels.blend import host_calls

# Triton decides when kernels are imported whether it interprets them.
Launcher = None
if not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ModuleNotFoundError):
        patch.setenv("TRITON_INTERPRET", "1")
        from tests.kernels.stepping import Launcher


@pytest.fixture(scope="session")
def compiled():
    """The module; it takes about 15 s, and tests that want it are in one group of workers."""
    try:
        compiler._compiler("CXX")
    except compiler.CompilerError as error:
        pytest.skip(str(error))
    return host.load(compiler.extension(host.SOURCES, build=True))


@pytest.fixture(params=["one pass", "launched"])
def driver(request, compiled, monkeypatch):
    """C++ makes the calls; what it allocates and nobody writes is NaN."""
    made, backend = (_launcher if request.param == "launched" else _passes)(compiled, monkeypatch)
    monkeypatch.setattr(host, "module", lambda device: compiled)
    host_calls._slot.cache_clear()
    torch.use_deterministic_algorithms(True)  # fills new memory
    with kernels.use(backend):
        yield made
    torch.use_deterministic_algorithms(False)
    compiled.drive(0, 0, 0, 0, False)
    host_calls._slot.cache_clear()
    assert made.errors == []


def _passes(compiled, monkeypatch):
    made = Passes()
    monkeypatch.setattr(host, "address", made.address)
    return made, "auto"


def _launcher(compiled, monkeypatch):
    if Launcher is None:
        pytest.skip("Triton is not there, or a GPU that has the real launcher")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made = Launcher()
    monkeypatch.setattr(runtime.Launch, "handle", lambda self, *key: made.handle(self, *key))
    compiled.drive(*made.addresses(), True)
    return made, "triton"
