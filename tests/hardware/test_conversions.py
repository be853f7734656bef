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


def test_parts_of_one_parameter_are_layers_of_their_own():
    net = nn.MultiheadAttention(16, 2, batch_first=True)
    q, k = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    found = products(trace(net, (q, k, k)))
    assert {n: (p.rows, p.columns, p.count) for n, p in found.items()} == {
        "in_proj": (16, 16, 3 * 5),
        "in_proj#2": (16, 32, 3 * 7),
        "out_proj": (16, 16, 3 * 5),
    }


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        twice = 2 * self.w  # two more of its own
        turned = self.w[1].t()  # with other columns
        for w in (*self.w, self.w[0], 2 * self.w[1], twice[0], 3 * twice[1], turned, 2 * self.w[1]):
            x = torch.relu(x @ w)
        return x


def test_slices_of_a_stack_are_layers_and_one_used_twice_is_one():
    found = products(trace(Stack(), torch.randn(2, 4)))
    assert list(found) == ["w", *(f"w#{k}" for k in range(2, 8))]


@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.weight_norm,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_layers_with_computed_weights_keep_their_names(norm):
    a, b, c = (norm(nn.Linear(4, 4)) for _ in range(3))
    net = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c, nn.ReLU(), a)
    assert list(products(trace(net, torch.randn(2, 4)))) == ["0", "2", "4"]


class Bare(nn.Module):
    """Weights that are no parameters, and a matrix that the run makes."""

    def __init__(self):
        super().__init__()
        self.held = [torch.randn(4, 4) for _ in range(2)]

    def forward(self, x):
        for w in (*self.held, self.held[0], torch.ones(4, 4)):
            x = torch.relu(x @ w)
        return x


def test_weights_without_a_name_are_told_apart():
    found = products(trace(Bare(), torch.randn(2, 4)))
    assert list(found) == ["computed 4x4", "computed 4x4#2", "computed 4x4#3"]


@pytest.mark.parametrize("steps", [1, 7])
def test_the_first_step_of_a_recurrent_layer_is_a_step(steps):
    run = trace(nn.LSTM(8, 16), torch.randn(steps, 2, 8))
    calls = [n.product.count for n in run.nodes if n.name == "weight_hh_l0"]
    assert calls == [2] * steps


class Start(nn.Module):
    """A cell whose first state is zero, or learned."""

    def __init__(self, learned):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.start = nn.Parameter(torch.ones(1, 4)) if learned else torch.zeros(1, 4)

    def forward(self, x):
        return self.cell(x, self.start.expand(len(x), 4))


def test_a_cell_is_counted_from_any_state():
    for net in (nn.GRUCell(3, 4), Start(False), Start(True)):
        names = [n.name for n in trace(net, torch.randn(2, 3)).nodes if n.product]
        assert sorted(name.removeprefix("cell.") for name in names) == ["weight_hh", "weight_ih"]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        y = torch.relu(torch.bmm(x, self.w))
        z = torch.relu(torch.einsum("bnk,km->bnm", y, self.v))
        return (2 * self.v) @ z[0].t() + (2 * self.v) @ z[1].t()  # weights first


def test_products_of_stacks_with_weights_are_on_crossbars():
    run = trace(Experts(), torch.randn(3, 2, 4))
    made = [(n.name, n.product) for n in run.nodes if n.product]
    assert [(n, p.rows, p.columns, p.groups, p.count) for n, p in made] == [
        ("w", 4, 5, 3, 2),
        ("v", 5, 6, 1, 3 * 2),
        ("v#2", 6, 5, 1, 2),
        ("v#2", 6, 5, 1, 2),
    ]
    assert run.digital_ops() == {}


class Grown(nn.Module):
    """A recurrent convolution by hand, and one of a table that never changes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv1d(2, 2, 3, padding=1) for _ in range(3))
        self.register_buffer("table", torch.randn(1, 2, 5))

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(3):
            h = torch.tanh(self.a(x) + self.b(h))
        return h + self.c(self.table)


def test_a_state_made_by_the_network_is_data_and_a_table_is_not():
    run = trace(Grown(), torch.randn(4, 2, 5))
    names = [n.name for n in run.nodes if n.product]
    assert (names.count("a"), names.count("b"), names.count("c")) == (3, 3, 0)
    assert run.digital_ops() == {}


class Added(nn.Module):
    """Low-rank weights: the product of two parameters is no product with data."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(2, 4))

    def forward(self, x):
        return x @ (self.a @ self.b)


def test_weights_made_of_weights_are_one_product():
    found = products(trace(Added(), torch.randn(3, 4)))
    assert {n: (p.rows, p.columns, p.count) for n, p in found.items()} == {
        "computed 4x4": (4, 4, 3)
    }


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_layer_of_no_size_multiplies_nothing():
    net = nn.Sequential(nn.Linear(3, 0), nn.ReLU(), nn.Linear(0, 4), nn.ReLU(), nn.Linear(4, 2))
    assert list(products(trace(net, torch.randn(2, 3)))) == ["4"]
    nothing = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 4))
    with pytest.raises(ValueError, match="nothing to put on crossbars"):
        trace(nothing, torch.randn(2, 3))


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
    with pytest.raises(ValueError, match="the inputs are empty"):
        trace(nn.Linear(3, 3), torch.randn(0, 3))
    with pytest.raises(ValueError, match="does not run on the inputs given"):
        trace(nn.Linear(3, 3), torch.randn(3, 4))
