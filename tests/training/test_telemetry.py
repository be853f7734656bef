"""Scalars of learned gates, to a writer."""

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
        "log_gates: Sequential has no gate that learns tau, theta or s; make one with train=."
    )


def test_logging_leaves_gradients_alone():
    act = tg.Activation("silu", train=("tau",))
    telemetry.log_gates(act, Writer(), 0)
    assert act.rho.grad is None
    act(torch.randn(4)).sum().backward()
    assert act.rho.grad is not None
