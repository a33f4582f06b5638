"""The tool-using example: its shop, its rewards, its base model, and a few steps of training through its tools."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cotune.episodes.workflows import load_workflow
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.structs import CallRecord
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.reporting.summary import RunSummary
from cotune.trainer.train import train
from examples.tool_agent import clerk_base, provider, shop
from tests.examples.applications import check_knows_nothing_of_cotune

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "tool_agent"
CLIENTS = ("examples.tool_agent.app", "examples.tool_agent.train")
"""Modules that make a client when they are imported."""


@pytest.fixture(scope="module", autouse=True)
def own_client() -> Iterator[None]:
    """The application's client has an address at which nothing listens."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CLIENTS:
            patch.delitem(sys.modules, name, raising=False)
        patch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        patch.setenv("LANGSMITH_TRACING", "false")
        yield
    for name in CLIENTS:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clerk") / "base"
    losses = clerk_base.build(folder, count=400)
    assert losses[-1] < 0.4 < losses[0]
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, in_thread: None) -> Iterator[tuple[RunSummary, SqliteStore]]:
    settings = {"model": str(base), "policies": "lora", "steps": 2, "tasks_per_step": 8, "plan": {"k": 4}}
    settings["evaluation"] = {"tasks": "none"}
    learner = {"lr": 3e-3}
    summary = train(
        load_workflow("examples.tool_agent.train:solve"),
        list(shop.make_tasks(24, 0)),
        {**settings, "learner": learner, "sampling": {"max_tokens": 24}},
        out=base.parent / "run",
        console=Console(file=io.StringIO()),
    )
    store = SqliteStore.open(base.parent / "run" / "records.db", read_only=True)
    yield summary, store
    store.close()


def answered(store: SqliteStore) -> list[CallRecord]:
    return [call for episode in store.episodes(EpisodeFilters(phase="train")) for call in store.calls(episode.id)]


def next_of(call: CallRecord, store: SqliteStore) -> CallRecord | None:
    later = [c for c in store.calls(call.episode) if c.turn == call.turn + 1]
    return later[0] if later else None


# The shop


def test_the_tools_of_the_shop() -> None:
    assert len(shop.PRICE_OF) == 12
    assert (shop.find(" Lamp "), shop.find("piano")) == (f"lamp costs {shop.PRICE_OF['lamp']}", "nothing found")
    assert [shop.calculate(text) for text in ("3 * 7", "2+3*4", "9 - 10")] == ["21", "14", "-1"]
    bad = ("", "x", "2 ** 9", "1 / 2", "__import__('os')", "1.5 * 2", "(" * 500)
    assert [shop.calculate(text) for text in bad] == ["nothing found"] * 7


def test_questions_repeat_with_their_seed_and_have_answers() -> None:
    tasks = list(shop.make_tasks(40, 7))
    assert tasks == list(shop.make_tasks(40, 7)) != list(shop.make_tasks(40, 8))
    for task in tasks:
        count, item = shop.asked_for(task["question"])
        assert task["answer"] == str(count * shop.PRICE_OF[item])
        assert json.loads(json.dumps(task)) == task


@pytest.mark.parametrize("name", ["app.py", "shop.py"])
def test_the_application_knows_nothing_of_cotune(name: str) -> None:
    check_knows_nothing_of_cotune(FOLDER / name)


def test_what_each_message_is_worth() -> None:
    from examples.tool_agent import train as example

    price = shop.PRICE_OF["lamp"]
    task = {"question": "How much for 3 x lamp?", "answer": str(3 * price)}
    asked = [{"role": "user", "content": task["question"]}]
    known = [*asked, {"role": "tool", "content": f"lamp costs {price}"}]
    done = [*known, {"role": "tool", "content": task["answer"]}]

    def call(tool: str, **arguments: str) -> list[dict[str, Any]]:
        return [{"function": {"name": tool, "arguments": json.dumps(arguments)}}]

    right = functools.partial(example.is_right, task=task)
    assert right("", call("search", query="lamp"), asked)
    assert right("", call("calculator", expression=f"3 * {price}"), known)
    assert right(f" {task['answer']}\n", [], done)
    wrong = [
        ("", call("search", query="pen"), asked),
        ("", call("calculator", expression="3 * 1"), known),
        ("", call("search", query="lamp") * 2, asked),
        ("", call("search", question="lamp"), asked),
        ("", call("steal", query="lamp"), asked),
        (task["answer"], [], asked),
        ("1", [], done),
    ]
    assert [right(*step) for step in wrong] == [False] * len(wrong)


# The base model


def test_the_words_of_the_shop_are_tokens_and_every_text_survives() -> None:
    tokenizer = clerk_base.build_tokenizer()
    rng = random.Random(0)
    for _ in range(20):
        ids, labels = clerk_base.tokenized(tokenizer, clerk_base.conversation(rng))
        text = tokenizer.decode(ids)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert len(ids) == len(labels) < 140
        said = tokenizer.decode([label for label in labels if label >= 0])
        assert said.count("<|im_end|>") == text.count("<|im_start|>assistant")
    assert len(tokenizer.encode(shop.question(3, "lamp"), add_special_tokens=False)) == 12


def test_the_vocabulary_is_the_same_in_every_process() -> None:
    """Its words come from a set, whose order a process chooses: they have one of their own."""
    places = clerk_base.build_tokenizer().get_vocab()
    words = [token for token in sorted(places, key=places.__getitem__) if re.fullmatch("[A-Za-z]{2,}", token)]
    assert len(words) > 30 and words == sorted(words, key=lambda word: (-len(word), word))


