"""The tool `calculator`: exact arithmetic with whole numbers, fractions and decimals, in bounded time."""

import ast
import operator
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import ClassVar

from swarm.config import Section, TaskSourceSection, TasksSection
from swarm.extensions.registry import Isolation
from swarm.tasks.environments.tool import ToolError

MAX_CHARS = 256
_MAX_BITS = 512
_MAX_EXPONENT = 64
_DIGITS = 12
_TWO: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class NoParameters(Section):
    """A tool without parameters."""


class Calculator:
    """+ - * / // % ** and parentheses. Numbers with a fraction are rounded to 12 digits."""

    Parameters = NoParameters
    isolation: ClassVar[Isolation] = Isolation.NONE_NEEDED
    name = "calculator"
    description = "Computes an arithmetic expression, such as (12 + 3) * 4 / 5."
    argument = "expression"
    is_exact = True
    rules = "1"

    def __init__(self, parameters: NoParameters, section: TaskSourceSection, tasks: TasksSection) -> None: ...

    def run(self, text: str) -> str:
        """The value as text. Raises ToolError for anything but such an expression."""
        if len(text) > MAX_CHARS:
            raise ToolError(f"an expression must have at most {MAX_CHARS} characters, got {len(text)}")
        text = text.replace("\N{MULTIPLICATION SIGN}", "*").replace("\N{DIVISION SIGN}", "/").replace("^", "**")
        try:
            return _shown(_value(ast.parse(text.strip().rstrip("= "), mode="eval").body))
        except ZeroDivisionError:
            raise ToolError("division by zero") from None
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ToolError("not an arithmetic expression") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_value(node.left), _value(node.right))
    elif isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        value = _TWO[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ToolError("an expression must have numbers, + - * / // % ** and parentheses only")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError("the numbers are too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise ToolError(f"an exponent must be a whole number within {_MAX_EXPONENT}")
    return base ** int(exponent)


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext(prec=_DIGITS):
        return format((Decimal(value.numerator) / Decimal(value.denominator)).normalize(), "f")
