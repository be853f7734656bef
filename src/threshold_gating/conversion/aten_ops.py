"""ATen ops that count as nonlinearities: one closed list, and ops that are followed to be judged.

`NONLINEAR` ops are nonlinearities wherever they run, `OTHER` ones are listed beside them, and all
the rest (products, sums, copies, views) are linear in their input or bilinear. Some ops are a
nonlinearity only by what becomes of their result, which is followed from op to op:

    exp(x)     if it reaches a denominator through a sum, 1 / (1 + exp(-x)), exp(x) / exp(x).sum(),
               or a logarithm, log(1 + exp(x)); as a factor (decay of a state) it is other
               also exp(log_softmax(x)) and exp(x - logsumexp(x)), which are softmax
    abs(x)     if it reaches a denominator through a sum with something else, x / (1 + abs(x)), or
               is added to x itself, (x + abs(x)) / 2
    x > 0      if the mask multiplies or selects data, x * (x > 0) or where(x > 0, x, 0); not if it
               fills in -inf or the dtype's least number, which takes a score out of a choice
    max(x, c)  if c is a constant; of two quantities it is other
    clamp(x)   unless x is a norm, where it guards a division

What else bends the data, and no gate stands for (`BENDING`: a sine, a square, a maximum over
channels), is other, and said so. A power or magnitude that is summed up is a norm.

Only what depends on the inputs of the network counts. What is computed from parameters, buffers and
constants alone is a constant; everything else, random numbers too, depends on the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# By the name of the op without the mark of its in-place form.
NONLINEAR: dict[str, frozenset[str]] = {
    group: frozenset(names.split())
    for group, names in {
        "element-wise": "relu relu6 leaky_relu prelu _prelu_kernel rrelu rrelu_with_noise elu selu "
        "celu silu gelu mish sigmoid tanh hardsigmoid hardswish hardtanh hardshrink softshrink "
        "softplus log_sigmoid log_sigmoid_forward threshold erf erfc logaddexp logaddexp2",
        "bounds": "clamp clamp_min clamp_max clip",
        "two inputs": "glu",
        "softmax": "softmax _softmax _safe_softmax _masked_softmax",
        "attention": "scaled_dot_product_attention _scaled_dot_product_attention_math "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable "
        "_scaled_dot_product_attention_math_for_mps _flash_attention_forward "
        "_efficient_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd "
        "_triton_scaled_dot_attention _triton_multi_head_attention",
        "recurrent": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
        "mkldnn_rnn_layer _cudnn_rnn miopen_rnn _lstm_mps _thnn_fused_lstm_cell "
        "_thnn_fused_gru_cell",
    }.items()
}
OTHER: dict[str, frozenset[str]] = {
    group: frozenset(names.split())
    for group, names in {
        "normalisation": "native_batch_norm _native_batch_norm_legit batch_norm cudnn_batch_norm "
        "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update "
        "miopen_batch_norm native_layer_norm native_group_norm _fused_rms_norm rms_norm "
        "linalg_vector_norm norm var var_mean std std_mean mean",
        "powers": "pow square sqrt rsqrt reciprocal float_power",
        "pooling": "max_pool1d max_pool2d max_pool2d_with_indices max_pool3d_with_indices "
        "mkldnn_max_pool2d mkldnn_max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d mkldnn_adaptive_avg_pool2d adaptive_max_pool2d "
        "adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d",
        "maxima": "amax amin max min aminmax cummax cummin maximum minimum fmax fmin",
        "waves": "sin cos tan asin acos atan atan2 sinh cosh sinc asinh acosh atanh angle",
        "choice": "topk sort argmax argmin argsort kthvalue median mode searchsorted bucketize "
        "multinomial bernoulli",
        "logarithms": "log log2 log10 log1p logit logsumexp logcumsumexp _log_softmax xlogy",
        "steps": "round floor ceil trunc frac fmod remainder prod cumprod floor_divide",
        "special": "lgamma digamma erfinv special_i0 special_i0e special_i1 special_i1e "
        "special_bessel_j0 special_bessel_j1 special_ndtri special_log_ndtr special_erfcx hypot",
        "exponentials": "exp exp2 expm1",
        "magnitudes": "abs",
        "comparisons": "gt ge lt le sign sgn heaviside",
    }.items()
}
# Groups of other ops that are as little linear as an activation.
BENDING = frozenset(
    ("powers", "maxima", "waves", "logarithms", "steps", "special", "exponentials", "magnitudes")
)
_EXTREME = {"maximum", "minimum", "fmax", "fmin"}
_REDUCING = {"sum", "mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm"}
_FOLLOWED = {
    **dict.fromkeys(OTHER["exponentials"], "exp"),
    **dict.fromkeys(OTHER["comparisons"], "mask"),
    **dict.fromkeys(("pow", "square", "float_power"), "power"),
    **dict.fromkeys(("_log_softmax", "logsumexp"), "total"),  # the logarithm of a sum of exp
    "abs": "abs",
    "linalg_vector_norm": "norm",
    "norm": "norm",
}
_SELECTING = {"mul", "where", "masked_fill", "masked_scatter", "index_put", "addcmul"}
_LOGARITHM = {"log", "log2", "log10", "log1p"}

# What a followed result passes through, and whether it is still alone, part of a sum of unlike
# terms, or summed over an axis.
_ALONE, _ADDED, _SUMMED = range(3)
_CARRYING = {
    **dict.fromkeys(("neg", "mul", "div", "_to_copy", "clone", "copy", "cat", "stack"), _ALONE),
    **dict.fromkeys(("where", "masked_fill", "logical_not", "logical_and", "logical_or"), _ALONE),
    **dict.fromkeys(("bitwise_not", "bitwise_and", "bitwise_or", "_unsafe_view"), _ALONE),
    **dict.fromkeys(("add", "sub", "rsub"), _ADDED),
    **dict.fromkeys(("sum", "mean", "cumsum"), _SUMMED),
}
_SCALING = {"neg", "mul", "div", "_to_copy", "clone"}  # by a constant: the same data, scaled
_NONLINEAR = frozenset().union(*NONLINEAR.values())
_GROUPS = {name: group for group, names in OTHER.items() for name in names}


@dataclass(eq=False)
class Found:
    """An op that counts: `left` if it is a nonlinearity, which a followed one may become later.

    `group` is where it stands in `OTHER`, `source` the data that it was made of.
    """

    op: str
    left: bool
    follow: str = ""
    group: str = ""
    source: int = 0


def name(func: Any) -> str:
    """The name of an ATen op; "relu" for relu_, another library's with its namespace."""
    space, _, plain = func._schema.name.partition("::")
    plain = plain.removesuffix("_") if func._schema.is_mutable else plain
    return plain if space in ("aten", "prims") else f"{space}::{plain}"


