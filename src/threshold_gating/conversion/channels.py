"""Where the channels of a tensor are, followed through a run from the last layer with weights on.

A layer says where its channels are (a convolution: before the positions; a linear layer: last; a
product with a weight: where its free axis goes). What only moves elements is done to a tensor of
coordinates, too, which shows where they went; element-wise functions and the like keep them.
Whatever is not known to do one of these loses them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from threshold_gating.conversion import aten_ops
from threshold_gating.conversion.moves import COPIES, TURNS, VIEWS, getters, spelled

LOST = -1  # there was a layer, and its channels are not one axis any more
HEADLESS = -2  # the same, and of four axes the second is not known to be that of heads
UNKNOWN = -3  # there was no layer, and the axes are not those of an input any more


_LAST = spelled("linear bilinear embedding embedding_bag lstm_cell gru_cell") | spelled(
    "rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh rnn_relu multi_head_attention_forward"
)
_CONVOLUTIONS = spelled("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
_SECOND = spelled("batch_norm group_norm instance_norm")
_LAST_IF_ONE = spelled("layer_norm rms_norm")  # where they normalise one axis
_MATRICES = spelled("matmul __matmul__ mm mv addmm addmv inner")
_LAYERS = _LAST | _CONVOLUTIONS | _SECOND | _LAST_IF_ONE
_FRESH = spelled("new_zeros new_ones new_empty new_full new_tensor")  # of no tensor's values
_EINSUM, _TENSORDOT, _INNER = spelled("einsum"), spelled("tensordot"), spelled("inner")
_TURNS = TURNS | spelled("rot90 transpose_ swapaxes_ swapdims_ t_")
_MOVES = _TURNS | VIEWS | COPIES | spelled("squeeze_ unsqueeze_ mean sum amax amin")
# Their channels stay where they are, though there are more or fewer of them then.
_RESIZED = spelled("cat concat concatenate glu pixel_shuffle pixel_unshuffle channel_shuffle pad")
_PIXELS, _SHUFFLE = spelled("pixel_shuffle pixel_unshuffle"), spelled("channel_shuffle")
# Beside what torch itself calls pointwise (`_is_pointwise`).
_KEPT = (
    _RESIZED
    | _LAST_IF_ONE
    | spelled(
        "to type type_as float double half bfloat16 clone contiguous detach detach_ requires_grad_ "
        "alias copy_ cpu cuda fill_ zero_ masked_fill_ zeros_like ones_like empty_like full_like "
        "rand_like randn_like bernoulli dropout dropout1d dropout2d dropout3d dropout_ "
        "alpha_dropout feature_alpha_dropout feature_dropout pow __pow__ __rpow__ __rsub__ __rdiv__"
    )
    | spelled(
        "__floordiv__ __rfloordiv__ __rmod__ floor_divide multiply subtract divide negative "
        "absolute hardswish hardswish_ tanhshrink softsign logsigmoid prelu special_expit softmax "
        "softmin log_softmax gumbel_softmax normalize local_response_norm cumsum cumprod "
        "interpolate upsample max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
        "lp_pool1d lp_pool2d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d max_unpool1d max_unpool2d "
        "fake_quantize_per_tensor_affine"
    )
    | frozenset({torch.special.expit})
    | getters("data real")
)


@functools.cache
def _is_pointwise(name: str) -> bool:
    """Whether torch says of a function that it is element-wise."""
    if name in ("max", "min") or name.startswith("__"):  # these two are of two tensors alone
        return False
    packet = getattr(torch.ops.aten, name, None)
    forms = [] if packet is None else [getattr(packet, form) for form in packet.overloads()]
    return any(torch.Tag.pointwise in form.tags for form in forms)


class _Known(NamedTuple):
    """What is known of a tensor before a call, which may be in place."""

    shape: torch.Size
    axis: int


class Channels(TorchFunctionMode):
    """While it is on, follows the axis of the channels of every tensor that a network makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.axes: Any = WeakIdKeyDictionary()
        self.made: Any = WeakIdKeyDictionary()  # what the run has made under these eyes
        self.constants: Any = WeakIdKeyDictionary()
        self.has_layers = False
        for t in (*model.parameters(), *model.buffers()):
            self.constants[t] = None

    def axis(self, x: Tensor) -> int | None:
        """The axis of the channels of `x`; LOST, or None where no layer was before."""
        found: int | None = self.axes.get(x)
        if found is None and self.has_layers and x not in self.made and x not in self.constants:
            return UNKNOWN  # an input of its own, or made where nobody sees it
        return found

    def note(self, made: Tensor, axis: int | None) -> None:
        """Where the channels are of what was computed unseen."""
        self._note([made], [axis])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = {k: v for k, v in kwargs.items() if k != "out"}
        given = list(aten_ops.tensors((args, read)))
        known = [_Known(t.shape, axis) for t in given if (axis := self.axis(t)) is not None]
        first = args[0] if args else kwargs.get("input")
        moved = None
        if func in _MOVES and isinstance(first, Tensor):
            moved = _Known(first.shape, UNKNOWN if (a := self.axis(first)) is None else a)
        out = func(*args, **kwargs)
        made = list(aten_ops.tensors(out))
        if func is Tensor.__setitem__ and first not in self.axes:
            made = [first]
        is_constant = bool(given) and all(t in self.constants for t in given)
        if is_constant:
            self.constants.update(dict.fromkeys(made))
        if made and (not is_constant or known or func in _LAYERS):
            self._note(made, self._followed(func, args, read, given, known, moved, made))
        return out

    def _note(self, made: list[Tensor], axes: Iterable[int | None]) -> None:
        for t, axis in zip(made, axes, strict=True):
            self.made[t] = None
            if axis is None:
                self.axes.pop(t, None)
            else:
                self.axes[t] = axis
                self.has_layers |= axis != UNKNOWN

    def _followed(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        given: list[Tensor],
        known: list[_Known],
        moved: _Known | None,
        made: list[Tensor],
    ) -> Iterable[int | None]:
        if func in _FRESH:
            return [None for _ in made]
        layers = [each for each in known if each.axis != UNKNOWN]
        said = _of_layer(func, args, kwargs, self.constants)
        if said is not None:
            is_norm = func in _SECOND | _LAST_IF_ONE
            return [_said(said, layers if is_norm else [], t) for t in made]
        if moved is not None:
            return _moved(func, args, kwargs, moved, made)
        if func in _KEPT or _is_pointwise(getattr(func, "__name__", "")):
            return [_kept(func, layers, t) if layers else self._raw(given, known, t) for t in made]
        if func in _EINSUM:
            return [_of_heads(args) for _ in made]
        weighted = layers or any(t in self.constants for t in given)
        return [LOST if weighted else UNKNOWN if given else None for _ in made]

    def _raw(self, given: list[Tensor], known: list[_Known], out: Tensor) -> int | None:
        """Of an element-wise function that no layer was before: a weight along one axis says it."""
        weights = [t for t in given if t in self.constants and t.numel() > 1]
        if not weights:
            return UNKNOWN if known else None
        along = {_long(t, out.dim()) for t in weights}
        return along.pop() if len(along) == 1 else LOST


