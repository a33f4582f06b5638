"""The applications of `benchmarks.blame_training`, and a provider that is always right in each of their roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langgraph.graph import END, START, StateGraph

import cotune
from cotune.types import Call, Candidate
from examples.word_problems import app
from examples.word_problems.app import ATTEMPTS, CHECKER, calculator, checker, model, planner
from examples.word_problems.tasks import Problem
from examples.word_problems.train import sum_written, verdict_given

REPLANNER = "The first sum was rejected. Write another sum that answers the question."
REPORTER = "Repeat the number after Result."

replanner_model = model("replanner", max_tokens=24, stop=["\n", "="])
reporter_model = model("reporter", max_tokens=6, stop=["\n"])


class State(app.State, total=False):
    """State of a problem with four roles: also what the reporter wrote."""

    report: str


async def replanner(state: State) -> dict[str, Any]:
    """Write another sum after a rejected one."""
    messages = [{"role": "system", "content": REPLANNER}, *app.PLANNER[1:]]
    reply = await replanner_model.ainvoke([*messages, {"role": "user", "content": state["question"]}])
    return {"sum": reply.text.strip(), "attempts": state["attempts"] + 1}


async def reporter(state: State) -> dict[str, Any]:
    """Write the answer that was accepted."""
    messages = [
        {"role": "system", "content": REPORTER},
        {"role": "user", "content": f"Sum: {state['sum']}\nResult: {state['value']}"},
    ]
    return {"report": (await reporter_model.ainvoke(messages)).text.strip()}


def after_check(state: State) -> str:
    """Report an accepted sum, plan a rejected one once more."""
    if "answer" in state:
        return "reporter"
    return END if state["attempts"] >= ATTEMPTS else "replanner"


builder = StateGraph(State)
builder.add_node("planner", planner)
builder.add_node("calculator", calculator)
builder.add_node("checker", checker)
builder.add_node("replanner", replanner)
builder.add_node("reporter", reporter)
builder.add_edge(START, "planner")
builder.add_edge("planner", "calculator").add_edge("replanner", "calculator").add_edge("calculator", "checker")
builder.add_conditional_edges("checker", after_check, ["reporter", "replanner", END])
builder.add_edge("reporter", END)
graph = builder.compile()


@cotune.workflow
async def four_roles(task: Problem) -> bool:
    """Solve one problem: right is what the reporter writes."""
    state = await graph.ainvoke({"question": task["question"]})
    return state.get("report") == task["answer"]


four_roles.scorer("planner")(sum_written)
four_roles.scorer("replanner")(sum_written)
four_roles.scorer("checker")(verdict_given)


@four_roles.scorer("reporter")
def number_repeated(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether the report is the calculated value."""
    return {"team": float(candidate.text.strip() == call.state["value"])}


@dataclass(frozen=True)
class Application:
    """An application and its roles."""

    name: str
    workflow: str
    roles: tuple[str, ...]


APPLICATIONS = {
    "word_problems": Application("word_problems", "examples.word_problems.train:solve", ("planner", "checker")),
    "four_roles": Application(
        "four_roles",
        f"{__name__}:four_roles",
        ("planner", "checker", "replanner", "reporter"),
    ),
}


def right_answer(answers: Mapping[str, str], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Answer as the role that the system message belongs to, by the right answer of each question."""
    instruction, request = messages[0]["content"], messages[-1]["content"]
    if instruction == REPORTER:
        text = request.rpartition("Result: ")[2]
    elif instruction == CHECKER:
        question, _, rest = request.partition("\nSum: ")
        text = "yes" if rest.rpartition("Result: ")[2] == answers[question] else "no"
    else:
        text = answers[request]  # a number is a sum, too
    return {"role": "assistant", "content": text}
