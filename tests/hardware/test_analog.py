"""Whole networks on simulated chips: ideal ones are the network, chips are what their seed says."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import threshold_gating as tg
from threshold_gating.conversion.plan import ConversionError
from threshold_gating.hardware import devices
from threshold_gating.hardware.analog import simulate
from threshold_gating.hardware.crossbar import Crossbar
from threshold_gating.hardware.drawn import normal, stacked
from threshold_gating.hardware.physical import Errors
from threshold_gating.hardware.retune import retune

IDEAL = Errors(unit="rms")
WEAK = devices.preset("sky130-weak")


class Net(nn.Module):
    """A module used twice with two widths, in place; calls; an LSTM; both kinds of attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.relu = nn.SiLU(), nn.ReLU(inplace=True)
        self.lin, self.lstm = nn.Linear(8, 16), nn.LSTM(16, 6, bidirectional=True, batch_first=True)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        x = self.relu(self.act(self.norm(self.conv(x))) - 0.1)
        x, _ = self.lstm(F.gelu(self.lin(x.flatten(2).mT)))
        x, _ = self.attention(x, x, x)
        x = self.relu(x)[:, None]
        x = F.scaled_dot_product_attention(x, x, x)[:, 0]
        return self.head(torch.maximum(x, x.flip(-1)).mean(1)).softmax(-1)


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 4, 3)
    return model, tg.convert(model, inputs=x, strict=False), x


def small(width=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, 3), nn.ReLU())
    x = torch.randn(16, 4)
    return model, tg.convert(model, inputs=x), x


def test_an_ideal_network_in_tiles_is_the_network(case):
    _, gated, x = case
    chips = simulate(gated, None, inputs=x, draws=2, errors=IDEAL, crossbar=Crossbar(rows=8))
    with torch.no_grad():
        y, want = chips(x), gated(x)
    assert y.shape == (2, *want.shape)
    assert ((y - want).abs().max() / want.abs().max()).item() <= 2e-6
    names = {row.name for row in chips.report().sites}
    assert {"act", "relu", "relu#1", ":gelu#0", "lstm:lstm#0/cell_1", ":maximum#0"} <= names
    assert chips.report().ideal == ()
    assert "lstm.weight_ih_l0" in chips.report().digital


def test_all_chips_at_once_are_the_chips_one_by_one(case):
    _, gated, x = case
    cells = Crossbar(rows=9, programming=0.02, adc_bits=8)
    given = {"inputs": x, "draws": 2, "errors": Errors(noise=0.0), "crossbar": cells}
    chips = simulate(gated, "sky130-weak", 3, **given)
    with torch.no_grad():
        y = chips(x)
        each = [chips.chip(k)(x) for k in range(2)]
    assert chips.runs_by.startswith("vmap")
    torch.testing.assert_close(y, torch.stack(each), rtol=1e-5, atol=1e-6)
    assert (y[0] - y[1]).abs().max() > 1e-4


def test_a_chip_is_what_its_seed_and_number_say():
    _, gated, x = small()

    def run(seed, draws, only=None):
        return simulate(
            gated, "sky130-weak", seed, inputs=x, draws=draws, only=only, errors=Errors(noise=0.0)
        )

    two, five = run(1, 2), run(1, 5)
    with torch.no_grad():
        assert torch.equal(two(x), five(x)[:2])
        assert not torch.equal(two(x), run(2, 2)(x))
        two.redraw(2)
        assert torch.equal(two(x), run(2, 2)(x))
    theta = run(1, 2).body.network[1].gates[0].devices.theta
    assert torch.equal(theta, run(1, 2, only="1").body.network[1].gates[0].devices.theta)


def test_the_network_that_was_given_stays_as_it_was():
    _, gated, x = small()
    state, want = copy.deepcopy(gated.state_dict()), gated(x)
    simulate(gated, "sky130-weak", inputs=x, crossbar=Crossbar(programming=0.1))
    assert torch.equal(gated(x), want)
    assert all(torch.equal(state[k], v) for k, v in gated.state_dict().items())


