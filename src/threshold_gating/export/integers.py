"""`quantised`: a converted network in integers, every gate a count of thresholds.

With G_j = g_j + ... + g_{K-1}, which are counts (`levels`), a gate is

    y = b_0 + sum_j G_j (b_j - b_{j-1}),   b_k = s_k x + c_k.

Weights, biases and what enters a layer are whole multiples of powers of two. All sums are then
exact in float32, in whatever order they are made, so that the network in torch and a file of it
agree in every bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from threshold_gating.conversion.aten_ops import name as name_of_op
from threshold_gating.conversion.aten_ops import tensors
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.watch import fresh
from threshold_gating.export import graph as graphs
from threshold_gating.export.graph import ExportError, Gate
from threshold_gating.export.levels import thresholds
from threshold_gating.export.onnx import Site

_aten = torch.ops.aten
LAYERS = (
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
    _fix_weights(made)
    for node in list(made.graph.nodes):
        if node.target == graphs.NUMBERED:
            _put_gate(made, node, gates[node.args[2]], bits)
        elif node.target in LAYERS:
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
    given = [(f"input {k}", t) for k, t in enumerate(tensors(inputs))]
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
        if n.op == "get_attr" and isinstance(value_of(made, n), nn.Parameter)
    ]
    if word in _FLOAT or weights:
        raise ExportError(
            f"export: {word or node.name} in {graphs.place_of(node)} "
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
        if n.target in LAYERS:
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


def _fix_weights(made: GraphModule) -> None:
    """Weights that are made of parameters alone become numbers: the branches of a tier-W layer are
    laid side by side, a parametrized weight is computed."""
    known: dict[Node, Any] = {}
    for node in made.graph.nodes:
        if node.op == "get_attr":
            known[node] = value_of(made, node)
        elif (
            node.op == "call_function"
            and node.all_input_nodes
            and all(n in known for n in node.all_input_nodes)
            and not graphs.is_random(node)
        ):
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), known.get)
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
    for node in [n for n in made.graph.nodes if n.target in LAYERS]:
        computed = [n for n in node.args[1:3] if n in known and n.op != "get_attr"]
        for n in computed:
            name = f"{node.name}_of_{n.name}"
            made.register_buffer(name, known[n].detach().clone())
            with made.graph.inserting_before(node):
                node.replace_input_with(n, made.graph.get_attr(name))
    made.graph.eliminate_dead_code()


def _parameter(made: GraphModule, node: Any) -> Tensor:
    if node.op != "get_attr":
        raise ExportError(
            f"export: the weights of {node.name} are computed as the network runs; whole numbers "
            "of them have no scale that is known. Export a network with fixed weights."
        )
    return value_of(made, node)


def value_of(made: GraphModule, node: Any) -> Tensor:
    found: Any = made
    for part in node.target.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


# Gates


def _put_gate(made: GraphModule, node: Node, gate: Gate, bits: int) -> None:
    """y = b_0 + sum_j G_j (b_j - b_{j-1}) in place of the node of a gate."""
    _refuse(gate)
    assert gate.structure is not None
    said: Any = node.args
    x, K = said[0], gate.structure.K
    v = said[1][0] if gate.inputs else x  # what the branches read
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
                op(_aten.add.Tensor, op(_aten.mul.Tensor, v, constant(curve)), constant(slope)),
                v,
            )
        else:
            y = op(_aten.mul.Tensor, v, constant(slope))
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
    elif not gate.fixed:
        why = "a gate whose thresholds another input sets"
    elif gate.inputs > 1:
        why = "a gate whose branches read inputs of their own"
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
