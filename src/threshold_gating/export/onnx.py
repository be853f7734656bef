"""`export`: a converted network as an ONNX file, compared with the network by onnxruntime.

Each gate is a node of the domain `threshold_gating`, and the file defines it: one function for all
gates that differ in numbers alone, in the operators of `formulas`. Any runtime that knows functions
runs the file. Its metadata says of each gate which site it is and its instance; `read` reads it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating._version import __version__
from threshold_gating.conversion.plan import arguments, quantised_by_torchao
from threshold_gating.export import graph as graphs
from threshold_gating.export.body import Body
from threshold_gating.export.formulas import written
from threshold_gating.export.graph import ExportError, Gate
from threshold_gating.instance import TG
from threshold_gating.primitive.graphs import GraphForm

DOMAIN = "threshold_gating"
OPSET = 20
IR_VERSION = 10  # what every onnxruntime since 1.18 reads
_KEY = "threshold_gating"  # of the metadata


@dataclass(frozen=True)
class Site:
    """A gate of an exported file: which site, what it is there, and its instances.

    One instance for each sharing group; none for a softmax, whose logits are its thresholds, and
    for a gate whose numbers the network computes.
    """

    name: str
    function: str  # of the domain `threshold_gating`; in QONNX "MultiThreshold"
    instances: tuple[TG, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "site": self.name,
            "function": self.function,
            "instances": [t.to_dict() for t in self.instances],
        }


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares with the network on the inputs given.

    `left` are nonlinearities in the file that are no gates. `parity` is max|d|/max|y| of the worst
    output against the network with its gates evaluated in torch, `bound` what it may be.
    """

    path: Path
    form: str
    nodes: int
    functions: int
    sites: tuple[Site, ...]
    left: Mapping[str, int]
    shapes: Mapping[str, tuple[int | str, ...]]
    parity: float
    bound: float

    def to_dict(self) -> dict[str, Any]:
        known = {k: v for k, v in asdict(self).items() if k != "sites"}
        return {**known, "path": str(self.path), "sites": [s.to_dict() for s in self.sites]}

    def __str__(self) -> str:
        names = sorted({site.name for site in self.sites})
        shapes = ", ".join(f"{k} {' x '.join(map(str, v))}" for k, v in self.shapes.items())
        free = dict.fromkeys(d for v in self.shapes.values() for d in v if isinstance(d, str))
        shapes += f"; {', '.join(free)} may be any size" if free else ""
        lines = [
            f"{self.path.name}: {self.nodes} nodes, {len(self.sites)} gates of {len(names)} sites, "
            f"{self.functions} functions",
            f"inputs: {shapes}",
            f"onnxruntime against the network in torch, its gates evaluated: max|d|/max|y| "
            f"{self.parity:.2e} ({self.bound:.2g} allowed)",
        ]
        if fixed := [k for k, v in self.shapes.items() if v and isinstance(v[0], int)]:
            lines.append(f"the first axis of {', '.join(fixed)} is fixed in the file")
        if self.left:
            kind = "torch's own ops" if self.form == "native" else "no gates"
            each = ", ".join(f"{n} x {what}" for what, n in list(self.left.items())[:8])
            more = f" and {len(self.left) - 8} more" if len(self.left) > 8 else ""
            lines.append(f"{sum(self.left.values())} nonlinearities are {kind}: {each}{more}")
        return "\n".join(lines)


