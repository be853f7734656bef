"""The function that `tg explain` is asked about: by name, by formula, or in a file."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating.cli import formula
from threshold_gating.taxonomy import ROWS, TAXONOMY, key_of

Function = Callable[[Tensor], Tensor]

_SPELLED = {"snake": "x + sin(x)**2"}


class Target(NamedTuple):
    """The function that was asked for, and how to call it."""

    name: str
    f: Function


def target(what: str) -> Target:
    """The function that `what` names: a key, a torch name, an expression, or FILE.py:NAME.

    Raises ValueError where there is none, with the nearest that there is.
    """
    path, _, attribute = what.rpartition(":")
    if what.endswith(".py") or path.endswith(".py"):
        return _from_file(*(Path(what), "") if what.endswith(".py") else (Path(path), attribute))
    try:
        key = key_of(what)
    except ValueError:
        pass  # a function that no row is, or a formula
    else:
        return Target(key, _named(ROWS[key].f, key))
    plain = what.strip().lower().replace("-", "_")
    known = formula.FUNCTIONS.get(plain)
    if plain in _SPELLED or (known is not None and known.takes(1)):
        text = _SPELLED.get(plain, f"{plain}(x)")
        return Target(plain, _named(formula.parse(text), plain))
    if what.isidentifier() and what not in ("x", *formula.CONSTANTS):
        names = {*TAXONOMY, *formula.FUNCTIONS}
        near = get_close_matches(plain, sorted(names), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(map(repr, near))}? There are" if near else "there are"
        raise ValueError(
            f"no activation {what!r}; {hint} the names of `tg table --all`, expressions in x such "
            f"as {formula.EXAMPLE}, and FILE.py:NAME."
        )
    f = formula.parse(what)
    return Target(f.__name__, f)


def _named(f: Function, name: str) -> Function:
    """`f` under a name, which is what messages call it."""

    def function(x: Tensor) -> Tensor:
        return f(x)

    function.__name__ = name
    return function


def _from_file(path: Path, attribute: str) -> Target:
    name = f"{path.name}:{attribute}"
    return Target(name, _named(_function(from_file(path, attribute), name), name))


def from_file(path: Path, attribute: str) -> Any:
    """What stands under a name in a Python file, which is run for it."""
    if not path.is_file():
        near = get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {str(path.with_name(near[0]))!r}?" if near else "."
        raise ValueError(f"no file {str(path)!r}{hint}")
    if not attribute:
        raise ValueError(f"which function of {path}? Give it as {path}:NAME.")
    found = vars(_loaded(path))
    if attribute not in found:
        own = [name for name, value in found.items() if callable(value) and name[0] != "_"]
        near = get_close_matches(attribute, own, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else "it has no such function."
        raise ValueError(f"no {attribute!r} in {path}; {hint}")
    return found[attribute]


def _loaded(path: Path) -> ModuleType:
    """The file run as a module, with the files beside it in reach of its imports."""
    name = f"_tg_{path.stem}"  # never the name of a module that is there already
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    beside = str(path.resolve().parent)
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(failure(str(path), path, error)) from error
    finally:
        if beside in sys.path:  # the file may have changed that
            sys.path.remove(beside)
    return module


def failure(what: str, path: Path, error: BaseException) -> str:
    """That `what` fails, in which line of its file and how."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (str(path), str(path.absolute()))
    lines = [frame.lineno for frame in frames if frame.filename in own]
    where = f" in line {lines[-1]}" if lines else ""
    return f"{what} fails{where}: {type(error).__name__}: {error}"


def _function(value: Any, name: str) -> Function:
    """What stands under a name in a file as a function of a float64 tensor."""
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        value = value.apply
    elif isinstance(value, type):
        try:
            value = value()
        except TypeError as error:
            raise ValueError(
                f"{name} is a class that cannot be made without arguments ({error}); "
                "name an instance of it."
            ) from error
    if isinstance(value, nn.Module):
        value = value.eval().double()
    if not callable(value):
        raise ValueError(
            f"{name} must be a function of a tensor or a module; it is {type(value).__name__}."
        )
    function: Function = value
    return function