def test_what_volts_are_is_reported_for_every_site():
    _, gated, x = small()
    weak = devices.preset("sky130-weak")
    soft, hard = simulate(gated, "sky130-weak", inputs=x, share="neuron").report().sites
    with torch.no_grad():
        seen = gated[0](x), gated[2](gated[1](gated[0](x)))
    assert (soft.name, soft.kind, soft.K, soft.gates) == ("1", "silu", 2, 6)
    assert soft.rms == pytest.approx(seen[0].square().mean().sqrt().item(), rel=1e-5)
    assert soft.volts == pytest.approx(1 / weak.tau)
    assert soft.sigma_theta * soft.rms == pytest.approx(weak.sigma_theta * weak.tau)
    assert hard.volts == pytest.approx(weak.swing / seen[1].abs().max().item(), rel=1e-5)
    assert hard.largest_millivolts == pytest.approx(1e3 * weak.swing)
    assert hard.sharpness == pytest.approx(weak.tau * hard.volts * hard.rms)
    chosen = simulate(gated, "sky130-weak", inputs=x, volts={"3": 0.01}).report().sites
    assert [row.volts for row in chosen] == pytest.approx([1 / weak.tau, 0.01])


def test_an_input_at_the_rail_is_not_beyond_it():
    """Whatever the largest input is: level / largest * largest may round up."""
    model, x = (
        nn.Sequential(nn.ReLU()),
        torch.randn(64, 1, generator=torch.Generator().manual_seed(0)),
    )
    for scale in range(1, 20):
        given = x * scale / 7
        gated = tg.convert(model, inputs=given)
        chips = simulate(gated, "sky130-weak", inputs=given, level=WEAK.supply / 2)
        assert not chips.report().sites[0].clipped


def test_a_table_is_at_most_100_columns_wide(case):
    _, gated, x = case
    report = simulate(gated, "sky130-npn", inputs=x, crossbar=Crossbar(adc_bits=6)).report()
    lines = report.table().splitlines()
    assert max(map(len, lines[: len(report.sites) + len(report.layers) + 3])) <= 100
    assert lines[0].split()[:4] == ["site", "kind", "K", "gates"]
    assert any(line.startswith("digital: ") for line in lines)


def test_only_some_sites_are_analog():
    _, gated, x = small()
    chips = simulate(gated, None, inputs=x, only="3", errors=Errors(offset=0.2, unit="rms"))
    assert [row.name for row in chips.report().sites] == ["3"]
    assert chips.report().chosen_ideal == ("1",)
    with pytest.raises(ValueError, match=r"only='7' matches no site; there are '1', '3'"):
        simulate(gated, None, inputs=x, only="7")


def test_calls_of_one_module_have_gates_of_their_own_unless_they_are_reused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.one = nn.ReLU(), nn.Linear(4, 4)

        def forward(self, x):
            return self.relu(self.one(self.relu(x)))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(5, 4)
    gated, errors = tg.convert(model, inputs=x), Errors(theta=0.5, unit="rms")
    apart = simulate(gated, None, inputs=x, errors=errors)
    assert [row.name for row in apart.report().sites] == ["relu", "relu#1"]
    first, second = apart.body.network.relu.gates
    assert not torch.equal(first.devices.theta, second.devices.theta)
    reused = simulate(gated, None, inputs=x, errors=errors, reuse=True)
    assert [row.name for row in reused.report().sites] == ["relu"]
    reused(x)


def test_gradients_reach_the_weights_and_training_with_noise_helps():
    model, gated, x = small(12)
    want = model(x).detach()
    errors = Errors(tail=0.2, theta=0.3, unit="rms")
    chips = simulate(gated, None, inputs=x, draws=8, errors=errors)

    def error(seed):
        chips.redraw(seed)
        with torch.no_grad():
            return (chips(x) - want).square().mean().item()

    before = sum(error(seed) for seed in range(1000, 1005))
    weights = [p for n, p in chips.body.network.named_parameters() if "trim" not in n]
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    for seed in range(60):
        chips.redraw(seed)
        optimizer.zero_grad()
        (chips(x) - want).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in weights)
    after = sum(error(seed) for seed in range(1000, 1005))
    assert after < 0.9 * before  # on chips that were not trained on


