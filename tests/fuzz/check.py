"""One network, tried in every way: converted, run, differentiated, copied, compiled, exported.

What is held against it: the original, or, where a site is only approximate, the same network with
that function's instance evaluated by `oracle`. The bound is rounding, as the original itself has it:
a floor in units of the last place, the difference to its own float64 run and what a change of its
weights by a few of these units does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import pickle
import random
import re
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import default_partition, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import threshold_gating as tg
from tests.fuzz import learning, oracle
from tests.fuzz.network import NOT_FINITE, UNSEEN, Made, Network
from tests.fuzz.parts import Part

REFUSALS = (tg.conversion.ConversionError, ValueError, TypeError)
# What a refusal says that can be done.
_WAYS_OUT = re.compile(
    r"\b(give|convert (it|the|after)|use|leave|leaves|calibrate|pass|set|raise it|make it a method)\b"
    r"|sites=|strict=|tol=|\btol\b|eval\(\)|branches|nothing to convert"
)
# The last places that the value and the gradient of a network may differ by, relative to the
# largest entry, before the original's own rounding is looked at; 16 bits round so coarsely that
# one unit hides what many would in float32. In float64 instances are recognised to 1e-12, and
# torch's own backward of hardsigmoid has a constant that is off by 5e-9.
_FLOOR = {"value": {8: 1e-11, 4: 64 * 2**-23, 2: 4 * 2**-8}}
_FLOOR["gradient"] = {8: 1e-7, 4: 256 * 2**-23, 2: 16 * 2**-8}
# Gates below 1e-26 are not resolved in float32, and a gradient is a sum over them; a value that is
# as small may be that of a tiny input.
_NOTHING = {"value": 1e-37, "gradient": 1e-26}
# Products saturate where they would overflow, so that no finite input gives NaN; a gradient as large
# as this may have passed through one that did.
_SATURATED = 1e30
# How often its own rounding, the largest of a dozen samples, may be exceeded, and up to which share
# of the largest entry it counts at all.
_OWN, _MOST = 10, 0.1
_AGAIN = 2  # times its own rounding, which convert grants a network, too
_FITTED = {"value": 2e-2, "gradient": 0.1}  # where an instance was fitted, which no oracle knows
_STATED = 1e-2  # of max|y|: what convert accepts without being told


@dataclass(frozen=True)
class Failure:
    """What went wrong: where, in a word that shrinking keeps, and the details."""

    stage: str
    message: str


@dataclass
class Result:
    """What one run gave: output tensors, gradients by name, buffers, or the error."""

    values: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    error: BaseException | None = None


def walk(parts: tuple[Part, ...]) -> Iterator[Part]:
    for part in parts:
        yield part
        yield from walk(part.inner)


def run(made: Made, net: Any, x: Tensor, training: bool = False, gradient: bool = True) -> Result:
    """A forward and a backward of the network; the same random numbers every time."""
    if isinstance(net, nn.Module):
        net.train(training)
    torch.default_generator.manual_seed(1)
    try:
        with torch.set_grad_enabled(gradient):
            start = x.clone().requires_grad_(gradient)
            y = made.call(net, start * 1 if gradient else start)
            values = [t for t in tree_leaves(y) if isinstance(t, Tensor) and t.is_floating_point()]
            gradients = _gradients(net, start, values) if gradient else {}
    except Exception as error:
        return _failed(error)
    buffers = {k: b.clone() for k, b in net.named_buffers()} if isinstance(net, nn.Module) else {}
    return Result([v.detach().clone() for v in values], gradients, buffers)


def _failed(error: BaseException) -> Result:
    """A run that raised. Its frames are let go of: in torch 2.11 an error that is raised in a
    checkpointed region leaves the hooks of that region on for as long as they are held, and every
    network that is run meanwhile raises it, too."""
    traceback.clear_frames(error.__traceback__)
    return Result([], {}, {}, error)


def _gradients(net: Any, start: Tensor, values: list[Tensor]) -> dict[str, Tensor]:
    parameters = dict(net.named_parameters()) if isinstance(net, nn.Module) else {}
    wanted = {"the input": start, **parameters}
    loss: Any = 0.0
    for v in values:
        weight = torch.linspace(-1, 1, v.numel(), dtype=torch.float64).add(0.1).view(v.shape)
        loss = loss + (v.double() * weight).sum()
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {k: g.clone() for k, g in zip(wanted, found, strict=True) if g is not None}


class FoundError(Exception):
    """The failure that is being shrunk was found."""


class Trial:
    """The checks of one network; `failures` holds what they found."""

    def __init__(self, network: Network, heavy: frozenset[str], wanted: str = "") -> None:
        self.network, self.heavy, self.wanted = network, heavy, wanted
        self.failures: list[Failure] = []
        self.refusal = ""
        self.said = ""  # the warnings of convert
        self.same_gates = False  # whether gates are compared with themselves
        self.alone = Result([], {}, {})
        self.made = Made(network)
        self.parts = [part.kind for part in walk(network.parts)]
        oracle = Made(network, oracle=True)
        exact = oracle.source.partition("\nW = ")[2] == self.made.source.partition("\nW = ")[2]
        self.oracle = None if exact else oracle
        size = {"float": 4, "double": 8, "half": 2, "bfloat16": 2}[network.dtype]
        casts = {"cast", "autocast"} & set(self.parts)
        self.size = 2 if casts else size
        self.given = self.made.x(network.inputs, network.batch, 1)
        self.second = self.made.x(network.second, network.batch % 3 + 1, 2)

    def kernel(self) -> contextlib.AbstractContextManager[Any]:
        """Which of torch's attention kernels the original is.

        The fused one of a CPU does not see NaN in a row of logits (inf - inf, at 1e38), nor in the
        values of some keys; the one that is written out does, and gates have its values.
        """
        if {self.network.inputs, self.network.second} & set(NOT_FINITE):
            return sdpa_kernel(SDPBackend.MATH)
        return contextlib.nullcontext()

    def fail(self, stage: str, message: str) -> None:
        self.failures.append(Failure(stage, message))
        if stage == self.wanted:
            raise FoundError

    def run(self) -> None:
        made, network = self.made, self.network
        try:
            net = made.net()
        except Exception:  # what cannot be made, or traced, is no network
            return
        before = Snapshot(net)
        plain = copy.deepcopy(net)
        self.alone = alone = run(made, copy.deepcopy(net), self.given, gradient=False)
        before_rng = torch.get_rng_state()
        gated = self.convert(net)
        if gated is None:
            self.unchanged(before, net)
            return
        if not torch.equal(before_rng, torch.get_rng_state()):
            self.fail("random state", "convert draws from torch's global generator")
        self.gated = gated
        start = copy.deepcopy(gated) if network.train else None
        self.unchanged(before, net)
        if alone.error is not None:
            self.fail("convert", f"the original raises {alone.error!r}, convert does not")
            return
        if network.inputs in UNSEEN:
            self.fail("nothing seen", f"convert certifies with inputs that are {network.inputs}")
            return
        self.stated(net, gated)
        # where a bad fit may hide what a backend does, its gates are held to themselves
        alone = self.counts_runs()
        if (alone or self.fitted() or self.spells()) and network.inputs not in NOT_FINITE:
            learning.every_way(self, "itself", gated)
        if alone:
            return
        if network.weights % 20 == 1:
            self.tolerance(net)
        twins = self.twins(net, gated)
        want = net if self.oracle is None else self.oracle.net()
        original = copy.deepcopy(plain) if self.oracle is None else want
        self.steps(original, gated, twins)
        if "fold" in self.heavy and {"norm", "tiered"} & set(self.parts):
            self.fold(gated)
        if made.program.edits:
            self.edited()
        if made.program.wishes and "shared" in self.parts:
            self.threads()
        if start is not None:
            learning.learn(self, made.net(), start)

    def convert(self, net: nn.Module) -> nn.Module | None:
        made = self.made
        more = {"tol": float("inf")} if self.accepts_all else {}
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                new = tg.convert(net, made.wishes(), inputs=made.given(self.given.clone()), **more)
            self.said = " ".join(str(each.message) for each in caught)
            return new
        except REFUSALS as error:
            self.refusal = str(error)
            inside = traceback.extract_tb(error.__traceback__)[-1].filename
            if not isinstance(error, tg.conversion.ConversionError) and (
                "threshold_gating" not in inside
            ):
                self.crash("convert", error)
            elif not self.has_way_out(self.refusal):
                self.fail("no way out", self.refusal)
        except Exception as error:
            if type(error) is not type(self.alone.error):  # which is what a user gets to see
                self.crash("convert", error)
        return None

    @staticmethod
    def has_way_out(refusal: str) -> bool:
        return _WAYS_OUT.search(refusal) is not None

    def is_torchs(self, error: str) -> bool:
        return _is_torchs(error, self.made.source)

    def counts_runs(self) -> bool:
        """Whether a wish is for one call of a block that runs several times: the oracle, which is
        written in the block, has it in every run."""
        blocks = [name.partition(".")[0] for name in self.made.program.wishes if "#" in name]
        return any(self.made.source.count(f"self.{block}(") > 1 for block in blocks)

    @property
    def accepts_all(self) -> bool:
        """Whether another function than the original's was asked for."""
        return any(wish != "None" for wish in self.made.program.wishes.values())

    def crash(self, stage: str, error: BaseException) -> None:
        lines = traceback.format_exception(error)[-3:]
        self.fail(f"{stage} crash {type(error).__name__}", "".join(lines)[-600:])

    def raises_itself(self, error: BaseException) -> bool:
        """Whether the original, with gradients, raises the same."""
        own = run(self.made, self.made.net(), self.given).error
        return type(own) is type(error) and str(own) == str(error)

    def unchanged(self, before: Snapshot, net: nn.Module) -> None:
        for what in before.changed(net):
            self.fail("original changed", what)

    def stated(self, net: nn.Module, gated: nn.Module) -> None:
        """Where convert was told nothing, its output is within what it states."""
        if self.made.program.wishes or {"cast", "autocast"} & set(self.parts):
            return
        with tg.kernels.use("reference"):
            want, have = (
                run(self.made, copy.deepcopy(n), self.given, gradient=False) for n in (net, gated)
            )
        for y, z in zip(want.values, have.values, strict=False):
            scale = _largest(y)
            off = _distance(y, z)
            if _lost(y, z):
                self.fail("not stated", "finite values of the output became infinite or NaN")
            if scale and off > _STATED * scale and off > 2 * self.own(net, self.given, y):
                self.fail("not stated", f"the output is off by {off / scale:.2g} of max|y|")

    def tolerance(self, net: nn.Module) -> None:
        """A tolerance that is no number is refused, not passed."""
        given = self.made.given(self.given.clone())
        try:
            tg.convert(net, self.made.wishes(), inputs=given, tol=float("nan"))
        except REFUSALS:
            return
        self.fail("nothing seen", "convert certifies with tol=nan")

    def own(self, net: nn.Module, x: Tensor, y: Tensor) -> float:
        wide = run(self.made, copy.deepcopy(net).double(), x.double(), gradient=False)
        same = [z for z in wide.values if z.shape == y.shape]
        return _distance(same[0], y) if same else 0.0

    def twins(self, net: nn.Module, gated: nn.Module) -> dict[str, nn.Module]:
        """Copies that must do what the converted network does, bit for bit."""
        made = self.made
        ways: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopy": copy.deepcopy}
        if "pickle" in self.heavy:
            ways["pickle"] = lambda m: pickle.loads(pickle.dumps(m))
        twins = {}
        for name, way in ways.items():
            try:
                way(net)
            except Exception:
                continue  # the original cannot be copied in that way
            try:
                twins[name] = way(gated)
            except Exception as error:
                self.crash(name, error)
        if "save" in self.heavy:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    tg.conversion.save(gated, folder)
                    twins["save and load"] = tg.conversion.load(folder, made.net())
            except REFUSALS as error:
                if not self.has_way_out(str(error)):
                    self.fail("save no way out", str(error))
            except Exception as error:
                self.crash("save", error)
        return twins

    def steps(self, want: nn.Module, gated: nn.Module, twins: dict[str, nn.Module]) -> None:
        """Both networks through the same runs, so that what they keep stays in step."""
        first = True
        refused: dict[str, set[str]] = {}
        plan = [("reference", False), ("auto", False), ("auto", True), ("reference", True)]
        for backend, training in plan:
            for name, x, kind in (
                ("first", self.given, self.network.inputs),
                ("second", self.second, self.network.second),
            ):
                stage = f"{backend}{' train' if training else ''}"
                if self.decided_by_nan(kind):
                    continue
                # RReLU draws for what is below 0, which NaN of the oracle is not; and what torch's
                # own gives again under checkpoint comes from memory that nobody has written.
                undone = kind in NOT_FINITE or "checkpoint(" in self.made.source
                if training and undone and re.search("(?i)rrelu", self.made.source):
                    continue
                with tg.kernels.use(backend):
                    earlier, before = copy.deepcopy(want), copy.deepcopy(gated)
                    a, b = (run(self.made, n, x, training) for n in (want, gated))
                    if first:
                        for twin_name, twin in twins.items():
                            other = run(self.made, twin, x, training)
                            self.bitwise(twin_name, b, other)
                        first = False
                if isinstance(b.error, tg.conversion.ConversionError) and a.error is None:
                    if not self.decided_by_rounding(earlier, x, training):
                        refused.setdefault(f"{name}{training}", set()).add(backend)
                    want, gated = (
                        earlier,
                        before,
                    )  # what a run broke off half-way keeps is out of step
                    if not self.takes_other_paths(training):
                        self.crash(f"{stage} {name}", b.error)
                    continue
                if not self.agree(stage, earlier, a, b, x, kind, training, name):
                    return
        for name, backends in refused.items():
            if len(backends) == 1:
                other = "auto" if backends == {"reference"} else "reference"
                self.fail("unplanned call", f"{name}: refused by {backends}, not by {other}")
        if not self.decided_by_nan(self.network.inputs):
            self.graphs(want, gated)

    def takes_other_paths(self, training: bool) -> bool:
        """Whether another run than the one that was planned may call other functions."""
        paths = {"branch", "loop"} | ({"trained", "stateful"} if training else set())
        return bool(paths & set(self.parts))

    def decided_by_nan(self, kind: str) -> bool:
        """Whether a branch is taken by values that may be NaN in one of the two and not in the other.

        torch's silu of -inf is NaN, and so is a line of slope 0 written out at an infinite x, as the
        oracle does; gates have the limit there. Each takes another branch, and both are right.
        """
        asked = ("x.sum() > 0", "x.flatten()[-1] > 0")
        return kind in NOT_FINITE and any(test in self.made.source for test in asked)

    def decided_by_rounding(self, net: nn.Module, x: Tensor, training: bool = False) -> bool:
        """Whether the original takes another branch when it rounds otherwise."""
        seen = []
        for k in range(8):
            shaking = Shaking(torch.Generator().manual_seed(k))
            with shaking, oracle.narrow() if k % 2 else contextlib.nullcontext():
                run(self.made, copy.deepcopy(net), x, training, gradient=False)
            seen.append(shaking.seen)
        return any(each != seen[0] for each in seen)

    def agree(
        self,
        stage: str,
        earlier: nn.Module,
        a: Result,
        b: Result,
        x: Tensor,
        kind: str,
        training: bool,
        name: str = "first",
    ) -> bool:
        if a.error is None and b.error is not None:
            self.crash(stage, b.error)
            return False
        failure = self.compared(stage, earlier, a, b, x, kind, training, name)
        if failure is not None and not self.decided_by_rounding(earlier, x, training):
            self.fail(failure.stage, failure.message)
        return failure is None

    def compared(
        self,
        stage: str,
        earlier: nn.Module,
        a: Result,
        b: Result,
        x: Tensor,
        kind: str,
        training: bool,
        name: str = "first",
    ) -> Failure | None:
        """The first difference between two runs that is more than rounding."""
        if a.error is not None:
            return None  # the original does not run so
        if len(a.values) != len(b.values):
            return Failure(f"{stage} value", f"{len(a.values)} outputs, {len(b.values)} converted")
        noise = Noise(self, earlier, a, x, kind, training)
        at = f"{name} inputs ({kind}),"
        for k, (y, z) in enumerate(zip(a.values, b.values, strict=True)):
            if said := self.differ(y, z, kind, "value", noise, k):
                return Failure(f"{stage} value", f"{at} output {k}: {said}")
        # A gradient at NaN is whatever a comparison with NaN leaves: torch's own ops do not agree.
        nan = kind in ("nan", "all nan") or any(y.isnan().any() for y in a.values)
        # Behind a running variance that overflowed it is infinity times 0: NaN or 0 by rounding.
        nan = nan or any(not y.isfinite().all() for y in a.buffers.values())
        at_a_kink = kind in ("grid", "zero") and "the gradient at" in self.said  # and says so
        if noise.scale("gradient") < _SATURATED and not at_a_kink and not nan:
            for key, y in a.gradients.items():
                z = b.gradients.get(key, torch.zeros_like(y))
                if said := self.differ(y, z, kind, "gradient", noise, key):
                    return Failure(f"{stage} gradient", f"{at} gradient of {key}: {said}")
        for key, y in a.buffers.items():
            z = b.buffers.get(key)
            if z is None and not b.buffers:
                continue  # a graph has them under other names
            if z is None or not y.is_floating_point():
                said = "is lost or another" if z is None or not torch.equal(y, z) else ""
            else:
                said = self.differ(y, z, kind, "value", noise, None)
            if said:
                return Failure(f"{stage} buffer", f"{at} buffer {key}: {said}")
        return None

    def differ(self, y: Tensor, z: Tensor, kind: str, what: str, noise: Noise, at: Any) -> str:
        if y.shape != z.shape or y.dtype != z.dtype:
            return f"{y.dtype} {tuple(y.shape)} became {z.dtype} {tuple(z.shape)}"
        given, finite = z, y.isfinite()
        if kind == "nan" and (y.isnan() & ~z.isnan()).any() and not self.masks():
            return "a NaN of the original is a number"
        endless = y.isinf()
        if what == "value" and kind != "huge" and not torch.equal(y[endless], z[endless]):
            return "an infinite value of the original is another"
        y, z = y[finite].double(), z[finite].double()
        if not y.numel():
            return ""
        if not z.isfinite().all():
            return f"{int((~z.isfinite()).sum())} finite values became infinite or NaN"
        scale = max(_largest(y), noise.scale(what), 1.0 if self.oracle and what == "value" else 0.0)
        off = (y - z).abs().max().item()
        floor = _FLOOR[what][self.size] * scale + _NOTHING[what]
        if what == "gradient":  # torch's 1 - tanh**2 is known to eps, and a weight's is times x
            eps = torch.finfo(torch.float64 if self.size == 8 else torch.float32).eps
            times = 1.0 if at == "the input" else max(1.0, _largest(noise.x))
            floor += max(eps, min(eps * times, max(1e-3 * scale, 1e-12)))  # 1e-12: all are flat
        # A kink that rounding moves an input across, and a chain in 16 bits, may change all of it.
        most = math.inf if kind in ("grid", "zero", "tiny") or self.size == 2 else _MOST * scale
        if off <= floor:
            return ""
        # What the original itself does when it rounds otherwise is never too much, however large:
        # a BatchNorm of equal rows is rounding alone, and a relu behind it is on or off.
        own = noise.of(what, at)
        if off <= floor + max(min(_OWN * own, most), _AGAIN * own):
            return ""
        # Told to accept any error, convert accepts that of a bad fit, too.
        fitted = _FITTED[what] * (5 if self.accepts_all else 1)
        if off <= fitted * max(scale, 1.0) and not self.same_gates and self.fitted():
            return ""
        # A block around a formula may be one function to convert, where the oracle has its calls.
        spelled = self.spells() and not self.same_gates
        known = (4 if what == "value" else 100) * self.largest_error() if spelled else 0.0
        if off <= known * max(scale, 1.0):
            return ""
        if at is not None and noise.is_nearer(given, what, at):
            return ""
        worst = (y - z).abs().argmax()
        return (
            f"off by {off:.3g} of {scale:.3g} ({y[worst].item():.6g} became {z[worst].item():.6g})"
        )

    def masks(self) -> bool:
        """Whether attention masks keys. torch adds -inf to their logits, which keeps NaN, so rows
        that do not see a key have its NaN; gates do not read it."""
        chosen = [dict(part.options).get("how") for part in walk(self.network.parts)]
        return bool({"causal", "masked"} & set(chosen))

    def fitted(self) -> bool:
        """Whether a site has an instance of its own making, and not a row of the taxonomy."""
        sites = self.sites()
        return any(not site.exact and site.kind not in tg.sites.APPROXIMATE for site in sites)

    def sites(self) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            tg.conversion.save(self.gated, folder)
            return list(tg.conversion.load(folder).sites.values())

    def spells(self) -> bool:
        """Whether an approximate function is written out in it."""
        which = [dict(p.options).get("which") for p in walk(self.network.parts)]
        return bool({"gelu_by_erf", "gelu_new", "mish"} & set(which))

    def largest_error(self) -> float:
        return max((site.sup for site in self.sites()), default=0.0)

    def bitwise(self, name: str, want: Result, have: Result) -> None:
        if want.error is not None:
            return
        if have.error is not None:
            self.crash(name, have.error)
            return
        for key, y, z in (
            *(
                (f"output {k}", *each)
                for k, each in enumerate(zip(want.values, have.values, strict=True))
            ),
            *(
                (f"the gradient of {k}", y, have.gradients.get(k))
                for k, y in want.gradients.items()
            ),
        ):
            if z is None or not torch.equal(y.isfinite(), z.isfinite()) or _distance(y, z) > 0:
                self.fail(f"{name} differs", f"in {key}")
                return

    def graphs(self, want: nn.Module, gated: nn.Module) -> None:
        """Compiled and exported, where the original can be."""
        ways: dict[str, Callable[[nn.Module], Any]] = {}
        if "compile" in self.heavy:
            whole = bool(self.network.weights % 2)  # one graph for every shape, or as it comes
            ways["aot_eager"] = lambda m: torch.compile(
                m, backend=self.eager, fullgraph=whole, dynamic=whole or None
            )
        if "inductor" in self.heavy:
            ways["inductor"] = torch.compile
        if "export" in self.heavy:
            ways["export"] = self.exported
        for name, way in ways.items():
            first, second = copy.deepcopy(want).eval(), copy.deepcopy(gated).eval()
            made, x = self.made, self.given
            original = copy.deepcopy(first)
            b = run_graph(made, way, second, x)
            # In a checkpointed region Dynamo enters no mode, which is how calls are answered: in
            # one graph it says so, in several they are.
            if "Unsafe side effect" in str(b.error):
                b = run_graph(made, self.in_parts, copy.deepcopy(gated).eval(), x)
            if b.error is not None:
                if _is_torchs(str(b.error), made.source):
                    continue
                plain = (copy.deepcopy(first), self.made.net().eval())
                if all(run_graph(made, way, net, x).error is None for net in plain):
                    self.crash(name, b.error)
                continue
            # torch.export loses the backward of an autograd.Function, of the original as well
            lost = name == "export" and "autograd.Function" in made.source
            a = run_graph(made, way, first, x) if lost else run(made, first, x)
            failure = self.compared(name, original, a, b, x, self.network.inputs, False)
            if failure is None or self.decided_by_rounding(original, x):
                continue
            if self.torchs_own(name, way, original) not in (failure.stage, "crash"):
                self.fail(failure.stage, failure.message)
        torch._dynamo.reset()

    @property
    def eager(self) -> Any:
        """The backend that is `aot_eager`.

        What that computes again for a backward reads buffers as the forward has left them, so that
        gradients are wrong without a word, those of F.silu as well. Where a forward changes its
        buffers, the graph is one that computes nothing again.
        """
        return _keeping if "stateful" in self.parts else "aot_eager"

    def in_parts(self, net: nn.Module) -> Any:
        return torch.compile(net, backend=self.eager)

    def torchs_own(self, name: str, way: Callable[[nn.Module], Any], at: nn.Module) -> str:
        """Where torch's own graph of the original is not the original: "export gradient", "crash"
        where there is none, or "".

        torch.export loses no_grad under autocast; a graph of Inductor's that computes again for its
        backward reads a buffer that the forward has changed since.
        """
        net, x = self.made.net().eval(), self.given
        net.load_state_dict(at.state_dict())
        earlier = copy.deepcopy(net)
        a, b = run(self.made, copy.deepcopy(net), x), run_graph(self.made, way, net, x)
        if b.error is not None:
            return "crash"
        own = self.compared(name, earlier, a, b, x, self.network.inputs, False)
        return own.stage if own is not None else ""

    def exported(self, net: nn.Module) -> Any:
        args, kwargs = _arguments(self.made, self.given)
        return torch.export.export(net, args, kwargs, strict=False).module()

    def fold(self, gated: nn.Module) -> None:
        if self.size == 2 or self.network.inputs in NOT_FINITE:
            return
        try:
            folded = tg.training.fold_batchnorm(copy.deepcopy(gated).eval())
        except ValueError:
            return  # it cannot be traced
        a, b = (run(self.made, n, self.given, gradient=False) for n in (gated, folded))
        folded.eval()
        gated.eval()
        if a.error is None and b.error is not None:
            self.crash("fold", b.error)
        for y, z in zip(a.values, b.values, strict=False):
            # weights with other scales round otherwise, and cancel otherwise
            if _lost(y, z) or _distance(y, z) > 1e-3 * _largest(y):
                self.fail("fold", f"fold_batchnorm changes the output by {_distance(y, z):.3g}")
                return

    def edited(self) -> None:
        """An attribute set after conversion is seen by the gates, or refused."""
        made = self.made
        net = made.net()
        gated = self.convert(net)
        if gated is None:
            return
        try:
            made.edit(gated)
        except Exception as error:
            if not re.search("before|revert|cannot be set", str(error)):
                self.crash("edit", error)
            return
        made.edit(net)
        for backend in ("reference", "auto"):
            with tg.kernels.use(backend):
                a, b = (run(made, n, self.given, gradient=False) for n in (net, gated))
            if a.error is not None or isinstance(b.error, tg.conversion.ConversionError):
                continue
            if b.error is not None:
                self.crash("edit", b.error)
                return
            for y, z in zip(a.values, b.values, strict=True):
                # an edit changes the output by far more, an instance that is fitted anew by less
                if _lost(y, z) or _distance(y, z) > 5e-2 * _largest(y):
                    self.fail("edit", f"an attribute set later is not seen: {_distance(y, z):.3g}")
                    return

    def threads(self) -> None:
        """Several threads at once get what one gets."""
        net = self.made.net()
        gated = self.convert(net)
        if gated is None:
            return
        gated.eval()
        with torch.no_grad(), tg.kernels.use("reference"):
            alone = self.made.call(gated, self.given.clone())
            wrong = []

            def work() -> None:
                with torch.no_grad(), tg.kernels.use("reference"):
                    for _ in range(8):
                        try:
                            y = self.made.call(gated, self.given.clone())
                        except Exception:
                            wrong.append(1)
                            return
                        wrong.extend(
                            1
                            for a, b in zip(tree_leaves(alone), tree_leaves(y), strict=True)
                            if not torch.equal(a.nan_to_num(7), b.nan_to_num(7))
                        )

            every = [threading.Thread(target=work) for _ in range(4)]
            for thread in every:
                thread.start()
            for thread in every:
                thread.join()
        if wrong and "stateful" not in self.parts:
            self.fail("threads", f"{len(wrong)} of 32 outputs differ from those of one thread")


