"""The README of an export: front matter for the Hub, the run's figures, and settings that its reader can paste."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from huggingface_hub import ModelCard

from cotune.adapters.export import TrainedPolicy, export_run, write_export
from cotune.adapters.fingerprint import write_hashes
from cotune.adapters.serving import serving
from cotune.cli.main import main
from cotune.episodes.run_sync import run_sync
from cotune.errors import ConfigError
from cotune.records.policies import LoraSpec
from cotune.storage.run_layout import RunLayout
from tests.adapters.test_export import write_run
from tests.adapters.test_gguf import build, full
from tests.integrations.seeing_models import build_seeing


def line(step: int, success: float, reward: float) -> dict[str, Any]:
    counts: dict[str, Any] = {"calls": 8, "candidates": 32, "groups": 8, "episodes": 4, "left_out": {}}
    roles = {"planner": {"reward": reward}}
    counts["path"] = "best of 4 by scorer"
    return {"step": step, "outcome": {"success": success}, "roles": roles, "seconds": {"rollout": 30.0}, **counts}


def interval(mean: float, low: float, high: float) -> dict[str, Any]:
    return {"mean": mean, "low": low, "high": high, "n": 100}


def mode(success: dict[str, Any], cost: float | None) -> dict[str, Any]:
    use = {"prompt_tokens": 1000, "completion_tokens": 200, "cost": cost, "unpriced": 0}
    return {"episodes": 100, "success": success, "reward": None, "use": use}


EVALUATION = {
    "evaluations": {
        "base": mode(interval(0.1, 0.055, 0.174), None),
        "trained": mode(interval(0.64, 0.542, 0.727), 0.05),
    },
    "comparisons": [{"verdict": "trained is better than base"}],
    "steps": 2,
}


@pytest.fixture
def run(tmp_path: Path, base: Path, policies: list[TrainedPolicy]) -> Path:
    folder = tmp_path / "run"
    assert policies[0].lora is not None and policies[0].weights is not None
    write_run(folder, base, policies[0].lora, policies[0].weights)
    (folder / "run.json").write_text(
        json.dumps({"id": "r", "model": str(base), "config": {"steps": 2, "recipe": "at_grpo"}})
    )
    lines = [line(0, 0.25, 0.5), line(1, 0.75, 1.5)]
    RunLayout(folder).metrics.write_text("".join(json.dumps(found) + "\n" for found in lines))
    (folder / "eval").mkdir()
    (folder / "eval" / "evaluation.json").write_text(json.dumps(EVALUATION))
    return folder


def test_the_card_tells_of_the_training_the_evaluation_and_the_bill(tmp_path: Path, run: Path) -> None:
    export_run(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for row in (
        "2 of 2 steps of recipe `at_grpo`, 1.0 minutes.",
        "- held-out success: base 10.0% [5.5%, 17.4%] of 100, trained 64.0% [54.2%, 72.7%] of 100",
        "- reward of planner: 0.5 in step 1, 1.5 in step 2",
        "| Reward | planner | 0.5 | 1.5 | ▁█ |",
        "| base | 10.0% [5.5%, 17.4%] of 100 |  | 100 | 0 |",
        "| trained | 64.0% [54.2%, 72.7%] of 100 |  | 100 | 0 |",
        "- trained is better than base",
        "| evaluation: base |  | 1,000 | 200 |  |",
        "| evaluation: trained |  | 1,000 | 200 | 0.05 (0.5 per 1,000 tasks) |",
    ):
        assert row in card
    assert "best of 4" not in card and "![Reward, by step](curve.svg)" in card
    image = ElementTree.parse(tmp_path / "out" / "curve.svg")
    lines = image.findall("{http://www.w3.org/2000/svg}polyline")
    assert [found.get("points") for found in lines] == ["52.0,178.0 408.0,30.0"]


def test_the_card_has_the_evaluation_of_the_exported_checkpoint(tmp_path: Path, run: Path) -> None:
    """The newest evaluation is of step 2, an earlier one of step 1, and none of step 0."""
    for step in (0, 1):
        earlier = run / "checkpoints" / f"step-{step:06d}"
        shutil.copytree(run / "checkpoints" / "step-000002", earlier)
        (earlier / "checkpoint.json").write_text(json.dumps({"steps": step, "run": "r"}))
        write_hashes(earlier)
    evaluation = {"evaluations": {"trained": mode(interval(0.9, 0.82, 0.95), None)}, "steps": 1}
    (run / "held_out").mkdir()
    (run / "held_out" / "step-000001.json").write_text(json.dumps(evaluation))

    export_run(run, tmp_path / "out", step=1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Checkpoint: `step-000001`." in card
    assert "- held-out success: trained 90.0% [82.0%, 95.0%] of 100" in card and "64.0%" not in card
    assert "- reward of planner: 0.5 in step 1\n" in card, "the figures of training end with the exported step"

    export_run(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Checkpoint: `step-000002`." in card and "64.0%" in card and "90.0%" not in card

    export_run(run, tmp_path / "out", step=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The checkpoint after step 0 was not evaluated. To evaluate it:" in card
    assert "cotune eval app:solve --run PATH/TO/THIS/FOLDER --tasks held_out.jsonl" in card
    assert "held-out success" not in card and "90.0%" not in card and "64.0%" not in card


def test_a_policy_that_was_never_updated_is_named_with_the_reason(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_run(run, tmp_path / "updated")
    assert "no update" not in (tmp_path / "updated" / "README.md").read_text()
    file = run / "checkpoints" / "step-000002" / "policies.json"
    file.write_text(file.read_text().replace('"version": 2', '"version": 0'))
    write_hashes(file.parent)
    lines = [{**found, "stayed": {"planner": "no signal"}} for found in (line(0, 0.0, 0.0), line(1, 0.0, 0.0))]
    RunLayout(run).metrics.write_text("".join(json.dumps(found) + "\n" for found in lines))
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    said = "planner has no update (no signal in 2 of 2 steps): its weights are those that the run started with"
    assert said in capsys.readouterr().out and said in (tmp_path / "out" / "README.md").read_text()
    assert (
        json.loads((tmp_path / "out" / "roles.json").read_text())["policies"][0]["stayed"]
        == "no signal in 2 of 2 steps"
    )
    best = run / "checkpoints" / "step-000000"
    shutil.copytree(file.parent, best)
    (best / "checkpoint.json").write_text(json.dumps({"steps": 0, "run": "r"}))
    write_hashes(best)
    file.write_text(file.read_text().replace('"version": 0', '"version": 2'))
    write_hashes(file.parent)
    (run / "checkpoints" / "best.json").write_text(json.dumps({"planner": {"checkpoint": best.name, "figure": 0.5}}))
    (policy,) = export_run(run, tmp_path / "best", step="best").policies
    assert (policy.version, policy.stayed) == (0, "this checkpoint came before its first update")


def test_an_evaluation_elsewhere_is_named_and_must_be_one(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"evaluations": {"base": mode(interval(0.3, 0.2, 0.4), None)}}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "evaluation.json").write_text(json.dumps(other))
    given = ["--evaluation", str(tmp_path / "elsewhere")]
    assert main(["export", str(run), "--out", str(tmp_path / "out"), *given]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| base | 30.0% [20.0%, 40.0%] of 100 |  | 100 | 0 |" in card and "64.0%" not in card
    assert "| cost |" not in card
    with pytest.raises(ConfigError, match=r"evaluation.*cotune eval --out.*Evaluate the run with --out"):
        export_run(run, tmp_path / "bad", evaluation=tmp_path)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("text", ["{bad", '{"evaluations": {"base": {}}}'])
def test_an_evaluation_that_is_found_broken_is_left_out_with_a_warning(
    tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (run / "eval" / "evaluation.json").write_text(text)
    export_run(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Evaluation" not in card and "## Training" in card
    assert "left out: it cannot be read" in caplog.text and str(run / "eval") in caplog.text
    with pytest.raises(ConfigError, match="evaluation = "):
        export_run(run, tmp_path / "named", evaluation=run / "eval")


def test_the_card_of_a_model_that_sees_says_so_and_names_no_form_that_it_cannot_have(tmp_path: Path) -> None:
    model = tmp_path / "base"
    build_seeing(model)
    weights = {
        f"base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_{part}.weight": np.ones(shape)
        for part, shape in (("A", (4, 64)), ("B", (64, 4)))
    }
    lora = LoraSpec(rank=4, targets=("q_proj",))
    policy = TrainedPolicy(
        name="p", kind="lora", version=1, roles=["seer"], model=str(model), weights=weights, lora=lora
    )
    write_export(tmp_path / "out", [policy])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict()["pipeline_tag"] == "image-text-to-text"
    assert "structured_output=True, vision=True)" in card.content and "--gguf" not in card.content


def test_the_front_matter_is_what_the_hub_reads(tmp_path: Path, base: Path, policies: list[TrainedPolicy]) -> None:
    cards = {}
    forms: dict[str, dict[str, Any]] = {"lora": {}, "merged": {"merge": True}}
    for name, form in forms.items():
        write_export(tmp_path / name, policies, **form)
        cards[name] = ModelCard.load(tmp_path / name / "README.md").data.to_dict()
    whole = full(build(tmp_path / "base", "llama"))
    write_export(tmp_path / "gguf", [whole], gguf="f16")
    write_export(tmp_path / "mixed", [*policies, whole])
    for name in ("gguf", "mixed"):
        cards[name] = ModelCard.load(tmp_path / name / "README.md").data.to_dict()
    usual, task = ["cotune", "reinforcement-learning"], {"pipeline_tag": "text-generation"}
    assert cards == {
        "lora": {"library_name": "peft", "tags": [*usual, "lora"], **task},
        "merged": {"library_name": "transformers", "tags": usual, **task},
        "gguf": {"tags": [*usual, "gguf"], **task},
        "mixed": {"tags": usual, **task},
    }
    text = (tmp_path / "gguf" / "README.md").read_text()
    assert "llama-server -m solo/solo.gguf --jinja --alias solo --port 8001" in text
    assert "ollama create solo -f solo/Modelfile" in text
    assert str(tmp_path) not in text, "a folder of this machine says nothing elsewhere"


def test_a_base_on_the_hub_is_named_for_it(
    tmp_path: Path, base: Path, policies: list[TrainedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotune.adapters.export.locate_model", lambda model: base)
    on_hub = [TrainedPolicy(**{**vars(policy), "model": "acme/tiny"}) for policy in policies]
    write_export(tmp_path / "out", on_hub)
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model == ["acme/tiny"]


def blocks(card: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card.read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_the_settings_for_each_framework_reach_the_server(export: Path, in_thread: None) -> None:
    found: dict[str, Any] = {}
    with serving(export) as endpoint:
        for block in blocks(export / "README.md")[1:]:
            exec(block.replace("http://127.0.0.1:8000/v1", endpoint.url), found)
        assert found["model"].invoke("hello", max_tokens=4, temperature=0).content

        async def asked() -> str:
            from autogen_core.models import UserMessage

            sent = [UserMessage(content="hello", source="user")]
            reply = await found["client"].create(sent, extra_create_args={"max_tokens": 4, "temperature": 0})
            await found["client"].close()
            return str(reply.content)

        assert run_sync(asked())
        found["llm"].max_tokens, found["llm"].temperature = 4, 0
        assert found["llm"].call("hello")


def test_the_first_block_is_the_application_as_it_is(export: Path) -> None:
    assert "with cotune.deployed(" in blocks(export / "README.md")[0]
