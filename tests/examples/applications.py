"""What every example's application must be: without a word of cotune, and a program that runs alone."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.integrations.provider import completion, json_reply, serving

ROOT = Path(__file__).parents[2]
TRAINING = ("rewards", "train")
"""Modules of the examples that belong to their training."""


def imports_of(path: Path) -> list[str]:
    """The modules that a file imports, anywhere in it."""
    tree = ast.parse(path.read_text())
    found = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return found + [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def check_knows_nothing_of_cotune(path: Path) -> None:
    """Fail where an application's file imports cotune or what trains it."""
    found = imports_of(path)
    assert found and not [name for name in found if "cotune" in name or name.rpartition(".")[2] in TRAINING]


@contextlib.contextmanager
def imported_again(prefix: str) -> Iterator[None]:
    """Within, modules whose names begin so are imported anew: an application's client reads its address then."""
    before = {name: module for name, module in sys.modules.items() if name.startswith(prefix)}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(prefix)]:
            del sys.modules[name]
        sys.modules.update(before)


def models_asked_by(module: str, *, answer: str, ends: str) -> Counter[str]:
    """Run an application on two tasks against a provider that says `answer`; its requests by model.

    Fails unless its output ends with `ends`.
    """
    with serving() as provider:
        provider.reply = lambda body, number: json_reply(completion({"role": "assistant", "content": answer}))
        environment = {**os.environ, "OPENAI_BASE_URL": provider.url}
        command = [sys.executable, "-m", module, "--tasks", "2"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith(ends), done.stderr
    return Counter(body["model"] for body in provider.requests)
