"""A LangGraph application: a planner writes a sum, a calculator works it out, and a checker accepts it or not.

A rejected sum is planned once more. If the second one is rejected too, there is no answer.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.word_problems.app --tasks 3
"""

from __future__ import annotations

import argparse
import os
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from examples.word_problems.calculator import calculate

ATTEMPTS = 2
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
PLANNER: list[dict[str, str]] = [
    {"role": "system", "content": "Write the sum that answers the question."},
    {"role": "user", "content": "How many legs do 3 dogs, 2 bees have?"},
    {"role": "assistant", "content": "3 * 4 + 2 * 6"},
    {"role": "user", "content": "What is 7 - 12?"},
    {"role": "assistant", "content": "7 - 12"},
]
CHECKER = "Does the sum answer the question? Say yes or no."


class State(TypedDict, total=False):
    """State of a problem: the question, the newest sum, its value, attempts so far, and the answer once accepted."""

    question: str
    sum: str
    value: str
    attempts: int
    answer: str


def model(role: str, **settings: Any) -> ChatOpenAI:
    """The chat model that plays a role; served under the role's name."""
    return ChatOpenAI(model=role, temperature=1, api_key=API_KEY, **settings)


planner_model = model("planner", max_tokens=24, stop=["\n", "="])
checker_model = model("checker", max_tokens=4, stop=["\n"])


async def planner(state: State) -> State:
    """Write a sum."""
    reply = await planner_model.ainvoke([*PLANNER, {"role": "user", "content": state["question"]}])
    return {"sum": reply.text.strip(), "attempts": state.get("attempts", 0) + 1}


def calculator(state: State) -> State:
    """Work it out."""
    return {"value": calculate(state["sum"])}


async def checker(state: State) -> State:
    """Accept it, or not."""
    content = f"{state['question']}\nSum: {state['sum']}\nResult: {state['value']}"
    reply = await checker_model.ainvoke([{"role": "system", "content": CHECKER}, {"role": "user", "content": content}])
    return {"answer": state["value"]} if verdict(reply.text) else {}


def verdict(text: str) -> bool | None:
    """Whether the checker says yes or no; None when it says neither."""
    words = text.lower().replace(".", " ").replace(",", " ").split()
    return {"yes": True, "no": False}.get(words[0]) if words else None


def onward(state: State) -> str:
    """Another attempt, until a sum is accepted or the attempts are over."""
    return END if "answer" in state or state["attempts"] >= ATTEMPTS else "planner"


builder = StateGraph(State)
builder.add_node("planner", planner)
builder.add_node("calculator", calculator)
builder.add_node("checker", checker)
builder.add_edge(START, "planner")
builder.add_edge("planner", "calculator")
builder.add_edge("calculator", "checker")
builder.add_conditional_edges("checker", onward, ["planner", END])
graph = builder.compile()


async def main() -> None:
    """Solve held-out problems with whatever OPENAI_BASE_URL points at, and print how many answers are right."""
    from examples.word_problems.tasks import make_tasks

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--skip", type=int, default=512, help="problems before these (default: %(default)s)")
    options = parser.parse_args()
    tasks = make_tasks(options.tasks, options.skip)
    states = await graph.abatch([{"question": task["question"]} for task in tasks], {"max_concurrency": 32})
    for task, state in zip(tasks, states, strict=True):
        print(f"{task['question']} {state['sum']} = {state.get('answer', 'no answer')}")
    right = sum(state.get("answer") == task["answer"] for task, state in zip(tasks, states, strict=True))
    print(f"{right} of {len(tasks)} are right")


if __name__ == "__main__":
    import asyncio

    asyncio.run(main())
