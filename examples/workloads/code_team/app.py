"""A LangGraph application: a code agent writes a program that solves a puzzle, and a plan agent decides what is done.

The code agent calls the tool `run_python`. The program runs in a sandbox and reads the puzzle from its standard input.
If it fails, the agent sees the error and may call the tool once more. The plan agent sees the puzzle, the program and
its output. It accepts the output, rejects it, or gives an answer of its own. They have four turns.

In `graph` the plan agent sees the program of the same turn. In `parallel_graph` both work at the same time, so the plan
agent sees the program of the turn before.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.code_team.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any, TypedDict

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from examples.workloads.code.programs import run, sandbox
from examples.workloads.code_team.puzzles import TURNS, Kind, Puzzle, answer_in, carry_out, is_solved

ATTEMPTS = 2
"""Programs that the code agent may run in one turn; the second only if the first one failed."""
SHOWN = 300
"""Characters of an error that the agents see: the end, where Python names the cause."""
API_KEY = os.environ.get("OPENAI_API_KEY", "none")

RULES: dict[Kind, str] = {
    "plan_path": "Plan-Path: walk from S to G. `#` is a wall, `.` is free. The answer is one line of moves: up, right, "
    "down or left, such as: up up right",
    "sokoban": "Sokoban: push every box onto a goal. `#` is a wall, `@` the player, `$` a box, `.` a goal, `*` a box "
    "on a goal, `+` the player on a goal. The answer is one line of moves: up, right, down or left, such as: up right",
    "sudoku": "Sudoku: fill the empty cells `.` so that no row, column or box has a value twice. The answer is one "
    "line with the rows of the full grid, such as: 1234 3412 2143 4321",
}
CODER = (
    "Write a Python program that solves the puzzle, and run it with the tool run_python. The program reads the rows of "
    "the puzzle from standard input and prints the answer as its last line. Compute the answer by a search."
)
PLANNER = (
    "Decide how the puzzle is answered. You see a program that another agent wrote, and its output. Check the output "
    "against the rules. Your last line is `accept` to use the output as the answer, `reject` to ask for another "
    "program, or an answer of your own."
)
ALONE = "Solve the puzzle. Your last line is the answer."
NO_PROGRAM = "no program"
ACCEPT, REJECT = "accept", "reject"


class State(TypedDict, total=False):
    """State of a task.

    `rows` is the puzzle as it is now. `program`, `output` and `program_answer` come from the code agent's last turn.
    `answer` is the decision of the plan agent, and `report` tells how the last turn ended.
    """

    kind: Kind
    rows: list[str]
    turns_left: int
    program: str
    output: str
    program_answer: list[str] | None
    answer: list[str] | None
    answers: list[list[str]]
    report: str


@tool
def run_python(program: str) -> str:
    """Run a Python program; the rows of the puzzle are its standard input. Returns what it prints, or its error."""
    raise NotImplementedError("the node `coder` runs the program, because only it knows the puzzle")


def model(role: str) -> ChatOpenAI:
    """The chat model that plays a role; served under the role's name."""
    return ChatOpenAI(model=role, temperature=1, api_key=API_KEY)


coder_model = model("coder").bind_tools([run_python])
planner_model = model("planner")


def start(task: Puzzle) -> State:
    """The first state of a task, without anything that is hidden."""
    return {"kind": task["kind"], "rows": task["rows"], "turns_left": task.get("turns", TURNS), "answers": []}


def coder_messages(state: State) -> list[Any]:
    """The code agent's prompt: the rules, the puzzle as it is now, and how the last turn ended."""
    content = ["Puzzle:", *state["rows"]]
    if state.get("report"):
        content += [f"Last turn: {state['report']}"]
    system = f"{CODER}\n{RULES[state['kind']]}"
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(content)}]


def planner_messages(state: State) -> list[Any]:
    """The plan agent's prompt: the rules, the puzzle as it is now, the program and its output."""
    content = ["Puzzle:", *state["rows"], "Program:", state.get("program") or NO_PROGRAM]
    content += ["Output:", state.get("output", "")]
    system = f"{PLANNER}\n{RULES[state['kind']]}"
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(content).rstrip()}]


def alone_messages(state: State) -> list[Any]:
    """The prompt of a plan agent without a code agent."""
    content = "\n".join(["Puzzle:", *state["rows"]])
    return [{"role": "system", "content": f"{ALONE}\n{RULES[state['kind']]}"}, {"role": "user", "content": content}]


def program_called(tool_calls: list[dict[str, Any]]) -> str | None:
    """The program of a message that calls the tool once; None for any other message."""
    if len(tool_calls) != 1 or tool_calls[0]["name"] != run_python.name:
        return None
    program = tool_calls[0]["args"].get("program")
    return program if isinstance(program, str) and program.strip() else None


