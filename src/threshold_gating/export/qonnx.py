"""`export`: a converted network in integers as QONNX, every gate a MultiThreshold.

A gate of L levels is a count of thresholds: of one threshold these are theta + logit((j - 1/2) / L)
/ tau, of a hard one theta itself. Single gates of K > 2 branches do not rise all the way, but their
sums G_j = g_j + ... + g_{K-1} do, so that

    y = b_0 + sum_j G_j (b_j - b_{j-1}),   b_k = s_k x + c_k,

with the thresholds of G_j found by inversion. Weights, biases and what enters a layer are whole
multiples of powers of two. All sums are then exact in float32, in whatever order they are made, so
that `quantised`, the network in torch, and the file agree in every bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from threshold_gating.conversion import outputs
from threshold_gating.conversion.aten_ops import name as name_of_op
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.verification import check_tol
from threshold_gating.conversion.watch import fresh
from threshold_gating.export import graph as graphs
from threshold_gating.export import onnx as plain
from threshold_gating.export.graph import ExportError, Gate
from threshold_gating.export.onnx import Site
from threshold_gating.instance import TG
from threshold_gating.primitive import gates as gates_at

DOMAIN = "qonnx.custom_op.general"
_aten = torch.ops.aten
_LAYERS = (
    *(_aten.linear.default, _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default),
    *(_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding),
)
# What multiplies or divides by numbers that no `Quant` rounds.
_FLOAT = (
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "inner"),
    *("einsum", "tensordot", "bilinear", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "convolution", "layer_norm", "group_norm", "instance_norm", "rms_norm"),
    *("embedding", "embedding_bag", "scaled_dot_product_attention", "lstm", "gru"),
    *("rnn_tanh", "rnn_relu", "native_layer_norm", "native_group_norm"),
)
_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("quant(Tensor x, float scale, int bits) -> Tensor")
_LIBRARY.define("levels(Tensor x, Tensor thresholds, int axis) -> Tensor")


def _quant(x: Tensor, scale: float, bits: int) -> Tensor:
    """The nearest multiple of scale that has so many bits, one of them the sign; ties to even."""
    most = 2 ** (bits - 1)
    return (x / scale).round().clamp(-most, most - 1) * scale


def _levels(x: Tensor, thresholds: Tensor, axis: int) -> Tensor:
    """How many thresholds (C or 1, L) each element reaches, with the channels at `axis`."""
    reached = x.movedim(axis, -1).unsqueeze(-1) >= thresholds
    return reached.sum(-1).to(x.dtype).movedim(-1, axis)


for name, run in (("quant", _quant), ("levels", _levels)):
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    same = lambda x, *rest: torch.empty_like(x)  # noqa: E731
    torch.library.register_fake(f"threshold_gating::{name}", same, lib=_LIBRARY)
QUANT, LEVELS = torch.ops.threshold_gating.quant.default, torch.ops.threshold_gating.levels.default


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
    layers = sum(n.target in _LAYERS for n in made.graph.nodes)
    bound = _bound(layers + len(sites), bits) if tol is None else float(tol)
    if bound < math.inf and not near <= bound:
        raise ExportError(
            f"export: in {bits} bits the network differs by {near:.3g} of its largest output, and "
            f"{bound:.3g} is allowed; nothing is written. Take more bits, or inputs as large as "
            "those the network meets; tol= sets a bound of your own (math.inf accepts any)."
        )
    plain._write(proto, Path(path))
    counts = [n.args[1] for n in made.graph.nodes if n.target == LEVELS]
    tables = [_held(made, c) for c in counts]
    total = sum(t.numel() for t in tables)
    return Exported(
        Path(path),
        bits,
        len(proto.graph.node),
        total,
        layers,
        sites,
        plain._shapes(proto),
        near,
        bound,
    )


def _bound(stages: int, bits: int) -> float:
    """Two steps of rounding for each layer and gate; past a half little of the output is left."""
    return min(0.5, stages * 2.0 ** (2 - bits))


def executed(proto: Any, inputs: Any) -> list[Tensor]:
    """The outputs of a QONNX model, by qonnx's own execution."""
    onnx = plain._needed("onnx")
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


def _tensors(inputs: Any) -> list[Tensor]:
    flat = torch.utils._pytree.tree_leaves(arguments(inputs))
    return [t for t in flat if isinstance(t, Tensor)]


def _held(made: GraphModule, node: Any) -> Tensor:
    found: Any = made
    for part in node.target.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


# The network of integers