def export(
    model: nn.Module,
    inputs: Any,
    path: str | os.PathLike[str],
    *,
    form: GraphForm = "kept",
    dynamic: bool = True,
    tol: float | None = None,
) -> Exported:
    """Write a converted network as ONNX; refused where onnxruntime computes something else.

    Args:
        model: a converted network, in evaluation or not: what is exported is for inference.
        inputs: what it is called with; the file is compared with the network on these.
        path: where the file is put, once it is proven.
        form: "kept", every gate is evaluated; "native", torch's own op where a frozen gate is
            exactly that.
        dynamic: as in `graph`.
        tol: the largest max|d|/max|y| that is allowed. By default rounding alone, and at most twice
            what the network's own rounding is, which is measured in a wider type.
    """
    if form not in ("kept", "native"):
        raise ValueError(f"export: form is 'kept' or 'native'; got {form!r}.")
    _refuse_quantised(model)
    with graphs.ALONE:
        program = graphs.graph(model, inputs, form=form, dynamic=dynamic)
        graphs.refuse_random(program)
        proto, sites = translated(program, model)
        worst = graphs.compared(model, inputs, run(proto, inputs), tol)
    graphs.write(proto.SerializeToString(), Path(path))
    return Exported(
        Path(path),
        form,
        len(proto.graph.node),
        len(proto.functions),
        sites,
        graphs.left_of(program),
        shapes_of(proto),
        worst.relative,
        worst.bound,
    )


def _refuse_quantised(model: nn.Module) -> None:
    for name, t in model.named_parameters():
        if quantised_by_torchao(t):
            raise ExportError(
                f"export: {name} is a {type(t).__name__} of torchao, which ONNX has no word for; "
                "export the network as it was before quantize_, and quantise the file with the "
                "tool that runs it, or keep it in torch (export.graph)."
            )


# From torch to ONNX


def translated(program: Any, model: nn.Module) -> tuple[Any, tuple[Site, ...]]:
    """The graph as ONNX with a function for each kind of gate, and the sites."""
    onnx, onnxscript = graphs.needed("onnx"), graphs.needed("onnxscript")
    gates = graphs.numbered(program, model)
    functions = _Functions(onnx)
    names: dict[int, str] = {}
    own = onnxscript.values.Opset(DOMAIN, 1)

    def node(x: Any, given: Sequence[Any], at: int) -> Any:
        body = written(gates[at], 8 * x.dtype.itemsize)
        names[at] = functions.name(gates[at], body)
        numbers = [_constant(onnx, w, x.dtype) for w in body.numbers]
        every = (x, *given, *(onnxscript.opset20.Constant(value=w) for w in numbers))
        called = onnxscript.values.Op(own, names[at], _schema(onnx, names[at], len(every)))
        return called(*every)

    proto = exported(program, {graphs.NUMBERED: node})
    functions.put_into(proto)
    sites = tuple(Site(g.site, names[k], tuple(g.instances)) for k, g in enumerate(gates))
    say(proto, sites)
    onnx.checker.check_model(proto)
    return proto, sites


def say(proto: Any, sites: Sequence[Site]) -> None:
    """Write the gates into the metadata, where `read` finds them."""
    about = {"version": __version__, "gates": [site.to_dict() for site in sites]}
    graphs.needed("onnx").helper.set_model_props(proto, {_KEY: json.dumps(about)})


def exported(program: Any, table: Mapping[Any, Any]) -> Any:
    """The ONNX of a graph whose own ops `table` translates."""
    said = logging.getLogger("onnxscript")
    level = said.level
    said.setLevel(logging.ERROR)  # what it does not fold is no news
    try:
        with warnings.catch_warnings():  # of torch's exporter, about its own code
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                program,
                (),
                dynamo=True,
                custom_translation_table=dict(table),
                verbose=False,
                opset_version=OPSET,
            )
    except ExportError:
        raise
    except Exception as error:  # of torch.onnx, which wraps what it meets
        if isinstance(own := error.__cause__, ExportError):
            raise own from None
        why = " ".join(str(error.__cause__ or error).split())[:300]
        raise ExportError(
            f"export: torch.onnx does not translate this network ({why}). Export a module that "
            "returns tensors alone, in ops that torch.onnx has; form='kept' has gates in the place "
            "of torch's own nonlinearities."
        ) from error
    finally:
        said.setLevel(level)
    assert made is not None
    proto = made.model_proto
    proto.ir_version = IR_VERSION
    return proto


