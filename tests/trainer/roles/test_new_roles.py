"""Roles that a run first sees after its start: they get policies as configured, and are trained."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from safetensors.torch import load_file

from cotune.errors import GroupError
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.run.checkpoint import load_checkpoint
from tests.trainer import worker_app
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS, application, ask, letters

pytestmark = pytest.mark.slow

LATE = [*({"id": f"{i}", "letter": "a"} for i in range(3)), {"id": "late", "letter": "b"}]


async def run(task: dict[str, str]) -> float:
    """The first tasks, at which training looks around, know one role only."""
    said = await ask("first", f"say {task['letter']}")
    if task["id"] == "late":
        said = await ask("critic", f"judge {said}")
    return sum(letter in "abcdefgh" for letter in said) / 4


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("lora", "critic"),
        pytest.param("full", "critic", marks=pytest.mark.long),
        pytest.param("shared", "shared", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("every_checkpoint")
def test_a_late_role_is_played_and_trained_from_the_next_step_on(trainer: Trainer, layout: str, policy: str) -> None:
    settings = {"tasks_per_step": 4, "roles": [], "policies": layout}
    plan = {"kind": "independent", "k": 8}
    summary = trainer(application(run), LATE, steps=4, plan=plan, **settings)
    own = f"a policy of its own ({layout}, version 0)" if layout != "shared" else "the policy shared"
    assert f"role 'critic', first seen in step 1: {own} plays it from step 2 on\n" in trainer.said
    lines = trainer.metrics()
    assert [line["failed"] for line in lines] == [0] * 4
    assert [line["left_out"].get("untrained_role", 0) for line in lines] == [8, 0, 0, 0]
    assert "critic" not in lines[0]["roles"] and lines[1]["roles"]["critic"]["samples"] == 8
    assert summary.versions[policy] >= 1
    store = SqliteStore.open(trainer.folder / "run", read_only=True)
    answered = Counter()
    for episode in store.episodes(EpisodeFilters(phase="train")):
        answered.update((episode.training_step, str(c.policy)) for c in store.calls(episode.id) if c.role == "critic")
    assert answered[0, "base@0"] == 8
    assert sum(count for (step, name), count in answered.items() if name.startswith(f"{policy}@")) == 24


SILENT = "Role 'critic' has called in no episode for 3 steps and more, so nothing trains it. "


BY_NAME = {"policy": [{"name": name, "roles": [name]} for name in ("first", "critic")]}


@pytest.mark.parametrize("named", [{}, pytest.param(BY_NAME, marks=pytest.mark.long)])
def test_a_node_that_no_answer_has_led_to_yet_is_no_unknown_role(trainer: Trainer, named: dict[str, Any]) -> None:
    async def first(state: dict[str, str]) -> dict[str, str]:
        return {"said": await ask("first", f"say {state['letter']}")}

    async def critic(state: dict[str, str]) -> dict[str, str]:
        return {"said": await ask("critic", f"judge {state['said']}")}

    async def third(state: dict[str, str]) -> dict[str, str]:
        return {"said": await ask("third", "nobody comes here")}

    builder = StateGraph(dict)
    for node in (first, critic, third):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "first")
    builder.add_conditional_edges("first", lambda state: "never", {"never": END, "critic": "critic", "third": "third"})
    graph = builder.compile()

    async def solve(task: dict[str, str]) -> float:
        return float(len((await graph.ainvoke({"letter": task["letter"]}))["said"]))

    app = application(solve, first=letters, critic=letters)
    assert trainer(app, steps=2, policies="lora", **named).silent == {"critic": 2}
    assert "not called yet: critic; trained from the first call on" in trainer.said
    assert "no episode has come to: third; a role has no policy before it has called" in trainer.said
    assert set(trainer.metrics()[0]["roles"]) == {"first"} and SILENT not in trainer.said
    summary = trainer.resume(app, steps=5)
    lines = trainer.metrics()
    assert [line["silent"] for line in lines] == [{"critic": steps} for steps in (1, 2, 3, 4, 5)]
    assert [sum(note.startswith(SILENT) for note in line["notes"]) for line in lines] == [0, 0, 1, 1, 1]
    assert trainer.said.count(SILENT) == 1 and summary.silent == {"critic": 5}


def test_a_role_that_calls_now_and_then_is_not_spoken_of(trainer: Trainer) -> None:
    """It is two steps without a call, calls, and is two steps without one again."""
    asked = Counter()

    async def solve(task: dict[str, str]) -> float:
        said = await ask("first", f"say {task['letter']}")
        asked["episodes"] += 1
        if asked["episodes"] <= 3 or 15 < asked["episodes"] <= 21:  # the ones looked at first, and the third step
            await ask("critic", f"judge {said}")
        return float(len(said))

    summary = trainer(application(solve), steps=5, plan={"kind": "independent", "k": 2}, concurrency=1)
    assert [line["silent"].get("critic", 0) for line in trainer.metrics()] == [1, 2, 0, 1, 2]
    assert summary.silent == {} and "has called in no episode" not in trainer.said


def test_the_learner_before_is_gone_when_one_with_a_new_role_is_opened(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once would take twice the memory."""
    opened: list[weakref.ref[LocalLearner]] = []
    real, alive = LocalLearner.open, []

    def opening(*args: Any) -> LocalLearner:
        alive.append(sum(ref() is not None for ref in opened))
        learner = real(*args)
        opened.append(weakref.ref(learner))
        return learner

    monkeypatch.setattr(LocalLearner, "open", opening)
    trainer(application(run), LATE, steps=2, tasks_per_step=4, plan={"kind": "independent", "k": 2})
    assert alive == [0, 0]


