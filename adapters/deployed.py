"""Runs an unchanged application on its trained role policies, in process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Token
from pathlib import Path
from typing import Any, TypedDict, Unpack

from cotune.adapters.bases import Moved
from cotune.adapters.conversations import LocalResponder
from cotune.adapters.open_policies import LocalPolicies, ServedModel, open_local
from cotune.adapters.prompts import prompts_for
from cotune.episodes.later_feedback import check_key
from cotune.episodes.run_sync import run_sync
from cotune.episodes.tracing import Trace
from cotune.errors import ConfigError, CotuneError
from cotune.near_names import check_arguments
from cotune.prompts.edits import Prompts
from cotune.recording.call_records import CallerContext
from cotune.recording.carrying import carry_context
from cotune.recording.context import current_episode, recording
from cotune.recording.hooks import hooks
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.recording.redaction import Redactor
from cotune.recording.roles import RolesFunction, roles_function
from cotune.records.structs import CallRecord, Record, Task


class RecordingOptions(TypedDict, total=False):
    """Where and how a deployment records its calls: keyword arguments of `cotune.deployed`."""

    records: str | Path | None
    app: str
    key: str
    redactor: Redactor | None


def deployed(
    source: str | Path | None = None,
    *,
    base: Moved = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    roles: RolesFunction | str | None = None,
    prompts: Prompts | str | Path | None = None,
    any_prompts: bool = False,
    **recording: Unpack[RecordingOptions],
) -> Deployment:
    """Answer every LLM call that the application makes inside by the policy of its role, from an export.

    Use it as `with` or `async with`. `base` is the base model where it lies elsewhere than the export says (of several,
    a mapping from the old place to the new one); `temperature` and `max_tokens` replace the application's settings;
    `roles` names the role of each call, as in training (`cotune.workflow`). Calls of roles that the export does not
    have are answered as its run was configured (`other_roles`): by the untrained model, or by the application's own
    provider. Each role is logged once and counted in `unlisted`, and where the provider answers in `passed_through`.

    Calls go out with the edited prompts that the export was trained with, if any, or with `prompts`: a file, or a
    folder that has one. Others than it was trained with are refused unless `any_prompts` is true. Without a `source`
    the application's own provider answers. `unedited` counts calls that do not have the texts that are edited.

    With `records`, the address of a store or of a collector (for the application `app`), the calls are recorded as
    those of a `cotune.trace`, with policy, version, token ids and log-probabilities, after `redactor`. The `with` is
    one episode, which the application calls `key` itself, and so is each `deployment.here(key=...)`.
    `deployment.trace` is the trace of the `with`.

    A `with` covers the code inside it, and threads and tasks started there. Elsewhere in the process (a web
    server's request handlers) use `with deployment.here():`. Raises AdapterError, ConfigError, SyncError.

    ```python
    with cotune.deployed("adapters/") as deployment:
        graph.invoke({"question": "2 + 2"})
    print(deployment.served)
    ```
    """
    check_arguments(recording, RecordingOptions.__annotations__)
    override = {"temperature": temperature, "max_tokens": max_tokens}
    given = {name: value for name, value in override.items() if value is not None}
    if source is None and prompts is None:
        raise ConfigError("source", None, "is missing", "Name an export, or pass prompts= for the provider to answer.")
    chosen = prompts_for(source, prompts, any_prompts=any_prompts)
    tracing = _tracing(**recording)
    return Deployment(source, base, given, roles_function(roles), chosen, tracing, check_key(recording.get("key", "")))


def _tracing(
    records: str | Path | None = None, app: str = "", key: str = "", redactor: Redactor | None = None
) -> Callable[..., Trace] | None:
    """What opens the trace of an episode; None where nothing is recorded."""
    if records is not None:
        return functools.partial(Trace, records, app=app, redactor=redactor)
    if key:
        raise ConfigError("key", key, "has no effect without records", "Pass records=, or leave it out.")
    return None


class Deployment:
    """Trained policies in this process. `served` has the policy of each role."""

    def __init__(
        self,
        source: str | Path | None,
        base: Moved,
        override: Mapping[str, Any],
        roles: RolesFunction | None,
        prompts: Prompts | None = None,
        tracing: Callable[..., Trace] | None = None,
        key: str = "",
    ) -> None:
        self.source = source
        self.calls: Counter[tuple[str, str]] = Counter()
        """Ended calls by (role, status)."""
        self.passed_through: Counter[str] = Counter()
        """Ended calls by role that the application's own provider answered."""
        self.unlisted: Counter[str] = Counter()
        """Ended calls by role that the export does not have, whoever answered."""
        self.unedited: Counter[tuple[str, str]] = Counter()
        """Ended calls by (role, reason) that went out as they were asked, although the prompts edit their role."""
        self.prompts = prompts
        """The edited prompts that calls go out with."""
        self.served: Mapping[str, ServedModel] = {}
        self._base = base
        self._override = override
        self._roles = roles
        self._opened = False
        self._local: LocalPolicies | None = None
        self._responder: LocalResponder | None = None
        self._lock = threading.Lock()
        self._entered: Token[LiveEpisode | None] | None = None
        self._tracing = tracing
        self._key = key
        self.trace: Trace | None = None
        """The trace of the `with`, where its calls are recorded."""

    @contextlib.contextmanager
    def here(self, *, task: Any = None, key: str = "") -> Iterator[Trace | None]:
        """Answer the calls made inside, in the current thread or task; the deployment must be open. Where calls are
        recorded, these are an episode of their own, of the `task`, whose trace is given, and which the application
        calls `key`."""
        with recording(self._episode()):
            if self._tracing is None:
                yield None
            else:
                with self._tracing(task=task, name="deployed", key=key) as trace:
                    yield trace

    def __enter__(self) -> Deployment:
        self._require_closed()
        self._ready(None if self.source is None else run_sync(open_local(self.source, base=self._base)))
        return self

    @property
    def version(self) -> str:
        """Which version of the export answers: `version 4 of 2026-11-29 12:30, run r1, step-000060`. Empty while the
        deployment is closed, and without an export."""
        return self._local.manifest.title if self._local and self._local.manifest else ""

    def __exit__(self, *exc: object) -> None:
        if (local := self._left(*exc)) is not None:
            run_sync(local.aclose())

    async def __aenter__(self) -> Deployment:
        self._require_closed()
        self._ready(None if self.source is None else await open_local(self.source, base=self._base))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if (local := self._left(*exc)) is not None:
            await local.aclose()

    def write(self, records: Sequence[Record]) -> None:
        """Count calls by how they ended, and keep nothing of them."""
        ended = [record for record in records if isinstance(record, CallRecord)]
        with self._lock:
            self.calls.update((call.role, call.status) for call in ended)
            self.unedited.update((call.role, call.unedited) for call in ended if call.unedited)
            outside = [call.role for call in ended if call.role not in self.served]
            left = () if self._local is None else self._local.left_to_provider
            if self.source is not None:
                self.unlisted.update(role for role in outside if role not in left)
            provided = self._local is None or self._local.others is None
            self.passed_through.update(role for role in outside if provided or role in left)

    def _require_closed(self) -> None:
        if self._opened:
            raise CotuneError(f"{self._name} is already deployed by this object.", "Use deployment.here() inside it.")

    @property
    def _name(self) -> str:
        return "This deployment" if self.source is None else str(self.source)

    def _ready(self, local: LocalPolicies | None) -> None:
        self._opened, self._local = True, local
        if local is not None:
            self.served = local.served
            self._responder = LocalResponder(local, self._override)
        for activate in hooks.activators:
            activate()
        carry_context(callers=self._roles is not None)
        self._entered = current_episode.set(self._episode())
        if self._tracing is not None:
            self.trace = self._tracing(name="deployed", key=self._key).__enter__()

    def _left(self, *exc: Any) -> LocalPolicies | None:
        assert self._opened and self._entered is not None
        self._opened = False
        if self.trace is not None:
            self.trace.__exit__(*exc)
        with contextlib.suppress(ValueError):  # entered in another context, where the variable stays as it is
            current_episode.reset(self._entered)
        local, self._local = self._local, None
        return local

    def _episode(self) -> LiveEpisode:
        if not self._opened:
            raise CotuneError(f"{self._name} is not open.", "Enter it first: with cotune.deployed(...) as deployment.")
        task = Task(id="deployed", input=None)
        made = _Unrecorded(
            self, task, workflow="deployed", responder=self._responder, roles=self._roles, prompts=self.prompts
        )
        made.tape.keeps = False
        return made


class _Unrecorded(LiveEpisode):
    """An episode without an end: each call is its own, so that nothing of earlier calls is kept."""

    def start(self, caller: CallerContext, body: Mapping[str, Any]) -> LiveCall:
        if self.forked:
            return super().start(caller, body)
        alone = LiveEpisode(
            self.sink,
            self.task,
            workflow=self.workflow,
            responder=self.responder,
            roles=self.roles,
        )
        alone.prompting = self.prompting
        return alone.start(caller, body)
