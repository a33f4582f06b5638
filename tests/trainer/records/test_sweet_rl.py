"""Recipe sweet_rl: the loss of its critic, which episodes are pairs, and a run that learns from its turn advantages."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from cotune.adapters.export import latest_policies
from cotune.algorithms.from_records import TURN_CRITIC
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, RecordError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.judging.labels import load_labels
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.ids import candidate_id
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.records import turn_critic
from cotune.trainer.records.objectives import BETA
from cotune.trainer.records.turn_critic import (
    ANY_NUMBER,
    EpisodePair,
    TurnCritic,
    TurnPair,
    count_turns,
    critic_batches,
    pair_episodes,
    read_turns,
    turn_pairs,
)
from tests.trainer.conftest import Trainer
from tests.trainer.learner.learner_rows import FAST, change, make_rows, snapshot
from tests.trainer.records.records import asked, reading, said
from tests.trainer.tiny_app import application, ask, converse

Turns = Sequence[tuple[str, str, str | Sequence[str]]]
"""Of each call: its role, the request, and its candidates, of which the first goes on."""


def record(store: SqliteStore, task: Mapping[str, Any], turns: Turns, outcome: float | None) -> LiveEpisode:
    live = LiveEpisode(store, Task(id=str(task["id"]), input=dict(task)), workflow="w", phase="trace")
    for role, request, texts in turns:
        candidates = tuple(said(text, i) for i, text in enumerate([texts] if isinstance(texts, str) else texts))
        live.start(CallerContext(role, "test"), {"messages": asked(request)}).finish(Answer(candidates=candidates))
    live.end("ok", rewards={} if outcome is None else {"team": outcome})
    return live


def task(letter: str) -> dict[str, str]:
    return {"id": letter, "letter": letter, "reference": letter}


# The loss of the critic


def row(name: str, tokens: int) -> TrainRow:
    ids = tuple(range(1, tokens + 1))
    return TrainRow(id=name, role="a", prompt_ids=(0,), response_ids=ids, logprobs=(0.0,) * tokens, advantage=1.0)


class Scripted:
    """A learner with the log-probabilities of each row, which keeps the rows of updates."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.updated: list[TrainRow] = []

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[Any]:
        return [np.array(self.values[row.id], np.float32) for row in rows]

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> dict[str, float]:
        self.updated = list(rows)
        return {}


def test_a_pair_of_episodes_by_hand() -> None:
    learner = Scripted()
    critic = TurnCritic(cast(Any, learner))
    turns = {name: row(name, tokens) for name, tokens in (("b0", 2), ("b1", 1), ("w0", 4))}
    learner.values = {"b0": [-2.0, -1.0], "b1": [-3.0], "w0": [-1.0, -1.0, -1.0, -1.0]}
    critic.start("a", list(turns.values()))
    learner.values = {"b0": [-1.0, -1.0], "b1": [-1.0], "w0": [-2.0, -1.0, -1.0, -2.0]}

    # A: mean(-1 + 2, -1 + 1) = 0.5; 2; mean(-1, 0, 0, -1) = -0.5
    assert critic.advantages("a", list(turns.values())) == [0.5, 2.0, -0.5]
    pair = TurnPair([turns["b0"], turns["b1"]], [turns["w0"]])
    margin = 0.1 * (0.5 + 2.0 + 0.5)
    (preference,) = critic.compare("a", [pair])
    assert BETA == 0.1 and preference.margin == pytest.approx(margin)
    assert preference.loss == pytest.approx(math.log(1.0 + math.exp(-margin)))

    # One pair of three rows: +-0.1 sigmoid(-0.3) * 3, which the learner divides by 3 rows and the tokens of each.
    critic.update("a", [pair])
    assert [row.id for row in learner.updated] == ["b0", "b1", "w0"]
    expected = 0.3 / (1.0 + math.exp(margin))
    assert [row.advantage for row in learner.updated] == pytest.approx([expected, expected, -expected])


