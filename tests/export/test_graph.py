"""Graphs of torch.export: gates kept, lowered or torch's own, by the user's choice."""

import io
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.export.graph import (
    GATE,
    SOFTMAX,
    ExportError,
    compared,
    gates_of,
    graph,
    is_gate,
    is_random,
    left_of,
    node_count,
    saved,
    write,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)

    def forward(self, x):
        y = self.down(self.act(self.up(x)))
        y = torch.relu_(y) + F.scaled_dot_product_attention(y, y, y)
        return torch.maximum(y, x)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    return tg.convert(Net().eval(), inputs=x), x


@pytest.fixture(scope="module")
def program(net):
    return graph(*net)


def counts(program):
    return Counter(n.target for n in program.graph.nodes if n.op == "call_function")


def test_kept_gates_are_one_node_each_and_are_lowered_when_asked(net, program):
    gated, x = net
    found = counts(program)
    assert (found[GATE], found[SOFTMAX]) == (3, 1)  # gelu, relu, maximum; attention
    low = program.run_decompositions()
    assert not any(map(is_gate, low.graph.nodes))
    assert node_count(low) > node_count(program) + 30  # GELU alone is 40 steps
    for each in (program, low):
        assert torch.allclose(each.module()(x), gated(x), atol=1e-6)  # values of size 1, float32


def test_steps_have_no_op_of_ours_for_tools_that_know_none(net, program):
    steps = graph(*net, form="steps")
    spaces = {t.namespace for t in counts(steps) if hasattr(t, "namespace")}
    assert spaces <= {"aten"}
    assert node_count(steps) > node_count(program) + 30


def test_native_has_the_ops_of_torch_where_gates_are_exactly_these(net, program):
    native = graph(*net, form="native")
    found = counts(native)
    assert found[GATE] == 1  # gelu is approximate
    assert found[SOFTMAX] == 0
    assert any("relu in the network itself" in each for each in left_of(native))
    assert {each.partition(" in ")[0] for each in left_of(native)} == {
        *("relu", "scaled_dot_product_attention", "maximum")
    }
    assert not left_of(program)


@pytest.mark.parametrize(("form", "gates", "relus"), [("kept", 2, 0), ("native", 1, 1)])
def test_the_nodes_of_two_layers_and_two_gates_are_counted(form, gates, relus):
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.randn(3, 4)
    made = graph(tg.convert(net, inputs=x), x, form=form, dynamic=False)
    found = Counter(str(target).partition(".")[2] for target in counts(made).elements())
    unpacking = {
        w for w in found if w.partition(".")[0] in ("unbind", "view", "") or "getitem" in w
    }
    rest = {w: n for w, n in found.items() if w not in unpacking}
    want = {"linear.default": 2, "gate.default": gates, "relu.default": relus}
    assert rest == {w: n for w, n in want.items() if n}
    low = made.run_decompositions()
    assert not any(map(is_gate, low.graph.nodes))
    assert {t.namespace for t in counts(low) if hasattr(t, "namespace")} == {"aten"}
    assert node_count(low) > node_count(made)


def test_a_module_whose_name_ends_torchs_code_is_refused_by_its_name():
    net = nn.Sequential()
    net.add_module('a"b', nn.ReLU())
    with pytest.raises(ExportError, match=r"module named 'a.b'.* Rename it"):
        graph(tg.convert(net, inputs=torch.ones(2)), torch.ones(2))


class Draws(nn.Module):
    def forward(self, x):
        return torch.relu(x) + torch.rand_like(x)


def test_a_network_that_draws_numbers_is_not_saved(tmp_path):
    x = torch.ones(2, 3)
    gated = tg.convert(Draws(), inputs=x, strict=False)
    with pytest.raises(ExportError, match="rand_like in the network itself draws random numbers"):
        saved(graph(gated, x), gated, x, tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("p", "training", "draws"), [(0.5, True, True), (0.5, False, False), (0.0, True, False)]
)
def test_dropout_is_refused_where_it_draws_and_only_there(p, training, draws):
    class Net(nn.Module):
        def forward(self, x):
            return F.dropout(torch.relu(x), p, training)

    program = torch.export.export(Net(), (torch.randn(2, 3),))
    (dropout,) = [n for n in program.graph.nodes if "dropout" in n.name]
    assert is_random(dropout) is draws


