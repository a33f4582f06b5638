"""The runs of a dry run: each task until a run ends well, then twice at once, then while parts of it are idle."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from cotune.episodes.episode import EpisodeOptions, Outcome, run_episode
from cotune.episodes.workflows import Workflow
from cotune.recording.app_parts import Parts
from cotune.records.structs import CallRecord, Task
from cotune.storage.protocol import Store
from cotune.trainer.before.check.causes import Cause, Made, cause_of, cause_of_error
from cotune.trainer.before.check.watch import Watch
from cotune.trainer.before.stub.fitting import AS_IT_FITS, Manner, lessons
from cotune.trainer.before.stub.stub import ENDLESS, StubResponder

RUNS = 14
"""Most runs of a task, those at once included."""
_IDLE = 4
"""Most of them that look for parts that have not run."""
_SECONDS = 20.0
"""After this time no further run begins."""
_OTHERWISE = (
    Manner("without tool calls", call_tools=False),
    Manner("in the form that the prompts show", form=True),
    Manner("with 0", text="0", number=0),
    Manner("with yes", text="yes", flag=True),
    Manner("with no", text="no", flag=False),
    Manner("with 100", text="100", number=100, flag=True),
)
"""How answers are made up after others have failed."""


@dataclass
class Run:
    """One run of a task: how its answers were made up, how it ended, and its calls."""

    manner: Manner
    variant: int
    outcome: Outcome
    calls: Sequence[CallRecord]
    cause: Cause
    """Why it failed, where it did."""
    logged: Sequence[BaseException]
    stub: StubResponder

    @property
    def ended(self) -> bool:
        return self.outcome.error is None

    @property
    def unscored(self) -> list[CallRecord]:
        """Calls whose scorer failed."""
        return [call for call in self.calls if call.status == "ok" and call.error]

    @property
    def returned_nothing(self) -> bool:
        """Whether the workflow ended without a reward: it may have none where it cannot read an answer."""
        error = self.outcome.error
        return error is not None and error.__cause__ is None and "which is not a reward" in error.cause


@dataclass
class TaskRuns:
    """The runs of one task. `twice` are those that ran at once; `alone` says that only one at a time ends well."""

    task: Task
    runs: list[Run] = field(default_factory=list)
    twice: list[Run] = field(default_factory=list)
    alone: bool = False

    @property
    def all(self) -> list[Run]:
        return [*self.runs, *self.twice]

    @property
    def shown(self) -> Run:
        """The first run that ended well."""
        clean = (run for run in self.runs if run.ended and not run.logged)
        return next(clean, next((run for run in self.runs if run.ended), self.runs[0]))

    @property
    def calls(self) -> list[CallRecord]:
        """The calls of the run that is shown, and those of other runs by roles that it has not; without those that the
        dry run itself refused."""
        calls: list[CallRecord] = []
        for run in (self.shown, *self.runs):
            roles = {call.role for call in calls}
            calls += [call for call in run.calls if call.role not in roles and not refused(call)]
        return calls

    @property
    def undecided(self) -> bool:
        """Whether every run failed, and each by a made-up answer, so far as one can tell."""
        return all(not run.ended and run.cause.by_answer for run in self.runs)


@dataclass
class Runner:
    """Runs `workflow` on tasks; `stub(variant, manner)` answers a run. None takes longer than `timeout` seconds."""

    workflow: Workflow
    store: Store
    stub: Callable[[int, Manner], StubResponder]
    timeout: float
    watch: Watch
    manner: Manner = AS_IT_FITS
    at_once: bool = True
    say: Callable[[str], None] = lambda text: None
    parts: Parts = field(default_factory=Parts)

    async def run(self, tasks: Sequence[Task]) -> list[TaskRuns]:
        return [await self._task(task) for task in tasks]

    async def _task(self, task: Task) -> TaskRuns:
        found, ends = TaskRuns(task), time.perf_counter() + _SECONDS
        await self._until_it_ends(found, ends)
        good = found.shown
        if good.ended and self.at_once and time.perf_counter() < ends:
            await self._twice(found, good)
        # with choices moved on, while that may lead elsewhere
        for shift in range(1, _IDLE):
            if not (good.ended and time.perf_counter() < ends and self._more(found, shift)):
                break
            found.runs.append(await self._once(task, good.variant + shift, good.manner, good))
        # with other answers, while a part has not run
        routed = [Manner("with words that are waited for", instead={"": [word]}) for word in self.parts.words]
        for manner in (*routed, *_OTHERWISE) if good.ended and good.calls else ():
            if self._idle("member", "agent") and manner.call_tools and time.perf_counter() < ends:
                other = msgspec.structs.replace(manner, call_tools=good.manner.call_tools)
                found.runs.append(await self._once(task, good.variant, other, good))
        return found

    async def _until_it_ends(self, found: TaskRuns, ends: float) -> None:
        """Run the task until a run ends well, each time with other answers, while answers are to blame."""
        tools = self.manner.call_tools
        manner, others = self.manner, [self.manner, *(one for one in _OTHERWISE if tools or one.call_tools)]
        variant, learned = 0, 0
        while True:
            run = await self._once(found.task, variant, manner)
            found.runs.append(run)
            fine = run.ended and not run.logged and not run.unscored
            if fine or not (run.cause.by_answer or run.returned_nothing) or time.perf_counter() > ends:
                return
            news = {k: v for k, v in run.cause.instead.items() if manner.instead.get(k) != v}
            if news and learned < 4:
                learned += 1
                manner = msgspec.structs.replace(manner, about=_LEARNED, instead=_and(manner.instead, news))
            elif others and len(found.runs) < RUNS - 2:
                variant, manner = variant + 1, others.pop(0)
                if not (manner.call_tools or run.stub.offered):
                    manner = others.pop(0)
            else:
                return

    async def _twice(self, found: TaskRuns, good: Run) -> None:
        """Run the task twice at once, answered as in the run that ended well. What fails is tried again alone."""
        for _ in range(2):
            meeting = threading.Barrier(2)
            both = (self._once(found.task, good.variant, good.manner, good, meeting) for _ in range(2))
            found.twice = list(await asyncio.gather(*both))
            if all(run.ended for run in found.twice):
                break
            alone = await self._once(found.task, good.variant, good.manner, good)
            if not alone.ended:  # it fails by chance
                break
        else:
            found.alone = True

    def _idle(self, *ignored: str) -> bool:
        """Whether a part of the application has not run; parts of `ignored` kinds do not count."""
        return any(not self.parts.ran(part) for part in self.parts.known if part.kind not in ignored)

    def _more(self, found: TaskRuns, shift: int) -> bool:
        """Whether another run may show what none has: a part that has not run, a tool that was not called, or a role
        that is as new as those of the last run."""
        *before, last = [{call.role for call in run.calls} for run in found.runs if run.ended]
        new = bool(before) and not last <= set().union(*before)
        stubs = [run.stub for run in found.runs]
        offered = {tool for stub in stubs for tool in stub.offered} - {tool for stub in stubs for tool in stub.called}
        branched = any(stub.branched for stub in stubs)
        branched = branched or any(len(words) > 1 for words in found.shown.manner.instead.values())
        ways = any(stub.ways for stub in stubs)
        uncalled = bool(offered) and self.manner.call_tools and ways
        return (branched and shift == 1) or uncalled or new or (self._idle() and (branched or ways))

    async def _once(
        self,
        task: Task,
        variant: int,
        manner: Manner,
        after: Run | None = None,
        meeting: threading.Barrier | None = None,
    ) -> Run:
        """One run; `after` another, it may take three times as long. With a `meeting` it overlaps another one."""
        timeout = self.timeout
        if after is not None:
            timeout = min(timeout, max(_SECONDS, 3 * after.outcome.episode.latency))
        self.say(f"running {self.workflow.name} on task {task.id} with made-up answers {manner.about}".strip() + " ...")
        stub = self.stub(variant, manner)
        stub.meeting = meeting
        options = EpisodeOptions(phase="check", timeout=timeout, offline=True, parts=self.parts)
        outcome = await run_episode(self.workflow, task, sink=self.store, responder=stub, options=options)
        if meeting is not None:
            meeting.abort()  # who still waits need not any more
        raised = outcome.error.__cause__ if outcome.error is not None else None
        id, notes = outcome.episode.id, outcome.live.notes
        if notes.get("waits"):
            self.watch.asked.setdefault(id, "the graph stopped at an interrupt()")
        # A framework wraps what was raised into its own error, traceback and all; the cause says it better.
        outcome = dataclasses.replace(outcome, error=outcome.live.fatal or outcome.error)
        self.store.flush()
        calls = list(self.store.calls(id))
        logged = [*self.watch.logged.get(id, ()), *notes.get("raised", ())]
        cause = cause_of(outcome, calls, raised, asked=id in self.watch.asked)
        run = Run(manner, variant, outcome, calls, cause, logged, stub)
        if run.ended and (logged or run.unscored):
            causes = [cause_of_error(error, calls) for error in logged]
            texts = Made.of(calls).texts
            causes += [Cause(True, lessons(str(call.error), texts)) for call in run.unscored]
            by_answer = any(one.by_answer for one in causes)
            run.cause = Cause(by_answer, {k: v for one in causes for k, v in one.instead.items()}, causes[0].answer)
        return run


def refused(call: CallRecord) -> bool:
    """Whether a call was one too many for the dry run."""
    return ENDLESS in str(call.error)


_LEARNED = "that the last error asks for"


def _and(known: Mapping[str, Sequence[str]], news: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The answers that two errors in turn ask for. If the first wants an object, the second is about its values."""
    before, after = known.get("", ()), news.get("", ())
    objects = [text for text in before if text.startswith("{")]
    if objects and after and not after[0].startswith("{"):
        news = {**news, "": [re.sub(r'"[a-z]"(?!:)', json.dumps(after[0]), text) for text in objects]}
    elif len(before) == len(after) == 1 and not objects:  # each is looked for in a text
        news = {**news, "": ["\n".join([*before, *after])]}
    return {**known, **news}
