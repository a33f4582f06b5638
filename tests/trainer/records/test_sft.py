"""Recipe sft: what is learned from records, its loss, and runs that stop, go on, and end early."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file

from cotune.adapters.export import export_run, latest_policies
from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.samples import TrainRow
from cotune.cli.main import main
from cotune.config.records import RecordsConfig
from cotune.errors import ConfigError, LearnerError, RecordError, RunError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.policies import LoraSpec, policies_for
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory.pass_size import PassSize
from cotune.trainer.records.answers import join_turns, read_answers
from cotune.trainer.records.lessons import Recorded, split_episodes
from cotune.trainer.records.objectives import Likelihood
from cotune.trainer.records.run import split_for
from cotune.trainer.train import train
from cotune.trainer.updates import update_policies
from tests.trainer.conftest import Trainer
from tests.trainer.learner.learner_rows import FAST, change, make_rows
from tests.trainer.records.records import asked, reading, record, said, traced
from tests.trainer.tiny_app import application, build_base, converse

STEPS = {"steps": 4, "tasks_per_step": 6, "evaluation": {"every": 2}}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(tmp_path_factory.mktemp("records") / "traced")


def learn(trainer: Trainer, path: Path, **settings: Any) -> Any:
    settings = {"recipe": "sft", "records": str(path), **STEPS, **settings}
    return trainer(application(converse), None, **settings)


def opened(base: str) -> Likelihood:
    return Likelihood(LocalLearner.open(base, policies_for("full", ["a"], LoraSpec()), FAST, FROM_RECORDS["sft"]))


def rows_of(recorded: Recorded) -> list[TrainRow]:
    found = recorded.of(recorded.rows, {role: role for role in recorded.roles})
    return [row for role in sorted(found) for row in found[role]]


def read(store: SqliteStore, base: Path, longest: int = 256, **settings: Any) -> Recorded:
    return read_answers(store, reading(ChatTemplate.load(base), longest), RecordsConfig(path="x", **settings))


# What is learned


def test_an_answer_is_learned_as_the_template_writes_it(tmp_path: Path, tiny_base: Path) -> None:
    traced(tmp_path / "t", "a", 1)
    chat = ChatTemplate.load(tiny_base)
    with SqliteStore.open(tmp_path / "t", read_only=True) as store:
        rows = rows_of(read(store, tiny_base))
    text = [(chat.tokenizer.decode(row.prompt_ids), chat.tokenizer.decode(row.response_ids)) for row in rows]
    assert text == [("<u>say a<end><a>", "aaaa<end>"), ("<u>after aaaa: a<end><a>", "aaaa<end>")]
    assert [(row.role, row.advantage, row.loss_mask) for row in rows] == [("first", 1.0, ()), ("second", 1.0, ())]


def test_what_cannot_be_learned_is_counted(tmp_path: Path, tiny_base: Path) -> None:
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}], "content": None}
    with SqliteStore.open(tmp_path) as store:
        record(store, "a", [("first", asked("say a"), said("aaaa"))])
        record(store, "b", [("first", asked("say b"), said("", message=call))])
        record(store, "c", [("first", asked("say c"), said("cc<end>c"))])
        record(store, "d", [("first", asked("say d"), said(""))])
        record(store, "e", [("first", asked("say e"), said("eeee", finish_reason="length"))])
        record(store, "f", [("first", asked("say f"), said("ffff", malformed=True))])
        record(store, "g", [("first", asked("g" * 300), said("gggg"))])
        record(store, "h", [("first", [{"role": "user", "content": [{"type": "image_url"}]}], said("hhhh"))])
        record(store, "i", [("first", asked("say i"), said("iiii"))], status="error")
        record(store, "j", [("first", asked("say j"), said("jjjj"))], phase="eval-trained")
        record(store, "k", [("first", asked("say k"), said("kkkk"))], phase="check")
        store.flush()
        found = read(store, tiny_base)
    assert [row.response_ids for row in rows_of(found)] == [(4, 4, 4, 4, 1)]
    assert found.left_out == {
        "inexpressible": 2, "empty_answer": 1, "truncated": 1, "malformed": 1, "too_long": 1, "unrenderable": 1,
        "failed_episode": 1, "evaluation": 1, "first_look": 1,
    }  # fmt: skip


def test_a_role_whose_answers_cannot_be_written_is_told(tmp_path: Path, tiny_base: Path) -> None:
    """The tiny model's template shows no tool calls: the clerk learns nothing, the writer one of two answers."""
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}], "content": None}
    with SqliteStore.open(tmp_path) as store:
        for letter in "ab":
            record(store, letter, [("clerk", asked(f"say {letter}"), said("", message=call))])
        record(store, "c", [("writer", asked("say c"), said("cccc"))])
        record(store, "d", [("writer", asked("say d"), said("dd<end>d"))])
        record(store, "e", [("third", asked("e" * 300), said("eeee"))])
        store.flush()
        found = read(store, tiny_base)
    assert found.left_out == {"inexpressible": 3, "too_long": 1}
    clerk, third, writer = found.notes
    assert clerk == (
        "Role clerk learns nothing: all 2 of its answers are left out (inexpressible: 2, of them 2 tool calls). "
        "inexpressible: the model's chat template does not write the answer, or its text would be read back as another "
        "answer. Take a model whose chat template writes tool calls, or set tool_format."
    )
    assert third == (
        "Role third learns nothing: all 1 of its answers are left out (too_long: 1). "
        "Take a model with a longer context."
    )
    assert writer.startswith("Role writer learns 1 of 2 answers; left out are inexpressible: 1. inexpressible: the mod")


