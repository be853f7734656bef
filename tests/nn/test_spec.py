"""Modules that hold the tensors of gates by name."""

import pytest
import torch
from torch import Tensor, nn

from threshold_gating import TAXONOMY, Activation, kernels
from threshold_gating.nn.attention import Temperature
from threshold_gating.nn.rnn import SITES
from threshold_gating.nn.spec import (
    LEARNABLE,
    GateSpec,
    Holder,
    at_start,
    attach,
    detach,
    gate_names,
    learnable,
)
from threshold_gating.nn.unitwise import Units

X = torch.linspace(-4, 4, 24).view(2, 3, 4)


class Own(nn.Module):
    """A layer with a weight and a start of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def reset_parameters(self):
        nn.init.constant_(self.weight, 5.0)


class Held(Holder, Own):
    pass


def held(spec, prefix="tg_act_0_"):
    module = Held()
    vars(module)["tg_gates"] = {prefix: spec}
    attach(module, prefix, spec)
    return module


def spec_of(key, share="channel"):
    names, _ = learnable(TAXONOMY[key], LEARNABLE)
    return GateSpec(TAXONOMY[key], names, share, (3,) if share == "channel" else (1,), 1)


@pytest.mark.parametrize("key", ["relu", "silu", "tanh", "gelu", "hardtanh", "leaky_relu"])
def test_a_gate_that_is_held_computes_and_learns_as_an_activation_does(key):
    spec = spec_of(key)
    module = held(spec)
    act = Activation(key, share="channel", channels=3, train=spec.learned)
    found = []
    for name, value in act.named_parameters():
        moved = value.detach() + torch.linspace(0, 0.1, value.numel()).view_as(value)
        for p in (value, module._parameters[f"tg_act_0_{name}"]):
            with torch.no_grad():
                p.copy_(moved)
    for holder, f in ((module, lambda x: spec.evaluate(module, "tg_act_0_", x)), (act, act)):
        x = X.clone().requires_grad_()
        y = f(x)
        gates = [p for n, p in holder.named_parameters() if n != "weight"]
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *gates])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_16_bits_are_for_the_weights_and_not_for_the_gates():
    module = held(spec_of("gelu")).half()
    assert module.weight.dtype == torch.float16
    assert {module.get_buffer(n).dtype for n in ("tg_act_0_tau0", "tg_act_0_theta0")} == {
        torch.float32
    }
    assert module.tg_act_0_rho.dtype == torch.float32
    module = held(spec_of("gelu")).double()
    exact = spec_of("gelu").start("theta0", "cpu", torch.float64)
    assert torch.equal(module.tg_act_0_theta0, exact)


def test_resetting_returns_gates_and_the_rest_to_their_starts():
    module = held(spec_of("silu"))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1.0)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.full((2,), 5.0))
    assert not module.tg_act_0_rho.any()
    assert not any(spec_of("silu").moved(module, "tg_act_0_").values())


def test_detaching_leaves_nothing_behind():
    module = held(spec_of("silu"))
    assert list(gate_names(module, "parameter")) == [
        f"tg_act_0_{n}" for n in ("s", "c", "rho", "dtheta")
    ]
    detach(module)
    assert list(module.state_dict()) == ["weight"]
    assert not list(module.buffers())


def test_how_far_a_gate_has_moved_is_measured_from_its_instance():
    spec = spec_of("silu")
    module = held(spec)
    with torch.no_grad():
        module.tg_act_0_rho[1] = -0.25
        module.tg_act_0_theta0[0, 2] = 0.5  # wherever it is held
        module.tg_act_0_s[1] += 0.125
    far = spec.moved(module, "tg_act_0_")
    assert far == {"log tau": pytest.approx(0.25, rel=1e-6), "theta": 0.5, "s": 0.125, "c": 0.0}


def test_temperatures_and_units_are_measured_and_cast_alike():
    temperature = Temperature("head", (2,))
    units = Units(tuple(SITES["gru"].items()), ("tau", "theta"), 2, "channel", (4,))
    for spec, shape in ((temperature, (2,)), (units, (2, 3, 4))):
        module = held(spec, "tg_x_0_")
        assert tuple(module.tg_x_0_rho.shape) == shape
        assert not any(spec.moved(module, "tg_x_0_").values())
        with torch.no_grad():
            module.tg_x_0_rho.view(-1)[-1] = 0.5
        assert spec.moved(module, "tg_x_0_")["log tau"] == pytest.approx(0.5, rel=1e-6)
        assert module.bfloat16().tg_x_0_rho.dtype == torch.float32


# The anchor of hardsigmoid_clamp, which no conversion puts anywhere, is not at its threshold.
STARTS = [k for k, t in TAXONOMY.items() if learnable(t, ("tau", "theta"))[0]]


@pytest.mark.parametrize("key", [k for k in STARTS if k != "hardsigmoid_clamp"])
def test_every_instance_starts_at_its_frozen_self_to_the_bit(key):
    t, x = TAXONOMY[key], torch.linspace(-8, 8, 4001)
    spec = GateSpec(t, learnable(t, ("tau", "theta"))[0])
    with kernels.use("reference"):
        y: Tensor = spec.evaluate(at_start("", spec, x), "", x)
        assert torch.equal(y, Activation(t)(x))
