"""`cotune train --profile STEP`: where the time of one step went, printed, kept and shown again."""

from __future__ import annotations

import gzip
import json

import pytest

from cotune.cli import main as cli
from cotune.errors import SamplerError
from cotune.integrations.models.engine_sampler import CalledSampler
from tests.trainer.tiny_run import new_run
from tests.trainer.worker_app import solve

PARTS = {
    "rollout": ["prefill", "decode", "sampling", "scorers", "answering", "application", "profiler", "other"],
    "update": ["forward", "backward", "optimizer", "profiler", "other"],
    "publish": ["prefill", "decode", "sampling", "load", "forward", "other"],
}


def check(folder, step, parts=PARTS):
    """The stored table of a step, whose rows are those of `parts` and of undivided phases, and its trace."""
    table = json.loads((folder / "profile" / f"step-{step:06d}.json").read_text())
    rows = [(row["phase"], row["part"]) for row in table["rows"]]
    assert table["step"] == step
    assert [row for row in rows if row[1] != "profiler"] == [
        (phase, part)
        for phase in ("rollout", "group", "update", "publish", "checkpoint", "other")
        for part in parts.get(phase, [""])
        if part != "profiler"
    ]
    assert sum(row["seconds"] for row in table["rows"]) == pytest.approx(table["seconds"])
    assert all(row["seconds"] > -1e-9 and row["busy"] > 0 for row in table["rows"] if row["part"] != "other")
    assert table["trace"] == str(folder / "profile" / f"step-{step:06d}.trace.json.gz")
    with gzip.open(table["trace"], "rt") as file:
        return table, json.load(file)["traceEvents"]


@pytest.fixture(scope="module")
def profiled_run(tmp_path_factory, tiny_base, module_environment):
    """A run of two steps by the command line, the sampler in a process of its own; what was printed, and its folder."""
    run = tmp_path_factory.mktemp("profiled") / "run"
    words = new_run(tiny_base, run, 2, "--profile", "2", "-k", "4", "--set", "learner.threads=1")
    assert cli.main(["train", *words]) == 0
    return run


@pytest.fixture(scope="module")
def module_environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        yield


@pytest.mark.slow
def test_a_profiled_step_adds_up_and_its_trace_holds_both_processes(profiled_run):
    _, events = check(profiled_run, 2)
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert sorted(processes) == ["cotune train", "sampler"]
    ours, samplers = (
        {event["name"] for event in events if event["ph"] == "X" and event["pid"] == processes[name]}
        for name in ("cotune train", "sampler")
    )
    assert {"step 2", "rollout", "update", "forward", "backward", "optimizer", "aten::mm"} <= ours
    assert {"prefill", "decode", "sampling", "aten::mm"} <= samplers
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
    assert (profiled_run / "profile" / "step-000002.trace.json.gz").stat().st_size < 2_000_000
    assert sorted(path.name for path in (profiled_run / "profile").iterdir()) == [
        "step-000002.json",
        "step-000002.trace.json.gz",
    ]


def test_show_prints_the_table_again(profiled_run, capsys):
    assert cli.main(["show", str(profiled_run), "--profile"]) == 0
    said = capsys.readouterr().out
    assert "step 2" in said
    assert [line.split()[0] for line in said.splitlines() if line[:1].isalpha()] == [
        "step", "phase", "rollout", "group", "update", "publish", "checkpoint", "other", "all", "trace,",
    ]  # fmt: skip
    assert "100.0%" in said


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


def test_a_step_that_is_done_cannot_be_profiled(profiled_run, capsys):
    words = ["train", "--resume", str(profiled_run), "--steps", "3", "--profile"]
    assert cli.main([*words, "1"]) == 1
    assert "profile = 1 is done: the run has made 2 steps. Name a later one, up to 3" in said(capsys)
    assert cli.main([*words, "4"]) == 1
    assert "not a step of the run, 1 to 3" in said(capsys)


def test_a_run_without_a_profile_says_how_to_get_one(trainer, capsys):
    trainer(solve, steps=1)
    assert not (trainer.folder / "run" / "profile").exists()
    assert cli.main(["show", str(trainer.folder / "run"), "--profile"]) == 1
    assert "--profile STEP" in capsys.readouterr().err


def test_the_engine_in_a_thread_of_this_process(trainer):
    trainer(solve, steps=1, profile=1)
    check(trainer.folder / "run", 1)
    assert "step 1 is profiled" in trainer.said
    assert "of the step" in trainer.said


def test_profilers_that_fail_stop_no_run_and_the_table_says_what_it_lacks(trainer, monkeypatch):
    def broken(**_):
        raise RuntimeError("no counters here\nat all")

    async def refused(_):
        raise SamplerError("The engine keeps no clock.", "Ask another.")

    monkeypatch.setattr("torch.profiler.profile", broken)
    monkeypatch.setattr(CalledSampler, "begin_trace", refused)
    assert trainer(solve, steps=1, profile=1).finished
    table, events = check(
        trainer.folder / "run",
        1,
        {
            "rollout": ["scorers", "answering", "application", "other"],
            "update": ["forward", "backward", "optimizer", "other"],
            "publish": ["forward", "other"],
        },
    )
    assert table["notes"] == [
        "torch's profiler failed, and operators are missing: RuntimeError: no counters here",
        "not traced: the sampler: The engine keeps no clock",
    ]
    assert all(note in " ".join(trainer.said.split()) for note in table["notes"])
    assert not [event for event in events if event["name"].startswith("aten::")]