def _constant(onnx: Any, w: Tensor, dtype: Any) -> Any:
    return onnx.numpy_helper.from_array((w if dtype.itemsize == 8 else w.float()).numpy())


def _schema(onnx: Any, name: str, inputs: int) -> Any:
    """What onnxscript has to know of a function to make a node of it."""
    defs, kinds = onnx.defs, [f"tensor({k})" for k in ("float", "double", "float16", "bfloat16")]
    formal = [defs.OpSchema.FormalParameter(f"x{k}", f"T{k}") for k in range(inputs)]
    y = defs.OpSchema.FormalParameter("y", "T0")
    types = [(f"T{k}", kinds, "") for k in range(inputs)]
    return defs.OpSchema(name, DOMAIN, 1, inputs=formal, outputs=[y], type_constraints=types)


class _Functions:
    """The functions of a file, one for each body."""

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.known: dict[tuple[Any, ...], tuple[str, Gate, Body]] = {}

    def name(self, gate: Gate, body: Body) -> str:
        key = (body.signature, gate.inputs, gate.known.count(False))
        if key not in self.known:
            kind = "Softmax"
            if gate.structure is not None:
                kind = f"{'Hard' if gate.structure.hard else 'Soft'}{gate.structure.K}"
            alike = sum(name.startswith(f"{kind}_") for name, *_ in self.known.values())
            self.known[key] = (f"{kind}_{alike}", gate, body)
        return self.known[key][0]

    def put_into(self, proto: Any) -> None:
        helper = self.onnx.helper
        used = {node.op_type for node in proto.graph.node if node.domain == DOMAIN}
        for name, gate, body in self.known.values():
            if name in used:
                proto.functions.append(self._function(name, gate, body))
        if used and DOMAIN not in {o.domain for o in proto.opset_import}:
            proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))

    def _function(self, name: str, gate: Gate, body: Body) -> Any:
        helper = self.onnx.helper
        dynamic = gate.known.count(False)
        inputs = ["x", *(f"v{k}" for k in range(gate.inputs)), *(f"d{k}" for k in range(dynamic))]
        inputs += [f"p{k}" for k in range(len(body.numbers))]
        nodes = [
            helper.make_node(s.kind, list(s.inputs), [s.output], **dict(s.attributes))
            for s in body.steps
        ]
        nodes[-1].output[0] = "y"
        return helper.make_function(
            DOMAIN,
            name,
            inputs,
            ["y"],
            nodes,
            [helper.make_opsetid("", OPSET)],
            doc_string=f"gates as those of {gate.site or 'the network'}",
        )


def shapes_of(proto: Any) -> dict[str, tuple[int | str, ...]]:
    """Of each input, numbers for what is fixed; torch writes some of these as names, "2"."""

    def size(d: Any) -> int | str:
        name: str = d.dim_param
        return name if name and not name.isdigit() else int(name or d.dim_value)

    return {i.name: tuple(map(size, i.type.tensor_type.shape.dim)) for i in proto.graph.input}


# Reading and running


