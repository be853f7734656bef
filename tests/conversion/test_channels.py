"""Where channels are, followed through a run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating.conversion.channels import HEADLESS, LOST, UNKNOWN, Channels

W = nn.Parameter(torch.randn(6, 4))
KERNEL = nn.Parameter(torch.randn(6, 4, 1, 1))
HEADS, GAIN = nn.Parameter(torch.randn(3, 4, 2)), nn.Parameter(torch.randn(4, 1))


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.kernel, self.heads, self.gain = W, KERNEL, HEADS, GAIN


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


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (lambda x: torch.einsum("oc,nchw->nohw", W, x), IMAGE, 1),
        (lambda x: torch.einsum("ncl,oc->nol", x, W), (2, 4, 7), 1),
        (lambda x: torch.einsum("n...c, oc -> n...o", x, W), (2, 3, 5, 4), 3),
        (lambda x: torch.einsum("...cl,oc->o...l", x, W), (2, 4, 7), 0),
        (lambda x: torch.einsum("ncl,oc", x, W), (2, 4, 7), HEADLESS),
        (lambda x: torch.einsum(x, [0, 1, 2], W, [3, 1], [0, 3, 2]), (2, 4, 7), 1),
        (lambda x: torch.einsum("nhld,hde->nhle", x, HEADS), (2, 3, 7, 4), LOST),
        (lambda x: torch.einsum("nld,hde->nlhe", x, HEADS), (2, 7, 4), HEADLESS),
        (lambda x: torch.einsum("bqhd,bkhd->bqhk", x, x), (2, 5, 2, 4), HEADLESS),
        (lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x), (2, 2, 5, 4), LOST),
        (lambda x: torch.tensordot(W, x, ([1], [1])), (2, 4, 7), 0),
        (lambda x: torch.tensordot(x, W.t(), dims=1), ROWS, 2),
        (lambda x: torch.tensordot(x, HEADS, ([2], [1])), ROWS, LOST),
        (lambda x: x @ HEADS, (2, 3, 7, 4), LOST),
        (lambda x: torch.bmm(x, HEADS), (3, 7, 4), LOST),
        (lambda x: torch.matmul(other=W.t(), input=x), ROWS, LOST),
        (lambda x: torch.linalg.matmul(x, W.t()), ROWS, 2),
        (lambda x: torch.inner(W, x), ROWS, 0),
        (lambda x: W @ x, (4,), 0),
        (lambda x: x * GAIN, (2, 4, 7), 1),
        (lambda x: x + HEADS[0], (3, 4, 2), LOST),
        (lambda x: torch.cdist(x, W), (2, 3, 4), LOST),
        (lambda x: x.permute(0, 2, 3, 1), IMAGE, UNKNOWN),
        (lambda x: linear(GAIN.t() + 0).relu(), ROWS, 1),
        (lambda x: linear(x).new_zeros(2, 3).relu(), ROWS, None),
    ],
)  # fmt: skip
def test_a_product_has_its_channels_where_the_free_axis_of_the_weight_goes(layer, shape, axis):
    assert axis_after(layer, *shape) == axis


def in_place(y, name, *args):
    getattr(y, name)(*args)
    return y


def into(y):
    held = torch.empty(y.permute(0, 2, 1).shape)
    held[:] = y.permute(0, 2, 1)
    return held


def by_numpy(y):
    return torch.from_numpy(y.numpy().copy())


SQUARE = (2, 6, 4)  # as many positions as channels behind the linear layer


@pytest.mark.parametrize(
    ("after", "axis"),
    [
        (lambda y: in_place(y, "transpose_", 1, 2), 1),
        (lambda y: in_place(y, "swapaxes_", 1, 2), 1),
        (lambda y: in_place(y, "unsqueeze_", 0), 3),
        (lambda y: in_place(y[0], "t_"), 0),
        (lambda y: in_place(y, "resize_", 6, 2, 6), LOST),
        (lambda y: torch.linalg.matmul(y.transpose(1, 2), torch.ones(6, 6)), LOST),
        (lambda y: torch.cdist(y, torch.ones(6, 6)), LOST),
        (lambda y: torch.linalg.inv(y), LOST),
        (lambda y: torch.fft.fft(y).real, LOST),
        (lambda y: y.sort(-1).values, LOST),
        (lambda y: y.transpose(1, 2).reshape(-1, 6), LOST),
        (lambda y: y.flatten(1), LOST),
        (lambda y: F.batch_norm(y, torch.zeros(6), torch.ones(6)), LOST),
        (lambda y: F.layer_norm(y.transpose(1, 2), (6,)), LOST),
        (lambda y: F.layer_norm(y, (6,)), 2),
        (lambda y: F.pixel_shuffle(y.expand(4, 2, 6, 6).transpose(0, 1), 2), LOST),
        (lambda y: 1 - 2 / y.float().pow(2) ** 2, 2),
        (lambda y: torch.add(y, y, out=torch.empty(2, 6, 6)), 2),
        (lambda y: y.sum(1), 1),
        (lambda y: into(y), LOST),
        (lambda y: by_numpy(y), UNKNOWN),
    ],
)  # fmt: skip
def test_only_what_is_known_to_keep_or_to_move_channels_is_followed(after, axis):
    assert axis_after(lambda x: after(linear(x)), *SQUARE) == axis
