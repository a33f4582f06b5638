"""Training steps on a real model, sampler and learner, through the OpenAI SDK."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from cotune.errors import GroupError, WorkflowError
from cotune.reading.metrics import columns
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.metrics_file import StepMetrics
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.reporting.columns import role_table
from cotune.trainer.run.checkpoint import load_checkpoint
from cotune.trainer.train import train
from tests.core.storage.whole_file import copied
from tests.integrations.provider import Provider, serving
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS, application, ask, converse, letters

BOTH = {"first": letters, "second": letters}


def flat(candidate, call, task):
    return 0.5


def weights(run: Path) -> dict[str, dict[str, np.ndarray]]:
    """Trained weights of the newest checkpoint, by policy."""
    checkpoint, folder = load_checkpoint(run / "checkpoints")
    trained = [name for name, spec in checkpoint.policies.specs.items() if spec.trained]
    return {name: load_file(folder / f"{index}.safetensors") for index, name in enumerate(trained)}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def learned(module_trainer):
    """A run of eight steps in which both roles are rewarded for some letters."""
    app = application(**BOTH)
    settings = {"policies": "full", "plan": {"k": 8}, "learner": {"lr": 5e-3, "mini_batch": 8}}
    summary = module_trainer(app, steps=8, rewards={"team_weight": 0.0}, to="learned", **settings)
    return summary, module_trainer


def test_reward_rises(learned):
    summary, trainer = learned
    lines = trainer.metrics("learned")
    for role in ("first", "second"):
        assert lines[0]["roles"][role]["reward"] < 0.4
        assert lines[-1]["roles"][role]["reward"] > 0.7
        assert lines[-1]["roles"][role]["entropy"] < lines[0]["roles"][role]["entropy"]
    assert summary.finished
    assert summary.steps == 8
    assert summary.calls == 8 * 3 * 2
    assert summary.candidates == 8 * 3 * 2 * 8
    assert summary.lost_records == 0


def test_all_files_of_a_run_have_one_mode(learned):
    _, trainer = learned
    files = [path for path in (trainer.folder / "learned").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".db", ".json", ".jsonl", ".safetensors", ".lock"}
    assert len({path.stat().st_mode for path in files}) == 1


def test_the_records_are_whole_in_the_one_file(learned):
    summary, trainer = learned
    with copied(trainer.folder / "learned") as store:
        assert sum(episode.calls for episode in store.episodes(EpisodeFilters(phase="train"))) == summary.calls == 48
        assert store.rows("SELECT count(*) FROM candidates JOIN calls ON calls.id = call") > [(8 * 48 - 1,)]


def test_metrics_of_each_role(learned):
    _, trainer = learned
    first = trainer.metrics("learned")[0]
    assert first["roles"].keys() == {"first", "second"}
    for figures in first["roles"].values():
        wanted = {
            "reward", "group_spread", "zero_variance", "clip_share", "entropy", "sampler_gap_mean", "sampler_gap_max",
            "tokens_mean", "prompt_tokens_mean", "samples", "kept", "groups",
        }  # fmt: skip
        assert wanted <= figures.keys()
        assert {name for name, one in columns().items() if not one.optional} <= figures.keys()
        assert 0.0 <= figures["clip_share"] <= 1.0
        assert 0.0 < figures["entropy"] <= math.log(33) + 1e-3
        assert figures["sampler_gap_mean"] < 1e-4
        assert 1.0 <= figures["tokens_mean"] <= 4.0
    assert first["roles"]["first"]["prompt_tokens_mean"] == len("<say x>") + 1
    assert first["seconds"].keys() == {"load", "look", "rollout", "group", "update", "publish", "checkpoint"}
    assert 0 < first["tokens_per_s"] < first["rollout_tokens_per_s"]
    assert first["total_tokens"] > first["distinct_tokens"] > 0  # candidates share their prompts
    assert first["update_tokens_per_s"] == pytest.approx(first["distinct_tokens"] / first["seconds"]["update"])
    for figures in first["policies"].values():
        assert figures["version"] == 1
        assert figures["probe_gap_mean"] < 1e-4
    for figures in trainer.metrics("learned")[1]["policies"].values():
        assert figures["version"] == 2
        assert figures["norm_moved"] > 0


def test_every_candidate_is_trained_on_or_left_out(learned):
    _, trainer = learned
    for line in trainer.metrics("learned"):
        assert line["rows"] + sum(line["left_out"].values()) == line["candidates"]
        assert line["rows"] == sum(figures["kept"] for figures in line["roles"].values())


def test_one_line_per_step_without_a_terminal(learned):
    _, trainer = learned
    assert trainer.said.startswith("no task is held out: 3 tasks, and 48 different ones are needed")
    waited, said = trainer.said.splitlines()[1:6], trainer.said.splitlines()[6:]
    assert waited == [
        f"loading the model {trainer.base} ...",
        *(f"looking at the application: episode {n} of 3 ..." for n in (1, 2, 3)),
        "loading the weights to train: first, second ...",
    ]
    assert said[:2] == [
        "sampler: transformers, the CPU, float32; learner: the CPU, float32",
        "plan tree (k=8), recipe at_grpo: scorers for first, second",
    ]
    assert [" ".join(line.split()[:3]) for line in said[3:6]] == [
        "first learns from",
        "second learns from",
        "the workflow's own",
    ]
    assert [line.split()[:2] for line in said[6:14]] == [["step", f"{n}/8"] for n in range(1, 9)]
    assert len(said) == 14


@pytest.mark.parametrize(
    ("layout", "policies"), [("shared", ["shared"]), ("lora", ["first", "second"]), ("full", ["first", "second"])]
)
def test_layouts(trainer, layout, policies):
    summary = trainer(application(**BOTH), policies=layout, steps=1)
    assert summary.versions == dict.fromkeys(policies, 1)
    kinds = {any("lora_A" in name for name in tensors) for tensors in weights(trainer.folder / "run").values()}
    assert kinds == {layout != "full"}
    line = trainer.metrics()[0]
    for figures in line["roles"].values():
        assert {name for name, one in columns().items() if not one.optional} <= figures.keys()
    assert role_table(StepMetrics(**line)).row_count == 2


@pytest.fixture
def provider(monkeypatch):
    with serving() as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


def test_roles_that_are_not_trained(trainer, provider: Provider):
    async def three(task):
        heard = await ask("judge", "judge")
        assert heard == "re: judge"
        return await converse(task)

    policy = [
        {"name": "talker", "roles": ["first"]},
        {"name": "base", "roles": ["second"], "kind": "frozen"},
        {"name": "outside", "roles": ["judge"], "kind": "provider"},
    ]
    summary = trainer(application(three, first=letters), policy=policy, steps=1)
    assert summary.versions == {"talker": 1}
    assert weights(trainer.folder / "run").keys() == {"talker"}
    assert len(provider.requests) == 3 + 3
    assert summary.left_out["untrained_role"] == 2 * 3
    assert "not trained: second (played by the untrained model)\n" in trainer.said
    assert "not trained: judge (left to the application's provider)\n" in trainer.said


def test_without_scorers_whole_episodes_are_compared(trainer):
    summary = trainer(application(), steps=1)
    assert (
        "plan independent (k=4), recipe dr_mas: the workflow has no scorer, so each task runs 4 times and the outcomes"
        " are compared"
    ) in trainer.said.splitlines()
    line = trainer.metrics()[0]
    assert (line["episodes"], line["calls"]) == (3 * 4, 3 * 4 * 2)
    assert {role: figures["turns"] for role, figures in line["roles"].items()} == {"first": 1.0, "second": 1.0}
    assert summary.versions.keys() <= {"first", "second"}


def failing_after(episodes: int, run=converse):
    """`run`, which raises in all episodes but the first few."""
    started = Counter()

    async def fails(task):
        started["episodes"] += 1
        if started["episodes"] > episodes:
            raise RuntimeError("out of order")
        return await run(task)

    return fails


def test_a_step_without_a_usable_sample_stops_the_run_and_says_why(trainer):
    with pytest.raises(GroupError) as caught:
        trainer(application(failing_after(3 + 3, converse), **BOTH))
    assert caught.value.cause.startswith(
        "Step 2 has no usable sample (no calls at all). 3 of 3 episodes failed with: The workflow 'solve' raised"
        " RuntimeError: out of order"
    )
    assert f"cotune show {trainer.folder / 'run'}" in caught.value.remedy
    assert len(trainer.metrics()) == 1


def test_the_reasons_are_counted_where_no_sample_is_usable(trainer):
    calls = Counter()

    def scorer(candidate, call, task):
        calls["scored"] += 1
        if calls["scored"] > 3 * 2:
            raise ValueError("gone")
        return letters(candidate, call, task)

    counts = r"\(scorer_failed: 12, untrained_role: 3\)"
    why = rf"Step 1 has no usable sample {counts}\. 3 calls failed or were not scored with: .*gone"
    with pytest.raises(GroupError, match=why):
        trainer(application(first=scorer))


def test_equal_rewards_make_no_update_and_say_so(trainer):
    summary = trainer(application(first=flat, second=flat))
    assert summary.finished
    assert summary.versions == {}
    assert [line["updated"] for line in trainer.metrics()] == [False, False]
    assert trainer.metrics()[0]["left_out"] == {"zero_variance": 3 * 2 * 4}
    assert trainer.said.count("no update: nothing to learn from in this step") == 2
    assert " ".join(trainer.said.split()).count("Where nothing succeeds yet, learn from demonstrations first") == 1


def test_equal_rewards_beside_failures_are_no_reason_to_stop(trainer):
    async def sometimes(task):
        said = await converse(task)
        return said if task["id"] != "c" else None

    summary = trainer(application(sometimes, first=flat, second=flat), steps=1, on_failure="exclude")
    assert summary.finished
    assert summary.left_out == {"zero_variance": 2 * 2 * 4, "failed_episode": 2 * 4}


def test_failures_are_recorded_kept_out_and_counted(trainer):
    async def sometimes(task):
        said = await converse(task)
        if task["id"] == "b":
            raise RuntimeError("broken tool")
        return said

    def scorer(candidate, call, task):
        return float("nan") if task["id"] == "c" else letters(candidate, call, task)

    app = application(sometimes, first=letters, second=scorer)
    summary = trainer(app, steps=1, plan={"k": 8}, on_failure="exclude")
    line = trainer.metrics()[0]
    assert line["failed"] == 1
    assert line["left_out"]["failed_episode"] == 2 * 8
    assert line["left_out"]["scorer_failed"] == 8
    assert "second: its scorer failed on 1 of 3 calls: " in trainer.said
    assert line["roles"]["second"]["samples"] == 8
    assert summary.left_out == line["left_out"]
    assert (
        "1 of 3 episodes failed while looking around: The workflow 'solve' raised RuntimeError: broken" in trainer.said
    )
    assert "scorer failed on 8 candidates, not trained on: The scorer of role 'second' ret" in trainer.said
    assert "failed episodes 1 of 3" in trainer.said
    store = SqliteStore.open(trainer.folder / "run", read_only=True)
    episodes = list(store.episodes(EpisodeFilters(phase="train")))
    assert Counter(episode.status for episode in episodes) == {"ok": 2, "error": 1}
    (failed,) = (episode for episode in episodes if episode.status == "error")
    assert "RuntimeError: broken tool" in failed.error
    assert len(store.calls(failed.id)) == 2


def test_a_failed_call_is_counted_and_the_episode_goes_on(trainer):
    async def patient(task):
        try:
            await ask("second", "x" * 300)
        except openai.APIError as error:
            assert "The prompt has" in str(error)
        return await converse(task)

    summary = trainer(application(patient, **BOTH), steps=1, plan={"k": 8})
    assert summary.finished
    assert summary.left_out["failed_call"] == 3
    assert "second: 3 of 6 calls are not trained on (error: " in trainer.said


def test_one_role_stays_while_the_other_learns(trainer):
    app = application(first=letters, second=flat)
    summary = trainer(app, steps=2)
    assert summary.versions == {"first": 2}
    first, *_, last = sorted((trainer.folder / "run" / "checkpoints").glob("step-*"))
    learned, stayed = "0.safetensors", "1.safetensors"
    assert equal(load_file(first / stayed), load_file(last / stayed))
    assert not equal(load_file(first / learned), load_file(last / learned))


class StopsOnce:
    """Sends this process a signal at a moment of the second step, once."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.sent = threading.Event()

    def __call__(self) -> None:
        if not self.sent.is_set():
            self.sent.set()
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, "update"),
        # `test_a_step_that_was_stopped_has_the_figures_of_one_without_a_stop` stops in the midst of rollouts, too.
        pytest.param(signal.SIGINT, "rollout", marks=pytest.mark.long),
    ],
)
def test_stopped_and_resumed_ends_like_a_run_without_a_stop(trainer, monkeypatch, number, moment):
    stop = StopsOnce(number)
    sampling = {"repeatable": True}  # what a warm cache gives is rounded otherwise than what a cold one gives
    settings = {
        "steps": 3,
        "rewards": {"team_weight": 0.0},
        "concurrency": 1,
        "learner": {"lr": 1e-2},
        "sampling": sampling,
    }
    whole = trainer(application(**BOTH), to="whole", **settings)

    step = Counter()
    update = LocalLearner.update

    def updated(self, policy, rows, **kwargs):
        step["updates"] += 1
        if moment == "update" and step["updates"] == 3:
            stop()
        return update(self, policy, rows, **kwargs)

    async def stopping(task):
        if moment == "rollout" and step["updates"] == 2 and task["id"] == "b":
            stop()
        return await converse(task)

    monkeypatch.setattr(LocalLearner, "update", updated)
    stopped = trainer(application(stopping, **BOTH), to="stopped", **settings)
    done = 1 if moment == "rollout" else 2
    assert stop.sent.is_set()
    assert trainer.said.count("finishing and saving the step under way first") == (moment == "update")
    assert not stopped.finished
    assert stopped.steps == done
    assert (
        f"stopped after step {done}; saved. Continue with: cotune train --resume {trainer.folder / 'stopped'}"
        in trainer.said
    )

    resumed = trainer.resume(application(**BOTH), to="stopped")
    assert resumed.finished
    assert resumed.versions == whole.versions
    assert [line["step"] for line in trainer.metrics("stopped")] == [0, 1, 2]
    one, other = weights(trainer.folder / "whole"), weights(trainer.folder / "stopped")
    assert all(equal(one[name], other[name]) for name in whole.versions)
    assert figures(trainer, "whole") == figures(trainer, "stopped")


