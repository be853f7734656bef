"""The networks of the CIFAR experiments: what they compute, and what they cost."""

import pytest
import torch
from torch import nn

import threshold_gating as tg
from experiments import cifar_resnet
from experiments.cifar_networks import ARMS, CReLU, Network, cost, matched
from experiments.neighbours import NEIGHBOURS
from threshold_gating.hardware.assumptions import Assumptions
from threshold_gating.hardware.conversions import trace
from threshold_gating.hardware.counting import count

EVERY = {**ARMS, **NEIGHBOURS}
X = torch.linspace(-2, 2, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()


def made(arm: str, depth: int = 8, width: int = 4, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network(EVERY[arm], depth, width)


def test_the_relu_network_is_the_usual_one():
    ours, theirs = made("relu", 20, 16), cifar_resnet.ResNet(3)
    blocks = {f"layer{n // 3 + 1}.{n % 3}.": f"blocks.{n}." for n in range(9)}
    state = ours.state_dict()
    renamed = {}
    for name in theirs.state_dict():
        new = name.replace("conv1", "conv").replace("bn1", "bn") if name[:2] != "la" else name
        for old, place in blocks.items():
            new = new.replace(old, place)
        renamed[name] = state.pop(new)
    assert not state
    theirs.load_state_dict(renamed)
    torch.testing.assert_close(ours.eval()(X), theirs.eval()(X))


@pytest.mark.parametrize("arm", ["tier A", "tier W", "tier W per layer"])
def test_gated_networks_start_as_the_silu_network_of_their_seed(arm):
    with torch.no_grad(), tg.kernels.use("reference"):
        torch.testing.assert_close(made(arm).eval()(X), made("silu").eval()(X))


def test_tier_w_gates_every_convolution_that_reads_an_activation():
    gated = [n for n, m in made("tier W").named_modules() if isinstance(m, tg.Conv2d)]
    promoted = tg.training.promote(made("silu").eval(), inputs=X)
    assert set(gated) == set(promoted.promotion.layers)
    plain = [n for n, m in made("tier W").named_modules() if type(m) is nn.Conv2d]
    assert plain == ["conv"]


def test_crelu_is_tier_w_with_hard_gates_at_zero():
    theirs = CReLU(3, 4, 2)
    ours = tg.Conv2d(3, 4, 3, init="leaky_relu", stride=2, padding=1, bias=False, train=())
    high, low = theirs.weight.detach().split(3, 1)
    ours.weight.data = torch.stack([-low, high], 1)  # the low branch is x, not -x
    torch.testing.assert_close(ours(X), theirs(X))


@pytest.mark.parametrize("arm", EVERY)
def test_costs_are_those_that_a_run_shows(arm):
    model, found = made(arm), cost(EVERY[arm], 8, 4)
    run = trace(model.eval(), X[:1])
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.macs == sum(node.product.macs for node in run.nodes if node.product)
    for rows, ours in ((128, found.adc_128), (512, found.adc_512)):
        assert ours == sum(count(run, Assumptions(rows=rows), "digital").adc.values())


@pytest.mark.parametrize("arm", EVERY)
def test_images_lie_in_channels_last_all_the_way_and_all_parameters_learn(arm):
    """The kernels of tier W take no other images, odd widths included."""
    model, seen = made(arm, width=5).to(memory_format=torch.channels_last), []

    def look(_, given):
        seen.append(given[0].is_contiguous(memory_format=torch.channels_last))

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(look)
    model(X.contiguous(memory_format=torch.channels_last)).square().sum().backward()
    assert len(seen) == 7
    assert all(seen)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_widths_match_the_budgets_of_tier_w():
    most = cost(ARMS["tier W"], 14, 16)
    assert matched(ARMS["tier W"], 14, "parameters", most) == 16
    for budget, width in (("parameters", 23), ("macs", 23), ("adc_128", 22), ("adc_512", 21)):
        assert matched(ARMS["relu"], 14, budget, most) == width
        own, target = (getattr(c, budget) for c in (cost(ARMS["relu"], 14, width), most))
        assert own == pytest.approx(target, rel=0.04)  # what one channel more or less leaves
    assert most.hard_macs == cost(ARMS["relu"], 14, 16).macs


def test_a_depth_that_is_none_says_which_are():
    with pytest.raises(ValueError, match=r"6 n \+ 2 .* got 10"):
        Network(ARMS["relu"], 10, 4)
