"""What learned gates do: scalars and histograms to a writer, and figures."""

import json
import math

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.training import telemetry


class Writer:
    def __init__(self):
        self.rows = {}

    def add_scalar(self, name, value, step):
        self.rows[name, step] = value


def test_the_scalars_are_those_of_the_gates():
    model = nn.Sequential(
        nn.Linear(3, 4),
        tg.Activation("silu", share="channel", channels=4, train=("tau", "theta")),
        tg.LSTM(4, 2, train=("tau", "theta"), sites=("f", "cell"), bidirectional=True),
        tg.Activation("relu"),
    )
    with torch.no_grad():
        model[1].rho.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
        model[1].dtheta.copy_(torch.tensor([[0.5, -2.0, 0.0, 0.5]]))
        model[2].gate_rho_l0_reverse[1].copy_(torch.tensor([1.0, 3.0]))
    writer = Writer()
    assert telemetry.log_gates(model, writer, 7) is None
    e = torch.tensor([0.0, 1.0, -1.0, 2.0]).exp()
    want = {
        "gates/1/tau/min": e.min(),
        "gates/1/tau/mean": e.mean(),
        "gates/1/tau/max": e.max(),
        "gates/1/theta/min": -2.0,
        "gates/1/theta/mean": -0.25,
        "gates/1/theta/max": 0.5,
    }
    tau = {"f": 1.0, "cell": 2.0}  # where sigmoid and tanh start
    for site in ("f_l0", "cell_l0", "f_l0_reverse", "cell_l0_reverse"):
        for what in ("min", "mean", "max"):
            want[f"gates/2.{site}/tau/{what}"] = tau[site.split("_")[0]]
            want[f"gates/2.{site}/theta/{what}"] = 0.0
    one, three = 2 * torch.tensor([1.0, 3.0]).exp()
    for what, value in (("min", one), ("mean", (one + three) / 2), ("max", three)):
        want[f"gates/2.cell_l0_reverse/tau/{what}"] = value
    assert writer.rows.keys() == {(name, 7) for name in want}
    for name, value in want.items():
        assert isinstance(writer.rows[name, 7], float)
        assert writer.rows[name, 7] == pytest.approx(float(value), rel=1e-6), name


def test_each_threshold_has_its_scalars():
    act = tg.Activation("gelu", share="channel", channels=3, train=("theta",))
    have = telemetry.gate_scalars(nn.Sequential(act))
    thetas = tg.TAXONOMY["gelu"].theta
    assert len(have) == 3 * len(thetas)
    for k, theta in enumerate(thetas):
        assert have[f"0/theta_{k + 1}/max"] == pytest.approx(theta, rel=1e-6)


@pytest.mark.parametrize(
    ("init", "slopes", "left"),
    [
        ("sigmoid", [[0, 0, 0.5, 0.0005], [0, 0.5, 0, 0.0005]], 2),  # constant
        ("silu", [[0, 0, 0.0005, 1], [1, 0, 0.0005, 0]], 2),  # multiplicative
        ("hardtanh", [[0, 0, 0, 0.1], [1, 0, 1, 1], [0, 0, 0.1, 0]], 3),  # saturating
        ("hardtanh_clamp", [[1, 0.2, 0.5, 0]], 1),  # saturating by its clamp
    ],
)
def test_groups_that_left_their_family_are_counted_as_family_says(init, slopes, left):
    act = tg.Activation(init, share="channel", channels=4, train=("s",))
    assert telemetry.gate_scalars(act)["activation/left_family"] == 0
    with torch.no_grad():
        act.s.copy_(torch.tensor(slopes))
    assert telemetry.gate_scalars(act) == {"activation/left_family": left}
    start = tg.family(tg.TAXONOMY[init], 1e-3)
    assert sum(word != start for word in tg.family(act, 1e-3)) == left


def test_a_free_lstm_reports_the_units_that_left():
    model = tg.LSTM(3, 4, train="tau", family="free")
    with torch.no_grad():
        model.gate_s_l0[4, 1, :3] = 0.5
    scalars = telemetry.gate_scalars(model)
    assert scalars["lstm.cell_l0/left_family"] == 3
    assert scalars["lstm.i_l0/left_family"] == 0


