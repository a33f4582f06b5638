"""`cotune replay`: one episode from a call on, answers given by hand, and all episodes as a regression test."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cotune.cli.main import main
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord, Episode, PolicyRef
from cotune.replay.script import ScriptCall
from cotune.storage import run_code
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.replay.vocabulary import RecordedIds
from tests.integrations import tiny_models
from tests.integrations.provider import Provider, serving
from tests.trainer import replay_app
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS

APP = "tests.trainer.replay_app:solve"


@pytest.fixture(scope="module")
def trained(module_trainer: Trainer) -> Path:
    """A run of one step, with the policies that it ended with."""
    module_trainer(APP, steps=1, policies="shared", plan={"kind": "replay", "k": 3}, to="trained")
    return module_trainer.folder / "trained"


def records(run: Path, phase: str = "train") -> tuple[SqliteStore, list[Episode]]:
    store = SqliteStore.open(run, read_only=True)
    return store, [e for e in store.episodes(EpisodeFilters(phase=phase)) if e.fork is None]


def said(calls: list[CallRecord]) -> list[str]:
    return [call.candidates[0].text for call in calls]


def replay(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and what was printed, with single spaces."""
    status = main(["replay", *words])
    out = capsys.readouterr()
    return status, " ".join((out.out + out.err).split())


def test_one_episode_from_a_call_on_with_the_present_policy(trained: Path, tmp_path: Path, capsys):
    store, (trunk, *_) = records(trained)
    out = tmp_path / "again"
    status, text = replay(capsys, str(trained), "--episode", trunk.id, "--call", "1", "-k", "3", "--out", str(out))
    assert status == 0
    assert f"episode {trunk.id} task {trunk.task.id} · 1 call from the record, then the policies of" in text
    again, new = SqliteStore.open(out, read_only=True), []
    for episode in again.episodes(EpisodeFilters(phase="replay")):
        calls = again.calls(episode.id)
        assert [c.replayed for c in calls] == [store.calls(trunk.id)[0].id, None, None]
        assert {str(c.policy) for c in calls[1:]} == {"shared@1"}
        assert re.search(
            rf"new {episode.rollout + 1} team {again.rewards([episode.id])[episode.id]['team']:.3g} ", text
        )
        new.append(tuple(said(calls)))
    assert len(set(new)) == 3 and len({first for first, *_ in new}) == 1
    assert "old new 1 new 2 new 3" in text and "1 second 0" in text and "0 first 0" not in text


def test_an_answer_of_the_users_is_said_at_the_call(trained: Path, tmp_path: Path, capsys):
    _, (trunk, *_) = records(trained)
    out = tmp_path / "again"
    words = [str(trained), "--episode", trunk.id, "--call", "2", "--answer", "abcd", "--out", str(out)]
    status, text = replay(capsys, *words)
    assert status == 0 and "abcd" in text
    again = SqliteStore.open(out, read_only=True)
    (episode,) = again.episodes()
    assert [bool(c.replayed) for c in again.calls(episode.id)] == [True, True, False]
    assert said(again.calls(episode.id))[2] == "abcd" and episode.fork is not None


