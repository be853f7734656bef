"""`graph`: a converted network as a graph of `torch.export`, its gates kept or lowered.

A gate that is kept is one node, `threshold_gating::gate` or `threshold_gating::softmax_gates`.
`gates_of` reads the numbers of all of them, those that were learned included.
"""

from __future__ import annotations

import functools
import importlib
import io
import math
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from threshold_gating import kernels
from threshold_gating.conversion import outputs
from threshold_gating.conversion.aten_ops import is_nonlinear
from threshold_gating.conversion.aten_ops import name as name_of_op
from threshold_gating.conversion.plan import ConversionError, arguments
from threshold_gating.conversion.watch import evaluating, fresh
from threshold_gating.instance import TG
from threshold_gating.kernels.blend import kept
from threshold_gating.kernels.structure import Structure
from threshold_gating.nn.activation import Activation, in_order
from threshold_gating.primitive.graphs import GraphForm, holding

GATE = torch.ops.threshold_gating.gate.default
SOFTMAX = torch.ops.threshold_gating.softmax_gates.default

ALONE = threading.RLock()  # one export at a time: torch's exporters change what all threads run


class ExportError(ConversionError):
    """A network that cannot be exported as asked; the message says what would work."""


def needed(package: str, extra: str = "onnx") -> Any:
    """A package that only one way of exporting needs."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ExportError(
            f"export: {package.partition('.')[0]} is not installed: "
            f"pip install 'threshold-gating[{extra}]'"
        ) from error


def graph(
    model: nn.Module, inputs: Any, *, form: GraphForm = "kept", dynamic: bool = True
) -> ExportedProgram:
    """The network as a graph for inference.

    Args:
        model: a converted network.
        inputs: what it is called with: a tensor, a tuple of arguments or a dict of keyword ones.
        form: "kept" keeps each gate as one node, beside those that unpack its numbers, which
            `run_decompositions` lowers; "steps" the formulas of each gate in ATen ops, for tools
            that know no others; "native" torch's own op where a frozen gate is exactly that, one
            node for each other gate.
        dynamic: let the first axis of every input have any size, where the network does. One of
            size 1 has that size in the graph, for torch.export takes it for a broadcast.
    """
    if form not in ("steps", "kept", "native"):
        raise ValueError(f"graph: form is 'steps', 'kept' or 'native'; got {form!r}.")
    _refuse_autocast()
    _refuse_names(model)
    args, kwargs = arguments(inputs)
    shapes = _first_axes(kwargs or args) if dynamic else None
    said = warnings.catch_warnings()
    with ALONE, said, holding(form), kernels.use("auto"), evaluating(model), torch.no_grad():
        try:
            warnings.simplefilter("ignore")  # of torch, about its own recurrent layers
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except ConversionError:
            raise
        except Exception as error:  # of torch.export, which raises many kinds
            raise ExportError(_hindered(model, error)) from error
    return program


def _refuse_autocast() -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ExportError(
            "export: a graph is not made inside of torch.autocast, of which it would keep a part; "
            "export outside of it, a network in 16 bits as model.half() or model.bfloat16()."
        )


def _refuse_names(model: nn.Module) -> None:
    """torch.export writes the names of modules into Python code, between quotes."""
    odd = [name for name, _ in model.named_modules() if re.search(r"[\"\\\n\r]", name)]
    if odd:
        raise ExportError(
            f"export: torch.export makes no graph of a network with a module named {odd[0]!r}: "
            "quotes, backslashes and line breaks in names end the code that it writes. Rename it."
        )


def refuse_random(program: ExportedProgram) -> None:
    """Of what draws numbers no two runs agree, so no file could be compared with the network."""
    for node in program.graph.nodes:
        if node.op == "call_function" and is_random(node):
            raise ExportError(
                f"export: {name_of_op(node.target)} in {place_of(node)} draws "
                "random numbers, so that no file can be compared with the network; nothing is "
                "written. Export a module that is given them as an input."
            )


def _first_axes(tree: Any) -> Any:
    """Shapes as torch.export is told of them: it finds whether the first axes are free."""
    if isinstance(tree, Tensor):
        return {0: Dim.AUTO} if tree.dim() and tree.shape[0] > 1 else None
    if isinstance(tree, dict):
        return {k: _first_axes(v) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(_first_axes, tree))
    return None


def _hindered(model: nn.Module, error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "").rstrip(". ")
    return (
        f"export: torch.export makes no graph of {type(model).__name__} "
        f"({type(error).__name__}: {first}); a network whose Python asks for values of its tensors "
        "has none. Export a part of it, or a module that calls it with fixed choices."
    )


# What the nodes say


@dataclass(frozen=True)
class Gate:
    """A gate of a graph: where it is, and all its numbers.

    `rows` are tau, theta, s and c, low to high, each row a float64 tensor that broadcasts against
    the input; None for one that the network computes (a bound of torch.maximum is the other input).
    Of the gates of a softmax there are none: the logits are the thresholds.
    """

    site: str
    structure: Structure | None
    rows: tuple[tuple[Tensor | None, ...], ...] = ()
    inputs: int = 0  # how many the branches read; 0: x itself
    axis: int = -1  # of a softmax
    masked: float = math.nan  # and what a row without any logit becomes

    @property
    def fixed(self) -> bool:
        """Whether the network computes none of the numbers."""
        return all(w is not None for row in self.rows for w in row)

    @property
    def known(self) -> list[bool]:
        """Of each tensor that the node is given for its numbers, whether the values are known."""
        if self.structure is None:
            return []
        said = (self.structure.tau, self.structure.theta, self.structure.s, self.structure.c)
        pairs = [zip(row, now, strict=True) for row, now in zip(said, self.rows, strict=True)]
        return [w is not None for pair in pairs for number, w in pair if number is None]

    @property
    def instances(self) -> list[TG]:
        """The instance of each sharing group, one where all share it."""
        if self.structure is None or not self.fixed:
            return []
        flat = [w for row in self.rows for w in row if w is not None]
        columns = torch.stack([w.flatten() for w in torch.broadcast_tensors(*flat)], 1).tolist()  # type: ignore[no-untyped-call]
        counts = [len(row) for row in self.rows]
        return [_instance(self.structure, *_cut(column, counts)) for column in columns]


def _cut(numbers: list[float], counts: list[int]) -> Iterator[tuple[float, ...]]:
    at = 0
    for n in counts:
        yield tuple(numbers[at : at + n])
        at += n


def _instance(known: Structure, tau: Any, theta: Any, s: Any, c: Any) -> TG:
    owner = known.owner
    if known.hard and owner is not None:
        theta, owner = in_order(theta, owner)
    return TG(
        tau if len(tau) > 1 else tau[0],
        theta,
        s,
        c,
        form=known.form,
        owner=owner if known.hard else None,
        q=known.q,
        anchor=known.anchor,
        clamp=known.clamp,
    )


def gates_of(program: ExportedProgram, model: nn.Module) -> dict[Node, Gate]:
    """Every node of a gate of `model`, in order, with its numbers as they are now."""
    constant, modules = _Constants(program), dict(model.named_modules())
    return {n: _read(n, constant, modules) for n in program.graph.nodes if is_gate(n)}


def is_gate(node: Node) -> bool:
    return node.op == "call_function" and node.target in (GATE, SOFTMAX)


def _read(node: Node, constant: _Constants, modules: Mapping[str, nn.Module]) -> Gate:
    place = _path_of(node)
    said: Any = node.args
    if node.target == SOFTMAX:
        _, axis, masked, site = said
        return Gate(site or f"{place}:softmax", None, axis=axis, masked=masked)
    _, given, text = said
    known = kept.read(text)
    home = modules.get(place)
    if not known.site and isinstance(home, Activation) and not home.learned:
        return Gate(place, known.structure, _rows(home.init), known.inputs)
    numbers = [constant(w) for w in given[known.inputs :]]
    rows = known.rows(numbers)
    whole = tuple(tuple(w if w is None else _double(w) for w in row) for row in rows)
    return Gate(known.site or place, known.structure, whole, known.inputs)


def _path_of(node: Node) -> str:
    """The name of the innermost module that a node was made in; "" for the network."""
    path: str = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][0]
    return path


def place_of(node: Node) -> str:
    """The same in words."""
    return _path_of(node) or "the network itself"


def _rows(t: TG) -> tuple[tuple[Tensor | None, ...], ...]:
    """The numbers of a frozen gate, whose tensors hold them in float32."""
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    return tuple(tuple(_double(w) for w in row) for row in (taus, t.theta, t.s, t.c))


def _double(w: Tensor | float) -> Tensor:
    """One number for all has no axes."""
    found = torch.as_tensor(w, dtype=torch.float64, device="cpu").detach()
    return found.reshape(()) if found.numel() == 1 else found


class _Constants:
    """Values of nodes that depend on no input of the network."""

    def __init__(self, program: ExportedProgram) -> None:
        self.signature = program.graph_signature
        self.tensors = {**program.state_dict, **program.constants}
        self.known: dict[Node, Any] = {}

    def __call__(self, node: Any) -> Any:
        """The value, or None where an input has a part in it."""
        if not isinstance(node, Node):
            return node
        if node not in self.known:
            self.known[node] = self._value(node)
        return self.known[node]

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            sig = self.signature
            for table in (
                sig.inputs_to_parameters,
                sig.inputs_to_buffers,
                sig.inputs_to_lifted_tensor_constants,
            ):
                if node.name in table:
                    return self.tensors[table[node.name]]
            return None
        if node.op != "call_function" or any(self(n) is None for n in node.all_input_nodes):
            return None
        if not node.all_input_nodes and is_random(node):
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self)
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]


def is_random(node: Node) -> bool:
    """Whether an op draws numbers as it is called here: dropout that is off does not."""
    op: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    given = {a.name: a.default_value for a in op._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    switches = ("train", "training", "dropout", "dropout_p", "p")
    return not any(given[name] in (0.0, False) for name in switches if name in given)


def left_of(program: ExportedProgram) -> dict[str, int]:
    """Nonlinearities of a graph that are no gates, by op and module, and how many of each."""
    found: dict[str, int] = {}
    constant = _Constants(program)
    for node in program.graph.nodes:
        if node.op == "call_function" and _bends(node) and constant(node) is None:
            word = f"{name_of_op(node.target)} in {place_of(node)}"
            found[word] = found.get(word, 0) + 1
    return found


def _bends(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return is_nonlinear(node.target) or name_of_op(node.target) in ("maximum", "minimum")


def node_count(program: ExportedProgram) -> int:
    """Nodes that compute something."""
    return sum(node.op == "call_function" for node in program.graph.nodes)


def saved(
    program: ExportedProgram,
    model: nn.Module,
    inputs: Any,
    path: str | os.PathLike[str] | io.BytesIO,
    tol: float | None = None,
) -> float:
    """Save a graph of `model` that computes the same; its max|d|/max|y| on these inputs.

    `torch.export.load` needs this package imported for a graph that keeps gates.
    """
    refuse_random(program)
    args, kwargs = fresh(arguments(inputs))
    with torch.no_grad():
        have = program.module()(*args, **kwargs)
    worst = compared(model, inputs, have, tol)
    file = path if isinstance(path, io.BytesIO) else io.BytesIO()
    with warnings.catch_warnings():  # of torch, about what it saves
        warnings.simplefilter("ignore")
        torch.export.save(program, file)
    if not isinstance(path, io.BytesIO):
        write(file.getvalue(), Path(path))
    return worst.relative


def write(data: bytes, path: Path) -> None:
    """All at once: a file that is there is whole."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tg-") as folder:
            (new := Path(folder, path.name)).write_bytes(data)
            os.replace(new, path)
    except OSError as error:
        raise ExportError(
            f"export: {path} cannot be written ({error.strerror}); give a file in a folder that "
            "you may write to, on a disk with room for it."
        ) from error