def test_a_network_without_learned_gates_is_refused():
    with pytest.raises(ValueError, match="no gate") as caught:
        telemetry.log_gates(nn.Sequential(tg.Activation("silu"), tg.GRU(2, 3)), Writer(), 0)
    assert str(caught.value) == (
        "log_gates: Sequential has no gate that learns tau, theta, s or c; make one with train=."
    )


def test_logging_leaves_gradients_alone():
    act = tg.Activation("silu", train=("tau",))
    telemetry.log_gates(act, Writer(), 0)
    assert act.rho.grad is None
    act(torch.randn(4)).sum().backward()
    assert act.rho.grad is not None


def test_histograms_go_to_a_writer_that_takes_them():
    class Full(Writer):
        def add_histogram(self, name, values, step):
            self.rows[name, step] = values

    act = tg.Activation("gelu_k3", share="channel", channels=5, train=("theta", "s"))
    writer = Full()
    telemetry.log_gates(nn.Sequential(act), writer, 3)
    _, theta, s, _ = act.values()
    for name, want in (("theta_2", theta[1]), ("s_1", s[0])):
        torch.testing.assert_close(writer.rows[f"gates/0/{name}", 3], want.detach())
    assert telemetry.gate_histograms(act).keys() == {
        f"activation/{name}" for name in ("theta_1", "theta_2", "s_1", "s_2", "s_3")
    }


def test_a_histogram_counts_every_value_and_says_what_is_no_number():
    values = torch.tensor([0.0, 1.0, 1.0, math.nan, 4.0, math.inf])
    found = telemetry.histogram(values)
    counts, _ = torch.histogram(torch.tensor([0.0, 1.0, 1.0, 4.0]), telemetry.BINS)
    assert found == {"low": 0.0, "high": 4.0, "counts": counts.int().tolist(), "not_finite": 2}
    assert telemetry.histogram(torch.full((3,), 2.0))["counts"] == [3]
    assert telemetry.histogram(torch.tensor([math.nan]))["not_finite"] == 1


def test_lines_are_json_and_a_file_goes_on(tmp_path):
    path = tmp_path / "new" / "gates.jsonl"
    for step in (1, 2):
        writer = telemetry.JsonLines(path)
        writer.add_scalar("a", math.nan, step)
        writer.add_histogram("b", torch.zeros(4), step)
        writer.add_text("c", "said", step)
        writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["scalars"] == {"a": "nan"}
    assert lines[0]["texts"] == {"c": "said"}
    assert lines[1]["histograms"]["b"]["counts"] == [4]


@pytest.mark.parametrize("init", ["silu", "hardtanh", "gelu", "tanh"])
def test_a_figure_has_the_start_and_the_groups_as_they_are(init):
    act = tg.Activation(init, share="channel", channels=20, train=("theta",))
    with torch.no_grad():
        act.dtheta.add_(torch.randn_like(act.dtheta))
    (site,) = telemetry.learned_sites(act)
    drawn = telemetry.figure(site, 7).axes[0]
    assert drawn.get_title() == "activation, step 7, 16 of 20 groups"
    *curves, start = [torch.tensor(line.get_xydata()) for line in drawn.lines]
    assert len(curves) == 16
    torch.testing.assert_close(start[:, 1], act.init(start[:, 0]))
    last = act.instance(19)
    # the figure is in float64, of parameters in float32
    torch.testing.assert_close(curves[-1][:, 1], last(curves[-1][:, 0]), rtol=1e-5, atol=1e-5)


def test_gates_of_a_recurrent_layer_are_drawn_too():
    layer = tg.LSTM(3, 4, train=("tau", "theta"), sites=("f", "cell"))
    with torch.no_grad():
        layer.gate_dtheta_l0[0, 2] = 1.5
    site = next(iter(telemetry.learned_sites(layer)))
    assert site.name == "lstm.f_l0"
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(site.at(x, [2])[:, 0], torch.sigmoid(x - 1.5))
    assert telemetry.distance(site.values(), site.values()) == 0


def test_thresholds_are_written_in_order():
    act = tg.Activation("hardtanh", train=("theta",))
    with torch.no_grad():
        act.dtheta[0] = 3.0
    scalars = telemetry.gate_scalars(act)
    assert scalars["activation/theta_1/max"] == 1.0
    assert scalars["activation/theta_2/max"] == 2.0
