"""Runs an application in the arms of an analysis, and reads the result of each run from the records.

Every run is an episode in the folder of the analysis, under the phase of its arm. So an analysis that was interrupted,
or that is given a larger budget, runs only what is missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.rollout import repeat_episode
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, CotuneError, RecordError, RunError
from cotune.judging.episodes import Ranking
from cotune.reading.blame import FORK, FRESH_FORK, RESCORED, summed_outcome
from cotune.recording.recorder import LiveCall, Responder
from cotune.records.answers import Answer
from cotune.records.ids import canonical
from cotune.records.prices import Prices, money
from cotune.records.structs import JUDGING, CallRecord, Episode, Task
from cotune.replay.script import Replay, Script, read_script
from cotune.storage.protocol import Store
from cotune.tables import answer_line
from cotune.trainer.blame.arms import ALL, OWN, Arm, arm_of
from cotune.trainer.blame.estimates import Outcomes, OwnRuns, Span
from cotune.trainer.blame.judging import JudgeCalls, judge_run
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.references import OpenReferences, Reference

LEAST_REPEATS = 40
"""Repeated runs that must all be equal before an application counts as one that repeats itself: if 7% of them differed,
at least one of 40 would in 95% of cases."""
LEAST_OUTAGE = 5
"""Runs of a round that must all fail by their models before the analysis ends. Fewer may fail because of their task."""
AT_LIMIT = "refused by cotune blame, as it would pass max_calls"
"""Part of the error message of a call that was refused because of `max_calls`."""
UNFINISHED = ("infrastructure", "cancelled", "limit")
"""Runs that are left out for one of these reasons show nothing, and are made again by the next command."""
FIRST_FORK = 1_000
"""Number of the first fork, above the numbers of whole runs. Models on this machine draw by the number of a run, so a
fork with the number of its episode would repeat the answers of the episode."""


class BudgetReachedError(RunError):
    """The next runs could pass a limit of the analysis."""


class FinishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the application on a task in an arm."""

    arm: Arm
    task: str
    episode: str
    number: int
    """Which run of this task in this arm, from 0."""
    outcome: float | None
    """The sum of its rewards; None if the application raised, or if the run is left out."""
    failed: bool
    """Whether the application raised. The run then counts as the lowest outcome of all runs."""
    left_out: str
    """Why the run cannot be compared: limit, cancelled, infrastructure or no outcome; "" if it can."""
    solved: bool | None
    """The metric `success` of the episode; None without this metric."""
    roles: Mapping[str, int]
    """Its calls by role."""
    seconds: float
    cost: float
    unpriced: int
    """Calls whose model has no price, or that report no tokens."""
    answers: str
    """A digest of its answers: equal for runs with the same answers."""
    failed_call: str = ""
    """The first error of its calls; "" if none failed. The application may have continued without the answer."""

    @property
    def calls(self) -> int:
        return sum(self.roles.values())


RunKey = tuple[Arm, str, int]
"""Arm, id of the task, and number of the run of this task in this arm."""


class FinishedFork(msgspec.Struct, frozen=True, kw_only=True):
    """A run that repeats the episode `trunk` before its call `call`, and has new answers from there on."""

    trunk: str
    call: str
    phase: str
    outcome: float | None
    """None if it is not known, or if the application raised."""
    failed: bool
    """Whether the application raised."""
    answer: str
    """The answer at the call."""
    at: str
    """The id of the fork's own call in the place of `call`."""


class LimitedResponder:
    """Answers the calls of one run through an inner responder, and refuses calls that would pass `max_calls`.

    The calls of all runs under way count. Without an inner responder, the application's own provider answers.
    """

    def __init__(self, runs: Runs, inner: Responder | None) -> None:
        self._runs = runs
        self._inner = inner
        self.calls = 0
        """Calls of this run so far. They are counted here until the run ends."""

    async def respond(self, call: LiveCall) -> Answer | None:
        """The answer of the inner responder. Raises RunError for a call beyond the limit."""
        self._runs.admit_call(call, self)
        return None if self._inner is None else await self._inner.respond(call)


