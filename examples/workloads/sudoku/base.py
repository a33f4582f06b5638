"""Builds a base model that knows the words and, mostly, the rules of 4 x 4: warmed up on imperfect demonstrations.

python -m examples.workloads.sudoku.base --out runs/sudoku/base --seed 0
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from examples.tiny_model import Demonstration, base_builder, build_by_command
from examples.workloads.sudoku.app import ALONE, FILLER, PLANNER, UNREAD, WITHOUT_TOOL, State, board_of, messages
from examples.workloads.sudoku.board import Cell, cells, filled, forced, name, possible
from examples.workloads.sudoku.tasks import make_tasks
from examples.workloads.sudoku.verifier import CELLS, Puzzle

SIZE, EMPTY = 4, 4
"""Of the puzzles: with more cells to fill, a model of 0.3M parameters hardly ever begins to solve them."""
STEPS, DEMONSTRATIONS, PUZZLES = 800, 24000, 3000
ERRING_CELL, ERRING_VALUE = 0.25, 0.2
"""Share of the cells that are named, and of the values that are filled in, that are random."""
WRONG = 0.08
"""Share of the fills before a demonstration that are random, and may be refused."""
BAD_FORMAT = 0.05
"""Share of answers that no role may give."""
PROGRAMS = 0.25
"""Share of the fillings that are left to a program."""
OPENS = """```python
board = [[int(value) if value.isdigit() else 0 for value in line.split()] for line in open(0)]
size = len(board)
side = int(size ** 0.5)
cells = [(r, c) for r in range(size) for c in range(size)]
row = lambda r, c: {board[r][k] for k in range(size)}
column = lambda r, c: {board[k][c] for k in range(size)}
box = lambda r, c: {board[k][l] for k, l in cells if (k // side, l // side) == (r // side, c // side)}
rules = ("""
RULES = ("row,", "column,", "box,")
CLOSES = """)
for r, c in cells:
    fits = set(range(1, size + 1)).difference(*(rule(r, c) for rule in rules))
    if not board[r][c] and {}:
        print(f"r{{r + 1}}c{{c + 1}}={{min(fits)}}")
```"""
FITS = ("len(fits) == 1", "fits")
"""Where the program fills a cell: one value is left, or any."""
ENDS = tuple(CLOSES.format(fits) for fits in FITS)
ALL = list(cells(SIZE))
VALUES = range(1, SIZE + 1)
NAMES = [name(cell) for cell in ALL]
FILLS = [f"{cell}={value}" for cell in NAMES for value in VALUES]
WORDS = (
    *(
        PLANNER,
        FILLER,
        ALONE,
        WITHOUT_TOOL,
        OPENS,
        *RULES,
        *ENDS,
        "system",
        "user",
        "assistant",
        "Cells:",
        "Refused:",
        ".",
        *map(str, VALUES),
    ),
    *(*NAMES, *FILLS, *(f"{fill}:" for fill in FILLS)),
    *f"{UNREAD} is in row column the box at already already; cell a clue clue;".split(),
)
"""The words of the game, and each system prompt, a token each."""


def scene(rng: random.Random, puzzles: Sequence[Puzzle]) -> State:
    """A board some fills after its start, most of them right, with a cell to fill at least."""
    task = rng.choice(puzzles)
    empty = [(row, column) for row, column in ALL if not task["puzzle"][row][column]]
    done = rng.sample(empty, rng.randrange(len(empty)))
    fills = [((r, c), rng.choice(VALUES) if rng.random() < WRONG else task["solution"][r][c]) for r, c in done]
    board, refused = filled(task["puzzle"], task["puzzle"], fills)
    return {"puzzle": task["puzzle"], "board": board, "refused": [UNREAD] if rng.random() < BAD_FORMAT else refused}


def planner_demonstration(rng: random.Random, state: State) -> Demonstration:
    """Cells that only one value fits, with random ones in between."""
    return messages(PLANNER, state), spoiled(rng, map(name, named(rng, state)))


def filler_demonstration(rng: random.Random, state: State) -> Demonstration:
    """Values that fit the planner's cells, with random ones in between."""
    planned = named(rng, state)
    said = spoiled(rng, map(name, planned))
    return messages(FILLER, state, f"Cells: {said}"), aided(rng, fills(rng, state, planned))


def agent_demonstration(rng: random.Random, state: State) -> Demonstration:
    """Both at once, with programs or without."""
    by_hand = fills(rng, state, named(rng, state))
    if rng.random() < 0.5:
        return messages(WITHOUT_TOOL, state), spoiled(rng, by_hand)
    return messages(ALONE, state), aided(rng, by_hand)


def aided(rng: random.Random, by_hand: Iterable[str]) -> str:
    """Fills, or a program that knows some of the rules."""
    rules = rng.sample(RULES, rng.randint(1, len(RULES)))
    return spoiled(rng, (OPENS, *rules, rng.choice(ENDS)) if rng.random() < PROGRAMS else by_hand)


def named(rng: random.Random, state: State) -> list[Cell]:
    """One to four cells: those that only one value fits, where there are such, with random ones in between."""
    board = board_of(state)
    fitting = sorted(forced(board)) or [(row, column) for row, column in ALL if not board[row][column]]
    chosen = sorted(rng.sample(fitting, min(len(fitting), rng.randint(1, CELLS))))
    return list(dict.fromkeys(rng.choice(ALL) if rng.random() < ERRING_CELL else cell for cell in chosen))


def fills(rng: random.Random, state: State, chosen: Sequence[Cell]) -> list[str]:
    """A value for each cell: one that breaks no rule, or any."""
    board = board_of(state)
    fitting = [sorted(possible(board, cell)) for cell in chosen]
    values = [rng.choice(VALUES) if not fits or rng.random() < ERRING_VALUE else rng.choice(fits) for fits in fitting]
    return [f"{name(cell)}={value}" for cell, value in zip(chosen, values, strict=True)]


def spoiled(rng: random.Random, words: Iterable[str]) -> str:
    """An answer of these words; now and then, of any."""
    return " ".join(rng.choices([*NAMES, *FILLS], k=rng.randrange(1, 5)) if rng.random() < BAD_FORMAT else words)


def demonstrations(rng: random.Random, seed: int, count: int) -> list[Demonstration]:
    """Demonstrations of all roles in turn, on tasks of the seed."""
    puzzles = make_tasks(min(PUZZLES, count), seed + 1000, size=SIZE, empty=EMPTY)
    roles = (planner_demonstration, filler_demonstration, agent_demonstration)
    return [roles[number % len(roles)](rng, scene(rng, puzzles)) for number in range(count)]


build = base_builder(lambda: WORDS, demonstrations, name="sudoku", steps=STEPS, count=DEMONSTRATIONS)

if __name__ == "__main__":
    build_by_command(build, STEPS)
