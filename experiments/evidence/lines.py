"""Is a line of text upside down? PP-OCR's classifier, a MobileNetV3 with hard swish."""

import zipfile
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from experiments.evidence.common import DATA, Loaded, Outcome, Package, strided
from experiments.evidence.text import BRONTE

RAPIDOCR = Package(
    "rapidocr-onnxruntime==1.4.4",
    "rapidocr_onnxruntime-1.4.4-py3-none-any.whl",
    "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
)
MODEL = "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"


class Shape(NamedTuple):
    """Of a block: its kernel, its channels inside and out, how many rows become one, whether
    channels are weighted, and whether its nonlinearity is hard swish (else ReLU)."""

    kernel: int
    inside: int
    outputs: int
    rows: int = 1
    weighted: bool = True
    swish: bool = True


BLOCKS = (
    Shape(3, 8, 8, rows=2, swish=False),
    Shape(3, 24, 8, rows=2, weighted=False, swish=False),
    Shape(3, 32, 8, weighted=False, swish=False),
    Shape(5, 32, 16, rows=2),
    Shape(5, 88, 16),
    Shape(5, 88, 16),
    Shape(5, 40, 16),
    Shape(5, 48, 16),
    Shape(5, 104, 32, rows=2),
    Shape(5, 200, 32),
    Shape(5, 200, 32),
)


class Normed(nn.Sequential):
    """A convolution and its batch norm; one channel each where there are as many groups."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: tuple[int, int] = (1, 1),
        groups: int = 1,
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
        )


class Weighted(nn.Module):
    """Each channel times a number between 0 and 1 that all channels' means decide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x.mean((2, 3), keepdim=True))))
        return x * torch.clamp(0.2 * y + 0.5, 0, 1)  # Paddle's hard sigmoid


class Block(nn.Module):
    def __init__(self, inputs: int, shape: Shape) -> None:
        super().__init__()
        inside = shape.inside
        self.expand = Normed(inputs, inside)
        self.depthwise = Normed(inside, inside, shape.kernel, (shape.rows, 1), groups=inside)
        self.weighted = Weighted(inside) if shape.weighted else nn.Identity()
        self.linear = Normed(inside, shape.outputs)
        self.act = nn.Hardswish() if shape.swish else nn.ReLU()
        self.residual = inputs == shape.outputs and shape.rows == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.depthwise(self.act(self.expand(x))))
        y = self.linear(self.weighted(y))
        return x + y if self.residual else y


class Upright(nn.Module):
    """The probabilities that a line stands upright and upside down."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Normed(3, 8, 3, (2, 2)), Normed(32, 200)
        widths = (8, *(shape.outputs for shape in BLOCKS[:-1]))
        self.blocks = nn.Sequential(*map(Block, widths, BLOCKS))
        self.head = nn.Linear(200, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.last(self.blocks(F.hardswish(self.first(x)))))
        return torch.softmax(self.head(F.max_pool2d(x, 2).mean((2, 3))), 1)


def weights() -> dict[str, Tensor]:
    """From ONNX: names say what they are, the blocks are numbered from 2."""
    import onnx

    with zipfile.ZipFile(RAPIDOCR.path) as archive:
        graph = onnx.load_from_string(archive.read(MODEL)).graph
    nodes = [node for node in graph.node if node.op_type == "Constant"]
    arrays = {
        n.output[0]: torch.tensor(onnx.numpy_helper.to_array(n.attribute[0].t)) for n in nodes
    }
    state = {"head.weight": arrays["fc_0.w_0"].T, "head.bias": arrays["fc_0.b_0"]}
    parts = {"first": "conv1", "last": "conv_last"}
    for n, shape in enumerate(BLOCKS):
        parts |= {
            f"blocks.{n}.{part}": f"conv{n + 2}_{part}"
            for part in ("expand", "depthwise", "linear")
        }
        for key, name in (("first", "se_1"), ("second", "se_2")):
            if shape.weighted:
                state[f"blocks.{n}.weighted.{key}.weight"] = arrays[f"conv{n + 2}_{name}_weights"]
                state[f"blocks.{n}.weighted.{key}.bias"] = arrays[f"conv{n + 2}_{name}_offset"]
    norm = {"weight": "scale", "bias": "offset", "running_mean": "mean", "running_var": "variance"}
    for key, name in parts.items():
        state[f"{key}.0.weight"] = arrays[f"{name}_weights"]
        state |= {f"{key}.1.{k}": arrays[f"{name}_bn_{v}"] for k, v in norm.items()}
        state[f"{key}.1.num_batches_tracked"] = torch.tensor(0)
    return state


def upright(smoke: bool) -> Loaded:
    """Lines of a novel, drawn in Pillow's own font; every second one is turned by 180 degrees."""
    model = Upright().eval()
    model.load_state_dict(weights())
    text = (DATA / BRONTE).read_text("utf-8")
    written = [line.strip()[:28] for line in text.splitlines() if len(line.strip()) > 40]
    images = torch.stack([drawn(line) for line in strided(written, 10 if smoke else 1000)])
    images[1::2] = images[1::2].flip(2, 3)
    turned = torch.arange(len(images)) % 2

    def evaluate(model: nn.Module) -> Outcome:
        likely = torch.cat([model(batch) for batch in images.split(50)])
        right = (likely.argmax(1) == turned).double().mean().item()
        return Outcome({"lines %": 100 * right}, likely.argmax(1), likely)

    return Loaded(model, (images[:4],), evaluate)


def drawn(line: str) -> Tensor:
    """Black on white, 48 x 192 pixels, between -1 and 1."""
    font = ImageFont.load_default(32)
    left, top, right, bottom = font.getbbox(line)
    image = Image.new("RGB", (int(right - left) + 12, int(bottom - top) + 12), "white")
    ImageDraw.Draw(image).text((6 - left, 6 - top), line, "black", font)
    pixels = np.asarray(image.resize((192, 48), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels / 127.5 - 1).float().permute(2, 0, 1)
