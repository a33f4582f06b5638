"""Compare a judge, or any scorer, with people's preferences, given as labels of recorded candidates and episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import msgspec

from cotune.episodes.rescore import score_calls
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, load_workflow
from cotune.errors import ConfigError, WorkflowError
from cotune.judging.episodes import outcomes_of
from cotune.judging.labels import EXAMPLE, load_labels, read_labelled
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode, Task
from cotune.runtime.run_context import RunContext, current_run
from cotune.sampling.scoring import Scored
from cotune.storage.open_store import folder_of, open_store, without_password
from cotune.storage.protocol import Store
from cotune.storage.run_code import open_run_code, redactor_of
from cotune.storage.run_layout import is_run, known_workflow, read_run_json


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """In `alike` of `pairs` pairs of `groups` groups the rewards agree with people's preference; ties count half.
    `left_out` counts labels and groups that could not be compared, by reason."""

    groups: int
    pairs: int
    alike: float
    left_out: dict[str, int]

    @property
    def share(self) -> float:
        """Agreement from 0 to 1; chance is 0.5."""
        return self.alike / self.pairs


def judge_agreement(run: str | Path, labels: str | Path, app: str | None = None) -> Agreement:
    """Score the labelled candidates and episodes of a run, or of a records file, with the scorers and the judge of the
    workflow `app` (default: the one that was trained), and compare with the labels in a JSON-lines file.

    A labelled candidate is ranked among all candidates of its call, a labelled episode among those of its task that
    have labels. Raises ConfigError for labels that are broken, of unknown ids, or that leave nothing to compare.
    """
    label_of = load_labels(labels)
    if is_run(run):
        # The folder names code: its workflow, unless the user names one, and its redactor. Both need the user's trust.
        named_by_user = ["workflow"] if app else []
        open_run_code(run, named_by_user, only=("workflow", "redact"))
        app = app or known_workflow(read_run_json(run), Path(run).absolute())
    if app is None:
        fault = f"is missing: {without_password(run)} does not say which workflow it recorded"
        raise ConfigError("app", None, fault, "Pass --app app:solve.")
    folder = folder_of(run)
    workflow = load_workflow(app).redacted(redactor_of(folder))
    current_run.set(RunContext(folder=folder))  # judges keep their answers and costs here
    with open_store(run, read_only=True) as store:
        calls, episodes = read_labelled(store, label_of, str(labels))
        _require_scorers(workflow, calls, episodes)
        scores = run_sync(_score(workflow, store, calls, episodes))
    return _count_agreement(label_of, _groups(label_of, calls, episodes), scores, str(labels))


def count_pairs(labels: Sequence[float], rewards: Sequence[float]) -> tuple[float, int]:
    """Compare the order of one group's members by people's labels and by the scorer's rewards, pair by pair.

    Returns in how many pairs both prefer the same member, and the number of pairs. Equal rewards count as half a pair.
    Pairs with equal labels are left out: people have no preference there.
    """
    agreeing = 0.0
    pairs = 0
    for first, second in combinations(range(len(labels)), 2):
        label_difference = labels[first] - labels[second]
        reward_difference = rewards[first] - rewards[second]
        if label_difference == 0:
            continue
        pairs += 1
        if reward_difference == 0:
            agreeing += 0.5
        elif (reward_difference > 0) == (label_difference > 0):
            agreeing += 1.0
    return agreeing, pairs


def _require_scorers(workflow: Workflow, calls: Sequence[tuple[CallRecord, Task]], episodes: Sequence[Episode]) -> None:
    """Raise ConfigError if nothing in the workflow scores the labelled candidates or episodes."""
    for role in sorted({call.role for call, _ in calls} - workflow.scorers.keys()):
        roles_with_scorer = ", ".join(sorted(workflow.scorers)) or "none"
        raise ConfigError(
            "labels",
            role,
            f"is a role without a scorer; roles with one: {roles_with_scorer}",
            f"Add @{workflow.variable}.scorer({role!r}).",
        )
    if episodes and workflow.episode_judge is None:
        remedy = f"Add @{workflow.variable}.judge, or leave those labels out."
        raise ConfigError("labels", episodes[0].id, "is an episode, and the workflow has no judge of episodes", remedy)


async def _score(
    workflow: Workflow, store: Store, calls: Sequence[tuple[CallRecord, Task]], episodes: Sequence[Episode]
) -> dict[str, Scored | WorkflowError]:
    """The rewards of the labelled candidates and episodes, by id, or the error of the scorer or judge."""
    outcomes = await outcomes_of(workflow.episode_judge, store, episodes, redaction=workflow.redaction)
    return {**outcomes, **await score_calls(workflow, store, calls)}


def _groups(
    label_of: Mapping[str, float], calls: Sequence[tuple[CallRecord, Task]], episodes: Sequence[Episode]
) -> list[list[str]]:
    """The labelled candidates of each call, and the labelled episodes of each task."""
    groups: list[list[str]] = []
    for call, _ in calls:
        ids = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
        groups.append([id for id in ids if id in label_of])
    by_task: dict[str, list[str]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task.id, []).append(episode.id)
    return [*groups, *by_task.values()]


def _count_agreement(
    label_of: Mapping[str, float],
    groups: Sequence[Sequence[str]],
    scores: Mapping[str, Scored | WorkflowError],
    source: str,
) -> Agreement:
    """Compare labels and rewards within each group, and add up the pairs. `source` is the file of labels, for errors.

    Members without a reward and groups of one are counted by reason. Raises ConfigError if no pair is left.
    """
    left_out: Counter[str] = Counter()
    compared_groups = 0
    agreeing = 0.0
    pairs = 0
    for members in groups:
        rewarded: dict[str, float] = {}
        for member in members:
            score = scores.get(member)
            if isinstance(score, WorkflowError):
                left_out[str(score)] += 1
            elif score is not None and score.rewards:
                rewarded[member] = sum(score.rewards.values())
        if len(members) < 2:
            left_out["alone in its group"] += 1
        labels_of_members = [label_of[member] for member in rewarded]
        agreeing_in_group, pairs_in_group = count_pairs(labels_of_members, list(rewarded.values()))
        if pairs_in_group > 0:
            compared_groups += 1
        agreeing += agreeing_in_group
        pairs += pairs_in_group
    if not pairs:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in left_out.items()) or "no two labels differ"
        need = "a call needs two candidates, or a task two episodes, with different labels"
        fault = f"leaves nothing to compare: {need} ({reasons})"
        raise ConfigError("labels", source, fault, EXAMPLE)
    return Agreement(groups=compared_groups, pairs=pairs, alike=agreeing, left_out=dict(left_out))
