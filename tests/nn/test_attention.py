"""Eq. 11: gates with the thresholds of the other logits against float64, torch and the paper."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from threshold_gating import kernels, logits
from threshold_gating.nn import attention
from threshold_gating.nn.attention import (
    Top2,
    TreeOperations,
    merge,
    row_statistics,
    scaled_dot_product_attention,
    softmax,
    thresholds,
    top2,
    tree_logsumexp,
    tree_operations,
    with_statistics,
)

INF, NAN = math.inf, math.nan
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def gates():
    """The gates themselves; SDPA stands for them only where a test says so."""
    with kernels.use("reference"):
        yield


def literal_thresholds(z):
    """LSE of the others as it is written, in float64 and N x N memory."""
    z = z.double()
    itself = torch.eye(z.shape[-1], dtype=torch.bool)
    return z.unsqueeze(-2).masked_fill(itself, -INF).logsumexp(-1)


def causal(n, dtype=torch.float64):
    return torch.randn(n, n, dtype=dtype).masked_fill(~torch.ones(n, n).tril().bool(), -INF)


def cosine(p):
    """A scalar of p whose gradient differs from entry to entry."""
    return (p * torch.arange(p.numel(), dtype=p.dtype).cos().view(p.shape)).sum()


def test_softmax_is_equation_11_written_down():
    z = torch.randn(5, 63, dtype=torch.float64) * 3
    torch.testing.assert_close(softmax(z), torch.sigmoid(z - literal_thresholds(z)))
    torch.testing.assert_close(softmax(z), z.softmax(-1))


def test_float32_errors_at_256_logits_of_standard_deviation_10():
    z = torch.randn(2000, 256) * 10
    exact, p = z.double().softmax(-1), softmax(z).double()
    # One ulp at 1; 9.3e-8 measured, where torch.softmax has 3.3e-7.
    assert (p - exact).abs().max() <= 1.2e-7
    # A gate of 1e-30 lies 69 below its threshold, and z - max and then z - theta are rounded to an
    # ulp of [64, 128): 3.8e-6 each. torch rounds one difference. Then some ulp of the result.
    assert ((p - exact).abs() / exact)[exact > 1e-30].max() <= 2 * 3.82e-6 + 4e-7
    # 1.5e-7 measured, torch 3.3e-7
    assert (p.sum(-1) - 1).abs().max() <= 2e-7


@pytest.mark.parametrize("height", [10, 14, 17, 20, 50, 120, 1000])
def test_thresholds_keep_their_digits_at_a_peak(height):
    z = torch.randn(64, 256)
    z[:, 3] += height
    error = (thresholds(z).double() - literal_thresholds(z)).abs()
    assert error[:, 3].max() <= 6e-7  # theta is 6 there: an ulp is 4.8e-7
    assert error.max() <= 1e-6  # half an ulp of [16, 32); beyond, theta is the peak exactly


def test_the_difference_to_the_whole_log_sum_exp_has_no_digits_at_such_a_peak():
    z = torch.randn(64, 256)
    z[:, 3] += 20
    whole = z.logsumexp(-1)
    lost = whole + torch.log1p(-torch.exp(z[:, 3] - whole))
    assert not (lost.double() - literal_thresholds(z)[:, 3]).abs().max() < 1e-2


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_an_offset_costs_nothing(offset):
    z = torch.randn(500, 256) + offset
    exact = z.double().softmax(-1)
    # z - max is exact here. theta and z - theta reach 8: half an ulp is 2.4e-7 each, and the gate
    # adds two ulp of its own; 8.9e-7 measured. Unshifted it would be 5e-4.
    assert ((softmax(z) - exact).abs() / exact).max() <= 1e-6
    # In a flat row every theta is close to ln 256 and carries the same rounding; 2.7e-7 measured.
    assert (softmax(z).double().sum(-1) - 1).abs().max() <= 2.4e-7 + 2**-24


@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_are_those_of_torch_but_for_single_roundings(dtype, scale):
    z = (torch.randn(4000, 256) * scale).to(dtype)
    have, want = softmax(z), torch.softmax(z, -1)
    assert have.dtype == dtype
    # Two float32 values 1e-6 apart fall on two sides of a boundary between 16-bit numbers in about
    # 1e-6 / 2^-9 (bf16) or 3e-7 / 2^-11 (fp16) of all cases; 1.3e-4 and 2.6e-4 were measured.
    # Arithmetic in the dtype itself differs in half of all entries.
    assert (have != want).double().mean() <= 5e-4
    assert (have.view(torch.int16) - want.view(torch.int16)).abs().max() <= 1


def test_a_small_gate_is_not_flushed_to_zero():
    z = torch.tensor([0.0, -87.0, -95.0, -103.0])
    want = z.double().exp().float()  # the last two are subnormal
    assert bool((want > 0).all())
    torch.testing.assert_close(softmax(z), want, rtol=1e-5, atol=2e-45)


LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
ROWS = {
    "one element": ([3.0], [1.0], [-INF]),
    "one live entry": ([-INF, 3.0, -INF], [0.0, 1.0, 0.0], [3.0, -INF, 3.0]),
    "masked beside equals": ([2.0, -INF, 2.0], [0.5, 0.0, 0.5], [2.0, 2.0 + math.log(2), 2.0]),
    "all at finfo.min": ([LEAST] * 4, [0.25] * 4, [LEAST] * 4),
    "all at finfo.max": ([MOST] * 4, [0.25] * 4, [MOST] * 4),
    "the whole range": ([MOST, LEAST, 0.0], [1.0, 0.0, 0.0], [0.0, MOST, MOST]),
    "one +inf": ([INF, 1.0, -INF], [1.0, 0.0, 0.0], [1.0, INF, INF]),
    "a NaN": ([NAN, 1.0, -INF], [NAN] * 3, [NAN] * 3),
    "all -inf": ([-INF] * 3, [NAN] * 3, [-INF] * 3),
}


@pytest.mark.parametrize(("row", "gates", "theta"), ROWS.values(), ids=ROWS)
def test_special_rows(row, gates, theta):
    z = torch.tensor([row, row])
    torch.testing.assert_close(softmax(z), torch.tensor([gates] * 2), equal_nan=True)
    torch.testing.assert_close(thresholds(z), torch.tensor([theta] * 2), equal_nan=True)
    if INF not in row:  # torch gives NaN there, the limit exists
        torch.testing.assert_close(softmax(z), z.softmax(-1), equal_nan=True)


def test_two_infinite_logits_have_no_limit():
    assert softmax(torch.tensor([INF, INF, 0.0]))[:2].isnan().all()


def test_a_row_without_a_live_entry_is_nan_or_zero_as_asked():
    z = torch.tensor([[-INF, -INF], [0.0, 0.0]], requires_grad=True)
    assert softmax(z)[0].isnan().all()
    p = softmax(z, masked=0.0)
    assert p.tolist() == [[0.0, 0.0], [0.5, 0.5]]
    (grad,) = torch.autograd.grad(cosine(p), z)
    assert grad[0].tolist() == [0.0, 0.0]
    assert not grad.isnan().any()


@settings(max_examples=100, deadline=None)
@given(row=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20), data=st.data())
def test_gates_sum_to_one_and_follow_a_permutation(row, data):
    z = torch.tensor(row, dtype=torch.float64)
    p = softmax(z)
    assert bool((p >= 0).all())
    # theta is at most ln 20 = 3: one eps from it, one from z - theta, two ulp of each gate
    assert abs(p.sum() - 1) <= 8 * torch.finfo(torch.float64).eps
    order = torch.tensor(data.draw(st.permutations(range(len(row)))))
    # The order changes the roundings of one sum, and so the last bit of z - theta, which lies in
    # [512, 1024) for the smallest gates (1.1e-13); below 1e-308 gates have fewer digits.
    torch.testing.assert_close(softmax(z[order]), p[order], rtol=2.5e-13, atol=1e-320)


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=20),
    shift=st.integers(-(2**40), 2**40),
)
def test_a_shift_that_is_exact_changes_no_bit(row, shift):
    z = torch.tensor(row, dtype=torch.float64) / 1024
    assert torch.equal(softmax(z + shift), softmax(z))


def test_the_gates_are_evaluated_at_the_thresholds(monkeypatch):
    z = torch.randn(4, 63, dtype=torch.float64)
    q, k, v = torch.randn(3, 2, 5, 8, dtype=torch.float64)
    theta, before = thresholds(z), scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(logits, "thresholds", lambda *args: thresholds(*args) + 0.1)
    torch.testing.assert_close(softmax(z), torch.sigmoid(z - theta - 0.1))
    assert (scaled_dot_product_attention(q, k, v) - before).abs().max() > 1e-3


@pytest.mark.parametrize("tile", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_statistics_of_tiles_merge_into_those_of_the_row(dtype, tile):
    z = torch.randn(6, 1003, dtype=dtype) * 5
    z[0] = -INF  # fully masked
    z[1, 1:] = -INF  # the first row under a causal mask
    z[2, 500:] = -INF  # masked tiles
    z[3, [8, 700]] = 30.0  # a tie across tiles
    z[4, 900] = 60.0
    pieces = [(s, z[:, s : s + tile]) for s in range(0, z.shape[-1], tile)]
    merged = top2(pieces[0][1])
    for start, piece in pieces[1:]:
        merged = merge(merged, top2(piece, start=start))
    whole = top2(z)
    for name in ("m1", "i1", "m2"):
        assert torch.equal(getattr(merged, name), getattr(whole, name))
    assert merged.i1[3] == 8
    # 1003 terms in another order, each rounded once more per merge at most
    close = {"rtol": 1003 * torch.finfo(dtype).eps / 2, "atol": 0}
    torch.testing.assert_close(merged.T, whole.T, **close)
    have = torch.cat([thresholds(piece, stats=merged) for _, piece in pieces], -1)
    torch.testing.assert_close(have, thresholds(z), rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_statistics_are_what_their_names_say():
    z = torch.tensor([[1.0, 4.0, -INF], [2.0, 3.0, 4.0]]).T
    m1, i1, m2, total = top2(z, 0)
    assert m1.tolist() == [[4.0, 4.0]]
    assert i1.tolist() == [[1, 2]]
    assert m2.tolist() == [[1.0, 3.0]]
    torch.testing.assert_close(total, torch.tensor([[1.0, 1 + math.exp(-1)]]))


def test_merging_with_nothing_changes_nothing_and_nan_survives():
    rows = top2(torch.randn(3, 7))
    least, zero = torch.full((3, 1), -INF), torch.zeros(3, 1)
    nothing = Top2(least, zero.long(), least, zero)
    for have in (merge(rows, nothing), merge(nothing, rows)):
        assert all(torch.equal(a, b) for a, b in zip(have, rows, strict=True))
    spoilt = top2(torch.tensor([[NAN, 0.0]]).expand(3, 2))
    for have in (merge(rows, spoilt), merge(spoilt, rows)):
        assert thresholds(torch.zeros(3, 4), stats=have).isnan().all()


def test_gradients_pass_gradcheck_twice_and_forward_too():
    z = torch.randn(2, 5, 3, dtype=torch.float64)
    z[0, :, 0] = torch.tensor([0.0, 0.0, 1.0, 25.0, -30.0])  # ties and a peak
    z.requires_grad_()
    for dim in (1, -1):
        assert torch.autograd.gradcheck(
            lambda x, dim=dim: softmax(x, dim), z, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(lambda x, dim=dim: softmax(x, dim), z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("peak", [0, 20, 50, 120, 1000])
def test_masked_and_peaked_rows_have_the_gradient_of_torch(peak, dtype):
    z = causal(63, dtype)
    z[:, 0] += peak
    z.requires_grad_()
    (have,) = torch.autograd.grad(cosine(softmax(z)), z)
    (want,) = torch.autograd.grad(cosine(z.softmax(-1)), z)
    assert not have.isnan().any()
    # Products of p <= 1 and weights <= 1: some roundings of 1
    torch.testing.assert_close(have, want, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_the_16_bit_gradient_is_rounded_once():
    z = torch.randn(63, 257).bfloat16().requires_grad_()
    up = torch.randn(63, 257).bfloat16()
    (have,) = torch.autograd.grad(softmax(z), z, up)
    wide = z.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(wide.softmax(-1), wide, up.double())
    assert have.dtype == torch.bfloat16
    torch.testing.assert_close(have.double(), want, rtol=2**-8, atol=1e-8)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_and_functional_derivatives_agree_with_torch(dim):
    z = torch.randn(5, 4, 7, dtype=torch.float64)

    def f(x):
        return cosine(softmax(x, dim))

    def g(x):
        return cosine(torch.softmax(x, dim))

    for of in (torch.func.grad, torch.func.hessian, torch.func.jacrev):
        torch.testing.assert_close(torch.func.vmap(of(f))(z), torch.func.vmap(of(g))(z))
    inner = torch.func.vmap(lambda x: softmax(x, dim), in_dims=1, out_dims=1)(z)
    torch.testing.assert_close(
        inner, torch.func.vmap(lambda x: x.softmax(dim), in_dims=1, out_dims=1)(z)
    )
    tangent = torch.randn_like(z)
    for have, want in zip(
        torch.func.jvp(softmax, (z,), (tangent,)),
        torch.func.jvp(lambda x: x.softmax(-1), (z,), (tangent,)),
        strict=True,
    ):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_any_axis_layout_and_dtype(dim, dtype):
    z = torch.randn(7, 63, 6).to(dtype)
    for view in (z, z.transpose(0, 2), z[:, ::2], z[1:, 1:, 1:], z[:1].expand(3, 63, 6)):
        have, want = softmax(view, dim), torch.softmax(view, dim)
        assert have.dtype == dtype
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 3), (2, 0, 3)])
def test_scalars_and_empty_tensors_are_answered_as_torch_does(shape):
    z = torch.randn(shape, requires_grad=True)
    have, want = softmax(z, -1), torch.softmax(z, -1)
    torch.testing.assert_close(have, want)
    (grad,) = torch.autograd.grad(have.sum(), z)
    assert grad.shape == shape
    assert thresholds(z).shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [torch.int64, torch.bfloat16, torch.float32])
def test_the_dtype_argument_casts_first_as_torch_does(given, dtype):
    z = (torch.randn(5, 63) * 4).to(given)
    have, want = softmax(z, -1, dtype), torch.softmax(z, -1, dtype)
    assert have.dtype == want.dtype == dtype
    torch.testing.assert_close(have, want)
    assert torch.equal(softmax(input=z, dim=-1, dtype=dtype), have)


def test_autocast_on_the_cpu_changes_what_it_changes_in_torch():
    z, qkv = torch.randn(5, 63), torch.randn(3, 1, 2, 63, 16)
    attend = scaled_dot_product_attention
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in DTYPES:
            assert softmax(z.to(dtype)).dtype == torch.softmax(z.to(dtype), -1).dtype
            q, k, v = qkv.to(dtype)
            assert attend(q, k, v).dtype == F.scaled_dot_product_attention(q, k, v).dtype
        torch.testing.assert_close(softmax(z), z.softmax(-1))
        have = attend(*qkv)
    want = attend(*qkv.bfloat16().double())
    # Only the result is rounded to bf16; with bf16 logits it would be off by 1e-2.
    torch.testing.assert_close(have.double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.gpu
def test_autocast_on_a_gpu_answers_in_float32_as_torch_does():
    z, qkv = torch.randn(5, 63, device="cuda"), torch.randn(3, 1, 2, 63, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for dtype in DTYPES:
            have, want = softmax(z.to(dtype)), torch.softmax(z.to(dtype), -1)
            assert have.dtype == want.dtype
            torch.testing.assert_close(have, want)
        have = scaled_dot_product_attention(*qkv, is_causal=True)
        want = F.scaled_dot_product_attention(*qkv, is_causal=True)
    assert have.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(have, want, rtol=2**-6, atol=2**-6)  # SDPA rounds the gates too


def inputs(case, queries, keys, dtype=torch.float64):
    """(query, key, value, options) of a case of attention: the same numbers in every dtype."""
    torch.manual_seed(0)
    heads = (6, 2) if "gqa" in case else (3, 3)
    q, k = torch.randn(2, heads[0], queries, 16), torch.randn(2, heads[1], keys, 16)
    v = torch.randn(2, heads[1], keys, 24)
    added = torch.randn(queries, keys).to(dtype)
    keep = torch.rand(2, 1, queries, keys) < 0.7
    keep[0, :, 0] = False  # a query without keys
    masked = torch.zeros(keep.shape, dtype=dtype)
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.7},
        "bool mask": {"attn_mask": keep},
        "float mask": {"attn_mask": added},
        "-inf mask": {"attn_mask": masked.masked_fill(~keep, -INF)},
        "finfo.min mask": {"attn_mask": masked.masked_fill(~keep, torch.finfo(dtype).min)},
        "gqa": {"enable_gqa": True},
        "gqa causal": {"enable_gqa": True, "is_causal": True},
    }
    return *(t.to(dtype) for t in (q, k, v)), options[case]


# fmt: off
CASES = [
    "plain", "causal", "scale", "bool mask", "float mask", "-inf mask", "finfo.min mask", "gqa",
    "gqa causal",
]
# fmt: on


@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        (torch.float64, 1e-12),
        # Logits of order 10 are rounded to 5e-7 and move every gate by as much; values are of
        # order 4. SDPA itself is 3.5e-6 from float64 with such numbers.
        (torch.float32, 1e-5),
    ],
)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 257), (63, 63), (257, 63)])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_torch(case, queries, keys, dtype, error):
    *exact, options = inputs(case, queries, keys)
    want = F.scaled_dot_product_attention(*exact, **options)
    *qkv, options = inputs(case, queries, keys, dtype)
    have = scaled_dot_product_attention(*qkv, **options)
    assert have.dtype == dtype
    torch.testing.assert_close(have.double(), want, rtol=0, atol=error)


@pytest.mark.parametrize("case", CASES)
def test_attention_has_the_gradients_of_torch(case):
    *qkv, options = inputs(case, 63, 33)
    leaves = [t.requires_grad_() for t in qkv]
    want = torch.autograd.grad(cosine(F.scaled_dot_product_attention(*qkv, **options)), leaves)
    have = torch.autograd.grad(cosine(scaled_dot_product_attention(*qkv, **options)), leaves)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["plain", "causal", "bool mask", "float mask"])
def test_16_bit_attention_is_rounded_once(case, dtype):
    q, k, v, options = inputs(case, 63, 257, dtype)
    have = scaled_dot_product_attention(q, k, v, **options)
    assert have.dtype == dtype
    if case == "float mask":
        options["attn_mask"] = options["attn_mask"].double()
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(have.double(), want, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


def test_a_later_key_does_not_reach_an_earlier_query():
    q, k, v = torch.randn(3, 2, 63, 16)
    before = scaled_dot_product_attention(q, k, v, is_causal=True)
    k[:, 40], v[:, 40] = 1e3, 1e3
    after = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_attention_without_keys_or_batch_axes():
    q, k = torch.randn(5, 8), torch.randn(0, 8)
    assert scaled_dot_product_attention(q, k, k).tolist() == torch.zeros(5, 8).tolist()
    torch.testing.assert_close(
        scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q)
    )


def test_dropout_falls_on_the_gates():
    q, k = torch.randn(2, 257, 16, dtype=torch.float64)
    gates = softmax(q @ k.T / 4)
    have = scaled_dot_product_attention(q, k, torch.eye(257, dtype=q.dtype), dropout_p=0.25)
    kept = have != 0
    torch.testing.assert_close(have, kept * gates / 0.75)
    # 66,049 draws: the standard deviation of their mean is 0.0017
    assert kept.double().mean() == pytest.approx(0.75, abs=0.01)
    assert not scaled_dot_product_attention(q, k, k, dropout_p=1.0).any()


@pytest.mark.parametrize("way", ["fused", "literal"])
def test_a_temperature_sharpens_each_head_and_learns(way):
    q, k, v = torch.randn(3, 2, 3, 33, 16, dtype=torch.float64)
    tau = torch.tensor([0.5, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    mask = torch.randn(33, 33, dtype=torch.float64)
    have = scaled_dot_product_attention(q, k, v, mask, tau=tau, way=way)
    want = F.scaled_dot_product_attention(q * tau[:, None, None], k, v, mask)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(
        torch.autograd.grad(cosine(have), tau), torch.autograd.grad(cosine(want), tau)
    )


def called(monkeypatch, *args, **options):
    """What a call ran: SDPA, the plain formula, or both."""
    ran = []
    for home, name in ((F, "scaled_dot_product_attention"), (logits, "attend")):
        original = getattr(home, name)
        run = lambda *a, name=name, original=original, **k: (ran.append(name), original(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(home, name, run)
    scaled_dot_product_attention(*args, **options)
    monkeypatch.undo()
    return {"scaled_dot_product_attention": "native", "attend": "gates"}[ran[0]]


def test_the_backend_and_what_is_learned_choose_the_way(monkeypatch):
    qkv, tau = torch.randn(3, 2, 5, 8), torch.ones(2)
    assert called(monkeypatch, *qkv) == "gates"
    assert called(monkeypatch, *qkv, way="native") == "native"
    with kernels.use("auto"):
        assert called(monkeypatch, *qkv) == "native"
        assert called(monkeypatch, *qkv, dropout_p=0.1) == "native"
        assert called(monkeypatch, *qkv, tau=tau) == "gates"
        assert called(monkeypatch, *qkv, tau=tau, dropout_p=0.1) == "gates"
        assert called(monkeypatch, *qkv, way="literal") == "gates"
    with kernels.use("native"):
        assert called(monkeypatch, *qkv) == "native"
        with pytest.raises(kernels.BackendError, match="a temperature has no native op"):
            scaled_dot_product_attention(*qkv, tau=tau)


def test_native_is_torchs_own_to_the_bit():
    qkv = torch.randn(3, 1, 2, 33, 16)
    have = scaled_dot_product_attention(*qkv, is_causal=True, way="native")
    assert torch.equal(have, F.scaled_dot_product_attention(*qkv, is_causal=True))


@pytest.mark.parametrize("case", CASES)
def test_statistics_give_the_thresholds_of_chosen_rows(case):
    q, k, v, options = inputs(case, 33, 63)
    out, stats = with_statistics(q, k, v, **options)
    assert torch.equal(out, scaled_dot_product_attention(q, k, v, **options))
    assert all(map(torch.equal, stats, row_statistics(q, k, **options)))
    mask, causal = options.pop("attn_mask", None), options.pop("is_causal", False)
    z = logits.attention_logits(q, k, mask, causal, **options)
    rows = [3, 20]
    chosen = Top2(*(s[:, :, rows] for s in stats))
    torch.testing.assert_close(thresholds(z[:, :, rows], stats=chosen), thresholds(z)[:, :, rows])


@pytest.mark.parametrize("n", [1, 2, 3, 64, 1000, 2**16])
def test_a_tree_of_gates_adds_up_exponentials(n):
    for spread in (1, 10):
        z = torch.randn(4, n) * spread
        error = (tree_logsumexp(z).double() - z.double().logsumexp(-1)).abs().max()
        # a node rounds its softplus and its sum: together an ulp of the result, at each of log2 n
        # levels; 9.5e-7 was the most measured
        assert error <= 3e-7 + math.log2(n) * 2**-23 * max(1, z.max().item())


def test_adding_up_one_after_the_other_is_worse():
    z = torch.randn(64, 4096)
    exact = z.double().logsumexp(-1)
    one_by_one = z[:, 0]
    for x in z[:, 1:].unbind(-1):
        one_by_one = torch.logaddexp(one_by_one, x)
    # 4096 roundings of a number near 9 against 12: 9.7e-6 and 7.7e-7 measured
    assert (tree_logsumexp(z) - exact).abs().max() < (one_by_one - exact).abs().max() / 4


def test_rows_of_a_tree_may_be_masked_empty_or_along_another_axis():
    z = torch.randn(5, 7)
    z[:3, 2] = -INF
    z[:, 4] = -INF
    torch.testing.assert_close(tree_logsumexp(z, 0), z.logsumexp(0))
    assert tree_logsumexp(torch.zeros(2, 0)).tolist() == [-INF, -INF]
    assert math.isnan(tree_logsumexp(torch.tensor([0.0, NAN, 1.0])))


def test_the_operations_of_a_tree_are_those_it_does(monkeypatch):
    nodes = 0

    def counted(a, b, node=attention._lse):
        nonlocal nodes
        nodes += a.shape[-1]
        return node(a, b)

    monkeypatch.setattr(attention, "_lse", counted)
    for n in (1, 2, 3, 7, 1000):
        nodes = 0
        tree_logsumexp(torch.zeros(n))
        assert tree_operations(n) == TreeOperations(
            nodes, nodes, 2 * nodes, math.ceil(math.log2(n))
        )


class Both(torch.nn.Module):
    def forward(self, q, k, v):
        return softmax(scaled_dot_product_attention(q, k, v, is_causal=True), 1)


def both_of_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).softmax(1)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_holds_gates_and_no_softmax(strict):
    qkv = tuple(torch.randn(3, 2, 63, 16))
    program = torch.export.export(Both(), qkv, strict=strict)
    called = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert any("log1p" in name for name in called)
    assert not [name for name in called if "softmax" in name or "attention" in name]
    torch.testing.assert_close(program.module()(*qkv), both_of_torch(*qkv))


@pytest.mark.compile
def test_compiled_without_a_break_value_and_gradient_stay():
    qkv = [t.requires_grad_() for t in torch.randn(3, 2, 63, 16)]
    have = torch.compile(Both(), fullgraph=True)(*qkv)
    want = both_of_torch(*qkv)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(
        torch.autograd.grad(cosine(have), qkv), torch.autograd.grad(cosine(want), qkv)
    )


ATTEND = scaled_dot_product_attention
MESSAGES = [
    (TypeError, lambda x: softmax(x.int()), "gates need a real floating-point tensor, got torch.int32; convert it first."),
    (TypeError, lambda x: softmax(x.to(torch.complex64)), "gates need a real floating-point tensor, got torch.complex64; convert it first."),
    (TypeError, lambda x: softmax([1.0]), "gates need a real floating-point tensor, got list; convert it first."),
    (TypeError, lambda x: thresholds(x.bool()), "gates need a real floating-point tensor, got torch.bool; convert it first."),
    (ValueError, lambda x: softmax(x, masked=1.0), "softmax: a masked row becomes nan or 0; got masked=1.0."),
    (TypeError, lambda x: ATTEND(x.int(), x.int(), x.int()), "gates need a real floating-point tensor, got torch.int32; convert it first."),
    (TypeError, lambda x: ATTEND(x, x.half(), x), "attention: query, key and value need one dtype; got torch.float32, torch.float16, torch.float32."),
    (ValueError, lambda x: ATTEND(x[0, 0], x, x), "attention: query, key and value need at least two axes, (..., length, size); got 1, 3, 3."),
    (ValueError, lambda x: ATTEND(x, x, x, torch.ones(5, 5).bool(), is_causal=True), "attention: attn_mask and is_causal exclude each other; give one of them."),
    (TypeError, lambda x: ATTEND(x, x, x, torch.ones(5, 5).int()), "attention: attn_mask is boolean (True takes part) or floating point (added); got torch.int32."),
    (ValueError, lambda x: ATTEND(x, x, x, way="slow"), "attention: way is None or one of native, fused, literal; got 'slow'."),
    (ValueError, lambda x: ATTEND(x, x, x, dropout_p=0.1, way="fused"), "attention: fused has no dropout; got dropout_p=0.1. Use 0, the way 'native', or the backend 'reference' with way=None."),
    (ValueError, lambda x: ATTEND(x, x, x, tau=torch.ones(3), way="native"), "attention: native has no temperature per head; use 'fused' or 'literal'."),
    (ValueError, lambda x: ATTEND(x, x, x, tau=torch.ones(2)), "attention: tau has one entry for each head of query, (3, 5, 8); got shape (2,)."),
    (ValueError, lambda x: tree_operations(0), "tree_operations: a row has at least one logit; got 0."),
    (ValueError, lambda x: ATTEND(x, x[:2], x[:2], enable_gqa=True), "enable_gqa: the heads of query must be a multiple of those of key and value; got 3 and 2."),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_bad_input_is_answered_with_what_would_work(error, call, message):
    with pytest.raises(error) as caught:
        call(torch.zeros(3, 5, 8))
    assert str(caught.value) == message


def test_an_axis_that_is_not_there_is_an_index_error_as_in_torch():
    with pytest.raises(IndexError, match="Dimension out of range"):
        softmax(torch.zeros(3, 5), 2)
