"""What an optimiser is given, and that no gate is decayed; the family guard."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating import Activation
from threshold_gating.taxonomy import family
from threshold_gating.training.families import family_penalty, left_family, project_families_
from threshold_gating.training.groups import check_decay, gate_parameters, param_groups


class Net(nn.Module):
    """One of each: tier A, W, S, general, recurrent, a norm and torch's own layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.act = Activation("silu", share="channel", channels=6, axis=-1, train=("tau", "theta"))
        self.wide = tg.Linear(6, 6)
        self.each = tg.Linear(6, 6, tier="S", train=("tau", "theta", "c"))
        self.free = tg.Linear(6, 6, tier="general")
        self.lstm = tg.LSTM(6, 6, train=("tau", "theta"))
        self.frozen = Activation("relu")
        self.head = nn.Linear(6, 3)

    def forward(self, x, labels=None):
        y = self.free(self.each(self.wide(self.act(self.norm(self.first(x))))))
        logits = self.head(self.frozen(self.lstm(y.unsqueeze(1))[0].squeeze(1)))
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "y": logits}


GATES = {
    *("act.rho", "act.dtheta", "wide.gate.rho", "wide.gate.dtheta", "each.c", "each.gate.rho"),
    *("each.gate.dtheta", "free.gate.rho", "free.gate.dtheta"),
    *("lstm.gate_rho_l0", "lstm.gate_dtheta_l0"),
}
WEIGHTS = {
    *("first.weight", "wide.weight", "each.weight", "free.weight", "free.const"),
    *("lstm.weight_ih_l0", "lstm.weight_hh_l0", "head.weight"),
}


def named(groups):
    return {g["name"]: set(g["param_names"]) for g in groups}


def test_gates_are_found_in_every_tier_and_constants_of_synapses_are_weights():
    assert set(gate_parameters(Net())) == GATES


def test_each_parameter_is_in_one_group():
    net = Net()
    groups = param_groups(net, 0.1, gate_lr_scale=0.25, weight_decay=0.05)
    ids = [id(p) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted(map(id, net.parameters()))
    everything = {name for name, _ in net.named_parameters()}
    assert named(groups) == {
        "weights": WEIGHTS,
        "biases": everything - GATES - WEIGHTS,
        "gates": GATES,
    }
    own = dict(net.named_parameters())
    assert all(
        own[n] is p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True)
    )
    rates = {g["name"]: (g["lr"], g["weight_decay"]) for g in groups}
    assert rates == {"weights": (0.1, 0.05), "biases": (0.1, 0.0), "gates": (0.025, 0.0)}


def test_frozen_parameters_are_left_out_and_shared_ones_are_there_once():
    act = Activation("silu", train="tau")
    net = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)
    net[2].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    assert named(param_groups(net, 0.1)) == {
        "weights": {"0.weight"},
        "biases": {"2.bias"},
        "gates": {"1.rho"},
    }
    act.requires_grad_(False)
    assert set(gate_parameters(net)) == {"1.rho"}
    assert "gates" not in named(param_groups(net, 0.1))
    assert check_decay(torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1), net) == []


def test_what_a_model_lists_itself_is_not_decayed():
    class Listed(nn.Linear):
        def no_weight_decay(self):
            return {"weight"}

    assert named(param_groups(Listed(2, 2), 0.1)) == {"biases": {"weight", "bias"}}


def test_a_negative_rate_is_refused():
    with pytest.raises(ValueError, match=r"must not be negative; got 0.1, -1.0, 0.0"):
        param_groups(Net(), 0.1, gate_lr_scale=-1.0)


OPTIMIZERS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_without_gradient_moves_what_is_decayed_and_nothing_else(kind):
    net = Net()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
        with torch.no_grad():
            p.add_(1.0)
    before = {n: p.clone() for n, p in net.named_parameters()}
    kind(param_groups(net, 0.1, weight_decay=0.5)).step()
    moved = {n for n, p in net.named_parameters() if not torch.equal(p, before[n])}
    assert moved == WEIGHTS


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Rprop, torch.optim.SparseAdam])
def test_an_optimiser_without_decay_decays_no_gate(kind):
    net = Net()
    assert check_decay(kind(list(net.parameters())), net) == []


def test_a_decayed_gate_and_a_forgotten_one_are_named():
    net = Net()
    assert check_decay(torch.optim.AdamW(param_groups(net, 0.1, weight_decay=0.1)), net) == []
    assert check_decay(param_groups(net, 0.1, weight_decay=0.1), net) == []
    assert check_decay(torch.optim.SGD(net.parameters(), 0.1), net) == []
    with pytest.warns(UserWarning, match=r"gate parameters are decayed: act.rho, act.dtheta, "):
        assert set(check_decay(torch.optim.AdamW(net.parameters()), net)) == GATES
    rest = [p for p in net.parameters() if p is not net.act.rho]
    with pytest.warns(UserWarning, match=r"are decayed: act.rho; param_groups\(model, lr"):
        check_decay([{"params": net.act.rho}, {"params": rest, "weight_decay": 0}], net)
    few = [p for n, p in net.named_parameters() if n != "each.c"]
    with pytest.warns(UserWarning, match=r"gate parameters are in no group: each.c;"):
        assert check_decay(torch.optim.SGD(few, 0.1), net) == ["each.c"]


