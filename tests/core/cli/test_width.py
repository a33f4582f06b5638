"""Every table holds 80 columns without a broken word, however long the names of roles, policies and tasks are."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import RenderableType

from cotune.cli.main import main
from cotune.cli.printing.overview import show_run
from cotune.cli.printing.runs import list_runs
from cotune.cli.printing.steps import show_steps
from cotune.cli.records.score import _rewards_table as score_table
from cotune.episodes.rescore import Rescored, Rescoring
from cotune.reading.evaluations import EvaluatedMode, EvaluationReport, ModeUse, RoleStatistics, TaskEnding
from cotune.reading.find_runs import open_runs
from cotune.reading.metrics import columns
from cotune.records.structs import CallRecord, Candidate, Episode, RewardRecord, Task
from cotune.storage.metrics_file import StepMetrics
from cotune.storage.sqlite_store import SqliteStore
from cotune.terminal import terminal
from cotune.trainer.before.check import report as checked
from cotune.trainer.before.doctor.doctor import Report
from cotune.trainer.before.doctor.doctor import render as doctor
from cotune.trainer.before.doctor.memory import ProcessMemory, render_memory
from cotune.trainer.before.findings import Finding, RoleCheck
from cotune.trainer.evaluation.report import compare
from cotune.trainer.evaluation.report import render as evaluation
from cotune.trainer.evaluation.statistics import Interval
from cotune.trainer.replay.replay import EpisodeWithCalls, Repetition, ReplayReport
from cotune.trainer.replay.report import render as replay
from cotune.trainer.reporting.columns import explain_columns, role_table

ROLES = ("research_supervisor", "quality_assurance_reviewer")
SPAN = Interval(mean=-0.1234, low=-0.4234, high=0.1234, n=1000)
EPISODE = "01M824HTVMKZ4MJ9XYB5A8Q40{}"


def words(renderable: RenderableType, width: int) -> list[str]:
    out = io.StringIO()
    console = terminal(file=out, width=width, color_system=None)
    console.print(renderable)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return out.getvalue().replace("─", " ").split()


def metrics(step: int) -> dict:
    figures = dict.fromkeys(columns(), 0.5)
    return {
        "step": step, "episodes": 128, "failed": 12, "calls": 1024, "candidates": 8192, "groups": 256, "rows": 6144,
        "path": "best of 8 by scorer", "outcome": {"success": 0.5, "team": -12.345},
        "roles": dict.fromkeys(ROLES, figures), "left_out": {"zero_variance": 2048},
        "policies": {"quality_assurance_reviewer": {"loss": -0.00012, "grad_norm": 12.5}},
        "seconds": {"rollout": 1234.5},
    }  # fmt: skip


def call(episode: str, role: str, step: int) -> CallRecord:
    said = Candidate(
        index=0, text="the answer is forty-two " * 9, message={"role": "assistant", "content": "x"},
        token_ids=(1, 2), logprobs=(-1.0, -1.0),
    )  # fmt: skip
    return CallRecord(
        id=f"{episode}-{step}", episode=episode, role=role, step=step, turn=0, messages=(), candidates=(said,), chosen=0
    )


def episode(number: int, **fields: object) -> Episode:
    task = Task(id=f"gsm8k-train-{number:05}", input="x")
    return Episode(
        id=EPISODE.format(number), task=task, workflow="w", phase="train", training_step=104, calls=2, **fields
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "planner-and-reviewer-2026-11-22"
    folder.mkdir()
    config = {"recipe": "at_grpo", "steps": 1000, "plan": {"kind": "tree"}}
    (folder / "run.json").write_text(json.dumps({"model": "m", "config": config}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics(step)) + "\n" for step in range(5)))
    with SqliteStore.open(folder) as store:
        for number in range(3):
            id = EPISODE.format(number)
            store.write([call(id, role, step) for step, role in enumerate(ROLES)])
            store.write([RewardRecord(f"{id}-0.0", "cites_sources", -0.25), RewardRecord(id, "team", 0.5)])
            store.write([RewardRecord(f"{id}-0.0", "local", 0.125), RewardRecord(id, "exact_match", 0.0)])
            store.write([episode(number, latency=1234.5)])
    return folder


def evaluated(label: str, successes: int) -> EvaluatedMode:
    role = RoleStatistics(
        calls=102400, failed=12, turns=12.5, prompt_tokens=12345.6, completion_tokens=2345.6, truncated=0.125,
        policies=("quality_assurance_reviewer@104",), rewards={"cites_sources": -0.125, "local": 1.0},
    )  # fmt: skip
    use = ModeUse(
        calls=1000, prompt_tokens=10**7, completion_tokens=10**6, uncounted=0, seconds=SPAN, cost=1.25, unpriced=3
    )
    endings = {str(n): TaskEnding(status="ok", reward=float(n < successes), success=n < successes) for n in range(40)}
    return EvaluatedMode(
        label=label, episodes=1000, success=SPAN, reward=SPAN, roles=dict.fromkeys(ROLES, role), seconds=12345.6,
        failed={"TimeoutError: no answer": 3}, use=use, pass_at={1: SPAN, 2: SPAN, 4: SPAN, 8: SPAN}, endings=endings,
    )  # fmt: skip


def check_report() -> RenderableType:
    roles = [
        RoleCheck(
            role=role,
            calls=128,
            policy="reviewer_adapter",
            kind="lora",
            scorer=False,
            trained=False,
            reason="no scorer",
        )
        for role in ROLES
    ]
    calls = []
    for role in ROLES:
        params = {"temperature": 0.7, "n": 4, "response_format": {"type": "json_object"}}
        calls.append(msgspec.structs.replace(call("e", role, 104), params=params, streamed=True, tools="t"))
    groups = [checked.GroupCheck(task="gsm8k-train-00012", roles=ROLES, size=128)]
    return checked.render(
        checked.CheckReport(
            workflow="app:solve", tasks=("gsm8k-train-00012",), plan="plan tree", roles=tuple(roles),
            calls=tuple(calls), tokens={one.id: 34567 for one in calls}, groups=tuple(groups), team={"team": 0.5},
            local={}, left_out={}, findings=(),
        )
    )  # fmt: skip


def replayed(several: bool) -> RenderableType:
    def seen(number: int, rewards: dict[str, float]) -> EpisodeWithCalls:
        made = episode(number, latency=123.4)
        return EpisodeWithCalls(made, [call(made.id, role, step) for step, role in enumerate(ROLES)], rewards)

    old, new = {"exact_match": 0.0, "team": 0.5}, {"exact_match": 1.0, "team": -0.125}
    found = [Repetition(seen(number, old), 0, [seen(number + 3, new)]) for number in range(3 if several else 1)]
    return replay(ReplayReport("quality_assurance_reviewer@104", found))


def doctor_report() -> RenderableType:
    findings = (
        Finding("blocks", "quality of the network", "the address 10.0.0.1:6379 is not reached", "Open the port."),
        Finding("ok", "python", "3.11"),
    )
    return doctor(Report(None, (), findings))  # type: ignore[arg-type]


def forecast() -> RenderableType:
    parts = ("context of the GPU", "a pass of 131072 tokens, checkpointed", "publishing, in the place of gradients")
    device = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    found = ProcessMemory(
        process="learner", count=16, device=device, free=95.6e9, parts=dict.fromkeys(parts, 1234.5e9)
    )  # fmt: skip
    return render_memory([found])


def scored() -> RenderableType:
    names = {"cites_sources": 123.0, "exact_match": 45.0}
    of = Rescored(
        groups=1024, candidates=8192, failed=12, others_best=512,
        sums_before=Counter(names), counts_before=Counter(dict.fromkeys(names, 8)),
        sums_after=Counter(names), counts_after=Counter(dict.fromkeys(names, 8)),
    )  # fmt: skip
    return score_table(Rescoring(roles=dict.fromkeys(ROLES, of)))


def step() -> StepMetrics:
    rest = {"staleness": {}, "counters": {}, "lr_scale": 1.0, "tokens_per_s": 1.0, "updated": True}
    return StepMetrics(**(metrics(0) | rest))


TABLES: dict[str, Callable[[Path], RenderableType]] = {
    "train": lambda run: role_table(step()),
    "train --explain": lambda run: next(iter(explain_columns())),
    "show": lambda run: show_run(run),
    "show --groups": lambda run: show_run(run, groups=True),
    "show --steps": lambda run: show_steps(run, 20, explain=True),
    "runs": lambda run: list_runs(open_runs([run.parent])),
    "eval": lambda run: evaluation(
        EvaluationReport(
            evaluations={label: evaluated(label, 9) for label in ("base", "trained", "navigator against base")},
            comparisons=(compare(evaluated("trained", 30), evaluated("base", 9)),),
        )
    ),
    "check": lambda run: check_report(),
    "doctor": lambda run: doctor_report(),
    "doctor, memory": lambda run: forecast(),
    "replay": lambda run: replayed(False),
    "replay --all": lambda run: replayed(True),
    "score": lambda run: scored(),
}


@pytest.mark.parametrize("table", TABLES)
def test_eighty_columns_hold_every_word(run: Path, table: str) -> None:
    narrow, wide = (Counter(words(TABLES[table](run), width)) for width in (80, 400))
    short = {word for word in wide if len(word) <= 40} - set(run.parts)
    assert {word for word in short if word not in narrow} == set()
    assert not [word for word in narrow if word.endswith("…") and word not in wide]


def test_a_row_without_room_stands_as_names_and_values() -> None:
    lines = " ".join(words(role_table(step()), 60))
    row = "role research_supervisor · reward 0.500 · group spread 0.500 · no spread 50% · entropy 0.500 · clipped 50%"
    assert row in lines


@pytest.mark.parametrize("columns", ["1", "2", "3"])
def test_a_terminal_of_a_few_columns_is_no_error(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in (["show", "--help"], ["prompts", "improve", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
