"""In a compiled graph, gates behind a batch norm take the sums of its backward pass along.

The backward pass of a norm needs two sums over the dx that gates give it: of dx, and of dx times
what the norm was given less its mean. The compiler cannot fuse them with our kernel, and would read
dx once more for them. So the kernel takes them along (`Role.NORMED`). Where dy is the sum of two
gradients, as behind a connection past a block, the kernel adds them, too (`Role.JOINED`).

The two sums are looked for in the compiler's graph, where a norm is already taken apart. Whatever
computes them gets the same numbers. Where they are not found, nothing changes.
"""

from __future__ import annotations

import functools
import operator
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from threshold_gating.kernels.blend import gpu
from threshold_gating.kernels.layout import Layout
from threshold_gating.kernels.structure import Gate, Role, Wanted

# Of a graph that it keeps on disk the compiler knows the sources of the kernels. This is a constant
# of one of them, so that a graph which an earlier version of this file has changed is not taken.
VERSION = zlib.crc32(Path(__file__).read_bytes())
_aten, _cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
_SUMS, _GRADIENTS = ("dtau_p", "dtheta_p", "ds_p", "dc_p"), ("tau_p", "theta_p", "s_p", "c_p")
# constants of `kernels.blend_backward`, as `gpu.Constants` and `Wanted` have them
_CODES = ("TAU_CODE", "THETA_CODE", "S_CODE", "C_CODE", "OWNERS", "K", "GATE", "ROLE")
_CONSTANTS = (*_CODES, "SHARPENED", "MOVED", "ANCHORED", "WEIGHTS")
_WANTED = ("DX", "DOTHER", "DTAU", "DTHETA", "DS", "DC")


@functools.cache
def register() -> None:
    """Let the compiler show us the kernels of its graphs before it places them.

    None of this is torch's public interface: where it is not as here, nothing is taken along.
    """
    try:
        from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
        from torch._inductor.fx_passes.post_grad import pass_patterns
        from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern
    except ImportError:
        return
    kernel: Any = CallFunctionVarArgs(triton_kernel_wrapper_functional)

    def look(match: Any, *arguments: Any, **options: Any) -> None:
        take_along(match.output_node())

    register_graph_pattern(kernel, pass_dict=pass_patterns[0])(look)


def take_along(node: fx.Node) -> bool:
    """Let the kernel of a node make the sums of the norm before it, if it is ours and has one."""
    from threshold_gating.kernels.blend import kernels, sums

    if not _runs(node, kernels.blend_backward):
        return False
    given, dx, parts = _given(node), _result(node, "dx_p"), _result(node, "dtau_p")
    second = None if parts is None else _only_user(parts)
    if dx is None or second is None or not _runs(second, sums.add_parts):
        return False
    added = _result(second, "tau_p")
    if given["ROLE"] != Role.ALONE or given["LAYOUT"] != Layout.COLUMNS or added is None:
        return False
    if given["GATE"] == Gate.ONE_TAU:  # three and more branches leave no registers for more sums
        return False
    norm = _norm_of(dx, given["G"])
    if norm is None or not _lies_as(norm.z, given["x_p"]) or not _precedes(added, norm):
        return False
    rows = _widen(node, second, norm)
    for k, old in ((rows - 2, norm.total), (rows - 1, norm.weighted)):
        with old.graph.inserting_before(old):
            new = old.graph.call_function(_aten.select.int, (added, 0, k))
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
        old.graph.erase_node(old)
    return True


class _Norm(NamedTuple):
    """Sums over dx, and what the second one needs beside it."""

    total: fx.Node  # of dx
    weighted: fx.Node  # of dx (z - mean)
    z: fx.Node
    mean: fx.Node


def _norm_of(dx: fx.Node, channels: int) -> _Norm | None:
    """The norm that gets dx."""
    value: Tensor = dx.meta["val"]
    # the gates vary along the innermost axis in memory, and the norm along the second
    if value.dim() < 3 or value.shape[1] != channels or value.stride(1) != 1:
        return None
    axes, one_each = [0, *range(2, value.dim())], (1, channels, *[1] * (value.dim() - 2))
    wide = [dx] if value.dtype == torch.float32 else [u for u in dx.users if _is_widened(u)]
    for d in wide:
        totals = [u for u in d.users if _adds_up(u, axes)]
        for product in [u for u in d.users if totals and u.target is _aten.mul.Tensor]:
            weighted, far = _only_user(product), [n for n in product.args if n is not d]
            if weighted is None or not _adds_up(weighted, axes) or len(far) != 1:
                continue
            if not isinstance(far[0], fx.Node) or far[0].target is not _aten.sub.Tensor:
                continue
            z, mean = far[0].args[:2]
            if isinstance(mean, fx.Node) and tuple(mean.meta["val"].shape) == one_each:
                z, mean = _as_kept(z), _as_kept(mean, _aten.unsqueeze.default)
                if z is None or mean is None or far[0].kwargs:
                    continue
                if mean.meta["val"].is_contiguous():  # as the kernel reads it
                    return _Norm(totals[0], weighted, z, mean)
    return None