def test_networks_that_write_in_place_run_at_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    x = torch.randn(6, 4)
    chips = simulate(
        tg.convert(model, inputs=x), "sky130-npn", inputs=x, draws=3, errors=Errors(noise=0.0)
    )
    with torch.no_grad():
        y = chips(x)
        assert chips.runs_by == "vmap, inputs repeated"
        torch.testing.assert_close(y, torch.stack([chips.chip(k)(x) for k in range(3)]))


def test_a_network_that_decides_by_its_values_runs_chip_by_chip():
    class Deciding(nn.Module):
        def forward(self, x):
            y = F.silu(x)
            return y if y.sum() > -1e9 else -y

    x = torch.randn(3, 4)
    chips = simulate(tg.convert(Deciding(), inputs=x), "sky130-weak", inputs=x, draws=2)
    assert chips(x).shape == (2, 3, 4)
    assert chips.runs_by == "loop"
    assert chips.why_no_vmap


def test_gradients_reach_the_inputs_from_the_first_run_on():
    _, gated, x = small()
    for draws in (1, 3):
        chips = simulate(gated, "sky130-weak", inputs=x, draws=draws)
        given = x.clone().requires_grad_()
        chips(given).sum().backward()
        assert given.grad.abs().sum() > 0


def test_a_layer_that_has_gates_of_its_own_stays_ideal():
    model, x = nn.Sequential(nn.Tanh(), tg.Linear(4, 4), nn.SiLU()), torch.randn(3, 4)
    gated = tg.convert(model, inputs=x)
    with pytest.warns(UserWarning, match=r"stays ideal: 1 \(Linear\)"):
        chips = simulate(gated, "sky130-weak", inputs=x)
    assert [row.name for row in chips.report().sites] == ["0", "2"]


def test_attention_with_fixed_thresholds_is_not_taken_for_softmax():
    class Fixed(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 5, 4)
    fixed = tg.conversion.fixed_thresholds(Fixed(), [q])
    with pytest.raises(ValueError, match="no site of the network can be analog"):
        simulate(fixed, "sky130-weak", inputs=q)


def test_measure_and_compare_go_chip_by_chip():
    _, gated, x = small()
    chips = simulate(gated, "sky130-weak", inputs=x, draws=3, errors=Errors(noise=0.0))
    rows = chips.compare(gated, x)
    with torch.no_grad():
        want = gated(x)
        errors = ((chips(x) - want).square().mean((1, 2)) / want.square().mean()).sqrt()
        largest = chips.measure(lambda chip: chip(x).max().item())
    assert [row.error for row in rows] == pytest.approx(errors.tolist(), rel=1e-4)
    torch.testing.assert_close(largest, chips(x).amax((1, 2)).detach())
    with pytest.raises(IndexError, match="chips 0 to 2; got 3"):
        chips.chip(3)


def test_copies_and_pickles_are_the_same_chips():
    _, gated, x = small()
    chips = simulate(gated, "sky130-weak", inputs=x, draws=2, errors=Errors(noise=0.0))
    with torch.no_grad():
        want = chips(x)
        assert torch.equal(copy.deepcopy(chips)(x), want)
        assert torch.equal(pickle.loads(pickle.dumps(chips))(x), want)


