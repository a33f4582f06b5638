"""The training batch of a step: the samples of its episodes, grouped and weighed."""

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
"""Reasons to leave out candidates without a fault: if a step has no others, it makes no update."""
FAULTLESS = ("untrained_role", "not_chosen", "not_forked", "trunk")
"""Reasons that are no fault: a step with no other reason had no call of a trained role."""

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
    """The version of each policy that trains on them."""
    unknown: int
    """Number of episodes that ended without an error and have no outcome."""

    @property
    def left_out(self) -> Counter[str]:
        """Candidates that are not trained on, by reason."""
        return Counter(self.collected.left_out) + Counter(self.prepared.left_out)


def collect_samples(run: RolloutRun, episodes: Sequence[Episode], step: int | None = None) -> Collected:
    """The candidates of episodes that can be trained on in the present step, or in a later `step`.

    Samples that are too old are left out only in the present step: the versions of a later one are not known.
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
    """For self-distillation (`teacher_sees`): the samples, each with the prompt that its policy reads as its teacher.

    That prompt is the sample's prompt with the hint added. It must fit into the context of the policy's base model.
    """
    policies = run.policies_at(run.state.steps)

    def context(policy: str) -> int:
        return context_length(locate_model(policies.specs[policy].model or run.config.model))

    return with_hints(collected, episodes, run.recipes, run.store, run.chats, context)


def group_and_weigh(run: RolloutRun, collected: Collected) -> Prepared:
    """Samples in groups, with advantages."""
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
        hinted: list[TrainRow] = []
        for row in rows_of_policy:
            if row.id in hints:
                row = msgspec.structs.replace(row, hinted=hints[row.id])
            hinted.append(row)
        critic_sees = run.recipes.of(name).loss.critic_sees
        rows_of_policies[name] = with_privileged(hinted, episodes, run.chats.of(name), critic_sees)

    batch = Batch(
        episodes=episodes,
        collected=collected,
        prepared=prepared,
        rows=rows_of_policies,
        versions=dict(run.state.versions),
        unknown=sum(episode.id not in collected.outcomes for episode in ended_well(episodes)),
    )
    if not rows:
        _require_soundness(run, batch)
    return batch


def ended_well(episodes: Iterable[Episode]) -> list[Episode]:
    """Episodes of the application that finished without an error."""
    return [episode for episode in episodes if episode.status == "ok" and episode.phase != JUDGING]


def misses_outcomes(run: RolloutRun, batch: Batch) -> bool:
    """Whether a step would learn from outcomes, but no episode has one."""
    return learns_from_outcomes(run) and 0 < batch.unknown == len(ended_well(batch.episodes))


def learns_from_outcomes(run: RolloutRun) -> bool:
    """Whether some policy is trained on the outcomes of episodes."""
    recipes = [recipe for recipe in run.recipes_of_training if recipe.takes_rewards]
    return any(recipe.attribution.outcome for recipe in recipes)


def _require_soundness(run: RolloutRun, batch: Batch) -> None:
    """Raise GroupError, with the commonest causes, if faults have left a step without a row.

    A step without calls of trained roles, or without groups to compare, has no fault.
    """
    episodes = batch.episodes
    left_out = batch.left_out
    failed = [episode for episode in episodes if episode.status != "ok"]
    has_uneventful = any(reason in UNEVENTFUL for reason in left_out)
    has_faults = any(reason not in FAULTLESS for reason in left_out)
    if has_uneventful or not (has_faults or len(failed) == len(episodes)):
        return

    counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(left_out.items())) or "no calls at all"
    sentences = [f"Step {run.state.steps + 1} has no usable sample ({counts})."]
    call_errors: list[str | None] = []
    for episode in episodes:
        call_errors += [call.error for call in run.store.calls(episode.id)]
    causes = [
        _commonest_error(f"of {len(episodes)} episodes failed", [episode.error for episode in failed]),
        _commonest_error("calls failed or were not scored", call_errors),
    ]
    sentences += [cause for cause in causes if cause]
    fix = "Fix this"
    if misses_outcomes(run, batch):
        sentences.append(NO_OUTCOME)
        fix = GIVE_OUTCOMES.format(name=run.workflow.name)
    raise GroupError(
        " ".join(sentences),
        f"{fix}, then continue with --resume; see the episodes with: cotune show {run.folder.path}.",
    )


def _commonest_error(failures: str, errors: Sequence[str | None]) -> str:
    """The number of errors and the text of the commonest, for a message; "" without errors. `failures` names them in
    the plural, such as "failed episodes".
    """
    counts = Counter(error for error in errors if error)
    if not counts:
        return ""
    ((text, count),) = counts.most_common(1)
    share = "" if len(counts) == 1 else f", {count} of them"
    return f"{counts.total()} {failures}{share} with: {text}"
