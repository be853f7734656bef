"""Networks and inputs as the command line names them.

A network is `timm:NAME`, `hf:FOLDER_OR_ID` or `FILE.py:FACTORY`, a function without arguments that
makes it. Its inputs are made where the library knows how, or given by `--inputs` or `--data`.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from threshold_gating import conversion
from threshold_gating.targets import from_file

SPECS = "timm:NAME, hf:FOLDER_OR_ID or FILE.py:FACTORY"


class UsageError(ValueError):
    """What the command line asks for cannot be had; the message says what would work."""


def network(args: argparse.Namespace, given: Any = None) -> tuple[nn.Module, Any]:
    """The network that the command line names, in evaluation, and inputs: those given, or its."""
    source, _, name = args.network.partition(":")
    torch.manual_seed(0)
    if source == "timm" and name:
        model, inputs = _timm(name, args.pretrained)
    elif source == "hf" and name:
        model, inputs = _hugging_face(name)
    elif source.endswith(".py") and name:
        model, inputs = _from_file(Path(source), name), None
    else:
        raise UsageError(f"no network {args.network!r}; it is {SPECS}.")
    if not isinstance(model, nn.Module):
        raise UsageError(f"{args.network} gave a {type(model).__name__}, not a torch.nn.Module.")
    if args.checkpoint is not None:
        weights = conversion.load_weights(args.checkpoint, trust=args.trust)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise UsageError(f"{args.checkpoint} does not fit {args.network}: {error}") from error
    if given is not None:
        inputs = given
    elif args.inputs is not None:
        inputs = _inputs(args.inputs)
    if inputs is None:
        raise UsageError(f"{args.network} comes without inputs; give --inputs.")
    return model.eval(), inputs


def _timm(name: str, pretrained: bool) -> tuple[nn.Module, Any]:
    timm = needed("timm", "vision")
    try:
        model = timm.create_model(name, pretrained=pretrained)
    except RuntimeError as error:
        near = timm.list_models(f"*{name[:6]}*")[:3]
        raise UsageError(f"timm: {error}; there are {', '.join(near) or 'others'}.") from error
    return model, torch.randn(2, *model.pretrained_cfg["input_size"])


def _hugging_face(name: str) -> tuple[nn.Module, Any]:
    transformers = needed("transformers", "text")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        kind = (config.architectures or ["AutoModel"])[0]
        model = getattr(transformers, kind).from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"hf: {str(error).splitlines()[0]}") from error
    made = {
        "input_ids": lambda: torch.randint(0, config.get_text_config().vocab_size, (2, 16)),
        "pixel_values": lambda: torch.randn(2, config.num_channels, *_pair(config.image_size)),
    }
    main = model.main_input_name
    inputs = {main: made[main]()} if main in made else None
    if inputs is not None and config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return model, inputs


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _inputs(text: str) -> Any:
    """--inputs: a shape, a file of tensors, or a function of a file."""
    path, _, name = text.partition(":")
    if path.endswith(".py") and name:
        return _from_file(Path(path), name)
    if is_shape(text):
        return torch.randn(*(int(n) for n in text.split(",")))
    if not Path(text).is_file():
        raise UsageError(
            f"--inputs {text!r} is no file; give a shape (1,3,224,224), a file of tensors or "
            "FILE.py:FUNCTION."
        )
    if path.endswith(".safetensors"):
        return conversion.load_weights(Path(text))
    try:
        return torch.load(text, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        said = str(error).splitlines()[0] if str(error) else "it is empty"
        raise UsageError(f"{text} does not load as tensors: {said}") from error


def is_shape(text: str) -> bool:
    return text.replace(",", "").replace(" ", "").isdigit()


def _from_file(path: Path, name: str) -> Any:
    """What the function `name` of a file makes."""
    try:
        return from_file(path, name)()
    except ValueError as error:
        raise UsageError(str(error)) from error


def batches(path: Path, size: int) -> list[Any]:
    """The samples of a file, `size` at a time: a tensor, or a dict of arguments by name."""
    if size < 1:
        raise UsageError(f"--batch-size is at least 1; got {size}.")
    if not path.is_file():
        raise UsageError(f"--data {str(path)!r} is no file.")
    read = _arrays(path) if path.suffix == ".npz" else _inputs(str(path))
    if isinstance(read, Mapping) and list(read) == ["arr_0"]:  # numpy's name for one without
        read = read["arr_0"]
    tensors = list(read.values()) if isinstance(read, Mapping) else [read]
    if not tensors or not all(isinstance(t, torch.Tensor) and t.dim() for t in tensors):
        raise UsageError(f"--data {path} holds no tensor with samples along its first axis.")
    if len({len(t) for t in tensors}) != 1 or not len(tensors[0]):
        counts = ", ".join(str(len(t)) for t in tensors)
        raise UsageError(f"--data {path} needs as many samples of each tensor; it has {counts}.")
    if isinstance(read, torch.Tensor):
        return list(torch.split(read, size))
    parts = zip(*(torch.split(t, size) for t in tensors), strict=True)
    return [dict(zip(read, part, strict=True)) for part in parts]


def _arrays(path: Path) -> dict[str, torch.Tensor]:
    """The arrays of an .npz file; float64, numpy's own, as the float32 of networks."""
    import numpy as np

    try:
        with np.load(path) as file:
            tensors = {name: torch.from_numpy(file[name]) for name in file.files}
    except (ValueError, OSError, TypeError) as error:
        raise UsageError(f"--data {path}: {error}") from error
    return {k: t.float() if t.dtype == torch.float64 else t for k, t in tensors.items()}


def needed(package: str, extra: str | None = None) -> Any:
    """A package that not everybody has; if it is not there, how to get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        name = package.partition(".")[0]
        what = name if extra is None else f"'threshold-gating[{extra}]'"
        raise UsageError(f"{name} is not installed: pip install {what}") from error