# transformers and accelerate warn about themselves
@pytest.mark.filterwarnings("default")
def test_the_trainer_of_transformers_takes_the_groups_and_its_own_optimiser_is_caught(tmp_path):
    from transformers import Trainer, TrainingArguments

    net = Net()
    x = torch.randn(32, 4)
    data = [{"x": v, "labels": int(v[0] > 0)} for v in x]
    args = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=16, weight_decay=0.1, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    own = Trainer(net, args, train_dataset=data)
    with pytest.warns(UserWarning, match="gate parameters are decayed: act.rho, "):
        check_decay(own.create_optimizer(), net)

    before = {n: p.clone() for n, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(param_groups(net, 1e-2, gate_lr_scale=4, weight_decay=0.1))
    trainer = Trainer(net, args, train_dataset=data, optimizers=(optimizer, None))
    result = trainer.train()
    assert result.global_step == 6
    assert check_decay(trainer.optimizer, net) == []
    still = {n for n, p in net.named_parameters() if torch.equal(p, before[n])}
    assert still == set()


def learned(key):
    """Everything that such a gate can learn, in four channels."""
    soft = () if tg.TAXONOMY[key].hard else ("tau",)
    return Activation(key, share="channel", channels=4, train=(*soft, "theta", "s", "c"))


# start, slopes of channel 2 that leave its family, and the family they lead to
DEPARTURES = [
    ("sigmoid", [0.0, 0.1], "multiplicative"),
    ("tanh", [-0.1, 0.0], "multiplicative"),
    ("hardtanh", [0.2, 1.0, 0.0], "multiplicative"),
    ("hardtanh", [0.0, 1e-4, 0.0], "constant"),
    ("relu6_clamp", [0.0, 0.0], "constant"),
    ("silu", [0.0, 5e-4], "constant"),
    ("relu", [0.0, 0.0], "constant"),
    ("mish", [0.0, 1.0, 0.0], "saturating"),
]


@pytest.fixture(params=DEPARTURES, ids=lambda d: f"{d[0]} to {d[2]}")
def departed(request):
    key, slopes, word = request.param
    act = learned(key)
    with torch.no_grad():
        act.s[:, 2] = torch.tensor(slopes)
    assert family(act, tol=1e-3)[2] == word != family(act.init)
    return act


def test_a_channel_that_left_is_reported_and_put_back(departed):
    net = nn.Sequential(nn.Identity(), departed)
    others = departed.s[:, [0, 1, 3]].clone()
    assert left_family(net) == {"1": [2]}
    assert project_families_(net) == {"1": [2]}
    assert family(departed, tol=1e-3) == [family(departed.init)] * 4
    assert left_family(net) == {} == project_families_(net)
    assert torch.equal(departed.s[:, [0, 1, 3]], others)


def test_the_penalty_leads_back_and_leaves_those_at_home_alone(departed):
    optimizer = torch.optim.SGD([departed.s], lr=0.25)
    first = family_penalty(departed)
    assert first > 0
    others = departed.s[:, [0, 1, 3]].clone()
    for _ in range(60):  # the distance to the family halves at least in each step
        optimizer.zero_grad()
        family_penalty(departed).backward()
        optimizer.step()
    assert left_family(departed, tol=1.01e-3) == {}
    assert torch.equal(departed.s[:, [0, 1, 3]], others)


@pytest.mark.parametrize("key", ["sigmoid", "tanh", "hardtanh", "silu", "gelu", "leaky_relu"])
def test_a_start_is_in_its_own_family_whatever_tau_and_theta_and_c_become(key):
    act = learned(key)
    with torch.no_grad():
        for name, p in act.named_parameters():
            if name != "s":
                p.add_(torch.randn_like(p))
    assert left_family(act) == {}
    assert family_penalty(act) == 0


def test_a_recurrent_layer_with_free_branches_is_guarded():
    net = nn.ModuleDict({"rnn": tg.LSTM(3, 4, num_layers=2, train=("tau",), family="free")})
    with torch.no_grad():
        net["rnn"].gate_s_l1[2, 0, 3] = 0.5
    assert left_family(net) == {"rnn.g_l1": [3]}
    family_penalty(net).backward()
    assert net["rnn"].gate_s_l1.grad.count_nonzero() == 1
    assert project_families_(net) == {"rnn.g_l1": [3]}
    assert net["rnn"].gate_s_l1.abs().max() == 0


def test_the_slopes_that_a_recurrent_call_learns_are_guarded_as_those_of_a_layer():
    plain, x = nn.Sequential(nn.LSTM(3, 4, num_layers=2)), torch.randn(2, 5, 3)
    net = tg.convert(plain, inputs=x, train=("s",), share="channel")
    slopes = net[0].tg_lstm_0_s  # [layers, gates, branches, units]
    with torch.no_grad():
        slopes[1, 2, 0, 3] = 0.5
    assert left_family(net) == {"0:lstm#0.g_1": [3]}
    assert tg.training.family_report(net).sites["0:lstm#0.g_1"][2] == [3]
    family_penalty(net).backward()
    assert slopes.grad.count_nonzero() == 1
    assert project_families_(net) == {"0:lstm#0.g_1": [3]}
    assert slopes.abs().max() == 0


def test_nothing_that_can_leave_costs_nothing():
    assert family_penalty(nn.Sequential(Activation("silu", train="tau"), nn.Linear(2, 2))) == 0


def test_the_family_report_says_where_gates_started_and_where_they_are():
    model = nn.Sequential(
        tg.Activation("silu", share="channel", channels=3, train=("s",)),
        tg.LSTM(3, 2, train="tau"),
    )
    with torch.no_grad():
        model[0].s[:, 1] = 0.0
    report = tg.training.family_report(model)
    start, now, left = report.sites["0"]
    assert (start, now, left) == ("multiplicative", {"multiplicative": 2, "constant": 1}, [1])
    assert report.sites["1.i_l0"] == ("constant", {"constant": 2}, [])
    assert str(report).splitlines()[0] == (
        "0: multiplicative at the start; now 2 multiplicative, 1 constant; left: 1"
    )
    assert report.to_dict()["0"] == {"start": start, "now": now, "left": left}
