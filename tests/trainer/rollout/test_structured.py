"""Structured output in training, by the public path: sampled under a grammar, and learned under the same one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.errors import LearnerError, WorkflowError
from cotune.records.policies import Policies, PolicySpec
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.before.check.dry_run import check
from cotune.trainer.config.load import convert
from cotune.trainer.learner.local import LocalLearner
from tests.integrations.tiny_models import build, tokenizer
from tests.trainer.learner.learner_rows import FAST
from tests.trainer.tiny_app import application, ask

SCHEMA = {
    "type": "object",
    "properties": {"move": {"enum": ["left", "right"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["move", "steps"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with one token per character, so that its untrained replies are noise."""
    folder = tmp_path_factory.mktemp("speaking") / "base"
    build("qwen3", folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking is false %}!{% endif %}")
    return folder


async def plan(task: Mapping[str, Any]) -> dict[str, float]:
    """The application parses what it asked for: a reply that breaks the schema fails the episode."""
    asked = {"response_format": FORM, "max_tokens": 64, "logit_bias": {"200": -100}, "presence_penalty": 1.5}
    move = json.loads(await ask("planner", "where to?", **asked))
    jsonschema.validate(move, SCHEMA)
    quick = {"chat_template_kwargs": {"enable_thinking": False}}
    free = await ask("writer", "say anything", max_tokens=8, extra_body=quick)
    return {"team": 0.1 * move["steps"] + 0.01 * len(free)}


@pytest.fixture(scope="module")
def ran(speaking: Path, module_trainer):
    summary = module_trainer(
        application(plan), model=str(speaking), policies="lora", plan={"kind": "independent", "k": 8}, to="structured"
    )
    store = SqliteStore.open(module_trainer.folder / "structured" / "records.db")
    yield summary, module_trainer, store
    store.close()


def test_every_reply_fits_the_schema(ran) -> None:
    summary, _, store = ran
    assert summary.finished
    episodes = list(store.episodes(EpisodeFilters(phase="train")))
    assert {episode.status for episode in episodes} == {"ok"}
    calls = [call for episode in episodes for call in store.calls(episode.id) if call.role == "planner"]
    assert len(calls) == 2 * 3 * 8
    for call in calls:
        jsonschema.validate(json.loads(call.candidates[0].text), SCHEMA)
        assert store.message(call.sampling["grammar"]).startswith("%llguidance")
        assert call.sampling["presence_penalty"] == 0.0
    assert len({call.candidates[0].text for call in calls}) > 4
    assert store.rows("SELECT count(*) FROM messages WHERE body LIKE '%llguidance%'") == [(1,)], "stored once"


def test_template_options_reach_the_prompt(ran) -> None:
    episode = next(iter(ran[2].episodes(EpisodeFilters(phase="train"))))
    ends = {call.role: tokenizer().decode(ran[2].token_ids(call.prompt))[-1] for call in ran[2].calls(episode.id)}
    assert ends == {"planner": "\n", "writer": "!"}


def test_the_learner_sees_the_distribution_that_was_sampled_from(ran) -> None:
    for line in ran[1].metrics("structured"):
        for role in ("planner", "writer"):
            assert line["roles"][role]["sampler_gap_max"] < 1e-4
            assert line["roles"][role]["kept"] == 24


def test_replaced_parameters_are_counted(ran) -> None:
    for line in ran[1].metrics("structured"):
        assert line["notes"] == ["24 calls asked for presence_penalty and were sampled without it."]


def test_check_names_what_training_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    found = check(application(plan), [{"id": "a"}], convert({"model": "none"}))
    said = [finding.text for finding in found.findings if finding.about == "planner"]
    assert "asks for presence_penalty 1.5; training samples without it." in said


async def impossible(task: Mapping[str, Any]) -> float:
    """Asks for a set, which no grammar over tokens can keep free of repetition."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "set", "schema": schema}}
    return float(len(await ask("planner", "which?", response_format=form)))


def test_check_blocks_a_form_that_cannot_be_enforced() -> None:
    found = check(application(impossible), [{"id": "a"}], convert({"model": "none"}))
    (finding,) = [finding for finding in found.findings if finding.about == "planner" and finding.level == "blocks"]
    assert "uniqueItems" in finding.text


def test_a_form_that_cannot_be_enforced_ends_training_with_its_cause(speaking: Path, module_trainer) -> None:
    with pytest.raises(WorkflowError, match="uniqueItems"):
        module_trainer(application(impossible), model=str(speaking), plan={"kind": "independent", "k": 4}, to="no")


DIGIT = 'start: "{" /[1-3]/ "}"'
"""After the digit all is forced, the end too: one of four tokens is drawn."""


def digit_rows(base: Path, grammar: str = DIGIT, **changes: Any) -> list[TrainRow]:
    from transformers import AutoTokenizer

    replies = [tuple(AutoTokenizer.from_pretrained(base).encode(f"{{{n}}}<|im_end|>")) for n in (1, 2)]
    return [
        TrainRow(
            id=f"c.{i}", role="planner", prompt_ids=(7, 8), response_ids=ids, logprobs=(0.0, -1.1, 0.0, 0.0),
            advantage=1.0 - 2 * i, grammar=grammar, **changes,
        )
        for i, ids in enumerate(replies)
    ]  # fmt: skip


def updated(base: Path, rows: list[TrainRow], kind: str = "full", **loss: Any) -> tuple[Any, Any]:
    policies = Policies({"p": PolicySpec(name="p", kind=kind)}, {"planner": "p"})
    learner = LocalLearner.open(str(base), policies, FAST, msgspec.structs.replace(recipe("dr_mas").loss, **loss))
    return learner.update("p", rows), learner.weights("p")


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_forced_tokens_are_in_no_gradient_and_no_denominator(speaking: Path, aggregation: str) -> None:
    figures, moved = updated(speaking, digit_rows(speaking), aggregation=aggregation)
    assert figures["tokens"] == 2.0
    only = (False, True, False, False)
    _, by_hand = updated(speaking, digit_rows(speaking, loss_mask=only), aggregation=aggregation)
    assert all(np.array_equal(moved[name], by_hand[name]) for name in by_hand)
    three = figures["entropy"]
    assert 0.0 < three <= np.log(3) + 1e-6


def test_a_reply_that_is_forced_throughout_moves_nothing(speaking: Path) -> None:
    one = digit_rows(speaking, 'start: "{1}"')[:1]
    figures, _ = updated(speaking, one)
    assert figures["steps"] == 0.0


def test_a_reply_that_its_grammar_forbids_is_not_trained_on(speaking: Path) -> None:
    policies = Policies({"p": PolicySpec(name="p")}, {"planner": "p"})
    learner = LocalLearner.open(str(speaking), policies, FAST, recipe("dr_mas").loss)
    row = TrainRow(
        id="c.0", role="planner", prompt_ids=(7, 8), response_ids=(30, 2), logprobs=(0.0, 0.0), advantage=1.0,
        grammar='start: "{}"',
    )  # fmt: skip
    with pytest.raises(LearnerError, match=r"Row c.0 of role 'planner': Token 30 at position 0 .* llguidance"):
        learner.update("p", [row])
