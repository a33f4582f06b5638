"""Recipe sweet_rl: the loss of its critic, which episodes are pairs, and a run that learns from its turn advantages."""

from __future__ import annotations

import gc
import math
import random
import re
import weakref
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
from cotune.trainer.records.lessons import Recorded, Rows, split_episodes
from cotune.trainer.records.objectives import BETA
from cotune.trainer.records.turn_critic import (
    ANY_NUMBER,
    EpisodePair,
    TurnCritic,
    TurnPair,
    count_turns,
    critic_passes,
    opposed_roles,
    pair_episodes,
    read_turns,
    tasks_with_reference,
    turn_pairs,
)
from tests.trainer.conftest import Trainer
from tests.trainer.learner.learner_rows import FAST, change, make_rows, snapshot
from tests.trainer.records.records import asked, reading, said
from tests.trainer.tiny_app import application, ask, converse

Turns = Sequence[tuple[str, str, str | Sequence[str]]]
"""Of each call: its role, the request, and its candidates, of which the first goes on."""


def record(
    store: SqliteStore, task: Mapping[str, Any], turns: Turns, outcome: float | Mapping[str, float]
) -> LiveEpisode:
    live = LiveEpisode(store, Task(id=str(task["id"]), input=dict(task)), workflow="w", phase="trace")
    for role, request, texts in turns:
        candidates = tuple(said(text, i) for i, text in enumerate([texts] if isinstance(texts, str) else texts))
        live.start(CallerContext(role, "test"), {"messages": asked(request)}).finish(Answer(candidates=candidates))
    live.end("ok", rewards=outcome if isinstance(outcome, Mapping) else {"team": outcome})
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
    assert critic.update("a", [pair]) == pytest.approx(preference.loss)
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
        passes = list(critic_passes(turns, turns_per_batch=6, seed=seed))
        assert len(passes) == 4
        batches = [batch for of_pass in passes for batch in of_pass]
        assert all(len(batch) == 1 or sum(turns[pair] for pair in batch) <= 6 for batch in batches)
        for of_pass in passes:
            names = [pair.better for batch in of_pass for pair in batch]
            assert sorted(names) == list("abcde")


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


def turn(episode: str, place: int, text: str, image: bytes = b"") -> TrainRow:
    """A turn of role w with the same prompt in all episodes; `text` is its answer."""
    images = (image,) if image else ()
    ids = tuple(text.encode())
    return msgspec.structs.replace(row(f"{episode}{place}", 1), role="w", response_ids=ids, images=images)


def test_shared_turns_cancel_out_one_by_one_and_with_their_images() -> None:
    turns = {
        "better": [turn("b", 0, "x"), turn("b", 1, "x"), turn("b", 2, "y", b"cat")],
        "worse": [turn("w", 0, "x"), turn("w", 1, "y", b"dog")],
    }
    rows = Rows()
    for episode, of_episode in turns.items():
        rows.add(episode, {"w": of_episode})
    recorded = Recorded(rows=rows, tasks=dict.fromkeys(turns, "t"), left_out={})
    (pair,) = turn_pairs(recorded, [EpisodePair("better", "worse")], {"w": "w"})["w"]
    assert [row.id for row in pair.better] == ["b1", "b2"]
    assert [row.id for row in pair.worse] == ["w1"]


