"""What kind of file it is, from its first and last bytes: Magika, with the GELU of GPT-2."""

import json
import zipfile
from collections import Counter
from pathlib import PurePath

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.evidence.common import DATA, Loaded, Outcome, Package
from experiments.evidence.faces import MTCNN
from experiments.evidence.lines import RAPIDOCR
from experiments.evidence.text import GLASS
from experiments.evidence.vision import CIFAR, IMAGES, SQUEEZENET

MAGIKA = Package(
    "magika==1.0.3",
    "magika-1.0.3-py3-none-manylinux_2_28_x86_64.whl",
    "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
)
MODEL = "magika/models/standard_v3_3"
# The files to look at are those in these archives.
ARCHIVES = (CIFAR, IMAGES, SQUEEZENET, "medical/hippocampus-130.zip")
WHEELS = (MAGIKA, RAPIDOCR, GLASS, MTCNN)
KINDS = {".png": "png", ".jpeg": "jpeg", ".npy": "npy", ".gz": "gzip", ".npz": "npz"}
KINDS |= {".py": "python", ".json": "json", ".onnx": "onnx", ".pt": "pytorch", ".md": "markdown"}


class Magika(nn.Module):
    """2048 bytes, four at a time, to the probabilities of 214 kinds of files."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 64)
        self.norm1, self.conv = nn.LayerNorm(512, eps=1e-6), nn.Conv1d(256, 512, 5)
        self.norm2, self.head = nn.LayerNorm(512, eps=1e-6), nn.Linear(512, 214)

    def forward(self, data: Tensor) -> Tensor:
        x = F.gelu(self.embedding(data), approximate="tanh").view(-1, 512, 256)
        x = self.norm1(x.mT)  # over the 512 places, for each of the 256 numbers there
        x = F.gelu(self.conv(x), approximate="tanh").amax(-1)
        return torch.softmax(self.head(self.norm2(x)), -1)


def weights() -> dict[str, Tensor]:
    """From ONNX: the embedding is a product with one-hot bytes, with a bias of its own."""
    import onnx

    with zipfile.ZipFile(MAGIKA.path) as archive:
        graph = onnx.load_from_string(archive.read(f"{MODEL}/model.onnx")).graph
    arrays = {
        i.name.removeprefix("jax2tf_get_logits_/").removeprefix("pjit_get_logits_/MagikaV2/"): (
            torch.tensor(onnx.numpy_helper.to_array(i))
        )
        for i in graph.initializer
    }
    state = {
        "embedding.weight": arrays["Const:0"] + arrays["Dense_0/Reshape:0"][0],
        "conv.weight": arrays["Conv_0/transpose_3:0"][..., 0],
        "conv.bias": arrays["const_fold_opt__209"].flatten(),
        "head.weight": arrays["Const_24:0"].T,
        "head.bias": arrays["Dense_1/Reshape:0"][0],
    }
    for n in (0, 1):
        state[f"norm{n + 1}.weight"] = arrays[f"LayerNorm_{n}/Reshape_2:0"].flatten()
        state[f"norm{n + 1}.bias"] = arrays[f"LayerNorm_{n}/Reshape_3:0"].flatten()
    return state


def ends(content: bytes) -> list[int]:
    """The first and the last 1024 bytes without the space around them; 256 where there are none."""
    first, last = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
    return [*first, *[256] * (2048 - len(first) - len(last)), *last]


def magika(smoke: bool) -> Loaded:
    """At most 60 files of each kind from each archive."""
    model = Magika().eval()
    model.load_state_dict(weights())
    with zipfile.ZipFile(MAGIKA.path) as archive:
        names = json.loads(archive.read(f"{MODEL}/config.min.json"))["target_labels_space"]
    data, labels = [], []
    for path in [*(DATA / name for name in ARCHIVES), *(wheel.path for wheel in WHEELS)]:
        seen: Counter[str] = Counter()
        with zipfile.ZipFile(path) as archive:
            for file in archive.infolist():
                kind = KINDS.get(PurePath(file.filename).suffix.lower())
                if kind is None or file.file_size < 8 or seen[kind] == (1 if smoke else 60):
                    continue
                seen[kind] += 1
                data.append(ends(archive.read(file)))
                labels.append(names.index(kind))
    files, kinds = torch.tensor(data), torch.tensor(labels)

    def evaluate(model: nn.Module) -> Outcome:
        likely = torch.cat([model(batch) for batch in files.split(20)])
        right = (likely.argmax(1) == kinds).double().mean().item()
        return Outcome({"files %": 100 * right}, likely.argmax(1), likely)

    return Loaded(model, (files[:: len(files) // 4],), evaluate)