@dataclass
class Runs:
    """Makes the runs of an analysis within its limits, and keeps the result of each. Runs that the store has already
    are read instead."""

    workflow: Workflow
    store: Store
    references: OpenReferences
    """Who answers the calls of each arm."""
    reference_by_role: Mapping[str, Reference]
    """The references as the options name them, "" for every other role."""
    options: BlameOptions
    on_run: Callable[[], object] = lambda: None
    """Called after each run."""
    recorded: frozenset[str] = frozenset()
    """Ids of episodes that were recorded elsewhere, each the first run of its task. Their calls count against no
    limit."""
    for_search: bool = False
    """Whether the analysis is part of a search for prompts. A search counts calls whose cost is not known as no money.
    Any other analysis with a `max_cost` ends at such a call."""

    def __post_init__(self) -> None:
        """Start with no run. Raises ConfigError if the workflow's judge only ranks episodes against each other."""
        if isinstance(self.workflow.episode_judge, Ranking):
            raise ConfigError(
                "judge",
                None,
                "compares episodes with each other, and each run needs a number of its own",
                "Give the workflow an outcome, or a judge of single episodes.",
            )
        self.finished: dict[RunKey, FinishedRun] = {}
        self._tried: set[RunKey] = set()
        """Runs that this process has started. A run that failed through no fault of the application is tried again only
        by the next command, because a provider that is down would fail it again."""
        self.second_outcomes: dict[str, float] = {}
        """The outcomes of runs that were scored a second time, by task."""
        self._scored_again: set[str] = set()
        """Tasks whose first run was scored a second time, with or without an outcome."""
        self.judge = JudgeCalls()
        """The calls of the workflow's judge. They count against the limits as all others do."""
        self._not_judged: set[str] = set()
        """Ids of episodes without an outcome, because the calls of the judge would have passed a limit."""
        self._rescoring = 0
        """Number of runs that are scored again at the moment. `_affords_judge` reserves the judge's cost for each."""
        self.forks: list[FinishedFork] = []
        self.diverged = 0
        """Forks that did not repeat their episode."""
        self.calls = 0
        self.cost = 0.0
        self.first_error = ""
        self._errors: dict[Arm, str] = {}
        """The first error of each arm's models."""
        self._unpriced_models: dict[str, str] = {}
        """By model, why the money for its calls is not known."""
        self._next_fork = FIRST_FORK
        """The number of the next fork. A fork is recorded with its number as the rollout."""
        self._running = 0
        """Number of runs under way. Their calls are not in `calls` yet."""
        self._calls_under_way = 0
        """Number of calls that the runs under way have made so far."""
        self._lock = threading.Lock()  # applications may make calls in threads
        self._gate = asyncio.Semaphore(self.options.concurrency)

    async def load(self) -> None:
        """Read the runs that the store has. Their calls count against the limits, as they were made and paid."""
        # Episodes that still need the judge come last: its calls must fit into the limits with all recorded calls.
        for episode in sorted(self.store.episodes(), key=self._needs_judge):
            arm = OWN if episode.id in self.recorded else arm_of(episode.phase)
            if arm is not None:
                await self._judge_within_limits(episode)
                self._keep_run(arm, episode)
            elif episode.phase in (FORK, FRESH_FORK):
                await self._judge_within_limits(episode)
                self._keep_fork(episode)
                self._next_fork = max(self._next_fork, episode.rollout + 1)
            elif episode.phase == RESCORED:
                await self._judge_within_limits(episode)
                self._keep_second_outcome(episode)
            elif episode.phase == JUDGING:
                self._count_judging(episode)

    async def run_round(self, tasks: Sequence[Task], arms: Sequence[Arm], round_number: int) -> None:
        """Run each task once in each arm, except for the runs of this round that are finished already.

        An arm is a choice of roles whose answers are swapped. Raises BudgetReachedError before the first run if the
        runs do not all fit into the limits, ConfigError if a limit of money cannot be kept, RunError if the models of
        an arm cannot be reached.
        """
        runs_to_make = []
        for task in tasks:
            for arm in arms:
                if self._is_due((arm, task.id, round_number)):
                    runs_to_make.append((arm, task))
        if not runs_to_make:
            return
        self._require_room(len(runs_to_make))
        # None stands for a run that a limit did not let begin.
        results: list[FinishedRun | None] = []
        if not self.finished:
            # The first run goes alone: once it has ended, the number of calls in a run is known.
            arm, task = runs_to_make.pop(0)
            results.append(await self._run_task(arm, task, round_number))
            self._require_room(len(runs_to_make))
        try:
            async with asyncio.TaskGroup() as group:
                batch = [group.create_task(self._run_task(arm, task, round_number)) for arm, task in runs_to_make]
        except BaseExceptionGroup as errors:
            # All runs usually raise the same error, such as a framework that is too old. Raise it once, without the
            # group, and prefer an error whose message names the fix.
            own_errors, _ = errors.split(CotuneError)
            raise (own_errors or errors).exceptions[0] from errors
        results += [run.result() for run in batch]
        within_limits = [run for run in results if run is not None and run.left_out != "limit"]
        if len(within_limits) < len(results):
            raise self._budget_reached(len(results) - len(within_limits))
        self._require_answers(within_limits)

    def _require_answers(self, round_runs: Sequence[FinishedRun]) -> None:
        """Raise RunError if the models of an arm cannot be reached. Further rounds would pay for the other arms, and
        have nothing to compare them with."""
        by_arm: defaultdict[Arm, list[FinishedRun]] = defaultdict(list)
        for run in round_runs:
            by_arm[run.arm].append(run)
        for arm, runs in by_arm.items():
            # A run without a known outcome still shows that the models can be reached.
            if any(run.left_out not in UNFINISHED for run in runs):
                continue
            ended_before = any(run.arm == arm and run.left_out not in UNFINISHED for run in self.finished.values())
            # Every other arm is compared with one of these two.
            is_needed = arm in (OWN, ALL) and not ended_before
            if is_needed or len(runs) >= LEAST_OUTAGE:
                raise RunError(
                    f"All {len(runs)} runs {arm.label} failed: {self._errors.get(arm, 'no reason recorded')}",
                    "Fix this, then run the same command again: it continues.",
                )

    def _is_due(self, key: RunKey) -> bool:
        """Whether a run must still be made: this process has not tried it, and no earlier command finished it."""
        run = self.finished.get(key)
        return key not in self._tried and (run is None or run.left_out in UNFINISHED)

    async def _run_task(self, arm: Arm, task: Task, round_number: int) -> FinishedRun | None:
        """Run a task in an arm, the choice of roles whose answers are swapped. Returns None, without a run, if the run
        could pass a limit because earlier runs took more calls than expected."""
        flow = replace(self.workflow, prompts=self.references.prompts(arm))
        options = EpisodeOptions(
            phase=arm.phase,
            rollout=round_number,
            timeout=self.options.timeout,
            # Forks and second scores return the recorded results, so no tool runs twice.
            record_tools=self.options.tools == "recorded",
        )
        async with self._gate:
            if self._running + 1 > self.affordable_runs():
                return None
            self._tried.add((arm, task.id, round_number))
            limited = LimitedResponder(self, self.references.responder(arm))
            episode = await self._run_and_judge(flow, task, limited, responder=limited, options=options)
            run = self._keep_run(arm, episode)
        if run.left_out == "infrastructure" and arm not in self._errors:
            # The error of the call names the cause. The application may have raised a more general error from it.
            calls = self.store.calls(episode.id, lean=True)
            call_error = next((call.error for call in calls if call.error), None)
            self._errors[arm] = call_error or episode.error or "no reason recorded"
            self.first_error = self.first_error or self._errors[arm]
        self.on_run()
        return run

    async def _run_and_judge(
        self, flow: Workflow, task: Task, limited: LimitedResponder, responder: Responder, options: EpisodeOptions
    ) -> Episode:
        """Run one episode to its end and have it judged.

        `responder` answers the calls of the episode. It is `limited` itself, or it repeats recorded answers and passes
        all other calls to `limited`, which counts them.
        """
        self._running += 1
        try:
            outcome = await run_episode(flow, task, sink=self.store, responder=responder, options=options)
            await asyncio.to_thread(self.store.flush)
            await self._judge(outcome.episode)
        finally:
            self._running -= 1
            with self._lock:
                self._calls_under_way -= limited.calls
        return outcome.episode

    def admit_call(self, call: LiveCall, run: LimitedResponder) -> None:
        """Count a call that a run is about to make. Raises RunError if it would pass `max_calls`."""
        with self._lock:
            most = self.options.max_calls
            if most is not None and self.calls + self._calls_under_way >= most:
                raise RunError(f"A call of {call.role!r} was {AT_LIMIT} = {most}.")
            self._calls_under_way += 1
            run.calls += 1  # also under the lock: the run's end takes these off again

    async def fork(
        self, script: Script, call: str, task: Task, phase: str, parallel: tuple[str, ...] = ()
    ) -> FinishedFork | None:
        """Run a task again, with all calls before `call` answered from the script, and keep the result.

        The calls in `parallel`, which ran at the same time as `call`, get new answers too. Returns None if the run did
        not repeat the episode up to `call`. Raises BudgetReachedError if the fork could pass a limit.
        """
        flow = replace(self.workflow, prompts=self.references.prompts(OWN))
        limited = LimitedResponder(self, self.references.responder(OWN))
        flow, responder = repeat_episode(flow, Replay(script=script, fork=call, parallel=parallel), limited)
        number, self._next_fork = self._next_fork, self._next_fork + 1
        options = EpisodeOptions(
            phase=phase,
            rollout=number,
            timeout=self.options.timeout,
            record_tools=self.options.tools == "recorded" and bool(script.results),
            freeze=bool(script.reads),
        )
        async with self._gate:
            if self._running + 1 > self.affordable_runs():
                raise self._budget_reached(1)
            episode = await self._run_and_judge(flow, task, limited, responder=responder, options=options)
            fork = self._keep_fork(episode)
        if episode.id in self._not_judged or has_refused_call(self.store.calls(episode.id, lean=True)):
            raise self._budget_reached(1)
        self.on_run()
        return fork

    def _keep_fork(self, episode: Episode) -> FinishedFork | None:
        """Count the new calls of an ended fork and keep its result. Returns None if the fork or its judge was
        cancelled or ran into a limit, or if it did not repeat its episode up to the forked call."""
        calls = self.store.calls(episode.id)
        # Answers from the record cost nothing.
        new_calls = [call for call in calls if call.replayed is None and not has_refused_call([call])]
        cost, _unpriced = self._cost(OWN, new_calls)
        self.calls += len(new_calls)
        self.cost += cost
        if episode.status == "cancelled" or episode.id in self._not_judged or has_refused_call(calls):
            return None
        # Without `fork` the episode ended before it reached the call.
        if episode.blame == "divergence" or episode.fork is None:
            self.diverged += 1
            return None
        if not episode.is_outcome:
            self.first_error = self.first_error or episode.error or ""
        # `fork.call` is the call of the repeated episode (`fork.trunk`), `fork.at` the fork's new call in its place.
        at_fork = next((call for call in calls if call.id == episode.fork.at), None)
        answer = ""
        if at_fork is not None and at_fork.chosen is not None:
            answer = answer_line(at_fork.candidates[at_fork.chosen])
        fork = FinishedFork(
            trunk=episode.fork.trunk,
            call=episode.fork.call,
            phase=episode.phase,
            outcome=self.outcome_of(episode),
            # Raised by the application. Errors of providers and machines are no outcome.
            failed=episode.status == "error" and episode.is_outcome,
            answer=answer,
            at=episode.fork.at,
        )
        self.forks.append(fork)
        return fork

    async def score_again(self, tasks: Sequence[Task]) -> None:
        """Score the first run of each task a second time, to measure how much the scorer itself varies.

        The run is repeated with its recorded answers, so only the workflow's judge asks a model, within the limits.
        Runs with failed calls are not repeated. A run that the application does not repeat gets no second outcome.
        """
        due = []
        for task in tasks:
            run = self.finished.get((OWN, task.id, 0))
            if run is None or task.id in self._scored_again:
                continue
            if run.outcome is not None and not run.left_out and not run.failed_call:
                due.append((task, run))
        await asyncio.gather(*(self._score_run_again(task, run) for task, run in due))

    async def _score_run_again(self, task: Task, run: FinishedRun) -> None:
        """Repeat one run with its recorded answers, and keep the outcome of the repetition as its second outcome."""
        try:
            script = read_script(self.store, run.episode)
        except RecordError:
            return  # Without a complete record the run cannot be repeated, and has no second outcome.
        flow = replace(self.workflow, prompts=self.references.prompts(OWN))
        # The script answers every call, so no responder answers new ones.
        flow, responder = repeat_episode(flow, Replay(script=script), responder_of_new_calls=None)
        options = EpisodeOptions(
            phase=RESCORED,
            timeout=self.options.timeout,
            record_tools=self.options.tools == "recorded" and bool(script.results),
            freeze=bool(script.reads),
        )
        async with self._gate:
            if not self._affords_judge():
                return
            self._rescoring += 1
            try:
                outcome = await run_episode(flow, task, sink=self.store, responder=responder, options=options)
                await asyncio.to_thread(self.store.flush)
                await self._judge(outcome.episode)
            finally:
                self._rescoring -= 1
        self._keep_second_outcome(outcome.episode)

    def _keep_second_outcome(self, episode: Episode) -> None:
        """Keep the outcome of a run that was scored a second time, and do not score the run again without one."""
        self._scored_again.add(episode.task.id)
        outcome = self.outcome_of(episode)
        if outcome is not None:
            self.second_outcomes[episode.task.id] = outcome

    async def _judge_within_limits(self, episode: Episode) -> None:
        """Have the judge give a recorded episode its outcome, unless that could pass a limit."""
        if self._needs_judge(episode) and not self._affords_judge():
            self._not_judged.add(episode.id)
        else:
            await self._judge(episode)

    async def _judge(self, episode: Episode) -> None:
        """Have the workflow's judge, if it has one, give the episode an outcome that it does not have yet."""
        judge = self.workflow.episode_judge
        if judge is None or not self._needs_judge(episode):
            return
        limited = LimitedResponder(self, inner=None)
        try:
            judging, error = await judge_run(self.workflow, judge, self.store, episode, limited, self.options.timeout)
            self._count_judging(judging)
        finally:
            with self._lock:
                self._calls_under_way -= limited.calls
        if self._needs_judge(episode) and has_refused_call(self.store.calls(judging.id, lean=True)):
            self._not_judged.add(episode.id)
        # An error of the judge is not raised: the run has no outcome then, and the report counts it as left out.
        self.first_error = self.first_error or error

    def _needs_judge(self, episode: Episode) -> bool:
        """Whether the workflow's judge still has to give an episode its outcome."""
        if self.workflow.episode_judge is None or episode.status != "ok" or episode.phase == JUDGING:
            return False
        return not self.store.rewards([episode.id]).get(episode.id)

    def _count_judging(self, judging: Episode) -> None:
        """Count the calls that the judge made in one of its episodes."""
        calls = [call for call in self.store.calls(judging.id) if not has_refused_call([call])]
        if not calls:
            return
        cost, unpriced = self._cost(OWN, calls)
        self.judge.episodes += 1
        self.judge.calls += len(calls)
        self.judge.cost += cost
        self.judge.unpriced += unpriced
        self.calls += len(calls)
        self.cost += cost

    def _affords_judge(self) -> bool:
        """Whether the limits allow the calls that the judge makes for an episode."""
        options = self.options
        if options.max_calls is not None and self.judge.calls:
            expected_calls = self.calls + self._calls_under_way + self.judge.calls_per_episode
            if expected_calls > options.max_calls:
                return False
        if options.max_cost is not None and self.judge.cost:
            # The cost of a call is known once it has ended. Until then, the mean stands for each run that is scored
            # again at the moment, as it does for this episode.
            expected_cost = self.cost + (self._rescoring + 1) * self.judge.cost_per_episode
            return expected_cost <= options.max_cost
        return True

    def outcome_of(self, episode: Episode) -> float | None:
        """The outcome of an episode; None if it is not known."""
        return recorded_outcome(self.store, episode)

    def span(self) -> Span:
        """From the least to the greatest outcome of all runs."""
        return self.outcomes([run.task for run in self.finished.values()]).span()

    def _keep_run(self, arm: Arm, episode: Episode) -> FinishedRun:
        """Keep the result of an ended run under its arm, task and number, and count its calls and cost."""
        calls = self.store.calls(episode.id)
        failed = episode.status == "error" and episode.is_outcome
        outcome = self.outcome_of(episode)
        left_out = ""
        if has_refused_call(calls) or episode.id in self._not_judged:
            left_out = "limit"
        elif episode.status == "cancelled":
            left_out = "cancelled"
        elif not episode.is_outcome:
            left_out = "infrastructure"
        elif outcome is None and not failed:
            left_out = "no outcome"
        answered_calls = [call for call in calls if not has_refused_call([call])]
        cost, unpriced = self._cost(arm, answered_calls)
        recorded = episode.id in self.recorded
        run = FinishedRun(
            arm=arm,
            task=episode.task.id,
            episode=episode.id,
            number=0 if recorded else episode.rollout,
            outcome=outcome,
            failed=failed,
            left_out=left_out,
            solved=episode.solved,
            roles=Counter(call.role for call in answered_calls),
            seconds=episode.latency,
            cost=cost,
            unpriced=unpriced,
            answers=_digest_of_answers(answered_calls),
            failed_call=_first_failure(answered_calls),
        )
        if not recorded:
            self.calls += run.calls
            self.cost += run.cost
        key = (arm, run.task, run.number)
        # A run that counts is never replaced by a second attempt.
        if key not in self.finished or self.finished[key].left_out:
            self.finished[key] = run
        return run

    def _cost(self, arm: Arm, calls: Iterable[CallRecord]) -> tuple[float, int]:
        """The money for these calls of a run, and the number of calls whose cost is not known.

        Also keeps the reason for each model whose cost is not known.
        """
        cost, unpriced = 0.0, 0
        for call in calls:
            price = self._price(arm, call, self.options.prices)
            has_tokens = call.prompt_length or call.answer_length
            if price is not None and has_tokens:
                cost += money(price, call.prompt_length, call.answer_length)
                continue
            unpriced += 1
            if call.status == "ok":
                reason = "has no --price" if price is None else "reports no tokens"
                self._unpriced_models.setdefault(self._answered_by(arm, call), reason)
        return cost, unpriced

    def _price(self, arm: Arm, call: CallRecord, prices: Prices) -> tuple[float, float] | None:
        """The price of the model that answered `call` in a run of `arm`.

        In a swapped role this is the reference, although the record names the model that the application asked for. A
        fixed text costs nothing. The reference "prompts" keeps the model and changes its prompts.
        """
        reference = self._reference_of(arm, call)
        policy = "" if call.policy is None else call.policy.name
        if reference is not None and reference.kind == "text":
            return 0.0, 0.0
        if reference is not None and reference.kind != "prompts":
            return prices.get(policy) or prices.get(reference.name)
        return prices.get(policy if call.policy is not None else call.model)

    def _answered_by(self, arm: Arm, call: CallRecord) -> str:
        """The name, as in --price, of the model or policy that answered a call."""
        if call.policy is not None:
            return call.policy.name
        reference = self._reference_of(arm, call)
        if reference is not None and reference.kind == "provider":
            return reference.name
        return call.model

    def _reference_of(self, arm: Arm, call: CallRecord) -> Reference | None:
        """The reference that answered a call in a run of `arm`; None if its role is not swapped there."""
        if not arm.swaps(call.role):
            return None
        return self.reference_by_role.get(call.role) or self.reference_by_role.get("")

    @property
    def calls_per_run(self) -> float:
        """Mean number of calls of a run, with the calls of its judge; 1 before the first one."""
        counts = [run.calls for run in self.finished.values() if not run.left_out]
        return max(fmean(counts) + self.judge.calls_per_episode, 1.0) if counts else 1.0

    @property
    def cost_per_run(self) -> float:
        """Mean cost of a run, with its judge; before the first one, the cost of the judge alone, if it is known."""
        costs = [run.cost for run in self.finished.values() if not run.left_out]
        return (fmean(costs) if costs else 0.0) + self.judge.cost_per_episode

    def affordable_runs(self) -> float:
        """How many more runs fit into the limits; infinite without limits."""
        options = self.options
        room = float("inf")
        if options.max_calls is not None:
            # Without the small addition, floating-point division could make 10 affordable runs 9.999.
            room = (options.max_calls - self.calls) / self.calls_per_run + 1e-9
        if options.max_cost is not None and self.cost_per_run:
            room = min(room, (options.max_cost - self.cost) / self.cost_per_run)
        return max(room, 0.0)

    def _require_room(self, runs: int) -> None:
        """Raise BudgetReachedError if this number of further runs could pass a limit, and ConfigError if `max_cost` is
        set and a model has answered whose price is unknown."""
        if self.options.max_cost is not None and self._unpriced_models and not self.for_search:
            model, reason = next(iter(self._unpriced_models.items()))
            remedy = "Use --max-calls instead."
            if reason == "has no --price":
                remedy = f"Add --price {model}=PROMPT/COMPLETION (0/0 if it costs nothing), or use --max-calls instead."
            raise ConfigError("max_cost", self.options.max_cost, f"cannot be kept: {model} {reason}", remedy)
        if runs > self.affordable_runs():
            raise self._budget_reached(runs)

    def _budget_reached(self, runs: int) -> BudgetReachedError:
        """The error that ends the analysis before its next `runs` runs. It names the limits and the calls per run."""
        limits = []
        if self.options.max_calls is not None:
            limits.append(f"max_calls = {self.options.max_calls}")
        if self.options.max_cost is not None:
            limits.append(f"max_cost = {self.options.max_cost:g}")
        return BudgetReachedError(
            f"The next {runs} runs of about {self.calls_per_run:.1f} calls do not fit into {' and '.join(limits)}; "
            f"{self.calls} calls are made.",
            "Run the same command with a larger limit: it continues.",
        )

    def roles(self) -> list[str]:
        """The roles that made calls, in the order of their first call."""
        roles: list[str] = []
        for run in self.finished.values():
            roles += [role for role in run.roles if role not in roles]
        return roles

    def outcomes(self, tasks: Iterable[str], most_runs: int | None = None) -> Outcomes:
        """The outcomes of the runs on these tasks; with `most_runs`, of the first ones of each task in each arm.

        A run in which the application raised counts as the lowest outcome of any run, and at most 0.
        """
        task_ids = set(tasks)
        lowest = min([0.0, *(run.outcome for run in self.finished.values() if run.outcome is not None)])
        outcomes = Outcomes()
        for run in self.finished.values():
            if run.task not in task_ids or run.left_out:
                continue
            if most_runs is None or run.number < most_runs:
                outcomes.add(run.arm, run.task, lowest if run.outcome is None else run.outcome)
        return outcomes

    def own_runs(self, tasks: Iterable[str], middle: float) -> list[OwnRuns]:
        """The runs of each task by the unchanged application, in the order of `tasks`.

        A run succeeded if its metric `success` says so, or, without this metric, if its outcome is above `middle`.
        """
        success_by_task: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        for run in self.finished.values():
            if run.arm != OWN or run.left_out:
                continue
            succeeded = run.solved
            if succeeded is None:
                succeeded = run.outcome is not None and run.outcome > middle
            success_by_task[run.task][run.number] = succeeded
        own_runs = []
        for task in tasks:
            success_by_number = success_by_task[task]
            own_runs.append(OwnRuns([success_by_number[number] for number in sorted(success_by_number)]))
        return own_runs

    def repeats_itself(self, arms: Iterable[Arm]) -> bool:
        """Whether every task that ran several times in one of these arms got the same answers each time.

        False with fewer than `LEAST_REPEATS` further runs, because short answers may be the same by chance.
        """
        compared_arms = set(arms)
        digests_by_run: defaultdict[tuple[Arm, str], list[str]] = defaultdict(list)
        for run in self.finished.values():
            if run.arm in compared_arms and not run.left_out:
                digests_by_run[run.arm, run.task].append(run.answers)
        repeats = sum(len(digests) - 1 for digests in digests_by_run.values())
        return repeats >= LEAST_REPEATS and all(len(set(digests)) == 1 for digests in digests_by_run.values())


