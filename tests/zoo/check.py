"""Convert one network and judge the conversion; break its sites one by one and see it."""

import copy
import math
import random
import time
from contextlib import contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import threshold_gating as tg
from threshold_gating import kernels
from threshold_gating.conversion import answering, sites
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.site_error import difference, floats
from threshold_gating.conversion.watch import evaluating, fresh
from threshold_gating.nn.activation import Activation

BOUND = 3e-6  # of max|d|/max|y|, native off
# The same in float64, for a network whose own rounding in float32 is larger than the bound.
WIDE_BOUND = 1e-12
SEEN = 100 * BOUND  # what a broken site moves at least
SHIFT = 0.1


def check(model, inputs, limit=8, seed=0):
    """What the conversion of `model` does, as JSON values; `failed` is empty if all is well.

    At most `limit` sites are broken (None: all of them, 0: none); `unseen` lists those among them
    that move the output by less than 100 times the bound.
    """
    start = time.perf_counter()
    args, kwargs = arguments(inputs)
    gated = tg.convert(model, inputs=inputs, strict=False)
    audit = tg.audit(gated, *args, **kwargs)
    certificate = tg.verify(model, gated, *args, **kwargs)
    reference = expected(model, gated, inputs)
    with kernels.use("reference"):
        error = distance(reference, run(gated, inputs))
    failed = [f"left: {op.op} in {op.module or 'the network'} ({op.calls})" for op in audit.left]
    failed += [f"verify: {said}" for said in certificate.failed.values()]
    own = wide = None
    if not error <= BOUND:
        own, wide = in_float64(model, inputs)
        if not (error <= 4 * own and wide <= WIDE_BOUND):
            failed.append(
                f"output: off by {error:.2g}, in float64 by {wide:.2g}; "
                f"the original's own rounding is {own:.2g}"
            )
    names = [site.name for site in audit.sites if site.calls]
    broken = random.Random(seed).sample(
        names, min(len(names), len(names) if limit is None else limit)
    )
    unseen = unseen_sites(gated, inputs, broken)
    return {
        "sites": len(names),
        "never": [site.name for site in audit.sites if not site.calls],
        "kinds": sorted({site.kind for site in audit.sites if site.calls}),
        "approximate": sum(site.exact is False for site in audit.sites if site.calls),
        "error": error,
        "own": own,
        "wide": wide,
        "broken": len(broken),
        "unseen": unseen,
        "failed": failed,
        "seconds": round(time.perf_counter() - start, 2),
    }


def run(model, inputs):
    """The floating-point tensors of the output."""
    args, kwargs = arguments(fresh(inputs))
    with torch.random.fork_rng(devices=[]), evaluating(model):
        torch.manual_seed(0)
        return floats(model(*args, **kwargs))


def distance(want, have):
    """max|d|/max|y|, the worst of the tensors; infinite where one has another shape.

    That can be: a network that decides how long its output is.
    """
    if any(y.shape != z.shape for y, z in zip(want, have, strict=True)):
        return math.inf
    pairs = [(y, z) for y, z in zip(want, have, strict=True) if y.numel()]
    assert pairs, "no floating-point output"
    return max(
        (difference(y, z).max() / (y.double().nan_to_num(0, 0, 0).abs().max() or 1)).item()
        for y, z in pairs
    )


def in_float64(model, inputs):
    """How far the original is from itself in float64, and the converted from it there.

    Both as `distance`; infinite and NaN where the network does not run in float64.
    """

    def double(leaf):
        return leaf.double() if _is_float(leaf) else leaf

    y, wide = run(model, inputs), copy.deepcopy(model).double()
    inputs = tree_map(double, inputs)
    with _Wide(), kernels.use("reference"):
        try:
            want = run(wide, inputs)
        except (RuntimeError, TypeError):
            return math.inf, math.nan
        gated = tg.convert(wide, inputs=inputs, strict=False).double()
        return distance(want, y), distance(expected(wide, gated, inputs), run(gated, inputs))


class _Wide(TorchFunctionMode):
    """Torch, where a tensor that a network makes as `torch.float` is of float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        wide = {"dtype": torch.float64} if kwargs.get("dtype") is torch.float32 else {}
        return func(*args, **kwargs | wide)


def expected(model, gated, inputs):
    """The output of `model`, where the function of each approximate site is its instance.

    That is evaluated in float64, so that the gates' own rounding is not excused.
    """
    patches = []
    for name, module in gated.named_modules():
        site = module.__dict__.get("site") if isinstance(module, Activation) else None
        if site is not None and not site.exact:
            patches.append((model.get_submodule(name), _in_float64(site.t)))
    for module, f in patches:
        module.__dict__["forward"] = f
    try:
        with _Fitted():
            return run(model, inputs)
    finally:
        for module, _ in patches:
            del module.__dict__["forward"]


def _in_float64(t):
    return lambda x, *rest, **more: t(x.double()).to(x.dtype)


class _Fitted(TorchFunctionMode):
    """Torch, where an approximate function is the instance that is fitted to it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = sites.read(func, args, kwargs)
        if kind not in sites.KINDS:
            return func(*args, **kwargs)
        call = sites.KINDS[kind].read(*args, **kwargs)
        known = sites.of_call(kind, call.parameters)
        if known.exact:
            return func(*args, **kwargs)
        y = _in_float64(known.t)(call.x)
        return call.x.copy_(y) if call.inplace or sites.FUNCTIONS[func][1] else y


def unseen_sites(gated, inputs, names):
    """The sites among `names` that can be broken, in either way, without the output moving."""
    if not names:
        return []
    y = run(gated, inputs)

    def is_seen(name, damage):
        with broken(gated, name, damage):
            try:
                return distance(y, run(gated, inputs)) > SEEN
            except (RuntimeError, IndexError):  # a negative duration, say: it shows all the more
                return True

    return [n for n in names if not is_seen(n, shifted) and not is_seen(n, dropped)]


def shifted(y, args):
    """0.1 more everywhere: as gates add up to one, that is c shifted by 0.1."""
    return tree_map(lambda t: t + SHIFT if _is_float(t) else t, y)


def dropped(y, args):
    """The input as it came, where it fits, else zeros."""
    x = args[0] if args else None
    if _is_float(x) and _is_float(y) and x.shape == y.shape:
        return x.to(y.dtype)
    return tree_map(lambda t: torch.zeros_like(t) if _is_float(t) else t, y)


def _is_float(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


@contextmanager
def broken(gated, name, damage):
    """Let the site `name` give what `damage` makes of its output and its arguments."""
    where, _, call = name.rpartition("#")
    if ":" in name:  # a call of torch, answered by its owner

        def answer(site, func, args, kwargs, owner=None):
            kept = fresh(args[:1])
            y = original(site, func, args, kwargs, owner)
            if site.name != name:
                return y
            bad = damage(y, kept)
            return y.copy_(bad) if isinstance(y, torch.Tensor) else bad  # it may be in place

        original = answering.answer
        # plain calls come a shorter way, which is left out meanwhile
        never = {"return_value": answering._NEVER}
        shorter = mock.patch.object(answering.Answering, "_at_once", **never)
        with mock.patch.object(answering, "answer", answer), shorter:
            yield
        return
    index, count, kept = int(call) if where else 0, 0, ()

    def before(module, args):
        nonlocal kept
        kept = fresh(args)  # it may be in place

    def hook(module, args, y):
        nonlocal count
        count += 1
        return damage(y, kept) if count - 1 == index else y

    module = gated.get_submodule(where or name)
    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(hook)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
