"""Networks of Table 4 that are trained here: a ViT on CIFAR-10, an LSTM and a GRU on MNIST.

    lstm, gru   two layers of 128 units that read an image row by row, 28 rows of 28 pixels
    vit         6 blocks of width 256, 8 heads, on 8 x 8 overlapping patches (two convolutions of
                stride 2), GELU everywhere; 16-bit weights, so that they are small to keep

`trained` makes one from nothing: the same data, seed and number of steps; a folder then holds
weights.pt and training.json, which says how they were made and what their hash is. A ViT goes
through the loop of all contenders on CIFAR-10 (`cifar_training`); recurrent networks through a few
lines here, with its schedule.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import cifar_training, data

BATCH, RATE = 128, 2e-3  # of the recurrent networks
VIT = cifar_training.Recipe(
    steps=9_700,  # 100 epochs
    batch=512,
    rate=1e-3,
    decay=0.05,
    smoothing=0.1,
    evaluations=10,
    adam=True,
)
STEPS = {"lstm": 1_800, "gru": 1_800, "vit": VIT.steps}


class Rows(nn.Module):
    """A recurrent network of two layers that has read all 28 rows when it decides."""

    def __init__(self, kind: str, units: int = 128) -> None:
        super().__init__()
        self.rnn = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](28, units, 2, batch_first=True)
        self.head = nn.Linear(units, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Block(nn.Module):
    """Attention and a gelu layer, each after a norm and added to what came."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        images, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(images, tokens, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.out(mixed.transpose(1, 2).reshape(images, tokens, width))
        return x + self.down(self.act(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Images [N, 3, 32, 32] as 64 patches; the mean over them decides."""

    def __init__(self, width: int = 256, depth: int = 6, heads: int = 8) -> None:
        super().__init__()
        self.near = nn.Conv2d(3, width // 4, 3, 2, 1)
        self.act = nn.GELU()
        self.patches = nn.Conv2d(width // 4, width, 3, 2, 1)
        self.places = nn.Parameter(torch.empty(64, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        nn.init.normal_(self.places, std=0.02)
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(self.act(self.near(x))).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x + self.places)).mean(1))


class Made(NamedTuple):
    """A network with its weights, what it was trained on, and how."""

    model: nn.Module
    about: dict[str, Any]  # of training.json; "sha256" is that of the weights


def network(name: str, smoke: bool = False) -> nn.Module:
    if name == "vit":
        return ViT(32, 2, 2) if smoke else ViT()
    return Rows(name, 16 if smoke else 128)


def digest(folder: Path) -> str:
    """What the weights of a folder are known by, short; "none yet" before they are trained."""
    notes = folder / "training.json"
    return json.loads(notes.read_text("utf-8"))["sha256"][:12] if notes.exists() else "none yet"


@functools.cache
def read(name: str, folder: Path | None, smoke: bool = False) -> data.Labelled:
    """The data of a network; noise for a smoke run."""
    if smoke:
        shape = (3, 32, 32) if name == "vit" else (28, 28)
        draw = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (96, *shape), generator=draw).byte()
        labels = torch.arange(96) % 10
        return data.Labelled((images[:64], labels[:64]), (images[64:], labels[64:]), "noise")
    if folder is None:
        raise SystemExit(f"{name} needs its data: --data FOLDER or TG_DATA names the folder.")
    return data.cifar10(folder) if name == "vit" else data.mnist(folder)


def prepared(name: str, pixels: Tensor) -> Tensor:
    """Pixels as the network takes them."""
    if name == "vit":
        return cifar_training.prepared(pixels)
    return (pixels.float() / 255 - 0.1307) / 0.3081


def trained(
    name: str,
    given: data.Labelled,
    folder: Path,
    *,
    device: str,
    seed: int = 0,
    smoke: bool = False,
) -> Made:
    """The network of a folder; it is trained first if the folder has none."""
    weights, notes = folder / "weights.pt", folder / "training.json"
    model = network(name, smoke)
    if not weights.exists():
        torch.manual_seed(seed)
        model = network(name, smoke)
        steps = 4 if smoke else STEPS[name]
        begun = time.perf_counter()
        if name == "vit":
            recipe = VIT._replace(steps=steps, batch=16 if smoke else VIT.batch)
            kept = None if smoke else folder / "state.pt"
            curve = cifar_training.train(model, given, recipe, seed=seed, device=device, kept=kept)
            facts = {"recipe": recipe._asdict(), "recorded": curve.recorded}
            facts |= {"curve": [curve.steps, curve.accuracy]}
        else:
            facts = {"batch": BATCH, "rate": RATE}
            _train_rows(model, given, steps, seed, device)
        folder.mkdir(parents=True, exist_ok=True)
        half = {k: v.half() if name == "vit" else v for k, v in model.cpu().state_dict().items()}
        torch.save(half, weights)
        facts |= {"network": name, "steps": steps, "seed": seed, "data": given.sha256}
        facts |= {"device": device, "torch": torch.__version__, "sha256": _sha256(weights)}
        facts |= {"seconds": round(time.perf_counter() - begun, 1)}
        notes.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    about = json.loads(notes.read_text("utf-8"))
    if about["sha256"] != _sha256(weights):
        raise SystemExit(f"{weights} is not what {notes.name} describes: remove {folder}.")
    if about["data"] != given.sha256:
        raise SystemExit(f"{weights} was trained on other data than that given: remove {folder}.")
    state = torch.load(weights, map_location="cpu", weights_only=True)
    model.load_state_dict({key: value.float() for key, value in state.items()})
    return Made(model.to("cpu").eval(), about)


def _train_rows(model: nn.Module, given: data.Labelled, steps: int, seed: int, device: str) -> None:
    """Adam on random batches, every image once an epoch; the rate rises and falls by `schedule`."""
    model.to(device).train()
    images, labels = given.train[0].to(device), given.train[1].to(device)
    optimiser = torch.optim.Adam(model.parameters(), RATE)
    draw = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(len(images), generator=draw)
        rows, order = order[:BATCH].to(device), order[BATCH:]
        optimiser.param_groups[0]["lr"] = RATE * cifar_training.schedule(step, steps)
        loss = F.cross_entropy(model(prepared("rows", images[rows])), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % 300 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
