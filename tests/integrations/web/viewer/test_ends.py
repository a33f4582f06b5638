"""What the pages say of a run that ended badly: why, what to do, and how often."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from cotune.errors import RunError
from cotune.integrations.web.viewer.server import viewing
from cotune.records.structs import Episode, Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.config.load import convert
from cotune.trainer.reporting.activity import Activity
from cotune.trainer.run.run_folder import RunFolder
from tests.integrations.web.viewer.test_pages import text

REMEDY = "Raise sampling.max_tokens, or take a model with a longer context: " + "the prompt grows with each turn, " * 12


def failed(number: int, error: str) -> Episode:
    return Episode(
        id=f"E{number:03}", task=Task(id="t", input="x"), workflow="w", phase="train", status="error", error=error
    )


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """Nine episodes that failed for one reason with other numbers, one for another."""
    with SqliteStore.open(tmp_path / "traced") as store:
        for i in range(9):
            store.write(
                [failed(i, f"SamplerError: the prompt has {4000 + i} tokens of {4096.5}. {REMEDY}END\n at {i}")]
            )
        store.write([failed(9, "KeyError: 'plan'")])
    return tmp_path / "traced"


def test_a_remedy_is_shown_whole_and_causes_that_differ_in_numbers_are_one(traced: Path) -> None:
    with viewing([traced]) as server:
        said = text(f"{server.url}/run/traced")
    wrong = said.partition("What went wrong")[2].partition("Tokens and cost")[0]
    assert "9 episodes of train failed: SamplerError: the prompt has 4000 tokens" in wrong and "END" in wrong
    assert wrong.count("SamplerError") == 1 and "the commonest of 9 forms that differ in numbers" in wrong
    assert "1 episode of train failed: KeyError: &#39;plan&#39;" in wrong


def test_causes_beyond_those_shown_are_counted(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "traced") as store:
        store.write([failed(i, f"Error{chr(65 + i)}: no") for i in range(8)])
    with viewing([tmp_path / "traced"]) as server:
        assert "3 more episodes failed, for 3 other reasons" in text(f"{server.url}/run/traced")


def begun(run: Path) -> RunFolder:
    """A run that has written its first checkpoint."""
    folder = RunFolder.create(run, convert({"model": "m", "steps": 4}), workflow="app:solve", tasks=None)
    folder.latest.write_text("step-000000")
    return folder


def test_the_page_of_a_run_that_failed_says_why_and_what_to_do(tmp_path: Path) -> None:
    folder = begun(tmp_path / "r1")
    with pytest.raises(RunError), folder.noting_errors():
        raise RunError("48 records could not be stored, so step 3 is not trained on.", REMEDY + "END")
    folder.close()
    with viewing([tmp_path / "r1"]) as server:
        said = text(server.url)
    assert "failed: 48 records could not be stored, so step 3 is not trained on." in said and "END" in said
    assert f"cotune train --resume {tmp_path / 'r1'}" in said


def test_a_run_that_failed_after_its_last_step_is_not_finished(tmp_path: Path) -> None:
    folder = begun(tmp_path / "r1")
    counts = {"outcome": {}, "left_out": {}, "calls": 0, "candidates": 0, "groups": 0, "roles": {}}
    for step in range(4):
        folder.append_metrics({"step": step, **counts})
    folder.note_end("failed", "The disk is full.", "Free some space.")
    folder.close()
    with viewing([tmp_path / "r1"]) as server:
        assert "r1 failed" in (said := text(server.url))
        assert "The end of the run failed: The disk is full. Free some space." in said


def test_an_error_that_nobody_foresaw_is_named_with_its_class(tmp_path: Path) -> None:
    folder = begun(tmp_path / "r1")
    with pytest.raises(ZeroDivisionError), folder.noting_errors():
        raise ZeroDivisionError("division by zero")
    folder.close()
    with viewing([tmp_path / "r1"]) as server:
        assert "failed: ZeroDivisionError: division by zero" in text(server.url)


def test_a_run_that_was_killed_says_that_no_reason_is_known(tmp_path: Path) -> None:
    begun(tmp_path / "r1").close()
    with viewing([tmp_path / "r1"]) as server:
        said = text(server.url)
    assert "left no reason" in said and f"cotune train --resume {tmp_path / 'r1'}" in said


def test_an_end_is_forgotten_when_the_run_goes_on(tmp_path: Path) -> None:
    folder = begun(tmp_path / "r1")
    folder.note_end("stopped", "it was stopped")
    with folder.noting_errors():
        assert not (folder.path / "end.json").exists()
    folder.note_end("ended", "held-out success has not risen for 5 evaluations")
    folder.close()
    assert json.loads((folder.path / "end.json").read_text())["kind"] == "ended"
    with viewing([tmp_path / "r1"]) as server:
        said = text(server.url)
    assert "finished" in said and "It ended early: held-out success has not risen for 5 evaluations" in said


def test_a_run_under_way_says_its_phase_and_the_time_to_the_end(tmp_path: Path) -> None:
    folder = begun(tmp_path / "r1")
    activity = Activity(4, folder.path)
    activity.begin(0)
    with viewing([tmp_path / "r1"]) as server, activity.phase("rollout"):
        activity.count("rollout", 64)
        for _ in range(64):
            activity.advance("rollout")
        assert "step 1 of 4: rollout, 64 of 64 episodes" in text(server.url)
        activity.step(1)
        with activity.phase("update", "writer"):
            now = httpx.get(f"{server.url}/run/r1/changed").json()["now"]
            assert now.startswith("step 2 of 4: update of writer · about ") and now.endswith(" to the end")
            assert now.partition(" · ")[0] in text(f"{server.url}/?all=1")
    activity.close()
    folder.close()
    with viewing([tmp_path / "r1"]) as server:
        assert httpx.get(f"{server.url}/run/r1/changed").json() | {"stamp": ""} == {
            "state": "stopped",
            "stamp": "",
            "now": "",
        }
