"""Data and the five networks of the demo, small enough to train in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SPLIT = 450  # of 1,797 images are kept for the test
_BATCH = 64


class Digits(NamedTuple):
    """Images (N, 1, 8, 8) with values from 0 to 1, and the digit that each one shows."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def digits() -> Digits:
    """The handwritten digits that scikit-learn carries, always split in the same way."""
    from sklearn.datasets import load_digits

    pixels, answers = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(answers).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:_SPLIT], order[_SPLIT:]
    return Digits(images[train], labels[train], images[test], labels[test])


class ReLUNet(nn.Module):
    """Three convolutions with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.act1, self.act2, self.act3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act2(self.conv2(self.act1(self.conv1(x))))
        x = self.act3(self.conv3(F.avg_pool2d(x, 2)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class SqueezeExcite(nn.Module):
    """Weighs each channel by a number from 0 to 1 that all channels together decide."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Linear(channels, 8), nn.Linear(8, channels)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.sigmoid(self.expand(self.act(self.reduce(x.mean((2, 3))))))
        return x * weight[:, :, None, None]


class SENet(nn.Module):
    """Convolutions with SiLU, and squeeze and excitation with SiLU and sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.se = SqueezeExcite(32)
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv1(x))
        x = self.se(F.silu(self.conv2(x)))
        return self.head(F.avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block of a transformer: attention of several heads, then two layers with GELU between."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, width))
        return x + self.down(self.act(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A vision transformer over 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))  # type: ignore[no-any-return]


class Reader(nn.Module):
    """An LSTM or a GRU that reads an image row by row and answers after the last one."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn, self.head = layer(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.rnn(x.squeeze(1))
        return self.head(steps[:, -1])  # type: ignore[no-any-return]


class Recipe(NamedTuple):
    """How a network is made and for how many rounds over the data it is trained."""

    make: Callable[[], nn.Module]
    epochs: int
    words: str


RECIPES: dict[str, Recipe] = {
    "ReLU CNN": Recipe(ReLUNet, 20, "convolutions with ReLU"),
    "SE-CNN": Recipe(SENet, 25, "convolutions with SiLU, channels weighed by a sigmoid"),
    "LSTM": Recipe(lambda: Reader(nn.LSTM), 60, "reads row by row; sigmoid and tanh inside"),
    "GRU": Recipe(lambda: Reader(nn.GRU), 60, "reads row by row; sigmoid and tanh inside"),
    "ViT": Recipe(ViT, 40, "a transformer: attention (softmax) and GELU"),
}


def train(
    recipe: Recipe, data: Digits, seed: int, say: Callable[[str], None], epochs: int | None = None
) -> nn.Module:
    """A trained network, the same for the same seed; `say` is told how far it is."""
    rounds = recipe.epochs if epochs is None else epochs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.make()
        optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-3)
        steps = rounds * -(-len(data.train) // _BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
        for epoch in range(rounds):
            for rows in torch.split(torch.randperm(len(data.train)), _BATCH):
                loss = F.cross_entropy(model(data.train[rows]), data.train_labels[rows])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
            say(f"round {epoch + 1} of {rounds}, loss {loss.item():.4f}")
    return model.eval()
