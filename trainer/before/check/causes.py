"""Why a run with made-up answers failed: by one of them, or by the application whatever the answer; and what would do.

An error is an answer's doing where it shows a made-up text, or where the expression that raised it works on one: names
in it are looked up in the frame that failed.
"""

from __future__ import annotations

import ast
import asyncio
import enum
import functools
import json
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from cotune.episodes.episode import Outcome
from cotune.json_values import json_or_none
from cotune.records.blame import blame, chain
from cotune.records.structs import CallRecord
from cotune.runtime.loop_watch import Blocked
from cotune.runtime.user_code import is_library, is_library_file
from cotune.trainer.before.stub.fitting import blamed, lessons, quotes
from cotune.trainer.before.stub.json_example import example
from cotune.trainer.before.stub.matching import matching
from cotune.trainer.before.stub.stub import ENDLESS
from cotune.trainer.before.stub.words import functions_in

_LIMIT = re.compile(
    r"recursion|max\w*.{0,12}(?:turn|step|iteration|round|retr)|(?:turn|step|iteration|retr)\w*.{0,20}limit", re.I
)
_LOOKED_AT = 3000
"""Most values that are looked through for one error."""
_MOST = 50
_WORDS = 12
"""Most words that are taken from the application's code."""


@dataclass(frozen=True)
class Made:
    """Made-up values of a run: texts, numbers, and the keys of JSON objects."""

    texts: frozenset[str]
    numbers: frozenset[float]
    keys: frozenset[str]

    @classmethod
    def of(cls, calls: Iterable[CallRecord]) -> Made:
        """The values in the answers of calls."""
        texts: set[str] = set()
        numbers: set[float] = set()
        keys: set[str] = set()

        def add(value: Any) -> None:
            if isinstance(value, Mapping):
                keys.update(map(str, value))
                value = list(value.values())
            if isinstance(value, list):
                for inner in value:
                    add(inner)
            elif isinstance(value, str):
                texts.add(value.strip())
            elif isinstance(value, int | float) and not isinstance(value, bool):
                numbers.add(value)

        for call in calls:
            for candidate in call.candidates:
                add(candidate.text)
                add(json_or_none(candidate.text))
                for function in functions_in(candidate.message):
                    add(json_or_none(str(function.get("arguments"))))
        return cls(frozenset(texts - {""}), frozenset(numbers), frozenset(keys))


@dataclass(frozen=True)
class Cause:
    """Why a run failed. `instead` holds replacements for the next run, as in `Manner`; `answer` the role and the
    made-up answer before it."""

    by_answer: bool
    instead: Mapping[str, Sequence[str]] = field(default_factory=dict)
    answer: str = ""


def cause_of(outcome: Outcome, calls: Sequence[CallRecord], raised: BaseException | None, asked: bool = False) -> Cause:
    """Why an episode failed, whose `calls` these are and which `raised` this. `asked`: it asked a person."""
    error = outcome.error
    answered = [call for call in calls if call.status == "ok" and call.candidates]
    if error is None or not answered or (asked and "EOF" in str(error)):
        return Cause(False)
    if ENDLESS in error.cause:
        made = Made.of(answered)
        instead = [_Fault(one, made, error.cause).instead() for one in chain(raised)]
        return Cause(True, next((words for words in reversed(instead) if words), {}), _answer_before(raised, answered))
    if (
        raised is None
        or error.__cause__ is None
        or outcome.live.failures
        or outcome.live.interrupted
        or blame(error) == "infrastructure"
    ):
        return Cause(False, answer=_answer_before(raised, answered))
    return cause_of_error(raised, answered)


def cause_of_error(raised: BaseException, calls: Sequence[CallRecord]) -> Cause:
    """Why an exception was raised after the made-up answers of `calls`."""
    answer = _answer_before(raised, calls)
    errors = list(chain(raised))
    if any(isinstance(one, Blocked | asyncio.CancelledError) for one in errors):
        return Cause(False, answer=answer)
    made = Made.of(calls)
    faults = [fault for one in errors if (fault := _Fault(one, made)).by_answer]
    instead: dict[str, Sequence[str]] = {}
    for fault in reversed(faults):
        instead.update(fault.instead())
    return Cause(bool(faults), instead, answer)


