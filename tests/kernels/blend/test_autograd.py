"""Gates written over their input by one launch: interpreted on a CPU, compiled where marked gpu."""

import itertools

import pytest
import torch
from torch import nn

from tests.kernels.layers import moved
from threshold_gating import Activation, kernels

SOFT, HARD = ("tau", "theta", "s", "c"), ("theta", "s")
GATES = [("silu", SOFT), ("gelu", ("tau", "theta")), ("relu", HARD), ("hardtanh", HARD)]
LAST = torch.channels_last
# Sums of up to 2310 terms of either sign in float32: on a GPU, whose exponentials are off by a unit,
# tau's of one GELU for all was off by 1.9e-5, for a hundredth of it was left. bf16 rounds y and dx.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2}


def made(name, train, channels, axis, device):
    share = {"share": "channel", "channels": channels, "axis": axis} if channels else {}
    return moved(Activation(name, train=train, inplace=True, device=device, **share))


def inputs(device, dtype):
    """Images both ways round, tokens, one gate for all; ragged."""
    image, tokens = torch.randn(3, 5, 7, 9, device=device), torch.randn(33, 70, device=device)
    yield image.to(dtype).to(memory_format=LAST), 5, 1
    yield image.to(dtype), 5, 1
    yield tokens.to(dtype), 70, -1
    yield tokens.to(dtype), None, 1


def results(act, x, dy, backend):
    """y over x, and every gradient; the layout in which the gradient of x arrives."""
    leaf = x.detach().clone().requires_grad_()
    with kernels.use(backend):
        z = leaf * 2.0
        place, version = z.data_ptr(), z._version
        y = act(z)
        if backend == "triton":
            assert y is z
            assert z.data_ptr() == place
            assert z._version > version
            assert type(y.grad_fn).__name__ == "OverwriteBackward"
        grads = torch.autograd.grad(y, [leaf, *act.parameters()], dy)
    return [y.detach(), *grads]


def check_all(device, dtypes):
    torch.manual_seed(0)
    for dtype in dtypes:
        for (name, train), (x, channels, axis) in itertools.product(GATES, inputs(device, dtype)):
            act, dy = made(name, train, channels, axis, device), torch.randn_like(x)
            have = results(act, x, dy, "triton")
            want = results(act.double(), x.double(), dy.double(), "reference")
            assert have[1].stride() == x.stride()
            for h, w in zip(have, want, strict=True):
                size = max(float(w.abs().max()), 1e-30)
                assert float((h.double() - w).abs().max()) <= TOLERANCE[dtype] * size, name


def check_strange(device):
    """What somebody else holds, second derivatives, no derivatives, views, NaN and inf."""
    torch.manual_seed(0)
    act = made("silu", SOFT, 6, -1, device)
    plain = Activation("silu", share="channel", channels=6, axis=-1, train=SOFT, device=device)
    plain.load_state_dict(act.state_dict())
    leaf = torch.randn(4, 6, device=device, requires_grad=True)
    with kernels.use("triton"):
        kept = leaf.exp()  # torch's exp keeps its result
        act(kept).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()
        kept = leaf.exp()
        with torch.no_grad():
            act(kept)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            act(leaf)
        second = []
        for f in (act, plain):
            (dx,) = torch.autograd.grad(f(leaf * 2).square().sum(), leaf, create_graph=True)
            second.append(torch.autograd.grad(dx.square().sum(), [leaf, *f.parameters()]))
        for ours, theirs in zip(*second, strict=True):
            torch.testing.assert_close(ours, theirs)
        for x in (
            leaf.detach().clone(),
            torch.tensor([[torch.nan, torch.inf, -torch.inf, 0, 3e38, -3e38]], device=device),
        ):
            want = plain(x).detach()
            with torch.no_grad():
                y = x.clone()
                assert act(y) is y
            torch.testing.assert_close(y, want, equal_nan=True)
            with torch.inference_mode():
                z = x.clone()
                torch.testing.assert_close(act(z), want, equal_nan=True)
        with torch.no_grad(), pytest.raises(RuntimeError, match="outside InferenceMode"):
            act(z)
        base = leaf * 2
        rows = base[1:3]  # a view: its base is overwritten, too
        y = act(rows)
        torch.testing.assert_close(base[1:3], plain(leaf[1:3] * 2))
        torch.testing.assert_close(
            torch.autograd.grad(base.sum(), leaf)[0],
            torch.autograd.grad(plain(leaf[1:3] * 2).sum() + 2 * leaf[[0, 3]].sum(), leaf)[0],
        )
        assert act(torch.empty(0, 6, device=device)).shape == (0, 6)


def check_network(device):
    """In place and not, two networks train alike."""
    torch.manual_seed(0)

    def network(inplace):
        act = {"share": "channel", "channels": 4, "train": HARD, "inplace": inplace}
        layers = [nn.Conv2d(3, 4, 3), Activation("relu", **act), nn.Conv2d(4, 4, 3)]
        return nn.Sequential(*layers, Activation("relu", **act), nn.Flatten(), nn.Linear(64, 2))

    one, other = network(True).to(device), network(False).to(device)
    other.load_state_dict(one.state_dict())
    x = torch.randn(5, 3, 8, 8, device=device)
    with kernels.use("triton"):
        for net in (one, other):
            rate = torch.optim.SGD(net.parameters(), 0.1)
            for _ in range(3):
                rate.zero_grad()
                net(x).square().sum().backward()
                rate.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_gates_over_their_input_equal_float64_step_by_step(step_by_step):
    step_by_step("interpret_overwriting.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gates_over_their_input_equal_float64(dtype):
    check_all("cuda", [dtype])


@pytest.mark.gpu
def test_gates_over_their_input_are_right_whoever_looks():
    check_strange("cuda")
    check_network("cuda")
