"""Policies of several runs, exports and models in one team: `--use` of `cotune eval` and `cotune export`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.adapters.manifest import read_manifest
from cotune.cli.main import main
from cotune.errors import AdapterError, ConfigError
from cotune.reading.evaluations import EvaluationReport
from cotune.records.policies import Policies, PolicySpec, policies_for
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.sources import REST, read_source, read_sources, split_assignments
from cotune.trainer.evaluation.team import open_team
from tests.trainer.evaluation.made_runs import LORA, make_run
from tests.trainer.tiny_app import application, ask, build_base

ME = "tests.trainer.evaluation.test_team"
TASKS = [{"id": letter, "letter": letter} for letter in "abcdef"]

pytestmark = pytest.mark.usefixtures("in_thread", "no_provider")


async def alike(task: Any) -> dict[str, Any]:
    """Both roles are asked independently, so each answers by its policy alone."""
    one = await ask("first", f"say {task['letter']}")
    two = await ask("second", f"now {task['letter']}")
    return {"team": (one + two).count(task["letter"]) / 8, "success": task["letter"] in one + two}


async def with_judge(task: Any) -> float:
    await ask("first", f"say {task['letter']}")
    return float(len(await ask("judge", f"judge {task['letter']}")))


SOLVE, JUDGED = application(alike), application(with_judge)


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, runs of different kinds on them, an export, and tasks.

    `a` and `b` are runs with a LoRA for each role, `b` on the other base with another tool format. `shared_a` and
    `shared_b` have one policy for both roles. `whole` has full weights, on the base of `a`. `asks` leaves the second
    role to a provider.
    """
    folder = tmp_path_factory.mktemp("team")
    one, two = build_base(folder / "one"), build_base(folder / "two", seed=1)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    make_run(folder / "a", one, seed=1, tasks=str(tasks))
    make_run(folder / "b", two, seed=2, tool_format="hermes")
    roles = ("first", "second")
    make_run(folder / "shared_a", one, policies_for("shared", roles, LORA), seed=3)
    make_run(folder / "shared_b", one, policies_for("shared", roles, LORA), seed=4, tool_format="mistral")
    make_run(folder / "whole", one, policies_for("full", roles, LORA), seed=5)
    specs = {
        "first": PolicySpec(name="first", lora=LORA),
        "second": PolicySpec(name="second", kind="provider"),
    }
    make_run(folder / "asks", one, Policies(specs, {"first": "first", "second": "second"}), seed=6)
    cotune.export(folder / "shared_a", folder / "exported", say=lambda text: None)
    return folder


def play(here: Path, source: Any, mode: str = "trained", **options: Any) -> tuple[EvaluationReport, Mapping[str, Any]]:
    """The report of one mode, and the answers by task and role."""
    number = len(list(here.glob("out-*")))
    out = here / f"out-{number}"
    report = cotune.evaluate(source, SOLVE, TASKS, modes=(mode,), threads=1, out=out, **options)
    with SqliteStore.open(out, read_only=True) as store:
        answers = {
            (episode.task.id, call.role): call.candidates[0].text
            for episode in store.episodes(EpisodeFilters(phase=f"eval-{mode}"))
            for call in store.calls(episode.id)
        }
    return report, answers


def of_role(answers: Mapping[Any, str], role: str) -> dict[str, str]:
    return {task: text for (task, who), text in answers.items() if who == role}


def test_each_role_answers_as_it_does_in_its_own_run(here: Path) -> None:
    """Runs on different bases with different tool formats: no answer changes when they play together."""
    _, alone_a = play(here, here / "a")
    _, alone_b = play(here, here / "b")
    report, together = play(here, {"first": here / "a", "second": here / "b"})
    assert of_role(together, "first") == of_role(alone_a, "first")
    assert of_role(together, "second") == of_role(alone_b, "second")
    assert of_role(alone_a, "second") != of_role(alone_b, "second")
    roles = report.evaluations["trained"].roles
    assert (roles["first"].policies, roles["second"].policies) == (("first@1",), ("second@1",))
    assert any("Rewards are the plain sum" in note for note in report.notes)


