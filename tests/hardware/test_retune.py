"""Trims of tau and theta: what they cancel, what they learn, what they cost."""

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.hardware.analog import simulate
from threshold_gating.hardware.physical import Errors
from threshold_gating.hardware.retune import cancel, divergence, retune, storage


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(64, 4)
    return tg.convert(model, inputs=x), x


def error(chips, gated, x):
    return torch.tensor([row.error for row in chips.compare(gated, x)])


def test_errors_that_are_cancelled_are_gone_and_bits_halve_what_is_left():
    gated, x = network()
    given = {"inputs": x, "draws": 4, "errors": Errors(theta=0.2, tau=0.1, unit="rms")}
    plain = error(simulate(gated, None, **given), gated, x)
    left = {}
    for bits in (None, 3, 4, 6):
        chips = simulate(gated, None, **given)
        cancel(chips, bits, span=5.0)
        left[bits] = error(chips, gated, x)
    assert left[None].max() < 1e-5
    assert (left[6] < left[4]).all()
    assert left[3].mean() < 0.7 * plain.mean()
    # a code is +-span / 2^bits wide, so its error falls by 4 for two bits; over 4 chips by 2 to 8
    assert 2 < (left[4].mean() / left[6].mean()).item() < 8


def test_thresholds_of_a_hard_gate_are_cancelled_in_volts():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(64, 4)
    gated = tg.convert(model, inputs=x)
    ideal = simulate(gated, "sky130-weak", inputs=x, errors=Errors(theta=0.0, tau=0.0, noise=0.0))
    chips = simulate(gated, "sky130-weak", inputs=x, errors=Errors(noise=0.0))
    with torch.no_grad():
        off = (chips(x) - ideal(x)).abs().max()
        cancel(chips, span=10.0)
        assert (chips(x) - ideal(x)).abs().max() < 1e-4 * off


def test_tuning_brings_every_chip_nearer_and_moves_nothing_but_trims():
    gated, x = network()
    chips = simulate(
        gated, None, inputs=x, draws=3, errors=Errors(theta=0.3, offset=0.2, unit="rms")
    )
    weights = {n: p.clone() for n, p in chips.body.network.named_parameters() if "trim" not in n}
    before = error(chips, gated, x)
    losses = retune(chips, gated, [x[:32], x[32:]], steps=60)
    after = error(chips, gated, x)
    assert (after < 0.6 * before).all()
    assert losses[-1] < 0.5 * losses[0]
    now = dict(chips.body.network.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in weights.items())
    assert not any(p.requires_grad for n, p in now.items() if "trim" in n)


def test_tuning_one_of_the_two_leaves_the_other():
    gated, x = network()
    chips = simulate(gated, None, inputs=x, errors=Errors(theta=0.3, unit="rms"))
    retune(chips, gated, [x], steps=3, what=("theta",), loss=divergence)
    gates = list(chips.body.gates())
    assert all(not gate.devices.trim_tau.any() for gate in gates)
    assert all(gate.devices.trim_theta.any() for gate in gates)


def test_storage_counts_two_numbers_for_each_threshold():
    gated, x = network()
    by = {s: storage(simulate(gated, None, inputs=x, share=s), 6) for s in ("layer", "channel")}
    assert by["layer"] == (2, 4, 24)
    assert by["channel"] == (16, 32, 192)


@pytest.mark.parametrize("bits", [0, 25])
def test_bits_that_no_converter_has_are_refused(bits):
    gated, x = network()
    with pytest.raises(ValueError, match="bits must be from 1 to 24"):
        cancel(simulate(gated, None, inputs=x), bits)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 0}, "steps is a whole number from 1 on; got 0"),
        ({"rate": -1.0}, "rate is above 0; got -1.0"),
        ({"batches": []}, "there are no batches"),
        ({"batches": [torch.full((2, 4), torch.nan)]}, "the loss of step 0 is nan"),
    ],
)
def test_what_cannot_be_tuned_is_refused(given, said):
    gated, x = network()
    chips = simulate(gated, None, inputs=x)
    with pytest.raises(ValueError, match=said):
        retune(chips, gated, **{"batches": [x], "steps": 2, **given})


def test_chips_that_are_tuned_together_are_those_tuned_one_by_one():
    gated, x = network()
    given = {"inputs": x, "draws": 3, "errors": Errors(offset=0.2, unit="rms")}
    found = []
    for together in (False, True):
        chips = simulate(gated, None, **given)
        losses = retune(chips, gated, [x], steps=4, together=together)
        found.append((torch.tensor(losses), error(chips, gated, x)))
    # the sums of two orders, through four steps of Adam
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [0, -1, 2.5, True])
def test_storage_is_of_whole_bits(bits):
    gated, x = network()
    with pytest.raises(ValueError, match="bits is a whole number from 1 on"):
        storage(simulate(gated, None, inputs=x), bits)


def test_what_is_tuned_is_tau_or_theta():
    gated, x = network()
    with pytest.raises(ValueError, match="some of tau, theta"):
        retune(simulate(gated, None, inputs=x), gated, [x], steps=1, what=("c",))
