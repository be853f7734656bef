"""`export`: a converted network in integers as QONNX, every gate a MultiThreshold.

`quantised` makes the network of integers; qonnx has to compute the same bits from the file.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from threshold_gating.conversion import outputs
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.verification import check_tol
from threshold_gating.conversion.watch import fresh
from threshold_gating.export import graph as graphs
from threshold_gating.export import onnx as plain
from threshold_gating.export.graph import ExportError
from threshold_gating.export.integers import LAYERS, LEVELS, QUANT, check_bits, quantised, value_of
from threshold_gating.export.onnx import Site

DOMAIN = "qonnx.custom_op.general"
_needed = functools.partial(graphs.needed, extra="qonnx")


@dataclass(frozen=True)
class Exported:
    """What was written.

    `error` is max|d|/max|y| of the integers against the gates in float, `bound` what it may be.
    """

    path: Path
    bits: int
    nodes: int
    thresholds: int
    layers: int
    sites: tuple[Site, ...]
    shapes: Mapping[str, tuple[int | str, ...]]
    error: float
    bound: float

    def to_dict(self) -> dict[str, Any]:
        sites = [site.to_dict() for site in self.sites]
        return {**vars(self), "path": str(self.path), "sites": sites, "gates": len(sites)}

    def __str__(self) -> str:
        shapes = ", ".join(f"{k} {' x '.join(map(str, v))}" for k, v in self.shapes.items())
        allowed = "any" if self.bound == math.inf else f"{self.bound:.2g}"
        return (
            f"{self.path.name}: {self.nodes} nodes, {len(self.sites)} gates with "
            f"{self.thresholds:,} thresholds in all, {self.layers} layers, {self.bits} bits\n"
            f"inputs: {shapes}; all axes are fixed in the file, the batch too\n"
            "qonnx against the network of integers in torch: equal in every bit\n"
            f"against the gates in float: max|d|/max|y| {self.error:.2e} ({allowed} allowed)"
        )


def export(
    model: nn.Module,
    inputs: Any,
    path: str | os.PathLike[str],
    *,
    bits: int = 8,
    tol: float | None = None,
) -> Exported:
    """Write a converted network as QONNX; refused where qonnx computes anything else.

    Args:
        model: a converted network of layers and element-wise gates.
        inputs: what it is called with; the ranges of its layers are those on these inputs.
        path: where the file is put, once it is proven.
        bits: of weights, of what enters a layer, and of a gate, which has 2^bits - 1 levels.
        tol: the largest max|d|/max|y| against the gates in float that is allowed, math.inf for any.
            By default two steps of rounding, 2^(2 - bits), for each layer and gate; at most 0.5.
    """
    check_bits(bits)
    check_tol(tol, True)
    with graphs.ALONE:
        made = quantised(model, inputs, bits=bits)
        sites: tuple[Site, ...] = made.meta["sites"]
        proto = translated(made, inputs)
        plain.say(proto, sites)
        found = executed(proto, inputs)
        args, kwargs = fresh(arguments(inputs))
        with torch.no_grad():
            want = [t for _, t in outputs.leaves(made(*args, **kwargs))]
    if [t.shape for t in want] != [t.shape for t in found] or not all(
        map(torch.equal, want, found)
    ):
        raise ExportError(
            f"export: qonnx does not compute what the network of {bits}-bit integers does, so "
            "nothing is written: a sum of more than 2^24 steps, or an op between layers that "
            "rounds. Take fewer bits, or a network of layers, gates, sums and max pooling."
        )
    near = graphs.compared(model, inputs, want, math.inf).relative
    layers = sum(n.target in LAYERS for n in made.graph.nodes)
    bound = _bound(layers + len(sites), bits) if tol is None else float(tol)
    if bound < math.inf and not near <= bound:
        raise ExportError(
            f"export: in {bits} bits the network differs by {near:.3g} of its largest output, and "
            f"{bound:.3g} is allowed; nothing is written. Take more bits, or inputs as large as "
            "those the network meets; tol= sets a bound of your own (math.inf accepts any)."
        )
    graphs.write(proto.SerializeToString(), Path(path))
    counts = [n.args[1] for n in made.graph.nodes if n.target == LEVELS]
    tables = [value_of(made, c) for c in counts]
    total = sum(t.numel() for t in tables)
    return Exported(
        Path(path),
        bits,
        len(proto.graph.node),
        total,
        layers,
        sites,
        plain.shapes_of(proto),
        near,
        bound,
    )


def _bound(stages: int, bits: int) -> float:
    """Two steps of rounding for each layer and gate; past a half little of the output is left."""
    return min(0.5, stages * 2.0 ** (2 - bits))


def executed(proto: Any, inputs: Any) -> list[Tensor]:
    """The outputs of a QONNX model, by qonnx's own execution."""
    onnx = graphs.needed("onnx")
    wrapper = _needed("qonnx.core.modelwrapper").ModelWrapper
    execute = _needed("qonnx.core.onnx_exec").execute_onnx
    given = plain.by_name([i.name for i in proto.graph.input], inputs)
    # qonnx 1.0.0 has onnxruntime run each node as a model of the version that onnx writes, which
    # may be newer than what onnxruntime reads.
    newest, onnx.IR_VERSION = onnx.IR_VERSION, min(onnx.IR_VERSION, 13)
    try:
        return [torch.as_tensor(y) for y in execute(wrapper(proto), given).values()]
    finally:
        onnx.IR_VERSION = newest


def translated(made: GraphModule, inputs: Any) -> Any:
    onnx, onnxscript = graphs.needed("onnx"), graphs.needed("onnxscript")
    defs = onnx.defs
    own = onnxscript.values.Opset(DOMAIN, 1)
    kinds = ["tensor(float)"]
    strings = defs.OpSchema.AttrType.STRING
    whole = defs.OpSchema.AttrType.INT

    def node(name: str, *given: Any, **words: Any) -> Any:
        formal = [defs.OpSchema.FormalParameter(f"x{k}", "T") for k in range(len(given))]
        out = [defs.OpSchema.FormalParameter("y", "T")]
        types = {k: strings if isinstance(v, str) else whole for k, v in words.items()}
        schema = defs.OpSchema(
            name,
            DOMAIN,
            1,
            inputs=formal,
            outputs=out,
            type_constraints=[("T", kinds, "")],
            attributes=[defs.OpSchema.Attribute(k, v) for k, v in types.items()],
        )
        return onnxscript.values.Op(own, name, schema)(*given, **words)

    def number(w: float) -> Any:
        value = onnx.numpy_helper.from_array(torch.tensor(w, dtype=torch.float32).numpy())
        return onnxscript.opset20.Constant(value=value)

    def quant(x: Any, scale: float, bits: int) -> Any:
        given = (x, number(scale), number(0.0), number(float(bits)))
        return node("Quant", *given, signed=1, narrow=0, rounding_mode="ROUND")

    def levels(x: Any, thresholds: Any, axis: int) -> Any:
        rank, count = len(x.shape), thresholds.shape[1]
        layout = "".join(
            "C" if k == axis else "N" if k == 0 else "HWDEF"[k - 1] for k in range(rank)
        )
        kind = "BINARY" if count == 1 else f"UINT{(count + 1).bit_length() - 1}"
        return node("MultiThreshold", x, thresholds, out_dtype=kind, data_layout=layout)

    args, kwargs = fresh(arguments(inputs))
    with torch.no_grad():
        program = torch.export.export(made, args, kwargs, strict=False)
    return plain.exported(program, {QUANT: quant, LEVELS: levels})
