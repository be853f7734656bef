"""A program: learned gates by kernels step by step, in tiles of many shapes, far out, and with
parameters of many sizes, against float64."""

import copy
import sys
from unittest import mock

import torch

from threshold_gating import TG, Activation, kernels
from threshold_gating.kernels.blend import gpu
from threshold_gating.kernels.blend import kernels as compiled

ALL = ("tau", "theta", "s", "c")
# of every layout, tiles of which all are inside, and ragged ones
SHAPES = [
    *[((16, 64), -1), ((19, 33), -1)],
    *[((2, 4, 64), 1), ((3, 2, 41), 1)],
    *[((16, 64), None), ((17, 31), None)],
]
CUTS = [(1, 32, 2), (2, 32, 4)]  # rows, columns, tiles of a turn


def branches(K, flat=False):
    """Of K branches with one tau; `flat`, the last has no slope."""
    at = torch.linspace(-1, 1, K - 1).tolist()
    s = [*torch.linspace(0.05, 1.0, K).tolist()[:-1], 0.0 if flat else 1.0]
    return TG(1.2, tuple(at), tuple(s), tuple(0.1 * (k % 3) - 0.1 for k in range(K)))


def flat_below(K):
    """The same with a first branch of 0."""
    t = branches(K)
    return TG(t.tau, t.theta, (0.0, *t.s[1:]), (0.0, *t.c[1:]))


INSTANCES = {"silu": "silu", "hard": "leaky_relu", "gelu": "gelu"}
INSTANCES |= {f"{K}": branches(K) for K in range(3, 9)}


def learned(instance, axis, x, noise=0.1):
    share = {"share": "layer"} if axis is None else {"share": "channel", "channels": x.shape[axis]}
    train = ("theta", "s", "c") if instance == "leaky_relu" else ALL
    act = Activation(instance, axis=axis or -1, train=train, **share)
    with torch.no_grad():
        for p in act.parameters():
            p.add_(noise * torch.randn_like(p))
    return act


def sharpen(act, sharp):
    with torch.no_grad():
        act.rho.fill_(torch.tensor(float(sharp)).log())
    return act


def results(act, x, dy):
    z = x.clone().requires_grad_()
    y = act(z)
    return [y.detach(), *torch.autograd.grad(y, [z, *act.parameters()], dy)]


def both(act, x):
    """By the reference in float64, and by kernels."""
    dy = torch.randn(x.shape)
    with kernels.use("reference"):
        want = results(copy.deepcopy(act).double(), x.double(), dy.double())
    return want, [h.double() for h in results(act, x, dy)]


def cut_like(rows, columns, turn, whole):
    """In place of the tiles that a machine was swept for; notes whether all of them are inside."""

    def made(m, size, known):
        tiles = m.tiles(rows, columns, 1, 1, 3, turn)
        whole.add((m.layout, m.whole(tiles)))
        return tiles

    gpu.prepared.cache_clear()
    gpu.plan.cache_clear()
    return mock.patch.multiple(gpu, tiles_forward=made, tiles_backward=made)


def check_cuts(names):
    """Errors over the largest value: sums of up to 820 terms in float32, of which a hundredth may be
    left. Each is off by some 2^-24, of either sign: 2^-24 * sqrt(820) * 100 is 1.7e-4 at worst, and
    2e-5 an eighth of it, which is where a sum that lacks one of its terms is seen."""
    whole = set()
    shapes = SHAPES if names[0] in ("silu", "gelu") else SHAPES[:2]
    for name in names:
        for shape, axis in shapes:
            torch.manual_seed(0)
            x = 2.0 * torch.randn(shape)
            act = learned(INSTANCES[name], axis, x)
            for cut in CUTS:
                with cut_like(*cut, whole):
                    want, have = both(act, x)
                for k, (w, h) in enumerate(zip(want, have, strict=True)):
                    error = float((h - w).abs().max() / w.abs().max())
                    assert error < 2e-5, (name, shape, axis, cut, k, error)
    assert len(whole) == len(shapes), whole


def check_far():
    """Out to the largest numbers. Close by, errors are over the largest value, for digits cancel
    there in any order: 3e-6 are 50 roundings of 2^-24, of eight branches and their gates. From 1000
    on, number by number, where one branch is left: 2e-6 are 30, of exponentials mostly."""
    exponents = torch.tensor([*torch.arange(-8.0, 38.5, 0.5), 38.5])  # times a slope, no float32
    x = torch.cat([-(10.0**exponents), 10.0**exponents]).float()[:, None].repeat(1, 4)
    close, far = x.abs() < 100, x.abs() > 1000
    torch.manual_seed(0)
    for K in range(3, 9):
        for flat in (False, True):
            for sharp in (0.3, 1.0, 4.0, 40.0):
                act = sharpen(learned(branches(K, flat), -1, x, 0.0 if flat else 0.1), sharp)
                want, have = both(act, x)
                for k in (0, 1):  # y and dx
                    error, w = (have[k] - want[k]).abs(), want[k].abs()
                    what = (K, flat, sharp, k)
                    assert error[close].max() < 3e-6 * w[close].max(), what
                    least = 2.0**-28 if flat and k == 1 else 1e-30  # of a slope, where gates stop
                    assert (error <= 2e-6 * w + least)[far & (w < 3e38)].all(), what
                for w, h in zip(want[2:], have[2:], strict=True):
                    # sums of 160 terms of which a hundredth may be left: 2^-24 * sqrt(160) * 100
                    fits = w.abs() < 1e38
                    assert ((h - w).abs()[fits] <= 1e-4 * w.abs().max()).all(), (K, flat, sharp)


