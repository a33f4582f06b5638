"""CrewAI: a flow in which one agent sends a ticket to a team and another answers the customer.

python -m examples.gallery.crewai_flow --out runs/gallery/crewai_flow
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")
os.environ.setdefault("CREWAI_DISABLE_VERSION_CHECK", "true")

from crewai import LLM, Agent
from crewai.events.utils.console_formatter import set_suppress_console_output
from crewai.flow.flow import Flow, listen, start
from pydantic import BaseModel

import cotune
from cotune.types import Call, Candidate
from examples.gallery import warm
from examples.support_desk.base import GREETINGS, TOPICS, ticket

set_suppress_console_output(True)
logging.getLogger("crewai.llms.base_llm").setLevel(logging.ERROR)


# The application


class Desk(BaseModel):
    """State of the flow: the ticket and its language, the team that was chosen, and the reply."""

    ticket: str = ""
    language: str = ""
    team: str = ""
    reply: str = ""


def member(role: str, goal: str, backstory: str) -> Agent:
    """An agent of the desk."""
    llm = LLM(model=role, provider="openai", temperature=1, max_tokens=8, api_key=os.environ.get("OPENAI_API_KEY"))
    return Agent(role=role, goal=goal, backstory=backstory, llm=llm)


triage = member("triage", "name the team", "You sort tickets.")
writer = member("writer", "greet and name the team", "You answer customers.")


class SupportFlow(Flow[Desk]):
    """A ticket, from the customer to the reply."""

    suppress_flow_events = True

    @start()
    async def sort(self) -> None:
        self.state.team = (await triage.kickoff_async(self.state.ticket)).raw.strip()

    @listen(sort)
    async def answer(self) -> None:
        self.state.reply = (await writer.kickoff_async(f"{self.state.language} {self.state.team}")).raw.strip()


# Added for cotune


@cotune.workflow
async def solve(task: dict[str, str]) -> bool:
    """Answer one ticket."""
    flow = SupportFlow()
    await flow.kickoff_async(inputs={"ticket": task["ticket"], "language": task["language"]})
    return flow.state.reply == f"{GREETINGS[task['language']]} {task['team']}"


def expert(messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """The team of a ticket, or the greeting and the team, by what is asked."""
    words = warm.heard(messages, "user")[-1].split()
    if language := next((word for word in words if word in GREETINGS), None):
        return warm.says(f"{GREETINGS[language]} {' '.join(word for word in words if word in TOPICS)}".strip())
    return warm.says(next((team for team, topics in TOPICS.items() if set(topics) & set(words)), "billing"))


for name in ("triage", "writer"):

    @solve.scorer(name)
    def right_answer(candidate: Candidate, call: Call, task: dict[str, str]) -> float:
        return warm.agrees(candidate, call, expert)


def wrong(chance: random.Random, messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """A team with or without a greeting: usually the wrong one."""
    team, greeting = chance.choice(sorted(TOPICS)), chance.choice([*GREETINGS.values()])
    return warm.says(chance.choice([team, f"{greeting} {team}"]))


def tasks(count: int, seed: int) -> Iterable[dict[str, str]]:
    """Tickets."""
    rng = random.Random(seed)
    return (ticket(rng, number) for number in range(count))


if __name__ == "__main__":
    warm.improve("examples.gallery.crewai_flow", wrong)
