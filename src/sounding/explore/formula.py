"""Activations typed as formulas, such as `max(x, 0.1*x)`: parsed into known operations, never run as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import erf, expit

from sounding.activations.activation import Array
from sounding.errors import UsageError

LONGEST = 200  # characters of a formula
DEEPEST = 20  # operations inside one another: each costs a pass over the values
LARGEST = 1e6  # of a number, so that no power overflows by itself

Step = Callable[[Array], Any]
NUMBERS = {"pi": math.pi, "e": math.e}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.divide,
    ast.Pow: np.power,
}
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    **{name: (1, getattr(np, name)) for name in ("exp", "sin", "cos", "tan", "tanh", "sinh", "cosh", "abs", "sign")},
    **{name: (1, getattr(np, name)) for name in ("sqrt", "log", "log1p", "expm1", "arctan", "square")},
    "erf": (1, erf),
    "sigmoid": (1, expit),
    "softplus": (1, lambda value: np.logaddexp(0.0, value)),
    "relu": (1, lambda value: np.maximum(value, 0.0)),
    "max": (2, np.maximum),
    "min": (2, np.minimum),
}


def parse_formula(text: str) -> Callable[[Array], Array]:
    """The function of x that a formula says.

    Numbers, x, pi, e, + − * / ** and the functions of FUNCTIONS are known; anything else is refused by its name.

    Raises:
        UsageError: the text is no formula, or holds something that is not known.

    >>> parse_formula("max(x, 0.1*x)")(np.array([-1.0, 2.0])).tolist()
    [-0.1, 2.0]
    """
    if len(text) > LONGEST:
        raise UsageError(f"expected a formula of at most {LONGEST} characters, got {len(text)}")
    try:
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body  # ^ would bind less than a sum
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"expected a formula in x, got {text!r}", hint="max(x, 0.1*x)") from None
    steps = _build(tree, 0)

    def function(x: Array) -> Array:
        with np.errstate(all="ignore"):  # log(0) and 0/0 are no reason for a warning
            return np.asarray(steps(x), dtype=np.float64) + np.zeros_like(x)  # a constant gets the shape of x

    function.__name__ = text.strip()
    return function


def _build(node: ast.AST, depth: int) -> Step:
    """The step that computes one node of the formula."""
    if depth > DEEPEST:
        raise UsageError(f"expected at most {DEEPEST} operations inside one another, got more")
    # to Python True is a whole number
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        if not abs(node.value) <= LARGEST:
            raise UsageError(f"expected numbers up to {LARGEST:g}, got {node.value!r}")
        number = float(node.value)
        return lambda x: number
    if isinstance(node, ast.Name) and node.id == "x":
        return lambda x: x
    if isinstance(node, ast.Name):
        if node.id not in NUMBERS:
            raise UsageError(f"expected x, pi or e, got {node.id!r}", hint="x*tanh(x)")
        known = NUMBERS[node.id]
        return lambda x: known
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        act, inner = UNARY[type(node.op)], _build(node.operand, depth + 1)
        return lambda x: act(inner(x))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        join, left, right = BINARY[type(node.op)], _build(node.left, depth + 1), _build(node.right, depth + 1)
        return lambda x: join(left(x), right(x))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call(node.func.id, [_build(one, depth + 1) for one in node.args])
    raise UsageError(f"expected numbers, x, + - * / ** and functions, got {ast.unparse(node)!r}", hint="x*sigmoid(x)")


def _call(name: str, inner: list[Step]) -> Step:
    count, function = FUNCTIONS.get(name, (0, abs))
    if not count:
        raise UsageError(f"expected a function among {', '.join(FUNCTIONS)}, got {name!r}")
    if len(inner) != count:
        raise UsageError(f"expected {name} of {count} value{'s' * (count > 1)}, got {len(inner)}")
    return lambda x: function(*(one(x) for one in inner))
