"""Every finite number is tried once, what is wrong is found where it is, what is on record holds."""

import json
import math

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import TAXONOMY, TG, kernels
from threshold_gating.conversion import proof
from threshold_gating.conversion.enumeration import FORMATS, Format, Walk
from threshold_gating.conversion.proof import Proof, holds_for_every_input, prove, prove_row
from threshold_gating.conversion.record import Worst, table
from threshold_gating.nn.activation import Activation
from threshold_gating.primitive import gates
from threshold_gating.taxonomy import ROWS

HALVES = [torch.float16, torch.bfloat16]
EXACT = [key for key, row in ROWS.items() if row.exact]
RECORDED = sorted(proof.on_record())
# A type of eight bits, laid out like the others: 1 sign, 5 exponent, 2 mantissa.
SMALL = Format(torch.int8, 2)


def every(walk, blocks):
    return torch.cat([walk.values(*piece) for piece in walk.pieces(blocks)])


def finite(dtype, bits):
    """All finite numbers of a type, the slow way: each pattern of bits, asked."""
    width = torch.iinfo(bits).bits
    x = torch.arange(-(2 ** (width - 1)), 2 ** (width - 1)).to(bits).view(dtype)
    return x[x.float().isfinite()]


# The enumeration


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("blocks", [10_000, 47])
def test_every_finite_number_is_taken_once(dtype, blocks):
    layout = FORMATS.get(dtype, SMALL)
    start = Walk(dtype, layout, 0)
    walk = Walk(dtype, layout, start.finite)
    have = every(walk, blocks).view(layout.bits).sort().values
    want = finite(dtype, layout.bits).view(layout.bits).sort().values
    assert torch.equal(have, want)
    assert len(have) == {torch.float16: 63_488, torch.bfloat16: 65_280}.get(dtype, 248)


def test_the_pieces_of_float32_are_all_its_numbers():
    walk = Walk.over(torch.float32)
    assert walk.complete
    assert 2 * walk.blocks * walk.block == 2 * walk.finite == 4_278_190_080
    for sign in (0, 1):
        ends = [(first, last) for s, first, last in walk.pieces(256) if s == sign]
        assert [first for first, _ in ends] == [0, *(last for _, last in ends[:-1])]
        assert ends[-1][1] == walk.blocks
        # neighbours within a block, from one block to the next, and at either end
        x = walk.values(sign, 300, 302)
        assert torch.equal(
            torch.nextafter(x[:-1], torch.full_like(x[1:], (-1) ** sign * math.inf)), x[1:]
        )
        outermost = walk.values(sign, walk.blocks - 1, walk.blocks)[-1].item()
        assert outermost == (-1) ** sign * torch.finfo(torch.float32).max
        zero = walk.values(sign, 0, 1)[0].item()
        assert (zero, math.copysign(1, zero)) == (0, (-1) ** sign)


@pytest.mark.parametrize(("dtype", "sample"), [(torch.float32, 5000), (torch.float16, 400)])
def test_a_sample_has_every_exponent_zero_and_the_largest(dtype, sample):
    walk = Walk.over(dtype, sample)
    x = every(walk, 100).double()
    assert not walk.complete
    assert len(x) == sample == len(set(x.view(torch.int64).tolist()))
    exponents = walk.finite >> walk.format.mantissa
    for side in (x[x >= 0], -x[x < 0]):
        subnormal = torch.finfo(dtype).tiny / 2
        assert len(set(side.clamp_min(subnormal).frexp().exponent.tolist())) == exponents
        assert side.max() == torch.finfo(dtype).max


def test_a_sample_too_small_for_every_exponent_is_refused():
    with pytest.raises(ValueError, match=r"float32 needs at least 1,020 inputs.*got 1,019"):
        Walk.over(torch.float32, 1019)


# What is measured


@pytest.mark.parametrize("key", ["silu", "mish", "star_relu"])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_figures_are_those_of_a_plain_comparison(key, dtype):
    found = prove_row(key, dtype)
    x = finite(dtype, torch.int16)
    have, want = TAXONOMY[key](x), ROWS[key].f(x)
    assert found.inputs == len(x)
    assert found.complete
    assert found.differs == int((have != want).sum())
    # numpy's frexp, where the library looks at bits
    truth = ROWS[key].f(x.double()).numpy()
    info = torch.finfo(dtype)
    power = np.frexp(np.maximum(np.abs(truth), info.tiny))[1] - 1
    with np.errstate(invalid="ignore"):
        ulp = np.abs(have.double().numpy() - truth) / np.ldexp(info.eps, power)
    small = ~torch.from_numpy(truth).to(dtype).isinf().numpy()  # not rightly infinite
    ulp = ulp[small]
    assert found.ulp.value == ulp.max()
    low, high = found.within
    inside = (x.double().numpy() >= low) & (x.double().numpy() <= high)
    assert found.ulp_within.value == ulp[inside[small]].max()