def figures(trainer: Trainer, run: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times, rates and what is counted in each process anew.

    Gaps of the probe are left out, too: they are rounding, which depends on which of its requests share a batch.
    """
    lines = trainer.metrics(run)
    for line in lines:
        for name in ("seconds", "counters", "tokens_per_s", "rollout_tokens_per_s", "update_tokens_per_s"):
            del line[name]
        for table in (*line["roles"].values(), *line["policies"].values()):
            table.pop("seconds", None)
            table.pop("lost_share", None)
        for table in line["policies"].values():
            assert table.pop("probe_gap_mean", 0.0) <= table.pop("probe_gap_max", 0.0) < 1e-5
    return lines


async def tell(task):
    """Two calls, and no reward."""
    heard = await ask("first", f"say {task['letter']}")
    await ask("second", f"after {heard}")


def judged(run):
    app = application(run)
    app.judge(lambda episodes, task: [letters(e.calls[0].answer, None, task) for e in episodes])
    return app


@pytest.mark.parametrize(
    ("run", "app", "plan"),
    [
        # The last one covers them: a plan whose branches are rollouts, too, and a judge of episodes.
        pytest.param(converse, application, {"kind": "independent"}, marks=pytest.mark.long),
        pytest.param(tell, judged, {"kind": "independent"}, marks=pytest.mark.long),
        pytest.param(converse, application, {"kind": "replay", "k": 3}, marks=pytest.mark.long),
        (tell, judged, {"kind": "replay", "k": 3}),
    ],
    ids=["independent", "judge", "replay", "replay-judge"],
)
def test_a_step_that_was_stopped_has_the_figures_of_one_without_a_stop(trainer, run, app, plan):
    settings = {"plan": plan, "concurrency": 1, "sampling": {"repeatable": True}}
    trainer(app(run), to="whole", **settings)
    with_step = EpisodeFilters(phase="train", training_step=1)
    with SqliteStore.open(trainer.folder / "whole" / "records.db", read_only=True) as store:
        of_second_step = len(list(store.episodes(with_step)))
    stop, begun = StopsOnce(signal.SIGINT), Counter()

    async def stopping(task):
        begun[""] += 1
        if begun[""] == begun["looked at"] + of_second_step + of_second_step // 2:  # halfway through the second step
            stop()
        return await run(task)

    with SqliteStore.open(trainer.folder / "whole" / "records.db", read_only=True) as store:
        begun["looked at"] = len(list(store.episodes(EpisodeFilters(phase="check"))))
    assert not trainer(app(stopping), to="stopped", **settings).finished
    assert len(trainer.metrics("stopped")) == 1
    assert trainer.resume(app(run), to="stopped").finished
    assert figures(trainer, "whole") == figures(trainer, "stopped")


def test_an_application_that_most_answers_break_can_start(trainer):
    """The first five episodes fail by what the model said; then one does not, and the run begins."""
    looked = []

    async def fragile(task):
        said = await ask("first", f"say {task['letter']}")
        looked.append(said)
        if len(looked) <= 5:
            raise ValueError(f"cannot read {said!r}")
        return said.count(task["letter"]) / 4

    trainer(application(fragile), steps=1)
    assert "5 of 6 episodes failed while looking around: The workflow 'solve' raised ValueError" in trainer.said
    assert trainer.metrics()[0]["episodes"] == 12


def test_an_application_that_every_answer_breaks_is_told_after_sixteen(trainer):
    async def broken(task):
        raise ValueError(f"cannot read {await ask('first', 'say')!r}")

    with pytest.raises(WorkflowError) as caught:
        trainer(application(broken), steps=1)
    assert caught.value.cause.endswith("All 16 of the first episodes failed.")
    assert "have the workflow return a low reward" in caught.value.remedy
    assert " of 16 answers ended at their limit of tokens: raise sampling.max_tokens" in caught.value.remedy


def test_a_terminal_keeps_a_line_of_each_step(trainer: Trainer) -> None:
    heard = io.StringIO()
    config = {"model": str(trainer.base), "steps": 2, "tasks_per_step": 3, "plan": {"k": 4}}
    console = Console(file=heard, width=80, force_terminal=True)
    app = application(first=letters, second=letters)
    summary = train(app, TASKS, config, out=trainer.folder / "run", console=console)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", heard.getvalue())
    for step, metrics in enumerate(trainer.metrics(), start=1):
        assert re.search(rf"step {step}/2  .*first {metrics['roles']['first']['reward']:.3f}", shown)
    rewards = [tuple(line["roles"][role]["reward"] for line in trainer.metrics()) for role in ("first", "second")]
    assert [(c.first.mean, c.last.mean) for c in summary.headline.changes if c.kind == "role"] == rewards
