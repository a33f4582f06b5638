"""Tasks files: one JSON value per line. The `id` of an object, or else the line number, is the id of the task. A line
with exactly `{"task_id": ..., "input": ...}` is a task with this id and this input."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError
from cotune.json_values import plain_json
from cotune.records.ids import message_id
from cotune.records.structs import Task

_EXAMPLE = 'Write one JSON object per line, such as {"id": "t1", "question": "..."}.'


def load_tasks(path: str | Path) -> list[Task]:
    """Read a JSON-lines file. Raises ConfigError for a missing file, a broken line (with its number), a repeated id,
    a file that is one JSON list, or one without tasks."""
    path = Path(path)
    if not path.is_file():
        fault = "is a folder, not a file" if path.exists() else f"does not exist: there is no file {path.absolute()}"
        raise ConfigError("tasks", str(path), fault, _EXAMPLE)
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError("tasks", str(path), "is in UTF-16", "Save it as UTF-8.")
    tasks: list[Task] = []
    line_of_id: dict[str, int] = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {line_number}"
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not tasks and (kind := _one_value(text)):
                raise ConfigError("tasks", str(path), f"is {kind}, not one task on each line", _EXAMPLE) from None
            if constant := _invalid_number(line):
                fault, remedy = f"holds {constant}, which JSON does not have", "Write null, a number or a text for it."
                raise ConfigError("tasks", place, fault, remedy) from None
            raise ConfigError("tasks", place, f"is not valid JSON ({error})", _EXAMPLE) from None
        except RecursionError:
            raise ConfigError("tasks", place, "is nested too deeply", _EXAMPLE) from None
        task = as_task(value, line_number)
        if task.id in line_of_id:
            fault = f"repeats the id {task.id!r} of line {line_of_id[task.id]}"
            raise ConfigError("tasks", place, fault, "Rename or remove one of the two tasks.")
        line_of_id[task.id] = line_number
        tasks.append(task)
    if len(tasks) == 1 and isinstance(tasks[0].input, list):
        remedy = f'{_EXAMPLE} If the list is one task, put it into an object: {{"messages": [...]}}.'
        raise ConfigError("tasks", str(path), "is one JSON list, not one task on each line", remedy)
    if not tasks:
        raise ConfigError("tasks", str(path), "has no task", _EXAMPLE)
    return tasks


def _invalid_number(line: bytes) -> str:
    """NaN, Infinity or -Infinity if the line is JSON but for this number, which Python and pandas write; else empty."""
    constants: list[str] = []
    try:
        json.loads(line, parse_constant=constants.append)
    except ValueError:
        return ""
    return constants[0] if constants else ""


def _one_value(text: bytes) -> str:
    """A description of a file with one JSON value on several lines; empty for another file."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return "one JSON list" if isinstance(value, list) else "one JSON value on several lines"


def as_task(value: Any, number: int) -> Task:
    """A task from a value: a Task itself, a mapping with an id, or any JSON value, whose id is `number`."""
    return _named(value) or Task(id=str(number), input=value)


def task_of(value: Any, name: str) -> Task:
    """A task from a value that is not in a tasks file. The id of a text is the text itself, and the id of another value
    without an id is a digest. None becomes the task `name` without an input."""
    if value is None:
        return Task(id=name, input=None)
    if isinstance(value, str):
        return Task(id=value, input=value)
    return _named(value) or Task(id=task_digest(value), input=value)


def task_digest(value: Any) -> str:
    """An id for the value of a task. Equal values have the same id."""
    return message_id({"task": plain_json(value)})[:12]


def _named(value: Any) -> Task | None:
    """The task of a value that has an id: a Task, an object with `task_id` and `input`, or an object with `id`. None
    for another value."""
    if isinstance(value, Task):
        return value
    if isinstance(value, Mapping) and value.keys() == {"task_id", "input"}:
        return Task(id=str(value["task_id"]), input=value["input"])
    if isinstance(value, Mapping) and "id" in value:
        return Task(id=str(value["id"]), input=value)
    return None


def task_line(task: Task) -> bytes:
    """The line of a task in a tasks file, which gives it the same id. Raises TypeError or ValueError for an input that
    is not JSON."""
    has_id = isinstance(task.input, Mapping) and str(task.input.get("id")) == task.id
    return msgspec.json.encode(task.input if has_id else {"task_id": task.id, "input": task.input}) + b"\n"


def as_tasks(values: str | Path | Iterable[Any]) -> list[Task]:
    """Tasks from a JSON-lines file, or from Python values. Raises ConfigError for anything else, without tasks, and if
    two tasks have the same id."""
    if isinstance(values, str | Path):
        return load_tasks(values)
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise ConfigError(
            "tasks", values, "is neither a JSON-lines file nor a list of tasks", "Put one task into a list."
        )
    tasks = [as_task(value, number) for number, value in enumerate(values, 1)]
    if not tasks:
        raise ConfigError("tasks", [], "has no task", _EXAMPLE)
    if len({task.id for task in tasks}) < len(tasks):
        raise ConfigError(
            "tasks", [task.id for task in tasks][:10], "are not unique ids", "Give each task a different id."
        )
    return tasks
