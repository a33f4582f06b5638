"""Global state is bounded, and docs/internals/architecture.md lists each piece with its reason."""

from __future__ import annotations

import ast
import re

import pytest

from tests.global_state import (
    ROOT,
    Modules,
    changed_names,
    constructor,
    context_variables,
    module_variables,
    modules,
)

MOST_CONTEXT_VARIABLES = 12
MOST_MODULE_VARIABLES = 15


def listed(title: str) -> list[str]:
    """The variables in the table below a heading of the page."""
    page = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
    section = page.partition(f"### {title}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `([\w.]+)` \| \w", section, re.MULTILINE)


@pytest.fixture(scope="module")
def product() -> Modules:
    return modules()


def test_every_context_variable_is_listed_with_its_reason(product: Modules) -> None:
    found = [variable.text for variable in context_variables(product)]
    assert sorted(listed("Context variables")) == sorted(found)
    assert len(found) <= MOST_CONTEXT_VARIABLES


def test_every_module_variable_that_changes_is_listed_with_its_reason(product: Modules) -> None:
    found = [variable.text for variable in module_variables(product)]
    assert sorted(listed("Module variables")) == sorted(found)
    assert len(found) <= MOST_MODULE_VARIABLES


SOURCE = """
import threading
lock = threading.Lock()
by_name = {}
table = {}
table.update(a=1)
count = 0
numbers = iter(())

def change(item):
    global count
    count += 1
    by_name["a"] = item
    item.field = next(numbers)
"""


def test_a_variable_counts_if_a_function_changes_it():
    assert changed_names(ast.parse(SOURCE)) == {"by_name", "count", "item", "numbers"}


def test_what_is_called_is_known_by_its_last_name():
    calls = ("threading.Lock()", "ContextVar[int]('a')", "WeakKeyDictionary()", "3")
    names = [constructor(ast.parse(text, mode="eval").body) for text in calls]
    assert names == ["Lock", "ContextVar", "WeakKeyDictionary", ""]
