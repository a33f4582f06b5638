"""The training batch of a step: the samples of its episodes, grouped, and weighed by their advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cotune.algorithms.collect import Collected, collect
from cotune.algorithms.policy_recipes import prepare_each
from cotune.algorithms.prepare import Prepared, StepContext, train_rows
from cotune.algorithms.samples import TrainRow
from cotune.errors import GroupError
from cotune.integrations.models.folder.folder import context_length, locate_model
from cotune.records.structs import JUDGING, Episode
from cotune.storage.outcomes import failure_reward
from cotune.trainer.privileged import Hints, with_hints, with_privileged
from cotune.trainer.run.run import RolloutRun

UNEVENTFUL = (
    "no_signal", "zero_variance", "zero_advantage", "mean_out_of_range", "group_of_one", "truncated", "consumed",
    "opponent_failed", "frozen_step", "no_hint",
)  # fmt: skip
"""Reasons to leave out candidates that could have been trained on, which are no fault. A step in which one of them
occurs may have no row, and makes no update then."""
FAULTLESS = ("untrained_role", "not_chosen", "not_forked", "trunk")
"""Reasons to leave out candidates that are never trained on, which are no fault. A step with no other reasons had no
call of a trained role."""

NO_OUTCOME = "No episode of this step has an outcome, so nothing is learned from outcomes."
GIVE_OUTCOMES = "Have {name} return a number where it returns None, or add @{name}.judge"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of a step, and the rows that are trained on."""

    episodes: Sequence[Episode]
    collected: Collected
    prepared: Prepared
    rows: Mapping[str, Sequence[TrainRow]]
    """By policy, the rows of all roles that it plays. Policies without rows are left out."""
    versions: Mapping[str, int]
    """The version that each policy has before it is trained on the rows."""
    unknown: int
    """The number of episodes that ended without an error and have no outcome."""

    @property
    def left_out(self) -> Counter[str]:
        """The number of candidates that are not trained on, by reason."""
        return Counter(self.collected.left_out) + Counter(self.prepared.left_out)


def collect_samples(run: RolloutRun, episodes: Sequence[Episode], step: int | None = None) -> Collected:
    """Return the candidates of episodes that can be trained on in the present step, or in a later `step`.

    Samples that are too old are left out only in the present step, because the versions of a later step are not known.
    """
    roles = run.trained_roles(run.state.steps if step is None else step)
    recipes = {role: run.recipes.of(policy) for role, policy in roles.items()}
    return collect(
        run.store,
        episodes,
        plan=run.plan.kind,
        roles=roles,
        versions=run.state.versions if step is None else None,
        max_lag=run.config.ahead,
        on_failure=failure_reward(run.config.on_failure),
        method_of=recipes.get,
    )


def with_teacher_hints(run: RolloutRun, episodes: Sequence[Episode], collected: Collected) -> Hints:
    """Return the samples for self-distillation (`teacher_sees`), each with the prompt that its policy reads as its own
    teacher.

    That prompt is the sample's prompt with the hint added. It must fit into the context of the policy's base model.
    """
    policies = run.policies_at(run.state.steps)

    def context(policy: str) -> int:
        return context_length(locate_model(policies.specs[policy].model or run.config.model))

    return with_hints(collected, episodes, run.recipes, run.store, run.chats, context)


def group_and_weigh(run: RolloutRun, collected: Collected) -> Prepared:
    """Group the samples, and compute the advantage of each by the recipe of its policy."""
    return prepare_each(
        collected.samples,
        run.recipes,
        run.state.advantages,
        context=StepContext(
            consumed=run.store.consumed(),
            frozen=run.frozen(run.state.steps),
            task_weights=run.task_weights,
        ),
        others=collected.others,
    )


