"""Formulas in x, such as "x*sigmoid(1.3*x)", parsed into functions of a tensor.

The text is never run as Python. It is parsed into a syntax tree, every node of which must be one of
a closed list: numbers, x, pi, e, + - * / **, < <= > >=, brackets and calls of `FUNCTIONS`. Length,
nesting and exponents are bounded, so nothing that is read hangs or fills the memory.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from functools import reduce
from textwrap import fill
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating.taxonomy import ROWS

Function = Callable[[Tensor], Tensor]

LONGEST = 1000  # characters
DEEPEST = 50  # brackets, calls, signs and powers within each other; a long sum is not deep
LARGEST_POWER = 100
EXAMPLE = "x*sigmoid(1.3*x)"


class Known(NamedTuple):
    """A function that may be called: how it is computed, and its arguments as the user sees them.

    The last argument may be repeated if it ends in "...".
    """

    compute: Callable[..., Tensor]
    arguments: tuple[str, ...] = ("x",)

    def takes(self, count: int) -> bool:
        """Whether it can be called with this many arguments."""
        least = len(self.arguments)
        return count >= least - 1 > 0 if self.arguments[-1] == "..." else count == least


# fmt: off
FUNCTIONS: dict[str, Known] = {
    **{name: Known(getattr(torch, name)) for name in (
        "abs", "asinh", "atan", "cos", "cosh", "erf", "erfc", "exp", "expm1", "log", "log1p",
        "sigmoid", "sign", "sin", "sinh", "sqrt", "tanh",
    )},
    **{name: Known(getattr(F, name)) for name in (
        "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
        "logsigmoid", "mish", "relu", "relu6", "selu", "silu", "softshrink", "softsign",
        "tanhshrink",
    )},
    **{name: Known(ROWS[name].f) for name in ("gelu_tanh", "softplus")},
    "min": Known(lambda *given: reduce(torch.minimum, given), ("a", "b", "...")),
    "max": Known(lambda *given: reduce(torch.maximum, given), ("a", "b", "...")),
    "clamp": Known(torch.clamp, ("x", "low", "high")),
    "where": Known(torch.where, ("condition", "a", "b")),  # see `_where`
}
# fmt: on
CONSTANTS = {"pi": math.pi, "e": math.e}

_ARITHMETIC: dict[type[ast.operator], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: torch.pow,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Lt: torch.lt,
    ast.LtE: torch.le,
    ast.Gt: torch.gt,
    ast.GtE: torch.ge,
}
_CHARACTERS = re.compile(r"[A-Za-z0-9_.+\-*/(),<>= ]")
_INSTEAD = {
    **{"^": "write ** for a power", "²": "write **2", "³": "write **3", "√": "write sqrt(...)"},
    **{"×": "write *", "·": "write *", "÷": "write /", "−": "write -", "π": "write pi"},
    **{"≤": "write <=", "≥": "write >=", "|": "write abs(...)", "'": "leave out the quotes"},
    **dict.fromkeys("[]{}", "use round brackets"),
    '"': "leave out the quotes",
}
_OPERATORS = "an expression has + - * / ** and < <= > >= only"
_WORDS = {
    ast.Attribute: "names have no dots; call a function by its name alone, as in sigmoid(x)",
    ast.IfExp: "write where(condition, a, b) instead of if and else",
    ast.BoolOp: "write min(a, b) instead of a and b, max(a, b) instead of a or b",
    ast.Tuple: "one value is needed here, not several between commas",
    ast.Starred: "arguments are written one by one",
}


def parse(text: str) -> Function:
    """The function that an expression in x describes; `__name__` is the text.

    `where(condition, a, b)` computes each side only for the x it is for, so log(x) above 0 makes no
    NaN below it. A comparison is 1 where it holds and 0 elsewhere.

    Raises:
        ValueError: it cannot be read; the message shows where, and names the nearest that can.

    >>> parse("where(x > 0, x, x/8)")(torch.tensor([-2.0, 3.0]))
    tensor([-0.2500,  3.0000])
    """
    text = " ".join(text.split())
    value = _Reader(text).read()

    def function(x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        return value(x).to(x.dtype).expand_as(x)

    function.__name__ = function.__qualname__ = text
    function.__doc__ = f"The expression {text}."
    return function


class _Reader:
    """Turns the syntax tree of one text into nested functions, or says what is wrong with it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self) -> Function:
        text = self.text
        if not text:
            raise ValueError(f"an expression in x is needed, such as {EXAMPLE}; this one is empty.")
        if len(text) > LONGEST:
            raise ValueError(
                f"an expression of at most {LONGEST} characters is read; this one has {len(text)}."
            )
        for at, character in enumerate(text):
            if not _CHARACTERS.match(character):
                instead = _INSTEAD.get(character, f"write an expression such as {EXAMPLE}")
                self._refuse(f"{character!r} has no place in an expression; {instead}", at)
        return self.value(self._tree(), 0)

    def _tree(self) -> ast.expr:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # "1if": a number grown into a word
                return ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            at = min(max((error.offset or 1) - 1, 0), len(self.text) - 1)
            self._refuse(
                f"this cannot be read ({error.msg}); write * for every product, and close every "
                "bracket",
                at,
            )
        except (RecursionError, MemoryError):
            self._too_deep(0)

    def value(self, node: ast.expr, depth: int) -> Function:
        """The function of x that `node` stands for."""
        if depth > DEEPEST:
            self._too_deep(node.col_offset)
        if isinstance(node, ast.Constant):
            return self._number(node)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.UnaryOp):
            return self._signed(node, depth)
        if isinstance(node, ast.BinOp):
            return self._chain(node, depth)
        if isinstance(node, ast.Compare):
            return self._comparison(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        self._refuse(_WORDS.get(type(node), f"write an expression such as {EXAMPLE}"), node)

    def _number(self, node: ast.Constant) -> Function:
        if type(node.value) not in (int, float):  # True, 1j, ...
            self._refuse(f"{node.value!r} is not a real number", node)
        try:
            number = float(node.value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        if math.isinf(number):
            self._refuse("this number is too large; the largest is 1.8e308", node)
        return _constant(number)

    def _name(self, node: ast.Name) -> Function:
        if node.id == "x":
            return lambda x: x
        if node.id in CONSTANTS:
            return _constant(CONSTANTS[node.id])
        if node.id in FUNCTIONS:
            self._refuse(f"{node.id} is a function; write {_usage(node.id)}", node)
        self._unknown("name", node, ["x", *CONSTANTS, *FUNCTIONS])

    def _signed(self, node: ast.UnaryOp, depth: int) -> Function:
        inner = self.value(node.operand, depth + 1)
        if isinstance(node.op, ast.USub):
            return lambda x: -inner(x)
        if isinstance(node.op, ast.UAdd):
            return inner
        self._refuse(_OPERATORS, node)

    def _chain(self, node: ast.BinOp, depth: int) -> Function:
        """a + b - c ... in a loop: a sum of many terms is a tree as deep as it is long."""
        steps: list[tuple[Callable[[Tensor, Tensor], Tensor], Function]] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp):
            if type(left.op) not in _ARITHMETIC:
                self._refuse(_OPERATORS, left)
            right = self.value(left.right, depth + 1)
            if isinstance(left.op, ast.Pow):
                self._check_power(left.right, right)
            steps.append((_ARITHMETIC[type(left.op)], right))
            left = left.left
        first = self.value(left, depth + 1)

        def chain(x: Tensor) -> Tensor:
            value = first(x)
            for operation, other in reversed(steps):
                value = operation(value, other(x))
            return value

        return chain

    def _check_power(self, node: ast.expr, exponent: Function) -> None:
        if any(isinstance(part, ast.Name) and part.id == "x" for part in ast.walk(node)):
            return
        power = float(exponent(torch.zeros((), dtype=torch.float64)))
        if not abs(power) <= LARGEST_POWER:
            self._refuse(f"the exponent is {power:g}; it may be {LARGEST_POWER} at most", node)

    def _comparison(self, node: ast.Compare, depth: int) -> Function:
        if any(type(op) not in _COMPARISONS for op in node.ops):
            self._refuse(_OPERATORS, node)
        sides = [self.value(side, depth + 1) for side in (node.left, *node.comparators)]
        tests = [_COMPARISONS[type(op)] for op in node.ops]

        def comparison(x: Tensor) -> Tensor:
            values = [side(x) for side in sides]
            held = [test(a, b) for test, a, b in zip(tests, values[:-1], values[1:], strict=True)]
            return reduce(torch.logical_and, held).to(x.dtype)

        return comparison

    def _call(self, node: ast.Call, depth: int) -> Function:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if not name or name == "x" or name in CONSTANTS:
            self._refuse("only a function can be called; write * for a product", node.func)
        if name not in FUNCTIONS:
            self._unknown("function", node.func, list(FUNCTIONS))
        if node.keywords:
            self._refuse(
                f"arguments have no names here; write {_usage(name)}", node.keywords[0].value
            )
        known, count = FUNCTIONS[name], len(node.args)
        if not known.takes(count):
            self._refuse(f"write {_usage(name)}; {count} given", node)
        arguments = [self.value(argument, depth + 1) for argument in node.args]
        if name == "where":
            return _where(*arguments)
        return lambda x: known.compute(*(argument(x) for argument in arguments))

    def _unknown(self, what: str, node: ast.expr, known: list[str]) -> NoReturn:
        name = node.id if isinstance(node, ast.Name) else ""
        near = get_close_matches(name.lower(), known, n=1)
        listed = ", ".join(sorted(FUNCTIONS))
        hint = f"did you mean {near[0]!r}?" if near else f"there are x, pi, e and {listed}."
        self._refuse(f"no {what} {name!r}; {hint}", node)

    def _too_deep(self, at: int) -> NoReturn:
        self._refuse(f"more than {DEEPEST} brackets, signs or powers within each other", at)

    def _refuse(self, why: str, where: ast.expr | int) -> NoReturn:
        """ValueError with the text and carets under the place."""
        at, end = where, None
        if isinstance(where, ast.expr):
            at, end = where.col_offset, where.end_col_offset
        assert isinstance(at, int)
        start = max(0, at - 40)
        shown = self.text[start : start + 80]
        carets = "^" * max(1, min(end or 0, start + len(shown)) - at)
        sentence = fill(why if why.endswith(("?", ".")) else f"{why}.", 96)
        raise ValueError(f"{sentence}\n    {shown}\n    {' ' * (at - start)}{carets}")


def _usage(name: str) -> str:
    return f"{name}({', '.join(FUNCTIONS[name].arguments)})"


def _constant(number: float) -> Function:
    """As a tensor: torch gives inf and NaN where Python's floats raise or turn complex."""
    return lambda x: torch.tensor(number, dtype=torch.float64, device=x.device)


def _where(condition: Function, a: Function, b: Function) -> Function:
    """`a` of those x where the condition holds, `b` of the others; gradients likewise.

    torch.where computes both everywhere, and the gradient of the side that is not taken is 0 times
    its own: NaN where that is infinite, as for where(x > 0, x, exp(x) - 1) at 1000.
    """

    def where(x: Tensor) -> Tensor:
        chosen = (condition(x) != 0).expand_as(x)
        value = torch.zeros_like(x)
        for mask, side in ((chosen, a), (~chosen, b)):
            part = x[mask]
            value = value.masked_scatter(mask, side(part).to(x.dtype).expand_as(part))
        return value

    return where