def is_nonlinear(func: Any) -> bool:
    """Whether an op is a nonlinearity wherever it runs."""
    return name(func) in _NONLINEAR


def tensors(tree: Any, around: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses, which may hold themselves."""
    if isinstance(tree, Tensor):
        yield tree
    elif id(tree) not in around:
        for value in _held(tree):
            yield from tensors(value, around | {id(tree)})


def _held(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Mapping):
        return tree.values()
    if isinstance(tree, list | tuple | set):
        return tree
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name, None) for field in fields(tree)]
    return ()


class Trail:
    """What is constant, and where followed results went; kept by storage, which views share."""

    def __init__(self, constants: Iterable[Tensor]) -> None:
        self._constant = {_key(t) for t in constants}
        self.left_torch = False  # data became numbers: a literal may be made of them
        self._carried: dict[int, dict[Found, int]] = {}
        self._reduced: set[int] = set()
        self._sources: dict[int, int] = {}
        self._count = 0

    def is_live(self, given: Any) -> bool:
        """Whether any tensor among the arguments of an op depends on the network's inputs."""
        return any(_key(t) not in self._constant for t in _leaves(given))

    def follow(self, func: Any, given: Any, out: Any, inside: bool = False) -> Found | None:
        """Read one op that ran; `inside` for one of the library's own, which is never listed."""
        args: list[Any] = list(given[0])
        used = list(_leaves(given))
        live = [t for t in used if _key(t) not in self._constant]
        found, carried = None, {}
        if live and not inside:
            op = name(func)
            excludes = self._excludes(op, args)
            self._settle(op, args, used, excludes)
            found = self._find(op, live, out)
            carried = self._pass_on(op, used)
            if found is not None and found.follow:
                carried = {**carried, found: _ALONE}
            if excludes:
                carried = {f: how for f, how in carried.items() if f.follow != "mask"}
        self._store(func, used, out, live, carried)
        return found

    def _find(self, op: str, live: list[Tensor], out: Any) -> Found | None:
        # Of whole numbers alone only what makes others of them: a sigmoid, not a clamp.
        if not any(t.is_floating_point() or t.is_complex() for t in (*live, *_leaves(out))):
            return None
        guards = any(f.follow == "norm" for t in live for f in self._at(t))
        if op in _NONLINEAR:
            return Found(op, not (guards and op in NONLINEAR["bounds"]))
        if op in _EXTREME:
            return Found(op, len(live) == 1 and not guards, group="maxima")
        if op not in _GROUPS and "::" not in op:
            return None
        found = Found(op, False, _FOLLOWED.get(op, ""), _GROUPS.get(op, ""), self._source(live[0]))
        carried = {f: how for t in live for f, how in self._at(t).items()}
        if found.follow == "exp":  # of a logarithm of a softmax
            found.left = any(f.follow == "total" for f in carried)
        elif op in _LOGARITHM and any(
            f.follow == "exp" and how == _SUMMED for f, how in carried.items()
        ):
            found.follow = "total"
        elif found.group == "powers" and any(_key(t) in self._reduced for t in live):
            found.group = "normalisation"
        return found

    def _excludes(self, op: str, args: list[Any]) -> bool:
        """Whether a mask puts -inf, or the least number of the dtype, in the place of data."""
        filled = args[2:] if op == "masked_fill" else args[1:] if op == "where" else ()
        data = [t for t in args if isinstance(t, Tensor) and t.is_floating_point()]
        if not filled or not data:
            return False
        least = min(torch.finfo(t.dtype).min for t in data)
        numbers = (v for v in filled if not isinstance(v, Tensor) or self._is_number(v))
        return any(float(v) <= least for v in numbers)

    def _is_number(self, t: Tensor) -> bool:
        return t.numel() == 1 and _key(t) in self._constant

    def _settle(self, op: str, args: list[Any], used: list[Tensor], excludes: bool) -> None:
        """Judge what is followed and arrives here."""
        for found, how in self._at(_denominator(op, args)).items():
            if how == _ADDED or (how == _SUMMED and found.follow == "exp"):
                found.left = found.left or found.follow in ("exp", "abs")
        if op in _LOGARITHM:
            for found, how in self._at(used[0]).items():
                if how == (_ALONE if op == "log1p" else _ADDED):
                    found.left = found.left or found.follow == "exp"
        if op in _REDUCING:
            for found in self._at(used[0]):
                if found.follow in ("power", "abs"):
                    found.group = "normalisation"
        if op in ("add", "sub", "rsub"):
            for t in used:
                beside = {self._source(u) for u in used if u is not t}
                for found, how in self._at(t).items():
                    if found.follow == "abs" and how == _ALONE and found.source in beside:
                        found.left = True
        if op in _SELECTING and not excludes:
            for t in used:
                others = (u for u in used if u is not t and u.is_floating_point())
                if any(_key(u) not in self._constant for u in others):
                    for found in self._at(t):
                        found.left = found.left or found.follow == "mask"

    def _pass_on(self, op: str, used: list[Tensor]) -> dict[Found, int]:
        if op not in _CARRYING:
            return {}
        step = _CARRYING[op]
        return {f: max(how, step) for t in used for f, how in self._at(t).items()}

    def _source(self, t: Tensor) -> int:
        """A number for the data that a tensor is, up to a constant factor."""
        key = _key(t)
        if key not in self._sources:
            self._count += 1
            self._sources[key] = self._count
        return self._sources[key]

    def _store(
        self, func: Any, used: list[Tensor], out: Any, live: list[Tensor], carried: dict[Found, int]
    ) -> None:
        random = torch.Tag.nondeterministic_seeded in func.tags
        op = name(func)
        made = op.endswith("_like") or op.startswith("new_")  # of the shape only
        lifted = op.startswith("lift")  # a literal in the code: torch.tensor(0.5)
        made = made or lifted
        constant = not random and ((made and not (lifted and self.left_torch)) or not live)
        keys = {_key(t) for t in used}
        source = self._source(live[0]) if op in _SCALING and len(live) == 1 else 0
        passes = op in _REDUCING or (
            op in _CARRYING and any(_key(t) in self._reduced for t in used)
        )
        for key in map(_key, _leaves(out)):
            (self._constant.add if constant else self._constant.discard)(key)
            if key not in keys or func._schema.is_mutable:
                self._carried[key] = carried
                (self._reduced.add if passes else self._reduced.discard)(key)
                self._sources.pop(key, None)
                if source:
                    self._sources[key] = source

    def _at(self, t: Any) -> dict[Found, int]:
        return self._carried.get(_key(t), {}) if isinstance(t, Tensor) else {}


def _leaves(tree: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(tree) if isinstance(t, Tensor))


def _key(t: Tensor) -> int:
    """The storage of a tensor: what is written through one view is read through another."""
    try:
        return int(t.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque layouts have none
        return id(t)


def _denominator(op: str, args: list[Any]) -> Any:
    if op == "div":
        return args[1]
    inverted = op == "reciprocal" or (op == "pow" and isinstance(args[1], int | float))
    return args[0] if inverted and (op == "reciprocal" or args[1] < 0) else None
