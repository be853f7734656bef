"""The physical gates of one site: ideal ones are the instance, errors have the size in volts."""

import math

import pytest
import torch

import threshold_gating as tg
from threshold_gating.hardware import devices
from threshold_gating.hardware.physical import AnalogGate, Chip, Errors

NONE = Errors(theta=0.0, tau=0.0, noise=0.0, tree=0.0)
WEAK = devices.preset("sky130-weak")
ROWS = {key: t for key, t in tg.TAXONOMY.items() if t.K > 1}


def gate_of(t, x, chip, draws=1, seed=0, volts=None):
    """The gates of a site that saw x; its tensors are those of the first chip."""
    gate = AnalogGate("site", "kind", t, chip)
    gate.watching = True
    gate(x)
    gate.watching = False
    gate.settle(volts)
    gate.draw(seed, draws)
    gate.every = {**dict(gate.devices.named_buffers()), **dict(gate.devices.named_parameters())}
    for name, value in gate.every.items():
        delattr(gate.devices, name)
        gate.devices.put(name, value.detach()[0])
    return gate


@pytest.mark.parametrize("key", ROWS)
def test_ideal_pairs_are_the_instance(key):
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)[:, None].expand(101, 3)
    gate = gate_of(ROWS[key], x, Chip(None, NONE.of(None)))
    torch.testing.assert_close(gate(x), ROWS[key](x), rtol=1e-12, atol=1e-12)


def test_what_is_watched_is_the_instance_and_is_counted():
    x = torch.tensor([[1.0, -2.0], [2.0, -1.0]])
    gate = AnalogGate("site", "relu", tg.TAXONOMY["relu"], Chip(WEAK, NONE))
    gate.watching = True
    torch.testing.assert_close(gate(x), x.relu())
    assert (gate.seen.count, gate.seen.largest) == (4, 2.0)
    assert gate.seen.rms == pytest.approx(math.sqrt(2.5))


def test_a_soft_gate_is_given_the_volts_that_make_its_tau():
    x = torch.randn(50, 4)
    gate = gate_of(tg.TAXONOMY["quick_gelu"], x, Chip(WEAK, NONE.of(WEAK)))
    assert gate.volts == pytest.approx(1.702 / WEAK.tau)
    v = gate.volts * x.double()
    torch.testing.assert_close(gate(x), (WEAK.gate(v) * x.double()).float())


def test_a_hard_gate_has_its_largest_input_at_the_swing_and_the_sharpness_of_that():
    x = torch.randn(50, 4).clamp(-2, 2)
    x[0, 0] = 2.0
    gate = gate_of(tg.TAXONOMY["relu"], x, Chip(WEAK, NONE.of(WEAK)))
    assert gate.volts == pytest.approx(WEAK.swing / 2.0)
    want = WEAK.gate(gate.volts * x.double()) * x.double()
    torch.testing.assert_close(gate(x), want.float())
    sharper = gate_of(tg.TAXONOMY["relu"], x, Chip(WEAK, NONE.of(WEAK), level=0.8))
    assert sharper.volts == pytest.approx(0.4)
    asked = gate_of(tg.TAXONOMY["relu"], x, Chip(WEAK, NONE.of(WEAK), sharpness=8.0))
    assert asked.volts * WEAK.tau * asked.seen.rms == pytest.approx(8.0)


def test_volts_that_are_given_make_a_soft_gate_sharper():
    x = torch.randn(20, 3)
    chip = Chip(None, NONE.of(None))
    gate = gate_of(tg.TAXONOMY["silu"], x, chip, volts=2.0)
    torch.testing.assert_close(gate(x), x * torch.sigmoid(2 * x))
    twice = Chip(WEAK, Errors(theta=0.005).of(WEAK))
    gate = gate_of(tg.TAXONOMY["silu"], x, twice, volts=2 / WEAK.tau)
    assert gate.sigma_theta() == pytest.approx(0.005 * WEAK.tau / 2)  # larger than the mismatch


def test_sharpness_is_off_by_a_factor():
    x = torch.randn(3, 4000)
    gate = gate_of(tg.TAXONOMY["silu"], x, Chip(None, Errors(tau=0.3, unit="rms").of(None)))
    tau = (0.3 * gate.every["tau"][0, 0]).exp()
    torch.testing.assert_close(gate(x), x * torch.sigmoid(tau * x))
    assert tau.log().std().item() == pytest.approx(0.3, rel=0.05)  # 4,000: 1.1 %


