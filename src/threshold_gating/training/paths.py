"""Which activation feeds which layer, and through what: found by running the network."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from threshold_gating import taxonomy
from threshold_gating.conversion import aten_ops, sites
from threshold_gating.conversion.audit import gate_of
from threshold_gating.conversion.gate import PerCall
from threshold_gating.conversion.plan import module_sites, run
from threshold_gating.conversion.watch import Run, Told, Visit, Watch, evaluating, fresh
from threshold_gating.instance import TG
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.dense import TIERED
from threshold_gating.training.following import does, is_product

_READ = "read"  # the kind, to `Watch`, of a call that reads a followed tensor
_RECURRENT = (nn.RNNBase, nn.RNNCellBase, rnn._Gated)


@dataclass(frozen=True)
class Source:
    """An activation: its instance, how far that is from it, and where it is evaluated.

    That is a module, or a call of torch with these parameters by the module `owner`.
    """

    name: str
    t: TG
    sup: float
    module: nn.Module | None = None
    owner: nn.Module | None = None
    call: tuple[str, tuple[Any, ...]] = ("", ())

    @property
    def learned(self) -> Activation | None:
        """The module, if it has parameters of its own."""
        own = isinstance(self.module, Activation) and self.module.learned
        return self.module if own else None  # type: ignore[return-value]

    @property
    def act(self) -> str:
        """The same for activations that are the same function, whatever happens to them."""
        if self.learned is not None:
            return f"the learned gates {self.name}"
        return taxonomy.name_of(self.t) or repr(self.t)


@dataclass(frozen=True)
class Trail:
    """How a tensor came from an activation.

    `runs` are the calls of modules in which the activation was evaluated, `held` what it was made
    of, with the number of writes to each, and `version` the writes to the tensor itself.
    """

    source: Source
    runs: tuple[Run, ...]
    held: tuple[tuple[Tensor, int], ...]
    version: int
    is_moved: bool = False
    is_followed: bool = False  # by more than being the same tensor
    factor: float | None = None  # the largest number that it was multiplied by
    is_overwritten: bool = False


@dataclass(frozen=True)
class Fed:
    """One call of a layer: where its input came from, if from an activation, and its sizes.

    `around` is the innermost module that runs the activation and the layer.
    """

    trail: Trail | None
    around: nn.Module | None
    sizes: tuple[int, ...]


@dataclass
class Paths:
    """What a run has shown: calls of layers by name, activations by name and who reads them."""

    calls: dict[str, list[Fed]] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    readers: dict[str, dict[str, None]] = field(default_factory=dict)
    fed: dict[str, dict[str, None]] = field(default_factory=dict)  # layers that read activations
    kept: dict[str, str] = field(default_factory=dict)  # what cannot be promoted, and why
    read: set[str] = field(default_factory=set)  # layers whose parameters others read

    def is_ambiguous(self, source: Source) -> bool:
        """Whether the module that makes a call makes the same call with another instance."""
        if source.owner is None:
            return False
        plan = vars(source.owner).get("tg_sites") or {}
        known = [(s.kind, s.parameters, s.t) for s in plan.values() if s is not None]
        here = [s for s in self.sources.values() if s.owner is source.owner]
        known += [(*s.call, s.t) for s in here]
        return len({t for kind, given, t in known if (kind, given) == source.call}) > 1


def find_paths(model: nn.Module, inputs: Any) -> Paths:
    """Run `model` once, in evaluation, and say which activation feeds which layer."""
    finder = _Finder(model)
    with evaluating(model), finder.watch:
        run(model, fresh(inputs))
    for name in finder.layers.values():
        finder.paths.calls.setdefault(name, [])
    return finder.paths


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a plain layer of torch that a tiered one can replace, or its twin."""
    return type(module) in TIERED or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is GPT-2's `Conv1D`: a linear layer with its weight the other way round."""
    return (type(module).__module__, type(module).__name__) == (
        "transformers.pytorch_utils",
        "Conv1D",
    )