def test_an_overflow_that_is_right_is_no_error():
    found = prove_row("relu_squared", torch.float16)  # 65504 ** 2 is infinite in float16
    assert (found.differs, found.infinite, found.ulp.value) == (0, 0, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_wrong_instance_is_found_and_so_is_the_input(dtype):
    wrong = TG(1.001, 0, (0, 1), (0, 0))
    sample = 100_000 if dtype == torch.float32 else None
    found = prove(wrong, F.silu, dtype, sample=sample)
    assert found.name == "instance"
    assert not found.holds
    assert found.beyond > 0
    assert found.ulp_within.value > 3 * found.torch_within.value
    # the figures are those at the inputs that are named
    for worst, size in ((found.error, 1.0), (found.distance, None)):
        x = torch.tensor([worst.at], dtype=dtype)
        d = (wrong(x).double() - F.silu(x).double()).abs().item()
        truth = F.silu(x.double()).abs().clamp_min(torch.finfo(dtype).tiny)
        unit = size or 2.0 ** (math.frexp(truth.item())[1] - 1) * torch.finfo(dtype).eps
        assert d / unit == pytest.approx(worst.value, rel=1e-6)
    assert "WRONG: on " in str(found)


def test_a_threshold_that_is_off_by_one_number_is_found():
    x = torch.tensor(6.0, dtype=torch.float16)
    above = torch.nextafter(x, x * 2).item()
    found = prove(
        TG(math.inf, above, (1, 0), (0, above)), lambda x: x.clamp_max(6.0), torch.float16
    )
    assert found.differs == int((finite(torch.float16, torch.int16) > 6).sum())


def test_a_function_that_overwrites_its_input_is_compared_all_the_same():
    found = prove(TAXONOMY["relu"], nn.ReLU(inplace=True), torch.bfloat16)
    assert (found.differs, found.inputs) == (0, 65_280)


def test_nan_infinities_and_the_sign_of_zero_are_counted_apart():
    t, x = TAXONOMY["identity"], finite(torch.float16, torch.int16)

    def changed(where, value):
        return lambda x: torch.where(where(x), torch.full_like(x, value), x)

    large = changed(lambda x: x > 1000, math.nan)
    found = prove(t, torch.clone, torch.float16, gate=large)
    assert found.nan == found.beyond == int((x > 1000).sum())
    assert (found.infinite, found.torch_nan, found.holds, found.error.value) == (0, 0, False, 0.0)
    assert f"On {found.nan:,} inputs the gates are NaN and torch is not." in str(found)
    found = prove(t, changed(lambda x: x < -9, -math.inf), torch.float16, truth=torch.clone)
    assert (found.torch_infinite, found.infinite) == (int((x < -9).sum()), 0)
    assert found.holds  # the gates are right
    assert found.torch_ulp.value == math.inf
    found = prove(t, torch.clone, torch.float16, gate=changed(lambda x: x == 0, -0.0))
    assert (found.differs, found.zeros) == (0, 1)
    assert "Inputs at which only the sign of zero differs: 1." in str(found)


def test_infinite_inputs_are_tried():
    assert prove_row("silu", torch.float16).special == (("-inf", "0.0", "nan"),)
    assert prove_row("relu", torch.float16).special == ()


def test_silu_has_its_bound_only_where_exp_does_not_overflow():
    found = prove_row("silu", torch.float32, sample=400_000)
    low, high = found.within
    assert high == math.inf
    assert -89 < low < -87.3
    assert found.ulp_within.value < 4 < 1e6 < found.ulp.value
    assert found.torch_within.value < 4 < 1e6 < found.torch_ulp.value
    assert found.ulp.at < low
    assert f"for x >= {low:.8g}".rstrip("0") in str(found)


@pytest.mark.parametrize("key", ["silu", "quick_gelu", "mish", "dtanh", "gelu"])
def test_no_gate_underflows_where_the_gates_are_open(key):
    t = TAXONOMY[key]
    ends = torch.tensor(proof.open_gates(t), dtype=torch.float64)
    tau = [torch.tensor(each) for each in t.tau] if isinstance(t.tau, tuple) else t.tau
    least = gates(ends, tau, t.theta).min(0).values
    tiny = torch.finfo(torch.float32).tiny
    assert (least >= tiny).all()
    assert (least <= t.K * tiny * 1.01).all()  # and not much is left out


@pytest.mark.parametrize("key", ["smish", "dsilu", "star_relu", "gelu_k5", "hardswish"])
def test_rounding_is_what_other_orders_of_the_same_steps_differ_by(key):
    """Branch by branch in float32, as nobody would: within the bound, which is not far off."""
    t = TAXONOMY[key]
    x = torch.linspace(-80, 80, 100_001)
    g = gates(x, t.tau, t.theta, form=t.form, owner=t.owner)
    y = sum(
        gk * (q * x * x + s * x + c)
        for gk, q, s, c in zip(g, t.q or (0.0,) * t.K, t.s, t.c, strict=True)
    )
    share = (y - t(x.double())).abs() / proof.rounding(t, x)
    assert 0.02 < share[share.isfinite()].max() < 1


def test_a_gate_of_many_steps_may_be_looser_than_its_class_and_is_then_said_to_be():
    found = prove_row("dsigmoid", torch.float32, sample=100_000)
    assert found.holds
    assert found.loose > 0
    assert (
        f"On {found.loose:,} inputs the gates are over 8 ulp further from float64 than torch."
        in str(found).replace("\n    ", " ")
    )
    assert prove_row("silu", torch.float32, sample=100_000).loose == 0


def test_a_hard_gate_is_open_everywhere():
    assert proof.open_gates(TAXONOMY["relu"]) == (-math.inf, math.inf)


def test_the_true_tanhshrink_does_not_cancel():
    x = torch.tensor([1e-30, 1e-9, 1e-3, 0.049999, 0.050001, -0.02, 3.0], dtype=torch.float64)
    with mpmath.workdps(80):
        want = [float(mpmath.mpf(v) - mpmath.tanh(mpmath.mpf(v))) for v in x.tolist()]
    assert proof.TRUTHS["tanhshrink"](x).tolist() == pytest.approx(want, rel=1e-12, abs=0)


def test_the_error_of_an_approximate_row_is_what_it_claims():
    found = prove_row("gelu_k3", torch.float32, sample=300_000)
    assert found.holds
    assert found.error.value == pytest.approx(ROWS["gelu_k3"].sup, rel=6e-3)
    wrong = prove(
        TAXONOMY["gelu_k3"], F.gelu, torch.float32, sup=ROWS["gelu_k3"].sup / 2, sample=99_999
    )
    assert not wrong.holds


@pytest.mark.parametrize("key", ["silu", "hardswish", "mish", "gelu"])
def test_a_backend_that_is_not_the_reference_is_proven_without_torchs_op(key, monkeypatch):
    monkeypatch.setattr(kernels, "native", lambda t: pytest.fail("torch's own op was asked for"))
    found = prove_row(key, torch.float16, backend="auto")
    assert found.holds
    assert found.backend == "auto"


# How much of it


def test_a_sample_is_not_complete():
    found = prove_row("relu", torch.float32, sample=2000)
    assert (found.complete, found.interrupted, found.inputs) == (False, False, 2000)
    assert "2,000 inputs (a sample, which is no proof)" in str(found)


def test_an_interrupt_gives_what_was_covered(monkeypatch):
    monkeypatch.setattr(proof, "_STEP", {"cpu": 1000})
    done = []

    def stop(inputs, count):
        done.append(inputs)
        if len(done) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(proof, "_STEPS", 3)
    found = prove_row("silu", torch.float16, progress=stop)
    assert (found.complete, found.interrupted, found.within) == (False, True, None)
    assert found.inputs == done[0] == 3000
    assert "3,000 inputs (interrupted, which is no proof)" in str(found)


def test_an_interrupt_before_anything_holds_nothing(monkeypatch):
    def interrupt(x):
        raise KeyboardInterrupt

    found = prove(TAXONOMY["relu"], torch.relu, torch.float16, gate=lambda x: x, truth=interrupt)
    assert (found.inputs, found.holds, found.complete) == (0, False, False)


def test_several_processes_find_the_same(monkeypatch):
    monkeypatch.setattr(proof, "_STEPS", 1)
    alone = prove_row("silu", torch.float32, sample=300_000)
    assert prove_row("silu", torch.float32, sample=300_000, jobs=2) == alone


def test_several_processes_can_be_interrupted(monkeypatch):
    monkeypatch.setattr(proof, "_STEPS", 1)

    def stop(done, count):
        raise KeyboardInterrupt

    found = prove_row("relu", torch.float32, sample=600_000, jobs=2, progress=stop)
    assert (found.complete, found.interrupted) == (False, True)
    assert 0 < found.inputs < 600_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"dtype": torch.float64},
            "float64 cannot be tried; the types .* are float32, float16, bfloat16",
        ),
        ({"jobs": 0}, "1 or more .*; got jobs=0"),
        ({"jobs": 2, "device": "meta"}, "share a CPU.* got jobs=2 on meta"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        prove(TAXONOMY["relu"], torch.relu, **options)


# The record


def test_a_proof_comes_back_from_json():
    found = prove_row("silu", torch.bfloat16)
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert Proof.from_dict(json.loads(text)) == found
    assert json.loads(text)["within"][1] == "inf"


def test_the_table_is_at_most_100_wide_and_says_what_failed():
    wrong = prove(TG(1.001, 0, (0, 1), (0, 0)), F.silu, torch.float16)
    rows = [
        prove_row("x_sigmoid_squared", torch.bfloat16),
        prove_row("gelu", torch.bfloat16),
        wrong,
    ]
    lines = table(rows).splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[-1] for line in lines[2:]] == ["yes", "yes", "NO"]


