"""Every error that cotune raises, with "…" for what differs, from the source: the site's search finds their words."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from wording import prose

ROOT = Path(__file__).parents[2]
LAYERS = ("core", "integrations", "adapters", "trainer")
ROOTS = ("CotuneError", "RequestError")
"""Classes whose descendants are errors that a person reads: at the terminal or in Python, and from a server."""
DIFFERS = "…"
MOST = 16
"""Texts of one place in the source, which may say one of several things."""

Values = Mapping[str, Sequence[ast.expr]]


def errors() -> str:
    """A section for each class of errors, and in it their texts."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for layer in LAYERS for file in (ROOT / layer).rglob("*.py")]
    found: dict[str, set[str]] = {name: set() for name in sorted(_classes(trees))}
    for tree in trees:
        for name, text in _texts(tree, set(found), {}):
            found[name].add(text)
    parts = [(name, sorted(texts, key=str.lower)) for name, texts in found.items() if texts]
    return "\n\n".join(f"## {name}\n\n" + "\n".join(f"- {prose(text)}" for text in texts) for name, texts in parts)


def _classes(trees: Sequence[ast.Module]) -> set[str]:
    defined = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    known = set(ROOTS)
    while more := {one.name for one in defined if {ast.unparse(base) for base in one.bases} & known} - known:
        known |= more
    return known


def _texts(scope: ast.AST, classes: set[str], outer: Values) -> Iterator[tuple[str, str]]:
    """Each error that is made in a scope, and in those within it, by its class."""
    values = {**outer, **_assigned(scope)}
    for node in _own(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _texts(node, classes, values)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            for text in _said(node, values):
                yield node.func.id, text


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope; of functions and classes in it the definition alone."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _own(node)


def _assigned(scope: ast.AST) -> Values:
    """What is assigned to each name in a scope."""
    found: dict[str, list[ast.expr]] = {}
    for node in _own(scope):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(value)
    return found


def _said(call: ast.Call, values: Values) -> Iterator[str]:
    """The texts of an error: its cause and its remedy, each as often as it may differ."""
    given = [*call.args, *(word.value for word in call.keywords if word.arg in ("cause", "remedy", "message"))]
    configured = isinstance(call.func, ast.Name) and call.func.id == "ConfigError"
    if configured and len(given) > 2:
        del given[1]  # the value of the field
    parts = [_read(one, values) for one in given]
    for one in itertools.islice(itertools.product(*parts), MOST):
        texts = [text.strip() for text in one if text.strip(f"{DIFFERS} .")]
        if not texts or not any(character.isalpha() for character in "".join(texts)):
            continue
        if configured and one[1:2] and one[0]:
            texts = [f"{one[0]} {one[1]}.", *one[2:]]
        yield " ".join(" ".join(texts).split())


def _read(node: ast.expr, values: Values, depth: int = 4) -> list[str]:
    """What an expression may say."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else DIFFERS]
    if isinstance(node, ast.IfExp):
        return [*_read(node.body, values, depth), *_read(node.orelse, values, depth)]
    if isinstance(node, ast.Name) and depth and node.id in values:
        return [text for value in values[node.id] for text in _read(value, values, depth - 1)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in _read(node.left, values, depth) for b in _read(node.right, values, depth)]
    if isinstance(node, ast.JoinedStr):
        parts = [_read(part, values, depth) for part in node.values]
        return ["".join(one) for one in itertools.islice(itertools.product(*parts), MOST)]
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.IfExp | ast.Name):
        return _read(node.value, values, depth)
    return [DIFFERS]
