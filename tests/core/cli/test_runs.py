"""What `cotune show` prints of a folder of runs, of steps, of whole prompts, and for programs, at a width of 80."""

from __future__ import annotations

import json

import pytest

from cotune.cli.main import main
from cotune.records.structs import CallRecord, Candidate, Episode, Message, RewardRecord, Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.tables import sparkline

LONG = "a prompt of many words " * 20


def metrics(step: int) -> dict:
    share = step / 4
    roles = {name: {"reward": share, "entropy": 1 - share} for name in ("planner", "writer")}
    return {
        "step": step,
        "episodes": 4,
        "failed": int(step == 1),
        "calls": 8,
        "candidates": 8,
        "groups": 2,
        "rows": 6,
        "path": "single samples",
        "outcome": {"success": share, "team": float("nan") if step == 2 else share},
        "roles": roles,
        "left_out": {"zero_variance": 2},
        "seconds": {"rollout": 1.25},
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of five steps, two of whose episodes are on record."""
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    config = {"recipe": "dr_mas", "steps": 5, "plan": {"kind": "independent"}}
    (folder / "run.json").write_text(json.dumps({"model": "m", "config": config}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics(step)) + "\n" for step in range(5)))
    said = Candidate(
        index=0, text="yes", message={"role": "assistant", "content": "yes"}, token_ids=(1, 2), logprobs=(-1.0, -1.0)
    )
    with SqliteStore.open(folder) as store:
        store.write(
            [
                Message("m1", {"role": "user", "content": LONG}),
                Message("m2", {"role": "user", "content": "and now?"}),
                CallRecord(
                    id="C1",
                    episode="E1",
                    role="writer",
                    step=0,
                    turn=0,
                    messages=("m1", "m2"),
                    candidates=(said,),
                    chosen=0,
                ),
                RewardRecord("C1.0", "local", 0.5),
                RewardRecord("E1", "team", 1.0),
                Episode(id="E1", task=Task(id="a", input="x"), workflow="w", phase="train", training_step=0, calls=1),
                Episode(
                    id="E2",
                    task=Task(id="b", input="x"),
                    workflow="w",
                    phase="train",
                    training_step=0,
                    status="error",
                    error="ValueError: no answer\nat all",
                ),
            ]
        )
    return folder


def told(capsys, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    said = capsys.readouterr().out
    assert "--json" in arguments or all(len(line) <= 80 or "/runs" in line for line in said.splitlines())  # but a path
    return said


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_curve_is_drawn_from_its_lowest_to_its_highest_value():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([None, 2.0, 2.0]) == " ▄▄"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(100)])) == 20 and sparkline([1.0] * 100) == "▄" * 20


def test_runs_of_a_folder_have_a_line_each(run, capsys):
    said = words(told(capsys, "show", run.parent))
    assert said[0] == "run state recipe steps episodes figure, first to last"
    assert said[2] == "r1 finished dr_mas 5 of 5 2 reward of planner: 0 in step 1, 1 in"
    (run / "metrics.jsonl").write_text(json.dumps(metrics(0)) + "\n")
    assert "r1 stopped dr_mas 1 of 5 2" in words(told(capsys, "show", run.parent))[2]


def test_a_folder_without_runs_is_said(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 1
    assert "hold no run and no records" in capsys.readouterr().err


def test_without_a_path_the_runs_in_runs_are_listed(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    assert words(told(capsys, "show"))[2].startswith("r1 finished dr_mas")


@pytest.mark.parametrize(
    "flags", [["--steps"], ["--status", "error"], ["--min-reward", "0"], ["--json"], ["--html", "page.html"]]
)
def test_flags_of_one_run_are_rejected_for_a_folder_of_runs(run, capsys, flags):
    assert main(["show", str(run.parent), *flags]) == 1
    error = capsys.readouterr().err
    assert f"{flags[0]} needs one run, and {run.parent} is a folder of 1." in error
    assert f"cotune show {run} {flags[0]} ..." in error


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--html", "page.html", "--role", "writer"], "--role cannot be used with --html"),
        (["--html", "page.html", "--json"], "--json cannot be used with --html"),
        (["--price", "m=1/2"], "--price has no effect without --html"),
    ],
)
def test_the_page_is_of_a_whole_run(run, capsys, flags, fault):
    assert main(["show", str(run), *flags]) == 1
    assert fault in capsys.readouterr().err


def test_steps_are_curves_and_a_line_each(run, capsys):
    said = words(told(capsys, "show", run, "--steps", "--limit", 2))
    assert "Success in training success 0.0% 100.0% ▁▃▅▆█" in said
    assert "Team in training team 0 1 ▁▃▆█" in said
    assert "Entropy planner 1 0 █▆▅▃▁" in said and "writer 1 0 █▆▅▃▁" in said
    assert "the latest 2 of 5 steps" in said
    assert "4 0.75 0.75 75.0% 0.75 6 2 1.2" in said and "5 1 1 100.0% 1 6 2 1.2" in said
    assert any(line.startswith("reward of reward of success in") for line in said)


def test_steps_explain_their_curves_and_columns(run, capsys):
    said = " ".join(words(told(capsys, "show", run, "--steps", "--explain")))
    assert "Entropy How undecided the policy is, in nats per token." in said
    assert "trained Candidates that the update learned from." in said
    assert "How undecided" not in told(capsys, "show", run, "--steps")
    assert main(["show", str(run), "--explain"]) == 1
    assert "no effect without --steps" in capsys.readouterr().err


def test_steps_need_metrics(run, capsys):
    (run / "metrics.jsonl").unlink()
    assert main(["show", str(run), "--steps"]) == 1
    assert "has no metrics yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ((), ["E1", "E2"]),
        (("--status", "error"), ["E2"]),
        (("--role", "writer"), ["E1"]),
        (("--role", "nobody"), []),
        (("--task", "b"), ["E2"]),
        (("--min-reward", "0.5"), ["E1"]),
        (("--max-reward", "0.5"), []),
        (("--limit", "1"), ["E2"]),
    ],
)
def test_episodes_are_filtered_for_people_and_programs(run, capsys, filters, found):
    said = told(capsys, "show", run, *filters)
    assert [word for line in words(said) for word in line.split() if word in ("E1", "E2")] == found
    lines = [json.loads(line) for line in told(capsys, "show", run, *filters, "--json").splitlines()]
    assert [line["id"] for line in lines] == found


def test_an_episode_is_one_line_of_json_with_all_that_was_said(run, capsys):
    (found,) = map(json.loads, told(capsys, "show", run, "--episode", "E1", "--json").splitlines())
    (call,) = found["calls"]
    assert found["rewards"] == {"team": 1.0} and found["task"]["id"] == "a"
    assert [message["content"] for message in call["messages"]] == [LONG, "and now?"]
    assert call["candidates"][0]["rewards"] == {"local": 0.5} and call["candidates"][0]["tokens"] == 2
    assert "token_ids" not in call["candidates"][0]


def test_steps_for_programs_are_the_lines_of_metrics(run, capsys):
    lines = [json.loads(line) for line in told(capsys, "show", run, "--steps", "--json").splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and lines[2]["outcome"]["team"] is None
    assert main(["show", str(run), "--groups", "--json"]) == 1
    assert "--json" in capsys.readouterr().err


def test_full_shows_whole_prompts(run, capsys):
    short, full = told(capsys, "show", run, "--episode", "E1"), told(capsys, "show", run, "--episode", "E1", "--full")
    assert LONG.strip() not in " ".join(words(short)) and "and now?" in short
    assert " ".join(line.strip("│├└─ ") for line in full.splitlines()).count("many words") == 20
    assert "and now?" in full and "assistant: yes" in full


def test_the_cause_of_a_failed_episode_stands_before_its_tree(run, capsys):
    said = words(told(capsys, "show", run, "--episode", "E2"))
    assert said[0] == "error: ValueError: no answer" and said[1].startswith("episode E2")
    assert "at all" not in " ".join(said)
    assert "at all" in told(capsys, "show", run, "--episode", "E2", "--full")
