"""The grid of Plan-Path as a picture, and what can be said of it in words."""

from __future__ import annotations

import base64
import io
import re
from typing import NamedTuple

from PIL import Image, ImageDraw

from examples.plan_path.grid import MOVES, Cell, Grid, step

CELL = 16
"""Pixels of a cell."""
FREE, WALL, GOAL, AGENT = "white", "black", "green", "blue"
_SAID = re.compile(r"goal (left|right)=(\d{1,2}) (up|down)=(\d{1,2}) walls ((?:up|right|down|left)(?: \w+)*|none)")


class Seen(NamedTuple):
    """What a description says: columns to the right and rows up to the goal, and the moves that a wall, or the edge,
    forbids."""

    right: int
    up: int
    walls: frozenset[str]


def drawn(grid: Grid, at: Cell) -> bytes:
    """A PNG of the grid: walls black, the goal green, the agent blue; the first row at the bottom."""
    picture = Image.new("RGB", (grid.size * CELL, grid.size * CELL), FREE)
    pen = ImageDraw.Draw(picture)
    for x, y in ((x, y) for x in range(grid.size) for y in range(grid.size)):
        colour = AGENT if (x, y) == at else GOAL if (x, y) == grid.goal else WALL if (x, y) in grid.walls else FREE
        top = (grid.size - 1 - y) * CELL
        pen.rectangle((x * CELL, top, (x + 1) * CELL - 1, top + CELL - 1), fill=colour, outline="gray")
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def data_url(png: bytes) -> str:
    """A PNG as the URL that holds it."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def truth(grid: Grid, at: Cell) -> Seen:
    """What a right description says."""
    walls = frozenset(move for move in MOVES if not grid.free(step(at, move)))
    return Seen(grid.goal[0] - at[0], grid.goal[1] - at[1], walls)


def said(seen: Seen) -> str:
    """A description in the form that is asked for."""
    across, along = ("right" if seen.right >= 0 else "left"), ("up" if seen.up >= 0 else "down")
    walls = " ".join(move for move in MOVES if move in seen.walls) or "none"
    return f"goal {across}={abs(seen.right)} {along}={abs(seen.up)} walls {walls}"


def read(text: str) -> Seen | None:
    """What a description says; None for anything else, and for a wall named twice."""
    found = _SAID.fullmatch(text.strip())
    if found is None:
        return None
    across, right, along, up, named = found.groups()
    walls = [] if named == "none" else named.split(" ")
    if len(set(walls)) != len(walls) or not set(walls) <= MOVES.keys():
        return None
    return Seen(int(right) * (1 if across == "right" else -1), int(up) * (1 if along == "up" else -1), frozenset(walls))