@pytest.mark.parametrize(
    "key", [key for key in RECORDED if key[1] != "float32" and key[2] == "cpu"]
)
def test_16_bits_on_record_are_found_again(key):
    name, dtype, _ = key
    stored, found = proof.on_record()[key], prove_row(name, getattr(torch, dtype))
    assert found.holds
    assert stored.inputs == found.inputs
    if TAXONOMY[name].hard:  # comparisons and one rounding, with any torch
        assert (found.differs, found.ulp, found.within) == (
            stored.differs,
            stored.ulp,
            stored.within,
        )
    else:  # evaluated in float32 and rounded once
        assert found.ulp_within.value == pytest.approx(stored.ulp_within.value, abs=0.02)
    if stored.made_here:  # another processor's exp and tanh round a few to the other side
        few = 1 + stored.inputs // 10_000
        assert abs(found.differs - stored.differs) <= few
        assert abs(found.zeros - stored.zeros) <= few


@pytest.mark.parametrize("key", [key for key in RECORDED if key[1:] == ("float32", "cpu")])
def test_a_sample_of_float32_stays_within_what_is_on_record(key):
    stored, found = proof.on_record()[key], prove_row(key[0], torch.float32, sample=60_000)
    assert (stored.inputs, stored.complete) == (4_278_190_080, True)
    assert found.holds
    # another torch's exp may round to the other side, one ulp off
    more = 0.0 if stored.made_here or TAXONOMY[key[0]].hard else 1.0
    assert found.ulp_within.value <= stored.ulp_within.value + more
    assert found.differs == 0 or stored.differs > 0


