"""Saving and loading: the same network bit for bit, or an error and an untouched one."""

import copy
import dataclasses
import json
import math
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating import TAXONOMY, TG, Activation, kernels
from threshold_gating.conversion import convert, convert_, revert
from threshold_gating.conversion.checkpoint import files
from threshold_gating.conversion.checkpoint.files import load_weights
from threshold_gating.conversion.checkpoint.save_load import Checkpoint, CheckpointError, load, save
from threshold_gating.nn import rnn


class Net(nn.Module):
    """A module site, an activation that may be learned, calls of several kinds, and an LSTM."""

    def __init__(self, width=4):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width)
        self.act, self.act2 = nn.GELU(), nn.SiLU()
        self.rnn, self.fc = nn.LSTM(width, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = F.leaky_relu(self.act(self.bn(self.conv(x))), 0.2)
        x = self.act2(F.softplus(x, 1.0, float("inf")))  # JSON has no infinity
        y, _ = self.rnn(x.flatten(2).permute(2, 0, 1))
        return self.fc(y[-1].sigmoid()).softmax(-1)


class Tied(nn.Module):
    """The first and the last weight are one."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed, self.act, self.head = nn.Embedding(7, 4), nn.SiLU(), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.act(self.embed(x)))


IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def fresh(seed=7, **options):
    """An unconverted network with weights of its own and BatchNorm statistics that matter."""
    torch.manual_seed(seed)
    net = Net(**options)
    net.bn.running_mean.normal_()
    net.bn.running_var.uniform_(0.5, 2)
    return net.eval()


def with_learned(net, dtype=torch.float32):
    """`act2` learned per channel, away from where it started; a part of it frozen again."""
    act = Activation("silu", share="channel", channels=4, train=("theta", "s", "c")).to(dtype)
    act.__dict__.update({k: net.act2.__dict__[k] for k in ("site", "replaced")})
    with torch.no_grad():
        for p in act.parameters():
            p.normal_(0, 0.3)
    act.dtheta.requires_grad_(False)
    net.act2 = act.train(net.training)
    return net


@pytest.fixture(scope="module")
def converted():
    """One for all: finding the sites of GELU and softplus takes a second."""
    return convert(fresh(0), inputs=IMAGE)


@pytest.fixture
def learned(converted):
    return with_learned(copy.deepcopy(converted))


def outputs(net, x=IMAGE):
    with torch.no_grad(), kernels.use("reference"):
        gated = net(x)
    return gated, net(x).detach()


def same(a, b, x=IMAGE):
    return all(torch.equal(y, z) for y, z in zip(outputs(a, x), outputs(b, x), strict=True))


def snapshot(net):
    """Everything of a network that a failed load could have changed."""
    parts = {
        name: (id(m), type(m), id(vars(m).get("tg_sites")), m.training)
        for name, m in net.named_modules()
    }
    tensors = {k: (id(t), t.requires_grad, t.detach().clone()) for k, t in net.named_parameters()}
    return parts, tensors, {k: b.clone() for k, b in net.named_buffers()}


def assert_untouched(net, before):
    parts, tensors, buffers = snapshot(net)
    assert parts == before[0]
    assert {k: v[:2] for k, v in tensors.items()} == {k: v[:2] for k, v in before[1].items()}
    for now, then in ((tensors, before[1]), (buffers, before[2])):
        assert now.keys() == then.keys()
        for k in now:
            a, b = (v if isinstance(v, torch.Tensor) else v[2] for v in (now[k], then[k]))
            assert torch.equal(a, b), k


def structure(net):
    """What stands where, by name; a gate put in by hand has a site that does not say it learns."""
    sites = {n: vars(m).get("site") for n, m in net.named_modules()}
    return {
        name: (
            isinstance(m, Activation) or type(m),
            vars(m).get("tg_sites"),
            sites[name] and dataclasses.replace(sites[name], learns=None),
        )
        for name, m in net.named_modules()
    }


def edit(directory, change):
    """Change the config on disk."""
    path = Path(directory) / "tg_config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_whole_network_comes_back_bit_for_bit(learned, tmp_path):
    assert save(learned, tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "model.safetensors",
        "tg_config.json",
    ]
    net = fresh()
    weight = net.conv.weight
    assert load(tmp_path / "a" / "b", net) is net
    assert same(net, learned)
    assert net.conv.weight is weight  # filled, not exchanged
    assert net.state_dict().keys() == learned.state_dict().keys()
    assert load(tmp_path / "a" / "b").sites.keys() == {
        *("act", "act2", ":leaky_relu#0", ":softplus#0", ":sigmoid#0", ":softmax#0", "rnn:lstm#0")
    }


def test_gates_alone_come_back_onto_the_same_weights(learned, tmp_path):
    save(learned, tmp_path, gates_only=True)
    names = safetensors.torch.load_file(tmp_path / "gates.safetensors").keys()
    assert names == {f"act2.{k}" for k in ("dtheta", "s", "c", "theta0")}
    assert not (tmp_path / "model.safetensors").exists()
    net = fresh()
    weight = net.conv.weight.clone()
    load(tmp_path, net)
    assert torch.equal(net.conv.weight, weight)
    assert same(load(tmp_path, fresh(0)), learned)


def test_frozen_gates_alone_need_no_tensors(converted, tmp_path):
    save(converted, tmp_path, gates_only=True)
    assert [p.name for p in tmp_path.iterdir()] == ["tg_config.json"]
    assert same(load(tmp_path, fresh(0)), converted)


def test_calls_that_are_answered_as_they_come_stay_so(tmp_path):
    gated = convert(fresh(0))
    save(gated, tmp_path)
    assert json.loads((tmp_path / "tg_config.json").read_text())["owners"] == [
        {"name": "", "also": [], "calls": "as they come"}
    ]
    assert same(load(tmp_path, fresh()), gated)


def test_a_call_that_was_left_alone_stays_so(tmp_path):
    net = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.ReLU())
    x = torch.randn(2, 3)
    for left in ("1:softmax#0", "2"):
        gated = convert(net, {left: None}, inputs=x)
        save(gated, tmp_path)
        back = load(tmp_path, copy.deepcopy(net))
        assert left not in load(tmp_path).sites
        assert [vars(m).get("tg_sites") for m in back] == [vars(m).get("tg_sites") for m in gated]
        assert same(back, gated, x)


def test_what_was_chosen_for_a_site_is_on_record_exactly(tmp_path):
    t = TG(1.1, 0.1 + 0.2, (0, 1 / 3), (1e-300, 2 / 7))
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Hardswish(), nn.Hardtanh(-0.1, 0.3))
    gated = convert(net, {"1": t})
    save(gated, tmp_path)
    assert load(tmp_path).sites["1"].t == t
    back = load(tmp_path, copy.deepcopy(net))
    assert [m.init for m in back[1:]] == [m.init for m in gated[1:]]
    assert same(back, gated, torch.randn(5, 3))


def test_an_activation_with_an_instance_for_each_call_comes_back(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x):
            return self.act(self.act(x) * 3)

    x = torch.randn(64)
    gated = convert(Twice(), {"act#1": "gelu_k2"}, inputs=x)
    save(gated, tmp_path)
    back = load(tmp_path, Twice())
    assert same(back, gated, x)
    assert load(tmp_path).sites["act#1"].t == TAXONOMY["gelu_k2"]
    assert isinstance(revert(back).act, nn.GELU)


def test_a_shared_module_stays_shared_and_another_sharing_is_refused(tmp_path):
    def make(shared):
        first = nn.SiLU()
        return nn.Sequential(first, nn.Linear(2, 2), first if shared else nn.SiLU())

    save(convert_(make(True)), tmp_path / "shared")
    back = load(tmp_path / "shared", make(True))
    assert isinstance(back[0], Activation)
    assert back[0] is back[2]
    save(convert_(make(False)), tmp_path / "two")
    for directory, net in (("shared", make(False)), ("two", make(True))):
        before = snapshot(net)
        with pytest.raises(CheckpointError, match=r"'0' is not shared as it was \(0") as error:
            load(tmp_path / directory, net)
        assert "in Sequential; the checkpoint is of torch.nn.modules" in str(error.value)
        assert_untouched(net, before)


def test_gates_that_are_part_of_the_network_itself_come_back(tmp_path):
    def make():
        act = Activation("silu", share="channel", channels=3, train="tau")
        return nn.Sequential(nn.Linear(3, 3), act, rnn.GRU(3, 3))

    net, x = make(), torch.randn(5, 3)
    net[2].gates["n"] = TAXONOMY["hardtanh"]
    with torch.no_grad():
        net[1].rho.normal_()
    save(net, tmp_path)
    back = make()
    rho = back[1].rho
    load(tmp_path, back)
    assert back[1].rho is rho
    assert back[2].gates == net[2].gates
    with kernels.use("reference"):
        assert torch.equal(back(x)[0], net(x)[0])
    wrong = nn.Sequential(nn.Linear(3, 3), nn.SiLU(), nn.GRU(3, 3))
    with pytest.raises(CheckpointError, match="'2' has no gates r, z, n in Sequential"):
        load(tmp_path, wrong)
    assert type(wrong[1]) is nn.SiLU


def test_the_axis_of_channels_comes_back(tmp_path):
    net = nn.Sequential(Activation("silu", share="channel", channels=4, axis=-1, train=("tau",)))
    with torch.no_grad():
        net[0].rho.normal_()
    save(net, tmp_path)
    back = load(tmp_path, nn.Sequential(nn.SiLU()))
    x = torch.randn(2, 3, 4)  # along the default axis 1 there are three
    assert back[0].axis == -1
    assert torch.equal(back(x), net(x))


def test_what_is_learned_and_what_is_trained_come_back(learned, tmp_path):
    save(learned, tmp_path)
    act = load(tmp_path, fresh()).act2
    assert act.learned == ("theta", "s", "c")
    assert (act.share, act.group, act.axis) == ("channel", (4,), 1)
    assert {k: p.requires_grad for k, p in act.named_parameters()} == {
        "s": True,
        "c": True,
        "dtheta": False,
    }
    assert load(tmp_path).trainable == ("act2.s", "act2.c")


def test_a_network_converted_in_the_same_way_keeps_its_tensors(learned, converted, tmp_path):
    save(learned, tmp_path)
    other = with_learned(copy.deepcopy(converted))
    parts = {k: id(v) for k, v in (*other.named_parameters(), *other.named_modules())}
    load(tmp_path, other)
    assert same(other, learned)
    assert {k: id(v) for k, v in (*other.named_parameters(), *other.named_modules())} == parts


def test_a_network_converted_in_another_way_becomes_as_saved(learned, converted, tmp_path):
    save(learned, tmp_path)
    for other in (copy.deepcopy(converted), convert(fresh(), {"act": "gelu_k2"})):
        assert same(load(tmp_path, other), learned)
        assert structure(other) == structure(learned)
        assert type(revert(other)) is Net
        assert [type(m) for m in other.children()] == [type(m) for m in fresh().children()]
    save(converted, tmp_path)
    assert same(load(tmp_path, with_learned(convert(fresh()))), converted)


def test_a_site_that_was_left_alone_is_put_back(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.SiLU())
    save(convert(net, {"1": None}), tmp_path)
    back = load(tmp_path, convert(net))
    assert isinstance(back[1], nn.ReLU)
    assert isinstance(back[2], Activation)


def test_calls_run_natively_after_loading_where_they_did_before(converted, tmp_path):
    save(converted, tmp_path)
    for module, other in zip(load(tmp_path, fresh()).modules(), converted.modules(), strict=True):
        for call, site in (vars(other).get("tg_sites") or {}).items():
            assert (vars(module)["tg_sites"][call].op is None) == (site.op is None), call


def test_what_was_loaded_can_be_reverted_saved_again_copied_and_trained(learned, tmp_path):
    save(learned, tmp_path / "one")
    net = load(tmp_path / "one", fresh())
    save(net, tmp_path / "two")
    texts = [(tmp_path / d / "tg_config.json").read_text() for d in ("one", "two")]
    assert texts[0] == texts[1]
    assert same(copy.deepcopy(net), learned)
    net.train()(IMAGE).square().sum().backward()
    assert net.act2.c.grad.abs().sum() > 0
    back = revert(net.eval())
    assert (type(back), type(back.act), type(back.act2)) == (Net, nn.GELU, nn.SiLU)


def test_hooks_mode_and_position_survive(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).train()
    save(convert(net), tmp_path)
    seen = []
    net[1].register_forward_hook(lambda *_: seen.append(1))
    load(tmp_path, net)(torch.ones(1, 2))
    assert seen == [1]
    assert net[1].training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_come_back_bit_for_bit(learned, dtype, tmp_path):
    gated, x = learned.to(dtype), IMAGE.to(dtype)
    save(gated, tmp_path)
    back = load(tmp_path, fresh().to(dtype))
    assert same(back, gated, x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert back.act2.c.dtype == back.act.theta0.dtype == wide


def test_another_precision_is_refused_or_cast(learned, tmp_path):
    save(copy.deepcopy(learned).bfloat16(), tmp_path)
    net = fresh()
    before = snapshot(net)
    message = r"model.safetensors: 'conv.weight' is torch.bfloat16, and torch.float32 in Net; call model.to\(torch.bfloat16\) first, or pass strict=False to cast\."
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, net)
    assert_untouched(net, before)
    cast = load(tmp_path, net, strict=False)
    assert torch.equal(cast.fc.weight, learned.fc.weight.bfloat16().float())


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    x = torch.arange(7)
    gated = convert(Tied())
    save(gated, tmp_path)
    assert list(safetensors.torch.load_file(tmp_path / "model.safetensors")) == ["embed.weight"]
    back = load(tmp_path, Tied())
    assert back.head.weight is back.embed.weight
    assert same(back, gated, x)
    assert same(load(tmp_path, Tied(tied=False)), gated, x)
    with torch.device("meta"):
        on_meta = Tied()
    load(tmp_path, on_meta)
    assert on_meta.head.weight is on_meta.embed.weight
    assert same(on_meta, gated, x)


def test_two_tensors_do_not_go_into_one(tmp_path):
    save(convert(Tied(tied=False)), tmp_path)
    net = Tied()
    before = snapshot(net)
    with pytest.raises(
        CheckpointError,
        match=r"'embed.weight' and 'head.weight' differ, and are one tensor in Tied; load it into a network of the same architecture",
    ):
        load(tmp_path, net)
    assert_untouched(net, before)


def test_overlapping_views_are_stored_each(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[0].register_buffer("part", net[0].weight.detach()[1:3])
    net[0].register_buffer("turned", net[0].weight.detach().t())
    save(convert_(net), tmp_path)
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    other[0].register_buffer("part", torch.zeros(2, 4))
    other[0].register_buffer("turned", torch.zeros(4, 4))
    load(tmp_path, other)
    assert torch.equal(other[0].part, net[0].weight[1:3])
    assert torch.equal(other[0].turned, net[0].weight.t())


def test_a_network_on_meta_gets_its_weights(learned, tmp_path):
    save(learned, tmp_path)
    with torch.device("meta"):
        net, gated = Net().eval(), convert_(Net().eval())
    for on_meta in (net, gated):
        load(tmp_path, on_meta)
        everything = [*on_meta.parameters(), *on_meta.buffers()]
        assert all(t.device.type == "cpu" for t in everything)
        assert same(on_meta, learned)
    (tmp_path / "model.safetensors").write_bytes(b"")  # the weights are no window on the file
    assert same(net, learned)


def test_meta_tensors_that_no_file_has_are_refused(tmp_path):
    def make():
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        net[0].register_buffer("angles", torch.ones(2), persistent=False)
        return net

    save(convert(make()), tmp_path)
    net = make().to("meta")
    types = [type(m) for m in net]
    with pytest.raises(
        CheckpointError,
        match=r"load: '0.angles' of Sequential is on the meta device and not in the checkpoint, so it would have no values; make the network on a real device",
    ):
        load(tmp_path, net)
    assert [type(m) for m in net] == types
    assert net[0].weight.is_meta
    with pytest.raises(
        CheckpointError, match=r"'0.weight' is on the meta device and has no values"
    ):
        save(convert(net), tmp_path)


@pytest.mark.parametrize("writer", ["torch", "safetensors"])
def test_old_checkpoints_load_into_converted_networks_and_back(converted, writer, tmp_path):
    def passed_on(net):
        if writer == "torch":
            torch.save(net.state_dict(), tmp_path / "w.pt")
            return torch.load(tmp_path / "w.pt", weights_only=True)
        safetensors.torch.save_file(net.state_dict(), tmp_path / "w.safetensors")
        return safetensors.torch.load_file(tmp_path / "w.safetensors")

    gated, plain = copy.deepcopy(converted), fresh(3)
    gated.load_state_dict(passed_on(plain), strict=True)
    again = fresh(4)
    again.load_state_dict(passed_on(gated), strict=True)
    assert torch.equal(again(IMAGE), plain(IMAGE))


def test_wrappers_of_torch_are_seen_through(tmp_path):
    net, x = nn.Sequential(nn.Linear(2, 2), nn.SiLU()), torch.randn(3, 2)
    gated = convert(net)
    save(nn.DataParallel(torch.compile(gated)), tmp_path)
    assert load(tmp_path).sites.keys() == {"1"}
    around = torch.compile(copy.deepcopy(net))
    assert load(tmp_path, around) is around
    assert same(around._orig_mod, gated, x)


def test_without_a_network_load_says_what_was_saved(converted, tmp_path):
    save(converted, tmp_path)
    saved = load(tmp_path)
    assert isinstance(saved, Checkpoint)
    assert (saved.version, saved.torch) == (tg.__version__, str(torch.__version__))
    assert saved.model == f"{__name__}.Net"
    assert saved.weights["file"] == "model.safetensors"
    gelu = saved.sites["act"]
    assert (gelu.kind, gelu.t, gelu.exact) == ("gelu", TAXONOMY["gelu"], False)
    assert gelu.sup == vars(converted.act)["site"].sup
    assert saved.sites[":softplus#0"].parameters == (1.0, float("inf"))
    with pytest.raises(AttributeError):
        saved.version = "2"


def cut(directory, name, keep):
    path = directory / name
    path.write_bytes(path.read_bytes()[:keep])


def rewritten(directory, change):
    """Other tensors under the same name, and a config that agrees: a consistent wrong pair."""
    path = directory / "model.safetensors"
    tensors = change(safetensors.torch.load_file(path))
    about = files.write_tensors(tensors, path)
    edit(directory, lambda config: config["weights"].update(about))


def flipped(directory):
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def without(tensors, name):
    return {k: t for k, t in tensors.items() if k != name}


def of_calls(config):
    return config["owners"][0]["calls"]


AGAIN = "copy it again or save again."
SAME = (
    f"in Net; the checkpoint is of {__name__}.Net, load it into a network of the same architecture."
)
# what is done to a good checkpoint, what load says of it
DAMAGES = {
    "cut tensors": (
        lambda d: cut(d, "model.safetensors", 300),
        "model.safetensors is truncated, 300 of SIZE bytes; " + AGAIN,
    ),
    "a flipped bit": (
        flipped,
        "model.safetensors is not the file that tg_config.json was written with (sha256 differs), so it is damaged or belongs to another network; copy both again, or pass strict=False to take it as it is.",
    ),
    "no tensors": (
        lambda d: (d / "model.safetensors").unlink(),
        "model.safetensors is missing, and tg_config.json was written with it; copy the whole directory.",
    ),
    "cut config": (
        lambda d: cut(d, "tg_config.json", 30),
        "tg_config.json is not valid JSON, so it is truncated or damaged (Unterminated string starting at: line 3 column 2 (char 17)); "
        + AGAIN,
    ),
    "empty config": (
        lambda d: cut(d, "tg_config.json", 0),
        "tg_config.json is not valid JSON, so it is truncated or damaged (Expecting value: line 1 column 1 (char 0)); "
        + AGAIN,
    ),
    "no config": (
        lambda d: (d / "tg_config.json").unlink(),
        "tg_config.json cannot be read (No such file or directory); give the directory that save() wrote.",
    ),
    "a config that is a list": (
        lambda d: (d / "tg_config.json").write_text("[]"),
        "tg_config.json is not a config of gates; give the directory that save() wrote.",
    ),
    "a newer schema": (
        lambda d: edit(d, lambda c: c.update(schema=3, threshold_gating="9.1")),
        f"tg_config.json was written by version 9.1 (schema 3); this is {tg.__version__} (schema 2); update threshold-gating.",
    ),
    "no schema": (
        lambda d: edit(d, lambda c: c.pop("schema")),
        "tg_config.json: there is no 'schema'. Save the network again.",
    ),
    "a strange schema": (
        lambda d: edit(d, lambda c: c.update(schema="x")),
        "tg_config.json: the schema must be a whole number from 1 on; got 'x'.",
    ),
    "an unknown module": (
        lambda d: edit(d, lambda c: c["modules"][0].update(name="layer.act")),
        "tg_config.json: there is no 'layer.act' " + SAME,
    ),
    "an unknown owner": (
        lambda d: edit(d, lambda c: c["owners"][1].update(name="rnn2")),
        "tg_config.json: there is no 'rnn2' " + SAME,
    ),
    "a site that is no activation": (
        lambda d: edit(d, lambda c: c["modules"][0].update(name="conv")),
        "tg_config.json: 'conv' cannot become an activation: it is the whole or has parts " + SAME,
    ),
    "a bad tau": (
        lambda d: edit(d, lambda c: c["modules"][0]["calls"][0]["instance"].update(tau=-1)),
        "tg_config.json: site 'act': TG: tau must be positive (inf for a hard gate); got -1. Save the network again.",
    ),
    "a bad tau of a call": (
        lambda d: edit(d, lambda c: of_calls(c)["sigmoid#0"]["instance"].update(tau="x")),
        "tg_config.json: site ':sigmoid#0': TG: tau is a number or a tuple of numbers; got str. Parameters per channel belong in an Activation. Save the network again.",
    ),
    "an unknown kind of call": (
        lambda d: edit(d, lambda c: of_calls(c)["softmax#0"].update(kind="sparsemax")),
        "tg_config.json: site ':softmax#0': calls of the kind 'sparsemax' are not known here. Save the network again.",
    ),
    "an impossible activation": (
        lambda d: edit(d, lambda c: c["modules"][1]["calls"][0]["activation"].update(share="pair")),
        "tg_config.json: site 'act2': Activation: share is one of net, layer, channel, head, neuron; got 'pair'. Save the network again.",
    ),
    "half a site": (
        lambda d: edit(d, lambda c: c["modules"][1]["calls"][0].pop("kind")),
        "tg_config.json: site 'act2': there is no 'kind'. Save the network again.",
    ),
    "a wrong shape": (
        lambda d: rewritten(d, lambda t: {**t, "fc.weight": torch.ones(3, 6)}),
        "model.safetensors: 'fc.weight' is (3, 6), and (3, 5) in Net; load it into a network of the same sizes.",
    ),
    "a wrong shape of a gate": (
        lambda d: rewritten(d, lambda t: {**t, "act2.s": torch.ones(2, 5)}),
        "model.safetensors: 'act2.s' is (2, 5), and (2, 4) in Net; load it into a network of the same sizes.",
    ),
    "a missing tensor": (
        lambda d: rewritten(d, lambda t: without(t, "fc.bias")),
        "model.safetensors: no tensor 'fc.bias', which Net has (1 missing); load it into a network of the same architecture, or pass strict=False.",
    ),
    "a missing gate": (
        lambda d: rewritten(d, lambda t: without(t, "act2.c")),
        "model.safetensors: no tensor 'act2.c', which Net has (1 missing); load it into a network of the same architecture, or pass strict=False.",
    ),
    "a tensor too many": (
        lambda d: rewritten(d, lambda t: {**t, "fc.scale": torch.ones(1)}),
        "model.safetensors: no 'fc.scale' in Net (1 without a place); load it into a network of the same architecture, or pass strict=False.",
    ),
    "tensors from elsewhere": (
        lambda d: edit(d, lambda c: c["weights"].update(file="../model.safetensors")),
        "tg_config.json: the file of tensors must be model.safetensors, gates.safetensors or tg_gates.safetensors, in the same directory; got '../model.safetensors'. Save the network again.",
    ),
    "an infinite number": (
        lambda d: edit(d, lambda c: c["modules"][0]["calls"][0]["instance"].update(tau=math.inf)),
        "tg_config.json is not valid JSON, so it is truncated or damaged (Infinity is not a finite number); "
        + AGAIN,
    ),
    "more channels than memory": (
        lambda d: edit(
            d, lambda c: c["modules"][1]["calls"][0]["activation"].update(channels=10**12)
        ),
        "tg_config.json: site 'act2': 'channels' has to be at most 67,108,864 in all; got [1000000000000]. Save the network again.",
    ),
    "a site twice": (
        lambda d: edit(d, lambda c: c["modules"].append(c["modules"][0])),
        "tg_config.json: 'act' is on record twice. Save the network again.",
    ),
    "a site without calls": (
        lambda d: edit(d, lambda c: c["modules"][0].update(calls=[])),
        "tg_config.json: site 'act': it has no call with an instance. Save the network again.",
    ),
    "a number for a text": (
        lambda d: edit(d, lambda c: c["modules"][0].update(also=[3])),
        "tg_config.json: 'also' has to be a list of strings; 3 is not a string. Save the network again.",
    ),
    "an alias of nothing": (
        lambda d: edit(d, lambda c: c["aliases"].update({"a": "b"})),
        "model.safetensors: there is no 'b'. Save the network again.",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_network_untouched(learned, damage, tmp_path):
    save(learned, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    spoil, message = DAMAGES[damage]
    spoil(tmp_path)
    for net in (fresh(), convert(fresh(), {"act": "gelu_k2"})):
        before, said = snapshot(net), outputs(net)
        with pytest.raises(CheckpointError) as error:
            load(tmp_path, net)
        assert str(error.value) == f"{tmp_path}/{message}".replace("SIZE", str(size))
        assert_untouched(net, before)
        assert all(torch.equal(a, b) for a, b in zip(outputs(net), said, strict=True))


STRANGE = [
    *(None, True, 0, -1, 10**9, 10**30, 1e308, 5e-324, math.nan, math.inf),
    *("", "x", "inf", "../x", "\0", "a" * 5000, [], [[]], [None], ["x"], {}, {"a": {}}),
]


def places_in(data, at=()):
    """Where something stands in JSON data, as keys from the root on."""
    if at:
        yield at
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield from places_in(data[key], (*at, key))


def altered(draw, data):
    """JSON data with something taken out, doubled, or made another thing."""
    data = copy.deepcopy(data)
    *way, last = draw.choice(list(places_in(data)))
    parent = data
    for key in way:
        parent = parent[key]
    act = draw.choice(["remove", "double", "rename", "set", "set", "set"])
    if act == "remove":
        del parent[last]
    elif act == "double" and isinstance(parent, list):
        parent.append(parent[last])
    elif act == "rename" and isinstance(parent, dict):
        parent[draw.choice(["x", "name"])] = parent.pop(last)
    else:
        parent[last] = draw.choice(STRANGE)
    return data


def scribbled(draw, content):
    """Bytes cut short, with some of them changed, or nested out of all bounds."""
    content = bytearray(content)
    for _ in range(draw.randrange(4)):
        content[draw.randrange(min(len(content), draw.choice([8, 300, 10**9])))] = draw.randrange(
            256
        )
    at = draw.randrange(len(content))
    nested = b'{"a":[' * draw.choice([0, 0, 40, 20_000])
    return bytes(content[:at] + nested + (content[at:] if draw.random() < 0.7 else b""))


@pytest.mark.parametrize("what", ["values", "tg_config.json", "model.safetensors"])
def test_whatever_the_damage_a_load_ends_in_a_network_or_a_checkpoint_error(
    learned, what, tmp_path
):
    save(learned, tmp_path)
    config, path = tmp_path / "tg_config.json", tmp_path / what
    good = json.loads(config.read_text())
    content = config.read_bytes() if what == "values" else path.read_bytes()
    draw, net, said = random.Random(5), fresh(), []
    before = snapshot(net)
    for trial in range(120):
        if what == "values":
            config.write_text(json.dumps(altered(draw, good)))
        else:
            path.write_bytes(scribbled(draw, content))
        try:
            load(tmp_path, net, strict=trial % 2 == 0)
            net = fresh()
            before = snapshot(net)
        except CheckpointError as error:
            said.append(str(error))
            assert_untouched(net, before)
    assert len(said) > 80  # what is harmless (another version, an error bound) loads
    assert not any("\n" in message for message in said)


def test_every_sharing_comes_back(tmp_path):
    shares = {"net": None, "layer": None, "channel": 4, "head": 4, "neuron": (4, 3)}
    for share, channels in shares.items():
        act = Activation("silu", share=share, channels=channels, train=("tau", "theta"))
        net, x = nn.Sequential(nn.Conv1d(4, 4, 1), act), torch.randn(2, 4, 3)
        with torch.no_grad():
            act.rho.normal_()
        save(net, tmp_path / share)
        other = nn.Sequential(nn.Conv1d(4, 4, 1), nn.SiLU())
        assert load(tmp_path / share, other)[1].share == share
        assert torch.equal(other(x), net(x)), share


def saving(directory, seed):
    """A process that saves one network over and over; tensors and gates tell which."""
    code = f"""
import torch
from torch import nn
from threshold_gating.conversion import convert, save
net = nn.Sequential(nn.Linear(64, 64), nn.GELU())
nn.init.constant_(net[0].weight, {seed})
gated = convert(net, {{"1": "gelu_k{seed}"}})
while True: save(gated, {str(directory)!r})
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE)