def _moved(
    func: Any, args: Any, kwargs: Any, before: _Known, made: list[Tensor]
) -> Iterable[int | None]:
    """Where the coordinates of the channels go."""
    shape, axis = before
    if axis < 0:
        turned = axis != UNKNOWN and func in _TURNS
        return [HEADLESS if turned else axis for _ in made]
    line = torch.arange(shape[axis], device=made[0].device, dtype=torch.float64)
    marks = line.view(-1, *(1 for _ in shape[axis + 1 :])).expand(shape)
    named = {k: v for k, v in kwargs.items() if k not in ("input", "dtype")}
    with torch._C.DisableTorchFunction():
        try:
            found = aten_ops.tensors(func(marks, *args[1:], **named))
            return [_varying(m, t) for m, t in zip(found, made, strict=True)]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return [LOST for _ in made]  # a view as another type, or the like


def _of_layer(func: Any, args: Any, kwargs: Any, constants: Any) -> int | None:
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
    if func in _MATRICES:
        return _of_matrix(func, [t for t in args if isinstance(t, Tensor)][-2:], constants)
    if func in _EINSUM:
        return _of_einsum(args, constants)
    return _of_tensordot(args, kwargs, constants) if func in _TENSORDOT else None


def _of_matrix(func: Any, factors: list[Tensor], constants: Any) -> int | None:
    """Of a product with a weight of two axes, the one that is not summed over."""
    fixed = [t in constants for t in factors]
    if fixed == [False, True] and factors[1].dim() == 2:
        return -1
    if fixed == [True, False] and factors[0].dim() == 2:
        if func in _INNER:
            return 0
        return -1 if factors[1].dim() == 1 else -2
    return None


