"""What a random network is made of: each part is a record, and a function that writes its lines.

A part reads and writes the variable `x` of a `forward`, whose last axis keeps its width, so any part
can be left out. Written with `oracle=True`, the approximate functions are those of `oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Part:
    """One step of a network: its kind, what is chosen of it, the parts inside it."""

    kind: str
    options: tuple[tuple[str, Any], ...] = ()
    inner: tuple[Part, ...] = ()


class Act(NamedTuple):
    """An activation: as a module, as calls, as calls and a module that overwrite."""

    module: str
    calls: tuple[str, ...]
    over: tuple[str, ...] = ()
    inplace: str = ""
    key: str = ""  # of the approximate instance that stands for it
    edit: str = ""  # an attribute set later


def _of(name: str, module: str, *more: str, **fields: Any) -> Act:
    return Act(module, (f"F.{name}({{x}})", *more), **fields)


ACTS: dict[str, Act] = {
    "relu": _of(
        "relu",
        "nn.ReLU()",
        "torch.relu({x})",
        "{x}.relu()",
        over=("F.relu_({x})", "{x}.relu_()", "torch.relu_({x})", "F.relu({x}, inplace=True)"),
        inplace="nn.ReLU(inplace=True)",
    ),
    "sigmoid": Act(
        "nn.Sigmoid()",
        ("torch.sigmoid({x})", "{x}.sigmoid()", "F.sigmoid({x})", "torch.special.expit({x})"),
        ("{x}.sigmoid_()", "torch.sigmoid_({x})"),
    ),
    "tanh": Act(
        "nn.Tanh()",
        ("torch.tanh({x})", "{x}.tanh()", "F.tanh({x})"),
        ("{x}.tanh_()", "torch.tanh_({x})"),
    ),
    "silu": _of(
        "silu",
        "nn.SiLU()",
        over=("F.silu({x}, inplace=True)",),
        inplace="nn.SiLU(inplace=True)",
    ),
    "gelu": _of("gelu", "nn.GELU()", key="gelu"),
    "gelu_tanh": Act(
        "nn.GELU(approximate='tanh')", ("F.gelu({x}, approximate='tanh')",), key="gelu_tanh"
    ),
    "leaky_relu": Act(
        "nn.LeakyReLU(0.2)",
        ("F.leaky_relu({x}, 0.2)", "F.leaky_relu({x}, negative_slope=0.2)"),
        ("F.leaky_relu_({x}, 0.2)", "F.leaky_relu({x}, 0.2, True)"),
        "nn.LeakyReLU(0.2, inplace=True)",
        edit="negative_slope = 0.9",
    ),
    "hardtanh": Act(
        "nn.Hardtanh(-0.5, 1.5)",
        ("F.hardtanh({x}, -0.5, 1.5)",),
        ("F.hardtanh_({x}, -0.5, 1.5)",),
        "nn.Hardtanh(-0.5, 1.5, inplace=True)",
        edit="max_val = 0.25",
    ),
    "relu6": _of("relu6", "nn.ReLU6()", inplace="nn.ReLU6(inplace=True)"),
    "hardsigmoid": _of("hardsigmoid", "nn.Hardsigmoid()", inplace="nn.Hardsigmoid(inplace=True)"),
    "hardswish": _of("hardswish", "nn.Hardswish()", inplace="nn.Hardswish(inplace=True)"),
    "mish": _of("mish", "nn.Mish()", inplace="nn.Mish(inplace=True)"),
    "tanhshrink": _of("tanhshrink", "nn.Tanhshrink()"),
    "hardshrink": _of("hardshrink", "nn.Hardshrink()", edit="lambd = 1.0"),
    "softshrink": _of("softshrink", "nn.Softshrink()", edit="lambd = 1.0"),
    "threshold": Act(
        "nn.Threshold(0.1, -1.0)",
        ("F.threshold({x}, 0.1, -1.0)",),
        ("F.threshold_({x}, 0.1, -1.0)",),
        "nn.Threshold(0.1, -1.0, inplace=True)",
        edit="value = 3.0",
    ),
    "elu": _of(
        "elu",
        "nn.ELU()",
        over=("F.elu_({x})", "F.elu({x}, inplace=True)"),
        inplace="nn.ELU(inplace=True)",
        key="elu",
        edit="alpha = 3.0",
    ),
    "selu": _of(
        "selu",
        "nn.SELU()",
        "torch.selu({x})",
        over=("F.selu_({x})", "torch.selu_({x})"),
        inplace="nn.SELU(inplace=True)",
        key="selu",
    ),
    "celu": Act(
        "nn.CELU(0.5)",
        ("F.celu({x}, 0.5)",),
        ("F.celu_({x}, 0.5)",),
        "nn.CELU(0.5, inplace=True)",
        "celu:0.5",
        "alpha = 3.0",
    ),
    "softplus": _of("softplus", "nn.Softplus()", key="softplus", edit="beta = 3.0"),
    "softplus2": Act("nn.Softplus(2.0)", ("F.softplus({x}, 2.0)",), key="softplus:2.0"),
    "logsigmoid": _of("logsigmoid", "nn.LogSigmoid()", key="logsigmoid"),
    "erf": Act("Function(torch.erf)", ("torch.erf({x})", "{x}.erf()"), ("{x}.erf_()",), key="erf"),
    "clamp": Act(
        "Function(Clamp(-0.5, 0.5))",
        ("{x}.clamp(-0.5, 0.5)", "torch.clamp({x}, min=-0.5)", "torch.clip({x}, -1, None)"),
        ("{x}.clamp_(-0.5, 0.5)", "torch.clamp_({x}, max=0.5)", "{x}.clamp_min_(0)"),
    ),
}
HARD_TO_EXPRESS = {
    "sine": "torch.sin(x)",
    "square": "x * x",
    "exp": "torch.exp(x)",
    "log": "torch.log(x.abs() + 1e-3)",
    "round": "torch.round(x)",
    "decibel": "10 * torch.log10(x * x + 1e-6)",
    "softsign": "F.softsign(x)",
    "reciprocal": "1 / (1 + x * x)",
    "floor": "x.floor() + x.sigmoid()",
    "atan": "torch.atan(x)",
}
SPELLED_OUT = {
    "swish": ("x * torch.sigmoid(x)", ""),
    "swish_beta": ("x * torch.sigmoid(1.3 * x)", ""),
    "quick_gelu": ("x * torch.sigmoid(1.702 * x)", ""),
    "softcap": ("30 * torch.tanh(x / 30)", ""),
    "relu_by_max": ("torch.maximum(x, torch.zeros_like(x))", ""),
    "relu_squared": ("F.relu(x) ** 2", ""),
    "mish": ("x * torch.tanh(F.softplus(x))", ""),
    "gelu_by_erf": ("0.5 * x * (1 + torch.erf(x / 2**0.5))", "gelu"),
    "gelu_new": (
        "0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))",
        "gelu_tanh",
    ),
    "where": ("torch.where(x > 0, x, 0.1 * x)", ""),
    "mask": ("x * (x > 0)", ""),
    "half_abs": ("(x + x.abs()) / 2", ""),
    "sigmoid_by_exp": ("1 / (1 + torch.exp(-x))", ""),
}


@dataclass
class Program:
    """The text of a network as it grows: classes, what is wished for and done later."""

    oracle: bool = False
    traced: bool = False  # by torch.fx, which leaves no modules but torch's own
    top: list[str] = field(default_factory=list)
    wishes: dict[str, str] = field(default_factory=dict)
    edits: list[str] = field(default_factory=list)
    names: int = 0

    def name(self, stem: str) -> str:
        self.names += 1
        return f"{stem}{self.names}"


@dataclass
class Scope:
    """One class of the program: lines of its `__init__` and of its `forward`."""

    program: Program
    path: str = ""
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    depth: int = 0

    def line(self, *texts: str) -> None:
        self.body += ["    " * self.depth + text for text in texts]

    def place(self, name: str) -> str:
        return f"{self.path}.{name}".removeprefix(".")

    def hold(self, stem: str, value: str) -> str:
        """An attribute of self; its name."""
        name = self.program.name(stem)
        self.init.append(f"self.{name} = {value}")
        return name

    def module(self, act: str, over: bool = False) -> str:
        """The text that makes the module of an activation."""
        known = ACTS[act]
        over = over and bool(known.inplace)
        if known.key and self.program.oracle:
            return f"Gated({known.key!r}, {over})"
        return known.inplace if over else known.module

    def call(self, act: str, which: int, over: bool = False, x: str = "x") -> str:
        """The text of a call of an activation."""
        known = ACTS[act]
        ways = (known.over if over else ()) or known.calls
        if known.key and self.program.oracle:
            return f"gated{'_' if over and known.over else ''}({known.key!r}, {x})"
        return ways[which % len(ways)].format(x=x)

    def define(self, text: str) -> None:
        if text not in self.program.top:
            self.program.top.append(text)

    def owner(self, parts: tuple[Part, ...], stem: str = "Block", attribute: str = "") -> str:
        """A class of its own around parts; its name."""
        inner = Scope(self.program, self.place(attribute) if attribute else self.path)
        emit(parts, inner)
        name = self.program.name(stem)
        self.program.top.append(class_text(name, inner))
        return name

    def custom(self, stem: str, expression: str, key: str = "") -> str:
        """A class whose forward returns an expression in x; its name."""
        if key and self.program.oracle:
            expression = f"gated({key!r}, x)"
        name = f"{stem.title().replace('_', '')}"
        inner = Scope(self.program)
        inner.body = [f"x = {expression}"]
        self.define(class_text(name, inner))
        return name


def class_text(name: str, scope: Scope, arguments: str = "x", result: str = "x") -> str:
    lines = [f"class {name}(nn.Module):"]
    if scope.init:
        lines += ["    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in scope.init] + [""]
    lines += [f"    def forward(self, {arguments}):"]
    lines += [f"        {line}" for line in scope.body] + [f"        return {result}"]
    return "\n".join(lines)


def emit(parts: tuple[Part, ...], scope: Scope) -> None:
    for part in parts:
        options = SimpleNamespace(**dict(part.options), inner=part.inner)
        KINDS[part.kind].write(scope, options)


class Kind(NamedTuple):
    """How a part is written, what can be chosen (the simplest first), how many parts are in it."""

    write: Callable[[Scope, Any], None]
    options: dict[str, tuple[Any, ...]]
    inner: bool = False
    weight: float = 1.0


KINDS: dict[str, Kind] = {}


def kind(inner: bool = False, weight: float = 1.0, **options: tuple[Any, ...]) -> Any:
    def register(write: Callable[[Scope, Any], None]) -> Callable[[Scope, Any], None]:
        KINDS[write.__name__.strip("_")] = Kind(write, options, inner, weight)
        return write

    return register


_ALL = tuple(ACTS)
_OVER = tuple(name for name, act in ACTS.items() if act.over or act.inplace)
_EDITED = tuple(name for name, act in ACTS.items() if act.edit)


@kind(weight=4, gain=(1.0, 0.3, 2.0, 4.0), norm=("", "", "", "weight", "spectral", "softplus"))
def linear(s: Scope, o: Any) -> None:
    name = s.hold("linear", "nn.Linear(W, W)")
    if o.gain != 1.0:
        s.init.append(f"self.{name}.weight.data.mul_({o.gain})")
    if o.norm in ("weight", "spectral"):
        function = f"torch.nn.utils.parametrizations.{o.norm}_norm"
        s.init.append(f"{function}(self.{name})")
    elif o.norm:
        made = s.custom("positive", s.call("tanh", 0))
        register = "torch.nn.utils.parametrize.register_parametrization"
        s.init.append(f"{register}(self.{name}, 'weight', {made}())")
    s.line(f"x = self.{name}(x)")


@kind()
def conv(s: Scope, o: Any) -> None:
    name = s.hold("conv", "nn.Conv1d(W, W, 3, padding=1)")
    s.line(f"x = self.{name}(x.transpose(1, 2)).transpose(1, 2)")


@kind(which=("batch", "layer"), act=("", *_ALL), also=("", "", *_ALL))
def norm(s: Scope, o: Any) -> None:
    if o.which == "layer":
        name = s.hold("norm", "nn.LayerNorm(W)")
        s.line(f"x = self.{name}(x)")
        return
    name = s.hold("norm", "nn.BatchNorm1d(W)")
    s.init.append(f"nn.init.uniform_(self.{name}.running_mean)")
    s.init.append(f"nn.init.uniform_(self.{name}.weight, -1, 2)")
    s.line("x = x.transpose(1, 2)", f"x = self.{name}(x)")
    if o.act:
        act = s.hold("act", s.module(o.act))
        other = s.hold("act", s.module(o.also)) if o.also else ""
        s.line(f"x = self.{act}(x)" + (f" + self.{other}(x)" if other else ""))
    s.line("x = x.transpose(1, 2)")


@kind(act=("hardswish", "relu", "tanh"), share=("channel", "layer"))
def tiered(s: Scope, o: Any) -> None:
    """A BatchNorm that a layer with gates of its own reads, and an activation as well."""
    name, layer = (
        s.hold("norm", "nn.BatchNorm1d(W)"),
        s.hold("tiered", f"tg.Linear(W, W, share={o.share!r})"),
    )
    s.init.append(f"nn.init.uniform_(self.{name}.running_mean)")
    s.init.append(f"nn.init.uniform_(self.{name}.weight, 0.5, 2)")
    act = s.hold("act", s.module(o.act))
    s.line(f"z = self.{name}(x.flatten(0, 1))", f"x = (self.{layer}(z) + self.{act}(z)).view_as(x)")


@kind()
def dropout(s: Scope, o: Any) -> None:
    name = s.hold("drop", "nn.Dropout(0.3)")
    s.line(f"x = self.{name}(x)")


@kind(weight=3, act=_ALL, over=(False, True))
def module(s: Scope, o: Any) -> None:
    name = s.hold("act", s.module(o.act, o.over))
    s.line(f"x = self.{name}(x)")


@kind(weight=3, act=_ALL, which=(0, 1, 2, 3), over=(False, True))
def call(s: Scope, o: Any) -> None:
    s.line(f"x = {s.call(o.act, o.which, o.over)}")


@kind(weight=2, act=_OVER, how=("module", "call"), which=(0, 1, 2), scale=(1.0, 0.5))
def overwritten(s: Scope, o: Any) -> None:
    """The input of what overwrites is used again: torch then sees the activation twice."""
    s.line("h = x * 1.0")
    if o.how == "module":
        name = s.hold("act", s.module(o.act, over=True))
        s.line(f"y = self.{name}(h)")
    else:
        s.line(f"y = {s.call(o.act, o.which, over=True, x='h')}")
    s.line("x = y + h" if o.scale == 1.0 else f"x = y + {o.scale} * h")


@kind(act=_ALL, view=("h[..., :2]", "h.transpose(0, 1)", "h[:, 0]"))
def overwritten_view(s: Scope, o: Any) -> None:
    act = o.act if ACTS[o.act].over else "relu"
    s.line("h = x * 1.0", f"v = {o.view}", s.call(act, 0, over=True, x="v"), "x = h")


@kind(
    weight=2,
    act=_ALL,
    how=(
        *("list", "tuple", "dict", "attribute", "outside", "nested", "method", "partial"),
        *("closure", "twice", "global", "record"),
    ),
)
def alias(s: Scope, o: Any) -> None:
    """The network holds an activation where no walk over its modules looks."""
    if o.how in ("outside", "global"):
        made = s.module(o.act)
        if o.how == "global":
            name = s.program.name("ACT")
            s.define(f"{name} = {made}")
            s.line(f"x = {name}(x)")
        else:
            name = s.hold("steps", f"[{made}]")
            s.line(f"for step in self.{name}:", "    x = step(x)")
        return
    act = s.hold("act", s.module(o.act))
    held = {
        "list": f"[self.{act}]",
        "tuple": f"(self.{act},)",
        "dict": f"{{'act': self.{act}}}",
        "nested": f"{{'all': [('act', self.{act})]}}",
        "method": f"self.{act}.forward",
        "partial": f"functools.partial(self.{act})",
        "closure": f"lambda x: self.{act}(x)",
        "twice": f"nn.Sequential(self.{act})",
        "record": f"SimpleNamespace(act=self.{act})",
    }
    if o.how == "attribute":
        name = s.program.name("held")
        s.init.append(f"object.__setattr__(self, '{name}', self.{act})")
    else:
        name = s.hold("held", held[o.how])
    use = {"list": "[0](x)", "tuple": "[0](x)", "dict": "['act'](x)", "record": ".act(x)"}
    use["nested"] = "['all'][0][1](x)"
    s.line(f"x = self.{name}{use.get(o.how, '(x)')}")


@kind(act=_ALL, times=(2, 3), wish=("", "", "none", "K", "other"), at=(0, 1))
def shared(s: Scope, o: Any) -> None:
    """One activation, called several times; on request one of the calls is another function."""
    act = s.hold("act", s.module(o.act))
    wished = {"none": "None", "K": "2", "other": "'tanh'"}
    known = ACTS[o.act]
    wish = o.wish if known.key in ("gelu", "elu", "selu") or o.wish in ("", "other", "none") else ""
    if wish:
        s.program.wishes[f"{s.place(act)}#{o.at}" if o.at else s.place(act)] = wished[wish]
    for time in range(o.times):
        here = f"self.{act}"
        if s.program.oracle and wish and o.at in (0, time):  # without a number: every call
            key = {"none": "", "K": f"{known.key}_k2", "other": ""}[wish]
            text = s.call("tanh", 0) if wish == "other" else known.calls[0].format(x="x")
            here = f"gated({key!r}, x)" if key else text
            s.line(f"x = 0.7 * {here} - {time}")
        else:
            s.line(f"x = 0.7 * {here}(x) - {time}")


@kind(
    act=_ALL,
    which=("forward", "pre"),
    kwargs=(False, True),
    on=("activation", "owner"),
    act_in=("double", "none"),
)
def hook(s: Scope, o: Any) -> None:
    """A hook that changes what it sees, or only looks."""
    keys = ", kwargs" if o.kwargs else ""
    changes = o.act_in == "double"
    if o.which == "forward":
        result = "output * 2" if changes else "None"
        name = f"hook_{o.which}_{o.kwargs}_{changes}".lower()
        s.define(f"def {name}(module, args{keys}, output):\n    return {result}")
        register = f"register_forward_hook({name}, with_kwargs={o.kwargs})"
    else:
        scaled = "(args[0] * 2,)" + (", kwargs" if o.kwargs else "")
        result = scaled if changes else "None"
        name = f"hook_{o.which}_{o.kwargs}_{changes}".lower()
        s.define(f"def {name}(module, args{keys}):\n    return {result}")
        register = f"register_forward_pre_hook({name}, with_kwargs={o.kwargs})"
    if o.on == "activation":
        made = s.hold("act", s.module(o.act))
    else:
        made = s.hold(
            "block", s.owner((Part("call", _options(act=o.act, which=0, over=False)),)) + "()"
        )
    s.init.append(f"self.{made}.{register}")
    s.line(f"x = self.{made}(x)")


def _options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


@kind(inner=True, how=("sequential", "list", "dict", "custom", "deep"))
def container(s: Scope, o: Any) -> None:
    name = s.program.name("part")
    inside = {"sequential": ".0", "list": ".0", "dict": ".a", "custom": "", "deep": ".1.1"}
    block = s.owner(o.inner, attribute=name + inside[o.how])
    made = {
        "sequential": f"nn.Sequential({block}())",
        "list": f"nn.ModuleList([{block}()])",
        "dict": f"nn.ModuleDict({{'a': {block}()}})",
        "custom": f"{block}()",
        "deep": f"nn.Sequential(nn.Sequential(), nn.Sequential(nn.Identity(), {block}()))",
    }[o.how]
    s.init.append(f"self.{name} = {made}")
    if o.how == "list":
        s.line(f"for part in self.{name}:", "    x = part(x)")
    else:
        s.line(f"x = self.{name}{'[' + repr('a') + ']' if o.how == 'dict' else ''}(x)")


@kind(inner=True, times=(1, 2))
def residual(s: Scope, o: Any) -> None:
    name = s.program.name("block")
    s.init.append(f"self.{name} = {s.owner(o.inner, attribute=name)}()")
    for _ in range(o.times):
        s.line(f"x = x + self.{name}(x.clone())")


@kind(
    weight=1.5,
    cell=("GRU", "LSTM", "RNN", "relu"),
    layers=(1, 2),
    both=(False, True),
    state=(False, True),
)
def recurrent(s: Scope, o: Any) -> None:
    more = ", nonlinearity='relu'" if o.cell == "relu" else ""
    cell = "RNN" if o.cell == "relu" else o.cell
    made = f"nn.{cell}(W, W, {o.layers}, batch_first=True, bidirectional={o.both}{more})"
    name = s.hold("rnn", made)
    s.line(f"x, h = self.{name}(x)")
    if o.both:
        s.line("x = x[..., :W] + x[..., W:]")
    if o.state:
        s.line(f"h = h[0] if {o.cell == 'LSTM'} else h", "x = x + h.mean(0).unsqueeze(1)")


@kind(cell=("GRU", "LSTM", "RNN"), act=("", *_ALL))
def cell(s: Scope, o: Any) -> None:
    name = s.hold("cell", f"nn.{o.cell}Cell(W, W)")
    s.line("h = None", "steps = []", "for t in range(x.shape[1]):")
    s.line(f"    h = self.{name}(x[:, t], h)")
    s.line(f"    steps.append({'h[0]' if o.cell == 'LSTM' else 'h'})")
    s.line("x = torch.stack(steps, 1)")
    if o.act:
        s.line(f"x = {s.call(o.act, 0)}")


@kind(
    weight=1.5,
    how=("softmax", "sdpa", "causal", "module", "weights", "layer", "masked", "softmax_module"),
    act=("relu", "gelu"),
    dim=(-1, 1),
)
def attention(s: Scope, o: Any) -> None:
    if o.how == "softmax":
        s.line(f"x = (x @ x.transpose(1, 2)).softmax({o.dim}) @ x")
    elif o.how == "softmax_module":
        name = s.hold("softmax", f"nn.Softmax({o.dim})")
        s.line(f"x = self.{name}(x @ x.transpose(1, 2)) @ x")
    elif o.how in ("sdpa", "causal"):
        causal = ", is_causal=True" if o.how == "causal" else ""
        s.line(f"x = F.scaled_dot_product_attention(x, x, x{causal})")
    elif o.how == "masked":
        s.line("mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()")
        s.line("x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)")
    elif o.how in ("module", "weights"):
        name = s.hold("mha", "nn.MultiheadAttention(W, 2 if W % 2 == 0 else 1, batch_first=True)")
        s.line(f"x, w = self.{name}(x, x, x, need_weights={o.how == 'weights'})")
        if o.how == "weights":
            s.line("x = x + w.sum(-1, keepdim=True)")
    else:
        act = "F.gelu" if o.act == "gelu" else "F.relu"
        if o.act == "gelu" and s.program.oracle:
            act = "functools.partial(gated, 'gelu')"
        made = f"nn.TransformerEncoderLayer(W, 1, 5, 0.0, {act}, batch_first=True)"
        s.line(f"x = self.{s.hold('layer', made)}(x)")


@kind(
    weight=3,
    act=_ALL,
    before=("x", "x / 30", "-x", "x + 0.5", "2 * x - 1", "x / 3"),
    after=(
        "{y}",
        "{y}",
        "{y}",
        "30 * {y}",
        "-{y}",
        "{y} + 0.25",
        "x + {y}",
        "x * {y}",
        "0.5 * {y} - 1",
    ),
    as_module=(True, False),
)
def transformed(s: Scope, o: Any) -> None:
    """An activation of a transformed input, as a module or in the forward around."""
    text = s.call(o.act, 0, x=f"({o.before})" if o.before != "x" else "x")
    text = o.after.format(y=text)
    if o.as_module:
        name = s.program.name("Transformed")
        inner = Scope(s.program)
        inner.body = [f"x = {text}"]
        s.program.top.append(class_text(name, inner))
        text = f"self.{s.hold('act', f'{name}()')}(x)"
    s.line(f"x = {text}")


@kind(weight=2, which=tuple(SPELLED_OUT), as_module=(True, False))
def spelled(s: Scope, o: Any) -> None:
    text, key = SPELLED_OUT[o.which]
    if s.program.oracle and (s.program.traced or not o.as_module):  # its calls are the sites
        text = text.replace("torch.erf(", "gated('erf', ")
        text = text.replace("F.softplus(", "gated('softplus', ")
    if o.as_module:
        made = s.custom(f"spelled_{o.which}", text, "" if s.program.traced else key)
        text = f"self.{s.hold('act', f'{made}()')}(x)"
    s.line(f"x = {text}")


@kind(weight=1.5, which=tuple(HARD_TO_EXPRESS), as_module=(True, False))
def inexpressible(s: Scope, o: Any) -> None:
    text = HARD_TO_EXPRESS[o.which]
    if o.which == "softsign" and s.program.oracle:  # a row of the taxonomy, with K = 8
        text = "gated('softsign', x)"
    if o.as_module:
        made = s.custom(f"other_{o.which}", text)
        text = f"self.{s.hold('other', f'{made}()')}(x)"
    s.line(f"x = {text}")


@kind(act=_ALL, dtype=("double", "half", "bfloat16"), how=("call", "module"))
def cast(s: Scope, o: Any) -> None:
    if o.how == "module":
        text = f"self.{s.hold('act', s.module(o.act))}(x.{o.dtype}())"
    else:
        text = s.call(o.act, 0, x=f"x.{o.dtype}()")
    s.line("dtype = x.dtype", f"x = {text}.to(dtype)")


@kind(inner=True, dtype=("bfloat16", "float16"))
def autocast(s: Scope, o: Any) -> None:
    name = s.program.name("block")
    s.init.append(f"self.{name} = {s.owner(o.inner, attribute=name)}()")
    s.line("dtype = x.dtype", f"with torch.autocast('cpu', torch.{o.dtype}):")
    s.line(f"    x = self.{name}(x)", "x = x.to(dtype)")


@kind(
    weight=1.5,
    act=("leaky_relu", "relu", "gelu", "tanh", "softplus", "elu"),
    how=("partial", "lambda", "dict", "module_dict", "default", "getattr", "map"),
)
def wrapper(s: Scope, o: Any) -> None:
    text = s.call(o.act, 0)
    name = s.program.name("fn")
    if o.how == "partial":
        known = ACTS[o.act]
        if s.program.oracle and known.key:
            s.define(f"{name} = functools.partial(gated, {known.key!r})")
        else:
            head, _, _rest = known.calls[-1].partition("({x}")
            more = ", negative_slope=0.2" if "leaky" in head else ""
            head = "torch.tanh" if "x" in head else head
            s.define(f"{name} = functools.partial({head}{more})")
        s.line(f"x = {name}(x)")
    elif o.how == "lambda":
        s.define(f"{name} = lambda x: {text}  # noqa: E731")
        s.line(f"x = {name}(x)")
    elif o.how == "dict":
        s.define(f"{name} = {{'f': lambda x: {text}}}")
        s.line(f"x = {name}['f'](x)")
    elif o.how == "module_dict":
        s.init.append(f"self.{name} = {{'f': lambda x: {text}}}")
        s.line(f"x = self.{name}['f'](x)")
    elif o.how == "default":
        s.define(f"def {name}(x, f=lambda x: {text}):\n    return f(x)")
        s.line(f"x = {name}(x)")
    elif o.how == "getattr":
        s.define(f"def {name}(x):\n    return {text}")
        s.line(f"x = globals()['{name}'](x)")
    else:
        s.line(f"x = torch.stack(list(map(lambda x: {text}, x.unbind(1))), 1)")


@kind(weight=1.5, act=_ALL, other=_ALL, on=("sum", "last", "flag"))
def branch(s: Scope, o: Any) -> None:
    """A branch that data, or the mode, decide."""
    test = {
        "sum": "x.sum() > 0",
        "last": "x.numel() and x.flatten()[-1] > 0",
        "flag": "self.training",
    }
    s.line(
        f"if {test[o.on]}:", f"    x = {s.call(o.act, 0)}", "else:", f"    x = {s.call(o.other, 0)}"
    )


@kind(act=_ALL, count=("x.shape[0]", "int(x.sum() > 0) + 1"), as_module=(False, True))
def loop(s: Scope, o: Any) -> None:
    """A loop whose number of rounds is data."""
    text = f"self.{s.hold('act', s.module(o.act))}(x)" if o.as_module else s.call(o.act, 0)
    s.line(f"for _ in range({o.count}):", f"    x = 0.8 * {text} + 0.1")


@kind(inner=True, weight=1.5, reentrant=(False, True), how=("module", "function"))
def checkpoint(s: Scope, o: Any) -> None:
    name = s.program.name("block")
    s.init.append(f"self.{name} = {s.owner(o.inner, attribute=name)}()")
    target = f"self.{name}" if o.how == "module" else f"lambda x: self.{name}(x) * 1.0"
    function = "torch.utils.checkpoint.checkpoint"
    s.line(f"x = {function}({target}, x, use_reentrant={o.reentrant})")


@kind(act=_ALL, reentrant=(False, True))
def checkpointed_call(s: Scope, o: Any) -> None:
    """The nonlinear call itself is recomputed, and its owner is the network around."""
    function = "torch.utils.checkpoint.checkpoint"
    s.line(f"x = {function}(lambda x: {s.call(o.act, 0)}, x, use_reentrant={o.reentrant})")


@kind(weight=1.5, which=("hidden", "counter", "mean", "nan", "cache", "act"), act=_ALL)
def stateful(s: Scope, o: Any) -> None:
    """What a forward leaves behind: an attribute, a buffer; a buffer that is NaN."""
    name = s.program.name("state")
    text = s.call(o.act, 0)
    if o.which == "hidden":
        s.init.append(f"self.{name} = None")
        s.line(f"h = x if self.{name} is None else x + 0.1 * self.{name}.mean()")
        s.line(f"self.{name} = x.detach()", "x = h", f"x = {text}")
    elif o.which == "counter":
        s.init.append(f"self.register_buffer('{name}', torch.zeros(()))")
        s.line(f"self.{name} += 1", f"x = {text} + 0.01 * self.{name}.to(x.dtype)")
    elif o.which == "mean":
        s.init.append(f"self.register_buffer('{name}', torch.zeros(W))")
        s.line(f"self.{name}.lerp_(x.detach().mean((0, 1)).to(self.{name}.dtype), 0.1)")
        s.line(f"x = x - self.{name}.to(x.dtype)", f"x = {text}")
    elif o.which == "nan":
        s.init.append(f"self.register_buffer('{name}', torch.full((W,), float('nan')))")
        s.line(f"x = {text}")
    elif o.which == "cache":
        s.init.append(f"self.{name} = []")
        s.line(f"x = {text}", f"self.{name}.append(float(len(self.{name})))")
        s.line(f"x = x * (1 + 0.01 * len(self.{name}))")
    else:
        made = s.program.name("Stateful")
        inner = Scope(s.program)
        inner.init = ["self.seen = 0"]
        inner.body = ["self.seen = self.seen + 1", f"x = {text}"]
        s.program.top.append(class_text(made, inner))
        s.line(f"x = self.{s.hold('act', f'{made}()')}(x)")


_FUNCTION = """class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, g):
        return 2 * g"""


@kind(
    weight=1.5,
    which=("dropout", "rrelu", "rrelu_call", "straight", "function", "no_grad", "detach", "noise"),
    act=_ALL,
)
def trained(s: Scope, o: Any) -> None:
    """Activation modules that train otherwise than they evaluate."""
    if o.which == "rrelu":
        s.line(f"x = self.{s.hold('act', 'nn.RReLU()')}(x)")
        return
    if o.which == "rrelu_call":
        s.line("x = F.rrelu(x, training=self.training)")
        return
    text = s.call(o.act, 0)
    if o.which == "function":
        s.define(_FUNCTION)
    body = {
        "dropout": [f"x = F.dropout({text}, 0.5, self.training)"],
        "straight": [f"x = x + ({text} - x).detach()"],
        "function": ["x = Doubled.apply(x)"],
        "no_grad": ["with torch.no_grad():", f"    y = {text}", "x = y"],
        "detach": [f"x = {text} * torch.sigmoid(x).detach()"],
        "noise": [f"x = {text}", "if self.training:", "    x = x + 0.1 * torch.randn_like(x)"],
    }[o.which]
    name = s.program.name("Trained")
    inner = Scope(s.program)
    inner.body = body
    s.program.top.append(class_text(name, inner))
    s.line(f"x = x + self.{s.hold('act', f'{name}()')}(x)")


@kind(act=_EDITED, over=(False, True))
def edited(s: Scope, o: Any) -> None:
    """An attribute of the activation is set after conversion."""
    name = s.hold("act", s.module(o.act, o.over))
    s.program.edits.append(f"net.get_submodule({s.place(name)!r}).{ACTS[o.act].edit}")
    s.line(f"x = self.{name}(x)")


@kind(
    which=("glu", "prelu", "prelu_channel", "softmin", "maximum", "softmax2d", "log_softmax", "abs")
)
def other(s: Scope, o: Any) -> None:
    if o.which == "prelu_channel":
        name = s.hold("act", "nn.PReLU(W)")
        s.line(f"x = self.{name}(x.transpose(1, 2)).transpose(1, 2)")
    elif o.which == "prelu":
        s.line(f"x = self.{s.hold('act', 'nn.PReLU()')}(x)")
    else:
        text = {
            "glu": "F.glu(torch.cat([x, x.flip(-1)], -1))",
            "softmin": "F.softmin(x, -1)",
            "maximum": "torch.maximum(x, x.flip(-1))",
            "softmax2d": "torch.softmax(x, 1) * x",
            "log_softmax": "F.log_softmax(x, -1)",
            "abs": "x.abs()",
        }[o.which]
        s.line(f"x = {text}")


WISHES = (
    "tg.TG(1.0, 0.0, (0.0, 1.0), (0.0, 0.0))",
    "tg.TG(2.0, 0.5, (-0.5, 1.0), (1.0, -1.0))",
    "tg.TG(1.5, (1.0, -1.0), (0.0, 0.5, 1.0), (0.0, 1.0, -1.0))",
    "tg.TG(3.0, (-1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 0.0, -1.0))",
    "tg.TG(float('inf'), (-1.0, 1.0), (0.5, 2.0, 0.0), (0.0, 1.0, 3.0), owner=('hi', 'lo'))",
    "tg.TG(1.0, 0.0, (1000.0, 0.001), (0.0, 0.0))",
    "tg.TG((1.0, 2.0, 4.0), (3.0, 0.0, -2.0), (0.0, 1.0, -1.0, 1.0), (5.0, 0.0, 1.0, 0.0))",
)


@kind(act=("relu", "gelu", "tanh"), t=WISHES, how=("module", "call"))
def wished(s: Scope, o: Any) -> None:
    """The caller asks for an instance of his own at a site."""
    oracle = s.program.oracle
    if o.how == "module":
        name = s.hold("act", f"Gated({o.t})" if oracle else s.module(o.act))
        s.program.wishes[s.place(name)] = o.t
        s.line(f"x = self.{name}(x)")
    else:
        name = s.program.name("asked")
        made = s.program.name("Asked")
        inner = Scope(s.program)
        inner.body = [f"x = gated({o.t}, x)" if oracle else f"x = {s.call(o.act, 0)}"]
        s.program.top.append(class_text(made, inner))
        s.init.append(f"self.{name} = nn.Sequential({made}(), nn.Identity())")
        # one call alone: the module as a whole is the site
        s.program.wishes[f"re:{s.place(name).replace('.', '[.]')}.*"] = o.t
        s.line(f"x = self.{name}(x)")
