"""Networks of timm on a folder of ImageNet's validation images, for Table 4.

The folder holds one folder for each class, named by its WordNet number (n01440764) or its index (0
to 999). Images are prepared as timm says for the weights. Every so many images one is held back to
calibrate on, 640 of them; the others judge.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.evidence.common import Loaded, Outcome, classified
from experiments.evidence.run import sha256

IMAGES = 640  # to calibrate on


def has_gelu(name: str) -> bool:
    import timm

    with torch.device("meta"):
        return any("GELU" in type(m).__name__ for m in timm.create_model(name).modules())


def load(
    name: str, folder: Path, checkpoints: dict[str, Path]
) -> tuple[Loaded, Tensor, dict[str, Any]]:
    """A network on the images of a folder, images to calibrate on, and what its weights are."""
    import timm
    from timm.data import create_transform, resolve_model_data_config

    if name in checkpoints:
        model = timm.create_model(name, checkpoint_path=str(checkpoints[name]))
        about = {"sha256": sha256(checkpoints[name])}
    else:
        model = timm.create_model(name, pretrained=True)
        about = {"sha256": "timm's own"}
    config = resolve_model_data_config(model)
    prepare = create_transform(**config, is_training=False)
    found = labelled_files(folder)
    step = max(2, len(found) // IMAGES)
    held = {n for k, n in enumerate(range(0, len(found), step)) if k < IMAGES}
    seen = torch.stack([image(found[n][0], prepare) for n in sorted(held)])
    judged = [pair for n, pair in enumerate(found) if n not in held]
    labels = torch.tensor([label for _, label in judged])

    def evaluate(model: Callable[[Tensor], Tensor]) -> Outcome:
        batches = (judged[k : k + 50] for k in range(0, len(judged), 50))
        stacked = (torch.stack([image(file, prepare) for file, _ in batch]) for batch in batches)
        return classified(torch.cat([model(x) for x in stacked]), labels)

    about |= {"calibrated on": len(seen), "input": str(config["input_size"])}
    return Loaded(model.eval(), (seen[:2],), evaluate), seen, about


def labelled_files(folder: Path) -> list[tuple[Path, int]]:
    """Every image of a folder with its class, which is what its own folder is called."""
    from timm.data import ImageNetInfo

    numbers = {name: n for n, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    numbers |= {str(n): n for n in range(1000)}
    folders = sorted(f for f in folder.iterdir() if f.is_dir()) if folder.is_dir() else []
    strangers = [f.name for f in folders if f.name not in numbers]
    if not folders or strangers:
        raise SystemExit(
            f"--imagenet {folder}: the images must be in folders named by class, n01440764 or 0 "
            f"to 999; found {', '.join(strangers[:3]) or 'none'}."
        )
    return [(file, numbers[f.name]) for f in folders for file in sorted(f.iterdir())]


def image(file: Path, prepare: Callable[[Any], Tensor]) -> Tensor:
    from PIL import Image

    with Image.open(file) as opened:
        return prepare(opened.convert("RGB"))