def test_the_curve_of_the_device_stands_at_every_threshold():
    """K = 3: log odds of neighbouring branches are those of the pair between them."""
    strong = devices.preset("sky130-strong")
    t = tg.TG(2.0, (-1.0, 1.5), (0.0, 1.0, 0.0), (-1.0, 0.0, 1.5))
    x = torch.linspace(-3, 3, 33, dtype=torch.float64)[:, None]
    gate = gate_of(t, x, Chip(strong, NONE.of(strong)))
    f = [devices.curve(2.0 * (x - theta), strong.shape) for theta in t.theta]
    odds = [p / (1 - p) for p in f]
    weights = torch.stack([torch.ones_like(x), odds[0], odds[0] * odds[1]])
    branches = torch.stack([-torch.ones_like(x), x, torch.full_like(x, 1.5)])
    want = (weights * branches).sum(0) / weights.sum(0)
    torch.testing.assert_close(gate(x), want, rtol=1e-9, atol=1e-9)
    assert (want - t(x)).abs().max() > 0.01  # strong inversion is not logistic


def test_heat_makes_a_gate_softer():
    x = torch.randn(20, 3)
    chip = Chip(WEAK, NONE.of(WEAK), temperature=125.0)
    gate = gate_of(tg.TAXONOMY["silu"], x, chip)
    u = x.double() * WEAK.tau_at(125.0) / WEAK.tau
    torch.testing.assert_close(gate(x), (x.double() * devices.curve(u, WEAK.shape)).float())


def test_rails_make_three_branches_of_two():
    x = torch.linspace(-3, 3, 61)[:, None]
    chip = Chip(WEAK, NONE.of(WEAK), level=0.8, rail=0.4)  # by hand: `simulate` refuses this
    gate = gate_of(tg.TAXONOMY["relu"], x, chip)
    y = gate(x)
    assert (y[x > 1.5] == y[-1]).all()
    # 3 is at 0.8 V, so 0.4 V is 1.5, where the gate of tau 29 per volt is open to 1e-5
    assert y[-1].item() == pytest.approx(1.5, rel=1e-3)
    low = gate_of(tg.TAXONOMY["leaky_relu"], x, chip)(x)
    assert (low[x < -1.5] == low[0]).all()
    assert low[0].item() == pytest.approx(-0.015, abs=1e-4)  # a slope of 0.01, and 1e-5 of 1.5


def test_thresholds_are_off_by_the_devices_volts():
    """tau sigma(theta) is what a network sees: sigma_V tau_V / tau in units of x."""
    x = torch.zeros(1, 20_000)
    x[0, 0] = 1.0
    errors = Errors(theta=0.005, tau=0.0, noise=0.0).of(WEAK)
    gate = gate_of(tg.TAXONOMY["sigmoid"], x, Chip(WEAK, errors))
    at = devices.log_odds(torch.zeros(1), WEAK.shape)
    assert at.item() == pytest.approx(0.0, abs=1e-6)
    p = gate(x)[0, 1:].double()
    # invert the curve where it is: a small error moves p by slope tau dtheta
    slope = (devices.curve(torch.tensor(1e-3), WEAK.shape).item() - 0.5) / 1e-3
    moved = (p - 0.5) / slope / 1.0
    assert moved.std().item() == pytest.approx(
        0.005 * WEAK.tau, rel=0.03
    )  # 20,000: 0.5 %; bend: 1 %
    assert gate.sigma_theta() == pytest.approx(0.005 * WEAK.tau)


def test_errors_in_units_of_what_the_site_sees():
    torch.manual_seed(0)
    x = 3.0 * torch.randn(4, 5000)
    for kind, where in (("theta", "theta"), ("offset", "offset")):
        errors = Errors(unit="rms", **{kind: 0.1}).of(None)
        gate = gate_of(tg.TAXONOMY["relu"], x, Chip(None, errors))
        drawn = gate.every[where].flatten()
        assert drawn.std().item() == pytest.approx(1.0, rel=0.04)
        y, want = gate(x), x.relu()
        if kind == "offset":  # both gate and branches read it
            moved = x + 0.1 * gate.seen.rms * drawn
            torch.testing.assert_close(y, moved.relu())
        else:  # the branches do not
            theta = 0.1 * gate.seen.rms * drawn
            torch.testing.assert_close(y, torch.where(x > theta, x, 0.0))
            assert (y - want).abs().max() > 0.1


def test_a_tail_that_is_off_scales_its_branch_and_a_branch_of_zero_stays():
    x = torch.randn(6, 7)
    gate = gate_of(tg.TAXONOMY["relu"], x, Chip(None, Errors(tail=0.05, unit="rms").of(None)))
    gain = 1 + 0.05 * gate.every["tail"][0, 1]
    torch.testing.assert_close(gate(x), x.relu() * gain)


