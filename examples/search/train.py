"""The search team as a cotune workflow: what an answer is worth, and what each role's message is worth.

cotune train examples/search/train.py:solve --config examples/search/train.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.search import app
from examples.search.tasks import Question
from examples.search.verifier import agent_reward, answer_reward, query_reward, reader_reward, solved


@cotune.workflow
async def solve(task: Question) -> bool:
    """Answer one question, from what was retrieved."""
    state = await app.solve(task)
    return solved(task, state["answer"], state["retrieved"])


@cotune.workflow
async def alone(task: Question) -> bool:
    """The same with a single agent, which may not have answered in the end."""
    state = await app.solve(task, app.single_graph)
    return solved(task, state.get("answer", ""), state["retrieved"])


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
