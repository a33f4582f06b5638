"""MALT (arXiv 2412.01928) on a replayed record: what sft takes for positives, and which pairs dpo makes.

The generator's answer g0 was criticised with v0 and refined to r0, which was right. Each of the three calls was forked:

    g0 - v0 - r0: 1, r1: 1, r2: 0       V(v0) = 2/3
       - v1 - r3: 0                     V(v1) = 0
       - v2 - r4: 1                     V(v2) = 1, V(g0) = (2/3 + 0 + 1) / 3 = 5/9
    g1 - v3 - r5: 0                     V(g1) = V(v3) = 0
    g2 - v4 - r6: 1                     V(g2) = V(v4) = 1
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotune.config.records import RecordsConfig
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Fork, Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.records.answers import read_answers
from cotune.trainer.records.lessons import Recorded
from cotune.trainer.records.pairs import read_pairs
from tests.trainer.conftest import Trainer
from tests.trainer.records.records import asked, reading, said
from tests.trainer.tiny_app import application, ask

ROLES = ("generator", "verifier", "refiner")
BRANCHES = [(2, "l", 1.0), (2, "n", 0.0), (1, "mo", 0.0), (1, "qs", 1.0), (0, "tuv", 0.0), (0, "wxy", 1.0)]
"""Where a branch leaves the trunk "ijk", what it says from there on, and how it ends."""
LETTERS = {"g0": "i", "v0": "j", "r0": "k", "r1": "l", "r2": "n", "v1": "m", "r3": "o", "v2": "q", "r4": "s",
           "g1": "t", "v3": "u", "r5": "v", "g2": "w", "v4": "x", "r6": "y"}  # fmt: skip


def play(
    store: SqliteStore,
    letters: str,
    outcome: float | None,
    trunk: Any = None,
    at: int = 3,
    *,
    blame: Any = "policy",
) -> Any:
    """An episode that says `letters`; of a branch those before `at` are from the trunk's record.
    Without an outcome it fails, by `blame`."""
    live = LiveEpisode(store, Task(id="a", input={"letter": "a"}), workflow="w", phase="train")
    made: list[str] = []
    heard = ""
    for step, (role, letter) in enumerate(zip(ROLES, letters, strict=True)):
        call = live.start(CallerContext(role, "test"), {"messages": asked(f"say{heard}")})
        replayed = trunk.calls[step] if trunk is not None and step < at else None
        call.finish(Answer(candidates=(said(letter),), replayed=replayed))
        made.append(call.id)
        heard += f" {letter}"
    if trunk is not None:
        live.fork = Fork(trunk=trunk.id, call=trunk.calls[at], at=made[at])
    if outcome is None:
        live.end("error", error="crashed", blame=blame)
    else:
        live.end("ok", rewards={"team": outcome})
    live.calls = made
    return live


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    with SqliteStore.open(tmp_path / "tree") as store:
        trunk = play(store, "ijk", 1.0)
        for at, letters, outcome in BRANCHES:
            play(store, "ijk"[:at] + letters, outcome, trunk, at)
    return tmp_path / "tree"


def texts(found: Recorded, base: Path) -> dict[str, list[str]]:
    decode = ChatTemplate.load(base).tokenizer.decode
    rows = found.of(found.rows, {role: role for role in found.roles})
    return {role: [decode(row.response_ids)[0] for row in its_rows] for role, its_rows in rows.items()}


def letters_of(*names: str) -> list[str]:
    return [LETTERS[name] for name in names]


def test_sft_learns_the_answers_whose_value_is_above_a_half(recorded: Path, tiny_base: Path) -> None:
    with SqliteStore.open(recorded, read_only=True) as store:
        found = read_answers(store, reading(ChatTemplate.load(tiny_base)), RecordsConfig(path="x", min_reward=0.51))
        high = read_answers(store, reading(ChatTemplate.load(tiny_base)), RecordsConfig(path="x", min_reward=0.6))
    assert texts(found, tiny_base) == {
        "generator": letters_of("g0", "g2"),
        "verifier": letters_of("v0", "v2", "v4"),
        "refiner": letters_of("r0", "r1", "r4", "r6"),
    }
    assert found.left_out == {"below_reward": 6, "replayed": 6}
    assert texts(high, tiny_base)["generator"] == letters_of("g2"), "V(g0) = 5/9"


@pytest.mark.parametrize(("on_failure", "learned"), [("lowest", ""), (0.5, "i"), (-2.0, ""), ("exclude", "i")])
def test_branches_that_failed_count_in_the_value_of_the_answer_before(
    tmp_path: Path, tiny_base: Path, on_failure: Any, learned: str
) -> None:
    """V(i) = (1 + 3 failures) / 4: 0.25, 0.625, -1.25, and 1 without them; what the infrastructure failed never counts.
    dpo compares i, where it is worth less, with the answer of another episode, which is worth 0.5."""
    with SqliteStore.open(tmp_path / "tree") as store:
        trunk = play(store, "ijk", 1.0)
        for letters, blame in (("imo", "policy"), ("iqs", None), ("ilu", "policy"), ("ivx", "infrastructure")):
            play(store, letters, None, trunk, 1, blame=blame)
        play(store, "tuv", 0.5)
        store.flush()
        chat = ChatTemplate.load(tiny_base)
        settings = RecordsConfig(path="x", min_reward=0.5)
        answers = texts(read_answers(store, reading(chat), settings, on_failure), tiny_base)
        pairs = texts(read_pairs(store, reading(chat), on_failure), tiny_base)
    assert answers["generator"] == [*learned, "t"]
    assert pairs["generator"] == (["i", "t"] if learned else ["t", "i"])


def test_dpo_takes_the_answer_of_an_episode_that_failed_for_the_worse(tmp_path: Path, tiny_base: Path) -> None:
    with SqliteStore.open(tmp_path / "flat") as store:
        play(store, "ijk", 1.0)
        play(store, "tuv", None)
        play(store, "wxy", None, blame="infrastructure")
        store.flush()
        found = read_pairs(store, reading(ChatTemplate.load(tiny_base)))
    assert texts(found, tiny_base)["generator"] == ["i", "t"]
    assert found.left_out == {"no_reward": 3, "only_answer": 4}


def test_dpo_pairs_siblings_by_their_values(recorded: Path, tiny_base: Path) -> None:
    with SqliteStore.open(recorded, read_only=True) as store:
        found = read_pairs(store, reading(ChatTemplate.load(tiny_base)))
    pairs = texts(found, tiny_base)
    assert pairs["generator"] == letters_of("g2", "g1")
    assert pairs["verifier"] == letters_of("v2", "v1")
    assert pairs["refiner"][1] == LETTERS["r2"] and pairs["refiner"][0] in letters_of("r0", "r1")
    assert found.left_out == {"in_between": 3, "only_answer": 6, "replayed": 6}


def test_the_commands_of_the_docs_on_a_run_of_its_own(trainer: Trainer, tmp_path: Path) -> None:
    """A tree by the untrained model, sft on what is worth more than a half, dpo from there."""

    async def refine(task: Any) -> float:
        first = await ask("generator", f"say {task['letter']}", max_tokens=60)
        critique = await ask("verifier", f"check {first}", max_tokens=60)
        return float(len(await ask("refiner", f"mend {first} {critique}", max_tokens=60)) < 20)

    app = application(refine)
    tree = {"kind": "replay", "k": 3}
    trainer(app, to="tree", recipe="c3", plan=tree, steps=1)
    records = {"path": str(tmp_path / "tree"), "min_reward": 0.51}
    sft = trainer(app, None, to="sft", recipe="sft", records=records, steps=2)
    assert sft.versions == {"generator": 2, "verifier": 2, "refiner": 2}
    records = str(tmp_path / "tree")
    dpo = trainer(app, None, to="dpo", recipe="dpo", records=records, init=str(tmp_path / "sft"), steps=2)
    assert dpo.finished and trainer.metrics("dpo")[0]["rows"] > 0
