# ruff: noqa: N803
"""The Triton kernels of attention against float64: interpreted on a CPU, compiled where marked gpu."""

import os

import pytest
import torch
from torch import Tensor

INTERPRET = "TRITON_INTERPRET"
on_gpu = torch.cuda.is_available()
if not on_gpu:
    # Triton decides when it is imported, so it is here; the variable is set again for each test
    # below and for no other.
    before = os.environ.get(INTERPRET)
    os.environ[INTERPRET] = "1"
pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from threshold_gating import kernels, logits  # noqa: E402
from threshold_gating.kernels.attention import backward as flash_backward  # noqa: E402
from threshold_gating.kernels.attention import forward as flash_forward  # noqa: E402
from threshold_gating.kernels.attention import function as flash  # noqa: E402
from threshold_gating.kernels.attention import gates as flash_gates  # noqa: E402
from threshold_gating.kernels.attention import launch  # noqa: E402
from threshold_gating.kernels.attention.launch import Call  # noqa: E402
from threshold_gating.nn import attention  # noqa: E402
from threshold_gating.nn.attention import row_statistics, thresholds, with_statistics  # noqa: E402


@triton.jit
def last_tile_forgotten(
    block, keys, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    return 0, keys - BLOCK_N


@triton.jit
def forgotten_row(base, plane, rows, queries, BOUND: tl.constexpr, MASK: tl.constexpr):
    level = tl.load(base + rows, mask=rows < queries - 1, other=float("inf"))
    return level, level


@triton.jit
def one_threshold_for_all(x, y):
    return x + 0.0 * y


if not on_gpu:
    os.environ.pop(INTERPRET) if before is None else os.environ.update({INTERPRET: before})

# The interpreter takes logarithms of 0 and differences of infinities with numpy, which warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    # said once in the backward thread of a process whose first product is there
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(on_gpu, reason="Triton compiles here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
INF = float("inf")
EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if not on_gpu:
        monkeypatch.setenv(INTERPRET, "1")


def attend(*args, **options):
    """Attention, if it is the kernels that run and not the plain formula."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(logits, "attend")
        return attention.scaled_dot_product_attention(*args, **options)


def inputs(case, device, dtype=torch.float32, queries=37, keys=45, sizes=(16, 16)):
    """(query, key, value), options: two tiles and a bit of each, with rows of every kind."""
    torch.manual_seed(0)
    shared = 1 if "gqa" in case else 2
    shapes = ((2, queries, sizes[0]), (shared, keys, sizes[0]), (shared, keys, sizes[1]))
    qkv = [torch.randn(2, *shape).to(device, dtype).requires_grad_() for shape in shapes]
    keep = torch.rand(2, 1, queries, keys) < 0.6
    keep[0, :, 3] = False  # a query without keys
    added = torch.randn(queries, keys)
    added[5], added[6], added[7, 1:] = -INF, torch.finfo(dtype).min, torch.finfo(dtype).min
    options = {"is_causal": "causal" in case, "enable_gqa": "gqa" in case}
    if "keep" in case:
        options["attn_mask"] = keep.to(device)
    if "add" in case:
        options["attn_mask"] = added.to(device, dtype)
    if "tau" in case:
        options["tau"] = torch.tensor([0.7, -1.3], device=device, requires_grad=True)
    return qkv, options


def in_float64(tensors):
    return [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in tensors
    ]


def agree(way, case, device, error, dtype=torch.float32, **sizes):
    """Values and gradients within `error` of float64, relative to the norm."""
    qkv, options = inputs(case, device, dtype, **sizes)
    learned = [*qkv, *([options["tau"]] if "tau" in options else [])]
    have = attend(*qkv, way=way, **options)
    slope = torch.randn(have.shape).to(device, dtype)
    *exact, _ = in_float64([*learned, slope])
    tensors = {k: t for k, t in options.items() if isinstance(t, Tensor)}
    wide = dict(zip(tensors, in_float64(tensors.values()), strict=True))
    if "tau" in options:
        wide["tau"] = exact[3]
    want = logits.attend(*exact[:3], **{**options, **wide})
    gradients = torch.autograd.grad(have, learned, slope)
    wanted = torch.autograd.grad(want, exact, slope.double())
    names = ("output", "dq", "dk", "dv", "dtau")
    for name, a, b in zip(names, (have, *gradients), (want, *wanted), strict=False):
        assert a.dtype == (torch.float32 if name == "dtau" else dtype)
        assert (a.double() - b).norm() <= error * b.norm(), name


# 16 products of order 1 and 45 gates are added in float32: 4e-7 measured, dtau 2e-6 because its
# 3,000 terms of both signs cancel. Compiled, products of float32 are made of three of tf32.
ERROR = 5e-6
CASES = ["causal", "keep tau", "add", "gqa causal tau"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["fused", "literal"])
def test_values_and_gradients_are_those_of_float64(way, case, device):
    keys = 37 if "causal" in case else 45
    agree(way, case, device, ERROR, keys=keys)


@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_odd_sizes_are_padded_and_sequences_may_differ(device):
    agree("fused", "causal", device, ERROR, sizes=(20, 40), queries=45, keys=33)
    agree("literal", "gqa", device, ERROR, sizes=(3, 1), queries=9, keys=50)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(dtype, device):
    # compiled, the gates and their slopes are rounded to the dtype, too
    error = 4 * torch.finfo(dtype).eps if device == "cuda" else torch.finfo(dtype).eps
    agree("fused", "causal", device, error, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["causal", "plain", "gqa causal tau"])
def test_the_copy_engine_reads_what_threads_read(monkeypatch, case, device):
    """In the same order; past the end it reads 0."""
    monkeypatch.setattr(launch, "ENOUGH_PAIRS", 0)
    (q, k, v), options = inputs(case, device, torch.float16, keys=37)
    options |= {} if "tau" in case else {"scale": -0.3}
    found = []
    for engine in (True, False):
        if on_gpu and engine and torch.cuda.get_device_capability()[0] < 9:
            pytest.skip("no copy engine")
        monkeypatch.setattr(launch, "has_copy_engine", lambda device, engine=engine: engine)
        assert Call(q, k, v, None, None, 1.0, False).copied == engine
        outs = [attend(q, k, v, way=way, **options) for way in ("fused", "literal")]
        found.append([*outs, *with_statistics(q, k, v, **options)[1]])
    for have, want in zip(*found, strict=True):
        # compiled, other tiles are added up in another order
        torch.testing.assert_close(
            have, want, **({"rtol": 2e-3, "atol": 2e-3} if on_gpu else EXACT)
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "dtype"), [(16, torch.bfloat16), (96, torch.float32), (256, torch.bfloat16)]
)
@pytest.mark.parametrize("way", ["fused", "literal"])
def test_every_size_of_head_compiles(way, dtype, size):
    error = ERROR if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    agree(way, "causal", "cuda", error, dtype, queries=301, keys=333, sizes=(size, size))


@pytest.mark.skipif(on_gpu, reason="a compiled kernel keeps what it was compiled from")
@pytest.mark.parametrize(
    ("way", "home", "name", "wrong", "seen"),
    [
        ("literal", flash_gates, "excess", one_threshold_for_all, "output"),
        ("fused", flash_forward, "key_range", last_tile_forgotten, "output"),
        ("fused", flash_backward, "key_range", last_tile_forgotten, "dq"),
        ("fused", flash_backward, "load_levels", forgotten_row, "dq"),
    ],
)
def test_a_kernel_that_is_wrong_fails(monkeypatch, way, home, name, wrong, seen):
    monkeypatch.setattr(home, name, wrong)
    with pytest.raises(AssertionError, match=seen):
        agree(way, "plain", "cpu", ERROR)


@pytest.mark.parametrize("device", DEVICES)
def test_the_literal_way_evaluates_its_gates_at_theta(device):
    (q, k, v), _ = inputs("plain", device)
    call = Call(q, k, v, None, None, 0.25, False)
    out, lse = flash._outputs(q, v, None)
    levels, index = flash._row_levels(q, True)
    call.forward(None, lse, levels, index)
    call.gates(levels, out)
    z = (q @ k.mT).detach() * 0.25
    theta = thresholds(z)
    torch.testing.assert_close(out, (torch.sigmoid(z - theta) @ v).detach(), rtol=1e-5, atol=1e-5)
    levels[2] *= 1.5  # T: theta moves, by log 1.5 at the peak
    call.gates(levels, out)
    others = 1.5 * (theta.exp() + z.exp()) - 0.5 * z.amax(-1, keepdim=True).exp() - z.exp()
    torch.testing.assert_close(
        out, (torch.sigmoid(z - others.log()) @ v).detach(), rtol=1e-4, atol=1e-4
    )


def peaked(q, k):
    k = k.clone()
    k[..., 7, :] = q[:, :1, 5] * 400  # 1e3 above the others in some rows
    return k


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "keys", [lambda q, k: k, lambda q, k: k[..., :20, :].repeat(1, 1, 2, 1), peaked],
    ids=["drawn", "every key twice", "a peak"],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_statistics_are_those_of_the_reference(causal, keys, device):
    (q, k, _), _ = inputs("plain", device)
    q, k = q.detach(), k.detach()
    k = keys(q, k)
    out, one_pass = with_statistics(q, k, k, is_causal=causal)
    first_pass = row_statistics(q, k, is_causal=causal)
    with kernels.use("reference"):
        want, exact = with_statistics(q, k, k, is_causal=causal)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    for stats in (one_pass, first_pass):
        assert torch.equal(stats.i1, exact.i1)
        # products of order 1e3 are rounded to 6e-5 each, in another order; T has 45 terms
        torch.testing.assert_close(stats, exact, rtol=1e-6, atol=2e-4 if keys is peaked else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_know_ties_that_are_overtaken_and_those_that_are_none(device):
    """Of 100 keys the last is the highest, or higher by one bit than one before it."""
    q, k = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 1, 100, 16, device=device)
    q[..., 0], k[..., 0] = 1.0, 2.0  # all alike
    k[..., -1, 0] = 3.0
    one_pass, first_pass = with_statistics(q, k, k, scale=1.0)[1], row_statistics(q, k, scale=1.0)
    for m1, i1, m2, T in (one_pass, first_pass):
        assert i1.item() == 99
        # a GPU's exp2 is good to 2 units in the last place, and so is what is subtracted before it
        found = (m1.item(), m2.item(), T.item())
        assert found == pytest.approx((3.0, 2.0, 99.0), rel=2e-6)
    k[..., 0] = 0.0
    k[..., 40, 0], k[..., 70, 0] = 1.3, torch.nextafter(torch.tensor(1.3), torch.tensor(2.0)).item()
    one_pass, first_pass = with_statistics(q, k, k, scale=0.3)[1], row_statistics(q, k, scale=0.3)
    for m1, i1, m2, _ in (one_pass, first_pass):
        # on a GPU float32 is cut into three tf32, which may lose the bit: then the first is right
        assert i1.item() in ((70,) if device == "cpu" else (40, 70))
        assert m1.item() == pytest.approx(0.39, rel=1e-6)
        assert m2.item() == pytest.approx(0.39, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_under_masks(device):
    for case in ("keep", "add"):
        (q, k, v), options = inputs(case, device)
        stats = with_statistics(q, k, v, **options)[1]
        with kernels.use("reference"):
            exact = with_statistics(q, k, v, **options)[1]
        live = exact.m1 > -INF
        # a mask of finfo.min is one of -7e13 to the kernels: it hides a key as well
        told = live & ~(exact.m2 < -1e13) & (exact.m1 > -1e13)
        for have, want in zip(stats, exact, strict=True):
            torch.testing.assert_close(have[told], want[told], rtol=2e-6, atol=1e-5)
        assert (stats.m1[~live] == -INF).all()
        assert (stats.T[~live] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["fused", "literal"])
def test_a_later_token_does_not_change_a_bit_of_an_earlier_row(way, device):
    (q, k, v), _ = inputs("causal", device, keys=37)
    for last in (15, 20, 35):
        before = attend(q, k, v, is_causal=True, way=way)
        with torch.no_grad():
            k[:, :, last + 1], v[:, :, last + 1] = 1e3, 1e3
        after = attend(q, k, v, is_causal=True, way=way)
        assert torch.equal(before[:, :, : last + 1], after[:, :, : last + 1])
        assert not torch.equal(before[:, :, last + 1 :], after[:, :, last + 1 :])


@pytest.mark.parametrize("device", DEVICES)
def test_any_layout_of_memory(device):
    q, k, v = torch.randn(3, 2, 33, 2, 16).to(device).transpose(2, 3)  # heads after the length
    want = attend(q.contiguous(), k.contiguous(), v.contiguous(), way="fused")
    assert torch.equal(attend(q, k, v, way="fused"), want)
    turned = [t.mT.contiguous().mT for t in (q, k, v)]  # the size of a head is not innermost
    assert torch.equal(attend(*turned, way="fused"), want)
    assert torch.equal(attend(*(t[0] for t in (q, k, v)), way="fused"), want[0])
    many = attend(*(t[None] for t in (q, k, v)), torch.ones(33, 33).bool().to(device), way="fused")
    torch.testing.assert_close(many[0], want)


@pytest.mark.parametrize("device", DEVICES)
def test_torch_knows_shapes_layouts_and_gradients_of_the_operations(device):
    (q, k, v), options = inputs("add tau", device)
    mask = options["attn_mask"].expand(2, 2, -1, -1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for literal, statistics in ((False, True), (True, False)):
        torch.library.opcheck(
            flash.attention_forward,
            (q, k, v, mask, options["tau"], 0.25, False, literal, statistics),
            test_utils=checks,
        )


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_graph_holds_the_operation(device):
    def attended(q, k, v, tau):
        return attend(q, k, v, tau=tau, is_causal=True, way="fused").square()

    (q, k, v), options = inputs("causal tau", device, keys=37)
    arguments = (q, k, v, options["tau"])
    have = torch.compile(
        lambda *a: attention.scaled_dot_product_attention(
            *a[:3], tau=a[3], is_causal=True, way="fused"
        ).square(),
        backend="aot_eager",
        fullgraph=True,
    )(*arguments)
    want = attended(*arguments)
    assert torch.equal(have, want)
    gradients = [torch.autograd.grad(y.sum(), arguments) for y in (have, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("device", DEVICES)
def test_the_backend_triton_evaluates_every_gate(monkeypatch, device):
    (q, k, v), _ = inputs("plain", device, queries=9, keys=9)
    want = attend(q, k, v, way="literal")
    with kernels.use("triton"):
        assert torch.equal(attend(q, k, v), want)
        monkeypatch.delattr(Call, "gates")
        with pytest.raises(AttributeError, match="gates"):
            attend(q, k, v)


def test_what_the_kernels_cannot_do_the_formula_does(monkeypatch):
    ran = []
    original = logits.attend
    monkeypatch.setattr(logits, "attend", lambda *a, **k: (ran.append(1), original(*a, **k))[1])
    device = "cuda" if on_gpu else "cpu"
    q = torch.randn(1, 2, 9, 16, device=device)
    wide = torch.randn(1, 2, 9, 300, device=device)
    mask = torch.zeros(9, 9, device=device, requires_grad=True)
    for arguments in (
        (q, q, q, mask),
        (q.double(),) * 3,
        (wide,) * 3,
        (q, q[:, :, :0], q[:, :, :0]),
    ):
        attention.scaled_dot_product_attention(*arguments, way="literal")
    assert len(ran) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["fused", "literal"])
def test_memory_grows_with_the_length_and_not_with_its_square(way):
    def peak(length):
        qkv = [torch.randn(1, 2, length, 64, device="cuda", requires_grad=True) for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(*qkv, is_causal=True, way=way).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(8192) <= 2.2 * peak(4096)