def _answer_before(raised: BaseException | None, calls: Sequence[CallRecord]) -> str:
    """The last answer that an exception shows, in its text or in the values at hand, else the last one; on one line."""
    last = next((call for call in reversed(calls) if call.status == "ok" and call.candidates), None)
    if last is None:
        return ""
    faults = [_Fault(one, Made.of(())) for one in chain(raised)]
    for call in reversed(calls):
        if any(fault.shows(Made.of([call])) for fault in faults):
            last = call
            break
    chosen = next((one for one in last.candidates if one.index == last.chosen), last.candidates[0])
    text = ", ".join(f"{one.get('name')}({one.get('arguments')})" for one in functions_in(chosen.message))
    text = text or json.dumps(chosen.text)
    return f"{last.role}: {text if len(text) <= 200 else f'{text[:200]} ...'}"


class _Fault:
    """One exception, with the frame of the application that it came from."""

    def __init__(self, error: BaseException, made: Made, text: str = "") -> None:
        self.error = error
        self.made = made
        self.text = text or f"{type(error).__name__}: {error}"
        self.frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if not is_library(frame)]
        self.frame = self.frames[-1] if self.frames else None
        every = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        self.beyond = every[every.index(self.frame) + 1 :] if self.frame is not None else every
        """Frames of libraries that it went through last."""
        self.nodes = list(_failing(error, self.frame)) if self.frame is not None else []

    def shows(self, made: Made) -> bool:
        """Whether the answers `made` are in the error's text, or in the values that it was raised on."""
        self.made = made
        return any(quotes(self.text, text) for text in made.texts) or any(map(self._says, self._values()))

    @functools.cached_property
    def by_answer(self) -> bool:
        if any(quotes(self.text, text) for text in self.made.texts) or _LIMIT.search(self.text):
            return True
        if isinstance(self.error, ImportError):
            return False
        if isinstance(self.error, KeyError) and (held := self._lacking()) is not None:
            return set(map(str, held)) <= self.made.keys
        if isinstance(self.error, AttributeError) and self.error.obj is not None:
            return not _of_library(self.error.obj) and self._says(self.error.obj)
        if isinstance(self.error, TypeError) and self.nodes and isinstance(self.nodes[0], ast.Subscript):
            assert self.frame is not None
            if _of_library(_value(self.nodes[0].value, self.frame)):
                return False
        if self.nodes and isinstance(self.nodes[-1], ast.For | ast.AsyncFor | ast.While):
            return True  # raised behind a loop that was left without a result
        if any(isinstance(v, str) and self._says(v) for frame in self.beyond for v in frame.f_locals.values()):
            return True
        if any(self._is_unknown(value) or self._says(value) for value in self._values()):
            return True
        if isinstance(self.error, OSError) or not self.nodes:
            return False
        failed, *conditions = self.nodes  # the result of a call in them is lost
        inner = () if isinstance(failed, ast.Raise) else (one for one in ast.walk(failed) if one is not failed)
        return any(isinstance(one, ast.Call) for one in (*inner, *(o for test in conditions for o in ast.walk(test))))

    def instead(self) -> dict[str, Sequence[str]]:
        """Texts to say instead, by the error's own words, or by values in the failing code."""
        held = self._lacking() if isinstance(self.error, KeyError) else None
        # the mapping is the answer itself, and lacks a key that no answer had
        if held is not None and self.error.args[0] not in self.made.texts and set(map(str, held)) <= self.made.keys:
            key = str(self.error.args[0])
            kind = {"type": "array", "items": {}} if key.endswith("s") and not key.endswith("ss") else {}
            schema = {"type": "object", "properties": {key: kind}, "required": [key]}
            return {"": [json.dumps({**held, **example(schema)})]}
        if found := lessons(self.text, self.made.texts):
            return dict(found)
        if words := self._waited_for():
            return dict.fromkeys(blamed(self.text, self.made.texts), words)
        choices = next((list(found) for found in map(self._choices, self._held()) if found), [])
        return dict.fromkeys(blamed(self.text, self.made.texts), choices) if choices else {}

    def _waited_for(self) -> list[str]:
        """The words that the failing function compares texts with; for a loop without end also those around it."""
        endless = _LIMIT.search(self.text) or ENDLESS in self.text
        frames = self.frames[::-1] if endless else self.frames[-1:]
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        words: dict[str, None] = {}
        for whole in (False, True) if endless else (False,):
            for frame in frames:
                tree = _tree(frame.f_code.co_filename)
                own = (frame.f_code.co_name, frame.f_code.co_firstlineno)
                functions = (one for one in ast.walk(tree) if isinstance(one, kinds))
                found = [
                    one for one in functions if own == (one.name, min(x.lineno for x in (one, *one.decorator_list)))
                ]
                for scope in [tree] if whole else found:
                    words.update(dict.fromkeys(_compared(scope, frame.f_globals)))
        return [word for word in words if word not in self.made.texts][:_WORDS]

    def _lacking(self) -> Mapping[Any, Any] | None:
        """The mapping that lacks the key of a KeyError."""
        node = self.nodes[0] if self.nodes else None
        if not isinstance(node, ast.Subscript) or self.frame is None:
            return None
        value = _value(node.value, self.frame)
        if value is _UNKNOWN and isinstance(node.value, ast.Call) and any(map(self._says, self._values())):
            return next((v for text in self.made.texts if isinstance(v := json_or_none(text), dict)), {})
        return value if isinstance(value, Mapping) else None

    def _values(self) -> Iterator[Any]:
        """Values of the names in what failed and in the conditions around it; of `a.b` that of the attribute."""
        queue = list(self.nodes)
        while queue and self.frame is not None:
            node = queue.pop()
            value = _value(node, self.frame) if isinstance(node, ast.Name | ast.Attribute) else _UNKNOWN
            if value is _UNKNOWN:
                queue += ast.iter_child_nodes(node)
            elif not isinstance(value, ModuleType | type) and not callable(value):
                yield value

    def _held(self) -> Iterator[Any]:
        """Values in the failing expression, then in all names of its function."""
        if self.frame is None:
            return
        for node in self.nodes:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name | ast.Attribute):
                    yield _value(inner, self.frame)
        code = self.frame.f_code
        for name in (*code.co_names, *code.co_varnames, *code.co_freevars):
            yield _value(ast.Name(name), self.frame)

    def _choices(self, value: Any) -> Iterable[str]:
        """The words to choose from that a value is: keys of a dict, a list or set of words, the values of an enum."""
        if isinstance(value, enum.EnumMeta):
            members: Mapping[str, Any] = value.__members__
            value = [str(member.value) for member in members.values()]
        if not isinstance(value, Mapping | list | tuple | set | frozenset) or not 0 < len(value) <= _MOST:
            return ()
        words = [one for one in value if isinstance(one, str) and one and len(one) <= 60 and "\n" not in one]
        return words if len(words) == len(value) and not any(map(self._says, words)) else ()

    def _is_unknown(self, value: Any) -> bool:
        """Whether a value may come from an answer without showing it: nothing that was found, or a piece of it."""
        if value is None or (isinstance(value, str | list | tuple | Mapping) and not value):
            return True
        return isinstance(value, str) and any(value in text for text in self.made.texts)

    def _says(self, value: Any) -> bool:
        """Whether a made-up text or number is in a value, so far as one looks."""
        left, queue = _LOOKED_AT, [(value, 0)]
        while queue and left:
            left -= 1
            one, depth = queue.pop()
            if isinstance(one, str):
                stripped = one.strip()
                if stripped in self.made.texts or any(len(text) > 5 and text in one for text in self.made.texts):
                    return True
            elif isinstance(one, int | float) and not isinstance(one, bool):
                if depth == 0 and one in self.made.numbers:
                    return True
            elif depth < 5 and isinstance(one, Mapping):
                queue += [(inner, depth + 1) for inner in list(one.values())[:_MOST]]
            elif depth < 5 and isinstance(one, list | tuple | set | frozenset):
                queue += [(inner, depth + 1) for inner in list(one)[:_MOST]]
            elif depth < 4 and hasattr(one, "__dict__") and not isinstance(one, ModuleType | type):
                queue += [(inner, depth + 1) for inner in list(vars(one).values())[:_MOST]]
        return False


