"""Training policies of two base models with different vocabularies, templates and context lengths in one run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotune.adapters.export import export_run, latest_policies
from cotune.cli.main import main
from cotune.errors import ConfigError, RunError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.reading.facts import facts
from cotune.reading.run import OpenedRun
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import BaseDigests
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.opening.resume import keep_or_check_bases
from tests.integrations import tiny_models
from tests.trainer.conftest import Trainer
from tests.trainer.records.records import traced
from tests.trainer.tiny_app import TASKS, application, build_base


def team(other: Path, **more: Any) -> list[dict[str, Any]]:
    return [
        {"name": "one", "roles": ["first"], **more},
        {"name": "two", "roles": ["second"], "model": str(other), **more},
    ]


def evens(candidate: Any, call: Any, task: Any) -> float:
    return sum(id % 2 for id in candidate.token_ids) / 4


APP = application(first=evens, second=evens)


@pytest.fixture(scope="module")
def trained(module_trainer: Trainer, other_base: Path) -> Path:
    """A run of two steps."""
    held_out = {"evaluation": {"tasks": str(_tasks(module_trainer.folder)), "every": 1}}
    assert module_trainer(APP, policy=team(other_base), to="trained", **held_out).finished
    return module_trainer.folder / "trained"


def _tasks(folder: Path) -> Path:
    file = folder / "held_out.jsonl"
    file.write_text("".join(json.dumps({**task, "id": f"h{task['id']}"}) + "\n" for task in TASKS))
    return file


@pytest.fixture(scope="module")
def formats(tiny_base: Path, other_base: Path) -> dict[str, ChatTemplate]:
    return {"first": ChatTemplate.load(tiny_base), "second": ChatTemplate.load(other_base)}


def check_prompts(store: Store, formats: dict[str, ChatTemplate]) -> set[str]:
    """The policies that have answered; every prompt is in the template of its role's base."""
    answered = set()
    for call in (call for episode in store.episodes() for call in store.calls(episode.id)):
        messages = [store.message(id) for id in call.messages]
        assert call.prompt and list(store.token_ids(call.prompt)) == formats[call.role].render(messages, None)
        answered.add(str(call.policy))
    return answered


def weights(run: Path) -> dict[str, Any]:
    return {policy.name: policy.weights for policy in latest_policies(run)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        all(np.array_equal(array, other[name][key]) for key, array in one[name].items()) for name in one
    )