def test_policies_of_one_name_and_one_base_are_kept_apart(here: Path) -> None:
    """Two runs with a policy `shared` on one base, one with another tool format."""
    _, alone_a = play(here, here / "shared_a")
    _, alone_b = play(here, here / "shared_b")
    report, together = play(here, {"first": here / "shared_a", "second": here / "shared_b"})
    assert of_role(together, "first") == of_role(alone_a, "first")
    assert of_role(together, "second") == of_role(alone_b, "second")
    roles = report.evaluations["trained"].roles
    assert (roles["first"].policies, roles["second"].policies) == (("shared-shared_a@1",), ("shared-shared_b@1",))

    team = open_team(read_sources({"first": here / "shared_a", "second": here / "shared_b"}, "use")).policies

    async def formats() -> list[str]:
        async with team.responder(threads=1) as responder:
            return [responder.chat_of(role).tool_format.name for role in ("first", "second")]  # type: ignore[attr-defined]

    assert asyncio.run(formats()) == ["hermes", "mistral"]


def test_full_weights_play_beside_an_adapter_and_an_untrained_model(here: Path) -> None:
    _, whole = play(here, here / "whole")
    _, alone = play(here, here / "a")
    _, together = play(here, {"first": here / "whole", REST: here / "a"})
    assert of_role(together, "first") == of_role(whole, "first")
    assert of_role(together, "second") == of_role(alone, "second")
    _, base = play(here, here / "b", "base")
    report, mixed = play(here, {"first": here / "whole", "second": here / "two"})
    assert of_role(mixed, "second") == of_role(base, "second"), "the model that b was trained from, untrained"
    assert report.evaluations["trained"].roles["second"].policies == ("two@0",)


def test_a_checkpoint_and_an_export_can_be_named(here: Path) -> None:
    _, alone = play(here, here / "shared_a")
    _, together = play(here, {"first": f"{here / 'a'}#1", "second": here / "exported"})
    assert of_role(together, "second") == of_role(alone, "second")
    with pytest.raises(ConfigError, match=r"step = 2 .*is no checkpoint of .*These are kept: 1"):
        open_team(read_sources({"first": f"{here / 'a'}#2"}, "use"))


def test_the_exported_team_answers_as_the_evaluated_one(here: Path, tmp_path: Path) -> None:
    """The adapters of two runs on two bases, with full weights of a third."""
    command = ["export", "--use", f"first={here / 'shared_b'}", "--use", f"second={here / 'b'}"]
    assert main([*command, "--use", str(here / "one"), "--out", str(tmp_path / "team")]) == 0
    manifest = read_manifest(tmp_path / "team")
    bases = {entry.role: manifest.policy(entry.role).base for entry in manifest.roles}
    assert {role: (Path(base.model).name, base.tool_format) for role, base in bases.items() if base} == {
        "first": ("one", "mistral"),
        "second": ("two", "hermes"),
    }
    assert manifest.other_roles == "frozen" and Path(manifest.other_base.model).name == "one"  # type: ignore[union-attr]
    _, evaluated = play(here, {"first": here / "shared_b", "second": here / "b"}, temperature=0.0)

    async def deployed() -> dict[tuple[str, str], str]:
        said = {}
        async with cotune.deployed(tmp_path / "team", temperature=0.0) as deployment:
            for task in TASKS:
                said[task["id"], "first"] = await ask("first", f"say {task['letter']}")
                said[task["id"], "second"] = await ask("second", f"now {task['letter']}")
            await ask("critic", "well")
        assert dict(deployment.unlisted) == {"critic": 1} and not deployment.passed_through
        return said

    assert asyncio.run(deployed()) == evaluated
    _, from_export = play(here, tmp_path / "team", temperature=0.0)
    assert from_export == evaluated


def test_what_is_of_one_run_is_refused_for_a_team(here: Path, tmp_path: Path) -> None:
    for more in ({"step": 1}, {"evaluation": here}):
        with pytest.raises(ConfigError, match="cannot be used for a team"):
            cotune.export({"first": here / "a"}, tmp_path / "team", **more)
    assert not (tmp_path / "team").exists()


def test_a_provider_role_stays_with_the_provider(here: Path) -> None:
    team = open_team(read_sources({"first": here / "a", "second": here / "asks"}, "use")).policies
    assert team.provider_roles == ["second"] and list(team.roles) == ["first"]