def read(path: str | os.PathLike[str]) -> tuple[Site, ...]:
    """The gates of an exported file."""
    onnx = graphs.needed("onnx")
    if not Path(path).is_file():
        raise ExportError(f"{path}: there is no such file.")
    try:
        proto = onnx.load(os.fspath(path), load_external_data=False)
    except Exception as error:  # of protobuf, which has no class of its own for it
        raise ExportError(f"{path} is no ONNX file ({type(error).__name__}).") from error
    props = {p.key: p.value for p in proto.metadata_props}
    if _KEY not in props:
        raise ExportError(
            f"{path} says nothing of gates; `tg export` writes them into the metadata of its files."
        )
    try:
        return tuple(
            Site(g["site"], g["function"], tuple(TG.from_dict(t) for t in g["instances"]))
            for g in json.loads(props[_KEY])["gates"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{path}: what it says of gates is damaged ({error}).") from error


def session(source: Any) -> Any:
    """A session of onnxruntime with one thread, for a file or a model."""
    runtime = graphs.needed("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    given = (
        os.fspath(source) if isinstance(source, str | os.PathLike) else source.SerializeToString()
    )
    try:
        return runtime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime, which has a class for each number
        first = str(error).splitlines()[0]
        raise ExportError(
            f"export: onnxruntime does not run this network ({first}), so that nothing was "
            "compared; float32 and float16 it has on every CPU: export model.float()."
        ) from error


def feed(runs: Any, inputs: Any) -> dict[str, Any]:
    """The inputs of a network by their names in a session."""
    return by_name([i.name for i in runs.get_inputs()], inputs)


def by_name(names: Sequence[str], inputs: Any) -> dict[str, Any]:
    """The tensors of inputs as arrays: those of a dict by its keys, others in the file's order."""
    args, kwargs = arguments(inputs)
    found: dict[str, Any] = {}
    at = 0
    for tree in args:
        held = _paths(tree)
        some = names[at : at + len(held)]
        keyed = any(hasattr(e, "key") for path, _ in held for e in path)
        for k, (path, t) in enumerate(held):  # the name of the argument itself the file has
            fits = (
                [n for n in some if n.endswith("_" + _joined(path))] if keyed else some[k : k + 1]
            )
            found.update(dict.fromkeys(fits if len(fits) == 1 else (), _array(t)))
        at += len(held)
    named = _paths(kwargs)
    found |= {_joined(path): _array(t) for path, t in named if _joined(path) in names[at:]}
    if len(found) != len(names) or at + len(named) != len(names):
        raise ExportError(
            f"export: the file has the inputs {', '.join(names)}, and what is given does not name "
            "each of them once; give a dict with the keys that it was exported with, or a dict of "
            "arrays by these names to the session itself."
        )
    return found


def _paths(tree: Any) -> list[tuple[Any, Tensor]]:
    every, _ = torch.utils._pytree.tree_flatten_with_path(tree)
    return [(path, t) for path, t in every if isinstance(t, Tensor)]


def _joined(path: Any) -> str:
    """A path as torch.export writes it into a name."""
    said = [next(getattr(e, k) for k in ("key", "idx", "name") if hasattr(e, k)) for e in path]
    return re.sub(r"[^a-zA-Z0-9]", "_", "_".join(map(str, said))).lower()


def _array(t: Tensor) -> Any:
    return t.detach().cpu().numpy()


def run(source: Any, inputs: Any) -> list[Tensor]:
    """The outputs of a file or a model, by onnxruntime."""
    runs = session(source)
    return [torch.as_tensor(y) for y in runs.run(None, feed(runs, inputs))]


class Speed(NamedTuple):
    """Seconds of processor time that one run takes with one thread, the shortest of several."""

    original: float
    exported: float

    def __str__(self) -> str:
        return (
            f"one thread: {1e3 * self.exported:.2f} ms of processor time, the original "
            f"{1e3 * self.original:.2f} ms: {self.exported / self.original:.2f} times as long"
        )


def compared(
    model: nn.Module, path: str | os.PathLike[str], inputs: Any, repeats: int = 20
) -> Speed:
    """An exported file and the original network in onnxruntime, run in turn."""
    with graphs.ALONE:
        original, _ = translated(graphs.graph(model, inputs, form="native"), model)
    runs = [session(original), session(path)]
    given = [feed(each, inputs) for each in runs]
    best = [math.inf, math.inf]
    for _ in range(repeats):
        for k, each in enumerate(runs):
            start = time.thread_time()  # a session of one thread runs in ours: others do not count
            each.run(None, given[k])
            best[k] = min(best[k], time.thread_time() - start)
    return Speed(*best)
