"""Teachers by policy, what they see beyond it, and policies that teach themselves from feedback."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import cotune
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import collect
from cotune.algorithms.policy_recipes import Recipes, attributed_each
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, GroupError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import FeedbackRecord, Message
from cotune.records.tasks import as_tasks
from cotune.sampling.protocol import ChatFormats
from cotune.storage.open_store import open_store
from cotune.trainer.config.load import convert
from cotune.trainer.config.resolve import resolve_plan
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.protocol import SELF
from cotune.trainer.privileged import check_privileged, with_hints, with_text
from cotune.trainer.updates import update_policies
from tests.core.conftest import Book
from tests.trainer.conftest import Trainer
from tests.trainer.learner.learner_rows import FAST, change, make_rows, on_policy
from tests.trainer.methods.test_distill import sharpened
from tests.trainer.tiny_app import TASKS, application, build_base, converse

SELF_DISTILL = recipe("self_distill").loss


def self_taught(learner: LocalLearner, rows: list[TrainRow]) -> Mapping[str, float]:
    """The figures of an update of a policy that is its own teacher."""
    return asyncio.run(update_policies(learner, {"a": rows}, {"a": 1.0}, lambda policy: SELF))["a"]


def test_a_policy_teaches_itself_with_more_in_its_context(base: str) -> None:
    """A_t = log pi(y_t | x, f, y_<t) - log pi(y_t | x, y_<t); the gradient is that of -sum of A_t log pi, a token."""
    from transformers import AutoModelForCausalLM

    settings, policies = change(FAST, grad_clip=0.0), policies_for("full", ["a"], LoraSpec())
    inner = LocalLearner.open(base, policies, settings, SELF_DISTILL)
    rows = on_policy(inner, "a", [change(row, advantage=0.0) for row in make_rows()])
    rows = [msgspec.structs.replace(row, hinted=(*row.prompt_ids, 5, 7, 9)) for row in rows]
    network = AutoModelForCausalLM.from_pretrained(base)

    def spoken(prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
        ids = torch.tensor([*prompt, *response])
        logits = network(ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        return logits.gather(1, ids[len(prompt) :, None]).squeeze(1)

    total, gaps = torch.zeros(()), []
    for row in rows:
        new = spoken(row.prompt_ids, row.response_ids)
        advantage = (spoken(row.hinted, row.response_ids) - new).detach()
        total, gaps = total - (advantage * new).sum(), [*gaps, *advantage.tolist()]
    (total / len(gaps)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
    found = self_taught(inner, rows)
    assert np.abs(gaps).max() > 0.01, "the context says something"
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-3) and found["unscored"] == 0.0
    without = [msgspec.structs.replace(row, hinted=()) for row in rows]
    same = self_taught(LocalLearner.open(base, policies, settings, SELF_DISTILL), without)
    assert same["grad_norm"] == pytest.approx(0.0, abs=1e-5), "and without it there is nothing to learn"


def test_a_text_stands_at_the_end_of_the_last_message_of_a_user() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    tool = {"role": "tool", "content": "t"}
    assert with_text([system, user, tool], "f") == [system, {"role": "user", "content": "u\n\nf"}, tool]
    assert with_text([system], "f") == [system, {"role": "user", "content": "f"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "u"}]}
    assert with_text([parts], "f")[0]["content"] == [*parts["content"], {"type": "text", "text": "f"}]
    assert parts["content"] == [{"type": "text", "text": "u"}], "what was recorded stays"


def said_wrong(candidate: Any, call: Any, task: Any) -> Any:
    """A reward, and for answers without the letter why."""
    right = task["letter"] in candidate.text
    return 1.0 if right else cotune.Feedback(0.0, f"say {task['letter']}")


def hint(candidate: Any, call: Any, task: Any) -> list[dict[str, str]]:
    """A prompt of the teacher's own, with the right answer."""
    assert candidate.text is not None and call.role == "first"
    return [{"role": "user", "content": f"the answer is {task['letter']}: {call.messages[-1]['content']}"}]


def broken(candidate: Any, call: Any, task: Any) -> int:
    return 1


def test_a_candidate_without_a_fitting_hint_still_counts_for_other_policies(tiny_base: Path, tmp_path: Path) -> None:
    """b sums up what all roles earn; what a earned stays a part of it where nothing is said of a, or too much."""
    book, chats = Book(), ChatFormats(ChatTemplate.load(tiny_base))
    book.store = open_store(tmp_path / "records.db")
    recipes = Recipes(run=recipe("magrpo"), own={"a": recipe("self_distill")})
    episodes = [book.episode(f"e{i}", outcome={"team": 1.0}) for i in range(3)]
    for i in range(3):
        for role in "ab":
            book.call(f"{role}{i}", f"e{i}", role=role, rewards=[1.0 + i], messages=("said",))
    book.store.write([Message("said", {"role": "user", "content": "hi"})])
    book.store.write([FeedbackRecord("e0", "team", "short"), FeedbackRecord("e1", "team", "long " * 60)])
    book.store.flush()
    found = collect(book.store, episodes, plan="independent", method_of=lambda role: recipes.run)
    hinted = with_hints(found, episodes, recipes, book.store, chats, lambda policy: 200)
    assert hinted.prompts.keys() == {"a0.0"} and hinted.collected.left_out["no_hint"] == 2
    assert {one.id for one in hinted.collected.samples} == {"a0.0", "b0.0", "b1.0", "b2.0"}
    wanted = dict(zip((s.id for s in found.samples), attributed_each(found, recipes).tolist(), strict=True))
    rewards = attributed_each(hinted.collected, recipes).tolist()
    assert {s.id: r for s, r in zip(hinted.collected.samples, rewards, strict=True)}.items() <= wanted.items()