def make_batch(
    run: RolloutRun,
    episodes: Sequence[Episode],
    collected: Collected,
    prepared: Prepared,
    hints: Mapping[str, tuple[int, ...]],
) -> Batch:
    """Return the rows that each policy trains on, from weighed samples. Raises GroupError if faults have left none."""
    policies = run.policies_at(run.state.steps)
    rows: dict[str, list[TrainRow]] = {}
    rows_of_roles = train_rows(prepared, collected, run.store, lambda policy: run.recipes.of(policy).loss.entropy_by)
    for role, rows_of_role in rows_of_roles.items():
        rows.setdefault(policies.of(role).name, []).extend(rows_of_role)

    # Add the texts that only a teacher or a critic sees.
    rows_of_policies: dict[str, Sequence[TrainRow]] = {}
    for name, rows_of_policy in rows.items():
        with_hints: list[TrainRow] = []
        for row in rows_of_policy:
            if row.id in hints:
                with_hints.append(msgspec.structs.replace(row, hinted=hints[row.id]))
            else:
                with_hints.append(row)
        critic_sees = run.recipes.of(name).loss.critic_sees
        rows_of_policies[name] = with_privileged(with_hints, episodes, run.chats.of(name), critic_sees)

    batch = Batch(
        episodes=episodes,
        collected=collected,
        prepared=prepared,
        rows=rows_of_policies,
        versions=dict(run.state.versions),
        unknown=sum(episode.id not in collected.outcomes for episode in ended_well(episodes)),
    )
    if not rows and _has_faults(batch):
        raise _no_sample_error(run, batch)
    return batch


def ended_well(episodes: Iterable[Episode]) -> list[Episode]:
    """Return the episodes of the application that ended without an error, and no episodes of judging."""
    return [episode for episode in episodes if episode.status == "ok" and episode.phase != JUDGING]


def misses_outcomes(run: RolloutRun, batch: Batch) -> bool:
    """Whether a step would learn from outcomes, but no episode has one."""
    return learns_from_outcomes(run) and 0 < batch.unknown == len(ended_well(batch.episodes))


def learns_from_outcomes(run: RolloutRun) -> bool:
    """Whether any policy is trained on the outcomes of episodes."""
    recipes = [recipe for recipe in run.recipes_of_training if recipe.takes_rewards]
    return any(recipe.attribution.outcome for recipe in recipes)


def _has_faults(batch: Batch) -> bool:
    """Whether faults have left a step without a row. It is no fault if trained roles made no call, or if there were no
    groups to compare."""
    if any(reason in UNEVENTFUL for reason in batch.left_out):
        return False
    all_failed = all(episode.status != "ok" for episode in batch.episodes)
    return all_failed or any(reason not in FAULTLESS for reason in batch.left_out)


def _no_sample_error(run: RolloutRun, batch: Batch) -> GroupError:
    """Return the error for a step that faults have left without a row. It names the commonest causes."""
    episodes = batch.episodes
    left_out = batch.left_out
    failed = [episode for episode in episodes if episode.status != "ok"]
    counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(left_out.items())) or "no calls at all"
    sentences = [f"Step {run.state.steps + 1} has no usable sample ({counts})."]
    call_errors: list[str | None] = []
    for episode in episodes:
        call_errors += [call.error for call in run.store.calls(episode.id)]
    sentences.append(_commonest_error(f"of {len(episodes)} episodes failed", [episode.error for episode in failed]))
    sentences.append(_commonest_error("calls failed or were not scored", call_errors))
    fix = "Fix this"
    if misses_outcomes(run, batch):
        sentences.append(NO_OUTCOME)
        fix = GIVE_OUTCOMES.format(name=run.workflow.variable)
    return GroupError(
        " ".join(sentence for sentence in sentences if sentence),
        f"{fix}, then continue with --resume; see the episodes with: cotune show {run.folder.path}.",
    )


def _commonest_error(failures: str, errors: Sequence[str | None]) -> str:
    """Return the number of errors and the text of the commonest one, for a message; an empty text without errors.

    `failures` completes the number, for example "of 8 episodes failed". Items that are None are no errors.
    """
    counts = Counter(error for error in errors if error)
    if not counts:
        return ""
    [(text, count)] = counts.most_common(1)
    share = "" if len(counts) == 1 else f", {count} of them"
    return f"{counts.total()} {failures}{share} with: {text}"