def run_on_puzzle(program: str, kind: Kind, rows: list[str]) -> tuple[str, list[str] | None]:
    """Run a program in the sandbox on the rows. Returns its output or error as the agents see it, and its answer.

    The answer is None if the program failed, or if its last line is no answer.
    """
    ran = run(program, "\n".join(rows))
    if not ran.ok or ran.cut:
        cause = ran.stderr.strip().rpartition("\n")[2]
        if ran.ended != "exit":
            cause = f"ended by the limit on {ran.ended}"
        elif ran.ok:
            cause = f"it printed more than {sandbox().limits.output_kb} KB"
        elif not cause:
            cause = f"it ended with exit code {ran.code} and printed no error"
        return f"error: {cause[-SHOWN:]}", None
    last_line = ran.stdout.strip().rpartition("\n")[2]
    return last_line[:SHOWN], answer_in(kind, ran.stdout, len(rows))


async def coder(state: State) -> State:
    """Write a program and run it; after an error, once more."""
    messages = coder_messages(state)
    program, output, answer = "", "", None
    for _ in range(ATTEMPTS):
        reply = await coder_model.ainvoke(messages)
        written = program_called(reply.tool_calls)
        if written is None:
            break
        program = written
        output, answer = await asyncio.to_thread(run_on_puzzle, program, state["kind"], state["rows"])
        if answer is not None:
            break
        messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0]["id"], "content": output}]
    return {"program": program, "output": output, "program_answer": answer}


def decided(state: State, text: str) -> list[str] | None:
    """The answer that the plan agent's message stands for; None if it rejects or cannot be read."""
    if text.strip().rpartition("\n")[2].strip() == ACCEPT:
        return state.get("program_answer")
    return answer_in(state["kind"], text, len(state["rows"]))


async def planner(state: State) -> State:
    """Accept the program's answer, reject it, or give another one."""
    reply: AIMessage = await planner_model.ainvoke(planner_messages(state))
    return {"answer": decided(state, reply.text)}


async def planner_alone(state: State) -> State:
    """Answer without a program."""
    reply: AIMessage = await planner_model.ainvoke(alone_messages(state))
    return {"answer": answer_in(state["kind"], reply.text, len(state["rows"]))}


async def adopt_program(state: State) -> State:
    """Take the program's answer, when there is no plan agent to decide."""
    return {"answer": state["program_answer"]}


async def referee(state: State) -> State:
    """Carry out the answer of the turn."""
    answer, turns_left = state["answer"], state["turns_left"] - 1
    if answer is None:
        return {"turns_left": turns_left, "report": "no answer"}
    rows, useless = carry_out(state["kind"], state["rows"], answer)
    report = f"answered, of which {useless} did nothing"
    return {"rows": rows, "answers": [*state["answers"], answer], "turns_left": turns_left, "report": report}


def onward(state: State) -> str:
    """Another turn, until the puzzle is solved or the turns are over."""
    return "over" if is_solved(state["kind"], state["rows"]) or state["turns_left"] < 1 else "again"


def build(*agents: Any, parallel: bool = False) -> Any:
    """The graph of these agents, a node each: one after the other, or all at the same time, and then the referee."""
    builder = StateGraph(State)
    builder.add_node("turn", lambda state: {})
    builder.add_node("referee", referee)
    builder.add_edge(START, "turn")
    names: list[str] = []
    for name, agent in agents:
        builder.add_node(name, agent)
        names.append(name)
    if parallel:
        for name in names:
            builder.add_edge("turn", name)
        builder.add_edge(names, "referee")
    else:
        for before, after in zip(["turn", *names], [*names, "referee"], strict=True):
            builder.add_edge(before, after)
    builder.add_conditional_edges("referee", onward, {"again": "turn", "over": END})
    return builder.compile()


graph = build(("coder", coder), ("planner", planner))
parallel_graph = build(("coder", coder), ("planner", planner), parallel=True)
coder_graph = build(("coder", coder), ("adopt", adopt_program))
planner_graph = build(("planner", planner_alone))
FLOWS = {"solve": graph, "parallel": parallel_graph, "alone_coder": coder_graph, "alone_planner": planner_graph}


async def main() -> None:
    """Solve puzzles with whatever OPENAI_BASE_URL points at, and print how many are solved."""
    from examples.workloads.code_team.tasks import SIZE, make_tasks

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=SIZE, help="cells of a side of Plan-Path (default: %(default)s)")
    parser.add_argument("--flow", choices=FLOWS, default="solve", help="who plays, and how (default: %(default)s)")
    options = parser.parse_args()
    await asyncio.to_thread(sandbox)  # if there is none, this says so before the first call
    tasks = make_tasks(options.tasks, options.seed, size=options.size)
    states = await FLOWS[options.flow].abatch([start(task) for task in tasks], {"max_concurrency": 16})
    solved = 0
    for task, state in zip(tasks, states, strict=True):
        success = is_solved(task["kind"], state["rows"])
        solved += success
        turns = task.get("turns", TURNS) - state["turns_left"]
        print(f"{task['id']}: {'solved' if success else 'not solved'} after {turns} turns")
    print(f"{solved} of {len(tasks)} are solved")


if __name__ == "__main__":
    asyncio.run(main())