def test_roles_that_nobody_names(here: Path) -> None:
    """As the runs were configured if they agree; else the provider, and the report says so."""
    report = cotune.evaluate({"first": here / "a"}, JUDGED, TASKS[:2], modes=("trained",), threads=1)
    assert report.evaluations["trained"].roles["judge"].policies == ("base@0",)
    team = open_team(read_sources({"first": here / "a", "second": here / "b"}, "use"))
    assert team.policies.other_roles == "provider"
    assert re.search("left to the application's own provider.*a has .*one, .*b has .*two.*--use MODEL", team.note)
    decided = open_team(read_sources({"first": here / "a", "second": here / "b", REST: here / "two"}, "use"))
    assert (decided.policies.other_roles, decided.policies.model, decided.note) == ("frozen", str(here / "two"), "")


def test_tasks_of_training_are_told(here: Path) -> None:
    report = cotune.evaluate({"first": here / "a"}, SOLVE, TASKS[:2], modes=("base",), threads=1)
    assert "a: 2 of 2 held-out tasks are trained on too: success on them says little." in report.notes


def test_two_policies_for_one_role_are_refused_with_both(here: Path) -> None:
    assert split_assignments(["first=a", "b"], "--use") == {"first": "a", REST: "b"}
    with pytest.raises(ConfigError, match="--use = \"role 'first'\" has two policies: a and b"):
        split_assignments(["first=a", "first=b"], "--use")
    with pytest.raises(ConfigError, match="--use = 'all other roles' has two policies: a and b"):
        split_assignments(["a", "b"], "--use")
    with pytest.raises(ConfigError, match="must be ROLE=SOURCE"):
        split_assignments(["first="], "--use")


def test_a_role_of_another_run_is_refused_with_the_roles_there_are(here: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"judge=.*/a' has no policy of role 'judge'; it has policies of: first, second"
    ):
        open_team(read_sources({"judge": here / "a"}, "use"))


def test_adapters_without_their_base_are_refused(here: Path, tmp_path: Path) -> None:
    adapter = next(path.parent for path in (here / "exported").glob("*/adapter_config.json"))
    with pytest.raises(ConfigError, match=r"is an adapter on .*one without that base.*Name the export, .*exported"):
        read_source(adapter, "--use")
    lonely = shutil.copytree(adapter, tmp_path / "lonely")
    with pytest.raises(ConfigError, match="Name the run or the export that it comes from"):
        read_source(lonely, "--use")
    base = build_base(tmp_path / "gone")
    run = make_run(tmp_path / "run", base)
    cotune.export(run, tmp_path / "export", say=lambda text: None)
    base.rename(tmp_path / "moved")
    for source in (run, tmp_path / "export"):
        with pytest.raises((AdapterError, ConfigError)) as caught:
            open_team(read_sources({"first": source, "second": here / "b"}, "use"))
        assert str(source) in str(caught.value) and "gone" in str(caught.value) and "--model" in str(caught.value)
    assert open_team(read_sources({"first": run}, "use"), {"gone": tmp_path / "moved"}).policies.trained == ["first"]


def test_another_form_of_source_is_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"names a checkpoint, but .*exported is not a run"):
        read_source(f"{here / 'exported'}#3", "--use")
    with pytest.raises(ConfigError, match=r"does not name a checkpoint: 'last'.*Write RUN#40 or RUN#best"):
        read_source(f"{here / 'a'}#last", "--use")
    with pytest.raises(ConfigError, match=r"is not a run \(RUN or RUN#STEP\), an export, .*there is no such folder"):
        read_source(here / "nothing", "--use")


def test_the_command_says_what_the_team_is(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", f"{ME}:SOLVE", "--tasks", str(here / "tasks.jsonl"), "--use", f"first={here / 'shared_a'}"]
    command += ["--use", f"second={here / 'shared_b'}"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "trained first shared-shared_a@1" in said and "swapped first shared-shared_b@1" in said
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert [(c["label"], c["against"]) for c in written["comparisons"]] == [("trained", "base"), ("swapped", "trained")]
    assert main([*command, "--run", str(here / "a")]) == 1
    assert "--run cannot be combined with --use" in capsys.readouterr().err
    export = ["export", str(here / "a"), "--use", f"first={here / 'b'}", "--out", str(tmp_path / "none")]
    assert main(export) == 1 and "cannot be combined with --use" in capsys.readouterr().err
