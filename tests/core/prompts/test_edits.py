"""Edits of calls: right, or left alone."""

import copy
import random
from typing import Any

import pytest

from cotune.prompts.edits import CallEdits, PromptPart, Prompts, rewrite_chat
from cotune.prompts.templates import Template


def part(name: str, old: list, new: list | None = None, **more: Any) -> PromptPart:
    kind = name.split(".")[1]
    return PromptPart(
        name=name,
        roles=("writer",),
        kind=kind,
        old=Template.of(old),
        new=None if new is None else Template.of(new),
        **more,
    )


def begun(*parts: PromptPart) -> CallEdits:
    edits = Prompts(parts=parts).edits("writer")
    assert edits is not None
    return edits.begin()


SYSTEM = part("writer.system", ["You write about ", 1, "."], ["Write well about ", 1, "!"])


def test_roles_without_an_edited_part_have_no_edits() -> None:
    prompts = Prompts(parts=(part("writer.system", ["You write."]), part("writer.user", ["a"], ["a"])))
    assert prompts.edits("writer") is None and prompts.edits("reader") is None
    assert prompts.id == "" and prompts.roles == ()


def test_a_chat_request_is_edited_and_shares_the_rest() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You write about cats.", "name": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {}}]},
            {"role": "assistant", "content": "You write about cats."},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d"}}],
    }
    before = copy.deepcopy(body)
    call = begun(SYSTEM)
    new = rewrite_chat(call, body)
    assert body == before
    assert new == {
        **before,
        "messages": [{**before["messages"][0], "content": "Write well about cats!"}, *before["messages"][1:]],
    }
    assert new["tools"] is body["tools"] and new["messages"][2] is body["messages"][2]
    assert (call.outcome, call.edited) == ("edited", 1)


