"""Recipe dpo: which answers are pairs, their loss and gradient, and a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cotune.algorithms.from_records import FROM_RECORDS, preference_losses
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, RecordError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.judging.labels import load_labels
from cotune.records.policies import LoraSpec, policies_for
from cotune.storage.notes import Note, notes_file, write_note
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.records.lessons import Recorded
from cotune.trainer.records.objectives import BETA, PreferenceLearner
from cotune.trainer.records.pairs import read_pairs
from tests.trainer.conftest import Trainer
from tests.trainer.learner.learner_rows import FAST, change, make_rows, snapshot
from tests.trainer.records.records import asked, reading, record, said, traced
from tests.trainer.tiny_app import TASKS, application, converse, letters


def by_length(candidate: Any) -> dict[str, float]:
    return {"local": float(len(candidate.text))}


def read(folder: Path, base: Path) -> Recorded:
    with SqliteStore.open(folder, read_only=True) as store:
        return read_pairs(store, reading(ChatTemplate.load(base)))


def texts(found: Recorded, base: Path) -> list[tuple[str, str, str]]:
    """Prompt, better and worse answer of each pair."""
    decode = ChatTemplate.load(base).tokenizer.decode
    rows = [row for rows in found.of(found.rows, {role: role for role in found.roles}).values() for row in rows]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    assert all(one.prompt_ids == other.prompt_ids for one, other in zip(rows[::2], rows[1::2], strict=True))
    return [(decode(a.prompt_ids), decode(a.response_ids), decode(b.response_ids)) for a, b in pairs]


# Pairs


def test_peoples_labels_stand_in_for_rewards(tmp_path: Path, tiny_base: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        three = [said("bb", 0), said("a", 1), said("ccc", 2)]
        record(store, "a", [("first", asked("say a"), three)], scores=by_length)
        record(store, "b", [("first", asked("say b"), [said("d", 0), said("e", 1)])], scores=by_length)
        store.flush()
        ((call,),) = store.rows("SELECT id FROM calls ORDER BY id LIMIT 1")
    notes = notes_file(tmp_path)
    write_note(notes, Note(id=f"{call}.0", score=1.0, note="short"))
    write_note(notes, Note(id=f"{call}.2", score=-1.0))
    with SqliteStore.open(tmp_path, read_only=True) as store:
        found = read_pairs(store, reading(ChatTemplate.load(tiny_base)), labels=load_labels(notes))
    assert texts(found, tiny_base) == [("<u>say a<end><a>", "bb<end>", "ccc<end>")]
    assert found.left_out == {"no_label": 3}


def test_siblings_of_a_call_are_compared_by_their_own_rewards(tmp_path: Path, tiny_base: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        three = [said("bb", 0), said("a", 1), said("ccc", 2)]
        record(store, "a", [("first", asked("say a"), three)], rewards={"team": 1.0}, scores=by_length)
        record(store, "b", [("first", asked("say b"), [said("d", 0), said("e", 1)])], scores=by_length)
        record(store, "c", [("first", asked("say c"), said("f"))], scores=by_length)
    found = read(tmp_path, tiny_base)
    assert texts(found, tiny_base) == [("<u>say a<end><a>", "ccc<end>", "a<end>")]
    assert found.left_out == {"in_between": 1, "equal_rewards": 2, "only_answer": 1}


def test_episodes_of_a_task_are_compared_where_they_share_a_prompt(tmp_path: Path, tiny_base: Path) -> None:
    """Equal answers are worth the mean of their outcomes; one without an outcome says nothing."""
    with SqliteStore.open(tmp_path) as store:
        for text, outcome in (("x", 1.0), ("y", 0.8), ("x", 0.0), ("z", 0.6)):
            turns = [("first", asked("say a"), said(text)), ("second", asked(f"after {text}"), said("same"))]
            record(store, "a", turns, rewards={"team": outcome})
        record(store, "a", [("first", asked("say a"), said("none"))])
    found = read(tmp_path, tiny_base)
    assert texts(found, tiny_base) == [("<u>say a<end><a>", "y<end>", "x<end>")]
    assert found.left_out == {"in_between": 1, "only_answer": 3, "no_reward": 1}


def test_without_pairs_there_is_a_clear_error(trainer: Trainer, tmp_path: Path) -> None:
    traced(tmp_path / "t", "abc", 2)
    with pytest.raises(RecordError, match=r"no pair of a better and a worse answer to one prompt \(only_answer: 6\)"):
        trainer(application(converse), None, recipe="dpo", records=str(tmp_path / "t"))


# The loss


@pytest.mark.parametrize("margin", [-800.0, -2.0, 0.0, 0.3, 800.0])
def test_a_pair_by_hand(margin: float) -> None:
    (found,) = preference_losses([margin + 5.0], [5.0], beta=0.5)
    assert found.margin == pytest.approx(margin / 2)
    assert found.loss == pytest.approx(float(-torch.nn.functional.logsigmoid(torch.tensor(margin / 2))), abs=1e-6)
    assert found.advantage == pytest.approx(2 * 0.5 / (1 + math.exp(min(margin / 2, 700.0))))


def test_loss_and_gradient_are_those_of_the_formula(base: str, tmp_path: Path) -> None:
    """Against the losses written with plain forward passes of both models, after the policy has moved."""
    from transformers import AutoModelForCausalLM

    settings = change(FAST, grad_clip=0.0)
    rows = make_rows(groups=4, k=2)
    learner = LocalLearner.open(base, policies_for("full", ["a"], LoraSpec()), settings, FROM_RECORDS["dpo"])
    preferring = PreferenceLearner(learner, pairs=4)
    preferring.start(lambda: {"a": rows}, tmp_path / "start.json")
    learner.update("a", rows)

    reference, network = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    for name, parameter in network.named_parameters():
        parameter.data.copy_(torch.from_numpy(snapshot(learner, "a")[name]))

    def logprob(model: Any, row: TrainRow) -> torch.Tensor:
        ids, start = torch.tensor([*row.prompt_ids, *row.response_ids]), len(row.prompt_ids)
        picked = model(ids[None]).logits[0].log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])
        return picked.sum()

    with torch.no_grad():
        before = [logprob(reference, row) for row in rows]
    gained = [logprob(network, row) - known for row, known in zip(rows, before, strict=True)]
    margins = BETA * (torch.stack(gained[::2]) - torch.stack(gained[1::2]))
    expected = -torch.nn.functional.logsigmoid(margins).mean()
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])

    assert float(margins.detach().abs().min()) > 1e-3
    found = preferring.update("a", rows)
    assert found["loss"] == pytest.approx(float(expected.detach()), abs=1e-4)
    assert found["margin"] == pytest.approx(float(margins.detach().mean()), abs=1e-4)
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-3)


# Runs


def test_a_run_on_the_groups_of_a_tree(trainer: Trainer, tmp_path: Path) -> None:
    trainer(application(converse, first=letters, second=letters), TASKS, to="tree", steps=2)
    settings = {"policies": "full", "steps": 4, "tasks_per_step": 6, "learner": {"lr": 2e-3}}
    records = str(tmp_path / "tree")
    summary = trainer(application(converse), None, recipe="dpo", records=records, **settings)
    lines = trainer.metrics()
    assert summary.finished and summary.versions["first"] == 4
    for role in ("first", "second"):
        figures = [line["roles"][role] for line in lines]
        assert figures[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert figures[-1]["accuracy"] == 1.0 and figures[-1]["loss"] < 0.6
    assert [found["steps"] for found in lines[0]["policies"].values()] == [1.0, 1.0]
    assert "recipe dpo: pairs from 6 episodes" in trainer.said and "accuracy: first 1.0000" in trainer.said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learner": {"mini_batch": 1}}, "learner.mini_batch = 1 must be 2 or more"),
        ({"dpo": {"beta": 0.2}}, "dpo = .* was removed from the configuration"),
        ({"records": {"path": "x", "min_reward": 1.0}}, "records.min_reward = 1.0 cannot be used with recipe dpo"),
    ],
)
def test_bad_settings_are_named(trainer: Trainer, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(application(converse), None, **{"recipe": "dpo", "records": "x", **settings})
