"""Networks with every nonlinearity in integers."""

import shutil

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.hardware import fixed_point as fp
from threshold_gating.hardware.digital import bench
from threshold_gating.hardware.digital.coverify import coverify
from threshold_gating.show.digital import summary

# Few bits move y far at sites that see little of their range; tests of that ask for the words.
pytestmark = pytest.mark.filterwarnings("ignore:fixed_point.convert. .* rounding to")
X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class Everything(nn.Module):
    """An activation as a module and as calls, slopes that are data, attention and a recurrence."""

    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 16), nn.SiLU(inplace=True), nn.Linear(16, 16)
        self.p = nn.PReLU(5)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.lstm = nn.LSTM(16, 8, batch_first=True)

    def forward(self, x):
        h = self.p(torch.relu(self.b(self.act(self.a(x)))) - 0.2)
        h, _ = self.attention(h, h, h)
        h, _ = self.lstm(nn.functional.gelu(h))
        return torch.softmax(4 * nn.functional.glu(h), -1)


@pytest.fixture(scope="module")
def gated():
    torch.manual_seed(0)
    model = Everything().eval()
    with torch.no_grad():
        model.p.weight.copy_(torch.linspace(-0.5, 0.5, 5))
    return tg.convert(model, inputs=X)


def test_bits_by_name_are_refused_with_the_way_to_ask_for_them(gated):
    with pytest.raises(ValueError, match=r"bits is no field .* fixed_point.convert\(model, 12"):
        fp.convert(gated, inputs=X, bits=12)


@torch.no_grad()
def test_more_bits_are_nearer(gated):
    off = [(fp.convert(gated, b, inputs=X)(X) - gated(X)).abs().max().item() for b in (8, 12, 16)]
    assert off[0] > off[1] > off[2]
    assert off[2] < 1e-3  # gates are known to 6 of 2^-15, and four follow each other


@torch.no_grad()
def test_outputs_of_sites_are_codes_and_the_network_is_left_as_it_was(gated):
    before = gated(X)
    made = fp.convert(gated, 6, inputs=X, only=":softmax#0")
    y = made(X) * 2**5
    assert torch.equal(y, y.round())
    assert torch.equal(gated(X), before)
    assert [row.name for row in made.sites()] == [":softmax#0"]


@torch.no_grad()
def test_a_softmax_by_the_tree_is_a_softmax():
    class Soft(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1)

    z = 3 * torch.randn(50, 7)
    z[0, 3:] = -torch.inf
    z[1] = 5.0
    z[2, 1:] = -torch.inf
    soft = tg.convert(Soft(), inputs=z)
    found = fp.convert(soft, 16, inputs=z)(z)
    # Seven keys: four levels of the tree, each off by 3 of 2^-12 at most, a quarter of it in p.
    assert (found - torch.softmax(z, -1)).abs().max() < 4 * 4 * 2**-12 / 4 + 6 * 2**-15
    assert (found[0, 3:] == 0).all()


@torch.no_grad()
def test_channels_have_registers_of_their_own():
    x = torch.randn(64, 3)
    act = tg.Activation("silu", share="channel", channels=3, train=("tau", "theta"))
    with torch.no_grad():
        act.rho.copy_(torch.tensor([-0.5, 0.0, 0.5]))
        act.dtheta.copy_(torch.tensor([[-1.0, 0.0, 1.0]]))
    net = nn.Sequential(nn.Linear(3, 3), act).eval()
    made = fp.convert(net, 14, inputs=x)
    assert made.sites()[0].instances == 3
    assert (made(x) - net(x)).abs().max() < 4 * 2.0 ** -made.sites()[0].format.out


def test_nan_stays_visible(gated):
    net = tg.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), inputs=X)
    made = fp.convert(net, 8, inputs=X)
    bad = X.clone()
    bad[0] = torch.nan
    assert made(bad)[0].isnan().all()
    assert made(bad)[1:].isfinite().all()


def test_formats_by_site_and_what_is_no_site(gated):
    made = fp.convert(gated, {"act": fp.Format(12, 8, 8), "*": 10}, inputs=X)
    widths = {row.name: row.format.bits for row in made.sites()}
    assert widths.pop("act") == 12
    assert set(widths.values()) == {10}
    with pytest.raises(ValueError, match="'nothing' is no site; there are 'act'"):
        made.fix({"nothing": 8, "*": 8})
    with pytest.raises(ValueError, match="no format for :relu#0"):
        made.fix({"act": 8})


def test_the_star_is_for_all_others_wherever_it_stands(gated):
    made = fp.convert(gated, {"*": 8, "act": 16}, inputs=X)
    assert {row.name: row.format.bits for row in made.sites()}["act"] == 16


