"""Learned gates of three and more branches with one tau against float64, on any device."""

import torch

from threshold_gating import kernels, primitive

# of float32: eight roundings of an exponent of at most 20, and sums of 100 terms
RTOL, ATOL = 2e-5, 2e-5
# a unit in the last place, for Triton's interpreter cuts off what a GPU rounds
ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SHAPES = {  # of x, of a parameter
    "channel": ((29, 40), (1, 40)),
    "layer": ((7, 37), ()),
    "images": ((3, 5, 7, 9), (1, 5, 1, 1)),
    "few": ((1, 3), (1, 3)),
    "none": ((0, 4), (1, 4)),
}
NAMES = ("tau", "theta", "s", "c")
ROLES = ((), ("v",), ("up",))  # other inputs: what branches read, what multiplies y


def drawn(K, group, device, seed):
    """tau, theta, s and c whose branches are small where gates turn: the short forms take them."""
    rng = torch.Generator().manual_seed(seed)

    def row(scale, start=0.0):
        return (start + scale * torch.randn(group, generator=rng)).to(device)

    tau = row(0.3).exp()
    rows = [[row(0.3, 1.5 * k - 0.75 * (K - 2)) for k in range(K - 1)]]
    rows += [[row(0.5).clamp(-2, 2) for _ in range(K)] for _ in range(2)]
    return [tau, *rows]


def evaluated(run, x, rows, dy, learned=NAMES, wide=False, **inputs):
    """y and the gradients of x, other inputs and what is learned, by name."""
    to = torch.float64 if wide else torch.float32

    def leaf(w, kind):
        return w.detach().to(kind).clone().requires_grad_()

    given = {"x": x, **inputs}
    given = {n: leaf(w, torch.float64 if wide else w.dtype) for n, w in given.items()}
    own = {}
    for name, row in zip(NAMES, [[rows[0]], *rows[1:]], strict=True):
        own[name] = [leaf(w, to).requires_grad_(name in learned) for w in row]
    tau, theta, s, c = own.values()
    y = run(given["x"], tau[0], theta, s, c, **{n: w for n, w in given.items() if n != "x"})
    wanted = {**{n: [w] for n, w in given.items()}, **{n: own[n] for n in learned}}
    flat = [w for row in wanted.values() for w in row]
    grads = iter(torch.autograd.grad(y, flat, dy.to(y.dtype)))
    found = {n: torch.cat([next(grads).reshape(-1) for _ in row]) for n, row in wanted.items()}
    return {"y": y.detach(), **found}


def exactly(x, tau, theta, s, c, v=None, up=None):
    y = primitive.blend(x, tau, theta, s, c, v=v)
    return y if up is None else y * up


def check_gates(device, dtypes, branches=(3, 4, 5), shares=tuple(SHAPES), roles=ROLES):
    """Values and every gradient, by what a parameter is shared by, and by what branches read."""
    for K in branches:
        for number, share in enumerate(shares):
            shape, group = SHAPES[share]
            for dtype in dtypes:
                for inputs in roles:
                    x, dy, other = (3 * torch.randn(3, *shape, device=device)).to(dtype)
                    rows = drawn(K, group, device, number)
                    more = dict.fromkeys(inputs, other)
                    have = evaluated(kernels.blend, x, rows, dy, **more)
                    want = evaluated(exactly, x, rows, dy, wide=True, **more)
                    same(have, want, dtype, f"K={K} {share} {dtype} {inputs}")


def check_some(device, dtype=torch.float32):
    """Each of the parameters learned by itself."""
    x, dy = torch.randn(2, 33, 8, device=device).to(dtype)
    rows = drawn(5, (1, 8), device, 0)
    want = evaluated(exactly, x, rows, dy, wide=True)
    for name in NAMES:
        have = evaluated(kernels.blend, x, rows, dy, learned=(name,))
        same(have, {n: want[n] for n in have}, dtype, name)


def same(have, want, dtype, words):
    for name, exact in want.items():
        rounded = ROUNDED[dtype] if name in ("y", "x", "v", "up") else 0.0
        terms = float(exact.abs().max()) if exact.numel() and name in NAMES else 1.0
        torch.testing.assert_close(
            have[name].double(), exact, rtol=RTOL + rounded, atol=ATOL * max(terms, 4.0),
            msg=lambda text, name=name: f"{words} d{name}: {text}",
        )  # fmt: skip


def check_tails(device, dtypes, branches=(3, 5)):
    """A branch of 0 that wins: what the others leave of y and dx keeps its digits."""
    far = torch.tensor([4.0, 6, 8, 12, 16, 20, 24, 32, 40, 48], device=device)
    for K in branches:
        for side in (1, -1):
            rows = drawn(K, (1, 1), device, K)
            rows[0], last = torch.ones_like(rows[0]), -1 if side > 0 else 0
            for w in rows[2:]:
                w[last] = torch.zeros_like(w[last])
            for dtype in dtypes:
                x = (side * far)[:, None].to(dtype)
                dy = torch.ones_like(x)
                have = evaluated(kernels.blend, x, rows, dy)
                want = evaluated(exactly, x, rows, dy, wide=True)
                for name in ("y", "x"):
                    close = have[name].double().flatten(), want[name].flatten()
                    # 50 units of rounding in the exponent; float16 has no such small numbers
                    least = 1e-7 if dtype == torch.float16 else 1e-30
                    rtol = RTOL + ROUNDED[dtype]
                    torch.testing.assert_close(*close, rtol=rtol, atol=least)


def check_ends(device, dtype):
    """Huge, infinite and NaN inputs: the branch that wins, and no NaN but of NaN."""
    huge = torch.finfo(dtype).max
    ends = torch.tensor([[huge], [-huge], [huge / 2**8], [-huge / 2**8]], device=device)
    x, rows = ends.expand(4, 8).to(dtype).contiguous(), drawn(5, (1, 8), device, 1)
    rows[2][0], rows[2][-1] = (torch.full_like(rows[2][0], w) for w in (0.5, -0.25))
    dy = torch.full_like(x, 30.0)
    found = evaluated(kernels.blend, x, rows, dy)
    slope = torch.tensor([[-0.25], [0.5]], device=device).repeat(2, 8)
    assert torch.equal(found["x"].reshape(4, 8).float(), 30 * slope)
    # up to a constant of 2 beside 256
    torch.testing.assert_close(found["y"].float() / x.float(), slope, rtol=0, atol=1e-2)
    for name in ("tau", "theta"):
        assert not found[name].any(), name
    inner = found["s"].reshape(5, 8)[1:-1]
    assert not inner.any()  # neither NaN nor anything else
    for end in (float("inf"), float("-inf"), float("nan")):
        found = evaluated(kernels.blend, torch.full_like(x, end), rows, dy)
        if end != end:
            assert found["y"].isnan().all()
            assert found["x"].isnan().all()
        else:
            wins = -0.25 if end > 0 else 0.5
            assert (found["y"] == wins * end).all()
            assert (found["x"] == 30 * wins).all()
