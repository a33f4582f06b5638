"""Tasks: read from JSON lines or Python values, with the line named where one is wrong."""

from __future__ import annotations

import pytest

from cotune.errors import ConfigError
from cotune.records.structs import Task
from cotune.records.tasks import as_tasks, load_tasks, task_of


@pytest.fixture
def file(tmp_path):
    def write(text: str):
        path = tmp_path / "tasks.jsonl"
        path.write_text(text)
        return path

    return write


def test_ids_are_given_or_the_line(file):
    tasks = load_tasks(file('{"id": "a", "q": 1}\n\n"plain"\n{"id": 7}\n'))
    assert tasks == [
        Task(id="a", input={"id": "a", "q": 1}),
        Task(id="3", input="plain"),
        Task(id="7", input={"id": 7}),
    ]


@pytest.mark.parametrize("constant", ["NaN", "-Infinity"])
def test_a_number_that_json_does_not_have_is_named(file, constant):
    path = file(f'{{"id": "a"}}\n{{"id": "b", "price": {constant}}}\n')
    with pytest.raises(ConfigError, match=f"line 2' holds {constant}, which JSON does not have. Write null"):
        load_tasks(path)


def test_broken_line_is_named(file):
    path = file('{"id": "a"}\n{"id": "b"\n')
    with pytest.raises(ConfigError) as caught:
        load_tasks(path)
    assert (caught.value.field, caught.value.value) == ("tasks", f"{path}, line 2")
    assert caught.value.fault.startswith("is not valid JSON (")
    assert caught.value.remedy == 'Write one JSON object per line, such as {"id": "t1", "question": "..."}.'


def test_not_utf8_is_a_broken_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"id": "a"}\n"\xff"\n')
    with pytest.raises(ConfigError, match="line 2"):
        load_tasks(path)


def test_as_windows_writes_it(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('{"id": "ä"}\r\n\r\n"plain"\r\n'.encode("utf-8-sig"))
    assert [task.id for task in load_tasks(path)] == ["ä", "3"]
    path.write_bytes('{"id": "ä"}\r\n'.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"is in UTF-16. Save it as UTF-8"):
        load_tasks(path)


def test_repeated_id_names_both_lines(file):
    path = file('{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n')
    with pytest.raises(ConfigError) as caught:
        load_tasks(path)
    assert caught.value.value == f"{path}, line 3"
    assert caught.value.fault == "repeats the id 'a' of line 1"
    assert caught.value.remedy == "Rename or remove one of the two tasks."


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_no_tasks(file, text):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        load_tasks(path)
    assert (caught.value.value, caught.value.fault) == (str(path), "has no task")


def test_a_json_list_is_no_file_of_tasks(file):
    path = file('[{"q": 1}, {"q": 2}]\n')
    with pytest.raises(ConfigError) as caught:
        load_tasks(path)
    assert caught.value.fault == "is one JSON list, not one task on each line"
    assert caught.value.remedy.endswith('If the list is one task, put it into an object: {"messages": [...]}.')


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('[\n  {"q": 1},\n  {"q": 2}\n]\n', "one JSON list"),
        ('[{"q": 1},\n {"q": 2}]', "one JSON list"),
        ('{\n  "q": 1\n}\n', "one JSON value on several lines"),
    ],
)
def test_a_json_value_on_several_lines_is_no_file_of_tasks(file, text, kind):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        load_tasks(path)
    assert (caught.value.value, caught.value.fault) == (str(path), f"is {kind}, not one task on each line")


def test_no_file(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_tasks(tmp_path / "nowhere.jsonl")
    path = tmp_path / "nowhere.jsonl"
    assert str(caught.value).startswith(f"tasks = '{path}' does not exist: there is no file {path}. Write one JSON")
    with pytest.raises(ConfigError, match=r"is a folder, not a file\. Write one JSON"):
        load_tasks(tmp_path)


def test_values():
    given = Task(id="x", input=1)
    assert as_tasks([given, {"id": "y"}, "z"]) == [given, Task(id="y", input={"id": "y"}), Task(id="3", input="z")]


def test_values_must_be_some_and_differ():
    with pytest.raises(ConfigError, match="has no task"):
        as_tasks([])
    with pytest.raises(ConfigError, match="not unique ids"):
        as_tasks([{"id": "a"}, {"id": "a"}])


@pytest.mark.parametrize("value", [{"question": "x"}, 3])
def test_one_task_is_no_list_of_tasks(value):
    with pytest.raises(ConfigError, match="Put one task into a list"):
        as_tasks(value)


def test_a_line_that_is_nested_too_deeply_is_named(file):
    with pytest.raises(ConfigError, match=r"line 2' is nested too deeply"):
        load_tasks(file("1\n" + "[" * 10**6 + "\n"))


def test_tasks_outside_a_file_are_told_apart_by_their_content() -> None:
    asked = {"question": "2 + 2"}
    first, again, other = (task_of(value, "trace") for value in (asked, dict(asked), {"question": "3 + 3"}))
    assert first == again
    assert first.id != other.id
    assert (len(first.id), first.input) == (12, asked)
    assert task_of("a text", "trace") == Task(id="a text", input="a text")
    assert task_of({"id": 7, "q": 1}, "trace").id == "7"
    assert task_of(None, "desk") == Task(id="desk", input=None)
    assert task_of({1, 2}, "trace").input == {1, 2}
