"""`cotune blame`: runs the alternatives, and says which role loses the episodes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from cotune.episodes.episode import UNSEEN
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, WorkflowSource, workflow_of
from cotune.errors import ConfigError, RunError, WorkflowError
from cotune.intervals import Interval
from cotune.reading.blame import REPORT, Blame, LostEpisode, RoleBlame, ScoringNoise
from cotune.recording.recorder import Responder
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RunLayout
from cotune.storage.sql.upkeep import copy_episodes
from cotune.tables import plural
from cotune.terminal import print_line, terminal
from cotune.trainer.blame.arms import ALL, OWN, Arm, arms_of_round, better_half, only
from cotune.trainer.blame.estimates import (
    Outcomes,
    RoleEffect,
    Span,
    Verdict,
    decide,
    difference,
    estimate,
    luck,
    nameable_effect,
    role_effects,
    scoring_noise,
)
from cotune.trainer.blame.folder import open_folder
from cotune.trainer.blame.lost_episodes import MOST_EPISODES, choose_episodes, find_decisive_call
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.references import Reference, open_references, read_references
from cotune.trainer.blame.runs import BudgetReachedError, Runs
from cotune.trainer.blame.tasks import TasksToAnalyse, tasks_to_analyse
from cotune.trainer.reporting.progress import episode_bar
from cotune.trainer.run.run_folder import write_atomically

PILOT_TASKS = 2
"""Tasks that are run first. They show the roles and the number of calls in a run, on which the budget depends."""
MOST_DIVERGED = 0.1
"""Share of forks that do not repeat their episode, above which the report says so."""
MOST_REDRAWS = 5
"""Maximum number of times that a failed task is run again, in an analysis without references."""
MOST_RESCORED = 20
"""Tasks whose first run is scored a second time."""
MANY_ROLES = 6
"""With up to this many roles, the default number of runs leaves room for more than one round."""
MOST_REMOVALS = 3
"""Maximum number of runs of each task with a role removed."""


def blame(
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any] | None = None,
    options: BlameOptions | None = None,
    *,
    responder: Responder | None = None,
    **settings: Any,
) -> Blame:
    """Find the role that loses the episodes, by running tasks with the answers of roles swapped to a reference.

    `workflow` is a workflow or its name (`app:solve`), `tasks` a file of JSON lines or a sequence (none if `episodes`
    names recorded episodes), `settings` are fields of `options`. `responder` answers for the application as it is, in
    place of its own provider. Calling it again with the same `out` continues an analysis, also with larger limits.
    Raises CotuneError subclasses for bad input, and where no model can be reached; finished runs are kept then.

    ```python
    found = cotune.blame(solve, "tasks.jsonl", references=("openai:gpt-5",))
    print(found.sentence, found.at_fault, found.roles)
    ```
    """
    all_options = msgspec.structs.replace(options or BlameOptions(), **settings)
    app = workflow_of(workflow).named_by(all_options.roles_by)
    read_references(all_options, responder)  # raises before anything is written
    drawn = tasks_to_analyse(tasks, all_options)
    layout = RunLayout(Path(all_options.out).absolute())
    address = workflow if isinstance(workflow, str) else ""
    console = terminal(stderr=True)
    say = partial(print_line, console)
    with open_folder(layout, app, address, drawn, all_options), open_store(layout.records) as store:
        if all_options.records is not None:
            # The folder stays complete if the records that the episodes come from are deleted.
            with open_store(all_options.records, read_only=True) as source:
                copy_episodes(source, store, list(drawn.recorded))
        with episode_bar(console, total=None, name="runs") as on_run:
            analysis = run_sync(analyse(app, drawn, all_options, store, own=responder, say=say, on_run=on_run))
        result = msgspec.structs.replace(analysis.result(), path=str(layout.path))
        write_atomically(layout.path / REPORT, json.dumps(result.to_json(), indent=2).encode())
        return result


def planned(tasks: int, options: BlameOptions) -> str:
    """Describe the maximum number of runs, calls and forks of an analysis, for a person who has to agree to it.

    With references, the text also says how large an effect this number of `tasks` can show.
    """
    if options.without:
        runs = (1 + len(options.without)) * _removal_rounds(options)
    elif options.records is not None:
        runs = _redraws(options)  # The first run of each task is recorded already.
    elif options.references:
        runs = options.runs
    else:
        runs = 1 + _redraws(options)
    text = f"{plural(tasks, 'task')}, up to {plural(runs, 'run')} of the application on each: {tasks * runs:,} runs"
    if options.max_calls is not None:
        text += f", and at most {plural(options.max_calls, 'call')} of models"
    if options.episodes is not None:
        episodes = plural(MOST_EPISODES, "failed episode")
        return f"{text}; then forks of up to {episodes}, each with the calls of at most {plural(options.runs, 'run')}."
    if not options.references:
        return f"{text}."
    effect = nameable_effect(tasks, runs)
    if effect is None:
        return f"{text}. That is too few tasks to name a role: it takes 5."
    text += f". It can name a role that costs about {100 * effect:.0f} points or more."
    if runs < 2 + 2 * MANY_ROLES:
        text += " One round is always run: 2 runs of each task, and 2 more for each role."
    return text


def _removal_rounds(options: BlameOptions) -> int:
    """The number of rounds in an analysis that removes roles. A round runs each task once as it is, and once without
    each role of `options.without`."""
    runs_per_round = 1 + len(options.without)
    return max(1, min(MOST_REMOVALS, options.runs // runs_per_round))


def _redraws(options: BlameOptions) -> int:
    """How many times a failed task is run again, in an analysis without references."""
    return min(MOST_REDRAWS, options.runs - 1)


async def analyse(
    workflow: Workflow,
    drawn: TasksToAnalyse,
    options: BlameOptions,
    store: Store,
    *,
    own: Responder | None = None,
    for_search: bool = False,
    say: Callable[[str], None] = lambda text: None,
    on_run: Callable[[], object] = lambda: None,
) -> Analysis:
    """Make the runs of an analysis on the drawn tasks, as far as the limits allow, and return it with its result.

    Runs that `store` has already are reused. `own` answers for the application as it is, in place of its provider.
    With `for_search` the analysis is part of a search for prompts: calls whose cost is not known count as no money, and
    no run is scored a second time. `say` prints a line of progress, `on_run` is called after each run. Raises
    CotuneError subclasses for bad input, and if models cannot be reached.
    """
    reference_by_role = read_references(options, own)
    async with open_references(workflow, reference_by_role, options, own) as open_models:
        runs = Runs(
            workflow,
            store,
            references=open_models,
            reference_by_role=reference_by_role,
            options=options,
            recorded=frozenset(drawn.recorded),
            for_search=for_search,
            on_run=on_run,
        )
        await runs.load()
        runs_of_analysis = len(runs.finished) - len(runs.recorded)
        if runs_of_analysis:
            say(f"continuing with {plural(runs_of_analysis, 'finished run')}")
        analysis = Analysis(runs, drawn, reference_by_role, options, say)
        await analysis.run()
        return analysis


class Analysis:
    """The rounds of an analysis over its tasks, and their result."""

    def __init__(
        self,
        runs: Runs,
        drawn: TasksToAnalyse,
        references: Mapping[str, Reference],
        options: BlameOptions,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Analyse the drawn tasks with these `references`, by role ("" for any role). `say` prints a line of
        progress."""
        self.runs = runs
        self.say = say
        self.tasks = list(drawn.tasks)
        self.cut_off = drawn.cut_off
        """Number of failed runs of the application as it is that were cut off. Their decisive call is not searched."""
        self.references = references
        self.options = options
        self.roles: list[str] = []
        """Roles that are swapped or removed. Roles that act for the first time in a later round are not among them."""
        self.live: list[str] = []
        """The roles that the next round swaps."""
        self.ended = ""
        """The error of the limit that ended the analysis early; "" if there was none."""
        self.notes: list[str] = []
        self.episodes: list[LostEpisode] = []

    async def run(self) -> None:
        """Make the runs that the options ask for, until they are done or a limit is reached."""
        options = self.options
        try:
            if options.episodes is not None:
                await self.find_decisive_calls(options.episodes)
            elif not self.references:
                await self.redraw_failures()
            elif options.without:
                await self.remove_roles()
            else:
                await self.swap_roles()
        except BudgetReachedError as error:
            self.ended = str(error)
        # Recorded episodes were selected because they failed. Their second scores say nothing about other runs.
        if not self.runs.for_search and not self.runs.recorded:
            await self.runs.score_again(self.tasks[:MOST_RESCORED])

    async def swap_roles(self) -> None:
        """Run rounds until the options allow no further one.

        A round runs every task once in each arm. In one arm no role is swapped to its reference, and in another all
        roles are. Each live role has two more arms: only this role is swapped, or all roles but this one. All roles are
        live at first. After every second round, the half of them whose swap raises the outcome least stops being live.
        This choice depends on the runs alone, so an analysis that is continued makes the same rounds.
        """
        await self._run_pilot([OWN, ALL])
        expected_roles = list(dict.fromkeys([*self._swapped_roles(), *filter(None, self.references)]))
        self._fit_tasks(arms_per_round=len(arms_of_round(expected_roles, expected_roles)))
        await self._require_named_roles("reference")

        # A role may act on few tasks only, so all tasks are run before the roles are listed. These runs are part of
        # round 0: the loop below does not repeat them, and only adds the arms of single roles.
        await self.runs.run_round(self.tasks, [OWN, ALL], round_number=0)
        self.roles = self._swapped_roles()
        self.live = list(self.roles)
        self.notes += self.runs.references.missing_policies(self.roles)

        runs_per_task = 0
        for round_number in itertools.count():
            arms = arms_of_round(self.live, self.roles)
            runs_per_task += len(arms)
            # The first round is always run.
            if round_number > 0 and runs_per_task > self.options.runs:
                break
            await self.runs.run_round(self.tasks, arms, round_number)
            rounds_done = round_number + 1
            if rounds_done == 2 and self.runs.repeats_itself(arms):
                self._note_repetition()
                break
            if rounds_done % 2 == 0:
                self.live = self._better_half(rounds_done)

    def _better_half(self, rounds_done: int) -> list[str]:
        """The half of the live roles whose swap to the reference raised the outcome most in the rounds so far."""
        outcomes = self.runs.outcomes(self._task_ids, most_runs=rounds_done)
        effects = role_effects(outcomes, self.roles, outcomes.span().size)
        scores = {effect.role: effect.score.mean for effect in effects}
        return better_half([role for role in self.live if role in scores], scores)

    async def remove_roles(self) -> None:
        """Run each task as it is, and with the answers of each role replaced by a fixed text."""
        await self._run_pilot([OWN])
        self.roles = self.live = list(self.references)
        arms = [OWN, *(Arm("only", role) for role in self.roles)]
        self._fit_tasks(arms_per_round=len(arms))
        await self._require_named_roles("without")
        for round_number in range(_removal_rounds(self.options)):
            await self.runs.run_round(self.tasks, arms, round_number)
            if round_number == 1 and self.runs.repeats_itself(arms):
                self._note_repetition()
                break

    async def redraw_failures(self) -> None:
        """Run each task once, and run each task that failed again up to `MOST_REDRAWS` times."""
        await self._run_pilot([OWN])
        self._fit_tasks(arms_per_round=1)
        await self.runs.run_round(self.tasks, [OWN], round_number=0)
        span = self.runs.outcomes(self._task_ids, most_runs=1).span()
        own_runs = self.runs.own_runs(self._task_ids, span.middle)
        failed_tasks = []
        for task, runs_of_task in zip(self.tasks, own_runs, strict=True):
            # The list is empty if the run has no known outcome.
            if runs_of_task.succeeded and not runs_of_task.succeeded[0]:
                failed_tasks.append(task)
        for round_number in range(1, _redraws(self.options) + 1):
            await self.runs.run_round(failed_tasks, [OWN], round_number)
        if self.runs.repeats_itself([OWN]):
            self._note_repetition()

    async def find_decisive_calls(self, chosen: str) -> None:
        """Run the tasks, and failed ones again, then search the call that decided each of the worst failed episodes.

        `chosen` is the value of the option `episodes`: the id of an episode, or "failed".
        """
        await self.redraw_failures()
        if self.runs.repeats_itself([OWN]):
            return  # The application always gives the same answers, so every fork would fail as its episode did.
        episodes, cut_off = choose_episodes(self.runs, chosen)
        self.cut_off += cut_off
        if self.cut_off:
            self.notes.append(
                f"{plural(self.cut_off, 'failed run')} ended early, at a limit or an interruption: no decisive call is "
                "looked for there."
            )
        if not episodes:
            self.notes.append("No run failed, so there is no episode to look at.")
        for episode in episodes:
            self.episodes.append(await find_decisive_call(self.runs, episode))

    async def _run_pilot(self, arms: Sequence[Arm]) -> None:
        """Run the first tasks in each arm, to see the roles and the number of calls in a run. Raises WorkflowError if
        no run makes a call."""
        await self.runs.run_round(self.tasks[:PILOT_TASKS], arms, round_number=0)
        if not self.runs.roles():
            raise WorkflowError("The workflow made no LLM call that cotune can see.", UNSEEN)

    def _fit_tasks(self, arms_per_round: int) -> None:
        """Keep as many tasks as the limits allow one round on, and print the estimated number of calls.

        A round runs each task once per arm, so `arms_per_round` is the number of runs of a task in it.
        """
        calls_per_run = self.runs.calls_per_run
        most_calls = self._most_runs(arms_per_round) * calls_per_run
        self.say(f"a run takes about {calls_per_run:.1f} calls: about {most_calls:,.0f} calls in all at most")
        # Runs of an earlier command are paid already.
        affordable_runs = self.runs.affordable_runs() + len(self.runs.finished)
        if affordable_runs >= arms_per_round * len(self.tasks):
            return
        affordable_tasks = max(int(affordable_runs // arms_per_round), 1)
        self.notes.append(
            f"The limits allow one round on {affordable_tasks} of {plural(len(self.tasks), 'task')}: a run takes about "
            f"{calls_per_run:.1f} calls, and a round {plural(arms_per_round, 'run')} of each task."
        )
        self.tasks = self.tasks[:affordable_tasks]

    def _most_runs(self, arms_per_round: int) -> int:
        """The maximum number of runs on all tasks, without `max_calls` and `max_cost`."""
        options = self.options
        if options.without:
            runs_per_task = arms_per_round * _removal_rounds(options)
        elif self.references:
            runs_per_task = max(options.runs, arms_per_round)  # The first round is always run.
        else:
            runs_per_task = 1 + _redraws(options)
        runs = runs_per_task * len(self.tasks)
        if options.episodes is not None:
            # The forks of one episode cost at most as many calls as `options.runs` whole runs.
            runs += options.runs * MOST_EPISODES
        return runs

    async def _require_named_roles(self, option: str) -> None:
        """Raise ConfigError for a role that the user names, with this `option`, and that does not exist."""
        named_roles = [role for role in self.references if role]
        if all(role in self.runs.roles() for role in named_roles):
            return
        # A role may act on few tasks only, so run the tasks after the pilot too before calling it unknown.
        await self.runs.run_round(self.tasks, [OWN], round_number=0)
        roles = self.runs.roles()
        for role in named_roles:
            if role not in roles:
                raise ConfigError(option, role, "is not a role of the application", f"Roles: {', '.join(roles)}")

    def _swapped_roles(self) -> list[str]:
        """The roles that made calls and have a reference."""
        roles = self.runs.roles()
        return roles if "" in self.references else [role for role in roles if role in self.references]

    def _note_repetition(self) -> None:
        self.notes.append(
            "Every run of a task repeats the same answers (temperature 0, or a fixed seed), so more runs of a task say "
            "nothing new. To see how often an answer goes wrong, raise the temperature: --temperature 1"
        )

    @property
    def _task_ids(self) -> list[str]:
        return [task.id for task in self.tasks]

    def result(self) -> Blame:
        """The result of the runs so far. Raises RunError or WorkflowError if no run has a known outcome."""
        runs = self.runs
        # Without a reference only tasks that failed are run again, so only the first run of each task is comparable.
        outcomes = runs.outcomes(self._task_ids, most_runs=None if self.references else 1)
        own_outcomes = outcomes.means(OWN)
        left_out, failed = self._count_unusable_runs()
        if not own_outcomes:
            raise self._no_outcome(left_out)
        span = outcomes.span()
        removes = bool(self.options.without)
        if removes:
            effects = _removal_effects(outcomes, self.roles, span)
        else:
            effects = role_effects(outcomes, self.roles, span.size)
        if removes or not self.references:
            verdict = Verdict(kind="untested")
        else:
            verdict = decide(outcomes, self.roles, self.live or self.roles)
        priced = bool(self.options.prices)
        own_runs = runs.own_runs(self._task_ids, span.middle)
        return Blame(
            workflow=runs.workflow.name,
            references={role: reference.label for role, reference in self.references.items()},
            removes=removes,
            tasks=len(own_outcomes),
            runs=len(runs.finished) - len(runs.recorded) + len(runs.forks) + runs.diverged,
            calls=runs.calls,
            cost=runs.cost if priced else None,
            # Recorded episodes were selected because they failed. Their outcomes say nothing about other tasks.
            outcome=None if runs.recorded else _mean_outcome(own_outcomes, span),
            swapped=None if removes else _mean_outcome(outcomes.means(ALL), span),
            span=span.size,
            scoring=self._scoring_noise(outcomes),
            luck=luck(own_runs, first_failed=not self.references),
            roles=[self._role_blame(effect, priced) for effect in effects],
            all_roles=runs.roles(),
            verdict=verdict.kind,
            at_fault=verdict.roles,
            more_tasks=verdict.more_tasks,
            episodes=tuple(self.episodes),
            left_out=left_out,
            failures=sum(runs_of_task.succeeded.count(False) for runs_of_task in own_runs),
            failed=failed,
            notes=[*self.notes, *self._run_notes(priced)],
            ended=self.ended,
        )

    def _no_outcome(self, left_out: Mapping[str, int]) -> RunError | WorkflowError:
        """The error for an analysis without any usable outcome. `left_out` counts its runs by reason."""
        if self.ended:
            return RunError(self.ended)
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none has run"
        first_error = f" First error: {self.runs.first_error}" if self.runs.first_error else ""
        return WorkflowError(
            f"No run of the application has a known outcome: {reasons}.{first_error}",
            "Let the workflow return a number, or give it a judge of single episodes.",
        )

    def _scoring_noise(self, outcomes: Outcomes) -> ScoringNoise | None:
        """Measure how much outcomes change when the same run is scored twice; None if no run was scored twice.

        The noise is compared with the variance of `outcomes`, which are the outcomes of the result.
        """
        outcome_pairs: list[tuple[float, float]] = []  # the first and the second outcome of a run
        for task_id in self._task_ids:
            run = self.runs.finished.get((OWN, task_id, 0))
            second_outcome = self.runs.second_outcomes.get(task_id)
            if run is None or run.left_out or run.outcome is None or second_outcome is None:
                continue
            # Recorded episodes were selected because they failed: their first outcomes are too low on average.
            if run.episode in self.runs.recorded:
                continue
            outcome_pairs.append((run.outcome, second_outcome))
        own_outcomes: list[float] = []
        for outcomes_of_task in outcomes.runs(OWN).values():
            own_outcomes += outcomes_of_task
        return scoring_noise(outcome_pairs, own_outcomes)

    def _role_blame(self, effect: RoleEffect, priced: bool) -> RoleBlame:
        """The row of one role in the result: its `effect` on the outcome, and the changes of time and (if `priced`)
        money when its reference answers in its place."""
        role = effect.role
        # The arm that changes this role alone: it is left out with `--without`, else answered by its reference.
        arm = Arm("only", role) if self.options.without else only(role, self.roles)
        task_ids = set(self._task_ids)
        comparable = [run for run in self.runs.finished.values() if run.task in task_ids and not run.left_out]
        own_runs = [run for run in comparable if run.arm == OWN]
        swapped_runs = [run for run in comparable if run.arm == arm]
        reference = self.references.get(role) or self.references[""]
        # As with outcomes, the means of each task are compared: a task may have run more often in one arm.
        seconds, cost = Outcomes(), Outcomes()
        for run in (*own_runs, *swapped_runs):
            seconds.add(run.arm, run.task, run.seconds)
            cost.add(run.arm, run.task, run.cost)
        return RoleBlame(
            role=role,
            reference=reference.label,
            calls=fmean(run.roles.get(role, 0) for run in own_runs),
            score=effect.score.interval,
            alone=effect.alone.interval,
            last=effect.last.interval,
            seconds=_mean_change(seconds, arm),
            cost=_mean_change(cost, arm) if priced else None,
            # Runs of a task are numbered from 0, so this is the number of runs that the task with most runs has.
            runs=max((run.number + 1 for run in swapped_runs), default=0),
        )

    def _count_unusable_runs(self) -> tuple[dict[str, int], int]:
        """Count the runs without a usable outcome, by reason, and the runs in which the application raised."""
        task_ids = set(self._task_ids)
        left_out: Counter[str] = Counter()
        failed = 0
        for run in self.runs.finished.values():
            if run.task not in task_ids:
                continue
            if run.left_out:
                left_out[run.left_out] += 1
            if run.failed:
                failed += 1
        return dict(left_out), failed

    def _run_notes(self, priced: bool) -> list[str]:
        """Sentences for the report about runs, forks and calls that a reader should not take at face value. `priced`
        says whether the report shows money."""
        runs = self.runs
        notes = [*self._note_late_roles(), *self._note_lost_forks(), *self._note_failed_calls()]
        if runs.judge.calls:
            notes.append(f"The judge made {runs.judge.calls:,} of the {runs.calls:,} calls.")
        unpriced = sum(run.unpriced for run in runs.finished.values()) + runs.judge.unpriced
        if priced and unpriced:
            notes.append(
                f"{plural(unpriced, 'call')} count as no money: their model has no --price, or told no tokens."
            )
        return notes

    def _note_late_roles(self) -> list[str]:
        """A note on roles that acted for the first time after the roles were listed."""
        late = [role for role in self._swapped_roles() if role not in self.roles]
        if not self.roles or not late:
            return []
        return [f"First called in a later round, and not analysed: {', '.join(late)}. Run the same command again."]

    def _note_lost_forks(self) -> list[str]:
        """Notes on forks that are left out: they did not repeat their episode, or have no known outcome."""
        notes = []
        diverged = self.runs.diverged
        forks = len(self.runs.forks) + diverged
        if diverged > MOST_DIVERGED * forks:
            notes.append(
                f"{diverged} of {plural(forks, 'fork')} did not repeat their episode and are left out: the "
                "application does not ask the same again. docs/how-to/replay.md lists the causes."
            )
        unknown = sum(fork.outcome is None and not fork.failed for fork in self.runs.forks)
        if unknown:
            first_error = f" First error: {self.runs.first_error}" if self.runs.first_error else ""
            notes.append(f"{plural(unknown, 'fork')} without a known outcome left out.{first_error}")
        return notes

    def _note_failed_calls(self) -> list[str]:
        """A note on runs that have an outcome although calls failed: the application caught the error, and the outcome
        may say more about the provider than about the role."""
        affected = [run for run in self.runs.finished.values() if run.outcome is not None and run.failed_call]
        if not affected:
            return []
        swapped = sum(run.arm != OWN for run in affected)
        return [
            f"In {plural(len(affected), 'run')} ({swapped} of them with swapped roles) calls failed and the "
            f"application still returned an outcome, which counts. First error: {affected[0].failed_call}"
        ]


def _mean_outcome(outcome_by_task: Mapping[str, float], span: Span) -> Interval | None:
    """The mean over tasks with its interval, whose bounds stay within the span of outcomes; None without any task."""
    if not outcome_by_task:
        return None
    interval = estimate(list(outcome_by_task.values()), span.size).interval
    if interval.low is None or interval.high is None:
        return interval
    low, high = max(interval.low, span.low), min(interval.high, span.high)
    return Interval(mean=interval.mean, low=low, high=high, n=interval.n)


def _removal_effects(outcomes: Outcomes, roles: Sequence[str], span: Span) -> list[RoleEffect]:
    """How the outcome changes when a role answers a fixed text, for each role that was removed on at least one task."""
    effects = []
    for role in roles:
        change_by_task = difference(outcomes, Arm("only", role), OWN)
        if not change_by_task:
            continue
        change = estimate(list(change_by_task.values()), span.size)
        # Only one role is removed at a time, so all three figures of an effect are the same.
        effects.append(RoleEffect(role=role, score=change, alone=change, last=change))
    return effects


def _mean_change(values: Outcomes, arm: Arm) -> float | None:
    """The mean over tasks of the change from the application as it is to an arm; None if no task ran in both."""
    changes = difference(values, arm, OWN)
    return fmean(changes.values()) if changes else None
