"""The picture workload: what the picture shows, what a description says, and what messages are worth."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cotune.integrations.apps.activation import activate
from examples.plan_path.base import scene
from examples.plan_path.grid import MOVES, Cell, Grid, carry_out, cell_of, grid_of
from examples.workloads.pictures import app, base, board, tasks, train, verifier
from tests.integrations.recorded import Recorded

activate()
POOL = tasks.make_tasks(40, seed=5)
GRID = Grid(4, frozenset({(1, 0), (0, 1), (2, 2)}), (3, 3), ())
COLOURS = {(255, 255, 255): "free", (0, 0, 0): "wall", (0, 128, 0): "goal", (0, 0, 255): "agent"}


def shown(png: bytes) -> list[list[str]]:
    """What stands in the middle of each cell, by row from the bottom."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    count, half = picture.width // board.CELL, board.CELL // 2
    return [
        [
            COLOURS[picture.getpixel((x * board.CELL + half, picture.height - y * board.CELL - half))]  # type: ignore[index]
            for x in range(count)
        ]
        for y in range(count)
    ]


def test_the_picture_shows_the_board_and_nothing_else() -> None:
    assert shown(board.drawn(GRID, (0, 0))) == [
        ["agent", "wall", "free", "free"],
        ["wall", "free", "free", "free"],
        ["free", "free", "wall", "free"],
        ["free", "free", "free", "goal"],
    ]
    assert board.drawn(GRID, (0, 0)) == board.drawn(GRID, (0, 0))


def test_a_right_description_is_read_back_and_earns_all() -> None:
    for task in POOL:
        grid, at = grid_of(task), cell_of(task["start"])
        text = board.said(board.truth(grid, at))
        assert board.read(text) == board.truth(grid, at)
        assert verifier.describer_reward(grid, at, text) == {"team": 1.0, "local": 0.0}


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("goal right=3 up=3 walls up right down left", {"team": 1.0, "local": 0.0}),
        ("goal right=3 up=3 walls none", {"team": 1.0, "local": -1.0}),
        ("goal right=3 down=3 walls up right down", {"team": 0.5, "local": -0.25}),
        ("goal right=3 up=3 walls up up right down left", {"team": 0.0, "local": -1.0}),
        ("goal right=3 up=3 walls up right down left right up", {"team": 0.0, "local": -1.0}),
        ("right up", {"team": 0.0, "local": -1.0}),
        ("goal right=3 up=3 walls none\ngoal right=2 up=3 walls none", {"team": 0.0, "local": -1.0}),
        ("", {"team": 0.0, "local": -1.0}),
    ],
)
def test_what_a_description_earns(text: str, worth: dict[str, float]) -> None:
    assert verifier.describer_reward(GRID, (0, 0), text) == worth


@pytest.mark.parametrize(
    ("at", "text", "worth"),
    [
        ((3, 1), "up up", {"team": 2.0, "local": 0.0}),
        ((3, 2), "up right", {"team": 1.5, "local": 0.0}),
        ((2, 1), "up right", {"team": 0.5, "local": -0.1}),
        ((3, 1), "up up up", {"team": 0.0, "local": -1.0}),
        ((3, 1), "go up", {"team": 0.0, "local": -1.0}),
    ],
)
def test_what_moves_earn(at: Cell, text: str, worth: dict[str, float]) -> None:
    assert verifier.solver_reward(GRID, at, text) == pytest.approx(worth)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_other_description_earns_as_much_as_the_right_one(data: st.DataObject) -> None:
    task = data.draw(st.sampled_from(POOL))
    grid, at = grid_of(task), cell_of(task["start"])
    words = st.sampled_from(["goal", "walls", "none", "right=1", "up=2", "left=0", "down=4", *MOVES])
    text = " ".join(data.draw(st.lists(words, max_size=9)))
    earned = sum(verifier.describer_reward(grid, at, text).values())
    found = board.read(text)
    assert (earned == 1.0) == (found == board.truth(grid, at)) and earned <= 1.0


def test_the_solver_walks_and_never_sees_the_picture() -> None:
    """One that is told the truth, and takes the first free direction of it, arrives wherever no wall is in its way."""
    record = Recorded()
    task = {"id": "t", "size": 4, "walls": [[3, 0]], "start": [0, 0], "goal": [2, 2], "controls": {}}

    def says(call):  # type: ignore[no-untyped-def]
        if call.role == "describer":
            (message,) = call.messages
            assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
            assert "size" not in str(message["content"][1])
            return board.said(board.truth(grid_of(call.state["task"]), app.position(call.state)))
        assert "image_url" not in str(call.messages)
        seen = board.read(call.messages[-1]["content"])
        assert seen is not None
        return " ".join(["right"] * min(1, seen.right) + ["up"] * min(1, seen.up))

    async def walk(given):  # type: ignore[no-untyped-def]
        return await train.solve(task)

    assert record(walk, says).rewards == {"team": 3.0}
    assert record.roles == ["describer", "solver"] * 2


def test_a_single_agent_sees_the_picture_and_walks() -> None:
    record = Recorded()
    task = {"id": "t", "size": 4, "walls": [[3, 0]], "start": [0, 0], "goal": [2, 2], "controls": {}}

    def says(call):  # type: ignore[no-untyped-def]
        (message,) = call.messages
        assert message["content"][0]["image_url"]["url"] == board.data_url(
            board.drawn(grid_of(task), app.position(call.state))
        )
        return "right up" if call.turn < 2 else "down"

    async def walk(given):  # type: ignore[no-untyped-def]
        return await train.alone(task)

    assert record(walk, says).rewards == {"team": 3.0}
    assert record.roles == ["agent"] * 2


def test_what_is_demonstrated_is_right_but_for_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("ERRING_MOVE", "ERRING_WAY", "ERRING_WALL", "BAD_FORMAT"):
        monkeypatch.setattr(base, errors, 0.0)
    rng = random.Random(0)
    for _ in range(50):
        grid, at = scene(rng)
        assert base.description(rng, grid, at) == board.truth(grid, at)
        moves = base.moves_on(rng, grid, at)
        assert grid.distance(at) - grid.distance(carry_out(grid, at, moves).at) == len(moves)
        assert carry_out(grid, at, base.moves_by(rng, board.truth(grid, at))[:1]).bumps == 0


@pytest.mark.parametrize(("errors", "least", "most"), [(0.0, 0.93, 1.0), (1.0, 0.1, 0.3)])
def test_what_right_descriptions_and_moves_at_random_reach(
    errors: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "ERRING_MOVE", errors)
    rng, reached = random.Random(0), 0
    for task in tasks.make_tasks(300, 900, size=4):
        grid, at, turns = grid_of(task), cell_of(task["start"]), 0
        while at != grid.goal and turns < 4 + app.SPARE:
            at, turns = carry_out(grid, at, base.moves_by(rng, board.truth(grid, at))).at, turns + 1
        reached += at == grid.goal
    assert least <= reached / 300 <= most
