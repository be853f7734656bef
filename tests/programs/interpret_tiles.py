"""A program: gates by kernels step by step in tiles of many shapes, and far out, against float64."""

import copy
import sys
from unittest import mock

import torch

from threshold_gating import TG, Activation, kernels
from threshold_gating.kernels.blend import gpu

ALL = ("tau", "theta", "s", "c")
# of every layout, tiles of which all are inside, and ragged ones
SHAPES = [
    *[((16, 64), -1), ((19, 33), -1)],
    *[((2, 4, 64), 1), ((3, 2, 41), 1)],
    *[((16, 64), None), ((17, 31), None)],
]
CUTS = [(1, 32, 2), (2, 32, 4)]  # rows, columns, tiles of a turn
SEVEN = TG(
    1.2,
    (-2.0, -1.1, -0.3, 0.2, 0.9, 1.7),
    (0.0, 0.2, -0.4, 0.5, 0.6, 1.0, 0.9),
    (-1.0, 0.0, 0.3, 0.0, 0.1, 0.0, 0.2),
)
INSTANCES = {"silu": "silu", "mish": "mish", "gelu": "gelu", "seven": SEVEN, "relu": "leaky_relu"}


def results(act, x, dy):
    z = x.clone().requires_grad_()
    y = act(z)
    return [y.detach(), *torch.autograd.grad(y, [z, *act.parameters()], dy)]


def both(act, x):
    """By the reference in float64, and by kernels."""
    dy = torch.randn(x.shape)
    with kernels.use("reference"):
        want = results(copy.deepcopy(act).double(), x.double(), dy.double())
    return want, results(act, x, dy)


def learned(instance, axis, x):
    share = {"share": "layer"} if axis is None else {"share": "channel", "channels": x.shape[axis]}
    train = ("theta", "s", "c") if instance == "leaky_relu" else ALL
    act = Activation(instance, axis=axis or -1, train=train, **share)
    with torch.no_grad():
        for p in act.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return act


def cut_like(rows, columns, turn, whole):
    """In place of the tiles that a machine was swept for; notes whether all of them are inside."""

    def made(m, size, known):
        tiles = m.tiles(rows, columns, 1, 1, 3, turn)
        whole.add((m.layout, m.whole(tiles)))
        return tiles

    return mock.patch.multiple(gpu, tiles_forward=made, tiles_backward=made)


def check_cuts(names):
    """Errors over the largest value: sums of a thousand terms of either sign in float32."""
    whole = set()
    for name in names:
        for shape, axis in SHAPES:
            torch.manual_seed(0)
            x = 2.0 * torch.randn(shape)
            act = learned(INSTANCES[name], axis, x)
            for cut in CUTS:
                gpu.prepared.cache_clear()
                gpu.plan.cache_clear()
                with cut_like(*cut, whole):
                    want, have = both(act, x)
                for k, (w, h) in enumerate(zip(want, have, strict=True)):
                    error = float((h.double() - w).abs().max() / w.abs().max())
                    assert error < 2e-5, (name, shape, axis, cut, k, error)
    assert len(whole) == 6, whole  # of each layout


def check_far():
    """Where gates have stopped changing, out to the largest numbers."""
    exponents = torch.arange(-8.0, 38.5, 0.5)
    x = torch.cat([-(10.0**exponents), 10.0**exponents]).float()[:, None].repeat(1, 4)
    for name in ("mish", "gelu", "seven"):
        for sharp in (0.3, 1.0, 4.0, 40.0):
            act = learned(INSTANCES[name], -1, x)
            with torch.no_grad():
                act.rho.copy_(torch.log(torch.tensor(sharp)))
            want, have = both(act, x)
            for k in (0, 1):  # y and dx, number by number; what no float32 holds is left out
                w, h = want[k], have[k].double()
                fits = w.abs() < 3e38
                error = ((h - w).abs() / (w.abs() + 1e-30))[fits]
                # near a zero of y or of its slope digits cancel, in float32 and in any order
                near = x.abs()[fits] < 100
                assert error[~near].max() < 2e-6, (name, sharp, k, float(error[~near].max()))
                gap = float((h - w).abs()[fits][near].max() / w.abs()[fits][near].max())
                assert gap < 3e-6, (name, sharp, k, gap)


kernels.use("triton")
if sys.argv[1] == "far":
    check_far()
else:
    check_cuts(sys.argv[1:])
print("ok")
