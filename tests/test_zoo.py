"""Networks that nobody here wrote: a fast part of `make zoo`, and that it would see a failure."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import check, networks, sweep

import threshold_gating as tg
from threshold_gating import kernels

TIMM = "byobnet convnext efficientnet mobilenetv3 nfnet resnet starnet vision_transformer"
TRANSFORMERS = "bert llama mixtral mamba t5 swin whisper deberta-v2"
FAST = [*(f"timm:{n}" for n in TIMM.split()), *(f"hf:{n}" for n in TRANSFORMERS.split())]
# Both libraries warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("name", FAST)
def test_a_network_is_converted_whole_and_every_broken_site_shows(name):
    result = check.check(*networks.build(name), limit=3)
    assert result["failed"] == []
    assert result["sites"] > 2
    assert result["broken"] == 3
    assert result["unseen"] == []


@pytest.fixture(scope="module")
def resnet():
    model, inputs = networks.build("timm:resnet")
    return model, inputs, tg.convert(model, inputs=inputs, strict=False)


@pytest.mark.parametrize("damage", [check.shifted, check.dropped])
def test_a_broken_site_is_beyond_the_bound(resnet, damage):
    model, inputs, gated = resnet
    name = tg.audit(gated, inputs).sites[-1].name
    with kernels.use("reference"):
        want = check.expected(model, gated, inputs)
        assert check.distance(want, check.run(gated, inputs)) <= check.BOUND
        with check.broken(gated, name, damage):
            assert check.distance(want, check.run(gated, inputs)) > check.SEEN
        assert check.distance(want, check.run(gated, inputs)) <= check.BOUND


def test_a_failure_is_reported(monkeypatch, resnet):
    model, inputs, gated = resnet
    left, off = (site.name for site in tg.audit(gated, inputs).sites[:2])
    convert = tg.convert

    def badly(model, **options):
        gated = convert(model, {left: None}, **options)
        gated.get_submodule(off).register_forward_hook(lambda module, args, y: y + 0.1)
        return gated

    monkeypatch.setattr(tg, "convert", badly)
    failed = check.check(model, inputs, limit=0)["failed"]
    assert [said.partition(":")[0] for said in failed] == ["left", "verify", "output"]
    assert failed[0] == f"left: relu in {left} (1)"


def test_a_network_that_gives_another_shape_is_infinitely_far():
    one, two = torch.ones(1, 3), torch.ones(1, 4)
    assert check.distance([one], [one]) == 0
    assert check.distance([one], [two]) == float("inf")


def test_the_gates_of_a_network_in_float64_have_all_their_digits():
    """As `check.in_float64` makes it, and of a network that was converted in float32 before."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x):
            return self.act(x), F.gelu(x, approximate="tanh")

    x = torch.linspace(-4, 4, 101)
    early, late = tg.convert(Net().double(), inputs=x.double()), tg.convert(Net(), inputs=x)
    for gated in (early.double(), late.double(), late.half().double()):
        for y, row in zip(gated(x.double()), ("gelu", "gelu_tanh"), strict=True):
            want = tg.TAXONOMY[row](x.double())
            assert (y - want).abs().max() < 1e-14  # float32 digits would leave 1e-8
            assert (y - tg.TAXONOMY[row](x).double()).abs().max() > 1e-9


def test_networks_are_asked_for_by_name():
    names = ["timm:resnet", "timm:resnetv2", "hf:vit", "hf:resnet"]
    assert sweep._wanted(names, ["*"]) == names
    assert sweep._wanted(names, ["vit", "timm:resnet"]) == ["timm:resnet", "hf:vit"]
    assert sweep._wanted(names, ["resnet"]) == ["timm:resnet", "hf:resnet"]
    with pytest.raises(SystemExit, match="no network is called vitt"):
        sweep._wanted(names, ["vit", "vitt"])


def test_every_known_failure_is_a_network_of_the_zoo():
    assert set(json.loads(sweep.FAILURES.read_text())) <= set(networks.names())
