"""The backward kernel with the sums of a norm, step by step, against float64."""

import torch

import threshold_gating as tg
from threshold_gating.kernels import runtime
from threshold_gating.kernels.blend import gpu
from threshold_gating.kernels.structure import Role, Wanted

gpu.FEW_TILES = 0  # sums in parts
LEARNED = {"relu": ("theta", "s"), "relu6": ("theta", "s"), "silu": ("tau", "theta", "s", "c")}
SIZES = [(5000, 5, torch.float32), (1000, 64, torch.bfloat16), (257, 300, torch.float16)]


def layer(key, train, channels):
    act = tg.Activation(key, share="channel", channels=channels, axis=-1, train=train)
    with torch.no_grad():
        for p in act.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return act


def by_kernel(act, role, x, z, dy, more, mean):
    """(dx, every sum), of memory that was NaN before."""
    structure, channels = act._structure, x.shape[1]
    known = gpu.Constants.of(structure, role)
    wanted = Wanted(True, False, *[name in act.learned for name in ("tau", "theta", "s", "c")])
    sizes = (*x.shape, 1)
    run, shape, axis = gpu.prepared(known, sizes, x.element_size(), wanted)
    dx, parts = torch.full_like(x, torch.nan), torch.full(shape, torch.nan)
    second = more if role == Role.JOINED else parts
    read = gpu.read(structure, act.tensors(), channels, x.device)
    run((x, z, dy, dx, mean, parts, second, parts, parts, *runtime.readable(read)))
    count = known.sums(wanted)
    found = torch.full((count, channels), torch.nan)
    add = gpu.adding(shape, axis, (count, 0, 0, 0), apart=False)
    assert add is not None, shape
    add((parts, *[found] * 4))
    return dx, found


def by_reference(act, x, z, dy, mean):
    wide, own = x.double().requires_grad_(), dict(act.named_parameters())
    learned = [own[name] for name in ("rho", "dtheta", "s", "c") if name in own]
    with tg.kernels.use("reference"):
        dx, *rest = torch.autograd.grad(act(wide), [wide, *learned], dy)
    rows = [row.double() for each in rest for row in each.view(-1, x.shape[1])]
    return dx, torch.stack([*rows, dx.sum(0), (dx * (z.double() - mean)).sum(0)])


for key, train in LEARNED.items():
    for rows, channels, dtype in SIZES:
        torch.manual_seed(rows)
        act = layer(key, train, channels)
        x, z, dy, more = (torch.randn(rows, channels).to(dtype) for _ in range(4))
        mean = torch.randn(channels)
        for role in (Role.NORMED, Role.JOINED):
            given = dy.double() + (more.double() if role == Role.JOINED else 0.0)
            dx, sums = by_kernel(act, role, x, z, dy, more, mean)
            want_dx, want = by_reference(act, x, z, given, mean)
            # float32 sums of some thousand terms of either sign, each at most this in all
            scale = (given.abs() * (1 + x.double().abs() + z.double().abs())).sum(0).amax()
            assert (sums - want).abs().amax() <= 1e-5 * scale, (key, dtype, role)
            eps = torch.finfo(dtype).eps  # dx is rounded to its own type
            most = 2 * eps * want_dx.abs().amax() + 1e-5
            assert (dx.double() - want_dx).abs().amax() <= most, (key, dtype, role)
print("ok")
