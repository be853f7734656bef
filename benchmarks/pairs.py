"""Every kernel beside the reference it must equal: the tests and `python -m benchmarks` use it.

A pair is two functions of the same tensors: plain torch, run in float64, and what the library runs
here, which the backend in force and the device decide. Values and all gradients are compared. A
kernel without a pair cannot be timed, and a test fails that finds it in the source.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.normed import Normed
from benchmarks.subjects import (
    NAMES,
    Attention,
    Gates,
    Product,
    Recurrent,
    Shape,
    Synaptic,
    Tensors,
    exactly,
    learned,
)
from threshold_gating import kernels
from threshold_gating.instance import TG
from threshold_gating.nn import Activation
from threshold_gating.taxonomy import TAXONOMY

Function = Callable[[Tensors], Any]  # gives y, or tensors by name

# Largest error against float64 over the largest value, for one rounding: 1e-5 is for sums of a
# thousand terms in float32, 16 bits have one unit in the last place.
ALLOWED = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


@dataclass(frozen=True)
class Pair:
    """What kernels compute, in two forms.

    Args:
        family: what is timed names the family that it was checked by.
        launches: the kernels of Triton that run for it, forward and backward.
        draw: makes the tensors for a shape, dtype and device; those that require gradients get
            them compared.
        shapes: of a small input, then of those that a GPU is checked with.
        roundings: to 16 bits on the way to a value.
        tau: of the steepest gate. Branches that meet where it turns cancel, and their rounding
            errors stand in dx with up to tau / 4.
        off: what an approximation that was asked for adds to the bounds.
        slow: whether it takes seconds to compile, so that one dtype has to do.
    """

    family: str
    name: str
    launches: tuple[str, ...]
    draw: Callable[[Shape, torch.dtype, Any], Tensors]
    reference: Function
    kernel: Function
    shapes: tuple[Shape, ...] = ((63, 7), (1031, 63))
    roundings: int = 1
    tau: float = 0.0
    off: float = 0.0
    slow: bool = False

    def inputs(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensors:
        """The same tensors every time."""
        torch.manual_seed(0)
        return self.draw(shape, dtype, device)

    def bound(self, name: str, dtype: torch.dtype) -> float:
        """The largest `disagreement` of a result that rounding explains."""
        return allowed(name, dtype, self.roundings, self.tau) + self.off


def allowed(name: str, dtype: torch.dtype, roundings: int = 1, tau: float = 0.0) -> float:
    """The largest of `errors` that rounding explains; see `Pair`.

    Gates are float32 whatever x is; their sums are as exact where x goes through one pass.
    """
    if name.startswith(_SUMS):
        single = ALLOWED[torch.float32]
        return single if roundings == 1 else roundings * max(single, ALLOWED[dtype])
    steep = torch.finfo(torch.float32).eps * tau / 4 if name == "dx" else 0.0
    return ALLOWED[dtype] * roundings + steep


def disagreement(pair: Pair, inputs: Tensors, kernel: Function | None = None) -> dict[str, float]:
    """Largest error of values and of each gradient against float64, over the largest of them."""
    exact = {name: exactly(t) for name, t in inputs.items()}
    want = _found(pair.reference, exact, inputs)
    have = _found(kernel or pair.kernel, inputs, inputs)
    return errors(have, want, next(iter(exact.values())).detach())


def errors(have: Tensors, want: Tensors, x: Tensor) -> dict[str, float]:
    """Largest error of each result for the input x, over the largest value."""
    terms = float((1 + x.abs()).sum(dtype=torch.float64)) / 4
    found = {}
    for name, true in want.items():
        if name not in have:  # nothing flows back
            found[name] = math.inf
            continue
        off = (have[name].double() - true).abs().masked_fill(have[name] == true, 0.0)
        # a gate's gradient is a sum, whose rounding errors are as large as its terms
        summed = terms / true.numel() if name.startswith(_SUMS) else 0.0
        size = max(float(true[true.isfinite()].abs().max()), summed, 1e-30)
        found[name] = float(off.max()) / size
    return found


_SUMS = ("dtau", "dtheta", "ds ", "dc ", "dshift", "dscale")


def _found(f: Function, given: Tensors, like: Tensors) -> Tensors:
    """Values of f and its gradients, for random gradients of what it gives."""
    given_back = f(given)
    values: Tensors = given_back if isinstance(given_back, dict) else {"y": given_back}
    ways = {name: y for name, y in values.items() if y.requires_grad}
    dtype = next(iter(like.values())).dtype
    torch.manual_seed(1)
    slopes = [torch.randn(y.shape).to(y.device, dtype).to(y.dtype) for y in ways.values()]
    learned = {name: t for name, t in given.items() if t.requires_grad}
    found = {name: y.detach() for name, y in values.items()}
    if not ways or not learned:
        return found
    of = [*learned.values()]
    grads = torch.autograd.grad([*ways.values()], of, slopes, materialize_grads=True)
    return found | {f"d{name}": g for name, g in zip(learned, grads, strict=True)}


# The table

_BLEND = ("blend_forward", "blend_backward")
_ATTENTION = ("forward", "queries_gradient", "keys_gradient")
_TWO_SOFT = ("two_soft_forward", "two_soft_backward")
_SYNAPSES = ("synapse_turned", "synapse_forward", "synapse_inputs", "synapse_parameters")
_PAIRS = (
    "synapse_turned", "synapse_taps", "synapse_gathered", "synapse_pair_inputs",
    "synapse_pair_parameters",
)  # fmt: skip
# One instance for each way a kernel takes: K = 2, K = 2 about its middle, one tau, a tau for each
# threshold, hard gates.
_INSTANCES = ("silu", "tanh", "mish", "gelu", "gelu_k4", "leaky_relu", "hardtanh")
_OTHERS = ("relu", "relu6", "elu", "sigmoid", "gelu_tanh")
_TIMES = ("silu", "gelu", "gelu_tanh", "own")  # gated units: SwiGLU and GEGLU
# Frozen ones with a tau for each threshold: other ones from either end, thresholds far out, a last
# branch that vanishes.
_OWN_TAUS = {
    "own": TG((1.5, 2.0, 1.4), (-2.0, 0.1, 2.0), (0.2, -0.3, 1.2, 1.0), (0.1, 0.5, -0.4, 0.3)),
    "far": TG((1.5, 2.0, 1.5), (18.0, 20.1, 22.0), (0.2, -0.3, 1.2, 1.0), (0.1, 0.5, -0.4, 0.3)),
    "flat": TG((1.5, 2.0), (-1.0, 1.0), (0.5, 1.0, 0.0), (0.1, 0.2, 0.3)),
}
# More branches than one exponential has room for.
_SIX = TG(
    1.2,
    (-2.0, -1.0, 0.1, 0.9, 2.1),
    (0.1, -0.2, 0.4, 0.3, 1.2, 1.0),
    (0.1, 0.2, -0.3, 0.1, 0.0, 0.2),
)
_PRODUCTS = {
    "two soft": TG(1.0, (0.0,), (1.0, 1.0), (0.0, 0.0)),
    "three soft": TG(1.2, (-0.5, 0.7), (1.0, 1.0, 1.0), (0.2, -0.3, 0.1)),
    "hard": TG(math.inf, (-1.0, 0.5), (1.0, 1.0, 1.0), (0.5, 1.0, 2.0), owner=("hi", "lo")),
}
_SYNAPTIC = {
    "two": Synaptic(TG(1.2, (0.1,), (1.0, 1.0), (0.0, 0.0))),
    "two general": Synaptic(TG(1.2, (0.1,), (1.0, 1.0), (0.5, -0.2)), "general"),
    "two fast": Synaptic(TG(1.2, (0.1,), (1.0, 1.0), (0.0, 0.0)), accuracy="fast"),
    "three": Synaptic(_PRODUCTS["three soft"]),
    "three general": Synaptic(_OWN_TAUS["flat"], "general"),
    "two shared": Synaptic(TG(1.2, (0.1,), (1.0, 1.0), (0.0, 0.0)), share="channel_pair"),
    "three shared": Synaptic(_PRODUCTS["three soft"], share="channel_pair"),
}
_ATTENTIONS = (
    Attention("fused"),
    Attention("fused", causal=True, temperature=True),
    Attention("fused", mask="add", shared=2),
    Attention("fused", mask="keep", temperature=True),
    Attention("literal", causal=True),
    Attention("literal", mask="add", temperature=True),
    Attention("literal", mask="keep", shared=2),
    Attention("statistics", causal=True),
    Attention("statistics", mask="add", temperature=True),
    Attention("rows", causal=True, temperature=True),
    Attention("rows", mask="keep"),
    Attention("native", causal=True),
)


def _gates() -> Iterator[Pair]:
    """Learned parameters as tensors of their own, and as a module holds them."""
    for key in _INSTANCES:
        for share in ("layer", "channel", "neuron"):
            g = Gates(TAXONOMY[key], share)
            # a CPU takes the reference's own formulas for few elements of hard gates
            shapes = ((257, 65) if g.t.hard else (63, 7), (1031, 63))
            pair = Pair("blend", f"{key} {share}", _BLEND, g.draw, g.reference, g.kernel, shapes)
            yield pair
            name = f"{pair.name} module"
            yield replace(pair, family="module", name=name, kernel=g.module)
            if share == "channel" and key in ("silu", "leaky_relu"):
                over = functools.partial(g.module, inplace=True)
                name = f"{pair.name} over its input"
                yield replace(pair, family="overwriting", name=name, kernel=over)
            if (key, share) == ("silu", "channel"):  # the sums of many rows are added by a second
                # step by step a tile is 64 x 256: these rows are 18 tiles, more than `FEW_TILES`
                more = replace(
                    pair, launches=(*_BLEND, "add_parts"), shapes=((1100, 200), (1031, 63))
                )
                name = f"{pair.name} module of many rows"
                yield replace(more, family="module", name=name, kernel=g.module)
    six = Gates(_SIX, "channel")
    pair = Pair("blend", "six channel", _BLEND, six.draw, six.reference, six.kernel)
    yield from (pair, replace(pair, family="module", name=f"{pair.name} module", kernel=six.module))
    cases = [(key, "channel", "v") for key in ("silu", "gelu", "leaky_relu")]
    cases += [("silu", "layer", "up"), ("gelu_tanh", "layer", "up"), ("mish", "channel", "up")]
    for key, share, other in cases:
        g, what = Gates(TAXONOMY[key], share, other), {"v": "read", "up": "times"}[other]
        # up * blend(x) is rounded twice where it is two steps, and its gradients as often
        rounded = 3 if other == "up" else 1
        shapes = ((257, 65) if g.t.hard else (63, 7), (1031, 63))
        made = Pair("blend", f"{key} {share} {what}", _BLEND, g.draw, g.reference, g.kernel, shapes)
        yield replace(made, family="times" if other == "up" else "blend", roundings=rounded)


def _normed() -> Iterator[Pair]:
    """Whatever has registers left for the sums of a norm; some learn a part of their numbers."""
    cases: list[tuple[str, tuple[str, ...]]]
    cases = [(key, NAMES) for key in ("silu", "tanh", "gelu_k4")]
    cases += [("hardtanh", NAMES[1:]), ("relu", ("theta", "s")), ("silu", ("tau",))]
    for (key, train), joined in itertools.product(cases, (False, True)):
        n = Normed(Gates(TAXONOMY[key], "channel"), train, joined)
        alone = () if len(train) > 2 else train
        name = " ".join((key, *alone, "joined" if joined else "normed"))
        shapes = ((63, 7), (1031, 63))
        pair = Pair("normed", name, _BLEND, n.draw, n.reference, n.kernel, shapes, slow=True)
        if key == "relu":  # as in a network of images, which is timed
            pair = replace(pair, shapes=(*shapes, (32, 64, 28, 28)), slow=False)
        yield pair
        if key == "silu" and train == NAMES:  # of more than `FEW_TILES`, as in `_gates`
            name, launches = f"{name} of many rows", (*_BLEND, "add_parts")
            shapes = ((1100, 200), (1031, 63))
            yield replace(pair, name=name, launches=launches, shapes=shapes, slow=False)


def _frozen() -> Iterator[Pair]:
    """Instances whose numbers are put on the device once; and what a frozen module runs."""
    known = {key: TAXONOMY[key] for key in (*_INSTANCES, *_OTHERS)} | _OWN_TAUS

    def draw(names: Sequence[str], shape: Shape, dtype: torch.dtype, device: Any) -> Tensors:
        found = {name: torch.randn(shape, device=device).mul(3).to(dtype) for name in names}
        return learned(found)

    def exact(t: TG, w: Tensors) -> Tensor:
        return t(w["x"]) * w.get("up", 1.0)

    def run(t: TG, w: Tensors) -> Tensor:
        return kernels.blend(w["x"], t, up=w.get("up"))

    part = functools.partial
    for key, t in known.items():
        alone = part(draw, ("x",))
        taus = [tau for tau in (t.tau if isinstance(t.tau, tuple) else (t.tau,)) if tau < math.inf]
        pair = Pair(
            "frozen", f"{key} frozen", _BLEND, alone, part(exact, t), part(run, t),
            tau=max(taus, default=0.0),
        )  # fmt: skip
        yield pair
        module = part(_module, Activation(t))
        # torch's own op, where there is one, goes back from a rounded y
        name = f"{key} frozen module"
        yield replace(pair, family="frozen module", name=name, kernel=module, roundings=2)
        if key in _TIMES:
            name, both = f"{key} frozen times", part(draw, ("x", "up"))
            yield replace(pair, family="frozen times", name=name, draw=both, roundings=3)


def _module(act: nn.Module, w: Tensors) -> Tensor:
    y: Tensor = act.to(w["x"].device)(w["x"])
    return y


def _products() -> Iterator[Pair]:
    for name, t in _PRODUCTS.items():
        for share in ("channel", "layer"):
            p = Product(Gates(t, share))
            launched = _TWO_SOFT if name == "two soft" else () if t.hard else _BLEND
            # sums of several programs
            many = (*launched, "add_parts") if name == "two soft" else launched
            # the gated inputs, the products of halves and the result are rounded, and so back
            pair = Pair(
                "product", f"{name} {share} product", launched, p.draw, p.reference, p.module,
                shapes=((300, 7), (1031, 63), (16, 1024)), roundings=3,
            )  # fmt: skip
            yield replace(pair, launches=many)
            yield replace(pair, name=f"{name} {share} product of few", shapes=((9, 7),))
            # the last so large that the weights' gradients are those of halves
            shapes = ((2, 6, 4, 5), (4, 32, 28, 28), (8, 192, 28, 28))
            yield replace(pair, name=f"{name} {share} convolution", shapes=shapes)
    for share in ("channel", "layer"):
        p = Product(Gates(_PRODUCTS["hard"], share), derived=False, outputs=40)
        yield replace(
            pair, name=f"one vector {share} product", launches=("chosen_columns",), draw=p.draw,
            reference=p.reference, kernel=p.module, shapes=((1, 37), (1, 1031)),
        )  # fmt: skip


def _synapses() -> Iterator[Pair]:
    for name, f in _SYNAPTIC.items():
        # the arithmetic is float32; of 16 bits a gradient of the weights is rounded too. Of a
        # sigmoid 5e-4 is off, and of its slope, which is 1/4 at most, four times that.
        pair = Pair(
            "synapse", f"{name} synapses", _SYNAPSES, f.draw, f.reference, f.module,
            shapes=((5, 3), (1031, 63), (64, 515)), off=2e-3 if f.accuracy == "fast" else 0.0,
        )  # fmt: skip
        yield pair
        images = ((1, 3, 2, 2), (4, 32, 14, 14))
        launched = _PAIRS if f.share == "channel_pair" else _SYNAPSES
        if name in ("two general", "two shared", "three shared"):
            yield replace(pair, name=f"{name} synapses of images", launches=launched, shapes=images)


def _attention() -> Iterator[Pair]:
    for a in _ATTENTIONS:
        words = ("causal" * a.causal, a.mask, "tau" * a.temperature, "shared" * (a.shared > 1))
        launched = {"literal": (*_ATTENTION, "gates"), "rows": ("forward",), "native": ()}
        large = [(2, 16, 1031, size) for size in (64, 128)[: 1 + a.causal]]  # timed ones are causal
        # gates, the logits' gradients and the result are rounded
        yield Pair(
            "attention", " ".join(filter(None, ("attention", a.way, *words))),
            launched.get(a.way, _ATTENTION), a.draw, a.reference, a.kernel,
            shapes=((1, 2, 20, 16), *large), roundings=3, slow=True,
        )  # fmt: skip


_LSTM = ("lstm_forward", "lstm_backward")


def _recurrent() -> Iterator[Pair]:
    """A cell output that learns is evaluated; what folds runs torch's op, unless native is off."""
    both = Recurrent(both=True)
    for name, r, launches in (
        ("lstm", Recurrent(), (*_LSTM, "lstm_sums")),
        ("lstm cell both", replace(both, sites=("cell",)), (*_LSTM, "lstm_sums")),
        ("lstm packed both", replace(both, packed=True), (*_LSTM, "lstm_sums")),
        ("lstm free", Recurrent(free=True), (*_LSTM, "lstm_sums")),
    ):
        yield _over_time("recurrent", name, r, launches)
    folding = Recurrent(sites=("i", "f", "g", "o"))
    for name, r in (
        ("lstm", folding),
        ("lstm packed both", replace(folding, packed=True, both=True)),
        ("lstm f", Recurrent(sites=("f",))),
        ("gru both", Recurrent("gru", both=True)),
        ("gru n packed", Recurrent("gru", sites=("n",), packed=True)),
    ):
        run = functools.partial(_natively, r)
        yield replace(_over_time("folded", f"{name} folded", r, ()), kernel=run)


