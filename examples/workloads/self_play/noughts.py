"""Tic-tac-toe by text: x begins, and who has three in a line wins."""

from __future__ import annotations

from examples.workloads.self_play.turns import Messages, Said, Task, with_rules

SEATS = ("x", "o")
MAX_TOKENS = 1
CELLS = range(9)
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "." * 9
RULES = (
    "Tic-tac-toe, x begins. The cells are numbered 1 to 9, row by row; each is shown with its mark: x, o, . if free. "
    "You are told your mark first. Answer with the number of a free cell; anything else loses."
)


def turn(task: Task, said: Said) -> str | None:
    """The two alternate until one has won, has lost by an illegal move, or the board is full."""
    board, lost = played(said)
    if lost or winner(board) or not free(board):
        return None
    return SEATS[len(said) % 2]


def messages(task: Task, said: Said, role: str) -> Messages:
    """The board, and the rules where the task tells them."""
    return with_rules(task, board_seen(played(said)[0], role))


def played(said: Said) -> tuple[str, str | None]:
    """The board after these moves, and who has lost by naming no free cell."""
    board = EMPTY
    for seat, text in said:
        cell = cell_in(text)
        if cell is None or cell not in free(board):
            return board, seat
        board = placed(board, cell, seat)
    return board, None


def board_seen(board: str, seat: str) -> str:
    """A player's mark, and each cell by its number."""
    return f"{seat} {' '.join(f'{cell + 1}={board[cell]}' for cell in CELLS)}"


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
    """The cell that a message names, from 0; None where it names none."""
    named = text.strip()
    return int(named) - 1 if named in {str(cell + 1) for cell in CELLS} else None
