"""Crossbars: ideal ones are the layer, every effect has the size it is given."""

import copy
import math

import pytest
import torch
from torch import nn

from threshold_gating.hardware.crossbar import Crossbar
from threshold_gating.hardware.crossbar_layers import LAYERS, put_on_crossbar

torch.manual_seed(0)
CASES = {
    "linear": (nn.Linear(300, 40), torch.randn(2, 5, 300)),
    "conv1d circular same": (
        nn.Conv1d(6, 4, 5, padding="same", padding_mode="circular"),
        torch.randn(2, 6, 20),
    ),
    "conv2d strided dilated grouped": (
        nn.Conv2d(12, 24, 3, 2, 1, groups=4, dilation=2),
        torch.randn(2, 12, 17, 15),
    ),
    "conv2d depthwise": (nn.Conv2d(8, 8, 3, groups=8, bias=False), torch.randn(2, 8, 9, 9)),
    "conv3d without batch": (
        nn.Conv3d(3, 4, (2, 3, 3), padding=(0, 1, 1)),
        torch.randn(3, 5, 6, 7),
    ),
}


def on_crossbar(layer, x, settings, draws=1, seed=0):
    """A copy of the layer on crossbars, calibrated on x; its tensors are those of the first chip."""
    new = copy.deepcopy(layer)
    array = put_on_crossbar(new, "layer", settings)
    array.watching = True
    new(x)
    array.watching = False
    array.draw(seed, draws, new.weight.detach())
    for name, value in list(array.named_buffers()):
        setattr(array, name, value[0])
    return new


