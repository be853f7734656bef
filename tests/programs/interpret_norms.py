"""The backward kernel with the sums of a norm, step by step, against float64."""

import torch

import threshold_gating as tg
from threshold_gating.kernels import runtime
from threshold_gating.kernels.blend import gpu
from threshold_gating.kernels.structure import Role, Wanted

gpu.FEW_TILES = 0  # sums in parts
LEARNED = {"relu": ("theta", "s"), "silu": ("tau", "theta", "s", "c"), "gelu": ("tau", "theta")}
for key, train in LEARNED.items():
    for rows, channels, dtype in (
        (5000, 5, torch.float32),
        (1000, 64, torch.bfloat16),
        (257, 300, torch.float16),
    ):
        torch.manual_seed(rows)
        act = tg.Activation(key, share="channel", channels=channels, axis=-1, train=train)
        with torch.no_grad():
            for p in act.parameters():
                p.add_(torch.randn_like(p), alpha=0.3)
        x, z, dy = (torch.randn(rows, channels).to(dtype) for _ in range(3))
        mean = torch.randn(channels)
        structure = act._structure
        known = gpu.Constants.of(structure, Role.NORMED)
        own = gpu.read(structure, act.tensors(), channels, x.device)
        learned = ("tau" in train, "theta" in train, "s" in train, "c" in train)
        wanted = Wanted(True, False, *learned)
        run, shape, axis = gpu.prepared(known, (rows, channels, 1), x.element_size(), wanted)
        dx, parts = (torch.full_like(x, torch.nan), torch.full(shape, torch.nan))
        run((x, z, dy, dx, mean, *[parts] * 4, *runtime.readable(own)))
        count = known.sums(wanted)
        found = torch.full((count, channels), torch.nan)
        add = gpu.adding(shape, axis, (count, 0, 0, 0), apart=False)
        assert add is not None, shape
        add((parts, *[found] * 4))

        wide = x.double().requires_grad_()
        with tg.kernels.use("reference"):
            y = act(wide)
            params = [
                dict(act.named_parameters())[n]
                for n in ("rho", "dtheta", "s", "c")
                if n in dict(act.named_parameters())
            ]
            want, *rest = torch.autograd.grad(y, [wide, *params], dy.double())
        sums = [row for each in rest for row in each.view(-1, channels)]
        sums += [want.sum(0), (want * (z.double() - mean)).sum(0)]
        want_sums = torch.stack([s.double() for s in sums])
        # float32 sums of some thousand terms; dx is rounded to its own type
        scale = (want.abs().sum(0) * (1 + z.double().abs().amax(0))).amax() + 1
        assert (found - want_sums).abs().amax() / scale < 1e-5, (key, dtype)
        eps = torch.finfo(dtype).eps
        assert (dx.double() - want).abs().amax() <= 2 * eps * want.abs().amax() + 1e-5, (key, dtype)
print("ok")
