"""Recipe sweet_rl (SWEET-RL, arXiv 2503.15478): a critic gives each recorded candidate the advantage of its turn.

The critic is a copy of each policy that reads the task's `reference` too. It is trained on pairs of episodes: the turn
advantages of the episode with the better outcome must have the larger sum (`algorithms.from_records`). Then it scores
all recorded candidates, and the policies learn from the best and the worst candidate of each turn, as in recipe dpo.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from cotune.algorithms.from_records import Preference, preference_losses
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, RecordError, RequestRefused, SamplerError
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate, Task
from cotune.sampling.request_params import template_options, tools_shown
from cotune.storage.protocol import Store
from cotune.trainer.learner.protocol import Learner
from cotune.trainer.privileged import with_text
from cotune.trainer.records.answers import call_fault, counts_text, learned_from
from cotune.trainer.records.lessons import Reader, Readers, Recorded, Rows
from cotune.trainer.records.objectives import BETA
from cotune.trainer.records.pairs import StoredAnswer, token_ids_of

T = TypeVar("T")
REFERENCE = "reference"
"""The field of each task that the critic reads and the policy does not."""
PASSES = 4
"""How often the critic is trained on each pair of episodes: `max_epochs` in the authors' script."""
AT_ONCE = 32
"""Episodes (or pairs of them) whose rows are in memory at the same time."""
ROUNDING = 1e-9
"""Sums of outcomes that differ by less count as equal."""
ANY_NUMBER = 2**31
"""The size of a mini-batch of the critic's learner. It has no limit, because an optimizer step has whole pairs of
episodes."""


TurnKey = tuple[tuple[int, ...], tuple[bytes, ...], tuple[int, ...]]
"""The prompt of a turn, its images, and the answer. Equal turns have equal keys."""


class EpisodePair(NamedTuple):
    """Two episodes of a task, by their ids. The first has the better outcome."""

    better: str
    worse: str


class TurnPair(NamedTuple):
    """The turns of one policy in a pair of episodes."""

    better: Sequence[TrainRow]
    worse: Sequence[TrainRow]

    @property
    def rows(self) -> list[TrainRow]:
        return [*self.better, *self.worse]


def read_turns(store: Store, readers: Readers) -> Recorded:
    """Return all recorded candidates as rows whose prompt also has the task's reference. `advantage` is 1 for the
    candidate that the application got, and 0 for the others.

    Episodes of tasks without a reference are left out. Raises ConfigError if no task has one, and RecordError if there
    is no candidate.
    """
    left_out: Counter[str] = Counter()
    rows = Rows()
    tasks: dict[str, str] = {}
    any_reference = False
    for episode in learned_from(store, left_out):
        reference = _reference(episode.task)
        if not reference:
            left_out["no_reference"] += episode.calls
            continue
        any_reference = True
        rows_of_roles: dict[str, list[TrainRow]] = {}
        for call in store.calls(episode.id):
            if fault := call_fault(call):
                left_out[fault] += max(1, len(call.candidates))
                continue
            for candidate in call.candidates:
                row = _row(store, readers(call.role), call, candidate, f"{REFERENCE}: {reference}")
                if isinstance(row, str):  # the reason why there is none
                    left_out[row] += 1
                else:
                    rows_of_roles.setdefault(call.role, []).append(row)
        if rows_of_roles:
            rows.add(episode.id, rows_of_roles)
            tasks[episode.id] = episode.task.id
    if left_out["no_reference"] and not any_reference:
        raise ConfigError(
            "recipe",
            "sweet_rl",
            f"has a critic that reads the text `{REFERENCE}` of each task, and no recorded task has one",
            f"Add `{REFERENCE}` to each line of the tasks file and record again, or use recipe dpo.",
        )
    if not rows:
        raise RecordError(
            f"There is no candidate to score ({counts_text(left_out) or 'no answers'}).",
            "Record more with cotune trace.",
        )
    return Recorded(rows=rows, tasks=tasks, left_out=left_out)


def _reference(task: Task) -> str:
    """Return the reference of a task, which the critic reads; an empty text if it has none."""
    if not isinstance(task.input, Mapping):
        return ""
    reference = task.input.get(REFERENCE)
    return reference if isinstance(reference, str) else ""


