"""Where the channels of a tensor are, followed through a run from the last layer with weights on.

A layer says where its channels are (a convolution: before the positions; a linear layer: last).
What only moves elements is done to a tensor of coordinates, too, which shows where they went; what
keeps the number of axes and the size of this one keeps the channels; anything else loses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from threshold_gating.conversion import aten_ops

LOST = -1  # there was a layer, and its channels are not one axis any more


def _spelled(names: str) -> frozenset[Any]:
    """Functions of torch by their names, however they are called."""
    homes = (F, torch, Tensor)
    return frozenset(getattr(h, n) for n in names.split() for h in homes if hasattr(h, n))


_LAST = _spelled("linear bilinear embedding embedding_bag lstm_cell gru_cell") | _spelled(
    "rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh rnn_relu multi_head_attention_forward"
)
_CONVOLUTIONS = _spelled("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
_SECOND = _spelled("batch_norm group_norm instance_norm")
_LAST_IF_ONE = _spelled("layer_norm rms_norm")  # where they normalise one axis
_PRODUCTS = _spelled(
    "matmul __matmul__ __rmatmul__ mm bmm mv addmm baddbmm addbmm einsum tensordot inner outer "
    "scaled_dot_product_attention"
)
_MOVES = _spelled(
    "view reshape permute transpose flatten unflatten squeeze unsqueeze movedim moveaxis swapaxes "
    "swapdims t adjoint expand expand_as view_as reshape_as narrow select chunk split tensor_split "
    "unbind unsafe_chunk unsafe_split split_with_sizes __getitem__ index_select take_along_dim "
    "repeat tile roll flip rot90 diagonal mean amax amin"
) | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
# Their channels stay where they are, though there are more or fewer of them then.
_RESIZED = _spelled("cat concat concatenate glu pixel_shuffle pixel_unshuffle channel_shuffle pad")


class Channels(TorchFunctionMode):
    """While it is on, follows the axis of the channels of every tensor that a network makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.axes: Any = WeakIdKeyDictionary()
        self.constants: Any = WeakIdKeyDictionary()
        for t in (*model.parameters(), *model.buffers()):
            self.constants[t] = None

    def axis(self, x: Tensor) -> int | None:
        """The axis of the channels of `x`; LOST, or None where no layer was before."""
        found: int | None = self.axes.get(x)
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in aten_ops.tensors((args, kwargs)) if isinstance(t, Tensor)]
        # before the call, which may be in place
        axes = [(t.dim(), t.shape, axis) for t in given if (axis := self.axes.get(t)) is not None]
        out = func(*args, **kwargs)
        made = [t for t in aten_ops.tensors(out) if isinstance(t, Tensor)]
        if not made:
            return out
        if given and all(t in self.constants for t in given):
            self.constants.update(dict.fromkeys(made))
        for t, axis in zip(made, self._followed(func, args, kwargs, axes, made), strict=True):
            if axis is not None:
                self.axes[t] = axis
        return out

    def _followed(
        self, func: Any, args: Any, kwargs: Any, axes: list[Any], made: list[Tensor]
    ) -> Iterable[int | None]:
        said = _of_layer(func, args, kwargs, self.constants)
        if said is not None:
            return [_counted(said, t.dim()) for t in made]
        if not axes:
            return [None for _ in made]
        if func in _PRODUCTS:
            return [LOST for _ in made]
        if func in _MOVES:
            return self._moved(func, args, kwargs, made)
        return [_kept(func, axes, t) for t in made]

    def _moved(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> list[int]:
        """Where the coordinates of the channels go."""
        x = args[0] if args else kwargs.get("input")
        axis = self.axes.get(x) if isinstance(x, Tensor) else None
        if axis is None or axis == LOST:
            return [LOST for _ in made]
        line = torch.arange(x.shape[axis], device=x.device, dtype=torch.float64)
        marks = line.view(-1, *(1 for _ in x.shape[axis + 1 :])).expand(x.shape)
        named = {k: v for k, v in kwargs.items() if k != "input"}
        with torch._C.DisableTorchFunction():
            try:
                found = aten_ops.tensors(func(marks, *args[1:], **named))
                return [_varying(m, t) for m, t in zip(found, made, strict=True)]
            except (RuntimeError, TypeError, ValueError, IndexError):
                return [LOST for _ in made]  # a view as another type, or the like


def _of_layer(func: Callable[..., Any], args: Any, kwargs: Any, constants: Any) -> int | None:
    """Where the channels are that a layer with weights makes: an axis, from the end if negative."""
    if func in _LAST:
        return -1
    if func in _CONVOLUTIONS:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        return 1 - int(weight.dim())
    if func in _SECOND:
        return 1
    if func in _LAST_IF_ONE:
        sizes = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return -1 if len(sizes) == 1 else None
    if func in _PRODUCTS:
        factors = [t for t in args if isinstance(t, Tensor)][-2:]
        fixed = [t in constants for t in factors]
        if fixed == [False, True] and factors[1].dim() == 2:
            return -1
        return -2 if fixed == [True, False] and factors[0].dim() == 2 else None
    return None


def _counted(axis: int, dim: int) -> int:
    """An axis from the front; a batch norm of rows has its channels last."""
    at = axis + dim if axis < 0 else axis
    return at if 0 <= at < dim else LOST


def _kept(func: Any, axes: list[Any], out: Tensor) -> int:
    """The axis that the inputs with as many axes as the output agree on, if it is the same size."""
    alike = [(shape, axis) for dim, shape, axis in axes if dim == out.dim()]
    found = {axis for _, axis in alike}
    if len(found) != 1 or LOST in found:
        return LOST
    (axis,) = found
    same = func in _RESIZED or any(shape[axis] == out.shape[axis] for shape, _ in alike)
    return axis if same else LOST


def _varying(marks: Tensor, out: Tensor) -> int:
    """The one axis along which coordinates differ, each from each."""
    if marks.shape != out.shape or not marks.numel():
        return LOST
    varying = [d for d in range(marks.dim()) if _differs(marks, d)]
    if len(varying) != 1:
        return LOST
    (d,) = varying
    line = marks.movedim(d, 0).reshape(marks.shape[d], -1)[:, 0]
    return d if len(set(line.tolist())) == len(line) else LOST


def _differs(marks: Tensor, d: int) -> bool:
    return bool((marks != marks.narrow(d, 0, 1)).any())
