"""A random network as a small frozen record, its text, and the network made from that text."""

from __future__ import annotations

import hashlib
import linecache
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.parts import KINDS, Part, Program, Scope, class_text, emit

# What a network is fed: B rows of 3 steps of W numbers.
INPUTS = {
    "normal": "torch.randn(B, 3, W)",
    "wide": "torch.randn(B, 3, W) * 5",
    "grid": "torch.randint(-6, 7, (B, 3, W)) / 2",
    "zero": "torch.zeros(B, 3, W)",
    "tiny": "torch.randn(B, 3, W) * 1e-30",
    "large": "torch.randn(B, 3, W) * 1e4",
    "huge": "torch.randn(B, 3, W) * 1e38",
    "view": "torch.randn(W, 3, B).transpose(0, 2)",
    "strided": "torch.randn(B, 3, 2 * W)[..., ::2]",
    "infinite": "torch.randn(B, 3, W).masked_fill(torch.rand(B, 3, W) < 0.1, float('inf'))",
    "minus": "torch.randn(B, 3, W).masked_fill(torch.rand(B, 3, W) < 0.1, float('-inf'))",
    "nan": "torch.randn(B, 3, W).masked_fill(torch.rand(B, 3, W) < 0.1, float('nan'))",
    "all nan": "torch.full((B, 3, W), float('nan'))",
    "empty": "torch.randn(0, 3, W)",
}
UNSEEN = ("all nan", "empty")  # a network run on these has shown nothing
NOT_FINITE = ("infinite", "minus", "nan", "all nan", "huge")
TRAINED = (("tau", "theta", "s", "c"), ("tau", "theta"), ("theta",), ("s", "c"), ("tau", "s"))
TYPES = ("float", "float", "float", "float", "double", "half", "bfloat16")

# How a network is called: its arguments, how it gets x out of them, what it returns; then how to
# call it and what convert is told.
FORMS: dict[str, tuple[str, str, str, str, str]] = {
    "plain": ("x", "", "x", "net(x)", "x"),
    "keyword": ("*, x", "", "x", "net(x=x)", "{'x': x}"),
    "tuple": ("x", "", "(x, 2 * x)", "net(x)", "x"),
    "dict": ("x", "", "{'out': x, 'more': [x + 1]}", "net(x)", "x"),
    "batch": ("batch", "x = batch['x']", "x", "net({'x': x})", "({'x': x},)"),
    "two": ("x, scale=1.0", "x = x * scale", "x", "net(x, 0.5)", "(x, 0.5)"),
    "pair": (
        "x, *, y=None",
        "x = x if y is None else x + y",
        "x",
        "net(x, y=x)",
        "{'x': x, 'y': x}",
    ),
}
HEAD = """import functools
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import threshold_gating as tg
"""
_ORACLE = """import torch.fx
from tests.fuzz.oracle import Gated, gated, gated_

torch.fx.wrap("gated")
torch.fx.wrap("gated_")
"""
_CLAMP = """class Clamp:
    def __init__(self, low, high):
        self.low, self.high = low, high

    def __call__(self, x):
        return x.clamp(self.low, self.high)"""
_FUNCTION = """class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)"""


@dataclass(frozen=True)
class Network:
    """All that decides a network and how it is tried."""

    parts: tuple[Part, ...]
    width: int = 4
    batch: int = 2
    weights: int = 0
    inputs: str = "normal"
    second: str = "normal"
    dtype: str = "float"
    form: str = "plain"
    traced: bool = False  # a torch.fx.GraphModule
    training: bool = False  # converted as it trains
    train: tuple[str, ...] = ()  # what its gates learn
    share: str = "layer"

    def __hash__(self) -> int:
        return hash(repr(self))


def draw(seed: int) -> Network:
    """The network of a seed."""
    r = random.Random(seed)
    odd = r.random() < 0.15
    return Network(
        parts=_parts(r),
        width=r.choice((4, 3, 6)),
        batch=r.choice((2, 1, 3)),
        weights=r.randrange(1000),
        inputs=r.choice(tuple(INPUTS)) if odd else r.choice(("normal", "wide", "grid", "view")),
        second=r.choice(tuple(INPUTS)),
        dtype=r.choice(TYPES),
        form=r.choice(tuple(FORMS)) if r.random() < 0.3 else "plain",
        traced=r.random() < 0.06,
        training=r.random() < 0.06,
        train=r.choice(TRAINED) if r.random() < 0.25 else (),
        share=r.choice(("layer", "channel", "channel", "neuron")),
    )


def _parts(r: random.Random) -> tuple[Part, ...]:
    """One to five parts; two thirds of the networks have few and shallow ones, for most faults show
    in these, and a graph of a small network is made in a fraction of the time."""
    if r.random() < 2 / 3:
        return tuple(_part(r, 1) for _ in range(r.choice((1, 1, 2, 2, 3))))
    return tuple(_part(r, 2) for _ in range(r.choice((1, 1, 2, 2, 3, 4, 5))))


