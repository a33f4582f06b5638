"""AutoGen: a team of two assistants that speak in turn, each with a tool.

python -m examples.gallery.autogen_team --out runs/gallery/autogen_team
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

import cotune
from cotune.types import Call, Candidate
from examples.gallery import warm
from examples.tool_agent.shop import PRICE_OF, Question, asked_for, calculate, find, make_tasks

# The application


async def search(query: str) -> str:
    """Find the price of an item."""
    return find(query)


async def calculator(expression: str) -> str:
    """Calculate a sum of whole numbers."""
    return calculate(expression)


model = OpenAIChatCompletionClient(
    model="shop",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    base_url=os.environ.get("OPENAI_BASE_URL"),
    temperature=1,
    max_tokens=48,
    model_info={
        "vision": False, "function_calling": True, "json_output": False, "family": "unknown",
        "structured_output": False,
    },
)  # fmt: skip


def team() -> RoundRobinGroupChat:
    """A new team: the first looks the price up, the second works the sum out."""
    prices = AssistantAgent("prices", model, tools=[search], system_message="Search the price.")
    maths = AssistantAgent("maths", model, tools=[calculator], system_message="Calculate the sum.")
    return RoundRobinGroupChat([prices, maths], termination_condition=MaxMessageTermination(3))


# Added for cotune


@cotune.workflow
async def solve(task: Question) -> bool:
    """Answer one question."""
    result = await team().run(task=task["question"])
    return str(getattr(result.messages[-1], "content", "")).strip() == task["answer"]


def expert(messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """The call of the one who is asked: the search, or the sum with the price that was found."""
    who, asked = warm.heard(messages, "system")[0], warm.heard(messages, "user")
    count, item = asked_for(asked[0])
    if who == "Search the price.":
        return warm.calls("search", query=item)
    return warm.calls("calculator", expression=f"{count} * {PRICE_OF[item]}")


for name in ("prices", "maths"):

    @solve.scorer(name)
    def right_call(candidate: Candidate, call: Call, task: Question) -> float:
        return warm.agrees(candidate, call, expert)


def wrong(chance: random.Random, messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """A call of one of the tools that is usually wrong."""
    item, sum_of = chance.choice(sorted(PRICE_OF)), f"{chance.randint(2, 9)} * {chance.randint(2, 9)}"
    return chance.choice([warm.calls("search", query=item), warm.calls("calculator", expression=sum_of)])


def tasks(count: int, seed: int) -> Iterable[Question]:
    """Questions of customers."""
    return make_tasks(count, seed)


if __name__ == "__main__":
    warm.improve("examples.gallery.autogen_team", wrong)