def test_tools_and_schemas_are_edited_by_their_place() -> None:
    schema = {
        "type": "object",
        "description": "the arguments",
        "properties": {
            "city": {"type": "string", "description": "A city."},
            "description": {"type": "string", "description": "A city."},
            "stops": {"type": "array", "items": {"anyOf": [{"description": "A city."}]}},
        },
    }
    body = {
        "messages": [],
        "tools": [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": schema}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "Answer", "schema": schema}},
    }
    parts = [
        part("writer.tool.1", ["Finds."], ["Finds it."], key="find"),
        part("writer.tool.2", ["A city."], ["One city."], key="find/city"),
        part("writer.tool.3", ["A city."], ["One stop."], key="find/stops/items/anyOf/0"),
        part("writer.tool.4", ["the arguments"], ["what it takes"], key="find/"),
        part("writer.format.1", ["A city."], ["Text."], key="Answer/description"),
    ]
    call = begun(*parts)
    new = rewrite_chat(call, body)
    function = new["tools"][0]["function"]
    assert function["description"] == "Finds it."
    assert function["parameters"]["description"] == "what it takes"
    properties = function["parameters"]["properties"]
    assert properties["city"]["description"] == "One city."
    assert properties["description"] is schema["properties"]["description"]
    assert properties["stops"]["items"]["anyOf"][0]["description"] == "One stop."
    answer = new["response_format"]["json_schema"]["schema"]["properties"]
    assert answer["description"]["description"] == "Text."
    assert answer["city"] is schema["properties"]["city"]
    assert call.outcome == "edited" and call.edited == 5


def test_a_tool_of_responses_is_edited_too() -> None:
    call = begun(part("writer.tool", ["Finds."], ["Finds it."], key="find"))
    new = rewrite_chat(call, {"tools": [{"type": "function", "name": "find", "description": "Finds."}]})
    assert new["tools"] == [{"type": "function", "name": "find", "description": "Finds it."}]


def test_a_call_in_which_no_text_is_known_is_unmatched() -> None:
    call = begun(SYSTEM)
    body = {"messages": [{"role": "system", "content": "You write about cats, now"}]}
    assert rewrite_chat(call, body) is body
    assert call.outcome == "prompt_unmatched"
    assert call.difference == f"writer.system differs from character {len('You write about ') + 1} on"
    nothing = begun(SYSTEM)
    assert rewrite_chat(nothing, {"messages": []}) == {"messages": []}
    assert (nothing.outcome, nothing.difference) == ("prompt_unmatched", "it has no text of that kind")


def test_a_prompt_with_two_readings_stays() -> None:
    call = begun(part("writer.user", [1, "\n\n", 2], [2, "\n", 1]))
    assert call.text("user", "", "a\n\nb\n\nc") is None
    assert call.outcome == "prompt_ambiguous" and call.ambiguous == ("writer.user",)


def test_another_prompt_of_the_role_is_left_alone() -> None:
    call = begun(SYSTEM, part("writer.system.2", ["You write about the weather of ", 1, "."]))
    assert call.text("system", "", "You write about the weather of Rome.") is None
    assert call.outcome == "edited" and call.edited == 0


def test_parts_that_match_alike_and_say_different_things_leave_the_text() -> None:
    call = begun(part("writer.user.1", ["Go. ", 1], ["A ", 1]), part("writer.user.2", [1, " End"], ["B ", 1]))
    assert call.text("user", "", "Go. x End") is None
    assert call.outcome == "prompt_ambiguous"


def test_the_task_may_be_unknown_but_a_system_message_may_not() -> None:
    user = part("writer.user", ["Do ", 1], ["Please do ", 1])
    call = begun(SYSTEM, user)
    assert call.text("system", "", "You write about cats.") == "Write well about cats!"
    assert call.text("user", "", "a task") is None
    assert call.outcome == "edited"
    call = begun(SYSTEM, user)
    assert call.text("system", "", "Something else.") is None
    assert call.text("user", "", "Do it") == "Please do it"
    assert call.outcome == "prompt_unmatched"


def test_a_call_without_the_edited_tool_is_known_by_its_prompt() -> None:
    tool = part("writer.tool", ["Finds."], ["Finds it."], key="find")
    system = part("writer.system", ["You write."])
    call = begun(tool, system)
    call.text("system", "", "You write.")
    assert call.outcome == "edited"
    call = begun(tool, system)
    call.text("system", "", "You write.")
    call.text("tool", "find", "Looks.")
    assert call.outcome == "prompt_unmatched"


ALPHABETS = ("abc {}", '{"a": [1]}', "<a></a>\n", "日本語 ", "\\1$%s^(.*)", "\r\n\t ")


def test_two_hundred_odd_prompts_are_right_or_left_alone() -> None:
    """Random templates over texts of every form: an edit gives what the application would have written."""
    dice = random.Random(7)
    edited = 0
    for _ in range(200):
        signs = dice.choice(ALPHABETS)
        text = lambda low, high, signs=signs: "".join(dice.choices(signs, k=dice.randint(low, high)))  # noqa: E731
        old: list[str | int] = []
        for slot in range(1, dice.randint(1, 4)):
            old += [text(1, 30), slot]
        old.append(text(1, 30))
        slots = [piece for piece in old if isinstance(piece, int)]
        if dice.random() < 0.3:
            old = old[:-1]
        new: list[str | int] = [text(1, 9)]
        for slot in dice.sample(slots, len(slots)):
            new += [slot, text(1, 9)]
        values = [text(0, 12) for _ in slots]
        asked, wanted = Template.of(old).fill(values), Template.of(new).fill(values)
        call = begun(part("writer.user", old, new))
        got = rewrite_chat(call, {"messages": [{"role": "user", "content": asked}]})["messages"][0]["content"]
        assert got == wanted or (got == asked and call.outcome == "prompt_ambiguous")
        edited += got == wanted
    assert edited > 120


@pytest.mark.parametrize(
    "odd", [None, "text", 5, [], {"role": "user"}, {"role": "user", "content": [None, 3, {"type": "text"}]}]
)
def test_odd_messages_stay(odd: Any) -> None:
    body = {"messages": [odd], "tools": [odd], "response_format": odd}
    assert rewrite_chat(begun(SYSTEM), body) is body
