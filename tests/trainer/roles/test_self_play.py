"""Self-play: two roles of one workflow with opposite rewards, on games whose equilibrium is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from examples.workloads.self_play import base, duel, noughts, train
from tests.trainer.conftest import Trainer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return base.build(tmp_path_factory.mktemp("games") / "base", steps=25, moves=0)


def test_what_can_be_won_against_a_player_is_nothing_in_equilibrium_alone():
    assert duel.exploitability(*duel.EQUILIBRIUM) == pytest.approx(0.0)
    # against left always: 2 for the row player; the column player loses -1 to left always, by right
    assert duel.exploitability(1.0, 1.0) == pytest.approx(2.0 + 1.0)
    assert duel.exploitability(0.0, 1.0, duel.SADDLE) == pytest.approx(0.0)
    # row 0.449: column has odds exp((2 - 5 x 0.449) / 0.5), 0.380; row then exp((5 x 0.380 - 2) / 0.5), 0.450
    assert duel.quantal(0.5) == pytest.approx((0.449, 0.380), abs=2e-3)


def test_the_rules_of_tic_tac_toe():
    assert noughts.winner("xxxoo....") == noughts.winner("x.o.x.o.x") == "x"
    assert noughts.winner("o.xo.xo..") == "o" and noughts.winner(noughts.EMPTY) is None
    assert noughts.free("xxxoo....") == [5, 6, 7, 8]
    assert [noughts.cell_in(text) for text in ("1", "9", "0", "x", "")] == [0, 8, None, None, None]
    assert noughts.board_seen("x.o......", "x") == "x 1=x 2=. 3=o 4=. 5=. 6=. 7=. 8=. 9=."


@pytest.mark.slow
def test_two_roles_of_opposite_rewards_find_the_saddle_of_a_game(_no_provider, model, tmp_path):
    """The base starts from the opposite corner: the row player chooses left, the column player right."""
    trainer = Trainer(tmp_path, model)
    task = {"id": "game", "game": "duel", "payoff": duel.SADDLE, "logit_bias": base.choices_only()}
    settings = {"recipe": "spiral", "policies": "full", "steps": 12, "tasks_per_step": 1, "plan": {"k": 16}}
    trainer(train.duel, [task], **settings, learner={"lr": 2e-3, "betas": [0.0, 0.99]})
    lines = trainer.metrics()
    first, last = ([line["outcome"][f"{seat}_left"] for seat in ("row", "column")] for line in (lines[0], lines[-1]))
    assert first[0] > 0.6 and first[1] < 0.4
    assert last[0] < 0.1 and last[1] > 0.9
    assert all(line["outcome"]["row"] == -line["outcome"]["column"] for line in lines)


def curve(tmp_path: Path, game: str, steps: int) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "examples.workloads.self_play.demo", "--out", str(tmp_path), "--game", game]
    done = subprocess.run([*command, "--steps", str(steps)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["curve"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_matrix_game_comes_to_its_mixed_equilibrium(tmp_path):
    found = curve(tmp_path, "duel", 100)
    assert found[0]["exploitability"] > 0.5
    shares = [fmean(ten[seat] for ten in found[5:]) for seat in ("row", "column")]
    assert shares == pytest.approx(duel.quantal(0.5), abs=0.08)
    assert duel.exploitability(*shares) < 0.35


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_tic_tac_toe_by_text_is_played_better_than_by_the_base(tmp_path):
    """The base succeeds in 0.44 of the games against random moves, and random moves themselves in 0.50."""
    found = curve(tmp_path, "noughts", 50)
    assert fmean(line["success"] for line in found) > 0.52
