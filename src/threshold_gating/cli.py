"""The command `tg`: tables, explanations, conversion, the state of an installation, a demo."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor

from threshold_gating import (
    __version__,
    converting,
    evaluating,
    explaining,
    kernels,
    proving,
    taxonomy,
)
from threshold_gating.conversion import ConversionError
from threshold_gating.insight import plot_explanation
from threshold_gating.layers import Activation
from threshold_gating.tables import FORMATS, Entry


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own); returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _run(words)
        sys.stdout.flush()  # here, where a reader that has gone is caught, not at exit
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more at exit; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports for a program that the closed pipe ended
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            raise
        print(f"tg {_command(words) or ''}: {_in_a_line(error)}", file=sys.stderr)
        return 2
    return code


_TRACEBACK = "TG_TRACEBACK"


def _in_a_line(error: Exception) -> str:
    """What went wrong that no command has words of its own for, and how to see where."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}".rstrip(": ") + f" ({_TRACEBACK}=1 shows where)"


def _command(words: Sequence[str]) -> str | None:
    """Options before the command take no value, so the first other word is the command."""
    return next((word for word in words if not word.startswith("-")), None)


def _run(words: Sequence[str]) -> int:
    parser = _parser()
    command = _command(words)
    if command is not None and command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}."
        parser.error(f"no command {command!r}; {hint}")
    args = parser.parse_args(words)
    if command is None:
        parser.print_help()
        return 2
    return COMMANDS[command](args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tg", description="Neural nonlinearities as one tunable gate."
    )
    parser.add_argument("--version", action="version", version=f"tg {__version__}")
    commands = parser.add_subparsers(metavar="command")

    table = commands.add_parser("table", help="activations as instances, with their errors")
    table.add_argument("names", nargs="*", metavar="NAME", help="rows to show (default: Table 2)")
    table.add_argument("--all", action="store_true", help="every row, then what has none and why")
    table.add_argument("--format", choices=FORMATS, default="text", help="(default: text)")

    _add_explain(commands)
    converting.add_commands(commands)
    evaluating.add_command(commands)
    proving.add_command(commands)

    env = commands.add_parser("env", help="versions, devices, and each backend tried out")
    env.add_argument("--json", action="store_true", help="for other programs")

    bench = commands.add_parser("bench", help="check every kernel, then time it against others")
    bench.add_argument("--smoke", action="store_true", help="small sizes on the CPU, in seconds")
    bench.add_argument("--json", type=Path, metavar="FILE", help="every time, for other programs")
    bench.add_argument("--only", nargs="+", metavar="SECTION", help="these sections only")

    demo = commands.add_parser("demo", help="train five small networks, convert them, compare")
    demo.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="for the report (default: here)"
    )
    demo.add_argument("--seed", type=int, default=0, help="of the training (default: 0)")
    return parser


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="family, fits and theory of any activation",
        description="Family, fits and theory of any activation, and a picture of them.",
        epilog=dedent(_EXPLAIN_EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a name (gelu), an expression in x, or FILE.py:NAME for a function or module of your "
        "own (FILE.py is imported, which runs what it says)",
    )
    parser.add_argument(
        "--k",
        type=_branches,
        nargs="+",
        default=[2, 3, 4, 5],
        metavar="K",
        help="how many branches to fit with, after WHAT (default: 2 3 4 5)",
    )
    parser.add_argument(
        "--at", type=_finite, default=0.0, metavar="X", help="centre of the theory (default: 0)"
    )
    parser.add_argument("--out", type=_picture, metavar="FILE", help="a picture, .png or .svg")
    parser.add_argument("--json", action="store_true", help="for other programs, with every digit")


_EXPLAIN_EXAMPLES = """
    examples:
      tg explain gelu
      tg explain "x*sigmoid(1.3*x)" --out swish.png
      tg explain "(-x)*sigmoid(x)" --k 3 5 --at 1   (one that begins with - needs the brackets)
      tg explain activations.py:MyActivation --json
"""


def _branches(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 2 <= int(word) <= 8):
        raise argparse.ArgumentTypeError(f"K is a number from 2 to 8; got {word!r}")
    return int(word)


def _finite(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"X is a finite number; got {word!r}")
    return value


def _picture(word: str) -> Path:
    if Path(word).suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"FILE ends in .png or .svg; got {word!r}")
    return Path(word)


# tg table


def _table(args: argparse.Namespace) -> int:
    if args.all and args.names:
        print("tg table: give names or --all, not both.", file=sys.stderr)
        return 2
    names, known = [], True
    for name in args.names:
        try:
            names.append(taxonomy.key_of(name))
        except ValueError as error:
            print(f"tg table: {error}", file=sys.stderr)
            known = False
    if not known:
        return 2
    keys = taxonomy.TAXONOMY if args.all else names or taxonomy.TABLE2
    entries = [Entry(key, taxonomy.TAXONOMY[key], taxonomy.ROWS[key]) for key in keys]
    print(FORMATS[args.format](entries, taxonomy.NOT_REPRESENTABLE if args.all else {}))
    return 0


# tg explain