# Training through the tools


def test_a_few_steps_of_training_run_through_both_tools(trained: tuple[RunSummary, SqliteStore]) -> None:
    summary, store = trained
    calls = answered(store)
    assert (summary.steps, summary.finished, summary.lost_records) == (2, True, 0)
    assert summary.versions == {"clerk": 2}
    assert {call.role for call in calls} == {"clerk"}
    assert all(len(call.candidates) == 4 for call in calls if call.status == "ok")
    used = {c.tool_calls[0]["function"]["name"] for call in calls for c in call.candidates if c.tool_calls}
    assert used >= {"search", "calculator"}
    assert summary.groups > 12
    scores = [value for call in calls for value in _scores(store, call)]
    assert {0.0, 1.0} <= set(scores)
    assert 0.2 < sum(scores) / len(scores) < 0.99


def test_the_tools_are_in_the_prompt_as_the_template_shows_them(
    base: Path, trained: tuple[RunSummary, SqliteStore]
) -> None:
    chat, (_, store) = ChatTemplate.load(base), trained
    for call in answered(store)[:20]:
        assert call.tools is not None and call.prompt is not None
        tools = store.message(call.tools)
        assert [tool["function"]["name"] for tool in tools] == ["search", "calculator"]
        messages = [store.message(name) for name in call.messages]
        assert list(store.token_ids(call.prompt)) == chat.render(messages, tools)
        assert chat.tokenizer.decode(store.token_ids(call.prompt)).startswith(
            "<|im_start|>tools\nsearch(query)calculator(expression)<|im_end|>\n<|im_start|>system\nSearch the price"
        )


def test_recorded_tokens_say_what_was_parsed_and_go_on_unchanged(
    base: Path, trained: tuple[RunSummary, SqliteStore]
) -> None:
    chat, (_, store) = ChatTemplate.load(base), trained
    continued = 0
    for call in answered(store):
        assert call.chosen is not None and call.prompt is not None
        tools = store.message(call.tools) if call.tools else None
        for candidate in call.candidates:
            text, message, _ = chat.parse(candidate.token_ids, tools=tools)
            assert len(candidate.token_ids) == len(candidate.logprobs)
            assert candidate.text == text
            assert [c["function"] for c in message.get("tool_calls", [])] == [
                c["function"] for c in candidate.tool_calls
            ]
        later = next_of(call, store)
        if later is not None and later.prompt is not None:
            path = (*store.token_ids(call.prompt), *call.candidates[call.chosen].token_ids)
            assert store.token_ids(later.prompt)[: len(path)] == path
            assert later.parents[-1] == call.id
            continued += 1
    assert continued > 20


def test_a_call_that_cannot_be_read_is_text_and_costs(trained: tuple[RunSummary, SqliteStore]) -> None:
    _, store = trained
    broken = [(call, candidate) for call in answered(store) for candidate in call.candidates if candidate.malformed]
    assert broken
    for call, candidate in broken:
        assert not candidate.tool_calls and "<tool_call>" in candidate.text
        assert _scores(store, call)[candidate.index] == -1.0


def _scores(store: SqliteStore, call: CallRecord) -> list[float]:
    from cotune.records.ids import candidate_id

    found = [store.rewards([candidate_id(call.id, c.index)]) for c in call.candidates]
    return [next(iter(rewards.values()))["local"] for rewards in found]


# From a provider's model to one's own


def test_the_provider_serves_most_customers() -> None:
    right = 0
    for task in shop.make_tasks(200, 3):
        messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
        while (said := provider.next_message(messages)).get("tool_calls"):
            function = said["tool_calls"][0]["function"]
            value = next(iter(json.loads(function["arguments"]).values()))
            result = (shop.find if function["name"] == "search" else shop.calculate)(value)
            messages += [said, {"role": "tool", "content": result}]
        right += said["content"] == task["answer"]
    assert 180 <= right < 200


@pytest.mark.long  # `test_sft.py` learns from recorded tool calls, the tests above train this model through its tools
def test_recorded_answers_with_tools_make_the_clerk_better(base: Path, in_thread: None, tmp_path: Path) -> None:
    """Recorded through a real address, learned in the model's own form of tool calls."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in shop.make_tasks(96, 5)))
    solve, traced = "examples.tool_agent.train:solve", str(tmp_path / "traced")
    with provider.serving() as url:
        words = [sys.executable, "-m", "cotune", "trace", solve, "--tasks", str(tmp_path / "tasks.jsonl")]
        environment = {**os.environ, "OPENAI_BASE_URL": url, "PYTHONPATH": str(ROOT)}
        subprocess.run([*words, "--out", traced], env=environment, cwd=tmp_path, check=True, capture_output=True)
    settings = {"model": str(base), "steps": 12, "learner": {"lr": 3e-3}}
    records = {"path": traced, "min_reward": 1.0}
    console = Console(file=io.StringIO())
    run = tmp_path / "sft"
    train(load_workflow(solve), None, settings, out=run, console=console, recipe="sft", records=records)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["left_out"].keys() <= {"below_reward"} and lines[0]["rows"] == 32
    tasks = list(shop.make_tasks(48, 6))
    report = evaluate(run, load_workflow(solve), tasks, modes=("base", "trained"), max_tokens=24)
    success = {mode: found.success.mean for mode, found in report.evaluations.items() if found.success}
    assert success["trained"] > success["base"] + 0.2
