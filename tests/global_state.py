"""Lists the global state of the product: context variables, and module variables that change while it runs.

`python tests/global_state.py` prints both. `tests/test_global_state.py` compares them with
docs/internals/architecture.md, which gives the reason for each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LAYERS = {
    "core": "cotune",
    "integrations": "cotune.integrations",
    "adapters": "cotune.adapters",
    "trainer": "cotune.trainer",
}
CHANGES = {
    "acquire", "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "pop",
    "popitem", "popleft", "put", "remove", "setdefault", "submit", "update",
}  # fmt: skip
"""Methods that change a container, a queue, a lock or a pool."""
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "Event"}


class Variable(NamedTuple):
    """A name at the top level of a module."""

    module: str
    name: str

    @property
    def text(self) -> str:
        """As architecture.md writes it: `module.name`, without `cotune.`."""
        return f"{self.module.removeprefix('cotune.')}.{self.name}"


Modules = list[tuple[str, ast.Module]]
"""Modules of the product by import name, with their syntax trees."""


def modules() -> Modules:
    """Parse the whole product, which takes seconds."""
    found = []
    for layer, package in LAYERS.items():
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT / layer).with_suffix("").parts
            if "templates" not in parts:
                name = ".".join((package, *parts)).removesuffix(".__init__")
                found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names that a module assigns at its top level, with their values."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def constructor(value: ast.expr) -> str:
    """The last name of what is called: "Lock" for `threading.Lock()`; empty for anything else."""
    if not isinstance(value, ast.Call):
        return ""
    return ast.unparse(value.func).split("[")[0].rpartition(".")[2]


def changed_names(tree: ast.Module) -> set[str]:
    """Names of variables, as the module knows them, that its functions change: whole, by an item, an attribute or a
    method."""
    names: set[str] = set()
    for node in nodes_in_functions(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(ast.unparse(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            names.add(ast.unparse(node.func.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
            names.add(ast.unparse(node.args[0]))
    return names


def nodes_in_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Every function, and what is inside of functions, once."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if inside:
            yield node
        waiting.extend((child, inside) for child in ast.iter_child_nodes(node))


def context_variables(modules: Modules) -> list[Variable]:
    """All ContextVars at the top level of modules."""
    return [
        Variable(module, name)
        for module, tree in modules
        for name, value in assignments(tree)
        if constructor(value) == "ContextVar"
    ]


def module_variables(modules: Modules) -> list[Variable]:
    """Top-level names that are changed after import, in their own module or in one that imports them, and locks.

    Caches of pure functions (`functools.cache`) are not counted: what they hold depends on their arguments alone.
    """
    trees = dict(modules)
    assigned = {Variable(module, name): value for module, tree in trees.items() for name, value in assignments(tree)}
    found = {variable for variable, value in assigned.items() if constructor(value) in LOCKS}
    for module, tree in trees.items():
        changed = changed_names(tree)
        nodes = list(ast.walk(tree))
        local = locally_bound(tree, nodes)
        found.update(Variable(module, name) for name in changed - local if Variable(module, name) in assigned)
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    variable = Variable(node.module, alias.name)
                    if (alias.asname or alias.name) in changed and variable in assigned:
                        found.add(variable)
    stateful: set[str] = set()
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and "ProcessState" in map(ast.unparse, node.bases):
                stateful.add(node.name)
    found.update(variable for variable, value in assigned.items() if constructor(value) in stateful)
    kept = {variable for variable in found if constructor(assigned[variable]) != "ContextVar"}
    return sorted(kept)


def locally_bound(tree: ast.Module, nodes: list[ast.AST]) -> set[str]:
    """Names that every function which changes them binds itself: parameters and local variables. `nodes` are all nodes
    of the tree."""
    names: set[str] = set()
    top = {name for name, _ in assignments(tree)}
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = node.args
        bound = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        names |= bound & top
    return names


if __name__ == "__main__":
    product = modules()
    of_contexts, of_modules = context_variables(product), module_variables(product)
    for title, variables in (("context variables", of_contexts), ("module variables", of_modules)):
        print(f"{len(variables)} {title}")
        for variable in variables:
            print(f"    {variable.text}")
