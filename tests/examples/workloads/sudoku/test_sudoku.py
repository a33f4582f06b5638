"""The Sudoku workload: its puzzles, its verifier against a SAT solver, and what messages are worth."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.integrations.apps.activation import activate
from examples.tiny_model import word_tokenizer
from examples.workloads.sudoku import app, base, board, tasks, train, verifier
from tests.examples.applications import check_knows_nothing_of_cotune
from tests.integrations.recorded import Recorded

activate()
FOLDER = Path(app.__file__).parent
SOLUTION = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
PUZZLE = [[1, 0, 3, 4], [3, 4, 0, 2], [0, 1, 4, 3], [4, 3, 2, 0]]
TASK: verifier.Puzzle = {"id": "t", "puzzle": PUZZLE, "solution": SOLUTION}
OTHER = [[2, 1, 3, 4], [3, 4, 2, 1], [1, 2, 4, 3], [4, 3, 1, 2]]
"""A board that breaks no rule, and changes clues."""
POOL = tasks.make_tasks(40, seed=5, size=4)


@pytest.mark.parametrize(("size", "empty"), [(4, 8), (9, 45)])
def test_puzzles_have_one_solution_and_repeat_with_their_seed(size: int, empty: int) -> None:
    count = {4: 30, 9: 1}[size]
    made = tasks.make_tasks(count, size=size)
    assert made == tasks.make_tasks(count, size=size)
    for task in made:
        assert json.loads(json.dumps(task)) == task
        assert tasks.another_solution(task["puzzle"]) == task["solution"]
        assert tasks.another_solution(task["puzzle"], task["solution"]) is None
        assert verifier.solved(task["puzzle"], task["solution"])
        assert 0 < sum(row.count(0) for row in task["puzzle"]) <= empty
    others = [str(task["puzzle"]) for task in tasks.make_tasks(count, seed=1, size=size)]
    assert not set(others) & {str(task["puzzle"]) for task in made}


def test_a_puzzle_of_two_solutions_is_told_from_one_of_one() -> None:
    two = [[0, 0, 3, 4], [3, 4, 0, 0], [0, 0, 4, 3], [4, 3, 0, 0]]
    first = tasks.another_solution(two)
    assert first is not None
    second = tasks.another_solution(two, first)
    assert second is not None and second != first and not verifier.faults(two, second)


def test_more_puzzles_than_there_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "REPEATS", 5)
    with pytest.raises(ValueError, match="puzzles have 1 empty cells: ask for fewer"):
        tasks.make_tasks(10_000, empty=1)
    with pytest.raises(ValueError, match="empty = 16, but a puzzle of 4 x 4 has 1 to 15 cells to fill"):
        tasks.make_tasks(1, empty=16)


def candidates(rng: random.Random, task: verifier.Puzzle) -> board.Board:
    """A board near to the solution: another valid one, a few cells wrong or empty or out of range, or random."""
    kind, grid = rng.randrange(6), copy.deepcopy(task["solution"])
    if kind == 0:
        return tasks.full_board(rng, 4)
    if kind == 1:
        return [[rng.randint(1, 4) for _ in range(4)] for _ in range(4)]
    if kind == 2:
        return copy.deepcopy(rng.choice(POOL)["solution"])
    for _ in range(rng.randint(0, 2)):
        grid[rng.randrange(4)][rng.randrange(4)] = rng.randint(0, 5)
    if kind == 3:
        rng.shuffle(grid)
    return grid


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_the_verifier_agrees_with_the_solver_on_10000_random_boards(seed: int) -> None:
    rng = random.Random(seed)
    task = rng.choice(POOL)
    for _ in range(100):
        grid = candidates(rng, task)
        assert verifier.solved(task["puzzle"], grid) == (grid == task["solution"])  # the only one, as is proven above


def test_every_fault_is_named() -> None:
    assert verifier.faults(PUZZLE, SOLUTION) == []
    assert verifier.faults(PUZZLE, PUZZLE) == ["r1c2: empty", "r2c3: empty", "r3c1: empty", "r4c4: empty"]
    wrong = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 2]]
    assert verifier.faults(PUZZLE, wrong) == [
        "row 4: 2 stands 2 times",
        "column 4: 2 stands 2 times",
        "the box at r3c3: 2 stands 2 times",
    ]
    changed = [[2, 2, 3, 4], *SOLUTION[1:]]
    assert verifier.faults(PUZZLE, changed)[0] == "r1c1: the clue 1 was changed to 2"
    assert verifier.faults(PUZZLE, [[1, 9, 3, 4], *SOLUTION[1:]]) == ["r1c2: 9 is not 1 to 4"]
    assert verifier.faults(PUZZLE, [*SOLUTION, [1, 2, 3, 4]]) == ["the board is not 4 x 4"]


def test_a_valid_board_with_other_clues_is_not_a_solution() -> None:
    """The reference implementation took any valid board for solved, whatever the clues were."""
    assert verifier.faults([[0] * 4] * 4, OTHER) == []
    assert not verifier.solved(PUZZLE, OTHER)


def test_a_full_board_is_not_a_solved_one_and_neither_is_the_end_of_the_turns() -> None:
    full = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 3]]
    assert not verifier.solved(PUZZLE, full)
    record, said = Recorded(), {"planner": "r1c2", "filler": "r1c2=2"}

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    outcome = record(solve, lambda call: said[call.role])
    assert outcome.rewards == {"team": 0.0} and len(record.roles) == 2 * app.TURNS


def test_messages_are_read_or_nothing_of_them() -> None:
    assert board.cells_in("r1c2 r10c4\n") == [(0, 1), (9, 3)]
    assert board.fills_in(" r1c2=3  r3c4=1") == [((0, 1), 3), ((2, 3), 1)]
    assert [board.cells_in(text) for text in ("", "r1c2 and r3c4", "r1c2 r1c2", "r1c2=3", "1 2")] == [None] * 5
    assert [board.fills_in(text) for text in ("", "so: r1c2=3", "r1c2", "r1c2=1 r1c2=2", "r1c2=³")] == [None] * 5


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        ("r1c2=3", "r1c2=3: 3 is in row 1 already"),
        ("r1c1=2", "r1c1=2: the cell is a clue"),
        ("r5c1=2", "r5c1=2: there is no such cell"),
        ("r0c1=2", "r0c1=2: there is no such cell"),
        ("r1c2=5", "r1c2=5: values are 1 to 4"),
        ("r1c2=0", "r1c2=0: values are 1 to 4"),
        ("r2c3=4", "r2c3=4: 4 is in row 2 already"),
        ("r1c2=2", ""),
    ],
)
def test_a_fill_that_breaks_a_rule_is_refused_by_name(fill: str, why: str) -> None:
    fills = board.fills_in(fill)
    assert fills is not None
    after, refused = board.filled(PUZZLE, PUZZLE, fills)
    assert refused == ([why] if why else [])
    assert (after == PUZZLE) == bool(why)


def filler(message: str, grid: board.Board = PUZZLE) -> dict[str, float]:
    return verifier.filler_reward(board.fills_of(message, grid), grid, TASK)


def test_what_fills_are_worth() -> None:
    assert filler("r1c2=2 r2c3=1 r3c1=2 r4c4=1") == {"team": 1, "local": 1}
    assert filler("r1c2=2 r2c3=1") == {"team": 0, "local": 0.5}
    assert filler("r1c2=2 r2c3=4") == {"team": 0, "local": 0}  # one right, one refused
    assert filler("I fill r1c2=2") == {"team": 0, "local": -1}
    empty = [[0] * 4 for _ in range(4)]
    task: verifier.Puzzle = {"id": "e", "puzzle": empty, "solution": SOLUTION}
    assert verifier.filler_reward([((0, 0), 2)], empty, task) == {"team": 0, "local": -1 / 16}  # allowed, and wrong


@pytest.mark.parametrize(
    "message",
    [
        "r1c2=1 r1c2=2 r1c2=3 r1c2=4",  # every value for a cell
        " ".join(f"r{r}c{c}={v}" for r in range(1, 5) for c in range(1, 5) for v in range(1, 5)),
        " ".join(f"r{r + 1}c{c + 1}={OTHER[r][c]}" for r in range(4) for c in range(4)),  # another board, clues and all
        "1 . 3 4\n3 4 . 2\n. 1 4 3\n4 3 2 .",  # the prompt quoted
        "```python\nprint(open(0).read())\n```",  # the same by a program
        "```python\nprint('r1c2=2'); raise SystemExit(1)\n```",
        "```python\n```",
    ],
)
def test_messages_that_say_everything_or_nothing_earn_nothing(message: str) -> None:
    reward = filler(message)
    assert reward["team"] == 0 and reward["local"] < 0


def test_a_program_reads_the_board_and_its_output_is_what_counts() -> None:
    program = """
