"""Where the elements that share parameters lie in memory."""

import math

import pytest
import torch

from threshold_gating import Activation
from threshold_gating.kernels.layout import dense_sizes, flat, like, placed

IMAGE = torch.randn(2, 6, 3, 4)
LAST = IMAGE.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("x", "shape", "sizes"),
    [
        (IMAGE, (), (1, 1, 144)),
        (IMAGE, (1, 6, 1, 1), (2, 6, 12)),
        (LAST, (1, 6, 1, 1), (24, 6, 1)),
        (IMAGE, (1, 6, 3, 4), (2, 72, 1)),
        (LAST, (1, 1, 3, 4), (2, 12, 6)),
    ],
)
def test_memory_is_seen_with_the_groups_amid(x, shape, sizes):
    assert placed(x.shape, x.stride(), shape) == (sizes, False)
    memory = flat(x, sizes)
    assert memory.data_ptr() == x.data_ptr()
    # every element of one slice along G has the same parameters
    index = torch.arange(math.prod(shape)).view(shape).expand(x.shape)
    laid = flat(torch.empty_like(x, dtype=torch.long).copy_(index), sizes)
    assert (laid == laid[:1, :, :1]).all()


@pytest.mark.parametrize(
    ("x", "shape", "sizes"),
    [
        (LAST, (1, 6, 3, 4), (2, 72, 1)),  # positions lie in another order
        (IMAGE[:, :, ::2], (1, 6, 1, 1), (2, 6, 8)),  # with gaps
    ],
)
def test_what_lies_otherwise_is_copied(x, shape, sizes):
    assert placed(x.shape, x.stride(), shape) == (sizes, True)


def test_groups_that_are_no_run_of_axes_have_no_place():
    assert placed((2, 4, 3), (12, 3, 1), (2, 1, 3)) is None
    assert dense_sizes((2, 1, 3), (3, 3, 1), (2, 1, 3)) == (1, 6, 1)


def test_a_gradient_is_laid_as_its_input():
    assert like(IMAGE, LAST).stride() == LAST.stride()
    assert like(LAST, LAST) is LAST
    assert torch.equal(like(IMAGE, LAST), IMAGE)


@pytest.mark.parametrize("train", [(), ("tau", "theta")])
def test_a_copied_input_has_its_layout_back(train):
    act = Activation("gelu", share="neuron", channels=(6, 3, 4), train=train)
    x = LAST.clone().requires_grad_()
    y = act(x)
    assert y.stride() == x.stride()
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    z = IMAGE.clone().requires_grad_()
    (want,) = torch.autograd.grad(act(z).square().sum(), z)
    torch.testing.assert_close(dx, want, rtol=0, atol=0)
