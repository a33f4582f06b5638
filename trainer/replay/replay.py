"""Runs recorded episodes again: one from a call on, or all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from cotune.adapters.manifest import is_export
from cotune.adapters.prompts import prompts_of
from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.rollout import repeating
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, load_workflow
from cotune.errors import ConfigError, RecordError
from cotune.recording.recorder import Responder
from cotune.records.answers import Answer
from cotune.records.structs import JUDGING, CallRecord, Candidate, Episode, Record
from cotune.replay.forks import repeatable
from cotune.replay.script import Replay, read_script
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


class Seen(msgspec.Struct, frozen=True):
    """An episode with its calls in step order and its rewards."""

    episode: Episode
    calls: Sequence[CallRecord]
    rewards: Mapping[str, float]


class Repetition(msgspec.Struct, frozen=True):
    """A recorded episode, the step of the call at which it was forked (None: nowhere), and its repetitions."""

    old: Seen
    fork: int | None
    new: Sequence[Seen]


class ReplayReport(msgspec.Struct, frozen=True):
    """The result of `replay`; `who` answered the calls that are not in the record ("" for nobody)."""

    who: str
    repetitions: Sequence[Repetition]
    planned: int = 0
    """Episodes that were to be run; fewer were where it was interrupted."""

    @property
    def interrupted(self) -> bool:
        return sum(len(one.new) for one in self.repetitions) < self.planned

    @property
    def diverged(self) -> int:
        return sum(seen.episode.blame == "divergence" for one in self.repetitions for seen in one.new)

    @property
    def failed(self) -> int:
        """Episodes that failed now, other than by a divergence, and had not failed before."""
        return sum(
            seen.episode.status != "ok" and seen.episode.blame != "divergence" and one.old.episode.status == "ok"
            for one in self.repetitions
            for seen in one.new
        )


Watch = Callable[[int], AbstractContextManager[Callable[[Episode], None]]]
"""Gets the number of episodes to run, and gives a function to call with each that has ended."""


def replay(run: str | Path, options: ReplayOptions, watch: Watch | None = None) -> ReplayReport:
    """Run one recorded episode again, or all, and report on them; after Ctrl-C, on those that had ended.

    Calls before `options.call` are answered from the record; at it and after it answers `options.model`, or else the
    run's newest policies, or else the application's own provider. Without `call` all is answered from the record, or,
    where a model is named, nothing is. Raises ConfigError, RecordError, RunError before anything is run.
    """
    workflow = _workflow(Path(run), options)
    if options.out is not None and RunLayout(options.out).records.exists():
        raise ConfigError("out", options.out, "already holds records", "Name a new folder.")
    with open_store(run, read_only=True) as store:
        plan = [_planned(store, episode, options) for episode in _episodes(store, options)]
        with watch(len(plan) * options.k) if watch else nullcontext() as on_episode:
            return run_sync(_replay(Path(run), workflow, plan, options, on_episode))


async def _replay(
    run: Path,
    workflow: Workflow,
    plan: Sequence[tuple[Seen, Replay | None]],
    options: ReplayOptions,
    on_episode: Callable[[Episode], None] | None,
) -> ReplayReport:
    new = options.model is not None or options.call is not None
    gate = asyncio.Semaphore(options.concurrency)
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(open_store(RunLayout(options.out).records)) if options.out else None
        who, policies = "", None
        if new:
            trained = _policies(run, options)
            who = f"the policies of {trained}" if trained else f"{options.model}, untrained"
            who = who if trained or options.model else "the application's own provider"
            answers = answering(
                workflow,
                policies=trained,
                model=options.model,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                put_back=_PUT_BACK,
                seed=0,
            )
            policies = await stack.enter_async_context(answers)
        if policies is not None and options.model is not None and options.call is not None:
            plan, anew = await asyncio.to_thread(_readable, plan, RecordedIds(run, policies.chat_of))
            who += f" (recorded prompts of {plural(anew, 'episode')} are rendered in its own template)" if anew else ""

        ended: dict[tuple[int, int], Seen] = {}

        async def again(place: int, number: int) -> None:
            old, replay = plan[place]
            sink, flow = _Kept(store), workflow
            responder: Responder | None = policies
            if replay is not None:
                flow, responder = repeating(workflow, replay, responder)
            async with gate:
                outcome = await run_episode(
                    flow,
                    old.episode.task,
                    sink=sink,
                    responder=responder,
                    options=EpisodeOptions(
                        phase="replay",
                        rollout=number,
                        timeout=options.timeout,
                        offline=not new,
                        record_tools=replay is not None and bool(replay.script.results),
                        freeze=replay is not None and bool(replay.script.reads),
                    ),
                )
            if on_episode is not None:
                on_episode(outcome.episode)
            calls = [record for record in sink.records if isinstance(record, CallRecord)]
            seen = Seen(outcome.episode, sorted(calls, key=lambda call: call.step), outcome.rewards)
            ended[place, number] = seen

        places = [(place, number) for place in range(len(plan)) for number in range(options.k)]
        try:
            await asyncio.gather(*(again(*place) for place in places))
        except asyncio.CancelledError:  # Ctrl-C: report on the episodes that ended
            if not ended or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
    # Grouped by recorded episode again, as episodes ended in any order.
    together = [[ended[place, n] for n in range(options.k) if (place, n) in ended] for place in range(len(plan))]
    return ReplayReport(
        who,
        [Repetition(old, _step(old, one), new) for (old, one), new in zip(plan, together, strict=True) if new],
        len(places),
    )


def _readable(
    plan: Sequence[tuple[Seen, Replay | None]], ids: RecordedIds
) -> tuple[list[tuple[Seen, Replay | None]], int]:
    """The plan without token ids that another model cannot read, and the number of episodes with such."""
    readable = [(old, replay and without_foreign_ids(replay, ids)) for old, replay in plan]
    return [(old, found and found[0]) for old, found in readable], sum(1 for _, found in readable if found and found[1])


def _policies(run: Path, options: ReplayOptions) -> str | Path | None:
    """The run or export whose policies answer new calls; None where the application's provider or a model does."""
    if options.model is None:
        return None if newest_checkpoint(RunLayout(run).checkpoints) is None else run
    return options.model if is_export(Path(options.model)) or is_run(options.model) else None


