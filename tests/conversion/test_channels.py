"""Where channels are, followed through a run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating.conversion.channels import LOST, Channels

W = nn.Parameter(torch.randn(6, 4))
KERNEL = nn.Parameter(torch.randn(6, 4, 1, 1))


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.kernel = W, KERNEL


def axis_after(f, *shape):
    """The axis of the channels of what f makes of an input that no layer was before."""
    channels = Channels(Holding())
    with torch.no_grad(), channels:
        y = f(torch.randn(*shape))
    return channels.axis(y)


def linear(x):
    return F.linear(x, W)


def conv(x):
    return F.conv2d(x, KERNEL)


IMAGE, ROWS = (2, 4, 5, 5), (2, 3, 4)


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (lambda x: x.relu(), IMAGE, None),
        (conv, IMAGE, 1),
        (conv, IMAGE[1:], 0),
        (linear, ROWS, 2),
        (linear, (2, 5, 5, 4), 3),
        (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), (2, 4), 1),
        (lambda x: F.group_norm(x, 2), IMAGE, 1),
        (lambda x: F.layer_norm(x, (4,)), ROWS, 2),
        (lambda x: F.layer_norm(x, (3, 4)), ROWS, None),
        (lambda x: x @ W.t(), ROWS, 2),
        (lambda x: torch.addmm(torch.zeros(6), x, W.t()), (2, 4), 1),
        (lambda x: W @ x, (2, 4, 3), 1),
        (lambda x: F.embedding(torch.zeros(2, 3, dtype=torch.long), W) + x, ROWS, 2),
    ],
)  # fmt: skip
def test_a_layer_says_where_its_channels_are(layer, shape, axis):
    assert axis_after(layer, *shape) == axis


@pytest.mark.parametrize(
    ("after", "axis"),
    [
        (lambda y: y.relu_().mul(2) + y, 1),
        (lambda y: y.permute(0, 2, 3, 1), 3),
        (lambda y: y.transpose(1, 2), 2),
        (lambda y: y.flatten(2).mT, 2),
        (lambda y: y.flatten(2).transpose(1, 2)[:, 1:], 2),
        (lambda y: F.max_pool2d(y, 2), 1),
        (lambda y: F.pad(y, (1, 1)), 1),
        (lambda y: y.mean((2, 3)), 1),
        (lambda y: y.mean(1, keepdim=True), LOST),
        (lambda y: torch.cat([y, y], 1), 1),
        (lambda y: y.chunk(2, 1)[0], 1),
        (lambda y: y[:, :3], 1),
        (lambda y: y[0], 0),
        (lambda y: F.pixel_shuffle(y[:, :4], 2), 1),
        (lambda y: y.unflatten(1, (2, 3)), LOST),
        (lambda y: y.flatten(1), LOST),
        (lambda y: y @ y, LOST),
        (lambda y: y.view(-1, 5, 5), LOST),
        (lambda y: y[:, :5] + y[:, :5].transpose(1, 2), LOST),
        (lambda y: F.linear(y.permute(0, 2, 3, 1), torch.ones(2, 6)), 3),
    ],
)  # fmt: skip
def test_channels_are_followed_until_they_are_no_axis_any_more(after, axis):
    assert axis_after(lambda x: after(conv(x)), *IMAGE) == axis
