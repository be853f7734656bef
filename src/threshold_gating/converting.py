"""The commands `tg convert`, `tg audit` and `tg verify`: networks named on the command line.

A network is `timm:NAME`, `hf:FOLDER_OR_ID` or `FILE.py:FACTORY`, a function without arguments that
makes it. Its inputs are made where the library knows how, or given by `--inputs`.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from threshold_gating import conversion
from threshold_gating.conversion.plan import arguments
from threshold_gating.targets import from_file

SPECS = "timm:NAME, hf:FOLDER_OR_ID or FILE.py:FACTORY"


class UsageError(ValueError):
    """What the command line asks for cannot be had; the message says what would work."""


def add_commands(commands: Any) -> None:
    """Add the three commands to the parser of `tg`."""
    convert = _command(commands, "convert", "a network to gates, with a certificate")
    convert.add_argument("-o", "--out", type=Path, metavar="DIR", help="where to save the result")
    convert.add_argument("--gates-only", action="store_true", help="save no weights")
    convert.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="NAME=CHOICE",
        help="what to put at a site (or re:pattern): a row, a number of branches, or none",
    )
    audit = _command(commands, "audit", "what nonlinearities a network executes")
    audit.add_argument("--gates", type=Path, metavar="DIR", help="with the gates saved there")
    verify = _command(commands, "verify", "a saved conversion against its network")
    verify.add_argument("gates", type=Path, metavar="DIR", help="what tg convert -o wrote")


def _command(commands: Any, name: str, words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=words)
    parser.add_argument("network", metavar="NETWORK", help=f"{SPECS} (a function that makes it)")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights to load")
    parser.add_argument("--trust", action="store_true", help="run code that a pickle asks for")
    parser.add_argument("--pretrained", action="store_true", help="let timm fetch its own weights")
    parser.add_argument(
        "--inputs",
        metavar="WHAT",
        help="a shape (1,3,224,224), a file of tensors (.safetensors, .pt) or FILE.py:FUNCTION",
    )
    parser.add_argument("--json", action="store_true", help="for other programs")
    return parser


def command(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`run` with its errors printed as one line."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (UsageError, conversion.ConversionError, conversion.CheckpointError) as error:
            print(f"tg {run.__name__.strip('_')}: {error}", file=sys.stderr)
            return 2

    return guarded


@command
def convert(args: argparse.Namespace) -> int:
    """`tg convert`."""
    model, inputs = network(args)
    positional, named = arguments(inputs)
    with _working(args, f"{args.network}, {_size(model)} parameters: converting"):
        gated = conversion.convert(model, _choices(args.site), inputs=inputs, strict=False)
    with _working(args, "verifying with the gates evaluated"):
        certificate = conversion.verify(model, gated, *positional, **named)
        audit = conversion.audit(gated, *positional, **named)
    ok = certificate.ok and not [op for op in audit.left if not op.asked]
    if ok and args.out is not None:
        conversion.save(gated, args.out, gates_only=args.gates_only)
    report = {"certificate": certificate.to_dict(), "audit": audit.to_dict(), "ok": ok}
    text = f"{certificate.table()}\n\n{str(audit).splitlines()[-1]}"
    _show(args, report, text)
    if not ok:
        print("tg convert: not written, see above.", file=sys.stderr)
    elif args.out is not None:
        _say(args, f"Written to {args.out.resolve()}")
    return 0 if ok else 1


@command
def audit(args: argparse.Namespace) -> int:
    """`tg audit`."""
    model, inputs = network(args)
    if args.gates is not None:
        conversion.load(args.gates, model)
    positional, named = arguments(inputs)
    found = conversion.audit(model, *positional, **named)
    _show(args, found.to_dict(), str(found))
    return 0


@command
def verify(args: argparse.Namespace) -> int:
    """`tg verify`."""
    model, inputs = network(args)
    gated = conversion.load(args.gates, copy.deepcopy(model))
    model.load_state_dict(_plain_weights(gated, model))  # the same weights on both sides
    positional, named = arguments(inputs)
    with _working(args, "verifying with the gates evaluated"):
        certificate = conversion.verify(model, gated, *positional, **named)
    _show(args, certificate.to_dict(), certificate.table())
    return 0 if certificate.ok else 1


def _plain_weights(gated: nn.Module, model: nn.Module) -> dict[str, Any]:
    state = gated.state_dict()
    return {key: state.get(key, value) for key, value in model.state_dict().items()}


def network(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The network that the command line names, in evaluation, and inputs for it."""
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
    if args.inputs is not None:
        inputs = _inputs(args.inputs)
    if inputs is None:
        raise UsageError(f"{args.network} comes without inputs; give --inputs.")
    return model.eval(), inputs


def _timm(name: str, pretrained: bool) -> tuple[nn.Module, Any]:
    timm = _needed("timm", "vision")
    try:
        model = timm.create_model(name, pretrained=pretrained)
    except RuntimeError as error:
        near = timm.list_models(f"*{name[:6]}*")[:3]
        raise UsageError(f"timm: {error}; there are {', '.join(near) or 'others'}.") from error
    return model, torch.randn(2, *model.pretrained_cfg["input_size"])


def _hugging_face(name: str) -> tuple[nn.Module, Any]:
    transformers = _needed("transformers", "text")
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
    if text.replace(",", "").replace(" ", "").isdigit():
        return torch.randn(*(int(n) for n in text.split(",")))
    if not Path(text).is_file():
        raise UsageError(
            f"--inputs {text!r} is no file; give a shape (1,3,224,224), a file of tensors or "
            "FILE.py:FUNCTION."
        )
    if path.endswith(".safetensors"):
        return conversion.load_weights(Path(text))
    return torch.load(text, weights_only=True)


def _from_file(path: Path, name: str) -> Any:
    """What the function `name` of a file makes."""
    try:
        return from_file(path, name)()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _choices(given: list[str]) -> dict[str, Any] | None:
    """--site NAME=CHOICE as `convert` takes it."""
    chosen: dict[str, Any] = {}
    for text in given:
        name, equals, choice = text.rpartition("=")
        if not equals:
            raise UsageError(f"--site {text!r} is not NAME=CHOICE.")
        chosen[name] = None if choice == "none" else int(choice) if choice.isdigit() else choice
    return chosen or None


def _needed(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{package} is not installed: pip install 'threshold-gating[{extra}]'"
        ) from error


def _size(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,}"


@contextmanager
def _working(args: argparse.Namespace, what: str) -> Iterator[None]:
    """Say on stderr what is being done and, on a terminal, for how long already."""
    done = threading.Event()

    def tick() -> None:
        start = time.monotonic()
        while not done.wait(0.5):
            print(
                f"\r{what} ... {time.monotonic() - start:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )
        print(file=sys.stderr)

    ticking = threading.Thread(target=tick, daemon=True)
    if args.json or not sys.stderr.isatty():
        _say(args, f"{what} ...")
    else:
        ticking.start()
    try:
        yield
    finally:
        done.set()
        if ticking.is_alive():
            ticking.join()


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(text, file=sys.stderr, flush=True)


def _show(args: argparse.Namespace, report: Mapping[str, Any], text: str) -> None:
    print(json.dumps(report, indent=2) if args.json else text)
