"""pydantic-ai: one agent with two tools, run through its own loop.

python -m examples.gallery.pydantic_clerk --out runs/gallery/pydantic_clerk
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.usage import UsageLimits

import cotune
from cotune.types import Call, Candidate
from examples.gallery import warm
from examples.tool_agent.shop import PRICE_OF, SYSTEM, Question, asked_for, calculate, find, make_tasks

# The application


def search(query: str) -> str:
    """Find the price of an item."""
    return find(query)


def calculator(expression: str) -> str:
    """Calculate a sum of whole numbers."""
    return calculate(expression)


clerk = Agent(
    OpenAIChatModel("shop"),
    name="clerk",
    system_prompt=SYSTEM,
    tools=[search, calculator],
    model_settings={"temperature": 1, "max_tokens": 48},
)


# Added for cotune


@cotune.workflow
async def solve(task: Question) -> bool:
    """Answer one question. pydantic-ai names no agent to cotune, so the application does."""
    with cotune.role("clerk"):
        try:
            result = await clerk.run(task["question"], usage_limits=UsageLimits(request_limit=5))
        except (UsageLimitExceeded, UnexpectedModelBehavior):
            return False
    return result.output.strip() == task["answer"]


def expert(messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """The next step: search for the item, multiply its price, say the number."""
    count, item = asked_for(warm.heard(messages, "user")[0])
    known, total = warm.heard(messages, "tool"), str(count * PRICE_OF[item])
    if total in known:
        return warm.says(total)
    if find(item) in known:
        return warm.calls("calculator", expression=f"{count} * {PRICE_OF[item]}")
    return warm.calls("search", query=item)


@solve.scorer("clerk")
def right_step(candidate: Candidate, call: Call, task: Question) -> float:
    return warm.agrees(candidate, call, expert)


def wrong(chance: random.Random, messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """A step that is usually wrong."""
    item, sum_of = chance.choice(sorted(PRICE_OF)), f"{chance.randint(2, 9)} * {chance.randint(2, 9)}"
    calls = [warm.calls("search", query=item), warm.calls("calculator", expression=sum_of)]
    return chance.choice([*calls, warm.says(str(chance.randint(4, 81)))])


def tasks(count: int, seed: int) -> Iterable[Question]:
    """Questions of customers."""
    return make_tasks(count, seed)


if __name__ == "__main__":
    warm.improve("examples.gallery.pydantic_clerk", wrong, 0.3)
