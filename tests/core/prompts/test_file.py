"""`prompts.json`: what is written is read back; what was changed is refused by name."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.errors import ConfigError
from cotune.prompts.edits import PromptPart, Prompts, Support
from cotune.prompts.file import as_json, read_prompts, write_prompts
from cotune.prompts.templates import Template

PROMPTS = Prompts(
    parts=(
        PromptPart(
            name="writer.system",
            roles=("writer", "critic"),
            kind="system",
            old=Template(("You {write} about ", 1, " for ", 2)),
            new=Template((2, ": write about ", 1, " 🙂")),
            support=Support(calls=12, tasks=4),
        ),
        PromptPart(
            name="writer.tool.find", roles=("writer",), kind="tool", key="find/city", old=Template(("A city.",))
        ),
    ),
    workflow="app:solve",
    models=("gpt-4o",),
    created="2026-01-02",
    cotune="0.1.0",
    provenance={"records": "runs/r1"},
    evaluation={"held_out": {"base": 0.1}},
    trained_with="abc",
)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    file = write_prompts(tmp_path, PROMPTS)
    assert file == tmp_path / "prompts.json"
    assert read_prompts(tmp_path) == read_prompts(file) == PROMPTS
    written = json.loads(file.read_text())
    assert written["id"] == PROMPTS.id and written["parts"][0]["old"] == ["You {write} about ", 1, " for ", 2]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4))
def test_any_text_is_read_back(tmp_path_factory, texts: list[str]) -> None:
    pieces = [piece for number, text in enumerate(texts, 1) for piece in (text, number)]
    part = PromptPart(name="a.user", roles=("a",), kind="user", old=Template.of(pieces), new=Template.of(pieces[::-1]))
    prompts = Prompts(parts=(part,))
    file = tmp_path_factory.getbasetemp() / "prompts.json"
    file.write_bytes(as_json(prompts))
    assert read_prompts(file) == prompts


def test_the_id_is_that_of_the_edits_alone() -> None:
    first, second = PROMPTS.parts
    other = Prompts(parts=(second, first))
    assert other.id == PROMPTS.id != ""
    assert Prompts(parts=(second,)).id == ""


def changed(tmp_path: Path, change) -> Path:
    found = json.loads(as_json(PROMPTS))
    change(found)
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(found))
    return file


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f["parts"][0]["new"].__setitem__(1, "better "), "the new text of writer.system"),
        (lambda f: f["parts"][0]["old"].__setitem__(0, "You "), "the old text of writer.system"),
        (lambda f: f["parts"][0].__setitem__("roles", ["writer"]), "its parts do not match its id"),
        (lambda f: f.__setitem__("format", 2), "has format 2"),
        (lambda f: f.__delitem__("format"), "is not a file of prompts"),
        (lambda f: f["parts"][0].__setitem__("kind", "poem"), "is broken: parts"),
        (lambda f: f["parts"][1].__setitem__("name", "writer.system"), "two parts with the name writer.system"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_prompts(changed(tmp_path, change))


def test_a_lost_slot_is_named(tmp_path: Path) -> None:
    part = PROMPTS.parts[0]
    lost = PromptPart(name=part.name, roles=part.roles, kind=part.kind, old=part.old, new=Template(("gone ", 1)))
    (tmp_path / "prompts.json").write_bytes(as_json(Prompts(parts=(lost,))))
    with pytest.raises(ConfigError, match=r"in writer.system, slot 2 is lost"):
        read_prompts(tmp_path)


@pytest.mark.parametrize(("content", "said"), [(None, "has no file of prompts"), ("{", "is not valid JSON")])
def test_what_is_no_file_of_prompts(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "prompts.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_prompts(tmp_path)
