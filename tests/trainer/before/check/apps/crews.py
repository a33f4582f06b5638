"""CrewAI: crews with tools and typed results, flows with a router, an agent of the module."""

from __future__ import annotations

import functools
from datetime import date
from typing import Any

from crewai import LLM, Agent, Crew, Flow, Task
from crewai.flow.flow import listen, router, start
from crewai.tools import tool
from pydantic import BaseModel

import cotune
from tests.trainer.before.check.apps.table import NOT, Row


@functools.cache
def model() -> LLM:
    return LLM(model="openai/gpt-4o-mini", api_key="none", max_retries=0)


def agent(role: str, **options: Any) -> Agent:
    return Agent(role=role, goal="g", backstory="b", llm=model(), **options)


class Trip(BaseModel):
    city: str
    nights: int


def booking() -> Any:
    @tool("weather")
    def weather(day: str) -> str:
        """The weather on a day, given as YYYY-MM-DD."""
        return f"sunny, {date.fromisoformat(day):%A}"

    guide = agent("Guide", tools=[weather])
    tasks = [Task(description="plan a trip", expected_output="a trip", agent=guide, output_pydantic=Trip)]
    crew = Crew(agents=[guide], tasks=tasks)
    return cotune.workflow(crew, inputs=lambda one: {}, reward=lambda result, one: float(result.pydantic.nights > 0))


class Desk(Flow):
    """A router that takes what a model says for the name of the way."""

    @start()
    def classify(self) -> str:
        return str(model().call("Is it 'simple' or 'hard'?"))

    @router(classify)
    def choose(self, found: str) -> str:
        return "hard" if "hard" in found else "simple"

    @listen("simple")
    def answer(self) -> str:
        return str(model().call("Answer."))

    @listen("hard")
    def research(self) -> str:
        return str(model().call("Research."))

    @listen("unheard")
    def complain(self) -> str:
        return "never"


def desk() -> Any:
    return cotune.workflow(Desk, inputs=lambda one: {}, reward=lambda state, one: 1.0)


def agent_of_the_module() -> Any:
    writer = agent("Writer")
    job = Task(description="write", expected_output="text", agent=writer)

    class Writing(Flow):
        @start()
        def write(self) -> str:
            return str(Crew(agents=[writer], tasks=[job]).kickoff())

    @cotune.workflow
    async def solve(one: Any) -> float:
        return float(len(await Writing().kickoff_async()))

    return solve


def planned() -> Any:
    jobs = [Task(description=f"job {n}", expected_output="text", agent=agent(f"Worker {n}")) for n in range(2)]
    crew = Crew(agents=[job.agent for job in jobs], tasks=jobs, planning=True, planning_llm=model())
    return cotune.workflow(crew, inputs=lambda one: {}, reward=lambda result, one: 1.0)


ROWS = {
    "planned": Row(
        planned, {"Task Execution Planner", "Worker 0", "Worker 1"}, never=["roles that did not call may be missing"]
    ),
    "booking": Row(booking, {"Guide"}),
    "desk": Row(desk, {"classify", "answer", "research"}, says=[("warns", "never ran"), ("warns", "complain")]),
    "agent_of_the_module": Row(agent_of_the_module, {"Writer"}, NOT, [("blocks", "two episodes")]),
}
