"""What a network asks of crossbars and converters, from one run: products, gates, who feeds whom.

Every op of the run is one of five: a product with weights (on crossbars), a gate, what wires do
(sums, scaling by constants, views), a product of a gate with another signal (which a differential
pair steers), or digital. An op that is not known is digital, and is named.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from threshold_gating.conversion import aten_ops
from threshold_gating.conversion.plan import run
from threshold_gating.conversion.watch import Run, Told, Visit, Watch, evaluating, fresh
from threshold_gating.instance import TG
from threshold_gating.nn import Activation
from threshold_gating.taxonomy import TAXONOMY

_ELEMENTWISE = aten_ops.NONLINEAR["element-wise"] | aten_ops.NONLINEAR["bounds"] | {"glu"}
_SOFTMAX = aten_ops.NONLINEAR["softmax"]
_MAXIMA = {"max_pool2d_with_indices", "max_pool3d_with_indices", "mkldnn_max_pool2d"}
_BETWEEN_0_AND_1 = {"sigmoid", "hardsigmoid"} | _SOFTMAX
# Ops of wires, by name.
_WIRES = {
    group: frozenset(names.split())
    for group, names in {
        "sums": "add sub rsub neg sum mean avg_pool2d avg_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d native_batch_norm cudnn_batch_norm _batch_norm_no_update "
        "_native_batch_norm_legit_no_training cat stack constant_pad_nd upsample_nearest2d "
        "native_dropout reflection_pad2d",
        "scaling": "mul div",
        "views": "view _unsafe_view reshape _reshape_alias t transpose permute expand slice select "
        "squeeze unsqueeze split split_with_sizes unbind unsafe_split unsafe_chunk chunk clone "
        "contiguous _to_copy copy alias detach as_strided flip roll repeat index index_select "
        "unfold pixel_shuffle pixel_unshuffle channel_shuffle narrow lift_fresh diagonal",
    }.items()
}
_SIZES = {"sym_size", "size", "is_same_size"}
_CONSTANTS = {
    *("empty", "zeros", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
}
_PRODUCTS = {"mm", "addmm", "mv", "addmv", "bmm", "baddbmm"}
_ATTENTION = aten_ops.NONLINEAR["attention"]


@dataclass(frozen=True)
class Product:
    """Vectors through one matrix of weights: `count` of them through each of `groups` matrices."""

    rows: int
    columns: int
    groups: int
    count: int
    overlaps: bool = False  # columns are added where they overlap, as of a transposed convolution
    activity: float = 1.0  # mean x^2 / max x^2 times mean |w| / max |w|
    turned: bool = False  # weights times data, not data times weights

    @property
    def macs(self) -> int:
        return self.rows * self.columns * self.groups * self.count

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """Along the rows and along the columns of one matrix."""
        return math.ceil(self.rows / rows), math.ceil(self.columns / columns)


@dataclass(frozen=True)
class Node:
    """One op of the run, with the nodes of its inputs; constants are no nodes."""

    op: str
    kind: str  # "input", "product", "gate", "wires", "digital"
    inputs: tuple[int, ...]
    size: int
    name: str = ""
    product: Product | None = None
    tails: int = 0  # tail currents of the gates of one element
    channels: int = 1  # physical gates, each used again at every position
    macs: int = 0  # of a digital product
    rests: bool = False  # the state before the first step: rows at zero


@dataclass(frozen=True)
class Trace:
    """A run: its ops in order, and which of them are outputs."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    def digital_ops(self) -> dict[str, int]:
        """Ops that no wire and no gate computes, with how often they ran."""
        names = [n.op for n in self.nodes if n.kind == "digital"]
        return {name: names.count(name) for name in dict.fromkeys(names)}