def quantised(model: nn.Module, inputs: Any, *, bits: int = 8) -> GraphModule:
    """A converted network in integers, bit by bit as the exported file computes it."""
    check_bits(bits)
    _refuse_other_types(model, inputs)
    program = graphs.graph(model, inputs, form="kept", dynamic=False)
    ranges = _Ranges(program.module())
    args, kwargs = fresh(arguments(inputs))
    with torch.no_grad():
        ranges.run(*args, *kwargs.values())
    gates = graphs.numbered(program, model)
    made: Any = program.module()
    for node in list(made.graph.nodes):
        if node.target == graphs.NUMBERED:
            _put_gate(made, node, gates[node.args[2]], bits)
        elif node.target in _LAYERS:
            _put_layer(made, node, ranges.largest[node.name], bits)
        elif node.target == _aten.batch_norm.default:
            raise ExportError(
                "export: a BatchNorm rounds between layers, which no thresholds are for; fold it "
                "into the gates first, with tg.training.fold_batchnorm."
            )
        else:
            _refuse_float(made, node)
    made.graph.lint()
    made.recompile()
    made.meta["sites"] = tuple(Site(g.site, "MultiThreshold", tuple(g.instances)) for g in gates)
    return made  # type: ignore[no-any-return]


def check_bits(bits: Any) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 12:
        raise ValueError(f"qonnx: bits is a whole number from 2 to 12; got {bits!r}.")


def _refuse_other_types(model: nn.Module, inputs: Any) -> None:
    given = [(f"input {k}", t) for k, t in enumerate(_tensors(inputs))]
    for name, t in (*model.named_parameters(), *model.named_buffers(), *given):
        if t.is_floating_point() and t.dtype != torch.float32:
            raise ExportError(
                f"export: {name} is {t.dtype}, and QONNX computes in float32; export "
                "model.float() with inputs in float32."
            )


def _refuse_float(made: GraphModule, node: Node) -> None:
    """Layers that no `Quant` is put before, and weights that anything else but a layer reads."""
    if node.op != "call_function":
        return
    word = name_of_op(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""
    weights = [
        n.target
        for n in node.all_input_nodes
        if n.op == "get_attr" and isinstance(_held(made, n), nn.Parameter)
    ]
    if word in _FLOAT or weights:
        place = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][0]
        raise ExportError(
            f"export: {word or node.name} in {place or 'the network itself'} "
            f"{f'reads {weights[0]}, which ' if weights else ''}is not written in whole numbers; "
            "linear and convolution layers with fixed weights are (nn.Linear, nn.Conv1d to 3d). "
            "Use one of these, or export in float (export.onnx)."
        )


