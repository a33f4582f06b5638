"""Recipe distill: a teacher scores what the policies sample."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotune.algorithms.catalogue import recipe
from cotune.errors import ConfigError, GroupError, LearnerError
from cotune.integrations.models.folder.folder import tokenizer_of
from cotune.integrations.models.vllm.teacher import VllmTeacher
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.loss import KL_SLOPE
from cotune.trainer.learner.teacher import LocalTeacher
from cotune.trainer.updates import update_policies
from tests.integrations import tiny_models
from tests.integrations.models.samplers.test_vllm_http import FakeServer
from tests.integrations.models.samplers.test_vllm_teacher import scored
from tests.trainer.conftest import Trainer
from tests.trainer.learner.learner_rows import FAST, build_learner_base, change, make_rows, on_policy
from tests.trainer.tiny_app import application, build_base, converse

LOSS = recipe("distill").loss


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The learners' base model with other weights."""
    from transformers import AutoModelForCausalLM

    folder = build_learner_base(tmp_path_factory.mktemp("teacher"))
    network = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    for parameter in network.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    return folder


def sharpened(folder: Path) -> Path:
    """A model that prefers some tokens, as an untrained one hardly does."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in network.parameters():
        parameter.data.mul_(6.0 if parameter.dim() > 1 else 1.0)
    network.save_pretrained(folder)
    return folder


def test_the_loss_is_the_reverse_kl_of_each_sampled_token(base: str, other: str) -> None:
    """The gradient is that of sum of -(log pi_teacher - log pi_old) log pi over tokens, written out."""
    from transformers import AutoModelForCausalLM

    settings = change(FAST, grad_clip=0.0)
    policies = policies_for("full", ["a"], LoraSpec())
    drawn = [change(row, advantage=0.0) for row in make_rows(temperature=0.7)]
    rows = on_policy(LocalLearner.open(base, policies, settings, LOSS), "a", drawn)
    teacher = LocalTeacher(other, settings)
    learner = LocalLearner.open(base, policies, settings, LOSS)
    network, scorer = (AutoModelForCausalLM.from_pretrained(name) for name in (base, other))
    total, count, gaps = torch.zeros(()), 0, []
    for row, scores in zip(rows, teacher.logprobs(rows), strict=True):
        ids, start = torch.tensor([*row.prompt_ids, *row.response_ids]), len(row.prompt_ids)

        def picked(model: Any, ids: torch.Tensor = ids, start: int = start) -> torch.Tensor:
            logits = model(ids[None]).logits[0] / 0.7
            return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None]).squeeze(1)

        with torch.no_grad():
            wanted = picked(scorer)
        np.testing.assert_allclose(scores, wanted.numpy(), atol=1e-4)
        new = picked(network)
        advantage = (wanted - new).detach()
        total, count = total - (advantage * new).sum(), count + len(row.response_ids)
        bounded = advantage.clamp(max=math.log(KL_SLOPE))
        gaps += (bounded.exp() * (1 + advantage - bounded) - advantage - 1).tolist()
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
    updates = asyncio.run(update_policies(learner, {"a": rows}, {"a": 1.0}, lambda policy: teacher))
    found = updates["a"]
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert found["kl"] == pytest.approx(np.mean(gaps), rel=1e-3)


def test_rows_that_no_teacher_has_scored_are_refused(base: str) -> None:
    learner = LocalLearner.open(base, policies_for("full", ["a"], LoraSpec()), FAST, LOSS)
    with pytest.raises(GroupError, match=r"No teacher has scored"):
        learner.update("a", make_rows())


@pytest.mark.slow
def test_a_run_comes_nearer_to_its_teacher(trainer: Trainer, tmp_path: Path) -> None:
    """The reward of every episode is the same: all that is learned is the teacher's."""
    teacher = sharpened(build_base(tmp_path / "teacher", seed=5))

    async def same(task: Any) -> dict[str, float]:
        await converse(task)
        return {"team": 1.0}

    settings = {"policies": "full", "steps": 5, "recipe": "distill", "plan": {"k": 24}, "learner": {"lr": 3e-3}}
    summary = trainer(application(same), distill={"teacher": str(teacher)}, **settings)
    gaps = [[line["roles"][role]["kl"] for line in trainer.metrics()] for role in ("first", "second")]
    assert summary.finished and summary.versions == {"first": 5, "second": 5}
    assert sum(gap[-1] for gap in gaps) < 0.75 * sum(gap[0] for gap in gaps)
    assert "first learns from the teacher; rewards count for nothing" in trainer.said
    assert trainer.resume(application(same), steps=6).versions == {"first": 6, "second": 6}
    assert json.loads((tmp_path / "run/run.json").read_text())["config"]["distill"]["teacher"] == str(teacher)


