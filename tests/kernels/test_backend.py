"""Which backend is in force: of a thread, a coroutine, a forward pass."""

import asyncio
import sys
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import threshold_gating as tg
from threshold_gating import kernels
from threshold_gating.kernels import BackendError, backend, use


@pytest.fixture(autouse=True)
def _restored():
    before = backend()
    yield
    use(before)


def in_thread(f):
    found = []
    thread = threading.Thread(target=lambda: found.append(f()))
    thread.start()
    thread.join()
    return found[0]


def test_a_block_is_seen_by_its_own_thread_alone():
    with use("reference"):
        assert backend() == "reference"
        assert in_thread(backend) == "auto"
    assert backend() == "auto"


def test_a_statement_is_the_default_of_new_threads():
    use("reference")
    assert backend() == "reference"
    assert in_thread(backend) == "reference"
    use("auto")
    assert in_thread(backend) == "auto"


def test_a_choice_can_be_entered_again_and_inside_itself():
    chosen, seen = use("reference"), []
    for _ in range(2):
        with chosen:
            seen.append(backend())
            with use("native"), chosen:
                seen.append(backend())
            seen.append(backend())
        seen.append(backend())
    assert seen == ["reference", "reference", "reference", "auto"] * 2
    assert in_thread(backend) == "auto"


def test_a_refused_name_changes_nothing():
    with pytest.raises(BackendError, match="no backend 'cuda'"):
        use("cuda")
    assert backend() == in_thread(backend) == "auto"


def test_threads_that_leave_out_of_order_do_not_change_each_other():
    inside, left = threading.Event(), threading.Event()
    seen = []

    def first():
        with use("reference"):
            inside.set()
            left.wait(10)
            seen.append(backend())
        seen.append(backend())

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    with use("native"):
        seen.append(backend())
    left.set()
    thread.join()
    assert seen == ["native", "reference", "auto"]
    assert backend() == in_thread(backend) == "auto"


def test_coroutines_do_not_see_each_other():
    async def one(name, mine, others, seen):
        with use(name):
            mine.set()
            await others.wait()
            seen[name] = backend()

    async def both():
        a, b, seen = asyncio.Event(), asyncio.Event(), {}
        await asyncio.gather(one("reference", a, b, seen), one("native", b, a, seen))
        return seen, backend()

    assert asyncio.run(both()) == ({"reference": "reference", "native": "native"}, "auto")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_forward_keeps_its_backend(reentrant):
    seen = []

    def block(x):
        seen.append(backend())
        return torch.sin(x) * 2

    x = torch.ones(3, requires_grad=True)
    with use("reference"):
        y = checkpoint(block, x, use_reentrant=reentrant)
    z = checkpoint(block, y, use_reentrant=reentrant)
    with use("native"):
        z.sum().backward()
    assert seen == ["reference", "auto", "auto", "reference"]


def test_a_backward_in_another_thread_has_the_gradients_of_its_forward():
    act = tg.Activation("gelu", train=("tau", "theta"))
    x = torch.randn(7, requires_grad=True)
    with use("reference"):
        y, want = act(x), torch.autograd.grad(act(x).sum(), x)[0]
    assert torch.equal(in_thread(lambda: torch.autograd.grad(y.sum(), x)[0]), want)


def test_a_compiled_module_follows_the_backend_in_each_thread():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    run, x = torch.compile(tg.Activation("silu"), backend=keep, fullgraph=True), torch.randn(5)

    def under(name):
        with use(name):
            return run(x)

    run(x)
    under("reference")
    assert len(graphs) == 2
    assert "silu" in graphs[0]
    assert "sigmoid" in graphs[1]
    assert torch.equal(in_thread(lambda: run(x)), torch.nn.functional.silu(x))
    assert torch.equal(in_thread(lambda: under("reference")), under("reference"))
    assert len(graphs) == 2  # both are found again


def test_kernels_that_are_faster_stand_before_torchs_ops(monkeypatch):
    x, chosen = torch.zeros(1), kernels.backend.__module__
    module = sys.modules[chosen]
    assert kernels.either("native", "gates", x) == "native"  # no kernels run on a CPU
    monkeypatch.setattr(module, "runs_triton", lambda x, name: name != "reference")
    assert kernels.either("native", "gates", x) == "gates"
    assert kernels.either("native", "gates") == "native"
    for name in ("native", "reference"):
        with use(name):
            assert kernels.either("native", "gates", x) == {"reference": "gates"}.get(name, name)