def test_turns_that_go_on_from_each_other_are_one_row_with_the_same_loss(base: str) -> None:
    first, other = (make_rows(groups=1, k=1, seed=seed, response=(3, 3))[0] for seed in (1, 2))
    second = TrainRow(
        id="second", role="a", prompt_ids=(*first.prompt_ids, *first.response_ids, 7, 8), response_ids=(9, 10),
        logprobs=(0.0, 0.0), advantage=1.0,
    )  # fmt: skip
    turns = [change(row, advantage=1.0) for row in (first, other, second)]
    joined = join_turns(turns)
    assert [len(row.response_ids) for row in joined] == [7, 3]
    assert joined[0].loss_mask == (True, True, True, False, False, True, True)
    figures = []
    for rows in (turns, joined):
        learner = opened(base)
        figures.append((learner.loss("a", rows)["loss"], learner.update("a", rows)))
    (apart, one), (together, two) = figures
    assert one["tokens"] == two["tokens"] == 8
    for pair in ((apart, together), (one["loss"], two["loss"]), (one["grad_norm"], two["grad_norm"])):
        assert pair[0] == pytest.approx(pair[1], abs=1e-5)


def test_held_out_are_whole_tasks(records: Path, tiny_base: Path) -> None:
    with SqliteStore.open(records, read_only=True) as store:
        found = read(store, tiny_base)
    episodes, held_out, note = split_episodes(found, seed=0)
    tasks = [{found.tasks[episode] for episode in part} for part in (episodes, held_out)]
    assert (len(tasks[0]), len(tasks[1]), note) == (11, 1, "")
    assert not tasks[0] & tasks[1]
    assert split_episodes(found, seed=0) == (episodes, held_out, note) != split_episodes(found, seed=1)


def test_nothing_is_held_out_if_a_policy_would_learn_nothing(tmp_path: Path, tiny_base: Path) -> None:
    """One task alone has an answer of the clerk."""
    with SqliteStore.open(tmp_path) as store:
        for letter in "abcdefghij":
            turns = [("writer", asked(f"say {letter}"), said("aaaa"))]
            if letter == "a":
                turns.append(("clerk", asked("say b"), said("bbbb")))
            record(store, letter, turns)
        store.flush()
        found = read(store, tiny_base)
    policies = policies_for("full", ["writer", "clerk"], LoraSpec())
    notes = set()
    for seed in range(40):
        episodes, held_out, note = split_for(policies, found, seed)
        assert len(episodes) == 10 - len(held_out) == (10 if note else 9)
        assert "a" in {found.tasks[episode] for episode in episodes}
        notes.add(note)
    assert notes == {"", "no held-out loss: all answers of policy 'clerk' would be held out"}


# The loss


def test_the_loss_is_that_of_a_plain_forward_pass(base: str) -> None:
    from transformers import AutoModelForCausalLM

    rows = [change(row, advantage=1.0) for row in make_rows(groups=5, k=1)]
    learner = opened(base)
    network = AutoModelForCausalLM.from_pretrained(base)
    total, count = torch.zeros(()), 0
    for row in rows:
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])
        answer = slice(len(row.prompt_ids) - 1, len(ids) - 1)
        picked = network(ids[None]).logits[0].log_softmax(-1)[answer].gather(1, ids[len(row.prompt_ids) :, None])
        total, count = total - picked.sum(), count + len(row.response_ids)
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
    loss = float(total.detach() / count)
    assert learner.loss("a", rows)["loss"] == pytest.approx(loss, abs=1e-5)
    found = learner.update("a", rows)
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert not {"ratio_mean", "sampler_gap_mean", "clip_share"} & found.keys()


