"""`audit`: what a network really executes, read from every ATen op, below all interception.

An op that the library's own code called evaluates a site; a nonlinear one is native if it stands
for the whole site and is not a step of the gates' own arithmetic. Any other nonlinearity is `left`.
Who called is read off the Python stack: the first frame that is not torch's decides, which holds
for autograd functions and for fused ops alike. `ops` says what counts. What cannot be read so is
named as not looked at: data that leave torch, other threads, ops of other libraries.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import fill
from types import FrameType
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from threshold_gating import taxonomy
from threshold_gating.conversion import aten_ops
from threshold_gating.conversion.answering import LEAVE, Answering, answer
from threshold_gating.conversion.site import Site
from threshold_gating.conversion.text import WIDTH, columns, some
from threshold_gating.conversion.watch import Run, Running, check_weights, evaluating, fresh
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation

_PACKAGE = __name__.partition(".")[0]
# What the ops are that the code of a module or package calls; it says so itself, as AUDITED_AS.
Role = Literal["gates", "native", "machinery", "network", "passing"]


@dataclass(frozen=True)
class AuditedSite:
    """A converted place: K where it is one instance, None for softmax, attention and recurrence.

    `native` if it ran torch's own op under the backend in force; `calls` is 0 for a module that
    was converted and is never called. `exact` is None where the audit cannot know; what `learns` is
    no longer what it started from once it was trained.
    """

    name: str
    kind: str
    K: int | None
    exact: bool | None
    native: bool
    calls: int
    learns: bool = False


@dataclass(frozen=True)
class Op:
    """An op of torch, the innermost module in whose forward it ran, and how often.

    `asked` if it is a site that was left alone on request; `group` says what kind of other op it
    is, one of `aten_ops.OTHER`.
    """

    module: str
    op: str
    calls: int
    asked: bool = False
    group: str = ""


@dataclass(frozen=True)
class Audit:
    """What ran: the converted sites, the nonlinearities `left` to torch, and what else there is.

    `unseen` names what was not looked at: "numpy in layer1", "torch in other threads".
    """

    sites: tuple[AuditedSite, ...]
    left: tuple[Op, ...]
    other: tuple[Op, ...]
    unseen: tuple[str, ...] = ()

    @property
    def bending(self) -> tuple[Op, ...]:
        """The other ops that are not linear, either, and for which no gate stands."""
        return tuple(op for op in self.other if op.group in aten_ops.BENDING)

    def __str__(self) -> str:
        lines = [*columns([HEADER, *map(cells, self.sites)]), ""] if self.sites else []
        if self.left:
            rows = [(op.module or "(the network)", op.op, str(op.calls)) for op in self.left]
            lines += [*columns([("left in", "op", "calls"), *rows]), ""]
        if self.other:
            lines += [fill(f"other: {', '.join(_counted(self.other))}", WIDTH), ""]
        if self.unseen:
            lines += [fill(f"not looked at: {', '.join(self.unseen)}", WIDTH), ""]
        return "\n".join([*lines, fill(self.counts, WIDTH)])

    def __repr__(self) -> str:
        return f"<Audit: {self.counts}>"

    @property
    def counts(self) -> str:
        """What ran in numbers, in which 0 left cannot be read as linear."""
        said = f"{len(self.sites)} sites, {len(self.left)} left, {len(self.other)} other"
        if bent := _counted(self.bending):
            said += f", of which {len(self.bending)} not linear ({some(bent)})"
        return said + (f", {len(self.unseen)} not looked at" if self.unseen else "")

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        found = {k: [asdict(o) for o in getattr(self, k)] for k in ("sites", "left", "other")}
        return {**found, "unseen": list(self.unseen)}


def beside(seen: Audit) -> str:
    """What bends the data beside the gates, and what was not looked at, in a sentence or none."""
    bent = f"not linear beside the gates: {', '.join(_counted(seen.bending))}"
    missed = f"not looked at: {', '.join(seen.unseen)}"
    return "; ".join([bent] * bool(seen.bending) + [missed] * bool(seen.unseen))


def _counted(found: Sequence[Op]) -> list[str]:
    """Ops with the number of their calls, each once."""
    counts: Counter[str] = Counter()
    for op in found:
        counts[op.op] += op.calls
    return [f"{name} {n}" for name, n in counts.items()]


def audit(model: nn.Module, *args: Any, **kwargs: Any) -> Audit:
    """Run `model` once, as it runs in evaluation and without gradients, and say what executed.

    The inputs and the model's mode stay as they were. Nothing is listed that depends on
    parameters and constants alone.

    >>> print(audit(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), Tensor([[0.0, 1.0]])))
    left in  op    calls
    -------  ----  -----
    1        relu  1
    <BLANKLINE>
    0 sites, 1 left, 0 other
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit: model must be a torch.nn.Module; got {type(model).__name__}.")
    return execute(model, args, kwargs)[1]


