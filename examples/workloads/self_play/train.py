"""Each game as a cotune workflow: what each role has won, and what is wrong with the form of its messages.

cotune train examples/workloads/self_play/train.py:negotiation --recipe marshal \\
    --config examples/workloads/self_play/train.toml --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.workloads.self_play import app
from examples.workloads.self_play.turns import Task
from examples.workloads.self_play.verifier import debater_form, judge_form, negotiator_form, outcome


@cotune.workflow(roles="model")
async def negotiation(task: Task) -> dict[str, float]:
    """One division of items between two roles."""
    return outcome(task, await app.play(task))


@negotiation.scorer("first")
@negotiation.scorer("second")
def moved(candidate: Candidate, call: Call, task: Task) -> float:
    """Whether it is a move."""
    return negotiator_form(task, call.role, call.messages, candidate.text)


@cotune.workflow(roles="model")
async def debate(task: Task) -> dict[str, float]:
    """One debate before a judge."""
    return outcome(task, await app.play(task))


@debate.scorer("affirmative")
@debate.scorer("negative")
def argued(candidate: Candidate, call: Call, task: Task) -> float:
    """Whether it can be shown, and its quotes stand in the text."""
    return debater_form(task, candidate.text)


@debate.scorer("judge")
def judged(candidate: Candidate, call: Call, task: Task) -> float:
    """Whether it is a verdict."""
    return judge_form(candidate.text)


@cotune.workflow(roles="model")
async def noughts(task: Task) -> dict[str, float]:
    """One game of tic-tac-toe."""
    return outcome(task, await app.play(task))


@cotune.workflow(roles="model")
async def duel(task: Task) -> dict[str, float]:
    """One matrix game."""
    return outcome(task, await app.play(task))
