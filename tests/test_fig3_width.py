"""The width of a ResMLP: its gated forms, what they cost, and how a stopped run goes on."""

import pytest
import torch
from torch import nn

import threshold_gating as tg
from experiments import fig3_width
from experiments.fig3_width import NAME, network
from experiments.resmlp import ResMLP, counted, gated
from experiments.width_page import TITLES, Size


@pytest.fixture
def x():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def layers(model):
    return [m for m in model.modules() if isinstance(m, tg.Linear)]


@pytest.mark.parametrize("tier", ["W", "S"])
def test_a_gated_network_starts_as_one_with_silu_and_both_branches_learn(x, tier):
    plain = ResMLP(8, 2, 1.5)
    ours, silu = gated(plain, tier), ResMLP(8, 2, 1.5, nn.SiLU)
    silu.load_state_dict(plain.state_dict())
    with tg.kernels.use("reference"):
        torch.testing.assert_close(ours(x), silu(x), rtol=1e-5, atol=1e-6)
        ours(x).square().sum().backward()
    assert isinstance(plain.blocks[0].act, nn.ReLU)  # left as it was
    for layer in layers(ours):
        assert layer.tier == tier
        assert not layer.weight[:, 0].any()
        assert layer.weight.grad.abs().amax((0, 2)).gt(0).all()  # neither branch is dead


def test_half_transfer_is_that_of_the_library(x):
    plain = ResMLP(8, 1, 1)
    ours, theirs = gated(plain, "W"), tg.training.half_transfer(plain, inputs=x)
    with tg.kernels.use("reference"):
        torch.testing.assert_close(ours(x), theirs(x))


def test_costs_are_those_of_the_formulas():
    dim, depth, h = 16, 3, 2
    block = 64 * 64 + 64 + 6 * dim  # the layer across patches, two affine ones, two scales
    rest = depth * block + (48 * dim + dim) + 2 * dim + (10 * dim + 10)
    crossed = depth * 64 * 64 * dim + 64 * 48 * dim + 10 * dim
    for arm, weights, more, gates in (
        ("relu", 2, 0, 0),
        ("W", 3, 2 * h * dim, 64 * h * dim),
        ("S", 3, 2 * h * dim * dim, 64 * h * dim * dim),
    ):
        found = counted(network(arm, h, 0, Size(dim=dim, depth=depth)))
        own = depth * (weights * h * dim * dim + h * dim + dim + more)
        assert found["parameters"] == own + rest
        assert found["macs"] == crossed + depth * 64 * weights * h * dim * dim
        assert found["gates"] == depth * gates
        assert found["hidden"] == 2 * 64 * h * dim


def test_relu_has_the_parameters_of_the_gated_arms_within_a_hundredth():
    def parameters(arm, h):
        return counted(network(arm, h, 0, Size()))["parameters"]

    for arm, h, width in (("W", 1, 1.5), ("S", 1, 2.5), ("W", 2, 3)):
        assert parameters(arm, h) == pytest.approx(parameters("relu", width), rel=0.01)


def test_every_arm_of_a_seed_starts_from_the_same_weights():
    size = Size(dim=8, depth=1)
    for arm in ("W", "S"):
        ours, plain = network(arm, 2, 5, size), network("relu", 2, 5, size)
        assert torch.equal(ours.blocks[0].up.weight, plain.blocks[0].up.weight)
        assert torch.equal(ours.blocks[0].down.weight[:, 1], plain.blocks[0].down.weight)


def test_a_transfer_that_was_stopped_goes_on_behind_its_first_half(tmp_path, monkeypatch):
    monkeypatch.setattr(fig3_width.record, "CHECKPOINTS", tmp_path)
    case = {"arm": "transfer", "h": 1, "seed": 0, "steps": 4, "rate": 1e-3, "rate_after": 2e-3}
    case["part"] = "main"
    asked = fig3_width.record.options(NAME, None).parse_args(["--smoke", "--device", "cpu"])
    expected = fig3_width.run(case, asked)
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]
    real, calls = fig3_width.train, []

    def stopping(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(fig3_width, "train", stopping)
    with pytest.raises(KeyboardInterrupt):
        fig3_width.run(case, asked)
    again = fig3_width.run(case, asked)
    assert len(calls) == 4  # the first half is not trained again
    for name in ("accuracy", "loss", "before", "moved"):
        assert again[name] == expected[name]
    assert again["again"]["loss"] == expected["again"]["loss"]


@pytest.mark.slow
def test_the_smoke_run_ends_with_a_page_that_has_every_arm(capsys):
    fig3_width.main(["--smoke", "--device", "cpu"])
    text = capsys.readouterr().out
    assert "All cases ran" in text
    for title in TITLES.values():
        assert f"| {title} | 1 |" in text
