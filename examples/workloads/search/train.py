"""The search team as a cotune workflow: what an answer is worth, and what each role's message is worth.

cotune train examples/workloads/search/train.py:solve \\
    --config examples/workloads/search/small.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.workloads.search import app
from examples.workloads.search.tasks import Question
from examples.workloads.search.verifier import (
    agent_reward,
    answer_reward,
    evidence_found,
    query_reward,
    reader_reward,
    solved,
)


@cotune.workflow
async def solve(task: Question) -> dict[str, float]:
    """Answer one question; `success` is whether the answer is right and rests on what was retrieved."""
    return outcome(task, await app.solve(task))


@cotune.workflow
async def alone(task: Question) -> dict[str, float]:
    """The same with a single agent, which may not have answered in the end."""
    return outcome(task, await app.solve(task, app.single_graph))


def outcome(task: Question, state: app.State) -> dict[str, float]:
    """A point for a right answer, and up to one for the share of its documents that were found."""
    right = float(solved(task, state.get("answer", ""), state["retrieved"]))
    return {"team": right + evidence_found(task, state["retrieved"]), "success": right}


@alone.scorer("agent")
def said_alone(candidate: Candidate, call: Call, task: Question) -> dict[str, float]:
    """What the search finds, or what the answer is worth."""
    return agent_reward(task, call.state["index"], call.state["retrieved"], candidate.text)


@solve.scorer("writer")
def query_written(candidate: Candidate, call: Call, task: Question) -> dict[str, float]:
    """What the query finds."""
    return query_reward(task, call.state["index"], call.state["retrieved"], candidate.text)


@solve.scorer("reader")
def note_taken(candidate: Candidate, call: Call, task: Question) -> dict[str, float]:
    """What the note says of the document."""
    found = call.state["found"]
    return reader_reward(task, found["title"], found["text"], candidate.text)


@solve.scorer("answerer")
def answered(candidate: Candidate, call: Call, task: Question) -> dict[str, float]:
    """Whether it is the answer, and rests on what was retrieved."""
    return answer_reward(task, call.state["retrieved"], candidate.text)
