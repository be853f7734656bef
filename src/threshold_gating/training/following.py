"""How a promoted layer gets what the activation before it was given, in every run.

The activation stays where it is and computes what it did, for whoever else reads it. It also marks
its result with its input. The mark goes along with whatever only moves elements, and with a product
by another tensor; a promoted layer reads the input from the mark. What has no mark, or was
overwritten since, is refused: a run on another path than the one that was promoted is either right
or an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from threshold_gating.conversion import aten_ops, recomputing, sites
from threshold_gating.conversion.moves import COPIES, VIEWS, spelled
from threshold_gating.primitive import graphs

AUDITED_AS = "passing"  # see conversion.audit


class PromotionError(RuntimeError):
    """A promoted layer is given what does not come from the activation that it took in."""


class Mark(NamedTuple):
    """What a result of an activation was made of: act(pre), times `factor` if there is one.

    `act` says which activation, `moved` whether elements are elsewhere than they were. `versions`
    count the writes to `pre`, `factor` and the result; `whole` is empty once the result was written
    to where nobody counts.
    """

    act: str
    pre: Tensor
    factor: Tensor | None
    moved: bool
    versions: tuple[int, ...]
    whole: list[bool]


def _all_functions() -> dict[Any, str]:
    """What functions of torch do to a tensor that is followed.

    They move or select its elements and nothing else ("move", or "copy" into new memory), so that
    they commute with an activation; they multiply it; they drop elements. See `written` for those
    that overwrite it.
    """
    return {
        **dict.fromkeys(VIEWS | spelled("contiguous detach"), "move"),
        **dict.fromkeys(COPIES | spelled("clone"), "copy"),
        **dict.fromkeys(spelled("mul multiply __mul__ __rmul__"), "product"),
        **dict.fromkeys((F.dropout, torch.dropout), "dropout"),
    }


_DOES = _all_functions()
_AUGMENTED = {f for n, f in vars(operator).items() if n[0] == "i" and hasattr(operator, n[1:])}
_REGIONS = {tag_activation_checkpoint, checkpoint}


@graphs.constant
def does(func: Any) -> str:
    """What a function of torch does to its first argument: see `_all_functions`; "" is anything."""
    return _DOES.get(func, "")


@graphs.constant
def _place(func: Any) -> int | None:
    """Where a function is told what it overwrites: -1 if it always overwrites its first argument,
    else the position of its argument `inplace`, None if it has none."""
    name = str(getattr(func, "__name__", "")).partition(".")[0]  # an op has its overload there
    augmented = name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")
    plain = name.endswith("_") and not name.endswith("__")
    if plain or augmented or func in _AUGMENTED or name == "__setitem__":
        return -1
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return names.index("inplace") if "inplace" in names else None


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call of torch overwrites: in place, by `inplace`, or by `out`."""
    place, out = _place(func), kwargs.get("out")
    found = _tensors(out)
    asked = place is not None and (
        place < 0 or (args[place] if place < len(args) else kwargs.get("inplace"))
    )
    if asked:
        found += _tensors((*args, *kwargs.values())[0])
    return found


def _tensors(given: Any) -> list[Tensor]:
    several = given if isinstance(given, list | tuple) else [given]
    return [t for t in several if isinstance(t, Tensor)]


def _clear(overwritten: list[Tensor]) -> None:
    """Nothing is known any more of what these tensors, and all views of them, were made of."""
    for y in overwritten:
        mark = mark_of(y)
        if mark is not None:
            mark.whole.clear()