def test_tasks_without_a_reference_are_left_out_and_counted(tmp_path: Path, tiny_base: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        blind = record(store, {"id": "a", "letter": "a"}, [("w", "say a", "a"), ("w", "more", "a")], 1.0)
        seen = record(store, task("b"), [("w", "say b", "b")], 1.0)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        turns = read_turns(store, reading(ChatTemplate.load(tiny_base)))
        assert tasks_with_reference(store) == {"b"}
    assert list(turns.rows) == [seen.id] and blind.id not in turns.tasks
    assert turns.left_out == {"no_reference": 2}


def test_the_critic_and_the_pairs_hold_out_the_same_tasks() -> None:
    """The pairs are of fewer tasks than the turns of the critic."""
    all_tasks = [f"t{i}" for i in range(40)]

    def held_out(tasks: Sequence[str], seed: int) -> set[str]:
        rows = Rows()
        for name in tasks:
            rows.add(name, {"w": [row(name, 1)]})
        recorded = Recorded(rows=rows, tasks={name: name for name in tasks}, left_out={})
        learned, held, note = split_episodes(recorded, seed, all_tasks)
        assert {*learned, *held} == set(tasks) and bool(note) == (not held)
        return set(held)

    for seed in range(5):
        of_critic = held_out(all_tasks, seed)
        assert len(of_critic) == 4
        fewer = all_tasks[::2]
        assert held_out(fewer, seed) == of_critic & set(fewer)


def outcomes_of(folder: Path, *rewards: Mapping[str, float]) -> list[str]:
    with SqliteStore.open(folder) as store:
        for of_episode in rewards:
            live = LiveEpisode(store, Task(id="a", input=task("a")), workflow="w", phase="trace")
            live.end("ok", rewards=of_episode)
    with SqliteStore.open(folder, read_only=True) as store:
        return opposed_roles(store, ["white", "black"])


def test_roles_are_opposed_if_their_outcomes_always_add_up_to_the_same(tmp_path: Path) -> None:
    won, lost, drawn = ({"white": 1.0, "black": 0.0}, {"white": 0.0, "black": 1.0}, {"white": 0.5, "black": 0.5})
    assert outcomes_of(tmp_path / "game", won, lost, drawn) == ["black", "white"]
    assert outcomes_of(tmp_path / "draws", drawn, drawn) == []
    assert outcomes_of(tmp_path / "team", won, lost, {"white": 1.0, "black": 1.0}) == []
    assert outcomes_of(tmp_path / "names", {"speed": 1.0, "cost": 0.0}, {"speed": 0.0, "cost": 1.0}) == []


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
    losses = [float(loss) for loss in re.findall(r"critic of writer: pass \d+ of 16, loss ([\d.]+)", said)]
    assert len(losses) == 16 and losses[-1] < losses[0]

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


def test_a_policy_without_pairs_is_not_trained_and_the_others_are(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the critic starts from --init, and its weights are gone before the policy's learner opens."""
    networks: list[weakref.ref[Any]] = []
    alive: list[int] = []
    open_learner = LocalLearner.open

    def noted(*args: Any, **more: Any) -> LocalLearner:
        alive.append(sum(network() is not None for network in networks))
        learner = open_learner(*args, **more)
        networks.extend(weakref.ref(model.network) for model in learner._policies.values())
        return learner

    monkeypatch.setattr(LocalLearner, "open", noted)
    with SqliteStore.open(tmp_path / "records") as store:
        for share, text in ((1.0, "a"), (0.0, "b")):
            record(store, task("a"), [("first", "say a", [text, "c"]), ("second", "why", "d")], share)
    policies = [{"name": name, "roles": [role], "kind": "full"} for name, role in (("w", "first"), ("v", "second"))]
    settings: dict[str, Any] = {"recipe": "sweet_rl", "records": str(tmp_path / "records"), "steps": 1}
    gc.disable()  # only the collection between both learners counts
    try:
        trainer(application(converse), None, policy=policies, **settings)
    finally:
        gc.enable()
    assert alive == [0, 0] and len(networks) == 2 + 1
    said = " ".join(trainer.said.split())
    assert "no critic for a policy, whose candidates get no label: v has no turns in two episodes" in said
    assert "not trained, because their candidates give no pair: second" in said
    assert "no_label: 2" in said
    (line,) = trainer.metrics()
    assert list(line["policies"]) == ["w"] and line["updated"]
    trainer.resume(application(converse), None, steps=2)
    assert len(trainer.metrics()) == 2

    # The critic starts from the weights of --init too: its first loss is that of equal weights.
    adopted: list[str] = []
    adopt = LocalLearner.adopt

    def adopt_noted(learner: LocalLearner, policy: str, weights: Any) -> None:
        adopted.append(policy)
        adopt(learner, policy, weights)

    monkeypatch.setattr(LocalLearner, "adopt", adopt_noted)
    init = str(trainer.folder / "run")
    trainer(application(converse), None, to="warm", policy=policies, init=init, **settings)
    assert adopted.count("w") == 2


def test_records_without_a_reference_or_a_difference_are_refused(trainer: Trainer, tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "blind") as store:
        record(store, {"id": "a", "letter": "a"}, [("first", "say a", "a")], 1.0)
    with pytest.raises(
        ConfigError, match=r"recipe = 'sweet_rl' has a critic that reads .*`reference`.* no recorded task has one"
    ):
        trainer(application(converse), None, recipe="sweet_rl", records=str(tmp_path / "blind"))
    with SqliteStore.open(tmp_path / "same") as store:
        for text in "bc":
            record(store, task("a"), [("first", "say a", text)], 1.0)
    with pytest.raises(RecordError, match="first has no turns in two episodes of one task with different outcomes"):
        trainer(application(converse), None, to="equal", recipe="sweet_rl", records=str(tmp_path / "same"))
    with SqliteStore.open(tmp_path / "single") as store:
        for i in range(2):
            record(store, task("a"), [("first", f"say {'ab'[i]}", "a")], float(i))
    with pytest.raises(RecordError, match="sweet_rl can train no policy: first has no two different candidates"):
        trainer(application(converse), None, to="one", recipe="sweet_rl", records=str(tmp_path / "single"))
    with SqliteStore.open(tmp_path / "game") as store:
        for won in (0.0, 1.0):
            turns = [("first", "say a", ["a", "b"]), ("second", "say a", ["a", "b"])]
            record(store, task("a"), turns, {"first": won, "second": 1.0 - won})
    with pytest.raises(
        ConfigError, match=r"first, second always add up to the same number: .* play against each other"
    ):
        trainer(application(converse), None, to="duel", recipe="sweet_rl", records=str(tmp_path / "game"))
    with pytest.raises(ConfigError, match=r"records.labels = 'x' cannot be used with recipe sweet_rl. Use dpo"):
        trainer(application(converse), None, recipe="sweet_rl", records={"path": "x", "labels": "x"})
