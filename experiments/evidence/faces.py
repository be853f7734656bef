"""Faces in photographs: MTCNN, three networks one after the other, with PReLU and softmax."""

import io
import zipfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from experiments.evidence.common import Loaded, Outcome, Package
from experiments.evidence.vision import photographs

MTCNN = Package(
    "facenet-pytorch==2.6.0",
    "facenet_pytorch-2.6.0-py3-none-any.whl",
    "ecb82b27beb226d106f2219efe8f829b01b87a8595badd01545679bdb9f19cca",
)
SKATERS = 307  # the image with the most faces: every network sees several windows


class Turned(nn.Module):
    """One row an image, column by column: the networks were trained on turned images."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 3).flatten(1)


class Stage(nn.Module):
    """How likely a window shows a face, and by how much of its size each side is to be moved."""

    def __init__(self, layers: list[nn.Module], head: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body, self.face, self.box = nn.Sequential(*layers), head(2), head(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return torch.softmax(self.face(y), 1)[:, 1], self.box(y)


def convolved(inputs: int, outputs: int, kernel: int, pool: int = 0) -> list[nn.Module]:
    layers = [nn.Conv2d(inputs, outputs, kernel), nn.PReLU(outputs)]
    return layers + [nn.MaxPool2d(pool, 2, ceil_mode=True)] * bool(pool)


def dense(inputs: int, outputs: int) -> list[nn.Module]:
    return [Turned(), nn.Linear(inputs, outputs), nn.PReLU(outputs)]


class Detector(nn.Module):
    """Boxes (n, 5) around the faces of one image (3, H, W): two corners and the probability."""

    def __init__(self) -> None:
        super().__init__()
        self.pnet = Stage(
            convolved(3, 10, 3, 2) + convolved(10, 16, 3) + convolved(16, 32, 3),
            lambda n: nn.Conv2d(32, n, 1),
        )
        self.rnet = Stage(
            convolved(3, 28, 3, 3)
            + convolved(28, 48, 3, 3)
            + convolved(48, 64, 2)
            + dense(576, 128),
            lambda n: nn.Linear(128, n),
        )
        self.onet = Stage(
            convolved(3, 32, 3, 3)
            + convolved(32, 64, 3, 3)
            + convolved(64, 64, 3, 2)
            + convolved(64, 128, 2)
            + dense(1152, 256),
            lambda n: nn.Linear(256, n),
        )

    def forward(self, image: Tensor) -> Tensor:
        boxes, scale = [], 0.6  # the smallest face, of 20 pixels, as 12
        while scale * min(image.shape[1:]) >= 12:
            boxes.append(self.proposed(image, scale))
            scale *= 0.709
        found = apart(torch.cat(boxes), 0.7)
        found = apart(self.refined(image, found, self.rnet, 24), 0.7)
        return apart(self.refined(image, found, self.onet, 48), 0.5)

    def proposed(self, image: Tensor, scale: float) -> Tensor:
        """Every window of 12 pixels, two apart, of the image at this scale."""
        height, width = (int(n * scale + 1) for n in image.shape[1:])
        face, box = self.pnet(F.interpolate(image[None], (height, width), mode="area"))
        y, x = (face[0] >= 0.6).nonzero().T
        windows = torch.stack([x * 2, y * 2, x * 2 + 11, y * 2 + 11], 1) / scale
        return apart(moved(windows, box[0, :, y, x].T, face[0, y, x]), 0.5)

    def refined(self, image: Tensor, boxes: Tensor, stage: nn.Module, size: int) -> Tensor:
        """The boxes that are faces on a closer look, each as a square of `size` pixels."""
        seen = [(box, crop) for box in boxes if (crop := cut(image, box)).numel()]
        if not seen:
            return boxes[:0]
        crops = [F.interpolate(crop[None], (size, size), mode="area") for _, crop in seen]
        face, box = stage(torch.cat(crops))
        sure = face > 0.7
        return moved(squared(torch.stack([box for box, _ in seen]))[sure], box[sure], face[sure])


def moved(boxes: Tensor, by: Tensor, score: Tensor) -> Tensor:
    size = (boxes[:, 2:4] - boxes[:, :2] + 1).repeat(1, 2)
    return torch.cat([boxes[:, :4] + by * size, score[:, None]], 1)


def squared(boxes: Tensor) -> Tensor:
    """Squares around the same centres, as wide as the longer side."""
    middle = (boxes[:, :2] + boxes[:, 2:4]) / 2
    half = (boxes[:, 2:4] - boxes[:, :2]).amax(1, keepdim=True) / 2
    return torch.cat([middle - half, middle + half], 1)


def cut(image: Tensor, box: Tensor) -> Tensor:
    """What the image has of the square around a box."""
    left, top, right, bottom = (int(n) for n in squared(box[None])[0].tolist())
    return image[:, max(0, top - 1) : max(0, bottom), max(0, left - 1) : max(0, right)]


def apart(boxes: Tensor, overlap: float) -> Tensor:
    """The likeliest of boxes that share more than this part of what they cover."""
    kept: list[int] = []
    corners = boxes.tolist()
    for n in boxes[:, 4].argsort(descending=True, stable=True).tolist():
        if all(shared(corners[n], corners[other]) <= overlap for other in kept):
            kept.append(n)
    return boxes[kept]


def shared(a: list[float], b: list[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (areas - width * height)


def mtcnn(smoke: bool) -> Loaded:
    model = Detector().eval()
    with zipfile.ZipFile(MTCNN.path) as archive:
        for name in ("pnet", "rnet", "onet"):
            file = io.BytesIO(archive.read(f"facenet_pytorch/data/{name}.pt"))
            saved = torch.load(file, weights_only=True, map_location="cpu")
            saved = {key: value for key, value in saved.items() if "dense6_3" not in key}  # eyes
            stage = model.get_submodule(name)
            stage.load_state_dict(dict(zip(stage.state_dict(), saved.values(), strict=True)))
    numbers = [SKATERS] if smoke else list(range(500))
    images = (photographs(numbers)[0].permute(0, 3, 1, 2) - 127.5) / 128

    def evaluate(model: nn.Module) -> Outcome:
        boxes = [model(image) for image in images]
        faces = torch.tensor([len(found) for found in boxes])
        return Outcome({"faces": faces.sum().item()}, faces, pad_sequence(boxes, True))

    return Loaded(model, (images[numbers.index(SKATERS)],), evaluate)