def has_refused_call(calls: Iterable[CallRecord]) -> bool:
    """Whether a call was refused because of `max_calls`. The application may have continued without its answer."""
    return any(AT_LIMIT in (call.error or "") for call in calls)


def recorded_outcome(store: Store, episode: Episode) -> float | None:
    """The outcome of a stored episode; None if it is not known."""
    return summed_outcome(episode, store.rewards([episode.id]).get(episode.id))


def _first_failure(calls: Sequence[CallRecord]) -> str:
    """The error of the first call that failed or timed out; "" if none did."""
    for call in calls:
        if call.status in ("error", "timeout"):
            return call.error or call.status
    return ""


def _digest_of_answers(calls: Sequence[CallRecord]) -> str:
    """Hash the answers of a run. Two runs with the same answers have the same digest, whatever the order of parallel
    calls."""
    answers = []
    for call in calls:
        text, tool_functions = "", []
        if call.chosen is not None:
            candidate = call.candidates[call.chosen]
            text = candidate.text
            # Without the ids of tool calls, which are new in every answer.
            tool_functions = [tool.get("function") for tool in candidate.tool_calls]
        answers.append(canonical([call.role, call.turn, text, tool_functions]))
    # Sorted, as parallel calls are recorded in the order in which they happen to begin.
    return hashlib.sha256(b"\n".join(sorted(answers))).hexdigest()
