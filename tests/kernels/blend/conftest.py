"""C++ that makes calls, built once, with what it calls under the eyes of a test."""

import pytest
import torch

from tests.kernels.calling import Passes
from threshold_gating import kernels
from threshold_gating.kernels import compiler, host, runtime
from threshold_gating.kernels.blend import host_calls


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
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU has the real launcher: benchmarks check it")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernels decide by it when they are imported
    from tests.kernels.stepping import Launcher

    made = Launcher()
    monkeypatch.setattr(runtime.Launch, "handle", lambda self, *key: made.handle(self, *key))
    compiled.drive(*made.addresses(), True)
    return made, "triton"