def execute(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Audit]:
    """The output of `model`, and the audit of making it."""
    check_weights(model)
    reader = _Reader(getattr(model, "_orig_mod", model))
    args, kwargs = fresh((args, kwargs))
    with evaluating(model), reader.running, reader.looking(), reader:
        output = model(*args, **kwargs)
    return output, reader.audit()


def is_gate(module: nn.Module) -> bool:
    """Whether a module is one of the library's own."""
    return _role(type(module).__module__) not in (None, "network")


@functools.cache
def _role(name: str) -> Role | None:
    """What the ops are that the module of this name calls; None if it is not of the library.

    "gates" are the arithmetic of a gate, "native" ops compute a site by torch's own function
    (whatever says nothing), "machinery" is what stands between a network and its gates, what is
    "passing" looks at calls and makes them, and a "network" is one like anybody's. A module that
    says nothing is what its package is.
    """
    if name.partition(".")[0] != _PACKAGE:
        return None
    while name:
        if (role := getattr(sys.modules.get(name), "AUDITED_AS", None)) is not None:
            return cast(Role, role)
        name = name.rpartition(".")[0]
    return "native"


class _Caller(NamedTuple):
    """Who called an op: the first frame that is not torch's. For one of the library's own also the
    outermost of its frames, and the frame of `answer` if that is behind them."""

    first: FrameType | None
    outermost: FrameType | None
    answer: FrameType | None

    @property
    def is_own(self) -> bool:
        return self.outermost is not None or self.answer is not None