def test_saves_into_one_directory_never_leave_or_show_a_mix_even_if_killed(tmp_path):
    """Two processes save over each other and are killed at it; every read is one of the two."""
    processes = [saving(tmp_path, seed) for seed in (2, 3)]
    end, seen = time.monotonic() + 60, []
    try:
        while len(set(seen)) < 2 or len(seen) < 60:
            assert time.monotonic() < end, seen
            if (tmp_path / "tg_config.json").exists():
                net = load(tmp_path, nn.Sequential(nn.Linear(64, 64), nn.GELU()))
                seen.append(net[1].init.K)
                assert (net[0].weight == seen[-1]).all()
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            assert process.communicate()[1] == b""
    net = load(tmp_path, nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    assert (net[0].weight == net[1].init.K).all()
    (tmp_path / "model.safetensors.77-aa.tmp").touch()  # as of one that was killed while it wrote
    (tmp_path / "notes.tmp").touch()
    save(net, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.safetensors", "tg_config.json", "notes.tmp"}


def test_a_directory_that_cannot_be_locked_is_told_of_and_saved_into(
    converted, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with pytest.warns(UserWarning, match="cannot be locked .* no other process saves into it"):
        save(converted, tmp_path)
    assert same(load(tmp_path, fresh()), converted)


def test_a_failure_at_the_very_end_leaves_the_network_untouched(learned, monkeypatch, tmp_path):
    save(learned, tmp_path)

    def fails(*_, **__):
        raise MemoryError

    for net in (fresh(), convert(fresh(), {"act": "gelu_k2"}), copy.deepcopy(learned)):
        before = snapshot(net)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "load_state_dict", fails)
            with pytest.raises(MemoryError):
                load(tmp_path, net)
        assert_untouched(net, before)
        assert same(load(tmp_path, net), learned)


def test_not_strict_takes_what_fits(learned, tmp_path):
    save(learned, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = without(safetensors.torch.load_file(path), "fc.bias")
    safetensors.torch.save_file({**tensors, "more": torch.ones(1)}, path)
    net = fresh()
    bias = net.fc.bias.clone()
    load(tmp_path, net, strict=False)
    assert torch.equal(net.fc.bias, bias)
    assert torch.equal(net.fc.weight, learned.fc.weight)
    cut(tmp_path, "model.safetensors", 300)
    with pytest.raises(
        CheckpointError, match=r"is not a complete safetensors file \(.+\); copy it again"
    ):
        load(tmp_path, fresh(), strict=False)


def test_another_architecture_is_refused(converted, tmp_path):
    save(converted, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"'conv.weight' is \(4, 3, 3, 3\), and \(6, 3, 3, 3\)"
    ):
        load(tmp_path, fresh(width=6))
    with pytest.raises(CheckpointError, match="there is no 'act' in Sequential; the checkpoint is"):
        load(tmp_path, nn.Sequential(nn.ReLU()))
    own = fresh()
    own.bn = nn.Sequential(own.bn, Activation("relu"))
    with pytest.raises(
        CheckpointError,
        match=r"'bn.1' has gates of its own, and the checkpoint has no gates for it",
    ):
        load(tmp_path, own)


def test_a_network_without_gates_is_not_saved(tmp_path):
    with pytest.raises(CheckpointError) as error:
        save(fresh(), tmp_path / "out")
    said = "save: no gate in Net; convert it first, or save its state_dict."
    assert str(error.value) == said
    assert not (tmp_path / "out").exists()


def test_state_that_is_no_tensor_is_not_saved(tmp_path):
    class Odd(nn.ReLU):
        def get_extra_state(self):
            return {"seen": 3}

    net = convert(nn.Sequential(nn.ReLU(), nn.Sequential(Odd(), nn.Linear(1, 1))), {"0": "relu"})
    net[1] = nn.Sequential(Odd())
    with pytest.raises(
        CheckpointError, match=r"'1.0._extra_state' in the state_dict is not a tensor"
    ):
        save(net, tmp_path / "out")


@pytest.mark.parametrize("broken", ["write", 1, 2, 3])
@pytest.mark.parametrize("gates_only", [False, True])
def test_a_save_that_breaks_off_leaves_the_old_pair(
    learned, broken, gates_only, monkeypatch, tmp_path
):
    save(learned, tmp_path, gates_only=gates_only)
    other = copy.deepcopy(learned)
    with torch.no_grad():
        other.act2.c += 1
    replace, calls = os.replace, []

    def breaks(*args):
        calls.append(args)
        if len(calls) == broken:
            raise OSError("pulled")
        replace(*args)

    def cannot(tensors, path):
        path.write_bytes(b"half")
        raise OSError("full")

    for _ in range(3):  # breaking off again must not lose what the first time set aside
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(
                *(
                    (files, "write_tensors", cannot)
                    if broken == "write"
                    else (os, "replace", breaks)
                )
            )
            with pytest.raises(OSError, match=r"pulled|full"):
                save(other, tmp_path, gates_only=gates_only)
        assert same(load(tmp_path, fresh(0)), learned)
        assert not list(tmp_path.glob("*.tmp"))
        if broken == 3:
            broken = 2  # the old tensors are set aside already
    save(other, tmp_path, gates_only=gates_only)
    assert same(load(tmp_path, fresh(0)), other)
    assert len(list(tmp_path.iterdir())) == 2


def test_saving_over_another_kind_of_checkpoint_leaves_one(learned, converted, tmp_path):
    save(learned, tmp_path, gates_only=True)
    save(learned, tmp_path)
    assert not (tmp_path / "gates.safetensors").exists()
    assert same(load(tmp_path, fresh()), learned)
    kept = (tmp_path / "model.safetensors").read_bytes()
    save(converted, tmp_path, gates_only=True)
    assert (tmp_path / "model.safetensors").read_bytes() == kept  # it may be the original's
    assert same(load(tmp_path, fresh(0)), converted)


def test_the_files_are_as_readable_as_others(converted, tmp_path):
    save(converted, tmp_path)
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_equal_networks_make_equal_files(learned, tmp_path):
    save(learned, tmp_path / "a")
    save(copy.deepcopy(learned), tmp_path / "b")
    for name in ("tg_config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_without_safetensors_the_error_names_the_extra(tmp_path):
    code = f"""
import sys
sys.modules["safetensors"] = None
import torch
from threshold_gating.conversion import convert
from threshold_gating.conversion.checkpoint.save_load import save
net = convert(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()))
save(net, {str(tmp_path)!r}, gates_only=True)
try: save(net, {str(tmp_path)!r})
except ImportError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = "checkpoints need the package safetensors: pip install 'threshold-gating[text]'."
    assert done.stdout.strip() == said


WEIGHTS = {"a.weight": torch.arange(3.0), "b": torch.tensor(2)}


def around(prefix):
    return {prefix + name: t for name, t in WEIGHTS.items()}


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        {"state_dict": WEIGHTS, "epoch": 3},
        {"model": WEIGHTS, "optimizer": {"state": {}}},
        {"model": {"state_dict": around("module.")}},
        around("module."),
        around("_orig_mod."),
        around("module._orig_mod."),
        {"a._orig_mod.weight": WEIGHTS["a.weight"], "b": WEIGHTS["b"]},
    ],
)
def test_weights_are_found_where_people_put_them(content, tmp_path):
    for suffix in (".pt", ".pth", ".th"):
        torch.save(content, tmp_path / f"w{suffix}")
        found = load_weights(tmp_path / f"w{suffix}")
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[k], WEIGHTS[k]) for k in WEIGHTS)


def test_weights_come_as_safetensors_too_and_one_module_called_module_stays(tmp_path):
    tensors = {"module.a": torch.ones(2), "b": torch.zeros(1)}
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    assert load_weights(tmp_path / "w.safetensors").keys() == tensors.keys()


def test_a_pickle_that_needs_code_is_refused_unless_trusted(tmp_path):
    net = nn.Linear(2, 2)
    torch.save(net, tmp_path / "net.pt")
    with pytest.raises(CheckpointError) as error:
        load_weights(tmp_path / "net.pt")
    assert str(error.value) == (
        f"{tmp_path}/net.pt is a pickle that needs the code of torch.nn.modules.linear.Linear to load; save the state_dict alone or as safetensors, or pass trust=True (--trust) if you trust where it comes from."
    )
    assert torch.equal(load_weights(tmp_path / "net.pt", trust=True)["weight"], net.weight)


# name of the file, how it is made, what is said of it
BAD_WEIGHTS = [
    ("w.pt", lambda p: None, "does not exist; give the path of a file of weights."),
    ("w.npz", Path.touch, "does not end as files of weights do, in .safetensors or .pt, .pth, .th; got '.npz'."),
    ("w.pt", Path.touch, "is not a complete checkpoint of torch (EOFError); copy it again."),
    ("w.pt", lambda p: p.write_text("hello"), "is not a complete checkpoint of torch (KeyError: 101); copy it again."),
    ("w.pt", lambda p: (torch.save(WEIGHTS, p), os.truncate(p, 500)), "is not a complete checkpoint of torch (RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory); copy it again."),
    ("w.safetensors", lambda p: p.write_bytes(b"abc"), "is not a complete safetensors file (Error while deserializing header: header too small); copy it again or save again."),
    ("w.pt", lambda p: torch.save([1, 2], p), "holds no weights; it must hold a state_dict, by itself or under 'state_dict' or 'model'."),
    ("w.pt", lambda p: torch.save({**WEIGHTS, "epoch": 1}, p), "holds 'epoch', which is not a tensor; it must hold a state_dict."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "message"), BAD_WEIGHTS)
def test_bad_files_of_weights_are_refused(name, make, message, tmp_path):
    make(tmp_path / name)
    with pytest.raises(CheckpointError) as error:
        load_weights(tmp_path / name)
    assert str(error.value) == f"{tmp_path / name} {message}"


def test_gates_are_put_only_where_the_same_function_was(tmp_path):
    x = torch.randn(4, 8)
    save(convert(nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1)), inputs=x), tmp_path)
    for other in (nn.Tanh(), nn.Identity(), nn.LeakyReLU(0.3), nn.Softmax(-1)):
        with pytest.raises(
            CheckpointError, match=f"'1' is {type(other).__name__}, another function"
        ):
            load(tmp_path, nn.Sequential(nn.Linear(8, 8), other))
    assert isinstance(
        load(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1)))[1], Activation
    )