def test_a_run_resumed_where_a_role_was_first_seen_goes_on_with_its_policy(trainer: Trainer) -> None:
    """The checkpoint after the step knows the role; the resumed run ends as the whole one."""
    settings = {"tasks_per_step": 4, "plan": {"kind": "independent", "k": 8}, "concurrency": 1}
    settings["sampling"] = {"repeatable": True}  # which is cold after an interruption
    whole = trainer(application(run), LATE, steps=3, to="whole", **settings)
    trainer(application(run), LATE, steps=1, **settings)
    saved = load_checkpoint(trainer.folder / "run" / "checkpoints")[0]
    assert (list(saved.policies.roles), saved.new_roles) == (["first"], ("critic",))
    resumed = trainer.resume(application(run), LATE, steps=3)
    assert "role 'critic' gets the policy critic\n" in trainer.said
    assert resumed.versions == whole.versions and set(whole.versions) == {"first", "critic"}
    one, other = ([line["roles"] for line in trainer.metrics(name)] for name in ("whole", "run"))
    assert json.dumps(one) == json.dumps(other)


def test_policies_by_name_leave_a_late_role_to_the_untrained_model(trainer: Trainer) -> None:
    policy = [{"name": "talker", "roles": ["first"]}]
    plan = {"kind": "independent", "k": 4}
    summary = trainer(application(run), LATE, steps=2, tasks_per_step=4, policy=policy, plan=plan)
    assert set(summary.versions) <= {"talker"}
    assert [line["left_out"]["untrained_role"] for line in trainer.metrics()] == [4, 4]
    assert "role 'critic' has no policy: the untrained model answers it" in trainer.said


def test_a_late_role_in_mode_async_is_not_trained_on_what_the_base_has_said(trainer: Trainer) -> None:
    plan = {"kind": "independent", "k": 4}
    summary = trainer(application(run), LATE, steps=4, tasks_per_step=4, plan=plan, mode="async")
    assert summary.finished
    assert [line["left_out"].get("untrained_role", 0) for line in trainer.metrics()] == [4, 4, 0, 0]


def test_a_step_in_which_everything_fails_names_the_cause_and_goes_on_once_it_is_put_right(trainer: Trainer) -> None:
    state = Counter()

    async def breaks(task: dict[str, str]) -> float:
        state["ran"] += 1
        if 3 < state["ran"] <= 9:
            raise ConnectionRefusedError("the database is down")
        return await run({**task, "id": "early"})

    with pytest.raises(GroupError, match=r"Step 1 has no usable sample .*6 of 6 episodes failed with: .*database is d"):
        trainer(application(breaks), TASKS, plan={"k": 2})
    assert not (trainer.folder / "run" / "metrics.jsonl").exists()


@pytest.mark.long
def test_a_late_role_on_a_cluster_has_a_critic_that_sees_the_reference(
    ray_runtime: str, trainer: Trainer, tmp_path: Path
) -> None:
    own = tmp_path / "sees.py"
    own.write_text(
        "import msgspec\nfrom cotune.methods import MaPoRl\n\n\nclass Sees(MaPoRl):\n"
        "    loss = msgspec.structs.replace(MaPoRl.loss, critic_sees='reference')\n"
    )
    cluster = {"address": "local", "learners": 1, "rollout_workers": 1}
    tasks = [{**task, "reference": f"say {task['letter']}"} for task in LATE]
    settings = {
        "engine": "transformers",
        "recipe": f"{own}:Sees",
        "policies": "lora",
        "plan": {"kind": "independent", "k": 4},
    }
    settings |= {"cluster": cluster, "engine": "transformers"}
    summary = trainer(worker_app.late, tasks, steps=2, tasks_per_step=4, **settings)
    assert "role 'critic', first seen in step 1: a policy of its own (lora, version 0)" in trainer.said
    first, second = trainer.metrics()
    assert summary.finished and second["roles"]["critic"]["samples"] == 4
    assert first["failed"] == second["failed"] == 0
    for figures in (first["policies"]["first"], second["policies"]["first"], second["policies"]["critic"]):
        assert {"value_loss", "explained_variance"} <= figures.keys()
        assert figures["steps"] > 0
    found = load_file(next((trainer.folder / "run" / "checkpoints" / "step-000002").rglob("0.critic.safetensors")))
    assert found["step/weight"] == 16