def compared(model: nn.Module, inputs: Any, have: Any, tol: float | None) -> outputs.Output:
    """The worst output against the network with every gate evaluated in torch; too far is refused.

    The bound is rounding, and at most twice the network's own, which is measured in a wider type.
    """
    args, kwargs = arguments(inputs)
    with kernels.use("reference"):
        with evaluating(model), torch.no_grad():
            given, named = fresh((args, kwargs))
            want = model(*given, **named)
        flat, got = ([t for _, t in outputs.leaves(tree)] for tree in (want, have))
        wide = functools.partial(outputs.in_wider_type, model, args, kwargs, want)
        found = outputs.compare(
            flat, got, True, tol, lambda: [t for _, t in outputs.leaves(wide())]
        )
    if not found:
        a, b = ([tuple(t.shape) for t in each] for each in (flat, got))
        raise ExportError(
            f"export: what was exported gives outputs of the shapes {b}, and the network {a}; "
            "nothing is written."
        )
    worst = max(found, key=lambda o: o.excess)
    if not worst.excess <= 1:
        raise ExportError(
            f"export: what was exported differs from the network by {worst.relative:.3g} of the "
            f"largest output, and {worst.bound:.3g} is allowed; nothing is written. tol= sets a "
            "bound of your own, form='native' takes torch's own op where a gate is exactly that."
        )
    return worst


# A gate that is known by its number alone, for a translator: nothing of it is traced any more.
_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("numbered(Tensor x, Tensor[] given, int at) -> Tensor")
NUMBERED = torch.ops.threshold_gating.numbered.default


def _shape(x: Tensor, given: list[Tensor], at: int) -> Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, *(t.shape for t in given)))  # type: ignore[no-untyped-call]


torch.library.register_fake("threshold_gating::numbered", _shape, lib=_LIBRARY)


def numbered(program: ExportedProgram, model: nn.Module) -> list[Gate]:
    """The gates in order, of which the graph has the numbers from now on.

    Each node is given x, what its branches read and what the network computes of its numbers.
    """
    found = gates_of(program, model)
    for k, (node, gate) in enumerate(found.items()):
        said: Any = node.args
        given = list(said[1]) if node.target == GATE else []
        known = [False] * gate.inputs + gate.known
        rest = [w for w, is_known in zip(given, known, strict=True) if not is_known]
        node.target, node.args = NUMBERED, (said[0], rest, k)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return list(found.values())
