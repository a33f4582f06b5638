"""What every example's application must be: without a word of cotune, and a program that runs alone."""

from __future__ import annotations

import ast
import contextlib
import io
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.provider import completion, json_reply, serving

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
    before = {name: module for name, module in sys.modules.copy().items() if name.startswith(prefix)}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        # A copy, because a thread that still runs may import something now.
        for name in sys.modules.copy():
            if name.startswith(prefix):
                sys.modules.pop(name, None)
        sys.modules.update(before)


def models_asked_by(module: str, *, answer: str, ends: str) -> Counter[str]:
    """Run an application on two tasks against a provider that says `answer`; its requests by model.

    It runs as a program, but in this process: importing a framework takes longer than two tasks. Fails unless its
    output ends with `ends`.
    """
    said = io.StringIO()
    with serving() as provider, pytest.MonkeyPatch.context() as patch, imported_again("examples."):
        provider.reply = lambda body, number: json_reply(completion({"role": "assistant", "content": answer}))
        patch.setenv("OPENAI_BASE_URL", provider.url)
        patch.setattr(sys, "argv", [module, "--tasks", "2"])
        with contextlib.redirect_stdout(said):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert said.getvalue().endswith(ends), said.getvalue()
    return Counter(body["model"] for body in provider.requests)