def test_loss_and_gradient_are_those_of_the_formula(base: str) -> None:
    """Against the loss written with plain forward passes, after the critic has moved."""
    from transformers import AutoModelForCausalLM

    settings = change(FAST, grad_clip=0.0, mini_batch=ANY_NUMBER)
    learner = LocalLearner.open(base, policies_for("full", ["a"], LoraSpec()), settings, TURN_CRITIC)
    rows: list[TrainRow] = []
    for i, whole in enumerate(make_rows(groups=4, k=2)):
        response = whole.response_ids[: 1 + i % 3]
        rows.append(msgspec.structs.replace(whole, response_ids=response, logprobs=(0.0,) * len(response)))
    pairs = [TurnPair(rows[:2], rows[2:3]), TurnPair(rows[3:4], rows[4:8])]
    critic = TurnCritic(learner)
    critic.start("a", rows)
    reference, network = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    critic.update("a", pairs)
    for name, parameter in network.named_parameters():
        parameter.data.copy_(torch.from_numpy(snapshot(learner, "a")[name]))

    def advantage(row: TrainRow) -> torch.Tensor:
        ids, start = torch.tensor([*row.prompt_ids, *row.response_ids]), len(row.prompt_ids)

        def logprobs(model: Any) -> torch.Tensor:
            return model(ids[None]).logits[0].log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])

        with torch.no_grad():
            before = logprobs(reference)
        return (logprobs(network) - before).mean()

    sums = [[sum(advantage(row) for row in side) for side in pair] for pair in pairs]
    margins = BETA * torch.stack([cast(Any, better) - cast(Any, worse) for better, worse in sums])
    expected = -torch.nn.functional.logsigmoid(margins).mean()
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in network.parameters() if p.grad is not None])

    assert float(margins.detach().abs().min()) > 1e-4
    losses = [pair.loss for pair in critic.compare("a", pairs)]
    assert np.mean(losses) == pytest.approx(float(expected.detach()), abs=1e-6)
    norms: list[float] = []
    inner = learner.update

    def update(policy: str, rows: Sequence[TrainRow], **more: Any) -> Mapping[str, float]:
        found = inner(policy, rows, **more)
        norms.append(found["grad_norm"])
        assert found["steps"] == 1.0
        return found

    learner.update = update  # type: ignore[method-assign]
    critic.update("a", pairs)
    assert norms == [pytest.approx(float(norm), rel=1e-3)]


# Pairs and turns


def test_the_best_episode_of_a_task_is_paired_with_the_worst() -> None:
    tasks = dict.fromkeys("abcde", "q") | {"f": "r", "g": "r", "h": "s", "i": "s"}
    outcomes = {"a": 0.5, "b": 1.0, "c": 0.0, "d": 0.75, "e": 0.25, "f": 1.0, "g": 1.0, "h": 1.0}
    # b 1 with c 0, d 0.75 with e 0.25; a is in the middle, f and g are equal, i has no outcome
    assert pair_episodes(list(tasks), tasks, outcomes) == [("b", "c"), ("d", "e")]


def test_a_step_has_whole_pairs_and_each_pass_has_all_of_them() -> None:
    turns = {EpisodePair(name, "w"): 3 for name in "abcd"} | {EpisodePair("e", "w"): 9}
    for seed in (0, 1):
        batches = list(critic_batches(turns, turns_per_batch=6, seed=seed))
        assert all(len(batch) == 1 or sum(turns[pair] for pair in batch) <= 6 for batch in batches)
        names = [pair.better for batch in batches for pair in batch]
        assert len(names) == 20
        assert all(sorted(names[i : i + 5]) == list("abcde") for i in (0, 5, 10, 15))