class _Ranges(Interpreter):
    """The largest number that enters each layer."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.largest: dict[str, float] = {}

    def run_node(self, n: Node) -> Any:
        if n.target in _LAYERS:
            x = self.fetch_args_kwargs_from_env(n)[0][0]
            self.largest[n.name] = float(x.abs().max())
        return super().run_node(n)


def _scale(largest: float, bits: int) -> float:
    """The power of two whose multiples of so many bits reach the largest."""
    if not math.isfinite(largest):
        raise ExportError(
            f"export: {largest} is among the weights or in what enters a layer, which has no whole "
            "number; give inputs on which the network is finite."
        )
    return 2.0 ** math.ceil(math.log2((largest or 1.0) / (2 ** (bits - 1) - 1)))


def _put_layer(made: GraphModule, node: Node, largest: float, bits: int) -> None:
    x, weight, *rest = node.args
    held = _parameter(made, weight)
    of_x, of_w = _scale(largest, bits), _scale(float(held.detach().abs().max()), bits)
    with made.graph.inserting_before(node):
        q = made.graph.call_function(QUANT, (x, of_x, bits))
        w = made.graph.call_function(QUANT, (weight, of_w, bits))
        if rest and rest[0] is not None:
            _refuse_clamped(node, _parameter(made, rest[0]), of_x * of_w)
            rest[0] = made.graph.call_function(QUANT, (rest[0], of_x * of_w, 24))
    node.args = (q, w, *rest)


def _refuse_clamped(node: Node, bias: Tensor, scale: float) -> None:
    most = float(bias.detach().abs().max()) if bias.numel() else 0.0
    if not most / scale <= 2**23 - 1:
        raise ExportError(
            f"export: the bias of {node.name} is up to {most:.3g}, and in steps of {scale:.3g}, "
            "those of its inputs times its weights, that is more than 24 bits; nothing is written. "
            "Give inputs as large as those the network meets, or take fewer bits."
        )


def _parameter(made: GraphModule, node: Any) -> Tensor:
    if node.op != "get_attr":
        raise ExportError(
            f"export: the weights of {node.name} are computed as the network runs; whole numbers "
            "of them have no scale that is known. Export a network with fixed weights."
        )
    return _held(made, node)


# Gates


def _put_gate(made: GraphModule, node: Node, gate: Gate, bits: int) -> None:
    """y = b_0 + sum_j G_j (b_j - b_{j-1}) in place of the node of a gate."""
    _refuse(gate)
    assert gate.structure is not None
    x, K = node.args[0], gate.structure.K
    axis, tables = _tables(gate, bits, node)
    s, c = ([w for w in row if w is not None] for row in gate.rows[2:])
    q = [torch.tensor(w, dtype=torch.float64) for w in gate.structure.q or (0.0,) * K]
    count = [0]

    def constant(w: Tensor) -> Node:
        count[0] += 1
        name = f"{node.name}_number{count[0]}"
        made.register_buffer(name, w.float().reshape(w.shape or (1,)))
        return made.graph.get_attr(name)

    def op(target: Any, *args: Any) -> Node:
        return made.graph.call_function(target, args)

    def line(curve: Tensor, slope: Any, shift: Any) -> Node:
        if bool(curve != 0):
            y = op(
                _aten.mul.Tensor,
                op(_aten.add.Tensor, op(_aten.mul.Tensor, x, constant(curve)), constant(slope)),
                x,
            )
        else:
            y = op(_aten.mul.Tensor, x, constant(slope))
        return op(_aten.add.Tensor, y, constant(shift))

    with made.graph.inserting_before(node):
        y = line(q[0], s[0], c[0])
        for j, table in enumerate(tables, 1):
            g: Node = op(LEVELS, x, constant(table), axis)
            if table.shape[1] > 1:
                g = op(_aten.mul.Tensor, g, constant(torch.tensor(1 / table.shape[1])))
            step = line(q[j] - q[j - 1], s[j] - s[j - 1], c[j] - c[j - 1])
            y = op(_aten.add.Tensor, y, op(_aten.mul.Tensor, g, step))
        if gate.structure.clamp is not None:
            y = op(_aten.clamp.default, y, *gate.structure.clamp)
    y.meta = dict(node.meta)
    node.replace_all_uses_with(y)
    made.graph.erase_node(node)


def _refuse(gate: Gate) -> None:
    why = ""
    if gate.structure is None:
        why = "a softmax, whose thresholds the other logits set"
    elif gate.inputs or not gate.fixed:
        why = "a gate between two inputs"
    if why:
        raise ExportError(
            f"export: {gate.site} is {why}; thresholds of QONNX are fixed. Export a part of the "
            "network without it, or in float (export.onnx)."
        )


def _tables(gate: Gate, bits: int, node: Node) -> tuple[int, list[Tensor]]:
    """The axis of the channels, and the thresholds (C or 1, L) of each G_j."""
    instances = gate.instances
    rank = node.meta["val"].dim()
    axis = 1 if rank > 1 else 0
    if len(instances) > 1:
        shapes = [w.shape for row in gate.rows for w in row if w is not None and w.dim()]
        shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        wide = [d - len(shape) for d, n in enumerate(shape) if n > 1]
        if len(wide) != 1:
            raise ExportError(
                f"export: {gate.site} has gates of their own along {len(wide)} axes, and "
                "thresholds of QONNX have channels; share='channel' or 'layer' can be exported."
            )
        axis = wide[0] + rank
    each = [thresholds(t, bits) for t in instances]
    return axis, [torch.stack([t[j] for t in each]) for j in range(instances[0].K - 1)]


def thresholds(t: TG, bits: int = 8) -> list[Tensor]:
    """The thresholds of each G_j, j = 1 ... K - 1, as float32: one if hard, else 2^bits - 1.

    >>> thresholds(TG(1, 0, (0, 1), (0, 0)), bits=2)
    [tensor([-1.6094,  0.0000,  1.6094])]
    """
    if t.hard:
        assert t.owner is not None
        return [_reached(theta, owner) for theta, owner in zip(t.theta, t.owner, strict=True)]
    count = 2**bits - 1
    at = (torch.arange(1, count + 1, dtype=torch.float64) - 0.5) / count
    if t.K == 2:
        tau = t.tau[0] if isinstance(t.tau, tuple) else t.tau
        return [(t.theta[0] + torch.logit(at) / tau).float()]
    return [_inverted(t, j, at).float() for j in range(1, t.K)]


def _reached(theta: float, owner: str) -> Tensor:
    """A hard threshold as one that x has to reach: the next number, if x == theta lies below."""
    at = torch.tensor([theta], dtype=torch.float32)
    return at if owner == "hi" else torch.nextafter(at, torch.tensor(math.inf))


def _inverted(t: TG, j: int, at: Tensor) -> Tensor:
    """Where G_j has the values `at`, by bisection in float64."""
    taus: Sequence[float] = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    room = 60 / min(taus)

    def total(x: Tensor) -> Tensor:
        return gates_at(x, t.tau, t.theta, form=t.form)[j:].sum(0)

    low = torch.full_like(at, min(t.theta) - room)
    high = torch.full_like(at, max(t.theta) + room)
    line = torch.linspace(float(low[0]), float(high[0]), 8193, dtype=torch.float64)
    if (total(line).diff() < -1e-9).any():
        raise ExportError(
            f"export: the gates above threshold {j} of {t} do not rise together, so no thresholds "
            "stand for them; use form='softmax', of which they do."
        )
    for _ in range(80):
        middle = (low + high) / 2
        below = total(middle) < at
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


# To the file


def translated(made: GraphModule, inputs: Any) -> Any:
    onnx, onnxscript = plain._needed("onnx"), plain._needed("onnxscript")
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


def _needed(package: str) -> Any:
    return plain._needed(package, "qonnx")
