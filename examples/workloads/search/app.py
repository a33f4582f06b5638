"""A LangGraph application that answers questions from documents: a query writer, a reader, an answerer.

The writer says what to search for, the reader notes what the best document has to do with the question, three times, or
as often as the question says; the answerer answers from the notes alone.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.search.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from examples.workloads.search.index import Index, last_line
from examples.workloads.search.tasks import Document, Question, make_tasks

TURNS = 3
"""Searches for a question that does not say how many it takes."""
WRITER, READER, ANSWERER = "Write a query.", "Note what helps.", "Answer from the notes."
ALONE = "Search or answer."
TEMPERATURE = float(os.environ.get("SEARCH_TEMPERATURE", "1"))
API_KEY = os.environ.get("OPENAI_API_KEY", "none")


class State(TypedDict, total=False):
    """State of a question: its corpus, the document found last, titles of all that were found, notes, the answer."""

    question: str
    index: Index
    found: Document
    retrieved: list[str]
    notes: list[str]
    searches: int
    most_searches: int
    answer: str


def model(role: str) -> ChatOpenAI:
    """The chat model that plays a role; served under the role's name."""
    return ChatOpenAI(model=role, temperature=TEMPERATURE, api_key=API_KEY)


writer_model, reader_model, answerer_model, agent_model = map(model, ("writer", "reader", "answerer", "agent"))


async def writer(state: State) -> State:
    """Search for what is missing."""
    reply = await writer_model.ainvoke(_asked(WRITER, state, notes(state)))
    found = state["index"].best(last_line(reply.text))
    searches = state["searches"] + 1
    if found is None:
        return {"searches": searches, "found": {"title": "", "text": "nothing found"}}
    return {"searches": searches, "found": found, "retrieved": [*state["retrieved"], found["title"]]}


async def reader(state: State) -> State:
    """Note what the document has to do with the question."""
    reply = await reader_model.ainvoke(_asked(READER, state, f"passage {state['found']['text']}"))
    return {"notes": [*state["notes"], f"{state['found']['title']} says {last_line(reply.text)}"]}


async def answerer(state: State) -> State:
    """Answer."""
    reply = await answerer_model.ainvoke(_asked(ANSWERER, state, notes(state)))
    return {"answer": last_line(reply.text)}


def onward(state: State) -> str:
    """Another search, until the searches are over."""
    return "answerer" if state["searches"] >= state["most_searches"] else "writer"


async def agent(state: State) -> State:
    """Do the whole thing alone: `search ...`, or `answer ...`, from the documents themselves."""
    reply = await agent_model.ainvoke(_asked(ALONE, state, notes(state)))
    asked, _, rest = last_line(reply.text).partition(" ")
    if asked == "answer":
        return {"answer": rest}
    found = state["index"].best(rest) if asked == "search" else None
    searches = state["searches"] + 1
    if found is None:
        return {"searches": searches, "notes": [*state["notes"], "nothing found"]}
    retrieved = [*state["retrieved"], found["title"]]
    return {"searches": searches, "retrieved": retrieved, "notes": [*state["notes"], found["text"]]}


def again(state: State) -> str:
    """Until it has answered, or its turns are over."""
    return END if "answer" in state or state["searches"] > state["most_searches"] else "agent"


def notes(state: State) -> str:
    """The notes so far, a line each."""
    return "\n".join(["notes", *state["notes"]])


def _asked(system: str, state: State, known: str) -> list[dict[str, str]]:
    content = f"question {state['question']}\n{known}"
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


builder = StateGraph(State)
for node in (writer, reader, answerer):
    builder.add_node(node.__name__, node)
builder.add_edge(START, "writer")
builder.add_edge("writer", "reader")
builder.add_conditional_edges("reader", onward, ["writer", "answerer"])
builder.add_edge("answerer", END)
graph = builder.compile()

single = StateGraph(State)
single.add_node("agent", agent)
single.add_edge(START, "agent")
single.add_conditional_edges("agent", again, ["agent", END])
single_graph = single.compile()


async def solve(task: Question, graph: Any = graph) -> State:
    """Answer one question."""
    begin: State = {
        "question": task["question"],
        "index": Index(task["documents"]),
        "retrieved": [],
        "notes": [],
        "searches": 0,
        "most_searches": task.get("searches", TURNS),
    }
    end: State = await graph.ainvoke(begin)
    return end


async def main() -> None:
    """Answer some questions with whatever OPENAI_BASE_URL points at, and print how many answers are right."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tasks = list(make_tasks(options.tasks, options.seed))
    states = await asyncio.gather(*(solve(task) for task in tasks))
    for task, state in zip(tasks, states, strict=True):
        print(f"{task['question']} {state['answer']} (from {', '.join(state['retrieved']) or 'nothing'})")
    right = sum(state["answer"] == task["answer"] for task, state in zip(tasks, states, strict=True))
    print(f"{right} of {len(tasks)} are right")


if __name__ == "__main__":
    asyncio.run(main())
