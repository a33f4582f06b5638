"""`cotune blame`: runs the alternatives, and says which role loses the episodes."""

from __future__ import annotations

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
from cotune.trainer.blame.folder import opened
from cotune.trainer.blame.lost_episodes import MOST_EPISODES, choose_episodes, find_decisive_call
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.references import Reference, open_references, read_references
from cotune.trainer.blame.runs import BudgetReachedError, Runs
from cotune.trainer.blame.tasks import TasksToAnalyse, tasks_to_analyse
from cotune.trainer.reporting.progress import episode_bar
from cotune.trainer.run.run_folder import write_atomically

PILOT = 2
"""Tasks that are run first. They tell the roles, and the calls of a run, on which the budget depends."""
MOST_DIVERGED = 0.1
"""Share of forks that do not repeat their episode, above which the report says so."""
REDRAWS = 5
"""Times that a failed task is run again where there is no reference."""
MOST_RESCORED = 20
"""Tasks whose first run is scored a second time."""
MANY_ROLES = 6
"""Up to so many roles, the default number of runs leaves room for more than a round."""
REMOVALS = 3
"""Runs of each task with a role removed."""


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
    chosen = msgspec.structs.replace(options or BlameOptions(), **settings)
    app = workflow_of(workflow).named_by(chosen.roles_by)
    read_references(chosen, responder)  # raises before anything is written
    drawn = tasks_to_analyse(tasks, chosen)
    layout = RunLayout(Path(chosen.out).absolute())
    address = workflow if isinstance(workflow, str) else ""
    console = terminal(stderr=True)
    say = partial(print_line, console)
    with opened(layout, app, address, drawn, chosen), open_store(layout.records) as store:
        if chosen.records is not None:
            # The records of the analysis hold all that it used, also when the others are gone.
            with open_store(chosen.records, read_only=True) as source:
                copy_episodes(source, store, list(drawn.recorded))
        with episode_bar(console, None, "runs") as on_run:
            analysis = run_sync(analyse(app, drawn, chosen, store, own=responder, say=say, on_run=on_run))
        result = msgspec.structs.replace(analysis.result(), path=str(layout.path))
        write_atomically(layout.path / REPORT, json.dumps(result.to_json(), indent=2).encode())
        return result