def _drops(p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[bool, bool]:
    """Whether a call of dropout with these arguments drops anything, and whether in place."""
    return training and p > 0, inplace


def mark_of(x: Any) -> Mark | None:
    """The mark of a result of an activation, if it has one."""
    return getattr(x, "tg_mark", None) if isinstance(x, Tensor) else None


def put_mark(y: Any, act: str, pre: Tensor) -> None:
    """Mark `y`, which an activation made of `pre`."""
    y.tg_mark = Mark(act, pre, None, False, _versions(pre, None, y), [True])


def _go_on(y: Any, mark: Mark, pre: Tensor, factor: Tensor | None, **changes: Any) -> None:
    versions = _versions(pre, factor, y)
    y.tg_mark = mark._replace(pre=pre, factor=factor, versions=versions, **changes)


def _versions(*given: Tensor | None) -> tuple[int, ...]:
    """How often tensors were written to; graphs do not tell, and have copies instead."""
    if torch.compiler.is_compiling():
        return ()
    return tuple(0 if t is None or t.is_inference() else t._version for t in given)


def kept(x: Tensor, overwritten: bool) -> Tensor:
    """What an activation is given, to be read later.

    A copy where it is overwritten, or where nobody would know of it. Without gradients where the
    activation has none.
    """
    if overwritten or torch.compiler.is_compiling() or x.is_inference():
        return x.clone()
    return x if torch.is_grad_enabled() or not x.requires_grad else x.detach()


class Remember:
    """The forward hook of an activation that marks its result; before it if it is in place."""

    def __init__(self, act: str) -> None:
        self.act = act

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        x = (*args, *kwargs.values())[0]
        pre = getattr(x, "tg_before", None)
        if pre is None:
            pre = kept(x, False)
        else:
            x.tg_before = None
        put_mark(y, self.act, pre)


def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
    """The hook before an activation that overwrites its input."""
    x = (*args, *kwargs.values())[0]
    x.tg_before = kept(x, True)


def forget(model: nn.Module, args: Any, output: Any) -> None:
    """The forward hook of a network: what leaves it is not followed any more."""
    if not torch.compiler.is_compiling():  # a graph deletes no attribute
        for y in aten_ops.tensors(output):
            vars(y).pop("tg_mark", None)
            vars(y).pop("tg_before", None)


class Take:
    """The hook before a promoted layer: what it reads is what its activation was given."""

    def __init__(self, name: str, act: str, *, moved: bool) -> None:
        self.name, self.act, self.moved = name, act, moved

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if not self._is_last(layer):
            raise PromotionError(
                f"{self.name} was promoted together with {self.act}, and a forward pre-hook was "
                "registered on it later: it would be given the input of the activation, not its "
                "result. Register it with prepend=True, or before the network is promoted."
            )
        z: Tensor = (*args, *kwargs.values())[0]
        mark = mark_of(z)
        if mark is None or mark.act != self.act or (mark.moved and not self.moved):
            raise PromotionError(
                f"{self.name} was promoted together with {self.act}, and is given what does not "
                "come from there in this run. Promote the network with inputs that take this path, "
                "or use the network as it was. A reentrant checkpoint hides where its inputs come "
                "from: call checkpoint(..., use_reentrant=False), or have the activation in it."
            )
        if not is_current(mark, z):
            raise PromotionError(
                f"{self.name} was promoted together with {self.act}, whose input or result is "
                "overwritten in this run before the layer reads it. Use the network as it was."
            )
        return ((mark.pre,) if mark.factor is None else (mark.pre, mark.factor)), {}

    def _is_last(self, layer: nn.Module) -> bool:
        """Whether nobody's hook runs after this one, but ours and those of torch, which shard or
        prune parameters and leave the input."""
        after = False
        for hook in layer._forward_pre_hooks.values():
            if after and not str(hook.__module__).startswith(("threshold_gating.", "torch.")):
                return False
            after = after or hook is self
        return True


class Following(TorchFunctionMode):
    """Marks the results of these calls of torch, and lets marks go along with what they mark.

    `calls` has for each kind and its parameters what the activation is called.
    """

    def __init__(self, calls: Mapping[tuple[str, tuple[Any, ...]], str]) -> None:
        super().__init__()
        self.calls = calls
        self.region = recomputing.region() if torch.is_grad_enabled() else self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.calls and func in sites.FUNCTIONS:
            kind = sites.read(func, args, kwargs)
            if kind in sites.KINDS:
                return self._activation(kind, func, args, kwargs)
        elif func in _REGIONS and torch.compiler.is_compiling():
            return func(self._inside(args[0]), *args[1:], **kwargs)
        _clear(written(func, args, kwargs))
        what = does(func)
        if what == "product" and len(args) == 2 and not kwargs:
            return self._product(func, args)
        mark = mark_of(args[0]) if what and args else None
        if mark is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if what in ("move", "copy"):
            return self._moved(func, mark, args, kwargs)
        if what == "dropout":
            return self._dropped(func, mark, args, kwargs)
        return func(*args, **kwargs)

    def _activation(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        x, parameters, asked = sites.KINDS[kind].read(*args, **kwargs)
        act = self.calls.get((kind, parameters))
        overwritten = written(func, args, kwargs)
        _clear(overwritten)
        if act is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        self._follow()
        pre = kept(x, asked or bool(overwritten))
        y = func(*args, **kwargs)
        put_mark(y, act, pre)
        return y

    def _moved(self, func: Any, mark: Mark, args: Any, kwargs: Any) -> Any:
        self._follow()
        y = func(*args, **kwargs)
        if y is args[0] or not is_current(mark, args[0]):
            return y
        pre = func(mark.pre, *args[1:], **kwargs)
        factor = None if mark.factor is None else func(mark.factor, *args[1:], **kwargs)
        if isinstance(y, Tensor):
            whole = [True] if does(func) == "copy" else mark.whole
            _go_on(y, mark, pre, factor, moved=True, whole=whole)
        else:
            for k, part in enumerate(y):
                _go_on(part, mark, pre[k], None if factor is None else factor[k], moved=True)
        return y

    def _product(self, func: Any, args: Any) -> Any:
        """act(pre) * b, in any order."""
        y = func(*args)
        for a, b in (args, args[::-1]):
            mark = mark_of(a)
            if mark is not None and is_product(a, b, y):
                if is_current(mark, a):
                    self._follow()
                    factor = b.expand_as(a) if mark.factor is None else mark.factor * b
                    _go_on(y, mark, mark.pre, kept(factor, False), whole=[True])
                break
        return y

    def _dropped(self, func: Any, mark: Mark, args: Any, kwargs: Any) -> Any:
        """Dropout is a product with what it leaves of ones."""
        drops, inplace = _drops(*args[1:], **kwargs)
        if not drops:
            y = func(*args, **kwargs)
            if y is not args[0]:
                _go_on(y, mark, mark.pre, mark.factor)
            return y
        if inplace:
            return func(*args, **kwargs)
        left = func(torch.ones_like(args[0]), *args[1:], **kwargs)
        return self._product(torch.mul, (args[0], left))

    def _inside(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpointed region of a compiled graph, which is traced without this mode."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            with Following(self.calls):
                return run(*args, **kwargs)

        return inside

    def _follow(self) -> None:
        """Be there again when a checkpointed region of this run is run again."""
        where = None if self.region is self else recomputing.region()
        if where is not None and where is not self.region:
            recomputing.again(where, lambda: Following(self.calls))
            self.region = where


def is_product(a: Tensor, b: Any, y: Tensor) -> bool:
    """Whether y = a * b has one factor for each element of a."""
    return isinstance(b, Tensor) and a.shape == y.shape and a.dtype == y.dtype


def is_current(mark: Mark, y: Tensor) -> bool:
    """Whether a mark still tells what `y` was made of: nobody has written to any of them."""
    return bool(mark.whole) and mark.versions == _versions(mark.pre, mark.factor, y)


class Follow:
    """Runs a forward in which marks are made or go along."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, tuple[Any, ...]], str] = {}
        self.always = False  # whether what is marked is moved on its way to a layer

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        uncounted = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        if not (self.always or self.calls or uncounted):
            return forward(*args, **kwargs)
        with Following(self.calls):
            return forward(*args, **kwargs)