def _over_time(family: str, name: str, r: Recurrent, launches: tuple[str, ...]) -> Pair:
    # what goes into the gates of a step, the cell and the output are rounded, and the gradients
    return Pair(
        family, f"{name} over time", launches, r.draw, r.reference, r.module,
        shapes=((3, 5, 7), (5, 33, 63), (4, 64, 128)), roundings=4,
    )  # fmt: skip


def _natively(r: Recurrent, w: Tensors) -> Tensors:
    with kernels.use("native"):
        return r.module(w)


def _compiled(pairs: dict[str, Pair]) -> Iterator[Pair]:
    """A few of them in a compiled graph, where kernels are nodes and formulas are traced."""
    launches: tuple[str, ...]
    for name, launches in (
        ("silu channel read", _BLEND),
        ("gelu frozen", _BLEND),
        ("attention literal causal", (*_ATTENTION, "gates")),
    ):
        yield _in_a_graph(pairs[name], launches, None)
    for key, share, launches in (
        ("silu", "channel", ("blend_backward",)),  # two gates go forward by formulas
        ("gelu", "layer", _BLEND),
        ("leaky_relu", "neuron", ("blend_backward",)),
    ):
        g = Gates(TAXONOMY[key], share)
        made = _in_a_graph(pairs[f"{key} {share} module"], launches, g)
        yield made
        if not g.t.hard:  # so many that a CPU has a node for them (`graph_cpu`)
            yield replace(made, name=f"{made.name} of many", shapes=((600, 7), (1031, 63)))


def _in_a_graph(pair: Pair, launches: tuple[str, ...], g: Gates | None) -> Pair:
    """`pair` compiled; a module (of `g`) is made outside of the graph."""

    def run(w: Tensors) -> Any:
        f = pair.kernel if g is None else functools.partial(g.applied, g.activation(w))
        device = next(iter(w.values())).device
        backend = "inductor" if device.type == "cuda" else "aot_eager"  # the same graph, at once
        torch._dynamo.reset()  # it counts compilations by code
        return torch.compile(f, fullgraph=True, backend=backend)(w)

    name = f"{pair.name} compiled"
    compiled = replace(pair, name=name, launches=launches, kernel=run)
    return replace(compiled, family="compiled", slow=True)


def _table() -> dict[str, Pair]:
    made = (
        *_gates(),
        *_normed(),
        *_frozen(),
        *_products(),
        *_synapses(),
        *_attention(),
        *_recurrent(),
    )
    found = {pair.name: pair for pair in made}
    return found | {pair.name: pair for pair in _compiled(found)}


PAIRS = _table()
