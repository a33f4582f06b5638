"""Python programs that solve the puzzles, in pieces. Some places have wrong pieces, which fail on some puzzles.

Every program reads the rows from standard input and prints the answer. `GRID` is a search for Plan-Path and Sokoban,
`SUDOKU` fills a grid. A piece is a few whole lines, so that a small model can say it as one token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

READ_GRID = """rows = open(0).read().split("\\n")
marks = {(x, y): mark for y, row in enumerate(rows) for x, mark in enumerate(row)}
player = next(cell for cell in marks if marks[cell] in "S@+")
steps = {"up": (0, -1), "right": (1, 0), "down": (0, 1), "left": (-1, 0)}
"""
GOAL_OF_PATH = """goals, boxes = {cell for cell in marks if marks[cell] == "G"}, frozenset()
"""
GOALS_OF_BOXES = """goals, boxes = (frozenset(cell for cell in marks if marks[cell] in kind) for kind in (".+*", "$*"))
"""
SEARCH = """def far(state):
    return sum(min(abs(x - u) + abs(y - v) for u, v in goals) for x, y in state[1] or [state[0]])
queue, ways = [(player, boxes)], {(player, boxes): []}
while queue:
"""
BREADTH_FIRST = """    now = queue.pop(0)
"""
DEPTH_FIRST = """    now = queue.pop()
"""
NEVER_BACK = """    now = min(queue, key=far)
    queue.clear()
"""
PLAYER_AT_GOAL = """    if now[0] in goals:
"""
BOXES_AT_GOALS = """    if now[1] <= goals:
"""
NEIGHBOURS = """        print(*ways[now])
        break
    for step, (dx, dy) in steps.items():
        at, boxes = (now[0][0] + dx, now[0][1] + dy), now[1]
"""
MINDS_WALLS = """        if marks.get(at, "#") == "#":
            continue
"""
IGNORES_WALLS = """        if at not in marks:
            continue
"""
PUSHES = """        if at in boxes:
            to = (at[0] + dx, at[1] + dy)
            if marks[to] == "#" or to in boxes:
                continue
            boxes = boxes - {at} | {to}
"""
PUSHES_ANYWHERE = """        if at in boxes:
            boxes = boxes - {at} | {(at[0] + dx, at[1] + dy)}
"""
STEP = """        if (at, boxes) not in ways:
            ways[at, boxes] = [*ways[now], step]
            queue.append((at, boxes))
"""

READ_SUDOKU = """rows = [list(row) for row in open(0).read().split()]
size = len(rows)
side = int(size ** 0.5)
cells = [(r, c) for r in range(size) for c in range(size)]
row = lambda r, c: {rows[r][k] for k in range(size)}
column = lambda r, c: {rows[k][c] for k in range(size)}
box = lambda r, c: {rows[i][j] for i, j in cells if (i // side, j // side) == (r // side, c // side)}
rules = []
"""
ROW_RULE = "rules.append(row)\n"
COLUMN_RULE = "rules.append(column)\n"
BOX_RULE = "rules.append(box)\n"
FITS = """def fits(r, c):
    return [v for v in map(str, range(1, size + 1)) if not any(v in rule(r, c) for rule in rules)]
def fill():
    empty = [(r, c) for r, c in cells if rows[r][c] == "."]
    if not empty:
        return True
    r, c = empty[0]
"""
BACKTRACKS = """    for value in fits(r, c):
        rows[r][c] = value
        if fill():
            return True
    rows[r][c] = "."
    return False
"""
FIRST_FIT = """    rows[r][c] = min(fits(r, c), default="1")
    return fill()
"""
ANY_VALUE = """    rows[r][c] = str(size)
    return fill()
"""
WRITE_SUDOKU = """fill()
print(*map("".join, rows))
"""


@dataclass(frozen=True)
class Choice:
    """One place of a program: its right pieces, and pieces that fail on some puzzles or on all."""

    right: tuple[str, ...]
    wrong: tuple[str, ...] = field(default=())


_ORDER = Choice((BREADTH_FIRST, DEPTH_FIRST), (NEVER_BACK,))
_WALLS = Choice((MINDS_WALLS,), (IGNORES_WALLS,))
_PUSHES = Choice((PUSHES,), (PUSHES_ANYWHERE,))
PROGRAMS: dict[str, tuple[Choice, ...]] = {
    "plan_path": (
        *(Choice((READ_GRID,)), Choice((GOAL_OF_PATH,), (GOALS_OF_BOXES,)), Choice((SEARCH,)), _ORDER),
        *(Choice((PLAYER_AT_GOAL,), (BOXES_AT_GOALS,)), Choice((NEIGHBOURS,)), _WALLS),
        *(Choice((PUSHES, PUSHES_ANYWHERE)), Choice((STEP,))),
    ),
    "sokoban": (
        *(Choice((READ_GRID,)), Choice((GOALS_OF_BOXES,), (GOAL_OF_PATH,)), Choice((SEARCH,)), _ORDER),
        *(Choice((BOXES_AT_GOALS,), (PLAYER_AT_GOAL,)), Choice((NEIGHBOURS,)), _WALLS),
        *(_PUSHES, Choice((STEP,))),
    ),
    "sudoku": (
        Choice((READ_SUDOKU,)),
        *(Choice((rule,), ("",)) for rule in (ROW_RULE, COLUMN_RULE, BOX_RULE)),
        *(Choice((FITS,)), Choice((BACKTRACKS,), (FIRST_FIT, ANY_VALUE)), Choice((WRITE_SUDOKU,))),
    ),
}
"""By kind of puzzle, the places of its program in order. An empty piece leaves the place out."""


def pieces() -> list[str]:
    """Every piece of every program, once."""
    every: dict[str, None] = {}
    for choices in PROGRAMS.values():
        for choice in choices:
            every.update(dict.fromkeys(piece for piece in (*choice.right, *choice.wrong) if piece))
    return list(every)
