"""LangGraph: a supervisor that routes a question to two workers, agents with a tool each, until it is answered.

python -m examples.gallery.langgraph_supervisor --out runs/gallery/langgraph_supervisor
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command

import cotune
from cotune.types import Call, Candidate
from examples.gallery import warm
from examples.tool_agent.shop import PRICE_OF, Question, asked_for, calculate, find, make_tasks

# The application


@tool
def search(query: str) -> str:
    """Find the price of an item."""
    return find(query)


@tool
def calculator(expression: str) -> str:
    """Calculate a sum of whole numbers."""
    return calculate(expression)


class Route(TypedDict):
    """Who works next, or FINISH."""

    next: Literal["prices", "maths", "FINISH"]


model = ChatOpenAI(model="shop", temperature=1, max_tokens=32, api_key=os.environ.get("OPENAI_API_KEY", "none"))
router = model.with_structured_output(Route)
prices = create_agent(model, [search], system_prompt="Search the price.", name="prices")
maths = create_agent(model, [calculator], system_prompt="Calculate the sum.", name="maths")


async def supervisor(state: MessagesState) -> Command[Literal["prices", "maths", "__end__"]]:
    """Choose who works next."""
    route = await router.ainvoke([SystemMessage("Who is next?"), *state["messages"]])
    return Command(goto=END if route["next"] == "FINISH" else route["next"])


async def ask_prices(state: MessagesState) -> Command[Literal["supervisor"]]:
    """Look the price up, and report to the supervisor."""
    return report(await prices.ainvoke(state, {"recursion_limit": 8}), "prices")


async def ask_maths(state: MessagesState) -> Command[Literal["supervisor"]]:
    """Work the sum out, and report to the supervisor."""
    return report(await maths.ainvoke(state, {"recursion_limit": 8}), "maths")


def report(done: Mapping[str, Any], worker: str) -> Command[Literal["supervisor"]]:
    """Send a worker's last message to the supervisor."""
    message = HumanMessage(done["messages"][-1].text, name=worker)
    return Command(goto="supervisor", update={"messages": [message]})


builder = StateGraph(MessagesState)
builder.add_edge(START, "supervisor")
builder.add_node("supervisor", supervisor)
builder.add_node("prices", ask_prices)
builder.add_node("maths", ask_maths)
graph = builder.compile()


# Added for cotune


@cotune.workflow
async def solve(task: Question) -> bool:
    """Answer one question."""
    try:
        state = await graph.ainvoke({"messages": [("user", task["question"])]}, {"recursion_limit": 10})
    except GraphRecursionError:
        return False
    return str(state["messages"][-1].text).strip() == task["answer"]


def expert(messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """The next worker, a worker's call of its tool, or its report of the tool's result."""
    instructions, requests, results = (warm.heard(messages, role) for role in ("system", "user", "tool"))
    count, item = asked_for(requests[0])
    total = str(count * PRICE_OF[item])
    if instructions == ["Who is next?"]:
        worker = "FINISH" if total in requests else "maths" if find(item) in requests else "prices"
        return warm.says(f'{{"next": "{worker}"}}')
    if right := {find(item), total} & {*results}:
        return warm.says(right.pop())
    if instructions == ["Search the price."]:
        return warm.calls("search", query=item)
    return warm.calls("calculator", expression=f"{count} * {PRICE_OF[item]}")


for name in ("supervisor", "prices", "maths"):

    @solve.scorer(name)
    def right_step(candidate: Candidate, call: Call, task: Question) -> float:
        return warm.agrees(candidate, call, expert)


def wrong(chance: random.Random, messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """A step of the same role that is usually wrong."""
    (who,) = warm.heard(messages, "system")
    if who == "Who is next?":
        return warm.says(f'{{"next": "{chance.choice(["prices", "maths", "FINISH"])}"}}')
    item, total = chance.choice(sorted(PRICE_OF)), chance.randint(4, 81)
    if who == "Search the price.":
        return chance.choice([warm.calls("search", query=item), warm.says(find(item))])
    sum_of = f"{chance.randint(2, 9)} * {chance.randint(2, 9)}"
    return chance.choice([warm.calls("calculator", expression=sum_of), warm.says(str(total))])


def tasks(count: int, seed: int) -> Iterable[Question]:
    """Questions of customers."""
    return make_tasks(count, seed)


if __name__ == "__main__":
    warm.improve("examples.gallery.langgraph_supervisor", wrong, 0.2)
