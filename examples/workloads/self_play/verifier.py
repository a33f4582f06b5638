"""What a game came to, worked out from its task and what was said alone, and what the form of a message is worth."""

from __future__ import annotations

from collections.abc import Callable

from examples.workloads.self_play import debate, duel, negotiation, noughts
from examples.workloads.self_play.games import counted
from examples.workloads.self_play.turns import Said, Task

BAD_FORMAT = -1.0
NOT_THERE = -0.5
"""A debater's quote that does not stand in the text."""

Numbers = dict[str, float]


def outcome(task: Task, said: Said) -> Numbers:
    """What each role has won, under its name, and what else there is to say of the game. Messages out of turn, or after
    the end, count for nothing."""
    return OUTCOMES[task["game"]](task, counted(task, said))


def negotiated(task: Task, said: Said) -> Numbers:
    """To each the value of its share, 1 for all items; nothing without a deal. Not zero-sum: `sum` is both together,
    `pareto` (and `success`) a deal that no other makes better for one and not worse for the other."""
    division = negotiation.deal(task, said)
    if division is None:
        return {**dict.fromkeys(negotiation.SEATS, 0.0), "sum": 0.0, "pareto": 0.0, "success": 0.0}
    worth = _worth(task, division)
    better = any(
        all(a >= b for a, b in zip(other, worth, strict=True)) and other != worth
        for other in (_worth(task, d) for d in negotiation.divisions(task))
    )
    won = dict(zip(negotiation.SEATS, worth, strict=True))
    return {**won, "sum": sum(worth), "pareto": float(not better), "success": float(not better)}


def debated(task: Task, said: Said) -> Numbers:
    """1 for the debater whose answer the judge's verdict is, -1 for the other, 0 for both without a verdict; 1 for the
    judge whose verdict is the truth."""
    verdicts = [debate.verdict_in(text) for role, text in said if role == debate.JUDGE]
    verdict = verdicts[0] if verdicts else None
    sides = {role: 0.0 if verdict is None else 1.0 if verdict == side else -1.0 for role, side in debate.SIDES.items()}
    right = float(verdict == task["truth"])
    return {**sides, debate.JUDGE: right, "success": right}


def marked(task: Task, said: Said) -> Numbers:
    """1 for who has won, -1 for who has lost or named no free cell, 0 for a draw and a game that has not ended. Where
    the task leaves a seat to chance, `success` is whether the other has won, or drawn as second player."""
    board, lost = noughts.played(said)
    won = next(seat for seat in noughts.SEATS if seat != lost) if lost else noughts.winner(board)
    numbers = {seat: 0.0 if won is None else 1.0 if seat == won else -1.0 for seat in noughts.SEATS}
    chance = task.get("random")
    if chance is None:
        return numbers
    drawn = won is None and not noughts.free(board)
    return {**numbers, "success": float(won not in (None, chance) or (drawn and chance == "x"))}


def chosen(task: Task, said: Said) -> Numbers:
    """What row wins of column; who makes no choice loses the most that there is to lose, and both nothing where neither
    does. `row_left`, `column_left`: whether it was left."""
    payoff = task.get("payoff", duel.PAYOFF)
    row, column = [*(duel.choice_in(text) for _, text in said), None, None][: len(duel.SEATS)]
    if row is not None and column is not None:
        won = payoff[row][column]
    else:
        most = max(abs(number) for line in payoff for number in line)
        won = most * ((row is not None) - (column is not None))
    return {"row": won, "column": -won, "row_left": float(row == 0), "column_left": float(column == 0)}


OUTCOMES: dict[str, Callable[[Task, Said], Numbers]] = {
    "negotiation": negotiated,
    "debate": debated,
    "noughts": marked,
    "duel": chosen,
}


def negotiator_form(task: Task, role: str, asked: list[dict[str, str]], text: str) -> float:
    """-1 for a move that is none: an offer that does not add up, an acceptance of what was not offered. `asked`: the
    messages that it answers."""
    if negotiation.move_of(text) != "accept":
        return 0.0 if negotiation.offer_in(task, role, text) else BAD_FORMAT
    other = next(seat for seat in negotiation.SEATS if seat != role)
    return 0.0 if negotiation.offer_in(task, other, str(asked[-1]["content"])) else BAD_FORMAT


def debater_form(task: Task, text: str) -> float:
    """-1 for nothing, or too much, said; -0.5 for a quote that does not stand in the text."""
    if debate.shown(task, text) == debate.shown(task, ""):
        return BAD_FORMAT
    return 0.0 if all(debate.stands(task, quote) for quote in debate.quotes(text)) else NOT_THERE


def judge_form(text: str) -> float:
    """-1 for what is no verdict."""
    return BAD_FORMAT if debate.verdict_in(text) is None else 0.0


def _worth(task: Task, division: negotiation.Division) -> tuple[float, ...]:
    return tuple(negotiation.worth(task, seat, division[seat]) / negotiation.TOTAL for seat in negotiation.SEATS)