def test_each_policy_has_the_tokens_of_its_base(
    module_trainer: Trainer,
    trained: Path,
    other_base: Path,
    formats: dict[str, ChatTemplate],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open_store(trained, read_only=True) as store:
        answered = check_prompts(store, formats)
    assert answered == {"base@0", "one@0", "two@0", "one@1", "two@1", "one@2", "two@2"}
    for line in module_trainer.metrics("trained"):
        assert line["policies"].keys() == {"one", "two"}
        assert all(of["sampler_gap_max"] < 1e-4 for of in line["policies"].values())
        assert line["held_out"]["reward/first"] is not None
    assert main(["show", str(trained)]) == 0
    assert f"two has the base model {other_base}" in " ".join(capsys.readouterr().out.split())
    with OpenedRun(trained) as opened:
        assert opened.about.base_of("two") == str(other_base) and opened.about.base_of("one") is None
        assert facts(opened).bases == {"two": str(other_base)}


def sampled(run: Path) -> dict[tuple[Any, ...], Any]:
    """What each call of each training step has sampled."""
    with open_store(run, read_only=True) as store:
        return {
            (episode.training_step, episode.task.id, call.role): [c.token_ids for c in call.candidates]
            for episode in store.episodes(EpisodeFilters(phase="train"))
            for call in store.calls(episode.id)
        }


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(trainer: Trainer, trained: Path, other_base: Path) -> None:
    trainer(APP, policy=team(other_base), steps=1)
    assert trainer.resume(APP, steps=2).finished
    assert sampled(trainer.folder / "run") == sampled(trained)


def test_bases_that_have_moved_are_found_by_their_digests(trainer: Trainer, other_base: Path) -> None:
    moving = trainer.folder / "moving"
    shutil.copytree(other_base, moving)
    trainer(APP, policy=team(moving), steps=1)
    held = json.loads((trainer.folder / "run" / "run.json").read_text())["held"]
    assert held["bases"].keys() == {"two"} and held["bases"]["two"] != held["base"]
    moved = trainer.folder / "elsewhere"
    moving.rename(moved)
    with pytest.raises(ConfigError, match=r"policy.model = '.*moving' \(the base of policy 'two'\)"):
        trainer.resume(APP, steps=2)
    with pytest.raises(ConfigError, match="policy = "):
        trainer.resume(APP, steps=2, policy=team(moved, lora={"rank": 2}))
    assert trainer.resume(APP, steps=2, policy=team(moved)).steps == 2
    tiny_models.build("llama", third := trainer.folder / "third", seed=1)
    with pytest.raises(RunError, match="base model of policy 'two' is not the one"):
        trainer.resume(APP, steps=3, policy=team(third))


@pytest.mark.parametrize("exported", [False, True])
def test_evaluations_compare_each_policy_with_its_own_base(
    trained: Path, tmp_path: Path, formats: dict[str, ChatTemplate], in_thread: None, exported: bool
) -> None:
    source = trained
    if exported:
        export_run(trained, source := tmp_path / "export")
    report = evaluate(source, APP, TASKS, modes=("base", "trained", "swapped"), out=tmp_path / "eval")
    assert set(report.evaluations) == {"base", "trained", "swapped"}
    with open_store(tmp_path / "eval", read_only=True) as store:
        for episode in store.episodes():
            for call in store.calls(episode.id):
                assert call.status == "ok" and call.policy and call.prompt
                role = {"one": "first", "two": "second"}[call.policy.name]
                assert (role == call.role) == (episode.phase != "eval-swapped")
                prompt = formats[role].render([store.message(id) for id in call.messages], None)
                assert list(store.token_ids(call.prompt)) == prompt


# `test_warm_start.py` starts from an export, too.
@pytest.mark.parametrize("exported", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_starts_from_policies_of_several_bases(
    trainer: Trainer, trained: Path, other_base: Path, exported: bool
) -> None:
    source = trained
    if exported:
        export_run(trained, source := trainer.folder / "export")
    trainer(APP, policy=team(other_base), steps=1, init=str(source))
    assert "two starts from two@2 of" in trainer.said
    first = trainer.folder / "run" / "checkpoints" / "step-000000"
    from safetensors.numpy import load_file

    begun = {name: dict(load_file(first / f"{i}.safetensors")) for i, name in enumerate(("one", "two"))}
    assert same(begun, weights(trained))
    with pytest.raises((ConfigError, RunError), match="have other names or shapes"):
        roles = [
            {**policy, "roles": roles} for policy, roles in zip(team(other_base), (["second"], ["first"]), strict=True)
        ]
        trainer(APP, policy=roles, steps=1, init=str(trained), to="crossed")


def test_episodes_are_replayed_by_each_policy(
    trained: Path, tmp_path: Path, formats: dict[str, ChatTemplate], capsys: pytest.CaptureFixture[str], in_thread: None
) -> None:
    workflow = "tests.trainer.bases.team_app:solve"
    words = ["--call", "0", "--out", str(tmp_path / "again"), "--limit", "2", "--workflow", workflow]
    assert main(["replay", str(trained), "--all", *words]) == 0, capsys.readouterr()
    with open_store(tmp_path / "again", read_only=True) as store:
        assert check_prompts(store, formats) == {"one@2", "two@2"}


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_records_are_learned_in_the_template_of_each_base(
    trainer: Trainer, trained: Path, other_base: Path, formats: dict[str, ChatTemplate], recipe: str
) -> None:
    records = str(traced(trainer.folder / "traced")) if recipe == "sft" else str(trained)
    done = trainer(None or APP, None, policy=team(other_base), recipe=recipe, records=records, steps=1)
    assert done.finished and done.steps == 1
    assert trainer.metrics()[0]["policies"].keys() == {"one", "two"}
    if recipe == "sft":
        trainer.resume(APP, None, steps=2)


def test_a_base_of_a_frozen_policy_answers_untrained(
    trainer: Trainer, other_base: Path, formats: dict[str, ChatTemplate]
) -> None:
    frozen = team(other_base)
    frozen[1]["kind"] = "frozen"
    trainer(APP, policy=frozen, steps=1)
    with open_store(trainer.folder / "run", read_only=True) as store:
        assert check_prompts(store, formats) == {"one@0", "two@0", "base@0"}
    assert trainer.metrics()[0]["policies"].keys() == {"one"}


def test_roles_pass_around_policies_of_different_bases(
    trainer: Trainer, other_base: Path, formats: dict[str, ChatTemplate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotune.records.policies.STEPS_BETWEEN_SWAPS", 1)
    routing = {"swap": ["first", "second"]}
    assert trainer(APP, policy=team(other_base), steps=2, routing=routing).versions == {"one": 2, "two": 2}
    with open_store(trainer.folder / "run", read_only=True) as store:
        for episode in store.episodes(EpisodeFilters(phase="train")):
            for call in store.calls(episode.id):
                assert call.policy and call.prompt
                own = {"one": "first", "two": "second"}[call.policy.name]
                assert (own == call.role) == (episode.training_step == 0)
                prompt = formats[own].render([store.message(id) for id in call.messages], None)
                assert list(store.token_ids(call.prompt)) == prompt
    assert all(of["sampler_gap_max"] < 1e-4 for line in trainer.metrics() for of in line["policies"].values())


def test_bad_input_is_named_before_work_starts(trainer: Trainer, tiny_base: Path, other_base: Path) -> None:
    def refused(match: str, *changes: dict[str, Any], **settings: Any) -> None:
        policies = [{**policy, **change} for policy, change in zip(team(other_base), changes, strict=True)]
        with pytest.raises(ConfigError, match=match):
            trainer(APP, policy=policies, **settings)
        assert not (trainer.folder / "run").exists()

    gone = str(trainer.folder / "gone")
    refused(r"policy.model = '.*gone' \(the base of policy 'two'\) is not a model folder", {}, {"model": gone})
    bare = str(build_base(trainer.folder / "bare", template=False))
    refused(r"policy.model = '.*bare' \(the base of policy 'two'\) has a tokenizer without a", {}, {"model": bare})
    refused(r"policy.model = .* is the base of two, which the provider answers", {}, {"kind": "provider"})
    refused(r"policy.name = 'base' is the name of the run's own model", {}, {"name": "base"})
    refused(r"lora.targets = 'gate' of policy 'two' are not layers", {}, {"lora": {"targets": ["q_proj", "gate"]}})
    taught = {"recipe": "distill", "distill": {"teacher": str(tiny_base)}}
    refused(r"distill.teacher = .* has another tokenizer than .*other", {}, {}, **taught)


def test_a_policy_whose_own_base_gave_way_to_that_of_the_run_is_named() -> None:
    folder: Any = SimpleNamespace(described={"held": {"base": {"weights": "a"}, "bases": {"two": {"weights": "b"}}}})
    keep_or_check_bases(folder, BaseDigests(base={"weights": "a"}, bases={"two": {"weights": "b"}}))
    with pytest.raises(RunError, match=r"base model of policy 'two' is not the one .* its weights changed"):
        keep_or_check_bases(folder, BaseDigests(base={"weights": "a"}))