def check_ends():
    """Infinity is a line's, and tails keep their digits where the first branch is 0."""
    for K in range(3, 9):
        act = learned(branches(K), -1, torch.zeros(1, 4), 0.0)
        x = torch.tensor([-torch.inf, torch.inf])[:, None].repeat(1, 4)
        assert torch.equal(act(x), x), K
    tail = torch.linspace(-45, -8, 75)[:, None].repeat(1, 4)
    floors = {"mish": 1e-30, "gelu_k3": 1e-30, "gelu_k4_one_tau": 1e-25, "gelu": 1e-17}
    # of more branches only gates above 2^-28 are sure to keep theirs
    floors |= {flat_below(K): 2.0**-28 * 45 for K in (6, 7, 8)}
    for name, least in floors.items():
        act = learned(name, -1, tail, 0.0)
        want, have = both(act, tail)
        seen = want[0].abs() > least
        assert seen.any(), name
        # 70 units of rounding in the exponent, each 6e-8
        assert ((have[0] - want[0]).abs() <= 1e-5 * want[0].abs())[seen].all(), name
    close = torch.linspace(-12, 12, 2001)[:, None].repeat(1, 4)
    for sharp in (1, 2.1, 2.3, 3.3, 4.7):  # those of K = 5 give up a tail for room
        want, have = both(sharpen(learned("gelu", -1, close, 0.0), sharp), close)
        for k in (0, 1):  # y and dx: eight roundings of the largest branch, dx times tau
            most = 1 + close.abs() if k == 0 else 1 + 1.655 * sharp * (1 + close.abs())
            assert ((have[k] - want[k]).abs() <= 2.0**-21 * most).all(), (sharp, k)


def check_lost():
    """What comes back as NaN or infinity is not lost where gates have stopped; and exponentials of
    frozen gates, summed with a large tau, have room."""
    for name in ("gelu_k3", "gelu_k4_one_tau", "gelu", branches(6), branches(8)):
        act = learned(name, -1, torch.zeros(1, 4), 0.0)
        for far in (-300.0, -80.0, 80.0, 300.0):
            for lost in (torch.nan, torch.inf):
                x = torch.tensor([[far], [0.3]]).repeat(1, 4)
                dy = torch.tensor([[lost], [1.0]]).repeat(1, 4)
                for k, found in enumerate(results(act, x, dy)[2:]):
                    assert not found.isfinite().any(), (name, far, lost, k)
    for K in range(3, 9):
        for tau in 10.0 ** torch.tensor([3, 4.8, *range(6, 38, 3)]):  # from 2^16 on not small
            at = [k / float(tau) for k in range(K - 1)]
            t = TG(float(tau), tuple(at), (0.0, *[0.5] * (K - 2), 1.0), (0.0,) * K)
            x = (torch.linspace(-150, 150, 1501) / tau).repeat(2, 1)
            y, dx = results(Activation(t), x, torch.ones_like(x))
            assert y.isfinite().all(), (K, tau)
            assert dx.isfinite().all(), (K, tau)


def check_ways():
    """Which gates are taken one by one, forward and backward: none of a usual instance, and nobody
    for the columns that are not there; those that float32 has no room for."""
    found, folded = [], compiled.folded

    def way(name, sharp):
        found.clear()
        results(sharpen(learned(name, -1, x, 0.0), sharp), x, x)
        assert len(found) % 2 == 0, name  # as many programs forward as backward
        each = len(found) // 2
        return {*found[:each]}, {*found[each:]}

    def noted(*given):
        result = folded(*given)
        found.append(bool(result[-1]))
        return result

    x = torch.randn(4, 5)  # of tiles with 8 columns
    with mock.patch.object(compiled, "folded", noted):
        for name in ("mish", "gelu_k4_one_tau", "gelu", *map(branches, range(3, 9))):
            for sharp in (1, 2):
                assert way(name, sharp) == ({False}, {False}), (name, sharp)
        # docs/kernels.md says where they begin to be
        for name, forward, backward in (("gelu", 4.8, 4.6), ("gelu_k4_one_tau", 6.9, 6.6)):
            assert way(name, forward - 0.1)[0] == way(name, backward - 0.1)[1] == {False}, name
            assert way(name, forward)[0] == way(name, backward)[1] == {True}, name


kernels.use("triton")
what = {"far": check_far, "ends": check_ends, "lost": check_lost, "ways": check_ways}
if sys.argv[1] in what:
    what[sys.argv[1]]()
else:
    check_cuts(sys.argv[1:])
print("ok")
