"""A LangGraph application: a coder writes a program, a unit tester writes tests, and both see where they disagree.

The program is run on the tests in a sandbox. While it fails one, both go on, up to four turns. A single agent writes a
program, and that is its answer.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.code.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from examples.workloads.code.programs import Test, matches, program_in, run, tests_in
from examples.workloads.sandbox.bubblewrap import Ran

TURNS = 4
SHOWN = 600
"""Characters of a program's output that are shown to the roles."""
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
CODER = "Write a Python program that solves the task. Answer with the whole program between ```python and ``` marks."
FUNCTION = "Write the Python function {name}. Answer with all of its code between ```python and ``` marks."
TESTER = """Write tests for the task: inputs that tell right programs from wrong ones, with their right outputs.
Write each as
**Test Input:**
```
input
```
**Test Output:**
```
output
```"""
CALLED = " The input is the JSON list of {name}'s arguments, the output its result as JSON."
CODER_AGAIN = "Tests may be wrong. Correct the program if it is."
TESTER_AGAIN = "The program may be wrong. Correct the tests that are."


class State(TypedDict, total=False):
    """State of a task: the question and the name of the function that it asks for, the newest program and tests, what
    went wrong on which of them, and turns taken."""

    question: str
    function: str
    program: str | None
    tests: list[Test]
    failures: list[str]
    turns: int


def model(role: str) -> ChatOpenAI:
    """The chat model that plays a role; served under the role's name."""
    return ChatOpenAI(model=role, temperature=1, api_key=API_KEY)


coder_model, tester_model, agent_model = map(model, ("coder", "tester", "agent"))


def messages(system: str, state: State, again: str) -> list[dict[str, str]]:
    """A role's prompt: the question, and from the second turn on its program, its failures, and what to do."""
    content = state["question"]
    if state.get("failures"):
        program = state["program"] or "(none)"
        content = "\n\n".join([content, f"Program:\n{program}", *state["failures"], again])
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def coder_messages(state: State) -> list[dict[str, str]]:
    """What the coder is asked, and at first the single agent too."""
    name = state.get("function")
    return messages(FUNCTION.format(name=name) if name else CODER, state, CODER_AGAIN)


def tester_messages(state: State) -> list[dict[str, str]]:
    """What the tester is asked."""
    name = state.get("function")
    return messages(TESTER + CALLED.format(name=name) if name else TESTER, state, TESTER_AGAIN)


async def coder(state: State) -> State:
    """Write a program, or a better one."""
    reply = await coder_model.ainvoke(coder_messages(state))
    return {"program": program_in(reply.text), "turns": state.get("turns", 0) + 1}


async def tester(state: State) -> State:
    """Write tests, or better ones."""
    reply = await tester_model.ainvoke(tester_messages(state))
    return {"tests": tests_in(reply.text)}


async def agent(state: State) -> State:
    """Write a program alone; nobody tests it."""
    reply = await agent_model.ainvoke(coder_messages(state))
    return {"program": program_in(reply.text), "turns": 1}


async def runner(state: State) -> State:
    """Run the program on the tests."""
    program, function = state["program"], state.get("function", "")
    if program is None or not state["tests"]:
        return {"failures": ["There is no program." if program is None else "There are no tests."]}
    ran = [await asyncio.to_thread(run, program, test["input"], function) for test in state["tests"]]
    pairs = zip(ran, state["tests"], strict=True)
    return {"failures": [failure(found, test) for found, test in pairs if not matches(found, test, function)]}


def failure(ran: Ran, test: Test) -> str:
    """How a program fails a test, for both roles."""
    ended = "" if ran.ok else f"It did not end well ({ran.ended}, code {ran.code}): {ran.stderr[-SHOWN:]}\n"
    wrote = f"It wrote:\n{ran.stdout[:SHOWN]}"
    return f"Input:\n{test['input'][:SHOWN]}\nThe test expects:\n{test['output'][:SHOWN]}\n{ended}{wrote}"


def onward(state: State) -> str:
    """Another turn, until program and tests agree or the turns are over."""
    return "coder" if state["failures"] and state["turns"] < TURNS else END


builder = StateGraph(State)
builder.add_node("coder", coder)
builder.add_node("tester", tester)
builder.add_node("runner", runner)
builder.add_edge(START, "coder")
builder.add_edge("coder", "tester")
builder.add_edge("tester", "runner")
builder.add_conditional_edges("runner", onward, ["coder", END])
graph = builder.compile()

single = StateGraph(State)
single.add_node("agent", agent)
single.add_edge(START, "agent")
single.add_edge("agent", END)
single_graph = single.compile()


def asked(task: Any) -> State:
    """What the graph is given of a task: nothing that is hidden."""
    return {"question": task["question"], "function": task["function"]}


async def main() -> None:
    """Solve problems with whatever OPENAI_BASE_URL points at, and print how many programs pass all hidden tests."""
    from examples.workloads.code.tasks import make_tasks
    from examples.workloads.code.verifier import solved

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tasks = make_tasks(options.tasks, options.seed)
    states = await graph.abatch([asked(task) for task in tasks], {"max_concurrency": 16})
    shares = [solved(state["program"], task) for task, state in zip(tasks, states, strict=True)]
    for task, state, found in zip(tasks, states, shares, strict=True):
        print(f"{task['id']}: {found:.0%} of the hidden tests after {state['turns']} turns")
    print(f"{sum(found == 1 for found in shares)} of {len(tasks)} are solved")


if __name__ == "__main__":
    asyncio.run(main())