def _explain(args: argparse.Namespace) -> int:
    try:
        with redirect_stdout(sys.stderr):  # what a user's own file prints is not the report
            report = explaining.report(args.what, args.k, args.at, _tell)
    except ValueError as error:
        print(f"tg explain: {error}", file=sys.stderr)
        return 2
    if not args.json:
        print(explaining.as_text(report), end="\n\n", flush=True)
    code = 0
    if report.missing:
        _say_missing("explain", "the fits need", report.missing, "fit")
        code = 1
    drawn = None
    if args.out is not None:
        if _write_explanation(report, args.out):
            drawn = str(args.out.resolve())
        else:
            code = 1
    if args.json:
        print(explaining.as_json(report, drawn))
    elif drawn:
        print(f"Written to {drawn}")
    elif args.out is None:
        name = re.sub(r"\W+", "_", report.target.name).strip("_")[:40] or "picture"
        print(f"For a picture: tg explain {shlex.quote(args.what)} --out {name}.png")
    return code


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        print(f"tg explain: {line}", file=sys.stderr, flush=True)


def _write_explanation(report: explaining.Report, path: Path) -> bool:
    f, fits, theory = report.target.f, report.fits, report.explanation
    return _written("explain", path, lambda: plot_explanation(f, fits, theory, path), "plot")


# tg env

_OPTIONAL = (
    *("matplotlib", "onnx", "onnxruntime", "ray", "scipy", "timm", "torchvision"),
    *("transformers", "triton"),
)
_TRIED = ("relu", "silu", "tanh", "mish")  # each has a native op, so every backend runs them
# Values and gradients of order 10 in float32, a few roundings of 6e-7 each; a wrong formula is
# off by far more.
_WORKS_BELOW = 1e-5


def _env(args: argparse.Namespace) -> int:
    devices = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    if torch.cuda.is_available():
        devices["cuda"] = torch.cuda.get_device_name()
    tried = {name: {d: try_backend(name, d) for d in devices} for name in kernels.BACKENDS}
    works = all(result["works"] is not False for on in tried.values() for result in on.values())
    if args.json:
        facts = {"versions": _versions(), "devices": devices, "backends": tried}
        print(json.dumps({**facts, "backend": kernels.backend()}, indent=2))
        return 0 if works else 1
    for name, version in _versions().items():
        print(f"{name:<16}  {version or 'not installed'}")
    print("\ndevices:")
    for device, words in devices.items():
        print(f"{device:<16}  {words}")
    print("\nbackends, forward and backward in float32 against torch in float64:")
    for name, on in tried.items():
        chosen = " (in use)" if name == kernels.backend() else ""
        for device, result in on.items():
            print(f"{name + chosen:<16}  {device:<4}  {result['message']}")
    return 0 if works else 1


def _versions() -> dict[str, str | None]:
    """Read from the installed metadata: importing some of these takes seconds."""
    versions: dict[str, str | None] = {
        "threshold_gating": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in _OPTIONAL:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def try_backend(name: str, device: str = "cpu") -> dict[str, Any]:
    """Run a backend, values and gradients, and say how far it is from torch in float64."""
    x = torch.linspace(-8, 8, 1003, dtype=torch.float64)
    try:
        with kernels.use(name):
            error = max(_distance(key, x, device) for key in _TRIED)
    except kernels.BackendError as absent:
        return {"works": None, "max_error": None, "message": f"not here: {absent}"}
    except Exception as failure:  # whatever it is, the report is what was asked for
        message = f"fails: {type(failure).__name__}: {failure}"
        return {"works": False, "max_error": None, "message": message}
    works = error < _WORKS_BELOW  # False for NaN
    message = f"{'works' if works else 'gives wrong values'} (max error {error:.1e})"
    return {"works": works, "max_error": error, "message": message}


def _distance(key: str, x: Tensor, device: str) -> float:
    got = _with_gradient(Activation(key).to(device), x.to(device, torch.float32))
    # The same inputs in both: those of float32.
    wanted = _with_gradient(taxonomy.ROWS[key].f, x.float().double())
    return max((g.cpu().double() - w).abs().max().item() for g, w in zip(got, wanted, strict=True))


def _with_gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = f(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


# tg demo


def _demo(args: argparse.Namespace) -> int:
    from threshold_gating import demo

    try:
        report = demo.run(args.out, seed=args.seed)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("sklearn", "numpy", "scipy"):
            raise
        _say_missing("demo", "the images need", package.replace("sklearn", "scikit-learn"), "demo")
        return 1
    except (OSError, ConversionError) as error:
        print(f"tg demo: {error}", file=sys.stderr)
        return 1
    wrong = [row.name for row in report.rows if not row.holds]
    if wrong:
        print(f"tg demo: not exact, against what is claimed: {', '.join(wrong)}.", file=sys.stderr)
    return 1 if wrong else 0


# Pictures


def _written(command: str, path: Path, draw: Callable[[], object], extra: str) -> bool:
    """Whether `draw` could write to `path`; if not, the reason is printed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("matplotlib", "numpy"):
            raise
        _say_missing(command, "the picture needs", package, extra)
        return False
    except OSError as error:
        print(f"tg {command}: cannot write {path}: {error}", file=sys.stderr)
        return False
    return True


def _say_missing(command: str, what: str, package: str, extra: str) -> None:
    print(
        f"tg {command}: {what} {package}, which is not installed: "
        f"pip install 'threshold-gating[{extra}]'",
        file=sys.stderr,
    )


# tg bench


def _bench(args: argparse.Namespace) -> int:
    from threshold_gating import benchmarking

    return benchmarking.run(args.smoke, args.json, args.only)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "table": _table,
    "explain": _explain,
    "convert": converting.convert,
    "calibrate": converting.calibrate,
    "audit": converting.audit,
    "verify": converting.verify,
    "evaluate": evaluating.evaluate,
    "prove": proving.prove,
    "bench": _bench,
    "env": _env,
    "demo": _demo,
}
