"""The runs of a dry run: each task at least three times, with other answers each time, and twice at once."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cotune.episodes.episode import EpisodeOptions, Outcome, run_episode
from cotune.episodes.workflows import Workflow
from cotune.errors import Outage
from cotune.records.structs import CallRecord, Task
from cotune.storage.protocol import Store
from cotune.tables import answer_line
from cotune.trainer.before.answers.recorded import NO_RECORD
from cotune.trainer.before.answers.responder import ENDLESS, CheckResponder
from cotune.trainer.before.check.report import CheckLimits
from cotune.trainer.before.check.watch import Watch

LEAST_RUNS = 3
MOST_RUNS = 8
PAIRS = 3
"""A failed pair of runs at once blocks only if this many pairs in a row fail. One failure may be chance."""


@dataclass
class Run:
    """One run of a task: its number decides its answers."""

    number: int
    outcome: Outcome
    calls: Sequence[CallRecord]
    """The calls, without the ones that the dry run itself refused."""
    logged: Sequence[BaseException]
    """Exceptions that the application or its framework swallowed."""
    asked: str
    """How the application asked a person for input; empty if it did not."""
    cut: bool
    """Whether it reached the limit of time or calls."""

    @property
    def ended(self) -> bool:
        return self.outcome.error is None

    @property
    def answered(self) -> bool:
        """Whether the run may have failed because of an answer: it had one, or a recorded one is missing, and no call
        failed for another reason."""
        call_errors = [str(call.error) for call in self.calls if call.status not in ("ok", "cancelled")]
        without_record = [error for error in call_errors if NO_RECORD in error]
        if len(without_record) < len(call_errors):
            return False
        return bool(self.last_answer or without_record)

    @property
    def roles(self) -> set[str]:
        return {call.role for call in self.calls}

    @property
    def last_answer(self) -> str:
        """The call that was answered last, and its answer, on one line; empty without one."""
        for call in reversed(self.calls):
            if call.status == "ok" and call.candidates:
                candidate = call.candidates[call.chosen or 0]
                return f"{call.role} (turn {call.turn}): {answer_line(candidate)}"
        return ""


@dataclass
class TaskRuns:
    """The runs of one task, and pairs of runs at the same time, which get the same answers as the run that is
    shown."""

    task: Task
    runs: list[Run] = field(default_factory=list)
    pairs: list[list[Run]] = field(default_factory=list)

    @property
    def all(self) -> list[Run]:
        return [*self.runs, *(run for pair in self.pairs for run in pair)]

    @property
    def shown(self) -> Run:
        """The run to show: the first one that ended well and swallowed no exception.

        Without such a run, it is the first that ended well, or else the first that did not end in an outage, which may
        pass, or else the first run.
        """
        ended = [run for run in self.runs if run.ended]
        clean = [run for run in ended if not run.logged]
        without_outage = [run for run in self.runs if not isinstance(run.outcome.error, Outage)]
        for preferred in (clean, ended, without_outage):
            if preferred:
                return preferred[0]
        return self.runs[0]

    @property
    def calls(self) -> list[CallRecord]:
        """The calls of the run that is shown, and of other runs the calls of roles that it does not have."""
        calls: list[CallRecord] = []
        for run in (self.shown, *self.runs):
            roles = {call.role for call in calls}
            calls += [call for call in run.calls if call.role not in roles]
        return calls

    @property
    def failed_pairs(self) -> list[list[Run]]:
        """Pairs with a failed run, unless both runs only reached a limit."""
        failed = [pair for pair in self.pairs if any(not run.ended for run in pair)]
        return [pair for pair in failed if not all(run.cut for run in pair)]


@dataclass
class Runner:
    """Runs `workflow` on tasks, each run within `limits`; `responder(number)` answers a run."""

    workflow: Workflow
    store: Store
    responder: Callable[[int], CheckResponder]
    watch: Watch
    """Also collects the parts of the application that run."""
    say: Callable[[str], None]
    limits: CheckLimits
    at_once: bool
    offline: bool

    async def run(self, task: Task) -> TaskRuns:
        """Run a task until a further run would hardly show anything new, then run it twice at the same time, to see
        whether episodes disturb each other. A pair that fails is repeated up to `PAIRS` times in all."""
        runs = TaskRuns(task)
        while self.needs_another(runs.runs):
            runs.runs.append(await self.run_once(task, len(runs.runs)))
        if not self.at_once or not runs.shown.ended:
            return runs
        for _ in range(PAIRS):
            meeting = threading.Barrier(2)
            pair = [self.run_once(task, runs.shown.number, meeting, how=", twice at once") for _ in range(2)]
            runs.pairs.append(list(await asyncio.gather(*pair)))
            if len(runs.failed_pairs) < len(runs.pairs):
                break  # a pair ended well
        return runs

    def needs_another(self, runs: Sequence[Run]) -> bool:
        """Whether another run may show something new. It may if the application has not ended well yet, if a new role
        appeared in the last two runs, or if a part that the framework lists has not run."""
        makes_no_calls = bool(runs) and not any(run.roles for run in runs)
        if len(runs) >= MOST_RUNS or makes_no_calls:
            return False
        # Other answers rarely shorten runs that reach the time limit, so two of them are enough.
        if sum(run.outcome.live.interrupted for run in runs) >= 2:
            return False
        if len(runs) < LEAST_RUNS or not any(run.ended for run in runs):
            return True
        roles_before = set().union(*(run.roles for run in runs[:-2]))
        roles_of_last_two = runs[-1].roles | runs[-2].roles
        if not roles_of_last_two <= roles_before:
            return True
        return any(not self.watch.ran(part) for part in self.watch.known)

    async def run_once(
        self, task: Task, number: int, meeting: threading.Barrier | None = None, *, how: str = ""
    ) -> Run:
        """Run the workflow once. `number` decides the answers. `how` is added to the line of progress.

        With a `meeting`, a barrier for two, the run waits at its first call for the first call of another run, so that
        both overlap.
        """
        self.say(f"running {self.workflow.name} on task {task.id}{how} ...")
        responder = self.responder(number)
        responder.meeting = meeting
        responder.limit = self.limits.calls
        options = EpisodeOptions(
            phase="check",
            timeout=self.limits.timeout,
            offline=self.offline,
            fixed_embeddings=self.offline,
            parts=self.watch,
        )
        outcome = await run_episode(self.workflow, task, sink=self.store, responder=responder, options=options)
        if meeting is not None:
            meeting.abort()  # the other run need not wait any longer
        self.store.flush()
        id = outcome.episode.id
        notes = outcome.live.notes
        question = ""
        if notes.get("waits"):
            question = "the graph stopped at an interrupt()"
        question = self.watch.asked.get(id, question)
        return Run(
            number=number,
            # A framework wraps an error of a call into its own. The error of the call itself is shorter.
            outcome=dataclasses.replace(outcome, error=outcome.live.fatal or outcome.error),
            calls=[call for call in self.store.calls(id) if ENDLESS not in str(call.error)],
            logged=[*self.watch.logged.get(id, ()), *notes.get("raised", ())],
            asked=question,
            cut=outcome.live.interrupted or responder.calls > responder.limit,
        )