def relative(y, want):
    return ((y - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [None, 7, 128])
def test_ideal_cells_in_tiles_are_the_layer(name, rows):
    layer, x = CASES[name]
    new = on_crossbar(layer, x, Crossbar(rows=rows, columns=5, g_min=1e-6))
    assert relative(new(x), layer(x)) <= 2e-6
    height = layer.weight[0].numel()
    assert new.array.seen.tiles == (1 if rows is None else math.ceil(height / rows))


def test_float64_stays_float64_and_16_bits_come_back_as_they_were():
    layer, x = CASES["linear"]
    wide, settings = copy.deepcopy(layer).double(), Crossbar(rows=64)
    torch.testing.assert_close(
        on_crossbar(wide, x.double(), settings)(x.double()), wide(x.double())
    )
    narrow = on_crossbar(copy.deepcopy(layer).bfloat16(), x.bfloat16(), settings)
    assert narrow(x.bfloat16()).dtype == torch.bfloat16


def test_levels_put_conductances_on_a_grid():
    layer, x = CASES["linear"]
    new = on_crossbar(layer, x, Crossbar(levels=9))
    w, top = layer.weight, layer.weight.abs().amax(1, keepdim=True)
    want = torch.round(w / top * 8) / 8 * top  # the smaller cell of the pair is at g_min
    torch.testing.assert_close(new.array.weights(w), want)


def test_a_programming_error_is_that_of_two_cells_and_scales_with_the_range_of_conductance():
    layer, x = nn.Linear(400, 100), torch.randn(1, 400)
    new = on_crossbar(layer, x, Crossbar(programming=0.01, g_min=5e-6, g_max=25e-6))
    error = (new.array.weights(layer.weight) - layer.weight) / layer.weight.abs().amax(1, True)
    want = 0.01 * math.sqrt(2) * 25 / 20
    # 40,000 weights: the spread is known to 1/sqrt(80,000) = 0.35 %, its mean to sigma/200
    assert error.std().item() == pytest.approx(want, rel=0.015)
    assert abs(error.mean().item()) < 4 * want / 200


def test_no_cell_conducts_less_than_nothing_or_drifts_upwards():
    layer, x = nn.Linear(400, 100), torch.randn(1, 400)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    w = on_crossbar(layer, x, Crossbar(programming=0.05)).array.weights(layer.weight)
    # G+ is about g_max; of G-, meant to be 0, the errors below 0 are none: half of a normal is left.
    lost = 0.05 / math.sqrt(2 * math.pi)
    assert (1 - w).mean().item() == pytest.approx(lost, abs=4 * 0.06 / 200)  # four sigma
    later = Crossbar(drift_sigma=0.05, seconds=2e4, compensate=False)
    assert on_crossbar(layer, x, later).array.weights(layer.weight).max() <= 1.0


def test_drift_is_a_power_of_time_and_compensation_takes_it_back():
    layer, x = CASES["linear"]
    later = Crossbar(drift=0.05, seconds=2e4, compensate=False)
    w = layer.weight
    torch.testing.assert_close(on_crossbar(layer, x, later).array.weights(w), w * 1000**-0.05)
    back = Crossbar(drift=0.05, seconds=2e4)
    torch.testing.assert_close(on_crossbar(layer, x, back).array.weights(w), w)
    spread = on_crossbar(layer, x, Crossbar(drift=0.05, drift_sigma=0.02, seconds=2e4))
    ratio = (spread.array.weights(w) / w).log().std().item()
    # nu of the larger cell decides; below 0 it is cut, which 2.5 sigma makes rare
    assert ratio == pytest.approx(0.02 * math.log(1000), rel=0.05)


def test_stuck_cells_are_at_the_ends_of_the_range():
    layer = nn.Linear(300, 100)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    new = on_crossbar(layer, torch.randn(1, 300), Crossbar(stuck_low=0.03, stuck_high=0.02))
    w = new.array.weights(layer.weight)
    # G+ is at g_max and G- at g_min: only the other end shows. sigma of a share: 0.1 %
    assert (w == 0).double().mean().item() == pytest.approx(0.03 + 0.02 * 0.97, abs=0.004)
    stuck_both = 0.03 * 0.02
    assert (w < -0.4).double().mean().item() == pytest.approx(stuck_both, abs=0.0006)


def solved(g, v, wire):
    """Column currents of an array (rows, columns) with wires, by Kirchhoff's equations."""
    n, m = g.shape
    a, b = torch.zeros(2 * n * m, 2 * n * m, dtype=torch.float64), torch.zeros(2 * n * m).double()
    y = 1 / wire

    def join(p, q, conductance):
        a[p, p] += conductance
        a[q, q] += conductance
        a[p, q] -= conductance
        a[q, p] -= conductance

    for i in range(n):
        for j in range(m):
            row, column = i * m + j, n * m + i * m + j
            join(row, column, g[i, j])
            if j == 0:  # driven here
                a[row, row] += y
                b[row] += y * v[i]
            else:
                join(row, row - 1, y)
            if i == 0:  # sensed here, at 0 V
                a[column, column] += y
            else:
                join(column, column - m, y)
    volts = torch.linalg.solve(a, b)
    return y * volts[n * m : n * m + m]


@pytest.mark.parametrize("signs", [(1, 1, 1, 1, 1, 1), (-1, 1, 1, -1, -1, 1)], ids=str)
def test_the_drop_in_the_wires_is_kirchhoffs_to_first_order(signs):
    torch.manual_seed(1)
    rows, columns, g_max = 12, 6, 50e-6
    layer = nn.Linear(rows, columns, bias=False)
    sign = torch.tensor(signs)
    with torch.no_grad():
        # Of one sign in a column: its other cell is 0, and it has one wire.
        layer.weight.copy_(torch.rand(columns, rows) * sign[:, None])
    v = torch.rand(rows)
    off = {}
    for wire in (2.0, 20.0):
        settings = Crossbar(wire=wire, g_max=g_max, per_column=False)
        new = on_crossbar(layer, v[None], settings)
        top = layer.weight.abs().max()
        g = (layer.weight.abs() / top * g_max).T.double()
        want = sign * solved(g, v.double(), wire) / g_max * top
        plain, got = layer(v), new(v[None])[0]
        lost = ((plain - want) / plain).abs().max().item()
        off[wire] = ((got - want) / plain).abs().max().item()
        assert off[wire] < 2 * lost**2  # second order
        assert off[wire] < 0.2 * lost
    assert off[20.0] / off[2.0] == pytest.approx(100, rel=0.3)  # and grows like it


def test_wires_beyond_the_first_order_are_refused_with_what_would_work():
    with pytest.raises(ValueError, match=r"wires of 100 ohm a cell take .* wires up to \S+ ohm"):
        put_on_crossbar(nn.Linear(500, 500), "fc", Crossbar(wire=100.0))


def test_converters_round_and_clip():
    layer, x = CASES["linear"]
    new = on_crossbar(layer, x, Crossbar(dac_bits=5, rows=100, adc_bits=6))
    top = x.abs().max()
    v = torch.round((x / top).clamp(-1, 1) * 15) / 15 * top  # 2^5 - 1 codes
    limit = layer.weight.abs().amax(1)  # one current for all columns, each with its own w_max
    parts = [slice(k, k + 100) for k in (0, 100, 200)]
    sums = [x[..., rows] @ layer.weight[:, rows].T for rows in parts]
    full = max((each / limit).abs().max() for each in sums).detach() * limit
    want = layer.bias
    for part in range(3):
        rows = slice(100 * part, 100 * part + 100)
        partial = (v[..., rows] @ layer.weight[:, rows].T).clamp(-full, full)
        want = want + torch.round(partial / full * 31) / 31 * full
    torch.testing.assert_close(new(x), want, rtol=1e-5, atol=full.max().item() / 31 * 1e-4)
    clipped = new(3 * x)
    assert (clipped.abs() <= 3.001 * full + layer.bias.abs()).all()


@pytest.mark.parametrize(("g_min", "reach"), [(0.0, 2.0), (5e-6, 2.5)])
def test_the_range_of_a_converter_is_in_currents_of_one_cell(g_min, reach):
    """Currents of cells at g_max; a weight is the part of them above g_min."""
    layer, x = nn.Linear(8, 3, bias=False), torch.randn(40, 8)
    settings = Crossbar(adc_bits=4, adc_range=2.0, g_min=g_min, g_max=25e-6)
    y = on_crossbar(layer, x, settings)(x)
    full = reach * layer.weight.abs().amax(1) * x.abs().max()
    exact = layer(x) / full
    want = torch.round(exact.clamp(-1, 1) * 7) / 7 * full  # 2^4 - 1 codes
    between = (exact * 7).frac().abs()
    sure = (between - 0.5).abs() > 1e-4  # not on the edge of two codes
    assert sure.double().mean() > 0.99
    torch.testing.assert_close(y[sure], want[sure])


def test_bits_are_of_a_layer_where_a_dict_says_so():
    settings = Crossbar(adc_bits={"layer1.*": 6, "*": None, "head": 8})
    assert [settings.bits("adc", n) for n in ("layer1.0.conv", "head")] == [6, None]
    assert Crossbar(dac_bits=4).bits("dac", "head") == 4


def test_cells_conduct_as_sinh():
    layer, x = nn.Linear(5, 3, bias=False), torch.randn(4, 5)
    new = on_crossbar(layer, x, Crossbar(sinh=6.0, volts=0.3))
    top = x.abs().max().double()
    bent = torch.sinh(1.8 * x.double() / top) / 1.8 * top
    torch.testing.assert_close(new(x), (bent @ layer.weight.double().T).float())


@pytest.mark.parametrize("rows", [None, 16])
def test_noise_of_reading_and_of_the_output_has_the_size_that_was_asked(rows):
    torch.manual_seed(2)
    layer, x = nn.Linear(64, 50, bias=False), torch.randn(1, 64)
    many = x.expand(2000, 64)
    clean = on_crossbar(layer, x, Crossbar(rows=rows))(x)
    top = layer.weight.abs().amax(1)
    tiles = 1 if rows is None else 4
    low = {"g_min": 5e-6, "g_max": 25e-6}  # a share of g_max is 25/20 of the largest weight
    for settings, want in (
        (Crossbar(rows=rows, read=0.01), 0.01 * math.sqrt(2) * x.norm() * top),
        (Crossbar(rows=rows, output=0.1), 0.1 * x.abs().max() * top * math.sqrt(tiles)),
        (Crossbar(rows=rows, read=0.01, **low), 0.0125 * math.sqrt(2) * x.norm() * top),
        (Crossbar(rows=rows, output=0.1, **low), 0.125 * x.abs().max() * top * math.sqrt(tiles)),
    ):
        noise = on_crossbar(layer, x, settings)(many) - clean
        # 100,000 numbers together, each column weighed by its own spread
        assert (noise / want).std().item() == pytest.approx(1.0, rel=0.01)


def test_gradients_reach_the_weights_through_every_effect():
    layer, x = nn.Conv2d(3, 5, 3), torch.randn(2, 3, 6, 6)
    effects = {"programming": 0.01, "read": 0.01, "levels": 64, "drift": 0.05, "drift_sigma": 0.01}
    more = {"seconds": 1e4, "wire": 1.0, "stuck_low": 0.01, "sinh": 1.0, "dac_bits": 8}
    new = on_crossbar(layer, x, Crossbar(rows=9, adc_bits=8, **effects, **more))
    new(x).square().sum().backward()
    layer(x).square().sum().backward()
    moved = new.weight.grad != 0
    assert moved.double().mean() > 0.9  # not those of cells that are stuck, or at 0
    pair = new.weight.grad[moved], layer.weight.grad[moved]
    assert torch.cosine_similarity(*pair, 0) > 0.98


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"g_min": -1e-6}, "g_min must be from 0 to 1; got -1e-06"),
        ({"g_min": 3e-5}, "g_max must be above g_min"),
        ({"levels": 1}, "levels must be a whole number from 2"),
        ({"adc_bits": 1}, "adc_bits must be from 2 to 24, or None"),
        ({"dac_bits": {"a": 99}}, "dac_bits must be from 2 to 24"),
        ({"seconds": 1.0}, "seconds must be from 20"),
        ({"stuck_low": 0.6, "stuck_high": 0.6}, "together at most 1"),
        ({"rows": 0}, "rows must be a whole number from 1"),
        ({"programming": math.nan}, "programming must be from 0 to 1"),
        ({"programming": None}, "programming must be from 0 to 1; got None"),
        *(({"rows": rows}, "rows must be a whole number") for rows in (2.5, True, "8")),
        ({"levels": 2.5}, "levels must be a whole number"),
        *(({"adc_bits": bits}, "must be from 2 to 24, or None") for bits in (6.0, "6", True)),
    ],
)
def test_settings_that_no_crossbar_has_are_refused_with_the_range(given, said):
    with pytest.raises(ValueError, match=said):
        Crossbar(**given)