async def unknown(task: Any) -> dict[str, None]:
    await converse(task)
    return {"team": None}


def test_a_run_without_rewards_learns_from_its_teacher(trainer: Trainer, tiny_base: Path) -> None:
    """Three tasks, two episodes each, one call of each role in them: six rows by role, none left out."""
    settings = {"recipe": "distill", "distill": {"teacher": str(tiny_base)}, "plan": {"k": 2}, "steps": 1}
    trainer(application(unknown), **settings)
    (line,) = trainer.metrics()
    assert (line["rows"], line["left_out"], line["candidate_reward"]) == (12, {}, None)
    assert "missing_reward" not in trainer.said and "such are left out" not in trainer.said


@pytest.fixture
def servers(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    """Two servers with the policies' tokenizer; the first dies at its 21st row."""
    tokenizer = tokenizer_of(str(tiny_base))
    monkeypatch.setattr("cotune.integrations.models.vllm.teacher.PAUSE", 0.01)
    opened = [FakeServer(tiny_base), FakeServer(tiny_base)]
    rows = itertools.count()
    for server in opened:
        server.answers["POST", "/detokenize"] = lambda body: (200, {"prompt": tokenizer.decode(body["tokens"])})
        server.answers["POST", "/v1/completions"] = scored
        del server.answers["GET", "/v1/load_lora_adapter"]
    dead = 500, {"error": {"message": "the engine is dead"}}
    opened[0].answers["POST", "/v1/completions"] = lambda body: scored(body) if next(rows) <= 20 else dead
    yield opened
    for server in opened:
        server.http.shutdown()
        server.http.server_close()


def test_a_run_whose_teacher_dies_goes_on_with_another(
    trainer: Trainer, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has six rows of each role, and the probe of the first opening is one request more."""
    opened = functools.partialmethod(VllmTeacher.__init__, concurrency=2, retries=1)
    monkeypatch.setattr(VllmTeacher, "__init__", opened)
    teacher = {"teacher": servers[0].url}
    with pytest.raises(LearnerError, match=r"answered 500: the engine is dead\. .*continue with --resume"):
        trainer(application(converse), recipe="distill", distill=teacher, plan={"k": 2}, steps=3)
    assert len(trainer.metrics()) == 1 and "failed in step 2. Continue with" in trainer.said
    summary = trainer.resume(application(converse), distill={"teacher": servers[1].url})
    assert summary.finished and summary.versions == {"first": 3, "second": 3}
    assert "changed: distill.teacher = " in trainer.said
    assert trainer.metrics()[0]["counters"]["teacher.requests"] == 12


def test_bad_teachers_are_named(trainer: Trainer, tmp_path: Path) -> None:
    tiny_models.build("qwen3", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"distill.teacher = .*other' has another tokenizer than"):
        trainer(application(converse), recipe="distill", distill={"teacher": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=r"distill.teacher = .*gone' is not a model folder.* If it was moved"):
        trainer(application(converse), recipe="distill", distill={"teacher": str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match=r"distill.teacher = '' is missing: recipe distill needs a model folder"):
        trainer(application(converse), recipe="distill")
    with pytest.raises(ConfigError, match=r"recipe has no use for distill.teacher"):
        trainer(application(converse), distill={"teacher": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=r"distill.teacher = '10.0.0.5:8000' is an address without http://"):
        trainer(application(converse), recipe="distill", distill={"teacher": "10.0.0.5:8000"})
    url = {"recipe": "distill", "distill": {"teacher": "http://127.0.0.1:9"}}
    with pytest.raises(ConfigError, match=r"sampling.temperature = 0.5 cannot be used with a teacher by its address"):
        trainer(application(converse), **url, sampling={"temperature": 0.5})
    with pytest.raises(ConfigError, match=r"cannot score tokens .*does not answer"):
        trainer(application(converse), **url)
    assert not (tmp_path / "run").exists()