def _part(r: random.Random, depth: int) -> Part:
    names = [name for name, kind in KINDS.items() if depth or not kind.inner]
    name = r.choices(names, [KINDS[n].weight for n in names])[0]
    kind = KINDS[name]
    options = tuple((key, r.choice(choices)) for key, choices in kind.options.items())
    count = r.randint(1, 2) if kind.inner else 0
    return Part(name, options, tuple(_part(r, depth - 1) for _ in range(count)))


def text(network: Network, oracle: bool = False) -> tuple[str, Program]:
    """The classes of a network as Python, and what was noted while writing."""
    program = Program(oracle, network.traced)
    scope = Scope(program)
    arguments, taken, result, *_ = FORMS[network.form]
    if taken:
        scope.line(taken)
    emit(network.parts, scope)
    net = class_text("Net", scope, arguments, result)
    whole = "\n\n\n".join([*program.top, net])
    extra = [t for t, used in ((_CLAMP, "Clamp("), (_FUNCTION, "Function(")) if used in whole]
    extra = [
        t
        for t in extra
        if not (
            t is _FUNCTION and "Function(torch.erf" not in whole and "Function(Clamp" not in whole
        )
    ]
    head = HEAD + (_ORACLE if oracle else "")
    return head + f"\nW = {network.width}\n\n\n" + "\n\n\n".join([*extra, whole]) + "\n", program


def make_lines(network: Network) -> list[str]:
    """The lines that make `net`."""
    made = "torch.fx.symbolic_trace(Net())" if network.traced else "Net()"
    cast = "" if network.dtype == "float" else f".{network.dtype}()"
    mode = "" if network.training else ".eval()"
    return [f"torch.manual_seed({network.weights})", f"net = {made}{cast}{mode}"]


def input_lines(network: Network, kind: str, batch: int, seed: int) -> list[str]:
    """The lines that make `x`."""
    cast = f".{network.dtype}()"
    value = INPUTS[kind].replace("B", str(batch))
    return [f"torch.manual_seed({seed})", f"x = ({value}){cast}"]


class Made:
    """The module that a network's text makes, run once."""

    def __init__(self, network: Network, oracle: bool = False) -> None:
        self.network = network
        self.source, self.program = text(network, oracle)
        digest = hashlib.sha1(self.source.encode()).hexdigest()[:16]
        self.name = f"fuzz_{digest}{'_oracle' if oracle else ''}"
        if self.name not in sys.modules:
            module = types.ModuleType(self.name)
            file = f"<{self.name}>"
            linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
            exec(compile(self.source, file, "exec"), module.__dict__)
            sys.modules[self.name] = module
        self.space = sys.modules[self.name].__dict__

    def net(self) -> Any:
        return self._run(make_lines(self.network))["net"]

    def x(self, kind: str, batch: int, seed: int) -> Any:
        return self._run(input_lines(self.network, kind, batch, seed))["x"]

    def call(self, net: Any, x: Any) -> Any:
        return eval(FORMS[self.network.form][3], self.space, {"net": net, "x": x})

    def given(self, x: Any) -> Any:
        return eval(FORMS[self.network.form][4], self.space, {"x": x})

    def wishes(self) -> dict[str, Any] | None:
        wishes = self.program.wishes
        return {k: eval(v, self.space) for k, v in wishes.items()} or None

    def edit(self, net: Any) -> None:
        for line in self.program.edits:
            exec(line, self.space, {"net": net})

    def _run(self, lines: list[str]) -> dict[str, Any]:
        local: dict[str, Any] = {}
        exec("\n".join(lines), self.space, local)
        return local


def smaller(network: Network) -> Iterator[Network]:
    """Networks with a little less in them, the largest steps first."""
    yield from (replace(network, parts=p) for p in _shorter(network.parts) if p)
    plain = Network(network.parts)
    for name in (
        "train",
        "share",
        "traced",
        "training",
        "form",
        "dtype",
        "second",
        "inputs",
        "batch",
        "width",
        "weights",
    ):
        if getattr(network, name) != getattr(plain, name):
            yield replace(network, **{name: getattr(plain, name)})
    yield from (replace(network, parts=p) for p in _simpler(network.parts))


def _shorter(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    for k, part in enumerate(parts):
        yield parts[:k] + parts[k + 1 :]
        if part.inner:
            yield parts[:k] + part.inner + parts[k + 1 :]
            for inner in _shorter(part.inner):
                if inner:
                    yield (*parts[:k], replace(part, inner=inner), *parts[k + 1 :])


def _simpler(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    for k, part in enumerate(parts):
        chosen = dict(part.options)
        for name, choices in KINDS[part.kind].options.items():
            if chosen[name] != choices[0]:
                options = tuple({**chosen, name: choices[0]}.items())
                yield (*parts[:k], replace(part, options=options), *parts[k + 1 :])
        for inner in _simpler(part.inner):
            yield (*parts[:k], replace(part, inner=inner), *parts[k + 1 :])


def shrunk(network: Network, fails: Callable[[Network], bool], tries: int = 80) -> Network:
    """The smallest network found that still fails, by leaving out one thing after another."""
    found = True
    while found and tries > 0:
        found = False
        for candidate in smaller(network):
            tries -= 1
            if tries <= 0:
                break
            if fails(candidate):
                network, found = candidate, True
                break
    return network
