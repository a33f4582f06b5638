"""The games by name."""

from __future__ import annotations

from examples.workloads.self_play import debate, duel, negotiation, noughts
from examples.workloads.self_play.turns import Game, Said, Task

GAMES: dict[str, Game] = {"negotiation": negotiation, "debate": debate, "noughts": noughts, "duel": duel}


def counted(task: Task, said: Said) -> Said:
    """The messages that count: of those whose turn it was, up to the end of the game."""
    game, taken = GAMES[task["game"]], list[tuple[str, str]]()
    for role, text in said:
        if role == game.turn(task, taken):
            taken.append((role, text))
    return taken
