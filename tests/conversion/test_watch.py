"""What a watcher is told of a running network, and what it leaves behind: nothing."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import Activation, convert
from threshold_gating.conversion.audit import audit, is_gate
from threshold_gating.conversion.plan import module_sites, whole
from threshold_gating.conversion.watch import Run, Running, Watch, evaluating, fresh


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(6, 6), nn.GELU()

    def forward(self, x):
        return self.act(torch.relu(self.linear(x)))


class Net(nn.Module):
    """Every way to call a nonlinearity."""

    def __init__(self):
        super().__init__()
        self.block, self.act = Block(), nn.SiLU()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x):
        x = self.block(x)
        x = self.act(x) + self.act(x)
        x = x.clone().sigmoid_()
        x = F.leaky_relu(input=x, negative_slope=0.2)
        x = self.lstm(x)[0]
        return F.scaled_dot_product_attention(x, x, x).softmax(-1)


NAMES = [
    *("block:relu#0", "block.act", "act", "act#1", ":sigmoid#0", ":leaky_relu#0"),
    *("lstm:lstm#0", ":scaled_dot_product_attention#0", ":softmax#0"),
]
KINDS = ["relu", "gelu", "silu", "silu", "sigmoid", "leaky_relu", "lstm"]
KINDS += ["scaled_dot_product_attention", "softmax"]
X = torch.randn(5, 6)


def sites_of(model):
    return whole(module_sites(model))


def visits(model, x=X, kind_of=None, see=lambda visit: None, **options):
    """The sites of a run with copies of their inputs and their outputs."""
    found = []

    def each(visit):
        see(visit)
        given = fresh((visit.args, visit.kwargs))
        return lambda output: found.append((visit, given, copy.deepcopy(output)))

    with evaluating(model), Watch(model, each, kind_of or sites_of(model), **options):
        model(x.clone())
    return found


def test_every_site_is_told_of_in_order_with_what_it_computes():
    model = Net()
    found = visits(model)
    assert [visit.name for visit, _, _ in found] == NAMES
    assert [visit.kind for visit, _, _ in found] == KINDS
    for visit, (args, kwargs), output in found:
        with torch.no_grad():
            torch.testing.assert_close(visit.f(*args, **kwargs), output, rtol=0, atol=0)


def test_an_element_wise_site_is_a_function_of_one_tensor():
    seen = []

    def see(visit):
        if visit.kind in KINDS[:6]:
            seen.append((visit.function, visit.x.clone(), visit.name))

    found = {visit.name: output for visit, _, output in visits(Net(), see=see)}
    assert [name for *_, name in seen] == NAMES[:6]
    for f, x, name in seen:
        torch.testing.assert_close(f(x), found[name], rtol=0, atol=0)


def test_a_module_called_by_keyword_is_told_of_with_its_input():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.SiLU()

        def forward(self, x):
            return self.act(input=x)

    seen = []
    ((visit, given, output),) = visits(Keyword(), see=lambda visit: seen.append(visit.x.clone()))
    assert visit.name == "act"
    assert torch.equal(given[1]["input"], X)
    assert torch.equal(seen[0], X)
    assert torch.equal(output, F.silu(X))


def test_names_are_those_that_an_audit_has_of_the_converted_network():
    model = Net()
    gated = convert(model, inputs=X)
    assert [site.name for site in audit(gated, X).sites] == NAMES
    kind_of = lambda run: "gate" if is_gate(run.module) else None  # noqa: E731
    found = visits(gated, kind_of=kind_of, answered=True)
    assert [visit.name for visit, _, _ in found] == NAMES
    assert [visit.gate is not None for visit, _, _ in found] == [n.count(":") == 1 for n in NAMES]
    for (visit, (args, kwargs), output), (_, _, want) in zip(found, visits(model), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(visit.f(*args, **kwargs), output, rtol=0, atol=0)
        assert type(output) is type(want)
    silent = visits(gated, kind_of=kind_of)
    assert [visit.name for visit, _, _ in silent] == ["block.act", "act", "act#1"]


def test_calls_that_have_gates_of_their_own_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.SiLU()

        def forward(self, x):
            return self.act(self.act(x))

    gated = convert(Twice(), {"act#1": "relu"}, inputs=X, tol=float("inf"))
    found = visits(gated, kind_of=lambda run: "gate" if is_gate(run.module) else None)
    assert [visit.name for visit, _, _ in found] == ["act", "act#1"]
    torch.testing.assert_close(found[1][2], found[1][1][0][0].relu(), rtol=0, atol=0)


def test_a_site_is_told_of_with_what_its_forward_gets_behind_the_hooks_of_its_user():
    model = nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.ReLU())
    model[1].register_forward_pre_hook(lambda module, args: (torch.tanh(args[0]) + 7,))
    model[1].register_forward_hook(lambda module, args, y: -y)
    found = visits(model)
    # what a hook calls is called by who calls the module
    assert [visit.name for visit, _, _ in found] == [":tanh#0", "1", "2"]
    (x,), _ = found[1][1]
    assert (x > 5).all()
    torch.testing.assert_close(found[1][2], F.silu(x), rtol=0, atol=0)
    torch.testing.assert_close(found[2][1][0][0], -F.silu(x), rtol=0, atol=0)


def test_what_a_listener_runs_is_not_the_networks():
    model = Net()

    def see(visit):
        model.act(X)
        torch.relu(X)
        model.block(X)

    assert [visit.name for visit, _, _ in visits(model, see=see)] == NAMES


def test_the_inside_of_a_site_is_not_told_of():
    kind_of = lambda run: "block" if run.where == "block" else None  # noqa: E731
    names = [visit.name for visit, _, _ in visits(Net(), kind_of=kind_of)]
    assert names[:2] == ["block", "act:silu#0"]


def test_after_a_part_that_fails_the_others_keep_their_names():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.act = nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), nn.ReLU()

        def forward(self, x):
            try:
                return self.bad(x)
            except RuntimeError:
                return torch.sigmoid(self.act(x))

    names = [visit.name for visit, _, _ in visits(Tries())]
    assert names == ["bad.0", "act", ":sigmoid#0"]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_in_the_network(fails):
    model = convert(Net(), inputs=X)
    before = [dict(vars(m)) for m in model.modules()]

    def see(visit):
        if fails:
            raise KeyError("stop")

    # not in `evaluating`, which would put back what a watch leaves
    watch = Watch(model, see, sites_of(model), answered=True)
    with pytest.raises(KeyError) if fails else nullcontext(), watch:
        assert any("tg_watch" in vars(m) for m in model.modules())
        model(X.clone())
    assert [vars(m).keys() for m in model.modules()] == [b.keys() for b in before]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    hooks = nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


def test_a_watch_inside_another_leaves_the_outer_one_in_place():
    model = convert(Net(), inputs=X)
    outer, inner = [], []

    def watch(found):
        see = lambda visit: found.append(visit.kind) if visit.gate else None  # noqa: E731
        return Watch(model, see, sites_of(model), answered=True)

    with watch(outer):
        with watch(inner):
            model(X.clone())
        assert not outer
        model(X.clone())
    answered = [kind for kind, name in zip(KINDS, NAMES, strict=True) if ":" in name]
    assert inner == outer == answered
    assert not any("tg_watch" in vars(m) for m in model.modules())


def test_a_network_may_copy_its_parts_and_call_the_copies_while_it_is_watched():
    sizes = []

    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.linear = nn.ReLU(), nn.Linear(6, 6)

        def forward(self, x):
            memo = {}
            copied = copy.deepcopy(self.act, memo)
            sizes.append(sum(isinstance(v, nn.Module) for v in memo.values()))
            return self.act(x) + copied(-x) + copy.deepcopy(self.linear)(x)

    # the copy is no part of the network: what it calls is called by who made it
    assert [visit.name for visit, _, _ in visits(Copies())] == ["act", ":relu#0"]
    assert sizes == [1]  # not the network that a hook belongs to
    model = Copies()
    gated = convert(model, inputs=X, strict=False)  # a copy of a gate has no site of its own
    assert torch.equal(gated(X), model(X))


def test_a_part_that_takes_no_hooks_runs():
    scripted = torch.jit.script(nn.Linear(6, 6))
    model = nn.Sequential(scripted, nn.ReLU())
    assert [visit.name for visit, _, _ in visits(model)] == ["1"]


def test_running_without_sites_adds_no_hook_to_a_module_that_has_none():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model[0].register_forward_pre_hook(lambda module, args: None)
    started = []
    with Running(model, before=lambda run, args, kwargs: started.append(run)) as running:
        assert [len(m._forward_pre_hooks) for m in model] == [2, 0]
        model(X)
    assert [run.site for run in started] == ["", "0", "1"]
    assert isinstance(started[0], Run)
    assert running.calls[model[1]] == 1


def test_converting_runs_the_network_four_times():
    """To find its calls, as it is, compared site by site, and converted."""
    runs = []

    class Counted(Net):
        def forward(self, x):
            runs.append(x)
            return super().forward(x)

    convert(Counted(), inputs=X)
    assert len(runs) == 4


def test_running_figures_of_a_norm_are_put_back():
    """Torch writes them without counting it, here also in evaluation."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("var", torch.ones(6))
            self.register_buffer("few", torch.eye(3).to_sparse())

        def forward(self, x):
            return F.batch_norm(x, self.mean, self.var, training=True).relu()

    model = Norm()
    with evaluating(model):
        model(X)
        assert model.mean.any()
    assert not model.mean.any()
    assert torch.equal(model.var, torch.ones(6))


def test_a_gate_of_the_library_is_a_site_as_it_stands():
    model = nn.Sequential(Activation("silu"), nn.ReLU())
    found = visits(model, kind_of=lambda run: "gate" if is_gate(run.module) else None)
    assert [visit.name for visit, _, _ in found] == ["0", "1:relu#0"]
