"""A LangChain agent with two tools: it looks prices up in a list, calculates, and answers a customer.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.tool_agent.app --tasks 5
"""

from __future__ import annotations

import argparse
import os

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from examples.tool_agent.shop import SYSTEM, calculate, find, make_tasks

TURNS = 5
"""Most model calls for one question."""


@tool
def search(query: str) -> str:
    """Find the price of an item."""
    return find(query)


@tool
def calculator(expression: str) -> str:
    """Calculate a sum of whole numbers."""
    return calculate(expression)


model = ChatOpenAI(model="clerk", temperature=1, max_tokens=24, api_key=os.environ.get("OPENAI_API_KEY", "none"))
agent = create_agent(
    model,
    [search, calculator],
    system_prompt=SYSTEM,
    middleware=[ModelCallLimitMiddleware(run_limit=TURNS)],
    name="clerk",
)


async def answer(question: str) -> str:
    """Return the agent's final answer."""
    state = await agent.ainvoke({"messages": [("user", question)]})
    return str(state["messages"][-1].text).strip()


async def main() -> None:
    """Answer some questions with whatever OPENAI_BASE_URL points at, and print how many answers are right."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tasks = list(make_tasks(options.tasks, options.seed))
    answers = await asyncio.gather(*(answer(task["question"]) for task in tasks))
    right = 0
    for task, text in zip(tasks, answers, strict=True):
        print(f"{task['question']} {text}")
        right += text == task["answer"]
    print(f"{right} of {len(tasks)} are right")


if __name__ == "__main__":
    import asyncio

    asyncio.run(main())
