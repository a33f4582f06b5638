"""Wrong programs made of a right one: one place changed, where a hidden test notices."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence

from examples.workloads.code.programs import Test, passes_all

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
TRIES = 3
"""Changed programs that are run for each one that is wanted."""


def changed(program: str) -> Iterator[str]:
    """The program with one operator exchanged or one whole number one higher, place by place; none if it does not
    parse."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp):
            node.op = type(node.op)()  # the parser gives all places one object
        elif isinstance(node, ast.Compare):
            node.ops = [type(op)() for op in node.ops]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
            yield ast.unparse(tree)
            node.value -= 1
        elif kind := SWAPS.get(type(node)):
            before, node.__class__ = type(node), kind
            yield ast.unparse(tree)
            node.__class__ = before


def wrong_programs(program: str, tests: Sequence[Test], function: str, most: int) -> list[str]:
    """At most so many changed programs that fail a test, from all over the program; each is run."""
    candidates = list(dict.fromkeys(changed(program)))
    tried = candidates[:: max(1, len(candidates) // (most * TRIES))][: most * TRIES]
    found = (text for text in tried if not passes_all(text, tests, function))
    return list(itertools.islice(found, most))
