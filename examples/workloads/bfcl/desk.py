"""The tools of the application: methods of objects that play a file system, a trading account, tickets and the like."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Collection, Iterable
from typing import Any

LONGEST = 120
"""Characters of a result that are passed on."""


class Desk:
    """Objects and their public methods, which are called by text: `mv(source='a.txt', destination='b')`."""

    def __init__(self, objects: Iterable[Any], without: Collection[str] = ()) -> None:
        self.objects = list(objects)
        self._methods = {
            name: method
            for one in self.objects
            for name, method in inspect.getmembers(one, inspect.ismethod)
            if not name.startswith("_") and name not in without
        }
        self.results: list[str] = []
        """What the calls so far returned, in full."""

    @property
    def signatures(self) -> list[str]:
        """All tools with the names of their arguments: `mv(source, destination)`."""
        return [f"{name}({', '.join(inspect.signature(method).parameters)})" for name, method in self._methods.items()]

    def describe(self, tool: str) -> str:
        """Signature and first line of the description of a tool; empty for one that is none."""
        if tool not in self._methods:
            return ""
        signature = next(one for one in self.signatures if one.partition("(")[0] == tool)
        return f"{signature}: {(inspect.getdoc(self._methods[tool]) or '').partition(chr(10))[0]}"

    def execute(self, call: str) -> str:
        """Make a call; its result, or what is wrong with it, on one line."""
        try:
            name, given, named = parse(call)
            result = self._methods[name](*given, **named)
        except KeyError as error:
            result = {"error": f"no tool {error}"}
        except Exception as error:  # noqa: BLE001, whatever a tool of any kind raises
            result = {"error": str(error)}
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        self.results.append(text)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def parse(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name and arguments of a call that is written in Python, of values alone. Raises ValueError."""
    try:
        node = ast.parse(call.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("not a call")
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        return node.func.id, [ast.literal_eval(given) for given in node.args], named
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"not a call: {error}") from None
