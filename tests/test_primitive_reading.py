"""What a gate of a compiled graph reads must not be written over before its backward pass."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import threshold_gating as tg
from tests.kernels.layers import moved

pytestmark = [
    pytest.mark.compile,
    # Dynamo looks at it
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]
SOFT = ("tau", "theta", "s", "c")


def gates(name, train=SOFT, **more):
    return moved(tg.Activation(name, train=train, **more))


# As a node, as formulas, in layers: eager code reads x on the way back.
CASES = {
    "node": (lambda: gates("gelu"), (64, 100)),
    "two branches": (lambda: gates("silu"), (8, 10)),
    "five branches": (lambda: gates("gelu", share="channel", channels=10), (8, 10)),
    "tier W": (lambda: moved(tg.Linear(10, 3, tier="W")), (8, 10)),
    "tier S": (lambda: moved(tg.Linear(10, 3, tier="S")), (8, 10)),
}
# Eager code reads something that was made of x.
OTHERS = {
    "hard": (lambda: gates("hardtanh", SOFT[1:]), (8, 10)),
    "convolution": (lambda: moved(tg.Conv1d(4, 3, 2, tier="S", padding=1)), (2, 4, 6)),
}


def later(f, x):
    y = f(x)
    x.add_(3)
    return y


def part(f, x):
    y = f(x[1:])
    x.mul_(3)
    return y


def unseen(f, x):
    y = f(x)
    with torch.no_grad():
        x.add_(1)
    return y


def inside(f, x):
    h = x * 1
    y = f(h)
    h.add_(3)
    return y


# torch says "modified by an inplace operation", or of one of several views that its base was
REFUSED = "modified (by an )?inplace"


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("overwrite", [later, part, unseen, inside])
@pytest.mark.parametrize("case", CASES)
def test_a_graph_refuses_to_go_back_as_eager_code_does(case, overwrite, learns):
    make, shape = CASES[case]
    layer, leaf = make(), torch.randn(shape, requires_grad=learns)
    torch._dynamo.reset()
    for f in (overwrite, torch.compile(overwrite, backend="aot_eager")):
        x = leaf.clone()
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.autograd.grad(f(layer, x).sum(), [*layer.parameters()])


@pytest.mark.parametrize("case", OTHERS)
def test_what_eager_code_does_not_read_again_may_change(case):
    make, shape = OTHERS[case]
    layer, x = make(), torch.randn(shape, requires_grad=True)
    torch._dynamo.reset()
    f = torch.compile(inside, backend="aot_eager", fullgraph=True)
    have, want = (
        torch.autograd.grad(g(layer, x).square().sum(), [x, *layer.parameters()])
        for g in (f, inside)
    )
    for h, w in zip(have, want, strict=True):  # the same steps, summed in another order
        torch.testing.assert_close(h, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learns", [True, False])
def test_another_input_of_the_branches_is_looked_at_as_well(learns):
    t = tg.TAXONOMY["gelu_k3"]

    def f(x, v):
        y = tg.kernels.blend(x, t, v=v)
        v.add_(1)
        return y

    torch._dynamo.reset()
    x, v = torch.randn(8, 10, requires_grad=True), torch.randn(8, 10, requires_grad=learns)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(torch.compile(f, backend="aot_eager")(x, v.clone()).sum(), x)


@pytest.mark.parametrize("shape", [(64, 100), (8, 10)])
def test_the_compiler_refuses_too_and_makes_no_copy(shape):
    act, x = gates("gelu"), torch.randn(shape)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(torch.compile(later)(act, x.clone()).sum(), [*act.parameters()])

    def f(x):
        return act(x * 2) * 3

    torch._dynamo.reset()
    z = x.clone().requires_grad_()
    have, code = run_and_get_code(
        lambda: torch.autograd.grad(torch.compile(f)(z).sum(), [z, *act.parameters()])
    )
    want = torch.autograd.grad(f(z).sum(), [z, *act.parameters()])
    for h, w in zip(have, want, strict=True):  # sums of some thousand terms in another order
        torch.testing.assert_close(h, w, rtol=1e-4, atol=1e-3)
    forward, backward = code
    assert "threshold_gating.read" not in forward + backward
    # x * 2, and the result; of a node what the gates give, too
    assert forward.count("empty_strided_cpu(") - forward.count("def ") <= 4


def test_where_nothing_goes_back_x_is_as_it_is():
    from threshold_gating.primitive.reading import read

    x, learned = torch.randn(3), [torch.ones(1, requires_grad=True), 0.5, None]
    assert read(x, [torch.ones(1), 0.5]) is x
    with torch.no_grad():
        assert read(x, learned) is x
    own = read(x, learned)
    assert own is not x
    assert torch.equal(own, x)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_of_functions_compile(transform):
    act = gates("silu")
    functions = {
        "vmap": torch.func.vmap(act),
        "grad": torch.func.grad(lambda x: act(x).sum()),
        "jvp": lambda x: torch.func.jvp(act, (x,), (torch.ones_like(x),))[1],
    }
    f, x = functions[transform], torch.randn(6, 10)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(x), f(x), rtol=1e-5, atol=1e-6)


def test_an_exported_graph_has_no_such_op():
    act = gates("gelu_k3")
    program = torch.export.export(act, (torch.randn(4, 5),))
    assert "threshold_gating.read" not in str(program.graph)
