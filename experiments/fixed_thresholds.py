"""Sigmoid attention from a network trained with softmax: what fixed thresholds cost.

What it should show, if it works: a threshold for each head and number of keys, the mean of those
that a trained network has, instead of Eq. 11's reduction over each row, keeps the perplexity, or a
short training of the thresholds alone brings it back.

    python -m experiments.fixed_thresholds [--steps 300]

stories260K; thresholds are measured and learnt on pieces of other TinyStories text, a few held out.
Both texts are looked for in TG_DATA.

Last measured result (torch 2.13, one thread): it does not work as it is. Perplexity of the sample:
3.548 with softmax, 38.058 with thresholds as measured, 10.484 after 300 steps on these 720 numbers.
"""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from experiments.evidence import text
from experiments.evidence.common import DATA

PIECES, HELD_OUT, LETTERS, RATE = 60, 12, 700, 0.05


def pieces() -> list[Tensor]:
    """Paragraphs of the text put together, up to `LETTERS` each."""
    found = [""]
    for paragraph in (DATA / text.STORIES).read_text("utf-8").split("\n\n"):
        if found[-1] and len(found[-1]) + len(paragraph) > LETTERS:
            found.append("")
        found[-1] = f"{found[-1]}\n\n{paragraph}".strip()
    return [torch.tensor(text.tokenised(piece))[:512] for piece in found[:PIECES]]


@torch.no_grad()
def perplexity(model: nn.Module, texts: list[Tensor]) -> float:
    nats = [F.cross_entropy(model(t[None, :-1])[0].double(), t[1:], reduction="sum") for t in texts]
    return math.exp(sum(nats).item() / sum(len(t) - 1 for t in texts))


def learn(model: nn.Module, texts: list[Tensor], steps: int) -> int:
    """Train the thresholds alone; how many numbers these are."""
    theta = [p for name, p in model.named_parameters() if name.endswith("thresholds.theta")]
    optimizer = torch.optim.Adam(theta, lr=RATE)
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        t = texts[int(torch.randint(len(texts), (), generator=draw))]
        loss = F.cross_entropy(model(t[None, :-1])[0], t[1:])
        for p, grad in zip(theta, torch.autograd.grad(loss, theta), strict=True):
            p.grad = grad
        optimizer.step()
    return sum(p.numel() for p in theta)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    model, sample, read = text.stories260k(False).model, text.stories(), pieces()
    texts, held_out = read[:-HELD_OUT], read[-HELD_OUT:]
    start = time.monotonic()

    def show(name: str, network: nn.Module) -> None:
        values = f"{perplexity(network, sample):>9.3f} {perplexity(network, held_out):>9.3f}"
        print(f"{name:<40} {values}  {time.monotonic() - start:>4.0f} s", flush=True)

    print(f"{'attention':<40} {'sample':>9} {'held out':>9}   (perplexity)")
    show("softmax", model)
    fixed = tg.conversion.fixed_thresholds(model, [t[None] for t in texts])
    show("fixed thresholds, measured", fixed)
    count = learn(fixed, texts, args.steps)
    show(f"fixed thresholds, {args.steps} steps on {count} numbers", fixed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