def tasks_with_reference(store: Store) -> set[str]:
    """Return the ids of the recorded tasks that the critic can read. Its rows and the pairs of the policy hold out a
    part of these."""
    tasks: set[str] = set()
    for episode in learned_from(store, Counter()):
        if _reference(episode.task):
            tasks.add(episode.task.id)
    return tasks


def opposed_roles(store: Store, roles: Collection[str]) -> list[str]:
    """Return the roles that play against each other. Each has an outcome of its own, in an episode their outcomes
    differ, and the outcomes always add up to the same number."""
    roles_with_outcome: set[str] = set()
    sums: list[float] = []
    any_differ = False
    finished = [episode.id for episode in learned_from(store, Counter()) if episode.status == "ok"]
    for rewards in store.rewards(finished).values():
        outcomes = {name: value for name, value in rewards.items() if name in roles}
        if len(outcomes) < 2:
            continue
        roles_with_outcome |= outcomes.keys()
        sums.append(sum(outcomes.values()))
        if len(set(outcomes.values())) > 1:
            any_differ = True
    if not any_differ or len(sums) < 2:
        return []
    is_constant_sum = max(sums) - min(sums) <= ROUNDING
    return sorted(roles_with_outcome) if is_constant_sum else []


def _row(store: Store, reader: Reader, call: CallRecord, candidate: Candidate, hint: str) -> TrainRow | str:
    """Return the row of a candidate, with `hint` in the prompt, or the reason why there is none."""
    chat = reader.chat
    ids = token_ids_of(store, chat, StoredAnswer(call, candidate))
    if isinstance(ids, str):
        return ids
    try:
        messages = with_text([store.message(id) for id in call.messages_out], hint)
        tools = store.message(call.tools_out) if call.tools_out else None
        prompt = chat.render(messages, tools_shown(call.params, tools), options=template_options(call.params) or None)
        images = chat.images(messages)
    except RecordError:
        return "lost_message"
    except (SamplerError, RequestRefused):
        return "unrenderable"
    if len(prompt) + len(ids.answer) > reader.longest:
        return "too_long"
    return TrainRow(
        id=candidate_id(call.id, candidate.index),
        role=call.role,
        prompt_ids=tuple(prompt),
        response_ids=ids.answer,
        logprobs=(0.0,) * len(ids.answer),
        advantage=float(candidate.index == call.chosen),
        trajectory=call.episode,
        images=images,
    )