def test_noise_is_another_in_every_evaluation():
    x = torch.full((1, 10_000), 2.0)
    gate = gate_of(tg.TAXONOMY["relu"], x, Chip(None, Errors(noise=0.1, unit="rms").of(None)))
    first, second = gate(x), gate(x)
    assert not torch.equal(first, second)
    assert (first - x).std().item() == pytest.approx(0.2, rel=0.04)


@pytest.mark.parametrize(
    ("share", "group", "shape"),
    [
        ("layer", (1,), (1, 1, 1, 1)),
        ("channel", (3,), (1, 3, 1, 1)),
        ("neuron", (3, 4, 5), (1, 3, 4, 5)),
    ],
)
def test_a_physical_gate_serves_what_share_says(share, group, shape):
    x = torch.ones(2, 3, 4, 5)
    gate = AnalogGate(
        "site", "relu", tg.TAXONOMY["relu"], Chip(None, Errors(0.1, unit="rms").of(None), share)
    )
    gate.watching, gate.axis = True, 1
    gate(x)
    gate.settle()
    gate.draw(0, 4)
    assert gate.group == group
    assert gate.devices.theta.shape == (4, 1, *group)
    assert gate._spread(gate.devices.theta[0, 0], x) == shape
    if share != "layer":
        with pytest.raises(ValueError, match=r"physical gates .* simulate with inputs of the size"):
            gate._spread(gate.devices.theta[0, 0], torch.ones(2, 4, 5, 4))


def test_a_gate_that_learns_keeps_its_gradient():
    act = tg.Activation("silu", share="channel", channels=3, train=("tau", "theta", "s", "c"))
    x = torch.randn(8, 3)
    gate = gate_of(act, x, Chip(WEAK, Errors().of(WEAK)))
    gate(x).square().sum().backward()
    assert all(p.grad.abs().min() > 0 for n, p in act.named_parameters() if n in ("rho", "dtheta"))
    with torch.no_grad():
        act.rho.fill_(math.log(2.0))
    exact = gate_of(act, x, Chip(None, NONE.of(None)))
    torch.testing.assert_close(exact(x), act(x))


def test_a_preset_gives_the_errors_that_are_not_given():
    errors = Errors(offset=0.001, theta=0.002).of(WEAK)
    assert (errors.theta, errors.tau, errors.noise) == (0.002, WEAK.sigma_tau, WEAK.noise)
    assert (errors.offset, errors.tree) == (0.001, WEAK.sigma_theta)
    in_rms = Errors(unit="rms").of(WEAK)
    assert (in_rms.theta, in_rms.noise, in_rms.tau) == (0.0, 0.0, WEAK.sigma_tau)


@pytest.mark.parametrize(
    "given",
    [
        *({"theta": -1.0}, {"noise": math.inf}, {"tail": math.nan}),
        *({"theta": "a"}, {"tau": True}, {"offset": None}),
    ],
)
def test_an_error_is_a_standard_deviation(given):
    with pytest.raises(ValueError, match="standard deviation, from 0 on"):
        Errors(**given)


def test_a_run_computes_what_the_devices_are_once_and_says_the_same():
    chip = Chip(WEAK, Errors(noise=0.0).of(WEAK))
    x = torch.linspace(-3, 3, 12).view(3, 4)
    gate = gate_of(tg.TAXONOMY["silu"], x, chip)
    want = gate(x)
    gate.known = {}
    assert torch.equal(gate(x), want)
    assert torch.equal(gate(x), want)
    assert torch.equal(gate(x.double()), gate(x.double()))
    assert len(gate.known) == 2  # by shape and dtype


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.tensor([[1.0, math.nan]]), "site saw NaN 1 times"),
        (torch.zeros(0, 2), "site saw nothing in calibration"),
    ],
)
def test_a_site_that_computes_no_numbers_is_refused(x, said):
    with pytest.raises(ValueError, match=said):
        gate_of(tg.TAXONOMY["silu"], x, Chip(WEAK, NONE.of(WEAK)))


def test_volts_that_put_inputs_beyond_the_rails_are_refused_with_what_would_work():
    gate = AnalogGate("site", "relu", tg.TAXONOMY["relu"], Chip(WEAK, NONE.of(WEAK), rail=0.9))
    gate.watching = True
    gate(torch.full((2, 2), 3.0))
    with pytest.raises(ValueError, match=r"3 V RMS, beyond the rail of 0.9 V; up to 0.3 V"):
        gate.settle(1.0)


def test_a_site_without_inputs_is_refused():
    with pytest.raises(ValueError, match="saw nothing but zeros"):
        gate_of(tg.TAXONOMY["relu"], torch.zeros(2, 2), Chip(WEAK, NONE.of(WEAK)))