@pytest.mark.parametrize("bits", [8.0, "8", None, True])
def test_bits_are_a_whole_number(gated, bits):
    with pytest.raises(fp.FormatError, match=r"fixed_point: bits, .* must be a whole number"):
        fp.convert(gated, bits, inputs=X)


def test_a_site_that_does_not_fit_is_named():
    net = tg.convert(nn.Sequential(nn.Linear(8, 8), nn.ELU()), inputs=X)
    with pytest.raises(fp.FormatError, match=r"^1: tau = 16384 is too large"):
        fp.convert(net, 16, inputs=X)


@torch.no_grad()
def test_the_narrowest_widths_reach_what_is_asked_and_no_site_could_be_narrower(gated):
    made = fp.convert(gated, 16, inputs=X)
    aim = gated(X)

    def score(model):
        return -(model(X) - aim).abs().max().item()

    found = fp.narrowest(made, score, -0.02, (16, 10, 8, 6))
    assert score(made) >= -0.02
    assert min(found.values()) < 16
    for name, width in found.items():
        for narrower in [b for b in (10, 8, 6) if b < width][:1]:
            made.fix({**found, name: narrower})
            assert score(made) < -0.02
    with pytest.raises(ValueError, match="is not reached with 16 bits at every site"):
        fp.narrowest(made, score, -1e-9)


class Branching(nn.Module):
    """Which call is taken depends on the batch."""

    def __init__(self):
        super().__init__()
        self.l, self.a = nn.Linear(8, 8), nn.SiLU()

    def forward(self, x):
        h = self.l(x)
        return torch.softmax(nn.functional.gelu(h), -1) if x.shape[0] > 8 else self.a(h)


@torch.no_grad()
def test_a_site_that_calibration_does_not_reach_stays_float_and_is_named():
    x = torch.randn(16, 8)
    net = tg.convert(Branching().eval(), inputs=x)
    with pytest.warns(UserWarning, match=r":gelu#0 \(not reached\), :softmax#0 \(not reached\)"):
        made = fp.convert(net, 8, inputs=x[:4])
    assert [row.name for row in made.sites()] == ["a"]
    assert torch.allclose(made(x), net(x), atol=1e-6)  # float32, in another order


@pytest.mark.filterwarnings("ignore:.* inputs leave")  # with a Format, +inf ends at its range
@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "nothing but zeros"), (torch.nan, "NaN"), (torch.inf, r"\+inf")]
)
def test_no_format_is_chosen_from_what_has_no_size(value, said):
    net = tg.convert(nn.Sequential(nn.Flatten(), nn.ReLU()), inputs=X)
    bad = torch.zeros_like(X) if value == 0 else X.clone()
    bad[0, 0] = value
    with pytest.raises(ValueError, match=rf"fixed_point: 1 saw ({said})"):
        fp.convert(net, 8, inputs=bad)
    assert fp.convert(net, fp.Format(8, 4, 4), inputs=bad).sites()[0].format.out == 4


@torch.no_grad()
def test_a_softmax_of_many_keys_in_few_bits_says_what_it_loses():
    net, z = tg.convert(nn.Sequential(nn.Softmax(-1)), inputs=X), torch.randn(4, 600)
    with pytest.warns(UserWarning, match=r"0: rounding to 8 bits moves y by \d+%"):
        fp.convert(net, 8, inputs=z)
    found = fp.convert(net, 16, inputs=z)(z)
    assert (found - torch.softmax(z, -1)).norm() / torch.softmax(z, -1).norm() < 0.02


@torch.no_grad()
def test_rows_that_are_longer_than_in_calibration_say_that_they_leave_the_range():
    net, z = tg.convert(nn.Sequential(nn.Softmax(-1)), inputs=X), 0.1 * torch.randn(4, 600)
    made = fp.convert(net, 16, inputs=z[:, :6])
    assert made(z[:, :6]).isfinite().all()
    assert made.notes() == []
    with pytest.warns(UserWarning, match=r"0.*: log-sums of a row leave .* inputs whose rows"):
        made(z)
    assert len(made.notes()) == 1
    made.fix(12)  # another format, which nothing has left yet
    assert made.notes() == []


