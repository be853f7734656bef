"""Calls of a CPU that C++ makes: what they have of Python's, and when Python has to make them."""

import copy
import sys
import threading
import time
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import threshold_gating as tg
from tests.kernels.calling import (
    SOFT,
    TOLERANCE,
    channels,
    close,
    gradients,
    images,
    of_python,
    reference,
)
from tests.kernels.layers import moved
from threshold_gating import Activation
from threshold_gating.kernels.blend import host_calls, one_pass

# C++ is built once, in one worker
pytestmark = [
    pytest.mark.parametrize("driver", ["one pass"], indirect=True),
    pytest.mark.xdist_group("calls"),
]

# Threads share the large ones; of the last the parameters are read anew on the way back.
OF_A_CPU = [
    *[({"share": "channel", "channels": 5}, shape) for shape in ((3, 5, 7, 9), (2, 5, 90, 91))],
    ({"share": "channel", "channels": 70, "axis": -1}, (900, 70)),
    ({}, (3, 11, 2)),
    ({}, (70_001,)),
    ({"share": "neuron", "channels": (30, 400)}, (2, 30, 400)),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("share", "shape"), OF_A_CPU)
@pytest.mark.parametrize("name", ["silu", "tanh", "gelu_k3", "gelu_tanh"])
def test_it_has_the_bits_of_python(driver, name, share, shape, dtype, threads):
    act = moved(Activation(name, train=SOFT, **share))
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        have = gradients(act, x, dy)
        assert driver.ran == ["blend_forward", "blend_backward"]
        want = of_python(act, x, dy)
    finally:
        torch.set_num_threads(before)
    assert len(driver.ran) == 2
    assert all(torch.equal(h, w) for h, w in zip(have, want, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_not_finite_is_left_to_python(driver, bad):
    x, dy, act = images(), images(), channels("gelu_k3")
    x[1, 2, 3, 4] = bad
    for h, w in zip(gradients(act, x, dy), of_python(act, x, dy), strict=True):
        assert torch.equal(h.isnan(), w.isnan())
        assert torch.equal(h[~h.isnan()], w[~w.isnan()])


def test_a_slope_that_is_not_finite_is_left_to_python(driver):
    x, dy, act = images(), images(), channels()
    dy[0, 1, 2, 3] = float("inf")
    have = gradients(act, x, dy)
    assert driver.ran == ["blend_forward", "blend_backward refused"]
    assert not have[1].isfinite().all()
    for h, w in zip(have, of_python(act, x, dy), strict=True):
        torch.testing.assert_close(h, w, rtol=0, atol=0, equal_nan=True)


def test_weights_beyond_float32_are_left_to_python(driver):
    x, dy = images(), images()
    act = Activation("gelu_k3", train=SOFT)
    with torch.no_grad():
        act.dtheta.mul_(0).add_(torch.tensor([[-80.0], [80.0]]))
    close(gradients(act, x, dy), reference(act, x, dy), torch.float32)
    assert driver.ran == []


def test_tensors_that_do_not_fit_make_no_call(driver):
    x, act = images().requires_grad_(), channels()
    act.s.data = torch.ones(1, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="gates of 2 branches for 5 groups"):
            act(x)
    assert driver.ran == []


def test_a_call_of_a_converted_network_is_made_so(driver):
    net = tg.convert(nn.Sequential(nn.Linear(4, 4), nn.GELU()), inputs=images()[..., :4])
    x = torch.randn(3, 4)
    want = net(x)
    driver.ran.clear()
    assert torch.equal(net(x), want)
    assert driver.ran == ["blend_forward"]


def test_other_threads_go_on_meanwhile(driver):
    """Python's lock is not held while gates are evaluated."""
    act, x = Activation("gelu"), torch.randn(2**20)
    act(x)
    steps, end = [], threading.Event()

    def count():
        while not end.is_set():
            steps.append(1)
            time.sleep(1e-5)  # hands the lock back

    thread, interval = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # nobody has to hand it over
    thread.start()
    try:
        before, calls = len(steps), 0
        while len(steps) == before and calls < 1000:  # a core may be busy with something else
            act(x)
            calls += 1
        assert len(steps) > before
    finally:
        end.set()
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.parametrize("off", ["blend_forward", "blend_backward"])
def test_a_result_that_is_off_is_seen(driver, off):
    x, dy, act = images(), images(), channels()
    want = reference(act, x, dy)
    close(gradients(act, x, dy), want, torch.float32)
    driver.off = off
    with pytest.raises(AssertionError):
        close(gradients(act, x, dy), want, torch.float32)


def test_a_gradient_of_rows_that_are_known_is_left_to_python(driver):
    """Branches that are not learned are numbers to the code, and their gradients 0."""
    x, dy = torch.randn(6, 5), torch.randn(6, 5)
    act = Activation("silu", train=("tau",), share="channel", channels=5, axis=-1)
    act.s.requires_grad_()
    z = x.clone().requires_grad_()
    found = torch.autograd.grad(act(z), [z, act.rho, act.s], dy)
    assert driver.ran == ["blend_forward"]
    assert not found[2].any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg.kernels.host, "module", lambda device: None)
        other = copy.deepcopy(act)
        want = torch.autograd.grad(other(z), [z, other.rho, other.s], dy)
    assert all(map(torch.equal, found, want))


def test_a_slope_without_memory_is_never_a_forward_pass(driver, monkeypatch):
    x, act = images().requires_grad_(), channels()
    dy, y = images(), act(x)
    dy.untyped_storage().resize_(0)
    # torch's own ops end the process there
    monkeypatch.setattr(host_calls.autograd, "gradients", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y, x, dy)
    assert driver.ran == ["blend_forward", "blend_backward refused"]


def test_a_single_row_may_have_any_shape(driver):
    x, dy, act = images(), images(), channels(train=("tau", "theta"))
    gradients(act, x, dy)
    driver.ran.clear()
    turned = copy.deepcopy(act)
    turned.rho = nn.Parameter(act.rho.detach().view(1, -1))
    have, want = gradients(turned, x, dy), gradients(act, x, dy)
    assert driver.ran == ["blend_forward", "blend_backward"] * 2
    assert have[2].shape == turned.rho.shape
    assert all(torch.equal(h.flatten(), w.flatten()) for h, w in zip(have, want, strict=True))


def test_a_first_call_within_a_mode_shows_it_the_gates_alone(driver, monkeypatch):
    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            return f(*args, **(kwargs or {}))

    act, x = channels(), images()
    with monkeypatch.context() as m, Rounding():
        m.setattr(one_pass, "kind_of", lambda *given: 1 / 0)  # it tries compiled code
        act(x)
    act(x)
    assert driver.ran == ["blend_forward"]


def test_parameters_that_are_looked_up_in_another_way_are(driver):
    class Doubled(OrderedDict):
        def __getitem__(self, name):
            return 2 * super().__getitem__(name)

    act, x = channels(), images()
    before = act(x)
    act._parameters = Doubled(act._parameters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg.kernels.host, "module", lambda device: None)
        want = act(x)
    for _ in range(2):
        assert torch.equal(act(x), want)
    assert not torch.equal(before, want)


def test_memory_stays_until_the_end_of_a_call(driver):
    """Another thread gives a parameter new memory by `.data`, which ends the old one's."""
    act, x = channels(), torch.randn(4, 5, 64, 64)
    first, end = act.s.detach().clone(), threading.Event()
    want = act(x)

    def replace():
        while not end.is_set():
            act.s.data = first.clone()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        assert all(torch.equal(act(x), want) for _ in range(200))
    finally:
        end.set()
        thread.join()
