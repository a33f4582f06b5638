"""A team of two base models, from the check of the application to the same application on its trained policies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoConfig, AutoTokenizer

import cotune
from cotune.adapters.manifest import read_manifest
from cotune.adapters.serving import serving
from cotune.cli.main import main
from cotune.storage.open_store import open_store
from examples.two_bases import base
from examples.word_problems.app import graph
from examples.word_problems.tasks import make_tasks

ROOT = Path(base.__file__).parents[2]
APP = f"{ROOT}/examples/word_problems/train.py:solve"
SMALL = ["tasks_per_step=2", "plan.k=2", "concurrency=4", "sampling.max_tokens=8", "learner.mini_batch=8"]
ROLES = ("planner", "checker")
ASKED = [{"role": "user", "content": "7 - 12"}]


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small base, where the example's configuration has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    base.build(Path("runs/two_bases/checker"), steps=30, count=64)
    return tmp_path / "runs" / "two_bases" / "checker"


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_team_of_two_bases_from_check_to_the_application(
    in_thread: None, smollm2: Path, checker: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in make_tasks(4)))
    tasks = ["--tasks", "tasks.jsonl"]
    run = [APP, *tasks, "--config", f"{ROOT}/examples/two_bases/train.toml", "--model", str(smollm2)]
    small = [part for setting in SMALL for part in ("--set", setting)]

    assert main(["check", *run]) == 0
    assert main(["train", *run, "--steps", "1", "--out", "run", *small]) == 0
    assert main(["train", "--resume", "run", "--steps", "2"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert all(found["sampler_gap_max"] < 1e-3 for found in line["policies"].values())
    # Each role's prompts are tokens of its own base.
    with open_store(Path("run/records.db"), read_only=True) as store:
        calls = [call for episode in store.episodes() for call in store.calls(episode.id)]
        seen = {role: {t for c in calls if c.role == role for t in store.token_ids(c.prompt)} for role in ROLES}
    vocabulary = len(base.tokenizer())
    assert max(seen["checker"]) < vocabulary < max(seen["planner"])

    assert main(["eval", APP, *tasks, "--run", "run", "--modes", "base,trained"]) == 0
    assert main(["export", "run", "--out", "export"]) == 0
    manifest = read_manifest(Path("export"))
    assert [Path(base.model) for base in manifest.bases] == [smollm2, checker]
    assert {policy.name: policy.kind for policy in manifest.policies} == {"planner": "lora", "checker": "full"}

    assert main(["export", "run", "--out", "gguf", "--gguf", "f16"]) == 0
    for role, origin in zip(ROLES, (smollm2, checker), strict=True):
        written = AutoConfig.from_pretrained(f"gguf/{role}", gguf_file=f"{role}.gguf")
        assert written.vocab_size == AutoConfig.from_pretrained(origin).vocab_size
    reads, own = AutoTokenizer.from_pretrained("gguf/checker", gguf_file="checker.gguf"), base.tokenizer()
    assert reads("What is 7 - 12?")["input_ids"] == own("What is 7 - 12?")["input_ids"]
    assert reads.chat_template == own.chat_template

    said: dict[str, Any] = {}
    with serving("export") as endpoint:
        for role in ROLES:
            body = {"model": role, "messages": ASKED, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
            said[role] = httpx.post(f"{endpoint.url}/chat/completions", json=body, timeout=120).json()["choices"][0]
        listed = httpx.get(f"{endpoint.url}/models").json()["data"]
    assert {model["id"]: model["root"] for model in listed} == {"planner": str(smollm2), "checker": str(checker)}
    assert max(said["checker"]["token_ids"]) < vocabulary

    async def ask() -> dict[str, Any]:
        async with cotune.deployed("export") as deployment:
            state = await graph.ainvoke({"question": "What is 7 - 12?"})
        assert deployment.calls["planner", "ok"] == deployment.calls["checker", "ok"] == state["attempts"]
        assert not deployment.passed_through
        return dict(state)

    assert {"sum", "value"} <= asyncio.run(ask()).keys()
