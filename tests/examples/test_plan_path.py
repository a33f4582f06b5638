"""The Plan-Path example: its rules, what the roles see, its rewards, and its base model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.plan_path import base, grid, rewards
from examples.tiny_model import word_tokenizer
from tests.examples.applications import check_knows_nothing_of_cotune, imports_of

FOLDER = Path(grid.__file__).parent
TASK = {
    "id": "t",
    "size": 4,
    "walls": [[1, 0], [2, 2]],
    "start": [0, 0],
    "goal": [2, 1],
    "controls": {"up": "c", "right": "a", "down": "d", "left": "b"},
}
BOARD = grid.grid_of(TASK)


def test_distances_go_around_walls() -> None:
    assert BOARD.distance((0, 0)) == 3
    assert BOARD.distance((2, 0)) == 1
    assert BOARD.distance((2, 3)) == 4
    assert BOARD.distance((2, 1)) == 0


def test_walls_and_borders_are_not_free() -> None:
    assert [BOARD.free(cell) for cell in ((0, 0), (1, 0), (-1, 0), (0, 4), (3, 3))] == [True, False, False, False, True]


def test_moves_are_carried_out_bumps_cost_the_move_and_the_goal_ends_them() -> None:
    assert grid.carry_out(BOARD, (0, 0), ["up", "right"]) == grid.Effect((1, 1), 2, 0, False)
    assert grid.carry_out(BOARD, (0, 0), ["right", "left"]) == grid.Effect((0, 0), 0, 2, False)
    assert grid.carry_out(BOARD, (1, 1), ["right", "right"]) == grid.Effect((2, 1), 1, 0, True)
    assert grid.carry_out(BOARD, (0, 1), ["up"]) == grid.Effect((0, 2), -1, 0, False)
    assert grid.carry_out(BOARD, (0, 0), []) == grid.Effect((0, 0), 0, 0, False)


def test_only_one_or_two_known_words_are_moves_or_controls() -> None:
    assert grid.moves_in("up right") == ["up", "right"]
    assert grid.moves_in("left") == ["left"]
    assert [grid.moves_in(text) for text in ("", "up up up", "go up", "c a")] == [None] * 4
    assert grid.moves_of(BOARD, "c a") == ["up", "right"]
    assert grid.moves_of(BOARD, "d") == ["down"]
    assert [grid.moves_of(BOARD, text) for text in ("", "c a c", "press c", "up")] == [None] * 4


def test_prompts_are_what_each_role_sees_and_nothing_else() -> None:
    assert grid.navigator_messages(BOARD, (0, 0)) == [
        {"role": "system", "content": "You navigate."},
        {
            "role": "user",
            "content": "goal right=2 up=1\nwalls right down left down-right down-down down-left left-left up-left",
        },
    ]
    assert grid.driver_messages(BOARD, "up right") == [
        {"role": "system", "content": "You drive."},
        {"role": "user", "content": "controls up=c right=a down=d left=b\nsaid up right"},
    ]


def test_tasks_repeat_with_their_seed_and_can_be_solved() -> None:
    tasks = list(grid.make_tasks(50, 7))
    assert tasks == list(grid.make_tasks(50, 7))
    assert tasks[:10] != list(grid.make_tasks(10, 8))
    assert {task["id"] for task in tasks} == {f"7-{number}" for number in range(50)}
    for task in tasks:
        assert json.loads(json.dumps(task)) == task
        assert 3 <= grid.grid_of(task).distance(grid.cell_of(task["start"])) <= 6
        assert sorted(task["controls"].values()) == ["a", "b", "c", "d"]


def test_training_and_held_out_tasks_differ() -> None:
    boards = [{json.dumps({**t, "id": ""}) for t in grid.make_tasks(500, seed)} for seed in (0, 1)]
    assert not boards[0] & boards[1]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000))
def test_a_shortest_path_of_five_turns_of_two_moves_reaches_the_goal(seed: int) -> None:
    task = grid.make_task(random.Random(seed))
    board, at = grid.grid_of(task), grid.cell_of(task["start"])
    for _ in range(grid.ROUNDS * 2):
        free = [move for move in grid.MOVES if board.free(grid.step(at, move))]
        best = min(free, key=lambda move: board.distance(grid.step(at, move)))
        at = grid.carry_out(board, at, [best]).at
        if at == board.goal:
            break
    assert at == board.goal


def test_rewards_of_the_navigator() -> None:
    assert rewards.navigator_reward(BOARD, (0, 0), "up right") == {"team": 1.0, "local": 0.0}
    assert rewards.navigator_reward(BOARD, (1, 1), "right") == {"team": 1.5, "local": 0.0}
    assert rewards.navigator_reward(BOARD, (0, 1), "up") == {"team": -0.5, "local": 0.0}
    assert rewards.navigator_reward(BOARD, (0, 0), "right up") == {"team": 0.5, "local": -0.1}
    assert rewards.navigator_reward(BOARD, (0, 0), "c a") == {"team": 0.0, "local": -1.0}


def test_rewards_of_the_driver_follow_its_table() -> None:
    assert rewards.driver_reward(BOARD, (0, 0), "c a") == {"team": 1.0, "local": 0.0}
    assert rewards.driver_reward(BOARD, (1, 1), "a") == {"team": 1.5, "local": 0.0}
    assert rewards.driver_reward(BOARD, (0, 0), "a") == {"team": 0.0, "local": -0.1}
    assert rewards.driver_reward(BOARD, (0, 0), "up right") == {"team": 0.0, "local": -1.0}


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000))
def test_a_right_move_earns_more_than_any_other_kind_of_answer(seed: int) -> None:
    task = grid.make_task(random.Random(seed))
    board, at = grid.grid_of(task), grid.cell_of(task["start"])
    earned = {move: sum(rewards.navigator_reward(board, at, move).values()) for move in grid.MOVES}
    nearer = {
        m for m in grid.MOVES if board.free(grid.step(at, m)) and board.distance(grid.step(at, m)) < board.distance(at)
    }
    worst_right = min(earned[move] for move in nearer)
    assert all(earned[move] < worst_right for move in grid.MOVES if move not in nearer)
    assert sum(rewards.navigator_reward(board, at, "go go").values()) < min(earned.values())
    pressed = {move: sum(rewards.driver_reward(board, at, letter).values()) for move, letter in board.controls}
    assert pressed == earned


def test_the_team_earns_what_its_way_is_worth() -> None:
    assert rewards.team_reward(BOARD, (0, 0), (1, 1)) == 1.0
    assert rewards.team_reward(BOARD, (0, 0), (2, 1)) == 2.5


@pytest.mark.parametrize("name", ["app.py", "grid.py"])
def test_the_application_knows_nothing_of_cotune(name: str) -> None:
    check_knows_nothing_of_cotune(FOLDER / name)
    assert {found for found in imports_of(FOLDER / name) if "examples" in found} <= {"examples.plan_path.grid"}


def test_the_words_of_the_game_are_all_in_the_vocabulary() -> None:
    tokenizer = word_tokenizer(base.WORDS)
    for task in grid.make_tasks(30, 3):
        board, at = grid.grid_of(task), grid.cell_of(task["start"])
        for messages in (grid.navigator_messages(board, at), grid.driver_messages(board, "up left")):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer("right up")["input_ids"]) == "right up"


def test_demonstrations_repeat_with_their_seed_and_err_at_times() -> None:
    drawn = [[base.navigator_demonstration(random.Random(seed)) for seed in range(200)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    broken = sum(grid.moves_in(answer) is None for _, answer in drawn[0])
    assert 5 <= broken <= 40


def test_a_base_model_of_a_tiny_budget_loads_and_repeats(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses: dict[str, list[float]] = {"one": [], "two": []}
    for name, seen in losses.items():
        base.build(tmp_path / name, seed=3, steps=3, count=60, report=lambda _, loss, seen=seen: seen.append(loss))
    assert losses["one"] == losses["two"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim == 32
    assert 250_000 < sum(p.numel() for p in model.parameters()) < 350_000
    messages = grid.driver_messages(BOARD, "up")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou drive.<|im_end|>") and text.endswith("<|im_start|>assistant\n")
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