def planned(tasks: int, options: BlameOptions) -> str:
    """The most that an analysis will run, for a person who has to agree to it."""
    runs = options.runs
    if options.without:
        runs = (1 + len(options.without)) * _removal_rounds(options)
    elif options.records is not None:
        runs = _redraws(options)
    elif not options.references:
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
    """Rounds with the roles of `without` removed, each of one run per arm and task."""
    return max(1, min(REMOVALS, options.runs // (1 + len(options.without))))


def _redraws(options: BlameOptions) -> int:
    """Times that a failed task is run again without a reference."""
    return min(REDRAWS, options.runs - 1)


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
    references = read_references(options, own)
    async with open_references(workflow, references, options, own) as answering:
        runs = Runs(
            workflow,
            store,
            answering,
            references,
            options,
            recorded=frozenset(drawn.recorded),
            for_search=for_search,
            on_run=on_run,
        )
        await runs.load()
        finished = len(runs.runs) - len(runs.recorded)
        if finished:
            say(f"continuing with {plural(finished, 'finished run')}")
        analysis = Analysis(runs, drawn, references, options, say)
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
        """Failed runs of the application as it is that were cut off: no call of these is looked for."""
        self.references = references
        self.options = options
        self.roles: list[str] = []
        """Roles that are swapped or removed. Roles that act for the first time in a later round are not among them."""
        self.live: list[str] = []
        """Roles on which the next round is spent."""
        self.ended = ""
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
        # Recorded failures were selected by their outcomes, so a second score of them says nothing of other runs.
        if not self.runs.for_search and not self.runs.recorded:
            await self.runs.score_again(self.tasks[:MOST_RESCORED])

    async def swap_roles(self) -> None:
        """Run rounds: every task once in each arm. After every second round, only the better half of the roles goes on.

        Which roles those are depends on the runs alone. So an analysis that is continued takes the same way.
        """
        await self._pilot([OWN, ALL])
        expected = list(dict.fromkeys([*self._swapped_roles(), *filter(None, self.references)]))
        self._fit_tasks(len(arms_of_round(expected, expected)))
        await self._require_named_roles("reference")
        # A role may act on few tasks only, so all of them are run before the roles are listed.
        await self.runs.run(self.tasks, [OWN, ALL], 0)
        self.roles = roles = self._swapped_roles()
        self.live = list(roles)
        self.notes += self.runs.references.missing_policies(roles)
        runs_per_task, number = 0, 0
        while True:
            arms = arms_of_round(self.live, roles)
            runs_per_task += len(arms)
            if number and runs_per_task > self.options.runs:
                break
            await self.runs.run(self.tasks, arms, number)
            number += 1
            if number == 2 and self.runs.repeats_itself(arms):
                self._note_repetition()
                break
            if number % 2 == 0:
                outcomes = self.runs.outcomes(self._task_ids, number)
                scores = {effect.role: effect.score.mean for effect in role_effects(outcomes, roles, 1.0)}
                self.live = better_half([role for role in self.live if role in scores], scores)

    async def remove_roles(self) -> None:
        """Run each task as it is, and with the answers of each role replaced by a fixed text."""
        await self._pilot([OWN])
        self.roles = self.live = list(self.references)
        arms = [OWN, *(Arm("only", role) for role in self.roles)]
        self._fit_tasks(len(arms))
        await self._require_named_roles("without")
        for number in range(_removal_rounds(self.options)):
            await self.runs.run(self.tasks, arms, number)
            if number == 1 and self.runs.repeats_itself(arms):
                self._note_repetition()
                break

    async def redraw_failures(self) -> None:
        """Run each task once, and the failed ones several times more."""
        await self._pilot([OWN])
        self._fit_tasks(1)
        await self.runs.run(self.tasks, [OWN], 0)
        tasks_by_id = {task.id: task for task in self.tasks}
        span = self.runs.outcomes(self._task_ids, 1).span()
        own_runs = self.runs.own_runs(self._task_ids, span.middle)
        failed = []
        for task_id, one in zip(self._task_ids, own_runs, strict=True):
            if one.succeeded and not one.succeeded[0]:
                failed.append(tasks_by_id[task_id])
        for number in range(1, _redraws(self.options) + 1):
            await self.runs.run(failed, [OWN], number)
        if self.runs.repeats_itself([OWN]):
            self._note_repetition()

    async def find_decisive_calls(self, chosen: str) -> None:
        """Run each task once, and the failed ones again; then look for the calls that lost the worst failed runs."""
        await self.redraw_failures()
        if self.runs.repeats_itself([OWN]):
            return  # Every fork would end as its episode did.
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

    async def _pilot(self, arms: Sequence[Arm]) -> None:
        """Run a few tasks, which tell the roles and the calls of a run. Raises WorkflowError where there is no call."""
        await self.runs.run(self.tasks[:PILOT], arms, 0)
        if not self.runs.roles():
            raise WorkflowError("The workflow made no LLM call that cotune can see.", UNSEEN)

    def _fit_tasks(self, arms: int) -> None:
        """Tell what the analysis takes, and take fewer tasks if the limits do not allow one round of so many arms on
        all of them."""
        # Runs of an earlier command are paid already.
        affordable = self.runs.affordable_runs() + len(self.runs.runs)
        each = 1 + _redraws(self.options)
        if self.options.without:
            each = arms * _removal_rounds(self.options)
        elif self.references:
            each = max(self.options.runs, arms)
        runs = len(self.tasks) * each
        if self.options.episodes is not None:
            runs += MOST_EPISODES * self.options.runs
        calls = runs * self.runs.calls_per_run
        self.say(f"a run takes about {self.runs.calls_per_run:.1f} calls: about {calls:,.0f} calls in all at most")
        if affordable >= arms * len(self.tasks):
            return
        fitting = max(int(affordable // arms), 1)
        self.notes.append(
            f"The limits allow one round on {fitting} of {plural(len(self.tasks), 'task')}: a run takes about "
            f"{self.runs.calls_per_run:.1f} calls, and a round {plural(arms, 'run')} of each task."
        )
        self.tasks = self.tasks[:fitting]

    async def _require_named_roles(self, option: str) -> None:
        """Raise ConfigError for a role that the user names and that does not exist."""
        named = [role for role in self.references if role]
        if all(role in self.runs.roles() for role in named):
            return
        # The role may act on few tasks only.
        await self.runs.run(self.tasks, [OWN], 0)
        roles = self.runs.roles()
        for role in named:
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
        """The result of the runs so far."""
        runs = self.runs
        # Without a reference only failed tasks are run again, whose further runs say nothing about all tasks.
        outcomes = runs.outcomes(self._task_ids, None if self.references else 1)
        span = outcomes.span()
        left_out, failed = self._left_out()
        if not outcomes.means(OWN):
            if self.ended:
                raise RunError(self.ended)
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none has run"
            more = f" First error: {runs.first_error}" if runs.first_error else ""
            raise WorkflowError(
                f"No run of the application has a known outcome: {reasons}.{more}",
                "Let the workflow return a number, or give it a judge of single episodes.",
            )
        roles = self.roles
        removes = bool(self.options.without)
        effects = _removals(outcomes, roles, span) if removes else role_effects(outcomes, roles, span.size)
        if removes or not self.references:
            verdict = Verdict(kind="untested")
        else:
            verdict = decide(outcomes, roles, self.live or roles)
        swapped = {} if removes else outcomes.means(ALL)
        priced = bool(self.options.prices)
        own_runs = runs.own_runs(self._task_ids, span.middle)
        own = estimate(list(outcomes.means(OWN).values()), span.size)
        return Blame(
            workflow=runs.workflow.name,
            references={role: reference.label for role, reference in self.references.items()},
            removes=removes,
            tasks=len(outcomes.means(OWN)),
            runs=len(runs.runs) - len(runs.recorded) + len(runs.forks) + runs.diverged,
            calls=runs.calls,
            cost=runs.cost if priced else None,
            # Recorded failures were chosen by their outcome, which says nothing of other tasks.
            outcome=None if runs.recorded else _inside(own.interval, span),
            swapped=_inside(estimate(list(swapped.values()), span.size).interval, span) if swapped else None,
            span=span.size,
            scoring=self._scoring_noise(outcomes),
            luck=luck(own_runs, first_failed=not self.references),
            roles=[self._role(effect, roles, priced) for effect in effects],
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

    def _scoring_noise(self, outcomes: Outcomes) -> ScoringNoise | None:
        """The noise of the scorer, from the runs that were scored twice. `outcomes` are the ones that the result
        counts."""
        own: list[float] = []
        for outcomes_of_task in outcomes.runs(OWN).values():
            own += outcomes_of_task
        pairs: list[tuple[float, float]] = []
        for task_id in self._task_ids:
            first = self.runs.runs.get((OWN, task_id, 0))
            second = self.runs.second_outcomes.get(task_id)
            if first is None or first.left_out or first.outcome is None or second is None:
                continue
            if first.episode not in self.runs.recorded:
                pairs.append((first.outcome, second))
        return scoring_noise(pairs, own)

    def _role(self, effect: RoleEffect, roles: Sequence[str], priced: bool) -> RoleBlame:
        """Summarize one role's `effect` for the report: with it, the changes of time and money when the role's
        reference answers instead, as means over tasks."""
        role = effect.role
        arm = Arm("only", role) if self.options.without else only(role, roles)
        chosen = set(self._task_ids)
        counted = [run for run in self.runs.runs.values() if run.task in chosen and not run.left_out]
        own = [run for run in counted if run.arm == OWN]
        swapped = [run for run in counted if run.arm == arm]
        reference = self.references.get(role) or self.references[""]
        # Compared as outcomes are: a task may have run more often in one arm than in the other.
        seconds, cost = Outcomes(), Outcomes()
        for run in (*own, *swapped):
            seconds.add(run.arm, run.task, run.seconds)
            cost.add(run.arm, run.task, run.cost)
        return RoleBlame(
            role=role,
            reference=reference.label,
            calls=fmean(run.roles.get(role, 0) for run in own),
            score=effect.score.interval,
            alone=effect.alone.interval,
            last=effect.last.interval,
            seconds=_mean_change(seconds, arm),
            cost=_mean_change(cost, arm) if priced else None,
            runs=max((run.number + 1 for run in swapped), default=0),
        )

    def _left_out(self) -> tuple[dict[str, int], int]:
        """Count the runs without a usable outcome, by reason, and the runs in which the application raised."""
        chosen = set(self._task_ids)
        left_out: Counter[str] = Counter()
        failed = 0
        for run in self.runs.runs.values():
            if run.task in chosen:
                left_out[run.left_out] += 1
                failed += run.failed
        left_out.pop("", None)
        return dict(left_out), failed

    def _run_notes(self, priced: bool) -> list[str]:
        """Notes on the runs."""
        return [
            *self._late_roles(),
            *self._lost_forks(),
            *self._failed_calls(),
            *self._judge_calls(),
            *self._unpriced(priced),
        ]

    def _late_roles(self) -> list[str]:
        """A note on roles that acted for the first time after the roles were listed."""
        late = [role for role in self._swapped_roles() if role not in self.roles]
        if not self.roles or not late:
            return []
        return [f"First called in a later round, and not analysed: {', '.join(late)}. Run the same command again."]

    def _lost_forks(self) -> list[str]:
        """Notes on forks that say nothing."""
        notes = []
        diverged, forks = self.runs.diverged, len(self.runs.forks) + self.runs.diverged
        if diverged > MOST_DIVERGED * forks:
            notes.append(
                f"{diverged} of {plural(forks, 'fork')} did not repeat their episode and are left out: the "
                "application does not ask the same again. docs/how-to/replay.md lists the causes."
            )
        unknown = sum(fork.outcome is None and not fork.failed for fork in self.runs.forks)
        if unknown:
            why = f" First error: {self.runs.first_error}" if self.runs.first_error else ""
            notes.append(f"{plural(unknown, 'fork')} without a known outcome left out.{why}")
        return notes

    def _failed_calls(self) -> list[str]:
        """A note on runs that have an outcome although calls failed: the application caught the error, and the outcome
        may say more about the provider than about the role."""
        affected = [run for run in self.runs.runs.values() if run.outcome is not None and run.failed_call]
        if not affected:
            return []
        swapped = sum(run.arm != OWN for run in affected)
        return [
            f"In {plural(len(affected), 'run')} ({swapped} of them with swapped roles) calls failed and the "
            f"application still returned an outcome, which counts. First error: {affected[0].failed_call}"
        ]

    def _judge_calls(self) -> list[str]:
        """A note on the calls of the workflow's judge."""
        calls = self.runs.judge.calls
        return [f"The judge made {calls:,} of the {self.runs.calls:,} calls."] if calls else []

    def _unpriced(self, priced: bool) -> list[str]:
        unpriced = sum(run.unpriced for run in self.runs.runs.values()) + self.runs.judge.unpriced
        if not priced or not unpriced:
            return []
        return [f"{plural(unpriced, 'call')} count as no money: their model has no --price, or told no tokens."]


def _inside(interval: Interval, span: Span) -> Interval:
    """The interval of an outcome, cut at the least and the greatest one."""
    if interval.low is None or interval.high is None:
        return interval
    low, high = max(interval.low, span.low), min(interval.high, span.high)
    return Interval(mean=interval.mean, low=low, high=high, n=interval.n)


def _removals(outcomes: Outcomes, roles: Sequence[str], span: Span) -> list[RoleEffect]:
    """The change of the outcome when one role answers a fixed text."""
    effects = []
    for role in roles:
        values = list(difference(outcomes, Arm("only", role), OWN).values())
        if values:
            change = estimate(values, span.size)
            effects.append(RoleEffect(role, change, change, change))
    return effects


def _mean_change(values: Outcomes, arm: Arm) -> float | None:
    """The mean over tasks of the change from the application as it is to an arm; None where no task ran in both."""
    changes = difference(values, arm, OWN)
    return fmean(changes.values()) if changes else None