def _is_widened(node: fx.Node) -> bool:
    return node.target is _cast and node.args[1] is torch.float32


def _adds_up(node: fx.Node, axes: list[int]) -> bool:
    plain = node.target is _aten.sum.dim_IntList and len(node.args) == 2 and not node.kwargs
    return plain and node.args[1] == axes


def _as_kept(node: Any, view: Any = None) -> fx.Node | None:
    """What was kept from the forward pass, if this has its numbers."""
    while isinstance(node, fx.Node) and (_is_widened(node) or node.target is view):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "placeholder" else None


def _lies_as(z: fx.Node, x: fx.Node) -> bool:
    a, b = z.meta["val"], x.meta["val"]
    return bool(a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype)


def _precedes(node: fx.Node, norm: _Norm) -> bool:
    """Whether a graph has this before the sums, so that it can stand for them."""
    order = list(node.graph.nodes)
    return order.index(node) < min(order.index(norm.total), order.index(norm.weighted))


def _widen(node: fx.Node, second: fx.Node, norm: _Norm) -> int:
    """Give both kernels two sums more; how many there are then.

    The mean goes where a gradient of another input would be written, and the second term of dy
    where sums of theta would be if they were apart: nothing else is there in these roles.
    """
    from threshold_gating.kernels.blend.sums import add_parts

    given, more = _given(node), _given(second)
    terms = _two_terms(given["dy_p"], given["x_p"])
    known = gpu.Constants(*[int(given[name]) for name in _CONSTANTS])
    known = known._replace(role=int(Role.JOINED if terms else Role.NORMED))
    rows = known.sums(Wanted(*[bool(given[name]) for name in _WANTED]))
    sums = int(more["parts"]), rows, int(given["G"])
    given |= {"other_p": norm.z, "dother_p": norm.mean, "ROLE": known.role}
    given |= dict.fromkeys(_SUMS, _room(node, given["x_p"], sums))
    if terms:
        given |= dict(zip(("dy_p", "dtheta_p"), terms, strict=True))
    _give(node, given)
    _resize(_result(node, "dtau_p"), sums)
    add = gpu.adding(sums, 0, (rows, 0, 0, 0), apart=False)
    assert add is not None  # as there was before
    names = add_parts.arg_names[-len(add.rest) :]
    numbers = dict(zip(names, add.rest, strict=True))
    into = dict.fromkeys(_GRADIENTS, _room(second, given["x_p"], sums[1:]))
    _give(second, more | into | numbers, grid=[add.grid])
    _resize(_result(second, "tau_p"), sums[1:])
    return rows


def _two_terms(dy: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What dy is the sum of, if nobody else wants that sum and both lie as x."""
    if dy.target is not _aten.add.Tensor or len(dy.users) != 1 or dy.kwargs:
        return None
    a, b = dy.args
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return None
    return (a, b) if _lies_as(a, x) and _lies_as(b, x) else None


def _resize(node: fx.Node | None, shape: tuple[int, ...]) -> None:
    assert node is not None
    node.meta["val"] = node.meta["val"].new_empty(shape)


def _give(node: fx.Node, given: dict[str, Any], **more: Any) -> None:
    """Let a kernel take these; from the metadata the compiler knows how its tensors are to lie."""
    node.kwargs = {**node.kwargs, **more, "kwargs": given}
    if "eager_input_vals" in node.meta:
        values = fx.node.map_arg(dict(node.kwargs), lambda n: n.meta["val"])
        node.meta["eager_input_vals"] = ((), values)


def _room(before: fx.Node, like: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """New memory for float32 numbers."""
    value: Tensor = like.meta["val"].new_empty(shape, dtype=torch.float32)
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    with before.graph.inserting_before(before):
        made = before.graph.call_function(_aten.empty.memory_format, (list(shape),), options)
    made.meta["val"] = value
    return made


def _runs(node: fx.Node, kernel: Any) -> bool:
    """Whether this node launches the kernel."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    if node.target is not wrap.triton_kernel_wrapper_functional:
        return False
    found = wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    return getattr(found, "fn", found) is kernel


def _given(node: fx.Node) -> dict[str, Any]:
    return dict(node.kwargs["kwargs"])  # type: ignore[arg-type]


def _result(node: fx.Node, name: str) -> fx.Node | None:
    found = [u for u in node.users if u.target is operator.getitem and u.args[1] == name]
    return found[0] if len(found) == 1 else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
