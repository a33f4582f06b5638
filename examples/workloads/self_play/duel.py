"""A matrix game: two players choose left or right without seeing each other, and one wins what the other loses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from examples.workloads.self_play.turns import Messages, Said, Task, with_rules

Payoff = Sequence[Sequence[float]]
"""What the row player wins of the column player, by their choices."""

SEATS = ("row", "column")
MAX_TOKENS = 1
CHOICES = ("left", "right")
PAYOFF: Payoff = ((2.0, -1.0), (-1.0, 1.0))
"""In equilibrium both players choose left two times in five, and the row player wins 0.2 a game."""
EQUILIBRIUM = (0.4, 0.4)
"""Shares of left: of the row player, of the column player."""
SADDLE: Payoff = ((-1.0, -2.0), (1.0, 2.0))
"""In equilibrium the row player chooses right, which is always better, and the column player left, as it does then."""


def turn(task: Task, said: Said) -> str | None:
    """Each chooses once."""
    return SEATS[len(said)] if len(said) < len(SEATS) else None


def messages(task: Task, said: Said, role: str) -> Messages:
    """Its seat alone, and the rules where the task tells them."""
    return with_rules(task, f"{role} choose")


def rules(payoff: Payoff) -> str:
    """The game in words."""
    won = [f"{CHOICES[i]} and {CHOICES[j]}: {payoff[i][j]:g}" for i in range(2) for j in range(2)]
    return (
        "Two players, row and column, choose left or right and do not see each other's choice. What row wins of "
        f"column, by row's choice and column's: {', '.join(won)}. Answer with your choice: left or right."
    )


def choice_in(text: str) -> int | None:
    """The choice that a message makes; None where it makes none."""
    return CHOICES.index(text.strip()) if text.strip() in CHOICES else None


def exploitability(row: float, column: float, payoff: Payoff = PAYOFF) -> float:
    """What best answers to both players would win together: 0 in equilibrium alone. `row` and `column` are their shares
    of left."""
    rows = [a * column + b * (1 - column) for a, b in payoff]
    columns = [row * payoff[0][j] + (1 - row) * payoff[1][j] for j in range(2)]
    return max(rows) - min(columns)


def quantal(entropy: float, payoff: Payoff = PAYOFF) -> tuple[float, float]:
    """Shares of left where each player's choice has the log-odds (gain of left over right) / entropy: the equilibrium
    of players that are paid for the entropy of their choices too (logit quantal response)."""
    row = column = 0.5
    for _ in range(2000):
        gain = [a * column + b * (1 - column) for a, b in payoff]
        cost = [row * payoff[0][j] + (1 - row) * payoff[1][j] for j in range(2)]
        row += 0.02 * (1 / (1 + math.exp((gain[1] - gain[0]) / entropy)) - row)
        column += 0.02 * (1 / (1 + math.exp((cost[0] - cost[1]) / entropy)) - column)
    return row, column