def test_turns_have_the_reference_and_shared_ones_cancel_out(tmp_path: Path, tiny_base: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        first = record(store, task("d"), [("w", "say d", ["d", "x"]), ("w", "more", "d")], 1.0)
        second = record(store, task("d"), [("w", "say d", ["d", "y"]), ("w", "more", "e"), ("v", "why", "z")], 0.5)
    chat = ChatTemplate.load(tiny_base)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        turns = read_turns(store, reading(chat))
    rows = turns.of([first.id], {"w": "w"})["w"]
    texts = [(chat.tokenizer.decode(row.prompt_ids), chat.tokenizer.decode(row.response_ids)) for row in rows]
    say = "<u>say d  reference: d<end><a>"  # the tiny tokenizer has no line break: both are spaces
    assert texts == [(say, "d<end>"), (say, "x<end>"), ("<u>more  reference: d<end><a>", "d<end>")]
    assert [row.advantage for row in rows] == [1.0, 0.0, 1.0]

    # The first answer is the same in both episodes; v acts only in the second.
    pair = EpisodePair(first.id, second.id)
    of_policy = turn_pairs(turns, [pair], {"w": "w", "v": "v"})
    assert count_turns(turns, [pair], {"w": "w", "v": "v"}) == {"w": {pair: 2}, "v": {pair: 1}}
    answers = {
        policy: [[chat.tokenizer.decode(row.response_ids) for row in side] for side in pair]
        for policy, (pair,) in of_policy.items()
    }
    assert answers == {"w": [["d<end>"], ["e<end>"]], "v": [[], ["z<end>"]]}


# Runs

LETTERS = "abcdef"
EPISODES = 32


def recorded_team(folder: Path, letters: str = LETTERS) -> dict[str, tuple[str, str, bool]]:
    """Episodes of each task, in which a writer answers twice; the outcome is the share of right answers. Returns
    the task, the text, and whether it went on, of each candidate."""
    draw = random.Random(0)
    candidates: dict[str, tuple[str, str, bool]] = {}
    with SqliteStore.open(folder) as store:
        for letter in letters:
            for _ in range(EPISODES):
                turns: list[tuple[str, str, Sequence[str]]] = []
                for request in (f"say {letter}", f"again {letter}"):
                    wrong = draw.sample([other for other in LETTERS if other != letter], 3)
                    texts = [letter, *wrong]
                    draw.shuffle(texts)
                    if draw.random() < 0.3:  # so that about half of the chosen answers are right
                        texts.sort(key=lambda text: text != letter)
                    turns.append(("writer", request, texts))
                share = sum(texts[0] == letter for _, _, texts in turns) / 2
                live = record(store, task(letter), turns, share)
                store.flush()
                for call in store.calls(live.id):
                    for candidate in call.candidates:
                        name = candidate_id(call.id, candidate.index)
                        candidates[name] = (letter, candidate.text, candidate.index == 0)
    return candidates


async def writer(task: dict[str, str]) -> float:
    said = await ask("writer", f"say {task['letter']}", max_tokens=2)
    again = await ask("writer", f"again {task['letter']}", max_tokens=2)
    return ((said == task["letter"]) + (again == task["letter"])) / 2


def preferences_of(run: Path, base: Path) -> tuple[float, float]:
    """How often the right answer to a request is likelier than a wrong one, untrained and as the run has trained it."""
    chat = ChatTemplate.load(base)
    rows: list[TrainRow] = []
    for letter in LETTERS:
        for request in (f"say {letter}", f"again {letter}"):
            prompt = tuple(chat.render(asked(request), None))
            for text in LETTERS:
                ids = (*chat.tokenizer.encode(text, add_special_tokens=False), chat.end_token_ids[0])
                name = "right" if text == letter else "wrong"
                rows.append(TrainRow(id=name, role="writer", prompt_ids=prompt, response_ids=ids, logprobs=(0.0, 0.0),
                                     advantage=0.0))  # fmt: skip
    learner = LocalLearner.open(str(base), policies_for("full", ["writer"], LoraSpec()), FAST, TURN_CRITIC)

    def preferred() -> float:
        sums = [float(values.sum()) for values in learner.logprobs("writer", rows)]
        wins: list[bool] = []
        for first in range(0, len(rows), len(LETTERS)):
            of_request = range(first, first + len(LETTERS))
            (right,) = [sums[i] for i in of_request if rows[i].id == "right"]
            wins += [right > sums[i] for i in of_request if rows[i].id == "wrong"]
        return float(np.mean(wins))

    before = preferred()
    (policy,) = latest_policies(run)
    assert policy.weights is not None
    learner.adopt("writer", policy.weights)
    return before, preferred()


def test_a_run_learns_the_answers_that_its_critic_prefers(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_critic, "PASSES", 16)  # the model knows nothing, not even that answers repeat prompts
    candidates = recorded_team(tmp_path / "records")
    settings: dict[str, Any] = {
        "policies": "full",
        "steps": 12,
        "tasks_per_step": 24,
        "learner": {"lr": 1e-3, "mini_batch": 16},
    }
    app = application(writer)
    trainer(app, None, recipe="sweet_rl", records=str(tmp_path / "records"), **settings)
    said = " ".join(trainer.said.split())
    assert "critic of writer: the better of two episodes has the larger sum of turn advantages in " in said

    # The outcome is of two answers together, and the critic tells which of them was right.
    run = trainer.folder / "run"
    scores = load_labels(run / "turn_advantages.jsonl")
    assert scores.keys() == candidates.keys()
    right = [scores[name] for name, (letter, text, _) in candidates.items() if text == letter]
    wrong = [scores[name] for name, (letter, text, _) in candidates.items() if text != letter]
    ranked = np.mean([[one > other for other in wrong] for one in right])
    assert ranked > 0.9, f"{ranked}: of two candidates the right one has the larger advantage"

    # The policy, which sees no reference, prefers the right answers too.
    before, after = preferences_of(run, trainer.base)
    assert after > 0.65 and after > before + 0.15, (before, after)  # about 0.73 and 0.48

    # A resumed run keeps the advantages.
    before = (run / "turn_advantages.jsonl").read_bytes()
    trainer.resume(app, None, steps=13)
    assert (run / "turn_advantages.jsonl").read_bytes() == before
    assert len(trainer.metrics()) == 13 and "critic" not in trainer.said


def test_records_without_a_reference_or_a_difference_are_refused(trainer: Trainer, tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "blind") as store:
        record(store, {"id": "a", "letter": "a"}, [("first", "say a", "a")], 1.0)
    with pytest.raises(
        ConfigError, match=r"recipe = 'sweet_rl' has a critic that reads .*`reference`.* task a has None"
    ):
        trainer(application(converse), None, recipe="sweet_rl", records=str(tmp_path / "blind"))
    with SqliteStore.open(tmp_path / "same") as store:
        for text in "bc":
            record(store, task("a"), [("first", "say a", text)], 1.0)
    with pytest.raises(RecordError, match="'first' has no turns in two episodes of one task with different outcomes"):
        trainer(application(converse), None, to="equal", recipe="sweet_rl", records=str(tmp_path / "same"))
    with pytest.raises(ConfigError, match=r"records.labels = 'x' cannot be used with recipe sweet_rl. Use dpo"):
        trainer(application(converse), None, recipe="sweet_rl", records={"path": "x", "labels": "x"})
