"""What a made-up answer takes from the prompt and the tools."""

from __future__ import annotations

import json

from cotune.trainer.before.stub.words import asked_json, choices_of, names_in


def system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}]


def test_names_that_the_prompt_lists_and_words_that_it_stresses_are_choices() -> None:
    text = "Pick one of ['writer', 'critic'] or say FINISH. You MUST answer in JSON. Never say writers."
    assert choices_of(system(text), ["writer", "critic", "lawyer"], ["Fin."]) == ["writer", "critic", "FINISH", "Fin."]
    assert choices_of(system("You are the writer."), ["writer", "critic"], []) == []
    earlier = [{"role": "user", "content": "say STOP"}, {"role": "user", "content": "go on"}]
    assert choices_of(earlier, [], []) == [], "only what is asked now counts"


def test_json_is_made_from_the_schema_or_the_example_that_a_prompt_shows() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    asked = system(f"Answer by this schema: {json.dumps(schema)}")
    assert [asked_json(asked, i) for i in range(2)] == ['{"ok": true}', '{"ok": false}']
    assert asked_json(system('Answer in JSON like {"score": 3} please'), 0) == '{"score": 3}'
    assert asked_json(system('{"score": 3}'), 0) is None
    assert asked_json(system("Answer in JSON {with keys}"), 0) is None


def delegate(parameter: str, description: str) -> dict[str, object]:
    return {"description": description, "parameters": {"properties": {parameter: {"type": "string"}}}}


def test_a_tool_that_hands_over_knows_names() -> None:
    crew = delegate("coworker", "Delegate to one of the following coworkers: Field Researcher, Fact Checker\nInput: x")
    assert names_in(crew, []) == ("coworker", ["Field Researcher", "Fact Checker"])
    assert names_in(crew, ["Fact Checker", "Editor"]) == ("coworker", ["Fact Checker"])
    task = delegate("subagent_type", "Launch a sub-agent. Available:\n- research-agent: finds\n- critic: judges")
    assert names_in(task, []) == ("subagent_type", ["research-agent", "critic"])
    assert names_in(delegate("query", "- one: x"), ["one"]) == ("", [])


def test_a_form_that_is_sketched_with_types_is_filled_in() -> None:
    text = """Answer in pure JSON:
    {
       "is_request_satisfied": {"reason": string, "answer": boolean},
       "next_speaker": {
            "reason": string,
            "answer": string (select from: coder, surfer)
        },
        "steps": [string],
        "age": <int>,
        "kind": "plan"
    }"""
    values = [json.loads(asked_json(system(text), n, ["coder", "surfer", "boss"]) or "") for n in range(3)]
    assert [value["next_speaker"]["answer"] for value in values] == ["coder", "surfer", "coder"]
    assert [value["is_request_satisfied"]["answer"] for value in values] == [False, False, True]
    assert [(value["steps"], value["age"], value["kind"]) for value in values[:1]] == [(["a"], 1, "plan")]