def test_all_episodes_are_a_regression_test(trained: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    status, text = replay(capsys, str(trained), "--all")
    assert status == 0
    assert "3 episodes run again, answered from the record" in text
    assert "same outcome 3 better 0 worse 0 diverged 0 failed, had not before 0" in text
    monkeypatch.setenv("CHANGED", "b")
    status, text = replay(capsys, str(trained), "--all")
    assert status == 1
    assert "same outcome 2" in text and "diverged 1" in text
    assert "1 x Turn 0 of role 'second' differs from the record in message 1 (user), character 1: recorded 'say" in text


def test_another_model_plays_all_of_it(trained: Path, tiny_base: Path, capsys):
    status, text = replay(capsys, str(trained), "--all", "--limit", "2", "--model", str(tiny_base))
    assert status == 0
    assert f"2 episodes run again, answered by {tiny_base}, untrained" in text
    assert re.search(r"mean outcome old new ─+ team [\d.]+ of 2 [\d.]+ of 2", text)


def test_a_model_of_another_vocabulary_gets_recorded_prompts_as_text(trained: Path, tmp_path: Path, capsys):
    store, (trunk, *_) = records(trained)
    tiny_models.build("llama", tmp_path / "other")
    out = tmp_path / "again"
    words = [str(trained), "--episode", trunk.id, "--call", "1", "--model", str(tmp_path / "other"), "--out", str(out)]
    status, text = replay(capsys, *words, "--max-tokens", "4")
    assert status == 0, text
    assert "(recorded prompts of 1 episode are rendered in its own template)" in text
    again = SqliteStore.open(out, read_only=True)
    (episode,) = again.episodes()
    first, *new = again.calls(episode.id)
    assert (first.replayed, first.prompt) == (store.calls(trunk.id)[0].id, None)
    assert said([first]) == said(store.calls(trunk.id)[:1]) and len(new) == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    for call in new:
        asked = again.message(call.messages[-1])["content"]
        assert asked in tokenizer.decode(again.token_ids(call.prompt or ""))


def test_a_policys_base_that_moved_with_its_run_reads_the_recorded_ids(tiny_base: Path, tmp_path: Path) -> None:
    run, base = tmp_path / "new" / "run", tmp_path / "new" / "base"
    shutil.copytree(tiny_base, base)
    run.mkdir()
    own = {"name": "own", "roles": ["first"], "model": str(tmp_path / "old" / "base")}
    described = {"id": "r", "model": "a/b", "run": str(tmp_path / "old" / "run"), "config": {"policy": [own]}}
    (run / "run.json").write_text(json.dumps(described))
    chat, answer = ChatTemplate.load(base), Answer(candidates=(), prompt_ids=(1,), policy=PolicyRef("own"))
    call = ScriptCall(
        id="c", role="first", step=0, turn=0, model="", params={}, messages=(), tools=None, started=0.0, ended=1.0,
        answer=answer,
    )  # fmt: skip
    assert RecordedIds(run, lambda role: chat).readable(call)


def test_another_base_than_that_of_the_run_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (trunk, *_) = records(trained)
    base = Path(json.loads((trained / "run.json").read_text())["model"])
    words = [str(trained), "--episode", trunk.id, "--call", "1"]
    monkeypatch.setattr(TransformersSampler, "open", None)  # refused before it is opened
    plain = (base / "config.json").read_text()
    try:
        (base / "config.json").write_text(json.dumps({**json.loads(plain), "rope_theta": 5.0}))
        status, text = replay(capsys, *words)
        assert status == 1
        assert f"{base} is not the base model that the run was started with: its config differ. " in text
        assert "cotune export RUN --out adapters/ --model" in text
        base.rename(base.with_name("moved"))
        status, text = replay(capsys, *words)
        assert status == 1 and "there is no such folder" in text and "cotune export RUN --out adapters/ --model" in text
    finally:
        if base.with_name("moved").exists():
            base.with_name("moved").rename(base)
        (base / "config.json").write_text(plain)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch):
    with serving() as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


def test_what_was_traced_goes_on_with_the_applications_provider(provider: Provider, tmp_path: Path, capsys):
    tasks, traced = tmp_path / "tasks.jsonl", tmp_path / "traced"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    assert main(["trace", APP, "--tasks", str(tasks), "--out", str(traced)]) == 0
    asked = len(provider.requests)
    status, text = replay(capsys, str(traced), "--all")
    assert (status, len(provider.requests)) == (0, asked) and "same outcome 3" in text
    _, (trunk, *_) = records(traced, "trace")
    status, text = replay(capsys, str(traced), "--episode", trunk.id, "--call", "2", "--workflow", APP)
    assert (status, len(provider.requests)) == (0, asked + 1)
    assert "then the application's own provider" in text


