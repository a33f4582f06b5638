"""Runs recorded episodes again: one from a call on, or all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cotune.adapters.manifest import is_export
from cotune.adapters.prompts import prompts_of
from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.rollout import repeat_episode
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, load_workflow
from cotune.errors import ConfigError, RecordError
from cotune.recording.recorder import Responder
from cotune.records.answers import Answer
from cotune.records.structs import JUDGING, CallRecord, Candidate, Episode, Record
from cotune.replay.forks import can_repeat_before
from cotune.replay.script import Replay, read_script
from cotune.sampling.responder import PolicyResponder
from cotune.storage.checkpoints import newest_checkpoint
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_code import open_run_code, redactor_of
from cotune.storage.run_layout import RunLayout, is_run, known_workflow, placed_config, read_run_json
from cotune.storage.trace_file import read_trace
from cotune.tables import plural
from cotune.trainer.evaluation.policies import answering
from cotune.trainer.replay.options import ReplayOptions
from cotune.trainer.replay.vocabulary import RecordedIds, without_foreign_ids


class EpisodeWithCalls(msgspec.Struct, frozen=True):
    """An episode with its calls, in the order of their steps, and its rewards."""

    episode: Episode
    calls: Sequence[CallRecord]
    rewards: Mapping[str, float]


class Repetition(msgspec.Struct, frozen=True):
    """A recorded episode and its repetitions."""

    old: EpisodeWithCalls
    """The recorded episode."""
    fork: int | None
    """The step of the first call that the repetitions do not answer from the record; None if they answer all from
    it."""
    new: Sequence[EpisodeWithCalls]
    """The repetitions."""


class ReplayReport(msgspec.Struct, frozen=True):
    """The result of `replay`."""

    who: str
    """Who answered the calls that were not answered from the record; empty if there were none."""
    repetitions: Sequence[Repetition]
    planned: int = 0
    """The number of episodes to run. Fewer were run if the replay was interrupted."""

    @property
    def interrupted(self) -> bool:
        """Whether fewer episodes were run than planned."""
        return sum(len(repetition.new) for repetition in self.repetitions) < self.planned

    @property
    def diverged(self) -> int:
        """Number of new episodes that diverged from the record."""
        count = 0
        for repetition in self.repetitions:
            count += sum(new.episode.blame == "divergence" for new in repetition.new)
        return count

    @property
    def failed(self) -> int:
        """Number of new episodes that failed without a divergence, although the recorded one did not fail."""
        count = 0
        for repetition in self.repetitions:
            if repetition.old.episode.status != "ok":
                continue
            for new in repetition.new:
                if new.episode.status != "ok" and new.episode.blame != "divergence":
                    count += 1
        return count


class _Plan(NamedTuple):
    """A recorded episode to run again."""

    old: EpisodeWithCalls
    replay: Replay | None
    """How calls are answered from the record; None to answer no call from it."""


Watch = Callable[[int], AbstractContextManager[Callable[[Episode], None]]]
"""A function that takes the number of episodes to run. Its context yields the function to call with each episode that
has ended."""


def replay(run: str | Path, options: ReplayOptions, watch: Watch | None = None) -> ReplayReport:
    """Run one recorded episode again, or all of them, and report on them. After Ctrl-C, report on the episodes that
    have ended.

    Calls before `options.call` are answered from the record. This call and later ones are answered by `options.model`,
    else by the run's newest policies, else by the application's own provider. Without `call`, all calls are answered
    from the record, or by the model if one is named. Raises ConfigError, RecordError, RunError before anything runs.
    """
    workflow = _load_workflow(Path(run), options)
    if options.out is not None and RunLayout(options.out).records.exists():
        raise ConfigError("out", options.out, "already holds records", "Name a new folder.")
    with open_store(run, read_only=True) as store:
        plans = [_plan_repetition(store, episode, options) for episode in _episodes_to_run(store, options)]
        with watch(len(plans) * options.k) if watch else nullcontext() as on_episode:
            return run_sync(_replay(Path(run), workflow, plans, options, on_episode))


async def _replay(
    run: Path,
    workflow: Workflow,
    plans: Sequence[_Plan],
    options: ReplayOptions,
    on_episode: Callable[[Episode], None] | None,
) -> ReplayReport:
    """Run each plan `k` times, and report the new episodes by recorded episode. `on_episode` is called with each of
    them when it has ended."""
    has_new_calls = options.model is not None or options.call is not None
    gate = asyncio.Semaphore(options.concurrency)
    async with contextlib.AsyncExitStack() as stack:
        # Open the store of the new episodes, and what answers new calls.
        store = stack.enter_context(open_store(RunLayout(options.out).records)) if options.out else None
        who = ""
        policies: PolicyResponder | None = None
        if has_new_calls:
            trained = _trained_policies(run, options)
            if trained:
                who = f"the policies of {trained}"
            elif options.model:
                who = f"{options.model}, untrained"
            else:
                who = "the application's own provider"
            answers = answering(
                workflow,
                policies=trained,
                model=options.model,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                put_back=_MISSING_BASE_REMEDY,
                seed=0,
            )
            policies = await stack.enter_async_context(answers)
        if policies is not None and options.model is not None and options.call is not None:
            # Another model may not be able to read the recorded token ids of the calls before.
            plans, rendered = await asyncio.to_thread(_drop_foreign_ids, plans, RecordedIds(run, policies.chat_of))
            if rendered:
                who += f" (recorded prompts of {plural(rendered, 'episode')} are rendered in its own template)"

        # Run all repetitions. Their results are by the index of the plan and the number of the repetition.
        ended: dict[tuple[int, int], EpisodeWithCalls] = {}

        async def run_again(index: int, number: int) -> None:
            async with gate:
                new = await _run_once(workflow, plans[index], policies, number, options, store)
            if on_episode is not None:
                on_episode(new.episode)
            ended[index, number] = new

        runs = list(itertools.product(range(len(plans)), range(options.k)))
        try:
            await asyncio.gather(*(run_again(index, number) for index, number in runs))
        except asyncio.CancelledError:  # Ctrl-C: report on the episodes that have ended
            if not ended or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()

    # Episodes have ended in any order. Group them by recorded episode.
    repetitions: list[Repetition] = []
    for index, (old, replay) in enumerate(plans):
        new = [ended[index, number] for number in range(options.k) if (index, number) in ended]
        if new:
            repetitions.append(Repetition(old, _first_new_step(old, replay), new))
    return ReplayReport(who, repetitions, len(runs))


async def _run_once(
    workflow: Workflow,
    plan: _Plan,
    policies: PolicyResponder | None,
    number: int,
    options: ReplayOptions,
    store: Store | None,
) -> EpisodeWithCalls:
    """Run a plan once, as its repetition `number`. `policies` answer new calls; if None, the application's provider
    does. The records also go to `store`."""
    sink = _RecordList(store)
    flow = workflow
    responder: Responder | None = policies
    record_tools = False
    freeze = False
    if plan.replay is not None:
        flow, responder = repeat_episode(workflow, plan.replay, policies)
        # Tools and clocks are repeated if the recorded episode has recorded them.
        record_tools = bool(plan.replay.script.results)
        freeze = bool(plan.replay.script.reads)
    outcome = await run_episode(
        flow,
        plan.old.episode.task,
        sink=sink,
        responder=responder,
        options=EpisodeOptions(
            phase="replay",
            rollout=number,
            timeout=options.timeout,
            offline=options.model is None and options.call is None,
            record_tools=record_tools,
            freeze=freeze,
        ),
    )
    calls = [record for record in sink.records if isinstance(record, CallRecord)]
    calls.sort(key=lambda call: call.step)
    return EpisodeWithCalls(outcome.episode, calls, outcome.rewards)


def _drop_foreign_ids(plans: Sequence[_Plan], ids: RecordedIds) -> tuple[list[_Plan], int]:
    """Return the plans without the token ids that another model cannot read, and the number of changed plans."""
    new_plans: list[_Plan] = []
    changed_plans = 0
    for plan in plans:
        if plan.replay is None:
            new_plans.append(plan)
            continue
        replay, has_changed = without_foreign_ids(plan.replay, ids)
        changed_plans += has_changed
        new_plans.append(_Plan(plan.old, replay))
    return new_plans, changed_plans


def _trained_policies(run: Path, options: ReplayOptions) -> str | Path | None:
    """Return the run or export whose policies answer new calls. None if the application's provider or an untrained
    model does."""
    if options.model is None:
        has_checkpoint = newest_checkpoint(RunLayout(run).checkpoints) is not None
        return run if has_checkpoint else None
    is_trained = is_export(Path(options.model)) or is_run(options.model)
    return options.model if is_trained else None


_MISSING_BASE_REMEDY = (
    "Put the old one back, or export the run with its present location (cotune export RUN --out adapters/ --model "
    "FOLDER), and replay with --model adapters/."
)


class _RecordList:
    """A sink that collects the records of an episode, and also writes them to `store`, if there is one."""

    def __init__(self, store: Store | None) -> None:
        self.records: list[Record] = []
        self._store = store

    def write(self, records: Sequence[Record]) -> None:
        self.records.extend(records)
        if self._store is not None:
            self._store.write(records)


def _load_workflow(run: Path, options: ReplayOptions) -> Workflow:
    """Load the application to replay, with the redactor, role names and prompts of the run, unless the options name
    others. Raises ConfigError if neither the options nor the records name an application."""
    # The description of the run, or of the trace; empty if the records have none.
    description = read_run_json(run) if is_run(run) else read_trace(run)
    address = options.workflow or known_workflow(description, run.absolute())
    if address is None:
        remedy = "For example: cotune replay RUN --workflow app:solve --all"
        raise ConfigError(
            "workflow", None, "is missing, and the records do not say which application made them", remedy
        )
    config: Mapping[str, Any] = {}
    if description:
        # The run's code is loaded only if this user has written or trusted its folder, except for code that the options
        # name.
        from_options = [name for name in ("workflow", "roles_by") if getattr(options, name)]
        open_run_code(run, from_options, only=("workflow", "roles_by", "redact"), described=description)
        config = placed_config(description, run.absolute())
    redact = redactor_of(run.absolute()) or config.get("redact", "")
    flow = load_workflow(address).redacted(redact).named_by(options.roles_by or config.get("roles_by"))
    return flow.prompted(options.prompts or prompts_of(run))


def _episodes_to_run(store: Store, options: ReplayOptions) -> list[Episode]:
    """Return the episodes to run again. With `all`, these are the finished episodes of the application itself, without
    forks, dry runs and judges."""
    if options.episode is not None:
        return [store.episode(store.figures().episode_named(options.episode))]
    episodes: list[Episode] = []
    for episode in store.episodes():
        is_of_application = episode.fork is None and episode.phase not in ("check", JUDGING)
        if is_of_application and episode.is_outcome and episode.calls:
            episodes.append(episode)
    if not episodes:
        raise RecordError("The records have no finished episode.", "See them with: cotune show.")
    return episodes[: options.limit]


def _plan_repetition(store: Store, episode: Episode, options: ReplayOptions) -> _Plan:
    """Read an episode with its record, and plan its repetition. Raises RecordError, ConfigError."""
    # 1. All calls by the model.
    calls = store.calls(episode.id)
    old = EpisodeWithCalls(episode, calls, store.rewards([episode.id])[episode.id])
    if options.model is not None and options.call is None:
        return _Plan(old, replay=None)

    # 2. All calls from the record.
    if any(call.redacted for call in calls):
        raise RecordError(
            f"Episode {episode.id} cannot be repeated: a redactor changed its stored calls.",
            "Choose another episode, or record without redactors.",
        )
    script = read_script(store, episode.id)
    if options.call is None:
        return _Plan(old, Replay(script=script))

    # 3. The calls before `options.call` from the record.
    step = options.call
    if not options.episode:  # with --all, shorter episodes are forked at their last call
        step = min(step, len(calls) - 1)
    fork = next((call for call in calls if call.step == step), None)
    if fork is None:
        fault = f"is not a call of this episode, which has 0 to {len(calls) - 1}"
        raise ConfigError("call", step, fault, "See cotune show --episode.")
    if not can_repeat_before(calls, fork):
        unanswered = next(call for call in calls if call.status != "ok" and call.id != fork.id)
        raise ConfigError(
            "call",
            step,
            f"comes after call {unanswered.step} of role {unanswered.role!r}, which has no answer to repeat",
            f"Choose {unanswered.step} or an earlier call.",
        )
    return _Plan(old, Replay(script=script, fork=fork.id, answer=_parse_answer(options.answer)))


def _first_new_step(old: EpisodeWithCalls, replay: Replay | None) -> int | None:
    """Return the step of the first call that is not answered from the record; None if all are."""
    if replay is None:
        return 0
    for call in old.calls:
        if call.id == replay.fork:
            return call.step
    return None


def _parse_answer(text: str | None) -> Answer | None:
    """Return the answer of the user (`options.answer`) in the form of a recorded one. It is a text, or an assistant
    message as JSON."""
    if text is None:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": text}
    with contextlib.suppress(ValueError):
        parsed = json.loads(text)
        if isinstance(parsed, dict) and parsed.keys() & {"content", "tool_calls"}:
            message = {"role": "assistant", "content": None, **parsed}
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    candidate = Candidate(index=0, text=str(message.get("content") or ""), message=message, finish_reason=finish)
    return Answer(candidates=(candidate,))
