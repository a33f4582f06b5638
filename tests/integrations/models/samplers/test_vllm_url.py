"""Runs that sample from a vLLM server that runs already, or learn from its model."""

from __future__ import annotations

import functools
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

from cotune.adapters.export import TrainedPolicy, write_export
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError
from cotune.integrations.models.folder.folder import tokenizer_of
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.integrations.models.vllm.teacher import VllmTeacher
from cotune.trainer.config.load import convert
from cotune.trainer.learner.teacher import LocalTeacher
from cotune.trainer.train import train
from tests.adapters.test_gguf import LORA, adapter, greedy
from tests.integrations import tiny_models
from tests.integrations.models.samplers.vllm_server import vllm_server
from tests.trainer import worker_app
from tests.trainer.learner.forced import ForcedSettings
from tests.trainer.methods.test_distill import sharpened
from tests.trainer.tiny_app import TASKS, application, build_base, converse

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("nowhere")]


def test_a_server_loads_an_exported_adapter_and_says_what_peft_says(
    contract_model: Path, vllm_url: str, tmp_path: Path
) -> None:
    weights, lora = adapter(contract_model), msgspec.structs.replace(LORA, alpha=64.0)
    policy = TrainedPolicy(
        name="planner",
        kind="lora",
        version=1,
        roles=("planner",),
        model=str(contract_model),
        weights=weights,
        lora=lora,
    )
    write_export(tmp_path / "out", [policy])
    folder = tmp_path / "out" / "planner"
    asked = {"lora_name": "planner", "lora_path": str(folder)}
    httpx.post(f"{vllm_url}/v1/load_lora_adapter", json=asked, timeout=120).raise_for_status()
    prompt = [5, 6, 7, 8]
    plain = AutoModelForCausalLM.from_pretrained(contract_model)
    expected = greedy(PeftModel.from_pretrained(plain, folder), prompt)[:8]
    sent = {"model": "planner", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{vllm_url}/v1/completions", json={**sent, "return_token_ids": True}, timeout=120).json()
    httpx.post(f"{vllm_url}/v1/unload_lora_adapter", json={"lora_name": "planner"}, timeout=120).raise_for_status()
    assert reply["choices"][0]["token_ids"] == expected
    assert greedy(AutoModelForCausalLM.from_pretrained(contract_model), prompt)[:8] != expected


def run(base: Path, url: str, folder: Path, address: str = "local", **settings: Any) -> list[dict[str, Any]]:
    learner = {"lr": 3e-3}
    given = {
        "model": str(base),
        "steps": 2,
        "tasks_per_step": 3,
        "plan": {"k": 8},
        "rewards": {"team_weight": 0.0},
        **settings,
    }
    given |= {"engine": url, "cluster": {"address": address}, "learner": learner}
    train(worker_app.parity, TASKS, given, out=folder, console=Console(file=io.StringIO()))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_server_scores_as_the_teacher_in_this_process(contract_model: Path, vllm_url: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(str(contract_model))
    draw = random.Random(0)
    rows = [
        TrainRow(
            id=f"{n}.0",
            role="a",
            prompt_ids=tuple(draw.randrange(30) for _ in range(draw.randrange(1, 40))),
            response_ids=tuple(draw.randrange(30) for _ in range(draw.randrange(1, 20))),
            logprobs=(),
            advantage=0.0,
        )
        for n in range(40)
    ]
    rows.append(msgspec.structs.replace(rows[0], response_ids=(5,) * 600))  # longer than its context
    served = VllmTeacher(vllm_url, tokenizer)
    found = served.logprobs(rows)
    served.close()
    assert found.pop() is None and served.counters["unscored"] == 1
    # A server scores over all logits, also those of a padded vocabulary: as the model without its tokenizer.
    bare = shutil.copytree(contract_model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    here = LocalTeacher(str(bare), ForcedSettings(device="cpu")).logprobs(rows[:-1])
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(here), atol=1e-4)
    other = build_base(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"reads the tokens 0 to .* differently"):
        VllmTeacher(vllm_url, tokenizer_of(str(other)))


@pytest.mark.long  # the test above scores by this server, `test_distill.py` comes nearer to a teacher in the process
def test_a_run_comes_nearer_to_a_teacher_by_its_address(
    contract_model: Path, vllm_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = functools.partial(TransformersSampler.open, host="thread", device="cpu")
    monkeypatch.setattr(TransformersSampler, "open", opened)
    tiny_models.build("qwen3", tmp_path / "student", seed=5)
    student = sharpened(tmp_path / "student")
    given = {"model": str(student), "steps": 8, "tasks_per_step": 3, "plan": {"k": 8}, "policies": "full"}
    given |= {
        "recipe": "distill",
        "distill": {"teacher": f"{vllm_url}/v1"},
        "learner": {"lr": 3e-4},
    }
    train(application(converse), TASKS, given, out=tmp_path / "run", console=Console(file=io.StringIO()))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    gaps = [sum(line["roles"][role]["kl"] for role in ("first", "second")) for line in lines]
    assert gaps[-1] < 0.9 * gaps[0]
    for line in lines:
        assert line["counters"]["teacher.requests"] == line["rows"] == 48
        assert line["policies"]["first"]["unscored"] == 0.0


def test_a_run_trains_adapters_on_a_server_and_leaves_it_as_it_was(
    ray_runtime: str, contract_model: Path, vllm_url: str, tmp_path: Path
) -> None:
    before = served(vllm_url)
    lines = run(contract_model, vllm_url, tmp_path / "run", policies="lora", lora={"rank": 4})
    assert len(lines) == 2
    assert all(line["updated"] and not line["failed"] and set(line["staleness"]) == {"0"} for line in lines)
    assert served(vllm_url) == before
    with pytest.raises(ConfigError, match=r"rank 16 .*Start it with .* --max-lora-rank of at least 16"):
        run(contract_model, vllm_url, tmp_path / "wide", policies="lora", lora={"rank": 16})


@pytest.mark.long
def test_each_base_of_a_team_is_sampled_by_the_server_that_has_it(
    contract_model: Path, vllm_url: str, tmp_path: Path
) -> None:
    own = build_base(tmp_path / "own")
    policy = [{"name": "one", "roles": ["first"]}, {"name": "two", "roles": ["second"], "model": str(contract_model)}]
    policy = [{**one, "lora": {"rank": 4}} for one in policy]
    with vllm_server(own, tmp_path / "log") as other:
        lines = run(own, f"{vllm_url},{other}", tmp_path / "run", "none", policy=policy)
        assert served(other) == [str(own)]
    assert len(lines) == 2 and all(line["updated"] and not line["failed"] for line in lines)
    for line in lines:
        assert line["policies"].keys() == {"one", "two"}
        assert all(found["sampler_gap_max"] < 1e-4 for found in line["policies"].values())


def served(url: str) -> list[str]:
    """Its model, and the adapters on it."""
    return [card["id"] for card in httpx.get(f"{url}/v1/models", timeout=120).json()["data"]]


def test_full_weights_are_refused(ray_runtime: str, contract_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policies = 'full' .* it takes adapters only"):
        run(contract_model, "http://127.0.0.1:9", tmp_path / "full", policies="full")


SERVER = {"engine": "http://10.0.0.5:8000"}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"engine": "vllm-url"}, "engine"),
        ({"engine": "10.0.0.5:8000"}, "engine"),
        ({"engine": "http://10.0.0.5:8000, 10.0.0.6:8000"}, "engine"),
        ({"engine": "vllm", "engine_url": "http://10.0.0.5:8000"}, "engine_url"),
        ({"engine": "http://10.0.0.5:8000", "cluster": {"engines": 2}}, "cluster.engines"),
        (
            {"engine": "http://10.0.0.5:8000", "cluster": {"gpus_per_engine": 1}},
            "cluster.gpus_per_engine",
        ),
    ],
)
def test_settings_that_contradict_a_server_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} = "):
        convert({"model": "m", **settings})