def test_what_cannot_be_analog_is_said():
    class Bounded(nn.Module):
        def forward(self, x):
            return F.relu(x).clamp(max=x.mean(-1, keepdim=True))

    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"stays ideal: :clamp_by_tensors#0"):
        chips = simulate(tg.convert(Bounded(), inputs=x), "sky130-weak", inputs=x)
    assert chips.report().ideal == (":clamp_by_tensors#0 (clamp_by_tensors)",)
    assert "stays ideal: :clamp_by_tensors#0" in chips.report().table()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "sky130-week"}, "no preset 'sky130-week'; did you mean 'sky130-weak'"),
        ({"rail": 0.01}, f"rail 0.01 V .* it must be from {WEAK.swing:g} to {WEAK.supply:g} V"),
        ({"rail": 50.0}, f"to {WEAK.supply:g} V"),
        ({"temperature": 900.0}, f"measured from {WEAK.temperature[0][0]:g} to"),
        ({"level": 15.0}, f"level must be .* up to the rail, {WEAK.supply / 2:g} V; got 15"),
        ({"level": 0.4, "sharpness": 4.0}, "give one"),
        ({"sharpness": -1.0}, "above 0; got -1.0"),
        ({"draws": 0}, "from 1 on; got 0"),
        ({"share": "net"}, "share is one of layer, channel, neuron"),
        ({"volts": {"nothing": 1.0}}, "'nothing', which is no site"),
        ({"preset": None, "errors": Errors(theta=0.01)}, "without a preset there are no volts"),
        ({"preset": None, "rail": 0.5}, "level, rail and temperature are of a preset"),
        ({"preset": None, "volts": {"*": 0.1}}, "volts are of a preset"),
        ({"sharpness": 1000.0}, f"sky130-weak is as sharp as {WEAK.tau * WEAK.supply / 2:.3g}"),
        ({"preset": replace(WEAK, tau=-1.0)}, "tau is above 0; got -1.0"),
        ({"preset": replace(WEAK, tau=500.0)}, "no pair is sharper than q / kT, 38.7 /V"),
        ({"preset": replace(WEAK, swing=5.0)}, "a swing of 5 V does not fit a supply of 1.8 V"),
        ({"preset": replace(WEAK, temperature=())}, "at two temperatures or more"),
        *(({"seed": seed}, "seed is a whole number") for seed in (None, 1.5, "a", True, 2**63)),
    ],
)
def test_what_no_chip_can_be_is_refused_with_what_would_work(given, said):
    _, gated, x = small()
    with pytest.raises(ValueError, match=said):
        simulate(gated, **{"preset": "sky130-weak", "inputs": x, **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"errors": {"theta": 0.1}}, "errors must be Errors or None; got dict"),
        ({"crossbar": {"rows": 8}}, "crossbar must be Crossbar or None; got dict"),
        ({"volts": 0.1}, "volts must be Mapping or None; got float"),
        ({"rail": "0.5"}, "rail is a number; got '0.5'"),
        ({"level": True}, "level is a number; got True"),
        ({"preset": 3}, "a name, a Preset or None; got int"),
    ],
)
def test_what_is_of_another_kind_is_refused(given, said):
    _, gated, x = small()
    with pytest.raises(TypeError, match=said):
        simulate(gated, **{"preset": "sky130-weak", "inputs": x, **given})


def test_a_state_dict_brings_its_chips_along():
    _, gated, x = small()
    given = {"inputs": x, "errors": Errors(noise=0.0), "crossbar": Crossbar(programming=0.02)}
    chips = simulate(gated, "sky130-weak", seed=3, draws=2, **given)
    for gate in chips.body.gates():
        gate.devices.trim_theta.data.add_(0.1)
    others = simulate(gated, "sky130-weak", seed=4, draws=2, **given)
    others.load_state_dict(chips.state_dict())
    with torch.no_grad():
        assert torch.equal(others(x), chips(x))
    with pytest.raises(ValueError, match="the state is of 2 chips, this simulation has 3"):
        simulate(gated, "sky130-weak", draws=3, **given).load_state_dict(chips.state_dict())