def test_rows_at_zero_have_a_gradient():
    """A column reads nothing: what it reads has no spread, and no infinite slope of it either."""
    layer, x = nn.Linear(4, 3), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    new = on_crossbar(layer, x, Crossbar(rows=2, read=0.01))
    x.requires_grad_()
    new(x).sum().backward()
    assert x.grad.isfinite().all()
    assert new.weight.grad.isfinite().all()


def test_every_kind_of_layer_is_tried():
    assert {type(layer) for layer, _ in CASES.values()} == set(LAYERS)


def test_aihwkit_lightning_has_the_same_mean_and_spread():
    pytest.importorskip("aihwkit_lightning")
    from aihwkit_lightning.nn import AnalogLinear
    from aihwkit_lightning.simulator.configs import (
        TorchInferenceRPUConfig,
        WeightNoiseInjectionType,
    )

    torch.manual_seed(3)
    layer, x = nn.Linear(96, 32), torch.randn(64, 96).clamp(-3, 3)
    x[0, 0] = 3.0  # the range of both
    config = TorchInferenceRPUConfig()
    config.forward.inp_res, config.forward.out_res = 2**8 - 2, 2**8 - 2
    config.forward.out_bound, config.forward.out_noise = 10.0, 0.04
    config.modifier.std_dev = 0.02
    config.modifier.noise_type = WeightNoiseInjectionType.ADD_NORMAL
    config.pre_post.input_range.enable = True
    config.pre_post.input_range.init_from_data = 0
    config.pre_post.input_range.init_value = 3.0
    theirs = AnalogLinear.from_digital(layer, config).train()
    low = 0.2  # of g_max, so that no cell would have to go below 0
    settings = {
        "dac_bits": 8,
        "adc_bits": 8,
        "adc_range": 10.0 * (1 - low),
        "output": 0.04 * (1 - low),
        "programming": 0.02 * (1 - low) / math.sqrt(2),
        "g_min": low * 25e-6,
        "per_column": False,
    }
    draws = 60
    with torch.no_grad():
        ours = torch.stack(
            [on_crossbar(layer, x, Crossbar(**settings), seed=k)(x) for k in range(draws)]
        )
        other = torch.stack([theirs(x) for _ in range(draws)])
        want = layer(x)
    spread = [(y - want).std(0).mean().item() for y in (ours, other)]
    # 60 draws of 2,048 outputs, of which the weights' part is shared by the rows of a batch:
    # each spread is known to about 1 %
    assert spread[0] == pytest.approx(spread[1], rel=0.05)
    means = [(y.mean(0) - want).square().mean().sqrt().item() for y in (ours, other)]
    assert max(means) < 2 * spread[0] / math.sqrt(draws)  # no bias beyond that of so many draws
    near = torch.linalg.vector_norm(ours.mean(0)) / torch.linalg.vector_norm(other.mean(0))
    assert near.item() == pytest.approx(1.0, rel=0.05)


