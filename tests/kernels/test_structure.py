"""The structure of a gate: what it knows, which tensors hold the rest, and what follows from both."""

import copy
import itertools
import math
import pickle

import pytest
import torch

from tests.kernels.layers import moved
from threshold_gating import TAXONOMY, TG, Activation, kernels
from threshold_gating.kernels.call import common_shape, of_call, whole
from threshold_gating.kernels.structure import Gate, Rows, Structure, Tensors, exact
from threshold_gating.kernels.weights import Weights

LEARNABLE = ("tau", "theta", "s", "c")


def learnable(t):
    """What `Activation` lets an instance learn: every set of two, and all of it."""
    names = [
        n
        for n in LEARNABLE
        if not (t.hard and n == "tau") and not (t.K == 1 and n in LEARNABLE[:2])
    ]
    return [] if t.q is not None else [tuple(names), *itertools.combinations(names, 2)]


def number(w):
    return float(w.detach() if isinstance(w, torch.Tensor) else w)


@pytest.mark.parametrize("key", TAXONOMY)
def test_numbers_are_the_rows_of_one_group(key):
    torch.manual_seed(0)
    for train in [(), *learnable(TAXONOMY[key])]:
        act = moved(Activation(key, train=train)).double()
        held = act.tensors()
        for have, want in zip(act._structure.numbers(held), act._structure.rows(held), strict=True):
            assert have == pytest.approx([number(w) for w in want], rel=1e-15, abs=1e-15), train


def test_sharpness_is_bounded_in_numbers_as_in_tensors():
    act = Activation("silu", train=("tau",))
    for rho in (-9.0, 9.0, math.nan):
        with torch.no_grad():
            act.rho.fill_(rho)
        held = act.tensors()
        want = number(act._structure.rows(held).tau[0])
        assert act._structure.numbers(held).tau[0] == pytest.approx(want, rel=1e-6, nan_ok=True)


def test_instances_that_differ_in_other_numbers_have_one_structure():
    first, second = (
        Structure.of(TG(tau, theta, (0, 1), (0, 0))) for tau, theta in ((1.3, 0.2), (0.7, -2))
    )
    assert first == second
    assert hash(first) == hash(second)
    assert first != Structure.of(TG(1.3, 0.2, (0, -1), (0, 0)))  # -1 is known to kernels
    assert first != Structure.of(TG(1.3, 0.2, (0, 1), (0, 0)), ("theta",))
    silu = Structure.of(TAXONOMY["silu"])
    assert silu._replace(native=None) == first
    assert silu.native.name == "silu"


def test_a_structure_outlives_copies_and_files():
    for act in (Activation("gelu"), Activation("relu", train=("theta",))):
        for again in (copy.deepcopy(act), pickle.loads(pickle.dumps(act))):
            assert again._structure == act._structure
            assert hash(again._structure) == hash(act._structure)


@pytest.mark.parametrize(
    ("key", "gate"),
    [
        ("silu", Gate.TWO),
        ("tanh", Gate.CENTRED),
        ("gelu_tanh", Gate.OWN_TAUS),
        ("mish", Gate.ONE_TAU),
        ("relu", Gate.HARD),
    ],
)
def test_an_instance_and_its_arguments_are_evaluated_alike(key, gate):
    t = TAXONOMY[key]
    assert Structure.of(t).gate == exact(t).gate == gate
    found, rows = of_call(t.tau, t.theta, t.s, t.c, owner=t.owner)
    assert found == exact(t)._replace(
        weights=Weights.UNKNOWN, native=None, names=(), anchor=None, form="softmax"
    )
    assert rows.theta == list(t.theta)


def test_rows_of_a_call_become_whole_tensors_and_get_their_gradients():
    tau, theta = torch.tensor(2.0, requires_grad=True), torch.randn(1, 3, 1, requires_grad=True)
    s = torch.randn(1, 3, 1, requires_grad=True)
    rows = Rows([tau], [theta, 1.0], [0.0, s, 1.0], [0.0, 0.0, 0.5])
    shape = common_shape(rows, 3)
    assert shape == (1, 3, 1)
    held = whole(rows, shape)
    assert held.c is None
    assert held.tau0.tolist() == [[2.0] * 3]
    assert held.theta0.tolist() == [theta.flatten().tolist(), [1.0] * 3]
    assert held.s.tolist() == [[0.0] * 3, s.flatten().tolist(), [1.0] * 3]
    (held.tau0.sum() + 2 * held.s.sum()).backward()
    assert tau.grad == 3
    assert s.grad.flatten().tolist() == [2.0] * 3


def test_rows_of_two_shapes_have_no_shape_in_common():
    rows = Rows([1.0], [torch.zeros(4, 1)], [torch.zeros(1, 3), 1.0], [0.0, 0.0])
    assert common_shape(rows, 2) is None
    x = torch.randn(4, 3)
    y = kernels.blend(x, *rows)
    torch.testing.assert_close(y, x * torch.sigmoid(x))


@pytest.mark.parametrize("name", ["tau0", "theta0"])
def test_a_start_that_needs_a_gradient_beside_what_moves_it_gets_one(name):
    act = moved(Activation("silu", share="channel", channels=3, train=("tau", "theta")))
    x, start = torch.randn(50, 3), getattr(act, name).clone().requires_grad_()

    def gradients():
        y = torch.func.functional_call(act, {name: start}, (x,))
        return torch.autograd.grad(y.square().sum(), [start, *act.parameters()])

    with kernels.use("reference"):
        want = gradients()
    torch.testing.assert_close(gradients(), want)  # float32 sums of fifty terms


def test_gates_on_another_device_are_refused_in_torchs_words():
    act = Activation("silu", train=("tau",)).to("meta")
    with pytest.raises(RuntimeError, match="device"):
        act(torch.randn(3))


def test_tensors_are_in_the_order_of_their_names():
    act = Activation("relu", train=("theta", "c"))
    held = act.tensors()
    assert held._fields == Tensors._fields
    assert held.dtheta is act.dtheta
    assert held.c is act.v
    assert held.rho is held.tau0 is None


def test_a_graph_is_not_compiled_again_for_other_numbers():
    torch._dynamo.reset()
    compiled = torch.compile(lambda act, x: act(x), backend="eager", fullgraph=True)
    x = torch.randn(5)
    with kernels.use("reference"), torch._dynamo.config.patch(error_on_recompile=True):
        for tau in (1.0, 2.0, 3.0):
            act = Activation(TG(tau, 0.1, (0, 1), (0, 0)))
            torch.testing.assert_close(compiled(act, x), act(x))


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("name", ["relu6", "hardtanh", "hardsigmoid", "softshrink", "hardshrink"])
def test_a_threshold_that_is_nan_makes_its_channel_nan_and_no_other(name, row):
    act = Activation(name, train=("theta",), share="channel", channels=3)
    x = torch.linspace(-9, 9, 21).unsqueeze(1).expand(-1, 3)
    want = act(x)
    with torch.no_grad():
        act.dtheta[row, 1] = torch.nan
    for run in (act, torch.compile(act, backend="eager")):
        got = run(x)
        assert got[:, 1].isnan().all()
        assert torch.equal(got[:, ::2], want[:, ::2])