def _is_torchs(error: str, source: str) -> bool:
    """Whether a graph of gates fails where torch's own functions would, compiled in its place."""
    # Where a graph breaks, the reentrant kind of checkpoint runs as it is, and wants `backward` and
    # not `grad`, which is how gradients are asked for here.
    if "use_reentrant=True" in error:
        return True
    over = "inplace=True" in source
    # Gradients of a transposed input that meet one written in place on their way have other strides
    # than aot_eager noted; so it is with torch's own in-place relu6.
    if "view size is not compatible" in error and over:
        return True
    # Dynamo leaves a network with a recurrent layer and compiles what that calls one by one, all but
    # torch.nn itself, so gates and not nn.SiLU.
    left = re.search(r"nn\.(GRU|LSTM|RNN)\(", source) is not None
    # A graph that overwrites its input and keeps it, as torch.compile(F.silu)(x, inplace=True) does.
    if "modified by an inplace operation" in error and over and left:
        return True
    # torch 2.11, not 2.13: numbers that vary, in what is compiled while a call is being answered.
    return "MetaProxy" in error and left


_keeping = aot_autograd(fw_compiler=nop, partition_fn=default_partition)


def _arguments(made: Made, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    caught: list[Any] = []
    made.call(lambda *args, **kwargs: caught.extend([args, kwargs]), x)
    return caught[0], caught[1]


def run_graph(made: Made, way: Callable[[nn.Module], Any], net: nn.Module, x: Tensor) -> Result:
    """A forward and a backward of the network's graph, without its buffers."""
    torch._dynamo.reset()
    torch.default_generator.manual_seed(1)
    try:
        graph = way(net)
        start = x.clone().requires_grad_()
        y = made.call(graph, start * 1)
        values = [t for t in tree_leaves(y) if isinstance(t, Tensor) and t.is_floating_point()]
        gradients = _gradients(net if way is torch.compile else graph, start, values)
    except Exception as error:
        return _failed(error)
    gradients = {k.removeprefix("_orig_mod."): g for k, g in gradients.items()}
    return Result([v.detach().clone() for v in values], gradients, {})


class Noise:
    """How much the original itself is unsure of, found out only where someone asks."""

    def __init__(
        self, trial: Trial, net: nn.Module, result: Result, x: Tensor, kind: str, training: bool
    ) -> None:
        self.trial, self.net, self.result = trial, net, result
        self.x, self.kind, self.training = x, kind, training
        self.found: list[Result] | None = None

    def scale(self, what: str) -> float:
        """The largest gradient of all: what adds up to nothing is known to its size only."""
        if what == "value":
            return 0.0
        return max(map(_largest, self.result.gradients.values()), default=0.0)

    def of(self, what: str, at: Any) -> float:
        """How far the original is from what it gives when it rounds otherwise."""
        if self.found is None:
            self.found = [*self.wide, *self._shaken()]
        here = _picked(self.result, what, at)
        return max((_apart(here, _picked(r, what, at)) for r in self.found), default=0.0)

    def is_nearer(self, z: Tensor, what: str, at: Any) -> bool:
        """Whether float64 is as near to `z` as to the original, which is the one that is off."""
        here = _picked(self.result, what, at)
        truths = [_picked(result, what, at) for result in self.wide]
        there = dict.fromkeys(here, z)
        return any(_apart(there, truth) <= _apart(here, truth) > 0 for truth in truths)

    @functools.cached_property
    def wide(self) -> tuple[Result, ...]:
        """The original in float64, if that is another type than its own."""
        if self.x.dtype == torch.float64:
            return ()
        wide = copy.deepcopy(self.net).double()
        return (run(self.trial.made, wide, self.x.double(), self.training),)

    def _shaken(self) -> Iterator[Result]:
        """The original with its weights, inputs and smooth functions off by a few last places."""
        made, training = self.trial.made, self.training
        generator = torch.Generator().manual_seed(3)
        shaken = functools.partial(_shaken, generator)
        for k in range(12):
            net = copy.deepcopy(self.net)
            with torch.no_grad():
                for p in net.parameters():
                    p.copy_(shaken(p))
            x = self.x if self.kind in ("grid", "zero") else shaken(self.x)
            # what checkpointing computes again is not under a mode, and would not be the same
            again = any("checkpoint" in part for part in self.trial.parts)
            shaking = contextlib.nullcontext() if again else Shaking(generator)
            with shaking, oracle.narrow() if k % 2 else contextlib.nullcontext():
                yield run(made, net, x, training)


def _picked(result: Result, what: str, at: Any) -> dict[Any, Tensor]:
    """One output or gradient of a run by its name, or all of its buffers."""
    if what == "gradient":
        return {k: g for k, g in result.gradients.items() if k == at}
    return result.buffers if at is None else dict(enumerate(result.values[at : at + 1]))


def _apart(some: dict[Any, Tensor], others: dict[Any, Tensor]) -> float:
    """The largest difference of tensors that have the same name and shape."""
    both = [(y, others[k]) for k, y in some.items() if k in others]
    return max((_distance(y, z) for y, z in both if y.shape == z.shape), default=0.0)


def _shaken(generator: torch.Generator, t: Tensor) -> Tensor:
    """`t` with every element off by up to two last places."""
    eps = 2 * torch.finfo(t.dtype).eps
    return t * (1 + eps * (torch.rand(t.shape, generator=generator) * 2 - 1).to(t.dtype))


_STRAIGHT = re.compile("relu|clamp|maximum|minimum|hard|shrink|threshold")


def _tilted(generator: torch.Generator, y: Tensor, x: Tensor) -> Tensor:
    """`y` with its slopes in x off by up to two last places of 1, and its values as they are."""
    eps = 2 * torch.finfo(y.dtype).eps
    size = eps * (torch.rand(x.shape, generator=generator) * 2 - 1).to(y.dtype)
    return y + size * (x - x.detach()).nan_to_num().to(y.dtype)


class Shaking(TorchFunctionMode):
    """Changes what the smooth functions of torch give by a few last places, as rounding may, and
    their slopes by as many of the largest slope, which is about 1.

    A slope may be a sum that cancels: 1 - (1 - tanh**2) of tanhshrink is 0 at a small x, or what the
    terms round to. Straight functions are exact, and two equal arguments of a maximum stay equal.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.seen = generator, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        kind, inplace = tg.sites.FUNCTIONS.get(func, ("relu", False))
        self.seen += [kind] if func in tg.sites.FUNCTIONS else []
        if inplace or (_STRAIGHT.search(kind) and kind != "tanhshrink"):
            return y
        first, *others = y if isinstance(y, tuple) else (y,)
        z = _shaken(self.generator, first)
        if args and isinstance(args[0], Tensor) and args[0].shape == z.shape:
            z = _tilted(self.generator, z, args[0])
        return (z, *others) if others else z


class Snapshot:
    """What a network is, so far as its user can see."""

    def __init__(self, net: nn.Module) -> None:
        self.state = {k: v.clone() for k, v in net.state_dict().items()}
        self.modes = {k: m.training for k, m in net.named_modules()}
        self.types = {k: type(m) for k, m in net.named_modules()}
        self.plain = self._plain(net)

    @staticmethod
    def _plain(net: nn.Module) -> dict[str, str]:
        return {
            f"{name}.{key}": repr(value) if not isinstance(value, Tensor) else repr(value.tolist())
            for name, module in net.named_modules()
            for key, value in vars(module).items()
            if not key.startswith("_") and " at 0x" not in repr(value)
        }

    def changed(self, net: nn.Module) -> Iterator[str]:
        for key, value in net.state_dict().items():
            if not torch.equal(self.state[key].nan_to_num(7), value.nan_to_num(7)):
                yield f"{key} of the original"
        if self.modes != {k: m.training for k, m in net.named_modules()}:
            yield "training modes of the original"
        if self.types != {k: type(m) for k, m in net.named_modules()}:
            yield "types of the original's modules"
        now = self._plain(net)
        for key in self.plain.keys() | now.keys():
            if self.plain.get(key) != now.get(key):
                yield f"attribute {key}: {self.plain.get(key)} -> {now.get(key)}"


def _largest(y: Tensor) -> float:
    y = y[y.isfinite()]
    return y.abs().max().item() if y.numel() else 0.0


def _lost(y: Tensor, z: Tensor) -> bool:
    """Whether a finite value became none."""
    return bool((y.isfinite() & ~z.isfinite()).any())


def _distance(y: Tensor, z: Tensor) -> float:
    """The largest difference where both are finite."""
    y, z = y.double(), z.double()
    d = (y - z)[y.isfinite() & z.isfinite()].abs()
    return d.max().item() if d.numel() else 0.0


ALL = frozenset({"pickle", "save", "compile", "export", "fold"})
FAST = frozenset({"fold", "pickle", "save"})


def check(network: Network, heavy: frozenset[str] = ALL, wanted: str = "") -> Trial:
    """All checks of one network, or those up to the failure that is wanted."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        random.seed(0)
        trial = Trial(network, heavy, wanted)
        with contextlib.suppress(FoundError), trial.kernel():
            trial.run()
    return trial