def trace(model: nn.Module, inputs: Any) -> Trace:
    """What one run of a network, converted or not, does; inputs as `tg.convert` takes them."""
    given = fresh(inputs)
    if not any(t.numel() for t in aten_ops.tensors(given)):
        raise ValueError("energy: the inputs are empty; give at least one.")
    recorder = _Recorder(model)
    with evaluating(model), _plain_recurrence(model), recorder.watch:
        for each in aten_ops.tensors(given):
            recorder.put(each, Node("input", "input", (), each.numel()))
        with recorder:
            output = run(model, given)
    found = [recorder.nodes_of[t] for t in aten_ops.tensors(output) if t in recorder.nodes_of]
    if not any(node.kind == "product" for node in recorder.nodes):
        raise ValueError(
            f"energy: {type(model).__name__} multiplies nothing by weights, so there is nothing to "
            "put on crossbars; give a network with linear or convolution layers."
        )
    for node in recorder.nodes:
        if node.product is not None and not math.isfinite(node.product.activity):
            raise ValueError(
                f"energy: {node.name} has weights or inputs that are not finite, so its cells have "
                "no power; give inputs and weights without NaN and infinity."
            )
    return Trace(tuple(recorder.nodes), tuple(dict.fromkeys(found)))


@contextlib.contextmanager
def _plain_recurrence(model: nn.Module) -> Iterator[None]:
    """Recurrent layers in products and gates, not as one op; the rest keeps its fast paths."""
    if not any(isinstance(m, nn.RNNBase) for m in model.modules()):
        yield
        return
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of TF32
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.nodes_of: Any = WeakIdKeyDictionary()
        self.weights = _Weights(model)
        self.inside = False  # of a gate of a converted network
        self.watch = Watch(model, self._see, _whole, read=lambda *call: None, answered=True)

    def put(self, t: Tensor, node: Node) -> None:
        self.nodes_of[t] = len(self.nodes)
        self.nodes.append(node)

    def _see(self, visit: Visit) -> Told | None:
        """A gate of a converted network: one node, whatever it computes inside."""
        if visit.is_call and visit.kind not in _ELEMENTWISE:
            return None
        sources = self._known((visit.args, visit.kwargs))
        self.inside = True
        kind, record, module = visit.kind, TAXONOMY.get(visit.kind), visit.run.module
        if isinstance(module, Activation) and not visit.is_call:
            kind, record = module.name or "gate", module.init

        def told(output: Any) -> None:
            self.inside = False
            for t in aten_ops.tensors(output):
                node = Node(kind, "gate", sources, t.numel(), tails=tails(record))
                self.put(t, replace(node, channels=_channels(t)))

        return told

    def _known(self, tree: Any) -> tuple[int, ...]:
        found = (self.nodes_of.get(t) for t in tree_leaves(tree) if isinstance(t, Tensor))
        return tuple(dict.fromkeys(k for k in found if k is not None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.removesuffix("_")
        sources = self._known((args, kwargs))
        node = None
        if sources and not self.inside and name not in _SIZES | _CONSTANTS:
            node = self._node(name, args, sources)  # before an in-place op overwrites its input
        constant = not sources and not self.inside
        if constant:
            node = self._product(name, args)  # of a state that the network starts from
        output = func(*args, **kwargs)
        if constant and node is None:
            self.weights.follow(name, (args, kwargs), output)
        if node is not None:
            found = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            for t in found if node.kind == "view" else found[:1]:
                self._follow(node, t)
            if node.kind != "view":  # a norm gives its mean, too
                self.nodes_of.update(dict.fromkeys(found[1:], self.nodes_of[found[0]]))
        return output

    def _follow(self, node: Node, t: Tensor) -> None:
        if node.kind == "view":
            source = node.inputs[0]
            if len(node.inputs) == 1 and self.nodes[source].size == t.numel():
                self.nodes_of[t] = source  # the same numbers: converted once
                return
            node = replace(node, kind="wires")
        self.put(t, replace(node, size=t.numel(), channels=_channels(t)))

    def _node(self, name: str, args: Any, sources: tuple[int, ...]) -> Node:
        made = self._product(name, args)
        if made is not None:
            return replace(made, inputs=sources)
        gates = _tails_of(name, args)
        if gates:
            return Node(name, "gate", sources, 0, tails=gates)
        kind = "digital"
        if name in _WIRES["views"]:
            kind = "view"
        elif name in _WIRES["sums"] or (name in _WIRES["scaling"] and self._scales(name, args)):
            kind = "wires"
        elif name == "mul" and any(self.nodes[k].op in _BETWEEN_0_AND_1 for k in sources):
            kind = "wires"  # the gate steers the other signal
        return Node(name, kind, sources, 0, macs=_data_macs(name, args))

    def _scales(self, name: str, args: Any) -> bool:
        """Whether data is multiplied by a constant, or divided by one."""
        is_data = [isinstance(t, Tensor) and t in self.nodes_of for t in args[:2]]
        return is_data == [True, False] or (name == "mul" and is_data == [False, True])

    def _product(self, name: str, args: Any) -> Node | None:
        """A product of data with weights."""
        if name == "convolution":
            if args[1] in self.nodes_of or not self._is_data(*args[:2]):
                return None
            product, x, w = _convolution(*args), args[0], args[1]
        elif name in _PRODUCTS:
            a, b = [t for t in args if isinstance(t, Tensor)][-2:]
            first = self._is_data(a, b)
            if first == self._is_data(b, a):
                return None
            x, w = (a, b) if first else (b, a)
            groups = 1 if w.dim() < 3 or w.stride(0) == 0 else len(w)
            of_one = w[0] if w.dim() == 3 else w
            rows = a.shape[-1]
            vectors, columns = x.numel() // max(rows * groups, 1), of_one.numel() // max(rows, 1)
            product = Product(rows, columns, groups, vectors, turned=not first)
        else:
            return None
        if not product.rows * product.columns * product.groups:
            return None
        activity = _share(x.double().square()) * _share(w.double().abs())
        where = self.weights.layer(w, product)
        made = Node(name, "product", (), 0, where, replace(product, activity=activity))
        return replace(made, rests=x not in self.nodes_of and not x.any())

    def _is_data(self, x: Tensor, other: Tensor) -> bool:
        """Whether it depends on the inputs, or is the state that a recurrent layer starts from."""
        if x in self.nodes_of:
            return True
        if other in self.nodes_of or not self.weights.parameters(other):
            return False
        return self.weights.is_recurrent(other) or not (self.weights.parameters(x) or x.any())


class _Weights:
    """Which layer a matrix of weights is: a parameter, a part of one, or computed from some."""

    def __init__(self, model: nn.Module) -> None:
        self.spans: dict[int, list[tuple[int, int, str]]] = {}  # by storage: where each lies
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            start, held = int(t.storage_offset()), self.spans.setdefault(_storage(t), [])
            held.append((start, start + t.numel(), name))
        self.recurrent = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in model.named_modules()
            if isinstance(module, nn.RNNBase | nn.RNNCellBase)
            for name, _ in module.named_parameters(recurse=False)
            if name.startswith("weight_hh")
        }
        self.computed: Any = WeakIdKeyDictionary()  # what a tensor was computed from
        self.made: list[Tensor] = []  # of no origin; kept so that no other has their address
        self.named: dict[str, list[Any]] = {}

    def origin(self, t: Tensor) -> tuple[tuple[str, ...], Any]:
        """Names of the parameters that a tensor is of, and how it was computed from them."""
        start = t.storage_offset()
        for low, high, name in self.spans.get(_storage(t), ()):
            if low <= start < high:
                return (name,), name
        if t not in self.computed:
            self.made.append(t)
            self.computed[t] = ((), len(self.made))
        found: tuple[tuple[str, ...], Any] = self.computed[t]
        return found

    def parameters(self, t: Tensor) -> tuple[str, ...]:
        return self.origin(t)[0]

    def is_recurrent(self, w: Tensor) -> bool:
        return self.recurrent.issuperset(self.parameters(w))

    def follow(self, op: str, given: Any, output: Any) -> None:
        """What an op computed without data: the same op of the same parts is the same matrix."""
        leaves = tree_leaves(given)
        sources = [t for t in leaves if isinstance(t, Tensor)]
        names = tuple(dict.fromkeys(name for t in sources for name in self.parameters(t)))
        how = hash((op, *(self._part(t) if isinstance(t, Tensor) else repr(t) for t in leaves)))
        for t in tree_leaves(output):
            if not names or not isinstance(t, Tensor) or _storage(t) in self.spans:
                continue
            whole = [s for s in sources if s is not t and _storage(s) == _storage(t)]  # of a view
            self.computed[t] = self.origin(whole[0]) if whole else (names, how)

    def _part(self, t: Tensor) -> tuple[Any, ...]:
        return (self.origin(t)[1], t.storage_offset(), *t.shape, *t.stride())

    def layer(self, w: Tensor, product: Product) -> str:
        """Its name; further matrices of one name have numbers."""
        size = f"computed {product.rows}x{product.columns}"
        name = _common([_plain(name) for name in self.parameters(w)]) or size
        key = (self._part(w), product.overlaps, product.turned)
        keys = self.named.setdefault(name, [])
        if key not in keys:
            keys.append(key)
        number = keys.index(key) + 1
        return f"{name}#{number}" if number > 1 else name


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _plain(name: str) -> str:
    """A parameter by its layer."""
    name = re.sub(r"parametrizations\.(\w+)\..*", r"\1", name)
    return name.removesuffix(".weight").removesuffix("_weight")


def _common(names: list[str]) -> str:
    """The path that all begin with."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    same = itertools.takewhile(lambda each: len(set(each)) == 1, parts)
    return ".".join(each[0] for each in same)


def _share(x: Tensor) -> float:
    """The mean of what is not negative, over its largest."""
    largest = x.max().item() if x.numel() else 0.0
    return x.mean().item() / largest if largest else 0.0


def _convolution(x: Tensor, w: Tensor, *rest: Any) -> Product:
    transposed, groups = rest[4], rest[6]
    if transposed:
        count = x.numel() // x.shape[1]
        return Product(w.shape[0] // groups, w[0].numel(), groups, count, overlaps=True)
    _, stride, padding, dilation = rest[:4]
    places = x.shape[0]
    for k, size in enumerate(x.shape[2:]):
        reach = dilation[k] * (w.shape[2 + k] - 1) + 1
        places *= (size + 2 * padding[k] - reach) // stride[k] + 1
    return Product(w[0].numel(), w.shape[0] // groups, groups, places)


def _data_macs(name: str, args: Any) -> int:
    """Multiplications of data by data."""
    if name in ("bmm", "baddbmm", "mm", "addmm"):
        a, b = [t for t in args if isinstance(t, Tensor)][-2:]
        return int(a.numel() * b.shape[-1])
    if name in _ATTENTION:
        q, k, v = args[:3]
        return int(q.numel() // q.shape[-1] * k.shape[-2] * (q.shape[-1] + v.shape[-1]))
    return 0


def _tails_of(name: str, args: Any) -> int:
    """Tail currents of the gates that compute one element of an op's output; 0: it is no gate."""
    if name in _ELEMENTWISE:
        return tails(TAXONOMY.get(name))
    if name in _SOFTMAX:
        return 4  # a gate, one softplus cell on the way up the tree and two on the way down
    if name in _MAXIMA:
        window: list[int] = args[1]
        return 2 * (math.prod(window) - 1)
    if name in ("maximum", "minimum"):
        return 2
    return 0


def tails(record: TG | None) -> int:
    """Tail currents of a cell: one for each branch that carries a signal, else one in all."""
    if record is None:
        return 2
    return record.K if any(record.s) else record.K - 1


def _channels(t: Tensor) -> int:
    """Of an image its second axis, of anything else the last."""
    return t.shape[1] if t.dim() == 4 else t.shape[-1] if t.dim() else 1


def _whole(run: Run) -> str | None:
    return "gate" if isinstance(run.module, Activation) else None