def _terms(args: Any) -> tuple[list[str], str, list[Tensor]] | None:
    """The labels of the two factors of an einsum and of its result, if they are written out."""
    if not (args and isinstance(args[0], str) and "->" in args[0]):
        return None
    left, right = args[0].replace(" ", "").replace("...", ".").split("->")
    factors, terms = list(aten_ops.tensors(args[1:])), left.split(",")
    return (terms, right, factors) if len(factors) == len(terms) == 2 else None


def _of_einsum(args: Any, constants: Any) -> int | None:
    """Where the one label goes that a weight alone has; its others have to be summed over."""
    if (found := _terms(args)) is None:
        return None
    terms, right, factors = found
    fixed = [t in constants for t in factors]
    if sorted(fixed) != [False, True]:
        return None
    weight, data = terms[fixed.index(True)], terms[fixed.index(False)]
    kept = [label for label in weight if label in right]
    if len(kept) != 1 or kept[0] in data or len(set(weight)) < len(weight):
        return None
    at = right.index(kept[0])
    return at - len(right) if "." in right[:at] else at


def _of_heads(args: Any) -> int:
    """Of a product of data with data: whether both have what is the second axis of the result."""
    if (found := _terms(args)) is None:
        return HEADLESS
    terms, right, _ = found
    is_shared = len(right) == 4 and "." not in right and all(right[1] in term for term in terms)
    return LOST if is_shared else HEADLESS


def _of_tensordot(args: Any, kwargs: Any, constants: Any) -> int | None:
    factors = args[:2]
    dims = args[2] if len(args) > 2 else kwargs.get("dims", 2)
    if len(factors) < 2 or not isinstance(dims, int | list | tuple):
        return None
    if not isinstance(dims, int) and not isinstance(dims[0], list | tuple):
        return None
    summed = dims if isinstance(dims, int) else len(dims[0])
    fixed = [t in constants for t in factors]
    if sorted(fixed) != [False, True] or factors[fixed.index(True)].dim() - summed != 1:
        return None
    return 0 if fixed[0] else -1


def _said(axis: int, layers: list[_Known], out: Tensor) -> int:
    """An axis from the front; LOST where a norm has its weights along another than the layer."""
    at = axis + out.dim() if axis < 0 else axis
    if not 0 <= at < out.dim() or any(each.axis != at for each in layers):
        return LOST
    return at


def _kept(func: Any, layers: list[_Known], out: Tensor) -> int:
    """The axis that the inputs with as many axes as the output agree on, if it is the same size."""
    alike = [each for each in layers if len(each.shape) == out.dim()]
    found = {each.axis for each in alike}
    if len(found) != 1 or min(found) < 0:
        return HEADLESS if HEADLESS in found else LOST
    (axis,) = found
    if (func in _PIXELS and axis != out.dim() - 3) or (func in _SHUFFLE and axis != 1):
        return LOST
    same = func in _RESIZED or any(each.shape[axis] == out.shape[axis] for each in alike)
    return axis if same else LOST


def _long(weight: Tensor, dim: int) -> int:
    """The one axis of a result of `dim` axes along which a weight has several values."""
    long = [d for d, size in enumerate(weight.shape, dim - weight.dim()) if size > 1]
    return long[0] if len(long) == 1 and long[0] >= 0 else LOST


def _varying(marks: Tensor, out: Tensor) -> int:
    """The one axis along which coordinates differ, each from each."""
    if marks.shape != out.shape or not marks.numel():
        return LOST
    varying = [d for d in range(marks.dim()) if (marks != marks.narrow(d, 0, 1)).any()]
    if len(varying) != 1:
        return LOST
    (d,) = varying
    line = marks.movedim(d, 0).reshape(marks.shape[d], -1)[:, 0]
    return d if len(set(line.tolist())) == len(line) else LOST