def pair_episodes(
    episodes: Sequence[str], tasks: Mapping[str, str], outcomes: Mapping[str, float]
) -> list[EpisodePair]:
    """Pair the best with the worst episode of each task, the second best with the second worst, and so on, as long as
    their outcomes differ. `tasks` and `outcomes` are by episode."""
    episodes_of_task: dict[str, list[str]] = defaultdict(list)
    for episode in episodes:
        if episode in outcomes:
            episodes_of_task[tasks[episode]].append(episode)
    pairs: list[EpisodePair] = []
    for same_task in episodes_of_task.values():
        worst_first = sorted(same_task, key=lambda episode: outcomes[episode])
        for rank in range(len(worst_first) // 2):
            worse = worst_first[rank]
            better = worst_first[-1 - rank]  # the same rank from the other end
            if outcomes[worse] < outcomes[better]:
                pairs.append(EpisodePair(better, worse))
    return pairs


def turn_pairs(turns: Recorded, pairs: Sequence[EpisodePair], players: Mapping[str, str]) -> dict[str, list[TurnPair]]:
    """Return the turns of each policy in pairs of episodes. `players` are the trained roles, each with its policy.

    Only answers that the application got count. Turns that are the same in both episodes, such as the beginning that
    two branches of a replay share, cancel out one by one and are left out.
    """
    pairs_of_policy: dict[str, list[TurnPair]] = defaultdict(list)
    for better, worse in pairs:
        better_rows = turns.of([better], players)
        worse_rows = turns.of([worse], players)
        for policy in dict.fromkeys([*better_rows, *worse_rows]):
            # `read_turns` gives other candidates than the one that the application got the advantage 0.
            better_turns = [row for row in better_rows.get(policy, ()) if row.advantage]
            worse_turns = [row for row in worse_rows.get(policy, ()) if row.advantage]
            shared = Counter(map(_turn_key, better_turns)) & Counter(map(_turn_key, worse_turns))
            pair = TurnPair(_drop_turns(better_turns, shared), _drop_turns(worse_turns, shared))
            if pair.rows:
                pairs_of_policy[policy].append(pair)
    return dict(pairs_of_policy)


def _turn_key(row: TrainRow) -> TurnKey:
    return row.prompt_ids, row.images, row.response_ids


def _drop_turns(turns: Sequence[TrainRow], shared: Counter[TurnKey]) -> list[TrainRow]:
    """Return the turns without the shared ones. `shared` says how often each of these is dropped."""
    remaining = Counter(shared)
    others: list[TrainRow] = []
    for turn in turns:
        key = _turn_key(turn)
        if remaining[key] > 0:
            remaining[key] -= 1
        else:
            others.append(turn)
    return others


def count_turns(
    turns: Recorded, pairs: Sequence[EpisodePair], players: Mapping[str, str]
) -> dict[str, dict[EpisodePair, int]]:
    """Return the number of turns that each policy has in the pairs of episodes. Pairs without any are left out."""
    counts_of_policy: dict[str, dict[EpisodePair, int]] = defaultdict(dict)
    for pair in pairs:
        for policy, pairs_of_turns in turn_pairs(turns, [pair], players).items():
            [pair_of_turns] = pairs_of_turns  # one pair of episodes gives one pair of turns
            counts_of_policy[policy][pair] = len(pair_of_turns.rows)
    return dict(counts_of_policy)


def policies_with_choice(turns: Recorded, players: Mapping[str, str]) -> set[str]:
    """Return the policies that have two different candidates for some prompt of a task, so that one can be better."""
    # The first answer to each prompt. Hashes stand for both, because there may be many long prompts.
    first_answers: dict[int, int] = {}
    policies: set[str] = set()
    for episode in turns.rows:
        for policy, rows in turns.of([episode], players).items():
            for row in rows:
                prompt = hash((turns.tasks[episode], row.role, row.prompt_ids, row.images))
                answer = hash(row.response_ids)
                if first_answers.setdefault(prompt, answer) != answer:
                    policies.add(policy)
    return policies


class TurnCritic:
    """Critics of several policies, in a learner with the loss `TURN_CRITIC` and mini-batches of any number of rows."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._start: dict[str, float] = {}
        """Mean log pi_ref of the tokens of each row, in nats."""

    def start(self, policy: str, rows: Sequence[TrainRow]) -> None:
        """Store the log-probabilities of these rows under the initial weights, which are pi_ref."""
        for row, mean in zip(rows, self._mean_logprobs(policy, rows), strict=True):
            self._start[row.id] = mean

    def advantages(self, policy: str, rows: Sequence[TrainRow]) -> list[float]:
        """Return the advantage of each turn: the mean of log pi_critic - log pi_ref over its tokens, in nats."""
        means = self._mean_logprobs(policy, rows)
        return [mean - self._start[row.id] for row, mean in zip(rows, means, strict=True)]

    def update(self, policy: str, pairs: Sequence[TurnPair], *, lr_scale: float = 1.0) -> float:
        """Take an optimizer step on the mean loss of these pairs. Returns this loss, from before the step."""
        preferences = self.compare(policy, pairs)
        # The loss weights each token by 1 / (pairs * tokens of its row), and the learner by 1 / (rows * tokens of its
        # row). The advantages make up for the difference. `preference_losses` expects the learner's weights, but for
        # pairs of two rows, so its factor of two is taken out.
        rows_per_pair = sum(len(pair.rows) for pair in pairs) / len(pairs)
        weighted: list[TrainRow] = []
        for pair, preference in zip(pairs, preferences, strict=True):
            advantage = preference.advantage / 2.0 * rows_per_pair
            weighted += [msgspec.structs.replace(row, advantage=advantage) for row in pair.better]
            weighted += [msgspec.structs.replace(row, advantage=-advantage) for row in pair.worse]
        self._learner.update(policy, weighted, lr_scale=lr_scale)
        return fmean(preference.loss for preference in preferences)

    def compare(self, policy: str, pairs: Sequence[TurnPair]) -> list[Preference]:
        """Return the Bradley-Terry loss of each pair, from the sums of its turn advantages."""
        # The advantages of all turns are computed at once: for each pair the better turns, then the worse ones.
        all_rows: list[TrainRow] = []
        for pair in pairs:
            all_rows += pair.rows
        advantages = self.advantages(policy, all_rows)
        better_sums: list[float] = []
        worse_sums: list[float] = []
        start = 0
        for pair in pairs:
            middle = start + len(pair.better)
            end = middle + len(pair.worse)
            better_sums.append(sum(advantages[start:middle]))
            worse_sums.append(sum(advantages[middle:end]))
            start = end
        return preference_losses(better_sums, worse_sums, BETA)

    def _mean_logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[float]:
        """Return the mean log-probability of each row's response tokens under the present weights."""
        return [float(logprobs.mean(dtype=np.float64)) for logprobs in self._learner.logprobs(policy, rows)]


def critic_passes(
    turns: Mapping[EpisodePair, int], turns_per_batch: int, seed: int
) -> Iterator[list[list[EpisodePair]]]:
    """Yield the batches of each of `PASSES` passes over all pairs, one batch for an optimizer step. Each pass is in
    another order.

    `turns` has the number of turns of each pair. A batch has at most `turns_per_batch` turns, or a single pair.
    """
    generator = random.Random(f"turn critic {seed}")
    for _ in range(PASSES):
        batches: list[list[EpisodePair]] = []
        turns_of_batch = 0
        for pair in generator.sample(list(turns), len(turns)):
            if not batches or turns_of_batch + turns[pair] > turns_per_batch:
                batches.append([])
                turns_of_batch = 0
            batches[-1].append(pair)
            turns_of_batch += turns[pair]
        yield batches


async def score_turns(
    critic: TurnCritic,
    turns: Recorded,
    players: Mapping[str, str],
    pairs: Mapping[str, Mapping[EpisodePair, int]],
    turns_per_step: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Train the critic of each policy on its pairs, and return the turn advantages of all candidates, by their id.

    `players` are the roles to score, each with its policy. `pairs` has, for each policy, its pairs with their number of
    turns. An optimizer step has about `turns_per_step` turns. `say` gets the loss of each pass.
    """
    # Store the log-probabilities of all candidates under the initial weights.
    for episodes in _chunks(list(turns.rows)):
        for policy, rows in turns.of(episodes, players).items():
            await asyncio.to_thread(critic.start, policy, rows)

    # Train the critics.
    for policy, turns_of_pair in pairs.items():
        for number, batches in enumerate(critic_passes(turns_of_pair, turns_per_step, seed), start=1):
            loss_sum = 0.0
            for batch in batches:
                pairs_of_turns = turn_pairs(turns, batch, players)[policy]
                loss_sum += len(batch) * await asyncio.to_thread(critic.update, policy, pairs_of_turns)
            say(f"critic of {policy}: pass {number} of {PASSES}, loss {loss_sum / len(turns_of_pair):.4f}")

    # Score all candidates.
    scores: dict[str, float] = {}
    for episodes in _chunks(list(turns.rows)):
        for policy, rows in turns.of(episodes, players).items():
            advantages = await asyncio.to_thread(critic.advantages, policy, rows)
            for row, advantage in zip(rows, advantages, strict=True):
                scores[row.id] = advantage
    return scores


def accuracy(
    critic: TurnCritic, policy: str, turns: Recorded, pairs: Collection[EpisodePair], players: Mapping[str, str]
) -> float:
    """Return the share of pairs whose better episode has the larger sum of turn advantages."""
    correct = 0
    for chunk in _chunks(list(pairs)):
        preferences = critic.compare(policy, turn_pairs(turns, chunk, players)[policy])
        correct += sum(preference.margin > 0 for preference in preferences)
    return correct / len(pairs)


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield `AT_ONCE` items at a time."""
    for first in range(0, len(items), AT_ONCE):
        yield items[first : first + AT_ONCE]
