"""Owners look at the calls they make only where someone has to."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.conversion import answering


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x):
        return F.relu(self.linear(x)) + x.sigmoid()


class Outer(nn.Module):
    """An approximate call of its own around a part whose calls are exact."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return F.gelu(self.inner(x)) + F.relu(x)


@pytest.fixture
def looks(monkeypatch):
    """The plans that were looked up, one for each run of an owner."""
    plans = []
    start = answering.Answering.__init__

    def counted(self, plan, *counts):
        plans.append(sorted(plan))
        start(self, plan, *counts)

    monkeypatch.setattr(answering.Answering, "__init__", counted)
    return plans


@pytest.fixture
def x():
    return torch.randn(5, 7)


def test_an_owner_of_exact_calls_looks_at_them_only_when_the_gates_are_evaluated(looks, x):
    network = nn.Sequential(Inner())
    gated = tg.convert(network, inputs=x)
    looks.clear()
    for _ in range(3):  # the first run with such arguments shows that all calls are planned
        assert torch.equal(gated(x), network(x))
    assert looks == [["relu#0", "sigmoid#0"]]
    gated(x[:2])
    gated(x.requires_grad_())
    assert len(looks) == 3
    with tg.kernels.use("reference"):
        gated(x)
        gated(x)
    assert len(looks) == 5


def test_an_owner_that_asks_for_values_is_always_looked_at(looks, x):
    class Asks(nn.Module):
        def forward(self, x):
            return F.relu(x) if x.sum() < 1e9 else x

    gated = tg.convert(Asks(), inputs=x)
    looks.clear()
    gated(x)
    gated(x)
    assert len(looks) == 2


def test_an_owner_of_an_approximate_call_always_looks_and_its_parts_answer_for_themselves(looks, x):
    network = Outer()
    gated = tg.convert(network, inputs=x)
    looks.clear()
    y = gated(x)
    assert looks == [["gelu#0", "relu#0"], ["relu#0", "sigmoid#0"]]
    expected = tg.TAXONOMY["gelu"](network.inner(x)) + F.relu(x)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-6)  # the fast path's rounding


def test_an_audit_sees_what_runs_natively(looks, x):
    gated = tg.convert(nn.Sequential(Inner()), inputs=x)
    looks.clear()
    audit = tg.audit(gated, x)
    assert looks == [["relu#0", "sigmoid#0"]]
    assert [(site.name, site.native) for site in audit.sites] == [
        ("0:relu#0", True),
        ("0:sigmoid#0", True),
    ]
    assert not audit.left


def test_reverting_leaves_nothing_behind(x):
    network = nn.Sequential(Inner())
    before = dict(vars(network[0]))
    tg.conversion.convert_(network, inputs=x)
    assert vars(tg.conversion.revert(network)[0]).keys() == before.keys()