def test_every_exact_row_is_on_record_in_16_bits():
    assert {(key, dtype, "cpu") for key in EXACT for dtype in ("float16", "bfloat16")} <= set(
        RECORDED
    )


def test_what_is_on_record_is_given_for_torchs_own_functions_only():
    half = torch.bfloat16
    silu = TAXONOMY["silu"]
    assert holds_for_every_input(silu, "silu", half) == proof.on_record()["silu", "bfloat16", "cpu"]
    assert holds_for_every_input(silu, nn.SiLU(), half).name == "silu"
    assert holds_for_every_input(TAXONOMY["leaky_relu"], nn.LeakyReLU(), half).name == "leaky_relu"

    class SiLU(nn.Module):  # another's, of the same name
        def forward(self, x):
            return x * torch.sigmoid(x)

    assert holds_for_every_input(silu, SiLU(), half) is None
    assert holds_for_every_input(silu, "sigmoid", half) is None
    assert holds_for_every_input(silu, "silu", torch.float64) is None
    assert holds_for_every_input(TG(1.001, 0, (0, 1), (0, 0)), "silu", half) is None
    relu6 = TAXONOMY["relu6"]  # is hardtanh(0, 6), of which nothing was proven
    assert holds_for_every_input(relu6, nn.Hardtanh(0, 6), half) is None
    assert holds_for_every_input(TAXONOMY["gelu"], "gelu", half) is None


def test_a_proof_that_failed_or_is_not_complete_is_not_given(monkeypatch):
    good = proof.on_record()["relu", "float16", "cpu"]
    key = ("relu", "float16", "cpu")
    for changed in ({"beyond": 1}, {"nan": 1}):
        bad = Proof.from_dict({**good.to_dict(), **changed})
        monkeypatch.setattr(proof, "on_record", lambda bad=bad: {key: bad})
        assert holds_for_every_input(TAXONOMY["relu"], "relu", torch.float16) is None


def test_a_module_evaluates_its_record_at_every_finite_input():
    """So a proof of the record is one of the module."""
    with kernels.use("reference"), torch.no_grad():
        for dtype in HALVES:
            x = finite(dtype, torch.int16)
            for key in EXACT:
                assert torch.equal(Activation(key)(x), TAXONOMY[key](x)), key


# One of each kind: hard, K = 2, opposite branches, a parabola; `tg prove` is for the others.
_KINDS = ("relu", "silu", "tanh", "hardswish")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    "key", [k if k in _KINDS else pytest.param(k, marks=pytest.mark.slow) for k in EXACT]
)
def test_every_exact_row_holds_on_a_gpu(key, backend):
    for dtype in HALVES:
        assert prove_row(key, dtype, device="cuda", backend=backend).holds
    assert prove_row(key, device="cuda", backend=backend, sample=10_000_000).holds


def test_the_worst_of_nothing_is_zero():
    assert Worst() == (0.0, 0.0)