def _module_of(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _runs(frame: FrameType | None, function: Any) -> bool:
    return frame is not None and frame.f_code is function.__code__


def _is_passing(frame: FrameType | None) -> bool:
    """Torch's code, and that of a mode which looks at every call of an owner."""
    is_torch = _module_of(frame).partition(".")[0] == "torch"
    # torch's own, too, in the copy that `sites` has of it, which no module is named in
    copied = _runs(frame, F.multi_head_attention_forward)
    through = _role(_module_of(frame)) == "passing" or _runs(frame, Answering.__torch_function__)
    return is_torch or copied or through


def _before(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _is_passing(frame):
        frame = frame.f_back
    return frame


def _caller(frame: FrameType | None) -> _Caller:
    first = frame = _before(frame)
    outermost = None
    while frame is not None and _role(_module_of(frame)) in ("gates", "native"):
        outermost, frame = frame, _before(frame.f_back)
    return _Caller(first, outermost, frame if _runs(frame, answer) else None)


def _is_left_alone(frame: FrameType | None) -> bool:
    """Whether an owner lets pass what it was asked to."""
    while frame is not None and _is_passing(frame):
        if _runs(frame, Answering.__torch_function__) and frame.f_locals.get("site", 0) is None:
            return True
        frame = frame.f_back
    return False


class _Reader(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads the ops of one run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = Running(model, before=self._enter)
        self.trail = aten_ops.Trail(_constants(model))
        self.known = _declared(model)
        self.calls: Counter[str] = Counter()
        self.native: set[str] = set()
        self.found: list[tuple[str, bool, aten_ops.Found]] = []
        self.unseen: dict[str, None] = {}  # in order, each once
        self._last: tuple[FrameType | None, str] = (None, "")

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Notes calls that no dispatch shows: data that become numpy's or Python's, other threads.

        By Python's profiler, because a mode for functions would keep torch from its fused paths.
        """
        before, of_threads = sys.getprofile(), threading.getprofile()
        if not (before is None or callable(before)):  # cProfile's, which cannot be put back
            self.unseen["numpy, Python's numbers and other threads, because a profiler is on"] = (
                None
            )
            yield
            return
        own = getattr(threading, "setprofile_all_threads", threading.setprofile)  # from 3.12 on
        own(self._elsewhere)
        sys.setprofile(self._leaving)
        try:
            yield
        finally:
            own(of_threads)
            sys.setprofile(before)

    def _leaving(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in ("numpy", "tolist"):
            x = called.__self__
            if isinstance(x, Tensor) and x.is_floating_point() and self.trail.is_live(x):
                self._lost("numpy" if called.__name__ == "numpy" else "Python's numbers")

    def _lost(self, what: str) -> None:
        """Something is made of the data that is not followed."""
        self.trail.left_torch = True
        self.unseen[f"{what} in {self.running.where or 'the network itself'}"] = None

    def _elsewhere(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            of_torch = str(getattr(called, "__module__", "") or "").startswith("torch")
            home = str(getattr(owner, "__module__", None) or getattr(owner, "__name__", ""))
            if isinstance(owner, Tensor) or of_torch or home.startswith("torch"):
                self.unseen["torch in other threads"] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1:  # autograd runs, inside of the forward
            self.trail.follow(func, (args, kwargs), out, inside=True)
            self._lost("derivatives")
            return out
        frame = sys._getframe(1)
        caller = _caller(frame)
        live = self.trail.is_live((args, kwargs))
        found = self.trail.follow(func, (args, kwargs), out, caller.is_own)
        asks = live and aten_ops.name(func) == "_local_scalar_dense" and args[0].is_floating_point()
        if asks and not caller.is_own:
            self._lost("Python's numbers")
        if caller.is_own:
            site = self._site(caller, live)
            # of parameters alone (a learned sharpness is clamped) it is no evaluation of the site
            if live and aten_ops.is_nonlinear(func) and _role(_module_of(caller.first)) != "gates":
                self.native.add(site)
        elif found is not None:
            self.found.append((self.running.where, self._asked(frame), found))
        return out

    def _gate(self) -> Run | None:
        """The call of one of the library's modules that is running, the outermost."""
        return next((run for run in self.running.stack if is_gate(run.module)), None)

    def _enter(self, run: Run, args: Any, kwargs: Any) -> None:
        if run is self._gate() and is_gate(gate := gate_of(run.module, run.index)):
            self.calls[run.site] += 1
            self.known[run.site] = described(gate)

    def _site(self, caller: _Caller, live: bool) -> str:
        """The name of the site that is being evaluated, counted when it is new."""
        if gate := self._gate():
            return gate.site
        frame = caller.answer or caller.outermost
        if frame is None or frame is self._last[0]:
            return self._last[1]
        site = caller.answer and caller.answer.f_locals["site"]
        name = site.name if site else ""
        if name not in self.known:  # answered as it came, or a function of the library itself
            if not (site or live):
                return ""  # an instance is being looked up, on numbers of its own
            kind = site.kind if site else frame.f_code.co_name
            name = self.running.name_call(kind)
            self.known[name] = _of_site(site) if site else Description(kind, None, None)
        self.calls[name] += 1
        self._last = frame, name
        return name

    def _asked(self, frame: FrameType) -> bool:
        """Whether what runs is left alone on request: a call by its plan, or all of a module."""
        plans = (run.module.__dict__.get("tg_sites") or () for run in self.running.stack)
        return any(LEAVE in plan for plan in plans) or _is_left_alone(frame)

    def audit(self) -> Audit:
        self._last = (None, "")  # a frame keeps its tensors
        names = [*self.calls, *(name for name in self.known if name not in self.calls)]
        sites = [
            AuditedSite(name, d.kind, d.K, d.exact, name in self.native, self.calls[name], d.learns)
            for name in names
            for d in [self.known[name]]
        ]
        counts = Counter(
            (found.left, where, found.op, asked, found.group) for where, asked, found in self.found
        )
        left = [Op(w, op, n, asked) for (left, w, op, asked, _), n in counts.items() if left]
        other = [Op(w, op, n, group=g) for (left, w, op, _, g), n in counts.items() if not left]
        return Audit(tuple(sites), tuple(left), tuple(other), tuple(self._unseen(other)))

    def _unseen(self, other: Sequence[Op]) -> Iterator[str]:
        yield from self.unseen
        for op in other:
            if "::" in op.op:  # another library's, whatever it does
                yield f"{op.op} in {op.module or 'the network itself'}"


class Description(NamedTuple):
    kind: str
    K: int | None
    exact: bool | None
    learns: bool = False


def _constants(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and tensors that modules merely hold."""
    for module in model.modules():
        yield from aten_ops.tensors([module._parameters, module._buffers, vars(module)])


def _declared(model: nn.Module) -> dict[str, Description]:
    """Every site that the network holds, also one that no run reaches."""
    found = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if is_gate(module) and not name.startswith(inside):
            if is_gate(gate := gate_of(module, 0)):
                found[name] = described(gate)
            inside = (*inside, f"{name}.")
        for site in (module.__dict__.get("tg_sites") or {}).values():
            if site is not None:
                found[site.name] = _of_site(site)
    return found


def _of_site(site: Site) -> Description:
    learns = site.learns is not None
    exact = site.exact and not learns
    return Description(site.kind, None if site.t is None else site.t.K, exact, learns)


def described(act: nn.Module) -> Description:
    if isinstance(act, rnn._Gated):
        learns = isinstance(act, rnn._Learnable) and bool(act.learning.train)
        return Description(type(act).__name__.lower(), None, act.exact, learns)
    if not isinstance(act, Activation):
        return Description(type(act).__name__.lower(), None, None)
    site, row = act.__dict__.get("site"), taxonomy.ROWS.get(act.name or "")
    exact = site.exact if site is not None else row is not None and row.exact
    kind = site.kind if site is not None else act.name or "activation"
    return Description(kind, act.init.K, exact and not act.learned, bool(act.learned))


def gate_of(module: nn.Module, call: int) -> nn.Module:
    """The module that is evaluated at one call of a site: it may hold one for each."""
    calls = getattr(module, "calls", None) if "stands" in vars(module) else None
    return calls[call % len(calls)] if calls else module


HEADER = ("site", "kind", "K", "class", "ran", "calls")


def cells(site: AuditedSite) -> tuple[str, ...]:
    """A row of the table as text."""
    what = {True: "exact", False: "approximate", None: ""}[site.exact]
    what = "learned" if site.learns else what
    ran = "native" if site.native else "gates" if site.calls else "never called"
    K = "" if site.K is None else str(site.K)
    return site.name, site.kind, K, what, ran, str(site.calls)
