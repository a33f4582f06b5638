"""The best checkpoint by held-out evaluation is kept and exported; a run that gets no better ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cotune.adapters.export import best_policies, latest_policies
from cotune.cli.main import main
from cotune.errors import ConfigError, RunError
from cotune.reading.curves import charts
from cotune.reading.evaluations import in_training
from cotune.reading.run import OpenedRun
from cotune.storage.checkpoints import Best, checkpoint_name, read_best
from cotune.trainer.evaluation.best_checkpoint import judged_figures
from cotune.trainer.run import checkpoint
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask, letters


class Scripted:
    """Outcomes of the held-out task, one after the other, in a new run that of the base first. `score` is the same for
    each role."""

    def __init__(self, held_out: Sequence[float]) -> None:
        self.left = list(held_out)
        self.now = 0.0

    async def __call__(self, task: dict[str, str]) -> float:
        if task["id"] == "held":
            self.now = self.left.pop(0)
        await ask("first", f"say {task['letter']}")
        await ask("second", f"say {task['letter']}")
        return self.now if task["id"] == "held" else 0.0

    def score(self, candidate: Any, call: Any, task: Any) -> float:
        return self.now if task["id"] == "held" else letters(candidate, call, task)


def scripted_app(held_out: Sequence[float], *roles: str) -> Any:
    script = Scripted(held_out)
    return application(script, **dict.fromkeys(roles, script.score))


def held_out(trainer: Trainer, **settings: Any) -> dict[str, Any]:
    file = trainer.folder / "held.jsonl"
    file.write_text(json.dumps({"id": "held", "letter": "h"}) + "\n")
    return {"tasks": str(file), "every": 1, **settings}


def steps_kept(trainer: Trainer) -> list[str]:
    return sorted(path.name for path in (trainer.folder / "run" / "checkpoints").glob("step-*"))


def test_the_best_checkpoint_is_kept_and_exported_and_patience_ends_the_run(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    app = scripted_app([0.0, 0.2, 0.8, 0.5, 0.8, 0.7], "first", "second")
    evaluation = held_out(trainer, keep_best=True, patience=2)
    settings = {"steps": 9, "checkpoint_every": 3, "policies": "full"}
    summary = trainer(app, evaluation=evaluation, **settings)
    assert (summary.finished, summary.steps) == (True, 4)
    assert summary.ended == "2 evaluations in a row were no better than the one after step 2"
    assert "ended after step 4: 2 evaluations in a row were no better than the one after step 2" in trainer.said
    run = trainer.folder / "run"
    assert read_best(run / "checkpoints") == dict.fromkeys(("first", "second"), Best("step-000002", 0.8))
    assert steps_kept(trainer) == ["step-000002", "step-000003", "step-000004"]
    assert [line["held_out"]["reward"] for line in trainer.metrics()] == [0.2, 0.8, 0.5, 0.8]
    assert [p.version for p in best_policies(run)] == [2, 2] and [p.version for p in latest_policies(run)] == [4, 4]

    assert main(["export", str(run), "--out", str(trainer.folder / "best"), "--step", "best"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "best: first of step-000002 (0.800), second of step-000002 (0.800)" in said
    exported = json.loads((trainer.folder / "best" / "roles.json").read_text())
    assert {policy["version"] for policy in exported["policies"]} == {2}

    again = trainer.resume(scripted_app([0.9, 0.1], "first", "second"), steps=6)
    assert (again.finished, again.steps, again.ended) == (True, 6, "")
    assert read_best(run / "checkpoints")["first"] == Best("step-000005", 0.9)
    assert steps_kept(trainer) == ["step-000005", "step-000006"]


class Killed(BaseException):
    """The process is gone."""


def test_a_kill_while_the_former_best_is_removed_loses_no_best(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def killed(path: Path) -> None:
        remove(path)
        if "step-000001" in path.name:
            raise Killed

    checkpoints = trainer.folder / "run" / "checkpoints"
    monkeypatch.setattr(checkpoint, "KEPT_CHECKPOINTS", 1)
    evaluation = held_out(trainer, keep_best=True)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("cotune.trainer.run.checkpoint.shutil.rmtree", killed)
        trainer(scripted_app([0.0, 0.2, 0.8], "first"), evaluation=evaluation, steps=4)
    best = {"first": Best("step-000002", 0.8)}
    assert read_best(checkpoints) == best and steps_kept(trainer) == ["step-000002"]
    again = scripted_app([0.5], "first")
    trainer.resume(again, steps=3)
    assert read_best(checkpoints) == best and steps_kept(trainer) == ["step-000002", "step-000003"]

    (checkpoints / "best.json").write_text('{"first": {"checkpoint": "step-000001", "figure": 0.2}}')
    trainer.resume(again, steps=3)
    said = "the best checkpoint of first was step-000001 (0.200), which is gone; the best that is left is step-000002"
    assert said in " ".join(trainer.said.split())
    assert read_best(checkpoints) == best


def ending(*held_out: float | None) -> Callable[[dict[str, str]], Awaitable[float]]:
    """An application whose episodes of held-out tasks end so, one after the other: with a reward, or a crash."""
    held = iter(held_out)

    async def solve(task: dict[str, str]) -> float:
        await ask("first", f"say {task['letter']}")
        if not task["id"].startswith("held"):
            return 0.0
        if (now := next(held)) is None:
            raise ValueError("boom")
        return now

    return solve


def test_a_crash_where_an_earlier_evaluation_did_badly_is_not_better(trainer: Trainer) -> None:
    solve = ending(-3.0, -1.0, -3.0, -0.9, None, -0.9)
    file = trainer.folder / "held.jsonl"
    file.write_text("".join(json.dumps({"id": f"held{i}", "letter": "h"}) + "\n" for i in range(2)))
    evaluation = {"tasks": str(file), "every": 1, "keep_best": True}
    trainer(application(solve), evaluation=evaluation, plan={"kind": "independent"}, steps=2, concurrency=1)
    first, second = (line["held_out"] for line in trainer.metrics())
    assert first["reward"] == second["reward"] == pytest.approx(-1.95) and second["failed"] == 1.0
    assert second["reward/first"] == pytest.approx(-1.95)
    assert read_best(trainer.folder / "run" / "checkpoints")["first"].checkpoint == "step-000001"


def test_a_lower_reward_of_failures_counts_in_all_evaluations_of_a_run(trainer: Trainer) -> None:
    """Of base and steps: a crash and 0.2, a crash and 1, 0.4 twice, then -3 that each crash counts from then on."""
    solve = ending(None, 0.2, None, 1.0, 0.4, 0.4, -3.0, 1.0, 0.3, 0.3, -9.0, 0.9)

    def figures(name: str) -> list[float]:
        return [line["held_out"][name] for line in trainer.metrics()]

    file, run = trainer.folder / "held.jsonl", trainer.folder / "run"
    file.write_text("".join(json.dumps({"id": f"held{i}", "letter": "h"}) + "\n" for i in range(2)))
    evaluation = {"tasks": str(file), "every": 1, "keep_best": True, "patience": 2}
    settings = {"plan": {"kind": "independent"}, "concurrency": 1, "steps": 9}
    summary = trainer(application(solve), evaluation=evaluation, **settings)
    assert figures("reward") == figures("reward/first") == pytest.approx([-1.0, 0.4, -1.0, 0.3])
    assert figures("base_reward") == pytest.approx([-1.4] * 4) and figures("failed") == [1.0, 0.0, 0.0, 0.0]
    assert read_best(run / "checkpoints")["first"] == Best("step-000002", 0.4)
    assert summary.ended == "2 evaluations in a row were no better than the one after step 2"
    assert "a failed episode now counts -3 in held-out figures" in " ".join(trainer.said.split())
    written = [found.evaluations for found in in_training(run)]
    assert [found["base"].floor for found in written] == [-3.0] * 5
    assert [found["trained"].floor for found in written[1:]] == [-3.0] * 4
    created = [found.created for found in in_training(run)]
    assert created == sorted(created)

    trainer.resume(application(solve), steps=5)
    assert figures("reward") == pytest.approx([-4.0, 0.4, -1.0, 0.3, -4.05])
    assert figures("base_reward") == pytest.approx([-4.4] * 5)
    assert read_best(run / "checkpoints")["first"] == Best("step-000002", 0.4)
    chart = next(chart for chart in charts([OpenedRun(run, "run")]) if chart.title == "Reward on held-out tasks")
    assert chart.series[0].values == pytest.approx([-4.4, -4.0, 0.4, -1.0, 0.3, -4.05])


def test_each_policy_may_have_a_best_checkpoint_of_its_own(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {"first": [0.0, 0.9, 0.1, 0.3], "second": [0.0, 0.1, 0.2, 0.8]}

    def scripted(role: str) -> Any:
        def scorer(candidate: Any, call: Any, task: Any) -> float:
            return held[role].pop(0) if task["id"] == "held" else letters(candidate, call, task)

        return scorer

    app = application(Scripted([0.0] * 4), first=scripted("first"), second=scripted("second"))
    settings = {"steps": 3, "policies": "full"}
    trainer(app, evaluation=held_out(trainer, keep_best=True), **settings)
    run = trainer.folder / "run"
    assert read_best(run / "checkpoints") == {"first": Best("step-000001", 0.9), "second": Best("step-000003", 0.8)}
    assert steps_kept(trainer) == ["step-000001", "step-000002", "step-000003"]
    found = {policy.name: policy for policy in best_policies(run)}
    assert {name: policy.version for name, policy in found.items()} == {"first": 1, "second": 3}
    kept = load_file(run / "checkpoints" / "step-000001" / "0.safetensors")
    assert all(np.array_equal(kept[name], found["first"].weights[name]) for name in kept)

    # Nobody has evaluated the two together: the card says so instead of showing the figures of one step.
    assert main(["export", str(run), "--out", str(trainer.folder / "best"), "--step", "best"]) == 0
    command = f"cotune eval app:solve --run {trainer.folder / 'best'} --tasks held_out.jsonl"
    assert f"this combination was not evaluated: {command}" in " ".join(capsys.readouterr().out.split())
    card = (trainer.folder / "best" / "README.md").read_text()
    assert "Checkpoints: first `step-000001`, second `step-000003`." in card
    assert "This combination was not evaluated: its policies are from several checkpoints." in card
    assert "held-out reward" not in card and "cotune eval app:solve --run PATH/TO/THIS/FOLDER" in card


@pytest.mark.parametrize(
    ("held", "best"),
    [
        ([0.9, 0.5, 0.4], Best("step-000000", 0.9)),
        pytest.param([0.2, 0.5, 0.4], Best("step-000001", 0.5), marks=pytest.mark.long),
    ],
)
def test_the_policies_that_a_run_starts_from_may_be_its_best(trainer: Trainer, held: list[float], best: Best) -> None:
    trainer(scripted_app([0.0], "first"), to="earlier", steps=1)
    evaluation = held_out(trainer, keep_best=True, patience=2)
    app = scripted_app([*held, 0.3], "first")
    trainer(app, init=str(trainer.folder / "earlier"), evaluation=evaluation, steps=2)
    run = trainer.folder / "run"
    assert read_best(run / "checkpoints") == {"first": best}
    (policy,) = [one for one in best_policies(run) if one.weights is not None]
    assert checkpoint_name(policy.step) == best.checkpoint
    if best.checkpoint == "step-000000":
        assert "2 evaluations in a row were no better than the one before the first step" in " ".join(
            trainer.said.split()
        )

    # A resumed run still knows them.
    trainer.resume(app, steps=3)
    assert read_best(run / "checkpoints") == {"first": best}


def test_what_an_evaluation_says_of_each_policy() -> None:
    held = {"success": 0.5, "reward": 2.0, "reward/a": 1.0, "reward/b": 4.0, "b/x": 3.0, "episodes": 9.0}
    policies = {"one": ["a", "b"], "two": ["b"], "three": ["c"]}
    own = {"one": 2.5, "two": 4.0}
    assert judged_figures(held, policies, seats=False) == dict.fromkeys(policies, 0.5)
    assert judged_figures(held, policies, seats=True) == own, "nothing is known of a policy without a call"
    assert judged_figures({name: x for name, x in held.items() if name != "success"}, policies, seats=False) == own
    game = {**held, "against_untrained/a": -1.0, "against_untrained/b": 0.0}
    assert (
        judged_figures(game, policies, seats=False)
        == judged_figures(game, policies, seats=True)
        == {"one": -0.5, "two": 0.0}
    )


def test_a_run_without_a_kept_checkpoint_has_no_best_one(trainer: Trainer) -> None:
    trainer(application(first=letters), steps=1)
    with pytest.raises(RunError, match="has kept no best checkpoint"):
        best_policies(trainer.folder / "run")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"evaluation": {"keep_best": True}}, "evaluation.keep_best"),
        ({"evaluation": {"patience": 3}}, "evaluation.patience"),
        ({"evaluation": {"patience": 0, "tasks": "x"}}, "evaluation.patience"),
        ({"guard": "pray"}, "guard"),
    ],
)
def test_settings_that_do_not_fit(trainer: Trainer, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(application(first=letters), **settings)
    assert caught.value.field == field
