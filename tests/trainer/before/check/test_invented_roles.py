"""Roles whose names come from an answer: `cotune check` warns if any other name would be a role as well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypedDict

import pytest

from cotune.records.structs import CallRecord, Candidate
from cotune.trainer.before.check.invented import names_in_answers, renamed
from tests.integrations.provider import Provider
from tests.trainer.before.check.test_dry_run import dry, texts
from tests.trainer.tiny_app import application, ask, letters

DESIGN = 'Name an agent and its work, for example "flipper: turn it around".'


async def designed(task: Mapping[str, str]) -> float:
    """A designer names an agent, which then does the work."""
    name, _, work = (await ask("designer", DESIGN)).partition(":")
    await ask(name.strip(), work or "work")
    return 0.0


def about_names(report: Any) -> list[tuple[str, str]]:
    """Level and roles of the findings on invented names."""
    return [(finding.level, finding.about) for finding in report.findings if "invents" in finding.text]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "Each new name becomes a role with a LoRA of its own, which starts untrained."),
        ({"policies": "full"}, "Each new name becomes a role with a model of its own, which starts untrained."),
        (
            {"policy": [{"name": "both", "roles": ["designer", "flipper"]}]},
            "Training does not start if a role calls that no [[policy]] lists.",
        ),
        ({"other_roles": "provider"}, "A name of the first episodes becomes a role with a LoRA of its own."),
        (
            {"other_roles": "provider", "policies": "shared"},
            "A name of the first episodes becomes a role with the shared policy.",
        ),
    ],
)
def test_a_name_from_an_answer_is_an_invented_role(provider: Provider, settings: dict[str, Any], said: str) -> None:
    report = dry(application(designed), config=settings)
    assert about_names(report) == [("warns", "flipper")]
    assert said in texts(report) and "roles_by" in texts(report)
    assert report.trainable


@pytest.mark.parametrize("settings", [{"policies": "shared"}, {"roles": ["flipper"]}])
def test_names_that_share_a_policy_or_are_listed_are_no_finding(provider: Provider, settings: dict[str, Any]) -> None:
    report = dry(application(designed), config=settings)
    assert about_names(report) == []
    assert {"designer", "flipper"} == {role.role for role in report.roles}


def test_a_choice_among_fixed_agents_is_no_invented_role(provider: Provider) -> None:
    async def routed(task: Mapping[str, str]) -> float:
        answer = await ask("router", "Answer with one of: 'writer', 'critic'")
        await ask("critic" if answer == "critic" else "writer", "work")
        return 0.0

    report = dry(application(routed))
    assert {"router", "writer", "critic"} == {role.role for role in report.roles}
    assert about_names(report) == []


@pytest.mark.parametrize("policies", ["lora", "shared"])
def test_an_invented_role_has_no_scorer_under_plan_tree(provider: Provider, policies: str) -> None:
    report = dry(application(designed, designer=letters), config={"policies": policies})
    (finding,) = (finding for finding in report.findings if "invents" in finding.text)
    assert finding.about == "flipper"
    assert finding.text.endswith("only roles with a scorer are trained, and no scorer knows a new name.")
    assert "shared" not in finding.remedy


def repeated_runs(app: Callable[[Mapping[str, str]], Awaitable[float]]) -> tuple[Any, list[str]]:
    """The report on an application, and the lines about runs with other names in their answers."""
    lines: list[str] = []
    report = dry(application(app), say=lines.append)
    return report, [line for line in lines if line.endswith(" on task a, again, with other names in its answers ...")]


def test_after_the_first_invented_role_no_run_is_repeated(provider: Provider) -> None:
    report, again = repeated_runs(designed)
    assert about_names(report) == [("warns", "flipper")] and len(again) == 1


def test_without_a_name_in_an_answer_nothing_runs_again(provider: Provider) -> None:
    runs = 0

    async def plain(task: Mapping[str, str]) -> float:
        nonlocal runs
        runs += 1
        await ask("first", "say something")
        await ask("second", "say more")
        return 0.0

    report = dry(application(plain), tasks=[{"id": "a"}])
    assert runs == report.runs and about_names(report) == []


def test_the_nodes_of_a_graph_that_is_built_from_an_answer_are_invented_roles(provider: Provider) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, StateGraph

    model = ChatOpenAI(model="m")

    class State(TypedDict):
        text: str

    async def work(state: State) -> State:
        return {"text": (await model.ainvoke(state["text"])).text}

    async def in_graph(task: Mapping[str, str]) -> float:
        builder = StateGraph(State)
        name = (await ask("designer", DESIGN)).partition(":")[0].strip()
        builder.add_node(name, work)
        builder.add_edge(START, name)
        await builder.compile().ainvoke({"text": "work"})
        return 0.0

    report = dry(application(in_graph))
    assert about_names(report) == [("warns", "flipper")]
    # The repeated run with another name is not part of the report.
    assert {"designer", "flipper"} == {role.role for role in report.roles}
    assert not report.idle


def test_parallel_agents_of_one_design_are_found_together(provider: Provider) -> None:
    async def two(task: Mapping[str, str]) -> float:
        design = await ask("designer", 'Name two agents, for example "ada and bob".')
        await asyncio.gather(*(ask(name, "work") for name in design.split(" and ")))
        return 0.0

    assert about_names(dry(application(two))) == [("warns", "ada, bob")]


def call(role: str, text: str) -> CallRecord:
    answer = Candidate(index=0, text=text, message={"role": "assistant", "content": text})
    return CallRecord(id=role, episode="e", role=role, step=0, turn=0, candidates=(answer,), chosen=0)


def test_only_whole_words_of_earlier_answers_name_a_role() -> None:
    calls = [call("team/Ada", "ada"), call("plan", "ask ADA, or bobby"), call("bob", "eve"), call("x/eve", "")]
    assert list(names_in_answers(calls)) == [("x/eve", "eve")]
    assert list(names_in_answers([call("plan", "ask ADA"), call("team/Ada", "")])) == [("team/Ada", "Ada")]


def test_of_two_names_the_longer_one_changes() -> None:
    message = {"role": "assistant", "content": "ada-2, ada and Ada-2"}
    assert renamed(message, ["ada", "ada-2"]) == {"role": "assistant", "content": "ada-2x, adax and Ada-2x"}


def test_names_change_in_texts_and_in_arguments_and_not_in_names_of_tools() -> None:
    function = {"name": "ada", "arguments": '{"to": "ada"}'}
    message = {"role": "assistant", "content": "Ada, adam", "tool_calls": [{"id": "1", "function": function}]}
    assert renamed(message, ["ada"]) == {
        "role": "assistant",
        "content": "Adax, adam",
        "tool_calls": [{"id": "1", "function": {"name": "ada", "arguments": '{"to": "adax"}'}}],
    }
    assert function["arguments"] == '{"to": "ada"}'


# Roles that are named after their task


async def named_after_its_task(task: Mapping[str, str]) -> float:
    await ask("lead", "plan")
    await ask(f"worker_{task['number']}", "work")
    return 0.0


def about_tasks(report: Any) -> list[tuple[str, str]]:
    """Level and roles of the findings on roles that are named after their task."""
    return [(finding.level, finding.about) for finding in report.findings if "named after their task" in finding.text]


TWO_TASKS = [{"id": "a", "number": 1}, {"id": "b", "number": 2}]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [("warns", "worker_1")]),
        ({"policies": "shared"}, []),
        ({"roles": ["worker_1", "worker_2"]}, []),
    ],
)
def test_roles_named_after_their_task_are_found_by_a_second_task(
    provider: Provider, settings: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    report = dry(application(named_after_its_task), tasks=TWO_TASKS, config=settings)
    assert about_tasks(report) == expected
    assert {role.role for role in report.roles if role.calls} == {"lead", "worker_1"}
    assert report.tasks == ("a",) and report.trainable
    if expected:
        said = "only task 'a' has worker_1, and only task 'b' has worker_2. Are agents named after their task? Each new"
        assert said in texts(report)


def test_a_role_that_only_one_of_two_tasks_has_is_no_finding(provider: Provider) -> None:
    async def sometimes(task: Mapping[str, str]) -> float:
        await ask("lead", "plan")
        if task["number"] == 2:
            await ask("reviewer", "review")
        return 0.0

    assert about_tasks(dry(application(sometimes), tasks=TWO_TASKS)) == []
