"""One run of a network as products, gates and wires."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.hardware.conversions import trace


def products(run):
    return {n.name: n.product for n in run.nodes if n.product is not None}


def test_products_have_the_sizes_that_the_layers_have():
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.SiLU(),
        nn.ConvTranspose2d(6, 5, 2, stride=2),
        nn.Flatten(),
        nn.Linear(5 * 8 * 8, 3),
    )
    found = products(trace(net, torch.randn(2, 4, 8, 8)))
    conv, up, linear = found["0"], found["2"], found["4"]
    assert (conv.rows, conv.columns, conv.groups, conv.count) == (18, 3, 2, 2 * 16)
    assert (up.rows, up.columns, up.groups, up.count) == (6, 20, 1, 2 * 16)
    assert up.overlaps
    assert (linear.rows, linear.columns, linear.count) == (320, 3, 2)
    assert conv.macs == 2 * 6 * 16 * 2 * 9  # images, channels out, places, channels in, window


def test_activity_is_that_of_weights_and_inputs():
    net = nn.Linear(2, 2, bias=False)
    net.weight.data = torch.tensor([[1.0, -0.5], [0.0, 0.5]])
    found = products(trace(nn.Sequential(net), torch.tensor([[2.0, 0.0], [1.0, 1.0]])))["0"]
    assert found.activity == pytest.approx((6 / 4) / 4 * (2 / 4) / 1)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)

    def forward(self, x):
        return torch.tanh(self.b(self.act(self.a(x))))


def test_a_converted_network_is_the_same_run():
    net, x = Gated(), torch.randn(5, 4)
    plain, gated = trace(net, x), trace(tg.convert(net, inputs=x), x)
    key = [(n.kind, n.op, n.inputs, n.size, n.tails) for n in plain.nodes]
    assert [(n.kind, n.op, n.inputs, n.size, n.tails) for n in gated.nodes] == key
    assert [n.tails for n in plain.nodes if n.kind == "gate"] == [tg.TAXONOMY["gelu"].K, 1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_products_gates_and_what_gates_steer(kind):
    run = trace(kind(3, 4), torch.randn(5, 2, 3))
    kinds = {n.kind for n in run.nodes}
    assert kinds == {"input", "product", "gate", "wires"}
    gates = sum(n.size for n in run.nodes if n.kind == "gate")
    assert gates == 5 * 2 * 4 * (5 if kind is nn.LSTM else 3)


@pytest.mark.parametrize(
    ("op", "tails", "channels"),
    [
        (nn.Softmax(-1), 4, 15),  # a gate, and three cells of the tree
        (nn.MaxPool2d((3, 2)), 2 * 5, 6),  # a maximum of two is two tails, of six five of them
        (lambda y: torch.maximum(y, -y), 2, 6),
        (nn.Sigmoid(), 1, 6),
        (nn.SiLU(), 2, 6),
    ],
)
def test_a_gate_has_the_tails_and_channels_of_its_circuit(op, tails, channels):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(2, 6, 3, dilation=2)

        def forward(self, x):
            y = self.a(x)
            return op(y if channels == 6 else y.flatten(2))  # a sequence has them last

    run = trace(Net(), torch.randn(1, 2, 7, 9))
    assert products(run)["a"].count == 3 * 5
    (gate,) = (n for n in run.nodes if n.kind == "gate")
    assert (gate.tails, gate.channels) == (tails, channels)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        sums = torch.sin(y) + y * y + 1 / y + F.layer_norm(y, (4,)) + 2 * y / 3
        return sums + torch.ones(4) / y


def test_what_is_neither_gate_nor_wire_is_digital_and_named():
    ops = trace(Odd(), torch.randn(5, 4)).digital_ops()
    assert ops == {"sin": 1, "mul": 1, "reciprocal": 1, "native_layer_norm": 1, "div": 1}


def test_products_of_data_are_on_no_crossbar():
    net = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    run = trace(net, (x, x, x))
    assert sum(n.macs for n in run.nodes if n.kind == "digital") == 2 * 3 * 2 * 5 * 5 * 4
    assert sum(p.macs for p in products(run).values()) == 3 * 5 * 8 * (24 + 8)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


def test_attention_multiplies_queries_by_keys_and_weights_by_values():
    run = trace(Attending(), torch.randn(1, 2, 5, 6))
    assert sum(n.macs for n in run.nodes) == 2 * 5 * 5 * (4 + 3)


def test_the_network_is_left_as_it_was():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    trace(net, torch.randn(5, 4))
    assert net.training
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_a_network_without_weights_and_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="nothing to put on crossbars"):
        trace(nn.ReLU(), torch.randn(3))
    with pytest.raises(ValueError, match="0 has weights or inputs that are not finite"):
        trace(nn.Sequential(nn.Linear(3, 3)), torch.full((2, 3), torch.nan))
    with pytest.raises(ValueError, match="does not run on the inputs given"):
        trace(nn.Linear(3, 3), torch.randn(3, 4))
