"""Short answers to the calls of torch that a converted module makes.

For a small tensor Python takes longer than torch. So what depends only on the plan, the function
and its other arguments is decided once and kept (`rows_of`); a call only looks it up.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from threshold_gating import kernels
from threshold_gating.conversion import sites
from threshold_gating.conversion.site import Site
from threshold_gating.kernels.backend import eager_backend

Plan = Mapping[str, Site | None]
Answer = Callable[[Any, Any], Any]  # of the arguments, by position and by name
# Calls that are read alike whatever their arguments are, and write over nothing: see `sites.read`.
_WHOLE = frozenset(("softmax", "softmin", "glu", "prelu", "scaled_dot_product_attention"))
# `Answering._at_once` is not used while exporting, so that `takes_native` need not be asked.
_NATIVE = ("auto", "native")
_SIMPLE = (bool, int, float, str, type(None))
_MOST = 4096


class Row(NamedTuple):
    """All calls with one spelling: their kind, the answer of the first, second, ... call, and
    whether they write over their input.

    An answer of None sends that call through `answering.answer`.
    """

    kind: str
    answers: list[Answer | None]
    over: bool = False


Rows = dict[Any, Row]
# For each owner the plan as it was, and what is known of its calls.
_ROWS: WeakKeyDictionary[nn.Module, tuple[Plan, Rows]] = WeakKeyDictionary()


def rows_of(plan: Plan, owner: nn.Module | None) -> Rows:
    """What is known of the calls of an owner, nothing once its plan has changed; asked in each run.

    A plan is a dict: a site of it may have been exchanged in place.
    """
    found = None if owner is None else _ROWS.get(owner)
    if found is not None and _is_same(found[0], plan):
        return found[1]
    # a site with an op of its own may hold the owner; a cached row would then keep it alive
    foreign = any(site and site.op and site.t is None for site in plan.values())
    rows: Rows = {}
    if owner is not None and not foreign:
        _ROWS[owner] = dict(plan), rows
    return rows


def _is_same(before: Plan, plan: Plan) -> bool:
    # sites that are equal may still have other ops
    same = len(before) == len(plan) and all(map(operator.is_, before.values(), plan.values()))
    return same and [*before] == [*plan]


def new_row(
    rows: Rows, plan: Plan, func: Any, rest: tuple[Any, ...], named: dict[str, Any], apart: Any
) -> Row | None:
    """Make and keep the row for a function with these arguments after the input.

    None: such calls go through `answering.answer`. `apart` tells whether calls of a kind have
    unlike answers.
    """
    kind, over = sites.FUNCTIONS[func]
    if kind in _WHOLE and not over:
        return _kept(rows, func, Row(kind, _answers(plan, kind, apart(kind), _whole, (), func)))
    spelled = _spelled(func, rest, named)
    if spelled is None:
        return None
    kind, parameters, over = spelled
    made = _overwriting if over else _elementwise
    answers = _answers(plan, kind, apart(kind), made, parameters, func)
    key = (func, rest, *named.items()) if named else (func, rest)
    return _kept(rows, key, Row(kind, answers, over))


def _kept(rows: Rows, key: Any, row: Row) -> Row:
    if len(rows) >= _MOST:  # a network whose parameters are new in every call
        rows.clear()
    rows[key] = row
    return row


def _answers(
    plan: Plan, kind: str, apart: bool, made: Any, parameters: Any, func: Any
) -> list[Answer | None]:
    """What answers the calls of a kind in their order, where they are what was converted."""
    answers: list[Answer | None] = []
    while (name := f"{kind}#{len(answers)}") in plan:
        site = plan[name]
        asked = site is None or site.learns or (site.line and apart)
        fits = site is not None and not asked and site.parameters == parameters
        answers.append(made(site, func) if fits else None)
    return answers


def _elementwise(site: Site, func: Any) -> Answer | None:
    """The frozen instance of a site by the backend in force."""
    t, op = site.t, site.op
    if t is None:
        return None
    if op is None:
        return lambda args, named: kernels.evaluate(t, args[0])
    run, parameters = kernels.opened(op)

    def answer(args: Any, named: Any) -> Any:
        if eager_backend() in _NATIVE:
            return run(args[0], *parameters)
        return kernels.evaluate(t, args[0])

    return answer


def _overwriting(site: Site, func: Any) -> Answer | None:
    """The same written over its input; by torch it is the call itself, in one pass over memory."""
    t = site.t
    if t is None:
        return None
    own = site.op is not None and _is_of_call(site)
    gates = functools.partial(kernels.evaluate, t, op=site.op)

    def answer(args: Any, named: Any) -> Any:
        if own and eager_backend() in _NATIVE:
            return func(*args, **named)
        return kernels.overwritten(args[0], gates)

    return answer


def _is_of_call(site: Site) -> bool:
    """Whether the instance of a site is that of torch's call, and no other that was asked for."""
    with suppress(ValueError, ArithmeticError):  # no gate is such a call
        return site.t == sites.KINDS[site.kind].make(*site.parameters)
    return False


def _whole(site: Site, func: Any) -> Answer | None:
    """A call that is no element-wise function, by torch itself or by gates."""
    if site.t is not None or site.op is not None:
        return None
    gated = sites.WHOLE[site.kind]

    def answer(args: Any, named: Any) -> Any:
        own = eager_backend() in _NATIVE
        # its other tensors may be of a class that would answer it
        with torch._C.DisableTorchFunction():
            return func(*args, **named) if own else gated(*args, **named)

    return answer


Spelled = tuple[str, tuple[Any, ...], bool]


@functools.lru_cache(_MOST)
def _read(func: Any, rest: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Spelled | None:
    kind, over = sites.FUNCTIONS[func]
    given = dict(named)
    if kind not in sites.KINDS or "out" in given or "input" in given:
        return None
    with suppress(TypeError, ValueError):  # torch says what is wrong
        _, parameters, asked = sites.KINDS[kind].read(torch.empty(0), *rest, **given)
        drawn = kind == "rrelu" and parameters[-1]  # in training, see `sites.read`
        return None if drawn else (kind, parameters, over or asked)
    return None


def _spelled(func: Any, rest: tuple[Any, ...], named: dict[str, Any]) -> Spelled | None:
    """The kind and the parameters of a call with these arguments behind its input, and whether it
    writes over that; None for one that is not element-wise or writes elsewhere, and for arguments
    that are not all plain."""
    given = (*rest, *named.values())
    if not all(type(w) in _SIMPLE and w == w for w in given):
        return None
    return _read(func, rest, tuple(named.items()))