_UNKNOWN = object()


def _of_library(value: Any) -> bool:
    """Whether a value is a library's object: no answer changes its methods."""
    named = sys.modules.get(type(value).__module__)
    return type(value).__module__ != "builtins" and is_library_file(str(getattr(named, "__file__", None) or "<"))


def _compared(scope: ast.AST, names: Mapping[str, Any]) -> Iterator[str]:
    """The words that code compares with: `== "yes"`, `"DONE" in text`, `startswith("a")`, `case "b"`, `{"c": 1}[text]`,
    and texts that its regular expressions match. `names` are those of its module."""
    for node in ast.walk(scope):
        found: Iterable[ast.AST] = ()
        if isinstance(node, ast.Compare):
            found = (node.left, *node.comparators)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith", "find", "index", "partition", "split"):
                found = node.args
            elif isinstance(node.func.value, ast.Name):
                name = node.func.value.id
                yield from matching(_pattern(node, names.get(name, re if name == "re" else None), names))
        elif isinstance(node, ast.MatchValue):
            found = (node.value,)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            found = [key for key in node.value.keys if key is not None]
        for part in (inner for one in found for inner in ast.walk(one)):
            word = part.value.strip() if isinstance(part, ast.Constant) and isinstance(part.value, str) else ""
            if re.fullmatch(r"[#*>-]+", word) and isinstance(node, ast.Call):
                yield f"{word} a"
            if 1 < len(word) <= 40 and word != "__main__" and not re.fullmatch(r"\W+", word):
                yield word


