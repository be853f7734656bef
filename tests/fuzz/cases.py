"""Networks that were converted wrongly once, as small as they could be made."""

from __future__ import annotations

from typing import Any

from tests.fuzz.network import Network
from tests.fuzz.parts import KINDS, WISHES, Part


def part(kind: str, *inner: Part, **chosen: Any) -> Part:
    """A part of a kind; what is not chosen is the simplest."""
    options = KINDS[kind].options
    return Part(kind, tuple((k, chosen.get(k, v[0])) for k, v in options.items()), inner)


def one(kind: str, *inner: Part, inputs: str = "normal", second: str = "normal", dtype: str = "float",
        traced: bool = False, **chosen: Any) -> Network:  # fmt: skip
    """A network of one part."""
    network = (part(kind, *inner, **chosen),)
    return Network(network, inputs=inputs, second=second, dtype=dtype, traced=traced)


_GELU = part("call", act="gelu")
CASES: dict[str, Network] = {
    "an activation of a scaled input": one("transformed", act="relu", before="x / 30"),
    "an activation of a shifted input": one("transformed", act="tanhshrink", before="x + 0.5"),
    "an activation of a mirrored input": one("transformed", act="relu", before="-x"),
    "a tanh of x / 30, times 30": one("transformed", act="tanh", before="x / 30", after="30 * {y}"),
    "a mirrored silu in float64": one(
        "transformed", act="silu", before="-x", after="-{y}", dtype="double"
    ),
    "approximate sites add up": Network((part("shared", act="selu"),) * 2),
    "relu overwrites its input": one("overwritten", act="relu"),
    "elu overwrites its input": one("overwritten", act="elu"),
    "hardswish overwrites half of its input": one("overwritten", act="hardswish", scale=0.5),
    "elu overwrites its input, exported": one("overwritten", act="elu"),
    "relu overwrites its input, exported": one("overwritten", act="relu"),
    "silu overwrites its input, exported": one("call", act="silu", over=True),
    "the gradient of a softmax, exported": one("other", which="softmax2d"),
    "the gradient of attention, exported": one("attention", how="softmax"),
    "an empty batch shows nothing": one("module", act="relu", inputs="empty"),
    "NaN alone show nothing": one("module", act="relu", inputs="all nan"),
    "a BatchNorm that only one reader can take": one("tiered"),
    "an approximate gate at 1e38": one("module", act="selu", second="huge"),
    "one module with an instance for each call, in threads": one(
        "shared", act="gelu", wish="other", at=1
    ),
    "a call of a shared module that is to be left": one("shared", act="gelu", wish="none", at=1),
    "a call that was not planned": one("branch", act="relu", other="tanh", on="flag"),
    "more calls than were planned": one("loop", act="relu"),
    "more calls of a module than were planned": one("loop", act="relu", as_module=True),
    "an attribute set later": one("edited", act="leaky_relu"),
    "an attribute set later, approximate": one("edited", act="elu"),
    **{
        f"an activation with {which} in it": one("trained", which=which, act="relu")
        for which in KINDS["trained"].options["which"]
    },
    **{
        f"what a forward leaves behind: {which}": one("stateful", which=which, act="relu")
        for which in KINDS["stateful"].options["which"]
    },
    **{
        f"an activation held elsewhere: {how}": one("alias", act="relu", how=how)
        for how in KINDS["alias"].options["how"]
    },
    **{
        f"what no gate can express: {which}": Network(
            (part("inexpressible", which=which), part("module", act="relu"))
        )
        for which in KINDS["inexpressible"].options["which"]
    },
    "a traced network": one("module", act="relu", traced=True),
    "a call under checkpoint": one("checkpointed_call", act="tanh"),
    "a block under checkpoint": one("checkpoint", _GELU),
    "equal arguments of a maximum": one("other", which="maximum", second="zero"),
    "relu as a maximum": one("spelled", which="relu_by_max", inputs="grid"),
    "a slope of 0.2 in float64": one("module", act="leaky_relu", dtype="double"),
    "a slope of 0.2 on a float64 tensor": one("cast", act="leaky_relu", how="module"),
    "celu in float64": one("module", act="celu", dtype="double"),
    "an instance for each call of a traced network, copied": one(
        "shared", act="relu", wish="none", at=1, traced=True
    ),
    "lines that cancel": one("residual", part("overwritten", act="hardsigmoid")),
    "a dropout behind a softmax of a view": Network(
        (part("other", which="softmin"), part("dropout")), inputs="view"
    ),
    "softsign as a module": one("inexpressible", which="softsign"),
    "elu at tiny inputs": one("module", act="elu", second="tiny"),
    "a traced network, exported": one("call", act="gelu", traced=True),
    "a call under checkpoint, compiled": one("checkpointed_call", act="gelu_tanh"),
    "a view, compiled for every shape": Network(
        (part("call", act="softplus2"),), inputs="view", weights=1
    ),
    "NaN under a causal mask": one("attention", how="causal", second="nan"),
    "attention of large inputs": one("attention", how="module", second="huge"),
    "a call that was not planned, before a BatchNorm": Network(
        (part("branch", act="celu", other="hardsigmoid", on="flag"), part("norm")), dtype="double"
    ),
    "a branch that NaN decides": Network(
        (part("call", act="silu"), part("branch", act="hardtanh", other="hardshrink", on="sum")),
        inputs="grid",
        second="minus",
    ),
    "a wish for a module that is answered by its calls": one(
        "shared", act="clamp", wish="other", at=0, inputs="grid", dtype="double"
    ),
    "a wish for a call of a module that is answered by its calls": one(
        "shared", act="clamp", wish="none", at=1
    ),
    "no_grad under autocast, exported": Network(
        (part("autocast", part("trained", which="no_grad", act="clamp")),), inputs="wide"
    ),
    "an autograd.Function beside a call, compiled": Network(
        (part("call", act="elu"), part("trained", which="function", act="gelu")), weights=1
    ),
    "a counter that the backward computes with, compiled": Network(
        (part("stateful", which="counter", act="gelu"), part("call", act="gelu", over=True)),
        width=6,
        weights=247,
        inputs="wide",
    ),
    "a traced elu at 0": one("module", act="elu", second="zero", traced=True),
    "the slope of a prelu at an infinite input": one("other", which="prelu", second="infinite"),
    "unlike calls of a traced network under checkpoint, copied": Network(
        (part("checkpointed_call", act="softplus2", reentrant=True), part("call", act="softplus")),
        traced=True,
    ),
    "unlike calls, one of them by a method that was kept": Network(
        (_GELU, part("alias", act="gelu_tanh", how="method"))
    ),
    "selu_ of a norm, compiled": Network(
        (part("norm", which="layer"), part("call", act="selu", over=True)), dtype="double"
    ),
    "attention under autocast, exported": one("autocast", part("attention", how="sdpa")),
    "an LSTM and its state, compiled": one("recurrent", cell="LSTM", state=True),
    "the gradient on a threshold, exported": one(
        "wished", act="gelu", t=WISHES[3], inputs="grid", second="grid"
    ),
    "a gradient of half that overflows behind a flat branch": Network(
        (
            part("transformed", act="threshold", before="x / 30", after="30 * {y}"),
            part("wished", act="gelu", t=WISHES[5], how="call"),
            part("norm", which="layer"),
        ),
        width=3,
        second="wide",
        dtype="half",
    ),
    "a gradient of half that overflows behind a branch that learns": Network(
        (part("module", act="softshrink"), part("inexpressible", which="decibel")),
        inputs="grid",
        dtype="half",
        train=("s",),
    ),
    "a method that is kept, of a gate that learns": Network(
        (part("alias", act="selu", how="method"),), train=("theta",)
    ),
    "a relu of a BatchNorm of equal rows": Network(
        (part("module", act="threshold"), part("tiered", act="relu")), inputs="wide", second="wide"
    ),
    "gradients of a recurrent network that is flat": one(
        "recurrent", cell="RNN", state=True, second="large", dtype="double"
    ),
    "a relu written out, and what overwrites it, compiled": Network(
        (part("spelled", which="mask"), part("module", act="leaky_relu", over=True)),
    ),
    "a sigmoid written out, and what overwrites it": Network(
        (part("spelled", which="sigmoid_by_exp"), part("call", act="silu", over=True)),
    ),
    "a gate that learns behind a buffer that forward changes, compiled": Network(
        (part("stateful", which="counter", act="relu"), part("overwritten", act="relu")),
        train=("s",),
    ),
    "the gradient of tanhshrink, which cancels, behind a norm": Network(
        (part("norm", which="layer"), part("transformed", act="tanhshrink", after="{y} + 0.25")),
        inputs="tiny",
    ),
    "gradients of a residual with checkpoint": one(
        "checkpoint", part("linear"), _GELU, reentrant=True
    ),
}

# These may be refused, with a way out; all others convert.
MAY_BE_REFUSED = (
    *("an empty batch shows nothing", "NaN alone show nothing", "approximate sites add up"),
    *(
        name
        for name in CASES
        if name.startswith(("an activation with", "what no gate can express: so"))
    ),
    *("an activation held elsewhere: closure", "what no gate can express: atan"),
    "what no gate can express: reciprocal",
    "a wish for a module that is answered by its calls",
    "a wish for a call of a module that is answered by its calls",
)
