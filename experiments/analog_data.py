"""The networks of `experiments.analog_networks`, each packed with its data into one file.

    python -m experiments.analog_data FOLDER [NAME ...]

A packed network needs torch and NumPy alone, so that it can be measured on another machine, and
is judged for all chips at once. What calibrates and tunes it is not what it is judged on.
Files come from `experiments.evidence`; SmolLM2 needs `pip install gguf pyarrow` to be packed.
"""

import argparse
import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.cifar_resnet import ResNet
from experiments.evidence import speech, text
from experiments.evidence.common import DATA, Loaded, normalised, strided

Packed = dict[str, Any]
LEVEL = 4  # of compression
CALIBRATED = 100  # time steps that a recurrent network is calibrated on


class Network(NamedTuple):
    """A network, what it is judged on, and what it is calibrated and tuned on instead."""

    model: nn.Module
    inputs: Tensor
    tuning: list[Tensor]
    batches: list[tuple[Tensor, Any]]  # what it reads, and what the score wants to know
    score: Callable[[Tensor, Any], Tensor]  # sums over a batch, of outputs (chips, ...)
    count: int
    finish: Callable[[Tensor], Tensor]  # the figure, from the mean score
    metric: str
    samples: str

    def figures(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """One for each chip, of what gives the outputs (chips, ...) for an input."""
        with torch.no_grad():
            total = sum(self.score(run(x), y).double() for x, y in self.batches)
        return self.finish(total / self.count).cpu()


# Images


def to_differences(images: Tensor) -> Tensor:
    """Bytes (N, H, W, 3) as what a pixel differs from its neighbours: that compresses well."""
    p = images.permute(3, 0, 1, 2).to(torch.int16)
    p = torch.stack([p[1], p[0] - p[1], p[2] - p[1]])
    left, above, corner = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    left[..., 1:], above[..., 1:, :] = p[..., :-1], p[..., :-1, :]
    corner[..., 1:, 1:] = p[..., :-1, :-1]
    return (p - _expected(left, above, corner)).to(torch.uint8)


def from_differences(stored: Tensor) -> Tensor:
    """The images of `to_differences`, pixel by pixel for all of them at once."""
    step = stored.to(torch.int8).to(torch.int16)
    out = torch.zeros(*step.shape[:2], step.shape[2] + 1, step.shape[3] + 1, dtype=torch.int16)
    grown = out.permute(2, 3, 0, 1).contiguous()
    step = step.permute(2, 3, 0, 1).contiguous()
    for i in range(step.shape[0]):
        for j in range(step.shape[1]):
            guess = _expected(grown[i + 1, j], grown[i, j + 1], grown[i, j])
            value = guess + step[i, j]
            # green is a byte; the differences of the others to it are bytes behind that
            value[0] &= 255
            value[1:] = ((value[1:] + value[0]) & 255) - value[0]
            grown[i + 1, j + 1] = value
    p = grown[1:, 1:].permute(2, 3, 0, 1)
    return torch.stack([p[1] + p[0], p[0], p[2] + p[0]], -1).to(torch.uint8)


def _expected(left: Tensor, above: Tensor, corner: Tensor) -> Tensor:
    """The neighbour beyond an edge, or where a plane through the three would be."""
    low, high = torch.minimum(left, above), torch.maximum(left, above)
    return torch.clamp(left + above - corner, low, high)


def pack_images(images: Tensor, labels: Tensor, model: nn.Module) -> Packed:
    return {"images": to_differences(images), "labels": labels, "state": model.state_dict()}


def of_images(
    held: Packed, model: nn.Module, batch: int, every: int, samples: int | None, device: Any
) -> Network:
    """Of every so many images one calibrates and tunes; the others judge."""
    images, labels = from_differences(held["images"]), held["labels"]
    chosen = torch.arange(len(images)) % every == 0
    judged = (~chosen).nonzero().flatten()
    judged = judged if samples is None else judged[:: max(1, len(judged) // samples)][:samples]
    tuning = normalised(images[chosen]).to(device)
    batches = [
        (normalised(images[part]).to(device), labels[part].to(device))
        for part in judged.split(batch)
    ]

    def right(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.argmax(-1) == labels).sum(-1)

    return Network(
        *(model, tuning[:batch], list(tuning.split(min(batch // 2, 64))), batches, right),
        *(len(judged), lambda mean: 100 * mean, "top-1 %", f"{len(judged)} images"),
    )


def pack_resnet20() -> Packed:
    from experiments.cifar_resnet import pretrained
    from experiments.evidence import vision

    return pack_images(*vision.cifar(), pretrained(3, DATA / vision.RESNET20))


def resnet20(held: Packed, samples: int | None, device: Any) -> Network:
    return of_images(held, ResNet(3), 500, 10, samples, device)


class Inverted(nn.Module):
    """A block of MobileNetV2, with the names of torchvision's."""

    def __init__(self, inputs: int, outputs: int, stride: int, wider: int) -> None:
        super().__init__()
        width, first = inputs * wider, [] if wider == 1 else [_normed(inputs, inputs * wider, 1)]
        self.conv = nn.Sequential(
            *(*first, _normed(width, width, 3, stride, width)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


def _normed(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))


class MobileNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts, width = [_normed(3, 32, 3, 2)], 32
        for wider, outputs, count, stride in (
            *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
            *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
        ):
            for k in range(count):
                parts.append(Inverted(width, outputs, 1 if k else stride, wider))
                width = outputs
        self.features = nn.Sequential(*parts, _normed(320, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


PHOTOGRAPHS = 250  # of the 500, so that they can be carried


def pack_mobilenet() -> Packed:
    from experiments.evidence import vision

    model = vision.mobilenet(True).model.half()
    return pack_images(*vision.photographs(list(range(0, 500, 500 // PHOTOGRAPHS))), model)


def mobilenet(held: Packed, samples: int | None, device: Any) -> Network:
    return of_images(held, MobileNetV2(), 25, 10, samples, device)


# Text


def of_text(
    pieces: list[Tensor], model: nn.Module, batch: int, metric: str, tuned: int, device: Any
) -> Network:
    """Pieces of tokens; each token but the first of a piece is predicted."""
    alike = len({len(piece) for piece in pieces}) == 1
    first, rest = pieces[:tuned], pieces[tuned:]
    stacks = [p[None] for p in rest] if not alike else list(torch.stack(rest).split(batch))
    tuning = [p[None].to(device) for p in first]

    def nats(logits: Tensor, tokens: Tensor) -> Tensor:
        rows = logits[..., :-1, :].flatten(1, -2).transpose(1, 2)
        wanted = tokens[:, 1:].flatten().expand(len(rows), -1)
        return F.cross_entropy(rows, wanted, reduction="none").double().sum(-1)

    count = sum(t.shape[0] * (t.shape[1] - 1) for t in stacks)
    bits = metric == "bits/char"
    batches = [(t.to(device), t.to(device)) for t in stacks]
    inputs = torch.cat(tuning)[:, :CALIBRATED] if metric == "bits/char" else tuning[0]
    return Network(
        *(model, inputs, tuning, batches, nats, count),
        *((lambda m: m / np.log(2)) if bits else torch.exp, metric, f"{count:,} tokens"),
    )


class Recorder(nn.Module):
    """Keeps what a network is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.seen = model, []

    def forward(self, *args: Any) -> Any:
        self.seen.append(args)
        return self.model(*args)


def seen(loaded: Loaded) -> list[tuple[Any, ...]]:
    """What a network is given when it is judged."""
    recorder = Recorder(loaded.model)
    with torch.no_grad():
        loaded.evaluate(recorder)
    return recorder.seen


def pack_lstm() -> Packed:
    loaded = text.char_lstm(104)
    return {
        "tokens": torch.cat([args[0] for args in seen(loaded)]).short(),
        "state": loaded.model.state_dict(),
    }


def lstm(held: Packed, samples: int | None, device: Any) -> Network:
    pieces = strided(list(held["tokens"][:, :250].long()), samples and samples + 4)
    return of_text(pieces, text.CharLSTM(), 100, "bits/char", 4, device)


class Unrolled(nn.Module):
    """The memory GRU over whole pieces of text: its cell, its gate and its writer, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = text.MemoryGRU()

    def forward(self, tokens: Tensor) -> Tensor:
        h = memory = torch.zeros(len(tokens), 124, device=tokens.device)
        logits = []
        for k in range(tokens.shape[1]):
            position = torch.full((), k, device=tokens.device)
            y, h, memory = self.step(tokens[:, k], position, h, memory)
            logits.append(y)
        return torch.stack(logits, 1)


def pack_gru() -> Packed:
    loaded = text.memory_gru(204)
    tokens = torch.stack([args[0] for args in seen(loaded)], 1)
    state = {f"step.{key}": value for key, value in loaded.model.state_dict().items()}
    return {"tokens": tokens.short(), "state": state}


def gru(held: Packed, samples: int | None, device: Any) -> Network:
    pieces = strided(list(held["tokens"][:, :128].long()), samples and samples + 4)
    return of_text(pieces, Unrolled(), 200, "bits/char", 4, device)


def pack_stories() -> Packed:
    loaded = text.stories260k(False)
    return {
        "tokens": [args[0][0].short() for args in seen(loaded)],
        "state": loaded.model.state_dict(),
    }


def stories(held: Packed, samples: int | None, device: Any) -> Network:
    pieces = sorted((p.long() for p in held["tokens"]), key=len, reverse=True)
    return of_text(
        pieces[: samples and samples + 1],
        text.Llama(text.STORIES260K),
        *(1, "perplexity", 1, device),
    )


SMOLLM2 = text.Size(49152, 30, 576, 1536, 64, 1e-5, 3, 100000.0)
NAMES = {"attn_norm": "norm1", "ffn_norm": "norm2", "ffn_gate": "w1", "ffn_down": "w2"} | {
    **{"ffn_up": "w3", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}
}


def pack_smollm2() -> Packed:
    """Weights as their file has them: 4 and 8 bits in blocks of 32 with a scale of their own."""
    import gguf

    from experiments import table5_llm as table

    path = table.unpacked(table.SMOLLM2, table.GGUF)
    held = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(path).tensors}
    return {"blocks": held, "tokens": torch.cat([w.ids for w in table.smollm2().windows])}


def smollm2(held: Packed, samples: int | None, device: Any) -> Network:
    state = {}
    for name, blocks in held["blocks"].items():
        first, *rest = name.removesuffix(".weight").split(".")
        plain = {"token_embd": "embedding", "output_norm": "norm"}.get(first)
        key = plain or f"layers.{rest[0]}.{NAMES[rest[1]]}"
        state[f"{key}.weight"] = blocks.float() if blocks.dim() == 1 else unquantised(blocks)
    held["state"] = state
    pieces = list(held["tokens"].long().unfold(0, 1024, 1024))[: (samples or 4) + 1]
    return of_text(pieces, text.Llama(SMOLLM2), 1, "perplexity", 1, device)


def unquantised(rows: Tensor) -> Tensor:
    """Blocks of 32 numbers: a scale and bytes (Q8_0), or scale, least and half bytes (Q4_1).

    SmolLM2's rows are 576 or 1536 numbers, 18 or 48 blocks, so that 20 and 34 bytes a block differ.
    """
    is_short = rows.shape[1] in (18 * 20, 48 * 20)
    blocks = torch.unflatten(rows, -1, (-1, 20 if is_short else 34)).contiguous()
    heads = blocks[..., : 4 if is_short else 2].contiguous().view(torch.float16).float()
    if not is_short:
        return (blocks[..., 2:].view(torch.int8).float() * heads).flatten(-2)
    halves = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1).float()
    return (halves * heads[..., :1] + heads[..., 1:]).flatten(-2)


# Speech


def pack_nsnet2() -> Packed:
    clean = torch.from_numpy(speech.samples(str(DATA / speech.SPEECH)))
    state = {key: value.half() for key, value in speech.nsnet2_weights().items()}
    return {"clean": (clean * 32768).short(), "state": state}


def nsnet2(held: Packed, samples: int | None, device: Any) -> Network:
    """Pieces of 2.5 s with white noise 5 dB below the speech; the first calibrates and tunes."""
    clean = torch.unflatten(held["clean"].float() / 32768, 0, (24, -1))[: samples and samples + 1]
    mixed = speech.spectrum(speech.noisy(clean))
    given = speech.features(mixed).to(device)
    told = (mixed[1:].to(device), clean[1:].to(device))

    def ratios(gain: Tensor, told: Any) -> Tensor:
        return torch.stack([speech.ratio(told[0], one, told[1]).sum() for one in gain])

    count = len(clean) - 1
    return Network(
        *(speech.NSNet2(), given[:1, :CALIBRATED], [given[:1]], [(given[1:], told)], ratios, count),
        *(lambda mean: mean, "SI-SDR dB", f"{count} pieces of 2.5 s"),
    )


class Case(NamedTuple):
    pack: Callable[[], Packed]
    load: Callable[[Packed, int | None, Any], Network]


CASES = {
    "resnet20": Case(pack_resnet20, resnet20),
    "mobilenet-v2": Case(pack_mobilenet, mobilenet),
    "char-lstm": Case(pack_lstm, lstm),
    "memory-gru": Case(pack_gru, gru),
    "nsnet2": Case(pack_nsnet2, nsnet2),
    "stories260k": Case(pack_stories, stories),
    "smollm2": Case(pack_smollm2, smollm2),
}


def load(name: str, folder: Path, samples: int | None = None, device: Any = "cpu") -> Network:
    """A packed network; `samples` of its data judge it, or all."""
    held = torch.load(io.BytesIO(lzma.decompress((folder / f"{name}.xz").read_bytes())))
    network = CASES[name].load(held, samples, device)
    network.model.load_state_dict({k: v.float() for k, v in held["state"].items()})
    return network._replace(model=network.model.eval().to(device))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        file = io.BytesIO()
        torch.save(CASES[name].pack(), file)
        path = args.folder / f"{name}.xz"
        path.write_bytes(lzma.compress(file.getvalue(), preset=LEVEL))
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