def _pattern(call: ast.Call, owner: Any, names: Mapping[str, Any]) -> str:
    """The regular expression of a call of `re`, or of a method of a compiled one."""
    first = call.args[0] if owner is re and call.args else None
    given = names.get(first.id) if isinstance(first, ast.Name) else getattr(first, "value", None)
    found = getattr(given if owner is re else owner, "pattern", given)
    return found if isinstance(found, str) else ""


def _value(node: ast.expr, frame: FrameType) -> Any:
    """The value of a name, or of attributes and constant items of one."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id, _UNKNOWN))
    try:
        if isinstance(node, ast.Attribute):
            return vars(_value(node.value, frame)).get(node.attr, _UNKNOWN)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return _value(node.value, frame)[node.slice.value]
    except Exception:  # noqa: BLE001 - whatever the application's objects raise
        return _UNKNOWN
    return _UNKNOWN


def _failing(error: BaseException, frame: FrameType) -> Iterator[ast.AST]:
    """The syntax that raised an error in a frame; for a `raise` or `assert` then its conditions, or loops before it."""
    at = error.__traceback__
    while at is not None and (at.tb_next is not None and at.tb_frame is not frame):
        at = at.tb_next
    assert at is not None
    place = list(frame.f_code.co_positions())[at.tb_lasti // 2]
    line, last = place[:2]
    if line is None or last is None:
        return
    above: list[ast.AST] = []
    for node in ast.walk(_tree(frame.f_code.co_filename)):
        if isinstance(node, ast.stmt) and node.lineno <= line and (node.end_lineno or 0) >= last:
            above.append(node)
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place:
            yield node
            break
    inner = above[-1] if above else None
    if isinstance(inner, ast.Raise | ast.Assert):
        function = [node for node in above if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)][-1:]
        begin = function[0].lineno if function else 0
        around = [node.test for node in above if isinstance(node, ast.If | ast.While) and node.lineno > begin]
        loops = (ast.For, ast.AsyncFor, ast.While)
        before = [node for top in function for node in ast.walk(top) if isinstance(node, loops) and node.lineno < line]
        yield from around or before


@functools.lru_cache(32)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])
