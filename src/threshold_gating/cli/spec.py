"""Networks and inputs as the command line names them.

A network is `timm:NAME`, `hf:FOLDER_OR_ID` or `FILE.py:FACTORY`, a function without arguments that
makes it. Its inputs are made where the library knows how, or given by `--inputs` or `--data`.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import re
import sys
import zipfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from threshold_gating import conversion
from threshold_gating.cli.function import failure, from_file
from threshold_gating.cli.printing import UsageError
from threshold_gating.cli.shared import SPECS
from threshold_gating.conversion.aten_ops import tensors
from threshold_gating.conversion.plan import arguments


class Network(NamedTuple):
    """What the command line names: a network in evaluation, inputs, and what of it is random."""

    model: nn.Module
    inputs: Any
    random_weights: str  # why they are, and what to give for trained ones; "" where they are not
    random_inputs: str  # the same of inputs

    @property
    def notes(self) -> list[str]:
        """What a reader of figures about it has to know."""
        inputs = f"Inputs are random; {self.random_inputs}" if self.random_inputs else ""
        weights = f"Weights are random: {self.random_weights}" if self.random_weights else ""
        return [note for note in (weights, inputs) if note]

    def to_dict(self) -> dict[str, bool]:
        random = {"weights": self.random_weights, "inputs": self.random_inputs}
        return {f"random_{what}": bool(found) for what, found in random.items()}


def has_its_gates(named: Network) -> bool:
    """Whether a network came with gates, and with nothing left that was not asked for."""
    positional, keywords = arguments(named.inputs)
    own = conversion.audit(named.model, *positional, **keywords)
    return bool(own.sites) and all(op.asked for op in own.left)


def network(args: argparse.Namespace, given: Any = None) -> Network:
    """The network that the command line names, with the inputs given, or made for it."""
    source, _, name = args.network.partition(":")
    if args.pretrained and source != "timm":
        raise UsageError(f"--pretrained is for timm:NAME; {args.network} has weights of its own.")
    if args.trust and args.checkpoint is None:
        raise UsageError("--trust is for the file of --checkpoint; give one.")
    torch.manual_seed(0)
    random, inputs = "", None
    if source == "timm" and name:
        model, inputs = _timm(name, args.pretrained)
        if not args.pretrained:
            random = "give --pretrained or --checkpoint FILE for trained ones."
    elif source == "hf" and name:
        model, inputs, random = _hugging_face(name)
    elif source.endswith(".py") and name:
        model = _from_file(Path(source), name)
    else:
        raise UsageError(f"no network {args.network!r}; write {SPECS}.")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{args.network} gave {type(model).__name__}, which is not a torch.nn.Module."
        )
    if args.checkpoint is not None:
        weights, random = conversion.load_weights(args.checkpoint, trust=args.trust), ""
        try:
            model.load_state_dict(weights)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"{args.checkpoint} does not fit {args.network}: {error}") from error
    if given is not None:
        inputs = given
    elif args.inputs is not None:
        inputs = _inputs(args.inputs)
    if inputs is None:
        raise UsageError(f"{args.network} comes without inputs; give --inputs.")
    made = ""
    if given is None and args.inputs is None:
        made = "give --inputs for your own."
    elif given is None and is_shape(args.inputs):
        made = "--inputs with a file of tensors or FILE.py:FUNCTION takes your own."
    return Network(model.eval(), inputs, random, made)


def _timm(name: str, pretrained: bool) -> tuple[nn.Module, Any]:
    timm = needed("timm", "vision")
    try:
        model = timm.create_model(name, pretrained=pretrained)
    except Exception as error:  # of timm, of its hub or of what these connect with
        if timm.is_model(name.partition(".")[0]):
            help_ = "; --checkpoint FILE takes weights that are here" if pretrained else ""
            raise UsageError(f"timm: {name} cannot be made ({brief(error)}){help_}.") from error
        near = timm.list_models(f"*{name[:6]}*")[:3]
        raise UsageError(
            f"timm: {brief(error)}; there are {', '.join(near) or 'others'}."
        ) from error
    return model, torch.randn(2, *model.pretrained_cfg["input_size"])


def brief(error: BaseException) -> str:
    """The first line of what an error says, with its type where that alone says what it is."""
    first = next(iter(str(error).strip().splitlines()), "").rstrip(". ")
    plain = isinstance(error, ValueError | RuntimeError | OSError) and first
    return first if plain else f"{type(error).__name__}: {first}".rstrip(": ")


def _hugging_face(name: str) -> tuple[nn.Module, Any, str]:
    transformers = needed("transformers", "text")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        kind = (config.architectures or ["AutoModel"])[0]
        make = getattr(transformers, kind)
        model, info = make.from_pretrained(name, output_loading_info=True)
    except Exception as error:  # of transformers, of its hub or of what these connect with
        raise UsageError(f"hf: {brief(error)}") from error
    made = {
        "input_ids": lambda: torch.randint(0, config.get_text_config().vocab_size, (2, 16)),
        "pixel_values": lambda: torch.randn(2, config.num_channels, *_pair(config.image_size)),
    }
    main = model.main_input_name
    inputs = {main: made[main]()} if main in made else None
    if inputs is not None and config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    lost = sorted(info["missing_keys"])
    random = f"{name} has no {lost[0]} ({len(lost)} missing)." if lost else ""
    return model, inputs, random


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _inputs(text: str) -> Any:
    """--inputs: a shape, a file of tensors, or a function of a file."""
    path, _, name = text.partition(":")
    if is_shape(text):
        return _random(text)
    if path.endswith(".py") and name:
        inputs = _from_file(Path(path), name)
    elif not Path(text).is_file():
        raise UsageError(
            f"--inputs {text!r} is not a file; give a shape (1,3,224,224), a file of tensors or "
            "FILE.py:FUNCTION."
        )
    else:
        inputs = _loaded(Path(text))
    if not any(t.numel() for t in tensors(inputs)):
        raise UsageError(
            f"--inputs {text} holds no values, so nothing of the network would be seen."
        )
    return inputs


def _loaded(path: Path) -> Any:
    """The tensors of a file."""
    if path.suffix == ".safetensors":
        return conversion.load_weights(path)
    try:
        return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        said = "it is not a file of tensors alone, as torch.save writes it"
        raise UsageError(f"{path} does not load as tensors: {said}.") from error
    except (OSError, LookupError, RuntimeError, EOFError) as error:
        said = str(error).splitlines()[0] if str(error) else "it is empty"
        raise UsageError(f"{path} does not load as tensors: {said}") from error


def is_shape(text: str) -> bool:
    return re.fullmatch(r"[\s\d,]+", text, re.ASCII) is not None


def _random(text: str) -> torch.Tensor:
    """Random inputs of a shape, none of whose sizes is 0: on nothing, nothing is seen."""
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text, re.ASCII):
        raise UsageError(
            f"--inputs {text!r} is not a shape: give whole numbers from 1 on, as in 1,3,224,224."
        )
    try:
        return torch.randn(*(int(n) for n in text.split(",")))
    except (RuntimeError, OverflowError, TypeError, ValueError, MemoryError) as error:
        raise UsageError(f"--inputs {text!r} cannot be made ({brief(error)}).") from error


def _from_file(path: Path, name: str) -> Any:
    """What the function `name` of a file makes; a network or tensor that stands there as it is."""
    with redirect_stdout(sys.stderr):  # what the file prints is not the report
        try:
            found = from_file(path, name)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if isinstance(found, nn.Module) or not callable(found):
            return found
        try:
            return found()
        except (Exception, SystemExit) as error:
            raise UsageError(failure(f"{path}:{name}", path, error)) from error


def batches(path: Path, size: int) -> list[Any]:
    """The samples of a file, `size` at a time: a tensor, or a dict of arguments by name."""
    if size < 1:
        raise UsageError(f"--batch-size must be at least 1; got {size}.")
    if not path.is_file():
        raise UsageError(f"--data {str(path)!r} is not a file.")
    read = _arrays(path) if path.suffix == ".npz" else _loaded(path)
    if isinstance(read, Mapping) and list(read) == ["arr_0"]:  # numpy's name for one without
        read = read["arr_0"]
    parts = list(read.values()) if isinstance(read, Mapping) else [read]
    if not parts or not all(isinstance(t, torch.Tensor) and t.dim() for t in parts):
        raise UsageError(f"--data {path} holds no tensor with samples along its first axis.")
    if len({len(t) for t in parts}) != 1 or not len(parts[0]):
        counts = ", ".join(str(len(t)) for t in parts)
        raise UsageError(
            f"--data {path} must have equally many samples of each tensor; it has {counts}."
        )
    if isinstance(read, torch.Tensor):
        return list(torch.split(read, size))
    each = zip(*(torch.split(t, size) for t in parts), strict=True)
    return [dict(zip(read, batch, strict=True)) for batch in each]


def _arrays(path: Path) -> dict[str, torch.Tensor]:
    """The arrays of an .npz file; float64, numpy's own, as the float32 of networks."""
    import numpy as np

    try:
        with np.load(path) as file:
            found = {name: torch.from_numpy(file[name]) for name in file.files}
    except (ValueError, OSError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"--data {path}: {brief(error)}") from error
    return {k: t.float() if t.dtype == torch.float64 else t for k, t in found.items()}


def device(name: str) -> torch.device:
    """The device that --device names, which works."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(f"--device {name!r} is not available: {said}") from error
    return torch.device(name)


def needed(package: str, extra: str | None = None) -> Any:
    """A package that not everybody has; if it is not there, how to get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        name = package.partition(".")[0]
        what = name if extra is None else f"'threshold-gating[{extra}]'"
        raise UsageError(f"{name} is not installed: pip install {what}") from error
