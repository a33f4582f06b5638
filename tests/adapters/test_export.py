"""What an export holds, and that PEFT and transformers load it as the weights that were trained."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cotune.adapters.export import TrainedPolicy, export_run, write_export
from cotune.adapters.fingerprint import base_fingerprint, write_hashes
from cotune.adapters.load import load_export
from cotune.adapters.manifest import read_manifest
from cotune.adapters.open_policies import open_local
from cotune.cli.main import main
from cotune.errors import ConfigError, RunError
from cotune.integrations.models import bfloat16
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import Weights, fingerprint
from cotune.storage.run_layout import read_run
from cotune.trainer.evaluation.policies import open_evaluated_policies

PROMPT = torch.tensor([[5, 6, 7, 8]])


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(PROMPT).logits.numpy()


def reference(base: Path, lora: LoraSpec, weights: Weights) -> np.ndarray:
    """Logits of the base with W + (alpha / rank) B A written into its matrices."""
    model = AutoModelForCausalLM.from_pretrained(base)
    modules = dict(model.named_modules())
    for name, down in weights.items():
        if name.endswith("lora_A.weight"):
            up = weights[name.replace("lora_A", "lora_B")]
            module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            module.weight.data += torch.from_numpy(lora.scale * (up @ down))
    return logits(model)


def test_peft_loads_each_role_with_the_trained_logits(
    base: Path, lora: LoraSpec, export: Path, policies: list[TrainedPolicy]
) -> None:
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    for policy in policies:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), export / policy.name)
        trained = logits(model)
        np.testing.assert_allclose(trained, reference(base, lora, policy.weights), atol=1e-4)
        assert np.abs(trained - plain).max() > 0.1


def test_peft_finds_every_tensor_of_the_export(base: Path, export: Path, policies: list[TrainedPolicy]) -> None:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), export / "planner")
    tensors = {name: torch.from_numpy(array) for name, array in policies[0].weights.items()}
    result = set_peft_model_state_dict(model, tensors)
    assert result.unexpected_keys == []
    assert [name for name in result.missing_keys if "lora" in name] == []


def test_manifest_names_roles_base_version_hash_metrics_and_commands(
    base: Path, export: Path, policies: list[TrainedPolicy]
) -> None:
    manifest = json.loads((export / "roles.json").read_text())
    assert manifest["format"] == 1
    assert manifest["run"] == "r1"
    assert manifest["roles"] == [
        {"role": "planner", "policy": "planner", "metrics": {"reward": 0.5}},
        {"role": "writer", "policy": "writer", "metrics": {"reward": 0.5}},
    ]
    planner = manifest["policies"][0]
    assert (planner["version"], planner["kind"], planner["folder"]) == (3, "lora", "planner")
    assert planner["base"]["model"] == str(base)
    assert planner["fingerprint"] == fingerprint(policies[0].weights)
    assert list(planner["files"]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert manifest["serve"]["vllm"] == [
        f"vllm serve {base} --enable-lora --max-loras 2 --max-lora-rank 8 "
        "--lora-modules planner=./planner writer=./writer"
    ]
    assert "| planner | planner | 3 | lora | planner |" in (export / "README.md").read_text()


def test_roles_of_a_shared_policy_point_to_one_folder(
    tmp_path: Path, base: Path, lora: LoraSpec, adapter: Callable[[int], Weights]
) -> None:
    shared = TrainedPolicy(
        name="shared", kind="lora", version=1, roles=("a", "b"), model=str(base), weights=adapter(0), lora=lora
    )
    manifest = write_export(tmp_path / "out", [shared])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "roles.json", "shared"]
    assert manifest.serve["vllm"][0].endswith("--lora-modules a=./shared b=./shared")


def test_full_policy_becomes_a_model_folder(tmp_path: Path, base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    weights = {name: tensor.detach().numpy() + np.float32(0.01) for name, tensor in model.named_parameters()}
    full = TrainedPolicy(name="solo", kind="full", version=2, roles=("solo",), model=str(base), weights=weights)
    write_export(tmp_path / "out", [full])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "solo")
    assert fingerprint({n: t.detach().numpy() for n, t in loaded.named_parameters()}) == fingerprint(weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "solo").chat_template
    export = load_export(tmp_path / "out")
    assert [engine.folder for engine in export.engines] == [tmp_path / "out" / "solo"]
    assert fingerprint(export.weights(export.manifest.policies[0])) == fingerprint(weights)


def test_merged_policies_are_whole_models_with_the_trained_logits(
    tmp_path: Path, base: Path, lora: LoraSpec, policies: list[TrainedPolicy]
) -> None:
    manifest = write_export(tmp_path / "out", policies, merge=True)
    assert [(policy.kind, policy.lora) for policy in manifest.policies] == [("full", None)] * len(policies)
    for policy in policies:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / policy.name)
        np.testing.assert_allclose(logits(model), reference(base, lora, policy.weights), atol=1e-5)
    export = load_export(tmp_path / "out")
    assert fingerprint(export.weights(manifest.policies[0])) == manifest.policies[0].fingerprint


def test_an_adapter_of_another_model_is_not_merged(
    tmp_path: Path, base: Path, lora: LoraSpec, policies: list[TrainedPolicy]
) -> None:
    names = {name.replace("layers.0", "layers.77"): array for name, array in policies[0].weights.items()}
    odd = dataclasses.replace(policies[0], weights=names)
    with pytest.raises(ConfigError, match=r"layers\.77.*of an adapter of"):
        write_export(tmp_path / "out", [odd], merge=True)
    assert list(tmp_path.iterdir()) == []


def test_full_weights_of_another_model_are_refused(tmp_path: Path, base: Path) -> None:
    odd = TrainedPolicy(
        name="solo", kind="full", version=2, roles=("solo",), model=str(base), weights={"x": np.zeros(2, np.float32)}
    )
    with pytest.raises(ConfigError, match="is missing in the weights or in"):
        write_export(tmp_path / "out", [odd])
    assert list(tmp_path.iterdir()) == []


def test_untrained_and_outside_policies_have_no_folder(
    tmp_path: Path, base: Path, policies: list[TrainedPolicy]
) -> None:
    frozen = TrainedPolicy(name="fixed", kind="frozen", version=0, roles=("critic",), model=str(base))
    outside = TrainedPolicy(name="gpt", kind="provider", version=0, roles=("judge",), model=None)
    manifest = write_export(tmp_path / "out", [policies[0], frozen, outside])
    assert [policy.folder for policy in manifest.policies] == ["planner", None, None]
    assert sorted(load_export(tmp_path / "out").roles) == ["critic", "planner"]


def test_names_that_are_no_file_names_get_folders_of_their_own(
    tmp_path: Path, base: Path, policies: list[TrainedPolicy]
) -> None:
    awkward = [
        TrainedPolicy(**{**vars(policies[i]), "name": name, "roles": (name,)})
        for i, name in enumerate(("team/lead", "team:lead"))
    ]
    manifest = write_export(tmp_path / "out", awkward)
    assert [policy.folder for policy in manifest.policies] == ["team_lead", "team_lead-2"]
    assert sorted(load_export(tmp_path / "out").roles) == ["team/lead", "team:lead"]


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path, policies: list[TrainedPolicy]) -> None:
    target = tmp_path / "out"
    write_export(target, policies)
    write_export(target, policies[:1])
    assert [entry.role for entry in read_manifest(target).roles] == ["planner"]
    assert not (target / "writer").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="mine"):
        write_export(tmp_path / "mine", policies)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def write_run(run: Path, base: Path, lora: LoraSpec, weights: Weights) -> None:
    step = run / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"id": "r", "model": str(base)}))
    (run / "checkpoints" / "latest").write_text("step-000002\n")
    save_file(dict(weights), step / "planner.safetensors")
    saved = {
        "name": "planner",
        "kind": "lora",
        "version": 2,
        "roles": ["planner"],
        "lora": msgspec.to_builtins(lora),
        "metrics": {"planner": {"reward": 0.25}},
        "weights_file": "planner.safetensors",
    }
    (step / "policies.json").write_text(json.dumps([saved]))
    (step / "checkpoint.json").write_text(json.dumps({"steps": 2, "run": "r"}))
    write_hashes(step)


def test_a_run_is_exported_from_its_newest_checkpoint(
    tmp_path: Path, base: Path, lora: LoraSpec, adapter: Callable[[int], Weights]
) -> None:
    write_run(tmp_path / "run", base, lora, adapter(5))
    manifest = export_run(tmp_path / "run", tmp_path / "out")
    assert manifest.run == "run"
    assert manifest.policies[0].version == 2
    assert manifest.policies[0].fingerprint == fingerprint(adapter(5))
    assert manifest.roles[0].metrics == {"reward": 0.25}
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "merged"), "--merge"]) == 0
    assert read_manifest(tmp_path / "merged").policies[0].kind == "full"


@pytest.mark.parametrize("able", [True, False], ids=["multiplied-here", "not-here"])
@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"config": {"learner": {"dtype": "bfloat16"}}}, "bfloat16"),
        ({"config": {"learner": {"dtype": "auto"}}, "precision": {"dtype": "bfloat16", "gap": 0.01}}, "bfloat16"),
        ({"config": {"learner": {"dtype": "auto"}}, "precision": {"dtype": "float32", "fell_back": True}}, "float32"),
        ({}, None),
    ],
    ids=["asked", "auto", "fell-back", "unknown"],
)
def test_adapters_answer_in_the_precision_of_their_training(
    tmp_path: Path,
    base: Path,
    lora: LoraSpec,
    adapter: Callable[[int], Weights],
    monkeypatch: pytest.MonkeyPatch,
    described: dict[str, Any],
    expected: str | None,
    able: bool,
) -> None:
    run, opened = tmp_path / "run", list[str | None]()
    write_run(run, base, lora, adapter(5))
    (run / "run.json").write_text(json.dumps({"id": "r", "model": str(base), **described}))
    manifest = export_run(run, tmp_path / "out")
    assert [one.dtype for one in manifest.bases] == [expected]
    assert [one.dtype for one in export_run(run, tmp_path / "merged", merge=True).bases] == [None]
    assert read_run(run).dtype_of({"lora", "frozen"}) == expected
    assert read_run(run).dtype_of({"lora", "full"}) is None  # which are sampled in float32

    async def refused(model: str, **options: Any) -> None:
        opened.append(options["dtype"])
        raise RuntimeError("far enough")

    async def answers(source: Path) -> None:
        async with open_evaluated_policies(source).responder():
            pass

    monkeypatch.setattr(bfloat16, "has_bfloat16", lambda: able)
    monkeypatch.setattr(TransformersSampler, "open", refused)
    for started in (open_local(tmp_path / "out"), answers(tmp_path / "out"), answers(run), open_local(base)):
        with pytest.raises(RuntimeError, match="far enough"):
            asyncio.run(started)
    rounded = "bfloat16" if expected == "bfloat16" and able else None
    assert opened == [rounded] * 3 + [None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_broken_off_leaves_nothing(
    tmp_path: Path,
    base: Path,
    lora: LoraSpec,
    adapter: Callable[[int], Weights],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    write_run(tmp_path / "run", base, lora, adapter(5))
    monkeypatch.setattr("cotune.adapters.export._sync", lambda *paths: signal.raise_signal(number))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "to" / "out")]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not [*(tmp_path / "to").iterdir()]


def test_a_full_disk_is_named_and_leaves_no_part_of_an_export(
    tmp_path: Path, base: Path, lora: LoraSpec, adapter: Callable[[int], Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, *rest: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_run(tmp_path / "run", base, lora, adapter(5))
    monkeypatch.setattr("cotune.adapters.export.write_card", full)
    with pytest.raises(RunError, match=r"The disk of .*out is full: nothing is exported\. Free some space"):
        export_run(tmp_path / "run", tmp_path / "to" / "out")
    assert not [*(tmp_path / "to").iterdir()]


def test_a_base_that_has_moved_is_named_and_must_be_the_same(
    tmp_path: Path, base: Path, lora: LoraSpec, adapter: Callable[[int], Weights], capsys: pytest.CaptureFixture[str]
) -> None:
    run, moved = tmp_path / "run", tmp_path / "elsewhere" / "copy"
    write_run(run, base, lora, adapter(5))
    held = {"base": msgspec.to_builtins(base_fingerprint(base))}
    (run / "run.json").write_text(json.dumps({"id": "r", "model": str(tmp_path / "gone"), "held": held}))
    shutil.copytree(base, moved)
    command = ["export", str(run), "--out", str(tmp_path / "out")]
    assert main(command) == 1 and "gone" in capsys.readouterr().err
    assert main([*command, "--model", str(moved)]) == 0
    policy = read_manifest(tmp_path / "out").policies[0]
    assert policy.base is not None and policy.base.model == str(moved)
    (moved / "tokenizer.json").write_text("{}")
    capsys.readouterr()
    assert main([*command, "--model", str(moved)]) == 1
    assert "is not the base model that the run was started with: its tokenizer differ" in capsys.readouterr().err


def test_the_command_says_how_far_the_run_is_and_which_roles_got_no_folder(
    tmp_path: Path, base: Path, lora: LoraSpec, adapter: Callable[[int], Weights], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write_run(run, base, lora, adapter(5))
    step = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    judge = {"name": "judge", "kind": "frozen", "version": 0, "roles": ["judge"], "model": str(base)}
    saved = json.loads((step / "policies.json").read_text())
    (step / "policies.json").write_text(json.dumps([*saved, judge]))
    write_hashes(step)
    (run / "run.json").write_text(json.dumps({"id": "r", "model": str(base), "config": {"steps": 100}}))
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"exported planner to {tmp_path / 'out'}"
    assert said[1] == f"the run is not finished: this is step {int(step.name.split('-')[1])} of 100"
    assert said[2] == "no folder for judge: its policy is frozen, the base model answers"


def test_a_folder_without_a_run_or_a_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run\.json"):
        export_run(tmp_path / "none", tmp_path / "out")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunError, match="no checkpoint yet"):
        export_run(tmp_path / "run", tmp_path / "out")