# Runs


def test_a_run_teaches_each_role_and_is_exported(
    trainer: Trainer, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotune.trainer.records.run.PATIENCE", 12)
    summary = learn(trainer, records, steps=12, policies="full")
    lines = trainer.metrics()
    assert (summary.finished, summary.steps, summary.versions) == (True, 12, {"first": 12, "second": 12})
    assert [line["rows"] for line in lines[:3]] == [12, 12, 12]
    for role in ("first", "second"):
        losses = [line["roles"][role]["loss"] for line in lines]
        held_out = [line["roles"][role]["held_out_loss"] for line in lines[1::2]]
        assert losses[-1] < 0.8 * losses[0] and len(held_out) == 6
    assert "recipe sft: rows from 22 episodes, 2 held out: first 22, second 22" in trainer.said
    assert "loss: first " in trainer.said and "held-out loss: first " in trainer.said
    manifest = export_run(tmp_path / "run", tmp_path / "export")
    assert [(entry.role, entry.policy) for entry in manifest.roles] == [("first", "first"), ("second", "second")]
    assert manifest.roles[0].metrics["loss"] == lines[-1]["roles"]["first"]["loss"]
    assert manifest.models == {"first": (), "second": ()}  # these records name no model


def test_a_stopped_run_goes_on_to_the_same_weights(
    trainer: Trainer, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Console):
        def print(self, *objects: Any, **kwargs: Any) -> None:
            if str(objects[0]).startswith("step 2/4"):
                signal.raise_signal(signal.SIGINT)

    learn(trainer, records, to="straight")
    settings = {"model": str(trainer.base), "learner": {"lr": 3e-3}, **STEPS}
    run = tmp_path / "stopped"
    summary = train(
        application(converse), None, settings, out=run, console=Impatient(), recipe="sft", records=str(records)
    )
    assert (summary.finished, summary.steps) == (False, 2)
    summary = trainer.resume(application(converse), None, to="stopped")
    assert (summary.finished, summary.steps) == (True, 4)
    last = "checkpoints/step-000004/0.safetensors"
    one, other = (load_file(tmp_path / name / last) for name in ("straight", "stopped"))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert [line["step"] for line in trainer.metrics("stopped")] == [0, 1, 2, 3]


def test_records_that_have_changed_are_another_run(trainer: Trainer, tmp_path: Path) -> None:
    traced(tmp_path / "t")
    learn(trainer, tmp_path / "t", steps=1)
    traced(tmp_path / "t", "z", 1)
    with pytest.raises(RunError, match="not the ones that the run was started with: 24 episodes then, 25 now"):
        trainer.resume(application(converse), None, steps=2)


@pytest.mark.slow
def test_a_policy_whose_held_out_loss_rises_stops_and_keeps_its_best(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second role answers at random, so that what is learned of it says nothing of held-out tasks."""
    monkeypatch.setattr("cotune.trainer.records.run.PATIENCE", 2)
    letters = "abcdefghijklmnopqrst"
    with SqliteStore.open(tmp_path / "t") as store:
        for n, letter in enumerate(letters):
            noise = said("".join(letters[(7 * n + 3 * k * k + n * k) % 20] for k in range(8)))
            record(store, letter, [("first", asked("say"), said("aaaa")), ("second", asked(f"say {letter}"), noise)])
    summary = learn(
        trainer, tmp_path / "t", steps=40, tasks_per_step=18, policies="full", evaluation={"every": 2},
    )  # fmt: skip
    lines = [line["policies"] for line in trainer.metrics()]
    assert summary.finished
    losses = [found["second"]["held_out_loss"] for found in lines if "held_out_loss" in found.get("second", {})]
    assert losses.index(min(losses)) == len(losses) - 3 and summary.versions["second"] == 2 * len(losses) < 40
    assert summary.versions["first"] > summary.versions["second"]
    best = latest_policies(tmp_path / "run")[1].weights
    kept = load_file(tmp_path / "run/best/1.safetensors")
    assert best is not None and all(np.array_equal(best[name], kept[name]) for name in kept)
    step = 2 * losses.index(min(losses)) + 2
    assert f"second: lowest held-out loss {min(losses):.4f} after step {step}; its weights are kept" in trainer.said


# The command line


def test_the_command_line(records: Path, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "tests.trainer.worker_app:solve", "--recipe", "sft", "--records", str(records)]
    words += ["--model", str(tiny_base), "--out", str(tmp_path / "run"), "--set=records.min_reward=0.5"]
    words += ["--steps", "2", "--tasks-per-step", "4", "--lr", "3e-3"]
    assert main(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["rows"] for line in lines] == [8, 8]
    assert lines[0]["left_out"] == {"below_reward": 24}
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
    assert "finished after 3 steps" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"recipe sft, learns from {records} 3 of 3 steps, 24 rows trained on" in shown
    assert "held-out loss of first: " in shown and "left out: below_reward: 24" in shown
    assert main(["show", str(tmp_path / "run"), "--steps"]) == 0
    steps = capsys.readouterr().out
    assert "reward" not in steps.replace("below_reward", "") and "failed" not in steps and "held-out" in steps
    assert main(["show", str(tmp_path / "run"), "--groups"]) == 1
    error = capsys.readouterr().err
    assert f"learned from records and recorded no episodes. The episodes are in {records}." in error


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"records": ""}, "records = '' is missing: recipe sft needs a run folder or records file"),
        ({"recipe": "grpo"}, "recipe = 'grpo' does not learn from records"),
        ({"roles": ("third",)}, "roles = 'third' has no recorded answers .*: first, second"),
        ({"policy": ({"name": "p", "roles": ["first"]},)}, "policy.roles = 'second' have no policy"),
        ({"tasks": [{"id": "a"}]}, "tasks = .* cannot be used with recipe sft"),
    ],
)
def test_bad_settings_are_named(trainer: Trainer, records: Path, settings: dict[str, Any], message: str) -> None:
    tasks = settings.pop("tasks", None)
    with pytest.raises(ConfigError, match=message):
        trainer(application(converse), tasks, **{"recipe": "sft", "records": str(records), **settings})
    assert not (trainer.folder / "run").exists()


def test_a_row_that_does_not_fit_is_named_before_the_first_step(
    trainer: Trainer, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapt = PassSize.adapt

    def with_room_for_five_tokens(size: PassSize, fits: Any, wanted: Any, **options: Any) -> None:
        adapt(size, fits, wanted, **{**options, "longest_row": 5, "memory_name": "memory"})

    monkeypatch.setattr(PassSize, "adapt", with_room_for_five_tokens)
    with pytest.raises(LearnerError, match=r"^Row .* has \d+ tokens; a pass of one row fits up to 5 into memory"):
        learn(trainer, records)
    assert not (trainer.folder / "run" / "metrics.jsonl").exists()


def test_an_error_of_one_policy_waits_for_the_others() -> None:
    done = []

    class Learner:
        def update(self, policy: str, rows: Any, *, lr_scale: float) -> dict[str, float]:
            if policy == "a":
                raise LearnerError("Memory ran out.", "")
            time.sleep(0.2)
            done.append(policy)
            return {}

    async def scenario() -> None:
        with pytest.raises(LearnerError, match="Memory ran out"):
            await update_policies(cast(Any, Learner()), {"a": [], "b": []}, {"a": 1.0, "b": 1.0})
        assert done == ["b"]

    asyncio.run(scenario())


def test_the_configuration_of_a_reinforcement_run_will_do(trainer: Trainer, records: Path) -> None:
    settings = {"plan": {"kind": "tree"}, "loss": {"clip_high": 0.3}, "steps": 1}
    assert learn(trainer, records, **settings).finished
    assert "not used, as recipe sft runs no episode: loss, plan.kind" in trainer.said


def test_records_without_answers(trainer: Trainer, records: Path, tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "t") as store:
        record(store, "a", [("first", asked("say a"), said("aaaa"))], status="error")
    with pytest.raises(RecordError, match=r"No recorded answer can be learned from \(failed_episode: 1\)"):
        learn(trainer, tmp_path / "t")
    with pytest.raises(RecordError, match=r"\(below_reward: 48\)\. Lower records.min_reward"):
        learn(trainer, records, records={"path": str(records), "min_reward": 2.0})
    with pytest.raises(RunError, match="There is no records file"):
        learn(trainer, tmp_path / "nothing")
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}], "content": None}
    with SqliteStore.open(tmp_path / "tools") as store:
        record(store, "a", [("first", asked("say a"), said("", message=call))])
    with pytest.raises(
        RecordError, match=r"\(inexpressible: 1\)\. inexpressible: the .* does not write .*\. Take a model whose"
    ):
        learn(trainer, tmp_path / "tools")


def test_a_model_without_a_chat_template(trainer: Trainer, records: Path, tmp_path: Path) -> None:
    plain = build_base(tmp_path / "plain", template=False)
    with pytest.raises(ConfigError, match="a tokenizer without a chat template"):
        learn(trainer, records, model=str(plain))


def test_rollouts_still_need_tasks(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="tasks is missing"):
        trainer(application(converse), None)
