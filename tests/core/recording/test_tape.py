"""Tool results: what tells two uses apart, what is kept, and what is given again."""

from __future__ import annotations

from typing import Any

import pytest

from cotune.recording.tape import RecordedResult, Tape, arguments_of


class Broken:
    def model_dump(self):
        raise ValueError("no fields yet")


def use(tape: Tape, name: str, arguments: Any, value: Any = None) -> tuple[bool, Any]:
    """Use a tool that would return `value`: whether its result was known, and what it was."""
    with tape.use_tool(name, arguments) as found:
        if not found.known:
            found.value = value
        tape.record_result(found, 1.0, 0.0)
    return found.known, found.value


def kept(tape: Tape) -> list[RecordedResult]:
    bodies, results = tape.records(None)
    values = {body.id: body.body["result"] for body in bodies}
    return [RecordedResult(one.name, one.arguments, one.started, values[one.value]) for one in results]


def test_results_are_given_by_name_and_arguments_in_their_order_and_kept_again():
    trunk = Tape()
    for name, arguments, value in (("a", [[1], {}], "one"), ("a", [[1], {}], "two"), ("b", [[1], {}], None)):
        assert use(trunk, name, arguments, value) == (False, value)
    again = Tape()
    again.set_recorded(kept(trunk))
    assert use(again, "a", [[2], {}], "new") == (False, "new")
    assert [use(again, "a", [[1], {}], "new") for _ in range(3)] == [(True, "one"), (True, "two"), (False, "new")]
    assert use(again, "b", [[1], {}], "new") == (True, None)
    assert [one.value for one in kept(again)] == ["new", "one", "two", "new", None]


def test_only_json_is_kept_and_nothing_that_made_calls_or_a_redactor_changes():
    tape = Tape()
    for value in (object(), (1, 2), float("nan"), {1: 2}, {"a": [1, None, "x"]}):
        use(tape, "a", [], value)
    assert [one.value for one in kept(tape)] == [{"a": [1, None, "x"]}]
    assert tape.records(lambda message: message["role"] == "tool") == ([], ())
    with tape.use_tool("agent", []) as found:
        found.calls += 1
        found.value = "said"
        assert tape.record_result(found, 1.0, 0.0)
    assert len(kept(tape)) == 1


def test_an_episode_without_an_end_keeps_nothing():
    tape = Tape()
    tape.records_results = False
    use(tape, "a", [], "x")
    assert tape.records(None) == ([], ())


def test_arguments_that_are_no_json_stand_by_their_type():
    tape = Tape()
    first, second = arguments_of([object()], {"q": 1, "config": 2}, ["config"]), arguments_of([object()], {"q": 1})
    use(tape, "a", first, "x")
    again = Tape()
    again.set_recorded(kept(tape))
    assert use(again, "a", second, "y") == (True, "x")


@pytest.mark.parametrize(
    "argument",
    [{(1, 2): 3}, {1: "a", "b": 2}, "\ud800", pytest.param([], id="itself"), pytest.param(Broken(), id="broken")],
)
def test_a_tool_may_take_what_no_json_holds(argument):
    if argument == []:
        argument.append(argument)
    trunk, again = Tape(), Tape()
    assert use(trunk, "a", [argument], "x") == (False, "x")
    again.set_recorded(kept(trunk))
    assert use(again, "a", ["other"], "y") == (False, "y")
    assert use(again, "a", [argument], "y") == (True, "x")


def test_what_an_application_changes_after_its_tool_has_returned_is_in_no_record_and_no_other_branch():
    trunk, arguments, value = Tape(), [[3, 1, 2]], {"found": ["a"]}
    with trunk.use_tool("a", arguments) as found:
        arguments[0].sort()
        found.value = value
        trunk.record_result(found, 1.0, 0.0)
    value["found"].append("b")
    results = kept(trunk)
    assert [one.value for one in results] == [{"found": ["a"]}]
    for _ in range(2):
        branch = Tape()
        branch.set_recorded(results)
        known, given = use(branch, "a", [[3, 1, 2]])
        assert (known, given) == (True, {"found": ["a"]})
        given["found"].append("b")