def test_a_chip_is_the_same_in_another_process():
    """Numbers that were drawn once, so that what changes them is noticed."""
    found = normal(7, "layer1.0.act/theta", 2, (3,))
    want = [[-0.21753046, 1.10724342, -0.64988506], [-0.03830841, 1.43949258, -0.29368132]]
    torch.testing.assert_close(found, torch.tensor(want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_chips_of_another_dtype_are_the_same_chips(dtype):
    """Within what the weights are rounded by: gates and cells are evaluated in float32 or more."""
    model, gated, x = small()
    given = {"draws": 2, "errors": Errors(noise=0.0), "crossbar": Crossbar(rows=2)}
    want = simulate(gated, "sky130-weak", inputs=x, **given)(x)
    other = tg.convert(copy.deepcopy(model).to(dtype), inputs=x.to(dtype))
    chips = simulate(other, "sky130-weak", inputs=x.to(dtype), **given)
    y = chips(x.to(dtype))
    assert y.dtype == dtype
    # four roundings one after the other; the volts of a hard gate follow the rounded inputs
    close = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert (y - want).abs().max() < close * want.abs().max()


def test_chips_are_not_simulated_again():
    _, gated, x = small()
    chips = simulate(gated, "sky130-weak", inputs=x)
    for again in (chips, chips.body.network):
        with pytest.raises(
            tg.conversion.ConversionError, match="has the gates of hardware already"
        ):
            simulate(again, "sky130-weak", inputs=x)


def test_devices_stay_what_they_are_when_the_network_is_cast():
    _, gated, x = small()
    chips = simulate(gated, "sky130-weak", inputs=x, crossbar=Crossbar(programming=0.1))
    before = {name: t.clone() for name, t in stacked(chips.body).items()}
    cast = chips.half()
    assert cast.body.network[0].weight.dtype == torch.float16
    after = stacked(cast.body)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())


def test_a_simulation_that_is_compiled_runs_as_it_is():
    _, gated, x = small()
    chips = simulate(gated, "sky130-weak", inputs=x, draws=2, errors=Errors(noise=0.0))
    assert torch.equal(torch.compile(chips, backend="eager")(x), chips(x))


def test_a_network_without_gates_or_without_known_calls_is_refused():
    model, _, x = small()
    with pytest.raises(ValueError, match=r"has no gates; give tg.convert\(model, inputs=...\)"):
        simulate(model, "sky130-weak", inputs=x)
    with pytest.raises(ValueError, match="converted without inputs"):
        simulate(tg.convert(model), "sky130-weak", inputs=x)


def test_another_size_of_input_is_refused():
    _, gated, x = small()
    chips = simulate(gated, "sky130-weak", inputs=x[:, None].expand(16, 2, 4), share="neuron")
    with pytest.raises(ValueError, match="physical gates"):
        chips(x[:, None].expand(16, 3, 4))


def test_gates_are_evaluated_whatever_the_backend(case):
    _, gated, x = case
    chips = simulate(gated, "sky130-npn", inputs=x, errors=Errors(noise=0.0))
    with torch.no_grad():
        want = chips(x)
        with tg.kernels.use("reference"):
            torch.testing.assert_close(chips(x), want, rtol=1e-5, atol=1e-6)
    assert math.isfinite(want.sum().item())


def test_layers_run_on_aihwkit_lightning_and_gates_here():
    pytest.importorskip("aihwkit_lightning")
    from aihwkit_lightning.simulator.configs import TorchInferenceRPUConfig

    from threshold_gating.hardware.lightning import put_on_lightning

    _, gated, x = small()
    config = TorchInferenceRPUConfig()
    chips = simulate(gated, None, inputs=x, draws=2, errors=IDEAL)
    assert put_on_lightning(chips, config) == ["0", "2"]
    with torch.no_grad():
        torch.testing.assert_close(chips(x)[1], gated(x))
    config.forward.inp_res, config.pre_post.input_range.enable = 14, True
    coarse = simulate(gated, None, inputs=x, errors=IDEAL)
    put_on_lightning(coarse, config)
    with torch.no_grad():
        apart = (coarse(x)[0] - gated(x)).abs().max().item()
    assert 1e-3 < apart < 0.5
    with pytest.raises(ValueError, match="on crossbars; simulate without crossbar="):
        put_on_lightning(simulate(gated, None, inputs=x, crossbar=Crossbar()), config)


def with_modes():
    """A network that is in training, whose modules compute something else then."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    )
    x = torch.randn(32, 8)
    return tg.convert(model, inputs=x), x


def test_chips_are_compared_as_in_evaluation_and_stay_as_they_were():
    gated, x = with_modes()
    chips = simulate(gated, None, inputs=x, draws=2)
    state = copy.deepcopy(chips.state_dict())
    assert max(row.error for row in chips.compare(gated, x)) <= 1e-6
    assert chips.body.network[1].training
    assert all(torch.equal(state[k], v) for k, v in chips.state_dict().items())


@pytest.mark.parametrize("together", [False, True])
def test_retune_changes_nothing_but_trims(together):
    gated, x = with_modes()
    chips = simulate(gated, None, inputs=x, draws=2, errors=Errors(theta=0.3, unit="rms"))
    before = [copy.deepcopy(m.state_dict()) for m in (chips, gated)]
    retune(chips, gated, [x], steps=3, together=together)
    for module, state in zip((chips, gated), before, strict=True):
        now = module.state_dict()
        assert all(torch.equal(v, now[k]) for k, v in state.items() if "trim" not in k)
        assert all(m.training for m in module.modules() if isinstance(m, nn.Dropout))
    assert chips.body.network[2].gates[0].devices.trim_theta.abs().max() > 0


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.a = nn.Linear(8, 8), nn.SiLU()

    def forward(self, x):
        with torch.no_grad():
            h = self.a(self.l(x))
        return self.a(self.l(h + x))


def test_a_first_call_without_gradients_leaves_the_others_theirs():
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    gated = tg.convert(Twice(), inputs=x)
    errors = Errors(theta=0.3, unit="rms")
    chips = simulate(gated, None, inputs=x, errors=errors, reuse=True)
    losses = retune(chips, gated, [x], steps=20)
    assert losses[-1] < 0.7 * losses[0]


class OneFunction(Twice):
    def forward(self, x):
        return self.a(F.linear(x, self.l.weight))


class Functional(nn.Module):
    """A layer whose weight is read by a function, and an embedding tied to the head."""

    def __init__(self):
        super().__init__()
        self.emb, self.l, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(F.relu(F.linear(self.emb(x), self.l.weight, self.l.bias)))


def test_a_weight_that_a_function_reads_is_digital():
    x = torch.arange(9)
    gated = tg.convert(Functional(), inputs=x)
    chips = simulate(gated, None, inputs=x, crossbar=Crossbar(programming=0.3))
    assert [row.name for row in chips.report().layers] == ["head"]
    assert chips.report().digital == ("emb.weight", "l.weight")
    assert type(chips.body.network.l) is nn.Linear
    gated = tg.convert(OneFunction(), inputs=torch.randn(2, 8))
    with pytest.raises(ValueError, match="no layer for a crossbar is called"):
        simulate(gated, None, inputs=torch.randn(2, 8), crossbar=Crossbar())


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda m, x: m[2].weight.zero_(), "layer 2 had no column current"),
        (lambda m, x: x[0, :1].fill_(math.inf), "layer 0 saw inf or NaN"),
    ],
)
def test_converters_of_unknown_full_scale_are_refused(spoil, error):
    model, _, x = small()
    with torch.no_grad():
        spoil(model, x)
    gated = tg.convert(model, inputs=torch.randn(4, 4))
    cells = Crossbar(adc_bits=8)
    with pytest.raises(ValueError, match=error):
        simulate(gated, None, inputs=x, crossbar=cells, errors=IDEAL, only="1")
    # with a range the first is no riddle
    if math.isfinite(x.abs().max()):
        chips = simulate(gated, None, inputs=x, crossbar=replace(cells, adc_range=4.0), only="1")
        assert chips(x).isfinite().all()


def test_an_empty_batch_is_refused_in_a_line():
    _, gated, x = small()
    none = x[:0]
    with pytest.raises(ValueError, match="saw nothing in calibration"):
        simulate(gated, None, inputs=none, crossbar=Crossbar(adc_bits=8))
    with pytest.raises(ValueError, match="outputs are empty"):
        simulate(gated, None, inputs=x).compare(gated, none)


def test_volts_without_a_preset_are_refused_for_the_tree_too():
    _, gated, x = small()
    with pytest.raises(ValueError, match="without a preset there are no volts"):
        simulate(gated, None, inputs=x, errors=Errors(tree=0.1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.a = nn.Linear(8, 8), nn.SiLU()

    def forward(self, x):
        return checkpoint(lambda z: self.a(self.l(z)), x, use_reentrant=False)


@pytest.mark.parametrize("cells", [None, Crossbar(programming=0.1)])
@pytest.mark.parametrize("reuse", [False, True])
def test_gradient_checkpointing_is_refused_for_what_it_is(cells, reuse):
    x = torch.randn(4, 8, requires_grad=True)
    gated = tg.convert(Checkpointed(), inputs=x.detach())
    chips = simulate(gated, None, inputs=x.detach(), reuse=reuse, crossbar=cells)
    y = chips(x)
    with pytest.raises(ConversionError, match="chips cannot be checkpointed"):
        y.sum().backward()
