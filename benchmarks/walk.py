"""How far one call goes through cotune's code until it is answered, or records until they are rows to train on. Prints
the files; the last line is JSON.

A LangGraph application with ChatOpenAI calls its model twice; a stub policy answers with K = 4 candidates. The second
call is counted, as the first one loads and installs things: files, functions and changes of file, from the request of
the client to the answer that the application gets, in all threads. The stub policy itself is left out, and what it
alone calls.

With `--from records`, the episode above is read back and made into rows for the learner by the recipe at_grpo, as a
training step does: collect samples, group and weigh them, and read their token ids. The second time is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from rich.console import Console
from rich.table import Table

import cotune
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import collect
from cotune.algorithms.policy_recipes import Recipes, prepare_each
from cotune.algorithms.prepare import train_rows
from cotune.episodes.episode import run_episode
from cotune.records.plans import Plan
from cotune.records.structs import Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.before.answers.drawn import DrawnAnswers
from cotune.trainer.before.answers.responder import CheckResponder

K = 4
MODEL, RESPONDER = "trainer/before/answers/", "sampling/responder.py"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Ends of the names of comprehensions, each of which Python 3.11 runs as a function."""


class State(TypedDict):
    text: str


class Walk:
    """The code of cotune that runs while `counting` is set."""

    def __init__(self) -> None:
        self.counting = False
        self.functions: set[tuple[str, str]] = set()
        self.calls: Counter[str] = Counter()
        self.changes = 0
        self._root = str(Path(cotune.__file__).parent)
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if not self.counting or event != "call" or not file.startswith(self._root):
            return
        name = file.removeprefix(self._root + "/")
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        if name.startswith(MODEL) or (MODEL in caller and name != RESPONDER):
            return
        self.functions.add((name, frame.f_code.co_qualname))
        self.calls[name] += 1
        self.changes += name != self._last
        self._last = name


def solve_with(walk: Walk) -> Any:
    model = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)

    async def write(state: State) -> dict[str, str]:
        return {"text": str((await model.ainvoke(f"Write on {state['text']}")).content)}

    async def review(state: State) -> dict[str, str]:
        walk.counting = True
        answer = await model.ainvoke(f"Review {state['text']}")
        walk.counting = False
        return {"text": str(answer.content)}

    graph = StateGraph(State)
    graph.add_node("writer", write)
    graph.add_node("reviewer", review)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "reviewer")
    graph.add_edge("reviewer", END)
    app = graph.compile()

    @cotune.workflow
    async def solve(task: Any) -> float:
        return float(bool((await app.ainvoke({"text": str(task)}))["text"]))

    @solve.scorer("writer")
    @solve.scorer("reviewer")
    def place(candidate: Any, call: Any, task: Any) -> float:
        return float(candidate.index)  # so that the candidates of a call differ, and none is left out

    return solve


def walk_of_a_call(walk: Walk, store: SqliteStore) -> None:
    """Run the application once, and count its second call."""
    solve = solve_with(walk)
    plan = Plan(kind="tree", k=K)
    training = {"plan": plan, "scorers": solve.cotune.scorers}
    responder = CheckResponder(answers=DrawnAnswers(run=0), training=training)
    outcome = asyncio.run(run_episode(solve.cotune, Task(id="t", input="x"), sink=store, responder=responder))
    if outcome.episode.status != "ok" or outcome.episode.calls != 2:
        raise SystemExit(f"The episode was to end well after 2 calls, not: {outcome.episode}")


def walk_of_records(walk: Walk, store: SqliteStore) -> None:
    """Make the recorded episodes into rows, and count that."""
    recipes = Recipes(run=recipe("at_grpo"))
    walk.counting = True
    collected = collect(store, store.episodes(), plan="tree", method_of=recipes.of_role)
    prepared = prepare_each(collected.samples, recipes, others=collected.others)
    rows = train_rows(prepared, collected, store)
    walk.counting = False
    if sorted(map(len, rows.values())) != [K, K]:
        raise SystemExit(f"Each of two roles was to have {K} rows, not: {rows}. Left out: {prepared.left_out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from", dest="start", choices=["call", "records"], default="call", help="the beginning of the way"
    )
    start = parser.parse_args().start
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder, SqliteStore.open(Path(folder) / "records.db") as store:
        if start == "records":
            walk_of_a_call(walk, store)
            store.flush()
            walk_of_records(walk, store)  # the first time loads and builds things
            walk = Walk()
        threading.setprofile(walk)
        sys.setprofile(walk)
        if start == "call":
            walk_of_a_call(walk, store)
        else:
            walk_of_records(walk, store)
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    way = f"One call of a LangGraph application, K = {K}" if start == "call" else f"Two calls as rows, K = {K}"
    table = Table("file", "functions", "calls", title=way)
    for file, calls in walk.calls.most_common():
        table.add_row(file, str(sum(name == file for name, _ in walk.functions)), str(calls))
    Console().print(table)
    print(
        json.dumps(
            {
                "files": len(walk.calls),
                "functions": len(walk.functions),
                "of_them_comprehensions": sum(name.endswith(COMPREHENSIONS) for _, name in walk.functions),
                "calls": walk.calls.total(),
                "changes_of_file": walk.changes,
            }
        )
    )


if __name__ == "__main__":
    main()
