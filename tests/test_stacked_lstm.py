"""The recurrence of stacked LSTMs: it is that of the library's LSTM, forth and back."""

import shutil

import pytest
import torch

import threshold_gating as tg
from experiments import stacked_lstm
from experiments.speech_networks import ARMS, Stack
from experiments.stacked_lstm import gate, recurrence


def scrambled(*arms, hidden=5):
    """LSTMs with gates away from their start, and numbers that no two of them share."""
    torch.manual_seed(1)
    layers = [tg.LSTM(4, hidden, bidirectional=True, **ARMS[arm]).double() for arm in arms]
    for layer in layers:
        for name, p in layer.named_parameters():
            with torch.no_grad():
                p.add_((0.3 if "gate_" in name else 0.1) * torch.randn_like(p))
    return layers


class Layers(torch.nn.Module):
    """What a Stack needs of its networks to be asked for its LSTMs alone."""

    def __init__(self, layer):
        super().__init__()
        self.lstms = torch.nn.ModuleList([layer])


@pytest.mark.parametrize("arms", [tuple(ARMS), ("standard",), ("control", "constant")])
def test_the_stacked_recurrence_and_its_slopes_are_those_of_the_librarys_lstm(arms):
    layers = scrambled(*arms)
    x = torch.randn(len(arms), 7, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(arms), 7, 3, 5, dtype=torch.float64)
    with tg.kernels.use("reference"):
        want = torch.stack([sum(own(h)[0].chunk(2, -1)) for own, h in zip(layers, x, strict=True)])
    learned = [p for layer in layers for p in layer.parameters()]
    slopes = torch.autograd.grad((want * weight).sum(), [x, *learned])

    stack = Stack([Layers(layer) for layer in layers])
    (gates,) = stack.gates.numbers()
    again = x.detach().requires_grad_()
    y = stack._lstm("lstms.0", again, gates)
    (y * weight).sum().backward()
    # float64: sums of the same 12 to 21 numbers in another order
    assert (y - want).abs().max() <= 1e-14
    for have, right in zip((again.grad, *(p.grad for p in learned)), slopes, strict=True):
        assert (have - right).abs().max() <= 1e-12 * right.abs().max().clamp(min=1)


def test_a_stacked_tanh_is_exact_near_0():
    numbers = torch.tensor([[2.0, 0.0, -1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
    x = torch.cat([torch.logspace(-30, 1.3, 200), -torch.logspace(-30, 1.3, 200)])
    for own, function in zip(numbers, (torch.tanh, torch.sigmoid), strict=True):
        right = function(x.double())  # four roundings of 6e-8 each
        assert ((gate(x, own).y - right) / right).abs().max() <= 2.4e-7


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_a_step_is_compiled_to_one_kernel_for_all_lengths():
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    torch.manual_seed(0)
    gates, four = torch.rand(2, 5, 6, 8), torch.rand(4, 2, 3, 8)
    for name in ("cell_forward", "cell_backward"):
        function = getattr(stacked_lstm, name)
        metrics.reset()
        counters.clear()
        for steps in (4, 7):
            z, c, dy = (torch.randn(steps, 2, 3, n)[1] for n in (32, 8, 8))
            state = (z, c, gates) if name == "cell_forward" else (dy, four, c, z, c, dy, gates)
            have, right = stacked_lstm._compiled(function)(*state), function(*state)
            torch.testing.assert_close(have, right, rtol=1e-5, atol=1e-6)
        assert metrics.generated_kernel_count == 1, name
        assert counters["stats"]["unique_graphs"] == 1, name


@pytest.mark.gpu
def test_the_stacked_recurrence_on_a_gpu_is_that_of_a_cpu():
    def slopes(device):
        torch.manual_seed(0)
        shapes = (8, 20, 16, 64), (8, 256, 64), (8, 256, 64), (8, 256), (8, 5, 6, 64)
        tensors = [0.3 * torch.randn(shape) for shape in shapes]
        tensors[4][:, :, 0] = tensors[4][:, :, 0].exp()
        tensors = [t.to(device).requires_grad_() for t in tensors]
        y = recurrence(*tensors)
        return [y, *torch.autograd.grad(y.square().sum(), tensors)]

    for have, right in zip(slopes("cuda"), slopes("cpu"), strict=True):
        assert (have.cpu() - right).norm() <= 1e-2 * right.norm()  # TF32