def test_a_file_is_written_whole_and_as_others_may_read_it(tmp_path):
    write(b"all", tmp_path / "net.pt2")
    assert [p.name for p in tmp_path.iterdir()] == ["net.pt2"]
    (tmp_path / "plain").write_bytes(b"all")
    assert (tmp_path / "net.pt2").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with pytest.raises(ExportError, match=r"no/net\.pt2 cannot be written \(No such file"):
        write(b"all", tmp_path / "no" / "net.pt2")


def test_the_first_axis_may_have_any_size(net, program):
    gated, x = net
    more = torch.randn(7, 5, 8)
    assert torch.allclose(program.module()(more), gated(more), atol=1e-6)
    fixed = graph(gated, x, dynamic=False)
    with pytest.raises((AssertionError, RuntimeError)):
        fixed.module()(more)


def test_every_gate_says_which_site_it_is_and_its_numbers(net, program):
    found = list(gates_of(program, net[0]).values())
    assert [g.site for g in found] == [
        *("act", ":relu#0", ":scaled_dot_product_attention#0", ":maximum#0")
    ]
    assert found[0].instances == [tg.TAXONOMY["gelu"]]
    assert found[1].instances == [tg.TAXONOMY["relu"]]
    assert found[2].instances == found[3].instances == []  # the other input is the threshold
    assert not found[3].fixed


@pytest.mark.parametrize("init", ["relu", "silu"])
def test_a_layer_with_weights_for_each_branch_keeps_a_gate_for_each(init):
    torch.manual_seed(0)
    layer, x = nn.Sequential(tg.Linear(4, 3, init=init)).eval(), torch.randn(5, 4)
    made = graph(layer, x)
    found = list(gates_of(made, layer).values())
    assert [g.site for g in found] == ["0", "0"]
    assert not left_of(made)
    t = tg.TAXONOMY[init]
    for k, gate in enumerate(found):
        assert {(i.tau, i.theta) for i in gate.instances} == {(t.tau, t.theta)}
        assert {i.s[1 - k] for i in gate.instances} == {0.0}  # one branch alone
    assert torch.allclose(made.module()(x), layer(x), atol=1e-6)  # values of size 1, float32


def test_a_gated_linear_unit_is_the_gate_of_silu_over_its_other_half():
    net, x = nn.Sequential(nn.GLU()).eval(), torch.randn(3, 4)
    gated = tg.convert(net, inputs=x)
    made = graph(gated, x)
    (gate,) = gates_of(made, gated).values()
    assert (gate.inputs, gate.instances) == (1, [tg.TAXONOMY["silu"]])
    assert not left_of(made)
    assert torch.allclose(made.module()(x), net(x), atol=1e-6)  # values of size 1, float32


def test_learned_numbers_are_those_of_now():
    act = tg.Activation("silu", share="channel", channels=4, axis=-1, train=("tau", "theta", "s"))
    with torch.no_grad():
        for p in act.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    (gate,) = gates_of(graph(act, torch.randn(3, 4)), act).values()
    want = act.instances()
    assert len(gate.instances) == len(want) == 4
    for a, b in zip(gate.instances, want, strict=True):
        assert a.tau == pytest.approx(b.tau, rel=1e-7)  # exp of a float32, once in each
        assert (a.theta, a.s, a.c) == (b.theta, b.s, b.c)


def test_a_saved_program_runs_where_the_package_is_imported(net, program):
    gated, x = net
    file = io.BytesIO()
    assert saved(program, gated, x, file) < 1e-6  # float32
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x), program.module()(x))


def test_what_computes_something_else_is_refused(net):
    gated, x = net
    wrong = gated(x) + 1e-2
    with pytest.raises(ExportError, match=r"differs from the network by .* nothing is written"):
        compared(gated, x, wrong, None)
    assert compared(gated, x, wrong, 1.0).relative > 1e-3
    with pytest.raises(ExportError, match="outputs of the shapes"):
        compared(gated, x, wrong[:1], None)


def test_a_graph_is_not_made_inside_of_autocast(net):
    gated, x = net
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ExportError, match=r"inside of torch\.autocast"),
    ):
        graph(gated, x)


class Asks(nn.Module):
    def forward(self, x):
        return F.silu(x) if x.sum() > 0 else x


def test_a_network_that_asks_for_values_is_refused_with_the_reason():
    x = torch.ones(2, 3)
    with pytest.raises(ExportError, match=r"torch\.export makes no graph of Asks"):
        graph(tg.convert(Asks(), inputs=x), x)


def test_an_unknown_form_is_refused(net):
    with pytest.raises(ValueError, match="form is 'steps', 'kept' or 'native'; got 'onnx'"):
        graph(*net, form="onnx")