_PUT_BACK = (
    "Put the old one back, or name where it is to cotune export RUN --out adapters/ --model, and replay with "
    "--model adapters/."
)


class _Kept:
    """A sink that keeps the records of an episode, and passes them on to `store`."""

    def __init__(self, store: Store | None) -> None:
        self.records: list[Record] = []
        self._store = store

    def write(self, records: Sequence[Record]) -> None:
        self.records.extend(records)
        if self._store is not None:
            self._store.write(records)


def _workflow(run: Path, options: ReplayOptions) -> Workflow:
    described = read_run_json(run) if is_run(run) else read_trace(run)
    spec = options.workflow or known_workflow(described, run.absolute())
    if spec is None:
        remedy = "For example: cotune replay RUN --workflow app:solve --all"
        raise ConfigError(
            "workflow", None, "is missing, and the records do not say which application made them", remedy
        )
    if described:
        named = [name for name in ("workflow", "roles_by") if getattr(options, name)]
        open_run_code(run, named, only=("workflow", "roles_by", "redact"), described=described)
    config = placed_config(described, run.absolute()) if described else {}
    redact = redactor_of(run.absolute()) or config.get("redact", "")
    flow = load_workflow(spec).redacted(redact).named_by(options.roles_by or config.get("roles_by"))
    return flow.prompted(options.prompts or prompts_of(run))


def _episodes(store: Store, options: ReplayOptions) -> list[Episode]:
    """The episodes to run again: with `all`, those of the application itself that came to an outcome."""
    if options.episode is not None:
        return [store.episode(store.figures().episode_named(options.episode))]
    own = [e for e in store.episodes() if e.fork is None and e.phase not in ("check", JUDGING)]
    found = [episode for episode in own if episode.is_outcome and episode.calls]
    if not found:
        raise RecordError("The records have no episode that came to an end.", "See them with: cotune show.")
    return found[: options.limit]


def _planned(store: Store, episode: Episode, options: ReplayOptions) -> tuple[Seen, Replay | None]:
    calls = store.calls(episode.id)
    old = Seen(episode, calls, store.rewards([episode.id])[episode.id])
    if options.model is not None and options.call is None:
        return old, None
    if any(call.redacted for call in calls):
        raise RecordError(
            f"Episode {episode.id} cannot be repeated: a redactor changed what was stored of it.",
            "Choose another episode, or record without redactors.",
        )
    script = read_script(store, episode.id)
    if options.call is None:
        return old, Replay(script=script)
    at = options.call if options.episode or options.call < len(calls) else len(calls) - 1
    fork = next((call for call in calls if call.step == at), None)
    if fork is None:
        raise ConfigError(
            "call", at, f"is not a call of this episode, which has 0 to {len(calls) - 1}", "See cotune show --episode."
        )
    if not repeatable(calls, fork):
        bad = next(call for call in calls if call.status != "ok" and call.id != fork.id)
        raise ConfigError(
            "call",
            at,
            f"comes after call {bad.step} of role {bad.role!r}, which has no answer to repeat",
            f"Choose {bad.step} or an earlier call.",
        )
    return old, Replay(script=script, fork=fork.id, answer=_given(options.answer))


def _step(old: Seen, replay: Replay | None) -> int | None:
    """The step from which on an episode is new."""
    if replay is None:
        return 0
    return next((call.step for call in old.calls if call.id == replay.fork), None)


def _given(text: str | None) -> Answer | None:
    """The answer that the user gives."""
    if text is None:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": text}
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and found.keys() & {"content", "tool_calls"}:
            message = {"role": "assistant", "content": None, **found}
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    said = Candidate(index=0, text=str(message.get("content") or ""), message=message, finish_reason=finish)
    return Answer(candidates=(said,))