def test_a_column_of_small_weights_is_read_as_well_as_the_others():
    """The full scale is a current, and every column has its own w_max."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 2, bias=False), torch.randn(256, 16)
    with torch.no_grad():
        layer.weight[1].mul_(1e-3)
    y, want = on_crossbar(layer, x, Crossbar(adc_bits=8))(x), layer(x)
    error = (y - want).square().mean(0).sqrt() / want.square().mean(0).sqrt()
    # a step is 2 / 254 of the full scale, which is at most 5 RMS of these columns
    assert error.max() <= 5 * (2 / 254) / 12**0.5


def test_a_weight_of_zero_has_the_gradient_of_the_layer():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    with torch.no_grad():
        layer.weight[0, 0] = 0.0
        layer.weight[1] = 0.0
    new = on_crossbar(layer, x, Crossbar(rows=2))
    for each in (layer, new):
        each(x).square().sum().backward()
    torch.testing.assert_close(new.weight.grad, layer.weight.grad)


def test_stuck_cells_do_not_drift():
    layer, x = nn.Linear(64, 64), torch.randn(2, 64)
    cells = Crossbar(stuck_high=1.0, drift=0.1, seconds=2e5, g_min=5e-6, programming=0.1)
    new = on_crossbar(layer, x, cells)
    high = new.array._stuck(torch.full((2, 64, 64), 0.3))
    assert torch.equal(high, torch.ones_like(high))
    assert new.array.weights(layer.weight).abs().max() == 0  # both cells of each are at g_max
    half = on_crossbar(layer, x, Crossbar(stuck_high=0.5, drift=0.1, seconds=2e5, compensate=False))
    share = (half.array.weights(layer.weight) / layer.weight.abs().amax(1, keepdim=True)).abs()
    # a pair with one cell stuck at g_max and the other idle is worth w_max still
    torch.testing.assert_close(share.max(), torch.tensor(1.0))


def test_a_layer_that_is_called_twice_counts_both_calls():
    layer, x = CASES["linear"]
    new = copy.deepcopy(layer)
    array = put_on_crossbar(new, "layer", Crossbar())
    array.watching = True
    new(x)
    new(x)
    assert array.seen.products == 2 * 10 * 40
