"""Failed episodes in training: left out, or trained on with the reward that the configuration gives them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cotune.errors import ConfigError
from cotune.show import show_run
from cotune.trainer.config import convert
from tests.trainer.tiny_app import application, ask, converse


async def fails_on_b(task):
    """Two calls of trained roles, one that fails, and an end that depends on the task."""
    said = await converse(task)
    if task["id"] == "b":
        raise RuntimeError("broken tool")
    return said


def groups_of(path) -> str:
    heard = io.StringIO()
    Console(file=heard, width=120).print(show_run(path, groups=True))
    return heard.getvalue()


@pytest.mark.parametrize(
    ("on_failure", "samples", "left_out"),
    [("exclude", 8, {"failed_episode": 8}), ("reward:-1", 12, {})],
)
def test_failed_episodes(trainer, on_failure, samples, left_out):
    app = application(fails_on_b)
    summary = trainer(app, steps=1, on_failure=on_failure, plan={"kind": "independent", "k": 4})
    line = trainer.metrics()[0]
    assert line["failed"] == 4
    assert line["roles"]["first"]["samples"] == samples
    assert summary.left_out.get("failed_episode", 0) == left_out.get("failed_episode", 0)
    said = groups_of(trainer.folder / "run")
    assert ("failed_episode" in said) == bool(left_out)


async def differs(task):
    """Fails in half of the episodes of a task, so that the penalty is what there is to learn from."""
    await ask("first", f"say {task['letter']}")
    differs.runs += 1
    if differs.runs % 2:
        raise RuntimeError("broken tool")
    return 0.5


def test_the_penalty_is_compared_with_the_rewards_of_the_others(trainer):
    differs.runs = 0
    summary = trainer(application(differs), steps=1, on_failure="reward:-1", concurrency=1, plan={"k": 4})
    line = trainer.metrics()[0]
    assert line["failed"] > 0
    assert line["rows"] == 12
    assert line["roles"]["first"]["group_spread"] > 0.5
    assert line["outcome"] == {"team": 0.5}
    assert summary.versions == {"first": 1}


def test_calls_that_fail_are_not_trained_on_in_failed_episodes_either(trainer):
    """Nor are those that time out: the role is trained, and its other calls are."""

    async def run(task):
        said = await converse(task)
        if task["id"] == "b":
            await ask("second", "x" * 300)
        return said

    summary = trainer(application(run), steps=1, on_failure="reward:-1", plan={"k": 4})
    line = trainer.metrics()[0]
    assert line["failed"] == 4
    assert line["roles"]["second"]["samples"] == 12
    assert summary.left_out["failed_call"] == 4
    assert "failed_episode" not in summary.left_out


@pytest.mark.parametrize("value", ["drop", "reward:", "reward:much", "reward:nan"])
def test_the_field_is_named(value):
    with pytest.raises(ConfigError, match=r"^on_failure = .*: allowed is exclude or reward:<number>\.") as caught:
        convert({"model": "m", "on_failure": value})
    assert caught.value.field == "on_failure"


@pytest.mark.parametrize("value", ["nowhere:hide", "json:nothing", "plain", ":x"])
def test_a_redactor_that_is_not_there(trainer, value):
    with pytest.raises(ConfigError) as caught:
        trainer(application(), redact=value)
    assert caught.value.field == "redact"
    assert not (trainer.folder / "run").exists()