@pytest.mark.slow
def test_roles_of_one_run_learn_from_feedback_a_teacher_and_rewards(trainer: Trainer, tmp_path: Path) -> None:
    """`first` teaches itself from what its scorer says of bad answers; `second` is taught under a tree without a
    scorer by another model that sees the task's letter."""
    teacher = sharpened(build_base(tmp_path / "teacher", seed=5))
    app = application(converse, first=said_wrong)
    tables = [
        {"name": "ask", "roles": ["first"], "recipe": "self_distill"},
        {"name": "answer", "roles": ["second"], "recipe": "distill", "teacher": str(teacher)},
    ]
    tables[1]["loss"] = {"teacher_sees": "letter"}
    summary = trainer(app, policy=tables, plan={"kind": "tree", "k": 6}, steps=3)
    assert summary.versions == {"ask": 3, "answer": 3}
    scored = {"ask": 0, "answer": 0}
    for line in trainer.metrics():
        assert line["rows"] + sum(line["left_out"].values()) == line["candidates"]
        assert line["left_out"].keys() <= {"no_hint"} and not line["stayed"]
        for name in scored:
            assert (
                line["policies"][name]["unscored"] == 0.0
                and line["roles"][tables[name == "answer"]["roles"][0]]["kl"] > 0
            )
            scored[name] += line["policies"][name]["rows"]
    left_out = sum(line["left_out"].get("no_hint", 0) for line in trainer.metrics())
    assert scored["answer"] == 3 * 3 and scored["ask"] == 3 * 3 * 6 - left_out
    held = msgspec.json.decode((tmp_path / "run/run.json").read_bytes())["config"]["policy"]
    assert held[1]["teacher"] == str(teacher)
    moved = tmp_path / "elsewhere"
    teacher.rename(moved)
    resumed = trainer.resume(app, steps=4, policy=[tables[0], {**tables[1], "teacher": str(moved)}])
    assert resumed.versions == {"ask": 4, "answer": 4}


@pytest.mark.slow
def test_a_function_says_what_a_teacher_reads(trainer: Trainer, tiny_base: Path) -> None:
    tables = [{"name": "ask", "roles": ["first"], "recipe": "distill", "teacher": str(tiny_base)}]
    tables += [{"name": "answer", "roles": ["second"]}]
    own = f"{Path(__file__)}:hint"
    trainer(application(converse), policy=[{**tables[0], "loss": {"teacher_sees": own}}, tables[1]], steps=1)
    (line,) = trainer.metrics()
    assert line["policies"]["ask"]["rows"] == 12 and line["roles"]["first"]["kl"] > 0.0
    assert "unscored" not in line["policies"]["answer"], "it learns from rewards"
    wrong = [{**tables[0], "loss": {"teacher_sees": own.replace("hint", "broken")}}, tables[1]]
    with pytest.raises(GroupError, match=r"broken returned int, which is neither a text nor a list of messages"):
        trainer(application(converse), policy=wrong, steps=1, to="other")


@pytest.mark.slow
def test_a_run_whose_scorers_say_nothing_tells_so(trainer: Trainer) -> None:
    trainer(application(converse), recipe="self_distill", steps=1)
    (line,) = trainer.metrics()
    assert line["left_out"] == {"no_hint": 24} and not line["policies"] and not line["updated"]
    assert "return cotune.Feedback(reward, text)" in " ".join(trainer.said.split())


def test_what_teachers_see_is_checked_before_work_starts() -> None:
    with pytest.raises(ConfigError, match=r"teacher_sees = 'feedback' needs a teacher"):
        recipe("dr_mas", teacher_sees="feedback")
    with pytest.raises(ConfigError, match=r"kl_to = 'self' needs teacher_sees"):
        recipe("distill", kl_to="self")
    with pytest.raises(ConfigError, match=r"teacher_sees = 'reference' is not text in every task; task a has None"):
        check_privileged(Recipes(run=recipe("self_distill", teacher_sees="reference")), as_tasks(TASKS))
    check_privileged(Recipes(run=recipe("self_distill", teacher_sees="letter")), as_tasks(TASKS))
    with pytest.raises(ConfigError, match=r"teacher_sees = .*nothing.py"):
        resolve_plan(convert({"model": "m", "recipe": "self_distill", "loss": {"teacher_sees": "nothing.py:f"}}), [])
    one = {"name": "p", "roles": ["a"]}
    for tables, fault in (
        ([{**one, "recipe": "distill"}], r"distill.teacher = '' is missing: .* Or set `teacher` of policy p"),
        ([{**one, "teacher": "m"}], r"policy.teacher = 'm' has no effect: policy p does not learn from a teacher"),
        ([{**one, "recipe": "distill", "teacher": "h:80"}], r"policy.teacher = 'h:80' is an address without http://"),
    ):
        with pytest.raises(ConfigError, match=fault):
            convert({"model": "m", "policy": tables})
    with pytest.raises(ConfigError, match=r"recipe has no use for distill.teacher"):
        convert({"model": "m", "distill": {"teacher": "t"}})
    for own in ({"recipe": "distill", "teacher": "m"}, {"recipe": "rloo"}):
        with pytest.raises(ConfigError, match=r"distill.teacher = 't' has no effect: no policy learns from a teacher"):
            convert({"model": "m", "recipe": "distill", "policy": [{**one, **own}], "distill": {"teacher": "t"}})