rows = [line.split() for line in open(0)]
for r, row in enumerate(rows):
    for c, value in enumerate(row):
        left = set("1234") - set(row)
        if value == ".":
            print(f"r{r + 1}c{c + 1}={left.pop()}")
"""
    assert filler(f"Like this:\n```python{program}```") == {"team": 1, "local": 1}


def test_what_named_cells_are_worth() -> None:
    assert verifier.planner_reward("r1c2 r2c3 r3c1 r4c4", PUZZLE, TASK) == {"team": 1, "local": 1}
    assert verifier.planner_reward("r1c2 r2c3", PUZZLE, TASK) == {"team": 0, "local": 0.5}
    assert verifier.planner_reward("r1c2 r1c1", PUZZLE, TASK) == {"team": 0, "local": 0}  # a clue
    assert verifier.planner_reward("r1c1 r1c3 r1c4 r2c1", PUZZLE, TASK) == {"team": 0, "local": -1}
    assert verifier.planner_reward("r1c2=2", PUZZLE, TASK) == {"team": 0, "local": -1}
    every = " ".join(board.name(cell) for cell in board.cells(4))
    assert verifier.planner_reward(every, PUZZLE, TASK) == {"team": 0, "local": -1}
    assert verifier.planner_reward("r9c9", PUZZLE, TASK)["local"] < 0


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_scoring_leaves_the_board_as_it_is_and_says_what_carrying_out_does(seed: int) -> None:
    """The reference implementation scored a copy of the environment and went on in the original."""
    rng = random.Random(seed)
    task = rng.choice(POOL)
    before = copy.deepcopy(task)
    cells = rng.sample(list(board.cells(4)), 8)
    fills = [(cell, rng.choice([task["solution"][cell[0]][cell[1]], rng.randint(1, 4)])) for cell in cells]
    reward = verifier.filler_reward(fills, task["puzzle"], task)
    assert task == before
    after, _ = board.filled(task["puzzle"], task["puzzle"], fills)
    assert reward["team"] == float(verifier.solved(task["puzzle"], after))


def test_all_forced_cells_of_a_board_have_their_value_in_the_solution() -> None:
    for task in POOL:
        for row, column in board.forced(task["puzzle"]):
            assert board.possible(task["puzzle"], (row, column)) == {task["solution"][row][column]}


def test_the_roles_see_the_board_the_cells_and_what_was_refused() -> None:
    said = {"planner": iter(["r1c2", "r2c3 r3c1 r4c4"]), "filler": iter(["r1c2=2 r2c3=4", "r2c3=1 r3c1=2 r4c4=1"])}
    asked: list[str] = []

    def reply(call: Any) -> str:
        asked.append(call.messages[-1]["content"])
        return next(said[call.role])

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    record = Recorded()
    assert record(solve, reply).rewards == {"team": 1.0}
    assert record.roles == ["planner", "filler"] * 2
    assert asked == [
        "1 . 3 4\n3 4 . 2\n. 1 4 3\n4 3 2 .",
        "1 . 3 4\n3 4 . 2\n. 1 4 3\n4 3 2 .\nCells: r1c2",
        "1 2 3 4\n3 4 . 2\n. 1 4 3\n4 3 2 .\nRefused: r2c3=4: 4 is in row 2 already",
        "1 2 3 4\n3 4 . 2\n. 1 4 3\n4 3 2 .\nRefused: r2c3=4: 4 is in row 2 already\nCells: r2c3 r3c1 r4c4",
    ]


def test_the_application_knows_nothing_of_cotune() -> None:
    for name in ("app.py", "board.py", "tasks.py", "verifier.py"):
        check_knows_nothing_of_cotune(FOLDER / name)


def test_a_single_agent_fills_cells_by_itself() -> None:
    said = iter(["r1c2=2 r2c3=4", "I think", "r2c3=1 r3c1=2 r4c4=1"])
    asked: list[Any] = []

    def reply(call: Any) -> str:
        asked.append([message["content"] for message in call.messages])
        return next(said)

    async def alone(_: Any) -> Any:
        return await train.alone(TASK)

    record = Recorded()
    assert record(alone, reply).rewards == {"team": 1.0}
    assert record.roles == ["agent"] * 3
    filled = "1 2 3 4\n3 4 . 2\n. 1 4 3\n4 3 2 ."
    assert asked == [
        [app.ALONE, "1 . 3 4\n3 4 . 2\n. 1 4 3\n4 3 2 ."],
        [app.ALONE, f"{filled}\nRefused: r2c3=4: 4 is in row 2 already"],
        [app.ALONE, f"{filled}\nRefused: no fills were read"],
    ]


def test_a_single_agent_has_as_many_turns_as_the_team() -> None:
    async def alone(_: Any) -> Any:
        return await train.alone(TASK)

    record = Recorded()
    assert record(alone, lambda call: "r1c2=3").rewards == {"team": 0.0}
    assert len(record.roles) == app.TURNS


def test_a_single_agent_without_a_tool_has_no_program_run() -> None:
    async def without_tool(_: Any) -> Any:
        return await train.without_tool(TASK)

    asked: list[Any] = []

    def reply(call: Any) -> str:
        asked.append([message["content"] for message in call.messages])
        return BY_PROGRAM

    assert Recorded()(without_tool, reply).rewards == {"team": 0.0}
    unread = [app.WITHOUT_TOOL, f"{board.text_of(TASK['puzzle'])}\nRefused: {app.UNREAD}"]
    assert asked == [[app.WITHOUT_TOOL, board.text_of(TASK["puzzle"])], *[unread] * 3]
    record = Recorded()

    async def alone(_: Any) -> Any:
        return await train.alone(TASK)

    assert record(alone, reply).rewards == {"team": 1.0} and len(record.roles) <= 2


BY_PROGRAM = " ".join((base.OPENS, *base.RULES, base.ENDS[0]))
"""All rules, and cells that one value is left for."""
DEMONSTRATIONS = (base.planner_demonstration, base.filler_demonstration, base.agent_demonstration)


def test_the_words_of_the_demonstrations_are_all_in_the_vocabulary_and_a_prompt_is_one() -> None:
    tokenizer, rng = word_tokenizer(base.WORDS), random.Random(0)
    for number in range(300):
        messages, answer = DEMONSTRATIONS[number % 3](rng, base.scene(rng, POOL))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + answer
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text
        assert tokenizer.tokenize(messages[0]["content"]) == [messages[0]["content"]]
        assert tokenizer.decode(tokenizer(answer)["input_ids"]) == answer


def test_without_errors_the_demonstrations_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in ("ERRING_CELL", "ERRING_VALUE", "WRONG", "BAD_FORMAT", "PROGRAMS"):
        monkeypatch.setattr(base, error, 0.0)
    rng, forced = random.Random(1), 0
    for number in range(150):
        state = base.scene(rng, POOL)
        task = next(task for task in POOL if task["puzzle"] == state["puzzle"])
        _, answer = DEMONSTRATIONS[number % 3](rng, state)
        if not board.forced(state["board"]):
            continue
        forced += 1
        if number % 3 == 0:
            cells = board.cells_in(answer) or []
            assert set(cells) <= board.forced(state["board"]) and 0 < len(cells) <= verifier.CELLS
        else:
            assert all(task["solution"][row][column] == value for (row, column), value in board.fills_in(answer) or [])
            assert board.fills_in(answer)
    assert forced > 120