def test_a_trace_that_another_user_wrote_is_asked_about(
    provider: Provider, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    tasks, traced = tmp_path / "tasks.jsonl", tmp_path / "traced"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    assert main(["trace", APP, "--tasks", str(tasks), "--out", str(traced)]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(run_code, "_trusted_here", set())
    status, text = replay(capsys, str(traced), "--all")
    assert status == 1 and APP in text and "--trust-folder" in text
    assert replay(capsys, str(traced), "--all", "--workflow", APP)[0] == 0
    assert replay(capsys, str(traced), "--all", "--trust-folder")[0] == 0


def test_a_folder_with_records_of_two_applications_names_neither(provider: Provider, tmp_path: Path, capsys):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TASKS[0]) + "\n")
    (tmp_path / "other.py").write_text("from tests.trainer.replay_app import *\n")
    other = f"{tmp_path / 'other.py'}:{APP.partition(':')[2]}"
    for app in (APP, other, APP):
        assert main(["trace", app, "--tasks", str(tasks), "--out", str(tmp_path / "traced")]) == 0
    status, text = replay(capsys, str(tmp_path / "traced"), "--all")
    assert status == 1 and "workflow is missing" in text


def test_all_that_ended_before_ctrl_c_are_told(trained: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """The last of three never ends, and sends a signal when the others have."""
    _, trunks = records(trained)
    monkeypatch.setenv("ENDLESS", trunks[-1].task.input["letter"])
    monkeypatch.setenv("INTERRUPTED", str(len(replay_app.ended) + 2))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process of its own
    try:
        status, text = replay(capsys, str(trained), "--all")
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    assert status == 130
    assert "2 episodes run again, answered from the record" in text and "same outcome 2" in text
    assert "interrupted: 2 of 3 episodes were run again" in text


def test_an_episode_that_never_ends_or_raises_fails_alone(trained: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    _, trunks = records(trained)
    monkeypatch.setenv("ENDLESS", trunks[0].task.input["letter"])
    monkeypatch.setenv("RAISING", trunks[1].task.input["letter"])
    status, text = replay(capsys, str(trained), "--all", "--timeout", "2")
    assert status == 1 and "same outcome 1" in text and "failed, had not before 2" in text
    assert "did not finish within 2.0 seconds" in text and "raised ValueError: out of order" in text
    monkeypatch.setattr("cotune.trainer.replay.report._CAUSES_SHOWN", 1)
    _, text = replay(capsys, str(trained), "--all", "--timeout", "2")
    assert "1 episode with other errors" in text


def test_what_was_traced_frozen_is_repeated(
    provider: Provider, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NUMBERED", "1")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    for name, words in (("plain", []), ("frozen", ["--record", "frozen"])):
        assert main(["trace", APP, "--tasks", str(tasks), "--out", str(tmp_path / name), *words]) == 0
    status, text = replay(capsys, str(tmp_path / "plain"), "--all", "--workflow", APP)
    assert status == 1 and "diverged 3" in text
    assert "3 x at one place, first: Turn 0 of role 'first' differs from the record in message 1 (user), ch" in text
    assert '(it looks like a uuid). Set replay.tools = "frozen", or record with: cotune trace --record frozen.' in text
    status, text = replay(capsys, str(tmp_path / "frozen"), "--all", "--workflow", APP)
    assert status == 0 and "same outcome 3" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "episode is missing"),
        (["--all", "--episode", "x"], "cannot be used with --all"),
        (["--all", "-k", "2"], "k = 2 cannot be used with --all"),
        (["--episode", "TRUNK", "--answer", "x"], "answer = 'x' needs --call"),
        (["--episode", "TRUNK", "--call", "3"], "call = 3 is not a call of this episode, which has 0 to 2"),
        (["--episode", "nobody", "--call", "0"], "nobody"),
        (["--episode", "TRUNK", "--call", "0", "-k", "0"], "k = 0 must be a number above 0"),
        (["--all", "--workflow", "tests.trainer.replay_app:missing"], "missing"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(trained: Path, capsys, words: list[str], text: str):
    _, (trunk, *_) = records(trained)
    status, shown = replay(capsys, str(trained), *(word.replace("TRUNK", trunk.id) for word in words))
    assert status == 1 and text in shown


def test_records_alone_need_the_workflow_named(provider: Provider, tmp_path: Path, capsys):
    SqliteStore.open(tmp_path / "records.db").close()
    status, text = replay(capsys, str(tmp_path), "--all")
    assert status == 1 and "workflow is missing" in text and "--workflow app:solve" in text
