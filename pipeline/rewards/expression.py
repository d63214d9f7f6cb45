"""The reward ``expression``: 1 when a formula gives the right value for every case, else 0.

Goes in: a completion that is one formula in x, y and z (numbers, + - * / // % ** and brackets, nothing else), and a row
whose answer is ``{"inputs": [[x, y, z], ...], "outputs": [...]}`` as JSON. Comes out: 0 or 1. Formulas are walked and
never executed, and numbers are bounded, so that a formula takes microseconds whatever it says.
"""

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from headrace.pipeline.rewards.reward import Completion, RewardOptions
from headrace.schemas.records import Prompt

__all__ = ("Expression", "ExpressionOptions", "value_of")

_NAMES = ("x", "y", "z")
_LARGEST = 10**12
_LARGEST_POWER = 32
_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class ExpressionOptions(RewardOptions):
    """Options of ``expression``."""

    longest: int = 200
    """A longer completion is no formula."""


class Expression:
    """The reward ``expression``."""

    Options: ClassVar[type[RewardOptions]] = ExpressionOptions
    scope: ClassVar[Literal["trajectory", "group"]] = "trajectory"
    isolation: ClassVar[Literal["process", "inline", "thread"]] = "inline"

    def __init__(self, options: ExpressionOptions) -> None:
        self._longest = options.longest

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """1.0 when every case fits. Raises ValueError for a row whose answer holds no cases."""
        cases = _cases(prompt.answer)
        text = completion.text.strip()
        if completion.end_reason != "stop" or not 0 < len(text) <= self._longest:
            return 0.0
        return float(all(_fits(text, arguments, output) for arguments, output in cases))


def value_of(text: str, arguments: list[float]) -> float:
    """The value of a formula. Raises ValueError for what is none, or has no value within bounds.

    >>> value_of("3*x + 5", [2]), value_of("x//y", [7, 2])
    (11, 3)
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body, dict(zip(_NAMES, arguments, strict=False)))
    except (SyntaxError, RecursionError, MemoryError, ArithmeticError, TypeError) as error:
        raise ValueError(f"{text[:80]!r} has no value: {type(error).__name__}") from None


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            a, b = _value(left, names), _value(right, names)
            if isinstance(op, ast.Pow) and abs(b) > _LARGEST_POWER:
                raise ValueError("a power is too large")
            return _bounded(_OPERATIONS[type(op)](a, b))
        case _:
            raise ValueError(f"{type(node).__name__} has no place in a formula")


def _bounded(number: float) -> float:
    if not isinstance(number, int | float) or not math.isfinite(number) or abs(number) > _LARGEST:
        raise ValueError("a number is out of bounds")
    return number


def _cases(answer: str) -> list[tuple[Any, Any]]:
    try:
        data = json.loads(answer)
        cases = list(zip(data["inputs"], data["outputs"], strict=True))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the row's answer holds no cases: {type(error).__name__} in {answer[:80]!r}") from None
    if not cases:
        raise ValueError("the row's answer holds no cases: the lists are empty")
    return cases


def _fits(text: str, arguments: Any, output: Any) -> bool:
    """Whether a formula gives what a case asks for; a case that makes no sense fits nothing."""
    given = arguments if isinstance(arguments, list) else [arguments]
    if len(given) > len(_NAMES) or not all(_is_number(one) for one in (*given, output)):
        return False
    try:
        return bool(value_of(text, given) == output)
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
