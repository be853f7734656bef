"""Softmax, attention, GLU and recurrent layers on pairs: ideal ones are torch's, trees have errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating.hardware import devices
from threshold_gating.hardware.drawn import stacked
from threshold_gating.hardware.physical import AnalogGate, Chip, Errors
from threshold_gating.hardware.wholes import KeyGates, whole

IDEAL = Chip(None, Errors(unit="rms").of(None))
LOGITS = torch.linspace(-2, 2, 96).sin().mul(5).view(2, 6, 8)


def ready(module, *args, seed=0, **kwargs):
    """The module, calibrated on these arguments, on the first chip."""
    gates = [m for m in module.modules() if isinstance(m, AnalogGate)]
    for gate in gates:
        gate.watching = True
    module(*args, **kwargs)
    for gate in gates:
        gate.watching = False
        gate.settle()
        gate.draw(seed, 1)
        for name, value in list(stacked(gate).items()):
            key = name.removeprefix("devices.")
            delattr(gate.devices, key)
            gate.devices.put(key, value.detach()[0])
    return module


QUERY = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))


def causal(bias=False):
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    return torch.where(mask, 0.0, -math.inf) if bias else mask


CALLS = {
    "softmax": (torch.softmax, (LOGITS, -1), {}),
    "softmax along 1": (torch.softmax, (LOGITS, 1), {}),
    "softmin": (F.softmin, (LOGITS,), {"dim": -1}),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, tuple(QUERY), {}),
    "scaled_dot_product_attention causal": (
        F.scaled_dot_product_attention,
        tuple(QUERY),
        {"is_causal": True},
    ),
    "scaled_dot_product_attention masked": (
        F.scaled_dot_product_attention,
        tuple(QUERY),
        {"attn_mask": causal(bias=True), "scale": 0.5},
    ),
    "scaled_dot_product_attention gqa": (
        F.scaled_dot_product_attention,
        (QUERY[0], QUERY[1, :, :2], QUERY[2, :, :2]),
        {"enable_gqa": True},
    ),
    "glu": (F.glu, (LOGITS,), {"dim": 1}),
    "prelu": (F.prelu, (LOGITS, torch.full((6,), 0.3)), {}),
    "maximum": (torch.maximum, (LOGITS, LOGITS.flip(-1)), {}),
    "minimum": (torch.minimum, (LOGITS, LOGITS.flip(-1)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_ideal_gates_are_torchs_function(name):
    function, args, kwargs = CALLS[name]
    module = ready(whole("site", name.split()[0], IDEAL, nn.Identity()), *args, **kwargs)
    torch.testing.assert_close(
        module(*args, **kwargs), function(*args, **kwargs), rtol=5e-6, atol=2e-6
    )


@pytest.mark.parametrize("celsius", [-40.0, 125.0])
def test_heat_is_a_temperature_of_the_softmax_and_rows_still_sum_to_one(celsius):
    """The tree is as warm as the gates; the bipolar pair has the logistic curve."""
    npn = devices.preset("sky130-npn")
    none = Errors(theta=0.0, tau=0.0, noise=0.0, tree=0.0)
    chip = Chip(npn, none, temperature=celsius, rail=1e3)
    module = ready(whole("site", "softmax", chip, nn.Identity()), LOGITS, -1)
    want = torch.softmax(npn.tau_at(celsius) / npn.tau * LOGITS.double(), -1)
    torch.testing.assert_close(module(LOGITS.double(), -1), want, rtol=1e-12, atol=0)


def test_a_row_with_nan_is_nan_and_the_others_are_not():
    """One NaN, several, and all but one: as torch has it."""
    module = ready(whole("site", "softmax", IDEAL, nn.Identity()), LOGITS, -1)
    z = LOGITS.clone()
    z[0, 0, 3], z[0, 2, :4], z[1, 1, 1:] = math.nan, math.nan, math.nan
    want = torch.softmax(z, -1)
    assert torch.equal(module(z, -1).isnan(), want.isnan())


def test_a_single_key_has_an_open_gate_and_a_masked_one_a_closed_one():
    z = torch.tensor([[0.3, -math.inf, -math.inf]])
    module = ready(whole("site", "softmax", IDEAL, nn.Identity()), z, -1)
    assert module(z, -1).tolist() == [[1.0, 0.0, 0.0]]


def test_only_comparisons_are_seen_in_calibration():
    """Not masked keys, and not the one key of the first row."""
    q = torch.randn(1, 1, 3, 4)
    module = ready(
        whole("site", "scaled_dot_product_attention", IDEAL, nn.Identity()), q, q, q, is_causal=True
    )
    z = (q @ q.mT)[0, 0] / 2
    u = [z[1, 0] - z[1, 1], z[1, 1] - z[1, 0]]
    u += [z[2, k] - torch.cat([z[2, :k], z[2, k + 1 :]]).logsumexp(0) for k in range(3)]
    seen = module.gates.seen
    assert seen.count == 5
    assert seen.rms == pytest.approx(torch.stack(u).square().mean().sqrt().item(), rel=1e-5)


def test_rows_may_be_shorter_than_those_seen_and_not_longer():
    module = ready(whole("site", "softmax", IDEAL, nn.Identity()), LOGITS, -1)
    torch.testing.assert_close(module(LOGITS[..., :3], -1), LOGITS[..., :3].softmax(-1))
    noisy = Chip(None, Errors(theta=0.1, unit="rms").of(None))
    module = ready(whole("site", "softmax", noisy, nn.Identity()), LOGITS, -1)
    with pytest.raises(ValueError, match="16; simulate with inputs of the longest rows"):
        module(torch.zeros(2, 16), -1)


@pytest.mark.parametrize("share", ["layer", "channel", "neuron"])
@pytest.mark.parametrize("keys", [9, 20])
def test_a_tree_is_not_longer_than_it_was_made(share, keys):
    chip = Chip(None, Errors(tree=0.1, unit="rms").of(None), share)
    module = ready(whole("site", "softmax", chip, nn.Identity()), LOGITS, -1)
    assert module(LOGITS[..., :5], -1).shape == (2, 6, 5)
    with pytest.raises(ValueError, match=f"tree for 8 keys and is given {keys}; simulate with"):
        module(torch.zeros(2, 6, keys), -1)


def test_one_gate_for_all_keys_without_a_tree_takes_any_row():
    chip = Chip(None, Errors(theta=0.1, unit="rms").of(None), "layer")
    module = ready(whole("site", "softmax", chip, nn.Identity()), LOGITS, -1)
    assert module(torch.zeros(2, 6, 20), -1).shape == (2, 6, 20)


def test_an_error_of_a_cell_of_the_tree_reaches_the_thresholds_by_its_share():
    """Two keys have no cell; of four equal ones each threshold has two cells, 1/3 and 2/3 beneath
    the lower: theta_1 = LSE(z_2, LSE(z_3, z_4) + e_1) + e_2."""
    chip = Chip(None, Errors(tree=0.01, unit="rms").of(None))
    z = torch.zeros(1, 4)
    z[0, 0] = 1e-3  # an RMS is asked for
    gates = KeyGates("site", "softmax", chip)
    gates.watching = True
    gates.softmax(z)
    gates.watching = False
    gates.settle()
    gates.draw(0, 4000)  # all at once: numbers of all chips broadcast against the row
    sigma = (gates._thresholds(z) / gates.seen.rms).std(0)
    want = 0.01 * math.sqrt(1 + (2 / 3) ** 2)
    assert sigma.tolist() == pytest.approx([want] * 4, rel=0.05)  # 4,000 draws: 1.1 %


@pytest.mark.parametrize(
    "kind", ["lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell", "rnn_relu_cell"]
)
def test_ideal_gates_of_a_recurrent_layer_are_torchs(kind):
    torch.manual_seed(0)
    cell = kind.endswith("_cell")
    if cell:
        make = {"lstm_cell": nn.LSTMCell, "gru_cell": nn.GRUCell}.get(kind)
        layer = nn.RNNCell(3, 4, nonlinearity="relu") if make is None else make(3, 4)
        x = torch.randn(5, 3)
    else:
        make = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}[kind]
        layer, x = make(3, 4, 2, bidirectional=True), torch.randn(6, 5, 3)
    module, calls = whole("site", kind, IDEAL, layer), []
    name = getattr(torch, kind)

    class Ask(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is name:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    with Ask():
        want = layer(x)
    module = ready(module, *calls[0])
    got = module(*calls[0])
    want = (
        torch.cat([want[0].flatten(), *(w.flatten() for w in want[1:] if torch.is_tensor(w))])
        if isinstance(want, tuple)
        else want
    )
    first = got[0] if isinstance(got, tuple) else got
    torch.testing.assert_close(first.flatten(), want.flatten()[: first.numel()])
    names = [g.name for g in module.modules() if isinstance(g, AnalogGate)]
    assert len(names) == len(set(names)) == {"l": 5, "g": 3, "r": 1}[kind[0]] * (1 if cell else 4)
    assert all(g.group == (4,) for g in module.modules() if isinstance(g, AnalogGate))


def test_what_is_not_known_in_analog_is_not_answered():
    assert whole("site", "clamp_by_tensors", IDEAL, nn.Identity()) is None
    assert whole("site", "lstm", IDEAL, nn.Identity()) is None  # a call of torch.lstm by hand
