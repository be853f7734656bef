"""The generator of random networks: what it finds today is nothing, and it does find.

`make fuzz` runs many more; the seeds here are fixed, so that a failure is the same for everyone.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import threshold_gating as tg
from tests.fuzz import oracle
from tests.fuzz.__main__ import reduced
from tests.fuzz.cases import CASES, MAY_BE_REFUSED
from tests.fuzz.check import ALL, FAST, Trial, _is_torchs, _keeping, check
from tests.fuzz.network import Made, Network, draw, shrunk, text
from tests.fuzz.parts import KINDS, Part
from tests.fuzz.printing import program
from tests.fuzz.workers import heavy
from threshold_gating.conversion import apply

RELU = Network((Part("module", (("act", "relu"), ("over", False))),))
TWO = Network(
    (
        Part("linear", (("gain", 2.0), ("norm", ""))),
        Part(
            "residual",
            (("times", 2),),
            (Part("call", (("act", "tanh"), ("which", 1), ("over", False))),),
        ),
        Part("module", (("act", "relu"), ("over", True))),
    ),
    dtype="double",
    second="grid",
)

LEARNED = (9, 19, 30, 33, 40, 52, 62, 77, 92, 115)


def told(trial):
    """What failed, with a program for each."""
    return "\n".join(f"{program(trial.network, f)}\n{f.message}" for f in trial.failures)


@pytest.mark.parametrize("name", CASES)
def test_what_was_wrong_once_is_not_wrong_again(name):
    graphs = {way for way in ("export", "compile") if way in name}
    trial = check(CASES[name], FAST | graphs)
    assert not trial.failures, told(trial)
    assert not trial.refusal or name in MAY_BE_REFUSED


@pytest.mark.parametrize("start", range(0, 20, 10))
def test_random_networks_agree_or_are_refused(start):
    for seed in range(start, start + 10):
        trial = check(draw(seed), FAST)
        assert not trial.failures, f"seed {seed}\n{told(trial)}"


# Seeds of networks whose gates learn: modules and calls, every sharing, hard and soft.
@pytest.mark.parametrize("seed", LEARNED)
def test_random_networks_whose_gates_learn_agree_or_are_refused(seed):
    network = draw(seed)
    assert network.train
    trial = check(network, FAST)
    assert not trial.failures, f"seed {seed}\n{told(trial)}"
    assert hasattr(trial, "gated")


@pytest.mark.compile
@pytest.mark.parametrize("seed", [1006, 1007])
def test_random_networks_agree_compiled_and_exported(seed):
    trial = check(draw(seed), ALL)
    assert not trial.failures, f"seed {seed}\n{told(trial)}"


# Small ones: Inductor takes seconds for each.
@pytest.mark.compile
@pytest.mark.parametrize("kind", ["module", "call", "overwritten", "attention", "transformed"])
def test_inductor_agrees_on_one_network_of_a_kind(kind):
    options = tuple((name, choices[0]) for name, choices in KINDS[kind].options.items())
    trial = check(Network((Part(kind, options),)), frozenset({"inductor"}))
    assert not trial.failures, told(trial)


def test_a_seed_is_one_network_and_one_text():
    assert draw(7) == draw(7)
    assert text(draw(7))[0] == text(draw(7))[0]
    assert len({text(draw(seed))[0] for seed in range(50)}) == 50


def test_every_kind_of_part_is_drawn():
    def held(parts):
        return {p.kind for p in parts}.union(*(held(p.inner) for p in parts))

    assert set().union(*(held(draw(seed).parts) for seed in range(400))) == set(KINDS)


def test_two_of_a_hundred_are_compiled_by_inductor():
    assert sum("inductor" in heavy(seed) for seed in range(1000)) == 20


@pytest.mark.parametrize("key", tg.TAXONOMY)
def test_the_oracle_has_the_formula_of_the_record(key):
    t = tg.TAXONOMY[key]
    x = torch.cat([torch.linspace(-9, 9, 3001), torch.tensor(t.theta)]).double()
    torch.testing.assert_close(oracle.evaluated(t, x), t(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("key", "f"),
    [
        ("softplus:2.0", lambda x: F.softplus(x, 2.0)),
        ("celu:0.5", lambda x: F.celu(x, 0.5)),
        ("logsigmoid", F.logsigmoid),
    ],
)
def test_the_oracle_knows_parameters(key, f):
    x = torch.linspace(-9, 9, 3001).double()
    name = key.partition(":")[0]
    # the row's own error over the line, for these parameters at most that
    assert (oracle.gated(key, x) - f(x)).abs().max() <= tg.taxonomy.ROWS[name].sup * 1.005


# ---- the tester, tried on conversions that are wrong on purpose


@pytest.fixture
def unchecked(monkeypatch):
    """convert without its certificate, which would find what is wrong here."""
    monkeypatch.setattr(apply, "_certify", lambda *args, **kwargs: None)


def stages(network, ways=FAST):
    return {failure.stage for failure in check(network, ways).failures}


def test_a_wrong_instance_is_found(monkeypatch):
    right = tg.convert

    def wrong(model, *args, **kwargs):
        gated = right(model, *args, **kwargs)
        for name, _ in list(gated.named_children()):
            setattr(gated, name, tg.Activation(tg.taxonomy.leaky_relu(1e-3)))
        return gated

    monkeypatch.setattr(tg, "convert", wrong)
    assert "reference value" in stages(RELU)


def test_a_wrong_gradient_is_found(monkeypatch):
    right = tg.Activation.forward

    def wrong(self, x, *more):
        y = right(self, x, *more)
        return y + 1e-3 * (x - x.detach())

    monkeypatch.setattr(tg.Activation, "forward", wrong)
    assert stages(RELU) & {"reference gradient", "auto gradient"}


def test_a_backend_that_is_wrong_alone_is_found(monkeypatch):
    right = tg.Activation.forward

    def wrong(self, x, *more):
        return right(self, x, *more) * (1 + 1e-3 * (tg.kernels.backend() == "auto"))

    monkeypatch.setattr(tg.Activation, "forward", wrong)
    found = stages(RELU)
    assert "auto value" in found
    assert "reference value" not in found


def test_a_copy_that_lost_its_gates_is_found(monkeypatch):
    monkeypatch.setattr(
        tg.Activation, "__deepcopy__", lambda self, memo: torch.nn.ELU(), raising=False
    )
    assert "deepcopy differs" in stages(RELU)


def test_an_original_that_convert_changed_is_found(monkeypatch):
    right = tg.convert

    def wrong(model, *args, **kwargs):
        gated = right(model, *args, **kwargs)
        model.train()
        return gated

    monkeypatch.setattr(tg, "convert", wrong)
    assert "original changed" in stages(RELU)


LEARNING = replace(TWO, train=("tau", "theta", "s", "c"), share="channel", dtype="float")


@pytest.mark.parametrize(
    ("off", "stage"),
    [
        (lambda act: not act.dtheta.any(), "learned start value"),
        (lambda act: act.dtheta.any() and tg.kernels.backend() == "auto", "learned auto value"),
    ],
)
def test_a_learned_gate_that_is_wrong_at_its_start_or_later_is_found(
    monkeypatch, unchecked, off, stage
):
    right = tg.Activation.forward

    def wrong(self, x, *more):
        y = right(self, x, *more)
        return y * 1.001 if self.learned and off(self) else y

    monkeypatch.setattr(tg.Activation, "forward", wrong)
    assert stages(LEARNING) == {stage}


def test_a_copy_that_forgets_what_was_learned_is_found(monkeypatch):
    right = tg.conversion.save

    def wrong(model, folder):
        start = copy.deepcopy(model)
        with torch.no_grad():
            for gate in tg.conversion.gate_parameters(start).values():
                gate.mul_(0.5)
        right(start, folder)

    monkeypatch.setattr(tg.conversion, "save", wrong)
    assert "learned save and load differs" in stages(LEARNING)


def test_a_gradient_of_a_learned_gate_that_is_wrong_in_one_backend_is_found(monkeypatch, unchecked):
    right = tg.Activation.forward

    def wrong(self, x, *more):
        y = right(self, x, *more)
        if not self.learned or tg.kernels.backend() != "auto":
            return y
        return y + 1e-2 * (self.dtheta.sum() - self.dtheta.sum().detach())

    monkeypatch.setattr(tg.Activation, "forward", wrong)
    assert stages(LEARNING) == {"learned auto gradient"}


@pytest.mark.filterwarnings("ignore:convert")
def test_what_is_printed_of_gates_that_learn_is_a_program_that_runs(monkeypatch, capsys, unchecked):
    right = tg.Activation.forward

    def wrong(self, x, *more):
        y = right(self, x, *more)
        return 2 * y if self.learned and tg.kernels.backend() == "auto" else y

    monkeypatch.setattr(tg.Activation, "forward", wrong)
    small, failure = reduced(LEARNING, check(LEARNING, FAST).failures[0])
    assert [part.kind for part in small.parts] == ["module"]
    exec(program(small, failure), {"__name__": "printed"})
    assert capsys.readouterr().out.count("tensor") >= 2


def test_a_failure_shrinks_to_the_part_that_fails():
    def fails(network):
        return any(part.kind == "module" for part in network.parts)

    assert shrunk(TWO, fails) == RELU


def test_what_is_printed_is_a_program_that_runs(monkeypatch, capsys, unchecked):
    right = tg.Activation.forward
    monkeypatch.setattr(tg.Activation, "forward", lambda self, x, *more: 2 * right(self, x, *more))
    failure = check(TWO, FAST).failures[0]
    small, failure = reduced(TWO, failure)
    assert small.parts == RELU.parts
    exec(program(small, failure), {"__name__": "printed"})
    first, second = capsys.readouterr().out.split("tensor")[1:]
    assert first != second


def test_the_text_of_a_network_makes_the_same_network_every_time():
    made = Made(TWO)
    x = made.x("normal", 2, 1)
    assert torch.equal(made.call(made.net(), x), made.call(Made(TWO).net(), x))


# ---- crashes that pass by their words: torch's own, without a gate in sight


def _broken(x):
    torch._dynamo.graph_break()
    return torch.sigmoid(x)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at x * 1
@pytest.mark.parametrize(
    ("run", "source"),
    [
        (lambda x: checkpoint(_broken, x, use_reentrant=True), ""),
        (lambda x: F.silu(x, inplace=True), "nn.LSTM(4, 4) F.silu(x, inplace=True)"),
    ],
)
def test_a_crash_that_is_passed_over_is_torchs_own(run, source):
    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(torch.compile(run, backend="aot_eager")(x * 1).sum(), x)
    assert _is_torchs(str(caught.value), source)
    assert not _is_torchs(str(caught.value).replace("use_reentrant=True", ""), "")


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return F.silu(x + 0.1 * self.calls)


@pytest.mark.compile
def test_a_graph_that_reads_changed_buffers_again_is_torchs_own():
    def slope(**options):
        torch._dynamo.reset()
        net = torch.compile(Counting(), **options) if options else Counting()
        x = torch.linspace(-2, 2, 9).requires_grad_()
        return torch.autograd.grad(net(x).sum(), x)[0]

    want = slope()
    assert (slope(backend="aot_eager") - want).abs().max() > 1e-3
    assert torch.equal(slope(backend=_keeping), want)


def test_an_error_of_the_original_is_known_by_its_words(monkeypatch):
    trial = Trial(RELU, FAST)
    assert not trial.raises_itself(RuntimeError("no backward in half"))

    def call(net, x):
        raise RuntimeError("no backward in half")

    monkeypatch.setattr(trial.made, "call", call)
    assert trial.raises_itself(RuntimeError("no backward in half"))
    assert not trial.raises_itself(RuntimeError("another"))
