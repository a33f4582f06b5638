"""The rules of two games for two players with opposite rewards, and what their players see, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

Payoff = Sequence[Sequence[float]]
"""What the row player wins of the column player, by their choices."""

CHOICES = ("left", "right")
PAYOFF: Payoff = ((2.0, -1.0), (-1.0, 1.0))
"""In equilibrium both players choose left two times in five, and the row player wins 0.2 a game."""
EQUILIBRIUM = (0.4, 0.4)
"""Shares of left: of the row player, of the column player."""
SADDLE: Payoff = ((-1.0, -2.0), (1.0, 2.0))
"""In equilibrium the row player chooses right, which is always better, and the column player left, as it does then."""

CELLS = range(9)
SPECIAL_TOKENS = 4
WORDS = (
    *("user", "assistant", "row", "column", "choose", *CHOICES, "x", "o"),
    *(str(cell + 1) for cell in CELLS),
    *(f"{cell + 1}={mark}" for cell in CELLS for mark in ".xo"),
)
"""The players' language: a token each, after the special ones."""
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "." * 9


def payoff_messages(seat: str) -> list[dict[str, str]]:
    """What a player of the matrix game sees: its seat alone."""
    return [{"role": "user", "content": f"{seat} choose"}]


def choices_only() -> dict[str, int]:
    """A `logit_bias` that leaves nothing but the choices."""
    return {str(SPECIAL_TOKENS + WORDS.index(word)): 50 for word in CHOICES}


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


def board_messages(board: str, seat: str) -> list[dict[str, str]]:
    """What a player of tic-tac-toe sees: its mark, and each cell by its number."""
    cells = " ".join(f"{cell + 1}={board[cell]}" for cell in CELLS)
    return [{"role": "user", "content": f"{seat} {cells}"}]


def placed(board: str, cell: int, mark: str) -> str:
    """The board with one more mark."""
    return board[:cell] + mark + board[cell + 1 :]


def free(board: str) -> list[int]:
    """The empty cells."""
    return [cell for cell in CELLS if board[cell] == "."]


def winner(board: str) -> str | None:
    """Who has three in a line; None where nobody has."""
    return next((board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), None)


def cell_in(text: str) -> int | None:
    """The cell that an answer names, from 0; None where it names none."""
    return int(text) - 1 if text in {str(cell + 1) for cell in CELLS} else None
