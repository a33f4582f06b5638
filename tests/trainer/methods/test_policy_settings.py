"""A rate, a loss, an estimator and steps of its own for each policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotune.algorithms.catalogue import recipe
from cotune.errors import ConfigError
from cotune.records.policies import policies_for
from cotune.trainer.config.learner import PolicyTraining
from cotune.trainer.config.load import convert
from cotune.trainer.config.resolve import resolve_plan, resolve_policies
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.conftest import Trainer
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows, on_policy, snapshot
from tests.trainer.tiny_app import application, converse

BOTH = policies_for("lora", ("a", "b"), SMALL)
FIRST, SECOND = recipe("dr_mas").loss, recipe("cispo", kl=0.1).loss


@pytest.mark.parametrize("opened", ["local", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_methods_in_one_learner_train_as_two_learners(
    opened: str, base: str, request: pytest.FixtureRequest
) -> None:
    """Each policy moves as in a learner whose every policy has its rate and loss, to the bit."""
    make = LocalLearner.open if opened == "local" else request.getfixturevalue("two_ranks").learner
    own, wanted = PolicyTraining(change(FAST, lr=3e-3), SECOND), {}
    for name, method in (("a", PolicyTraining(FAST, FIRST)), ("b", own)):
        alone = make(base, BOTH, *method)
        rows = on_policy(alone, name, make_rows(role=name))
        wanted[name] = rows, alone.update(name, rows, lr_scale=0.5), snapshot(alone, name)
    mixed = make(base, BOTH, FAST, FIRST, own={"b": own})
    for name, (rows, expected, weights_alone) in wanted.items():
        figures = mixed.update(name, rows, lr_scale=0.5)
        same = ("loss", "lr", "clip_share", "grad_norm", "kl")
        assert {k: figures.get(k) for k in same} == {k: expected.get(k) for k in same}
        assert figures["lr"] == pytest.approx(0.5 * (1e-2 if name == "a" else 3e-3))
        found = snapshot(mixed, name)
        assert all(np.array_equal(found[key], weights_alone[key]) for key in found)


def policy(name: str, role: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "roles": [role], **fields}


def weights(run: Path, steps: int) -> dict[str, bytes]:
    """The weights of both policies in a checkpoint, as they are on disk."""
    folder = run / "checkpoints" / f"step-{steps:06d}"
    return {name: (folder / f"{i}.safetensors").read_bytes() for i, name in enumerate(("ask", "answer"))}


@pytest.mark.slow
@pytest.mark.usefixtures("every_checkpoint")
def test_roles_take_turns_with_recipes_of_their_own_and_a_resumed_run_goes_on(trainer: Trainer, tmp_path: Path) -> None:
    """Two recipes, rates and schedules; `ask` learns in steps 1, 2 and 5, `answer` from step 3 on."""
    tables = [
        policy("ask", "first", train="1:2,5:", lr=1e-2, schedule={"kind": "linear"}),
        policy("answer", "second", train="3:", recipe="rloo", loss={"entropy": 0.01}),
    ]
    settings = {"policy": tables, "plan": {"kind": "independent", "k": 6}, "tasks_per_step": 2}
    trainer(
        application(converse), steps=3, **{**settings, "policy": [{**tables[0], "train": "1:2"}, tables[1]]}, to="c"
    )
    trainer(application(converse), steps=5, **settings)
    run, lines = tmp_path / "run", trainer.metrics()
    for line, trained, still in zip(
        lines, ("ask", "ask", "answer", "answer", None), ("answer", "answer", "ask", "ask", None), strict=True
    ):
        before, after = weights(run, line["step"]), weights(run, line["step"] + 1)
        if trained is None:
            assert not line["stayed"] and "frozen_step" not in line["left_out"]
            assert all(before[name] != after[name] for name in before)
            continue
        assert list(line["policies"]) == [trained] and line["stayed"] == {still: "frozen step"}
        assert before[still] == after[still] and before[trained] != after[trained]
        assert line["left_out"]["frozen_step"] > 0
        assert line["rows"] + sum(line["left_out"].values()) == line["candidates"]
        role = {"ask": "first", "answer": "second"}[still]
        assert line["roles"][role]["kept"] == 0 and "reward" in line["roles"][role], "its figures are still told"
    rates = [line["policies"].get("ask", {}).get("lr") for line in lines]
    assert rates == pytest.approx([1e-2, 8e-3, None, None, 2e-3]), "the schedule keeps the run's steps"
    assert lines[2]["policies"]["answer"]["lr"] == 3e-3
    assert "recipe dr_mas, rloo for answer" in trainer.said and "policy ask is trained in steps 1:2,5:" in trainer.said

    # A run of three steps that goes on is the run of five.
    held = json.loads((run / "run.json").read_text())["config"]["policy"]
    assert [(one["train"], one["recipe"], one["lr"]) for one in held] == [("1:2,5:", None, 1e-2), ("3:", "rloo", None)]
    with pytest.raises(ConfigError, match=r"policy .*when the run was started"):
        trainer.resume(application(converse), steps=6, policy=[{**tables[0], "lr": 5e-3}, tables[1]])
    summary = trainer.resume(application(converse), steps=6)
    assert summary.finished and summary.versions == {"ask": 4, "answer": 4}
    assert trainer.metrics()[5]["policies"].keys() == {"ask", "answer"}

    # Steps to come may be given to another policy, those that were made not.
    with pytest.raises(ConfigError, match=r"policy .*when the run was started"):
        trainer.resume(application(converse), steps=7, policy=[{**tables[0], "train": "1:2,4:"}, tables[1]])
    trainer.resume(application(converse), steps=7, policy=[{**tables[0], "train": "1:2,5:6"}, tables[1]])
    assert trainer.metrics()[6]["policies"].keys() == {"answer"}


@pytest.mark.slow
def test_a_taught_policy_beside_a_frozen_one_needs_no_reward(trainer: Trainer, tiny_base: Path) -> None:
    async def unrewarded(task: Any) -> None:
        await converse(task)

    app = application(unrewarded)
    app.scorer("second", group=True)(lambda candidates, call, task: [None] * len(candidates))

    taught = policy("ask", "first", recipe="distill", teacher=str(tiny_base))
    tables = [taught, policy("answer", "second", kind="frozen")]
    assert trainer(app, policy=tables, plan={"kind": "independent"}, steps=1).finished
    (line,) = trainer.metrics()
    assert line["policies"]["ask"]["rows"] > 0


@pytest.mark.parametrize(
    ("tables", "fault"),
    [
        ([policy("p", "a", train="1:3"), policy("q", "b")], r"policy.train = '1:3' names step 3, beyond the last step"),
        ([policy("p", "a", train="2:")], r"leaves step 1 without a policy that is trained"),
        ([policy("p", "a", train="2-3")], r"policy.train = '2-3' has '2-3', which is not a range of steps"),
        ([policy("p", "a", kind="frozen", lr=1e-3), policy("q", "b")], r"policy.lr = 0.001 has no effect: policy p is"),
        ([policy("p", "a", kind="provider", train="1:"), policy("q", "b")], r"policy.train = '1:' has no effect"),
        ([policy("p", "a", lr=0.0)], r"policy.lr = 0.0 must be a number above 0"),
        (
            [policy("p", "a", tool_format="hermes")],
            r"policy.tool_format = 'hermes' is of a base model, and policy p",
        ),
        ([policy("p", "a", model="o", tool_format="hermse")], r"policy.tool_format = 'hermse' is not auto, hermes"),
        (
            [policy(n, n, model="o", tool_format=how) for n, how in (("p", "hermes"), ("q", "mistral"), ("r", ""))],
            r"policy.tool_format = 'mistral' of policy q differs from 'hermes', the tool_format of policy p",
        ),
        ([policy("p", "a", recipe="grop")], r"policy.recipe = 'grop' of policy p is not one of"),
        ([policy("p", "a", recipe="sft")], r"policy.recipe = 'sft' of policy p learns from records, and so is the"),
        ([policy("p", "a", recipe=["rloo"])], r"policy\[0\].recipe = \['rloo'\] must be text"),
        (5, r"policy = 5 must be a list"),
        ([policy("p", "a", schedule={"kind": "linaer"})], r"schedule.kind = 'linaer' is not one of constant, cosine"),
    ],
)
def test_bad_settings_of_a_policy_are_named(tables: Any, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        convert({"model": "m", "steps": 2, "policy": tables})


def test_recipes_that_do_not_fit_are_named_before_work_starts() -> None:
    def resolved(scorers: list[str], *tables: dict[str, Any], **settings: Any) -> Any:
        return resolve_plan(convert({"model": "m", "policy": list(tables), **settings}), scorers)

    with pytest.raises(ConfigError, match=r"policy.recipe = 'grpo' of policy q cannot be used here: .*, which is tree"):
        resolved(["a"], policy("p", "a"), policy("q", "b", recipe="grpo"))
    config = convert({"model": "m", "policy": [policy("p", "a"), policy("q", "b", recipe="dapo")]})
    able = resolve_plan(config, ["a"])[1].trainable_roles(["a"])
    with pytest.raises(ConfigError, match=r"policy.kind = 'lora for q' cannot be trained under the tree plan: none"):
        resolve_policies(config, ["a", "b"], scored=able)
    with pytest.raises(ConfigError, match=r"policy.loss.critic_sees = 'x' was removed"):
        resolved([], policy("p", "a", loss={"critic_sees": "x"}))
    with pytest.raises(ConfigError, match=r"policy.recipe = 'rloo' cannot be used with recipe sft"):
        convert({"model": "m", "recipe": "sft", "records": "r", "policy": [policy("p", "a", recipe="rloo")]})


def test_a_base_that_is_written_in_two_ways_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    tables = [policy("p", "a", model="./base"), policy("q", "b", model=str(tmp_path / "base")), policy("r", "c")]
    config = convert({"model": "base", "policy": [*tables, policy("s", "d", model="other")]})
    assert config.bases == {"base": ["p", "q", "r"], "other": ["s"]}
    assert [spec.model for spec in config.specs.values()] == [None, None, None, "other"]
