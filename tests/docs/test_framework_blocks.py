"""The python blocks of the pages on AutoGen and CrewAI run, and every workflow that they make runs an episode."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import cotune
from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import Workflow, workflow_of
from cotune.records.structs import Task
from tests.integrations.provider import said, serving
from tests.integrations.recorded import Sink
from tests.test_docs import ROOT, blocks

TASK = {"question": "what is 2 + 2?", "topic": "sums", "answer": "re:"}


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module `my_app` that the pages suppose; its models ask a provider, which says what it was asked."""
    with serving() as provider:
        provider.reply = said
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        module = ModuleType("my_app")
        monkeypatch.setitem(sys.modules, "my_app", module)
        yield module


def workflows_of(page: str, monkeypatch: pytest.MonkeyPatch) -> list[Workflow]:
    """The workflows that the blocks of a page make, in their order."""
    made: list[Workflow] = []
    original: Callable[..., Any] = cotune.workflow

    def noted(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        made.append(workflow_of(found))
        return found

    monkeypatch.setattr(cotune, "workflow", noted)
    names: dict[str, Any] = {"__name__": "app", "os": os}
    for text in blocks(ROOT / "docs" / page, "python"):
        exec(compile(text.replace("task: ...", "task: 1.0"), page, "exec"), names)
    return made


def roles_in_an_episode(flow: Workflow) -> list[str]:
    """Who was asked in an episode, which ends well."""
    sink = Sink()
    outcome = asyncio.run(run_episode(flow, Task(id="t", input=TASK), sink=sink))
    assert outcome.error is None
    assert outcome.rewards == {"team": 1.0}
    return [call.role for call in sink.calls()]


def test_the_blocks_of_autogen(application: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    def make_team() -> RoundRobinGroupChat:
        client = OpenAIChatCompletionClient(model="gpt-4o-mini")
        return RoundRobinGroupChat([AssistantAgent(name, client) for name in ("planner", "critic")], max_turns=2)

    application.make_team, application.team = make_team, make_team()  # type: ignore[attr-defined]
    made = workflows_of("frameworks/autogen.md", monkeypatch)
    assert [roles_in_an_episode(flow) for flow in made] == [["planner", "critic"]] * 2


def test_the_blocks_of_crewai(application: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CREWAI_DISABLE_TELEMETRY", "CREWAI_TRACING_ENABLED", "CREWAI_DISABLE_VERSION_CHECK"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back after the block that sets them
    from crewai import LLM, Agent, Crew
    from crewai import Task as CrewTask
    from crewai.flow.flow import Flow, start

    def make_crew() -> Crew:
        agent = Agent(role="Writer", goal="write", backstory="a writer", llm=LLM(model="openai/gpt-4o-mini"))
        return Crew(agents=[agent], tasks=[CrewTask(description="on {topic}", expected_output="e", agent=agent)])

    class MyFlow(Flow[dict[str, Any]]):
        @start()
        def write(self) -> str:
            return make_crew().kickoff(inputs=self.state["task"]).raw

    application.make_crew, application.crew, application.MyFlow = make_crew, make_crew(), MyFlow  # type: ignore[attr-defined]
    made = workflows_of("frameworks/crewai.md", monkeypatch)
    assert [roles_in_an_episode(flow) for flow in made] == [["Writer"]] * 3
