"""OpenAI Agents SDK: a triage agent hands a ticket to one of three teams, whose agent answers.

python -m examples.gallery.agents_handoffs --out runs/gallery/agents_handoffs
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI

import cotune
from cotune.types import Call, Candidate
from examples.gallery import warm
from examples.support_desk.base import GREETINGS, TOPICS, ticket

set_tracing_disabled(True)

# The application


model = OpenAIChatCompletionsModel(model="desk", openai_client=AsyncOpenAI())


def agent(name: str, instructions: str, handoffs: Sequence[Agent] = ()) -> Agent:
    """An agent of the desk."""
    settings = ModelSettings(temperature=1, max_tokens=32)
    return Agent(name=name, instructions=instructions, model=model, model_settings=settings, handoffs=[*handoffs])


teams = [agent(team, f"Greet the customer and say {team}.") for team in TOPICS]
triage = agent("triage", "Hand the ticket to its team.", teams)


# Added for cotune


@cotune.workflow
async def solve(task: dict[str, str]) -> bool:
    """Answer one ticket."""
    try:
        result = await Runner.run(triage, f"{task['language']} {task['ticket']}", max_turns=4)
    except (MaxTurnsExceeded, ModelBehaviorError):  # the second: a tool that the agent does not have
        return False
    return str(result.final_output).strip() == f"{GREETINGS[task['language']]} {task['team']}"


def expert(messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """The hand-off to the right team, or the greeting of the team that has the ticket."""
    who, words = warm.heard(messages, "system")[0], warm.heard(messages, "user")[0].split()
    if who.startswith("Hand"):
        team = next(team for team, topics in TOPICS.items() if set(topics) & set(words))
        return warm.calls(f"transfer_to_{team}")
    return warm.says(f"{GREETINGS[words[0]]} {who.split()[-1].rstrip('.')}")


for name in ("triage", *TOPICS):

    @solve.scorer(name)
    def right_step(candidate: Candidate, call: Call, task: dict[str, str]) -> float:
        return warm.agrees(candidate, call, expert)


def wrong(chance: random.Random, messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """A hand-off or a greeting that is usually wrong."""
    team, greeting = chance.choice(sorted(TOPICS)), chance.choice([*GREETINGS.values()])
    return chance.choice([warm.calls(f"transfer_to_{team}"), warm.says(f"{greeting} {team}")])


def tasks(count: int, seed: int) -> Iterable[dict[str, str]]:
    """Tickets."""
    rng = random.Random(seed)
    return (ticket(rng, number) for number in range(count))


if __name__ == "__main__":
    warm.improve("examples.gallery.agents_handoffs", wrong)