class Calls(nn.Module):
    """A function as a network."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@torch.no_grad()
@pytest.mark.parametrize("masked", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("shared", [0.0, 100.0])
def test_neither_a_mask_nor_what_all_logits_share_takes_bits_of_a_softmax(masked, shared):
    z = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    hidden = torch.arange(9) > 2 + torch.arange(6)[:, None]
    net = tg.convert(nn.Sequential(nn.Softmax(-1)), inputs=z)
    plain = fp.convert(net, 8, inputs=z.masked_fill(hidden, -torch.inf))
    logits = (z + shared).masked_fill(hidden, masked)
    # float32 has 2^-17 of 100 for a last bit: a code may be the one beside it.
    near = 0.0 if not shared else 2.0**-7
    found = fp.convert(net, 8, inputs=logits)(logits)
    assert (found - plain(z.masked_fill(hidden, -torch.inf))).abs().max() <= near


@torch.no_grad()
def test_masked_keys_are_0_and_a_lone_one_is_1_where_the_range_is_small():
    z = 0.1 * torch.randn(5, 4)
    made = fp.convert(tg.convert(nn.Sequential(nn.Softmax(-1)), inputs=z), 8, inputs=z)
    assert made.sites()[0].format.reach <= 2  # a gate at its end is far from shut
    z[1, 1:], z[2, 0] = -1e4, -torch.inf
    assert made(z)[1].tolist() == [1, 0, 0, 0]
    assert made(z)[2, 0] == 0
    z[3] = torch.tensor([0.0, -3.0, 0.0, 0.0])
    with pytest.warns(UserWarning, match=r"or its logits do, .* as far apart as these"):
        made(z)


@torch.no_grad()
def test_rows_with_nothing_to_choose_from_are_as_in_torch():
    x = torch.randn(4, 8)
    z = x.clone()
    z[1], z[2] = -torch.inf, -1e9
    soft = fp.convert(tg.convert(nn.Sequential(nn.Softmax(-1)), inputs=x), 12, inputs=x)
    assert soft(z)[1].isnan().all()
    # Three levels of the tree, each off by 3 of 2^-10 at most, of which 7/64 is in p.
    assert (soft(z)[2] - 1 / 8).abs().max() < 3 * 3 * 2**-10 * 7 / 64 + 3 * 2**-11

    def attend(z):
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=z[:, :4])

    made = fp.convert(tg.convert(Calls(attend), inputs=x), 12, inputs=x)
    assert (made(z)[1] == 0).all()
    assert made(z).isfinite().all()
    assert soft(z[:, :0]).shape == (4, 0)


@torch.no_grad()
@pytest.mark.parametrize("act", [nn.ReLU(), nn.Tanh()])
def test_inputs_beyond_the_range_of_calibration_say_so_once(act):
    x = torch.linspace(-1, 1, 8).view(2, 4)
    made = fp.convert(tg.convert(nn.Sequential(act), inputs=x), 12, inputs=x / 10)
    with pytest.warns(UserWarning, match=r"0: inputs leave \|x\| < .* ranges of its format"):
        made(x)
    made(x)  # once: a second warning would be an error here
    assert len(made.notes()) == 1
    made.fix(8)
    assert made.notes() == []


@torch.no_grad()
def test_inputs_beyond_the_range_that_change_no_y_need_no_words():
    x = torch.linspace(-1, 1, 8)
    relu = fp.convert(tg.convert(nn.Sequential(nn.ReLU()), inputs=x), 12, inputs=x)
    assert (relu(torch.tensor([-1e6, -torch.inf])) == 0).all()
    clipped = fp.convert(tg.convert(nn.Sequential(nn.Hardtanh()), inputs=x), 12, inputs=4 * x)
    assert (clipped(torch.tensor([1e6])) >= 1 - 2**-11).all()
    assert relu.notes() == clipped.notes() == []


@torch.no_grad()
def test_a_y_that_leaves_its_range_where_x_does_not_says_so():
    """SiLU saw little but negative x: its y were small."""
    x = torch.linspace(-4, 0.1, 50)
    silu = fp.convert(tg.convert(nn.Sequential(nn.SiLU()), inputs=x), 12, inputs=x)
    with pytest.warns(UserWarning, match=r"inputs leave .* \|y\| < 1,"):
        silu(torch.tensor([3.0]))
    glu = tg.convert(nn.Sequential(nn.GLU()), inputs=x)
    shut = fp.convert(glu, 12, inputs=torch.tensor([[3.0, -5.0]]))
    with pytest.warns(UserWarning, match="inputs leave"):
        shut(torch.tensor([[3.0, 5.0]]))


@torch.no_grad()
def test_small_inputs_have_fine_codes():
    x = 1e-6 * torch.randn(500, generator=torch.Generator().manual_seed(0))
    for act in (nn.ReLU(), nn.SiLU()):
        net = tg.convert(nn.Sequential(act), inputs=x)
        off = (fp.convert(net, 10, inputs=x)(x) - net(x)).abs().max() / net(x).abs().max()
        assert off < 2**-7  # y has 9 bits and a sign, half of them used; codes of x and y round


def test_a_site_whose_thresholds_take_its_range_says_what_rounding_moves():
    x = 0.01 * torch.randn(64, 8)
    net = tg.convert(nn.Sequential(nn.ReLU6()), inputs=x)
    with pytest.warns(UserWarning, match=r"0: rounding to 8 bits moves y by \d+% of its RMS"):
        made = fp.convert(net, 8, inputs=x)
    made.fix(16)
    made.measure(x)
    assert made.notes() == []


@torch.no_grad()
def test_slopes_that_are_data_may_vanish_where_no_code_shows_them():
    x, act = torch.randn(50, 4), nn.PReLU(4)
    act.weight.copy_(torch.tensor([1e-12, 0.25, -1e-7, 30.0]))
    net = tg.convert(nn.Sequential(act), inputs=x)
    made = fp.convert(net, 12, inputs=x)
    assert (made(x) - net(x)).abs().max() < 31 * 2.0 ** -made.sites()[0].format.fraction
    act.weight[1] = torch.nan
    with pytest.raises(fp.FormatError, match=r"^0:prelu#0: s = nan is no number"):
        fp.convert(tg.convert(nn.Sequential(act), inputs=x), 12, inputs=x)


@torch.no_grad()
def test_nan_in_a_branch_of_a_glu_stays_visible():
    x = torch.randn(3, 8)
    made = fp.convert(tg.convert(nn.Sequential(nn.GLU()), inputs=x), 8, inputs=x)
    x[1, 2] = torch.nan
    assert made(x).isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="iverilog is not installed")
def test_what_is_not_linear_beside_the_gates_stands_in_the_report():
    x = torch.randn(3, 8)
    net = tg.convert(Calls(lambda x: torch.sin(torch.relu(x))), inputs=x)
    report = coverify(net, x, 8, analog=False)
    assert "In float, not linear beside the gates: sin 1." in summary(report)
    assert "0.00% of its rows" in " ".join(summary(report._replace(same=0.0)))


@torch.no_grad()
def test_branches_of_a_glu_have_room_though_its_gates_are_nearly_shut():
    class Glu(nn.Module):
        def forward(self, x):
            return nn.functional.glu(x)

    x = torch.cat([100 * torch.randn(50, 4), torch.randn(50, 4) - 6], -1)
    net = tg.convert(Glu(), inputs=x)
    made = fp.convert(net, 16, inputs=x)
    # x has 2^-6 for a last bit, and gates 6 of 2^-15, both times a branch of up to 400.
    assert (made(x) - net(x)).abs().max() < 400 * (2**-7 * 0.02 + 6 * 2**-15)


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="iverilog is not installed")
def test_verilog_gives_what_the_integers_gave_at_every_site(gated):
    report = coverify(gated, X, 8, analog=False)
    assert report.exact
    assert len(report.rows) == 12 + 2  # and the trees of attention and of the softmax
    assert {row.name for row in report.rows if row.kind == "pair"} == {
        "attention:multi_head_attention_forward#0/tree",
        ":softmax#0/tree",
    }
    assert all(row.codes > 0 and row.seen > 0 for row in report.rows)
    assert max(row.error for row in report.rows) < 6
    rows = {row.name: row for row in report.rows}
    assert rows["p:prelu#0"][-4:] == (
        5,
        5,
        True,
        "all 256 codes",
    )  # a slope of its own for each channel
    assert all(row.simulated == row.settings for row in report.rows)  # few came


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="iverilog is not installed")
def test_every_channel_has_every_code_in_the_verilog_or_it_is_said():
    act = tg.Activation("silu", share="channel", channels=100, train=("theta",))
    with torch.no_grad():
        act.dtheta.copy_(torch.linspace(-2, 2, 100).expand_as(act.dtheta))
    net, x = nn.Sequential(act).eval(), torch.randn(3, 100)
    report = coverify(net, x, 6, analog=False)
    (row,) = report.rows
    assert report.exact
    assert row.codes == 64 * row.settings
    assert row.simulated == row.settings == len(set(written(net, x, 6)))
    assert "Every setting had every code." in summary(report)
    report = coverify(net, x, 12, codes=10, analog=False)
    (row,) = report.rows
    assert report.exact
    assert (row.simulated, row.settings, row.codes) == (100, 100, 1000)
    assert "Not every code of every setting: 0 (10 of 4,096)." in summary(report)


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="iverilog is not installed")
def test_one_channel_that_is_another_in_the_verilog_is_found(monkeypatch):
    act = tg.Activation("silu", share="channel", channels=5, train=("theta",))
    with torch.no_grad():
        act.dtheta.copy_(torch.linspace(-2, 2, 5).expand_as(act.dtheta))
    net, x, right = nn.Sequential(act).eval(), torch.randn(3, 5), bench.word
    middle = written(net, x, 8)[2]
    wrong = middle._replace(theta=(middle.theta[0] + 16,))
    monkeypatch.setattr(bench, "word", lambda r, u: right(wrong if r == middle else r, u))
    report = coverify(net, x, 8, analog=False)
    assert not report.exact
    assert 0 < report.rows[0].differ <= 256


def written(net, x, bits):
    """The registers of a network's only site."""
    (gate,) = fp.convert(net, bits, inputs=x).gates()
    return gate.written
