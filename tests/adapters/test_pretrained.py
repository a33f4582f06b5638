"""Pretrained weights all the way: two adapters are trained, exported, read back by PEFT, and played in an app."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import cotune
from cotune.adapters.export import export_run
from cotune.algorithms.catalogue import RECIPES
from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.run.checkpoint import Checkpoint, save_checkpoint

ROLES = ("planner", "checker")
ASKED = [{"role": "user", "content": "What is 7 - 12?"}]
TOKENS = 6


def rows_of(role: str, prompt: tuple[int, ...], answers: list[tuple[int, ...]]) -> list[TrainRow]:
    """Rows of one group, of which the first answer is the better."""
    return [
        TrainRow(
            id=f"{role}.{i}",
            role=role,
            prompt_ids=prompt,
            response_ids=ids,
            logprobs=(-4.0,) * len(ids),
            advantage=1.0 - 2 * i,
        )
        for i, ids in enumerate(answers)
    ]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"])


@pytest.fixture(scope="module")
def exported(smollm2: Path, tokenizer: Any, prompt: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An export of two adapters that were trained to say different things, and the learner's log-probabilities."""
    folder = tmp_path_factory.mktemp("pretrained")
    policies = policies_for("lora", list(ROLES), LoraSpec(rank=8, alpha=16.0))
    learner = LocalLearner.open(str(smollm2), policies, LearnerSettings(lr=3e-3), RECIPES["at_grpo"].loss)
    said = {role: tuple(tokenizer(text)["input_ids"]) for role, text in zip(ROLES, ("7 - 12", "yes"), strict=True)}
    rows = {
        role: rows_of(role, prompt, [said[role], said[other]]) for role, other in zip(ROLES, ROLES[::-1], strict=True)
    }
    for role in ROLES:
        for _ in range(4):
            learner.update(role, rows[role])
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "run.json").write_bytes(msgspec.json.encode({"id": "r", "model": str(smollm2)}))
    checkpoint = Checkpoint(steps=4, versions=dict.fromkeys(ROLES, 4), policies=policies, run="r")
    save_checkpoint(folder / "run" / "checkpoints", checkpoint, learner)
    export_run(folder / "run", folder / "export")
    return folder / "export", rows, {role: learner.logprobs(role, rows[role]) for role in ROLES}


@pytest.fixture(scope="module")
def loaded(smollm2: Path, exported: Any) -> PeftModel:
    """Both adapters of the export, as PEFT reads them, on the model."""
    base = AutoModelForCausalLM.from_pretrained(smollm2)
    model = PeftModel.from_pretrained(base, exported[0] / ROLES[0], adapter_name=ROLES[0])
    model.load_adapter(exported[0] / ROLES[1], adapter_name=ROLES[1])
    return model.eval()


def greedy(model: PeftModel, role: str, prompt: tuple[int, ...]) -> list[int]:
    model.set_adapter(role)
    ids = torch.tensor([prompt])
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("role", ROLES)
def test_what_peft_reads_back_computes_what_the_learner_does(loaded: PeftModel, exported: Any, role: str) -> None:
    _, rows, logprobs = exported
    loaded.set_adapter(role)
    for row, expected in zip(rows[role], logprobs[role], strict=True):
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        with torch.no_grad():
            scores = loaded(ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        found = scores.gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0]
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-3)
    better, worse = (sum(found) for found in logprobs[role])
    assert better > worse + 5


@pytest.mark.long  # `test_deployed.py` plays adapters of a small model, the test above reads these
def test_deployed_plays_each_role_with_its_adapter(
    loaded: PeftModel, exported: Any, tokenizer: Any, prompt: tuple[int, ...], in_thread: None
) -> None:
    model = ChatOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", model="any", temperature=0, max_tokens=TOKENS)
    graph = StateGraph(MessagesState)
    for role in ROLES:
        graph.add_node(role, lambda state: {"messages": [model.invoke(ASKED)]})
    graph.add_edge(START, ROLES[0])
    graph.add_edge(*ROLES)
    graph.add_edge(ROLES[1], END)
    with cotune.deployed(exported[0]):
        state = graph.compile().invoke({"messages": []})
    ids = [greedy(loaded, role, prompt) for role in ROLES]
    assert [m.content for m in state["messages"]] == tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert ids[0] != ids[1]