class _Finder:
    def __init__(self, model: nn.Module) -> None:
        self.paths = Paths()
        self.plain = module_sites(model)
        self.layers = {m: name for name, m in model.named_modules() if is_layer(m)}
        self.owners = {id(p): name for m, name in self.layers.items() for p in m.parameters()}
        self.watch = Watch(model, self._see, self._whole, read=self._read, answered=True)

    def _whole(self, run: Run) -> str | None:
        if run.module in self.layers:
            return "layer"
        if isinstance(run.module, _RECURRENT):
            return "recurrent"
        is_act = isinstance(run.module, Activation | PerCall) or run.module in self.plain
        return "activation" if is_act else None

    def _read(self, func: Any, args: Any, kwargs: Any) -> str | None:
        kind = sites.read(func, args, kwargs)
        given = [] if kind else aten_ops.tensors((args, kwargs))
        if kind or any(_trail(t) is not None or id(t) in self.owners for t in given):
            return kind or _READ
        return None

    def _see(self, visit: Visit) -> Told | None:
        if not visit.is_call and visit.kind == "layer":
            self._layer(visit)
            return None
        source = self._source(visit)
        if visit.kind == _READ:
            return functools.partial(self._after, visit)
        self._readers(visit, visit.name)
        if source is not None and visit.kwargs.get("out") is not None:
            self.paths.kept[source.name] = "it writes to a tensor that it is given (out=)"
            return None
        if source is None:
            return None
        self.paths.sources[source.name] = source
        x, version = visit.x, visit.x._version
        return lambda y: self._made(source, x, version, y)

    def _source(self, visit: Visit) -> Source | None:
        """The activation that a site is, or None; what is none says why in `kept`."""
        module, name = visit.run.module, visit.name
        if visit.is_call and visit.kind in sites.WHOLE:
            self.paths.kept[name] = "it is not an element-wise function"
        elif visit.is_call and visit.kind in sites.KINDS:
            call = (visit.kind, visit.call.parameters)
            if visit.gate is not None and visit.gate.learns:
                self.paths.kept[name] = (
                    "it learns gates of its own, which no layer can take over; promote the "
                    "network before it is converted with train="
                )
                return None
            if visit.gate is not None:
                return Source(name, visit.gate.t, 0.0, None, module, call)
            try:
                known = sites.of_call(*call)
            except ValueError as error:
                self.paths.kept[name] = str(error).partition("; ")[0]
                return None
            return Source(name, known.t, known.sup, None, module, call)
        elif visit.kind == "recurrent":
            self.paths.kept[name] = (
                "its activations are inside of its step, with no layer behind them; "
                "tg.LSTM and tg.GRU learn their gates"
            )
        elif visit.kind == "activation":
            if isinstance(module, PerCall):
                self.paths.kept[name] = (
                    "its module has an instance for each of its calls; promote a network that has "
                    "one for all of them"
                )
                return None
            gate = gate_of(module, visit.run.index)
            if isinstance(gate, Activation):
                return Source(name, gate.init, 0.0, gate)
            made = self.plain.get(module, [])
            if made and (site := made[0]) is not None and site.t is not None:
                return Source(name, site.t, site.sup, module)
            self.paths.kept[name] = "no gate computes it"
        return None

    def _made(self, source: Source, x: Tensor, version: int, y: Any) -> None:
        in_place = x._version != version or y is x
        held = () if in_place else ((x, version),)
        _put(y, Trail(source, tuple(self.watch.running.stack), held, y._version))

    def _after(self, visit: Visit, y: Any) -> None:
        """What a call made of followed tensors, or of a layer's parameters."""
        made = list(aten_ops.tensors(y))
        if not made:
            return  # a size or a type
        for t in aten_ops.tensors((visit.args, visit.kwargs)):
            if id(t) in self.owners:
                self.paths.read.add(self.owners[id(t)])
        func, args = visit.f, visit.args
        what = "" if visit.kwargs.get("out") is not None else does(func)
        if what == "product" and len(args) != 2:
            what = ""  # by name, which is not followed
        if what == "product":
            args = next((p for p in (args, args[::-1]) if _is_gated(p[0], p[1], y)), args)
        trail = _checked(args[0]) if args else None
        if trail is not None and what in ("move", "copy"):
            for each in made:
                if each is not args[0]:
                    _put(each, _further(trail, each, is_moved=True))
        elif trail is not None and what == "dropout":
            _put(y, _further(trail, y))
        elif trail is not None and what == "product" and _is_gated(args[0], args[1], y):
            factor = float(args[1].abs().max()) * (trail.factor or 1.0)
            held = (*trail.held, (args[1], args[1]._version))
            _put(y, _further(trail, y, held=held, factor=factor))
        else:
            self._readers(visit, getattr(func, "__name__", str(func)).strip("_"))

    def _readers(self, visit: Visit, reader: str) -> None:
        for t in aten_ops.tensors((visit.args, visit.kwargs)):
            if (trail := _trail(t)) is not None:
                self.paths.readers.setdefault(trail.source.name, {})[reader] = None

    def _layer(self, visit: Visit) -> None:
        name = self.layers[visit.run.module]
        x = (*visit.args, *visit.kwargs.values())[0]
        trail, around = _checked(x), None
        if trail is not None:
            pairs = zip(trail.runs, self.watch.running.stack, strict=False)
            around = [a.module for a, b in pairs if a is b][-1]
            self.paths.fed.setdefault(trail.source.name, {})[name] = None
        self.paths.calls.setdefault(name, []).append(Fed(trail, around, tuple(x.shape)))


def _trail(x: Any) -> Trail | None:
    return getattr(x, "tg_trail", None)


def _is_gated(a: Any, b: Any, y: Tensor) -> bool:
    return _trail(a) is not None and is_product(a, b, y)


def _put(y: Tensor, trail: Trail) -> None:
    y.tg_trail = trail  # type: ignore[attr-defined]


def _checked(y: Any) -> Trail | None:
    """The trail of a tensor, with whether anything that it was made of was overwritten since."""
    trail = _trail(y)
    if trail is None:
        return None
    written = any(t._version != n for t, n in (*trail.held, (y, trail.version)))
    return replace(trail, is_overwritten=trail.is_overwritten or written)


def _further(trail: Trail, y: Tensor, **changes: Any) -> Trail:
    return replace(trail, version=y._version, is_followed=True, **changes)


def shared_parameters(model: nn.Module) -> Iterator[str]:
    """The names of layers whose parameters another module holds, too."""
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                holders.setdefault(id(p), set()).add(module)
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if is_layer(module) and any(len(holders[id(p)]) > 1 for p in own):
            yield name
