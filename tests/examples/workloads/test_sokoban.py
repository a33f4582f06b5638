"""Sokoban: its rules against a solver that shares no code with them, what cannot be gained, and the application."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.integrations.apps.activation import activate
from cotune.records.structs import Message
from examples.tiny_model import word_tokenizer
from examples.workloads.sokoban import base, game, train
from examples.workloads.sokoban.tasks import fewest_pushes, make_tasks
from examples.workloads.sokoban.verifier import executor_reward, planner_reward, team_reward, verdict
from tests.integrations.recorded import Recorded

activate()
LEVELS = list(make_tasks(40, 7))
TASK: game.Level = {"id": "t", "rows": ["######", "#@   #", "# $  #", "#   .#", "#    #", "######"], "pushes": 3}
FLOOR, START = game.parsed(TASK["rows"])
STEPS = {"up": -1, "down": 1, "left": -1, "right": 1}


class Drawn:
    """Sokoban on rows of characters, as the notation has it: an independent way to the same answers."""

    def __init__(self, rows: list[str]) -> None:
        self.rows = [list(row) for row in rows]

    def move(self, direction: str) -> None:
        y, x = next((y, row.index(m)) for y, row in enumerate(self.rows) for m in "@+" if m in row)
        by, bx = (STEPS[direction], 0) if direction in ("up", "down") else (0, STEPS[direction])
        ahead = self.rows[y + by][x + bx]
        if ahead == "#":
            return
        if ahead in "$*":
            if self.rows[y + 2 * by][x + 2 * bx] not in " .":
                return
            self.rows[y + 2 * by][x + 2 * bx] = "*" if self.rows[y + 2 * by][x + 2 * bx] == "." else "$"
        self.rows[y + by][x + bx] = "+" if ahead in ".*" else "@"
        self.rows[y][x] = "." if self.rows[y][x] == "+" else " "

    @property
    def won(self) -> bool:
        return not any("$" in row for row in self.rows)

    @property
    def key(self) -> str:
        return "\n".join("".join(row) for row in self.rows)

    def solvable(self) -> bool:
        """By looking at every drawing that moves lead to."""
        seen, waiting = {self.key}, [self.key]
        while waiting:
            drawing = waiting.pop()
            if "$" not in drawing:
                return True
            for direction in STEPS:
                other = Drawn(drawing.split("\n"))
                other.move(direction)
                if other.key not in seen:
                    seen.add(other.key)
                    waiting.append(other.key)
        return False


def played(rows: list[str], moves: list[str]) -> Drawn:
    drawn = Drawn(rows)
    for move in moves:
        if not drawn.won:
            drawn.move(move)
    return drawn


def solution(floor: game.Floor, position: game.Position) -> list[str]:
    """Moves, each one nearer to the end."""
    moves: list[str] = []
    while left := game.distance(floor, position):
        after = {move: game.moved(floor, position, move) for move in game.MOVES}
        move = next(m for m, p in after.items() if p is not None and game.distance(floor, p) == left - 1)
        moves, position = [*moves, move], after[move]
    return moves


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_answers_are_judged_as_the_independent_rules_judge_them(count: int) -> None:
    rng = random.Random(3)
    solvable: dict[str, bool] = {}
    won = stuck = 0
    for number in range(count):
        task = LEVELS[number % len(LEVELS)]
        best = solution(*game.parsed(task["rows"]))
        moves = best[: rng.randrange(len(best) + 1)] if number % 2 else []
        moves += rng.choices(list(game.MOVES), k=rng.randrange(12))
        found, drawn = verdict(task, moves), played(task["rows"], moves)
        assert found.won == drawn.won
        if drawn.key not in solvable:
            solvable[drawn.key] = drawn.solvable()
        assert found.deadlock == (not solvable[drawn.key])
        won, stuck = won + found.won, stuck + found.deadlock
    assert won > count / 10 and stuck > count / 20


def test_every_level_can_be_solved_in_the_pushes_that_it_names_and_in_no_fewer() -> None:
    for task in [*LEVELS, *make_tasks(3, 1, size=8, boxes=2, pushes=(3, 6))]:
        floor, start = game.parsed(task["rows"])
        assert fewest_pushes(floor, start) == task["pushes"]
        assert verdict(task, solution(floor, start)).won
        assert Drawn(task["rows"]).solvable()
    assert [task["rows"] for task in make_tasks(5, 7)] == [task["rows"] for task in LEVELS[:5]]
    assert not {tuple(task["rows"]) for task in make_tasks(40, 8)} & {tuple(task["rows"]) for task in LEVELS}


def test_a_game_that_runs_out_of_turns_is_lost() -> None:
    assert not verdict(TASK, ["up"] * 100).won
    assert not verdict(TASK, []).won
    one_short = solution(FLOOR, START)[:-1]
    assert not verdict(TASK, one_short).won and not verdict(TASK, one_short).deadlock


def test_a_box_in_a_corner_is_noticed_and_costs() -> None:
    moves = ["right", "down", "down"]
    found = verdict(TASK, [*moves, "down"])
    assert not found.won and found.deadlock
    after, _ = game.carried_out(FLOOR, START, moves)
    assert game.deadlocked(FLOOR, after)
    assert team_reward(FLOOR, START, after) == -1.0
    assert executor_reward(FLOOR, START, " ".join(moves)) == {"team": -1.0, "local": 0.0}


def test_what_is_no_move_is_named_and_does_nothing() -> None:
    found = verdict(TASK, ["jump", *solution(FLOOR, START), "won"])
    assert found.won and found.unknown == ("jump", "won")
    assert verdict(TASK, ["solved"]).won is False


@pytest.mark.parametrize("text", ["", "solved", "right right right right right right right right right", "2,2 right"])
def test_what_is_not_moves_earns_less_than_standing_still(text: str) -> None:
    assert executor_reward(FLOOR, START, text) == {"team": 0.0, "local": -1.0}


@pytest.mark.parametrize(
    "text", ["", "right", "2,2", "2,2 right right right", "2,2 jump", "²,2 right", "2,2 right 3,2"]
)
def test_what_is_not_a_plan_earns_least(text: str) -> None:
    assert planner_reward(FLOOR, START, text) == {"team": 0.0, "local": -1.0}


@pytest.mark.parametrize("text", ["1,1 right", "9,9 up", "2,3 left"])
def test_a_plan_that_nobody_can_carry_out_earns_nothing(text: str) -> None:
    assert planner_reward(FLOOR, START, text) == {"team": 0.0, "local": -0.5}


def test_of_a_message_the_last_line_counts() -> None:
    assert executor_reward(FLOOR, START, "Below the box?\nNo: left.\ndown right right\n")["team"] == 0.75
    assert executor_reward(FLOOR, START, "down right right\nThat is it.")["local"] == -1.0
    assert game.plan_in("I push.\n2,2 right") == ((2, 2), ["right"])


def test_a_push_earns_by_how_much_nearer_it_is() -> None:
    assert game.distance(FLOOR, START) == 6
    assert planner_reward(FLOOR, START, "2,2 right right") == {"team": 0.75, "local": 0.0}
    assert planner_reward(FLOOR, START, "2,2 left")["team"] < 0
    assert executor_reward(FLOOR, START, "down right right") == {"team": 0.75, "local": 0.0}
    assert executor_reward(FLOOR, START, "left left up") == {"team": 0.0, "local": pytest.approx(-0.3)}
    near, _ = game.carried_out(FLOOR, START, solution(FLOOR, START)[:-1])
    last = solution(FLOOR, START)[-1]
    assert executor_reward(FLOOR, near, last) == {"team": 1.25, "local": 0.0}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(list(game.MOVES)), max_size=6), max_size=5), st.integers(0, 39))
def test_going_back_and_forth_gains_nothing(messages: list[list[str]], number: int) -> None:
    floor, start = game.parsed(LEVELS[number]["rows"])
    position, earned = start, 0.0
    for moves in messages:
        after, _ = game.carried_out(floor, position, moves)
        earned += team_reward(floor, position, after)
        position = after
    if game.deadlocked(floor, position):
        assert earned < (game.distance(floor, start) or 0) / 4
    else:
        assert earned == pytest.approx(team_reward(floor, start, position))


@pytest.mark.parametrize(
    "rows", [["####", "#@ #", "####"], ["#####", "#@$ #", "#####"], ["#####", "#@$.", "#####"], ["@$.@"]]
)
def test_what_is_no_level_is_refused(rows: list[str]) -> None:
    with pytest.raises(ValueError, match="a level "):
        game.parsed(rows)


def test_levels_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 2 boxes"):
        list(make_tasks(1, 0, boxes=3))


def test_each_role_sees_what_the_other_does_not() -> None:
    assert game.planner_sees(FLOOR, START) == "boxes 2,2\ngoals 4,3\nsize 6,6\nwalls"
    assert game.executor_sees(FLOOR, START, "2,2 right") == "player 1,1\nboxes 2,2\nsize 6,6\nwalls\nsaid 2,2 right"


def best(call: Any) -> str:
    played_on = call.state.agent.game
    (x, y), push = game.best_push(played_on.floor, played_on.position)
    if call.role == "planner":
        return f"{x},{y} {push}"
    return " ".join(game.way_to_push(played_on.floor, played_on.position, (x, y), [push]) or [])


def test_a_perfect_team_is_recorded_by_role_and_wins() -> None:
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    rewards = record(solve, best).rewards
    assert record.roles == ["planner", "executor"] * 3
    assert rewards == {"team": 6 / 4 + 1}
    asked = [[m for m in record.sink if isinstance(m, Message) and m.id in c.messages] for c in record.calls]
    assert [len(messages) for messages in asked] == [2] * 6  # nothing is remembered
    assert game.EXECUTOR in str(asked[1][0].body) + str(asked[1][1].body)


def test_the_words_of_the_game_are_all_in_the_vocabulary() -> None:
    tokenizer, rng = word_tokenizer(base.WORDS), random.Random(0)
    for task in LEVELS:
        where = base.scene(rng, [game.parsed(task["rows"])])
        for demonstration in (base.planner_demonstration, base.executor_demonstration, base.agent_demonstration):
            messages, answer = demonstration(rng, *where)
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + answer
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text
